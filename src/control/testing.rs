//! Parts for tests: the shared state without cores, stand-ins for cores, and a worker that answers probes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shards::{Books, Domain, Gate, Publisher, Reader, TreeLimits};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::shared::{AdminReply, AdminRequest, CoreShared, Fleet, Shared, ToCore};

/// Longest wait for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until `is_so`; panics with `what` when it does not come.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Defaults with a fast rhythm.
pub fn config() -> Config {
    let mut config = Config::default_for_tests();
    config.health.interval = Duration::from_millis(20);
    config.health.timeout = Duration::from_secs(2);
    config
}

/// P/D with these workers and flags, and a fast rhythm.
pub fn pd_config(prefill: &[&FakeWorker], decode: &[&FakeWorker], flags: &[&str]) -> Config {
    let urls = |workers: &[&FakeWorker]| workers.iter().map(|w| w.url()).collect::<Vec<_>>();
    let (prefill, decode) = (urls(prefill), urls(decode));
    let mut line = vec!["--vllm-pd-disaggregation"];
    line.extend(flags);
    line.extend(prefill.iter().flat_map(|url| ["--prefill", url]));
    line.extend(decode.iter().flat_map(|url| ["--decode", url]));
    Config {
        health: config().health,
        ..Config::for_tests(&line)
    }
}

/// What the planes share, and the ends that its owners hold.
pub struct Parts {
    pub shared: Arc<Shared>,
    pub publisher: Option<Publisher<Fleet>>,
    pub admin_rx: Option<mpsc::Receiver<AdminRequest>>,
    pub reader: Reader,
}

pub fn parts(config: Config, core_count: usize, slot_count: usize) -> Parts {
    let domain = Arc::new(Domain::new(core_count.max(1)));
    let limits = TreeLimits {
        bytes_max: 1 << 20,
        slot_count_max: slot_count,
    };
    let (tree, _shards) = shards::tree(core_count.max(1), domain.clone(), limits);
    let (publisher, fleet) = shards::published(domain.clone(), Fleet::default());
    let (admin, admin_rx) = mpsc::channel(64);
    let reader = domain.reader(0);
    let shared = Arc::new(Shared {
        config: Arc::new(config).into(),
        books: Box::leak(Box::new(Books::new(slot_count))),
        gate: Box::leak(Box::new(Gate::new(core_count.max(1)))),
        bucket: Default::default(),
        bodies: Default::default(),
        queued: Default::default(),
        retry_after_secs: 1.into(),
        tree,
        kv: None,
        desk: None,
        domain,
        fleet,
        sessions: Default::default(),
        started: std::time::Instant::now(),
        cores: (0..core_count)
            .map(|_| CoreShared::new(slot_count, &Default::default()).unwrap())
            .collect(),
        admin,
        failure_bell: Default::default(),
        is_refused: Default::default(),
        addresses: Default::default(),
        address_hasher: Default::default(),
        access_log: None,
        decision_log: None,
        draining: AtomicBool::new(false),
    });
    shared.make_sessions(&shared.config());
    Parts {
        shared,
        publisher: Some(publisher),
        admin_rx: Some(admin_rx),
        reader,
    }
}

/// What the stand-ins for cores were told.
#[derive(Default)]
pub struct Told {
    pub replies: Vec<(u64, AdminReply)>,
    pub purged: Vec<u16>,
    pub flush_count: usize,
    pub drain_count: usize,
    pub stop_count: usize,
}

/// Does what cores do with their messages: forgets at once, and keeps the rest for the test.
pub fn pump(shared: &Shared, told: &mut Told) {
    for core in &shared.cores {
        while let Some(message) = core.take() {
            match message {
                ToCore::Admin { token, reply } => told.replies.push((token, reply)),
                ToCore::Purge(slot) => {
                    told.purged.push(slot.0);
                    core.purged.push(slot);
                }
                ToCore::Flush => told.flush_count += 1,
                ToCore::Stalled(_)
                | ToCore::Recall { .. }
                | ToCore::Configure(_)
                | ToCore::Tokens(_)
                | ToCore::YourTurn
                | ToCore::Rouse => {}
                ToCore::Drain => told.drain_count += 1,
                ToCore::Stop => told.stop_count += 1,
            }
        }
    }
}

/// A worker of its own thread: answers `/health` with a status that can be set and `/v1/models` with a text.
pub struct FakeWorker {
    pub address: SocketAddr,
    pub status: Arc<AtomicU16>,
    pub heads: Arc<Mutex<Vec<String>>>,
    /// Bodies of further paths, each answered with 200.
    pub pages: Arc<Mutex<BTreeMap<String, String>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeWorker {
    pub fn start(models: &str) -> FakeWorker {
        FakeWorker::start_at("127.0.0.1:0".parse().unwrap(), models)
    }

    pub fn start_at(address: SocketAddr, models: &str) -> FakeWorker {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let (status, is_over) = (
            Arc::new(AtomicU16::new(200)),
            Arc::new(AtomicBool::new(false)),
        );
        let heads = Arc::new(Mutex::new(Vec::new()));
        let models = models.to_owned();
        let pages = Arc::new(Mutex::new(BTreeMap::new()));
        let seen = (
            status.clone(),
            is_over.clone(),
            heads.clone(),
            pages.clone(),
        );
        let thread = std::thread::spawn(move || {
            let (status, is_over, heads, pages) = seen;
            for stream in listener.incoming() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                serve(
                    stream.unwrap(),
                    status.load(Ordering::Relaxed),
                    &models,
                    &heads,
                    &pages,
                );
            }
        });
        FakeWorker {
            address,
            status,
            heads,
            pages,
            is_over,
            thread: Some(thread),
        }
    }

    pub fn page(&self, path: &str, body: &str) {
        let mut pages = self.pages.lock().unwrap();
        pages.insert(path.to_owned(), body.to_owned());
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(
    mut stream: TcpStream,
    status: u16,
    models: &str,
    heads: &Mutex<Vec<String>>,
    pages: &Mutex<BTreeMap<String, String>>,
) {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(n) => head.extend_from_slice(&piece[..n]),
        }
    }
    let head = String::from_utf8(head).unwrap();
    let path = head.split(' ').nth(1);
    let page = path.and_then(|path| pages.lock().unwrap().get(path).cloned());
    let (status, body) = match path {
        _ if page.is_some() => (200, page.as_deref().unwrap()),
        Some("/health") => (status, ""),
        Some("/v1/models") if models.is_empty() => (404, ""),
        Some("/v1/models") => (200, models),
        Some("/reset_prefix_cache") => (200, ""),
        _ => (404, ""),
    };
    heads.lock().unwrap().push(head);
    let _ = write!(
        stream,
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
}
