//! The demo's main loop: samples everything, shows it, and says at the end what it amounted to.
//!
//! Runs on the caller's thread. Ends when the user quits, when the time is over, or when `interrupted` is set.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::load::{Load, LoadArgs};
use super::view::{self, Banner, Figures, Sample, Screen};
use super::{DemoArgs, HandoverCounts, Probe, Role, SimFleet, SimStats};

/// How often everything is sampled.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);
/// Samples kept: rates are over the time they span.
const SAMPLES_KEPT: usize = 7;
/// How often keys and `interrupted` are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Pause between an answer and the next turn of a rollout, in milliseconds.
const THINK_MS: (u64, u64) = (100, 700);
/// Seed of the load: every demo asks the same.
const SEED: u64 = 0xc0de_1a7e;

/// What a demo amounted to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// How long it ran, in seconds.
    pub seconds: f64,
    /// Requests that the router has ended, the user's own included.
    pub requests: u64,
    /// Turns of the load answered in full; 0 without one.
    pub turns: u64,
    /// Turns of the load that failed.
    pub errors: u64,
    /// What the last of these was.
    pub last_error: Option<String>,
    /// Fraction of all prompt tokens that the engines found in their caches.
    pub hit_rate: f64,
    /// Tokens the engines generated.
    pub output_tokens: u64,
    /// Time to the first token as the load saw it, median, in milliseconds; 0 without a load.
    pub ttft_p50_ms: f64,
    /// The same, 99th percentile.
    pub ttft_p99_ms: f64,
    /// The router's own added time, median, in microseconds.
    pub added_p50_us: f64,
    /// The same, 99th percentile.
    pub added_p99_us: f64,
    /// Decisions by reason; only reasons that have occurred.
    pub decisions: Vec<(&'static str, u64)>,
    /// Of a fleet of prefill and decode workers: what became of its hand-overs.
    pub handovers: Option<HandoverCounts>,
    /// Each simulated worker's totals.
    pub workers: Vec<SimStats>,
}

impl Summary {
    /// No turn failed, and no worker saw a breach of the P/D protocol.
    pub fn is_good(&self) -> bool {
        let violations = self.handovers.map_or(0, |sum| sum.violations_total());
        self.errors + violations == 0
    }

    fn write_handovers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(sum) = &self.handovers else {
            return Ok(());
        };
        writeln!(f, "  hand-overs     {}", view::handovers_text(sum))?;
        for worker in &self.workers {
            let address = worker.url.strip_prefix("http://").unwrap_or(&worker.url);
            let (role, counts) = (worker.role.label(), &worker.handovers);
            write!(f, "  {role:14} {address:21} ")?;
            match worker.role {
                Role::Decode => write!(f, "{} claimed", counts.claimed)?,
                _ => write!(
                    f,
                    "{} issued, {} fetched, {} expired",
                    counts.issued, counts.fetched, counts.expired
                )?,
            }
            writeln!(f, ", {} violations", counts.violations_total())?;
        }
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "corelane demo: {:.1} s, {} requests, {} errors",
            self.seconds, self.requests, self.errors
        )?;
        if let Some(error) = &self.last_error {
            writeln!(f, "  last error     {error}")?;
        }
        if self.turns > 0 {
            let per_s = self.turns as f64 / self.seconds.max(1e-3);
            writeln!(
                f,
                "  load           {} turns, {per_s:.1} a second",
                self.turns
            )?;
            writeln!(
                f,
                "  TTFT           p50 {:.0} ms, p99 {:.0} ms",
                self.ttft_p50_ms, self.ttft_p99_ms
            )?;
        }
        let percent = self.hit_rate * 100.0;
        writeln!(
            f,
            "  hit rate       {percent:.1} % of prompt tokens were in the caches of the workers chosen"
        )?;
        writeln!(f, "  generated      {} tokens", self.output_tokens)?;
        writeln!(
            f,
            "  added latency  p50 {:.0} us, p99 {:.0} us",
            self.added_p50_us, self.added_p99_us
        )?;
        let decisions: Vec<String> = self
            .decisions
            .iter()
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        let decisions = if decisions.is_empty() {
            "none".to_owned()
        } else {
            decisions.join(", ")
        };
        writeln!(f, "  decisions      {decisions}")?;
        self.write_handovers(f)
    }
}

/// Shows the demo until the user quits, the time is over or `interrupted` is set; prints and returns the summary.
///
/// `fleet` and the router must be up. The load, if asked for, starts and ends in here; the fleet is the caller's to stop.
///
/// # Errors
/// When the load's thread cannot be started, or the terminal cannot be written to.
pub fn show(
    args: &DemoArgs,
    router_address: SocketAddr,
    fleet: &SimFleet,
    probe: &dyn Probe,
    interrupted: &AtomicBool,
) -> io::Result<Summary> {
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    let is_full_screen = is_terminal && !args.plain;
    watch(
        args,
        router_address,
        fleet,
        probe,
        interrupted,
        is_full_screen,
        &mut io::stdout(),
    )
}

/// [`show`], with the place it writes to.
fn watch(
    args: &DemoArgs,
    router_address: SocketAddr,
    fleet: &SimFleet,
    probe: &dyn Probe,
    interrupted: &AtomicBool,
    is_full_screen: bool,
    out: &mut dyn Write,
) -> io::Result<Summary> {
    let load = match args.load {
        Some(rollouts) if rollouts > 0 => Some(Load::start(LoadArgs {
            router: router_address,
            model: args.model.clone(),
            rollouts,
            seed: SEED,
            think_ms: THINK_MS,
        })?),
        _ => None,
    };
    let banner = Banner {
        router: router_address,
        model: args.model.clone(),
    };
    let mut watch = Watch {
        begun: Instant::now(),
        limit: args.seconds.map(Duration::from_secs),
        interrupted,
        fleet,
        probe,
        load: load.as_ref(),
        samples: VecDeque::new(),
    };
    watch.sample();
    let shown = if is_full_screen {
        watch.full_screen(&banner)
    } else {
        watch.plain(&banner, out)
    };
    let summary = watch.summary();
    drop(load);
    shown?;
    say(out, &summary.to_string())?;
    Ok(summary)
}

/// Writes at once. A reader that has gone (`| head`) ends nothing: it is not interested any more.
fn say(out: &mut dyn Write, text: &str) -> io::Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

struct Watch<'a> {
    begun: Instant,
    limit: Option<Duration>,
    interrupted: &'a AtomicBool,
    fleet: &'a SimFleet,
    probe: &'a dyn Probe,
    load: Option<&'a Load>,
    /// Oldest first; never empty after the first sample.
    samples: VecDeque<Sample>,
}

impl Watch<'_> {
    fn is_over(&self) -> bool {
        // ORDERING: Relaxed; the flag is all there is to see, it publishes nothing.
        self.interrupted.load(Ordering::Relaxed)
            || self
                .limit
                .is_some_and(|limit| self.begun.elapsed() >= limit)
    }

    fn take(&self) -> Sample {
        Sample {
            at: Instant::now(),
            fleet: self.probe.view(),
            engines: self.fleet.stats(),
            load: self.load.map(Load::totals),
        }
    }

    fn sample(&mut self) {
        self.samples.push_back(self.take());
        if self.samples.len() > SAMPLES_KEPT {
            self.samples.pop_front();
        }
    }

    fn figures(&self) -> Figures {
        match (self.samples.front(), self.samples.back()) {
            (Some(first), Some(last)) => Figures::between(first, last),
            _ => Figures::default(),
        }
    }

    /// One line a second.
    fn plain(&mut self, banner: &Banner, out: &mut dyn Write) -> io::Result<()> {
        say(
            out,
            &format!(
                "corelane demo: http://{}\ntry: {}\n",
                banner.router,
                banner.curl()
            ),
        )?;
        let mut said = 0;
        let mut sampled = self.begun;
        while !self.is_over() {
            std::thread::sleep(self.pause());
            if sampled.elapsed() >= SAMPLE_EVERY {
                sampled = Instant::now();
                self.sample();
            }
            let elapsed = self.begun.elapsed();
            if elapsed.as_secs() > said {
                said = elapsed.as_secs();
                say(out, &(view::plain_line(elapsed, &self.figures()) + "\n"))?;
            }
        }
        Ok(())
    }

    fn full_screen(&mut self, banner: &Banner) -> io::Result<()> {
        let mut screen = Screen::open()?;
        let mut sampled = self.begun;
        screen.draw(banner, Duration::ZERO, &self.figures())?;
        while !self.is_over() {
            if screen.is_quit_pressed(self.pause())? {
                break;
            }
            if sampled.elapsed() >= SAMPLE_EVERY {
                sampled = Instant::now();
                self.sample();
            }
            screen.draw(banner, self.begun.elapsed(), &self.figures())?;
        }
        Ok(())
    }

    /// Until the next look around, and never beyond the end.
    fn pause(&self) -> Duration {
        let left = self.limit.map_or(LOOK_EVERY, |limit| {
            limit.saturating_sub(self.begun.elapsed())
        });
        left.min(LOOK_EVERY)
    }

    fn summary(&self) -> Summary {
        let now = self.take();
        let sum = |of: fn(&super::SimStats) -> u64| now.engines.iter().map(of).sum::<u64>();
        let load = now.load.unwrap_or_default();
        let (cached, prompts) = view::prompt_tokens(&now.engines);
        Summary {
            seconds: self.begun.elapsed().as_secs_f64(),
            requests: now.fleet.requests_total,
            turns: load.turns,
            errors: load.errors,
            last_error: load.last_error,
            hit_rate: view::fraction(cached, prompts),
            output_tokens: sum(|e| e.output_tokens),
            ttft_p50_ms: load.first_token.quantile_ms(0.5),
            ttft_p99_ms: load.first_token.quantile_ms(0.99),
            added_p50_us: now.fleet.added_p50_us,
            added_p99_us: now.fleet.added_p99_us,
            decisions: now
                .fleet
                .decisions
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .collect(),
            handovers: view::handovers(&now.engines),
            workers: now.engines,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use clap::Parser;

    use super::super::{FleetView, SimAddress, WorkerView, run, start_fleet};
    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        demo: DemoArgs,
    }

    fn args(flags: &[&str]) -> DemoArgs {
        let instant = ["demo", "--prefill-tps", "instant", "--itl", "instant"];
        let one: &[&str] = if flags.contains(&"--pd") {
            &[]
        } else {
            &["--workers", "1"]
        };
        Cli::try_parse_from(instant.iter().chain(one).chain(flags))
            .unwrap()
            .demo
    }

    /// A router that is only looked at; sets `interrupted` when it has been looked at `left` times.
    struct Fake<'a> {
        left: AtomicU64,
        interrupted: &'a AtomicBool,
    }

    impl Probe for Fake<'_> {
        fn view(&self) -> FleetView {
            if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
                self.interrupted.store(true, Ordering::Relaxed);
            }
            FleetView {
                workers: vec![WorkerView {
                    url: "http://w".into(),
                    state: "ready",
                    ..WorkerView::default()
                }],
                requests_total: 7,
                decisions: vec![("affinity", 5), ("never", 0)],
                ..FleetView::default()
            }
        }
    }

    /// The load talks to the one worker directly, as it would to a router.
    fn demo(args: &DemoArgs, looks: u64) -> (Summary, String) {
        let fleet = start_fleet(&args.fleet()).unwrap();
        let address = fleet.urls()[0]
            .strip_prefix("http://")
            .unwrap()
            .parse()
            .unwrap();
        let interrupted = AtomicBool::new(false);
        let probe = Fake {
            left: looks.into(),
            interrupted: &interrupted,
        };
        let mut out = Vec::new();
        let summary = watch(args, address, &fleet, &probe, &interrupted, false, &mut out).unwrap();
        (summary, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_demo_with_load_answers_turns_without_errors_and_says_so() {
        let (summary, text) = demo(&args(&["--load", "8", "--output-tokens", "8"]), 5);
        assert_eq!(
            (summary.errors, summary.requests),
            (0, 7),
            "{:?}",
            summary.last_error
        );
        assert!(summary.turns > 0 && summary.output_tokens > 0 && summary.ttft_p99_ms > 0.0);
        // All share the system prompt, and every turn repeats the last one.
        assert!(summary.hit_rate > 0.5, "{}", summary.hit_rate);
        assert_eq!(summary.decisions, [("affinity", 5)]);
        for part in ["try: curl", "1/1 ready", "0 errors", "turns", "affinity 5"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn the_time_limit_ends_it_and_without_load_there_are_no_turns() {
        let (summary, _) = demo(&args(&["--seconds", "0"]), 1000);
        assert_eq!(
            (summary.turns, summary.errors, summary.hit_rate),
            (0, 0, 0.0)
        );
    }

    /// The load goes to a prefill worker as no router would send it: every turn is a breach, and the demo says so.
    #[test]
    fn a_demo_whose_router_breaks_the_protocol_says_so_and_is_not_good() {
        let (summary, text) = demo(&args(&["--pd", "1x1", "--load", "4"]), 4);
        let sum = summary.handovers.unwrap();
        assert_eq!((summary.errors, summary.is_good()), (0, false));
        assert!(sum.violations_total() >= 3 * summary.turns && summary.turns > 0);
        for part in [
            "hand-overs ",
            "\n  prefill ",
            "\n  decode ",
            "prefill_params ",
            " 0 claimed",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn run_ends_with_the_error_of_a_router_that_does_not_start() {
        let interrupted = AtomicBool::new(false);
        let refused = |_: &[SimAddress], _: u16| -> io::Result<(SocketAddr, Fake<'_>)> {
            Err(io::Error::other("no io_uring"))
        };
        let error = run(&args(&["--port", "0"]), &interrupted, refused).unwrap_err();
        assert_eq!(error.to_string(), "no io_uring");
    }
}
