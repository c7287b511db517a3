//! One task a worker: probe, apply, pause. And the report of who is not ready after the start.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ahash::RandomState;
use http::Method;

use super::Plane;
use super::health::{self, Failure, Phase};
use super::models;
use super::probe::{self, Target};
use super::ranks;
use super::registry::{Finder, Key, Probed};
use crate::config::WorkerUrl;

/// Time for a model list; it holds up a worker's first request, so shorter than most time limits of probes.
const MODELS_TIMEOUT_MAX: Duration = Duration::from_secs(2);

/// Longest pause between two reports of workers that are missing since the start.
const REPORT_PAUSE_MAX: Duration = Duration::from_secs(600);

/// Watches one registration until it is removed.
pub(super) async fn run(plane: Arc<Plane>, key: Key, url: WorkerUrl) {
    let mut probe_now = plane.probe_now.subscribe();
    let mut reloads = plane.reload.subscribe();
    let mut dice = Dice::new();
    let started = tokio::time::Instant::now();
    let (mut probe_count, mut is_first_regular) = (0_u32, true);
    loop {
        let Some(address) = plane.registry().entry(key).map(|entry| entry.address) else {
            return;
        };
        let probed = probe(
            &plane,
            key,
            &Target {
                url: url.clone(),
                address,
            },
        )
        .await;
        probe_count = probe_count.saturating_add(1);
        let Some(applied) = plane.registry().apply(key, probed) else {
            return;
        };
        if applied.has_changed {
            plane.announce_change();
        }
        if applied.phase == Phase::Starting && is_overdue(&plane, key, started.elapsed()) {
            let limit_secs = plane.shared.config().worker_startup_timeout.as_secs();
            tracing::warn!(worker = %url, limit_secs, "worker did not become ready: dropped");
            plane.remove(key);
            return;
        }
        let (probed, chance) = (tokio::time::Instant::now(), dice.roll());
        loop {
            let pause = health::pause(
                &plane.shared.config(),
                applied.phase,
                probe_count,
                is_first_regular,
                chance,
            );
            tokio::select! {
                () = tokio::time::sleep_until(probed + pause) => break,
                _ = probe_now.changed() => break,
                // The interval may be another one now: it counts from the last probe.
                _ = reloads.changed() => {}
            }
        }
        is_first_regular &= applied.phase == Phase::Starting;
    }
}

async fn probe(plane: &Plane, key: Key, target: &Target) -> Probed {
    let config = plane.shared.config();
    let outcome = probe::health(&config, target).await;
    let mut models = None;
    let wants_models = outcome.is_ok() && plane.registry().wants_models(key);
    if let (Ok(address), true) = (outcome, wants_models) {
        let target = Target {
            address: Some(address),
            ..target.clone()
        };
        let timeout = config.health.timeout.min(MODELS_TIMEOUT_MAX);
        models = match probe::request(&config, &target, Method::GET, "/v1/models", timeout).await {
            Ok(answer) if answer.status == 200 => Some(models::parse(&answer.body)),
            // 401 is a key that does not fit, 5xx a worker in trouble: both say nothing about its models.
            Ok(answer) if answer.status == 404 || answer.status == 405 => Some(Vec::new()),
            Err(Failure::Malformed) => Some(Vec::new()),
            Ok(_) | Err(_) => None,
        };
    }
    let mut rank_count = None;
    let wants_ranks = outcome.is_ok() && plane.registry().wants_rank_count(key);
    if let (Ok(address), true) = (outcome, wants_ranks) {
        let target = Target {
            address: Some(address),
            ..target.clone()
        };
        let timeout = config.health.timeout.min(MODELS_TIMEOUT_MAX);
        let answer = probe::request(&config, &target, Method::GET, "/metrics", timeout).await;
        // An engine that tells nothing of ranks keeps those it has.
        let answer = answer.ok().filter(|answer| answer.status == 200);
        rank_count = answer.and_then(|answer| ranks::count(&answer.body));
    }
    Probed {
        outcome,
        models,
        rank_count,
    }
}

/// Workers of the command line are waited for without end, and those found as long as they are found; added ones are
/// dropped, as vllm-router does; the leases of those that registered themselves tell.
fn is_overdue(plane: &Plane, key: Key, waited: Duration) -> bool {
    waited >= plane.shared.config().worker_startup_timeout
        && plane
            .registry()
            .entry(key)
            .is_some_and(|entry| entry.finders.is_only(Finder::Api))
}

/// Says once that the first worker is ready, and who is not; repeats it while some are missing. One at a time: it speaks
/// of all workers.
pub(super) async fn report_start(plane: Arc<Plane>) {
    // ORDERING: Relaxed; only tasks of this thread touch it.
    if !plane.is_reporting.swap(true, Ordering::Relaxed) {
        report(&plane).await;
        plane.is_reporting.store(false, Ordering::Relaxed);
    }
}

async fn report(plane: &Plane) {
    let total_count = plane.registry().entries().len();
    if total_count == 0 {
        let config = plane.shared.config();
        match &config.pd {
            _ if config.discovery.is_on() => {
                tracing::info!("no workers yet: discovery looks for them");
            }
            None => tracing::warn!("no workers yet: add them with POST /add_worker?url="),
            Some(pd) if pd.discovery_address.is_some() => {
                tracing::info!("no workers yet: engines register themselves");
            }
            Some(_) => tracing::warn!(
                "no workers yet: add them with POST /add_worker?url=&worker_type=prefill (or decode)"
            ),
        }
        return;
    }
    let mut changes = plane.changes.subscribe();
    let interval = || plane.shared.config().worker_startup_check_interval;
    let first_look = interval().min(Duration::from_secs(5));
    let mut stretch = 1;
    let _ = tokio::time::timeout(
        first_look,
        changes.wait_for(|_| plane.registry().obstacle().is_none()),
    )
    .await;
    // All probes have begun at once: give the others the moment that the first did not need.
    tokio::time::sleep(Duration::from_millis(200)).await;
    loop {
        let (ready_count, missing) = missing(plane);
        let obstacle = plane.registry().obstacle();
        if missing.is_empty() {
            match obstacle {
                Some(obstacle) if plane.shared.config().pd.is_some() => tracing::warn!(
                    ready_count,
                    "all workers have been ready, but nothing can be served: {obstacle}"
                ),
                _ => tracing::info!(ready_count, "all workers have been ready"),
            }
            return;
        }
        let missing_count = missing.len();
        let listed = missing.into_iter().take(8).collect::<Vec<_>>().join("; ");
        if ready_count == 0 {
            tracing::warn!(missing_count, "no worker is ready yet: {listed}");
        } else if let Some(obstacle) = obstacle {
            tracing::warn!(
                ready_count,
                missing_count,
                "not serving yet, {obstacle}: {listed}"
            );
        } else {
            tracing::warn!(
                ready_count,
                missing_count,
                "serving, but these workers are not ready: {listed}"
            );
        }
        // A worker that stays away for hours is worth a line now and then.
        let pause = interval().saturating_mul(stretch);
        tokio::time::sleep(pause.min(REPORT_PAUSE_MAX.max(interval()))).await;
        stretch = stretch.saturating_mul(2);
    }
}

fn missing(plane: &Plane) -> (usize, Vec<String>) {
    let registry = plane.registry();
    let starting = registry
        .entries()
        .iter()
        .filter(|entry| entry.state() == "starting");
    let missing = starting.map(|entry| {
        let reason = entry.reason().unwrap_or_default();
        format!("{} {} ({reason})", entry.role.label(), entry.url)
    });
    (registry.ready_count(), missing.collect())
}

/// Chance for the spread of probes; nothing depends on its quality.
pub(super) struct Dice {
    state: RandomState,
    count: u64,
}

impl Dice {
    pub(super) fn new() -> Dice {
        Dice {
            state: RandomState::new(),
            count: 0,
        }
    }

    /// 0 to 1, 1 excluded.
    pub(super) fn roll(&mut self) -> f64 {
        self.count += 1;
        // 53 bits: what an f64 holds exactly.
        (self.state.hash_one(self.count) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
