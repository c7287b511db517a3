//! The policies that keep a key together: by a ring, by weights, or as a session was bound. Called by [`super::decide`].
//!
//! Without a key they choose the least loaded (vllm-router hashes an empty text then, and one worker gets everything).
//! Where the key's own worker is out of the question (it failed this request, is busy, full or coming back), the next one
//! on the ring or by weight gets it, for this request: the same one for all requests of the key.
//!
//! Bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016) by `--hash-balance-factor` or `--prefix-hash-load-factor` c: no
//! worker gets a request that would have more than c times its even share, rounded up; the next one that has room does.
//! As c is at least 1, somebody always has.

use shards::{Sessions, Slot};

use super::candidates::Candidates;
use super::policy::{Decision, Entrants, Loads, PolicyKind, Rng, Settings};
use super::reason::Reason;

/// Whose worker a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home {
    /// The worker it is bound to.
    pub slot: Slot,
    /// It was bound just now, by this request.
    pub is_new: bool,
}

/// The worker of a key.
pub(super) fn of_key<L: Loads>(
    settings: &Settings,
    key: u64,
    field: &Entrants<'_, L>,
) -> Option<Decision> {
    // Or the whole ring would be walked in vain.
    field.slots().next()?;
    let (own, first) = settings.walk(field.candidates, key, |slot| field.is_open(slot));
    let seen = field.see(first?);
    let limit = settings.load_limit(seen.load, || field.shares());
    if limit.is_none_or(|limit| seen.load < limit) {
        let is_own = own == first;
        let reason = if is_own {
            Reason::Home
        } else {
            Reason::HomeOut
        };
        return Some(seen.because(reason, 0));
    }
    let wanted = seen;
    let below = limit.unwrap_or(u32::MAX);
    let has_room = |slot| field.is_open(slot) && field.loads.load(slot) < below;
    let (_, next) = settings.walk(field.candidates, key, has_room);
    // Nobody: the loads have grown since they were added up.
    let seen = match next {
        Some(slot) => field.see(slot),
        None => field.least_now()?,
    };
    Some(seen.because(Reason::HomeShed, 0).instead_of(wanted, 0))
}

/// The worker of a session; by weight for this request if that is out of the question.
pub(super) fn of_session<L: Loads>(
    settings: &Settings,
    key: u64,
    home: Home,
    field: &Entrants<'_, L>,
) -> Option<Decision> {
    if field.has(home.slot) {
        let reason = match home.is_new {
            true => Reason::NewSession,
            false => Reason::Home,
        };
        return Some(field.see(home.slot).because(reason, 0));
    }
    let (_, first) = settings.walk(field.candidates, key, |slot| field.is_open(slot));
    Some(field.see(first?).because(Reason::HomeOut, 0))
}

/// Whom to bind a new session to: of the candidates that `accept` takes the one with the fewest sessions, of these one of
/// the least loaded, of these any (vllm-router: the fewest sessions, then by weight, whatever their load).
pub fn home_for_new<L: Loads>(
    candidates: &Candidates,
    sessions: &Sessions,
    loads: &L,
    accept: impl Fn(Slot) -> bool,
    rng: &mut Rng,
) -> Option<Slot> {
    let slots = candidates.slots().iter().copied();
    let ranked = slots.filter(|slot| accept(*slot)).map(|slot| {
        let sessions = u64::from(sessions.count(slot)) << u32::BITS;
        (sessions | u64::from(loads.load(slot)), slot)
    });
    let (mut best, mut chosen, mut equals) = (u64::MAX, None, 0);
    for (rank, slot) in ranked {
        if rank < best {
            (best, chosen, equals) = (rank, Some(slot), 1);
        } else if rank == best {
            // The n-th equal replaces the one before with a chance of 1 in n: each has the same in the end.
            equals += 1;
            if rng.below(equals) == 0 {
                chosen = Some(slot);
            }
        }
    }
    chosen
}

impl Settings {
    /// The key's own worker among all candidates, and the first one on its way that `accept` takes.
    #[inline]
    fn walk(
        &self,
        candidates: &Candidates,
        key: u64,
        accept: impl Fn(Slot) -> bool,
    ) -> (Option<Slot>, Option<Slot>) {
        // A fleet that was published before this policy came has no ring yet: weights will do for a moment.
        if self.policy.uses_ring() && candidates.has_ring() {
            on_ring(candidates, key, accept)
        } else {
            by_weight(candidates, key, accept)
        }
    }

    /// How many requests a worker may have, this one not counted, if there is a limit and `load` may be above it.
    /// `shares`: the sum of all loads, and among how many.
    fn load_limit(&self, load: u32, shares: impl FnOnce() -> (u64, usize)) -> Option<u32> {
        let factor = match self.policy {
            PolicyKind::PrefixHash => self.prefix_hash_load_factor,
            _ => self.hash_balance_factor,
        };
        // An idle worker has room whatever the others have.
        if factor < 1.0 || load == 0 {
            return None;
        }
        let (sum, count) = shares();
        let limit = factor * (sum + 1) as f64 / count.max(1) as f64;
        Some(limit.ceil() as u32)
    }
}

fn on_ring(
    candidates: &Candidates,
    key: u64,
    accept: impl Fn(Slot) -> bool,
) -> (Option<Slot>, Option<Slot>) {
    let mut around = candidates.around(key);
    let own = around.next();
    let first = own.into_iter().chain(around).find(|slot| accept(*slot));
    (own, first)
}

fn by_weight(
    candidates: &Candidates,
    key: u64,
    accept: impl Fn(Slot) -> bool,
) -> (Option<Slot>, Option<Slot>) {
    let own = heaviest(candidates, key, |_| true);
    // Nearly always it will do, and one pass with nothing to ask is the cheapest.
    let first = match own {
        Some(slot) if !accept(slot) => heaviest(candidates, key, accept),
        own => own,
    };
    (own, first)
}

/// A plain loop: see `Entrants::draw`.
#[inline]
fn heaviest(candidates: &Candidates, key: u64, accept: impl Fn(Slot) -> bool) -> Option<Slot> {
    let (mut chosen, mut most) = (None, 0);
    for (slot, weight) in candidates.weights(key) {
        if weight >= most && accept(slot) {
            (chosen, most) = (Some(slot), weight);
        }
    }
    chosen
}

impl<L: Loads> Entrants<'_, L> {
    /// Whether a candidate is open to this request.
    #[inline]
    fn is_open(&self, slot: Slot) -> bool {
        self.exclude.is_empty() || !self.exclude.contains(&slot)
    }

    /// The sum of the loads of those who may get this request, and their number.
    fn shares(&self) -> (u64, usize) {
        let load = |slot| u64::from(self.loads.load(slot));
        match self.exclude {
            [] => {
                let slots = self.candidates.slots();
                (slots.iter().map(|slot| load(*slot)).sum(), slots.len())
            }
            _ => self
                .slots()
                .fold((0, 0), |(sum, count), slot| (sum + load(slot), count + 1)),
        }
    }
}

#[cfg(test)]
#[path = "hashed_tests.rs"]
mod tests;
