//! The model of one inference engine: a prefix cache, a prefill queue, and decode steps that slow down with the batch.
//!
//! A pure state machine: no clock, no I/O, no threads. Whoever owns it (one tokio task per engine, see `server`) passes
//! `now` in and takes events out. What it copies from vLLM is the scheduler's shape, not its numbers: one step at a
//! time; a step decodes one token for every running sequence that is past its prompt and prefills a bounded chunk of the
//! oldest that is not; full blocks of 16 tokens are cached by chained hash, pinned while in use, and evicted oldest first.
//! In P/D a prompt that is to be handed over keeps its blocks pinned after its sequence's end, and one that is fetched
//! costs time of its own, outside the steps, for the blocks that are not cached here.
//! What it leaves out: preemption (a sequence is admitted only when its blocks up to its last token fit).
//!
//! Invariants:
//! - E1: cached blocks + private blocks of running sequences and kept prompts <= `cache_blocks`.
//! - E2: a block is pinned as often as running sequences and kept prompts hold it; pinned blocks are never evicted.
//! - E3: a sequence leaves the engine exactly once: by its last event, or by [`Engine::abort`].

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use ahash::AHashMap;

/// Nanoseconds since the engine's owner began to count.
pub type Nanos = u64;

/// Bytes of rendered text that stand for one token.
pub const TOKEN_BYTES: usize = 4;

/// Steps taken by one [`Engine::advance`], so that an engine with no step time cannot starve its owner.
const STEPS_PER_ADVANCE_MAX: u32 = 256;

/// How fast and how large the engine is.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Tokens in a cached block.
    pub block_tokens: u32,
    /// Blocks the engine has, for cached prefixes and running sequences together.
    pub cache_blocks: u32,
    /// Prompt tokens a second while prefilling; 0 takes no time.
    pub prefill_tokens_per_s: f64,
    /// Tokens a second whose KV blocks are fetched from another engine, for each sequence; 0 takes no time.
    pub transfer_tokens_per_s: f64,
    /// Prompt tokens prefilled in one step at most (chunked prefill).
    pub chunk_tokens: u32,
    /// Time of a decode step, whatever the batch.
    pub step_base: Duration,
    /// Time a decode step takes more for each sequence in it.
    pub step_per_sequence: Duration,
    /// Sequences running at once.
    pub running_max: u32,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            block_tokens: 16,
            cache_blocks: 8192,
            prefill_tokens_per_s: 8000.0,
            transfer_tokens_per_s: 200_000.0,
            chunk_tokens: 512,
            step_base: Duration::from_millis(12),
            step_per_sequence: Duration::from_micros(400),
            running_max: 64,
        }
    }
}

/// A sequence to run: one choice of one request.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Named in every event; unique among sequences in the engine.
    pub id: u64,
    /// Chained hashes of the full blocks of prompt and answer together.
    pub blocks: Vec<u64>,
    /// Length of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Length of the answer; 0 ends with the prefill (embeddings).
    pub output_tokens: u32,
    /// The prompt's KV blocks come from another engine (the decode side of P/D): only its last token is computed here.
    pub is_prompt_remote: bool,
    /// The prompt's KV blocks stay after the sequence's end under this number, until [`Engine::release_kept`].
    pub kept_as: Option<u64>,
}

/// What a step brought forth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The prompt is computed; the first token comes right after, unless none is wanted: that ends the sequence.
    Prefilled {
        /// The sequence.
        id: u64,
        /// Prompt tokens that were not computed here; of a prompt from another engine all, as vLLM reports it.
        cached_tokens: u32,
        /// No token is wanted: the sequence has ended.
        is_last: bool,
    },
    /// A token of the answer.
    Token {
        /// The sequence.
        id: u64,
        /// Which token, from 0.
        index: u32,
        /// The sequence has ended with it.
        is_last: bool,
    },
}

/// Totals since the start, and the state at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences admitted and not ended.
    pub running: u32,
    /// Sequences not yet admitted.
    pub waiting: u32,
    /// Blocks in use by running sequences and kept prompts, as a fraction of all.
    pub usage: f64,
    /// Prompt tokens of admitted sequences (vLLM counts its prefix cache queries in tokens).
    pub queried_tokens: u64,
    /// Of these, tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Prompt tokens of sequences whose prefill has ended.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Sequences that ended by themselves.
    pub finished: u64,
    /// Sequences ended by [`Engine::abort`].
    pub aborted: u64,
    /// Blocks evicted to make room.
    pub evicted_blocks: u64,
    /// Blocks that kept prompts hold; one that several share counts for each.
    pub kept_blocks: u32,
    /// Tokens whose blocks were fetched from other engines.
    pub fetched_tokens: u64,
}

/// A prompt whose sequence has ended and whose blocks are waited for by another engine.
#[derive(Debug)]
struct Kept {
    pinned: Vec<u64>,
    private_blocks: u32,
}

impl Kept {
    fn blocks(&self) -> u32 {
        self.pinned.len() as u32 + self.private_blocks
    }
}

#[derive(Debug)]
struct Sequence {
    new: NewSequence,
    computed_tokens: u32,
    cached_tokens: u32,
    emitted_tokens: u32,
    /// Leading blocks of the chain that this sequence pins in the cache.
    pinned_blocks: u32,
    /// Blocks it holds that are in nobody's cache yet.
    private_blocks: u32,
    /// What it does in the step under way: prompt tokens, or (0 and `is_decoding`) one token of the answer.
    planned_tokens: u32,
    is_decoding: bool,
    /// Until then its blocks are on their way from another engine.
    fetched_at: Nanos,
}

impl Sequence {
    fn new(new: NewSequence) -> Sequence {
        Sequence {
            new,
            computed_tokens: 0,
            cached_tokens: 0,
            emitted_tokens: 0,
            pinned_blocks: 0,
            private_blocks: 0,
            planned_tokens: 0,
            is_decoding: false,
            fetched_at: 0,
        }
    }

    fn left_to_prefill(&self) -> u32 {
        self.new.prompt_tokens.saturating_sub(self.computed_tokens)
    }

    /// Its part in the step that begins now, out of the step's budget of prompt tokens.
    fn plan(&mut self, now: Nanos, budget: &mut u32) {
        let is_here = self.fetched_at <= now;
        let left = self.left_to_prefill();
        self.is_decoding = is_here && left == 0;
        self.planned_tokens = if is_here { left.min(*budget) } else { 0 };
        *budget -= self.planned_tokens;
    }
}

/// One engine.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    cache: BlockCache,
    waiting: VecDeque<Sequence>,
    /// In order of admission.
    running: Vec<Sequence>,
    kept: AHashMap<u64, Kept>,
    step_ends: Option<Nanos>,
    /// The step under way computes nothing: every running sequence waits for its blocks.
    is_only_fetching: bool,
    stats: EngineStats,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Engine {
        let cache = BlockCache::new(config.cache_blocks);
        Engine {
            config,
            cache,
            waiting: VecDeque::new(),
            running: Vec::new(),
            kept: AHashMap::new(),
            step_ends: None,
            is_only_fetching: false,
            stats: EngineStats::default(),
        }
    }

    /// Puts a sequence at the end of the queue. Call [`Engine::advance`] up to the same moment first, and again after.
    ///
    /// # Errors
    /// Gives back a sequence that could never fit into the engine's blocks.
    pub fn submit(&mut self, new: NewSequence) -> Result<(), NewSequence> {
        if self.blocks_for(&new) > self.config.cache_blocks {
            return Err(new);
        }
        self.waiting.push_back(Sequence::new(new));
        self.cut_idle_step();
        Ok(())
    }

    /// Ends a sequence, wherever it is; its place is free for the next step. False when there is none of that id.
    pub fn abort(&mut self, id: u64) -> bool {
        if let Some(at) = self.running.iter().position(|s| s.new.id == id) {
            let sequence = self.running.remove(at);
            self.release(sequence);
        } else if let Some(at) = self.waiting.iter().position(|s| s.new.id == id) {
            self.waiting.remove(at);
        } else {
            return false;
        }
        self.stats.aborted += 1;
        true
    }

    /// Takes every step that ends up to `now` (a bounded number at once) and adds what they bring to `events`.
    pub fn advance(&mut self, now: Nanos, events: &mut Vec<Event>) {
        for _ in 0..STEPS_PER_ADVANCE_MAX {
            match self.step_ends {
                None => {
                    self.step_ends = self.begin_step(now);
                    if self.step_ends.is_none() {
                        return;
                    }
                }
                Some(end) if end <= now => {
                    self.finish_step(events);
                    self.step_ends = self.begin_step(end);
                }
                Some(_) => return,
            }
        }
    }

    /// When the step under way ends; `None` while idle.
    pub fn next_wake(&self) -> Option<Nanos> {
        self.step_ends
    }

    /// Lets a kept prompt's blocks go. False when there is none of that number.
    pub fn release_kept(&mut self, number: u64) -> bool {
        let Some(kept) = self.kept.remove(&number) else {
            return false;
        };
        for hash in kept.pinned.iter().rev() {
            self.cache.unpin(*hash);
        }
        self.cache.private -= kept.private_blocks;
        self.cut_idle_step();
        true
    }

    /// Forgets every cached block. False, and nothing done, while any is pinned (as vLLM does).
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.running.is_empty() && self.kept.is_empty() && self.cache.clear()
    }

    /// Totals and state.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            usage: f64::from(self.cache.in_use()) / f64::from(self.config.cache_blocks.max(1)),
            evicted_blocks: self.cache.evicted,
            kept_blocks: self.kept.values().map(Kept::blocks).sum(),
            ..self.stats
        }
    }

    /// A step that only waits for blocks holds nobody up: whatever has changed is looked at at once.
    fn cut_idle_step(&mut self) {
        if self.is_only_fetching {
            self.step_ends = None;
        }
    }

    fn blocks_for(&self, new: &NewSequence) -> u32 {
        (new.prompt_tokens + new.output_tokens).div_ceil(self.config.block_tokens)
    }

    /// Plans the next step and says when it ends; `None` when there is nothing to do.
    fn begin_step(&mut self, now: Nanos) -> Option<Nanos> {
        let mut budget = self.config.chunk_tokens.max(1);
        let mut decoding = 0;
        for sequence in &mut self.running {
            sequence.plan(now, &mut budget);
            decoding += u32::from(sequence.is_decoding);
        }
        while budget > 0 && (self.running.len() as u32) < self.config.running_max {
            let Some(mut sequence) = self.admit(now) else {
                break;
            };
            sequence.plan(now, &mut budget);
            self.running.push(sequence);
        }
        let prefilled = self.config.chunk_tokens.max(1) - budget;
        self.is_only_fetching = prefilled == 0 && decoding == 0;
        if self.is_only_fetching {
            return self.running.iter().map(|s| s.fetched_at).min();
        }
        Some(now + self.step_time(prefilled, decoding))
    }

    fn step_time(&self, prefill_tokens: u32, decoding: u32) -> Nanos {
        let mut nanos = duration_of(prefill_tokens, self.config.prefill_tokens_per_s);
        if decoding > 0 {
            let step = self.config.step_base + self.config.step_per_sequence * decoding;
            nanos += step.as_nanos() as Nanos;
        }
        nanos
    }

    /// Takes the oldest waiting sequence in, if its blocks fit.
    fn admit(&mut self, now: Nanos) -> Option<Sequence> {
        let front = self.waiting.front()?;
        let (prompt, is_remote) = (front.new.prompt_tokens, front.new.is_prompt_remote);
        // At least one token is always computed: its output is what the first answer token is sampled from.
        let matched_max = ((prompt - 1) / self.config.block_tokens) as usize;
        let matched = self
            .cache
            .matched(&front.new.blocks[..matched_max.min(front.new.blocks.len())]);
        let needed = self.blocks_for(&front.new) - matched;
        if !self
            .cache
            .reserve(&front.new.blocks[..matched as usize], needed)
        {
            return None;
        }
        let mut sequence = self.waiting.pop_front()?;
        sequence.pinned_blocks = matched;
        sequence.private_blocks = needed;
        let matched_tokens = matched * self.config.block_tokens;
        sequence.cached_tokens = if is_remote { prompt } else { matched_tokens };
        sequence.computed_tokens = sequence.cached_tokens.min(prompt - 1);
        if is_remote {
            let fetched = prompt - matched_tokens;
            sequence.fetched_at = now + duration_of(fetched, self.config.transfer_tokens_per_s);
            self.stats.fetched_tokens += u64::from(fetched);
        }
        self.stats.queried_tokens += u64::from(prompt);
        self.stats.cached_tokens += u64::from(matched_tokens);
        Some(sequence)
    }

    fn finish_step(&mut self, events: &mut Vec<Event>) {
        let mut at = 0;
        while at < self.running.len() {
            if self.finish_step_of(at, events) {
                let sequence = self.running.remove(at);
                match sequence.new.kept_as {
                    Some(number) => self.keep(number, sequence),
                    None => self.release(sequence),
                }
                self.stats.finished += 1;
            } else {
                at += 1;
            }
        }
    }

    /// Carries out what the step planned for one sequence; says whether it has ended.
    fn finish_step_of(&mut self, at: usize, events: &mut Vec<Event>) -> bool {
        let sequence = &mut self.running[at];
        let id = sequence.new.id;
        if sequence.is_decoding {
            sequence.computed_tokens += 1;
        } else if sequence.planned_tokens == 0 {
            // No part in this step: the budget was spent, or its blocks are on their way.
            return false;
        } else {
            sequence.computed_tokens += std::mem::take(&mut sequence.planned_tokens);
        }
        publish_blocks(&mut self.cache, sequence, self.config.block_tokens);
        if sequence.left_to_prefill() > 0 {
            return false;
        }
        if !sequence.is_decoding {
            self.stats.prompt_tokens += u64::from(sequence.new.prompt_tokens);
            let is_last = sequence.new.output_tokens == 0;
            events.push(Event::Prefilled {
                id,
                cached_tokens: sequence.cached_tokens,
                is_last,
            });
            if is_last {
                return true;
            }
        }
        let index = sequence.emitted_tokens;
        sequence.emitted_tokens += 1;
        self.stats.output_tokens += 1;
        let is_last = sequence.emitted_tokens >= sequence.new.output_tokens;
        events.push(Event::Token { id, index, is_last });
        is_last
    }

    /// Ends a sequence but for the blocks of its prompt.
    fn keep(&mut self, number: u64, sequence: Sequence) {
        let blocks = sequence
            .new
            .prompt_tokens
            .div_ceil(self.config.block_tokens);
        let pinned = sequence.pinned_blocks.min(blocks);
        let kept = Kept {
            pinned: sequence.new.blocks[..pinned as usize].to_vec(),
            private_blocks: blocks - pinned,
        };
        for hash in &kept.pinned {
            self.cache.pin(*hash);
        }
        self.cache.private += kept.private_blocks;
        self.release(sequence);
        self.kept.insert(number, kept);
    }

    fn release(&mut self, sequence: Sequence) {
        // Tail first, so that the part of the chain others may share is evicted last.
        for hash in sequence.new.blocks[..sequence.pinned_blocks as usize]
            .iter()
            .rev()
        {
            self.cache.unpin(*hash);
        }
        self.cache.private -= sequence.private_blocks;
    }
}

/// The time that many tokens take at a rate; a rate of 0 takes none.
fn duration_of(tokens: u32, tokens_per_s: f64) -> Nanos {
    if tokens_per_s > 0.0 {
        (f64::from(tokens) * 1e9 / tokens_per_s) as Nanos
    } else {
        0
    }
}

/// Moves a sequence's blocks that are now full from private to cached.
fn publish_blocks(cache: &mut BlockCache, sequence: &mut Sequence, block_tokens: u32) {
    let full = (sequence.computed_tokens / block_tokens).min(sequence.new.blocks.len() as u32);
    while sequence.pinned_blocks < full && sequence.private_blocks > 0 {
        cache.publish(sequence.new.blocks[sequence.pinned_blocks as usize]);
        sequence.pinned_blocks += 1;
        sequence.private_blocks -= 1;
    }
}

#[derive(Debug)]
struct Block {
    pins: u32,
    /// Key in `BlockCache::idle`; has a meaning only while nothing pins the block.
    idle_since: u64,
}

/// Cached blocks by hash, and the order in which the idle ones go.
#[derive(Debug)]
struct BlockCache {
    capacity: u32,
    blocks: AHashMap<u64, Block>,
    /// Blocks that nothing pins, longest idle first.
    idle: BTreeMap<u64, u64>,
    /// Blocks held by running sequences and kept prompts and not cached (partly filled, or not computed yet).
    private: u32,
    tick: u64,
    evicted: u64,
}

impl BlockCache {
    fn new(capacity: u32) -> BlockCache {
        BlockCache {
            capacity,
            blocks: AHashMap::new(),
            idle: BTreeMap::new(),
            private: 0,
            tick: 0,
            evicted: 0,
        }
    }

    /// Leading blocks of a chain that are cached.
    fn matched(&self, chain: &[u64]) -> u32 {
        chain
            .iter()
            .take_while(|hash| self.blocks.contains_key(hash))
            .count() as u32
    }

    /// Blocks that may not be evicted.
    fn in_use(&self) -> u32 {
        (self.blocks.len() - self.idle.len()) as u32 + self.private
    }

    /// Pins `matched` and sets `needed` further blocks aside, evicting as many as that takes; or does nothing at all.
    fn reserve(&mut self, matched: &[u64], needed: u32) -> bool {
        let waking = matched
            .iter()
            .filter(|hash| self.blocks[hash].pins == 0)
            .count() as u32;
        if self.in_use() + waking + needed > self.capacity {
            return false;
        }
        for hash in matched {
            self.pin(*hash);
        }
        self.private += needed;
        while self.blocks.len() as u32 + self.private > self.capacity {
            let Some((_, hash)) = self.idle.pop_first() else {
                break;
            };
            self.blocks.remove(&hash);
            self.evicted += 1;
        }
        true
    }

    fn pin(&mut self, hash: u64) {
        if let Some(block) = self.blocks.get_mut(&hash) {
            if block.pins == 0 {
                self.idle.remove(&block.idle_since);
            }
            block.pins += 1;
        }
    }

    fn unpin(&mut self, hash: u64) {
        if let Some(block) = self.blocks.get_mut(&hash) {
            block.pins -= 1;
            if block.pins == 0 {
                self.tick += 1;
                block.idle_since = self.tick;
                self.idle.insert(self.tick, hash);
            }
        }
    }

    /// Turns one private block into a cached, pinned one. Another sequence may have computed the same meanwhile: then
    /// the private copy is given up for it.
    fn publish(&mut self, hash: u64) {
        self.private -= 1;
        if self.blocks.contains_key(&hash) {
            self.pin(hash);
        } else {
            self.blocks.insert(
                hash,
                Block {
                    pins: 1,
                    idle_since: 0,
                },
            );
        }
    }

    fn clear(&mut self) -> bool {
        self.blocks.clear();
        self.idle.clear();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::words::Dice;
    use super::*;

    const MS: Nanos = 1_000_000;

    fn config() -> EngineConfig {
        EngineConfig {
            block_tokens: 16,
            cache_blocks: 1000,
            prefill_tokens_per_s: 1000.0,
            transfer_tokens_per_s: 64_000.0,
            chunk_tokens: 64,
            step_base: Duration::from_millis(10),
            step_per_sequence: Duration::from_millis(1),
            running_max: 8,
        }
    }

    /// A chain of blocks that begins like any other of the same family, up to `shared` blocks.
    fn chain(family: u64, own: u64, shared: u32, total: u32) -> Vec<u64> {
        (0..total)
            .map(|i| {
                let owner = if i < shared { 0 } else { own };
                (family << 48) | (owner << 24) | u64::from(i + 1)
            })
            .collect()
    }

    fn sequence(id: u64, own: u64, prompt_tokens: u32, output_tokens: u32) -> NewSequence {
        let total = (prompt_tokens + output_tokens) / 16;
        NewSequence {
            id,
            blocks: chain(1, own, 0, total),
            prompt_tokens,
            output_tokens,
            is_prompt_remote: false,
            kept_as: None,
        }
    }

    /// Runs until idle; gives the events with the time each came at.
    fn run(engine: &mut Engine, mut now: Nanos) -> (Vec<(Nanos, Event)>, Nanos) {
        let mut timed = Vec::new();
        let mut events = Vec::new();
        engine.advance(now, &mut events);
        loop {
            timed.extend(events.drain(..).map(|event| (now, event)));
            check(engine);
            match engine.next_wake() {
                Some(end) => now = end.max(now),
                None => return (timed, now),
            }
            engine.advance(now, &mut events);
        }
    }

    /// E1 and E2, from scratch.
    fn check(engine: &Engine) {
        let cache = &engine.cache;
        assert!(
            cache.blocks.len() as u32 + cache.private <= cache.capacity,
            "E1"
        );
        let mut pins: AHashMap<u64, u32> = AHashMap::new();
        let mut private = 0;
        for sequence in &engine.running {
            private += sequence.private_blocks;
            for hash in &sequence.new.blocks[..sequence.pinned_blocks as usize] {
                *pins.entry(*hash).or_default() += 1;
            }
        }
        for kept in engine.kept.values() {
            private += kept.private_blocks;
            for hash in &kept.pinned {
                *pins.entry(*hash).or_default() += 1;
            }
        }
        assert_eq!(
            private, cache.private,
            "E1: private blocks are those of running sequences and kept prompts"
        );
        for (hash, block) in &cache.blocks {
            assert_eq!(
                block.pins,
                pins.remove(hash).unwrap_or(0),
                "E2: pins of {hash:x}"
            );
        }
        assert!(pins.is_empty(), "E2: a pinned block was evicted");
        let idle = cache
            .blocks
            .values()
            .filter(|block| block.pins == 0)
            .count();
        assert_eq!(idle, cache.idle.len(), "E2: what nothing pins is idle");
    }

    fn cached_tokens(events: &[(Nanos, Event)], wanted: u64) -> u32 {
        events
            .iter()
            .find_map(|(_, event)| match event {
                Event::Prefilled {
                    id, cached_tokens, ..
                } if *id == wanted => Some(*cached_tokens),
                _ => None,
            })
            .expect("a prefilled event")
    }

    fn time_of(events: &[(Nanos, Event)], wanted: Event) -> Nanos {
        events
            .iter()
            .find(|(_, event)| *event == wanted)
            .expect("the event")
            .0
    }

    #[test]
    fn a_prompt_takes_its_tokens_at_the_rate_and_a_token_a_step() {
        let mut engine = Engine::new(config());
        engine.submit(sequence(1, 1, 100, 3)).unwrap();
        let (events, end) = run(&mut engine, 5 * MS);
        let kinds: Vec<_> = events.iter().map(|(_, event)| *event).collect();
        assert_eq!(
            kinds,
            [
                Event::Prefilled {
                    id: 1,
                    cached_tokens: 0,
                    is_last: false
                },
                Event::Token {
                    id: 1,
                    index: 0,
                    is_last: false
                },
                Event::Token {
                    id: 1,
                    index: 1,
                    is_last: false
                },
                Event::Token {
                    id: 1,
                    index: 2,
                    is_last: true
                },
            ]
        );
        // 100 tokens at 1 a ms; then two decode steps of 10 + 1 ms.
        assert_eq!(events[0].0, 105 * MS);
        assert_eq!(end, 127 * MS);
        assert_eq!(engine.stats().finished, 1);
        assert_eq!(engine.stats().running, 0);
    }

    #[test]
    fn a_repeated_prefix_is_not_computed_again() {
        let mut engine = Engine::new(config());
        engine.submit(sequence(1, 1, 160, 1)).unwrap();
        let (_, now) = run(&mut engine, 0);
        // The same ten full blocks: the last one is computed again, since one token at least must be.
        engine.submit(sequence(2, 1, 160, 1)).unwrap();
        let (events, end) = run(&mut engine, now);
        assert_eq!(cached_tokens(&events, 2), 144);
        assert_eq!(end - now, 16 * MS);
        // A prompt that parts after four blocks finds these four.
        let mut other = sequence(3, 3, 160, 1);
        other.blocks[..4].copy_from_slice(&sequence(0, 1, 160, 1).blocks[..4]);
        engine.submit(other).unwrap();
        let (events, _) = run(&mut engine, end);
        assert_eq!(cached_tokens(&events, 3), 64);
        let stats = engine.stats();
        assert_eq!((stats.queried_tokens, stats.cached_tokens), (480, 208));
    }

    #[test]
    fn the_next_turn_finds_the_answer_of_the_last_one() {
        let mut engine = Engine::new(config());
        engine.submit(sequence(1, 1, 160, 65)).unwrap();
        let (_, now) = run(&mut engine, 0);
        engine.submit(sequence(2, 1, 320, 1)).unwrap();
        let (events, _) = run(&mut engine, now);
        // 160 + 64 tokens had their KV computed: the last token's never is.
        assert_eq!(cached_tokens(&events, 2), 224);
    }

    #[test]
    fn the_longest_idle_blocks_are_evicted_first_and_tails_before_heads() {
        let mut engine = Engine::new(EngineConfig {
            cache_blocks: 20,
            ..config()
        });
        let mut now = 0;
        for (id, own) in [(1, 1), (2, 2), (3, 1)] {
            engine.submit(sequence(id, own, 145, 0)).unwrap();
            now = run(&mut engine, now).1;
        }
        // 9 blocks each of chains 1 and 2 are cached; chain 1 was used last. A third of 10 blocks needs 8 evicted.
        engine.submit(sequence(4, 4, 145, 0)).unwrap();
        now = run(&mut engine, now).1;
        assert_eq!(engine.stats().evicted_blocks, 8);
        engine.submit(sequence(5, 1, 145, 0)).unwrap();
        let (events, later) = run(&mut engine, now);
        assert_eq!(
            cached_tokens(&events, 5),
            144,
            "the chain used last is whole"
        );
        engine.submit(sequence(6, 2, 145, 0)).unwrap();
        let (events, _) = run(&mut engine, later);
        assert_eq!(
            cached_tokens(&events, 6),
            16,
            "of the other its head is left"
        );
    }

    #[test]
    fn prefill_is_serial_and_the_queue_waits_its_turn() {
        let mut engine = Engine::new(config());
        for id in 1..=3 {
            engine.submit(sequence(id, id, 320, 0)).unwrap();
        }
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        // A chunk of 64 tokens: one sequence fills the step, the others wait.
        assert_eq!((engine.stats().running, engine.stats().waiting), (1, 2));
        let (events, end) = run(&mut engine, 0);
        for id in 1..=3 {
            assert_eq!(
                time_of(
                    &events,
                    Event::Prefilled {
                        id,
                        cached_tokens: 0,
                        is_last: true
                    }
                ),
                id * 320 * MS
            );
        }
        assert_eq!(end, 960 * MS);
    }

    #[test]
    fn no_more_than_running_max_run() {
        let mut engine = Engine::new(EngineConfig {
            running_max: 2,
            ..config()
        });
        for id in 1..=5 {
            engine.submit(sequence(id, id, 8, 4)).unwrap();
        }
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        assert_eq!((engine.stats().running, engine.stats().waiting), (2, 3));
        let (events, _) = run(&mut engine, 0);
        assert_eq!(engine.stats().finished, 5);
        assert_eq!(events.len(), 5 * 5);
    }

    #[test]
    fn steps_slow_down_with_the_batch() {
        let token_ms = |batch: u64| {
            let mut engine = Engine::new(EngineConfig {
                prefill_tokens_per_s: 0.0,
                ..config()
            });
            for id in 1..=batch {
                engine.submit(sequence(id, id, 8, 11)).unwrap();
            }
            run(&mut engine, 0).1 / MS / 10
        };
        assert_eq!(token_ms(1), 11);
        assert_eq!(token_ms(8), 18);
    }

    #[test]
    fn a_long_prefill_holds_up_those_that_decode() {
        let mut engine = Engine::new(config());
        engine.submit(sequence(1, 1, 8, 100)).unwrap();
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        engine.advance(8 * MS, &mut events);
        engine.submit(sequence(2, 2, 640, 1)).unwrap();
        events.clear();
        // The step under way (decode alone) ends at 19; the next carries a chunk of 64 tokens: 64 + 11 ms.
        engine.advance(19 * MS, &mut events);
        assert_eq!(
            events,
            [Event::Token {
                id: 1,
                index: 1,
                is_last: false
            }]
        );
        assert_eq!(engine.next_wake(), Some(94 * MS));
    }

    #[test]
    fn an_abort_frees_the_place_at_the_next_step() {
        let mut engine = Engine::new(EngineConfig {
            running_max: 1,
            ..config()
        });
        engine.submit(sequence(1, 1, 8, 1000)).unwrap();
        engine.submit(sequence(2, 2, 8, 1)).unwrap();
        engine.submit(sequence(3, 3, 8, 1)).unwrap();
        let mut events = Vec::new();
        engine.advance(20 * MS, &mut events);
        assert_eq!((engine.stats().running, engine.stats().waiting), (1, 2));
        assert!(engine.abort(1) && engine.abort(2));
        assert!(!engine.abort(1), "an id is gone after its abort");
        check(&engine);
        events.clear();
        let (events, _) = run(&mut engine, 20 * MS);
        assert!(events.iter().all(|(_, e)| matches!(
            e,
            Event::Prefilled { id: 3, .. } | Event::Token { id: 3, .. }
        )));
        let stats = engine.stats();
        assert_eq!((stats.finished, stats.aborted, stats.usage), (1, 2, 0.0));
    }

    #[test]
    fn a_sequence_waits_for_blocks_and_one_that_can_never_fit_is_refused() {
        let mut engine = Engine::new(EngineConfig {
            cache_blocks: 10,
            ..config()
        });
        assert!(engine.submit(sequence(1, 1, 161, 0)).is_err());
        engine.submit(sequence(2, 2, 32, 64)).unwrap();
        engine.submit(sequence(3, 3, 32, 64)).unwrap();
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        assert_eq!((engine.stats().running, engine.stats().waiting), (1, 1));
        assert!((engine.stats().usage - 0.6).abs() < 1e-9);
        run(&mut engine, 0);
        assert_eq!(engine.stats().finished, 2);
    }

    #[test]
    fn a_remote_prompt_costs_its_transfer_and_one_token() {
        let mut engine = Engine::new(config());
        let remote = |id, prompt_tokens| NewSequence {
            is_prompt_remote: true,
            ..sequence(id, 1, prompt_tokens, 0)
        };
        engine.submit(remote(1, 640)).unwrap();
        let (events, now) = run(&mut engine, 0);
        assert_eq!(now, 10 * MS + MS, "640 tokens at 64 a ms, then one of 1 ms");
        assert_eq!(cached_tokens(&events, 1), 640, "vLLM reports all of it");
        let stats = engine.stats();
        assert_eq!(
            (stats.cached_tokens, stats.fetched_tokens),
            (0, 640),
            "no hit of this engine's own cache"
        );
        // The next turn: what is here already is not fetched again.
        engine.submit(remote(2, 704)).unwrap();
        let (_, end) = run(&mut engine, now);
        assert_eq!(end - now, MS + MS);
        assert_eq!(engine.stats().fetched_tokens, 704);
    }

    #[test]
    fn a_transfer_holds_nobody_up() {
        let mut engine = Engine::new(config());
        let mut remote = sequence(1, 1, 6400, 1);
        remote.is_prompt_remote = true;
        engine.submit(remote).unwrap();
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        assert_eq!(engine.next_wake(), Some(100 * MS));
        engine.advance(5 * MS, &mut events);
        engine.submit(sequence(2, 2, 8, 3)).unwrap();
        let (events, end) = run(&mut engine, 5 * MS);
        let last = Event::Token {
            id: 2,
            index: 2,
            is_last: true,
        };
        assert_eq!(time_of(&events, last), (5 + 8 + 22) * MS);
        assert_eq!(end, 101 * MS, "and the transfer takes what it takes");
    }

    #[test]
    fn a_kept_prompt_holds_its_blocks_until_it_is_released() {
        let mut engine = Engine::new(EngineConfig {
            cache_blocks: 20,
            ..config()
        });
        // 9 full blocks and a part of the tenth; the one token of the answer has its place in that.
        let mut kept = sequence(1, 1, 150, 1);
        kept.kept_as = Some(77);
        engine.submit(kept).unwrap();
        let (_, now) = run(&mut engine, 0);
        let stats = engine.stats();
        assert_eq!(
            (stats.running, stats.kept_blocks, stats.usage),
            (0, 10, 0.5)
        );
        assert!(!engine.reset_prefix_cache(), "the blocks are pinned");
        // One that needs more than the rest waits, although nothing runs.
        engine.submit(sequence(2, 2, 176, 0)).unwrap();
        let (events, now) = run(&mut engine, now);
        assert_eq!((events.len(), engine.stats().waiting), (0, 1));
        assert!(engine.release_kept(77) && !engine.release_kept(77));
        let (events, _) = run(&mut engine, now);
        assert_eq!(events.len(), 1);
        let stats = engine.stats();
        assert_eq!((stats.kept_blocks, stats.usage), (0, 0.0));
    }

    #[test]
    fn an_aborted_sequence_keeps_nothing() {
        let mut engine = Engine::new(config());
        let mut kept = sequence(1, 1, 150, 1);
        kept.kept_as = Some(77);
        engine.submit(kept).unwrap();
        engine.advance(0, &mut Vec::new());
        assert!(engine.abort(1));
        check(&engine);
        assert_eq!((engine.stats().kept_blocks, engine.stats().usage), (0, 0.0));
    }

    #[test]
    fn a_reset_forgets_the_cache_but_not_under_a_running_sequence() {
        let mut engine = Engine::new(config());
        engine.submit(sequence(1, 1, 160, 2)).unwrap();
        let mut events = Vec::new();
        engine.advance(0, &mut events);
        assert!(!engine.reset_prefix_cache());
        let (_, now) = run(&mut engine, 0);
        assert!(engine.reset_prefix_cache());
        engine.submit(sequence(2, 1, 160, 1)).unwrap();
        assert_eq!(cached_tokens(&run(&mut engine, now).0, 2), 0);
    }

    #[test]
    fn an_engine_without_step_time_still_gives_its_owner_a_turn() {
        let instant = EngineConfig {
            prefill_tokens_per_s: 0.0,
            step_base: Duration::ZERO,
            step_per_sequence: Duration::ZERO,
            ..config()
        };
        let mut engine = Engine::new(instant);
        engine.submit(sequence(1, 1, 8, 10_000)).unwrap();
        let mut events = Vec::new();
        engine.advance(7, &mut events);
        assert!(events.len() <= STEPS_PER_ADVANCE_MAX as usize + 1);
        assert_eq!(engine.next_wake(), Some(7), "due at once, not later");
        assert_eq!(run(&mut engine, 7).1, 7, "all of it takes no time");
    }

    /// Whatever comes in whatever order, E1 and E2 hold, every sequence ends once, and nothing is left behind.
    #[test]
    fn random_traffic_keeps_the_invariants() {
        let seed = 0x5eed_0001;
        println!("seed {seed:#x}");
        let mut dice = Dice::new(seed);
        let mut engine = Engine::new(EngineConfig {
            cache_blocks: 60,
            running_max: 4,
            ..config()
        });
        let (mut now, mut ended, mut submitted, mut aborted, mut kept_released) = (0, 0, 0, 0, 0);
        let mut events = Vec::new();
        for id in 0..3000 {
            now += dice.between(0, 40) * MS;
            engine.advance(now, &mut events);
            let prompt = dice.between(1, 400) as u32;
            let output = dice.between(0, 30) as u32;
            let mut new = sequence(id, 100 + id, prompt, output);
            let shared = dice.between(0, 12) as u32;
            new.blocks = chain(dice.between(1, 3), 100 + id, shared, (prompt + output) / 16);
            new.is_prompt_remote = dice.roll().is_multiple_of(4);
            new.kept_as = (dice.roll().is_multiple_of(6)).then_some(id);
            submitted += u64::from(engine.submit(new).is_ok());
            if dice.roll().is_multiple_of(3) {
                aborted += u64::from(engine.abort(id - dice.between(0, id.min(5))));
            }
            engine.advance(now, &mut events);
            // The last that were kept are let go in another order than they came.
            let released = id.saturating_sub(dice.between(0, 20));
            kept_released += u64::from(engine.release_kept(released));
            if id % 8 == 0 {
                (0..id).for_each(|id| kept_released += u64::from(engine.release_kept(id)));
            }
            check(&engine);
        }
        loop {
            let (timed, later) = run(&mut engine, now);
            events.extend(timed.into_iter().map(|(_, event)| event));
            now = later;
            // What is still kept may be what the rest waits for.
            let released = (0..3000).filter(|id| engine.release_kept(*id)).count() as u64;
            kept_released += released;
            if released == 0 {
                break;
            }
        }
        let mut prefilled = AHashMap::new();
        for event in events {
            match event {
                Event::Prefilled { is_last: true, .. } => ended += 1,
                Event::Prefilled { id, .. } => {
                    assert!(prefilled.insert(id, 0).is_none(), "E3: {id}")
                }
                Event::Token { id, index, is_last } => {
                    let next = prefilled
                        .get_mut(&id)
                        .expect("E3: prefill comes first, and nothing after the last");
                    assert_eq!(*next, index, "tokens come in order");
                    *next += 1;
                    if is_last {
                        prefilled.remove(&id);
                        ended += 1;
                    }
                }
            }
        }
        let stats = engine.stats();
        assert!(
            ended > 500 && stats.evicted_blocks > 500 && aborted > 500 && kept_released > 300,
            "the traffic reached what it is for: {ended} ended, {aborted} aborted, {kept_released} released, {stats:?}"
        );
        assert_eq!(stats.finished + stats.aborted, submitted);
        assert_eq!(stats.aborted, aborted);
        assert_eq!((stats.running, stats.waiting, stats.usage), (0, 0, 0.0));
    }
}
