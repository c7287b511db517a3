//! A1: of connections of one address that come at once, no more than the limit are let in (of two for the last place
//! perhaps neither).

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use shards::Addresses;

use super::model;

#[test]
fn two_come_for_one_place() {
    model(|| {
        let addresses = Arc::new(Addresses::new());
        let inside = Arc::new(AtomicU32::new(0));
        let come = |addresses: &Addresses, inside: &AtomicU32| {
            if let Some(place) = addresses.enter(1 | 2 << 32, 1) {
                assert_eq!(
                    inside.fetch_add(1, Ordering::Relaxed),
                    0,
                    "two in one place"
                );
                inside.fetch_sub(1, Ordering::Relaxed);
                addresses.leave(place);
            }
        };
        let theirs = (Arc::clone(&addresses), Arc::clone(&inside));
        let thread = thread::spawn(move || come(&theirs.0, &theirs.1));
        come(&addresses, &inside);
        thread.join().unwrap();
        assert!(addresses.enter(1 | 2 << 32, 1).is_some(), "all have left");
    });
}
