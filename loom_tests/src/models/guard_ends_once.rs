//! B1: a count is given back exactly once, whoever releases, drops or activates at the same time.

use loom::sync::Arc;
use loom::thread;
use shards::{Books, Load, LoadGuard, Slot};

use super::model;

/// Another exchange stays in flight: a second giving back would take its count.
fn check(
    act: impl Fn(LoadGuard<Arc<Books>>) + Copy + Send + Sync + 'static,
    other_act: impl Fn(LoadGuard<Arc<Books>>) + Copy + Send + Sync + 'static,
) {
    model(move || {
        let books = Arc::new(Books::new(1));
        let worker = books.open(Slot(0)).unwrap();
        let bystander = LoadGuard::acquire(Arc::clone(&books), worker, 1).unwrap();
        let mut guard = LoadGuard::acquire(Arc::clone(&books), worker, 100).unwrap();
        let shared = guard.share();
        let thread = thread::spawn(move || other_act(shared));
        act(guard);
        thread.join().unwrap();
        let left = Load {
            in_flight: 1,
            waiting: 1,
            waiting_bytes: 1,
            ..Load::default()
        };
        assert_eq!(books.load(Slot(0)), left);
        assert_eq!(books.underflow_count(), 0);
        drop(bystander);
        assert_eq!(books.load(Slot(0)), Load::default());
    });
}

#[test]
fn release_and_drop() {
    check(LoadGuard::release, drop);
}

#[test]
fn release_and_release() {
    check(LoadGuard::release, LoadGuard::release);
}

#[test]
fn drop_and_drop() {
    check(drop, drop);
}

#[test]
fn release_and_activate() {
    check(LoadGuard::release, |guard| guard.activate());
}

#[test]
fn activate_and_release_on_both() {
    let act = |guard: LoadGuard<Arc<Books>>| {
        guard.activate();
        guard.release();
    };
    check(act, act);
}
