//! The fault matrix: kind of fault x phase of the requests it meets x policy x plain or P/D, each with everything else
//! from its seed, in a simulation (`common/fleet.rs`). Also: all workers slow, or silent, at once.
//!
//! What must hold is checked where it happens: no error for a request without a byte of an answer while another worker is
//! well; a visible end for what had begun; no two answers mixed; nobody but the victim out, and it only for what it did;
//! at the end books, gate and hand-overs at zero, everybody answered, the victim serving again.
//!
//! A seed is a cell: `SEED=n` plays case `n` first (in the test that has its kind), then the matrix from there on.
//! `ROUNDS=n` goes through the matrix so often.

mod common;
#[path = "common/fault.rs"]
mod fault;
#[path = "common/fleet.rs"]
mod fleet;

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Parser;
use corelane::config::{Cli, Config};
use corelane::route::PolicyKind;
use fault::{Kind, Phase};
use fleet::{Case, MS, SECOND, Tally, play};

/// Cells: every kind in every phase under every policy, plain and in two legs.
fn cells() -> Vec<(Kind, Phase, PolicyKind, bool)> {
    let mut cells = Vec::new();
    for kind in Kind::OF_ONE {
        for policy in PolicyKind::ALL {
            cells.extend(Phase::PLAIN.map(|phase| (kind, phase, policy, false)));
            cells.extend(Phase::PD.map(|phase| (kind, phase, policy, true)));
        }
    }
    cells
}

/// Limits scaled to a run of seconds.
fn config(policy: PolicyKind, is_pd: bool) -> Config {
    let mut line = vec!["corelane", "--policy", policy.name()];
    line.extend(["--retry-budget-ratio", "1", "--retry-max-retries", "5"]);
    if is_pd {
        line.push("--vllm-pd-disaggregation");
    }
    let cli = Cli::try_parse_from(line).expect("the flags parse");
    let mut config = Config::from_cli(cli).expect("the flags are in range");
    config.connect_timeout = Duration::from_secs(1);
    config.first_byte_timeout = Duration::from_secs(120);
    config.request_timeout = Duration::from_secs(300);
    config.stream_idle_timeout = Duration::from_secs(20);
    config.health.interval = Duration::from_secs(1);
    config.health.timeout = Duration::from_millis(500);
    config.standing.breaker_timeout = Duration::from_secs(3);
    config.standing.breaker_window = Duration::from_secs(10);
    config.standing.slow_start = Duration::from_secs(2);
    config
}

struct Matrix {
    cells: Vec<(Kind, Phase, PolicyKind, bool)>,
    configs: Vec<((PolicyKind, bool), Config)>,
}

impl Matrix {
    fn new() -> Matrix {
        let all = PolicyKind::ALL.into_iter();
        let configs = all
            .flat_map(|policy| [(policy, false), (policy, true)])
            .map(|(policy, is_pd)| ((policy, is_pd), config(policy, is_pd)));
        Matrix {
            cells: cells(),
            configs: configs.collect(),
        }
    }

    fn case(&self, seed: u64) -> Case {
        let (kind, phase, policy, is_pd) = self.cells[(seed % self.cells.len() as u64) as usize];
        Case {
            seed,
            kind,
            phase,
            policy,
            is_pd,
        }
    }

    fn play(&self, case: Case) -> Tally {
        let of_case = |(key, _): &&(_, _)| *key == (case.policy, case.is_pd);
        let (_, config) = self.configs.iter().find(of_case).expect("there is one");
        play(case, config, recovery_ns_max(case.kind))
    }

    /// Plays the cells of these kinds.
    fn play_all(&self, kinds: &[Kind]) -> Sum {
        let base = number("SEED").unwrap_or(0);
        let rounds = number("ROUNDS").unwrap_or(1);
        let mut sum = Sum::default();
        for seed in base..base + rounds * self.cells.len() as u64 {
            let case = self.case(seed);
            if kinds.contains(&case.kind) {
                let tally = self.play(case);
                check(&case, &tally);
                sum.add(&case, &tally);
            }
        }
        sum.show();
        sum.check_phases();
        sum
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// From the fault's end to a request served.
fn recovery_ns_max(kind: Kind) -> u64 {
    let secs = match kind {
        // Two good probes, a second apart, and a place among the others.
        Kind::Refused | Kind::BlackHole | Kind::Killed => 5,
        // The longest Retry-After here is 2 s.
        Kind::Status503 | Kind::Paused503 | Kind::Status429 => 5,
        Kind::IdleClosed | Kind::AllSlow => 5,
        // The first pause of 10 s, which begins at the latest when the fault ends, and what is still silent then.
        Kind::Hang | Kind::Silent | Kind::Slow | Kind::AllSilent => 20,
        // The breaker's time (3 s here).
        _ => 6,
    };
    secs * SECOND
}

/// From a fault's begin to the victim out, where it strikes every answer.
fn out_ns_max(kind: Kind) -> Option<u64> {
    match kind {
        Kind::Killed | Kind::ResetEarly => Some(2 * SECOND),
        Kind::ResetInHead | Kind::BadHead | Kind::Status500 | Kind::Status502 => Some(4 * SECOND),
        Kind::Hang => Some(5 * SECOND),
        // Refused connections are met when a new one is needed, broken bodies among whole short ones, slowness among
        // enough streams.
        _ => None,
    }
}

fn check(case: &Case, tally: &Tally) {
    if let Some(limit_ns) = out_ns_max(case.kind)
        && tally.is_total
        && tally.fault_ns > limit_ns
    {
        let is_out = tally.first_out_ns.is_some_and(|ns| ns <= limit_ns);
        assert!(is_out, "{case:?}: not out in time: {tally:?}");
    }
    // Beside trials, whose pace is the breaker's, nothing goes to one that is out (checked at each choice), and no
    // request runs out of others.
    assert!(
        tally.trials <= 8 && tally.spares == 0,
        "{case:?}: {tally:?}"
    );
}

#[derive(Default)]
struct Sum {
    by_kind: BTreeMap<String, Vec<Tally>>,
}

impl Sum {
    fn add(&mut self, case: &Case, tally: &Tally) {
        let key = format!("{:?}{}", case.kind, if case.is_pd { " P/D" } else { "" });
        self.by_kind.entry(key).or_default().push(tally.clone());
    }

    fn show(&self) {
        for (kind, all) in &self.by_kind {
            let sum = |of: fn(&Tally) -> u64| all.iter().map(of).sum::<u64>();
            let most = |of: fn(&Tally) -> u64| all.iter().map(of).max().unwrap_or(0);
            println!(
                "{kind:<16} {:>3} runs {:>7} answers {:>5} cut {:>4} refused {:>6} retries {:>5} resends {:>4} moved | outs {} in {} runs, first after {} ms at most | chosen {} trials {} spares {} | served after {} ms, longest {} ms, run {} ms, lost {}",
                all.len(),
                sum(|t| t.answers),
                sum(|t| t.cut),
                sum(|t| t.refused),
                sum(|t| t.retries),
                sum(|t| t.resends),
                sum(|t| t.moved),
                sum(|t| t.outs),
                sum(|t| u64::from(t.outs > 0)),
                most(|t| t.first_out_ns.unwrap_or(0) / MS),
                most(|t| t.chosen),
                most(|t| t.trials),
                most(|t| t.spares),
                most(|t| t.served_ns.unwrap_or(0) / MS),
                most(|t| t.worst_ns / MS),
                most(|t| t.end_ns / MS),
                sum(|t| t.lost),
            );
        }
        let all = || self.by_kind.values().flatten();
        let events: u64 = all().map(|t| t.events).sum();
        println!("{} runs, {events} events", all().count());
    }

    /// Nearly every fault met its phase, so the matrix is what it says.
    fn check_phases(&self) {
        let all = || self.by_kind.values().flatten();
        let met = all().filter(|t| t.is_in_phase).count();
        println!("{met} of them in their phase");
        assert!(met * 100 >= all().count() * 85, "{met}");
    }

    fn total(&self, of: fn(&Tally) -> u64) -> u64 {
        self.by_kind.values().flatten().map(of).sum()
    }
}

#[test]
fn a_worker_that_cannot_be_reached_costs_nobody_an_answer_that_had_not_begun() {
    let kinds = [Kind::Refused, Kind::BlackHole, Kind::Killed];
    let sum = Matrix::new().play_all(&kinds);
    assert!(sum.total(|t| t.retries) > 0 && sum.total(|t| t.outs) > 0);
}

#[test]
fn broken_answers_end_visibly_or_are_tried_elsewhere() {
    let kinds = [
        Kind::ResetEarly,
        Kind::ResetInHead,
        Kind::ResetInBody,
        Kind::EndInBody,
        Kind::BadHead,
        Kind::BadChunk,
    ];
    Matrix::new().play_all(&kinds);
}

#[test]
fn what_a_worker_refuses_another_answers() {
    let kinds = [
        Kind::Status500,
        Kind::Status502,
        Kind::Status503,
        Kind::Paused503,
        Kind::Status429,
    ];
    Matrix::new().play_all(&kinds);
}

#[test]
fn a_silent_or_slow_worker_loses_its_requests_to_its_peers() {
    Matrix::new().play_all(&[Kind::Hang, Kind::Silent, Kind::Slow]);
}

#[test]
fn idle_connections_that_close_under_a_request_are_nobodys_failure() {
    let sum = Matrix::new().play_all(&[Kind::IdleClosed]);
    assert!(sum.total(|t| t.resends) > 0, "the race was run");
}

#[test]
fn nobody_is_out_when_all_are_slow_or_silent() {
    let matrix = Matrix::new();
    let base = number("SEED").unwrap_or(0);
    let mut sum = Sum::default();
    // A step that is prime to the matrix: all policies, plain and in two legs.
    for seed in (base..).step_by(11).take(100) {
        for kind in [Kind::AllSlow, Kind::AllSilent] {
            let case = Case {
                kind,
                ..matrix.case(seed)
            };
            let tally = matrix.play(case);
            assert!(kind == Kind::AllSilent || tally.outs == 0, "{case:?}");
            sum.add(&case, &tally);
        }
    }
    sum.show();
    assert!(sum.total(|t| t.queued) > 0, "some waited in line");
}
