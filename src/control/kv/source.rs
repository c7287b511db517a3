//! One stream of KV events: what its messages mean for the index. Pure but for the index's flags: no socket, no clock.
//!
//! Invariants:
//! - Z1 events are taken in the order of their sequence, each once; a gap is never passed over silently;
//! - Z2 what the source holds in the index is exactly the keys of [`BlockNames`], so that all of it can be taken back;
//! - Z3 a publisher that begins anew (its sequence goes back) begins with nothing.
//!
//! When is a lower sequence number a publisher that began anew, and not an old message again? Replay sends what the live stream
//! sends as well, so on a connection numbers up to the last one replayed are old ones, unless the live stream itself goes
//! back. A new process is a new connection, and its live stream begins below what was taken before.

use shards::{BlockNames, Change, Lesson, PrefixHash, Slot};
use xxhash_rust::xxh3::xxh3_64;

use super::decode::{BadBatch, Decoder, Event, Stored};
use crate::route::{BlockKeys, Index, key_in};

/// What a live message's number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// It is the next one.
    Next,
    /// It came before, by replay.
    Old,
    /// The publisher has begun anew.
    Anew,
    /// Messages from this one on are missing.
    Gap(u64),
}

/// What a message of a replay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    /// The one that was due; it was taken.
    Due,
    /// One after it: those between are lost; it was taken.
    Late,
    /// The last one taken, the same as then: the publisher is the one we know.
    Known,
    /// One with that number, but another one: the publisher has begun anew.
    OfAnother,
    /// One from before.
    Old,
}

/// What came of messages, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks stored.
    pub stored: u64,
    /// Blocks removed.
    pub removed: u64,
    /// Blocks whose parent, size or group is none of ours.
    pub passed_over: u64,
    /// Events or batches that make no sense.
    pub bad: u64,
}

/// One source's state.
#[derive(Debug)]
pub struct Source {
    id: Slot,
    names: BlockNames,
    /// The sequence number that comes next; none: nothing came yet.
    next: Option<u64>,
    /// The last one that came live on this connection.
    live: Option<u64>,
    /// Numbers from the first on, and below the other one, came by replay on this connection.
    replayed: Option<(u64, u64)>,
    /// Hash of the last message taken: another publisher's message of that number is another one.
    last: u64,
    /// The cache group that holds whole prompts.
    group: Option<u64>,
    decoder: Decoder,
    /// So far.
    pub counts: Counts,
}

/// Lessons on their way to their owners: one batch an owner, of one kind at a time.
#[derive(Default)]
pub struct Outbox {
    batches: Vec<Vec<PrefixHash>>,
    is_store: bool,
    /// In order.
    pub lessons: Vec<(usize, Lesson)>,
}

/// How many names ahead memory is asked for.
const PREFETCH_AHEAD: usize = 8;
/// Most blocks of a lesson: a core does not work longer on one than on its other tasks.
const LESSON_BLOCKS_MAX: usize = 512;

impl Outbox {
    fn put(&mut self, index: &Index, source: Slot, key: PrefixHash, is_store: bool) {
        if self.is_store != is_store {
            self.finish(source);
            self.is_store = is_store;
        }
        let owner = index.tree.owner(key);
        if self.batches.len() <= owner {
            self.batches.resize_with(owner + 1, Vec::new);
        }
        self.batches[owner].push(key);
        if self.batches[owner].len() >= LESSON_BLOCKS_MAX {
            self.finish(source);
        }
    }

    /// What was put becomes lessons.
    pub fn finish(&mut self, worker: Slot) {
        for (owner, batch) in self.batches.iter_mut().enumerate() {
            if batch.is_empty() {
                continue;
            }
            let hashes = batch.as_slice().into();
            batch.clear();
            let lesson = match self.is_store {
                true => Lesson::Insert { worker, hashes },
                false => Lesson::Remove { worker, hashes },
            };
            self.lessons.push((owner, lesson));
        }
    }
}

impl Source {
    /// Nothing came yet. `id` is its place in the index.
    pub fn new(id: u16) -> Source {
        Source {
            id: Slot(id),
            names: BlockNames::default(),
            next: None,
            live: None,
            replayed: None,
            last: 0,
            group: None,
            decoder: Decoder::default(),
            counts: Counts::default(),
        }
    }

    /// Blocks it holds, as it calls them.
    pub fn block_count(&self) -> usize {
        self.names.len()
    }

    /// Bytes of its names.
    pub fn bytes(&self) -> usize {
        self.names.bytes()
    }

    /// Whether anything came yet.
    pub fn next(&self) -> Option<u64> {
        self.next
    }

    /// A connection begins.
    pub fn connected(&mut self) {
        (self.live, self.replayed) = (None, None);
    }

    /// What a live message's number says.
    pub fn order(&mut self, sequence: u64) -> Order {
        let goes_back = self.live.is_some_and(|live| sequence <= live);
        self.live = Some(sequence);
        let Some(next) = self.next else {
            return match sequence {
                0 => Order::Next,
                _ => Order::Gap(0),
            };
        };
        let was_replayed = self
            .replayed
            .is_some_and(|(from, to)| (from..to).contains(&sequence));
        match sequence {
            _ if goes_back => Order::Anew,
            _ if sequence == next => Order::Next,
            _ if sequence > next => Order::Gap(next),
            _ if was_replayed => Order::Old,
            _ => Order::Anew,
        }
    }

    /// A replay gave this message.
    pub fn take_replayed(
        &mut self,
        sequence: u64,
        payload: &[u8],
        index: &Index,
        out: &mut Outbox,
    ) -> Replayed {
        let due = self.next.unwrap_or(0);
        if sequence.checked_add(1).is_some_and(|next| next == due) {
            return match xxh3_64(payload) == self.last {
                true => Replayed::Known,
                false => Replayed::OfAnother,
            };
        }
        if sequence < due {
            return Replayed::Old;
        }
        let from = self
            .replayed
            .map_or(sequence, |(from, _)| from.min(sequence));
        self.replayed = Some((from, sequence.saturating_add(1)));
        self.take(sequence, payload, index, out);
        match sequence == due {
            true => Replayed::Due,
            false => Replayed::Late,
        }
    }

    /// Takes a message's events.
    pub fn take(&mut self, sequence: u64, payload: &[u8], index: &Index, out: &mut Outbox) {
        self.next = Some(sequence.saturating_add(1));
        self.last = xxh3_64(payload);
        let mut decoder = std::mem::take(&mut self.decoder);
        let decoded = decoder.decode(payload, &index.keys, |event| self.event(event, index, out));
        self.decoder = decoder;
        if let Err(BadBatch) = decoded {
            self.counts.bad += 1;
        }
        out.finish(self.id);
    }

    /// Forgets all blocks, and what number comes next.
    pub fn forget(&mut self, index: &Index, out: &mut Outbox) {
        self.clear(index, out);
        out.finish(self.id);
        self.next = None;
        self.replayed = None;
    }

    fn clear(&mut self, index: &Index, out: &mut Outbox) {
        let id = self.id;
        self.names.drain(|key, tier| {
            out.put(index, id, key_in(tier, key), false);
        });
    }

    fn event(&mut self, event: Event<'_>, index: &Index, out: &mut Outbox) {
        match event {
            Event::Stored(stored) => self.store(&stored, index, out),
            Event::Removed { names, tier, group } if self.counts_group(group) => {
                self.prefetch_first(names);
                for (place, name) in names.iter().enumerate() {
                    if let Some(ahead) = names.get(place + PREFETCH_AHEAD) {
                        self.names.prefetch(*ahead);
                    }
                    match self.names.remove(*name, tier) {
                        Change::Of(key) => {
                            out.put(index, self.id, key_in(tier, key), false);
                            self.counts.removed += 1;
                        }
                        Change::None => {}
                        Change::Unknown => self.counts.passed_over += 1,
                    }
                }
            }
            Event::Removed { names, .. } => self.counts.passed_over += names.len() as u64,
            Event::Cleared => self.clear(index, out),
            Event::Bad => self.counts.bad += 1,
            Event::Other => {}
        }
    }

    /// The first names of an event are under way before the first is looked at; each of the others is, eight names before its turn.
    fn prefetch_first(&self, names: &[u64]) {
        let first = names.iter().take(PREFETCH_AHEAD);
        first.for_each(|name| self.names.prefetch(*name));
    }

    /// Whether the group is the one that holds whole prompts.
    fn counts_group(&self, group: Option<u64>) -> bool {
        group.is_none() || group == self.group
    }

    fn store(&mut self, stored: &Stored<'_>, index: &Index, out: &mut Outbox) {
        if stored.is_whole && self.group.is_none() {
            self.group = stored.group;
        }
        let parent = match stored.parent {
            Some(name) => self.names.key(name),
            None => Some(self.root(stored, index)),
        };
        let is_ours = stored.is_whole
            && self.counts_group(stored.group)
            && stored.block_tokens == index.block_tokens;
        let (true, Some(mut link)) = (is_ours, parent) else {
            self.counts.passed_over += stored.names.len() as u64;
            return;
        };
        index.add_tier(stored.tier);
        self.prefetch_first(stored.names);
        let blocks = stored.tokens.chunks_exact(stored.block_tokens);
        for (place, (name, tokens)) in stored.names.iter().zip(blocks).enumerate() {
            if let Some(ahead) = stored.names.get(place + PREFETCH_AHEAD) {
                self.names.prefetch(*ahead);
            }
            let extra = stored.extras.get(place).copied().unwrap_or(0);
            link = index.keys.key(link, tokens, extra);
            let (change, old) = self.names.store(*name, link, stored.tier);
            if let Some(old) = old {
                // A name that means something else now: wherever it was, it is not any more.
                for tier in 0..shards::TIER_COUNT {
                    out.put(index, self.id, key_in(tier, old), false);
                }
            }
            if let Change::Of(key) = change {
                out.put(index, self.id, key_in(stored.tier, key), true);
                self.counts.stored += 1;
            }
        }
    }

    fn root(&self, stored: &Stored<'_>, index: &Index) -> PrefixHash {
        let keys: &BlockKeys = &index.keys;
        if let Some(name) = stored.adapter {
            index.add_adapter(name);
        }
        keys.root(stored.adapter)
    }
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
