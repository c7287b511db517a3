//! What the flags of the group "Failing workers" mean.

use std::time::Duration;

use clap::builder::{OsStr, Resettable};
use clap::{Args, FromArgMatches};

use super::StandingArgs;

/// When a worker gets no more requests although its probes are good, and how it returns. Judged by
/// `control::standing`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StandingConfig {
    /// Whether failures take a worker out at all.
    pub has_breaker: bool,
    /// Failures that take it out, at least 1.
    pub failure_threshold: u32,
    /// Good trials that bring it back, at least 1.
    pub success_threshold: u32,
    /// Out before it is tried.
    pub breaker_timeout: Duration,
    /// How long a failure counts.
    pub breaker_window: Duration,
    /// Silence with work in flight that is a stall, where the pool's rhythm says nothing else; zero: never.
    pub stall_window: Duration,
    /// Requests in flight for a stall, at least 1.
    pub stall_requests_min: u32,
    /// Requests that wait for a stalled worker's first byte go to another one.
    pub moves_stalled: bool,
    /// Share of the peers' median speed below which a worker is degraded, 0 to 1; 0: never.
    pub degraded_ratio: f64,
    /// Time in which degradation is found.
    pub degraded_window: Duration,
    /// Streams, or waiting requests, for a degradation, at least 1.
    pub degraded_requests_min: u32,
    /// Share of a pool's ready workers that may be out, 0 to 1.
    pub ejected_share_max: f64,
    /// Time for a share to grow after a return; zero: none.
    pub slow_start: Duration,
}

/// What the flags mean when nobody sets them, the environment neither.
impl Default for StandingConfig {
    fn default() -> StandingConfig {
        let command = StandingArgs::augment_args(clap::Command::new("corelane"));
        let command = command.mut_args(|arg| arg.env(Resettable::<OsStr>::Reset));
        let matches = command.get_matches_from(["corelane"]);
        let args = StandingArgs::from_arg_matches(&matches).expect("each flag has a default");
        StandingConfig::from_args(&args)
    }
}

impl StandingConfig {
    pub(super) fn from_args(args: &StandingArgs) -> StandingConfig {
        let secs = Duration::from_secs;
        StandingConfig {
            has_breaker: !args.disable_circuit_breaker,
            failure_threshold: args.cb_failure_threshold,
            success_threshold: args.cb_success_threshold,
            breaker_timeout: secs(args.cb_timeout_duration_secs),
            breaker_window: secs(args.cb_window_duration_secs),
            stall_window: Duration::from_millis(args.stall_window_ms),
            stall_requests_min: args.stall_min_requests,
            moves_stalled: args.stalled_requests == "retry",
            degraded_ratio: args.degraded_ratio,
            degraded_window: secs(args.degraded_window_secs),
            degraded_requests_min: args.degraded_min_requests,
            ejected_share_max: args.ejected_share_max,
            slow_start: secs(args.slow_start_secs),
        }
    }

    /// Share of the peers' speed from which on a degraded worker is well: twice that below which it is degraded; of one
    /// above a half, half-way to the peers.
    pub fn well_ratio(&self) -> f64 {
        (self.degraded_ratio * 2.0).min((1.0 + self.degraded_ratio) / 2.0)
    }

    /// For operators, named as the flags.
    pub(super) fn public_json(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let ms = u64::try_from(self.stall_window.as_millis()).unwrap_or(u64::MAX);
        [
            ("disable_circuit_breaker", (!self.has_breaker).into()),
            ("cb_failure_threshold", self.failure_threshold.into()),
            ("cb_success_threshold", self.success_threshold.into()),
            (
                "cb_timeout_duration_secs",
                self.breaker_timeout.as_secs().into(),
            ),
            (
                "cb_window_duration_secs",
                self.breaker_window.as_secs().into(),
            ),
            ("stall_window_ms", ms.into()),
            ("stall_min_requests", self.stall_requests_min.into()),
            (
                "stalled_requests",
                if self.moves_stalled { "retry" } else { "wait" }.into(),
            ),
            ("degraded_ratio", self.degraded_ratio.into()),
            (
                "degraded_window_secs",
                self.degraded_window.as_secs().into(),
            ),
            ("degraded_min_requests", self.degraded_requests_min.into()),
            ("ejected_share_max", self.ejected_share_max.into()),
            ("slow_start_secs", self.slow_start.as_secs().into()),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
    }
}
