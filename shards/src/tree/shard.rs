//! The owner's handle of one shard: lessons are queued and worked off in bounded turns. One per core; the only writer.

use std::collections::VecDeque;

use super::Tree;
use super::lesson::Lesson;
use super::sweep::Sweep;
use super::table::Table;
use super::view::View;
use crate::ids::{PrefixHash, Slot};
use crate::sync::Arc;

/// How many hashes ahead memory is asked for.
const PREFETCH_AHEAD: usize = 8;

/// The owner of one shard. `Send`; the only handle that may write it.
pub struct Shard {
    tree: Arc<Tree>,
    index: usize,
    table: Table,
    queue: VecDeque<Lesson>,
    /// Hashes of the first lesson that are done.
    done_count: usize,
    sweep: Sweep,
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
        if let Lesson::Purge { worker } = lesson {
            self.sweep.announce(worker);
        }
        self.queue.push_back(lesson);
    }

    /// Does up to `budget` steps (a block inserted or touched, a few buckets purged; a step may split one segment), then
    /// frees some of what no pin can see. True: more to do. May be called while this core is pinned.
    pub fn work(&mut self, budget: usize) -> bool {
        for step in 0..budget {
            let is_lesson_first = step % 2 == 1 || !self.sweep.is_running();
            let is_done = if is_lesson_first {
                self.lesson_step()
            } else {
                self.sweep_step()
            };
            if !is_done && !self.sweep_step() {
                break;
            }
        }
        self.settle();
        !self.is_idle()
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

    /// One hash of the first lesson, or a small lesson whole. False: the queue is empty, or its first lesson has to wait for
    /// the purge of its worker.
    fn lesson_step(&mut self) -> bool {
        let Self {
            tree,
            index,
            table,
            queue,
            done_count,
            sweep,
        } = self;
        let view = &tree.views[*index];
        let Some(lesson) = queue.front() else {
            return false;
        };
        let is_finished = match lesson {
            Lesson::Insert { worker, .. } if sweep.purges(*worker) => return false,
            Lesson::Insert { worker, hashes } => {
                hash_step(view, table, hashes, done_count, |table, hash| {
                    table.insert(view, hash, *worker)
                })
            }
            Lesson::Remove { worker, hashes } => {
                hash_step(view, table, hashes, done_count, |table, hash| {
                    table.remove_holder(view, hash, *worker)
                })
            }
            Lesson::Touch { hashes } => {
                hash_step(view, table, hashes, done_count, |table, hash| {
                    table.touch(view, hash)
                })
            }
            Lesson::Branch { parent } => {
                table.branch(view, *parent);
                true
            }
            Lesson::Purge { worker } => {
                sweep.start(*worker, table);
                true
            }
        };
        if is_finished {
            queue.pop_front();
            *done_count = 0;
        }
        true
    }
}

/// Does the next hash of a batch. True: that was the last.
fn hash_step(
    view: &View,
    table: &mut Table,
    hashes: &[PrefixHash],
    done_count: &mut usize,
    act: impl FnOnce(&mut Table, PrefixHash),
) -> bool {
    if let Some(&ahead) = hashes.get(*done_count + PREFETCH_AHEAD) {
        table.prefetch(view, ahead);
    }
    if let Some(&hash) = hashes.get(*done_count) {
        act(table, hash);
        *done_count += 1;
    }
    *done_count >= hashes.len()
}
