//! Loom is on: these models are wrong, and loom has to say so. Were they run with plain threads they would (nearly
//! always) pass, and these tests fail.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use loom::thread;

use super::model;

#[test]
#[should_panic(expected = "a count was lost")]
fn a_racy_counter_fails() {
    model(|| {
        let counter = Arc::new(AtomicU64::new(0));
        let add = |counter: &AtomicU64| {
            let value = counter.load(Ordering::SeqCst);
            counter.store(value + 1, Ordering::SeqCst);
        };
        let other = Arc::clone(&counter);
        let thread = thread::spawn(move || add(&other));
        add(&counter);
        thread.join().unwrap();
        assert_eq!(counter.load(Ordering::SeqCst), 2, "a count was lost");
    });
}

/// Dekker's pattern with acquire and release only: why the doorbell has fences.
#[test]
#[should_panic(expected = "a wake-up was lost")]
fn a_doorbell_without_fences_fails() {
    model(|| {
        let flags = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
        let sender = Arc::clone(&flags);
        let thread = thread::spawn(move || {
            sender.1.store(true, Ordering::Release);
            sender.0.load(Ordering::Acquire)
        });
        flags.0.store(true, Ordering::Release);
        let saw_mail = flags.1.load(Ordering::Acquire);
        let saw_sleeper = thread.join().unwrap();
        assert!(saw_mail || saw_sleeper, "a wake-up was lost");
    });
}

/// A reader without a pin: why reclamation has epochs.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_use_after_free_fails() {
    model(|| {
        let value = Box::leak(Box::new(UnsafeCell::new(1)));
        let shared = Arc::new(AtomicPtr::new(value));
        let reader = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            let value = reader.load(Ordering::Acquire);
            if !value.is_null() {
                // SAFETY: the memory is leaked, so it is there; loom judges the access.
                unsafe { (*value).with(|value| assert!(*value == 1)) };
            }
        });
        let value = shared.swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: as above.
        unsafe { (*value).with_mut(|value| *value = 0) };
        thread.join().unwrap();
    });
}
