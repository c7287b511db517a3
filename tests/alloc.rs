//! How often a small request on the plain path allocates on its core's thread after the warm-up: counted by an allocator that looks at
//! the calling thread's name. A process of its own, as the allocator is the process's.
//!
//! Not once: a request's state, its message and the hashes that it teaches lie where those of earlier ones lay; its id and its target lie
//! within that state, if they are short.
//!
//! `CORELANE_ALLOC_TRACE=1` prints where each allocation came from.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static TRACES: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);
static SITES: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

thread_local! {
    static IS_BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is the thread of a core.
fn is_core() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, the buffer's length (prctl(2)).
    let result = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    result == 0 && name.starts_with(b"core-")
}

fn note(bytes: usize) {
    if !COUNTS.load(Ordering::Relaxed) || IS_BUSY.get() || !is_core() {
        return;
    }
    COUNT.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
    if TRACES.load(Ordering::Relaxed) {
        // What is allocated to say so does not count.
        IS_BUSY.set(true);
        let trace = std::backtrace::Backtrace::force_capture().to_string();
        let ours = trace
            .lines()
            .filter(|line| line.contains("corelane::") || line.contains("shards::"));
        let place: Vec<&str> = ours.map(str::trim).take(5).collect();
        if let Ok(mut sites) = SITES.lock() {
            *sites
                .entry(format!("{bytes} bytes: {}", place.join(" < ")))
                .or_default() += 1;
        }
        IS_BUSY.set(false);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise, handed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        note(bytes);
        // SAFETY: the caller's promise, handed on.
        unsafe { System.realloc(memory, layout, bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, handed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A worker that answers each piece it gets: requests here are small, and one at a time.
async fn answer(listener: TcpListener) {
    const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{\"ok\":true}";
    while let Ok((mut stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let mut piece = vec![0; 16 * 1024];
            while stream.read(&mut piece).await.is_ok_and(|count| count > 0) {
                stream.write_all(ANSWER).await.unwrap();
            }
        });
    }
}

/// So many requests, one after the other on one connection, each with a prompt of its own of 200 bytes.
async fn ask(stream: &mut TcpStream, from: u64, count: u64) {
    let mut answer = [0; 1024];
    for number in from..from + count {
        let text = format!("{number:020}{}", "p".repeat(180));
        stream
            .write_all(&post("/v1/chat/completions", &chat(&text)))
            .await
            .unwrap();
        let mut length = 0;
        while !answer[..length].ends_with(b"{\"ok\":true}") {
            let more = stream.read(&mut answer[length..]).await.unwrap();
            assert!(more > 0, "the router closed");
            length += more;
        }
        assert!(answer.starts_with(b"HTTP/1.1 200 "));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_small_request_allocates_nothing_on_its_core() {
    const COUNTED: u64 = 2000;
    let mut urls = Vec::new();
    for _ in 0..2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        urls.push(format!("http://{}", listener.local_addr().unwrap()));
        tokio::spawn(answer(listener));
    }
    let flags = [
        "--cores",
        "1",
        "--health-check-interval-secs",
        "3600",
        "--policy",
        "cache_aware",
    ];
    let router = router_before(&urls, &flags).await;
    let mut stream = TcpStream::connect(router.address).await.unwrap();
    ask(&mut stream, 0, 3000).await;
    TRACES.store(
        std::env::var_os("CORELANE_ALLOC_TRACE").is_some(),
        Ordering::Relaxed,
    );
    COUNTS.store(true, Ordering::Relaxed);
    ask(&mut stream, 3000, COUNTED).await;
    COUNTS.store(false, Ordering::Relaxed);
    let (count, bytes) = (COUNT.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
    for (site, count) in SITES.lock().unwrap().iter() {
        println!("{count} x {site}");
    }
    println!("{count} allocations, {bytes} bytes, of {COUNTED} requests");
    // Tables that double now and then are no allocations of a request.
    assert!(
        count <= COUNTED / 100,
        "{count} allocations, {bytes} bytes, of {COUNTED} requests"
    );
}
