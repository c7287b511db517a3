//! What each policy chooses, with loads and prefixes made up.

use super::*;
use crate::route::BLOCK_BYTES;

/// Load by slot.
struct Fleet(Vec<u32>);

impl Loads for Fleet {
    fn load(&self, slot: Slot) -> u32 {
        self.0[usize::from(slot.0)]
    }
}

/// (blocks, holders, is it a fork), deepest first.
#[derive(Default)]
struct Known(Vec<(usize, Vec<u16>, bool)>);

struct KnownBlock {
    blocks: usize,
    holders: Vec<u16>,
    is_fork: bool,
}

impl Found for KnownBlock {
    fn blocks(&self) -> usize {
        self.blocks
    }

    fn is_fork(&self) -> bool {
        self.is_fork
    }

    fn holders(&self) -> impl Iterator<Item = Slot> {
        self.holders.iter().map(|slot| Slot(*slot))
    }

    fn is_held_by(&self, slot: Slot) -> bool {
        self.holders.contains(&slot.0)
    }
}

impl Prefixes for Known {
    type Found = KnownBlock;

    fn find(&self, mut accept: impl FnMut(Slot) -> bool) -> Option<KnownBlock> {
        let mut levels = self.0.iter();
        let (blocks, holders, is_fork) =
            levels.find(|(_, holders, _)| holders.iter().any(|slot| accept(Slot(*slot))))?;
        Some(KnownBlock {
            blocks: *blocks,
            holders: holders.clone(),
            is_fork: *is_fork,
        })
    }
}

/// One request on its way to a decision. All workers are candidates unless said otherwise.
struct Case {
    settings: Settings,
    fleet: Fleet,
    candidates: Candidates,
    exclude: Vec<Slot>,
    known: Known,
    length_bytes: u64,
    turn: Turn,
}

const SEED: u64 = 0xc0de;

/// A prompt of ten blocks.
fn case(loads: &[u32], known: &[(usize, &[u16], bool)]) -> Case {
    Case {
        settings: Settings::default(),
        fleet: Fleet(loads.to_vec()),
        candidates: (0..loads.len() as u16).map(Slot).collect(),
        exclude: Vec::new(),
        known: Known(
            known
                .iter()
                .map(|(blocks, slots, fork)| (*blocks, slots.to_vec(), *fork))
                .collect(),
        ),
        length_bytes: 10 * BLOCK_BYTES as u64,
        turn: Turn::new(SEED),
    }
}

impl Case {
    fn with(mut self, change: impl FnOnce(&mut Case)) -> Case {
        change(&mut self);
        self
    }

    fn policy(self, policy: PolicyKind) -> Case {
        self.with(|case| case.settings.policy = policy)
    }

    fn ask(&mut self) -> Option<Decision> {
        self.ask_with(true)
    }

    fn ask_with(&mut self, has_key: bool) -> Option<Decision> {
        let key = match has_key {
            true => Key::Prefix(&self.known, self.length_bytes),
            false => Key::None,
        };
        let mut scratch = Vec::new();
        let Case {
            settings,
            candidates,
            exclude,
            fleet,
            turn,
            ..
        } = self;
        let decision = decide(
            settings,
            key,
            candidates,
            exclude,
            fleet,
            turn,
            &mut scratch,
        );
        if let Some(decision) = decision {
            assert_eq!(
                decision.seen,
                fleet.load(decision.slot),
                "the load seen is that of the worker chosen"
            );
        }
        decision
    }

    /// The same answer every time: (slot, reason, blocks).
    fn always(&mut self) -> (u16, Reason, usize) {
        let first = self.ask().unwrap();
        for _ in 0..100 {
            assert_eq!(self.ask().unwrap(), first);
        }
        (first.slot.0, first.reason, first.matched_blocks)
    }

    /// How often each worker was chosen in `count` decisions, all for that reason.
    fn shares(&mut self, count: usize, reason: Reason) -> Vec<usize> {
        let mut shares = vec![0; self.fleet.0.len()];
        for _ in 0..count {
            let decision = self.ask().unwrap();
            assert_eq!(decision.reason, reason);
            shares[usize::from(decision.slot.0)] += 1;
        }
        shares
    }
}

/// Each share within 10 % of the mean: at 4 x 10,000 a fair one is outside once in 10^30 runs.
fn assert_even(shares: &[usize]) {
    let mean = shares.iter().sum::<usize>() / shares.len();
    for share in shares {
        assert!(
            share.abs_diff(mean) <= mean / 10,
            "seed {SEED:#x}: {shares:?}"
        );
    }
}

#[test]
fn affinity_survives_an_unrelated_hot_worker() {
    // 2 is far above the rest: vllm-router's fleet-wide gate would give affinity up here.
    assert_eq!(
        case(&[10, 0, 900], &[(9, &[0], false)]).always(),
        (0, Reason::Affinity, 9)
    );
}

#[test]
fn affinity_yields_when_the_worker_wanted_is_the_hot_one() {
    assert_eq!(
        case(&[100, 3, 8], &[(9, &[0], false)]).always(),
        (1, Reason::ShedToLeastLoaded, 0)
    );
}

#[test]
fn a_decision_says_whom_it_gave_up_and_the_least_load_where_it_looked() {
    let told = |mut case: Case| {
        let decision = case.ask().unwrap();
        let given_up = decision.given_up;
        let given_up = given_up.map(|w| (w.slot.0, w.load, w.matched_blocks));
        (decision.reason, given_up, decision.least_load)
    };
    let known: &[(usize, &[u16], bool)] = &[(9, &[0], false), (7, &[1], false)];
    let hot = Some((0, 100, 9));
    assert_eq!(
        told(case(&[100, 3, 8], &known[..1])),
        (Reason::ShedToLeastLoaded, hot, Some(3))
    );
    assert_eq!(
        told(case(&[100, 5, 3], known)),
        (Reason::ShedToWarm, hot, Some(3))
    );
    assert_eq!(
        told(case(&[10, 5, 3], known)),
        (Reason::Affinity, None, None)
    );
    assert_eq!(told(case(&[10, 5, 3], &[])), (Reason::Cold, None, Some(3)));
}

#[test]
fn an_ineligible_worker_lowers_no_minimum_and_matches_nothing() {
    // 2 is idle but down. Against it, 0 would be overloaded; against 1, which is all there is, it is not.
    let down = |case: &mut Case| case.candidates = [Slot(0), Slot(1)].into_iter().collect();
    assert_eq!(
        case(&[100, 90, 0], &[(9, &[0], false)]).with(down).always(),
        (0, Reason::Affinity, 9)
    );
    assert_eq!(
        case(&[100, 90, 0], &[(10, &[2], false), (9, &[0], false)])
            .with(down)
            .always(),
        (0, Reason::Affinity, 9)
    );
    assert_eq!(
        case(&[100, 90, 0], &[(10, &[2], false)])
            .with(down)
            .always(),
        (1, Reason::Cold, 0)
    );
    // Tried before in this request is as good as down.
    let tried = |case: &mut Case| case.exclude = vec![Slot(2)];
    assert_eq!(
        case(&[100, 90, 0], &[(10, &[2], false), (9, &[0], false)])
            .with(tried)
            .always(),
        (0, Reason::Affinity, 9)
    );
}

#[test]
fn a_match_has_to_exceed_the_threshold_and_not_only_to_reach_it() {
    // 3 of 10 blocks is the default threshold of 0.3 exactly.
    assert_eq!(
        case(&[5, 0], &[(3, &[0], false)]).always(),
        (1, Reason::Cold, 0)
    );
    assert_eq!(
        case(&[5, 0], &[(4, &[0], false)]).always(),
        (0, Reason::Affinity, 4)
    );
    let one_byte_less = |case: &mut Case| case.length_bytes -= 1;
    assert_eq!(
        case(&[5, 0], &[(3, &[0], false)])
            .with(one_byte_less)
            .always(),
        (0, Reason::Affinity, 3)
    );
    let never = |case: &mut Case| case.settings.cache_threshold = 1.0;
    assert_eq!(
        case(&[5, 0], &[(10, &[0], false)]).with(never).always(),
        (1, Reason::Cold, 0)
    );
}

#[test]
fn overload_takes_both_conditions_strictly() {
    let reason = |wanted, other| case(&[wanted, other], &[(9, &[0], false)]).always().1;
    // The difference, at a ratio that is high enough: 64 is not more than 64.
    assert_eq!(reason(64, 0), Reason::Affinity);
    assert_eq!(reason(65, 0), Reason::ShedToLeastLoaded);
    assert_eq!(reason(74, 10), Reason::Affinity);
    assert_eq!(reason(75, 10), Reason::ShedToLeastLoaded);
    // The ratio, at a difference that is high enough: 300 is not more than 1.5 x 200.
    assert_eq!(reason(300, 200), Reason::Affinity);
    assert_eq!(reason(301, 200), Reason::ShedToLeastLoaded);
    // Each alone: ten times the load but only 9 more; 100 more but only 1.1 times.
    assert_eq!(reason(10, 1), Reason::Affinity);
    assert_eq!(reason(1100, 1000), Reason::Affinity);
    // Less than the least is no overload either.
    assert_eq!(reason(0, 1000), Reason::Affinity);
}

#[test]
fn the_least_load_of_the_overload_rule_leaves_out_workers_already_tried() {
    let tried = |case: &mut Case| case.exclude = vec![Slot(1)];
    let known: &[(usize, &[u16], bool)] = &[(9, &[0], false)];
    assert_eq!(
        case(&[100, 0, 90], known).always(),
        (1, Reason::ShedToLeastLoaded, 0)
    );
    assert_eq!(
        case(&[100, 0, 90], known).with(tried).always(),
        (0, Reason::Affinity, 9)
    );
}

#[test]
fn overflow_prefers_a_warm_worker_that_is_not_overloaded_itself() {
    // 1 holds less but is not hot; 2 holds nothing and is idle; 3 holds more than 1 but is hot as well.
    let known: &[(usize, &[u16], bool)] = &[
        (9, &[0], false),
        (8, &[0, 3], false),
        (7, &[0, 1, 3], false),
    ];
    assert_eq!(
        case(&[100, 40, 0, 99], known).always(),
        (1, Reason::ShedToWarm, 7)
    );
    // Its match has to be worth something by the same threshold.
    let known: &[(usize, &[u16], bool)] = &[(9, &[0], false), (3, &[0, 1], false)];
    assert_eq!(
        case(&[100, 40, 0], known).always(),
        (2, Reason::ShedToLeastLoaded, 0)
    );
    // Several warm ones: the least loaded of them.
    let known: &[(usize, &[u16], bool)] = &[(9, &[0], false), (8, &[0, 1, 3], false)];
    assert_eq!(
        case(&[100, 40, 0, 30], known).always(),
        (3, Reason::ShedToWarm, 8)
    );
}

#[test]
fn of_several_holders_the_least_loaded_is_wanted() {
    assert_eq!(
        case(&[9, 4, 7, 0], &[(9, &[0, 1, 2], false)]).always(),
        (1, Reason::Affinity, 9)
    );
    // Only of the deepest block: 3 holds less.
    let known: &[(usize, &[u16], bool)] = &[(9, &[0, 1], false), (8, &[0, 1, 3], false)];
    assert_eq!(
        case(&[9, 4, 7, 0], known).always(),
        (1, Reason::Affinity, 9)
    );
}

#[test]
fn ties_are_settled_evenly_everywhere() {
    assert_even(&case(&[0; 4], &[]).shares(40_000, Reason::Cold));
    assert_even(&case(&[7; 4], &[(9, &[0, 1, 2, 3], false)]).shares(40_000, Reason::Affinity));
    assert_even(
        &case(&[0; 4], &[])
            .policy(PolicyKind::LeastLoaded)
            .shares(40_000, Reason::LeastLoaded),
    );
    assert_even(
        &case(&[0; 4], &[])
            .policy(PolicyKind::PowerOfTwo)
            .shares(40_000, Reason::PowerOfTwo),
    );
    assert_even(
        &case(&[0; 4], &[(5, &[0, 1, 2, 3], true)]).shares(40_000, Reason::SpreadCommonPrefix),
    );
    let shares =
        case(&[900, 0, 0, 0, 0], &[(9, &[0], false)]).shares(40_000, Reason::ShedToLeastLoaded);
    assert_eq!(shares[0], 0);
    assert_even(&shares[1..]);
    // The least are not the first, and not together.
    let shares = case(&[3, 1, 2, 1, 1, 3, 1], &[]).shares(40_000, Reason::Cold);
    assert_even(&[shares[1], shares[3], shares[4], shares[6]]);
}

#[test]
fn a_worker_already_tried_is_never_chosen() {
    let known: &[(usize, &[u16], bool)] = &[
        (9, &[0], false),
        (7, &[0, 2], true),
        (6, &[0, 1, 2, 3], false),
    ];
    for policy in PolicyKind::ALL {
        for loads in [[0, 0, 0, 0], [0, 500, 0, 500], [500, 1, 500, 2]] {
            let mut case = case(&loads, known).policy(policy);
            case.exclude = vec![Slot(0), Slot(2)];
            for has_key in [true, false] {
                for _ in 0..1000 {
                    let slot = case.ask_with(has_key).unwrap().slot;
                    assert!(
                        slot == Slot(1) || slot == Slot(3),
                        "{} chose {slot:?}",
                        policy.name()
                    );
                }
            }
            case.exclude.push(Slot(3));
            assert_eq!(
                case.ask().unwrap().slot,
                Slot(1),
                "{}: one is left",
                policy.name()
            );
            case.exclude.push(Slot(1));
            assert_eq!(case.ask(), None, "{}: none is left", policy.name());
            case.exclude.clear();
            case.candidates = Candidates::default();
            assert_eq!(case.ask(), None, "{}: no candidates", policy.name());
        }
    }
}

#[test]
fn a_common_prefix_is_spread_by_load_and_holders_come_first_among_equals() {
    // Half of the prompt is a system prompt that many share. Its one holder is busier than others.
    let known: &[(usize, &[u16], bool)] = &[(5, &[0], true)];
    let (slot, reason, blocks) = case(&[3, 1, 2], known).always();
    assert_eq!((slot, reason, blocks), (1, Reason::SpreadCommonPrefix, 0));
    // Among equally loaded workers the holder.
    assert_eq!(
        case(&[1, 1, 1], known).always(),
        (0, Reason::SpreadCommonPrefix, 5)
    );
    // No fork: a conversation.
    assert_eq!(
        case(&[3, 1, 2], &[(5, &[0], false)]).always(),
        (0, Reason::Affinity, 5)
    );
}

#[test]
fn a_fork_that_is_nearly_the_whole_prompt_is_its_own_match() {
    // 8 of 10 blocks is the default threshold of 0.8 exactly.
    assert_eq!(
        case(&[3, 1], &[(8, &[0], true)]).always(),
        (1, Reason::SpreadCommonPrefix, 0)
    );
    assert_eq!(
        case(&[3, 1], &[(9, &[0], true)]).always(),
        (0, Reason::Affinity, 9)
    );
}

#[test]
fn a_common_prefix_threshold_of_zero_turns_the_refinement_off() {
    let off = |case: &mut Case| case.settings.common_prefix_threshold = 0.0;
    assert_eq!(
        case(&[3, 1], &[(5, &[0], true)]).with(off).always(),
        (0, Reason::Affinity, 5)
    );
}

#[test]
fn a_fork_below_the_cache_threshold_is_cold() {
    assert_even(&case(&[0; 4], &[(3, &[0], true)]).shares(40_000, Reason::Cold));
}

#[test]
fn overflow_does_not_pile_up_on_the_holder_of_a_common_prefix() {
    let known: &[(usize, &[u16], bool)] = &[(9, &[0], false), (5, &[0, 1], true)];
    assert_eq!(
        case(&[100, 40, 0], known).always(),
        (2, Reason::ShedToLeastLoaded, 0)
    );
    assert_eq!(
        case(&[100, 0, 0], known).always(),
        (1, Reason::ShedToLeastLoaded, 5)
    );
}

#[test]
fn new_conversations_on_one_system_prompt_are_spread_while_all_workers_have_room() {
    // The whole point of the refinement: 40 at once, none finished; each chosen worker then holds the prefix too.
    let mut case = case(&[0; 4], &[(5, &[0], true)]);
    for _ in 0..40 {
        let slot = case.ask().unwrap().slot.0;
        case.fleet.0[usize::from(slot)] += 1;
        let holders = &mut case.known.0[0].1;
        if !holders.contains(&slot) {
            holders.push(slot);
        }
    }
    assert_eq!(case.fleet.0, [10; 4]);
}

#[test]
fn a_request_without_a_key_goes_to_the_least_loaded() {
    let mut case = case(&[2, 1, 3], &[(10, &[2], false)]);
    let decision = case.ask_with(false).unwrap();
    assert_eq!((decision.slot, decision.reason), (Slot(1), Reason::NoKey));
}

#[test]
fn a_match_whose_holders_are_gone_by_the_time_they_are_read_is_no_match() {
    struct Vanishing;
    impl Prefixes for Vanishing {
        type Found = KnownBlock;

        fn find(&self, mut accept: impl FnMut(Slot) -> bool) -> Option<KnownBlock> {
            accept(Slot(0)).then_some(KnownBlock {
                blocks: 1,
                holders: Vec::new(),
                is_fork: false,
            })
        }
    }
    let (candidates, fleet) = ([Slot(0)].into_iter().collect(), Fleet(vec![0]));
    let mut scratch = vec![Slot(7)];
    let mut turn = Turn::new(SEED);
    let decision = decide(
        &Settings::default(),
        Key::Prefix(&Vanishing, 1),
        &candidates,
        &[],
        &fleet,
        &mut turn,
        &mut scratch,
    );
    assert_eq!(decision.map(|decision| decision.reason), Some(Reason::Cold));
}

#[test]
fn loads_that_grow_while_they_are_read_still_give_a_choice_with_the_load_it_saw() {
    /// Every read takes one more request in, as other cores may.
    struct Growing(std::cell::Cell<u32>);
    impl Loads for Growing {
        fn load(&self, _: Slot) -> u32 {
            self.0.set(self.0.get() + 1);
            self.0.get()
        }
    }
    let candidates: Candidates = (0..9).map(Slot).collect();
    let known = Known(vec![(9, vec![1, 2, 3], false)]);
    let common = Known(vec![(5, vec![1, 2, 3], true)]);
    for prefixes in [&known, &common, &Known::default()] {
        for start in [0, 1000] {
            for exclude in [&[][..], &[Slot(0)]] {
                let loads = Growing(start.into());
                let key = Key::Prefix(prefixes, 10 * BLOCK_BYTES as u64);
                let (settings, mut turn) = (Settings::default(), Turn::new(SEED));
                let decision = decide(
                    &settings,
                    key,
                    &candidates,
                    exclude,
                    &loads,
                    &mut turn,
                    &mut Vec::new(),
                );
                assert!((start + 1..=loads.0.get()).contains(&decision.unwrap().seen));
            }
        }
    }
}

#[test]
fn only_cache_aware_looks_at_the_prefix() {
    let known: &[(usize, &[u16], bool)] = &[(10, &[0], false)];
    let mut case = case(&[5, 0], known).policy(PolicyKind::LeastLoaded);
    assert_eq!(case.always(), (1, Reason::LeastLoaded, 0));
}

#[test]
fn round_robin_visits_each_in_turn_and_skips_those_tried() {
    let mut case = case(&[9, 0, 3], &[]).policy(PolicyKind::RoundRobin);
    case.turn.round_robin = 1;
    let mut next = || case.ask().unwrap().slot.0;
    assert_eq!([next(), next(), next(), next()], [1, 2, 0, 1]);
    case.exclude = vec![Slot(2)];
    let mut next = || case.ask().unwrap().slot.0;
    assert_eq!([next(), next(), next()], [0, 1, 0]);
    // The counter may run over.
    case.turn.round_robin = u64::MAX;
    assert!(case.ask().is_some() && case.ask().is_some());
}

#[test]
fn random_is_even_whatever_the_loads() {
    assert_even(
        &case(&[9, 0, 300, 1], &[])
            .policy(PolicyKind::Random)
            .shares(40_000, Reason::Random),
    );
    let mut case = case(&[9, 0, 300, 1, 0], &[]).policy(PolicyKind::Random);
    case.exclude = vec![Slot(1)];
    let shares = case.shares(40_000, Reason::Random);
    assert_even(&[shares[0], shares[2], shares[3], shares[4]]);
}

#[test]
fn power_of_two_takes_the_less_loaded_of_two_different_workers() {
    // Of four workers the one ranked k-th by load wins 3, 2, 1 and 0 of the 6 pairs: the most loaded never.
    let mut four = case(&[7, 5, 9, 6], &[]).policy(PolicyKind::PowerOfTwo);
    let shares = four.shares(60_000, Reason::PowerOfTwo);
    assert_eq!(shares[2], 0);
    for (slot, expected) in [(1, 30_000_usize), (3, 20_000), (0, 10_000)] {
        assert!(
            shares[slot].abs_diff(expected) < expected / 10,
            "seed {SEED:#x}: {shares:?}"
        );
    }
    assert_eq!(
        case(&[7], &[]).policy(PolicyKind::PowerOfTwo).always(),
        (0, Reason::PowerOfTwo, 0)
    );
}

#[test]
fn a_policy_is_known_by_its_name_only() {
    for policy in PolicyKind::ALL {
        assert_eq!(PolicyKind::parse(policy.name()), Some(policy));
    }
    assert_eq!(PolicyKind::parse("Cache_Aware"), None);
    assert_eq!(PolicyKind::parse(""), None);
}

#[test]
fn random_numbers_are_the_published_splitmix64_and_stay_below_the_limit() {
    // Reference values of the generator for seed 1234567 (Vigna's splitmix64.c).
    let mut rng = Rng::new(1_234_567);
    let numbers: [u64; 3] = std::array::from_fn(|_| rng.next());
    assert_eq!(
        numbers,
        [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423
        ]
    );
    for limit in 1..200 {
        assert!((0..100).all(|_| rng.below(limit) < limit));
    }
    assert_eq!(rng.below(0), 0);
}

#[test]
fn scratch_does_not_grow_from_decision_to_decision() {
    let mut case = case(&[0; 64], &[]);
    let all: Vec<u16> = (0..64).collect();
    case.known = Known(vec![(9, all, false)]);
    let mut scratch = Vec::with_capacity(64);
    for _ in 0..100 {
        let key = Key::Prefix(&case.known, case.length_bytes);
        decide(
            &case.settings,
            key,
            &case.candidates,
            &[],
            &case.fleet,
            &mut case.turn,
            &mut scratch,
        );
        assert_eq!(scratch.capacity(), 64);
    }
}
