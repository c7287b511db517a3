//! Where a new key goes: to a free entry, to one made free by moving, to a split segment, or in place of the oldest. Owner
//! only, as all of `table.rs`.

use super::garbage::Garbage;
use super::segment::{Entry, SEGMENT_BYTES, SEGMENT_ENTRIES, Segment};
use super::spread::{Spread, directory_index, other_bucket};
use super::table::{GARBAGE_MAX, Table, slots};
use super::view::View;

/// How many moves make room in a full bucket.
const MOVES_MAX: usize = 2;
/// Fuller segments are not worth searching for room by moving.
const MOVABLE_ENTRIES: u32 = (SEGMENT_ENTRIES - SEGMENT_ENTRIES / 32) as u32;

impl Table {
    /// An empty entry for a key: a free one, one made free by moving, one of a split segment, or that of the oldest.
    pub(super) fn room<'v>(&mut self, view: &'v View, spread: Spread) -> Entry<'v> {
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
    ) -> Option<Entry<'v>> {
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
            let Some(tag) = entry.tag() else { continue };
            let is_high = directory_index(tag, view.bits) >= middle;
            // SAFETY: both are new, and nobody else knows them yet.
            let half = unsafe { if is_high { high.as_ref() } else { low.as_ref() } };
            let place = half.entries(bucket).find(|entry| entry.tag().is_none());
            place
                .expect("a bucket's entries fit into that bucket")
                .fill(tag, entry.word());
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

    /// The oldest of a key's candidates makes room.
    fn evict_oldest<'v>(
        &mut self,
        segment: &'v Segment,
        index: usize,
        buckets: [usize; 2],
    ) -> Entry<'v> {
        let [a, b] = buckets.map(|bucket| segment.entries(bucket));
        // Of equals the first (max_by_key takes the last).
        let oldest = a
            .chain(b)
            .rev()
            .max_by_key(|entry| self.distance(entry.word()));
        let entry = oldest.expect("a bucket has entries");
        self.evict(entry, index);
        entry
    }

    pub(super) fn evict(&mut self, entry: Entry<'_>, index: usize) {
        for slot in slots(entry.word()) {
            self.uncount_holder(slot);
        }
        self.evicted_count += 1;
        self.remove(entry, index);
    }

    /// Unlinks an entry whose holders are already uncounted.
    pub(super) fn remove(&mut self, entry: Entry<'_>, index: usize) {
        let word = entry.word();
        entry.erase();
        self.retire_store(word);
        *self.used_mut(index) -= 1;
        self.node_count -= 1;
    }
}

/// A free entry in the emptier of two buckets.
#[inline]
fn free_entry(segment: &Segment, [a, b]: [usize; 2]) -> Option<Entry<'_>> {
    let (in_a, count_a) = free_in(segment.entries(a));
    let (in_b, count_b) = free_in(segment.entries(b));
    if count_b > count_a { in_b } else { in_a }
}

/// A free entry of a bucket, and how many there are.
#[inline]
fn free_in<'v>(entries: impl Iterator<Item = Entry<'v>>) -> (Option<Entry<'v>>, u32) {
    let mut free = (None, 0);
    for entry in entries {
        if entry.tag().is_none() {
            free = (Some(entry), free.1 + 1);
        }
    }
    free
}

/// Frees an entry of a full bucket by moving one to its other bucket, there first another one, and so on.
fn make_free(segment: &Segment, bucket: usize, moves_max: usize) -> Option<Entry<'_>> {
    segment.entries(bucket).find_map(|entry| {
        let tag = entry.tag()?;
        let other = other_bucket(bucket, tag);
        let hole = match moves_max {
            1 => segment.entries(other).find(|entry| entry.tag().is_none()),
            _ => make_free(segment, other, moves_max - 1),
        }?;
        // First there, then here: a reader may see both, or (looking there, then here) neither, once.
        hole.fill(tag, entry.word());
        entry.erase();
        Some(entry)
    })
}
