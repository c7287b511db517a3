//! The owner's handle of one shard: lessons are queued and worked off in bounded turns. One per core; the only writer.

use std::collections::VecDeque;
use std::ops::Range;

use super::Tree;
use super::lesson::Lesson;
use super::sweep::Sweep;
use super::table::Table;
use super::view::View;
use crate::ids::{PrefixHash, Slot};
use crate::sync::Arc;

/// How many hashes ahead memory is asked for.
const PREFETCH_AHEAD: usize = 8;
/// Vectors of lessons that are kept for later ones, and how large: 256 KiB a shard at most.
const SPARE_COUNT_MAX: usize = 64;
const SPARE_HASHES_MAX: usize = 512;

/// The owner of one shard. `Send`; the only handle that may write it.
pub struct Shard {
    tree: Arc<Tree>,
    index: usize,
    table: Table,
    queue: VecDeque<Lesson>,
    /// Hashes of the first lesson that are done.
    done_count: usize,
    sweep: Sweep,
    /// Vectors of lessons that are done.
    spare: Vec<Vec<PrefixHash>>,
}

impl Shard {
    pub(super) fn new(tree: Arc<Tree>, index: usize, table: Table) -> Self {
        let mut shard = Self {
            tree,
            index,
            table,
            queue: VecDeque::new(),
            done_count: 0,
            sweep: Sweep::new(),
            spare: Vec::new(),
        };
        shard.settle();
        shard
    }

    /// Which shard this is, as [`Tree::owner`] counts.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Queues a lesson. Lessons are worked off in this order. The queue has no bound of its own: its owner takes no more
    /// from its mailboxes than it works off.
    pub fn apply(&mut self, lesson: Lesson) {
        match &lesson {
            Lesson::Purge { worker } => self.sweep.announce(*worker),
            Lesson::Insert { hashes, .. } | Lesson::Remove { hashes, .. } => {
                // The first ones are under way when their turn comes: batches are short.
                let view = &self.tree.views[self.index];
                let first = hashes.iter().take(PREFETCH_AHEAD);
                first.for_each(|hash| self.table.prefetch(view, *hash));
            }
            Lesson::Touch { .. } | Lesson::Branch { .. } => {}
        }
        self.queue.push_back(lesson);
    }

    /// Does up to `budget` steps (a block inserted or touched, a few buckets purged; a step may split one segment), then
    /// frees some of what no pin can see. True: more to do. May be called while this core is pinned.
    pub fn work(&mut self, budget: usize) -> bool {
        let mut steps = 0;
        while steps < budget {
            let done = match self.sweep.is_running() {
                // In turns, one step each.
                true if steps % 2 == 0 => usize::from(self.sweep_step()),
                true => self.lesson_steps(1),
                false => self.lesson_steps(budget - steps),
            };
            if done == 0 && !self.sweep_step() {
                break;
            }
            steps += done.max(1);
        }
        self.settle();
        !self.is_idle()
    }

    /// An empty vector, if a lesson has left one: the next lesson's hashes need no allocation.
    pub fn spare(&mut self) -> Option<Vec<PrefixHash>> {
        self.spare.pop()
    }

    fn keep(&mut self, mut hashes: Vec<PrefixHash>) {
        let is_usual = (1..=SPARE_HASHES_MAX).contains(&hashes.capacity());
        if is_usual && self.spare.len() < SPARE_COUNT_MAX {
            hashes.clear();
            self.spare.push(hashes);
        }
    }

    /// Nothing queued, nothing being purged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.sweep.is_running()
    }

    /// No block of this shard names the slot, and no purge of it is pending.
    #[must_use]
    pub fn purged(&self, slot: Slot) -> bool {
        self.table.held_count(slot) == 0 && !self.sweep.is_pending(slot)
    }

    /// `/flush_cache`: forgets all blocks and all queued lessons, now; memory is freed by later turns of work.
    pub fn clear(&mut self) {
        self.queue.clear();
        self.done_count = 0;
        self.sweep.clear();
        self.table.clear(&self.tree.views[self.index]);
        self.settle();
    }

    fn settle(&mut self) {
        self.table.settle(&self.tree.views[self.index]);
    }

    /// Some buckets of a running sweep. False: none runs.
    fn sweep_step(&mut self) -> bool {
        let is_running = self.sweep.is_running();
        if is_running {
            self.sweep
                .step(&self.tree.views[self.index], &mut self.table);
        }
        is_running
    }

    /// Up to `most` hashes of the first lesson, or a small lesson whole: how many steps that were. 0: the queue is empty, or its
    /// first lesson has to wait for the purge of its worker.
    fn lesson_steps(&mut self, most: usize) -> usize {
        let Self {
            tree,
            index,
            table,
            queue,
            done_count,
            sweep,
            ..
        } = self;
        let view = &tree.views[*index];
        let Some(lesson) = queue.front() else {
            return 0;
        };
        let done = *done_count..*done_count + most;
        let steps = match lesson {
            Lesson::Insert { worker, .. } if sweep.purges(*worker) => return 0,
            Lesson::Insert { worker, hashes } => {
                hash_steps(view, table, hashes, done, |t, hash| {
                    t.insert(view, hash, *worker)
                })
            }
            Lesson::Remove { worker, hashes } => {
                hash_steps(view, table, hashes, done, |t, hash| {
                    t.remove_holder(view, hash, *worker)
                })
            }
            Lesson::Touch { hashes } => {
                hash_steps(view, table, hashes, done, |t, hash| t.touch(view, hash))
            }
            Lesson::Branch { parent } => {
                table.branch(view, *parent);
                1
            }
            Lesson::Purge { worker } => {
                sweep.start(*worker, table);
                1
            }
        };
        *done_count += steps;
        let count = match lesson {
            Lesson::Insert { hashes, .. }
            | Lesson::Remove { hashes, .. }
            | Lesson::Touch { hashes } => hashes.len(),
            Lesson::Branch { .. } | Lesson::Purge { .. } => 1,
        };
        if *done_count >= count {
            let done = queue.pop_front();
            *done_count = 0;
            if let Some(
                Lesson::Insert { hashes, .. }
                | Lesson::Remove { hashes, .. }
                | Lesson::Touch { hashes },
            ) = done
            {
                self.keep(hashes);
            }
        }
        steps.max(1)
    }
}

/// Does the hashes of a batch from `done.start` on, up to `done.end`: how many that were.
fn hash_steps(
    view: &View,
    table: &mut Table,
    hashes: &[PrefixHash],
    done: Range<usize>,
    mut act: impl FnMut(&mut Table, PrefixHash),
) -> usize {
    let end = done.end.min(hashes.len());
    for place in done.start..end {
        if let Some(&ahead) = hashes.get(place + PREFETCH_AHEAD) {
            table.prefetch(view, ahead);
        }
        act(table, hashes[place]);
    }
    end.saturating_sub(done.start)
}
