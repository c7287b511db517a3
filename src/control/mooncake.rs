//! Mooncake's engine ids: a decode worker finds a prefill worker's blocks by bootstrap address and engine id, and the
//! id is another one after each start of the engine. One task a prefill worker, so that a bootstrap server that hangs
//! holds up nobody else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde::Deserialize;
use tokio::time::Instant;

use super::Plane;
use super::probe::{self, Target};
use super::registry::{Key, Question};
use crate::config::WorkerUrl;

/// Pauses between two questions while the id is not known.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Engine ids by rank.
pub type EngineIds = BTreeMap<u32, Arc<str>>;

/// Asks whenever the worker becomes ready, comes back or is a new process, and in the rhythm of probes, until the
/// registration ends.
pub(super) async fn run(plane: Arc<Plane>, key: Key) {
    let mut changes = plane.changes.subscribe();
    let (mut answered, mut pause) = (None, PAUSE_MIN);
    let mut looked = Instant::now();
    loop {
        let Some(question) = plane.registry().question(key) else {
            return;
        };
        let Question { round, bootstrap } = question;
        if round.is_none() || round == answered {
            // Read each time: a reload, which is announced as a change, may set another one.
            let look_again = looked + plane.shared.config().health.interval;
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                // A process that restarts between two probes is noticed here.
                () = tokio::time::sleep_until(look_again) => {
                    answered = None;
                    looked = Instant::now();
                }
            }
            pause = PAUSE_MIN;
            continue;
        }
        let answer = query(&plane, &bootstrap).await;
        let Some(applied) = plane.registry().apply_engine_ids(key, round, answer) else {
            return;
        };
        if applied.has_changed {
            plane.announce_change();
        }
        if applied.is_known {
            (answered, pause) = (round, PAUSE_MIN);
            continue;
        }
        let another_round = changes.wait_for(|_| {
            let question = plane.registry().question(key);
            question.is_none_or(|question| question.round != round)
        });
        match tokio::time::timeout(pause, another_round).await {
            Err(_) => pause = (pause * 2).min(PAUSE_MAX),
            Ok(_) => pause = PAUSE_MIN,
        }
    }
}

async fn query(plane: &Plane, bootstrap: &str) -> Result<EngineIds, String> {
    let url = WorkerUrl::parse(bootstrap).map_err(|error| error.to_string())?;
    let config = plane.shared.config();
    let target = Target { url, address: None };
    let timeout = config.health.timeout;
    match probe::request(&config, &target, Method::GET, "/query", timeout).await {
        Ok(answer) if answer.status == 200 => parse(&answer.body),
        Ok(answer) => Err(format!("{bootstrap}/query: status {}", answer.status)),
        Err(failure) => Err(format!("{bootstrap}/query: {failure}")),
    }
}

#[derive(Deserialize)]
struct Engine {
    engine_id: String,
}

/// `{"0": {"engine_id": "..."}, ...}`; the engine's workers enter themselves as they start, so it may be empty.
fn parse(body: &[u8]) -> Result<EngineIds, String> {
    let engines: BTreeMap<String, Engine> = serde_json::from_slice(body)
        .map_err(|_| "the bootstrap server's answer is not understood".to_owned())?;
    let ids = engines.into_iter().map(|(rank, engine)| {
        let rank = rank.parse().map_err(|_| "a rank is not a number")?;
        // It goes into a JSON text and log lines.
        let is_plain = (1..=256).contains(&engine.engine_id.len())
            && engine.engine_id.bytes().all(|b| b.is_ascii_graphic());
        is_plain
            .then(|| (rank, engine.engine_id.into()))
            .ok_or("an engine id is empty or holds odd characters")
    });
    ids.collect::<Result<EngineIds, &str>>()
        .map_err(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let ids = parse(br#"{"1":{"engine_id":"b"},"0":{"engine_id":"a","worker_addr":{"0":{}}}}"#);
        let ids = ids.unwrap();
        assert_eq!((&*ids[&0], &*ids[&1]), ("a", "b"));
        assert_eq!(parse(b"{}"), Ok(EngineIds::new()));
        for junk in [
            "",
            "[]",
            r#"{"0":{}}"#,
            r#"{"0":{"engine_id":""}}"#,
            r#"{"0":{"engine_id":"a b"}}"#,
            r#"{"x":{"engine_id":"a"}}"#,
            r#"{"0":{"engine_id":7}}"#,
        ] {
            assert!(parse(junk.as_bytes()).is_err(), "{junk}");
        }
    }
}
