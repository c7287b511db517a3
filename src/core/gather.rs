//! When a core that relays many streams waits a moment for more of their events before it wakes.
//!
//! Woken for each event by itself, a core spends more on falling asleep and waking than on the event. Workers send the events of
//! a step one after the other, so the rest of a burst is on its way: a wait that asks for several events, for a bounded time, takes
//! them together. It is asked for only while events come fast; a few streams, and requests without streams, never wait.

use std::time::Duration;

/// How long events are counted before it is judged how fast they come.
const WINDOW_NS: u64 = 10_000_000;
/// From so many a second on (below, what would be saved is little).
const FAST_PER_S: u64 = 2_000;

/// How fast the events of a core's streams come.
#[derive(Default)]
pub struct Pace {
    count: u64,
    since_ns: u64,
    is_fast: bool,
}

impl Pace {
    /// An event of a stream has been relayed.
    pub fn count(&mut self) {
        self.count += 1;
    }

    /// How long the next sleep may gather for, of `most`; once a turn.
    pub fn gather(&mut self, now_ns: u64, most: Duration) -> Duration {
        let window_ns = now_ns.saturating_sub(self.since_ns);
        if window_ns >= WINDOW_NS {
            self.is_fast = self.count * 1_000_000_000 >= FAST_PER_S * window_ns;
            self.count = 0;
            self.since_ns = now_ns;
        }
        if self.is_fast { most } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(50);

    /// A second of events at that distance, one a turn: how many sleeps were to gather.
    fn gathered(pace: &mut Pace, from_ns: u64, apart_ns: u64) -> u64 {
        let mut gathered = 0;
        for turn in 0..1_000_000_000 / apart_ns {
            pace.count();
            gathered += u64::from(pace.gather(from_ns + turn * apart_ns, MOST) == MOST);
        }
        gathered
    }

    #[test]
    fn many_events_are_gathered_and_few_are_not() {
        let mut pace = Pace::default();
        assert_eq!(gathered(&mut pace, 0, 2_000_000), 0, "500 a second");
        let many = gathered(&mut pace, 1_000_000_000, 100_000);
        assert!(many > 9_800, "10,000 a second: {many}");
        let few = gathered(&mut pace, 2_000_000_000, 2_000_000);
        assert!(few <= 5, "500 a second again: {few}");
    }

    #[test]
    fn a_core_that_slept_long_does_not_gather_by_what_was_before() {
        let mut pace = Pace::default();
        gathered(&mut pace, 0, 100_000);
        pace.count();
        assert_eq!(pace.gather(5_000_000_000, MOST), Duration::ZERO);
    }

    #[test]
    fn nothing_is_gathered_where_it_is_off() {
        let mut pace = Pace::default();
        gathered(&mut pace, 0, 100_000);
        pace.count();
        assert_eq!(pace.gather(1_000_000_000, Duration::ZERO), Duration::ZERO);
    }
}
