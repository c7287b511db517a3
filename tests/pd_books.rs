//! The books under P/D: two counts a request, given back on every way out, and no hand-over forgotten or used twice.
//! `PD_BOOKS_REQUESTS` sets the number of requests.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::pd::*;
use common::*;

/// What a worker does with a request, by a number in its body and the worker's role.
fn fault(request: &Recorded, name: &str) -> Option<Reply> {
    let at = memchr::memmem::find(&request.body, name.as_bytes()).expect("every request has dice");
    let at = at + name.len();
    let dice: u32 = text(&request.body[at..at + 3]).parse().unwrap();
    Some(match dice {
        0..=9 => Reply::nothing(End::Reset),
        10..=19 => Reply::nothing(End::Fin),
        20..=29 => Reply::json(503, r#"{"error":{"message":"busy"}}"#),
        30..=39 => Reply::json(400, r#"{"error":{"message":"bad"}}"#),
        40..=49 => Reply::json(500, "{}"),
        50..=59 => Reply {
            end: End::Reset,
            ..Reply::events(3, Duration::ZERO)
        },
        60..=69 => Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{\"usage\":".to_vec()),
            pieces: Vec::new(),
            end: End::Reset,
            ..Reply::default()
        },
        70..=79 => Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n".to_vec()),
            ..Reply::default()
        },
        80..=89 => Reply::json(200, "{}"),
        90..=149 if name == "d:" => Reply::events(5, Duration::from_millis(1)),
        90..=99 => Reply::json(200, "no json"),
        _ => return None,
    })
}

/// One request; three in ten clients leave before their answer is whole.
async fn one_request(address: SocketAddr, client: &mut Option<Client>, rng: &mut Rng) -> bool {
    let mut c = match client.take() {
        Some(c) => c,
        None => Client::open(address).await,
    };
    let words = format!(
        "p:{:03} d:{:03} {}",
        rng.below(1000),
        rng.below(1000),
        "word ".repeat(rng.below(80) as usize)
    );
    let request = post("/v1/chat/completions", &chat(&words));
    if rng.below(100) >= 30 {
        c.send(&request).await;
        if let Some(answer) = c.answer(false).await
            && answer.is_whole
            && answer.field("connection") != Some("close")
        {
            *client = Some(c);
        }
        return false;
    }
    match rng.below(10) {
        0 => {
            let part = 1 + rng.below(request.len() as u64 - 1) as usize;
            c.send(&request[..part]).await;
        }
        1 => {
            c.send(&request).await;
            let mut some = [0u8; 40];
            let _ = tokio::io::AsyncReadExt::read(&mut c.stream, &mut some).await;
        }
        2 => {
            c.send(&request).await;
            c.half_close().await;
            let _ = c.answer(false).await;
        }
        // At any point of the two legs, which take some hundred microseconds each.
        _ => {
            c.send(&request).await;
            let until = Instant::now() + Duration::from_micros(rng.below(3000));
            while Instant::now() < until {
                tokio::task::yield_now().await;
            }
        }
    }
    if rng.below(2) == 0 {
        c.reset();
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_books_end_at_zero_and_no_hand_over_is_forgotten_after_50_000_requests_with_aborts_and_restarts()
 {
    const CLIENTS: u64 = 48;
    let requests: u64 = std::env::var("PD_BOOKS_REQUESTS")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or(50_000);
    let seed = seed();
    let pools = Pools::start_with(3, 3, false).await;
    for worker in &pools.prefill {
        prefill_script(worker, &pools.transfers, |r| fault(r, "p:"));
    }
    for worker in &pools.decode {
        decode_script(worker, &pools.transfers, |r| fault(r, "d:"));
    }
    let flags = [
        "--cores",
        "2",
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
        "--pd-release-timeout-secs",
        "5",
        "--connect-timeout-ms",
        "300",
    ];
    let router = pools.probing_router(&flags).await;
    let began = Instant::now();
    let left = Arc::new(AtomicU64::new(requests));
    let aborts = Arc::new(AtomicU64::new(0));
    let mut clients = Vec::new();
    for n in 0..CLIENTS {
        let (left, aborts, address) = (left.clone(), aborts.clone(), router.address);
        clients.push(tokio::spawn(async move {
            let mut rng = Rng(seed ^ n << 32);
            let mut client = None;
            while left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                .is_ok()
            {
                let aborted = one_request(address, &mut client, &mut rng).await;
                aborts.fetch_add(u64::from(aborted), Ordering::SeqCst);
            }
        }));
    }
    // Workers of both roles are killed, or hang, and come back meanwhile.
    let workers: Vec<&Worker> = pools.prefill.iter().chain(&pools.decode).collect();
    let mut turn = 0;
    while left.load(Ordering::SeqCst) > requests / 10 {
        let next = left.load(Ordering::SeqCst).saturating_sub(requests / 12);
        let end = Instant::now() + Duration::from_secs(60);
        while left.load(Ordering::SeqCst) > next && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let victim = workers[turn * 2 % 6 + turn / 3 % 2];
        if turn % 3 == 2 {
            let hung = victim.hang().await;
            victim.go_on(hung);
        } else {
            victim.die().await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            victim.revive().await;
        }
        turn += 1;
    }
    for client in clients {
        client.await.unwrap();
    }
    until_books_are_empty(&router).await;
    let mut counted = (0, 0, 0);
    until("every orphan is released or lost", || {
        counted = orphans(&router);
        counted.0 == counted.1 + counted.2
    })
    .await;
    let handovers = pd_total(&router, |pd| pd.handovers.value());
    println!(
        "{requests} requests in {:?}: {} aborts, {handovers} hand-overs, {} fetched, orphans {counted:?}, {} stale, {} restarts",
        began.elapsed(),
        aborts.load(Ordering::SeqCst),
        pools.transfers.fetched(),
        pd_total(&router, |pd| pd.stale_handovers.value()),
        turn
    );
    pools.transfers.assert_kept();
    assert!(aborts.load(Ordering::SeqCst) > requests / 5);
    assert!(handovers > requests / 2, "{handovers} hand-overs");
    assert!(
        counted.0 > 0,
        "no orphan: the aborts came at the wrong time"
    );
    assert!(counted.1 > 0, "no orphan was released: {counted:?}");
    until("the oldest orphan's age is told no more", || {
        router
            .shared
            .cores
            .iter()
            .all(|core| core.stats.pd.oldest_orphan_ns.value() == 0)
    })
    .await;
}
