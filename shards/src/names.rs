//! The names that one engine gives its blocks, and what we call them: engine hash -> own key, with the tiers that hold the
//! block. Owned by whoever reads that engine's events; shared with nobody, so there is no atomic here.
//!
//! Cuckoo hashing with two buckets a name, each one cache line of seven entries of nine bytes. A name is kept as
//! [`TAG_BITS`] of its 36 mixed bits; the other 11 follow from the bucket it lies in, so that the table can grow by a sixteenth
//! at a time, whatever its size: between 90 % and 96 % full, 9.5 to 10.2 bytes a block once there are 15,000 of them.
//!
//! Invariants:
//! - K1 a name found has the key it was given last. Two names of one engine are taken for one if they agree in 36 bits: of an engine
//!   with 16,384 blocks one new name in four million, with a million one in 65,000. Then the older block counts as gone
//!   at once, and the newer one from when either goes: two blocks that are held and not known to be. Never the other way round;
//! - K2 a block is gone when each tier has let it go as often as it took it (an engine may hold copies: counted up to 3 in its own
//!   memory and its host's, once in the tiers below, which store by content);
//! - K3 from an entry's bucket, tag and side follow both of its buckets, and all 36 bits.

use crate::ids::PrefixHash;

/// Storage tiers that are told apart.
pub const TIER_COUNT: usize = 4;
/// Bits of a key that are kept: keys given to [`BlockNames`] have no others.
pub const BLOCK_KEY_BITS: u32 = 40;

/// Entries of a bucket: one cache line.
const WAY_COUNT: usize = 7;
/// Bits of a mixed name.
const NAME_BITS: u32 = 36;
/// Of these, those that an entry has itself.
const TAG_BITS: u32 = 25;
const TAG_MASK: u64 = (1 << TAG_BITS) - 1;
/// Of these, those that stand apart, to be compared all at once.
const LOW_BITS: u32 = 16;
/// So many buckets and more tell the other bits. Fresh memory costs nothing before it is touched.
const BUCKETS_MIN: usize = 1 << (NAME_BITS - TAG_BITS);
/// Full beyond 96 % the table grows.
const FULL: (usize, usize) = (96, 100);
/// How many moves make room for a new entry.
const MOVES_MAX: usize = 3;
/// Of a tier's copies in an entry's six bits: how far from the right, and how many are counted.
const COPIES: [(u32, u32); TIER_COUNT] = [(0, 3), (2, 3), (4, 1), (5, 1)];
const COPIES_BITS: u32 = 6;

/// One engine's names.
#[derive(Debug, Default)]
pub struct BlockNames {
    buckets: Box<[Bucket]>,
    len: usize,
}

/// Seven entries. All zero: empty.
///
/// ```text
/// byte 0 ... 13 | 14 ... 62                                                | 63
///      tags' low 16 bits, | seven bytes each: key 40, side 1, tag's rest 9, copies 6 | a bit for each in use
/// ```
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Bucket {
    bytes: [u8; 64],
}

const _: () = assert!(WAY_COUNT * (2 + 7) + 1 == 64);
/// Where the words begin, behind the low bits.
const WORDS_AT: usize = WAY_COUNT * 2;
/// Where it says what is in use.
const USED_AT: usize = 63;
const ALL_WAYS: u8 = (1 << WAY_COUNT) - 1;
const SEVEN_BYTES: u64 = (1 << 56) - 1;
const KEY_MASK: u64 = (1 << BLOCK_KEY_BITS) - 1;
const COPIES_SHIFT: u32 = 56 - COPIES_BITS;
/// The lowest and the highest bit of each of four tags' low bits.
const LOWEST_BITS: u64 = 0x0001_0001_0001_0001;
const HIGHEST_BITS: u64 = LOWEST_BITS << (LOW_BITS - 1);

const _: () = assert!(BLOCK_KEY_BITS + 1 + (TAG_BITS - LOW_BITS) == COPIES_SHIFT);

/// Side and upper bits of a tag, as they stand above the key.
#[inline]
fn upper(tag: u64, is_second: bool) -> u64 {
    u64::from(is_second) | tag >> LOW_BITS << 1
}

impl Bucket {
    const EMPTY: Self = Self { bytes: [0; 64] };

    #[inline]
    fn eight(&self, at: usize) -> u64 {
        let bytes = self.bytes[at..at + 8].try_into();
        u64::from_le_bytes(bytes.expect("eight bytes"))
    }

    #[inline]
    fn word(&self, way: usize) -> u64 {
        self.eight(WORDS_AT + way * 7) & SEVEN_BYTES
    }

    #[inline]
    fn set_word(&mut self, way: usize, word: u64) {
        let at = WORDS_AT + way * 7;
        self.bytes[at..at + 7].copy_from_slice(&word.to_le_bytes()[..7]);
    }

    #[inline]
    fn is_used(&self, way: usize) -> bool {
        self.bytes[USED_AT] >> way & 1 == 1
    }

    #[inline]
    fn key(&self, way: usize) -> PrefixHash {
        PrefixHash(self.word(way) & KEY_MASK)
    }

    /// Of an entry in use at least one.
    #[inline]
    fn copies(&self, way: usize) -> u32 {
        (self.word(way) >> COPIES_SHIFT) as u32
    }

    /// Without a copy the entry is free.
    #[inline]
    fn set_copies(&mut self, way: usize, copies: u32) {
        let others = self.word(way) & !(u64::MAX << COPIES_SHIFT);
        self.set_word(way, others | u64::from(copies) << COPIES_SHIFT);
        if copies == 0 {
            self.bytes[USED_AT] &= !(1 << way);
        }
    }

    fn set_key(&mut self, way: usize, key: PrefixHash) {
        debug_assert!(key.0 & !KEY_MASK == 0, "a key has 40 bits");
        self.set_word(way, self.word(way) & !KEY_MASK | key.0 & KEY_MASK);
    }

    fn set(&mut self, way: usize, entry: Entry) {
        debug_assert!(entry.key.0 & !KEY_MASK == 0, "a key has 40 bits");
        self.bytes[way * 2..way * 2 + 2].copy_from_slice(&entry.tag.to_le_bytes()[..2]);
        let upper = upper(entry.tag, entry.is_second) << BLOCK_KEY_BITS;
        let copies = u64::from(entry.copies) << COPIES_SHIFT;
        self.set_word(way, entry.key.0 & KEY_MASK | upper | copies);
        self.bytes[USED_AT] |= 1 << way;
    }

    /// Of an entry in use.
    #[inline]
    fn entry(&self, way: usize) -> Entry {
        let word = self.word(way);
        let low = u64::from(self.bytes[way * 2]) | u64::from(self.bytes[way * 2 + 1]) << 8;
        let upper = word >> BLOCK_KEY_BITS & ((1 << (COPIES_SHIFT - BLOCK_KEY_BITS)) - 1);
        Entry {
            tag: low | upper >> 1 << LOW_BITS,
            key: PrefixHash(word & KEY_MASK),
            is_second: upper & 1 == 1,
            copies: (word >> COPIES_SHIFT) as u32,
        }
    }

    /// Those in use.
    fn entries(&self) -> impl Iterator<Item = Entry> {
        let ways = (0..WAY_COUNT).filter(|way| self.is_used(*way));
        ways.map(|way| self.entry(way))
    }

    #[inline]
    fn find(&self, tag: u64, is_second: bool) -> Option<usize> {
        // Four at once: the highest bit of those that are equal is set, perhaps of one above an equal one, too.
        let low = (tag & ((1 << LOW_BITS) - 1)) * LOWEST_BITS;
        let equal = |at| {
            let differs = self.eight(at) ^ low;
            differs.wrapping_sub(LOWEST_BITS) & !differs & HIGHEST_BITS
        };
        // Behind the seventh stands no tag.
        let mut ways = u128::from(equal(0)) | u128::from(equal(8) & u64::MAX >> LOW_BITS) << 64;
        while ways != 0 {
            let way = (ways.trailing_zeros() / LOW_BITS) as usize;
            let entry = self.entry(way);
            if entry.tag == tag && entry.is_second == is_second && self.is_used(way) {
                return Some(way);
            }
            ways &= ways - 1;
        }
        None
    }

    #[inline]
    fn free_way(&self) -> Option<usize> {
        let free = !self.bytes[USED_AT] & ALL_WAYS;
        (free != 0).then(|| free.trailing_zeros() as usize)
    }

    #[inline]
    fn free_count(&self) -> u32 {
        (!self.bytes[USED_AT] & ALL_WAYS).count_ones()
    }
}

#[derive(Clone, Copy)]
struct Entry {
    tag: u64,
    key: PrefixHash,
    is_second: bool,
    copies: u32,
}

/// Where an entry is: bucket and way.
type Place = (usize, usize);

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

fn copies_in(copies: u32, tier: usize) -> u32 {
    let (shift, max) = COPIES[tier];
    copies >> shift & max
}

fn one_copy(tier: usize) -> u32 {
    1 << COPIES[tier].0
}

/// splitmix64's finaliser (Steele, Lea, Flood 2014); the upper bits of it.
#[inline]
fn mixed(name: u64) -> u64 {
    let mut m = name.wrapping_add(0x9e37_79b9_7f4a_7c15);
    m = (m ^ (m >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    m = (m ^ (m >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (m ^ (m >> 31)) >> (64 - NAME_BITS)
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
        size_of_val(&*self.buckets)
    }

    /// The key of a name, whatever tier holds it.
    #[must_use]
    pub fn key(&self, name: u64) -> Option<PrefixHash> {
        let (bucket, way) = self.place(mixed(name))?;
        Some(self.buckets[bucket].key(way))
    }

    /// A tier (below [`TIER_COUNT`]) took a copy. `None`: it had one. A name that comes back with another key takes it over,
    /// and the old key is given back to be forgotten. Keys have [`BLOCK_KEY_BITS`].
    pub fn store(
        &mut self,
        name: u64,
        key: PrefixHash,
        tier: usize,
    ) -> (Change, Option<PrefixHash>) {
        let name = mixed(name);
        let Some((bucket, way)) = self.place(name) else {
            self.insert(name, key, one_copy(tier));
            return (Change::Of(key), None);
        };
        let bucket = &mut self.buckets[bucket];
        let known = bucket.key(way);
        if known != key {
            bucket.set_key(way, key);
            bucket.set_copies(way, one_copy(tier));
            return (Change::Of(key), Some(known));
        }
        let copies = bucket.copies(way);
        let count = copies_in(copies, tier);
        if count < COPIES[tier].1 {
            bucket.set_copies(way, copies + one_copy(tier));
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
        let Some((bucket, way)) = self.place(mixed(name)) else {
            return Change::Unknown;
        };
        let bucket = &mut self.buckets[bucket];
        let copies = bucket.copies(way);
        let count = copies_in(copies, tier);
        if count == 0 {
            return Change::Unknown;
        }
        let left = copies - one_copy(tier);
        bucket.set_copies(way, left);
        let key = bucket.key(way);
        self.len -= usize::from(left == 0);
        if count == 1 {
            Change::Of(key)
        } else {
            Change::None
        }
    }

    /// Forgets everything, and says what was known: each key once for each tier that held it.
    pub fn drain(&mut self, mut gone: impl FnMut(PrefixHash, usize)) {
        for bucket in &self.buckets {
            for entry in bucket.entries() {
                let tiers = (0..TIER_COUNT).filter(|tier| copies_in(entry.copies, *tier) != 0);
                tiers.for_each(|tier| gone(entry.key, tier));
            }
        }
        *self = Self::default();
    }

    /// Begins to load the buckets of a name.
    #[inline]
    pub fn prefetch(&self, name: u64) {
        if !self.buckets.is_empty() {
            let [first, second] = self.homes(mixed(name));
            self.load(first);
            self.load(second);
        }
    }

    /// Begins to load a bucket.
    #[inline]
    fn load(&self, bucket: usize) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch has no effect but on caches; SSE is part of x86_64.
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>((&raw const self.buckets[bucket]).cast());
        }
        let _ = bucket;
    }

    /// From the first bucket of a tag to its second: 1 to all but one, round the table.
    #[inline]
    fn distance(&self, tag: u64) -> usize {
        let spread = tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        1 + ((spread * (self.buckets.len() as u64 - 1)) >> 32) as usize
    }

    /// The two buckets of a mixed name: its share of the table, so that any size will do; and another one.
    #[inline]
    fn homes(&self, name: u64) -> [usize; 2] {
        let count = self.buckets.len();
        let first = ((u128::from(name) * count as u128) >> NAME_BITS) as usize;
        let second = first + self.distance(name & TAG_MASK);
        [
            first,
            if second < count {
                second
            } else {
                second - count
            },
        ]
    }

    /// The other bucket of an entry (K3).
    #[inline]
    fn other(&self, bucket: usize, way: usize) -> usize {
        let count = self.buckets.len();
        let entry = self.buckets[bucket].entry(way);
        let distance = self.distance(entry.tag);
        let other = match entry.is_second {
            true => bucket + count - distance,
            false => bucket + distance,
        };
        if other < count { other } else { other - count }
    }

    /// All bits of the name of an entry in its first bucket (K3): of those that have this home only one has the tag, as a
    /// home has at most `2^25` of them.
    fn name(&self, first: usize, tag: u64) -> u64 {
        let count = self.buckets.len() as u128;
        let least = ((first as u128) << NAME_BITS).div_ceil(count) as u64;
        let name = least & !TAG_MASK | tag;
        if name < least {
            name + TAG_MASK + 1
        } else {
            name
        }
    }

    #[inline]
    fn place(&self, name: u64) -> Option<Place> {
        if self.buckets.is_empty() {
            return None;
        }
        let tag = name & TAG_MASK;
        let [first, second] = self.homes(name);
        if let Some(way) = self.buckets[first].find(tag, false) {
            return Some((first, way));
        }
        let way = self.buckets[second].find(tag, true)?;
        Some((second, way))
    }

    fn insert(&mut self, name: u64, key: PrefixHash, copies: u32) {
        if (self.len + 1) * FULL.1 > self.buckets.len() * WAY_COUNT * FULL.0 {
            self.grow();
        }
        while !self.put(name, key, copies) {
            self.grow();
        }
        self.len += 1;
    }

    /// False: there is no room near.
    fn put(&mut self, name: u64, key: PrefixHash, copies: u32) -> bool {
        let homes = self.homes(name);
        let Some((side, way)) = self.room(homes) else {
            return false;
        };
        let entry = Entry {
            tag: name & TAG_MASK,
            key,
            is_second: side == 1,
            copies,
        };
        self.buckets[homes[side]].set(way, entry);
        true
    }

    /// A free way in one of two buckets, perhaps made by moving others: which bucket, and the way.
    fn room(&mut self, homes: [usize; 2]) -> Option<(usize, usize)> {
        let [a, b] = [&self.buckets[homes[0]], &self.buckets[homes[1]]];
        let side = usize::from(b.free_count() > a.free_count());
        if let Some(way) = self.buckets[homes[side]].free_way() {
            return Some((side, way));
        }
        // One move nearly always does: where it leads to is looked at for all of them together.
        let mut others = [[0; WAY_COUNT]; 2];
        for (home, others) in homes.into_iter().zip(&mut others) {
            for (way, other) in others.iter_mut().enumerate() {
                *other = self.other(home, way);
                self.load(*other);
            }
        }
        for (side, others) in others.into_iter().enumerate() {
            for (way, other) in others.into_iter().enumerate() {
                if let Some(hole) = self.buckets[other].free_way() {
                    self.shift((homes[side], way), (other, hole));
                    return Some((side, way));
                }
            }
        }
        (2..=MOVES_MAX).find_map(|moves| {
            (0..2).find_map(|side| Some((side, self.make_free(homes[side], moves)?)))
        })
    }

    /// An entry moves to its other bucket.
    fn shift(&mut self, (bucket, way): Place, (other, hole): Place) {
        let entry = self.buckets[bucket].entry(way);
        let moved = Entry {
            is_second: !entry.is_second,
            ..entry
        };
        self.buckets[other].set(hole, moved);
        self.buckets[bucket].set_copies(way, 0);
    }

    /// Frees a way of a full bucket by moving an entry to its other bucket, there first another one, and so on.
    fn make_free(&mut self, bucket: usize, moves_max: usize) -> Option<usize> {
        for way in 0..WAY_COUNT {
            let other = self.other(bucket, way);
            let hole = match moves_max {
                1 => self.buckets[other].free_way(),
                _ => self.make_free(other, moves_max - 1),
            };
            let Some(hole) = hole else { continue };
            // The moves that made it may have gone round to this very bucket.
            if !self.buckets[bucket].is_used(way) {
                return Some(way);
            }
            if self.other(bucket, way) != other {
                continue;
            }
            self.shift((bucket, way), (other, hole));
            return Some(way);
        }
        None
    }

    /// A sixteenth larger; more if that is not enough.
    fn grow(&mut self) {
        let old = std::mem::take(&mut self.buckets);
        let from = Self {
            buckets: old,
            len: self.len,
        };
        let mut count = from.buckets.len();
        loop {
            count = (count + count / 16).max(BUCKETS_MIN);
            self.buckets = vec![Bucket::EMPTY; count].into();
            if from
                .each()
                .all(|(name, entry)| self.put(name, entry.key, entry.copies))
            {
                return;
            }
        }
    }

    /// All names with their entries.
    fn each(&self) -> impl Iterator<Item = (u64, Entry)> {
        let places = (0..self.buckets.len()).flat_map(|b| (0..WAY_COUNT).map(move |way| (b, way)));
        let used = places.filter(|(bucket, way)| self.buckets[*bucket].is_used(*way));
        used.map(|(bucket, way)| {
            let entry = self.buckets[bucket].entry(way);
            let first = match entry.is_second {
                true => self.other(bucket, way),
                false => bucket,
            };
            (self.name(first, entry.tag), entry)
        })
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
                let key = PrefixHash(number * 7 + 1);
                let tier = random.below(TIER_COUNT);
                if random.below(5) < 3 {
                    let (_, counts) = twin.entry(name).or_insert((key, [0; TIER_COUNT]));
                    let is_first = counts[tier] == 0;
                    counts[tier] = (counts[tier] + 1).min(if tier < 2 { 3 } else { 1 });
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

    /// K3, and that what is moved is found: a full table turns over many times.
    #[test]
    fn a_crowded_table_keeps_every_name() {
        let mut names = BlockNames::default();
        let mut random = Random::new(9);
        let mut held = std::collections::VecDeque::new();
        for round in 0..300_000 {
            let name = random.next();
            let key = PrefixHash(random.next() & KEY_MASK);
            names.store(name, key, 0);
            held.push_back((name, key));
            if held.len() > 60_000 {
                let (name, key) = held.pop_front().unwrap();
                assert_eq!(names.remove(name, 0), Change::Of(key));
            }
            if round % 50_000 == 0 {
                held.iter()
                    .for_each(|(name, key)| assert_eq!(names.key(*name), Some(*key)));
            }
        }
        assert_eq!(names.len(), held.len());
        assert!(
            names.bytes() <= 11 * names.len(),
            "it does not grow for ever"
        );
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
    fn a_block_costs_less_than_eleven_bytes() {
        let mut names = BlockNames::default();
        for name in 0..200_000_u64 {
            names.store(name, PrefixHash(name + 1), 0);
            if names.len() > 20_000 {
                assert!(names.bytes() <= 11 * names.len(), "{}", names.len());
            }
        }
    }
}
