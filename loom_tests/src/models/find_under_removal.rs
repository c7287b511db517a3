//! T1, S1, S2, H1: a look-up while an engine lets blocks go sees those who held them before or after, and no freed memory.

use loom::thread;
use shards::{Lesson, PrefixHash, Shard, Slot};
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, forest, held, insert, look_twice_during};
use super::model;

fn remove(shard: &mut Shard, worker: u16, hash: u64) {
    let hashes = [PrefixHash(hash)].into();
    shard.apply(Lesson::Remove {
        worker: Slot(worker),
        hashes,
    });
    while shard.work(8) {}
}

/// `before` hold the block; those of `leaving` go, one after the other, while a reader looks twice.
fn check(before: &'static [u16], bytes_max: usize, leaving: &'static [u16]) {
    let change = |shard: &mut Shard| {
        leaving.iter().for_each(|&worker| remove(shard, worker, 1));
    };
    let may_see = |seen: &[u16]| {
        (0..=leaving.len()).any(|gone| {
            let stay = |worker: &u16| !leaving[..gone].contains(worker);
            before.iter().copied().filter(stay).eq(seen.iter().copied())
        })
    };
    let after_count = before.len() - leaving.len();
    look_twice_during(before, bytes_max, change, may_see, after_count);
}

#[test]
fn the_last_holder_leaves_and_the_block_with_it() {
    check(&[5, 7], ONE_SEGMENT, &[7, 5]);
}

#[test]
fn a_list_becomes_a_word() {
    check(&[10, 20, 30, 190], ONE_SEGMENT, &[20, 10]);
}

/// A key that was let go and comes back with another holder is never seen with the old one's.
#[test]
fn a_block_goes_and_comes_back() {
    model(|| {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(ONE_SEGMENT, 1);
        insert(&mut shard, 5, &[1]);
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let seen = held(&theirs, &pin, 1);
            assert!(seen.is_empty() || seen == [5] || seen == [6], "{seen:?}");
            drop(pin);
            reader
        });
        remove(&mut shard, 5, 1);
        insert(&mut shard, 6, &[1]);
        let mut reader = thread.join().unwrap();
        let pin = reader.pin();
        assert_eq!(held(&tree, &pin, 1), [6]);
        drop(pin);
    });
}
