//! Counters, gauges and histograms that one core writes and anyone reads. No read-modify-write: the single writer loads and
//! stores. A second writer would lose counts (nothing worse), so each core has its own and readers add them up.
//!
//! std's atomics in every build: nothing hangs on their order, there is nothing to model.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows (wrapping after 2^64). One writer.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Zero.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. The counter's one writer only.
    #[inline]
    pub fn add(&self, n: u64) {
        // ORDERING: Relaxed load: only this thread writes it. Relaxed store: a number to show, nothing is published.
        let value = self.0.load(Ordering::Relaxed).wrapping_add(n);
        self.0.store(value, Ordering::Relaxed);
    }

    /// The number now.
    #[must_use]
    pub fn value(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down. One writer.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Zero.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Replaces the number. The gauge's one writer only.
    #[inline]
    pub fn set(&self, value: u64) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.0.store(value, Ordering::Relaxed);
    }

    /// The number now.
    #[must_use]
    pub fn value(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.0.load(Ordering::Relaxed)
    }
}

/// Counts of durations by upper bound, in ns. One writer.
#[derive(Debug)]
pub struct Histogram<const N: usize> {
    bounds: &'static [u64; N],
    counts: [Counter; N],
    over: Counter,
    sum_ns: Counter,
}

/// A histogram's numbers at about one time (the writer may be in the middle of a record).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Upper bounds in ns, inclusive, ascending.
    pub bounds: &'static [u64],
    /// How many fell under each bound and above the one before; the last is what lies above all. Not cumulative.
    pub counts: Vec<u64>,
    /// Sum of all durations in ns.
    pub sum_ns: u64,
    /// How many durations: the sum of `counts`.
    pub count: u64,
}

impl<const N: usize> Histogram<N> {
    /// An empty histogram; `bounds` are inclusive upper bounds in ns, ascending.
    #[must_use]
    pub const fn new(bounds: &'static [u64; N]) -> Self {
        Self {
            bounds,
            counts: [const { Counter::new() }; N],
            over: Counter::new(),
            sum_ns: Counter::new(),
        }
    }

    /// Counts one duration in ns. The histogram's one writer only.
    pub fn record(&self, ns: u64) {
        let bucket = self.bounds.partition_point(|&bound| bound < ns);
        self.counts.get(bucket).unwrap_or(&self.over).add(1);
        self.sum_ns.add(ns);
    }

    /// The numbers now.
    #[must_use]
    pub fn snapshot(&self) -> HistogramSnapshot {
        let all = self.counts.iter().chain([&self.over]);
        let counts: Vec<u64> = all.map(Counter::value).collect();
        let count = counts.iter().sum();
        HistogramSnapshot {
            bounds: self.bounds,
            counts,
            sum_ns: self.sum_ns.value(),
            count,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_counter_adds() {
        static COUNTER: Counter = Counter::new();
        COUNTER.add(2);
        COUNTER.add(40);
        assert_eq!(COUNTER.value(), 42);
        COUNTER.add(u64::MAX);
        assert_eq!(COUNTER.value(), 41, "wraps");
    }

    #[test]
    fn a_gauge_shows_what_was_set_last() {
        let gauge = Gauge::new();
        assert_eq!(gauge.value(), 0);
        gauge.set(7);
        gauge.set(3);
        assert_eq!(gauge.value(), 3);
    }

    #[test]
    fn bounds_are_inclusive() {
        let histogram = Histogram::new(&[10, 20, 30]);
        let empty = histogram.snapshot();
        assert_eq!(
            (empty.counts, empty.count, empty.sum_ns),
            (vec![0; 4], 0, 0)
        );
        [0, 10, 11, 20, 30, 31, u64::from(u32::MAX)]
            .iter()
            .for_each(|&ns| histogram.record(ns));
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.bounds, [10, 20, 30]);
        assert_eq!(snapshot.counts, [2, 2, 1, 2]);
        assert_eq!(snapshot.count, 7);
        assert_eq!(
            snapshot.sum_ns,
            10 + 11 + 20 + 30 + 31 + u64::from(u32::MAX)
        );
    }
}
