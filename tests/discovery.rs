//! Workers that the real binary finds in a file (`--workers-file`) and by DNS (`dns+http://`, `dnssrv+http://`).

mod common;

use std::process::Stdio;
use std::time::{Duration, Instant};

#[cfg(feature = "dns")]
use common::dns::{Dns, Record};
use common::process::*;
use common::{Client, File, Worker, chat, post, until_within};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long what must not happen is waited for: two looks at a file, one of a name.
const A_WHILE: Duration = Duration::from_millis(1600);

fn router(flags: &[&str]) -> RouterProcess {
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0", "--cores", "1"]);
    command.args(["--max-connections", "1000"]).args(flags);
    RouterProcess::start(command)
}

/// Who says that a worker is there.
fn sources(worker: &Value) -> String {
    let sources = worker["sources"].as_array().cloned().unwrap_or_default();
    let sources = sources.iter().filter_map(Value::as_str);
    sources.collect::<Vec<_>>().join("+")
}

async fn until_found(router: &RouterProcess, wanted: &[(&str, &str)]) {
    router.until_workers_are(PATIENCE, sources, wanted).await;
}

async fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(PATIENCE, what, is_so).await;
}

async fn errors(router: &RouterProcess, source: &str) -> f64 {
    let name = format!("corelane_discovery_errors_total{{source=\"{source}\"}}");
    router.series(&name).await
}

// ---- the file ----

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_file_is_followed_and_a_bad_one_changes_nothing() {
    let (a, b) = (Worker::start().await, Worker::start().await);
    let (a_url, b_url) = (a.url(), b.url());
    let file = File::new(&format!("# fleet\n{a_url} # the first\n"));
    let router = router(&["--workers-file", file.path()]);
    until_found(&router, &[(&a_url, "file")]).await;
    file.write(&format!("{a_url} role=regular\n{b_url}\n"));
    let both = [(&*a_url, "file"), (&*b_url, "file")];
    until_found(&router, &both).await;
    router.until_healthy().await;
    // In place and in two steps, as an editor writes: half of it is not read.
    for (text, why) in [
        ("", "names no worker"),
        ("http://a b:1\n", "line 1"),
        (
            "http://a:1 role=prefill\n",
            "needs --vllm-pd-disaggregation",
        ),
    ] {
        std::fs::write(file.path(), text).unwrap();
        until(why, || {
            router
                .logged("not taken")
                .iter()
                .any(|line| line.contains(why))
        })
        .await;
        assert_eq!(router.workers().await.len(), 2, "{why}");
    }
    std::fs::remove_file(file.path()).unwrap();
    until("it says so", || !router.logged("cannot be read").is_empty()).await;
    tokio::time::sleep(A_WHILE).await;
    until_found(&router, &both).await;
    assert_eq!(errors(&router, "file").await, 4.0, "each fault once");
    let (status, answer) = router.ask("POST", "/reload").await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("invalid_config"))
    );
    // Good again: who is listed no more drains, what it runs finishes.
    let (open, gate) = tokio::sync::watch::channel(false);
    for worker in [&a, &b] {
        let gate = gate.clone();
        worker.script(move |_| common::Reply {
            gate: Some(gate.clone()),
            ..common::Reply::default()
        });
    }
    let mut clients = Vec::new();
    for n in 0..2 {
        let mut client = Client::open(router.address).await;
        let body = chat(&format!("{n} is another prompt"));
        client.send(&post(CHAT, &body)).await;
        clients.push(client);
        until("it runs", || a.count() + b.count() == n + 1).await;
    }
    assert_eq!((a.count(), b.count()), (1, 1), "least loaded");
    file.write(&format!("{b_url}\n"));
    until_found(&router, &[(&b_url, "file")]).await;
    assert_eq!(router.load_sum().await, 2);
    open.send(true).unwrap();
    for mut client in clients {
        assert_eq!(client.answer(false).await.expect("an answer").status, 200);
    }
    assert_eq!(router.ask("POST", "/reload").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_file_with_roles_fills_both_pools() {
    let text = "http://127.0.0.1:7001 role=prefill bootstrap-port=9001\nhttp://127.0.0.1:7002 role=decode\n";
    let file = File::new(text);
    let router = router(&["--vllm-pd-disaggregation", "--workers-file", file.path()]);
    let wanted = [
        ("http://127.0.0.1:7001", "file"),
        ("http://127.0.0.1:7002", "file"),
    ];
    until_found(&router, &wanted).await;
    let (_, page) = router.get("/workers").await;
    assert_eq!(page["stats"]["prefill_count"], 1);
    assert_eq!(page["stats"]["decode_count"], 1);
    let mut all = page["workers"].as_array().unwrap().iter();
    let prefill = all.find(|worker| worker["worker_type"] == "prefill");
    assert_eq!(prefill.unwrap()["bootstrap_port"], 9001);
    // The same place as something else is something else.
    file.write("http://127.0.0.1:7001 role=decode\nhttp://127.0.0.1:7002 role=decode\n");
    let end = Instant::now() + PATIENCE;
    loop {
        let (_, page) = router.get("/workers").await;
        if page["stats"]["decode_count"] == 2 && page["stats"]["prefill_count"] == 0 {
            return;
        }
        assert!(Instant::now() < end, "{page}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn a_file_that_cannot_be_is_refused_at_start() {
    let file = File::new("http://a:1\nftp://b\n");
    let flags = ["--workers-file", file.path()];
    let output = corelane(&flags).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("--workers-file") && said.contains("line 2"),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_is_found_twice_is_one_worker_and_each_takes_back_only_his_own_word() {
    let url = |n: u16| format!("http://127.0.0.1:{}", 7100 + n);
    let [listed, common, operators, files] = [0, 1, 2, 3].map(url);
    let file = File::new(&format!("{common}\n{files}\n"));
    let config = File::new(&format!("worker-urls = [{listed:?}, {common:?}]\n"));
    let flags = ["--config", config.path(), "--workers-file", file.path()];
    let router = router(&flags);
    let path = format!("/add_worker?url={operators}");
    assert_eq!(router.ask("POST", &path).await.0, 202);
    let all = [
        (&*listed, "static"),
        (&*common, "static+file"),
        (&*operators, "api"),
        (&*files, "file"),
    ];
    until_found(&router, &all).await;
    // The file names somebody else: what others said stays.
    let last = url(4);
    file.write(&format!("{last}\n{operators}\n"));
    let wanted = [
        (&*listed, "static"),
        (&*common, "static"),
        (&*operators, "api+file"),
        (&*last, "file"),
    ];
    until_found(&router, &wanted).await;
    // And so does the config file.
    file.write(&format!("{last}\n{common}\n"));
    let wanted = [
        (&*listed, "static"),
        (&*common, "static+file"),
        (&*operators, "api"),
        (&*last, "file"),
    ];
    until_found(&router, &wanted).await;
    config.write("worker-urls = []\n");
    let (status, answer) = router.ask("POST", "/reload").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["workers_removed"], json!([listed]));
    let wanted = [(&*common, "file"), (&*operators, "api"), (&*last, "file")];
    until_found(&router, &wanted).await;
    // What an operator removes is gone, until the file says something else of it.
    let path = format!("/remove_worker?url={last}");
    assert_eq!(router.ask("POST", &path).await.0, 200);
    file.write(&format!("# as before\n{last}\n{common}\n"));
    tokio::time::sleep(A_WHILE).await;
    until_found(&router, &wanted[..2]).await;
    let by = |source: &str| format!("corelane_workers_by_source{{source=\"{source}\"}}");
    assert_eq!(router.series(&by("file")).await, 1.0);
    assert_eq!(router.series(&by("api")).await, 1.0);
    assert_eq!(router.series(&by("static")).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_reload_may_name_another_file_or_none() {
    let first = File::new("http://127.0.0.1:7201\n");
    let second = File::new("http://127.0.0.1:7202\n");
    let config = File::new(&format!("workers-file = {:?}\n", first.path()));
    let router = router(&["--config", config.path()]);
    until_found(&router, &[("http://127.0.0.1:7201", "file")]).await;
    config.write(&format!("workers-file = {:?}\n", second.path()));
    assert_eq!(router.ask("POST", "/reload").await.0, 200);
    until_found(&router, &[("http://127.0.0.1:7202", "file")]).await;
    config.write("workers-file = \"/nonexistent\"\n");
    assert_eq!(router.ask("POST", "/reload").await.0, 400);
    config.write("policy = \"random\"\n");
    assert_eq!(router.ask("POST", "/reload").await.0, 200);
    until_found(&router, &[]).await;
}

// ---- names ----

#[cfg(feature = "dns")]
fn a(last: u8) -> Record {
    Record::A([127, 0, 20, last].into())
}

#[cfg(feature = "dns")]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn addresses_of_a_name_are_workers_and_a_failed_look_up_changes_nothing() {
    let dns = Dns::start(1).await;
    dns.set("fleet.test.", &[a(1), a(2)]);
    let server = dns.address.to_string();
    let flags = ["--dns-server", &server, "--worker-urls"];
    let router = router(&[&flags[..], &["dns+http://fleet.test:8000/x"]].concat());
    let url = |last: u8| format!("http://127.0.20.{last}:8000/x");
    let [one, two, three] = [1, 2, 3].map(url);
    until_found(&router, &[(&one, "dns"), (&two, "dns")]).await;
    dns.set("fleet.test.", &[a(3), a(2)]);
    until_found(&router, &[(&two, "dns"), (&three, "dns")]).await;
    let now = [(&*two, "dns"), (&*three, "dns")];
    assert_eq!(errors(&router, "dns").await, 0.0);
    dns.fail(true);
    until("it says so", || router.logged("is not resolved").len() == 1).await;
    tokio::time::sleep(A_WHILE).await;
    until_found(&router, &now).await;
    dns.fail(false);
    dns.forget("fleet.test.");
    until("it says so", || router.logged("is not resolved").len() == 2).await;
    dns.set("fleet.test.", &[]);
    tokio::time::sleep(A_WHILE).await;
    until_found(&router, &now).await;
    dns.set("fleet.test.", &[a(1)]);
    until_found(&router, &[(&one, "dns")]).await;
    assert!(!router.logged("is resolved again").is_empty());
    assert!(errors(&router, "dns").await >= 2.0);
}

#[cfg(feature = "dns")]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn services_bring_their_ports_and_only_the_first_priority_counts() {
    let dns = Dns::start(1).await;
    let srv = "_vllm._tcp.fleet.test.";
    let pod = |n: u16, target| Record::Srv(0, 8000 + n, target);
    let spare = Record::Srv(9, 8009, "spare.test.");
    dns.set(srv, &[pod(1, "a.test."), pod(2, "b.test."), spare]);
    dns.set("a.test.", &[a(1)]);
    dns.set("b.test.", &[a(2)]);
    dns.set("spare.test.", &[a(9)]);
    let server = dns.address.to_string();
    let router = router(&[
        "--vllm-pd-disaggregation",
        "--dns-server",
        &server,
        "--prefill",
        "dnssrv+http://_vllm._tcp.fleet.test",
        "9123",
        "--decode",
        "http://127.0.0.1:7301",
    ]);
    let url = |n: u16| format!("http://127.0.20.{n}:{}", 8000 + n);
    let [one, two, three] = [1, 2, 3].map(url);
    let decode = ("http://127.0.0.1:7301", "static");
    until_found(&router, &[(&one, "dns"), (&two, "dns"), decode]).await;
    let (_, page) = router.get("/workers").await;
    let workers = page["workers"].as_array().unwrap();
    let first = workers.iter().find(|w| w["url"] == *one).unwrap();
    assert_eq!(first["worker_type"], "prefill");
    assert_eq!(first["bootstrap_port"], 9123);
    // One of its targets cannot be resolved: it keeps its address, the rest goes on.
    dns.forget("a.test.");
    dns.set("c.test.", &[a(3)]);
    dns.set(srv, &[pod(1, "a.test."), pod(3, "c.test.")]);
    until_found(&router, &[(&one, "dns"), (&three, "dns"), decode]).await;
}

#[cfg(feature = "dns")]
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_name_is_asked_for_as_its_ttl_says_and_at_least_as_often_as_the_flag() {
    for (ttl, refresh, wanted) in [(1, "3600", true), (3600, "1", true), (3600, "3600", false)] {
        let dns = Dns::start(ttl).await;
        dns.set("fleet.test.", &[a(1)]);
        let server = dns.address.to_string();
        let router = router(&[
            "--dns-server",
            &server,
            "--dns-refresh-secs",
            refresh,
            "--worker-urls",
            "dns+http://fleet.test:8000",
        ]);
        until_found(&router, &[("http://127.0.20.1:8000", "dns")]).await;
        if wanted {
            until("asked again", || dns.asked("fleet.test.") >= 3).await;
        } else {
            tokio::time::sleep(A_WHILE).await;
            assert_eq!(dns.asked("fleet.test."), 1);
        }
    }
}
