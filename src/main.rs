//! The binary: flags, configuration, start, wait for a signal, reload or drain, exit code.
#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use corelane::bench::BenchArgs;
use corelane::config::{
    Cli, Command, Config, EXIT_USAGE, LineArgs, Loaded, LogLevel, Source, file_of_line, in_force,
};
use corelane::demo::{DemoArgs, FleetView, Probe, WorkerView, router_flags};
use corelane::ring::Inherited;
use corelane::route::Reason;
use corelane::{Router, doctor, manual, notify, start, start_on};
use shards::HistogramSnapshot;
use tracing_appender::non_blocking::{NonBlocking, WorkerGuard};
use tracing_appender::rolling::{RollingFileAppender, Rotation};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, reload};

fn main() -> ExitCode {
    let mut cli = Cli::parse();
    corelane::ring::raise_descriptor_limit();
    match cli.command.take() {
        None => serve(),
        Some(Command::Doctor) => doctor::run(),
        Some(Command::Man) => report(manual::write_man(&mut io::stdout().lock())),
        Some(Command::Completions { shell }) => {
            manual::write_completions(shell, &mut io::stdout().lock());
            ExitCode::SUCCESS
        }
        Some(Command::CheckConfig(args)) => check_config(&args),
        Some(Command::ConfigFromArgs(args)) => config_from_args(&args),
        Some(Command::MockWorker(args)) => report(args.run()),
        Some(Command::Demo(args)) => demo(&args),
        Some(Command::Sim(args)) => report(args.run()),
        Some(Command::Bench(args)) => bench(&args),
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

/// Wrong answers are a failure, too.
fn bench(args: &BenchArgs) -> ExitCode {
    match args.run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => report(Err(e)),
    }
}

fn serve() -> ExitCode {
    if let Err(e) = corelane::ring::end_with_parent() {
        return report(Err(e));
    }
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
    let (set_level, _file) = match log(&loaded.config) {
        Ok(log) => log,
        Err(e) => return report(Err(e)),
    };
    for notice in &loaded.notices {
        tracing::warn!(flag = notice.flag, "{}", notice.text);
    }
    report(run(source, loaded, inherited, set_level))
}

/// What would be in force, or why that cannot be.
fn check_config(args: &LineArgs) -> ExitCode {
    let refuse = |reason: &str| {
        eprintln!("error: {reason}");
        ExitCode::FAILURE
    };
    let source = match Source::new(args.as_typed()) {
        Ok(source) => source,
        Err(e) if !e.use_stderr() => e.exit(),
        Err(e) => return refuse(e.to_string().trim_start_matches("error: ").trim_end()),
    };
    let loaded = match source.load() {
        Ok(loaded) => loaded,
        Err(e) => return refuse(&e.to_string()),
    };
    print!("{}", in_force(&loaded.settings, &loaded.config));
    for notice in &loaded.notices {
        eprintln!("warning: {notice}");
    }
    ExitCode::SUCCESS
}

fn config_from_args(args: &LineArgs) -> ExitCode {
    match file_of_line(args.as_typed()) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(e) => e.exit(),
    }
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
    let [address, metrics] = [router.address, router.metrics_address];
    notify::send(&notify::ready(address, metrics, router.admin_address));
    router.join().map_err(io::Error::other)
}

/// Logs from now on, on standard error and into `--log-dir`. What is given back sets another level; and what is written last is
/// in the file when the other is dropped.
fn log(
    config: &Config,
) -> io::Result<(
    impl Fn(LogLevel) + Send + Sync + 'static,
    Option<WorkerGuard>,
)> {
    use std::io::IsTerminal;
    let (filter, handle) = reload::Layer::new(EnvFilter::new(filter_of(config.log_level)));
    let (file, guard) = log_file(config)?.unzip();
    tracing_subscriber::registry()
        .with(filter)
        .with(file.map(|file| lines().with_ansi(false).with_writer(file)))
        .with(
            lines()
                .with_ansi(io::stderr().is_terminal())
                .with_writer(io::stderr),
        )
        .init();
    // It fails only when there is no log any more.
    let set_level = move |level: LogLevel| drop(handle.reload(EnvFilter::new(filter_of(level))));
    Ok((set_level, guard))
}

fn lines<S>() -> tracing_subscriber::fmt::Layer<S> {
    let lines = tracing_subscriber::fmt::layer().with_target(false);
    // Who reads it may have gone (a pipe): a line is lost then, no thread.
    lines.log_internal_errors(false)
}

/// A file for each day; a thread writes it, so that a slow disk holds up nobody.
fn log_file(config: &Config) -> io::Result<Option<(NonBlocking, WorkerGuard)>> {
    let Some(directory) = &config.log_dir else {
        return Ok(None);
    };
    let mut builder = RollingFileAppender::builder()
        .rotation(Rotation::DAILY)
        .filename_prefix("corelane")
        .filename_suffix("log");
    if config.log_files_max > 0 {
        builder = builder.max_log_files(config.log_files_max);
    }
    let file = builder.build(directory);
    let file =
        file.map_err(|e| io::Error::other(format!("--log-dir {}: {e}", directory.display())))?;
    Ok(Some(tracing_appender::non_blocking(file)))
}

/// What is logged. Libraries that look for workers say each failure of theirs, which discovery says once.
fn filter_of(level: LogLevel) -> String {
    const QUIET: [&str; 4] = [
        "kube_client",
        "hickory_net",
        "hickory_proto",
        "hickory_resolver",
    ];
    let quiet = QUIET.map(|name| format!("{name}=off"));
    format!("{},{}", level.name(), quiet.join(","))
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
            let count = cores.iter().map(|core| core.stats.decided(*reason)).sum();
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
