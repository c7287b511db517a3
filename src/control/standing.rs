//! Which workers get requests although, or because, they fail, stall or degrade. Pure: no I/O, no clock. Owned by the
//! control thread, which brings it counters every tick; probes are judged elsewhere (`health`), this judges the rest.
//!
//! A worker is good, out, or on trial. One cause at a time: the first that took it out says how it returns.
//!
//! | why | goes out | is tried | returns |
//! |---|---|---|---|
//! | failing | failures reach the threshold and are half of a recent stretch | after the time-out | good trials |
//! | refused | one refused connection | nothing heard of probes for their interval | a good probe, a good trial |
//! | stalled | silent with work in flight, its peers are not | progress, or a pause | a good trial, real progress |
//! | degraded | pieces per stream or answers far below the peers' | a pause | trials as fast as peers, or its streams |
//!
//! Invariants (of the ready workers of a role, its pool):
//! - J1 one is always good; at most `ejected_share_max` are not, those refused aside.
//! - J2 4xx, 429 and 503 change nothing; neither do results of requests that began before an opening, once it is tried.
//! - J3 a pool that is slow, failing or silent as a whole loses nobody to stalls or degradation.
//! - J4 every way out has a way back: no state waits for something that an idle or recovered worker cannot bring.
//!
//! Nothing here can fail. Counters that go back begin a new life.

mod answers;
mod evidence;

use std::time::Duration;

use crate::config::StandingConfig;
use crate::route::Role;
use answers::{Answers, Trials};
use evidence::{Failures, Pool, Rhythm, Speed, Work};

/// Longest time between two ticks that counts as silence: when this thread slept, so may have the cores. Less than the
/// shortest stall, so that no single tick makes one.
const STEP_MAX: Duration = Duration::from_millis(400);
/// First pause before a stalled or degraded worker is tried; it doubles up to the second.
const PAUSE_MIN: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time of a trial, besides what its pool's requests usually take, before another may begin.
const TRIAL_TIME: Duration = Duration::from_secs(5);
/// Ticks with progress after which a stall is over without a trial.
const PROGRESS_TICKS: u32 = 4;
/// Share after a return, of 1.
const SHARE_MIN: f32 = 0.1;

/// What is known of a worker now. Counters are sums over cores, monotonic within a life. To be read in the order in
/// which they stand here, so that a trial that ends meanwhile counts as running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Its pool.
    pub role: Role,
    /// A number for the models it serves: how long answers take is compared only where these are the same.
    pub models: u64,
    /// Whether it may get requests, as far as probes and those who found it say.
    pub is_ready: bool,
    /// It may not only because they say so: its return is that of a worker that is well.
    pub is_resting: bool,
    /// Good probes.
    pub probes_good: u64,
    /// Failed probes.
    pub probes_bad: u64,
    /// Trial requests that ended well, counted apart from `successes`.
    pub trials_good: u64,
    /// Trial requests that failed, counted apart from `failures` and `refused`. 4xx and busy are neither.
    pub trials_bad: u64,
    /// Trials answered in one piece, and the logarithms of their waits: see `AnswerStats`.
    pub trial_answers: u64,
    /// See `trial_answers`.
    pub trial_answer_log: u64,
    /// Connections refused, failed, or reset before an answer.
    pub refused: u64,
    /// Failed attempts: those refused, time-outs, broken answers, 5xx but 503.
    pub failures: u64,
    /// Answers below 400 that ended well, and first bytes of streams.
    pub successes: u64,
    /// Pieces of answers received, heartbeats too.
    pub pieces: u64,
    /// Answers the worker ended. Not those whose client left.
    pub completions: u64,
    /// Good answers in one piece, and their waits: see `AnswerStats`.
    pub answers: u64,
    /// Sum, ns.
    pub answer_ns: u64,
    /// Sum of logarithms.
    pub answer_log: u64,
    /// Sum of their squares.
    pub answer_log_square: u64,
    /// 429 and 503 answers. They say nothing but that it is not silent.
    pub busy: u64,
    /// Requests sent and not ended.
    pub in_flight: u32,
    /// Of these, before their first byte.
    pub waiting: u32,
    /// Prompt bytes of the waiting ones.
    pub waiting_bytes: u64,
    /// Times chosen, trials included.
    pub chosen: u64,
    /// Prompt bytes sent to it that it was not said to hold.
    pub fresh_bytes: u64,
}

impl Observation {
    /// Of a worker that is ready since its first probe, and has had no request.
    pub const fn new(role: Role) -> Observation {
        Observation {
            role,
            models: 0,
            is_ready: true,
            is_resting: false,
            probes_good: 1,
            probes_bad: 0,
            trials_good: 0,
            trials_bad: 0,
            trial_answers: 0,
            trial_answer_log: 0,
            refused: 0,
            failures: 0,
            successes: 0,
            pieces: 0,
            completions: 0,
            answers: 0,
            answer_ns: 0,
            answer_log: 0,
            answer_log_square: 0,
            busy: 0,
            in_flight: 0,
            waiting: 0,
            waiting_bytes: 0,
            chosen: 0,
            fresh_bytes: 0,
        }
    }

    /// Streams between their first and last byte.
    fn active(&self) -> u32 {
        self.in_flight.saturating_sub(self.waiting)
    }

    /// Requests that the worker has. A decode seat that waits is one whose prompt is still computed elsewhere: that the
    /// decode worker says nothing of it is no silence of its own.
    fn at_work(&self) -> u32 {
        match self.role {
            Role::Decode => self.active(),
            Role::Regular | Role::Prefill => self.in_flight,
        }
    }

    fn is_of_life(&self, before: &Observation) -> bool {
        self.chosen >= before.chosen
            && self.pieces >= before.pieces
            && self.completions >= before.completions
            && self.failures >= before.failures
            && self.successes >= before.successes
            && self.answers >= before.answers
            && self.answer_ns >= before.answer_ns
            && self.answer_log >= before.answer_log
            && self.answer_log_square >= before.answer_log_square
    }
}

/// Why a worker is not good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The circuit breaker is open.
    Failing,
    /// Connections are refused.
    Refused,
    /// No progress with work in flight.
    Stalled,
    /// Progress far below its peers'.
    Degraded,
}

impl Why {
    /// For logs, metrics and the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Why::Failing => "failing",
            Why::Refused => "refused",
            Why::Stalled => "stalled",
            Why::Degraded => "degraded",
        }
    }
}

/// Whether a worker gets requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Standing {
    /// As any other.
    Good {
        /// Of its usual share, 0.1 to 1; less than 1 after a return.
        share: f32,
    },
    /// None.
    Out {
        /// The cause.
        why: Why,
    },
    /// One at a time.
    Trial {
        /// The cause.
        why: Why,
        /// A trial may begin while no more than this are in flight.
        load_max: u32,
    },
}

impl Standing {
    /// What holds of a worker never judged.
    pub const NEW: Standing = Standing::Good { share: 1.0 };

    /// In the words of circuit breakers.
    pub fn breaker(self) -> Breaker {
        match self {
            Standing::Good { .. } => Breaker::Closed,
            Standing::Out { .. } => Breaker::Open,
            Standing::Trial { .. } => Breaker::HalfOpen,
        }
    }
}

/// A standing as vllm-router's metrics have it: the number is the value of `cb_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs, reason = "each is the word it names")]
pub enum Breaker {
    Closed,
    Open,
    HalfOpen,
}

impl Breaker {
    /// All, in the order of their numbers.
    pub const ALL: [Breaker; 3] = [Breaker::Closed, Breaker::Open, Breaker::HalfOpen];

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Breaker::Closed => "closed",
            Breaker::Open => "open",
            Breaker::HalfOpen => "half_open",
        }
    }
}

/// How often a worker's standing went from one word to another: `[from][to]`.
pub type Transitions = [[u64; Breaker::ALL.len()]; Breaker::ALL.len()];

#[derive(Clone, Copy, Debug)]
enum State {
    /// `back`: when it returned, while its share grows.
    Good {
        back: Option<Duration>,
    },
    Out {
        why: Why,
        since: Duration,
    },
    Trial(Trial),
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    why: Why,
    /// It began before the pause was over, on a sign of life: that it fails says nothing of the pause.
    is_early: bool,
    load_max: u32,
    /// Counters when it began.
    good_base: u64,
    bad_base: u64,
    completions_base: u64,
    in_flight_base: u32,
    /// Counters from which running trials are told: moved on when one is overdue.
    chosen_base: u64,
    ended_base: u64,
    /// Since when the oldest trial runs, and how many had ended then.
    running: Option<(Duration, u64)>,
    progress_ticks: u32,
}

impl Trial {
    fn new(why: Why, seen: &Observation, good_base: u64, is_early: bool) -> Trial {
        Trial {
            why,
            is_early,
            load_max: seen.in_flight,
            good_base,
            bad_base: seen.trials_bad,
            completions_base: seen.completions,
            in_flight_base: seen.in_flight,
            chosen_base: seen.chosen,
            ended_base: seen.trials_good + seen.trials_bad,
            running: None,
            progress_ticks: 0,
        }
    }

    /// Sets the seat for the next trial above what is in flight besides a running one. True: a trial is overdue, and
    /// from now on counts as any other request that is stuck.
    fn follow(&mut self, seen: &Observation, now: Duration, limit: Duration) -> bool {
        let ended = seen.trials_good + seen.trials_bad;
        let begun = seen.chosen.saturating_sub(self.chosen_base);
        let running = begun
            .saturating_sub(ended.saturating_sub(self.ended_base))
            .min(u64::from(seen.in_flight)) as u32;
        self.load_max = seen.in_flight - running;
        self.running = match self.running {
            _ if running == 0 => None,
            Some((since, count)) if count == ended => Some((since, count)),
            _ => Some((now, ended)),
        };
        let is_overdue = self.running.is_some_and(|(since, _)| now - since >= limit);
        if is_overdue {
            self.chosen_base = seen.chosen;
            self.ended_base = ended;
            self.load_max = seen.in_flight;
            self.running = None;
        }
        is_overdue
    }
}

#[derive(Clone, Debug)]
struct Worker<K> {
    key: K,
    seen: Observation,
    was_ready: bool,
    /// Part of the present tick.
    is_present: bool,
    state: State,
    told: Standing,
    transitions: Transitions,
    failures: Failures,
    rhythm: Rhythm,
    speed: Speed,
    answers: Answers,
    /// Degraded by its answers in one piece: that its streams are quick does not bring it back.
    has_slow_answers: bool,
    /// Refused, and neither a success nor a good probe since.
    is_suspect: bool,
    /// Probes when it was refused, and when the last bad one was seen.
    probes_good_base: u64,
    probe_heard: Duration,
    /// Good trials when it last went out from good.
    trials_good_base: u64,
    /// The same of trials answered in one piece.
    trials_base: Trials,
    pause: Duration,
    returned: Option<Duration>,
    /// What this tick brought.
    has_refused: bool,
    has_failed: bool,
    has_progress: bool,
}

impl<K> Worker<K> {
    fn new(key: K, seen: Observation) -> Worker<K> {
        Worker {
            key,
            seen,
            was_ready: seen.is_ready,
            is_present: true,
            state: State::Good { back: None },
            told: Standing::NEW,
            transitions: Transitions::default(),
            failures: Failures::default(),
            rhythm: Rhythm::default(),
            speed: Speed::default(),
            answers: Answers::default(),
            has_slow_answers: false,
            is_suspect: false,
            probes_good_base: seen.probes_good,
            probe_heard: Duration::ZERO,
            trials_good_base: seen.trials_good,
            trials_base: Trials::of(&seen),
            pause: PAUSE_MIN,
            returned: None,
            has_refused: false,
            has_failed: false,
            has_progress: false,
        }
    }

    /// Of its pool, now.
    fn is_ready(&self) -> bool {
        self.is_present && self.seen.is_ready
    }

    fn is_good(&self) -> bool {
        matches!(self.state, State::Good { .. })
    }

    fn why(&self) -> Option<Why> {
        match self.state {
            State::Good { .. } => None,
            State::Out { why, .. } | State::Trial(Trial { why, .. }) => Some(why),
        }
    }

    /// Forgets all that was held against it.
    fn begin_life(&mut self, now: Duration) {
        self.state = State::Good { back: Some(now) };
        self.failures = Failures::default();
        self.rhythm.interrupt();
        self.speed = Speed::default();
        self.answers = Answers::default();
        self.is_suspect = false;
        self.pause = PAUSE_MIN;
        self.returned = None;
        (self.has_refused, self.has_failed, self.has_progress) = (false, false, false);
    }

    /// Takes one tick's counters.
    fn observe(
        &mut self,
        config: &StandingConfig,
        seen: &Observation,
        now: Duration,
        dt: Duration,
    ) {
        self.is_present = true;
        self.rhythm.skip_tick();
        let before = std::mem::replace(&mut self.seen, *seen);
        let is_same_life = seen.is_of_life(&before) && seen.role == before.role;
        if !seen.is_ready || !before.is_ready || !is_same_life {
            if self.was_ready {
                let was_whole = matches!(self.state, State::Good { back: None });
                self.begin_life(now);
                if was_whole && (seen.is_resting || before.is_resting) {
                    self.state = State::Good { back: None };
                }
            }
            self.was_ready |= seen.is_ready;
            return;
        }
        let refused = seen.refused.saturating_sub(before.refused);
        let failed = seen.failures.saturating_sub(before.failures);
        let succeeded = seen.successes.saturating_sub(before.successes);
        // A process that went away is one event, however many connections it had.
        let failed = failed.saturating_sub(refused);
        self.has_refused = refused > 0;
        self.has_failed = failed > 0;
        if self.is_good() {
            self.failures
                .record(now, config.breaker_window, failed, succeeded);
        }
        if seen.probes_good > before.probes_good || (succeeded > 0 && refused == 0) {
            self.is_suspect = false;
        }
        if seen.probes_bad > before.probes_bad {
            self.probe_heard = now;
        }
        let learns = self.is_good();
        let was_stalled = self.why() == Some(Why::Stalled);
        self.has_progress = self.rhythm.observe(
            &before,
            seen,
            dt.min(STEP_MAX),
            config.stall_requests_min,
            learns,
            was_stalled,
        );
        self.speed.observe(&before, seen, dt, config);
        self.answers.observe(&before, seen, dt, config);
    }

    fn go_out(&mut self, why: Why, now: Duration) {
        if self.is_good() {
            self.weigh_trials();
            let is_relapse = self.returned.is_some_and(|at| now - at < PAUSE_MAX);
            self.pause = if is_relapse { self.pause } else { PAUSE_MIN };
        }
        self.probes_good_base = self.seen.probes_good;
        self.probe_heard = now;
        self.state = State::Out { why, since: now };
    }

    /// Trials up to now count no more.
    fn weigh_trials(&mut self) {
        self.trials_good_base = self.seen.trials_good;
        self.trials_base = Trials::of(&self.seen);
    }

    /// A trial showed that nothing has changed.
    fn go_out_again(&mut self, trial: Trial, now: Duration) {
        if !trial.is_early {
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        self.go_out(trial.why, now);
    }

    fn try_out(&mut self, why: Why, good_base: u64, is_early: bool) {
        self.state = State::Trial(Trial::new(why, &self.seen, good_base, is_early));
    }

    fn come_back(&mut self, now: Duration) {
        match self.why() {
            Some(Why::Failing) => self.failures = Failures::default(),
            // What it failed belongs to the process that went away; how often it went does not.
            Some(Why::Refused) => self.failures.forget_outcomes(),
            Some(Why::Stalled | Why::Degraded) | None => {}
        }
        self.is_suspect = false;
        self.returned = Some(now);
        self.rhythm.interrupt();
        self.answers.forget();
        self.state = State::Good { back: Some(now) };
    }

    /// What trials and streams since it went out say of a degraded worker.
    fn weigh_degraded(&self, good: u64, config: &StandingConfig) -> Weight {
        let speed = self.speed.ratio();
        if !self.has_slow_answers && self.speed.is_recovered() {
            return Weight::Well;
        }
        if good > 0 && speed.is_some_and(|ratio| ratio < config.degraded_ratio) {
            return Weight::Slow;
        }
        let (threshold, base) = (config.success_threshold, &self.trials_base);
        if let Some(ratio) = self.answers.trial_ratio(&self.seen, base, threshold) {
            return match ratio {
                ratio if ratio < config.degraded_ratio => Weight::Slow,
                ratio if ratio >= config.well_ratio() => Weight::Well,
                _ => Weight::Open,
            };
        }
        // Trials of the other kind, too short to measure, or no peers to compare with: then the ends must do.
        let has_answers = self.answers.trial_ratio(&self.seen, base, 1).is_some();
        let ends_count = !has_answers && (self.has_slow_answers || speed.is_none());
        match ends_count && good >= u64::from(threshold) {
            true => Weight::Well,
            false => Weight::Open,
        }
    }

    /// Left in although it should be out: what is held against it stays known.
    fn spare(&mut self) {
        self.state = State::Good { back: None };
    }

    fn standing(&self, config: &StandingConfig, now: Duration) -> Standing {
        match self.state {
            State::Good { back: None } => Standing::NEW,
            State::Good { back: Some(at) } => Standing::Good {
                share: share_after(now - at, config.slow_start),
            },
            State::Out { why, .. } => Standing::Out { why },
            State::Trial(Trial { why, load_max, .. }) => Standing::Trial { why, load_max },
        }
    }
}

/// What trials say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    Well,
    Slow,
    /// Neither slow nor as fast as before, or too few: the next will tell.
    Open,
}

/// In tenths, so that a return is published ten times and not at each tick.
fn share_after(time: Duration, slow_start: Duration) -> f32 {
    if time >= slow_start {
        return 1.0;
    }
    let grown = SHARE_MIN + (1.0 - SHARE_MIN) * time.as_secs_f32() / slow_start.as_secs_f32();
    ((grown * 10.0).floor() / 10.0).clamp(SHARE_MIN, 1.0)
}

/// How many of a pool are how.
#[derive(Clone, Copy, Debug, Default)]
struct Census {
    ready: usize,
    good: usize,
    /// Good, and not refused lately.
    sound: usize,
    /// Not good, and not for being refused.
    ejected: usize,
}

impl Census {
    fn ejected_max(&self, config: &StandingConfig) -> usize {
        // 0.29 * 100 is 28.999...
        (self.ready as f64 * config.ejected_share_max + 1e-9) as usize
    }

    fn may_eject(&self, config: &StandingConfig) -> bool {
        self.good >= 2 && self.ejected < self.ejected_max(config)
    }
}

/// The judge of all workers.
#[derive(Clone, Debug)]
pub struct Standings<K> {
    config: StandingConfig,
    probe_interval: Duration,
    workers: Vec<Worker<K>>,
    judged: Option<Duration>,
    /// By role.
    done: [Work; 3],
}

impl<K: Copy + PartialEq> Standings<K> {
    /// Knows of no worker. `probe_interval`: the pause between two probes of a worker.
    pub fn new(config: StandingConfig, probe_interval: Duration) -> Standings<K> {
        Standings {
            config,
            probe_interval,
            workers: Vec::new(),
            judged: None,
            done: [Work::default(); 3],
        }
    }

    /// Other settings from the next tick on. Who is out for a cause that is judged no more comes back, as after a trial.
    pub fn configure(&mut self, config: StandingConfig, probe_interval: Duration) {
        (self.config, self.probe_interval) = (config, probe_interval);
        let now = self.judged.unwrap_or_default();
        for worker in &mut self.workers {
            let is_judged = match worker.why() {
                None | Some(Why::Refused) => true,
                Some(Why::Failing) => config.has_breaker,
                Some(Why::Stalled) => !config.stall_window.is_zero(),
                Some(Why::Degraded) => config.degraded_ratio > 0.0,
            };
            if !is_judged {
                worker.come_back(now);
            }
        }
    }

    /// How the worker stands since the last tick.
    pub fn standing(&self, key: K) -> Standing {
        self.workers
            .iter()
            .find(|worker| worker.key == key)
            .map_or(Standing::NEW, |worker| worker.told)
    }

    /// How often its standing has changed, since it was seen first.
    pub fn transitions(&self, key: K) -> Transitions {
        let found = self.workers.iter().find(|worker| worker.key == key);
        found.map_or(Transitions::default(), |worker| worker.transitions)
    }

    /// Forgets a worker.
    pub fn remove(&mut self, key: K) {
        self.workers.retain(|worker| worker.key != key);
    }

    /// One tick. `now`: since any fixed moment, never going back. `observations`: all registered workers, each once,
    /// best in the same order every time. Gives those whose standing has changed.
    pub fn judge(
        &mut self,
        now: Duration,
        observations: &[(K, Observation)],
    ) -> Vec<(K, Standing)> {
        let now = self.judged.map_or(now, |judged| now.max(judged));
        let dt = now - self.judged.unwrap_or(now);
        self.judged = Some(now);
        self.observe(now, dt, observations);
        for role in Role::ALL {
            self.judge_pool(role, now, dt);
        }
        let mut changed = Vec::new();
        for worker in &mut self.workers {
            let standing = worker.standing(&self.config, now);
            if standing != worker.told {
                let (from, to) = (worker.told.breaker(), standing.breaker());
                if from != to {
                    worker.transitions[from as usize][to as usize] += 1;
                }
                worker.told = standing;
                changed.push((worker.key, standing));
            }
        }
        changed
    }

    fn observe(&mut self, now: Duration, dt: Duration, observations: &[(K, Observation)]) {
        for worker in &mut self.workers {
            worker.is_present = false;
        }
        for (index, (key, seen)) in observations.iter().enumerate() {
            let is_here = |worker: &Worker<K>| worker.key == *key;
            let found = match self.workers.get(index) {
                Some(worker) if is_here(worker) => Some(index),
                _ => self.workers.iter().position(is_here),
            };
            match found {
                Some(index) => self.workers[index].observe(&self.config, seen, now, dt),
                None => self.workers.push(Worker::new(*key, *seen)),
            }
        }
    }

    fn judge_pool(&mut self, role: Role, now: Duration, dt: Duration) {
        let is_member = |worker: &Worker<K>| worker.is_ready() && worker.seen.role == role;
        let members: Vec<usize> = (0..self.workers.len())
            .filter(|&index| is_member(&self.workers[index]))
            .collect();
        if members.is_empty() {
            return;
        }
        let mut pool = Pool::new(self.done[role as usize]);
        for &index in &members {
            let worker = &self.workers[index];
            pool.add(&worker.rhythm, &worker.speed, &worker.seen, &self.config);
        }
        pool.finish();
        self.done[role as usize] = pool.done();
        for &index in &members {
            let worker = &mut self.workers[index];
            worker.rhythm.mark(&pool);
            worker
                .speed
                .compare(&worker.seen, &pool, dt.min(STEP_MAX), &self.config);
        }
        self.compare_answers(&members, &pool, role);
        for &index in &members {
            self.judge_return(index, &pool, now);
        }
        let mut census = self.census(&members);
        for &index in &members {
            self.judge_opening(index, &pool, &mut census, now);
        }
        self.spare_enough(&members);
    }

    /// Among workers that serve the same models.
    fn compare_answers(&mut self, members: &[usize], pool: &Pool, role: Role) {
        let mut kinds: Vec<u64> = members
            .iter()
            .map(|&i| self.workers[i].seen.models)
            .collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            let is_kin =
                |w: &&mut Worker<K>| w.is_ready() && w.seen.role == role && w.seen.models == kind;
            let mut kin: Vec<&mut Answers> = self
                .workers
                .iter_mut()
                .filter(is_kin)
                .map(|worker| &mut worker.answers)
                .collect();
            answers::compare(&mut kin, pool.prefill_rate(role), &self.config);
        }
    }

    fn census(&self, members: &[usize]) -> Census {
        let mut census = Census::default();
        for worker in members.iter().map(|&index| &self.workers[index]) {
            census.ready += 1;
            match worker.why() {
                None => {
                    census.good += 1;
                    census.sound += usize::from(!worker.is_suspect);
                }
                Some(Why::Refused) => {}
                Some(_) => census.ejected += 1,
            }
        }
        census
    }

    /// From out to trial, from trial to good or out.
    fn judge_return(&mut self, index: usize, pool: &Pool, now: Duration) {
        let worker = &mut self.workers[index];
        match worker.state {
            State::Good { back: Some(at) } if now - at >= self.config.slow_start => {
                worker.state = State::Good { back: None };
            }
            State::Good { .. } => {}
            State::Out { why, since } => match why {
                Why::Failing if now - since >= self.config.breaker_timeout => {
                    worker.try_out(why, worker.seen.trials_good, false);
                }
                Why::Failing => {}
                Why::Refused if worker.seen.probes_good > worker.probes_good_base => {
                    worker.come_back(now);
                }
                Why::Refused if now - worker.probe_heard > self.probe_interval.mul_f64(1.1) => {
                    worker.try_out(why, worker.seen.trials_good, false);
                }
                Why::Refused => {}
                // A trial that took longer than its limit, and ended well after all.
                Why::Stalled if worker.seen.trials_good > worker.trials_good_base => {
                    worker.come_back(now);
                }
                Why::Stalled if worker.has_progress || now - since >= worker.pause => {
                    let is_early = now - since < worker.pause;
                    worker.try_out(why, worker.seen.trials_good, is_early);
                }
                Why::Stalled => {}
                Why::Degraded if worker.speed.is_recovered() && !worker.has_slow_answers => {
                    worker.come_back(now);
                }
                Why::Degraded if now - since >= worker.pause => {
                    worker.try_out(why, worker.trials_good_base, false);
                }
                Why::Degraded => {}
            },
            State::Trial(trial) => self.judge_trial(index, trial, pool, now),
        }
    }

    fn judge_trial(&mut self, index: usize, mut trial: Trial, pool: &Pool, now: Duration) {
        let worker = &mut self.workers[index];
        let why = trial.why;
        let limit = TRIAL_TIME + pool.usual_silence(&self.config);
        let is_overdue = trial.follow(&worker.seen, now, limit);
        let good = worker.seen.trials_good.saturating_sub(trial.good_base);
        let is_bad = worker.seen.trials_bad > trial.bad_base;
        trial.progress_ticks += u32::from(worker.has_progress);
        worker.state = State::Trial(trial);
        let is_stuck = is_overdue && worker.rhythm.since_progress() >= limit;
        match why {
            Why::Failing if is_bad => worker.go_out(why, now),
            Why::Failing if good >= u64::from(self.config.success_threshold) => {
                worker.come_back(now);
            }
            Why::Failing => {}
            Why::Refused if worker.seen.probes_good > worker.probes_good_base => {
                worker.come_back(now);
            }
            Why::Refused if is_bad => worker.go_out(why, now),
            Why::Refused if good > 0 => worker.come_back(now),
            Why::Refused => {}
            Why::Stalled | Why::Degraded if is_bad || is_stuck => worker.go_out_again(trial, now),
            Why::Stalled => {
                let completions =
                    worker.seen.completions - trial.completions_base.min(worker.seen.completions);
                let is_moving = trial.progress_ticks >= PROGRESS_TICKS
                    || completions >= u64::from(trial.in_flight_base / 2).max(2);
                if good > 0 || is_moving {
                    worker.come_back(now);
                }
            }
            Why::Degraded => match worker.weigh_degraded(good, &self.config) {
                Weight::Well => worker.come_back(now),
                Weight::Slow => {
                    worker.go_out_again(trial, now);
                    worker.weigh_trials();
                }
                Weight::Open => {}
            },
        }
    }

    /// From good to out.
    fn judge_opening(&mut self, index: usize, pool: &Pool, census: &mut Census, now: Duration) {
        let config = &self.config;
        let worker = &mut self.workers[index];
        if !worker.is_good() {
            return;
        }
        if worker.has_refused {
            census.sound -= usize::from(!worker.is_suspect);
            worker.is_suspect = true;
            if census.sound == 0 {
                // Another that is refused as well is no better; `spare_enough` lets them all in.
                return;
            }
            let times = worker.failures.record_refusal(now, config.breaker_window);
            let is_failing = config.has_breaker && times >= config.failure_threshold as usize;
            let why = match is_failing && census.may_eject(config) {
                true => Why::Failing,
                false => Why::Refused,
            };
            census.good -= 1;
            census.ejected += usize::from(why == Why::Failing);
            worker.go_out(why, now);
            return;
        }
        if !census.may_eject(config) {
            return;
        }
        let is_stalled =
            !config.stall_window.is_zero() && pool.is_stalled(&worker.rhythm, &worker.seen, config);
        let why = if is_stalled {
            Why::Stalled
        } else if config.has_breaker
            && worker.has_failed
            && worker.failures.are_too_many(config.failure_threshold)
        {
            Why::Failing
        } else if worker.speed.is_degraded(config) || worker.answers.are_slow(config) {
            worker.has_slow_answers = !worker.speed.is_degraded(config);
            Why::Degraded
        } else {
            return;
        };
        census.good -= 1;
        census.sound -= usize::from(!worker.is_suspect);
        census.ejected += 1;
        worker.go_out(why, now);
    }

    /// J1, also when other workers became unready or were refused.
    fn spare_enough(&mut self, members: &[usize]) {
        let census = self.census(members);
        if census.sound == 0 {
            for &index in members {
                if self.workers[index].why() == Some(Why::Refused) {
                    self.workers[index].spare();
                }
            }
        }
        let census = self.census(members);
        let excess = census
            .ejected
            .saturating_sub(census.ejected_max(&self.config));
        let wanted = excess.max(usize::from(census.good == 0));
        if wanted == 0 {
            return;
        }
        let mut ejected: Vec<usize> = members
            .iter()
            .copied()
            .filter(|&index| !matches!(self.workers[index].why(), None | Some(Why::Refused)))
            .collect();
        // The likeliest to serve first; which of equals does not matter.
        ejected.sort_by_key(|&index| {
            let worker = &self.workers[index];
            let is_out = matches!(worker.state, State::Out { .. });
            let rank = match worker.why() {
                Some(Why::Degraded) => 0,
                Some(Why::Failing) => 1,
                _ => 2,
            };
            (is_out, rank)
        });
        for index in ejected.into_iter().take(wanted) {
            self.workers[index].spare();
        }
    }
}

#[cfg(test)]
mod tests;
