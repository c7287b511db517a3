//! What `kv_aware` knows of the prompt at hand: its tokens, the keys of their blocks, and what each worker need not compute.
//! One a core, reused from request to request; nothing is asked of anybody.

use shards::{Pin, PrefixHash, Slot};

use crate::exchange::Ask;
use crate::route::{self, Candidates, Credits, Found, Index, Prefixes, Settings, Tokens};

/// See the top of the file.
#[derive(Default)]
pub(super) struct Blocks {
    ids: Vec<u32>,
    chain: Vec<PrefixHash>,
    credits: Credits,
    /// Tokens of the prompt; `None`: nobody told them, or they were not read yet.
    count: Option<u64>,
    is_read: bool,
}

impl Blocks {
    /// Another prompt comes.
    pub(super) fn clear(&mut self) {
        (self.count, self.is_read) = (None, false);
    }

    /// Reads the tokens of a request, once, and makes the keys of their blocks.
    pub(super) fn read(&mut self, index: &Index, base_model: Option<&str>, ask: &Ask<'_>) {
        if std::mem::replace(&mut self.is_read, true) {
            return;
        }
        if let Some(prompt) = ask.prompt {
            // The request waited for these: made of its text, off the cores.
            self.count = Some(prompt.count);
            self.chain.clear();
            return self.chain.extend_from_slice(&prompt.chain);
        }
        let Some((body, fields)) = ask.key else {
            return;
        };
        self.count = route::token_ids(ask.route, body, fields, &mut self.ids);
        if self.count.is_some() {
            let (ids, chain) = (&self.ids, &mut self.chain);
            route::request_chain(index, base_model, ids, body, fields, ask.model, chain);
        }
    }

    /// The prompt as `kv_aware` wants it. `None`: its tokens are not known, or nobody's blocks are: the tree serves.
    ///
    /// `prefix`: the prompt's place in the approximate tree, with its length, for the workers about which nothing exact is known.
    pub(super) fn tokens<'k, P: Prefixes>(
        &'k mut self,
        index: &'k Index,
        pin: &'k Pin<'k>,
        settings: &Settings,
        candidates: &Candidates,
        prefix: Option<(&P, u64)>,
    ) -> Option<Tokens<'k>> {
        let count = self.count.filter(|count| *count > 0)?;
        index.list_blind(candidates, &mut self.credits.blind);
        if self.credits.blind.len() == candidates.len() {
            return None;
        }
        let holdings = index.look_up(
            pin,
            &self.chain,
            count,
            settings,
            candidates,
            &mut self.credits,
        );
        if let Some((prefixes, length)) = prefix.filter(|_| !self.credits.blind.is_empty()) {
            let is_guessed = |slot: Slot| self.credits.blind.contains(&slot);
            if let Some(found) = prefixes.find(is_guessed) {
                let share = route::bytes_of_blocks(found.blocks()) as f64 / length.max(1) as f64;
                for slot in found.holders() {
                    if self.credits.blind.contains(&slot) {
                        self.credits.guess(slot, count, share);
                    }
                }
            }
        }
        Some(Tokens {
            count,
            credits: &self.credits,
            holdings,
        })
    }

    /// Tokens of the prompt; 0: not known.
    pub(super) fn token_count(&self) -> u64 {
        self.count.unwrap_or(0)
    }

    /// Of a prompt of `length` bytes those that need not be computed, when `new` of its tokens must be.
    pub(super) fn known_bytes(&self, new: u64, length: u64) -> u64 {
        let count = self.token_count().max(1);
        let known = count.saturating_sub(new);
        (u128::from(length) * u128::from(known) / u128::from(count)) as u64
    }
}
