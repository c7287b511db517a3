//! `corelane bench`: load on a router or a worker, every answer checked, times as the client sees them; or two side by side.
//!
//! It runs on parts of the data plane (its ring, its parsers), one pinned thread with one ring, so that it costs less than what it
//! measures; and it says when that was not so. Read it in this order: `cli` (the flags), `schedule` and `work` (when, and what is asked),
//! `generator` (the connections of one thread), `check` (whether an answer is right), `tally` (what is counted), `crew` (threads),
//! `compare` (two targets in alternating slices), `report` and `page` (what is said).

mod check;
mod cli;
mod compare;
mod crew;
mod generator;
mod machine;
mod page;
mod report;
mod schedule;
mod tally;
mod target;
mod work;

pub use cli::BenchArgs;
