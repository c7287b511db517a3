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

/// Costs of `ms_a_mb` and nothing a request.
fn learnt(ms_a_mb: &[f64]) -> Waits {
    let mut waits = Waits::default();
    for (index, ms) in ms_a_mb.iter().enumerate() {
        for n in 1..=20_u64 {
            let sample = Sample {
                bytes: n * 100_000,
                requests: 1,
                own_bytes: n * 100_000,
                seconds: n as f64 * 0.1 * ms / 1e3,
            };
            waits.observe(Slot(index as u16), sample);
        }
    }
    waits
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
fn the_costs_of_bytes_and_of_requests_are_told_apart() {
    let mut waits = Waits::default();
    for n in 0..200_u64 {
        let (bytes, requests) = (n * 37 % 101 * 10_000, (n * 53 % 17) as u32 + 1);
        let seconds = bytes as f64 * 2e-6 + f64::from(requests) * 0.05;
        waits.observe(
            Slot(2),
            Sample {
                bytes,
                requests,
                own_bytes: 0,
                seconds,
            },
        );
    }
    let of = |bytes, requests| waits.seconds(Slot(2), bytes, requests).unwrap();
    assert!((of(1_000_000, 0) - 2.0).abs() < 1e-6);
    assert!((of(0, 10) - 0.5).abs() < 1e-6);
    // Of one that is not known, the mean of the others.
    assert_eq!(
        waits.seconds(Slot(0), 1_000_000, 0),
        waits.seconds(Slot(2), 1_000_000, 0)
    );
    waits.forget(Slot(2));
    assert_eq!(waits.seconds(Slot(2), 1, 1), None);
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
        let sample = Sample {
            bytes: 200_000,
            requests: 2,
            own_bytes: 100_000,
            seconds: 0.2,
        };
        waits.observe(Slot(n % 2), sample);
    }
    // For each second of work ahead many more come, who all wait for 0.5 seconds or for 1.28.
    assert_eq!(chosen(&waits), Slot(0));
}

#[test]
fn a_slower_worker_is_worth_less_by_itself() {
    let waits = learnt(&[1000.0, 4000.0, 1000.0]);
    let fleet = Fleet {
        loads: vec![(3, 3, 900_000), (0, 0, 0), (5, 5, 1_500_000)],
        held: vec![0, 0, 0],
    };
    // 0.9 + 0.5, 2.0, 1.5 + 0.5 seconds.
    assert_eq!(choose(&fleet, &waits, 500_000, &[]).unwrap().slot, Slot(0));
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
