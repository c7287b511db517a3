//! What a request teaches the tree. Made by route after the decision, sent to the owners, applied by them.

use super::Tree;
use crate::ids::{PrefixHash, Slot};

/// One batch for one owner; hashes of other shards must not be in it (they would be stored where nobody looks).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lesson {
    /// The worker now holds these blocks; they count as used.
    Insert {
        /// Who holds them.
        worker: Slot,
        /// The blocks, each owned by this shard.
        hashes: Vec<PrefixHash>,
    },
    /// The worker holds these blocks no more: its engine said so. What it did not hold is passed over.
    Remove {
        /// Who held them.
        worker: Slot,
        /// The blocks, each owned by this shard.
        hashes: Vec<PrefixHash>,
    },
    /// These blocks were used again: their age becomes the newest.
    Touch {
        /// The blocks, each owned by this shard.
        hashes: Vec<PrefixHash>,
    },
    /// A new continuation of this block has been learnt; counted up to three.
    Branch {
        /// The block that goes on.
        parent: PrefixHash,
    },
    /// The worker is removed: forget it everywhere in this shard.
    Purge {
        /// Who is removed.
        worker: Slot,
    },
}

/// Appends every hash to the batch of its owner; `out` has one batch per shard.
pub fn split_by_owner(tree: &Tree, hashes: &[PrefixHash], out: &mut [Vec<PrefixHash>]) {
    for &hash in hashes {
        out[tree.owner(hash)].push(hash);
    }
}
