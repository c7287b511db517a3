//! The retry budget of one core: a share of its traffic, so that retries cannot multiply an outage.

/// Retries that are always there, and how fast they come back.
const FLOOR_COUNT: f64 = 10.0;
/// Most retries that can be saved up: what one dead worker's requests may need at once.
const SAVED_COUNT_MAX: f64 = 1_000.0;

/// Retries left.
pub struct RetryBudget {
    left: f64,
    /// Retries that each leg adds.
    ratio: f64,
    filled_ns: u64,
}

impl RetryBudget {
    /// A few are there from the start. `ratio`: what each leg adds.
    pub fn new(ratio: f64) -> RetryBudget {
        RetryBudget {
            left: FLOOR_COUNT,
            ratio,
            filled_ns: 0,
        }
    }

    /// Another ratio from now on; what is saved stays.
    pub fn set_ratio(&mut self, ratio: f64) {
        self.ratio = ratio;
    }

    /// A leg of a request has begun.
    pub fn earn(&mut self) {
        self.left = (self.left + self.ratio).min(SAVED_COUNT_MAX);
    }

    /// Takes a retry, if one is left. Ten a second come back whatever the traffic.
    pub fn take(&mut self, now_ns: u64) -> bool {
        if self.left < FLOOR_COUNT {
            let secs = now_ns.saturating_sub(self.filled_ns) as f64 / 1e9;
            self.left = (self.left + secs * FLOOR_COUNT).min(FLOOR_COUNT);
        }
        self.filled_ns = now_ns;
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn retries_are_a_share_of_the_requests_once_the_floor_is_used_up() {
        let mut budget = RetryBudget::new(0.25);
        let took = (0..1000).filter(|_| {
            budget.earn();
            budget.take(SECOND_NS)
        });
        let took = took.count();
        assert!((255..=265).contains(&took), "{took}");
    }

    #[test]
    fn a_few_retries_a_second_are_there_without_traffic() {
        let mut budget = RetryBudget::new(0.0);
        let take_all = |budget: &mut RetryBudget, at| (0..100).filter(|_| budget.take(at)).count();
        assert_eq!(take_all(&mut budget, SECOND_NS), 10);
        assert_eq!(take_all(&mut budget, SECOND_NS + SECOND_NS / 2), 5);
        assert_eq!(take_all(&mut budget, 100 * SECOND_NS), 10);
    }
}
