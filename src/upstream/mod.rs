//! This core's kept-alive connections to workers: which may serve again, newest first.
//!
//! Owned by one core; connections never change their core. The list holds names only; the connections themselves
//! live in the core's table and drop out when their worker closes them (a receive is always armed on an idle one).

use shards::Slot;

use crate::ring::Token;

/// An idle connection.
#[derive(Clone, Copy, Debug)]
struct Idle {
    token: Token,
    since_ns: u64,
}

/// Idle connections by worker.
#[derive(Default)]
pub struct Idles {
    by_slot: Vec<Vec<Idle>>,
    count: usize,
}

impl Idles {
    /// Keeps a connection.
    pub fn put(&mut self, slot: Slot, token: Token, now_ns: u64) {
        let at = usize::from(slot.0);
        if self.by_slot.len() <= at {
            self.by_slot.resize_with(at + 1, Vec::new);
        }
        self.by_slot[at].push(Idle {
            token,
            since_ns: now_ns,
        });
        self.count += 1;
    }

    /// The connection used last: the one least likely to be closed by the worker just now.
    pub fn take(&mut self, slot: Slot) -> Option<Token> {
        let idle = self.by_slot.get_mut(usize::from(slot.0))?.pop()?;
        self.count -= 1;
        Some(idle.token)
    }

    /// Whether there is any.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Moves connections idle since before a time into `out`.
    pub fn expire(&mut self, before_ns: u64, out: &mut Vec<Token>) {
        for list in &mut self.by_slot {
            // Oldest first: they are put at the end and taken from the end.
            let expired = list
                .iter()
                .take_while(|idle| idle.since_ns < before_ns)
                .count();
            out.extend(list.drain(..expired).map(|idle| idle.token));
            self.count -= expired;
        }
    }

    /// Moves all connections of workers that `is_known` does not know into `out`.
    pub fn retain(&mut self, is_known: impl Fn(Slot) -> bool, out: &mut Vec<Token>) {
        for (at, list) in self.by_slot.iter_mut().enumerate() {
            if !list.is_empty() && !is_known(Slot(at as u16)) {
                self.count -= list.len();
                out.extend(list.drain(..).map(|idle| idle.token));
            }
        }
    }
}
