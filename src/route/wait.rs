//! `expected_wait`: the worker on which this prompt costs the least, in seconds of waiting; nothing to weigh or to tune.
//!
//! **What a request waits for** is learnt from requests whose first byte has come ([`Waits::observe`]), by least squares over the
//! whole fleet's last five hundred: so much for each byte to compute that was ahead of it or its own, for each request, for each answer
//! under way (they slow the worker down and take its room), and what is always there. How much slower or faster than that a worker
//! is, its pace, is learnt from its own last hundred, and believed as far as workers differ by more than their samples
//! scatter (James and Stein): where all are alike the estimates' noise does not choose.
//!
//! Of what a request takes of a worker, its time, room in its KV cache and a place in its batch, a faster worker has more only
//! of the first. So the cube root of its pace counts, and answers under way count the same everywhere. In simulations the full pace sends everything to the
//! fast ones until their caches lose what they held (0.80 of the best other policy's throughput; its square root 0.95), none at all makes the longest waits half as long again.
//!
//! **What others wait for it.** All who come before the worker is through with it wait for its own work, too: with arrivals
//! at a rate r, busy a share b of the time, x seconds of work behind a seconds of it add r x (a + x) / (1 - b) (about M/G/1).
//! b is how often a request finds others waiting, r is b over the mean work of a request. So in an idle fleet a prefix is given up for
//! a shorter wait, in a busy one hardly ever. And work that another one need not do, as it holds
//! more of the prompt, is waited for by the whole fleet: for that the fleet's mean wait counts once more.
//!
//! **Where the others come.** They come to a worker as many as it has (Little). The more prompts differ in size, the more that matters:
//! behind a long prompt all wait, so the next long one goes where one is already and few come
//! (size-interval assignment). How much they differ is the variance of what they have to compute over its mean square.
//!
//! Of a large fleet sixty-four workers are looked at, and those that hold most: the best of so many is about as good as the best of all.
//!
//! What it does not see: that a worker has lost a prefix, but by its pace. A worker that gets no requests keeps its pace.
//!
//! Before anything is known, and for decode, it chooses as `cache_aware`. A worker of which nothing is known has the pace of the
//! fleet. Owned by one core, which learns from the requests it sent itself.

use std::cmp::Ordering;

use shards::{Load, Slot, SlotSet};

use super::key::bytes_of_blocks;
use super::policy::{Decision, Entrants, Found, Loads, Prefixes, Rng, Seen, Turn};
use super::reason::Reason;

/// What an older sample of the fleet weighs at each new one: the last five hundred count.
const FLEET_DECAY: f64 = 0.998;
/// The same for one worker's pace: the last hundred.
const PACE_DECAY: f64 = 0.99;
/// Samples before the fit is believed.
const FIT_MIN: u32 = 21;
/// Samples before a worker's pace is believed.
const PACE_MIN: u32 = 8;
/// Shortest wait that is told from another by the fit, and least pace.
const LEAST_S: f64 = 0.001;
const PACE_LEAST: f64 = 0.01;
/// Levels of matches that are looked at: holders of the longest, of the next shorter one, and so on.
const LEVELS_MAX: usize = 4;
/// Workers that are looked at, whatever they hold.
const VIEWS_MAX: usize = 64;
/// Holders of a level that are looked at: a prefix of the whole fleet is no reason to choose.
const HOLDERS_MAX: usize = 32;
/// Prices that differ by less than this share, or this many seconds, are equal.
const TOLERANCE: f64 = 0.1;
const TOLERANCE_S: f64 = 0.001;

/// What was ahead of a request, itself counted, and how long its first byte took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Bytes to compute.
    pub bytes: u64,
    /// Requests.
    pub requests: u32,
    /// Answers under way.
    pub streams: u32,
    /// Bytes to compute of its own.
    pub own_bytes: u64,
    /// Seconds from the choice to the first byte.
    pub seconds: f64,
}

/// What a wait is made of, in units that keep them alike: MB, tens of requests, hundreds of answers under way, 1.
const TERM_COUNT: usize = 4;
type Terms = [f64; TERM_COUNT];
const STREAMS: usize = 2;

fn terms(bytes: u64, requests: u32, streams: u32) -> Terms {
    let streams = f64::from(streams) / 100.0;
    [megabytes(bytes), f64::from(requests) / 10.0, streams, 1.0]
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn product(costs: &Terms, terms: &Terms) -> f64 {
    costs.iter().zip(terms).map(|(a, b)| a * b).sum()
}

/// The fleet's costs: decayed normal equations, and their solution without negative costs.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    count: u32,
    squares: [Terms; TERM_COUNT],
    products: Terms,
    costs: Terms,
}

impl Fit {
    fn is_believed(&self) -> bool {
        self.count >= FIT_MIN
    }

    /// The scatter of waits grows with them, so the longer count less.
    fn add(&mut self, terms: &Terms, seconds: f64) {
        let expected = if self.is_believed() {
            product(&self.costs, terms)
        } else {
            seconds
        };
        let weight = 1.0 / expected.max(LEAST_S);
        for (row, term) in terms.iter().enumerate() {
            for (square, other) in self.squares[row].iter_mut().zip(terms) {
                *square = *square * FLEET_DECAY + weight * term * other;
            }
            self.products[row] = self.products[row] * FLEET_DECAY + weight * term * seconds;
        }
        self.count = self.count.saturating_add(1);
        self.solve();
    }

    /// Without the term whose cost is the most negative, until none is.
    fn solve(&mut self) {
        let mut is_in = [true; TERM_COUNT];
        for (row, is_in) in is_in.iter_mut().enumerate() {
            *is_in = self.squares[row][row] > 0.0;
        }
        loop {
            self.costs = self.solution(&is_in);
            let size = |row: &usize| self.costs[*row] * self.squares[*row][*row].sqrt();
            let negative = (0..TERM_COUNT).filter(|row| self.costs[*row] < 0.0);
            match negative.min_by(|a, b| size(a).total_cmp(&size(b))) {
                Some(row) => is_in[row] = false,
                None => return,
            }
        }
    }

    /// Gauss and Jordan. What cannot be told apart is shared (the diagonal is a little larger).
    fn solution(&self, is_in: &[bool; TERM_COUNT]) -> Terms {
        let (mut left, mut right) = (self.squares, self.products);
        for row in 0..TERM_COUNT {
            if !is_in[row] {
                left[row] = [0.0; TERM_COUNT];
                left.iter_mut().for_each(|other| other[row] = 0.0);
                (left[row][row], right[row]) = (1.0, 0.0);
            }
            left[row][row] *= 1.0 + 1e-6;
        }
        for row in 0..TERM_COUNT {
            let pivot = left[row];
            for other in (0..TERM_COUNT).filter(|other| *other != row) {
                let factor = left[other][row] / pivot[row];
                let cells = left[other].iter_mut().zip(&pivot);
                cells.for_each(|(cell, above)| *cell -= factor * above);
                right[other] -= factor * right[row];
            }
        }
        std::array::from_fn(|row| right[row] / left[row][row])
    }
}

/// How one worker's waits compare with what the fit says: decayed sums.
#[derive(Clone, Copy, Debug)]
struct Pace {
    count: u32,
    seconds: f64,
    expected_s: f64,
    errors2: f64,
    /// More is slower.
    pace: f64,
    /// What of it counts: its cube root.
    factor: f64,
}

impl Pace {
    const UNKNOWN: Pace = Pace {
        count: 0,
        seconds: 0.0,
        expected_s: 0.0,
        errors2: 0.0,
        pace: 1.0,
        factor: 1.0,
    };

    fn add(&mut self, seconds: f64, expected_s: f64) {
        self.count = self.count.saturating_add(1);
        self.seconds = self.seconds * PACE_DECAY + seconds;
        self.expected_s = self.expected_s * PACE_DECAY + expected_s;
        let error = seconds - expected_s * self.ratio();
        self.errors2 = self.errors2 * PACE_DECAY * PACE_DECAY + error * error;
    }

    fn is_known(&self) -> bool {
        self.count >= PACE_MIN && self.expected_s > 0.0
    }

    fn ratio(&self) -> f64 {
        self.seconds / self.expected_s.max(1e-9)
    }

    /// How far the ratio is off only because the samples scatter, squared.
    fn noise(&self) -> f64 {
        self.errors2 / (self.expected_s * self.expected_s)
    }

    /// What it adds to the sums over workers: itself, how far it is from the fleet's pace, squared, and its noise.
    fn shares(&self) -> [f64; 3] {
        if !self.is_known() {
            return [0.0; 3];
        }
        [1.0, (self.ratio() - 1.0).powi(2), self.noise()]
    }
}

/// What one core has learnt of the workers' waits.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    fit: Fit,
    /// By slot.
    paces: Vec<Pace>,
    /// Sums of [`Pace::shares`].
    spread: [f64; 3],
    traffic: Traffic,
    views: Views,
}

/// How busy the fleet is, and what its prompts are like: decayed sums over the samples of all workers.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    count: f64,
    /// Requests that found others waiting.
    met: f64,
    /// Seconds that requests took of their own.
    own_s: f64,
    /// Prompts to be placed, what of them had to be computed (MB), and its square.
    prompts: [f64; 3],
}

fn decay(sum: &mut f64, new: f64) {
    *sum = *sum * FLEET_DECAY + new;
}

impl Traffic {
    fn add(&mut self, has_met: bool, own_s: f64) {
        decay(&mut self.count, 1.0);
        decay(&mut self.met, f64::from(u8::from(has_met)));
        decay(&mut self.own_s, own_s);
    }

    fn see(&mut self, bytes: u64) {
        let size = megabytes(bytes);
        let news = [1.0, size, size * size];
        let sums = self.prompts.iter_mut().zip(news);
        sums.for_each(|(sum, new)| decay(sum, new));
    }

    /// How much prompts differ, 0 to 1.
    fn variety(&self) -> f64 {
        let [count, size, size2] = self.prompts;
        if size2 <= 0.0 {
            return 0.0;
        }
        (1.0 - size * size / (count * size2)).max(0.0)
    }

    /// Requests a second that come to a busy worker before it is idle again, for each second of work it has: arrivals
    /// find a worker busy as often as it is (PASTA).
    fn followers_per_s(&self) -> f64 {
        if self.own_s <= 0.0 {
            return 0.0;
        }
        let busy = (self.met + 0.5) / (self.count + 1.0);
        busy / (1.0 - busy) * self.count / self.own_s
    }
}

impl Waits {
    /// A first byte has come.
    pub fn observe(&mut self, slot: Slot, sample: Sample) {
        let index = slot.index();
        if index >= self.paces.len() {
            self.paces.resize(index + 1, Pace::UNKNOWN);
        }
        let terms = terms(sample.bytes, sample.requests, sample.streams);
        let expected_s = product(&self.fit.costs, &terms);
        let was_taught = self.is_taught();
        self.fit
            .add(&terms, sample.seconds / self.paces[index].pace);
        if was_taught {
            self.judge(index, sample.seconds, expected_s);
        }
        if let Some(own_s) = self.own_seconds(slot, sample.own_bytes) {
            self.traffic.add(sample.requests > 1, own_s);
        }
    }

    /// Another incarnation stands in this slot.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(pace) = self.paces.get_mut(slot.index()) {
            let shares = std::mem::replace(pace, Pace::UNKNOWN).shares();
            let sums = self.spread.iter_mut().zip(shares);
            sums.for_each(|(sum, share)| *sum = (*sum - share).max(0.0));
        }
    }

    fn judge(&mut self, index: usize, seconds: f64, expected_s: f64) {
        let pace = &mut self.paces[index];
        let before = pace.shares();
        pace.add(seconds, expected_s);
        let after = pace.shares();
        for (sum, (before, after)) in self.spread.iter_mut().zip(before.into_iter().zip(after)) {
            *sum = (*sum - before + after).max(0.0);
        }
        let [count, apart, noise] = self.spread;
        if !pace.is_known() || count < 2.0 {
            return;
        }
        let differ = ((apart - noise) / count).max(0.0);
        let belief = differ / (differ + pace.noise()).max(1e-12);
        pace.pace = (1.0 + belief * (pace.ratio() - 1.0)).max(PACE_LEAST);
        pace.factor = pace.pace.cbrt();
    }

    fn factor(&self, slot: Slot) -> f64 {
        self.paces.get(slot.index()).map_or(1.0, |pace| pace.factor)
    }

    /// Seconds until a worker with this much ahead would begin something new. `None`: nothing is known.
    pub fn seconds(&self, slot: Slot, bytes: u64, requests: u32, streams: u32) -> Option<f64> {
        let mut terms = terms(bytes, requests, streams);
        let streams_s = self.fit.costs[STREAMS] * std::mem::take(&mut terms[STREAMS]);
        let work_s = product(&self.fit.costs, &terms);
        self.is_taught()
            .then(|| self.factor(slot) * work_s + streams_s)
    }

    /// Seconds that a request takes of its own. `None`: nothing is known.
    fn own_seconds(&self, slot: Slot, bytes: u64) -> Option<f64> {
        let [byte, request, ..] = self.fit.costs;
        let own_s = megabytes(bytes) * byte + request / 10.0;
        self.is_taught().then(|| self.factor(slot) * own_s)
    }

    /// Whether anything is known of anybody.
    pub(super) fn is_taught(&self) -> bool {
        self.fit.is_believed()
    }
}

/// A worker that may be chosen.
#[derive(Clone, Copy, Debug)]
struct View {
    slot: Slot,
    load: u32,
    ahead_s: f64,
    factor: f64,
    /// Blocks of the prompt that it holds.
    blocks: usize,
    price_s: f64,
}

/// Who is looked at in the choice under way. Kept so that no choice allocates.
#[derive(Clone, Debug, Default)]
struct Views {
    all: Vec<View>,
    /// Those that are known to hold something.
    holders: SlotSet,
}

/// What all prices of a choice have in common.
struct Prices {
    /// Seconds of a MB to compute, of a request.
    byte_s: f64,
    request_s: f64,
    length_bytes: u64,
    /// What the one that holds most has to compute.
    least_bytes: u64,
    followers_per_s: f64,
    variety: f64,
    /// What one more request is of a worker's mean load, itself counted.
    load_share: f64,
    mean_ahead_s: f64,
}

impl Prices {
    /// What it costs all to send the request to a worker, in seconds: its own wait, and what its work adds to those of others.
    fn of(&self, view: &View) -> f64 {
        let own_bytes = self
            .length_bytes
            .saturating_sub(bytes_of_blocks(view.blocks));
        let own_s = view.factor * (megabytes(own_bytes) * self.byte_s + self.request_s);
        let more_bytes = own_bytes.saturating_sub(self.least_bytes);
        let more_s = view.factor * megabytes(more_bytes) * self.byte_s;
        let share = (f64::from(view.load) + 1.0) * self.load_share;
        let share = 1.0 + self.variety * (share - 1.0);
        let wait_s = view.ahead_s + own_s;
        let others = own_s * share * wait_s + more_s * self.mean_ahead_s;
        wait_s + self.followers_per_s * others
    }
}

/// Chooses by what the workers' waits have taught ([`Waits::is_taught`]).
pub(super) fn of_waits<P: Prefixes, L: Loads>(
    prefixes: &P,
    length_bytes: u64,
    field: &Entrants<'_, L>,
    turn: &mut Turn,
) -> Option<Decision> {
    let Turn { waits, rng, .. } = turn;
    let mut views = std::mem::take(&mut waits.views);
    views.all.clear();
    views.holders.clear();
    waits.look_at_some(field, &mut views.all, rng);
    let count = views.all.len().max(1) as f64;
    let mean = |of: fn(&View) -> f64| views.all.iter().map(of).sum::<f64>() / count;
    let (mean_load, mean_ahead_s) = (mean(|view| f64::from(view.load)), mean(|view| view.ahead_s));
    let longest = waits.look_at_holders(prefixes, field, &mut views);
    let least_bytes = length_bytes.saturating_sub(bytes_of_blocks(longest));
    waits.traffic.see(least_bytes);
    let [byte_s, request, ..] = waits.fit.costs;
    let prices = Prices {
        byte_s,
        request_s: request / 10.0,
        length_bytes,
        least_bytes,
        followers_per_s: waits.traffic.followers_per_s(),
        variety: waits.traffic.variety(),
        load_share: 1.0 / (mean_load + 1.0),
        mean_ahead_s,
    };
    let mut least_s = f64::INFINITY;
    for view in &mut views.all {
        view.price_s = prices.of(view);
        least_s = least_s.min(view.price_s);
    }
    let price_max_s = least_s + TOLERANCE_S.max(TOLERANCE * least_s);
    let mut best = Best::default();
    let good = views.all.iter();
    let good = good.filter(|view| view.price_s <= price_max_s);
    good.for_each(|view| best.offer(view, rng));
    waits.views = views;
    let View {
        slot, load, blocks, ..
    } = best.chosen?;
    let reason = match blocks {
        0 => Reason::LeastCostCold,
        _ => Reason::LeastCostWarm,
    };
    Some(Seen { slot, load }.because(reason, blocks))
}

impl Waits {
    fn view(&self, slot: Slot, load: Load) -> View {
        let ahead_s = self.seconds(slot, load.waiting_bytes, load.waiting, load.active);
        View {
            slot,
            load: load.in_flight,
            ahead_s: ahead_s.unwrap_or(0.0),
            factor: self.factor(slot),
            blocks: 0,
            price_s: 0.0,
        }
    }

    /// All workers of a fleet that is not large, else so many that follow each other, from any on.
    fn look_at_some<L: Loads>(&self, field: &Entrants<'_, L>, all: &mut Vec<View>, rng: &mut Rng) {
        let slots = field.candidates.slots();
        let first = match slots.len() > VIEWS_MAX {
            true => rng.below(slots.len()),
            false => 0,
        };
        let (before, after) = slots.split_at(first);
        let slots = after.iter().chain(before).copied();
        let slots = slots.filter(|slot| !field.exclude.contains(slot));
        let views = slots.take(VIEWS_MAX);
        all.extend(views.map(|slot| self.view(slot, field.loads.all(slot))));
    }

    /// Notes who holds how much of the prompt, and adds those who were not looked at. The most that is held.
    fn look_at_holders<P: Prefixes, L: Loads>(
        &self,
        prefixes: &P,
        field: &Entrants<'_, L>,
        views: &mut Views,
    ) -> usize {
        let mut longest = 0;
        let is_all = views.all.len() < VIEWS_MAX;
        for _ in 0..LEVELS_MAX {
            let is_new = |slot: Slot| field.has(slot) && !views.holders.has(slot);
            let Some(found) = prefixes.find(is_new) else {
                break;
            };
            let blocks = found.blocks();
            longest = longest.max(blocks);
            let mut new_count = 0;
            for at in 0..views.all.len() {
                let View { slot, .. } = views.all[at];
                if !views.holders.has(slot) && found.is_held_by(slot) {
                    views.all[at].blocks = blocks;
                    views.holders.add(slot);
                    new_count += 1;
                }
            }
            if !is_all {
                for slot in found.holders() {
                    if new_count < HOLDERS_MAX && field.has(slot) && !views.holders.has(slot) {
                        let view = self.view(slot, field.loads.all(slot));
                        views.all.push(View { blocks, ..view });
                        views.holders.add(slot);
                        new_count += 1;
                    }
                }
            }
            // The owner of the shard has just taken the last of them away; or the fleet holds it, and who holds less is
            // no better than who was looked at.
            if new_count == 0 || new_count >= HOLDERS_MAX {
                break;
            }
        }
        longest
    }
}

/// Among equals: the least load, then what is warm, then chance.
#[derive(Default)]
struct Best {
    chosen: Option<View>,
    /// How many were as good.
    count: usize,
}

impl Best {
    fn offer(&mut self, view: &View, rng: &mut Rng) {
        let rank = |view: &View| (view.load, usize::MAX - view.blocks);
        let order = match &self.chosen {
            Some(best) => rank(view).cmp(&rank(best)),
            None => Ordering::Less,
        };
        match order {
            Ordering::Less => self.count = 1,
            Ordering::Equal => self.count += 1,
            Ordering::Greater => return,
        }
        if rng.below(self.count) == 0 {
            self.chosen = Some(*view);
        }
    }
}

#[cfg(test)]
#[path = "wait_tests.rs"]
mod tests;
