//! The access log: a line for every request, whatever became of it, and nothing secret in any.

mod common;

use common::{
    Client, File, Worker, ask_in_all_ways, chat, post, reply_by_text, router, until,
    until_books_are_empty,
};
use serde_json::Value;

const CHAT: &str = "/v1/chat/completions";

fn lines(file: &File) -> Vec<Value> {
    let text = file.text();
    text.lines()
        .map(|line| serde_json::from_str(line).expect("a line is an object"))
        .collect()
}

#[tokio::test]
async fn every_request_has_its_line_and_no_line_a_secret() {
    let (worker, dead) = (Worker::start().await, Worker::start().await);
    worker.script(reply_by_text);
    let file = File::new("");
    let flags = [
        "--access-log",
        "json",
        "--access-log-file",
        file.path(),
        "--cores",
        "1",
        "--policy",
        "round_robin",
    ];
    let router = router(&[&worker, &dead], &flags).await;
    dead.die().await;
    ask_in_all_ways(router.address).await;
    let mut secret = Client::open(router.address).await;
    let head = "GET /v1/models?key=CANARY1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer CANARY2\r\nX-Request-Id: mine\r\n\r\n";
    secret.send(head.as_bytes()).await;
    secret.answer(false).await.expect("an answer");
    let mut odd = Client::open(router.address).await;
    odd.send(b"NONSENSE CANARY3\r\n\r\n").await;
    assert_eq!(odd.answer(false).await.expect("an answer").status, 400);
    let mut left = Client::open(router.address).await;
    left.send(&post(CHAT, &chat("stall CANARY4"))).await;
    until("it is there", || worker.in_flight() == 1).await;
    left.reset();
    until("all have their lines", || lines(&file).len() == 8).await;
    let lines = lines(&file);
    let shown: Vec<(u64, &str)> = lines
        .iter()
        .map(|line| {
            (
                line["status"].as_u64().unwrap(),
                line["outcome"].as_str().unwrap(),
            )
        })
        .collect();
    let wanted = [
        (200, "ok"),
        (200, "ok"),
        (422, "client_error"),
        (200, "ok"),
        (200, "broken"),
        (200, "ok"),
        (400, "refused"),
        (0, "client_gone"),
    ];
    assert_eq!(shown, wanted);
    for line in &lines[..5] {
        assert_eq!(line["worker"], worker.url());
        assert_eq!((&line["model"], &line["path"]), (&"m".into(), &CHAT.into()));
        assert!(line["first_byte_ms"].as_f64().unwrap() > 0.0);
        assert!(line["client"].as_str().unwrap().starts_with("127.0.0.1:"));
    }
    assert_eq!(lines[5]["request_id"], "mine");
    let retries: u64 = lines
        .iter()
        .map(|line| line["retries"].as_u64().unwrap())
        .sum();
    assert!(retries >= 1, "the dead one was asked first at least once");
    assert!(!file.text().contains("CANARY"), "{}", file.text());
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn what_the_cores_wrote_last_is_there_when_the_router_has_ended() {
    let worker = Worker::start().await;
    let file = File::new("");
    let flags = ["--access-log", "text", "--access-log-file", file.path()];
    let router = router(&[&worker], &flags).await;
    let mut client = Client::open(router.address).await;
    for _ in 0..50 {
        client.post(CHAT, &chat("x")).await.expect("an answer");
    }
    drop(router);
    let text = file.text();
    assert_eq!(
        text.lines()
            .filter(|line| line.contains(" status=200 "))
            .count(),
        50,
        "{text}"
    );
}
