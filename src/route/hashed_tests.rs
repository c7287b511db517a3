//! Where keys go: evenly, the same everywhere, and no further than they must.

use super::*;
use crate::route::candidates::name_of;
use crate::route::{Key, PolicyKind, TreePrefixes, Turn, decide};

const KEYS: u64 = 20_000;
const HASHING: [PolicyKind; 2] = [PolicyKind::ConsistentHash, PolicyKind::RendezvousHash];

struct Fleet {
    settings: Settings,
    candidates: Candidates,
    loads: Vec<u32>,
    exclude: Vec<Slot>,
    turn: Turn,
}

impl Loads for Vec<u32> {
    fn load(&self, slot: Slot) -> u32 {
        self[usize::from(slot.0)]
    }
}

fn url(n: usize) -> String {
    format!("http://10.0.{}.{}:8000", n / 256, n % 256)
}

/// Worker `urls[i]` in slot `slots[i]`.
fn candidates(workers: impl Iterator<Item = (u16, usize)>) -> Candidates {
    let named = workers.map(|(slot, n)| (Slot(slot), name_of(&url(n))));
    named.collect::<Candidates>().with_ring()
}

fn fleet(policy: PolicyKind, count: usize) -> Fleet {
    Fleet {
        settings: Settings {
            policy,
            ..Settings::default()
        },
        candidates: candidates((0..count).map(|n| (n as u16, n))),
        loads: vec![0; count],
        exclude: Vec::new(),
        turn: Turn::new(1),
    }
}

/// Keys as the hash of a session is.
fn key(n: u64) -> u64 {
    crate::route::session_hash_of(crate::route::KeySeed(0), &format!("session-{n}"))
}

impl Fleet {
    fn decide(&mut self, key: Key<'_, TreePrefixes<'static>>) -> Option<Decision> {
        let Fleet {
            settings,
            candidates,
            loads,
            exclude,
            turn,
        } = self;
        decide(
            settings,
            key,
            candidates,
            exclude,
            loads,
            turn,
            &mut Vec::new(),
        )
    }

    fn ask(&mut self, key: u64) -> (u16, Reason) {
        let decision = self.decide(Key::Hash(key)).expect("a worker");
        assert_eq!(decision.seen, self.loads.load(decision.slot));
        (decision.slot.0, decision.reason)
    }

    fn homes(&mut self) -> Vec<u16> {
        (0..KEYS).map(|n| self.ask(key(n)).0).collect()
    }
}

fn counts(homes: &[u16], count: usize) -> Vec<usize> {
    let mut counts = vec![0; count];
    for home in homes {
        counts[usize::from(*home)] += 1;
    }
    counts
}

/// 160 points a worker make shares that differ by 1 / sqrt(160), 8 %, of the mean; weights make none that differ but by
/// the keys' own chance.
#[test]
fn keys_spread_evenly() {
    for (policy, share_deviation) in HASHING.into_iter().zip([1.0 / 160_f64.sqrt(), 0.0]) {
        for count in [3, 8, 100] {
            let counts = counts(&fleet(policy, count).homes(), count);
            let mean = KEYS as f64 / count as f64;
            let variance = mean + (share_deviation * mean).powi(2);
            let squares = counts.iter().map(|n| (*n as f64 - mean).powi(2) / variance);
            let chi: f64 = squares.sum();
            let freedom = count as f64;
            assert!(
                chi < freedom + 4.0 * (2.0 * freedom).sqrt(),
                "{policy:?} over {count}: {chi:.1} {counts:?}"
            );
        }
    }
}

/// Keys that differ in one bit, or count up, are no worse: the hash is not relied on to hide a bad mixer.
#[test]
fn weights_are_fair_to_similar_keys() {
    let mut fleet = fleet(PolicyKind::RendezvousHash, 10);
    for scale in [1, 1 << 20, 1 << 40] {
        let homes: Vec<u16> = (1..=KEYS)
            .map(|n| fleet.ask(n.wrapping_mul(scale)).0)
            .collect();
        let counts = counts(&homes, 10);
        let range = KEYS as usize / 10 * 85 / 100..KEYS as usize / 10 * 115 / 100;
        assert!(
            counts.iter().all(|n| range.contains(n)),
            "{scale}: {counts:?}"
        );
    }
}

#[test]
fn a_home_depends_on_urls_alone() {
    for policy in HASHING {
        let mut here = fleet(policy, 9);
        let mut there = fleet(policy, 9);
        // Other slots, another order, another core's random numbers.
        there.candidates = candidates((0..9).rev().map(|n| (100 + n as u16 * 3, n)));
        there.loads = vec![7; 200];
        there.turn = Turn::new(99);
        for (n, home) in (0..KEYS).zip(here.homes()) {
            assert_eq!(there.ask(key(n)), (100 + home * 3, Reason::Home));
        }
    }
    // And on no build or machine: these are written down.
    let homes = |policy| {
        let mut fleet = fleet(policy, 5);
        (0..8).map(|n| fleet.ask(key(n)).0).collect::<Vec<_>>()
    };
    assert_eq!(homes(PolicyKind::ConsistentHash), RING_HOMES);
    assert_eq!(homes(PolicyKind::RendezvousHash), WEIGHT_HOMES);
}

const RING_HOMES: [u16; 8] = [2, 1, 2, 0, 1, 4, 3, 3];
const WEIGHT_HOMES: [u16; 8] = [0, 2, 4, 2, 4, 0, 3, 2];

#[test]
fn a_worker_that_leaves_moves_only_its_own_and_gets_them_back() {
    for policy in HASHING {
        for count in [3_usize, 20] {
            let mut fleet = fleet(policy, count);
            let before = fleet.homes();
            let all = fleet.candidates.clone();
            let gone = 1;
            let left = (0..count).filter(|n| *n != gone).map(|n| (n as u16, n));
            fleet.candidates = candidates(left);
            let after = fleet.homes();
            let mut moved = vec![0; count];
            for (before, after) in before.iter().zip(&after) {
                if usize::from(*before) == gone {
                    moved[usize::from(*after)] += 1;
                } else {
                    assert_eq!(before, after, "{policy:?}: a key of a worker that stays");
                }
            }
            let total: usize = moved.iter().sum();
            let fair = KEYS as usize / count;
            assert!((fair * 7 / 10..fair * 13 / 10).contains(&total), "{total}");
            // Its keys go to all the others, not to one neighbour.
            let least = moved.iter().enumerate().filter(|(n, _)| *n != gone);
            let least = least.map(|(_, moved)| *moved).min().unwrap();
            assert!(least * (count - 1) * 6 > total, "{policy:?}: {moved:?}");
            // A request for which that worker is only excluded goes where its key would go without it.
            fleet.candidates = all;
            fleet.exclude = vec![Slot(gone as u16)];
            assert_eq!(fleet.homes(), after);
            fleet.exclude.clear();
            assert_eq!(fleet.homes(), before);
        }
    }
}

#[test]
fn a_models_part_of_the_ring_is_the_ring_of_its_workers() {
    let all = candidates((0..50).map(|n| (n as u16, n)));
    let some = || (0..50_usize).filter(|n| n % 7 == 3).map(|n| (n as u16, n));
    let part: Candidates = some()
        .map(|(slot, n)| (Slot(slot), name_of(&url(n))))
        .collect();
    let (part, own) = (part.with_ring_of(&all), candidates(some()));
    for n in 0..100 {
        assert!(part.around(key(n)).eq(own.around(key(n))));
        assert_eq!(part.around(key(n)).count(), 7 * crate::route::RING_POINTS);
    }
}

#[test]
fn every_retry_goes_elsewhere_until_nobody_is_left() {
    for policy in HASHING {
        let mut fleet = fleet(policy, 6);
        for n in 0..200 {
            fleet.exclude.clear();
            while fleet.exclude.len() < 6 {
                let (slot, reason) = fleet.ask(key(n));
                assert!(!fleet.exclude.contains(&Slot(slot)));
                let is_first = fleet.exclude.is_empty();
                assert_eq!(reason == Reason::Home, is_first, "{reason:?}");
                fleet.exclude.push(Slot(slot));
            }
            assert_eq!(fleet.decide(Key::Hash(key(n))), None);
        }
        fleet.candidates = Candidates::default().with_ring();
        fleet.exclude.clear();
        assert_eq!(fleet.decide(Key::Hash(1)), None);
    }
}

/// One hot key must not fill its worker: requests that stay, all of one key, spread as soon as it has its share.
#[test]
fn bounded_loads_hold_whatever_the_keys() {
    let prefix = (PolicyKind::PrefixHash, 1.25);
    for (policy, factor) in [
        (HASHING[0], 1.25),
        (HASHING[1], 1.5),
        (HASHING[0], 1.0),
        prefix,
    ] {
        let mut fleet = fleet(policy, 8);
        fleet.settings.hash_balance_factor = factor;
        fleet.settings.prefix_hash_load_factor = factor;
        let mut at_home = 0;
        for n in 0..800_u32 {
            // Half of all is one key.
            let (slot, reason) = fleet.ask(key(u64::from(n % 2 * n)));
            at_home += u32::from(reason == Reason::Home);
            assert!(reason == Reason::Home || reason == Reason::HomeShed);
            fleet.loads[usize::from(slot)] += 1;
            let limit = (factor * f64::from(n + 1) / 8.0).ceil() as u32;
            assert!(
                fleet.loads.iter().all(|load| *load <= limit),
                "{:?}",
                fleet.loads
            );
        }
        assert!(at_home > 300, "{at_home}");
    }
    // Off, load is not looked at; and prefix_hash does not go by the others' factor.
    for policy in [HASHING[0], HASHING[1], PolicyKind::PrefixHash] {
        let mut fleet = fleet(policy, 8);
        fleet.settings.prefix_hash_load_factor = 0.0;
        let home = fleet.ask(key(1));
        fleet.loads[usize::from(home.0)] = 10_000;
        if policy == PolicyKind::PrefixHash {
            fleet.settings.hash_balance_factor = 1.0;
        }
        assert_eq!(fleet.ask(key(1)), home);
    }
}

/// The key shed goes where it would go if its worker were not there, so that its prefix is on two workers and not on all.
#[test]
fn what_is_shed_goes_to_the_next() {
    for policy in HASHING {
        let mut fleet = fleet(policy, 8);
        fleet.settings.hash_balance_factor = 1.25;
        for n in 0..100 {
            let (home, _) = fleet.ask(key(n));
            fleet.exclude = vec![Slot(home)];
            let (next, _) = fleet.ask(key(n));
            fleet.exclude.clear();
            fleet.loads[usize::from(home)] = 5;
            assert_eq!(fleet.ask(key(n)), (next, Reason::HomeShed));
            fleet.loads[usize::from(home)] = 0;
        }
    }
}

#[test]
fn without_a_key_the_least_loaded_gets_it_fairly() {
    for policy in PolicyKind::ALL
        .into_iter()
        .filter(|p| p.uses_session() || p.uses_ring())
    {
        let mut fleet = fleet(policy, 4);
        fleet.loads[2] = 1;
        let mut counts = [0; 4];
        for _ in 0..3000 {
            let decision = fleet.decide(Key::None).unwrap();
            assert_eq!(decision.reason, Reason::NoKey);
            counts[usize::from(decision.slot.0)] += 1;
        }
        assert_eq!(counts[2], 0);
        assert!([0, 1, 3].iter().all(|n| counts[*n] > 850), "{counts:?}");
    }
}

/// Before the control thread has published rings.
#[test]
fn without_a_ring_weights_will_do() {
    let mut ringless = fleet(PolicyKind::ConsistentHash, 5);
    ringless.candidates = (0..5).map(|n| (Slot(n), name_of(&url(n.into())))).collect();
    assert_eq!(
        ringless.homes(),
        fleet(PolicyKind::RendezvousHash, 5).homes()
    );
}

#[test]
fn a_session_meets_its_worker_whatever_the_load_and_the_next_by_weight_without_it() {
    let mut fleet = fleet(PolicyKind::StickyLeastLoaded, 5);
    fleet.loads = vec![0, 0, 50, 0, 0];
    let home = |is_new| Home {
        slot: Slot(2),
        is_new,
    };
    let ask = |fleet: &mut Fleet, is_new| {
        let decision = fleet.decide(Key::Session(key(1), home(is_new))).unwrap();
        (decision.slot.0, decision.reason)
    };
    assert_eq!(ask(&mut fleet, true), (2, Reason::NewSession));
    assert_eq!(ask(&mut fleet, false), (2, Reason::Home));
    fleet.exclude = vec![Slot(2)];
    let next = ask(&mut fleet, false);
    assert_eq!(next.1, Reason::HomeOut);
    assert_ne!(next.0, 2);
    assert_eq!(ask(&mut fleet, false), next);
    fleet.exclude.push(Slot(next.0));
    assert_ne!(ask(&mut fleet, false).0, next.0);
}

#[test]
fn new_sessions_go_where_the_fewest_are_then_where_load_is_least() {
    let fleet = fleet(PolicyKind::StickyLeastLoaded, 4);
    let sessions = Sessions::new(1024);
    let now = shards::Now {
        secs: 1,
        ttl_secs: 10,
    };
    let mut rng = Rng::new(5);
    let mut choose = |loads: &Vec<u32>| {
        home_for_new(
            &fleet.candidates,
            &sessions,
            loads,
            |slot| slot.0 != 3,
            &mut rng,
        )
    };
    let mut counts = [0; 4];
    for n in 0..300 {
        let slot = choose(&fleet.loads).unwrap();
        sessions.bind(key(n), slot, None, now);
        counts[usize::from(slot.0)] += 1;
    }
    assert_eq!(counts, [100, 100, 100, 0], "as even as can be");
    assert_eq!(choose(&vec![3, 1, 2, 0]), Some(Slot(1)));
    sessions.bind(key(1000), Slot(1), None, now);
    assert_eq!(choose(&vec![3, 1, 2, 0]), Some(Slot(2)));
    // Equals have the same chance.
    sessions.end(key(1000));
    let mut firsts = [0; 4];
    (0..3000).for_each(|_| firsts[usize::from(choose(&fleet.loads).unwrap().0)] += 1);
    assert!(firsts[..3].iter().all(|n| *n > 850), "{firsts:?}");
    let nobody = home_for_new(
        &fleet.candidates,
        &sessions,
        &fleet.loads,
        |_| false,
        &mut rng,
    );
    assert_eq!(nobody, None);
}
