//! `expected_wait`: the worker on which this prompt costs the least, in seconds of waiting; nothing to weigh or to tune.
//!
//! A prompt waits for what waits there already, in bytes to compute and in requests, and for its own bytes that the worker
//! does not hold. What a byte and what a request cost there is learnt from requests whose first byte has come
//! ([`Waits::observe`]), by least squares over the last hundred or so. And all who come before the worker is idle again wait
//! for its own work, too: of a queue with arrivals at a rate r that is busy a share b of the time, x seconds of work behind a
//! seconds of it add r x (a + x / 2) / (1 - b) to the waits of others (M/G/1). b is how often a request finds others waiting,
//! r is b over the mean work of a request. So in an idle fleet a prefix is given up for a shorter wait, in a busy one hardly
//! ever, as computing it again is what makes it busy. A worker that is slower, or becomes so, is worth less by itself. What
//! cannot be told apart (a tenth, the error of the fit) is settled by requests in flight, then by lot.
//!
//! What it does not see: answers under way, and that they leave less room for prefixes.
//!
//! Before anything is known, and for decode, it chooses as `cache_aware`. A worker of which nothing is known counts as the mean of the
//! others. Owned by one core, which learns from the requests it sent itself.

use shards::Slot;

use super::key::bytes_of_blocks;
use super::policy::{Decision, Entrants, Found, Loads, Prefixes, Rng, Seen, Turn};
use super::reason::Reason;

/// What an older sample weighs at each new one: the last hundred count.
const DECAY: f64 = 0.99;
/// The same for the whole fleet's traffic.
const TRAFFIC_DECAY: f64 = 0.998;
/// Samples before a worker's costs are believed.
const SAMPLES_MIN: u32 = 8;
/// Levels of matches that are looked at: holders of the longest, of the next shorter one, and so on.
const LEVELS_MAX: usize = 4;
/// Waits that differ by less than this share, or this many seconds, are equal.
const TOLERANCE: f64 = 0.1;
const TOLERANCE_S: f64 = 0.001;

/// What was ahead of a request, itself counted, and how long its first byte took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Bytes to compute.
    pub bytes: u64,
    /// Requests.
    pub requests: u32,
    /// Bytes to compute of its own.
    pub own_bytes: u64,
    /// Seconds from the choice to the first byte.
    pub seconds: f64,
}

/// Decayed sums of one worker's samples, in units that keep them alike: MB and tens of requests.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    count: u32,
    bytes2: f64,
    cross: f64,
    requests2: f64,
    bytes_s: f64,
    requests_s: f64,
}

const BYTES_UNIT: f64 = 1e6;
const REQUESTS_UNIT: f64 = 10.0;

impl Fit {
    fn add(&mut self, sample: Sample) {
        let bytes = sample.bytes as f64 / BYTES_UNIT;
        let requests = f64::from(sample.requests) / REQUESTS_UNIT;
        for (sum, product) in [
            (&mut self.bytes2, bytes * bytes),
            (&mut self.cross, bytes * requests),
            (&mut self.requests2, requests * requests),
            (&mut self.bytes_s, bytes * sample.seconds),
            (&mut self.requests_s, requests * sample.seconds),
        ] {
            *sum = *sum * DECAY + product;
        }
        self.count += 1;
    }

    /// Seconds of a unit of bytes and of a unit of requests. Neither is negative.
    fn costs(&self) -> Option<(f64, f64)> {
        if self.count < SAMPLES_MIN {
            return None;
        }
        let determinant = self.bytes2 * self.requests2 - self.cross * self.cross;
        // Where one only repeats the other they cannot be told apart.
        if determinant > 1e-3 * self.bytes2 * self.requests2 {
            let bytes =
                (self.bytes_s * self.requests2 - self.requests_s * self.cross) / determinant;
            let requests =
                (self.requests_s * self.bytes2 - self.bytes_s * self.cross) / determinant;
            if bytes >= 0.0 && requests >= 0.0 {
                return Some((bytes, requests));
            }
            if bytes < 0.0 {
                return Some((0.0, self.requests_s / self.requests2));
            }
        }
        (self.bytes2 > 0.0).then(|| (self.bytes_s / self.bytes2, 0.0))
    }
}

/// What one core has learnt of the workers' waits.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    /// By slot.
    fits: Vec<Fit>,
    costs: Vec<Option<(f64, f64)>>,
    /// The mean of those known.
    mean: Option<(f64, f64)>,
    traffic: Traffic,
}

/// How busy the fleet is: decayed sums over the samples of all workers.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    count: f64,
    /// Requests that found others waiting.
    met: f64,
    /// Seconds that requests took of their own.
    own_s: f64,
}

impl Traffic {
    fn add(&mut self, has_met: bool, own_s: f64) {
        let met = f64::from(u8::from(has_met));
        for (sum, new) in [
            (&mut self.count, 1.0),
            (&mut self.met, met),
            (&mut self.own_s, own_s),
        ] {
            *sum = *sum * TRAFFIC_DECAY + new;
        }
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
        if index >= self.fits.len() {
            self.fits.resize(index + 1, Fit::default());
            self.costs.resize(index + 1, None);
        }
        self.fits[index].add(sample);
        self.costs[index] = self.fits[index].costs();
        self.sum_up();
        if let Some(own_s) = self.seconds(slot, sample.own_bytes, 1) {
            self.traffic.add(sample.requests > 1, own_s);
        }
    }

    /// Another incarnation stands in this slot.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(fit) = self.fits.get_mut(slot.index()) {
            *fit = Fit::default();
            self.costs[slot.index()] = None;
            self.sum_up();
        }
    }

    fn sum_up(&mut self) {
        let known = self.costs.iter().flatten();
        let (count, bytes, requests) = known
            .fold((0.0, 0.0, 0.0), |(count, bytes, requests), cost| {
                (count + 1.0, bytes + cost.0, requests + cost.1)
            });
        self.mean = (count > 0.0).then(|| (bytes / count, requests / count));
    }

    /// Seconds that bytes and requests take on a worker. `None`: nothing is known of any.
    pub fn seconds(&self, slot: Slot, bytes: u64, requests: u32) -> Option<f64> {
        let own = self.costs.get(slot.index()).copied().flatten();
        let (byte, request) = own.or(self.mean)?;
        Some(bytes as f64 / BYTES_UNIT * byte + f64::from(requests) / REQUESTS_UNIT * request)
    }

    /// Whether anything is known of anybody.
    pub(super) fn is_taught(&self) -> bool {
        self.mean.is_some()
    }

    /// What it costs all to send a request to a worker, in seconds: its own wait, and what its own work adds to the waits
    /// of those who come before the worker is idle again.
    fn price(&self, slot: Slot, ahead: (u64, u32), own_bytes: u64) -> Option<f64> {
        let (bytes, requests) = ahead;
        let ahead_s = self.seconds(slot, bytes, requests)?;
        let own_s = self.seconds(slot, own_bytes, 1)?;
        let followers = self.traffic.followers_per_s() * (ahead_s + own_s / 2.0);
        Some(ahead_s + own_s * (1.0 + followers))
    }
}

/// A worker that may be chosen.
#[derive(Clone, Copy)]
struct Entrant {
    seen: Seen,
    blocks: usize,
    seconds: f64,
}

/// Chooses by what the workers' waits have taught ([`Waits::is_taught`]).
pub(super) fn of_waits<P: Prefixes, L: Loads>(
    prefixes: &P,
    length_bytes: u64,
    field: &Entrants<'_, L>,
    turn: &mut Turn,
    scratch: &mut Vec<Slot>,
) -> Option<Decision> {
    let Turn { waits, rng, .. } = turn;
    let entrant = |slot: Slot, blocks: usize| {
        let own = length_bytes.saturating_sub(bytes_of_blocks(blocks));
        let loads = field.loads;
        let ahead = (loads.waiting_bytes(slot), loads.waiting(slot));
        let seconds = waits.price(slot, ahead, own)?;
        Some(Entrant {
            seen: field.see(slot),
            blocks,
            seconds,
        })
    };
    let mut best = Best::default();
    scratch.clear();
    for _ in 0..LEVELS_MAX {
        let Some(found) = prefixes.find(|slot| field.has(slot) && !scratch.contains(&slot)) else {
            break;
        };
        // A prefix of the whole fleet has many holders: the least of the others is found below.
        let from = scratch.len();
        let new = found
            .holders()
            .filter(|slot| field.has(*slot) && !scratch.contains(slot));
        let new: [Option<Slot>; 32] = {
            let mut some = [None; 32];
            some.iter_mut()
                .zip(new)
                .for_each(|(place, slot)| *place = Some(slot));
            some
        };
        scratch.extend(new.into_iter().flatten());
        for slot in &scratch[from..] {
            best.offer(entrant(*slot, found.blocks()), rng);
        }
    }
    for slot in field.slots() {
        if !scratch.contains(&slot) {
            best.offer(entrant(slot, 0), rng);
        }
    }
    let best = best.0?;
    let reason = match best.blocks {
        0 => Reason::LeastCostCold,
        _ => Reason::LeastCostWarm,
    };
    Some(best.seen.because(reason, best.blocks))
}

/// The best so far, and how many were as good.
#[derive(Default)]
struct Best(Option<Entrant>, usize);

impl Best {
    fn offer(&mut self, entrant: Option<Entrant>, rng: &mut Rng) {
        let Some(new) = entrant else { return };
        let Some(old) = self.0 else {
            *self = Best(Some(new), 1);
            return;
        };
        let slack = TOLERANCE_S.max(TOLERANCE * old.seconds.min(new.seconds));
        let is_equal = (new.seconds - old.seconds).abs() <= slack;
        // Among equals what is warm stays so, then load, then chance.
        let rank = |entrant: Entrant| (entrant.seen.load, usize::MAX - entrant.blocks);
        if !is_equal {
            if new.seconds < old.seconds {
                *self = Best(Some(new), 1);
            }
        } else if rank(new) < rank(old) {
            *self = Best(Some(new), 1);
        } else if rank(new) == rank(old) {
            self.1 += 1;
            if rng.below(self.1) == 0 {
                self.0 = Some(new);
            }
        }
    }
}

#[cfg(test)]
#[path = "wait_tests.rs"]
mod tests;
