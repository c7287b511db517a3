//! Requests of web pages: which origins may read answers, whoever gives them, and what preflights get.

mod common;

use common::{Answer, Client, Reply, Worker, chat, post, router};
use corelane::Router;

const CHAT: &str = "/v1/chat/completions";
const PAGE: &str = "https://app.example";

async fn ask(router: &Router, request: &str) -> Answer {
    let mut client = Client::open(router.address).await;
    client.send(request.as_bytes()).await;
    client.answer(false).await.expect("an answer")
}

/// A chat from a page of this origin.
async fn chat_from(router: &Router, origin: &str) -> Answer {
    let request = String::from_utf8(post(CHAT, &chat("hello"))).unwrap();
    ask(
        router,
        &request.replacen("Host:", &format!("Origin: {origin}\r\nHost:"), 1),
    )
    .await
}

fn preflight(path: &str, origin: &str) -> String {
    format!(
        "OPTIONS {path} HTTP/1.1\r\nHost: r\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n\
         Access-Control-Request-Headers: authorization,x-stainless-os\r\n\r\n"
    )
}

fn allowed(answer: &Answer) -> Option<&str> {
    let name = "access-control-allow-origin:";
    let count = answer.head.to_lowercase().matches(name).count();
    assert!(count <= 1, "a browser refuses two: {}", answer.head);
    answer.field("access-control-allow-origin")
}

/// A worker that, as vLLM does, allows any origin itself.
async fn worker() -> Worker {
    let worker = Worker::start().await;
    worker.script(|_| {
        let mut reply = Reply::default();
        reply
            .fields
            .push(("Access-Control-Allow-Origin".into(), "*".into()));
        reply
            .fields
            .push(("access-control-allow-credentials".into(), "true".into()));
        reply
    });
    worker
}

#[tokio::test]
async fn a_page_of_a_listed_origin_reads_every_answer_and_another_one_none() {
    let worker = worker().await;
    let flags = ["--cors-allowed-origins", "http://localhost:3000", PAGE];
    let router = router(&[&worker], &flags).await;
    for (origin, wanted) in [(PAGE, Some(PAGE)), ("https://evil.example", None)] {
        let relayed = chat_from(&router, origin).await;
        assert_eq!((relayed.status, allowed(&relayed)), (200, wanted));
        assert_eq!(
            relayed.field("access-control-allow-credentials"),
            None,
            "the worker's"
        );
        let get =
            |path: &str| format!("GET {path} HTTP/1.1\r\nHost: r\r\nOrigin: {origin}\r\n\r\n");
        let admin = ask(&router, &get("/readiness")).await;
        assert_eq!((admin.status, allowed(&admin)), (200, wanted));
        let refused = ask(&router, &get(CHAT)).await;
        assert_eq!((refused.status, allowed(&refused)), (405, wanted));
        for answer in [relayed, admin, refused] {
            assert_eq!(answer.field("vary"), Some("origin"), "{}", answer.head);
        }
    }
}

#[tokio::test]
async fn a_preflight_is_answered_here_for_every_path_and_needs_no_key() {
    let worker = worker().await;
    let flags = ["--cors-allowed-origins", PAGE, "--client-api-key", "k"];
    let router = router(&[&worker], &flags).await;
    let mut client = Client::open(router.address).await;
    for path in [
        CHAT,
        "/v1/models",
        "/add_worker?url=x",
        "/unknown",
        "/sleep",
    ] {
        client.send(preflight(path, PAGE).as_bytes()).await;
        let answer = client
            .answer(false)
            .await
            .expect("an answer on the same connection");
        assert_eq!(
            (answer.status, allowed(&answer)),
            (200, Some(PAGE)),
            "{path}"
        );
        assert_eq!(
            answer.field("access-control-allow-headers"),
            Some("authorization,x-stainless-os")
        );
        assert!(answer.body.is_empty());
    }
    let stranger = ask(&router, &preflight(CHAT, "https://evil.example")).await;
    assert_eq!((stranger.status, allowed(&stranger)), (200, None));
    assert_eq!(worker.count(), 0, "no worker was asked");
    let plain = format!("OPTIONS /unknown HTTP/1.1\r\nHost: r\r\nOrigin: {PAGE}\r\n\r\n");
    assert_eq!(
        ask(&router, &plain).await.status,
        401,
        "no preflight, and no key"
    );
}

#[tokio::test]
async fn a_star_is_any_page() {
    let worker = worker().await;
    let router = router(&[&worker], &["--cors-allowed-origins", "*"]).await;
    assert_eq!(
        allowed(&chat_from(&router, "https://any.example").await),
        Some("*")
    );
    assert_eq!(
        allowed(&ask(&router, &preflight(CHAT, "null")).await),
        Some("*")
    );
}

#[tokio::test]
async fn without_the_flag_nothing_is_added_and_nothing_taken_away() {
    let worker = worker().await;
    let router = router(&[&worker], &[]).await;
    let relayed = chat_from(&router, PAGE).await;
    assert_eq!(allowed(&relayed), Some("*"), "what the worker says");
    assert_eq!(
        relayed.field("access-control-allow-credentials"),
        Some("true")
    );
    assert_eq!(relayed.field("vary"), None);
    let answer = ask(&router, &preflight(CHAT, PAGE)).await;
    assert_eq!((answer.status, allowed(&answer)), (405, None));
}
