//! Question: what does a request cost a router that does nothing? A bare io_uring loop copies bytes between each client's connection
//! and one of its own to a worker, looks at none of them, and decides nothing; Corelane does its work beside it under the same load.
//!
//! Workload: 200 B chat prompts, 64 connections, saturated; both on CPU 0 by turns, `corelane bench` and a worker that has its answer
//! ready on the last CPU. Medians of pairs of slices; CPU is that of the whole process. The bound is 1.15 (a machine with two CPUs at least).
//!
//! `cargo bench --bench relay_floor`; after `--`: `--seconds 30`, `--prompt-bytes 16384`, any other flag of `corelane bench`; or
//! `worker PORT` for the worker alone, `relay PORT WORKER_PORT` for the loop alone.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, Fd};
use io_uring::{IoUring, cqueue, opcode, squeue};
use serde_json::Value;

const BOUND: f64 = 1.15;
const BUFFER_COUNT: u16 = 1024;
const BUFFER_BYTES: usize = 16 * 1024;

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let port = |at: usize| {
        args.get(at)
            .and_then(|text| text.parse::<u16>().ok())
            .unwrap_or(0)
    };
    match args.first().map(String::as_str) {
        Some("worker") => worker(port(1)),
        Some("relay") => relay(port(1), port(2)),
        _ => compare(&args),
    }
}

// ---- the comparison ----

/// A process that ends, by its id, with this one.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts one that says on a line of its own where it listens.
fn start(command: &mut Command) -> io::Result<(Process, String)> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    let out = child
        .stdout
        .take()
        .ok_or_else(|| io::Error::other("no output"))?;
    BufReader::new(out).read_line(&mut line)?;
    Ok((Process(child), line.trim().to_owned()))
}

/// Starts a router before a worker; its URL.
fn start_router(program: &str, worker: &str) -> io::Result<(Process, String)> {
    let flags = [
        "--port",
        "0",
        "--prometheus-port",
        "0",
        "--cores",
        "1",
        "--health-check-interval-secs",
        "3600",
        "--worker-urls",
        worker,
    ];
    let mut child = Command::new(program)
        .args(flags)
        .stderr(Stdio::piped())
        .spawn()?;
    let log = child
        .stderr
        .take()
        .ok_or_else(|| io::Error::other("no output"))?;
    let process = Process(child);
    let mut lines = BufReader::new(log).lines().map_while(Result::ok);
    let address =
        lines.find_map(|line| Some(line.split("address=").nth(1)?.split(' ').next()?.to_owned()));
    let address = address.ok_or_else(|| io::Error::other("the router did not start"))?;
    std::thread::spawn(move || lines.for_each(drop));
    // The worker is probed before it gets requests.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !is_healthy(&address)? {
        if std::time::Instant::now() > end {
            return Err(io::Error::other("the worker is not ready in 10 s"));
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok((process, format!("http://{address}")))
}

fn is_healthy(address: &str) -> io::Result<bool> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200 "))
}

fn compare(flags: &[String]) -> io::Result<()> {
    let own = std::env::current_exe()?;
    let program = env!("CARGO_BIN_EXE_corelane");
    let (_worker, worker) = start(Command::new(&own).args(["worker", "0"]))?;
    let worker_port = worker.rsplit(':').next().unwrap_or_default();
    let (relay, relay_url) = start(Command::new(&own).args(["relay", "0", worker_port]))?;
    let (router, router_url) = start_router(program, &worker)?;
    let pids = [relay.0.id(), router.0.id()].map(|pid| pid.to_string());
    let mut bench = Command::new(program);
    bench.args([
        "bench",
        "--json",
        "--compare",
        &relay_url,
        &router_url,
        "--pid",
        &pids[0],
        "--pid",
        &pids[1],
    ]);
    if !flags.iter().any(|flag| flag == "--seconds") {
        bench.args(["--seconds", "20"]);
    }
    let output = bench.args(flags).stderr(Stdio::inherit()).output()?;
    let report: Value = serde_json::from_slice(&output.stdout).map_err(io::Error::other)?;
    println!(
        "machine: {}; commit: {}",
        text(&report["machine"]),
        text(&report["commit"])
    );
    println!("{}", text(&report["command"]));
    for (name, target) in ["loop", "router"]
        .iter()
        .zip(report["targets"].as_array().into_iter().flatten())
    {
        println!(
            "{name:<8} {:>8} us CPU an answer, {:>8} answers/s, total p50 {} ms, p99 {} ms, wrong {}, generator busy {}, limits {}",
            target["cpu_us_per_answer"].to_string(),
            target["answers_per_s"].to_string(),
            target["total_ms"]["p50"],
            target["total_ms"]["p99"],
            target["wrong"],
            target["generator"]["busy_share"],
            target["generator"]["limits"]
        );
    }
    let ratio = &report["second_to_first"]["cpu_us_per_answer"];
    println!(
        "CPU an answer, router to loop: {} (95 %: {}; bound {BOUND})",
        ratio["median"], ratio["interval_95"]
    );
    let (median, is_good) = (ratio["median"].as_f64(), report["is_good"] == true);
    match median {
        Some(median) if is_good && median <= BOUND => println!("within the bound"),
        Some(_) if is_good => println!("ABOVE THE BOUND"),
        _ => {
            return Err(io::Error::other(
                "answers were wrong, or nothing was measured",
            ));
        }
    }
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

fn pin(to_last: bool) {
    let mut cores = core_affinity::get_core_ids().unwrap_or_default();
    cores.sort_by_key(|core| core.id);
    let core = if to_last {
        cores.pop()
    } else {
        cores.first().copied()
    };
    if let Some(core) = core {
        core_affinity::set_for_current(core);
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    // Accepted connections inherit it.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)).into())?;
    socket.listen(4096)?;
    let listener: TcpListener = socket.into();
    println!("http://{}", listener.local_addr()?);
    io::stdout().flush()?;
    Ok(listener)
}

// ---- what both need of io_uring ----

/// A ring with one group of provided buffers.
struct Wires {
    ring: IoUring,
    entries: NonNull<u8>,
    memory: NonNull<u8>,
    tail: u16,
}

const ACCEPT: u64 = 1 << 56;
const RECEIVE: u64 = 2 << 56;
const SEND: u64 = 3 << 56;

impl Wires {
    fn new() -> io::Result<Wires> {
        let ring = IoUring::builder()
            .setup_cqsize(16 * 1024)
            .setup_coop_taskrun()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(4096)?;
        let map = |bytes: usize| {
            // SAFETY: a fresh anonymous mapping; it lives as long as the process.
            let start = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                )
            };
            NonNull::new(start.cast::<u8>())
                .filter(|_| start != libc::MAP_FAILED)
                .ok_or_else(io::Error::last_os_error)
        };
        let entries = map(usize::from(BUFFER_COUNT) * size_of::<BufRingEntry>())?;
        let memory = map(usize::from(BUFFER_COUNT) * BUFFER_BYTES)?;
        // SAFETY: the entries are page-aligned, as many as is said, and are never unmapped.
        unsafe {
            ring.submitter().register_buf_ring_with_flags(
                entries.as_ptr() as u64,
                BUFFER_COUNT,
                0,
                0,
            )?
        };
        let mut wires = Wires {
            ring,
            entries,
            memory,
            tail: 0,
        };
        (0..BUFFER_COUNT).for_each(|id| wires.give(id));
        Ok(wires)
    }

    fn at(&self, id: u16) -> *mut u8 {
        // SAFETY: an id is below the count, so the offset lies in the mapping.
        unsafe { self.memory.as_ptr().add(usize::from(id) * BUFFER_BYTES) }
    }

    /// Gives a buffer to the kernel.
    fn give(&mut self, id: u16) {
        let entries: *mut BufRingEntry = self.entries.as_ptr().cast();
        // SAFETY: the index is within the ring; the kernel reads the entry only behind the tail that is stored after it.
        unsafe {
            let entry = &mut *entries.add(usize::from(self.tail % BUFFER_COUNT));
            entry.set_addr(self.at(id) as u64);
            entry.set_len(BUFFER_BYTES as u32);
            entry.set_bid(id);
            self.tail = self.tail.wrapping_add(1);
            (*BufRingEntry::tail(entries).cast::<AtomicU16>()).store(self.tail, Ordering::Release);
        }
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: entries name buffers of the mapping or what is static, and descriptors that stay open.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit()?;
        }
        Ok(())
    }

    fn receive(&mut self, fd: i32, name: u64) -> io::Result<()> {
        self.push(
            &opcode::RecvMulti::new(Fd(fd), 0)
                .build()
                .user_data(RECEIVE | name),
        )
    }

    fn send(&mut self, fd: i32, start: *const u8, length: u32, name: u64) -> io::Result<()> {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        self.push(
            &opcode::Send::new(Fd(fd), start, length)
                .flags(flags)
                .build()
                .user_data(SEND | name),
        )
    }

    fn accept(&mut self, listener: &TcpListener) -> io::Result<()> {
        self.push(
            &opcode::AcceptMulti::new(Fd(listener.as_raw_fd()))
                .build()
                .user_data(ACCEPT),
        )
    }

    /// Sleeps until something has happened: (name, result, buffer, goes on).
    fn turn(&mut self, out: &mut Vec<(u64, i32, Option<u16>, bool)>) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(e)
                if e.raw_os_error() != Some(libc::EINTR)
                    && e.raw_os_error() != Some(libc::EBUSY) =>
            {
                return Err(e);
            }
            _ => {}
        }
        let entries = self.ring.completion();
        out.extend(entries.map(|e| {
            (
                e.user_data(),
                e.result(),
                cqueue::buffer_select(e.flags()),
                cqueue::more(e.flags()),
            )
        }));
        Ok(())
    }
}

// ---- the loop that only copies ----

/// One side of a pair: the other one has the number with the last bit turned.
#[derive(Default)]
struct Side {
    fd: i32,
    /// Buffers whose bytes go out here; the first one is on its way.
    sending: VecDeque<(u16, u32)>,
    is_open: bool,
}

fn relay(port: u16, worker_port: u16) -> io::Result<()> {
    pin(false);
    let listener = listen(port)?;
    let mut wires = Wires::new()?;
    wires.accept(&listener)?;
    let mut sides: Vec<Side> = Vec::new();
    let mut happened = Vec::new();
    loop {
        wires.turn(&mut happened)?;
        for (name, result, buffer, goes_on) in happened.drain(..) {
            let at = (name & 0xffff_ffff) as usize;
            match name & (0xff << 56) {
                ACCEPT if result >= 0 => {
                    let worker = TcpStream::connect((Ipv4Addr::LOCALHOST, worker_port))?;
                    worker.set_nodelay(true)?;
                    let worker_fd = std::os::fd::IntoRawFd::into_raw_fd(worker);
                    for fd in [result, worker_fd] {
                        wires.receive(fd, sides.len() as u64)?;
                        sides.push(Side {
                            fd,
                            is_open: true,
                            ..Side::default()
                        });
                    }
                }
                RECEIVE => {
                    if let (Some(id), 1..) = (buffer, result) {
                        let other = &mut sides[at ^ 1];
                        other.sending.push_back((id, result as u32));
                        if other.sending.len() == 1 {
                            let (fd, start) = (other.fd, wires.at(id));
                            wires.send(fd, start, result as u32, (at ^ 1) as u64)?;
                        }
                    } else if result == -libc::ENOBUFS {
                        wires.receive(sides[at].fd, at as u64)?;
                        continue;
                    } else {
                        for side in [at, at ^ 1] {
                            if std::mem::take(&mut sides[side].is_open) {
                                // SAFETY: the descriptor is this pair's; places are not used again.
                                unsafe { libc::shutdown(sides[side].fd, libc::SHUT_RDWR) };
                            }
                        }
                        continue;
                    }
                    if !goes_on && sides[at].is_open {
                        wires.receive(sides[at].fd, at as u64)?;
                    }
                }
                SEND => {
                    if let Some((id, _)) = sides[at].sending.pop_front() {
                        wires.give(id);
                    }
                    if let Some((id, length)) = sides[at].sending.front().copied() {
                        let (fd, start) = (sides[at].fd, wires.at(id));
                        wires.send(fd, start, length, at as u64)?;
                    }
                }
                _ => {}
            }
        }
    }
}

// ---- the worker that has its answer ready ----

const BODY: &str = r#"{"id":"chatcmpl-0","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":{"role":"assistant","content":"one two three four five six seven eight nine ten eleven twelve thirteen fourteen"},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":50,"total_tokens":66,"completion_tokens":16}}"#;

/// How much of a request is still to come.
#[derive(Clone, Copy, Default)]
struct Peer {
    fd: i32,
    left: usize,
}

fn worker(port: u16) -> io::Result<()> {
    pin(true);
    let answer: &'static str = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    )
    .leak();
    let listener = listen(port)?;
    let mut wires = Wires::new()?;
    wires.accept(&listener)?;
    let mut peers: Vec<Peer> = Vec::new();
    let mut happened = Vec::new();
    loop {
        wires.turn(&mut happened)?;
        for (name, result, buffer, goes_on) in happened.drain(..) {
            let at = (name & 0xffff_ffff) as usize;
            match name & (0xff << 56) {
                ACCEPT if result >= 0 => {
                    wires.receive(result, peers.len() as u64)?;
                    peers.push(Peer {
                        fd: result,
                        left: 0,
                    });
                }
                RECEIVE => {
                    if let (Some(id), 1..) = (buffer, result) {
                        // SAFETY: the kernel gave this buffer up and has written so many bytes into it.
                        let bytes =
                            unsafe { std::slice::from_raw_parts(wires.at(id), result as usize) };
                        let is_whole = take(&mut peers[at], bytes);
                        wires.give(id);
                        if is_whole {
                            wires.send(
                                peers[at].fd,
                                answer.as_ptr(),
                                answer.len() as u32,
                                at as u64,
                            )?;
                        }
                    }
                    if result == -libc::ENOBUFS || (result > 0 && !goes_on) {
                        wires.receive(peers[at].fd, at as u64)?;
                    } else if result <= 0 {
                        // SAFETY: the descriptor is this peer's, and its place is not used again.
                        unsafe { libc::close(peers[at].fd) };
                    }
                }
                _ => {}
            }
        }
    }
}

/// Takes bytes of a request whose head comes in one piece; whether that was all of it.
fn take(peer: &mut Peer, bytes: &[u8]) -> bool {
    if peer.left > 0 {
        peer.left = peer.left.saturating_sub(bytes.len());
        return peer.left == 0;
    }
    let Some(end) = memchr::memmem::find(bytes, b"\r\n\r\n") else {
        return false;
    };
    let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| {
        line.strip_prefix("content-length:")?
            .trim()
            .parse::<usize>()
            .ok()
    });
    peer.left = (end + 4 + length.unwrap_or(0)).saturating_sub(bytes.len());
    peer.left == 0
}
