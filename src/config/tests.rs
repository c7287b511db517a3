//! Command lines and what they mean: defaults are vllm-router's, mistakes name their flag.

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::*;
use crate::route::PolicyKind;

fn parse(args: &str) -> Result<Config, String> {
    let line = std::iter::once("corelane").chain(args.split_whitespace());
    let cli = Cli::try_parse_from(line).map_err(|error| {
        assert_eq!(error.exit_code(), EXIT_USAGE, "{args}");
        error.to_string()
    })?;
    Config::from_cli(cli).map_err(|error| error.to_string())
}

#[test]
fn clap_finds_no_contradiction_in_the_flags() {
    Cli::command().debug_assert();
}

#[test]
fn more_cores_than_cpus_are_refused_unless_they_may_share() {
    let count = cpu_count() + 1;
    let error = parse(&format!("--cores {count}")).unwrap_err();
    assert!(error.contains("--cores"), "{error}");
    let config = parse(&format!("--cores {count} --cores-share-cpus")).unwrap();
    assert_eq!(config.core_count, count);
}

#[test]
fn defaults_are_those_of_vllm_router_where_not_said_otherwise() {
    let config = parse("").unwrap();
    assert_eq!(config.listen.to_string(), "127.0.0.1:30000");
    assert_eq!(config.metrics_listen.to_string(), "127.0.0.1:29000");
    assert_eq!(config.settings.policy, PolicyKind::CacheAware);
    assert_eq!(
        (
            config.settings.cache_threshold,
            config.settings.balance_rel_threshold
        ),
        (0.3, 1.5)
    );
    assert_eq!(
        (
            config.settings.balance_abs_threshold,
            config.tree_bytes_per_worker_max
        ),
        (64, 33_554_432)
    );
    assert_eq!(
        (config.body_bytes_max, config.request_timeout.as_secs()),
        (536_870_912, 1800)
    );
    assert_eq!(
        (
            config.health.failure_threshold,
            config.health.success_threshold
        ),
        (3, 2)
    );
    assert_eq!(
        (
            config.health.timeout.as_secs(),
            config.health.interval.as_secs()
        ),
        (5, 10)
    );
    assert_eq!(config.retry.retries_max, 5);
    let standing = &config.standing;
    assert_eq!(
        (standing.failure_threshold, standing.success_threshold),
        (10, 3)
    );
    assert_eq!(
        (
            standing.breaker_timeout.as_secs(),
            standing.breaker_window.as_secs()
        ),
        (60, 120)
    );
    assert!(standing.has_breaker);
    assert_eq!(
        config.request_id_headers,
        [
            "x-request-id",
            "x-correlation-id",
            "x-trace-id",
            "request-id"
        ]
    );
    assert!(
        config.workers.is_empty() && config.core_count >= 1 && config.connection_count_max >= 16
    );
}

#[test]
fn bare_flags_serve_as_vllm_router_does() {
    let config =
        parse("--worker-urls http://a:1 http://b:2/ --port 1 --worker-urls http://c:3,http://d:4")
            .unwrap();
    let texts: Vec<&str> = config.workers.iter().map(|w| &**w.url.text()).collect();
    assert_eq!(
        texts,
        ["http://a:1", "http://b:2", "http://c:3", "http://d:4"]
    );
    assert_eq!(config.listen.port(), 1);
    assert!(parse("--worker-urls").unwrap().workers.is_empty());
    assert_eq!(
        parse("--host ::1").unwrap().listen.to_string(),
        "[::1]:30000"
    );
    assert_eq!(
        parse("--host [::1]").unwrap().listen.to_string(),
        "[::1]:30000"
    );
    assert_eq!(
        parse("--host 0.0.0.0").unwrap().listen.to_string(),
        "0.0.0.0:30000"
    );
    assert_eq!(parse("--disable-retries").unwrap().retry.retries_max, 0);
}

/// Every mistake ends with a message that names the flag.
#[test]
fn mistakes_name_their_flag() {
    let table = [
        "--balance-abs-threshold -5",
        "--balance-abs-threshold 1.5",
        "--cache-threshold 1.5",
        "--cache-threshold -0.1",
        "--cache-threshold nan",
        "--common-prefix-threshold 2",
        "--balance-rel-threshold nan",
        "--balance-rel-threshold inf",
        "--balance-rel-threshold 0.5",
        "--max-tree-size lots",
        "--max-tree-size 0",
        "--health-check-interval-secs abc",
        "--health-check-interval-secs 0",
        "--health-check-interval-secs -1",
        "--health-check-endpoint health",
        "--port 70000",
        "--port -1",
        "--cores 0",
        "--cores 1024",
        "--recv-buffer-count 500",
        "--stream-gather-us 10001",
        "--log-level loud",
        "--cb-failure-threshold 0",
        "--cb-window-duration-secs 0",
        "--stall-min-requests 0",
        "--degraded-ratio 1.1",
        "--ejected-share-max nan",
        "--slow-start-secs -1",
        "--policy consistent_hashingg",
        "--policy power_of_two --worker-urls http://a:1",
        "--worker-urls https:a:1",
        "--tls-cert /no/file",
        "--tls-key /no/file",
        "--tls-client-ca /no/file",
        "--tls-ca /no/file",
        "--tls-worker-cert /no/file",
        "--worker-urls http://a:1 http://a:1/",
        "--worker-urls ht!tp:/nonsense url",
        "--retry-max-backoff-ms 10",
        "--retry-backoff-multiplier 0",
        "--request-id-headers a:b",
        "--host no/name",
        "--host name.invalid",
        "--max-payload-size -3",
    ];
    for args in table {
        let flag = args.split_whitespace().next().unwrap();
        let message = parse(args).expect_err(args);
        assert!(message.contains(flag), "{args}: {message}");
    }
}

#[test]
fn an_unknown_policy_lists_the_choices_and_a_bad_url_is_named() {
    let message = parse("--policy round-robbin").unwrap_err();
    for kind in PolicyKind::ALL {
        assert!(message.contains(kind.name()), "{message}");
    }
    let message = parse("--worker-urls http://good:1 https:bad:2").unwrap_err();
    assert!(
        message.contains("https:bad:2") && message.contains("must be http://host"),
        "{message}"
    );
    assert!(parse("--nonsense 1").unwrap_err().contains("--nonsense"));
}

#[test]
fn help_is_grouped_and_names_every_flag_once() {
    let help = Cli::command().render_long_help().to_string();
    let groups = [
        "Listener and workers",
        "TLS",
        "Policy",
        "Reliability",
        "Failing workers",
        "Health",
        "Limits",
        "Observability",
        "Machine",
    ];
    for group in groups {
        assert!(help.contains(&format!("{group}:")), "{group}");
    }
    // What is refused is not offered (`flags_tests.rs`).
    for arg in Cli::command()
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long())
    {
        assert!(help.contains(&format!("--{arg}")), "{arg}");
    }
    let error = Cli::try_parse_from(["corelane", "--help"]).unwrap_err();
    assert_eq!(
        (error.kind(), error.exit_code()),
        (ErrorKind::DisplayHelp, 0)
    );
}

/// Each flag has its variable, named by one rule.
#[test]
fn every_flag_has_its_variable() {
    for arg in Cli::command().get_arguments() {
        let Some(long) = arg
            .get_long()
            .filter(|long| !matches!(*long, "help" | "version"))
        else {
            continue;
        };
        let variable = format!("CORELANE_{}", long.to_uppercase().replace('-', "_"));
        assert_eq!(
            arg.get_env().and_then(|name| name.to_str()),
            Some(variable.as_str())
        );
    }
}

#[test]
fn the_key_shows_nowhere() {
    let config = parse("--api-key sesame").unwrap();
    assert_eq!(config.api_key.as_ref().unwrap().expose(), "sesame");
    assert!(!format!("{config:?}").contains("sesame"));
    let refused = parse("--api-key sesame\u{e4}").unwrap_err();
    assert!(
        refused.contains("--api-key") && !refused.contains("sesame"),
        "{refused}"
    );
}

#[test]
fn subcommands_are_known_and_do_not_mix_with_flags() {
    assert!(matches!(
        Cli::try_parse_from(["corelane", "doctor"]).unwrap().command,
        Some(Command::Doctor)
    ));
    assert!(Cli::try_parse_from(["corelane", "--port", "1", "doctor"]).is_err());
    assert!(Cli::try_parse_from(["corelane", "doktor"]).is_err());
}

#[test]
fn a_router_that_may_be_followed_on_its_port_has_no_grace_unless_it_is_told() {
    let grace_secs = |flags: &[&str]| Config::for_tests(flags).drain_grace().as_secs();
    assert_eq!(grace_secs(&[]), 1);
    assert_eq!(grace_secs(&["--reuse-port"]), 0);
    assert_eq!(grace_secs(&["--reuse-port", "--drain-grace-secs", "3"]), 3);
}

#[test]
fn the_configuration_for_tests_binds_to_free_ports() {
    let config = Config::default_for_tests();
    assert_eq!(
        (
            config.listen.port(),
            config.metrics_listen.port(),
            config.core_count
        ),
        (0, 0, 1)
    );
}

fn pd(line: &[&str]) -> Result<Config, String> {
    let line = [&["--vllm-pd-disaggregation"], line].concat();
    parse(&line.join(" "))
}

#[test]
fn prefill_and_decode_workers_are_read_as_vllm_router_reads_them() {
    let config = pd(&[
        "--prefill http://p1:8000 9000 --prefill http://p2:8000 none http://p3:8000",
        "--decode http://d1:8001 http://d2:8001 --decode http://[::1]:8002",
    ])
    .unwrap();
    let workers: Vec<(&str, Role, Option<u16>)> = config
        .workers
        .iter()
        .map(|w| (&**w.url.text(), w.role, w.bootstrap_port))
        .collect();
    let (p, d) = (Role::Prefill, Role::Decode);
    assert_eq!(
        workers,
        [
            ("http://p1:8000", p, Some(9000)),
            ("http://p2:8000", p, None),
            ("http://p3:8000", p, None),
            ("http://d1:8001", d, None),
            ("http://d2:8001", d, None),
            ("http://[::1]:8002", d, None),
        ]
    );
    assert_eq!(config.pd.unwrap().connector, Connector::Nixl);
}

#[test]
fn what_cannot_be_in_pd_is_refused_with_its_flag() {
    let refused = |line: &str, flag: &str| {
        let error = parse(line).unwrap_err();
        assert!(error.contains(&format!("'--{flag}'")), "{line}: {error}");
    };
    refused("--prefill http://p:1", "prefill");
    refused("--decode http://d:1", "decode");
    let pd = "--vllm-pd-disaggregation";
    refused(&format!("{pd} --prefill 9000 http://p:1"), "prefill");
    refused(&format!("{pd} --prefill http://p:1 99999"), "prefill");
    refused(
        &format!("{pd} --prefill http://p:1 --decode http://p:1"),
        "decode",
    );
    refused(&format!("{pd} --worker-urls http://w:1"), "worker-urls");
    let lonely = "--decode http://d:1 --decode-policy power_of_two";
    refused(&format!("{pd} {lonely}"), "decode-policy");
}

#[test]
fn a_threshold_of_a_role_holds_also_when_its_policy_falls_back_to_that_of_all() {
    let config = pd(&[
        "--policy cache_aware --decode-policy round_robin --balance-abs-threshold 10",
        "--prefill-balance-abs-threshold 3 --prefill-cache-threshold 0.5",
        "--decode-balance-rel-threshold 2.5",
    ])
    .unwrap();
    let prefill = config.settings_of(Role::Prefill);
    assert_eq!(prefill.policy, PolicyKind::CacheAware);
    assert_eq!(prefill.balance_abs_threshold, 3);
    assert_eq!(
        (prefill.cache_threshold, prefill.balance_rel_threshold),
        (0.5, 1.5)
    );
    let decode = config.settings_of(Role::Decode);
    assert_eq!(decode.policy, PolicyKind::RoundRobin);
    assert_eq!(decode.balance_abs_threshold, 10);
    assert_eq!(
        (decode.cache_threshold, decode.balance_rel_threshold),
        (0.3, 2.5)
    );
    let shown = config.public_json();
    assert_eq!(shown["pd"]["prefill"]["balance_abs_threshold"], 3);
    assert_eq!(shown["pd"]["decode"]["policy"], "round_robin");
}

/// Listed one by one, so a new flag is easily forgotten: what is typed must be what is shown.
#[test]
fn the_flags_of_failing_workers_are_shown_as_typed() {
    let config = parse(
        "--cb-failure-threshold 4 --cb-success-threshold 2 --cb-timeout-duration-secs 7 \
         --cb-window-duration-secs 8 --disable-circuit-breaker --stall-window-ms 1500 --stall-min-requests 3 \
         --degraded-ratio 0.25 --degraded-window-secs 9 --degraded-min-requests 6 --ejected-share-max 0.75 \
         --slow-start-secs 0",
    )
    .unwrap();
    let shown = config.public_json();
    let wanted = serde_json::json!({
        "cb_failure_threshold": 4, "cb_success_threshold": 2, "cb_timeout_duration_secs": 7,
        "cb_window_duration_secs": 8, "disable_circuit_breaker": true, "stall_window_ms": 1500,
        "stall_min_requests": 3, "degraded_ratio": 0.25, "degraded_window_secs": 9, "degraded_min_requests": 6,
        "ejected_share_max": 0.75, "slow_start_secs": 0,
    });
    for (name, value) in wanted.as_object().unwrap() {
        assert_eq!(shown.get(name), Some(value), "{name}");
    }
}

#[test]
fn the_policies_that_hash_have_their_flags() {
    let config = parse("").unwrap();
    let settings = config.settings;
    assert_eq!(
        (
            settings.hash_balance_factor,
            settings.prefix_hash_load_factor
        ),
        (0.0, 1.25)
    );
    assert_eq!(
        (settings.prefix_hash_bytes, config.session_ttl_secs),
        (1024, 7200)
    );
    let config = parse(
        "--vllm-pd-disaggregation --policy consistent_hash --decode-policy sticky_least_loaded \
         --hash-balance-factor 1.5 --prefill-hash-balance-factor 2 --sticky-session-ttl-secs 60",
    )
    .unwrap();
    let pd = config.pd.unwrap();
    assert_eq!(
        (pd.prefill.policy, pd.decode.policy),
        (PolicyKind::ConsistentHash, PolicyKind::StickyLeastLoaded)
    );
    assert_eq!(
        (
            pd.prefill.hash_balance_factor,
            pd.decode.hash_balance_factor
        ),
        (2.0, 1.5)
    );
    assert_eq!(config.session_ttl_secs, 60);
    for (args, why) in [
        ("--hash-balance-factor 0.9", "at least 1"),
        ("--prefix-hash-load-factor nan", "at least 1"),
        ("--prefix-token-count 0", "1..="),
        ("--sticky-session-ttl-secs 0", "1..="),
    ] {
        let message = parse(args).expect_err(args);
        let flag = args.split(' ').next().unwrap();
        assert!(message.contains(flag) && message.contains(why), "{message}");
    }
}
