//! Look-ups: which prefix of a chain is known, and to whom. On any core, under its pin; a few loads per probe, no lock,
//! no allocation (but the caller's own vector).
//!
//! Whoever holds a block holds every earlier block of the chain. So "held by somebody we accept" is true up to some depth
//! and false beyond, and the depth is found by galloping back from the chain's end (a conversation's next turn matches
//! nearly all of it) and halving: O(log n) probes. Where an eviction broke the rule a look-up may stop early (T2).

use std::marker::PhantomData;
use std::ops::RangeInclusive;

use super::Tree;
use super::holders::Slots;
use super::spread::Spread;
use super::view::View;
use super::word::{BRANCHES_MAX, Word};
use crate::epoch::Pin;
use crate::ids::{PrefixHash, Slot, SlotSet};

/// The deepest block of a chain that an accepted worker holds. Lives as long as the pin.
pub struct Match<'p> {
    /// How many blocks of the chain match (1 or more).
    pub blocks: usize,
    word: Word,
    newest: u8,
    pin: PhantomData<&'p Pin<'p>>,
}

impl Match<'_> {
    /// Everybody who holds that block, accepted or not: ascending slots.
    pub fn holders(&self) -> impl Iterator<Item = Slot> {
        // SAFETY: the word was read under the pin that `'p` borrows.
        unsafe { Slots::of(self.word) }
    }

    /// The same as a set: all of them, or those that are in another set, too.
    pub fn list(&self, also_in: Option<&SlotSet>, out: &mut SlotSet) {
        // SAFETY: the word was read under the pin that `'p` borrows.
        unsafe { Slots::of(self.word) }.list(also_in, out);
    }

    /// Whether a worker is one of them.
    #[inline]
    #[must_use]
    pub fn is_held_by(&self, slot: Slot) -> bool {
        // SAFETY: the word was read under the pin that `'p` borrows.
        unsafe { Slots::of(self.word) }.has(slot)
    }

    /// Three or more different continuations of this block have been learnt: a shared system prompt, not a conversation.
    #[must_use]
    pub fn is_fork(&self) -> bool {
        self.word.branches() >= BRANCHES_MAX
    }

    /// Its age is not the shard's newest generation: worth a touch.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.word.age() != self.newest
    }
}

/// One chain with the tree it is looked up in, under a pin.
struct Chain<'a> {
    tree: &'a Tree,
    hashes: &'a [PrefixHash],
}

impl<'a> Chain<'a> {
    /// # Panics
    /// If the pin is of another domain: it would protect nothing.
    fn new(tree: &'a Tree, pin: &'a Pin<'_>, hashes: &'a [PrefixHash]) -> Self {
        assert!(pin.is_of(&tree.domain), "a pin of another domain");
        Self { tree, hashes }
    }

    #[inline]
    fn view(&self, spread: Spread) -> &'a View {
        &self.tree.views[spread.owner(self.tree.views.len())]
    }

    /// The word of the chain's block `depth` (1-based).
    #[inline]
    fn word(&self, depth: usize) -> Option<Word> {
        let hash = self.hashes[depth - 1];
        let spread = Spread::of(hash);
        // SAFETY: `new` saw a pin of the tree's domain, which is borrowed as long as the chain.
        unsafe { self.view(spread).find(hash, spread) }
    }

    #[inline]
    fn prefetch(&self, depth: usize) {
        let spread = Spread::of(self.hashes[depth - 1]);
        // SAFETY: as in `word`.
        unsafe { self.view(spread).prefetch(spread) };
    }

    /// The holders of a word of this chain.
    #[inline]
    fn holders(&self, word: Word) -> Slots<'a> {
        // SAFETY: the word was read under the pin, which is borrowed for `'a`.
        unsafe { Slots::of(word) }
    }

    /// The deepest block of all whose word `takes`; `pin` is the chain's.
    #[inline]
    fn deepest_match<'p>(
        &self,
        _pin: &'p Pin<'_>,
        takes: impl FnMut(Word) -> bool,
    ) -> Option<Match<'p>> {
        self.deepest_in(1..=self.hashes.len(), takes)
    }

    /// The same among these depths alone.
    #[inline]
    fn deepest_in<'p>(
        &self,
        depths: RangeInclusive<usize>,
        takes: impl FnMut(Word) -> bool,
    ) -> Option<Match<'p>> {
        let (blocks, word) = self.deepest(depths, takes)?;
        Some(Match {
            blocks,
            word,
            newest: self.newest(blocks),
            pin: PhantomData,
        })
    }

    /// The deepest block at one of these depths (1-based) whose word `takes`, given that all before it are taken too.
    #[inline]
    fn deepest(
        &self,
        depths: RangeInclusive<usize>,
        mut takes: impl FnMut(Word) -> bool,
    ) -> Option<(usize, Word)> {
        let (least, most) = depths.into_inner();
        let mut probe = |depth| self.word(depth).filter(|&word| takes(word));
        // Gallop: everything from `miss` on is refused.
        let mut miss = most + 1;
        let mut step = 1;
        let (mut depth, mut word) = loop {
            if miss <= least {
                return None;
            }
            let at = miss.saturating_sub(step).max(least);
            step *= 2;
            if at > least {
                self.prefetch(at.saturating_sub(step).max(least));
            }
            match probe(at) {
                Some(word) => break (at, word),
                None => miss = at,
            }
        };
        // Halve: `depth` is taken, `miss` is not.
        while miss - depth > 1 {
            let middle = depth + (miss - depth) / 2;
            // Whatever the answer, the next question is under way.
            if miss - depth > 3 {
                self.prefetch(depth + (middle - depth) / 2);
                self.prefetch(middle + (miss - middle) / 2);
            }
            match probe(middle) {
                Some(found) => (depth, word) = (middle, found),
                None => miss = middle,
            }
        }
        Some((depth, word))
    }

    fn newest(&self, depth: usize) -> u8 {
        self.view(Spread::of(self.hashes[depth - 1])).newest()
    }
}

impl Tree {
    /// Deepest block of `chain` that is known at all, whoever holds it: a 1-based count of blocks, 0 for none.
    ///
    /// # Panics
    /// If the pin is of another domain than the tree; so do the other look-ups.
    #[must_use]
    pub fn depth_known(&self, pin: &Pin<'_>, chain: &[PrefixHash]) -> usize {
        let chain = Chain::new(self, pin, chain);
        chain
            .deepest(1..=chain.hashes.len(), |_| true)
            .map_or(0, |(depth, _)| depth)
    }

    /// Deepest block held by a worker that `accept` takes. `None`: no such block. `accept` is asked about holders of probed
    /// blocks, in ascending order until it takes one.
    #[must_use]
    pub fn find<'p>(
        &self,
        pin: &'p Pin<'_>,
        chain: &[PrefixHash],
        mut accept: impl FnMut(Slot) -> bool,
    ) -> Option<Match<'p>> {
        let chain = Chain::new(self, pin, chain);
        chain.deepest_match(pin, |word| chain.holders(word).any(&mut accept))
    }

    /// Deepest block held by one worker; cheaper than [`Tree::find`] where blocks have many holders.
    #[must_use]
    pub fn find_held_by<'p>(
        &self,
        pin: &'p Pin<'_>,
        chain: &[PrefixHash],
        slot: Slot,
    ) -> Option<Match<'p>> {
        let chain = Chain::new(self, pin, chain);
        chain.deepest_match(pin, |word| chain.holders(word).has(slot))
    }

    /// Deepest block, of those at `least` (1 or more) and deeper, held by a worker that is not in `done` and that `accept` takes.
    #[must_use]
    pub fn find_further<'p>(
        &self,
        pin: &'p Pin<'_>,
        chain: &[PrefixHash],
        least: usize,
        done: &SlotSet,
        mut accept: impl FnMut(Slot) -> bool,
    ) -> Option<Match<'p>> {
        let chain = Chain::new(self, pin, chain);
        chain.deepest_in(least.max(1)..=chain.hashes.len(), |word| {
            let mut holders = chain.holders(word);
            holders.any(|slot| !done.has(slot) && accept(slot))
        })
    }

    /// Deepest block, of those at `least` (1 or more) and deeper, that one of these slots holds.
    #[must_use]
    pub fn find_among<'p>(
        &self,
        pin: &'p Pin<'_>,
        chain: &[PrefixHash],
        least: usize,
        slots: &SlotSet,
    ) -> Option<Match<'p>> {
        let chain = Chain::new(self, pin, chain);
        chain.deepest_in(least.max(1)..=chain.hashes.len(), |word| {
            chain.holders(word).meets(slots)
        })
    }

    /// Every level at which a further accepted worker appears, deepest first, at most `level_max` levels: pairs (worker,
    /// blocks it holds) are appended to `out`. `accept` is asked once about each holder that it refuses.
    pub fn matches(
        &self,
        pin: &Pin<'_>,
        chain: &[PrefixHash],
        mut accept: impl FnMut(Slot) -> bool,
        level_max: usize,
        out: &mut Vec<(Slot, usize)>,
    ) {
        let chain = Chain::new(self, pin, chain);
        // Reported, or refused.
        let mut done = SlotSet::default();
        let mut count = chain.hashes.len();
        for _ in 0..level_max {
            let takes = |word| {
                while let Some(slot) = chain.holders(word).first_not_in(&done) {
                    if accept(slot) {
                        return true;
                    }
                    done.add(slot);
                }
                false
            };
            let Some((depth, word)) = chain.deepest(1..=count, takes) else {
                return;
            };
            for slot in chain.holders(word) {
                if !done.has(slot) {
                    done.add(slot);
                    if accept(slot) {
                        out.push((slot, depth));
                    }
                }
            }
            count = depth - 1;
        }
    }
}
