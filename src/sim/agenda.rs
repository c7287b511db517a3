//! What happens when: a queue of events in the order of their times, and of their making where times are equal. So a
//! run is the same to the byte whatever the machine does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Nanoseconds since the run began.
pub type Ns = u64;

/// Nanoseconds of some seconds; never negative.
pub fn ns(seconds: f64) -> Ns {
    (seconds.max(0.0) * 1e9) as Ns
}

/// Seconds of some nanoseconds.
pub fn secs(ns: Ns) -> f64 {
    ns as f64 / 1e9
}

struct Entry<E> {
    at: Ns,
    order: u64,
    event: E,
}

impl<E> Entry<E> {
    fn rank(&self) -> (Ns, u64) {
        (self.at, self.order)
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

/// Events to come, and the time of the last one taken.
pub struct Agenda<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    made: u64,
    now: Ns,
}

/// Nothing to come, time zero.
impl<E> Default for Agenda<E> {
    fn default() -> Agenda<E> {
        Agenda {
            heap: BinaryHeap::new(),
            made: 0,
            now: 0,
        }
    }
}

impl<E> Agenda<E> {
    /// The time of the last event taken.
    pub fn now(&self) -> Ns {
        self.now
    }

    /// Adds an event; one of the past happens now.
    pub fn add(&mut self, at: Ns, event: E) {
        let (at, order) = (at.max(self.now), self.made);
        self.made += 1;
        self.heap.push(Reverse(Entry { at, order, event }));
    }

    /// The next event; time moves on to it.
    pub fn take(&mut self) -> Option<E> {
        let Reverse(entry) = self.heap.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_equals_in_the_order_of_their_making() {
        let mut agenda = Agenda::default();
        for (at, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (3, 'b')] {
            agenda.add(at, event);
        }
        let order: String = std::iter::from_fn(|| agenda.take()).collect();
        assert_eq!((order.as_str(), agenda.now()), ("abcd", 5));
    }
}
