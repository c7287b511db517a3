//! The control plane: one ordinary thread with a current-thread tokio runtime. Everything that is not per request.
//!
//! `registry` is the list of workers and writes the fleet; `watch` probes them (`health` judges, `probe` asks, `models`
//! reads their lists, `ranks` their data-parallel ranks); `discovery` looks for them in a file, DNS and Kubernetes; `registration` takes
//! those of engines that tell of themselves (by `zmtp`), `mooncake` asks for their ids; `kv` follows their KV events; `admin` answers the admin paths that cores hand over (`exchange::paths` says which), or `admin_port` gets; `metrics` serves
//! Prometheus; `admission` tells when refused clients may come again; `drain` ends the process well; `reload` reads the
//! config file again. It talks to the cores by the published fleet and by their inboxes; a core
//! never waits for it. The registry's mutex is taken by this thread and by callers of [`Control`], never by a core.
#![forbid(unsafe_code)]

mod admin;
mod admin_port;
mod admission;
mod discovery;
mod drain;
pub mod health;
pub mod kv;
mod metrics;
mod models;
mod mooncake;
mod openapi;
pub mod probe;
mod ranks;
mod registration;
mod registry;
mod reload;
mod reply;
mod secure;
pub mod standing;
mod totals;
mod watch;
mod zmtp;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use shards::{Load, Publisher};
use tokio::sync::{mpsc, watch as latest};

use crate::config::{Config, Keys, LogLevel, Source, WorkerSpec, WorkerUrl};
use crate::route::Role;
use crate::shared::{AdminRequest, Fleet, Shared};
use drain::Drain;
use registry::{AddError, Entry, Finder, Rank, Registered, Registration, Registry};

/// How often ended lives are looked at while there are any, and otherwise.
const SWEEP_PAUSE_BUSY: Duration = Duration::from_millis(20);
const SWEEP_PAUSE_IDLE: Duration = Duration::from_secs(1);
/// Least time between two looks at workers that fail.
const JUDGE_PAUSE: Duration = Duration::from_millis(2);
/// How often it is looked at what the workers do.
const JUDGE_INTERVAL: Duration = Duration::from_millis(250);
/// Each time a part of the sessions is looked through for those that are over: all of them within a minute.
const SESSION_PARTS: usize = 240;

/// What the tasks of the control thread share.
pub(crate) struct Plane {
    shared: Arc<Shared>,
    registry: Mutex<Registry>,
    /// Sent after each change of a worker's state.
    changes: latest::Sender<u64>,
    /// Sent to probe all workers now.
    probe_now: latest::Sender<u64>,
    discovery: discovery::Discovery,
    registrations: registration::Stats,
    kv: kv::Kv,
    reload: reload::Reload,
    /// Somebody says which workers are not ready.
    is_reporting: AtomicBool,
}

impl Plane {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn announce_change(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// Registers a worker and starts to probe it. On the control thread only.
    fn add(
        self: &Arc<Self>,
        worker: impl Into<WorkerSpec>,
        finder: Finder,
    ) -> Result<registry::Key, AddError> {
        let worker = worker.into();
        let key = self.registry().add(worker, finder)?;
        self.watch(key);
        Ok(key)
    }

    /// Starts the tasks of a registration.
    fn watch(self: &Arc<Self>, key: registry::Key) {
        let found = self
            .registry()
            .entry(key)
            .map(|entry| (entry.url.clone(), entry.needs_engine_ids()));
        if let Some((url, needs_engine_ids)) = found {
            tokio::spawn(watch::run(self.clone(), key, url));
            if needs_engine_ids {
                tokio::spawn(mooncake::run(self.clone(), key));
            }
        }
        self.announce_change();
    }

    /// Takes a registration. On the control thread only.
    fn register(
        self: &Arc<Self>,
        registration: Registration,
        now: tokio::time::Instant,
    ) -> Result<(), String> {
        let registered = self.registry().register(registration, now);
        match registered {
            Ok(Registered::New(key)) => self.watch(key),
            Ok(Registered::Back) => {
                self.announce_change();
                self.probe_now();
            }
            Ok(Registered::Renewed) => {}
            Ok(Registered::Refused(reason)) => return Err(reason.to_owned()),
            Err(AddError::Exists) => return Err("it is registered already".to_owned()),
            Err(AddError::Full) => return Err("no room for another worker".to_owned()),
        }
        Ok(())
    }

    /// Ends the leases that are over.
    fn end_leases(&self, now: tokio::time::Instant) {
        let ended = self.registry().end_leases(now);
        for key in ended.gone {
            self.remove(key);
        }
        if ended.has_changed {
            self.announce_change();
            // Whether the process is gone is known for sure only while it is.
            self.probe_now();
        }
    }

    fn probe_now(&self) {
        self.probe_now.send_modify(|count| *count += 1);
    }

    /// Why a worker of a role has no place in this fleet.
    fn misfit(&self, role: Role) -> Option<String> {
        let roles = self.shared.config().needed_roles();
        if roles.contains(&role) {
            return None;
        }
        Some(match role {
            Role::Regular => {
                "with prefill/decode disaggregation a worker needs worker_type 'prefill' or 'decode'"
                    .to_owned()
            }
            role => format!(
                "worker_type '{}' needs --vllm-pd-disaggregation; choices: regular",
                role.label()
            ),
        })
    }

    fn judge(&self) {
        let has_changed = self.registry().judge();
        if has_changed {
            self.announce_change();
        }
    }

    fn remove(&self, key: registry::Key) -> bool {
        let is_removed = self.registry().remove(key);
        self.announce_change();
        is_removed
    }

    /// Takes back what `finder` said of a worker. True: nobody else says that it is there, and it drains.
    fn release(&self, key: registry::Key, finder: Finder) -> bool {
        let is_removed = self.registry().release(key, finder);
        self.announce_change();
        is_removed
    }
}

enum Order {
    HandleSignals(std::sync::mpsc::SyncSender<std::io::Result<()>>),
    Add(
        WorkerSpec,
        std::sync::mpsc::SyncSender<Result<(), AddError>>,
    ),
    Drain,
    Reload,
    Stop,
}

/// One worker as [`Control::workers`] tells of it.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// As registered; with `@rank` behind it where an engine has several data-parallel ranks.
    pub url: Arc<str>,
    /// What it does.
    pub role: Role,
    /// `starting`, `ready`, `unhealthy`, `silent` (does not register any more), `not_ready` (its pod) or `draining`; `failing`, `refused`,
    /// `stalled` or `degraded` while it is out although its probes are good.
    pub state: &'static str,
    /// Its data-parallel rank, where the router chooses it.
    pub rank: Option<u32>,
    /// Where it counts in the books.
    pub id: shards::WorkerId,
    /// Exchanges in flight.
    pub in_flight: u32,
    /// Of these, before their first byte.
    pub waiting: u32,
    /// Of these, after it.
    pub active: u32,
    /// Times chosen.
    pub chosen: u64,
    /// Prompt bytes sent to it.
    pub prompt_bytes: u64,
    /// Of these, known to it.
    pub matched_bytes: u64,
    /// Failed exchanges.
    pub failures: u64,
    /// 5xx answers other than 503, which are no failed exchanges, and good answers.
    pub errors: u64,
    /// See above.
    pub successes: u64,
    /// Why it is not ready.
    pub reason: Option<String>,
}

/// The running control thread. Dropping it stops the thread, without waiting.
pub struct Control {
    plane: Arc<Plane>,
    orders: mpsc::UnboundedSender<Order>,
    thread: JoinHandle<()>,
    discovery_address: Option<std::net::SocketAddr>,
}

/// A listener of the control thread.
pub struct SideListener {
    /// Listens.
    pub listener: std::net::TcpListener,
    /// Another router serves there when this one drains: from then on it gets what comes.
    pub is_left_at_drain: bool,
}

/// Those listeners.
#[derive(Default)]
pub struct SideListeners {
    /// Where Prometheus is served.
    pub metrics: Option<SideListener>,
    /// Where the admin paths are served, if not where clients are.
    pub admin: Option<SideListener>,
}

/// Starts the control thread: registers the configured workers, probes them, serves metrics and the admin port.
///
/// # Errors
/// When the thread, its runtime or a listener cannot be set up.
pub fn start(
    shared: Arc<Shared>,
    publisher: Publisher<Fleet>,
    admin_rx: mpsc::Receiver<AdminRequest>,
    side: SideListeners,
) -> std::io::Result<Control> {
    let registry = Mutex::new(Registry::new(shared.clone(), publisher));
    let plane = Arc::new(Plane {
        shared,
        registry,
        changes: latest::channel(0).0,
        probe_now: latest::channel(0).0,
        discovery: discovery::Discovery::default(),
        registrations: registration::Stats::default(),
        kv: kv::Kv::default(),
        reload: reload::Reload::default(),
        is_reporting: AtomicBool::new(false),
    });
    let config = plane.shared.config();
    let discovery_text = config
        .pd
        .as_ref()
        .and_then(|pd| pd.discovery_address.as_deref());
    let discovery = discovery_text.map(registration::bind).transpose()?;
    let discovery_address = discovery.as_ref().map(|listener| listener.local_addr());
    let discovery_address = discovery_address.transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(8)
        .build()?;
    let in_runtime = |side: SideListener| {
        side.listener.set_nonblocking(true)?;
        let _in_runtime = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(side.listener)?;
        Ok::<_, std::io::Error>((listener, side.is_left_at_drain))
    };
    let metrics_listener = side.metrics.map(in_runtime).transpose()?;
    let admin_listener = side.admin.map(in_runtime).transpose()?;
    let discovery = match discovery {
        Some(listener) => {
            let _in_runtime = runtime.enter();
            Some(tokio::net::TcpListener::from_std(listener)?)
        }
        None => None,
    };
    let (orders, order_rx) = mpsc::unbounded_channel();
    let for_thread = plane.clone();
    let weak_orders = orders.downgrade();
    let thread = std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            runtime.block_on(run(
                for_thread,
                admin_rx,
                order_rx,
                weak_orders,
                metrics_listener,
                admin_listener,
                discovery,
            ));
            // A name that is being resolved must not hold up the end.
            runtime.shutdown_background();
        })?;
    Ok(Control {
        plane,
        orders,
        thread,
        discovery_address,
    })
}

async fn run(
    plane: Arc<Plane>,
    mut admin_rx: mpsc::Receiver<AdminRequest>,
    mut order_rx: mpsc::UnboundedReceiver<Order>,
    orders: mpsc::WeakUnboundedSender<Order>,
    metrics_listener: Option<(tokio::net::TcpListener, bool)>,
    admin_listener: Option<(tokio::net::TcpListener, bool)>,
    discovery: Option<tokio::net::TcpListener>,
) {
    for worker in plane.shared.config().workers.clone() {
        let url = worker.url.clone();
        if plane.add(worker, Finder::Static).is_err() {
            tracing::error!(worker = %url, "worker not registered: no free slot");
        }
    }
    report_settings(&plane.shared.config());
    discovery::start(&plane);
    tokio::spawn(watch::report_start(plane.clone()));
    tokio::spawn(kv::run(plane.clone()));
    if let Some(listener) = discovery {
        tokio::spawn(registration::run(plane.clone(), listener));
    }
    let admin = admin::Admin::new(plane.clone());
    let drain = Drain::new(plane.shared.clone());
    if let Some((listener, is_left_at_drain)) = metrics_listener {
        let leave = is_left_at_drain.then(|| drain.begun());
        let router = metrics::router(plane.clone());
        tokio::spawn(serve("metrics", listener, router, leave));
    }
    if let Some((listener, is_left_at_drain)) = admin_listener {
        let leave = is_left_at_drain.then(|| drain.begun());
        let listener = secure::SecureListener::new(listener, plane.clone());
        let router = admin_port::router(plane.clone());
        tokio::spawn(serve("admin", listener, router, leave));
    }
    tokio::spawn(reload::watch_files(plane.clone()));
    tokio::spawn(admission::follow_rate(plane.shared.clone()));
    let mut changes = plane.changes.subscribe();
    let mut drain_rate = admission::DrainRate::default();
    let mut judged = tokio::time::Instant::now();
    let mut swept_parts = 0;
    let mut judge_tick = tokio::time::interval(JUDGE_INTERVAL);
    judge_tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let pause = if plane.registry().sweep() {
            SWEEP_PAUSE_BUSY
        } else {
            SWEEP_PAUSE_IDLE
        };
        tokio::select! {
            request = admin_rx.recv() => if let Some(request) = request { admin.answer(request) },
            order = order_rx.recv() => match order {
                None | Some(Order::Stop) => return,
                Some(Order::Drain) => drain.signal(),
                Some(Order::Reload) => {
                    if let Some(log) = &plane.shared.access_log {
                        log.reopen();
                    }
                    if let Some(log) = &plane.shared.decision_log {
                        log.reopen();
                    }
                    let plane = plane.clone();
                    // What comes of it is in the log.
                    tokio::spawn(async move { reload::run(&plane).await.is_ok() });
                }
                Some(Order::HandleSignals(done)) => {
                    let _ = done.send(drain::forward_signals(orders.clone()));
                }
                Some(Order::Add(worker, done)) => {
                    let _ = done.send(plane.add(worker, Finder::Api).map(|_| ()));
                }
            },
            _ = changes.changed() => {}
            now = judge_tick.tick() => {
                plane.judge();
                drain_rate.tell(&plane.shared, now.saturating_duration_since(judged));
                judged = now;
                if let Some(sessions) = plane.shared.sessions.get() {
                    let config = plane.shared.config();
                    let bound_secs = config.kv.session_affinity_ttl_secs.unwrap_or(0);
                    let now = plane.shared.age_of(config.session_ttl_secs.max(bound_secs));
                    sessions.sweep(swept_parts % SESSION_PARTS, SESSION_PARTS, now);
                    swept_parts += 1;
                }
            }
            () = plane.shared.failure_bell.notified() => {
                plane.judge();
                // A good probe brings back whom a single reset took out.
                // ORDERING: Relaxed; it says "probe" and publishes nothing, the bell brought us here.
                if plane.shared.is_refused.swap(false, Ordering::Relaxed) {
                    plane.probe_now.send_modify(|count| *count += 1);
                }
                // Not for each of a thousand failures.
                tokio::time::sleep(JUDGE_PAUSE).await;
            }
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Serves on a listener of its own until the runtime ends, or until `leave` does.
async fn serve(
    name: &'static str,
    listener: impl axum::serve::Listener<Addr = std::net::SocketAddr>,
    router: axum::Router,
    leave: Option<impl Future<Output = ()> + Send + 'static>,
) {
    let serve = axum::serve(listener, router);
    let result = match leave {
        // Connections that are kept alive end too, or what comes on them would go on to a process that is about to end.
        Some(leave) => serve.with_graceful_shutdown(leave).await,
        None => serve.await,
    };
    if let Err(error) = result {
        tracing::error!(%error, "the {name} listener has ended");
    }
}

/// The effective settings, once, a line for each role.
fn report_settings(config: &Config) {
    for role in config.needed_roles() {
        let settings = config.settings_of(*role);
        tracing::info!(
            role = role.label(),
            policy = settings.policy.name(),
            cache_threshold = settings.cache_threshold,
            balance_abs_threshold = settings.balance_abs_threshold,
            balance_rel_threshold = settings.balance_rel_threshold,
            common_prefix_threshold = settings.common_prefix_threshold,
            "effective settings"
        );
    }
    if let Some(pd) = &config.pd {
        tracing::info!(
            kv_connector = pd.connector.name(),
            discovery_address = pd.discovery_address.as_deref().unwrap_or("none"),
            missing_transfer = if pd.allows_missing_transfer {
                "decode"
            } else {
                "error"
            },
            "prefill/decode disaggregation is on"
        );
    }
}

impl Control {
    /// From now on SIGTERM and SIGINT drain, a second one stops at once, and SIGHUP reloads. For the binary only: signals
    /// belong to the process.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn handle_signals(&self) -> std::io::Result<()> {
        let (done, answer) = std::sync::mpsc::sync_channel(1);
        let _ = self.orders.send(Order::HandleSignals(done));
        answer
            .recv()
            .unwrap_or_else(|_| Err(std::io::Error::other("the control thread has ended")))
    }

    /// From now on `source`, if it names a file, is read again on SIGHUP and `POST /reload`. `keys`: what the running
    /// configuration was made of; `set_log_level` is called on the control thread when another level is wanted. To be
    /// called once; a second call changes nothing.
    pub fn reload_from(
        &self,
        source: Source,
        keys: Keys,
        set_log_level: impl Fn(LogLevel) + Send + Sync + 'static,
    ) {
        self.plane
            .reload
            .set_origin(source, keys, Box::new(set_log_level));
    }

    /// Where engines register themselves, if they may.
    pub fn discovery_address(&self) -> Option<std::net::SocketAddr> {
        self.discovery_address
    }

    /// What the first signal does; called again, what the second does.
    pub fn drain(&self) {
        let _ = self.orders.send(Order::Drain);
    }

    /// Ends the control thread. Cores go on, without health probes and admin answers; stop them first.
    pub fn stop(&self) {
        let _ = self.orders.send(Order::Stop);
    }

    /// Waits for the control thread to end. False: it has panicked.
    pub fn join(self) -> bool {
        self.thread.join().is_ok()
    }

    /// Registers a worker, as `POST /add_worker` does, without waiting for it.
    ///
    /// # Errors
    /// In words: the URL cannot be, is registered already, the fleet needs a role, or there is no room.
    pub fn add_worker(&self, url: &str) -> Result<(), String> {
        self.add_worker_as(url, Role::Regular, None)
    }

    /// Registers a worker of a role.
    ///
    /// # Errors
    /// As of [`Control::add_worker`]; and when the fleet has no workers of this role.
    pub fn add_worker_as(
        &self,
        url: &str,
        role: Role,
        bootstrap_port: Option<u16>,
    ) -> Result<(), String> {
        let url = WorkerUrl::parse(url).map_err(|error| error.to_string())?;
        let worker = WorkerSpec {
            url,
            role,
            bootstrap_port,
        };
        if let Some(reason) = self.plane.misfit(role) {
            return Err(reason);
        }
        let (done, answer) = std::sync::mpsc::sync_channel(1);
        let _ = self.orders.send(Order::Add(worker, done));
        match answer.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(AddError::Exists)) => Err("the worker is registered already".to_owned()),
            Ok(Err(AddError::Full)) => Err("no room for another worker".to_owned()),
            Err(_) => Err("the control thread has ended".to_owned()),
        }
    }

    /// Takes a worker out, as `POST /remove_worker` does. False: not registered.
    pub fn remove_worker(&self, url: &str) -> bool {
        let Ok(url) = WorkerUrl::parse(url) else {
            return false;
        };
        let key = self.plane.registry().find(&url).map(|entry| entry.key);
        key.is_some_and(|key| self.plane.remove(key))
    }

    /// Probes every worker now, beside the regular rhythm. Does not wait.
    pub fn probe(&self) {
        self.plane.probe_now();
    }

    /// All workers and lives that are ending, as they are now.
    pub fn workers(&self) -> Vec<WorkerView> {
        self.plane.workers()
    }

    /// Workers that may get new requests.
    pub fn ready_count(&self) -> usize {
        self.plane.registry().ready_count()
    }

    /// Whether workers of the start are still to be probed for the first time, or none of a needed role is ready. A
    /// router without workers is not starting: they are added later.
    pub fn is_starting(&self) -> bool {
        let registry = self.plane.registry();
        let configured_count = self.plane.shared.config().workers.len();
        let mut entries = registry.workers().map(|(entry, _)| entry);
        let is_probing = entries.any(Entry::awaits_first_probe);
        let awaits_workers = configured_count > 0 || self.plane.shared.config().discovery.is_on();
        let is_lacking = awaits_workers && !registry.missing_roles().is_empty();
        (is_probing || is_lacking) && !self.thread.is_finished()
    }

    /// Waits until `count` workers are ready. False: not within `timeout`, or the thread has ended.
    pub fn wait_ready(&self, count: usize, timeout: Duration) -> bool {
        let deadline = std::time::Instant::now() + timeout;
        while self.ready_count() < count {
            if std::time::Instant::now() >= deadline || self.thread.is_finished() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

impl Plane {
    fn workers(&self) -> Vec<WorkerView> {
        let registry = self.registry();
        let mut views: Vec<WorkerView> = registry
            .workers()
            .map(|(entry, rank)| self.view(&registry, entry, rank))
            .collect();
        for life in registry.retiring() {
            // One line a URL: a URL registered again stands above, and of several old lives the first stands here.
            if !views.iter().any(|view| view.url == life.label) {
                let load = self.shared.books.load(life.id.slot);
                views.push(view_of(
                    life.label.clone(),
                    life.role,
                    "draining",
                    life.id,
                    &load,
                    registry.totals_of_retiring(&life.label),
                ));
            }
        }
        views
    }

    fn view(&self, registry: &Registry, entry: &Entry, rank: &Rank) -> WorkerView {
        let load = self.shared.books.load(rank.id.slot);
        let totals = registry.totals(rank);
        WorkerView {
            reason: entry.reason(),
            rank: rank.number,
            ..view_of(
                rank.label.clone(),
                entry.role,
                registry.state(entry, rank),
                rank.id,
                &load,
                totals,
            )
        }
    }
}

fn view_of(
    url: Arc<str>,
    role: Role,
    state: &'static str,
    id: shards::WorkerId,
    load: &Load,
    totals: totals::Totals,
) -> WorkerView {
    WorkerView {
        url,
        role,
        state,
        rank: None,
        id,
        in_flight: load.in_flight,
        waiting: load.waiting,
        active: load.active,
        chosen: totals.chosen,
        prompt_bytes: totals.prompt_bytes,
        matched_bytes: totals.matched_bytes,
        failures: totals.failures,
        errors: totals.errors,
        successes: totals.successes,
        reason: None,
    }
}

#[cfg(test)]
mod pd_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
