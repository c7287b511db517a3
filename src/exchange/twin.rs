//! Both legs at once (MoRI-IO WRITE): a prefill worker that writes its blocks into those which the decode worker has set
//! aside waits for the decode request, so one leg after the other would wait for ever.
//!
//! ```text
//!   choose both --+--> prefill leg, an errand: a session without a client ----> Done | Failed
//!                 |                                   (Course, shared)            |
//!                 +--> decode leg, the exchange's own; its answer is held until --+
//! ```
//!
//! Invariants:
//! - **W1** The prefill seat lives in the errand, the decode seat in the exchange; each is given back with its owner.
//! - **W2** An exchange that ends, or begins anew, drops its [`Twin`], and the errand ends within [`POLL_NS`].
//! - **W3** A decode answer below 300 reaches the client only once prefill is done; one above is looked at at once, as
//!   prefill would wait for ever for a worker that has refused.

use std::cell::RefCell;
use std::rc::Rc;

use shards::{LoadGuard, Slot};

use super::{Exchange, Leg, PdEvent, Session, Sign, Stage, State, World, end_leg, limit, pd};
use crate::config::Connector;
use crate::http::body::{Body, Framing};
use crate::http::response;
use crate::route::{self, Role, UsageFix};
use crate::shared::TransferMode;

/// How often each looks what became of the other.
const POLL_NS: u64 = 250_000_000;
/// The same while an answer waits for nothing else.
const POLL_HELD_NS: u64 = 2_000_000;
/// Most that is held of a decode answer.
const HELD_BYTES_MAX: usize = 1 << 20;
/// The errand has its whole time, and a moment to say that it is over, before the decode worker is blamed.
pub(super) const GRACE_NS: u64 = 1_000_000_000;

/// What became of the prefill leg, or of those who wait for it.
#[derive(Default)]
enum Course {
    #[default]
    Running,
    Done(Option<UsageFix>),
    Failed(Failure),
    /// Nobody waits.
    Abandoned,
}

#[derive(Default)]
struct Failure {
    /// What the worker answered, as it came; empty: it did not.
    raw: Vec<u8>,
    /// A kept-alive connection had died: nobody's failure.
    is_resend: bool,
    /// It broke off with the request in its hands.
    has_request: bool,
}

/// The exchange's end. Dropped: nobody waits any more.
pub(super) struct Twin {
    course: Rc<RefCell<Course>>,
    slot: Slot,
    is_trial: bool,
}

impl Drop for Twin {
    fn drop(&mut self) {
        *self.course.borrow_mut() = Course::Abandoned;
    }
}

/// The prefill leg.
pub(super) struct Errand {
    course: Rc<RefCell<Course>>,
    message: Option<Vec<u8>>,
    message_is_out: bool,
    broken: bool,
    seat: LoadGuard,
    slot: Slot,
    is_trial: bool,
    leg: Leg,
    /// Since when the worker owes something, ns.
    since_ns: u64,
    status: u16,
    /// The answer, as far as it is to be kept as it came.
    raw: Vec<u8>,
    body: Option<Body>,
    collected: Vec<u8>,
    answer_begun: bool,
    keeps: bool,
}

impl Errand {
    fn is_abandoned(&self) -> bool {
        matches!(*self.course.borrow(), Course::Abandoned)
    }

    fn limit_ns<W: World>(&self, world: &W) -> u64 {
        let config = world.config();
        let time = match self.leg {
            Leg::Connecting => config.connect_timeout,
            _ => config.first_byte_timeout,
        };
        self.since_ns + time.as_nanos() as u64
    }
}

/// Whether a prefill worker writes its blocks.
pub(super) fn is_write<W: World>(world: &W, prefill: Slot) -> bool {
    let config = world.config().pd.as_ref();
    config.is_some_and(|config| config.connector == Connector::MoriIo)
        && world
            .worker(prefill)
            .is_some_and(|worker| worker.kv.transfer_mode == Some(TransferMode::Write))
}

/// `kv_transfer_params` of MoRI-IO up to the transfer id, for either leg, READ or WRITE.
pub(super) fn params_start(stage: Stage, transfer_id: &[u8; 32]) -> String {
    let is_prefill = stage == Stage::Prefill;
    let id = String::from_utf8_lossy(transfer_id);
    format!(
        r#"{{"do_remote_decode":{is_prefill},"do_remote_prefill":{},"remote_engine_id":null,"remote_block_ids":null,"transfer_id":"tx-{id}""#,
        !is_prefill
    )
}

/// All of them for WRITE: what the worker of this leg is told of its peer.
pub(super) fn params<W: World>(
    world: &W,
    stage: Stage,
    transfer_id: &[u8; 32],
    peer: Option<Slot>,
) -> Vec<u8> {
    use std::fmt::Write;
    let mut params = params_start(stage, transfer_id);
    let worker = peer.and_then(|slot| world.worker(slot));
    let (dp, tp) = worker.map_or((1, 1), |worker| (worker.kv.dp_size, worker.kv.tp_size));
    let _ = write!(params, ",\"remote_dp_size\":{dp},\"remote_tp_size\":{tp}");
    if dp > 1
        && let Some(rank) = worker.and_then(|worker| worker.rank)
    {
        let _ = write!(params, ",\"remote_dp_rank\":{rank}");
    }
    params.push('}');
    params.into_bytes()
}

/// When an exchange's session is to look again, at the latest when `at_ns`.
pub(super) fn due<W: World>(exchange: &Exchange, world: &W, at_ns: u64) -> u64 {
    let wait_ns = match exchange.pd.as_ref().and_then(|pd| pd.twin.as_ref()) {
        None => return at_ns,
        Some(_) if exchange.partial_head.is_empty() => POLL_NS,
        Some(_) => POLL_HELD_NS,
    };
    at_ns.min(world.now_ns() + wait_ns)
}

/// Whether a held answer says that the decode worker will not do it.
fn is_refusal(held: &[u8]) -> bool {
    matches!(held.get(8..10), Some([b' ', b'3'..=b'5']))
}

impl Session {
    /// Both seats are taken: the prefill leg goes its own way, and the exchange is in its decode leg. The decode worker;
    /// `None`: the prefill worker has just gone.
    pub(super) fn split<W: World>(&mut self, world: &mut W) -> Option<Slot> {
        let exchange = self.exchange.as_deref_mut()?;
        let message = pd::write_message(exchange, world)?;
        let pd = exchange.pd.as_mut()?;
        let (Some(seat), Some(reserved)) = (exchange.seat.take(), pd.reserved.take()) else {
            world.recycle(message);
            return None;
        };
        let course = Rc::new(RefCell::new(Course::Running));
        let (slot, is_trial) = (exchange.slot, exchange.is_trial);
        pd.params = Some(params(world, Stage::Decode, &pd.transfer_id, Some(slot)));
        // There is no hand-over that another decode worker could get.
        pd.is_used = true;
        pd.holder = Some(seat.worker());
        pd.stage = Stage::Decode;
        pd.twin = Some(Twin {
            course: course.clone(),
            slot,
            is_trial,
        });
        std::mem::swap(&mut exchange.tried, &mut pd.other_tried);
        exchange.role = Role::Decode;
        super::sit(exchange, reserved);
        let decode = exchange.slot;
        world.adopt(Session {
            errand: Some(Box::new(Errand {
                course,
                message: Some(message),
                message_is_out: false,
                broken: false,
                seat,
                slot,
                is_trial,
                leg: Leg::None,
                since_ns: 0,
                status: 0,
                raw: Vec::new(),
                body: None,
                collected: Vec::new(),
                answer_begun: false,
                keeps: false,
            })),
            ..Session::default()
        });
        Some(decode)
    }

    // ---- the exchange's side ----

    /// What has become of prefill? `true`: all that follows from it has been done.
    pub(super) fn look_at_twin<W: World>(&mut self, world: &mut W) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let Some(pd) = exchange.pd.as_mut() else {
            return false;
        };
        let Some(twin) = pd.twin.as_ref() else {
            return false;
        };
        let is_alone = Rc::strong_count(&twin.course) == 1;
        let course = twin.course.take();
        let failure = match course {
            Course::Done(usage) => {
                pd.twin = None;
                pd.usage = usage;
                pd.prefilled_ns = world.now_ns();
                world.count_pd(PdEvent::Handover);
                let held = std::mem::take(&mut exchange.partial_head);
                if held.is_empty() {
                    return false;
                }
                self.feed_whole(world, held);
                return true;
            }
            Course::Failed(failure) => failure,
            // Its session was ended from outside.
            _ if is_alone => Failure::default(),
            _ => return false,
        };
        if exchange.message_is_out {
            // Decided when the buffer is back.
            *twin.course.borrow_mut() = Course::Failed(failure);
            exchange.broken = true;
            world.break_leg();
            return true;
        }
        let (slot, is_trial) = (twin.slot, twin.is_trial);
        end_leg(exchange, world, false);
        exchange.leg = Leg::None;
        exchange.partial_head.clear();
        if failure.is_resend {
            world.count_resend();
            self.prefill_anew(world);
            return true;
        }
        // From here on it is a prefill leg that has failed, by the rules of those.
        pd::begin_anew(exchange);
        pd::renew_ids(exchange, world);
        exchange.seat = None;
        exchange.role = Role::Prefill;
        (exchange.slot, exchange.is_trial) = (slot, is_trial);
        if !failure.raw.is_empty() {
            self.feed_whole(world, failure.raw);
            return true;
        }
        if failure.has_request {
            exchange.leg = Leg::Fresh; // Of the errand, and over.
        }
        self.leg_lost(world);
        true
    }

    /// An answer, or its start, that came before. Where there is no leg any more, that was all of it.
    fn feed_whole<W: World>(&mut self, world: &mut W, raw: Vec<u8>) {
        let id = |session: &Session| {
            let exchange = session.exchange.as_ref()?;
            let pd = exchange.pd.as_ref()?;
            let is_over = exchange.leg == Leg::None;
            is_over.then_some((pd.transfer_id, exchange.state, pd.is_collecting))
        };
        let before = id(self).map(|(id, ..)| id);
        self.answer_from(world, raw);
        match (before, id(self)) {
            (Some(before), Some((now, state, is_collecting))) if before == now => {
                if state == State::Relaying || is_collecting {
                    self.on_worker_end(world, false);
                } else {
                    self.leg_lost(world);
                }
            }
            (None, _) => {
                // The rest is on its way: the time by which it has to be here counts anew.
                if let Some(exchange) = &self.exchange
                    && exchange.leg != Leg::None
                    && matches!(exchange.state, State::Waiting | State::Relaying)
                {
                    let at = due(exchange, world, limit(exchange, world));
                    world.deadline(at);
                }
            }
            _ => {}
        }
    }

    /// Bytes of the decode worker while prefill runs, or may.
    pub(super) fn hold<W: World>(&mut self, world: &mut W, bytes: &[u8]) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.partial_head.extend_from_slice(bytes);
        if self.look_at_twin(world) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        if is_refusal(&exchange.partial_head) {
            if let Some(pd) = exchange.pd.as_mut() {
                pd.twin = None;
            }
            let held = std::mem::take(&mut exchange.partial_head);
            return self.feed_whole(world, held);
        }
        if exchange.partial_head.len() > HELD_BYTES_MAX {
            return self.leg_broke(world);
        }
        let at = due(exchange, world, limit(exchange, world));
        world.deadline(at);
    }

    /// The decode leg has ended while prefill runs, or may. `true`: it is taken care of.
    pub(super) fn decode_ended<W: World>(&mut self, world: &mut W, failed: bool) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let has_twin = exchange.pd.as_ref().is_some_and(|pd| pd.twin.is_some());
        if !has_twin || exchange.state != State::Waiting {
            return false;
        }
        let is_whole = !failed && !exchange.partial_head.is_empty() && !exchange.message_is_out;
        if is_whole {
            world.end_leg(false);
            exchange.leg = Leg::None;
        } else {
            exchange.partial_head.clear();
        }
        if self.look_at_twin(world) {
            return true;
        }
        if is_whole && let Some(exchange) = &self.exchange {
            let at = due(exchange, world, limit(exchange, world));
            world.deadline(at);
        }
        is_whole
    }

    // ---- the errand's side ----

    pub(super) fn begin_errand<W: World>(&mut self, world: &mut W) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        errand.since_ns = world.now_ns();
        world.deadline(errand.since_ns + POLL_NS);
        match world.dial(errand.slot, false) {
            super::Dial::Reused => {
                errand.leg = Leg::Reused;
                self.send_errand(world);
            }
            super::Dial::Connecting => errand.leg = Leg::Connecting,
            super::Dial::Refused => self.errand_failed(world, None),
        }
    }

    /// The connection is there.
    pub(super) fn send_errand<W: World>(&mut self, world: &mut W) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        if errand.leg == Leg::Connecting {
            errand.leg = Leg::Fresh;
        }
        let Some(message) = errand.message.take() else {
            return;
        };
        if errand.is_abandoned() {
            world.recycle(message);
            return self.end_errand(world, Course::Abandoned, false);
        }
        errand.seat.activate();
        errand.since_ns = world.now_ns();
        errand.message_is_out = true;
        if let Some(message) = world.send_message(message) {
            errand.message_is_out = false;
            world.recycle(message);
        }
    }

    pub(super) fn on_errand_sent<W: World>(&mut self, world: &mut W, bytes: Vec<u8>) {
        world.recycle(bytes);
        if let Some(errand) = self.errand.as_mut() {
            errand.message_is_out = false;
            if std::mem::take(&mut errand.broken) {
                self.on_errand_end(world, true);
            }
        }
    }

    pub(super) fn on_errand_bytes<W: World>(&mut self, world: &mut W, bytes: &[u8]) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        if errand.is_abandoned() {
            return self.end_errand(world, Course::Abandoned, false);
        }
        errand.answer_begun = true;
        errand.since_ns = world.now_ns();
        if errand.body.is_some() {
            if errand.status >= 300 {
                errand.raw.extend_from_slice(bytes);
            }
            return self.feed_errand(world, bytes);
        }
        errand.raw.extend_from_slice(bytes);
        loop {
            let client = response::Client {
                is_http10: false,
                is_head: false,
                keep_alive: true,
                request_id: b"",
                hides_workers_id: true,
                length: None,
                cors: b"",
            };
            let mut out = world.buffer();
            let parsed = response::parse(&errand.raw, client, &mut out);
            world.recycle(out);
            match parsed {
                Ok(None) => return,
                Ok(Some((head, ..))) if head.status < 200 && head.status != 101 => {
                    errand.raw.drain(..head.len_bytes);
                    if errand.raw.is_empty() {
                        return;
                    }
                }
                Ok(Some((head, ..))) if head.status != 101 => {
                    errand.status = head.status;
                    errand.body = Some(Body::new(head.framing));
                    errand.keeps = head.keep_alive && head.framing != Framing::Close;
                    let rest = errand.raw[head.len_bytes..].to_vec();
                    if head.status < 300 {
                        errand.raw = Vec::new();
                    }
                    return self.feed_errand(world, &rest);
                }
                _ => return self.errand_failed(world, Some(Sign::Failed)),
            }
        }
    }

    fn feed_errand<W: World>(&mut self, world: &mut W, bytes: &[u8]) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        let Errand {
            body, collected, ..
        } = &mut **errand;
        let Some(body) = body else { return };
        match body.feed(bytes, |data| collected.extend_from_slice(data)) {
            Ok(progress) if progress.done => {
                errand.keeps &= progress.consumed == bytes.len();
                self.errand_answered(world);
            }
            Ok(_) if errand.collected.len() <= pd::PREFILL_ANSWER_BYTES_MAX => {}
            Ok(_) | Err(_) => self.errand_failed(world, Some(Sign::Failed)),
        }
    }

    /// The answer is here, whole.
    fn errand_answered<W: World>(&mut self, world: &mut W) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        let keep = errand.keeps && !errand.message_is_out;
        if errand.status >= 300 {
            // The exchange goes by it, and tells what it says of the worker.
            let raw = std::mem::take(&mut errand.raw);
            let failure = Failure {
                raw,
                ..Failure::default()
            };
            return self.end_errand(world, Course::Failed(failure), keep);
        }
        if errand.message_is_out {
            // It answered before it had the request: neither connection nor answer is to be trusted.
            errand.broken = true;
            return world.break_leg();
        }
        let Ok(answer) = route::read_prefill_answer(&errand.collected) else {
            return self.errand_failed(world, Some(Sign::Failed));
        };
        let usage = UsageFix::new(&errand.collected, &answer);
        world.judge(errand.slot, Sign::Ended, errand.is_trial);
        world.judge(errand.slot, Sign::Good, errand.is_trial);
        self.end_errand(world, Course::Done(usage), keep);
    }

    pub(super) fn on_errand_end<W: World>(&mut self, world: &mut W, failed: bool) {
        let Some(errand) = self.errand.as_mut() else {
            return;
        };
        if errand.message_is_out {
            errand.broken = true;
            return world.break_leg();
        }
        if !failed && errand.body.as_ref().is_some_and(Body::ends_with_connection) {
            errand.keeps = false;
            return self.errand_answered(world);
        }
        let sign = match (errand.leg, errand.answer_begun) {
            (Leg::Reused, false) => None,
            (_, false) => Some(Sign::Refused),
            _ => Some(Sign::Failed),
        };
        self.errand_failed(world, sign);
    }

    /// No answer. Without a sign: of a dead kept-alive connection, or for want of one.
    pub(super) fn errand_failed<W: World>(&mut self, world: &mut W, sign: Option<Sign>) {
        let Some(errand) = self.errand.as_ref() else {
            return;
        };
        if let Some(sign) = sign.filter(|_| !errand.is_abandoned()) {
            world.judge(errand.slot, sign, errand.is_trial);
        }
        let failure = Failure {
            raw: Vec::new(),
            is_resend: sign.is_none() && errand.leg == Leg::Reused,
            has_request: matches!(errand.leg, Leg::Reused | Leg::Fresh),
        };
        self.end_errand(world, Course::Failed(failure), false);
    }

    pub(super) fn on_errand_deadline<W: World>(&mut self, world: &mut W) {
        let Some(errand) = self.errand.as_ref() else {
            return;
        };
        if errand.is_abandoned() {
            return self.end_errand(world, Course::Abandoned, false);
        }
        let (now, limit) = (world.now_ns(), errand.limit_ns(world));
        if now < limit {
            return world.deadline(limit.min(now + POLL_NS));
        }
        let sign = match errand.leg {
            Leg::Connecting => Sign::Refused,
            _ => Sign::Failed,
        };
        self.errand_failed(world, Some(sign));
    }

    fn end_errand<W: World>(&mut self, world: &mut W, course: Course, keep: bool) {
        let Some(errand) = self.errand.take() else {
            return;
        };
        if errand.leg != Leg::None {
            world.end_leg(keep);
        }
        if !errand.is_abandoned() {
            *errand.course.borrow_mut() = course;
        }
        if let Some(message) = errand.message {
            world.recycle(message);
        }
        self.finished = true;
        world.abort();
    }
}
