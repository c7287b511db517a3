//! P/D with MoRI-IO engines that write: both legs at once. The prefill worker answers only when the decode worker has
//! got the request of the same transfer, as a real one could not write its blocks before.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::pd::*;
use common::*;
use corelane::Router;
use rmpv::Value as Packed;
use serde_json::{Value, json};
use tokio::sync::watch;
use zeromq::{Socket, SocketSend};

const CHAT: &str = "/v1/chat/completions";

type Gate = (watch::Sender<bool>, watch::Receiver<bool>);

/// Opened for a transfer by its decode request.
#[derive(Clone, Default)]
struct Gates(Arc<Mutex<HashMap<String, Gate>>>);

impl Gates {
    fn of(&self, request: &Recorded) -> Gate {
        let id = params(request)["transfer_id"].as_str().unwrap().to_string();
        let mut gates = self.0.lock().unwrap();
        let (opener, gate) = gates.entry(id).or_insert_with(|| watch::channel(false));
        (opener.clone(), gate.clone())
    }
}

fn params(request: &Recorded) -> Value {
    serde_json::from_str(&params_of(&request.body).expect("transfer parameters")).unwrap()
}

/// `fault` may answer instead, at once.
fn prefill_worker(
    worker: &Worker,
    gates: &Gates,
    fault: impl Fn(&Recorded) -> Option<Reply> + Send + Sync + 'static,
) {
    let gates = gates.clone();
    worker.script(move |request| {
        let (_, gate) = gates.of(request);
        fault(request).unwrap_or_else(|| Reply {
            gate: Some(gate),
            delay: Duration::from_millis(3),
            ..prefill_answer("null")
        })
    });
}

fn decode_worker(
    worker: &Worker,
    gates: &Gates,
    fault: impl Fn(&Recorded) -> Option<Reply> + Send + Sync + 'static,
) {
    let gates = gates.clone();
    worker.script(move |request| {
        gates.of(request).0.send_replace(true);
        fault(request).unwrap_or_else(decode_answer)
    });
}

struct Rig {
    prefill: Vec<Worker>,
    decode: Vec<Worker>,
    gates: Gates,
    router: Router,
    registering: tokio::task::JoinHandle<()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.registering.abort();
    }
}

impl Rig {
    /// Engines that register themselves; each has `dp` ranks.
    async fn start(prefill_count: usize, decode_count: usize, dp: u32, flags: &[&str]) -> Rig {
        let gates = Gates::default();
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        for _ in 0..prefill_count {
            let worker = Worker::start().await;
            prefill_worker(&worker, &gates, |_| None);
            prefill.push(worker);
        }
        for _ in 0..decode_count {
            let worker = Worker::start().await;
            decode_worker(&worker, &gates, |_| None);
            decode.push(worker);
        }
        let own = [
            "--kv-connector",
            "moriio",
            "--vllm-discovery-address",
            "127.0.0.1:0",
            "--health-check-interval-secs",
            "1",
        ];
        let router = pd_router(&[], &[], &[&own[..], flags].concat());
        let address = router.control().discovery_address().unwrap();
        let mut messages = Vec::new();
        for (kind, tp, workers) in [("P", 4, &prefill), ("D", 8, &decode)] {
            for worker in workers {
                let at = worker.url().replace("http://", "");
                let fields: Vec<(Packed, Packed)> = vec![
                    ("type".into(), kind.into()),
                    ("http_address".into(), at.clone().into()),
                    ("zmq_address".into(), at.into()),
                    ("transfer_mode".into(), "WRITE".into()),
                    ("tp_size".into(), tp.into()),
                    ("dp_size".into(), dp.into()),
                ];
                let mut bytes = Vec::new();
                rmpv::encode::write_value(&mut bytes, &Packed::Map(fields)).unwrap();
                messages.push(bytes);
            }
        }
        let count = messages.len() * dp as usize;
        let registering = tokio::spawn(async move {
            let mut socket = zeromq::DealerSocket::new();
            socket.connect(&format!("tcp://{address}")).await.unwrap();
            loop {
                for bytes in &messages {
                    socket.send(bytes.clone().into()).await.unwrap();
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
        until("all engines are ready", || {
            router.control().ready_count() == count
        })
        .await;
        Rig {
            prefill,
            decode,
            gates,
            router,
            registering,
        }
    }

    async fn post(&self, text: &str) -> Answer {
        let mut client = Client::open(self.router.address).await;
        let body = chat(text);
        // Legs that wait for each other would do so until the router gives up.
        let answer = tokio::time::timeout(Duration::from_secs(15), client.post(CHAT, &body));
        answer.await.expect("an answer in time").unwrap()
    }

    fn count(&self) -> (u64, u64) {
        let sum = |workers: &[Worker]| workers.iter().map(Worker::count).sum();
        (sum(&self.prefill), sum(&self.decode))
    }
}

fn rank(request: &Recorded) -> Option<u64> {
    let values = request.all("x-data-parallel-rank");
    values.first().map(|rank| text(rank).parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_legs_are_in_flight_at_once_and_each_is_told_of_the_other() {
    for dp in [1, 2] {
        let rig = Rig::start(1, 1, dp, &[]).await;
        let answer = rig.post("hello").await;
        assert_eq!(answer.status, 200);
        let prefill = rig.prefill[0].requests().pop().unwrap();
        let decode = rig.decode[0].requests().pop().unwrap();
        let (to_prefill, to_decode) = (params(&prefill), params(&decode));
        let id = to_prefill["transfer_id"].as_str().unwrap();
        let hex = id.strip_prefix("tx-").unwrap();
        assert!(hex.len() == 32 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let mut wanted = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": id, "remote_dp_size": dp, "remote_tp_size": 8});
        if dp > 1 {
            wanted["remote_dp_rank"] = rank(&decode).unwrap().into();
        }
        assert_eq!(to_prefill, wanted);
        let mut wanted = json!({"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": null,
            "remote_block_ids": null, "transfer_id": id, "remote_dp_size": dp, "remote_tp_size": 4});
        if dp > 1 {
            wanted["remote_dp_rank"] = rank(&prefill).unwrap().into();
        }
        assert_eq!(to_decode, wanted);
        assert_eq!(
            prefill.all("x-request-id"),
            decode.all("x-request-id"),
            "one id for both legs"
        );
        assert!(prefill.has_text("\"max_tokens\":1"));
        // The decode worker's own counts would say that all was cached.
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        let cached = &body["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(cached, CACHED_TOKENS, "{body}");
        until_books_are_empty(&rig.router).await;
    }
}

/// A stream whose events come before and after prefill's end loses none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_while_prefill_runs_is_held_and_not_lost() {
    let rig = Rig::start(1, 1, 1, &[]).await;
    prefill_worker(&rig.prefill[0], &rig.gates, |_| {
        Some(Reply {
            delay: Duration::from_millis(30),
            ..prefill_answer("null")
        })
    });
    decode_worker(&rig.decode[0], &rig.gates, |_| {
        Some(Reply::events(20, Duration::from_millis(3)))
    });
    let answer = rig.post("hello").await;
    assert!(answer.is_whole);
    let body = text(&answer.body);
    assert_eq!(body.matches("data: ").count(), 21, "{body}");
    // And where the decode worker has closed its connection long before.
    decode_worker(&rig.decode[0], &rig.gates, |_| {
        Some(Reply {
            until_close: true,
            ..decode_answer()
        })
    });
    let answer = rig.post("hello").await;
    assert_eq!(
        (answer.status, text(&answer.body)),
        (200, DECODE_BODY.into())
    );
    assert_eq!(rig.count(), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_prefill_refuses_reaches_the_client_as_it_is_and_decode_ends() {
    let rig = Rig::start(2, 2, 1, &[]).await;
    let refusal = r#"{"error":{"message":"too long","code":400, "x":2.50}}"#;
    for worker in &rig.prefill {
        prefill_worker(worker, &rig.gates, move |_| Some(Reply::json(400, refusal)));
    }
    for worker in &rig.decode {
        decode_worker(worker, &rig.gates, |_| Some(Reply::nothing(End::Stall)));
    }
    let answer = rig.post("hello").await;
    assert_eq!((answer.status, text(&answer.body)), (400, refusal.into()));
    assert_eq!(answer.field("content-type"), Some("application/json"));
    assert_eq!(rig.count(), (1, 1));
    until_books_are_empty(&rig.router).await;
    until("decode has ended", || {
        rig.decode.iter().all(|worker| worker.in_flight() == 0)
    })
    .await;
}

/// Prefill would wait for ever for a decode worker that has refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_decode_refuses_is_told_at_once_and_prefill_ends() {
    let rig = Rig::start(1, 1, 1, &[]).await;
    prefill_worker(&rig.prefill[0], &rig.gates, |_| {
        Some(Reply::nothing(End::Stall))
    });
    decode_worker(&rig.decode[0], &rig.gates, |_| {
        Some(Reply::json(422, r#"{"no":1}"#))
    });
    let answer = rig.post("hello").await;
    assert_eq!((answer.status, &*answer.body), (422, &b"{\"no\":1}"[..]));
    until("prefill has ended", || rig.prefill[0].in_flight() == 0).await;
    until_books_are_empty(&rig.router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_fails_costs_the_client_nothing() {
    for fault in [
        Reply::json(503, r#"{"error":{"message":"busy"}}"#),
        Reply::json(500, "{}"),
        Reply::nothing(End::Reset),
    ] {
        let rig = Rig::start(2, 2, 1, &[]).await;
        let turn = Arc::new(AtomicU64::new(0));
        for worker in &rig.prefill {
            let (turn, fault) = (turn.clone(), fault.clone());
            prefill_worker(worker, &rig.gates, move |_| {
                (turn.fetch_add(1, Ordering::SeqCst) == 0).then(|| fault.clone())
            });
        }
        // A real one waits for blocks that will not come.
        let first = Arc::new(AtomicU64::new(0));
        for worker in &rig.decode {
            let first = first.clone();
            decode_worker(worker, &rig.gates, move |_| {
                (first.fetch_add(1, Ordering::SeqCst) == 0).then(|| Reply::nothing(End::Stall))
            });
        }
        let answer = rig.post("hello").await;
        assert_eq!(answer.status, 200, "{}", text(&answer.body));
        assert_eq!(rig.count(), (2, 2));
        assert!(
            rig.prefill.iter().all(|worker| worker.count() == 1),
            "another one"
        );
        let ids: Vec<Value> = (rig.decode.iter().flat_map(Worker::requests))
            .map(|request| params(&request)["transfer_id"].clone())
            .collect();
        assert_ne!(ids[0], ids[1], "a new transfer has a new id");
        until_books_are_empty(&rig.router).await;
    }
}

/// Where there is no other pair, the answer says why; and nothing of the decode worker's, which has said something.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_prefill_is_told_where_nobody_else_can_do_it() {
    let rig = Rig::start(1, 1, 1, &[]).await;
    for (fault, status) in [
        (Reply::json(503, r#"{"error":{"message":"busy"}}"#), 503),
        (Reply::json(501, "{}"), 502),
        (Reply::nothing(End::Fin), 502),
        (Reply::json(200, "no json"), 502),
    ] {
        prefill_worker(&rig.prefill[0], &rig.gates, move |_| {
            Some(Reply {
                delay: Duration::from_millis(20),
                ..fault.clone()
            })
        });
        let answer = rig.post("hello").await;
        assert_eq!(answer.status, status, "{}", text(&answer.body));
        assert!(!text(&answer.body).contains("caf"));
        until_books_are_empty(&rig.router).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_prefill_worker_is_late_not_the_decode_worker_that_waits_for_it() {
    let rig = Rig::start(2, 1, 1, &["--first-byte-timeout-secs", "1"]).await;
    let turn = Arc::new(AtomicU64::new(0));
    for worker in &rig.prefill {
        let turn = turn.clone();
        prefill_worker(worker, &rig.gates, move |_| {
            (turn.fetch_add(1, Ordering::SeqCst) == 0).then(|| Reply::nothing(End::Stall))
        });
    }
    let turn = Arc::new(AtomicU64::new(0));
    decode_worker(&rig.decode[0], &rig.gates, move |_| {
        (turn.fetch_add(1, Ordering::SeqCst) == 0).then(|| Reply::nothing(End::Stall))
    });
    let answer = rig.post("hello").await;
    assert_eq!(answer.status, 200, "{}", text(&answer.body));
    assert_eq!(rig.count(), (2, 2));
    assert_eq!(failures(&rig.router, &rig.decode[0].url()), 0);
    until_books_are_empty(&rig.router).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_legs_end_within_a_second_when_the_client_is_gone() {
    let rig = Rig::start(1, 1, 1, &[]).await;
    prefill_worker(&rig.prefill[0], &rig.gates, |_| {
        Some(Reply::nothing(End::Stall))
    });
    decode_worker(&rig.decode[0], &rig.gates, |_| {
        Some(Reply::nothing(End::Stall))
    });
    let mut client = Client::open(rig.router.address).await;
    client.send(&post(CHAT, &chat("hello"))).await;
    until("both legs run", || {
        rig.prefill[0].in_flight() == 1 && rig.decode[0].in_flight() == 1
    })
    .await;
    client.reset();
    let began = Instant::now();
    until("both legs have ended", || {
        rig.prefill[0].in_flight() == 0 && rig.decode[0].in_flight() == 0
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(1), "{began:?}");
    until_books_are_empty(&rig.router).await;
}

/// What a worker does with a request, by a number in its body.
fn fault(request: &Recorded, name: &str) -> Option<Reply> {
    let at = memchr::memmem::find(&request.body, name.as_bytes()).unwrap() + name.len();
    let dice: u32 = text(&request.body[at..at + 3]).parse().unwrap();
    Some(match dice {
        0..=19 => Reply::nothing(End::Reset),
        20..=39 => Reply::json(503, "{}"),
        40..=59 => Reply::json(400, "{}"),
        60..=69 => Reply::nothing(End::Fin),
        70..=79 => Reply::json(500, "{}"),
        80..=89 => Reply::json(200, "no json"),
        90..=149 if name == "d:" => Reply::events(5, Duration::from_millis(1)),
        _ => return None,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_books_end_at_zero_after_2_000_requests_with_aborts() {
    const CLIENTS: u64 = 16;
    let seed = seed();
    let flags = ["--cores", "2", "--request-timeout-secs", "20"];
    let rig = Rig::start(3, 3, 1, &flags).await;
    for worker in &rig.prefill {
        prefill_worker(worker, &rig.gates, |r| fault(r, "p:"));
    }
    for worker in &rig.decode {
        decode_worker(worker, &rig.gates, |r| fault(r, "d:"));
    }
    let mut clients = Vec::new();
    for n in 0..CLIENTS {
        let address = rig.router.address;
        clients.push(tokio::spawn(async move {
            let mut rng = Rng(seed ^ n << 32);
            let (mut answered, mut aborted) = (0, 0);
            for _ in 0..2000 / CLIENTS {
                let words = format!("p:{:03} d:{:03}", rng.below(1000), rng.below(1000));
                let mut client = Client::open(address).await;
                client.send(&post(CHAT, &chat(&words))).await;
                if rng.below(10) < 3 {
                    tokio::time::sleep(Duration::from_micros(rng.below(8000))).await;
                    client.reset();
                    aborted += 1;
                } else {
                    let answer =
                        tokio::time::timeout(Duration::from_secs(30), client.answer(false));
                    answer.await.expect("an answer in time");
                    answered += 1;
                }
            }
            (answered, aborted)
        }));
    }
    for client in clients {
        let (answered, aborted) = client.await.unwrap();
        assert!(answered > 40 && aborted > 10);
    }
    until_books_are_empty(&rig.router).await;
    for view in rig.router.control().workers() {
        let load = rig.router.shared.books.load(view.id.slot);
        let sums = (
            load.waiting,
            load.active,
            load.waiting_bytes,
            load.active_bytes,
        );
        assert_eq!(sums, (0, 0, 0, 0), "{}", view.url);
    }
    assert_eq!(
        orphans(&rig.router).0,
        0,
        "there is no hand-over to release"
    );
}
