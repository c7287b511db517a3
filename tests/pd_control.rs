//! Operating a P/D fleet through the data port of a whole router: roles, readiness, ranks.

mod common;

use clap::Parser;
use common::*;
use corelane::Router;
use corelane::config::{Cli, Config};
use corelane::route::Role;
use serde_json::{Value, json};

fn start(flags: &[&str]) -> Router {
    let mut line = vec![
        "corelane",
        "--port",
        "0",
        "--prometheus-port",
        "0",
        "--max-connections",
        "4000",
    ];
    line.extend(flags);
    let cli = Cli::try_parse_from(line).unwrap();
    corelane::ring::raise_descriptor_limit();
    corelane::start(Config::from_cli(cli).unwrap()).unwrap()
}

async fn call(router: &Router, method: &str, target: &str, body: &str) -> (u16, Value) {
    let mut client = Client::open(router.address).await;
    let wire = format!(
        "{method} {target} HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(wire.as_bytes()).await;
    let answer = client.answer(false).await.unwrap();
    let json = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
    (answer.status, json)
}

async fn ready(router: &Router, count: usize) {
    until("the workers are ready", || {
        router.control().ready_count() == count
    })
    .await;
}

#[tokio::test]
async fn a_fleet_of_roles_is_built_by_request() {
    let (p, d) = (Worker::start().await, Worker::start().await);
    let router = start(&[
        "--vllm-pd-disaggregation",
        "--policy",
        "round_robin",
        "--decode-policy",
        "power_of_two",
    ]);
    let (status, body) = call(&router, "GET", "/readiness", "").await;
    assert_eq!(
        (status, &body["reason"]),
        (503, &json!("no workers registered"))
    );
    let body = json!({"url": p.url(), "worker_type": "prefill", "bootstrap_port": 9001});
    let (status, added) = call(&router, "POST", "/workers", &body.to_string()).await;
    assert_eq!(status, 201, "{added}");
    assert_eq!(
        (
            &added["worker"]["worker_type"],
            &added["worker"]["bootstrap_port"]
        ),
        (&json!("prefill"), &json!(9001))
    );
    let (status, body) = call(&router, "GET", "/readiness", "").await;
    assert_eq!(
        (status, &body["reason"]),
        (503, &json!("no decode worker is ready"))
    );
    let target = format!("/add_worker?url={}", d.url());
    let (status, body) = call(&router, "POST", &target, "").await;
    assert_eq!(
        (status, &body["error"]["code"]),
        (400, &json!("unsupported_worker_type"))
    );
    let target = format!("{target}&worker_type=decode");
    assert_eq!(call(&router, "POST", &target, "").await.0, 200);
    assert_eq!(call(&router, "GET", "/readiness", "").await.0, 200);
    let (_, info) = call(&router, "GET", "/get_server_info", "").await;
    assert_eq!(
        (
            &info["settings"]["pd"]["prefill"]["policy"],
            &info["settings"]["pd"]["decode"]["policy"]
        ),
        (&json!("round_robin"), &json!("power_of_two"))
    );
    let roles: Vec<Role> = router.control().workers().iter().map(|w| w.role).collect();
    assert_eq!(roles, [Role::Prefill, Role::Decode]);
}

/// Each rank is a worker to the policies: requests spread over both, and each counts its own.
#[tokio::test]
async fn ranks_share_an_engine_and_count_apart() {
    let worker = Worker::start().await;
    let url = worker.url();
    let router = start(&[
        "--intra-node-data-parallel-size",
        "2",
        "--policy",
        "round_robin",
        "--worker-urls",
        &url,
    ]);
    ready(&router, 2).await;
    let mut client = Client::open(router.address).await;
    for n in 0..10 {
        let answer = client
            .post("/v1/chat/completions", &chat(&format!("{n}")))
            .await;
        assert_eq!(answer.unwrap().status, 200);
    }
    until_books_are_empty(&router).await;
    let views = router.control().workers();
    let told: Vec<(String, u64)> = views
        .iter()
        .map(|view| (view.url.to_string(), view.chosen))
        .collect();
    assert_eq!(told, [(format!("{url}@0"), 5), (format!("{url}@1"), 5)]);
    assert_eq!(worker.count(), 10);
    assert!(router.control().remove_worker(&url));
    assert_eq!(router.control().ready_count(), 0, "all ranks together");
}
