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
use shards::{Counter, HistogramSnapshot};

use super::discovery::Discovery;
use super::standing::Breaker;
use super::{Plane, WorkerView, admin_port, reply};
use crate::route::{Reason, Role};
use crate::shared::{ATTEMPT_COUNT, CoreStats, LATENCY_BOUNDS_NS, Outcome, ROUTE_COUNT, Route};
use families::{Families, Label};

mod families;
mod kv;
mod pd;

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
        self.kv(&mut out, &workers)?;
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

/// Those of workers: admin paths are answered here.
fn routes() -> impl Iterator<Item = Route> {
    let all = Route::ALL.into_iter();
    all.filter(|route| *route != Route::Admin)
}

/// So many pauses of no length.
fn at_once(count: u64) -> HistogramSnapshot {
    let mut counts = vec![0; LATENCY_BOUNDS_NS.len() + 1];
    counts[0] = count;
    HistogramSnapshot {
        bounds: &LATENCY_BOUNDS_NS,
        counts,
        sum_ns: 0,
        count,
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

    /// Decisions of one role for such reasons.
    fn reasons_of(&self, role: Role, is_meant: impl Fn(Reason) -> bool) -> u64 {
        let meant = || Reason::ALL.into_iter().filter(|reason| is_meant(*reason));
        self.sum(|stats| {
            let counts = &stats.decisions[role as usize];
            meant().map(|reason| counts[reason as usize].value()).sum()
        })
    }

    /// Those of all roles.
    fn reasons(&self, is_meant: impl Fn(Reason) -> bool) -> u64 {
        let roles = Role::ALL.into_iter();
        roles.map(|role| self.reasons_of(role, &is_meant)).sum()
    }

    fn merged(&self, read: impl Fn(&CoreStats) -> HistogramSnapshot) -> Option<HistogramSnapshot> {
        families::merge(self.0.shared.cores.iter().map(|core| read(&core.stats)))
    }

    fn requests(&self, out: &mut Families) -> fmt::Result {
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
        out.gauge(
            "vllm_router_embeddings_queue_size",
            "Embeddings that are here: read, waiting, or being answered",
            self.sum(|s| s.begun[Route::Embeddings as usize].value())
                .saturating_sub(
                    Outcome::ALL
                        .into_iter()
                        .map(|outcome| self.exchanges(Route::Embeddings, outcome))
                        .sum(),
                ),
        )?;
        out.histogram(
            "vllm_router_embeddings_duration_seconds",
            "Whole exchange, of embeddings",
            self.merged(|stats| stats.embeddings.snapshot()).as_ref(),
        )?;
        self.retries(out)?;
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

    fn retries(&self, out: &mut Families) -> fmt::Result {
        let by_route = |read: fn(&CoreStats) -> &[Counter; ROUTE_COUNT]| {
            routes().map(move |route| {
                let count = self.sum(|stats| read(stats)[route as usize].value());
                ([("route", route.label().into())], count)
            })
        };
        out.counters(
            "vllm_router_retries",
            "Retries on another worker",
            by_route(|stats| &stats.retries),
        )?;
        out.counters(
            "vllm_router_retries_exhausted",
            "Failures that would have been tried again, had there been a retry, budget or worker left",
            by_route(|stats| &stats.exhausted),
        )?;
        let attempts = (0..ATTEMPT_COUNT).map(|at| {
            let count = self.sum(|stats| stats.retries_by_attempt[at].value());
            ([("attempt", Label::Number(at as u64 + 1))], at_once(count))
        });
        out.histograms(
            "vllm_router_retry_backoff_duration_seconds",
            "Pause before a retry, by which one of its request it was (the last: or a later one); another worker is asked at once",
            attempts.filter(|(_, snapshot)| snapshot.count > 0),
        )
    }

    fn decisions(&self, out: &mut Families) -> fmt::Result {
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
        let config = self.0.shared.config();
        let outcomes = &outcomes;
        out.counters(
            "vllm_router_prefix_routing_decisions",
            "Choices of a worker, in vllm-router's words",
            config.needed_roles().iter().flat_map(|role| {
                outcomes.iter().map(|outcome| {
                    let policy = config.settings_of(*role).policy.name();
                    let labels = [
                        ("policy", policy.into()),
                        ("stage", role.label().into()),
                        ("outcome", (*outcome).into()),
                    ];
                    let count = self.reasons_of(*role, |reason| reason.outcome() == *outcome);
                    (labels, count)
                })
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
            workers
                .iter()
                .map(|worker| (label(worker), registry.standing(worker.id).breaker() as u64)),
        )?;
        let changes = workers.iter().flat_map(|worker| {
            let counts = registry.transitions(worker.id);
            let pairs = Breaker::ALL
                .into_iter()
                .flat_map(|from| Breaker::ALL.into_iter().map(move |to| (from, to)));
            pairs
                .filter(|(from, to)| from != to)
                .map(move |(from, to)| {
                    let labels = [
                        ("worker", Label::Shared(worker.url.clone())),
                        ("from", from.label().into()),
                        ("to", to.label().into()),
                    ];
                    (labels, counts[from as usize][to as usize])
                })
        });
        out.counters(
            "vllm_router_cb_state_transitions",
            "Times the worker went from one of these states to another",
            changes.filter(|(_, count)| *count > 0),
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
            "Exchanges whose answer has not begun (of a stream: its first event has not come)",
            books(|load| load.waiting.into()),
        )?;
        out.gauges(
            "corelane_worker_active",
            "Exchanges whose answer has begun",
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

    fn times(&self, out: &mut Families) -> fmt::Result {
        let duration = self.merged(|stats| stats.duration.snapshot());
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
            self.merged(|stats| stats.first_byte.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_chunk_gap_seconds",
            "Between two pieces of an answer",
            self.merged(|stats| stats.gap.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_decision_seconds",
            "Choosing a worker: key, find and pick",
            self.merged(|stats| stats.decision.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_added_seconds",
            "The router's own time: request complete to request sent, answer head in to answer head out",
            self.merged(|stats| stats.added.snapshot()).as_ref(),
        )?;
        out.histogram(
            "corelane_queue_wait_seconds",
            "How long requests that waited for their turn or a worker had waited when they got it",
            self.merged(|stats| stats.waits.snapshot()).as_ref(),
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
