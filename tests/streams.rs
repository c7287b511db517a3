//! As many streams at once as the descriptor limit lets one router carry: none is lost, the books are exact at the peak and
//! at the end, and the router stays small. Router and workers are processes of their own, each with its own descriptors.

mod common;

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const CHAT: &str = "/v1/chat/completions";
/// Two descriptors a stream, and some for listeners, rings and probes.
const SPARE_DESCRIPTORS: u64 = 1000;
const STREAMS_MAX: u64 = 9_500;
/// Tokens of a stream, and the time between two: long enough for all to be open at once on a busy machine.
const TOKENS: usize = 8;
const GAP_MS: &str = "2000";
const ROUTER_BYTES_MAX: u64 = 60 << 20;

/// A process that ends, by its id, with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn corelane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corelane"));
    command.args(args);
    command
}

/// Simulated workers; their URLs.
fn mock_workers(count: usize) -> (Process, Vec<String>) {
    let args = [
        "mock-worker",
        "--port",
        "0",
        "--workers",
        &count.to_string(),
        "--prefill-tps",
        "instant",
        "--itl",
        GAP_MS,
        "--itl-per-seq",
        "instant",
        "--max-num-seqs",
        "10000",
        "--max-num-batched-tokens",
        "10000000",
        "--num-gpu-blocks",
        "100000",
    ];
    let mut child = corelane(&args)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the workers start");
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let process = Process(child);
    let urls: Vec<String> = lines
        .map_while(Result::ok)
        .filter(|line| line.starts_with("http://"))
        .take(count)
        .collect();
    assert_eq!(urls.len(), count, "the workers say where they listen");
    (process, urls)
}

/// A router before them; where it listens.
fn router_process(urls: &[String]) -> (Process, SocketAddr) {
    // It begins with a low soft limit, as many systems give it, and raises that by itself. The shell becomes the router.
    let become_router = "ulimit -S -n 1024 && exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", become_router, env!("CARGO_BIN_EXE_corelane")]);
    command.args(["--port", "0", "--prometheus-port", "0", "--max-connections"]);
    // Well above the streams: descriptors are what this is about.
    command
        .args(["12000", "--worker-urls"])
        .args(urls)
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the router starts");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let process = Process(child);
    let address = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(|line| {
            line.split("address=")
                .nth(1)?
                .split(' ')
                .next()?
                .parse()
                .ok()
        })
        .expect("the router says where it listens");
    // Whatever else it says is read, or it would wait for us some day.
    std::thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .for_each(|line| println!("router: {line}"))
    });
    (process, address)
}

async fn json(address: SocketAddr, path: &str) -> (u16, Value) {
    let mut client = Client::open(address).await;
    client
        .send(format!("GET {path} HTTP/1.1\r\nHost: r\r\n\r\n").as_bytes())
        .await;
    let answer = client.answer(false).await.expect("an answer");
    (
        answer.status,
        serde_json::from_slice(&answer.body).unwrap_or_default(),
    )
}

async fn load_sum(address: SocketAddr) -> u64 {
    let (_, loads) = json(address, "/get_loads").await;
    loads["workers"]
        .as_array()
        .expect("loads")
        .iter()
        .map(|w| w["load"].as_u64().unwrap())
        .sum()
}

async fn until_load_is(address: SocketAddr, wanted: u64, limit: Duration) {
    let end = Instant::now() + limit;
    loop {
        let sum = load_sum(address).await;
        if sum == wanted {
            return;
        }
        assert!(
            Instant::now() < end,
            "the books say {sum}, not {wanted}, after {limit:?}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn high_water_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|l| l.starts_with("VmHWM:"))
        .expect("VmHWM");
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

/// From one of several addresses of the loopback, so that ports do not run out.
async fn connect(n: usize, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    let from = Ipv4Addr::new(127, 0, 0, 2 + (n % 8) as u8);
    socket.bind((from, 0).into()).unwrap();
    socket
        .connect(to)
        .await
        .unwrap_or_else(|e| panic!("connection {n}: {e}"))
}

/// Sends a request for a stream and reads it to its end: how many events came before `[DONE]`.
async fn stream(n: usize, mut connection: TcpStream) -> usize {
    let body = format!(
        r#"{{"model":"mock","stream":true,"max_tokens":{TOKENS},"ignore_eos":true,"messages":[{{"role":"user","content":"{n}"}}]}}"#
    );
    connection
        .write_all(&post(CHAT, body.as_bytes()))
        .await
        .unwrap();
    let mut seen = Vec::with_capacity(256);
    let (mut events, mut is_ok) = (0, false);
    loop {
        let got = connection
            .read_buf(&mut seen)
            .await
            .unwrap_or_else(|e| panic!("stream {n}: {e}, after {events} events"));
        assert!(
            got > 0,
            "stream {n} ended after {events} events without [DONE]"
        );
        is_ok |= seen.starts_with(b"HTTP/1.1 200 ");
        assert!(is_ok, "stream {n}: {}", String::from_utf8_lossy(&seen));
        events += memchr::memmem::find_iter(&seen, b"data: {").count();
        if memchr::memmem::find(&seen, b"data: [DONE]\n\n").is_some()
            && seen.ends_with(b"0\r\n\r\n")
        {
            return events;
        }
        // What was counted is let go, up to what may be half of something.
        let end = memchr::memmem::rfind(&seen, b"\n\n").map_or(0, |at| at + 2);
        if memchr::memmem::find(&seen, b"[DONE]").is_none() {
            events -= memchr::memmem::find_iter(&seen[end..], b"data: {").count();
            seen.drain(..end);
        } else {
            events -= memchr::memmem::find_iter(&seen, b"data: {").count();
        }
    }
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
    let (_workers, urls) = mock_workers(4);
    let (router, address) = router_process(&urls);
    let end = Instant::now() + Duration::from_secs(10);
    while json(address, "/health").await.0 != 200 {
        assert!(Instant::now() < end, "the workers are not ready in 10 s");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
        streams.spawn(stream(n, connection));
    }
    until_load_is(address, count as u64, Duration::from_secs(20)).await;
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
    until_load_is(address, 0, Duration::from_secs(10)).await;
    let high_water = high_water_bytes(router.0.id());
    println!("router: VmHWM {:.1} MB", high_water as f64 / 1e6);
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
