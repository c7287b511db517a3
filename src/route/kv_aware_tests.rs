use std::sync::Arc;

use shards::{Domain, Lesson, PrefixHash, Shard, TreeLimits, tree};

use super::super::policy::{Key, PolicyKind, decide};
use super::super::{Candidates, Index, KeySeed, TreePrefixes, Trust};
use super::*;

/// Requests, and prompt bytes that wait, by slot.
struct Fleet(Vec<(u32, u64)>);

impl Loads for Fleet {
    fn load(&self, slot: Slot) -> u32 {
        self.0[slot.index()].0
    }

    fn waiting_bytes(&self, slot: Slot) -> u64 {
        self.0[slot.index()].1
    }
}

fn credits(of: &[(u16, u64)]) -> Credits {
    let mut credits = Credits::default();
    credits
        .of
        .extend(of.iter().map(|(slot, tokens)| (Slot(*slot), *tokens)));
    credits
}

struct Case {
    fleet: Fleet,
    credits: Credits,
    count: u64,
    settings: Settings,
    exclude: Vec<Slot>,
}

impl Case {
    fn new(count: u64, fleet: &[(u32, u64)], held: &[(u16, u64)]) -> Case {
        Case {
            fleet: Fleet(fleet.to_vec()),
            credits: credits(held),
            count,
            settings: Settings {
                policy: PolicyKind::KvAware,
                ..Settings::default()
            },
            exclude: Vec::new(),
        }
    }

    /// The workers chosen in 400 tries, with how often.
    fn choices(&self) -> Vec<(u16, u32)> {
        let candidates: Candidates = (0..self.fleet.0.len() as u16).map(Slot).collect();
        let mut turn = Turn::new(7);
        let mut counts = vec![0; self.fleet.0.len()];
        for _ in 0..400 {
            let tokens = Tokens {
                count: self.count,
                credits: &self.credits,
                holdings: None,
            };
            let decision = decide(
                &self.settings,
                Key::<TreePrefixes<'_>>::Tokens(tokens),
                &candidates,
                &self.exclude,
                &self.fleet,
                &mut turn,
                &mut Vec::new(),
            );
            let decision = decision.expect("somebody is left");
            let credit = self.credits.find(decision.slot);
            assert_eq!(decision.new_tokens, Some(self.count - credit));
            assert_eq!(decision.seen, self.fleet.load(decision.slot));
            counts[decision.slot.index()] += 1;
        }
        let chosen = counts.iter().enumerate().filter(|(_, count)| **count > 0);
        chosen.map(|(slot, count)| (slot as u16, *count)).collect()
    }

    fn winner(&self) -> u16 {
        let choices = self.choices();
        assert_eq!(choices.len(), 1, "{choices:?}");
        choices[0].0
    }
}

#[test]
fn the_least_product_wins() {
    let kib = 4 * 1000;
    // (requests, waiting bytes), (worker, credit), who wins.
    type Row<'r> = (&'r [(u32, u64)], &'r [(u16, u64)], u16);
    let table: [Row<'_>; 7] = [
        // Idle: who holds most.
        (&[(0, 0), (0, 0), (0, 0)], &[(1, 900), (2, 800)], 1),
        // 100 x 2 against 1000 x 1.
        (&[(1, 0), (0, 0)], &[(0, 900)], 0),
        // 100 x 11 against 1000 x 1.
        (&[(10, 0), (0, 0)], &[(0, 900)], 1),
        // 600 x 2 against 1000 x 1.
        (&[(1, 0), (0, 0)], &[(0, 400)], 1),
        // Tokens that wait count like new ones: 500 + 600 against 1000.
        (&[(0, 600 * 4), (0, 0)], &[(0, 500)], 1),
        (&[(0, 400 * 4), (0, 0)], &[(0, 500)], 0),
        // (100 + 1000) x 2 against 1000 x 3.
        (&[(1, kib), (2, 0)], &[(0, 900)], 0),
    ];
    for (fleet, held, wanted) in table {
        let case = Case::new(1000, fleet, held);
        assert_eq!(case.winner(), wanted, "{fleet:?} {held:?}");
    }
}

#[test]
fn of_equals_each_has_its_chance_and_who_was_tried_has_none() {
    let mut case = Case::new(100, &[(2, 0); 4], &[]);
    let choices = case.choices();
    assert_eq!(choices.len(), 4);
    assert!(choices.iter().all(|(_, count)| *count > 50), "{choices:?}");
    // 200 x 1 each, but one computes less: fewer new tokens.
    case = Case::new(200, &[(0, 0), (0, 400)], &[(1, 100)]);
    assert_eq!(case.winner(), 1);
    case = Case::new(200, &[(0, 0), (0, 0), (5, 0)], &[(0, 100), (1, 90)]);
    case.exclude = vec![Slot(0)];
    assert_eq!(case.winner(), 1);
}

#[test]
fn a_temperature_spreads_by_cost() {
    // Costs 100 and 1000.
    let mut case = Case::new(1000, &[(0, 0), (0, 0)], &[(0, 900)]);
    case.settings.temperature = 1e-9;
    assert_eq!(case.winner(), 0);
    case.settings.temperature = 900.0 / 3.0_f64.ln();
    // One of four goes to the dearer one.
    let choices = case.choices();
    assert!((60..140).contains(&choices[1].1), "{choices:?}");
    case.settings.temperature = 1e12;
    let choices = case.choices();
    assert!((140..260).contains(&choices[1].1), "{choices:?}");
}

/// vllm-router's rule: the bound worker has less than ceil((all + 1) / workers).
#[test]
fn a_decode_worker_keeps_a_session_while_it_has_less_than_its_share() {
    let keeps = |loads: &[u32]| {
        let fleet = Fleet(loads.iter().map(|load| (*load, 0)).collect());
        let candidates: Candidates = (0..loads.len() as u16).map(Slot).collect();
        has_even_share(&candidates, &fleet, Slot(0))
    };
    assert!(keeps(&[0, 0, 0]));
    assert!(!keeps(&[1, 0, 0]));
    assert!(keeps(&[1, 2, 0]));
    assert!(!keeps(&[2, 2, 1]));
    assert!(keeps(&[2, 2, 2]));
    assert!(!keeps(&[3, 2, 2]));
    assert!(keeps(&[0]));
    assert!(keeps(&[7]));
}

const BLOCK: usize = 4;
const CHAIN_BLOCKS: usize = 300;
const SOURCE_COUNT: u16 = 90;

/// A fleet at random: who speaks for whom, who holds how much, who has what to do.
struct Random {
    rng: Rng,
    index: Index,
    shards: Vec<Shard>,
    domain: Arc<Domain>,
    chain: Vec<PrefixHash>,
    fleet: Fleet,
    /// Worker, trust, blocks held, by source.
    sources: Vec<(Slot, Trust, usize)>,
}

impl Random {
    fn new(seed: u64, depth_count: usize) -> Random {
        let mut rng = Rng::new(seed);
        let domain = Arc::new(Domain::new(1));
        let limits = TreeLimits {
            bytes_max: 1 << 20,
            slot_count_max: 256,
        };
        let (tree, shards) = tree(2, domain.clone(), limits);
        let worker_count = 1 + rng.below(70);
        let index = Index::new(tree, KeySeed(seed), BLOCK);
        let chain = (0..CHAIN_BLOCKS)
            .map(|_| PrefixHash(rng.next() >> 9 | 1))
            .collect();
        let (load_max, waiting_max) = ([1, 3, 20][rng.below(3)], [1, 400, 20_000][rng.below(3)]);
        let one = |_| (rng.below(load_max) as u32, rng.below(waiting_max) as u64);
        let fleet = Fleet((0..worker_count).map(one).collect());
        let depths: Vec<usize> = (0..depth_count)
            .map(|_| rng.below(CHAIN_BLOCKS + 1))
            .collect();
        // Of some the whole fleet holds one prefix, of others few hold anything.
        let (common, is_common) = (rng.below(CHAIN_BLOCKS), rng.below(2) == 0);
        let share = 1 + rng.below(4);
        let source = |_| {
            let trust = match rng.below(6) {
                0 => Trust::ALL[rng.below(4)],
                _ => Trust::Exact,
            };
            let blocks = match rng.below(4 * share) {
                0..4 => depths[rng.below(depths.len())],
                _ if is_common => common,
                _ => 0,
            };
            (Slot(rng.below(worker_count) as u16), trust, blocks)
        };
        let sources = (0..SOURCE_COUNT).map(source).collect();
        let mut random = Random {
            rng,
            index,
            shards,
            domain,
            chain,
            fleet,
            sources,
        };
        random.teach();
        random
    }

    fn teach(&mut self) {
        for (source, (worker, trust, blocks)) in (0..).zip(&self.sources) {
            // First somebody else's, or nobody's.
            let before = Slot(self.rng.below(70) as u16);
            self.index.set_source(source, Some((before, Trust::Exact)));
            if self.rng.below(3) == 0 {
                self.index.set_source(source, None);
            }
            self.index.set_source(source, Some((*worker, *trust)));
            for key in &self.chain[..*blocks] {
                let shard = &mut self.shards[self.index.tree.owner(*key)];
                shard.apply(Lesson::Insert {
                    worker: Slot(source),
                    hashes: [*key].into(),
                });
                while shard.work(8) {}
            }
        }
    }

    /// The formula, of a worker.
    fn credit(&self, worker: Slot, count: u64) -> u64 {
        let own = self.sources.iter().filter(|(slot, ..)| *slot == worker);
        let credits = own.map(|(_, trust, blocks)| {
            let percent = match trust {
                Trust::Exact => 100,
                Trust::CatchingUp => 75,
                Trust::Degraded => 50,
                Trust::Blind => 0,
            };
            // The chain ends before the prompt's last token.
            (*blocks as u64).min((count - 1) / BLOCK as u64) * BLOCK as u64 * percent / 100
        });
        credits.max().unwrap_or(0)
    }

    fn rank(&self, worker: Slot, credit: u64, count: u64) -> (f64, u64, u32) {
        let (load, waiting_bytes) = self.fleet.0[worker.index()];
        let new = count - credit;
        let cost = (new + waiting_bytes / 4) as f64 * (f64::from(load) + 1.0);
        (cost, new, load)
    }

    /// Chooses many times among some of the workers; each choice with its rank and the rank of the best.
    fn choices(&mut self, mut see: impl FnMut(Decision, (f64, u64, u32), (f64, u64, u32), u64)) {
        let settings = Settings {
            policy: PolicyKind::KvAware,
            ..Settings::default()
        };
        let mut turn = Turn::new(self.rng.next());
        let mut reader = self.domain.reader(0);
        for _ in 0..20 {
            let count = 1 + self.rng.below(CHAIN_BLOCKS * BLOCK + 20) as u64;
            let chain_len = ((count - 1) as usize / BLOCK).min(CHAIN_BLOCKS);
            let everybody = (0..self.fleet.0.len() as u16).map(Slot);
            let is_few = self.rng.below(3) == 0;
            let candidates: Candidates = everybody
                .filter(|_| !is_few || self.rng.below(2) == 0)
                .collect();
            let exclude: Vec<Slot> = (0..self.rng.below(3))
                .map(|_| Slot(self.rng.below(self.fleet.0.len()) as u16))
                .collect();
            let pin = reader.pin();
            let mut gathered = Credits::default();
            let chain = &self.chain[..chain_len];
            let holdings =
                self.index
                    .look_up(&pin, chain, count, &settings, &candidates, &mut gathered);
            let tokens = Tokens {
                count,
                credits: &gathered,
                holdings,
            };
            let left = candidates
                .slots()
                .iter()
                .filter(|slot| !exclude.contains(slot));
            let held = |slot| self.credit(slot, count);
            left.clone()
                .for_each(|slot| assert_eq!(tokens.credit(*slot), held(*slot)));
            let ranks = left.map(|slot| self.rank(*slot, held(*slot), count));
            let best = ranks.min_by(|a, b| a.partial_cmp(b).expect("no NaN"));
            let key = Key::<TreePrefixes<'_>>::Tokens(tokens);
            let decision = decide(
                &settings,
                key,
                &candidates,
                &exclude,
                &self.fleet,
                &mut turn,
                &mut Vec::new(),
            );
            assert_eq!(decision.is_some(), best.is_some());
            let (Some(decision), Some(best)) = (decision, best) else {
                continue;
            };
            assert!(candidates.contains(decision.slot) && !exclude.contains(&decision.slot));
            let rank = self.rank(decision.slot, held(decision.slot), count);
            see(decision, rank, best, count);
        }
    }
}

/// Whatever is not looked at, the choice is that of the formula worked out for everybody.
#[test]
fn it_is_the_cheapest_of_all() {
    for seed in 1..120 {
        println!("seed {seed}");
        Random::new(seed, 6).choices(|decision, rank, best, count| {
            assert_eq!(rank, best, "{decision:?} of {count}");
            assert_eq!(decision.new_tokens, Some(rank.1));
        });
    }
}

/// At more depths than are looked at a credit may be missed, and is never invented.
#[test]
fn beyond_eight_levels_nothing_is_invented() {
    for seed in 1..60 {
        println!("seed {seed}");
        Random::new(seed, 80).choices(|decision, rank, best, count| {
            let new = decision.new_tokens.expect("tokens are known");
            assert!(new >= rank.1 && new <= count, "{decision:?}");
            assert!(rank >= best);
        });
    }
}
