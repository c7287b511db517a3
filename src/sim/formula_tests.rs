//! Each formula on cases worked out by hand.

use super::*;

fn worker(slot: u16, load: u32, hit_tokens: u64, prefill_tokens: u64, tokens: u64) -> Facts {
    Facts {
        slot,
        load,
        hit_tokens,
        beside: Beside {
            prefill_tokens,
            tokens,
            waiting: load,
            kv_usage: 0.0,
            prefill_tokens_per_s: 1000.0,
        },
    }
}

fn choose(kind: Kind, all: &[Facts], tokens: u64) -> u16 {
    let chosen = Formula::new(kind, 1).choose(all, tokens, 9, 0);
    all[chosen.unwrap()].slot
}

#[test]
fn dynamo_adds_uncached_prefill_and_decode_blocks() {
    // (640 + 1280 - 640) / 64 + (6400 + 1280) / 64 = 20 + 120; (0 + 1280) / 64 + (7040 + 1280) / 64 = 20 + 130.
    let all = [worker(0, 1, 640, 640, 6400), worker(1, 1, 0, 0, 7040)];
    assert_eq!(
        (dynamo(&all[0], 1280), dynamo(&all[1], 1280)),
        (140.0, 150.0)
    );
    assert_eq!(choose(Kind::Dynamo, &all, 1280), 0);
    // More of it cached than all that waits: the prefill part ends at nothing.
    assert_eq!(dynamo(&worker(0, 1, 6400, 0, 0), 640), 10.0);
}

#[test]
fn lmetric_multiplies_prefill_by_requests() {
    // (100 + 300) x 5 = 2,000; (1,000 + 0) x 1 = 1,000.
    let all = [worker(0, 4, 900, 300, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::Lmetric, &all, 1000), 1);
    // (100 + 300) x 2 = 800.
    let all = [worker(0, 1, 900, 300, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::Lmetric, &all, 1000), 0);
}

#[test]
fn llmd_weighs_queue_kv_and_hit() {
    // Queue 1, hit 0.6: 0 + 2 + 1.8; queue 0, hit 0: 2 + 2 + 0.
    let all = [worker(0, 10, 600, 0, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdWeighted, &all, 1000), 1);
    // Hit 0.7: 2.1 against 2.
    let all = [worker(0, 10, 700, 0, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdWeighted, &all, 1000), 0);
    let mut full = worker(0, 10, 700, 0, 0);
    full.beside.kv_usage = 0.1;
    assert_eq!(choose(Kind::LlmdWeighted, &[full, all[1]], 1000), 1);
}

#[test]
fn llmd_is_sticky_until_saturated() {
    let all = [worker(0, 9, 800, 280_000, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdSticky, &all, 1000), 0);
    let all = [worker(0, 9, 800, 286_720, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdSticky, &all, 1000), 1);
    // Less than 0.8 counts as nothing: 500 + 201 against 0 + 1,000.
    let all = [worker(0, 9, 799, 500, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdSticky, &all, 1000), 0);
    let all = [worker(0, 9, 799, 800, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::LlmdSticky, &all, 1000), 1);
}

#[test]
fn aibrix_gives_up_affinity_when_the_fleet_is_out_of_balance() {
    let all = [
        worker(0, 9, 800, 0, 0),
        worker(1, 8, 0, 0, 0),
        worker(2, 7, 0, 0, 0),
    ];
    // Mean 8, deviation 0.82: 9 is too much.
    assert_eq!(choose(Kind::AibrixPrefix, &all, 1000), 2);
    let all = [
        worker(0, 8, 800, 0, 0),
        worker(1, 9, 0, 0, 0),
        worker(2, 7, 0, 0, 0),
    ];
    assert_eq!(choose(Kind::AibrixPrefix, &all, 1000), 0);
    let all = [
        worker(0, 8, 800, 0, 0),
        worker(1, 17, 0, 0, 0),
        worker(2, 7, 0, 0, 0),
    ];
    assert_eq!(choose(Kind::AibrixPrefix, &all, 1000), 2);
}

#[test]
fn smg_drains_by_time_and_fears_full_caches() {
    let mut fast = worker(0, 0, 0, 3000, 0);
    fast.beside.prefill_tokens_per_s = 4000.0;
    // (3,000 + 1,000) / 4,000 = 1 s; (500 + 1,000) / 1,000 = 1.5 s.
    assert_eq!(
        choose(Kind::SmgDrain, &[fast, worker(1, 0, 0, 500, 0)], 1000),
        0
    );
    // 0.15 x 0.8 / 0.2 = 0.6 s more.
    fast.beside.kv_usage = 0.8;
    assert_eq!(
        choose(Kind::SmgDrain, &[fast, worker(1, 0, 0, 500, 0)], 1000),
        1
    );
}

#[test]
fn preble_exploits_a_long_prefix_and_else_spreads_what_it_sent() {
    let all = [worker(0, 50, 500, 0, 0), worker(1, 0, 0, 0, 0)];
    assert_eq!(choose(Kind::Preble, &all, 1000), 0);
    let mut formula = Formula::new(Kind::Preble, 1);
    let all = [worker(0, 50, 400, 0, 0), worker(1, 0, 0, 0, 0)];
    // 600 against 1,000; then 600 + 600 against 1,000.
    assert_eq!(formula.choose(&all, 1000, 9, 0), Some(0));
    assert_eq!(formula.choose(&all, 1000, 9, ns(100.0)), Some(1));
    // After 181 s the first is forgotten: 600 against 2,000.
    assert_eq!(formula.choose(&all, 1000, 9, ns(181.0)), Some(0));
}

#[test]
fn a_session_stays_until_its_worker_has_twice_the_mean() {
    let mut formula = Formula::new(Kind::StickyOverride, 1);
    let all = [worker(0, 0, 0, 0, 0), worker(1, 0, 0, 0, 500)];
    assert_eq!(formula.choose(&all, 1000, 9, 0), Some(0));
    let three = |tokens| {
        [
            worker(0, 0, 0, 0, tokens),
            worker(1, 0, 0, 0, 500),
            worker(2, 0, 0, 0, 400),
        ]
    };
    // 1,800 of 2,700: exactly twice the mean.
    assert_eq!(formula.choose(&three(1800), 1000, 9, 0), Some(0));
    assert_eq!(formula.choose(&three(1801), 1000, 9, 0), Some(2));
    assert_eq!(formula.choose(&three(0), 1000, 9, 0), Some(2));
}
