//! The control thread of a P/D fleet, with real sockets and stand-ins for the cores.

use std::sync::atomic::Ordering;

use serde_json::Value;

use super::testing::{FakeWorker, pd_config, pump, until};
use super::tests::{MODEL, Rig, encoded, rig};
use super::*;
use crate::shared::{Outcome, Route};

fn pd_rig(prefill: &[&FakeWorker], decode: &[&FakeWorker], flags: &[&str]) -> Rig {
    rig(&[], |config| *config = pd_config(prefill, decode, flags))
}

/// One worker of each role is enough, and the answers name the role that is missing.
#[test]
fn it_serves_when_each_role_has_a_ready_worker() {
    let (p1, p2, d) = (
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
    );
    for worker in [&p1, &p2, &d] {
        worker.status.store(503, Ordering::Relaxed);
    }
    let mut rig = pd_rig(&[&p1, &p2], &[&d], &[]);
    let table = [
        (None, "no prefill worker and no decode worker is ready"),
        (Some(&d), "no prefill worker is ready"),
    ];
    for (count, (worker, reason)) in table.into_iter().enumerate() {
        if let Some(worker) = worker {
            worker.status.store(200, Ordering::Relaxed);
        }
        rig.ready(count);
        let (status, body) = rig.get("/readiness");
        assert_eq!((status, &body["reason"]), (503, &reason.into()));
        let (status, body) = rig.get("/health");
        let message = body["error"]["message"].as_str().unwrap();
        assert_eq!(status, 503);
        assert!(message.starts_with(reason), "{message}");
    }
    p1.status.store(200, Ordering::Relaxed);
    rig.ready(2);
    assert_eq!(rig.get("/readiness").0, 200);
    let (status, body) = rig.get("/health");
    assert_eq!(status, 503, "one is not healthy");
    assert_eq!(body["error"]["message"], "1 of 3 workers are not healthy");
    p2.status.store(200, Ordering::Relaxed);
    rig.ready(3);
    assert_eq!(rig.get("/health").0, 200);

    d.status.store(500, Ordering::Relaxed);
    until("no decode worker", || rig.control().ready_count() == 2);
    let (status, body) = rig.get("/readiness");
    assert_eq!(
        (status, &body["reason"]),
        (503, &"no decode worker is ready".into())
    );
}

/// A role without any worker is missing even though every worker there is is healthy.
#[test]
fn a_role_without_workers_is_missing() {
    let p = FakeWorker::start(MODEL);
    let mut rig = pd_rig(&[&p], &[], &[]);
    rig.ready(1);
    for path in ["/readiness", "/health"] {
        let (status, body) = rig.get(path);
        assert_eq!(status, 503, "{path}");
        assert!(
            body.to_string().contains("no decode worker is ready"),
            "{body}"
        );
    }
}

#[test]
fn the_settings_of_the_roles_are_shown() {
    let mut rig = pd_rig(
        &[],
        &[],
        &[
            "--prefill-policy",
            "round_robin",
            "--decode-cache-threshold",
            "0.7",
        ],
    );
    let (status, info) = rig.get("/get_server_info");
    let pd: &Value = &info["settings"]["pd"];
    assert_eq!(
        (
            status,
            &pd["prefill"]["policy"],
            &pd["decode"]["cache_threshold"],
            &pd["kv_connector"]
        ),
        (200, &"round_robin".into(), &0.7.into(), &"nixl".into())
    );
}

#[test]
fn listings_tell_the_roles_and_workers_are_added_with_one() {
    let (p, d) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let (late_p, late_d) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let mut rig = pd_rig(&[&p], &[&d], &[]);
    rig.ready(2);
    for (query, code) in [
        ("", "unsupported_worker_type"),
        ("&worker_type=regular", "unsupported_worker_type"),
        ("&worker_type=both", "unsupported_worker_type"),
        (
            "&worker_type=decode&bootstrap_port=9",
            "unexpected_bootstrap_port",
        ),
        (
            "&worker_type=prefill&bootstrap_port=0",
            "invalid_bootstrap_port",
        ),
        (
            "&worker_type=prefill&bootstrap_port=x",
            "invalid_bootstrap_port",
        ),
    ] {
        let target = format!("/add_worker?url={}{query}", late_p.url());
        let (status, text, _) = rig.ask("POST", &target, "");
        assert_eq!(status, 400, "{query}: {text}");
        assert!(text.contains(code), "{query}: {text}");
    }
    let body = format!(r#"{{"url":"{}"}}"#, late_p.url());
    let (status, text, _) = rig.ask("POST", "/workers", &body);
    assert_eq!(status, 400);
    assert!(text.contains("'prefill' or 'decode'"), "{text}");
    assert!(rig.control().add_worker(&late_p.url()).is_err());

    let body = format!(
        r#"{{"url":"{}","worker_type":"prefill","bootstrap_port":9001}}"#,
        late_p.url()
    );
    assert_eq!(rig.ask("POST", "/workers", &body).0, 201);
    let target = format!("/add_worker?url={}&worker_type=decode", late_d.url());
    assert_eq!(rig.ask("POST", &target, "").0, 200);

    let (_, all) = rig.get("/workers");
    let told: Vec<(String, String, Value)> = all["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| {
            let text = |name: &str| worker[name].as_str().unwrap().to_owned();
            (
                text("url"),
                text("worker_type"),
                worker["bootstrap_port"].clone(),
            )
        })
        .collect();
    let line = |worker: &FakeWorker, role: &str, port: Value| (worker.url(), role.to_owned(), port);
    assert_eq!(
        told,
        [
            line(&p, "prefill", 8998.into()),
            line(&d, "decode", Value::Null),
            line(&late_p, "prefill", 9001.into()),
            line(&late_d, "decode", Value::Null),
        ]
    );
    assert_eq!(
        all["stats"],
        serde_json::json!({"prefill_count": 2, "decode_count": 2, "regular_count": 0})
    );
    let loads = rig.get("/get_loads").1;
    assert_eq!(loads["workers"][2]["worker_type"], "prefill");
    let by_url = loads["loads"].as_object().unwrap();
    assert_eq!((by_url.len(), &by_url[&*late_p.url()]), (4, &0.into()));
    assert_eq!(loads["errors"], serde_json::json!([]));
    assert_eq!(
        rig.get("/get_server_info").1["workers"],
        serde_json::json!({"total": 4, "ready": 4,
            "prefill": {"total": 2, "ready": 2}, "decode": {"total": 2, "ready": 2}})
    );
    let pin = rig.parts.reader.pin();
    let fleet = rig.parts.shared.fleet.load(&pin);
    let added = fleet.eligible.iter().find(|w| *w.url == *late_p.url());
    assert_eq!(
        added.unwrap().kv.bootstrap_address.as_deref(),
        Some("http://127.0.0.1:9001")
    );
}

#[test]
fn a_plain_fleet_takes_no_roles() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[], |_| {});
    let target = format!("/add_worker?url={}&worker_type=prefill", worker.url());
    let (status, text, _) = rig.ask("POST", &target, "");
    assert_eq!(status, 400);
    assert!(text.contains("needs --vllm-pd-disaggregation"), "{text}");
    let target = format!("/add_worker?url={}&worker_type=regular", worker.url());
    assert_eq!(rig.ask("POST", &target, "").0, 200);
}

#[test]
fn metrics_tell_of_each_role() {
    let (p, d) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let rig = pd_rig(
        &[&p],
        &[&d],
        &[
            "--prefill-policy",
            "round_robin",
            "--decode-policy",
            "random",
        ],
    );
    rig.ready(2);
    let views = rig.control().workers();
    let books = rig.parts.shared.books;
    let prefill = shards::LoadGuard::acquire(books, views[0].id, 10).unwrap();
    let pending = shards::LoadGuard::acquire(books, views[1].id, 10).unwrap();
    let stats = &rig.parts.shared.cores[1].stats;
    stats.workers[usize::from(views[0].id.slot.0)].chosen.add(3);
    stats.workers[usize::from(views[1].id.slot.0)]
        .failures
        .add(2);
    let pd = &stats.pd;
    pd.requests[Route::Completions as usize].add(9);
    pd.first_byte[Route::Completions as usize].record(700_000);
    pd.requests_too_long.add(3);
    pd.decode_pending.record(3_000_000);
    stats.exchanges[Route::Generate as usize][Outcome::NoWorker as usize].add(6);
    pd.orphans.add(5);
    pd.orphans_released.add(2);
    pd.orphans_lost.add(1);
    pd.oldest_orphan_ns.set(2_500_000_000);
    pd.whole[4].add(7);
    pd.handover_gap.record(3_000);
    let text = rig.scrape("");
    let (p, d) = (p.url(), d.url());
    for line in [
        format!("vllm_router_pd_prefill_requests_total{{worker=\"{p}\"}} 3"),
        format!("vllm_router_pd_decode_requests_total{{worker=\"{d}\"}} 0"),
        format!("vllm_router_pd_prefill_errors_total{{worker=\"{p}\"}} 0"),
        format!("vllm_router_pd_decode_errors_total{{worker=\"{d}\"}} 2"),
        format!("vllm_router_pd_prefill_occupancy{{worker=\"{p}\",rank=\"aggregate\"}} 1"),
        format!("vllm_router_pd_active_prefill_tokens{{worker=\"{p}\",rank=\"aggregate\"}} 2"),
        format!("vllm_router_pd_pending_decode_requests{{worker=\"{d}\",rank=\"aggregate\"}} 1"),
        format!("vllm_router_pd_active_decode_requests{{worker=\"{d}\",rank=\"aggregate\"}} 0"),
        format!("vllm_router_policy_decisions_total{{policy=\"round_robin\",worker=\"{p}\"}} 3"),
        format!("vllm_router_policy_decisions_total{{policy=\"random\",worker=\"{d}\"}} 0"),
        "vllm_router_pd_requests_total{route=\"/v1/completions\"} 9".to_owned(),
        "vllm_router_pd_request_duration_seconds_bucket{le=\"0.001\",route=\"/v1/completions\"} 1"
            .to_owned(),
        "vllm_router_pd_errors_total{error_type=\"server_selection\"} 6".to_owned(),
        "vllm_router_pd_body_over_limit_total{stage=\"request\"} 3".to_owned(),
        "vllm_router_pd_body_over_limit_total{stage=\"prefill\"} 0".to_owned(),
        "vllm_router_pd_decode_pending_seconds_count 1".to_owned(),
        "vllm_router_pd_missing_kv_transfer_params_total 0".to_owned(),
        "vllm_router_pd_handovers_total 0".to_owned(),
        "vllm_router_pd_orphaned_handovers_total{outcome=\"released\"} 2".to_owned(),
        "vllm_router_pd_orphaned_handovers_total{outcome=\"lost\"} 1".to_owned(),
        "vllm_router_pd_orphaned_handovers_in_flight 2".to_owned(),
        "vllm_router_pd_orphaned_handover_oldest_seconds 2.5".to_owned(),
        "vllm_router_pd_skipped_prefill_total 0".to_owned(),
        "vllm_router_pd_stale_handovers_total 0".to_owned(),
        "vllm_router_pd_whole_requests_total{reason=\"batch\"} 7".to_owned(),
        "vllm_router_pd_usage_fixed_total 0".to_owned(),
        "vllm_router_pd_handover_gap_seconds_count 1".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\n{text}");
    }
    assert!(!text.contains(&format!("pd_prefill_requests_total{{worker=\"{d}\"}}")));
    drop((prefill, pending));
}

// ---- data-parallel ranks ----

/// One probe for all ranks, but books, counters and a name for each; added and removed together.
#[test]
fn each_rank_of_an_engine_is_a_worker() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |config| {
        config.data_parallel_size = 3;
        config.health.interval = Duration::from_secs(3600);
    });
    rig.ready(3);
    let url = worker.url();
    let labels: Vec<String> = (0..3).map(|rank| format!("{url}@{rank}")).collect();
    assert_eq!(
        rig.get("/list_workers").1["urls"],
        serde_json::json!(labels)
    );
    let views = rig.control().workers();
    assert_eq!(
        worker.heads.lock().unwrap().len(),
        2,
        "one probe and one list of models, not one a rank"
    );
    let guard = shards::LoadGuard::acquire(rig.parts.shared.books, views[1].id, 5).unwrap();
    let loads = rig.get("/get_loads").1;
    let load = |at: usize| loads["workers"][at]["load"].clone();
    assert_eq!([load(0), load(1), load(2)], [0, 1, 0]);
    {
        let pin = rig.parts.reader.pin();
        let fleet = rig.parts.shared.fleet.load(&pin);
        let told: Vec<_> = fleet
            .eligible
            .iter()
            .map(|w| (w.url.to_string(), w.rank, w.kv.dp_size))
            .collect();
        let wanted: Vec<_> = labels
            .iter()
            .cloned()
            .zip([Some(0), Some(1), Some(2)])
            .map(|(l, r)| (l, r, 3))
            .collect();
        assert_eq!(told, wanted);
        assert!(fleet.eligible.iter().all(|w| w.address == worker.address));
    }
    let (status, one) = rig.get(&format!("/workers/{}", encoded(&labels[2])));
    assert_eq!(
        (status, &one["dp_rank"], &one["dp_size"]),
        (200, &2.into(), &3.into())
    );
    let target = format!("/workers/{}", encoded(&labels[2]));
    assert_eq!(rig.ask("DELETE", &target, "").0, 400, "not one rank alone");
    assert_eq!(
        rig.ask("POST", &format!("/add_worker?url={url}"), "").0,
        400
    );
    assert_eq!(
        rig.ask("POST", &format!("/remove_worker?url={url}"), "").0,
        200
    );
    assert_eq!(rig.control().ready_count(), 0);
    drop(guard);
    until("all ranks are gone", || {
        pump(&rig.parts.shared, &mut rig.told);
        rig.control().workers().is_empty()
    });
    assert_eq!(
        rig.ask("POST", &format!("/add_worker?url={url}"), "").0,
        200
    );
    rig.ready(3);
}

/// In a P/D fleet an engine's own metrics tell how many ranks it has.
#[test]
fn ranks_are_learnt_from_the_engines_metrics() {
    let (p, d) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    p.page(
        "/metrics",
        "vllm:x{engine=\"0\"} 1\nvllm:x{engine=\"1\"} 1\n",
    );
    d.page("/metrics", "vllm:x{engine=\"0\"} 1\n");
    let mut rig = pd_rig(&[&p], &[&d], &[]);
    rig.ready(3);
    let views = rig.control().workers();
    let urls: Vec<&str> = views
        .iter()
        .filter(|view| view.state == "ready")
        .map(|view| &*view.url)
        .collect();
    let labels = [format!("{}@0", p.url()), format!("{}@1", p.url()), d.url()];
    assert_eq!(urls, labels);
    let pin = rig.parts.reader.pin();
    let fleet = rig.parts.shared.fleet.load(&pin);
    let facts: Vec<_> = fleet
        .eligible
        .iter()
        .map(|worker| (worker.rank, worker.kv.dp_size))
        .collect();
    assert_eq!(facts, [(Some(0), 2), (Some(1), 2), (None, 1)]);
}

// ---- mooncake ----

fn engine_ids(rig: &mut Rig) -> Vec<(String, Option<String>)> {
    let pin = rig.parts.reader.pin();
    let fleet = rig.parts.shared.fleet.load(&pin);
    fleet
        .eligible
        .iter()
        .filter(|worker| worker.role == Role::Prefill)
        .map(|worker| {
            let id = worker.kv.engine_id.as_deref().map(str::to_owned);
            (worker.url.to_string(), id)
        })
        .collect()
}

fn view(rig: &Rig, url: &str) -> WorkerView {
    let views = rig.control().workers();
    views.into_iter().find(|view| *view.url == *url).unwrap()
}

/// A prefill worker is used once its engine id is known, whatever the bootstrap servers of the others do.
#[test]
fn engine_ids_are_asked_for_side_by_side() {
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (p1, p2, p3, d) = (
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
    );
    let (b2, b3) = (FakeWorker::start(""), FakeWorker::start(""));
    b2.page("/query", r#"{"0":{"engine_id":"two"}}"#);
    b3.page("/query", "{}");
    let hanging_port = hanging.local_addr().unwrap().port().to_string();
    let ports = [b2.address.port().to_string(), b3.address.port().to_string()];
    let (u1, u2, u3) = (p1.url(), p2.url(), p3.url());
    let flags = [
        "--kv-connector",
        "mooncake",
        "--prefill",
        &u1,
        &hanging_port,
        "--prefill",
        &u2,
        &ports[0],
        "--prefill",
        &u3,
        &ports[1],
    ];
    let mut rig = rig(&[], |config| {
        *config = pd_config(&[], &[&d], &flags);
        config.health.timeout = Duration::from_secs(4);
    });
    let started = std::time::Instant::now();
    rig.ready(2);
    assert!(
        started.elapsed() < Duration::from_millis(3_900),
        "the one that hangs holds up the others: {:?}",
        started.elapsed()
    );
    assert_eq!(engine_ids(&mut rig), [(u2.clone(), Some("two".to_owned()))]);
    until("the bootstrap server that knows nothing", || {
        let reason = view(&rig, &u3).reason.unwrap_or_default();
        reason == "engine id not known: the bootstrap server knows no engine yet"
    });
    until("the one that hangs", || {
        let view = view(&rig, &u1);
        view.state == "starting"
            && view
                .reason
                .unwrap_or_default()
                .contains("no answer in time")
    });
    assert_eq!(rig.get("/readiness").0, 200);
    b3.page("/query", r#"{"7":{"engine_id":"three"}}"#);
    rig.ready(3);
    assert_eq!(
        engine_ids(&mut rig)[1],
        (u3, Some("three".to_owned())),
        "of one engine any rank's id is its own"
    );
}

/// A restarted engine has another id: no request goes out with the old one, and its slot is a new one, whether a probe
/// saw it gone or not.
#[test]
fn a_restarted_engine_is_asked_again() {
    let (p, d, bootstrap) = (
        FakeWorker::start(MODEL),
        FakeWorker::start(MODEL),
        FakeWorker::start(""),
    );
    bootstrap.page("/query", r#"{"0":{"engine_id":"first"}}"#);
    let (url, address) = (p.url(), p.address);
    let port = bootstrap.address.port().to_string();
    let flags = ["--kv-connector", "mooncake", "--prefill", &url, &port];
    let mut rig = rig(&[], |config| {
        *config = pd_config(&[], &[&d], &flags);
        (
            config.health.failure_threshold,
            config.health.success_threshold,
        ) = (2, 1);
    });
    rig.ready(2);
    let first = view(&rig, &url).id;
    bootstrap.page("/query", r#"{"0":{"engine_id":"second"}}"#);
    until("the unseen restart", || {
        engine_ids(&mut rig) == [(url.clone(), Some("second".to_owned()))]
    });
    let second = view(&rig, &url).id;
    assert_ne!(first.slot, second.slot);

    drop(p);
    until("it is gone", || view(&rig, &url).state == "unhealthy");
    bootstrap.page("/query", "{}");
    let _p = FakeWorker::start_at(address, MODEL);
    until("it is back, without an id", || {
        let view = view(&rig, &url);
        view.state == "starting" && view.id != second
    });
    assert!(engine_ids(&mut rig).is_empty());
    bootstrap.page("/query", r#"{"0":{"engine_id":"third"}}"#);
    until("the id of the new life", || {
        engine_ids(&mut rig) == [(url.clone(), Some("third".to_owned()))]
    });
}

// ---- discovery ----

mod dealer {
    use rmpv::Value;
    use zeromq::{Socket, SocketSend};

    /// An engine's side: a DEALER socket of the zeromq crate.
    pub struct Dealer {
        runtime: tokio::runtime::Runtime,
        socket: Option<zeromq::DealerSocket>,
    }

    impl Dealer {
        pub fn connect(address: std::net::SocketAddr) -> Dealer {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let mut socket = zeromq::DealerSocket::new();
            runtime
                .block_on(socket.connect(&format!("tcp://{address}")))
                .unwrap();
            Dealer {
                runtime,
                socket: Some(socket),
            }
        }

        pub fn send(&mut self, bytes: Vec<u8>) {
            let socket = self.socket.as_mut().unwrap();
            self.runtime.block_on(socket.send(bytes.into())).unwrap();
        }

        pub fn register(&mut self, fields: &[(&str, Value)]) {
            let fields = fields
                .iter()
                .map(|(name, value)| ((*name).into(), value.clone()));
            let mut bytes = Vec::new();
            rmpv::encode::write_value(&mut bytes, &Value::Map(fields.collect())).unwrap();
            self.send(bytes);
        }
    }

    impl Drop for Dealer {
        fn drop(&mut self) {
            let socket = self.socket.take();
            self.runtime.block_on(async move { drop(socket) });
        }
    }
}

/// Engines that register join, leave when they are silent with what they run still in their books, and are back at
/// once; nothing that is sent ends the listener.
#[test]
fn engines_register_themselves() {
    let (p, d) = (FakeWorker::start(MODEL), FakeWorker::start(MODEL));
    let mut rig = pd_rig(&[], &[], &["--vllm-discovery-address", "127.0.0.1:0"]);
    let address = rig.control().discovery_address().unwrap();
    assert_eq!(rig.get("/readiness").1["reason"], "no workers registered");
    let mut dealer = dealer::Dealer::connect(address);
    let at = |worker: &FakeWorker| worker.address.to_string();
    let prefill = [
        ("type", "P".into()),
        ("http_address", at(&p).into()),
        ("zmq_address", "127.0.0.1:21001".into()),
        ("transfer_mode", "WRITE".into()),
        ("tp_size", 4.into()),
        ("dp_size", 2.into()),
    ];
    let decode = [("type", "D".into()), ("http_address", at(&d).into())];
    dealer.register(&prefill);
    dealer.register(&decode);
    rig.ready(3);
    assert_eq!(rig.get("/readiness").0, 200);
    {
        let pin = rig.parts.reader.pin();
        let fleet = rig.parts.shared.fleet.load(&pin);
        let of = |role| fleet.eligible.iter().filter(move |w| w.role == role);
        let facts: Vec<_> = of(Role::Prefill)
            .map(|w| (w.rank, (*w.kv).clone()))
            .collect();
        assert_eq!(facts.len(), 2);
        assert_eq!(facts[1].0, Some(1));
        let kv = &facts[1].1;
        assert_eq!(
            (&*kv.peer_address, kv.tp_size, kv.dp_size),
            ("127.0.0.1:21001", 4, 2)
        );
        assert_eq!(kv.transfer_mode, Some(crate::shared::TransferMode::Write));
        let kv = &of(Role::Decode).next().unwrap().kv;
        assert_eq!(
            (&*kv.peer_address, kv.tp_size, kv.dp_size),
            (&*at(&d), 1, 1)
        );
    }

    // What makes no sense is counted, and the connection that sent it goes on.
    dealer.send(b"junk".to_vec());
    dealer.register(&[("type", "P".into())]);
    dealer.register(&[
        ("type", "D".into()),
        ("http_address", at(&d).into()),
        ("transfer_mode", "READ".into()),
    ]);
    use std::io::Write;
    let mut hostile = std::net::TcpStream::connect(address).unwrap();
    hostile.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    until("four bad ones", || {
        rig.scrape("")
            .lines()
            .any(|l| l == "corelane_discovery_refused_total 4")
    });

    let views = rig.control().workers();
    let books = rig.parts.shared.books;
    let guard = shards::LoadGuard::acquire(books, views[0].id, 10).unwrap();
    // Only decode goes on registering; the lease of prefill ends in its own time.
    let url = p.url();
    let mut sent = std::time::Instant::now();
    until("prefill is silent", || {
        if sent.elapsed() > Duration::from_secs(1) {
            sent = std::time::Instant::now();
            dealer.register(&decode);
        }
        view(&rig, &format!("{url}@0")).state == "silent"
    });
    let silent = view(&rig, &format!("{url}@0"));
    assert_eq!(silent.reason.as_deref(), Some("has not registered for 5 s"));
    assert_eq!(
        (silent.id, silent.in_flight),
        (views[0].id, 1),
        "it stays in its books"
    );
    assert_eq!(
        rig.get("/readiness").1["reason"],
        "no prefill worker is ready"
    );
    assert_eq!(rig.control().ready_count(), 1);
    dealer.register(&prefill);
    rig.ready(3);
    assert_eq!(
        view(&rig, &format!("{url}@0")).id,
        views[0].id,
        "the same life"
    );
    drop(guard);
}

/// An address that is taken ends the start, in words.
#[test]
fn a_discovery_address_that_is_taken_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let text = taken.local_addr().unwrap().to_string();
    let error = registration::bind(&text).unwrap_err().to_string();
    assert!(error.contains("--vllm-discovery-address"), "{error}");
    assert!(registration::bind("nonsense").is_err());
    assert!(registration::bind("tcp://127.0.0.1:0").is_ok());
}
