//! The events of a simulated fleet: clients, workers, the control plane, the fault; and what must hold.

use super::*;

/// What the run may last, whatever happens.
const RUN_NS_MAX: u64 = 200 * SECOND;
/// What one request may last: the time limit of a silent stream (20 s), or a stall's discovery, and some tries.
const REQUEST_NS_MAX: u64 = 60 * SECOND;
const START_NS: u64 = 1000 * SECOND;

pub struct Sim {
    core: Core,
    sessions: Vec<Session>,
    /// From the fault's end to the first request served.
    recovery_ns_max: u64,
}

impl Drop for Sim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let core = &self.core;
            println!("{:?}: SEED={} plays it first", core.case, core.case.seed);
            let fault = &core.fault;
            println!(
                "victim {} from {:?} to {:?}",
                fault.victim,
                fault.began_ns.map(|ns| (ns - START_NS) / MS),
                fault.ended_ns.map(|ns| (ns - START_NS) / MS)
            );
            for (at_ns, what, a, b) in &core.trace {
                println!("  {:>8} us {what} {a} {b}", (at_ns - START_NS) / 1000);
            }
            println!("{:?}", core.tally);
        }
    }
}

/// One run of one cell. `recovery_ns_max`: within which the victim must serve again.
pub fn play(case: Case, config: &Config, recovery_ns_max: u64) -> Tally {
    let mut sim = Sim::new(case, config, recovery_ns_max);
    sim.run();
    sim.check_end();
    let (fault, tally) = (&sim.core.fault, &mut sim.core.tally);
    tally.end_ns = sim.core.now_ns - START_NS;
    tally.is_in_phase = fault.is_in_phase;
    tally.fault_ns = fault.length_ns;
    tally.is_total = fault.share == 100;
    std::mem::take(&mut sim.core.tally)
}

fn place(id: WorkerId, role: Role) -> Worker {
    Worker {
        id,
        role,
        rank: None,
        kv: Default::default(),
        url: "http://worker.test:8000".into(),
        address: ([127, 0, 0, 1], 8000).into(),
        authority: "worker.test:8000".into(),
        path_prefix: "".into(),
        tls: None,
        models: Vec::new(),
    }
}

impl Sim {
    fn new(case: Case, config: &Config, recovery_ns_max: u64) -> Sim {
        let mut rng = Rng(case.seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let mut config = config.clone();
        if rng.below(3) == 0 {
            config.request_count_max = 16; // Some wait in line.
        }
        let roles: &[Role] = match case.is_pd {
            false => &[Role::Regular; 4],
            true => &[
                Role::Prefill,
                Role::Prefill,
                Role::Decode,
                Role::Decode,
                Role::Decode,
            ],
        };
        let books: &'static Books = Box::leak(Box::new(Books::new(SLOT_COUNT)));
        let engine = |(n, role): (usize, &Role)| {
            let id = books.open(Slot(n as u16)).expect("it is free");
            let mut tracker = Tracker::new(&config.health);
            tracker.record(Ok(()));
            Engine {
                id,
                role: *role,
                place: place(id, *role),
                tracker,
                is_ready: true,
                probes_good: 1,
                probes_bad: 0,
                progress: 0,
            }
        };
        let workers: Vec<Engine> = roles.iter().enumerate().map(engine).collect();
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 1 << 20,
            slot_count_max: SLOT_COUNT,
        };
        let (tree, mut shards) = shards::tree(1, domain.clone(), limits);
        let fault = Fault {
            victim: rng.below(workers.len() as u64) as usize,
            armed_ns: START_NS + SECOND + rng.below(2 * SECOND),
            length_ns: 300 * MS + rng.below(8 * SECOND),
            began_ns: None,
            ended_ns: None,
            was_busy: [false; 3],
            is_in_phase: false,
            share: if rng.below(3) == 0 { 60 } else { 100 },
            probes_see: rng.below(3) == 0,
            resumes: rng.below(2) == 0,
        };
        let client_count = 24 + rng.below(25) as usize;
        let core = Core {
            case,
            now_ns: START_NS,
            number: 0,
            queue: BinaryHeap::new(),
            trace: VecDeque::new(),
            books,
            gate: Box::leak(Box::new(Gate::new(1))),
            engine_of: (0..workers.len()).collect(),
            workers,
            fleet: Rc::default(),
            standings: Standings::new(config.standing, config.health.interval),
            counts: vec![Counts::default(); SLOT_COUNT],
            answers: (0..SLOT_COUNT).map(|_| AnswerStats::default()).collect(),
            bell_ns: 0,
            is_belled: false,
            is_refused: false,
            policies: Role::ALL.map(|role| Turn::new(case.seed + role as u64)),
            scratch: Vec::new(),
            chain: Vec::new(),
            chain_length: None,
            reader: Some(domain.reader(0)),
            tree,
            shard: shards.remove(0),
            batches: Batches::new(1),
            budget: RetryBudget::new(config.retry.budget_ratio),
            shunned: Shunned::default(),
            tried_at: Vec::new(),
            waiting: VecDeque::new(),
            aside: VecDeque::new(),
            ready: VecDeque::new(),
            is_roused: false,
            clients: (0..client_count).map(|_| Client::new(false)).collect(),
            conns: Vec::new(),
            idles: vec![Vec::new(); SLOT_COUNT],
            adopted: Vec::new(),
            legs: Vec::new(),
            blocks: Vec::new(),
            fault,
            tally: Tally::default(),
            is_stopping: false,
            config: Rc::new(config),
            rng,
        };
        let mut sim = Sim {
            core,
            sessions: (0..client_count).map(|_| Session::new()).collect(),
            recovery_ns_max,
        };
        sim.begin(client_count);
        sim
    }

    fn begin(&mut self, client_count: usize) {
        self.publish();
        for client in 0..client_count {
            self.core.clients[client].closed = Some(Closed::Finished);
            let ns = self.core.rng.below(500 * MS);
            self.core.after(ns, Event::Ask(client));
        }
        for worker in 0..self.core.workers.len() {
            let ns = self.core.rng.below(SECOND);
            self.core.after(ns, Event::Probe(worker, true));
        }
        self.core.after(TICK_NS, Event::Tick);
    }

    fn run(&mut self) {
        while let Some(Reverse(due)) = self.core.queue.pop() {
            self.core.now_ns = due.at_ns;
            self.core.tally.events += 1;
            self.handle(due.event);
            self.let_in();
            self.settle_adopted();
            self.look_at_fault();
            if self.core.is_stopping && self.core.clients.iter().all(|client| client.is_done) {
                return;
            }
            assert!(
                self.core.now_ns < START_NS + RUN_NS_MAX,
                "somebody waits for ever: {:?}",
                self.unfinished()
            );
        }
        panic!("nothing will ever happen again: {:?}", self.unfinished());
    }

    fn unfinished(&self) -> Vec<usize> {
        let clients = self.core.clients.iter().enumerate();
        clients
            .filter(|(_, c)| !c.is_done)
            .map(|(n, _)| n)
            .collect()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Ask(client) => self.ask(client),
            Event::Rest(client, connection, bytes) => {
                let me = &self.core.clients[client];
                if me.connection == connection && me.closed.is_none() {
                    self.with(client, |session, hands| {
                        session.on_client_bytes(hands, bytes)
                    });
                }
            }
            Event::Timer(client) => self.timer(client),
            Event::Connect(id) => self.connect(id),
            Event::Sent(id) => self.sent(id),
            Event::Arrive(id, bytes) => self.core.arrive(id, bytes),
            Event::Step(id) => self.core.step(id),
            Event::Deliver(id, what) => self.deliver(id, what),
            Event::CloseIdle(id) => {
                if self.core.conns[id].side == Side::Idle {
                    self.core.end_by_worker(id, false);
                }
            }
            Event::Tick => {
                self.judge();
                self.core.is_roused = true; // Those aside look four times a second.
                self.core.after(TICK_NS, Event::Tick);
            }
            Event::Bell => {
                self.core.is_belled = false;
                self.core.bell_ns = self.core.now_ns + JUDGE_PAUSE_NS;
                self.judge();
                if std::mem::take(&mut self.core.is_refused) {
                    for worker in 0..self.core.workers.len() {
                        self.core.after(MS, Event::Probe(worker, false));
                    }
                }
            }
            Event::Probe(worker, is_regular) => self.probe(worker, is_regular),
            Event::Probed(worker, outcome) => self.probed(worker, outcome),
            Event::FaultEnd => self.end_fault(),
        }
    }

    /// Lets a session have an event, then sees what became of its request.
    fn with(&mut self, client: usize, event: impl FnOnce(&mut Session, &mut Hands<'_>)) {
        let mut session = std::mem::take(&mut self.sessions[client]);
        let mut hands = Hands {
            core: &mut self.core,
            client,
        };
        event(&mut session, &mut hands);
        self.sessions[client] = session;
        self.settle(client);
    }

    fn let_in(&mut self) {
        loop {
            if std::mem::take(&mut self.core.is_roused) {
                for _ in 0..self.core.aside.len() {
                    let limit = self.core.config.request_count_max;
                    let Some(permit) = self.core.gate.resume(limit) else {
                        break;
                    };
                    let client = self.core.aside.pop_front().expect("it waits");
                    self.with(client, |session, hands| session.on_turn(hands, permit));
                }
            }
            let Some((client, permit)) = self.core.ready.pop_front() else {
                return;
            };
            self.with(client, |session, hands| session.on_turn(hands, permit));
        }
    }

    fn settle_adopted(&mut self) {
        for session in std::mem::take(&mut self.core.adopted) {
            let client = self.core.clients.len();
            self.core.clients.push(Client::new(true));
            self.core.clients[client].is_done = false;
            self.sessions.push(session);
            self.with(client, |session, hands| session.begin(hands));
        }
    }

    // ---- clients ----

    fn ask(&mut self, client: usize) {
        let core = &mut self.core;
        if core.is_stopping {
            core.clients[client].is_done = true;
            return;
        }
        let is_new = core.clients[client].closed.take().is_some();
        let streams = core.chance(60);
        let is_split = core.chance(20);
        let group = core.rng.below(4);
        let is_new_talk = core.chance(30);
        let me = &mut core.clients[client];
        me.question_count += 1;
        me.handed = None;
        me.talk += u64::from(is_new_talk);
        let talk = me.talk;
        let tag = format!("c{client}.{}", me.question_count);
        me.asked = Some(Asked {
            tag: tag.clone(),
            streams,
            at_ns: core.now_ns,
        });
        // A system prompt, and a conversation that begins anew now and then.
        let prompt = format!("group {group} ").repeat(16) + &format!("{client}.{talk} ").repeat(50);
        let body = format!(
            "{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}#{tag}#\"}}],\"stream\":{streams}}}"
        );
        let mut wire = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nX-Tag: {tag}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes();
        let rest = is_split.then(|| wire.split_off(wire.len() / 2));
        if is_new {
            let me = &mut core.clients[client];
            me.connection += 1;
            me.deadline_ns = u64::MAX;
            self.sessions[client] = Session::new();
            self.with(client, |session, hands| session.begin(hands));
        }
        let connection = self.core.clients[client].connection;
        if let Some(rest) = rest {
            let ns = self.core.latency();
            self.core.after(ns, Event::Rest(client, connection, rest));
        }
        self.with(client, |session, hands| {
            session.on_client_bytes(hands, wire)
        });
    }

    fn timer(&mut self, client: usize) {
        let me = &mut self.core.clients[client];
        me.timer_ns = u64::MAX;
        if me.closed.is_some() {
            return;
        }
        if me.deadline_ns > self.core.now_ns {
            return self.core.arm(client);
        }
        me.deadline_ns = u64::MAX;
        self.core.note("deadline of client", client, 0);
        self.with(client, |session, hands| session.on_deadline(hands));
    }

    /// An answer that is complete, or will not become so, is looked at, and the next question planned.
    fn settle(&mut self, client: usize) {
        let me = &self.core.clients[client];
        let is_over = me.closed.is_some();
        if is_over {
            assert!(me.leg.is_none(), "a leg serves nobody");
        }
        if me.is_adopted {
            self.core.clients[client].is_done = is_over;
            return;
        }
        let is_answered = is_over || (self.sessions[client].is_idle() && !me.out.is_empty());
        if me.asked.is_none() || !is_answered {
            return;
        }
        let me = &mut self.core.clients[client];
        let asked = me.asked.take().expect("it has asked");
        let out = std::mem::take(&mut me.out);
        let closed = me.closed;
        assert!(me.leg.is_none(), "a leg serves nobody");
        self.core.check_answer(client, &asked, &out, closed);
        let ns = 30 * MS + self.core.rng.below(600 * MS);
        self.core.after(ns, Event::Ask(client));
    }

    // ---- connections ----

    fn connect(&mut self, id: usize) {
        let conn = &self.core.conns[id];
        if conn.is_closed {
            return;
        }
        let client = conn.client.expect("nobody keeps it while it connects");
        match self.core.kind_on(conn.worker) {
            Some(Kind::BlackHole) => {}
            Some(Kind::Refused | Kind::Killed) => {
                self.core.conns[id].has_ended = true;
                self.core.note("refused, client", client, id);
                self.with(client, |session, hands| session.on_worker_end(hands, true));
            }
            _ => {
                self.core.conns[id].side = Side::Idle;
                self.with(client, |session, hands| session.on_connected(hands));
            }
        }
    }

    fn sent(&mut self, id: usize) {
        let conn = &mut self.core.conns[id];
        let message = conn.flight.take().expect("it was with the ring");
        if let Some(client) = conn.client {
            self.with(client, |session, hands| {
                session.on_request_sent(hands, message)
            });
        }
    }

    fn deliver(&mut self, id: usize, what: Result<Vec<u8>, bool>) {
        let conn = &mut self.core.conns[id];
        if conn.is_closed || conn.is_broken || conn.has_ended {
            return;
        }
        conn.has_ended = what.is_err();
        let Some(client) = conn.client else {
            return self.core.close(id); // An idle connection has nothing to say.
        };
        if let Err(failed) = what {
            self.core
                .note("worker's connection ends, client", client, failed.into());
        }
        self.with(client, |session, hands| match what {
            Ok(bytes) => session.on_worker_bytes(hands, bytes),
            Err(failed) => session.on_worker_end(hands, failed),
        });
    }

    // ---- the control plane ----

    fn publish(&mut self) {
        let core = &mut self.core;
        let mut exceptions = Exceptions::default();
        for worker in &core.workers {
            let slot = worker.id.slot;
            match core.standings.standing(worker.id) {
                Standing::Out { .. } => exceptions.out.push(slot),
                Standing::Trial { load_max, .. } => {
                    exceptions.out.push(slot);
                    exceptions.trials.push(Trial { slot, load_max });
                }
                Standing::Good { share } if share < 1.0 => {
                    exceptions.easing.push((slot, (share * 100.0) as u8));
                }
                Standing::Good { .. } => {}
            }
        }
        let ready = core.workers.iter().filter(|worker| worker.is_ready);
        let eligible = ready.map(|worker| worker.place.clone()).collect();
        let count = core.workers.len();
        core.fleet = Rc::new(Fleet::new(
            eligible,
            &exceptions,
            Default::default(),
            count,
            [false; 3],
        ));
        core.is_roused = true;
    }

    fn judge(&mut self) {
        let core = &mut self.core;
        let observe = |worker: &Engine| {
            let (load, counts) = (
                core.books.load(worker.id.slot),
                core.counts[worker.id.slot.index()],
            );
            let answers = &core.answers[worker.id.slot.index()];
            let seen = Observation {
                trial_answers: answers.trial_count.value(),
                trial_answer_log: answers.trial_log.value(),
                answers: answers.count.value(),
                answer_ns: answers.ns.value(),
                answer_log: answers.log.value(),
                answer_log_square: answers.log_square.value(),
                is_ready: worker.is_ready,
                probes_good: worker.probes_good,
                probes_bad: worker.probes_bad,
                trials_good: counts.trials_good,
                trials_bad: counts.trials_bad,
                refused: counts.refused,
                failures: counts.failures,
                successes: counts.successes,
                pieces: counts.pieces,
                completions: counts.completions,
                busy: counts.busy,
                in_flight: load.in_flight,
                waiting: load.waiting,
                waiting_bytes: load.waiting_bytes,
                chosen: counts.chosen,
                ..Observation::new(worker.role)
            };
            (worker.id, seen)
        };
        let observations: Vec<(WorkerId, Observation)> = core.workers.iter().map(observe).collect();
        let now = Duration::from_nanos(core.now_ns - START_NS);
        let changed = core.standings.judge(now, &observations);
        if changed.is_empty() {
            return;
        }
        for (id, standing) in &changed {
            self.look_at_standing(*id, *standing);
        }
        self.publish();
        self.check_j1();
        for (id, standing) in changed {
            if standing == (Standing::Out { why: Why::Stalled }) {
                self.move_from(id.slot);
            }
        }
    }

    /// Nobody but the victim is ever out, and the victim only for what is its doing.
    fn look_at_standing(&mut self, id: WorkerId, standing: Standing) {
        let core = &mut self.core;
        let worker = core.engine_of[id.slot.index()];
        core.note(name_of(standing), worker, 0);
        let (Standing::Out { why } | Standing::Trial { why, .. }) = standing else {
            return;
        };
        // Where a peer has nothing to do, silence of all looks like silence of one.
        let is_alone = core.case.kind == Kind::AllSilent
            && why == Why::Stalled
            && !core.fault.was_busy[core.workers[worker].role as usize];
        let is_guilty = worker == core.fault.victim && !core.case.kind.is_innocent();
        assert!(
            is_guilty || is_alone,
            "worker {worker} is well, and {}",
            why.label()
        );
        let tally = &mut core.tally;
        if matches!(standing, Standing::Out { .. }) {
            tally.outs += 1;
            if !tally.whys.contains(&why.label()) {
                tally.whys.push(why.label());
            }
            let since = core.now_ns - core.fault.began_ns.expect("a fault has begun");
            tally.first_out_ns = tally.first_out_ns.or(Some(since));
        }
    }

    fn check_j1(&self) {
        let core = &self.core;
        for role in Role::ALL {
            let mut of_role = core.workers.iter().filter(|w| w.role == role && w.is_ready);
            let has_any = of_role.clone().next().is_some();
            let has_good =
                of_role.any(|w| matches!(core.standings.standing(w.id), Standing::Good { .. }));
            assert!(has_good || !has_any, "J1: no {role:?} worker is good");
        }
    }

    fn move_from(&mut self, slot: Slot) {
        for client in 0..self.core.clients.len() {
            let leg = self.core.clients[client].leg;
            if leg.is_some_and(|leg| self.core.conns[leg].slot == slot) {
                self.core.tally.moved += 1;
                self.with(client, |session, hands| session.on_worker_stalled(hands));
            }
        }
    }

    fn probe(&mut self, worker: usize, is_regular: bool) {
        let core = &mut self.core;
        let sees = core.fault.probes_see;
        let kind = core.kind_on(worker).filter(|kind| !kind.is_of_all());
        let outcome = kind.map_or(Ok(()), |kind| kind.probe(sees));
        let ns = match outcome {
            Err(Failure::Timeout) => core.config.health.timeout.as_nanos() as u64,
            _ => core.latency() * 2,
        };
        core.after(ns, Event::Probed(worker, outcome));
        if is_regular {
            let interval = core.config.health.interval.as_nanos() as u64;
            let ns = interval / 20 * 19 + core.rng.below(interval / 10) + ns;
            core.after(ns, Event::Probe(worker, true));
        }
    }

    /// As `control::registry` applies it.
    fn probed(&mut self, worker: usize, outcome: Result<(), Failure>) {
        let core = &mut self.core;
        let engine = &mut core.workers[worker];
        let counts = core.counts[engine.id.slot.index()];
        let progress = counts.pieces + counts.completions;
        let has_progressed = std::mem::replace(&mut engine.progress, progress) != progress;
        let outcome = match outcome {
            Err(Failure::Timeout) if has_progressed && engine.is_ready => Ok(()),
            outcome => outcome,
        };
        match outcome {
            Ok(()) => engine.probes_good += 1,
            Err(_) => engine.probes_bad += 1,
        }
        match engine.tracker.record(outcome) {
            Verdict::Same => return,
            Verdict::Unhealthy => engine.is_ready = false,
            Verdict::Ready { is_new_life } => {
                engine.is_ready = true;
                if is_new_life {
                    self.renew(worker);
                }
            }
        }
        let is_ready = self.core.workers[worker].is_ready;
        self.core
            .note("probes: worker is ready", worker, is_ready.into());
        self.publish();
    }

    /// Another process: another slot.
    fn renew(&mut self, worker: usize) {
        let core = &mut self.core;
        let slot = Slot(core.engine_of.len() as u16);
        core.engine_of.push(worker);
        let id = core.books.open(slot).expect("it is free");
        let engine = &mut core.workers[worker];
        let old = std::mem::replace(&mut engine.id, id);
        engine.place = place(id, engine.role);
        self.publish();
        let core = &mut self.core;
        core.books.close(old);
        core.standings.remove(old);
        for id in std::mem::take(&mut core.idles[old.slot.index()]) {
            core.close(id);
        }
    }

    // ---- the fault ----

    fn look_at_fault(&mut self) {
        let core = &self.core;
        let fault = &core.fault;
        if let Some(ended_ns) = fault.ended_ns {
            if core.is_stopping {
                return;
            }
            assert!(
                core.tally.served > 0 || core.now_ns < ended_ns + self.recovery_ns_max,
                "the victim serves nobody, so long after the fault"
            );
            let has_settled = core.now_ns > ended_ns + SECOND;
            self.core.is_stopping = has_settled && core.tally.served >= 3;
            return;
        }
        if fault.began_ns.is_some() || core.now_ns < fault.armed_ns {
            return;
        }
        let in_phase = core.client_in_phase();
        if in_phase.is_some() || core.now_ns > fault.armed_ns + 3 * SECOND {
            self.core.begin_fault(in_phase.flatten());
        }
    }

    fn end_fault(&mut self) {
        let core = &mut self.core;
        core.fault.ended_ns = Some(core.now_ns);
        core.note("the fault ends", core.fault.victim, 0);
        let frozen: Vec<usize> = (0..core.conns.len())
            .filter(|id| core.conns[*id].side == Side::Frozen)
            .collect();
        for id in frozen {
            let script = &core.conns[id].script;
            if core.fault.resumes || core.case.kind == Kind::AllSilent {
                core.conns[id].side = Side::Working;
                core.after(MS, Event::Step(id));
            } else if script.sent < script.head_bytes {
                core.end_by_worker(id, true);
            }
        }
    }

    // ---- the end ----

    fn check_end(&self) {
        let core = &self.core;
        for slot in 0..core.engine_of.len() as u16 {
            let load = core.books.load(Slot(slot));
            let left = (load.in_flight, load.waiting, load.active);
            assert_eq!(left, (0, 0, 0), "E1: counts of nobody in slot {slot}");
            assert_eq!((load.waiting_bytes, load.active_bytes), (0, 0));
        }
        assert_eq!(core.books.underflow_count(), 0, "B2");
        assert_eq!(core.gate.counts(), (0, 0), "Q1: permits of nobody");
        let tally = &core.tally;
        assert_eq!(tally.orphans, tally.orphans_ended, "P2: orphans");
        assert!(
            tally.blocks_given <= tally.handovers
                && tally.handovers <= tally.blocks_given + tally.lost,
            "P2: hand-overs neither given nor lost"
        );
    }
}

fn name_of(standing: Standing) -> &'static str {
    match standing {
        Standing::Good { share } if share < 1.0 => "eased in: worker",
        Standing::Good { .. } => "good: worker",
        Standing::Out { why: Why::Failing } => "out, failing: worker",
        Standing::Out { why: Why::Refused } => "out, refused: worker",
        Standing::Out { why: Why::Stalled } => "out, stalled: worker",
        Standing::Out { why: Why::Degraded } => "out, degraded: worker",
        Standing::Trial { .. } => "on trial: worker",
    }
}

// ---- workers ----

impl Core {
    /// The worker ends a connection: by a reset, or cleanly.
    fn end_by_worker(&mut self, id: usize, is_reset: bool) {
        self.conns[id].side = Side::Closed;
        self.say(id, Err(is_reset));
    }

    fn say(&mut self, id: usize, what: Result<Vec<u8>, bool>) {
        let ns = self.latency();
        let conn = &mut self.conns[id];
        conn.arrival_ns = (self.now_ns + ns).max(conn.arrival_ns + 1);
        let at_ns = conn.arrival_ns;
        self.at(at_ns, Event::Deliver(id, what));
    }

    /// Says the answer up to there.
    fn say_until(&mut self, id: usize, to: usize) {
        let script = &mut self.conns[id].script;
        if to > script.sent {
            let bytes = script.wire[script.sent..to].to_vec();
            script.sent = to;
            self.say(id, Ok(bytes));
        }
    }

    fn step_after(&mut self, id: usize, ms: u64) {
        let factor = if self.is_slow(self.conns[id].worker) {
            10
        } else {
            1
        };
        self.after(ms * MS * factor, Event::Step(id));
    }

    fn arrive(&mut self, id: usize, bytes: Vec<u8>) {
        let conn = &mut self.conns[id];
        if conn.side != Side::Idle {
            assert_eq!(conn.side, Side::Closed, "one request at a time");
            return;
        }
        conn.side = Side::Working;
        conn.has_arrived = true;
        conn.began_ns = self.now_ns;
        let (worker, role) = (conn.worker, self.workers[conn.worker].role);
        let (request, len) = read_message(&bytes, false, false).expect("a whole head");
        assert!(request.is_whole && len == bytes.len(), "one whole request");
        let body = String::from_utf8(request.body).expect("text");
        let tag = body.split('#').nth(1).expect("a tag").to_string();
        assert_eq!(field(&request.head, "x-tag"), [&*tag], "two requests mixed");
        if let Some(number) = blocks_in(body.as_bytes()) {
            let blocks = &mut self.blocks[number];
            assert_eq!(
                (role, &blocks.tag),
                (Role::Decode, &tag),
                "another's blocks"
            );
            assert_eq!(self.workers[blocks.worker].role, Role::Prefill);
            let was_fetched = std::mem::replace(&mut blocks.is_fetched, true);
            assert!(!was_fetched, "P1: fetched twice");
        }
        let leg = self.legs.len();
        self.legs.push((tag.clone(), worker));
        if role == Role::Prefill {
            self.blocks.push(Blocks {
                tag: tag.clone(),
                worker,
                is_given: false,
                is_fetched: false,
            });
        }
        let said = Said {
            tag: &tag,
            leg,
            role,
            streams: body.contains("\"stream\":true"),
            count: 3 + self.rng.below(8) as usize,
            blocks: self.blocks.len().saturating_sub(1),
        };
        let mut script = Script::good(&said, &mut self.rng);
        let is_struck = self.chance(self.fault.share);
        match self.kind_on(worker).filter(|_| is_struck) {
            Some(kind) => self.replace(&mut script, kind, &said),
            None => script.is_spared = self.fault.is_on() && !self.case.kind.is_of_all(),
        }
        let first_ms = script.first_ms;
        self.conns[id].script = script;
        self.step_after(id, first_ms);
    }

    /// Faults that are in what is said, not in how far it comes.
    fn replace(&mut self, script: &mut Script, kind: Kind, said: &Said<'_>) {
        let rng = &mut self.rng;
        let other = match kind {
            Kind::Status500 => Script::of_status(500, "", rng),
            Kind::Status502 => Script::of_status(502, "", rng),
            Kind::Status503 => Script::of_status(503, "", rng),
            Kind::Paused503 => Script::of_status(503, "Retry-After: 2\r\n", rng),
            Kind::Status429 => Script::of_status(429, "Retry-After: 1\r\n", rng),
            Kind::BadChunk => Script::of_bad_chunk(said, rng),
            _ => return,
        };
        *script = Script {
            first_ms: script.first_ms,
            gap_ms: script.gap_ms,
            is_spared: true,
            ..other
        };
    }

    fn step(&mut self, id: usize) {
        if self.conns[id].side != Side::Working || self.is_struck(id) {
            return;
        }
        let script = &self.conns[id].script;
        let (to, gap_ms) = (script.next_end(), script.gap_ms);
        self.say_until(id, to);
        let conn = &mut self.conns[id];
        let script = &conn.script;
        if !script.is_done() {
            let ms = if to < script.head_bytes { 2 } else { gap_ms };
            return self.step_after(id, ms);
        }
        conn.side = Side::Idle;
        let (worker, began_ns) = (conn.worker, conn.began_ns);
        if worker == self.fault.victim && self.fault.ended_ns.is_some_and(|at| at <= began_ns) {
            self.tally.served += 1;
            self.tally.served_ns = self
                .tally
                .served_ns
                .or(Some(self.now_ns - self.fault.ended_ns.unwrap_or(0)));
        }
        if self.kind_on(worker) == Some(Kind::IdleClosed) {
            let ns = self.rng.below(30 * MS);
            self.after(ns, Event::CloseIdle(id));
        }
    }

    /// What the fault does to an answer just where it is.
    fn is_struck(&mut self, id: usize) -> bool {
        let conn = &self.conns[id];
        let Some(kind) = self.kind_on(conn.worker).filter(|_| !conn.script.is_spared) else {
            return false;
        };
        let script = &conn.script;
        let (sent, head, end) = (script.sent, script.head_bytes, script.next_end());
        let in_body = sent.max(head) + (script.wire.len() - sent.max(head)) / 2;
        let to = end.min(in_body);
        match kind {
            Kind::ResetEarly if sent == 0 => self.end_by_worker(id, true),
            Kind::ResetInHead if sent < head => {
                self.say_until(id, sent.max(head / 2));
                self.end_by_worker(id, true);
            }
            Kind::ResetInBody if end > head => {
                self.say_until(id, to);
                self.end_by_worker(id, true);
            }
            Kind::EndInBody if end > head => {
                self.say_until(id, to);
                self.end_by_worker(id, false);
            }
            Kind::Hang if sent == 0 => self.conns[id].side = Side::Frozen,
            Kind::AllSilent => self.conns[id].side = Side::Frozen,
            Kind::Silent if end > head => {
                self.say_until(id, head);
                self.conns[id].side = Side::Frozen;
            }
            Kind::BadHead if sent == 0 => self.say_nonsense(id, b"HTTP/1.1 20 OK\r\n\r\n"),
            Kind::BadChunk if script.is_chunked && sent > head => self.say_nonsense(id, b"ZZ\r\n"),
            _ => return false,
        }
        true
    }

    fn say_nonsense(&mut self, id: usize, bytes: &[u8]) {
        self.say(id, Ok(bytes.to_vec()));
        self.conns[id].script = Script::default();
        self.conns[id].side = Side::Frozen;
    }

    // ---- the fault ----

    /// A client whose request is in the phase for which the fault waits; `Some(None)`: it is about an idle connection.
    fn client_in_phase(&self) -> Option<Option<usize>> {
        if self.case.phase == Phase::Idle {
            let idles = &self.idles[self.victim_slot().index()];
            return (!idles.is_empty()).then_some(None);
        }
        let found = self
            .clients
            .iter()
            .position(|client| self.is_in_phase(client));
        found.map(Some)
    }

    fn is_in_phase(&self, client: &Client) -> bool {
        let Some(conn) = client.leg.map(|leg| &self.conns[leg]) else {
            return false;
        };
        let is_victims = conn.worker == self.fault.victim;
        let script = &conn.script;
        let is_working = is_victims && conn.side == Side::Working;
        match self.case.phase {
            Phase::Idle => false,
            Phase::Connecting => is_victims && conn.side == Side::Connecting,
            Phase::Sending => is_victims && conn.flight.is_some(),
            Phase::Waiting => is_working && script.sent == 0,
            Phase::Head => is_working && (1..script.head_bytes).contains(&script.sent),
            Phase::Body => is_working && script.sent >= script.head_bytes,
            Phase::BetweenLegs => {
                let is_between = client.handed.is_some() && !conn.has_arrived;
                is_between && (is_victims || client.handed == Some(self.fault.victim))
            }
        }
    }

    fn begin_fault(&mut self, client: Option<usize>) {
        let (victim, kind) = (self.fault.victim, self.case.kind);
        self.note(
            "the fault begins: worker",
            victim,
            client.unwrap_or(usize::MAX),
        );
        self.fault.began_ns = Some(self.now_ns);
        self.fault.is_in_phase = client.is_some() || self.case.phase == Phase::Idle;
        self.fault.was_busy = Role::ALL.map(|role| {
            let mut of_role = self.workers.iter().filter(|worker| worker.role == role);
            of_role.all(|worker| self.books.in_flight(worker.id.slot) > 0)
        });
        let ns = self.fault.length_ns;
        self.after(ns, Event::FaultEnd);
        let leg = client.and_then(|client| self.clients[client].leg);
        let leg = leg.filter(|leg| self.conns[*leg].worker == victim);
        let is_up = |conn: &Conn| !matches!(conn.side, Side::Connecting | Side::Closed);
        for id in 0..self.conns.len() {
            let conn = &self.conns[id];
            if conn.worker != victim || !is_up(conn) {
                continue;
            }
            let is_hit = leg == Some(id);
            let is_idle = conn.side == Side::Idle && conn.client.is_none();
            match kind {
                Kind::Killed => self.end_by_worker(id, true),
                Kind::IdleClosed if is_idle => self.end_by_worker(id, false),
                _ if kind.breaks() && is_hit => self.end_by_worker(id, true),
                _ if kind.breaks() && is_idle && self.case.phase == Phase::Idle => {
                    self.end_by_worker(id, true);
                }
                Kind::EndInBody if is_hit && conn.script.sent > 0 => self.end_by_worker(id, false),
                Kind::Hang | Kind::Silent if is_hit && conn.side == Side::Working => {
                    self.conns[id].side = Side::Frozen;
                }
                _ => {}
            }
        }
    }

    // ---- what clients see ----

    fn check_answer(&mut self, client: usize, asked: &Asked, out: &[u8], closed: Option<Closed>) {
        let took = self.now_ns - asked.at_ns;
        self.tally.answers += 1;
        self.tally.worst_ns = self.tally.worst_ns.max(took);
        assert!(took <= REQUEST_NS_MAX, "client {client} waited {took} ns");
        let (answer, len) = read_message(out, false, true)
            .unwrap_or_else(|| panic!("client {client}: no answer at all, {closed:?}"));
        let status = status(&answer);
        self.note("answer to client", client, status.into());
        if status != 200 {
            let body = String::from_utf8_lossy(&answer.body);
            let allowed = self.case.kind.refusal(self.case.is_pd);
            let is_allowed = allowed.is_some_and(|code| body.contains(code));
            assert!(
                is_allowed && self.fault.began_ns.is_some(),
                "client {client} got {status}: {body}"
            );
            self.tally.refused += 1;
            return;
        }
        assert_eq!(len, out.len(), "client {client}: bytes behind an answer");
        let types = field(&answer.head, "content-type");
        assert_eq!(types, [mime(asked.streams)], "two heads mixed");
        let leg = check_content(&answer.body, &asked.tag, asked.streams, answer.is_whole);
        let told = leg.map(|leg| &self.legs[leg]);
        if let Some((tag, _)) = told {
            assert_eq!(*tag, asked.tag, "client {client}: another request's answer");
        }
        if answer.is_whole {
            assert!(leg.is_some(), "a whole answer has content");
            return;
        }
        self.tally.cut += 1;
        let is_victims = told.is_none_or(|(_, worker)| *worker == self.fault.victim);
        assert!(
            closed.is_some() && is_victims && self.case.kind.may_cut(),
            "client {client}: cut, {closed:?}, by {told:?}"
        );
        // Behind a whole chunk there is room for a last event.
        let ends_in_chunk = !out.ends_with(b"\n\n\r\n") && !out.ends_with(b"\r\n\r\n");
        if asked.streams && !ends_in_chunk {
            let says = memchr::memmem::find(&answer.body, b"worker_broke_off").is_some();
            assert!(says, "client {client}: a stream of events ends in silence");
        }
    }
}
