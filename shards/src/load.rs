//! The books: how many exchanges, and how many prompt bytes, every worker has now. Shared by all cores; opened and closed
//! by the control thread; written otherwise only by [`LoadGuard`]s, on whichever core holds one.
//!
//! Invariants:
//! - B1 every guard is given back exactly once, by `release` or by the last drop, whichever comes first;
//! - B2 no count goes below zero (if it did: it stays, `underflow_count` grows);
//! - B3 the end of an old incarnation's exchange never touches the new one: a slot opens again only at count zero;
//! - B4 two callers never reserve the same seat: `acquire_at` compares and counts in one step;
//! - B5 a drained slot shows zeros: the details are settled before the word is;
//! - B6 count and bytes move from waiting to active at most once, and never after the release.
//!
//! Nothing can fail here but "not open any more", which the caller answers by choosing again.

use std::ops::Deref;

use crate::ids::{SLOT_COUNT_MAX, Slot, WorkerId};
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, CountedArc, Ordering};

/// One slot's word: incarnation (31 bits), open (1 bit), in flight (32 bits). All of its changes are one step, so
/// "open, this incarnation, this count" is always judged together.
#[derive(Clone, Copy)]
struct Word(u64);

impl Word {
    const OPEN: u64 = 1 << 32;
    const INCARNATION_SHIFT: u32 = 33;
    const INCARNATION_MASK: u32 = u32::MAX >> 1;

    #[inline]
    const fn in_flight(self) -> u32 {
        self.0 as u32
    }

    const fn incarnation(self) -> u32 {
        (self.0 >> Self::INCARNATION_SHIFT) as u32
    }

    const fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    const fn is_open_for(self, worker: WorkerId) -> bool {
        self.is_open() && self.incarnation() == worker.incarnation
    }

    const fn opened(incarnation: u32, in_flight: u32) -> Self {
        Self((incarnation as u64) << Self::INCARNATION_SHIFT | Self::OPEN | in_flight as u64)
    }

    /// Same incarnation, one exchange more. Needs room; [`Word::is_full`] tells.
    const fn plus_one(self) -> Self {
        Self(self.0 + 1)
    }

    const fn is_full(self) -> bool {
        self.in_flight() == u32::MAX
    }

    const fn minus_one(self) -> Self {
        Self(self.0 - 1)
    }

    const fn closed(self) -> Self {
        Self(self.0 & !Self::OPEN)
    }
}

/// One slot's details, on a cache line of their own: for gauges and for expected waits.
#[repr(align(64))]
struct Tally {
    waiting: AtomicU32,
    active: AtomicU32,
    active_bytes: AtomicU64,
}

impl Tally {
    fn new() -> Self {
        Self {
            waiting: AtomicU32::new(0),
            active: AtomicU32::new(0),
            active_bytes: AtomicU64::new(0),
        }
    }

    // ORDERING: Relaxed in the two functions below, and in `Books::add_waiting` and `subtract_waiting`: sums, nobody reads
    // other memory because of them. That a sum is seen at zero when the slot is drained is carried by the word
    // (give_back's Release, is_drained's Acquire).

    fn add_active(&self, bytes: u64) {
        self.active.fetch_add(1, Ordering::Relaxed);
        self.active_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract_active(&self, bytes: u64) {
        self.active.fetch_sub(1, Ordering::Relaxed);
        self.active_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// What a slot has now. Each field is exact on its own; together they are a snapshot only when nothing moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Exchanges not finished: waiting and active together.
    pub in_flight: u32,
    /// Exchanges chosen but not begun (plain: nothing has come yet; decode: not dispatched).
    pub waiting: u32,
    /// Exchanges begun.
    pub active: u32,
    /// Prompt bytes of the waiting ones.
    pub waiting_bytes: u64,
    /// Prompt bytes of the active ones.
    pub active_bytes: u64,
}

/// The load of all workers, by slot. `Sync`; reads are wait-free.
pub struct Books {
    /// Eight to a cache line: choosing among 1,024 workers reads 128 lines.
    words: Box<[AtomicU64]>,
    /// Prompt bytes that wait, by slot, as close together: some policies weigh them for every worker.
    waiting_bytes: Box<[AtomicU64]>,
    tallies: Box<[Tally]>,
    underflow_count: AtomicU64,
}

impl Books {
    /// Books with `slot_count_max` closed slots.
    ///
    /// # Panics
    /// If `slot_count_max` is above [`SLOT_COUNT_MAX`].
    #[must_use]
    pub fn new(slot_count_max: usize) -> Self {
        assert!(
            slot_count_max <= SLOT_COUNT_MAX,
            "more slots than {SLOT_COUNT_MAX}"
        );
        Self {
            words: (0..slot_count_max).map(|_| AtomicU64::new(0)).collect(),
            waiting_bytes: (0..slot_count_max).map(|_| AtomicU64::new(0)).collect(),
            tallies: (0..slot_count_max).map(|_| Tally::new()).collect(),
            underflow_count: AtomicU64::new(0),
        }
    }

    #[inline]
    fn word(&self, slot: Slot) -> &AtomicU64 {
        &self.words[slot.index()]
    }

    fn tally(&self, slot: Slot) -> &Tally {
        &self.tallies[slot.index()]
    }

    /// Control thread only. A free slot (closed, nothing in flight) becomes open with the next incarnation.
    /// `None`: not free.
    pub fn open(&self, slot: Slot) -> Option<WorkerId> {
        let free = |word: Word| !word.is_open() && word.in_flight() == 0;
        let next = |word: Word| word.incarnation().wrapping_add(1) & Word::INCARNATION_MASK;
        // ORDERING: Acquire pairs with give_back's Release: the old incarnation's details are settled (B5). Release
        // lets an acquire of the new incarnation inherit that.
        self.word(slot)
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
                let word = Word(word);
                free(word).then(|| Word::opened(next(word), 0).0)
            })
            .ok()
            .map(|was| WorkerId {
                slot,
                incarnation: next(Word(was)),
            })
    }

    /// Control thread only. No guard can be acquired any more; those held go on. `false`: not that incarnation, or
    /// already closed.
    pub fn close(&self, worker: WorkerId) -> bool {
        // ORDERING: Relaxed; the open bit is judged in the same step as the count, no other memory hangs on it.
        self.word(worker.slot)
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                let word = Word(word);
                word.is_open_for(worker).then(|| word.closed().0)
            })
            .is_ok()
    }

    /// Closed and nothing in flight. A slot that meanwhile has another incarnation was drained before that.
    pub fn is_drained(&self, worker: WorkerId) -> bool {
        // ORDERING: Acquire pairs with give_back's Release: who sees it drained sees the details at zero (B5).
        let word = Word(self.word(worker.slot).load(Ordering::Acquire));
        word.incarnation() != worker.incarnation || (!word.is_open() && word.in_flight() == 0)
    }

    /// Exchanges in flight. One relaxed load: what choosing reads.
    #[inline]
    pub fn in_flight(&self, slot: Slot) -> u32 {
        // ORDERING: Relaxed; a number to compare. What is decided on it is checked again by acquire_at's own step.
        Word(self.word(slot).load(Ordering::Relaxed)).in_flight()
    }

    /// Prompt bytes of those in a slot that wait. One relaxed load, as `in_flight`.
    #[inline]
    pub fn waiting_bytes(&self, slot: Slot) -> u64 {
        // ORDERING: Relaxed; a number to compare, exact on its own.
        self.waiting_bytes[slot.index()].load(Ordering::Relaxed)
    }

    fn add_waiting(&self, slot: Slot, bytes: u64) {
        self.tally(slot).waiting.fetch_add(1, Ordering::Relaxed);
        self.waiting_bytes[slot.index()].fetch_add(bytes, Ordering::Relaxed);
    }

    fn subtract_waiting(&self, slot: Slot, bytes: u64) {
        self.tally(slot).waiting.fetch_sub(1, Ordering::Relaxed);
        self.waiting_bytes[slot.index()].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Everything the books know of a slot, for gauges and for expected waits.
    #[inline]
    pub fn load(&self, slot: Slot) -> Load {
        let tally = self.tally(slot);
        // ORDERING: Acquire as in is_drained, so that the gauges of a drained slot read zero.
        let in_flight = Word(self.word(slot).load(Ordering::Acquire)).in_flight();
        // ORDERING: Relaxed; numbers to show, each exact on its own.
        Load {
            in_flight,
            waiting: tally.waiting.load(Ordering::Relaxed),
            active: tally.active.load(Ordering::Relaxed),
            waiting_bytes: self.waiting_bytes(slot),
            active_bytes: tally.active_bytes.load(Ordering::Relaxed),
        }
    }

    /// How often a count would have gone below zero. Must be 0 for ever (B2).
    pub fn underflow_count(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.underflow_count.load(Ordering::Relaxed)
    }

    /// Administrative reset, for a worker with nothing in flight; `Err(in flight)` refuses otherwise. It writes
    /// nothing: with nothing in flight the books are zero already (B5), and with something in flight they are right.
    pub fn reset(&self, worker: WorkerId) -> Result<(), u32> {
        // ORDERING: Acquire as in is_drained.
        let word = Word(self.word(worker.slot).load(Ordering::Acquire));
        match word.in_flight() {
            0 => Ok(()),
            _ if word.incarnation() != worker.incarnation => Ok(()),
            in_flight => Err(in_flight),
        }
    }

    fn count_in(&self, worker: WorkerId, prompt_bytes: u64, below: u32) -> bool {
        // ORDERING: Acquire pairs with open's Release: details of the old incarnation are settled before ours begin.
        let counted = self
            .word(worker.slot)
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |word| {
                let word = Word(word);
                (word.is_open_for(worker) && word.in_flight() < below).then(|| word.plus_one().0)
            })
            .is_ok();
        if counted {
            self.add_waiting(worker.slot, prompt_bytes);
        }
        counted
    }

    fn count_in_at(
        &self,
        worker: WorkerId,
        prompt_bytes: u64,
        seen: u32,
    ) -> Result<(), Option<u32>> {
        let expected = Word::opened(worker.incarnation, seen);
        if expected.is_full() {
            return Err(None);
        }
        // ORDERING: Acquire as in count_in. On failure Relaxed: a number to choose with, checked again next time.
        match self.word(worker.slot).compare_exchange(
            expected.0,
            expected.plus_one().0,
            Ordering::Acquire,
            Ordering::Relaxed,
        ) {
            Ok(_) => {
                self.add_waiting(worker.slot, prompt_bytes);
                Ok(())
            }
            Err(word) if Word(word).is_open_for(worker) => Err(Some(Word(word).in_flight())),
            Err(_) => Err(None),
        }
    }

    fn move_to_active(&self, worker: WorkerId, prompt_bytes: u64) {
        let tally = self.tally(worker.slot);
        tally.add_active(prompt_bytes);
        self.subtract_waiting(worker.slot, prompt_bytes);
    }

    /// Details first, then the word: who sees the count at zero sees the details at zero (B5).
    fn give_back(&self, worker: WorkerId, prompt_bytes: u64, was_active: bool) {
        if was_active {
            self.tally(worker.slot).subtract_active(prompt_bytes);
        } else {
            self.subtract_waiting(worker.slot, prompt_bytes);
        }
        // ORDERING: Release pairs with the Acquire of open, is_drained and load; later steps on the word continue the
        // release sequence, so the last count to go carries everybody's details.
        let given =
            self.word(worker.slot)
                .fetch_update(Ordering::Release, Ordering::Relaxed, |word| {
                    let word = Word(word);
                    let ours = word.incarnation() == worker.incarnation && word.in_flight() > 0;
                    ours.then(|| word.minus_one().0)
                });
        if given.is_err() {
            // ORDERING: Relaxed; a number to show.
            self.underflow_count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Phases of a claim. `MOVING`: `activate` is between its two steps; a release that meets it leaves the giving back to it.
const WAITING: u8 = 0;
const MOVING: u8 = 1;
const ACTIVE: u8 = 2;
const RELEASED: u8 = 3;

/// One count in the books, shared by the guards that own it.
struct Claim<R: Deref<Target = Books>> {
    books: R,
    worker: WorkerId,
    prompt_bytes: u64,
    phase: AtomicU8,
}

impl<R: Deref<Target = Books>> Claim<R> {
    fn give_back(&self, was_active: bool) {
        self.books
            .give_back(self.worker, self.prompt_bytes, was_active);
    }

    fn activate(&self) {
        // ORDERING: Relaxed; it only takes the right to move (B6), nothing was written before it.
        let taken =
            self.phase
                .compare_exchange(WAITING, MOVING, Ordering::Relaxed, Ordering::Relaxed);
        if taken.is_err() {
            return;
        }
        self.books.move_to_active(self.worker, self.prompt_bytes);
        // ORDERING: Release pairs with release's Acquire: the move comes before the releaser's subtraction.
        let moved =
            self.phase
                .compare_exchange(MOVING, ACTIVE, Ordering::Release, Ordering::Acquire);
        if moved.is_err() {
            // Released while we moved: the releaser saw MOVING and left the count to us (B1).
            self.give_back(true);
        }
    }

    fn release(&self) {
        // ORDERING: AcqRel; Acquire pairs with activate's Release. One swap decides who gives back (B1).
        match self.phase.swap(RELEASED, Ordering::AcqRel) {
            WAITING => self.give_back(false),
            ACTIVE => self.give_back(true),
            _ => {}
        }
    }
}

impl<R: Deref<Target = Books>> Drop for Claim<R> {
    fn drop(&mut self) {
        // ORDERING: Relaxed; the last owner is alone, the Arc's own ordering brought every other owner's steps here.
        // MOVING cannot be: whoever moves holds a guard.
        match self.phase.load(Ordering::Relaxed) {
            WAITING => self.give_back(false),
            ACTIVE => self.give_back(true),
            _ => {}
        }
    }
}

/// Owns one count in the books, from the choice of a worker to the end of the exchange. Dropping the last owner gives
/// the count back, on every way out. `R` is how the guard reaches the books: `&'static Books` in the router, an `Arc` in
/// tests and models. One owner needs no allocation; the first [`LoadGuard::share`] makes one.
pub struct LoadGuard<R: Deref<Target = Books> = &'static Books> {
    hold: Hold<R>,
}

enum Hold<R: Deref<Target = Books>> {
    Alone(Claim<R>),
    Shared(CountedArc<Claim<R>>),
    /// Between the two.
    Moving,
}

impl<R: Deref<Target = Books> + Clone> LoadGuard<R> {
    /// Counts one exchange of `prompt_bytes` as waiting. `None`: closed, or another incarnation.
    pub fn acquire(books: R, worker: WorkerId, prompt_bytes: u64) -> Option<Self> {
        Self::acquire_below(books, worker, prompt_bytes, u32::MAX)
    }

    /// The same, and only while fewer than `below` are in flight, in one step.
    pub fn acquire_below(
        books: R,
        worker: WorkerId,
        prompt_bytes: u64,
        below: u32,
    ) -> Option<Self> {
        books
            .count_in(worker, prompt_bytes, below)
            .then(|| Self::own(books, worker, prompt_bytes))
    }

    /// Choice and reservation in one step: counts only if `in_flight` is still `seen`. `Err(Some(actual))` when it is
    /// not, `Err(None)` when closed or another incarnation.
    pub fn acquire_at(
        books: R,
        worker: WorkerId,
        prompt_bytes: u64,
        seen: u32,
    ) -> Result<Self, Option<u32>> {
        books.count_in_at(worker, prompt_bytes, seen)?;
        Ok(Self::own(books, worker, prompt_bytes))
    }

    fn own(books: R, worker: WorkerId, prompt_bytes: u64) -> Self {
        let phase = AtomicU8::new(WAITING);
        Self {
            hold: Hold::Alone(Claim {
                books,
                worker,
                prompt_bytes,
                phase,
            }),
        }
    }

    fn claim(&self) -> &Claim<R> {
        match &self.hold {
            Hold::Alone(claim) => claim,
            Hold::Shared(claim) => claim,
            Hold::Moving => unreachable!("`share` leaves it shared"),
        }
    }

    /// Whose load this counts.
    pub fn worker(&self) -> WorkerId {
        self.claim().worker
    }

    /// Waiting becomes active (the answer has begun; dispatch). Any owner may say so, once or often; after a release it is nothing.
    pub fn activate(&self) {
        self.claim().activate();
    }

    /// A second owner of the same count.
    #[must_use]
    pub fn share(&mut self) -> Self {
        let claim = match std::mem::replace(&mut self.hold, Hold::Moving) {
            Hold::Alone(claim) => CountedArc::new(claim),
            Hold::Shared(claim) => claim,
            Hold::Moving => unreachable!("`share` leaves it shared"),
        };
        let other = Hold::Shared(CountedArc::clone(&claim));
        self.hold = Hold::Shared(claim);
        Self { hold: other }
    }

    /// Ends the count now, for all owners; exactly once, however many say so.
    pub fn release(self) {
        self.claim().release();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::testing::Random;
    use std::sync::Arc;

    const SLOT: Slot = Slot(3);

    fn open_books() -> (Arc<Books>, WorkerId) {
        let books = Arc::new(Books::new(8));
        let worker = books.open(SLOT).unwrap();
        (books, worker)
    }

    fn acquire(books: &Arc<Books>, worker: WorkerId, bytes: u64) -> LoadGuard<Arc<Books>> {
        LoadGuard::acquire(Arc::clone(books), worker, bytes).unwrap()
    }

    #[test]
    fn a_count_goes_from_waiting_to_active_to_nothing() {
        let (books, worker) = open_books();
        let mut guard = acquire(&books, worker, 100);
        let waiting = Load {
            in_flight: 1,
            waiting: 1,
            waiting_bytes: 100,
            ..Load::default()
        };
        assert_eq!(books.load(SLOT), waiting);
        guard.activate();
        guard.activate();
        let active = Load {
            in_flight: 1,
            active: 1,
            active_bytes: 100,
            ..Load::default()
        };
        assert_eq!(books.load(SLOT), active);
        let mut stream = guard.share();
        drop(guard);
        assert_eq!(books.load(SLOT), active, "the second owner keeps the count");
        let mut late = stream.share();
        stream.release();
        assert_eq!(
            books.load(SLOT),
            Load::default(),
            "release ends it for all owners"
        );
        late.activate();
        late.share().release();
        drop(late);
        assert_eq!(books.load(SLOT), Load::default());
        assert_eq!(books.underflow_count(), 0);
    }

    #[test]
    fn a_panic_gives_the_count_back() {
        let (books, worker) = open_books();
        let guard = acquire(&books, worker, 1);
        let thread = std::thread::spawn(move || {
            guard.activate();
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        assert!(thread.join().is_err());
        assert_eq!(books.load(SLOT), Load::default());
    }

    #[test]
    fn a_seat_is_given_only_at_the_number_seen() {
        let (books, worker) = open_books();
        let at = |seen| LoadGuard::acquire_at(Arc::clone(&books), worker, 1, seen);
        let first = at(0).unwrap();
        assert_eq!(at(0).err(), Some(Some(1)));
        assert_eq!(at(2).err(), Some(Some(1)));
        let second = at(1).unwrap();
        assert_eq!(books.in_flight(SLOT), 2);
        books.close(worker);
        assert_eq!(at(2).err(), Some(None));
        drop((first, second));
        assert_eq!(at(u32::MAX).err(), Some(None));
        assert!(books.is_drained(worker));
    }

    #[test]
    fn an_old_incarnation_keeps_its_slot_until_it_has_ended() {
        let (books, old) = open_books();
        let guard = acquire(&books, old, 5);
        assert!(books.open(SLOT).is_none(), "open already");
        assert!(books.close(old) && !books.close(old));
        assert!(books.open(SLOT).is_none(), "in flight");
        assert_eq!(books.reset(old), Err(1));
        assert!(!books.is_drained(old));
        assert!(LoadGuard::acquire(Arc::clone(&books), old, 5).is_none());
        drop(guard);
        assert!(books.is_drained(old));
        assert_eq!(books.reset(old), Ok(()));
        let new = books.open(SLOT).unwrap();
        assert_eq!((new.slot, new.incarnation), (SLOT, old.incarnation + 1));
        assert!(books.is_drained(old) && !books.is_drained(new));
        assert!(!books.close(old), "an old name closes nothing");
        assert!(LoadGuard::acquire(Arc::clone(&books), old, 5).is_none());
        assert_eq!(acquire(&books, new, 5).worker(), new);
    }

    #[test]
    fn an_underflow_is_counted_and_changes_nothing() {
        let (books, worker) = open_books();
        books.add_waiting(SLOT, 0);
        books.give_back(worker, 0, false);
        assert_eq!(
            (books.underflow_count(), books.load(SLOT)),
            (1, Load::default())
        );
    }

    /// Random guards against a naive twin (a list of what is held).
    #[test]
    fn equals_the_twin() {
        for seed in 1..20 {
            let mut random = Random::new(seed);
            let (books, worker) = open_books();
            let mut held: Vec<(LoadGuard<Arc<Books>>, u64, bool)> = Vec::new();
            for _ in 0..500 {
                let place = random.below(held.len().max(1));
                match random.below(4) {
                    0 | 1 => {
                        let bytes = random.next() >> 40;
                        held.push((acquire(&books, worker, bytes), bytes, false));
                    }
                    2 if !held.is_empty() => {
                        held[place].0.activate();
                        held[place].2 = true;
                    }
                    3 if !held.is_empty() => drop(held.swap_remove(place)),
                    _ => {}
                }
                let sum = |active| -> (u32, u64) {
                    let of = held.iter().filter(|(_, _, is_active)| *is_active == active);
                    (
                        of.clone().count() as u32,
                        of.map(|(_, bytes, _)| bytes).sum(),
                    )
                };
                let load = books.load(SLOT);
                assert_eq!((load.waiting, load.waiting_bytes), sum(false));
                assert_eq!((load.active, load.active_bytes), sum(true));
                assert_eq!(load.in_flight as usize, held.len());
            }
        }
    }

    /// Four threads on one slot, with releases, shares and drops mixed: zero at the end.
    #[test]
    fn threads_leave_zero() {
        let (books, worker) = open_books();
        std::thread::scope(|scope| {
            for seed in 1..=4 {
                let books = Arc::clone(&books);
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    for _ in 0..20_000 {
                        let mut guard = acquire(&books, worker, random.next() >> 50);
                        let other = guard.share();
                        (random.below(2) == 0).then(|| other.activate());
                        let [first, last] = if random.below(2) == 0 {
                            [guard, other]
                        } else {
                            [other, guard]
                        };
                        if random.below(2) == 0 {
                            first.release()
                        } else {
                            drop(first)
                        }
                        drop(last);
                    }
                });
            }
        });
        assert_eq!(
            (books.load(SLOT), books.underflow_count()),
            (Load::default(), 0)
        );
    }
}
