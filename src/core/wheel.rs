//! A core's timers: a wheel of coarse ticks, one entry a connection, one wake-up a core.
//!
//! A connection's deadline moves with every byte; the wheel is touched only when it moves earlier than the entry that is
//! there. An entry that comes up early is put back. Owned by one core.

use crate::ring::Token;

/// Length of a tick, ns: deadlines are met up to this late.
const TICK_NS: u64 = 64_000_000;
const SLOT_COUNT: u64 = 1024;

/// The wheel.
pub struct Wheel {
    slots: Vec<Vec<Token>>,
    /// Bit set: the slot has entries.
    filled: [u64; (SLOT_COUNT / 64) as usize],
    /// The tick that was last worked off.
    tick: u64,
}

impl Wheel {
    /// An empty wheel at a time.
    pub fn new(now_ns: u64) -> Wheel {
        Wheel {
            slots: (0..SLOT_COUNT).map(|_| Vec::new()).collect(),
            filled: [0; (SLOT_COUNT / 64) as usize],
            tick: now_ns / TICK_NS,
        }
    }

    /// Puts an entry in, to come up at or soon after a time; when that is further than the wheel reaches, at the
    /// wheel's end. Returns the time at which it will come up.
    pub fn insert(&mut self, token: Token, at_ns: u64) -> u64 {
        let tick = (at_ns / TICK_NS + 1).clamp(self.tick + 1, self.tick + SLOT_COUNT - 1);
        let slot = (tick % SLOT_COUNT) as usize;
        self.slots[slot].push(token);
        self.filled[slot / 64] |= 1 << (slot % 64);
        tick * TICK_NS
    }

    /// Moves what is due into `due`.
    pub fn advance(&mut self, now_ns: u64, due: &mut Vec<Token>) {
        let until = now_ns / TICK_NS;
        // After a long sleep every slot is due once, not more.
        let first = (self.tick + 1).max((until + 1).saturating_sub(SLOT_COUNT));
        for tick in first..=until {
            let slot = (tick % SLOT_COUNT) as usize;
            if self.filled[slot / 64] & 1 << (slot % 64) != 0 {
                self.filled[slot / 64] &= !(1 << (slot % 64));
                due.append(&mut self.slots[slot]);
            }
        }
        self.tick = self.tick.max(until);
    }

    /// When the next entry comes up, ns; `None`: there is none.
    pub fn next_ns(&self) -> Option<u64> {
        const WORD_COUNT: u64 = SLOT_COUNT / 64;
        let first = (self.tick + 1) % SLOT_COUNT;
        // The first word is looked at twice: from `first` on, and at the end up to `first`.
        for step in 0..=WORD_COUNT {
            let at = (first / 64 + step) % WORD_COUNT;
            let mut word = self.filled[at as usize];
            if step == 0 {
                word &= u64::MAX << (first % 64);
            } else if step == WORD_COUNT {
                word &= !(u64::MAX << (first % 64));
            }
            if word != 0 {
                let slot = at * 64 + u64::from(word.trailing_zeros());
                let ahead = (slot + SLOT_COUNT - first) % SLOT_COUNT;
                return Some((self.tick + 1 + ahead) * TICK_NS);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn token(index: u32) -> Token {
        Token {
            index,
            generation: 0,
        }
    }

    #[test]
    fn entries_come_up_once_never_early_and_at_most_a_tick_late() {
        let mut wheel = Wheel::new(5_000 * MS);
        let mut seed = 9u64;
        let mut wanted = Vec::new();
        for index in 0..500 {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let at = 5_000 * MS + (seed >> 40) % (30_000 * MS / 1000) * 1000;
            wheel.insert(token(index), at);
            wanted.push(at);
        }
        let mut seen = vec![0; 500];
        for step in 0..40_000 / 10 {
            let now = 5_000 * MS + step * 10 * MS;
            let mut due = Vec::new();
            wheel.advance(now, &mut due);
            for token in due {
                let at = wanted[token.index as usize];
                seen[token.index as usize] += 1;
                assert!(
                    now >= at && now < at + 2 * TICK_NS + 10 * MS,
                    "at {at}, now {now}"
                );
            }
        }
        assert!(seen.iter().all(|n| *n == 1));
        assert_eq!(wheel.next_ns(), None);
    }

    #[test]
    fn far_entries_come_up_at_the_wheels_end_and_long_sleeps_lose_nothing() {
        let mut wheel = Wheel::new(0);
        let at = wheel.insert(token(1), 3_600_000 * MS);
        assert!(at < 70_000 * MS);
        assert_eq!(wheel.next_ns(), Some(at));
        let mut due = Vec::new();
        wheel.advance(3_600_000 * MS, &mut due);
        assert_eq!(due, vec![token(1)]);
    }
}
