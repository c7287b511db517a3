//! Workers that fail although their probes are good: who is out, what becomes of the requests there, and how they come
//! back. Times are scaled down by flags; each wait has an end of its own.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Client, End, Reply, Worker, chat, router, until, until_books_are_empty};
use corelane::Router;

const CHAT: &str = "/v1/chat/completions";

/// No probe but those that a failure asks for, and retries enough on a machine where the control thread comes late.
const QUIET: [&str; 8] = [
    "--retry-budget-ratio",
    "1",
    "--health-check-interval-secs",
    "3600",
    "--cores",
    "1",
    "--policy",
    "round_robin",
];

fn with<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    [&QUIET[..], flags].concat()
}

fn state(router: &Router, worker: &Worker) -> &'static str {
    let views = router.control().workers();
    let view = views.iter().find(|view| *view.url == worker.url());
    view.expect("it is registered").state
}

async fn ask(router: &Router) -> u16 {
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await;
    answer.map_or(0, |answer| answer.status)
}

/// Asks until it holds, at most ten seconds.
async fn ask_until(router: &Router, what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < end, "not within 10 s: {what}");
        assert_eq!(ask(router).await, 200, "{what}");
    }
}

#[tokio::test]
async fn a_worker_that_keeps_failing_is_out_and_single_trials_bring_it_back() {
    let (bad, good) = (Worker::start().await, Worker::start().await);
    let is_well = Arc::new(AtomicBool::new(false));
    let well = is_well.clone();
    bad.script(move |_| match well.load(Ordering::SeqCst) {
        true => Reply::default(),
        false => Reply::json(500, "{\"error\":{\"message\":\"EngineDeadError\"}}"),
    });
    let flags = with(&[
        "--cb-failure-threshold",
        "3",
        "--cb-success-threshold",
        "2",
        "--cb-timeout-duration-secs",
        "1",
    ]);
    let router = router(&[&bad, &good], &flags).await;
    ask_until(&router, "it is out", || state(&router, &bad) == "failing").await;
    let asked = bad.count();
    assert!(asked >= 3, "{asked}: not before the threshold");
    for _ in 0..50 {
        assert_eq!(ask(&router).await, 200);
    }
    assert!(bad.count() <= asked + 1, "it gets no new requests");
    is_well.store(true, Ordering::SeqCst);
    ask_until(&router, "it is back", || state(&router, &bad) == "ready").await;
    let asked = bad.count();
    ask_until(&router, "it serves", || bad.count() > asked + 5).await;
}

#[tokio::test]
async fn a_4xx_takes_nobody_out_and_a_lone_worker_is_never_out() {
    let (picky, lone) = (Worker::start().await, Worker::start().await);
    picky.script(|_| Reply::json(400, "{}"));
    lone.script(|_| Reply::json(500, "{}"));
    let flags = with(&["--cb-failure-threshold", "2"]);
    let pickys = router(&[&picky], &flags).await;
    let lones = router(&[&lone], &flags).await;
    for _ in 0..10 {
        assert_eq!((ask(&pickys).await, ask(&lones).await), (400, 500));
    }
    assert_eq!((picky.count(), lone.count()), (10, 10));
    assert_eq!(state(&pickys, &picky), "ready");
    assert_eq!(state(&lones, &lone), "ready");
}

#[tokio::test]
async fn a_refused_connection_takes_a_worker_out_at_once_and_a_good_probe_brings_it_back() {
    let (dead, alive) = (Worker::start().await, Worker::start().await);
    let mut flags = with(&[]);
    flags[3] = "1";
    let router = router(&[&dead, &alive], &flags).await;
    dead.die().await;
    for _ in 0..20 {
        assert_eq!(ask(&router).await, 200);
    }
    until("it is out", || state(&router, &dead) != "ready").await;
    dead.revive().await;
    ask_until(&router, "it serves again", || dead.count() >= 3).await;
    until_books_are_empty(&router).await;
}

/// The story: 129 requests on an engine that said nothing for 61 minutes, with good health.
#[tokio::test]
async fn what_waits_for_a_worker_that_says_nothing_is_answered_by_its_peers() {
    let (wedged, peer) = (Worker::start().await, Worker::start().await);
    let is_wedged = Arc::new(AtomicBool::new(false));
    let wedge = is_wedged.clone();
    wedged.script(move |_| match wedge.load(Ordering::SeqCst) {
        true => Reply::nothing(End::Stall),
        false => Reply::default(),
    });
    let flags = with(&["--stall-window-ms", "600"]);
    let router = Arc::new(router(&[&wedged, &peer], &flags).await);
    // Its rhythm is known, then it falls silent with the probes still good.
    for _ in 0..200 {
        assert_eq!(ask(&router).await, 200);
    }
    is_wedged.store(true, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(8);
    let mut asking = tokio::task::JoinSet::new();
    while state(&router, &wedged) != "stalled" {
        assert!(Instant::now() < end, "it is not noticed within 8 s");
        let router = router.clone();
        asking.spawn(async move { ask(&router).await });
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let stuck = wedged.count();
    while let Some(status) = asking.join_next().await {
        assert_eq!(status.unwrap(), 200, "a request that waited is lost");
    }
    for _ in 0..50 {
        assert_eq!(ask(&router).await, 200);
    }
    assert!(wedged.count() <= stuck + 2, "it gets no new requests");
    assert_eq!(wedged.state.health.load(Ordering::SeqCst), 200);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn silence_before_the_first_byte_and_between_two_has_limits_of_its_own() {
    let worker = Worker::start().await;
    worker.script(|request| {
        let mut reply = Reply::events(2, Duration::from_millis(1));
        if request.has_text("dumb") {
            return Reply::nothing(End::Stall);
        }
        reply.pieces.pop();
        reply.end = End::Stall;
        reply
    });
    let flags = with(&[
        "--first-byte-timeout-secs",
        "1",
        "--stream-idle-timeout-secs",
        "2",
    ]);
    let router = router(&[&worker], &flags).await;
    let begun = Instant::now();
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("dumb")).await.unwrap();
    assert_eq!(answer.status, 504);
    assert!(begun.elapsed() < Duration::from_millis(1900));
    let begun = Instant::now();
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    let text = String::from_utf8_lossy(&answer.body);
    assert!(begun.elapsed() >= Duration::from_millis(1900));
    assert!(text.contains("data: {\"n\":1}\n\n"), "{text}");
    assert!(
        text.contains("\n\ndata: {\"error\":{\"message\":"),
        "{text}"
    );
    assert!(!text.contains("[DONE]") && !answer.is_whole, "{text}");
}
