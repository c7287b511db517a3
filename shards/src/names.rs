//! The names that one engine gives its blocks, and what we call them: engine hash -> own key, with the tiers that hold the
//! block. Owned by whoever reads that engine's events; shared with nobody, so there is no atomic here.
//!
//! Open addressing with linear probing; the table grows by a quarter, so that once it has grown it is between 62 % and 78 %
//! full: 17 bytes a place, 22 to 27 a block. A block that goes is filled up from behind: no tombstones, so that
//! an engine whose cache turns over for months costs what it cost on the first day.
//!
//! Invariants:
//! - K1 a name found has the key it was given last;
//! - K2 a block is gone when each tier has let it go as often as it took it (an engine may hold copies; counted up to 3).

use crate::ids::PrefixHash;

/// Storage tiers that are told apart.
pub const TIER_COUNT: usize = 4;
/// Most copies that are counted in a tier.
const COPIES_MAX: u8 = 3;
/// Places of a table that has just begun.
const PLACES_MIN: usize = 16;
/// 2^64 divided by the golden ratio: spreads names that are numbered one after the other.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// One engine's names.
#[derive(Debug, Default)]
pub struct BlockNames {
    places: Box<[Place]>,
    /// Two bits a tier: copies.
    copies: Box<[u8]>,
    len: usize,
}

/// A name with its key, side by side: one cache line tells both.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// 0: the place is free.
    name: u64,
    key: PrefixHash,
}

const FREE: Place = Place {
    name: 0,
    key: PrefixHash(0),
};

/// What became of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The tier's first copy came, or its last one went: of the block with this key.
    Of(PrefixHash),
    /// There was one already, or there still is one.
    None,
    /// Nobody knows a block of that name (in that tier).
    Unknown,
}

impl BlockNames {
    /// Blocks known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no block is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of the table.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.places.len() * 17
    }

    /// The key of a name, whatever tier holds it.
    #[must_use]
    pub fn key(&self, name: u64) -> Option<PrefixHash> {
        self.place(name).map(|place| self.places[place].key)
    }

    /// A tier (below [`TIER_COUNT`]) took a copy. `None`: it had one. A name that comes back with another key takes it over,
    /// and the old key is given back to be forgotten.
    pub fn store(
        &mut self,
        name: u64,
        key: PrefixHash,
        tier: usize,
    ) -> (Change, Option<PrefixHash>) {
        let Some(place) = self.place(name) else {
            self.insert(name, key, 1 << (2 * tier));
            return (Change::Of(key), None);
        };
        if self.places[place].key != key {
            let old = std::mem::replace(&mut self.places[place].key, key);
            self.copies[place] = 1 << (2 * tier);
            return (Change::Of(key), Some(old));
        }
        let count = self.copies[place] >> (2 * tier) & COPIES_MAX;
        if count < COPIES_MAX {
            self.copies[place] += 1 << (2 * tier);
        }
        let change = if count == 0 {
            Change::Of(key)
        } else {
            Change::None
        };
        (change, None)
    }

    /// A tier let a copy go.
    pub fn remove(&mut self, name: u64, tier: usize) -> Change {
        let Some(place) = self.place(name) else {
            return Change::Unknown;
        };
        let key = self.places[place].key;
        let count = self.copies[place] >> (2 * tier) & COPIES_MAX;
        if count == 0 {
            return Change::Unknown;
        }
        self.copies[place] -= 1 << (2 * tier);
        if self.copies[place] == 0 {
            self.free(place);
        }
        if count == 1 {
            Change::Of(key)
        } else {
            Change::None
        }
    }

    /// Forgets everything, and says what was known: each key once for each tier that held it.
    pub fn drain(&mut self, mut gone: impl FnMut(PrefixHash, usize)) {
        for (place, copies) in self.places.iter().zip(&self.copies) {
            let tiers = (0..TIER_COUNT).filter(|tier| copies >> (2 * tier) & COPIES_MAX != 0);
            tiers.for_each(|tier| gone(place.key, tier));
        }
        *self = Self::default();
    }

    /// Begins to load the place of a name.
    #[inline]
    pub fn prefetch(&self, name: u64) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if !self.places.is_empty() {
            let home = self.home(name);
            // SAFETY: a prefetch has no effect but on caches; SSE is part of x86_64.
            unsafe {
                use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>((&raw const self.places[home]).cast());
                _mm_prefetch::<_MM_HINT_T0>((&raw const self.copies[home]).cast());
            }
        }
        let _ = name;
    }

    /// 0 means a free place.
    #[inline]
    fn not_0(name: u64) -> u64 {
        if name == 0 { SPREAD } else { name }
    }

    /// The place where a name would like to be: its share of the table, so that any size will do.
    #[inline]
    fn home(&self, name: u64) -> usize {
        let spread = (name ^ name >> 32).wrapping_mul(SPREAD);
        ((u128::from(spread) * self.places.len() as u128) >> 64) as usize
    }

    fn next(&self, place: usize) -> usize {
        if place + 1 == self.places.len() {
            0
        } else {
            place + 1
        }
    }

    #[inline]
    fn place(&self, name: u64) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let name = Self::not_0(name);
        let mut place = self.home(name);
        loop {
            match self.places[place].name {
                found if found == name => return Some(place),
                // Comes: the table is never full.
                0 => return None,
                _ => place = self.next(place),
            }
        }
    }

    fn insert(&mut self, name: u64, key: PrefixHash, copies: u8) {
        if (self.len + 1) * 32 > self.places.len() * 25 {
            self.grow();
        }
        self.put(Self::not_0(name), key, copies);
        self.len += 1;
    }

    fn put(&mut self, name: u64, key: PrefixHash, copies: u8) {
        let mut place = self.home(name);
        while self.places[place].name != 0 {
            place = self.next(place);
        }
        (self.places[place], self.copies[place]) = (Place { name, key }, copies);
    }

    fn grow(&mut self) {
        let place_count = (self.places.len() + self.places.len() / 4).max(PLACES_MIN);
        let old = std::mem::replace(
            self,
            Self {
                places: vec![FREE; place_count].into(),
                copies: vec![0; place_count].into(),
                len: self.len,
            },
        );
        for (place, copies) in old.places.iter().zip(&old.copies) {
            if place.name != 0 {
                self.put(place.name, place.key, *copies);
            }
        }
    }

    /// Frees a place: what stands behind it, and would rather stand here or before, moves up.
    fn free(&mut self, mut hole: usize) {
        let mut place = hole;
        loop {
            place = self.next(place);
            if self.places[place].name == 0 {
                break;
            }
            // From home to place, round the table: does the hole lie on the way?
            let home = self.home(self.places[place].name);
            let may_move = match home <= place {
                true => home <= hole && hole < place,
                false => home <= hole || hole < place,
            };
            if may_move {
                self.places[hole] = self.places[place];
                self.copies[hole] = self.copies[place];
                hole = place;
            }
        }
        (self.places[hole], self.copies[hole]) = (FREE, 0);
        self.len -= 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::testing::Random;

    /// K1, K2: random stores and removals, against a map.
    #[test]
    fn equals_its_twin() {
        for seed in 1..6 {
            println!("seed {seed}");
            let mut random = Random::new(seed);
            let mut names = BlockNames::default();
            let mut twin: HashMap<u64, (PrefixHash, [u8; TIER_COUNT])> = HashMap::new();
            // Few names, so that all meet; numbered, and far apart.
            let span = 50 << (2 * seed);
            for _ in 0..60_000 {
                let number = random.below(span) as u64;
                let name = if seed % 2 == 0 { number } else { number << 40 };
                let key = PrefixHash(name.wrapping_mul(7) + 1);
                let tier = random.below(TIER_COUNT);
                if random.below(5) < 3 {
                    let (_, counts) = twin.entry(name).or_insert((key, [0; TIER_COUNT]));
                    let is_first = counts[tier] == 0;
                    counts[tier] = (counts[tier] + 1).min(3);
                    let (change, old) = names.store(name, key, tier);
                    assert_eq!(change == Change::Of(key), is_first);
                    assert_eq!(old, None);
                } else {
                    let held = twin.get_mut(&name).filter(|(_, counts)| counts[tier] > 0);
                    let wanted = held.map_or(Change::Unknown, |(key, counts)| {
                        counts[tier] -= 1;
                        if counts[tier] == 0 {
                            Change::Of(*key)
                        } else {
                            Change::None
                        }
                    });
                    twin.retain(|_, (_, counts)| *counts != [0; TIER_COUNT]);
                    assert_eq!(names.remove(name, tier), wanted);
                }
                assert_eq!(names.len(), twin.len());
                if random.below(1000) == 0 {
                    for name in 0..span as u64 {
                        let name = if seed % 2 == 0 { name } else { name << 40 };
                        assert_eq!(names.key(name), twin.get(&name).map(|(key, _)| *key));
                    }
                }
            }
            let mut drained = 0;
            names.drain(|_, _| drained += 1);
            let held = twin.values().flat_map(|(_, counts)| counts);
            assert_eq!(drained, held.filter(|count| **count > 0).count());
            assert!(names.is_empty());
        }
    }

    #[test]
    fn a_name_may_be_given_anew() {
        let mut names = BlockNames::default();
        let (old, new) = (PrefixHash(1), PrefixHash(2));
        assert_eq!(names.store(7, old, 0), (Change::Of(old), None));
        assert_eq!(names.store(7, new, 0), (Change::Of(new), Some(old)));
        assert_eq!(names.key(7), Some(new));
        assert_eq!(names.remove(7, 0), Change::Of(new));
    }

    #[test]
    fn a_block_costs_less_than_28_bytes() {
        let mut names = BlockNames::default();
        for name in 0..100_000_u64 {
            names.store(name.wrapping_mul(SPREAD), PrefixHash(name + 1), 0);
            if names.len() > 1000 {
                assert!(names.bytes() <= 28 * names.len(), "{}", names.len());
            }
        }
    }
}
