//! T1 while a worker is purged, or all is cleared: a look-up sees the holders before or after, and no freed memory.

use loom::thread;
use shards::{Shard, Slot};
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, forest, held, insert, purge};
use super::model;

fn check(change: impl Fn(&mut Shard) + Copy + Send + Sync + 'static, after: &'static [u16]) {
    const BEFORE: [u16; 4] = [10, 20, 30, 190];
    model(move || {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(ONE_SEGMENT, 1);
        BEFORE
            .iter()
            .for_each(|&worker| insert(&mut shard, worker, &[1]));
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let seen = held(&theirs, &pin, 1);
            assert!(seen == BEFORE || seen == after, "{seen:?}");
            drop(pin);
            reader
        });
        change(&mut shard);
        assert!(shard.purged(Slot(20)));
        let mut reader = thread.join().unwrap();
        let pin = reader.pin();
        assert_eq!(held(&tree, &pin, 1), after);
        drop(pin);
        while shard.work(1) {}
    });
}

#[test]
fn a_purge() {
    check(|shard| purge(shard, 20), &[10, 30, 190]);
}

#[test]
fn a_clear() {
    check(
        |shard| {
            shard.clear();
            shard.work(1);
        },
        &[],
    );
}
