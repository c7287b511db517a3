//! What a decision teaches the owners of the shards: made by the core that decided, after the request is on its way;
//! applied by the owners.
//!
//! Only what is new is said. In the steady state of a conversation that is the few blocks of its last turn, and for a
//! prompt that is known and fresh nothing at all.

use shards::{Lesson, Pin, PrefixHash, Slot, Tree};

/// One core's scratch: hashes by owner, reused from request to request.
#[derive(Debug, Default)]
pub struct Batches {
    by_owner: Vec<Vec<PrefixHash>>,
}

impl Batches {
    /// For that many owners. (More appear when they are met.)
    pub fn new(owner_count: usize) -> Batches {
        Batches {
            by_owner: vec![Vec::new(); owner_count],
        }
    }

    /// Hands each owner its part of `hashes`, in the order of the chain, and takes an empty vector in its place. Nothing for
    /// owners without a part.
    fn deal(
        &mut self,
        tree: &Tree,
        hashes: &[PrefixHash],
        spare: &mut impl FnMut() -> Vec<PrefixHash>,
        mut hand: impl FnMut(usize, Vec<PrefixHash>),
    ) {
        for hash in hashes {
            let owner = tree.owner(*hash);
            if owner >= self.by_owner.len() {
                self.by_owner.resize_with(owner + 1, Vec::new);
            }
            self.by_owner[owner].push(*hash);
        }
        for (owner, part) in self
            .by_owner
            .iter_mut()
            .enumerate()
            .filter(|(_, part)| !part.is_empty())
        {
            hand(owner, std::mem::replace(part, spare()));
        }
    }
}

/// Tells `emit` what the owners should learn of a prompt that went to the worker in `slot`: (owner, lesson).
///
/// - `Branch` to the owner of the last block that anybody is known to hold, when the prompt goes on from there in a
///   way not known yet.
/// - `Insert` of the blocks the worker did not hold yet, one for each owner.
/// - `Touch` of the blocks it did hold, one for each owner, when they were last used some time ago: a system prompt
///   must not grow old under conversations that come and go on top of it.
///
/// Nothing when the worker holds the whole prompt and it is fresh. Losing a lesson is harmless: the next request with that
/// prefix teaches it again. `spare` gives empty vectors for the hashes: where it has used ones ([`shards::Shard::spare`]),
/// nothing is allocated.
pub fn lessons(
    tree: &Tree,
    pin: &Pin<'_>,
    chain: &[PrefixHash],
    slot: Slot,
    batches: &mut Batches,
    mut spare: impl FnMut() -> Vec<PrefixHash>,
    mut emit: impl FnMut(usize, Lesson),
) {
    let (held, is_stale) = match tree.find_held_by(pin, chain, slot) {
        Some(found) => (found.blocks, found.is_stale()),
        None => (0, false),
    };
    let (old, new) = chain.split_at(held);
    if is_stale {
        batches.deal(tree, old, &mut spare, |owner, hashes| {
            emit(owner, Lesson::Touch { hashes })
        });
    }
    if new.is_empty() {
        return;
    }
    let known = tree.depth_known(pin, chain);
    if known < chain.len()
        && let Some(parent) = known.checked_sub(1).map(|last| chain[last])
    {
        emit(tree.owner(parent), Lesson::Branch { parent });
    }
    batches.deal(tree, new, &mut spare, |owner, hashes| {
        emit(
            owner,
            Lesson::Insert {
                worker: slot,
                hashes,
            },
        )
    });
}

#[cfg(test)]
#[path = "learn_tests.rs"]
mod tests;
