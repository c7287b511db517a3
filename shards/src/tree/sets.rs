//! The holder sets of a shard's entries: grown, shrunk, paid for. Owner only, as all of `table.rs`.

use super::garbage::Garbage;
use super::holders::{LIST_MAX, Store, build, build_bytes, clear_bit, set_bit};
use super::segment::Entry;
use super::table::{GARBAGE_MAX, Table, set_if_new, slots};
use super::view::View;
use super::word::{Payload, Word};
use crate::ids::Slot;

/// Buckets looked at for an old list when lists have used up the budget.
const HAND_BUCKETS: usize = 32;

impl Table {
    pub(super) fn add_holder(&mut self, view: &View, entry: Entry<'_>, slot: Slot) {
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

    /// Takes one of an entry's holders out, uncounted. True: it was the last one, and is still in the word.
    pub(super) fn take_holder(&mut self, entry: Entry<'_>, slot: Slot) -> bool {
        let word = entry.word();
        // Of many, one bit: a prefix of the whole fleet is not built anew for each worker that lets it go.
        if let Payload::Bitmap(bitmap) = word.payload()
            && slots(word).nth(LIST_MAX).is_some()
        {
            // SAFETY: the table is the shard's owner; the word is current, so its bitmap is not retired.
            unsafe { clear_bit(bitmap, slot) };
            return false;
        }
        self.scratch.clear();
        let others = slots(word).filter(|held| *held != slot);
        self.scratch.extend(others.map(|slot| slot.0));
        if !self.scratch.is_empty() {
            self.replace_holders(entry, word);
        }
        self.scratch.is_empty()
    }

    /// `scratch` becomes the holders of the entry.
    pub(super) fn replace_holders(&mut self, entry: Entry<'_>, word: Word) {
        self.store_bytes += build_bytes(&self.scratch);
        entry.set_word(word.with_payload(build(&self.scratch)));
        self.retire_store(word);
    }

    pub(super) fn retire_store(&mut self, word: Word) {
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
            if entry.tag().is_some() && Store::of(word).is_some() && self.distance(word) > 0 {
                self.evict(entry, index);
            }
        }
        self.hand = self.after(index, bucket);
    }
}

/// Bytes that a word which the owner has just read has outside itself.
fn store_bytes(word: Word) -> usize {
    // SAFETY: as in `slots`.
    Store::of(word).map_or(0, |store| unsafe { store.bytes() })
}
