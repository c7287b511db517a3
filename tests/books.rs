//! The books: whatever happens to clients and workers, every count comes back, and while requests run the books say what
//! the workers themselves count.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::*;

/// How a client treats its request.
#[derive(Clone, Copy)]
enum Manner {
    Reads,
    LeavesBeforeTheBody,
    LeavesAfterTheRequest { reset: bool },
    LeavesInTheAnswer { reset: bool },
    HalfCloses,
}

fn manner(rng: &mut Rng) -> Manner {
    match rng.below(100) {
        0..=3 => Manner::LeavesBeforeTheBody,
        4..=9 => Manner::LeavesAfterTheRequest {
            reset: rng.below(2) == 0,
        },
        10..=15 => Manner::LeavesInTheAnswer {
            reset: rng.below(2) == 0,
        },
        16..=19 => Manner::HalfCloses,
        _ => Manner::Reads,
    }
}

/// What a worker does with a request, by a number in its body.
fn script(request: &Recorded) -> Reply {
    let at = memchr::memmem::find(&request.body, b"dice:").expect("every request has a dice");
    let dice: u32 = std::str::from_utf8(&request.body[at + 5..at + 8])
        .unwrap()
        .parse()
        .unwrap();
    match dice {
        0..=19 => Reply::nothing(End::Reset),
        20..=39 => Reply::nothing(End::Fin),
        40..=59 => Reply::json(503, r#"{"error":{"message":"busy"}}"#),
        60..=79 => Reply::json(400, r#"{"error":{"message":"bad"}}"#),
        80..=99 => Reply {
            end: End::Reset,
            ..Reply::events(3, Duration::ZERO)
        },
        100..=119 => Reply {
            end: End::Fin,
            ..Reply::events(3, Duration::ZERO)
        },
        120..=129 => Reply {
            until_close: true,
            ..Reply::default()
        },
        130..=139 => Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n".to_vec()),
            ..Reply::default()
        },
        140..=349 => Reply::events(5, Duration::from_millis(1)),
        350..=399 => Reply {
            delay: Duration::from_millis(5),
            ..Reply::default()
        },
        _ => Reply::default(),
    }
}

async fn one_request(address: std::net::SocketAddr, client: &mut Option<Client>, rng: &mut Rng) {
    let mut c = match client.take() {
        Some(c) => c,
        None => Client::open(address).await,
    };
    let len = rng.below(600) as usize;
    let body = chat(&format!("dice:{:03} {}", rng.below(1000), rng.text(len)));
    let request = post("/v1/chat/completions", &body);
    match manner(rng) {
        Manner::Reads => {
            c.send(&request).await;
            if let Some(answer) = c.answer(false).await
                && answer.is_whole
                && answer.field("connection") != Some("close")
            {
                *client = Some(c);
            }
        }
        Manner::LeavesBeforeTheBody => {
            let part = request.len() - rng.below(body.len() as u64) as usize - 1;
            c.send(&request[..part]).await;
        }
        Manner::LeavesAfterTheRequest { reset } => {
            c.send(&request).await;
            if rng.below(2) == 0 {
                tokio::task::yield_now().await;
            }
            if reset {
                c.reset();
            }
        }
        Manner::LeavesInTheAnswer { reset } => {
            c.send(&request).await;
            let mut some = [0u8; 40];
            let _ = tokio::time::timeout(
                Duration::from_secs(5),
                tokio::io::AsyncReadExt::read(&mut c.stream, &mut some),
            )
            .await;
            if reset {
                c.reset();
            }
        }
        Manner::HalfCloses => {
            c.send(&request).await;
            let _ = tokio::io::AsyncWriteExt::shutdown(&mut c.stream).await;
            // It still gets whatever answer there is, or sees the connection break.
            let _ = c.answer(false).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_books_end_at_zero_after_100_000_requests_with_aborts_resets_retries_and_restarts() {
    const REQUESTS: u64 = 100_000;
    const CLIENTS: u64 = 48;
    let seed = seed();
    let mut workers = Vec::new();
    for _ in 0..3 {
        let worker = Worker::start_with(false).await;
        worker.script(script);
        workers.push(worker);
    }
    let refs: Vec<&Worker> = workers.iter().collect();
    let flags = [
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ];
    let router = router(&refs, &flags).await;
    let left = Arc::new(AtomicU64::new(REQUESTS));
    let mut clients = Vec::new();
    for n in 0..CLIENTS {
        let (left, address) = (left.clone(), router.address);
        clients.push(tokio::spawn(async move {
            let mut rng = Rng(seed ^ n << 32);
            let mut client = None;
            while left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok()
            {
                one_request(address, &mut client, &mut rng).await;
            }
        }));
    }
    // A worker is killed and comes back again and again meanwhile.
    let mut victim = 0;
    while left.load(Ordering::SeqCst) > 5_000 {
        let next = left.load(Ordering::SeqCst).saturating_sub(12_000);
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while left.load(Ordering::SeqCst) > next.max(4_000) && std::time::Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        workers[victim].die().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        workers[victim].revive().await;
        victim = (victim + 1) % workers.len();
    }
    for client in clients {
        client.await.unwrap();
    }
    until_books_are_empty(&router).await;
    let reached: u64 = workers.iter().map(Worker::count).sum();
    assert!(
        reached > REQUESTS * 8 / 10,
        "only {reached} requests reached a worker"
    );
    let closed: u64 = router
        .shared
        .cores
        .iter()
        .map(|c| c.stats.closed.value())
        .sum();
    assert!(closed > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_books_say_what_the_workers_count_while_streams_run() {
    books_and_workers_agree(&[]).await;
}

/// What a machine with more CPUs does: connections and workers are spread over more cores.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_books_say_what_the_workers_count_with_more_cores_than_cpus() {
    let count = (2 * corelane::config::cpu_count()).to_string();
    books_and_workers_agree(&["--cores", &count, "--cores-share-cpus"]).await;
}

async fn books_and_workers_agree(flags: &[&str]) {
    let mut rng = Rng(seed());
    let mut workers = Vec::new();
    for _ in 0..3 {
        let worker = Worker::start_with(false).await;
        // Half of the streams end by themselves, at different times; the others only when their client leaves.
        worker.script(|r| {
            let end = if r.body.len() % 2 == 0 {
                End::Clean
            } else {
                End::Stall
            };
            Reply {
                end,
                ..Reply::events(1 + r.body.len() % 40, Duration::from_millis(3))
            }
        });
        workers.push(worker);
    }
    let refs: Vec<&Worker> = workers.iter().collect();
    let router = router(&refs, &[&["--policy", "power_of_two"], flags].concat()).await;
    let mut open: Vec<Client> = Vec::new();
    for round in 0..25 {
        for _ in 0..rng.below(20) {
            let mut client = Client::open(router.address).await;
            let len = rng.below(100) as usize;
            client
                .send(&post("/v1/chat/completions", &chat(&rng.text(len))))
                .await;
            open.push(client);
        }
        for _ in 0..rng.below(12).min(open.len() as u64) {
            let client = open.swap_remove(rng.below(open.len() as u64) as usize);
            if rng.below(2) == 0 {
                client.reset();
            }
        }
        // No client does anything now; the books and the workers must come to say the same, worker by worker.
        until(&format!("books and workers agree in round {round}"), || {
            workers
                .iter()
                .all(|w| i64::from(booked(&router, w)) == w.in_flight())
        })
        .await;
    }
    let running: u32 = workers.iter().map(|w| booked(&router, w)).sum();
    assert!(running > 0, "the last comparison was one of nothing");
    drop(open);
    until("all clients have left", || {
        workers
            .iter()
            .all(|w| booked(&router, w) == 0 && w.in_flight() == 0)
    })
    .await;
}
