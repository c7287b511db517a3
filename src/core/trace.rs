//! What this core writes down of its decisions: for `/debug/decisions`, for the decision log, and for who asked.
//!
//! An exchange is known by its connection: one runs at a time there (E3), and a leg that goes its own way takes the
//! connection's [`Trace`] along.

use shards::{Slot, WorkerId};

use super::hands::Hands;
use crate::decisions::{
    Decided, Ended, GivenUp, HELD_COUNT_MAX, Held, Pen, Recent, Remembered, Sketch, TRIAL,
    decided_json, request_hash, unix_us,
};
use crate::exchange::{Ask, Record, Sign};
use crate::route::{self, Candidates, Decision, Role, bytes_of_blocks};

/// Decisions that one answer tells of.
const EXPLAINED_MAX: usize = 8;

/// The exchange on one connection.
#[derive(Default)]
pub struct Trace {
    /// Its number; 0: none yet.
    exchange: u64,
    request: u64,
    /// Its last decision for a prefill worker, and for another one, by number in [`Recent`]. `u64::MAX`: none.
    marks: [u64; 2],
    /// Where its last decision is, of the two.
    last: usize,
    /// For a request that asked.
    explained: Option<Vec<Decided>>,
}

const NO_MARK: u64 = u64::MAX;

fn mark_of(role: Role) -> usize {
    usize::from(role != Role::Prefill)
}

/// The core's own.
pub struct Scribe {
    core: u64,
    exchange_count: u64,
    recent: Recent,
    pen: Option<Pen>,
    sketch: Sketch,
    /// Of the core's clock's begin, in us since 1970.
    began_us: u64,
}

impl Scribe {
    /// `count`: decisions that are remembered.
    pub fn new(core: usize, count: usize, pen: Option<Pen>) -> Scribe {
        Scribe {
            core: (core as u64) << 48,
            exchange_count: 0,
            recent: Recent::new(count),
            pen,
            sketch: Sketch::NONE,
            began_us: unix_us(),
        }
    }

    /// Whether there is a decision log.
    #[inline]
    pub fn is_logging(&self) -> bool {
        self.pen.is_some()
    }

    /// What is known of a request.
    pub fn recall(&self, request: u64) -> Vec<Remembered> {
        self.recent.recall(request)
    }

    fn at_us(&self, ns: u64) -> u64 {
        self.began_us + ns / 1000
    }
}

impl Hands<'_, '_> {
    fn trace(&mut self) -> Option<&mut Trace> {
        self.core
            .downs
            .find(self.client)
            .map(|down| &mut down.trace)
    }

    /// An exchange begins. `true`: events of its answer are to be counted.
    pub(super) fn begin_trace(&mut self, request_id: &[u8], explains: bool) -> bool {
        let scribe = &mut self.core.scribe;
        scribe.exchange_count += 1;
        let exchange = scribe.core | scribe.exchange_count;
        let is_logging = scribe.is_logging();
        if let Some(trace) = self.trace() {
            *trace = Trace {
                exchange,
                request: request_hash(request_id),
                marks: [NO_MARK; 2],
                last: 0,
                explained: explains.then(Vec::new),
            };
        }
        is_logging
    }

    /// What a leg without a client is known by.
    pub(super) fn trace_for_errand(&mut self) -> Trace {
        let Some(trace) = self.trace() else {
            return Trace::default();
        };
        Trace {
            explained: None,
            ..*trace
        }
    }

    /// A worker that is out is tried with this request.
    pub(super) fn write_down_trial(&mut self, ask: &Ask<'_>, id: WorkerId, seen: u32) {
        let decided = self.decided(ask, id, seen);
        self.remember(ask, id, decided, 0, None);
    }

    /// A worker was chosen, and its seat taken. `session`: its hash, if the policy looked for it (to look for it costs as much as
    /// the rest of what is written down, and the log's prompts say by themselves which conversation they go on).
    pub(super) fn write_down(
        &mut self,
        ask: &Ask<'_>,
        id: WorkerId,
        decision: &Decision,
        candidates: &Candidates,
        length: Option<u64>,
        session: Option<u64>,
    ) {
        let mut decided = self.decided(ask, id, decision.seen);
        decided.reason = decision.reason as u8;
        decided.candidate_count = candidates.len() as u32;
        if let Some(length) = length {
            decided.prompt_bytes = length;
            decided.matched_bytes = self.core.matched_bytes(decision, length) as u32;
        }
        decided.given_up = decision.given_up.map(|wanted| GivenUp {
            slot: wanted.slot,
            load: wanted.load,
            matched_bytes: bytes_of_blocks(wanted.matched_blocks) as u32,
        });
        decided.least_load = decision.least_load;
        decided.session = session.unwrap_or(0);
        let given_up = decision.given_up.map_or(0, |wanted| wanted.matched_blocks);
        let matched_blocks = decision.matched_blocks.max(given_up);
        self.remember(ask, id, decided, matched_blocks, Some(candidates));
    }

    fn decided(&mut self, ask: &Ask<'_>, id: WorkerId, seen: u32) -> Decided {
        let now_ns = self.turn.now_ns;
        let policy = self.core.config.settings_of(ask.role).policy;
        let at_us = self.core.scribe.at_us(now_ns);
        let (exchange, request) = self.trace().map_or((0, 0), |t| (t.exchange, t.request));
        Decided {
            exchange,
            at_us,
            request,
            session: 0,
            model: 0,
            prompt_bytes: ask.prompt_bytes,
            matched_bytes: 0,
            slot: id.slot,
            incarnation: id.incarnation,
            load: seen,
            least_load: None,
            candidate_count: 0,
            given_up: None,
            role: ask.role,
            route: ask.route,
            policy,
            reason: TRIAL,
            attempt: ask.tried.len().min(255) as u8,
            held_count: 0,
            held: [Held::default(); HELD_COUNT_MAX],
        }
    }

    fn remember(
        &mut self,
        ask: &Ask<'_>,
        id: WorkerId,
        mut decided: Decided,
        matched_blocks: usize,
        candidates: Option<&Candidates>,
    ) {
        let is_explained = self.trace().is_some_and(|trace| trace.explained.is_some());
        if let Some(candidates) = candidates.filter(|_| is_explained) {
            self.list_held(&mut decided, candidates);
        }
        if self.core.scribe.is_logging() {
            self.log_decided(ask, id, &mut decided, matched_blocks);
        }
        let number = self.core.scribe.recent.add(&decided);
        let Some(trace) = self.trace() else { return };
        trace.last = mark_of(decided.role);
        trace.marks[trace.last] = number;
        if let Some(explained) = &mut trace.explained
            && explained.len() < EXPLAINED_MAX
        {
            explained.push(decided);
        }
    }

    fn log_decided(
        &mut self,
        ask: &Ask<'_>,
        id: WorkerId,
        decided: &mut Decided,
        matched_blocks: usize,
    ) {
        let fleet = self.turn.fleet;
        let core = &mut *self.core;
        decided.model = ask.model.map_or(0, route::name_of);
        if decided.prompt_bytes == ask.prompt_bytes
            && let Some(length) = core.chain_length
        {
            decided.prompt_bytes = length;
        }
        let scribe = &mut core.scribe;
        let Some(pen) = &mut scribe.pen else { return };
        if !pen.knows(id)
            && let Some(worker) = fleet.worker(id.slot)
        {
            pen.tell(id, worker.role, &worker.url);
        }
        scribe.sketch.write(&core.chain, matched_blocks);
        if !pen.decided(decided, &scribe.sketch) {
            core.stats().decision_records_dropped.add(1);
        }
    }

    /// Who holds most of the prompt, and the least load where the policy did not look at it: that is for who asks, as a pass
    /// over the fleet costs more than all that is written down.
    #[cold]
    fn list_held(&mut self, decided: &mut Decided, candidates: &Candidates) {
        let core = &mut *self.core;
        let books = core.shared.books;
        if decided.least_load.is_none() {
            let loads = candidates.slots().iter().map(|slot| books.in_flight(*slot));
            // This request sits on the chosen one by now.
            decided.least_load = loads.min().map(|load| load.min(decided.load));
        }
        let mut matches = Vec::new();
        core.shared.tree.matches(
            self.turn.pin,
            &core.chain,
            |slot| candidates.contains(slot),
            HELD_COUNT_MAX,
            &mut matches,
        );
        for (place, (slot, blocks)) in decided.held.iter_mut().zip(&matches) {
            let load = books.in_flight(*slot);
            *place = Held {
                slot: slot.0,
                load: load.min(u32::from(u16::MAX)) as u16,
                bytes: bytes_of_blocks(*blocks) as u32,
            };
        }
        decided.held_count = matches.len().min(HELD_COUNT_MAX) as u8;
    }

    /// What an attempt told of its worker.
    pub(super) fn remember_sign(&mut self, slot: Slot, sign: Sign) {
        let Some(trace) = self.trace() else { return };
        let (exchange, marks) = (trace.exchange, trace.marks);
        let result = match sign {
            Sign::Refused => "refused",
            Sign::Failed => "failed",
            Sign::Error => "error",
            Sign::Busy(_) => "busy",
            Sign::Good => "good",
            Sign::Ended => "ended",
        };
        for mark in marks {
            if let Some(known) = self.core.scribe.recent.find(mark)
                && known.decided.exchange == exchange
                && known.decided.slot == slot
            {
                // An end says less than what was said before.
                if sign != Sign::Ended || known.result.is_none() {
                    known.result = Some(result);
                }
            }
        }
    }

    /// The exchange is over.
    pub(super) fn write_end(&mut self, record: &Record) {
        let now_ns = self.turn.now_ns;
        let Some(trace) = self.trace() else { return };
        let (exchange, request) = (trace.exchange, trace.request);
        let mark = trace.marks[trace.last];
        let core = &mut *self.core;
        let scribe = &mut core.scribe;
        let ended = Ended {
            exchange,
            request,
            at_us: scribe.at_us(now_ns),
            duration_us: record.duration_ns / 1000,
            first_byte_us: record.first_byte_ns.div_ceil(1000),
            wait_us: record.wait_ns / 1000,
            request_bytes: record.request_bytes,
            answer_bytes: record.answer_bytes,
            event_count: record.event_count,
            status: record.status,
            outcome: record.outcome,
            route: record.route,
            retries: record.retries.min(255) as u8,
            is_event_stream: record.is_event_stream,
        };
        if let Some(known) = scribe.recent.find(mark)
            && known.decided.exchange == exchange
        {
            known.ended = Some(ended);
        }
        if let Some(pen) = &mut scribe.pen
            && !pen.ended(&ended)
        {
            core.stats().decision_records_dropped.add(1);
        }
    }

    /// What was decided for a request that asked, in one line of JSON.
    #[cold]
    pub(super) fn write_explanation(&mut self, names: bool, out: &mut Vec<u8>) {
        let fleet = self.turn.fleet;
        let Some(trace) = self.trace() else { return };
        let url = |slot: Slot, incarnation: Option<u32>| {
            let worker = fleet.worker(slot).filter(|_| names)?;
            let is_it = incarnation.is_none_or(|life| life == worker.id.incarnation);
            is_it.then(|| worker.url.to_string())
        };
        let explained = trace.explained.iter().flatten();
        let told: Vec<_> = explained
            .map(|decided| decided_json(decided, url))
            .collect();
        out.extend_from_slice(serde_json::Value::from(told).to_string().as_bytes());
    }
}
