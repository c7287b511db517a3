//! The list of workers: who is registered, in which state, in which slot of the books. Owned by the control thread;
//! the only writer of the fleet snapshot and the only one that opens and closes slots. No I/O.
//!
//! Invariants:
//! - F1 a slot is open for one registered worker at a time, and free for another only when its old life is drained and
//!   every core has said that its shard forgot it.
//! - F2 health changes who is eligible, never what is counted: nothing here writes load.
//! - F3 each change of the eligible workers or of the known models publishes a fleet before the call returns.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use ahash::AHashSet;
use shards::{Counter, Publisher, SLOT_COUNT_MAX, Slot, WorkerId};
use tokio::time::Instant;

use super::health::{Failure, Phase, Tracker, Verdict};
use super::models::Model;
use super::mooncake::EngineIds;
use super::registration::LEASE;
use super::standing::{Observation, Standing, Standings, Transitions, Why};
use super::totals::Totals;
use crate::config::{BOOTSTRAP_PORT, Connector, Tls, WORKER_COUNT_MAX, WorkerSpec, WorkerUrl};
use crate::route::Role;
use crate::shared::{
    Exceptions, Fleet, KvFacts, Shared, ToCore, TransferMode, Trial, Worker, WorkerStats,
};

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
    /// Who says that it is there.
    pub finders: Finders,
    tracker: Tracker,
    good_count: u32,
    bad_count: u32,
    /// Pieces and ends of answers that its workers had sent at the last probe.
    progress: u64,
    /// Of an engine that registered itself.
    lease: Option<Lease>,
    /// As it registered.
    told: Told,
    /// Mooncake: it cannot be used before its engine ids are known.
    needs_engine_ids: bool,
    engine_ids: EngineIds,
    /// Why they are not known.
    engine_failure: Option<String>,
    /// Grows each time it becomes ready, comes back or is a new process: what was asked before is asked again.
    round: u32,
}

/// An engine's registration holds while it is renewed.
#[derive(Debug)]
struct Lease {
    renewed: Instant,
    is_there: bool,
    /// A probe has seen the process gone since the lease ended.
    was_gone: bool,
}

/// What an engine tells of itself, beyond where it is.
#[derive(Debug, Default)]
struct Told {
    peer_address: Option<Arc<str>>,
    transfer_mode: Option<TransferMode>,
    tp_size: Option<u32>,
    dp_size: Option<u32>,
}

/// One message of an engine that registers itself.
#[derive(Clone, Debug)]
pub struct Registration {
    /// What it does.
    pub role: Role,
    /// Where it takes requests.
    pub url: WorkerUrl,
    /// Its ZMQ socket.
    pub peer_address: Option<Arc<str>>,
    /// MoRI-IO.
    pub transfer_mode: Option<TransferMode>,
    /// Tensor-parallel ranks, if it says so.
    pub tp_size: Option<u32>,
    /// Data-parallel ranks, if it says so.
    pub dp_size: Option<u32>,
}

/// What became of a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registered {
    /// It is a new worker, to be probed.
    New(Key),
    /// It had been silent, and is back.
    Back,
    /// Nothing about who is eligible has changed.
    Renewed,
    /// It cannot be.
    Refused(&'static str),
}

/// What the end of leases changed.
#[derive(Debug, Default)]
pub struct Ended {
    /// Somebody gets no new work from now on.
    pub has_changed: bool,
    /// Engines silent for so long that they are to be removed.
    pub gone: Vec<Key>,
}

/// Whether and where to ask for a worker's engine ids.
#[derive(Debug, PartialEq, Eq)]
pub struct Question {
    /// Which time it is ready; none: not now.
    pub round: Option<u32>,
    /// The bootstrap server.
    pub bootstrap: Arc<str>,
}

/// What engine ids changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppliedIds {
    /// All ranks have theirs.
    pub is_known: bool,
    /// Something about who is eligible has changed.
    pub has_changed: bool,
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
        self.phase() == Phase::Ready && self.is_there() && self.has_engine_ids()
    }

    /// Whether it registered itself.
    pub fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    /// Whether its engine ids have to be asked for.
    pub fn needs_engine_ids(&self) -> bool {
        self.needs_engine_ids
    }

    fn is_there(&self) -> bool {
        self.finders.is_here() && !self.is_silent()
    }

    /// Ready but for what those who found it say.
    fn is_resting(&self) -> bool {
        !self.finders.is_here()
            && !self.is_silent()
            && self.phase() == Phase::Ready
            && self.has_engine_ids()
    }

    fn is_silent(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| !lease.is_there)
    }

    fn has_engine_ids(&self) -> bool {
        let mut ranks = self.ranks.iter();
        !self.needs_engine_ids || ranks.all(|rank| rank.kv.engine_id.is_some())
    }

    /// Whether nothing is known of it yet.
    pub fn awaits_first_probe(&self) -> bool {
        match self.phase() {
            Phase::Starting => self.last_failure.is_none(),
            Phase::Ready => !self.has_engine_ids() && self.engine_failure.is_none(),
            Phase::Unhealthy => false,
        }
    }

    /// `starting`, `ready`, `unhealthy`, `silent`: it does not register any more, or `not_ready`: its pod says so.
    pub fn state(&self) -> &'static str {
        match self.phase() {
            _ if self.is_silent() => "silent",
            _ if !self.is_there() => "not_ready",
            Phase::Ready if !self.has_engine_ids() => "starting",
            Phase::Starting => "starting",
            Phase::Ready => "ready",
            Phase::Unhealthy => "unhealthy",
        }
    }

    /// Why it gets no requests; none: it does.
    pub fn reason(&self) -> Option<String> {
        if self.is_ready() {
            return None;
        }
        Some(match (self.phase(), self.last_failure) {
            _ if self.is_silent() => {
                format!("has not registered for {} s", LEASE.as_secs())
            }
            _ if !self.is_there() => "its pod is not ready".to_owned(),
            (Phase::Ready, _) => {
                let why = self.engine_failure.as_deref().unwrap_or("not asked yet");
                format!("engine id not known: {why}")
            }
            (_, None) => "not probed yet".to_owned(),
            (_, Some(failure)) => failure.to_string(),
        })
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
        let peer_address = self.told.peer_address.clone();
        let facts = KvFacts {
            bootstrap_address,
            engine_id: None,
            peer_address: peer_address.unwrap_or_else(|| self.url.host_and_port().into()),
            dp_size: u32::try_from(self.ranks.len()).unwrap_or(u32::MAX),
            tp_size: self.told.tp_size.unwrap_or(1),
            transfer_mode: self.told.transfer_mode,
        };
        for rank in &mut self.ranks {
            let engine_id = match rank.number {
                Some(number) => self.engine_ids.get(&number),
                // One rank of perhaps many, which other registrations are: its bootstrap server knows only its own.
                None => self.engine_ids.values().next(),
            };
            let facts = KvFacts {
                engine_id: engine_id.cloned(),
                ..facts.clone()
            };
            if *rank.kv != facts {
                rank.kv = Arc::new(facts);
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
    standings: Standings<WorkerId>,
    started: Instant,
    /// By role: its policy walks a ring.
    has_rings: [bool; 3],
    tls: Tls,
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
            publisher,
            entries: Vec::new(),
            retiring: Vec::new(),
            free,
            next_key: 0,
            standings: Standings::new(shared.config().standing, shared.config().health.interval),
            started: Instant::now(),
            has_rings: reload::rings(&shared.config()),
            tls: shared.config().tls.clone(),
            shared,
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

    /// All that a session may be bound by, as the cores see the fleet.
    pub fn session_bindings(&self, session: u64) -> Vec<u64> {
        self.publisher.current().bindings(session).collect()
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
        let needed = self.shared.config().needed_roles().iter().copied();
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
    pub fn add(&mut self, worker: impl Into<WorkerSpec>, finder: Finder) -> Result<Key, AddError> {
        let WorkerSpec {
            url,
            role,
            bootstrap_port,
        } = worker.into();
        if self.find(&url).is_some() {
            return Err(AddError::Exists);
        }
        let rank_count = self.shared.config().data_parallel_size;
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
            finders: Finders::of(finder),
            tracker: Tracker::new(&self.shared.config().health),
            good_count: 0,
            bad_count: 0,
            progress: 0,
            lease: None,
            told: Told::default(),
            needs_engine_ids: self.needs_engine_ids(role),
            engine_ids: EngineIds::new(),
            engine_failure: None,
            round: 0,
        };
        entry.refresh_facts();
        self.entries.push(entry);
        self.publish();
        Ok(key)
    }

    fn needs_engine_ids(&self, role: Role) -> bool {
        let config = self.shared.config();
        let pd = config.pd.as_ref();
        role == Role::Prefill && pd.is_some_and(|pd| pd.connector == Connector::Mooncake)
    }

    /// Takes a message of an engine that registers itself.
    pub fn register(
        &mut self,
        registration: Registration,
        now: Instant,
    ) -> Result<Registered, AddError> {
        let Registration { role, url, .. } = &registration;
        if let Some(mode) = registration.transfer_mode {
            let mut others = self.entries.iter().filter(|entry| entry.url != *url);
            let is_other = |entry: &Entry| entry.told.transfer_mode.is_some_and(|m| m != mode);
            if others.any(|entry| entry.is_there() && is_other(entry)) {
                let reason = "its transfer_mode differs from that of the engines that are there";
                return Ok(Registered::Refused(reason));
            }
        }
        let index = self.entries.iter().position(|entry| entry.url == *url);
        let known = match index {
            Some(index) if self.entries[index].role == *role => Some(index),
            // Another engine has its address now.
            Some(index) if self.entries[index].has_lease() => {
                self.remove(self.entries[index].key);
                None
            }
            Some(_) => {
                return Ok(Registered::Refused(
                    "its address is configured as another role",
                ));
            }
            None => None,
        };
        let is_new = known.is_none();
        let index = match known {
            Some(index) => index,
            None => {
                let spec = WorkerSpec {
                    url: url.clone(),
                    role: *role,
                    bootstrap_port: None,
                };
                self.add(spec, Finder::Registration)?;
                tracing::info!(worker = %url, role = role.label(), "engine has registered itself");
                self.entries.len() - 1
            }
        };
        let entry = &mut self.entries[index];
        let dp_size = registration.dp_size;
        entry.told = Told {
            peer_address: registration.peer_address,
            transfer_mode: registration.transfer_mode,
            tp_size: registration.tp_size,
            dp_size,
        };
        let before: Vec<Arc<KvFacts>> = entry.ranks.iter().map(|rank| rank.kv.clone()).collect();
        entry.refresh_facts();
        let ranks = entry.ranks.iter();
        let mut has_changed = !ranks
            .zip(&before)
            .all(|(rank, kv)| Arc::ptr_eq(&rank.kv, kv));
        let mut is_back = false;
        if is_new {
            entry.lease = Some(Lease {
                renewed: now,
                is_there: true,
                was_gone: false,
            });
        } else if let Some(lease) = &mut entry.lease {
            lease.renewed = now;
            is_back = !std::mem::replace(&mut lease.is_there, true);
        }
        if let Some(count) = dp_size.filter(|_| self.shared.config().data_parallel_size == 1) {
            has_changed |= self.set_rank_count(index, count);
        }
        if is_back {
            self.welcome_back(index);
        }
        if has_changed || is_back {
            self.publish();
        }
        Ok(match (is_new, is_back) {
            (true, _) => Registered::New(self.entries[index].key),
            (false, true) => Registered::Back,
            (false, false) => Registered::Renewed,
        })
    }

    fn welcome_back(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        let lease = entry.lease.as_mut();
        let mut was_gone = lease.is_some_and(|lease| std::mem::take(&mut lease.was_gone));
        if entry.phase() != Phase::Ready {
            was_gone |= entry.tracker.restart();
        }
        entry.round = entry.round.wrapping_add(1);
        tracing::info!(worker = %entry.url, was_gone, "engine registers again");
        if was_gone {
            self.renew(index);
        }
    }

    /// Ends the leases that are over at `now`.
    pub fn end_leases(&mut self, now: Instant) -> Ended {
        let limit = LEASE + self.shared.config().worker_startup_timeout;
        let mut ended = Ended::default();
        for entry in &mut self.entries {
            let Some(lease) = &mut entry.lease else {
                continue;
            };
            let silence = now.saturating_duration_since(lease.renewed);
            if silence > limit {
                ended.gone.push(entry.key);
            } else if silence > LEASE && lease.is_there {
                lease.is_there = false;
                lease.was_gone = false;
                ended.has_changed = true;
                tracing::warn!(worker = %entry.url, "engine does not register any more: no new requests");
            }
        }
        if ended.has_changed {
            self.publish();
        }
        ended
    }

    /// Where and whether to ask for engine ids. None: that registration is gone.
    pub fn question(&self, key: Key) -> Option<Question> {
        let entry = self.entry(key)?;
        let is_ready = entry.phase() == Phase::Ready && entry.is_there();
        let kv = &entry.ranks.first()?.kv;
        Some(Question {
            round: is_ready.then_some(entry.round),
            bootstrap: kv.bootstrap_address.clone()?,
        })
    }

    /// Takes the answer to a [`Question`]; one of an earlier round is dropped. None: that registration is gone.
    pub fn apply_engine_ids(
        &mut self,
        key: Key,
        round: Option<u32>,
        answer: Result<EngineIds, String>,
    ) -> Option<AppliedIds> {
        let index = self.entries.iter().position(|entry| entry.key == key)?;
        let entry = &mut self.entries[index];
        let mut applied = AppliedIds {
            is_known: false,
            has_changed: false,
        };
        if Some(entry.round) != round {
            return Some(applied);
        }
        let mut ranks = entry.ranks.iter().map(|rank| rank.number);
        let answer = answer.and_then(|ids| {
            match ranks.find(|rank| rank.map_or(ids.is_empty(), |rank| !ids.contains_key(&rank))) {
                None => Ok(ids),
                Some(None) => Err("the bootstrap server knows no engine yet".to_owned()),
                Some(Some(rank)) => Err(format!("the bootstrap server does not know rank {rank}")),
            }
        });
        match answer {
            Err(reason) => {
                if entry.engine_failure.as_ref() != Some(&reason) {
                    tracing::warn!(worker = %entry.url, reason, "engine id not known yet");
                }
                entry.engine_failure = Some(reason);
            }
            Ok(ids) => {
                applied.is_known = true;
                entry.engine_failure = None;
                if entry.engine_ids != ids {
                    applied.has_changed = true;
                    tracing::info!(worker = %entry.url, ?ids, "engine id known");
                    // Known under another id, it has started anew without being seen gone.
                    if !entry.engine_ids.is_empty() {
                        self.renew(index);
                    }
                    let entry = &mut self.entries[index];
                    entry.engine_ids = ids;
                    entry.refresh_facts();
                    self.publish();
                }
            }
        }
        Some(applied)
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
        let config = self.shared.config();
        let is_unsaid = config.pd.is_some() && config.data_parallel_size == 1;
        let entry = self.entry(key).filter(|_| is_unsaid);
        entry.is_some_and(|entry| {
            entry.told.dp_size.is_none() && entry.tracker.is_next_success_ready()
        })
    }

    /// Whether the models of a worker should be asked for, after the good probe that is about to be applied.
    pub fn wants_models(&self, key: Key) -> bool {
        self.entry(key)
            .is_some_and(|entry| entry.tracker.is_next_success_ready() || entry.good_count % 3 == 2)
    }

    /// Takes a probe's outcome. None: that registration is gone.
    pub fn apply(&mut self, key: Key, probed: Probed) -> Option<Applied> {
        let index = self.entries.iter().position(|entry| entry.key == key)?;
        let progress = self.progress(&self.entries[index]);
        let entry = &mut self.entries[index];
        let has_progressed = std::mem::replace(&mut entry.progress, progress) != progress;
        let outcome = match probed.outcome {
            // Too busy for its probe (compiling, say), yet bytes come: alive.
            Err(Failure::Timeout) if has_progressed && entry.phase() == Phase::Ready => Ok(()),
            outcome => outcome.map(|_| ()),
        };
        let verdict = entry.tracker.record(outcome);
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
            Err(failure) => {
                entry.bad_count = entry.bad_count.wrapping_add(1);
                entry.last_failure = Some(failure);
                if let Some(lease) = entry.lease.as_mut().filter(|lease| !lease.is_there) {
                    lease.was_gone |= failure.is_gone();
                }
            }
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
        if entry.phase() == Phase::Ready {
            entry.last_failure = None;
        }
        if is_new_life || matches!(verdict, Verdict::Ready { .. }) {
            entry.round = entry.round.wrapping_add(1);
        }
        if is_new_life {
            self.renew(index);
        }
        let is_told = self.entries[index].told.dp_size.is_some();
        if let Some(count) = probed.rank_count.filter(|_| !is_told) {
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
                if let Some(sessions) = self.shared.sessions.get() {
                    sessions.forget(life.id.slot);
                }
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
        let entry = &mut self.entries[index];
        // Another process has another id: not one request goes out with the old one.
        entry.engine_ids.clear();
        entry.engine_failure = None;
        let count = entry.ranks.len() as u32;
        if !self.replace_ranks(index, count) {
            self.entries[index].refresh_facts();
        }
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

    /// Looks at what the workers did since the last time, and publishes who gets requests if that has changed. To be
    /// called several times a second, and when a core could not reach somebody.
    pub fn judge(&mut self) -> bool {
        let observations: Vec<(WorkerId, Observation)> = self
            .workers()
            .map(|(entry, rank)| (rank.id, self.observe(entry, rank.id.slot)))
            .collect();
        let changed = self.standings.judge(self.started.elapsed(), &observations);
        for (id, standing) in &changed {
            self.announce_standing(*id, *standing);
        }
        if !changed.is_empty() {
            self.publish();
        }
        // After the publication, so that nothing moves back.
        let stalled = changed
            .iter()
            .filter(|(_, standing)| *standing == Standing::Out { why: Why::Stalled });
        for (id, _) in stalled {
            if self.shared.config().standing.moves_stalled {
                for core in &self.shared.cores {
                    core.post(ToCore::Stalled(id.slot));
                }
            }
        }
        !changed.is_empty()
    }

    /// How a worker stands.
    pub fn standing(&self, id: WorkerId) -> Standing {
        self.standings.standing(id)
    }

    /// How often a worker's standing has changed.
    pub fn transitions(&self, id: WorkerId) -> Transitions {
        self.standings.transitions(id)
    }

    /// The state of one worker of an engine: the engine's, or why the worker is out although the engine is ready.
    pub fn state(&self, entry: &Entry, rank: &Rank) -> &'static str {
        match self.standing(rank.id) {
            Standing::Out { why } | Standing::Trial { why, .. } if entry.is_ready() => why.label(),
            _ => entry.state(),
        }
    }

    /// A counter of a slot, all cores together.
    fn sum(&self, slot: Slot, count: fn(&WorkerStats) -> &Counter) -> u64 {
        let cores = self.shared.cores.iter();
        cores
            .filter_map(|core| core.stats.workers.get(usize::from(slot.0)))
            .map(|stats| count(stats).value())
            .sum()
    }

    fn progress(&self, entry: &Entry) -> u64 {
        let slots = entry.ranks.iter().map(|rank| rank.id.slot);
        slots
            .map(|slot| {
                self.sum(slot, |stats| &stats.pieces) + self.sum(slot, |stats| &stats.completions)
            })
            .sum()
    }

    fn observe(&self, entry: &Entry, slot: Slot) -> Observation {
        let load = self.shared.books.load(slot);
        let sum = |count| self.sum(slot, count);
        // In the order of the fields: see `Observation`.
        Observation {
            role: entry.role,
            models: number_of(&entry.models),
            is_ready: entry.is_ready(),
            is_resting: entry.is_resting(),
            probes_good: u64::from(entry.good_count),
            probes_bad: u64::from(entry.bad_count),
            trials_good: sum(|stats| &stats.trials_good),
            trials_bad: sum(|stats| &stats.trials_bad),
            trial_answers: sum(|stats| &stats.answers.trial_count),
            trial_answer_log: sum(|stats| &stats.answers.trial_log),
            refused: sum(|stats| &stats.refused),
            failures: sum(|stats| &stats.failures) + sum(|stats| &stats.errors),
            successes: sum(|stats| &stats.successes),
            pieces: sum(|stats| &stats.pieces),
            completions: sum(|stats| &stats.completions),
            answers: sum(|stats| &stats.answers.count),
            answer_ns: sum(|stats| &stats.answers.ns),
            answer_log: sum(|stats| &stats.answers.log),
            answer_log_square: sum(|stats| &stats.answers.log_square),
            busy: sum(|stats| &stats.busy),
            in_flight: load.in_flight,
            waiting: load.waiting,
            waiting_bytes: load.waiting_bytes,
            chosen: sum(|stats| &stats.chosen),
            fresh_bytes: sum(|stats| &stats.prompt_bytes)
                .saturating_sub(sum(|stats| &stats.matched_bytes)),
        }
    }

    fn announce_standing(&self, id: WorkerId, standing: Standing) {
        let Some((_, rank)) = self.workers().find(|(_, rank)| rank.id == id) else {
            return;
        };
        let worker = &rank.label;
        match standing {
            Standing::Out { why } => {
                tracing::warn!(%worker, reason = why.label(), "worker is out: no new requests");
            }
            Standing::Trial { why, .. } => {
                tracing::debug!(%worker, reason = why.label(), "worker is tried with single requests");
            }
            Standing::Good { share } if share >= 1.0 => {
                tracing::info!(%worker, "worker gets its full share");
            }
            Standing::Good { .. } => {}
        }
    }

    fn exceptions(&self) -> Exceptions {
        let mut exceptions = Exceptions::default();
        for (_, rank) in self.workers() {
            match self.standings.standing(rank.id) {
                Standing::Out { .. } => exceptions.out.push(rank.id.slot),
                Standing::Trial { load_max, .. } => {
                    let slot = rank.id.slot;
                    exceptions.out.push(slot);
                    exceptions.trials.push(Trial { slot, load_max });
                }
                Standing::Good { share } if share < 1.0 => {
                    let percent = (share * 100.0) as u8;
                    exceptions.easing.push((rank.id.slot, percent));
                }
                Standing::Good { .. } => {}
            }
        }
        exceptions
    }

    fn publish(&mut self) {
        let eligible = self
            .workers()
            .filter(|(entry, _)| entry.is_ready())
            .filter_map(|(entry, rank)| worker_of(entry, rank, &self.tls))
            .collect();
        let known_models: AHashSet<Arc<str>> = self
            .entries
            .iter()
            .flat_map(|entry| entry.models.iter().map(|model| model.id.clone()))
            .collect();
        self.publisher.publish(Fleet::new(
            eligible,
            &self.exceptions(),
            known_models,
            self.worker_count(),
            self.has_rings,
        ));
        self.publisher.reclaim();
        self.shared.rouse(None);
    }
}

/// A number for a set of models, the same in whatever order. For comparison within this process only.
fn number_of(models: &[Model]) -> u64 {
    let hash = |model: &Model| {
        let mut hasher = DefaultHasher::new();
        model.id.hash(&mut hasher);
        hasher.finish()
    };
    models.iter().map(hash).fold(0, u64::wrapping_add)
}

fn worker_of(entry: &Entry, rank: &Rank, tls: &Tls) -> Option<Worker> {
    // Where it cannot be had, the probe has failed and said why.
    let name = entry.url.server_name().cloned();
    let tls = name.map(|name| tls.to_worker(name)).transpose().ok()?;
    Some(Worker {
        id: rank.id,
        role: entry.role,
        rank: rank.number,
        kv: rank.kv.clone(),
        url: rank.label.clone(),
        address: entry.address?,
        authority: entry.url.authority().clone(),
        path_prefix: entry.url.path_prefix().clone(),
        tls,
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

mod finders;
mod reload;
pub use finders::{Finder, Finders};
pub use reload::Plan;

#[cfg(test)]
mod tests;
