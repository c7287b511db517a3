//! The control thread with real sockets, and stand-ins where the cores would be.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::Value;

use super::testing::{FakeWorker, PATIENCE, Parts, Told, config, parts, pump, until};
use super::*;
use crate::config::{Config, Secret};
use crate::exchange::paths::is_admin_path;
use crate::shared::AdminReply;

pub(super) struct Rig {
    pub(super) parts: Parts,
    control: Option<Control>,
    pub(super) told: Told,
    token: u64,
    metrics: std::net::SocketAddr,
}

pub(super) fn rig(workers: &[&FakeWorker], change: impl FnOnce(&mut Config)) -> Rig {
    let mut config = config();
    config.workers = workers
        .iter()
        .map(|worker| WorkerUrl::parse(&worker.url()).unwrap().into())
        .collect();
    change(&mut config);
    let mut parts = parts(config, 2, 256);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = listener.local_addr().unwrap();
    let (publisher, admin_rx) = (
        parts.publisher.take().unwrap(),
        parts.admin_rx.take().unwrap(),
    );
    let side = SideListeners {
        metrics: Some(SideListener {
            listener,
            is_left_at_drain: false,
        }),
        admin: None,
    };
    let control = start(parts.shared.clone(), publisher, admin_rx, side).unwrap();
    Rig {
        parts,
        control: Some(control),
        told: Told::default(),
        token: 0,
        metrics,
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let control = self.control.take().unwrap();
        control.stop();
        assert!(
            control.join() || std::thread::panicking(),
            "the control thread panicked"
        );
    }
}

impl Rig {
    pub(super) fn control(&self) -> &Control {
        self.control.as_ref().unwrap()
    }

    pub(super) fn ready(&self, count: usize) {
        assert!(
            self.control().wait_ready(count, PATIENCE),
            "{count} workers ready"
        );
    }

    pub(super) fn send(&mut self, method: &str, target: &str, body: &str) -> u64 {
        self.token += 1;
        let request = AdminRequest {
            core: 1,
            token: self.token,
            method: method.to_owned(),
            target: target.to_owned(),
            headers: vec![("host".to_owned(), b"r".to_vec())],
            body: body.as_bytes().to_vec(),
        };
        self.parts.shared.admin.blocking_send(request).unwrap();
        self.token
    }

    pub(super) fn wait_for(&mut self, token: u64) -> AdminReply {
        let mut found = None;
        until("an admin reply", || {
            pump(&self.parts.shared, &mut self.told);
            let at = self.told.replies.iter().position(|(of, _)| *of == token);
            found = at.map(|at| self.told.replies.swap_remove(at).1);
            found.is_some()
        });
        found.unwrap()
    }

    pub(super) fn ask(
        &mut self,
        method: &str,
        target: &str,
        body: &str,
    ) -> (u16, String, AdminReply) {
        let token = self.send(method, target, body);
        let reply = self.wait_for(token);
        (
            reply.status,
            String::from_utf8(reply.body.clone()).unwrap(),
            reply,
        )
    }

    pub(super) fn get(&mut self, target: &str) -> (u16, Value) {
        let (status, text, _) = self.ask("GET", target, "");
        (
            status,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        )
    }

    pub(super) fn scrape(&self, accept: &str) -> String {
        let mut stream = TcpStream::connect(self.metrics).unwrap();
        write!(
            stream,
            "GET /metrics HTTP/1.1\r\nHost: m\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

pub(super) fn encoded(url: &str) -> String {
    percent_encoding::utf8_percent_encode(url, percent_encoding::NON_ALPHANUMERIC).to_string()
}

pub(super) const MODEL: &str =
    r#"{"object":"list","data":[{"id":"m","root":"org/m","max_model_len":4096}]}"#;

#[test]
fn one_good_worker_is_enough_and_a_late_one_joins() {
    let (good, late) = (FakeWorker::start(MODEL), FakeWorker::start(""));
    late.status.store(503, Ordering::Relaxed);
    let mut rig = rig(&[&good, &late], |_| {});
    rig.ready(1);
    assert_eq!(rig.get("/readiness").0, 200);
    let (status, health) = rig.get("/health");
    assert_eq!(status, 503);
    assert_eq!(health["error"]["message"], "1 of 2 workers are not healthy");
    assert!(
        !health.to_string().contains("127.0.0.1"),
        "no worker URLs for clients"
    );
    assert_eq!(rig.get("/liveness").0, 200);
    late.status.store(200, Ordering::Relaxed);
    rig.ready(2);
    assert_eq!(
        rig.get("/health"),
        (200, Value::String("All servers healthy".to_owned()))
    );
    let (status, ready) = rig.get("/readiness");
    assert_eq!(
        (status, &ready["healthy_workers"], &ready["status"]),
        (200, &2.into(), &"ready".into())
    );
}

#[test]
fn without_workers_it_is_alive_but_not_ready_and_says_why() {
    let mut rig = rig(&[], |_| {});
    assert_eq!(rig.get("/liveness").0, 200);
    for path in [
        "/health",
        "/health_generate",
        "/readiness",
        "/v1/models",
        "/get_model_info",
    ] {
        assert_eq!(rig.get(path).0, 503, "{path}");
    }
    let (_, _, reply) = rig.ask("GET", "/readiness", "");
    assert!(
        reply
            .headers
            .iter()
            .any(|(name, value)| name == "retry-after" && value == b"1")
    );
    assert_eq!(rig.get("/readiness").1["reason"], "no workers registered");
}

/// A worker killed and started again is another life: a new slot, and the old one's prefixes are purged on every core.
#[test]
fn a_restarted_process_gets_a_new_slot() {
    let worker = FakeWorker::start(MODEL);
    let (address, url) = (worker.address, worker.url());
    let mut rig = rig(&[&worker], |config| {
        (
            config.health.failure_threshold,
            config.health.success_threshold,
        ) = (2, 1);
    });
    rig.ready(1);
    let old = rig.control().workers()[0].id;
    drop(worker);
    until("unhealthy", || {
        rig.control().workers()[0].state == "unhealthy"
    });
    assert_eq!(rig.get("/readiness").1["reason"], "no healthy workers");
    let listing = rig.get(&format!("/workers/{}", encoded(&url))).1;
    assert_eq!(
        (&listing["state"], &listing["reason"]),
        (&"unhealthy".into(), &"connection refused".into())
    );
    let _again = FakeWorker::start_at(address, MODEL);
    rig.ready(1);
    assert_ne!(rig.control().workers()[0].id.slot, old.slot);
    let Rig {
        parts,
        told,
        control,
        ..
    } = &mut rig;
    until("purged on both cores", || {
        pump(&parts.shared, told);
        told.purged == [old.slot.0; 2]
    });
    until("the old slot is free", || {
        control
            .as_ref()
            .unwrap()
            .plane
            .registry()
            .retiring()
            .is_empty()
    });
}

#[test]
fn workers_come_and_go_by_request() {
    let (first, second) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let mut rig = rig(&[&first], |_| {});
    rig.ready(1);
    let url = second.url();
    let (status, text, _) = rig.ask("POST", &format!("/add_worker?url={}%2F", encoded(&url)), "");
    assert_eq!(
        (status, text),
        (200, format!("Successfully added worker: {url}"))
    );
    let (status, text, _) = rig.ask("POST", &format!("/add_worker?url={url}"), "");
    assert_eq!(status, 400);
    assert!(
        text.contains("already exists") && text.contains("worker_exists"),
        "{text}"
    );
    assert_eq!(
        rig.get("/list_workers").1["urls"],
        serde_json::json!([first.url(), url])
    );

    let (status, listing) = rig.get("/workers");
    assert_eq!(
        (
            status,
            &listing["total"],
            &listing["stats"]["regular_count"]
        ),
        (200, &2.into(), &2.into())
    );
    let entry = &listing["workers"][1];
    assert_eq!(
        (&entry["model_id"], &entry["is_healthy"], &entry["load"]),
        (&"m".into(), &true.into(), &0.into())
    );
    assert_eq!(
        rig.get(&format!("/workers/{}", encoded(&url))).1["url"],
        url.as_str()
    );

    // Removal drains: what runs stays counted, and is told apart.
    let guard =
        shards::LoadGuard::acquire(rig.parts.shared.books, rig.control().workers()[1].id, 10)
            .unwrap();
    let loads = rig.get("/get_loads").1;
    assert_eq!(
        (
            &loads["workers"][1]["load"],
            &loads["workers"][1]["waiting_bytes"]
        ),
        (&1.into(), &10.into())
    );
    assert_eq!(
        rig.ask("POST", &format!("/remove_worker?url={url}"), "").0,
        200
    );
    let listing = rig.get("/workers").1;
    assert_eq!(
        (&listing["total"], &listing["draining"][0]["load"]),
        (&1.into(), &1.into())
    );
    let (status, text, _) = rig.ask("POST", &format!("/remove_worker?url={url}"), "");
    assert_eq!(status, 404);
    assert!(text.contains("worker_not_found"), "{text}");

    // Back at once, under a running stream, by the other API.
    let body = format!(r#"{{"url":"{url}","priority":3}}"#);
    let (status, text, reply) = rig.ask("POST", "/workers", &body);
    let created: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &created["ignored_fields"]),
        (201, &serde_json::json!(["priority"]))
    );
    let location = reply
        .headers
        .iter()
        .find(|(name, _)| name == "location")
        .unwrap();
    let location = String::from_utf8(location.1.clone()).unwrap();
    assert_eq!(rig.get(&location).0, 200);
    drop(guard);
    assert_eq!(rig.ask("DELETE", &location, "").0, 200);
    assert_eq!(rig.ask("DELETE", &location, "").0, 404);
    assert_eq!(
        rig.get("/list_workers").1["urls"],
        serde_json::json!([first.url()])
    );
}

#[test]
fn an_unreachable_worker_is_not_added_and_holds_up_nobody() {
    let dead = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut rig = rig(&[], |config| {
        config.worker_startup_timeout = Duration::from_millis(300)
    });
    let waiting = rig.send("POST", &format!("/add_worker?url=http://{dead}"), "");
    assert_eq!(
        rig.get("/liveness").0,
        200,
        "answered while the other waits"
    );
    assert!(rig.told.replies.is_empty(), "which it still does");
    let reply = rig.wait_for(waiting);
    let text = String::from_utf8(reply.body).unwrap();
    assert_eq!(reply.status, 504);
    assert!(
        text.contains("connection refused") && text.contains("worker_not_ready"),
        "{text}"
    );
    assert_eq!(rig.get("/list_workers").1["urls"], serde_json::json!([]));
}

#[test]
fn bad_requests_get_clear_answers() {
    let mut rig = rig(&[], |_| {});
    let table = [
        ("POST", "/add_worker", "", 400, "missing_url"),
        ("POST", "/add_worker?url=", "", 400, "invalid_worker_url"),
        (
            "POST",
            "/add_worker?url=https:a",
            "",
            400,
            "must be http://host",
        ),
        (
            "POST",
            "/remove_worker?url=junk",
            "",
            400,
            "invalid_worker_url",
        ),
        ("POST", "/workers", "{", 400, "invalid_json"),
        ("POST", "/workers", "[]", 400, "invalid_json"),
        ("POST", "/workers", "{}", 400, "missing_url"),
        (
            "POST",
            "/workers",
            r#"{"url":"http://a","worker_type":"prefill"}"#,
            400,
            "choices: regular",
        ),
        ("GET", "/workers/junk", "", 404, "worker_not_found"),
        (
            "DELETE",
            "/workers/http%3A%2F%2Fa",
            "",
            404,
            "worker_not_found",
        ),
        ("GET", "/nothing", "", 404, "not_found"),
        ("GET", "/bad uri", "", 400, "bad_request"),
    ];
    for (method, target, body, wanted_status, wanted_text) in table {
        let (status, text, _) = rig.ask(method, target, body);
        assert_eq!(status, wanted_status, "{method} {target}: {text}");
        assert!(text.contains(wanted_text), "{method} {target}: {text}");
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(
            ["message", "type", "code"]
                .iter()
                .all(|field| error["error"][field].is_string()),
            "{text}"
        );
    }
}

/// Every path that cores hand over has a route, the wrong method gets 405 with `Allow`, and HEAD goes where GET does.
#[test]
fn paths_and_routes_agree() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |_| {});
    rig.ready(1);
    let gets = [
        "/health",
        "/health_generate",
        "/liveness",
        "/readiness",
        "/v1/models",
        "/list_workers",
        "/workers",
        "/get_loads",
        "/get_server_info",
        "/get_model_info",
        "/openapi.json",
    ];
    for path in gets {
        assert!(is_admin_path(path), "{path}");
        let (status, text, _) = rig.ask("GET", path, "");
        assert!(status == 200 && !text.is_empty(), "{path}: {status}");
        let (head_status, head_body, _) = rig.ask("HEAD", path, "");
        assert_eq!((head_status, head_body.as_str()), (200, ""), "{path}");
    }
    for path in [
        "/health",
        "/v1/models",
        "/add_worker",
        "/remove_worker",
        "/flush_cache",
        "/reload",
        "/workers/x",
        "/workers",
    ] {
        let (status, text, reply) = rig.ask("PATCH", path, "");
        assert!(is_admin_path(path) && status == 405, "{path}: {status}");
        assert!(text.contains("method_not_allowed"), "{text}");
        assert!(
            reply
                .headers
                .iter()
                .any(|(name, value)| name == "allow" && !value.is_empty()),
            "{path}"
        );
        assert!(
            !reply
                .headers
                .iter()
                .any(|(name, _)| name == "content-length"),
            "the core frames"
        );
    }
    assert_eq!(rig.ask("GET", "/add_worker?url=http://a", "").0, 405);
    for (path, wanted) in [
        ("/add_worker", 405),
        ("/workers/junk", 404),
        ("/nothing", 404),
    ] {
        let (status, body, _) = rig.ask("HEAD", path, "");
        assert_eq!((status, body.as_str()), (wanted, ""), "HEAD {path}");
    }
}

#[test]
fn model_lists_are_merged_and_info_is_taken_from_them() {
    let a = FakeWorker::start(MODEL);
    let b = FakeWorker::start(
        r#"{"data":[{"id":"m","root":"other"},{"id":"lora","parent":"m","x":1.50}]}"#,
    );
    let c = FakeWorker::start("");
    let mut rig = rig(&[&a, &b, &c], |_| {});
    rig.ready(3);
    let (_, text, _) = rig.ask("GET", "/v1/models", "");
    assert_eq!(
        text,
        r#"{"object":"list","data":[{"id":"m","root":"org/m","max_model_len":4096},{"id":"lora","parent":"m","x":1.50}]}"#
    );
    let info = rig.get("/get_model_info").1;
    assert_eq!(
        (&info["model_path"], &info["max_model_len"]),
        (&"org/m".into(), &4096.into())
    );
}

#[test]
fn the_key_goes_to_workers_and_nowhere_else() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |config| {
        config.api_key = Some(Secret::new("open-sesame"))
    });
    rig.ready(1);
    let heads = worker.heads.lock().unwrap().join("");
    let key_count = heads
        .matches("authorization: Bearer open-sesame\r\n")
        .count();
    assert_eq!(key_count, heads.matches(" HTTP/1.1\r\n").count(), "{heads}");
    assert!(
        heads.contains(&format!("host: {}\r\n", worker.address)),
        "{heads}"
    );
    let paths = [
        "/get_server_info",
        "/workers",
        "/list_workers",
        "/get_loads",
        "/health",
        "/v1/models",
    ];
    for path in paths {
        let (_, text, _) = rig.ask("GET", path, "");
        assert!(!text.contains("open-sesame"), "{path}");
    }
    assert_eq!(
        rig.get("/get_server_info").1["settings"]["api_key_set"],
        true
    );
    assert!(!rig.scrape("*/*").contains("open-sesame"));
}

#[test]
fn flushing_reaches_every_core_and_worker() {
    let (a, b) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let mut rig = rig(&[&a, &b], |_| {});
    rig.ready(2);
    let (status, text, _) = rig.ask("POST", "/flush_cache", "");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &answer["workers_flushed"], &answer["cores"]),
        (200, &2.into(), &2.into())
    );
    assert_eq!(rig.told.flush_count, 2);
    assert!(
        a.heads
            .lock()
            .unwrap()
            .iter()
            .any(|head| head.starts_with("POST /reset_prefix_cache HTTP/1.1"))
    );
}

#[test]
fn metrics_read_the_counters_and_the_books() {
    let (good, bad) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    bad.status.store(500, Ordering::Relaxed);
    let rig = rig(&[&good, &bad], |_| {});
    rig.ready(1);
    let id = rig.control().workers()[0].id;
    let _guard = shards::LoadGuard::acquire(rig.parts.shared.books, id, 1000).unwrap();
    for core in &rig.parts.shared.cores {
        use crate::shared::{Outcome, Route};
        let stats = &core.stats;
        stats.exchanges[Route::ChatCompletions as usize][Outcome::Ok as usize].add(3);
        stats.exchanges[Route::ChatCompletions as usize][Outcome::ClientError as usize].add(1);
        stats.exchanges[Route::ChatCompletions as usize][Outcome::NoWorker as usize].add(2);
        stats.decisions[Role::Regular as usize][crate::route::Reason::Affinity as usize].add(5);
        stats.retries[Route::Completions as usize].add(3);
        stats.retries_by_attempt[0].add(2);
        stats.retries_by_attempt[1].add(1);
        stats.exhausted[Route::Completions as usize].add(1);
        stats.begun[Route::Embeddings as usize].add(7);
        stats.exchanges[Route::Embeddings as usize][Outcome::Ok as usize].add(5);
        stats.embeddings.record(60_000);
        stats.workers[usize::from(id.slot.0)].chosen.add(4);
        stats.first_byte.record(60_000);
        stats.accepted.add(10);
        stats.closed.add(4);
    }
    let (a, b) = (good.url(), bad.url());
    let page = rig.scrape("text/plain");
    let wanted = [
        "content-type: text/plain; version=0.0.4; charset=utf-8".to_owned(),
        format!("vllm_router_worker_health{{worker=\"{a}\"}} 1"),
        format!("vllm_router_worker_health{{worker=\"{b}\"}} 0"),
        format!("vllm_router_worker_load{{worker=\"{a}\"}} 1"),
        format!("vllm_router_running_requests{{worker=\"{a}\"}} 1"),
        format!("vllm_router_processed_requests_total{{worker=\"{a}\"}} 8"),
        format!("vllm_router_policy_decisions_total{{policy=\"cache_aware\",worker=\"{a}\"}} 8"),
        "vllm_router_requests_total{route=\"/v1/chat/completions\"} 8".to_owned(),
        "vllm_router_request_errors_total{route=\"/v1/chat/completions\",error_type=\"no_available_workers\"} 4".to_owned(),
        "vllm_router_active_workers 1".to_owned(),
        "corelane_decisions_total{reason=\"affinity\"} 10".to_owned(),
        "{policy=\"cache_aware\",stage=\"regular\",outcome=\"prefix_hit\"} 10".to_owned(),
        "vllm_router_retries_total{route=\"/v1/completions\"} 6".to_owned(),
        "vllm_router_retries_exhausted_total{route=\"/v1/completions\"} 2".to_owned(),
        "vllm_router_retry_backoff_duration_seconds_count{attempt=\"1\"} 4".to_owned(),
        "vllm_router_retry_backoff_duration_seconds_count{attempt=\"2\"} 2".to_owned(),
        "vllm_router_retry_backoff_duration_seconds_sum{attempt=\"2\"} 0".to_owned(),
        "vllm_router_embeddings_queue_size 4".to_owned(),
        "vllm_router_embeddings_duration_seconds_count 2".to_owned(),
        "corelane_time_to_first_byte_seconds_bucket{le=\"0.00005\"} 0".to_owned(),
        "corelane_time_to_first_byte_seconds_bucket{le=\"0.0001\"} 2".to_owned(),
        "corelane_time_to_first_byte_seconds_bucket{le=\"+Inf\"} 2".to_owned(),
        "corelane_connections_open 12".to_owned(),
        "corelane_books_underflow_total 0".to_owned(),
        "# TYPE vllm_router_requests_total counter".to_owned(),
    ];
    for line in wanted {
        assert!(page.contains(&line), "{line}\n{page}");
    }
    let open = rig.scrape("application/openmetrics-text; version=1.0.0");
    assert!(
        open.contains("# TYPE vllm_router_requests counter\n") && open.ends_with("# EOF\n"),
        "{open}"
    );
    assert!(rig.scrape("*/*").lines().count() < 800, "bounded");
}

#[test]
fn draining_turns_readiness_while_still_accepting_and_a_second_signal_stops() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |config| {
        config.drain_grace = Some(Duration::from_secs(3600));
    });
    rig.ready(1);
    rig.control().drain();
    until("draining", || rig.parts.shared.is_draining());
    let (status, body) = rig.get("/readiness");
    assert_eq!((status, &body["reason"]), (503, &"draining".into()));
    assert_eq!(rig.get("/liveness").0, 200);
    assert_eq!(rig.ask("POST", "/add_worker?url=http://a", "").0, 503);
    assert_eq!(
        (rig.told.drain_count, rig.told.stop_count),
        (0, 0),
        "still accepting"
    );
    rig.control().drain();
    let Rig { parts, told, .. } = &mut rig;
    until("both cores stop", || {
        pump(&parts.shared, told);
        told.stop_count == 2
    });
}

#[test]
fn the_drain_tells_the_cores_and_is_bounded() {
    let mut rig = rig(&[], |config| {
        config.drain_grace = Some(Duration::ZERO);
        config.drain_timeout = Duration::from_millis(20);
    });
    rig.control().drain();
    let Rig { parts, told, .. } = &mut rig;
    until("both cores stop by themselves", || {
        pump(&parts.shared, told);
        told.stop_count == 2
    });
    assert_eq!(told.drain_count, 2);
}

#[test]
fn a_handle_can_add_remove_and_probe() {
    let worker = FakeWorker::start(MODEL);
    let rig = rig(&[], |config| {
        config.health.interval = Duration::from_secs(3600)
    });
    let control = rig.control();
    control.add_worker(&worker.url()).unwrap();
    assert!(
        control
            .add_worker(&worker.url())
            .unwrap_err()
            .contains("already")
    );
    assert!(control.add_worker("nonsense").is_err());
    rig.ready(1);
    let probe_count = || {
        worker
            .heads
            .lock()
            .unwrap()
            .iter()
            .filter(|head| head.contains("/health"))
            .count()
    };
    let before = probe_count();
    control.probe();
    until("a probe out of turn", || probe_count() > before);
    assert!(control.remove_worker(&worker.url()) && !control.remove_worker(&worker.url()));
}
