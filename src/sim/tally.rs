//! What a run counts: whole, or while a window is open that begins and ends with so many sessions done.

use std::collections::BTreeMap;

use super::agenda::{Ns, secs};

/// When to measure, by sessions done: a fleet that fills up or runs empty is not what is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Measured from the end of this many sessions on.
    pub from: usize,
    /// Until the end of this many.
    pub to: usize,
}

impl Window {
    /// All of a run.
    pub const WHOLE: Window = Window {
        from: 0,
        to: usize::MAX,
    };
}

/// One worker at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Requests in flight, as the router counts.
    pub in_flight: u32,
    /// Prompt tokens computed a second since the point before.
    pub computed_per_s: f64,
    /// Share of its KV cache that requests use, 0 to 1.
    pub kv_usage: f64,
}

/// One worker's sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerSums {
    /// Times chosen.
    pub chosen: u64,
    /// Prompt tokens sent to it, and those it had.
    pub prompt_tokens: u64,
    /// See there.
    pub cached_tokens: u64,
    /// Blocks that had to go, in all of the run.
    pub evicted: u64,
    /// Time in which it worked, in all of the run.
    pub busy: Ns,
}

/// What came of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The policy of the first leg.
    pub policy: String,
    /// Time of the window, and of the whole run.
    pub window: Ns,
    /// See there.
    pub whole: Ns,
    /// Sessions that ended in the window.
    pub sessions: u64,
    /// Requests that ended in the window.
    pub requests: u64,
    /// Requests that failed, in all of the run.
    pub failed: u64,
    /// Requests sent anew after their worker began anew, in all of the run.
    pub resent: u64,
    /// Tokens of the prompts that began in the window; those that were cached.
    pub prompt_tokens: u64,
    /// See there.
    pub cached_tokens: u64,
    /// Tokens of answers that ended in the window.
    pub output_tokens: u64,
    /// Sum over time of requests chosen for a prompt that was not computed yet.
    pub queued: f64,
    /// Seconds to the first token, sorted.
    pub first_s: Vec<f64>,
    /// Seconds of decode steps with the sequences that waited for them, sorted.
    pub steps: Vec<(f64, u64)>,
    /// Mean of the greatest share of requests over the mean share, first pool.
    pub imbalance: f64,
    /// Decisions by reason.
    pub reasons: BTreeMap<&'static str, u64>,
    /// By pool and worker.
    pub workers: Vec<Vec<WorkerSums>>,
    /// By time, pool and worker.
    pub series: Vec<(Ns, Vec<Vec<Point>>)>,
    /// When sessions ended.
    pub ends: Vec<Ns>,
    /// Times detection took a worker out: when, and its pool and place.
    pub outs: Vec<(Ns, (usize, usize))>,
    /// Too many first tokens were late, and the run was ended.
    pub is_late: bool,
    /// Events that were worked off.
    pub events: u64,
}

impl Outcome {
    /// Share of the prompts' tokens that were cached, 0 to 1: vLLM's prefix cache hit rate.
    pub fn hit_rate(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Prompt tokens computed for each session that ended.
    pub fn computed_per_session(&self) -> f64 {
        (self.prompt_tokens - self.cached_tokens) as f64 / self.sessions.max(1) as f64
    }

    /// Mean number of requests whose prompt is not computed yet, all workers together.
    pub fn queue_depth(&self) -> f64 {
        self.queued / secs(self.window).max(1e-9)
    }

    /// Sessions that ended, a minute.
    pub fn sessions_per_min(&self) -> f64 {
        self.sessions as f64 * 60.0 / secs(self.window).max(1e-9)
    }

    /// Requests that ended, a second.
    pub fn requests_per_s(&self) -> f64 {
        self.requests as f64 / secs(self.window).max(1e-9)
    }

    /// Tokens of answers, a second.
    pub fn output_per_s(&self) -> f64 {
        self.output_tokens as f64 / secs(self.window).max(1e-9)
    }

    /// A quantile (0 to 1) of the time to the first token, in seconds.
    pub fn first_quantile(&self, q: f64) -> f64 {
        let last = self.first_s.len().saturating_sub(1);
        let index = (q * last as f64).round() as usize;
        self.first_s.get(index).copied().unwrap_or(0.0)
    }

    /// A quantile of the time between two tokens, in seconds.
    pub fn step_quantile(&self, q: f64) -> f64 {
        let total: u64 = self.steps.iter().map(|(_, count)| count).sum();
        let mut left = (q * total as f64) as u64;
        for (seconds, count) in &self.steps {
            if left <= *count {
                return *seconds;
            }
            left -= count;
        }
        0.0
    }
}

/// Counts in the making.
pub struct Tally {
    window: Window,
    sessions_done: usize,
    from: Option<Ns>,
    to: Option<Ns>,
    queued: u32,
    queued_since: Ns,
    peaks: (f64, u64),
    steps: BTreeMap<u32, u64>,
    /// What it comes to.
    pub outcome: Outcome,
}

/// Steps are told apart to some 2 %.
const STEP_BUCKETS: f64 = 35.0;

impl Tally {
    /// Nothing yet; workers of pools of these sizes.
    pub fn new(policy: &str, window: Window, pools: &[usize]) -> Tally {
        let workers = pools.iter().map(|size| vec![WorkerSums::default(); *size]);
        Tally {
            window,
            sessions_done: 0,
            from: (window.from == 0).then_some(0),
            to: None,
            queued: 0,
            queued_since: 0,
            peaks: (0.0, 0),
            steps: BTreeMap::new(),
            outcome: Outcome {
                policy: policy.to_string(),
                workers: workers.collect(),
                ..Outcome::default()
            },
        }
    }

    fn is_open(&self) -> bool {
        self.from.is_some() && self.to.is_none()
    }

    /// A worker was chosen.
    pub fn chosen(&mut self, pool: usize, worker: usize, reason: &'static str) {
        if self.is_open() {
            self.outcome.workers[pool][worker].chosen += 1;
            if pool == 0 {
                *self.outcome.reasons.entry(reason).or_default() += 1;
            }
        }
    }

    /// A prompt began to be computed.
    pub fn began(&mut self, pool: usize, worker: usize, prompt: u32, cached: u32) {
        if self.is_open() {
            let (prompt, cached) = (u64::from(prompt), u64::from(cached));
            let sums = &mut self.outcome.workers[pool][worker];
            sums.prompt_tokens += prompt;
            sums.cached_tokens += cached;
            self.outcome.prompt_tokens += prompt;
            self.outcome.cached_tokens += cached;
        }
    }

    /// One more request waits for its prompt to be computed, or one less.
    pub fn queue(&mut self, now: Ns, by: i32) {
        if self.is_open() {
            let since = self.queued_since.max(self.from.unwrap_or(0));
            self.outcome.queued += f64::from(self.queued) * secs(now - since);
        }
        self.queued_since = now;
        self.queued = self.queued.saturating_add_signed(by);
    }

    /// The first token came.
    pub fn first(&mut self, seconds: f64) {
        if self.is_open() {
            self.outcome.first_s.push(seconds);
        }
    }

    /// Decode steps took so long.
    pub fn steps(&mut self, steps: impl Iterator<Item = (Ns, u64)>) {
        let is_open = self.is_open();
        for (step, count) in steps.filter(|_| is_open) {
            let bucket = (secs(step).max(1e-6) * 1e6).ln() * STEP_BUCKETS;
            *self.steps.entry(bucket as u32).or_default() += count;
        }
    }

    /// A request ended.
    pub fn request_done(&mut self, output_tokens: u32) {
        if self.is_open() {
            self.outcome.requests += 1;
            self.outcome.output_tokens += u64::from(output_tokens);
        }
    }

    /// A session ended.
    pub fn session_done(&mut self, now: Ns) {
        self.queue(now, 0);
        self.sessions_done += 1;
        self.outcome.ends.push(now);
        if self.is_open() {
            self.outcome.sessions += 1;
        }
        if self.sessions_done >= self.window.from {
            self.from.get_or_insert(now);
        }
        if self.sessions_done >= self.window.to {
            self.to.get_or_insert(now);
        }
    }

    /// How the first pool's load is spread.
    pub fn sample(&mut self, now: Ns, points: Vec<Vec<Point>>) {
        let first = points
            .first()
            .into_iter()
            .flatten()
            .map(|point| f64::from(point.in_flight));
        let (count, sum, most) = first.fold((0.0, 0.0, 0.0_f64), |(count, sum, most), load| {
            (count + 1.0, sum + load, most.max(load))
        });
        if self.is_open() && sum > 0.0 {
            self.peaks.0 += most * count / sum;
            self.peaks.1 += 1;
        }
        self.outcome.series.push((now, points));
    }

    /// The end.
    pub fn close(mut self, now: Ns) -> Outcome {
        self.queue(now, 0);
        let from = self.from.unwrap_or(now);
        let mut outcome = self.outcome;
        outcome.window = self.to.unwrap_or(now) - from;
        outcome.whole = now;
        outcome.first_s.sort_by(f64::total_cmp);
        outcome.imbalance = self.peaks.0 / self.peaks.1.max(1) as f64;
        let steps = self.steps.into_iter();
        let seconds = |bucket: u32| ((f64::from(bucket) + 0.5) / STEP_BUCKETS).exp() / 1e6;
        outcome.steps = steps
            .map(|(bucket, count)| (seconds(bucket), count))
            .collect();
        outcome
    }
}
