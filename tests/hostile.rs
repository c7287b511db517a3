//! Clients that break the rules, and limits: each bad request gets its error in OpenAI's shape, no worker sees it, and the
//! router serves the next client.

mod common;

use std::time::{Duration, Instant};

use common::*;
use tokio::io::AsyncWriteExt;

const CHAT: &str = "/v1/chat/completions";

/// What a client sends (all of it in one write), the status it must get, and whether the connection must close after.
struct Row {
    what: &'static str,
    wire: Vec<u8>,
    status: u16,
    closes: bool,
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}

/// The refusals of the framing table (`common/framing.rs`). What they say of bodies holds for ours as well as for workers'.
fn framing_rows() -> Vec<Row> {
    let ours = "POST /workers ";
    let chat = format!("POST {CHAT} ");
    let mut rows = Vec::new();
    for rule in framing::requests() {
        let Some(status) = rule.refusal() else {
            continue;
        };
        for (what, wire) in rule.wires {
            let as_ours = wire.strip_prefix(chat.as_bytes());
            let as_ours = as_ours.map(|rest| [ours.as_bytes(), rest].concat());
            rows.extend([Some(wire), as_ours].into_iter().flatten().map(|wire| Row {
                what,
                wire,
                status,
                closes: true,
            }));
        }
    }
    rows
}

/// Methods that an endpoint does not take: what would be its body is not wanted.
fn methods() -> Vec<Row> {
    let table = [
        "GET /v1/chat/completions HTTP/1.1\r\nHost: r\r\n\r\n",
        "PUT /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
        "DELETE /generate HTTP/1.1\r\nHost: r\r\n\r\n",
        "post /v1/embeddings HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
        "GET http://evil.example/score?x HTTP/1.1\r\nHost: r\r\n\r\n",
    ];
    let row = |wire: &str| Row {
        what: "a method that an inference endpoint does not take",
        wire: wire.as_bytes().to_vec(),
        status: 405,
        closes: true,
    };
    table.into_iter().map(row).collect()
}

fn sizes() -> Vec<Row> {
    let row = |what, wire: String, status| Row {
        what,
        wire: wire.into_bytes(),
        status,
        closes: true,
    };
    vec![
        row(
            "a body of 10^18 bytes",
            format!(
                "POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Length: 1000000000000000000\r\n\r\n"
            ),
            413,
        ),
        row(
            "an admin body of 2 MiB",
            "POST /workers HTTP/1.1\r\nHost: r\r\nContent-Length: 2097152\r\n\r\n".into(),
            413,
        ),
    ]
}

const INFERENCE: [&str; 13] = [
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/rerank",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
    "/tokenize",
    "/pooling",
    "/score",
    "/v1/score",
];

/// Read whole and understood as far as framing goes: these keep their connection.
fn bad_json() -> Vec<Row> {
    let deep = "[".repeat(200_000);
    let table: Vec<(&'static str, Vec<u8>)> = vec![
        ("no body", b"".to_vec()),
        ("white space", b" \n".to_vec()),
        ("no JSON", b"hello".to_vec()),
        (
            "half an object",
            br#"{"model":"m","messages":[{"role":"user""#.to_vec(),
        ),
        ("an array", b"[]".to_vec()),
        ("a string", br#""x""#.to_vec()),
        ("null", b"null".to_vec()),
        ("something behind the object", b"{} {}".to_vec()),
        ("a comma too many", br#"{"model":"m",}"#.to_vec()),
        ("no colon", br#"{"model" "m"}"#.to_vec()),
        ("a key that is no string", br#"{1:2}"#.to_vec()),
        ("single quotes", br#"{'model':'m'}"#.to_vec()),
        (
            "a raw line feed in a string",
            b"{\"model\":\"a\nb\"}".to_vec(),
        ),
        ("a bad escape", br#"{"model":"\x41"}"#.to_vec()),
        ("invalid UTF-8", b"{\"model\":\"\xff\xfe\"}".to_vec()),
        (
            "nesting without an end",
            format!("{{\"a\":{deep}").into_bytes(),
        ),
        (
            "deep nesting",
            format!("{{\"a\":{deep}{}}}", "]".repeat(200_000)).into_bytes(),
        ),
    ];
    let mut rows = Vec::new();
    for (n, (what, body)) in table.into_iter().enumerate() {
        for path in INFERENCE {
            // The large ones on a few paths only.
            if body.len() < 1000 || path.len() % 3 == n % 3 {
                rows.push(Row {
                    what,
                    wire: post(path, &body),
                    status: 400,
                    closes: false,
                });
            }
        }
    }
    rows
}

/// The error as OpenAI's clients read it.
fn assert_openai_shape(answer: &Answer, what: &str) {
    assert_eq!(
        answer.field("content-type"),
        Some("application/json"),
        "{what}: {}",
        answer.head
    );
    let json: serde_json::Value = serde_json::from_slice(&answer.body)
        .unwrap_or_else(|e| panic!("{what}: {e}: {}", text(&answer.body)));
    for key in ["message", "type", "code"] {
        assert!(
            json["error"][key].as_str().is_some_and(|s| !s.is_empty()),
            "{what}: error.{key} in {json}"
        );
    }
    assert!(
        !json.to_string().contains("127.0.0.1"),
        "{what}: shows an address: {json}"
    );
}

#[tokio::test]
async fn every_malformed_request_gets_its_error_and_no_worker_sees_it() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    let rows: Vec<Row> = [framing_rows(), methods(), sizes(), bad_json()]
        .into_iter()
        .flatten()
        .collect();
    assert!(rows.len() >= 300, "{} rows", rows.len());
    let mut wrong = Vec::new();
    for row in &rows {
        let (shown, before) = (
            format!("{}: {:?}", row.what, text(&row.wire)),
            worker.count(),
        );
        let mut client = Client::open(router.address).await;
        // More than the sockets hold may wait until the answer is there.
        client.send(&row.wire).await;
        match tokio::time::timeout(Duration::from_secs(5), client.answer(false)).await {
            Err(_) => wrong.push(format!("no answer to {shown}")),
            Ok(None) => wrong.push(format!("closed without an answer: {shown}")),
            Ok(Some(answer)) if answer.status != row.status => {
                wrong.push(format!(
                    "{} and not {} for {shown}: {}",
                    answer.status,
                    row.status,
                    text(&answer.body)
                ));
            }
            Ok(Some(answer)) => {
                assert_openai_shape(&answer, &shown);
                let says_close = answer.field("connection") == Some("close");
                if says_close != row.closes {
                    wrong.push(format!("says close: {says_close}: {shown}"));
                }
                if says_close && !matches!(client.rest().await, (rest, true) if rest.is_empty()) {
                    wrong.push(format!(
                        "not closed in order, or bytes after the error: {shown}"
                    ));
                }
            }
        }
        if worker.count() != before {
            wrong.push(format!("a worker saw it: {shown}"));
        }
        let mut next = Client::open(router.address).await;
        let answer = next.post(CHAT, &chat("well-formed")).await;
        assert!(
            answer.is_some_and(|a| a.status == 200),
            "the router serves nobody after {shown}"
        );
    }
    assert!(
        wrong.is_empty(),
        "{} of {} rows:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
    until_books_are_empty(&router).await;
}

/// What smugglers hide behind a good request is a request of its own, framed anew, and its answer is the client's own.
#[tokio::test]
async fn what_is_odd_but_legal_is_taken_and_reaches_the_worker_framed_anew() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    let rows = [
        (
            "POST /v1/completions HTTP/1.1\r\nhOsT:r\r\ncontent-LENGTH:   2  \r\n\r\n{}",
            "/v1/completions",
        ),
        (
            "POST http://evil.example:1/generate?x=1 HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n00002;a=\"b;c\"\r\n{}\r\n0;z\r\nT: 1\r\n\r\n",
            "/generate?x=1",
        ),
        (
            "\r\n\r\nPOST HTTPS://r/x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
            "/x",
        ),
        (
            "POST /x HTTP/1.1\r\nHost: [::1]:80\r\nX:\r\nY: \t z \t\r\nContent-Length: 002\r\n\r\n{}",
            "/x",
        ),
        (
            "OPTIONS * HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
            "*",
        ),
        ("BREW /x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}", "/x"),
    ];
    for (wire, target) in rows {
        let mut client = Client::open(router.address).await;
        client.send(wire.as_bytes()).await;
        assert_eq!(client.answer(false).await.unwrap().status, 200, "{wire:?}");
        let seen = worker.requests().pop().unwrap();
        assert_eq!(seen.line.split(' ').nth(1), Some(target), "{wire:?}");
        assert_eq!(
            (seen.body.as_slice(), seen.all("content-length")),
            (b"{}".as_slice(), vec![b"2".as_slice()]),
            "{wire:?}"
        );
        assert_eq!(
            (seen.all("host").len(), seen.all("transfer-encoding").len()),
            (1, 0),
            "{wire:?}"
        );
        assert!(seen.all("t").is_empty());
    }
    until_books_are_empty(&router).await;
}

/// Every byte of every piece at random: whatever it is, the router answers or closes, and goes on.
#[tokio::test]
async fn random_damage_to_requests_never_stops_the_router() {
    let mut rng = Rng(seed());
    let worker = Worker::start_with(false).await;
    let router = router(
        &[&worker],
        &[
            "--header-read-timeout-secs",
            "1",
            "--body-read-timeout-secs",
            "1",
        ],
    )
    .await;
    let good: Vec<Vec<u8>> = vec![
        post(CHAT, &chat("hello")),
        b"POST /x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_vec(),
        b"GET /liveness HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nConnection: x, close\r\n\r\n".to_vec(),
    ];
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..400 {
        let mut wire = good[n % good.len()].repeat(1 + n % 3);
        for _ in 0..1 + rng.below(4) {
            let at = rng.below(wire.len() as u64) as usize;
            match rng.below(4) {
                0 => wire[at] = rng.below(256) as u8,
                1 if wire.len() > 1 => drop(wire.remove(at)),
                2 => wire.insert(at, b"\r\n \0:;,"[rng.below(7) as usize]),
                _ => wire.truncate(at.max(1)),
            }
        }
        let address = router.address;
        clients.spawn(async move {
            let mut client = Client::open(address).await;
            client.send(&wire).await;
            client.half_close().await;
            client.rest().await;
        });
    }
    while let Some(result) = clients.join_next().await {
        result.unwrap();
    }
    assert!(router.is_running());
    let mut next = Client::open(router.address).await;
    assert_eq!(
        next.post(CHAT, &chat("still there")).await.unwrap().status,
        200
    );
    until_books_are_empty(&router).await;
}

// ---- limits ----

fn assert_refused(answer: Option<Answer>, status: u16, what: &str) {
    let answer = answer.unwrap_or_else(|| panic!("{what}: closed without an answer"));
    assert_eq!(answer.status, status, "{what}: {}", text(&answer.body));
    assert_openai_shape(&answer, what);
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_that_can_be_read_while_the_client_still_sends() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &["--max-payload-size", "100000"]).await;
    let body = |bytes: usize| format!("{{\"prompt\":\"{}\"}}", "p".repeat(bytes - 13)).into_bytes();
    for path in ["/v1/completions", "/upload"] {
        let mut client = Client::open(router.address).await;
        assert_eq!(
            client.post(path, &body(100_000)).await.unwrap().status,
            200,
            "{path}: the limit itself"
        );
        let count = worker.count();
        for bytes in [100_001, 3_000_000] {
            let mut client = Client::open(router.address).await;
            client.send(&post(path, &body(bytes))).await;
            assert_refused(
                client.answer(false).await,
                413,
                &format!("{path}, length {bytes}"),
            );
        }
        assert_eq!(worker.count(), count, "{path}: no worker saw it");
        let mut client = Client::open(router.address).await;
        client
            .send(
                format!("POST {path} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
                    .as_bytes(),
            )
            .await;
        for _ in 0..300 {
            client
                .send(&[b"2710\r\n".as_slice(), &[b'c'; 10_000], b"\r\n"].concat())
                .await;
        }
        assert_refused(client.answer(false).await, 413, &format!("{path}, chunked"));
        if path == "/v1/completions" {
            assert_eq!(worker.count(), count, "{path}: no worker saw it");
        }
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn the_limits_of_heads_are_the_flags() {
    let worker = Worker::start().await;
    let router = router(
        &[&worker],
        &[
            "--header-size-max-bytes",
            "1024",
            "--header-count-max",
            "10",
        ],
    )
    .await;
    let with = |fields: usize, bytes: usize| {
        let mut head = "GET /x HTTP/1.1\r\nHost: r\r\n".to_string();
        for n in 1..fields {
            head.push_str(&format!("X-{n}: 1\r\n"));
        }
        while head.len() + 2 < bytes {
            let at = head.len() - 2;
            head.insert(at, 'p');
        }
        head + "\r\n"
    };
    for (what, wire, status) in [
        ("10 fields", with(10, 0), 200),
        ("11 fields", with(11, 0), 431),
        ("1024 bytes", with(3, 1024), 200),
        ("1025 bytes", with(3, 1025), 431),
        (
            "a long target",
            format!("GET /{} HTTP/1.1\r\nHost: r\r\n\r\n", "t".repeat(1500)),
            414,
        ),
        (
            "a long target without an end",
            format!("GET /{}", "t".repeat(1500)),
            414,
        ),
    ] {
        let mut client = Client::open(router.address).await;
        client.send(wire.as_bytes()).await;
        match status {
            200 => assert_eq!(client.answer(false).await.unwrap().status, 200, "{what}"),
            _ => assert_refused(client.answer(false).await, status, what),
        }
    }
    until_books_are_empty(&router).await;
}

/// The flag is about the router, not about a core: which core gets a connection is chance.
#[tokio::test]
async fn the_limit_of_connections_counts_all_cores_together() {
    const LIMIT: usize = 60;
    let worker = Worker::start().await;
    let router = router(&[&worker], &["--max-connections", &LIMIT.to_string()]).await;
    let mut open = Vec::new();
    for n in 0..LIMIT {
        let mut client = Client::open(router.address).await;
        assert!(
            client
                .post(CHAT, &chat("x"))
                .await
                .is_some_and(|a| a.status == 200),
            "connection {n} of {LIMIT}"
        );
        open.push(client);
    }
    let mut refused = 0;
    for _ in 0..8 {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        refused += usize::from(client.answer(false).await.is_none());
    }
    assert_eq!(refused, 8, "one more than the limit is closed");
    drop(open.pop());
    until("its place is free", || {
        total(&router, |s| s.accepted.value()) - total(&router, |s| s.closed.value()) < LIMIT as u64
    })
    .await;
    let mut client = Client::open(router.address).await;
    assert_eq!(
        client.post(CHAT, &chat("x")).await.expect("a place").status,
        200
    );
    until_books_are_empty(&router).await;
}

/// A moment that lies between 1 and 4 seconds after `began`: later than the flag says, and not by much on a busy machine.
fn assert_about_a_second(began: Instant, what: &str) {
    let took = began.elapsed();
    assert!(
        took > Duration::from_millis(900) && took < Duration::from_secs(4),
        "{what}: after {took:?}"
    );
}

#[tokio::test]
async fn slow_heads_and_bodies_are_408_and_idle_connections_close() {
    let worker = Worker::start().await;
    let one = "1";
    let flags = [
        "--header-read-timeout-secs",
        one,
        "--body-read-timeout-secs",
        one,
        "--keepalive-timeout-secs",
        one,
    ];
    let router = router(&[&worker], &flags).await;
    let starts: [(&str, &[u8]); 5] = [
        ("half a request line", b"GET /x HT"),
        ("half a head", b"GET /x HTTP/1.1\r\nHost: r\r\nX-"),
        (
            "half a body",
            b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{\"prompt\":",
        ),
        (
            "half a chunk",
            b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{\"p",
        ),
        (
            "half an upload",
            b"POST /upload HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
        ),
    ];
    let mut tasks = tokio::task::JoinSet::new();
    for (what, start) in starts {
        let address = router.address;
        tasks.spawn(async move {
            let mut client = Client::open(address).await;
            let began = Instant::now();
            client.send(start).await;
            let answer = client.answer(false).await;
            assert_about_a_second(began, what);
            assert_eq!(
                answer.as_ref().and_then(|a| a.field("connection")),
                Some("close"),
                "{what}"
            );
            assert_refused(answer, 408, what);
        });
    }
    let address = router.address;
    tasks.spawn(async move {
        // A drop of the head now and then does not buy more time.
        let mut client = Client::open(address).await;
        let began = Instant::now();
        client.send(b"GET /x HTTP/1.1\r\n").await;
        let answer = loop {
            tokio::select! {
                answer = client.answer(false) => break answer,
                () = tokio::time::sleep(Duration::from_millis(200)) => {}
            }
            client.send(b"X: 1\r\n").await;
        };
        assert_about_a_second(began, "a dripping head");
        assert_refused(answer, 408, "a dripping head");
    });
    for used in [false, true] {
        tasks.spawn(async move {
            let mut client = Client::open(address).await;
            if used {
                assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
            }
            let began = Instant::now();
            assert_eq!(
                client.rest().await,
                (Vec::new(), true),
                "closed without a word"
            );
            assert_about_a_second(began, "an idle connection");
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    // A body that keeps coming may take longer than the limit between two of its pieces.
    let mut client = Client::open(router.address).await;
    let body = chat("slow but steady");
    let wire = post(CHAT, &body);
    for part in wire.chunks(wire.len().div_ceil(6)) {
        client.send(part).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(client.answer(false).await.unwrap().status, 200);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_worker_that_does_not_answer_in_time_is_asked_once_and_the_client_gets_504() {
    let (a, b) = (Worker::start().await, Worker::start().await);
    for worker in [&a, &b] {
        worker.script(|r| {
            if r.has_text("stall") {
                Reply::nothing(End::Stall)
            } else {
                Reply::events(8, Duration::from_millis(300))
            }
        });
    }
    let router = router(&[&a, &b], &["--request-timeout-secs", "1"]).await;
    let mut client = Client::open(router.address).await;
    let began = Instant::now();
    let answer = client.post(CHAT, &chat("stall")).await;
    assert_about_a_second(began, "no answer");
    assert_refused(answer, 504, "no answer");
    assert_eq!(a.count() + b.count(), 1, "asked once");
    assert_eq!(failures(&router, &a.url()) + failures(&router, &b.url()), 1);
    until("the worker was let go", || {
        a.in_flight() + b.in_flight() == 0
    })
    .await;
    // No limit cuts a stream that makes progress.
    let answer = client.post(CHAT, &chat("a stream of 2.4 s")).await.unwrap();
    assert!(answer.is_whole && answer.body.ends_with(b"data: [DONE]\n\n"));
    until_books_are_empty(&router).await;
}

/// A worker that was healthy and now lets no connection through: its listener's queue is full, so the kernel drops SYNs.
struct Walled {
    url: String,
    _listener: std::net::TcpListener,
    _fillers: Vec<std::net::TcpStream>,
}

impl Walled {
    async fn of(worker: Worker) -> Walled {
        worker.die().await;
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(worker.address).unwrap();
        let listener = socket.listen(1).unwrap().into_std().unwrap();
        let mut fillers = Vec::new();
        while let Ok(stream) =
            std::net::TcpStream::connect_timeout(&worker.address, Duration::from_millis(150))
        {
            fillers.push(stream);
            assert!(fillers.len() < 16, "the queue is never full");
        }
        Walled {
            url: worker.url(),
            _listener: listener,
            _fillers: fillers,
        }
    }
}

#[tokio::test]
async fn a_worker_that_cannot_be_connected_to_in_time_is_the_workers_fault() {
    let worker = Worker::start().await;
    let router = router(
        &[&worker],
        &[
            "--connect-timeout-ms",
            "1000",
            "--health-check-interval-secs",
            "3600",
        ],
    )
    .await;
    let walled = Walled::of(worker).await;
    let mut client = Client::open(router.address).await;
    let began = Instant::now();
    let answer = client.post(CHAT, &chat("x")).await;
    assert_about_a_second(began, "no connection");
    let is_workers = |status: u16| matches!(status, 502 | 504);
    assert!(
        answer.as_ref().is_some_and(|a| is_workers(a.status)),
        "{answer:?}"
    );
    assert_openai_shape(&answer.unwrap(), "no connection");
    assert_eq!(failures(&router, &walled.url), 1);
    // The same for a body that is handed on as it comes: it is not the client that was late.
    let mut client = Client::open(router.address).await;
    let began = Instant::now();
    client
        .send(
            b"POST /upload HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        )
        .await;
    let answer = client.answer(false).await;
    assert_about_a_second(began, "no connection for an upload");
    assert!(
        answer.as_ref().is_some_and(|a| is_workers(a.status)),
        "{answer:?}"
    );
    assert_eq!(failures(&router, &walled.url), 2);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn an_upload_whose_worker_is_not_connected_yet_is_held_back() {
    let worker = Worker::start().await;
    let flags = [
        "--connect-timeout-ms",
        "4000",
        "--health-check-interval-secs",
        "3600",
    ];
    let router = router(&[&worker], &flags).await;
    let _walled = Walled::of(worker).await;
    let mut client = Client::open(router.address).await;
    client
        .send(b"POST /upload HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let chunk = [b"10000\r\n".as_slice(), &[b'u'; 65_536], b"\r\n"].concat();
    let mut pushed = 0;
    while pushed < 100 << 20 {
        match tokio::time::timeout(Duration::from_secs(1), client.stream.write(&chunk)).await {
            Ok(Ok(n)) => pushed += n,
            _ => break,
        }
    }
    // What the two sockets hold.
    assert!(
        pushed < 24 << 20,
        "the router took {pushed} bytes for nobody"
    );
    assert!(
        client
            .answer(false)
            .await
            .is_some_and(|a| matches!(a.status, 502 | 504))
    );
    until_books_are_empty(&router).await;
}

/// Nothing was sent to the first, so nothing speaks against the second (DESIGN section 7: a time-out is a failure).
#[tokio::test]
async fn a_worker_that_cannot_be_connected_to_in_time_is_passed_over_for_another() {
    let (worker, other) = (Worker::start().await, Worker::start().await);
    let flags = [
        "--connect-timeout-ms",
        "500",
        "--health-check-interval-secs",
        "3600",
        "--policy",
        "round_robin",
        "--cores",
        "1",
    ];
    let router = router(&[&worker, &other], &flags).await;
    let walled = Walled::of(worker).await;
    let mut client = Client::open(router.address).await;
    for n in 0..2 {
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!(answer.status, 200, "request {n}: {}", text(&answer.body));
    }
    assert!(failures(&router, &walled.url) >= 1);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn one_address_has_so_many_connections_and_gets_its_places_back() {
    let worker = Worker::start().await;
    let flags = ["--max-connections-per-address", "6", "--cores", "2"];
    let router = router(&[&worker], &flags).await;
    for round in 0..3 {
        let mut clients = Vec::new();
        for _ in 0..6 {
            let mut client = Client::open(router.address).await;
            let answer = client.post(CHAT, &chat("x")).await;
            assert_eq!(answer.expect("an answer").status, 200, "round {round}");
            clients.push(client);
        }
        for _ in 0..4 {
            let mut client = Client::open(router.address).await;
            assert!(
                client.answer(false).await.is_none(),
                "one more than it may have"
            );
        }
        drop(clients);
        until("they are closed", || {
            total(&router, |stats| {
                stats.accepted.value() - stats.closed.value()
            }) == 0
        })
        .await;
    }
    until_books_are_empty(&router).await;
}
