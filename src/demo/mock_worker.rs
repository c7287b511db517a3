//! `corelane mock-worker`: simulated vLLM workers alone, for other people's tests.
//!
//! Runs on its own tokio threads until Ctrl-C or SIGTERM; nothing of the router is started.

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{FleetArgs, Pools, Role, SpeedArgs, start_fleet};

/// Threads of a fleet at most: it is not meant to be the bottleneck, nor to take the machine.
const THREADS_MAX: usize = 4;

/// Serves simulated vLLM workers and nothing else, for tests of what is in front of them.
#[derive(Args, Clone, Debug)]
pub struct MockWorkerArgs {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,
    /// Port of the first worker; 0 takes whatever is free
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub port: u16,
    /// Name of the model it says it serves
    #[arg(
        long,
        visible_alias = "served-model-name",
        value_name = "NAME",
        default_value = "mock"
    )]
    pub model: String,
    /// Workers, each with an engine of its own, on consecutive ports
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub workers: u16,
    /// What they are in prefill/decode disaggregation; `regular` serves whole requests and checks only what it is asked
    #[arg(long, value_enum, value_name = "ROLE", default_value_t)]
    pub role: Role,
    /// Prefill and decode workers, like 4x6, on consecutive ports, prefill first
    #[arg(long, value_name = "PxD", conflicts_with_all = ["workers", "role"])]
    pub pd: Option<Pools>,
    /// How fast the engines are.
    #[command(flatten)]
    pub speed: SpeedArgs,
}

impl MockWorkerArgs {
    fn fleet(&self) -> FleetArgs {
        FleetArgs {
            host: self.host,
            port: self.port,
            roles: match self.pd {
                Some(pools) => pools.roles(),
                None => vec![self.role; self.workers.into()],
            },
            model: self.model.clone(),
            speed: self.speed.clone(),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX)),
        }
    }

    /// Serves until Ctrl-C or SIGTERM. Prints each worker's URL on a line of its own once it listens.
    ///
    /// # Errors
    /// When a port is taken, a thread cannot be started, or signals cannot be watched.
    pub fn run(&self) -> io::Result<()> {
        let fleet = start_fleet(&self.fleet())?;
        fleet.runtime().block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            for url in fleet.urls() {
                println!("{url}");
            }
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            io::Result::Ok(())
        })?;
        fleet.stop();
        Ok(())
    }
}
