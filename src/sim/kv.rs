//! A worker's KV cache: blocks named by what they hold, pinned while a request uses them, else kept until the room is
//! needed, least recently used first (vLLM's prefix caching: the tail of a prompt goes before its beginning).
//!
//! Invariant: `used` blocks are those pinned and those kept; it never exceeds the capacity.

use ahash::RandomState;
use std::collections::HashMap;

const NONE: u32 = u32::MAX;

struct Block {
    name: u64,
    users: u32,
    /// Neighbours among the unused; the head of the list is the oldest.
    before: u32,
    after: u32,
}

/// The blocks of one worker.
pub struct Kv {
    capacity: u64,
    /// Blocks that hold something nobody else can use: a prompt's last, half full one.
    private: u64,
    by_name: HashMap<u64, u32, RandomState>,
    blocks: Vec<Block>,
    free: Vec<u32>,
    oldest: u32,
    newest: u32,
    unused: u64,
    /// Blocks that had to go, since the start.
    pub evicted_count: u64,
    /// A prompt's beginning goes before its tail, so that it is lost as a whole: so it is with models that keep a state and
    /// not only keys and values, which can be taken up at its end alone.
    pub is_lost_whole: bool,
}

impl Kv {
    /// An empty cache of that many blocks.
    pub fn new(capacity: u64) -> Kv {
        Kv {
            capacity,
            private: 0,
            // Fixed keys: nothing of a run may depend on chance.
            by_name: HashMap::with_hasher(RandomState::with_seeds(1, 2, 3, 4)),
            blocks: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            unused: 0,
            evicted_count: 0,
            is_lost_whole: false,
        }
    }

    /// How many blocks of a prompt are here, from its start.
    pub fn held(&self, names: &[u64]) -> usize {
        let held = names
            .iter()
            .take_while(|name| self.by_name.contains_key(name));
        held.count()
    }

    /// Pins the blocks of a request, and `private` more. `None`: no room now. Else how many from the start were here.
    pub fn pin(&mut self, names: &[u64], private: u64) -> Option<usize> {
        let held = self.held(names);
        let (mut missing, mut revived) = (private, 0);
        for name in names {
            match self.by_name.get(name) {
                Some(index) => revived += u64::from(self.blocks[*index as usize].users == 0),
                None => missing += 1,
            }
        }
        // What is unused can go, unless this very request wants it.
        if self.pinned() + revived + missing > self.capacity {
            return None;
        }
        for name in names {
            if let Some(index) = self.by_name.get(name).copied() {
                if self.blocks[index as usize].users == 0 {
                    self.unlink(index);
                }
                self.blocks[index as usize].users += 1;
            }
        }
        self.private += private;
        while self.used() > self.capacity {
            self.evict();
        }
        for name in names {
            if !self.by_name.contains_key(name) {
                if self.used() >= self.capacity {
                    self.evict();
                }
                self.insert(*name);
            }
        }
        Some(held)
    }

    /// The request is done: its blocks stay, for as long as there is room.
    pub fn unpin(&mut self, names: &[u64], private: u64) {
        self.private -= private;
        for at in 0..names.len() {
            let from_start = if self.is_lost_whole {
                at
            } else {
                names.len() - 1 - at
            };
            let index = self.by_name[&names[from_start]];
            let block = &mut self.blocks[index as usize];
            block.users -= 1;
            if block.users == 0 {
                self.link_newest(index);
            }
        }
    }

    /// Forgets everything (the worker began anew).
    pub fn clear(&mut self) {
        *self = Kv {
            evicted_count: self.evicted_count,
            is_lost_whole: self.is_lost_whole,
            ..Kv::new(self.capacity)
        };
    }

    /// Blocks in use by requests.
    pub fn pinned(&self) -> u64 {
        self.by_name.len() as u64 - self.unused + self.private
    }

    /// Blocks that hold something.
    pub fn used(&self) -> u64 {
        self.by_name.len() as u64 + self.private
    }

    /// Blocks there are.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    fn insert(&mut self, name: u64) {
        let block = Block {
            name,
            users: 1,
            before: NONE,
            after: NONE,
        };
        let index = match self.free.pop() {
            Some(index) => {
                self.blocks[index as usize] = block;
                index
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as u32
            }
        };
        self.by_name.insert(name, index);
    }

    fn evict(&mut self) {
        let index = self.oldest;
        assert_ne!(index, NONE, "pin has seen that there is room");
        self.unlink(index);
        self.by_name.remove(&self.blocks[index as usize].name);
        self.free.push(index);
        self.evicted_count += 1;
    }

    fn link_newest(&mut self, index: u32) {
        let before = self.newest;
        let block = &mut self.blocks[index as usize];
        (block.before, block.after) = (before, NONE);
        match before {
            NONE => self.oldest = index,
            before => self.blocks[before as usize].after = index,
        }
        self.newest = index;
        self.unused += 1;
    }

    fn unlink(&mut self, index: u32) {
        let Block { before, after, .. } = self.blocks[index as usize];
        match before {
            NONE => self.oldest = after,
            before => self.blocks[before as usize].after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.blocks[after as usize].before = before,
        }
        self.unused -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays_and_a_prompts_tail_goes_first() {
        let mut kv = Kv::new(6);
        assert_eq!(kv.pin(&[1, 2, 3], 0), Some(0));
        kv.unpin(&[1, 2, 3], 0);
        assert_eq!(kv.pin(&[11, 12], 1), Some(0));
        kv.unpin(&[11, 12], 1);
        // Two are missing, one is free: the tail of the older prompt goes.
        assert_eq!(kv.pin(&[1, 21, 22], 0), Some(1));
        assert_eq!((kv.held(&[1, 2, 3]), kv.held(&[11, 12])), (2, 2));
        assert_eq!((kv.used(), kv.pinned(), kv.evicted_count), (6, 3, 1));
    }

    #[test]
    fn a_request_that_does_not_fit_changes_nothing() {
        let mut kv = Kv::new(3);
        assert_eq!(kv.pin(&[1, 2], 0), Some(0));
        assert_eq!(kv.pin(&[1, 5], 1), None);
        assert_eq!((kv.used(), kv.pinned()), (2, 2));
        kv.unpin(&[1, 2], 0);
        assert_eq!(kv.pin(&[1, 5], 1), Some(1));
        assert_eq!(kv.held(&[1, 2]), 1);
    }

    #[test]
    fn two_users_of_a_block_pin_it_once() {
        let mut kv = Kv::new(4);
        assert_eq!(kv.pin(&[1, 2], 0), Some(0));
        assert_eq!(kv.pin(&[1, 2, 3], 0), Some(2));
        kv.unpin(&[1, 2], 0);
        assert_eq!(kv.pinned(), 3);
        kv.unpin(&[1, 2, 3], 0);
        assert_eq!((kv.pinned(), kv.used()), (0, 3));
        kv.clear();
        assert_eq!((kv.used(), kv.held(&[1])), (0, 0));
    }
}
