//! How many requests run, who waits, in which order, and who is refused. Each wait has an end of its own.

mod common;

use std::time::{Duration, Instant};

use common::{Client, Reply, Rng, Worker, chat, post, router, seed, total, until};
use common::{router_before, until_books_are_empty};
use corelane::Router;
use corelane::shared::{Outcome, Route};
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";

fn counts(router: &Router) -> (u32, u32) {
    router.shared.gate.counts()
}

/// Answers that begin when the sender says so.
fn gated() -> (watch::Sender<bool>, impl Fn() -> Reply + Clone) {
    let (open, gate) = watch::channel(false);
    (open, move || Reply {
        gate: Some(gate.clone()),
        ..Reply::default()
    })
}

/// Sends a chat and leaves the answer for later.
async fn sent(router: &Router, text: &str) -> Client {
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat(text))).await;
    client
}

/// Sends a chat that has to wait behind so many others.
async fn waiting(router: &Router, text: &str, waiting: u32) -> Client {
    let client = sent(router, text).await;
    until("it waits", || counts(router).1 == waiting).await;
    client
}

async fn status(client: &mut Client) -> u16 {
    client.answer(false).await.map_or(0, |answer| answer.status)
}

#[tokio::test]
async fn streams_count_until_their_last_byte_and_the_line_is_as_long_as_it_may_be() {
    let worker = Worker::start().await;
    worker.script(|_| Reply::events(10, Duration::from_millis(100)));
    let flags = [
        "--max-concurrent-requests",
        "2",
        "--queue-size",
        "1",
        "--cores",
        "2",
    ];
    let router = router(&[&worker], &flags).await;
    let mut running = [sent(&router, "a").await, sent(&router, "b").await];
    until("two run", || counts(&router) == (2, 0)).await;
    for client in &mut running {
        assert!(client.fill(1).await, "both stream");
    }
    let mut third = waiting(&router, "c", 1).await;
    for _ in 0..3 {
        let began = Instant::now();
        let mut client = sent(&router, "d").await;
        let answer = client.answer(false).await.expect("an answer");
        assert_eq!(answer.status, 429);
        let retry_after = answer.field("retry-after").expect("when to come again");
        assert!((1..=60).contains(&retry_after.parse::<u32>().unwrap()));
        assert!(began.elapsed() < Duration::from_millis(500), "at once");
    }
    assert_eq!(worker.count(), 2, "the third waits while two stream");
    for client in &mut running {
        let answer = client.answer(false).await.expect("an answer");
        assert!(answer.is_whole && answer.status == 200);
    }
    let answer = third.answer(false).await.expect("an answer");
    assert!(answer.is_whole && answer.status == 200);
    until_books_are_empty(&router).await;
    let refused = total(&router, |stats| {
        stats.exchanges[Route::ChatCompletions as usize][Outcome::Overloaded as usize].value()
    });
    assert_eq!(refused, 3);
}

#[tokio::test]
async fn requests_run_in_the_order_in_which_they_came_whatever_their_core() {
    let worker = Worker::start().await;
    let (open, reply) = gated();
    worker.script(move |_| reply());
    let flags = ["--max-concurrent-requests", "1", "--cores", "2"];
    let router = router(&[&worker], &flags).await;
    let mut clients = vec![sent(&router, "first").await];
    until("one runs", || counts(&router) == (1, 0)).await;
    for n in 0..40 {
        clients.push(waiting(&router, &format!("number {n} in line"), n + 1).await);
    }
    open.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(status(client).await, 200);
    }
    let requests = worker.requests();
    for (n, request) in requests[1..].iter().enumerate() {
        assert!(request.has_text(&format!("number {n} in line")), "{n}");
    }
    let shares = router.shared.cores.iter();
    assert!(
        shares.map(|core| core.stats.left.value()).all(|n| n > 0),
        "one core served all: nothing is shown"
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_client_that_leaves_the_line_frees_its_place() {
    let worker = Worker::start().await;
    let (open, reply) = gated();
    worker.script(move |_| reply());
    let flags = ["--max-concurrent-requests", "1", "--queue-size", "1"];
    let router = router(&[&worker], &flags).await;
    let mut first = sent(&router, "first").await;
    until("one runs", || counts(&router) == (1, 0)).await;
    for _ in 0..3 {
        let left = waiting(&router, "left", 1).await;
        left.reset();
        until("its place is free", || counts(&router) == (1, 0)).await;
    }
    // One that only ends its direction wants its answer.
    let mut second = waiting(&router, "half-closed", 1).await;
    second.half_close().await;
    open.send(true).unwrap();
    assert_eq!(
        (status(&mut first).await, status(&mut second).await),
        (200, 200)
    );
    assert_eq!(worker.count(), 2, "nothing was sent for those who left");
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn who_waits_for_too_long_is_told_so_and_who_asks_how_we_are_never_waits() {
    let worker = Worker::start().await;
    let (open, reply) = gated();
    worker.script(move |_| reply());
    let flags = [
        "--max-concurrent-requests",
        "1",
        "--queue-timeout-secs",
        "1",
    ];
    let router = router(&[&worker], &flags).await;
    let mut first = sent(&router, "first").await;
    until("one runs", || counts(&router) == (1, 0)).await;
    let began = Instant::now();
    let mut second = waiting(&router, "second", 1).await;
    for path in ["/health", "/v1/models", "/workers", "/get_loads"] {
        let mut client = Client::open(router.address).await;
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        client.send(head.as_bytes()).await;
        assert_eq!(status(&mut client).await, 200, "{path}");
    }
    assert!(began.elapsed() < Duration::from_millis(900), "at once");
    let answer = second.answer(false).await.expect("an answer");
    assert_eq!(answer.status, 503);
    assert!(answer.field("retry-after").is_some());
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(1) && took < Duration::from_secs(3),
        "{took:?}"
    );
    // Its connection lives on.
    second.send(&post(CHAT, &chat("again"))).await;
    until("it waits again", || counts(&router) == (1, 1)).await;
    open.send(true).unwrap();
    assert_eq!(
        (status(&mut first).await, status(&mut second).await),
        (200, 200)
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn no_worker_has_more_than_its_cap_and_the_others_wait() {
    let workers = [Worker::start().await, Worker::start().await];
    for worker in &workers {
        worker.script(|_| Reply {
            delay: Duration::from_millis(30),
            ..Reply::default()
        });
    }
    let flags = [
        "--worker-max-concurrent",
        "2",
        "--cores",
        "2",
        "--policy",
        "round_robin",
    ];
    let router = router(&[&workers[0], &workers[1]], &flags).await;
    let mut clients = Vec::new();
    for n in 0..60 {
        clients.push(sent(&router, &format!("{n}")).await);
    }
    let watched = async {
        let mut most = [0, 0];
        while total(&router, |stats| stats.left.value()) < 60 {
            for (most, worker) in most.iter_mut().zip(&workers) {
                *most = worker.in_flight().max(*most);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        most
    };
    let asked = async {
        for client in &mut clients {
            assert_eq!(status(client).await, 200);
        }
    };
    let (most, ()) = tokio::join!(watched, asked);
    assert_eq!(most, [2, 2]);
    until_books_are_empty(&router).await;
    let waits = router.shared.cores.iter();
    let waited: u64 = waits.map(|core| core.stats.waits.snapshot().count).sum();
    assert!(waited >= 50, "{waited} waited");
}

#[tokio::test]
async fn a_request_that_fails_waits_for_room_on_another_worker() {
    let (bad, good) = (Worker::start().await, Worker::start().await);
    let (open, reply) = gated();
    good.script(move |_| reply());
    bad.script(|_| Reply::json(500, "{}"));
    let flags = [
        "--worker-max-concurrent",
        "1",
        "--policy",
        "round_robin",
        "--cores",
        "1",
        "--retry-budget-ratio",
        "1",
        "--cb-failure-threshold",
        "1000",
    ];
    let router = router(&[&bad, &good], &flags).await;
    let mut clients = Vec::new();
    for n in 0..6 {
        clients.push(sent(&router, &format!("{n}")).await);
    }
    until("one runs, all others wait", || counts(&router) == (1, 5)).await;
    open.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(status(client).await, 200);
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn while_the_last_worker_is_replaced_requests_wait_for_the_next() {
    let mut old = Worker::start().await;
    let flags = ["--no-worker-wait-ms", "5000", "--cores", "2"];
    let router = router(&[&old], &flags).await;
    for round in 0..5 {
        let new = Worker::start().await;
        assert!(router.control().remove_worker(&old.url()));
        let mut clients = Vec::new();
        for n in 0..20 {
            clients.push(sent(&router, &format!("{round}.{n}")).await);
        }
        until("all wait", || counts(&router) == (0, 20)).await;
        router.control().add_worker(&new.url()).unwrap();
        for client in &mut clients {
            assert_eq!(status(client).await, 200);
        }
        old = new;
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn who_waited_long_for_a_turn_has_the_whole_wait_for_a_worker() {
    let (old, new) = (Worker::start().await, Worker::start().await);
    let (open, reply) = gated();
    old.script(move |_| reply());
    let flags = [
        "--max-concurrent-requests",
        "1",
        "--no-worker-wait-ms",
        "600",
        "--cores",
        "1",
    ];
    let router = router(&[&old], &flags).await;
    let mut first = sent(&router, "first").await;
    until("one runs", || counts(&router) == (1, 0)).await;
    let mut second = waiting(&router, "second", 1).await;
    tokio::time::sleep(Duration::from_millis(900)).await;
    assert!(router.control().remove_worker(&old.url()));
    open.send(true).unwrap();
    assert_eq!(status(&mut first).await, 200);
    until("it waits for a worker", || counts(&router) == (0, 1)).await;
    router.control().add_worker(&new.url()).unwrap();
    assert_eq!(status(&mut second).await, 200);
    until_books_are_empty(&router).await;
}

/// Many wait for a worker of one model that stays full: who asks for another gets it when that one has room.
#[tokio::test]
async fn requests_for_a_full_model_do_not_keep_others_waiting() {
    let (full, other) = (Worker::start().await, Worker::start().await);
    for (worker, model) in [(&full, "full"), (&other, "other")] {
        let list = format!(r#"{{"object":"list","data":[{{"id":"{model}","object":"model"}}]}}"#);
        *worker.state.models.lock().unwrap() = Some(list);
    }
    let (open_full, reply) = gated();
    full.script(move |_| reply());
    let (open_other, reply) = gated();
    other.script(move |_| reply());
    let flags = ["--worker-max-concurrent", "1", "--cores", "1"];
    let router = router(&[&full, &other], &flags).await;
    let address = router.address;
    let ask = |model: &'static str| async move {
        let body = format!(r#"{{"model":"{model}","messages":[]}}"#);
        let mut client = Client::open(address).await;
        client.send(&post(CHAT, body.as_bytes())).await;
        client
    };
    let mut all = Vec::new();
    for n in 0..13 {
        all.push(ask("full").await);
        until("one runs", || counts(&router) == (1, n)).await;
    }
    let mut first = ask("other").await;
    until("two run", || counts(&router) == (2, 12)).await;
    let mut second = ask("other").await;
    until("it waits behind them", || counts(&router) == (2, 13)).await;
    open_other.send(true).unwrap();
    assert_eq!(status(&mut first).await, 200);
    let answer = tokio::time::timeout(Duration::from_secs(5), status(&mut second)).await;
    assert_eq!(answer.expect("within five seconds"), 200);
    open_full.send(true).unwrap();
    for client in &mut all {
        assert_eq!(status(client).await, 200);
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn without_a_worker_the_wait_has_an_end() {
    let flags = ["--no-worker-wait-ms", "300", "--queue-size", "1"];
    let router = router_before(&[], &flags).await;
    let began = Instant::now();
    let mut first = waiting(&router, "first", 1).await;
    let mut second = sent(&router, "second").await;
    assert_eq!(status(&mut second).await, 503, "the line is full");
    assert!(began.elapsed() < Duration::from_millis(290), "at once");
    let answer = first.answer(false).await.expect("an answer");
    assert_eq!(answer.status, 503);
    assert!(answer.field("retry-after").is_some());
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(counts(&router), (0, 0));
}

#[tokio::test]
async fn an_upload_that_is_handed_on_as_it_comes_waits_like_any_other_request() {
    let worker = Worker::start().await;
    let (open, reply) = gated();
    worker.script(move |_| reply());
    let router = router(&[&worker], &["--max-concurrent-requests", "1"]).await;
    let mut first = sent(&router, "first").await;
    until("one runs", || counts(&router) == (1, 0)).await;
    let body = vec![b'x'; 3 << 20];
    let upload = post("/v1/audio/transcriptions", &body);
    let mut client = Client::open(router.address).await;
    let address = router.address;
    let uploaded = tokio::spawn(async move {
        client.send(&upload).await;
        (
            status(&mut client).await,
            client.stream.peer_addr().unwrap() == address,
        )
    });
    until("it waits", || counts(&router) == (1, 1)).await;
    assert_eq!(worker.count(), 1);
    open.send(true).unwrap();
    assert_eq!(status(&mut first).await, 200);
    assert_eq!(uploaded.await.unwrap(), (200, true));
    let requests = worker.requests();
    assert_eq!(requests[1].body, body);
    until_books_are_empty(&router).await;
}

/// Clients that leave at any moment, workers that come and go: in the end nobody runs, nobody waits, and all who stayed
/// got an answer.
#[tokio::test]
async fn clients_that_leave_and_workers_that_fail_leave_the_gate_empty() {
    let workers = [
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    ];
    for (n, worker) in workers.iter().enumerate() {
        worker.script(move |request| match request.body.len() % 7 {
            0 => Reply::json(500, "{}"),
            1 => Reply::events(3, Duration::from_millis(1)),
            _ => Reply {
                delay: Duration::from_millis(n as u64),
                ..Reply::default()
            },
        });
    }
    let flags = [
        "--max-concurrent-requests",
        "4",
        "--queue-size",
        "12",
        "--worker-max-concurrent",
        "3",
        "--cores",
        "2",
    ];
    let router = router(&[&workers[0], &workers[1]], &flags).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..24 {
        let mut rng = Rng(seed().wrapping_add(n));
        let address = router.address;
        tasks.spawn(async move {
            for _ in 0..60 {
                let mut client = Client::open(address).await;
                let length = 1 + rng.below(40) as usize;
                let text = rng.text(length);
                client.send(&post(CHAT, &chat(&text))).await;
                if rng.below(3) == 0 {
                    tokio::time::sleep(Duration::from_micros(rng.below(3000))).await;
                    client.reset();
                    continue;
                }
                let status = status(&mut client).await;
                assert!([200, 429, 500, 502, 503].contains(&status), "{status}");
            }
        });
    }
    let churn = async {
        for _ in 0..10 {
            workers[0].die().await;
            tokio::time::sleep(Duration::from_millis(30)).await;
            workers[0].revive().await;
            router.control().probe();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let all = async { while tasks.join_next().await.transpose().unwrap().is_some() {} };
    tokio::join!(churn, all);
    until_books_are_empty(&router).await;
}

/// More come than may begin: a burst of as many as may run, then one for each token, and those that cannot wait are refused.
#[tokio::test]
async fn requests_begin_no_faster_than_their_rate_after_a_burst() {
    let worker = Worker::start().await;
    let flags = [
        "--rate-limit-tokens-per-second",
        "20",
        "--max-concurrent-requests",
        "4",
        "--queue-size",
        "8",
        "--cores",
        "2",
    ];
    let router = router(&[&worker], &flags).await;
    let began = Instant::now();
    let mut clients = Vec::new();
    for n in 0..16 {
        clients.push(sent(&router, &format!("request {n}")).await);
    }
    // Tokens that came while they were sent.
    let further = began.elapsed().as_millis() as usize / 50 + 1;
    let mut statuses = Vec::new();
    for client in &mut clients {
        statuses.push(status(client).await);
    }
    let took = began.elapsed();
    let good = statuses.iter().filter(|status| **status == 200).count();
    let refused = statuses.iter().filter(|status| **status == 429).count();
    assert_eq!(good + refused, 16, "{statuses:?}");
    // The burst, and those that wait.
    assert!((12..=12 + further).contains(&good), "{statuses:?}");
    // Of them all but the burst have waited for a token of their own.
    let least = Duration::from_millis(50 * (good as u64 - 4) - 50);
    assert!(took >= least, "{good} in {took:?}");
    assert!(took < Duration::from_secs(10), "{took:?}");
    until_books_are_empty(&router).await;
    assert_eq!(counts(&router), (0, 0));
}
