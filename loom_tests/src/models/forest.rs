//! What the models of the tree share: a tree of one shard, and hashes that go where a model wants them.

use std::sync::Arc;

use loom::thread;
use shards::{Domain, Lesson, Pin, PrefixHash, Reader, Shard, Slot, Tree, TreeLimits};

/// Bytes for one segment and one short list.
pub const ONE_SEGMENT: usize = 127;
/// Bytes for two segments and two short lists.
pub const TWO_SEGMENTS: usize = 279;

pub struct Forest {
    pub tree: Arc<Tree>,
    pub shard: Shard,
    pub readers: Vec<Reader>,
}

/// A tree of one shard with readers for so many threads.
pub fn forest(bytes_max: usize, reader_count: usize) -> Forest {
    let domain = Arc::new(Domain::new(reader_count));
    let limits = TreeLimits {
        bytes_max,
        slot_count_max: 200,
    };
    let (tree, mut shards) = shards::tree(1, Arc::clone(&domain), limits);
    let readers = (0..reader_count)
        .map(|index| domain.reader(index))
        .collect();
    Forest {
        tree,
        shard: shards.remove(0),
        readers,
    }
}

/// The `nth` hash that may be in these two buckets (of four, tried in this order), in the upper or lower half of the
/// directory, with this mark. Blocks of one mark leave everything to the order of loads and stores. Repeats the mixing of
/// `shards/src/tree/spread.rs`.
pub fn block(buckets: [u64; 2], is_upper: bool, mark: u64, nth: usize) -> u64 {
    let is_there = |hash: &u64| {
        let mixed = mix(*hash);
        let is_half = (mixed >> 63 == 1) == is_upper;
        let first = mixed % 4;
        [first, first ^ ((mixed >> 32) % 4).max(1)] == buckets
            && is_half
            && (mixed >> 11) % 128 == mark
    };
    (1..).filter(is_there).nth(nth).unwrap()
}

fn mix(hash: u64) -> u64 {
    let mut m = hash;
    m = (m ^ (m >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    m = (m ^ (m >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    m ^ (m >> 31)
}

/// `before` hold the block 1; `change` goes on while a reader looks twice. It may see any holders that `may_see` takes, and
/// in the end so many hold it.
pub fn look_twice_during(
    before: &'static [u16],
    bytes_max: usize,
    change: impl Fn(&mut Shard) + Copy + Send + Sync + 'static,
    may_see: impl Fn(&[u16]) -> bool + Copy + Send + Sync + 'static,
    after_count: usize,
) {
    super::model(move || {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(bytes_max, 1);
        before
            .iter()
            .for_each(|&worker| insert(&mut shard, worker, &[1]));
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            for _ in 0..2 {
                let seen = held(&theirs, &pin, 1);
                assert!(may_see(&seen), "{seen:?}");
            }
            drop(pin);
            reader
        });
        change(&mut shard);
        let mut reader = thread.join().unwrap();
        let pin = reader.pin();
        let after = held(&tree, &pin, 1);
        assert!(after.len() == after_count && may_see(&after), "{after:?}");
        drop(pin);
        while shard.work(1) {}
    });
}

pub fn insert(shard: &mut Shard, worker: u16, hashes: &[u64]) {
    let hashes = hashes.iter().copied().map(PrefixHash).collect();
    shard.apply(Lesson::Insert {
        worker: Slot(worker),
        hashes,
    });
    while shard.work(8) {}
}

pub fn purge(shard: &mut Shard, worker: u16) {
    shard.apply(Lesson::Purge {
        worker: Slot(worker),
    });
    while shard.work(8) {}
}

/// The holders of a block; none: not found.
pub fn held(tree: &Tree, pin: &Pin<'_>, hash: u64) -> Vec<u16> {
    let found = tree.find(pin, &[PrefixHash(hash)], |_| true);
    found.map_or(vec![], |found| found.holders().map(|slot| slot.0).collect())
}
