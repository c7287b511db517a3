//! Prompts of this core whose tokens are being made elsewhere: handed over with a copy of the body, waited for so long and no
//! longer. Nothing here waits: the core goes on, and is told.

use std::collections::VecDeque;

use super::Core;
use super::hands::Turn;
use crate::config::Config;
use crate::ring::Token;
use crate::route::{self, Fields, PolicyKind, Role};
use crate::shared::Route;
use crate::tokenize::{BODY_BYTES_MAX, Done, Fate, Job};

/// Who waits, by the time at which it is too late. All wait equally long, so they stand in order.
#[derive(Default)]
pub(super) struct TokenWaits {
    waits: VecDeque<Wait>,
    /// Of the last one.
    number: u64,
}

struct Wait {
    asked_ns: u64,
    late_ns: u64,
    client: Token,
    number: u64,
}

impl TokenWaits {
    /// When the first is too late.
    pub(super) fn next_ns(&self) -> Option<u64> {
        self.waits.front().map(|wait| wait.late_ns)
    }

    /// The first, if it is too late for it.
    fn pop_late(&mut self, now_ns: u64) -> Option<Wait> {
        let is_late = self.next_ns().is_some_and(|at| at <= now_ns);
        is_late.then(|| self.waits.pop_front()).flatten()
    }

    /// An answer is there.
    fn remove(&mut self, number: u64) -> Option<Wait> {
        let place = self.waits.binary_search_by_key(&number, |wait| wait.number);
        self.waits.remove(place.ok()?)
    }
}

impl Core {
    /// Hands a prompt over, if its tokens are wanted and there is room: its number.
    pub(super) fn ask_tokens(
        &mut self,
        client: Token,
        route: Route,
        body: &[u8],
        fields: &Fields,
    ) -> Option<u64> {
        let now_ns = self.clock_ns();
        let shared = &*self.shared;
        let (desk, kv) = (shared.desk.as_ref()?, shared.kv.as_ref()?);
        let config = self.config.kv.tokenizer.as_ref()?;
        let is_wanted = uses_tokens(&self.config)
            && route::is_text(route, body, fields)
            && kv.index.is_anybody_trusted();
        if !is_wanted {
            return None;
        }
        if body.len() > BODY_BYTES_MAX {
            desk.count(Fate::TooLong);
            return None;
        }
        let copy = self.shelf.take();
        let (mut copy, _) = self.shelf.grow(copy, body.len());
        copy.extend_from_slice(body);
        let number = self.token_waits.number + 1;
        let job = Job {
            core: self.index,
            client: u64::from(client.generation) << 32 | u64::from(client.index),
            number,
            route,
            body: copy,
            fields: fields.clone(),
        };
        if let Err(job) = desk.try_put(job) {
            desk.count(Fate::Full);
            self.shelf.put(job.body);
            return None;
        }
        self.token_waits.number = number;
        self.token_waits.waits.push_back(Wait {
            asked_ns: now_ns,
            late_ns: now_ns + config.timeout.as_nanos() as u64,
            client,
            number,
        });
        Some(number)
    }

    /// Tokens are there, or cannot be told.
    pub(super) fn tokens_came(&mut self, turn: Turn<'_>, done: Done) {
        let client = Token {
            index: done.client as u32,
            generation: (done.client >> 32) as u32,
        };
        if let Some(wait) = self.token_waits.remove(done.number) {
            self.record_token_wait(wait.asked_ns);
        }
        self.with_session(turn, client, |session, hands| {
            session.on_tokens(hands, done.number, done.prompt)
        });
        self.shelf.put(done.body);
    }

    fn record_token_wait(&self, asked_ns: u64) {
        let waited_ns = self.clock_ns().saturating_sub(asked_ns);
        self.stats().kv.token_wait.record(waited_ns);
    }

    /// Requests that have waited for their tokens long enough go on without them.
    pub(super) fn end_token_waits(&mut self, turn: Turn<'_>) {
        while let Some(wait) = self.token_waits.pop_late(turn.now_ns) {
            self.record_token_wait(wait.asked_ns);
            self.with_session(turn, wait.client, |session, hands| {
                if session.waits_for_tokens(wait.number)
                    && let Some(desk) = &hands.core.shared.desk
                {
                    desk.count(Fate::Late);
                    session.on_tokens(hands, wait.number, None);
                }
            });
        }
    }
}

/// Whether some choice looks at tokens. Decode goes by load.
fn uses_tokens(config: &Config) -> bool {
    let mut roles = config.needed_roles().iter();
    roles.any(|role| {
        *role != Role::Decode && config.settings_of(*role).policy == PolicyKind::KvAware
    })
}
