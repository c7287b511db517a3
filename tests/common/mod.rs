//! What the tests of the whole router share: scripted workers that record what reached them, raw clients, a router in
//! this process. Everything on loopback, port 0.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod dns;
pub mod framing;
pub mod kube;
pub mod line;
pub mod naive;
pub mod pd;
pub mod process;
pub mod tls;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use corelane::Router;
use corelane::config::{Cli, Config};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One request as a worker saw it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Request line, without CRLF.
    pub line: String,
    /// Fields in order, names as they came.
    pub fields: Vec<(String, Vec<u8>)>,
    /// The body, chunks taken off.
    pub body: Vec<u8>,
    /// How many requests came before it on its connection.
    pub index_on_connection: usize,
}

impl Recorded {
    /// All values of a field.
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        self.fields
            .iter()
            .filter(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.as_slice())
            .collect()
    }

    pub fn has_text(&self, text: &str) -> bool {
        memchr::memmem::find(&self.body, text.as_bytes()).is_some()
    }
}

/// The reply that a request's text asks for: "stream", "break" (off), "wrong", "stall"; else a plain one.
pub fn reply_by_text(request: &Recorded) -> Reply {
    match () {
        () if request.has_text("stream") => Reply::events(5, Duration::from_millis(2)),
        () if request.has_text("break") => Reply {
            end: End::Reset,
            ..Reply::events(3, Duration::from_millis(1))
        },
        () if request.has_text("wrong") => Reply::json(422, "{}"),
        () if request.has_text("stall") => Reply::nothing(End::Stall),
        () => Reply::default(),
    }
}

/// Two plain requests to a router before such workers, a stream, a wrong one, and one that breaks off, in the order of a log.
pub async fn ask_in_all_ways(router: SocketAddr) {
    const CHAT: &str = "/v1/chat/completions";
    let mut client = Client::open(router).await;
    for text in ["plain", "stream", "wrong", "plain"] {
        client.post(CHAT, &chat(text)).await.expect("an answer");
    }
    let mut broken = Client::open(router).await;
    broken.post(CHAT, &chat("break")).await.expect("a part");
}

/// How a worker ends an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Clean,
    Reset,
    Fin,
    /// Says nothing more, until the router closes.
    Stall,
}

/// What a worker answers. The default is a small JSON.
#[derive(Clone, Debug)]
pub struct Reply {
    pub delay: Duration,
    /// Nothing is sent before this turns true.
    pub gate: Option<watch::Receiver<bool>>,
    /// Sent before anything else, as it is.
    pub raw: Option<Vec<u8>>,
    pub status: u16,
    pub fields: Vec<(String, String)>,
    /// Each after a pause.
    pub pieces: Vec<(Duration, Vec<u8>)>,
    pub chunked: bool,
    /// Neither length nor chunks.
    pub until_close: bool,
    pub end: End,
}

impl Default for Reply {
    fn default() -> Reply {
        Reply::json(200, r#"{"ok":true}"#)
    }
}

impl Reply {
    pub fn json(status: u16, body: &str) -> Reply {
        Reply {
            delay: Duration::ZERO,
            gate: None,
            raw: None,
            status,
            fields: vec![("content-type".into(), "application/json".into())],
            pieces: vec![(Duration::ZERO, body.as_bytes().to_vec())],
            chunked: false,
            until_close: false,
            end: End::Clean,
        }
    }

    /// An event stream.
    pub fn events(count: usize, gap: Duration) -> Reply {
        let mut pieces: Vec<_> = (0..count)
            .map(|i| (gap, format!("data: {{\"n\":{i}}}\n\n").into_bytes()))
            .collect();
        pieces.push((Duration::ZERO, b"data: [DONE]\n\n".to_vec()));
        Reply {
            fields: vec![("content-type".into(), "text/event-stream".into())],
            pieces,
            chunked: true,
            ..Reply::default()
        }
    }

    /// No answer at all, ended this way.
    pub fn nothing(end: End) -> Reply {
        Reply {
            raw: Some(Vec::new()),
            pieces: Vec::new(),
            end,
            ..Reply::default()
        }
    }
}

type Script = Arc<dyn Fn(&Recorded) -> Reply + Send + Sync>;

pub struct WorkerState {
    pub script: Mutex<Script>,
    pub health: AtomicU64,
    pub models: Mutex<Option<String>>,
    /// Whether requests are kept.
    pub keeps: bool,
    pub requests: Mutex<Vec<Recorded>>,
    pub count: AtomicU64,
    /// Requests begun and not ended, as the worker itself counts.
    pub in_flight: AtomicI64,
    /// Connections that the router closed before the answer's end.
    pub aborted: AtomicU64,
    /// After so long without a request a connection is closed, ms; 0: never.
    pub idle_limit_ms: AtomicU64,
}

/// A scripted worker.
pub struct Worker {
    pub address: SocketAddr,
    pub state: Arc<WorkerState>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    pub async fn start() -> Worker {
        Worker::start_with(true).await
    }

    /// `keeps`: requests are recorded.
    pub async fn start_with(keeps: bool) -> Worker {
        Worker::start_at("127.0.0.1:0", keeps).await
    }

    pub async fn start_at(bind: &str, keeps: bool) -> Worker {
        let listener = TcpListener::bind(bind).await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(WorkerState {
            script: Mutex::new(Arc::new(|_| Reply::default())),
            health: AtomicU64::new(200),
            models: Mutex::new(None),
            keeps,
            requests: Mutex::new(Vec::new()),
            count: AtomicU64::new(0),
            in_flight: AtomicI64::new(0),
            aborted: AtomicU64::new(0),
            idle_limit_ms: AtomicU64::new(0),
        });
        let task = Mutex::new(Some(tokio::spawn(serve(listener, state.clone()))));
        Worker {
            address,
            state,
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn script(&self, script: impl Fn(&Recorded) -> Reply + Send + Sync + 'static) {
        *self.state.script.lock().unwrap() = Arc::new(script);
    }

    /// Closes connections that are idle for so long, as uvicorn does after 5 s.
    pub fn idle_limit(&self, limit: Duration) {
        let ms = limit.as_millis() as u64;
        self.state.idle_limit_ms.store(ms, Ordering::SeqCst);
    }

    /// As a killed process: every connection is reset, the port is closed.
    pub async fn die(&self) {
        let task = self.task.lock().unwrap().take();
        if let Some(task) = task {
            task.abort();
            let _ = task.await;
        }
    }

    pub async fn revive(&self) {
        self.serve_on(self.listen(1024));
    }

    fn listen(&self, backlog: u32) -> TcpListener {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(self.address).unwrap();
        socket.listen(backlog).unwrap()
    }

    fn serve_on(&self, listener: TcpListener) {
        *self.task.lock().unwrap() = Some(tokio::spawn(serve(listener, self.state.clone())));
    }

    /// As a stopped process: its port is there, but nobody accepts and the backlog is full, so that a connection to it
    /// neither comes about nor fails.
    pub async fn hang(&self) -> Hung {
        self.die().await;
        let listener = self.listen(0);
        let mut fillers = Vec::new();
        // On loopback a connection is there at once, or the queue is full.
        let limit = Duration::from_millis(250);
        while let Ok(filler) = tokio::time::timeout(limit, TcpStream::connect(self.address)).await {
            fillers.push(filler.unwrap());
        }
        Hung { listener, fillers }
    }

    /// The process goes on: connections that still wait come about as the kernel tries again, within a second or three.
    pub fn go_on(&self, hung: Hung) {
        drop(hung.fillers);
        socket2::SockRef::from(&hung.listener).listen(1024).unwrap();
        self.serve_on(hung.listener);
    }

    pub fn in_flight(&self) -> i64 {
        self.state.in_flight.load(Ordering::SeqCst)
    }

    pub fn requests(&self) -> Vec<Recorded> {
        self.state.requests.lock().unwrap().clone()
    }

    pub fn count(&self) -> u64 {
        self.state.count.load(Ordering::SeqCst)
    }
}

/// What [`Worker::hang`] holds. Dropped, connections to the port are refused.
pub struct Hung {
    listener: TcpListener,
    fillers: Vec<TcpStream>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().unwrap().take() {
            task.abort();
        }
    }
}

async fn serve(listener: TcpListener, state: Arc<WorkerState>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let _ = stream.set_nodelay(true);
                connections.spawn(connection(stream, state.clone()));
            }
            _ = connections.join_next(), if !connections.is_empty() => {}
        }
    }
}

/// Counts a request in flight, and its end on every way out.
struct InFlight(Arc<WorkerState>);

impl InFlight {
    fn new(state: &Arc<WorkerState>) -> InFlight {
        state.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight(state.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn connection(mut stream: TcpStream, state: Arc<WorkerState>) {
    // A dropped connection is reset, as when a process is killed.
    #[allow(deprecated, reason = "zero linger does not block")]
    stream.set_linger(Some(Duration::ZERO)).unwrap();
    let mut buffer = Vec::new();
    let mut index = 0;
    loop {
        let limit = match state.idle_limit_ms.load(Ordering::SeqCst) {
            0 => Duration::from_secs(3600),
            ms => Duration::from_millis(ms),
        };
        let reading = read_request(&mut stream, &mut buffer, index);
        let Ok(Some(request)) = tokio::time::timeout(limit, reading).await else {
            break;
        };
        index += 1;
        let aux = ["GET /health", "GET /v1/models", "GET /metrics"]
            .iter()
            .any(|start| request.line.starts_with(start));
        if aux {
            let reply = if request.line.contains("/health") {
                Reply::json(state.health.load(Ordering::SeqCst) as u16, "{}")
            } else {
                match &*state.models.lock().unwrap() {
                    Some(models) => Reply::json(200, models),
                    None => Reply::json(404, "{}"),
                }
            };
            if answer(&mut stream, &state, reply).await.is_err() {
                return;
            }
            continue;
        }
        let guard = InFlight::new(&state);
        state.count.fetch_add(1, Ordering::SeqCst);
        let script = state.script.lock().unwrap().clone();
        let reply = script(&request);
        if state.keeps {
            state.requests.lock().unwrap().push(request);
        }
        let result = answer(&mut stream, &state, reply).await;
        drop(guard);
        if result.is_err() {
            return;
        }
    }
    #[allow(deprecated, reason = "no linger does not block")]
    let _ = stream.set_linger(None);
}

/// Writes, unless the peer goes away first.
async fn or_gone<T>(
    stream: &mut TcpStream,
    state: &WorkerState,
    wait: impl Future<Output = T>,
) -> Result<T, ()> {
    let mut byte = [0u8; 1];
    tokio::select! {
        value = wait => Ok(value),
        _ = stream.peek(&mut byte) => {
            state.aborted.fetch_add(1, Ordering::SeqCst);
            Err(())
        }
    }
}

async fn answer(stream: &mut TcpStream, state: &WorkerState, reply: Reply) -> Result<(), ()> {
    if !reply.delay.is_zero() {
        or_gone(stream, state, tokio::time::sleep(reply.delay)).await?;
    }
    if let Some(gate) = &reply.gate {
        let mut gate = gate.clone();
        or_gone(stream, state, async move {
            let _ = gate.wait_for(|is_open| *is_open).await;
        })
        .await?;
    }
    let mut head = match &reply.raw {
        Some(raw) => raw.clone(),
        None => {
            let mut head = format!("HTTP/1.1 {} X\r\n", reply.status).into_bytes();
            for (name, value) in &reply.fields {
                head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
            }
            if reply.chunked {
                head.extend_from_slice(b"transfer-encoding: chunked\r\n");
            } else if !reply.until_close && reply.status != 204 && reply.status != 304 {
                let len: usize = reply.pieces.iter().map(|p| p.1.len()).sum();
                head.extend_from_slice(format!("content-length: {len}\r\n").as_bytes());
            }
            head.extend_from_slice(b"\r\n");
            head
        }
    };
    for (pause, piece) in &reply.pieces {
        if !pause.is_zero() {
            stream
                .write_all(&std::mem::take(&mut head))
                .await
                .map_err(|_| ())?;
            or_gone(stream, state, tokio::time::sleep(*pause)).await?;
        }
        if reply.chunked {
            head.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            head.extend_from_slice(piece);
            head.extend_from_slice(b"\r\n");
        } else {
            head.extend_from_slice(piece);
        }
    }
    if reply.chunked && reply.end == End::Clean {
        head.extend_from_slice(b"0\r\n\r\n");
    }
    stream.write_all(&head).await.map_err(|_| ())?;
    match reply.end {
        End::Clean if reply.until_close => end_cleanly(stream).await,
        End::Clean => Ok(()),
        End::Reset => Err(()),
        End::Fin => end_cleanly(stream).await,
        End::Stall => or_gone(stream, state, std::future::pending()).await,
    }
}

async fn end_cleanly(stream: &mut TcpStream) -> Result<(), ()> {
    #[allow(deprecated, reason = "no linger does not block")]
    let _ = stream.set_linger(None);
    let _ = stream.shutdown().await;
    Err(())
}

async fn read_request(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
    index: usize,
) -> Option<Recorded> {
    let head_len = loop {
        if let Some(at) = memchr::memmem::find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head: Vec<u8> = buffer.drain(..head_len).collect();
    let mut lines = head[..head_len - 4]
        .split(|b| *b == b'\n')
        .map(|l| l.strip_suffix(b"\r").unwrap_or(l));
    let line = String::from_utf8_lossy(lines.next()?).into_owned();
    let fields: Vec<(String, Vec<u8>)> = lines
        .map(|l| {
            let at = memchr::memchr(b':', l).expect("a field has a colon");
            (
                String::from_utf8_lossy(&l[..at]).into_owned(),
                l[at + 1..].trim_ascii().to_vec(),
            )
        })
        .collect();
    let field = |name: &str| {
        fields
            .iter()
            .find(|(n, _)| n.eq_ignore_ascii_case(name))
            .map(|(_, v)| v.clone())
    };
    let mut body = Vec::new();
    if let Some(length) = field("content-length") {
        let length: usize = String::from_utf8(length).unwrap().parse().unwrap();
        while buffer.len() < length {
            if stream.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
        }
        body = buffer.drain(..length).collect();
    } else if field("transfer-encoding").is_some() {
        let mut framing = corelane::http::Body::new(corelane::http::body::Framing::Chunked);
        loop {
            let progress = framing
                .feed(buffer, |data| body.extend_from_slice(data))
                .expect("chunks are well-formed");
            buffer.drain(..progress.consumed);
            if progress.done {
                break;
            }
            if stream.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
        }
    }
    Some(Recorded {
        line,
        fields,
        body,
        index_on_connection: index,
    })
}

/// A worker whose every byte is the test's: health and model list are answered as usual, and each other request is
/// given to `serve` with its connection, which ends when `serve` returns.
pub struct RawWorker {
    pub address: SocketAddr,
    task: JoinHandle<()>,
}

impl RawWorker {
    pub async fn start<F, S>(serve: S) -> RawWorker
    where
        F: Future<Output = ()> + Send + 'static,
        S: Fn(Recorded, TcpStream) -> F + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = Arc::new(serve);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let Ok((mut stream, _)) = listener.accept().await else {
                    continue;
                };
                let _ = stream.set_nodelay(true);
                let serve = serve.clone();
                connections.spawn(async move {
                    let mut buffer = Vec::new();
                    while let Some(request) = read_request(&mut stream, &mut buffer, 0).await {
                        let answer: &[u8] = match request.line.split(' ').nth(1) {
                            Some("/health") => b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
                            Some("/v1/models") => b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
                            _ => return serve(request, stream).await,
                        };
                        if stream.write_all(answer).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        RawWorker { address, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for RawWorker {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a router in this process before these workers and waits until they are ready.
pub async fn router(workers: &[&Worker], flags: &[&str]) -> Router {
    let urls: Vec<String> = workers.iter().map(|w| w.url()).collect();
    router_before(&urls, flags).await
}

/// The same, by URL.
pub async fn router_before(urls: &[String], flags: &[&str]) -> Router {
    let router = router_unready_before(urls, flags);
    until("all workers are ready", || {
        router.control().ready_count() == urls.len()
    })
    .await;
    router
}

/// Two where the machine has them, so that requests meet both.
pub fn cores() -> &'static str {
    let count = std::thread::available_parallelism().map_or(1, |n| n.get());
    if count >= 2 { "2" } else { "1" }
}

/// A router before them that probes only when told to, once each time.
pub async fn router_of(workers: &[Worker], flags: &[&str]) -> Router {
    let refs: Vec<&Worker> = workers.iter().collect();
    let common = [
        "--cores",
        cores(),
        "--health-check-interval-secs",
        "3600",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ];
    router(&refs, &[&common[..], flags].concat()).await
}

pub fn router_unready(workers: &[&Worker], flags: &[&str]) -> Router {
    let urls: Vec<String> = workers.iter().map(|w| w.url()).collect();
    router_unready_before(&urls, flags)
}

pub fn router_unready_before(urls: &[String], flags: &[&str]) -> Router {
    start_router(flags, &[("--worker-urls", urls)])
}

/// Starts a router with these flags, and lists of workers behind flags of their own.
fn start_router(flags: &[&str], lists: &[(&str, &[String])]) -> Router {
    let mut line: Vec<String> = ["corelane", "--port", "0", "--prometheus-port", "0"]
        .map(String::from)
        .to_vec();
    if !flags.contains(&"--max-connections") {
        line.extend(["--max-connections", "4000"].map(String::from));
    }
    line.extend(flags.iter().map(|f| f.to_string()));
    for (flag, urls) in lists {
        line.push(flag.to_string());
        line.extend_from_slice(urls);
    }
    let cli = Cli::try_parse_from(line).unwrap();
    corelane::ring::raise_descriptor_limit();
    corelane::start(Config::from_cli(cli).unwrap()).unwrap()
}

/// In-flight requests of a worker in the router's books, all its lives together.
pub fn booked(router: &Router, worker: &Worker) -> u32 {
    let url = worker.url();
    router
        .control()
        .workers()
        .iter()
        .filter(|w| *w.url == *url)
        .map(|w| w.in_flight)
        .sum()
}

/// Waits until nothing is in flight in the books, of any worker's any life, and nobody runs or waits at the gate.
pub async fn until_books_are_empty(router: &Router) {
    until("the books are at zero", || {
        let workers = router.control().workers();
        workers.iter().all(|w| w.in_flight == 0) && router.shared.gate.counts() == (0, 0)
    })
    .await;
    for view in router.control().workers() {
        let load = router.shared.books.load(view.id.slot);
        assert_eq!(
            (
                load.waiting,
                load.active,
                load.waiting_bytes,
                load.active_bytes
            ),
            (0, 0, 0, 0),
            "{}",
            view.url
        );
    }
    assert_eq!(router.shared.books.underflow_count(), 0);
}

/// A counter, all cores together.
pub fn total(router: &Router, read: impl Fn(&corelane::shared::CoreStats) -> u64) -> u64 {
    router
        .shared
        .cores
        .iter()
        .map(|core| read(&core.stats))
        .sum()
}

/// Failures of a worker as the router counts them.
pub fn failures(router: &Router, url: &str) -> u64 {
    router
        .control()
        .workers()
        .iter()
        .filter(|w| *w.url == *url)
        .map(|w| w.failures)
        .sum()
}

/// Waits until a condition holds; panics with `what` after ten seconds.
pub async fn until(what: &str, condition: impl FnMut() -> bool) {
    until_within(Duration::from_secs(10), what, condition).await;
}

/// The same within another time.
pub async fn until_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until what is read is what is wanted.
pub async fn until_equal<T: PartialEq + std::fmt::Debug>(
    limit: Duration,
    wanted: T,
    mut read: impl AsyncFnMut() -> T,
) {
    let end = Instant::now() + limit;
    loop {
        let found = read().await;
        if found == wanted {
            return;
        }
        assert!(Instant::now() < end, "{found:?}, not {wanted:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Pairs in the order in which they compare.
pub fn sorted(pairs: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut all: Vec<_> = pairs.into_iter().collect();
    all.sort();
    all
}

/// An answer as a client saw it.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
    /// The body came whole.
    pub is_whole: bool,
}

impl Answer {
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|l| {
            let (n, v) = l.split_once(':')?;
            n.eq_ignore_ascii_case(name).then_some(v.trim())
        })
    }
}

/// A client's connection.
pub struct Client<S = TcpStream> {
    pub stream: S,
    pub buffer: Vec<u8>,
}

impl Client {
    pub async fn open(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client {
            stream,
            buffer: Vec::new(),
        }
    }

    /// With a receive buffer of about this many bytes: a client that soon stops the one who sends to it.
    pub async fn open_narrow(address: SocketAddr, receive_bytes: u32) -> Client {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(receive_bytes).unwrap();
        let stream = socket.connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client {
            stream,
            buffer: Vec::new(),
        }
    }

    /// Closes with a reset.
    pub fn reset(self) {
        #[allow(deprecated, reason = "zero linger does not block")]
        let _ = self.stream.set_linger(Some(Duration::ZERO));
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    pub async fn send(&mut self, bytes: &[u8]) {
        let _ = self.stream.write_all(bytes).await;
    }

    /// Ends our direction only.
    pub async fn half_close(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Reads one head, interim or not, with its empty line. `None`: the connection ended before.
    pub async fn head(&mut self) -> Option<String> {
        let read = async {
            loop {
                if let Some(at) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                    let head: Vec<u8> = self.buffer.drain(..at + 4).collect();
                    return Some(String::from_utf8_lossy(&head).into_owned());
                }
                if self.stream.read_buf(&mut self.buffer).await.ok()? == 0 {
                    return None;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), read)
            .await
            .expect("no head within 30 s")
    }

    /// Reads until this many bytes wait in `buffer`. False: the connection ended before.
    pub async fn fill(&mut self, bytes: usize) -> bool {
        let read = async {
            while self.buffer.len() < bytes {
                if !matches!(self.stream.read_buf(&mut self.buffer).await, Ok(1..)) {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(Duration::from_secs(30), read)
            .await
            .expect("no bytes within 30 s")
    }

    /// Reads all there still is. True: ended in order, false: reset.
    pub async fn rest(&mut self) -> (Vec<u8>, bool) {
        let read = self.stream.read_to_end(&mut self.buffer);
        let result = tokio::time::timeout(Duration::from_secs(30), read)
            .await
            .expect("no end within 30 s");
        (std::mem::take(&mut self.buffer), result.is_ok())
    }

    /// Reads one answer; interim ones are skipped. `None`: the connection ended before a head.
    pub async fn answer(&mut self, is_head: bool) -> Option<Answer> {
        let limit = Duration::from_secs(30);
        tokio::time::timeout(limit, self.read_answer(is_head))
            .await
            .expect("no answer within 30 s")
    }

    async fn read_answer(&mut self, is_head: bool) -> Option<Answer> {
        loop {
            let head_len = loop {
                if let Some(at) = memchr::memmem::find(&self.buffer, b"\r\n\r\n") {
                    break at + 4;
                }
                if self.stream.read_buf(&mut self.buffer).await.ok()? == 0 {
                    return None;
                }
            };
            let head: Vec<u8> = self.buffer.drain(..head_len).collect();
            let head = String::from_utf8_lossy(&head).into_owned();
            let status: u16 = head.split(' ').nth(1)?.parse().ok()?;
            if status < 200 {
                continue;
            }
            let mut answer = Answer {
                status,
                head,
                body: Vec::new(),
                is_whole: true,
            };
            let framing = match (
                answer.field("content-length"),
                answer.field("transfer-encoding"),
            ) {
                _ if is_head || status == 204 || status == 304 => return Some(answer),
                (Some(n), None) => corelane::http::body::Framing::Length(n.parse().unwrap()),
                (None, Some(_)) => corelane::http::body::Framing::Chunked,
                _ => corelane::http::body::Framing::Close,
            };
            let mut body = corelane::http::Body::new(framing);
            while !body.is_done() {
                let progress = body
                    .feed(&self.buffer, |data| answer.body.extend_from_slice(data))
                    .expect("well framed");
                self.buffer.drain(..progress.consumed);
                if progress.done {
                    break;
                }
                match self.stream.read_buf(&mut self.buffer).await {
                    Ok(n) if n > 0 => {}
                    end => {
                        answer.is_whole = end.is_ok() && body.ends_with_connection();
                        break;
                    }
                }
            }
            return Some(answer);
        }
    }

    pub async fn post(&mut self, path: &str, body: &[u8]) -> Option<Answer> {
        self.send(&post(path, body)).await;
        self.answer(false).await
    }
}

/// A POST as most clients send it.
pub fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let mut out = format!(
        "POST {path} HTTP/1.1\r\nHost: router.test\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(body);
    out
}

pub fn chat(text: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "messages": [{"role": "user", "content": text}]})
        .to_string()
        .into_bytes()
}

/// A small generator; the seed is in the test's output.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn text(&mut self, n: usize) -> String {
        (0..n)
            .map(|_| (b'a' + self.below(26) as u8) as char)
            .collect()
    }
}

/// A seed from the environment (`SEED`), or a new one; printed.
pub fn seed() -> u64 {
    let seed = std::env::var("SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_nanos() as u64
        });
    println!("SEED={seed}");
    seed
}

/// A file that goes away with the test.
pub struct File(PathBuf);

impl File {
    pub fn new(text: &str) -> File {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("corelane-test-{}-{count}", std::process::id());
        let file = File(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    /// In one step, as a careful writer does: no reload sees half of it.
    pub fn write(&self, text: &str) {
        let new = self.0.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, &self.0).unwrap();
    }

    pub fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    pub fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
