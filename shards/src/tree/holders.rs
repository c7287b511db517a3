//! The set of slots that hold a block, in the smallest of three forms: in the value word (up to three), as an ascending
//! list, as a bitmap up to the highest slot. Built and retired by the shard's owner; read by everybody under a pin.
//!
//! Invariant H1: lists never change; bitmaps gain and lose bits in place (a reader sees a holder a moment later or earlier,
//! never a wrong one) and are replaced for everything else.

use std::ptr::NonNull;
use std::slice;

use super::thin::Thin;
use super::word::{INLINE_MAX, Packed, Payload, Word};
use crate::ids::{Slot, SlotSet};
use crate::sync::{AtomicU64, Ordering};

/// Longer lists become bitmaps whatever they cost.
pub(super) const LIST_MAX: usize = 64;

type List = NonNull<Thin<u16>>;
type Bitmap = NonNull<Thin<AtomicU64>>;

/// Ascending slots of one block.
#[derive(Clone)]
pub(super) enum Slots<'p> {
    Inline(Packed),
    List(slice::Iter<'p, u16>),
    Bitmap {
        words: &'p [AtomicU64],
        next: usize,
        bits: u64,
    },
}

impl Slots<'_> {
    /// Of a word that was read under the pin (or by the owner) that lasts for `'p`.
    ///
    /// # Safety
    /// What the word points to is not freed during `'p`.
    #[inline]
    pub(super) unsafe fn of(word: Word) -> Self {
        match word.payload() {
            Payload::Inline(packed) => Self::Inline(packed),
            // SAFETY: the caller's promise.
            Payload::List(list) => Self::List(unsafe { Thin::items(list) }.iter()),
            Payload::Bitmap(bitmap) => {
                // SAFETY: the caller's promise.
                let words = unsafe { Thin::items(bitmap) };
                Self::Bitmap {
                    words,
                    next: 0,
                    bits: 0,
                }
            }
        }
    }
}

impl Slots<'_> {
    /// Whether a slot is among them; asked before any was taken.
    #[inline]
    pub(super) fn has(mut self, slot: Slot) -> bool {
        match &self {
            Self::Inline(_) => self.any(|held| held == slot),
            Self::List(list) => list.as_slice().binary_search(&slot.0).is_ok(),
            Self::Bitmap { words, .. } => {
                let word = words.get(slot.index() / 64);
                // ORDERING: Relaxed; a bit says "this slot" and publishes nothing else (H1).
                word.is_some_and(|bits| bits.load(Ordering::Relaxed) >> (slot.0 % 64) & 1 == 1)
            }
        }
    }
}

impl Slots<'_> {
    /// Whether one of them is in a set; asked before any was taken.
    #[inline]
    pub(super) fn meets(mut self, set: &SlotSet) -> bool {
        match &self {
            Self::Bitmap { words, .. } => words.iter().enumerate().any(|(index, bits)| {
                // ORDERING: Relaxed; a bit says "this slot" and publishes nothing else (H1).
                bits.load(Ordering::Relaxed) & set.word(index) != 0
            }),
            _ => self.any(|slot| set.has(slot)),
        }
    }

    /// Makes a set of those that are in another one, too, or of all; asked before any was taken.
    pub(super) fn list(mut self, also_in: Option<&SlotSet>, out: &mut SlotSet) {
        out.clear();
        match &self {
            Self::Bitmap { words, .. } => {
                for (index, bits) in words.iter().enumerate() {
                    let others = also_in.map_or(u64::MAX, |set| set.word(index));
                    // ORDERING: Relaxed; a bit says "this slot" and publishes nothing else (H1).
                    out.set_word(index, bits.load(Ordering::Relaxed) & others);
                }
            }
            _ => {
                let is_in = |slot: &Slot| also_in.is_none_or(|set| set.has(*slot));
                self.by_ref().filter(is_in).for_each(|slot| out.add(slot));
            }
        }
    }

    /// The first of them that is not in a set; asked before any was taken.
    #[inline]
    pub(super) fn first_not_in(mut self, set: &SlotSet) -> Option<Slot> {
        match &self {
            Self::Bitmap { words, .. } => words.iter().enumerate().find_map(|(index, bits)| {
                // ORDERING: Relaxed; a bit says "this slot" and publishes nothing else (H1).
                let bits = bits.load(Ordering::Relaxed) & !set.word(index);
                (bits != 0).then(|| Slot((index * 64) as u16 + bits.trailing_zeros() as u16))
            }),
            _ => self.find(|slot| !set.has(*slot)),
        }
    }
}

impl Iterator for Slots<'_> {
    type Item = Slot;

    #[inline]
    fn next(&mut self) -> Option<Slot> {
        match self {
            Self::Inline(packed) => packed.next(),
            Self::List(list) => list.next().map(|&slot| Slot(slot)),
            Self::Bitmap { words, next, bits } => {
                while *bits == 0 {
                    // ORDERING: Relaxed; a bit says "this slot" and publishes nothing else (H1).
                    *bits = words.get(*next)?.load(Ordering::Relaxed);
                    *next += 1;
                }
                let low = bits.trailing_zeros() as usize;
                *bits &= *bits - 1;
                Some(Slot(((*next - 1) * 64 + low) as u16))
            }
        }
    }
}

/// Memory of a set that is not in the word, with its cost.
pub(super) enum Store {
    List(List),
    Bitmap(Bitmap),
}

impl Store {
    /// What a word owns outside itself.
    pub(super) fn of(word: Word) -> Option<Self> {
        match word.payload() {
            Payload::Inline(_) => None,
            Payload::List(list) => Some(Self::List(list)),
            Payload::Bitmap(bitmap) => Some(Self::Bitmap(bitmap)),
        }
    }

    /// Bytes it costs.
    ///
    /// # Safety
    /// It is not freed.
    pub(super) unsafe fn bytes(&self) -> usize {
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                Self::List(list) => Thin::<u16>::bytes(Thin::items(list).len()),
                Self::Bitmap(bitmap) => Thin::<AtomicU64>::bytes(Thin::items(bitmap).len()),
            }
        }
    }

    /// # Safety
    /// Freed once, and nobody uses it any more.
    pub(super) unsafe fn free(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                Self::List(list) => Thin::free(list),
                Self::Bitmap(bitmap) => Thin::free(bitmap),
            }
        }
    }
}

fn bitmap_len(slots: &[u16]) -> usize {
    slots
        .last()
        .map_or(0, |&highest| usize::from(highest) / 64 + 1)
}

fn fits_list(slots: &[u16]) -> bool {
    let list_bytes = Thin::<u16>::bytes(slots.len());
    slots.len() <= LIST_MAX && list_bytes <= Thin::<AtomicU64>::bytes(bitmap_len(slots))
}

/// Bytes that [`build`] would allocate for these ascending slots.
pub(super) fn build_bytes(slots: &[u16]) -> usize {
    match slots.len() {
        0..=INLINE_MAX => 0,
        len if fits_list(slots) => Thin::<u16>::bytes(len),
        _ => Thin::<AtomicU64>::bytes(bitmap_len(slots)),
    }
}

/// The smallest form of these ascending slots.
pub(super) fn build(slots: &[u16]) -> Payload {
    if slots.len() <= INLINE_MAX {
        Payload::Inline(Packed::of(slots))
    } else if fits_list(slots) {
        Payload::List(Thin::new(slots.len(), |index| slots[index]))
    } else {
        Payload::Bitmap(bitmap_of(slots))
    }
}

fn bitmap_of(slots: &[u16]) -> Bitmap {
    let mut rest = slots.iter().peekable();
    Thin::new(bitmap_len(slots), |index| {
        let mut bits = 0_u64;
        while let Some(slot) = rest.next_if(|&&slot| usize::from(slot) / 64 == index) {
            bits |= 1 << (slot % 64);
        }
        AtomicU64::new(bits)
    })
}

/// Sets a bit in place. `None`: the bitmap is too short; else whether the slot is new.
///
/// # Safety
/// The caller owns the shard, and the bitmap is not freed.
pub(super) unsafe fn set_bit(bitmap: Bitmap, slot: Slot) -> Option<bool> {
    // SAFETY: the caller's promise.
    let word = unsafe { Thin::items(bitmap) }.get(slot.index() / 64)?;
    let bit = 1 << (slot.0 % 64);
    // ORDERING: Relaxed load: only the owner writes it. Relaxed store: as in Slots::next (H1).
    let bits = word.load(Ordering::Relaxed);
    word.store(bits | bit, Ordering::Relaxed);
    Some(bits & bit == 0)
}

/// Clears a bit in place; the slot has one.
///
/// # Safety
/// As `set_bit`.
pub(super) unsafe fn clear_bit(bitmap: Bitmap, slot: Slot) {
    // SAFETY: the caller's promise.
    let word = &unsafe { Thin::items(bitmap) }[slot.index() / 64];
    // ORDERING: Relaxed load: only the owner writes it. Relaxed store: as in Slots::next (H1).
    let bits = word.load(Ordering::Relaxed);
    word.store(bits & !(1 << (slot.0 % 64)), Ordering::Relaxed);
}
