//! The list of workers: who is registered, in which state, in which slot of the books. Owned by the control thread;
//! the only writer of the fleet snapshot and the only one that opens and closes slots. No I/O.
//!
//! Invariants:
//! - G1 a slot is open for one registered worker at a time, and free for another only when its old life is drained and
//!   every core has said that its shard forgot it.
//! - G2 health changes who is eligible, never what is counted: nothing here writes load.
//! - G3 each change of the eligible workers or of the known models publishes a fleet before the call returns.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use ahash::AHashSet;
use shards::{Publisher, SLOT_COUNT_MAX, Slot, WorkerId};

use super::health::{Failure, Phase, Tracker, Verdict};
use super::models::Model;
use super::totals::Totals;
use crate::config::{BOOTSTRAP_PORT, WORKER_COUNT_MAX, WorkerSpec, WorkerUrl};
use crate::route::Role;
use crate::shared::{Exceptions, Fleet, KvFacts, Shared, ToCore, Worker};

/// Names one registration; the same URL added again is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

/// A registered engine: one URL, one probe, and a worker for each of its data-parallel ranks.
#[derive(Debug)]
pub struct Entry {
    /// Which registration.
    pub key: Key,
    /// Where.
    pub url: WorkerUrl,
    /// What it does.
    pub role: Role,
    /// Of a prefill worker: where its Mooncake bootstrap server listens.
    pub bootstrap_port: Option<u16>,
    /// Its workers, at least one.
    pub ranks: Vec<Rank>,
    /// Where it answered last; none before the first good probe.
    pub address: Option<SocketAddr>,
    /// What it serves; empty: any model.
    pub models: Vec<Model>,
    /// Why its last probe failed, while it is not ready.
    pub last_failure: Option<Failure>,
    /// Added while running: dropped again if it does not become ready.
    pub was_added: bool,
    tracker: Tracker,
    good_count: u32,
}

/// One worker of an engine: what the cores choose among.
#[derive(Debug)]
pub struct Rank {
    /// Its data-parallel rank; none: the engine is not told, it has one, or chooses itself.
    pub number: Option<u32>,
    /// The URL, or `url@rank`: its name in listings and metrics.
    pub label: Arc<str>,
    /// The slot of its present life.
    pub id: WorkerId,
    /// For the KV connectors.
    pub kv: Arc<KvFacts>,
    base: Totals,
    past: Totals,
}

impl Entry {
    /// Where it is, as far as probes tell.
    pub fn phase(&self) -> Phase {
        self.tracker.phase()
    }

    /// Whether it may get new requests.
    pub fn is_ready(&self) -> bool {
        self.phase() == Phase::Ready
    }

    /// `starting`, `ready` or `unhealthy`.
    pub fn state(&self) -> &'static str {
        match self.phase() {
            Phase::Starting => "starting",
            Phase::Ready => "ready",
            Phase::Unhealthy => "unhealthy",
        }
    }

    /// Why it gets no requests; none: it does.
    pub fn reason(&self) -> Option<String> {
        match (self.is_ready(), self.last_failure) {
            (true, _) => None,
            (false, None) => Some("not probed yet".to_owned()),
            (false, Some(failure)) => Some(failure.to_string()),
        }
    }

    /// The worker of a label: the URL's first, or the one of a rank.
    fn rank(&self, label: &str) -> Option<usize> {
        self.ranks.iter().position(|rank| *rank.label == *label)
    }

    /// Writes what is known of the engine into each rank's facts.
    fn refresh_facts(&mut self) {
        let bootstrap_address: Option<Arc<str>> = self
            .bootstrap_port
            .map(|port| self.url.on_port(port).into());
        let facts = KvFacts {
            bootstrap_address,
            engine_id: None,
            peer_address: self.url.host_and_port().into(),
            dp_size: u32::try_from(self.ranks.len()).unwrap_or(u32::MAX),
            tp_size: 1,
        };
        for rank in &mut self.ranks {
            if *rank.kv != facts {
                rank.kv = Arc::new(facts.clone());
            }
        }
    }
}

/// A life that has ended and still has exchanges in flight, or whose prefixes the shards still hold.
#[derive(Debug)]
pub struct Retiring {
    /// The label of its worker.
    pub label: Arc<str>,
    /// What it did.
    pub role: Role,
    /// Its slot, closed.
    pub id: WorkerId,
    base: Totals,
    /// Cores that have forgotten it, by index; empty until it is drained and they were told to.
    forgotten: Vec<bool>,
}

/// Why a worker was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddError {
    /// It is there already.
    Exists,
    /// No room.
    Full,
}

/// What [`Registry::apply`] tells the watcher of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Where the worker is now.
    pub phase: Phase,
    /// Something about who is eligible has changed.
    pub has_changed: bool,
}

/// One probe's outcome.
#[derive(Debug)]
pub struct Probed {
    /// The address that gave a good answer, or why there was none.
    pub outcome: Result<SocketAddr, Failure>,
    /// The models it serves, if they were asked for and it answered.
    pub models: Option<Vec<Model>>,
    /// Its data-parallel ranks, if they were asked for and it answered.
    pub rank_count: Option<u32>,
}

/// All workers.
pub struct Registry {
    shared: Arc<Shared>,
    publisher: Publisher<Fleet>,
    entries: Vec<Entry>,
    retiring: Vec<Retiring>,
    free: VecDeque<Slot>,
    next_key: u64,
}

impl Registry {
    /// An empty one. All slots are free.
    pub fn new(shared: Arc<Shared>, publisher: Publisher<Fleet>) -> Registry {
        let slot_count = shared
            .cores
            .iter()
            .map(|core| core.stats.workers.len())
            .min()
            .unwrap_or(SLOT_COUNT_MAX);
        let slot_count = u16::try_from(slot_count.min(SLOT_COUNT_MAX)).unwrap_or(u16::MAX);
        let free = (0..slot_count).map(Slot).collect();
        Registry {
            shared,
            publisher,
            entries: Vec::new(),
            retiring: Vec::new(),
            free,
            next_key: 0,
        }
    }

    /// Registered engines, in the order in which they were added.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Lives that are ending.
    pub fn retiring(&self) -> &[Retiring] {
        &self.retiring
    }

    /// The registration `key`, if it is still there.
    pub fn entry(&self, key: Key) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }

    /// The registered worker at `url`.
    pub fn find(&self, url: &WorkerUrl) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.url == *url)
    }

    /// All registered workers: each engine's ranks.
    pub fn workers(&self) -> impl Iterator<Item = (&Entry, &Rank)> {
        let all = self.entries.iter();
        all.flat_map(|entry| entry.ranks.iter().map(move |rank| (entry, rank)))
    }

    /// The worker of a label (a URL alone: its first rank).
    pub fn worker(&self, label: &str) -> Option<(&Entry, &Rank)> {
        let of_label = self.workers().find(|(_, rank)| *rank.label == *label);
        of_label.or_else(|| {
            let entry = self.find(&WorkerUrl::parse(label).ok()?)?;
            Some((entry, entry.ranks.first()?))
        })
    }

    /// Registered workers.
    pub fn worker_count(&self) -> usize {
        self.entries.iter().map(|entry| entry.ranks.len()).sum()
    }

    /// Workers that may get new requests.
    pub fn ready_count(&self) -> usize {
        let ready = self.entries.iter().filter(|entry| entry.is_ready());
        ready.map(|entry| entry.ranks.len()).sum()
    }

    /// Of the roles that a request needs, those without a ready worker. Empty: the router can serve.
    pub fn missing_roles(&self) -> Vec<Role> {
        let is_there = |role| {
            let mut entries = self.entries.iter();
            entries.any(|entry| entry.role == role && entry.is_ready())
        };
        let needed = self.shared.config.needed_roles().iter().copied();
        needed.filter(|role| !is_there(*role)).collect()
    }

    /// What is missing, in words; none: the router can serve.
    pub fn obstacle(&self) -> Option<&'static str> {
        if self.entries.is_empty() {
            return Some("no workers registered");
        }
        match self.missing_roles()[..] {
            [] => None,
            [Role::Regular, ..] => Some("no healthy workers"),
            [Role::Prefill] => Some("no prefill worker is ready"),
            [Role::Decode] => Some("no decode worker is ready"),
            _ => Some("no prefill worker and no decode worker is ready"),
        }
    }

    /// Registers a worker; it gets requests after its first good probe.
    pub fn add(&mut self, worker: impl Into<WorkerSpec>, was_added: bool) -> Result<Key, AddError> {
        let WorkerSpec {
            url,
            role,
            bootstrap_port,
        } = worker.into();
        if self.find(&url).is_some() {
            return Err(AddError::Exists);
        }
        let rank_count = self.shared.config.data_parallel_size;
        let ranks = self.open_ranks(&url, rank_count).ok_or(AddError::Full)?;
        let key = Key(self.next_key);
        self.next_key += 1;
        let mut entry = Entry {
            key,
            role,
            bootstrap_port: (role == Role::Prefill)
                .then(|| bootstrap_port.unwrap_or(BOOTSTRAP_PORT)),
            ranks,
            url,
            address: None,
            models: Vec::new(),
            last_failure: None,
            was_added,
            tracker: Tracker::new(&self.shared.config.health),
            good_count: 0,
        };
        entry.refresh_facts();
        self.entries.push(entry);
        self.publish();
        Ok(key)
    }

    /// Takes a worker off the list. No new work from now on; what runs finishes, then its slot is freed.
    pub fn remove(&mut self, key: Key) -> bool {
        let Some(index) = self.entries.iter().position(|entry| entry.key == key) else {
            return false;
        };
        let entry = self.entries.remove(index);
        // The snapshot first, so that fewer cores meet a closed slot; a guard refused is handled there all the same.
        self.publish();
        let in_flight_count: u32 = entry
            .ranks
            .iter()
            .map(|rank| self.shared.books.in_flight(rank.id.slot))
            .sum();
        tracing::info!(worker = %entry.url, in_flight_count, "worker removed: draining");
        self.retire(entry.role, entry.ranks);
        true
    }

    /// Whether the ranks of an engine should be asked for, after the good probe that is about to be applied.
    pub fn wants_rank_count(&self, key: Key) -> bool {
        let config = &self.shared.config;
        let is_unsaid = config.pd.is_some() && config.data_parallel_size == 1;
        let entry = self.entry(key).filter(|_| is_unsaid);
        entry.is_some_and(|entry| entry.tracker.is_next_success_ready())
    }

    /// Whether the models of a worker should be asked for, after the good probe that is about to be applied.
    pub fn wants_models(&self, key: Key) -> bool {
        self.entry(key)
            .is_some_and(|entry| entry.tracker.is_next_success_ready() || entry.good_count % 3 == 2)
    }

    /// Takes a probe's outcome. None: that registration is gone.
    pub fn apply(&mut self, key: Key, probed: Probed) -> Option<Applied> {
        let index = self.entries.iter().position(|entry| entry.key == key)?;
        let entry = &mut self.entries[index];
        let verdict = entry.tracker.record(probed.outcome.map(|_| ()));
        let mut has_changed = verdict != Verdict::Same;
        let mut is_new_life = verdict == Verdict::Ready { is_new_life: true };
        match probed.outcome {
            Ok(address) => {
                entry.good_count = entry.good_count.wrapping_add(1);
                if entry.address != Some(address) {
                    // Another address is another process. (The first is no change.)
                    is_new_life |= entry.address.is_some();
                    entry.address = Some(address);
                    has_changed = true;
                }
            }
            Err(failure) => entry.last_failure = Some(failure),
        }
        if let Some(models) = probed.models {
            has_changed |= !entry
                .models
                .iter()
                .map(|m| &m.id)
                .eq(models.iter().map(|m| &m.id));
            entry.models = models;
        }
        log_verdict(entry, verdict, is_new_life);
        if entry.is_ready() {
            entry.last_failure = None;
        }
        if is_new_life {
            self.renew(index);
        }
        if let Some(count) = probed.rank_count {
            has_changed |= self.set_rank_count(index, count);
        }
        if has_changed {
            self.publish();
        }
        Some(Applied {
            phase: self.entries[index].phase(),
            has_changed,
        })
    }

    /// Moves lives on that are ending, and frees old snapshots. True: something still ends, come again soon.
    pub fn sweep(&mut self) -> bool {
        self.publisher.reclaim();
        self.collect_reports();
        let mut index = 0;
        while index < self.retiring.len() {
            let life = &mut self.retiring[index];
            if !life.forgotten.is_empty() && life.forgotten.iter().all(|done| *done) {
                let life = self.retiring.swap_remove(index);
                self.free_life(life);
                continue;
            }
            // Only now can nothing more be taught about it: what is in flight may still send lessons.
            if life.forgotten.is_empty() && self.shared.books.is_drained(life.id) {
                if self.shared.cores.is_empty() {
                    life.forgotten = vec![true];
                    continue;
                }
                life.forgotten = vec![false; self.shared.cores.len()];
                for core in &self.shared.cores {
                    core.post(ToCore::Purge(life.id.slot));
                }
            }
            index += 1;
        }
        !self.retiring.is_empty()
    }

    /// What the cores counted about a worker, over all its lives that are not forgotten.
    pub fn totals(&self, rank: &Rank) -> Totals {
        let mut sum = self.totals_of_retiring(&rank.label);
        sum.add(rank.past);
        sum.add(Totals::of_slot(&self.shared.cores, rank.id.slot).since(rank.base));
        sum
    }

    /// What they counted about those of its lives that are ending.
    pub fn totals_of_retiring(&self, label: &str) -> Totals {
        let mut sum = Totals::default();
        for life in self.retiring.iter().filter(|life| *life.label == *label) {
            sum.add(Totals::of_slot(&self.shared.cores, life.id.slot).since(life.base));
        }
        sum
    }

    fn open_slot(&mut self) -> Option<WorkerId> {
        for _ in 0..self.free.len() {
            let slot = self.free.pop_front()?;
            if let Some(id) = self.shared.books.open(slot) {
                return Some(id);
            }
            self.free.push_back(slot);
        }
        None
    }

    /// Slots for all ranks of an engine, or for none.
    fn open_ranks(&mut self, url: &WorkerUrl, count: u32) -> Option<Vec<Rank>> {
        let count = count.max(1);
        if self.worker_count() + count as usize > WORKER_COUNT_MAX {
            return None;
        }
        let mut ranks = Vec::new();
        for number in 0..count {
            let Some(id) = self.open_slot() else {
                // Nobody has heard of these slots: they are free as they were.
                for rank in ranks {
                    let rank: Rank = rank;
                    self.shared.books.close(rank.id);
                    self.free.push_back(rank.id.slot);
                }
                return None;
            };
            ranks.push(Rank {
                number: (count > 1).then_some(number),
                label: if count > 1 {
                    format!("{url}@{number}").into()
                } else {
                    url.text().clone()
                },
                id,
                kv: Arc::default(),
                base: Totals::of_slot(&self.shared.cores, id.slot),
                past: Totals::default(),
            });
        }
        Some(ranks)
    }

    fn retire(&mut self, role: Role, ranks: Vec<Rank>) {
        for rank in ranks {
            self.shared.books.close(rank.id);
            self.retiring.push(Retiring {
                label: rank.label,
                role,
                id: rank.id,
                base: rank.base,
                forgotten: Vec::new(),
            });
        }
    }

    /// The process behind an entry is another one: new slots, empty caches, load that starts at zero.
    fn renew(&mut self, index: usize) {
        let count = self.entries[index].ranks.len() as u32;
        self.replace_ranks(index, count);
    }

    /// The engine has told how many ranks it has. True: other than before.
    fn set_rank_count(&mut self, index: usize, count: u32) -> bool {
        let entry = &self.entries[index];
        if entry.ranks.len() == count.max(1) as usize {
            return false;
        }
        tracing::info!(worker = %entry.url, count, "the engine has this many data-parallel ranks");
        self.replace_ranks(index, count)
    }

    /// New slots for an entry; its old ones end. False: there are none, the old ones stay.
    fn replace_ranks(&mut self, index: usize, count: u32) -> bool {
        let url = self.entries[index].url.clone();
        let Some(mut ranks) = self.open_ranks(&url, count) else {
            tracing::warn!(worker = %url, "no free slot: the worker keeps its old one");
            return false;
        };
        let entry = &mut self.entries[index];
        for rank in &mut ranks {
            if let Some(old) = entry.rank(&rank.label) {
                rank.past = entry.ranks[old].past;
            }
        }
        let old = std::mem::replace(&mut entry.ranks, ranks);
        entry.refresh_facts();
        let role = entry.role;
        // The order of `remove`: readers learn of the new slots before the old ones close.
        self.publish();
        self.retire(role, old);
        true
    }

    fn free_life(&mut self, life: Retiring) {
        let counted = Totals::of_slot(&self.shared.cores, life.id.slot).since(life.base);
        let mut ranks = self.entries.iter_mut().flat_map(|entry| &mut entry.ranks);
        match ranks.find(|rank| rank.label == life.label) {
            Some(rank) => rank.past.add(counted),
            None => tracing::info!(worker = %life.label, "worker gone"),
        }
        self.free.push_back(life.id.slot);
    }

    fn collect_reports(&mut self) {
        for (index, core) in self.shared.cores.iter().enumerate() {
            while let Some(slot) = core.purged.pop() {
                let life = self.retiring.iter_mut().find(|life| life.id.slot == slot);
                if let Some(done) = life.and_then(|life| life.forgotten.get_mut(index)) {
                    *done = true;
                }
            }
        }
    }

    fn publish(&mut self) {
        let eligible = self
            .workers()
            .filter(|(entry, _)| entry.is_ready())
            .filter_map(|(entry, rank)| worker_of(entry, rank))
            .collect();
        let known_models: AHashSet<Arc<str>> = self
            .entries
            .iter()
            .flat_map(|entry| entry.models.iter().map(|model| model.id.clone()))
            .collect();
        self.publisher.publish(Fleet::new(
            eligible,
            &Exceptions::default(),
            known_models,
            self.worker_count(),
        ));
        self.publisher.reclaim();
    }
}

fn worker_of(entry: &Entry, rank: &Rank) -> Option<Worker> {
    Some(Worker {
        id: rank.id,
        role: entry.role,
        rank: rank.number,
        kv: rank.kv.clone(),
        url: rank.label.clone(),
        address: entry.address?,
        authority: entry.url.authority().clone(),
        path_prefix: entry.url.path_prefix().clone(),
        models: entry.models.iter().map(|model| model.id.clone()).collect(),
    })
}

fn log_verdict(entry: &Entry, verdict: Verdict, is_new_life: bool) {
    let worker = &entry.url;
    let models = || {
        entry
            .models
            .iter()
            .map(|model| &*model.id)
            .take(4)
            .collect::<Vec<_>>()
            .join(", ")
    };
    match verdict {
        Verdict::Same if is_new_life => {
            tracing::info!(%worker, address = ?entry.address, "worker is at another address: taken as a new process");
        }
        Verdict::Same => {}
        Verdict::Ready { .. } => {
            let reason = match (entry.last_failure, is_new_life) {
                (None, _) => "first probe is good".to_owned(),
                (Some(failure), false) => format!("probes are good again after: {failure}"),
                (Some(failure), true) => format!("new process, after: {failure}"),
            };
            tracing::info!(%worker, reason, models = models(), "worker is ready");
        }
        Verdict::Unhealthy => {
            let reason = entry
                .last_failure
                .map_or_else(String::new, |failure| failure.to_string());
            let failure_count = entry.tracker.failures();
            tracing::warn!(%worker, reason, failure_count, "worker is unhealthy: no new requests");
        }
    }
}

#[cfg(test)]
mod tests;
