use shards::{Domain, Lesson, Shard, TreeLimits};

use super::*;
use crate::route::block_chain;

struct Rig {
    index: Index,
    shards: Vec<Shard>,
    domain: Arc<Domain>,
}

const VALUES: [f64; TIER_COUNT] = [1.0, 0.8, 0.6, 0.3];

impl Rig {
    fn new() -> Rig {
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 1 << 20,
            slot_count_max: 64,
        };
        let (tree, shards) = shards::tree(2, domain.clone(), limits);
        let index = Index::new(tree, KeySeed(1), 4);
        Rig {
            index,
            shards,
            domain,
        }
    }

    fn store(&mut self, source: u16, tier: usize, keys: &[PrefixHash]) {
        self.index.add_tier(tier);
        for key in keys {
            let key = key_in(tier, *key);
            let shard = &mut self.shards[self.index.tree.owner(key)];
            shard.apply(Lesson::Insert {
                worker: Slot(source),
                hashes: [key].into(),
            });
            while shard.work(8) {}
        }
    }

    fn chain(&self, ids: &[u32]) -> Vec<PrefixHash> {
        let mut out = Vec::new();
        block_chain(&self.index.keys, ids, 4, None, None, &mut out);
        out
    }

    /// Credits of a prompt for workers below 8.
    fn credits(&self, chain: &[PrefixHash], tokens: u64) -> Vec<(u16, u64)> {
        let mut reader = self.domain.reader(0);
        let pin = reader.pin();
        let mut out = Credits::default();
        self.index
            .credit(&pin, chain, tokens, &VALUES, |slot| slot.0 < 8, &mut out);
        out.of.iter().map(|(slot, n)| (slot.0, *n)).collect()
    }
}

fn ids(count: u32) -> Vec<u32> {
    (0..count).collect()
}

#[test]
fn each_worker_is_credited_with_its_longest_run() {
    let mut rig = Rig::new();
    let chain = rig.chain(&ids(41));
    for (source, blocks) in [(20, 10), (21, 3), (22, 3), (23, 7)] {
        rig.store(source, DEVICE, &chain[..blocks]);
    }
    let speaks_for = [(20, 5), (21, 2), (22, 3), (23, 9)];
    for (source, worker) in speaks_for {
        rig.index
            .set_source(source, Some((Slot(worker), Trust::Exact)));
    }
    // Worker 9 is no candidate.
    assert_eq!(rig.credits(&chain, 41), [(2, 12), (3, 12), (5, 40)]);
    assert_eq!(rig.credits(&chain[..5], 21), [(2, 12), (3, 12), (5, 20)]);
    assert_eq!(rig.credits(&[], 3), []);
    // Two ranks of one worker: a request meets the better one, not both.
    rig.index.set_source(21, Some((Slot(5), Trust::Exact)));
    assert_eq!(rig.credits(&chain, 41), [(3, 12), (5, 40)]);
    rig.index.set_source(20, None);
    assert_eq!(rig.credits(&chain, 41), [(3, 12), (5, 12)]);
}

#[test]
fn credit_is_scaled_by_trust() {
    let mut rig = Rig::new();
    let chain = rig.chain(&ids(41));
    rig.store(20, DEVICE, &chain);
    for (trust, wanted) in [
        (Trust::Exact, vec![(1, 40)]),
        (Trust::CatchingUp, vec![(1, 30)]),
        (Trust::Degraded, vec![(1, 20)]),
        (Trust::Blind, vec![]),
    ] {
        rig.index.set_source(20, Some((Slot(1), trust)));
        assert_eq!(rig.credits(&chain, 41), wanted, "{trust:?}");
    }
}

/// vllm-router's arithmetic: the device's run, then the best continuation in one other tier.
#[test]
fn one_other_tier_continues_the_run() {
    let mut rig = Rig::new();
    let chain = rig.chain(&ids(41));
    rig.index.set_source(20, Some((Slot(1), Trust::Exact)));
    rig.index.set_source(21, Some((Slot(2), Trust::Exact)));
    rig.store(20, DEVICE, &chain[..4]);
    assert_eq!(rig.credits(&chain, 41), [(1, 16)]);
    rig.store(20, DISK, &chain);
    // 4 blocks, and 6 at 0.3.
    assert_eq!(rig.credits(&chain, 41), [(1, 23)]);
    rig.store(20, HOST, &chain[..9]);
    // 4 blocks, and 5 at 0.8: more than those of the disk; the two are not added up.
    assert_eq!(rig.credits(&chain, 41), [(1, 32)]);
    // Nothing in the device's memory at all.
    rig.store(21, HOST, &chain[..5]);
    assert_eq!(rig.credits(&chain, 41), [(1, 32), (2, 16)]);
}

/// A block without the one before it is another's that has its key.
#[test]
fn a_block_by_itself_is_nobodys_prefix() {
    let mut rig = Rig::new();
    let chain = rig.chain(&ids(41));
    rig.index.set_source(20, Some((Slot(1), Trust::Exact)));
    rig.index.set_source(21, Some((Slot(2), Trust::Exact)));
    rig.store(20, DEVICE, &chain[..3]);
    rig.store(20, DEVICE, &chain[9..]);
    let mut reader = rig.domain.reader(0);
    let pin = reader.pin();
    let candidates: Candidates = (0..4).map(Slot).collect();
    let deepest = |rig: &Rig| {
        let (settings, mut out) = (Settings::default(), Credits::default());
        let holdings = rig
            .index
            .look_up(&pin, &chain, 41, &settings, &candidates, &mut out)
            .unwrap();
        let level = holdings
            .deepest(40, 1, &SlotSet::default(), |_| true)
            .unwrap();
        let held = holdings
            .held_at(&level)
            .map(|(_, worker, credit)| (worker.0, credit));
        let credits = [1, 2].map(|worker| holdings.credit(Slot(worker)));
        (held.collect::<Vec<_>>(), credits)
    };
    assert_eq!(deepest(&rig), (vec![(1, 12)], [12, 0]));
    // Where somebody holds both, still only he does.
    rig.store(21, DEVICE, &chain);
    assert_eq!(deepest(&rig), (vec![(2, 40)], [12, 40]));
}

#[test]
fn adapters_are_known_by_name() {
    let rig = Rig::new();
    assert!(!rig.index.is_adapter("a"));
    for n in 0..ADAPTER_COUNT_MAX {
        assert!(rig.index.add_adapter(&format!("adapter {n}")));
    }
    assert!(rig.index.add_adapter("adapter 7"));
    assert!(!rig.index.add_adapter("one more"));
    assert!(rig.index.is_adapter("adapter 4095") && !rig.index.is_adapter("one more"));
}
