//! The exact index: which engine holds which KV block, as the engines themselves say. Taught by the control thread through
//! the cores' mailboxes; read by every core without a lock.
//!
//! The index is a second tree of the shards, keyed by token blocks ([`super::block_chain`]). Who holds a block is a *source*: one
//! data-parallel rank's stream of events, not a worker, as a request meets one rank's cache and no mixture. What a
//! source says counts as much as it is trusted, and for the worker it belongs to at the moment: one word a source.
//!
//! Tiers below the device's memory have keys of their own (the block's, with a constant in it), so that one tree holds all.
//!
//! Invariants:
//! - I1 a source's word is one atomic; its worker, its trust and the worker's next source are never mixed from two moments;
//! - I2 the list of a worker's sources has one writer, who links in front and unlinks; a reader that meets a source of
//!   another worker has followed a link just taken away, and ends: it may miss a credit once, and never gives a wrong one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use shards::{Match, Pin, PrefixHash, SLOT_COUNT_MAX, Slot, SlotSet, TIER_COUNT, Tree};

use super::candidates::{Candidates, name_of};
use super::key::KeySeed;
use super::policy::Settings;
use super::tokens::BlockKeys;

/// How far a worker's knowledge is to be believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Trust {
    /// Nothing is known: it has no source, or that has been gone for seconds.
    Blind,
    /// Events were lost for good, or the connection has just gone: some of what is known is over.
    Degraded,
    /// Events that were missed are being fetched.
    CatchingUp,
    /// Every event that came has been taken: what is known is so.
    Exact,
}

impl Trust {
    /// All, in the order of their numbers.
    pub const ALL: [Trust; 4] = [
        Trust::Blind,
        Trust::Degraded,
        Trust::CatchingUp,
        Trust::Exact,
    ];

    /// The label in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Trust::Blind => "blind",
            Trust::Degraded => "degraded",
            Trust::CatchingUp => "catching_up",
            Trust::Exact => "exact",
        }
    }

    /// What a block known is worth, in percent.
    fn percent(self) -> u64 {
        match self {
            Trust::Blind => 0,
            Trust::Degraded => 50,
            Trust::CatchingUp => 75,
            Trust::Exact => 100,
        }
    }
}

/// What the approximate tree says of a worker without events is worth, in percent of exact knowledge.
const GUESS_PERCENT: u64 = 50;
/// Most depths at which holders are looked for; who holds less than the deepest eight levels gets no credit.
pub(super) const LEVEL_COUNT_MAX: usize = 8;
/// Sources of a level that are looked at whatever else is known.
const NARROW_MAX: usize = 8;
/// Most sources of a worker that are looked at, should I2's reader be led round.
const SOURCE_COUNT_MAX: usize = 256;
/// Adapters told apart, a power of two.
const ADAPTER_COUNT_MAX: usize = 4096;

/// Storage tiers, by number: what vLLM calls `medium`.
pub const DEVICE: usize = 0;
/// Main memory of the engine's machine.
pub const HOST: usize = 1;
/// Memory elsewhere.
pub const EXTERNAL: usize = 2;
/// Disk.
pub const DISK: usize = 3;

/// See the top of the file.
pub struct Index {
    /// Read side of the blocks.
    pub tree: Arc<Tree>,
    /// Makes the keys.
    pub keys: BlockKeys,
    /// Tokens of a block, at least 1.
    pub block_tokens: usize,
    /// By source; see [`SourceWord`].
    sources: Box<[AtomicU64]>,
    /// The first source of a worker, and one more; 0: it has none. By slot.
    firsts: Box<[AtomicU32]>,
    /// The best trust of a worker's sources, by slot.
    workers: Box<[AtomicU8]>,
    /// A bit for each worker that is not blind, by slot.
    trusted: Box<[AtomicU64]>,
    /// How many of them are not blind.
    trusted_count: AtomicU32,
    /// Names of adapters that events told of (hashes; 0: free), open addressing.
    adapters: Box<[AtomicU64]>,
    /// A bit for each tier that ever had a block.
    tiers: AtomicU8,
}

/// The worker a source speaks for (16 bits), how far it is believed (2), and above 32 bits that worker's next source, and one
/// more (0: no other). All zero: for nobody.
#[derive(Clone, Copy)]
struct SourceWord(u64);

impl SourceWord {
    fn new(slot: Slot, trust: Trust, next: u32) -> SourceWord {
        SourceWord(u64::from(slot.0) | (trust as u64) << 16 | u64::from(next) << 32)
    }

    #[inline]
    fn slot(self) -> Slot {
        Slot(self.0 as u16)
    }

    #[inline]
    fn trust(self) -> Trust {
        Trust::ALL[(self.0 >> 16 & 3) as usize]
    }

    #[inline]
    fn next(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// The tier's own key of a block.
#[inline]
pub fn key_in(tier: usize, key: PrefixHash) -> PrefixHash {
    const SALTS: [u64; TIER_COUNT] = [
        0,
        0x9e37_79b9_7f4a_7c15,
        0xc2b2_ae3d_27d4_eb4f,
        0x1656_67b1_9e37_79f9,
    ];
    PrefixHash((key.0 ^ SALTS[tier]).max(1))
}

/// Credits of one request, and scratch. One a core.
#[derive(Debug, Default)]
pub struct Credits {
    /// Workers that are known to hold some of the prompt, by slot ascending, with the tokens they need not compute.
    pub of: Vec<(Slot, u64)>,
    /// Candidates about which nothing exact is known.
    pub blind: Vec<Slot>,
    found: Vec<(Slot, usize)>,
    below: Vec<PrefixHash>,
}

impl Credits {
    fn add(&mut self, slot: Slot, tokens: u64) {
        match self.of.binary_search_by_key(&slot, |(slot, _)| *slot) {
            Ok(place) => self.of[place].1 = self.of[place].1.max(tokens),
            Err(place) => self.of.insert(place, (slot, tokens)),
        }
    }

    /// A worker's credit, in tokens.
    #[inline]
    pub fn find(&self, slot: Slot) -> u64 {
        let place = self.of.binary_search_by_key(&slot, |(slot, _)| *slot);
        place.map_or(0, |place| self.of[place].1)
    }

    /// What the approximate tree says of a worker about which nothing exact is known: the share of the prompt's `tokens` that it may hold.
    pub fn guess(&mut self, slot: Slot, tokens: u64, share: f64) {
        let guessed = tokens as f64 * share.clamp(0.0, 1.0) * GUESS_PERCENT as f64 / 100.0;
        self.add(slot, guessed as u64);
    }
}

impl Index {
    /// Nothing known, of nobody.
    pub fn new(tree: Arc<Tree>, seed: KeySeed, block_tokens: usize) -> Index {
        Index {
            tree,
            keys: BlockKeys::new(seed),
            block_tokens: block_tokens.max(1),
            sources: (0..SLOT_COUNT_MAX).map(|_| AtomicU64::new(0)).collect(),
            firsts: (0..SLOT_COUNT_MAX).map(|_| AtomicU32::new(0)).collect(),
            workers: (0..SLOT_COUNT_MAX).map(|_| AtomicU8::new(0)).collect(),
            trusted: (0..SLOT_COUNT_MAX / 64)
                .map(|_| AtomicU64::new(0))
                .collect(),
            trusted_count: AtomicU32::new(0),
            adapters: (0..ADAPTER_COUNT_MAX).map(|_| AtomicU64::new(0)).collect(),
            tiers: AtomicU8::new(0),
        }
    }

    /// Control: whom a source speaks for, and how far it is believed. `None`: for nobody.
    pub fn set_source(&self, source: u16, worker: Option<(Slot, Trust)>) {
        let old = self.source(Slot(source));
        let slot = worker.map(|(slot, _)| slot);
        if self.is_listed(source) && slot != Some(old.slot()) {
            self.unlink(source, old);
        }
        // ORDERING: Relaxed throughout: each word is whole in itself (I1), blocks seen a moment before or after it are as
        // good, and so are lists (I2).
        let word = match worker {
            None => SourceWord(0),
            Some((slot, trust)) if self.is_listed(source) => {
                SourceWord::new(slot, trust, old.next())
            }
            Some((slot, trust)) => {
                let first = &self.firsts[slot.index()];
                let word = SourceWord::new(slot, trust, first.load(Ordering::Relaxed));
                self.sources[usize::from(source)].store(word.0, Ordering::Relaxed);
                first.store(u32::from(source) + 1, Ordering::Relaxed);
                word
            }
        };
        self.sources[usize::from(source)].store(word.0, Ordering::Relaxed);
    }

    /// Control: whether a source stands in the list of the worker that its word names.
    fn is_listed(&self, source: u16) -> bool {
        let slot = self.source(Slot(source)).slot();
        self.listed(slot).any(|(listed, _)| listed.0 == source)
    }

    /// Control: takes a source out of its worker's list.
    fn unlink(&self, source: u16, word: SourceWord) {
        let before = self
            .listed(word.slot())
            .find(|(_, before)| before.next() == u32::from(source) + 1);
        // ORDERING: Relaxed; as in `set_source`.
        match before {
            Some((listed, before)) => {
                let without = SourceWord::new(before.slot(), before.trust(), word.next());
                self.sources[listed.index()].store(without.0, Ordering::Relaxed);
            }
            None => self.firsts[word.slot().index()].store(word.next(), Ordering::Relaxed),
        }
    }

    /// Control: the best trust of a worker's sources.
    pub fn set_worker(&self, slot: Slot, trust: Trust) {
        // ORDERING: Relaxed; as in `set_source`.
        let old = self.workers[slot.index()].swap(trust as u8, Ordering::Relaxed);
        let count = |trust: u8| u32::from(trust != Trust::Blind as u8);
        let bit = 1 << (slot.index() % 64);
        let bits = &self.trusted[slot.index() / 64];
        // ORDERING: Relaxed; a hint, as below.
        match trust {
            Trust::Blind => bits.fetch_and(!bit, Ordering::Relaxed),
            _ => bits.fetch_or(bit, Ordering::Relaxed),
        };
        // ORDERING: Relaxed twice; only the control thread writes, and a hint a moment old is as good.
        let others = self.trusted_count.load(Ordering::Relaxed) - count(old);
        self.trusted_count
            .store(others + count(trust as u8), Ordering::Relaxed);
    }

    /// Whether anybody's sources are believed at all.
    pub fn is_anybody_trusted(&self) -> bool {
        // ORDERING: Relaxed; as in `set_worker`.
        self.trusted_count.load(Ordering::Relaxed) > 0
    }

    /// How far a worker's sources are believed.
    #[inline]
    pub fn trust(&self, slot: Slot) -> Trust {
        // ORDERING: Relaxed; as in `set_source`.
        Trust::ALL[usize::from(self.workers[slot.index()].load(Ordering::Relaxed) & 3)]
    }

    #[inline]
    fn source(&self, source: Slot) -> SourceWord {
        // ORDERING: Relaxed; as in `set_source`.
        SourceWord(self.sources[source.index()].load(Ordering::Relaxed))
    }

    /// The list of a worker's sources.
    #[inline]
    fn listed(&self, slot: Slot) -> impl Iterator<Item = (Slot, SourceWord)> {
        // ORDERING: Relaxed; as in `set_source`.
        let mut next = self.firsts[slot.index()].load(Ordering::Relaxed);
        let mut left = SOURCE_COUNT_MAX;
        std::iter::from_fn(move || {
            let source = Slot(next.checked_sub(1)? as u16);
            left = left.checked_sub(1)?;
            let word = self.source(source);
            next = word.next();
            (word.slot() == slot).then_some((source, word))
        })
    }

    /// A worker's sources that are believed.
    #[inline]
    fn sources_of(&self, slot: Slot) -> impl Iterator<Item = (Slot, Trust)> {
        let all = self
            .listed(slot)
            .map(|(source, word)| (source, word.trust()));
        all.filter(|(_, trust)| *trust != Trust::Blind)
    }

    /// The candidates about which nothing exact is known, in `out` (cleared first).
    pub fn list_blind(&self, candidates: &Candidates, out: &mut Vec<Slot>) {
        out.clear();
        for (index, (bits, trusted)) in candidates.bits().iter().zip(&self.trusted).enumerate() {
            // ORDERING: Relaxed; as in `set_worker`.
            let mut blind = bits & !trusted.load(Ordering::Relaxed);
            while blind != 0 {
                out.push(Slot((64 * index) as u16 + blind.trailing_zeros() as u16));
                blind &= blind - 1;
            }
        }
    }

    /// Control: events named this adapter. False: no room for another one.
    pub fn add_adapter(&self, name: &str) -> bool {
        let hash = name_of(name).max(1);
        for place in self.adapter_places(hash) {
            // ORDERING: Relaxed twice; only the control thread writes, and a hash is whole in itself.
            match place.load(Ordering::Relaxed) {
                found if found == hash => return true,
                0 => {
                    place.store(hash, Ordering::Relaxed);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// Whether a model's name is that of an adapter.
    pub fn is_adapter(&self, name: &str) -> bool {
        let hash = name_of(name).max(1);
        // ORDERING: Relaxed; as in `add_adapter`.
        let mut words = self
            .adapter_places(hash)
            .map(|place| place.load(Ordering::Relaxed));
        words.find(|word| *word == hash || *word == 0) == Some(hash)
    }

    fn adapter_places(&self, hash: u64) -> impl Iterator<Item = &AtomicU64> {
        let count = self.adapters.len();
        (0..count).map(move |step| &self.adapters[(hash as usize).wrapping_add(step) % count])
    }

    /// Control: this tier has blocks.
    pub fn add_tier(&self, tier: usize) {
        // ORDERING: Relaxed; a hint: who misses it gives no credit for a tier's first block.
        self.tiers.fetch_or(1 << tier, Ordering::Relaxed);
    }

    /// Who holds what of a prompt of `tokens`, as far as the settings make it necessary to know of everybody: then in `out`, whose former
    /// credits go; else `out` is empty, and the holdings are asked of those who matter.
    pub fn look_up<'k>(
        &'k self,
        pin: &'k Pin<'k>,
        chain: &'k [PrefixHash],
        tokens: u64,
        settings: &Settings,
        candidates: &Candidates,
        out: &mut Credits,
    ) -> Option<Holdings<'k>> {
        out.of.clear();
        // ORDERING: Relaxed; as in `add_tier`.
        let has_other_tiers = self.tiers.load(Ordering::Relaxed) >> HOST != 0;
        if has_other_tiers || settings.temperature > 0.0 {
            let is_candidate = |slot| candidates.contains(slot);
            self.credit(pin, chain, tokens, &settings.tier_values, is_candidate, out);
            return None;
        }
        let index = self;
        (!chain.is_empty()).then_some(Holdings {
            index,
            pin,
            chain,
            tokens,
        })
    }

    /// What each candidate need not compute of a prompt of `tokens`, in `out` (its former credits go): the longest run of
    /// blocks from the start in the device's memory, and the longest continuation of it in one other tier, times what that tier
    /// is worth (vllm-router 0.1.17; `values` by tier). At most `tokens` - 1.
    pub fn credit(
        &self,
        pin: &Pin<'_>,
        chain: &[PrefixHash],
        tokens: u64,
        values: &[f64; TIER_COUNT],
        is_candidate: impl Fn(Slot) -> bool,
        out: &mut Credits,
    ) {
        out.of.clear();
        out.found.clear();
        if chain.is_empty() {
            return;
        }
        let counts = |source: Slot| {
            let word = self.source(source);
            word.trust() != Trust::Blind && is_candidate(word.slot())
        };
        let mut found = std::mem::take(&mut out.found);
        self.tree
            .matches(pin, chain, counts, LEVEL_COUNT_MAX, &mut found);
        for (source, blocks) in &found {
            self.grant(*source, *blocks as f64, tokens, out);
        }
        // ORDERING: Relaxed; as in `add_tier`.
        let tiers = self.tiers.load(Ordering::Relaxed);
        for tier in (HOST..TIER_COUNT).filter(|tier| tiers >> tier & 1 == 1) {
            self.continue_in(tier, pin, chain, tokens, values, counts, &found, out);
        }
        found.clear();
        out.found = found;
    }

    #[allow(clippy::too_many_arguments, reason = "the inside of one function")]
    fn continue_in(
        &self,
        tier: usize,
        pin: &Pin<'_>,
        chain: &[PrefixHash],
        tokens: u64,
        values: &[f64; TIER_COUNT],
        counts: impl Fn(Slot) -> bool,
        found: &[(Slot, usize)],
        out: &mut Credits,
    ) {
        let mut below = std::mem::take(&mut out.below);
        below.clear();
        below.extend(chain.iter().map(|key| key_in(tier, *key)));
        for (source, device) in found {
            if let Some(more) = self.tree.find_held_by(pin, &below[*device..], *source) {
                let blocks = *device as f64 + more.blocks as f64 * values[tier];
                self.grant(*source, blocks, tokens, out);
            }
        }
        // And those that hold nothing in the device's memory.
        let mut others = Vec::new();
        let is_other = |source: Slot| !found.iter().any(|(held, _)| *held == source);
        let counts = |source| is_other(source) && counts(source);
        self.tree
            .matches(pin, &below, counts, LEVEL_COUNT_MAX, &mut others);
        for (source, blocks) in others {
            self.grant(source, blocks as f64 * values[tier], tokens, out);
        }
        out.below = below;
    }

    fn grant(&self, source: Slot, blocks: f64, tokens: u64, out: &mut Credits) {
        let word = self.source(source);
        let held = (blocks * self.block_tokens as f64) as u64;
        let credit = credit_of(held, tokens, word.trust());
        if credit > 0 {
            out.add(word.slot(), credit);
        }
    }
}

/// What so many tokens held are worth to a prompt of `tokens`: the last one is always computed.
#[inline]
fn credit_of(held: u64, tokens: u64, trust: Trust) -> u64 {
    held.min(tokens.saturating_sub(1)) * trust.percent() / 100
}

/// The blocks of one prompt in the index, to be asked who holds how many of them. For the device's memory alone.
#[derive(Clone, Copy)]
pub struct Holdings<'k> {
    index: &'k Index,
    pin: &'k Pin<'k>,
    /// At least one block.
    chain: &'k [PrefixHash],
    tokens: u64,
}

/// A depth at which somebody's holding ends, with all who hold so much: this block and the one before it. Of keys of 40 bits one by
/// itself may be another block's ([`super::tokens`]), two in a row are not.
pub(super) struct Level<'k> {
    at: Match<'k>,
    before: Option<Match<'k>>,
}

impl Level<'_> {
    /// More sources hold so much than are looked at one by one.
    pub(super) fn is_wide(&self) -> bool {
        self.at.holders().nth(NARROW_MAX).is_some()
    }

    fn is_held_by(&self, source: Slot) -> bool {
        let is_before = |before: &Match<'_>| before.is_held_by(source);
        self.at.is_held_by(source) && self.before.as_ref().is_none_or(is_before)
    }

    /// Its sources; `scratch` is another set.
    pub(super) fn list(&self, scratch: &mut SlotSet, out: &mut SlotSet) {
        match &self.before {
            None => self.at.list(None, out),
            Some(before) => {
                before.list(None, scratch);
                self.at.list(Some(scratch), out);
            }
        }
    }
}

impl<'k> Holdings<'k> {
    /// What a worker need not compute: some ten probes. For one worker; for many there are levels.
    pub fn credit(&self, slot: Slot) -> u64 {
        let held = self.index.sources_of(slot).filter_map(|(source, trust)| {
            let find = |chain, _| self.index.tree.find_held_by(self.pin, chain, source);
            let level = self.confirmed(self.chain, 1, find)?;
            Some(self.worth(level.at.blocks, trust))
        });
        held.max().unwrap_or(0)
    }

    /// The deepest block that `find` finds in a chain, at that depth or deeper, with the one before it.
    #[inline]
    fn confirmed(
        &self,
        mut chain: &'k [PrefixHash],
        least: usize,
        find: impl Fn(&'k [PrefixHash], usize) -> Option<Match<'k>>,
    ) -> Option<Level<'k>> {
        for _ in 0..LEVEL_COUNT_MAX {
            let at = find(chain, least)?;
            let before = match at.blocks {
                1 => None,
                blocks => find(&chain[blocks - 2..blocks - 1], 1),
            };
            if at.blocks == 1 || before.is_some() {
                return Some(Level { at, before });
            }
            chain = &chain[..at.blocks - 1];
        }
        None
    }

    /// What all of it is worth: nobody is credited with more.
    pub(super) fn most(&self) -> u64 {
        self.worth(self.chain.len(), Trust::Exact)
    }

    /// The deepest level to which a candidate's source holds the prompt, other than those that are `done`; of at most `most`
    /// tokens, and of those that are worth `least` and more.
    pub(super) fn deepest(
        &self,
        most: u64,
        least: u64,
        done: &SlotSet,
        is_candidate: impl Fn(Slot) -> bool,
    ) -> Option<Level<'k>> {
        let counts = |source| {
            let word = self.index.source(source);
            word.trust() != Trust::Blind && is_candidate(word.slot())
        };
        let (chain, least) = self.between(most, least);
        let tree = &self.index.tree;
        self.confirmed(chain, least, |chain, least| {
            tree.find_further(self.pin, chain, least, done, counts)
        })
    }

    /// The same for these sources.
    pub(super) fn deepest_among(
        &self,
        most: u64,
        least: u64,
        sources: &SlotSet,
    ) -> Option<Level<'k>> {
        let (chain, least) = self.between(most, least);
        let tree = &self.index.tree;
        self.confirmed(chain, least, |chain, least| {
            tree.find_among(self.pin, chain, least, sources)
        })
    }

    /// The blocks of `most` tokens, and how many it takes to be worth `least`.
    fn between(&self, most: u64, least: u64) -> (&'k [PrefixHash], usize) {
        let tokens = self.index.block_tokens as u64;
        let len = self.chain.len().min((most / tokens) as usize);
        (&self.chain[..len], least.div_ceil(tokens) as usize)
    }

    /// What the level is worth to whoever is believed in all: of those who hold no more nobody is credited with more.
    pub(super) fn most_at(&self, level: &Level<'_>) -> u64 {
        self.worth(level.at.blocks, Trust::Exact)
    }

    /// The most that a worker can be credited with that has no source of this level.
    pub(super) fn most_short_of(&self, level: &Level<'_>) -> u64 {
        self.worth(level.at.blocks - 1, Trust::Exact)
    }

    /// What a level of these sources and so many tokens is worth to a worker; 0 if none of its sources holds so much. Sources
    /// that hold less are told to `rest`.
    #[inline]
    pub(super) fn credit_at(
        &self,
        held: u64,
        sources: &SlotSet,
        slot: Slot,
        mut rest: impl FnMut(Slot),
    ) -> u64 {
        let mut credit = 0;
        for (source, trust) in self.index.sources_of(slot) {
            match sources.has(source) {
                true => credit = credit.max(credit_of(held, self.tokens, trust)),
                false => rest(source),
            }
        }
        credit
    }

    /// A level's sources, with their workers and what it is worth to them.
    pub(super) fn held_at(&self, level: &Level<'_>) -> impl Iterator<Item = (Slot, Slot, u64)> {
        let held = level
            .at
            .holders()
            .filter(|source| level.is_held_by(*source));
        held.map(|source| {
            let word = self.index.source(source);
            let worth = self.worth(level.at.blocks, word.trust());
            (source, word.slot(), worth)
        })
    }

    #[inline]
    fn worth(&self, blocks: usize, trust: Trust) -> u64 {
        credit_of(
            (blocks * self.index.block_tokens) as u64,
            self.tokens,
            trust,
        )
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
