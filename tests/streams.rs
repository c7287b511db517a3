//! As many streams at once as the descriptor limit lets one router carry: none is lost, the books are exact at the peak and
//! at the end, and the router stays small. Router and workers are processes of their own, each with its own descriptors.

mod common;

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::process::*;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Two descriptors a stream, and some for listeners, rings and probes.
const SPARE_DESCRIPTORS: u64 = 1000;
const STREAMS_MAX: u64 = 9_500;
/// Tokens of a stream, and the time between two: long enough for all to be open at once on a busy machine.
const TOKENS: usize = 8;
const GAP_MS: &str = "2000";
const ROUTER_BYTES_MAX: u64 = 50 << 20;

/// A router before them.
fn router_process(urls: &[String]) -> RouterProcess {
    // It begins with a low soft limit, as many systems give it, and raises that by itself. The shell becomes the router.
    let become_router = "ulimit -S -n 1024 && exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", become_router, env!("CARGO_BIN_EXE_corelane")]);
    command.args(["--port", "0", "--prometheus-port", "0", "--max-connections"]);
    // Well above the streams: descriptors are what this is about.
    command.args(["12000", "--worker-urls"]).args(urls);
    RouterProcess::start(command)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn as_many_streams_as_descriptors_allow_run_at_once_and_none_is_lost() {
    // The processes inherit the raised limit.
    let limit = corelane::ring::raise_descriptor_limit();
    let count = STREAMS_MAX.min(limit.saturating_sub(SPARE_DESCRIPTORS) / 2) as usize;
    assert!(
        count > 0,
        "a limit of {limit} descriptors leaves room for no stream"
    );
    let began = Instant::now();
    let (_workers, urls) = mock_workers(4, GAP_MS);
    let router = router_process(&urls);
    let address = router.address;
    router.until_healthy().await;
    println!(
        "{count} streams; router and workers are up after {:.1} s",
        began.elapsed().as_secs_f32()
    );

    // All connections first: the streams then begin close together.
    let permits = Arc::new(Semaphore::new(256));
    let mut connecting = JoinSet::new();
    for n in 0..count {
        let permits = permits.clone();
        connecting.spawn(async move {
            let _permit = permits.acquire_owned().await.unwrap();
            connect(n, address).await
        });
    }
    let connections = connecting.join_all().await;
    println!(
        "all are connected after {:.1} s",
        began.elapsed().as_secs_f32()
    );

    let mut streams = JoinSet::new();
    for (n, connection) in connections.into_iter().enumerate() {
        streams.spawn(stream(n, connection, TOKENS));
    }
    router
        .until_load_is(count as u64, Duration::from_secs(20))
        .await;
    println!(
        "all are in flight after {:.1} s",
        began.elapsed().as_secs_f32()
    );
    let mut event_count = 0;
    while let Some(events) = streams.join_next().await {
        let events = events.expect("no stream is lost");
        assert!(events >= TOKENS, "a stream had {events} events");
        event_count += events;
    }
    println!(
        "all are complete, with {event_count} events, after {:.1} s",
        began.elapsed().as_secs_f32()
    );
    router.until_load_is(0, Duration::from_secs(10)).await;
    // Pages of the program itself are no cost of streams (and many in a build for tests).
    let [high_water, program] = ["VmHWM:", "RssFile:"].map(|name| status_bytes(router.id(), name));
    let high_water = high_water - program;
    println!(
        "router: VmHWM {:.1} MB without its program",
        high_water as f64 / 1e6
    );
    assert!(
        high_water < ROUTER_BYTES_MAX,
        "the router took {high_water} bytes"
    );
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "it took {:?}",
        began.elapsed()
    );
}
