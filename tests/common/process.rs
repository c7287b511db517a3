//! The binary itself, as router and as simulated workers: processes of their own, on loopback, port 0.

use std::io::{BufRead, BufReader, Lines};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::{Client, post, sorted, until_equal};

const CHAT: &str = "/v1/chat/completions";

/// A process that ends, by its id, with the test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn corelane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corelane"));
    command.args(args);
    command
}

/// Simulated workers that need `gap_ms` for a token; their URLs.
pub fn mock_workers(count: usize, gap_ms: &str) -> (Process, Vec<String>) {
    let args = [
        "mock-worker",
        "--port",
        "0",
        "--workers",
        &count.to_string(),
        "--prefill-tps",
        "instant",
        "--itl",
        gap_ms,
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

/// A router that listens.
pub struct RouterProcess {
    pub process: Process,
    pub address: SocketAddr,
    pub metrics: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

impl RouterProcess {
    /// Starts it and waits until it says where it listens.
    pub fn start(mut command: Command) -> RouterProcess {
        command.stderr(Stdio::piped());
        let mut child = command.spawn().expect("the router starts");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let process = Process(child);
        let log = Arc::new(Mutex::new(Vec::new()));
        let (address, metrics) = listening(&mut lines, &log);
        // Whatever else it says is read, or it would wait for us some day.
        let for_thread = log.clone();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| {
                println!("router: {line}");
                for_thread.lock().unwrap().push(line);
            })
        });
        RouterProcess {
            process,
            address,
            metrics,
            log,
        }
    }

    pub fn id(&self) -> u32 {
        self.process.0.id()
    }

    /// Lines of its log that hold this text.
    pub fn logged(&self, text: &str) -> Vec<String> {
        let log = self.log.lock().unwrap();
        log.iter().filter(|l| l.contains(text)).cloned().collect()
    }

    /// Sends it a signal, by name.
    pub fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.id());
        let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(status.success(), "{kill}");
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path).await
    }

    /// A request without a body, and its answer as JSON, if it is.
    pub async fn ask(&self, method: &str, path: &str) -> (u16, Value) {
        let mut client = Client::open(self.address).await;
        let request = format!("{method} {path} HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n");
        client.send(request.as_bytes()).await;
        let answer = client.answer(false).await.expect("an answer");
        let json = serde_json::from_slice(&answer.body).unwrap_or_default();
        (answer.status, json)
    }

    /// The value of a series of the metrics page.
    pub async fn series(&self, name: &str) -> f64 {
        let mut client = Client::open(self.metrics).await;
        client
            .send(b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n")
            .await;
        let page = client.answer(false).await.expect("the metrics page").body;
        let page = String::from_utf8(page).unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("no series {name}"));
        line.trim().parse().unwrap()
    }

    pub async fn until_healthy(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        while self.get("/health").await.0 != 200 {
            assert!(Instant::now() < end, "the workers are not ready in 10 s");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The workers that it lists.
    pub async fn workers(&self) -> Vec<Value> {
        let (_, page) = self.get("/workers").await;
        page["workers"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until it lists these URLs, in whatever order, and `read` says this of each.
    pub async fn until_workers_are(
        &self,
        limit: Duration,
        read: impl Fn(&Value) -> String,
        wanted: &[(&str, &str)],
    ) {
        let pair = |worker: &Value| {
            let url = worker["url"].as_str().unwrap_or_default();
            (url.to_owned(), read(worker))
        };
        let wanted = wanted
            .iter()
            .map(|(url, said)| (url.to_string(), said.to_string()));
        until_equal(limit, sorted(wanted), async || {
            sorted(self.workers().await.iter().map(pair))
        })
        .await;
    }

    /// What the books say is in flight, lives that are ending among it.
    pub async fn load_sum(&self) -> u64 {
        let (_, workers) = self.get("/workers").await;
        let lists = ["workers", "draining"].map(|list| workers[list].as_array().expect("a list"));
        let all = lists.into_iter().flatten();
        all.map(|w| w["load"].as_u64().expect("a load")).sum()
    }

    pub async fn until_load_is(&self, wanted: u64, limit: Duration) {
        let end = Instant::now() + limit;
        loop {
            let sum = self.load_sum().await;
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
}

fn listening(
    lines: &mut Lines<BufReader<ChildStderr>>,
    log: &Mutex<Vec<String>>,
) -> (SocketAddr, SocketAddr) {
    for line in lines.map_while(Result::ok) {
        println!("router: {line}");
        log.lock().unwrap().push(line.clone());
        let field = |name: &str| line.split(name).nth(1)?.split(' ').next()?.parse().ok();
        if let (Some(address), Some(metrics)) = (field("address="), field("metrics=")) {
            return (address, metrics);
        }
    }
    panic!("the router says where it listens");
}

/// A figure of `/proc/PID/status`.
pub fn status_bytes(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

/// From one of several addresses of the loopback, so that ports do not run out.
pub async fn connect(n: usize, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    let from = Ipv4Addr::new(127, 0, 0, 2 + (n % 8) as u8);
    socket.bind((from, 0).into()).unwrap();
    socket
        .connect(to)
        .await
        .unwrap_or_else(|e| panic!("connection {n}: {e}"))
}

/// Sends a request for a stream of so many tokens and reads it to its end: how many events came before `[DONE]`.
pub async fn stream(n: usize, mut connection: TcpStream, tokens: usize) -> usize {
    let body = format!(
        r#"{{"model":"mock","stream":true,"max_tokens":{tokens},"ignore_eos":true,"messages":[{{"role":"user","content":"{n}"}}]}}"#
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
