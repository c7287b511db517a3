//! Question: how many block operations a second does the exact index take, until all of them can be seen; how soon is one
//! seen; what does a look-up of a very long prompt cost; and what does a membership cost in memory?
//!
//! Workload: 64 engines of 16,384 blocks each, and two owners of shards. Turns of conversations store runs of 40 blocks under
//! the engine's own names, three of ten also on a second engine; an engine that is full lets as many of its oldest go
//! first. An operation is a block stored or removed: its name looked up, its key dealt to its owner, sent by mailbox,
//! applied. The clock stops when the owners have applied the last one. Three threads (the events' and the two owners')
//! on whatever the machine has; a machine that does other things, too, falsifies this, so before it the same work is done by one
//! thread, and its CPU time taken: two cores that do nothing else do twice as many operations a second. Then the same at a tenth of a million operations a second, to see when each is seen; then look-ups
//! of 12,000 blocks with the owners idle. `cargo bench -p shards --bench index`; with `-- one-thread` only
//! the first part, which can be counted in instructions (callgrind) on a machine that is busy.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shards::{
    BLOCK_KEY_BITS, BlockNames, Change, Domain, Lesson, PrefixHash, Receiver, Sender, Shard, Slot,
    Tree, TreeLimits, mailbox,
};

const ENGINE_COUNT: usize = 64;
const ENGINE_BLOCKS: usize = 16_384;
const TURN_BLOCKS: usize = 40;
const OWNER_COUNT: usize = 2;
/// Steps between two looks into the mailbox, as a core does.
const STEPS: usize = 512;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[derive(Default)]
struct Engine {
    names: BlockNames,
    /// Oldest first.
    held: VecDeque<u64>,
}

/// The events' thread: names to keys, keys to owners.
struct Feed {
    tree: Arc<Tree>,
    senders: Vec<Sender<Lesson>>,
    batches: Vec<Vec<PrefixHash>>,
    sent: u64,
}

impl Feed {
    fn send(&mut self, engine: usize, is_store: bool) {
        let worker = Slot(engine as u16);
        for (batch, sender) in self.batches.iter_mut().zip(&mut self.senders) {
            if batch.is_empty() {
                continue;
            }
            self.sent += batch.len() as u64;
            let hashes = batch.as_slice().into();
            batch.clear();
            let mut lesson = match is_store {
                true => Lesson::Insert { worker, hashes },
                false => Lesson::Remove { worker, hashes },
            };
            while let Err(back) = sender.try_send(lesson) {
                lesson = back;
                std::thread::yield_now();
            }
        }
    }

    fn store(&mut self, engine: usize, state: &mut Engine, blocks: &[(u64, PrefixHash)]) {
        let leave = blocks.len().min(8);
        blocks[..leave]
            .iter()
            .for_each(|(name, _)| state.names.prefetch(*name));
        if state.held.len() + blocks.len() > ENGINE_BLOCKS {
            state
                .held
                .iter()
                .take(leave)
                .for_each(|name| state.names.prefetch(*name));
            for index in 0..blocks.len() {
                if let Some(&ahead) = state.held.get(8) {
                    state.names.prefetch(ahead);
                }
                let _ = index;
                let name = state.held.pop_front().expect("it is full");
                if let Change::Of(key) = state.names.remove(name, 0) {
                    self.batches[self.tree.owner(key)].push(key);
                }
            }
            self.send(engine, false);
        }
        for (index, &(name, key)) in blocks.iter().enumerate() {
            if let Some((ahead, _)) = blocks.get(index + 8) {
                state.names.prefetch(*ahead);
            }
            if let (Change::Of(key), _) = state.names.store(name, key, 0) {
                self.batches[self.tree.owner(key)].push(key);
            }
            state.held.push_back(name);
        }
        self.send(engine, true);
    }
}

/// An owner: applies lessons until it is told to stop, and counts the blocks it has applied.
fn own(mut shard: Shard, mut mail: Receiver<Lesson>, applied: &AtomicU64, stop: &AtomicBool) {
    loop {
        let mut steps = 0;
        while steps < STEPS
            && let Some(lesson) = mail.try_recv()
        {
            if let Lesson::Insert { hashes, .. } | Lesson::Remove { hashes, .. } = &lesson {
                steps += hashes.len();
            }
            shard.apply(lesson);
        }
        if steps == 0 {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            std::thread::yield_now();
            continue;
        }
        while shard.work(STEPS) {}
        applied.fetch_add(steps as u64, Ordering::Release);
    }
}

fn turn_of(random: &mut Random) -> Vec<(u64, PrefixHash)> {
    let block = |_| {
        (
            random.next(),
            PrefixHash(random.next() >> (64 - BLOCK_KEY_BITS) | 1),
        )
    };
    (0..TURN_BLOCKS).map(block).collect()
}

fn percentile(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns = schedstat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(ns.expect("the first field is ns on the CPU"))
}

/// All of it on this thread: names, mailboxes, owners.
fn one_thread(limits: TreeLimits) {
    let domain = Arc::new(Domain::new(1));
    let (tree, mut shards) = shards::tree(OWNER_COUNT, domain, limits);
    let (senders, mut mail): (Vec<_>, Vec<_>) = (0..OWNER_COUNT).map(|_| mailbox(4096)).unzip();
    let mut feed = Feed {
        tree,
        senders,
        batches: vec![Vec::new(); OWNER_COUNT],
        sent: 0,
    };
    let mut engines: Vec<Engine> = (0..ENGINE_COUNT).map(|_| Engine::default()).collect();
    let mut random = Random(0xfeed);
    let (mut names, mut owners, mut count) = (Duration::ZERO, Duration::ZERO, 0);
    for round in 0..90 {
        let turns: Vec<_> = (0..1_000).map(|_| turn_of(&mut random)).collect();
        let (sent, began) = (feed.sent, cpu_time());
        for turn in &turns {
            let engine = (turn[0].0 >> 32) as usize % ENGINE_COUNT;
            feed.store(engine, &mut engines[engine], turn);
        }
        let then = cpu_time();
        for (shard, mail) in shards.iter_mut().zip(&mut mail) {
            let mut is_more = true;
            while is_more {
                let lessons = std::iter::from_fn(|| mail.try_recv()).take(STEPS / TURN_BLOCKS);
                lessons.for_each(|lesson| shard.apply(lesson));
                is_more = !shard.is_idle();
                while shard.work(STEPS) {}
            }
        }
        // The engines fill up first.
        if round >= 30 {
            (names, owners) = (names + (then - began), owners + (cpu_time() - then));
            count += feed.sent - sent;
        }
    }
    let [names_ns, owners_ns] = [names, owners].map(|time| time.as_nanos() as f64 / count as f64);
    println!(
        "{names_ns:9.1} ns an operation for names and mailboxes, {owners_ns:.1} ns for the owners: {:.2} M/s on two cores",
        2e3 / (names_ns + owners_ns)
    );
}

fn main() {
    let domain = Arc::new(Domain::new(OWNER_COUNT + 1));
    let limits = TreeLimits {
        bytes_max: 64 << 20,
        slot_count_max: ENGINE_COUNT,
    };
    one_thread(limits);
    if std::env::args().any(|arg| arg == "one-thread") {
        return;
    }
    let (tree, shards) = shards::tree(OWNER_COUNT, Arc::clone(&domain), limits);
    let (applied, stop) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut senders = Vec::new();
    let mut owners = Vec::new();
    for shard in shards {
        let (sender, receiver) = mailbox(256);
        senders.push(sender);
        let (applied, stop) = (Arc::clone(&applied), Arc::clone(&stop));
        owners.push(std::thread::spawn(move || {
            own(shard, receiver, &applied, &stop);
        }));
    }
    let mut feed = Feed {
        tree: Arc::clone(&tree),
        senders,
        batches: vec![Vec::new(); OWNER_COUNT],
        sent: 0,
    };
    let mut engines: Vec<Engine> = (0..ENGINE_COUNT).map(|_| Engine::default()).collect();
    let mut random = Random(0x5eed);
    let run = |feed: &mut Feed, engines: &mut [Engine], random: &mut Random| {
        let turn = turn_of(random);
        let first = random.next() as usize % ENGINE_COUNT;
        feed.store(first, &mut engines[first], &turn);
        if random.next() % 10 < 3 {
            let second = random.next() as usize % ENGINE_COUNT;
            // Its own names for the same blocks.
            let turn: Vec<_> = turn
                .iter()
                .map(|(name, key)| (name.rotate_left(7), *key))
                .collect();
            feed.store(second, &mut engines[second], &turn);
        }
    };
    let drain = |feed: &Feed| {
        while applied.load(Ordering::Acquire) < feed.sent {
            std::thread::yield_now();
        }
    };
    while engines
        .iter()
        .any(|engine| engine.held.len() < ENGINE_BLOCKS - TURN_BLOCKS)
    {
        run(&mut feed, &mut engines, &mut random);
    }
    drain(&feed);
    println!(
        "{} blocks of {} memberships, {} forgotten for room",
        tree.node_count(),
        tree.membership_count(),
        tree.evicted_count()
    );
    println!(
        "{:9.2} bytes a membership in the index, {:.2} in the engines' names",
        tree.bytes() as f64 / tree.membership_count() as f64,
        engines.iter().map(|e| e.names.bytes()).sum::<usize>() as f64
            / engines.iter().map(|e| e.names.len()).sum::<usize>() as f64,
    );
    let mut best = 0.0_f64;
    for _ in 0..5 {
        let (sent, start) = (feed.sent, Instant::now());
        for _ in 0..40_000 {
            run(&mut feed, &mut engines, &mut random);
        }
        drain(&feed);
        best = best.max((feed.sent - sent) as f64 / start.elapsed().as_secs_f64());
    }
    println!(
        "{:9.2} M block operations a second, drained (best of five)",
        best / 1e6
    );

    let mut reader = domain.reader(OWNER_COUNT);
    let mut seen: Vec<Duration> = Vec::new();
    let start = Instant::now();
    for count in 1..=2_000_u32 {
        while start.elapsed() < count * Duration::from_micros(800) {
            std::thread::yield_now();
        }
        let turn = turn_of(&mut random);
        let engine = random.next() as usize % ENGINE_COUNT;
        let began = Instant::now();
        feed.store(engine, &mut engines[engine], &turn);
        let last = [turn[TURN_BLOCKS - 1].1];
        loop {
            let pin = reader.pin();
            if tree.find(&pin, &last, |_| true).is_some() {
                break;
            }
            drop(pin);
            std::thread::yield_now();
        }
        seen.push(began.elapsed());
    }
    seen.sort_unstable();
    println!(
        "{:9.1} us until a turn of 40 blocks (and 40 removed) is seen, p50; {:.1} us p99",
        percentile(&seen, 0.5).as_nanos() as f64 / 1e3,
        percentile(&seen, 0.99).as_nanos() as f64 / 1e3
    );

    // Four workers hold 12,000-block prompts to different depths, all of them the first 500 blocks.
    let mut prompts = Vec::new();
    for prompt in 0..16_usize {
        let chain: Vec<(u64, PrefixHash)> = (0..12_000)
            .map(|_| {
                (
                    random.next(),
                    PrefixHash(random.next() >> (64 - BLOCK_KEY_BITS) | 1),
                )
            })
            .collect();
        for (worker, depth) in [(0, 11_960), (1, 7_000), (2, 500), (3, 500)] {
            let engine = (prompt + worker * 16) % ENGINE_COUNT;
            feed.store(engine, &mut engines[engine], &chain[..depth]);
        }
        prompts.push(chain.iter().map(|(_, key)| *key).collect::<Vec<_>>());
    }
    drain(&feed);
    stop.store(true, Ordering::Relaxed);
    owners
        .into_iter()
        .for_each(|owner| owner.join().expect("it does not panic"));
    let pin = reader.pin();
    let mut out = Vec::new();
    let mut look_ups = |what: &str, level_max| {
        let mut times: Vec<Duration> = (0..20_000)
            .map(|index| {
                out.clear();
                let began = Instant::now();
                tree.matches(&pin, &prompts[index % 16], |_| true, level_max, &mut out);
                let took = began.elapsed();
                black_box(&out);
                took
            })
            .collect();
        times.sort_unstable();
        println!(
            "{:9.2} us p50, {:.2} us p99: {what}",
            percentile(&times, 0.5).as_nanos() as f64 / 1e3,
            percentile(&times, 0.99).as_nanos() as f64 / 1e3
        );
    };
    look_ups("the deepest of 12,000 blocks, with its holders", 1);
    look_ups("all holders of 12,000 blocks at up to 8 depths", 8);
}
