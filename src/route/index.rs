//! The exact index: which engine holds which KV block, as the engines themselves say. Taught by the control thread through
//! the cores' mailboxes; read by every core without a lock.
//!
//! The index is a second tree of the shards, keyed by token blocks ([`super::block_chain`]). Who holds a block is a *source*: one
//! data-parallel rank's stream of events, not a worker, as a request meets one rank's cache and no mixture. What a
//! source says counts as much as it is trusted, and for the worker it belongs to at the moment: one word a source.
//!
//! Tiers below the device's memory have keys of their own (the block's, with a constant in it), so that one tree holds all.
//!
//! Invariant I1: a word is one atomic; worker and trust of a source are never mixed from two moments.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use shards::{Pin, PrefixHash, SLOT_COUNT_MAX, Slot, TIER_COUNT, Tree};

use super::candidates::name_of;
use super::key::KeySeed;
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
const LEVEL_COUNT_MAX: usize = 8;
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
    /// Slot and trust, by source; see [`word`].
    sources: Box<[AtomicU32]>,
    /// The best trust of a worker's sources, by slot.
    workers: Box<[AtomicU8]>,
    /// How many of them are not blind.
    trusted_count: AtomicU32,
    /// Names of adapters that events told of (hashes; 0: free), open addressing.
    adapters: Box<[AtomicU64]>,
    /// A bit for each tier that ever had a block.
    tiers: AtomicU8,
}

/// Trust above the slot.
fn word(slot: Slot, trust: Trust) -> u32 {
    u32::from(slot.0) | (trust as u32) << 16
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
    /// Workers that hold some of the prompt, by slot ascending, with the tokens they need not compute.
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
            sources: (0..SLOT_COUNT_MAX).map(|_| AtomicU32::new(0)).collect(),
            workers: (0..SLOT_COUNT_MAX).map(|_| AtomicU8::new(0)).collect(),
            trusted_count: AtomicU32::new(0),
            adapters: (0..ADAPTER_COUNT_MAX).map(|_| AtomicU64::new(0)).collect(),
            tiers: AtomicU8::new(0),
        }
    }

    /// Control: whom a source speaks for, and how far it is believed. `None`: for nobody.
    pub fn set_source(&self, source: u16, worker: Option<(Slot, Trust)>) {
        let word = worker.map_or(0, |(slot, trust)| word(slot, trust));
        // ORDERING: Relaxed; the word is whole in itself (I1), and blocks seen a moment before or after it are as good.
        self.sources[usize::from(source)].store(word, Ordering::Relaxed);
    }

    /// Control: the best trust of a worker's sources.
    pub fn set_worker(&self, slot: Slot, trust: Trust) {
        // ORDERING: Relaxed; as in `set_source`.
        let old = self.workers[slot.index()].swap(trust as u8, Ordering::Relaxed);
        let count = |trust: u8| u32::from(trust != Trust::Blind as u8);
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
    fn source(&self, source: Slot) -> (Slot, Trust) {
        // ORDERING: Relaxed; as in `set_source`.
        let word = self.sources[source.index()].load(Ordering::Relaxed);
        (Slot(word as u16), Trust::ALL[(word >> 16 & 3) as usize])
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

    /// What each candidate need not compute of a prompt of `tokens`, in `out` (its former contents go): the longest run of
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
            let (worker, trust) = self.source(source);
            trust != Trust::Blind && is_candidate(worker)
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
        let (worker, trust) = self.source(source);
        let held = (blocks * self.block_tokens as f64) as u64;
        let credit = held.min(tokens.saturating_sub(1)) * trust.percent() / 100;
        if credit > 0 {
            out.add(worker, credit);
        }
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
