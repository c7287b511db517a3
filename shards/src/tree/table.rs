//! The storage of one shard as its owner sees it: where keys go, what is split, what is forgotten, what it all costs.
//! Everything here runs on the owner's core; readers see the results through the shard's `View`.
//!
//! No step here frees memory: what is unlinked is retired, and only `reclaim` (between steps) frees. So references into
//! segments stay good during a step.

use super::garbage::Garbage;
use super::holders::Slots;
use super::segment::{BUCKET_COUNT, Entry, SEGMENT_BYTES, Segment, WAY_COUNT};
use super::spread::Spread;
use super::view::{DIRECTORY_BITS_MAX, View};
use super::word::{Packed, Payload, Word};
use crate::epoch::Bin;
use crate::ids::{PrefixHash, Slot};

/// Generations that fit into a shard's capacity. An entry's age has 8 bits: 8 capacities of new blocks until it wraps.
const GENERATIONS: usize = 32;
/// Retired pieces that may wait for a pinned core; above that nothing is replaced.
pub(super) const GARBAGE_MAX: usize = 1 << 16;
/// Retired pieces freed per turn of work.
const RECLAIM_MAX: usize = 128;
/// Directory entries per segment beyond one, in bits: hashes are not spread perfectly evenly.
const DIRECTORY_SPARE_BITS: u32 = if cfg!(loom) { 0 } else { 2 };

/// How one shard's byte budget is used.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) bytes_max: usize,
    /// Seven eighths: the rest is for lists and bitmaps, so that a shared prefix always finds room for its holders.
    pub(super) segment_bytes_max: usize,
    pub(super) directory_bits: u32,
}

impl Shape {
    pub(super) fn of(bytes_max: usize) -> Self {
        let share_bytes = bytes_max - bytes_max / 8;
        let segment_count = (share_bytes / SEGMENT_BYTES).max(1);
        let spread_bits = segment_count.next_power_of_two().trailing_zeros();
        let directory_bits = (spread_bits + DIRECTORY_SPARE_BITS).clamp(1, DIRECTORY_BITS_MAX);
        let directory_bytes = 8 << directory_bits;
        Self {
            bytes_max: bytes_max.max(directory_bytes + SEGMENT_BYTES),
            segment_bytes_max: share_bytes.max(SEGMENT_BYTES),
            directory_bits,
        }
    }

    fn directory_bytes(self) -> usize {
        8 << self.directory_bits
    }

    /// New blocks per generation.
    fn generation_volume(self) -> usize {
        let capacity = self.segment_bytes_max / (SEGMENT_BYTES / BUCKET_COUNT) * WAY_COUNT;
        (capacity / GENERATIONS).max(1)
    }
}

pub(super) struct Table {
    pub(super) shape: Shape,
    pub(super) bin: Bin<Garbage>,
    /// Per directory entry: how many hash bits its segment is for.
    pub(super) depths: Box<[u8]>,
    /// Entries in use, by the first directory entry of their segment.
    pub(super) used: Box<[u32]>,
    pub(super) segment_count: usize,
    pub(super) store_bytes: usize,
    pub(super) node_count: usize,
    membership_count: usize,
    pub(super) evicted_count: u64,
    /// Blocks that name a slot, by slot.
    held_counts: Box<[u32]>,
    pub(super) newest: u8,
    /// New blocks in the newest generation.
    volume: usize,
    /// Where the search for old lists goes on: directory entry, bucket.
    pub(super) hand: (usize, usize),
    pub(super) scratch: Vec<u16>,
}

impl Table {
    pub(super) fn new(shape: Shape, slot_count_max: usize, bin: Bin<Garbage>) -> Self {
        let directory_len = 1 << shape.directory_bits;
        Self {
            shape,
            bin,
            depths: vec![0; directory_len].into(),
            used: vec![0; directory_len].into(),
            segment_count: 1,
            store_bytes: 0,
            node_count: 0,
            membership_count: 0,
            evicted_count: 0,
            held_counts: vec![0; slot_count_max].into(),
            newest: 0,
            volume: 0,
            hand: (0, 0),
            scratch: Vec::new(),
        }
    }

    /// The worker holds the block; it counts as used.
    pub(super) fn insert(&mut self, view: &View, hash: PrefixHash, slot: Slot) {
        if hash.0 == 0 || slot.index() >= self.held_counts.len() {
            return;
        }
        let spread = Spread::of(hash);
        if let Some(entry) = self.entry(view, spread) {
            self.add_holder(view, entry, slot);
        } else {
            self.count_new(view);
            let entry = self.room(view, spread);
            let only = Payload::Inline(Packed::of(&[slot.0]));
            let word = Word::new(spread.mark())
                .with_payload(only)
                .with_age(self.newest);
            entry.fill(spread.tag(), word);
            *self.used_mut(spread.directory_index(view.bits)) += 1;
            self.node_count += 1;
            self.count_holder(slot);
        }
    }

    /// The worker holds the block no more.
    pub(super) fn remove_holder(&mut self, view: &View, hash: PrefixHash, slot: Slot) {
        let spread = Spread::of(hash);
        let found = self.entry(view, spread).filter(|_| hash.0 != 0);
        let Some(entry) = found else { return };
        if entry.word().is_only(slot) {
            self.uncount_holder(slot);
            return self.remove(entry, spread.directory_index(view.bits));
        }
        if !slots(entry.word()).has(slot) {
            return;
        }
        self.uncount_holder(slot);
        if self.take_holder(entry, slot) {
            self.remove(entry, spread.directory_index(view.bits));
        }
    }

    /// The block was used.
    pub(super) fn touch(&mut self, view: &View, hash: PrefixHash) {
        if let Some(entry) = self.entry(view, Spread::of(hash)) {
            set_if_new(entry, entry.word().with_age(self.newest));
        }
    }

    /// The block has one continuation more.
    pub(super) fn branch(&mut self, view: &View, hash: PrefixHash) {
        if let Some(entry) = self.entry(view, Spread::of(hash)) {
            set_if_new(entry, entry.word().with_branch());
        }
    }

    /// Begins to load what the next steps will look at.
    pub(super) fn prefetch(&self, view: &View, hash: PrefixHash) {
        // SAFETY: the table is the shard's owner, and no step reclaims.
        unsafe { view.prefetch(Spread::of(hash)) };
    }

    /// How many blocks name the slot.
    pub(super) fn held_count(&self, slot: Slot) -> u32 {
        self.held_counts.get(slot.index()).copied().unwrap_or(0)
    }

    /// Takes all slots that `leaves` names out of one bucket.
    pub(super) fn purge_bucket(
        &mut self,
        view: &View,
        index: usize,
        bucket: usize,
        leaves: impl Fn(Slot) -> bool,
    ) {
        for entry in self.segment(view, index).entries(bucket) {
            if entry.tag().is_none() || !slots(entry.word()).any(&leaves) {
                continue;
            }
            self.scratch.clear();
            for slot in slots(entry.word()) {
                if leaves(slot) {
                    self.uncount_holder(slot);
                } else {
                    self.scratch.push(slot.0);
                }
            }
            if self.scratch.is_empty() {
                self.remove(entry, index);
            } else {
                self.replace_holders(entry, entry.word());
            }
        }
    }

    /// Directory entries that share the segment of entry `index`, from the first.
    pub(super) fn neighbours(&self, index: usize) -> std::ops::Range<usize> {
        let span = self.depths.len() >> self.depths[index];
        let first = index & !(span - 1);
        first..first + span
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self, view: &View) {
        let fresh = Segment::allocate();
        view.each_segment(|segment| self.bin.retire(Garbage::Full(segment)));
        (0..view.directory_len()).for_each(|index| view.replace(index, fresh));
        self.depths.fill(0);
        self.used.fill(0);
        self.held_counts.fill(0);
        self.segment_count = 1;
        self.store_bytes = 0;
        self.node_count = 0;
        self.membership_count = 0;
    }

    /// Between steps: frees some of what no pin can see, and shows the sums.
    pub(super) fn settle(&mut self, view: &View) {
        self.bin.reclaim_up_to(RECLAIM_MAX);
        view.sums.bytes.set(self.bytes() as u64);
        view.sums.node_count.set(self.node_count as u64);
        view.sums.membership_count.set(self.membership_count as u64);
        view.sums.evicted_count.set(self.evicted_count);
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape.directory_bytes() + self.segment_count * SEGMENT_BYTES + self.store_bytes
    }

    pub(super) fn segment<'v>(&self, view: &'v View, index: usize) -> &'v Segment {
        // SAFETY: the table is the shard's owner, and no step reclaims.
        unsafe { view.segment(index) }
    }

    fn entry<'v>(&self, view: &'v View, spread: Spread) -> Option<Entry<'v>> {
        let segment = self.segment(view, spread.directory_index(view.bits));
        let [a, b] = spread.buckets();
        let mut both = segment.entries(a).chain(segment.entries(b));
        both.find(|entry| entry.is_of(spread))
    }

    pub(super) fn used_mut(&mut self, index: usize) -> &mut u32 {
        let first = self.neighbours(index).start;
        &mut self.used[first]
    }

    /// Ages by volume: every so many new blocks a new generation begins. Uses of known blocks do not age the others: they
    /// take no room, and traffic that brings nothing new would have to touch its own blocks for ever.
    fn count_new(&mut self, view: &View) {
        self.volume += 1;
        if self.volume >= self.shape.generation_volume() {
            self.volume = 0;
            self.newest = self.newest.wrapping_add(1);
            view.set_newest(self.newest);
        }
    }

    /// How many generations ago the block was used.
    pub(super) fn distance(&self, word: Word) -> u8 {
        self.newest.wrapping_sub(word.age())
    }

    pub(super) fn count_holder(&mut self, slot: Slot) {
        self.membership_count += 1;
        self.held_counts[slot.index()] += 1;
    }

    pub(super) fn uncount_holder(&mut self, slot: Slot) {
        self.membership_count -= 1;
        self.held_counts[slot.index()] -= 1;
    }

    /// The bucket after this one, round and round.
    pub(super) fn after(&self, index: usize, bucket: usize) -> (usize, usize) {
        match bucket + 1 {
            next if next < BUCKET_COUNT => (index, next),
            _ => (self.neighbours(index).end % self.depths.len(), 0),
        }
    }
}

pub(super) fn set_if_new(entry: Entry<'_>, word: Word) {
    if entry.word() != word {
        entry.set_word(word);
    }
}

/// The holders of a word that the owner has just read.
pub(super) fn slots<'s>(word: Word) -> Slots<'s> {
    // SAFETY: called by the owner's steps only, on words of entries in use; no step reclaims.
    unsafe { Slots::of(word) }
}
