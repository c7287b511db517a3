//! How far each policy goes: the highest rate of a workload at which 99 of 100 requests have their first token within a
//! bound. That is its throughput at equal time to the first token. Rates are tried on a grid of 1 %, the same for all
//! policies; a run that has missed its bound is not finished.
//!
//! No policy here is an oracle: each gets what its own router books or scrapes. The scraped share of the KV cache in use is
//! fresh at every choice, which no scrape is; that is in favour of `llmd_weighted`, `smg_drain` and `preble`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::policy::EXPECTED_WAIT;
use super::set::Case;
use super::swe_bench_pro as swe;
use super::tally::Outcome;
use super::world::{Late, run};

/// A step of the grid.
const STEP: f64 = 1.01;
/// The first steps, until the knee is between two of them.
const STRIDE: i32 = 40;
/// Steps beyond which nothing is tried: 1x is far from any sensible load, then.
const STEPS_MAX: i32 = 600;
/// All policies are also looked at under the same load: this share of the furthest knee.
const SHARE: f64 = 0.8;
/// What may be lost to the best other policy.
pub const LOSS_MAX: f64 = 0.02;

/// One policy on one workload.
#[derive(Clone, Debug)]
pub struct Knee {
    /// Which.
    pub policy: String,
    /// How many times 1x; 0: the bound is never met.
    pub factor: f64,
    /// Share of prompt tokens cached there, 0 to 1.
    pub hit_rate: f64,
    /// Time to the first token under the same load as all others, in seconds: 50th and 99th percentile.
    pub first_s: (f64, f64),
    /// The hit rate under that load.
    pub same_hit_rate: f64,
}

/// All policies on one workload.
#[derive(Clone, Debug)]
pub struct Knees {
    /// The workload's name, its bound in seconds, its rate at 1x.
    pub case: (&'static str, f64, f64),
    /// The same load for all, in times 1x.
    pub same: f64,
    /// The policies, the furthest first.
    pub all: Vec<Knee>,
}

/// Finds the knees. Works in so many threads; the result does not depend on that.
///
/// # Errors
/// A policy does not exist.
pub fn find(
    case: &Case,
    policies: &[String],
    seed: u64,
    thread_count: usize,
) -> Result<Knees, String> {
    let found = spread(policies, thread_count, |policy| {
        let (factor, outcome) = knee(case, policy, seed)?;
        Ok(Knee {
            policy: policy.clone(),
            factor,
            hit_rate: outcome.hit_rate(),
            first_s: (0.0, 0.0),
            same_hit_rate: 0.0,
        })
    })?;
    let furthest = found.iter().map(|knee| knee.factor).fold(0.0, f64::max);
    // Where nobody meets the bound at any rate, 1x has to do.
    let same = if furthest > 0.0 {
        SHARE * furthest
    } else {
        1.0
    };
    let workload = case.workload.clone().sped_up(same);
    let mut all = spread(&found, thread_count, |knee| {
        let outcome = run(&case.setup(&knee.policy, same, seed), &workload)?;
        Ok(Knee {
            first_s: (outcome.first_quantile(0.5), outcome.first_quantile(0.99)),
            same_hit_rate: outcome.hit_rate(),
            ..knee.clone()
        })
    })?;
    all.sort_by(|a, b| b.factor.total_cmp(&a.factor));
    Ok(Knees {
        case: (case.name, case.bound_s, case.requests_per_s()),
        same,
        all,
    })
}

/// Runs the experiment with every policy.
///
/// # Errors
/// A policy does not exist.
pub fn rollouts(
    policies: &[String],
    count: usize,
    seed: u64,
    thread_count: usize,
) -> Result<Vec<Outcome>, String> {
    let workload = swe::rollouts(count).workload(seed);
    let mut all = spread(policies, thread_count, |policy| {
        run(&swe::setup(policy, swe::THRESHOLDS, count, seed), &workload)
    })?;
    all.sort_by(|a, b| b.sessions_per_min().total_cmp(&a.sessions_per_min()));
    Ok(all)
}

fn spread<T: Sync, U: Send>(
    all: &[T],
    thread_count: usize,
    work: impl Fn(&T) -> Result<U, String> + Sync,
) -> Result<Vec<U>, String> {
    let share = all.len().div_ceil(thread_count.max(1)).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = all
            .chunks(share)
            .map(|part| scope.spawn(|| part.iter().map(&work).collect::<Result<Vec<U>, String>>()))
            .collect();
        let mut done = Vec::new();
        for part in parts {
            done.extend(part.join().expect("a run does not panic")?);
        }
        Ok(done)
    })
}

/// The knee of a policy, and what came of the run there.
fn knee(case: &Case, policy: &str, seed: u64) -> Result<(f64, Outcome), String> {
    let at = |step: i32| STEP.powi(step);
    let count = case.workload.request_count() / 100;
    let holds = |step: i32| -> Result<Option<Outcome>, String> {
        let mut setup = case.setup(policy, at(step), seed);
        setup.late = Some(Late {
            after_s: case.bound_s,
            count,
        });
        let outcome = run(&setup, &case.workload.clone().sped_up(at(step)))?;
        Ok((!outcome.is_late).then_some(outcome))
    };
    // `low` holds, `high` does not.
    let (mut low, mut high, mut best) = match holds(0)? {
        Some(outcome) => (0, i32::MAX, outcome),
        None => (i32::MIN, 0, Outcome::default()),
    };
    while low == i32::MIN || high == i32::MAX {
        let step = if high == i32::MAX {
            low + STRIDE
        } else {
            high - STRIDE
        };
        match holds(step)? {
            Some(outcome) => (low, best) = (step, outcome),
            None => high = step,
        }
        if step.abs() >= STEPS_MAX {
            let factor = if low == i32::MIN { 0.0 } else { at(low) };
            return Ok((factor, best));
        }
    }
    while high - low > 1 {
        let step = low + (high - low) / 2;
        match holds(step)? {
            Some(outcome) => (low, best) = (step, outcome),
            None => high = step,
        }
    }
    Ok((at(low), best))
}

/// `expected_wait` against the others, on one workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The workload.
    pub case: &'static str,
    /// Its throughput, in a unit of the workload.
    pub own: f64,
    /// The best of the others, and its throughput.
    pub other: (String, f64),
    /// That of llm-d's sticky policy, if it was compared.
    pub sticky: Option<f64>,
}

impl Verdict {
    /// From throughputs by policy. `None`: `expected_wait` or all others are missing.
    pub fn new(case: &'static str, all: &[(String, f64)]) -> Option<Verdict> {
        let of = |name: &str| {
            all.iter()
                .find(|(policy, _)| policy == name)
                .map(|(_, value)| *value)
        };
        let others = all.iter().filter(|(policy, _)| policy != EXPECTED_WAIT);
        let other = others.max_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(Verdict {
            case,
            own: of(EXPECTED_WAIT)?,
            other: other.clone(),
            sticky: of("llmd_sticky"),
        })
    }

    /// Its throughput as a share of the best other's.
    pub fn ratio(&self) -> f64 {
        self.own / self.other.1.max(1e-9)
    }

    /// Whether nothing is lost, to within [`LOSS_MAX`], and llm-d's sticky policy goes no further.
    pub fn holds(&self) -> bool {
        self.ratio() >= 1.0 - LOSS_MAX && self.sticky.is_none_or(|sticky| self.own >= sticky)
    }
}

impl Knees {
    /// `expected_wait` against the others.
    pub fn verdict(&self) -> Option<Verdict> {
        let all: Vec<_> = self
            .all
            .iter()
            .map(|knee| (knee.policy.clone(), knee.factor * self.case.2))
            .collect();
        Verdict::new(self.case.0, &all)
    }
}

/// A line for each policy.
pub fn table(knees: &Knees) -> String {
    let (name, bound_s, rate) = knees.case;
    let mut text = format!(
        "{name}: 1x is {rate:.2} requests/s; knee: 99 % of the first tokens within {bound_s} s\n{:<24} {:>8} {:>11} {:>7}   at {:.2}x: {:>8} {:>8} {:>7}\n",
        "policy", "knee, x", "requests/s", "hit %", knees.same, "TTFT p50", "p99, s", "hit %",
    );
    for knee in &knees.all {
        let _ = writeln!(
            text,
            "{:<24} {:>8.2} {:>11.2} {:>7.1} {:>20.2} {:>8.2} {:>7.1}",
            knee.policy,
            knee.factor,
            knee.factor * rate,
            knee.hit_rate * 100.0,
            knee.first_s.0,
            knee.first_s.1,
            knee.same_hit_rate * 100.0,
        );
    }
    text
}

/// `expected_wait` against the best of the others, a line for each workload.
pub fn verdicts(all: &[Verdict]) -> String {
    let mut text = format!(
        "{:<24} {:>14} {:>14} {:<24} {:>6} {:>12}\n",
        "workload", EXPECTED_WAIT, "best other", "", "ratio", "llmd_sticky"
    );
    for verdict in all {
        let sticky = verdict
            .sticky
            .map_or(String::new(), |sticky| format!("{sticky:.2}"));
        let _ = writeln!(
            text,
            "{:<24} {:>14.2} {:>14.2} {:<24} {:>6.3} {sticky:>12}{}",
            verdict.case,
            verdict.own,
            verdict.other.1,
            verdict.other.0,
            verdict.ratio(),
            if verdict.holds() { "" } else { "  loses" },
        );
    }
    let (held, better) = (
        all.iter().filter(|verdict| verdict.holds()).count(),
        all.iter().filter(|verdict| verdict.ratio() > 1.0).count(),
    );
    let _ = writeln!(
        text,
        "no more than {:.0} % worse, and as far as llmd_sticky: {held} of {}; better: {better}",
        LOSS_MAX * 100.0,
        all.len()
    );
    text
}

/// The same as JSON.
pub fn json_of(all: &[Knees]) -> Value {
    let policy = |knees: &Knees, knee: &Knee| {
        json!({
            "policy": knee.policy,
            "knee": knee.factor,
            "requests_per_s": knee.factor * knees.case.2,
            "hit_rate": knee.hit_rate,
            "same_load": {
                "ttft_s": {"p50": knee.first_s.0, "p99": knee.first_s.1},
                "hit_rate": knee.same_hit_rate,
            },
        })
    };
    let one = |knees: &Knees| {
        json!({
            "workload": knees.case.0,
            "ttft_p99_max_s": knees.case.1,
            "requests_per_s": knees.case.2,
            "same_load": knees.same,
            "policies": knees.all.iter().map(|knee| policy(knees, knee)).collect::<Vec<_>>(),
        })
    };
    all.iter().map(one).collect()
}

#[cfg(test)]
#[path = "knees_tests.rs"]
mod tests;
