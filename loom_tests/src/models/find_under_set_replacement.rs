//! T1, H1: a look-up while a holder set changes its form sees the old set or the new one, and no freed memory.

use loom::thread;
use shards::Shard;
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, forest, held, insert};
use super::model;

/// `before` hold the block; `change` goes on while a reader looks. It may see any set that `may_see` takes.
fn check(
    before: &'static [u16],
    bytes_max: usize,
    change: impl Fn(&mut Shard) + Copy + Send + Sync + 'static,
    may_see: impl Fn(&[u16]) -> bool + Copy + Send + Sync + 'static,
) {
    model(move || {
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
        assert!(
            after.len() == before.len() + 2 && may_see(&after),
            "{after:?}"
        );
        drop(pin);
        while shard.work(1) {}
    });
}

#[test]
fn word_to_list_to_longer_list() {
    // Bitmaps of slots above 128 are larger than short lists.
    check(
        &[10, 20, 190],
        ONE_SEGMENT,
        |shard| {
            insert(shard, 15, &[1]);
            insert(shard, 25, &[1]);
        },
        |seen| {
            matches!(
                seen,
                [10, 20, 190] | [10, 15, 20, 190] | [10, 15, 20, 25, 190]
            )
        },
    );
}

#[test]
fn bits_set_in_place_and_a_longer_bitmap() {
    // Thirteen slots below 64: a bitmap of one word is smaller than the list.
    check(
        &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        2 * ONE_SEGMENT,
        |shard| {
            insert(shard, 20, &[1]);
            insert(shard, 150, &[1]);
        },
        |seen| match seen {
            [0, .., 12] => seen.len() == 13,
            [0, .., 12, 20] => seen.len() == 14,
            [0, .., 12, 20, 150] => seen.len() == 15,
            _ => false,
        },
    );
}
