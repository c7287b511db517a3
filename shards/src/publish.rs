//! A value that one publisher replaces and every core reads without waiting: configuration, the worker table. The
//! publisher belongs to the control thread; the reading side to any core, under its pin.
//!
//! Invariants:
//! - P1 a load under a pin gives a whole value that lives as long as the pin;
//! - P2 who sees version `v` then loads that value or a later one.

use std::ptr::NonNull;

use crate::epoch::{Bin, Domain, Pin};
use crate::sync::{Arc, AtomicPtr, AtomicU64, Ordering};

/// The reading side. `Sync` if `T: Send + Sync`.
pub struct Published<T> {
    current: AtomicPtr<T>,
    /// How many values were published, the first included.
    version: AtomicU64,
    domain: Arc<Domain>,
    owns: std::marker::PhantomData<T>,
}

// SAFETY: readers on any thread get `&T` (needs `T: Sync`), and the value may be dropped on another thread than the one
// that made it (needs `T: Send`).
unsafe impl<T: Send + Sync> Sync for Published<T> {}
// SAFETY: as above; handing over the handle hands over a shared `T`.
unsafe impl<T: Send + Sync> Send for Published<T> {}

/// The only handle that may publish.
pub struct Publisher<T> {
    published: Arc<Published<T>>,
    bin: Bin<Owned<T>>,
}

/// A boxed value as a raw pointer: readers may hold `&T` to it while it waits in the bin, which a `Box` would forbid.
struct Owned<T>(NonNull<T>);

// SAFETY: it owns the value, so sending it is sending a `T`.
unsafe impl<T: Send> Send for Owned<T> {}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from Box::into_raw and is given to exactly one Owned, when it was unlinked; the bin drops
        // it when no pin can see it (E1).
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

fn into_raw<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Both sides of a published value, `first` being version 1.
pub fn published<T>(domain: Arc<Domain>, first: T) -> (Publisher<T>, Arc<Published<T>>) {
    let published = Arc::new(Published {
        current: AtomicPtr::new(into_raw(first)),
        version: AtomicU64::new(1),
        domain: Arc::clone(&domain),
        owns: std::marker::PhantomData,
    });
    (
        Publisher {
            published: Arc::clone(&published),
            bin: Bin::new(domain),
        },
        published,
    )
}

impl<T> Publisher<T> {
    /// Replaces the value. The old one is dropped by a later [`Publisher::reclaim`] (or publish) that no pin forbids.
    pub fn publish(&mut self, next: T) {
        let shared = &self.published;
        // ORDERING: Release pairs with load's Acquire: carries the value's contents (P1). Relaxed for what comes back: this
        // publisher stored it.
        let old = shared.current.swap(into_raw(next), Ordering::Release);
        // ORDERING: Relaxed load: only the publisher writes it.
        let version = shared.version.load(Ordering::Relaxed) + 1;
        // ORDERING: Release pairs with version's Acquire: the pointer is stored before it (P2).
        shared.version.store(version, Ordering::Release);
        self.bin.retire(Owned(
            NonNull::new(old).expect("a published value is a box"),
        ));
        self.bin.reclaim();
    }

    /// Drops old values that no pin can see; says how many.
    pub fn reclaim(&mut self) -> usize {
        self.bin.reclaim()
    }

    /// The value published last.
    #[must_use]
    pub fn current(&self) -> &T {
        // ORDERING: Relaxed; this publisher stored it.
        let current = self.published.current.load(Ordering::Relaxed);
        // SAFETY: only publish replaces it, which needs `&mut self`; only then, or when both sides are gone, is it retired.
        unsafe { &*current }
    }
}

impl<T> Published<T> {
    /// The current value, for as long as the pin lives. Wait-free: one load.
    ///
    /// # Panics
    /// If the pin is of another domain: it would protect nothing.
    #[inline]
    pub fn load<'p>(&self, pin: &'p Pin<'_>) -> &'p T {
        assert!(pin.is_of(&self.domain), "a pin of another domain");
        // ORDERING: Acquire pairs with publish's Release: the value's contents.
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: a box; it is retired only after it was replaced, and not freed while this pin lives (E1).
        unsafe { &*current }
    }

    /// Counts publications from 1. Cheap to compare; a load after it gives that version or a later one.
    #[inline]
    pub fn version(&self) -> u64 {
        // ORDERING: Acquire pairs with publish's Release (P2).
        self.version.load(Ordering::Acquire)
    }
}

impl<T> Drop for Published<T> {
    fn drop(&mut self) {
        // ORDERING: Relaxed; the last owner, the Arc brought the publisher's stores here.
        let current = self.current.load(Ordering::Relaxed);
        // A load may outlive both handles (it lives as long as its pin), so even the last value goes through a bin.
        let mut bin = Bin::new(Arc::clone(&self.domain));
        bin.retire(Owned(
            NonNull::new(current).expect("a published value is a box"),
        ));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    #[test]
    fn a_load_lives_as_long_as_its_pin() {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let (mut publisher, shared) = published(domain, vec![1]);
        let pin = reader.pin();
        let first = shared.load(&pin);
        publisher.publish(vec![2, 2]);
        assert_eq!(
            (shared.version(), publisher.current(), first),
            (2, &vec![2, 2], &vec![1])
        );
        assert_eq!(publisher.reclaim(), 0);
        let second = shared.load(&pin);
        drop((publisher, shared));
        assert_eq!(
            (first.len(), second.len()),
            (1, 2),
            "even after both handles are gone"
        );
    }

    #[test]
    fn every_value_is_dropped_once() {
        struct Counted(Arc<AtomicUsize>);
        impl Drop for Counted {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let dropped_count = Arc::new(AtomicUsize::new(0));
        let value = || Counted(Arc::clone(&dropped_count));
        let (mut publisher, shared) = published(Arc::new(Domain::new(1)), value());
        (0..9).for_each(|_| publisher.publish(value()));
        assert_eq!(dropped_count.load(Ordering::Relaxed), 9);
        drop((publisher, shared));
        assert_eq!(dropped_count.load(Ordering::Relaxed), 10);
    }

    #[test]
    #[should_panic(expected = "a pin of another domain")]
    fn a_pin_of_another_domain_is_refused() {
        let (_publisher, shared) = published(Arc::new(Domain::new(1)), 1);
        let other = Arc::new(Domain::new(1));
        let mut reader = other.reader(0);
        shared.load(&reader.pin());
    }

    /// Values are vectors of one number: a torn or freed one would show.
    #[test]
    fn threads_see_whole_values() {
        let domain = Arc::new(Domain::new(2));
        let readers = [domain.reader(0), domain.reader(1)];
        let (mut publisher, shared) = published(domain, vec![0_u64; 50]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for mut reader in readers {
                let (shared, stop) = (&shared, &stop);
                scope.spawn(move || {
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let pin = reader.pin();
                        let value = shared.load(&pin);
                        assert!(value.iter().all(|number| *number == value[0]) && value[0] >= last);
                        last = value[0];
                    }
                });
            }
            (1..=20_000).for_each(|number| publisher.publish(vec![number; 50]));
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.version(), 20_001);
    }
}
