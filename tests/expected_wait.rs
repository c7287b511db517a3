//! `expected_wait` through the whole router: what first bytes teach decides, until then it is `cache_aware`.

mod common;

use std::time::Duration;

use common::pd::*;
use common::*;
use corelane::Router;
use corelane::route::Reason;

const CHAT: &str = "/v1/chat/completions";
/// Nobody is thrown out for being slow: the policy alone decides here.
const FLAGS: [&str; 6] = [
    "--policy",
    "expected_wait",
    "--cores",
    "1",
    "--degraded-ratio",
    "0",
];

/// First event after this for each started 10 kB of prompt. The head comes at once, as vLLM's.
async fn worker(per_10_kb: Duration) -> Worker {
    let worker = Worker::start().await;
    worker.script(move |request| {
        let mut reply = Reply::events(2, Duration::ZERO);
        reply.pieces[0].0 = per_10_kb * (1 + request.body.len() as u32 / 10_000);
        reply
    });
    worker
}

fn prompt(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    let text = rng.text(bytes);
    format!(r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"{text}"}}]}}"#)
        .into_bytes()
}

async fn ask(router: &Router, body: &[u8]) {
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, body).await.expect("an answer");
    assert_eq!(answer.status, 200);
}

fn by_wait(router: &Router) -> u64 {
    let by = [Reason::LeastCostCold, Reason::LeastCostWarm];
    by.map(|reason| total(router, |s| s.decided(reason)))
        .iter()
        .sum()
}

/// Nobody's load differs, requests come one at a time: only what was learnt speaks against the slow worker.
#[tokio::test]
async fn new_prompts_go_to_the_worker_that_computes_them_sooner() {
    let mut rng = Rng(seed());
    let fast = worker(Duration::from_millis(2)).await;
    let slow = worker(Duration::from_millis(40)).await;
    let router = router(&[&fast, &slow], &FLAGS).await;
    // By load and lot at first; then the one of which less is known counts as the other does.
    for _ in 0..60 {
        ask(&router, &prompt(&mut rng, 20_000)).await;
    }
    let (before, slow_before) = (by_wait(&router), slow.count());
    for _ in 0..40 {
        ask(&router, &prompt(&mut rng, 20_000)).await;
    }
    assert_eq!(by_wait(&router) - before, 40, "waits decide");
    let slows = slow.count() - slow_before;
    assert!(slows <= 4, "{slows} of 40 went to the slow one");
    until_books_are_empty(&router).await;
}

/// What a worker has to compute waits until the first event: its head says nothing.
#[tokio::test]
async fn a_stream_waits_until_its_first_event_not_its_head() {
    let worker = Worker::start().await;
    worker.script(|_| Reply::events(2, Duration::from_millis(300)));
    let router = router(&[&worker], &FLAGS).await;
    let slot = router.control().workers()[0].id.slot;
    let books = || {
        let load = router.shared.books.load(slot);
        (load.waiting, load.active)
    };
    let mut client = Client::open(router.address).await;
    client
        .send(&post(CHAT, &prompt(&mut Rng(seed()), 1000)))
        .await;
    let head = client.head().await.expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert_eq!(books(), (1, 0), "the head is there");
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(books(), (0, 1), "the first event is there");
    drop(client);
    until_books_are_empty(&router).await;
}

/// The longer its wait the less a prefix is worth: while it is idle its holder gets the next turn.
#[tokio::test]
async fn a_conversation_keeps_its_worker() {
    let mut rng = Rng(seed());
    let workers = [
        worker(Duration::from_millis(3)).await,
        worker(Duration::from_millis(3)).await,
    ];
    let router = router(&[&workers[0], &workers[1]], &FLAGS).await;
    for _ in 0..40 {
        ask(&router, &prompt(&mut rng, 30_000)).await;
    }
    assert!(by_wait(&router) > 0);
    let counts = || workers.iter().map(Worker::count).collect::<Vec<_>>();
    let mut text = rng.text(60_000);
    let mut body = |more: &str| {
        text.push_str(more);
        format!(
            r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"{text}"}}]}}"#
        )
    };
    let before = counts();
    ask(&router, body("").as_bytes()).await;
    let home = usize::from(counts()[0] == before[0]);
    let before = counts();
    for _ in 0..10 {
        ask(&router, body(&"and so on ".repeat(30)).as_bytes()).await;
    }
    assert_eq!(counts()[home] - before[home], 10, "all turns");
}

/// An answer in one piece says when it was finished, not when its prompt was computed: nothing is learnt of it.
#[tokio::test]
async fn answers_in_one_piece_teach_nothing() {
    let mut rng = Rng(seed());
    let worker = Worker::start().await;
    let router = router(&[&worker], &FLAGS).await;
    for _ in 0..20 {
        ask(&router, &prompt(&mut rng, 2_000)).await;
    }
    assert_eq!(by_wait(&router), 0);
}

/// Of prefill legs the one answer is the end of prefill.
#[tokio::test]
async fn prefill_legs_teach() {
    let mut rng = Rng(seed());
    let pools = Pools::start(2, 1).await;
    let flags = ["--prefill-policy", "expected_wait", "--cores", "1"];
    let router = pools.router(&flags).await;
    for _ in 0..40 {
        ask(&router, &prompt(&mut rng, 5_000)).await;
    }
    assert!(by_wait(&router) > 0);
    until_books_are_empty(&router).await;
}
