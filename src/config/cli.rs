//! The command line: vllm-router's flags with its names and defaults (0.1.17), and ours.
//!
//! Every flag that takes a value can also be set by environment as `CORELANE_<FLAG>`, or in the file of `--config`
//! ([`super::Source`]); the command line wins over the environment, and that over the file. Ranges of single values are
//! checked here, so that the message names the flag; what concerns several flags is checked in
//! [`super::Config::from_cli`]. Read by the main thread at start, and by the control plane for a reload.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, value_parser};

use super::compat::CompatArgs;
use super::discovery::DiscoveryArgs;
use super::parse;
use super::pd::Connector;
use crate::route::PolicyKind;

const AFTER_HELP: &str = "Every flag can also be set by environment: CORELANE_ and the flag's name in capitals, \
for example CORELANE_PORT=8080 or CORELANE_WORKER_URLS=\"http://a:8000 http://b:8000\"; or in the file of --config. \
The command line wins, then the environment, then the file.\n\n\
Example:\n  corelane --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000 --host 0.0.0.0";

/// What was typed. Without a subcommand: serve.
#[derive(Debug, Parser)]
#[command(
    name = "corelane",
    version,
    about = "A lock-free, sharded router for LLM inference, in the place of vllm-router",
    after_help = AFTER_HELP,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    next_line_help = true,
    max_term_width = 110
)]
pub struct Cli {
    /// Something other than serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of serving.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a fleet of simulated workers and a router in this process, with a live view
    Demo(crate::demo::DemoArgs),
    /// Serve as one simulated vLLM worker, for tests
    MockWorker(crate::demo::MockWorkerArgs),
    /// Say what this machine offers, what is missing, and how to enable it
    Doctor,
    /// Print the completions of a shell
    Completions {
        /// Whose
        shell: clap_complete::Shell,
    },
    /// Print the manual page corelane(1), for man -l
    Man,
    /// Say what would be in force with these flags, the environment and the file of --config, as a file; the exit code is 0,
    /// or 1 where that cannot be
    CheckConfig(LineArgs),
    /// Write the file for --config that says what these flags say, vllm-router's or ours
    ConfigFromArgs(LineArgs),
    /// Simulate fleets: what another policy would do
    Sim(Box<crate::sim::SimArgs>),
    /// Put load on a router or a worker, check every answer, and say how long they took; or compare two
    Bench(Box<crate::bench::BenchArgs>),
}

/// A command line within the command line.
#[derive(Debug, Args)]
pub struct LineArgs {
    /// Flags of serving; a program's name may stand before them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "FLAGS"
    )]
    pub line: Vec<OsString>,
}

impl LineArgs {
    /// As it would be typed, our name first.
    pub fn as_typed(&self) -> Vec<OsString> {
        let is_flag = |word: &OsString| word.as_encoded_bytes().starts_with(b"-");
        let from = self
            .line
            .iter()
            .position(is_flag)
            .unwrap_or(self.line.len());
        let ours = OsString::from("corelane");
        std::iter::once(ours)
            .chain(self.line[from..].iter().cloned())
            .collect()
    }
}

/// Flags of serving, by subject.
#[derive(Debug, Args)]
#[allow(missing_docs, reason = "each field is the group it names")]
pub struct ServeArgs {
    /// TOML file with settings: its keys are the names of these flags (policy = "random", worker-urls = ["..."]). It is
    /// read again on SIGHUP and POST /reload
    #[arg(long, value_name = "FILE", help_heading = "Config file")]
    #[arg(env = "CORELANE_CONFIG", hide_env = true)]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub listener: ListenerArgs,
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    #[command(flatten)]
    pub keys: KeyArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub policy: PolicyArgs,
    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub pd: PdArgs,
    #[command(flatten)]
    pub reliability: ReliabilityArgs,
    #[command(flatten)]
    pub standing: StandingArgs,
    #[command(flatten)]
    pub health: HealthArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub observability: ObservabilityArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub compat: CompatArgs,
}

/// Where to listen, and whom to send to.
#[derive(Debug, Args)]
#[command(next_help_heading = "Listener and workers")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct ListenerArgs {
    /// Address to listen on: an IPv4 or IPv6 address, or a name of this machine
    #[arg(
        long,
        env = "CORELANE_HOST",
        hide_env = true,
        default_value = "127.0.0.1"
    )]
    pub host: String,
    /// Port to listen on (0: any free one)
    #[arg(
        long,
        env = "CORELANE_PORT",
        hide_env = true,
        default_value_t = 30000,
        allow_negative_numbers = true
    )]
    pub port: u16,
    /// Listen although another process of the same user does, and before serving wait up to 10 s for the workers to be
    /// ready: to start a new router beside the old one, which is then sent SIGTERM. Holds for the Prometheus listener too
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_REUSE_PORT", hide_env = true)]
    pub reuse_port: bool,
    /// Workers, as http://host:port, a path prefix may follow; more can be added and removed while running
    #[arg(long, num_args = 0.., value_name = "URL")]
    #[arg(env = "CORELANE_WORKER_URLS", hide_env = true)]
    pub worker_urls: Vec<String>,
    /// Web pages of these origins (scheme://host, with the port if it has one) may ask and read the answers; * is any (default: none)
    #[arg(long, num_args = 0.., value_name = "ORIGIN")]
    #[arg(env = "CORELANE_CORS_ALLOWED_ORIGINS", hide_env = true)]
    pub cors_allowed_origins: Vec<String>,
    /// Data-parallel ranks of each worker: N > 1 makes N workers of each URL, and the rank goes out as
    /// X-data-parallel-rank
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=1024), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_INTRA_NODE_DATA_PARALLEL_SIZE", hide_env = true)]
    pub intra_node_data_parallel_size: u32,
    /// How long a worker that was added while running may take to become ready before it is dropped again
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_WORKER_STARTUP_TIMEOUT_SECS", hide_env = true)]
    pub worker_startup_timeout_secs: u64,
    /// Pause between two probes of a worker that was never ready (at most 1 s is used: a late worker joins quickly)
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_WORKER_STARTUP_CHECK_INTERVAL", hide_env = true)]
    pub worker_startup_check_interval: u64,
    /// How long a connection to a worker is kept without use (0: never reused)
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_POOL_IDLE_TIMEOUT_SECS", hide_env = true)]
    pub pool_idle_timeout_secs: u64,
}

/// Who may do what, and by which key.
#[derive(Debug, Args)]
#[command(next_help_heading = "Keys and the admin port")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct KeyArgs {
    /// Bearer key sent to workers (all calls of our own, and requests of clients that bring none)
    #[arg(long, value_name = "KEY")]
    #[arg(value_parser = parse::secret)]
    #[arg(env = "CORELANE_API_KEY", hide_env = true, hide_env_values = true)]
    pub api_key: Option<super::Secret>,
    /// Whose Authorization a worker gets when the client brings one: the client's, or --api-key in its place
    #[arg(long, default_value = "client", value_name = "WHO")]
    #[arg(value_parser = ["client", "router"])]
    #[arg(env = "CORELANE_API_KEY_WINS", hide_env = true)]
    pub api_key_wins: String,
    /// A key that clients must bring (Authorization: Bearer KEY, or x-api-key: KEY), for all but health; it is not passed
    /// on. For several, or keys that change: --client-api-keys-file
    #[arg(long, value_name = "KEY")]
    #[arg(value_parser = parse::secret)]
    #[arg(
        env = "CORELANE_CLIENT_API_KEY",
        hide_env = true,
        hide_env_values = true
    )]
    pub client_api_key: Option<super::Secret>,
    /// File with keys of which clients must bring one: a line is KEY or NAME:KEY, # begins a comment. It is read again
    /// when it changes, on SIGHUP and on POST /reload
    #[arg(long, value_name = "FILE")]
    #[arg(env = "CORELANE_CLIENT_API_KEYS_FILE", hide_env = true)]
    pub client_api_keys_file: Option<std::path::PathBuf>,
    /// Key for the admin paths, where a client's is then not enough: /add_worker, /remove_worker, /list_workers, /workers,
    /// /get_loads, /get_server_info, /flush_cache, /reload; for those that rule an engine (/sleep, /load_lora_adapter
    /// and the like); and for the metrics
    #[arg(long, value_name = "KEY")]
    #[arg(value_parser = parse::secret)]
    #[arg(
        env = "CORELANE_ADMIN_API_KEY",
        hide_env = true,
        hide_env_values = true
    )]
    pub admin_api_key: Option<super::Secret>,
    /// Address of the admin listener, if there is one
    #[arg(
        long,
        env = "CORELANE_ADMIN_HOST",
        hide_env = true,
        default_value = "127.0.0.1",
        value_name = "HOST"
    )]
    pub admin_host: String,
    /// Port of a listener for the admin paths (0: any free one), which are then 404 on --port; health and /v1/models are on
    /// both (default: no listener of their own)
    #[arg(long, value_name = "PORT", allow_negative_numbers = true)]
    #[arg(env = "CORELANE_ADMIN_PORT", hide_env = true)]
    pub admin_port: Option<u16>,
    /// Serve metrics without a key although there is --admin-api-key
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_PROMETHEUS_OPEN", hide_env = true)]
    pub prometheus_open: bool,
}

/// TLS for clients and to workers.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct TlsArgs {
    /// Certificate for clients (PEM, the chain after it): --port and --admin-port then speak TLS. All TLS files are read again
    /// when one changes, on SIGHUP and on POST /reload, and hold for new connections
    #[arg(long, alias = "tls-cert-path", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_CERT", hide_env = true)]
    pub tls_cert: Option<std::path::PathBuf>,
    /// Its private key (PEM, without a password)
    #[arg(long, alias = "tls-key-path", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_KEY", hide_env = true)]
    pub tls_key: Option<std::path::PathBuf>,
    /// Authorities of which one must have signed a client's certificate (default: clients need none)
    #[arg(long, alias = "tls-client-ca-path", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_CLIENT_CA", hide_env = true)]
    pub tls_client_ca: Option<std::path::PathBuf>,
    /// Authorities of which one must have signed the certificate of a worker with https://, or that certificate itself
    /// (default: whom this machine trusts)
    #[arg(long, alias = "ca-cert-paths", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_CA", hide_env = true)]
    pub tls_ca: Option<std::path::PathBuf>,
    /// Certificate of our own for workers that ask for one
    #[arg(long, alias = "client-cert-path", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_WORKER_CERT", hide_env = true)]
    pub tls_worker_cert: Option<std::path::PathBuf>,
    /// Its private key
    #[arg(long, alias = "client-key-path", value_name = "FILE")]
    #[arg(env = "CORELANE_TLS_WORKER_KEY", hide_env = true)]
    pub tls_worker_key: Option<std::path::PathBuf>,
}

/// How a worker is chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Policy")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct PolicyArgs {
    /// How a worker is chosen
    #[arg(long, default_value = "cache_aware", value_name = "NAME")]
    #[arg(value_parser = policy_parser())]
    #[arg(env = "CORELANE_POLICY", hide_env = true)]
    pub policy: PolicyKind,
    /// cache_aware: share of the prompt that must be known for affinity to count, 0 to 1
    #[arg(long, default_value_t = 0.3, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CACHE_THRESHOLD", hide_env = true)]
    pub cache_threshold: f64,
    /// cache_aware: the wanted worker is overloaded if its load exceeds the least load by more than this many
    /// requests, and by the factor below
    #[arg(
        long,
        env = "CORELANE_BALANCE_ABS_THRESHOLD",
        hide_env = true,
        default_value_t = 64,
        value_name = "REQUESTS",
        allow_negative_numbers = true
    )]
    pub balance_abs_threshold: u32,
    /// cache_aware: ... and its load exceeds the least load times this, at least 1
    #[arg(long, default_value_t = 1.5, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_BALANCE_REL_THRESHOLD", hide_env = true)]
    pub balance_rel_threshold: f64,
    /// cache_aware: a match that many different prompts share (a system prompt) counts for affinity only from this
    /// share of the prompt on, 0 to 1
    #[arg(long, default_value_t = 0.8, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_COMMON_PREFIX_THRESHOLD", hide_env = true)]
    pub common_prefix_threshold: f64,
    /// consistent_hash, rendezvous_hash: a worker that has more than this many times its even share of the requests gives
    /// further ones to the next on the ring (by weight), at least 1; 0: load is not looked at
    #[arg(long, default_value_t = 0.0, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor_or_off, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HASH_BALANCE_FACTOR", hide_env = true)]
    pub hash_balance_factor: f64,
    /// prefix_hash: tokens of the prompt's begin that are hashed, four bytes each
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    #[arg(value_parser = value_parser!(u32).range(1..=1_048_576), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFIX_TOKEN_COUNT", hide_env = true)]
    pub prefix_token_count: u32,
    /// prefix_hash: --hash-balance-factor of this policy
    #[arg(long, default_value_t = 1.25, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor_or_off, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFIX_HASH_LOAD_FACTOR", hide_env = true)]
    pub prefix_hash_load_factor: f64,
    /// sticky_least_loaded: a session that was not used for so long is over (default: what the environment variable
    /// VLLM_ROUTER_SLL_SESSION_EXPIRATION_IN_S says, else 7200)
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u32).range(1..=4_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_STICKY_SESSION_TTL_SECS", hide_env = true)]
    pub sticky_session_ttl_secs: Option<u32>,
    /// Accepted for compatibility and without effect: old prefixes are evicted continuously here
    #[arg(
        long,
        alias = "eviction-interval",
        default_value_t = 120,
        value_name = "SECONDS"
    )]
    #[arg(value_parser = value_parser!(u64).range(1..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_EVICTION_INTERVAL_SECS", hide_env = true)]
    pub eviction_interval_secs: u64,
    /// Prompt characters (bytes) remembered per worker
    #[arg(long, default_value_t = 33_554_432, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64).range(1..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_MAX_TREE_SIZE", hide_env = true)]
    pub max_tree_size: u64,
    /// Memory of the prefix tree, all cores together
    #[arg(long, default_value_t = 268_435_456, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64).range(65_536..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFIX_MEMORY_BYTES", hide_env = true)]
    pub prefix_memory_bytes: u64,
    /// Seed of the prefix hash. The same everywhere lets head nodes compare; a secret one keeps clients from
    /// crafting prompts whose hashes collide
    #[arg(
        long,
        env = "CORELANE_PREFIX_HASH_SEED",
        hide_env = true,
        hide_env_values = true,
        default_value_t = 0,
        value_name = "NUMBER",
        allow_negative_numbers = true
    )]
    pub prefix_hash_seed: u64,
}

/// What engines say they hold.
#[derive(Debug, Args)]
#[command(next_help_heading = "KV events")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct KvArgs {
    /// kv_aware: where a worker's engine publishes its KV events, an endpoint tcp://host:port for each data-parallel rank;
    /// repeat for each worker
    #[arg(long, num_args = 1.., value_name = "WORKER_URL=ENDPOINT[,ENDPOINT...]")]
    #[arg(env = "CORELANE_KV_EVENT_SOURCE", hide_env = true)]
    pub kv_event_source: Vec<String>,
    /// kv_aware: where it sends old events again, as many endpoints as above
    #[arg(long, num_args = 1.., value_name = "WORKER_URL=ENDPOINT[,ENDPOINT...]")]
    #[arg(env = "CORELANE_KV_EVENT_REPLAY_SOURCE", hide_env = true)]
    pub kv_event_replay_source: Vec<String>,
    /// kv_aware: tokens of a KV block of the engines
    #[arg(long, default_value_t = 16, value_name = "TOKENS")]
    #[arg(value_parser = value_parser!(u32).range(1..=65_536), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_EVENT_BLOCK_SIZE", hide_env = true)]
    pub kv_event_block_size: u32,
    /// kv_aware: the base model's name; requests for another model are taken for an adapter's (default: adapters are
    /// those that events name)
    #[arg(long, value_name = "NAME")]
    #[arg(env = "CORELANE_KV_EVENT_MODEL", hide_env = true)]
    pub kv_event_model: Option<String>,
    /// kv_aware: --kv-event-source of the prefill workers
    #[arg(long, num_args = 1.., value_name = "WORKER_URL=ENDPOINT[,ENDPOINT...]")]
    #[arg(env = "CORELANE_PD_KV_EVENTS", hide_env = true)]
    pub pd_kv_events: Vec<String>,
    /// kv_aware: memory of the index of blocks, all cores together; some 24 bytes a block and worker
    #[arg(long, default_value_t = 268_435_456, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64).range(65_536..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_INDEX_BYTES", hide_env = true)]
    pub kv_index_bytes: u64,
    /// kv_aware: how far choices stray from the least cost (softmax over costs, in tokens times requests); 0: not at all
    #[arg(long, default_value_t = 0.0, value_name = "COST")]
    #[arg(value_parser = parse::temperature, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_ROUTER_TEMPERATURE", hide_env = true)]
    pub router_temperature: f64,
    /// kv_aware: what a block in the engine's host memory is worth, 0 to 1
    #[arg(long, default_value_t = 0.8, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_PENALTY_HOST", hide_env = true)]
    pub kv_penalty_host: f64,
    /// kv_aware: ... in memory elsewhere
    #[arg(long, default_value_t = 0.6, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_PENALTY_EXTERNAL", hide_env = true)]
    pub kv_penalty_external: f64,
    /// kv_aware: ... on disk
    #[arg(long, default_value_t = 0.3, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_PENALTY_DISK", hide_env = true)]
    pub kv_penalty_disk: f64,
    /// kv_aware: a session keeps to its worker until it was idle for so long; in P/D its decode worker only, while that has
    /// less than its even share of the requests (default: sessions are not looked at)
    #[arg(long, value_name = "SECS")]
    #[arg(value_parser = value_parser!(u32).range(1..=31_536_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KV_AWARE_SESSION_AFFINITY_TTL_SECS", hide_env = true)]
    pub kv_aware_session_affinity_ttl_secs: Option<u32>,
    /// kv_aware: tokenizer of the engines' model, for prompts of text: a tokenizer.json, or a model's folder with it; with
    /// MODEL= for requests that name this model (default: text is placed as by cache_aware)
    #[arg(long, num_args = 1.., value_name = "[MODEL=]PATH")]
    #[arg(env = "CORELANE_TOKENIZER", hide_env = true)]
    pub tokenizer: Vec<String>,
    /// kv_aware: chat template to be used in place of the model's own, as of vLLM's flag
    #[arg(long, value_name = "FILE")]
    #[arg(env = "CORELANE_CHAT_TEMPLATE", hide_env = true)]
    pub chat_template: Option<std::path::PathBuf>,
    /// kv_aware: how it takes a message's content, as of vLLM's flag
    #[arg(long, default_value = "auto", value_name = "FORMAT")]
    #[arg(value_parser = ["auto", "string", "openai"])]
    #[arg(env = "CORELANE_CHAT_TEMPLATE_CONTENT_FORMAT", hide_env = true)]
    pub chat_template_content_format: String,
    /// kv_aware: longest wait for a prompt's tokens; after that it is placed as by cache_aware
    #[arg(long, default_value_t = 2, value_name = "MS")]
    #[arg(value_parser = value_parser!(u32).range(1..=10_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_TOKENIZER_TIMEOUT_MS", hide_env = true)]
    pub tokenizer_timeout_ms: u32,
    /// kv_aware: threads that make tokens, beside the cores
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=256), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_TOKENIZER_THREADS", hide_env = true)]
    pub tokenizer_threads: u32,
    /// kv_aware: prompts that may wait for one of these threads
    #[arg(long, default_value_t = 256, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=65_536), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_TOKENIZER_QUEUE_SIZE", hide_env = true)]
    pub tokenizer_queue_size: u32,
    /// kv_aware: memory of a tokenizer for the tokens of messages it has seen
    #[arg(long, default_value_t = 134_217_728, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64).range(65_536..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_TOKENIZER_CACHE_BYTES", hide_env = true)]
    pub tokenizer_cache_bytes: u64,
}

/// Prefill and decode on different workers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prefill/decode disaggregation")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct PdArgs {
    /// Send each generating request to a prefill worker, then to a decode worker that fetches its KV blocks
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_VLLM_PD_DISAGGREGATION", hide_env = true)]
    pub vllm_pd_disaggregation: bool,
    /// Prefill workers, each URL followed by its Mooncake bootstrap port or none; may be repeated
    #[arg(long, num_args = 0.., value_names = ["URL [PORT|none]"])]
    #[arg(env = "CORELANE_PREFILL", hide_env = true)]
    pub prefill: Vec<String>,
    /// Decode workers; may be repeated
    #[arg(long, num_args = 0.., value_name = "URL")]
    #[arg(env = "CORELANE_DECODE", hide_env = true)]
    pub decode: Vec<String>,
    /// How a prefill worker is chosen (default: --policy)
    #[arg(long, value_name = "NAME")]
    #[arg(value_parser = policy_parser())]
    #[arg(env = "CORELANE_PREFILL_POLICY", hide_env = true)]
    pub prefill_policy: Option<PolicyKind>,
    /// How a decode worker is chosen (default: --policy)
    #[arg(long, value_name = "NAME")]
    #[arg(value_parser = policy_parser())]
    #[arg(env = "CORELANE_DECODE_POLICY", hide_env = true)]
    pub decode_policy: Option<PolicyKind>,
    /// --cache-threshold of the prefill workers
    #[arg(long, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFILL_CACHE_THRESHOLD", hide_env = true)]
    pub prefill_cache_threshold: Option<f64>,
    /// --balance-abs-threshold of the prefill workers
    #[arg(long, value_name = "REQUESTS", allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFILL_BALANCE_ABS_THRESHOLD", hide_env = true)]
    pub prefill_balance_abs_threshold: Option<u32>,
    /// --balance-rel-threshold of the prefill workers
    #[arg(long, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFILL_BALANCE_REL_THRESHOLD", hide_env = true)]
    pub prefill_balance_rel_threshold: Option<f64>,
    /// --common-prefix-threshold of the prefill workers
    #[arg(long, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFILL_COMMON_PREFIX_THRESHOLD", hide_env = true)]
    pub prefill_common_prefix_threshold: Option<f64>,
    /// --hash-balance-factor of the prefill workers
    #[arg(long, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor_or_off, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PREFILL_HASH_BALANCE_FACTOR", hide_env = true)]
    pub prefill_hash_balance_factor: Option<f64>,
    /// --cache-threshold of the decode workers
    #[arg(long, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DECODE_CACHE_THRESHOLD", hide_env = true)]
    pub decode_cache_threshold: Option<f64>,
    /// --balance-abs-threshold of the decode workers
    #[arg(long, value_name = "REQUESTS", allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DECODE_BALANCE_ABS_THRESHOLD", hide_env = true)]
    pub decode_balance_abs_threshold: Option<u32>,
    /// --balance-rel-threshold of the decode workers
    #[arg(long, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DECODE_BALANCE_REL_THRESHOLD", hide_env = true)]
    pub decode_balance_rel_threshold: Option<f64>,
    /// --common-prefix-threshold of the decode workers
    #[arg(long, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DECODE_COMMON_PREFIX_THRESHOLD", hide_env = true)]
    pub decode_common_prefix_threshold: Option<f64>,
    /// --hash-balance-factor of the decode workers
    #[arg(long, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor_or_off, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DECODE_HASH_BALANCE_FACTOR", hide_env = true)]
    pub decode_hash_balance_factor: Option<f64>,
    /// How the engines hand KV blocks over
    #[arg(long, default_value = "nixl", value_name = "NAME")]
    #[arg(value_parser = connector_parser())]
    #[arg(env = "CORELANE_KV_CONNECTOR", hide_env = true)]
    pub kv_connector: Connector,
    /// host:port on which engines register themselves by ZMQ, instead of or besides --prefill and --decode
    #[arg(long, value_name = "HOST:PORT")]
    #[arg(env = "CORELANE_VLLM_DISCOVERY_ADDRESS", hide_env = true)]
    pub vllm_discovery_address: Option<String>,
    /// When a prefill worker answers without transfer parameters: fail the request (502), or let the decode worker
    /// compute the prompt again; both are counted
    #[arg(long, default_value = "error", value_name = "WHAT")]
    #[arg(value_parser = ["error", "decode"])]
    #[arg(env = "CORELANE_PD_MISSING_TRANSFER", hide_env = true)]
    pub pd_missing_transfer: String,
    /// Transfer parameters older than this are not used for another decode worker; keep it below the engines' lease
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=3600), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PD_HANDOVER_AGE_MAX_SECS", hide_env = true)]
    pub pd_handover_age_max_secs: u64,
    /// Time for a decode worker to fetch, and so free, the blocks of a request whose client has left
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=3600), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_PD_RELEASE_TIMEOUT_SECS", hide_env = true)]
    pub pd_release_timeout_secs: u64,
    /// Skip the prefill worker when the chosen decode worker lacks fewer bytes of the prompt than this (0: never)
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    #[arg(env = "CORELANE_PD_SKIP_PREFILL_BELOW", hide_env = true)]
    pub pd_skip_prefill_below: u64,
}

/// Retries and time limits.
#[derive(Debug, Args)]
#[command(next_help_heading = "Reliability")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct ReliabilityArgs {
    /// Retries after the first attempt, each on a worker not tried yet
    #[arg(long, default_value_t = 5, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(..=100), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_MAX_RETRIES", hide_env = true)]
    pub retry_max_retries: u32,
    /// Retries as a share of the requests, so that they cannot multiply an outage; ten a second on each core are
    /// always allowed
    #[arg(long, default_value_t = 0.2, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_BUDGET_RATIO", hide_env = true)]
    pub retry_budget_ratio: f64,
    /// Accepted for compatibility, no effect: a retry goes to another worker, at once
    #[arg(long, default_value_t = 50, value_name = "MILLISECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=3_600_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_INITIAL_BACKOFF_MS", hide_env = true)]
    pub retry_initial_backoff_ms: u64,
    /// Accepted for compatibility, no effect: see --retry-initial-backoff-ms
    #[arg(long, default_value_t = 30_000, value_name = "MILLISECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=3_600_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_MAX_BACKOFF_MS", hide_env = true)]
    pub retry_max_backoff_ms: u64,
    /// Accepted for compatibility, no effect: see --retry-initial-backoff-ms
    #[arg(long, default_value_t = 1.5, value_name = "FACTOR")]
    #[arg(value_parser = parse::factor, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_BACKOFF_MULTIPLIER", hide_env = true)]
    pub retry_backoff_multiplier: f64,
    /// Accepted for compatibility, no effect: see --retry-initial-backoff-ms
    #[arg(long, default_value_t = 0.2, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RETRY_JITTER_FACTOR", hide_env = true)]
    pub retry_jitter_factor: f64,
    /// Send each request once
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_DISABLE_RETRIES", hide_env = true)]
    pub disable_retries: bool,
    /// Longest wait for the first byte of an answer, and then between two pieces of it; no stream that flows is cut
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=604_800), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_REQUEST_TIMEOUT_SECS", hide_env = true)]
    pub request_timeout_secs: u64,
    /// Longest wait for the first byte of an answer (default: --request-timeout-secs)
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=604_800), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_FIRST_BYTE_TIMEOUT_SECS", hide_env = true)]
    pub first_byte_timeout_secs: Option<u64>,
    /// Longest pause between two pieces of an answer (default: --request-timeout-secs)
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=604_800), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_STREAM_IDLE_TIMEOUT_SECS", hide_env = true)]
    pub stream_idle_timeout_secs: Option<u64>,
    /// Connecting to a worker
    #[arg(long, default_value_t = 10_000, value_name = "MILLISECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=600_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CONNECT_TIMEOUT_MS", hide_env = true)]
    pub connect_timeout_ms: u64,
    /// From the first byte of a request's head to its end
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEADER_READ_TIMEOUT_SECS", hide_env = true)]
    pub header_read_timeout_secs: u64,
    /// Between two pieces of a request's body
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_BODY_READ_TIMEOUT_SECS", hide_env = true)]
    pub body_read_timeout_secs: u64,
    /// How long a client's connection is kept without a request
    #[arg(long, default_value_t = 75, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_KEEPALIVE_TIMEOUT_SECS", hide_env = true)]
    pub keepalive_timeout_secs: u64,
    /// After SIGTERM: how long readiness says 503 while new connections are still accepted (default: 1; with
    /// --reuse-port or inherited sockets 0, as the next router accepts)
    #[arg(long, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DRAIN_GRACE_SECS", hide_env = true)]
    pub drain_grace_secs: Option<u64>,
    /// After SIGTERM: how long running requests may take to finish
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=604_800), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DRAIN_TIMEOUT_SECS", hide_env = true)]
    pub drain_timeout_secs: u64,
}

/// When a worker that fails, stalls or degrades gets no more requests, and how it returns.
#[derive(Debug, Args)]
#[command(next_help_heading = "Failing workers")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct StandingArgs {
    /// Failures that take a worker out, if they are at least half of the outcomes; 4xx, 429 and 503 do not count
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CB_FAILURE_THRESHOLD", hide_env = true)]
    pub cb_failure_threshold: u32,
    /// Good trial requests, one at a time, that bring it back; a bad one takes it out again
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CB_SUCCESS_THRESHOLD", hide_env = true)]
    pub cb_success_threshold: u32,
    /// How long it is out before it is tried again
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CB_TIMEOUT_DURATION_SECS", hide_env = true)]
    pub cb_timeout_duration_secs: u64,
    /// How long a failure counts
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CB_WINDOW_DURATION_SECS", hide_env = true)]
    pub cb_window_duration_secs: u64,
    /// Take no worker out for failing (refused connections, stalls and degradation are judged all the same)
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_DISABLE_CIRCUIT_BREAKER", hide_env = true)]
    pub disable_circuit_breaker: bool,
    /// A worker is stalled when it has work and shows no progress for this long while its peers are well. Less
    /// is enough where its pool usually answers faster, and more is given for long prompts and where requests
    /// usually are silent for longer (0: never)
    #[arg(long, default_value_t = 3000, value_name = "MILLISECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=3_600_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_STALL_WINDOW_MS", hide_env = true)]
    pub stall_window_ms: u64,
    /// ... and has at least this many requests in flight
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_STALL_MIN_REQUESTS", hide_env = true)]
    pub stall_min_requests: u32,
    /// What becomes of requests that wait for the first byte of a stalled worker
    #[arg(long, default_value = "retry", value_name = "WHAT")]
    #[arg(value_parser = ["retry", "wait"])]
    #[arg(env = "CORELANE_STALLED_REQUESTS", hide_env = true)]
    pub stalled_requests: String,
    /// A worker is degraded when its pieces per second and stream, or its answers in one piece per second and waiting
    /// request, are below this share of the median of its peers, of which there must be two, 0 to 1 (0: never; for
    /// pools whose workers send pieces of different size, or get requests of quite different length)
    #[arg(long, default_value_t = 0.2, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DEGRADED_RATIO", hide_env = true)]
    pub degraded_ratio: f64,
    /// ... for half of this time, measured over about the other half; answers in one piece for longer while they are
    /// few, at most six times this, and for an eighth when hundreds are missing
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DEGRADED_WINDOW_SECS", hide_env = true)]
    pub degraded_window_secs: u64,
    /// ... and it has at least this many streams, or waiting requests
    #[arg(long, default_value_t = 4, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=1_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DEGRADED_MIN_REQUESTS", hide_env = true)]
    pub degraded_min_requests: u32,
    /// Greatest share of the ready workers of a role that may be out for failing, stalls and degradation, 0 to 1;
    /// the last one never is
    #[arg(long, default_value_t = 0.5, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_EJECTED_SHARE_MAX", hide_env = true)]
    pub ejected_share_max: f64,
    /// A worker that returns gets a tenth of its share first, and all of it after this time (0: at once)
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_SLOW_START_SECS", hide_env = true)]
    pub slow_start_secs: u64,
}

/// Probing the workers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Health")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct HealthArgs {
    /// Failed probes in a row that take a worker out
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEALTH_FAILURE_THRESHOLD", hide_env = true)]
    pub health_failure_threshold: u32,
    /// Good probes in a row that bring it back (a worker that was never ready needs one)
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEALTH_SUCCESS_THRESHOLD", hide_env = true)]
    pub health_success_threshold: u32,
    /// Time for one probe
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=3600), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEALTH_CHECK_TIMEOUT_SECS", hide_env = true)]
    pub health_check_timeout_secs: u64,
    /// Pause between two probes of a worker
    #[arg(long, default_value_t = 10, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEALTH_CHECK_INTERVAL_SECS", hide_env = true)]
    pub health_check_interval_secs: u64,
    /// Path that is probed
    #[arg(long, default_value = "/health", value_name = "PATH")]
    #[arg(value_parser = parse::path)]
    #[arg(env = "CORELANE_HEALTH_CHECK_ENDPOINT", hide_env = true)]
    pub health_check_endpoint: String,
}

/// What one client or one stream may take.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct LimitArgs {
    /// Largest request body of the inference endpoints
    #[arg(long, default_value_t = 536_870_912, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64).range(1..=17_179_869_184), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_MAX_PAYLOAD_SIZE", hide_env = true)]
    pub max_payload_size: u64,
    /// Bodies that are read whole, as far as they are in memory, all cores together: while there are that many, bodies over
    /// 32 KiB get 503 (0: no limit)
    #[arg(long, default_value_t = 4_294_967_296, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_BODY_MEMORY_BYTES", hide_env = true)]
    pub body_memory_bytes: u64,
    /// The same for those of one core (0: no limit)
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_BODY_MEMORY_BYTES_PER_CORE", hide_env = true)]
    pub body_memory_bytes_per_core: u64,
    /// Requests that use workers at a time, all cores together, each from its whole body to the last byte of its
    /// answer; further ones wait (0 or -1: no limit)
    #[arg(long, default_value_t = 32_768, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(i64).range(-1..=u32::MAX as i64 - 1), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_MAX_CONCURRENT_REQUESTS", hide_env = true)]
    pub max_concurrent_requests: i64,
    /// Requests that may begin in a second, all cores together, after as many at once as --max-concurrent-requests says;
    /// further ones wait as those do (default: any number)
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(1..=10_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RATE_LIMIT_TOKENS_PER_SECOND", hide_env = true)]
    pub rate_limit_tokens_per_second: Option<u32>,
    /// Requests that may wait for their turn or for a worker, all cores together; further ones get 429 (0: none waits)
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(..=16_777_216), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_QUEUE_SIZE", hide_env = true)]
    pub queue_size: u32,
    /// Bytes of the requests that wait, all cores together; further ones get 429 (0: no limit)
    #[arg(long, default_value_t = 1_073_741_824, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u64), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_QUEUE_BYTES", hide_env = true)]
    pub queue_bytes: u64,
    /// How long a request may wait for its turn before it gets 503
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_QUEUE_TIMEOUT_SECS", hide_env = true)]
    pub queue_timeout_secs: u64,
    /// Requests that one worker may have at a time; when all have, further ones wait (0 or -1: no limit). A decode
    /// leg whose prompt is computed does not wait
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(i64).range(-1..=u32::MAX as i64 - 1), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_WORKER_MAX_CONCURRENT", hide_env = true)]
    pub worker_max_concurrent: i64,
    /// How long a request may wait while no worker is there (the last one is being replaced, say) before it gets 503
    #[arg(long, default_value_t = 1000, value_name = "MILLISECONDS")]
    #[arg(value_parser = value_parser!(u64).range(..=3_600_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_NO_WORKER_WAIT_MS", hide_env = true)]
    pub no_worker_wait_ms: u64,
    /// Client connections, all cores together (0: what the descriptor limit allows)
    #[arg(
        long,
        env = "CORELANE_MAX_CONNECTIONS",
        hide_env = true,
        default_value_t = 0,
        value_name = "COUNT",
        allow_negative_numbers = true
    )]
    pub max_connections: u32,
    /// Client connections of one address (IPv6: of one /64), all cores together; further ones are closed at once
    /// (0: any number)
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(..=1_000_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_MAX_CONNECTIONS_PER_ADDRESS", hide_env = true)]
    pub max_connections_per_address: u32,
    /// Largest head of a request: line and fields (of an answer: 256 KiB)
    #[arg(long, default_value_t = 65_536, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u32).range(1024..=16_777_216), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEADER_SIZE_MAX_BYTES", hide_env = true)]
    pub header_size_max_bytes: u32,
    /// Most fields in a head
    #[arg(long, default_value_t = 256, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u16).range(8..=4096), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_HEADER_COUNT_MAX", hide_env = true)]
    pub header_count_max: u16,
    /// What one stream may hold for a client that reads slowly
    #[arg(long, default_value_t = 262_144, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u32).range(16_384..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RELAY_BUFFER_BYTES", hide_env = true)]
    pub relay_buffer_bytes: u32,
    /// Largest body of a request to the admin endpoints
    #[arg(long, default_value_t = 1_048_576, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u32).range(1024..=268_435_456), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_ADMIN_BODY_MAX_BYTES", hide_env = true)]
    pub admin_body_max_bytes: u32,
}

/// Logs, metrics, request ids.
#[derive(Debug, Args)]
#[command(next_help_heading = "Observability")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct ObservabilityArgs {
    /// Least level that is logged, on standard error
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    #[arg(value_parser = PossibleValuesParser::new(["debug", "info", "warn", "warning", "error", "critical"]))]
    #[arg(env = "CORELANE_LOG_LEVEL", hide_env = true)]
    pub log_level: String,
    /// Directory into which the log is written too: a file corelane.YYYY-MM-DD.log for each day (UTC)
    #[arg(long, value_name = "DIRECTORY")]
    #[arg(env = "CORELANE_LOG_DIR", hide_env = true)]
    pub log_dir: Option<std::path::PathBuf>,
    /// How many of these files are kept; older ones are deleted (0: all)
    #[arg(long, default_value_t = 0, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(..=100_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_LOG_FILES_MAX", hide_env = true)]
    pub log_files_max: u32,
    /// Write a line for each request at its end: a JSON object, or key=value pairs. Without queries, fields and bodies
    #[arg(long, value_name = "FORMAT")]
    #[arg(value_parser = ["json", "text"])]
    #[arg(env = "CORELANE_ACCESS_LOG", hide_env = true)]
    pub access_log: Option<String>,
    /// File that they are appended to; opened anew on SIGHUP (default: standard output)
    #[arg(long, value_name = "FILE")]
    #[arg(env = "CORELANE_ACCESS_LOG_FILE", hide_env = true)]
    pub access_log_file: Option<std::path::PathBuf>,
    /// Most lines a second; further ones are dropped, and counted in a line of their own (0: any number)
    #[arg(long, default_value_t = 20_000, value_name = "COUNT")]
    #[arg(env = "CORELANE_ACCESS_LOG_LINES_PER_SEC", hide_env = true)]
    pub access_log_lines_per_sec: u64,
    /// File to which each decision and its outcome are appended, for 'corelane sim --replay'; opened anew on SIGHUP. Without
    /// prompts
    #[arg(long, value_name = "FILE")]
    #[arg(env = "CORELANE_DECISION_LOG", hide_env = true)]
    pub decision_log: Option<std::path::PathBuf>,
    /// Decisions that each core remembers for /debug/decisions (0: none)
    #[arg(long, default_value_t = 4096, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u32).range(..=1_048_576), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DEBUG_DECISIONS_COUNT", hide_env = true)]
    pub debug_decisions_count: u32,
    /// Address of the Prometheus listener
    #[arg(
        long,
        env = "CORELANE_PROMETHEUS_HOST",
        hide_env = true,
        default_value = "127.0.0.1",
        value_name = "HOST"
    )]
    pub prometheus_host: String,
    /// Port of the Prometheus listener (0: any free one)
    #[arg(
        long,
        env = "CORELANE_PROMETHEUS_PORT",
        hide_env = true,
        default_value_t = 29000,
        value_name = "PORT",
        allow_negative_numbers = true
    )]
    pub prometheus_port: u16,
    /// Header fields a client's request id is taken from, first present wins
    #[arg(long, num_args = 0.., value_name = "NAME", default_values = ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"])]
    #[arg(env = "CORELANE_REQUEST_ID_HEADERS", hide_env = true)]
    pub request_id_headers: Vec<String>,
}

/// Cores and buffers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Machine")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct MachineArgs {
    /// Pinned threads (default: one for each CPU this process may use)
    #[arg(long, value_name = "COUNT")]
    #[arg(value_parser = value_parser!(u16).range(1..=1024), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_CORES", hide_env = true)]
    pub cores: Option<u16>,
    /// Let more cores be asked for than there are CPUs: some then share one and wait for each other. For tests of a larger
    /// machine's router on a smaller one
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_CORES_SHARE_CPUS", hide_env = true)]
    pub cores_share_cpus: bool,
    /// Size of one receive buffer
    #[arg(long, default_value_t = 32_768, value_name = "BYTES")]
    #[arg(value_parser = value_parser!(u32).range(2048..=1_048_576), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RECV_BUFFER_BYTES", hide_env = true)]
    pub recv_buffer_bytes: u32,
    /// Receive buffers of a core, a power of two
    #[arg(long, default_value_t = 512, value_name = "COUNT")]
    #[arg(value_parser = parse::buffer_count, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_RECV_BUFFER_COUNT", hide_env = true)]
    pub recv_buffer_count: u16,
    /// A core on which events of streams come fast (2,000 a second and more) waits so long for more of them before it wakes, and
    /// handles them together: less CPU an event, at most so much later (0: each event wakes it; Linux 6.12)
    #[arg(long, default_value_t = 200, value_name = "MICROSECONDS")]
    #[arg(value_parser = value_parser!(u16).range(0..=10_000), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_STREAM_GATHER_US", hide_env = true)]
    pub stream_gather_us: u16,
    /// Leave a feature of io_uring unused, as an older kernel would; may be repeated
    #[arg(long, value_name = "FEATURE")]
    #[arg(value_parser = ["multishot-receive", "deferred-task-run"])]
    #[arg(
        env = "CORELANE_IO_URING_WITHOUT",
        hide_env = true,
        value_delimiter = ','
    )]
    pub io_uring_without: Vec<String>,
}

fn connector_parser() -> impl TypedValueParser<Value = Connector> {
    PossibleValuesParser::new(Connector::ALL.map(Connector::name)).map(|name| {
        Connector::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .expect("a listed name")
    })
}

fn policy_parser() -> impl TypedValueParser<Value = PolicyKind> {
    PossibleValuesParser::new(PolicyKind::ALL.map(PolicyKind::name)).map(|name| {
        PolicyKind::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .expect("a listed name")
    })
}
