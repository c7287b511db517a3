//! The failure that this router began with, and its fix: vllm-project/router pull request 238 (and NVIDIA-NeMo/Gym 3080 and
//! 3345, which run it): SWE-bench Pro, 4 prefill and 6 decode workers, 1,024 rollouts in parallel.
//!
//! vllm-router 0.1.17 asks whether any worker is much more loaded than any other; if so, nobody gets the worker that holds
//! its prefix. A prefill worker's load counts those who queue, so with a thousand rollouts that is nearly always so; prompts
//! that are cached elsewhere are computed again; that makes the queues longer, and the gate stays open. The pull request asks
//! about the request's own worker instead.
//!
//! # The parameters
//!
//! They are the same for all policies. Those of the first group are published, those of the second follow from what is
//! published by arithmetic. Those of the third are fitted: a search over a coarse model of the prefill workers, then this one.
//! The two published rows are no predictions, then; what follows from the mechanism is their order, and whatever the
//! simulator says of other policies.
//!
//! | parameter | value | why |
//! |---|---|---|
//! | workers, rollouts at a time | 4P/6D, 1,024 | published |
//! | thresholds | 4 and 1.1 | published (Gym 2979, 3345: both arms ran with these) |
//! | decode policy | `least_loaded` | honest counters; which decode worker it is has no part in this |
//! | tokens of all prompts of a rollout | 6.6 M | computed share and tokens: 2.14 M / 0.315 is 6.8 M, 675 k / 0.111 is 6.1 M |
//! | prefill rate, seconds of a request | 111,000 tokens/s, 61 ms | both arms have a queue, so both are saturated: 4 workers x 60 s are 20.9 worker-seconds of a rollout at 11.5 a minute, 10.8 at 22.2; two equations, of which a rollout's fixed part is 4.9 s, over 80 turns |
//! | tool time, decode step | 22 s a turn; 6 ms and 4.7 ns for each token of context | Little: (1,024 - queue) / throughput is 32 min of a rollout outside the prefill queue in one arm, 37 min in the other, where twice as many decode |
//! | turns, growth | 80, 1,740 tokens | fitted. Agents of this kind take 30 to 100 turns (NeMo-RL 3663: 5 to 99, median 29 for easier tasks) |
//! | tool time's deviation | 0.35, of its logarithm | fitted: the wider, the less the two arms differ, as under the rule, too, a prefix is gone when its rollout comes back late |
//! | system prompt | 3,000 tokens | fitted, hardly matters |
//! | KV block, and that a prefix is lost whole | 1,024, yes | the model is a hybrid: a prefix can be taken up only where a state was kept, at its end |
//! | KV capacity | 47 M tokens of each worker | fitted: more than a worker's quarter of all rollouts (22 M), less than all of them (87 M). It settles how much the gate costs |
//!
//! # What comes out
//!
//! The mechanism: where the gate is open the least loaded gets everything, prompts meet a worker again only every fourth turn,
//! copies of everybody push each other out, and the prefill queue grows. `corelane sim swe-bench-pro` says:
//!
//! | | hit % | computed % | tokens/rollout | prefill queue | rollouts/min |
//! |---|---|---|---|---|---|
//! | gate, published | 68.5 | 31.5 | 2.14 M | 653 | 11.5 |
//! | gate, simulated | 72.3 | 27.7 | 1.86 M | 633 | 11.1 |
//! | rule, published | 88.9 | 11.1 | 675 k | 193 | 22.2 |
//! | rule, simulated | 88.7 | 11.3 | 754 k | 203 | 20.2 |
//! | `expected_wait`, simulated | 97.1 | 2.9 | 191 k | 5 | 22.7 |
//!
//! 4,096 rollouts, seed 1: each figure within 15 %, 1.8 times the throughput (seed 2: the same, 771 k and 217 for the rule, 1.79 times). Close by there are two states of the rule's arm,
//! one with a queue and one without: with a KV cache of 46 M tokens and rollouts that begin over 50 minutes it computes 818 k
//! tokens and has a queue of 256. With thresholds of 32 and 1.5, or of 64 and 1.5 (`--sweep`), both arms compute 2.7 %, have a
//! queue of 5 and end 22.7 rollouts a minute.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::engine::Speeds;
use super::policy::{EXPECTED_WAIT, FLEET_GATE};
use super::tally::{Outcome, Window};
use super::workload::{Rollouts, Workload};
use super::world::{Setup, run};
use crate::route::Settings;

/// Rollouts at a time.
pub const SEATS: usize = 1024;
/// The thresholds of both published arms: `--balance-abs-threshold`, `--balance-rel-threshold`.
pub const THRESHOLDS: (u32, f64) = (4, 1.1);
/// The pairs of thresholds that are compared.
pub const SWEEP: [(u32, f64); 3] = [(4, 1.1), (32, 1.5), (64, 1.5)];

/// What was published: hit rate, computed share, prompt tokens computed for each rollout, requests that wait for their
/// prompt, rollouts a minute.
pub const PUBLISHED: [(&str, [f64; 5]); 2] = [
    (FLEET_GATE, [0.685, 0.315, 2_140_000.0, 653.0, 11.5]),
    ("cache_aware", [0.889, 0.111, 675_000.0, 193.0, 22.2]),
];

/// The agents.
pub fn rollouts(count: usize) -> Rollouts {
    Rollouts {
        count,
        seats: SEATS,
        ramp_s: 1200.0,
        system_tokens: 3000,
        task_tokens: 3000.0,
        turns: 80.0,
        turns_sigma: 0.35,
        output_tokens: 400.0,
        output_sigma: 0.8,
        tool_tokens: 1340.0,
        tool_sigma: 1.0,
        tool_s: 22.1,
        tool_s_sigma: 0.35,
        context_tokens_max: 500_000,
        summary_tokens: 4000,
    }
}

/// The workers; prefill and decode workers are of the same kind.
pub fn speeds() -> Speeds {
    Speeds {
        prefill_tokens_per_s: 111_000.0,
        request_s: 0.061_25,
        intake_tokens_per_s: f64::INFINITY,
        step_tokens_max: 4096,
        sequence_count_max: 512,
        decode_step_s: 0.006,
        decode_sequence_s: 0.0,
        decode_context_s: 4.7e-9,
        kv_tokens: 47_000_000,
        kv_block_tokens: 1024,
        is_hybrid: true,
        transfer_tokens_per_s: 1_000_000.0,
        transfer_s: 0.02,
    }
}

/// The fleet, in front of it a policy.
pub fn setup(policy: &str, thresholds: (u32, f64), rollouts: usize, seed: u64) -> Setup {
    let (balance_abs_threshold, balance_rel_threshold) = thresholds;
    Setup {
        decode: vec![speeds(); 6],
        settings: Settings {
            balance_abs_threshold,
            balance_rel_threshold,
            ..Settings::default()
        },
        // While all seats are taken and rollouts of all ages are there.
        window: Window {
            from: SEATS.min(rollouts / 3),
            to: rollouts.saturating_sub(SEATS).max(rollouts * 2 / 3),
        },
        sample_s: 10.0,
        seed,
        ..Setup::plain(4, speeds(), policy)
    }
}

/// Thresholds, absolute and relative, and what came of them.
pub type Sweep = Vec<((u32, f64), Outcome)>;

/// The gate and the rule under other thresholds: ((abs, rel), outcome).
///
/// # Errors
/// None that can happen.
pub fn sweep(workload: &Workload, seed: u64) -> Result<Sweep, String> {
    let count = workload.sessions.len();
    let mut outcomes = Vec::new();
    for thresholds in SWEEP {
        for (policy, _) in PUBLISHED {
            let outcome = run(&setup(policy, thresholds, count, seed), workload)?;
            outcomes.push((thresholds, outcome));
        }
    }
    Ok(outcomes)
}

/// The policies of the experiment.
pub fn policies() -> Vec<String> {
    [FLEET_GATE, "cache_aware", EXPECTED_WAIT]
        .map(String::from)
        .into()
}

/// The figures beside the published ones, and the sweep.
pub fn table(outcomes: &[Outcome], sweep: &[((u32, f64), Outcome)]) -> String {
    let mut text = format!("{:<42}{HEAD}\n", "policy");
    for outcome in outcomes {
        let _ = writeln!(text, "{:<42}{}", outcome.policy, row(figures(outcome)));
        let published = PUBLISHED.iter().find(|(name, _)| *name == outcome.policy);
        if let Some((_, published)) = published {
            let _ = writeln!(text, "{:<42}{}", "  published", row(*published));
        }
    }
    for ((abs, rel), outcome) in sweep {
        let name = format!("{} at {abs} and {rel}", outcome.policy);
        let _ = writeln!(text, "{name:<42}{}", row(figures(outcome)));
    }
    text
}

const HEAD: &str = "  hit %  computed %  tokens/rollout  prefill queue  rollouts/min";

fn row([hit, computed, tokens, queue, rollouts]: [f64; 5]) -> String {
    let (hit, computed) = (hit * 100.0, computed * 100.0);
    format!("{hit:>7.1}{computed:>12.1}{tokens:>16.0}{queue:>15.0}{rollouts:>14.1}")
}

/// The five figures, in the order of [`PUBLISHED`].
pub fn figures(outcome: &Outcome) -> [f64; 5] {
    [
        outcome.hit_rate(),
        1.0 - outcome.hit_rate(),
        outcome.computed_per_session(),
        outcome.queue_depth(),
        outcome.sessions_per_min(),
    ]
}

/// `{"hit_rate", "recomputed_share", "computed_prompt_tokens_per_rollout", "prefill_queue_depth", "rollouts_per_min"}`.
pub fn figures_json(outcome: &Outcome) -> Value {
    let [hit, recomputed, computed, queue, rollouts] = figures(outcome);
    json!({
        "hit_rate": round(hit, 4),
        "recomputed_share": round(recomputed, 4),
        "computed_prompt_tokens_per_rollout": computed.round(),
        "prefill_queue_depth": round(queue, 1),
        "rollouts_per_min": round(rollouts, 2),
    })
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}
