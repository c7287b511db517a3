//! Outcomes as a table, as JSON, as CSV.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::agenda::secs;
use super::tally::Outcome;

/// One line for each policy.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "{:<24} {:>6} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {:>7}\n",
        "policy",
        "hit",
        "computed",
        "requests",
        "output",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "queue",
        "imbalance",
        "failed"
    );
    let _ = writeln!(
        text,
        "{:<24} {:>6} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {:>7}",
        "", "%", "%", "per s", "tokens/s", "s", "s", "ms", "ms", "mean", "max/mean", "",
    );
    for outcome in outcomes {
        let hit = outcome.hit_rate() * 100.0;
        let _ = writeln!(
            text,
            "{:<24} {:>6.1} {:>8.1} {:>9.2} {:>9.0} {:>8.2} {:>8.2} {:>8.1} {:>8.1} {:>7.1} {:>9.2} {:>7}",
            outcome.policy,
            hit,
            100.0 - hit,
            outcome.requests_per_s(),
            outcome.output_per_s(),
            outcome.first_quantile(0.5),
            outcome.first_quantile(0.99),
            outcome.step_quantile(0.5) * 1e3,
            outcome.step_quantile(0.99) * 1e3,
            outcome.queue_depth(),
            outcome.imbalance,
            outcome.failed,
        );
    }
    text
}

/// All there is to say of a run, but for its series.
pub fn json_of(outcome: &Outcome) -> Value {
    let worker = |worker: &super::tally::WorkerSums| {
        json!({
            "chosen": worker.chosen,
            "prompt_tokens": worker.prompt_tokens,
            "cached_tokens": worker.cached_tokens,
            "evicted_blocks": worker.evicted,
            "busy_share": secs(worker.busy) / secs(outcome.whole).max(1e-9),
        })
    };
    let pools = outcome.workers.iter();
    let pools: Vec<Vec<Value>> = pools
        .map(|pool| pool.iter().map(worker).collect())
        .collect();
    let quantiles =
        |of: &dyn Fn(f64) -> f64| json!({"p50": of(0.5), "p90": of(0.9), "p99": of(0.99)});
    json!({
        "window_s": secs(outcome.window),
        "completion_s": secs(outcome.whole),
        "sessions": outcome.sessions,
        "requests": outcome.requests,
        "failed": outcome.failed,
        "resent": outcome.resent,
        "hit_rate": outcome.hit_rate(),
        "recomputed_share": 1.0 - outcome.hit_rate(),
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "requests_per_s": outcome.requests_per_s(),
        "output_tokens_per_s": outcome.output_per_s(),
        "sessions_per_min": outcome.sessions_per_min(),
        "prefill_queue_depth": outcome.queue_depth(),
        "imbalance": outcome.imbalance,
        "ttft_s": quantiles(&|q| outcome.first_quantile(q)),
        "itl_s": quantiles(&|q| outcome.step_quantile(q)),
        "decisions": outcome.reasons,
        "workers": pools,
    })
}

/// The series: a line for each time, policy, pool and worker.
pub fn csv(outcomes: &[Outcome]) -> String {
    let mut text =
        "policy,seconds,pool,worker,in_flight,computed_tokens_per_s,kv_usage\n".to_string();
    for outcome in outcomes {
        for (at, pools) in &outcome.series {
            for (pool, points) in pools.iter().enumerate() {
                for (worker, point) in points.iter().enumerate() {
                    let _ = writeln!(
                        text,
                        "{},{},{pool},{worker},{},{:.0},{:.4}",
                        outcome.policy,
                        secs(*at),
                        point.in_flight,
                        point.computed_per_s,
                        point.kv_usage,
                    );
                }
            }
        }
    }
    text
}
