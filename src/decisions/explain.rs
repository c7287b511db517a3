//! Decisions in words: for the answer's `x-corelane-decision`, and for `/debug/decisions`.

use serde_json::{Map, Value, json};
use shards::Slot;

use super::record::{Decided, Ended};

/// A decision as an object. Workers by slot, and, where `url` gives one, by URL.
pub fn decided_json(decided: &Decided, url: impl Fn(Slot, Option<u32>) -> Option<String>) -> Value {
    let mut told = Map::new();
    let mut put = |name: &str, value: Value| told.insert(name.to_owned(), value);
    put("role", decided.role.label().into());
    put("policy", decided.policy.name().into());
    put("reason", decided.reason_label().into());
    put("attempt", decided.attempt.into());
    put("worker", decided.slot.0.into());
    if let Some(url) = url(decided.slot, Some(decided.incarnation)) {
        put("worker_url", url.into());
    }
    put("load", decided.load.into());
    if let Some(load) = decided.least_load {
        put("least_load", load.into());
    }
    put("candidates", decided.candidate_count.into());
    put("prompt_bytes", decided.prompt_bytes.into());
    put("matched_bytes", decided.matched_bytes.into());
    if let Some(wanted) = decided.given_up {
        let mut shown = json!({
            "worker": wanted.slot.0,
            "load": wanted.load,
            "matched_bytes": wanted.matched_bytes,
        });
        if let Some(url) = url(wanted.slot, None) {
            shown["worker_url"] = url.into();
        }
        put("wanted", shown);
    }
    let held = decided.held().iter();
    let held: Vec<Value> = held
        .map(|held| json!({"worker": held.slot, "matched_bytes": held.bytes, "load": held.load}))
        .collect();
    if !held.is_empty() {
        put("longest_matches", held.into());
    }
    Value::Object(told)
}

/// An end as fields of an object.
pub fn ended_json(ended: &Ended) -> Value {
    let ms = |us: u64| us as f64 / 1e3;
    json!({
        "outcome": ended.outcome.label(),
        "status": ended.status,
        "retries": ended.retries,
        "wait_ms": ms(ended.wait_us),
        "first_byte_ms": ms(ended.first_byte_us),
        "duration_ms": ms(ended.duration_us),
        "request_bytes": ended.request_bytes,
        "answer_bytes": ended.answer_bytes,
    })
}
