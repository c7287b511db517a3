//! What is held against a worker, each kind with its own memory: failures, silence, slowness; and the same of its pool,
//! to compare with.

use std::collections::VecDeque;
use std::time::Duration;

use super::Observation;
use crate::config::StandingConfig;
use crate::route::Role;

/// Buckets of the failure window.
const BUCKET_COUNT: u32 = 120;
const BUCKET_MIN: Duration = Duration::from_millis(250);

/// Shortest silence that can be a stall: two ticks.
const STALL_MIN: Duration = Duration::from_millis(500);
/// Times `--stall-window-ms` that silence seen before may stretch the window.
const STALL_STRETCH_MAX: u32 = 20;
/// Signs of progress missing that make a stall.
const MISSING_MIN: f64 = 40.0;
/// The same at the peers' present pace: more is usual before, as all may have become slower just now.
const MISSING_NOW_MIN: f64 = 15.0;
/// Times a request's usual time between two signs of progress that is no stall.
const USUAL_TIMES: f64 = 3.0;
/// Times the longest silence of the pool that is no stall.
const PEAK_TIMES: u32 = 2;
/// Longest silence that counts as usual.
const PEAK_MAX: Duration = Duration::from_secs(60);
/// Signs of progress from which on a rhythm is known.
const LEARNED_MIN: u64 = 20;
/// Half-life of rhythm and peak.
const HALF_LIFE: Duration = Duration::from_secs(30);

/// Prompt bytes that cost no time worth waiting for.
const BYTES_FREE: u64 = 8192;
/// Prompt bytes a second of a slow worker, until one was seen to be slower (about 5,000 tokens a second).
const PREFILL_RATE: f64 = 20_000.0;
/// The same where blocks are fetched, not computed.
const FETCH_RATE: f64 = 1_000_000.0;
/// Silence after which a long prompt that arrives explains nothing any more.
const BYTES_SOON: Duration = Duration::from_millis(1500);
/// Half-life of a slowness that was seen.
const RATE_HALF_LIFE: Duration = Duration::from_secs(600);
/// Slowest that is believed.
const PREFILL_RATE_MIN: f64 = 1_000.0;

/// Streams' speeds that make a median.
const PEERS_MIN: usize = 2;
/// Time above the mark after which a degraded worker is well.
const RECOVERY: Duration = Duration::from_secs(1);

fn halved(time: Duration, half_life: Duration) -> f64 {
    (-time.as_secs_f64() / half_life.as_secs_f64()).exp2()
}

/// Outcomes of the last `--cb-window-duration-secs`, in buckets.
#[derive(Clone, Debug, Default)]
pub struct Failures {
    /// (begin, failures, successes), oldest first.
    buckets: VecDeque<(Duration, u64, u64)>,
    refusals: VecDeque<Duration>,
}

impl Failures {
    /// Adds a tick's outcomes.
    pub fn record(&mut self, now: Duration, window: Duration, failures: u64, successes: u64) {
        let length = (window / BUCKET_COUNT).max(BUCKET_MIN);
        while let Some(&(begin, ..)) = self.buckets.front()
            && now - begin >= window
        {
            self.buckets.pop_front();
        }
        if failures + successes == 0 {
            return;
        }
        match self.buckets.back_mut() {
            Some((begin, f, s)) if now - *begin < length => {
                *f += failures;
                *s += successes;
            }
            _ => self.buckets.push_back((now, failures, successes)),
        }
    }

    /// Adds a time that it was refused; gives how many there were in the window.
    pub fn record_refusal(&mut self, now: Duration, window: Duration) -> usize {
        self.refusals.retain(|at| now - *at < window);
        self.refusals.push_back(now);
        self.refusals.len()
    }

    /// Whether a stretch of the window that ends now holds `threshold` failures, and they are half of it: of the whole
    /// window alone, a worker that dies after a busy minute would need as many failures as it had successes.
    pub fn are_too_many(&self, threshold: u32) -> bool {
        let (mut failures, mut successes) = (0, 0);
        self.buckets.iter().rev().any(|&(_, f, s)| {
            failures += f;
            successes += s;
            failures >= u64::from(threshold) && failures >= successes
        })
    }

    /// Leaves only the refusals.
    pub fn forget_outcomes(&mut self) {
        self.buckets.clear();
    }
}

/// Request-seconds, and the signs of progress in them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    request_seconds: f64,
    progress: f64,
}

/// How a worker's signs of progress (pieces, ends of answers) follow each other.
#[derive(Clone, Debug)]
pub struct Rhythm {
    /// Without progress, with anything in flight; and with enough in flight for a stall.
    silence: Duration,
    silence_full: Duration,
    /// Prompt bytes that were waiting when the latter began, or soon after.
    bytes: u64,
    since_progress: Duration,
    /// Request-seconds since the last progress.
    pending: f64,
    /// What the pool had done when the silence began, and this tick's part of it.
    pool_before: Work,
    tick: Work,
    /// Request-seconds and signs of progress in them, both decaying.
    busy: f64,
    progress: f64,
    progress_count: u64,
    /// Longest silence lately, decaying.
    peak: Duration,

    /// Bytes a second: half of the slowest prefill lately.
    rate: f64,
}

impl Default for Rhythm {
    fn default() -> Rhythm {
        Rhythm {
            silence: Duration::ZERO,
            silence_full: Duration::ZERO,
            bytes: 0,
            since_progress: Duration::MAX,
            pending: 0.0,
            pool_before: Work::default(),
            tick: Work::default(),
            busy: 0.0,
            progress: 0.0,
            progress_count: 0,
            peak: Duration::ZERO,

            rate: PREFILL_RATE,
        }
    }
}

impl Rhythm {
    /// Takes a tick; true: there was progress. `learns`: what happens is usual. `was_stalled`: a silence that ends now
    /// was taken for a stall; if it was short, wrongly perhaps, so it counts for the peak.
    pub fn observe(
        &mut self,
        before: &Observation,
        seen: &Observation,
        step: Duration,
        requests_min: u32,
        learns: bool,
        was_stalled: bool,
    ) -> bool {
        let progress = (seen.pieces - before.pieces) + (seen.completions - before.completions);
        let request_seconds =
            f64::from(before.at_work() + seen.at_work()) / 2.0 * step.as_secs_f64();
        self.tick = Work {
            request_seconds,
            progress: progress as f64,
        };
        self.since_progress = self.since_progress.saturating_add(step);

        self.peak = self.peak.mul_f64(halved(step, HALF_LIFE));
        self.rate = (self.rate / halved(step, RATE_HALF_LIFE)).min(PREFILL_RATE);
        if progress > 0 {
            if learns || was_stalled {
                self.learn_silence(learns);
            }
            if learns {
                let kept = halved(self.since_progress.min(HALF_LIFE), HALF_LIFE);
                self.busy = self.busy * kept + self.pending + request_seconds;
                self.progress = self.progress * kept + progress as f64;
                self.progress_count += progress;
            }

            self.since_progress = Duration::ZERO;
            self.interrupt();
            self.bytes = seen.waiting_bytes;
            return true;
        }
        // Who says that it has no room is not silent, though nothing is done.
        if seen.at_work() == 0 || seen.busy > before.busy {
            self.interrupt();
            return false;
        }
        self.pending += request_seconds;
        if before.at_work() > 0 {
            self.silence += step;
        }
        if before.at_work().min(seen.at_work()) >= requests_min {
            self.silence_full += step;
        } else {
            self.silence_full = Duration::ZERO;
            self.bytes = 0;
        }
        if self.silence_full <= BYTES_SOON {
            self.bytes = self.bytes.max(seen.waiting_bytes);
        }
        false
    }

    fn learn_silence(&mut self, learns: bool) {
        let seconds = self.silence.as_secs_f64();
        if self.bytes > BYTES_FREE && seconds >= 1.0 {
            let rate = (self.bytes - BYTES_FREE) as f64 / seconds / 2.0;
            self.rate = self.rate.min(rate.max(PREFILL_RATE_MIN));
            // Explained by the prompts, so it says nothing about the time between pieces.
            self.pending = 0.0;
            return;
        }
        // A long one that was taken for a stall was one.
        if learns || self.silence <= PEAK_MAX {
            self.peak = self.peak.max(self.silence.min(PEAK_MAX));
        }
    }

    /// The tick did not count.
    pub fn skip_tick(&mut self) {
        self.tick = Work::default();
    }

    /// Remembers where the pool stands, unless silence has begun before.
    pub fn mark(&mut self, pool: &Pool) {
        if self.silence_full.is_zero() {
            self.pool_before = pool.done;
        }
    }

    /// Silence begins anew.
    pub fn interrupt(&mut self) {
        self.silence = Duration::ZERO;
        self.silence_full = Duration::ZERO;
        self.pending = 0.0;
        self.bytes = 0;
    }

    /// Time since the last sign of progress, busy or not.
    pub fn since_progress(&self) -> Duration {
        self.since_progress
    }

    /// Seconds of one request between two signs of progress.
    fn usual(&self) -> f64 {
        if self.progress_count < LEARNED_MIN {
            return 0.0;
        }
        self.busy / self.progress
    }
}

/// Pieces a second of a worker's streams, against those of its peers.
#[derive(Clone, Debug, Default)]
pub struct Speed {
    pieces: f64,
    stream_seconds: f64,
    streams: f64,
    ratio: Option<f64>,
    below: Duration,
    above: Duration,
}

impl Speed {
    /// Takes a tick.
    pub fn observe(
        &mut self,
        before: &Observation,
        seen: &Observation,
        dt: Duration,
        config: &StandingConfig,
    ) {
        let span = Speed::span(config);
        let kept = (-dt.as_secs_f64() / span).exp();
        // An answer in one piece is no stream.
        let pieces =
            (seen.pieces - before.pieces).saturating_sub(seen.completions - before.completions);
        let streams = f64::from(before.active() + seen.active()) / 2.0;
        self.pieces = self.pieces * kept + pieces as f64;
        self.stream_seconds = self.stream_seconds * kept + streams * dt.as_secs_f64();
        self.streams = self.stream_seconds / span;
    }

    /// Seconds over which pieces are averaged.
    fn span(config: &StandingConfig) -> f64 {
        config.degraded_window.as_secs_f64() / 4.0
    }

    /// Pieces per second and stream; none with hardly a stream.
    fn rate(&self) -> Option<f64> {
        (self.streams >= 0.5).then(|| self.pieces / self.stream_seconds)
    }

    /// Compares with the peers.
    pub fn compare(
        &mut self,
        seen: &Observation,
        pool: &Pool,
        dt: Duration,
        config: &StandingConfig,
    ) {
        let own = self.rate();
        let median = own.and_then(|own| pool.median_speed_without(own));
        self.ratio = match (own, median) {
            (Some(own), Some(median)) if median > 0.0 => Some(own / median),
            _ => None,
        };

        let is_enough = seen.active() >= config.degraded_requests_min;
        self.below = match self.ratio {
            // While all are silent (J3), how many streams each has says more of the ratio than how it works.
            Some(ratio) if ratio < config.degraded_ratio && is_enough && !pool.has_progress => {
                self.below
            }
            Some(ratio) if ratio < config.degraded_ratio && is_enough => self.below + dt,
            _ => Duration::ZERO,
        };
        self.above = match self.ratio {
            Some(ratio) if ratio >= config.well_ratio() => self.above + dt,
            _ => Duration::ZERO,
        };
    }

    /// Its share of the peers' median.
    pub fn ratio(&self) -> Option<f64> {
        self.ratio
    }

    /// Far below for long enough.
    pub fn is_degraded(&self, config: &StandingConfig) -> bool {
        self.below >= config.degraded_window / 2
    }

    /// Clearly above for long enough.
    pub fn is_recovered(&self) -> bool {
        self.above >= RECOVERY
    }
}

/// All ready workers of a role, for comparison.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Since the start.
    done: Work,
    /// Of workers that are busy; sorted.
    silences: Vec<Duration>,
    since_progress: Option<Duration>,
    /// Anybody made progress in this tick.
    has_progress: bool,
    busy: f64,
    progress: f64,
    progress_count: u64,
    peak: Duration,
    rate: f64,
    speeds: Vec<f64>,
}

impl Pool {
    /// With none in it. `done`: as left by the last tick.
    pub fn new(done: Work) -> Pool {
        Pool {
            done,
            ..Pool::default()
        }
    }

    /// What it has done since the start.
    pub fn done(&self) -> Work {
        self.done
    }

    /// Adds a worker.
    pub fn add(
        &mut self,
        rhythm: &Rhythm,
        speed: &Speed,
        seen: &Observation,
        config: &StandingConfig,
    ) {
        if seen.at_work() > 0 {
            self.silences.push(rhythm.silence);
        }
        self.done.request_seconds += rhythm.tick.request_seconds;
        self.done.progress += rhythm.tick.progress;
        self.has_progress |= rhythm.tick.progress > 0.0;
        let since = rhythm.since_progress;
        self.since_progress = Some(self.since_progress.map_or(since, |least| least.min(since)));
        self.busy += rhythm.busy;
        self.progress += rhythm.progress;
        self.progress_count += rhythm.progress_count;
        self.peak = self.peak.max(rhythm.peak);
        self.rate = if self.rate == 0.0 {
            rhythm.rate
        } else {
            self.rate.min(rhythm.rate)
        };
        if config.degraded_ratio > 0.0 {
            self.speeds.extend(speed.rate());
        }
    }

    /// After the last.
    pub fn finish(&mut self) {
        self.silences.sort_unstable();
        self.speeds.sort_unstable_by(f64::total_cmp);
    }

    /// Seconds of one request between two signs of progress, pool-wide.
    fn usual(&self) -> f64 {
        if self.progress_count < LEARNED_MIN {
            return 0.0;
        }
        self.busy / self.progress
    }

    /// Silence that was seen and was no stall, with room.
    pub fn usual_silence(&self, config: &StandingConfig) -> Duration {
        Duration::from_secs_f64(self.usual() * USUAL_TIMES)
            .max(self.peak * PEAK_TIMES)
            .min(config.stall_window * STALL_STRETCH_MAX)
    }

    /// Silence from which on this worker is stalled, prompts aside: as long as many signs of progress are missing, at
    /// most the flag; but longer than what was usual lately. Where no peer speaks, or its own rhythm is not known yet,
    /// the flag at least.
    fn window(&self, rhythm: &Rhythm, seen: &Observation, config: &StandingConfig) -> Duration {
        let flag = config.stall_window;
        let usual = rhythm.usual().max(self.usual());
        let quick = if rhythm.progress_count < LEARNED_MIN {
            flag
        } else {
            Duration::from_secs_f64(usual * MISSING_MIN / f64::from(seen.at_work().max(1)))
                .max(STALL_MIN)
                .min(flag)
        };
        let window = quick
            .max(Duration::from_secs_f64(usual * USUAL_TIMES))
            .max(self.peak * PEAK_TIMES)
            .min(flag * STALL_STRETCH_MAX);
        match self.since_progress {
            Some(since) if since < window / 2 => window,
            _ => window.max(flag),
        }
    }

    /// Bytes a second at which a slow worker of this pool takes prompts in.
    pub fn prefill_rate(&self, role: Role) -> f64 {
        match role {
            Role::Decode => FETCH_RATE,
            Role::Regular | Role::Prefill => self.rate,
        }
    }

    /// Whether the worker, of this pool, is silent too long while the others are not.
    pub fn is_stalled(&self, rhythm: &Rhythm, seen: &Observation, config: &StandingConfig) -> bool {
        if rhythm.silence_full < STALL_MIN.min(config.stall_window) {
            return false;
        }
        let window = self.window(rhythm, seen, config);
        let bytes = rhythm
            .bytes
            .min(seen.waiting_bytes)
            .saturating_sub(BYTES_FREE);
        let prefill = Duration::from_secs_f64(bytes as f64 / self.prefill_rate(seen.role));
        if rhythm.silence_full < window.saturating_add(prefill) {
            return false;
        }
        if !self.misses_much(rhythm)
            && rhythm.silence_full < config.stall_window * STALL_STRETCH_MAX
        {
            return false;
        }
        // Itself is among both.
        let first = self
            .silences
            .partition_point(|silence| *silence < window / 2);
        let silent = (self.silences.len() - first).saturating_sub(1);
        let busy = self.silences.len().saturating_sub(1);
        busy == 0 || silent * 2 < busy
    }

    /// Whether it would have shown many signs of progress in its silence at the pace its peers had meanwhile. If they
    /// showed none, they had nothing to do (else they are silent too, which is looked at elsewhere).
    fn misses_much(&self, rhythm: &Rhythm) -> bool {
        let progress = self.done.progress - rhythm.pool_before.progress;
        let seconds = self.done.request_seconds - rhythm.pool_before.request_seconds;
        let others = (seconds - rhythm.pending).max(0.0);
        progress == 0.0 || rhythm.pending * progress >= MISSING_NOW_MIN * others
    }

    /// The median of all speeds but one that equals `own`.
    fn median_speed_without(&self, own: f64) -> Option<f64> {
        let count = self.speeds.len().checked_sub(1)?;
        if count < PEERS_MIN {
            return None;
        }
        let position = self.speeds.partition_point(|speed| *speed < own);
        let at = |index: usize| self.speeds[index + usize::from(index >= position)];
        Some((at((count - 1) / 2) + at(count / 2)) / 2.0)
    }
}
