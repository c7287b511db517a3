//! What a shard retires: memory that the owner has unlinked and that readers may still look at. Dropping it frees it.

use std::ptr::NonNull;

use super::holders::Store;
use super::segment::Segment;

/// Retired memory; each piece is in a bin exactly once.
pub(super) enum Garbage {
    /// A replaced or forgotten list or bitmap.
    Store(Store),
    /// A segment whose entries live on in others (after a split).
    Segment(NonNull<Segment>),
    /// A segment with all that its entries point to.
    Full(NonNull<Segment>),
}

// SAFETY: it owns plain memory that is freed the same way on any thread.
unsafe impl Send for Garbage {}

impl Drop for Garbage {
    fn drop(&mut self) {
        // SAFETY: garbage is unlinked and dropped by a bin when no pin can see it (E1), once.
        unsafe {
            match self {
                Self::Store(store) => store.free(),
                Self::Segment(segment) => Segment::free(*segment),
                Self::Full(segment) => free_full(*segment),
            }
        }
    }
}

/// # Safety
/// As `Segment::free`; the same for what its entries point to.
unsafe fn free_full(segment: NonNull<Segment>) {
    // SAFETY: the caller's promise.
    unsafe {
        for (_, entry) in segment.as_ref().all_entries() {
            if entry.tag().is_some()
                && let Some(store) = Store::of(entry.word())
            {
                store.free();
            }
        }
        Segment::free(segment);
    }
}
