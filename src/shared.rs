//! What the two planes share: the configuration, the fleet snapshot, the books, and one mailbox a core.
//!
//! The control thread writes the fleet and posts to the inboxes; the cores read. Nothing here is taken under a lock
//! on a request's way.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ahash::AHashMap;
use crossbeam::queue::SegQueue;
use shards::{
    Addresses, Books, Bucket, Counter, Domain, Doorbell, Gate, Gauge, Histogram, Lesson, Published,
    Sender, Sessions, Slot, Tree, WorkerId,
};

use crate::access_log::AccessLog;
use crate::config::Config;
use crate::decisions::{DecisionLog, Remembered};
use crate::held::ByteCount;
use crate::route::{Candidates, Index, PolicyKind, Reason, Role, Whole, name_of};
use crate::tls::ToWorker;
use crate::tokenize::{Desk, Done};

/// Sessions that can be bound to workers at a time (8 MiB); beyond it those that were not used for longest are let go.
pub const SESSION_COUNT_MAX: usize = 1 << 20;

/// How a MoRI-IO engine says blocks go over: fetched by decode, or written by prefill while it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the word it names")]
pub enum TransferMode {
    Read,
    Write,
}

/// What the KV connectors need to know of a worker, beyond where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvFacts {
    /// Mooncake: where decode workers find a prefill worker's blocks, `http://host:port`.
    pub bootstrap_address: Option<Arc<str>>,
    /// Mooncake: the engine's id, asked of the bootstrap address; none while not known.
    pub engine_id: Option<Arc<str>>,
    /// `host:port` as it stands in the request id of both legs (P2P-NCCL finds its peer there): the address of the
    /// engine's own ZMQ socket if it registered one, else the worker's.
    pub peer_address: Arc<str>,
    /// Data-parallel ranks of the engine, at least 1.
    pub dp_size: u32,
    /// Tensor-parallel ranks of the engine, at least 1.
    pub tp_size: u32,
    /// MoRI-IO: as the engine registered. Engines that are registered at a time have the same.
    pub transfer_mode: Option<TransferMode>,
}

/// One worker as the cores see it. Immutable: a change makes a new [`Fleet`].
#[derive(Clone, Debug)]
pub struct Worker {
    /// Slot in the books, and which life of the worker this is.
    pub id: WorkerId,
    /// What it does.
    pub role: Role,
    /// Which data-parallel rank of its engine this is: goes out as `X-data-parallel-rank`. None: the engine chooses.
    pub rank: Option<u32>,
    /// For P/D.
    pub kv: Arc<KvFacts>,
    /// As the operator wrote it, without a trailing slash; the label in metrics and the key of the admin API.
    pub url: Arc<str>,
    /// Where to connect; resolved by the control thread.
    pub address: SocketAddr,
    /// The worker's `Host` (RFC 9112 section 3.2): host, and port where it is not the scheme's own.
    pub authority: Arc<str>,
    /// Path in front of every request target (`""`, or `/prefix`).
    pub path_prefix: Arc<str>,
    /// How it is spoken to by TLS; none: plain HTTP.
    pub tls: Option<ToWorker>,
    /// Models the worker serves; empty while not known: it then takes any model.
    pub models: Vec<Arc<str>>,
}

/// The workers of one role that may get new requests (healthy, not draining).
#[derive(Debug, Default)]
pub struct Pool {
    /// Their slots, in no order that means anything.
    pub any: Candidates,
    /// Slots by model. A worker of unknown models stands in every list.
    pub by_model: AHashMap<Arc<str>, Candidates>,
    /// Slots of workers whose models are not known.
    pub of_unknown_models: Candidates,
    /// Workers that are out and may get a request now and then, to see whether they are well again.
    pub trials: Vec<Trial>,
    /// Workers that have just come back: chosen among for so many requests of a hundred only.
    pub easing: Vec<(Slot, u8)>,
    /// Workers that are out, tried or not: better than none for a request that all others have failed.
    pub spare: Candidates,
}

/// A worker that is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Where it counts.
    pub slot: Slot,
    /// Only while no more than this are in flight there: what is stuck on it, and one trial at a time beside that.
    pub load_max: u32,
}

/// What failed, stalled or came back of late: see `control::standing`. Everybody else is simply eligible.
#[derive(Clone, Debug, Default)]
pub struct Exceptions {
    /// Workers that are out, and tried.
    pub trials: Vec<Trial>,
    /// Workers that get a share of the requests, in percent.
    pub easing: Vec<(Slot, u8)>,
    /// Workers that are out, those that are tried among them.
    pub out: Vec<Slot>,
}

impl Pool {
    fn new(
        workers: &[&Worker],
        exceptions: &Exceptions,
        known_models: &ahash::AHashSet<Arc<str>>,
        has_rings: bool,
    ) -> Pool {
        let has = |slot: Slot| workers.iter().any(|worker| worker.id.slot == slot);
        let trials = exceptions.trials.iter().filter(|trial| has(trial.slot));
        let easing = exceptions.easing.iter().filter(|(slot, _)| has(*slot));
        let (trials, easing) = (trials.copied().collect(), easing.copied().collect());
        let (out, workers): (Vec<&Worker>, Vec<&Worker>) = workers
            .iter()
            .partition(|worker| exceptions.out.contains(&worker.id.slot));
        let of = |serves: &dyn Fn(&Worker) -> bool| -> Candidates {
            let serving = workers.iter().filter(|w| w.models.is_empty() || serves(w));
            serving.map(|w| (w.id.slot, name_of(&w.url))).collect()
        };
        let any = match has_rings {
            true => of(&|_| true).with_ring(),
            false => of(&|_| true),
        };
        let slots_of = |serves: &dyn Fn(&Worker) -> bool| match has_rings {
            true => of(serves).with_ring_of(&any),
            false => of(serves),
        };
        let by_model = known_models.iter().map(|model| {
            let serving = slots_of(&|w: &Worker| w.models.contains(model));
            (model.clone(), serving)
        });
        Pool {
            by_model: by_model.collect(),
            of_unknown_models: slots_of(&|_| false),
            any,
            trials,
            easing,
            spare: out.iter().map(|worker| worker.id.slot).collect(),
        }
    }
}

/// The fleet at one moment: published by the control thread, read by the cores.
#[derive(Debug, Default)]
pub struct Fleet {
    /// Workers whose probes are good, of all roles; those that are out for other reasons among them.
    pub eligible: Vec<Worker>,
    /// Index into `eligible` by slot.
    pub index_of: AHashMap<Slot, u16>,
    /// The same by role, in the order of [`Role::ALL`].
    pub pools: [Pool; 3],
    /// Every model known to be served by some worker, healthy or not: asking for it is 503 at worst, never 404.
    pub known_models: ahash::AHashSet<Arc<str>>,
    /// Workers registered, whatever their state.
    pub registered_count: usize,
}

impl Fleet {
    /// Makes a fleet of its eligible workers; `known_models` and `registered_count` are about all registered ones.
    /// `has_rings`: by role, whether its policy walks a ring.
    pub fn new(
        eligible: Vec<Worker>,
        exceptions: &Exceptions,
        known_models: ahash::AHashSet<Arc<str>>,
        registered_count: usize,
        has_rings: [bool; 3],
    ) -> Fleet {
        let index_of = eligible
            .iter()
            .enumerate()
            .map(|(i, w)| (w.id.slot, i as u16))
            .collect();
        let pools = Role::ALL.map(|role| {
            let workers: Vec<&Worker> = eligible.iter().filter(|w| w.role == role).collect();
            Pool::new(
                &workers,
                exceptions,
                &known_models,
                has_rings[role as usize],
            )
        });
        Fleet {
            eligible,
            index_of,
            pools,
            known_models,
            registered_count,
        }
    }

    /// What a session is bound by: each role has a worker of its own for it, and so has each model, where workers differ in
    /// what they serve.
    pub fn binding(&self, session: u64, role: Role, model: Option<&str>) -> u64 {
        let known = model.filter(|model| self.known_models.contains(*model));
        binding(session, role, known)
    }

    /// All that a session may be bound by.
    pub fn bindings(&self, session: u64) -> impl Iterator<Item = u64> {
        let models = || {
            let known = self.known_models.iter().map(|model| Some(&**model));
            known.chain([None])
        };
        let roles = Role::ALL.into_iter();
        roles.flat_map(move |role| models().map(move |model| binding(session, role, model)))
    }

    /// The eligible workers of a role.
    pub fn pool(&self, role: Role) -> &Pool {
        &self.pools[role as usize]
    }

    /// The eligible worker in a slot.
    pub fn worker(&self, slot: Slot) -> Option<&Worker> {
        self.index_of
            .get(&slot)
            .map(|i| &self.eligible[usize::from(*i)])
    }
}

fn binding(session: u64, role: Role, model: Option<&str>) -> u64 {
    // SplitMix64's step for the role; the hash of no model is 0.
    let role = (role as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = session ^ role ^ model.map_or(0, name_of);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 31)
}

/// What the control thread (or another core) tells a core.
#[derive(Debug)]
pub enum ToCore {
    /// The answer to a request that was handed over; `token` is the one it came with.
    Admin {
        /// Names the connection that waits.
        token: u64,
        /// The answer.
        reply: AdminReply,
    },
    /// A worker is gone, or came back as another life: forget what it held.
    Purge(Slot),
    /// A worker shows no sign of life while its peers work: what waits for it may go elsewhere.
    Stalled(Slot),
    /// The tokens of a prompt, or that they cannot be told.
    Tokens(Done),
    /// The head of the core's line has been let in.
    YourTurn,
    /// Those who wait for a worker may find one now.
    Rouse,
    /// Somebody asks what was decided for a request, by [`request_hash`](crate::decisions::request_hash).
    Recall {
        /// That hash.
        request: u64,
        /// Where it wants it told.
        answer: tokio::sync::mpsc::UnboundedSender<Vec<Remembered>>,
    },
    /// The configuration that holds from now on.
    Configure(Arc<Config>),
    /// `/flush_cache`: forget every prefix.
    Flush,
    /// Stop accepting; finish what runs; close connections as they become idle.
    Drain,
    /// Stop now.
    Stop,
}

/// A request for an admin path that arrived on a data port, handed over whole.
#[derive(Debug)]
pub struct AdminRequest {
    /// The core that waits for the answer, and its name for the connection.
    pub core: usize,
    /// Given back in [`ToCore::Admin`].
    pub token: u64,
    /// Method, as sent.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// End-to-end header fields, in order.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The whole body.
    pub body: Vec<u8>,
}

/// An answer made by the control thread. The core adds framing and connection fields.
#[derive(Debug)]
pub struct AdminReply {
    /// HTTP status.
    pub status: u16,
    /// Header fields other than framing and connection.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The whole body.
    pub body: Vec<u8>,
}

/// Upper bounds of the latency histograms, in nanoseconds (50 us to 240 s).
pub const LATENCY_BOUNDS_NS: [u64; 22] = [
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
    60_000_000_000,
    120_000_000_000,
    180_000_000_000,
    240_000_000_000,
];
/// Upper bounds of the histograms of the router's own work, in nanoseconds (250 ns to 100 ms).
pub const WORK_BOUNDS_NS: [u64; 20] = [
    250,
    500,
    1_000,
    2_000,
    3_000,
    5_000,
    7_500,
    10_000,
    15_000,
    25_000,
    50_000,
    75_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    5_000_000,
    10_000_000,
    50_000_000,
    100_000_000,
];

/// Upper bounds of the histograms of prompts, in tokens.
pub const TOKEN_BOUNDS: [u64; 20] = [
    16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 98_304, 131_072,
    196_608, 262_144, 524_288, 1_048_576, 2_097_152,
];

/// Endpoint families, the only `route` labels in metrics: bounded whatever clients send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs, reason = "each is the path it names")]
pub enum Route {
    ChatCompletions,
    Completions,
    Embeddings,
    Responses,
    Rerank,
    Messages,
    Generate,
    InferenceGenerate,
    Tokenize,
    Pooling,
    Score,
    Admin,
    Other,
}

/// Number of [`Route`]s.
pub const ROUTE_COUNT: usize = 13;

impl Route {
    /// All, in the order of their numbers.
    pub const ALL: [Route; ROUTE_COUNT] = [
        Route::ChatCompletions,
        Route::Completions,
        Route::Embeddings,
        Route::Responses,
        Route::Rerank,
        Route::Messages,
        Route::Generate,
        Route::InferenceGenerate,
        Route::Tokenize,
        Route::Pooling,
        Route::Score,
        Route::Admin,
        Route::Other,
    ];

    /// Whether its requests make tokens: those that go in two legs under P/D.
    pub fn generates(self) -> bool {
        matches!(
            self,
            Route::ChatCompletions
                | Route::Completions
                | Route::Responses
                | Route::Messages
                | Route::Generate
                | Route::InferenceGenerate
        )
    }

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Route::ChatCompletions => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Embeddings => "/v1/embeddings",
            Route::Responses => "/v1/responses",
            Route::Rerank => "/v1/rerank",
            Route::Messages => "/v1/messages",
            Route::Generate => "/generate",
            Route::InferenceGenerate => "/inference/v1/generate",
            Route::Tokenize => "/tokenize",
            Route::Pooling => "/pooling",
            Route::Score => "/score",
            Route::Admin => "admin",
            Route::Other => "other",
        }
    }
}

/// How an exchange ended, the `outcome` label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Outcome {
    /// An answer below 400 was relayed to its end.
    Ok,
    /// A 4xx answer of the worker was relayed.
    ClientError,
    /// A 5xx answer of the worker was relayed.
    WorkerError,
    /// The router refused the request itself (4xx).
    Refused,
    /// No worker was eligible (503).
    NoWorker,
    /// The worker could not be reached, or failed before the answer began (502, 504).
    WorkerFailed,
    /// The answer broke off after it had begun.
    Broken,
    /// The client left before the end.
    ClientGone,
    /// Too many requests ran and waited, or it waited too long (429, 503).
    Overloaded,
}

/// Number of [`Outcome`]s.
pub const OUTCOME_COUNT: usize = 9;

impl Outcome {
    /// All, in the order of their numbers.
    pub const ALL: [Outcome; OUTCOME_COUNT] = [
        Outcome::Ok,
        Outcome::ClientError,
        Outcome::WorkerError,
        Outcome::Refused,
        Outcome::NoWorker,
        Outcome::WorkerFailed,
        Outcome::Broken,
        Outcome::ClientGone,
        Outcome::Overloaded,
    ];

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::ClientError => "client_error",
            Outcome::WorkerError => "worker_error",
            Outcome::Refused => "refused",
            Outcome::NoWorker => "no_available_workers",
            Outcome::WorkerFailed => "worker_failed",
            Outcome::Broken => "broken",
            Outcome::ClientGone => "client_gone",
            Outcome::Overloaded => "overloaded",
        }
    }
}

/// What one core counted about one worker. Written by that core only.
#[derive(Debug)]
pub struct WorkerStats {
    /// Times the worker was chosen.
    pub chosen: Counter,
    /// Prompt bytes sent to it, of requests with a key.
    pub prompt_bytes: Counter,
    /// Of these, bytes of the prefix that the tree said it holds.
    pub matched_bytes: Counter,
    /// Exchanges with it that failed (connect, reset, broken framing, time limit).
    pub failures: Counter,
    /// Of these, without a byte of an answer: refused, unreachable, reset.
    pub refused: Counter,
    /// 5xx answers other than 503.
    pub errors: Counter,
    /// 429 and 503 answers.
    pub busy: Counter,
    /// Answers below 400 that came whole, and streams of events that began.
    pub successes: Counter,
    /// Answers that came to their end, 4xx among them.
    pub completions: Counter,
    /// Pieces of answers after their heads: progress.
    pub pieces: Counter,
    /// Requests sent to it while it was out, to see whether it is well: the good and the bad ones.
    pub trials_good: Counter,
    /// See `trials_good`.
    pub trials_bad: Counter,
    /// How long it takes.
    pub answers: AnswerStats,
}

/// How long a worker's good answers in one piece (those that are no stream of events) let wait for their first byte,
/// from the begin of the attempt on. The length of a stream says nothing of its worker, so streams are not among them.
#[derive(Debug)]
pub struct AnswerStats {
    /// Answers, trials aside.
    pub count: Counter,
    /// Their waits added up, ns.
    pub ns: Counter,
    /// Logarithms of their waits ([`log2_of`]) added up: a few that are far longer than the others hardly count.
    pub log: Counter,
    /// Squares of these, for their spread.
    pub log_square: Counter,
    /// Answers to trials.
    pub trial_count: Counter,
    /// The logarithms of their waits.
    pub trial_log: Counter,
}

impl Default for AnswerStats {
    /// Nothing yet.
    fn default() -> AnswerStats {
        AnswerStats {
            count: Counter::new(),
            ns: Counter::new(),
            log: Counter::new(),
            log_square: Counter::new(),
            trial_count: Counter::new(),
            trial_log: Counter::new(),
        }
    }
}

impl AnswerStats {
    /// Adds an answer.
    pub fn record(&self, wait_ns: u64, is_trial: bool) {
        let log = log2_of(wait_ns);
        if is_trial {
            self.trial_count.add(1);
            self.trial_log.add(log);
        } else {
            self.count.add(1);
            self.ns.add(wait_ns);
            self.log.add(log);
            self.log_square.add(log * log);
        }
    }
}

/// Parts of one in what [`log2_of`] gives.
pub const LOG_PARTS: u64 = 256;

/// The binary logarithm in 256ths, straight lines between the powers of two: at most 0.09 too low. 0 of 0.
#[inline]
pub fn log2_of(number: u64) -> u64 {
    let whole = u64::from((number | 1).ilog2());
    let parts = (number << (63 - whole)) << 1 >> 56;
    whole * LOG_PARTS + parts
}

/// What one core counted of requests that go in two legs. Written by that core only.
#[derive(Debug)]
pub struct PdStats {
    /// Requests that were given a prefill leg, a decode leg, or both, by route.
    pub requests: [Counter; ROUTE_COUNT],
    /// From the whole request to the first byte of its answer, by route.
    pub first_byte: [Histogram<22>; ROUTE_COUNT],
    /// Requests refused because their bodies were too long.
    pub requests_too_long: Counter,
    /// Answers of prefill workers that were too long.
    pub answers_too_long: Counter,
    /// Prefill answers of 200 without transfer parameters.
    pub missing_transfer: Counter,
    /// Prefill legs that ended with transfer parameters.
    pub handovers: Counter,
    /// Hand-overs whose client had left, or whose request failed, before a decode worker got them.
    pub orphans: Counter,
    /// Of these, those whose blocks were released.
    pub orphans_released: Counter,
    /// Of these, those whose release failed or ran out of time.
    pub orphans_lost: Counter,
    /// Age in ns of the oldest orphan whose release still runs, as the core last saw it; 0: none.
    pub oldest_orphan_ns: Gauge,
    /// Requests without a prefill leg, because the decode worker lacked too little of the prompt.
    pub skipped_prefill: Counter,
    /// Hand-overs too old for another decode worker, or whose prefill worker restarted: a new prefill was made.
    pub stale_handovers: Counter,
    /// Requests sent whole to a decode worker, by [`Whole`].
    pub whole: [Counter; Whole::ALL.len()],
    /// Answers whose usage was put right with the prefill worker's numbers.
    pub usage_fixed: Counter,
    /// From the end of prefill to the dispatch of decode.
    pub handover_gap: Histogram<20>,
    /// From when decode's seat is taken to its dispatch.
    pub decode_pending: Histogram<22>,
}

impl PdStats {
    fn new() -> PdStats {
        PdStats {
            requests: counters(),
            first_byte: std::array::from_fn(|_| Histogram::new(&LATENCY_BOUNDS_NS)),
            requests_too_long: Counter::new(),
            answers_too_long: Counter::new(),
            missing_transfer: Counter::new(),
            handovers: Counter::new(),
            orphans: Counter::new(),
            orphans_released: Counter::new(),
            orphans_lost: Counter::new(),
            oldest_orphan_ns: Gauge::new(),
            skipped_prefill: Counter::new(),
            stale_handovers: Counter::new(),
            whole: counters(),
            usage_fixed: Counter::new(),
            handover_gap: Histogram::new(&WORK_BOUNDS_NS),
            decode_pending: Histogram::new(&LATENCY_BOUNDS_NS),
        }
    }
}

/// What became of requests whose sessions `kv_aware` keeps to their workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Affinity {
    /// The session was new: it is bound now.
    Bind,
    /// The request went to the session's worker.
    StickyHit,
    /// The session's worker may get no requests any more: it is bound anew.
    Rebind,
    /// Nothing names a session.
    NoSession,
    /// The session's worker failed this request, is full or has more than its share: another one got the request.
    CapacityBypass,
}

impl Affinity {
    /// All, in the order of their numbers.
    pub const ALL: [Affinity; 5] = [
        Affinity::Bind,
        Affinity::StickyHit,
        Affinity::Rebind,
        Affinity::NoSession,
        Affinity::CapacityBypass,
    ];

    /// The label in metrics, vllm-router's.
    pub fn label(self) -> &'static str {
        match self {
            Affinity::Bind => "bind",
            Affinity::StickyHit => "sticky_hit",
            Affinity::Rebind => "rebind",
            Affinity::NoSession => "no_session",
            Affinity::CapacityBypass => "capacity_bypass",
        }
    }
}

/// What one core counts of choices under `kv_aware`. Written by that core only.
#[derive(Debug)]
pub struct KvStats {
    /// Choices for prompts whose tokens were known, by role: sent as ids; made here of text.
    pub of_ids: [Counter; 3],
    /// See `of_ids`.
    pub of_text: [Counter; 3],
    /// Choices without tokens, by role: the approximate tree served.
    pub without: [Counter; 3],
    /// Tokens that the chosen worker has to compute, by role.
    pub new_tokens: [Histogram<20>; 3],
    /// Tokens that it need not.
    pub credited_tokens: [Counter; 3],
    /// By role and [`Affinity`].
    pub affinity: [[Counter; Affinity::ALL.len()]; 3],
    /// How long prompts of text waited for their tokens, those that got none among them.
    pub token_wait: Histogram<20>,
}

impl KvStats {
    fn new() -> KvStats {
        KvStats {
            of_ids: counters(),
            of_text: counters(),
            without: counters(),
            new_tokens: std::array::from_fn(|_| Histogram::new(&TOKEN_BOUNDS)),
            credited_tokens: counters(),
            affinity: std::array::from_fn(|_| counters()),
            token_wait: Histogram::new(&WORK_BOUNDS_NS),
        }
    }
}

fn counters<const N: usize>() -> [Counter; N] {
    std::array::from_fn(|_| Counter::new())
}

/// Attempts after the first that are counted apart; later ones count with the last.
pub const ATTEMPT_COUNT: usize = 16;

/// What one core counts. Written by that core only; the control thread adds the cores up on a scrape.
#[derive(Debug)]
pub struct CoreStats {
    /// Exchanges ended, by route and outcome.
    pub exchanges: [[Counter; OUTCOME_COUNT]; ROUTE_COUNT],
    /// Exchanges begun, by route: those that are here have not ended.
    pub begun: [Counter; ROUTE_COUNT],
    /// Whole exchanges of embeddings, as `duration`.
    pub embeddings: Histogram<22>,
    /// Decisions by role and reason.
    pub decisions: [[Counter; Reason::COUNT]; 3],
    /// By slot.
    pub workers: Box<[WorkerStats]>,
    /// From the last byte of the request to the first of the answer's body.
    pub first_byte: Histogram<22>,
    /// Whole exchange, first byte in to last byte out.
    pub duration: Histogram<22>,
    /// Between two pieces of an answer.
    pub gap: Histogram<22>,
    /// Key, find and pick.
    pub decision: Histogram<20>,
    /// The router's own added time: request complete to request sent, plus answer head in to answer head out.
    pub added: Histogram<20>,
    /// Connections accepted, and open now is accepted less closed.
    pub accepted: Counter,
    /// Connections from clients closed.
    pub closed: Counter,
    /// Connections to workers opened.
    pub upstream_opened: Counter,
    /// Connections to workers closed.
    pub upstream_closed: Counter,
    /// Requests sent again on a fresh connection because a reused one had died.
    pub resends: Counter,
    /// Retries on another worker, by route.
    pub retries: [Counter; ROUTE_COUNT],
    /// The same by which retry of its request it was, from the first on.
    pub retries_by_attempt: [Counter; ATTEMPT_COUNT],
    /// Failures that would have been tried again, had there been a retry, budget or worker left; by route.
    pub exhausted: [Counter; ROUTE_COUNT],
    /// Requests that could not be parsed, or broke a limit.
    pub malformed: Counter,
    /// TLS handshakes that were done, with clients and workers.
    pub tls_handshakes: Counter,
    /// Connections that ended because TLS could not go on.
    pub tls_failures: Counter,
    /// Lessons dropped because a mailbox was full.
    pub lessons_dropped: Counter,
    /// Records of the decision log dropped because a mailbox was full.
    pub decision_records_dropped: Counter,
    /// Turns of the event loop.
    pub turns: Counter,
    /// Requests that were let in and are over.
    pub left: Counter,
    /// Requests that wait for a worker now; those that wait for a turn are the gate's.
    pub aside: Gauge,
    /// How long requests waited for a turn or a worker, of those that got it.
    pub waits: Histogram<22>,
    /// Requests that go in two legs.
    pub pd: PdStats,
    /// Choices under `kv_aware`.
    pub kv: KvStats,
}

impl CoreStats {
    /// Decisions for this reason, of all roles.
    pub fn decided(&self, reason: Reason) -> u64 {
        let roles = self.decisions.iter();
        roles.map(|counts| counts[reason as usize].value()).sum()
    }

    /// Retries on all routes.
    pub fn retried(&self) -> u64 {
        self.retries.iter().map(Counter::value).sum()
    }

    fn new(slot_count: usize) -> CoreStats {
        CoreStats {
            exchanges: std::array::from_fn(|_| counters()),
            begun: counters(),
            embeddings: Histogram::new(&LATENCY_BOUNDS_NS),
            decisions: std::array::from_fn(|_| counters()),
            workers: (0..slot_count)
                .map(|_| WorkerStats {
                    chosen: Counter::new(),
                    prompt_bytes: Counter::new(),
                    matched_bytes: Counter::new(),
                    failures: Counter::new(),
                    refused: Counter::new(),
                    errors: Counter::new(),
                    busy: Counter::new(),
                    successes: Counter::new(),
                    completions: Counter::new(),
                    pieces: Counter::new(),
                    trials_good: Counter::new(),
                    trials_bad: Counter::new(),
                    answers: AnswerStats::default(),
                })
                .collect(),
            first_byte: Histogram::new(&LATENCY_BOUNDS_NS),
            duration: Histogram::new(&LATENCY_BOUNDS_NS),
            gap: Histogram::new(&LATENCY_BOUNDS_NS),
            decision: Histogram::new(&WORK_BOUNDS_NS),
            added: Histogram::new(&WORK_BOUNDS_NS),
            accepted: Counter::new(),
            closed: Counter::new(),
            upstream_opened: Counter::new(),
            upstream_closed: Counter::new(),
            resends: Counter::new(),
            retries: counters(),
            retries_by_attempt: counters(),
            exhausted: counters(),
            malformed: Counter::new(),
            tls_handshakes: Counter::new(),
            tls_failures: Counter::new(),
            lessons_dropped: Counter::new(),
            decision_records_dropped: Counter::new(),
            turns: Counter::new(),
            left: Counter::new(),
            aside: Gauge::new(),
            waits: Histogram::new(&LATENCY_BOUNDS_NS),
            pd: PdStats::new(),
            kv: KvStats::new(),
        }
    }
}

/// The part of a core that others may touch.
pub struct CoreShared {
    inbox: SegQueue<ToCore>,
    /// Says whether the core sleeps, so that a busy one costs its senders no system call.
    pub doorbell: Doorbell,
    /// An eventfd; a write wakes the core's one sleep.
    pub wake: OwnedFd,
    /// A [`ToCore::Rouse`] is on its way.
    is_roused: AtomicBool,
    /// Bodies in this core's memory that are counted.
    pub bodies: Arc<ByteCount>,
    /// Slots whose purge this core's shard has finished are told here: (slot, done) by the core, read by control.
    pub purged: SegQueue<Slot>,
    /// Written by the core only.
    pub stats: CoreStats,
}

impl CoreShared {
    /// Makes the shared part of a core.
    ///
    /// # Errors
    /// When the machine has no descriptor left for an eventfd.
    pub fn new(slot_count: usize, bodies: &Arc<ByteCount>) -> std::io::Result<CoreShared> {
        Ok(CoreShared {
            bodies: Arc::new(ByteCount::part_of(bodies)),
            inbox: SegQueue::new(),
            doorbell: Doorbell::new(),
            wake: crate::ring::eventfd()?,
            is_roused: AtomicBool::new(false),
            purged: SegQueue::new(),
            stats: CoreStats::new(slot_count),
        })
    }

    /// Tells the core something and wakes it if it sleeps. Never waits.
    pub fn post(&self, message: ToCore) {
        self.inbox.push(message);
        self.wake_if_asleep();
    }

    /// Wakes the core if it sleeps, after something was put where it looks before sleeping.
    pub fn wake_if_asleep(&self) {
        if self.doorbell.ring() {
            crate::ring::signal(&self.wake);
        }
    }

    /// Tells the core that somebody may find a worker now, if anybody waits for one there.
    fn rouse(&self) {
        // ORDERING: Relaxed; a hint: who is missed looks again within a quarter of a second.
        if self.stats.aside.value() > 0 && !self.is_roused.swap(true, Ordering::Relaxed) {
            self.post(ToCore::Rouse);
        }
    }

    /// The message has come: the next one is worth sending.
    pub fn begin_rouse(&self) {
        // ORDERING: Relaxed; as in `rouse`.
        self.is_roused.store(false, Ordering::Relaxed);
    }

    /// Next message; the core's own thread only.
    pub fn take(&self) -> Option<ToCore> {
        self.inbox.pop()
    }

    /// Whether anything waits.
    pub fn is_inbox_empty(&self) -> bool {
        self.inbox.is_empty()
    }
}

/// The exact index, and the way to teach it.
pub struct KvShared {
    /// Read side.
    pub index: Index,
    /// To the cores' shards of it, by core. Taken by the control thread when it starts.
    pub senders: std::sync::Mutex<Vec<Sender<Lesson>>>,
}

/// Everything both planes see.
pub struct Shared {
    /// What holds now; see [`Shared::config`].
    pub config: std::sync::Mutex<Arc<Config>>,
    /// The books. Leaked once: they live as long as the process, and guards stay plain references.
    pub books: &'static Books,
    /// Client connections by address. Not there before they are limited.
    pub addresses: OnceLock<Addresses>,
    /// For these: seeded anew in each process.
    pub address_hasher: ahash::RandomState,
    /// Who may use workers. Leaked once, as the books are.
    pub gate: &'static Gate,
    /// How many requests may begin in a second, where that is limited.
    pub bucket: Bucket,
    /// Bodies in memory, all cores together; each core has its part.
    pub bodies: Arc<ByteCount>,
    /// Bytes of the requests that wait.
    pub queued: Arc<ByteCount>,
    /// When a refused client may come again, in seconds, at least 1: written by the control thread.
    pub retry_after_secs: AtomicU32,
    /// The prefix tree, read side.
    pub tree: Arc<Tree>,
    /// What engines say they hold, under `kv_aware`.
    pub kv: Option<KvShared>,
    /// Where cores put prompts of text whose tokens they want.
    pub desk: Option<Arc<Desk>>,
    /// Reclamation domain; reader `i` is core `i`.
    pub domain: Arc<Domain>,
    /// The fleet snapshot.
    pub fleet: Arc<Published<Fleet>>,
    /// Which worker each session is bound to. Not there before a policy has asked for it.
    pub sessions: OnceLock<Sessions>,
    /// What sessions' seconds are counted from.
    pub started: Instant,
    /// By core.
    pub cores: Box<[CoreShared]>,
    /// Where cores hand admin requests over. Bounded: full means 503.
    pub admin: tokio::sync::mpsc::Sender<AdminRequest>,
    /// Rung when an attempt has failed: the control thread looks at the workers at once.
    pub failure_bell: tokio::sync::Notify,
    /// Set with it when a worker could not be reached: it is probed at once.
    pub is_refused: AtomicBool,
    /// A line for each request, if they are wanted.
    pub access_log: Option<Arc<AccessLog>>,
    /// Where decisions are written, if they are.
    pub decision_log: Option<Arc<DecisionLog>>,
    /// Set when draining began: new answers say `connection: close`.
    pub draining: AtomicBool,
}

impl Shared {
    /// The configuration that holds now. For the control thread and for starting: cores have theirs, and get a new one
    /// with [`ToCore::Configure`].
    pub fn config(&self) -> Arc<Config> {
        let config = self.config.lock();
        config
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }

    /// Whether a request may begin now, as far as their rate goes; if so, it counts as having begun.
    pub fn may_begin(&self, config: &Config) -> bool {
        let Some(refill) = config.refill() else {
            return true;
        };
        let now_ns = self.started.elapsed().as_nanos() as u64;
        self.bucket.take(now_ns, refill)
    }

    /// It has not begun after all.
    pub fn has_not_begun(&self, config: &Config) {
        if let Some(refill) = config.refill() {
            self.bucket.give_back(refill);
        }
    }

    /// Lets in the oldest of those that wait for their turn, if there is room and their rate allows it: the core that has it,
    /// which must be told.
    pub fn pass_on(&self, config: &Config) -> Option<usize> {
        let is_limited = config.request_rate_max.is_some();
        if is_limited && (self.gate.counts().1 == 0 || !self.may_begin(config)) {
            return None;
        }
        let core = self.gate.pass_on(config.request_count_max);
        if core.is_none() {
            self.has_not_begun(config);
        }
        core
    }

    /// The sessions, if the configuration has a policy that binds them. Never freed: a reload may bring that policy back.
    pub fn make_sessions(&self, config: &Config) {
        let mut roles = config.needed_roles().iter();
        let is_sticky =
            |role: &Role| config.settings_of(*role).policy == PolicyKind::StickyLeastLoaded;
        if roles.any(is_sticky) || config.kv.session_affinity_ttl_secs.is_some() {
            self.sessions
                .get_or_init(|| Sessions::new(SESSION_COUNT_MAX));
        }
    }

    /// The second by which sessions grow old.
    pub fn session_time(&self, config: &Config) -> shards::Now {
        self.age_of(config.session_ttl_secs)
    }

    /// The same for sessions that end when they were idle for so long.
    pub fn age_of(&self, ttl_secs: u32) -> shards::Now {
        shards::Now {
            secs: self.started.elapsed().as_secs() as u32,
            ttl_secs,
        }
    }

    /// Replaces it, here and in the cores. Nothing that runs is touched: limits count from their next use.
    pub fn configure(&self, config: Arc<Config>) {
        self.make_sessions(&config);
        *self
            .config
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = config.clone();
        for core in &self.cores {
            core.post(ToCore::Configure(config.clone()));
        }
    }

    /// Tells the cores, but one, that somebody who waits for a worker may find one now.
    pub fn rouse(&self, but: Option<usize>) {
        let cores = self.cores.iter().enumerate();
        for (_, core) in cores.filter(|(index, _)| Some(*index) != but) {
            core.rouse();
        }
    }

    /// Whether the router drains.
    pub fn is_draining(&self) -> bool {
        // ORDERING: Relaxed; a hint that publishes nothing, the message in each inbox is what counts.
        self.draining.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_right_to_a_tenth_and_grow() {
        let mut last = 0;
        for number in [
            0,
            1,
            2,
            3,
            4,
            1000,
            20_000_000,
            200_000_000,
            1 << 40,
            u64::MAX,
        ] {
            let log = log2_of(number);
            let exact = (number.max(1) as f64).log2();
            let off = exact - log as f64 / LOG_PARTS as f64;
            assert!((0.0..0.1).contains(&off), "{number}: {off}");
            assert!(log >= last);
            last = log;
        }
    }
}
