//! Question: what does a look-up in the prefix tree cost, hot and from memory, and what do inserts and floods cost?
//!
//! Workload: 4 shards of 64 MiB filled with random blocks of one holder each until blocks are evicted. Then look-ups of one
//! block each, among 64 blocks (hot) and among all (cold: nearly every one misses all caches); of chains of 100 blocks;
//! then inserts into the full tree. One thread. `cargo bench -p shards --bench tree` prints ns of CPU time per call.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use shards::{Domain, Lesson, Pin, PrefixHash, Shard, Slot, Tree, TreeLimits, split_by_owner};

const CORE_COUNT: usize = 4;
const BYTES_MAX: usize = 256 << 20;
const CHAIN_BLOCKS: usize = 100;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn insert(tree: &Tree, shards: &mut [Shard], worker: u16, hashes: &[PrefixHash]) {
    let mut batches = vec![Vec::new(); shards.len()];
    split_by_owner(tree, hashes, &mut batches);
    for (shard, batch) in shards.iter_mut().zip(batches) {
        shard.apply(Lesson::Insert {
            worker: Slot(worker),
            hashes: batch,
        });
        while shard.work(1_024) {}
    }
}

/// CPU time of this thread so far: a busy machine falsifies it less than wall time.
fn cpu_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let ns = schedstat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(ns.expect("the first field is ns on the CPU"))
}

/// Prints ns per call, the best of five rounds.
fn measure(what: &str, count: usize, mut call: impl FnMut(usize)) {
    let mut round = || {
        let start = cpu_time();
        (0..count).for_each(&mut call);
        (cpu_time() - start).as_nanos() as f64 / count as f64
    };
    let best = (0..5).map(|_| round()).fold(f64::INFINITY, f64::min);
    println!("{best:9.1} ns  {what}");
}

fn blocks_of(tree: &Tree, pin: &Pin<'_>, chain: &[PrefixHash]) -> usize {
    tree.find(pin, chain, |_| true)
        .map_or(0, |found| found.blocks)
}

fn main() {
    let domain = Arc::new(Domain::new(1));
    let limits = TreeLimits {
        bytes_max: BYTES_MAX,
        slot_count_max: 1_024,
    };
    let (tree, mut shards) = shards::tree(CORE_COUNT, Arc::clone(&domain), limits);
    let mut random = Random(0x5eed);
    let mut chains: Vec<Vec<PrefixHash>> = Vec::new();
    let start = cpu_time();
    while tree.evicted_count() < 1_000_000 {
        let chain: Vec<PrefixHash> = (0..CHAIN_BLOCKS)
            .map(|_| PrefixHash(random.next() | 1))
            .collect();
        insert(&tree, &mut shards, (random.next() % 1_024) as u16, &chain);
        chains.push(chain);
    }
    let filled_ns = (cpu_time() - start).as_nanos() as f64 / (chains.len() * CHAIN_BLOCKS) as f64;
    println!(
        "{CORE_COUNT} shards, {} MiB, {} blocks, {:.2} bytes per membership",
        tree.bytes() >> 20,
        tree.node_count(),
        tree.bytes() as f64 / tree.membership_count() as f64
    );
    println!("{filled_ns:9.1} ns  insert of a block while filling, splits included");
    chains.drain(..chains.len() / 2);

    let mut reader = domain.reader(0);
    let pin = reader.pin();
    let chain_count = chains.len();
    let one = |index: usize, block: usize| &chains[index % chain_count][block..=block];
    measure("find one block, hot (64 blocks)", 2_000_000, |i| {
        black_box(blocks_of(&tree, &pin, one(0, i % 64)));
    });
    // A stride that visits chains in no order that a prefetcher knows; the hashes themselves come from memory, too.
    measure("find one block, cold", 2_000_000, |i| {
        black_box(blocks_of(
            &tree,
            &pin,
            one(i.wrapping_mul(7_919), i % CHAIN_BLOCKS),
        ));
    });
    measure(
        "of this: fetching the hash that is looked for",
        2_000_000,
        |i| {
            black_box(one(i.wrapping_mul(7_919), i % CHAIN_BLOCKS)[0]);
        },
    );
    measure("find an unknown block, cold", 2_000_000, |_| {
        black_box(blocks_of(&tree, &pin, &[PrefixHash(random.next() | 1)]));
    });
    measure("find a whole chain of 100, cold", 500_000, |i| {
        black_box(blocks_of(
            &tree,
            &pin,
            &chains[i.wrapping_mul(7_919) % chain_count],
        ));
    });
    let longer: Vec<Vec<PrefixHash>> = chains
        .iter()
        .map(|chain| {
            chain
                .iter()
                .copied()
                .chain((0..7).map(|_| PrefixHash(random.next())))
                .collect()
        })
        .collect();
    measure(
        "find 100 known blocks of a chain of 107, cold",
        500_000,
        |i| {
            black_box(blocks_of(
                &tree,
                &pin,
                &longer[i.wrapping_mul(7_919) % chain_count],
            ));
        },
    );
    let unknown: Vec<PrefixHash> = (0..CHAIN_BLOCKS)
        .map(|_| PrefixHash(random.next()))
        .collect();
    measure("find nothing of a chain of 100, hot", 500_000, |_| {
        black_box(blocks_of(&tree, &pin, &unknown));
    });
    drop(pin);
    measure(
        "insert a chain of 100 new blocks into the full tree (evicts)",
        5_000,
        |_| {
            let chain: Vec<PrefixHash> = (0..CHAIN_BLOCKS)
                .map(|_| PrefixHash(random.next() | 1))
                .collect();
            insert(&tree, &mut shards, 5, &chain);
        },
    );
}
