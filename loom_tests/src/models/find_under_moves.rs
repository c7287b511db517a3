//! S1 when a key moves to its other bucket to make room: a look-up sees its holders or (once) nothing.

use loom::thread;
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, block, forest, held, insert};
use super::model;

/// While `newcomer` comes, `mover` has to move (and must not be evicted); a reader looks for one of them.
fn check(mover: u64, neighbours: &'static [u64], newcomer: u64, looked_for: u64) {
    model(move || {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(ONE_SEGMENT, 1);
        [10, 20, 30, 190]
            .iter()
            .for_each(|&worker| insert(&mut shard, worker, &[mover]));
        neighbours
            .iter()
            .for_each(|&neighbour| insert(&mut shard, 50, &[neighbour]));
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let seen = held(&theirs, &pin, looked_for);
            let is_mover =
                looked_for == mover && (seen == [10, 20, 30, 190] || seen == [10, 20, 30, 40, 190]);
            let is_newcomer = looked_for == newcomer && seen == [60];
            assert!(seen.is_empty() || is_mover || is_newcomer, "{seen:?}");
            drop(pin);
            reader
        });
        insert(&mut shard, 60, &[newcomer]);
        // The moved entry's list is replaced: the old place must not lead to it any more.
        insert(&mut shard, 40, &[mover]);
        let mut reader = thread.join().unwrap();
        assert_eq!(tree.evicted_count(), 0, "the model wants a move");
        let pin = reader.pin();
        assert_eq!(held(&tree, &pin, mover), [10, 20, 30, 40, 190]);
        assert_eq!(held(&tree, &pin, newcomer), [60]);
        drop(pin);
        while shard.work(1) {}
    });
}

fn check_one_move(looked_for: impl Fn(u64, u64) -> u64) {
    let mover = block([0, 2], false, 0, 0);
    let newcomer = block([0, 1], false, 0, 0);
    let neighbours = vec![block([1, 3], false, 0, 0)].leak();
    check(mover, neighbours, newcomer, looked_for(mover, newcomer));
}

#[test]
fn the_moved_key_is_looked_for() {
    check_one_move(|mover, _| mover);
}

#[test]
fn the_new_key_is_looked_for() {
    check_one_move(|_, newcomer| newcomer);
}
