//! From a configuration to a running router: listeners, books, shards, cores, control thread.

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shards::{Books, Domain, Gate, Lesson, Receiver, SLOT_COUNT_MAX, Sender, TreeLimits};

use crate::access_log::{self, AccessLog};
use crate::config::{Config, TokenizerConfig};
use crate::control::{self, Control, SideListener, SideListeners};
use crate::core::{self, IndexShard, Seed};
use crate::decisions::{self, DecisionLog, Pen};
use crate::doctor;
use crate::held::ByteCount;
use crate::listen::{self, ListenError, Listeners};
use crate::log_thread::LogThread;
use crate::ring::{self, Inherited};
use crate::route::{Index, KeySeed};
use crate::shared::{CoreShared, Fleet, KvShared, Shared, ToCore};
use crate::tokenize::Desk;

/// Admin requests that may wait for the control thread.
const ADMIN_QUEUE_COUNT: usize = 1024;
/// Lessons that may wait in one mailbox between two cores.
const MAILBOX_COUNT: usize = 256;
/// Memory of a (block, worker) membership, about.
const MEMBERSHIP_BYTES: u64 = 24;

/// Longest wait of a router that takes over for its workers to be ready.
const READY_WAIT: Duration = Duration::from_secs(10);
/// Between two looks at them.
const READY_PAUSE: Duration = Duration::from_millis(2);

/// Why the router did not start.
#[derive(Debug)]
pub enum StartError {
    /// It cannot listen.
    Listen(ListenError),
    /// The access log cannot be written.
    AccessLog(std::io::Error),
    /// The decision log cannot be written.
    DecisionLog(std::io::Error),
    /// A tokenizer or its chat template cannot be read.
    Tokenizer(String),
    /// The machine lacks something.
    Machine(String),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Listen(e) => e.fmt(f),
            StartError::AccessLog(e) => write!(f, "--access-log-file: {e}"),
            StartError::DecisionLog(e) => write!(f, "--decision-log: {e}"),
            StartError::Tokenizer(what) => write!(f, "--tokenizer: {what}"),
            StartError::Machine(what) => write!(f, "{what} (see `corelane doctor`)"),
        }
    }
}

impl std::error::Error for StartError {}

impl From<ListenError> for StartError {
    fn from(e: ListenError) -> StartError {
        StartError::Listen(e)
    }
}

/// A running router. Dropping it stops it at once.
pub struct Router {
    /// Where it listens.
    pub address: SocketAddr,
    /// Where Prometheus is served.
    pub metrics_address: SocketAddr,
    /// Where the admin paths are served, if not where clients are.
    pub admin_address: Option<SocketAddr>,
    /// What both planes see.
    pub shared: Arc<Shared>,
    control: Option<Control>,
    cores: Vec<JoinHandle<std::io::Result<()>>>,
    /// Ends after the cores.
    #[cfg(feature = "tokenizer")]
    _tokenizers: Option<crate::tokenize::pool::Pool>,
    /// Ends after the cores, with what they wrote last.
    _access_writer: Option<LogThread>,
    /// The same.
    _decision_writer: Option<LogThread>,
}

/// Starts a router. Returns when it listens and all threads run; workers become ready in their own time, except with
/// `--reuse-port`, as of [`start_on`].
///
/// # Errors
/// An address is taken, or the machine lacks what a core needs.
pub fn start(config: Config) -> Result<Router, StartError> {
    start_on(config, Vec::new())
}

/// Starts a router on sockets that were opened for it ([`ring::inherited`]): the one named `metrics` is for Prometheus,
/// the one named `admin` for the admin paths, all others are for clients. What is not among them is bound. A router that may take another's place (on inherited
/// sockets, or with `--reuse-port`) accepts only when its workers are ready, or after 10 s.
///
/// # Errors
/// As of [`start`]; and when a descriptor is not a listening TCP socket.
pub fn start_on(mut config: Config, inherited: Vec<Inherited>) -> Result<Router, StartError> {
    let abilities = ring::probe().ok().filter(|found| found.buffer_rings);
    let abilities = abilities.ok_or_else(|| StartError::Machine(doctor::obstacles()))?;
    let cpus = cpus(config.core_count)?;
    let count = cpus.len();
    let bind = |address| move |e| ListenError::Bind(address, e);
    let Listeners {
        data,
        is_data_inherited,
        metrics,
        is_metrics_inherited,
        admin,
        is_admin_inherited,
    } = Listeners::open(&config, inherited, count)?;
    let address = data[0][0].local_addr().map_err(bind(config.listen))?;
    let metrics_address = metrics.local_addr();
    let metrics_address = metrics_address.map_err(bind(config.metrics_listen))?;
    let takes_over = config.reuse_port || is_data_inherited;
    let admin_address = admin.as_ref().map(TcpListener::local_addr).transpose();
    let admin_address =
        admin_address.map_err(bind(config.admin_listen.unwrap_or(config.listen)))?;
    let side = |listener, is_inherited| SideListener {
        listener,
        is_left_at_drain: config.reuse_port || is_inherited,
    };
    let side = SideListeners {
        metrics: Some(side(metrics, is_metrics_inherited)),
        admin: admin.map(|admin| side(admin, is_admin_inherited)),
    };
    config.is_data_inherited = is_data_inherited;
    config.is_admin_apart = admin_address.is_some();

    let machine = |e: std::io::Error| StartError::Machine(e.to_string());
    let domain = Arc::new(Domain::new(count));
    let limits = TreeLimits {
        bytes_max: tree_bytes(&config),
        slot_count_max: SLOT_COUNT_MAX,
    };
    let (tree, shards) = shards::tree(count, domain.clone(), limits);
    let (kv, index_shards) = index(&config, count, &domain);
    #[cfg(feature = "tokenizer")]
    let models = models(&config).map_err(StartError::Tokenizer)?;
    let desk = desk(&config);
    let (publisher, fleet) = shards::published(domain.clone(), Fleet::default());
    let (admin, admin_rx) = tokio::sync::mpsc::channel(ADMIN_QUEUE_COUNT);
    let bodies = Arc::new(ByteCount::default());
    let cores = (0..count)
        .map(|_| CoreShared::new(SLOT_COUNT_MAX, &bodies))
        .collect::<Result<_, _>>()
        .map_err(machine)?;
    let access_log = access_log(&config).map_err(StartError::AccessLog)?;
    let (decision_log, decision_writer, pens) =
        decision_log(&config, count).map_err(StartError::DecisionLog)?;
    let shared = Arc::new(Shared {
        config: Arc::new(config).into(),
        // Lives as long as the process, so that a guard is a plain reference: no count that all cores would write.
        books: Box::leak(Box::new(Books::new(SLOT_COUNT_MAX))),
        gate: Box::leak(Box::new(Gate::new(count))),
        addresses: Default::default(),
        address_hasher: ahash::RandomState::new(),
        bucket: Default::default(),
        bodies,
        queued: Default::default(),
        retry_after_secs: AtomicU32::new(1),
        tree,
        kv,
        desk,
        domain: domain.clone(),
        fleet,
        sessions: Default::default(),
        started: std::time::Instant::now(),
        cores,
        admin,
        failure_bell: Default::default(),
        is_refused: Default::default(),
        access_log: access_log.as_ref().map(|(log, _)| log.clone()),
        decision_log,
        draining: AtomicBool::new(false),
    });
    shared.make_sessions(&shared.config());
    let control = control::start(shared.clone(), publisher, admin_rx, side).map_err(machine)?;
    let mut router = Router {
        address,
        metrics_address,
        admin_address,
        shared: shared.clone(),
        control: Some(control),
        cores: Vec::new(),
        #[cfg(feature = "tokenizer")]
        _tokenizers: tokenizers(&shared, models)?,
        _access_writer: access_log.map(|(_, writer)| writer),
        _decision_writer: decision_writer,
    };

    if takes_over {
        await_workers(router.control());
    }
    if !is_data_inherited {
        listen::listen(&data, address)?;
    }
    let mut mail = mailboxes(count);
    let mut index_shards = index_shards.into_iter();
    let mut pens = pens.into_iter();
    for (index, ((listeners, shard), cpu)) in data.into_iter().zip(shards).zip(cpus).enumerate() {
        let (senders, receivers) = mail.remove(0);
        let seed = Seed {
            index,
            cpu,
            listeners,
            are_inherited: is_data_inherited,
            shard,
            index_shard: index_shards.next(),
            reader: domain.reader(index),
            senders,
            receivers,
            pen: pens.next(),
            random_seed: random_seed(),
            abilities: abilities.clone(),
            shared: shared.clone(),
        };
        router.cores.push(core::spawn(seed).map_err(machine)?);
    }
    Ok(router)
}

impl Router {
    /// The control plane's handle.
    pub fn control(&self) -> &Control {
        self.control.as_ref().expect("it is taken only by the drop")
    }

    /// Whether every core still runs.
    pub fn is_running(&self) -> bool {
        self.cores.iter().all(|core| !core.is_finished())
    }

    /// Waits until all cores have ended (after a drain, or because one could not go on).
    ///
    /// # Errors
    /// The first core that ended with an error, or panicked.
    pub fn join(mut self) -> Result<(), StartError> {
        let mut result = Ok(());
        while !self.cores.is_empty() {
            // The first that ends badly takes the others along: a router that lost a core would lose its connections.
            let at = self.cores.iter().position(JoinHandle::is_finished);
            let Some(at) = at else {
                std::thread::sleep(std::time::Duration::from_millis(10));
                continue;
            };
            let failure = match self.cores.swap_remove(at).join() {
                Ok(Ok(())) => continue,
                Ok(Err(e)) => format!("a core ended: {e}"),
                Err(_) => "a core panicked".to_string(),
            };
            self.stop_cores();
            result = result.and(Err(StartError::Machine(failure)));
        }
        result
    }

    fn stop_cores(&self) {
        for core in &self.shared.cores {
            core.post(ToCore::Stop);
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.stop_cores();
        for core in self.cores.drain(..) {
            let _ = core.join();
        }
        if let Some(control) = self.control.take() {
            control.stop();
            control.join();
        }
    }
}

/// Starts the access log, if it is wanted.
fn access_log(config: &Config) -> std::io::Result<Option<(Arc<AccessLog>, LogThread)>> {
    let Some(format) = config.access_log else {
        return Ok(None);
    };
    let log = Arc::new(AccessLog::new(format, config.access_log_lines_per_sec));
    let writer = access_log::start(log.clone(), config.access_log_file.clone())?;
    Ok(Some((log, writer)))
}

type Decisions = (Option<Arc<DecisionLog>>, Option<LogThread>, Vec<Pen>);

/// Starts the decision log, if it is wanted.
fn decision_log(config: &Config, count: usize) -> std::io::Result<Decisions> {
    let Some(path) = &config.decision_log else {
        return Ok((None, None, Vec::new()));
    };
    let run = random_seed() as u32;
    let (log, writer, pens) = decisions::start(path, run, count, SLOT_COUNT_MAX)?;
    Ok((Some(log), Some(writer), pens))
}

/// Waits until every worker of the start has been probed and one of each needed role is ready: the router whose place
/// this one takes still serves, or new connections wait in the kernel, and both are better than a 503.
fn await_workers(control: &Control) {
    let end = Instant::now() + READY_WAIT;
    while control.is_starting() {
        if Instant::now() >= end {
            let waited_secs = READY_WAIT.as_secs();
            return tracing::warn!(
                waited_secs,
                "not all workers are ready: serving all the same"
            );
        }
        std::thread::sleep(READY_PAUSE);
    }
}

/// The processors to be pinned to: of those this process may use, in order, and again from the first if cores share them.
fn cpus(count: usize) -> Result<Vec<usize>, StartError> {
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    if allowed.is_empty() {
        return Err(StartError::Machine(
            "no processor is allowed to this process".to_string(),
        ));
    }
    let turns = allowed.iter().cycle().map(|id| id.id);
    Ok(turns.take(count.max(1)).collect())
}

/// The tree's memory: what the workers' remembered prompts need, under the cap.
fn tree_bytes(config: &Config) -> usize {
    // Workers may be added later; the tree's bound may not move, so a small fleet gets some room.
    let workers = config.workers.len() as u64 * u64::from(config.data_parallel_size);
    let workers = workers.max(8);
    let blocks = config.tree_bytes_per_worker_max / crate::route::BLOCK_BYTES as u64;
    let wanted = blocks
        .saturating_mul(MEMBERSHIP_BYTES)
        .saturating_mul(workers);
    usize::try_from(wanted)
        .unwrap_or(usize::MAX)
        .min(config.prefix_memory_bytes_max)
}

/// The exact index and the cores' parts of it, if a policy asks for it.
fn index(
    config: &Config,
    count: usize,
    domain: &Arc<Domain>,
) -> (Option<KvShared>, Vec<IndexShard>) {
    if !config.uses_kv_events() {
        return (None, Vec::new());
    }
    let limits = TreeLimits {
        bytes_max: config.kv.index_bytes_max,
        slot_count_max: SLOT_COUNT_MAX,
    };
    let (tree, shards) = shards::tree(count, domain.clone(), limits);
    let seed = KeySeed(config.prefix_hash_seed);
    let mut senders = Vec::new();
    let shards = shards.into_iter().map(|shard| {
        let (sender, receiver) = shards::mailbox(MAILBOX_COUNT);
        senders.push(sender);
        IndexShard::new(shard, receiver)
    });
    let shards = shards.collect();
    let kv = KvShared {
        index: Index::new(tree, seed, config.kv.block_tokens),
        senders: senders.into(),
    };
    (Some(kv), shards)
}

fn tokenizer_in_use(config: &Config) -> Option<&TokenizerConfig> {
    let tokenizer = config.kv.tokenizer.as_ref();
    tokenizer.filter(|_| config.uses_kv_events())
}

/// Where prompts of text go, if their tokens are wanted.
fn desk(config: &Config) -> Option<Arc<Desk>> {
    let tokenizer = tokenizer_in_use(config)?;
    let desk = Desk::new(tokenizer.queue_count_max, tokenizer.thread_count);
    Some(Arc::new(desk))
}

#[cfg(feature = "tokenizer")]
fn models(config: &Config) -> Result<Option<crate::tokenize::pool::Models>, String> {
    let Some(tokenizer) = tokenizer_in_use(config) else {
        return Ok(None);
    };
    let models = crate::tokenize::pool::Models::open(
        &tokenizer.models,
        tokenizer.chat_template.as_deref(),
        tokenizer.content_format,
        config.kv.model.clone(),
        tokenizer.cache_bytes_max,
    )?;
    Ok(Some(models))
}

#[cfg(feature = "tokenizer")]
fn tokenizers(
    shared: &Arc<Shared>,
    models: Option<crate::tokenize::pool::Models>,
) -> Result<Option<crate::tokenize::pool::Pool>, StartError> {
    let (Some(models), Some(desk)) = (models, &shared.desk) else {
        return Ok(None);
    };
    let pool = crate::tokenize::pool::Pool::start(desk, models, shared);
    pool.map(Some)
        .map_err(|e| StartError::Machine(e.to_string()))
}

type Mail = (Vec<Sender<Lesson>>, Vec<Receiver<Lesson>>);

/// A mailbox from each core to each, itself included: lessons of its own wait in line, bounded, like those of others.
fn mailboxes(count: usize) -> Vec<Mail> {
    let mut mail: Vec<Mail> = (0..count).map(|_| (Vec::new(), Vec::new())).collect();
    for from in 0..count {
        for to in 0..count {
            let (sender, receiver) = shards::mailbox(MAILBOX_COUNT);
            mail[from].0.push(sender);
            mail[to].1.push(receiver);
        }
    }
    mail
}

/// Choices and request ids must differ between processes; they need not be secret.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}
