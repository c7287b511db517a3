//! Purges in progress: one pass over the table takes out all removed workers at once, a few buckets per step.
//!
//! A slot's purge ends when no block names it any more (the table counts), not at some place of the pass: entries that
//! move or split meanwhile change nothing. Inserts of a slot wait while it is being purged, so the count only falls.

use super::table::Table;
use super::view::View;
use crate::ids::{SLOT_COUNT_MAX, Slot};

/// Buckets per step: about the cost of one insert.
const STEP_BUCKETS: usize = 8;

pub(super) struct Sweep {
    /// Purges that wait in the queue of lessons.
    queued: Vec<Slot>,
    running: Vec<Slot>,
    /// `running` as bits.
    bits: Box<[u64; SLOT_COUNT_MAX / 64]>,
    /// Next directory entry and bucket.
    place: (usize, usize),
}

impl Sweep {
    pub(super) fn new() -> Self {
        Self {
            queued: Vec::new(),
            running: Vec::new(),
            bits: Box::new([0; _]),
            place: (0, 0),
        }
    }

    /// A purge has been queued.
    pub(super) fn announce(&mut self, slot: Slot) {
        self.queued.push(slot);
    }

    /// A queued purge's turn has come.
    pub(super) fn start(&mut self, slot: Slot, table: &Table) {
        if let Some(place) = self.queued.iter().position(|&queued| queued == slot) {
            self.queued.swap_remove(place);
        }
        if table.held_count(slot) > 0 && !self.running.contains(&slot) {
            self.running.push(slot);
            self.bits[slot.index() / 64] |= 1 << (slot.0 % 64);
        }
    }

    pub(super) fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether the slot's purge has begun and not ended.
    pub(super) fn purges(&self, slot: Slot) -> bool {
        self.running.contains(&slot)
    }

    /// Whether a purge of the slot is queued or running.
    pub(super) fn is_pending(&self, slot: Slot) -> bool {
        self.queued.contains(&slot) || self.purges(slot)
    }

    /// Forgets all purges, queued and running.
    pub(super) fn clear(&mut self) {
        self.queued.clear();
        self.running.clear();
        self.bits.fill(0);
    }

    /// Goes over the next few buckets.
    pub(super) fn step(&mut self, view: &View, table: &mut Table) {
        let bits = &self.bits;
        for _ in 0..STEP_BUCKETS {
            let (index, bucket) = self.place;
            table.purge_bucket(view, index, bucket, |slot| {
                bits[slot.index() / 64] >> (slot.0 % 64) & 1 == 1
            });
            self.place = table.after(index, bucket);
        }
        let bits = &mut self.bits;
        self.running.retain(|&slot| {
            let is_held = table.held_count(slot) > 0;
            if !is_held {
                bits[slot.index() / 64] &= !(1 << (slot.0 % 64));
            }
            is_held
        });
    }
}
