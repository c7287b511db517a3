//! P/D when something fails or somebody leaves: who is asked next, what the client sees, and that a hand-over is used
//! once and never forgotten.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::pd::*;
use common::*;

const CHAT: &str = "/v1/chat/completions";
/// One core: connections are kept by core, and turns are taken by core.
const ONE_CORE: [&str; 2] = ["--cores", "1"];

fn code(answer: &Answer) -> String {
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    body["error"]["code"].as_str().unwrap_or("").to_string()
}

fn faults() -> Vec<(&'static str, Reply, u16)> {
    vec![
        ("429", Reply::json(429, r#"{"busy":1}"#), 429),
        ("500", Reply::json(500, "{}"), 502),
        ("501", Reply::json(501, "{}"), 502),
        ("502", Reply::json(502, "{}"), 502),
        ("503", Reply::json(503, "{}"), 503),
        ("504", Reply::json(504, "{}"), 504),
        ("reset", Reply::nothing(End::Reset), 502),
        ("end", Reply::nothing(End::Fin), 502),
        ("no JSON", Reply::json(200, "<html>"), 502),
        (
            "half a JSON",
            Reply::json(200, r#"{"kv_transfer_params":{"#),
            502,
        ),
        ("an array", Reply::json(200, "[1]"), 502),
        (
            "cut off",
            Reply {
                raw: Some(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"u\"".to_vec()),
                pieces: Vec::new(),
                end: End::Reset,
                ..Reply::default()
            },
            502,
        ),
        (
            "cut off in a chunk",
            Reply {
                raw: Some(
                    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{\"u\"".to_vec(),
                ),
                pieces: Vec::new(),
                end: End::Fin,
                ..Reply::default()
            },
            502,
        ),
        ("no answer", Reply::nothing(End::Stall), 504),
    ]
}

#[tokio::test]
async fn a_prefill_worker_that_fails_is_replaced_and_the_last_ones_failure_is_told() {
    let pools = Pools::start(2, 1).await;
    // No connection is kept: one that has died is sent to again, which is no failure.
    let flags = [
        "--first-byte-timeout-secs",
        "1",
        "--pool-idle-timeout-secs",
        "0",
    ];
    let router = pools.router(&flags).await;
    let lone = Pools::start(1, 1).await;
    let lone_router = lone.router(&flags).await;
    for (name, fault, status) in faults() {
        let before = (pools.prefill_count(), pools.decode_count());
        pools.prefill_fails_first(fault.clone());
        // One of them has this prompt in its cache, and is asked first.
        let prompt = chat(&format!("{} {name}", "long ".repeat(500)));
        let mut client = Client::open(router.address).await;
        let answer = client.post(CHAT, &prompt).await.unwrap();
        if name == "501" {
            // Not a failure that another worker would not have.
            assert_eq!(answer.status, 502, "{name}");
        } else {
            assert_eq!(answer.status, 200, "{name}: {}", text(&answer.body));
            assert_eq!(pools.prefill_count() - before.0, 2, "{name}");
            assert_eq!(pools.decode_count() - before.1, 1, "{name}");
            let asked: Vec<bool> = pools
                .prefill
                .iter()
                .map(|w| w.requests().last().is_some_and(|r| r.has_text(name)))
                .collect();
            assert_eq!(asked, [true, true], "{name}: the same one twice");
        }

        prefill_script(&lone.prefill[0], &lone.transfers, move |_| {
            Some(fault.clone())
        });
        let mut client = Client::open(lone_router.address).await;
        let answer = client.post(CHAT, &chat(name)).await.unwrap();
        assert_eq!(answer.status, status, "{name}: {}", text(&answer.body));
        until_books_are_empty(&lone_router).await;
    }
    assert_eq!(lone.decode_count(), 0, "decode was asked");
    assert_eq!(orphans(&lone_router), (0, 0, 0));
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_prefill_worker_that_refuses_is_replaced_and_alone_it_is_a_502() {
    let pools = Pools::start(2, 1).await;
    let router = pools
        .router(&["--policy", "round_robin", "--cores", "1"])
        .await;
    pools.prefill[0].die().await;
    for n in 0..4 {
        let mut client = Client::open(router.address).await;
        let answer = client.post(CHAT, &chat(&format!("{n}"))).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    assert_eq!(pools.prefill[1].count(), 4);
    assert!(failures(&router, &pools.prefill[0].url()) > 0);
    pools.prefill[1].die().await;
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!((answer.status, &*code(&answer)), (502, "worker_failed"));
    assert_eq!(pools.decode_count(), 4);
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_4xx_of_prefill_reaches_the_client_unchanged_and_decode_is_never_asked() {
    let pools = Pools::start(2, 1).await;
    let router = pools.router(&[]).await;
    for status in [400, 401, 404, 413, 422] {
        let before = pools.prefill_count();
        let body = format!(
            r#"{{"error":{{"message":"no \u00e9","code":{status}}},"usage":{{"prompt_tokens":3}}}}"#
        );
        let mut refusal = Reply::json(status, &body);
        refusal.fields.push(("x-why".into(), "because".into()));
        for worker in &pools.prefill {
            let refusal = refusal.clone();
            prefill_script(worker, &pools.transfers, move |_| Some(refusal.clone()));
        }
        let mut client = Client::open(router.address).await;
        for n in 1..=2 {
            let answer = client.post(CHAT, &chat("x")).await.unwrap();
            assert_eq!((answer.status, text(&answer.body)), (status, body.clone()));
            assert_eq!(answer.field("x-why"), Some("because"));
            assert_eq!(pools.prefill_count() - before, n, "{status} was retried");
        }
    }
    assert_eq!(pools.decode_count(), 0);
    for worker in &pools.prefill {
        assert_eq!(failures(&router, &worker.url()), 0);
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn an_answer_without_transfer_parameters_is_a_502_or_by_flag_left_to_decode_and_counted() {
    for (flags, status) in [
        (&[][..], 502),
        (&["--pd-missing-transfer", "decode"][..], 200),
    ] {
        let pools = Pools::start(1, 1).await;
        let router = pools.router(flags).await;
        let bodies = [
            r#"{"usage":{"prompt_tokens":5}}"#,
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":"x"}"#,
        ];
        for body in bodies {
            prefill_script(&pools.prefill[0], &pools.transfers, move |_| {
                Some(Reply::json(200, body))
            });
            let mut client = Client::open(router.address).await;
            let answer = client.post(CHAT, &chat("x")).await.unwrap();
            assert_eq!(answer.status, status, "{body}");
            if status == 502 {
                assert_eq!(code(&answer), "missing_kv_transfer_params");
            } else {
                // Decode counts its own then.
                assert_eq!(text(&answer.body), DECODE_BODY);
                assert_eq!(pools.decode_requests().pop().unwrap().body, chat("x"));
            }
        }
        assert_eq!(pd_total(&router, |pd| pd.missing_transfer.value()), 3);
        assert_eq!(pd_total(&router, |pd| pd.handovers.value()), 0);
        assert_eq!(pools.decode_count(), if status == 200 { 3 } else { 0 });
        assert_eq!(orphans(&router), (0, 0, 0));
        until_books_are_empty(&router).await;
    }
}

#[tokio::test]
async fn a_decode_worker_that_refuses_is_replaced_with_the_same_parameters() {
    let pools = Pools::start(1, 2).await;
    let router = pools
        .router(&["--policy", "round_robin", "--cores", "1"])
        .await;
    pools.decode[0].die().await;
    for n in 1..=4 {
        let mut client = Client::open(router.address).await;
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!(answer.status, 200);
        assert_eq!(pools.transfers.issued(), n, "the prompt was computed again");
        assert_eq!(pools.transfers.fetched() as u64, n);
    }
    assert!(failures(&router, &pools.decode[0].url()) > 0);
    assert_eq!(orphans(&router), (0, 0, 0));
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn when_no_decode_worker_can_be_reached_the_client_gets_502_and_the_blocks_are_counted_lost()
{
    let pools = Pools::start(1, 2).await;
    let router = pools.router(&[]).await;
    for worker in &pools.decode {
        worker.die().await;
    }
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!((answer.status, &*code(&answer)), (502, "worker_failed"));
    assert_eq!(pools.transfers.issued(), 1);
    until("the orphan is given up", || orphans(&router) == (1, 0, 1)).await;
    until_books_are_empty(&router).await;
}

/// What a decode worker may do once it has the parameters, before a byte of its answer has gone to the client.
fn decode_faults() -> Vec<(&'static str, Reply)> {
    vec![
        ("429", Reply::json(429, "{}")),
        ("500", Reply::json(500, "{}")),
        ("503", Reply::json(503, "{}")),
        ("reset", Reply::nothing(End::Reset)),
        ("end", Reply::nothing(End::Fin)),
        (
            "held answer cut off",
            Reply {
                raw: Some(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"usage\"".to_vec()),
                pieces: Vec::new(),
                end: End::Reset,
                ..Reply::default()
            },
        ),
    ]
}

#[tokio::test]
async fn a_decode_worker_that_fails_with_the_parameters_in_hand_costs_a_new_prefill() {
    for is_warm in [false, true] {
        let pools = Pools::start(1, 2).await;
        let router = pools
            .router(&[&ONE_CORE[..], &["--decode-policy", "round_robin"]].concat())
            .await;
        let mut client = Client::open(router.address).await;
        for (name, fault) in decode_faults() {
            if is_warm {
                // Both decode workers have a kept-alive connection: the fault comes on a reused one.
                for _ in 0..2 {
                    assert_eq!(client.post(CHAT, &chat("warm")).await.unwrap().status, 200);
                }
            }
            let before = (pools.transfers.issued(), pools.decode_count());
            pools.decode_fails_first(fault);
            let answer = client.post(CHAT, &chat(name)).await.unwrap();
            pools.transfers.assert_kept();
            assert_eq!(
                answer.status,
                200,
                "{name} warm {is_warm}: {}",
                text(&answer.body)
            );
            assert_eq!(
                pools.transfers.issued() - before.0,
                2,
                "{name} warm {is_warm}"
            );
            assert_eq!(pools.decode_count() - before.1, 2, "{name} warm {is_warm}");
        }
        assert_eq!(orphans(&router), (0, 0, 0));
        until_books_are_empty(&router).await;
    }
}

#[tokio::test]
async fn a_prefill_worker_that_failed_a_request_gets_it_no_second_time_when_decode_fails_next() {
    let pools = Pools::start(2, 2).await;
    let router = pools
        .router(&[
            "--cores",
            "1",
            "--policy",
            "least_loaded",
            "--retry-budget-ratio",
            "1",
        ])
        .await;
    for round in 0..12 {
        let name = format!("round {round}.");
        let failed = Arc::new(Mutex::new(None));
        for (n, worker) in pools.prefill.iter().enumerate() {
            let failed = failed.clone();
            prefill_script(worker, &pools.transfers, move |_| {
                let mut failed = failed.lock().unwrap();
                let is_first = failed.is_none();
                failed.get_or_insert(n);
                is_first.then(|| Reply::json(503, "{}"))
            });
        }
        pools.decode_fails_first(Reply::json(503, "{}"));
        let mut client = Client::open(router.address).await;
        let answer = client.post(CHAT, &chat(&name)).await.unwrap();
        assert_eq!(answer.status, 200, "{name}");
        let asked = |workers: &[Worker]| -> Vec<usize> {
            let of = |w: &Worker| w.requests().iter().filter(|r| r.has_text(&name)).count();
            workers.iter().map(of).collect()
        };
        // It fails, the other one serves, decode fails, and the other one serves once more.
        let expected = [[1, 2], [2, 1]][failed.lock().unwrap().unwrap()];
        assert_eq!(asked(&pools.prefill), expected, "{name}");
        assert_eq!(asked(&pools.decode), [1, 1], "{name}");
    }
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_lone_decode_workers_own_failure_reaches_the_client_and_is_booked_while_it_does() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    for status in [429, 500, 502, 503, 504] {
        let (open, gate) = tokio::sync::watch::channel(false);
        decode_script(&pools.decode[0], &pools.transfers, move |_| {
            Some(Reply {
                raw: None,
                pieces: vec![
                    (Duration::ZERO, br#"{"error":"#.to_vec()),
                    (Duration::from_millis(1), br#"{"message":"mine"}}"#.to_vec()),
                ],
                end: End::Stall,
                gate: Some(gate.clone()),
                ..Reply::json(status, "")
            })
        });
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        open.send(true).unwrap();
        let answer = client.answer(false).await.unwrap();
        assert_eq!(
            (answer.status, &*text(&answer.body)),
            (status, r#"{"error":{"message":"mine"}}"#)
        );
    }
    // While such an answer goes out, its worker is at work.
    decode_script(&pools.decode[0], &pools.transfers, |_| {
        Some(Reply {
            chunked: true,
            end: End::Stall,
            ..Reply::json(503, "busy")
        })
    });
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    assert!(client.head().await.unwrap().contains(" 503 "));
    assert_eq!(load(&router, &pools.decode[0]), (0, 1));
    assert_eq!(load(&router, &pools.prefill[0]), (0, 0));
    client.reset();
    until_books_are_empty(&router).await;
    pools.transfers.assert_kept();
}

#[tokio::test]
async fn a_stream_that_breaks_off_is_not_begun_anew() {
    let pools = Pools::start(1, 2).await;
    let router = pools.router(&[]).await;
    pools.decode_fails_first(Reply {
        end: End::Reset,
        ..Reply::events(3, Duration::from_millis(1))
    });
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!((answer.status, answer.is_whole), (200, false));
    until_books_are_empty(&router).await;
    assert_eq!((pools.prefill_count(), pools.decode_count()), (1, 1));
}

#[tokio::test]
async fn parameters_that_have_grown_old_are_not_given_to_another_decode_worker() {
    let pools = Pools::start(1, 2).await;
    let flags = [
        "--cores",
        "1",
        "--policy",
        "round_robin",
        "--pd-handover-age-max-secs",
        "1",
        "--connect-timeout-ms",
        "1300",
    ];
    let router = pools.router(&flags).await;
    let hung = pools.decode[0].hang().await;
    let stale = || pd_total(&router, |pd| pd.stale_handovers.value());
    let mut count = 0;
    // The first or the second one meets the worker that hangs.
    while stale() == 0 && count < 2 {
        count += 1;
        let mut client = Client::open(router.address).await;
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    }
    assert_eq!(stale(), 1);
    assert_eq!(pools.decode[1].count(), count);
    assert_eq!(pools.transfers.issued(), count + 1, "no new prefill");
    assert_eq!(pools.transfers.fetched() as u64, count);
    assert_eq!(orphans(&router), (1, 0, 1));
    pools.transfers.assert_kept();
    drop(hung);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn young_parameters_go_on_to_another_decode_worker_after_a_connect_that_hangs() {
    let pools = Pools::start(1, 2).await;
    let router = pools
        .router(&[
            "--cores",
            "1",
            "--policy",
            "round_robin",
            "--connect-timeout-ms",
            "200",
        ])
        .await;
    let _hung = pools.decode[0].hang().await;
    for _ in 0..2 {
        let mut client = Client::open(router.address).await;
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    }
    assert_eq!((pools.decode[1].count(), pools.transfers.issued()), (2, 2));
    assert_eq!(orphans(&router), (0, 0, 0));
    pools.transfers.assert_kept();
}

#[tokio::test]
async fn parameters_of_a_prefill_worker_that_has_restarted_are_not_used() {
    let pools = Pools::start(1, 2).await;
    let flags = [
        "--cores",
        "1",
        "--policy",
        "round_robin",
        "--connect-timeout-ms",
        "60000",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
        "--health-check-timeout-secs",
        "1",
    ];
    let router = pools.router(&flags).await;
    let hung = pools.decode[0].hang().await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        clients.push(client);
    }
    until("one waits for the decode worker that hangs", || {
        pools.transfers.issued() == 2 && pools.decode[1].count() == 1
    })
    .await;
    until("the other one's blocks are handed over", || {
        pd_total(&router, |pd| pd.handovers.value()) == 2
    })
    .await;
    let is_ready = || {
        let workers = router.control().workers();
        let url = pools.prefill[0].url();
        workers.iter().any(|w| *w.url == *url && w.state == "ready")
    };
    pools.prefill[0].die().await;
    until("its death is seen", || {
        router.control().probe();
        !is_ready()
    })
    .await;
    pools.prefill[0].revive().await;
    until("it is back", || {
        router.control().probe();
        is_ready()
    })
    .await;
    drop(hung);
    for client in &mut clients {
        assert_eq!(client.answer(false).await.unwrap().status, 200);
    }
    assert_eq!(pools.transfers.issued(), 3);
    assert_eq!(pools.transfers.fetched(), 2);
    assert_eq!(pd_total(&router, |pd| pd.stale_handovers.value()), 1);
    assert_eq!(orphans(&router), (1, 0, 1));
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_prefill_closes_the_prefill_connection_and_decode_sees_nothing() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    prefill_script(&pools.prefill[0], &pools.transfers, |_| {
        Some(Reply::nothing(End::Stall))
    });
    let aborted = || {
        pools.prefill[0]
            .state
            .aborted
            .load(std::sync::atomic::Ordering::SeqCst)
    };
    for (n, reset) in [true, false].into_iter().enumerate() {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        until("prefill runs", || pools.prefill[0].in_flight() == 1).await;
        if reset {
            client.reset();
        } else {
            drop(client);
        }
        until("its connection is closed", || aborted() == n as u64 + 1).await;
        until_books_are_empty(&router).await;
    }
    assert_eq!(pools.decode_count(), 0);
    assert_eq!(orphans(&router), (0, 0, 0));
}

#[tokio::test]
async fn a_client_that_leaves_between_the_legs_has_its_blocks_released_by_the_cheapest_decode_request()
 {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let hung = pools.decode[0].hang().await;
    let mut client = Client::open(router.address).await;
    let body = br#"{"model":"m","messages":[],"max_tokens":500,"min_tokens":9,"stream":true,"stream_options":{"include_usage":true},"x":2.50}"#;
    client.send(&post(CHAT, body)).await;
    until("the blocks are handed over", || {
        pd_total(&router, |pd| pd.handovers.value()) == 1
    })
    .await;
    client.reset();
    until("the hand-over is an orphan", || orphans(&router).0 == 1).await;
    assert_eq!(orphans(&router), (1, 0, 0));
    // The release has a seat: its worker will have work.
    assert_eq!(load(&router, &pools.decode[0]), (1, 0));
    pools.decode[0].go_on(hung);
    until("it is released", || orphans(&router) == (1, 1, 0)).await;
    let seen = pools.decode_requests();
    assert_eq!(seen.len(), 1);
    let params = params_of(&seen[0].body).unwrap();
    assert_eq!(
        text(&seen[0].body),
        format!(
            r#"{{"model":"m","messages":[],"max_tokens":1,"min_tokens":1,"stream":false,"x":2.50,"kv_transfer_params":{params}}}"#
        )
    );
    assert_eq!(
        (pools.transfers.issued(), pools.transfers.fetched()),
        (1, 1)
    );
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_release_that_finds_nobody_in_time_is_counted_lost() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&["--pd-release-timeout-secs", "1"]).await;
    let hung = pools.decode[0].hang().await;
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    until("the blocks are handed over", || {
        pd_total(&router, |pd| pd.handovers.value()) == 1
    })
    .await;
    client.reset();
    until("the orphan is lost", || orphans(&router) == (1, 0, 1)).await;
    until_books_are_empty(&router).await;
    drop(hung);
}

#[tokio::test]
async fn a_client_that_leaves_in_decode_closes_the_decode_connection() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let aborted = || {
        pools.decode[0]
            .state
            .aborted
            .load(std::sync::atomic::Ordering::SeqCst)
    };
    let in_answer = Reply {
        end: End::Stall,
        ..Reply::events(2, Duration::ZERO)
    };
    for (n, reply) in [Reply::nothing(End::Stall), in_answer]
        .into_iter()
        .enumerate()
    {
        let has_answer = n == 1;
        decode_script(&pools.decode[0], &pools.transfers, move |_| {
            Some(reply.clone())
        });
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        until("decode runs", || pools.decode[0].in_flight() == 1).await;
        if has_answer {
            assert!(client.fill(40).await);
        }
        client.reset();
        until("its connection is closed", || aborted() == n as u64 + 1).await;
        until_books_are_empty(&router).await;
    }
    assert_eq!(
        orphans(&router),
        (0, 0, 0),
        "the decode worker had the parameters"
    );
    assert_eq!(pools.decode_count(), 2);
    pools.transfers.assert_kept();
}
