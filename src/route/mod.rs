//! The pure choice: which worker gets this request, and why. Runs on the core that has the request.
//!
//! Read in the order a request meets it: [`scan`] finds the fields that matter in the JSON body, [`chain`] makes the
//! prefix hashes of its prompt (or, under a policy that hashes, [`session_hash`] or [`prefix_hash`] its one key; under `kv_aware` also [`block_chain`] the keys of its token blocks, about which [`Index`] is asked), [`decide`] chooses among the candidates, and [`lessons`] says what the owners of the
//! shards should learn of the choice. For a request served by a prefill and a decode worker, [`plan`] says whether it can
//! be, and what differs in the bodies of the two legs. No I/O, no clock, no randomness of its own: the state that random choices need
//! is one core's [`Turn`], seeded from outside.
//!
//! Invariants:
//! - R1 a worker that is not a candidate, or was tried already, is never chosen and influences nothing.
//! - R2 no choice favours an index: whatever is equal is settled by the random number.
//! - R3 [`Decision::seen`] is the load the choice was made on, so that the caller can reserve exactly that seat.
//! - R4 the same bytes under the same seed give the same hashes in every process on every machine.
//! - R5 under a policy that hashes, a key's worker depends on the key and on the workers' URLs alone.
//!
//! What can fail: only [`scan`], on a body that is not JSON; the exchange answers it with 400.

mod candidates;
mod hashed;
mod index;
mod key;
mod kv_aware;
mod learn;
mod policy;
mod reason;
mod role;
mod scan;
mod session;
mod splice;
mod tokens;
mod wait;

pub use candidates::{Candidates, RING_POINTS, name_of};
pub use hashed::{Home, home_for_new};
pub use index::{Credits, DEVICE, DISK, EXTERNAL, HOST, Holdings, Index, Trust, key_in};
pub use key::{
    BLOCK_BYTES, HASHED_BYTES_MAX, KeySeed, LONG_BLOCK_BYTES, LONG_FROM_BLOCK, bytes_of_blocks,
    chain, prefix_hash,
};
pub use kv_aware::{Tokens, has_even_share};
pub use learn::{Batches, lessons};
pub use policy::{
    Decision, Found, Key, Loads, PolicyKind, Prefixes, Rng, Settings, TOKEN_BYTES, TreePrefixes,
    Turn, Wanted, decide,
};
pub use reason::Reason;
pub use role::Role;
pub use scan::{DEPTH_MAX, Field, Fields, ScanError, as_str, is_true, scan};
pub use session::{session_hash, session_hash_of};
pub use splice::{
    LegPlan, PrefillAnswer, USAGE_EVENT_BYTES_MAX, UsageFilter, UsageFix, Whole, fix_usage, plan,
    read_prefill_answer, write_decode, write_prefill, write_release,
};
pub use tokens::{
    BlockKeys, TOKEN_COUNT_MAX, block_chain, is_text, request_chain, salt_of, token_ids,
};
pub use wait::{Sample, Waits};
