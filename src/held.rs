//! Bytes that are held in memory for clients, counted where they are limited.
//!
//! A count belongs to a [`Held`], which lives in the exchange and gives it back on every way out. One pool counts a core's
//! bytes, and with it the pool of the whole router, which is written for large bodies and for waiting requests only.
//!
//! Invariants:
//! - **M1** A pool's count is the sum of what the living [`Held`]s of it and its parts have, and never above the limit it was
//!   last asked with.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts bytes, alone or as a part of a larger pool.
#[derive(Debug, Default)]
pub struct ByteCount {
    held_bytes: AtomicU64,
    whole: Option<Arc<ByteCount>>,
}

impl ByteCount {
    /// A pool that is part of another one.
    pub fn part_of(whole: &Arc<ByteCount>) -> ByteCount {
        ByteCount {
            held_bytes: AtomicU64::new(0),
            whole: Some(whole.clone()),
        }
    }

    /// Bytes held now.
    pub fn bytes(&self) -> u64 {
        // ORDERING: Relaxed; a figure for people.
        self.held_bytes.load(Ordering::Relaxed)
    }

    fn try_add(&self, bytes: u64, max_bytes: u64) -> bool {
        // ORDERING: Relaxed; a count, nothing is published with it.
        let added = self
            .held_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                held.checked_add(bytes).filter(|sum| *sum <= max_bytes)
            });
        added.is_ok()
    }

    fn give_back(&self, bytes: u64) {
        // ORDERING: Relaxed; as above.
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Limits of a pool and of the whole it belongs to, bytes; `u64::MAX`: none.
#[derive(Clone, Copy, Debug)]
pub struct ByteLimits {
    /// Of the pool itself.
    pub part_bytes: u64,
    /// Of the whole.
    pub whole_bytes: u64,
}

/// Bytes that somebody holds. Dropped, they are given back.
#[derive(Debug, Default)]
pub struct Held {
    pool: Option<Arc<ByteCount>>,
    bytes: u64,
}

impl Held {
    /// Counts up to so many bytes, if there is room; those that are counted already count once. What is counted is never
    /// taken down by this.
    pub fn grow(&mut self, pool: &Arc<ByteCount>, to_bytes: u64, limits: ByteLimits) -> bool {
        let more = to_bytes.saturating_sub(self.bytes);
        if more == 0 {
            return true;
        }
        if !pool.try_add(more, limits.part_bytes) {
            return false;
        }
        if let Some(whole) = &pool.whole
            && !whole.try_add(more, limits.whole_bytes)
        {
            pool.give_back(more);
            return false;
        }
        self.bytes = to_bytes;
        if self.pool.is_none() {
            self.pool = Some(pool.clone());
        }
        true
    }

    /// Gives all of it back.
    pub fn release(&mut self) {
        if let Some(pool) = self.pool.take() {
            let bytes = std::mem::take(&mut self.bytes);
            pool.give_back(bytes);
            if let Some(whole) = &pool.whole {
                whole.give_back(bytes);
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_takes_no_more_than_its_limit_and_gets_everything_back() {
        let whole = Arc::new(ByteCount::default());
        let [a, b] = [0, 1].map(|_| Arc::new(ByteCount::part_of(&whole)));
        let limits = ByteLimits {
            part_bytes: 60,
            whole_bytes: 100,
        };
        let mut first = Held::default();
        assert!(first.grow(&a, 10, limits) && first.grow(&a, 60, limits));
        assert!(first.grow(&a, 5, limits), "it has more already");
        assert!(!first.grow(&a, 61, limits), "the part's limit");
        let mut second = Held::default();
        assert!(!second.grow(&b, 41, limits), "the whole's limit");
        assert!(second.grow(&b, 40, limits));
        assert_eq!((a.bytes(), b.bytes(), whole.bytes()), (60, 40, 100));
        drop(first);
        second.release();
        assert_eq!((a.bytes(), b.bytes(), whole.bytes()), (0, 0, 0));
    }
}
