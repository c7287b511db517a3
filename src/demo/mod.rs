//! `corelane demo`: a fleet of simulated vLLM workers inside the process, a load for it, and a live view.
//!
//! No GPU and no other program. The workers (`server`, around the pure `engine`) run on a tokio runtime of their own, the
//! load (`load`) on a thread of its own, the view (`view`) on the caller's; the router between them is the real one and
//! knows nothing of this: it is reached by its address and watched through [`Probe`]. `corelane mock-worker`
//! (`mock_worker`) is the same worker alone, for other people's tests. With `--pd` the fleet is one of prefill and decode
//! workers that check what the router carries between them (`handover`).
//!
//! What can fail: a port that is taken, threads that cannot be started; both are the caller's to report.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

mod api;
mod board;
mod engine;
mod handover;
mod load;
mod mock_worker;
mod remote;
mod server;
mod show;
mod view;
mod words;

pub use handover::{HandoverCounts, Role, Violation};
pub use mock_worker::MockWorkerArgs;
pub use show::{Summary, show};

/// Ports tried after the one asked for.
const PORTS_TRIED: u16 = 100;
/// Connections that may wait to be accepted by one simulated worker.
const BACKLOG: u32 = 4096;

/// What the demo asks the router while it runs. Any thread may ask; about once a second.
pub trait Probe: Send + Sync {
    /// The fleet and the counters at the moment.
    fn view(&self) -> FleetView;
}

/// The router's own view of itself and of its fleet.
#[derive(Clone, Debug, Default)]
pub struct FleetView {
    /// One for each registered worker.
    pub workers: Vec<WorkerView>,
    /// Requests that have ended, since the start.
    pub requests_total: u64,
    /// Decisions by reason, since the start.
    pub decisions: Vec<(&'static str, u64)>,
    /// The router's own added time, median, in microseconds.
    pub added_p50_us: f64,
    /// The same, 99th percentile.
    pub added_p99_us: f64,
    /// Answers being relayed now.
    pub open_streams: u64,
}

/// One worker, as the router sees it.
#[derive(Clone, Debug, Default)]
pub struct WorkerView {
    /// As it was registered.
    pub url: String,
    /// `ready`, `unhealthy` or `draining`.
    pub state: &'static str,
    /// Requests chosen for it and not ended.
    pub in_flight: u32,
    /// Of these, the ones without a first byte yet.
    pub waiting: u32,
    /// Times it was chosen, since the start.
    pub requests: u64,
    /// Prompt bytes sent to it, since the start.
    pub prompt_bytes: u64,
    /// Of these, bytes of the prefix that the router expected it to hold.
    pub matched_bytes: u64,
}

/// How fast and how large a simulated engine is.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Simulated engine")]
pub struct SpeedArgs {
    /// Prompt tokens a second that are not cached; `instant` takes no time
    #[arg(long, value_name = "TOKENS/S", default_value = "8000", value_parser = rate)]
    pub prefill_tps: f64,
    /// Milliseconds between two tokens of an answer (one decode step, batch of none); `instant` takes no time
    #[arg(long, value_name = "MS", default_value = "12", value_parser = rate)]
    pub itl: f64,
    /// Milliseconds that each sequence in the batch adds to a decode step [default: a thirtieth of --itl]
    #[arg(long, value_name = "MS", value_parser = rate)]
    pub itl_per_seq: Option<f64>,
    /// Mean length of an answer that nothing cuts, in tokens of 4 bytes
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub output_tokens: u32,
    /// Sequences running at once; the others wait
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_seqs: u32,
    /// Prompt tokens prefilled in one step at most
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_num_batched_tokens: u32,
    /// Tokens in a cached block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub block_size: u32,
    /// Blocks of KV cache
    #[arg(long, value_name = "BLOCKS", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_gpu_blocks: u32,
    /// Longest prompt and answer together, in tokens (at most what the KV cache holds)
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: u32,
    /// P/D: tokens a second whose KV blocks a decode worker fetches, for each request; `instant` takes no time
    #[arg(long, value_name = "TOKENS/S", default_value = "200000", value_parser = rate)]
    pub transfer_tps: f64,
    /// P/D: seconds that a prefill worker keeps a prompt's KV blocks for a decode worker
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = lease)]
    pub kv_lease: f64,
}

/// Longest lease, in seconds: a day.
const LEASE_S_MAX: f64 = 86_400.0;

fn lease(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= LEASE_S_MAX => Ok(seconds),
        _ => Err(format!("more than 0 and at most {LEASE_S_MAX} seconds")),
    }
}

/// How many workers of each kind a disaggregated fleet has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Prefill workers, 1 to 64.
    pub prefill: u16,
    /// Decode workers, 1 to 64.
    pub decode: u16,
}

/// Workers of one pool at most.
const POOL_MAX: u16 = 64;

impl Pools {
    /// A role for each worker, prefill first.
    pub fn roles(self) -> Vec<Role> {
        let mut roles = vec![Role::Prefill; self.prefill.into()];
        roles.resize((self.prefill + self.decode).into(), Role::Decode);
        roles
    }
}

impl std::str::FromStr for Pools {
    type Err = String;

    /// `4x6`: four prefill workers, six decode workers.
    fn from_str(text: &str) -> Result<Pools, String> {
        let count = |digits: &str| digits.parse().ok().filter(|n| (1..=POOL_MAX).contains(n));
        let pools = text
            .split_once('x')
            .and_then(|(p, d)| Some((count(p)?, count(d)?)));
        match pools {
            Some((prefill, decode)) => Ok(Pools { prefill, decode }),
            None => Err(format!(
                "prefill x decode workers, each 1 to {POOL_MAX}, like 4x6"
            )),
        }
    }
}

/// A number that is not negative, or `instant`, which is 0.
fn rate(text: &str) -> Result<f64, String> {
    if text == "instant" {
        return Ok(0.0);
    }
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("a number that is not negative, or `instant`".into()),
    }
}

impl SpeedArgs {
    /// The defaults, but for an engine that takes no time at all: for tests of what is in front of it.
    pub fn instant() -> SpeedArgs {
        SpeedArgs {
            prefill_tps: 0.0,
            itl: 0.0,
            itl_per_seq: None,
            output_tokens: 64,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            block_size: 16,
            num_gpu_blocks: 8192,
            max_model_len: 32_768,
            transfer_tps: 0.0,
            kv_lease: 30.0,
        }
    }

    fn lease(&self) -> Duration {
        Duration::from_secs_f64(self.kv_lease)
    }

    fn engine(&self) -> engine::EngineConfig {
        let step = |ms: f64| Duration::from_secs_f64(ms.min(1e9) / 1e3);
        engine::EngineConfig {
            block_tokens: self.block_size,
            cache_blocks: self.num_gpu_blocks,
            prefill_tokens_per_s: self.prefill_tps,
            transfer_tokens_per_s: self.transfer_tps,
            chunk_tokens: self.max_num_batched_tokens,
            step_base: step(self.itl),
            step_per_sequence: step(self.itl_per_seq.unwrap_or(self.itl / 30.0)),
            running_max: self.max_num_seqs,
        }
    }
}

/// Starts simulated vLLM workers and the router in front of them, and shows them at work (no GPU needed).
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// Simulated workers
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,
    /// Prefill and decode workers instead, like 4x6 (1 to 64 of each), behind a disaggregating router
    #[arg(long, value_name = "PxD", conflicts_with = "workers")]
    pub pd: Option<Pools>,
    /// Drive a small agentic load: that many conversations at once [32 without a number]
    #[arg(long, value_name = "ROLLOUTS", num_args = 0..=1, default_missing_value = "32")]
    pub load: Option<u32>,
    /// Port of the router on 127.0.0.1; where it is taken, the next free one
    #[arg(long, value_name = "PORT", default_value_t = 30_000)]
    pub port: u16,
    /// End after that many seconds
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<u64>,
    /// One line a second instead of the full-screen view
    #[arg(long)]
    pub plain: bool,
    /// Name of the simulated model
    #[arg(long, value_name = "NAME", default_value = "demo")]
    pub model: String,
    /// How fast the engines are.
    #[command(flatten)]
    pub speed: SpeedArgs,
}

impl DemoArgs {
    /// The fleet these flags ask for.
    pub fn fleet(&self) -> FleetArgs {
        FleetArgs {
            host: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            roles: match self.pd {
                Some(pools) => pools.roles(),
                None => vec![Role::Regular; self.workers.into()],
            },
            model: self.model.clone(),
            speed: self.speed.clone(),
            threads: 1,
        }
    }

    /// The first free port of 127.0.0.1 from `--port` on (0 stays 0: the system chooses).
    ///
    /// # Errors
    /// `AddrInUse` when a hundred in a row are taken; whatever else binding a port can meet.
    pub fn free_port(&self) -> io::Result<u16> {
        if self.port == 0 {
            return Ok(0);
        }
        let last = self.port.saturating_add(PORTS_TRIED);
        for port in self.port..=last {
            // Bound without SO_REUSEPORT: a port that another router shares out is taken all the same.
            match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
                Ok(_) => return Ok(port),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
        let message = format!("ports {} to {last} are all taken", self.port);
        Err(io::Error::new(io::ErrorKind::AddrInUse, message))
    }
}

/// The router flags that name these workers: `--worker-urls URL ...`, or for a fleet of prefill and decode workers
/// `--vllm-pd-disaggregation --prefill URL ... --decode URL ...`.
pub fn router_flags(workers: &[SimAddress]) -> Vec<String> {
    let is_pd = workers.iter().any(|worker| worker.role != Role::Regular);
    if !is_pd {
        let urls = workers.iter().map(|worker| worker.url.clone());
        return std::iter::once("--worker-urls".to_owned())
            .chain(urls)
            .collect();
    }
    let named = workers
        .iter()
        .flat_map(|worker| [format!("--{}", worker.role.label()), worker.url.clone()]);
    std::iter::once("--vllm-pd-disaggregation".to_owned())
        .chain(named)
        .collect()
}

/// The whole demo: starts the fleet, has `start_router` start the router (given the workers and the port), shows it all,
/// and ends everything: the load first, then the router by the drop of its probe, then the fleet.
///
/// # Errors
/// Whatever keeps one of the three from starting, or the terminal from being written to.
pub fn run<P: Probe>(
    args: &DemoArgs,
    interrupted: &AtomicBool,
    start_router: impl FnOnce(&[SimAddress], u16) -> io::Result<(SocketAddr, P)>,
) -> io::Result<Summary> {
    let port = args.free_port()?;
    let fleet = start_fleet(&args.fleet())?;
    let (address, probe) = start_router(&fleet.addresses(), port)?;
    let summary = show(args, address, &fleet, &probe, interrupted);
    drop(probe);
    fleet.stop();
    summary
}

/// A fleet of simulated workers.
#[derive(Clone, Debug)]
pub struct FleetArgs {
    /// Where they listen.
    pub host: IpAddr,
    /// Port of the first one, the others follow; 0: each has whatever is free.
    pub port: u16,
    /// One for each worker.
    pub roles: Vec<Role>,
    /// The model they all serve.
    pub model: String,
    /// How fast and how large each is.
    pub speed: SpeedArgs,
    /// Threads of their runtime.
    pub threads: usize,
}

/// One simulated worker, as a router must know it.
#[derive(Clone, Debug, PartialEq)]
pub struct SimAddress {
    /// `http://host:port`
    pub url: String,
    /// What it does for others.
    pub role: Role,
}

/// One simulated engine's totals since the start, and its state now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SimStats {
    /// Its worker's URL.
    pub url: String,
    /// Sequences running.
    pub running: u32,
    /// Sequences waiting for a place.
    pub waiting: u32,
    /// KV blocks in use, as a fraction of all.
    pub usage: f64,
    /// Prompt tokens that came in.
    pub prompt_tokens: u64,
    /// Of these, tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Sequences that ended by themselves.
    pub finished: u64,
    /// Sequences whose client left.
    pub aborted: u64,
    /// What it does for others.
    pub role: Role,
    /// KV blocks pinned for hand-overs.
    pub pinned_blocks: u32,
    /// Its part in P/D.
    pub handovers: HandoverCounts,
}

/// A running fleet. Dropping it ends it.
#[derive(Debug)]
pub struct SimFleet {
    workers: Vec<(String, Arc<server::Worker>)>,
    /// `None` only while it is being dropped.
    runtime: Option<Runtime>,
}

impl SimFleet {
    /// `http://host:port` of each worker, in order.
    pub fn urls(&self) -> Vec<String> {
        self.workers.iter().map(|(url, _)| url.clone()).collect()
    }

    /// The same with the roles.
    pub fn addresses(&self) -> Vec<SimAddress> {
        let workers = self.workers.iter();
        workers
            .map(|(url, worker)| SimAddress {
                url: url.clone(),
                role: worker.role(),
            })
            .collect()
    }

    /// Each engine's totals, in the order of [`SimFleet::urls`].
    pub fn stats(&self) -> Vec<SimStats> {
        self.workers
            .iter()
            .map(|(url, worker)| sim_stats(url, worker))
            .collect()
    }

    /// Ends the fleet: connections are cut, and its threads are gone when this returns (or after a second).
    pub fn stop(mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("taken by stop and drop only")
    }
}

impl Drop for SimFleet {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not waited for: a drop may happen inside another runtime, where waiting is refused.
            runtime.shutdown_background();
        }
    }
}

fn sim_stats(url: &str, worker: &server::Worker) -> SimStats {
    let engine = worker.board().engine;
    SimStats {
        url: url.to_owned(),
        running: engine.running,
        waiting: engine.waiting,
        usage: engine.usage,
        prompt_tokens: engine.queried_tokens,
        cached_tokens: engine.cached_tokens,
        output_tokens: engine.output_tokens,
        finished: engine.finished,
        aborted: engine.aborted,
        role: worker.role(),
        pinned_blocks: engine.kept_blocks,
        handovers: worker.handovers(),
    }
}

/// Starts a fleet on a tokio runtime of its own threads. Every worker listens when this returns.
///
/// # Errors
/// When a port is taken, or a thread cannot be started.
pub fn start_fleet(args: &FleetArgs) -> io::Result<SimFleet> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(args.threads.max(1))
        .thread_name("corelane-sim")
        .enable_io()
        .enable_time()
        .build()?;
    let mut workers = Vec::new();
    {
        let _inside = runtime.enter();
        let book = Arc::default();
        for (nth, role) in (0..).zip(&args.roles) {
            let part = server::Part {
                role: *role,
                book: Arc::clone(&book),
                lease: args.speed.lease(),
            };
            workers.push(start_worker(args, nth, part)?);
        }
    }
    Ok(SimFleet {
        workers,
        runtime: Some(runtime),
    })
}

fn start_worker(
    args: &FleetArgs,
    nth: u16,
    part: server::Part,
) -> io::Result<(String, Arc<server::Worker>)> {
    let port = match args.port {
        0 => 0,
        first => first
            .checked_add(nth)
            .ok_or(io::ErrorKind::AddrNotAvailable)?,
    };
    let asked = SocketAddr::new(args.host, port);
    let socket = if asked.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.set_reuseaddr(true)?;
    let listener = socket
        .bind(asked)
        .and_then(|()| socket.listen(BACKLOG))
        .map_err(|error| io::Error::new(error.kind(), format!("{asked}: {error}")))?;
    let address = listener.local_addr()?;
    let config = args.speed.engine();
    let room = config.cache_blocks.saturating_mul(config.block_tokens);
    let served = api::Served {
        model: args.model.clone(),
        max_model_len: args.speed.max_model_len.min(room),
        block_tokens: config.block_tokens,
        output_tokens: args.speed.output_tokens,
    };
    let worker = server::Worker::start(listener, served, config, part)?;
    Ok((format!("http://{address}"), worker))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        demo: DemoArgs,
    }

    fn args(flags: &[&str]) -> Result<DemoArgs, clap::Error> {
        Cli::try_parse_from(["demo"].iter().chain(flags)).map(|cli| cli.demo)
    }

    #[test]
    fn flags_have_their_defaults_and_load_its_number() {
        let plain = args(&[]).unwrap();
        assert_eq!(
            (plain.workers, plain.load, plain.port, plain.seconds),
            (4, None, 30_000, None)
        );
        assert_eq!(
            plain.speed.engine(),
            engine::EngineConfig::default(),
            "the flags' defaults are the model's"
        );
        assert_eq!(args(&["--load"]).unwrap().load, Some(32));
        assert_eq!(args(&["--load", "5", "--plain"]).unwrap().load, Some(5));
        let instant = args(&[
            "--itl",
            "instant",
            "--prefill-tps",
            "instant",
            "--transfer-tps",
            "instant",
        ])
        .unwrap()
        .speed
        .engine();
        assert!(instant.step_base.is_zero() && instant.step_per_sequence.is_zero());
        assert_eq!(SpeedArgs::instant().engine(), instant);
        assert_eq!(instant.prefill_tokens_per_s, 0.0);
        for wrong in [
            ["--kv-lease", "0"],
            ["--itl", "-1"],
            ["--itl", "NaN"],
            ["--workers", "0"],
            ["--block-size", "0"],
        ] {
            assert!(args(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn pools_are_two_numbers_and_give_the_routers_flags() {
        let pd = args(&["--pd", "2x1"]).unwrap();
        assert_eq!(
            pd.fleet().roles,
            [Role::Prefill, Role::Prefill, Role::Decode]
        );
        assert_eq!(args(&["--pd", "64x64"]).unwrap().fleet().roles.len(), 128);
        for wrong in [
            "", "4", "x", "4x", "x6", "0x1", "1x0", "65x1", "1x65", "4x6x2", "4 x 6",
        ] {
            let error = args(&["--pd", wrong]).unwrap_err().to_string();
            assert!(error.contains("like 4x6"), "{wrong}: {error}");
        }
        assert!(args(&["--pd", "1x1", "--workers", "2"]).is_err());
        let flags = |roles: &[Role]| {
            let address = |(nth, role): (usize, &Role)| SimAddress {
                url: format!("http://h:{nth}"),
                role: *role,
            };
            let workers: Vec<_> = roles.iter().enumerate().map(address).collect();
            router_flags(&workers).join(" ")
        };
        assert_eq!(
            flags(&pd.fleet().roles),
            "--vllm-pd-disaggregation --prefill http://h:0 --prefill http://h:1 --decode http://h:2"
        );
        assert_eq!(
            flags(&[Role::Regular; 2]),
            "--worker-urls http://h:0 http://h:1"
        );
    }

    #[test]
    fn a_taken_port_is_passed_over() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let mut args = args(&[]).unwrap();
        args.port = port;
        assert_ne!(args.free_port().unwrap(), port);
        args.port = 0;
        assert_eq!(args.free_port().unwrap(), 0);
    }

    #[test]
    fn a_taken_port_is_named_in_the_error_of_a_fleet() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut fleet = args(&[]).unwrap().fleet();
        fleet.port = taken.local_addr().unwrap().port();
        let error = start_fleet(&fleet).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(
            error.to_string().contains(&fleet.port.to_string()),
            "{error}"
        );
    }
}
