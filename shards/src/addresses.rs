//! Connections by address, all cores together, in a table of fixed size. Written by any core.
//!
//! An address has a cell in each of two rows, by two hashes; both count its connections, and those of whoever shares the
//! cell. The lesser of the two is its count, or more. Invariants:
//! - A1 no address has more than the limit. Each counts itself in both cells, fence, looks, and is let in if a cell holds
//!   no more than the limit. Of those that are in, the one whose fence was last saw all others in both cells; a look at
//!   what the counting itself returned would not do: of two at once each may be first in one row.
//! - A2 who leaves takes away what was counted for it, once.
//!
//! An address is refused too early only if others share both of its cells: of 10,000 addresses, about one in fifty has such
//! company. Hashes are seeded, so that nobody can choose whose cells to fill.

use crate::sync::{AtomicU32, Ordering, fence};

#[cfg(not(loom))]
const CELLS_PER_ROW: usize = 1 << 16;
#[cfg(loom)]
const CELLS_PER_ROW: usize = 4;

/// The table. `Sync`.
#[derive(Debug)]
pub struct Addresses {
    rows: [Box<[AtomicU32]>; 2],
}

/// One counted connection: where it counts. To be given back to [`Addresses::leave`].
#[derive(Debug)]
#[must_use]
pub struct Counted([u16; 2]);

impl Addresses {
    /// With nobody in it: 512 KiB.
    #[must_use]
    pub fn new() -> Addresses {
        let row = || (0..CELLS_PER_ROW).map(|_| AtomicU32::new(0)).collect();
        Addresses {
            rows: [row(), row()],
        }
    }

    fn cells(&self, place: &Counted) -> [&AtomicU32; 2] {
        [0, 1].map(|row| &self.rows[row][usize::from(place.0[row])])
    }

    /// Counts a connection of the address with this hash. `None`: it has `limit` already.
    pub fn enter(&self, hash: u64, limit: u32) -> Option<Counted> {
        let place = Counted([hash as u16, (hash >> 32) as u16]);
        for cell in self.cells(&place) {
            // ORDERING: Relaxed; each cell is its own sum, the fence orders the sums before the look.
            cell.fetch_add(1, Ordering::Relaxed);
        }
        // ORDERING: SeqCst fence, its partner is itself on another core (A1).
        fence(Ordering::SeqCst);
        // ORDERING: Relaxed; as above.
        let counts = self.cells(&place).map(|cell| cell.load(Ordering::Relaxed));
        if counts.iter().any(|count| *count <= limit) {
            return Some(place);
        }
        self.leave(place);
        None
    }

    /// It is closed.
    pub fn leave(&self, place: Counted) {
        for cell in self.cells(&place) {
            // ORDERING: Relaxed; as above.
            cell.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Default for Addresses {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn an_address_has_so_many_and_another_one_is_not_concerned() {
        let addresses = Addresses::new();
        let mut places: Vec<Counted> = (0..3).map(|_| addresses.enter(7, 3).unwrap()).collect();
        assert!(addresses.enter(7, 3).is_none());
        // It shares one of its cells.
        assert!(addresses.enter(7 | 9 << 32, 3).is_some());
        addresses.leave(places.pop().unwrap());
        assert!(addresses.enter(7, 3).is_some());
        assert!(addresses.enter(7, 3).is_none());
    }

    #[test]
    fn threads_never_have_more_than_the_limit() {
        const LIMIT: u32 = 5;
        let addresses = Arc::new(Addresses::new());
        let now = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (addresses, now) = (addresses.clone(), now.clone());
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        if let Some(place) = addresses.enter(42, LIMIT) {
                            assert!(now.fetch_add(1, Ordering::SeqCst) < LIMIT);
                            now.fetch_sub(1, Ordering::SeqCst);
                            addresses.leave(place);
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        for _ in 0..LIMIT {
            let _ = addresses.enter(42, LIMIT).expect("all have left");
        }
    }
}
