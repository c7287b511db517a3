//! One client connection and its exchanges: a state machine fed with events, answering through [`World`].
//!
//! No I/O and no clock of its own: a core drives it with sockets, the tests with a simulation. Owned by the core of the
//! connection.
//!
//! ```text
//!            head            body whole          seat          connected        answer head      answer's end
//!   Idle ----------> Reading -----------> choose ----> Dialing --------> Waiting ---------> Relaying ---------> Idle
//!     |                 \                    |  another worker (nothing sent to the client yet)  /
//!     |                  \ streamed bodies   +<------------- failed, 429, 5xx ------------------+
//!     +--> Admin (handed over whole, answered by the control plane)
//! ```
//!
//! Invariants:
//! - **E1** A count taken for a worker lives in `Exchange::seat` and nowhere else: dropping the exchange gives it back.
//! - **E2** Nothing is sent to another worker once a byte of an answer has gone to the client.
//! - **E3** Answers leave in the order of their requests: the next request is looked at when the last exchange is over.
//! - **E4** A connection whose end of message is in doubt is never used again, on either side.

pub mod endpoint;
mod entry;
mod explain;
mod hold;
pub mod paths;
mod pd;
mod place;
mod release;
mod tokens;
mod twin;
mod wait;
mod world;

use shards::{LoadGuard, Permit, Slot};
use smallvec::SmallVec;

use crate::access::Denied;
use crate::access_log::Entry;
use crate::held::Held;
use crate::http::body::{self, Body, Framing};
use crate::http::request::{self, Method, Request, Verdict};
use crate::http::response::{self, Relay};
use crate::http::{Refusal, reply};
use crate::route::{self, Fields, Role, UsageFilter};
use crate::shared::{AdminReply, AdminRequest, Outcome, Route, Worker};
use endpoint::Endpoint;
use pd::{Pd, Stage};
pub use place::Empty;
use place::Place;
pub use wait::Entrance;
pub use world::{Ahead, Ask, Dial, NoSeat, PdEvent, Record, Seat, Sign, World};

/// Bytes of pipelined requests that wait behind a running exchange before the client is no longer read.
const PIPELINE_BYTES_MAX: usize = 64 * 1024;
/// Bodies of passed-through requests up to this size are read whole, so that they can be sent again.
const PASS_WHOLE_BYTES_MAX: u64 = 64 * 1024;
/// What is set aside at once for a body whose length was announced; the rest when it comes.
const RESERVE_BYTES_MAX: u64 = 4 << 20;
/// A first part of an answer up to this size is copied behind its head, to leave in one send.
const JOIN_BYTES_MAX: usize = 16 * 1024;
/// The last event of a stream that cannot be completed; the blank line in front ends whatever event had begun.
const BROKEN_OFF_EVENT: &[u8] = b"\n\ndata: {\"error\":{\"message\":\"the worker broke off before the answer was complete\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"worker_broke_off\"}}\n\n";
/// Stands for a status where a worker broke off with the request in its hands.
const BROKE_WITH_REQUEST: u16 = 1;
/// How long a connection without a request stays while the router drains.
const DRAIN_WAIT: std::time::Duration = std::time::Duration::from_secs(1);
/// How long a client that has ended its direction may wait in silence before it is asked whether it is still there.
const PROBE_AFTER_NS: u64 = 200_000_000;
/// Room in front of the forwarded fields for request line, Host and Content-Length, besides the target's own length.
/// A worker's authority and path prefix are at most 512 bytes together (checked when a worker is added).
const START_BYTES_MAX: usize = 640;

/// One client connection.
#[derive(Default)]
pub struct Session {
    /// Bytes that belong to no request yet.
    inbox: Vec<u8>,
    exchange: Option<Place>,
    /// There is no client: an orphaned hand-over is being released.
    release: Option<Place>,
    /// Nor here: the prefill leg of a request whose decode leg runs at the same time.
    errand: Option<Box<twin::Errand>>,
    /// The client has ended its direction.
    half_closed: bool,
    /// No further request is taken.
    finished: bool,
    /// Reading was stopped because of pipelined requests, or of a body that waits for its connection.
    held_back: bool,
    /// Requests are being taken out of the inbox: an exchange that ends meanwhile does not begin that again.
    is_pumping: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The body is being read whole.
    Reading,
    /// The body is handed on as it comes.
    Streaming,
    /// Its turn, or a worker, is awaited: see [`wait`].
    Queued,
    /// Its tokens are being made, for a moment: see [`tokens`].
    Tokenizing,
    /// All of the request is here or sent; an answer is awaited.
    Waiting,
    /// The answer is going to the client.
    Relaying,
    /// The control plane has it.
    Admin,
}

struct Exchange {
    state: State,
    endpoint: Endpoint,
    route: Route,
    request: Request,
    /// `[gap][forwarded fields CRLF][body]`; the gap takes the start of the message once the worker is known.
    message: Vec<u8>,
    /// Where the forwarded fields begin, those of ours behind the client's, and the body.
    fields_at: usize,
    own_fields_at: usize,
    body_at: usize,
    /// `message` is in the hands of the ring.
    message_is_out: bool,
    /// The request's body, as the client frames it.
    incoming: Body,
    /// Its content so far; of one that is read whole, once it is here.
    body_bytes: u64,
    fields: Option<Fields>,
    /// Its tokens, where they are made of its text.
    tokens: tokens::Tokens,
    /// Ours are short, and most clients': nothing is allocated for them.
    request_id: SmallVec<[u8; 40]>,
    /// Further fields of its answer, whoever gives it; empty where web pages may not ask.
    cors: Vec<u8>,
    /// The model asked for, where requests are logged.
    logged_model: Option<Box<str>>,
    /// The request runs (Q1).
    permit: Option<Permit>,
    /// What of its body is in memory, and what of it waits, as far as that is counted (M1).
    body_held: Held,
    queue_held: Held,
    /// It waits, or has waited, for its turn or a worker.
    wait: Option<wait::Wait>,
    seat: Option<LoadGuard>,
    slot: Slot,
    /// The worker is out, and this attempt tries whether it is well.
    is_trial: bool,
    /// See [`Seat::ahead`].
    ahead: Option<Ahead>,
    /// Among which workers the running leg's was chosen.
    role: Role,
    /// Of them, those that have failed this request.
    tried: Vec<Slot>,
    /// Set for a request in two legs.
    pd: Option<Box<Pd>>,
    retries: u32,
    /// The last failure would have been tried again, had there been a retry, budget or worker left.
    is_exhausted: bool,
    last_failure: u16,
    leg: Leg,
    /// When the current leg was begun, ns.
    dialed_ns: u64,
    /// Any byte of the current leg's answer was seen.
    answer_begun: bool,
    /// Start of an answer's head that has not come whole.
    partial_head: Vec<u8>,
    outgoing: Body,
    relay: Relay,
    status: u16,
    is_event_stream: bool,
    /// The client asked why its worker was chosen.
    explains: explain::Explains,
    /// What of the answer's body has gone out.
    counted: explain::Counted,
    worker_keeps: bool,
    keep_alive: bool,
    /// What the answer's head leaves of `keep_alive`.
    answer_keeps: bool,
    /// The body was read whole: the request can be sent again.
    is_whole: bool,
    /// Some of the request has been given to the current or an earlier leg.
    sent: bool,
    /// The leg broke while the request was still being sent; what to do is decided when the buffer is back.
    broken: bool,
    probed: bool,
    probe_at_ns: u64,
    began_ns: u64,
    complete_ns: u64,
    /// When its turn came: that, or later.
    served_ns: u64,
    first_byte_ns: u64,
    last_piece_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leg {
    None,
    Connecting,
    Reused,
    Fresh,
}

impl Session {
    /// A connection that has just been accepted.
    pub fn new() -> Session {
        Session::default()
    }

    /// The connection is open: the first head is awaited. Or there is none, and what was left behind is released.
    pub fn begin<W: World>(&mut self, world: &mut W) {
        if self.release.is_some() {
            return self.begin_release(world);
        }
        if self.errand.is_some() {
            return self.begin_errand(world);
        }
        self.await_request(world);
    }

    /// Nothing is going on: the connection may be closed without anybody losing anything.
    pub fn is_idle(&self) -> bool {
        self.exchange.is_none()
            && self.inbox.is_empty()
            && self.release.is_none()
            && self.errand.is_none()
    }

    /// An orphaned hand-over is being released.
    pub fn is_release(&self) -> bool {
        self.release.is_some()
    }

    // ---- the client's side ----

    /// Bytes of the client.
    pub fn on_client_bytes<W: World>(&mut self, world: &mut W, piece: W::Piece) {
        if self.finished && self.exchange.is_none() {
            return; // Read and dropped, so that what we sent arrives.
        }
        let state = self.exchange.as_deref();
        match state.map(|x| (x.state, x.incoming.is_done())) {
            // Of those that wait, only what is handed on as it comes has not come whole.
            Some((State::Streaming, _) | (State::Queued, false)) => self.stream_body(world, piece),
            Some((State::Reading, _)) => {
                let used = self.read_body(world, piece.as_ref());
                self.keep(world, &piece.as_ref()[used..]);
                self.pump(world);
            }
            // An answer came before the request was whole: the rest is read and dropped, the connection will close.
            Some((_, false)) => {}
            Some(_) => self.keep(world, piece.as_ref()),
            None if self.must_wait(world) => self.keep(world, piece.as_ref()),
            None if self.inbox.is_empty() => {
                let used = self.consume(world, piece.as_ref());
                self.keep(world, &piece.as_ref()[used..]);
                if used > 0 {
                    self.pump(world);
                }
            }
            None => {
                let from = self.inbox.len().saturating_sub(3);
                self.inbox.extend_from_slice(piece.as_ref());
                // A head that drips in is parsed once, when its end is there (or it is too long), not for every drop.
                let end = memchr::memmem::find(&self.inbox[from..], b"\n\r\n").is_some()
                    || memchr::memmem::find(&self.inbox[from..], b"\n\n").is_some();
                if end || self.inbox.len() > world.config().header_bytes_max {
                    self.pump(world);
                }
            }
        }
    }

    /// The client has ended its direction: it may still read (a half-close), or be gone; a reset would tell.
    pub fn on_client_end<W: World>(&mut self, world: &mut W) {
        self.half_closed = true;
        if !self.inbox.is_empty() && self.must_wait(world) {
            return; // Whole requests may wait there for the client to take its answers.
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            // A request that never came whole is nobody's loss.
            self.finished = true;
            return world.finish();
        };
        match exchange.state {
            State::Reading | State::Streaming => self.on_client_gone(world),
            State::Queued if !exchange.incoming.is_done() => self.on_client_gone(world),
            State::Admin => {}
            State::Tokenizing => {
                world.watch_client();
                exchange.probe_at_ns = world.now_ns() + PROBE_AFTER_NS;
            }
            State::Waiting | State::Queued => {
                world.watch_client();
                exchange.probe_at_ns = world.now_ns() + PROBE_AFTER_NS;
                let at = exchange.probe_at_ns;
                world.deadline(twin::due(exchange, world, at));
            }
            State::Relaying => {
                world.watch_client();
                probe(exchange, world);
            }
        }
    }

    /// The client has taken enough of what waited for it.
    pub fn on_client_drained<W: World>(&mut self, world: &mut W) {
        if self.exchange.is_none() && self.held_back && !self.finished {
            self.pump(world);
        }
    }

    /// The client is gone for certain: whatever runs for it ends at once.
    pub fn on_client_gone<W: World>(&mut self, world: &mut W) {
        self.finished = true;
        self.inbox = Vec::new();
        if let Some(exchange) = self.exchange.take() {
            end_leg(&exchange, world, false);
            finish(exchange, world, Outcome::ClientGone);
        }
        world.abort();
    }

    /// A time limit has been reached.
    pub fn on_deadline<W: World>(&mut self, world: &mut W) {
        if self.release.is_some() {
            return self.end_release(world, PdEvent::Lost);
        }
        if self.errand.is_some() {
            return self.on_errand_deadline(world);
        }
        if self.is_waiting() && self.look_at_twin(world) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            if !self.inbox.is_empty() && !self.finished && !self.must_wait(world) {
                let refusal = Refusal::new(
                    408,
                    "request_timeout",
                    "the request's head did not arrive in time",
                );
                return self.refuse(world, &refusal);
            }
            self.finished = true;
            return world.finish();
        };
        match exchange.state {
            State::Queued => self.on_wait_deadline(world),
            // A limit of the time before them: they are late for certain.
            State::Tokenizing => self.end_tokens(world, None),
            State::Waiting | State::Streaming
                if exchange.leg == Leg::Connecting && world.now_ns() >= limit(exchange, world) =>
            {
                // A host that does not answer: nothing was sent, another worker may get it.
                self.on_worker_end(world, true);
            }
            State::Admin => {
                let refusal =
                    Refusal::new(504, "timeout", "the control plane did not answer in time");
                // Closed: the late answer must not meet the connection's next request.
                self.refuse(world, &refusal);
            }
            State::Streaming if world.is_client_held() => {
                // We do not read the client because the worker does not take what it sent: the worker is late.
                sign(exchange, world, Sign::Failed);
                let refusal = Refusal::new(
                    504,
                    "worker_timeout",
                    "the worker did not take the request in time",
                );
                self.fail(world, &refusal);
            }
            State::Reading | State::Streaming => {
                let refusal = Refusal::new(
                    408,
                    "request_timeout",
                    "the request's body did not arrive in time",
                );
                self.refuse(world, &refusal);
            }
            State::Waiting if world.now_ns() < limit(exchange, world) => {
                // Not the limit yet, but time to look at prefill, or to ask a silent half-closed client whether it is
                // still there.
                if world.now_ns() >= exchange.probe_at_ns {
                    exchange.probe_at_ns = u64::MAX;
                    probe(exchange, world);
                }
                let at = limit(exchange, world).min(exchange.probe_at_ns);
                world.deadline(twin::due(exchange, world, at));
            }
            State::Waiting => {
                sign(exchange, world, Sign::Failed);
                let is_prefill = exchange
                    .pd
                    .as_ref()
                    .is_some_and(|pd| pd.stage == Stage::Prefill);
                let has_time = world.now_ns() < first_limit(exchange, world);
                if is_prefill && has_time && self.retry(world, 0) {
                    return; // Nothing was generated yet: another prefill worker costs the client only time.
                }
                let refusal =
                    Refusal::new(504, "worker_timeout", "the worker did not answer in time");
                self.fail(world, &refusal);
            }
            // The worker is not read because the client does not read: the client is late.
            State::Relaying if world.is_worker_held() => self.on_client_gone(world),
            State::Relaying => {
                sign(exchange, world, Sign::Failed);
                self.break_off(world);
            }
        }
    }

    /// The control plane has answered.
    pub fn on_admin_reply<W: World>(&mut self, world: &mut W, answer: &AdminReply) {
        let Some(mut exchange) = self.exchange.take_if(|x| x.state == State::Admin) else {
            return;
        };
        let keep = keeps_after_our_answer(&exchange, world);
        let is_head = exchange.request.method == Method::Head;
        let mut headers = answer.headers.clone();
        headers.push(("x-request-id".to_string(), exchange.request_id.to_vec()));
        world.send(reply::write(
            answer.status,
            &headers,
            &exchange.cors,
            &answer.body,
            keep,
            is_head,
        ));
        let outcome = match answer.status {
            ..400 => Outcome::Ok,
            400..500 => Outcome::ClientError,
            _ => Outcome::WorkerError,
        };
        exchange.status = answer.status;
        finish(exchange, world, outcome);
        self.next(world, keep);
    }

    /// The router drains: a busy connection ends after its answer, an idle one in a moment. Its next request may be on its
    /// way already (a client that has just connected sends one for certain), and then gets its answer.
    pub fn on_drain<W: World>(&mut self, world: &mut W) {
        if self.is_idle() && !self.finished {
            self.await_request(world);
        }
    }

    // ---- the worker's side ----

    /// The connection of the leg is there.
    pub fn on_connected<W: World>(&mut self, world: &mut W) {
        if self.release.is_some() {
            return self.send_release(world);
        }
        if self.errand.is_some() {
            return self.send_errand(world);
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.leg = Leg::Fresh;
        self.send_message(world);
    }

    /// The request has left, or failed to; the buffer comes back. The receive side tells what became of it.
    pub fn on_request_sent<W: World>(&mut self, world: &mut W, bytes: Vec<u8>) {
        if self.release.is_some() {
            return self.on_release_sent(world, bytes);
        }
        if self.errand.is_some() {
            return self.on_errand_sent(world, bytes);
        }
        match self.exchange.as_deref_mut() {
            Some(exchange) if exchange.message_is_out => {
                exchange.message_is_out = false;
                if exchange.state == State::Relaying {
                    exchange.body_held.release();
                    return world.recycle(bytes);
                }
                if exchange.pd.is_some() {
                    world.recycle(bytes); // It can be written again from the client's.
                } else {
                    exchange.message = bytes;
                }
                if std::mem::take(&mut exchange.broken) {
                    self.on_worker_end(world, true);
                }
            }
            _ => world.recycle(bytes),
        }
    }

    /// Bytes of the worker.
    pub fn on_worker_bytes<W: World>(&mut self, world: &mut W, piece: W::Piece) {
        if self.release.is_some() {
            return self.on_release_bytes(world, piece.as_ref());
        }
        if self.errand.is_some() {
            return self.on_errand_bytes(world, piece.as_ref());
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.answer_begun = true;
        if exchange.state == State::Relaying {
            return self.relay(world, piece, 0);
        }
        if exchange.pd.as_ref().is_some_and(|pd| pd.is_collecting) {
            return self.collect(world, piece.as_ref());
        }
        if exchange.pd.as_ref().is_some_and(|pd| pd.twin.is_some()) {
            return self.hold(world, piece.as_ref());
        }
        if exchange.partial_head.is_empty() {
            self.answer(world, piece);
        } else {
            let mut whole = std::mem::take(&mut exchange.partial_head);
            whole.extend_from_slice(piece.as_ref());
            drop(piece);
            self.answer_from(world, whole);
        }
    }

    /// The worker has ended its direction, or the leg broke (`failed`: connect refused, reset, send error).
    pub fn on_worker_end<W: World>(&mut self, world: &mut W, failed: bool) {
        if self.release.is_some() {
            return self.on_release_broken(world);
        }
        if self.errand.is_some() {
            return self.on_errand_end(world, failed);
        }
        if self.decode_ended(world, failed) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let is_collecting = exchange.pd.as_ref().is_some_and(|pd| pd.is_collecting);
        if is_collecting && !failed && exchange.outgoing.ends_with_connection() {
            exchange.worker_keeps = false;
            return self.collected(world);
        }
        if exchange.state == State::Relaying {
            if !failed && exchange.outgoing.ends_with_connection() {
                if exchange.relay == Relay::Chunks {
                    let mut out = world.buffer();
                    end_chunks(exchange, &mut out);
                    world.send(out);
                }
                exchange.worker_keeps = false;
                return self.complete(world);
            }
            sign(exchange, world, Sign::Failed);
            return self.break_off(world);
        }
        if exchange.message_is_out {
            exchange.broken = true;
            return world.break_leg();
        }
        world.end_leg(false);
        if exchange.leg == Leg::Reused && !exchange.answer_begun && can_replay(exchange) {
            // The worker closed an idle connection just as we used it: no failure of anybody (RFC 9112 section 9.3.1).
            world.count_resend();
            if pd::has_given_params(exchange) {
                return self.prefill_anew(world);
            }
            let slot = exchange.slot;
            return self.dial(world, slot, true);
        }
        let is_early = exchange.leg != Leg::Reused && !exchange.answer_begun;
        sign(
            exchange,
            world,
            if is_early {
                Sign::Refused
            } else {
                Sign::Failed
            },
        );
        self.leg_lost(world);
    }

    /// The request is sent again from its first leg on, to whom it may have gone already as well.
    fn prefill_anew<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        if exchange.retries >= world.config().retry.retries_max.max(1) {
            return self.leg_lost(world);
        }
        exchange.retries += 1;
        exchange.leg = Leg::None;
        pd::begin_anew(exchange);
        pd::renew_ids(exchange, world);
        self.seat(world);
    }

    /// There is no leg any more and no answer: another worker, or ours.
    fn leg_lost<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let leg = std::mem::replace(&mut exchange.leg, Leg::None);
        let how = match leg {
            Leg::Fresh | Leg::Reused => BROKE_WITH_REQUEST,
            Leg::None | Leg::Connecting => 0,
        };
        if !self.retry(world, how) {
            let refusal = Refusal::new(
                502,
                "worker_failed",
                "the worker could not be reached or broke off",
            );
            self.fail(world, &refusal);
        }
    }

    // ---- requests ----

    fn await_request<W: World>(&mut self, world: &mut W) {
        let config = world.config();
        let wait = match (self.inbox.is_empty(), world.is_draining()) {
            (false, _) => config.header_read_timeout,
            (true, true) => config.keepalive_timeout.min(DRAIN_WAIT),
            (true, false) => config.keepalive_timeout,
        };
        let at = world.now_ns() + wait.as_nanos() as u64;
        world.deadline(at);
    }

    /// Keeps bytes that belong to a later request.
    fn keep<W: World>(&mut self, world: &mut W, rest: &[u8]) {
        if self.finished || rest.is_empty() {
            return;
        }
        let began = self.inbox.is_empty();
        self.inbox.extend_from_slice(rest);
        if self.exchange.is_none() {
            if began {
                self.await_request(world);
            }
        } else if self.inbox.len() > PIPELINE_BYTES_MAX {
            self.held_back = true;
            world.read_client(false);
        }
    }

    /// A client that does not take its answers gets no further ones: `on_client_drained` goes on.
    fn must_wait<W: World>(&mut self, world: &mut W) -> bool {
        if self.exchange.is_some() || self.finished || !world.is_client_full() {
            return false;
        }
        self.held_back = true;
        world.read_client(false);
        true
    }

    /// Takes requests out of the inbox as long as none is running.
    fn pump<W: World>(&mut self, world: &mut W) {
        if self.must_wait(world) || std::mem::replace(&mut self.is_pumping, true) {
            return;
        }
        let mut bytes = std::mem::take(&mut self.inbox);
        let mut at = 0;
        while self.exchange.is_none()
            && !self.finished
            && at < bytes.len()
            && !self.must_wait(world)
        {
            let used = self.consume(world, &bytes[at..]);
            at += used;
            if used == 0 {
                break;
            }
        }
        self.is_pumping = false;
        if !self.finished {
            bytes.drain(..at);
            self.inbox = bytes;
        }
        if self.must_wait(world) {
            return;
        }
        if self.held_back && (self.exchange.is_none() || self.inbox.len() <= PIPELINE_BYTES_MAX) {
            self.held_back = false;
            world.read_client(true);
        }
        if self.exchange.is_some() || self.finished {
            return;
        }
        if self.half_closed {
            self.finished = true;
            world.finish();
        } else if at > 0 && !self.inbox.is_empty() {
            // The start of a next head: its time begins now.
            self.await_request(world);
        }
    }

    /// Looks for one request at the start of `bytes`; how many bytes it took (head, and body as far as it is here).
    fn consume<W: World>(&mut self, world: &mut W, bytes: &[u8]) -> usize {
        // RFC 9112 section 2.2: an empty line before a request is skipped.
        let skipped = bytes
            .iter()
            .take_while(|b| **b == b'\r' || **b == b'\n')
            .count();
        let bytes = &bytes[skipped..];
        if bytes.is_empty() {
            return skipped;
        }
        // Room for the start of the message, whose length is bounded by what came.
        let line_bytes = memchr::memchr(b'\n', bytes).unwrap_or(bytes.len());
        let fields_at = line_bytes + START_BYTES_MAX;
        let mut message = world.buffer();
        message.resize(fields_at, 0);
        let config = world.config();
        let limits = request::Limits {
            head_bytes: config.header_bytes_max,
            field_count: config.header_count_max,
            is_rank_ours: config.data_parallel_size > 1 || config.pd.is_some(),
            credentials: entry::credentials(config),
        };
        match request::parse(bytes, limits, &config.request_id_headers, &mut message) {
            Verdict::Partial => {
                world.recycle(message);
                0
            }
            Verdict::Refused(refusal) => {
                world.recycle(message);
                world.count_malformed();
                self.refuse(world, &refusal);
                skipped + bytes.len()
            }
            Verdict::Complete(request, len) => {
                self.open(world, request, &bytes[..len], message, fields_at);
                let used = self.read_body(world, &bytes[len..]);
                if used == 0
                    && let Some(exchange) = &self.exchange
                    && exchange.request.expects_continue
                    && !exchange.incoming.is_done()
                {
                    // Not when the body is coming already (RFC 9110 section 10.1.1).
                    world.send(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec());
                }
                skipped + len + used
            }
        }
    }

    /// Begins an exchange for a parsed head.
    fn open<W: World>(
        &mut self,
        world: &mut W,
        request: Request,
        head: &[u8],
        mut message: Vec<u8>,
        fields_at: usize,
    ) {
        let endpoint = endpoint::endpoint(&request.method, &request.target);
        let route = match endpoint {
            Endpoint::Inference(route) => route,
            Endpoint::Admin => Route::Admin,
            Endpoint::WrongMethod | Endpoint::Other => Route::Other,
        };
        let own_fields_at = message.len();
        let request_id = match &request.request_id {
            Some(range) => SmallVec::from_slice(&message[range.clone()]),
            None => {
                message.extend_from_slice(b"x-request-id: ");
                let from = message.len();
                world.make_request_id(route, &mut message);
                let request_id = SmallVec::from_slice(&message[from..]);
                message.extend_from_slice(b"\r\n");
                request_id
            }
        };
        let config = world.config();
        let cors = config.cors.as_ref();
        let cors = cors.map_or_else(Vec::new, |cors| {
            cors.of_answer(&message[fields_at..own_fields_at])
        });
        let presented = entry::presented(config, &request, head);
        let permitted = entry::permit(config, endpoint, &request.target, presented.caller());
        let explains = explain::Explains::of(config, &request, presented.caller());
        if endpoint != Endpoint::Admin {
            entry::push_credentials(config, &request, head, presented, &mut message);
        }
        let whole = match (endpoint, request.framing) {
            (Endpoint::Other, Framing::Length(n)) => n <= PASS_WHOLE_BYTES_MAX,
            (Endpoint::Other, Framing::Chunked) => false,
            _ => true,
        };
        if !whole && request.framing == Framing::Chunked {
            message.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        message.extend_from_slice(b"\r\n");
        let now = world.now_ns();
        let counted = explain::Counted {
            has_events: world.begin_exchange(route, &request_id, explains != explain::Explains::No),
            ..Default::default()
        };
        let exchange = Exchange {
            state: if whole {
                State::Reading
            } else {
                State::Streaming
            },
            endpoint,
            route,
            fields_at,
            own_fields_at,
            body_at: message.len(),
            message,
            message_is_out: false,
            incoming: Body::new(request.framing),
            body_bytes: 0,
            fields: None,
            tokens: tokens::Tokens::default(),
            request_id,
            cors,
            logged_model: None,
            permit: None,
            body_held: Held::default(),
            queue_held: Held::default(),
            wait: None,
            seat: None,
            slot: Slot(0),
            is_trial: false,
            ahead: None,
            is_event_stream: false,
            explains,
            counted,
            role: match world.config().pd {
                Some(_) => pd::role_of(route),
                None => Role::Regular,
            },
            tried: Vec::new(),
            pd: None,
            retries: 0,
            is_exhausted: false,
            last_failure: 0,
            leg: Leg::None,
            dialed_ns: now,
            answer_begun: false,
            partial_head: Vec::new(),
            outgoing: Body::new(Framing::None),
            relay: Relay::Nothing,
            status: 0,
            worker_keeps: false,
            keep_alive: request.keep_alive,
            answer_keeps: request.keep_alive,
            is_whole: whole,
            sent: false,
            broken: false,
            probed: false,
            probe_at_ns: u64::MAX,
            began_ns: now,
            complete_ns: now,
            served_ns: now,
            first_byte_ns: 0,
            last_piece_ns: now,
            request,
        };
        self.exchange = Some(Place::fill(world.place(), exchange));
        self.admit(world, permitted);
    }

    /// What can be said of a request by its head alone.
    fn admit<W: World>(&mut self, world: &mut W, permitted: Result<(), Denied>) {
        if self.answers_preflight(world) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        if let Err(denied) = permitted {
            // Before its body is asked for or read; a connection on which one is to come closes.
            let refusal = Refusal::new(denied.status(), denied.code(), denied.message());
            return self.refuse_and_go_on(world, &refusal);
        }
        if exchange.endpoint == Endpoint::WrongMethod {
            let mut refusal = Refusal::new(405, "method_not_allowed", "this endpoint takes POST");
            refusal.allow = Some("POST");
            return self.refuse(world, &refusal);
        }
        let limit = body_limit(exchange, world);
        if let Framing::Length(n) = exchange.request.framing {
            if n > limit {
                return self.refuse_too_large(world, limit);
            }
            if exchange.state == State::Reading {
                let message = std::mem::take(&mut exchange.message);
                let (message, is_used) = world.grow(message, n.min(RESERVE_BYTES_MAX) as usize);
                let bytes = if is_used { message.capacity() } else { 0 };
                exchange.message = message;
                if let Err((refusal, outcome)) = hold::hold_body(exchange, bytes, world) {
                    return self.refuse_with(world, &refusal, outcome, false);
                }
            }
        }
        if exchange.state == State::Streaming {
            self.seat(world);
        }
    }

    fn refuse_too_large<W: World>(&mut self, world: &mut W, limit: u64) {
        if world.config().pd.is_some() {
            world.count_pd(PdEvent::RequestTooLong);
        }
        let message = format!("the body is larger than {limit} bytes");
        self.refuse(world, &Refusal::new(413, "request_too_large", message));
    }

    /// A browser asks whether a web page may ask (it brings no key): whether this was that, and has been answered.
    fn answers_preflight<W: World>(&mut self, world: &mut W) -> bool {
        let (Some(cors), Some(exchange)) = (&world.config().cors, &self.exchange) else {
            return false;
        };
        if exchange.request.method.as_str() != "OPTIONS" {
            return false;
        }
        let fields = &exchange.message[exchange.fields_at..exchange.own_fields_at];
        let Some(told) = cors.of_preflight(fields) else {
            return false;
        };
        let keep = keeps_after_our_answer(exchange, world);
        if let Some(mut exchange) = self.exchange.take() {
            exchange.status = 200;
            finish(exchange, world, Outcome::Ok);
        }
        world.send(reply::write(200, &[], &told, b"", keep, false));
        self.next(world, keep);
        true
    }

    /// Feeds bytes to a body that is read whole (or, streamed, waits for its connection); how many were used.
    fn read_body<W: World>(&mut self, world: &mut W, bytes: &[u8]) -> usize {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return 0;
        };
        match exchange.state {
            State::Reading => {}
            State::Streaming | State::Queued => return self.stream_early(world, bytes),
            _ => return 0,
        }
        let limit = body_limit(exchange, world);
        let Exchange {
            incoming,
            message,
            body_at,
            ..
        } = exchange;
        let result = incoming.feed(bytes, |data| {
            if (message.len() - *body_at) as u64 <= limit {
                message.extend_from_slice(data);
            }
        });
        match result {
            Err(body::Broken) => {
                world.count_malformed();
                self.refuse(world, &Refusal::framing("the chunked body is malformed"));
                bytes.len()
            }
            Ok(_) if (exchange.message.len() - exchange.body_at) as u64 > limit => {
                self.refuse_too_large(world, limit);
                bytes.len()
            }
            Ok(progress) => self.body_came(world, progress),
        }
    }

    /// Some of a body that is read whole is here, or all of it; how many bytes were used.
    fn body_came<W: World>(&mut self, world: &mut W, progress: body::Progress) -> usize {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return progress.consumed;
        };
        let held_bytes = exchange.message.len();
        if let Err((refusal, outcome)) = hold::hold_body(exchange, held_bytes, world) {
            // What still comes of it is read and dropped: only behind the end of one that is whole comes another request.
            self.refuse_with(world, &refusal, outcome, progress.done);
        } else if progress.done {
            exchange.body_bytes = (exchange.message.len() - exchange.body_at) as u64;
            self.dispatch(world);
        } else {
            let at = world.now_ns() + world.config().body_read_timeout.as_nanos() as u64;
            world.deadline(at);
        }
        progress.consumed
    }

    /// The request is here whole.
    fn dispatch<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.complete_ns = world.now_ns();
        exchange.served_ns = exchange.complete_ns;
        exchange.state = State::Waiting;
        match exchange.endpoint {
            Endpoint::Admin => self.hand_over(world),
            Endpoint::Inference(_) => match route::scan(&exchange.message[exchange.body_at..]) {
                Ok(fields) => {
                    exchange.fields = Some(fields);
                    match world.config().pd {
                        Some(_) => self.dispatch_in_legs(world),
                        None => self.seat(world),
                    }
                }
                Err(e) => {
                    world.count_malformed();
                    let message = format!("the body is not a JSON object: {}", e.message());
                    self.refuse_and_go_on(world, &Refusal::new(400, "invalid_json", message));
                }
            },
            _ => self.seat(world),
        }
    }

    fn hand_over<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.state = State::Admin;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let headers = header_list(&exchange.message[exchange.fields_at..exchange.body_at]);
        let request = AdminRequest {
            core: 0,
            token: 0,
            method: exchange.request.method.as_str().to_string(),
            target: text(&exchange.request.target),
            headers,
            body: exchange.message[exchange.body_at..].to_vec(),
        };
        let at = world.now_ns() + world.config().request_timeout.as_nanos() as u64;
        world.deadline(at);
        if !world.hand_over(request) {
            self.refuse_and_go_on(
                world,
                &Refusal::new(503, "busy", "the control plane is busy"),
            );
        }
    }

    // ---- attempts ----

    /// Chooses a worker, takes its count, and begins the leg.
    fn seat<W: World>(&mut self, world: &mut W) {
        if world.is_logged()
            && let Some(exchange) = self.exchange.as_deref_mut()
            && exchange.logged_model.is_none()
        {
            exchange.logged_model = model(exchange).map(|model| model.into());
        }
        if !self.is_let_in(world) || self.awaits_tokens(world) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let why = match pd::choose_seats(exchange, world) {
            Ok(slot) => {
                wait::end_wait(exchange, world);
                return self.dial(world, slot, false);
            }
            Err(why) => why,
        };
        if self.waits_for_seat(world, why) {
            return;
        }
        let Some(exchange) = self.exchange.as_deref() else {
            return;
        };
        let (refusal, outcome) = no_seat(why, exchange, world);
        self.refuse_with(world, &refusal, outcome, true);
    }

    fn dial<W: World>(&mut self, world: &mut W, mut slot: Slot, fresh: bool) {
        let stage = self.exchange.as_deref().and_then(|x| x.pd.as_ref());
        let is_prefill = stage.is_some_and(|pd| pd.stage == Stage::Prefill);
        if is_prefill && twin::is_write(world, slot) {
            let Some(decode) = self.split(world) else {
                return self.leg_lost(world);
            };
            slot = decode;
        }
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.answer_begun = false;
        exchange.partial_head.clear();
        exchange.dialed_ns = world.now_ns();
        if let Some(pd) = exchange.pd.as_mut() {
            // Each leg's message is written when its connection is there.
            pd.begin_attempt();
        } else if !write_start(exchange, world, slot) {
            return self.leg_lost(world);
        }
        match world.dial(slot, fresh) {
            Dial::Reused => {
                exchange.leg = Leg::Reused;
                self.send_message(world);
            }
            Dial::Connecting => {
                exchange.leg = Leg::Connecting;
                let at = world.now_ns() + world.config().connect_timeout.as_nanos() as u64;
                world.deadline(twin::due(exchange, world, at));
            }
            // Our own shortage, or a worker that has just been removed: nobody's failure.
            Dial::Refused => self.leg_lost(world),
        }
    }

    /// The connection of the leg is there: the request goes out.
    fn send_message<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let message = match exchange.pd {
            None => std::mem::take(&mut exchange.message),
            Some(_) => match pd::write_message(exchange, world) {
                Some(message) => message,
                None => {
                    world.end_leg(false);
                    return self.leg_lost(world);
                }
            },
        };
        exchange.sent = true;
        exchange.message_is_out = true;
        let returned = world.send_message(message);
        exchange.message_is_out = returned.is_none();
        match (&exchange.pd, returned) {
            (None, Some(message)) => exchange.message = message,
            (None, None) => {}
            (Some(pd), returned) => {
                pd::dispatched(pd, exchange.seat.as_ref(), world);
                if let Some(message) = returned {
                    world.recycle(message);
                }
            }
        }
        if exchange.state == State::Streaming {
            self.held_back = false;
            world.read_client(true);
            let at = world.now_ns() + world.config().body_read_timeout.as_nanos() as u64;
            return world.deadline(at);
        }
        let is_second = exchange
            .pd
            .as_ref()
            .is_some_and(|pd| pd.since_ns().is_some());
        let has_waited = exchange.served_ns != exchange.complete_ns;
        if exchange.leg == Leg::Reused && exchange.retries == 0 && !is_second && !has_waited {
            // Connecting is not our own work.
            let added = world.clock_ns().saturating_sub(exchange.complete_ns);
            world.record_added(added);
        }
        let at = limit(exchange, world).min(exchange.probe_at_ns.max(world.now_ns()));
        world.deadline(twin::due(exchange, world, at));
    }

    fn is_waiting(&self) -> bool {
        let exchange = self.exchange.as_deref();
        exchange.is_some_and(|x| x.state == State::Waiting)
    }

    /// The worker has shown no sign of life for too long while its peers work. What has had no answer yet goes to another
    /// one; what cannot, waits on.
    pub fn on_worker_stalled<W: World>(&mut self, world: &mut W) {
        if self.errand.is_some() {
            return self.errand_failed(world, Some(Sign::Failed));
        }
        if self.is_waiting() {
            self.move_on(world, 0);
        }
    }

    /// Another worker, if this request may still go to one and the budget allows. `status`: of an answer that is not
    /// passed on; 0: none came, [`BROKE_WITH_REQUEST`].
    fn retry<W: World>(&mut self, world: &mut W, status: u16) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        // The same plain 500 from two workers, or two that broke off over it, is the request's doing; a third would not
        // help, only suffer.
        let poison = matches!(status, 500 | BROKE_WITH_REQUEST) && exchange.last_failure == status;
        let most = world.config().retry.retries_max;
        if poison || most == 0 || !can_replay(exchange) {
            return false;
        }
        let is_left = exchange.retries < most && world.may_retry();
        let has_moved = is_left && self.move_on(world, status);
        if let Some(exchange) = self.exchange.as_deref_mut().filter(|_| !has_moved) {
            exchange.is_exhausted = true;
        }
        has_moved
    }

    fn move_on<W: World>(&mut self, world: &mut W, status: u16) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let is_left = exchange.retries < world.config().retry.retries_max;
        is_left && self.go_elsewhere(world, Some(status))
    }

    /// A worker that has not had this request yet gets it, if there is one. `failure`: what makes it a retry; none: the worker
    /// is well, and only not the right one.
    fn go_elsewhere<W: World>(&mut self, world: &mut W, failure: Option<u16>) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut().filter(|x| can_replay(x)) else {
            return false;
        };
        if let Some(status) = failure {
            exchange.last_failure = status;
        }
        exchange.tried.push(exchange.slot);
        let slot = match pd::choose_again(exchange, world) {
            Ok(slot) => Some(slot),
            Err(NoSeat::Full)
                if exchange.pd.is_none() && self.waits_for_seat(world, NoSeat::Full) =>
            {
                None
            }
            Err(_) => return false,
        };
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        end_leg(exchange, world, false);
        exchange.leg = Leg::None;
        if failure.is_some() {
            exchange.retries += 1;
            world.count_retry(exchange.route, exchange.retries);
        }
        if let Some(slot) = slot {
            self.dial(world, slot, false);
        }
        true
    }

    // ---- answers ----

    fn answer<W: World>(&mut self, world: &mut W, piece: W::Piece) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let mut out = world.buffer();
        match read_head(exchange, world, piece.as_ref(), &mut out) {
            Head::Partial => {
                exchange.partial_head.extend_from_slice(piece.as_ref());
                world.recycle(out);
            }
            Head::Interim(len) => {
                let rest = piece.as_ref()[len..].to_vec();
                send_interim(world, out);
                if !rest.is_empty() {
                    self.answer_from(world, rest);
                }
            }
            Head::Broken => {
                world.recycle(out);
                self.worker_broke_framing(world);
            }
            Head::Final {
                len,
                retryable,
                kind,
            } => {
                if self.is_answered_elsewhere(world, retryable) {
                    return world.recycle(out);
                }
                let (head, rest) = piece.as_ref().split_at(len);
                if self.take_over(world, kind, head, rest) {
                    return world.recycle(out);
                }
                let rest = piece.as_ref().len() - len;
                if rest <= JOIN_BYTES_MAX {
                    self.begin_answer(world, out, &piece.as_ref()[len..]);
                } else {
                    self.begin_answer(world, out, &[]);
                    self.relay(world, piece, len);
                }
            }
        }
    }

    /// The same from bytes of our own, when a head did not come in one piece.
    fn answer_from<W: World>(&mut self, world: &mut W, mut whole: Vec<u8>) {
        loop {
            let Some(exchange) = self.exchange.as_deref_mut() else {
                return;
            };
            let mut out = world.buffer();
            match read_head(exchange, world, &whole, &mut out) {
                Head::Partial => {
                    exchange.partial_head = whole;
                    return world.recycle(out);
                }
                Head::Interim(len) => {
                    whole.drain(..len);
                    send_interim(world, out);
                    if whole.is_empty() {
                        return;
                    }
                }
                Head::Broken => {
                    world.recycle(out);
                    return self.worker_broke_framing(world);
                }
                Head::Final {
                    len,
                    retryable,
                    kind,
                } => {
                    if self.is_answered_elsewhere(world, retryable) {
                        return world.recycle(out);
                    }
                    if self.take_over(world, kind, &whole[..len], &whole[len..]) {
                        return world.recycle(out);
                    }
                    return self.begin_answer(world, out, &whole[len..]);
                }
            }
        }
    }

    /// The answer whose head has come is not to be the client's: another worker has the request now.
    fn is_answered_elsewhere<W: World>(&mut self, world: &mut W, retryable: bool) -> bool {
        let Some(exchange) = self.exchange.as_deref() else {
            return false;
        };
        let (slot, is_trial) = (exchange.slot, exchange.is_trial);
        if retryable {
            return self.retry(world, exchange.status);
        }
        // Who made a response knows of it, nobody else: all are asked, one after the other, as vllm-router does.
        let is_unknown_there = exchange.status == 404
            && endpoint::is_of_stored_response(&exchange.request.target)
            && self.go_elsewhere(world, None);
        if is_unknown_there {
            world.judge(slot, Sign::Ended, is_trial);
        }
        is_unknown_there
    }

    fn worker_broke_framing<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        sign(exchange, world, Sign::Failed);
        // As one that broke off within its head: nothing of it has gone to the client.
        if self.retry(world, BROKE_WITH_REQUEST) {
            return;
        }
        self.fail(
            world,
            &Refusal::new(502, "bad_answer", "the worker's answer was malformed"),
        );
    }

    /// The head goes to the client, and what came of the body with it.
    fn begin_answer<W: World>(&mut self, world: &mut W, mut out: Vec<u8>, rest: &[u8]) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.state = State::Relaying;
        exchange.keep_alive = exchange.answer_keeps;
        let now = world.now_ns();
        exchange.last_piece_ns = now;
        // vLLM sends a stream's head before it computes anything.
        if !exchange.is_event_stream || !rest.is_empty() {
            begun(exchange, world);
        }
        if !exchange.message_is_out {
            world.recycle(std::mem::take(&mut exchange.message));
            exchange.body_held.release();
        }
        let joined = join(exchange, rest, &mut out);
        world.send(out);
        let added = world.clock_ns().saturating_sub(now);
        world.record_added(added);
        let Ok(progress) = joined else {
            sign(exchange, world, Sign::Failed);
            return self.break_off(world);
        };
        explain::count(exchange, &rest[..progress.consumed]);
        if progress.done {
            exchange.worker_keeps &= progress.consumed == rest.len();
            return self.complete(world);
        }
        let at = limit(exchange, world);
        world.deadline(at);
        if self.half_closed && !exchange.probed {
            probe(exchange, world);
        }
    }

    /// The next piece of an answer.
    fn relay<W: World>(&mut self, world: &mut W, piece: W::Piece, from: usize) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let now = world.now_ns();
        let is_first = exchange.first_byte_ns == 0;
        if is_first {
            begun(exchange, world);
        }
        if from == 0 {
            let gap_ns = (!is_first).then(|| now - exchange.last_piece_ns);
            world.record_piece(exchange.slot, gap_ns);
        }
        exchange.last_piece_ns = now;
        let bytes = &piece.as_ref()[from..];
        let piece_len = bytes.len();
        explain::count(exchange, bytes);
        let progress = if exchange.relay == Relay::AsIs {
            let result = exchange.outgoing.feed(bytes, |_| {});
            if let Ok(progress) = &result
                && progress.consumed > 0
            {
                let to = from + progress.consumed;
                world.send_piece(piece, from, to);
            }
            result
        } else {
            let mut out = world.buffer();
            let result = join(exchange, bytes, &mut out);
            if out.is_empty() {
                world.recycle(out)
            } else {
                world.send(out)
            }
            result
        };
        match progress {
            Err(body::Broken) => {
                sign(exchange, world, Sign::Failed);
                self.break_off(world);
            }
            Ok(progress) if progress.done => {
                exchange.worker_keeps &= progress.consumed == piece_len;
                self.complete(world);
            }
            Ok(_) => {
                let at = limit(exchange, world);
                world.deadline(at);
            }
        }
    }

    /// The answer has gone out whole.
    fn complete<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.take() else {
            return;
        };
        // An answer that came before the whole request had been taken leaves both connections in doubt (E4).
        let request_is_whole = exchange.incoming.is_done();
        end_leg(
            &exchange,
            world,
            exchange.worker_keeps && request_is_whole && !exchange.message_is_out,
        );
        let keep = exchange.keep_alive && request_is_whole && !world.is_draining();
        let outcome = match exchange.status {
            ..400 => Outcome::Ok,
            400..500 => Outcome::ClientError,
            _ => Outcome::WorkerError,
        };
        let filter = exchange.pd.as_ref().and_then(|pd| pd.filter.as_ref());
        if filter.is_some_and(UsageFilter::has_fixed) {
            world.count_pd(PdEvent::UsageFixed);
        }
        sign(&exchange, world, Sign::Ended);
        if outcome == Outcome::Ok && !exchange.is_event_stream {
            let wait_ns = exchange.first_byte_ns.saturating_sub(exchange.dialed_ns);
            world.record_answer(exchange.slot, wait_ns, exchange.is_trial);
            sign(&exchange, world, Sign::Good);
        }
        finish(exchange, world, outcome);
        self.next(world, keep);
    }

    /// The answer cannot be completed, and the client must be able to tell: what came goes out, a stream of events gets
    /// one that says so, then the connection ends with the body unended. Where only the connection's end would end the
    /// body, it is a reset.
    fn break_off<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.take() else {
            return;
        };
        end_leg(&exchange, world, false);
        let relay = exchange.relay;
        let takes_event = match relay {
            // Between chunks of the worker's; ours are whole.
            Relay::AsIs => exchange.outgoing.is_between_chunks(),
            Relay::Chunks => true,
            Relay::Unframed | Relay::Nothing => false,
        };
        if exchange.is_event_stream && takes_event {
            let mut out = world.buffer();
            push_chunk(&mut out, BROKEN_OFF_EVENT);
            world.send(out);
        }
        finish(exchange, world, Outcome::Broken);
        self.finished = true;
        self.inbox = Vec::new();
        match relay {
            Relay::AsIs | Relay::Chunks => world.finish(),
            Relay::Unframed | Relay::Nothing => world.abort(),
        }
    }

    /// No answer of a worker will come: ours does.
    fn fail<W: World>(&mut self, world: &mut W, refusal: &Refusal) {
        self.refuse_with(world, refusal, Outcome::WorkerFailed, true);
    }

    /// Refuses a request whose bytes may not all have been read: the connection closes.
    fn refuse<W: World>(&mut self, world: &mut W, refusal: &Refusal) {
        self.refuse_with(world, refusal, Outcome::Refused, false);
    }

    /// Refuses a request that was read whole: the connection lives on.
    fn refuse_and_go_on<W: World>(&mut self, world: &mut W, refusal: &Refusal) {
        self.refuse_with(world, refusal, Outcome::Refused, true);
    }

    fn refuse_with<W: World>(
        &mut self,
        world: &mut W,
        refusal: &Refusal,
        outcome: Outcome,
        may_keep: bool,
    ) {
        let mut keep = false;
        let mut is_head = false;
        let mut cors = Vec::new();
        if let Some(mut exchange) = self.exchange.take() {
            exchange.status = refusal.status;
            cors = std::mem::take(&mut exchange.cors);
            cors.extend_from_slice(&explain::field(&exchange, world));
            end_leg(&exchange, world, false);
            keep = may_keep && keeps_after_our_answer(&exchange, world);
            is_head = exchange.request.method == Method::Head;
            finish(exchange, world, outcome);
        } else if world.is_logged() {
            log_unread(world, refusal.status);
        }
        world.send(refusal.write(&cors, keep, is_head));
        self.next(world, keep);
    }

    /// After an exchange: the next request, or the end.
    fn next<W: World>(&mut self, world: &mut W, keep: bool) {
        if !keep {
            self.finished = true;
            self.inbox = Vec::new();
            return world.finish();
        }
        self.await_request(world);
        if !self.inbox.is_empty() || self.half_closed || self.held_back {
            // Within a pump that runs already this does nothing: it goes on by itself.
            self.pump(world);
        }
    }

    // ---- bodies that are handed on as they come ----

    /// Body bytes that came with the head: they wait behind it for the connection.
    fn stream_early<W: World>(&mut self, world: &mut W, bytes: &[u8]) -> usize {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return 0;
        };
        if exchange.message_is_out || exchange.leg == Leg::Fresh || exchange.leg == Leg::Reused {
            let mut out = world.buffer();
            let result = reframe(exchange, bytes, &mut out);
            // A body that is too large is refused: no worker gets the end of it.
            if out.is_empty() || is_too_long(exchange, world) {
                world.recycle(out)
            } else {
                world.send_worker(out)
            }
            return self.streamed(world, result);
        }
        let mut message = std::mem::take(&mut exchange.message);
        let result = reframe(exchange, bytes, &mut message);
        exchange.message = message;
        // Not before the connection is there: what waits here stays bounded.
        if !exchange.incoming.is_done() {
            self.held_back = true;
            world.read_client(false);
        }
        self.streamed(world, result)
    }

    fn stream_body<W: World>(&mut self, world: &mut W, piece: W::Piece) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let is_plain = matches!(exchange.request.framing, Framing::Length(_));
        let connected = exchange.leg == Leg::Fresh || exchange.leg == Leg::Reused;
        if is_plain && connected {
            let len = piece.as_ref().len();
            let Exchange {
                incoming,
                body_bytes,
                ..
            } = exchange;
            let result = incoming.feed(piece.as_ref(), |data| *body_bytes += data.len() as u64);
            let rest = result
                .ok()
                .filter(|p| p.consumed < len)
                .map(|p| piece.as_ref()[p.consumed..].to_vec());
            if let Ok(progress) = result
                && progress.consumed > 0
            {
                world.send_worker_piece(piece, 0, progress.consumed);
            }
            self.streamed(world, result);
            if let Some(rest) = rest {
                self.keep(world, &rest);
            }
            return;
        }
        let used = self.stream_early(world, piece.as_ref());
        self.keep(world, &piece.as_ref()[used..]);
    }

    fn streamed<W: World>(
        &mut self,
        world: &mut W,
        result: Result<body::Progress, body::Broken>,
    ) -> usize {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return 0;
        };
        match result {
            Err(body::Broken) => {
                world.count_malformed();
                self.refuse(world, &Refusal::framing("the chunked body is malformed"));
                0
            }
            Ok(progress) => {
                if is_too_long(exchange, world) {
                    let limit = body_limit(exchange, world);
                    self.refuse_too_large(world, limit);
                    return 0;
                }
                if wait::is_queued(exchange) {
                    return progress.consumed; // The wait's limit stands.
                }
                let is_connecting = exchange.leg == Leg::Connecting;
                if progress.done {
                    exchange.state = State::Waiting;
                    exchange.complete_ns = world.now_ns();
                    exchange.served_ns = exchange.complete_ns;
                }
                // While the leg connects its own limit counts, and stands already.
                if progress.done && !is_connecting {
                    let at = self::limit(exchange, world);
                    world.deadline(at);
                } else if !is_connecting {
                    let at = world.now_ns() + world.config().body_read_timeout.as_nanos() as u64;
                    world.deadline(at);
                }
                progress.consumed
            }
        }
    }
}

/// The model the request asks for.
fn model(exchange: &Exchange) -> Option<std::borrow::Cow<'_, str>> {
    let fields = exchange.fields.as_ref()?;
    route::as_str(&exchange.message[exchange.body_at..], fields.model)
}

/// Chooses a worker and takes its count; an earlier attempt's count is given back by being replaced.
fn choose<W: World>(exchange: &mut Exchange, world: &mut W) -> Result<Slot, NoSeat> {
    let seat = take_seat(exchange, world, false)?;
    sit(exchange, seat);
    Ok(exchange.slot)
}

/// The exchange's count and worker from now on; the earlier ones are given back.
fn sit(exchange: &mut Exchange, seat: Seat) {
    exchange.slot = seat.id.slot;
    exchange.is_trial = seat.is_trial;
    exchange.ahead = seat.ahead;
    exchange.seat = Some(seat.guard);
}

/// What was asked of the worker has begun to come: the body of a stream of events, or any other answer's head.
fn begun<W: World>(exchange: &mut Exchange, world: &mut W) {
    exchange.first_byte_ns = world.now_ns();
    if let Some(seat) = &exchange.seat {
        seat.activate();
    }
    // Of an answer in one piece the first byte says how long all of it took.
    if exchange.is_event_stream && exchange.status < 400 {
        learn_wait(exchange, world);
    }
}

/// What that says of its waits.
fn learn_wait<W: World>(exchange: &mut Exchange, world: &mut W) {
    if let Some(ahead) = exchange.ahead.take() {
        let wait_ns = world.now_ns().saturating_sub(exchange.dialed_ns);
        world.learn_wait(exchange.slot, ahead, wait_ns);
    }
}

/// Tells what the attempt says of its worker.
fn sign<W: World>(exchange: &Exchange, world: &mut W, sign: Sign) {
    world.judge(exchange.slot, sign, exchange.is_trial);
}

fn take_seat<W: World>(
    exchange: &Exchange,
    world: &mut W,
    is_same_prompt: bool,
) -> Result<Seat, NoSeat> {
    let body = &exchange.message[exchange.body_at..];
    let model = model(exchange);
    world.choose(Ask {
        route: exchange.route,
        role: exchange.role,
        is_same_prompt,
        // Ours say nothing of the client: a request id that we made up is new each time.
        head: &exchange.message[exchange.fields_at..exchange.own_fields_at],
        key: exchange.fields.as_ref().map(|f| (body, f)),
        prompt: exchange.tokens.prompt(),
        model: model.as_deref(),
        prompt_bytes: body.len() as u64,
        tried: &exchange.tried,
        is_followed_up: pd::has_begun(exchange),
    })
}

/// What the start of an answer was.
enum Head {
    Partial,
    Interim(usize),
    Final {
        len: usize,
        retryable: bool,
        kind: AnswerKind,
    },
    Broken,
}

/// What matters to those who look into an answer's content.
#[derive(Clone, Copy)]
struct AnswerKind {
    framing: Framing,
    is_event_stream: bool,
    is_encoded: bool,
}

/// An interim answer goes on to clients that can read it; the parser wrote it, or nothing.
fn send_interim<W: World>(world: &mut W, out: Vec<u8>) {
    if out.is_empty() {
        world.recycle(out);
    } else {
        world.send(out);
    }
}

/// Whether the client's connection lives on after the answer, as far as its request says.
fn keeps_client<W: World>(exchange: &Exchange, world: &W) -> bool {
    exchange.keep_alive && exchange.incoming.is_done() && !world.is_draining()
}

fn read_head<W: World>(
    exchange: &mut Exchange,
    world: &mut W,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Head {
    let client = response::Client {
        is_http10: exchange.request.is_http10,
        is_head: exchange.request.method == Method::Head,
        keep_alive: keeps_client(exchange, world),
        request_id: &exchange.request_id,
        hides_workers_id: exchange.pd.is_some(),
        length: None,
        cors: &exchange.cors,
    };
    match response::parse(bytes, client, out) {
        Err(response::Broken(_)) => Head::Broken,
        Ok(None) => Head::Partial,
        // We asked for no other protocol.
        Ok(Some((head, ..))) if head.status == 101 => Head::Broken,
        Ok(Some((head, ..))) if head.status < 200 => Head::Interim(head.len_bytes),
        Ok(Some((head, relay, keep_alive))) => {
            explain::insert(&explain::field(exchange, world), out);
            exchange.status = head.status;
            exchange.is_event_stream = head.is_event_stream;
            match head.status {
                429 | 503 => {
                    let secs = head.retry_after_secs.unwrap_or(0);
                    sign(exchange, world, Sign::Busy(secs));
                }
                500.. => sign(exchange, world, Sign::Error),
                // A stream may last for hours: that it begins says enough.
                ..400 if head.is_event_stream => sign(exchange, world, Sign::Good),
                _ => {}
            }
            exchange.relay = relay;
            exchange.outgoing = Body::new(head.framing);
            exchange.worker_keeps = head.keep_alive && head.framing != Framing::Close;
            exchange.answer_keeps = keep_alive;
            let retryable = matches!(head.status, 429 | 500 | 502 | 503 | 504);
            Head::Final {
                len: head.len_bytes,
                retryable,
                kind: AnswerKind {
                    framing: head.framing,
                    is_event_stream: head.is_event_stream,
                    is_encoded: head.is_encoded,
                },
            }
        }
    }
}

/// Puts body bytes behind `out` as the client is to get them.
fn join(
    exchange: &mut Exchange,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<body::Progress, body::Broken> {
    match exchange.relay {
        Relay::Nothing => Ok(body::Progress {
            consumed: 0,
            done: true,
        }),
        Relay::AsIs => {
            let progress = exchange.outgoing.feed(bytes, |_| {})?;
            out.extend_from_slice(&bytes[..progress.consumed]);
            Ok(progress)
        }
        Relay::Unframed => exchange
            .outgoing
            .feed(bytes, |data| out.extend_from_slice(data)),
        Relay::Chunks => {
            let Exchange { outgoing, pd, .. } = exchange;
            let mut filter = pd.as_mut().and_then(|pd| pd.filter.as_mut());
            let mut seen = Vec::new();
            let progress = outgoing.feed(bytes, |data| match filter.as_mut() {
                Some(filter) => filter.feed(data, &mut seen),
                None => push_chunk(out, data),
            })?;
            push_chunk(out, &seen);
            if progress.done {
                end_chunks(exchange, out);
            }
            Ok(progress)
        }
    }
}

/// The end of a body in chunks of ours.
fn end_chunks(exchange: &mut Exchange, out: &mut Vec<u8>) {
    if let Some(filter) = exchange.pd.as_mut().and_then(|pd| pd.filter.as_mut()) {
        let mut held = Vec::new();
        filter.finish(&mut held);
        push_chunk(out, &held);
    }
    out.extend_from_slice(b"0\r\n\r\n");
}

/// Puts a request's body bytes behind `out` as the worker is to get them.
fn reframe(
    exchange: &mut Exchange,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<body::Progress, body::Broken> {
    let is_chunked = exchange.request.framing == Framing::Chunked;
    let Exchange {
        incoming,
        body_bytes,
        ..
    } = exchange;
    let progress = incoming.feed(bytes, |data| {
        *body_bytes += data.len() as u64;
        match is_chunked {
            true => push_chunk(out, data),
            false => out.extend_from_slice(data),
        }
    })?;
    if is_chunked && progress.done {
        out.extend_from_slice(b"0\r\n\r\n");
    }
    Ok(progress)
}

fn push_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    use std::io::Write;
    let _ = write!(out, "{:x}\r\n", data.len());
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
}

/// Writes request line, Host and length into the gap, right before the forwarded fields. `message` is then complete
/// from `fields_at - start` on; the gap's used part begins where `message_start` says.
fn write_start<W: World>(exchange: &mut Exchange, world: &mut W, slot: Slot) -> bool {
    let mut start = world.buffer();
    match world.worker(slot) {
        Some(worker) => write_line_and_host(&exchange.request, worker, &mut start),
        None => return false,
    }
    let length = match (exchange.is_whole, exchange.request.framing) {
        (false, Framing::Length(n)) => Some(n),
        (false, _) => None,
        (true, Framing::None) if exchange.request.method != Method::Post => None,
        (true, _) => Some(exchange.body_bytes),
    };
    if let Some(n) = length {
        start.extend_from_slice(b"content-length: ");
        reply::push_number(&mut start, n);
        start.extend_from_slice(b"\r\n");
    }
    let Some(from) = exchange
        .fields_at
        .checked_sub(start.len())
        .filter(|n| *n >= 8)
    else {
        world.recycle(start);
        return false;
    };
    exchange.message[from..exchange.fields_at].copy_from_slice(&start);
    // The first bytes of the gap remember where the message begins: the buffer travels alone while it is sent.
    exchange.message[..8].copy_from_slice(&(from as u64).to_le_bytes());
    world.recycle(start);
    true
}

/// Request line, Host, and the data-parallel rank where the worker is one.
fn write_line_and_host(request: &Request, worker: &Worker, out: &mut Vec<u8>) {
    out.extend_from_slice(request.method.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(worker.path_prefix.as_bytes());
    out.extend_from_slice(&request.target);
    out.extend_from_slice(b" HTTP/1.1\r\nhost: ");
    out.extend_from_slice(worker.authority.as_bytes());
    out.extend_from_slice(b"\r\n");
    if let Some(rank) = worker.rank {
        out.extend_from_slice(b"x-data-parallel-rank: ");
        reply::push_number(out, u64::from(rank));
        out.extend_from_slice(b"\r\n");
    }
}

/// Where a message begins in its buffer.
pub fn message_start(message: &[u8]) -> usize {
    message
        .first_chunk::<8>()
        .map_or(0, |b| u64::from_le_bytes(*b) as usize)
}

/// A request can be sent (again) as long as all of it, or all that has come of it, is here.
fn can_replay(exchange: &Exchange) -> bool {
    let is_here = !exchange.message_is_out && !exchange.message.is_empty();
    is_here && (!exchange.sent || (exchange.is_whole && exchange.state == State::Waiting))
}

/// The time by which the worker must show progress: connecting, the first byte, and then each further one.
fn limit<W: World>(exchange: &Exchange, world: &W) -> u64 {
    let config = world.config();
    if exchange.leg == Leg::Connecting {
        return exchange.dialed_ns + config.connect_timeout.as_nanos() as u64;
    }
    let is_collecting = exchange.pd.as_ref().is_some_and(|pd| pd.is_collecting);
    let (since, time) = if is_collecting || exchange.state == State::Relaying {
        (exchange.last_piece_ns, config.stream_idle_timeout)
    } else {
        let since = match &exchange.pd {
            Some(pd) if pd.twin.is_some() => exchange.dialed_ns + twin::GRACE_NS,
            // Each prefill worker has the whole time: one that was silent has taken none of the next one's.
            Some(pd) => pd.since_ns().unwrap_or(exchange.dialed_ns),
            None => exchange.served_ns,
        };
        (since, config.first_byte_timeout)
    };
    let at = since + time.as_nanos() as u64;
    match exchange.state {
        // It makes progress: only its pauses are limited.
        State::Relaying => at,
        _ => at.min(first_limit(exchange, world)),
    }
}

/// The time by which the client must have begun to get its answer, whatever the request waits for.
fn first_limit<W: World>(exchange: &Exchange, world: &W) -> u64 {
    exchange.complete_ns + world.config().request_timeout.as_nanos() as u64
}

fn body_limit<W: World>(exchange: &Exchange, world: &W) -> u64 {
    match exchange.endpoint {
        Endpoint::Admin => world.config().admin_body_bytes_max as u64,
        _ if exchange.is_whole => {
            hold::body_memory_max(world).min(world.config().body_bytes_max as u64)
        }
        _ => world.config().body_bytes_max as u64,
    }
}

/// Of a body that is handed on as it comes: its content, as that of one that is read whole.
fn is_too_long<W: World>(exchange: &Exchange, world: &W) -> bool {
    exchange.body_bytes > body_limit(exchange, world)
}

/// What a request gets that has no seat, and as what it counts.
fn no_seat<W: World>(why: NoSeat, exchange: &Exchange, world: &W) -> (Refusal, Outcome) {
    let none = |status, code, message| {
        let refusal = Refusal::new(status, code, message);
        (refusal, Outcome::NoWorker)
    };
    match why {
        NoSeat::UnknownModel => {
            let model = model(exchange).unwrap_or_default();
            let shown: String = model.chars().take(128).collect();
            let message = format!("The model `{shown}` does not exist.");
            (
                Refusal::new(404, "model_not_found", message),
                Outcome::Refused,
            )
        }
        NoSeat::NoneEligible => none(
            503,
            "no_available_workers",
            match exchange.role {
                Role::Regular => "no worker can take this request now",
                Role::Prefill => "no prefill worker can take this request now",
                Role::Decode => "no decode worker can take this request now",
            },
        ),
        NoSeat::Full => {
            wait::overloaded(429, "all workers have as many requests as they may", world)
        }
        NoSeat::AllTried => none(502, "worker_failed", "every worker failed this request"),
    }
}

/// Whether the client's connection lives on after an answer of our own. Not in HTTP/1.0, whose clients we do not tell.
fn keeps_after_our_answer<W: World>(exchange: &Exchange, world: &W) -> bool {
    let request_is_whole = exchange.incoming.is_done();
    exchange.keep_alive && !exchange.request.is_http10 && request_is_whole && !world.is_draining()
}

/// Asks a client that has ended its direction whether it still reads, with bytes that mean nothing to one that does: an
/// interim answer before the head (RFC 9110 section 15.2: any client of HTTP/1.1 must be able to skip it), or a leading
/// zero of the next chunk's size within a chunked body. A closed socket answers with a reset.
fn probe<W: World>(exchange: &mut Exchange, world: &mut W) {
    if exchange.probed || exchange.request.is_http10 {
        return;
    }
    let bytes: &[u8] = match exchange.state {
        State::Waiting | State::Queued | State::Tokenizing => b"HTTP/1.1 100 Continue\r\n\r\n",
        State::Relaying if exchange.relay == Relay::Chunks => b"0",
        State::Relaying if exchange.outgoing.is_between_chunks() => b"0",
        _ => return,
    };
    exchange.probed = true;
    exchange.probe_at_ns = u64::MAX;
    world.send(bytes.to_vec());
}

fn header_list(fields: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut headers = Vec::new();
    for line in fields.split(|b| *b == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some(at) = memchr::memchr(b':', line) {
            let name = String::from_utf8_lossy(&line[..at]).into_owned();
            headers.push((name, line[at + 1..].trim_ascii().to_vec()));
        }
    }
    headers
}

fn end_leg<W: World>(exchange: &Exchange, world: &mut W, keep: bool) {
    if exchange.leg != Leg::None {
        world.end_leg(keep);
    }
}

/// The access log's line of a request.
fn log<W: World>(exchange: &Exchange, world: &mut W, outcome: Outcome) {
    let since = |from: u64, to: u64| to.saturating_sub(from);
    let entry = Entry {
        method: exchange.request.method.as_str(),
        target: &exchange.request.target,
        status: exchange.status,
        outcome: outcome.label(),
        request_id: &exchange.request_id,
        model: exchange.logged_model.as_deref(),
        retries: exchange.retries,
        request_bytes: exchange.body_bytes,
        wait_ns: since(exchange.complete_ns, exchange.served_ns),
        first_byte_ns: since(exchange.complete_ns, exchange.first_byte_ns),
        duration_ns: since(exchange.began_ns, world.now_ns()),
        ..Entry::default()
    };
    let worker = exchange.sent.then_some(exchange.slot);
    let holder = exchange.pd.as_ref().and_then(|pd| pd.holder);
    world.log(entry, worker, holder.map(|holder| holder.slot));
}

/// The same of one whose head could not be read.
fn log_unread<W: World>(world: &mut W, status: u16) {
    let entry = Entry {
        status,
        outcome: Outcome::Refused.label(),
        ..Entry::default()
    };
    world.log(entry, None, None);
}

/// Records the end of an exchange; dropping it gives the count back (E1).
fn finish<W: World>(mut exchange: Place, world: &mut W, outcome: Outcome) {
    if exchange.route != Route::Admin {
        world.record(Record {
            route: exchange.route,
            outcome,
            duration_ns: world.now_ns().saturating_sub(exchange.began_ns),
            first_byte_ns: exchange.first_byte_ns.saturating_sub(exchange.complete_ns),
            is_in_legs: exchange.pd.is_some(),
            is_exhausted: exchange.is_exhausted,
            wait_ns: exchange.served_ns.saturating_sub(exchange.complete_ns),
            status: exchange.status,
            retries: exchange.retries,
            request_bytes: exchange.body_bytes,
            answer_bytes: exchange.counted.bytes,
            event_count: exchange.counted.event_count,
            is_event_stream: exchange.is_event_stream,
        });
    }
    if world.is_logged() {
        log(&exchange, world, outcome);
    }
    if !pd::is_orphan(&exchange) {
        // Before somebody is let in for them.
        exchange.seat = None;
        if let Some(pd) = exchange.pd.as_mut() {
            pd.reserved = None;
        }
    }
    wait::leave(&mut exchange, world);
    if pd::is_orphan(&exchange) {
        world.count_pd(PdEvent::Orphan);
        return world.adopt(Session::of_orphan(exchange));
    }
    let message = std::mem::take(&mut exchange.message);
    if message.capacity() > 0 {
        world.recycle(message);
    }
    world.put_back(exchange.clear());
}
