//! Question: from a scanned body to a chosen worker, what does a request's decision cost: `chain`, `find`, `decide`?
//!
//! Workload: 4, 64 and 1,024 workers; chat prompts of 200 B, 16 KiB and 400 KiB. The tree is warm: a system prompt of
//! an eighth of the prompt that every worker holds, and on top of it up to 4,096 conversations (400,000 blocks at
//! most), each held by one worker. The request is the next turn of one of eight of them, its bytes in cache, as they
//! are when it has just been received and scanned. Loads are uneven. Four outcomes:
//! - `affinity`: the worker that holds the conversation has room; the usual case;
//! - `shed`: that worker is overloaded: the fleet's least load, a second look-up, the least loaded;
//! - `spread`: a new conversation on a system prompt of half the prompt: the least loaded, holders first;
//! - `cold`: nothing is known of the prompt: the least loaded.
//!
//! Bounds: 1 us + 0.2 us per KiB with 64 workers, and 2 us more with 1,024.
//!
//! The policies that keep keys together: from a request's head (ten fields, the session's the last), or its 16 KiB prompt,
//! to a chosen worker, 8 and 1,024 workers, load looked at and not; for `sticky_least_loaded` with 4,096 sessions bound.
//! The median, as a binary search in a ring of 160 points a worker costs what it misses in the caches; each request is of
//! another session. Bounds: 1 us, and 2 us more with 1,024 workers.
//!
//! `expected_wait`, taught: 16 KiB prompts of a conversation that one worker holds, the system prompt held by all, 64 and 1,024 workers with
//! uneven loads. Every worker has its price, in two passes. Bounds beside the chain: 1 us, and 2 us more with 1,024 workers.
//!
//! What is written down of a decision: into the ring of `/debug/decisions`, and, with `--decision-log`, into the mailbox of the
//! thread that writes (which runs), with the model's hash and the prompt's sketch. 16 KiB prompts, 64 and 1,024 workers; with
//! and without in turn, medians. Bound: 0.2 us more with the log.
//!
//! Run: `cargo bench --bench decision`

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use corelane::decisions::{self, Decided, HELD_COUNT_MAX, Held, Recent, Sketch};
use corelane::route::{
    BLOCK_BYTES, Batches, Candidates, Decision, Fields, Home, Key, KeySeed, PolicyKind, Reason,
    Rng, Role, Sample, Settings, TreePrefixes, Turn, bytes_of_blocks, chain, decide, home_for_new,
    lessons, name_of, prefix_hash, scan, session_hash,
};
use corelane::shared::Route;
use divan::Bencher;
use shards::{
    Books, Domain, LoadGuard, Now, PrefixHash, Reader, Sessions, Slot, Tree, TreeLimits, WorkerId,
};

const WORKERS: [usize; 3] = [4, 64, 1024];
const SIZES: [usize; 3] = [200, 16 * 1024, 400 * 1024];
const OUTCOMES: [Outcome; 4] = [
    Outcome::Affinity,
    Outcome::Shed,
    Outcome::Spread,
    Outcome::Cold,
];
const SEED: u64 = 0xdec1de;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Affinity,
    Shed,
    Spread,
    Cold,
}

fn main() {
    println!(
        "decision: chain, find and decide. Bounds: 1 us + 0.2 us per KiB with 64 workers, 2 us more with 1,024"
    );
    println!("machine: {}; commit: {}", machine(), commit());
    divan::main();
    for outcome in OUTCOMES {
        for workers in WORKERS {
            for size in SIZES {
                report(outcome, workers, size);
            }
        }
    }
    for policy in PolicyKind::ALL {
        if policy.uses_session() || policy.uses_ring() {
            for workers in [8, 1024] {
                report_hashed(policy, workers);
            }
        }
    }
    for workers in [64, 1024] {
        report_waits(workers);
    }
    for workers in [64, 1024] {
        report_written(workers);
    }
    for workers in [8, 1024, 4096] {
        let named = (0..workers).map(|n| (Slot(n), name_of(&format!("http://10.0.0.1:{n}"))));
        let candidates: Candidates = named.collect();
        let start = Instant::now();
        black_box(candidates.with_ring());
        let cost = start.elapsed().as_secs_f64() * 1e3;
        println!("a ring of {workers} workers, for the control thread: {cost:.2} ms");
    }
}

/// `expected_wait` when it has learnt.
fn report_waits(workers: usize) {
    let mut world = World::new(Outcome::Affinity, workers, 16 * 1024);
    world.settings.policy = PolicyKind::ExpectedWait;
    for n in 0..20 * workers as u64 {
        let bytes = (n % 7 + 1) * 10_000;
        let sample = Sample {
            bytes,
            requests: (n % 3) as u32 + 1,
            streams: (n % 31) as u32,
            own_bytes: 10_000,
            seconds: bytes as f64 * 1e-6,
        };
        let slot = Slot((n % workers as u64) as u16);
        world.turn.waits.observe(slot, sample);
    }
    let cost = median_us(|| world.next()) - median_us(|| world.next_chain());
    let bound = if workers > 64 { 3.0 } else { 1.0 };
    let verdict = if cost <= bound { "within" } else { "OVER" };
    println!(
        "expected_wait, {workers} workers: p50 {cost:.2} us beside the chain, {verdict} {bound:.2} us"
    );
}

/// What a decision costs that is written down, and one that is not.
fn report_written(workers: usize) {
    let path = std::env::temp_dir().join(format!("corelane-bench-{}", std::process::id()));
    let (log, writer, mut pens) =
        decisions::start(&path, 1, 1, shards::SLOT_COUNT_MAX).expect("a file");
    let mut world = World::new(Outcome::Affinity, workers, 16 * 1024);
    let (mut recent, mut sketch) = (Recent::new(4096), Sketch::NONE);
    let mut costs = [const { Vec::new() }; 3];
    for round in 0..6000 {
        // A few at a time, so that the mailbox has room; the order changes.
        for kind in [round % 3, (round + 1) % 3, (round + 2) % 3] {
            let start = Instant::now();
            for _ in 0..4 {
                let decision = world.next();
                if kind > 0 {
                    let mut decided = world.decided(&decision);
                    if kind > 1 {
                        decided.model = name_of("a-model/of-usual-length");
                        sketch.write(&world.chain, decision.matched_blocks);
                        assert!(pens[0].decided(&decided, &sketch), "there is room");
                    }
                    black_box(recent.add(&decided));
                }
            }
            costs[kind].push(start.elapsed().as_nanos() as u64 / 4);
        }
        if round % 100 == 99 {
            std::thread::sleep(std::time::Duration::from_millis(25));
        }
    }
    drop(writer);
    let _ = std::fs::remove_file(path);
    assert_eq!(log.lost_count(), 0);
    let [none, ring, both] = costs.map(|mut costs| {
        costs.sort_unstable();
        costs[costs.len() / 2]
    });
    let (ring, both) = (ring.saturating_sub(none), both.saturating_sub(none));
    let verdict = if both <= 200 { "within" } else { "OVER" };
    println!(
        "written down, {workers} workers: p50 {none} ns without, {ring} ns more for the ring, {both} ns more with the log, {verdict} 200 ns"
    );
}

/// The policies that keep keys together.
fn report_hashed(policy: PolicyKind, workers: usize) {
    let prefix = policy == PolicyKind::PrefixHash;
    let sticky = policy == PolicyKind::StickyLeastLoaded;
    let factors: &[f64] = if sticky { &[0.0] } else { &[0.0, 1.25] };
    for factor in factors {
        let mut world = Hashed::new(policy, workers, *factor);
        let cost = median_us(|| world.next());
        let bound = if workers > 64 { 3.0 } else { 1.0 };
        let verdict = if cost <= bound { "within" } else { "OVER" };
        let key = if prefix { "prompt" } else { "session" };
        println!(
            "{}, {workers} workers, factor {factor}: p50 {cost:.2} us (with the hash of the {key}), {verdict} {bound:.2} us",
            policy.name()
        );
    }
}

/// A fleet with a ring, and requests of many sessions.
struct Hashed {
    books: &'static Books,
    candidates: Candidates,
    sessions: Sessions,
    /// Heads, and one body with its fields.
    heads: Vec<Vec<u8>>,
    body: (Vec<u8>, Fields),
    settings: Settings,
    turn: Turn,
    count: usize,
    _guards: Vec<LoadGuard>,
}

const NOW: Now = Now {
    secs: 1,
    ttl_secs: 7200,
};

impl Hashed {
    fn new(policy: PolicyKind, workers: usize, factor: f64) -> Hashed {
        let mut rng = Rng::new(SEED);
        let books: &'static Books = Box::leak(Box::new(Books::new(shards::SLOT_COUNT_MAX)));
        let ids = (0..workers as u16).map(|slot| books.open(Slot(slot)).expect("a free slot"));
        let ids: Vec<WorkerId> = ids.collect();
        let mut guards = Vec::new();
        for id in &ids {
            let load = 1 + rng.below(30);
            guards.extend((0..load).map(|_| LoadGuard::acquire(books, *id, 1).expect("open")));
        }
        let named = ids.iter().enumerate();
        let named = named.map(|(n, id)| (id.slot, name_of(&format!("http://10.0.0.1:{n}"))));
        let body = body("a", &text(&mut rng, 16 * 1024), "");
        let fields = scan(&body).expect("JSON");
        Hashed {
            books,
            candidates: named.collect::<Candidates>().with_ring(),
            sessions: Sessions::new(1 << 20),
            heads: (0..4096).map(head).collect(),
            body: (body, fields),
            settings: Settings {
                policy,
                hash_balance_factor: factor,
                prefix_hash_load_factor: factor,
                ..Settings::default()
            },
            turn: Turn::new(SEED),
            count: 0,
            _guards: guards,
        }
    }

    fn next(&mut self) -> Decision {
        self.count += 1;
        let (body, fields) = &self.body;
        let route = Route::ChatCompletions;
        let hash = match self.settings.policy {
            PolicyKind::PrefixHash => {
                let bytes = self.settings.prefix_hash_bytes;
                // Another seed each time stands for another prompt.
                prefix_hash(KeySeed(self.count as u64), route, body, fields, bytes)
            }
            _ => {
                let head = &self.heads[self.count % self.heads.len()];
                session_hash(KeySeed(SEED), head, Some((body, fields)))
            }
        };
        let hash = hash.expect("a key");
        let key = match self.settings.policy {
            PolicyKind::StickyLeastLoaded => Key::Session(hash, self.home(hash)),
            _ => Key::Hash(hash),
        };
        decide::<TreePrefixes<'_>, _>(
            &self.settings,
            key,
            &self.candidates,
            &[],
            self.books,
            &mut self.turn,
            &mut Vec::new(),
        )
        .expect("candidates")
    }

    fn home(&mut self, hash: u64) -> Home {
        let is_new = self.sessions.find(hash, NOW).is_none();
        let (candidates, sessions, books) = (&self.candidates, &self.sessions, self.books);
        let slot = sessions.find(hash, NOW).unwrap_or_else(|| {
            let rng = &mut self.turn.rng;
            let slot = home_for_new(candidates, sessions, books, |_| true, rng);
            sessions.bind(hash, slot.expect("candidates"), None, NOW)
        });
        Home { slot, is_new }
    }
}

/// What a client sends, the session last.
fn head(n: usize) -> Vec<u8> {
    let mut head = String::new();
    for name in [
        "user-agent",
        "accept",
        "accept-encoding",
        "content-type",
        "authorization",
    ] {
        let _ = write!(head, "{name}: a value of usual length\r\n");
    }
    for name in [
        "x-stainless-lang",
        "x-stainless-os",
        "x-stainless-arch",
        "accept-language",
    ] {
        let _ = write!(head, "{name}: value\r\n");
    }
    let _ = write!(head, "x-claude-code-session-id: 3f6d-{n:032x}\r\n");
    head.into_bytes()
}

/// The median of many runs, in microseconds.
fn median_us<T>(mut run: impl FnMut() -> T) -> f64 {
    // All sessions once: the first request of one is dearer.
    (0..4096).for_each(|_| drop(black_box(run())));
    let mut costs: Vec<u128> = (0..20_000)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..4 {
                black_box(run());
            }
            start.elapsed().as_nanos() / 4
        })
        .collect();
    costs.sort_unstable();
    costs[costs.len() / 2] as f64 / 1e3
}

fn report(outcome: Outcome, workers: usize, size: usize) {
    let mut world = World::new(outcome, workers, size);
    let cost = least_us(|| world.next());
    let chain_cost = least_us(|| world.next_chain());
    let bound = 1.0 + 0.2 * size as f64 / 1024.0 + if workers > 64 { 2.0 } else { 0.0 };
    let verdict = if cost <= bound { "within" } else { "OVER" };
    println!(
        "{outcome:?}, {workers} workers, {size} B: {cost:.2} us (chain alone {chain_cost:.2}), {verdict} {bound:.2} us"
    );
}

#[divan::bench(args = WORKERS, consts = SIZES)]
fn affinity<const SIZE: usize>(bencher: Bencher<'_, '_>, workers: usize) {
    measure(bencher, Outcome::Affinity, workers, SIZE);
}

#[divan::bench(args = WORKERS, consts = SIZES)]
fn shed<const SIZE: usize>(bencher: Bencher<'_, '_>, workers: usize) {
    measure(bencher, Outcome::Shed, workers, SIZE);
}

#[divan::bench(args = WORKERS, consts = SIZES)]
fn spread<const SIZE: usize>(bencher: Bencher<'_, '_>, workers: usize) {
    measure(bencher, Outcome::Spread, workers, SIZE);
}

#[divan::bench(args = WORKERS, consts = SIZES)]
fn cold<const SIZE: usize>(bencher: Bencher<'_, '_>, workers: usize) {
    measure(bencher, Outcome::Cold, workers, SIZE);
}

fn measure(bencher: Bencher<'_, '_>, outcome: Outcome, workers: usize, size: usize) {
    let mut world = World::new(outcome, workers, size);
    bencher.bench_local(|| world.next());
}

/// A fleet with its books and a warm tree, and eight requests that take turns.
struct World {
    tree: Arc<Tree>,
    reader: Reader,
    books: &'static Books,
    candidates: Candidates,
    requests: Vec<(Vec<u8>, Fields)>,
    settings: Settings,
    turn: Turn,
    chain: Vec<PrefixHash>,
    scratch: Vec<Slot>,
    count: usize,
    _guards: Vec<LoadGuard>,
}

impl World {
    fn new(outcome: Outcome, workers: usize, size: usize) -> World {
        let mut rng = Rng::new(SEED);
        // Leaked, as in the router: guards are plain references.
        let books: &'static Books = Box::leak(Box::new(Books::new(shards::SLOT_COUNT_MAX)));
        let ids: Vec<WorkerId> = (0..workers as u16)
            .map(|slot| books.open(Slot(slot)).expect("a free slot"))
            .collect();
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 1 << 30,
            slot_count_max: shards::SLOT_COUNT_MAX,
        };
        let (tree, shards) = shards::tree(2, Arc::clone(&domain), limits);
        let mut world = World {
            tree,
            reader: domain.reader(0),
            books,
            candidates: ids.iter().map(|id| id.slot).collect(),
            requests: Vec::new(),
            settings: Settings::default(),
            turn: Turn::new(SEED),
            chain: Vec::new(),
            scratch: Vec::new(),
            count: 0,
            _guards: Vec::new(),
        };
        let homes = world.warm(shards, &ids, &mut rng, outcome, size);
        for id in &ids {
            let is_hot = outcome == Outcome::Shed && homes.contains(&id.slot);
            let load = if is_hot { 200 } else { 1 + rng.below(30) };
            world._guards.extend(
                (0..load).map(|_| LoadGuard::acquire(books, *id, 1).expect("an open slot")),
            );
        }
        let expected = match outcome {
            Outcome::Affinity => [Reason::Affinity].as_slice(),
            Outcome::Shed => &[Reason::ShedToWarm, Reason::ShedToLeastLoaded],
            Outcome::Spread => &[Reason::SpreadCommonPrefix],
            Outcome::Cold => &[Reason::Cold],
        };
        for _ in 0..8 {
            let decision = world.next();
            // A prompt of one block has no room for a system prompt under the conversation's own blocks.
            assert!(
                size <= 2 * BLOCK_BYTES || expected.contains(&decision.reason),
                "{outcome:?}: {decision:?}"
            );
        }
        world
    }

    /// Teaches system prompt and conversations; gives the homes of those that are asked about.
    fn warm(
        &mut self,
        mut shards: Vec<shards::Shard>,
        ids: &[WorkerId],
        rng: &mut Rng,
        outcome: Outcome,
        size: usize,
    ) -> Vec<Slot> {
        let mut batches = Batches::new(shards.len());
        let mut teach = |world: &mut World, slot| {
            let mut taught = Vec::new();
            let pin = world.reader.pin();
            lessons(
                &world.tree,
                &pin,
                &world.chain,
                slot,
                &mut batches,
                Vec::new,
                |owner, lesson| taught.push((owner, lesson)),
            );
            drop(pin);
            for (owner, lesson) in taught {
                shards[owner].apply(lesson);
                while shards[owner].work(10_000) {}
            }
        };
        let system_bytes = if outcome == Outcome::Spread {
            size / 2
        } else {
            size / 8
        };
        let system = text(rng, system_bytes);
        for id in ids {
            self.chain_of(&body(&system, "", ""));
            teach(self, id.slot);
        }
        let mut homes = Vec::new();
        let conversation_count = (400_000 * BLOCK_BYTES / size).clamp(8, 4096);
        for index in 0..conversation_count {
            let turns = text(rng, size.saturating_sub(system_bytes + 130));
            let is_asked = index % (conversation_count / 8) == 0 && self.requests.len() < 8;
            // One hot worker only, or the least load would be high as well.
            let is_at_first = is_asked && outcome == Outcome::Shed;
            let slot = ids[if is_at_first { 0 } else { rng.below(ids.len()) }].slot;
            self.chain_of(&body(&system, &turns, ""));
            teach(self, slot);
            if is_asked {
                homes.push(slot);
                let next = match outcome {
                    Outcome::Spread => body(&system, &text(rng, turns.len()), ""),
                    Outcome::Cold => body(
                        &text(rng, system_bytes),
                        &turns,
                        "And what comes after that?",
                    ),
                    _ => body(&system, &turns, "And what comes after that?"),
                };
                let fields = scan(&next).expect("JSON");
                self.requests.push((next, fields));
            }
        }
        homes
    }

    fn chain_of(&mut self, body: &[u8]) {
        let fields = scan(body).expect("JSON");
        chain(
            KeySeed(SEED),
            Route::ChatCompletions,
            body,
            &fields,
            &mut self.chain,
        );
    }

    /// What is measured.
    fn next(&mut self) -> Decision {
        let (body, fields) = &self.requests[self.count % self.requests.len()];
        self.count += 1;
        let length = chain(
            KeySeed(SEED),
            Route::ChatCompletions,
            body,
            fields,
            &mut self.chain,
        )
        .expect("a prompt");
        let pin = self.reader.pin();
        let prefixes = TreePrefixes {
            tree: &self.tree,
            pin: &pin,
            chain: &self.chain,
        };
        let World {
            settings,
            candidates,
            books,
            turn,
            scratch,
            ..
        } = self;
        decide(
            settings,
            Key::Prefix(&prefixes, length),
            candidates,
            &[],
            *books,
            turn,
            scratch,
        )
        .expect("candidates")
    }

    /// A decision as the core writes it down.
    fn decided(&self, decision: &Decision) -> Decided {
        Decided {
            exchange: self.count as u64,
            at_us: self.count as u64,
            request: corelane::decisions::request_hash(b"chatcmpl-kd83jfn20dk38fj20dk38fj2"),
            session: 0,
            model: 0,
            prompt_bytes: 16 * 1024,
            matched_bytes: bytes_of_blocks(decision.matched_blocks) as u32,
            slot: decision.slot,
            incarnation: 1,
            load: decision.seen,
            least_load: decision.least_load,
            candidate_count: self.candidates.len() as u32,
            given_up: None,
            role: Role::Regular,
            route: Route::ChatCompletions,
            policy: PolicyKind::CacheAware,
            reason: decision.reason as u8,
            attempt: 0,
            held_count: 0,
            held: [Held::default(); HELD_COUNT_MAX],
        }
    }

    /// Its first part alone.
    fn next_chain(&mut self) -> Option<u64> {
        let (body, fields) = &self.requests[self.count % self.requests.len()];
        self.count += 1;
        chain(
            KeySeed(SEED),
            Route::ChatCompletions,
            black_box(body),
            fields,
            &mut self.chain,
        )
    }
}

fn body(system: &str, turns: &str, question: &str) -> Vec<u8> {
    let mut body = String::from(r#"{"model":"m","stream":true,"messages":["#);
    let _ = write!(
        body,
        r#"{{"role":"system","content":"{system}"}},{{"role":"user","content":"{turns}"#
    );
    if !question.is_empty() {
        let _ = write!(body, r#""}},{{"role":"user","content":"{question}"#);
    }
    body.push_str(r#""}]}"#);
    body.into_bytes()
}

fn text(rng: &mut Rng, bytes: usize) -> String {
    (0..bytes)
        .map(|_| char::from(b"etaoin shrdlu"[rng.below(13)]))
        .collect()
}

/// The least of many runs, in microseconds: what the code costs when nothing disturbs it.
fn least_us<T>(mut run: impl FnMut() -> T) -> f64 {
    let mut least = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        for _ in 0..8 {
            black_box(run());
        }
        least = least.min(start.elapsed().as_secs_f64() * 1e6 / 8.0);
    }
    least
}

fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    format!("{} x {cpus}", model.map_or("unknown", |(_, model)| model))
}

fn commit() -> String {
    let output = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output();
    let text = output
        .ok()
        .filter(|output| output.status.success())
        .map(|output| output.stdout);
    text.map_or("unknown".to_owned(), |text| {
        String::from_utf8_lossy(&text).trim().to_owned()
    })
}
