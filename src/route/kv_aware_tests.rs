use super::super::policy::{Key, PolicyKind, Turn, decide};
use super::super::{Candidates, TreePrefixes};
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
