//! What an exchange may do to the world around it. Implemented by a core with sockets, and by a simulation with a fake
//! clock: the state machine is the same under both.

use shards::{LoadGuard, Permit, Slot, WorkerId};

use super::{Empty, Entrance, Session};
use crate::access_log::Entry;
use crate::config::Config;
use crate::held::Held;
use crate::route::{Fields, Role, Whole};
use crate::shared::{AdminRequest, Outcome, Route, Worker};
use crate::tokenize::Prompt;

/// What is asked of the policy.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The endpoint.
    pub route: Route,
    /// Among which workers.
    pub role: Role,
    /// The key is that of the choice just before this one: what was computed for it holds.
    pub is_same_prompt: bool,
    /// The header fields that the client sent, each as `name: value CRLF`.
    pub head: &'a [u8],
    /// Body and its fields, where the request has a key.
    pub key: Option<(&'a [u8], &'a Fields)>,
    /// Its tokens, where they were made of its text.
    pub prompt: Option<&'a Prompt>,
    /// The model asked for.
    pub model: Option<&'a str>,
    /// Bytes of the body, for the books.
    pub prompt_bytes: u64,
    /// Workers that have already failed this request.
    pub tried: &'a [Slot],
    /// The request has begun and cannot wait (its blocks lie on a prefill worker, say): a worker that is full is better
    /// than none.
    pub is_followed_up: bool,
}

/// A worker and the count taken for it, one step.
pub struct Seat {
    /// The worker, in this life.
    pub id: WorkerId,
    /// The worker is out, and this request tries whether it is well again.
    pub is_trial: bool,
    /// Bytes of the prompt that it does not hold, as far as is known; `None`: the request has no key.
    pub missing_bytes: Option<u64>,
    /// What `expected_wait` learns from its first byte; `None`: nothing is to be learnt.
    pub ahead: Option<Ahead>,
    /// Gives the count back when dropped.
    pub guard: LoadGuard,
}

/// What waits on a worker when a request is sent there, itself among it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// The role by whose policy it was chosen.
    pub role: Role,
    /// Bytes to compute.
    pub bytes: u64,
    /// Requests.
    pub requests: u32,
    /// Answers under way.
    pub streams: u32,
    /// Of these bytes its own.
    pub own_bytes: u64,
}

/// What an attempt tells of its worker. A 4xx is the client's doing and tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// No connection, or one that broke before a byte of an answer.
    Refused,
    /// Broken off, malformed, or out of time.
    Failed,
    /// A 5xx answer other than 503.
    Error,
    /// 429 or 503: alive, and has no room, for so many seconds (0: it did not say).
    Busy(u32),
    /// An answer below 400, whole; of a stream its begin.
    Good,
    /// An answer has come to its end, whatever it said.
    Ended,
}

/// What happened to a request in two legs, to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PdEvent {
    /// It began, at this endpoint.
    Request(Route),
    /// It was refused for the length of its body.
    RequestTooLong,
    /// A prefill worker's answer was too long to be read for its parameters.
    AnswerTooLong,
    /// It goes whole to one decode worker.
    Whole(Whole),
    /// It goes to a decode worker alone, which holds nearly all of its prompt.
    Skipped,
    /// A prefill worker answered without transfer parameters.
    MissingTransfer,
    /// A prefill worker has computed the prompt and keeps its blocks for a decode worker.
    Handover,
    /// Those blocks were too old for another decode worker, or their holder has restarted.
    Stale,
    /// Nobody will fetch those blocks: they have to be released.
    Orphan,
    /// They were.
    Released,
    /// They could not be.
    Lost,
    /// An answer got the prefill worker's token counts.
    UsageFixed,
}

/// Why there is no seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSeat {
    /// No worker, healthy or not, serves this model.
    UnknownModel,
    /// Workers serve it, none may get requests now; or there is no worker at all.
    NoneEligible,
    /// All eligible ones have been tried.
    AllTried,
    /// All that are left have as many requests as they may have.
    Full,
}

/// How a leg begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dial {
    /// A kept-alive connection is ours; bytes may be sent now.
    Reused,
    /// A connection is being made; `on_connected` or `on_worker_failed` will follow.
    Connecting,
    /// None can be made (no descriptor, or the worker has gone from the fleet).
    Refused,
}

/// What one exchange was, at its end.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Endpoint family.
    pub route: Route,
    /// How it ended.
    pub outcome: Outcome,
    /// First byte in to last byte out, ns.
    pub duration_ns: u64,
    /// Request complete to first byte of the answer, ns; 0: none came.
    pub first_byte_ns: u64,
    /// It went in legs, of prefill and decode.
    pub is_in_legs: bool,
    /// It failed in a way that is tried again, and could not be: no retry, no budget, or no other worker was left.
    pub is_exhausted: bool,
    /// In line before its turn, ns.
    pub wait_ns: u64,
    /// Of the answer; 0: none was begun.
    pub status: u16,
    /// Attempts after the first.
    pub retries: u32,
    /// Of its body.
    pub request_bytes: u64,
    /// Of the answer's body, as it went out.
    pub answer_bytes: u64,
    /// Events of an event stream, where they are counted.
    pub event_count: u32,
    /// The answer was one.
    pub is_event_stream: bool,
}

/// The world of one session: its client connection, and the worker connection of its current leg.
pub trait World {
    /// A piece of received bytes.
    type Piece: AsRef<[u8]>;

    /// The frozen configuration.
    fn config(&self) -> &Config;
    /// Time at the start of this turn, ns since an arbitrary start.
    fn now_ns(&self) -> u64;
    /// Time now, ns on the same scale; a clock is read.
    fn clock_ns(&self) -> u64;
    /// No new requests on any connection.
    fn is_draining(&self) -> bool;
    /// Memory of a request that has ended.
    fn place(&mut self) -> Option<Empty> {
        None
    }
    /// And back.
    fn put_back(&mut self, _left: Empty) {}

    /// A fresh request id, appended.
    fn make_request_id(&mut self, route: Route, out: &mut Vec<u8>);

    /// A request has begun; [`World::record`] follows at its end, but for an admin path's. `explains`: it wants to be told why
    /// its worker was chosen. `true`: the events of its answer are to be counted.
    fn begin_exchange(&mut self, _route: Route, _request_id: &[u8], _explains: bool) -> bool {
        false
    }
    /// Appends what was decided for it, as one line of JSON; `names`: with the workers' URLs.
    fn explain(&mut self, _names: bool, _out: &mut Vec<u8>) {}

    /// An empty buffer, recycled if there is one.
    fn buffer(&mut self) -> Vec<u8>;
    /// The same bytes in a buffer with room for that many more; whether it was used before, so that all of it takes memory.
    fn grow(&mut self, buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool);
    /// Takes a buffer back.
    fn recycle(&mut self, buffer: Vec<u8>);
    /// Counts a body, up to so many bytes; `false`: there is no room for them. Where memory has no limit there always is.
    fn hold_body(&mut self, _held: &mut Held, _bytes: u64) -> bool {
        true
    }
    /// The same of a request that is to wait.
    fn hold_in_queue(&mut self, _held: &mut Held, _bytes: u64) -> bool {
        true
    }

    /// Queues bytes for the client.
    fn send(&mut self, bytes: Vec<u8>);
    /// Queues a part of a received piece for the client.
    fn send_piece(&mut self, piece: Self::Piece, from: usize, to: usize);
    /// Closes the client's connection once all queued bytes have left; reads on for a moment so that they arrive.
    fn finish(&mut self);
    /// Ends the client's connection now, visibly: a reset.
    fn abort(&mut self);
    /// Reads from the client, or stops reading.
    fn read_client(&mut self, on: bool);
    /// Whether more waits for the client than one may hold.
    fn is_client_full(&mut self) -> bool;
    /// Whether the client is not read because the worker has not taken what it sent.
    fn is_client_held(&mut self) -> bool;
    /// Whether the worker is not read because the client has not taken what it got.
    fn is_worker_held(&mut self) -> bool;
    /// Watches a half-closed client for a reset: `on_client_gone` follows if one comes.
    fn watch_client(&mut self);
    /// When `on_deadline` is due; `u64::MAX`: never.
    fn deadline(&mut self, at_ns: u64);

    /// The client's request asks to be let in; with [`Entrance::Queued`], `on_turn` will follow.
    fn enter(&mut self) -> Entrance;
    /// It waits for a worker instead; `on_turn` will follow, perhaps in vain.
    ///
    /// # Errors
    /// Too many wait: the permit comes back.
    fn step_aside(&mut self, permit: Permit) -> Result<(), Permit>;
    /// It does not wait any more.
    fn stop_waiting(&mut self);
    /// It is over.
    fn leave(&mut self, permit: Permit);
    /// When a client that is refused now may come again, in seconds, at least 1.
    fn retry_after_secs(&self) -> u32;
    /// A request has waited so long, ns.
    fn record_wait(&mut self, ns: u64);

    /// Asks for the tokens of a prompt of text, if the policy wants them: `on_tokens` will follow with this number, in time or
    /// without them. `None`: the request goes on as it is.
    fn ask_tokens(&mut self, _route: Route, _body: &[u8], _fields: &Fields) -> Option<u64> {
        None
    }
    /// Chooses a worker and takes its count.
    ///
    /// # Errors
    /// Nobody may get this request.
    fn choose(&mut self, ask: Ask<'_>) -> Result<Seat, NoSeat>;
    /// The worker in a slot; `None`: it may not get requests now, or has gone from the fleet.
    fn worker(&self, slot: Slot) -> Option<&Worker>;
    /// A random number; not for secrets.
    fn random(&mut self) -> u64;
    /// Gives a session without a client a place of its own, and begins it.
    fn adopt(&mut self, session: Session);
    /// Begins a leg; `fresh`: not on a kept-alive connection.
    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial;
    /// Sends a request to the worker, from [`super::message_start`] on. It comes back at once if it has left, else later
    /// through `on_request_sent`.
    fn send_message(&mut self, message: Vec<u8>) -> Option<Vec<u8>>;
    /// Queues more bytes for the worker.
    fn send_worker(&mut self, bytes: Vec<u8>);
    /// Queues a part of a received piece for the worker.
    fn send_worker_piece(&mut self, piece: Self::Piece, from: usize, to: usize);
    /// Breaks the leg's connection; bytes being sent come back through `on_request_sent`.
    fn break_leg(&mut self);
    /// Ends the leg; `keep`: its connection is in a clean state and may serve again.
    fn end_leg(&mut self, keep: bool);

    /// Hands a request over to the control plane; `false`: it is too busy.
    fn hand_over(&mut self, request: AdminRequest) -> bool;

    /// What an attempt told of its worker.
    fn judge(&mut self, slot: Slot, sign: Sign, is_trial: bool);
    /// Whether the retry budget allows another one; takes it.
    fn may_retry(&mut self) -> bool;
    /// A reused connection had died; the request was sent again.
    fn count_resend(&mut self);
    /// The request went to another worker, for the so-manieth time.
    fn count_retry(&mut self, route: Route, attempt: u32);
    /// Something happened to a request in two legs.
    fn count_pd(&mut self, event: PdEvent);
    /// A decode leg is dispatched: ns from the end of its prefill leg, and from when its seat was taken.
    fn record_handover(&mut self, gap_ns: u64, pending_ns: u64);
    /// A request was refused as malformed.
    fn count_malformed(&mut self);
    /// The router's own added time of one half of an exchange, ns.
    fn record_added(&mut self, ns: u64);
    /// A further piece of an answer came from a worker, so long after the one before, ns; `None`: the first of a body, behind
    /// its head.
    fn record_piece(&mut self, slot: Slot, gap_ns: Option<u64>);
    /// A good answer in one piece came to its end; its first byte had been waited for so long, ns.
    fn record_answer(&mut self, slot: Slot, wait_ns: u64, is_trial: bool);
    /// The first byte of what was asked came so long after the choice, ns.
    fn learn_wait(&mut self, _slot: Slot, _ahead: Ahead, _wait_ns: u64) {}
    /// Whether requests are logged.
    fn is_logged(&self) -> bool;
    /// Logs a request; its workers and its client are filled in.
    fn log(&mut self, entry: Entry<'_>, worker: Option<Slot>, prefill_worker: Option<Slot>);
    /// An exchange is over.
    fn record(&mut self, record: Record);
}
