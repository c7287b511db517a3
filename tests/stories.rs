//! What operators of such fleets have lived through, replayed on loopback with times scaled down: a worker killed under
//! load, an engine a fiftieth as fast as its peers, all engines slow at once, connections closed while idle, a warm prefix
//! on a dead worker, a host that answers nothing. Each wait has an end of its own.

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::pd::Pools;
use common::{Client, End, Reply, Rng, Worker, chat, failures, post, router, seed, total, until};
use common::{until_books_are_empty, until_within};
use corelane::Router;

const CHAT: &str = "/v1/chat/completions";

fn state(router: &Router, worker: &Worker) -> &'static str {
    let views = router.control().workers();
    let view = views.iter().find(|view| *view.url == worker.url());
    view.expect("it is registered").state
}

/// Clients that ask one request after the other, each on a kept-alive connection, until told to stop.
struct Crowd {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    tasks: tokio::task::JoinSet<Vec<String>>,
}

impl Crowd {
    /// `is_good`: what an answer may be; everything else is reported by [`Crowd::stop`].
    fn ask(
        router: &Router,
        count: usize,
        is_good: impl Fn(&common::Answer) -> bool + Send + Sync + 'static,
    ) -> Crowd {
        let (stop, answered) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let is_good = Arc::new(is_good);
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..count {
            let (stop, answered) = (stop.clone(), answered.clone());
            let (is_good, address) = (is_good.clone(), router.address);
            tasks.spawn(async move {
                let mut bad = Vec::new();
                let mut client = Client::open(address).await;
                let mut turn = 0;
                while !stop.load(Ordering::SeqCst) {
                    turn += 1;
                    let text = format!("client {n} turn {turn}");
                    let answer = client.post(CHAT, &chat(&text)).await;
                    match answer {
                        Some(answer) if is_good(&answer) => {
                            answered.fetch_add(1, Ordering::SeqCst);
                            if !answer.is_whole || answer.field("connection") == Some("close") {
                                client = Client::open(address).await;
                            }
                        }
                        Some(answer) => {
                            bad.push(format!("{}: {:?}", answer.status, answer.body.len()));
                            client = Client::open(address).await;
                        }
                        None => {
                            bad.push("no answer".to_string());
                            client = Client::open(address).await;
                        }
                    }
                }
                bad
            });
        }
        Crowd {
            stop,
            answered,
            tasks,
        }
    }

    fn answered(&self) -> u64 {
        self.answered.load(Ordering::SeqCst)
    }

    /// What was not good.
    async fn stop(mut self) -> Vec<String> {
        self.stop.store(true, Ordering::SeqCst);
        let mut bad = Vec::new();
        while let Some(one) = self.tasks.join_next().await {
            bad.extend(one.unwrap());
        }
        bad
    }
}

/// A stream of events is whole if it says so; one that is not must not look like it.
fn is_whole_or_visibly_cut(answer: &common::Answer) -> bool {
    let text = String::from_utf8_lossy(&answer.body);
    let is_done = text.ends_with("data: [DONE]\n\n");
    match answer.is_whole {
        true => answer.status == 200 && (is_done || text == r#"{"ok":true}"#),
        false => text.contains("data: {\"error\":{\"message\":") && !is_done,
    }
}

#[tokio::test]
async fn a_worker_killed_under_64_connections_costs_no_client_an_error_that_had_no_byte_yet() {
    let workers = [
        Worker::start_with(false).await,
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    ];
    for worker in &workers {
        let count = AtomicUsize::new(0);
        worker.script(move |_| match count.fetch_add(1, Ordering::SeqCst) % 4 {
            0 => Reply::events(5, Duration::from_millis(3)),
            _ => Reply {
                delay: Duration::from_millis(4),
                ..Reply::default()
            },
        });
    }
    let flags = [
        "--cores",
        "2",
        "--policy",
        "round_robin",
        "--health-check-interval-secs",
        "1",
    ];
    let router = router(&[&workers[0], &workers[1], &workers[2]], &flags).await;
    let cut = Arc::new(AtomicU64::new(0));
    let counted = cut.clone();
    let crowd = Crowd::ask(&router, 64, move |answer| {
        counted.fetch_add(u64::from(!answer.is_whole), Ordering::SeqCst);
        is_whole_or_visibly_cut(answer)
    });
    for worker in &workers {
        let before = crowd.answered();
        until("they are served", || crowd.answered() > before + 300).await;
        worker.die().await;
        let before = crowd.answered();
        until("the others serve", || crowd.answered() > before + 500).await;
        worker.revive().await;
        until("it is back", || state(&router, worker) == "ready").await;
    }
    assert_eq!(crowd.stop().await, Vec::<String>::new());
    assert!(
        cut.load(Ordering::SeqCst) <= 3 * 64,
        "more were cut than ran"
    );
    until_books_are_empty(&router).await;
}

/// 1.0 token/s for each of 141 sequences, beside a peer with 105 at 49.6: as clients wait for it its load falls below the
/// others', and shortest-queue begins to like it.
#[tokio::test]
async fn an_engine_a_fiftieth_as_fast_as_its_peers_loses_its_traffic_and_gets_it_back() {
    let workers = [
        Worker::start_with(false).await,
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    ];
    let is_slow = Arc::new(AtomicBool::new(true));
    for (n, worker) in workers.iter().enumerate() {
        let is_slow = is_slow.clone();
        worker.script(move |_| {
            let gap = match n == 0 && is_slow.load(Ordering::SeqCst) {
                true => Duration::from_millis(500),
                false => Duration::from_millis(10),
            };
            Reply::events(12, gap)
        });
    }
    let flags = [
        "--cores",
        "1",
        "--policy",
        "least_loaded",
        "--degraded-window-secs",
        "2",
        "--slow-start-secs",
        "0",
    ];
    let router = router(&[&workers[0], &workers[1], &workers[2]], &flags).await;
    let crowd = Crowd::ask(&router, 36, |answer| {
        answer.status == 200 && answer.is_whole
    });
    until("the slow one is out", || {
        state(&router, &workers[0]) == "degraded"
    })
    .await;
    let (slow, all) = (workers[0].count(), crowd.answered());
    until("the others serve", || crowd.answered() >= all + 400).await;
    let slow = workers[0].count() - slow;
    assert!(
        slow <= 4,
        "{slow} new requests while it was out: more than trials"
    );
    is_slow.store(false, Ordering::SeqCst);
    until_within(Duration::from_secs(25), "it is back", || {
        state(&router, &workers[0]) == "ready"
    })
    .await;
    let slow = workers[0].count();
    until("it serves again", || workers[0].count() > slow + 50).await;
    assert_eq!(crowd.stop().await, Vec::<String>::new());
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn when_all_are_ten_times_slower_nobody_is_ejected() {
    let workers = [
        Worker::start_with(false).await,
        Worker::start_with(false).await,
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    ];
    let pause_ms = Arc::new(AtomicU64::new(5));
    for worker in &workers {
        let pause_ms = pause_ms.clone();
        let count = AtomicUsize::new(0);
        worker.script(move |_| {
            let pause = Duration::from_millis(pause_ms.load(Ordering::SeqCst));
            match count.fetch_add(1, Ordering::SeqCst) % 2 {
                0 => Reply::events(10, pause),
                _ => Reply {
                    delay: pause * 10,
                    ..Reply::default()
                },
            }
        });
    }
    let flags = [
        "--cores",
        "2",
        "--policy",
        "least_loaded",
        "--degraded-window-secs",
        "2",
        "--stall-window-ms",
        "1000",
    ];
    let all: Vec<&Worker> = workers.iter().collect();
    let router = router(&all, &flags).await;
    let crowd = Crowd::ask(&router, 32, |answer| {
        answer.status == 200 && answer.is_whole
    });
    until("their pace is known", || crowd.answered() > 1000).await;
    pause_ms.store(50, Ordering::SeqCst);
    let mut states = HashSet::new();
    let end = Instant::now() + Duration::from_secs(8);
    while Instant::now() < end {
        states.extend(workers.iter().map(|worker| state(&router, worker)));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(states, HashSet::from(["ready"]));
    assert_eq!(crowd.stop().await, Vec::<String>::new());
    until_books_are_empty(&router).await;
}

/// uvicorn closes connections that were idle for five seconds; counted as failures that opened breakers.
#[tokio::test]
async fn connections_closed_while_idle_cost_nobody_anything() {
    let worker = Worker::start_with(false).await;
    worker.idle_limit(Duration::from_millis(300));
    let flags = [
        "--cores",
        "1",
        "--pool-idle-timeout-secs",
        "60",
        "--cb-failure-threshold",
        "2",
    ];
    let router = router(&[&worker], &flags).await;
    let mut client = Client::open(router.address).await;
    for n in 0..60 {
        let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
        assert_eq!(answer.status, 200);
        // Around the worker's limit, where its close and our next request meet.
        tokio::time::sleep(Duration::from_millis(270 + n)).await;
    }
    assert_eq!(failures(&router, &worker.url()), 0);
    assert_eq!(state(&router, &worker), "ready");
    // Its limit is known by now: connections near it are not used, so that hardly a request meets a close.
    let resends = total(&router, |stats| stats.resends.value());
    assert!(resends <= 3, "{resends} of 60");
}

/// All five attempts went to the dead worker that held the prefix, while a healthy one stood idle.
#[tokio::test]
async fn a_warm_prefix_on_a_dead_worker_costs_one_retry() {
    let (first, second) = (Worker::start().await, Worker::start().await);
    let flags = ["--cores", "1", "--policy", "cache_aware"];
    let router = router(&[&first, &second], &flags).await;
    let text = "a long conversation about the same thing ".repeat(60);
    let mut client = Client::open(router.address).await;
    for _ in 0..4 {
        let answer = client.post(CHAT, &chat(&text)).await.expect("an answer");
        assert_eq!(answer.status, 200);
    }
    let warm = [&first, &second]
        .into_iter()
        .max_by_key(|worker| worker.count())
        .unwrap();
    assert!(warm.count() >= 3, "the prefix is on one worker");
    warm.die().await;
    let began = Instant::now();
    let answer = client.post(CHAT, &chat(&text)).await.expect("an answer");
    assert_eq!(answer.status, 200);
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(total(&router, |stats| stats.retried()), 1);
    for _ in 0..10 {
        let answer = client.post(CHAT, &chat(&text)).await.expect("an answer");
        assert_eq!(answer.status, 200);
    }
    assert_eq!(
        total(&router, |stats| stats.retried()),
        1,
        "it is known to be dead"
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_worker_that_asks_for_a_pause_gets_it() {
    let (busy, other) = (Worker::start().await, Worker::start().await);
    busy.script(|_| Reply {
        fields: vec![("Retry-After".into(), "2".into())],
        ..Reply::json(429, "{}")
    });
    let flags = ["--cores", "1", "--policy", "round_robin"];
    let both = router(&[&busy, &other], &flags).await;
    let mut client = Client::open(both.address).await;
    let end = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < end {
        let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
        assert_eq!(answer.status, 200);
    }
    assert_eq!(busy.count(), 1, "asked again before its time");
    assert_eq!(state(&both, &busy), "ready", "busy is not broken");
    // Where nobody else is, it is asked all the same, and its word is passed on.
    let alone = router(&[&busy], &flags).await;
    let mut client = Client::open(alone.address).await;
    for _ in 0..3 {
        let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
        assert_eq!(
            (answer.status, answer.field("retry-after")),
            (429, Some("2"))
        );
    }
}

#[tokio::test]
async fn the_whole_limit_ends_what_has_not_begun_and_no_stream_that_goes_on() {
    let worker = Worker::start().await;
    worker.script(|request| match request.has_text("dumb") {
        true => Reply::nothing(End::Stall),
        false => Reply::events(20, Duration::from_millis(100)),
    });
    let flags = [
        "--request-timeout-secs",
        "1",
        "--first-byte-timeout-secs",
        "30",
        "--cores",
        "1",
    ];
    let router = router(&[&worker], &flags).await;
    let began = Instant::now();
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("dumb")).await.expect("an answer");
    assert_eq!(answer.status, 504);
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(1) && took < Duration::from_millis(1600),
        "{took:?}"
    );
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
    assert!(answer.is_whole && answer.body.ends_with(b"data: [DONE]\n\n"));
    until_books_are_empty(&router).await;
}

/// A host that answers neither connects nor probes costs those it was chosen for one connect limit, once, and the others
/// nothing.
#[tokio::test]
async fn a_black_hole_costs_the_others_nothing() {
    let workers = [
        Worker::start_with(false).await,
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    ];
    let flags = [
        "--cores",
        "1",
        "--policy",
        "round_robin",
        "--connect-timeout-ms",
        "300",
        "--pool-idle-timeout-secs",
        "0",
    ];
    let router = router(&[&workers[0], &workers[1], &workers[2]], &flags).await;
    let hung = workers[0].hang().await;
    let slow = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let (address, slow) = (router.address, slow.clone());
        tasks.spawn(async move {
            let mut client = Client::open(address).await;
            for _ in 0..50 {
                let began = Instant::now();
                let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
                assert_eq!(answer.status, 200);
                if began.elapsed() > Duration::from_millis(150) {
                    slow.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
    }
    while tasks.join_next().await.transpose().unwrap().is_some() {}
    let slow = slow.load(Ordering::SeqCst);
    assert!(
        (1..=32).contains(&slow),
        "{slow} of 800 waited for the black hole"
    );
    drop(hung);
    until_books_are_empty(&router).await;
}

/// A stalled decode worker is out within two stall windows, and back with the first trial after it goes on.
#[tokio::test]
async fn a_decode_worker_that_stalls_is_out_soon_and_back_when_it_goes_on() {
    let pools = Pools::start_with(1, 2, false).await;
    let decode = &pools.decode;
    let is_stalled = Arc::new(AtomicBool::new(false));
    let stalled = is_stalled.clone();
    decode[0].script(move |_| match stalled.load(Ordering::SeqCst) {
        true => Reply::nothing(End::Stall),
        false => Reply::default(),
    });
    const WINDOW: Duration = Duration::from_millis(1000);
    let flags = [
        "--cores",
        "1",
        "--policy",
        "round_robin",
        "--stall-window-ms",
        "1000",
        "--retry-budget-ratio",
        "1",
        "--slow-start-secs",
        "0",
    ];
    let router = pools.router(&flags).await;
    let crowd = Crowd::ask(&router, 12, |answer| {
        answer.status == 200 && answer.is_whole
    });
    until("their pace is known", || crowd.answered() > 400).await;
    is_stalled.store(true, Ordering::SeqCst);
    let began = Instant::now();
    until("it is out", || state(&router, &decode[0]) == "stalled").await;
    let took = began.elapsed();
    assert!(took < 2 * WINDOW + Duration::from_millis(600), "{took:?}");
    let all = crowd.answered();
    until("the other serves", || crowd.answered() > all + 200).await;
    is_stalled.store(false, Ordering::SeqCst);
    until_within(Duration::from_secs(15), "it is back", || {
        state(&router, &decode[0]) == "ready"
    })
    .await;
    assert_eq!(crowd.stop().await, Vec::<String>::new());
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_client_that_reads_a_byte_now_and_then_holds_a_bounded_part_of_its_answer() {
    let worker = Worker::start_with(false).await;
    worker.script(|request| match request.has_text("large") {
        true => Reply {
            pieces: vec![(Duration::ZERO, vec![b'x'; 1 << 20]); 16],
            ..Reply::default()
        },
        false => Reply::default(),
    });
    let flags = ["--cores", "1", "--relay-buffer-bytes", "65536"];
    let router = router(&[&worker], &flags).await;
    let mut slow = Vec::new();
    for _ in 0..20 {
        let mut client = Client::open_narrow(router.address, 4096).await;
        client.send(&post(CHAT, &chat("large"))).await;
        assert!(client.fill(1).await);
        slow.push(client);
    }
    // The worker is held back, and the others are served as if nobody were slow.
    let mut client = Client::open(router.address).await;
    let began = Instant::now();
    for _ in 0..50 {
        let answer = client.post(CHAT, &chat("x")).await.expect("an answer");
        assert_eq!(answer.status, 200);
    }
    assert!(began.elapsed() < Duration::from_secs(2));
    assert_eq!(worker.in_flight(), 20, "what nobody takes is not fetched");
    drop(slow);
    until_books_are_empty(&router).await;
}

/// Workers come, go and come back at any rate, down to none for a moment: nobody notices.
#[tokio::test]
async fn workers_that_come_and_go_under_load_cost_nobody_anything() {
    let mut workers = Vec::new();
    for _ in 0..6 {
        let worker = Worker::start_with(false).await;
        let count = AtomicUsize::new(0);
        worker.script(move |_| match count.fetch_add(1, Ordering::SeqCst) % 3 {
            0 => Reply::events(5, Duration::from_millis(4)),
            _ => Reply::default(),
        });
        workers.push(worker);
    }
    let flags = ["--cores", "2", "--policy", "least_loaded"];
    let router = router(&[&workers[0]], &flags).await;
    let crowd = Crowd::ask(&router, 32, |answer| {
        answer.status == 200 && answer.is_whole
    });
    let mut rng = Rng(seed());
    let mut inside = vec![0];
    for round in 0..150 {
        let n = rng.below(6) as usize;
        let url = workers[n].url();
        if let Some(at) = inside.iter().position(|inside| *inside == n) {
            // The last one is replaced by taking it out first: who comes meanwhile waits.
            assert!(router.control().remove_worker(&url), "round {round}");
            inside.remove(at);
            if inside.is_empty() {
                let next = (n + 1) % 6;
                router.control().add_worker(&workers[next].url()).unwrap();
                inside.push(next);
            }
        } else {
            router.control().add_worker(&url).unwrap();
            inside.push(n);
        }
        tokio::time::sleep(Duration::from_millis(rng.below(20))).await;
    }
    let all = crowd.answered();
    until("they are served", || crowd.answered() > all + 500).await;
    assert_eq!(crowd.stop().await, Vec::<String>::new());
    until_books_are_empty(&router).await;
}
