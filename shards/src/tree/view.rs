//! What readers see of one shard: the directory of its segments, its newest generation, its sums. Written by the shard's
//! owner alone.

use std::ptr::NonNull;

use super::segment::Segment;
use super::spread::Spread;
use super::word::Word;
use crate::ids::PrefixHash;
use crate::sync::{AtomicPtr, AtomicU8, CachePadded, Ordering};

/// The widest directory: 2^20 entries, 64 GiB of segments.
pub(super) const DIRECTORY_BITS_MAX: u32 = 20;

pub(super) struct View {
    /// `2^bits` entries; a segment of depth `d` fills `2^(bits - d)` neighbours. Never null.
    directory: Box<[AtomicPtr<Segment>]>,
    pub(super) bits: u32,
    /// The generation that a use gives its block.
    newest: AtomicU8,
    pub(super) sums: CachePadded<Sums>,
}

/// Numbers for gauges, stored by the owner at the end of each turn of work.
#[derive(Default)]
pub(super) struct Sums {
    pub(super) bytes: Gauge,
    pub(super) node_count: Gauge,
    pub(super) membership_count: Gauge,
    pub(super) evicted_count: Gauge,
}

/// A number that its one writer sets. std's atomic in every build, as in `counters.rs`.
#[derive(Default)]
pub(super) struct Gauge(std::sync::atomic::AtomicU64);

impl Gauge {
    pub(super) fn set(&self, value: u64) {
        // ORDERING: Relaxed; a number to show.
        self.0.store(value, Ordering::Relaxed);
    }

    pub(super) fn value(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.0.load(Ordering::Relaxed)
    }
}

impl View {
    /// One empty segment behind all `2^bits` entries.
    pub(super) fn new(bits: u32) -> Self {
        assert!((1..=DIRECTORY_BITS_MAX).contains(&bits));
        let first = Segment::allocate().as_ptr();
        Self {
            directory: (0..1_usize << bits)
                .map(|_| AtomicPtr::new(first))
                .collect(),
            bits,
            newest: AtomicU8::new(0),
            sums: CachePadded::default(),
        }
    }

    pub(super) fn directory_len(&self) -> usize {
        self.directory.len()
    }

    /// The segment behind a directory entry.
    ///
    /// # Safety
    /// The caller holds a pin of the tree's domain as long as it uses the segment, or owns the shard and does not reclaim
    /// meanwhile.
    #[inline]
    pub(super) unsafe fn segment(&self, index: usize) -> &Segment {
        // ORDERING: Acquire pairs with replace's Release: the segment's entries are filled.
        let segment = self.directory[index].load(Ordering::Acquire);
        // SAFETY: never null; retired only after it was replaced here, and the caller's promise keeps it (E1).
        unsafe { &*segment }
    }

    /// Owner: a filled segment takes the place of another.
    pub(super) fn replace(&self, index: usize, segment: NonNull<Segment>) {
        // ORDERING: Release pairs with segment's Acquire: the entries are filled.
        self.directory[index].store(segment.as_ptr(), Ordering::Release);
    }

    /// Owner: the pointer itself.
    pub(super) fn pointer(&self, index: usize) -> NonNull<Segment> {
        // ORDERING: Relaxed; the owner stored it (or, at the tree's end, the Arc brought the owner's stores here).
        let segment = self.directory[index].load(Ordering::Relaxed);
        NonNull::new(segment).expect("a directory entry is never null")
    }

    /// Owner, or the tree's end: every segment once, in order.
    pub(super) fn each_segment(&self, mut visit: impl FnMut(NonNull<Segment>)) {
        let mut last = None;
        for index in 0..self.directory.len() {
            let segment = self.pointer(index);
            if last != Some(segment) {
                visit(segment);
                last = Some(segment);
            }
        }
    }

    #[inline]
    pub(super) fn newest(&self) -> u8 {
        // ORDERING: Relaxed; a number to compare ages with, off by one at worst.
        self.newest.load(Ordering::Relaxed)
    }

    pub(super) fn set_newest(&self, newest: u8) {
        // ORDERING: Relaxed; as above.
        self.newest.store(newest, Ordering::Relaxed);
    }

    /// The value word of a block.
    ///
    /// # Safety
    /// As `segment`; the same for what the word points to.
    #[inline]
    pub(super) unsafe fn find(&self, hash: PrefixHash, spread: Spread) -> Option<Word> {
        if hash.0 == 0 {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe { self.segment(spread.directory_index(self.bits)) }.find(spread)
    }

    /// Begins to load what `find` will look at.
    ///
    /// # Safety
    /// As `segment`.
    #[inline]
    pub(super) unsafe fn prefetch(&self, spread: Spread) {
        // SAFETY: the caller's promise.
        unsafe { self.segment(spread.directory_index(self.bits)) }.prefetch_key(spread);
    }
}
