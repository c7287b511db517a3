//! The config file of the real binary, and its reload by SIGHUP and `POST /reload`.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::process::*;
use common::{File, Worker, until, until_equal};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// The test under load: how long, how many streams at a time, and of what.
const SECONDS: u64 = 60;
const STREAMS: usize = 1_000;
const TOKENS: usize = 12;
const GAP_MS: &str = "500";

/// A router with this file, on free ports.
fn router(file: &File, flags: &[&str]) -> RouterProcess {
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0"]);
    command.args(["--config", file.path()]).args(flags);
    RouterProcess::start(command)
}

fn list(urls: &[&String]) -> String {
    format!("worker-urls = {urls:?}\n")
}

async fn registered(router: &RouterProcess) -> Value {
    router.get("/list_workers").await.1["urls"].clone()
}

async fn setting(router: &RouterProcess, name: &str) -> Value {
    router.get("/get_server_info").await.1["settings"][name].clone()
}

async fn counts(router: &RouterProcess) -> (f64, f64, f64) {
    (
        router
            .series("corelane_config_reloads_total{result=\"ok\"}")
            .await,
        router
            .series("corelane_config_reloads_total{result=\"refused\"}")
            .await,
        router.series("corelane_config_last_reload_success").await,
    )
}

async fn until_counts_are(router: &RouterProcess, wanted: (f64, f64, f64)) {
    until_equal(Duration::from_secs(10), wanted, async || {
        counts(router).await
    })
    .await;
}

/// What the file says the `n`-th time: policy, thresholds, log level and one worker change.
fn turn(n: usize, urls: &[String]) -> (&'static str, Vec<&String>, String) {
    let policy = ["cache_aware", "least_loaded", "round_robin", "random"][n % 4];
    let level = ["info", "debug", "warn"][n % 3];
    let urls: Vec<&String> = urls.iter().take(urls.len() - n % 2).collect();
    let text = format!(
        "policy = \"{policy}\"\nlog-level = \"{level}\"\nbalance-abs-threshold = {}\ncache_threshold = 0.{}\n\
         retry-max-retries = {}\nhealth-check-interval-secs = {}\nstall_window_ms = {}\n{}",
        1 + n,
        n % 10,
        1 + n % 5,
        1 + n % 7,
        3000 + n,
        list(&urls)
    );
    (policy, urls, text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reloads_each_second_break_none_of_a_thousand_streams() {
    corelane::ring::raise_descriptor_limit();
    let (_workers, urls) = mock_workers(4, GAP_MS);
    let file = File::new(&turn(0, &urls).2);
    let router = router(&file, &["--max-connections", "4000"]);
    router.until_healthy().await;

    let is_over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for n in 0..STREAMS {
        let (is_over, address) = (is_over.clone(), router.address);
        clients.spawn(async move {
            // Spread out, so that each reload meets streams of every age.
            tokio::time::sleep(Duration::from_millis((n * 6) as u64)).await;
            let mut count = 0;
            while !is_over.load(Ordering::Relaxed) {
                let events = stream(n, connect(n, address).await, TOKENS).await;
                assert!(events >= TOKENS, "stream {n} had {events} events");
                count += 1;
            }
            count
        });
    }
    let began = Instant::now();
    let mut n = 0;
    while began.elapsed() < Duration::from_secs(SECONDS) {
        n += 1;
        let (policy, wanted, text) = turn(n, &urls);
        file.write(&text);
        if n % 2 == 0 {
            router.signal("HUP");
        } else {
            let (status, answer) = router.ask("POST", "/reload").await;
            assert_eq!((status, &answer["status"]), (200, &json!("ok")), "{answer}");
            let changed = answer["changed"].to_string();
            for key in [
                "policy",
                "log-level",
                "balance-abs-threshold",
                "worker-urls",
            ] {
                assert!(changed.contains(key), "{key}: {changed}");
            }
        }
        until_counts_are(&router, (n as f64, 0.0, 1.0)).await;
        assert_eq!(setting(&router, "policy").await, policy);
        assert_eq!(registered(&router).await, json!(wanted));
        let next = began + Duration::from_secs(n as u64);
        tokio::time::sleep_until(next.into()).await;
    }
    is_over.store(true, Ordering::Relaxed);
    let mut stream_count = 0;
    while let Some(count) = clients.join_next().await {
        stream_count += count.expect("no stream is broken");
    }
    println!("{n} reloads, {stream_count} streams");
    assert!(n >= SECONDS as usize / 2, "only {n} reloads");
    assert!(stream_count >= STREAMS, "only {stream_count} streams");
    router.until_load_is(0, Duration::from_secs(10)).await;
    assert_eq!(router.series("corelane_books_underflow_total").await, 0.0);
    assert_eq!(router.logged("configuration reloaded").len(), n);
}

#[tokio::test]
async fn a_bad_file_keeps_the_old_state_and_says_why() {
    let (_workers, urls) = mock_workers(1, "1");
    let good = format!(
        "policy = \"random\"\napi-key = \"sesame\"\n{}",
        list(&[&urls[0]])
    );
    let file = File::new(&good);
    let router = router(&file, &[]);
    router.until_healthy().await;
    let mut refused = 0.0;
    for (text, code, why) in [
        (
            "policy = \"randm\"",
            "invalid_config",
            "line 1: key 'policy': invalid value 'randm'",
        ),
        (
            "\npolcy = 1",
            "invalid_config",
            "line 2: unknown key 'polcy'",
        ),
        ("policy = ", "invalid_config", "line 1: not TOML"),
        (
            "api-key = \"sesame\u{e4}\"",
            "invalid_config",
            "line 1: key 'api-key'",
        ),
        (
            "policy = \"least_loaded\"\nmax-tree-size = 9\nrecv-buffer-count = 64",
            "needs_restart",
            "needs a restart: recv-buffer-count, max-tree-size",
        ),
    ] {
        file.write(text);
        let (status, answer) = router.ask("POST", "/reload").await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (400, &json!(code)),
            "{answer}"
        );
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
        router.signal("HUP");
        refused += 2.0;
        until_counts_are(&router, (0.0, refused, 0.0)).await;
        until("the log says why, twice", || router.logged(why).len() == 2).await;
        assert_eq!(setting(&router, "policy").await, "random");
        assert_eq!(registered(&router).await, json!(urls));
    }
    assert!(router.logged("sesame").is_empty());
    file.write(&good.replace("random", "round_robin"));
    let (status, answer) = router.ask("POST", "/reload").await;
    assert_eq!(status, 200);
    let nothing: [&str; 0] = [];
    assert_eq!(
        answer,
        json!({"status": "ok", "changed": ["policy"], "workers_added": nothing, "workers_removed": nothing})
    );
    assert_eq!(setting(&router, "policy").await, "round_robin");
    until_counts_are(&router, (1.0, refused, 1.0)).await;
    assert_eq!(router.ask("GET", "/reload").await.0, 405);
}

#[tokio::test]
async fn without_a_file_there_is_nothing_to_reload_and_sighup_ends_nothing() {
    let router = RouterProcess::start(corelane(&["--port", "0", "--prometheus-port", "0"]));
    router.signal("HUP");
    until("the log says so", || {
        router.logged("nothing to reload").len() == 1
    })
    .await;
    let (status, answer) = router.ask("POST", "/reload").await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("no_config_file"))
    );
    assert_eq!(router.get("/liveness").await.0, 200);
    assert_eq!(counts(&router).await, (0.0, 0.0, 1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_worker_that_is_listed_no_more_drains_and_its_streams_end_complete() {
    let (_workers, urls) = mock_workers(2, "100");
    let all: Vec<&String> = urls.iter().collect();
    let policy = "policy = \"round_robin\"\n";
    let file = File::new(&format!("{policy}{}", list(&all)));
    // Each core takes turns for itself: with one the numbers are certain.
    let router = router(&file, &["--cores", "1"]);
    router.until_healthy().await;
    let mut streams = JoinSet::new();
    for n in 0..40 {
        streams.spawn(stream(n, connect(n, router.address).await, 30));
    }
    router.until_load_is(40, Duration::from_secs(10)).await;
    file.write(&format!("{policy}{}", list(&all[..1])));
    let (status, answer) = router.ask("POST", "/reload").await;
    assert_eq!(
        (status, &answer["workers_removed"]),
        (200, &json!([urls[1]])),
        "{answer}"
    );
    let (_, workers) = router.get("/workers").await;
    assert_eq!(workers["total"], 1);
    assert_eq!(workers["draining"][0]["url"], urls[1]);
    assert_eq!(workers["draining"][0]["load"], 20);
    // Nothing new goes there.
    for n in 0..10 {
        streams.spawn(stream(n, connect(n, router.address).await, 1));
    }
    while let Some(events) = streams.join_next().await {
        events.expect("each stream ends complete");
    }
    router.until_load_is(0, Duration::from_secs(10)).await;
    let chosen = |url: &str| format!("vllm_router_processed_requests_total{{worker=\"{url}\"}}");
    assert_eq!(router.series(&chosen(&urls[0])).await, 30.0);
}

/// The reload changes the file's workers only, and by the difference of two lists.
#[tokio::test]
async fn workers_of_operators_stay_and_those_they_removed_stay_away() {
    let (_workers, urls) = mock_workers(3, "1");
    let [a, b, c] = &urls[..] else { unreachable!() };
    let file = File::new(&list(&[a, b]));
    let router = router(&file, &[]);
    router.until_healthy().await;
    for path in ["/remove_worker?url=", "/add_worker?url="]
        .into_iter()
        .zip([b, c])
    {
        let status = router.ask("POST", &format!("{}{}", path.0, path.1)).await.0;
        assert_eq!(status, 200, "{path:?}");
    }
    let nobody: Vec<&String> = Vec::new();
    for (text, added, removed, there) in [
        (
            "policy = \"random\"\n".to_owned() + &list(&[a, b]),
            vec![],
            vec![],
            vec![a, c],
        ),
        (list(&[a]), vec![], vec![], vec![a, c]),
        (list(&[a, b]), vec![b], vec![], vec![a, c, b]),
        // Listed now, it is the file's.
        (list(&[a, b, c]), vec![], vec![], vec![a, c, b]),
        (list(&[b]), vec![], vec![a, c], vec![b]),
        (String::new(), nobody.clone(), vec![b], nobody),
    ] {
        file.write(&text);
        let (status, answer) = router.ask("POST", "/reload").await;
        assert_eq!(status, 200, "{text}: {answer}");
        assert_eq!(
            (&answer["workers_added"], &answer["workers_removed"]),
            (&json!(added), &json!(removed)),
            "{text}"
        );
        assert_eq!(registered(&router).await, json!(there), "{text}");
    }
}

/// Also at a reload: what is given elsewhere is not the file's to change.
#[tokio::test]
async fn the_command_line_wins_over_the_environment_and_that_over_the_file() {
    let text = |policy| {
        format!(
            "policy = \"{policy}\"\nretry-max-retries = 3\nslow-start-secs = 4\nconnect-timeout-ms = 500\n"
        )
    };
    let file = File::new(&text("random"));
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0"]);
    command.args(["--retry-max-retries", "1"]);
    command
        .env("CORELANE_CONFIG", file.path())
        .env("CORELANE_POLICY", "round_robin")
        .env("CORELANE_RETRY_MAX_RETRIES", "2");
    let router = RouterProcess::start(command);
    let names = [
        "policy",
        "retry_max_retries",
        "slow_start_secs",
        "connect_timeout_ms",
        "max_payload_size",
    ];
    let wanted = [
        json!("round_robin"),
        json!(1),
        json!(4),
        json!(500),
        json!(536_870_912),
    ];
    for text in [text("random"), text("least_loaded")] {
        file.write(&text);
        let (status, answer) = router.ask("POST", "/reload").await;
        assert_eq!(
            (status, &answer["changed"]),
            (200, &Value::Array(Vec::new())),
            "{answer}"
        );
        for (name, wanted) in names.iter().zip(&wanted) {
            assert_eq!(setting(&router, name).await, *wanted, "{name}");
        }
    }
}

/// A task that sleeps for an hour between two probes, and a tracker with its thresholds, take the new ones.
#[tokio::test]
async fn probes_follow_the_new_rhythm_and_thresholds() {
    let worker = Worker::start().await;
    let urls = list(&[&worker.url()]);
    let file = File::new(&format!(
        "health-check-interval-secs = 3600\nhealth-failure-threshold = 9\n{urls}"
    ));
    let router = router(&file, &[]);
    router.until_healthy().await;
    worker.state.health.store(500, Ordering::Relaxed);
    file.write(&format!(
        "health-check-interval-secs = 1\nhealth-failure-threshold = 1\n{urls}"
    ));
    assert_eq!(router.ask("POST", "/reload").await.0, 200);
    let end = Instant::now() + Duration::from_secs(6);
    while router.get("/health").await.0 == 200 {
        assert!(Instant::now() < end, "the worker is not probed anew");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The line about a reload comes under the level that lets it through, the old or the new one.
#[tokio::test]
async fn the_log_level_follows_the_file() {
    let file = File::new("");
    let router = router(&file, &[]);
    for (level, policy, line_count) in [
        ("error", "random", 1),
        ("error", "round_robin", 1),
        ("info", "round_robin", 2),
    ] {
        file.write(&format!("log-level = \"{level}\"\npolicy = \"{policy}\""));
        assert_eq!(router.ask("POST", "/reload").await.0, 200);
        until("the log has its lines", || {
            router.logged("configuration reloaded").len() >= line_count
        })
        .await;
        // A line too many would come late: the next request's answer is later still.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(router.logged("configuration reloaded").len(), line_count);
    }
    assert!(router.logged("changed=\"log-level, policy\"").len() == 1);
}

#[test]
fn a_start_with_a_bad_file_ends_with_code_2_and_says_why() {
    for (text, why) in [
        ("\nport = \"x\"", "line 2: key 'port': invalid value 'x'"),
        ("prt = 1", "line 1: unknown key 'prt'; is 'port' meant?"),
    ] {
        let file = File::new(text);
        let output = corelane(&["--config", file.path()]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        let wanted = format!("error: {}, {why}", file.path());
        assert!(said.starts_with(&wanted), "{said}");
    }
}
