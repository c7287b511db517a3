//! This core's kept-alive connections to workers: which may serve again, newest first, and for how long.
//!
//! Owned by one core; connections never change their core. The list holds names only; the connections themselves
//! live in the core's table and drop out when their worker closes them (a receive is always armed on an idle one).
//!
//! A worker that closes idle connections earlier than `--pool-idle-timeout-secs` shows its own limit by doing so. From
//! then on connections to it serve again only while they are clearly younger, so that the next request does not meet the
//! close; and the limit is tried out again, as the close may have been a restart.

use shards::Slot;

use crate::ring::Token;

/// Of an age at which a worker closed a connection, the part in which others still serve.
const SAFE_SHARE: f64 = 0.75;
/// How fast a learned limit grows again: twice as long after a minute without a close.
const DOUBLING_NS: f64 = 60e9;
/// A close at a lower age is no idle limit: the worker ends, or closes after each answer.
const LEARNED_NS_MIN: u64 = 20_000_000;

/// An idle connection.
#[derive(Clone, Copy, Debug)]
struct Idle {
    token: Token,
    since_ns: u64,
}

/// How long connections to a worker may be idle, as it showed, and when.
#[derive(Clone, Copy, Debug)]
struct Learned {
    limit_ns: u64,
    at_ns: u64,
}

#[derive(Debug, Default)]
struct Worker {
    idles: Vec<Idle>,
    learned: Option<Learned>,
}

impl Worker {
    /// How long a connection may be idle and serve again.
    fn limit_ns(&self, flag_ns: u64, now_ns: u64) -> u64 {
        let Some(learned) = self.learned else {
            return flag_ns;
        };
        let doublings = now_ns.saturating_sub(learned.at_ns) as f64 / DOUBLING_NS;
        flag_ns.min((learned.limit_ns as f64 * doublings.exp2()) as u64)
    }
}

/// Idle connections by worker.
#[derive(Debug, Default)]
pub struct Idles {
    workers: Vec<Worker>,
    count: usize,
}

impl Idles {
    fn worker(&mut self, slot: Slot) -> &mut Worker {
        let at = usize::from(slot.0);
        if self.workers.len() <= at {
            self.workers.resize_with(at + 1, Worker::default);
        }
        &mut self.workers[at]
    }

    /// Keeps a connection.
    pub fn put(&mut self, slot: Slot, token: Token, now_ns: u64) {
        self.worker(slot).idles.push(Idle {
            token,
            since_ns: now_ns,
        });
        self.count += 1;
    }

    /// The connection used last, the one least likely to be closed by the worker just now, if it is young enough.
    /// `flag_ns`: how long connections may be idle where nothing was learned.
    pub fn take(&mut self, slot: Slot, flag_ns: u64, now_ns: u64) -> Option<Token> {
        let worker = self.workers.get_mut(usize::from(slot.0))?;
        let limit_ns = worker.limit_ns(flag_ns, now_ns);
        // The others are older still: `expire` finds them.
        let is_young = |idle: &mut Idle| now_ns.saturating_sub(idle.since_ns) <= limit_ns;
        let idle = worker.idles.pop_if(is_young)?;
        self.count -= 1;
        Some(idle.token)
    }

    /// A worker has closed an idle connection.
    pub fn closed_by_worker(&mut self, slot: Slot, token: Token, now_ns: u64) {
        let worker = self.worker(slot);
        let Some(at) = worker.idles.iter().position(|idle| idle.token == token) else {
            return;
        };
        let age_ns = now_ns.saturating_sub(worker.idles.remove(at).since_ns);
        if age_ns >= LEARNED_NS_MIN {
            worker.learned = Some(Learned {
                limit_ns: (age_ns as f64 * SAFE_SHARE) as u64,
                at_ns: now_ns,
            });
        }
        self.count -= 1;
    }

    /// Whether there is any.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Moves connections that have been idle for too long into `out`.
    pub fn expire(&mut self, flag_ns: u64, now_ns: u64, out: &mut Vec<Token>) {
        for worker in &mut self.workers {
            let limit_ns = worker.limit_ns(flag_ns, now_ns);
            // Oldest first: they are put at the end and taken from the end.
            let old = |idle: &&Idle| now_ns.saturating_sub(idle.since_ns) > limit_ns;
            let expired = worker.idles.iter().take_while(old).count();
            out.extend(worker.idles.drain(..expired).map(|idle| idle.token));
            self.count -= expired;
        }
    }

    /// Moves all connections of workers that `is_known` does not know into `out`, and forgets what they showed.
    pub fn retain(&mut self, is_known: impl Fn(Slot) -> bool, out: &mut Vec<Token>) {
        for (at, worker) in self.workers.iter_mut().enumerate() {
            let is_used = !worker.idles.is_empty() || worker.learned.is_some();
            if is_used && !is_known(Slot(at as u16)) {
                self.count -= worker.idles.len();
                out.extend(worker.idles.drain(..).map(|idle| idle.token));
                worker.learned = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const FLAG_NS: u64 = 4 * SECOND_NS;
    const SLOT: Slot = Slot(3);

    fn token(index: u32) -> Token {
        Token {
            index,
            generation: 1,
        }
    }

    #[test]
    fn the_newest_serves_first_and_the_old_ones_do_not() {
        let mut idles = Idles::default();
        idles.put(SLOT, token(1), 0);
        idles.put(SLOT, token(2), SECOND_NS);
        assert_eq!(idles.take(SLOT, FLAG_NS, 5 * SECOND_NS), Some(token(2)));
        assert_eq!(idles.take(SLOT, FLAG_NS, 5 * SECOND_NS), None, "too old");
        let mut old = Vec::new();
        idles.expire(FLAG_NS, 5 * SECOND_NS, &mut old);
        assert_eq!(old, [token(1)]);
        assert!(idles.is_empty());
    }

    #[test]
    fn a_worker_that_closes_early_gets_no_request_on_a_connection_of_that_age() {
        let mut idles = Idles::default();
        idles.put(SLOT, token(1), 0);
        idles.closed_by_worker(SLOT, token(1), SECOND_NS);
        assert!(idles.is_empty());
        let from = 2 * SECOND_NS;
        for (age_ms, serves) in [(700, true), (800, false), (1000, false)] {
            idles.put(SLOT, token(2), from);
            let taken = idles.take(SLOT, FLAG_NS, from + age_ms * 1_000_000);
            assert_eq!(taken.is_some(), serves, "{age_ms} ms");
            idles.expire(0, u64::MAX, &mut Vec::new());
        }
        // Other workers are not concerned.
        idles.put(Slot(4), token(3), from);
        assert!(idles.take(Slot(4), FLAG_NS, from + FLAG_NS).is_some());
    }

    #[test]
    fn what_was_learned_fades_and_a_worker_that_comes_and_goes_shows_nothing() {
        let mut idles = Idles::default();
        idles.put(SLOT, token(1), 0);
        idles.closed_by_worker(SLOT, token(1), SECOND_NS);
        let later = 200 * SECOND_NS;
        idles.put(SLOT, token(2), later);
        assert!(
            idles.take(SLOT, FLAG_NS, later + FLAG_NS).is_some(),
            "three minutes later"
        );
        idles.put(SLOT, token(3), later);
        idles.closed_by_worker(SLOT, token(3), later + 1_000_000);
        idles.put(SLOT, token(4), later);
        assert!(
            idles.take(SLOT, FLAG_NS, later + FLAG_NS).is_some(),
            "closed after an answer"
        );
        idles.put(SLOT, token(5), later);
        idles.closed_by_worker(SLOT, token(5), later + SECOND_NS);
        idles.retain(|_| false, &mut Vec::new());
        idles.put(SLOT, token(6), later);
        assert!(
            idles.take(SLOT, FLAG_NS, later + FLAG_NS).is_some(),
            "another worker in its slot"
        );
    }
}
