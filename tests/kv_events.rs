//! `kv_aware` through the whole router: engines announce their KV blocks over ZMQ, prompts of token ids go where their blocks are;
//! gaps, replay, publishers that begin anew or die.
//!
//! The publisher is written here, byte for byte, so that connections end when a test says so; one test has the real thing,
//! pyzmq and msgpack, and is skipped, saying so, where Python lacks them (`CORELANE_TEST_PYTHON` names another Python).

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use corelane::Router;
use corelane::route::{Reason, Trust};
use rmpv::Value;
use shards::Slot;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

const BLOCK: usize = 16;

/// What a publisher has sent, and to whom.
#[derive(Default)]
struct Sent {
    messages: Vec<(u64, Vec<u8>)>,
    subscribers: Vec<tokio::sync::mpsc::UnboundedSender<Vec<u8>>>,
    replay_count: u64,
}

/// An engine's event sockets: PUB, and ROUTER for replay.
struct Publisher {
    endpoint: String,
    replay_endpoint: String,
    sent: Arc<Mutex<Sent>>,
    next: u64,
    next_name: u64,
    _tasks: JoinSet<()>,
}

fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (place, frame) in frames.iter().enumerate() {
        // Long frames throughout: bit 1; more to come: bit 0.
        bytes.push(2 | u8::from(place + 1 < frames.len()));
        bytes.extend((frame.len() as u64).to_be_bytes());
        bytes.extend_from_slice(frame);
    }
    bytes
}

async fn greet(stream: &mut TcpStream, kind: &str) -> Option<()> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((kind.len() as u32).to_be_bytes());
    ready.extend_from_slice(kind.as_bytes());
    stream.write_all(&greeting).await.ok()?;
    stream.write_all(&[4, ready.len() as u8]).await.ok()?;
    stream.write_all(&ready).await.ok()?;
    stream.read_exact(&mut greeting).await.ok()?;
    // Its READY.
    frame(stream).await.map(|_| ())
}

async fn frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let flags = stream.read_u8().await.ok()?;
    let length = match flags & 2 {
        0 => u64::from(stream.read_u8().await.ok()?),
        _ => stream.read_u64().await.ok()?,
    };
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).await.ok()?;
    Some((flags, body))
}

impl Publisher {
    async fn start() -> Publisher {
        Publisher::start_at("127.0.0.1:0", "127.0.0.1:0").await
    }

    async fn start_at(events: &str, replay: &str) -> Publisher {
        let sent = Arc::new(Mutex::new(Sent::default()));
        let events = bind(events).await;
        let replay = bind(replay).await;
        let endpoint = events.local_addr().unwrap().to_string();
        let replay_endpoint = replay.local_addr().unwrap().to_string();
        let mut tasks = JoinSet::new();
        tasks.spawn(publish(events, sent.clone()));
        tasks.spawn(serve_replay(replay, sent.clone()));
        Publisher {
            endpoint,
            replay_endpoint,
            sent,
            next: 0,
            next_name: 1 << 40,
            _tasks: tasks,
        }
    }

    async fn until_subscribed(&self) {
        until("the router has subscribed", || {
            !self.sent.lock().unwrap().subscribers.is_empty()
        })
        .await;
    }

    fn publish(&mut self, events: Vec<Value>) {
        self.send(events, false);
    }

    /// Nobody gets it, but replay has it.
    fn lose(&mut self, events: Vec<Value>) {
        self.send(events, true);
    }

    fn send(&mut self, events: Vec<Value>, is_lost: bool) {
        let mut payload = Vec::new();
        let batch = Value::Array(vec![Value::F64(1.0), Value::Array(events), 0.into()]);
        rmpv::encode::write_value(&mut payload, &batch).unwrap();
        let mut sent = self.sent.lock().unwrap();
        sent.messages.push((self.next, payload.clone()));
        if !is_lost {
            let bytes = message(&[b"", &self.next.to_be_bytes(), &payload]);
            for subscriber in &sent.subscribers {
                let _ = subscriber.send(bytes.clone());
            }
        }
        self.next += 1;
    }

    /// An event about the blocks of these ids, and their names.
    fn stored(&mut self, ids: &[u32]) -> (Value, Vec<u64>) {
        let count = (ids.len() / BLOCK) as u64;
        let names: Vec<u64> = (self.next_name..self.next_name + count).collect();
        self.next_name += count;
        let ids = &ids[..count as usize * BLOCK];
        (stored(&names, ids), names)
    }

    fn replay_count(&self) -> u64 {
        self.sent.lock().unwrap().replay_count
    }
}

/// A port that another socket has just left may be taken for a moment.
async fn bind(address: &str) -> TcpListener {
    let end = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(e) => assert!(std::time::Instant::now() < end, "{address}: {e}"),
        }
        tokio::task::yield_now().await;
    }
}

async fn publish(listener: TcpListener, sent: Arc<Mutex<Sent>>) {
    let mut connections = JoinSet::new();
    while let Ok((mut stream, _)) = listener.accept().await {
        let sent = sent.clone();
        connections.spawn(async move {
            greet(&mut stream, "PUB").await?;
            let (_, subscription) = frame(&mut stream).await?;
            assert_eq!(subscription, b"\x01");
            let (sender, mut mail) = tokio::sync::mpsc::unbounded_channel();
            sent.lock().unwrap().subscribers.push(sender);
            while let Some(bytes) = mail.recv().await {
                stream.write_all(&bytes).await.ok()?;
            }
            Some(())
        });
    }
}

async fn serve_replay(listener: TcpListener, sent: Arc<Mutex<Sent>>) {
    let mut connections = JoinSet::new();
    while let Ok((mut stream, _)) = listener.accept().await {
        let sent = sent.clone();
        connections.spawn(async move {
            greet(&mut stream, "ROUTER").await?;
            loop {
                let (_, empty) = frame(&mut stream).await?;
                assert_eq!(empty, b"");
                let (_, from) = frame(&mut stream).await?;
                let from = u64::from_be_bytes(from.try_into().unwrap());
                let mut bytes = Vec::new();
                {
                    let mut sent = sent.lock().unwrap();
                    sent.replay_count += 1;
                    for (number, payload) in sent.messages.iter().filter(|(n, _)| *n >= from) {
                        bytes.extend(message(&[b"", &number.to_be_bytes(), payload]));
                    }
                }
                bytes.extend(message(&[b"", &(-1_i64).to_be_bytes(), b""]));
                stream.write_all(&bytes).await.ok()?;
            }
            #[allow(unreachable_code, reason = "it gives the block its type")]
            Some(())
        });
    }
}

fn numbers<T: Copy + Into<u64>>(numbers: &[T]) -> Value {
    Value::Array(numbers.iter().map(|n| (*n).into().into()).collect())
}

fn stored(names: &[u64], ids: &[u32]) -> Value {
    Value::Map(vec![
        ("type".into(), "BlockStored".into()),
        ("block_hashes".into(), numbers(names)),
        ("parent_block_hash".into(), Value::Nil),
        ("token_ids".into(), numbers(ids)),
        ("block_size".into(), (BLOCK as u64).into()),
        ("medium".into(), "GPU".into()),
    ])
}

/// In the older form.
fn removed(names: &[u64]) -> Value {
    Value::Array(vec!["BlockRemoved".into(), numbers(names), "GPU".into()])
}

fn cleared() -> Value {
    Value::Array(vec!["AllBlocksCleared".into()])
}

/// Workers that say who they are, each with a publisher, and a router that listens to them.
struct Cluster {
    workers: Vec<Worker>,
    router: Router,
}

async fn workers(count: usize) -> Vec<Worker> {
    let mut workers = Vec::new();
    for n in 0..count {
        let worker = Worker::start().await;
        worker.script(move |_| Reply::json(200, &n.to_string()));
        workers.push(worker);
    }
    workers
}

/// `has_replay`: the router is told of it.
async fn cluster(publishers: &[&Publisher], has_replay: bool) -> Cluster {
    let endpoints: Vec<(String, Option<String>)> = publishers
        .iter()
        .map(|p| {
            (
                p.endpoint.clone(),
                has_replay.then(|| p.replay_endpoint.clone()),
            )
        })
        .collect();
    let cluster = cluster_at(&endpoints, &[]).await;
    cluster.until_known(publishers).await;
    cluster
}

/// With more flags, without replay.
async fn cluster_with(publishers: &[&Publisher], more: &[&str]) -> Cluster {
    let endpoints = publishers.iter().map(|p| (p.endpoint.clone(), None));
    let cluster = cluster_at(&endpoints.collect::<Vec<_>>(), more).await;
    cluster.until_known(publishers).await;
    cluster
}

async fn cluster_at(endpoints: &[(String, Option<String>)], more: &[&str]) -> Cluster {
    let workers = workers(endpoints.len()).await;
    let mut flags = vec!["--policy".to_owned(), "kv_aware".to_owned()];
    flags.extend(more.iter().map(|flag| flag.to_string()));
    for (worker, (events, replay)) in workers.iter().zip(endpoints) {
        let url = worker.url();
        flags.extend([
            "--kv-event-source".to_owned(),
            format!("{url}=tcp://{events}"),
        ]);
        if let Some(replay) = replay {
            let source = format!("{url}=tcp://{replay}");
            flags.extend(["--kv-event-replay-source".to_owned(), source]);
        }
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let router = router_of(&workers, &flags).await;
    Cluster { workers, router }
}

impl Cluster {
    async fn until_known(&self, publishers: &[&Publisher]) {
        for publisher in publishers {
            publisher.until_subscribed().await;
        }
        for n in 0..publishers.len() {
            self.until_trust(n, Trust::Exact).await;
        }
    }

    /// The number of the worker that got a prompt of these ids.
    async fn ask(&self, ids: &[u32]) -> usize {
        let body = format!(r#"{{"model":"m","prompt":{ids:?}}}"#);
        self.ask_at("/v1/completions", &body).await
    }

    async fn ask_at(&self, path: &str, body: &str) -> usize {
        self.ask_with(path, "", body).await
    }

    async fn ask_with(&self, path: &str, head: &str, body: &str) -> usize {
        let mut client = Client::open(self.router.address).await;
        let length = body.len();
        let text = format!(
            "POST {path} HTTP/1.1\r\nHost: r\r\n{head}Content-Length: {length}\r\n\r\n{body}"
        );
        client.send(text.as_bytes()).await;
        let answer = client.answer(false).await.expect("an answer");
        assert_eq!(answer.status, 200);
        until_books_are_empty(&self.router).await;
        String::from_utf8(answer.body).unwrap().parse().unwrap()
    }

    /// Where it goes in eight requests, each with an end of its own.
    async fn homes(&self, ids: &[u32]) -> Vec<usize> {
        let mut homes = Vec::new();
        for n in 0..8 {
            let ids: Vec<u32> = ids.iter().copied().chain([9_000_000 + n; 5]).collect();
            homes.push(self.ask(&ids).await);
        }
        homes
    }

    fn held(&self) -> usize {
        let kv = self.router.shared.kv.as_ref().unwrap();
        kv.index.tree.membership_count()
    }

    async fn until_held(&self, count: usize) {
        until(&format!("the index holds {count} blocks"), || {
            self.held() == count
        })
        .await;
    }

    fn trust(&self, worker: usize) -> Trust {
        let views = self.router.control().workers();
        let url = self.workers[worker].url();
        let slot: Option<Slot> = views.iter().find(|v| *v.url == url).map(|v| v.id.slot);
        let kv = self.router.shared.kv.as_ref().unwrap();
        slot.map_or(Trust::Blind, |slot| kv.index.trust(slot))
    }

    async fn until_trust(&self, worker: usize, trust: Trust) {
        let limit = Duration::from_secs(30);
        until_within(limit, &format!("worker {worker} is {trust:?}"), || {
            self.trust(worker) == trust
        })
        .await;
    }

    fn reason(&self, reason: Reason) -> u64 {
        total(&self.router, |s| s.decided(reason))
    }
}

fn ids(seed: u32) -> Vec<u32> {
    (0..160).map(|n| seed * 1000 + n).collect()
}

#[tokio::test]
async fn prompts_go_to_the_worker_that_announced_their_blocks() {
    let mut publishers = [
        Publisher::start().await,
        Publisher::start().await,
        Publisher::start().await,
    ];
    let [a, b, c] = &publishers;
    let cluster = cluster(&[a, b, c], false).await;
    for (n, publisher) in publishers.iter_mut().enumerate() {
        let (event, _) = publisher.stored(&ids(n as u32 + 1));
        publisher.publish(vec![event]);
    }
    cluster.until_held(30).await;
    for n in 0..3 {
        assert_eq!(cluster.homes(&ids(n as u32 + 1)).await, [n; 8]);
    }
    assert_eq!(cluster.reason(Reason::LeastCostWarm), 24);
    // The other ways in which ids come; and a salt, whose blocks nobody has.
    let listed = format!("{:?}", [&ids(2)[..], &[7, 7]].concat());
    for (path, body) in [
        ("/v1/completions", format!(r#"{{"prompt":[{listed}]}}"#)),
        (
            "/inference/v1/generate",
            format!(r#"{{"token_ids":{listed}}}"#),
        ),
        ("/generate", format!(r#"{{"input_ids":{listed}}}"#)),
    ] {
        assert_eq!(cluster.ask_at(path, &body).await, 1, "{path}");
    }
    assert_eq!(cluster.reason(Reason::LeastCostWarm), 27);
    let salted = format!(r#"{{"prompt":{listed},"cache_salt":"mine"}}"#);
    cluster.ask_at("/v1/completions", &salted).await;
    assert_eq!(cluster.reason(Reason::LeastCostCold), 1);
    // Text: its tokens are not known, the tree of prompts serves.
    let text = format!(r#"{{"prompt":"{}"}}"#, "a long prompt ".repeat(100));
    let home = cluster.ask_at("/v1/completions", &text).await;
    until("the prompt is learnt", || {
        cluster.router.shared.tree.membership_count() > 0
    })
    .await;
    until_learnt(&cluster, &text, home).await;
    assert!(cluster.reason(Reason::Affinity) > 0);
}

/// Asks until affinity decides; then it is where the prompt was first.
async fn until_learnt(cluster: &Cluster, text: &str, home: usize) {
    for _ in 0..200 {
        let before = cluster.reason(Reason::Affinity);
        let now = cluster.ask_at("/v1/completions", text).await;
        if cluster.reason(Reason::Affinity) > before {
            return assert_eq!(now, home);
        }
    }
    panic!("the prompt is never known");
}

#[tokio::test]
async fn blocks_that_went_draw_nobody() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let cluster = cluster(&[&a, &b], false).await;
    let (event, names) = a.stored(&ids(1));
    a.publish(vec![event]);
    cluster.until_held(10).await;
    assert_eq!(cluster.homes(&ids(1)).await, [0; 8]);
    a.publish(vec![removed(&names[5..])]);
    cluster.until_held(5).await;
    assert_eq!(cluster.homes(&ids(1)).await, [0; 8]);
    a.publish(vec![cleared()]);
    cluster.until_held(0).await;
    let cold = cluster.reason(Reason::LeastCostCold);
    cluster.homes(&ids(1)).await;
    assert_eq!(cluster.reason(Reason::LeastCostCold), cold + 8);
}

#[tokio::test]
async fn a_gap_is_filled_by_replay() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let cluster = cluster(&[&a, &b], true).await;
    let (first, second, third) = (
        a.stored(&ids(1)).0,
        a.stored(&ids(2)).0,
        a.stored(&ids(3)).0,
    );
    a.publish(vec![first]);
    cluster.until_held(10).await;
    let replays = a.replay_count();
    a.lose(vec![second]);
    a.publish(vec![third]);
    cluster.until_held(30).await;
    cluster.until_trust(0, Trust::Exact).await;
    assert_eq!(a.replay_count(), replays + 1);
    for n in 1..4 {
        assert_eq!(cluster.homes(&ids(n)).await, [0; 8]);
    }
}

/// Without replay a removal may be among what was lost: the worker's blocks count half until it clears them.
#[tokio::test]
async fn a_gap_without_replay_degrades() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let cluster = cluster(&[&a, &b], false).await;
    let (event, names) = a.stored(&ids(1));
    a.publish(vec![event]);
    cluster.until_held(10).await;
    a.lose(vec![removed(&names)]);
    let (event, _) = a.stored(&ids(2));
    a.publish(vec![event]);
    cluster.until_trust(0, Trust::Degraded).await;
    cluster.until_held(20).await;
    assert_eq!(cluster.homes(&ids(2)).await, [0; 8]);
    a.publish(vec![cleared()]);
    cluster.until_trust(0, Trust::Exact).await;
    cluster.until_held(0).await;
}

#[tokio::test]
async fn who_comes_late_learns_by_replay() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let (event, _) = a.stored(&ids(1));
    a.publish(vec![event]);
    let cluster = cluster(&[&a, &b], true).await;
    cluster.until_held(10).await;
    assert_eq!(cluster.homes(&ids(1)).await, [0; 8]);
    // What is published from now on follows what was replayed.
    let (event, _) = a.stored(&ids(2));
    a.publish(vec![event]);
    cluster.until_held(20).await;
    assert_eq!(cluster.trust(0), Trust::Exact);
}

/// A new process behind the same ports: it holds nothing of what the old one held.
#[tokio::test]
async fn a_publisher_that_begins_anew_begins_with_nothing() {
    for has_replay in [true, false] {
        let (mut a, b) = (Publisher::start().await, Publisher::start().await);
        let cluster = cluster(&[&a, &b], has_replay).await;
        for n in 1..4 {
            let (event, _) = a.stored(&ids(n));
            a.publish(vec![event]);
        }
        cluster.until_held(30).await;
        let (events, replay) = (a.endpoint.clone(), a.replay_endpoint.clone());
        drop(a);
        let mut a = Publisher::start_at(&events, &replay).await;
        a.until_subscribed().await;
        let (event, _) = a.stored(&ids(5));
        a.publish(vec![event]);
        cluster.until_held(10).await;
        cluster.until_trust(0, Trust::Exact).await;
        assert_eq!(cluster.homes(&ids(5)).await, [0; 8]);
        // On the same connection, too, if the numbers go back.
        a.next = 0;
        let (event, _) = a.stored(&ids(6)[..32]);
        a.sent.lock().unwrap().messages.clear();
        a.publish(vec![event]);
        cluster.until_held(2).await;
    }
}

#[tokio::test]
async fn when_publishers_die_trust_ends_and_the_tree_serves() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let cluster = cluster(&[&a, &b], false).await;
    let (event, _) = a.stored(&ids(1));
    a.publish(vec![event]);
    cluster.until_held(10).await;
    assert_eq!(cluster.homes(&ids(1)).await, [0; 8]);
    drop((a, b));
    cluster.until_trust(0, Trust::Blind).await;
    cluster.until_trust(1, Trust::Blind).await;
    let by_cost = cluster.reason(Reason::LeastCostWarm) + cluster.reason(Reason::LeastCostCold);
    let body = format!(r#"{{"model":"m","prompt":{:?}}}"#, ids(1));
    until_learnt(&cluster, &body, 0).await;
    let now = cluster.reason(Reason::LeastCostWarm) + cluster.reason(Reason::LeastCostCold);
    assert_eq!(now, by_cost);
}

/// A session stays with its worker, wherever its blocks are; others go to the blocks.
#[tokio::test]
async fn a_session_keeps_to_its_worker_if_it_is_asked_for() {
    let mut publishers = [Publisher::start().await, Publisher::start().await];
    let [a, b] = &publishers;
    let flags = ["--kv-aware-session-affinity-ttl-secs", "60"];
    let cluster = cluster_with(&[a, b], &flags).await;
    let body = format!(r#"{{"prompt":{:?}}}"#, ids(1));
    let ask = |session: &'static str| {
        let head = match session {
            "" => String::new(),
            session => format!("x-session-id: {session}\r\n"),
        };
        let (cluster, body) = (&cluster, &body);
        async move { cluster.ask_with("/v1/completions", &head, body).await }
    };
    let home = ask("one").await;
    let (event, _) = publishers[1 - home].stored(&ids(1));
    publishers[1 - home].publish(vec![event]);
    cluster.until_held(10).await;
    for _ in 0..6 {
        assert_eq!(ask("one").await, home);
        assert_eq!(ask("").await, 1 - home);
    }
    assert_eq!(
        ask("two").await,
        1 - home,
        "a new one begins where its blocks are"
    );
    assert_eq!(cluster.reason(Reason::Home), 6);
    let page = scrape(cluster.router.metrics_address).await;
    for (outcome, count) in [("bind", 2), ("sticky_hit", 6), ("no_session", 6)] {
        let series = "vllm_router_pd_affinity_decisions_total";
        let line = format!("{series}{{stage=\"regular\",outcome=\"{outcome}\"}} {count}");
        assert!(page.contains(&line), "{line}\n{page}");
    }
    let input = "vllm_router_kv_routing_inputs_total{transport=\"http\",result=\"token_ids\"} 14";
    assert!(page.contains(input), "{page}");
}

#[cfg(feature = "tokenizer")]
mod text {
    use super::*;

    const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tokenizer");

    /// Requests with the tokens that the Python libraries make of them (`tests/tokenizer/make.py`).
    fn recorded() -> serde_json::Value {
        serde_json::from_str(include_str!("tokenizer/cases.json")).unwrap()
    }

    fn ids_of(case: &serde_json::Value) -> Vec<u32> {
        serde_json::from_value(case["ids"].clone()).unwrap()
    }

    async fn cluster_of(publishers: &[&Publisher], timeout_ms: &str) -> Cluster {
        let template = format!("{FOLDER}/chatml.jinja");
        let flags = [
            "--tokenizer",
            FOLDER,
            "--chat-template",
            &template,
            "--tokenizer-timeout-ms",
            timeout_ms,
        ];
        cluster_with(publishers, &flags).await
    }

    impl Cluster {
        async fn until_shown(&self, lines: &[&str]) {
            let mut page = String::new();
            let end = std::time::Instant::now() + Duration::from_secs(60);
            while std::time::Instant::now() < end {
                page = scrape(self.router.metrics_address).await;
                if lines.iter().all(|line| page.contains(line)) {
                    return;
                }
            }
            panic!("{lines:#?} not all in\n{page}");
        }
    }

    /// The engine that computed the first turn gets the second one, though the client sent words.
    #[tokio::test]
    async fn the_next_turn_of_a_chat_goes_to_the_engine_that_holds_the_last_one() {
        let mut publishers = [
            Publisher::start().await,
            Publisher::start().await,
            Publisher::start().await,
        ];
        let [a, b, c] = &publishers;
        let cluster = cluster_of(&[a, b, c], "10000").await;
        let cases = recorded();
        let (first, second) = (&cases["chat"][1], &cases["chat"][2]);
        let (event, names) = publishers[1].stored(&ids_of(first));
        publishers[1].publish(vec![event]);
        cluster.until_held(names.len()).await;
        for turn in [second, second, first, second, first, second] {
            assert_eq!(cluster.ask_at(CHAT, &turn["request"].to_string()).await, 1);
        }
        assert_eq!(cluster.reason(Reason::LeastCostWarm), 6);
        // A text with the model's begin token before it.
        let plain = &cases["plain"][3];
        let (event, names) = publishers[2].stored(&ids_of(plain));
        publishers[2].publish(vec![event]);
        cluster.until_held(4 + names.len()).await;
        let body = serde_json::json!({"prompt": plain["prompt"]}).to_string();
        for _ in 0..4 {
            assert_eq!(cluster.ask_at("/v1/completions", &body).await, 2);
        }
        assert_eq!(cluster.reason(Reason::LeastCostWarm), 10);
        cluster
            .until_shown(&["corelane_tokenizer_prompts_total{result=\"made\"} 10"])
            .await;
    }

    const CHAT: &str = "/v1/chat/completions";

    async fn goes_by_no_cost(cluster: &Cluster) {
        let by_cost = [Reason::LeastCostWarm, Reason::LeastCostCold];
        assert_eq!(by_cost.map(|reason| cluster.reason(reason)), [0, 0]);
    }

    #[tokio::test]
    async fn what_cannot_be_tokenised_is_placed_by_the_tree() {
        let (a, b) = (Publisher::start().await, Publisher::start().await);
        let cluster = cluster_of(&[&a, &b], "10000").await;
        let image = serde_json::json!({"type": "image_url", "image_url": {"url": "http://i"}});
        let body = serde_json::json!({"messages": [{"role": "user", "content": [image]}]});
        cluster.ask_at(CHAT, &body.to_string()).await;
        let counted = [
            "corelane_tokenizer_prompts_total{result=\"media\"} 1",
            "corelane_tokenizer_prompts_total{result=\"late\"} 0",
        ];
        cluster.until_shown(&counted).await;
        goes_by_no_cost(&cluster).await;
    }

    #[tokio::test]
    async fn what_is_not_tokenised_in_time_is_placed_by_the_tree() {
        let (a, b) = (Publisher::start().await, Publisher::start().await);
        let cluster = cluster_of(&[&a, &b], "1").await;
        let words = "so many words that no tokenizer is done in a millisecond ".repeat(5_000);
        let body = serde_json::json!({"messages": [{"role": "user", "content": words}]});
        cluster.ask_at(CHAT, &body.to_string()).await;
        goes_by_no_cost(&cluster).await;
        // They are made all the same, for the next turn.
        let counted = [
            "corelane_tokenizer_prompts_total{result=\"late\"} 1",
            "corelane_tokenizer_prompts_total{result=\"made\"} 1",
        ];
        cluster.until_shown(&counted).await;
    }
}

#[tokio::test]
async fn metrics_tell_of_events() {
    let (mut a, b) = (Publisher::start().await, Publisher::start().await);
    let cluster = cluster(&[&a, &b], true).await;
    let (event, names) = a.stored(&ids(1));
    a.publish(vec![event, removed(&names[7..])]);
    cluster.until_held(7).await;
    let url = cluster.workers[0].url();
    let wanted = [
        format!("corelane_kv_trust{{worker=\"{url}\"}} 3"),
        format!("corelane_kv_blocks{{worker=\"{url}\"}} 7"),
        format!("corelane_kv_stored_total{{worker=\"{url}\"}} 10"),
        format!("corelane_kv_removed_total{{worker=\"{url}\"}} 3"),
        "corelane_kv_index_memberships 7".to_owned(),
        format!("vllm_router_pd_identity_verified{{worker=\"{url}\"}} 1"),
        // Of 160 tokens 112 are held; the prompt is asked twice, and once one that nobody holds, then one without tokens.
        "vllm_router_kv_placement_lookups_total{result=\"hit\"} 2".to_owned(),
        "vllm_router_kv_placement_lookups_total{result=\"miss\"} 1".to_owned(),
        "vllm_router_kv_placement_lookups_total{result=\"unavailable\"} 1".to_owned(),
        "result=\"render_unavailable\"} 1".to_owned(),
        "corelane_kv_credited_tokens_total 224".to_owned(),
        "corelane_kv_new_tokens_sum 256".to_owned(),
        "corelane_kv_new_tokens_count 3".to_owned(),
    ];
    for _ in 0..2 {
        cluster.ask(&ids(1)).await;
    }
    cluster.ask(&ids(2)).await;
    cluster
        .ask_at("/v1/completions", r#"{"prompt":"words"}"#)
        .await;
    let mut page = String::new();
    // A core may be done before the task that taught it has noted so.
    for _ in 0..100 {
        page = scrape(cluster.router.metrics_address).await;
        if wanted.iter().all(|line| page.contains(line.as_str())) {
            return;
        }
    }
    panic!("{wanted:#?} not all in\n{page}");
}

async fn scrape(address: std::net::SocketAddr) -> String {
    let mut client = Client::open(address).await;
    client
        .send(b"GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        .await;
    let answer = client.answer(false).await.expect("an answer");
    String::from_utf8(answer.body).unwrap()
}

/// vLLM's own libraries: events in both forms, a lost message, replay.
const PYTHON: &str = r#"
import struct, sys, threading, msgpack, zmq
context = zmq.Context()
pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
port = pub.bind_to_random_port("tcp://127.0.0.1")
replay_port = router.bind_to_random_port("tcp://127.0.0.1")
sent = []
def replay():
    while True:
        ident, _, start = router.recv_multipart()
        for number, payload in list(sent):
            if number >= struct.unpack(">Q", start)[0]:
                router.send_multipart([ident, b"", struct.pack(">q", number), payload])
        router.send_multipart([ident, b"", struct.pack(">q", -1), b""])
threading.Thread(target=replay, daemon=True).start()
print(port, replay_port, flush=True)
for line in sys.stdin:
    command, first = line.split()
    first = int(first)
    ids = [first * 1000 + n for n in range(160)]
    names = [(first << 32) + n for n in range(10)]
    if command == "array":
        event = ["BlockStored", names, None, ids, 16, None, "GPU", None]
    elif command in ("map", "lose"):
        event = {"type": "BlockStored", "block_hashes": [n.to_bytes(32, "big") for n in names],
                 "parent_block_hash": None, "token_ids": ids, "block_size": 16, "lora_id": None,
                 "medium": "GPU", "lora_name": None, "extra_keys": None, "group_idx": 0,
                 "kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None}
    else:
        event = ["AllBlocksCleared"]
    payload = msgpack.packb([1.5, [event], 0])
    sent.append((len(sent), payload))
    if command != "lose":
        pub.send_multipart([b"kv@topic", struct.pack(">q", len(sent) - 1), payload])
"#;

struct Python(Child);

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn pyzmq_is_understood() {
    let python = std::env::var("CORELANE_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let check = Command::new(&python)
        .args(["-c", "import zmq, msgpack"])
        .stderr(Stdio::null())
        .status();
    if !check.is_ok_and(|status| status.success()) {
        println!("skipped: {python} has no zmq and msgpack");
        return;
    }
    let child = Command::new(&python)
        .args(["-c", PYTHON])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut python = Python(child.unwrap());
    let mut input = python.0.stdin.take().unwrap();
    let mut ports = String::new();
    let mut output = BufReader::new(python.0.stdout.take().unwrap());
    output.read_line(&mut ports).unwrap();
    let (port, replay_port) = ports.trim().split_once(' ').expect("two ports");
    let endpoints = [(
        format!("127.0.0.1:{port}"),
        Some(format!("127.0.0.1:{replay_port}")),
    )];
    let cluster = cluster_at(&endpoints, &[]).await;
    cluster.until_trust(0, Trust::Exact).await;
    let mut tell = |line: &str| writeln!(input, "{line}").unwrap();
    // PUB may not know of the subscription yet: the next message shows the gap, and replay fills it.
    tell("array 1");
    tell("lose 2");
    let mut held = 20;
    for n in 3..100 {
        tell(&format!("map {n}"));
        held += 10;
        let end = std::time::Instant::now() + Duration::from_millis(300);
        while cluster.held() < held && std::time::Instant::now() < end {
            tokio::task::yield_now().await;
        }
        if cluster.held() == held {
            break;
        }
    }
    cluster.until_held(held).await;
    cluster.until_trust(0, Trust::Exact).await;
    let warm = cluster.reason(Reason::LeastCostWarm);
    for n in 1..4 {
        cluster.ask(&ids(n)).await;
    }
    assert_eq!(cluster.reason(Reason::LeastCostWarm), warm + 3);
    tell("clear 0");
    cluster.until_held(0).await;
}
