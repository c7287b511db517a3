//! The value word of a tree entry: who holds the block, how old it is, how many continuations it has. Written by the
//! shard's owner alone, read by everybody as one atomic load. Pure: no memory is touched here.
//!
//! ```text
//! bit 63 62 | 61 ... 54 | 53 52    | 51 ... 45 | 44 ... 0
//!     kind  | age       | branches | mark      | payload: up to three slots of 14 bits, ascending, NONE last;
//!                                              |          or a pointer to a Thin, shifted right by 3
//! ```

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64 as Unmodelled;

use super::thin::Thin;
use crate::ids::Slot;
use crate::sync::AtomicU64;

/// At most this many holders live in the word itself.
pub(super) const INLINE_MAX: usize = 3;
/// From here on a block is a fork.
pub(super) const BRANCHES_MAX: u64 = 3;

const SLOT_BITS: u32 = 14;
const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;
/// No slot here; above every real one.
const NONE: u64 = SLOT_MASK;

const PAYLOAD_MASK: u64 = (1 << 45) - 1;
const MARK_SHIFT: u32 = 45;
const MARK_MASK: u64 = 0x7f << MARK_SHIFT;
const BRANCHES_SHIFT: u32 = 52;
const BRANCHES_MASK: u64 = 3 << BRANCHES_SHIFT;
const AGE_SHIFT: u32 = 54;
const AGE_MASK: u64 = 0xff << AGE_SHIFT;
const KIND_SHIFT: u32 = 62;
const KIND_MASK: u64 = 3 << KIND_SHIFT;

const INLINE: u64 = 0;
const LIST: u64 = 1;
const BITMAP: u64 = 2;

/// A value word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

/// What the payload says. Pointers are as good as the moment the word was read.
#[derive(Clone, Copy)]
pub(super) enum Payload {
    /// Up to three slots, packed.
    Inline(Packed),
    /// Ascending slots.
    List(NonNull<Thin<u16>>),
    /// One bit per slot.
    Bitmap(NonNull<Thin<AtomicU64>>),
}

/// Up to three ascending slots in 42 bits.
#[derive(Clone, Copy)]
pub(super) struct Packed(u64);

impl Packed {
    /// At most [`INLINE_MAX`] ascending slots.
    pub(super) fn of(slots: &[u16]) -> Self {
        debug_assert!(slots.len() <= INLINE_MAX);
        let at = |index: usize| slots.get(index).map_or(NONE, |&slot| u64::from(slot));
        Self(at(0) | at(1) << SLOT_BITS | at(2) << (2 * SLOT_BITS))
    }

    /// Takes the lowest slot out.
    pub(super) fn next(&mut self) -> Option<Slot> {
        let slot = self.0 & SLOT_MASK;
        self.0 = self.0 >> SLOT_BITS | NONE << (2 * SLOT_BITS);
        (slot != NONE).then_some(Slot(slot as u16))
    }
}

fn pointer_bits<T>(pointer: NonNull<T>) -> u64 {
    let address = pointer.as_ptr().expose_provenance() as u64;
    assert!(
        address >> 48 == 0 && address & 7 == 0,
        "a user-space pointer has 48 bits"
    );
    address >> 3
}

impl Word {
    /// Age 0, no branches, nobody.
    pub(super) fn new(mark: u64) -> Self {
        Self(mark << MARK_SHIFT).with_payload(Payload::Inline(Packed::of(&[])))
    }

    pub(super) fn with_payload(self, payload: Payload) -> Self {
        let (kind, bits) = match payload {
            Payload::Inline(packed) => (INLINE, packed.0),
            Payload::List(list) => (LIST, pointer_bits(list)),
            Payload::Bitmap(bitmap) => (BITMAP, pointer_bits(bitmap)),
        };
        Self(self.0 & !(KIND_MASK | PAYLOAD_MASK) | kind << KIND_SHIFT | bits)
    }

    #[inline]
    pub(super) fn payload(self) -> Payload {
        let bits = self.0 & PAYLOAD_MASK;
        match self.0 >> KIND_SHIFT {
            LIST => Payload::List(pointer(bits)),
            BITMAP => Payload::Bitmap(pointer(bits)),
            _ => Payload::Inline(Packed(bits)),
        }
    }

    /// Whether the slot is the block's only holder, and stands in the word itself.
    #[inline]
    pub(super) fn is_only(self, slot: Slot) -> bool {
        matches!(self.payload(), Payload::Inline(packed) if packed.0 == Packed::of(&[slot.0]).0)
    }

    #[inline]
    pub(super) fn mark(self) -> u64 {
        (self.0 & MARK_MASK) >> MARK_SHIFT
    }

    /// The generation in which the block was used last.
    #[inline]
    pub(super) fn age(self) -> u8 {
        (self.0 >> AGE_SHIFT) as u8
    }

    pub(super) fn with_age(self, age: u8) -> Self {
        Self(self.0 & !AGE_MASK | u64::from(age) << AGE_SHIFT)
    }

    /// Continuations learnt, up to [`BRANCHES_MAX`].
    #[inline]
    pub(super) fn branches(self) -> u64 {
        (self.0 & BRANCHES_MASK) >> BRANCHES_SHIFT
    }

    pub(super) fn with_branch(self) -> Self {
        let more = u64::from(self.branches() < BRANCHES_MAX);
        Self(self.0 + (more << BRANCHES_SHIFT))
    }
}

fn pointer<T>(bits: u64) -> NonNull<T> {
    let raw = std::ptr::with_exposed_provenance_mut((bits << 3) as usize);
    NonNull::new(raw).expect("a word of this kind has a pointer")
}

/// A value word holds what fits an `AtomicU64`, in any build.
const _: () = assert!(size_of::<Word>() == size_of::<Unmodelled>());
