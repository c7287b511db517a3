//! The flags of `corelane bench`, and the run they ask for.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, value_parser};

use super::compare::{order, ratios};
use super::crew::Crew;
use super::generator::{Length, Pace, Plan, Slice};
use super::machine::{Process, commit, machine};
use super::page;
use super::report::{Part, Report};
use super::tally::Tally;
use super::target::Target;
use super::work::{Api, Kind, Shape};
use crate::sim::above_zero;
use crate::sim::trace::{self, Format};

/// Slices of a comparison begin with so much of their length that is not counted.
const SLICE_WARM_UP_SHARE: f64 = 0.2;

/// Puts load on a router or a worker, checks every answer, and says how long they took.
///
/// Times count from when a request was due, so what a slow target holds up is in them. The exit code is 1 when an answer was wrong.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Router or worker, like http://127.0.0.1:30000
    #[arg(
        value_name = "URL",
        required_unless_present = "compare",
        conflicts_with = "compare"
    )]
    url: Option<String>,
    /// Compare two, in short alternating slices: B to A
    #[arg(long, num_args = 2, value_names = ["URL_A", "URL_B"])]
    compare: Vec<String>,
    /// The worker behind URL: the same load goes there in alternating slices, and what URL adds is told
    #[arg(long, value_name = "URL", conflicts_with = "compare")]
    direct: Option<String>,

    /// Closed loop: requests at a time, each on a connection of its own
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = value_parser!(u32).range(1..=1_000_000), conflicts_with_all = ["rate", "trace"])]
    concurrency: u32,
    /// Open loop: requests a second, whatever becomes of the answers
    #[arg(long, value_name = "PER_S", value_parser = above_zero, conflicts_with = "trace")]
    rate: Option<f64>,
    /// With --rate: exponential gaps instead of even ones
    #[arg(long, requires = "rate")]
    poisson: bool,
    /// Connections in an open loop at most; requests that are due wait for one
    #[arg(long, value_name = "COUNT", default_value_t = 8192, value_parser = value_parser!(u32).range(1..=1_000_000))]
    connections_max: u32,

    /// Ask for streams of events
    #[arg(long)]
    stream: bool,
    /// Endpoint
    #[arg(long, value_enum, default_value_t)]
    api: Api,
    /// Model asked for
    #[arg(long, value_name = "NAME", default_value = "mock")]
    model: String,
    /// Bytes of a prompt, or of what each turn adds to it
    #[arg(long, value_name = "BYTES", default_value_t = 200, value_parser = value_parser!(u32).range(16..=1 << 28))]
    prompt_bytes: u32,
    /// Bytes of a system prompt that all requests share
    #[arg(long, value_name = "BYTES", default_value_t = 0, value_parser = value_parser!(u32).range(..=1 << 28))]
    system_bytes: u32,
    /// Tokens of each answer
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = value_parser!(u32).range(1..))]
    output_tokens: u32,
    /// Conversations of so many turns, each of which repeats what was said before (by us; answers are made up)
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u32).range(1..), conflicts_with = "trace")]
    turns: Option<u32>,
    /// With --turns: conversations at a time [default: --concurrency]
    #[arg(long, value_name = "COUNT", requires = "turns", value_parser = value_parser!(u32).range(1..))]
    conversations: Option<u32>,
    /// Replay a trace at its times; a token is four bytes of text
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Format of the trace
    #[arg(long, value_enum, default_value = "mooncake", requires = "trace")]
    format: Format,
    /// How many times as fast as it was recorded
    #[arg(long, visible_alias = "speed-up", value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero)]
    speedup: f64,
    /// A further field of each request, as "name: value"
    #[arg(long, value_name = "FIELD", value_parser = field)]
    header: Vec<String>,
    /// An event may hold several tokens: only that there is one is checked
    #[arg(long)]
    coalesced_events: bool,

    /// Length of the measurement, of two targets together
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = above_zero, conflicts_with = "requests")]
    seconds: f64,
    /// Instead: so many requests
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(u64).range(1..), conflicts_with_all = ["compare", "direct", "trace"])]
    requests: Option<u64>,
    /// Before it, not counted
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = zero_or_above)]
    warm_up_secs: f64,
    /// A request without its end after so long is wrong
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = above_zero)]
    timeout_secs: f64,
    /// How long answers are waited for at the end; what still runs then is cut and counted [default: --timeout-secs]
    #[arg(long, value_name = "SECONDS", value_parser = zero_or_above)]
    drain_secs: Option<f64>,
    /// Of two targets: length of a slice; longer than an answer takes
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = value_parser!(u64).range(10..))]
    slice_ms: u64,

    /// Threads, each with a core of its own
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Their CPUs [default: the last ones]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',')]
    cpus: Vec<usize>,
    /// Process whose CPU time and memory are told; with two targets A's (--direct's), then B's; 0 is none
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Fail when the second target's CPU time an answer is more than so many times the first one's, and not by chance: the interval
    /// has no 1 in it
    #[arg(long, value_name = "RATIO", value_parser = above_zero, requires = "pid")]
    cpu_ratio_max: Option<f64>,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Write a page of plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Of texts, and of what is left to chance
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

fn zero_or_above(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value >= 0.0 && value.is_finite() => Ok(value),
        _ => Err("0, or a number above it".to_owned()),
    }
}

fn field(text: &str) -> Result<String, String> {
    let is_one = text.split_once(':').is_some_and(|(name, _)| {
        let is_token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        !name.is_empty() && name.bytes().all(is_token)
    });
    match is_one && !text.bytes().any(|b| b < b' ' || b == 127) {
        true => Ok(format!("{text}\r\n")),
        false => Err("a field is \"name: value\"".to_owned()),
    }
}

fn ns(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(u64::MAX / 4, |time| time.as_nanos() as u64)
}

impl BenchArgs {
    /// Runs it; prints on standard output. `false`: an answer was wrong, or there was none, or `--cpu-ratio-max` is exceeded.
    ///
    /// # Errors
    /// A URL, a trace or a file is not what it has to be, or the ring cannot be made.
    pub fn run(&self) -> io::Result<bool> {
        let plan = self.plan().map_err(io::Error::other)?;
        let crew = Crew::start(&plan, &self.cpus()?)?;
        let (tallies, pairs) = match plan.targets.len() {
            1 => (vec![crew.run(self.slice())?], Vec::new()),
            _ => self.alternate(&crew)?,
        };
        let names = match (self.direct.is_some(), tallies.len()) {
            (true, _) => ["direct", "routed"],
            (_, 1) => ["target", ""],
            _ => ["A", "B"],
        };
        let parts = tallies.into_iter().zip(&plan.targets).zip(names);
        let report = Report {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            machine: machine(),
            commit: commit(),
            parts: parts
                .map(|((tally, target), name)| Part {
                    name,
                    url: target.url.clone(),
                    tally,
                })
                .collect(),
            ratios: ratios(&pairs, self.seed),
        };
        match self.json {
            true => println!("{:#}", report.json()),
            false => print!("{}", report.text()),
        }
        if let Some(path) = &self.html {
            let named = |e| io::Error::other(format!("{}: {e}", path.display()));
            fs::write(path, page::html(&report)).map_err(named)?;
        }
        Ok(report.is_good() && self.is_within(&report))
    }

    /// Whether the second target costs no more CPU than it may. What was not measured is not within.
    fn is_within(&self, report: &Report) -> bool {
        let Some(max) = self.cpu_ratio_max else {
            return true;
        };
        let measured = report
            .ratios
            .iter()
            .find(|(name, _)| *name == "cpu_us_per_answer");
        let is_within = measured.is_some_and(|(_, ratio)| !ratio.exceeds(max));
        if !is_within {
            let median = measured.map(|(_, ratio)| ratio.median);
            eprintln!(
                "corelane: CPU time an answer is {median:.3?} times the first one's, more than {max}"
            );
        }
        is_within
    }

    fn plan(&self) -> Result<Plan, String> {
        let urls: Vec<&String> = match &self.url {
            Some(url) => self.direct.iter().chain([url]).collect(),
            None => self.compare.iter().collect(),
        };
        let kind = match (&self.trace, self.turns) {
            (Some(path), _) => Kind::Trace(Arc::new(
                trace::read(path, self.format)?.sped_up(self.speedup),
            )),
            (None, Some(turns)) => Kind::Conversations {
                turns,
                count: self.conversations.unwrap_or(self.concurrency) as usize,
            },
            (None, None) => Kind::Single,
        };
        Ok(Plan {
            targets: urls
                .into_iter()
                .map(|url| Target::parse(url))
                .collect::<Result<_, _>>()?,
            shape: Arc::new(Shape {
                api: self.api,
                model: self.model.clone(),
                is_stream: self.stream,
                prompt_bytes: self.prompt_bytes as usize,
                system_bytes: self.system_bytes as usize,
                output_tokens: self.output_tokens,
                coalesces_events: self.coalesced_events,
                fields: self.header.concat(),
                seed: self.seed,
            }),
            pace: match (&kind, self.rate) {
                (Kind::Trace(_), _) => Pace::Trace,
                (_, Some(rate_per_s)) => Pace::Open {
                    rate_per_s,
                    is_poisson: self.poisson,
                },
                (_, None) => Pace::Closed(self.concurrency as usize),
            },
            kind,
            connections_max: self.connections_max as usize,
            timeout_ns: ns(self.timeout_secs),
            processes: self.pid.iter().map(|pid| Process(*pid)).collect(),
            part: (0, 1),
        })
    }

    /// Which CPU each thread gets.
    fn cpus(&self) -> io::Result<Vec<Option<usize>>> {
        if !self.cpus.is_empty() {
            if self.cpus.len() != usize::from(self.threads) && self.threads != 1 {
                return Err(io::Error::other(
                    "--cpus names as many CPUs as there are --threads",
                ));
            }
            return Ok(self.cpus.iter().copied().map(Some).collect());
        }
        let mut ids: Vec<usize> = core_affinity::get_core_ids()
            .unwrap_or_default()
            .iter()
            .map(|core| core.id)
            .collect();
        ids.sort_unstable();
        // The router takes the first ones.
        Ok((0..usize::from(self.threads))
            .map(|thread| ids.iter().rev().nth(thread).copied())
            .collect())
    }

    fn drain_ns(&self) -> u64 {
        ns(self.drain_secs.unwrap_or(self.timeout_secs))
    }

    fn slice(&self) -> Slice {
        Slice {
            target: 0,
            warm_up_ns: ns(self.warm_up_secs),
            length: match self.requests {
                Some(count) => Length::Requests(count),
                None => Length::Time(ns(self.seconds)),
            },
            drain_ns: self.drain_ns(),
        }
    }

    /// Slices of two targets; what was counted of each, and the slices by pairs.
    fn alternate(&self, crew: &Crew) -> io::Result<(Vec<Tally>, Vec<[Tally; 2]>)> {
        let slice_ns = self.slice_ms * 1_000_000;
        let warm_up_ns = (slice_ns as f64 * SLICE_WARM_UP_SHARE) as u64;
        let slice = |target, warm_up_ns, length_ns| Slice {
            target,
            warm_up_ns,
            length: Length::Time(length_ns),
            drain_ns: self.drain_ns(),
        };
        let mut all = [Tally::default(), Tally::default()];
        for (target, all) in all.iter_mut().enumerate() {
            // Wrong answers count also in the warm-up.
            let tally = crew.run(slice(target, ns(self.warm_up_secs), 1))?;
            for (kind, count) in tally.wrong {
                *all.wrong.entry(kind).or_default() += count;
            }
        }
        let count = (ns(self.seconds) / (2 * slice_ns)).max(1) as usize;
        let mut pairs = Vec::with_capacity(count);
        for pair in 0..count {
            let mut both = [None, None];
            for target in order(pair) {
                let tally = crew.run(slice(target, warm_up_ns, slice_ns - warm_up_ns))?;
                all[target].add(&tally, false);
                both[target] = Some(tally);
            }
            if let [Some(a), Some(b)] = both {
                pairs.push([a, b]);
            }
        }
        Ok((all.into(), pairs))
    }
}
