//! Lessons over the real tree: what is taught is found, and nothing is taught twice.

use std::sync::Arc;

use shards::{Domain, Reader, Shard, TreeLimits};

use super::*;
use crate::route::{
    Candidates, Decision, Key, Loads, Prefixes, Reason, Rng, Settings, TreePrefixes, Turn,
    bytes_of_blocks, decide,
};

const SEED: u64 = 0x1ea2;

/// A tree with its owners, and one reader.
struct World {
    tree: Arc<Tree>,
    shards: Vec<Shard>,
    reader: Reader,
    batches: Batches,
}

/// What was emitted, in short: (owner, kind, blocks).
type Emitted = Vec<(usize, &'static str, Vec<PrefixHash>)>;

impl World {
    fn new(core_count: usize) -> World {
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 64 << 20,
            slot_count_max: 64,
        };
        let (tree, shards) = shards::tree(core_count, Arc::clone(&domain), limits);
        World {
            tree,
            shards,
            reader: domain.reader(0),
            batches: Batches::default(),
        }
    }

    /// The lessons of one request, applied by their owners.
    fn teach(&mut self, chain: &[PrefixHash], slot: Slot) -> Emitted {
        let (mut emitted, mut taught) = (Emitted::new(), Vec::new());
        let pin = self.reader.pin();
        lessons(
            &self.tree,
            &pin,
            chain,
            slot,
            &mut self.batches,
            Vec::new,
            |owner, lesson| {
                emitted.push(match &lesson {
                    Lesson::Insert { worker, hashes } => {
                        assert_eq!(*worker, slot);
                        (owner, "insert", hashes.to_vec())
                    }
                    Lesson::Touch { hashes } => (owner, "touch", hashes.to_vec()),
                    Lesson::Branch { parent } => (owner, "branch", vec![*parent]),
                    Lesson::Remove { .. } => panic!("requests teach no removal"),
                    Lesson::Purge { .. } => panic!("a request purges nobody"),
                });
                taught.push((owner, lesson));
            },
        );
        drop(pin);
        for (owner, lesson) in taught {
            self.shards[owner].apply(lesson);
        }
        for shard in &mut self.shards {
            while shard.work(1000) {}
        }
        for (owner, _, hashes) in &emitted {
            assert!(
                !hashes.is_empty() && hashes.iter().all(|hash| self.tree.owner(*hash) == *owner)
            );
        }
        emitted
    }

    /// Blocks of the chain that the worker is known to hold, and whether the last one is a fork.
    fn held(&mut self, chain: &[PrefixHash], slot: Slot) -> (usize, bool) {
        let pin = self.reader.pin();
        let prefixes = TreePrefixes {
            tree: &self.tree,
            pin: &pin,
            chain,
        };
        let Some(found) = prefixes.find(|holder| holder == slot) else {
            return (0, false);
        };
        assert!(found.is_held_by(slot));
        (found.blocks, found.is_fork())
    }
}

fn chain_of(rng: &mut Rng, blocks: usize) -> Vec<PrefixHash> {
    (0..blocks).map(|_| PrefixHash(rng.next().max(1))).collect()
}

fn count(emitted: &Emitted, kind: &str) -> usize {
    emitted
        .iter()
        .filter(|(_, of, _)| *of == kind)
        .map(|(_, _, hashes)| hashes.len())
        .sum()
}

#[test]
fn what_is_taught_is_found_at_full_depth_and_taught_only_once() {
    let mut rng = Rng::new(SEED);
    for core_count in [1, 2, 7] {
        let mut world = World::new(core_count);
        for blocks in [1, 2, 30, 3000] {
            let chain = chain_of(&mut rng, blocks);
            let emitted = world.teach(&chain, Slot(3));
            assert_eq!(count(&emitted, "insert"), blocks);
            assert_eq!(
                (count(&emitted, "touch"), count(&emitted, "branch")),
                (0, 0)
            );
            assert!(emitted.len() <= core_count, "one batch for each owner");
            assert_eq!(world.held(&chain, Slot(3)).0, blocks);
            assert_eq!(world.held(&chain, Slot(4)).0, 0);
            assert_eq!(
                world.teach(&chain, Slot(3)),
                [],
                "the same request again teaches nothing"
            );
        }
    }
}

#[test]
fn a_conversations_next_turn_teaches_only_its_new_blocks() {
    let mut rng = Rng::new(SEED);
    let mut world = World::new(2);
    let chain = chain_of(&mut rng, 50);
    world.teach(&chain[..40], Slot(0));
    let emitted = world.teach(&chain, Slot(0));
    assert_eq!(
        (count(&emitted, "insert"), count(&emitted, "touch")),
        (10, 0)
    );
    assert_eq!(world.held(&chain, Slot(0)).0, 50);
}

#[test]
fn a_worker_that_gets_a_prompt_others_know_is_taught_all_of_it() {
    let mut rng = Rng::new(SEED);
    let mut world = World::new(3);
    let chain = chain_of(&mut rng, 25);
    world.teach(&chain, Slot(0));
    let emitted = world.teach(&chain, Slot(1));
    assert_eq!(
        (count(&emitted, "insert"), count(&emitted, "branch")),
        (25, 0)
    );
    assert_eq!(
        (world.held(&chain, Slot(0)).0, world.held(&chain, Slot(1)).0),
        (25, 25)
    );
}

#[test]
fn conversations_that_part_after_a_shared_prefix_make_its_end_a_fork() {
    let mut rng = Rng::new(SEED);
    let mut world = World::new(2);
    let system = chain_of(&mut rng, 10);
    for conversation in 0..6 {
        let chain = [system.clone(), chain_of(&mut rng, 10)].concat();
        let emitted = world.teach(&chain, Slot(0));
        // The first one leaves nothing that was known.
        assert_eq!(count(&emitted, "branch"), usize::from(conversation > 0));
        if conversation > 0 {
            assert!(
                emitted
                    .iter()
                    .any(|(_, kind, hashes)| *kind == "branch" && hashes[0] == system[9])
            );
        }
    }
    assert_eq!(world.held(&system, Slot(0)), (10, true));
    let next = [system.clone(), chain_of(&mut rng, 10)].concat();
    assert_eq!(world.held(&next, Slot(0)), (10, true));
    assert_eq!(world.held(&system[..9], Slot(0)), (9, false));
}

#[test]
fn a_prefix_grown_stale_is_touched_whole_and_once() {
    let mut rng = Rng::new(SEED);
    let mut world = World::new(1);
    let system = chain_of(&mut rng, 10);
    world.teach(&system, Slot(0));
    let mut touched = Emitted::new();
    // Other prompts come and go until the shard has moved on to another generation.
    for _ in 0..10_000 {
        let other = chain_of(&mut rng, 100);
        world.teach(&other, Slot(1));
        touched = world.teach(&system, Slot(0));
        if !touched.is_empty() {
            break;
        }
    }
    assert_eq!(
        count(&touched, "touch"),
        10,
        "seed {SEED:#x}: never grew stale, or was taught otherwise"
    );
    assert_eq!(
        (count(&touched, "insert"), count(&touched, "branch")),
        (0, 0)
    );
    assert_eq!(world.teach(&system, Slot(0)), [], "fresh again");
}

#[test]
fn an_empty_chain_teaches_nothing() {
    assert_eq!(World::new(2).teach(&[], Slot(0)), []);
}

struct Counted([u32; 4]);

impl Loads for Counted {
    fn load(&self, slot: Slot) -> u32 {
        self.0[usize::from(slot.0)]
    }
}

impl World {
    /// Decides as a core does, and teaches what was decided.
    fn choose(&mut self, chain: &[PrefixHash], loads: &Counted, turn: &mut Turn) -> Decision {
        let candidates: Candidates = (0..4).map(Slot).collect();
        let decision = {
            let pin = self.reader.pin();
            let prefixes = TreePrefixes {
                tree: &self.tree,
                pin: &pin,
                chain,
            };
            let key = Key::Prefix(&prefixes, bytes_of_blocks(chain.len()));
            decide(
                &Settings::default(),
                key,
                &candidates,
                &[],
                loads,
                turn,
                &mut Vec::new(),
            )
        };
        let decision = decision.expect("there are candidates");
        self.teach(chain, decision.slot);
        decision
    }
}

/// The whole of route over the real tree: conversations stay where they are, and new ones on one system prompt are
/// spread once it is known to be one.
#[test]
fn decisions_and_lessons_together_keep_conversations_and_spread_system_prompts() {
    let (mut rng, mut turn, mut world) = (Rng::new(SEED), Turn::new(SEED), World::new(2));
    let system = chain_of(&mut rng, 20);
    let mut loads = Counted([0; 4]);
    let mut conversations = Vec::new();
    for _ in 0..40 {
        let chain = [system.clone(), chain_of(&mut rng, 20)].concat();
        let home = world.choose(&chain, &loads, &mut turn).slot;
        loads.0[usize::from(home.0)] += 1;
        conversations.push((chain, home));
    }
    assert_eq!(loads.0, [10; 4], "seed {SEED:#x}");
    for (chain, home) in &mut conversations {
        chain.extend(chain_of(&mut rng, 3));
        let decision = world.choose(chain, &Counted([0; 4]), &mut turn);
        assert_eq!(
            (decision.slot, decision.reason, decision.matched_blocks),
            (*home, Reason::Affinity, 40)
        );
    }
}
