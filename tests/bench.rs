//! `corelane bench` as a process: right answers are all right, wrong ones are seen and counted by kind, what a slow target holds up
//! is in the times, and a generator that cannot keep up says so.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::process::*;
use common::*;
use serde_json::Value;

/// Runs it; whether its exit code was 0, and its report.
async fn bench(args: &[&str]) -> (bool, Value) {
    let args: Vec<String> = ["bench", "--json"]
        .iter()
        .chain(args)
        .map(|arg| arg.to_string())
        .collect();
    let run = move || corelane(&args.iter().map(String::as_str).collect::<Vec<_>>()).output();
    let output = tokio::task::spawn_blocking(run)
        .await
        .unwrap()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.success(), report)
}

fn routed(urls: &[String]) -> RouterProcess {
    let mut command = corelane(&[
        "--port",
        "0",
        "--prometheus-port",
        "0",
        "--cores",
        "1",
        "--worker-urls",
    ]);
    command.args(urls);
    RouterProcess::start(command)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_of_a_router_is_right_in_every_way_of_asking() {
    let (_workers, urls) = mock_workers(2, "instant");
    let router = routed(&urls);
    router.until_healthy().await;
    let url = format!("http://{}", router.address);
    let trace = File::new(
        "{\"timestamp\": 0, \"input_length\": 900, \"output_length\": 5, \"hash_ids\": [1, 2]}\n\
         {\"timestamp\": 40, \"input_length\": 1000, \"output_length\": 9, \"hash_ids\": [1, 3]}\n",
    );
    let counted = ["--requests", "300", "--warm-up-secs", "0"];
    let ways: [(&[&str], u64, u64); 6] = [
        (&["--concurrency", "8"], 300, 0),
        (
            &["--concurrency", "8", "--stream", "--output-tokens", "5"],
            300,
            300 * 6,
        ),
        (
            &[
                "--rate",
                "2000",
                "--poisson",
                "--stream",
                "--api",
                "completions",
                "--output-tokens",
                "5",
            ],
            300,
            300 * 5,
        ),
        (
            &[
                "--concurrency",
                "8",
                "--turns",
                "4",
                "--system-bytes",
                "500",
                "--prompt-bytes",
                "40",
            ],
            300,
            0,
        ),
        (
            &[
                "--concurrency",
                "8",
                "--threads",
                "2",
                "--prompt-bytes",
                "60000",
            ],
            300,
            0,
        ),
        (
            &[
                "--trace",
                trace.path(),
                "--speedup",
                "2",
                "--stream",
                "--warm-up-secs",
                "0",
            ],
            2,
            5 + 9 + 2,
        ),
    ];
    let mut all = 0;
    for (way, count, events) in ways {
        let how: &[&str] = if way.contains(&"--trace") {
            &[]
        } else {
            &counted
        };
        let (is_good, report) = bench(&[&[url.as_str()], how, way].concat()).await;
        let target = &report["targets"][0];
        assert_eq!(
            (&target["asked"], &target["good"]),
            (&count.into(), &count.into()),
            "{way:?} {report:#}"
        );
        assert_eq!(target["wrong"], serde_json::json!({}), "{way:?} {report:#}");
        assert_eq!(target["events"], events, "{way:?} {report:#}");
        assert_eq!(target["total_ms"]["count"], count);
        let times = if events > 0 { events - count } else { 0 };
        assert_eq!(target["gap_ms"]["count"], times, "{way:?}");
        assert!(is_good && report["is_good"] == true, "{report:#}");
        all += count;
    }
    assert_eq!(router.load_sum().await, 0);
    let mut routed = 0.0;
    for url in &urls {
        let series = format!("vllm_router_processed_requests_total{{worker=\"{url}\"}}");
        routed += router.series(&series).await;
    }
    assert_eq!(routed, all as f64, "the router counts what was asked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_answers_are_counted_by_kind_and_fail_the_run() {
    let worker = Worker::start().await;
    let stream = |count| Reply::events(count, Duration::ZERO);
    let with_last = |end: &[u8]| {
        let mut reply = stream(6);
        reply.pieces.last_mut().unwrap().1 = end.to_vec();
        reply
    };
    let error = b"event: error\ndata: {\"error\": {\"message\": \"x\"}}\n\ndata: [DONE]\n\n";
    let table: [(&str, Reply); 7] = [
        ("status_500", Reply::json(500, "{}")),
        ("event_count", stream(5)),
        ("event_count", stream(7)),
        ("no_done", with_last(b": nothing\n\n")),
        ("error_event", with_last(error)),
        (
            "closed_early",
            Reply {
                end: End::Fin,
                ..stream(6)
            },
        ),
        ("content", Reply::json(200, "{}")),
    ];
    for (kind, wrong) in table {
        let count = AtomicU64::new(0);
        worker.script(move |_| match count.fetch_add(1, Ordering::Relaxed) % 10 {
            3 => wrong.clone(),
            _ => Reply::events(6, Duration::ZERO),
        });
        let args = [
            "--stream",
            "--output-tokens",
            "5",
            "--requests",
            "40",
            "--warm-up-secs",
            "0",
            "--concurrency",
            "2",
        ];
        let (is_good, report) = bench(&[&[worker.url().as_str()], &args[..]].concat()).await;
        let target = &report["targets"][0];
        assert_eq!(target["wrong"], serde_json::json!({kind: 4}), "{report:#}");
        assert_eq!(
            (&target["asked"], &target["good"]),
            (&40.into(), &36.into()),
            "{kind} {report:#}"
        );
        assert!(!is_good && report["is_good"] == false, "{kind}");
    }
    // Nobody there; and one who says nothing.
    worker.script(|_| Reply::nothing(End::Stall));
    let short = [
        "--requests",
        "2",
        "--warm-up-secs",
        "0",
        "--timeout-secs",
        "0.3",
    ];
    let (is_good, report) = bench(&[&[worker.url().as_str()], &short[..]].concat()).await;
    assert_eq!(
        (is_good, &report["targets"][0]["wrong"]["timed_out"]),
        (false, &2.into()),
        "{report:#}"
    );
    let url = worker.url();
    worker.die().await;
    let (is_good, report) = bench(&[&[url.as_str()], &short[..]].concat()).await;
    assert_eq!(
        (is_good, &report["targets"][0]["wrong"]["connect"]),
        (false, &2.into()),
        "{report:#}"
    );
}

/// Its line of connections is full: whoever else comes gets no answer at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_never_made_is_counted_once() {
    use socket2::{Domain, Socket, Type};
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let fill = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _ = socket.connect(&address);
        socket
    };
    let _waiting: Vec<Socket> = (0..4).map(fill).collect();
    let url = format!("http://{}", address.as_socket().unwrap());
    let args = [
        "--requests",
        "3",
        "--concurrency",
        "1",
        "--warm-up-secs",
        "0",
        "--timeout-secs",
        "0.3",
    ];
    let (is_good, report) = bench(&[&[url.as_str()], &args[..]].concat()).await;
    assert_eq!(
        report["targets"][0]["wrong"],
        serde_json::json!({"timed_out": 3}),
        "{report:#}"
    );
    assert!(!is_good);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_slow_target_holds_up_is_in_the_times() {
    let worker = Worker::start().await;
    worker.script(|_| Reply {
        delay: Duration::from_millis(100),
        ..Reply::json(200, r#"{"usage":{"completion_tokens":16}}"#)
    });
    let url = worker.url();
    // 50 are due in a second, and 10 can be answered: the last one waits for four seconds.
    let open = [
        "--rate",
        "50",
        "--connections-max",
        "1",
        "--seconds",
        "1",
        "--warm-up-secs",
        "0",
    ];
    let (is_good, report) = bench(&[&[url.as_str()], &open[..]].concat()).await;
    let target = &report["targets"][0];
    assert_eq!((is_good, &target["good"]), (true, &50.into()), "{report:#}");
    let max_ms = target["total_ms"]["max"].as_f64().unwrap();
    assert!((3_900.0..20_000.0).contains(&max_ms), "{max_ms}");
    let limits = target["generator"]["limits"].to_string();
    assert!(
        limits.contains("waited for one of --connections-max"),
        "{limits}"
    );
    // What cannot be sent at all is told.
    let cut = [&open[..], &["--drain-secs", "0.5"]].concat();
    let (_, report) = bench(&[&[url.as_str()], &cut[..]].concat()).await;
    let target = &report["targets"][0];
    let [asked, unsent] = ["asked", "unsent"].map(|name| target[name].as_u64().unwrap());
    assert!(
        asked + unsent == 50 && unsent > 20 && target["cut"] == 1,
        "{report:#}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_generator_that_cannot_keep_up_says_so() {
    let (_workers, urls) = mock_workers(1, "instant");
    let easy = ["--rate", "50", "--seconds", "1", "--warm-up-secs", "0.2"];
    let (is_good, report) = bench(&[&[urls[0].as_str()], &easy[..]].concat()).await;
    let busy = report["targets"][0]["generator"]["busy_share"]
        .as_f64()
        .unwrap();
    assert!(is_good && busy > 0.0 && busy < 0.9, "{report:#}");
    let hard = [
        "--rate",
        "3000000",
        "--seconds",
        "0.3",
        "--warm-up-secs",
        "0.1",
        "--drain-secs",
        "0.1",
    ];
    let (_, report) = bench(&[&[urls[0].as_str()], &hard[..]].concat()).await;
    let limits = report["targets"][0]["generator"]["limits"].to_string();
    assert!(
        limits.contains("never sent") && limits.len() > 80,
        "{report:#}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_targets_are_compared_side_by_side() {
    let answer = r#"{"usage":{"completion_tokens":16}}"#;
    let (fast, slow) = (Worker::start().await, Worker::start().await);
    fast.script(move |_| Reply {
        delay: Duration::from_millis(10),
        ..Reply::json(200, answer)
    });
    slow.script(move |_| Reply {
        delay: Duration::from_millis(40),
        ..Reply::json(200, answer)
    });
    let page = File::new("");
    let args = [
        "--concurrency",
        "4",
        "--seconds",
        "4",
        "--slice-ms",
        "200",
        "--warm-up-secs",
        "0.1",
        "--html",
        page.path(),
    ];
    let (a, b) = (fast.url(), slow.url());
    let (is_good, report) = bench(&[&["--compare", &a, &b], &args[..]].concat()).await;
    assert!(is_good, "{report:#}");
    assert_eq!(
        (&report["targets"][0]["name"], &report["targets"][1]["url"]),
        (&"A".into(), &b.as_str().into())
    );
    let ratio = &report["second_to_first"]["total_p50_ms"];
    assert_eq!(ratio["pairs"], 10);
    let [low, high] = [0, 1].map(|at| ratio["interval_95"][at].as_f64().unwrap());
    assert!(1.3 < low && low <= high && high < 5.0, "{ratio}");
    let added = report["added_ms"]["total_ms"]["p50"].as_f64().unwrap();
    assert!((10.0..200.0).contains(&added), "{added}");
    let html = page.text();
    assert!(
        html.starts_with("<!doctype html>") && html.matches("<polyline").count() == 4,
        "{html}"
    );
    // And what a router adds to its worker: less than the 40 ms that the worker takes.
    let router = routed(std::slice::from_ref(&b));
    router.until_healthy().await;
    let url = format!("http://{}", router.address);
    let pid = router.id().to_string();
    let args = [
        "--direct",
        &b,
        "--pid",
        "0",
        "--pid",
        &pid,
        "--concurrency",
        "4",
        "--seconds",
        "2",
        "--slice-ms",
        "250",
    ];
    let (is_good, report) = bench(&[&[url.as_str()], &args[..]].concat()).await;
    assert!(is_good, "{report:#}");
    assert_eq!(
        (&report["targets"][0]["name"], &report["targets"][1]["name"]),
        (&"direct".into(), &"routed".into())
    );
    let added = report["added_ms"]["total_ms"]["p50"].as_f64().unwrap();
    assert!((-20.0..40.0).contains(&added), "{added}");
    assert!(
        report["targets"][1]["cpu_us_per_answer"].as_f64().unwrap() > 0.0,
        "{report:#}"
    );
    assert!(report["targets"][1]["rss_bytes"].as_u64().unwrap() > 1 << 20);
    // The same router beside itself is within ten times, and not within a hundredth of that.
    for (max, is_within) in [("10", true), ("0.01", false)] {
        let args = [
            "--compare",
            &url,
            &url,
            "--pid",
            &pid,
            "--pid",
            &pid,
            "--seconds",
            "1.2",
            "--slice-ms",
            "200",
            "--cpu-ratio-max",
            max,
        ];
        assert_eq!(bench(&args).await.0, is_within, "{max}");
    }
}
