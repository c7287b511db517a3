//! The workers that may get a request: a list to walk, a bitset to ask, and for the policies that hash keys a name for
//! each and a ring. Made by the control thread with each fleet snapshot, read by every core, never changed.

use shards::Slot;
use xxhash_rust::xxh3::xxh3_64;

const BITS: usize = u64::BITS as usize;

/// Points that each worker has on the ring, as in vllm-router: the shares of the workers then differ by some 8 %.
pub const RING_POINTS: usize = 160;

/// The low bits of a point are its worker's slot, the others its place.
const POINT_SLOT_BITS: u32 = u16::BITS;

/// A worker's name for the policies that hash: made of its URL alone, so that every router on every machine hashes alike,
/// whatever the order of the workers. (Of a data-parallel rank: `url@rank`.)
pub fn name_of(url: &str) -> u64 {
    xxh3_64(url.as_bytes())
}

/// Slots of eligible workers of one role and model.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    slots: Vec<Slot>,
    bits: Vec<u64>,
    /// By the index of `slots`.
    names: Vec<u64>,
    /// Points in order. Empty: nobody asked for a ring.
    ring: Vec<u64>,
}

impl FromIterator<(Slot, u64)> for Candidates {
    /// Slots with their names. Keeps the order of first appearance; a slot given twice counts once.
    fn from_iter<I: IntoIterator<Item = (Slot, u64)>>(workers: I) -> Candidates {
        let mut candidates = Candidates::default();
        for (slot, name) in workers {
            let (word, bit) = place(slot);
            if candidates.bits.len() <= word {
                candidates.bits.resize(word + 1, 0);
            }
            if candidates.bits[word] & bit == 0 {
                candidates.bits[word] |= bit;
                candidates.slots.push(slot);
                candidates.names.push(name);
            }
        }
        candidates
    }
}

impl FromIterator<Slot> for Candidates {
    /// Slots, named by their numbers: for whoever does not hash.
    fn from_iter<I: IntoIterator<Item = Slot>>(slots: I) -> Candidates {
        let named = slots.into_iter().map(|slot| (slot, u64::from(slot.0)));
        named.collect()
    }
}

impl Candidates {
    /// All of them, in an order that means nothing.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// A bit for each, by slot.
    pub(super) fn bits(&self) -> &[u64] {
        &self.bits
    }

    /// Whether the slot is one of them.
    #[inline]
    pub fn contains(&self, slot: Slot) -> bool {
        let (word, bit) = place(slot);
        self.bits.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Whether nobody may get the request.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// The same with a ring of all of them. Some 20 ns a point: for the control thread.
    #[must_use]
    pub fn with_ring(mut self) -> Candidates {
        let workers = self.slots.iter().zip(&self.names);
        self.ring = workers
            .flat_map(|(slot, name)| (0..RING_POINTS as u64).map(|n| point(*slot, *name, n)))
            .collect();
        self.ring.sort_unstable();
        self
    }

    /// The same with the part of another's ring that is its own: all of these are among those. Cheaper than sorting anew.
    #[must_use]
    pub fn with_ring_of(mut self, all: &Candidates) -> Candidates {
        let points = all.ring.iter().copied();
        self.ring = points
            .filter(|point| self.contains(slot_of(*point)))
            .collect();
        self
    }

    /// Whether there is a ring.
    pub fn has_ring(&self) -> bool {
        !self.ring.is_empty()
    }

    /// The workers as they stand on the ring from a key on, once round: each comes many times.
    #[inline]
    pub fn around(&self, key: u64) -> impl Iterator<Item = Slot> {
        let at = self
            .ring
            .partition_point(|point| point >> POINT_SLOT_BITS < key >> POINT_SLOT_BITS);
        let (before, from) = self.ring.split_at(at);
        from.iter().chain(before).map(|point| slot_of(*point))
    }

    /// The workers with their weights for a key (rendezvous hashing): the heaviest is the key's own.
    #[inline]
    pub fn weights(&self, key: u64) -> impl Iterator<Item = (Slot, u64)> {
        let key_factor = key.rotate_left(32) | 1;
        self.slots.iter().zip(&self.names).map(move |(slot, name)| {
            // Both halves of a product, as in wyhash: a few cycles for each worker.
            let product = u128::from(name ^ key) * u128::from(key_factor);
            (*slot, product as u64 ^ (product >> 64) as u64)
        })
    }
}

/// The `n`-th point of a worker: SplitMix64's finish over its name and number.
fn point(slot: Slot, name: u64, n: u64) -> u64 {
    let mixed = name.wrapping_add((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ (mixed >> 31)) >> POINT_SLOT_BITS << POINT_SLOT_BITS | u64::from(slot.0)
}

fn slot_of(point: u64) -> Slot {
    Slot(point as u16)
}

fn place(slot: Slot) -> (usize, u64) {
    let index = usize::from(slot.0);
    (index / BITS, 1 << (index % BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_given_once_and_nothing_else() {
        let given = [Slot(700), Slot(0), Slot(63), Slot(64), Slot(0), Slot(8191)];
        let candidates: Candidates = given.into_iter().collect();
        assert_eq!(
            candidates.slots(),
            [Slot(700), Slot(0), Slot(63), Slot(64), Slot(8191)]
        );
        assert_eq!((candidates.len(), candidates.is_empty()), (5, false));
        for index in 0..=u16::MAX {
            assert_eq!(
                candidates.contains(Slot(index)),
                given.contains(&Slot(index)),
                "slot {index}"
            );
        }
    }

    #[test]
    fn none_contains_nothing() {
        assert!(Candidates::default().is_empty());
        assert!(!Candidates::default().contains(Slot(0)));
    }
}
