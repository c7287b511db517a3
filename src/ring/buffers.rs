//! The core's shared receive buffers: a provided buffer ring (io_uring, Linux 5.19), and the lease of one buffer.
//!
//! Owned by one core; every receive of that core takes its buffer from here at the moment data is there, so a quiet
//! connection holds none. Invariant R1: a buffer is in the kernel's ring, or leased by exactly one [`Lease`], or was never used.
//!
//! The kernel takes buffers in the order in which they were given, so all that were ever given are touched again and again. Hence
//! few are given at first, and more only as they are used at once: what is touched stays small in the caches and in memory.

use std::cell::Cell;
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;

/// The one buffer group of a core's ring.
pub(super) const GROUP: u16 = 0;

/// Set between two buffers. Buffers of a power of two would all begin in the same few sets of the processor's caches, and small
/// pieces, which only ever use a buffer's beginning, would push each other out.
const GAP_BYTES: usize = 3 * 64;

/// Buffers that the kernel gets at first.
const FIRST: u16 = 64;

/// An anonymous, page-aligned mapping.
struct Mapping {
    start: NonNull<u8>,
    len_bytes: usize,
}

impl Mapping {
    fn new(len_bytes: usize) -> io::Result<Mapping> {
        // SAFETY: a fresh anonymous mapping; no memory of ours is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Mapping { start, len_bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and whoever could reach into it (ring, leases) holds an Rc to its owner.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

/// The pool behind the leases.
pub(super) struct Pool {
    entries: Mapping,
    memory: Mapping,
    buffer_bytes: usize,
    mask: u16,
    tail: Cell<u16>,
    /// How many are in use: numbers below it.
    given: Cell<u16>,
    leased: Cell<u16>,
}

impl Pool {
    /// Maps `count` buffers of `buffer_bytes` and gives some of them to the kernel. `count` is rounded up to a power of two.
    pub(super) fn new(uring: &IoUring, count: u16, buffer_bytes: usize) -> io::Result<Rc<Pool>> {
        let count = count.clamp(1, 1 << 14).next_power_of_two();
        let pool = Pool {
            entries: Mapping::new(usize::from(count) * size_of::<BufRingEntry>())?,
            memory: Mapping::new(usize::from(count) * (buffer_bytes + GAP_BYTES))?,
            buffer_bytes,
            mask: count - 1,
            tail: Cell::new(0),
            given: Cell::new(0),
            leased: Cell::new(0),
        };
        // SAFETY: the ring of entries is page-aligned, `count` entries long, and outlives the io_uring: the ring keeps
        // an Rc to this pool and is dropped before it (see `Ring`'s field order).
        unsafe {
            uring.submitter().register_buf_ring_with_flags(
                pool.entries.start.as_ptr() as u64,
                count,
                GROUP,
                0,
            )?;
        }
        pool.give(FIRST);
        Ok(Rc::new(pool))
    }

    /// As many again as are in use, as far as there are.
    pub(super) fn grow(&self) {
        self.give(self.given.get());
    }

    fn give(&self, more: u16) {
        let given = self.given.get();
        let end = given.saturating_add(more).min(self.mask + 1);
        self.given.set(end);
        (given..end).for_each(|id| self.put(id));
    }

    fn at(&self, id: u16) -> NonNull<u8> {
        let stride_bytes = self.buffer_bytes + GAP_BYTES;
        // SAFETY: id <= mask, so the offset stays inside the mapping of (mask + 1) * stride_bytes.
        unsafe {
            self.memory
                .start
                .add(usize::from(id & self.mask) * stride_bytes)
        }
    }

    /// Gives a buffer back to the kernel.
    fn put(&self, id: u16) {
        let tail = self.tail.get();
        let entries: *mut BufRingEntry = self.entries.start.as_ptr().cast();
        // SAFETY: the index is masked, so the entry lies inside the mapping; the kernel reads an entry only after it
        // has seen the tail move past it, which the Release store below publishes.
        unsafe {
            let entry = &mut *entries.add(usize::from(tail & self.mask));
            entry.set_addr(self.at(id).as_ptr() as u64);
            entry.set_len(self.buffer_bytes as u32);
            entry.set_bid(id);
            let shared = &*BufRingEntry::tail(entries).cast::<AtomicU16>();
            // ORDERING: Release; the kernel's acquire load of the tail carries the entry written above.
            shared.store(tail.wrapping_add(1), Ordering::Release);
        }
        self.tail.set(tail.wrapping_add(1));
    }

    /// Takes the lease of a buffer that a completion named.
    pub(super) fn lease(self: &Rc<Pool>, id: u16, len_bytes: usize) -> Lease {
        debug_assert!(len_bytes <= self.buffer_bytes);
        self.leased.set(self.leased.get() + 1);
        // Before the kernel finds none: then it ends the receive, which has to be begun anew.
        if self.leased.get() > self.given.get() / 4 * 3 {
            self.grow();
        }
        Lease {
            pool: self.clone(),
            id,
            len_bytes: len_bytes.min(self.buffer_bytes) as u32,
        }
    }
}

/// One received piece: bytes in a shared buffer, given back when this is dropped.
pub struct Lease {
    pool: Rc<Pool>,
    id: u16,
    len_bytes: u32,
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: R1: the kernel gave this buffer up with the completion and gets it back in Drop only; len_bytes was
        // written by the kernel and is bounded by the buffer's size.
        unsafe {
            std::slice::from_raw_parts(self.pool.at(self.id).as_ptr(), self.len_bytes as usize)
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.leased.set(self.pool.leased.get() - 1);
        self.pool.put(self.id);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({} bytes)", self.len_bytes)
    }
}
