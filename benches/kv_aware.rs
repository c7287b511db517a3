//! Question: what does a message of KV events cost from its bytes to the index, and what does a choice by `kv_aware` cost, from the
//! scanned body to the worker?
//!
//! Workload of events: 64 engines of 16,384 blocks of 16 tokens; each message stores a run of 40 blocks and removes the 40 oldest
//! (an operation is a block stored or removed), in the form of maps as vLLM writes it now. Decoded, hashed, named, dealt to two
//! owners and applied, all on one thread; its CPU time counts: two cores that do nothing else do twice as many a second.
//!
//! Workload of choices: prompts of 1,000, 8,000 and 192,000 token ids (12,000 blocks), held by one worker but for the last 40
//! blocks, a tenth of it by all; 64 and 1,024 workers with uneven loads. Each step's median of 400, the body in cache. Reading
//! the ids and making the keys grow with the prompt; the choice may take 1 us for 64 workers, 3 us for 1,024.
//!
//! Run: `cargo bench --bench kv_aware`

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corelane::control::kv::{Outbox, Source};
use corelane::route::{
    Candidates, Credits, Index, Key, KeySeed, PolicyKind, Settings, Tokens, TreePrefixes, Trust,
    Turn, block_chain, decide, scan, token_ids,
};
use corelane::shared::Route;
use rmpv::Value;
use shards::{Books, Domain, Lesson, LoadGuard, PrefixHash, Shard, Slot, TreeLimits};

const BLOCK: usize = 16;
const ENGINE_COUNT: usize = 64;
const ENGINE_BLOCKS: usize = 16_384;
const RUN_BLOCKS: usize = 40;
const MESSAGE_COUNT: usize = 4_000;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// CPU time of this thread so far.
fn cpu_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns = schedstat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(ns.expect("the first field is ns on the CPU"))
}

fn numbers(numbers: impl Iterator<Item = u64>) -> Value {
    Value::Array(numbers.map(Value::from).collect())
}

fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(
        fields
            .into_iter()
            .map(|(name, value)| (name.into(), value))
            .collect(),
    )
}

/// A message that stores a run and removes the oldest blocks.
fn message(held: &mut VecDeque<u64>, state: &mut u64) -> Vec<u8> {
    let names: Vec<u64> = (0..RUN_BLOCKS).map(|_| random(state)).collect();
    let mut events = Vec::new();
    if held.len() + RUN_BLOCKS > ENGINE_BLOCKS {
        events.push(map(vec![
            ("type", "BlockRemoved".into()),
            ("block_hashes", numbers(held.drain(..RUN_BLOCKS))),
            ("medium", "GPU".into()),
            ("group_idx", 0.into()),
        ]));
    }
    events.push(map(vec![
        ("type", "BlockStored".into()),
        ("block_hashes", numbers(names.iter().copied())),
        ("parent_block_hash", Value::Nil),
        (
            "token_ids",
            numbers((0..RUN_BLOCKS * BLOCK).map(|_| random(state) % 150_000)),
        ),
        ("block_size", (BLOCK as u64).into()),
        ("lora_id", Value::Nil),
        ("medium", "GPU".into()),
        ("lora_name", Value::Nil),
        ("extra_keys", Value::Nil),
        ("group_idx", 0.into()),
        ("kv_cache_spec_kind", "full_attention".into()),
        ("kv_cache_spec_sliding_window", Value::Nil),
    ]));
    held.extend(names);
    let batch = Value::Array(vec![Value::F64(1.0), Value::Array(events), 0.into()]);
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, &batch).expect("a vector takes it");
    bytes
}

fn apply(shards: &mut [Shard], lessons: impl Iterator<Item = (usize, Lesson)>) {
    for (owner, lesson) in lessons {
        shards[owner].apply(lesson);
    }
    for shard in shards {
        while shard.work(512) {}
    }
}

fn index(bytes_max: usize) -> (Index, Vec<Shard>, Arc<Domain>) {
    let domain = Arc::new(Domain::new(1));
    let limits = TreeLimits {
        bytes_max,
        slot_count_max: 4096,
    };
    let (tree, shards) = shards::tree(2, domain.clone(), limits);
    (Index::new(tree, KeySeed(1), BLOCK), shards, domain)
}

fn events() {
    let (index, mut shards, _domain) = index(64 << 20);
    let mut engines: Vec<(Source, VecDeque<u64>, u64)> = (0..ENGINE_COUNT)
        .map(|id| (Source::new(id as u16), VecDeque::new(), 0))
        .collect();
    let (mut state, mut out) = (0x5eed, Outbox::default());
    let fill_count = ENGINE_COUNT * ENGINE_BLOCKS / RUN_BLOCKS + ENGINE_COUNT;
    let (mut reading, mut applying) = (Duration::ZERO, Duration::ZERO);
    let mut bytes = 0;
    for round in 0..fill_count.div_ceil(MESSAGE_COUNT) + 5 {
        let messages: Vec<(usize, Vec<u8>)> = (0..MESSAGE_COUNT)
            .map(|n| {
                let engine = n % ENGINE_COUNT;
                (engine, message(&mut engines[engine].1, &mut state))
            })
            .collect();
        let is_counted = round >= fill_count.div_ceil(MESSAGE_COUNT);
        for part in messages.chunks(200) {
            let began = cpu_time();
            for (engine, payload) in part {
                let (source, _, next) = &mut engines[*engine];
                source.take(*next, payload, &index, &mut out);
                *next += 1;
            }
            let then = cpu_time();
            apply(&mut shards, out.lessons.drain(..));
            if is_counted {
                bytes += part.iter().map(|(_, payload)| payload.len()).sum::<usize>();
                reading += then - began;
                applying += cpu_time() - then;
            }
        }
    }
    let count = (5 * MESSAGE_COUNT * 2 * RUN_BLOCKS) as f64;
    let [read_ns, apply_ns] = [reading, applying].map(|time| time.as_nanos() as f64 / count);
    println!(
        "{read_ns:9.1} ns an operation from bytes to lessons ({:.1} bytes each), {apply_ns:.1} ns for the owners: {:.2} M/s on two cores",
        bytes as f64 / count,
        2e3 / (read_ns + apply_ns)
    );
    let held: usize = engines
        .iter()
        .map(|(source, ..)| source.block_count())
        .sum();
    let names: usize = engines.iter().map(|(source, ..)| source.bytes()).sum();
    println!(
        "{:9.2} bytes a membership in the index, {:.2} in the engines' names",
        index.tree.bytes() as f64 / index.tree.membership_count() as f64,
        names as f64 / held as f64
    );
}

/// Median, in us.
fn median(mut step: impl FnMut()) -> f64 {
    let mut times: Vec<Duration> = (0..400)
        .map(|_| {
            let began = Instant::now();
            step();
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2].as_nanos() as f64 / 1e3
}

fn choice(workers: u16, tokens: usize) {
    let (index, mut shards, domain) = index(256 << 20);
    let mut state = 0xc0ffee;
    let ids: Vec<u32> = (0..tokens)
        .map(|_| (random(&mut state) % 150_000) as u32)
        .collect();
    let mut chain: Vec<PrefixHash> = Vec::new();
    block_chain(&index.keys, &ids, BLOCK, None, None, &mut chain);
    let mut teach = |source: u16, blocks: usize| {
        let lessons = chain[..blocks].iter().map(|hash| {
            let lesson = Lesson::Insert {
                worker: Slot(source),
                hashes: [*hash].into(),
            };
            (index.tree.owner(*hash), lesson)
        });
        apply(&mut shards, lessons);
    };
    for source in 0..workers {
        index.set_source(source, Some((Slot(source), Trust::Exact)));
        index.set_worker(Slot(source), Trust::Exact);
        teach(source, chain.len() / 10);
    }
    teach(workers / 2, chain.len().saturating_sub(RUN_BLOCKS));
    let books: &'static Books = Box::leak(Box::new(Books::new(4096)));
    let mut guards = Vec::new();
    for slot in 0..workers {
        let worker = books.open(Slot(slot)).expect("it is free");
        for _ in 0..random(&mut state) % 8 {
            guards.push(LoadGuard::acquire(books, worker, 4_000));
        }
    }
    let candidates: Candidates = (0..workers).map(Slot).collect();
    let mut body = r#"{"model":"m","prompt":["#.to_owned();
    for (place, id) in ids.iter().enumerate() {
        let comma = if place == 0 { "" } else { "," };
        let _ = write!(body, "{comma}{id}");
    }
    body.push_str("]}");
    let fields = scan(body.as_bytes()).expect("it is JSON");
    let mut read = Vec::new();
    let ids_us = median(|| {
        black_box(token_ids(
            Route::Completions,
            body.as_bytes(),
            &fields,
            &mut read,
        ));
    });
    let chain_us = median(|| block_chain(&index.keys, &read, BLOCK, None, None, &mut chain));
    let mut reader = domain.reader(0);
    let pin = reader.pin();
    let mut credits = Credits::default();
    let settings = Settings {
        policy: PolicyKind::KvAware,
        ..Settings::default()
    };
    let (mut turn, mut scratch) = (Turn::new(1), Vec::new());
    let mut chosen = None;
    let count = tokens as u64;
    let decide_us = median(|| {
        index.list_blind(&candidates, &mut credits.blind);
        let holdings = index.look_up(&pin, &chain, count, &settings, &candidates, &mut credits);
        let key = Key::<TreePrefixes<'_>>::Tokens(Tokens {
            count,
            credits: &credits,
            holdings,
        });
        chosen = decide(
            &settings,
            key,
            &candidates,
            &[],
            books,
            &mut turn,
            &mut scratch,
        );
    });
    assert!(chosen.is_some());
    println!(
        "{workers:5} workers, {tokens:6} tokens: ids read {ids_us:.2} us, keys {chain_us:.2}, choice {decide_us:.2}; for each KiB of body {:.3} us in all",
        (ids_us + chain_us + decide_us) / (body.len() as f64 / 1024.0)
    );
}

fn main() {
    events();
    for workers in [64, 1024] {
        for tokens in [1_000, 8_000, 192_000] {
            choice(workers, tokens);
        }
    }
}
