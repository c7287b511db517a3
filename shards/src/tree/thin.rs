//! A boxed slice behind one thin pointer: its length, then its items. What a value word points to. Made and freed by the
//! shard's owner; read by everybody, under a pin.

use std::alloc::{Layout, alloc, handle_alloc_error};
use std::mem::offset_of;
use std::ptr::NonNull;

use crate::sync::Life;

/// The head; `len` items follow in the same allocation. Neither length nor place changes during its life.
#[repr(C, align(8))]
pub(super) struct Thin<T> {
    life: Life,
    len: u32,
    items: [T; 0],
}

impl<T> Thin<T> {
    fn layout(len: usize) -> Layout {
        let bytes = offset_of!(Self, items) + len * size_of::<T>();
        Layout::from_size_align(bytes.max(size_of::<Self>()), align_of::<Self>())
            .expect("a short slice")
    }

    /// Allocates `len` items, each made by `item(index)`.
    pub(super) fn new(len: usize, mut item: impl FnMut(usize) -> T) -> NonNull<Self> {
        let layout = Self::layout(len);
        // SAFETY: the layout holds at least the head, so its size is not zero.
        let raw = unsafe { alloc(layout) }.cast::<Self>();
        let Some(this) = NonNull::new(raw) else {
            handle_alloc_error(layout)
        };
        // SAFETY: freshly allocated with this layout: head and `len` items fit, nobody else knows it.
        unsafe {
            (&raw mut (*raw).life).write(Life::new());
            (&raw mut (*raw).len).write(len as u32);
            let items = (&raw mut (*raw).items).cast::<T>();
            (0..len).for_each(|index| items.add(index).write(item(index)));
        }
        this
    }

    /// The items.
    ///
    /// # Safety
    /// `this` came from `new` and is not freed during `'p`.
    pub(super) unsafe fn items<'p>(this: NonNull<Self>) -> &'p [T] {
        let raw = this.as_ptr();
        // SAFETY: the caller's promise; items were written by `new`, `len` of them, and are changed only by interior
        // mutability (atomics).
        unsafe {
            (*raw).life.check();
            std::slice::from_raw_parts((&raw const (*raw).items).cast::<T>(), (*raw).len as usize)
        }
    }

    /// What it costs, in bytes: the chunk of a usual malloc (16-byte steps, 8 bytes of head, 32 at least).
    pub(super) fn bytes(len: usize) -> usize {
        let head_bytes = align_of::<T>().clamp(4, 8);
        let payload_bytes = head_bytes + len * size_of::<T>().min(8);
        (payload_bytes + 8).next_multiple_of(16).max(32)
    }

    /// Frees it; items must not need dropping.
    ///
    /// # Safety
    /// `this` came from `new`, is freed once, and nobody uses it any more.
    pub(super) unsafe fn free(this: NonNull<Self>) {
        const { assert!(cfg!(loom) || !std::mem::needs_drop::<T>()) };
        // SAFETY: the caller's promise; under loom the memory stays so that a late use is reported, not undefined.
        #[cfg(loom)]
        unsafe {
            (*this.as_ptr()).life.end();
        }
        // SAFETY: the caller's promise; the layout is the one it was allocated with.
        #[cfg(not(loom))]
        unsafe {
            let len = (*this.as_ptr()).len as usize;
            std::alloc::dealloc(this.as_ptr().cast(), Self::layout(len));
        }
    }
}
