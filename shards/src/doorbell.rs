//! "Is the owner asleep?", so that a busy core costs its senders no system call. Owned by one core, rung by any.
//!
//! Invariant D1: if the owner goes to sleep although something was sent, some sender's `ring` returns true for that
//! sleep. Dekker's argument: the owner says "asleep", fence, looks; the sender sends, fence, reads "asleep?". Of the two
//! fences one is first. The owner's first: the sender reads "asleep" and rings. The sender's first: the owner's look sees
//! what was sent.

use crate::sync::{AtomicBool, Ordering, fence};

/// One core's bell. `Sync`.
#[derive(Debug)]
pub struct Doorbell {
    asleep: AtomicBool,
}

impl Doorbell {
    /// The owner is awake.
    #[must_use]
    pub fn new() -> Self {
        Self {
            asleep: AtomicBool::new(false),
        }
    }

    /// Owner: before its last look at the mailboxes; then it looks again, then it sleeps.
    pub fn announce_sleep(&self) {
        // ORDERING: Relaxed; the fence below orders it before the owner's look.
        self.asleep.store(true, Ordering::Relaxed);
        // ORDERING: SeqCst fence, partner in `ring` (D1).
        fence(Ordering::SeqCst);
    }

    /// Owner: after waking, or when the last look found something.
    pub fn announce_awake(&self) {
        // ORDERING: Relaxed; nothing is published. A sender that still reads true wakes an owner that is awake: spurious.
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Sender: after the send. True: the owner sleeps (or is about to) and this caller must wake it, once per sleep.
    #[must_use]
    pub fn ring(&self) -> bool {
        // ORDERING: SeqCst fence, partner in `announce_sleep` (D1): the send comes before the question.
        fence(Ordering::SeqCst);
        // ORDERING: Relaxed; a flag. The swap lets one of several senders win; what was sent travels by the mailbox.
        self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed)
    }
}

impl Default for Doorbell {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mailbox::mailbox;
    use std::sync::Arc;

    #[test]
    fn a_sleeper_is_rung_once() {
        let bell = Doorbell::new();
        assert!(!bell.ring(), "awake at first");
        bell.announce_sleep();
        assert!(bell.ring() && !bell.ring());
        bell.announce_sleep();
        bell.announce_awake();
        assert!(!bell.ring());
        bell.announce_sleep();
        assert!(bell.ring());
    }

    /// A real sleeper: parks only after an empty last look, is unparked only by who rings. A lost wake-up hangs here.
    #[test]
    fn threads_lose_no_wake_up() {
        const COUNT: u32 = 100_000;
        let (mut sender, mut receiver) = mailbox(4);
        let bell = Arc::new(Doorbell::new());
        let theirs = Arc::clone(&bell);
        let owner = std::thread::spawn(move || {
            let mut received_count = 0;
            while received_count < COUNT {
                while let Some(value) = receiver.try_recv() {
                    assert_eq!(value, received_count);
                    received_count += 1;
                }
                theirs.announce_sleep();
                if receiver.is_empty() && received_count < COUNT {
                    std::thread::park();
                }
                theirs.announce_awake();
            }
        });
        for value in 0..COUNT {
            while sender.try_send(value).is_err() {
                std::thread::yield_now();
            }
            if bell.ring() {
                owner.thread().unpark();
            }
        }
        owner.join().unwrap();
    }
}
