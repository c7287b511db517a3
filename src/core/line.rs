//! The line before the gate, as far as it is this core's: who waits for a turn, who waits aside for a worker, who may go.
//!
//! Owned by one core; the gate orders the cores' lines among each other (`shards::Gate`). Those aside hold no ticket any
//! more: they are tried again, in their order, when somebody leaves, when the fleet changes, and four times a second.

use std::collections::VecDeque;

use shards::{Entry, Permit};

use super::Core;
use super::hands::Turn;
use crate::exchange::Entrance;
use crate::ring::Token;
use crate::shared::ToCore;

/// Of those aside, how many may look for a worker in vain before the others wait for the next quarter of a second, when all
/// are tried. Not one, as they may ask for different models.
const IN_VAIN_MAX: usize = 8;

/// This core's part of the line.
#[derive(Default)]
pub struct Line {
    /// By ticket; the gate shows the first one's.
    waiting: VecDeque<(u64, Token)>,
    aside: VecDeque<Token>,
    /// Let in; looked at when the session at work is done.
    ready: VecDeque<(Token, Permit)>,
    /// The gate's claim on this line is for one that has left.
    has_claim_without_owner: bool,
    /// Those aside may find something now: so many may look in vain. 0: there is no occasion.
    in_vain_max: usize,
}

impl Line {
    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.aside.is_empty()
    }

    /// Those aside are to be tried again, the first of them at least.
    pub fn rouse(&mut self) {
        self.in_vain_max = self.in_vain_max.max(IN_VAIN_MAX);
    }

    /// The same of all.
    pub fn rouse_all(&mut self) {
        self.in_vain_max = usize::MAX;
    }

    fn head(&self) -> Option<u64> {
        self.waiting.front().map(|(ticket, _)| *ticket)
    }
}

impl Core {
    fn request_limit(&self) -> u32 {
        self.config.request_count_max
    }

    /// A client's request comes to the gate.
    pub fn enter_gate(&mut self, client: Token) -> Entrance {
        let gate = self.shared.gate;
        let has_begun = self.shared.may_begin(&self.config);
        // Without a token it waits as where too many run.
        let limit = if has_begun { self.request_limit() } else { 0 };
        let entry = gate.enter(limit, self.config.queue_count_max);
        if has_begun && !matches!(entry, Entry::Admitted(_)) {
            self.shared.has_not_begun(&self.config);
        }
        match entry {
            Entry::Admitted(permit) => Entrance::Admitted(permit),
            Entry::Full => Entrance::Full,
            Entry::Queued(ticket) => {
                self.line.waiting.push_back((ticket, client));
                if self.line.waiting.len() == 1 && !self.line.has_claim_without_owner {
                    gate.show(self.index, Some(ticket));
                }
                self.pass_on();
                Entrance::Queued
            }
        }
    }

    /// It waits aside for a worker.
    pub fn step_aside(&mut self, client: Token, permit: Permit) -> Result<(), Permit> {
        permit.step_aside(self.config.queue_count_max)?;
        self.line.aside.push_back(client);
        self.show_aside();
        self.pass_on();
        Ok(())
    }

    /// It does not wait any more.
    pub fn stop_waiting(&mut self, client: Token) {
        let gate = self.shared.gate;
        let line = &mut self.line;
        if let Some(at) = line.ready.iter().position(|(token, _)| *token == client) {
            if let Some((_, permit)) = line.ready.remove(at) {
                self.leave_gate(permit);
            }
        } else if let Some(at) = line.aside.iter().position(|token| *token == client) {
            line.aside.remove(at);
            gate.stop_waiting();
            self.show_aside();
        } else if let Some(at) = line.waiting.iter().position(|(_, token)| *token == client) {
            let Some((ticket, _)) = line.waiting.remove(at) else {
                return;
            };
            let is_claimed = at == 0
                && !line.has_claim_without_owner
                && !gate.replace_head(self.index, ticket, line.head());
            if !is_claimed {
                gate.stop_waiting();
                self.pass_on();
            } else {
                line.has_claim_without_owner = true;
            }
        }
    }

    /// A request is over.
    pub fn leave_gate(&mut self, permit: Permit) {
        self.stats().left.add(1);
        if !permit.leave() {
            return;
        }
        self.pass_on();
        self.line.rouse();
        if self.config.worker_request_count_max < u32::MAX {
            self.shared.rouse(Some(self.index));
        }
    }

    /// Lets in whom there is room for.
    pub fn pass_on(&mut self) {
        while let Some(core) = self.shared.pass_on(&self.config) {
            if core == self.index {
                self.take_claim();
            } else {
                self.shared.cores[core].post(ToCore::YourTurn);
            }
        }
    }

    /// The head of this line has been let in.
    pub fn take_claim(&mut self) {
        let gate = self.shared.gate;
        let permit = gate.take();
        let line = &mut self.line;
        let owner = match std::mem::take(&mut line.has_claim_without_owner) {
            true => None,
            false => line.waiting.pop_front(),
        };
        gate.show(self.index, line.head());
        match owner {
            Some((_, client)) => line.ready.push_back((client, permit)),
            None => {
                drop(permit); // `pass_on` follows in any case.
                self.shared.has_not_begun(&self.config);
            }
        }
    }

    /// Those who have been let in go on, and those aside are tried again.
    pub fn let_in(&mut self, turn: Turn<'_>) {
        loop {
            let in_vain_max = std::mem::take(&mut self.line.in_vain_max);
            self.try_aside(turn, in_vain_max);
            let Some((client, permit)) = self.line.ready.pop_front() else {
                return;
            };
            self.give_turn(turn, client, permit);
        }
    }

    fn give_turn(&mut self, turn: Turn<'_>, client: Token, permit: Permit) {
        let mut permit = Some(permit);
        self.with_session(turn, client, |session, hands| {
            if let Some(permit) = permit.take() {
                session.on_turn(hands, permit);
            }
        });
        if let Some(permit) = permit {
            self.leave_gate(permit);
        }
    }

    fn try_aside(&mut self, turn: Turn<'_>, in_vain_max: usize) {
        if in_vain_max == 0 || self.line.aside.is_empty() {
            return;
        }
        let mut before = std::mem::take(&mut self.line.aside);
        while self.line.aside.len() < in_vain_max
            && let Some(client) = before.front().copied()
            && let Some(permit) = self.shared.gate.resume(self.request_limit())
        {
            before.pop_front();
            // In vain, it stands aside again, behind those who were before it.
            self.give_turn(turn, client, permit);
        }
        self.line.aside.append(&mut before);
        self.show_aside();
    }

    fn show_aside(&self) {
        self.stats().aside.set(self.line.aside.len() as u64);
    }
}
