//! When requests are due in an open loop: at a rate, whatever becomes of the answers. Pure.
//!
//! The next one stays due until it has been sent. So nothing is left out while the other side is slow (coordinated omission): its time
//! counts from when it was due.

use crate::route::Rng;
use crate::sim::workload::Draw;

/// Times, ns from the begin of a slice, at which requests are due.
#[derive(Clone, Debug)]
pub struct Arrivals {
    gap_ns: f64,
    next_ns: f64,
    /// Of gaps that are drawn.
    rng: Option<Rng>,
}

impl Arrivals {
    /// `rate_per_s` above 0. Evenly, or with exponential gaps of that mean (a Poisson process). `phase`: 0 to 1, where in the first
    /// gap the first one is due; threads that share a rate take turns by it.
    pub fn new(rate_per_s: f64, poisson_seed: Option<u64>, phase: f64) -> Arrivals {
        let gap_ns = 1e9 / rate_per_s;
        let mut arrivals = Arrivals {
            gap_ns,
            next_ns: gap_ns * phase,
            rng: poisson_seed.map(Rng::new),
        };
        if arrivals.rng.is_some() {
            arrivals.next_ns = 0.0;
            arrivals.sent();
        }
        arrivals
    }

    /// When the next one is due.
    pub fn due_ns(&self) -> u64 {
        self.next_ns as u64
    }

    /// It has been sent.
    pub fn sent(&mut self) {
        self.next_ns += match &mut self.rng {
            Some(rng) => rng.exponential(self.gap_ns),
            None => self.gap_ns,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(arrivals: &mut Arrivals, count: usize) -> Vec<u64> {
        let next = |_| {
            let due = arrivals.due_ns();
            arrivals.sent();
            due
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn times_do_not_depend_on_when_they_are_asked_for() {
        let mut even = Arrivals::new(1000.0, None, 0.5);
        assert_eq!(times(&mut even, 3), [500_000, 1_500_000, 2_500_000]);
        // Nobody sent for a while: it is still the next one that is due, and none is skipped.
        assert_eq!(even.due_ns(), 3_500_000);
        assert_eq!(times(&mut even, 1_000_000).last(), Some(&1_000_002_500_000));
    }

    #[test]
    fn drawn_gaps_have_the_rate_and_the_spread_of_a_poisson_process() {
        let all = times(&mut Arrivals::new(1000.0, Some(3), 0.0), 100_000);
        let gaps: Vec<f64> = all
            .windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64 / 1e6)
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let square = gaps.iter().map(|gap| gap * gap).sum::<f64>() / gaps.len() as f64;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((square / (mean * mean) - 2.0).abs() < 0.1, "{square}");
    }
}
