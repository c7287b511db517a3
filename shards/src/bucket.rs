//! How many requests may begin in a second, all cores together: a bucket of tokens that fills steadily.
//!
//! One word: the time at which the bucket will be full again (the "virtual scheduling" form of the leaky bucket: ITU-T I.371, the
//! generic cell rate algorithm). Taking a token moves that time on by one interval; there is none when it would lie further
//! ahead than the whole bucket takes to fill. So nothing has to fill it, and an idle bucket costs nothing.
//!
//! Invariants:
//! - **A1** In any time `t` no more than `size + t / interval` tokens are taken, those given back not counted.

use crate::sync::{AtomicU64, CachePadded, Ordering};

/// How fast it fills, and how much it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refill {
    /// Between two tokens, ns; at least 1.
    pub interval_ns: u64,
    /// Tokens that a full bucket holds; at least 1.
    pub size: u64,
}

/// Tokens. `Sync`; time comes from the caller, ns since any start that all callers share.
#[derive(Debug)]
pub struct Bucket {
    full_at_ns: CachePadded<AtomicU64>,
}

impl Bucket {
    /// A full one.
    #[must_use]
    pub fn new() -> Bucket {
        Bucket {
            full_at_ns: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Takes a token; `false`: there is none now.
    #[must_use]
    pub fn take(&self, now_ns: u64, refill: Refill) -> bool {
        let ahead_max_ns = refill.interval_ns.saturating_mul(refill.size);
        // ORDERING: Relaxed; the number is all, judged and changed in one step (A1).
        let taken =
            self.full_at_ns
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at_ns| {
                    let then = full_at_ns.max(now_ns).saturating_add(refill.interval_ns);
                    (then - now_ns <= ahead_max_ns).then_some(then)
                });
        taken.is_ok()
    }

    /// A token that was taken for nothing.
    pub fn give_back(&self, refill: Refill) {
        // ORDERING: Relaxed; as above. What was added can be taken away.
        self.full_at_ns
            .fetch_sub(refill.interval_ns, Ordering::Relaxed);
    }
}

impl Default for Bucket {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    const TEN_A_SECOND: Refill = Refill {
        interval_ns: 100_000_000,
        size: 3,
    };

    #[test]
    fn a_burst_of_its_size_and_then_one_for_each_interval() {
        let bucket = Bucket::new();
        let count_at = |ms: u64| {
            let now_ns = ms * 1_000_000;
            (0..100)
                .filter(|_| bucket.take(now_ns, TEN_A_SECOND))
                .count()
        };
        assert_eq!(count_at(5_000), 3);
        assert_eq!(count_at(5_099), 0);
        assert_eq!(count_at(5_100), 1);
        assert_eq!(count_at(5_350), 2);
        assert_eq!(count_at(60_000), 3, "it never holds more");
    }

    #[test]
    fn what_is_given_back_is_there_again() {
        let bucket = Bucket::new();
        let one = Refill {
            size: 1,
            ..TEN_A_SECOND
        };
        assert!(bucket.take(7, one));
        assert!(!bucket.take(7, one));
        bucket.give_back(one);
        assert!(bucket.take(7, one));
    }

    #[test]
    fn threads_take_no_more_than_there_are() {
        let bucket = Arc::new(Bucket::new());
        let refill = Refill {
            interval_ns: 1000,
            size: 500,
        };
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let bucket = bucket.clone();
                std::thread::spawn(move || {
                    (0..10_000)
                        .filter(|n| bucket.take(1_000_000 + n * 100, refill))
                        .count()
                })
            })
            .collect();
        let taken: usize = threads.into_iter().map(|t| t.join().unwrap()).sum();
        // 10,000 steps of 100 ns: a thousand further ones.
        assert!((500..=1_500).contains(&taken), "{taken}");
    }
}
