//! HTTP/1.1 on both sides, as a client and a worker see it: order, framing, interim answers, half-closed and lost
//! connections, slow clients, workers that break off or break the rules.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, watch};

const CHAT: &str = "/v1/chat/completions";

/// A worker that answers with the number in the request (`n:12`), late if the request says `slow`.
fn echo(request: &Recorded) -> Reply {
    let delay = Duration::from_millis(if request.has_text("slow") { 150 } else { 0 });
    Reply {
        delay,
        ..Reply::json(200, &format!("{{\"n\":{}}}", number(&request.body)))
    }
}

fn number(body: &[u8]) -> u64 {
    let at = memchr::memmem::find(body, b"n:").expect("a number") + 2;
    let digits = body[at..].iter().take_while(|b| b.is_ascii_digit());
    digits.fold(0, |n, b| n * 10 + u64::from(b - b'0'))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn error_code(answer: &Answer) -> String {
    let json: serde_json::Value = serde_json::from_slice(&answer.body).expect("an error is JSON");
    assert!(
        json["error"]["message"].is_string() && json["error"]["type"].is_string(),
        "{json}"
    );
    json["error"]["code"].as_str().expect("a code").to_string()
}

fn chunked(pieces: &[&[u8]]) -> Vec<u8> {
    let mut wire = Vec::new();
    for piece in pieces {
        wire.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        wire.extend_from_slice(piece);
        wire.extend_from_slice(b"\r\n");
    }
    wire.extend_from_slice(b"0\r\n\r\n");
    wire
}

// ---- order ----

#[tokio::test]
async fn both_sides_keep_their_connections() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    for n in 0..6 {
        let answer = client.post(CHAT, &chat(&format!("n:{n}"))).await.unwrap();
        assert_eq!((answer.status, answer.field("connection")), (200, None));
    }
    let indices: Vec<usize> = worker
        .requests()
        .iter()
        .map(|r| r.index_on_connection)
        .collect();
    assert_eq!(indices, [0, 1, 2, 3, 4, 5]);
    assert_eq!(total(&router, |s| s.accepted.value()), 1);
    assert_eq!(total(&router, |s| s.upstream_opened.value()), 1);
}

/// What is sent, and the status and text that must come back, in this order.
fn pipeline() -> (Vec<u8>, Vec<(u16, &'static str)>) {
    let mut wire = post(CHAT, &chat("n:1 slow"));
    let mut wanted = vec![(200, "{\"n\":1}")];
    let mut add = |bytes: &[u8], status, body| {
        wire.extend_from_slice(bytes);
        wanted.push((status, body));
    };
    add(
        &post("/v1/completions", br#"{"prompt":"n:2"}"#),
        200,
        "{\"n\":2}",
    );
    add(b"GET /liveness HTTP/1.1\r\nHost: r\r\n\r\n", 200, "OK");
    add(&post("/generate", b"no JSON"), 400, "invalid_json");
    let mut body =
        b"POST /other HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    body.extend_from_slice(&chunked(&[b"n", b":3 and more"]));
    add(&body, 200, "{\"n\":3}");
    add(
        b"\r\n\r\nPUT /thing?n=1 HTTP/1.1\r\nHost: r\r\nContent-Length: 3\r\n\r\nn:4",
        200,
        "{\"n\":4}",
    );
    let mut body =
        b"POST /score HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    body.extend_from_slice(&chunked(&[b"{\"input\"", b":\"n:5\"}"]));
    add(&body, 200, "{\"n\":5}");
    add(&post(CHAT, &chat("n:6")), 200, "{\"n\":6}");
    (wire, wanted)
}

async fn expect_in_order(client: &mut Client, wanted: &[(u16, &str)], how: &str) {
    for (at, (status, body)) in wanted.iter().enumerate() {
        let answer = client
            .answer(false)
            .await
            .unwrap_or_else(|| panic!("{how}: no answer {at}"));
        let shown = text(&answer.body);
        assert!(
            answer.status == *status && shown.contains(body),
            "{how}: answer {at}: {} {shown}",
            answer.status
        );
    }
}

#[tokio::test]
async fn pipelined_requests_in_one_segment_are_answered_in_order_though_the_first_is_slow() {
    let worker = Worker::start().await;
    worker.script(echo);
    let router = router(&[&worker], &[]).await;
    let (wire, wanted) = pipeline();
    let mut client = Client::open(router.address).await;
    client.send(&wire).await;
    expect_in_order(&mut client, &wanted, "one segment").await;
}

#[tokio::test]
async fn requests_cut_at_any_byte_are_the_same_requests() {
    let seed = seed();
    let worker = Worker::start_with(false).await;
    worker.script(|r| Reply {
        delay: Duration::ZERO,
        ..echo(r)
    });
    let router = router(&[&worker], &[]).await;
    let (wire, wanted) = pipeline();
    let mut cuts: Vec<Vec<usize>> = (1..wire.len()).map(|at| vec![at]).collect();
    let mut rng = Rng(seed);
    for _ in 0..60 {
        let count = 2 + rng.below(12);
        let mut at: Vec<usize> = (0..count)
            .map(|_| 1 + rng.below(wire.len() as u64 - 1) as usize)
            .collect();
        at.sort_unstable();
        at.dedup();
        cuts.push(at);
    }
    cuts.push((1..wire.len()).collect());
    let (wire, wanted, cuts) = (Arc::new(wire), Arc::new(wanted), Arc::new(cuts));
    let next = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..32 {
        let (wire, wanted, cuts, next, address) = (
            wire.clone(),
            wanted.clone(),
            cuts.clone(),
            next.clone(),
            router.address,
        );
        tasks.spawn(async move {
            while let Some(cut) = cuts.get(next.fetch_add(1, Ordering::SeqCst)) {
                let mut client = Client::open(address).await;
                let mut from = 0;
                for at in cut.iter().copied().chain([wire.len()]) {
                    client.send(&wire[from..at]).await;
                    from = at;
                    // Not synchronisation: it makes it likely that the router sees the parts apart.
                    tokio::time::sleep(Duration::from_micros(300)).await;
                }
                expect_in_order(&mut client, &wanted, &format!("cut at {cut:?}")).await;
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    until_books_are_empty(&router).await;
}

/// How many bytes a peer takes before it stops for 700 ms.
async fn push_until_stopped(client: &mut Client, piece: &[u8], most: usize) -> usize {
    let mut pushed = 0;
    while pushed < most {
        match tokio::time::timeout(Duration::from_millis(700), client.stream.write(piece)).await {
            Ok(Ok(n)) => pushed += n,
            _ => break,
        }
    }
    pushed
}

#[tokio::test]
async fn a_client_that_pipelines_without_end_behind_a_slow_request_is_held_back() {
    let worker = Worker::start_with(false).await;
    worker.script(|r| {
        if r.has_text("stall") {
            Reply::nothing(End::Stall)
        } else {
            Reply::default()
        }
    });
    let router = router(&[&worker], &["--cores", "1"]).await;
    // A connection to reuse: with a new one the pipeline would wait for that first.
    let mut first = Client::open(router.address).await;
    first.post(CHAT, &chat("warm")).await.unwrap();
    let mut client = Client::open(router.address).await;
    let mut burst = post(CHAT, &chat("stall"));
    let more = post(CHAT, &chat(&"x".repeat(4000)));
    while burst.len() < 400_000 {
        burst.extend_from_slice(&more);
    }
    client.send(&burst).await;
    const MOST: usize = 64 << 20;
    let pushed = push_until_stopped(&mut client, &burst[..65_536], MOST).await;
    // What the two sockets hold, and no more: the router takes 64 KiB of it.
    assert!(
        pushed < 24 << 20,
        "the router took {pushed} bytes of requests that it cannot answer yet"
    );
}

#[tokio::test]
async fn a_client_that_asks_on_and_never_reads_is_held_back() {
    const ANSWER_BYTES: usize = 40_000;
    let worker = Worker::start_with(false).await;
    worker.script(|_| Reply::json(200, &"y".repeat(ANSWER_BYTES)));
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open_narrow(router.address, 16 << 10).await;
    let asks = b"GET /x HTTP/1.1\r\nHost: r\r\n\r\n".repeat(300);
    let most = asks.len() * 20;
    push_until_stopped(&mut client, &asks, most).await;
    // It may stop the client, or the answering; the worker's count must come to rest.
    let mut seen = (worker.count(), Instant::now());
    while seen.1.elapsed() < Duration::from_secs(1) {
        if worker.count() != seen.0 {
            seen = (worker.count(), Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let unread = seen.0 as usize * ANSWER_BYTES;
    assert!(
        unread < 24 << 20,
        "{unread} bytes of answers were fetched for a client that reads none"
    );
}

// ---- framing ----

#[tokio::test]
async fn any_framing_of_the_request_goes_with_any_framing_of_the_answer() {
    let worker = Worker::start().await;
    worker.script(|r| {
        let content = text(&r.body);
        let pieces = content
            .as_bytes()
            .chunks(7)
            .map(|c| (Duration::ZERO, c.to_vec()))
            .collect();
        let (chunked, until_close) = (r.has_text("answer:chunked"), r.has_text("answer:close"));
        Reply {
            pieces,
            chunked,
            until_close,
            ..Reply::default()
        }
    });
    let router = router(&[&worker], &[]).await;
    let mut client = Client::open(router.address).await;
    for round in 0..2 {
        for path in [CHAT, "/elsewhere"] {
            for asked in ["length", "chunked"] {
                for answered in ["length", "chunked", "close"] {
                    let what = format!("{path} {asked} {answered} {round}");
                    let body = chat(&format!("answer:{answered} {}", "lorem ipsum ".repeat(40)));
                    if asked == "length" {
                        client.send(&post(path, &body)).await;
                    } else {
                        let head = format!(
                            "POST {path} HTTP/1.1\r\nHost: r\r\ntransfer-encoding: Chunked\r\n\r\n"
                        );
                        client.send(head.as_bytes()).await;
                        client
                            .send(&chunked(&body.chunks(33).collect::<Vec<_>>()))
                            .await;
                    }
                    let answer = client.answer(false).await.expect(&what);
                    assert_eq!(
                        (answer.status, answer.is_whole, &answer.body),
                        (200, true, &body),
                        "{what}"
                    );
                    assert_eq!(answer.field("connection"), None, "{what}");
                    let has_length = answer.field("content-length").is_some();
                    assert_eq!(
                        (answered == "length", answered != "length"),
                        (has_length, answer.field("transfer-encoding").is_some()),
                        "{what}"
                    );
                    assert_eq!(worker.requests().pop().unwrap().body, body, "{what}");
                }
            }
        }
    }
    assert_eq!(
        total(&router, |s| s.accepted.value()),
        1,
        "one connection served all"
    );
}

#[tokio::test]
async fn a_close_delimited_answer_is_chunked_for_http_1_1_and_closed_for_http_1_0() {
    let worker = Worker::start().await;
    worker.script(|_| Reply {
        until_close: true,
        pieces: vec![
            (Duration::ZERO, b"first ".to_vec()),
            (Duration::from_millis(5), b"second".to_vec()),
        ],
        ..Reply::default()
    });
    let router = router(&[&worker], &[]).await;
    let mut client = Client::open(router.address).await;
    for _ in 0..3 {
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!(
            (
                answer.field("transfer-encoding"),
                answer.field("connection")
            ),
            (Some("chunked"), None)
        );
        assert_eq!(
            (answer.body.as_slice(), answer.is_whole),
            (b"first second".as_slice(), true)
        );
    }
    let mut old = Client::open(router.address).await;
    old.send(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        .await;
    let head = old.head().await.unwrap();
    assert!(
        head.contains("connection: close") && !head.contains("transfer-encoding"),
        "{head}"
    );
    assert_eq!(old.rest().await, (b"first second".to_vec(), true));
}

#[tokio::test]
async fn head_204_and_304_leave_the_connection_in_step() {
    let worker = Worker::start().await;
    worker.script(|r| match &r.line {
        line if line.starts_with("HEAD /sized") => Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n".to_vec()),
            pieces: Vec::new(),
            ..Reply::default()
        },
        line if line.starts_with("HEAD") => Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec()),
            pieces: Vec::new(),
            ..Reply::default()
        },
        line if line.contains("/204") => Reply {
            pieces: Vec::new(),
            ..Reply::json(204, "")
        },
        line if line.contains("/304") => Reply {
            raw: Some(
                b"HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\nETag: \"a\"\r\n\r\n".to_vec(),
            ),
            pieces: Vec::new(),
            ..Reply::default()
        },
        _ => Reply::json(200, "{\"after\":1}"),
    });
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    let after = b"GET /after HTTP/1.1\r\nHost: r\r\n\r\n";
    for (line, status) in [
        ("HEAD /sized", 200),
        ("HEAD /chunked", 200),
        ("GET /204", 204),
        ("DELETE /204", 204),
        ("GET /304", 304),
        ("HEAD /liveness", 200),
        ("HEAD /v1/chat/completions/x", 200),
    ] {
        client
            .send(format!("{line} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes())
            .await;
        client.send(after).await;
        let answer = client.answer(line.starts_with("HEAD")).await.unwrap();
        assert_eq!(answer.status, status, "{line}");
        if line == "HEAD /sized" {
            assert_eq!(answer.field("content-length"), Some("5000"));
        }
        let next = client
            .answer(false)
            .await
            .unwrap_or_else(|| panic!("{line}: no answer after it"));
        assert_eq!(
            (next.status, next.body.as_slice()),
            (200, b"{\"after\":1}".as_slice()),
            "{line}"
        );
    }
    assert_eq!(
        total(&router, |s| s.upstream_opened.value()),
        1,
        "the worker's connection was kept, too"
    );
}

#[tokio::test]
async fn trailers_pass_to_the_client_and_end_a_request_cleanly() {
    let worker = Worker::start().await;
    let wire = b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: 7\r\nX-More: a b\r\n\r\n";
    worker.script(|_| Reply {
        raw: Some(wire.to_vec()),
        pieces: Vec::new(),
        ..Reply::default()
    });
    let router = router(&[&worker], &[]).await;
    let mut client = Client::open(router.address).await;
    for path in [CHAT, "/other"] {
        for _ in 0..2 {
            client
                .send(
                    format!(
                        "POST {path} HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
                    )
                    .as_bytes(),
                )
                .await;
            client
                .send(b"2\r\n{}\r\n0\r\nX-Checksum: 1\r\nX-Y:\t2 \r\n\r\n")
                .await;
            let head = client.head().await.unwrap();
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
            let body = b"2\r\nok\r\n0\r\nX-Sum: 7\r\nX-More: a b\r\n\r\n";
            assert!(client.fill(body.len()).await);
            assert_eq!(text(&std::mem::take(&mut client.buffer)), text(body));
            let seen = worker.requests().pop().unwrap();
            assert_eq!(seen.body, b"{}");
            assert!(
                seen.all("x-checksum").is_empty(),
                "a trailer became a field"
            );
        }
    }
}

// ---- interim answers and expectations ----

#[tokio::test]
async fn interim_answers_of_the_worker_pass_except_100() {
    let wire: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n\
                        HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let cut = Arc::new(AtomicUsize::new(0));
    let at = cut.clone();
    let worker = RawWorker::start(move |_, mut stream| {
        let at = at.load(Ordering::SeqCst);
        async move {
            let _ = stream.write_all(&wire[..at]).await;
            // Not synchronisation: it makes it likely that the router sees the parts apart.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let _ = stream.write_all(&wire[at..]).await;
            let _ = stream.read_u8().await;
        }
    })
    .await;
    let router = router_before(&[worker.url()], &[]).await;
    for at in (0..wire.len()).step_by(3) {
        cut.store(at, Ordering::SeqCst);
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        let early = client.head().await.unwrap();
        assert!(
            early.starts_with("HTTP/1.1 103 ") && early.contains("</a>"),
            "cut at {at}: {early}"
        );
        assert!(
            client.head().await.unwrap().starts_with("HTTP/1.1 102 "),
            "cut at {at}"
        );
        let answer = client.answer(false).await.unwrap();
        assert_eq!(
            (answer.status, answer.body.as_slice()),
            (200, b"ok".as_slice()),
            "cut at {at}"
        );
    }
    let mut old = Client::open(router.address).await;
    old.send(b"GET /x HTTP/1.0\r\n\r\n").await;
    let head = old.head().await.unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 "),
        "HTTP/1.0 has no interim answers: {head}"
    );
}

fn expecting(path: &str, length: usize, version: &str, expectation: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.{version}\r\nHost: r\r\nExpect: {expectation}\r\nContent-Length: {length}\r\n\r\n").into_bytes()
}

#[tokio::test]
async fn an_expecting_client_gets_one_100_and_only_if_its_body_is_still_to_come() {
    let worker = Worker::start().await;
    worker.script(|r| match r.line.contains("/hundred") {
        true => Reply {
            raw: Some(
                b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
                    .to_vec(),
            ),
            pieces: vec![(Duration::ZERO, b"ok".to_vec())],
            ..Reply::default()
        },
        false => Reply::default(),
    });
    let router = router(&[&worker], &[]).await;
    let large = vec![b'z'; 200_000];
    let small = chat("x");
    let table = [
        (CHAT, &small),
        ("/hundred", &small),
        ("/large", &large),
        ("/hundred/large", &large),
    ];
    for (path, body) in table {
        let mut client = Client::open(router.address).await;
        client
            .send(&expecting(path, body.len(), "1", "100-Continue"))
            .await;
        let interim = client.head().await.unwrap();
        assert!(interim.starts_with("HTTP/1.1 100 "), "{path}: {interim}");
        client.send(body).await;
        let head = client.head().await.unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200 "),
            "{path}: a second interim answer? {head}"
        );
        let seen = worker.requests().pop().unwrap();
        assert_eq!((&seen.body, seen.all("expect").len()), (body, 0), "{path}");
    }
    // Refused by its head alone: no 100 invites a body that nobody wants.
    let mut client = Client::open(router.address).await;
    client.send(b"GET /v1/chat/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n").await;
    assert!(client.head().await.unwrap().starts_with("HTTP/1.1 405 "));
    // No body, or an HTTP/1.0 client (RFC 9110 section 10.1.1): none to invite.
    for (version, length) in [("1", 0), ("0", small.len())] {
        let mut client = Client::open(router.address).await;
        client
            .send(&expecting("/x", length, version, "100-continue"))
            .await;
        client.send(&small[..length]).await;
        let head = client.head().await.unwrap();
        assert!(
            head.starts_with("HTTP/1.1 200 "),
            "HTTP/1.{version}, {length} bytes: {head}"
        );
    }
}

#[tokio::test]
async fn a_body_that_came_with_its_head_needs_no_100() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    for path in [CHAT, "/other"] {
        let mut client = Client::open(router.address).await;
        let body = chat("x");
        let mut wire = expecting(path, body.len(), "1", "100-continue");
        wire.extend_from_slice(&body);
        client.send(&wire).await;
        let head = client.head().await.unwrap();
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
    }
}

#[tokio::test]
async fn other_expectations_are_417() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    for expectation in ["200-ok", "100-continue, x", "100-continued"] {
        let mut client = Client::open(router.address).await;
        client.send(&expecting(CHAT, 2, "1", expectation)).await;
        let answer = client.answer(false).await.unwrap();
        assert_eq!(
            (answer.status, error_code(&answer).as_str()),
            (417, "expectation_failed"),
            "{expectation}"
        );
        assert!(
            client.rest().await.1,
            "it is closed, as the body may still come"
        );
    }
    assert_eq!(worker.count(), 0);
}

// ---- HTTP/1.0 ----

#[tokio::test]
async fn http_1_0_clients_are_served_with_and_without_keep_alive() {
    let worker = Worker::start().await;
    worker.script(|r| Reply {
        chunked: r.line.contains("/chunks"),
        ..Reply::json(200, "{\"ok\":1}")
    });
    let router = router(&[&worker], &[]).await;
    for path in ["/sized", "/chunks", "/liveness"] {
        let mut plain = Client::open(router.address).await;
        plain
            .send(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
            .await;
        let head = plain.head().await.unwrap();
        assert!(
            head.contains("connection: close") && !head.contains("transfer-encoding"),
            "{path}: {head}"
        );
        let (body, is_clean) = plain.rest().await;
        let wanted: &[u8] = if path == "/liveness" {
            b"OK"
        } else {
            b"{\"ok\":1}"
        };
        assert_eq!((body.as_slice(), is_clean), (wanted, true), "{path}");
    }
    let mut keeping = Client::open(router.address).await;
    for path in ["/sized", CHAT, "/sized"] {
        let body = if path == CHAT { "{}" } else { "" };
        let method = if path == CHAT { "POST" } else { "GET" };
        let wire = format!(
            "{method} {path} HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        keeping.send(wire.as_bytes()).await;
        let answer = keeping.answer(false).await.unwrap();
        assert_eq!(
            (answer.status, answer.field("connection")),
            (200, Some("keep-alive")),
            "{path}"
        );
    }
}

/// RFC 9112 section 9.3: without the word, an HTTP/1.0 client must take the connection for one that closes, and wait.
#[tokio::test]
async fn our_own_answers_tell_http_1_0_clients_that_the_connection_stays() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    for (what, wire) in [
        (
            "admin",
            "GET /liveness HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        ),
        (
            "refusal",
            "POST /generate HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n[]",
        ),
    ] {
        let mut client = Client::open(router.address).await;
        client.send(wire.as_bytes()).await;
        let answer = client.answer(false).await.unwrap();
        assert!(
            matches!(answer.field("connection"), Some("keep-alive" | "close")),
            "{what}: {}",
            answer.head
        );
    }
}

// ---- clients that half-close or leave ----

#[tokio::test]
async fn a_half_closed_client_gets_its_answer() {
    let worker = Worker::start().await;
    worker.script(|r| {
        let delay = Duration::from_millis(if r.has_text("late") { 600 } else { 0 });
        let gap = Duration::from_millis(if r.has_text("late") { 300 } else { 1 });
        if r.has_text("stream") {
            Reply {
                delay,
                ..Reply::events(3, gap)
            }
        } else {
            Reply {
                delay,
                ..Reply::default()
            }
        }
    });
    let router = router(&[&worker], &[]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for what in ["plain", "stream", "plain late", "stream late"] {
        for version in ["1.1", "1.0"] {
            for path in [CHAT, "/other"] {
                let address = router.address;
                tasks.spawn(async move {
                    let mut client = Client::open(address).await;
                    let body = chat(what);
                    let head = format!(
                        "POST {path} HTTP/{version}\r\nHost: r\r\nContent-Length: {}\r\n\r\n",
                        body.len()
                    );
                    client.send(&[head.as_bytes(), &body].concat()).await;
                    client.half_close().await;
                    let answer = client
                        .answer(false)
                        .await
                        .unwrap_or_else(|| panic!("{what} {version} {path}: nothing"));
                    let shown = text(&answer.body);
                    assert!(
                        answer.status == 200 && answer.is_whole,
                        "{what} {version} {path}: {} {shown}",
                        answer.status
                    );
                    let end = if what.starts_with("stream") {
                        "data: [DONE]\n\n"
                    } else {
                        "{\"ok\":true}"
                    };
                    assert!(shown.ends_with(end), "{what} {version} {path}: {shown}");
                    assert_eq!(
                        client.rest().await,
                        (Vec::new(), true),
                        "{what} {version} {path}: the end"
                    );
                });
            }
        }
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_half_closed_client_gets_all_answers_of_its_pipeline() {
    let worker = Worker::start().await;
    worker.script(echo);
    let router = router(&[&worker], &[]).await;
    let (wire, wanted) = pipeline();
    let mut client = Client::open(router.address).await;
    client.send(&wire).await;
    client.half_close().await;
    expect_in_order(&mut client, &wanted, "half-closed").await;
    assert_eq!(client.rest().await, (Vec::new(), true));
}

/// A worker that never ends its answers, and tells when each of its connections has closed.
async fn silent_worker() -> (RawWorker, mpsc::UnboundedReceiver<Instant>, Arc<AtomicU64>) {
    let (closed, closings) = mpsc::unbounded_channel();
    let began = Arc::new(AtomicU64::new(0));
    let count = began.clone();
    let worker = RawWorker::start(move |request, mut stream| {
        let (closed, count) = (closed.clone(), count.clone());
        async move {
            if memchr::memmem::find(&request.body, b"stream").is_some() {
                let start =
                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n";
                let _ = stream.write_all(start).await;
            }
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read_u8().await;
            let _ = closed.send(Instant::now());
        }
    })
    .await;
    (worker, closings, began)
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_within_a_second_while_the_worker_is_silent() {
    let (worker, mut closings, began) = silent_worker().await;
    let router = router_before(&[worker.url()], &[]).await;
    for what in ["waiting", "stream"] {
        for how in ["fin", "reset"] {
            let mut client = Client::open(router.address).await;
            let before = began.load(Ordering::SeqCst);
            client.send(&post(CHAT, &chat(what))).await;
            if what == "stream" {
                client.head().await.unwrap();
                assert!(client.fill(10).await);
            }
            until("the worker has the request", || {
                began.load(Ordering::SeqCst) > before
            })
            .await;
            assert_eq!(router.control().workers()[0].in_flight, 1);
            let left = Instant::now();
            if how == "reset" {
                client.reset()
            } else {
                drop(client)
            }
            let closed = tokio::time::timeout(Duration::from_secs(10), closings.recv()).await;
            let closed = closed
                .unwrap_or_else(|_| panic!("{what}, {how}: not noticed in 10 s"))
                .unwrap();
            let took = closed - left;
            assert!(
                took < Duration::from_secs(1),
                "{what}, {how}: noticed after {took:?}"
            );
            until_books_are_empty(&router).await;
        }
    }
}

/// Its end came before the worker was connected, or while the request was still going out.
#[tokio::test]
async fn a_client_that_leaves_right_after_a_large_request_is_noticed() {
    let (worker, _closings, _) = silent_worker().await;
    let router = router_before(&[worker.url()], &[]).await;
    for n in 0..20 {
        let mut client = Client::open(router.address).await;
        client
            .send(&post(CHAT, &chat(&"x".repeat(1_000_000))))
            .await;
        if n % 2 == 0 {
            client.reset()
        } else {
            drop(client)
        }
    }
    until("all were accepted, and closed", || {
        total(&router, |s| s.accepted.value()) == 20 && total(&router, |s| s.closed.value()) == 20
    })
    .await;
    until("all connections to the worker are closed", || {
        total(&router, |s| s.upstream_closed.value())
            == total(&router, |s| s.upstream_opened.value())
    })
    .await;
    until_books_are_empty(&router).await;
}

// ---- streams ----

#[tokio::test]
async fn a_slow_client_stops_its_own_worker_and_nobody_else() {
    let sent = Arc::new(AtomicUsize::new(0));
    const LEN: usize = 64 << 20;
    let byte = |at: usize| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
    let count = sent.clone();
    let worker = RawWorker::start(move |request, mut stream| {
        let count = count.clone();
        async move {
            if memchr::memmem::find(&request.body, b"large").is_none() {
                let _ = stream
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    .await;
                let _ = stream.read_u8().await;
                return;
            }
            let _ = stream
                .write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {LEN}\r\n\r\n").as_bytes())
                .await;
            let mut at = 0;
            while at < LEN {
                let piece: Vec<u8> = (at..at + 16_384).map(byte).collect();
                if stream.write_all(&piece).await.is_err() {
                    return;
                }
                at += piece.len();
                count.store(at, Ordering::SeqCst);
            }
            let _ = stream.read_u8().await;
        }
    })
    .await;
    let router = router_before(&[worker.url()], &["--cores", "1"]).await;
    let mut slow = Client::open_narrow(router.address, 16 << 10).await;
    slow.send(&post(CHAT, &chat("large"))).await;
    let mut seen = (0, Instant::now());
    let mut others = 0;
    // Others are served meanwhile, by the same core and worker, until the worker has stood still for a while.
    while seen.1.elapsed() < Duration::from_millis(700) || seen.0 == 0 {
        let mut other = Client::open(router.address).await;
        let began = Instant::now();
        assert_eq!(other.post(CHAT, &chat("small")).await.unwrap().body, b"ok");
        assert!(
            began.elapsed() < Duration::from_secs(2),
            "another client waited {:?}",
            began.elapsed()
        );
        others += 1;
        if sent.load(Ordering::SeqCst) != seen.0 {
            seen = (sent.load(Ordering::SeqCst), Instant::now());
        }
        assert!(
            seen.0 < LEN,
            "the worker could send everything to a client that reads nothing"
        );
    }
    println!(
        "the worker could send {} KiB; {others} others were served",
        seen.0 >> 10
    );
    // Sockets hold up to 4 MB of sends and 6 MB of receives on Linux by themselves.
    assert!(seen.0 < 16 << 20, "the worker could send {} bytes", seen.0);
    // And nothing is lost when the client reads on.
    let mut hash = 0usize;
    slow.head().await.unwrap();
    let mut buffer = std::mem::take(&mut slow.buffer);
    loop {
        for b in &buffer {
            assert_eq!(*b, byte(hash), "byte {hash}");
            hash += 1;
        }
        if hash == LEN {
            break;
        }
        buffer.clear();
        assert!(
            slow.stream.read_buf(&mut buffer).await.unwrap() > 0,
            "ended at {hash}"
        );
    }
}

#[tokio::test]
async fn pieces_of_a_stream_arrive_at_once_and_unchanged_however_they_are_cut() {
    let mut rng = Rng(seed());
    let mut body = Vec::new();
    for n in 0..40u32 {
        let event = format!(
            "data: {{\"n\":{n},\"t\":\"{}\"}}\n\n",
            rng.text(n as usize * 3)
        );
        body.extend_from_slice(format!("{:X};x={n}\r\n{event}\r\n", event.len()).as_bytes());
    }
    body.extend_from_slice(b"0\r\nX-End: 1\r\n\r\n");
    let mut cuts: Vec<usize> = (0..400)
        .map(|_| 1 + rng.below(body.len() as u64 - 1) as usize)
        .collect();
    cuts.push(body.len());
    cuts.sort_unstable();
    cuts.dedup();
    let (go, gone) = watch::channel(0usize);
    let wire = body.clone();
    let worker = RawWorker::start(move |_, mut stream| {
        let (wire, mut gone) = (wire.clone(), gone.clone());
        async move {
            let head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
            let _ = stream.write_all(head).await;
            let mut from = 0;
            while from < wire.len() && gone.changed().await.is_ok() {
                let to = *gone.borrow_and_update();
                let _ = stream.write_all(&wire[from..to]).await;
                from = to;
            }
            let _ = stream.read_u8().await;
        }
    })
    .await;
    let router = router_before(&[worker.url()], &[]).await;
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    assert!(client.head().await.unwrap().starts_with("HTTP/1.1 200 "));
    for cut in cuts {
        // The worker sends the next piece only when this one is here: each must arrive by itself.
        go.send(cut).unwrap();
        assert!(client.fill(cut).await, "the stream ended before byte {cut}");
        assert_eq!(client.buffer.len(), cut);
    }
    assert_eq!(text(&client.buffer), text(&body));
    client.buffer.clear();
    client
        .send(b"GET /liveness HTTP/1.1\r\nHost: r\r\n\r\n")
        .await;
    assert_eq!(client.answer(false).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_worker_that_dies_in_mid_stream_never_looks_like_a_clean_end() {
    let worker = Worker::start().await;
    worker.script(|r| {
        let end = if r.has_text("fin") {
            End::Fin
        } else {
            End::Reset
        };
        let pause = Duration::from_millis(if r.has_text("late") { 20 } else { 0 });
        let mut reply = Reply {
            end,
            ..Reply::events(3, pause)
        };
        if r.has_text("length") {
            reply.chunked = false;
            reply.raw = Some(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n".to_vec());
        } else if r.has_text("close") {
            reply.chunked = false;
            reply.until_close = true;
        }
        reply
    });
    let router = router(&[&worker], &["--disable-retries"]).await;
    for version in ["1.1", "1.0"] {
        for framing in ["chunked", "length", "close"] {
            for how in ["fin", "reset", "late fin", "late reset"] {
                let what = format!("HTTP/{version} {framing} {how}");
                let mut client = Client::open(router.address).await;
                let body = chat(&format!("{framing} {how}"));
                let head = format!(
                    "POST {CHAT} HTTP/{version}\r\nHost: r\r\nContent-Length: {}\r\n\r\n",
                    body.len()
                );
                client.send(&[head.as_bytes(), &body].concat()).await;
                let answer = client.answer(false).await;
                let is_end = framing == "close" && how.ends_with("fin");
                match answer {
                    // A reset may overtake what was sent before it; that is no clean end either.
                    None => assert!(!is_end, "{what}: nothing came"),
                    Some(answer) if answer.status == 200 => {
                        assert_eq!(answer.is_whole, is_end, "{what}: {}", text(&answer.body))
                    }
                    Some(answer) => assert_eq!(answer.status, 502, "{what}"),
                }
            }
        }
    }
    assert_eq!(failures(&router, &worker.url()), 2 * (3 * 4 - 2));
    until_books_are_empty(&router).await;
}

// ---- workers that break the rules ----

#[tokio::test]
async fn broken_framing_of_a_worker_is_502_or_a_visible_break_and_the_next_request_works() {
    // The refusals of the framing table; where the connection's end is the fault, the worker ends it.
    let mut table = Vec::new();
    for rule in framing::answers() {
        if rule.refusal().is_some() {
            let is_cut = rule.input.starts_with("an end before");
            let end = if is_cut { End::Fin } else { End::Stall };
            table.extend(rule.wires.into_iter().map(|(_, wire)| (wire, end)));
        }
    }
    assert!(table.len() >= 25, "{} answers", table.len());
    let worker = Worker::start().await;
    let wires = Arc::new(table);
    let answers = wires.clone();
    worker.script(move |r| match r.has_text("n:") {
        true => Reply {
            raw: Some(answers[number(&r.body) as usize].0.clone()),
            pieces: Vec::new(),
            end: answers[number(&r.body) as usize].1,
            ..Reply::default()
        },
        false => Reply::default(),
    });
    let router = router(&[&worker], &["--disable-retries"]).await;
    let mut uncounted = Vec::new();
    for (n, (wire, _)) in wires.iter().enumerate() {
        let failures_before = failures(&router, &worker.url());
        let shown = text(&wire[..wire.len().min(90)]);
        let mut client = Client::open(router.address).await;
        let answer = client.post(CHAT, &chat(&format!("n:{n}"))).await;
        let mut is_open = false;
        if let Some(answer) = answer {
            assert!(
                answer.status == 502 || !answer.is_whole,
                "{shown:?} became {} {}",
                answer.status,
                text(&answer.body)
            );
            if answer.status == 502 {
                assert_eq!(error_code(&answer), "bad_answer", "{shown:?}");
                is_open = answer.field("connection").is_none();
            }
        }
        if failures(&router, &worker.url()) != failures_before + 1 {
            uncounted.push(shown.clone());
        }
        if !is_open {
            client = Client::open(router.address).await;
        }
        let next = client
            .post(CHAT, &chat("next"))
            .await
            .unwrap_or_else(|| panic!("no answer after {shown:?}"));
        assert_eq!(
            (next.status, next.body.as_slice()),
            (200, b"{\"ok\":true}".as_slice()),
            "after {shown:?}"
        );
    }
    assert!(
        uncounted.is_empty(),
        "not counted as the worker's failures: {uncounted:#?}"
    );
    until_books_are_empty(&router).await;
}

/// RFC 9112 section 6.3: the same length twice is refused, or goes on once.
#[tokio::test]
async fn a_workers_length_said_twice_goes_on_once_or_not_at_all() {
    let worker = Worker::start().await;
    let wire = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok";
    worker.script(|_| Reply {
        raw: Some(wire.to_vec()),
        pieces: Vec::new(),
        ..Reply::default()
    });
    let router = router(&[&worker], &[]).await;
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    let head = client.head().await.unwrap();
    let lengths = head.to_ascii_lowercase().matches("content-length:").count();
    assert!(lengths == 1, "{lengths} lengths: {head}");
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn bytes_of_a_worker_that_belong_to_no_request_reach_no_client() {
    let worker = Worker::start().await;
    worker.script(|r| {
        let late = Duration::from_millis(if r.has_text("late") { 30 } else { 0 });
        let extra = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL".to_vec();
        let extra = if r.has_text("extra") {
            vec![(Duration::ZERO, b"ok".to_vec()), (late, extra)]
        } else {
            vec![(Duration::ZERO, b"ok".to_vec())]
        };
        Reply {
            raw: Some(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n".to_vec()),
            pieces: extra,
            ..Reply::default()
        }
    });
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    for round in 0..5 {
        for what in ["extra", "extra late"] {
            assert_eq!(client.post(CHAT, &chat(what)).await.unwrap().body, b"ok");
            if what == "extra late" {
                // The garbage has come on an idle connection, which ends.
                let closed = total(&router, |s| s.upstream_closed.value());
                until("the connection that spoke out of turn is closed", || {
                    total(&router, |s| s.upstream_closed.value()) > closed
                        || total(&router, |s| s.upstream_opened.value()) == closed
                })
                .await;
            }
            for _ in 0..3 {
                assert_eq!(
                    client.post(CHAT, &chat("fine")).await.unwrap().body,
                    b"ok",
                    "{what}, round {round}"
                );
            }
        }
    }
    until_books_are_empty(&router).await;
}

// ---- connections that die, workers that refuse ----

#[tokio::test]
async fn a_request_on_a_connection_that_the_worker_closes_is_sent_once_more_and_nobody_failed() {
    for end in [End::Fin, End::Reset] {
        let worker = Worker::start().await;
        worker.script(move |r| {
            if r.index_on_connection > 0 {
                Reply::nothing(end)
            } else {
                Reply::default()
            }
        });
        let router = router(&[&worker], &["--cores", "1", "--disable-retries"]).await;
        let mut client = Client::open(router.address).await;
        for n in 0..6u64 {
            // Small, and larger than what is sent at once.
            let body = chat(&"x".repeat(if n % 2 == 0 { 10 } else { 300_000 }));
            let answer = client.post(CHAT, &body).await.expect("an answer");
            assert_eq!(
                answer.status,
                200,
                "{end:?}, request {n}: {}",
                text(&answer.body)
            );
        }
        assert_eq!(total(&router, |s| s.resends.value()), 5, "{end:?}");
        assert_eq!(total(&router, |s| s.retried()), 0);
        assert_eq!(failures(&router, &worker.url()), 0, "{end:?}");
        assert_eq!(worker.count(), 6 + 5);
        until_books_are_empty(&router).await;
    }
}

#[tokio::test]
async fn an_idle_connection_that_the_worker_closed_is_not_used_again() {
    let worker = Worker::start().await;
    worker.script(|_| Reply {
        end: End::Fin,
        ..Reply::default()
    });
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    for n in 0..5 {
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
        until("its end was noticed", || {
            total(&router, |s| s.upstream_closed.value()) == n + 1
        })
        .await;
    }
    assert_eq!(
        (total(&router, |s| s.resends.value()), worker.count()),
        (0, 5)
    );
}

#[tokio::test]
async fn a_request_whose_worker_refuses_connections_goes_to_another() {
    let (dead, alive) = (Worker::start().await, Worker::start().await);
    let flags = [
        "--policy",
        "round_robin",
        "--health-check-interval-secs",
        "3600",
        "--cores",
        "1",
    ];
    let router = router(&[&dead, &alive], &flags).await;
    dead.die().await;
    let mut client = Client::open(router.address).await;
    for n in 0..10 {
        let (path, body) = if n % 2 == 0 {
            (CHAT, chat("x"))
        } else {
            ("/other", vec![b'z'; 100_000])
        };
        assert_eq!(
            client.post(path, &body).await.unwrap().status,
            200,
            "request {n}"
        );
    }
    assert_eq!(alive.count(), 10);
    // One refusal is enough to know: nobody is sent there again, until a probe is good.
    let retries = total(&router, |s| s.retried());
    assert_eq!(retries, 1);
    assert_eq!(failures(&router, &dead.url()), retries);
    assert_eq!(failures(&router, &alive.url()), 0);
    until_books_are_empty(&router).await;
}

/// The event that says that a stream broke off stands between chunks or nowhere: never within one that had gone out by half.
#[tokio::test]
async fn an_answer_whose_chunks_break_within_one_ends_there() {
    let worker = Worker::start().await;
    let head =
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    worker.script(move |_| Reply {
        raw: Some([&head[..], b"7\r\nda"].concat()),
        pieces: vec![(Duration::from_millis(50), b"ta: 1\r\n\0".to_vec())],
        ..Reply::default()
    });
    let router = router(&[&worker], &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    let (bytes, _) = client.rest().await;
    assert!(bytes.ends_with(b"\r\n\r\n7\r\nda"), "{}", text(&bytes));
    until_books_are_empty(&router).await;
}

/// vLLM keeps responses in the process that made them. Of a fleet larger than the number of retries, and without counting any.
#[tokio::test]
async fn a_stored_response_is_found_on_whichever_worker_keeps_it() {
    let mut workers = Vec::new();
    for n in 0..9 {
        let worker = Worker::start().await;
        worker.script(
            move |request| match request.line.contains("/resp_1") && n != 6 {
                true => Reply::json(404, r#"{"error":{"message":"no such response"}}"#),
                false => Reply::json(200, &format!("{{\"worker\":{n}}}")),
            },
        );
        workers.push(worker);
    }
    let all: Vec<&Worker> = workers.iter().collect();
    let router = router(&all, &["--health-check-interval-secs", "3600"]).await;
    let mut client = Client::open(router.address).await;
    for path in ["/v1/responses/resp_1", "/v1/responses/resp_1/input?after=3"] {
        for _ in 0..4 {
            client
                .send(format!("GET {path} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes())
                .await;
            let answer = client.answer(false).await.unwrap();
            assert_eq!(
                (answer.status, text(&answer.body)),
                (200, r#"{"worker":6}"#.into())
            );
        }
    }
    let answer = client
        .post("/v1/responses/resp_1/cancel", b"")
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
    // Who is not there is asked for everywhere, once each; other paths are asked for once.
    let count = || workers.iter().map(Worker::count).sum::<u64>();
    for (path, status, asked) in [
        ("/v1/responses/resp_10x", 404, 9),
        ("/v1/files/resp_10x", 404, 1),
    ] {
        workers[6].script(|_| Reply::json(404, "{}"));
        let before = count();
        client
            .send(format!("DELETE {path} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes())
            .await;
        assert_eq!(client.answer(false).await.unwrap().status, status);
        assert_eq!(count() - before, asked, "{path}");
    }
    assert_eq!(total(&router, |s| s.retried()), 0);
    assert_eq!(
        workers
            .iter()
            .map(|w| failures(&router, &w.url()))
            .sum::<u64>(),
        0
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn without_any_worker_that_can_be_reached_the_client_gets_502_and_keeps_its_connection() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &["--health-check-interval-secs", "3600"]).await;
    worker.die().await;
    let mut client = Client::open(router.address).await;
    for path in [CHAT, "/other"] {
        let answer = client.post(path, &chat("x")).await.unwrap();
        assert_eq!(
            (answer.status, error_code(&answer).as_str()),
            (502, "worker_failed"),
            "{path}"
        );
        assert!(
            !text(&answer.body).contains("127.0.0.1"),
            "{}",
            text(&answer.body)
        );
    }
    // A streamed upload cannot be kept; its answer must be readable all the same.
    let mut client = Client::open(router.address).await;
    client
        .send(b"POST /upload HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    let piece = vec![b'u'; 65_536];
    for _ in 0..48 {
        client
            .send(&[b"10000\r\n", piece.as_slice(), b"\r\n"].concat())
            .await;
    }
    let answer = client
        .answer(false)
        .await
        .expect("an answer to an upload that has no worker");
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (502, "worker_failed")
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_busy_worker_is_passed_over_as_often_as_the_flag_says() {
    for status in [429, 500, 502, 503, 504] {
        for (flags, wanted) in [
            (&["--retry-max-retries", "2"][..], 3),
            (&["--retry-max-retries", "0"], 1),
            (&["--disable-retries"], 1),
            (&["--retry-max-retries", "9"], 5),
        ] {
            let mut workers = Vec::new();
            for _ in 0..5 {
                let worker = Worker::start_with(false).await;
                worker.script(move |_| Reply::json(status, "{\"error\":{\"message\":\"busy\"}}"));
                workers.push(worker);
            }
            let refs: Vec<&Worker> = workers.iter().collect();
            let router = router(&refs, &[flags, &["--cores", "1"]].concat()).await;
            let mut client = Client::open(router.address).await;
            let answer = client.post(CHAT, &chat("x")).await.unwrap();
            assert_eq!(
                (answer.status, text(&answer.body).contains("busy")),
                (status, true),
                "the last answer goes on"
            );
            let counts: Vec<u64> = workers.iter().map(Worker::count).collect();
            // The same plain 500 from two workers is the request's doing.
            let wanted = if status == 500 { wanted.min(2) } else { wanted };
            assert_eq!(
                counts.iter().sum::<u64>(),
                wanted,
                "{status}, {flags:?}: {counts:?}"
            );
            assert!(
                counts.iter().all(|n| *n <= 1),
                "{status}, {flags:?}: nobody is asked twice: {counts:?}"
            );
            until_books_are_empty(&router).await;
        }
    }
}

#[tokio::test]
async fn one_busy_worker_costs_the_client_nothing_while_another_is_free() {
    let (busy, free) = (Worker::start().await, Worker::start().await);
    busy.script(|_| Reply::json(503, "{}"));
    let router = router(
        &[&busy, &free],
        &["--policy", "round_robin", "--cores", "1"],
    )
    .await;
    let mut client = Client::open(router.address).await;
    for _ in 0..10 {
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    }
    assert_eq!(free.count(), 10);
    // It is left alone for a moment, and not for good.
    let asked = busy.count();
    assert!((1..=5).contains(&asked), "{asked}");
    let end = Instant::now() + Duration::from_secs(10);
    while busy.count() == asked {
        assert!(Instant::now() < end, "it is never asked again");
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_4xx_of_a_worker_goes_to_the_client_and_is_nobodys_failure() {
    let (a, b) = (Worker::start().await, Worker::start().await);
    for worker in [&a, &b] {
        worker.script(|_| Reply::json(404, "{\"error\":{\"message\":\"mine\"}}"));
    }
    let router = router(&[&a, &b], &[]).await;
    let mut client = Client::open(router.address).await;
    for n in 1..=5 {
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!((answer.status, a.count() + b.count()), (404, n));
    }
    assert_eq!(failures(&router, &a.url()) + failures(&router, &b.url()), 0);
}
