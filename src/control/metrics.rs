//! Prometheus: its own listener on the control thread. Nothing is kept for it; each scrape reads the counters of the
//! cores and the books. vllm-router's names (`vllm_router_`) where they mean the same, ours (`corelane_`) beside them.
//!
//! Labels are bounded whatever clients send: routes, outcomes and reasons are fixed lists, workers are those registered.

use std::fmt;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use shards::HistogramSnapshot;

use super::discovery::Discovery;
use super::kv::SourceView;
use super::standing::Standing;
use super::{Plane, WorkerView, admin_port, reply};
use crate::route::{Reason, Role, Whole};
use crate::shared::{CoreStats, Outcome, PdStats, Route};
use families::{Families, Label};

mod families;

/// Any path serves scrapes, as vllm-router's listener does.
pub(super) fn router(plane: Arc<Plane>) -> Router {
    Router::new().fallback(scrape).with_state(plane)
}

async fn scrape(State(plane): State<Arc<Plane>>, headers: HeaderMap) -> Response {
    if let Err(denied) = admin_port::permit_scrape(&plane.shared.config(), &headers) {
        return reply::denied(denied);
    }
    let accepts_openmetrics = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("application/openmetrics-text"));
    let Ok(text) = page(plane) else {
        return reply::error(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal_error",
            "metrics cannot be written",
        );
    };
    let (text, content_type) = if accepts_openmetrics {
        (
            text,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )
    } else {
        (
            families::classic(&text),
            "text/plain; version=0.0.4; charset=utf-8",
        )
    };
    let mut response = reply::text(StatusCode::OK, text);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// The whole page, in OpenMetrics text format 1.0.
fn page(plane: Arc<Plane>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(plane)));
    let mut text = String::with_capacity(64 << 10);
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

struct Scrape(Arc<Plane>);

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scrape")
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder) -> fmt::Result {
        let mut out = Families::new(encoder);
        let workers = self.0.workers();
        self.requests(&mut out)?;
        self.decisions(&mut out)?;
        self.fleet(&mut out, &workers)?;
        self.workers(&mut out, &workers)?;
        self.times(&mut out)?;
        self.tree(&mut out)?;
        self.kv(&mut out)?;
        self.reloads(&mut out)?;
        self.discovery(&mut out)?;
        if self.0.shared.config().pd.is_some() {
            self.pd(&mut out)?;
            self.pd_workers(&mut out, &workers)?;
            self.registrations(&mut out)?;
        }
        self.connections(&mut out)
    }
}

/// A counter of a worker's events: name, help, and where it is read.
type Told = (&'static str, &'static str, fn(&SourceView) -> u64);

/// What `request_errors_total` calls an outcome; none: no error of worker or router.
fn error_type(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Ok | Outcome::ClientError => None,
        Outcome::WorkerError => Some("worker_error"),
        Outcome::Refused => Some("invalid_request"),
        Outcome::NoWorker => Some("no_available_workers"),
        Outcome::WorkerFailed => Some("backend_error"),
        Outcome::Broken => Some("broken_stream"),
        Outcome::ClientGone => Some("client_gone"),
        Outcome::Overloaded => Some("overloaded"),
    }
}

/// Outcomes in which a worker's whole answer went to the client.
const ANSWERED: [Outcome; 3] = [Outcome::Ok, Outcome::ClientError, Outcome::WorkerError];

impl Scrape {
    fn sum(&self, read: impl Fn(&CoreStats) -> u64) -> u64 {
        self.0
            .shared
            .cores
            .iter()
            .map(|core| read(&core.stats))
            .sum()
    }

    fn exchanges(&self, route: Route, outcome: Outcome) -> u64 {
        self.sum(|stats| stats.exchanges[route as usize][outcome as usize].value())
    }

    fn reasons(&self, is_meant: impl Fn(Reason) -> bool) -> u64 {
        let meant = || Reason::ALL.into_iter().filter(|reason| is_meant(*reason));
        self.sum(|stats| {
            meant()
                .map(|reason| stats.decisions[reason as usize].value())
                .sum()
        })
    }

    fn requests(&self, out: &mut Families) -> fmt::Result {
        let routes = || {
            Route::ALL
                .into_iter()
                .filter(|route| *route != Route::Admin)
        };
        out.counters(
            "vllm_router_requests",
            "Exchanges that a worker answered, whatever the status",
            routes().map(|route| {
                let count = ANSWERED
                    .into_iter()
                    .map(|outcome| self.exchanges(route, outcome))
                    .sum();
                ([("route", route.label().into())], count)
            }),
        )?;
        out.counters(
            "vllm_router_request_errors",
            "Exchanges that failed, by what failed; worker_error is a 5xx answer that was relayed",
            routes().flat_map(|route| {
                Outcome::ALL.into_iter().filter_map(move |outcome| {
                    let labels = [
                        ("route", route.label().into()),
                        ("error_type", error_type(outcome)?.into()),
                    ];
                    Some((labels, self.exchanges(route, outcome)))
                })
            }),
        )?;
        out.counters(
            "corelane_exchanges",
            "Exchanges ended, by route and outcome",
            Route::ALL.into_iter().flat_map(|route| {
                Outcome::ALL.into_iter().map(move |outcome| {
                    let labels = [
                        ("route", route.label().into()),
                        ("outcome", outcome.label().into()),
                    ];
                    (labels, self.exchanges(route, outcome))
                })
            }),
        )?;
        out.counter(
            "vllm_router_embeddings",
            "Embeddings that were answered well",
            self.exchanges(Route::Embeddings, Outcome::Ok),
        )?;
        out.counters(
            "vllm_router_embeddings_errors",
            "Embeddings that were not, by what failed",
            Outcome::ALL.into_iter().filter_map(|outcome| {
                let labels = [("error_type", error_type(outcome)?.into())];
                Some((labels, self.exchanges(Route::Embeddings, outcome)))
            }),
        )?;
        out.counter(
            "vllm_router_retries",
            "Retries on another worker",
            self.sum(|s| s.retries.value()),
        )?;
        out.counter(
            "corelane_resends",
            "Requests sent again on a fresh connection because a reused one had died",
            self.sum(|s| s.resends.value()),
        )?;
        out.counter(
            "corelane_malformed",
            "Requests that could not be parsed, or broke a limit",
            self.sum(|s| s.malformed.value()),
        )?;
        out.counter(
            "corelane_tls_handshakes",
            "TLS handshakes that were done, with clients and workers",
            self.sum(|s| s.tls_handshakes.value()),
        )?;
        out.counter(
            "corelane_tls_failures",
            "Connections that ended because TLS could not go on",
            self.sum(|s| s.tls_failures.value()),
        )
    }

    fn decisions(&self, out: &mut Families) -> fmt::Result {
        let (policy, stage) = self.policy_and_stage();
        out.counters(
            "corelane_decisions",
            "Choices of a worker, by reason",
            Reason::ALL.into_iter().map(|reason| {
                (
                    [("reason", reason.label().into())],
                    self.reasons(|other| other == reason),
                )
            }),
        )?;
        let mut outcomes: Vec<&'static str> =
            Reason::ALL.into_iter().map(Reason::outcome).collect();
        outcomes.sort_unstable();
        outcomes.dedup();
        let labels = |outcome: &'static str| {
            [
                ("policy", policy.into()),
                ("stage", stage.into()),
                ("outcome", outcome.into()),
            ]
        };
        out.counters(
            "vllm_router_prefix_routing_decisions",
            "Choices of a worker, in vllm-router's words",
            outcomes.into_iter().map(|outcome| {
                (
                    labels(outcome),
                    self.reasons(|reason| reason.outcome() == outcome),
                )
            }),
        )?;
        let of = |outcome: &'static str| self.reasons(|reason| reason.outcome() == outcome);
        out.counter(
            "vllm_router_cache_hits",
            "Choices that followed a known prefix",
            of("prefix_hit"),
        )?;
        out.counter(
            "vllm_router_cache_misses",
            "Choices without a prefix known well enough",
            of("prefix_miss"),
        )?;
        out.counter(
            "vllm_router_load_balancing_events",
            "Choices against the prefix because its worker was overloaded",
            of("load_imbalance"),
        )
    }

    /// Labels of decisions. The cores count those of both legs together: where the roles' policies differ, it is
    /// neither's.
    fn policy_and_stage(&self) -> (&'static str, &'static str) {
        let config = self.0.shared.config();
        match &config.pd {
            None => (config.settings.policy.name(), "regular"),
            Some(pd) if pd.prefill.policy == pd.decode.policy => (pd.prefill.policy.name(), "all"),
            Some(_) => ("mixed", "all"),
        }
    }

    fn fleet(&self, out: &mut Families, workers: &[WorkerView]) -> fmt::Result {
        let ready = || workers.iter().filter(|worker| worker.state == "ready");
        let loads = || ready().map(|worker| u64::from(worker.in_flight));
        out.gauge(
            "vllm_router_active_workers",
            "Workers that may get new requests",
            ready().count() as u64,
        )?;
        out.gauge(
            "vllm_router_max_load",
            "Largest load of a ready worker",
            loads().max().unwrap_or(0),
        )?;
        out.gauge(
            "vllm_router_min_load",
            "Smallest load of a ready worker",
            loads().min().unwrap_or(0),
        )?;
        let registered_count = workers
            .iter()
            .filter(|worker| worker.state != "draining")
            .count();
        out.gauge(
            "corelane_registered_workers",
            "Workers registered, in whatever state",
            registered_count as u64,
        )?;
        let sessions = self.0.shared.sessions.get();
        out.gauge(
            "corelane_sticky_sessions",
            "Sessions bound to workers by sticky_least_loaded, in P/D for each role",
            sessions.map_or(0, |sessions| sessions.total()),
        )?;
        out.gauge(
            "corelane_draining",
            "1 while this router drains",
            u64::from(self.0.shared.is_draining()),
        )?;
        out.counter(
            "corelane_books_underflow",
            "Counts given back that were not taken; anything but 0 is a fault of the router",
            self.0.shared.books.underflow_count(),
        )
    }

    fn reloads(&self, out: &mut Families) -> fmt::Result {
        let counts = self.0.reload.counts();
        out.counters(
            "corelane_config_reloads",
            "Times the config file was read again, by what came of it",
            [("ok", counts.ok), ("refused", counts.refused)]
                .into_iter()
                .map(|(result, count)| ([("result", result.into())], count)),
        )?;
        out.gauge(
            "corelane_config_last_reload_success",
            "0: the last reload of the config file was refused and the old configuration holds; 1: it was not, or there was none",
            u64::from(counts.is_last_ok),
        )
    }

    fn workers(&self, out: &mut Families, workers: &[WorkerView]) -> fmt::Result {
        let config = self.0.shared.config();
        let label = |worker: &WorkerView| [("worker", Label::Shared(worker.url.clone()))];
        let each = |read: fn(&WorkerView) -> u64| {
            workers
                .iter()
                .map(move |worker| (label(worker), read(worker)))
        };
        let books = |read: fn(shards::Load) -> u64| {
            workers.iter().map(move |worker| {
                (
                    label(worker),
                    read(self.0.shared.books.load(worker.id.slot)),
                )
            })
        };
        out.gauges(
            "vllm_router_worker_health",
            "1: may get new requests",
            each(|w| u64::from(w.state == "ready")),
        )?;
        let registry = self.0.registry();
        out.gauges(
            "vllm_router_cb_state",
            "0: closed, 1: open, 2: half-open; of whatever took the worker out",
            workers.iter().map(|worker| {
                let state = match registry.standing(worker.id) {
                    Standing::Good { .. } => 0,
                    Standing::Out { .. } => 1,
                    Standing::Trial { .. } => 2,
                };
                (label(worker), state)
            }),
        )?;
        drop(registry);
        out.gauges(
            "vllm_router_worker_load",
            "Exchanges in flight",
            each(|w| u64::from(w.in_flight)),
        )?;
        out.gauges(
            "vllm_router_running_requests",
            "Exchanges in flight",
            each(|w| u64::from(w.in_flight)),
        )?;
        out.gauges(
            "corelane_worker_waiting",
            "Exchanges before their first byte",
            books(|load| load.waiting.into()),
        )?;
        out.gauges(
            "corelane_worker_active",
            "Exchanges after their first byte",
            books(|load| load.active.into()),
        )?;
        out.gauges(
            "corelane_worker_waiting_bytes",
            "Prompt bytes of waiting exchanges",
            books(|l| l.waiting_bytes),
        )?;
        out.gauges(
            "corelane_worker_active_bytes",
            "Prompt bytes of active exchanges",
            books(|l| l.active_bytes),
        )?;
        out.counters(
            "vllm_router_processed_requests",
            "Times the worker was chosen",
            each(|w| w.chosen),
        )?;
        out.counters(
            "vllm_router_policy_decisions",
            "Times the policy chose the worker",
            workers.iter().map(|worker| {
                (
                    [
                        (
                            "policy",
                            config.settings_of(worker.role).policy.name().into(),
                        ),
                        ("worker", Label::Shared(worker.url.clone())),
                    ],
                    worker.chosen,
                )
            }),
        )?;
        out.counters(
            "corelane_prefix_prompt_bytes",
            "Prompt bytes sent to the worker",
            each(|w| w.prompt_bytes),
        )?;
        out.counters(
            "corelane_prefix_matched_bytes",
            "Of these, bytes it should hold",
            each(|w| w.matched_bytes),
        )?;
        out.counters(
            "vllm_router_cb_outcomes",
            "What the circuit breaker judges by; 4xx, 429 and 503 are neither",
            workers.iter().flat_map(|worker| {
                let outcomes = [
                    ("success", worker.successes),
                    ("failure", worker.failures + worker.errors),
                ];
                outcomes.map(|(outcome, count)| {
                    let labels = [
                        ("worker", Label::Shared(worker.url.clone())),
                        ("outcome", outcome.into()),
                    ];
                    (labels, count)
                })
            }),
        )?;
        out.counters(
            "corelane_worker_failures",
            "Exchanges that failed with the worker",
            each(|w| w.failures),
        )
    }

    /// What the cores count of requests in two legs.
    fn pd(&self, out: &mut Families) -> fmt::Result {
        let sum = |read: fn(&PdStats) -> u64| self.sum(|stats| read(&stats.pd));
        out.counter(
            "vllm_router_pd_requests",
            "Requests that went in two legs",
            sum(|pd| pd.requests.value()),
        )?;
        out.counter(
            "vllm_router_pd_missing_kv_transfer_params",
            "Prefill answers without transfer parameters",
            sum(|pd| pd.missing_transfer.value()),
        )?;
        out.counter(
            "vllm_router_pd_handovers",
            "Prefill legs that ended with transfer parameters",
            sum(|pd| pd.handovers.value()),
        )?;
        // Ends first: an orphan that ends between the reads is then no negative number.
        let released = sum(|pd| pd.orphans_released.value());
        let lost = sum(|pd| pd.orphans_lost.value());
        let orphans = sum(|pd| pd.orphans.value());
        out.counters(
            "vllm_router_pd_orphaned_handovers",
            "Hand-overs that no decode worker got, by what became of their blocks",
            [("released", released), ("lost", lost)]
                .into_iter()
                .map(|(outcome, count)| ([("outcome", outcome.into())], count)),
        )?;
        out.gauge(
            "vllm_router_pd_orphaned_handovers_in_flight",
            "Hand-overs whose blocks are being released",
            orphans.saturating_sub(released).saturating_sub(lost),
        )?;
        let cores = self.0.shared.cores.iter();
        let oldest_ns = cores.map(|core| core.stats.pd.oldest_orphan_ns.value());
        out.seconds(
            "vllm_router_pd_orphaned_handover_oldest_seconds",
            "Age of the oldest of them; 0: none",
            oldest_ns.max().unwrap_or(0),
        )?;
        out.counter(
            "vllm_router_pd_skipped_prefill",
            "Requests without a prefill leg because decode lacked too little",
            sum(|pd| pd.skipped_prefill.value()),
        )?;
        out.counter(
            "vllm_router_pd_stale_handovers",
            "Hand-overs too old to be used, or of a prefill worker that restarted",
            sum(|pd| pd.stale_handovers.value()),
        )?;
        out.counters(
            "vllm_router_pd_whole_requests",
            "Requests sent whole to a decode worker, by reason",
            Whole::ALL.into_iter().map(|why| {
                let count = self.sum(|stats| stats.pd.whole[why as usize].value());
                ([("reason", why.label().into())], count)
            }),
        )?;
        out.counter(
            "vllm_router_pd_usage_fixed",
            "Answers whose usage was put right with that of prefill",
            sum(|pd| pd.usage_fixed.value()),
        )?;
        let cores = self.0.shared.cores.iter();
        let gap = families::merge(cores.map(|core| core.stats.pd.handover_gap.snapshot()));
        out.histogram(
            "vllm_router_pd_handover_gap_seconds",
            "From the end of prefill to the dispatch of decode",
            gap.as_ref(),
        )
    }

    /// Where workers come from, and what looking for them has seen.
    fn discovery(&self, out: &mut Families) -> fmt::Result {
        let counts = self.0.registry().count_by_finder();
        out.gauges(
            "corelane_workers_by_source",
            "Registered workers, by who says that they are there; one that several say so of counts for each",
            counts
                .into_iter()
                .map(|(finder, count)| ([("source", finder.label().into())], count as u64)),
        )?;
        let config = self.0.shared.config();
        let all = |read: fn(&super::discovery::Stats) -> u64| {
            Discovery::used(&config.discovery).map(move |finder| {
                let stats = self.0.discovery.stats(finder);
                ([("source", finder.label().into())], read(stats))
            })
        };
        out.counters(
            "corelane_discovery_workers_added",
            "Workers that were found",
            all(super::discovery::Stats::added),
        )?;
        out.counters(
            "corelane_discovery_workers_removed",
            "Workers that are found no more",
            all(super::discovery::Stats::removed),
        )?;
        out.counters(
            "corelane_discovery_errors",
            "Times that nothing could be found out, or a worker that was found not be registered",
            all(super::discovery::Stats::errors),
        )?;
        out.gauges(
            "corelane_discovery_last_success_timestamp_seconds",
            "When it was known for the last time who is there; 0: never",
            all(super::discovery::Stats::succeeded_at),
        )
    }

    /// Engines that register themselves.
    fn registrations(&self, out: &mut Families) -> fmt::Result {
        out.counter(
            "corelane_discovery_registrations",
            "Messages of engines that registered themselves",
            self.0.registrations.registrations(),
        )?;
        out.counter(
            "corelane_discovery_refused",
            "Messages and peers at the discovery address that made no sense",
            self.0.registrations.bad(),
        )
    }

    /// vllm-router's families of one role's workers.
    fn pd_workers(&self, out: &mut Families, workers: &[WorkerView]) -> fmt::Result {
        let of = |role: Role, read: fn(&WorkerView) -> u64| {
            let workers = workers.iter().filter(move |worker| worker.role == role);
            workers.map(move |worker| {
                (
                    [("worker", Label::Shared(worker.url.clone()))],
                    read(worker),
                )
            })
        };
        out.counters(
            "vllm_router_pd_prefill_requests",
            "Times the prefill worker was chosen",
            of(Role::Prefill, |w| w.chosen),
        )?;
        out.counters(
            "vllm_router_pd_decode_requests",
            "Times the decode worker was chosen",
            of(Role::Decode, |w| w.chosen),
        )?;
        out.counters(
            "vllm_router_pd_prefill_errors",
            "Exchanges that failed with the prefill worker",
            of(Role::Prefill, |w| w.failures),
        )?;
        out.counters(
            "vllm_router_pd_decode_errors",
            "Exchanges that failed with the decode worker",
            of(Role::Decode, |w| w.failures),
        )?;
        out.gauges(
            "vllm_router_pd_prefill_occupancy",
            "Prefill legs in flight",
            of(Role::Prefill, |w| w.in_flight.into()),
        )?;
        out.gauges(
            "vllm_router_pd_pending_decode_requests",
            "Decode legs not dispatched yet",
            of(Role::Decode, |w| w.waiting.into()),
        )?;
        out.gauges(
            "vllm_router_pd_active_decode_requests",
            "Decode legs dispatched and not ended",
            of(Role::Decode, |w| w.active.into()),
        )
    }

    fn times(&self, out: &mut Families) -> fmt::Result {
        let merged = |read: fn(&CoreStats) -> HistogramSnapshot| {
            families::merge(self.0.shared.cores.iter().map(|core| read(&core.stats)))
        };
        let duration = merged(|stats| stats.duration.snapshot());
        out.histogram(
            "vllm_router_generate_duration_seconds",
            "Whole exchange",
            duration.as_ref(),
        )?;
        out.histogram(
            "corelane_request_duration_seconds",
            "Whole exchange, first byte in to last byte out",
            duration.as_ref(),
        )?;
        out.histogram(
            "corelane_time_to_first_byte_seconds",
            "From the last byte of the request to the first of the answer's body",
            merged(|stats| stats.first_byte.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_chunk_gap_seconds",
            "Between two pieces of an answer",
            merged(|stats| stats.gap.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_decision_seconds",
            "Choosing a worker: key, find and pick",
            merged(|stats| stats.decision.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_added_seconds",
            "The router's own time: request complete to request sent, answer head in to answer head out",
            merged(|stats| stats.added.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_queue_wait_seconds",
            "How long requests that waited for their turn or a worker had waited when they got it",
            merged(|stats| stats.waits.snapshot()).as_ref(),
        )
    }

    fn tree(&self, out: &mut Families) -> fmt::Result {
        let tree = &self.0.shared.tree;
        out.gauge(
            "vllm_router_tree_size",
            "Blocks remembered, summed over workers",
            tree.membership_count() as u64,
        )?;
        out.gauge(
            "corelane_prefix_tree_bytes",
            "Memory of the prefix tree",
            tree.bytes() as u64,
        )?;
        out.gauge(
            "corelane_prefix_tree_nodes",
            "Blocks known",
            tree.node_count() as u64,
        )?;
        out.gauge(
            "corelane_prefix_tree_memberships",
            "Pairs of a block and a worker that holds it",
            tree.membership_count() as u64,
        )?;
        out.counter(
            "corelane_prefix_tree_evicted",
            "Blocks forgotten for room",
            tree.evicted_count(),
        )?;
        out.counter(
            "corelane_lessons_dropped",
            "Batches of new prefixes not learnt because a mailbox was full",
            self.sum(|stats| stats.lessons_dropped.value()),
        )?;
        let log = self.0.shared.decision_log.as_ref();
        let lost = log.map_or(0, |log| log.lost_count());
        out.counter(
            "corelane_decision_log_dropped",
            "Records of --decision-log dropped because they could not be written fast enough, or at all",
            lost + self.sum(|stats| stats.decision_records_dropped.value()),
        )
    }

    /// What engines say they hold; nothing without `kv_aware`.
    fn kv(&self, out: &mut Families) -> fmt::Result {
        let Some(kv) = &self.0.shared.kv else {
            return Ok(());
        };
        let tree = &kv.index.tree;
        let (bytes, held) = (tree.bytes() as u64, tree.membership_count() as u64);
        let views = self.0.kv.views();
        let names: usize = views.iter().map(|view| view.name_bytes).sum();
        out.gauge(
            "corelane_kv_index_bytes",
            "Memory of the exact index",
            bytes,
        )?;
        out.gauge(
            "corelane_kv_names_bytes",
            "Memory of the engines' names for blocks",
            names as u64,
        )?;
        out.gauge(
            "corelane_kv_index_memberships",
            "Pairs of a KV block and a source that holds it",
            held,
        )?;
        out.counter(
            "corelane_kv_index_evicted",
            "KV blocks forgotten for room (--kv-index-bytes)",
            tree.evicted_count(),
        )?;
        out.counter(
            "corelane_kv_lessons",
            "Batches of KV blocks sent to the cores",
            self.0.kv.lesson_count(),
        )?;
        // By worker: the labels of ranks would be as many as the fleet's GPUs.
        let mut workers: Vec<SourceView> = Vec::new();
        for view in views {
            match workers.iter_mut().find(|sum| sum.worker == view.worker) {
                Some(sum) => sum.add(&view),
                None => workers.push(view),
            }
        }
        let each = |read: fn(&SourceView) -> u64| {
            let each = workers.iter();
            each.map(move |view| ([("worker", Label::Shared(view.worker.clone()))], read(view)))
        };
        out.gauges(
            "corelane_kv_trust",
            "How far a worker's events are believed: 0 blind, 1 degraded, 2 catching up, 3 exact",
            each(|view| view.trust as u64),
        )?;
        out.gauges(
            "corelane_kv_blocks",
            "KV blocks that a worker says it holds",
            each(|view| view.block_count as u64),
        )?;
        let counters: [Told; 7] = [
            ("corelane_kv_stored", "KV blocks stored", |v| {
                v.counts.stored
            }),
            ("corelane_kv_removed", "KV blocks removed", |v| {
                v.counts.removed
            }),
            (
                "corelane_kv_passed_over",
                "KV blocks without a known parent, or of another size or cache group",
                |v| v.counts.passed_over,
            ),
            (
                "corelane_kv_bad_events",
                "Events and messages that make no sense",
                |v| v.counts.bad,
            ),
            ("corelane_kv_gaps", "Gaps in a worker's events", |v| v.gaps),
            (
                "corelane_kv_replays",
                "Replays that gave all that was missing",
                |v| v.replays,
            ),
            (
                "corelane_kv_restarts",
                "Times a worker's publisher has begun anew",
                |v| v.restarts,
            ),
        ];
        for (name, help, read) in counters {
            out.counters(name, help, each(read))?;
        }
        self.tokens(out)
    }

    /// Prompts of text; nothing without a tokenizer.
    fn tokens(&self, out: &mut Families) -> fmt::Result {
        let Some(desk) = &self.0.shared.desk else {
            return Ok(());
        };
        let fates = desk.fates();
        out.counters(
            "corelane_tokenizer_prompts",
            "Prompts of text by what became of them (late: placed without tokens, which are then made all the same)",
            fates.map(|(fate, count)| ([("result", Label::Fixed(fate.label()))], count)),
        )?;
        let [made, remembered] = desk.tokens();
        out.counter(
            "corelane_tokenizer_tokens_made",
            "Tokens made of text",
            made,
        )?;
        out.counter(
            "corelane_tokenizer_tokens_remembered",
            "Tokens of messages seen before",
            remembered,
        )?;
        out.gauge(
            "corelane_tokenizer_waiting",
            "Prompts that wait for a tokenizer's thread",
            desk.waiting_count() as u64,
        )
    }

    fn connections(&self, out: &mut Families) -> fmt::Result {
        let accepted = self.sum(|stats| stats.accepted.value());
        let closed = self.sum(|stats| stats.closed.value());
        let upstream_opened = self.sum(|stats| stats.upstream_opened.value());
        let upstream_closed = self.sum(|stats| stats.upstream_closed.value());
        let (running, waiting) = self.0.shared.gate.counts();
        out.gauge(
            "corelane_running_requests",
            "Requests that use workers now, each to the last byte of its answer",
            u64::from(running),
        )?;
        out.gauge(
            "corelane_queued_requests",
            "Requests that wait for their turn or for a worker",
            u64::from(waiting),
        )?;
        out.gauge(
            "corelane_queued_bytes",
            "Bytes of those",
            self.0.shared.queued.bytes(),
        )?;
        out.gauge(
            "corelane_body_memory_bytes",
            "Bodies over 32 KiB that are read whole, as far as they are in memory",
            self.0.shared.bodies.bytes(),
        )?;
        out.counter(
            "corelane_connections_accepted",
            "Connections from clients",
            accepted,
        )?;
        out.gauge(
            "corelane_connections_open",
            "Connections from clients, open now",
            accepted.saturating_sub(closed),
        )?;
        out.counter(
            "corelane_upstream_connections_opened",
            "Connections to workers",
            upstream_opened,
        )?;
        out.gauge(
            "corelane_upstream_connections_open",
            "Connections to workers, open now",
            upstream_opened.saturating_sub(upstream_closed),
        )?;
        out.counter(
            "corelane_loop_turns",
            "Turns of the cores' event loops",
            self.sum(|s| s.turns.value()),
        )
    }
}
