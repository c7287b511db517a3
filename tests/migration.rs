//! Command lines of vllm-router 0.1.17 as people start it, and what each means here: the program's name changes and nothing else.

mod common;

use std::process::Command;

use common::process;

use corelane::config::{Config, Source};
use corelane::route::Role;
use serde_json::{Value, json};

/// A command line without the program's name, and what must be in force; what is not named may be anything. `workers` are role, URL
/// and bootstrap port. `notices` are the flags of which the start says that they have no effect; without it there is none.
type Row = (&'static str, &'static str);

#[rustfmt::skip]
const ROWS: [Row; 45] = [
    // ---- plain ----
    ("", r#"{"listen": "127.0.0.1:30000", "prometheus": "127.0.0.1:29000", "policy": "cache_aware", "cache_threshold": 0.3,
        "balance_abs_threshold": 64, "balance_rel_threshold": 1.5, "max_tree_size": 33554432, "max_payload_size": 536870912,
        "request_timeout_secs": 1800, "retry_max_retries": 5, "cb_failure_threshold": 10, "cb_success_threshold": 3,
        "cb_timeout_duration_secs": 60, "cb_window_duration_secs": 120, "health_failure_threshold": 3,
        "health_success_threshold": 2, "health_check_timeout_secs": 5, "health_check_endpoint": "/health",
        "max_concurrent_requests": 32768, "queue_size": 100, "queue_timeout_secs": 60, "intra_node_data_parallel_size": 1,
        "log_level": "info", "api_key_set": false, "cors_allowed_origins": [], "pool_idle_timeout_secs": 2, "pd": null,
        "rate_limit_tokens_per_second": null, "sticky_session_ttl_secs": 7200,
        "request_id_headers": ["x-request-id", "x-correlation-id", "x-trace-id", "request-id"], "workers": []}"#),
    ("--worker-urls http://worker1:8000 http://worker2:8000",
        r#"{"workers": ["regular http://worker1:8000", "regular http://worker2:8000"]}"#),
    ("--host 0.0.0.0 --port 8080 --worker-urls http://10.0.0.1:8000",
        r#"{"listen": "0.0.0.0:8080", "workers": ["regular http://10.0.0.1:8000"]}"#),
    ("--host [::1] --port 8080 --prometheus-host 0.0.0.0 --prometheus-port 9090",
        r#"{"listen": "[::1]:8080", "prometheus": "0.0.0.0:9090"}"#),
    ("--worker-urls https://gpu.example:8443/prefix",
        r#"{"workers": ["regular https://gpu.example:8443/prefix"]}"#),
    ("--worker-urls http://w:8000 --pool-idle-timeout-secs 0", r#"{"pool_idle_timeout_secs": 0}"#),
    // ---- policies and thresholds ----
    ("--worker-urls http://a:1 http://b:1 --policy round_robin", r#"{"policy": "round_robin"}"#),
    ("--policy random --worker-urls http://a:1", r#"{"policy": "random"}"#),
    ("--policy power_of_two --worker-urls http://a:1 http://b:1", r#"{"policy": "power_of_two"}"#),
    ("--policy power_of_two --worker-urls http://a:1", r#"{"error": "'--policy': power_of_two needs at least 2 workers"}"#),
    ("--policy cache_aware --cache-threshold 0.5 --balance-abs-threshold 32 --balance-rel-threshold 1.1 --max-tree-size 67108864 \
      --eviction-interval-secs 60",
        r#"{"policy": "cache_aware", "cache_threshold": 0.5, "balance_abs_threshold": 32, "balance_rel_threshold": 1.1,
        "max_tree_size": 67108864, "notices": ["eviction-interval-secs"]}"#),
    ("--cache-threshold 0.5 --eviction-interval 30", r#"{"cache_threshold": 0.5, "notices": ["eviction-interval-secs"]}"#),
    ("--policy consistent_hash --worker-urls http://a:1 http://b:1",
        r#"{"policy": "consistent_hash", "hash_balance_factor": 0.0}"#),
    ("--policy rendezvous_hash --worker-urls http://a:1 http://b:1", r#"{"policy": "rendezvous_hash"}"#),
    ("--policy sticky_least_loaded --worker-urls http://a:1 http://b:1",
        r#"{"policy": "sticky_least_loaded", "sticky_session_ttl_secs": 7200}"#),
    // ---- kv_aware ----
    ("--policy kv_aware --worker-urls http://a:8000 http://b:8000 --kv-event-source http://a:8000=tcp://a:5557 \
      --kv-event-source http://b:8000=tcp://b:5557 --kv-event-replay-source http://a:8000=tcp://a:5558 --kv-event-block-size 32 \
      --kv-event-model my-model",
        r#"{"policy": "kv_aware", "kv": {"event_sources": 2, "event_block_size": 32, "event_model": "my-model"}}"#),
    ("--policy kv_aware --worker-urls http://a:8000 --kv-event-source http://a:8000=tcp://a:5557,tcp://a:5558 \
      --router-temperature 0.5 --kv-penalty-host 0.7 --kv-penalty-external 0.5 --kv-penalty-disk 0.2 \
      --kv-aware-session-affinity-ttl-secs 600",
        r#"{"kv": {"event_sources": 2, "router_temperature": 0.5, "penalty_host": 0.7, "penalty_external": 0.5,
        "penalty_disk": 0.2, "session_affinity_ttl_secs": 600}}"#),
    ("--kv-event-block-size 32", r#"{"policy": "cache_aware", "notices": ["kv-event-block-size"]}"#),
    // ---- Kubernetes ----
    ("--service-discovery --selector app=vllm tier=gpu --service-discovery-namespace inference --service-discovery-port 8000",
        r#"{"workers": [], "discovery": {"kubernetes": {"namespace": "inference", "port": 8000,
        "selectors": {"regular": "app=vllm,tier=gpu"}}}}"#),
    ("--vllm-pd-disaggregation --service-discovery --prefill-selector app=vllm role=prefill --decode-selector app=vllm role=decode",
        r#"{"discovery": {"kubernetes": {"namespace": null, "selectors": {"prefill": "app=vllm,role=prefill",
        "decode": "app=vllm,role=decode"}}}}"#),
    // ---- prefill/decode ----
    ("--vllm-pd-disaggregation --prefill http://prefill1:8000 9000 --prefill http://prefill2:8000 \
      --decode http://decode1:8001 --decode http://decode2:8001 --policy cache_aware",
        r#"{"workers": ["prefill http://prefill1:8000 9000", "prefill http://prefill2:8000", "decode http://decode1:8001",
        "decode http://decode2:8001"], "pd": {"kv_connector": "nixl", "prefill": {"policy": "cache_aware"},
        "decode": {"policy": "cache_aware"}}}"#),
    ("--vllm-pd-disaggregation --prefill http://p1:8000 9000 --prefill http://p2:8000 none --prefill http://p3:8000 \
      --decode http://d1:8001",
        r#"{"workers": ["prefill http://p1:8000 9000", "prefill http://p2:8000", "prefill http://p3:8000",
        "decode http://d1:8001"]}"#),
    ("--vllm-pd-disaggregation --prefill http://p1:8000 --prefill http://p2:8000 --decode http://d1:8001 --decode http://d2:8001 \
      --prefill-policy cache_aware --decode-policy power_of_two",
        r#"{"pd": {"prefill": {"policy": "cache_aware"}, "decode": {"policy": "power_of_two"}}}"#),
    ("--vllm-pd-disaggregation --policy consistent_hash --prefill http://p1:8000 --decode http://d1:8001",
        r#"{"pd": {"prefill": {"policy": "consistent_hash"}, "decode": {"policy": "consistent_hash"}}}"#),
    ("--vllm-pd-disaggregation --policy round_robin --vllm-discovery-address 0.0.0.0:30001",
        r#"{"workers": [], "pd": {"vllm_discovery_address": "0.0.0.0:30001", "prefill": {"policy": "round_robin"}}}"#),
    ("--vllm-pd-disaggregation --kv-connector mooncake --prefill http://p1:8000 8998 --decode http://d1:8001",
        r#"{"workers": ["prefill http://p1:8000 8998", "decode http://d1:8001"], "pd": {"kv_connector": "mooncake"}}"#),
    ("--vllm-pd-disaggregation --kv-connector moriio --vllm-discovery-address 0.0.0.0:36367 --policy round_robin",
        r#"{"pd": {"kv_connector": "moriio", "vllm_discovery_address": "0.0.0.0:36367"}}"#),
    ("--vllm-pd-disaggregation --prefill-policy kv_aware --prefill http://p1:8000 --decode http://d1:8001 \
      --pd-kv-events http://p1:8000=tcp://p1:5557",
        r#"{"pd": {"prefill": {"policy": "kv_aware"}, "decode": {"policy": "cache_aware"}}, "kv": {"event_sources": 1,
        "event_block_size": 16}}"#),
    ("--prefill http://p1:8000 --decode http://d1:8001", r#"{"error": "'--prefill': needs --vllm-pd-disaggregation"}"#),
    // ---- data parallel ----
    ("--worker-urls http://a:8000 http://b:8000 --intra-node-data-parallel-size 8 --api-key secret",
        r#"{"intra_node_data_parallel_size": 8, "api_key_set": true, "workers": ["regular http://a:8000",
        "regular http://b:8000"]}"#),
    ("--vllm-pd-disaggregation --policy consistent_hash --intra-node-data-parallel-size 4 --prefill http://p:8000 \
      --decode http://d:8000", r#"{"intra_node_data_parallel_size": 4}"#),
    // ---- reliability ----
    ("--worker-urls http://a:1 --disable-retries --disable-circuit-breaker",
        r#"{"retry_max_retries": 0, "disable_circuit_breaker": true}"#),
    ("--retry-max-retries 3 --retry-initial-backoff-ms 100 --retry-max-backoff-ms 10000 --retry-backoff-multiplier 2.0 \
      --retry-jitter-factor 0.1",
        r#"{"retry_max_retries": 3, "notices": ["retry-initial-backoff-ms", "retry-max-backoff-ms", "retry-backoff-multiplier",
        "retry-jitter-factor"]}"#),
    ("--cb-failure-threshold 5 --cb-success-threshold 2 --cb-timeout-duration-secs 30 --cb-window-duration-secs 60",
        r#"{"cb_failure_threshold": 5, "cb_success_threshold": 2, "cb_timeout_duration_secs": 30,
        "cb_window_duration_secs": 60, "disable_circuit_breaker": false}"#),
    ("--health-failure-threshold 2 --health-success-threshold 1 --health-check-timeout-secs 3 --health-check-interval-secs 30 \
      --health-check-endpoint /ping",
        r#"{"health_failure_threshold": 2, "health_success_threshold": 1, "health_check_timeout_secs": 3,
        "health_check_interval_secs": 30, "health_check_endpoint": "/ping"}"#),
    ("--worker-startup-timeout-secs 1200 --worker-startup-check-interval 10 --request-timeout-secs 3600",
        r#"{"worker_startup_timeout_secs": 1200, "worker_startup_check_interval": 10, "request_timeout_secs": 3600,
        "first_byte_timeout_secs": 3600, "stream_idle_timeout_secs": 3600}"#),
    // ---- admission ----
    ("--max-concurrent-requests 512 --queue-size 2048 --queue-timeout-secs 120 --max-payload-size 1048576",
        r#"{"max_concurrent_requests": 512, "queue_size": 2048, "queue_timeout_secs": 120, "max_payload_size": 1048576}"#),
    ("--max-concurrent-requests 64 --rate-limit-tokens-per-second 10 --queue-size 0",
        r#"{"max_concurrent_requests": 64, "rate_limit_tokens_per_second": 10, "queue_size": 0}"#),
    // ---- keys, pages, logs, models ----
    ("--worker-urls http://a:1 --api-key sk-abc --cors-allowed-origins http://localhost:3000 https://example.com",
        r#"{"api_key_set": true, "cors_allowed_origins": ["http://localhost:3000", "https://example.com"]}"#),
    ("--log-level warning --log-dir /var/log/router --request-id-headers x-request-id X-Trace-Id",
        r#"{"log_level": "warn", "log_dir": "/var/log/router", "request_id_headers": ["x-request-id", "x-trace-id"]}"#),
    ("--enable-igw --log-level critical --backend vllm --history-backend none",
        r#"{"log_level": "error", "notices": ["enable-igw", "backend", "history-backend"]}"#),
    ("--enable-trace --otlp-traces-endpoint collector:4317 --otel-sampling-ratio 0.1 --otel-excluded-paths /health /readiness",
        r#"{"notices": ["enable-trace", "otlp-traces-endpoint", "otel-sampling-ratio", "otel-excluded-paths"]}"#),
    // ---- what would change what clients get ----
    ("--mini-lb --vllm-pd-disaggregation --prefill http://p:1 --decode http://d:1",
        r#"{"error": "vllm-router's '--mini-lb': its protocol is SGLang's"}"#),
    ("--worker-urls http://a:1 --wasm-middleware /etc/router/filter.wasm --wasm-middleware-route /v1/completions",
        r#"{"error": "'--wasm-middleware': no WASM is run here"}"#),
    ("--worker-urls http://a:1 --api-key-validation-urls https://auth.example/check",
        r#"{"error": "'--api-key-validation-urls': keys are not asked for elsewhere"}"#),
];

/// What is in force with a line, or why it cannot be.
fn effective(line: &str) -> Value {
    let typed = ["corelane"].into_iter().chain(line.split_whitespace());
    let loaded = match Source::new(typed).map(|source| source.load()) {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(e)) => return json!({"error": e.to_string()}),
        Err(e) => return json!({"error": e.to_string()}),
    };
    let mut found = loaded.config.public_json();
    found["workers"] = workers(&loaded.config);
    // That one is of the environment, not of the line.
    let notices = loaded
        .notices
        .into_iter()
        .map(|notice| notice.flag)
        .filter(|flag| flag != "api-key");
    found["notices"] = notices.collect::<Vec<String>>().into();
    found
}

fn workers(config: &Config) -> Value {
    let shown = config.workers.iter().map(|worker| {
        let role = match worker.role {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        let port = worker
            .bootstrap_port
            .map_or(String::new(), |port| format!(" {port}"));
        format!("{role} {}{port}", worker.url)
    });
    shown.collect::<Vec<String>>().into()
}

fn compare(line: &str, place: &str, wanted: &Value, found: &Value) {
    match (wanted, found) {
        (Value::Object(wanted), found) => {
            for (name, wanted) in wanted {
                compare(line, &format!("{place}.{name}"), wanted, &found[name]);
            }
        }
        (Value::String(wanted), Value::String(found)) if place == ".error" => {
            assert!(found.contains(wanted.as_str()), "{line}: {found}");
        }
        (wanted, found) => assert_eq!(wanted, found, "{line}: {place}"),
    }
}

#[test]
fn each_command_line_means_what_it_meant() {
    for (line, wanted) in ROWS {
        let mut wanted: Value =
            serde_json::from_str(wanted).unwrap_or_else(|e| panic!("{line}: {e}"));
        let found = effective(line);
        if wanted.get("error").is_none() {
            assert!(found.get("error").is_none(), "{line}: {}", found["error"]);
            let fields = wanted.as_object_mut().expect("an object");
            fields.entry("notices").or_insert_with(|| json!([]));
        }
        compare(line, "", &wanted, &found);
    }
}

fn corelane(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_corelane"))
        .args(args)
        .output()
        .expect("it runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

#[test]
fn check_config_says_what_would_hold_or_what_cannot_be() {
    let (code, out, err) = corelane(&[
        "check-config",
        "--port",
        "8080",
        "--enable-igw",
        "--retry-jitter-factor",
        "0.3",
    ]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("port = 8080  # command line\n"), "{out}");
    assert!(
        out.contains("policy = \"cache_aware\"  # default\n"),
        "{out}"
    );
    assert_eq!(
        err.lines()
            .filter(|line| line.starts_with("warning: --"))
            .count(),
        2,
        "{err}"
    );

    for (args, wanted) in [
        (&["check-config", "--port", "99999"][..], "--port"),
        (&["check-config", "--nonsense"], "--nonsense"),
        (&["check-config", "--mini-lb"], "--mini-lb"),
        (&["check-config", "--prefill", "http://p:1"], "--prefill"),
        (
            &["check-config", "--config", "/no/file.toml"],
            "/no/file.toml",
        ),
    ] {
        let (code, out, err) = corelane(args);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{args:?}: {err}");
        assert!(
            err.starts_with("error: ") && err.contains(wanted),
            "{args:?}: {err}"
        );
    }
    let file = std::env::temp_dir().join(format!("corelane-migration-{}.toml", std::process::id()));
    std::fs::write(&file, "port = 8080\ncache-threshold = 7\n").unwrap();
    let path = file.to_str().unwrap();
    let (code, _, err) = corelane(&["check-config", "--config", path]);
    assert_eq!(code, Some(1));
    assert!(
        err.contains(&format!("{path}, line 2: key 'cache-threshold'")),
        "{err}"
    );
    std::fs::write(&file, "port = 8080\n").unwrap();
    let (_, out, _) = corelane(&["check-config", "--config", path]);
    let _ = std::fs::remove_file(&file);
    assert!(out.contains("port = 8080  # file\n"), "{out}");
}

#[test]
fn config_from_args_takes_a_command_line_as_it_was_typed() {
    let (code, out, err) = corelane(&[
        "config-from-args",
        "vllm-router",
        "--worker-urls",
        "http://a:1",
        "http://b:1",
        "--policy",
        "round_robin",
    ]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(
        out,
        "worker-urls = [\"http://a:1\", \"http://b:1\"]\npolicy = \"round_robin\"\n"
    );
    let (code, out, err) = corelane(&["config-from-args", "--nonsense"]);
    assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
}

/// What has no effect is said at start, and what is said is in the log's file of the day too.
#[tokio::test]
async fn the_start_says_what_has_no_effect_and_the_log_has_a_file_in_its_directory() {
    let directory = std::env::temp_dir().join(format!("corelane-log-{}", std::process::id()));
    let mut command = process::corelane(&["--port", "0", "--prometheus-port", "0", "--enable-igw"]);
    command.arg("--log-dir").arg(&directory);
    let mut router = process::RouterProcess::start(command);
    assert_eq!(router.logged("enable-igw").len(), 1);
    assert!(
        router
            .logged("WARN")
            .iter()
            .any(|line| line.contains("no effect"))
    );
    router.signal("TERM");
    let code = router.process.0.wait().expect("it ends");
    assert!(code.success());
    let files: Vec<_> = std::fs::read_dir(&directory)
        .unwrap()
        .map(|file| file.unwrap())
        .collect();
    let names: Vec<String> = files
        .iter()
        .map(|file| file.file_name().into_string().unwrap())
        .collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(
        names[0].starts_with("corelane.20") && names[0].ends_with(".log"),
        "{names:?}"
    );
    let text = std::fs::read_to_string(files[0].path()).unwrap();
    std::fs::remove_dir_all(&directory).unwrap();
    for wanted in ["enable-igw", "listening"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours in a file");
}
