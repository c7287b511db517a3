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
//! published. Those of the third are fitted: of about a dozen sets within what is usual, the one that brings both published
//! rows nearest at the same time was taken. These two rows are no predictions, then; what follows from the mechanism is their
//! order, and whatever the simulator says of other policies.
//!
//! | parameter | value | why |
//! |---|---|---|
//! | workers, rollouts at a time | 4P/6D, 1,024 | published |
//! | thresholds | 4 and 1.1 | published (Gym 2979, 3345: both arms ran with these) |
//! | decode policy | `least_loaded` | honest counters; which decode worker it is has no part in this |
//! | tokens of all prompts of a rollout | 6.4 M | computed share and tokens of both arms: 2.14 M / 0.315 and 675 k / 0.111, their mean |
//! | tokens of answers of a rollout | 30 k | 1,000 tokens/s of each decode worker at 11.5 rollouts/min |
//! | prefill rate, intake | see [`speeds`] | the gate's arm is saturated: 2.14 M x 11.5 / min is 410 k tokens/s for 4 workers; the other arm has a queue of 193 with 250 k, so something else than fresh tokens costs time: each prompt must be tokenised, hashed and looked up whole |
//! | turns, growth | see [`rollouts`] | agents of this kind take 30 to 100 turns (NeMo-RL 3663: 5 to 99, median 29 for easier tasks) |
//! | tool time | see [`rollouts`] | (1,024 - queue) / throughput is 32 and 37 min of a rollout outside the prefill queue, in both arms |
//! | KV block, and that a prefix is lost whole | 1,024, yes | the model is a hybrid: a prefix can be taken up only where a state was kept, at its end |
//! | KV capacity | 46 M tokens of each worker | more than a worker's quarter of all rollouts (24 M), less than all of them (94 M); with the growth of a prompt from turn to turn it settles how much the gate costs |
//!
//! # What comes out
//!
//! The mechanism: under the gate every decision goes to the least loaded, prompts meet a worker again only every fourth turn,
//! copies of everybody push each other out, and the prefill queue grows. With 2,048 rollouts and seed 1:
//!
//! | | hit % | computed % | tokens/rollout | prefill queue | rollouts/min |
//! |---|---|---|---|---|---|
//! | gate, published | 68.5 | 31.5 | 2.14 M | 653 | 11.5 |
//! | gate, simulated | 76.8 | 23.2 | 1.36 M | 448 | 18.6 |
//! | rule, published | 88.9 | 11.1 | 675 k | 193 | 22.2 |
//! | rule, simulated | 87.2 | 12.8 | 748 k | 189 | 26.5 |
//! | `expected_wait`, simulated | 95.4 | 4.6 | 265 k | 5 | 31.4 |
//!
//! So the order and the sign of everything come out, the size of the collapse does not: it costs 1.4 times the throughput here,
//! 1.9 times there. A smaller KV cache brings the gate to its published figures (28 M tokens: 31 %, 2.12 M, 591, 12.7) and the
//! rule away from its own (22 %). No set of parameters that was tried gives both.

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
        system_tokens: 12_000,
        task_tokens: 3000.0,
        turns: 70.0,
        turns_sigma: 0.35,
        output_tokens: 400.0,
        output_sigma: 0.8,
        tool_tokens: 1750.0,
        tool_sigma: 1.0,
        tool_s: 14.5,
        tool_s_sigma: 1.0,
        context_tokens_max: 250_000,
        summary_tokens: 4000,
    }
}

/// The workers; prefill and decode workers are of the same kind.
pub fn speeds() -> Speeds {
    Speeds {
        prefill_tokens_per_s: 140_000.0,
        request_s: 0.0,
        intake_tokens_per_s: 1_800_000.0,
        step_tokens_max: 16_384,
        sequence_count_max: 512,
        decode_step_s: 0.025,
        decode_sequence_s: 0.000_08,
        decode_context_s: 1.0e-9,
        kv_tokens: 46_000_000,
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
