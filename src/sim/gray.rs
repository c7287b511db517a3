//! Two failures that no probe sees, from people who run such fleets, with detection and without:
//!
//! - a decode worker that held 129 requests and said nothing for 61 minutes while its `/health` was good; the run fell to
//!   0.1 rollouts a minute;
//! - a decode worker at 1.0 tokens/s a sequence beside a peer at 49.6, to which the shortest queue sent more and more, as its
//!   clients waited for it.
//!
//! Decode workers are chosen in turn, as in the fleets of the stories. Without detection a closed loop ends up on the worker
//! that does not answer: whoever is sent there stays. With detection, what waits there for its first byte
//! goes elsewhere; what was in mid-answer stays (the router ends it at `--stream-idle-timeout-secs`), so those seats are lost.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::agenda::{Ns, ns};
use super::engine::Speeds;
use super::swe_bench_pro::rollouts;
use super::tally::Outcome;
use super::workload::{Rollouts, Workload};
use super::world::{Fault, Planned, Setup, run};

/// When the worker fails, and how long what follows is looked at: 61 minutes.
const AT_S: f64 = 900.0;
const AFTER_S: f64 = 3660.0;
/// A share of 1.0 in 49.6.
const DEGRADED_PACE: f64 = 1.0 / 49.6;

/// One story: its name and what happens.
pub const STORIES: [(&str, Fault); 2] = [
    ("stalled decode worker", Fault::Stall(AFTER_S)),
    ("degraded decode worker", Fault::Pace(DEGRADED_PACE)),
];

/// What came of one.
pub struct Told {
    /// Which.
    pub story: &'static str,
    /// Whether the control plane's judge was there.
    pub has_detection: bool,
    /// Rollouts a minute before, and in the last third of the time after.
    pub before_per_min: f64,
    /// See there.
    pub after_per_min: f64,
    /// Requests on the worker at the end.
    pub held: u32,
    /// Times it was found.
    pub found: usize,
}

/// A fleet of 2 prefill and 4 decode workers with 64 agents.
fn setup(fault: Option<Fault>, has_detection: bool, seed: u64) -> Setup {
    let speeds = Speeds {
        kv_tokens: 20_000_000,
        kv_block_tokens: 512,
        prefill_tokens_per_s: 120_000.0,
        ..Speeds::default()
    };
    let planned = |fault| Planned {
        at: ns(AT_S),
        pool: 1,
        worker: 0,
        fault,
    };
    Setup {
        decode: vec![speeds.clone(); 4],
        faults: fault.map(planned).into_iter().collect(),
        has_detection,
        // As the fleets of these stories were set; by load, a worker that holds what it was sent keeps others away.
        decode_policy: "round_robin".to_string(),
        end_s: AT_S + AFTER_S,
        sample_s: 10.0,
        seed,
        ..Setup::plain(2, speeds, "cache_aware")
    }
}

fn agents() -> Rollouts {
    Rollouts {
        seats: 64,
        ramp_s: 300.0,
        turns: 20.0,
        tool_s: 4.0,
        ..rollouts(6_000)
    }
}

/// Tells all of them, each with and without detection.
///
/// # Errors
/// None that can happen.
pub fn tell(seed: u64) -> Result<Vec<Told>, String> {
    let workload = agents().workload(seed);
    let mut all = Vec::new();
    for (story, fault) in STORIES {
        for has_detection in [false, true] {
            all.push(one(story, fault, has_detection, &workload, seed)?);
        }
    }
    Ok(all)
}

fn one(
    story: &'static str,
    fault: Fault,
    has_detection: bool,
    workload: &Workload,
    seed: u64,
) -> Result<Told, String> {
    let outcome = run(&setup(Some(fault), has_detection, seed), workload)?;
    let last = outcome.series.last();
    let held = last.map_or(0, |(_, pools)| pools[1][0].in_flight);
    Ok(Told {
        story,
        has_detection,
        before_per_min: per_min(&outcome, AT_S / 2.0, AT_S),
        after_per_min: per_min(&outcome, AT_S + AFTER_S * 2.0 / 3.0, AT_S + AFTER_S),
        held,
        found: outcome
            .outs
            .iter()
            .filter(|(_, place)| *place == (1, 0))
            .count(),
    })
}

fn per_min(outcome: &Outcome, from_s: f64, to_s: f64) -> f64 {
    let is_in = |at: &&Ns| (ns(from_s)..ns(to_s)).contains(*at);
    outcome.ends.iter().filter(is_in).count() as f64 * 60.0 / (to_s - from_s)
}

/// A line for each.
pub fn table(all: &[Told]) -> String {
    let mut text = format!(
        "{:<26}{:>10}{:>24}{:>16}{:>14}{:>8}\n",
        "", "detection", "rollouts/min before", "an hour after", "held there", "found"
    );
    for told in all {
        let detection = if told.has_detection { "on" } else { "off" };
        let _ = writeln!(
            text,
            "{:<26}{detection:>10}{:>24.1}{:>16.1}{:>14}{:>8}",
            told.story, told.before_per_min, told.after_per_min, told.held, told.found
        );
    }
    text
}

/// The same as JSON.
pub fn json_of(all: &[Told]) -> Value {
    let one = |told: &Told| {
        json!({
            "story": told.story,
            "detection": told.has_detection,
            "rollouts_per_min_before": told.before_per_min,
            "rollouts_per_min_after": told.after_per_min,
            "held": told.held,
            "found": told.found,
        })
    };
    all.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_saves_the_run_from_a_worker_that_no_probe_sees() {
        let all = tell(1).unwrap();
        for pair in all.chunks(2) {
            let (off, on) = (&pair[0], &pair[1]);
            assert!(on.found > 0 && off.found == 0, "{}", off.story);
            assert!(
                on.after_per_min > 1.2 * off.after_per_min,
                "{}\n{}",
                off.story,
                table(&all)
            );
        }
        // All seats end up on the silent worker.
        let (off, on) = (&all[0], &all[1]);
        assert!(
            on.after_per_min > 10.0 * off.after_per_min,
            "{}",
            table(&all)
        );
    }
}
