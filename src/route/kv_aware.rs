//! `kv_aware`: the worker on which the prompt costs least, by what engines say they hold. vllm-router's rule (0.1.17; the
//! LMetric product): cost = (new tokens + tokens waiting for prefill there) x (requests there + 1).
//!
//! New tokens are the prompt's less the worker's credit ([`Credits`]), which is scaled by how far its events are trusted. The tokens
//! that wait are read from the books, which count under this policy new tokens, not prompts, at four bytes each
//! ([`TOKEN_BYTES`]); so both factors are taken back with the request's guard, and cannot leak.

use shards::Slot;

use super::candidates::Candidates;
use super::index::Credits;
use super::policy::{Decision, Entrants, Loads, Rng, Seen, Settings, TOKEN_BYTES};
use super::reason::Reason;

/// A prompt whose tokens are known.
#[derive(Clone, Copy)]
pub struct Tokens<'k> {
    /// How many they are, at least 1.
    pub count: u64,
    /// Who holds how many of them.
    pub credits: &'k Credits,
}

/// A worker with its cost.
#[derive(Clone, Copy)]
struct Offer {
    seen: Seen,
    new: u64,
    cost: f64,
}

impl Offer {
    /// Less is better: cost, then new tokens, then requests (vllm-router).
    fn rank(&self) -> (f64, u64, u32) {
        (self.cost, self.new, self.seen.load)
    }
}

fn offer<L: Loads>(tokens: Tokens<'_>, field: &Entrants<'_, L>, slot: Slot) -> Offer {
    let seen = field.see(slot);
    let new = tokens.count.saturating_sub(tokens.credits.find(slot));
    let waiting = field.loads.waiting_bytes(slot) / TOKEN_BYTES as u64;
    let cost = (new + waiting) as f64 * (f64::from(seen.load) + 1.0);
    Offer { seen, new, cost }
}

/// Chooses by cost. `None`: nobody is left.
pub(super) fn of_tokens<L: Loads>(
    settings: &Settings,
    tokens: Tokens<'_>,
    field: &Entrants<'_, L>,
    rng: &mut Rng,
) -> Option<Decision> {
    let mut best: Option<Offer> = None;
    let mut equal_count = 0;
    for slot in field.slots() {
        let offer = offer(tokens, field, slot);
        let is_better = best.is_none_or(|best| offer.rank() < best.rank());
        let is_equal = best.is_some_and(|best| offer.rank() == best.rank());
        if is_better {
            equal_count = 0;
        }
        if is_better || is_equal {
            equal_count += 1;
            // Each of the equals with the same chance (R2).
            if rng.below(equal_count) == 0 {
                best = Some(offer);
            }
        }
    }
    let best = best?;
    let chosen = match settings.temperature {
        t if t > 0.0 => drawn(tokens, field, rng, best.cost, t).unwrap_or(best),
        _ => best,
    };
    let credit = tokens.count - chosen.new;
    let reason = if credit > 0 {
        Reason::LeastCostWarm
    } else {
        Reason::LeastCostCold
    };
    Some(Decision {
        new_tokens: Some(chosen.new),
        ..chosen.seen.because(reason, 0)
    })
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
    least: f64,
    temperature: f64,
) -> Option<Offer> {
    // One pass, no list: each takes the place of those before it with its share of the sum so far.
    let mut sum = 0.0;
    let mut chosen = None;
    for slot in field.slots() {
        let offer = offer(tokens, field, slot);
        let weight = (-(offer.cost - least) / temperature).exp();
        // Loads move meanwhile: a cost may be below the least that was seen.
        let weight = weight.clamp(0.0, 1e100);
        sum += weight;
        let lot = rng.below(1 << 53) as f64 / (1_u64 << 53) as f64;
        if lot * sum < weight {
            chosen = Some(offer);
        }
    }
    chosen
}

#[cfg(test)]
#[path = "kv_aware_tests.rs"]
mod tests;
