//! Sessions through the whole router with two cores: one session meets one worker, whichever core its next connection
//! lands on and whichever way it is named; without a session load decides.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use common::pd::Pools;
use common::*;
use corelane::Router;
use corelane::route::Reason;

const HASHING: [&str; 3] = ["consistent_hash", "rendezvous_hash", "sticky_least_loaded"];
/// Each with a body that it takes.
const PATHS: [(&str, &str); 6] = [
    ("/v1/chat/completions", r#""messages":[]"#),
    ("/v1/completions", r#""prompt":"a""#),
    ("/v1/embeddings", r#""input":"a""#),
    ("/v1/responses", r#""input":"a""#),
    ("/generate", r#""text":"a""#),
    ("/some/other/path", r#""x":1"#),
];

/// Workers whose answers say who gave them.
async fn workers(count: usize) -> Vec<Worker> {
    let mut workers = Vec::new();
    for n in 0..count {
        let worker = Worker::start().await;
        worker.script(move |_| Reply::json(200, &n.to_string()));
        workers.push(worker);
    }
    workers
}

/// Sends a request over a connection of its own, which any core may accept, and says who got it.
async fn ask(address: SocketAddr, path: &str, head: &str, members: &str) -> usize {
    let body = format!("{{{members}}}");
    let length = body.len();
    let mut client = Client::open(address).await;
    let text =
        format!("POST {path} HTTP/1.1\r\nHost: r\r\n{head}Content-Length: {length}\r\n\r\n{body}");
    client.send(text.as_bytes()).await;
    let answer = client.answer(false).await.expect("an answer");
    assert_eq!(answer.status, 200, "{path} {head} {members}");
    let body = String::from_utf8(answer.body).unwrap();
    body.parse().expect("a worker's number")
}

async fn by_header(router: &Router, session: &str) -> usize {
    let head = format!("x-session-id: {session}\r\n");
    ask(router.address, PATHS[0].0, &head, PATHS[0].1).await
}

async fn finish(router: &Router, session: &str) -> bool {
    let mut client = Client::open(router.address).await;
    let text = format!(
        "POST /finish_session?session_id={session} HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n"
    );
    client.send(text.as_bytes()).await;
    let answer = client.answer(false).await.unwrap();
    assert_eq!(answer.status, 200);
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(
        (&body["status"], &body["session_id"]),
        (&"ok".into(), &session.into())
    );
    body["released"] == true
}

fn reason(router: &Router, reason: Reason) -> u64 {
    total(router, |s| s.decided(reason))
}

fn counts(workers: &[Worker]) -> Vec<u64> {
    workers.iter().map(Worker::count).collect()
}

#[tokio::test]
async fn one_session_meets_one_worker_on_every_path_and_core() {
    for policy in HASHING {
        let workers = workers(4).await;
        let router = router_of(&workers, &["--policy", policy]).await;
        let mut homes = BTreeMap::new();
        for n in 0..40 {
            let session = format!("session-{n}");
            let mut met = BTreeSet::new();
            for (path, members) in PATHS {
                let head = format!("X-Session-Id: {session}\r\n");
                met.insert(ask(router.address, path, &head, members).await);
            }
            // The same value in the body is the same session.
            let named = [
                format!(r#""user":"{session}""#),
                format!(r#""session_params":{{"session_id":"{session}"}}"#),
                format!(r#""prompt_cache_key":"{session}","user":"me""#),
                format!(r#""vllm_xargs":{{"agentic_context":{{"program_id":"{session}"}}}}"#),
            ];
            for (name, (path, members)) in named.iter().zip(PATHS) {
                let members = format!("{members},{name}");
                met.insert(ask(router.address, path, "", &members).await);
            }
            assert_eq!(met.len(), 1, "{policy}: {session} met {met:?}");
            homes.insert(n, met.pop_first());
        }
        let used: BTreeSet<_> = homes.values().collect();
        assert!(used.len() >= 3, "{policy}: {homes:?}");
        assert_eq!(
            reason(&router, Reason::Home) + reason(&router, Reason::NewSession),
            400,
            "{policy}"
        );
        let accepted = router.shared.cores.iter();
        let accepted: Vec<u64> = accepted.map(|c| c.stats.accepted.value()).collect();
        assert!(
            accepted.iter().all(|n| *n > 50),
            "both cores took part: {accepted:?}"
        );
    }
}

/// The router makes a request id for requests without one: it must not be taken for a session.
#[tokio::test]
async fn without_a_key_requests_are_balanced() {
    for policy in [HASHING[0], HASHING[1], HASHING[2], "prefix_hash"] {
        let workers = workers(4).await;
        let router = router_of(&workers, &["--policy", policy]).await;
        for _ in 0..200 {
            ask(router.address, "/v1/chat/completions", "", r#""x":1"#).await;
        }
        let counts = counts(&workers);
        // 50 each, with a deviation of 6.
        assert!(
            counts.iter().all(|n| (20..=80).contains(n)),
            "{policy}: {counts:?}"
        );
        assert_eq!(reason(&router, Reason::NoKey), 200, "{policy}");
    }
}

#[tokio::test]
async fn one_begin_of_a_prompt_meets_one_worker() {
    let mut rng = Rng(seed());
    let workers = workers(4).await;
    // A request may still be in the books when the next one comes: no bound on the loads here.
    let (policy, factor) = ("--policy", "--prefix-hash-load-factor");
    let flags = [
        policy,
        "prefix_hash",
        "--prefix-token-count",
        "50",
        factor,
        "0",
    ];
    let router = router_of(&workers, &flags).await;
    let mut used = BTreeSet::new();
    for _ in 0..30 {
        let begin = rng.text(300);
        let mut met = BTreeSet::new();
        for _ in 0..4 {
            let members = format!(r#""prompt":"{begin}{}""#, rng.text(40));
            met.insert(ask(router.address, "/v1/completions", "", &members).await);
        }
        assert_eq!(met.len(), 1, "{met:?}");
        used.append(&mut met);
    }
    assert!(used.len() >= 3);
    assert_eq!(reason(&router, Reason::Home), 120);
}

#[tokio::test]
async fn a_worker_that_leaves_moves_only_its_own_sessions_and_its_return_moves_them_back() {
    for policy in [HASHING[0], HASHING[1]] {
        let workers = workers(4).await;
        let router = router_of(&workers, &["--policy", policy]).await;
        let mut homes = Vec::new();
        for n in 0..60 {
            homes.push(by_header(&router, &n.to_string()).await);
        }
        let gone = homes[0];
        assert!(router.control().remove_worker(&workers[gone].url()));
        for (n, home) in homes.iter().enumerate() {
            let met = by_header(&router, &n.to_string()).await;
            assert_eq!(met == *home, *home != gone, "{policy}: session {n}");
        }
        router.control().add_worker(&workers[gone].url()).unwrap();
        until("it is back", || router.control().ready_count() == 4).await;
        for (n, home) in homes.iter().enumerate() {
            assert_eq!(by_header(&router, &n.to_string()).await, *home);
        }
    }
}

#[tokio::test]
async fn a_retry_goes_elsewhere_and_the_session_stays() {
    for policy in HASHING {
        let workers = workers(4).await;
        let flags = ["--policy", policy, "--disable-circuit-breaker"];
        let router = router_of(&workers, &flags).await;
        let home = by_header(&router, "a").await;
        workers[home].script(|_| Reply::json(500, "{}"));
        let next = by_header(&router, "a").await;
        assert_ne!(next, home, "{policy}");
        assert_eq!(reason(&router, Reason::HomeOut), 1, "{policy}");
        workers[home].script(move |_| Reply::json(200, &home.to_string()));
        assert_eq!(by_header(&router, "a").await, home, "{policy}");
    }
}

/// As even as can be, in whatever order they come: that is what the policy is for.
#[tokio::test]
async fn new_sticky_sessions_go_where_the_fewest_are() {
    let workers = workers(3).await;
    let router = router_of(&workers, &["--policy", "sticky_least_loaded"]).await;
    for n in 0..30 {
        by_header(&router, &format!("s{n}")).await;
    }
    assert_eq!(counts(&workers), [10, 10, 10]);
    // A session that is over makes room: of the next three one comes to its worker besides.
    let home = by_header(&router, "s0").await;
    assert!(finish(&router, "s0").await);
    assert!(!finish(&router, "s0").await, "only once");
    assert_eq!(by_header(&router, "new").await, home);
    assert_eq!(reason(&router, Reason::NewSession), 31);
}

#[tokio::test]
async fn a_sticky_session_follows_no_load_and_is_bound_anew_when_its_worker_has_gone() {
    let workers = workers(3).await;
    let router = router_of(&workers, &["--policy", "sticky_least_loaded"]).await;
    let home = by_header(&router, "a").await;
    assert!(router.control().remove_worker(&workers[home].url()));
    let next = by_header(&router, "a").await;
    assert_ne!(next, home);
    router.control().add_worker(&workers[home].url()).unwrap();
    until("it is back", || router.control().ready_count() == 3).await;
    for _ in 0..5 {
        assert_eq!(
            by_header(&router, "a").await,
            next,
            "its cache is there now"
        );
    }
    assert_eq!(reason(&router, Reason::NewSession), 2);
}

#[tokio::test]
async fn an_idle_sticky_session_is_over() {
    let workers = workers(3).await;
    let flags = [
        "--policy",
        "sticky_least_loaded",
        "--sticky-session-ttl-secs",
        "1",
    ];
    let router = router_of(&workers, &flags).await;
    by_header(&router, "a").await;
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    by_header(&router, "a").await;
    assert_eq!(reason(&router, Reason::NewSession), 2);
}

/// Many begin at once on both cores, each with several requests at a time: each has one worker.
#[tokio::test]
async fn sticky_sessions_that_begin_at_once_have_one_worker_each() {
    let workers = workers(4).await;
    let router = router_of(&workers, &["--policy", "sticky_least_loaded"]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..240 {
        let address = router.address;
        tasks.spawn(async move {
            let session = n / 6;
            let head = format!("x-session-id: {session}\r\n");
            (session, ask(address, PATHS[0].0, &head, PATHS[0].1).await)
        });
    }
    let mut homes: BTreeMap<i32, BTreeSet<usize>> = BTreeMap::new();
    for (session, home) in tasks.join_all().await {
        homes.entry(session).or_default().insert(home);
    }
    assert!(homes.values().all(|met| met.len() == 1), "{homes:?}");
    assert_eq!(router.shared.sessions.get().unwrap().total(), 40);
}

#[tokio::test]
async fn in_two_legs_one_session_meets_one_pair() {
    for policy in HASHING {
        let pools = Pools::start(3, 3).await;
        let router = pools
            .router(&["--policy", policy, "--cores", cores()])
            .await;
        let mut pairs = BTreeSet::new();
        for n in 0..16 {
            let mut met = BTreeSet::new();
            for round in 0..4 {
                let pair = || {
                    let counts = |workers: &[Worker]| -> Vec<u64> {
                        workers.iter().map(Worker::count).collect()
                    };
                    (counts(&pools.prefill), counts(&pools.decode))
                };
                let before = pair();
                let (head, body) = match round % 2 {
                    0 => (format!("x-session-id: {n}\r\n"), String::new()),
                    _ => (String::new(), format!(r#","user":{n}"#)),
                };
                let body = format!(r#"{{"messages":[],"max_tokens":9{body}}}"#);
                let mut client = Client::open(router.address).await;
                let text = format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n{head}Content-Length: {}\r\n\r\n{body}",
                    body.len()
                );
                client.send(text.as_bytes()).await;
                assert_eq!(client.answer(false).await.unwrap().status, 200);
                let after = pair();
                let grown = |before: &[u64], after: &[u64]| {
                    let mut both = before.iter().zip(after);
                    both.position(|(before, after)| after > before)
                };
                met.insert((grown(&before.0, &after.0), grown(&before.1, &after.1)));
            }
            assert_eq!(met.len(), 1, "{policy}: session {n} met {met:?}");
            pairs.append(&mut met);
        }
        assert!(pairs.len() >= 3, "{policy}: {pairs:?}");
        if policy == "sticky_least_loaded" {
            assert!(finish(&router, "0").await);
            assert_eq!(router.shared.sessions.get().unwrap().total(), 30);
        }
        pools.transfers.assert_kept();
    }
}
