//! `corelane sim`: what another policy would do. Fleets of simulated workers behind Corelane's real policies, books and
//! prefix tree, in one thread, on a clock that is told; the same seed gives the same output to the byte.
//!
//! Read it in this order: [`workload`] (who sends what; [`trace`] reads it from files, [`replay`] from a live router's decision log), [`router`] with [`policy`] (the real
//! code, the gate that failed, and the formulas of other routers), [`engine`] with [`kv`] (a vLLM worker, as far as a router
//! can tell), [`world`] (all put together), [`tally`] (what is counted). [`knees`] says how far a policy goes on the workloads of [`set`]. `report` and `page` show it, `judge` is the control
//! plane's detection. [`swe_bench_pro`] is the experiment that this router began with.
//!
//! It runs on the thread that calls it and touches nothing of a running router.

pub mod agenda;
mod cli;
pub mod content;
pub mod engine;
mod formula;
pub mod gray;
mod judge;
pub mod knees;
pub mod kv;
mod page;
pub mod policy;
pub mod replay;
mod report;
pub mod router;
pub mod set;
pub mod swe_bench_pro;
pub mod tally;
pub mod trace;
pub mod workload;
pub mod world;

pub use cli::SimArgs;
pub(crate) use cli::above_zero;
