//! `kv_aware`: the worker on which the prompt costs least, by what engines say they hold. vllm-router's rule (0.1.17; the
//! LMetric product): cost = (new tokens + tokens waiting for prefill there) x (requests there + 1).
//!
//! New tokens are the prompt's less the worker's credit, which is scaled by how far its events are trusted. The tokens
//! that wait are read from the books, which count under this policy new tokens, not prompts, at four bytes each
//! ([`TOKEN_BYTES`]); so both factors are taken back with the request's guard, and cannot leak.
//!
//! Who holds how much is asked only of those for whom it can make a difference ([`Race`]). First the few who hold most: what the best
//! of them costs, and what a worker costs that is idle, tell how much another one has to hold to be cheaper, and often nobody
//! does. Else one tight pass over the loads leaves the workers that could be the cheapest if all of them held as much as the
//! next level has, and of further levels only those are looked at that one of these few would have to reach. The choice is the
//! same as if every worker's cost had been worked out in full, unless the holdings of those few end at more than eleven
//! depths: who holds less than the deepest of these gets no credit.

use shards::{Slot, SlotSet};

use super::candidates::Candidates;
use super::index::{Credits, Holdings, LEVEL_COUNT_MAX, Level};
use super::policy::{Decision, Entrants, Loads, Rng, Seen, Settings, TOKEN_BYTES, Turn, lot};
use super::reason::Reason;

/// A prompt whose tokens are known.
#[derive(Clone, Copy)]
pub struct Tokens<'k> {
    /// How many they are, at least 1.
    pub count: u64,
    /// Who holds how many of them, as far as it was found out beforehand.
    pub credits: &'k Credits,
    /// The others can be asked of this.
    pub holdings: Option<Holdings<'k>>,
}

impl Tokens<'_> {
    /// A worker's credit, in tokens.
    pub fn credit(&self, slot: Slot) -> u64 {
        let held = self.holdings.map_or(0, |holdings| holdings.credit(slot));
        held.max(self.credits.find(slot))
    }
}

/// A worker's load, read once.
#[derive(Clone, Copy, Debug)]
struct Rival {
    slot: Slot,
    load: u32,
    waiting: u64,
}

impl Rival {
    #[inline]
    fn of<L: Loads>(loads: &L, slot: Slot) -> Rival {
        Rival {
            slot,
            load: loads.load(slot),
            waiting: loads.waiting_bytes(slot) / TOKEN_BYTES as u64,
        }
    }

    /// In whole numbers, exact below 2^64: a worker with 4 million requests would have to have 4 million million tokens to compute.
    #[inline]
    fn cost(self, new: u64) -> u64 {
        // One that wraps costs more tokens than there are; it only must not stop a router.
        (new + self.waiting).wrapping_mul(self.requests())
    }

    /// Those that would share the worker, this one too.
    #[inline]
    fn requests(self) -> u64 {
        u64::from(self.load) + 1
    }

    /// The least credit with which it would cost no more.
    #[inline]
    fn needs(self, count: u64, cost: u64) -> u64 {
        (count + self.waiting).saturating_sub(cost / self.requests())
    }
}

/// A worker with its cost.
#[derive(Clone, Copy, Debug)]
struct Offer {
    rival: Rival,
    new: u64,
    cost: u64,
    lot: u64,
}

impl Offer {
    /// Less is better: cost, then new tokens, then requests (vllm-router), then chance (R2).
    fn rank(&self) -> (u64, u64, u32, u64) {
        (self.cost, self.new, self.rival.load, self.lot)
    }
}

/// A list that is filled and thinned without a jump for each; memory that has grown stays.
#[derive(Clone, Debug, Default)]
struct Rivals {
    all: Vec<Rival>,
    /// So many of these count; the others are old.
    count: usize,
}

impl Rivals {
    fn each(&self) -> &[Rival] {
        &self.all[..self.count]
    }

    /// Makes room for so many.
    fn room(&mut self, len: usize) -> &mut [Rival] {
        let none = Rival {
            slot: Slot(0),
            load: 0,
            waiting: 0,
        };
        if self.all.len() < len {
            self.all.resize(len, none);
        }
        &mut self.all[..len]
    }

    /// Keeps those that `may_win`.
    #[inline]
    fn keep(&mut self, mut may_win: impl FnMut(&Rival) -> bool) {
        let (all, mut kept) = (&mut self.all[..self.count], 0);
        for index in 0..all.len() {
            let rival = all[index];
            all[kept] = rival;
            kept += usize::from(may_win(&rival));
        }
        self.count = kept;
    }
}

/// Scratch of a choice. One a core and role.
#[derive(Clone, Debug, Default)]
pub(super) struct Race {
    /// Who may still be the cheapest.
    rivals: Rivals,
    /// Sources of the first levels.
    done: SlotSet,
    /// Sources of the level at hand.
    held: SlotSet,
    /// Sources of the rivals that hold less than the levels looked at.
    open: SlotSet,
}

/// Levels of a few sources each that are looked at first.
const FIRST_LEVELS_MAX: usize = 3;

/// The best offer so far.
struct Best {
    count: u64,
    draw: u64,
    offer: Option<Offer>,
    /// Somebody costs no more than this, be it offered yet or not.
    cost: u64,
}

impl Best {
    #[inline]
    fn see(&mut self, rival: Rival, credit: u64) {
        let new = self.count.saturating_sub(credit);
        let cost = rival.cost(new);
        if cost <= self.cost {
            self.compare(rival, new, cost);
        }
    }

    /// The credit without which not even an idle worker could be as cheap.
    fn idle_needs(&self) -> u64 {
        self.count.saturating_sub(self.cost)
    }

    fn compare(&mut self, rival: Rival, new: u64, cost: u64) {
        let offer = Offer {
            rival,
            new,
            cost,
            lot: lot(self.draw, rival.slot),
        };
        if self.offer.is_none_or(|best| offer.rank() < best.rank()) {
            (self.offer, self.cost) = (Some(offer), cost);
        }
    }
}

/// Chooses by cost. `None`: nobody is left.
pub(super) fn of_tokens<L: Loads>(
    settings: &Settings,
    tokens: Tokens<'_>,
    field: &Entrants<'_, L>,
    turn: &mut Turn,
) -> Option<Decision> {
    let (rng, race) = (&mut turn.rng, &mut turn.race);
    let best = race.run(tokens, field, rng.next())?;
    let chosen = match settings.temperature {
        t if t > 0.0 => drawn(tokens, field, rng, best.cost, t).unwrap_or(best),
        _ => best,
    };
    let reason = match tokens.count - chosen.new {
        0 => Reason::LeastCostCold,
        _ => Reason::LeastCostWarm,
    };
    let seen = Seen {
        slot: chosen.rival.slot,
        load: chosen.rival.load,
    };
    Some(Decision {
        new_tokens: Some(chosen.new),
        ..seen.because(reason, 0)
    })
}

impl Race {
    /// The cheapest of all.
    fn run<L: Loads>(
        &mut self,
        tokens: Tokens<'_>,
        field: &Entrants<'_, L>,
        draw: u64,
    ) -> Option<Offer> {
        let (offer, cost) = (None, u64::MAX);
        let mut best = Best {
            count: tokens.count,
            draw,
            offer,
            cost,
        };
        for (slot, credit) in &tokens.credits.of {
            if field.has(*slot) {
                best.see(Rival::of(field.loads, *slot), *credit);
            }
        }
        let (mut most, mut wide) = (0, None);
        if let Some(holdings) = &tokens.holdings {
            most = holdings.most();
            self.done.clear();
            for _ in 0..FIRST_LEVELS_MAX {
                let needs = best.idle_needs();
                let is_candidate = |slot| field.candidates.contains(slot);
                let level = holdings.deepest(most, needs, &self.done, is_candidate);
                let Some(level) = level else {
                    if needs > 0 {
                        return best.offer;
                    }
                    most = 0;
                    break;
                };
                if level.is_wide() {
                    most = holdings.most_at(&level);
                    wide = Some(level);
                    break;
                }
                most = holdings.most_short_of(&level);
                for (source, slot, credit) in holdings.held_at(&level) {
                    self.done.add(source);
                    if field.has(slot) {
                        best.see(Rival::of(field.loads, slot), credit);
                    }
                }
            }
            if best.idle_needs() > most {
                return best.offer;
            }
        }
        let all = field.candidates.slots().iter().copied();
        match field.exclude {
            [] => self.line_up(all, field, &mut best, most),
            _ => self.line_up(field.slots(), field, &mut best, most),
        }
        match &tokens.holdings {
            Some(holdings) if most > 0 => self.descend(holdings, most, wide, &mut best),
            _ => self
                .rivals
                .each()
                .iter()
                .for_each(|rival| best.see(*rival, 0)),
        }
        best.offer
    }

    /// Lists those who may be the cheapest if nobody is credited with more than `most`.
    fn line_up<L: Loads>(
        &mut self,
        slots: impl Iterator<Item = Slot>,
        field: &Entrants<'_, L>,
        best: &mut Best,
        most: u64,
    ) {
        let rivals = self.rivals.room(field.candidates.len());
        let (mut bound, mut count) = (best.cost, 0);
        let least_new = best.count.saturating_sub(most);
        for slot in slots {
            let rival = Rival::of(field.loads, slot);
            bound = bound.min(rival.cost(best.count));
            // Written in any case: a jump here would be mistaken half of the time.
            rivals[count] = rival;
            count += usize::from(rival.cost(least_new) <= bound);
        }
        (self.rivals.count, best.cost) = (count, bound);
    }

    /// From the level at which nobody of them holds more than `most`: who holds so much offers it, and who cannot be the cheapest
    /// any more is dropped. Without a level there is somebody who holds less than `most`.
    fn descend<'k>(
        &mut self,
        holdings: &Holdings<'k>,
        mut most: u64,
        mut level: Option<Level<'k>>,
        best: &mut Best,
    ) {
        let Race {
            rivals,
            done,
            held,
            open,
        } = self;
        for round in 0..LEVEL_COUNT_MAX {
            match &level {
                Some(level) => level.list(open, held),
                None => held.clear(),
            }
            let least_new = best.count.saturating_sub(most);
            rivals.keep(|rival| {
                if rival.cost(least_new) > best.cost {
                    return false;
                }
                let mut holds_less = false;
                let credit = holdings.credit_at(most, held, rival.slot, |_| holds_less = true);
                // Once everybody's offer counts without any credit, too.
                if credit > 0 || round == 0 {
                    best.see(*rival, credit);
                }
                holds_less
            });
            if let Some(level) = &level {
                most = holdings.most_short_of(level);
            }
            let least_new = best.count.saturating_sub(most);
            let mut needs = u64::MAX;
            open.clear();
            rivals.keep(|rival| {
                let may_win = rival.cost(least_new) <= best.cost;
                if may_win {
                    needs = needs.min(rival.needs(best.count, best.cost));
                    holdings.credit_at(most, held, rival.slot, |source| {
                        if !done.has(source) {
                            open.add(source);
                        }
                    });
                }
                may_win
            });
            if rivals.count == 0 || most == 0 {
                return;
            }
            level = holdings.deepest_among(most, needs.max(1), open);
            match &level {
                Some(level) => most = holdings.most_at(level),
                None => return,
            }
        }
    }
}

/// Whether a worker has less than its even share of all requests, the one at hand among them: load < ceil((all + 1) / workers).
/// As long as it has, a session's decode worker keeps it (vllm-router 0.1.17).
pub fn has_even_share<L: Loads>(candidates: &Candidates, loads: &L, slot: Slot) -> bool {
    let each = candidates.slots().iter();
    let all: u64 = each.map(|slot| u64::from(loads.load(*slot))).sum();
    u64::from(loads.load(slot)) < (all + 1).div_ceil(candidates.len().max(1) as u64)
}

/// Softmax over `-(cost - least) / temperature`, as vllm-router draws it: not divided by the costs' spread, so that a
/// temperature means something only beside the costs of one's own prompts.
fn drawn<L: Loads>(
    tokens: Tokens<'_>,
    field: &Entrants<'_, L>,
    rng: &mut Rng,
    least: u64,
    temperature: f64,
) -> Option<Offer> {
    // One pass, no list: each takes the place of those before it with its share of the sum so far.
    let mut sum = 0.0;
    let mut chosen = None;
    for slot in field.slots() {
        let rival = Rival::of(field.loads, slot);
        let new = tokens.count.saturating_sub(tokens.credit(slot));
        let cost = rival.cost(new);
        let weight = ((least as f64 - cost as f64) / temperature).exp();
        // Loads move meanwhile: a cost may be below the least that was seen.
        let weight = weight.clamp(0.0, 1e100);
        sum += weight;
        let lot = rng.below(1 << 53) as f64 / (1_u64 << 53) as f64;
        if lot * sum < weight {
            chosen = Some(Offer {
                rival,
                new,
                cost,
                lot: 0,
            });
        }
    }
    chosen
}

#[cfg(test)]
#[path = "kv_aware_tests.rs"]
mod tests;
