//! The table beside vllm-router's own lists, and beside what clap knows here.

use clap::CommandFactory;

use super::*;
use crate::config::Cli;

/// The flags of `vllm-router --help` (Python, 0.1.17), in its order.
#[rustfmt::skip]
const PYTHON: [&str; 72] = [
    "help", "host", "port", "worker-urls", "enable-program-scheduling", "program-scheduling-config-json", "policy",
    "prefill-policy", "decode-policy", "router-temperature", "kv-penalty-host", "kv-penalty-external", "kv-penalty-disk",
    "kv-aware-session-affinity-ttl-secs", "kv-event-source", "kv-event-replay-source", "kv-event-block-size",
    "kv-event-model", "pd-kv-events", "mini-lb", "vllm-pd-disaggregation", "prefill", "decode",
    "worker-startup-timeout-secs", "worker-startup-check-interval", "cache-threshold", "balance-abs-threshold",
    "balance-rel-threshold", "eviction-interval-secs", "max-tree-size", "max-payload-size", "wasm-middleware",
    "wasm-middleware-sha256", "wasm-middleware-route", "intra-node-data-parallel-size", "enable-igw", "api-key", "log-dir",
    "log-level", "service-discovery", "selector", "service-discovery-port", "service-discovery-namespace",
    "prefill-selector", "decode-selector", "vllm-discovery-address", "kv-connector", "prometheus-port", "prometheus-host",
    "request-id-headers", "request-timeout-secs", "retry-max-retries", "retry-initial-backoff-ms", "retry-max-backoff-ms",
    "retry-backoff-multiplier", "retry-jitter-factor", "disable-retries", "cb-failure-threshold", "cb-success-threshold",
    "cb-timeout-duration-secs", "cb-window-duration-secs", "disable-circuit-breaker", "health-failure-threshold",
    "health-success-threshold", "health-check-timeout-secs", "health-check-interval-secs", "health-check-endpoint",
    "max-concurrent-requests", "queue-size", "queue-timeout-secs", "rate-limit-tokens-per-second", "cors-allowed-origins",
];

/// Those that the Rust binary does not have.
const PYTHON_ALONE: [&str; 5] = [
    "eviction-interval-secs",
    "mini-lb",
    "queue-size",
    "queue-timeout-secs",
    "rate-limit-tokens-per-second",
];

/// Those that it alone has.
#[rustfmt::skip]
const RUST_ALONE: [&str; 13] = [
    "version", "pool-idle-timeout-secs", "eviction-interval", "backend", "runtime", "history-backend", "profile", "epd-config",
    "enable-trace", "otlp-traces-endpoint", "otel-sampling-ratio", "otel-excluded-paths", "api-key-validation-urls",
];

fn names_of(program: Program) -> Vec<&'static str> {
    let has = |flag: &Flag| flag.program == program || flag.program == Program::Both;
    let mut names: Vec<&str> = all().filter(has).map(|flag| flag.name).collect();
    names.sort_unstable();
    names
}

#[test]
fn the_table_has_a_row_for_each_flag_of_both_programs_and_no_other() {
    let mut python = PYTHON.to_vec();
    python.sort_unstable();
    assert_eq!(names_of(Program::Python), python);
    let mut rust: Vec<&str> = PYTHON
        .into_iter()
        .filter(|name| !PYTHON_ALONE.contains(name))
        .collect();
    rust.extend(RUST_ALONE);
    rust.sort_unstable();
    assert_eq!(names_of(Program::Rust), rust);
    assert_eq!(all().count(), rows().count(), "a row cannot be read");
}

#[test]
fn what_is_otherwise_is_said() {
    for flag in all().filter(|flag| flag.verdict != Verdict::Same) {
        let why = why(flag.name);
        assert!(
            !why.is_empty() && !why.starts_with("as --"),
            "{}: {why}",
            flag.name
        );
    }
}

/// Every flag parses, by its name or as another name of one.
#[test]
fn clap_knows_each_flag_of_the_table() {
    let mut command = Cli::command();
    command.build();
    let known: Vec<String> = command
        .get_arguments()
        .flat_map(|arg| {
            let aliases = arg.get_all_aliases().unwrap_or_default();
            arg.get_long()
                .into_iter()
                .chain(aliases)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    let unknown: Vec<&str> = all()
        .map(|flag| flag.name)
        .filter(|name| !known.iter().any(|known| known == name))
        .collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// What is refused is hidden in the help; nothing else is.
#[test]
fn the_help_shows_what_may_be_set() {
    for arg in Cli::command().get_arguments() {
        let verdict = arg.get_long().and_then(find).map(|flag| flag.verdict);
        assert_eq!(
            arg.is_hide_set(),
            verdict == Some(Verdict::Refused),
            "{:?}",
            arg.get_long()
        );
    }
}
