//! Pods as workers (`--service-discovery`): the real binary before a stand-in for the Kubernetes API. Workers share a port
//! and have loopback addresses of their own, as pods do.
#![cfg(feature = "kubernetes")]

mod common;

use std::time::{Duration, Instant};

use common::kube::{KubeApi, Pod};
use common::process::*;
use common::{Client, Worker, chat, post, until_equal, until_within};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long what must not happen is waited for.
const A_WHILE: Duration = Duration::from_millis(700);

/// Workers on one port of addresses that this test alone uses.
struct Fleet {
    workers: Vec<Worker>,
    port: u16,
}

impl Fleet {
    /// `net`: the third number of the addresses.
    async fn start(net: u8, count: u8) -> Fleet {
        let mut fleet = Fleet {
            workers: Vec::new(),
            port: 0,
        };
        for n in 0..count {
            let bind = format!("{}:{}", Fleet::ip_in(net, n), fleet.port);
            let worker = Worker::start_at(&bind, true).await;
            fleet.port = worker.address.port();
            fleet.workers.push(worker);
        }
        fleet
    }

    fn ip_in(net: u8, n: u8) -> String {
        format!("127.0.{net}.{}", n + 2)
    }

    fn ip(&self, n: usize) -> String {
        self.workers[n].address.ip().to_string()
    }

    fn url(&self, n: usize) -> String {
        self.workers[n].url()
    }
}

/// A router that takes its workers from `api`.
fn router(api: &KubeApi, port: u16, flags: &[&str]) -> RouterProcess {
    let port = port.to_string();
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0", "--cores", "1"]);
    command
        .args(["--max-connections", "1000", "--policy", "round_robin"])
        .args(["--service-discovery", "--service-discovery-port", &port])
        .args(flags)
        .env("KUBECONFIG", api.config());
    RouterProcess::start(command)
}

const PLAIN: [&str; 4] = [
    "--selector",
    "app=vllm",
    "--service-discovery-namespace",
    "llm",
];

fn state(worker: &Value) -> String {
    worker["state"].as_str().unwrap_or_default().to_owned()
}

async fn until_states_are(router: &RouterProcess, wanted: &[(&str, &str)]) {
    router.until_workers_are(PATIENCE, state, wanted).await;
}

async fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(PATIENCE, what, is_so).await;
}

/// Sends so many requests; how many each worker got.
async fn spread(router: &RouterProcess, fleet: &Fleet, count: usize) -> Vec<u64> {
    let before: Vec<u64> = fleet.workers.iter().map(Worker::count).collect();
    for _ in 0..count {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &chat("hello"))).await;
        let answer = client.answer(false).await.expect("an answer");
        assert_eq!(answer.status, 200);
    }
    let now = fleet.workers.iter().zip(before);
    now.map(|(worker, before)| worker.count() - before)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn pods_come_and_go_and_only_those_of_the_selector_are_workers() {
    let fleet = Fleet::start(10, 3).await;
    let api = KubeApi::start().await;
    api.apply(&Pod::new("a", &fleet.ip(0), "app=vllm,tier=1"));
    api.apply(&Pod::new("other", &fleet.ip(2), "app=nginx"));
    let router = router(&api, fleet.port, &PLAIN);
    let (a, b) = (fleet.url(0), fleet.url(1));
    until_states_are(&router, &[(&a, "ready")]).await;
    let first = &router.workers().await[0];
    assert_eq!(first["sources"], json!(["kubernetes"]), "{first}");
    let path = &api.paths()[0];
    assert!(path.starts_with("/api/v1/namespaces/llm/pods?"), "{path}");
    // No condition that is watched for, no reconnect: an event is enough.
    until("it watches", || api.watcher_count() == 1).await;
    api.apply(&Pod::new("b", &fleet.ip(1), "app=vllm"));
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 6).await, [3, 3, 0]);
    api.delete("a");
    until_states_are(&router, &[(&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 3).await, [0, 3, 0]);
    // It has the labels no more.
    api.apply(&Pod::new("b", &fleet.ip(1), "app=other"));
    until_states_are(&router, &[]).await;
    assert_eq!(api.counts().0, 1, "one list");
    let source = |name: &str| format!("{name}{{source=\"kubernetes\"}}");
    let series = async |name: &str| router.series(&source(name)).await;
    assert_eq!(series("corelane_discovery_workers_added_total").await, 2.0);
    assert_eq!(
        series("corelane_discovery_workers_removed_total").await,
        2.0
    );
    assert_eq!(series("corelane_discovery_errors_total").await, 0.0);
    assert!(series("corelane_discovery_last_success_timestamp_seconds").await > 1e9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_that_is_not_ready_gets_nothing_and_returns_as_the_same_worker() {
    let fleet = Fleet::start(11, 2).await;
    let api = KubeApi::start().await;
    let mut pod = Pod::new("a", &fleet.ip(0), "app=vllm");
    let mut late = Pod::new("b", &fleet.ip(1), "app=vllm");
    late.is_ready = false;
    api.apply(&pod);
    api.apply(&late);
    let router = router(&api, fleet.port, &PLAIN);
    let (a, b) = (fleet.url(0), fleet.url(1));
    // Who was never ready is no worker yet.
    until_states_are(&router, &[(&a, "ready")]).await;
    until("it watches", || api.watcher_count() == 1).await;
    late.is_ready = true;
    api.apply(&late);
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 4).await, [2, 2]);
    // Its /health stays 200.
    pod.is_ready = false;
    api.apply(&pod);
    until_states_are(&router, &[(&a, "not_ready"), (&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 4).await, [0, 4]);
    assert!(!router.logged("said not to be ready").is_empty());
    pod.is_ready = true;
    api.apply(&pod);
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    // At once with its whole share: it was well all the time.
    assert_eq!(spread(&router, &fleet, 20).await, [10, 10]);
    let removed = "corelane_discovery_workers_removed_total{source=\"kubernetes\"}";
    assert_eq!(router.series(removed).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_that_ends_is_out_at_once_and_what_it_runs_finishes() {
    let fleet = Fleet::start(12, 2).await;
    let api = KubeApi::start().await;
    let mut pods = [0, 1].map(|n| Pod::new(&format!("p{n}"), &fleet.ip(n), "app=vllm"));
    pods.iter().for_each(|pod| api.apply(pod));
    let router = router(&api, fleet.port, &PLAIN);
    let (a, b) = (fleet.url(0), fleet.url(1));
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    until("it watches", || api.watcher_count() == 1).await;
    let (open, gate) = tokio::sync::watch::channel(false);
    fleet.workers[0].script(move |_| common::Reply {
        gate: Some(gate.clone()),
        ..common::Reply::default()
    });
    // One of two requests is at the worker that is to end.
    let mut clients = [
        Client::open(router.address).await,
        Client::open(router.address).await,
    ];
    for client in &mut clients {
        client.send(&post(CHAT, &chat("hello"))).await;
    }
    until("it runs", || fleet.workers[0].count() == 1).await;
    pods[0].is_terminating = true;
    api.apply(&pods[0]);
    until_states_are(&router, &[(&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 4).await, [0, 4]);
    assert_eq!(router.load_sum().await, 1);
    open.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(client.answer(false).await.expect("an answer").status, 200);
    }
    // The other ways of not being there.
    pods[1].phase = "Failed";
    api.apply(&pods[1]);
    until_states_are(&router, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_was_missed_while_a_watch_was_down_is_made_up_for() {
    let fleet = Fleet::start(13, 3).await;
    let api = KubeApi::start().await;
    for n in 0..2 {
        api.apply(&Pod::new(&format!("p{n}"), &fleet.ip(n), "app=vllm"));
    }
    let router = router(&api, fleet.port, &PLAIN);
    let [a, b, c] = [0, 1, 2].map(|n| fleet.url(n));
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    until("it watches", || api.watcher_count() == 1).await;
    api.refuse(true);
    api.cut();
    api.delete("p0");
    api.apply(&Pod::new("p2", &fleet.ip(2), "app=vllm"));
    // Nobody remembers the deletion: only a list can show it.
    api.forget();
    until("it says so", || {
        !router.logged("pods are not seen").is_empty()
    })
    .await;
    // The API is away: what was known holds.
    tokio::time::sleep(A_WHILE).await;
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    assert_eq!(spread(&router, &fleet, 4).await, [2, 2, 0]);
    let errors = "corelane_discovery_errors_total{source=\"kubernetes\"}";
    assert!(router.series(errors).await >= 1.0);
    api.refuse(false);
    until_states_are(&router, &[(&b, "ready"), (&c, "ready")]).await;
    until("it says so", || {
        !router.logged("pods are seen again").is_empty()
    })
    .await;
    // In the log once, however often it was tried.
    assert!(router.logged("pods are not seen").len() <= 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_version_that_is_gone_leads_to_a_new_list() {
    let fleet = Fleet::start(14, 2).await;
    let api = KubeApi::start().await;
    api.apply(&Pod::new("a", &fleet.ip(0), "app=vllm"));
    let router = router(&api, fleet.port, &PLAIN);
    let (a, b) = (fleet.url(0), fleet.url(1));
    until_states_are(&router, &[(&a, "ready")]).await;
    until("it watches", || api.watcher_count() == 1).await;
    let bookmark = json!({"type": "BOOKMARK", "object": {"kind": "Pod", "apiVersion": "v1",
        "metadata": {"resourceVersion": "150", "creationTimestamp": null}}});
    api.send(&bookmark);
    let gone = json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "metadata": {},
        "status": "Failure", "message": "too old resource version", "reason": "Expired", "code": 410}});
    api.send(&gone);
    until("it lists again", || api.counts().0 == 2).await;
    until("it watches again", || api.watcher_count() == 2).await;
    // As the answer to the watch itself: each time a list, never a watch without one.
    api.cut();
    until("it lists again", || api.counts().0 >= 3).await;
    api.apply(&Pod::new("b", &fleet.ip(1), "app=vllm"));
    until_states_are(&router, &[(&a, "ready"), (&b, "ready")]).await;
    let (lists, watches, _) = api.counts();
    assert!(lists >= watches, "{lists} lists, {watches} watches");
    let errors = "corelane_discovery_errors_total{source=\"kubernetes\"}";
    assert_eq!(router.series(errors).await, 0.0, "that is no fault");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_with_another_address_or_in_anothers_place_is_another_worker() {
    let fleet = Fleet::start(15, 2).await;
    let api = KubeApi::start().await;
    let mut pod = Pod::new("a", &fleet.ip(0), "app=vllm");
    pod.ip = None;
    api.apply(&pod);
    let router = router(&api, fleet.port, &PLAIN);
    until("it watches", || api.watcher_count() == 1).await;
    tokio::time::sleep(A_WHILE).await;
    until_states_are(&router, &[]).await;
    pod.ip = Some(fleet.ip(0));
    api.apply(&pod);
    let (a, b) = (fleet.url(0), fleet.url(1));
    until_states_are(&router, &[(&a, "ready")]).await;
    pod.ip = Some(fleet.ip(1));
    api.apply(&pod);
    until_states_are(&router, &[(&b, "ready")]).await;
    // A StatefulSet's next pod has the name, and here even the address.
    let removed = "corelane_discovery_workers_removed_total{source=\"kubernetes\"}";
    assert_eq!(router.series(removed).await, 1.0);
    pod.uid = "another".to_owned();
    api.apply(&pod);
    // The old pod's worker goes.
    until_equal(PATIENCE, 2.0, async || router.series(removed).await).await;
    until_states_are(&router, &[(&b, "ready")]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_role_has_its_selector_and_prefill_pods_say_their_bootstrap_port() {
    let fleet = Fleet::start(16, 4).await;
    let api = KubeApi::start().await;
    let mut pods = [
        Pod::new("p", &fleet.ip(0), "role=prefill"),
        Pod::new("d", &fleet.ip(1), "role=decode,kind=d"),
        Pod::new("both", &fleet.ip(2), "role=prefill,kind=d"),
        Pod::new("bad", &fleet.ip(3), "role=prefill"),
    ];
    let port = |pod: &mut Pod, text: &str| {
        let name = "vllm.ai/bootstrap-port".to_owned();
        pod.annotations.insert(name, text.to_owned());
    };
    port(&mut pods[0], "9001");
    port(&mut pods[1], "9002");
    port(&mut pods[3], "none");
    pods.iter().for_each(|pod| api.apply(pod));
    let flags = [
        "--vllm-pd-disaggregation",
        "--prefill-selector",
        "role=prefill",
        "--decode-selector",
        "kind=d",
    ];
    let router = router(&api, fleet.port, &flags);
    let urls: Vec<String> = (0..4).map(|n| fleet.url(n)).collect();
    let all: Vec<(&str, &str)> = urls.iter().map(|url| (url.as_str(), "ready")).collect();
    until_states_are(&router, &all).await;
    let mut found: Vec<Value> = router.workers().await;
    found.sort_by_key(|worker| worker["url"].to_string());
    let of = |name: &str| found.iter().map(|w| w[name].clone()).collect::<Vec<_>>();
    let roles = of("worker_type");
    assert_eq!(roles, ["prefill", "decode", "prefill", "prefill"]);
    let ports = [json!(9001), Value::Null, json!(8998), json!(8998)];
    assert_eq!(of("bootstrap_port"), ports);
    assert!(
        api.paths()[0].starts_with("/api/v1/pods?"),
        "all namespaces"
    );
    assert!(!router.logged("is not a port").is_empty());
    // Another port is another worker as far as hand-overs go.
    port(&mut pods[0], "9009");
    api.apply(&pods[0]);
    let end = Instant::now() + PATIENCE;
    loop {
        let now = router.workers().await;
        let first = now.iter().find(|w| w["url"] == *urls[0]);
        if first.is_some_and(|w| w["bootstrap_port"] == 9009) {
            return;
        }
        assert!(Instant::now() < end, "{now:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn long_lists_come_in_pages_and_a_refusal_says_which_right_is_missing() {
    let fleet = Fleet::start(17, 1).await;
    let api = KubeApi::start().await;
    api.fail(Some(403));
    // Nobody listens at the addresses of most: they hold up nobody.
    for n in 0..700 {
        let ip = format!("127.1.{}.{}", n / 250, 1 + n % 250);
        api.apply(&Pod::new(&format!("p{n:03}"), &ip, "app=vllm"));
    }
    let router = router(&api, fleet.port, &PLAIN);
    let needs = "get, list and watch on pods are needed";
    until("it says so", || !router.logged(needs).is_empty()).await;
    api.fail(None);
    until_equal(PATIENCE, 700, async || router.workers().await.len()).await;
    assert_eq!(api.counts().2, 2, "pages");
    until("it watches", || api.watcher_count() == 1).await;
    api.apply(&Pod::new("z", &fleet.ip(0), "app=vllm"));
    let url = fleet.url(0);
    // One that answers does not wait for others.
    let is_ready = async || {
        let all = router.workers().await;
        all.iter().any(|w| w["url"] == *url && state(w) == "ready")
    };
    until_equal(PATIENCE, true, is_ready).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_that_is_listed_too_stays_when_it_is_found_no_more() {
    let fleet = Fleet::start(18, 3).await;
    let api = KubeApi::start().await;
    for n in 0..3 {
        api.apply(&Pod::new(&format!("p{n}"), &fleet.ip(n), "app=vllm"));
    }
    let [a, b, c] = [0, 1, 2].map(|n| fleet.url(n));
    let flags = [&PLAIN[..], &["--worker-urls", &a]].concat();
    let router = router(&api, fleet.port, &flags);
    let all = [(&*a, "ready"), (&*b, "ready"), (&*c, "ready")];
    until_states_are(&router, &all).await;
    let sources = router.workers().await;
    let sources = sources.iter().map(|w| w["sources"].to_string());
    let mut sources: Vec<String> = sources.collect();
    sources.sort();
    assert_eq!(
        sources,
        [
            r#"["kubernetes"]"#,
            r#"["kubernetes"]"#,
            r#"["static","kubernetes"]"#
        ]
    );
    let by = async |source: &str| {
        let name = format!("corelane_workers_by_source{{source=\"{source}\"}}");
        router.series(&name).await
    };
    assert_eq!((by("static").await, by("kubernetes").await), (1.0, 3.0));
    // An operator's word holds while the pod is the same.
    let path = format!("/remove_worker?url={c}");
    assert_eq!(router.ask("POST", &path).await.0, 200);
    let mut pod = Pod::new("p2", &fleet.ip(2), "app=vllm");
    pod.annotations
        .insert("some".to_owned(), "thing".to_owned());
    api.apply(&pod);
    api.cut();
    until("it lists again", || api.counts().0 == 2).await;
    tokio::time::sleep(A_WHILE).await;
    until_states_are(&router, &all[..2]).await;
    api.delete("p0");
    api.delete("p1");
    until_states_are(&router, &all[..1]).await;
    assert_eq!((by("static").await, by("kubernetes").await), (1.0, 0.0));
}
