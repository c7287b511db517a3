//! What a prompt says, without its words: runs of tokens with a name each. Two prompts are the same up to where their
//! runs are the same; so a run's name stands for all before it, too.

use shards::PrefixHash;

use crate::route::{Rng, bytes_of_blocks};

/// Bytes that a token counts for in the router of a simulation. The policies go by shares, so it matters only for where a
/// match may end: here after every 128 tokens. Four, as text has, would make a run take four times as long.
pub const TOKEN_BYTES: u64 = 1;

/// A run of tokens, up to a place in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Whose text it is: equal names at equal places are equal text, and equal text before it.
    pub name: u64,
    /// Where it ends, in tokens from the prompt's start.
    pub end: u32,
}

/// A prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    runs: Vec<Run>,
}

impl Content {
    /// Appends a run of some tokens. Nothing of none.
    pub fn push(&mut self, name: u64, tokens: u32) {
        if tokens == 0 {
            return;
        }
        let end = self.tokens() + tokens;
        match self.runs.last_mut() {
            Some(last) if last.name == name => last.end = end,
            _ => self.runs.push(Run { name, end }),
        }
    }

    /// Cuts it off after some tokens.
    pub fn truncate(&mut self, tokens: u32) {
        while let Some(last) = self.runs.pop() {
            let start = self.tokens();
            if start < tokens {
                let end = last.end.min(tokens);
                self.runs.push(Run { end, ..last });
                return;
            }
        }
    }

    /// What it is made of, in order.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Its length.
    pub fn tokens(&self) -> u32 {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// The same in other words: each run under another name.
    #[must_use]
    pub fn renamed(&self, name: impl Fn(u64) -> u64) -> Content {
        let run = |run: &Run| Run {
            name: name(run.name),
            ..*run
        };
        Content {
            runs: self.runs.iter().map(run).collect(),
        }
    }

    /// Its length in bytes, as the router counts.
    pub fn bytes(&self) -> u64 {
        u64::from(self.tokens()) * TOKEN_BYTES
    }

    /// The name of its begin: what a cache salt, a tenant or a system prompt would be.
    pub fn first_name(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.name)
    }

    /// The name of its end.
    pub fn last_name(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.name)
    }

    /// The router's chain of it: blocks cut as [`chain`](crate::route::chain) cuts them.
    pub fn chain(&self, out: &mut Vec<PrefixHash>) {
        out.clear();
        let length = self.bytes();
        let mut runs = self.runs.iter();
        let Some(mut run) = runs.next() else { return };
        for index in 0.. {
            let end = bytes_of_blocks(index + 1);
            if end > length {
                return;
            }
            while u64::from(run.end) * TOKEN_BYTES < end {
                let Some(next) = runs.next() else { return };
                run = next;
            }
            out.push(PrefixHash(mix(run.name, index as u64).max(1)));
        }
    }

    /// The engine's names of the whole blocks of `tokens` tokens in it and what follows it (its answer).
    pub fn blocks(&self, block_tokens: u32, answer_tokens: u32) -> Box<[u64]> {
        let total = self.tokens() + answer_tokens;
        let mut runs = self.runs.iter().peekable();
        let count = total / block_tokens;
        let name_at = |index: u32| {
            let end = (index + 1) * block_tokens;
            while let Some(run) = runs.peek()
                && run.end < end
            {
                runs.next();
            }
            // What follows the last run goes on under its name: so does the next turn of a conversation.
            let run = runs.peek().copied().or(self.runs.last());
            mix(run.map_or(0, |run| run.name) ^ 0x5eed, u64::from(index))
        };
        (0..count).map(name_at).collect()
    }
}

/// A name and a number, mixed.
pub fn mix(name: u64, number: u64) -> u64 {
    Rng::new(name ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93)).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(runs: &[(u64, u32)]) -> Content {
        let mut content = Content::default();
        runs.iter()
            .for_each(|(name, tokens)| content.push(*name, *tokens));
        content
    }

    fn shared(a: &Content, b: &Content) -> (usize, usize) {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        a.chain(&mut one);
        b.chain(&mut other);
        let chains = one.iter().zip(&other).take_while(|(a, b)| a == b);
        let (one, other) = (a.blocks(16, 0), b.blocks(16, 0));
        let blocks = one.iter().zip(&other).take_while(|(a, b)| a == b);
        (chains.count(), blocks.count())
    }

    #[test]
    fn prompts_share_the_whole_blocks_of_what_they_share() {
        let system = content(&[(1, 1000), (2, 500)]);
        // 1,000 tokens are 7 blocks of 128, and 62 of 16.
        assert_eq!(shared(&system, &content(&[(1, 1000), (3, 900)])), (7, 62));
        assert_eq!(shared(&system, &content(&[(4, 1500)])), (0, 0));
        let mut chain = Vec::new();
        system.chain(&mut chain);
        assert_eq!((chain.len(), system.blocks(16, 0).len()), (11, 93));
    }

    #[test]
    fn the_answer_is_cached_for_the_turn_that_repeats_it() {
        let first = content(&[(1, 100), (2, 60)]);
        let next = content(&[(1, 100), (2, 160)]);
        assert_eq!(next.blocks(16, 0)[..11], first.blocks(16, 16)[..]);
    }

    #[test]
    fn a_cut_conversation_differs_from_the_cut_on() {
        let whole = content(&[(1, 100), (2, 300)]);
        let mut cut = whole.clone();
        cut.truncate(200);
        cut.push(3, 200);
        assert_eq!((cut.tokens(), shared(&whole, &cut)), (400, (1, 12)));
        cut.truncate(0);
        assert_eq!(cut, Content::default());
    }

    #[test]
    fn long_prompts_are_cut_into_long_blocks_where_the_router_does() {
        let mut chain = Vec::new();
        content(&[(1, 524_288 + 8192)]).chain(&mut chain);
        assert_eq!(chain.len(), 4096 + 2);
    }
}
