//! The gate: how many requests run, all cores together, and in which order others get in. Shared by all cores.
//!
//! A request that finds room runs; one that does not waits in its own core's line, under a ticket, and each core shows
//! here the ticket at the head of its line. Who leaves looks for the oldest head and claims it; the claimed one's core is
//! told and takes it out of its line. Requests thus run in the order of their tickets, except that while a core has not
//! yet noticed a claim, the line behind its head stands still.
//!
//! Invariants:
//! - G1 at most `limit` run: one is counted before a head is claimed, and given back if there is none.
//! - G2 at most `queue_max` wait.
//! - G3 no lost wake-up: when all is quiet, nobody waits in a line while there is room. Dekker's argument: who joins shows
//!   its head, fence, looks for room; who leaves makes room, fence, looks at the heads. Who counted one in vain gives it
//!   back and looks once more.
//! - G4 a newcomer does not pass those who wait: it runs at once only while nobody does.
//!
//! Nothing here can fail; a full line is an answer.

use crate::sync::{AtomicU64, CachePadded, Ordering, fence};

/// No line, or one whose head has been claimed and not yet taken out.
const NOBODY: u64 = u64::MAX;
const CLAIMED: u64 = u64::MAX - 1;

const ONE_RUNNING: u64 = 1 << 32;
const ONE_WAITING: u64 = 1;

fn running(word: u64) -> u32 {
    (word >> 32) as u32
}

fn waiting(word: u64) -> u32 {
    word as u32
}

/// What a request gets at the gate.
#[derive(Debug)]
pub enum Entry {
    /// It runs.
    Admitted(Permit),
    /// It waits, under this ticket: its core puts it into its line, then calls [`Gate::show`] and [`Gate::pass_on`].
    Queued(u64),
    /// Neither.
    Full,
}

/// One request that runs. Given back by [`Permit::leave`], or by being dropped (then nobody is let in for it until
/// somebody calls [`Gate::pass_on`]).
#[derive(Debug)]
pub struct Permit {
    gate: &'static Gate,
}

/// Counts who runs and who waits. `Sync`.
#[derive(Debug)]
pub struct Gate {
    /// Running in the upper half, waiting in the lower: both are judged in one step.
    word: CachePadded<AtomicU64>,
    tickets: CachePadded<AtomicU64>,
    /// By core: the ticket at the head of its line.
    heads: Box<[CachePadded<AtomicU64>]>,
}

impl Gate {
    /// With nobody in it.
    #[must_use]
    pub fn new(core_count: usize) -> Gate {
        let head = |_| CachePadded::new(AtomicU64::new(NOBODY));
        Gate {
            word: CachePadded::new(AtomicU64::new(0)),
            tickets: CachePadded::new(AtomicU64::new(0)),
            heads: (0..core_count).map(head).collect(),
        }
    }

    /// A request comes.
    pub fn enter(&'static self, limit: u32, queue_max: u32) -> Entry {
        // ORDERING: Relaxed, all steps on the word: they count, and publish nothing but themselves. What must not be
        // missed of the heads is ordered by the fences of `pass_on`.
        let found = self
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                if waiting(word) == 0 && running(word) < limit {
                    Some(word + ONE_RUNNING)
                } else if waiting(word) < queue_max {
                    Some(word + ONE_WAITING)
                } else {
                    None
                }
            });
        match found {
            Ok(word) if waiting(word) == 0 && running(word) < limit => {
                Entry::Admitted(Permit { gate: self })
            }
            // ORDERING: Relaxed; numbers that differ and grow.
            Ok(_) => Entry::Queued(self.tickets.fetch_add(1, Ordering::Relaxed)),
            Err(_) => Entry::Full,
        }
    }

    /// The head of a core's line, `None`: it is empty. By that core only; after a claim, this ends the claim. Then
    /// [`Gate::pass_on`] must be called.
    pub fn show(&self, core: usize, ticket: Option<u64>) {
        // ORDERING: Relaxed; the number is all. `pass_on`'s fence orders it before the look for room (G3).
        self.heads[core].store(ticket.unwrap_or(NOBODY), Ordering::Relaxed);
    }

    /// The head of a core's line gives up, and another follows. `false`: it has been claimed already; the core will be
    /// told, and passes that claim on. By that core only.
    pub fn replace_head(&self, core: usize, ticket: u64, next: Option<u64>) -> bool {
        // ORDERING: Relaxed; as in `show`.
        self.heads[core]
            .compare_exchange(
                ticket,
                next.unwrap_or(NOBODY),
                Ordering::Relaxed,
                Ordering::Relaxed,
            )
            .is_ok()
    }

    /// One that waited, and was not claimed, does not any more.
    pub fn stop_waiting(&self) {
        // ORDERING: Relaxed; as in `enter`.
        self.word.fetch_sub(ONE_WAITING, Ordering::Relaxed);
    }

    /// Lets the oldest head in, if there is room: the core that has it, which must be told (and then calls
    /// [`Gate::take`]). To be called after whatever makes room or shows a head, until it says `None`.
    #[must_use]
    pub fn pass_on(&self, limit: u32) -> Option<usize> {
        loop {
            // ORDERING: SeqCst fence (G3): what made room, or showed a head, comes before both looks.
            fence(Ordering::SeqCst);
            self.oldest()?;
            // ORDERING: Relaxed; as in `enter`.
            self.word
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                    (running(word) < limit).then(|| word + ONE_RUNNING)
                })
                .ok()?;
            while let Some((core, ticket)) = self.oldest() {
                // ORDERING: Relaxed; the number is all, and the core learns of the claim by a message.
                let claim = self.heads[core].compare_exchange(
                    ticket,
                    CLAIMED,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                if claim.is_ok() {
                    self.stop_waiting();
                    return Some(core);
                }
            }
            // In vain. Somebody may have come meanwhile and found no room because of this one: look again.
            // ORDERING: Relaxed; as in `enter`.
            self.word.fetch_sub(ONE_RUNNING, Ordering::Relaxed);
        }
    }

    /// The claim that `pass_on` made for a core, in that core's hands.
    #[must_use]
    pub fn take(&'static self) -> Permit {
        Permit { gate: self }
    }

    /// One that waits outside the lines runs again, if there is room.
    pub fn resume(&'static self, limit: u32) -> Option<Permit> {
        // ORDERING: Relaxed; as in `enter`.
        let found = self
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                (running(word) < limit && waiting(word) > 0)
                    .then(|| word + ONE_RUNNING - ONE_WAITING)
            });
        found.is_ok().then(|| Permit { gate: self })
    }

    /// Requests that run, and that wait.
    #[must_use]
    pub fn counts(&self) -> (u32, u32) {
        // ORDERING: Relaxed; numbers to show.
        let word = self.word.load(Ordering::Relaxed);
        (running(word), waiting(word))
    }

    fn oldest(&self) -> Option<(usize, u64)> {
        // ORDERING: Relaxed; a claim checks in its own step.
        let heads = self.heads.iter().map(|head| head.load(Ordering::Relaxed));
        heads
            .enumerate()
            .filter(|(_, ticket)| *ticket < CLAIMED)
            .min_by_key(|(_, ticket)| *ticket)
    }
}

impl Permit {
    /// The request is over. True: others wait, and [`Gate::pass_on`] must be called.
    #[must_use]
    pub fn leave(self) -> bool {
        let gate = self.gate;
        std::mem::forget(self);
        // Who joins after this step finds the room itself.
        // ORDERING: Relaxed; as in `enter`.
        waiting(gate.word.fetch_sub(ONE_RUNNING, Ordering::Relaxed)) > 0
    }

    /// The request waits outside the lines for something else than room here ([`Gate::resume`], or
    /// [`Gate::stop_waiting`]). The permit comes back if too many wait. Then [`Gate::pass_on`] must be called.
    ///
    /// # Errors
    /// `queue_max` wait already.
    pub fn step_aside(self, queue_max: u32) -> Result<(), Permit> {
        // ORDERING: Relaxed; as in `enter`.
        let found = self
            .gate
            .word
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
                (waiting(word) < queue_max).then(|| word - ONE_RUNNING + ONE_WAITING)
            });
        match found {
            Ok(_) => {
                std::mem::forget(self);
                Ok(())
            }
            Err(_) => Err(self),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // ORDERING: Relaxed; as in `enter`.
        self.gate.word.fetch_sub(ONE_RUNNING, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn gate(core_count: usize) -> &'static Gate {
        Box::leak(Box::new(Gate::new(core_count)))
    }

    fn enter(gate: &'static Gate, limit: u32, queue_max: u32) -> Permit {
        match gate.enter(limit, queue_max) {
            Entry::Admitted(permit) => permit,
            other => panic!("{other:?}"),
        }
    }

    fn join(gate: &'static Gate, limit: u32, core: usize) -> u64 {
        let Entry::Queued(ticket) = gate.enter(limit, 10) else {
            panic!("there is room in the line")
        };
        gate.show(core, Some(ticket));
        ticket
    }

    #[test]
    fn so_many_run_and_so_many_wait() {
        let gate = gate(1);
        let running = [enter(gate, 2, 1), enter(gate, 2, 1)];
        assert!(matches!(gate.enter(2, 1), Entry::Queued(_)));
        assert!(matches!(gate.enter(2, 1), Entry::Full));
        assert_eq!(gate.counts(), (2, 1));
        drop(running);
        assert!(
            matches!(gate.enter(2, 1), Entry::Full),
            "it would pass the one that waits"
        );
        gate.stop_waiting();
        assert!(!enter(gate, 2, 1).leave());
        assert_eq!(gate.counts(), (0, 0));
    }

    #[test]
    fn the_oldest_head_is_let_in_first() {
        let gate = gate(3);
        let first = enter(gate, 1, 10);
        for core in [2, 0, 1] {
            join(gate, 1, core);
        }
        assert_eq!(gate.pass_on(1), None, "no room");
        assert!(first.leave());
        for core in [2, 0, 1] {
            assert_eq!(gate.pass_on(1), Some(core));
            assert_eq!(gate.pass_on(1), None);
            gate.show(core, None);
            let _ = gate.take().leave();
        }
        assert_eq!(gate.counts(), (0, 0));
    }

    #[test]
    fn a_head_that_was_claimed_cannot_give_up() {
        let gate = gate(1);
        let running = enter(gate, 1, 10);
        let ticket = join(gate, 1, 0);
        assert!(running.leave());
        assert_eq!(gate.pass_on(1), Some(0));
        assert!(!gate.replace_head(0, ticket, None));
        drop(gate.take());
        gate.show(0, None);
        assert_eq!(gate.counts(), (0, 0));
    }

    #[test]
    fn who_steps_aside_waits_and_runs_again() {
        let gate = gate(1);
        enter(gate, 1, 1).step_aside(1).unwrap();
        assert_eq!(gate.counts(), (0, 1));
        let other = gate.resume(1).unwrap();
        assert!(gate.resume(1).is_none(), "no room");
        assert!(other.step_aside(0).is_err());
        assert_eq!(
            gate.counts(),
            (0, 0),
            "the permit came back and was dropped"
        );
    }

    /// Threads that enter, wait and leave at random: never too many, and all get through.
    #[test]
    fn threads_lose_nobody() {
        const CORES: usize = 4;
        const LIMIT: u32 = 2;
        let gate = gate(CORES);
        let now: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
        let bells: &'static Vec<AtomicU32> =
            Box::leak(Box::new((0..CORES).map(|_| AtomicU32::new(0)).collect()));
        let tell_all = move || {
            while let Some(core) = gate.pass_on(LIMIT) {
                bells[core].fetch_add(1, Ordering::SeqCst);
            }
        };
        let threads: Vec<_> = (0..CORES)
            .map(|core| {
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        let permit = match gate.enter(LIMIT, CORES as u32) {
                            Entry::Admitted(permit) => permit,
                            Entry::Full => panic!("the line has a place for every thread"),
                            Entry::Queued(ticket) => {
                                gate.show(core, Some(ticket));
                                tell_all();
                                while bells[core].swap(0, Ordering::SeqCst) == 0 {
                                    std::thread::yield_now();
                                }
                                gate.show(core, None);
                                tell_all();
                                gate.take()
                            }
                        };
                        assert!(now.fetch_add(1, Ordering::SeqCst) < LIMIT);
                        now.fetch_sub(1, Ordering::SeqCst);
                        if permit.leave() {
                            tell_all();
                        }
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(gate.counts(), (0, 0));
    }
}
