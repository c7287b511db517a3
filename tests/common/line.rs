//! The gate of a simulation: who waits is let in when the schedule says so.

use std::cell::RefCell;

use corelane::exchange::Entrance;
use shards::{Entry, Gate, Permit};

/// One client's place before the gate.
pub struct Line {
    gate: &'static Gate,
    /// Its request waits.
    pub is_waiting: bool,
}

thread_local! {
    /// Gates live for ever, so those that nobody uses any more serve again.
    static FREE: RefCell<Vec<&'static Gate>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.gate.counts() == (0, 0) {
            FREE.with_borrow_mut(|free| free.push(self.gate));
        }
    }
}

impl Line {
    pub fn new() -> Line {
        let free = FREE.with_borrow_mut(Vec::pop);
        Line {
            gate: free.unwrap_or_else(|| Box::leak(Box::new(Gate::new(1)))),
            is_waiting: false,
        }
    }

    /// The request comes, when so many may run and wait.
    pub fn enter(&mut self, limit: u32, queue_max: u32) -> Entrance {
        assert!(!self.is_waiting, "Q1: it comes while it waits");
        match self.gate.enter(limit, queue_max) {
            Entry::Admitted(permit) => Entrance::Admitted(permit),
            Entry::Full => Entrance::Full,
            Entry::Queued(_) => {
                self.is_waiting = true;
                Entrance::Queued
            }
        }
    }

    pub fn step_aside(&mut self, permit: Permit, queue_max: u32) -> Result<(), Permit> {
        permit.step_aside(queue_max)?;
        self.is_waiting = true;
        Ok(())
    }

    pub fn stop_waiting(&mut self) {
        assert!(std::mem::take(&mut self.is_waiting), "nobody waits");
        self.gate.stop_waiting();
    }

    /// It is let in.
    pub fn turn(&mut self) -> Permit {
        assert!(std::mem::take(&mut self.is_waiting), "nobody waits");
        self.gate.resume(u32::MAX).expect("it waits")
    }

    /// What must hold at any time: it runs or waits or neither, and holds seats only while it runs.
    pub fn check(&self, has_seat: bool, is_idle: bool) {
        let (running, waiting) = self.gate.counts();
        assert_eq!(waiting, u32::from(self.is_waiting), "Q1: waiting");
        assert!(running + waiting <= 1, "Q1: {running} run, {waiting} wait");
        assert!(!has_seat || running == 1, "Q1: a seat without a permit");
        assert!(!is_idle || running + waiting == 0, "Q1: a place for nobody");
    }
}
