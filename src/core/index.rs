//! This core's part of the exact index: what engines say comes from the control thread by mailbox, and is applied here, a
//! bounded number of steps a turn. A full mailbox makes the control thread wait, never this core.

use shards::{Lesson, Receiver, Shard};

use super::{SHARD_STEPS, steps_of};

/// The owner of a shard of the index, with its mailbox.
pub struct IndexShard {
    shard: Shard,
    mail: Receiver<Lesson>,
}

impl IndexShard {
    /// The shard's only writer.
    pub fn new(shard: Shard, mail: Receiver<Lesson>) -> IndexShard {
        IndexShard { shard, mail }
    }

    /// Applies lessons. True: there is more to apply.
    pub(super) fn work(&mut self) -> bool {
        let mut steps = if self.shard.is_idle() { 0 } else { SHARD_STEPS };
        while steps < SHARD_STEPS
            && let Some(lesson) = self.mail.try_recv()
        {
            steps += steps_of(&lesson);
            self.shard.apply(lesson);
        }
        !self.shard.is_idle() && self.shard.work(SHARD_STEPS)
    }

    /// Nothing waits in the mailbox.
    pub(super) fn is_quiet(&self) -> bool {
        self.mail.is_empty()
    }
}
