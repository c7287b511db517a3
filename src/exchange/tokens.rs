//! Requests whose tokens are being made of their text, before their worker is chosen (`kv_aware` with `--tokenizer`).
//!
//! ```text
//!   let in --> ask_tokens ---------------------------> seat
//!                 | asked                                ^
//!                 v                                      |
//!              Tokenizing -- on_tokens (made, or late) --+
//! ```
//!
//! Invariant **Q3** A request waits for its tokens once, and goes on whatever comes of it; it runs meanwhile (Q1).

use super::{Exchange, Session, State, World};
use crate::tokenize::Prompt;

/// What a request knows of its tokens.
#[derive(Debug, Default)]
pub(super) enum Tokens {
    /// Nobody was asked.
    #[default]
    Unasked,
    /// They are being made, under this number.
    Asked(u64),
    /// They were made.
    Made(Box<Prompt>),
    /// They are not to be had.
    Unknown,
}

impl Tokens {
    pub(super) fn prompt(&self) -> Option<&Prompt> {
        match self {
            Tokens::Made(prompt) => Some(prompt),
            _ => None,
        }
    }
}

impl Session {
    /// Whether the request waits for its tokens now.
    pub(super) fn awaits_tokens<W: World>(&mut self, world: &mut W) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        if !matches!(exchange.tokens, Tokens::Unasked) {
            return false;
        }
        let number = ask(exchange, world);
        exchange.tokens = number.map_or(Tokens::Unknown, Tokens::Asked);
        if number.is_some() {
            exchange.state = State::Tokenizing;
        }
        number.is_some()
    }

    /// The tokens asked for under a number are there, or they are late, or not to be had.
    pub fn on_tokens<W: World>(&mut self, world: &mut W, number: u64, prompt: Option<Box<Prompt>>) {
        let Some(exchange) = self.exchange.as_deref() else {
            return;
        };
        // What comes late is of a request that has gone on, or of one that was here before.
        if matches!(exchange.tokens, Tokens::Asked(asked) if asked == number) {
            self.end_tokens(world, prompt);
        }
    }

    /// The request goes on, with its tokens or without them.
    pub(super) fn end_tokens<W: World>(&mut self, world: &mut W, prompt: Option<Box<Prompt>>) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.tokens = prompt.map_or(Tokens::Unknown, Tokens::Made);
        exchange.state = State::Waiting;
        self.seat(world);
    }

    /// Whether the request waits for the tokens of this number.
    pub fn waits_for_tokens(&self, number: u64) -> bool {
        let exchange = self.exchange.as_deref();
        exchange.is_some_and(|x| matches!(x.tokens, Tokens::Asked(asked) if asked == number))
    }
}

fn ask<W: World>(exchange: &Exchange, world: &mut W) -> Option<u64> {
    let fields = exchange.fields.as_ref().filter(|_| exchange.is_whole)?;
    let body = &exchange.message[exchange.body_at..];
    world.ask_tokens(exchange.route, body, fields)
}
