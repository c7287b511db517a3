//! Names of things that several cores talk about: slots, workers, prefix hashes. Plain values, owned by whoever holds them.

/// How many slots the books can have: 4,096 workers and as many old incarnations that still drain.
pub const SLOT_COUNT_MAX: usize = 8192;

/// Index of a worker's place in the books; below [`SLOT_COUNT_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Slot(pub u16);

impl Slot {
    /// The slot as an index into a table with one element per slot.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One worker in one of its lives. A worker that comes back gets a new incarnation (31 bits, counted per slot from 1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerId {
    /// The worker's place in the books.
    pub slot: Slot,
    /// Which life of that slot is meant.
    pub incarnation: u32,
}

/// Chained hash of a prompt up to the end of one block. 0 is never valid (route maps 0 to 1); the tree ignores it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PrefixHash(pub u64);

/// A set of slots: a bit each, 1 KiB.
#[derive(Clone, Debug)]
pub struct SlotSet([u64; SLOT_COUNT_MAX / 64]);

impl Default for SlotSet {
    fn default() -> Self {
        Self([0; _])
    }
}

impl SlotSet {
    /// Whether a slot is in it.
    #[inline]
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.word(slot.index() / 64) >> (slot.0 % 64) & 1 == 1
    }

    /// Puts a slot in. One of [`SLOT_COUNT_MAX`] or above is left out.
    #[inline]
    pub fn add(&mut self, slot: Slot) {
        if let Some(bits) = self.0.get_mut(slot.index() / 64) {
            *bits |= 1 << (slot.0 % 64);
        }
    }

    /// Empties it.
    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    /// The slots from `64 * index` on, as bits.
    pub(crate) fn set_word(&mut self, index: usize, bits: u64) {
        if let Some(word) = self.0.get_mut(index) {
            *word = bits;
        }
    }

    /// The bits of slots `64 * index` and up.
    #[inline]
    pub(crate) fn word(&self, index: usize) -> u64 {
        self.0.get(index).copied().unwrap_or(0)
    }
}
