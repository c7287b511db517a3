//! When a worker counts as healthy, and when to look again. Pure: no I/O, no clock, and no way to touch load.
//!
//! Invariants:
//! - H1 a worker that was never ready becomes ready on its first good probe; one that was taken out needs
//!   `success_threshold` good ones in a row.
//! - H2 a ready worker is taken out by `failure_threshold` failed probes in a row, not before.
//! - H3 it returns as a new life only if its process was seen gone (refused, reset) while it failed: after time-outs and
//!   5xx the process, hence its cache, is still there.

use std::fmt;
use std::time::Duration;

use crate::config::{Config, HealthConfig};

/// Why a probe failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nobody listens.
    Refused,
    /// The connection was reset or closed before an answer.
    Reset,
    /// No answer in time.
    Timeout,
    /// An answer, but not 2xx.
    Status(u16),
    /// The name has no address now.
    Unresolved,
    /// No way to the address.
    Unreachable,
    /// The answer is not HTTP, or too large.
    Malformed,
    /// TLS came to nothing; why, in words.
    Tls(&'static str),
}

impl Failure {
    /// Whether it shows that the process is not there.
    pub fn is_gone(self) -> bool {
        matches!(self, Failure::Refused | Failure::Reset)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused => f.write_str("connection refused"),
            Failure::Reset => f.write_str("connection reset"),
            Failure::Timeout => f.write_str("no answer in time"),
            Failure::Status(status) => write!(f, "status {status}"),
            Failure::Unresolved => f.write_str("host name not resolved"),
            Failure::Unreachable => f.write_str("host not reachable"),
            Failure::Malformed => f.write_str("answer not understood"),
            Failure::Tls(why) => f.write_str(why),
        }
    }
}

/// Where a worker is in its life, as far as probes tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Never ready yet.
    Starting,
    /// Takes requests.
    Ready,
    /// Was ready, and failed.
    Unhealthy,
}

/// What one probe changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Same,
    /// It takes requests from now on.
    Ready {
        /// Its process was gone meanwhile: nothing that was known of it holds.
        is_new_life: bool,
    },
    /// It takes no requests from now on.
    Unhealthy,
}

/// Counts the probes of one worker.
#[derive(Clone, Debug)]
pub struct Tracker {
    failure_threshold: u32,
    success_threshold: u32,
    phase: Phase,
    failures: u32,
    successes: u32,
    was_gone: bool,
}

impl Tracker {
    /// For a worker never probed.
    pub fn new(config: &HealthConfig) -> Tracker {
        let mut tracker = Tracker {
            failure_threshold: 1,
            success_threshold: 1,
            phase: Phase::Starting,
            failures: 0,
            successes: 0,
            was_gone: false,
        };
        tracker.configure(config);
        tracker
    }

    /// Other thresholds, from the next probe on; what was counted stays.
    pub fn configure(&mut self, config: &HealthConfig) {
        self.failure_threshold = config.failure_threshold.max(1);
        self.success_threshold = config.success_threshold.max(1);
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Failed probes in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Whether a good probe now would make it ready.
    pub fn is_next_success_ready(&self) -> bool {
        match self.phase {
            Phase::Starting => true,
            Phase::Ready => false,
            Phase::Unhealthy => self.successes + 1 >= self.success_threshold,
        }
    }

    /// The process says of itself that it is there: it counts as never ready, so that one good probe is enough. True:
    /// it was seen gone since it was ready.
    pub fn restart(&mut self) -> bool {
        let was_gone = self.was_gone;
        (self.phase, self.failures, self.successes) = (Phase::Starting, 0, 0);
        self.was_gone = false;
        was_gone
    }

    /// Takes one probe's outcome.
    pub fn record(&mut self, outcome: Result<(), Failure>) -> Verdict {
        match outcome {
            Ok(()) => self.record_success(),
            Err(failure) => self.record_failure(failure),
        }
    }

    fn record_success(&mut self) -> Verdict {
        let becomes_ready = self.is_next_success_ready();
        self.failures = 0;
        self.successes = self.successes.saturating_add(1);
        if self.phase == Phase::Ready {
            // Too few failures to count: the next series begins anew.
            self.was_gone = false;
        }
        if !becomes_ready {
            return Verdict::Same;
        }
        let is_new_life = self.phase == Phase::Unhealthy && self.was_gone;
        self.phase = Phase::Ready;
        self.was_gone = false;
        Verdict::Ready { is_new_life }
    }

    fn record_failure(&mut self, failure: Failure) -> Verdict {
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        self.was_gone |= failure.is_gone();
        if self.phase == Phase::Ready && self.failures >= self.failure_threshold {
            self.phase = Phase::Unhealthy;
            return Verdict::Unhealthy;
        }
        Verdict::Same
    }
}

/// First pause of a worker that is starting; it doubles up to a second.
const STARTING_PAUSE_MIN: Duration = Duration::from_millis(100);
const STARTING_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Pause before the next probe. `probe_count`: probes so far, at least 1; `chance`: uniform in 0..1. The first regular
/// pause is anything up to the interval, so that workers probed together at start spread out; later ones move by 5 %.
pub fn pause(
    config: &Config,
    phase: Phase,
    probe_count: u32,
    is_first_regular: bool,
    chance: f64,
) -> Duration {
    if phase == Phase::Starting {
        let doubled = STARTING_PAUSE_MIN.saturating_mul(1 << probe_count.saturating_sub(1).min(10));
        return doubled
            .min(STARTING_PAUSE_MAX)
            .min(config.worker_startup_check_interval);
    }
    let interval = config.health.interval;
    if is_first_regular {
        interval.mul_f64(0.1 + 0.9 * chance)
    } else {
        interval.mul_f64(0.95 + 0.1 * chance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(failure_threshold: u32, success_threshold: u32) -> Tracker {
        let health = Config::default_for_tests().health;
        Tracker::new(&HealthConfig {
            failure_threshold,
            success_threshold,
            ..health
        })
    }

    /// Feeds `pattern` (+ good, r refused, x reset, t timed out, 5 status 503) and writes what changed:
    /// R ready, N ready as a new life, U unhealthy, . nothing.
    fn run(tracker: &mut Tracker, pattern: &str) -> String {
        let outcome = |c| match c {
            '+' => Ok(()),
            'r' => Err(Failure::Refused),
            'x' => Err(Failure::Reset),
            't' => Err(Failure::Timeout),
            _ => Err(Failure::Status(503)),
        };
        pattern
            .chars()
            .map(|c| match tracker.record(outcome(c)) {
                Verdict::Same => '.',
                Verdict::Ready { is_new_life: false } => 'R',
                Verdict::Ready { is_new_life: true } => 'N',
                Verdict::Unhealthy => 'U',
            })
            .collect()
    }

    #[test]
    fn thresholds_count_in_a_row_and_the_first_good_probe_makes_ready() {
        let table = [
            ("+", "R"),
            ("rrrrrr+", "......R"),
            ("+555", "R..U"),
            ("+55+55+555", "R........U"),
            ("+555+5++", "R..U...R"),
            ("+555++", "R..U.R"),
            ("+555555++", "R..U....R"),
        ];
        for (pattern, wanted) in table {
            assert_eq!(run(&mut tracker(3, 2), pattern), wanted, "{pattern}");
        }
        assert_eq!(run(&mut tracker(1, 1), "+5+5"), "RURU");
    }

    /// What was counted before counts against the new thresholds.
    #[test]
    fn other_thresholds_hold_from_the_next_probe_on() {
        let mut tracker = tracker(3, 2);
        assert_eq!(run(&mut tracker, "+55"), "R..");
        let health = Config::default_for_tests().health;
        let configure = |tracker: &mut Tracker, failure_threshold, success_threshold| {
            tracker.configure(&HealthConfig {
                failure_threshold,
                success_threshold,
                ..health.clone()
            });
        };
        configure(&mut tracker, 5, 4);
        assert_eq!(run(&mut tracker, "555+++"), "..U...");
        configure(&mut tracker, 5, 2);
        assert_eq!(run(&mut tracker, "+"), "R");
    }

    #[test]
    fn a_process_that_says_it_is_there_needs_one_good_probe() {
        for (pattern, was_gone) in [("+rrr", true), ("+ttt", false), ("tt", false)] {
            let mut tracker = tracker(3, 2);
            run(&mut tracker, pattern);
            assert_eq!(tracker.restart(), was_gone, "{pattern}");
            assert_eq!(run(&mut tracker, "+"), "R", "{pattern}");
        }
    }

    #[test]
    fn only_a_process_that_was_gone_returns_as_a_new_life() {
        let table = [
            ("+ttt++", "R..U.R"),
            ("+5t5++", "R..U.R"),
            ("+rrr++", "R..U.N"),
            ("+55x++", "R..U.N"),
            ("+555r++", "R..U..N"),
            // Gone in an earlier series that did not count, and in one that did: neither lasts.
            ("+r+555++", "R....U.R"),
            ("+rrr++555++", "R..U.N..U.R"),
            // Starting workers are refused until they listen; that is no life to end.
            ("rrr+", "...R"),
        ];
        for (pattern, wanted) in table {
            assert_eq!(run(&mut tracker(3, 2), pattern), wanted, "{pattern}");
        }
    }

    /// On a fake clock: a worker that comes up `late_ms` after start is ready at most a second later, however long the
    /// check interval of vllm-router is.
    #[test]
    fn a_late_worker_joins_within_a_second() {
        let config = Config::default_for_tests();
        assert_eq!(
            config.worker_startup_check_interval,
            Duration::from_secs(30)
        );
        for late_ms in [0_u64, 50, 900, 5_000, 61_000] {
            let mut tracker = Tracker::new(&config.health);
            let (mut now_ms, mut count) = (0_u64, 0);
            let ready_ms = loop {
                count += 1;
                let outcome = if now_ms >= late_ms {
                    Ok(())
                } else {
                    Err(Failure::Refused)
                };
                if tracker.record(outcome) != Verdict::Same {
                    break now_ms;
                }
                now_ms += pause(&config, tracker.phase(), count, false, 0.5).as_millis() as u64;
            };
            assert!(
                ready_ms - late_ms <= 1_000,
                "up at {late_ms} ms, ready at {ready_ms} ms"
            );
        }
    }

    #[test]
    fn regular_pauses_keep_to_the_interval_and_spread_at_first() {
        let config = Config::default_for_tests();
        let interval = config.health.interval;
        for chance in [0.0, 0.5, 0.999] {
            let regular = pause(&config, Phase::Ready, 9, false, chance);
            assert!(regular >= interval.mul_f64(0.94) && regular <= interval.mul_f64(1.06));
            assert!(pause(&config, Phase::Ready, 1, true, chance) <= interval);
        }
        assert_ne!(
            pause(&config, Phase::Ready, 1, true, 0.1),
            pause(&config, Phase::Ready, 1, true, 0.9)
        );
    }
}
