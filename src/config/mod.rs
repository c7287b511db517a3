//! Configuration: flags, environment and a file, parsed by the main thread, then shared read-only. A reload makes another
//! [`Config`] of the same sources; what it may not change is in `fixed`.
//!
//! `cli` is what may be typed, `file` what may stand in the file; [`Config`] is what it means: plain data, times as
//! `Duration`, sizes with their unit in the name. A value that cannot be is refused at start with the flag's name
//! ([`ConfigError`], exit code 2).
#![forbid(unsafe_code)]

mod cli;
mod compat;
mod discovery;
mod file;
mod files;
mod fixed;
pub mod flags;
mod keys;
mod kv;
mod machine;
mod parse;
mod pd;
mod show;
mod standing;
mod tls;
mod worker_url;

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use shards::Refill;

pub use cli::{
    Cli, Command, HealthArgs, KeyArgs, KvArgs, LimitArgs, LineArgs, ListenerArgs, MachineArgs,
    ObservabilityArgs, PdArgs, PolicyArgs, ReliabilityArgs, ServeArgs, StandingArgs, TlsArgs,
};
pub use compat::CompatArgs;
pub use discovery::{
    DiscoveryArgs, DiscoveryConfig, DnsConfig, DnsName, KubernetesConfig, RecordKind, WorkersFile,
    read_workers_file,
};
pub use file::{Keys, LoadError, Loaded, Source};
pub use files::Stamp;
pub use flags::Notice;
pub use keys::KeySource;
pub use kv::{KvConfig, KvSource, TokenizerConfig};
pub use machine::{Limit, connections_of, cpu_count, descriptor_limits, limit};
pub use pd::{BOOTSTRAP_PORT, Connector, PdConfig, WorkerSpec};
pub use show::{Origin, Setting, file_of_line, in_force};
pub use standing::StandingConfig;
pub use tls::{Tls, TlsSource};
pub use worker_url::{WorkerUrl, WorkerUrlError};

use crate::access::Access;
use crate::access_log::Format;
use crate::held::ByteLimits;
use crate::http::Cors;
use crate::route::{PolicyKind, Role, Settings, TOKEN_BYTES};

/// Most workers that can be registered at a time; half of the books' slots, so that as many old incarnations may drain.
pub const WORKER_COUNT_MAX: usize = shards::SLOT_COUNT_MAX / 2;

/// Time for load balancers to see that readiness has turned 503.
const DRAIN_GRACE: Duration = Duration::from_secs(1);

/// Exit code for a command line that cannot be (the code clap uses).
pub const EXIT_USAGE: i32 = 2;

/// A text that must not show in logs, listings or metrics.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Wraps it.
    pub fn new(text: &str) -> Secret {
        Secret(text.into())
    }

    /// The text itself, for the wire only.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// When and how often a failed attempt is repeated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryConfig {
    /// Retries after the first attempt, each on another worker; 0 with `--disable-retries`.
    pub retries_max: u32,
    /// Retries that each request adds to the budget.
    pub budget_ratio: f64,
    /// Pause before the first retry.
    pub backoff_initial: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
    /// Growth of the pause, at least 1.
    pub backoff_multiplier: f64,
    /// Share of the pause by which chance moves it, 0 to 1.
    pub jitter_factor: f64,
}

/// How workers are probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthConfig {
    /// Failed probes in a row that take a worker out.
    pub failure_threshold: u32,
    /// Good probes in a row that bring it back.
    pub success_threshold: u32,
    /// Time for one probe, connecting included.
    pub timeout: Duration,
    /// Pause between two probes of a worker.
    pub interval: Duration,
    /// Path, behind the worker's own prefix.
    pub endpoint: Arc<str>,
}

/// Least level that is logged; the more is logged, the less it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is the level it names")]
pub enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
}

impl LogLevel {
    fn parse(name: &str) -> LogLevel {
        match name {
            "debug" => LogLevel::Debug,
            "warn" | "warning" => LogLevel::Warn,
            // Nothing of ours is worse than an error.
            "error" | "critical" => LogLevel::Error,
            _ => LogLevel::Info,
        }
    }

    /// As `tracing` spells it.
    pub fn name(self) -> &'static str {
        match self {
            LogLevel::Debug => "debug",
            LogLevel::Info => "info",
            LogLevel::Warn => "warn",
            LogLevel::Error => "error",
        }
    }
}

/// What the flags mean. Never changed: a reload makes another one.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where clients connect to.
    pub listen: SocketAddr,
    /// Where Prometheus scrapes.
    pub metrics_listen: SocketAddr,
    /// Another process may listen on both.
    pub reuse_port: bool,
    /// The data listeners were inherited, so that a next router may accept on them. Found at start, no flag.
    pub is_data_inherited: bool,
    /// Workers known from the start, no two the same.
    pub workers: Vec<WorkerSpec>,
    /// Where further ones are looked for.
    pub discovery: DiscoveryConfig,
    /// Data-parallel ranks of each of them, at least 1.
    pub data_parallel_size: u32,
    /// How long an added worker may take to become ready.
    pub worker_startup_timeout: Duration,
    /// Pause between probes of a worker that was never ready.
    pub worker_startup_check_interval: Duration,
    /// Where the admin paths are served; `None`: where clients are.
    pub admin_listen: Option<SocketAddr>,
    /// The admin paths have a listener of their own, as of that or inherited (found at start).
    pub is_admin_apart: bool,
    /// Which web pages may ask; `None`: none.
    pub cors: Option<Arc<Cors>>,
    /// Bearer key towards workers.
    pub api_key: Option<Secret>,
    /// It takes the place of what a client brings.
    pub is_api_key_first: bool,
    /// Keys of clients and of the admin.
    pub access: Access,
    /// Where those come from.
    pub key_source: KeySource,
    /// TLS for clients and to workers.
    pub tls: Tls,
    /// Where that comes from.
    pub tls_source: TlsSource,
    /// Metrics need no key, whatever the rest needs.
    pub is_metrics_open: bool,

    /// Policy and thresholds of regular workers; those of the roles are in `pd`.
    pub settings: Settings,
    /// Where engines tell of their KV blocks.
    pub kv: KvConfig,
    /// Prefill/decode disaggregation, if it is on.
    pub pd: Option<PdConfig>,
    /// Idle seconds after which a session of `sticky_least_loaded` is over.
    pub session_ttl_secs: u32,
    /// Prompt bytes remembered per worker.
    pub tree_bytes_per_worker_max: u64,
    /// Memory of the prefix tree, all shards together, in bytes.
    pub prefix_memory_bytes_max: usize,
    /// Seed of the prefix hash.
    pub prefix_hash_seed: u64,

    /// Retries.
    pub retry: RetryConfig,
    /// From the whole request to the first byte of its answer, waiting and retries included.
    pub request_timeout: Duration,
    /// Waiting for the first byte of an answer.
    pub first_byte_timeout: Duration,
    /// Between two pieces of an answer.
    pub stream_idle_timeout: Duration,
    /// Connecting to a worker.
    pub connect_timeout: Duration,
    /// Head of a request, first byte to last.
    pub header_read_timeout: Duration,
    /// Between two pieces of a request's body.
    pub body_read_timeout: Duration,
    /// A client's connection without a request.
    pub keepalive_timeout: Duration,
    /// A connection to a worker without use; zero: never reused.
    pub pool_idle_timeout: Duration,
    /// Readiness 503 while still accepting, after the signal; `None`: see [`Config::drain_grace()`].
    pub drain_grace: Option<Duration>,
    /// Running requests, after the grace.
    pub drain_timeout: Duration,

    /// Probes.
    pub health: HealthConfig,
    /// Workers that fail, stall or degrade.
    pub standing: StandingConfig,

    /// Largest body of a routed request, inclusive.
    pub body_bytes_max: usize,
    /// Bodies in memory: of a core, and in all.
    pub body_memory: ByteLimits,
    /// Requests that use workers at a time, all cores together; `u32::MAX`: any number.
    pub request_count_max: u32,
    /// Requests that may begin in a second, all cores together, after a burst of as many as may run; `None`: any number.
    pub request_rate_max: Option<u32>,
    /// Requests that may wait, all cores together.
    pub queue_count_max: u32,
    /// Bytes of those; `u64::MAX`: any number.
    pub queue_bytes_max: u64,
    /// How long one may wait for its turn.
    pub queue_timeout: Duration,
    /// Requests that one worker may have at a time; `u32::MAX`: any number.
    pub worker_request_count_max: u32,
    /// How long a request may wait while there is no worker; zero: not at all.
    pub no_worker_wait: Duration,
    /// Client connections, all cores together.
    pub connection_count_max: usize,
    /// Client connections of one address; 0: any number.
    pub address_connection_count_max: u32,
    /// Largest head.
    pub header_bytes_max: usize,
    /// Most fields in a head.
    pub header_count_max: usize,
    /// What one stream may hold for a slow client.
    pub relay_buffer_bytes: usize,
    /// Largest body of an admin request.
    pub admin_body_bytes_max: usize,

    /// Least level that is logged.
    pub log_level: LogLevel,
    /// Where the log is written too, and how many days of it are kept (0: all).
    pub log_dir: Option<std::path::PathBuf>,
    /// See above.
    pub log_files_max: usize,
    /// Whether there is a line for each request, and how it looks.
    pub access_log: Option<Format>,
    /// Where; none: standard output.
    pub access_log_file: Option<std::path::PathBuf>,
    /// Most lines a second; 0: any number.
    pub access_log_lines_per_sec: u64,
    /// Where decisions are written; none: nowhere.
    pub decision_log: Option<std::path::PathBuf>,
    /// Decisions that each core remembers.
    pub debug_decisions_count: usize,
    /// Lower-case names of fields a request id is taken from, in order.
    pub request_id_headers: Vec<String>,

    /// Pinned threads.
    pub core_count: usize,
    /// Size of one receive buffer.
    pub recv_buffer_bytes: usize,
    /// Receive buffers of a core, a power of two.
    pub recv_buffer_count: u16,
    /// How long a core that relays many streams waits for more of their events before it wakes; zero: never.
    pub stream_gather: Duration,
    /// Multishot receive may be used where the kernel has it.
    pub multishot_receive: bool,
    /// Deferred task run may be used where the kernel has it.
    pub deferred_task_run: bool,
}

/// A flag, and why its value cannot be. Shown as clap shows its own errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Long name, without dashes.
    pub flag: &'static str,
    /// In words.
    pub reason: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match compat::is_refused(self.flag) {
            true => "vllm-router's",
            false => "invalid value for",
        };
        write!(
            f,
            "error: {what} '--{}': {}\n\nFor more information, try '--help'.",
            self.flag, self.reason
        )
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Gives the flags their meaning, and checks what concerns several of them. The file that `--config` may name is
    /// not read (see [`Source::load`]), that of clients' keys is.
    ///
    /// # Errors
    /// The first flag whose value cannot be, or whose file cannot.
    pub fn from_cli(cli: Cli) -> Result<Config, ConfigError> {
        let ServeArgs {
            config: _,
            listener,
            discovery,
            keys,
            tls,
            policy,
            kv,
            pd,
            reliability,
            standing,
            health,
            limits,
            observability,
            machine,
            compat,
        } = cli.serve;
        let settings = Settings {
            policy: policy.policy,
            cache_threshold: policy.cache_threshold,
            balance_abs_threshold: policy.balance_abs_threshold,
            balance_rel_threshold: policy.balance_rel_threshold,
            common_prefix_threshold: policy.common_prefix_threshold,
            hash_balance_factor: policy.hash_balance_factor,
            prefix_hash_load_factor: policy.prefix_hash_load_factor,
            prefix_hash_bytes: policy.prefix_token_count as usize * TOKEN_BYTES,
            temperature: kv.router_temperature,
            tier_values: [
                1.0,
                kv.kv_penalty_host,
                kv.kv_penalty_external,
                kv.kv_penalty_disk,
            ],
        };
        let (workers, names) = pd::workers(
            &listener.worker_urls,
            listener.intra_node_data_parallel_size,
            &pd,
        )?;
        let is_pd = pd.vllm_pd_disaggregation;
        let discovery = DiscoveryConfig::from_args(discovery, names, is_pd)?;
        let kv = KvConfig::from_args(&kv, &pd, &workers, discovery.is_on())?;
        let pd = PdConfig::from_args(&pd, settings)?;
        pd::check_policies(
            &settings,
            pd.as_ref(),
            &workers,
            discovery.is_on() || listener.intra_node_data_parallel_size > 1,
        )?;
        check_api_key(&keys)?;
        let mut key_source = KeySource::from_args(&keys);
        let access = key_source.read()?;
        compat.check(access.clients.is_some())?;
        let mut tls_source = TlsSource::from_args(&tls)?;
        let tls = tls_source.read(None)?;
        let admin_listen = match keys.admin_port {
            Some(port) => Some(address("admin-host", &keys.admin_host, port)?),
            None => None,
        };
        let secs = Duration::from_secs;
        let ms = Duration::from_millis;
        Ok(Config {
            listen: address("host", &listener.host, listener.port)?,
            metrics_listen: address(
                "prometheus-host",
                &observability.prometheus_host,
                observability.prometheus_port,
            )?,
            reuse_port: listener.reuse_port,
            is_data_inherited: false,
            workers,
            discovery,
            data_parallel_size: listener.intra_node_data_parallel_size,
            worker_startup_timeout: secs(listener.worker_startup_timeout_secs),
            worker_startup_check_interval: secs(listener.worker_startup_check_interval),
            is_admin_apart: admin_listen.is_some(),
            admin_listen,
            cors: cors(&listener.cors_allowed_origins)?,
            api_key: keys.api_key,
            is_api_key_first: keys.api_key_wins == "router",
            access,
            key_source,
            tls,
            tls_source,
            is_metrics_open: keys.prometheus_open,
            settings,
            kv,
            pd,
            session_ttl_secs: policy
                .sticky_session_ttl_secs
                .map_or_else(session_ttl_secs, Ok)?,
            tree_bytes_per_worker_max: policy.max_tree_size,
            prefix_memory_bytes_max: size("prefix-memory-bytes", policy.prefix_memory_bytes)?,
            prefix_hash_seed: policy.prefix_hash_seed,
            retry: retry(&reliability)?,
            request_timeout: secs(reliability.request_timeout_secs),
            first_byte_timeout: secs(
                reliability
                    .first_byte_timeout_secs
                    .unwrap_or(reliability.request_timeout_secs),
            ),
            stream_idle_timeout: secs(
                reliability
                    .stream_idle_timeout_secs
                    .unwrap_or(reliability.request_timeout_secs),
            ),
            connect_timeout: ms(reliability.connect_timeout_ms),
            header_read_timeout: secs(reliability.header_read_timeout_secs),
            body_read_timeout: secs(reliability.body_read_timeout_secs),
            keepalive_timeout: secs(reliability.keepalive_timeout_secs),
            pool_idle_timeout: secs(listener.pool_idle_timeout_secs),
            drain_grace: reliability.drain_grace_secs.map(secs),
            drain_timeout: secs(reliability.drain_timeout_secs),
            health: HealthConfig {
                failure_threshold: health.health_failure_threshold,
                success_threshold: health.health_success_threshold,
                timeout: secs(health.health_check_timeout_secs),
                interval: secs(health.health_check_interval_secs),
                endpoint: health.health_check_endpoint.into(),
            },
            standing: StandingConfig::from_args(&standing),
            body_bytes_max: size("max-payload-size", limits.max_payload_size)?,
            body_memory: ByteLimits {
                part_bytes: bytes_or_any(limits.body_memory_bytes_per_core),
                whole_bytes: bytes_or_any(limits.body_memory_bytes),
            },
            request_count_max: count_or_any(limits.max_concurrent_requests),
            request_rate_max: limits.rate_limit_tokens_per_second,
            queue_count_max: limits.queue_size,
            queue_bytes_max: bytes_or_any(limits.queue_bytes),
            queue_timeout: secs(limits.queue_timeout_secs),
            worker_request_count_max: count_or_any(limits.worker_max_concurrent),
            no_worker_wait: ms(limits.no_worker_wait_ms),
            connection_count_max: match limits.max_connections {
                0 => machine::connection_count_max(),
                count => count as usize,
            },
            address_connection_count_max: limits.max_connections_per_address,
            header_bytes_max: limits.header_size_max_bytes as usize,
            header_count_max: usize::from(limits.header_count_max),
            relay_buffer_bytes: limits.relay_buffer_bytes as usize,
            admin_body_bytes_max: limits.admin_body_max_bytes as usize,
            log_level: LogLevel::parse(&observability.log_level),
            log_dir: observability.log_dir,
            log_files_max: observability.log_files_max as usize,
            access_log: observability.access_log.map(|name| match &*name {
                "text" => Format::Text,
                _ => Format::Json,
            }),
            access_log_file: observability.access_log_file,
            access_log_lines_per_sec: observability.access_log_lines_per_sec,
            decision_log: observability.decision_log,
            debug_decisions_count: observability.debug_decisions_count as usize,
            request_id_headers: header_names(&observability.request_id_headers)?,
            core_count: core_count(machine.cores, machine.cores_share_cpus)?,
            recv_buffer_bytes: machine.recv_buffer_bytes as usize,
            recv_buffer_count: machine.recv_buffer_count,
            stream_gather: Duration::from_micros(machine.stream_gather_us.into()),
            multishot_receive: !machine
                .io_uring_without
                .iter()
                .any(|f| f == "multishot-receive"),
            deferred_task_run: !machine
                .io_uring_without
                .iter()
                .any(|f| f == "deferred-task-run"),
        })
    }

    /// How long readiness is 503 while the router still accepts, after the signal. Where a next router may listen on the
    /// same port, none by default: that one accepts, and readiness asked there is not ours to tell.
    pub fn drain_grace(&self) -> Duration {
        let default = if self.reuse_port || self.is_data_inherited {
            Duration::ZERO
        } else {
            DRAIN_GRACE
        };
        self.drain_grace.unwrap_or(default)
    }

    /// How the bucket of requests that may begin fills, if there is one.
    pub fn refill(&self) -> Option<Refill> {
        let rate = u64::from(self.request_rate_max?.max(1));
        // Where any number may run, as many at once as begin in a second.
        let size = match self.request_count_max {
            u32::MAX => rate,
            count => u64::from(count),
        };
        let interval_ns = (1_000_000_000 / rate).max(1);
        Some(Refill { interval_ns, size })
    }

    /// Policy and thresholds of the workers of a role.
    pub fn settings_of(&self, role: Role) -> &Settings {
        match &self.pd {
            Some(pd) => pd.settings(role),
            None => &self.settings,
        }
    }

    /// The roles of workers that a request needs: without a ready worker of each, nothing can be served.
    pub fn needed_roles(&self) -> &'static [Role] {
        match &self.pd {
            Some(_) => &[Role::Prefill, Role::Decode],
            None => &[Role::Regular],
        }
    }

    /// The effective settings for operators. Listed one by one, so that nothing secret slips in.
    pub fn public_json(&self) -> serde_json::Value {
        let mut shown = self.general_json();
        if let Some(shown) = shown.as_object_mut() {
            shown.extend(self.standing.public_json());
            shown.extend(self.admission_json());
            shown.extend(self.keys_json());
            shown.extend(self.hashing_json());
            shown.extend(self.further_json());
            shown.insert("kv".to_owned(), self.kv_json());
            shown.insert("discovery".to_owned(), self.discovery.public_json());
            if let Some(pd) = &self.pd {
                shown.insert("pd".to_owned(), pd.public_json());
            }
        }
        shown
    }

    fn admission_json(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let wait_ms = u64::try_from(self.no_worker_wait.as_millis()).unwrap_or(u64::MAX);
        // Any number is shown as it is said: 0.
        let count = |count: u32| if count == u32::MAX { 0 } else { count };
        let bytes = |bytes: u64| if bytes == u64::MAX { 0 } else { bytes };
        [
            (
                "max_concurrent_requests",
                count(self.request_count_max).into(),
            ),
            ("rate_limit_tokens_per_second", self.request_rate_max.into()),
            ("queue_size", self.queue_count_max.into()),
            ("queue_bytes", bytes(self.queue_bytes_max).into()),
            (
                "body_memory_bytes",
                bytes(self.body_memory.whole_bytes).into(),
            ),
            (
                "body_memory_bytes_per_core",
                bytes(self.body_memory.part_bytes).into(),
            ),
            ("queue_timeout_secs", self.queue_timeout.as_secs().into()),
            (
                "worker_max_concurrent",
                count(self.worker_request_count_max).into(),
            ),
            ("no_worker_wait_ms", wait_ms.into()),
            (
                "max_connections_per_address",
                self.address_connection_count_max.into(),
            ),
        ]
        .into_iter()
        .map(|(name, value): (&str, serde_json::Value)| (name.to_owned(), value))
    }

    /// Whether there are keys and certificates, and how many; never which.
    fn keys_json(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let client_count = self.access.clients.as_ref().map_or(0, |all| all.len());
        let wins = if self.is_api_key_first {
            "router"
        } else {
            "client"
        };
        let admin = self.admin_listen.map(|address| address.to_string());
        let cors = self
            .cors
            .as_ref()
            .map_or_else(Vec::new, |cors| cors.shown());
        [
            ("cors_allowed_origins", cors.into()),
            ("api_key_set", self.api_key.is_some().into()),
            ("api_key_wins", wins.into()),
            ("client_api_keys", client_count.into()),
            ("admin_api_key_set", self.access.admin.is_some().into()),
            ("admin", admin.into()),
            ("prometheus_open", self.is_metrics_open.into()),
            ("tls", self.tls.for_clients.is_some().into()),
            (
                "tls_files",
                self.tls_source.flags().collect::<Vec<_>>().into(),
            ),
        ]
        .into_iter()
        .map(|(name, value): (&str, serde_json::Value)| (name.to_owned(), value))
    }

    fn kv_json(&self) -> serde_json::Value {
        let [_, host, external, disk] = self.settings.tier_values;
        serde_json::json!({
            "event_sources": self.kv.sources.len(),
            "event_block_size": self.kv.block_tokens,
            "event_model": self.kv.model,
            "index_bytes": self.kv.index_bytes_max,
            "router_temperature": self.settings.temperature,
            "penalty_host": host,
            "penalty_external": external,
            "penalty_disk": disk,
            "session_affinity_ttl_secs": self.kv.session_affinity_ttl_secs,
        })
    }

    /// Whether some role's workers are chosen by what engines say.
    pub fn uses_kv_events(&self) -> bool {
        let mut roles = self.needed_roles().iter();
        roles.any(|role| self.settings_of(*role).policy == PolicyKind::KvAware)
    }

    fn hashing_json(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let settings = &self.settings;
        [
            ("hash_balance_factor", settings.hash_balance_factor.into()),
            (
                "prefix_token_count",
                (settings.prefix_hash_bytes / TOKEN_BYTES).into(),
            ),
            (
                "prefix_hash_load_factor",
                settings.prefix_hash_load_factor.into(),
            ),
            ("sticky_session_ttl_secs", self.session_ttl_secs.into()),
        ]
        .into_iter()
        .map(|(name, value): (&str, serde_json::Value)| (name.to_owned(), value))
    }

    fn further_json(&self) -> impl Iterator<Item = (String, serde_json::Value)> {
        let access_log = self.access_log.map(Format::name);
        let shown = |path: &std::path::PathBuf| path.display().to_string();
        let log_dir = self.log_dir.as_ref().map(shown);
        let decision_log = self.decision_log.as_ref().map(shown);
        [
            (
                "worker_startup_timeout_secs",
                self.worker_startup_timeout.as_secs().into(),
            ),
            (
                "worker_startup_check_interval",
                self.worker_startup_check_interval.as_secs().into(),
            ),
            ("log_dir", log_dir.into()),
            ("log_files_max", self.log_files_max.into()),
            ("access_log", access_log.into()),
            ("decision_log", decision_log.into()),
            ("debug_decisions_count", self.debug_decisions_count.into()),
            ("request_id_headers", self.request_id_headers.clone().into()),
        ]
        .into_iter()
        .map(|(name, value): (&str, serde_json::Value)| (name.to_owned(), value))
    }

    fn general_json(&self) -> serde_json::Value {
        let settings = &self.settings;
        serde_json::json!({
            "listen": self.listen.to_string(),
            "prometheus": self.metrics_listen.to_string(),
            "reuse_port": self.reuse_port,
            "intra_node_data_parallel_size": self.data_parallel_size,
            "policy": settings.policy.name(),
            "cache_threshold": settings.cache_threshold,
            "balance_abs_threshold": settings.balance_abs_threshold,
            "balance_rel_threshold": settings.balance_rel_threshold,
            "common_prefix_threshold": settings.common_prefix_threshold,
            "max_tree_size": self.tree_bytes_per_worker_max,
            "prefix_memory_bytes": self.prefix_memory_bytes_max,
            "max_payload_size": self.body_bytes_max,
            "max_connections": self.connection_count_max,
            "header_size_max_bytes": self.header_bytes_max,
            "header_count_max": self.header_count_max,
            "relay_buffer_bytes": self.relay_buffer_bytes,
            "admin_body_max_bytes": self.admin_body_bytes_max,
            "request_timeout_secs": self.request_timeout.as_secs(),
            "first_byte_timeout_secs": self.first_byte_timeout.as_secs(),
            "stream_idle_timeout_secs": self.stream_idle_timeout.as_secs(),
            "connect_timeout_ms": u64::try_from(self.connect_timeout.as_millis()).unwrap_or(u64::MAX),
            "header_read_timeout_secs": self.header_read_timeout.as_secs(),
            "body_read_timeout_secs": self.body_read_timeout.as_secs(),
            "keepalive_timeout_secs": self.keepalive_timeout.as_secs(),
            "pool_idle_timeout_secs": self.pool_idle_timeout.as_secs(),
            "retry_max_retries": self.retry.retries_max,
            "retry_budget_ratio": self.retry.budget_ratio,
            "health_check_interval_secs": self.health.interval.as_secs(),
            "health_check_timeout_secs": self.health.timeout.as_secs(),
            "health_failure_threshold": self.health.failure_threshold,
            "health_success_threshold": self.health.success_threshold,
            "health_check_endpoint": &*self.health.endpoint,
            "drain_grace_secs": self.drain_grace().as_secs(),
            "drain_timeout_secs": self.drain_timeout.as_secs(),
            "cores": self.core_count,
            "recv_buffer_bytes": self.recv_buffer_bytes,
            "recv_buffer_count": self.recv_buffer_count,
            "stream_gather_us": self.stream_gather.as_micros() as u64,
            "log_level": self.log_level.name(),
        })
    }

    /// The defaults, with one core, free ports and no workers: for tests that build a router in their own process.
    ///
    /// # Panics
    /// If a `CORELANE_` variable of the environment holds a value that cannot be.
    pub fn default_for_tests() -> Config {
        Config::for_tests(&[])
    }

    /// The same with further flags.
    ///
    /// # Panics
    /// As above, or if the flags cannot be.
    pub fn for_tests(flags: &[&str]) -> Config {
        let line = [
            "corelane",
            "--cores",
            "1",
            "--port",
            "0",
            "--prometheus-port",
            "0",
            "--max-connections",
            "1024",
        ];
        let cli = Cli::try_parse_from([&line, flags].concat()).expect("the flags parse");
        Config::from_cli(cli).expect("the flags are in range")
    }
}

fn retry(args: &ReliabilityArgs) -> Result<RetryConfig, ConfigError> {
    if args.retry_max_backoff_ms < args.retry_initial_backoff_ms {
        let reason = format!(
            "must be at least --retry-initial-backoff-ms ({})",
            args.retry_initial_backoff_ms
        );
        return Err(ConfigError {
            flag: "retry-max-backoff-ms",
            reason,
        });
    }
    Ok(RetryConfig {
        retries_max: if args.disable_retries {
            0
        } else {
            args.retry_max_retries
        },
        budget_ratio: args.retry_budget_ratio,
        backoff_initial: Duration::from_millis(args.retry_initial_backoff_ms),
        backoff_max: Duration::from_millis(args.retry_max_backoff_ms),
        backoff_multiplier: args.retry_backoff_multiplier,
        jitter_factor: args.retry_jitter_factor,
    })
}

/// A key that is to win must be there: else a client's would go on though the operator wants none to.
fn check_api_key(keys: &KeyArgs) -> Result<(), ConfigError> {
    let refuse = |flag, reason: &str| {
        Err(ConfigError {
            flag,
            reason: reason.to_owned(),
        })
    };
    match &keys.api_key {
        None if keys.api_key_wins == "router" => refuse("api-key-wins", "'router' needs --api-key"),
        None => Ok(()),
        Some(key) => match crate::access::keys::check(key.expose()) {
            Ok(()) => Ok(()),
            Err(reason) => refuse("api-key", reason),
        },
    }
}

/// 0, or vllm-router's -1: no limit.
fn count_or_any(count: i64) -> u32 {
    match u32::try_from(count) {
        Ok(0) | Err(_) => u32::MAX,
        Ok(count) => count,
    }
}

// A core is pinned to a CPU of its own, unless asked otherwise.
fn core_count(wanted: Option<u16>, may_share: bool) -> Result<usize, ConfigError> {
    let cpu_count = machine::cpu_count();
    match wanted.map(usize::from) {
        None => Ok(cpu_count),
        Some(count) if count <= cpu_count || may_share => Ok(count),
        Some(count) => {
            let reason = format!(
                "{count} cores, but this process may use only {cpu_count} CPUs (--cores-share-cpus, for tests)"
            );
            Err(ConfigError {
                flag: "cores",
                reason,
            })
        }
    }
}

/// vllm-router's setting for what is over, and its default.
fn session_ttl_secs() -> Result<u32, ConfigError> {
    const NAME: &str = "VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S";
    let Ok(text) = std::env::var(NAME) else {
        return Ok(7200);
    };
    let secs = text
        .parse()
        .ok()
        .filter(|secs| (1..=4_000_000).contains(secs));
    secs.ok_or_else(|| ConfigError {
        flag: "sticky-session-ttl-secs",
        reason: format!("{NAME} says '{text}', not a number of seconds from 1 to 4000000"),
    })
}

fn header_names(texts: &[String]) -> Result<Vec<String>, ConfigError> {
    texts
        .iter()
        .flat_map(|text| text.split([',', ' ']))
        .filter(|text| !text.is_empty())
        .map(|text| {
            parse::header_name(text).map_err(|reason| ConfigError {
                flag: "request-id-headers",
                reason,
            })
        })
        .collect()
}

/// The environment gives one text for all.
fn cors(texts: &[String]) -> Result<Option<Arc<Cors>>, ConfigError> {
    let words = texts.iter().flat_map(|text| text.split([',', ' ']));
    let cors = Cors::parse(words.filter(|word| !word.is_empty()));
    let cors = cors.map_err(|reason| ConfigError {
        flag: "cors-allowed-origins",
        reason,
    })?;
    Ok(cors.map(Arc::new))
}

fn bytes_or_any(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}

fn size(flag: &'static str, bytes: u64) -> Result<usize, ConfigError> {
    usize::try_from(bytes).map_err(|_| ConfigError {
        flag,
        reason: "more than this machine can address".to_owned(),
    })
}

fn address(flag: &'static str, host: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    let bare = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let refuse = |why: &str| ConfigError {
        flag,
        reason: format!("'{host}' {why}"),
    };
    if host.is_empty()
        || !host
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
    {
        return Err(refuse("is neither an address nor a host name"));
    }
    (host, port)
        .to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next())
        .ok_or_else(|| refuse("cannot be resolved to an address"))
}

#[cfg(test)]
mod tests;
