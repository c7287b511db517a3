//! The pure choice: which worker gets this request, and why. Runs on the core that has the request.
//!
//! Read in the order a request meets it: [`scan`] finds the fields that matter in the JSON body, [`chain`] makes the
//! prefix hashes of its prompt, [`decide`] chooses among the candidates, and [`lessons`] says what the owners of the
//! shards should learn of the choice. For a request served by a prefill and a decode worker, [`plan`] says whether it can
//! be, and what differs in the bodies of the two legs. No I/O, no clock, no randomness of its own: the state that random choices need
//! is one core's [`Turn`], seeded from outside.
//!
//! Invariants:
//! - R1 a worker that is not a candidate, or was tried already, is never chosen and influences nothing.
//! - R2 no choice favours an index: whatever is equal is settled by the random number.
//! - R3 [`Decision::seen`] is the load the choice was made on, so that the caller can reserve exactly that seat.
//! - R4 the same bytes under the same seed give the same hashes in every process on every machine.
//!
//! What can fail: only [`scan`], on a body that is not JSON; the exchange answers it with 400.

mod candidates;
mod key;
mod learn;
mod policy;
mod reason;
mod role;
mod scan;
mod splice;

pub use candidates::Candidates;
pub use key::{
    BLOCK_BYTES, HASHED_BYTES_MAX, KeySeed, LONG_BLOCK_BYTES, LONG_FROM_BLOCK, bytes_of_blocks,
    chain,
};
pub use learn::{Batches, lessons};
pub use policy::{
    Decision, Found, Loads, PolicyKind, Prefixes, Rng, Settings, TreePrefixes, Turn, decide,
};
pub use reason::Reason;
pub use role::Role;
pub use scan::{DEPTH_MAX, Field, Fields, ScanError, as_str, is_true, scan};
pub use splice::{
    LegPlan, PrefillAnswer, USAGE_EVENT_BYTES_MAX, UsageFilter, UsageFix, Whole, fix_usage, plan,
    read_prefill_answer, write_decode, write_prefill, write_release,
};
