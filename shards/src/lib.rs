//! What the cores of Corelane share: books of load, the prefix tree, mailboxes, doorbells, published snapshots, counters.
//! No runtime, no sockets, no clock, no randomness; no locks. Every write has one owner or is one step of one atomic.
//!
//! | module | what | who writes | who reads |
//! |---|---|---|---|
//! | `addresses` | connections by address | any core | any core |
//! | `ids` | slots, workers, prefix hashes | | |
//! | `load` | in-flight counts, owned by [`LoadGuard`]s | any core | any core |
//! | `gate` | who runs, who waits, and who is next | any core; each core its head | any core |
//! | `bucket` | how many may begin in a second | any core | any core |
//! | `epoch` | pins, and bins of what they may still see | each core its seat | owners of bins |
//! | `publish` | a value replaced whole | one publisher | any core |
//! | `mailbox` | a bounded ring between two cores | its two ends | its two ends |
//! | `names` | what an engine calls its blocks | its owner | its owner |
//! | `doorbell` | "is the owner asleep?" | owner and senders | senders |
//! | `counters` | counters, gauges, histograms | one core | anyone |
//! | `tree` | which worker holds which prefix; one learns from requests, one (the index) from engines' events | each shard its owner | any core |
//! | `sessions` | which worker a session is bound to | any core | any core |
//!
//! # All atomics
//!
//! "Own" is the thread that owns the thing; R, A, L, AR stand for Relaxed, Acquire, Release, AcqRel. Invariants are on top of the
//! files. Models are in `loom_tests/src/models`, run by `cargo loom`. loom treats `SeqCst` accesses as AR, so wherever a
//! total order is meant there is a fence.
//!
//! | atomic | writers | readers | orderings | invariant | model |
//! |---|---|---|---|---|---|
//! | `Books::words` | control (open, close), any guard | any core | acquire A; release L; open AR; close, `in_flight` R; `is_drained`, `load` A | B1-B5 | `guard_counts_exactly`, `guard_seat_is_taken_once`, `incarnations_stay_apart` |
//! | `Tally::{waiting, active, active_bytes}`, `Books::waiting_bytes` | any guard | gauges, policies | R, carried by the word | B5, B6 | `guard_counts_exactly` |
//! | `Books::underflow_count` | any guard | gauges | R | B2 | `guard_ends_once` |
//! | `Claim::phase` | the guards of one count | the same | activate R, then L/A; release AR | B1, B6 | `guard_ends_once` |
//! | the `Arc` of a claim | the guards of one count | | the Arc's own | B1 | `guard_ends_once` |
//! | `Addresses::rows` | any core | any core | R with a SeqCst fence | A1, A2 | `addresses_keep_their_limit` |
//! | `Gate::word`, `tickets` | any core | any core, gauges | R | G1, G2, G4 | `gate_lets_in_the_next` |
//! | `Gate::heads` | own core; claimed by any | any core | R with SeqCst fences | G1, G3 | `gate_lets_in_the_next` |
//! | `Bucket::full_at_ns` | any core, control | the same | R | A1 | `bucket_holds_so_many` |
//! | `Domain::global` | owners of bins | readers | add L; load R, then fence SeqCst | E1 | `epoch_frees_nothing_in_use` |
//! | `Seat::epoch` | own reader | owners of bins | pin L, fence SeqCst; unpin L; scan fence SeqCst, A | E1, E2 | `epoch_frees_nothing_in_use` |
//! | `Seat::taken` | reader handles | the same | swap A; store L | one reader per seat | (a lock of its own, at start) |
//! | `Published::current` | publisher | any core | swap L; load A | P1 | `publish_gives_whole_values` |
//! | `Published::version` | publisher | any core | store L; load A | P2 | `publish_gives_whole_values` |
//! | `Ring::tail` | sender | receiver | store L; load A | M1, M2 | `mailbox_keeps_order` |
//! | `Ring::head` | receiver | sender | store L; load A | M2 | `mailbox_keeps_order` |
//! | `Doorbell::asleep` | owner, ringing senders | senders | R with SeqCst fences; swap R | D1 | `doorbell_loses_no_wake_up` |
//! | `Counter`, `Gauge` | own | gauges | R | none hangs on them | (none) |
//! | `View::directory` | own shard | any core | store L; load A | T1, T2 | `find_under_split`, `find_under_clear_and_purge` |
//! | `View::newest` | own shard | any core | R | (a hint) | (none) |
//! | `Entry::tag` | own shard | any core | fill L; erase R; find A, second look R | S1, S2 | `find_under_insert`, `find_under_eviction`, `find_under_moves` |
//! | `Entry::value` | own shard | any core | store L; load A | S1, S2 | `find_under_set_replacement`, `find_under_eviction`, `find_under_removal` |
//! | `Sessions::words` | any core | any core | R; a SeqCst fence between a binding and the look after it | N1, N2 | `sessions_agree` |
//! | `Sessions::counts` | any core | any core | R | N3 | `sessions_agree` |
//! | bitmap words | own shard | any core | R | H1 | `find_under_set_replacement`, `find_under_removal` |
#![deny(missing_docs)]

mod addresses;
mod bucket;
mod counters;
mod doorbell;
mod epoch;
mod gate;
mod ids;
mod load;
mod mailbox;
mod names;
mod publish;
mod sessions;
mod sync;
#[cfg(all(test, not(loom)))]
mod testing;
mod tree;

pub use addresses::{Addresses, Counted};
pub use bucket::{Bucket, Refill};
pub use counters::{Counter, Gauge, Histogram, HistogramSnapshot};
pub use doorbell::Doorbell;
pub use epoch::{Bin, Domain, Pin, Reader};
pub use gate::{Entry, Gate, Permit};
pub use ids::{PrefixHash, SLOT_COUNT_MAX, Slot, SlotSet, WorkerId};
pub use load::{Books, Load, LoadGuard};
pub use mailbox::{Receiver, Sender, mailbox};
pub use names::{BLOCK_KEY_BITS, BlockNames, Change, TIER_COUNT};
pub use publish::{Published, Publisher, published};
pub use sessions::{Now, Sessions};
pub use tree::{Lesson, Match, Shard, Tree, TreeLimits, split_by_owner, tree};
