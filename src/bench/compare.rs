//! Two targets side by side: in which order their slices come, and what the ratios of pairs of slices say. Pure.
//!
//! A machine drifts: a figure taken now and one taken a minute later differ by more than most changes make. So each slice of A has a slice
//! of B right beside it, first one and then the other by turns, and it is the ratios within these pairs that are looked at.

use super::tally::{MEASURES, Tally};
use crate::route::Rng;

/// Resamples.
const DRAWS: usize = 2000;
/// Pairs without which no interval is given.
const PAIRS_MIN: usize = 6;

/// B to A.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Median of the pairs.
    pub median: f64,
    /// In which 95 of 100 medians of resampled pairs lie; `None` with few pairs.
    pub interval: Option<(f64, f64)>,
    /// Pairs that have it.
    pub pairs: usize,
}

impl Ratio {
    /// Above `max`, and not by chance: a program beside itself is some percent off now and then, but its interval has 1 in it.
    pub fn exceeds(&self, max: f64) -> bool {
        self.median > max && self.interval.is_none_or(|(low, _)| low > max.min(1.0))
    }
}

/// The targets of a pair's two slices: A first, then B first, and so on, so that neither always follows the other.
pub fn order(pair: usize) -> [usize; 2] {
    match pair % 2 {
        0 => [0, 1],
        _ => [1, 0],
    }
}

/// Median of the ratios with its interval; `None` without any.
pub fn ratio(pairs: &[(f64, f64)], seed: u64) -> Option<Ratio> {
    let mut ratios: Vec<f64> = pairs
        .iter()
        .filter(|(a, _)| *a > 0.0)
        .map(|(a, b)| b / a)
        .collect();
    if ratios.is_empty() {
        return None;
    }
    let mut rng = Rng::new(seed);
    let mut draw = || {
        let mut drawn: Vec<f64> = (0..ratios.len())
            .map(|_| ratios[rng.below(ratios.len())])
            .collect();
        median(&mut drawn)
    };
    let interval = (ratios.len() >= PAIRS_MIN).then(|| {
        let mut medians: Vec<f64> = (0..DRAWS).map(|_| draw()).collect();
        medians.sort_by(f64::total_cmp);
        (medians[DRAWS * 25 / 1000], medians[DRAWS * 975 / 1000 - 1])
    });
    Some(Ratio {
        pairs: ratios.len(),
        median: median(&mut ratios),
        interval,
    })
}

/// The ratio of each measure that both have.
pub fn ratios(pairs: &[[Tally; 2]], seed: u64) -> Vec<(&'static str, Ratio)> {
    let of = |(name, value): &super::tally::Measure| {
        let both = pairs.iter().filter_map(|[a, b]| value(a).zip(value(b)));
        Some((*name, ratio(&both.collect::<Vec<_>>(), seed)?))
    };
    MEASURES.iter().filter_map(of).collect()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drift_that_both_have_is_not_in_the_ratio() {
        let pairs: Vec<(f64, f64)> = (1..=40)
            .map(|drift| (f64::from(drift), f64::from(drift) * 1.1))
            .collect();
        let ratio = ratio(&pairs, 1).unwrap();
        assert!((ratio.median - 1.1).abs() < 1e-9 && ratio.pairs == 40);
        let (low, high) = ratio.interval.unwrap();
        assert!(
            (low - 1.1).abs() < 1e-9 && (high - 1.1).abs() < 1e-9,
            "{low} {high}"
        );
    }

    #[test]
    fn the_interval_has_the_true_ratio_about_95_times_of_100() {
        let mut rng = Rng::new(7);
        let mut noisy = || 1.0 + (rng.below(2001) as f64 - 1000.0) / 5000.0;
        let mut hits = 0;
        for trial in 0..300 {
            let pairs: Vec<(f64, f64)> = (0..25).map(|_| (noisy(), 1.25 * noisy())).collect();
            let (low, high) = ratio(&pairs, trial).unwrap().interval.unwrap();
            assert!(high - low < 0.6, "{low} {high}");
            hits += u32::from(low <= 1.25 && 1.25 <= high);
        }
        assert!((270..=299).contains(&hits), "{hits} of 300");
    }

    #[test]
    fn few_pairs_have_no_interval_and_none_no_ratio() {
        assert_eq!(ratio(&[], 1), None);
        assert_eq!(ratio(&[(0.0, 1.0)], 1), None);
        let few = ratio(&[(1.0, 2.0), (1.0, 4.0)], 1).unwrap();
        assert_eq!((few.median, few.interval, few.pairs), (3.0, None, 2));
        assert_eq!((order(0), order(1), order(2)), ([0, 1], [1, 0], [0, 1]));
        let with = |interval| Ratio {
            median: 1.08,
            interval,
            pairs: 9,
        };
        assert!(with(None).exceeds(1.05) && !with(None).exceeds(1.1));
        assert!(with(Some((1.02, 1.2))).exceeds(1.05) && !with(Some((0.99, 1.2))).exceeds(1.05));
    }
}
