//! T1, T2 while a segment is split: a look-up finds every block that was there, and the old segment is not freed under it.

use loom::thread;
use std::sync::Arc;

use super::forest::{Forest, TWO_SEGMENTS, block, forest, held, insert};
use super::model;

/// Two blocks fill the two places of a third one, which splits the segment.
fn blocks() -> [u64; 3] {
    [
        block([0, 1], false, 0, 0),
        block([0, 1], true, 0, 0),
        block([0, 1], false, 0, 1),
    ]
}

#[test]
fn every_block_is_found_all_the_time() {
    model(|| {
        let [low, high, newcomer] = blocks();
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(TWO_SEGMENTS, 1);
        insert(&mut shard, 1, &[low]);
        insert(&mut shard, 2, &[high]);
        let before_bytes = tree.bytes();
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            assert_eq!(held(&theirs, &pin, low), [1]);
            assert_eq!(held(&theirs, &pin, high), [2]);
            drop(pin);
            reader
        });
        insert(&mut shard, 3, &[newcomer]);
        assert!(tree.bytes() > before_bytes, "the model wants a split");
        let mut reader = thread.join().unwrap();
        let pin = reader.pin();
        assert_eq!(
            [low, high, newcomer].map(|hash| held(&tree, &pin, hash)),
            [[1], [2], [3]]
        );
        drop(pin);
        while shard.work(1) {}
    });
}

/// A list that the old segment and the new one both point to is replaced right after the split.
#[test]
fn a_list_of_a_split_segment_is_replaced() {
    model(|| {
        let [low, high, newcomer] = blocks();
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(TWO_SEGMENTS, 1);
        [10, 20, 30, 190]
            .iter()
            .for_each(|&worker| insert(&mut shard, worker, &[low]));
        insert(&mut shard, 2, &[high]);
        let before_bytes = tree.bytes();
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let seen = held(&theirs, &pin, low);
            assert!(
                seen == [10, 20, 30, 190] || seen == [10, 20, 30, 40, 190],
                "{seen:?}"
            );
            drop(pin);
            reader
        });
        insert(&mut shard, 3, &[newcomer]);
        assert!(tree.bytes() > before_bytes, "the model wants a split");
        insert(&mut shard, 40, &[low]);
        let _reader = thread.join().unwrap();
        while shard.work(1) {}
    });
}
