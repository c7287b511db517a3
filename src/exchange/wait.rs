//! Requests that wait: for their turn at the gate, for a worker with room, or for any worker at all.
//!
//! ```text
//!   request here --> enter ----------------------> seat ----> dial
//!                      | too many run                | workers full, or none     each with its time limit;
//!                      v                             v                           a client that leaves gives
//!                   Queued (in line) -- on_turn -->  Queued (aside) -- on_turn   its place up
//! ```
//!
//! Invariants:
//! - **Q1** A request that may use workers holds a permit until its last byte; one that waits holds none, and no seat.
//! - **Q2** A request waits before its first leg only, or, outside P/D, between two attempts: blocks never wait.

use shards::Permit;

use super::{Exchange, NoSeat, Outcome, Session, State, World, first_limit, hold, pd, twin};
use crate::http::Refusal;

/// What a request that asks to be let in gets.
#[derive(Debug)]
pub enum Entrance {
    /// It runs.
    Admitted(Permit),
    /// It waits in line; `on_turn` will follow.
    Queued,
    /// Neither: too many wait.
    Full,
    /// Neither: too many wait, and there is no worker to wait for.
    NoWorker,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Its turn: `--max-concurrent-requests` run.
    Turn,
    /// A worker with room: all have `--worker-max-concurrent`.
    Room,
    /// A worker.
    Worker,
}

/// A wait: for what now and since when, and since when in all, ns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) what: What,
    pub(super) what_since_ns: u64,
    pub(super) since_ns: u64,
}

impl Session {
    /// Whether the request may use workers now. If not, it waits or has been refused.
    pub(super) fn is_let_in<W: World>(&mut self, world: &mut W) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        if exchange.permit.is_some() {
            return true;
        }
        match world.enter() {
            Entrance::Admitted(permit) => {
                exchange.permit = Some(permit);
                true
            }
            Entrance::Queued => {
                if let Err((refusal, outcome)) = hold::hold_in_queue(exchange, world) {
                    world.stop_waiting();
                    self.refuse_with(world, &refusal, outcome, true);
                } else {
                    await_turn(exchange, world, What::Turn);
                }
                false
            }
            Entrance::NoWorker => {
                let (refusal, outcome) = super::no_seat(NoSeat::NoneEligible, exchange, world);
                self.refuse_with(world, &refusal, outcome, true);
                false
            }
            Entrance::Full => {
                let (refusal, outcome) = overloaded(429, "too many requests run and wait", world);
                self.refuse_with(world, &refusal, outcome, true);
                false
            }
        }
    }

    /// There is no seat: whether the request waits for one.
    pub(super) fn waits_for_seat<W: World>(&mut self, world: &mut W, why: NoSeat) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let what = match why {
            NoSeat::Full => What::Room,
            NoSeat::NoneEligible if !world.config().no_worker_wait.is_zero() => What::Worker,
            _ => return false,
        };
        if pd::has_begun(exchange) || is_over(exchange, world, what) {
            return false;
        }
        if hold::hold_in_queue(exchange, world).is_err() {
            return false;
        }
        let Some(permit) = exchange.permit.take() else {
            return false;
        };
        if let Err(permit) = world.step_aside(permit) {
            exchange.permit = Some(permit);
            exchange.queue_held.release();
            return false;
        }
        // Q1: of two seats one may have been there.
        exchange.seat = None;
        if let Some(pd) = exchange.pd.as_mut() {
            pd.reserved = None;
        }
        await_turn(exchange, world, what);
        true
    }

    /// The request's turn: it is let in, or may look for a seat again.
    pub fn on_turn<W: World>(&mut self, world: &mut W, permit: Permit) {
        let Some(exchange) = self.exchange.as_deref_mut().filter(|x| is_queued(x)) else {
            return world.leave(permit);
        };
        exchange.permit = Some(permit);
        exchange.queue_held.release();
        exchange.state = if exchange.incoming.is_done() {
            State::Waiting
        } else {
            State::Streaming
        };
        exchange.served_ns = world.now_ns();
        self.seat(world);
    }

    /// A time limit of a request that waits: to be asked whether its client is there, or to be refused.
    pub(super) fn on_wait_deadline<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let Some(wait) = exchange.wait else { return };
        if !is_over(exchange, world, wait.what) {
            if world.now_ns() >= exchange.probe_at_ns {
                exchange.probe_at_ns = u64::MAX;
                super::probe(exchange, world);
            }
            let at = wait_limit(exchange, world, wait.what).min(exchange.probe_at_ns);
            return world.deadline(at);
        }
        let (refusal, outcome) = match wait.what {
            What::Worker => super::no_seat(NoSeat::NoneEligible, exchange, world),
            What::Turn | What::Room => {
                overloaded(503, "the request waited too long for its turn", world)
            }
        };
        self.refuse_with(world, &refusal, outcome, true);
    }
}

pub(super) fn is_queued(exchange: &Exchange) -> bool {
    exchange.state == State::Queued
}

/// A seat has been found.
pub(super) fn end_wait<W: World>(exchange: &mut Exchange, world: &mut W) {
    if let Some(wait) = exchange.wait.take() {
        world.record_wait(world.now_ns().saturating_sub(wait.since_ns));
    }
}

/// The exchange is over: its place is somebody else's.
pub(super) fn leave<W: World>(exchange: &mut Exchange, world: &mut W) {
    if is_queued(exchange) {
        world.stop_waiting();
    }
    if let Some(permit) = exchange.permit.take() {
        world.leave(permit);
    }
}

/// 429 or 503, with the time after which it may be otherwise.
pub(super) fn overloaded<W: World>(
    status: u16,
    message: &'static str,
    world: &W,
) -> (Refusal, Outcome) {
    let code = match status {
        429 => "too_many_requests",
        _ => "queue_timeout",
    };
    let mut refusal = Refusal::new(status, code, message);
    refusal.retry_after_secs = world.retry_after_secs();
    (refusal, Outcome::Overloaded)
}

fn await_turn<W: World>(exchange: &mut Exchange, world: &mut W, what: What) {
    let now_ns = world.now_ns();
    exchange.wait = Some(Wait {
        what,
        what_since_ns: waits_since(exchange, what).unwrap_or(now_ns),
        since_ns: exchange.wait.map_or(now_ns, |wait| wait.since_ns),
    });
    exchange.state = State::Queued;
    let at = wait_limit(exchange, world, what).min(exchange.probe_at_ns);
    world.deadline(twin::due(exchange, world, at));
}

fn is_over<W: World>(exchange: &Exchange, world: &W, what: What) -> bool {
    world.now_ns() >= wait_limit(exchange, world, what)
}

/// Since when the request has waited for this, and for nothing else since.
fn waits_since(exchange: &Exchange, what: What) -> Option<u64> {
    let wait = exchange.wait.filter(|wait| wait.what == what);
    wait.map(|wait| wait.what_since_ns)
}

/// The queue's time counts from the wait's begin, whatever it waited for; that for a worker from when none was there.
fn wait_limit<W: World>(exchange: &Exchange, world: &W, what: What) -> u64 {
    let config = world.config();
    let (since_ns, time) = match what {
        What::Worker => (waits_since(exchange, what), config.no_worker_wait),
        What::Turn | What::Room => (
            exchange.wait.map(|wait| wait.since_ns),
            config.queue_timeout,
        ),
    };
    let since_ns = since_ns.unwrap_or_else(|| world.now_ns());
    (since_ns + time.as_nanos() as u64).min(first_limit(exchange, world))
}
