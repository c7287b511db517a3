//! B2, B5, B6: whatever guards do on whatever threads, the books end at zero and never go below.

use loom::sync::Arc;
use loom::thread;
use shards::{Books, Load, LoadGuard, Slot, WorkerId};

use super::model;
use super::trace::Trace;

const SLOT: Slot = Slot(0);

fn books() -> (Arc<Books>, WorkerId) {
    let books = Arc::new(Books::new(1));
    let worker = books.open(SLOT).unwrap();
    (books, worker)
}

fn acquire(books: &Arc<Books>, worker: WorkerId, prompt_bytes: u64) -> LoadGuard<Arc<Books>> {
    LoadGuard::acquire(Arc::clone(books), worker, prompt_bytes).unwrap()
}

fn assert_empty(books: &Books) {
    assert_eq!(books.load(SLOT), Load::default());
    assert_eq!(books.underflow_count(), 0);
}

#[test]
fn two_exchanges_on_two_threads() {
    model(|| {
        let (books, worker) = books();
        let theirs = Arc::clone(&books);
        let thread = thread::spawn(move || {
            let guard = acquire(&theirs, worker, 100);
            guard.activate();
            guard.release();
        });
        let guard = acquire(&books, worker, 10);
        let load = books.load(SLOT);
        assert!((1..=2).contains(&load.in_flight) && load.waiting <= 2 && load.active <= 1);
        drop(guard);
        thread.join().unwrap();
        assert_empty(&books);
    });
}

#[test]
fn a_shared_exchange_on_three_threads() {
    model(|| {
        let (books, worker) = books();
        let mut guard = acquire(&books, worker, 100);
        let (first, second) = (guard.share(), guard.share());
        let threads = [
            thread::spawn(move || first.activate()),
            thread::spawn(move || second.activate()),
        ];
        let load = books.load(SLOT);
        assert!(load.in_flight == 1 && load.waiting <= 1 && load.active <= 1);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        let active = Load {
            in_flight: 1,
            active: 1,
            active_bytes: 100,
            ..Load::default()
        };
        assert_eq!(books.load(SLOT), active);
        drop(guard);
        assert_empty(&books);
    });
}

/// A slot seen drained shows zeros at once, not a moment later; and all that its exchanges did has happened.
#[test]
fn a_drained_slot_shows_zeros() {
    model(|| {
        let (books, worker) = books();
        let mut guard = acquire(&books, worker, 100);
        let shared = guard.share();
        let trace = Trace::new();
        let theirs = trace.clone();
        let threads = [
            thread::spawn(move || shared.activate()),
            thread::spawn(move || {
                theirs.leave();
                guard.release();
            }),
        ];
        books.close(worker);
        if books.is_drained(worker) {
            assert!(trace.is_there());
            assert_empty(&books);
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        assert!(books.is_drained(worker));
        assert_empty(&books);
        assert_eq!(books.reset(worker), Ok(()));
    });
}
