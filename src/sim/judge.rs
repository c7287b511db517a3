//! Detection in a simulation: the control plane's own judge ([`crate::control::standing`]), fed with what the simulated
//! router counts, at the control thread's pace.

use std::time::Duration;

use shards::Load;

use super::agenda::{Ns, ns};
use super::content::TOKEN_BYTES;
use crate::config::StandingConfig;
use crate::control::standing::{Observation, Standing, Standings, Why};
use crate::route::Role;

/// The pause between two trials of a worker, as in the router.
const TRIAL_PAUSE_S: f64 = 0.25;

/// One worker's place.
type Place = (usize, usize);

/// The judge and its counters.
pub struct Judge {
    standings: Standings<Place>,
    seen: Vec<(Place, Observation)>,
    tried: Vec<Option<Ns>>,
    /// Times a worker went out: (when, place).
    pub outs: Vec<(Ns, Place)>,
}

impl Judge {
    /// For pools of these sizes: the first, then the decode workers.
    pub fn new(sizes: &[usize]) -> Judge {
        let role = |pool| match (sizes.len(), pool) {
            (1, _) => Role::Regular,
            (_, 0) => Role::Prefill,
            _ => Role::Decode,
        };
        let places = sizes.iter().enumerate();
        let places = places.flat_map(|(pool, size)| (0..*size).map(move |worker| (pool, worker)));
        let seen = |place: Place| (place, Observation::new(role(place.0)));
        let seen: Vec<_> = places.map(seen).collect();
        Judge {
            standings: Standings::new(StandingConfig::default(), Duration::from_secs(10)),
            tried: vec![None; seen.len()],
            seen,
            outs: Vec::new(),
        }
    }

    fn of(&mut self, pool: usize, worker: usize) -> &mut Observation {
        let place = self
            .seen
            .iter_mut()
            .find(|(place, _)| *place == (pool, worker));
        &mut place.expect("a worker of the fleet").1
    }

    /// It was chosen.
    pub fn chosen(&mut self, pool: usize, worker: usize, fresh_tokens: u64) {
        let seen = self.of(pool, worker);
        seen.chosen += 1;
        seen.fresh_bytes += fresh_tokens * TOKEN_BYTES;
    }

    /// The first byte of an answer came.
    pub fn first(&mut self, pool: usize, worker: usize, is_trial: bool) {
        if !is_trial {
            self.of(pool, worker).successes += 1;
        }
    }

    /// An answer ended.
    pub fn completed(&mut self, pool: usize, worker: usize, is_trial: bool) {
        let seen = self.of(pool, worker);
        seen.completions += 1;
        seen.trials_good += u64::from(is_trial);
    }

    /// A worker that is to be tried now: one request at a time.
    pub fn due_for_trial(
        &mut self,
        pool: usize,
        now: Ns,
        in_flight: impl Fn(usize) -> u32,
    ) -> Option<usize> {
        for (index, ((at, worker), _)) in self.seen.iter().enumerate() {
            let rested = self.tried[index].is_none_or(|at| now >= at + ns(TRIAL_PAUSE_S));
            if *at == pool
                && rested
                && let Standing::Trial { load_max, .. } = self.standings.standing((pool, *worker))
                && in_flight(*worker) <= load_max
            {
                self.tried[index] = Some(now);
                return Some(*worker);
            }
        }
        None
    }

    /// Whether it gets no requests but trials.
    pub fn is_out(&self, pool: usize, worker: usize) -> bool {
        !matches!(
            self.standings.standing((pool, worker)),
            Standing::Good { .. }
        )
    }

    /// Those that are out because they stall.
    pub fn stalled(&self) -> Vec<(usize, usize)> {
        let is_stalled = |place: &Place| {
            let standing = self.standings.standing(*place);
            matches!(standing, Standing::Out { why: Why::Stalled })
        };
        let places = self.seen.iter().map(|(place, _)| *place);
        places.filter(is_stalled).collect()
    }

    /// A tick. `facts`: load, pieces and whether it is ready, by pool and worker. True: the fleet has changed.
    pub fn tick(&mut self, now: Ns, facts: impl Fn(usize, usize) -> (Load, u64, bool)) -> bool {
        for ((pool, worker), seen) in &mut self.seen {
            let (load, pieces, is_ready) = facts(*pool, *worker);
            (seen.in_flight, seen.waiting) = (load.in_flight, load.waiting);
            seen.waiting_bytes = load.waiting_bytes;
            seen.pieces = pieces;
            seen.is_ready = is_ready;
        }
        let changed = self.standings.judge(Duration::from_nanos(now), &self.seen);
        let out = changed
            .iter()
            .filter(|(_, standing)| matches!(standing, Standing::Out { .. }));
        self.outs.extend(out.map(|(place, _)| (now, *place)));
        !changed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn detection_is_set_as_the_flags_set_it() {
        let flags = crate::config::Config::default_for_tests().standing;
        assert_eq!(super::StandingConfig::default(), flags);
    }
}
