//! Slowness that no stream shows: how long answers in one piece are waited for, against the peers' in the same stretch
//! of time. `evidence::Speed` is the same for streams.
//!
//! Several stretches that end now are looked at, long ones first, each by counters at both its ends: nothing decays, so
//! that a change of the whole pool is seen of all its workers alike. Two things must be so in one stretch. Far fewer
//! answers came than a peer would have given in these request-seconds; that counts those still waited for, so it is
//! known long before they end. And those that came had taken long, in the mean of their logarithms: a few long answers,
//! which hold their places while the peers give many short ones, do not make a worker slow.
//!
//! Not told apart: a group of requests that are all far longer than the pool's others and all go to one worker.

use std::collections::VecDeque;
use std::time::Duration;

use super::Observation;
use crate::config::StandingConfig;
use crate::shared::LOG_PARTS;

/// Steps of which stretches are made; a step is this part of `--degraded-window-secs`.
const STEPS_PER_WINDOW: u32 = 25;
/// Lengths of stretches, steps.
const LENGTHS: [usize; 16] = [3, 4, 6, 8, 11, 14, 18, 24, 30, 36, 42, 50, 62, 78, 98, 120];
const LENGTH_MAX: usize = 120;
/// Answers missing at the peers' pace that make a worker slow, and those with which half the window is not waited for.
const EXPECTED_MIN: f64 = 20.0;
const EXPECTED_OVERWHELMING: f64 = 200.0;
/// Times a peer's usual answer that a stretch lasts at least: before, requests that came all at once may just be young.
const USUAL_TIMES: f64 = 3.0;
/// Answers by which a peer is known.
const KNOWN_MIN: f64 = 4.0;
const PEERS_MIN: usize = 2;
/// Answers by which a mean is known well.
const KNOWN_WELL: f64 = 16.0;
/// Spread (binary logarithm) of answers that are alike: most within a factor of 1.7. Of these, few say enough.
const ALIKE: f64 = 0.75;
/// Standard errors by which answers that are not alike have to be too long.
const DOUBT: f64 = 4.0;
/// Prompt bytes that cost no time worth waiting for.
const BYTES_FREE: f64 = 8192.0;
/// Bytes of a prompt that count as none when prompts are compared.
const PROMPT_FREE: f64 = 1024.0;

/// Seconds.
fn step(config: &StandingConfig) -> f64 {
    config.degraded_window.as_secs_f64() / f64::from(STEPS_PER_WINDOW)
}

/// Sums since the begin of a life.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    time: f64,
    /// Request-seconds before first bytes, and their prompts.
    wait_seconds: f64,
    byte_seconds: f64,
    answers: u64,
    answer_ns: u64,
    log: u64,
    log_square: u64,
    chosen: u64,
    fresh_bytes: u64,
}

impl Tally {
    fn count(&mut self, seen: &Observation) {
        self.answers = seen.answers;
        self.answer_ns = seen.answer_ns;
        self.log = seen.answer_log;
        self.log_square = seen.answer_log_square;
        self.chosen = seen.chosen;
        self.fresh_bytes = seen.fresh_bytes;
    }
}

/// What a worker did in one stretch.
#[derive(Clone, Copy, Debug, Default)]
struct Stretch {
    seconds: f64,
    wait_seconds: f64,
    /// Prompt bytes that were waiting, in the mean.
    bytes: f64,
    answers: f64,
    /// Seconds of an answer, in the mean.
    usual: f64,
    /// Mean and standard deviation of the binary logarithms of ns.
    log: f64,
    spread: f64,
    /// Bytes of a waiting request, and of one sent, less what the worker was said to hold.
    prompt: f64,
    fresh: f64,
}

impl Stretch {
    fn between(begin: &Tally, end: &Tally) -> Stretch {
        let over = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let seconds = end.time - begin.time;
        let wait_seconds = end.wait_seconds - begin.wait_seconds;
        let byte_seconds = end.byte_seconds - begin.byte_seconds;
        let answers = (end.answers - begin.answers) as f64;
        let mean = |sum: u64| over(sum as f64, answers);
        let log = mean(end.log - begin.log) / LOG_PARTS as f64;
        let square = mean(end.log_square - begin.log_square) / (LOG_PARTS * LOG_PARTS) as f64;
        Stretch {
            seconds,
            wait_seconds,
            bytes: over(byte_seconds, seconds),
            answers,
            usual: mean(end.answer_ns - begin.answer_ns) / 1e9,
            log,
            spread: (square - log * log).max(0.0).sqrt(),
            prompt: over(byte_seconds, wait_seconds),
            fresh: over(
                // The difference of two counters that are not read at once.
                end.fresh_bytes.saturating_sub(begin.fresh_bytes) as f64,
                (end.chosen - begin.chosen) as f64,
            ),
        }
    }

    fn is_known(&self) -> bool {
        self.answers >= KNOWN_MIN
    }

    /// Its prompts are much longer than usual, or fewer of them were held by the worker.
    fn has_longer_prompts(&self, usual: &Usual) -> bool {
        self.prompt > 2.0 * usual.prompt + PROMPT_FREE
            || self.fresh > 2.0 * usual.fresh + PROMPT_FREE
    }

    /// `rate`: bytes a second of a slow prefill.
    fn is_slow(&self, usual: &Usual, rate: f64, config: &StandingConfig) -> bool {
        let expected = self.wait_seconds / usual.seconds;
        let is_enough = self.answers >= 1.0
            && self.wait_seconds >= f64::from(config.degraded_requests_min) * self.seconds
            && self.seconds >= USUAL_TIMES * usual.seconds
            && (self.seconds >= config.degraded_window.as_secs_f64() / 2.0
                || expected >= EXPECTED_OVERWHELMING);
        if !is_enough || expected < EXPECTED_MIN || self.answers >= config.degraded_ratio * expected
        {
            return false;
        }
        !self.is_explained(usual, rate, config) && self.has_long_answers(usual, config)
    }

    /// By prompts: its requests may take as long as those need, and are not looked at before.
    fn is_explained(&self, usual: &Usual, rate: f64, config: &StandingConfig) -> bool {
        let prefill = (self.bytes - BYTES_FREE).max(0.0) / rate;
        let limit = usual.seconds / config.degraded_ratio + prefill;
        let is_young = self.seconds < limit || self.wait_seconds < limit * self.answers;
        is_young && self.has_longer_prompts(usual)
    }

    fn has_long_answers(&self, usual: &Usual, config: &StandingConfig) -> bool {
        let longer = self.log - usual.log;
        let far = -config.degraded_ratio.log2();
        let own = if self.is_known() { self.spread } else { 0.0 };
        let spread = usual.spread.max(own);
        if spread > ALIKE || usual.answers_longest < KNOWN_WELL {
            // Who holds long requests gets few short ones, so a few long answers in a row are no chance.
            self.answers >= KNOWN_WELL && longer - DOUBT * spread / self.answers.sqrt() > far
        } else if self.answers >= KNOWN_WELL {
            longer > far
        } else {
            // Those sent before it became slow are among the first that end.
            longer > far / 2.0
        }
    }
}

/// What is usual among workers that serve the same models, in one stretch: each the median.
#[derive(Clone, Copy, Debug)]
struct Usual {
    seconds: f64,
    log: f64,
    /// The greatest of this stretch and all longer ones: in a short one, answers may be alike by chance. In the
    /// longest, answers that have not ended show too, by the time seen in flight.
    spread: f64,
    prompt: f64,
    fresh: f64,
    answers: f64,
    /// In the longest stretch.
    answers_longest: f64,
}

impl Usual {
    /// `own_is_known`: whether the one to judge is among those known; if not, it counts as the slowest. None with fewer
    /// than two others.
    fn of(known: &Known, own_is_known: bool, longer: Option<&Usual>) -> Option<Usual> {
        if known.count < PEERS_MIN + usize::from(own_is_known) {
            return None;
        }
        let at = usize::from(!own_is_known);
        Some(Usual {
            seconds: known.seconds[at],
            log: known.log[at],
            spread: longer
                .map_or(known.held[at], |longer| longer.spread)
                .max(known.spread[at]),
            prompt: known.prompt[at],
            fresh: known.fresh[at],
            answers: known.answers[at],
            answers_longest: longer.map_or(known.answers[at], |longer| longer.answers_longest),
        })
    }
}

/// Lower and upper median of everything that is known in a stretch.
#[derive(Debug)]
struct Known {
    count: usize,
    seconds: [f64; 2],
    log: [f64; 2],
    spread: [f64; 2],
    /// How many times (binary logarithm) the time seen in flight is that of the answers that ended.
    held: [f64; 2],
    prompt: [f64; 2],
    fresh: [f64; 2],
    answers: [f64; 2],
}

impl Known {
    fn of(stretches: &[Option<Stretch>]) -> Known {
        let known: Vec<&Stretch> = stretches
            .iter()
            .flatten()
            .filter(|s| s.is_known())
            .collect();
        let mut column = Vec::with_capacity(known.len());
        let mut medians = |value: fn(&Stretch) -> f64| {
            column.clear();
            column.extend(known.iter().map(|stretch| value(stretch)));
            medians(&mut column)
        };
        Known {
            count: known.len(),
            // The greater of what answers took and what was seen in flight, to the disadvantage of nobody.
            seconds: medians(|s| s.usual.max(s.wait_seconds / s.answers).max(1e-6)),
            log: medians(|s| s.log),
            spread: medians(|s| s.spread),
            held: medians(|s| (s.wait_seconds / s.answers / s.usual.max(1e-6)).log2()),
            prompt: medians(|s| s.prompt),
            fresh: medians(|s| s.fresh),
            answers: medians(|s| s.answers),
        }
    }
}

/// The lower and the upper one.
fn medians(column: &mut [f64]) -> [f64; 2] {
    if column.is_empty() {
        return [0.0; 2];
    }
    let count = column.len();
    let (below, &mut upper, _) = column.select_nth_unstable_by(count / 2, f64::total_cmp);
    let lower = match count % 2 {
        0 => below
            .iter()
            .copied()
            .max_by(f64::total_cmp)
            .unwrap_or(upper),
        _ => upper,
    };
    [lower, upper]
}

/// The answers of trials up to some moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trials {
    count: u64,
    log: u64,
}

impl Trials {
    /// As counted so far.
    pub fn of(seen: &Observation) -> Trials {
        Trials {
            count: seen.trial_answers,
            log: seen.trial_answer_log,
        }
    }
}

/// One worker's answers in one piece.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    now: Tally,
    /// Oldest first, a step apart. Empty until the first answer.
    past: VecDeque<Tally>,
    /// Of its life, seconds: since when some stretch is slow.
    slow_since: Option<f64>,
    /// Binary logarithm of ns that its peers' answers take.
    usual_log: Option<f64>,
}

impl Answers {
    /// Takes a tick.
    pub fn observe(
        &mut self,
        before: &Observation,
        seen: &Observation,
        dt: Duration,
        config: &StandingConfig,
    ) {
        let step = step(config);
        if self.now.time == 0.0 {
            self.now.count(before);
        }
        if seen.answers > 0
            && self
                .past
                .back()
                .is_none_or(|last| self.now.time - last.time >= step)
        {
            self.past.push_back(self.now);
        }
        if self.past.len() > LENGTH_MAX {
            self.past.pop_front();
        }
        let seconds = dt.as_secs_f64();
        let mean = |a: u64, b: u64| (a as f64 + b as f64) / 2.0;
        let now = &mut self.now;
        now.time += seconds;
        now.wait_seconds += mean(before.waiting.into(), seen.waiting.into()) * seconds;
        now.byte_seconds += mean(before.waiting_bytes, seen.waiting_bytes) * seconds;
        now.count(seen);
    }

    /// What was is no evidence any more.
    pub fn forget(&mut self) {
        self.past.clear();
        self.slow_since = None;
    }

    fn stretch(&self, length: usize) -> Option<Stretch> {
        let begin = self.past.len().checked_sub(length)?;
        Some(Stretch::between(&self.past[begin], &self.now))
    }

    /// Far slower than its peers', and not at one tick only: a pause of a moment shows in all answers that it held up.
    pub fn are_slow(&self, config: &StandingConfig) -> bool {
        self.slow_since
            .is_some_and(|since| self.now.time - since >= step(config))
    }

    /// The speed of trials since `base`, as a share of the peers'. None of fewer than `count`, or without peers.
    pub fn trial_ratio(&self, seen: &Observation, base: &Trials, count: u32) -> Option<f64> {
        let trials = seen.trial_answers.saturating_sub(base.count);
        if trials == 0 || trials < u64::from(count) {
            return None;
        }
        let log = seen.trial_answer_log.saturating_sub(base.log) as f64 / trials as f64;
        Some((self.usual_log? - log / LOG_PARTS as f64).exp2())
    }
}

/// What was found of a worker in the stretches looked at.
#[derive(Clone, Copy, Debug, Default)]
struct Finding {
    is_slow: bool,
    /// In the last of them that was compared.
    usual: Option<Usual>,
    /// Of the shortest in which the peers are well known, or else the longest.
    usual_log: Option<f64>,
}

/// Judges workers that serve the same models, after all have observed the tick. `rate`: bytes a second of a slow
/// prefill.
pub fn compare(workers: &mut [&mut Answers], rate: f64, config: &StandingConfig) {
    let mut findings = vec![Finding::default(); workers.len()];
    if workers.len() > PEERS_MIN && config.degraded_ratio > 0.0 {
        for length in LENGTHS.into_iter().rev() {
            let stretches: Vec<_> = workers.iter().map(|w| w.stretch(length)).collect();
            look_at(&stretches, &mut findings, rate, config);
        }
    }
    for (worker, found) in workers.iter_mut().zip(findings) {
        let since = worker.slow_since.unwrap_or(worker.now.time);
        worker.slow_since = found.is_slow.then_some(since);
        worker.usual_log = found.usual_log;
    }
}

fn look_at(
    stretches: &[Option<Stretch>],
    findings: &mut [Finding],
    rate: f64,
    config: &StandingConfig,
) {
    let known = Known::of(stretches);
    for (own, found) in stretches.iter().zip(findings) {
        let own_is_known = own.is_some_and(|own| own.is_known());
        let Some(usual) = Usual::of(&known, own_is_known, found.usual.as_ref()) else {
            continue;
        };
        found.is_slow |= own.is_some_and(|own| own.is_slow(&usual, rate, config));
        if usual.answers >= KNOWN_WELL || found.usual_log.is_none() {
            found.usual_log = Some(usual.log);
        }
        found.usual = Some(usual);
    }
}
