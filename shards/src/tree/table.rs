//! The storage of one shard as its owner sees it: where keys go, what is split, what is forgotten, what it all costs.
//! Everything here runs on the owner's core; readers see the results through the shard's `View`.
//!
//! No step here frees memory: what is unlinked is retired, and only `reclaim` (between steps) frees. So references into
//! segments stay good during a step.

use super::garbage::Garbage;
use super::holders::{Slots, Store, build, build_bytes, set_bit};
use super::segment::{BUCKET_COUNT, Entry, SEGMENT_BYTES, SEGMENT_ENTRIES, Segment};
use super::spread::Spread;
use super::view::{DIRECTORY_BITS_MAX, View};
use super::word::{Packed, Payload, Word};
use crate::epoch::Bin;
use crate::ids::{PrefixHash, Slot};

/// Generations that fit into a shard's capacity. An entry's age has 8 bits: 8 capacities of use until it wraps.
const GENERATIONS: usize = 32;
/// How many moves make room in a full bucket.
const MOVES_MAX: usize = 2;
/// Fuller segments are not worth searching for room by moving.
const MOVABLE_ENTRIES: u32 = (SEGMENT_ENTRIES - SEGMENT_ENTRIES / 32) as u32;
/// Buckets looked at for an old list when lists have used up the budget.
const HAND_BUCKETS: usize = 32;
/// Retired pieces that may wait for a pinned core; above that nothing is replaced.
const GARBAGE_MAX: usize = 1 << 16;
/// Retired pieces freed per turn of work.
const RECLAIM_MAX: usize = 128;
/// Directory entries per segment beyond one, in bits: hashes are not spread perfectly evenly.
const DIRECTORY_SPARE_BITS: u32 = if cfg!(loom) { 0 } else { 2 };

/// How one shard's byte budget is used.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    bytes_max: usize,
    /// Seven eighths: the rest is for lists and bitmaps, so that a shared prefix always finds room for its holders.
    segment_bytes_max: usize,
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

    /// Uses per generation.
    fn generation_volume(self) -> usize {
        (self.segment_bytes_max / 16 / GENERATIONS).max(1)
    }
}

pub(super) struct Table {
    shape: Shape,
    bin: Bin<Garbage>,
    /// Per directory entry: how many hash bits its segment is for.
    depths: Box<[u8]>,
    /// Entries in use, by the first directory entry of their segment.
    used: Box<[u32]>,
    segment_count: usize,
    store_bytes: usize,
    node_count: usize,
    membership_count: usize,
    evicted_count: u64,
    /// Blocks that name a slot, by slot.
    held_counts: Box<[u32]>,
    newest: u8,
    /// Uses in the newest generation.
    volume: usize,
    /// Where the search for old lists goes on: directory entry, bucket.
    hand: (usize, usize),
    scratch: Vec<u16>,
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
        self.count_use(view);
        let spread = Spread::of(hash);
        if let Some(entry) = self.entry(view, hash, spread) {
            self.add_holder(view, entry, slot);
        } else {
            let entry = self.room(view, spread);
            let only = Payload::Inline(Packed::of(&[slot.0]));
            let word = Word::new(spread.mark())
                .with_payload(only)
                .with_age(self.newest);
            entry.fill(hash, word);
            *self.used_mut(spread.directory_index(view.bits)) += 1;
            self.node_count += 1;
            self.count_holder(slot);
        }
    }

    /// The block was used.
    pub(super) fn touch(&mut self, view: &View, hash: PrefixHash) {
        self.count_use(view);
        if let Some(entry) = self.entry(view, hash, Spread::of(hash)) {
            set_if_new(entry, entry.word().with_age(self.newest));
        }
    }

    /// The block has one continuation more.
    pub(super) fn branch(&mut self, view: &View, hash: PrefixHash) {
        if let Some(entry) = self.entry(view, hash, Spread::of(hash)) {
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
            if entry.key().is_none() || !slots(entry.word()).any(&leaves) {
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

    fn bytes(&self) -> usize {
        self.shape.directory_bytes() + self.segment_count * SEGMENT_BYTES + self.store_bytes
    }

    fn segment<'v>(&self, view: &'v View, index: usize) -> &'v Segment {
        // SAFETY: the table is the shard's owner, and no step reclaims.
        unsafe { view.segment(index) }
    }

    fn entry<'v>(&self, view: &'v View, hash: PrefixHash, spread: Spread) -> Option<&'v Entry> {
        let segment = self.segment(view, spread.directory_index(view.bits));
        let [a, b] = spread.buckets().map(|bucket| segment.entries(bucket));
        a.iter().chain(b).find(|entry| entry.key() == Some(hash))
    }

    fn used_mut(&mut self, index: usize) -> &mut u32 {
        let first = self.neighbours(index).start;
        &mut self.used[first]
    }

    /// Ages by volume: every so many uses a new generation begins.
    fn count_use(&mut self, view: &View) {
        self.volume += 1;
        if self.volume >= self.shape.generation_volume() {
            self.volume = 0;
            self.newest = self.newest.wrapping_add(1);
            view.set_newest(self.newest);
        }
    }

    /// How many generations ago the block was used.
    fn distance(&self, word: Word) -> u8 {
        self.newest.wrapping_sub(word.age())
    }

    fn count_holder(&mut self, slot: Slot) {
        self.membership_count += 1;
        self.held_counts[slot.index()] += 1;
    }

    fn uncount_holder(&mut self, slot: Slot) {
        self.membership_count -= 1;
        self.held_counts[slot.index()] -= 1;
    }

    // Sets of holders.

    fn add_holder(&mut self, view: &View, entry: &Entry, slot: Slot) {
        // First the age: what is in use is not taken when room is needed below.
        let word = entry.word().with_age(self.newest);
        set_if_new(entry, word);
        if let Payload::Bitmap(bitmap) = word.payload() {
            // SAFETY: the table is the shard's owner; the word is current, so its bitmap is not retired.
            match unsafe { set_bit(bitmap, slot) } {
                Some(false) => return,
                Some(true) => return self.count_holder(slot),
                None => {}
            }
        }
        self.scratch.clear();
        self.scratch.extend(slots(word).map(|slot| slot.0));
        let Err(place) = self.scratch.binary_search(&slot.0) else {
            return;
        };
        self.scratch.insert(place, slot.0);
        let more_bytes = build_bytes(&self.scratch).saturating_sub(store_bytes(word));
        if self.has_room_for(view, more_bytes) {
            self.count_holder(slot);
            self.replace_holders(entry, word);
        }
    }

    /// `scratch` becomes the holders of the entry.
    fn replace_holders(&mut self, entry: &Entry, word: Word) {
        self.store_bytes += build_bytes(&self.scratch);
        entry.set_word(word.with_payload(build(&self.scratch)));
        self.retire_store(word);
    }

    fn retire_store(&mut self, word: Word) {
        self.store_bytes -= store_bytes(word);
        if let Some(store) = Store::of(word) {
            self.bin.retire(Garbage::Store(store));
        }
    }

    /// Whether lists and bitmaps may grow by that many bytes; old ones are forgotten for it.
    fn has_room_for(&mut self, view: &View, bytes: usize) -> bool {
        if self.bin.len() >= GARBAGE_MAX {
            return false;
        }
        for _ in 0..HAND_BUCKETS {
            if self.bytes() + bytes <= self.shape.bytes_max {
                return true;
            }
            self.forget_stores_at_hand(view);
        }
        self.bytes() + bytes <= self.shape.bytes_max
    }

    /// One bucket further; what it has of lists and bitmaps not used in this generation is forgotten.
    fn forget_stores_at_hand(&mut self, view: &View) {
        let (index, bucket) = self.hand;
        for entry in self.segment(view, index).entries(bucket) {
            let word = entry.word();
            if entry.key().is_some() && Store::of(word).is_some() && self.distance(word) > 0 {
                self.evict(entry, index);
            }
        }
        self.hand = self.after(index, bucket);
    }

    /// The bucket after this one, round and round.
    pub(super) fn after(&self, index: usize, bucket: usize) -> (usize, usize) {
        match bucket + 1 {
            next if next < BUCKET_COUNT => (index, next),
            _ => (self.neighbours(index).end % self.depths.len(), 0),
        }
    }

    // Room for keys.

    /// An empty entry for a key: a free one, one made free by moving, one of a split segment, or that of the oldest.
    fn room<'v>(&mut self, view: &'v View, spread: Spread) -> &'v Entry {
        let index = spread.directory_index(view.bits);
        let buckets = spread.buckets();
        loop {
            let segment = self.segment(view, index);
            let found =
                free_entry(segment, buckets).or_else(|| self.move_away(segment, index, buckets));
            if let Some(entry) = found {
                return entry;
            }
            if !self.split(view, index) {
                return self.evict_oldest(segment, index, buckets);
            }
        }
    }

    fn move_away<'v>(
        &mut self,
        segment: &'v Segment,
        index: usize,
        [a, b]: [usize; 2],
    ) -> Option<&'v Entry> {
        if *self.used_mut(index) > MOVABLE_ENTRIES {
            return None;
        }
        (1..=MOVES_MAX)
            .find_map(|moves| make_free(segment, a, moves).or_else(|| make_free(segment, b, moves)))
    }

    /// Two segments for one, by the next hash bit. False: the budget or the directory is used up. Costs one segment's copy.
    fn split(&mut self, view: &View, index: usize) -> bool {
        let range = self.neighbours(index);
        let segment_bytes = (self.segment_count + 1) * SEGMENT_BYTES;
        let fits = segment_bytes <= self.shape.segment_bytes_max
            && self.bytes() + SEGMENT_BYTES <= self.shape.bytes_max;
        if range.len() < 2 || !fits || self.bin.len() >= GARBAGE_MAX {
            return false;
        }
        let middle = range.start + range.len() / 2;
        let (low, high) = (Segment::allocate(), Segment::allocate());
        let mut used = [0, 0];
        for (bucket, entry) in self.segment(view, index).all_entries() {
            let Some(key) = entry.key() else { continue };
            let is_high = Spread::of(key).directory_index(view.bits) >= middle;
            // SAFETY: both are new, and nobody else knows them yet.
            let half = unsafe { if is_high { high.as_ref() } else { low.as_ref() } };
            let place = half
                .entries(bucket)
                .iter()
                .find(|entry| entry.key().is_none());
            place
                .expect("a bucket's entries fit into that bucket")
                .fill(key, entry.word());
            used[usize::from(is_high)] += 1;
        }
        self.bin.retire(Garbage::Segment(view.pointer(index)));
        for neighbour in range.clone() {
            view.replace(neighbour, if neighbour < middle { low } else { high });
            self.depths[neighbour] += 1;
        }
        self.used[range.start] = used[0];
        self.used[middle] = used[1];
        self.segment_count += 1;
        true
    }

    // Forgetting.

    /// The oldest of a key's candidates makes room.
    fn evict_oldest<'v>(
        &mut self,
        segment: &'v Segment,
        index: usize,
        buckets: [usize; 2],
    ) -> &'v Entry {
        let [a, b] = buckets.map(|bucket| segment.entries(bucket));
        // Of equals the first (max_by_key takes the last).
        let oldest = a
            .iter()
            .chain(b)
            .rev()
            .max_by_key(|entry| self.distance(entry.word()));
        let entry = oldest.expect("a bucket has entries");
        self.evict(entry, index);
        entry
    }

    fn evict(&mut self, entry: &Entry, index: usize) {
        for slot in slots(entry.word()) {
            self.uncount_holder(slot);
        }
        self.evicted_count += 1;
        self.remove(entry, index);
    }

    /// Unlinks an entry whose holders are already uncounted.
    fn remove(&mut self, entry: &Entry, index: usize) {
        let word = entry.word();
        entry.erase();
        self.retire_store(word);
        *self.used_mut(index) -= 1;
        self.node_count -= 1;
    }
}

fn set_if_new(entry: &Entry, word: Word) {
    if entry.word() != word {
        entry.set_word(word);
    }
}

/// The holders of a word that the owner has just read.
fn slots<'s>(word: Word) -> Slots<'s> {
    // SAFETY: called by the owner's steps only, on words of entries in use; no step reclaims.
    unsafe { Slots::of(word) }
}

/// Bytes that a word which the owner has just read has outside itself.
fn store_bytes(word: Word) -> usize {
    // SAFETY: as in `slots`.
    Store::of(word).map_or(0, |store| unsafe { store.bytes() })
}

/// A free entry in the emptier of two buckets.
fn free_entry(segment: &Segment, [a, b]: [usize; 2]) -> Option<&Entry> {
    let is_free = |entry: &&Entry| entry.key().is_none();
    let free_count = |bucket| segment.entries(bucket).iter().filter(is_free).count();
    let emptier = if free_count(b) > free_count(a) { b } else { a };
    segment.entries(emptier).iter().find(is_free)
}

/// Frees an entry of a full bucket by moving one to its other bucket, there first another one, and so on.
fn make_free(segment: &Segment, bucket: usize, moves_max: usize) -> Option<&Entry> {
    segment.entries(bucket).iter().find_map(|entry| {
        let key = entry.key()?;
        let [a, b] = Spread::of(key).buckets();
        let other = if a == bucket { b } else { a };
        let hole = match moves_max {
            1 => segment
                .entries(other)
                .iter()
                .find(|entry| entry.key().is_none()),
            _ => make_free(segment, other, moves_max - 1),
        }?;
        // First there, then here: a reader may see both, or (looking there, then here) neither, once.
        hole.fill(key, entry.word());
        entry.erase();
        Some(entry)
    })
}
