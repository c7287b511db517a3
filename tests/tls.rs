//! TLS with clients and to workers: the same answers as without, who is trusted, certificates that are renewed, and ends
//! that must not look like what they are not.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::pd::{CACHED_TOKENS, Pools, decode_script, orphans, pd_router};
use common::process::{RouterProcess, corelane};
use common::tls::*;
use common::*;
use corelane::Router;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

struct Served {
    router: Router,
    worker: Worker,
    authority: Authority,
    issued: Issued,
}

/// A router that speaks TLS with clients, before a plain worker.
async fn served(flags: &[&str]) -> Served {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let issued = authority.issue("127.0.0.1");
    let tls = [
        "--tls-cert",
        issued.cert.path(),
        "--tls-key",
        issued.key.path(),
    ];
    let router = router(&[&worker], &[&tls[..], flags].concat()).await;
    Served {
        router,
        worker,
        authority,
        issued,
    }
}

/// A router before a worker behind TLS.
async fn before(front: &Front, flags: &[&str]) -> Router {
    router_before(&[front.url()], flags).await
}

/// Why a worker is not ready.
fn reason(router: &Router, url: &str) -> Option<String> {
    let workers = router.control().workers();
    let worker = workers.into_iter().find(|worker| *worker.url == *url);
    let reason = worker.and_then(|worker| worker.reason);
    reason.filter(|reason| reason != "not probed yet")
}

fn until_close(body: &[u8], end: End) -> Reply {
    Reply {
        pieces: vec![(Duration::ZERO, body.to_vec())],
        until_close: true,
        end,
        ..Reply::default()
    }
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: r\r\n\r\n").into_bytes()
}

#[tokio::test]
async fn a_client_gets_by_tls_what_it_would_get_without() {
    let served = served(&[]).await;
    let mut rng = Rng(seed());
    let mut client = served.authority.connect(served.router.address).await;
    // Bodies longer than a TLS record, than a receive buffer, and than all buffers of a relay, both ways.
    for length in [1, 2_000, 20_000, 300_000, 3_000_000] {
        let (ask, answer) = (rng.text(length), rng.text(length));
        let reply = format!(r#"{{"text":"{answer}"}}"#);
        served.worker.script({
            let reply = reply.clone();
            move |_| Reply::json(200, &reply)
        });
        let got = client.post(CHAT, &chat(&ask)).await.unwrap();
        assert_eq!(got.status, 200, "{length}");
        assert!(got.body == reply.as_bytes(), "{length}: another body");
        let seen = served.worker.requests().pop().unwrap();
        assert!(seen.body == chat(&ask), "{length}: the worker saw another");
    }
    served.worker.script(|_| Reply::events(50, Duration::ZERO));
    let got = client.post(CHAT, &chat("x")).await.unwrap();
    let text = String::from_utf8(got.body).unwrap();
    assert_eq!(text.matches("data: ").count(), 51);
    // One connection for all.
    assert_eq!(total(&served.router, |s| s.tls_handshakes.value()), 1);
    until_books_are_empty(&served.router).await;
}

#[tokio::test]
async fn requests_that_come_together_are_answered_in_their_order() {
    let served = served(&[]).await;
    served
        .worker
        .script(|request| Reply::json(200, &request.line));
    let mut client = served.authority.connect(served.router.address).await;
    client
        .send(&[get("/a"), get("/b"), get("/c")].concat())
        .await;
    for path in ["/a", "/b", "/c"] {
        let answer = client.answer(false).await.unwrap();
        let line = String::from_utf8(answer.body).unwrap();
        assert!(line.contains(path), "{line}");
    }
}

#[tokio::test]
async fn plain_http_is_told_so_where_tls_is_spoken() {
    let served = served(&[]).await;
    let mut client = Client::open(served.router.address).await;
    client.send(&get("/health")).await;
    let answer = client.answer(false).await.unwrap();
    assert_eq!(answer.status, 400);
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body["error"]["code"], "https_required");
    assert_eq!(served.worker.count(), 0);
}

/// Bytes that are no TLS any more end their own connection, and only that.
#[tokio::test]
async fn a_record_that_was_tampered_with_ends_its_connection_only() {
    let served = served(&[]).await;
    let mut innocent = served.authority.connect(served.router.address).await;
    let mut victim = served.authority.connect(served.router.address).await;
    served.worker.script(|_| Reply::json(200, "{}"));
    assert_eq!(victim.post(CHAT, &chat("x")).await.unwrap().status, 200);
    let (tcp, _) = victim.stream.get_mut();
    // A record of application data of 32 bytes that nobody sealed.
    let forged = [&[23, 3, 3, 0, 32][..], &[7; 32]].concat();
    tcp.write_all(&forged).await.unwrap();
    assert!(victim.answer(false).await.is_none());
    assert_eq!(innocent.post(CHAT, &chat("y")).await.unwrap().status, 200);
    assert_eq!(served.worker.count(), 2);
    assert_eq!(total(&served.router, |s| s.tls_failures.value()), 1);
    until_books_are_empty(&served.router).await;
}

#[tokio::test]
async fn a_handshake_that_does_not_end_is_given_up() {
    let served = served(&[
        "--header-read-timeout-secs",
        "1",
        "--keepalive-timeout-secs",
        "1",
    ])
    .await;
    let mut mute = TcpStream::connect(served.router.address).await.unwrap();
    let mut begun = TcpStream::connect(served.router.address).await.unwrap();
    // The first bytes of a greeting.
    begun.write_all(&[22, 3, 1, 1, 0, 1, 0]).await.unwrap();
    for stream in [&mut mute, &mut begun] {
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        let end = tokio::time::timeout(Duration::from_secs(20), end).await;
        assert!(end.is_ok(), "it was kept");
        assert!(rest.is_empty(), "not a byte in the clear: {rest:?}");
    }
    until("both are gone", || {
        total(&served.router, |s| s.accepted.value() - s.closed.value()) == 0
    })
    .await;
}

#[tokio::test]
async fn clients_need_a_certificate_where_they_must_have_one() {
    let clients = Authority::new();
    let served = served(&["--tls-client-ca", clients.file.path()]).await;
    let known = clients.issue("a client");
    let stranger = Issued::by_nobody("a client");
    for (identity, is_served) in [
        (None, false),
        (Some(&stranger), false),
        (Some(&known), true),
    ] {
        let config = served.authority.client(identity);
        let client = connect(config, served.router.address).await;
        // By TLS 1.3 the refusal comes after the client's own handshake is done.
        let answer = match client {
            Ok(mut client) => client.post(CHAT, &chat("x")).await,
            Err(_) => None,
        };
        assert_eq!(answer.is_some_and(|a| a.status == 200), is_served);
    }
    assert_eq!(served.worker.count(), 1);
}

#[tokio::test]
async fn a_client_that_goes_takes_its_request_along() {
    let served = served(&[]).await;
    served
        .worker
        .script(|_| Reply::events(1_000_000, Duration::from_millis(5)));
    let mut client = served.authority.connect(served.router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    assert!(client.head().await.is_some());
    assert_eq!(served.worker.in_flight(), 1);
    drop(client);
    until("the worker is free again", || {
        served.worker.in_flight() == 0
    })
    .await;
    until_books_are_empty(&served.router).await;
}

/// What is sealed for a client that reads nothing is bounded, and it gets all of it when it reads again.
#[tokio::test]
async fn a_slow_client_stops_its_worker_and_gets_everything() {
    const PIECES: usize = 400;
    let served = served(&["--relay-buffer-bytes", "65536"]).await;
    let piece = vec![b'x'; 64 * 1024];
    served.worker.script(move |_| Reply {
        pieces: vec![(Duration::ZERO, piece.clone()); PIECES],
        chunked: true,
        ..Reply::default()
    });
    let mut client = served.authority.connect(served.router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    // 25 MiB are more than sockets hold: it is stuck, unless they pile up in the router.
    until("it runs", || served.worker.in_flight() == 1).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(served.worker.in_flight(), 1, "all of it went somewhere");
    let answer = client.answer(false).await.unwrap();
    assert!(answer.is_whole);
    assert_eq!(answer.body.len(), PIECES * 64 * 1024);
    until_books_are_empty(&served.router).await;
}

#[tokio::test]
async fn a_worker_behind_tls_is_probed_and_asked_by_its_name() {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let front = Front::start(&worker, &authority.issue("localhost"), None).await;
    let url = format!("https://localhost:{}/", front.address.port());
    let router = router_before(&[url], &["--tls-ca", authority.file.path()]).await;
    let before = front.handshakes();
    let mut client = Client::open(router.address).await;
    for n in 0..10 {
        let answer = client.post(CHAT, &chat(&n.to_string())).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    let seen = worker.requests().pop().unwrap();
    let host = format!("localhost:{}", front.address.port());
    assert_eq!(seen.all("host"), [host.as_bytes()]);
    assert_eq!(front.handshakes() - before, 1, "the connection was kept");
    let names = front.state.names.lock().unwrap().clone();
    assert!(
        names
            .iter()
            .all(|name| name.as_deref() == Some("localhost")),
        "{names:?}"
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn big_bodies_and_streams_go_both_ways_to_a_worker_behind_tls() {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let front = Front::start(&worker, &authority.issue("127.0.0.1"), None).await;
    let router = before(&front, &["--tls-ca", authority.file.path()]).await;
    let mut rng = Rng(seed());
    let mut client = Client::open(router.address).await;
    for length in [1, 20_000, 3_000_000] {
        let (ask, answer) = (rng.text(length), rng.text(length));
        let reply = answer.clone();
        worker.script(move |_| Reply::json(200, &reply));
        let got = client.post(CHAT, &chat(&ask)).await.unwrap();
        assert!(got.body == answer.as_bytes(), "{length}");
        assert!(
            worker.requests().pop().unwrap().body == chat(&ask),
            "{length}"
        );
        // Passed through, its body streamed.
        let wire = [
            b"POST /other HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(),
            format!("{length:x}\r\n{ask}\r\n0\r\n\r\n").into_bytes(),
        ];
        client.send(&wire.concat()).await;
        assert_eq!(client.answer(false).await.unwrap().status, 200);
        assert!(
            worker.requests().pop().unwrap().body == ask.as_bytes(),
            "{length}"
        );
    }
    worker.script(|_| Reply::events(50, Duration::from_millis(1)));
    let got = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!(
        String::from_utf8(got.body)
            .unwrap()
            .matches("data: ")
            .count(),
        51
    );
    until_books_are_empty(&router).await;
}

/// An answer that ends with its connection is whole if the worker said so (close_notify); cut, by whomever, it is not.
#[tokio::test]
async fn an_answer_that_was_cut_does_not_look_whole() {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let issued = authority.issue("127.0.0.1");
    let front = Front::start(&worker, &issued, None).await;
    let router = before(&front, &["--tls-ca", authority.file.path()]).await;
    for (end, is_whole) in [(End::Fin, true), (End::Reset, false)] {
        worker.script(move |_| until_close(b"the first half", end));
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("x"))).await;
        let answer = client.answer(false).await;
        let is_complete = answer.is_some_and(|answer| answer.is_whole);
        assert_eq!(is_complete, is_whole, "{end:?}");
    }
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn a_worker_that_cannot_be_trusted_gets_nothing_and_the_list_says_why() {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let table = [
        (authority.issue("other.example"), "for another name"),
        (Issued::by_nobody("127.0.0.1"), "not signed by anybody"),
        (Issued::by_itself("127.0.0.1"), "must stand in --tls-ca"),
    ];
    let mut fronts = Vec::new();
    for (issued, _) in &table {
        fronts.push(Front::start(&worker, issued, None).await);
    }
    let mut urls: Vec<String> = fronts.iter().map(Front::url).collect();
    // And one that speaks plain HTTP, and says so.
    let plain = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    urls.push(format!("https://{}", plain.local_addr().unwrap()));
    let _plain = tokio::spawn(async move {
        while let Ok((mut stream, _)) = plain.accept().await {
            let mut greeting = [0; 1024];
            let _ = stream.read(&mut greeting).await;
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let router = router_unready_before(&urls, &["--tls-ca", authority.file.path()]);
    let reasons = || {
        urls.iter()
            .map(|url| reason(&router, url))
            .collect::<Vec<_>>()
    };
    until("each was probed", || reasons().iter().all(Option::is_some)).await;
    let wanted = table.iter().map(|(_, wanted)| *wanted);
    let wanted = wanted.chain(["does not speak TLS"]);
    for (reason, wanted) in reasons().iter().zip(wanted) {
        let reason = reason.as_ref().unwrap();
        assert!(reason.contains(wanted), "{reason} / {wanted}");
    }
    assert_eq!(worker.count(), 0);
    assert_eq!(router.control().ready_count(), 0);
}

/// `openssl req -x509` makes certificates that are their own authority; named byte for byte they are trusted, for the
/// name they hold.
#[tokio::test]
async fn a_certificate_that_signs_itself_is_trusted_where_it_is_named() {
    let worker = Worker::start().await;
    let itself = Issued::by_itself("127.0.0.1");
    let front = Front::start(&worker, &itself, None).await;
    let router = before(&front, &["--tls-ca", itself.cert.path()]).await;
    let mut client = Client::open(router.address).await;
    assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    // By another name it is not.
    let url = format!("https://localhost:{}", front.address.port());
    router.control().add_worker(&url).unwrap();
    until("it was probed", || {
        reason(&router, &url).is_some_and(|reason| reason.contains("for another name"))
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_wants_our_certificate_gets_it() {
    let (worker, authority) = (Worker::start().await, Authority::new());
    let front = Front::start(&worker, &authority.issue("127.0.0.1"), Some(&authority)).await;
    let ours = authority.issue("the router");
    let ca = ["--tls-ca", authority.file.path()];
    let identity = [
        "--tls-worker-cert",
        ours.cert.path(),
        "--tls-worker-key",
        ours.key.path(),
    ];
    let router = before(
        &front,
        &[ca, [identity[0], identity[1]], [identity[2], identity[3]]].concat(),
    )
    .await;
    let mut client = Client::open(router.address).await;
    assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    // Without it the probe says what is missing.
    let without = router_unready_before(&[front.url()], &ca);
    until("it was probed", || {
        reason(&without, &front.url()).is_some_and(|reason| reason.contains("--tls-worker-cert"))
    })
    .await;
}

/// Who shook hands keeps what it has; who comes later gets the new certificate.
#[tokio::test]
async fn a_renewed_certificate_holds_for_new_connections() {
    let served = served(&[]).await;
    served
        .worker
        .script(|_| Reply::events(200, Duration::from_millis(10)));
    let address = served.router.address;
    let mut old = served.authority.connect(address).await;
    old.send(&post(CHAT, &chat("x"))).await;
    until("it runs", || served.worker.in_flight() == 1).await;
    let mut admin = served.authority.connect(address).await;
    let later = Authority::new();
    let (cert, key) = later.pem("127.0.0.1");
    // The half of a renewal does not hold.
    served.issued.cert.write(&cert);
    let refused = admin.post("/reload", b"").await.unwrap();
    let reason = String::from_utf8(refused.body).unwrap();
    assert_eq!(refused.status, 400, "{reason}");
    assert!(
        reason.contains("tls-key") && reason.contains("not the key of"),
        "{reason}"
    );
    drop(served.authority.connect(address).await);
    served.issued.key.write(&key);
    let done = admin.post("/reload", b"").await.unwrap();
    let done: serde_json::Value = serde_json::from_slice(&done.body).unwrap();
    assert_eq!(
        done["changed"],
        serde_json::json!(["tls-cert", "tls-key"]),
        "{done}"
    );
    let mut new = connected_once_it_holds(&later, address).await;
    assert!(
        connect(served.authority.client(None), address)
            .await
            .is_err()
    );
    served.worker.script(|_| Reply::json(200, "{}"));
    assert_eq!(new.post(CHAT, &chat("y")).await.unwrap().status, 200);
    // The stream that was running goes on to its end.
    let answer = old.answer(false).await.unwrap();
    let text = String::from_utf8(answer.body).unwrap();
    assert!(
        answer.is_whole && text.matches("data: ").count() == 201,
        "{text}"
    );
    until_books_are_empty(&served.router).await;
}

/// A reload that leaves the certificates alone leaves the tickets alone, too: else each would cost all clients that come
/// back a whole handshake.
#[tokio::test]
async fn a_session_goes_on_after_a_reload_of_other_things() {
    let authority = Authority::new();
    let issued = authority.issue("127.0.0.1");
    let file = File::new("cache-threshold = 0.5\n");
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0", "--cores", "1"]);
    command.args(["--config", file.path(), "--tls-cert", issued.cert.path()]);
    command.args(["--tls-key", issued.key.path()]);
    let router = RouterProcess::start(command);
    let config = authority.client(None);
    let mut first = connect(config.clone(), router.address).await.unwrap();
    file.write("cache-threshold = 0.6\n");
    let done = first.post("/reload", b"").await.unwrap();
    let done: serde_json::Value = serde_json::from_slice(&done.body).unwrap();
    assert_eq!(
        done["changed"],
        serde_json::json!(["cache-threshold"]),
        "{done}"
    );
    let again = connect(config, router.address).await.unwrap();
    let kind = again.stream.get_ref().1.handshake_kind();
    assert_eq!(kind, Some(rustls::HandshakeKind::Resumed));
}

/// A core has the new configuration a moment after the reload has answered.
async fn connected_once_it_holds(
    authority: &Authority,
    to: SocketAddr,
) -> Client<tokio_rustls::client::TlsStream<TcpStream>> {
    for _ in 0..1_000 {
        if let Ok(client) = connect(authority.client(None), to).await {
            return client;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the new certificate never came to hold");
}

#[tokio::test]
async fn the_admin_port_speaks_tls_where_clients_do() {
    let served = served(&["--admin-port", "0"]).await;
    let admin = served.router.admin_address.unwrap();
    let mut client = served.authority.connect(admin).await;
    client.send(&get("/list_workers")).await;
    let answer = client.answer(false).await.unwrap();
    assert_eq!(answer.status, 200);
    assert!(
        String::from_utf8(answer.body)
            .unwrap()
            .contains(&served.worker.url())
    );
    let mut plain = TcpStream::connect(admin).await.unwrap();
    plain.write_all(&get("/list_workers")).await.unwrap();
    let mut got = Vec::new();
    let _ = plain.read_to_end(&mut got).await;
    assert!(!got.starts_with(b"HTTP/"), "no answer in the clear");
}

/// Both legs, a prefill worker that fails, and a client that leaves, all of it over TLS on both sides.
#[tokio::test]
async fn prefill_and_decode_workers_are_reached_by_tls() {
    let authority = Authority::new();
    let issued = authority.issue("127.0.0.1");
    let pools = Pools::start(2, 2).await;
    let mut fronts = Vec::new();
    for worker in pools.prefill.iter().chain(&pools.decode) {
        fronts.push(Front::start(worker, &issued, None).await);
    }
    let urls: Vec<String> = fronts.iter().map(Front::url).collect();
    let flags = [
        ("--tls-ca", authority.file.path()),
        ("--tls-cert", issued.cert.path()),
        ("--tls-key", issued.key.path()),
    ];
    let flags: Vec<&str> = flags
        .iter()
        .flat_map(|(flag, value)| [*flag, *value])
        .collect();
    let router = pd_router(&urls[..2], &urls[2..], &flags);
    until("all workers are ready", || {
        router.control().ready_count() == 4
    })
    .await;
    let mut rng = Rng(seed());
    let mut client = authority.connect(router.address).await;
    for length in [1, 20_000, 300_000] {
        let answer = client.post(CHAT, &chat(&rng.text(length))).await.unwrap();
        assert_eq!(answer.status, 200, "{length}");
        // The decode worker's, with prefill's count of what was cached.
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        let cached = &body["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!((&body["id"], cached), (&"d".into(), &CACHED_TOKENS.into()));
    }
    pools.prefill_fails_first(Reply::json(500, "{}"));
    let answer = client.post(CHAT, &chat("once more")).await.unwrap();
    assert_eq!(answer.status, 200, "another prefill worker is asked");
    // One that leaves in the middle of its answer.
    for worker in &pools.decode {
        decode_script(worker, &pools.transfers, |_| {
            Some(Reply::nothing(End::Stall))
        });
    }
    let decoded = pools.decode_count();
    let mut leaving = authority.connect(router.address).await;
    leaving.send(&post(CHAT, &chat("leaves"))).await;
    until("it is decoded", || pools.decode_count() > decoded).await;
    drop(leaving);
    until_books_are_empty(&router).await;
    pools.transfers.assert_kept();
    assert_eq!(orphans(&router), (0, 0, 0));
    assert!(fronts.iter().all(|front| front.handshakes() > 0));
}
