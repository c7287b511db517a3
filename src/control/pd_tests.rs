//! The control thread of a P/D fleet, with real sockets and stand-ins for the cores.

use std::sync::atomic::Ordering;

use serde_json::Value;

use super::testing::{FakeWorker, pd_config, until};
use super::tests::{MODEL, Rig, rig};
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
