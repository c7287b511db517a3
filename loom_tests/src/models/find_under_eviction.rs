//! S1, S2: while entries are evicted, and used again for other keys, a look-up sees a key's own holders or nothing.

use loom::thread;
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, block, forest, held, insert};
use super::model;

/// Blocks that all share the same two places: 0 and 1 are there first (0 the older), every other one evicts one.
fn rivals(mark: impl Fn(usize) -> u64) -> [u64; 4] {
    std::array::from_fn(|number| block([0, 1], false, mark(number), number))
}

/// Rival 0 has these holders; `newcomers` (rival, worker) come one after the other while a reader looks for one rival.
fn check(
    rivals: [u64; 4],
    first_holders: &'static [u16],
    newcomers: &'static [(usize, u16)],
    looked_for: usize,
) {
    model(move || {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(ONE_SEGMENT, 1);
        first_holders
            .iter()
            .for_each(|&worker| insert(&mut shard, worker, &[rivals[0]]));
        insert(&mut shard, 77, &[rivals[1]]);
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let seen = held(&theirs, &pin, rivals[looked_for]);
            let is_newcomer = newcomers
                .iter()
                .any(|(number, worker)| *number == looked_for && seen == [*worker]);
            let is_first = looked_for == 0 && seen == first_holders;
            assert!(
                seen.is_empty() || is_newcomer || is_first,
                "{looked_for}: {seen:?}"
            );
            drop(pin);
            reader
        });
        newcomers
            .iter()
            .for_each(|&(number, worker)| insert(&mut shard, worker, &[rivals[number]]));
        let _reader = thread.join().unwrap();
        assert_eq!(
            tree.evicted_count(),
            newcomers.len() as u64,
            "the model wants evictions"
        );
        while shard.work(1) {}
    });
}

fn same_mark() -> [u64; 4] {
    rivals(|_| 0)
}

#[test]
fn the_old_key_is_looked_for() {
    check(same_mark(), &[10], &[(2, 12)], 0);
}

#[test]
fn the_new_key_is_looked_for() {
    check(same_mark(), &[10], &[(2, 12)], 2);
}

#[test]
fn a_list_is_freed() {
    check(same_mark(), &[10, 20, 30, 190], &[(2, 12), (3, 13)], 0);
}

/// An entry that goes from one key to another and back, under a reader that stands still in between: the mark.
#[test]
fn a_key_comes_back() {
    check(
        rivals(|number| number as u64),
        &[10],
        &[(2, 12), (3, 13), (0, 11)],
        0,
    );
}
