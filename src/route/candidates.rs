//! The workers that may get a request: a list to walk and a bitset to ask. Made by the control thread with each fleet
//! snapshot, read by every core, never changed.

use shards::Slot;

const BITS: usize = u64::BITS as usize;

/// Slots of eligible workers of one role and model.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    slots: Vec<Slot>,
    bits: Vec<u64>,
}

impl FromIterator<Slot> for Candidates {
    /// Keeps the order of first appearance; a slot given twice counts once.
    fn from_iter<I: IntoIterator<Item = Slot>>(slots: I) -> Candidates {
        let mut candidates = Candidates::default();
        for slot in slots {
            let (word, bit) = place(slot);
            if candidates.bits.len() <= word {
                candidates.bits.resize(word + 1, 0);
            }
            if candidates.bits[word] & bit == 0 {
                candidates.bits[word] |= bit;
                candidates.slots.push(slot);
            }
        }
        candidates
    }
}

impl Candidates {
    /// All of them, in an order that means nothing.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
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
