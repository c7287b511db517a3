//! `expected_wait` on cases worked out by hand.

use super::*;
use crate::route::{Candidates, Key, PolicyKind, Settings, decide};

struct Fleet {
    /// (in flight, waiting, bytes waiting) by slot.
    loads: Vec<(u32, u32, u64)>,
    /// Blocks held, by slot.
    held: Vec<usize>,
}

impl Loads for Fleet {
    fn load(&self, slot: Slot) -> u32 {
        self.loads[slot.index()].0
    }

    fn waiting(&self, slot: Slot) -> u32 {
        self.loads[slot.index()].1
    }

    fn waiting_bytes(&self, slot: Slot) -> u64 {
        self.loads[slot.index()].2
    }
}

struct Level(usize, Vec<Slot>);

impl Found for Level {
    fn blocks(&self) -> usize {
        self.0
    }

    fn is_fork(&self) -> bool {
        false
    }

    fn holders(&self) -> impl Iterator<Item = Slot> {
        self.1.iter().copied()
    }

    fn is_held_by(&self, slot: Slot) -> bool {
        self.1.contains(&slot)
    }
}

impl Prefixes for Fleet {
    type Found = Level;

    fn find(&self, mut accept: impl FnMut(Slot) -> bool) -> Option<Level> {
        let slots = 0..self.held.len() as u16;
        let accepted = slots.clone().filter(|slot| accept(Slot(*slot)));
        let depth = accepted.map(|slot| self.held[usize::from(slot)]).max()?;
        let holders = slots.filter(|slot| self.held[usize::from(*slot)] >= depth);
        (depth > 0).then(|| Level(depth, holders.map(Slot).collect()))
    }
}

/// Workers that take so many milliseconds for a MB and nothing for a request.
fn learnt(ms_a_mb: &[f64]) -> Waits {
    let mut waits = Waits::default();
    for n in 0..1200_u64 {
        for (index, ms) in ms_a_mb.iter().enumerate() {
            let bytes = (n % 20 + 1) * 100_000;
            let seconds = bytes as f64 / 1e6 * ms / 1e3;
            waits.observe(Slot(index as u16), sample(bytes, 1, 0, seconds));
        }
    }
    waits
}

fn sample(bytes: u64, requests: u32, streams: u32, seconds: f64) -> Sample {
    Sample {
        bytes,
        requests,
        streams,
        own_bytes: bytes / u64::from(requests),
        seconds,
    }
}

fn choose(fleet: &Fleet, waits: &Waits, length: u64, exclude: &[Slot]) -> Option<Decision> {
    let candidates: Candidates = (0..fleet.loads.len() as u16).map(Slot).collect();
    let settings = Settings {
        policy: PolicyKind::ExpectedWait,
        ..Settings::default()
    };
    let mut turn = Turn {
        waits: waits.clone(),
        ..Turn::new(1)
    };
    let (key, mut scratch) = (Key::Prefix(fleet, length), Vec::new());
    decide(
        &settings,
        key,
        &candidates,
        exclude,
        fleet,
        &mut turn,
        &mut scratch,
    )
}

#[test]
fn the_costs_of_bytes_requests_and_answers_under_way_are_told_apart() {
    let mut waits = Waits::default();
    for n in 0..300_u64 {
        let (bytes, requests) = (n * 37 % 101 * 10_000, (n * 53 % 17) as u32 + 1);
        let streams = (n * 29 % 83) as u32;
        let seconds = bytes as f64 * 2e-6 + f64::from(requests) * 0.05 + f64::from(streams) * 0.004;
        waits.observe(Slot(2), sample(bytes, requests, streams, seconds));
    }
    let of = |bytes, requests, streams| waits.seconds(Slot(2), bytes, requests, streams).unwrap();
    let always = of(0, 0, 0);
    assert!((of(1_000_000, 0, 0) - always - 2.0).abs() < 1e-3);
    assert!((of(0, 10, 0) - always - 0.5).abs() < 1e-3);
    assert!((of(0, 0, 100) - always - 0.4).abs() < 1e-3);
    assert!(always < 1e-3, "nothing is always there: {always}");
    // One that is not known is as the fleet.
    assert_eq!(
        waits.seconds(Slot(0), 1_000_000, 0, 0),
        Some(of(1_000_000, 0, 0))
    );
}

#[test]
fn a_cost_that_only_repeats_another_is_not_negative() {
    let mut waits = Waits::default();
    for n in 1..100_u64 {
        // A request is a MB, and the more answers are under way the sooner it comes.
        let requests = n % 7 + 1;
        let seconds = requests as f64 * (1.0 - n as f64 / 200.0);
        waits.observe(
            Slot(0),
            sample(requests * 1_000_000, requests as u32, n as u32, seconds),
        );
    }
    assert!(
        waits.fit.costs.iter().all(|cost| *cost >= 0.0),
        "{:?}",
        waits.fit.costs
    );
    assert!(waits.seconds(Slot(0), 1_000_000, 1, 0) > Some(0.3));
}

/// The scatter of two workers' waits is no reason to prefer one; a real difference is.
#[test]
fn paces_are_believed_as_far_as_workers_differ() {
    let paces = |slow: f64| {
        let (mut waits, mut rng) = (Waits::default(), Rng::new(7));
        for n in 0..4000 {
            let slot = n % 8;
            let bytes = 10_000 * (rng.below(100) as u64 + 1);
            // Between a third and five thirds of the mean.
            let scatter = 1.0 + (rng.below(1000) as f64 - 500.0) / 750.0;
            let pace = if slot == 3 { slow } else { 1.0 };
            let seconds = bytes as f64 / 1e6 * scatter * pace;
            waits.observe(Slot(slot), sample(bytes, 1, 0, seconds));
        }
        let ratios: Vec<f64> = waits.paces.iter().map(Pace::ratio).collect();
        let paces: Vec<f64> = waits.paces.iter().map(|pace| pace.pace).collect();
        (ratios, paces)
    };
    let spread = |all: &[f64]| all.iter().map(|pace| (pace - 1.0).powi(2)).sum::<f64>();
    let (ratios, alike) = paces(1.0);
    assert!(
        spread(&alike) < 0.5 * spread(&ratios),
        "{alike:?} of {ratios:?}"
    );
    let (_, unlike) = paces(3.0);
    assert!(unlike[3] / unlike[2] > 2.5, "{unlike:?}");
}

#[test]
fn what_was_learnt_of_a_worker_goes_with_it() {
    let mut waits = learnt(&[1000.0, 4000.0, 1000.0]);
    let of = |waits: &Waits, slot| waits.seconds(Slot(slot), 1_000_000, 0, 0).unwrap();
    // The cube root of four.
    assert!((of(&waits, 1) / of(&waits, 0) - 1.587).abs() < 0.02);
    waits.forget(Slot(1));
    assert_eq!(of(&waits, 1), of(&waits, 9));
    assert!(of(&waits, 1) > of(&waits, 0), "the fleet's mean");
    assert!((waits.spread[0] - 2.0).abs() < 1e-9);
}

#[test]
fn the_prefix_is_kept_while_the_wait_costs_less_than_it_is_worth() {
    // 1 s a MB. A prompt of 1.28 MB, of which worker 0 holds 4,096 + 64 blocks: 786,432 bytes, worth 0.79 s.
    let waits = learnt(&[1000.0, 1000.0]);
    let fleet = |waiting| Fleet {
        loads: vec![(9, 9, waiting), (0, 0, 0)],
        held: vec![4096 + 64, 0],
    };
    let kept = choose(&fleet(600_000), &waits, 1_280_000, &[]).unwrap();
    assert_eq!((kept.slot, kept.reason), (Slot(0), Reason::LeastCostWarm));
    assert_eq!(bytes_of_blocks(kept.matched_blocks), 786_432);
    let left = choose(&fleet(1_000_000), &waits, 1_280_000, &[]).unwrap();
    assert_eq!((left.slot, left.reason), (Slot(1), Reason::LeastCostCold));
    // Who was tried is out.
    let other = choose(&fleet(0), &waits, 1_280_000, &[Slot(0)]).unwrap();
    assert_eq!(other.slot, Slot(1));
}

#[test]
fn where_all_find_others_waiting_the_prefix_is_kept_longer() {
    let mut waits = learnt(&[1000.0, 1000.0]);
    let fleet = Fleet {
        loads: vec![(9, 9, 1_000_000), (0, 0, 0)],
        held: vec![4096 + 64, 0],
    };
    let chosen = |waits: &Waits| choose(&fleet, waits, 1_280_000, &[]).unwrap().slot;
    // 1.0 + 0.5 seconds against 1.28.
    assert_eq!(chosen(&waits), Slot(1));
    for n in 0..200 {
        waits.observe(Slot(n % 2), sample(200_000, 2, 0, 0.2));
    }
    // For each second of work ahead many more come, who all wait for 0.5 seconds or for 1.28.
    assert_eq!(chosen(&waits), Slot(0));
}

#[test]
fn a_slower_worker_is_worth_less_by_itself() {
    let fleet = Fleet {
        loads: vec![(1, 1, 100_000), (0, 0, 0), (5, 5, 900_000)],
        held: vec![0, 0, 0],
    };
    let chosen = |waits: &Waits| choose(&fleet, waits, 500_000, &[]).unwrap().slot;
    // 0.1 + 0.5 seconds, 0.5, 0.9 + 0.5; then 1.6 times 0.5 for the second.
    assert_eq!(chosen(&learnt(&[1000.0, 1000.0, 1000.0])), Slot(1));
    assert_eq!(chosen(&learnt(&[1000.0, 4000.0, 1000.0])), Slot(0));
}

/// The next long prompt goes behind a long one where few come, so that many do not wait behind it; unless all are alike.
#[test]
fn where_prompts_differ_long_ones_go_where_few_come() {
    let mut waits = learnt(&[1000.0, 1000.0]);
    for n in 0..400 {
        waits.observe(Slot(n % 2), sample(200_000, 2, 0, 0.2));
    }
    let fleet = Fleet {
        loads: vec![(1, 1, 6_000_000), (50, 0, 0)],
        held: vec![0, 0],
    };
    let chosen = |waits: &Waits| choose(&fleet, waits, 6_000_000, &[]).unwrap().slot;
    (0..1000).for_each(|_| waits.traffic.see(6_000_000));
    assert_eq!(chosen(&waits), Slot(1));
    (0..1000).for_each(|_| waits.traffic.see(10_000));
    assert_eq!(chosen(&waits), Slot(0));
}

#[test]
fn without_data_it_chooses_as_cache_aware() {
    let fleet = Fleet {
        loads: vec![(9, 9, 9_000_000), (0, 0, 0)],
        held: vec![80, 0],
    };
    let chosen = choose(&fleet, &Waits::default(), 12_800, &[]).unwrap();
    assert_eq!((chosen.slot, chosen.reason), (Slot(0), Reason::Affinity));
}

#[test]
fn equal_waits_are_settled_by_requests_in_flight() {
    let waits = learnt(&[1000.0, 1000.0, 1000.0]);
    let fleet = Fleet {
        loads: vec![(8, 0, 0), (2, 0, 0), (5, 0, 0)],
        held: vec![0, 0, 0],
    };
    assert_eq!(choose(&fleet, &waits, 500_000, &[]).unwrap().slot, Slot(1));
}
