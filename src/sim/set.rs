//! The workloads that policies are judged on. Each is an open loop with a dial: how many times as fast as it was recorded
//! or made. What is generated is the same for the same seed.
//!
//! | case | what it asks |
//! |---|---|
//! | Mooncake conversation, synthetic | real prefixes and arrivals; all conversations share their first block |
//! | miniswe, multiplied | agents: a prompt repeats 95 % of the one before |
//! | Azure conversation, code | nothing is shared: a policy may not lose to one that looks at load alone |
//! | hot prefix | 80 % of the requests begin with the same 6,000 tokens: one worker cannot have them all |
//! | bimodal | one prompt of two hundred is a thousand times longer than the others, and is asked about three times |
//! | heterogeneous | workers of speed 1, 0.5 and 3 that nobody is told of; in mid-run a fast one becomes slow, a slow one fast |
//!
//! All workers are [`Speeds::default`]. The bounds of the time to the first token are Mooncake's own (30 s) for its traces,
//! whose longest prompts alone take 8 s; elsewhere some ten times what a usual prompt takes on an idle worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::agenda::{ns, secs};
use super::content::{Content, mix};
use super::engine::Speeds;
use super::trace::{self, Format};
use super::workload::{Draw, Session, Turn, Workload};
use super::world::{Fault, Planned, Setup};
use crate::route::Rng;

/// A workload and the fleet for it.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The workload at 1x.
    pub workload: Workload,
    /// Workers.
    pub worker_count: usize,
    /// 99 of 100 requests have their first token within so many seconds.
    pub bound_s: f64,
    /// What happens to which worker, after this share of the run.
    pub faults: Vec<(f64, usize, Fault)>,
}

/// A file of [`cases`] that is not there.
pub type Missing = (&'static str, PathBuf);

impl Case {
    /// Time from the first arrival to the last, at 1x, in seconds.
    pub fn span_s(&self) -> f64 {
        let starts = self.workload.sessions.iter().map(|session| session.start);
        secs(starts.max().unwrap_or(0)).max(1e-9)
    }

    /// Requests a second, at 1x.
    pub fn requests_per_s(&self) -> f64 {
        self.workload.request_count() as f64 / self.span_s()
    }

    /// The fleet, for a run at so many times the speed.
    pub fn setup(&self, policy: &str, factor: f64, seed: u64) -> Setup {
        let span_s = self.span_s() / factor;
        let planned = |(share, worker, fault): &(f64, usize, Fault)| Planned {
            at: ns(share * span_s),
            pool: 0,
            worker: *worker,
            fault: *fault,
        };
        Setup {
            faults: self.faults.iter().map(planned).collect(),
            sample_s: 10.0,
            seed,
            ..Setup::plain(self.worker_count, Speeds::default(), policy)
        }
    }
}

/// All cases, at `size` times their usual number of requests, and the files that are missing in the folder of traces
/// (without one: those that would be wanted).
///
/// # Errors
/// A trace that is there cannot be read.
pub fn cases(
    traces: Option<&Path>,
    size: f64,
    seed: u64,
) -> Result<(Vec<Case>, Vec<Missing>), String> {
    let files = [
        (
            "Mooncake conversation",
            "mooncake-conversation.jsonl",
            Format::Mooncake,
            30.0,
        ),
        (
            "Mooncake synthetic",
            "mooncake-synthetic.jsonl",
            Format::Mooncake,
            30.0,
        ),
        ("miniswe, multiplied", "agent-miniswe", Format::Agent, 2.0),
        (
            "Azure conversation",
            "azure-2023-conv.csv",
            Format::Azure,
            2.0,
        ),
        ("Azure code", "azure-2023-code.csv", Format::Azure, 2.0),
    ];
    let (mut all, mut missing) = (Vec::new(), Vec::new());
    for (name, file, format, bound_s) in files {
        let path = traces.unwrap_or(Path::new("")).join(file);
        if traces.is_none() || !path.exists() {
            missing.push((name, path));
            continue;
        }
        let mut workload = trace::read(&path, format)?;
        if format == Format::Agent {
            workload = multiplied(&workload, (AGENTS as f64 * size) as usize, seed);
        } else {
            let count = workload.sessions.len() as f64 * size.min(1.0);
            workload.sessions.truncate(count as usize);
        }
        all.push(plain(name, workload, bound_s));
    }
    all.extend(generated(size, seed));
    Ok((all, missing))
}

/// Those that need no file.
pub fn generated(size: f64, seed: u64) -> Vec<Case> {
    let count = |usual: usize| (usual as f64 * size) as usize;
    let paces = [1.0, 1.0, 0.5, 0.5, 3.0, 3.0].into_iter().enumerate();
    let mut faults: Vec<_> = paces
        .map(|(worker, pace)| (0.0, worker, Fault::Pace(pace)))
        .collect();
    faults.push((0.5, 5, Fault::Pace(0.5)));
    faults.push((0.5, 3, Fault::Pace(3.0)));
    vec![
        plain("hot prefix", hot_prefix(count(16_000), seed), 2.0),
        plain("bimodal", bimodal(count(40_000), seed), 1.0),
        Case {
            worker_count: 6,
            faults,
            ..plain("heterogeneous", conversations(count(4000), seed), 2.0)
        },
    ]
}

fn plain(name: &'static str, workload: Workload, bound_s: f64) -> Case {
    Case {
        name,
        workload,
        worker_count: 8,
        bound_s,
        faults: Vec::new(),
    }
}

/// Sessions that the recorded agents become.
const AGENTS: usize = 1000;

/// Copies of recorded sessions, each with text of its own, one a second on average.
fn multiplied(recorded: &Workload, count: usize, seed: u64) -> Workload {
    let mut rng = Rng::new(seed ^ 0x3151);
    let mut at = 0.0;
    let copy = |index: usize| {
        at += rng.exponential(1.0);
        let origin = &recorded.sessions[index % recorded.sessions.len()];
        let turns = origin.turns.iter().map(|turn| Turn {
            content: Arc::new(turn.content.renamed(|name| mix(name, index as u64))),
            ..turn.clone()
        });
        Session {
            name: mix(0xc0b7, index as u64),
            start: ns(at),
            turns: turns.collect(),
        }
    };
    Workload {
        sessions: (0..count).map(copy).collect(),
        seats: None,
    }
}

/// Ten requests a second.
fn hot_prefix(count: usize, seed: u64) -> Workload {
    let mut rng = Rng::new(seed ^ 0x407);
    let mut at = 0.0;
    let requests = (0..count as u64).map(|n| {
        at += rng.exponential(0.1);
        let mut content = Content::default();
        let is_hot = rng.unit() < 0.8;
        content.push(if is_hot { 1 } else { mix(n, 1) }, 6000);
        content.push(mix(n, 2), rng.log_normal(500.0, 0.6) as u32 + 1);
        (ns(at), content, rng.exponential(100.0) as u32 + 1)
    });
    Workload::open(requests.collect::<Vec<_>>())
}

/// Fifty requests a second.
fn bimodal(count: usize, seed: u64) -> Workload {
    const LONG: f64 = 0.005;
    let mut rng = Rng::new(seed ^ 0xb1);
    let document_count = (count as f64 * LONG / 3.0).ceil() as usize;
    let mut at = 0.0;
    let requests = (0..count as u64).map(|n| {
        at += rng.exponential(0.02);
        let mut content = Content::default();
        if rng.unit() < LONG {
            content.push(mix(0xd0c, rng.below(document_count) as u64), 100_000);
        }
        content.push(mix(n, 2), 100);
        (ns(at), content, rng.exponential(100.0) as u32 + 1)
    });
    Workload::open(requests.collect::<Vec<_>>())
}

/// Five new conversations a second, of some six turns.
fn conversations(count: usize, seed: u64) -> Workload {
    let mut rng = Rng::new(seed ^ 0xc0);
    let mut at = 0.0;
    let session = |index: usize| {
        at += rng.exponential(0.2);
        let name = mix(0xc0de, index as u64);
        let mut content = Content::default();
        content.push(1, 2000);
        content.push(mix(name, 1), rng.log_normal(3000.0, 0.8) as u32 + 1);
        let turn_count = rng.log_normal(6.0, 0.6).ceil() as u64;
        let mut turns = Vec::new();
        for turn in 0..turn_count {
            let output_tokens = rng.log_normal(150.0, 0.6) as u32 + 1;
            turns.push(Turn {
                pause: if turn == 0 {
                    0
                } else {
                    ns(rng.exponential(3.0))
                },
                content: Arc::new(content.clone()),
                output_tokens,
            });
            content.push(
                mix(name, 1),
                output_tokens + rng.log_normal(1500.0, 1.0) as u32,
            );
        }
        Session {
            name,
            start: ns(at),
            turns,
        }
    };
    Workload {
        sessions: (0..count).map(session).collect(),
        seats: None,
    }
}
