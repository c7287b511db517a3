//! Reclamation: memory that readers may still look at is retired into a [`Bin`] and freed when no pin can see it. Every
//! core has one [`Reader`] and pins it once per loop turn; every writer owns its bins and reclaims on its own core.
//!
//! Invariants:
//! - E1 what was reachable when a pin began, or is reached under it, is not freed before the pin ends;
//! - E2 an unpinned reader holds nothing up; a pinned one holds up only what was retired after its pin began.
//!
//! The argument. A writer unlinks a value (stores another pointer), then tags it: `tag = global++` (Release), then
//! `fence(SeqCst)` W, then reads all seats (Acquire), and frees values with `tag <` the smallest pinned epoch.
//! A reader loads `global` as `p`, stores its seat `= p` (Release), then `fence(SeqCst)` R, then follows pointers.
//! Take one value and one pin.
//! - R before W: the scan sees the seat as `p`, or as something the same reader stored later. If it sees `p <= tag` the
//!   value stays. If `p > tag`, the reader's load of `global` read the tagging increment or a later one (all are
//!   read-modify-writes, one release sequence; R makes the load an acquire), so the unlinking happens before the reader's
//!   look-ups, which cannot reach the value.
//!   If it sees a later store (0, or a later pin's epoch), that store was Release and the scan Acquire: all that the
//!   reader did under the pin happens before the free.
//! - W before R: the unlinking store is before W, the reader's loads are after R: they see the unlinking. Not reachable.
//!
//! So a stale `p` is harmless (it only holds more up) and `pin` needs no second look at `global`.
//! Values are tagged at `reclaim`, one increment per batch: a later tag is only more careful.
//!
//! Dropping a bin frees what it may and leaks the rest; that happens at shutdown, with some core still pinned.

use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;

use crate::sync::{Arc, AtomicBool, AtomicU64, CachePadded, Ordering, fence};

/// The seat of a reader that is not pinned.
const UNPINNED: u64 = 0;

/// Readers and writers that share one notion of time. One per router. `Sync`.
pub struct Domain {
    /// Starts at 1; grows by one per batch of retired values. 2^64 batches do not happen.
    global: CachePadded<AtomicU64>,
    seats: Box<[CachePadded<Seat>]>,
}

struct Seat {
    /// The epoch pinned, or [`UNPINNED`].
    epoch: AtomicU64,
    taken: AtomicBool,
}

impl Domain {
    /// A domain with seats for `reader_count` readers.
    #[must_use]
    pub fn new(reader_count: usize) -> Self {
        let seat = |_| {
            CachePadded::new(Seat {
                epoch: AtomicU64::new(UNPINNED),
                taken: AtomicBool::new(false),
            })
        };
        Self {
            global: CachePadded::new(AtomicU64::new(1)),
            seats: (0..reader_count).map(seat).collect(),
        }
    }

    /// The reader with seat `index`; dropping it frees the seat.
    ///
    /// # Panics
    /// If the seat is taken, or `index` is not below the reader count.
    #[must_use]
    pub fn reader(self: &Arc<Self>, index: usize) -> Reader {
        // ORDERING: Acquire pairs with the Release in Reader's Drop: the seat's last user is done with it.
        let taken = self.seats[index].taken.swap(true, Ordering::Acquire);
        assert!(!taken, "reader {index} is taken twice");
        Reader {
            domain: Arc::clone(self),
            index,
            not_sync: PhantomData,
        }
    }

    /// Below this every tag is free: the smallest epoch pinned, or no limit.
    fn pinned_min(&self) -> u64 {
        // ORDERING: fence W of the argument above; its partner is fence R in `pin`.
        fence(Ordering::SeqCst);
        let pinned = self.seats.iter().map(|seat| {
            // ORDERING: Acquire pairs with the Release of pin and unpin: the reader's look-ups are over before we free.
            seat.epoch.load(Ordering::Acquire)
        });
        pinned
            .filter(|&epoch| epoch != UNPINNED)
            .min()
            .unwrap_or(u64::MAX)
    }

    /// The tag of everything unlinked so far by the caller.
    fn tag(&self) -> u64 {
        // ORDERING: Release pairs with the load and fence in `pin`: a pin above the tag has seen the unlinking.
        self.global.fetch_add(1, Ordering::Release)
    }
}

/// One core's right to pin. `Send`, not `Sync`.
pub struct Reader {
    domain: Arc<Domain>,
    index: usize,
    not_sync: PhantomData<Cell<()>>,
}

impl Reader {
    /// Begins a pin, at the cost of one full fence. Meant for once per loop turn, not per look-up.
    #[must_use]
    pub fn pin(&mut self) -> Pin<'_> {
        let seat = &*self.domain.seats[self.index];
        // ORDERING: Relaxed; fence R below is an acquire fence, too, and with this load pairs with the Release in `tag`.
        let epoch = self.domain.global.load(Ordering::Relaxed);
        // ORDERING: Release pairs with pinned_min's Acquire: carries the end of this reader's earlier pins.
        seat.epoch.store(epoch, Ordering::Release);
        // ORDERING: fence R of the argument above; its partner is fence W in `pinned_min`.
        fence(Ordering::SeqCst);
        Pin {
            domain: &self.domain,
            seat,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let seat = &self.domain.seats[self.index];
        // ORDERING: Release as in Pin's Drop; it matters when a pin was forgotten.
        seat.epoch.store(UNPINNED, Ordering::Release);
        // ORDERING: Release pairs with the Acquire in `reader`.
        seat.taken.store(false, Ordering::Release);
    }
}

/// While it lives nothing is freed that was retired after it began. Dropping it unpins.
pub struct Pin<'r> {
    domain: &'r Domain,
    seat: &'r Seat,
}

impl Pin<'_> {
    /// Whether this pin protects what `domain` reclaims. Look-ups assert it: a pin of another domain protects nothing.
    pub(crate) fn is_of(&self, domain: &Arc<Domain>) -> bool {
        std::ptr::eq(self.domain, Arc::as_ptr(domain))
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // ORDERING: Release pairs with pinned_min's Acquire: look-ups under this pin come before the free.
        self.seat.epoch.store(UNPINNED, Ordering::Release);
    }
}

/// Unlinked values that wait until no pin can see them. Owned by the one writer that unlinked them.
pub struct Bin<T> {
    domain: Arc<Domain>,
    /// Oldest first. The last `fresh_count` have no tag yet.
    retired: VecDeque<(u64, T)>,
    fresh_count: usize,
}

impl<T> Bin<T> {
    /// An empty bin.
    #[must_use]
    pub fn new(domain: Arc<Domain>) -> Self {
        Self {
            domain,
            retired: VecDeque::new(),
            fresh_count: 0,
        }
    }

    /// Takes a value that the caller has unlinked; it is dropped by a later [`Bin::reclaim`].
    pub fn retire(&mut self, value: T) {
        self.retired.push_back((u64::MAX, value));
        self.fresh_count += 1;
    }

    /// Drops what no pin can see, and says how many. May be called by a core that is pinned itself: it keeps what is young.
    pub fn reclaim(&mut self) -> usize {
        self.reclaim_up_to(usize::MAX)
    }

    /// [`Bin::reclaim`] in slices of at most `count_max` values.
    pub(crate) fn reclaim_up_to(&mut self, count_max: usize) -> usize {
        if self.retired.is_empty() {
            return 0;
        }
        self.tag_fresh();
        let free_below = self.domain.pinned_min();
        let mut count = 0;
        while count < count_max
            && self
                .retired
                .front()
                .is_some_and(|(tag, _)| *tag < free_below)
        {
            self.retired.pop_front();
            count += 1;
        }
        count
    }

    fn tag_fresh(&mut self) {
        if self.fresh_count == 0 {
            return;
        }
        let tag = self.domain.tag();
        let tagged_count = self.retired.len() - self.fresh_count;
        self.retired
            .range_mut(tagged_count..)
            .for_each(|(t, _)| *t = tag);
        self.fresh_count = 0;
    }

    /// How many values wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.retired.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.retired.is_empty()
    }
}

impl<T> Drop for Bin<T> {
    fn drop(&mut self) {
        self.reclaim();
        // Some pin may still see these: a leak at shutdown is the safe end.
        self.retired.drain(..).for_each(std::mem::forget);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::rc::Rc;

    /// A value whose end can be seen.
    fn retired_values(bin: &mut Bin<Rc<()>>, count: usize) -> Vec<std::rc::Weak<()>> {
        let values: Vec<Rc<()>> = (0..count).map(|_| Rc::new(())).collect();
        let seen = values.iter().map(Rc::downgrade).collect();
        values.into_iter().for_each(|value| bin.retire(value));
        seen
    }

    fn alive_count(seen: &[std::rc::Weak<()>]) -> usize {
        seen.iter().filter(|value| value.strong_count() > 0).count()
    }

    #[test]
    fn unpinned_readers_hold_nothing_up() {
        let domain = Arc::new(Domain::new(2));
        let _readers = [domain.reader(0), domain.reader(1)];
        let mut bin = Bin::new(domain);
        let seen = retired_values(&mut bin, 3);
        assert_eq!((bin.len(), alive_count(&seen)), (3, 3));
        assert_eq!(bin.reclaim_up_to(2), 2);
        assert_eq!(
            (bin.reclaim(), bin.is_empty(), alive_count(&seen)),
            (1, true, 0)
        );
    }

    #[test]
    fn a_pin_holds_up_what_is_retired_after_it_began() {
        let domain = Arc::new(Domain::new(2));
        let mut reader = domain.reader(0);
        let mut bin = Bin::new(domain);
        let before = retired_values(&mut bin, 2);
        // Tagged before the pin.
        assert_eq!(bin.reclaim_up_to(0), 0);
        let pin = reader.pin();
        let after = retired_values(&mut bin, 2);
        assert_eq!(bin.reclaim(), 2);
        assert_eq!((alive_count(&before), alive_count(&after)), (0, 2));
        assert_eq!(bin.reclaim(), 0);
        drop(pin);
        assert_eq!((bin.reclaim(), alive_count(&after)), (2, 0));
    }

    #[test]
    fn a_dropped_bin_leaks_what_a_pin_sees() {
        let domain = Arc::new(Domain::new(1));
        let mut reader = domain.reader(0);
        let pin = reader.pin();
        let mut bin = Bin::new(Arc::clone(&domain));
        let seen = retired_values(&mut bin, 1);
        drop(bin);
        assert_eq!(alive_count(&seen), 1);
        drop(pin);
    }

    #[test]
    fn a_seat_is_free_again_after_its_reader() {
        let domain = Arc::new(Domain::new(1));
        std::mem::forget(domain.reader(0).pin());
        let mut bin = Bin::new(Arc::clone(&domain));
        bin.retire(());
        assert_eq!(bin.reclaim(), 1, "a forgotten pin ends with its reader");
        drop(domain.reader(0));
    }

    #[test]
    #[should_panic(expected = "reader 0 is taken twice")]
    fn a_seat_is_taken_once() {
        let domain = Arc::new(Domain::new(1));
        let _first = domain.reader(0);
        let _second = domain.reader(0);
    }
}
