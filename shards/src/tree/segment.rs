//! A segment: 64 KiB of buckets, each one cache line of five entries. Written by the shard's owner, read by every core
//! under a pin.
//!
//! An entry has no more of its block's hash than its place does not tell already: a tag of 32 bits, and the mark, seven bits in the
//! value. With the bucket's ten that is 49 bits, and who agrees in them counts as one block; below "key" is a tag.
//!
//! Invariants:
//! - S1 a reader never takes one key's value for another's;
//! - S2 a reader never follows a pointer that its pin does not protect.
//!
//! The argument for S1. The owner changes an entry's key only by way of 0: `key = 0`, `value = v`, `key = k`, the last two
//! with Release. A reader loads key, value (both Acquire), key again, and takes the value only if both keys are its own.
//! - Old key, new value: the value it read was stored after `key = 0`, so (Release, Acquire) the second load sees that 0 or
//!   something later, and not the old key.
//! - New key, old value: the key it read was stored after the new value, so the value's load sees that value or a later
//!   one; a later one of another key is the first case.
//! - The same key twice with another key's value between them: the entry went k -> other -> k while the reader stood still
//!   twice, once between each pair of loads. Each change needs an eviction by age or a purge. Against this rest the value
//!   has seven more bits of its block's hash (mark). What remains is a wrong advice, once, never wrong memory.
//!
//! S2: a value's pointer is retired only after it was unlinked: the word was replaced, or the key is 0 and the reader's
//! second look (for a pin that began later, already its first) finds that.
//!
//! A reader may miss a key that moves between its buckets while it looks: a miss is an advice less.

use std::ptr::NonNull;

use super::spread::Spread;
use super::word::Word;
use crate::sync::{AtomicU32, AtomicU64, Life, Ordering};

/// Buckets of a segment. A power of two, at most 2^11 (see `spread.rs`).
#[cfg(not(loom))]
pub(super) const BUCKET_COUNT: usize = 1024;
/// Entries of a bucket.
#[cfg(not(loom))]
pub(super) const WAY_COUNT: usize = 5;

/// Small, so that models end.
#[cfg(loom)]
pub(super) const BUCKET_COUNT: usize = 4;
/// Small, so that models end.
#[cfg(loom)]
pub(super) const WAY_COUNT: usize = 1;

/// Entries of a segment.
pub(super) const SEGMENT_ENTRIES: usize = BUCKET_COUNT * WAY_COUNT;
/// Bytes of a segment.
pub(super) const SEGMENT_BYTES: usize = BUCKET_COUNT * if cfg!(loom) { 16 } else { 64 };

/// The tag of an empty entry.
const EMPTY: u32 = 0;

/// A tag with its value word.
#[derive(Clone, Copy)]
pub(super) struct Entry<'s> {
    tag: &'s AtomicU32,
    value: &'s AtomicU64,
}

#[repr(C, align(64))]
struct Bucket {
    values: [AtomicU64; WAY_COUNT],
    tags: [AtomicU32; WAY_COUNT],
}

/// See the top of the file.
pub(super) struct Segment {
    life: Life,
    buckets: [Bucket; BUCKET_COUNT],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Segment>() == SEGMENT_BYTES && size_of::<Bucket>() == 64);

impl Segment {
    /// An empty segment.
    #[cfg(not(loom))]
    pub(super) fn allocate() -> NonNull<Self> {
        let layout = std::alloc::Layout::new::<Self>();
        // SAFETY: the layout is not empty.
        let raw = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<Self>();
        // All zero is a valid segment: every tag EMPTY, atomics without invariants of their own.
        NonNull::new(raw).unwrap_or_else(|| std::alloc::handle_alloc_error(layout))
    }

    /// An empty segment.
    #[cfg(loom)]
    pub(super) fn allocate() -> NonNull<Self> {
        let bucket = |_| Bucket {
            values: std::array::from_fn(|_| AtomicU64::new(0)),
            tags: std::array::from_fn(|_| AtomicU32::new(EMPTY)),
        };
        let segment = Self {
            life: Life::new(),
            buckets: std::array::from_fn(bucket),
        };
        NonNull::from(Box::leak(Box::new(segment)))
    }

    /// # Safety
    /// It came from `allocate`, is freed once, and nobody uses it any more.
    pub(super) unsafe fn free(this: NonNull<Self>) {
        // SAFETY: the caller's promise; under loom the memory stays so that a late use is reported, not undefined.
        #[cfg(loom)]
        unsafe {
            this.as_ref().life.end();
        }
        // SAFETY: the caller's promise; allocated with the same layout.
        #[cfg(not(loom))]
        unsafe {
            std::alloc::dealloc(this.as_ptr().cast(), std::alloc::Layout::new::<Self>());
        }
    }

    /// The value word of a block, for readers.
    #[inline]
    pub(super) fn find(&self, spread: Spread) -> Option<Word> {
        self.life.check();
        let [a, b] = spread.buckets();
        self.prefetch(b);
        let (tag, mark) = (spread.tag(), spread.mark());
        self.buckets[a]
            .find(tag, mark)
            .or_else(|| self.buckets[b].find(tag, mark))
    }

    /// Begins to load the two buckets of a key.
    #[inline]
    pub(super) fn prefetch_key(&self, spread: Spread) {
        let [a, b] = spread.buckets();
        self.prefetch(a);
        self.prefetch(b);
    }

    /// Begins to load a bucket.
    #[inline]
    pub(super) fn prefetch(&self, bucket: usize) {
        #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
        // SAFETY: a prefetch has no effect but on caches; SSE is part of x86_64.
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>((&raw const self.buckets[bucket]).cast());
        }
        let _ = bucket;
    }

    /// The entries of a bucket, for the owner.
    #[inline]
    pub(super) fn entries(&self, bucket: usize) -> impl DoubleEndedIterator<Item = Entry<'_>> {
        self.life.check();
        self.buckets[bucket].entries()
    }

    /// All entries with the index of their bucket, for the owner.
    pub(super) fn all_entries(&self) -> impl Iterator<Item = (usize, Entry<'_>)> {
        self.life.check();
        let numbered = self.buckets.iter().enumerate();
        numbered.flat_map(|(index, bucket)| bucket.entries().map(move |entry| (index, entry)))
    }
}

impl Bucket {
    #[inline]
    fn entries(&self) -> impl DoubleEndedIterator<Item = Entry<'_>> {
        let pairs = self.tags.iter().zip(&self.values);
        pairs.map(|(tag, value)| Entry { tag, value })
    }

    #[inline]
    fn find(&self, tag: u32, mark: u64) -> Option<Word> {
        self.entries().find_map(|entry| {
            // ORDERING: Acquire pairs with fill's Release of the tag: the value's load sees this key's value or a later one.
            if entry.tag.load(Ordering::Acquire) != tag {
                return None;
            }
            // ORDERING: Acquire pairs with the Release stores of the value: what it points to is written, and the load
            // below sees a tag no older than the value.
            let word = Word(entry.value.load(Ordering::Acquire));
            // ORDERING: Relaxed; kept after the value's load by that load's Acquire.
            let still = entry.tag.load(Ordering::Relaxed) == tag;
            (still && word.mark() == mark).then_some(word)
        })
    }
}

/// The owner's side. Nobody else writes, so its own loads are Relaxed.
impl Entry<'_> {
    /// The tag; `None`: empty.
    #[inline]
    pub(super) fn tag(self) -> Option<u32> {
        // ORDERING: Relaxed; only the owner writes tags.
        match self.tag.load(Ordering::Relaxed) {
            EMPTY => None,
            tag => Some(tag),
        }
    }

    /// Whether it is a block's, given that it lies in one of the block's buckets.
    #[inline]
    pub(super) fn is_of(self, spread: Spread) -> bool {
        self.tag() == Some(spread.tag()) && self.word().mark() == spread.mark()
    }

    /// The value word; of an empty entry it means nothing.
    #[inline]
    pub(super) fn word(self) -> Word {
        // ORDERING: Relaxed; only the owner writes values.
        Word(self.value.load(Ordering::Relaxed))
    }

    /// Another value for the same key.
    pub(super) fn set_word(self, word: Word) {
        // ORDERING: Release pairs with find's Acquire of the value: what the word points to is written.
        self.value.store(word.0, Ordering::Release);
    }

    /// An empty entry gets a key.
    pub(super) fn fill(self, tag: u32, word: Word) {
        debug_assert!(self.tag().is_none() && tag != EMPTY);
        // ORDERING: Release pairs with find's Acquire of the value: who reads it sees the tag at 0 or later (S1).
        self.value.store(word.0, Ordering::Release);
        // ORDERING: Release pairs with find's Acquire of the tag: the value is stored before it (S1).
        self.tag.store(tag, Ordering::Release);
    }

    /// The entry is empty again; its value is unlinked.
    pub(super) fn erase(self) {
        // ORDERING: Relaxed; fill's Release of the next value carries it (S1), and the bin's tag carries it to later
        // pins (S2).
        self.tag.store(EMPTY, Ordering::Relaxed);
    }
}
