//! Which worker each session is bound to: a bounded table that every core reads and writes, without a lock.
//!
//! One session is one word: used (1 bit), tag (26), slot (13), second of last use (24). A session may stand in any of the
//! [`WAYS`] words of its bucket; bucket and tag are different bits of its key, so that two sessions are taken for one
//! (they then share a worker, no more) about once in eight million look-ups. Nothing is ever moved or resized.
//!
//! Invariants:
//! - N1 a word changes in one step, so a session is bound to one worker or to none, never to parts of two;
//! - N2 two cores that bind one session at a time agree, unless a word of its bucket becomes free between their two looks:
//!   then the first request of one of them may stray, and all later ones agree;
//! - N3 when nothing moves, `count` is the number of a slot's words; while something does it is never too low.
//!
//! A full bucket gives up the session that was not used for longest. No clock here: seconds come from the caller, and
//! all callers count them from the same start.

use crate::ids::{SLOT_COUNT_MAX, Slot};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Words of a bucket: one cache line.
#[cfg(not(loom))]
const WAYS: usize = 8;
#[cfg(loom)]
const WAYS: usize = 2;

const USED: u64 = 1 << 63;
const TAG_SHIFT: u32 = 37;
const TAG_MASK: u64 = (1 << 26) - 1;
const SLOT_SHIFT: u32 = 24;
const SLOT_MASK: u64 = SLOT_COUNT_MAX as u64 - 1;
const SECONDS_MASK: u64 = (1 << SLOT_SHIFT) - 1;
/// Buckets are told apart by the key's low bits, tags by its high ones.
const BUCKET_COUNT_MAX: usize = 1 << 32;

/// One session. Zero: free.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    const FREE: Word = Word(0);

    fn new(key: u64, slot: Slot, now_secs: u32) -> Word {
        let tag = key >> (u64::BITS - 26);
        let slot = slot.0 as u64 & SLOT_MASK;
        Word(USED | tag << TAG_SHIFT | slot << SLOT_SHIFT | u64::from(now_secs) & SECONDS_MASK)
    }

    const fn is_used(self) -> bool {
        self.0 & USED != 0
    }

    const fn slot(self) -> Slot {
        Slot((self.0 >> SLOT_SHIFT & SLOT_MASK) as u16)
    }

    fn is_of(self, key: u64) -> bool {
        self.is_used() && self.0 >> TAG_SHIFT & TAG_MASK == key >> (u64::BITS - 26)
    }

    /// Seconds since the last use. The counter runs over after 194 days; what lies "ahead" was written by a core whose
    /// second began a moment earlier.
    const fn age_secs(self, now_secs: u32) -> u32 {
        let age = (now_secs as u64).wrapping_sub(self.0) & SECONDS_MASK;
        if age > SECONDS_MASK / 2 {
            0
        } else {
            age as u32
        }
    }

    const fn lives(self, now: Now) -> bool {
        self.is_used() && self.age_secs(now.secs) <= now.ttl_secs
    }
}

/// The time of a call, and how long a session lives without use.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Seconds since a start that all callers share.
    pub secs: u32,
    /// Idle seconds after which a session is over; below 2^23 (97 days).
    pub ttl_secs: u32,
}

/// The table. `Sync`; no operation waits, each looks at one bucket, but for `forget` and `sweep`.
pub struct Sessions {
    words: Box<[AtomicU64]>,
    counts: Box<[AtomicU32]>,
}

impl Sessions {
    /// Room for `session_count_max` sessions, rounded up to a power of two. 8 bytes each.
    #[must_use]
    pub fn new(session_count_max: usize) -> Self {
        let buckets = session_count_max.div_ceil(WAYS).next_power_of_two();
        let buckets = buckets.min(BUCKET_COUNT_MAX);
        #[cfg(not(loom))]
        let slot_count = SLOT_COUNT_MAX;
        #[cfg(loom)]
        let slot_count = 4;
        Self {
            words: (0..buckets * WAYS).map(|_| AtomicU64::new(0)).collect(),
            counts: (0..slot_count).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// The worker a session is bound to; the session counts as used now.
    pub fn find(&self, key: u64, now: Now) -> Option<Slot> {
        let words = self.bucket(key);
        let (place, word) = own(words, key, now)?;
        // A word that is written at each use would travel between the cores of a busy session.
        if word.age_secs(now.secs) > now.ttl_secs / 64 {
            let used = Word::new(key, word.slot(), now.secs);
            let _ = swap(&words[place], word, used);
        }
        Some(word.slot())
    }

    /// Binds a session to a worker, unless it is bound already to another one than `instead_of`. Gives the worker it is
    /// bound to now.
    pub fn bind(&self, key: u64, slot: Slot, instead_of: Option<Slot>, now: Now) -> Slot {
        let words = self.bucket(key);
        self.add(slot);
        let place = loop {
            let (place, old, is_own) = own_or_free(words, key, now);
            if is_own && Some(old.slot()) != instead_of {
                self.subtract(slot);
                return old.slot();
            }
            if swap(&words[place], old, Word::new(key, slot, now.secs)) {
                self.settle(old);
                break place;
            }
        };
        // ORDERING: the write above comes before the look below, on this core as on the other that binds the same session:
        // at least one of the two sees both words (N2).
        fence(Ordering::SeqCst);
        self.agree(words, key, place, now).unwrap_or(slot)
    }

    /// The session is over. False: it was not known.
    pub fn end(&self, key: u64) -> bool {
        let mut was_known = false;
        for place in self.bucket(key) {
            was_known |= self.clear(place, |word| word.is_of(key));
        }
        was_known
    }

    /// Ends all sessions of a worker. Reads the whole table.
    pub fn forget(&self, slot: Slot) {
        for place in &self.words {
            self.clear(place, |word| word.is_used() && word.slot() == slot);
        }
    }

    /// Ends what is too old in the `part`-th of `parts` parts of the table.
    pub fn sweep(&self, part: usize, parts: usize, now: Now) {
        let size = self.words.len().div_ceil(parts.max(1)).max(1);
        let places = self.words.chunks(size).nth(part % parts.max(1));
        for place in places.unwrap_or_default() {
            self.clear(place, |word| word.is_used() && !word.lives(now));
        }
    }

    /// Sessions bound to a worker; those that are too old count until they are swept.
    #[inline]
    pub fn count(&self, slot: Slot) -> u32 {
        // ORDERING: Relaxed; a number to choose by, it publishes nothing.
        self.counts[slot.index()].load(Ordering::Relaxed)
    }

    /// Sessions bound to any worker.
    pub fn total(&self) -> u64 {
        let counts = self.counts.iter();
        // ORDERING: Relaxed; a gauge.
        counts
            .map(|count| u64::from(count.load(Ordering::Relaxed)))
            .sum()
    }

    fn bucket(&self, key: u64) -> &[AtomicU64] {
        let bucket = key as usize & (self.words.len() / WAYS - 1);
        &self.words[bucket * WAYS..][..WAYS]
    }

    /// Of two words of one session the first counts; the other goes. Gives the worker of the first if that is not at
    /// `place`.
    fn agree(&self, words: &[AtomicU64], key: u64, place: usize, now: Now) -> Option<Slot> {
        let (first, word) = own(words, key, now)?;
        for other in &words[first + 1..] {
            self.clear(other, |other| other.is_of(key));
        }
        (first != place).then(|| word.slot())
    }

    /// Frees a word, as long as it is meant.
    fn clear(&self, place: &AtomicU64, is_meant: impl Fn(Word) -> bool) -> bool {
        loop {
            let word = read(place);
            if !is_meant(word) {
                return false;
            }
            if swap(place, word, Word::FREE) {
                self.settle(word);
                return true;
            }
        }
    }

    // ORDERING: Relaxed in both; numbers to choose by. Added before the word is written and subtracted after it is gone,
    // by the one that changed it: never too low, never below zero (N3).

    fn add(&self, slot: Slot) {
        self.counts[slot.index()].fetch_add(1, Ordering::Relaxed);
    }

    fn subtract(&self, slot: Slot) {
        self.counts[slot.index()].fetch_sub(1, Ordering::Relaxed);
    }

    /// A word was replaced.
    fn settle(&self, old: Word) {
        if old.is_used() {
            self.subtract(old.slot());
        }
    }
}

/// The living word of a session.
fn own(words: &[AtomicU64], key: u64, now: Now) -> Option<(usize, Word)> {
    let mut all = words.iter().map(read).enumerate();
    all.find(|(_, word)| word.is_of(key) && word.lives(now))
}

/// Where a session stands, or where it goes: the first word that is free or too old, else the one not used for longest.
/// Each word is read once: one that appeared since an earlier look must not be taken for an old one.
fn own_or_free(words: &[AtomicU64], key: u64, now: Now) -> (usize, Word, bool) {
    let mut free = (0, Word::FREE, 0);
    for (place, word) in words.iter().map(read).enumerate() {
        let is_alive = word.lives(now);
        if is_alive && word.is_of(key) {
            return (place, word, true);
        }
        // What is free counts as older than anything that lives.
        let age = if is_alive {
            word.age_secs(now.secs)
        } else {
            u32::MAX
        };
        if place == 0 || age > free.2 {
            free = (place, word, age);
        }
    }
    (free.0, free.1, false)
}

fn read(place: &AtomicU64) -> Word {
    // ORDERING: Relaxed; the word is all there is, it publishes nothing.
    Word(place.load(Ordering::Relaxed))
}

fn swap(place: &AtomicU64, old: Word, new: Word) -> bool {
    // ORDERING: Relaxed; as in `read`. Where two words must be seen in order a fence stands.
    place
        .compare_exchange(old.0, new.0, Ordering::Relaxed, Ordering::Relaxed)
        .is_ok()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const NOW: Now = Now {
        secs: 1000,
        ttl_secs: 100,
    };

    fn later(secs: u32) -> Now {
        Now {
            secs: NOW.secs + secs,
            ..NOW
        }
    }

    /// Keys as hashes are: bits everywhere.
    fn key(n: u64) -> u64 {
        let n = (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let n = (n ^ (n >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        n ^ (n >> 29)
    }

    #[test]
    fn a_session_stays_where_it_was_bound_until_it_ends() {
        let sessions = Sessions::new(64);
        assert_eq!(sessions.find(key(1), NOW), None);
        assert_eq!(sessions.bind(key(1), Slot(8191), None, NOW), Slot(8191));
        assert_eq!(sessions.find(key(1), NOW), Some(Slot(8191)));
        assert_eq!(
            sessions.bind(key(1), Slot(3), None, NOW),
            Slot(8191),
            "the first one counts"
        );
        assert_eq!(
            (sessions.count(Slot(8191)), sessions.count(Slot(3))),
            (1, 0)
        );
        assert!(sessions.end(key(1)) && !sessions.end(key(1)));
        assert_eq!((sessions.find(key(1), NOW), sessions.total()), (None, 0));
    }

    #[test]
    fn a_session_whose_worker_is_out_is_bound_anew_once() {
        let sessions = Sessions::new(64);
        sessions.bind(key(1), Slot(1), None, NOW);
        assert_eq!(sessions.bind(key(1), Slot(2), Some(Slot(1)), NOW), Slot(2));
        assert_eq!(
            sessions.bind(key(1), Slot(3), Some(Slot(1)), NOW),
            Slot(2),
            "another core was first"
        );
        assert_eq!([1, 2, 3].map(|n| sessions.count(Slot(n))), [0, 1, 0]);
    }

    #[test]
    fn idle_sessions_expire_and_used_ones_do_not() {
        let sessions = Sessions::new(64);
        sessions.bind(key(1), Slot(1), None, NOW);
        sessions.bind(key(2), Slot(2), None, NOW);
        assert_eq!(sessions.find(key(1), later(90)), Some(Slot(1)));
        assert_eq!(sessions.find(key(1), later(190)), Some(Slot(1)));
        assert_eq!(sessions.find(key(2), later(101)), None);
        sessions.sweep(0, 1, later(190));
        assert_eq!([1, 2].map(|n| sessions.count(Slot(n))), [1, 0]);
        // Too old and not swept: its own place is taken again, once.
        assert_eq!(sessions.bind(key(1), Slot(3), None, later(500)), Slot(3));
        assert_eq!((sessions.total(), sessions.count(Slot(3))), (1, 1));
    }

    #[test]
    fn seconds_may_run_over_and_differ_by_one_between_cores() {
        let sessions = Sessions::new(64);
        let end = Now {
            secs: SECONDS_MASK as u32,
            ttl_secs: 100,
        };
        sessions.bind(key(1), Slot(1), None, end);
        let after = Now {
            secs: end.secs + 60,
            ..end
        };
        assert_eq!(sessions.find(key(1), after), Some(Slot(1)));
        let before = Now {
            secs: after.secs - 1,
            ..end
        };
        assert_eq!(sessions.find(key(1), before), Some(Slot(1)));
    }

    #[test]
    fn a_full_bucket_gives_up_what_was_not_used_for_longest() {
        let sessions = Sessions::new(1);
        assert_eq!(sessions.words.len(), WAYS);
        for n in 0..WAYS as u64 {
            sessions.bind(key(n), Slot(n as u16), None, later(n as u32));
        }
        sessions.find(key(0), later(50));
        sessions.bind(key(100), Slot(100), None, later(50));
        assert_eq!(sessions.find(key(1), later(50)), None);
        assert_eq!(sessions.find(key(0), later(50)), Some(Slot(0)));
        assert_eq!(sessions.total(), WAYS as u64);
    }

    #[test]
    fn a_worker_that_is_gone_is_forgotten() {
        let sessions = Sessions::new(1 << 14);
        for n in 0..1000 {
            sessions.bind(key(n), Slot((n % 4) as u16), None, NOW);
        }
        sessions.forget(Slot(2));
        assert_eq!((sessions.count(Slot(2)), sessions.total()), (0, 750));
        assert!((0..1000).all(|n| sessions.find(key(n), NOW).is_some() == (n % 4 != 2)));
    }

    /// Half full, as it is meant to be used: hardly a session is lost, and none is taken for another.
    #[test]
    fn a_table_that_is_half_full_keeps_nearly_all() {
        let sessions = Sessions::new(1 << 16);
        for n in 0..1 << 15 {
            sessions.bind(key(n), Slot((n % 997) as u16), None, NOW);
        }
        let kept = (0..1 << 15).filter(|n| {
            let slot = sessions.find(key(*n), NOW);
            assert!(slot.is_none_or(|slot| slot == Slot((n % 997) as u16)));
            slot.is_some()
        });
        assert!(kept.count() > (1 << 15) * 97 / 100);
    }

    #[test]
    fn counts_are_those_of_the_words_after_many_threads() {
        let sessions = Sessions::new(256);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let sessions = &sessions;
                scope.spawn(move || {
                    for n in 0..20_000 {
                        let key = key((n * 7 + thread) % 300);
                        match n % 5 {
                            0 => drop(sessions.end(key)),
                            1 => drop(sessions.bind(key, Slot(9), Some(Slot(2)), NOW)),
                            _ => drop(sessions.bind(key, Slot((n % 4) as u16), None, NOW)),
                        }
                    }
                });
            }
        });
        let mut counts = [0; 10];
        for word in sessions.words.iter().map(read).filter(|w| w.is_used()) {
            counts[word.slot().index()] += 1;
        }
        assert_eq!(
            counts,
            std::array::from_fn(|n| sessions.count(Slot(n as u16)))
        );
        for n in 0..300 {
            let own = sessions.bucket(key(n)).iter().map(read);
            assert!(own.filter(|word| word.is_of(key(n))).count() <= 1);
        }
    }
}
