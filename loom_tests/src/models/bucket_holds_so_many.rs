//! A1: of two that come for the last token one gets it, and what is given back can be taken once more.

use loom::sync::Arc;
use loom::thread;
use shards::{Bucket, Refill};

use super::model;

const ONE: Refill = Refill {
    interval_ns: 10,
    size: 1,
};

#[test]
fn two_come_for_one_token() {
    model(|| {
        let bucket = Arc::new(Bucket::new());
        let theirs = Arc::clone(&bucket);
        let thread = thread::spawn(move || theirs.take(5, ONE));
        let mine = bucket.take(5, ONE);
        let their = thread.join().unwrap();
        assert!(mine != their, "one of them");
        bucket.give_back(ONE);
        assert!(bucket.take(5, ONE));
    });
}
