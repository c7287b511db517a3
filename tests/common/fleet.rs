//! A fleet in a simulation: many clients, one core, several workers, the control plane's judgement; a fake clock and no I/O.
//!
//! Real are the sessions, the books, the gate, the policies with the prefix tree, the retry budget, the judge of standings
//! and the counting of probes. Made here are the sockets, the workers, and what glues the real parts together: `choose`,
//! `judge` and the line as `core::hands` and `core::line` do them, the publication of a fleet as `control::registry` does.
//!
//! Everything happens at a time of the one event queue, in an order that the seed gives.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use corelane::config::Config;
use corelane::control::health::{Failure, Tracker, Verdict};
use corelane::control::standing::{Observation, Standing, Standings, Why};
use corelane::core::budget::RetryBudget;
use corelane::core::shun::Shunned;
use corelane::exchange::{
    Ask, Dial, Entrance, NoSeat, PdEvent, Record, Seat, Session, Sign, World, message_start,
};
use corelane::route::{self, Batches, Key, KeySeed, PolicyKind, Role, TreePrefixes, Turn};
use corelane::shared::{
    AdminRequest, AnswerStats, Exceptions, Fleet, Outcome, Route, Trial, Worker,
};
use shards::{
    Books, Domain, Entry, Gate, LoadGuard, Permit, PrefixHash, Reader, Shard, Slot, Tree,
    TreeLimits, WorkerId,
};

use super::common::Rng;
use super::common::naive::{field, read_message, status};
use super::fault::{Kind, Phase, Said, Script, check_content, mime};

pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1000 * MS;
/// As in `core::hands` and `control`.
const TRIAL_PAUSE_NS: u64 = 250 * MS;
const TICK_NS: u64 = 250 * MS;
const JUDGE_PAUSE_NS: u64 = 2 * MS;

/// Lives of all workers of one run together.
const SLOT_COUNT: usize = 32;
const TRACE_COUNT: usize = 100;

/// One cell of the matrix, with everything else from the seed.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub seed: u64,
    pub kind: Kind,
    pub phase: Phase,
    pub policy: PolicyKind,
    pub is_pd: bool,
}

// ---- time ----

enum Event {
    /// A client asks its next question.
    Ask(usize),
    /// The rest of a request, of that connection of the client.
    Rest(usize, u32, Vec<u8>),
    Timer(usize),
    Connect(usize),
    /// The ring is done with a request.
    Sent(usize),
    /// A request has reached its worker.
    Arrive(usize, Vec<u8>),
    /// The worker says the next thing.
    Step(usize),
    /// Bytes have come from the worker, or its end: `Err(failed)`.
    Deliver(usize, Result<Vec<u8>, bool>),
    CloseIdle(usize),
    Tick,
    Bell,
    /// `true`: one of those at regular times.
    Probe(usize, bool),
    Probed(usize, Result<(), Failure>),
    FaultEnd,
}

struct Due {
    at_ns: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.number == other.number
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at_ns, self.number).cmp(&(other.at_ns, other.number))
    }
}

// ---- who takes part ----

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closed {
    Finished,
    Aborted,
}

struct Asked {
    tag: String,
    streams: bool,
    at_ns: u64,
}

/// A client with its connection; or none, of a session that goes on without one.
struct Client {
    is_adopted: bool,
    asked: Option<Asked>,
    out: Vec<u8>,
    closed: Option<Closed>,
    /// Which connection of its.
    connection: u32,
    deadline_ns: u64,
    /// When a timer is due that will look at the deadline.
    timer_ns: u64,
    leg: Option<usize>,
    question_count: u64,
    /// Which conversation of its.
    talk: u64,
    /// The prefill worker of the hand-over that its request has got.
    handed: Option<usize>,
    is_done: bool,
}

impl Client {
    fn new(is_adopted: bool) -> Client {
        Client {
            is_adopted,
            asked: None,
            out: Vec::new(),
            closed: None,
            connection: 0,
            deadline_ns: u64::MAX,
            timer_ns: u64::MAX,
            leg: None,
            question_count: 0,
            talk: 0,
            handed: None,
            is_done: is_adopted,
        }
    }
}

/// The worker's side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Connecting,
    Idle,
    Working,
    Frozen,
    Closed,
}

struct Conn {
    worker: usize,
    slot: Slot,
    /// Whose leg it is.
    client: Option<usize>,
    side: Side,
    /// The request, with the ring.
    flight: Option<Vec<u8>>,
    has_arrived: bool,
    /// The session asked for it to be broken.
    is_broken: bool,
    /// Its end has been told.
    has_ended: bool,
    /// The router has closed it.
    is_closed: bool,
    /// When the last that was sent arrives: bytes do not overtake each other.
    arrival_ns: u64,
    script: Script,
    /// When the request came.
    began_ns: u64,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    trials_good: u64,
    trials_bad: u64,
    refused: u64,
    failures: u64,
    successes: u64,
    pieces: u64,
    completions: u64,
    busy: u64,
    chosen: u64,
}

struct Engine {
    id: WorkerId,
    role: Role,
    place: Worker,
    tracker: Tracker,
    is_ready: bool,
    probes_good: u64,
    probes_bad: u64,
    /// Pieces and ends when it was probed last.
    progress: u64,
}

/// Blocks that a prefill worker keeps.
struct Blocks {
    tag: String,
    worker: usize,
    is_given: bool,
    is_fetched: bool,
}

struct Fault {
    victim: usize,
    armed_ns: u64,
    length_ns: u64,
    began_ns: Option<u64>,
    ended_ns: Option<u64>,
    /// By role: each worker had requests in flight when it began.
    was_busy: [bool; 3],
    /// It hit the phase it was meant for.
    is_in_phase: bool,
    /// Of a hundred answers, so many are struck.
    share: u64,
    probes_see: bool,
    /// What is frozen goes on at the end; else it is reset (no first byte yet) or stays silent.
    resumes: bool,
}

impl Fault {
    fn is_on(&self) -> bool {
        self.began_ns.is_some() && self.ended_ns.is_none()
    }
}

/// What was seen in one run.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The fault hit the phase it was meant for, lasted so long, and struck every answer.
    pub is_in_phase: bool,
    pub fault_ns: u64,
    pub is_total: bool,
    pub answers: u64,
    pub cut: u64,
    pub refused: u64,
    pub retries: u64,
    pub resends: u64,
    pub moved: u64,
    pub handovers: u64,
    pub blocks_given: u64,
    pub orphans: u64,
    pub orphans_ended: u64,
    pub lost: u64,
    pub queued: u64,
    pub outs: u64,
    /// Choices of the victim while the fault lasted: all; trials; as a spare while out.
    pub chosen: u64,
    pub trials: u64,
    pub spares: u64,
    pub first_out_ns: Option<u64>,
    pub whys: Vec<&'static str>,
    pub worst_ns: u64,
    /// Requests that the victim has served since the fault's end, and when it did the first.
    pub served: u64,
    pub served_ns: Option<u64>,
    pub end_ns: u64,
    pub events: u64,
}

pub struct Core {
    case: Case,
    rng: Rng,
    config: Rc<Config>,
    now_ns: u64,
    number: u64,
    queue: BinaryHeap<Reverse<Due>>,
    trace: VecDeque<(u64, &'static str, usize, usize)>,

    books: &'static Books,
    gate: &'static Gate,
    workers: Vec<Engine>,
    engine_of: Vec<usize>,
    fleet: Rc<Fleet>,
    standings: Standings<WorkerId>,
    counts: Vec<Counts>,
    answers: Vec<AnswerStats>,
    bell_ns: u64,
    is_belled: bool,
    is_refused: bool,

    policies: [Turn; 3],
    scratch: Vec<Slot>,
    chain: Vec<PrefixHash>,
    chain_length: Option<u64>,
    tree: Arc<Tree>,
    shard: Shard,
    reader: Option<Reader>,
    batches: Batches,
    budget: RetryBudget,
    shunned: Shunned,
    tried_at: Vec<(Slot, u64)>,

    waiting: VecDeque<(u64, usize)>,
    aside: VecDeque<usize>,
    ready: VecDeque<(usize, Permit)>,
    is_roused: bool,

    clients: Vec<Client>,
    conns: Vec<Conn>,
    /// By slot.
    idles: Vec<Vec<usize>>,
    adopted: Vec<Session>,
    /// What workers said, by number: to whom, and who.
    legs: Vec<(String, usize)>,
    blocks: Vec<Blocks>,
    fault: Fault,
    tally: Tally,
    is_stopping: bool,
}

impl Core {
    fn chance(&mut self, percent: u64) -> bool {
        self.rng.below(100) < percent
    }

    fn after(&mut self, ns: u64, event: Event) {
        self.at(self.now_ns + ns, event);
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        self.number += 1;
        self.queue.push(Reverse(Due {
            at_ns,
            number: self.number,
            event,
        }));
    }

    fn note(&mut self, what: &'static str, a: usize, b: usize) {
        if self.trace.len() == TRACE_COUNT {
            self.trace.pop_front();
        }
        self.trace.push_back((self.now_ns, what, a, b));
    }

    fn latency(&mut self) -> u64 {
        MS / 10 + self.rng.below(MS)
    }

    fn kind_on(&self, worker: usize) -> Option<Kind> {
        let is_hit =
            self.fault.is_on() && (worker == self.fault.victim || self.case.kind.is_of_all());
        is_hit.then_some(self.case.kind)
    }

    fn is_slow(&self, worker: usize) -> bool {
        matches!(self.kind_on(worker), Some(Kind::Slow | Kind::AllSlow))
    }

    fn victim_slot(&self) -> Slot {
        self.workers[self.fault.victim].id.slot
    }
}

// ---- the world of a session ----

pub struct Hands<'a> {
    core: &'a mut Core,
    client: usize,
}

impl Hands<'_> {
    fn me(&mut self) -> &mut Client {
        &mut self.core.clients[self.client]
    }

    fn leg(&mut self) -> &mut Conn {
        let leg = self.me().leg.expect("a leg");
        &mut self.core.conns[leg]
    }

    fn try_worker(&mut self, ask: &Ask<'_>) -> Option<Seat> {
        let core = &mut *self.core;
        let fleet = core.fleet.clone();
        for trial in &fleet.pool(ask.role).trials {
            let worker = fleet.worker(trial.slot)?;
            let rested = core.tried_at.iter().all(|(slot, at)| {
                *slot != trial.slot || core.now_ns.saturating_sub(*at) >= TRIAL_PAUSE_NS
            });
            if !rested || ask.tried.contains(&trial.slot) {
                continue;
            }
            let seen = core.books.in_flight(trial.slot);
            if seen > trial.load_max {
                continue;
            }
            let guard = LoadGuard::acquire_at(core.books, worker.id, ask.prompt_bytes, seen)
                .expect("one core");
            core.tried_at.retain(|(slot, _)| *slot != trial.slot);
            core.tried_at.push((trial.slot, core.now_ns));
            core.counts[trial.slot.index()].chosen += 1;
            return Some(Seat {
                id: worker.id,
                is_trial: true,
                missing_bytes: None,
                ahead: None,
                guard,
            });
        }
        None
    }

    fn avoided(&mut self, ask: &Ask<'_>) -> Vec<Slot> {
        let core = &mut *self.core;
        let now_ns = core.now_ns;
        let mut avoided = ask.tried.to_vec();
        avoided.extend(core.shunned.slots(now_ns));
        let fleet = core.fleet.clone();
        for (slot, percent) in &fleet.pool(ask.role).easing {
            if !core.chance(u64::from(*percent)) {
                avoided.push(*slot);
            }
        }
        avoided
    }

    fn take_seat(&mut self, ask: &Ask<'_>, exclude: &[Slot], is_spare: bool) -> Option<Seat> {
        let core = &mut *self.core;
        let fleet = core.fleet.clone();
        let pool = fleet.pool(ask.role);
        let candidates = if is_spare { &pool.spare } else { &pool.any };
        let mut reader = core.reader.take().expect("one choice at a time");
        let pin = reader.pin();
        let prefixes = TreePrefixes {
            tree: &core.tree,
            pin: &pin,
            chain: &core.chain,
        };
        let length = core.chain_length.filter(|_| !is_spare);
        let decision = route::decide(
            core.config.settings_of(ask.role),
            length.map_or(Key::None, |length| Key::Prefix(&prefixes, length)),
            candidates,
            exclude,
            core.books,
            &mut core.policies[ask.role as usize],
            &mut core.scratch,
        );
        drop(pin);
        core.reader = Some(reader);
        let decision = decision?;
        let worker = fleet.worker(decision.slot)?;
        let guard =
            LoadGuard::acquire_at(core.books, worker.id, ask.prompt_bytes, decision.seen).ok()?;
        core.counts[decision.slot.index()].chosen += 1;
        let matched = route::bytes_of_blocks(decision.matched_blocks);
        Some(Seat {
            id: worker.id,
            is_trial: false,
            missing_bytes: length.map(|length| length.saturating_sub(matched)),
            ahead: None,
            guard,
        })
    }

    /// The tree learns at once.
    fn teach(&mut self, slot: Slot) {
        let core = &mut *self.core;
        let mut reader = core.reader.take().expect("one choice at a time");
        let shard = &mut core.shard;
        route::lessons(
            &core.tree,
            &reader.pin(),
            &core.chain,
            slot,
            &mut core.batches,
            Vec::new,
            |_, lesson| shard.apply(lesson),
        );
        while shard.work(64) {}
        core.reader = Some(reader);
    }

    /// What is known of a choice of the victim while it should be left alone.
    fn look_at(&mut self, seat: &Seat, is_spare: bool) {
        let core = &mut *self.core;
        let worker = core.engine_of[seat.id.slot.index()];
        if worker != core.fault.victim || !core.fault.is_on() {
            return;
        }
        core.tally.chosen += 1;
        core.tally.trials += u64::from(seat.is_trial);
        core.tally.spares += u64::from(is_spare);
        let is_out = !matches!(core.standings.standing(seat.id), Standing::Good { .. });
        assert!(
            !is_out || seat.is_trial || is_spare,
            "chosen while it is out"
        );
    }
}

impl World for Hands<'_> {
    type Piece = Vec<u8>;

    fn config(&self) -> &Config {
        &self.core.config
    }
    fn now_ns(&self) -> u64 {
        self.core.now_ns
    }
    fn clock_ns(&self) -> u64 {
        self.core.now_ns
    }
    fn is_draining(&self) -> bool {
        false
    }
    fn make_request_id(&mut self, _: Route, out: &mut Vec<u8>) {
        let number = self.core.rng.next();
        out.extend_from_slice(format!("id-{number:x}").as_bytes());
    }

    fn buffer(&mut self) -> Vec<u8> {
        Vec::with_capacity(1024)
    }
    fn grow(&mut self, mut buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        buffer.reserve(more);
        (buffer, false)
    }
    fn recycle(&mut self, _: Vec<u8>) {}

    fn send(&mut self, bytes: Vec<u8>) {
        let me = self.me();
        assert!(!me.is_adopted && me.closed.is_none(), "bytes for nobody");
        me.out.extend_from_slice(&bytes);
    }
    fn send_piece(&mut self, piece: Vec<u8>, from: usize, to: usize) {
        self.send(piece[from..to].to_vec());
    }
    fn finish(&mut self) {
        self.me().closed = Some(Closed::Finished);
    }
    fn abort(&mut self) {
        self.me().closed = Some(Closed::Aborted);
    }
    fn read_client(&mut self, _: bool) {}
    fn is_client_full(&mut self) -> bool {
        false
    }
    fn is_client_held(&mut self) -> bool {
        false
    }
    fn is_worker_held(&mut self) -> bool {
        false
    }
    fn watch_client(&mut self) {
        panic!("no client of these half-closes");
    }
    fn deadline(&mut self, at_ns: u64) {
        let client = self.client;
        self.me().deadline_ns = at_ns;
        self.core.arm(client);
    }

    fn enter(&mut self) -> Entrance {
        let client = self.client;
        let core = &mut *self.core;
        let config = &core.config;
        match core
            .gate
            .enter(config.request_count_max, config.queue_count_max)
        {
            Entry::Admitted(permit) => Entrance::Admitted(permit),
            Entry::Full => Entrance::Full,
            Entry::Queued(ticket) => {
                core.tally.queued += 1;
                core.waiting.push_back((ticket, client));
                if core.waiting.len() == 1 {
                    core.gate.show(0, Some(ticket));
                }
                core.pass_on();
                Entrance::Queued
            }
        }
    }
    fn step_aside(&mut self, permit: Permit) -> Result<(), Permit> {
        let client = self.client;
        permit.step_aside(self.core.config.queue_count_max)?;
        self.core.aside.push_back(client);
        self.core.pass_on();
        Ok(())
    }
    fn stop_waiting(&mut self) {
        let client = self.client;
        self.core.stop_waiting(client);
    }
    fn leave(&mut self, permit: Permit) {
        self.core.leave(permit);
    }
    fn retry_after_secs(&self) -> u32 {
        1
    }
    fn record_wait(&mut self, _: u64) {}

    fn choose(&mut self, ask: Ask<'_>) -> Result<Seat, NoSeat> {
        let core = &mut *self.core;
        if ask.tried.is_empty() {
            core.budget.earn();
        }
        if !ask.is_same_prompt {
            core.chain.clear();
            core.chain_length = None;
        }
        let needs_chain = core.config.settings_of(ask.role).policy == PolicyKind::CacheAware;
        if needs_chain
            && core.chain_length.is_none()
            && let Some((body, fields)) = ask.key
        {
            core.chain_length = route::chain(KeySeed(0), ask.route, body, fields, &mut core.chain);
        }
        let fleet = core.fleet.clone();
        let pool = fleet.pool(ask.role);
        let is_plain = core.shunned.is_empty() && pool.easing.is_empty();
        let mut seat = None;
        if !pool.any.is_empty() {
            seat = self.try_worker(&ask);
            if seat.is_none() && !is_plain {
                let exclude = self.avoided(&ask);
                seat = self.take_seat(&ask, &exclude, false);
            }
            seat = seat.or_else(|| self.take_seat(&ask, ask.tried, false));
        }
        let is_spare = seat.is_none();
        seat = seat.or_else(|| self.take_seat(&ask, ask.tried, true));
        let Some(seat) = seat else {
            return Err(match ask.tried.is_empty() {
                true => NoSeat::NoneEligible,
                false => NoSeat::AllTried,
            });
        };
        self.look_at(&seat, is_spare);
        if needs_chain && self.core.chain_length.is_some() {
            self.teach(seat.id.slot);
        }
        let worker = self.core.engine_of[seat.id.slot.index()];
        self.core.note("client chose worker", self.client, worker);
        Ok(seat)
    }
    fn worker(&self, slot: Slot) -> Option<&Worker> {
        self.core.fleet.worker(slot)
    }
    fn random(&mut self) -> u64 {
        self.core.rng.next()
    }
    fn adopt(&mut self, session: Session) {
        self.core.adopted.push(session);
    }
    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial {
        let client = self.client;
        let me = self.me();
        assert!(me.leg.is_none(), "one leg at a time");
        assert!(me.out.is_empty(), "E2: an answer has begun");
        self.core.dial(client, slot, fresh)
    }
    fn send_message(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        let leg = self.me().leg.expect("a leg");
        self.core.send_message(leg, message)
    }
    fn send_worker(&mut self, _: Vec<u8>) {
        panic!("all bodies are read whole");
    }
    fn send_worker_piece(&mut self, _: Vec<u8>, _: usize, _: usize) {
        panic!("all bodies are read whole");
    }
    fn break_leg(&mut self) {
        self.leg().is_broken = true;
    }
    fn end_leg(&mut self, keep: bool) {
        let leg = self.me().leg.take().expect("a leg is ended once");
        self.core.end_leg(leg, keep);
    }
    fn hand_over(&mut self, _: AdminRequest) -> bool {
        panic!("nobody asks the control plane");
    }

    fn judge(&mut self, slot: Slot, sign: Sign, is_trial: bool) {
        self.core.count(slot, sign, is_trial);
    }
    fn may_retry(&mut self) -> bool {
        let now_ns = self.core.now_ns;
        self.core.budget.take(now_ns)
    }
    fn count_resend(&mut self) {
        self.core.tally.resends += 1;
    }
    fn count_retry(&mut self, _: Route, _: u32) {
        self.core.note("retry", self.client, 0);
        self.core.tally.retries += 1;
    }
    fn count_pd(&mut self, event: PdEvent) {
        let tally = &mut self.core.tally;
        match event {
            PdEvent::Handover => {
                tally.handovers += 1;
                let worker = self.leg().worker;
                self.me().handed = Some(worker);
            }
            PdEvent::Orphan => tally.orphans += 1,
            PdEvent::Released => tally.orphans_ended += 1,
            PdEvent::Lost => {
                tally.orphans_ended += 1;
                tally.lost += 1;
            }
            PdEvent::MissingTransfer => panic!("every prefill answer has parameters"),
            _ => {}
        }
    }
    fn record_handover(&mut self, _: u64, _: u64) {}
    fn count_malformed(&mut self) {
        panic!("clients here make no mistakes");
    }
    fn record_added(&mut self, _: u64) {}
    fn record_piece(&mut self, slot: Slot, _: Option<u64>) {
        self.core.counts[slot.index()].pieces += 1;
    }
    fn record_answer(&mut self, slot: Slot, wait_ns: u64, is_trial: bool) {
        self.core.answers[slot.index()].record(wait_ns, is_trial);
    }
    fn is_logged(&self) -> bool {
        false
    }
    fn log(&mut self, _: corelane::access_log::Entry<'_>, _: Option<Slot>, _: Option<Slot>) {
        panic!("nothing is logged");
    }
    fn record(&mut self, record: Record) {
        self.core
            .note("client's outcome", self.client, record.outcome as usize);
        assert_ne!(record.outcome, Outcome::ClientGone, "nobody left");
    }
}

// ---- the core ----

impl Core {
    /// A timer for the client's deadline, unless an earlier one will look at it.
    fn arm(&mut self, client: usize) {
        let me = &mut self.clients[client];
        if me.deadline_ns < me.timer_ns {
            me.timer_ns = me.deadline_ns;
            let at_ns = me.deadline_ns;
            self.at(at_ns, Event::Timer(client));
        }
    }

    fn dial(&mut self, client: usize, slot: Slot, fresh: bool) -> Dial {
        if self.fleet.worker(slot).is_none() {
            return Dial::Refused;
        }
        if !fresh && let Some(id) = self.idles[slot.index()].pop() {
            let conn = &mut self.conns[id];
            conn.client = Some(client);
            conn.has_arrived = false;
            self.clients[client].leg = Some(id);
            return Dial::Reused;
        }
        let id = self.conns.len();
        self.conns.push(Conn {
            worker: self.engine_of[slot.index()],
            slot,
            client: Some(client),
            side: Side::Connecting,
            flight: None,
            has_arrived: false,
            is_broken: false,
            has_ended: false,
            is_closed: false,
            arrival_ns: 0,
            script: Script::default(),
            began_ns: 0,
        });
        self.clients[client].leg = Some(id);
        let ns = self.latency() + self.latency();
        self.after(ns, Event::Connect(id));
        Dial::Connecting
    }

    fn send_message(&mut self, leg: usize, message: Vec<u8>) -> Option<Vec<u8>> {
        let bytes = message[message_start(&message)..].to_vec();
        self.give_blocks(&bytes);
        let ns = self.latency();
        self.after(ns, Event::Arrive(leg, bytes));
        if self.chance(50) {
            return Some(message);
        }
        self.conns[leg].flight = Some(message);
        let ns = self.rng.below(2 * MS);
        self.after(ns, Event::Sent(leg));
        None
    }

    /// P1: parameters leave once.
    fn give_blocks(&mut self, bytes: &[u8]) {
        if let Some(number) = blocks_in(bytes) {
            let blocks = &mut self.blocks[number];
            assert!(
                !std::mem::replace(&mut blocks.is_given, true),
                "P1: given twice"
            );
            self.tally.blocks_given += 1;
        }
    }

    fn end_leg(&mut self, leg: usize, keep: bool) {
        let conn = &mut self.conns[leg];
        conn.client = None;
        let is_clean = conn.flight.is_none() && !conn.has_ended && !conn.is_broken;
        if keep {
            assert!(conn.script.is_done(), "E4: kept in the middle of an answer");
        }
        if keep && is_clean && self.fleet.worker(conn.slot).is_some() {
            self.idles[conn.slot.index()].push(leg);
        } else {
            self.close(leg);
        }
    }

    fn close(&mut self, id: usize) {
        let conn = &mut self.conns[id];
        conn.is_closed = true;
        conn.side = Side::Closed;
        self.idles[conn.slot.index()].retain(|idle| *idle != id);
    }

    fn count(&mut self, slot: Slot, sign: Sign, is_trial: bool) {
        let worker = self.engine_of[slot.index()];
        let is_bad = matches!(sign, Sign::Refused | Sign::Failed | Sign::Error);
        if is_bad {
            self.note(
                "failure of worker",
                worker,
                matches!(sign, Sign::Refused).into(),
            );
            assert!(
                worker == self.fault.victim && !self.case.kind.is_innocent(),
                "{sign:?} is held against worker {worker}"
            );
        }
        let counts = &mut self.counts[slot.index()];
        match sign {
            Sign::Ended => return counts.completions += 1,
            Sign::Busy(secs) => {
                counts.busy += 1;
                return self.shunned.busy(slot, secs, self.now_ns);
            }
            Sign::Good if is_trial => return counts.trials_good += 1,
            Sign::Good => return counts.successes += 1,
            Sign::Refused | Sign::Failed | Sign::Error if is_trial => counts.trials_bad += 1,
            Sign::Refused => {
                counts.failures += 1;
                counts.refused += 1;
            }
            Sign::Failed | Sign::Error => counts.failures += 1,
        }
        if sign == Sign::Refused {
            self.shunned.refused(slot, self.now_ns);
            self.is_refused = true;
        }
        self.ring();
    }

    fn ring(&mut self) {
        if !std::mem::replace(&mut self.is_belled, true) {
            let at_ns = (self.now_ns + MS / 10).max(self.bell_ns);
            self.at(at_ns, Event::Bell);
        }
    }

    // The line, as `core::line` has it.

    fn leave(&mut self, permit: Permit) {
        if permit.leave() {
            self.pass_on();
            self.is_roused = true;
        }
    }

    fn pass_on(&mut self) {
        while self.gate.pass_on(self.config.request_count_max).is_some() {
            let permit = self.gate.take();
            let (_, client) = self.waiting.pop_front().expect("a claim is for somebody");
            let head = self.waiting.front().map(|(ticket, _)| *ticket);
            self.gate.show(0, head);
            self.ready.push_back((client, permit));
        }
    }

    fn stop_waiting(&mut self, client: usize) {
        if let Some(at) = self.ready.iter().position(|(ready, _)| *ready == client) {
            let (_, permit) = self.ready.remove(at).expect("it is there");
            self.leave(permit);
        } else if let Some(at) = self.aside.iter().position(|aside| *aside == client) {
            self.aside.remove(at);
            self.gate.stop_waiting();
        } else if let Some(at) = self.waiting.iter().position(|(_, w)| *w == client) {
            let (ticket, _) = self.waiting.remove(at).expect("it is there");
            let head = self.waiting.front().map(|(ticket, _)| *ticket);
            if at == 0 {
                assert!(self.gate.replace_head(0, ticket, head), "no other core");
            }
            self.gate.stop_waiting();
            self.pass_on();
        }
    }
}

/// The blocks that a decode leg's message names.
fn blocks_in(bytes: &[u8]) -> Option<usize> {
    let at = memchr::memmem::find(bytes, b"\"remote_block_ids\":[")? + 20;
    let digits = bytes[at..].iter().take_while(|b| b.is_ascii_digit());
    let text: String = digits.map(|b| *b as char).collect();
    text.parse().ok()
}

mod run;
pub use run::play;
