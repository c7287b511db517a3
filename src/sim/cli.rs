//! `corelane sim`: the flags, and what each subcommand prints.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Subcommand, value_parser};
use serde_json::{Map, json};

use super::engine::Speeds;
use super::knees::Verdict;
use super::policy::{self, AS_LOGGED};
use super::replay::Replay;
use super::swe_bench_pro as swe;
use super::tally::Outcome;
use super::trace::{self, Format};
use super::workload::Workload;
use super::world::{Setup, run};
use super::{gray, knees, page, replay, report, set};
use crate::route::Settings;

/// What another policy would do: fleets of simulated workers behind the real policies and books.
#[derive(Args, Clone, Debug)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub struct SimArgs {
    #[command(subcommand)]
    command: Option<SimCommand>,
    /// The same as 'replay FILE'
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    #[command(flatten)]
    replayed: ReplayArgs,
}

#[derive(Clone, Debug, Subcommand)]
enum SimCommand {
    /// The failure of the fleet-wide gate and its fix (vllm-project/router pull request 238): 4 prefill and 6 decode
    /// workers, 1,024 agentic rollouts at a time
    SweBenchPro(SweArgs),
    /// A decode worker that stalls, or becomes fifty times slower, while its probes stay good: with detection and without
    GrayFailures(GrayArgs),
    /// Replay a trace against policies
    Trace(TraceArgs),
    /// What other policies would have done with the requests of a live router's decision log (--decision-log), beside what
    /// really happened
    Replay {
        /// The log
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        args: ReplayArgs,
    },
    /// How far each policy goes: the highest rate at which the first tokens stay in time, on every workload of the set, and
    /// the rollouts a minute of swe-bench-pro
    Knees(KneesArgs),
    /// The names of all policies
    Policies,
}

/// What a fleet is like that serves what was recorded.
#[derive(Args, Clone, Debug)]
struct FleetArgs {
    /// How many times as fast as it was
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero)]
    speed_up: f64,
    /// Prompt tokens a second that a worker computes
    #[arg(long, value_name = "TOKENS/S", default_value_t = Speeds::default().prefill_tokens_per_s, value_parser = above_zero)]
    prefill_tps: f64,
    /// Tokens of KV cache of a worker
    #[arg(long, value_name = "TOKENS", default_value_t = Speeds::default().kv_tokens)]
    kv_tokens: u64,
    /// --balance-abs-threshold of the router
    #[arg(long, value_name = "COUNT", default_value_t = Settings::default().balance_abs_threshold)]
    balance_abs_threshold: u32,
    /// --balance-rel-threshold of the router
    #[arg(long, value_name = "RATIO", default_value_t = Settings::default().balance_rel_threshold)]
    balance_rel_threshold: f64,
}

impl FleetArgs {
    fn speeds(&self) -> Speeds {
        Speeds {
            prefill_tokens_per_s: self.prefill_tps,
            kv_tokens: self.kv_tokens,
            ..Speeds::default()
        }
    }

    fn settings(&self) -> Settings {
        Settings {
            balance_abs_threshold: self.balance_abs_threshold,
            balance_rel_threshold: self.balance_rel_threshold,
            ..Settings::default()
        }
    }

    /// What was recorded, at its speed; an error where a worker has no room for some of it.
    fn workload(&self, recorded: Workload) -> io::Result<Workload> {
        let longest = recorded.tokens_max();
        if u64::from(longest) > self.kv_tokens {
            return Err(io::Error::other(format!(
                "a prompt with its answer has {longest} tokens, --kv-tokens are {}",
                self.kv_tokens
            )));
        }
        Ok(recorded.sped_up(self.speed_up))
    }
}

#[derive(Args, Clone, Debug)]
struct ReplayArgs {
    /// Policies to compare
    #[arg(long, alias = "policies", value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    #[arg(default_values_t = ["cache_aware".to_string(), "expected_wait".to_string(), "least_loaded".to_string()])]
    policy: Vec<String>,
    /// Send each request at its time, whatever becomes of those before it. Else a session's turns follow each other as long
    /// after the last answer as they really did
    #[arg(long)]
    open_loop: bool,
    /// Seconds of a decode step, batch of none
    #[arg(long, value_name = "SECONDS", default_value_t = Speeds::default().decode_step_s, value_parser = above_zero)]
    decode_step: f64,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Clone, Debug)]
struct SweArgs {
    /// Policies to compare
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    policies: Vec<String>,
    /// Rollouts in all; figures are taken while 1,024 run, so four times that is well
    #[arg(long, value_name = "COUNT", default_value_t = 4096, value_parser = value_parser!(u32).range(3..=100_000))]
    rollouts: u32,
    /// Compare the gate and the rule under the thresholds 4/1.1, 32/1.5 and 64/1.5, too
    #[arg(long)]
    sweep: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Clone, Debug)]
struct GrayArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Of all that is left to chance: the same gives the same
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

#[derive(Args, Clone, Debug)]
struct TraceArgs {
    /// The trace
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Its format
    #[arg(long, value_enum)]
    format: Format,
    /// Policies to compare
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    #[arg(default_values_t = ["cache_aware".to_string(), "expected_wait".to_string(), "least_loaded".to_string()])]
    policies: Vec<String>,
    /// Workers; prefill workers with --decode-workers
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = value_parser!(u16).range(1..=1024))]
    workers: u16,
    /// Decode workers; 0: not disaggregated
    #[arg(long, value_name = "COUNT", default_value_t = 0, value_parser = value_parser!(u16).range(..=1024))]
    decode_workers: u16,
    /// Sessions at a time; 0: each begins at its time
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    concurrency: usize,
    #[command(flatten)]
    fleet: FleetArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args, Clone, Debug)]
struct KneesArgs {
    /// Folder of traces: mooncake-conversation.jsonl, mooncake-synthetic.jsonl, agent-miniswe/, azure-2023-conv.csv,
    /// azure-2023-code.csv; what is not there is left out
    #[arg(long, value_name = "DIR")]
    traces: Option<PathBuf>,
    /// Policies to compare; all by default
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    policies: Vec<String>,
    /// Only workloads whose name begins so
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    workloads: Vec<String>,
    /// Requests of a workload, as a share of their usual number
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero)]
    size: f64,
    /// Rollouts of swe-bench-pro; 0 leaves it out
    #[arg(long, value_name = "COUNT", default_value_t = 2048)]
    rollouts: u32,
    /// Runs at a time; what comes out does not depend on it
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
    /// Of all that is left to chance: the same gives the same
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

#[derive(Args, Clone, Debug)]
struct OutputArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Write each worker's load over time
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a page of plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Of all that is left to chance: the same gives the same
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,
}

/// A flag's number above 0.
pub(crate) fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("a number above 0".to_string()),
    }
}

impl SimArgs {
    /// Runs it; prints on standard output.
    ///
    /// # Errors
    /// A file cannot be read or written, a policy does not exist, the seats of a worker are too few for the trace.
    pub fn run(&self) -> io::Result<()> {
        let Some(command) = &self.command else {
            let Some(file) = &self.replay else {
                return Err(io::Error::other(
                    "--replay FILE, or a subcommand, is wanted",
                ));
            };
            return self.replayed.run(file);
        };
        match command {
            SimCommand::Replay { file, args } => args.run(file),
            SimCommand::SweBenchPro(args) => args.run(),
            SimCommand::Trace(args) => args.run(),
            SimCommand::Knees(args) => args.run().map_err(io::Error::other),
            SimCommand::GrayFailures(args) => {
                let all = gray::tell(args.seed).map_err(io::Error::other)?;
                match args.json {
                    true => println!("{:#}", gray::json_of(&all)),
                    false => print!("{}", gray::table(&all)),
                }
                Ok(())
            }
            SimCommand::Policies => {
                policy::names().for_each(|name| println!("{name}"));
                Ok(())
            }
        }
    }
}

impl SweArgs {
    fn run(&self) -> io::Result<()> {
        let policies = match self.policies.is_empty() {
            true => swe::policies(),
            false => self.policies.clone(),
        };
        let seed = self.output.seed;
        let count = self.rollouts as usize;
        let workload = swe::rollouts(count).workload(seed);
        let one = |policy: &String| {
            let setup = swe::setup(policy, swe::THRESHOLDS, count, seed);
            run(&setup, &workload).map_err(io::Error::other)
        };
        let outcomes: Vec<Outcome> = policies.iter().map(one).collect::<io::Result<_>>()?;
        let sweep = match self.sweep {
            true => swe::sweep(&workload, seed).map_err(io::Error::other)?,
            false => Vec::new(),
        };
        if self.output.json {
            let named = outcomes
                .iter()
                .map(|o| (o.policy.clone(), swe::figures_json(o)));
            let named: Map<_, _> = named.collect();
            let mut all = json!({"policies": named});
            if self.sweep {
                let sweep = sweep.iter().map(|((abs, rel), outcome)| {
                    json!({"balance_abs_threshold": abs, "balance_rel_threshold": rel,
                        "policy": outcome.policy, "figures": swe::figures_json(outcome)})
                });
                all["sweep"] = sweep.collect();
            }
            println!("{all:#}");
        } else {
            print!("{}", swe::table(&outcomes, &sweep));
        }
        let about = "SWE-bench Pro on 4 prefill and 6 decode workers, 1,024 rollouts at a time, thresholds 4 and 1.1: the \
                     fleet-wide gate switches affinity off for everybody, the rule of pull request 238 asks about the \
                     request's own worker.";
        self.output.write("The gate and the rule", about, &outcomes)
    }
}

impl TraceArgs {
    fn run(&self) -> io::Result<()> {
        let recorded = trace::read(&self.file, self.format).map_err(io::Error::other)?;
        let mut workload = self.fleet.workload(recorded)?;
        if self.concurrency > 0 {
            workload.seats = Some(self.concurrency);
        }
        let speeds = self.fleet.speeds();
        let one = |policy: &String| {
            let setup = Setup {
                decode: vec![speeds.clone(); self.decode_workers.into()],
                settings: self.fleet.settings(),
                seed: self.output.seed,
                ..Setup::plain(self.workers.into(), speeds.clone(), policy)
            };
            run(&setup, &workload).map_err(io::Error::other)
        };
        let outcomes: Vec<Outcome> = self.policies.iter().map(one).collect::<io::Result<_>>()?;
        if self.output.json {
            let named = outcomes
                .iter()
                .map(|o| (o.policy.clone(), report::json_of(o)));
            println!("{:#}", json!({"policies": named.collect::<Map<_, _>>()}));
        } else {
            print!("{}", report::table(&outcomes));
        }
        let about = format!(
            "{} at {} times its speed, {} workers{}.",
            file_name(&self.file),
            self.fleet.speed_up,
            self.workers,
            match self.decode_workers {
                0 => String::new(),
                count => format!(" for prompts, {count} for answers"),
            }
        );
        self.output
            .write("What each policy would do", &about, &outcomes)
    }
}

impl ReplayArgs {
    fn run(&self, path: &Path) -> io::Result<()> {
        let bytes = fs::read(path)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        let file = crate::decisions::read(&bytes);
        drop(bytes);
        let replayed = replay::replay(&file, self.open_loop)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        let about = replay::about(&replayed);
        let Replay {
            workload,
            worker_counts: [first, decode],
            really,
            logged,
            notes,
        } = replayed;
        let workload = self.fleet.workload(workload)?;
        let speeds = Speeds {
            decode_step_s: self.decode_step,
            ..self.fleet.speeds()
        };
        let one = |policy: &str| {
            let plain = Setup::plain(first, speeds.clone(), policy);
            let decode_policy = match policy {
                AS_LOGGED => AS_LOGGED,
                _ => &*plain.decode_policy,
            };
            let setup = Setup {
                decode: vec![speeds.clone(); decode],
                decode_policy: decode_policy.to_owned(),
                settings: self.fleet.settings(),
                seed: self.output.seed,
                logged: Some(Arc::clone(&logged)),
                ..plain
            };
            run(&setup, &workload).map_err(io::Error::other)
        };
        let names = [AS_LOGGED].into_iter();
        let names = names.chain(self.policy.iter().map(String::as_str));
        let outcomes: Vec<Outcome> = names.map(one).collect::<io::Result<_>>()?;
        if self.output.json {
            let named = outcomes.iter();
            let named = named.map(|o| (o.policy.clone(), report::json_of(o)));
            let all = json!({
                "log": report::json_of(&really),
                "policies": named.collect::<Map<_, _>>(),
                "notes": notes,
            });
            println!("{all:#}");
        } else {
            let rows: Vec<Outcome> = [really].into_iter().chain(outcomes.clone()).collect();
            print!("{about}{}{REPLAY_FOOT}", report::table(&rows));
        }
        let title = "What other policies would have done";
        self.output.write(title, &about, &outcomes)
    }
}

/// What the rows of a replay are.
const REPLAY_FOOT: &str = "\
The first row is what really happened; its hits are what the router took workers to hold. as_logged sends each request of
the simulation to whom it really went: what it and the first row differ by is the simulated engines' doing (--prefill-tps,
--kv-tokens, --decode-step), what the others and it differ by is the policies'.
";

impl KneesArgs {
    fn run(&self) -> Result<(), String> {
        let policies: Vec<String> = match self.policies.is_empty() {
            true => policy::names().map(String::from).collect(),
            false => self.policies.clone(),
        };
        let is_wanted = |name: &str| {
            self.workloads.is_empty()
                || self
                    .workloads
                    .iter()
                    .any(|begin| name.starts_with(begin.as_str()))
        };
        let (cases, missing) = set::cases(self.traces.as_deref(), self.size, self.seed)?;
        for (name, path) in missing.iter().filter(|(name, _)| is_wanted(name)) {
            eprintln!(
                "left out, there is no {} (--traces): {name}",
                path.display()
            );
        }
        let mut all = Vec::new();
        let mut verdicts = Vec::new();
        for case in cases.iter().filter(|case| is_wanted(case.name)) {
            let found = knees::find(case, &policies, self.seed, self.threads.into())?;
            if !self.json {
                println!("{}", knees::table(&found));
            }
            verdicts.extend(found.verdict());
            all.push(found);
        }
        let mut rollouts = Vec::new();
        if self.rollouts > 0 && is_wanted(SWE) {
            rollouts = knees::rollouts(
                &policies,
                self.rollouts as usize,
                self.seed,
                self.threads.into(),
            )?;
            if !self.json {
                println!(
                    "{SWE}: 4 prefill and 6 decode workers, 1,024 rollouts at a time\n{}",
                    report::table(&rollouts)
                );
            }
            let per_min: Vec<_> = rollouts
                .iter()
                .map(|o| (o.policy.clone(), o.sessions_per_min()))
                .collect();
            verdicts.extend(Verdict::new(SWE, &per_min));
        }
        if self.json {
            let named = rollouts
                .iter()
                .map(|o| (o.policy.clone(), swe::figures_json(o)));
            let named: Map<_, _> = named.collect();
            println!("{:#}", json!({"knees": knees::json_of(&all), SWE: named}));
        } else {
            print!("{}", knees::verdicts(&verdicts));
        }
        Ok(())
    }
}

/// The experiment's name among the workloads.
const SWE: &str = "swe-bench-pro";

impl OutputArgs {
    fn write(&self, title: &str, about: &str, outcomes: &[Outcome]) -> io::Result<()> {
        let named = |path: &Path, error: io::Error| {
            io::Error::other(format!("{}: {error}", path.display()))
        };
        if let Some(path) = &self.csv {
            fs::write(path, report::csv(outcomes)).map_err(|error| named(path, error))?;
        }
        if let Some(path) = &self.html {
            fs::write(path, page::html(title, about, outcomes))
                .map_err(|error| named(path, error))?;
        }
        Ok(())
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
