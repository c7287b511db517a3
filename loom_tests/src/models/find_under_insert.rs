//! T1, S1: a look-up during an insert finds a part of the chain, with the right holder, or nothing.

use loom::thread;
use shards::PrefixHash;
use std::sync::Arc;

use super::forest::{Forest, ONE_SEGMENT, block, forest, held, insert};
use super::model;

#[test]
fn a_new_chain() {
    // With mark 0 an empty entry's value would pass for a holder set.
    let [first, second] = [0, 1].map(|nth| block([0, 1], false, 0, nth));
    model(move || {
        let Forest {
            tree,
            mut shard,
            mut readers,
        } = forest(ONE_SEGMENT, 1);
        let mut reader = readers.remove(0);
        let theirs = Arc::clone(&tree);
        let thread = thread::spawn(move || {
            let pin = reader.pin();
            let found = theirs.find(&pin, &[PrefixHash(first), PrefixHash(second)], |_| true);
            if let Some(found) = found {
                let holders: Vec<u16> = found.holders().map(|slot| slot.0).collect();
                assert_eq!(holders, [5]);
                assert!((1..=2).contains(&found.blocks) && !found.is_fork());
            }
            drop(pin);
            reader
        });
        insert(&mut shard, 5, &[first, second]);
        let mut reader = thread.join().unwrap();
        let pin = reader.pin();
        assert_eq!(
            [first, second].map(|hash| held(&tree, &pin, hash)),
            [[5], [5]]
        );
        drop(pin);
    });
}

/// A further holder of a known block, in the word.
#[test]
fn a_further_holder() {
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
            let holders = held(&theirs, &pin, 1);
            assert!(holders == [5] || holders == [3, 5], "{holders:?}");
            let again = held(&theirs, &pin, 1);
            assert!(again.len() >= holders.len(), "a holder has gone");
            drop(pin);
            reader
        });
        insert(&mut shard, 3, &[1]);
        let _reader = thread.join().unwrap();
    });
}
