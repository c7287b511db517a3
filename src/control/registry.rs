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

/// A registered worker.
#[derive(Debug)]
pub struct Entry {
    /// Which registration.
    pub key: Key,
    /// Where.
    pub url: WorkerUrl,
    /// What it does.
    pub role: Role,
    /// For the KV connectors.
    pub kv: Arc<KvFacts>,
    /// The slot of its present life.
    pub id: WorkerId,
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
}

/// A life that has ended and still has exchanges in flight, or whose prefixes the shards still hold.
#[derive(Debug)]
pub struct Retiring {
    /// Its worker.
    pub url: WorkerUrl,
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

    /// Registered workers, in the order in which they were added.
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

    /// Workers that may get new requests.
    pub fn ready_count(&self) -> usize {
        self.entries.iter().filter(|entry| entry.is_ready()).count()
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
        if self.entries.len() >= WORKER_COUNT_MAX {
            return Err(AddError::Full);
        }
        let id = self.open_slot().ok_or(AddError::Full)?;
        let key = Key(self.next_key);
        self.next_key += 1;
        let bootstrap_port = bootstrap_port.unwrap_or(BOOTSTRAP_PORT);
        self.entries.push(Entry {
            key,
            role,
            kv: Arc::new(KvFacts {
                bootstrap_address: (role == Role::Prefill)
                    .then(|| url.on_port(bootstrap_port).into()),
                engine_id: None,
                peer_address: url.host_and_port().into(),
                dp_size: 1,
                tp_size: 1,
            }),
            url,
            id,
            address: None,
            models: Vec::new(),
            last_failure: None,
            was_added,
            tracker: Tracker::new(&self.shared.config.health),
            good_count: 0,
            base: Totals::of_slot(&self.shared.cores, id.slot),
            past: Totals::default(),
        });
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
        let in_flight_count = self.shared.books.in_flight(entry.id.slot);
        tracing::info!(worker = %entry.url, in_flight_count, "worker removed: draining");
        self.retire(entry.url, entry.role, entry.id, entry.base);
        true
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
    pub fn totals(&self, entry: &Entry) -> Totals {
        let mut sum = self.totals_of_retiring(&entry.url);
        sum.add(entry.past);
        sum.add(Totals::of_slot(&self.shared.cores, entry.id.slot).since(entry.base));
        sum
    }

    /// What they counted about those of its lives that are ending.
    pub fn totals_of_retiring(&self, url: &WorkerUrl) -> Totals {
        let mut sum = Totals::default();
        for life in self.retiring.iter().filter(|life| life.url == *url) {
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

    fn retire(&mut self, url: WorkerUrl, role: Role, id: WorkerId, base: Totals) {
        self.shared.books.close(id);
        self.retiring.push(Retiring {
            url,
            role,
            id,
            base,
            forgotten: Vec::new(),
        });
    }

    /// The process behind an entry is another one: new slot, empty cache, load that starts at zero.
    fn renew(&mut self, index: usize) {
        let Some(id) = self.open_slot() else {
            tracing::warn!(worker = %self.entries[index].url, "no free slot: the worker keeps its old one");
            return;
        };
        let base = Totals::of_slot(&self.shared.cores, id.slot);
        let entry = &mut self.entries[index];
        let (old_id, old_base) = (
            std::mem::replace(&mut entry.id, id),
            std::mem::replace(&mut entry.base, base),
        );
        let (url, role) = (entry.url.clone(), entry.role);
        // The order of `remove`: readers learn of the new slot before the old one closes.
        self.publish();
        self.retire(url, role, old_id, old_base);
    }

    fn free_life(&mut self, life: Retiring) {
        let counted = Totals::of_slot(&self.shared.cores, life.id.slot).since(life.base);
        match self.entries.iter_mut().find(|entry| entry.url == life.url) {
            Some(entry) => entry.past.add(counted),
            None => tracing::info!(worker = %life.url, "worker gone"),
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
            .entries
            .iter()
            .filter(|entry| entry.is_ready())
            .filter_map(worker_of)
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
            self.entries.len(),
        ));
        self.publisher.reclaim();
    }
}

fn worker_of(entry: &Entry) -> Option<Worker> {
    Some(Worker {
        id: entry.id,
        role: entry.role,
        rank: None,
        kv: entry.kv.clone(),
        url: entry.url.text().clone(),
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
