//! When a refused client may come again: told from how fast requests end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::shared::{Shared, ToCore};

/// Time over which the rate is averaged.
const SPAN: Duration = Duration::from_secs(5);
/// Longest that is told. A fleet that stands still may go on at any time.
const SECS_MAX: f64 = 60.0;

/// Follows the rate at which requests end. Pure but for [`DrainRate::tell`].
#[derive(Debug, Default)]
pub(super) struct DrainRate {
    left: u64,
    per_sec: f64,
}

impl DrainRate {
    /// Takes a look: `left` requests have ended so far, `dt` after the last look.
    fn observe(&mut self, left: u64, dt: Duration) {
        let ended = left.saturating_sub(self.left) as f64;
        self.left = left;
        let weight = (dt.as_secs_f64() / SPAN.as_secs_f64()).min(1.0);
        if weight > 0.0 {
            self.per_sec += (ended / dt.as_secs_f64() - self.per_sec) * weight;
        }
    }

    /// Seconds until those who wait, and one more, have been let in: at least 1.
    fn retry_after_secs(&self, waiting: u32) -> u32 {
        let ahead = f64::from(waiting) + 1.0;
        (ahead / self.per_sec).ceil().clamp(1.0, SECS_MAX) as u32
    }

    /// Looks, and tells the cores.
    pub(super) fn tell(&mut self, shared: &Shared, dt: Duration) {
        let left = shared.cores.iter().map(|core| core.stats.left.value());
        self.observe(left.sum(), dt);
        let (_, waiting) = shared.gate.counts();
        // ORDERING: Relaxed; an estimate.
        shared
            .retry_after_secs
            .store(self.retry_after_secs(waiting), Ordering::Relaxed);
    }
}

/// Between two looks at who may begin, where their rate is limited; and between two looks at whether it is.
const TURN_PAUSE: Duration = Duration::from_millis(2);
const TURN_PAUSE_UNLIMITED: Duration = Duration::from_secs(1);

/// Lets requests in as the bucket of `--rate-limit-tokens-per-second` fills: cores look only when something happens to them.
pub(super) async fn follow_rate(shared: Arc<Shared>) {
    loop {
        let config = shared.config();
        while config.request_rate_max.is_some()
            && let Some(core) = shared.pass_on(&config)
        {
            shared.cores[core].post(ToCore::YourTurn);
        }
        tokio::time::sleep(match config.request_rate_max {
            Some(_) => TURN_PAUSE,
            None => TURN_PAUSE_UNLIMITED,
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_told_when_the_line_before_it_will_be_gone() {
        let mut rate = DrainRate::default();
        let tick = Duration::from_millis(250);
        for n in 1..=200 {
            rate.observe(n, tick); // Four a second.
        }
        assert_eq!(rate.retry_after_secs(0), 1);
        assert!((25..=26).contains(&rate.retry_after_secs(99)));
        assert_eq!(rate.retry_after_secs(100_000), 60);
        for _ in 0..400 {
            rate.observe(200, tick); // Nothing ends any more.
        }
        assert_eq!(rate.retry_after_secs(0), 60);
    }

    #[test]
    fn an_idle_router_that_is_full_at_once_says_a_whole_number_of_seconds() {
        let mut rate = DrainRate::default();
        assert_eq!(rate.retry_after_secs(5), 60, "nothing is known");
        rate.observe(0, Duration::ZERO);
        rate.observe(1000, Duration::from_millis(250));
        assert_eq!(rate.retry_after_secs(0), 1);
    }
}
