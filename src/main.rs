//! The binary: flags, configuration, start, wait for a signal, reload or drain, exit code.
#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use corelane::config::{Cli, Command, Config, EXIT_USAGE, Loaded, LogLevel, Source};
use corelane::demo::{DemoArgs, FleetView, Probe, WorkerView, router_flags};
use corelane::ring::Inherited;
use corelane::route::Reason;
use corelane::{Router, doctor, notify, start, start_on};
use shards::HistogramSnapshot;

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    corelane::ring::raise_descriptor_limit();
    match cli.command.take() {
        None => serve(),
        Some(Command::Doctor) => doctor::run(),
        Some(Command::MockWorker(args)) => report(args.run()),
        Some(Command::Demo(args)) => demo(&args),
        Some(Command::Sim(args)) => report(args.run()),
    }
}

fn report(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("corelane: {e}");
            ExitCode::FAILURE
        }
    }
}

fn serve() -> ExitCode {
    // Before anything else is opened.
    let inherited = match corelane::ring::inherited() {
        Ok(inherited) => inherited,
        Err(e) => return report(Err(e)),
    };
    let source = match Source::new(std::env::args_os()) {
        Ok(source) => source,
        Err(e) => e.exit(),
    };
    let loaded = match source.load() {
        Ok(loaded) => loaded,
        Err(e) => {
            eprintln!("error: {e}\n\nFor more information, try '--help'.");
            return ExitCode::from(EXIT_USAGE as u8);
        }
    };
    let set_level = log(loaded.config.log_level);
    report(run(source, loaded, inherited, set_level))
}

fn run(
    source: Source,
    loaded: Loaded,
    inherited: Vec<Inherited>,
    set_log_level: impl Fn(LogLevel) + Send + Sync + 'static,
) -> io::Result<()> {
    let router = start_on(loaded.config, inherited).map_err(io::Error::other)?;
    router
        .control()
        .reload_from(source, loaded.keys, set_log_level);
    router.control().handle_signals()?;
    tracing::info!(
        address = %router.address,
        metrics = %router.metrics_address,
        admin = router.admin_address.map(tracing::field::display),
        cores = router.shared.cores.len(),
        policy = router.shared.config().settings.policy.name(),
        "listening"
    );
    notify::send(notify::READY);
    router.join().map_err(io::Error::other)
}

/// Logs from now on. What is given back sets another level.
fn log(level: LogLevel) -> impl Fn(LogLevel) + Send + Sync + 'static {
    use std::io::IsTerminal;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(level.name())
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false)
        .with_filter_reloading();
    let filter = builder.reload_handle();
    builder.init();
    // It fails only when there is no log any more.
    move |level| drop(filter.reload(level.name()))
}

// ---- the demo ----

fn demo(args: &DemoArgs) -> ExitCode {
    let interrupted = Arc::new(AtomicBool::new(false));
    if let Err(e) = watch_signals(interrupted.clone()) {
        return report(Err(e));
    }
    let summary = corelane::demo::run(args, &interrupted, |workers, port| {
        let port = port.to_string();
        let mut line = vec!["corelane", "--port", &port, "--prometheus-port", "0"];
        let named = router_flags(workers);
        line.extend(named.iter().map(String::as_str));
        let cli = Cli::try_parse_from(line).map_err(io::Error::other)?;
        let router =
            start(Config::from_cli(cli).map_err(io::Error::other)?).map_err(io::Error::other)?;
        if !router
            .control()
            .wait_ready(workers.len(), std::time::Duration::from_secs(10))
        {
            return Err(io::Error::other(
                "the simulated workers did not become ready",
            ));
        }
        Ok((router.address, Live(router)))
    });
    match summary {
        Ok(summary) if summary.is_good() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(e) => report(Err(e)),
    }
}

/// Ctrl-C and SIGTERM set the flag; the demo's loop ends itself.
fn watch_signals(interrupted: Arc<AtomicBool>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("signals".to_string())
        .spawn(move || {
            runtime.block_on(async {
                use tokio::signal::unix::{SignalKind, signal};
                let Ok(mut terminate) = signal(SignalKind::terminate()) else {
                    return;
                };
                tokio::select! {
                    _ = tokio::signal::ctrl_c() => {}
                    _ = terminate.recv() => {}
                }
                // ORDERING: Relaxed; the flag carries nothing but itself.
                interrupted.store(true, Ordering::Relaxed);
            });
        })?;
    Ok(())
}

/// The running router as the demo's view sees it.
struct Live(Router);

impl Probe for Live {
    fn view(&self) -> FleetView {
        let cores = &self.0.shared.cores;
        let added = sum(cores.iter().map(|core| core.stats.added.snapshot()));
        let decisions = Reason::ALL.iter().map(|reason| {
            let count = cores
                .iter()
                .map(|core| core.stats.decisions[*reason as usize].value())
                .sum();
            (reason.label(), count)
        });
        let ended = cores
            .iter()
            .flat_map(|core| core.stats.exchanges.iter().flatten());
        let workers: Vec<WorkerView> = self.0.control().workers().into_iter().map(worker).collect();
        FleetView {
            requests_total: ended.map(|counter| counter.value()).sum(),
            decisions: decisions.filter(|(_, count)| *count > 0).collect(),
            added_p50_us: quantile_us(&added, 0.5),
            added_p99_us: quantile_us(&added, 0.99),
            open_streams: workers
                .iter()
                .map(|w| u64::from(w.in_flight - w.waiting.min(w.in_flight)))
                .sum(),
            workers,
        }
    }
}

fn worker(view: corelane::control::WorkerView) -> WorkerView {
    WorkerView {
        url: view.url.to_string(),
        state: view.state,
        in_flight: view.in_flight,
        waiting: view.waiting,
        requests: view.chosen,
        prompt_bytes: view.prompt_bytes,
        matched_bytes: view.matched_bytes,
    }
}

fn sum(snapshots: impl Iterator<Item = HistogramSnapshot>) -> HistogramSnapshot {
    snapshots
        .reduce(|mut all, one| {
            for (sum, count) in all.counts.iter_mut().zip(&one.counts) {
                *sum += count;
            }
            all.count += one.count;
            all.sum_ns += one.sum_ns;
            all
        })
        .expect("there is at least one core")
}

/// A quantile in microseconds, within a bucket by straight line.
fn quantile_us(histogram: &HistogramSnapshot, q: f64) -> f64 {
    let mut left = q * histogram.count as f64;
    let mut low = 0;
    for (count, bound) in histogram.counts.iter().zip(histogram.bounds) {
        let count = *count as f64;
        if count > 0.0 && left <= count {
            return (low as f64 + (bound - low) as f64 * left / count) / 1e3;
        }
        left -= count;
        low = *bound;
    }
    low as f64 / 1e3
}
