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
