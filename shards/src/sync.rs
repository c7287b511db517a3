//! The atomics of this crate: std's in a normal build, loom's under `cfg(loom)`. Nothing else here names either.
//!
//! `Arc` is std's in both builds where it is only a handle (`Domain`, `Tree`: dropped at shutdown by whoever is last);
//! `CountedArc` is loom's where the race of the last drop is itself an invariant (guards, mailboxes).

pub(crate) use crossbeam::utils::CachePadded;
pub(crate) use std::sync::Arc;

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc as CountedArc,
        atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
};

#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc as CountedArc,
    atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// loom's fence is no point where threads may change, so that a store and the fence after it would be one step. A step on
/// an atomic that all fences share (Relaxed: it orders nothing) makes it one.
#[cfg(loom)]
pub(crate) fn fence(ordering: Ordering) {
    loom::lazy_static! {
        static ref STEPS: AtomicUsize = AtomicUsize::new(0);
    }
    STEPS.fetch_add(1, Ordering::Relaxed);
    loom::sync::atomic::fence(ordering);
}

/// loom's face of `UnsafeCell`, at no cost.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

/// Shows a model that memory is used after its end. In a normal build it is nothing. Under loom freed memory is kept,
/// `end` is a write and `check` a read: loom reports the race, `check` the use after free.
#[derive(Debug)]
pub(crate) struct Life {
    #[cfg(loom)]
    alive: UnsafeCell<bool>,
}

impl Life {
    #[cfg_attr(
        not(loom),
        allow(dead_code, reason = "a normal build allocates segments zeroed")
    )]
    pub(crate) fn new() -> Self {
        Self {
            #[cfg(loom)]
            alive: UnsafeCell::new(true),
        }
    }

    #[inline(always)]
    pub(crate) fn check(&self) {
        #[cfg(loom)]
        self.alive.with(|alive| {
            // SAFETY: loom's cell reports any write that does not happen before this read.
            assert!(unsafe { *alive }, "used after it was freed")
        });
    }

    /// Under loom only: a normal build frees the memory instead.
    #[cfg(loom)]
    pub(crate) fn end(&self) {
        self.alive.with_mut(|alive| {
            // SAFETY: loom's cell reports any access that does not happen before this write.
            unsafe {
                assert!(*alive, "freed twice");
                *alive = false;
            }
        });
    }
}
