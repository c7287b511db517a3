//! What others notice of an attack: requests at a fixed rate, with their latencies from the moment each was meant to be sent, beside
//! attacks that last. A measurement, run by hand on a quiet machine:
//!
//!     cargo test --release --test attack -- --ignored --nocapture
//!
//! `ATTACK=chunks` runs those whose names hold the word.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::process::*;
use common::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::sleep;

const CHAT: &str = "/v1/chat/completions";
/// Others: so many connections, each with so many requests a second.
const FRIENDS: usize = 8;
const RATE: u32 = 125;
const SECONDS: u32 = 4;
/// Times an interval is measured, without and with the attack by turns.
const ROUNDS: usize = 3;
/// Below it a p99 says more about the machine's timers than about the router.
const FLOOR: Duration = Duration::from_millis(1);

/// What goes on for as long as an attack does. Connections are opened by `n`, their number in the attack.
#[derive(Clone, Copy)]
struct Attack {
    name: &'static str,
    connections: usize,
    /// What is said at first, and again and again: bytes, and how long to wait after them.
    opening: fn() -> Vec<u8>,
    then: fn() -> (Vec<u8>, Duration),
}

const NEVER: Duration = Duration::from_secs(3600);

fn head_of(fields: &str) -> Vec<u8> {
    format!("POST {CHAT} HTTP/1.1\r\nHost: r\r\n{fields}").into_bytes()
}

fn attacks() -> Vec<Attack> {
    let all = [
        Attack {
            name: "idle",
            connections: 15_000,
            opening: Vec::new,
            then: || (Vec::new(), NEVER),
        },
        Attack {
            name: "heads at a byte a second",
            connections: 2_000,
            opening: || head_of("X-Slow: "),
            then: || (b"s".to_vec(), Duration::from_secs(1)),
        },
        Attack {
            name: "bodies at a byte a second",
            connections: 2_000,
            opening: || head_of("Content-Length: 100000\r\n\r\n{"),
            then: || (b" ".to_vec(), Duration::from_secs(1)),
        },
        Attack {
            name: "chunks of a byte a second",
            connections: 2_000,
            opening: || head_of("Transfer-Encoding: chunked\r\n\r\n"),
            then: || (b"1\r\n \r\n".to_vec(), Duration::from_secs(1)),
        },
        Attack {
            name: "1 GB announced and never sent",
            connections: 2_000,
            opening: || head_of("Content-Length: 1000000000\r\n\r\n{"),
            then: || (Vec::new(), NEVER),
        },
        Attack {
            name: "500 MB announced and never sent",
            connections: 2_000,
            opening: || head_of("Content-Length: 500000000\r\n\r\n{"),
            then: || (Vec::new(), NEVER),
        },
        Attack {
            name: "floods of header fields",
            connections: 40,
            opening: Vec::new,
            then: || {
                let fields = "X-Flood: ffffffffffffffffffffffffffffffff\r\n".repeat(2_000);
                (head_of(&fields), Duration::from_millis(200))
            },
        },
        Attack {
            name: "bodies of 10,000 one-byte chunks",
            connections: 20,
            opening: Vec::new,
            then: || {
                let chunks = b"1\r\n \r\n".repeat(10_000);
                let head = head_of("Transfer-Encoding: chunked\r\n\r\n");
                (
                    [head, chunks, b"0\r\n\r\n".to_vec()].concat(),
                    Duration::from_secs(1),
                )
            },
        },
        Attack {
            name: "what is no HTTP",
            connections: 40,
            opening: Vec::new,
            then: || (vec![0x16; 600], Duration::from_millis(100)),
        },
    ];
    let wanted = std::env::var("ATTACK").unwrap_or_default();
    all.into_iter()
        .filter(|attack| attack.name.contains(&wanted))
        .collect()
}

/// One attacker: whatever the router does with its connection, it comes again.
async fn attacker(n: usize, to: SocketAddr, attack: Attack) {
    let mut scratch = vec![0; 16_384];
    loop {
        let mut connection = connect(n, to).await;
        let mut saying = (attack.opening)();
        let mut next = Duration::ZERO;
        loop {
            if !saying.is_empty() && connection.write_all(&saying).await.is_err() {
                break;
            }
            let until = sleep(next);
            tokio::pin!(until);
            let is_over = loop {
                tokio::select! {
                    got = connection.read(&mut scratch) => if !matches!(got, Ok(1..)) { break true },
                    () = &mut until => break false,
                }
            };
            if is_over {
                // At the pace of the attack, not at that of the refusals.
                until.await;
                break;
            }
            (saying, next) = (attack.then)();
        }
    }
}

/// Requests at a fixed rate on one connection; the latencies, each from when it was due.
fn friend(n: usize, to: SocketAddr) -> Vec<Duration> {
    let mut connection = TcpStream::connect(to).expect("a friend is let in");
    connection.set_nodelay(true).unwrap();
    connection
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let body = format!(
        r#"{{"model":"mock","max_tokens":1,"messages":[{{"role":"user","content":"friend {n}"}}]}}"#
    );
    let request = post(CHAT, body.as_bytes());
    let gap = Duration::from_secs(1) / RATE;
    let start = Instant::now() + gap.mul_f64(n as f64 / FRIENDS as f64);
    let mut buffer = vec![0; 16_384];
    (0..RATE * SECONDS)
        .map(|k| {
            let due = start + gap * k;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            connection.write_all(&request).unwrap();
            let mut got = 0;
            while !buffer[..got].ends_with(b"}") {
                let more = connection.read(&mut buffer[got..]).expect("an answer");
                assert!(more > 0, "a friend's connection was closed");
                got += more;
            }
            assert!(buffer.starts_with(b"HTTP/1.1 200 "));
            due.elapsed()
        })
        .collect()
}

/// p50, p99 and the longest of an interval.
fn measure(to: SocketAddr) -> [Duration; 3] {
    let threads: Vec<_> = (0..FRIENDS)
        .map(|n| std::thread::spawn(move || friend(n, to)))
        .collect();
    let mut all: Vec<Duration> = threads
        .into_iter()
        .flat_map(|t| t.join().unwrap())
        .collect();
    all.sort_unstable();
    let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize];
    [at(0.5), at(0.99), at(1.0)]
}

fn router() -> (Process, RouterProcess) {
    let (workers, urls) = mock_workers(2, "instant");
    let mut args = vec!["--cores", "1", "--port", "0", "--prometheus-port", "0"];
    args.extend([
        "--max-connections",
        "19000",
        "--max-payload-size",
        "600000000",
        "--worker-urls",
    ]);
    args.extend(urls.iter().map(String::as_str));
    (workers, RouterProcess::start(corelane(&args)))
}

#[test]
#[ignore = "a measurement, on a quiet machine"]
fn others_keep_their_p99_within_twice_what_it_is_without_the_attack() {
    let runtime = Runtime::new().unwrap();
    let mut failed = Vec::new();
    for attack in attacks() {
        let (_workers, router) = router();
        runtime.block_on(router.until_healthy());
        let mut rounds: Vec<[[Duration; 3]; 2]> = (0..ROUNDS)
            .map(|_| {
                let without = measure(router.address);
                let mut attackers = JoinSet::new();
                for n in 0..attack.connections {
                    attackers.spawn_on(attacker(n, router.address, attack), runtime.handle());
                }
                // Connections are made first; that is an attack of its own, and over soon.
                std::thread::sleep(Duration::from_millis(500 + attack.connections as u64 / 4));
                let with = measure(router.address);
                drop(attackers);
                runtime.block_on(router.until_load_is(0, Duration::from_secs(20)));
                [without, with]
            })
            .collect();
        let ratio = |round: &[[Duration; 3]; 2]| {
            let [without, with] = round.map(|interval| interval[1].max(FLOOR));
            with.as_secs_f64() / without.as_secs_f64()
        };
        rounds.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
        let median = rounds[ROUNDS / 2];
        println!(
            "{:<34} {:>6} connections: p50/p99/max without {:.0?}, with {:.0?}: p99 x {:.2}",
            attack.name,
            attack.connections,
            median[0],
            median[1],
            ratio(&median)
        );
        if ratio(&median) > 2.0 {
            failed.push(attack.name);
        }
    }
    assert!(failed.is_empty(), "p99 more than doubled: {failed:?}");
}

// ---- more connections than a process may have ----

/// Routers at one port, and processes of clients: each with fewer descriptors than a process may have here (20,000).
const PROCESSES: usize = 6;
const IDLE_EACH: usize = 16_700;

/// Not a test: the body of a client process of the one below.
#[test]
#[ignore = "a process of a_hundred_thousand_idle_connections_at_one_port"]
fn idle_clients() {
    let Ok(to) = std::env::var("IDLE_TO") else {
        return;
    };
    let to: SocketAddr = to.parse().unwrap();
    Runtime::new().unwrap().block_on(async {
        let mut connections = Vec::new();
        for n in 0..IDLE_EACH {
            connections.push(connect(n, to).await);
        }
        println!("all open");
        let mut end = Vec::new();
        tokio::io::stdin().read_to_end(&mut end).await.unwrap();
    });
}

#[test]
#[ignore = "a measurement, on a quiet machine"]
fn a_hundred_thousand_idle_connections_at_one_port_leave_others_their_p99() {
    let runtime = Runtime::new().unwrap();
    let (_workers, urls) = mock_workers(2, "instant");
    let mut port = "0".to_owned();
    let routers: Vec<RouterProcess> = (0..PROCESSES)
        .map(|_| {
            let mut args = vec!["--cores", "1", "--port", &port, "--prometheus-port", "0"];
            args.extend([
                "--reuse-port",
                "--max-connections",
                "19000",
                "--worker-urls",
            ]);
            args.extend(urls.iter().map(String::as_str));
            let router = RouterProcess::start(corelane(&args));
            port = router.address.port().to_string();
            router
        })
        .collect();
    let to = routers[0].address;
    let rss = || -> u64 {
        routers
            .iter()
            .map(|router| status_bytes(router.id(), "VmRSS:"))
            .sum()
    };
    let without = measure(to);
    let before = rss();
    let clients: Vec<Process> = (0..PROCESSES)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--ignored", "--exact", "idle_clients", "--nocapture"]);
            command.env("IDLE_TO", to.to_string());
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            Process(command.spawn().unwrap())
        })
        .collect();
    let wanted = (PROCESSES * IDLE_EACH) as f64;
    let open = || async {
        let mut sum = 0.0;
        for router in &routers {
            sum += router.series("corelane_connections_open").await;
        }
        sum
    };
    let end = Instant::now() + Duration::from_secs(60);
    while runtime.block_on(open()) < wanted {
        assert!(Instant::now() < end, "they are not all open in a minute");
        std::thread::sleep(Duration::from_millis(200));
    }
    let with = measure(to);
    let each = (rss() - before) as f64 / wanted;
    let ratio = with[1].max(FLOOR).as_secs_f64() / without[1].max(FLOOR).as_secs_f64();
    println!(
        "{wanted} idle connections: p50/p99/max without {without:.0?}, with {with:.0?}: p99 x {ratio:.2}; {each:.0} bytes each"
    );
    drop(clients);
    assert!(ratio <= 2.0);
}
