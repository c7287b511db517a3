//! The tree against a naive twin, at its bounds, and under concurrent readers. Every test prints its seed when it fails.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::segment::{SEGMENT_BYTES, SEGMENT_ENTRIES};
use super::{Lesson, Shard, Tree, TreeLimits, split_by_owner, tree};
use crate::epoch::{Domain, Pin, Reader};
use crate::ids::{PrefixHash, SLOT_COUNT_MAX, Slot};
use crate::testing::Random;

/// A tree with its owners, all on this thread.
struct Rig {
    tree: Arc<Tree>,
    shards: Vec<Shard>,
    domain: Arc<Domain>,
    reader: Reader,
}

impl Rig {
    fn new(core_count: usize, bytes_max: usize, slot_count_max: usize) -> Self {
        let domain = Arc::new(Domain::new(4));
        let limits = TreeLimits {
            bytes_max,
            slot_count_max,
        };
        let (tree, shards) = tree(core_count, Arc::clone(&domain), limits);
        let reader = domain.reader(0);
        Self {
            tree,
            shards,
            domain,
            reader,
        }
    }

    fn insert(&mut self, worker: u16, hashes: &[PrefixHash]) {
        let worker = Slot(worker);
        self.teach(hashes, |hashes| Lesson::Insert { worker, hashes });
    }

    fn remove(&mut self, worker: u16, hashes: &[PrefixHash]) {
        let worker = Slot(worker);
        self.teach(hashes, |hashes| Lesson::Remove { worker, hashes });
    }

    fn touch(&mut self, hashes: &[PrefixHash]) {
        self.teach(hashes, |hashes| Lesson::Touch { hashes });
    }

    fn teach(&mut self, hashes: &[PrefixHash], lesson: impl Fn(Vec<PrefixHash>) -> Lesson) {
        let mut batches = vec![Vec::new(); self.shards.len()];
        split_by_owner(&self.tree, hashes, &mut batches);
        for (shard, batch) in self.shards.iter_mut().zip(batches) {
            shard.apply(lesson(batch));
        }
    }

    fn branch(&mut self, parent: PrefixHash) {
        self.shards[self.tree.owner(parent)].apply(Lesson::Branch { parent });
    }

    fn purge(&mut self, worker: u16) {
        let worker = Slot(worker);
        self.shards
            .iter_mut()
            .for_each(|shard| shard.apply(Lesson::Purge { worker }));
    }

    fn settle(&mut self) {
        for shard in &mut self.shards {
            while shard.work(97) {}
        }
    }

    fn held(&mut self, hash: PrefixHash) -> Vec<u16> {
        let pin = self.reader.pin();
        let found = self.tree.find(&pin, &[hash], |_| true);
        found.map_or(vec![], |found| found.holders().map(|slot| slot.0).collect())
    }
}

/// What the tree should be: every block with its holders. Without evictions.
#[derive(Default)]
struct Twin(HashMap<PrefixHash, BTreeSet<u16>>);

impl Twin {
    fn insert(&mut self, worker: u16, hashes: &[PrefixHash]) {
        hashes
            .iter()
            .for_each(|&hash| _ = self.0.entry(hash).or_default().insert(worker));
    }

    fn remove(&mut self, worker: u16, hashes: &[PrefixHash]) {
        for hash in hashes {
            if let Some(holders) = self.0.get_mut(hash) {
                holders.remove(&worker);
            }
        }
        self.0.retain(|_, holders| !holders.is_empty());
    }

    fn purge(&mut self, worker: u16) {
        self.0.retain(|_, holders| {
            holders.remove(&worker);
            !holders.is_empty()
        });
    }

    fn holders(&self, hash: PrefixHash) -> BTreeSet<u16> {
        self.0.get(&hash).cloned().unwrap_or_default()
    }

    fn find(
        &self,
        chain: &[PrefixHash],
        accept: impl Fn(u16) -> bool,
    ) -> Option<(usize, Vec<u16>)> {
        let is_match = |&depth: &usize| self.holders(chain[depth - 1]).iter().any(|&s| accept(s));
        let depth = (1..=chain.len()).rev().find(is_match)?;
        Some((depth, self.holders(chain[depth - 1]).into_iter().collect()))
    }

    fn matches(
        &self,
        chain: &[PrefixHash],
        accept: impl Fn(u16) -> bool,
        level_max: usize,
    ) -> Vec<(Slot, usize)> {
        let mut out: Vec<(Slot, usize)> = Vec::new();
        let mut level_count = 0;
        for depth in (1..=chain.len()).rev() {
            let seen: BTreeSet<u16> = out.iter().map(|(slot, _)| slot.0).collect();
            let level = self.holders(chain[depth - 1]).into_iter();
            let fresh: Vec<u16> = level.filter(|s| accept(*s) && !seen.contains(s)).collect();
            if !fresh.is_empty() && level_count < level_max {
                level_count += 1;
                out.extend(fresh.into_iter().map(|slot| (Slot(slot), depth)));
            }
        }
        out
    }

    fn membership_count(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }
}

fn check_lookups(rig: &mut Rig, twin: &Twin, chain: &[PrefixHash], accept: impl Fn(u16) -> bool) {
    let pin = rig.reader.pin();
    let found = rig.tree.find(&pin, chain, |slot| accept(slot.0));
    for slot in (0..8).map(Slot) {
        let held = rig.tree.find_held_by(&pin, chain, slot).map(|f| f.blocks);
        let known = twin
            .find(chain, |holder| holder == slot.0)
            .map(|(blocks, _)| blocks);
        assert_eq!(held, known, "{slot:?}");
    }
    if let Some(found) = &found {
        let holders: BTreeSet<Slot> = found.holders().collect();
        for slot in (0..SLOT_COUNT_MAX as u16).map(Slot) {
            assert_eq!(found.is_held_by(slot), holders.contains(&slot), "{slot:?}");
        }
    }
    let found = found.map(|f| (f.blocks, f.holders().map(|slot| slot.0).collect::<Vec<_>>()));
    assert_eq!(found, twin.find(chain, &accept));
    let known = twin.find(chain, |_| true).map_or(0, |(depth, _)| depth);
    assert_eq!(rig.tree.depth_known(&pin, chain), known);
    for level_max in [0, 1, 3, 100] {
        let mut out = Vec::new();
        rig.tree
            .matches(&pin, chain, |slot| accept(slot.0), level_max, &mut out);
        assert_eq!(out, twin.matches(chain, &accept, level_max));
    }
}

fn check_sums(rig: &Rig, twin: &Twin) {
    assert_eq!(rig.tree.node_count(), twin.0.len());
    assert_eq!(rig.tree.membership_count(), twin.membership_count());
    assert_eq!(rig.tree.evicted_count(), 0);
}

/// A chain that shares a random part of a known one and then goes its own way.
fn grow_chain(
    random: &mut Random,
    chains: &[Vec<PrefixHash>],
    length_max: usize,
) -> Vec<PrefixHash> {
    let mut chain = match chains.len() {
        0 => Vec::new(),
        count => {
            let parent = &chains[random.below(count)];
            parent[..random.below(parent.len() + 1)].to_vec()
        }
    };
    let length = chain.len() + 1 + random.below(length_max);
    chain.resize_with(length, || PrefixHash(random.next() | 1));
    chain
}

/// T2: random conversations, random accepted workers; every answer equals the twin's.
fn against_twin(seed: u64, core_count: usize, worker_count: usize, steps: usize) {
    let mut random = Random::new(seed);
    let mut rig = Rig::new(core_count, 64 << 20, worker_count);
    let mut twin = Twin::default();
    let mut chains: Vec<Vec<PrefixHash>> = Vec::new();
    for step in 0..steps {
        let chain = grow_chain(&mut random, &chains, 30);
        let worker = random.below(worker_count) as u16;
        rig.insert(worker, &chain);
        twin.insert(worker, &chain);
        chains.push(chain);
        if step % 3 == 2 {
            // An engine lets go what follows a block, then it; of blocks it does not hold it may say what it likes.
            let chain = &chains[random.below(chains.len())];
            let first = chain[random.below(chain.len())];
            let worker = random.below(worker_count) as u16;
            for chain in &chains {
                let from = chain.iter().position(|hash| *hash == first);
                let tail = &chain[from.unwrap_or(chain.len())..];
                rig.remove(worker, tail);
                twin.remove(worker, tail);
            }
        }
        if step % 40 == 39 {
            let gone = random.below(worker_count) as u16;
            rig.purge(gone);
            twin.purge(gone);
        }
        rig.settle();
        let accepted = random.below(worker_count) as u16;
        let known = grow_chain(&mut random, &chains, 5);
        check_lookups(&mut rig, &twin, &known, |_| true);
        check_lookups(&mut rig, &twin, &known, |slot| slot == accepted);
        check_lookups(&mut rig, &twin, &known, |slot| slot % 3 == accepted % 3);
    }
    check_sums(&rig, &twin);
    let blocks: Vec<PrefixHash> = twin.0.keys().copied().collect();
    for block in blocks {
        assert_eq!(
            rig.held(block),
            twin.holders(block).into_iter().collect::<Vec<_>>()
        );
    }
}

#[test]
fn equals_the_twin_with_one_worker() {
    against_twin(1, 1, 1, 200);
}

#[test]
fn equals_the_twin_with_few_workers() {
    for seed in 10..14 {
        against_twin(seed, 3, 5, 300);
    }
}

#[test]
fn equals_the_twin_with_many_workers() {
    against_twin(20, 2, 100, 400);
    against_twin(21, 4, 1_000, 400);
    against_twin(22, 2, 4_096, 400);
}

/// One block held by ever more workers, in random order: word, list, bitmap, longer bitmaps; then all of them leave.
#[test]
fn every_form_of_a_holder_set_is_exact() {
    for (seed, worker_count) in [(30, 8), (31, 70), (32, 600), (33, 4_096)] {
        let mut random = Random::new(seed);
        let mut rig = Rig::new(1, 1 << 20, worker_count);
        let mut workers: Vec<u16> = (0..worker_count as u16).collect();
        (1..workers.len())
            .rev()
            .for_each(|i| workers.swap(i, random.below(i + 1)));
        let block = PrefixHash(77);
        let mut held = BTreeSet::new();
        for (count, &worker) in workers.iter().enumerate() {
            rig.insert(worker, &[block]);
            rig.settle();
            held.insert(worker);
            if count < 200 || count % 50 == 0 || count + 1 == worker_count {
                assert_eq!(rig.held(block), held.iter().copied().collect::<Vec<_>>());
            }
        }
        let bitmap_bytes = worker_count.div_ceil(64) * 8 + 16;
        assert!(rig.tree.bytes() <= 32 + SEGMENT_BYTES + 8 * 64 + bitmap_bytes.max(144));
        let before_bytes = Rig::new(1, 1 << 20, 1).tree.bytes();
        for (count, &worker) in workers.iter().enumerate() {
            match seed % 2 {
                0 => rig.purge(worker),
                _ => rig.remove(worker, &[block, PrefixHash(78)]),
            }
            held.remove(&worker);
            if count % 64 == 0 || count + 5 > worker_count {
                rig.settle();
                assert_eq!(rig.held(block), held.iter().copied().collect::<Vec<_>>());
            }
        }
        assert_eq!((rig.tree.node_count(), rig.tree.membership_count()), (0, 0));
        assert_eq!(rig.tree.bytes(), before_bytes);
    }
}

/// Splits at every size up to hundreds of segments lose and confuse nothing.
#[test]
fn splits_keep_every_block() {
    let mut random = Random::new(40);
    let mut rig = Rig::new(1, 64 << 20, 500);
    let mut twin = Twin::default();
    for round in 0..80 {
        let chain: Vec<PrefixHash> = (0..5_000).map(|_| PrefixHash(random.next() | 1)).collect();
        let worker = round * 6;
        rig.insert(worker, &chain);
        twin.insert(worker, &chain);
        rig.settle();
        check_sums(&rig, &twin);
    }
    assert!(
        rig.tree.bytes() > 70 * SEGMENT_BYTES,
        "the test wants many splits"
    );
    let blocks: Vec<PrefixHash> = twin.0.keys().copied().collect();
    for block in blocks {
        assert_eq!(
            rig.held(block),
            twin.holders(block).into_iter().collect::<Vec<_>>()
        );
    }
}

/// The number of probes grows with the logarithm of the chain, and a full match is one probe.
#[test]
fn a_search_probes_few_blocks() {
    let mut rig = Rig::new(2, 8 << 20, 4);
    let chain: Vec<PrefixHash> = (1..=1_024).map(PrefixHash).collect();
    for depth in [1, 2, 3, 500, 1_000, 1_023, 1_024] {
        rig.shards.iter_mut().for_each(Shard::clear);
        rig.insert(1, &chain[..depth]);
        rig.settle();
        let pin = rig.reader.pin();
        let mut asked_count = 0;
        let found = rig.tree.find(&pin, &chain, |_| {
            asked_count += 1;
            true
        });
        assert_eq!(found.map(|found| found.blocks), Some(depth));
        let allowed = if depth == 1_024 { 1 } else { 11 };
        assert!(
            asked_count <= allowed,
            "{asked_count} blocks of depth {depth} were held when asked"
        );
    }
    let pin = rig.reader.pin();
    assert!(
        rig.tree
            .find(&pin, &[PrefixHash(9_999)], |_| true)
            .is_none()
    );
    assert!(rig.tree.find(&pin, &[], |_| true).is_none());
    assert!(rig.tree.find(&pin, &[PrefixHash(0)], |_| true).is_none());
}

#[test]
fn three_branches_make_a_fork_and_use_refreshes_age() {
    let mut rig = Rig::new(1, 2 * SEGMENT_BYTES, 4);
    let parent = PrefixHash(5);
    rig.insert(0, &[parent]);
    for branch_count in 1..=5 {
        rig.branch(parent);
        rig.settle();
        let pin = rig.reader.pin();
        let found = rig.tree.find(&pin, &[parent], |_| true).unwrap();
        assert_eq!(found.is_fork(), branch_count >= 3);
        assert!(!found.is_stale());
    }
    let others: Vec<PrefixHash> = (100..100 + SEGMENT_ENTRIES as u64 / 16)
        .map(PrefixHash)
        .collect();
    rig.insert(1, &others);
    rig.settle();
    let is_stale = |rig: &mut Rig| {
        let pin = rig.reader.pin();
        let found = rig.tree.find(&pin, &[parent], |_| true).unwrap();
        assert!(found.is_fork(), "the age shares its word with the branches");
        found.is_stale()
    };
    assert!(is_stale(&mut rig));
    rig.touch(&[parent]);
    rig.settle();
    assert!(!is_stale(&mut rig));
}

/// T3, T4: twenty times the capacity of cold blocks goes through; the hot chain is touched now and then.
#[test]
fn a_hot_prefix_survives_a_flood_within_the_bytes() {
    for (seed, core_count, bytes_max) in [(50, 1, 4 << 20), (51, 2, 7 << 20), (52, 1, 700_000)] {
        let mut random = Random::new(seed);
        let mut rig = Rig::new(core_count, bytes_max, 64);
        let hot: Vec<PrefixHash> = (0..100).map(|_| PrefixHash(random.next() | 1)).collect();
        rig.insert(7, &hot);
        rig.settle();
        let capacity = bytes_max / 16;
        for _ in 0..20 * 16 {
            let cold: Vec<PrefixHash> = (0..capacity / 16)
                .map(|_| PrefixHash(random.next() | 1))
                .collect();
            rig.insert(random.below(64) as u16, &cold);
            rig.touch(&hot);
            rig.settle();
            assert!(rig.tree.bytes() <= bytes_max);
            let pin = rig.reader.pin();
            for block in &hot {
                let found = rig.tree.find(&pin, &[*block], |slot| slot.0 == 7);
                assert!(found.is_some(), "a hot block was forgotten");
            }
        }
        assert!(rig.tree.evicted_count() > 0, "the test wants a full tree");
        let bytes_each = rig.tree.bytes() as f64 / rig.tree.membership_count() as f64;
        println!("{bytes_max} bytes, {core_count} cores: {bytes_each:.2} bytes per membership");
        assert!(bytes_each <= 24.0, "{bytes_each} bytes per membership");
    }
}

/// T3 when every block has many holders: lists and bitmaps stay within the bytes, too.
#[test]
fn a_flood_of_shared_blocks_stays_within_the_bytes() {
    let bytes_max = 1 << 20;
    let mut random = Random::new(60);
    let mut rig = Rig::new(1, bytes_max, 4_096);
    for _ in 0..3_000 {
        let chain: Vec<PrefixHash> = (0..10)
            .map(|_| PrefixHash(1 + random.next() % 5_000))
            .collect();
        for _ in 0..20 {
            rig.insert(random.below(4_096) as u16, &chain);
        }
        rig.settle();
        assert!(rig.tree.bytes() <= bytes_max);
    }
    assert!(rig.tree.evicted_count() > 0, "the test wants a full tree");
    let counted: usize = (1..=5_000)
        .map(|hash| rig.held(PrefixHash(hash)).len())
        .sum();
    assert_eq!(rig.tree.membership_count(), counted);
}

/// Ages have 8 bits; a block that is used in every generation stays through many rounds of them.
#[test]
fn ages_may_wrap() {
    let mut random = Random::new(61);
    let mut rig = Rig::new(1, 2 * SEGMENT_BYTES, 4);
    let hot = PrefixHash(3);
    rig.insert(0, &[hot]);
    for _ in 0..1_000 {
        let count = SEGMENT_ENTRIES / 32;
        let cold: Vec<PrefixHash> = (0..count).map(|_| PrefixHash(random.next() | 1)).collect();
        rig.insert(1, &cold);
        rig.touch(&[hot]);
        rig.settle();
        assert_eq!(rig.held(hot), [0]);
    }
}

/// A purge wins over what was queued before it and does not reach what was queued after it.
#[test]
fn a_purge_keeps_its_place_in_the_queue() {
    let mut random = Random::new(70);
    let mut rig = Rig::new(1, 8 << 20, 10);
    let mut fresh =
        |count| -> Vec<PrefixHash> { (0..count).map(|_| PrefixHash(random.next() | 1)).collect() };
    let (before, after, others) = (fresh(20_000), fresh(10), fresh(20_000));
    rig.insert(3, &before);
    rig.insert(4, &others);
    rig.insert(3, &others);
    rig.purge(3);
    rig.insert(3, &after);
    rig.insert(4, &after);
    assert!(!rig.shards[0].purged(Slot(3)));
    let mut turn_count = 0;
    let mut was_purged = false;
    while rig.shards[0].work(64) {
        turn_count += 1;
        was_purged |= rig.shards[0].purged(Slot(3));
    }
    assert!(turn_count > 500, "work is done in slices");
    assert!(!was_purged || rig.held(before[0]).is_empty());
    assert_eq!(rig.tree.membership_count(), 20_000 + 10 + 10);
    assert!(before.iter().all(|&hash| rig.held(hash).is_empty()));
    assert!(others.iter().all(|&hash| rig.held(hash) == [4]));
    assert!(after.iter().all(|&hash| rig.held(hash) == [3, 4]));
    assert!(!rig.shards[0].purged(Slot(3)));
    rig.purge(3);
    rig.purge(4);
    rig.settle();
    assert!(rig.shards[0].purged(Slot(3)) && rig.shards[0].purged(Slot(4)));
    assert_eq!(rig.tree.node_count(), 0);
}

/// No turn of work does more than its budget of steps, and none may be needed for nothing.
#[test]
fn work_is_bounded_by_its_budget() {
    let mut rig = Rig::new(1, 8 << 20, 10);
    let chain: Vec<PrefixHash> = (1..=3_000).map(PrefixHash).collect();
    rig.insert(0, &chain);
    for done in 1..=29 {
        assert!(rig.shards[0].work(100));
        assert_eq!(rig.tree.node_count(), done * 100);
    }
    assert!(!rig.shards[0].work(100) && rig.shards[0].is_idle());
    rig.insert(0, &[]);
    assert!(!rig.shards[0].work(1));
    rig.insert(99, &chain);
    rig.settle();
    assert_eq!(
        rig.tree.membership_count(),
        3_000,
        "lessons about slots beyond the books are ignored"
    );
}

#[test]
fn clear_forgets_all_and_goes_on() {
    let mut rig = Rig::new(2, 8 << 20, 10);
    let empty_bytes = rig.tree.bytes();
    let chain: Vec<PrefixHash> = (1..=30_000).map(PrefixHash).collect();
    (0..10).for_each(|worker| rig.insert(worker, &chain));
    rig.settle();
    rig.purge(1);
    rig.shards.iter_mut().for_each(Shard::clear);
    assert_eq!((rig.tree.node_count(), rig.tree.membership_count()), (0, 0));
    assert_eq!(rig.tree.bytes(), empty_bytes);
    assert!(
        rig.shards
            .iter()
            .all(|shard| shard.is_idle() && shard.purged(Slot(1)))
    );
    assert!(chain.iter().all(|&hash| rig.held(hash).is_empty()));
    rig.insert(1, &chain);
    rig.settle();
    assert!(chain.iter().all(|&hash| rig.held(hash) == [1]));
}

/// Owners get equal parts, whatever the directory and bucket bits are.
#[test]
fn owners_are_uniform() {
    let rig = Rig::new(7, 8 << 20, 1);
    let mut counts = [0_usize; 7];
    (1..=70_000).for_each(|hash| counts[rig.tree.owner(PrefixHash(hash))] += 1);
    assert!(
        counts.iter().all(|&count| (9_600..10_400).contains(&count)),
        "{counts:?}"
    );
}

/// A match outlives tree and shards as long as its pin does.
#[test]
fn a_match_outlives_the_tree() {
    let mut rig = Rig::new(1, 1 << 20, 100);
    (0..50).for_each(|worker| rig.insert(worker, &[PrefixHash(1)]));
    rig.settle();
    let Rig {
        tree,
        shards,
        domain: _,
        mut reader,
    } = rig;
    let pin = reader.pin();
    let found = tree.find(&pin, &[PrefixHash(1)], |_| true).unwrap();
    drop((tree, shards));
    assert_eq!(found.holders().count(), 50);
}

/// A block may only ever be held by the workers that its hash allows; readers of a running shard check it.
fn may_hold(hash: PrefixHash, slot: Slot) -> bool {
    (hash.0 ^ u64::from(slot.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 != 0
}

fn read_until(stop: &AtomicBool, tree: &Tree, mut reader: Reader, seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut found_count = 0;
    while !stop.load(Ordering::Relaxed) {
        let pin = reader.pin();
        for _ in 0..200 {
            found_count += u64::from(check_one(
                tree,
                &pin,
                PrefixHash(1 + random.next() % 60_000),
            ));
        }
    }
    found_count
}

fn check_one(tree: &Tree, pin: &Pin<'_>, hash: PrefixHash) -> bool {
    let Some(found) = tree.find(pin, &[hash], |_| true) else {
        return false;
    };
    let mut last = None;
    for slot in found.holders() {
        assert!(may_hold(hash, slot), "{slot:?} is said to hold {hash:?}");
        assert!(last < Some(slot), "holders ascend");
        last = Some(slot);
    }
    true
}

/// T1 under real threads: inserts, list growth, splits, evictions, purges and clears while two readers look.
#[test]
fn readers_of_a_running_shard_see_no_wrong_holder() {
    let mut random = Random::new(80);
    let mut rig = Rig::new(1, 1 << 20, 512);
    let readers = [rig.domain.reader(1), rig.domain.reader(2)];
    let stop = AtomicBool::new(false);
    let found_count = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (seed, reader) in (1..).zip(readers) {
            let (stop, tree, found_count) = (&stop, Arc::clone(&rig.tree), &found_count);
            scope.spawn(move || {
                let count = read_until(stop, &tree, reader, seed);
                found_count.fetch_add(count, Ordering::Relaxed);
            });
        }
        let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
        while std::time::Instant::now() < end {
            for _ in 0..50 {
                let worker = random.below(512) as u16;
                let from = random.next() % 60_000;
                let range = (1 + from..).take(40).map(PrefixHash);
                let allowed = range
                    .filter(|&hash| may_hold(hash, Slot(worker)))
                    .collect::<Vec<_>>();
                rig.insert(worker, &allowed);
            }
            match random.below(300) {
                0 => rig.shards[0].clear(),
                1..20 => rig.purge(random.below(512) as u16),
                _ => {}
            }
            rig.settle();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(
        found_count.into_inner() > 10_000,
        "readers found next to nothing"
    );
    assert!(rig.tree.evicted_count() > 0, "the test wants evictions");
}
