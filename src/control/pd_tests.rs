//! The control thread of a P/D fleet, with real sockets and stand-ins for the cores.

use std::sync::atomic::Ordering;

use serde_json::Value;

use super::testing::{FakeWorker, pd_config, pump, until};
use super::tests::{MODEL, Rig, encoded, rig};
use super::*;

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
    assert_eq!(
        rig.get("/get_loads").1["workers"][2]["worker_type"],
        "prefill"
    );
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
    pd.requests.add(9);
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
        format!("vllm_router_pd_prefill_occupancy{{worker=\"{p}\"}} 1"),
        format!("vllm_router_pd_pending_decode_requests{{worker=\"{d}\"}} 1"),
        format!("vllm_router_pd_active_decode_requests{{worker=\"{d}\"}} 0"),
        format!("vllm_router_policy_decisions_total{{policy=\"round_robin\",worker=\"{p}\"}} 3"),
        format!("vllm_router_policy_decisions_total{{policy=\"random\",worker=\"{d}\"}} 0"),
        "vllm_router_pd_requests_total 9".to_owned(),
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
