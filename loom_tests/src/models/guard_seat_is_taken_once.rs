//! B4: of two callers that chose on the same number one gets the seat, the other learns the new number.

use loom::sync::Arc;
use loom::thread;
use shards::{Books, LoadGuard, Slot};

use super::model;

#[test]
fn two_callers_one_seat() {
    model(|| {
        let books = Arc::new(Books::new(1));
        let worker = books.open(Slot(0)).unwrap();
        let theirs = Arc::clone(&books);
        let thread = thread::spawn(move || LoadGuard::acquire_at(theirs, worker, 1, 0));
        let ours = LoadGuard::acquire_at(Arc::clone(&books), worker, 1, 0);
        let theirs = thread.join().unwrap();
        assert_eq!(books.in_flight(Slot(0)), 1);
        match (ours, theirs) {
            (Ok(_), Err(Some(1))) | (Err(Some(1)), Ok(_)) => {}
            _ => panic!("the seat was taken twice or not at all"),
        }
        assert_eq!(books.in_flight(Slot(0)), 0);
    });
}

/// A closed slot gives no seat, whatever the number; who got one before keeps it.
#[test]
fn a_seat_and_a_close() {
    model(|| {
        let books = Arc::new(Books::new(1));
        let worker = books.open(Slot(0)).unwrap();
        let theirs = Arc::clone(&books);
        let thread = thread::spawn(move || LoadGuard::acquire_at(theirs, worker, 1, 0));
        assert!(books.close(worker));
        let is_drained = books.is_drained(worker);
        let guard = thread.join().unwrap();
        assert!(
            !(is_drained && guard.is_ok()),
            "a seat was given after the drain"
        );
        assert_eq!(guard.as_ref().err(), guard.is_err().then_some(&None));
        assert_eq!(books.is_drained(worker), guard.is_err());
        drop(guard);
        assert!(books.is_drained(worker));
    });
}
