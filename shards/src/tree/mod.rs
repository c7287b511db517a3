//! The prefix tree: which workers (probably) hold which prompt prefix. A node is a block's chained prefix hash; its
//! content is the set of workers that hold that prefix, and an age. Split into shards by hash: each is written by the one
//! core that owns it ([`Shard`]) and read by every core without a lock and without a hop ([`Tree`], under a pin).
//!
//! Per shard an extendible hash table: the hash's top bits choose a directory entry, that points to a segment of 64 KiB,
//! in which two buckets of one cache line may hold the key. A full segment is split while the byte budget lasts; after
//! that the oldest of a key's ten candidate entries is replaced.
//!
//! A block is known by 49 bits of its hash besides its owner. Two that agree in them are one block to the tree: a block that is not
//! there is found once in 2^48 / (blocks of the shard) look-ups, one in 30 million with 8 million blocks.
//!
//! Invariants (S1, S2 in `segment.rs`, H1 in `holders.rs`):
//! - T1 a reader never sees a holder set that the block did not have, and never freed memory;
//! - T2 without evictions a look-up gives exactly the deepest match; with them perhaps a shallower one, never a wrong one (but
//!   for blocks that are one to it, above);
//! - T3 a shard stays within its part of `bytes_max` (but for one segment, its least);
//! - T4 what is used again and again survives any flood of what is used once;
//! - T5 one call of [`Shard::work`] does a bounded amount of work.
//!
//! The tree is advice: whatever is lost costs a cache miss on a worker, not a request.

mod find;
mod garbage;
mod holders;
mod lesson;
mod room;
mod segment;
mod sets;
mod shard;
mod spread;
mod sweep;
mod table;
#[cfg(all(test, not(loom)))]
mod tests;
mod thin;
mod view;
mod word;

pub use find::Match;
pub use lesson::{Lesson, split_by_owner};
pub use shard::Shard;

use self::garbage::Garbage;
use self::spread::Spread;
use self::table::Table;
use self::view::View;
use crate::epoch::{Bin, Domain};
use crate::ids::{PrefixHash, SLOT_COUNT_MAX};
use crate::sync::Arc;

/// How large a tree may become.
#[derive(Clone, Copy, Debug)]
pub struct TreeLimits {
    /// Bytes of all shards together: segments, lists, bitmaps, directories. Each shard gets an equal part, and no less than
    /// one segment (64 KiB) with its directory.
    pub bytes_max: usize,
    /// Slots that may hold blocks; lessons about others are ignored. At most [`SLOT_COUNT_MAX`].
    pub slot_count_max: usize,
}

/// All shards, the read side. `Sync`.
pub struct Tree {
    views: Box<[View]>,
    domain: Arc<Domain>,
}

/// A tree of `core_count` shards; the shards are in the order of [`Tree::owner`].
///
/// # Panics
/// If `core_count` is 0 or `slot_count_max` above [`SLOT_COUNT_MAX`].
pub fn tree(core_count: usize, domain: Arc<Domain>, limits: TreeLimits) -> (Arc<Tree>, Vec<Shard>) {
    assert!(core_count > 0, "a tree has at least one shard");
    assert!(
        limits.slot_count_max <= SLOT_COUNT_MAX,
        "more slots than {SLOT_COUNT_MAX}"
    );
    let shape = table::Shape::of(limits.bytes_max / core_count);
    let views = (0..core_count)
        .map(|_| View::new(shape.directory_bits))
        .collect();
    let tree = Arc::new(Tree {
        views,
        domain: Arc::clone(&domain),
    });
    let shard = |index| {
        let table = Table::new(shape, limits.slot_count_max, Bin::new(Arc::clone(&domain)));
        Shard::new(Arc::clone(&tree), index, table)
    };
    let shards = (0..core_count).map(shard).collect();
    (tree, shards)
}

impl Tree {
    /// Which shard a block belongs to.
    #[must_use]
    pub fn owner(&self, hash: PrefixHash) -> usize {
        Spread::of(hash).owner(self.views.len())
    }

    /// Bytes of all shards: segments, lists, bitmaps, directories.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.views
            .iter()
            .map(|view| view.sums.bytes.value() as usize)
            .sum()
    }

    /// Blocks known.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.views
            .iter()
            .map(|view| view.sums.node_count.value() as usize)
            .sum()
    }

    /// (Block, worker) pairs known.
    #[must_use]
    pub fn membership_count(&self) -> usize {
        self.views
            .iter()
            .map(|view| view.sums.membership_count.value() as usize)
            .sum()
    }

    /// Blocks forgotten to make room, since the start.
    #[must_use]
    pub fn evicted_count(&self) -> u64 {
        self.views
            .iter()
            .map(|view| view.sums.evicted_count.value())
            .sum()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // A match may outlive the tree (it lives as long as its pin), so even the last segments go through a bin.
        let mut bin = Bin::new(Arc::clone(&self.domain));
        for view in &self.views {
            view.each_segment(|segment| bin.retire(Garbage::Full(segment)));
        }
    }
}
