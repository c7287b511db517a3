//! Clients, router and workers put together: one thread, one queue of events.
//!
//! Invariants, checked at the end of every run: each request ends exactly once, or is counted as failed; the books are
//! zero; no worker holds a job or a pinned block.

use std::sync::Arc;

use super::agenda::{Agenda, Ns, ns, secs};
use super::engine::{Engine, Job, Part, Said, Speeds};
use super::judge::Judge;
use super::policy::{AS_LOGGED, Logged, Policy, Question};
use super::router::{Router, Seat};
use super::tally::{Outcome, Point, Tally, Window};
use super::workload::Workload;
use crate::route::{Role, Settings};

/// What happens to a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// It begins nothing for so many seconds; its probes stay good.
    Stall(f64),
    /// It works at this share of its speed from now on.
    Pace(f64),
    /// Its process ends and is back after so many seconds, empty.
    Restart(f64),
}

/// When and to whom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// When.
    pub at: Ns,
    /// In which pool.
    pub pool: usize,
    /// Which worker of it.
    pub worker: usize,
    /// What.
    pub fault: Fault,
}

/// How many first tokens may come how late.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Late {
    /// Late is what comes after so many seconds.
    pub after_s: f64,
    /// So many may.
    pub count: usize,
}

/// A fleet and what chooses in front of it.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Workers for whole requests, or for prompts where there are decode workers.
    pub first: Vec<Speeds>,
    /// Decode workers; none: not disaggregated.
    pub decode: Vec<Speeds>,
    /// The policy of the first pool.
    pub policy: String,
    /// The policy of the decode workers.
    pub decode_policy: String,
    /// Their thresholds.
    pub settings: Settings,
    /// What happens to whom.
    pub faults: Vec<Planned>,
    /// Whether workers that stall or degrade are found and left out, as the control plane does it.
    pub has_detection: bool,
    /// When to measure.
    pub window: Window,
    /// Time between two points of the series.
    pub sample_s: f64,
    /// Nothing goes on after that many seconds: what then runs is failed. 0: no end.
    pub end_s: f64,
    /// Nothing goes on when too many first tokens were late ([`Outcome::is_late`]): what then runs is failed.
    pub late: Option<Late>,
    /// Of all that is left to chance.
    pub seed: u64,
    /// For the policy `as_logged`.
    pub logged: Option<Arc<Logged>>,
}

impl Setup {
    /// Plain workers, all alike.
    pub fn plain(count: usize, speeds: Speeds, policy: &str) -> Setup {
        Setup {
            first: vec![speeds; count],
            decode: Vec::new(),
            policy: policy.to_string(),
            decode_policy: "least_loaded".to_string(),
            settings: Settings::default(),
            faults: Vec::new(),
            has_detection: false,
            window: Window::WHOLE,
            sample_s: 1.0,
            end_s: 0.0,
            late: None,
            seed: 1,
            logged: None,
        }
    }

    fn is_disaggregated(&self) -> bool {
        !self.decode.is_empty()
    }
}

enum Event {
    /// The next turn of a session.
    Turn(usize),
    /// A step or run of steps is over, if it is the one of this number.
    End(usize, usize, u64),
    /// KV has come to a decode worker, in this life.
    Fetched(usize, usize, usize),
    /// A worker may begin something again.
    Wake(usize, usize),
    /// A worker is back.
    Back(usize, usize),
    Fault(usize),
    Sample,
    Judge,
    Stop,
}

struct Request {
    session: usize,
    sent: Ns,
    /// When the worker was chosen; later than `sent` after a resend.
    chosen: Ns,
    has_first: bool,
    is_prefilled: bool,
    seats: [Option<Seat>; 2],
    /// By pool: sent to see whether a worker is well again.
    is_trial: [bool; 2],
}

/// A run of one policy over a workload.
///
/// # Errors
/// A policy of that name does not exist.
pub fn run(setup: &Setup, workload: &Workload) -> Result<Outcome, String> {
    World::new(setup, workload).map(World::run)
}

struct World<'a> {
    setup: &'a Setup,
    workload: &'a Workload,
    agenda: Agenda<Event>,
    router: Router,
    /// By pool and worker.
    engines: Vec<Vec<Engine>>,
    lives: Vec<Vec<usize>>,
    is_down: Vec<Vec<bool>>,
    requests: Vec<Option<Request>>,
    /// Turns done, by session.
    turns: Vec<usize>,
    next_session: usize,
    live_sessions: usize,
    tally: Tally,
    computed_then: Vec<Vec<u64>>,
    judge: Option<Judge>,
    /// Requests that found nobody.
    homeless: Vec<usize>,
    /// First tokens that were late.
    late_count: usize,
    is_over: bool,
}

const PREFILL: usize = 0;
const DECODE: usize = 1;
/// As often as the control thread judges.
const JUDGE_S: f64 = 0.25;

impl<'a> World<'a> {
    fn new(setup: &'a Setup, workload: &'a Workload) -> Result<World<'a>, String> {
        let policy = |name: &str, salt: u64| {
            if let Some(logged) = setup.logged.as_ref().filter(|_| name == AS_LOGGED) {
                return Ok(Policy::Logged(
                    Arc::clone(logged),
                    usize::from(salt == 0x22),
                ));
            }
            Policy::parse(name, &setup.settings, setup.seed ^ salt)
                .ok_or_else(|| format!("there is no policy {name}"))
        };
        let mut pools = vec![(setup.first.len(), policy(&setup.policy, 0x11)?)];
        let mut engines = vec![make(&setup.first)];
        if setup.is_disaggregated() {
            pools.push((setup.decode.len(), policy(&setup.decode_policy, 0x22)?));
            engines.push(make(&setup.decode));
        }
        let sizes: Vec<usize> = engines.iter().map(Vec::len).collect();
        let zeros = |size: &usize| vec![0; *size];
        let mut router = Router::new(pools);
        for (pool, engines) in router.pools.iter_mut().zip(&engines) {
            for (beside, engine) in pool.beside.iter_mut().zip(engines) {
                beside.prefill_tokens_per_s = engine.speeds().prefill_tokens_per_s;
            }
        }
        Ok(World {
            judge: setup.has_detection.then(|| Judge::new(&sizes)),
            tally: Tally::new(&setup.policy, setup.window, &sizes),
            lives: sizes.iter().map(zeros).collect(),
            is_down: sizes.iter().map(|size| vec![false; *size]).collect(),
            computed_then: sizes.iter().map(|size| vec![0; *size]).collect(),
            turns: vec![0; workload.sessions.len()],
            setup,
            workload,
            agenda: Agenda::default(),
            router,
            engines,
            requests: Vec::new(),
            next_session: 0,
            live_sessions: 0,
            homeless: Vec::new(),
            late_count: 0,
            is_over: false,
        })
    }

    fn run(mut self) -> Outcome {
        let seats = self.workload.seats.unwrap_or(usize::MAX);
        for _ in 0..seats.min(self.workload.sessions.len()) {
            self.begin_session();
        }
        for (index, planned) in self.setup.faults.iter().enumerate() {
            self.agenda.add(planned.at, Event::Fault(index));
        }
        self.agenda.add(0, Event::Sample);
        if self.judge.is_some() {
            self.agenda.add(0, Event::Judge);
        }
        if self.setup.end_s > 0.0 {
            self.agenda.add(ns(self.setup.end_s), Event::Stop);
        }
        while self.live_sessions > 0
            && !self.is_over
            && let Some(event) = self.agenda.take()
        {
            self.tally.outcome.events += 1;
            self.on(event);
        }
        self.finish()
    }

    fn finish(mut self) -> Outcome {
        for id in 0..self.requests.len() {
            if let Some(request) = &mut self.requests[id] {
                let seats = std::mem::take(&mut request.seats);
                let is_prefilled = request.is_prefilled;
                self.give_back(seats, is_prefilled);
                self.requests[id] = None;
                self.tally.outcome.failed += 1;
            }
        }
        for (pool, engines) in self.engines.iter_mut().enumerate() {
            assert_eq!(
                self.router.in_flight(pool),
                0,
                "the books are zero at the end"
            );
            for (worker, engine) in engines.iter_mut().enumerate() {
                if self.is_over {
                    engine.restart();
                }
                assert_eq!(
                    (engine.job_count(), engine.kv.pinned()),
                    (0, 0),
                    "nothing is left on a worker"
                );
                let sums = &mut self.tally.outcome.workers[pool][worker];
                sums.evicted = engine.kv.evicted_count;
                sums.busy = engine.busy;
            }
        }
        assert_eq!(
            self.router.books.underflow_count(),
            0,
            "nothing was given back twice"
        );
        self.tally.outcome.outs = self.judge.map_or_else(Vec::new, |judge| judge.outs);
        self.tally.close(self.agenda.now())
    }

    fn on(&mut self, event: Event) {
        let now = self.agenda.now();
        match event {
            Event::Turn(session) => self.send_turn(session),
            Event::End(pool, worker, turn) => {
                let engine = &mut self.engines[pool][worker];
                if engine.turn == turn {
                    let end = engine.end(now);
                    self.announce(pool, worker, end);
                    self.listen(pool, worker);
                }
            }
            Event::Fetched(worker, place, life) => {
                if self.lives[DECODE][worker] == life {
                    self.engines[DECODE][worker].fetched(place);
                    self.poke(DECODE, worker);
                }
            }
            Event::Wake(pool, worker) => self.poke(pool, worker),
            Event::Back(pool, worker) => {
                self.is_down[pool][worker] = false;
                self.router.restart(pool, worker);
                self.shut_out(pool);
                for id in std::mem::take(&mut self.homeless) {
                    self.send(id);
                }
            }
            Event::Fault(index) => self.fault(index),
            Event::Sample => self.sample(),
            Event::Judge => self.judge_all(),
            Event::Stop => self.is_over = true,
        }
    }

    // ---- clients ----

    fn begin_session(&mut self) {
        let index = self.next_session;
        if let Some(session) = self.workload.sessions.get(index) {
            self.next_session += 1;
            self.live_sessions += 1;
            let first = session.turns.first().map_or(0, |turn| turn.pause);
            let start = session.start.max(self.agenda.now());
            self.agenda.add(start + first, Event::Turn(index));
        }
    }

    fn send_turn(&mut self, session: usize) {
        let now = self.agenda.now();
        if self.workload.sessions[session].turns.len() <= self.turns[session] {
            return self.end_session();
        }
        let request = Request {
            session,
            sent: now,
            chosen: now,
            has_first: false,
            is_prefilled: false,
            seats: [None, None],
            is_trial: [false; 2],
        };
        self.requests.push(Some(request));
        self.tally.queue(now, 1);
        self.send(self.requests.len() - 1);
    }

    fn end_session(&mut self) {
        self.live_sessions -= 1;
        self.tally.session_done(self.agenda.now());
        if self.workload.seats.is_some() {
            self.begin_session();
        }
    }

    /// A request is done with; its session goes on.
    fn end_request(&mut self, id: usize, is_good: bool) {
        let Some(request) = self.requests[id].take() else {
            return;
        };
        let session = request.session;
        if !request.is_prefilled {
            self.tally.queue(self.agenda.now(), -1);
        }
        self.give_back(request.seats, request.is_prefilled);
        let turns = &self.workload.sessions[session].turns;
        if is_good {
            self.tally
                .request_done(turns[self.turns[session]].output_tokens);
        } else {
            self.tally.outcome.failed += 1;
        }
        self.turns[session] += 1;
        match turns.get(self.turns[session]) {
            Some(next) => {
                let at = self.agenda.now() + next.pause;
                self.agenda.add(at, Event::Turn(session));
            }
            None => self.end_session(),
        }
    }

    // ---- the router ----

    fn send(&mut self, id: usize) {
        let now = self.agenda.now();
        let is_disaggregated = self.setup.is_disaggregated();
        let role = if is_disaggregated {
            Role::Prefill
        } else {
            Role::Regular
        };
        let Some(first) = self.take(id, PREFILL, role) else {
            return self.homeless.push(id);
        };
        let decode = match is_disaggregated {
            true => self.take(id, DECODE, Role::Decode),
            false => None,
        };
        if is_disaggregated && decode.is_none() {
            self.router.give_back(PREFILL, first, false);
            return self.homeless.push(id);
        }
        let worker = self.router.pools[PREFILL].index(first.id.slot);
        if let Some(request) = &mut self.requests[id] {
            request.chosen = now;
            request.seats = [Some(first), decode];
        }
        let part = if is_disaggregated {
            Part::Prefill
        } else {
            Part::Whole
        };
        self.submit(PREFILL, worker, id, part);
    }

    fn take(&mut self, id: usize, pool: usize, role: Role) -> Option<Seat> {
        let session = self.requests[id].as_ref()?.session;
        let turn = &self.workload.sessions[session].turns[self.turns[session]];
        self.scrape(pool);
        let question = Question {
            content: &turn.content,
            session: self.workload.sessions[session].name,
            now: self.agenda.now(),
            chain: &[],
            tree: None,
            role,
        };
        let Router { books, pools, .. } = &self.router;
        let ids = &pools[pool].ids;
        let now = self.agenda.now();
        let tried = self.judge.as_mut().and_then(|judge| {
            judge.due_for_trial(pool, now, |worker| books.in_flight(ids[worker].slot))
        });
        let tried = tried.filter(|worker| !self.is_down[pool][*worker]);
        if let Some(request) = &mut self.requests[id] {
            request.is_trial[pool] = tried.is_some();
        }
        let seat = self.router.take(pool, question, tried)?;
        let worker = self.router.pools[pool].index(seat.id.slot);
        self.tally.chosen(pool, worker, seat.choice.reason);
        if let Some(judge) = &mut self.judge {
            judge.chosen(pool, worker, seat.fresh_tokens);
        }
        Some(seat)
    }

    /// What a scrape of the workers' metrics would say, fresh for everybody.
    fn scrape(&mut self, pool: usize) {
        let pools = &mut self.router.pools[pool];
        for (beside, engine) in pools.beside.iter_mut().zip(&self.engines[pool]) {
            beside.kv_usage = engine.kv.pinned() as f64 / engine.kv.capacity().max(1) as f64;
        }
    }

    fn give_back(&mut self, seats: [Option<Seat>; 2], is_prefilled: bool) {
        for (pool, seat) in seats.into_iter().enumerate() {
            if let Some(seat) = seat {
                self.router.give_back(pool, seat, is_prefilled);
            }
        }
    }

    fn submit(&mut self, pool: usize, worker: usize, id: usize, part: Part) {
        let Some(request) = &self.requests[id] else {
            return;
        };
        let session = &self.workload.sessions[request.session];
        let turn = &session.turns[self.turns[request.session]];
        let engine = &mut self.engines[pool][worker];
        let answer = if part == Part::Prefill {
            0
        } else {
            turn.output_tokens
        };
        let blocks = turn.content.blocks(engine.speeds().kv_block_tokens, answer);
        engine.submit(Job {
            id,
            part,
            prompt_tokens: turn.content.tokens().max(1),
            output_tokens: turn.output_tokens.max(1),
            blocks,
        });
        self.poke(pool, worker);
    }

    // ---- workers ----

    fn announce(&mut self, pool: usize, worker: usize, end: Option<Ns>) {
        if let Some(at) = end {
            let turn = self.engines[pool][worker].turn;
            self.agenda.add(at, Event::End(pool, worker, turn));
        }
    }

    fn poke(&mut self, pool: usize, worker: usize) {
        let now = self.agenda.now();
        if self.is_down[pool][worker] {
            return;
        }
        let life = self.lives[pool][worker];
        for (place, at) in self.engines[pool][worker].fetch(now) {
            self.agenda.add(at, Event::Fetched(worker, place, life));
        }
        let end = self.engines[pool][worker].poke(now);
        self.announce(pool, worker, end);
        if !self.engines[pool][worker].said.is_empty() {
            self.listen(pool, worker);
        }
    }

    fn listen(&mut self, pool: usize, worker: usize) {
        let engine = &mut self.engines[pool][worker];
        let said = std::mem::take(&mut engine.said);
        let steps = std::mem::take(&mut engine.steps);
        self.tally.steps(steps.into_iter());
        let mut has_room = false;
        for said in said {
            match said {
                Said::Began { id, cached_tokens } => self.began(pool, worker, id, cached_tokens),
                Said::First(id) => self.first(pool, worker, id),
                Said::Done(id) => {
                    has_room = true;
                    self.done(pool, worker, id);
                }
                Said::TooLong(id) => self.end_request(id, false),
            }
        }
        // What ended gave room to those who wait for it.
        if has_room {
            self.poke(pool, worker);
        }
    }

    fn began(&mut self, pool: usize, worker: usize, id: usize, cached: u32) {
        if let Some(request) = &self.requests[id] {
            let turn = &self.workload.sessions[request.session].turns[self.turns[request.session]];
            self.tally
                .began(pool, worker, turn.content.tokens(), cached);
        }
    }

    /// The first token of an answer. (Of a prompt that was computed for a decode worker, `done` says so.)
    fn first(&mut self, pool: usize, worker: usize, id: usize) {
        let now = self.agenda.now();
        if pool == PREFILL && self.setup.is_disaggregated() {
            return;
        }
        let Some(request) = &mut self.requests[id] else {
            return;
        };
        if let Some(judge) = &mut self.judge {
            judge.first(pool, worker, request.is_trial[pool]);
        }
        if !request.has_first {
            request.has_first = true;
            let seconds = secs(now - request.sent);
            self.tally.first(seconds);
            if let Some(late) = self.setup.late.filter(|late| seconds > late.after_s) {
                self.late_count += 1;
                self.tally.outcome.is_late = self.late_count > late.count;
                self.is_over |= self.tally.outcome.is_late;
            }
        }
        if pool == PREFILL {
            self.prefilled(id);
        }
    }

    /// The prompt is computed.
    fn prefilled(&mut self, id: usize) {
        let now = self.agenda.now();
        let Some(request) = &mut self.requests[id] else {
            return;
        };
        request.is_prefilled = true;
        self.tally.queue(now, -1);
        let waited = secs(now - request.chosen);
        for (pool, seat) in request.seats.iter().enumerate() {
            if let Some(seat) = seat {
                self.router.activate(pool, seat, waited);
            }
        }
    }

    fn done(&mut self, pool: usize, worker: usize, id: usize) {
        if let (Some(judge), Some(request)) = (&mut self.judge, &self.requests[id]) {
            judge.completed(pool, worker, request.is_trial[pool]);
        }
        if pool == DECODE || !self.setup.is_disaggregated() {
            return self.end_request(id, true);
        }
        self.prefilled(id);
        let Some(request) = &mut self.requests[id] else {
            return;
        };
        let seat = request.seats[PREFILL].take();
        let decode = request.seats[DECODE].as_ref().map(|seat| seat.id.slot);
        if let Some(seat) = seat {
            self.router.give_back(PREFILL, seat, true);
        }
        if let Some(slot) = decode {
            let worker = self.router.pools[DECODE].index(slot);
            self.submit(DECODE, worker, id, Part::Decode);
        }
    }

    // ---- faults ----

    fn fault(&mut self, index: usize) {
        let now = self.agenda.now();
        let Planned {
            pool,
            worker,
            fault,
            ..
        } = self.setup.faults[index];
        let engine = &mut self.engines[pool][worker];
        match fault {
            Fault::Stall(seconds) => {
                let until = now + ns(seconds);
                let end = engine.stall(now, until);
                self.announce(pool, worker, end);
                self.agenda.add(until, Event::Wake(pool, worker));
            }
            Fault::Pace(pace) => {
                let end = engine.set_pace(now, pace);
                self.announce(pool, worker, end);
            }
            Fault::Restart(seconds) => {
                engine.restart();
                self.lives[pool][worker] += 1;
                self.is_down[pool][worker] = true;
                self.shut_out(pool);
                self.leave(pool, worker);
                self.agenda
                    .add(now + ns(seconds), Event::Back(pool, worker));
            }
        }
    }

    /// All that had a seat on a worker gives it back and begins anew.
    fn leave(&mut self, pool: usize, worker: usize) {
        for id in 0..self.requests.len() {
            let Some(request) = &self.requests[id] else {
                continue;
            };
            if !self.router.has_seat(&request.seats, pool, worker) {
                continue;
            }
            let is_elsewhere = pool == DECODE && !request.is_prefilled;
            if is_elsewhere {
                // Its prompt is still computed: another decode worker will do.
                let seat = self.requests[id]
                    .as_mut()
                    .and_then(|r| r.seats[DECODE].take());
                if let Some(seat) = seat {
                    self.router.give_back(DECODE, seat, false);
                }
                let seat = self.take(id, DECODE, Role::Decode);
                if let Some(request) = &mut self.requests[id] {
                    request.seats[DECODE] = seat;
                }
                continue;
            }
            self.begin_anew(id);
        }
    }

    /// A request gives its seats back and is sent again from its beginning.
    fn begin_anew(&mut self, id: usize) {
        let Some(request) = &mut self.requests[id] else {
            return;
        };
        let seats = std::mem::take(&mut request.seats);
        let was_prefilled = std::mem::replace(&mut request.is_prefilled, false);
        self.give_back(seats, was_prefilled);
        if was_prefilled {
            self.tally.queue(self.agenda.now(), 1);
        }
        self.tally.outcome.resent += 1;
        self.send(id);
    }

    /// What waits for its first byte on a worker that stalls goes elsewhere, as the router sends it.
    fn move_stalled(&mut self) {
        let Some(judge) = &self.judge else { return };
        for (pool, worker) in judge.stalled() {
            for id in 0..self.requests.len() {
                let Some(request) = &self.requests[id] else {
                    continue;
                };
                let is_there = self.router.has_seat(&request.seats, pool, worker);
                if !is_there || request.has_first || !self.engines[pool][worker].abort(id) {
                    continue;
                }
                self.begin_anew(id);
            }
        }
    }

    fn shut_out(&mut self, pool: usize) {
        let down = &self.is_down[pool];
        let judge = &self.judge;
        let is_out = |worker: usize| {
            down[worker]
                || judge
                    .as_ref()
                    .is_some_and(|judge| judge.is_out(pool, worker))
        };
        self.router.shut_out(pool, is_out);
    }

    fn judge_all(&mut self) {
        let now = self.agenda.now();
        let Some(judge) = &mut self.judge else { return };
        let (router, engines, down) = (&self.router, &self.engines, &self.is_down);
        let is_changed = judge.tick(now, |pool, worker| {
            let load = router.books.load(router.pools[pool].ids[worker].slot);
            (load, engines[pool][worker].pieces(now), !down[pool][worker])
        });
        if is_changed {
            (0..self.engines.len()).for_each(|pool| self.shut_out(pool));
        }
        self.move_stalled();
        self.agenda.add(now + ns(JUDGE_S), Event::Judge);
    }

    fn sample(&mut self) {
        let now = self.agenda.now();
        let step = self.setup.sample_s;
        let mut all = Vec::new();
        for (pool, engines) in self.engines.iter().enumerate() {
            let ids = &self.router.pools[pool].ids;
            let then = &mut self.computed_then[pool];
            let points = engines
                .iter()
                .zip(ids)
                .zip(then)
                .map(|((engine, id), then)| {
                    let before = std::mem::replace(then, engine.computed_tokens);
                    Point {
                        in_flight: self.router.books.in_flight(id.slot),
                        computed_per_s: (engine.computed_tokens - before) as f64 / step,
                        kv_usage: engine.kv.pinned() as f64 / engine.kv.capacity().max(1) as f64,
                    }
                });
            all.push(points.collect());
        }
        self.tally.sample(now, all);
        self.agenda.add(now + ns(step), Event::Sample);
    }
}

fn make(speeds: &[Speeds]) -> Vec<Engine> {
    speeds.iter().cloned().map(Engine::new).collect()
}
