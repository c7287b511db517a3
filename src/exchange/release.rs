//! An orphaned hand-over: a prefill worker keeps blocks for a decode leg that nobody waits for any more. The decode leg
//! is sent all the same, in its cheapest form, so that the blocks are fetched and freed.
//!
//! A session without a client, in a place of its own; it ends by itself. Invariant P1 of `pd` holds here as well: a
//! worker that may have got the parameters is the last one to be asked. So that one that cannot have read them is known
//! from one that may have, each connection is a fresh one.

use super::{Head, Leg, PdEvent, Place, Session, World, choose, end_leg, pd, read_head};
use crate::route::Role;

impl Session {
    /// Of an exchange that has ended before its decode worker got the parameters; it still holds the decode seat.
    pub(super) fn of_orphan(mut exchange: Place) -> Session {
        exchange.leg = Leg::None;
        exchange.message_is_out = false;
        exchange.broken = false;
        if let Some(pd) = exchange.pd.as_mut() {
            pd.stage = pd::Stage::Release;
        }
        Session {
            release: Some(exchange),
            ..Session::default()
        }
    }

    pub(super) fn begin_release<W: World>(&mut self, world: &mut W) {
        let config = world.config().pd.as_ref();
        let time = config.map_or(0, |config| config.release_timeout.as_nanos() as u64);
        let at = world.now_ns() + time;
        world.deadline(at);
        self.dial_release(world);
    }

    fn dial_release<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.release.as_deref_mut() else {
            return;
        };
        exchange.answer_begun = false;
        exchange.partial_head.clear();
        match world.dial(exchange.slot, true) {
            super::Dial::Reused => {
                exchange.leg = Leg::Reused;
                self.send_release(world);
            }
            super::Dial::Connecting => exchange.leg = Leg::Connecting,
            super::Dial::Refused => self.release_elsewhere(world),
        }
    }

    /// The connection is there.
    pub(super) fn send_release<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.release.as_deref_mut() else {
            return;
        };
        if exchange.leg == Leg::Connecting {
            exchange.leg = Leg::Fresh;
        }
        let Some(message) = pd::write_message(exchange, world) else {
            return self.release_elsewhere(world);
        };
        if let Some(seat) = &exchange.seat {
            seat.activate();
        }
        exchange.sent = true;
        exchange.message_is_out = true;
        if let Some(message) = world.send_message(message) {
            exchange.message_is_out = false;
            world.recycle(message);
        }
    }

    /// Nobody got the parameters yet: another decode worker may.
    fn release_elsewhere<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.release.as_deref_mut() else {
            return;
        };
        end_leg(exchange, world, false);
        exchange.leg = Leg::None;
        exchange.tried.push(exchange.slot);
        exchange.role = Role::Decode;
        match choose(exchange, world) {
            Ok(_) => self.dial_release(world),
            Err(_) => self.end_release(world, PdEvent::Lost),
        }
    }

    pub(super) fn on_release_bytes<W: World>(&mut self, world: &mut W, bytes: &[u8]) {
        let Some(exchange) = self.release.as_deref_mut() else {
            return;
        };
        exchange.answer_begun = true;
        let mut whole = std::mem::take(&mut exchange.partial_head);
        whole.extend_from_slice(bytes);
        loop {
            let mut out = world.buffer();
            let head = read_head(exchange, world, &whole, &mut out);
            world.recycle(out);
            match head {
                Head::Partial => {
                    exchange.partial_head = whole;
                    return;
                }
                Head::Interim(len) => {
                    whole.drain(..len);
                    if whole.is_empty() {
                        return;
                    }
                }
                // It answers when it has generated its token, and so has the blocks; not if it has not read the request.
                Head::Final { .. } if exchange.status < 300 && !exchange.message_is_out => {
                    return self.end_release(world, PdEvent::Released);
                }
                Head::Final { .. } | Head::Broken => {
                    return self.end_release(world, PdEvent::Lost);
                }
            }
        }
    }

    pub(super) fn on_release_broken<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.release.as_deref_mut() else {
            return;
        };
        if exchange.message_is_out {
            exchange.broken = true;
            return world.break_leg();
        }
        world.end_leg(false);
        let leg = std::mem::replace(&mut exchange.leg, Leg::None);
        match leg {
            Leg::Connecting => {
                super::sign(exchange, world, super::Sign::Failed);
                self.release_elsewhere(world);
            }
            _ => self.end_release(world, PdEvent::Lost),
        }
    }

    pub(super) fn on_release_sent<W: World>(&mut self, world: &mut W, bytes: Vec<u8>) {
        world.recycle(bytes);
        if let Some(exchange) = self.release.as_deref_mut() {
            exchange.message_is_out = false;
            if std::mem::take(&mut exchange.broken) {
                self.on_release_broken(world);
            }
        }
    }

    pub(super) fn end_release<W: World>(&mut self, world: &mut W, event: PdEvent) {
        let Some(mut exchange) = self.release.take() else {
            return;
        };
        end_leg(&exchange, world, false);
        world.count_pd(event);
        world.recycle(std::mem::take(&mut exchange.message));
        self.finished = true;
        world.abort();
    }
}
