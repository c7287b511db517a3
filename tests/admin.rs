//! Operating a router: several models, workers that come and go, the admin API on the data port, metrics, draining.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use common::*;
use corelane::Router;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
/// Workers are probed when a test says so, not by the clock.
const QUIET: [&str; 2] = ["--health-check-interval-secs", "3600"];

async fn call(router: &Router, method: &str, target: &str, body: &str) -> Answer {
    let mut client = Client::open(router.address).await;
    let wire = format!(
        "{method} {target} HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(wire.as_bytes()).await;
    client
        .answer(method == "HEAD")
        .await
        .unwrap_or_else(|| panic!("no answer to {method} {target}"))
}

fn json_of(answer: &Answer) -> Value {
    serde_json::from_slice(&answer.body).unwrap_or_else(|e| panic!("{e}: {}", text(answer)))
}

fn text(answer: &Answer) -> String {
    String::from_utf8_lossy(&answer.body).into_owned()
}

fn error_code(answer: &Answer) -> String {
    let json = json_of(answer);
    assert!(
        json["error"]["message"].is_string() && json["error"]["type"].is_string(),
        "{json}"
    );
    json["error"]["code"].as_str().expect("a code").to_string()
}

fn ask(model: &str) -> Vec<u8> {
    json!({"model": model, "messages": [{"role": "user", "content": "hello"}]})
        .to_string()
        .into_bytes()
}

async fn serving(models: &str) -> Worker {
    let worker = Worker::start().await;
    *worker.state.models.lock().unwrap() = Some(models.to_string());
    worker
}

fn encoded(url: &str) -> String {
    percent_encoding::utf8_percent_encode(url, percent_encoding::NON_ALPHANUMERIC).to_string()
}

// ---- models ----

#[tokio::test]
async fn a_request_goes_to_the_workers_that_serve_its_model() {
    let a = serving(r#"{"object":"list","data":[{"id":"llama"}]}"#).await;
    let b = serving(r#"{"object":"list","data":[{"id":"qwen"},{"id":"qwen-lora"}]}"#).await;
    let both = serving(r#"{"object":"list","data":[{"id":"llama"},{"id":"qwen"}]}"#).await;
    let router = router(&[&a, &b, &both], &QUIET).await;
    let mut client = Client::open(router.address).await;
    for (model, count) in [("llama", 20), ("qwen", 20), ("qwen-lora", 10)] {
        for n in 0..count {
            // A prompt of its own each, so that affinity does not keep them together.
            let body = String::from_utf8(ask(model))
                .unwrap()
                .replace("hello", &format!("{n} of its own"));
            assert_eq!(
                client.post(CHAT, body.as_bytes()).await.unwrap().status,
                200,
                "{model}"
            );
        }
    }
    let seen = |worker: &Worker, model: &str| {
        let asked = format!("\"model\":\"{model}\"");
        worker
            .requests()
            .iter()
            .filter(|r| r.has_text(&asked))
            .count()
    };
    assert_eq!(
        (
            seen(&a, "qwen"),
            seen(&a, "qwen-lora"),
            seen(&b, "llama"),
            seen(&both, "qwen-lora")
        ),
        (0, 0, 0, 0)
    );
    assert_eq!(
        (
            seen(&a, "llama") + seen(&both, "llama"),
            seen(&b, "qwen") + seen(&both, "qwen"),
            seen(&b, "qwen-lora")
        ),
        (20, 20, 10)
    );
    assert!(
        seen(&a, "llama") > 0
            && seen(&both, "llama") > 0
            && seen(&b, "qwen") > 0
            && seen(&both, "qwen") > 0
    );

    let answer = client.post(CHAT, &ask("gpt-none")).await.unwrap();
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (404, "model_not_found")
    );
    assert!(text(&answer).contains("gpt-none"), "{}", text(&answer));
    // Escapes are another spelling of the same name; a request without a model may go anywhere.
    assert_eq!(
        client
            .post(CHAT, br#"{"model":"qwen\u002dlora"}"#)
            .await
            .unwrap()
            .status,
        200
    );
    assert_eq!(
        client
            .post(CHAT, br#"{"messages":[]}"#)
            .await
            .unwrap()
            .status,
        200
    );
    // A model whose only worker is down is there, but not now.
    b.die().await;
    until("the worker is out", || {
        router.control().probe();
        router.control().ready_count() == 2
    })
    .await;
    let answer = client.post(CHAT, &ask("qwen-lora")).await.unwrap();
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (503, "no_available_workers")
    );
    assert!(answer.field("retry-after").is_some());
    assert_eq!(client.post(CHAT, &ask("qwen")).await.unwrap().status, 200);
}

#[tokio::test]
async fn the_model_list_merges_the_workers_lists_and_keeps_all_fields() {
    let first = r#"{"id":"m1","object":"model","created":1700000000,"owned_by":"vllm","root":"/m/1","parent":null,"max_model_len":131072,"permission":[{"id":"p","allow_view":true,"x":2.50}]}"#;
    let second = r#"{"id":"m2","n":12345678901234567890123,"u":"\u00e9"}"#;
    let a = serving(&format!(r#"{{"object":"list","data":[{first}]}}"#)).await;
    let b = serving(&format!(
        r#"{{"object":"list","data":[{second},{{"id":"m1","max_model_len":1}}]}}"#
    ))
    .await;
    let router = router(&[&a, &b], &QUIET).await;
    let answer = call(&router, "GET", "/v1/models", "").await;
    assert_eq!(answer.status, 200);
    let wanted = format!(r#"{{"object":"list","data":[{first},{second}]}}"#);
    assert_eq!(
        text(&answer),
        wanted,
        "byte for byte, one entry an id, as the first worker wrote it"
    );
}

#[tokio::test]
async fn a_worker_without_a_model_list_takes_any_model() {
    let (open, named) = (
        Worker::start().await,
        serving(r#"{"data":[{"id":"m1"}]}"#).await,
    );
    let router = router(&[&open, &named], &QUIET).await;
    let mut client = Client::open(router.address).await;
    for n in 0..10 {
        assert_eq!(
            client
                .post(CHAT, &ask(&format!("any-{n}")))
                .await
                .unwrap()
                .status,
            200
        );
    }
    assert_eq!((open.count(), named.count()), (10, 0));
    for n in 0..40 {
        let body = String::from_utf8(ask("m1"))
            .unwrap()
            .replace("hello", &format!("{n} different"));
        assert_eq!(
            client.post(CHAT, body.as_bytes()).await.unwrap().status,
            200
        );
    }
    assert!(
        named.count() > 0 && open.count() > 10,
        "both take m1: {} {}",
        open.count(),
        named.count()
    );
}

// ---- the admin API ----

#[tokio::test]
async fn workers_are_added_listed_and_removed_through_the_data_port() {
    let (a, b, c) = (
        Worker::start().await,
        Worker::start().await,
        Worker::start().await,
    );
    let router = router(&[&a], &QUIET).await;
    let listed = async || {
        let answer = call(&router, "GET", "/list_workers", "").await;
        json_of(&answer)["urls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|u| u.as_str().unwrap().to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(listed().await, [a.url()]);
    let answer = call(
        &router,
        "POST",
        &format!("/add_worker?url={}", encoded(&b.url())),
        "",
    )
    .await;
    assert_eq!(
        (answer.status, text(&answer)),
        (200, format!("Successfully added worker: {}", b.url()))
    );
    let answer = call(&router, "POST", &format!("/add_worker?url={}", b.url()), "").await;
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (400, "worker_exists")
    );
    let answer = call(
        &router,
        "POST",
        "/workers",
        &json!({"url": c.url(), "priority": 3}).to_string(),
    )
    .await;
    assert_eq!(answer.status, 201, "{}", text(&answer));
    assert_eq!(json_of(&answer)["ignored_fields"], json!(["priority"]));
    assert_eq!(
        answer.field("location"),
        Some(format!("/workers/{}", encoded(&c.url())).as_str())
    );
    assert_eq!(listed().await, [a.url(), b.url(), c.url()]);

    let all = json_of(&call(&router, "GET", "/workers", "").await);
    assert_eq!(
        (
            &all["total"],
            &all["workers"][2]["url"],
            &all["workers"][2]["is_healthy"]
        ),
        (&json!(3), &json!(c.url()), &json!(true))
    );
    let one = json_of(
        &call(
            &router,
            "GET",
            &format!("/workers/{}", encoded(&b.url())),
            "",
        )
        .await,
    );
    assert_eq!(
        (&one["url"], &one["load"], &one["state"]),
        (&json!(b.url()), &json!(0), &json!("ready"))
    );

    assert_eq!(
        call(
            &router,
            "DELETE",
            &format!("/workers/{}", encoded(&c.url())),
            ""
        )
        .await
        .status,
        200
    );
    let answer = call(
        &router,
        "POST",
        &format!("/remove_worker?url={}", encoded(&b.url())),
        "",
    )
    .await;
    assert_eq!(
        (answer.status, text(&answer)),
        (200, format!("Successfully removed worker: {}", b.url()))
    );
    assert_eq!(listed().await, [a.url()]);
    for (method, target, body, status, code) in [
        (
            "POST",
            "/remove_worker?url=http://127.0.0.1:9".to_string(),
            "",
            404,
            "worker_not_found",
        ),
        (
            "GET",
            format!("/workers/{}", encoded(&b.url())),
            "",
            404,
            "worker_not_found",
        ),
        (
            "DELETE",
            "/workers/nonsense".to_string(),
            "",
            404,
            "worker_not_found",
        ),
        ("POST", "/add_worker".to_string(), "", 400, "missing_url"),
        (
            "POST",
            "/add_worker?url=ftp://x".to_string(),
            "",
            400,
            "invalid_worker_url",
        ),
        ("POST", "/workers".to_string(), "[]", 400, "invalid_json"),
        ("POST", "/workers".to_string(), "{}", 400, "missing_url"),
        (
            "GET",
            "/add_worker?url=http://a".to_string(),
            "",
            405,
            "method_not_allowed",
        ),
        (
            "DELETE",
            "/list_workers".to_string(),
            "",
            405,
            "method_not_allowed",
        ),
    ] {
        let answer = call(&router, method, &target, body).await;
        assert_eq!(
            (answer.status, error_code(&answer).as_str()),
            (status, code),
            "{method} {target}"
        );
    }
    assert_eq!(
        a.count() + b.count() + c.count(),
        0,
        "no worker has seen any of this"
    );
}

#[tokio::test]
async fn health_liveness_and_readiness_say_who_can_serve() {
    let worker = Worker::start().await;
    let router = router(
        &[&worker],
        &[
            &QUIET[..],
            &[
                "--health-failure-threshold",
                "1",
                "--health-success-threshold",
                "1",
            ],
        ]
        .concat(),
    )
    .await;
    let statuses = async || {
        let mut statuses = Vec::new();
        for path in ["/health", "/liveness", "/readiness", "/v1/models"] {
            statuses.push(call(&router, "GET", path, "").await.status);
        }
        statuses
    };
    assert_eq!(statuses().await, [200, 200, 200, 200]);
    worker
        .state
        .health
        .store(500, std::sync::atomic::Ordering::SeqCst);
    router.control().probe();
    until("the worker is out", || router.control().ready_count() == 0).await;
    assert_eq!(statuses().await, [503, 200, 503, 503]);
    let readiness = json_of(&call(&router, "GET", "/readiness", "").await);
    assert_eq!(
        (&readiness["status"], &readiness["reason"]),
        (&json!("not_ready"), &json!("no healthy workers"))
    );
    let answer = call(&router, "POST", CHAT, "{}").await;
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (503, "no_available_workers")
    );
    worker
        .state
        .health
        .store(200, std::sync::atomic::Ordering::SeqCst);
    router.control().probe();
    until("the worker is back", || router.control().ready_count() == 1).await;
    assert_eq!(statuses().await, [200, 200, 200, 200]);
    router.control().remove_worker(&worker.url());
    assert_eq!(
        json_of(&call(&router, "GET", "/readiness", "").await)["reason"],
        json!("no workers registered")
    );
}

#[tokio::test]
async fn admin_requests_pipelined_between_inference_requests_are_answered_in_order() {
    let worker = serving(r#"{"data":[{"id":"m"}]}"#).await;
    worker.script(|r| match r.line.contains("reset_prefix_cache") {
        true => Reply::json(200, "{}"),
        false => Reply {
            delay: Duration::from_millis(20),
            ..Reply::json(200, r#"{"inference":1}"#)
        },
    });
    let router = router(&[&worker], &QUIET).await;
    let mut wire = Vec::new();
    let mut wanted = Vec::new();
    for (method, path, part) in [
        ("GET", "/health", "All servers healthy"),
        ("GET", "/liveness", "OK"),
        ("GET", "/readiness", r#""status":"ready""#),
        ("GET", "/list_workers", r#""urls":["#),
        ("GET", "/workers", r#""total":1"#),
        ("GET", "/get_loads", r#""load":0"#),
        ("GET", "/get_server_info", r#""name":"corelane""#),
        ("GET", "/get_model_info", r#""served_model_name":"m""#),
        ("GET", "/v1/models", r#""data":[{"id":"m"}]"#),
        (
            "POST",
            "/flush_cache",
            "1 of 1 workers reset their prefix cache",
        ),
    ] {
        wire.extend_from_slice(&post(CHAT, &chat("hello")));
        wire.extend_from_slice(format!("{method} {path} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes());
        wanted.extend([(CHAT, r#"{"inference":1}"#), (path, part)]);
    }
    let mut client = Client::open(router.address).await;
    client.send(&wire).await;
    for (path, part) in wanted {
        let answer = client
            .answer(false)
            .await
            .unwrap_or_else(|| panic!("no answer to {path}"));
        assert!(
            answer.status == 200 && text(&answer).contains(part),
            "{path}: {} {}",
            answer.status,
            text(&answer)
        );
    }
}

#[tokio::test]
async fn loads_are_the_books_while_requests_run() {
    let (a, b) = (Worker::start().await, Worker::start().await);
    for worker in [&a, &b] {
        worker.script(|r| {
            if r.has_text("wait") {
                Reply::nothing(End::Stall)
            } else {
                Reply {
                    end: End::Stall,
                    ..Reply::events(1, Duration::ZERO)
                }
            }
        });
    }
    let router = router(&[&a, &b], &QUIET).await;
    let mut clients = Vec::new();
    for n in 0..12 {
        let mut client = Client::open(router.address).await;
        client
            .send(&post(
                CHAT,
                &chat(&format!(
                    "{n} {}",
                    if n % 3 == 0 { "wait" } else { "stream" }
                )),
            ))
            .await;
        if n % 3 != 0 {
            client.head().await.unwrap();
        }
        clients.push(client);
    }
    until("all have arrived", || a.in_flight() + b.in_flight() == 12).await;
    let loads = json_of(&call(&router, "GET", "/get_loads", "").await);
    let sum = |key: &str| {
        loads["workers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|w| w[key].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(
        (sum("load"), sum("waiting"), sum("active")),
        (12, 4, 8),
        "{loads}"
    );
    for (entry, worker) in loads["workers"].as_array().unwrap().iter().zip([&a, &b]) {
        assert_eq!(
            (entry["worker"].as_str(), entry["load"].as_i64()),
            (Some(worker.url().as_str()), Some(worker.in_flight()))
        );
    }
    drop(clients);
    until_books_are_empty(&router).await;
}

// ---- coming and going ----

fn long_and_short_streams(worker: &Worker) {
    worker.script(|r| {
        let count = if r.has_text("long") { 60 } else { 1 };
        Reply::events(count, Duration::from_millis(20))
    });
}

/// Waits until every life that has ended is forgotten.
async fn until_no_life_drains(router: &Router) {
    let end = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        let all = json_of(&call(router, "GET", "/workers", "").await);
        if all["draining"] == json!([]) {
            return assert_eq!(all["total"], json!(2));
        }
        assert!(
            std::time::Instant::now() < end,
            "still draining: {}",
            all["draining"]
        );
    }
}

#[tokio::test]
async fn removal_drains_and_the_worker_can_be_added_again_at_once() {
    let (a, b) = (Worker::start().await, Worker::start().await);
    long_and_short_streams(&a);
    long_and_short_streams(&b);
    let router = router(
        &[&a, &b],
        &[&QUIET[..], &["--policy", "least_loaded"]].concat(),
    )
    .await;
    let mut streams = Vec::new();
    for n in 0..6 {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat(&format!("long {n}")))).await;
        client.head().await.unwrap();
        streams.push(client);
    }
    assert_eq!((booked(&router, &a), a.in_flight()), (3, 3));
    let counted = a.count();
    assert_eq!(
        call(
            &router,
            "POST",
            &format!("/remove_worker?url={}", encoded(&a.url())),
            ""
        )
        .await
        .status,
        200
    );
    for _ in 0..5 {
        assert_eq!(
            call(&router, "POST", CHAT, r#"{"prompt":"short"}"#)
                .await
                .status,
            200
        );
    }
    assert_eq!(a.count(), counted, "no new request after the removal");
    let all = json_of(&call(&router, "GET", "/workers", "").await);
    assert_eq!(
        (
            &all["total"],
            &all["draining"][0]["url"],
            &all["draining"][0]["load"]
        ),
        (&json!(1), &json!(a.url()), &json!(3))
    );

    // Again at once, as another life: its load begins at zero though the old life still runs.
    assert_eq!(
        call(
            &router,
            "POST",
            &format!("/add_worker?url={}", encoded(&a.url())),
            ""
        )
        .await
        .status,
        200
    );
    let one = json_of(
        &call(
            &router,
            "GET",
            &format!("/workers/{}", encoded(&a.url())),
            "",
        )
        .await,
    );
    assert_eq!(one["load"], json!(0));
    for _ in 0..3 {
        assert_eq!(
            call(&router, "POST", CHAT, r#"{"prompt":"short"}"#)
                .await
                .status,
            200
        );
    }
    assert_eq!(
        a.count(),
        counted + 3,
        "the new life is the idle one and gets all of them"
    );
    for mut client in streams {
        let (rest, _) = tokio::time::timeout(Duration::from_secs(10), async {
            loop {
                if client.buffer.ends_with(b"0\r\n\r\n") {
                    break (std::mem::take(&mut client.buffer), true);
                }
                assert!(
                    client.fill(client.buffer.len() + 1).await,
                    "the stream broke off"
                );
            }
        })
        .await
        .unwrap();
        assert!(
            String::from_utf8_lossy(&rest).contains("data: [DONE]"),
            "the running stream finished"
        );
    }
    until_books_are_empty(&router).await;
    until_no_life_drains(&router).await;
}

#[tokio::test]
async fn removing_and_adding_under_load_loses_no_request_and_no_count() {
    let (a, b) = (
        Worker::start_with(false).await,
        Worker::start_with(false).await,
    );
    for worker in [&a, &b] {
        worker.script(|r| {
            if r.has_text("stream") {
                Reply::events(3, Duration::from_millis(1))
            } else {
                Reply::default()
            }
        });
    }
    let router = router(&[&a, &b], &QUIET).await;
    let end = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for n in 0..12 {
        let (address, end) = (router.address, end.clone());
        clients.spawn(async move {
            let mut client = Client::open(address).await;
            let mut count = 0;
            while !end.load(std::sync::atomic::Ordering::SeqCst) {
                let what = if n % 2 == 0 { "stream" } else { "plain" };
                let answer = client
                    .post(CHAT, &chat(&format!("{what} {n} {count}")))
                    .await
                    .expect("an answer");
                assert!(answer.status == 200 && answer.is_whole, "{}", answer.status);
                count += 1;
            }
            count
        });
    }
    for _ in 0..20 {
        assert!(router.control().remove_worker(&a.url()));
        router.control().add_worker(&a.url()).unwrap();
        until("it is back", || router.control().ready_count() == 2).await;
        let before = a.count();
        until("it gets requests", || a.count() > before + 5).await;
    }
    end.store(true, std::sync::atomic::Ordering::SeqCst);
    let mut answered = 0;
    while let Some(count) = clients.join_next().await {
        answered += count.unwrap();
    }
    assert_eq!(a.count() + b.count(), answered);
    until_books_are_empty(&router).await;
    until_no_life_drains(&router).await;
}

#[tokio::test]
async fn the_start_serves_with_one_good_worker_and_a_late_one_joins() {
    let (good, refusing, late) = (
        Worker::start().await,
        Worker::start().await,
        Worker::start().await,
    );
    refusing.die().await;
    late.die().await;
    let router = router_unready(&[&good, &refusing, &late], &[]);
    until("the good one is ready", || {
        router.control().ready_count() == 1
    })
    .await;
    let mut client = Client::open(router.address).await;
    for _ in 0..5 {
        assert_eq!(client.post(CHAT, &chat("x")).await.unwrap().status, 200);
    }
    assert_eq!(call(&router, "GET", "/readiness", "").await.status, 200);
    assert_eq!(
        call(&router, "GET", "/health", "").await.status,
        503,
        "not all are healthy"
    );
    let all = json_of(&call(&router, "GET", "/workers", "").await);
    assert_eq!(
        (&all["workers"][1]["state"], &all["workers"][1]["reason"]),
        (&json!("starting"), &json!("connection refused"))
    );
    late.revive().await;
    until("the late one joins", || router.control().ready_count() == 2).await;
    for n in 0..40 {
        assert_eq!(
            client
                .post(CHAT, &chat(&format!("{n} of its own")))
                .await
                .unwrap()
                .status,
            200
        );
    }
    assert!(late.count() > 0, "the late one is used");
    assert_eq!(refusing.count(), 0);
}

// ---- metrics ----

/// Samples of a page by their name with labels; panics on what Prometheus could not read.
async fn scrape(router: &Router) -> BTreeMap<String, f64> {
    let mut client = Client::open(router.metrics_address).await;
    client
        .send(b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n")
        .await;
    let answer = client.answer(false).await.unwrap();
    assert_eq!(
        (answer.status, answer.field("content-type")),
        (200, Some("text/plain; version=0.0.4; charset=utf-8"))
    );
    let page = text(&answer);
    let (mut samples, mut types) = (BTreeMap::new(), HashMap::new());
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(
                types.insert(name.to_string(), kind.to_string()).is_none(),
                "{name} stands twice"
            );
        } else if !line.starts_with('#') {
            let (series, value) = line
                .rsplit_once(' ')
                .unwrap_or_else(|| panic!("no value: {line}"));
            let value: f64 = value
                .parse()
                .unwrap_or_else(|_| panic!("no number: {line}"));
            let name = series.split('{').next().unwrap();
            assert!(
                name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'),
                "{line}"
            );
            if let Some((_, labels)) = series.split_once('{') {
                let labels = labels
                    .strip_suffix('}')
                    .unwrap_or_else(|| panic!("no end: {line}"));
                for label in labels.split("\",") {
                    assert!(label.contains("=\""), "{line}");
                }
            }
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| name.strip_suffix(end).filter(|n| types.contains_key(*n)));
            assert!(
                types.contains_key(family.unwrap_or(name)),
                "no type: {line}"
            );
            assert!(
                samples.insert(series.to_string(), value).is_none(),
                "a series stands twice: {line}"
            );
        }
    }
    samples
}

#[tokio::test]
async fn metrics_count_every_outcome_exactly() {
    const EACH: usize = 20;
    let worker = Worker::start_with(false).await;
    worker.script(|r| {
        let said = |what: &str| r.has_text(what);
        match () {
            () if said("say-400") => Reply::json(400, "{}"),
            () if said("say-500") => Reply::json(500, "{}"),
            () if said("say-nothing") => Reply::nothing(End::Reset),
            () if said("break-off") => Reply {
                end: End::Reset,
                ..Reply::events(2, Duration::from_millis(1))
            },
            () if said("stall") => Reply::nothing(End::Stall),
            () => Reply::default(),
        }
    });
    *worker.state.models.lock().unwrap() = Some(r#"{"data":[{"id":"m"},{"id":"other"}]}"#.into());
    let router = router(&[&worker], &QUIET).await;
    let idle = scrape(&router).await;
    let health = format!("vllm_router_worker_health{{worker=\"{}\"}}", worker.url());
    let load = format!("vllm_router_worker_load{{worker=\"{}\"}}", worker.url());
    assert_eq!((idle[&health], idle[&load]), (1.0, 0.0));
    for _ in 0..EACH {
        for (what, status) in [
            ("fine", 200),
            ("say-400", 400),
            ("say-500", 500),
            ("say-nothing", 502),
        ] {
            let mut client = Client::open(router.address).await;
            assert_eq!(client.post(CHAT, &chat(what)).await.unwrap().status, status);
        }
        let mut client = Client::open(router.address).await;
        assert!(
            client
                .post(CHAT, &chat("break-off"))
                .await
                .is_none_or(|a| !a.is_whole)
        );
        let mut client = Client::open(router.address).await;
        assert_eq!(client.post(CHAT, b"no JSON").await.unwrap().status, 400);
        assert_eq!(
            client
                .post("/v1/completions", &ask("unknown"))
                .await
                .unwrap()
                .status,
            404
        );
        assert_eq!(call(&router, "GET", "/any/path", "").await.status, 200);
        let mut client = Client::open(router.address).await;
        client.send(&post("/v1/embeddings", &chat("stall"))).await;
        until("the worker has it", || worker.in_flight() == 1).await;
        let page = scrape(&router).await;
        assert_eq!(page[&load], 1.0, "the gauge is the books");
        assert_eq!(page["vllm_router_embeddings_queue_size"], 1.0);
        client.reset();
        until("it is over", || worker.in_flight() == 0).await;
    }
    until_books_are_empty(&router).await;
    let page = scrape(&router).await;
    let exchanges = |route: &str, outcome: &str| {
        page[&format!("corelane_exchanges_total{{route=\"{route}\",outcome=\"{outcome}\"}}")]
    };
    for (route, outcome) in [
        (CHAT, "ok"),
        (CHAT, "client_error"),
        (CHAT, "worker_error"),
        (CHAT, "worker_failed"),
        (CHAT, "broken"),
        (CHAT, "refused"),
        ("/v1/completions", "refused"),
        ("/v1/embeddings", "client_gone"),
        ("other", "ok"),
    ] {
        assert_eq!(exchanges(route, outcome), EACH as f64, "{route} {outcome}");
    }
    let all: f64 = page
        .iter()
        .filter(|(name, _)| name.starts_with("corelane_exchanges_total"))
        .map(|(_, n)| n)
        .sum();
    assert_eq!(all, 9.0 * EACH as f64, "and nothing else");
    assert_eq!(
        page[&format!("vllm_router_requests_total{{route=\"{CHAT}\"}}")],
        3.0 * EACH as f64
    );
    assert_eq!(
        page[&format!(
            "vllm_router_request_errors_total{{route=\"{CHAT}\",error_type=\"backend_error\"}}"
        )],
        EACH as f64
    );
    assert_eq!(
        page[&format!(
            "vllm_router_processed_requests_total{{worker=\"{}\"}}",
            worker.url()
        )],
        7.0 * EACH as f64
    );
    assert_eq!(
        page[&format!(
            "corelane_worker_failures_total{{worker=\"{}\"}}",
            worker.url()
        )],
        2.0 * EACH as f64
    );
    assert_eq!(
        (page[&load], page["corelane_books_underflow_total"]),
        (0.0, 0.0)
    );
    assert_eq!(page["corelane_malformed_total"], EACH as f64);
    assert_eq!(page["vllm_router_embeddings_queue_size"], 0.0);
    // Nobody else was there to try what broke off before an answer, or was a 500.
    assert_eq!(
        page[&format!("vllm_router_retries_exhausted_total{{route=\"{CHAT}\"}}")],
        2.0 * EACH as f64
    );
    // Histograms: as many as were answered, and cumulative.
    let answered = 4.0 * EACH as f64;
    assert_eq!(page["corelane_request_duration_seconds_count"], answered);
    assert_eq!(
        page["corelane_request_duration_seconds_bucket{le=\"+Inf\"}"],
        answered
    );
}

#[tokio::test]
async fn no_worker_is_an_outcome_of_its_own() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &QUIET).await;
    router.control().remove_worker(&worker.url());
    for _ in 0..20 {
        let answer = call(&router, "POST", CHAT, "{}").await;
        assert_eq!(
            (answer.status, error_code(&answer).as_str()),
            (503, "no_available_workers")
        );
    }
    let page = scrape(&router).await;
    assert_eq!(
        page[&format!(
            "corelane_exchanges_total{{route=\"{CHAT}\",outcome=\"no_available_workers\"}}"
        )],
        20.0
    );
}

#[tokio::test]
async fn two_hundred_random_paths_make_no_new_series() {
    let mut rng = Rng(seed());
    let worker = Worker::start_with(false).await;
    let router = router(&[&worker], &QUIET).await;
    let series = async || scrape(&router).await.keys().cloned().collect::<Vec<_>>();
    let before = series().await;
    let mut client = Client::open(router.address).await;
    for n in 0..200 {
        let path = format!("/{}/{}?{}={n}", rng.text(8), rng.text(12), rng.text(4));
        client
            .send(
                format!(
                    "GET {path} HTTP/1.1\r\nHost: {}.example\r\n\r\n",
                    rng.text(9)
                )
                .as_bytes(),
            )
            .await;
        assert_eq!(client.answer(false).await.unwrap().status, 200);
    }
    assert_eq!(series().await, before);
    let page = scrape(&router).await;
    assert_eq!(
        page["corelane_exchanges_total{route=\"other\",outcome=\"ok\"}"],
        200.0
    );
}

// ---- the end ----

#[tokio::test]
async fn a_drain_says_not_ready_finishes_what_runs_and_ends_the_cores() {
    let worker = Worker::start().await;
    // Twice as long as the grace and the idle connection's last second together.
    worker.script(|_| Reply::events(80, Duration::from_millis(50)));
    let router = router(&[&worker], &["--drain-grace-secs", "1"]).await;
    let mut stream = Client::open(router.address).await;
    stream.send(&post(CHAT, &chat("long"))).await;
    stream.head().await.unwrap();
    let mut idle = Client::open(router.address).await;
    assert_eq!(call(&router, "GET", "/readiness", "").await.status, 200);
    router.control().drain();
    until("draining", || router.shared.is_draining()).await;
    // In the grace: not ready, but still serving.
    let answer = call(&router, "GET", "/readiness", "").await;
    assert_eq!(
        (answer.status, &json_of(&answer)["reason"]),
        (503, &json!("draining"))
    );
    assert_eq!(call(&router, "GET", "/liveness", "").await.status, 200);
    let answer = call(&router, "POST", "/add_worker?url=http://127.0.0.1:9", "").await;
    assert_eq!(
        (answer.status, error_code(&answer).as_str()),
        (503, "draining")
    );
    // After it: idle connections end, new ones are refused, the stream goes on to its end.
    assert_eq!(idle.rest().await, (Vec::new(), true));
    let address = router.address;
    until("the port is closed", || {
        std::net::TcpStream::connect(address).is_err()
    })
    .await;
    assert_eq!(
        router
            .shared
            .books
            .in_flight(router.control().workers()[0].id.slot),
        1,
        "the stream still runs"
    );
    let (rest, is_clean) = stream.rest().await;
    let rest = String::from_utf8_lossy(&rest).into_owned();
    assert!(
        is_clean && rest.contains("data: [DONE]") && rest.ends_with("0\r\n\r\n"),
        "{rest}"
    );
    let shared = router.shared.clone();
    let ended = tokio::task::spawn_blocking(move || router.join().map_err(|e| e.to_string()));
    let ended = tokio::time::timeout(Duration::from_secs(10), ended)
        .await
        .expect("the cores end")
        .unwrap();
    assert_eq!(ended, Ok(()));
    assert_eq!(shared.books.underflow_count(), 0);
}

#[tokio::test]
async fn a_second_signal_or_the_time_limit_ends_what_still_runs() {
    for flags in [
        &["--drain-grace-secs", "0", "--drain-timeout-secs", "1"][..],
        &["--drain-grace-secs", "600"],
    ] {
        let worker = Worker::start().await;
        worker.script(|_| Reply {
            end: End::Stall,
            ..Reply::events(1, Duration::ZERO)
        });
        let router = router(&[&worker], flags).await;
        let mut stream = Client::open(router.address).await;
        stream.send(&post(CHAT, &chat("endless"))).await;
        stream.head().await.unwrap();
        router.control().drain();
        if flags.len() == 2 {
            until("draining", || router.shared.is_draining()).await;
            router.control().drain();
        }
        let ended = tokio::task::spawn_blocking(move || router.join().map_err(|e| e.to_string()));
        let ended = tokio::time::timeout(Duration::from_secs(10), ended)
            .await
            .expect("the cores end")
            .unwrap();
        assert_eq!(ended, Ok(()), "{flags:?}");
        until("the worker's connection is closed", || {
            worker.in_flight() == 0
        })
        .await;
    }
}
