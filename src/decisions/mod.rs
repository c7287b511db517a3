//! What was decided, and what came of it: for a file from which the simulator can ask what another policy would have done,
//! for `/debug/decisions`, and for a request that asks about itself.
//!
//! ```text
//!   choose --> Decided --+--> Recent, a ring of this core's (the last --debug-decisions-count): /debug/decisions
//!                        +--> Pen, a mailbox of this core's (--decision-log) --> one thread --> file --> corelane sim --replay
//!   finish --> Ended ----+
//! ```
//!
//! A core copies some hundred bytes into memory that is there already: nothing allocates, nothing waits. What finds the
//! mailbox full is dropped and counted. Neither ring nor file holds a byte of a prompt: [`Sketch`] says by hashes how far
//! two prompts are the same.
//!
//! Invariants:
//! - **D1** A record in the file is whole and passes its check, or is not read: [`read()`] never panics, whatever the bytes.
//! - **D2** A worker's URL stands in the file before the first decision for it.

mod explain;
mod log;
mod read;
mod recent;
mod record;
mod sketch;

pub use explain::{decided_json, ended_json};
pub use log::{DecisionLog, Pen, start, unix_us};
pub use read::{Damage, LogFile, read};
pub use recent::{Recent, Remembered};
pub use record::{
    Decided, Ended, GivenUp, HELD_COUNT_MAX, Header, Held, RECORD_BYTES_MAX, TRIAL, VERSION,
    WorkerRow, push_decided, push_ended, push_header, push_worker,
};
pub use sketch::{GRID, Sketch};

/// What a request is found by: a hash of the id that its client knows it by.
pub fn request_hash(request_id: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(request_id)
}

#[cfg(test)]
mod tests;
