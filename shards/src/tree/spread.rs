//! One prefix hash spread over the places it decides: owner, tag, two buckets, mark. Disjoint bits of one mixed word, so that
//! knowing the one tells nothing about the other. Pure.
//!
//! ```text
//! bit 63 ............................ 32 | 31 ........... 18 | 17 ... 11 | 10 | 9 ... 0
//!     tag; its upper bits: the directory, |                   |           |    |
//!     its lower: from bucket a to b       | owner (from 31)   | mark      |    | bucket a
//! ```
//!
//! From a tag and one of its buckets follows the other bucket; and from a tag its segment, however often it is split.

use super::segment::BUCKET_COUNT;
use crate::ids::PrefixHash;

/// A prefix hash, mixed.
#[derive(Clone, Copy)]
pub(super) struct Spread(u64);

impl Spread {
    /// splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection in which every input bit moves every output bit.
    #[inline]
    pub(super) fn of(hash: PrefixHash) -> Self {
        let mut m = hash.0;
        m = (m ^ (m >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        m = (m ^ (m >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(m ^ (m >> 31))
    }

    /// Which of `count` shards (uniform for any count).
    #[inline]
    pub(super) fn owner(self, count: usize) -> usize {
        (((self.0 & 0xffff_ffff) * count as u64) >> 32) as usize
    }

    /// What an entry is known by, in its bucket; never 0.
    #[inline]
    pub(super) fn tag(self) -> u32 {
        ((self.0 >> 32) as u32).max(1)
    }

    /// Which of `2^bits` directory entries; `bits` is 1 to 20.
    #[inline]
    pub(super) fn directory_index(self, bits: u32) -> usize {
        directory_index(self.tag(), bits)
    }

    /// The two buckets of a segment where the hash may be; never the same.
    #[inline]
    pub(super) fn buckets(self) -> [usize; 2] {
        let a = self.0 as usize % BUCKET_COUNT;
        [a, other_bucket(a, self.tag())]
    }

    /// 7 bits that stand in the value word, see `segment.rs`.
    #[inline]
    pub(super) fn mark(self) -> u64 {
        (self.0 >> 11) & 0x7f
    }
}

/// Which of `2^bits` directory entries a tag belongs to.
#[inline]
pub(super) fn directory_index(tag: u32, bits: u32) -> usize {
    (tag >> (u32::BITS - bits)) as usize
}

/// The other bucket of an entry with this tag; the other one's other is this one again.
#[inline]
pub(super) fn other_bucket(bucket: usize, tag: u32) -> usize {
    bucket ^ (tag as usize % BUCKET_COUNT).max(1)
}
