//! What clients may make the router hold: the limits of bodies and of those that wait, each with its refusal, and the
//! bound on memory that follows from the flags ([`Flags::bound_bytes`]; the README has it as a formula), measured at a process
//! of its own under each attack.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::process::*;
use common::*;
use tokio::sync::watch;
use tokio::task::JoinSet;

const CHAT: &str = "/v1/chat/completions";

/// Head and begin of a request whose body has this length.
fn begun(path: &str, body_bytes: usize, sent: usize) -> Vec<u8> {
    let head = format!("POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {body_bytes}\r\n\r\n");
    [
        head.as_bytes(),
        br#"{"prompt":""#,
        &vec![b'p'; sent.saturating_sub(11)],
    ]
    .concat()
}

/// A good body of this length.
fn prompt(bytes: usize) -> Vec<u8> {
    format!("{{\"prompt\":\"{}\"}}", "p".repeat(bytes - 13)).into_bytes()
}

fn assert_refused(answer: Option<Answer>, status: u16, code: &str) {
    let answer = answer.expect("an answer");
    let json: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(
        (answer.status, json["error"]["code"].as_str()),
        (status, Some(code)),
        "{json}"
    );
    let retry_after = answer.field("retry-after").map(str::parse::<u32>);
    assert_eq!(
        retry_after.is_some_and(|secs| secs.is_ok_and(|secs| secs >= 1)),
        matches!(status, 429 | 503),
        "{}",
        answer.head
    );
}

async fn until_nothing_is_held(router: &corelane::Router) {
    until_books_are_empty(router).await;
    let shared = &router.shared;
    until("no byte is counted any more", || {
        let of_cores = shared.cores.iter().map(|core| core.bodies.bytes());
        (
            of_cores.sum::<u64>(),
            shared.bodies.bytes(),
            shared.queued.bytes(),
        ) == (0, 0, 0)
    })
    .await;
}

#[tokio::test]
async fn bodies_in_memory_have_a_limit_and_who_is_over_it_is_told_when_to_come_again() {
    let worker = Worker::start().await;
    for flags in [
        ["--body-memory-bytes", "1000000", "--cores", cores()],
        ["--body-memory-bytes-per-core", "1000000", "--cores", "1"],
    ] {
        let router = router(&[&worker], &flags).await;
        let bodies = &router.shared.bodies;
        let mut first = Client::open(router.address).await;
        first
            .send(&begun("/v1/completions", 700_000, 600_000))
            .await;
        until("it is counted", || bodies.bytes() >= 600_000).await;
        let seen = worker.count();
        // One that is over, whether its length is known or not; what still comes of it is read.
        let mut second = Client::open(router.address).await;
        second
            .send(&post("/v1/completions", &prompt(600_000)))
            .await;
        assert_refused(second.answer(false).await, 503, "body_memory_full");
        let mut third = Client::open(router.address).await;
        let head = "POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n";
        third.send(head.as_bytes()).await;
        let chunk = [b"10000\r\n".as_slice(), &[b'c'; 65_536], b"\r\n"].concat();
        for _ in 0..12 {
            third.send(&chunk).await;
        }
        assert_refused(third.answer(false).await, 503, "body_memory_full");
        // One that never fits.
        let mut fourth = Client::open(router.address).await;
        fourth.send(&begun("/v1/completions", 1_000_001, 0)).await;
        assert_refused(fourth.answer(false).await, 413, "request_too_large");
        assert_eq!(worker.count(), seen, "no worker saw one");
        // Small ones, and what is not read whole, go on.
        let mut small = Client::open(router.address).await;
        for path in [CHAT, "/upload"] {
            let body = if path == CHAT {
                chat("x")
            } else {
                prompt(900_000)
            };
            assert_eq!(small.post(path, &body).await.unwrap().status, 200, "{path}");
        }
        let rest = [vec![b'p'; 99_998], b"\"}".to_vec()].concat();
        first.send(&rest).await;
        assert_eq!(first.answer(false).await.unwrap().status, 200);
        let mut again = Client::open(router.address).await;
        let answer = again.post("/v1/completions", &prompt(600_000)).await;
        assert_eq!(answer.unwrap().status, 200, "there is room again");
        // One that leaves in the middle.
        let mut gone = Client::open(router.address).await;
        gone.send(&begun("/v1/completions", 700_000, 600_000)).await;
        until("it is counted", || bodies.bytes() >= 500_000).await;
        gone.reset();
        until_nothing_is_held(&router).await;
    }
}

#[tokio::test]
async fn those_that_wait_have_a_limit_in_bytes() {
    let worker = Worker::start().await;
    let (open, gate) = watch::channel(false);
    worker.script(move |_| Reply {
        gate: Some(gate.clone()),
        ..Reply::default()
    });
    let flags = ["--max-concurrent-requests", "1", "--queue-bytes", "100000"];
    let router = router(&[&worker], &flags).await;
    let counts = || router.shared.gate.counts();
    let mut clients = Vec::new();
    for n in 0..2 {
        let mut client = Client::open(router.address).await;
        client.send(&post("/v1/completions", &prompt(60_000))).await;
        until("one runs, one waits", || counts() == (1, n)).await;
        clients.push(client);
    }
    let mut over = Client::open(router.address).await;
    let answer = over.post("/v1/completions", &prompt(60_000)).await;
    assert_refused(answer, 429, "queue_bytes_full");
    assert_eq!(counts(), (1, 1), "it holds no place");
    // The same connection may wait with less.
    over.send(&post(CHAT, &chat("small"))).await;
    until("it waits", || counts() == (1, 2)).await;
    clients.push(over);
    // Who leaves makes room.
    clients.remove(1).reset();
    until("one has left", || counts() == (1, 1)).await;
    let mut next = Client::open(router.address).await;
    next.send(&post("/v1/completions", &prompt(60_000))).await;
    until("it waits", || counts() == (1, 2)).await;
    clients.push(next);
    open.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(client.answer(false).await.unwrap().status, 200);
    }
    until_nothing_is_held(&router).await;
}

// ---- memory ----

const MIB: u64 = 1 << 20;
/// Of the allocator, of code that is paged in, of tables that grow.
const SLACK_BYTES: u64 = 12 * MIB;

/// The flags that the bound is made of.
struct Flags {
    header_size_max_bytes: u64,
    recv_buffer_bytes: u64,
    relay_buffer_bytes: u64,
    body_memory_bytes: u64,
}

const FLAGS: Flags = Flags {
    header_size_max_bytes: 8192,
    recv_buffer_bytes: 4096,
    relay_buffer_bytes: 16_384,
    body_memory_bytes: 8 * MIB,
};

/// What a connection can be made to hold.
#[derive(Clone, Copy, Debug)]
enum Holds {
    /// Nothing: it is idle.
    Nothing,
    /// A head that has not come whole, or requests behind the one that runs.
    Inbox,
    /// A request: its fields, and up to 32 KiB of body.
    Message,
    /// That, and bytes for a client (or worker) that does not take them.
    Relay,
}

impl Flags {
    /// Of one connection. Buffers grow by doubling, hence the factors.
    fn connection_bytes(&self, holds: Holds) -> u64 {
        let idle = 4096;
        let inbox = 2 * (self.header_size_max_bytes.max(65_536) + self.recv_buffer_bytes);
        let message = 2 * (self.header_size_max_bytes + 32_768);
        let relay = 2 * (self.relay_buffer_bytes + 2 * self.recv_buffer_bytes);
        match holds {
            Holds::Nothing => idle,
            Holds::Inbox => idle + inbox + message,
            Holds::Message => idle + message,
            Holds::Relay => idle + message + relay,
        }
    }

    /// What so many connections can make the router hold beyond what it holds without them, on one core.
    fn bound_bytes(&self, connections: u64, holds: Holds, has_bodies: bool) -> u64 {
        let bodies = if has_bodies {
            self.body_memory_bytes + 16 * MIB
        } else {
            0
        };
        connections * self.connection_bytes(holds) + bodies + SLACK_BYTES
    }
}

fn router_process(worker: &Worker) -> RouterProcess {
    router_process_with(worker, &FLAGS, 64)
}

fn router_process_with(worker: &Worker, limits: &Flags, buffers: u64) -> RouterProcess {
    let flags = [
        ("--header-size-max-bytes", limits.header_size_max_bytes),
        ("--recv-buffer-bytes", limits.recv_buffer_bytes),
        ("--relay-buffer-bytes", limits.relay_buffer_bytes),
        ("--body-memory-bytes", limits.body_memory_bytes),
        ("--recv-buffer-count", buffers),
        ("--max-connections", 1000),
        ("--prefix-memory-bytes", MIB),
        ("--cores", 1),
        ("--port", 0),
        ("--prometheus-port", 0),
    ];
    let mut command = corelane(&["--worker-urls", &worker.url()]);
    for (flag, value) in flags {
        command.args([flag, &value.to_string()]);
    }
    RouterProcess::start(command)
}

/// What one client of an attack does. It has had its effect when this returns; its connection stays for as long as the
/// returned client does.
async fn attack(kind: &'static str, address: SocketAddr) -> Client {
    let mut client = Client::open(address).await;
    match kind {
        "idle" => {}
        "heads that do not end" => {
            let head = format!("GET /x HTTP/1.1\r\nHost: r\r\nX: {}", "h".repeat(8_000));
            client.send(head.as_bytes()).await;
        }
        "heads over the limit" => {
            let field = format!("X: {}\r\n", "h".repeat(1_000));
            let head = format!("GET /x HTTP/1.1\r\nHost: r\r\n{}\r\n", field.repeat(100));
            client.send(head.as_bytes()).await;
            let answer = client.answer(false).await;
            assert!(answer.is_none_or(|answer| answer.status == 431));
        }
        "bodies announced and never sent" => client.send(&begun(CHAT, 8_000_000, 1)).await,
        "bodies that do not end" => {
            client.send(&begun(CHAT, 2_000_000, 1_500_000)).await;
        }
        "one-byte chunks" => {
            let head =
                format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n");
            client.send(head.as_bytes()).await;
            client.send(&b"1\r\n \r\n".repeat(10_000)).await;
        }
        "requests behind a slow one" => {
            client.send(&post(CHAT, &chat("slow"))).await;
            let behind = post(CHAT, &chat("behind")).repeat(300);
            // More than the sockets take may be left over.
            let sending = client.send(&behind);
            let _ = tokio::time::timeout(Duration::from_millis(300), sending).await;
        }
        "slow readers" => {
            client = Client::open_narrow(address, 4096).await;
            client.send(&post(CHAT, &chat("large"))).await;
            client.head().await.expect("the head of an answer");
        }
        other => unreachable!("{other}"),
    }
    client
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn memory_under_attack_stays_below_the_bound_that_follows_from_the_flags() {
    let attacks = [
        ("idle", 300, Holds::Nothing, false),
        ("heads that do not end", 300, Holds::Inbox, false),
        ("heads over the limit", 300, Holds::Inbox, false),
        (
            "bodies announced and never sent",
            300,
            Holds::Message,
            false,
        ),
        ("bodies that do not end", 40, Holds::Message, true),
        ("one-byte chunks", 100, Holds::Message, false),
        ("requests behind a slow one", 100, Holds::Inbox, false),
        ("slow readers", 30, Holds::Relay, false),
    ];
    let worker = Worker::start_with(false).await;
    worker.script(
        |request| match (request.has_text("slow"), request.has_text("large")) {
            (true, _) => Reply::nothing(End::Stall),
            (_, true) => Reply {
                pieces: vec![(Duration::ZERO, vec![b'l'; 12 << 20])],
                ..Reply::default()
            },
            _ => Reply::default(),
        },
    );
    for (kind, count, holds, has_bodies) in attacks {
        let router = router_process(&worker);
        router.until_healthy().await;
        let mut friend = Client::open(router.address).await;
        assert_eq!(friend.post(CHAT, &chat("hello")).await.unwrap().status, 200);
        let before = status_bytes(router.id(), "VmRSS:");
        let mut attackers: JoinSet<Client> =
            (0..count).map(|_| attack(kind, router.address)).collect();
        let mut clients = Vec::new();
        while let Some(client) = attackers.join_next().await {
            clients.push(client.unwrap());
        }
        if kind == "bodies that do not end" {
            // All but those that fit have been told so.
            let most = (FLAGS.body_memory_bytes / 1_500_000) as usize;
            let mut refused = 0;
            let mut waiting: JoinSet<Option<Answer>> = clients
                .drain(..)
                .map(|mut client| async move { client.answer(false).await })
                .collect();
            while refused < count - most {
                let answer = waiting.join_next().await.unwrap().unwrap();
                assert_refused(answer, 503, "body_memory_full");
                refused += 1;
            }
        }
        // Everybody else is served.
        assert_eq!(
            friend.post(CHAT, &chat("hello")).await.unwrap().status,
            200,
            "{kind}"
        );
        let most = status_bytes(router.id(), "VmHWM:").saturating_sub(before);
        let bound = FLAGS.bound_bytes(count as u64, holds, has_bodies);
        println!(
            "{kind}: {count} connections, {} KiB, at most {} KiB",
            most / 1024,
            bound / 1024
        );
        assert!(most <= bound, "{kind}: {most} bytes, at most {bound}");
        drop(clients);
        router.until_load_is(0, Duration::from_secs(20)).await;
        assert_eq!(
            router.series("corelane_body_memory_bytes").await,
            0.0,
            "{kind}"
        );
    }
}

/// The kernel takes receive buffers in turn: had it all of them, a single client would touch all, one after the other.
#[tokio::test]
async fn receive_buffers_that_are_never_used_at_once_take_no_memory() {
    let worker = Worker::start_with(false).await;
    let limits = Flags {
        recv_buffer_bytes: 32_768,
        ..FLAGS
    };
    let router = router_process_with(&worker, &limits, 1024);
    router.until_healthy().await;
    let mut client = Client::open(router.address).await;
    let before = status_bytes(router.id(), "VmRSS:");
    let body = prompt(30_000);
    for _ in 0..1_200 {
        assert_eq!(client.post(CHAT, &body).await.unwrap().status, 200);
    }
    let more = status_bytes(router.id(), "VmRSS:").saturating_sub(before);
    assert!(more < 8 * MIB, "{more} bytes more, 32 MiB of buffers");
}
