//! A router takes another's place while clients work: nobody sees it. Routers are processes of their own, on sockets
//! that this process opened for them, or on one port by SO_REUSEPORT.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const CHAT: &str = "/v1/chat/completions";
const STREAMS: usize = 50;
const STREAM_EVENTS: usize = 20;
const GAP: Duration = Duration::from_millis(40);
/// The shell becomes the router; the socket to inherit is the shell's standard input.
const INHERIT: &str = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0 </dev/null";

/// A router process that ends, by its id, with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn terminate(&self) {
        let pid = self.0.id().to_string();
        let status = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Waits for its end.
    async fn end(&mut self) -> ExitStatus {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(status) = self.0.try_wait().expect("it can be waited for") {
                return status;
            }
            assert!(Instant::now() < end, "the router does not end in 20 s");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A router on a socket of ours, or (without) on what the flags say; errors go to a pipe.
fn command(socket: Option<OwnedFd>, workers: &[&Worker], flags: &[&str]) -> Command {
    let mut command = match socket {
        Some(socket) => {
            let mut command = Command::new("sh");
            command.args(["-c", INHERIT, env!("CARGO_BIN_EXE_corelane")]);
            command.stdin(Stdio::from(socket));
            command
        }
        None => Command::new(env!("CARGO_BIN_EXE_corelane")),
    };
    command.args(["--max-connections", "2000", "--drain-timeout-secs", "15"]);
    command.args(flags).stderr(Stdio::piped());
    if !workers.is_empty() {
        command.arg("--worker-urls");
        command.args(workers.iter().map(|worker| worker.url()));
    }
    command
}

/// Starts a router; returns when it says that it listens: where, and where Prometheus is.
fn start(mut command: Command) -> (Process, SocketAddr, SocketAddr) {
    let mut child = command.spawn().expect("the router starts");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let pid = child.id();
    let process = Process(child);
    let mut is_said = |line: String| {
        println!("{pid}: {line}");
        let after = |name: &str| line.split(name).nth(1)?.split(' ').next()?.parse().ok();
        Some((after(" address=")?, after("metrics=")?))
    };
    let (address, metrics) = lines
        .by_ref()
        .map_while(Result::ok)
        .find_map(&mut is_said)
        .expect("the router says where it listens");
    // Whatever else it says is read, or it would wait for us some day.
    std::thread::spawn(move || {
        lines
            .map_while(Result::ok)
            .for_each(|line| println!("{pid}: {line}"))
    });
    (process, address, metrics)
}

/// The message of a router that does not start.
fn refusal(mut command: Command) -> String {
    let mut process = Process(command.spawn().expect("the router starts"));
    let mut text = String::new();
    let mut stderr = process.0.stderr.take().unwrap();
    stderr.read_to_string(&mut text).unwrap();
    assert!(!process.0.wait().unwrap().success(), "{text}");
    text
}

/// What clients saw while routers came and went.
#[derive(Default)]
struct Seen {
    is_over: AtomicBool,
    requests: AtomicU64,
    streams: AtomicU64,
    /// Connections that were reset before they brought a byte.
    resets: AtomicU64,
}

impl Seen {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}

/// A request on a connection of its own. `None`: reset, or ended, before a byte came.
async fn ask(address: SocketAddr, body: &[u8]) -> Option<Answer> {
    let stream = TcpStream::connect(address).await.ok()?;
    stream.set_nodelay(true).ok()?;
    let mut client = Client {
        stream,
        buffer: Vec::new(),
    };
    client.post(CHAT, body).await
}

/// Counts a connection that came to nothing, or checks the answer.
fn check(seen: &Seen, answer: Option<Answer>, count: &AtomicU64) {
    let Some(answer) = answer else {
        println!("a connection was reset");
        seen.resets.fetch_add(1, Ordering::SeqCst);
        return;
    };
    let body = String::from_utf8_lossy(&answer.body);
    assert_eq!(answer.status, 200, "{body}");
    assert!(answer.is_whole, "cut short: {body}");
    if answer.head.contains("event-stream") {
        assert_eq!(body.matches("data: {").count(), STREAM_EVENTS, "{body}");
        assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
    }
    count.fetch_add(1, Ordering::SeqCst);
}

/// Clients that connect anew for each request, clients that keep their connection as long as they may, and streams.
fn clients(address: SocketAddr, seen: &Arc<Seen>) -> JoinSet<()> {
    let mut all = JoinSet::new();
    for n in 0..STREAMS {
        let seen = seen.clone();
        all.spawn(async move {
            // They do not all begin and end together.
            tokio::time::sleep(GAP * n as u32 / 4).await;
            while !seen.is_over() {
                let answer = ask(address, &chat(&format!("stream {n}"))).await;
                check(&seen, answer, &seen.streams);
            }
        });
    }
    for n in 0..4 {
        let seen = seen.clone();
        all.spawn(async move {
            while !seen.is_over() {
                let answer = ask(address, &chat(&format!("short {n}"))).await;
                check(&seen, answer, &seen.requests);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    for n in 0..4 {
        let seen = seen.clone();
        all.spawn(async move { keep_alive(address, n, &seen).await });
    }
    all
}

async fn keep_alive(address: SocketAddr, n: usize, seen: &Seen) {
    let mut kept: Option<Client> = None;
    while !seen.is_over() {
        let mut client = match kept.take() {
            Some(client) => client,
            None => Client::open(address).await,
        };
        let answer = client.post(CHAT, &chat(&format!("kept {n}"))).await;
        let is_last = answer
            .as_ref()
            .is_none_or(|answer| answer.field("connection") == Some("close"));
        check(seen, answer, &seen.requests);
        if !is_last {
            kept = Some(client);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn worker() -> Worker {
    let worker = Worker::start_with(false).await;
    worker.script(|request| {
        if request.has_text("stream") {
            Reply::events(STREAM_EVENTS, GAP)
        } else {
            Reply::default()
        }
    });
    worker
}

/// Each router takes the place of the one before, in the midst of all; how many connections were reset.
async fn take_turns(address: SocketAddr, first: Process, mut next: impl FnMut() -> Process) -> u64 {
    let seen = Arc::new(Seen::default());
    let mut clients = clients(address, &seen);
    let pause = Duration::from_millis(700);
    tokio::time::sleep(pause).await;
    let mut old = first;
    for _ in 0..3 {
        let new = tokio::task::block_in_place(&mut next);
        tokio::time::sleep(pause).await;
        let began = Instant::now();
        old.terminate();
        assert_eq!(old.end().await.code(), Some(0));
        println!("the old one ended after {:?}", began.elapsed());
        old = new;
    }
    tokio::time::sleep(pause).await;
    seen.is_over.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.expect("a client saw nothing wrong");
    }
    let count = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
    println!(
        "{} requests, {} streams, {} resets",
        count(&seen.requests),
        count(&seen.streams),
        count(&seen.resets)
    );
    assert!(count(&seen.requests) > 300 && count(&seen.streams) > STREAMS as u64);
    count(&seen.resets)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_an_inherited_socket_one_router_follows_another_unseen() {
    let worker = worker().await;
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let new = || {
        let flags = ["--port", "1", "--prometheus-port", "0"];
        let socket = socket.try_clone().unwrap().into();
        let (process, said, _) = start(command(Some(socket), &[&worker], &flags));
        assert_eq!(said, address);
        process
    };
    assert_eq!(take_turns(address, new(), new).await, 0, "resets");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_one_port_one_router_follows_another_unseen() {
    let worker = worker().await;
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let flags = ["--reuse-port", "--port", &port, "--prometheus-port", "0"];
    let new = || start(command(None, &[&worker], &flags)).0;
    let first = new();
    let address = SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap()));
    let resets = take_turns(address, first, new).await;
    // Between a core's last accept and its close the kernel may complete a handshake, a microsecond or so, once a core
    // and upgrade; only with the sysctl does it move such a connection to the other router.
    let moves = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").unwrap_or_default();
    let allowed = if moves.trim() == "1" { 0 } else { 1 };
    assert!(resets <= allowed, "{resets} resets");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_while_no_router_runs_is_served_by_the_next() {
    let worker = worker().await;
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let new = || {
        let socket = socket.try_clone().unwrap().into();
        start(command(
            Some(socket),
            &[&worker],
            &["--prometheus-port", "0"],
        ))
        .0
    };
    let mut old = new();
    old.terminate();
    assert_eq!(old.end().await.code(), Some(0));
    let waiting: Vec<_> = (0..20)
        .map(|n| tokio::spawn(async move { ask(address, &chat(&format!("wait {n}"))).await }))
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let _next = new();
    for one in waiting {
        let answer = one.await.unwrap().expect("an answer");
        assert_eq!(answer.status, 200);
    }
}

/// Every core gets its share of an inherited socket's connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inherited_socket_is_shared_by_all_cores() {
    if corelane::config::cpu_count() < 2 {
        println!("one processor: nothing to share");
        return;
    }
    let socket = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (data, metrics, worker) = (socket(), socket(), worker().await);
    let address = data.local_addr().unwrap();
    // Two descriptors: the second one is the standard output of the shell.
    let script = "LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=corelane.socket:metrics \
                  exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_corelane")]);
    command.args(["--cores", "2", "--max-connections", "2000"]);
    command.args(["--worker-urls", &worker.url()]);
    command.stdin(Stdio::from(OwnedFd::from(data)));
    command.stdout(Stdio::from(OwnedFd::from(metrics.try_clone().unwrap())));
    command.stderr(Stdio::piped());
    let (process, _, said) = start(command);
    assert_eq!(said, metrics.local_addr().unwrap());
    for n in 0..200 {
        let answer = ask(address, &chat(&format!("share {n}"))).await;
        assert_eq!(answer.expect("an answer").status, 200);
    }
    let shares = context_switches(process.0.id());
    println!("switches of the cores' threads: {shares:?}");
    assert!(shares[1] >= 100, "one core serves all: {shares:?}");
}

/// How often each thread of the cores (some are helpers of glommio, and idle) has slept, the most first; a core sleeps at
/// least once for each request.
fn context_switches(pid: u32) -> Vec<u64> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let task = task.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap();
        if read("comm").starts_with("core-") {
            let status = read("status");
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
                .expect("a count");
            found.push(line.trim().parse().unwrap());
        }
    }
    found.sort_by_key(|count| std::cmp::Reverse(*count));
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_flag_a_second_router_on_a_port_is_refused() {
    let flags = ["--port", "0", "--prometheus-port", "0", "--reuse-port"];
    let (_first, address, metrics) = start(command(None, &[], &flags));
    let (port, metrics) = (address.port().to_string(), metrics.port().to_string());
    for flags in [
        ["--port", &port, "--prometheus-port", "0"],
        ["--port", "0", "--prometheus-port", &metrics],
    ] {
        let text = refusal(command(None, &[], &flags));
        assert!(
            text.contains("cannot listen on 127.0.0.1:") && text.contains("--reuse-port"),
            "{text}"
        );
    }
    let flags = [
        "--port",
        &port,
        "--prometheus-port",
        &metrics,
        "--reuse-port",
    ];
    assert_eq!(start(command(None, &[], &flags)).1, address);
}

#[test]
fn a_descriptor_that_does_not_listen_is_refused_by_its_number() {
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for (fd, why) in [
        (OwnedFd::from(udp), "no stream socket"),
        (tcp.into(), "does not listen"),
        (file.into(), "no socket"),
    ] {
        let text = refusal(command(Some(fd), &[], &["--prometheus-port", "0"]));
        assert!(
            text.contains("descriptor 3 (unknown)") && text.contains(why),
            "{text}"
        );
    }
    let mut none = Command::new("sh");
    none.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" 3<&-"]);
    none.arg(env!("CARGO_BIN_EXE_corelane"))
        .stderr(Stdio::piped());
    let text = refusal(none);
    assert!(text.contains("descriptor 3 (unknown)"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_manager_is_told() {
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let name = format!("corelane-upgrade-{}", std::process::id());
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    manager
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let told = || {
        let mut text = [0; 512];
        let n = manager.recv(&mut text).expect("a message");
        String::from_utf8_lossy(&text[..n]).into_owned()
    };
    let mut router = command(None, &[], &["--port", "0", "--prometheus-port", "0"]);
    router.env("NOTIFY_SOCKET", format!("@{name}"));
    let (mut process, address, metrics) = start(router);
    let wanted = format!(
        "READY=1\nSTATUS=Listening on {address}, metrics on {metrics}\n\
         X_CORELANE_ADDRESS={address}\nX_CORELANE_METRICS_ADDRESS={metrics}"
    );
    assert_eq!(told(), wanted);
    process.terminate();
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(process.end().await.code(), Some(0));
}

/// The shell starts the router, and stays.
const STAY: &str = "CORELANE_PARENT_PID=$$ \"$0\" --port 0 --prometheus-port 0 & read wait";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_drains_when_the_process_that_started_it_is_killed() {
    let mut shell = Command::new("sh");
    shell.args(["-c", STAY, env!("CARGO_BIN_EXE_corelane")]);
    shell.stdin(Stdio::piped()).stderr(Stdio::piped());
    let (mut shell, address, _) = start(shell);
    assert!(TcpStream::connect(address).await.is_ok());
    shell.0.kill().unwrap();
    shell.0.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(15);
    while TcpStream::connect(address).await.is_ok() {
        assert!(Instant::now() < end, "the router runs still");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_drains_though_nobody_reads_its_log_any_more() {
    let mut router = command(None, &[], &["--port", "0", "--prometheus-port", "0"]);
    let mut process = Process(router.spawn().expect("the router starts"));
    let mut lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
    let is_listening = |line: std::io::Result<String>| line.unwrap().contains("listening");
    assert!(lines.any(is_listening));
    drop(lines);
    process.terminate();
    assert_eq!(process.end().await.code(), Some(0));
}

#[test]
fn a_router_whose_starter_has_ended_does_not_start() {
    for (parent, why) in [("1", "has ended"), ("me", "no process number")] {
        let mut router = command(None, &[], &["--port", "0", "--prometheus-port", "0"]);
        router.env("CORELANE_PARENT_PID", parent);
        let text = refusal(router);
        assert!(text.contains(why), "{text}");
    }
}
