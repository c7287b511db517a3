//! E1: what a pin can see is not freed. E2: when nothing is pinned everything is.
//!
//! Three preemptions: that a second pin's Release carries the first pin's reads takes three to see.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicPtr, Ordering};
use loom::thread;
use shards::{Bin, Domain, Reader};
use std::sync::Arc;

use super::model_up_to;

/// A value whose memory stays; its end is a write that loom holds against every read.
struct Value {
    number: UnsafeCell<u64>,
}

/// What the bin owns.
struct Retired(&'static Value);

impl Drop for Retired {
    fn drop(&mut self) {
        // SAFETY: the memory is leaked; loom judges the access.
        self.0.number.with_mut(|number| unsafe { *number = 0 });
    }
}

fn value(number: u64) -> &'static Value {
    Box::leak(Box::new(Value {
        number: UnsafeCell::new(number),
    }))
}

type Shared = Arc<AtomicPtr<Value>>;

fn shared(number: u64) -> Shared {
    Arc::new(AtomicPtr::new(std::ptr::from_ref(value(number)).cast_mut()))
}

fn replace(shared: &Shared, bin: &mut Bin<Retired>, number: u64) {
    let old = shared.swap(
        std::ptr::from_ref(value(number)).cast_mut(),
        Ordering::Release,
    );
    // SAFETY: leaked.
    bin.retire(Retired(unsafe { &*old }));
}

/// Reads twice under one pin.
fn read(shared: &Shared, reader: &mut Reader) {
    let pin = reader.pin();
    for _ in 0..2 {
        // SAFETY: leaked; loom judges the access.
        let number = unsafe {
            (*shared.load(Ordering::Acquire))
                .number
                .with(|number| *number)
        };
        assert_ne!(number, 0, "used after it was freed");
    }
    drop(pin);
}

#[test]
fn one_reader_one_writer() {
    model_up_to(3, || {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let shared = shared(1);
        let mut bin = Bin::new(domain);
        let theirs = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            read(&theirs, &mut reader);
            reader
        });
        replace(&shared, &mut bin, 2);
        bin.reclaim();
        replace(&shared, &mut bin, 3);
        bin.reclaim();
        let _reader = thread.join().unwrap();
        bin.reclaim();
        assert_eq!(bin.len(), 0, "nothing is pinned, so nothing waits");
    });
}

/// A reader that pins again and again: an earlier pin's reads come before the free, too.
#[test]
fn two_pins_of_one_reader() {
    model_up_to(3, || {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let shared = shared(1);
        let mut bin = Bin::new(domain);
        let theirs = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            read(&theirs, &mut reader);
            read(&theirs, &mut reader);
            reader
        });
        replace(&shared, &mut bin, 2);
        bin.reclaim();
        let _reader = thread.join().unwrap();
    });
}

/// Two writers, each with its bin, share the epoch.
#[test]
fn two_writers() {
    model_up_to(3, || {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let (shared_a, shared_b) = (shared(1), shared(2));
        let write = |shared: &Shared, mut bin: Bin<Retired>| {
            replace(shared, &mut bin, 3);
            bin.reclaim();
            bin
        };
        let (theirs, bin) = (Arc::clone(&shared_a), Bin::new(Arc::clone(&domain)));
        let writer = thread::spawn(move || write(&theirs, bin));
        let (theirs, bin) = (Arc::clone(&shared_b), Bin::new(Arc::clone(&domain)));
        let other_writer = thread::spawn(move || write(&theirs, bin));
        let pin = reader.pin();
        for shared in [&shared_b, &shared_a] {
            // SAFETY: leaked; loom judges the access.
            let number = unsafe {
                (*shared.load(Ordering::Acquire))
                    .number
                    .with(|number| *number)
            };
            assert_ne!(number, 0, "used after it was freed");
        }
        drop(pin);
        let _bins = (writer.join().unwrap(), other_writer.join().unwrap());
    });
}

/// The writer's core may be pinned itself: it keeps what is young, and frees it when its pin has ended.
#[test]
fn a_pinned_writer() {
    model_up_to(3, || {
        let domain = Arc::new(Domain::new(2));
        let (mut own, mut reader) = (domain.reader(0), domain.reader(1));
        let shared = shared(1);
        let mut bin = Bin::new(domain);
        let theirs = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            read(&theirs, &mut reader);
            reader
        });
        let pin = own.pin();
        replace(&shared, &mut bin, 2);
        assert_eq!(bin.reclaim(), 0, "retired after the pin began");
        drop(pin);
        bin.reclaim();
        let _reader = thread.join().unwrap();
        bin.reclaim();
        assert_eq!(bin.len(), 0);
    });
}
