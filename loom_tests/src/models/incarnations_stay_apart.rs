//! B3: a slot opens again only when the old incarnation has ended; its exchanges never touch the new one.

use loom::sync::Arc;
use loom::thread;
use shards::{Books, Load, LoadGuard, Slot};

use super::model;
use super::trace::Trace;

const SLOT: Slot = Slot(0);

/// An old exchange ends, and another caller still tries the old incarnation, while the slot is closed and opened again.
#[test]
fn a_slot_is_reopened() {
    model(|| {
        let books = Arc::new(Books::new(1));
        let old = books.open(SLOT).unwrap();
        let guard = LoadGuard::acquire(Arc::clone(&books), old, 100).unwrap();
        let trace = Trace::new();
        let theirs = trace.clone();
        let ending = thread::spawn(move || {
            theirs.leave();
            guard.activate();
            drop(guard);
        });
        let theirs = Arc::clone(&books);
        let trying = thread::spawn(move || drop(LoadGuard::acquire(theirs, old, 10)));
        assert!(books.close(old));
        assert!(!books.close(old), "closed twice");
        let new = books.open(SLOT);
        let guard = new.map(|new| {
            assert!(trace.is_there(), "what the old one did comes before");
            assert_ne!(new, old);
            assert!(books.is_drained(old), "opened before the old one had ended");
            let guard = LoadGuard::acquire(Arc::clone(&books), new, 1).unwrap();
            let only = Load {
                in_flight: 1,
                waiting: 1,
                waiting_bytes: 1,
                ..Load::default()
            };
            assert_eq!(
                books.load(SLOT),
                only,
                "the old one is seen in the new one's books"
            );
            guard
        });
        ending.join().unwrap();
        trying.join().unwrap();
        assert!(LoadGuard::acquire(Arc::clone(&books), old, 1).is_none());
        assert_eq!(books.in_flight(SLOT), u32::from(guard.is_some()));
        drop(guard);
        assert_eq!(books.load(SLOT), Load::default());
        assert_eq!(books.underflow_count(), 0);
        assert!(new.is_some() || books.open(SLOT).is_some());
    });
}
