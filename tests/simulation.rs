//! One client connection in a simulation: the state machine of `exchange` with a fake clock, a scripted policy and no I/O.
//!
//! Two kinds of test. *Splits*: the same bytes in other pieces must come out the same. *Schedules*: thousands of seeds,
//! each an order of events that a core could see (late notices, resets, silence, a leaving client, a drain), with the
//! invariants of `exchange` checked after every event. A failure prints `case SEED` and what happened; `SEED=that` plays
//! it again as the first case.

#[cfg(not(fuzzing))]
mod common;
#[cfg(fuzzing)]
use crate::common;

use std::collections::{HashSet, VecDeque};
use std::rc::Rc;

use common::line::Line;
use common::naive::{Message, chunked, field, read_message, status};
use common::{Rng, seed};
use corelane::access_log::Entry;
use corelane::config::Config;
use corelane::exchange::{
    Ask, Dial, Entrance, NoSeat, PdEvent, Record, Seat, Session, Sign, World, message_start,
};
use corelane::route::{Fields, Role};
use corelane::shared::{AdminReply, AdminRequest, Route, Worker};
use corelane::tokenize::Prompt;
use shards::{Books, LoadGuard, Permit, Slot, WorkerId};

const WORKER_COUNT: u16 = 4;
const SECOND_NS: u64 = 1_000_000_000;

// ---- what clients ask ----

/// A request as its client writes it, and what must become of it.
#[derive(Clone, Debug)]
struct Asked {
    wire: Vec<u8>,
    /// Method and target as the worker must see them; empty: no worker may see this request.
    line: String,
    body: Vec<u8>,
    is_head: bool,
}

fn ask(
    tag: usize,
    line: &str,
    version: &str,
    fields: &str,
    body: &[u8],
    chunks: Option<&[usize]>,
) -> Asked {
    let mut wire =
        format!("{line} {version}\r\nHost: router.test\r\nX-Tag: {tag}\r\n{fields}").into_bytes();
    match chunks {
        Some(sizes) => {
            wire.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            wire.extend_from_slice(&chunked(body, sizes, "X-Sum: 1\r\n"));
        }
        None if body.is_empty() && !line.starts_with("POST") => wire.extend_from_slice(b"\r\n"),
        None => {
            wire.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
            wire.extend_from_slice(body);
        }
    }
    Asked {
        wire,
        line: line.to_string(),
        body: body.to_vec(),
        is_head: line.starts_with("HEAD"),
    }
}

fn chat_body(tag: usize) -> Vec<u8> {
    common::chat(&format!("question {tag}"))
}

const CHAT: &str = "POST /v1/chat/completions";

/// One request of each kind; `tag` is its place on the connection.
fn asks(tag: usize) -> Vec<Asked> {
    let body = chat_body(tag);
    let upload: Vec<u8> = (0..3000u32).map(|n| b'a' + (n % 23) as u8).collect();
    let large = vec![b'L'; 70_000];
    let mut blank_lines_first = ask(tag, CHAT, "HTTP/1.1", "", &body, None);
    blank_lines_first.wire.splice(0..0, *b"\r\n\r\n");
    vec![
        ask(tag, CHAT, "HTTP/1.1", "", &body, None),
        ask(tag, CHAT, "HTTP/1.1", "", &body, Some(&[7, 20, 1])),
        ask(tag, "GET /other?a=b", "HTTP/1.1", "", b"", None),
        ask(tag, "HEAD /other", "HTTP/1.1", "", b"", None),
        ask(
            tag,
            "PUT /upload",
            "HTTP/1.1",
            "",
            &upload,
            Some(&[100, 1000, 3]),
        ),
        ask(tag, "PUT /upload", "HTTP/1.1", "", &upload, None),
        ask(tag, "PUT /large", "HTTP/1.1", "", &large, None),
        ask(
            tag,
            CHAT,
            "HTTP/1.0",
            "Connection: keep-alive\r\n",
            &body,
            None,
        ),
        ask(
            tag,
            CHAT,
            "HTTP/1.1",
            "Expect: 100-continue\r\n",
            &body,
            None,
        ),
        blank_lines_first,
        ask(tag, CHAT, "HTTP/1.0", "", &body, None),
        ask(tag, CHAT, "HTTP/1.1", "Connection: close\r\n", &body, None),
    ]
}

/// How many of [`asks`], from the first on, leave the connection open.
const LASTING_ASKS: usize = 10;

/// Requests that the router answers itself. The first two leave the connection open.
fn asks_for_us(tag: usize) -> Vec<Asked> {
    let mut all = vec![
        ask(tag, "GET /health", "HTTP/1.1", "", b"", None),
        ask(tag, CHAT, "HTTP/1.1", "", b"{\"no JSON", None),
        ask(tag, "GET /v1/completions", "HTTP/1.1", "", b"", None),
        ask(tag, CHAT, "HTTP/1.1", "Bad Field: 1\r\n", b"{}", None),
        ask(tag, CHAT, "HTTP/1.1", "Content-Length: 1\r\n", b"{}", None),
    ];
    for ask in &mut all {
        ask.line = String::new();
    }
    all
}

// ---- what workers answer ----

/// An answer as its worker writes it.
#[derive(Clone, Debug, Default)]
struct Reply {
    wire: Vec<u8>,
    head_bytes: usize,
    /// Its end is the connection's.
    until_close: bool,
    /// Where it ends; what follows belongs to nothing.
    whole_at: usize,
    /// The worker says that it closes.
    closes: bool,
    /// It is no answer at all.
    is_broken: bool,
    body: Vec<u8>,
}

fn reply(tag: &str, status: u16, fields: &str, body: &[u8]) -> Reply {
    let head = format!("HTTP/1.1 {status} X\r\nX-Tag: {tag}\r\n{fields}\r\n");
    let mut wire = head.clone().into_bytes();
    wire.extend_from_slice(body);
    Reply {
        whole_at: wire.len(),
        wire,
        head_bytes: head.len(),
        body: body.to_vec(),
        ..Reply::default()
    }
}

/// One answer of each kind to a request; the first `SOUND_REPLIES` are well-formed and final.
fn replies(tag: &str, is_head: bool) -> Vec<Reply> {
    let text = format!("{{\"answer\":\"{tag}\",\"x\":\"{}\"}}", "y".repeat(60)).into_bytes();
    let length = format!("Content-Length: {}\r\n", text.len());
    let body: &[u8] = if is_head { b"" } else { &text };
    let framed = |fields: &str, wire: &[u8]| {
        let mut reply = reply(tag, 200, fields, if is_head { b"" } else { wire });
        reply.body = body.to_vec();
        reply
    };
    let chunks = chunked(&text, &[9, 1, 30], "X-Trailer: 1\r\n");
    let mut until_close = reply(tag, 200, "Connection: close\r\n", body);
    until_close.until_close = !is_head;
    until_close.closes = true;
    let mut http10 = reply(tag, 200, "", body);
    http10.wire[..8].copy_from_slice(b"HTTP/1.0");
    http10.until_close = !is_head;
    http10.closes = true;
    let mut interim = reply(tag, 200, &length, body);
    interim.wire.splice(
        0..0,
        *b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n",
    );
    interim.head_bytes = interim.wire.len() - body.len();
    interim.whole_at = interim.wire.len();
    let mut extra = reply(tag, 200, &length, body);
    extra.wire.extend_from_slice(b"HTTP/1.1 200 OK\r\n");
    let broken = |wire: &[u8]| Reply {
        wire: wire.to_vec(),
        is_broken: true,
        ..Reply::default()
    };
    let mut broken_chunk = framed("Transfer-Encoding: chunked\r\n", b"5\r\nhello");
    broken_chunk
        .wire
        .extend_from_slice(b"5\r\nworld\r\n0\r\n\r\n");
    broken_chunk.is_broken = !is_head;
    broken_chunk.whole_at = broken_chunk.head_bytes;
    vec![
        reply(tag, 200, &length, body),
        framed("Transfer-Encoding: chunked\r\n", &chunks),
        until_close,
        reply(tag, 204, "", b""),
        interim,
        reply(tag, 200, "Content-Length: 0\r\n", b""),
        reply(tag, 404, &length, body),
        reply(tag, 304, &length, b""),
        http10,
        extra,
        reply(tag, 503, &length, body),
        reply(tag, 500, &length, body),
        reply(tag, 429, "Content-Length: 0\r\n", b""),
        broken(b"HTTP/1.1 20 OK\r\n\r\n"),
        broken(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
        broken_chunk,
    ]
}

const SOUND_REPLIES: usize = 10;

// ---- what came out ----

/// The final answers in what a client got, in order, and what follows the last whole one without being a head yet.
fn read_answers(mut bytes: &[u8], asks: &[Asked]) -> (Vec<Message>, Vec<u8>) {
    let mut answers: Vec<Message> = Vec::new();
    while !bytes.is_empty() {
        let is_head = asks.get(answers.len()).is_some_and(|ask| ask.is_head);
        let status_at = bytes.get(9..12).unwrap_or(b"");
        // A head that never came whole (408) is answered before its method is known.
        let no_body = (is_head && status_at != b"408")
            || matches!(status_at, b"204" | b"304")
            || status_at.starts_with(b"1");
        let Some((message, len)) = read_message(bytes, no_body, true) else {
            break;
        };
        bytes = &bytes[len..];
        if status(&message) >= 200 {
            let is_whole = message.is_whole;
            answers.push(message);
            if !is_whole {
                break;
            }
        }
    }
    (answers, bytes.to_vec())
}

// ---- the world ----

fn place(id: WorkerId) -> Worker {
    Worker {
        id,
        role: Role::Regular,
        rank: None,
        kv: Default::default(),
        url: "http://worker.test:8000/prefix".into(),
        address: ([127, 0, 0, 1], 8000).into(),
        authority: "worker.test:8000".into(),
        path_prefix: "/prefix".into(),
        tls: None,
        models: Vec::new(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closed {
    Finished,
    Aborted,
}

struct Leg {
    slot: Slot,
    is_connecting: bool,
    /// What the worker has been sent, how much of it has been looked at, and whether that was a whole request.
    out: Vec<u8>,
    checked: usize,
    has_request: bool,
    /// Buffers with the ring; the first is the message as long as `message_is_out`.
    flight: VecDeque<Vec<u8>>,
    message_is_out: bool,
    /// The session asked for its connection to be broken.
    is_broken: bool,
    reply: Option<Reply>,
    replied: usize,
    /// The reply goes so far and no further; `Some(reset)`: then the connection ends, `None`: then silence.
    cut: Option<(usize, Option<bool>)>,
    /// The connection broke: its end is still to be told.
    is_reset: bool,
    /// Nothing will come of it, not even a refusal.
    is_black_hole: bool,
}

/// Chances in percent.
#[derive(Clone, Copy, Default)]
struct Odds {
    reused: u64,
    refused: u64,
    no_seat: u64,
    tokens: u64,
    queued: u64,
    full: u64,
    gone_from_fleet: u64,
    admin_busy: u64,
    held: u64,
    sent_at_once: u64,
}

struct Sim {
    config: Rc<Config>,
    asks: Rc<Vec<Asked>>,
    rng: Rng,
    odds: Odds,
    line: Line,
    now_ns: u64,
    deadline_ns: u64,
    books: &'static Books,
    workers: Vec<WorkerId>,
    /// Where all of them are.
    place: Rc<Worker>,
    is_draining: bool,
    ids: u64,
    /// Numbers under which tokens were asked for, not answered yet; the last number; what the last choice knew.
    tokens_asked: VecDeque<u64>,
    tokens_number: u64,
    tokens_known: Option<u64>,
    /// What the client has been sent.
    out: Vec<u8>,
    closed: Option<Closed>,
    is_reading: bool,
    is_watched: bool,
    /// The client does not take what it is sent.
    is_client_full: bool,
    leg: Option<Leg>,
    dial_count: usize,
    /// Workers chosen for the running exchange.
    chosen: Vec<Slot>,
    retries: u32,
    resends: u32,
    failures: Vec<Slot>,
    malformed: u32,
    records: Vec<Record>,
    /// Requests the control plane has not answered yet (one that is late may be there beside a newer one).
    admin: VecDeque<AdminRequest>,
    /// Messages that came back to the session and have not been given away again.
    returned: HashSet<*const u8>,
    /// What workers have answered, by tag, and how much of it was let through.
    told: Vec<(String, Reply, usize, bool)>,
    /// What workers have been sent, one a leg that was opened.
    seen: Vec<Vec<u8>>,
}

impl Sim {
    fn chance(&mut self, percent: u64) -> bool {
        self.rng.below(100) < percent
    }

    fn in_flight(&self) -> u32 {
        self.workers
            .iter()
            .map(|w| self.books.in_flight(w.slot))
            .sum()
    }
}

impl World for Sim {
    type Piece = Vec<u8>;

    fn config(&self) -> &Config {
        &self.config
    }
    fn now_ns(&self) -> u64 {
        self.now_ns
    }
    fn clock_ns(&self) -> u64 {
        self.now_ns
    }
    fn is_draining(&self) -> bool {
        self.is_draining
    }
    fn make_request_id(&mut self, _: Route, out: &mut Vec<u8>) {
        self.ids += 1;
        out.extend_from_slice(format!("id-{}", self.ids).as_bytes());
    }

    fn buffer(&mut self) -> Vec<u8> {
        Vec::with_capacity(64)
    }
    fn grow(&mut self, mut buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        buffer.reserve(more);
        (buffer, false)
    }
    fn recycle(&mut self, buffer: Vec<u8>) {
        self.returned.remove(&buffer.as_ptr());
    }

    fn send(&mut self, bytes: Vec<u8>) {
        assert_eq!(
            self.closed,
            None,
            "bytes for the client after its end: {:?}",
            String::from_utf8_lossy(&bytes)
        );
        self.out.extend_from_slice(&bytes);
    }
    fn send_piece(&mut self, piece: Vec<u8>, from: usize, to: usize) {
        assert!(
            from < to && to <= piece.len(),
            "an empty or impossible part"
        );
        self.send(piece[from..to].to_vec());
    }
    fn finish(&mut self) {
        assert_eq!(self.closed, None, "a connection is finished once");
        self.closed = Some(Closed::Finished);
    }
    fn abort(&mut self) {
        assert_ne!(
            self.closed,
            Some(Closed::Aborted),
            "a connection is aborted once"
        );
        self.closed = Some(Closed::Aborted);
    }
    fn read_client(&mut self, on: bool) {
        self.is_reading = on;
    }
    fn is_client_full(&mut self) -> bool {
        self.is_client_full
    }
    fn is_client_held(&mut self) -> bool {
        self.chance(self.odds.held)
    }
    fn is_worker_held(&mut self) -> bool {
        self.chance(self.odds.held)
    }
    fn watch_client(&mut self) {
        self.is_watched = true;
    }
    fn deadline(&mut self, at_ns: u64) {
        self.deadline_ns = at_ns;
    }

    fn enter(&mut self) -> Entrance {
        let (limit, queue_max) = (
            u32::from(!self.chance(self.odds.queued)),
            u32::from(!self.chance(self.odds.queued)),
        );
        self.line.enter(limit, queue_max)
    }
    fn step_aside(&mut self, permit: Permit) -> Result<(), Permit> {
        let queue_max = u32::from(!self.chance(self.odds.queued));
        self.line.step_aside(permit, queue_max)
    }
    fn ask_tokens(&mut self, _: Route, body: &[u8], _: &Fields) -> Option<u64> {
        assert!(body.starts_with(b"{"), "the whole body");
        if !self.chance(self.odds.tokens) {
            return None;
        }
        self.tokens_number += 1;
        self.tokens_asked.push_back(self.tokens_number);
        Some(self.tokens_number)
    }
    fn is_logged(&self) -> bool {
        self.rng.0 & 1 == 0
    }
    fn log(&mut self, entry: Entry<'_>, _: Option<Slot>, _: Option<Slot>) {
        assert!(entry.target.len() <= 64 * 1024);
    }
    fn stop_waiting(&mut self) {
        self.line.stop_waiting();
    }
    fn leave(&mut self, permit: Permit) {
        let _ = permit.leave();
    }
    fn retry_after_secs(&self) -> u32 {
        7
    }
    fn record_wait(&mut self, _: u64) {}

    fn choose(&mut self, ask: Ask<'_>) -> Result<Seat, NoSeat> {
        self.tokens_known = ask.prompt.map(|prompt| prompt.count);
        assert_eq!(
            ask.tried, self.chosen,
            "every worker chosen for this request before counts as tried"
        );
        if ask.tried.is_empty() && self.chance(self.odds.no_seat) {
            return Err(NoSeat::NoneEligible);
        }
        if !ask.is_followed_up && self.chance(self.odds.full) {
            return Err(NoSeat::Full);
        }
        let left: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|w| !ask.tried.contains(&w.slot))
            .copied()
            .collect();
        if left.is_empty() {
            return Err(NoSeat::AllTried);
        }
        let worker = left[self.rng.below(left.len() as u64) as usize];
        let guard =
            LoadGuard::acquire(self.books, worker, ask.prompt_bytes).expect("the worker is open");
        self.chosen.push(worker.slot);
        Ok(Seat {
            id: worker,
            is_trial: false,
            missing_bytes: None,
            ahead: None,
            guard,
        })
    }
    fn worker(&self, slot: Slot) -> Option<&Worker> {
        // Odd by slot and time, not by the generator: this takes no `&mut self`.
        let dice = (u64::from(slot.0) + self.now_ns + self.dial_count as u64)
            .wrapping_mul(0x9e37_79b9)
            % 100;
        (dice >= self.odds.gone_from_fleet).then_some(&*self.place)
    }
    fn random(&mut self) -> u64 {
        self.rng.below(u64::MAX)
    }
    fn adopt(&mut self, _: Session) {
        panic!("nothing is left behind without P/D");
    }
    fn count_pd(&mut self, event: PdEvent) {
        panic!("{event:?} without P/D");
    }
    fn record_handover(&mut self, _: u64, _: u64) {}
    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial {
        assert!(self.leg.is_none(), "one leg at a time");
        assert_eq!(self.closed, None, "a leg for a client that is gone");
        assert_eq!(
            self.chosen.last(),
            Some(&slot),
            "the worker that was chosen"
        );
        assert_eq!(
            (self.in_flight(), self.books.in_flight(slot)),
            (1, 1),
            "its count is taken, no other is held"
        );
        let (answers, rest) = read_answers(&self.out, &self.asks);
        assert!(
            rest.is_empty() && answers.iter().all(|a| a.is_whole),
            "E2: an answer has begun and another leg is dialed"
        );
        self.dial_count += 1;
        if self.chance(self.odds.refused) {
            return Dial::Refused;
        }
        let is_reused = !fresh && self.chance(self.odds.reused);
        self.leg = Some(Leg {
            slot,
            is_connecting: !is_reused,
            out: Vec::new(),
            checked: 0,
            has_request: false,
            flight: VecDeque::new(),
            message_is_out: false,
            is_broken: false,
            reply: None,
            replied: 0,
            cut: None,
            is_reset: false,
            is_black_hole: false,
        });
        if is_reused {
            Dial::Reused
        } else {
            Dial::Connecting
        }
    }
    fn send_message(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        let at_once = self.chance(self.odds.sent_at_once);
        let leg = self.leg.as_mut().expect("a leg to send on");
        assert!(
            !leg.is_connecting && leg.out.is_empty(),
            "one message a leg, when it is connected"
        );
        let from = message_start(&message);
        leg.out.extend_from_slice(&message[from..]);
        if at_once {
            self.returned.insert(message.as_ptr());
            return Some(message);
        }
        self.returned.remove(&message.as_ptr());
        leg.flight.push_back(message);
        leg.message_is_out = true;
        None
    }
    fn send_worker(&mut self, bytes: Vec<u8>) {
        let leg = self.leg.as_mut().expect("a leg to send on");
        assert!(
            !leg.out.is_empty() && !bytes.is_empty(),
            "a body follows its head"
        );
        leg.out.extend_from_slice(&bytes);
        leg.flight.push_back(bytes);
    }
    fn send_worker_piece(&mut self, piece: Vec<u8>, from: usize, to: usize) {
        assert!(
            from < to && to <= piece.len(),
            "an empty or impossible part"
        );
        let leg = self.leg.as_mut().expect("a leg to send on");
        assert!(!leg.out.is_empty(), "a body follows its head");
        leg.out.extend_from_slice(&piece[from..to]);
    }
    fn break_leg(&mut self) {
        let leg = self.leg.as_mut().expect("a leg to break");
        assert!(
            leg.message_is_out,
            "a leg is broken to get the message back"
        );
        leg.is_broken = true;
    }
    fn end_leg(&mut self, keep: bool) {
        let leg = self.leg.take().expect("a leg is ended once");
        if keep {
            let reply = leg
                .reply
                .as_ref()
                .expect("a leg that is kept has been answered");
            let is_sound = !reply.is_broken && !reply.closes && !reply.until_close;
            assert!(
                is_sound && leg.replied == reply.whole_at,
                "E4: kept with the answer's end in doubt"
            );
            assert!(
                !leg.message_is_out && !leg.is_broken,
                "E4: kept while the request is still being sent"
            );
            let sent = read_message(&leg.out, false, false);
            assert!(
                sent.is_some_and(|(m, len)| m.is_whole && len == leg.out.len()),
                "E4: half a request sent"
            );
        }
        self.keep_for_the_end(leg);
    }

    fn hand_over(&mut self, request: AdminRequest) -> bool {
        if self.chance(self.odds.admin_busy) {
            return false;
        }
        self.admin.push_back(request);
        true
    }

    fn judge(&mut self, slot: Slot, sign: Sign, _: bool) {
        if matches!(sign, Sign::Refused | Sign::Failed) {
            self.failures.push(slot);
        }
    }
    fn may_retry(&mut self) -> bool {
        true
    }
    fn count_resend(&mut self) {
        self.resends += 1;
    }
    fn count_retry(&mut self, _: Route, _: u32) {
        self.retries += 1;
    }
    fn count_malformed(&mut self) {
        self.malformed += 1;
    }
    fn record_added(&mut self, _: u64) {}
    fn record_answer(&mut self, _: Slot, _: u64, _: bool) {}
    fn record_piece(&mut self, _: Slot, _: Option<u64>) {}
    fn record(&mut self, record: Record) {
        self.chosen.clear();
        self.records.push(record);
    }
}

impl Sim {
    fn keep_for_the_end(&mut self, leg: Leg) {
        if let Some(reply) = leg.reply {
            let tag = reply_tag(&reply);
            let fin = leg
                .cut
                .is_some_and(|(at, end)| leg.replied >= at && end == Some(false));
            self.told.push((tag, reply, leg.replied, fin));
        }
        self.seen.push(leg.out);
    }
}

fn reply_tag(reply: &Reply) -> String {
    let head = String::from_utf8_lossy(&reply.wire);
    head.lines()
        .find_map(|l| l.strip_prefix("X-Tag: "))
        .unwrap_or("")
        .to_string()
}

// ---- a connection in it ----

struct Case {
    seed: u64,
    session: Session,
    sim: Sim,
    /// Bytes the client has still to send.
    at: usize,
    wire: Vec<u8>,
    client_ended: bool,
    client_gone: bool,
    has_drained: bool,
    trace: Vec<(&'static str, usize)>,
}

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("case {} (SEED={} plays it first)", self.seed, self.seed);
            for (event, at) in self.trace.iter().rev().take(60).rev() {
                println!("  {event} {at}");
            }
            println!("client got: {:?}", String::from_utf8_lossy(&self.sim.out));
        }
    }
}

impl Case {
    fn new(
        seed: u64,
        config: &Rc<Config>,
        books: &'static Books,
        workers: &[WorkerId],
        asks: Vec<Asked>,
    ) -> Case {
        let wire = asks.iter().flat_map(|ask| ask.wire.clone()).collect();
        let sim = Sim {
            config: config.clone(),
            asks: Rc::new(asks),
            rng: Rng(seed),
            odds: Odds::default(),
            line: Line::new(),
            now_ns: 1000 * SECOND_NS,
            deadline_ns: u64::MAX,
            books,
            workers: workers.to_vec(),
            place: Rc::new(place(workers[0])),
            is_draining: false,
            ids: 0,
            tokens_asked: VecDeque::new(),
            tokens_number: 0,
            tokens_known: None,
            out: Vec::new(),
            closed: None,
            is_reading: true,
            is_watched: false,
            is_client_full: false,
            leg: None,
            dial_count: 0,
            chosen: Vec::new(),
            retries: 0,
            resends: 0,
            failures: Vec::new(),
            malformed: 0,
            records: Vec::new(),
            admin: VecDeque::new(),
            returned: HashSet::new(),
            told: Vec::new(),
            seen: Vec::new(),
        };
        let mut case = Case {
            seed,
            session: Session::new(),
            sim,
            at: 0,
            wire,
            client_ended: false,
            client_gone: false,
            has_drained: false,
            trace: Vec::new(),
        };
        case.session.begin(&mut case.sim);
        case.check("begin", 0);
        case
    }

    fn is_open(&self) -> bool {
        self.sim.closed.is_none()
    }

    /// What must hold after every event.
    fn check(&mut self, event: &'static str, at: usize) {
        self.trace.push((event, at));
        let sim = &self.sim;
        let held = sim.in_flight();
        assert!(held <= 1, "one count at a time, not {held}");
        if let Some(leg) = &sim.leg {
            assert_eq!(
                sim.books.in_flight(leg.slot),
                1,
                "the leg's worker has its count"
            );
        }
        let is_over = sim.closed.is_some();
        let is_idle = is_over || self.session.is_idle();
        sim.line.check(held > 0, is_idle);
        if is_over || self.session.is_idle() {
            assert_eq!(held, 0, "E1: a count is held for nobody");
            assert!(sim.leg.is_none(), "a leg serves nobody");
            assert!(sim.returned.is_empty(), "a message that came back was lost");
        }
        if !is_over {
            assert!(
                sim.deadline_ns != u64::MAX,
                "nothing will ever wake this session"
            );
            if self.session.is_idle() && !self.client_ended && !sim.is_client_full {
                assert!(
                    sim.is_reading,
                    "an idle client is not read: its next request will never come"
                );
            }
        }
    }

    // Events. Each does what a core would.

    fn client_bytes(&mut self, count: usize) {
        let to = (self.at + count.max(1)).min(self.wire.len());
        let piece = self.wire[self.at..to].to_vec();
        self.at = to;
        self.session.on_client_bytes(&mut self.sim, piece);
        self.check("client bytes up to", to);
    }

    fn client_end(&mut self) {
        self.client_ended = true;
        self.session.on_client_end(&mut self.sim);
        self.check("client end", 0);
    }

    fn client_gone(&mut self) {
        self.client_gone = true;
        self.session.on_client_gone(&mut self.sim);
        self.check("client gone", 0);
        assert_eq!(self.sim.closed, Some(Closed::Aborted));
    }

    fn connected(&mut self) {
        let leg = self.sim.leg.as_mut().expect("a leg");
        assert!(leg.is_connecting);
        leg.is_connecting = false;
        self.session.on_connected(&mut self.sim);
        self.check("connected", 0);
    }

    /// The first buffer with the ring has left, or failed to.
    fn sent(&mut self) {
        let leg = self.sim.leg.as_mut().expect("a leg");
        let buffer = leg.flight.pop_front().expect("a buffer");
        let was_message = std::mem::take(&mut leg.message_is_out);
        if was_message {
            self.sim.returned.insert(buffer.as_ptr());
        }
        self.session.on_request_sent(&mut self.sim, buffer);
        self.check(
            if was_message {
                "message sent"
            } else {
                "body sent"
            },
            0,
        );
    }

    fn worker_bytes(&mut self, count: usize) {
        let leg = self.sim.leg.as_mut().expect("a leg");
        let reply = leg.reply.as_ref().expect("a reply");
        let until = leg.cut.map_or(reply.wire.len(), |(at, _)| at);
        let to = (leg.replied + count.max(1)).min(until);
        let piece = reply.wire[leg.replied..to].to_vec();
        leg.replied = to;
        self.session.on_worker_bytes(&mut self.sim, piece);
        self.check("worker bytes up to", to);
    }

    /// The client stops taking its answers, or takes them again.
    fn client_full(&mut self, is_full: bool) {
        self.sim.is_client_full = is_full;
        if !is_full {
            self.session.on_client_drained(&mut self.sim);
        }
        self.check("client full", usize::from(is_full));
    }

    fn worker_end(&mut self, failed: bool) {
        self.session.on_worker_end(&mut self.sim, failed);
        self.check(if failed { "worker reset" } else { "worker end" }, 0);
    }

    fn deadline(&mut self) {
        self.sim.now_ns = self.sim.now_ns.max(self.sim.deadline_ns);
        self.sim.deadline_ns = u64::MAX;
        self.session.on_deadline(&mut self.sim);
        self.check("deadline", 0);
    }

    fn admin_reply(&mut self) {
        let request = self.sim.admin.pop_front().expect("a request");
        let tag = request
            .headers
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case("x-tag"));
        let tag = format!("{}.admin", String::from_utf8_lossy(&tag.expect("a tag").1));
        let body = b"{\"ok\":true}".to_vec();
        let told = Reply {
            whole_at: 1,
            body: body.clone(),
            ..Reply::default()
        };
        self.sim.told.push((tag.clone(), told, 1, false));
        let headers = vec![("x-tag".to_string(), tag.into_bytes())];
        let answer = AdminReply {
            status: 200,
            headers,
            body,
        };
        self.session.on_admin_reply(&mut self.sim, &answer);
        self.check("admin reply", 0);
    }

    /// A request that waits is let in.
    fn turn(&mut self) {
        let permit = self.sim.line.turn();
        self.session.on_turn(&mut self.sim, permit);
        self.check("turn", 0);
    }

    /// The oldest question for tokens is answered, in time or not.
    fn tokens(&mut self, count: Option<u64>) {
        let number = self.sim.tokens_asked.pop_front().expect("a question");
        let prompt = count.map(|count| {
            let chain = Vec::new();
            Box::new(Prompt { count, chain })
        });
        self.session.on_tokens(&mut self.sim, number, prompt);
        self.check("tokens", 0);
    }

    fn drain(&mut self) {
        self.has_drained = true;
        self.sim.is_draining = true;
        self.session.on_drain(&mut self.sim);
        self.check("drain", 0);
    }

    /// Whether the worker of the leg has a whole request; checks what it has.
    fn worker_has_request(&mut self) -> bool {
        let Some(leg) = &mut self.sim.leg else {
            return false;
        };
        if leg.checked != leg.out.len() {
            leg.checked = leg.out.len();
            leg.has_request = check_request(&leg.out, &self.sim.asks);
        }
        leg.has_request
    }

    fn answers(&self) -> Vec<Message> {
        let (mut answers, rest) = read_answers(&self.sim.out, &self.sim.asks);
        assert!(
            rest.is_empty() || self.sim.closed == Some(Closed::Aborted),
            "half a head was sent: {rest:?}"
        );
        if let Some(last) = answers.last_mut() {
            // Where only the connection's end is the body's end, anything but a reset says that it is whole.
            last.is_whole |= last.until_close && self.sim.closed == Some(Closed::Finished);
        }
        answers
    }

    /// What must hold when all is over.
    fn check_end(&self) {
        assert!(!self.is_open());
        assert_eq!(self.sim.books.underflow_count(), 0);
        for out in &self.sim.seen {
            check_request(out, &self.sim.asks);
        }
        let answers = self.answers();
        assert!(
            answers.len() <= self.sim.asks.len(),
            "more answers than requests"
        );
        for (n, answer) in answers.iter().enumerate() {
            self.check_answer(n, answer);
        }
        if self.sim.closed != Some(Closed::Finished) {
            return;
        }
        if answers.last().is_some_and(|a| !a.is_whole) {
            return; // Cut where its framing tells.
        }
        // Requests that came whole are answered, unless an answer before them closed the connection.
        let mut ends = 0;
        let whole = self.sim.asks.iter().take_while(|ask| {
            ends += ask.wire.len();
            ends <= self.at
        });
        let closes = answers
            .last()
            .is_some_and(|a| a.until_close || field(&a.head, "connection").contains(&"close"));
        assert!(
            // A client that took nothing for a whole time limit is let go with what it asked for meanwhile.
            answers.len() >= whole.count() || closes || self.has_drained || self.sim.is_client_full,
            "a request was lost: {} answers, the last does not close",
            answers.len()
        );
    }

    fn check_answer(&self, n: usize, answer: &Message) {
        let Some(tag) = field(&answer.head, "x-tag").first().copied() else {
            let is_cut = self.sim.asks[n].is_head || !answer.is_whole;
            assert!(
                is_cut || memchr::memmem::find(&answer.body, b"{\"error\":{\"message\":").is_some(),
                "an answer of our own has OpenAI's shape: {answer:?}"
            );
            return;
        };
        assert_eq!(
            tag.split('.').next(),
            Some(&*n.to_string()),
            "E3: another request's answer"
        );
        let told = self.sim.told.iter().find(|(t, ..)| t == tag);
        let (_, reply, replied, fin) = told.expect("an answer that a worker gave");
        let want = if reply.until_close && *fin {
            &reply.wire[reply.head_bytes..(*replied).max(reply.head_bytes)]
        } else {
            &reply.body[..]
        };
        if answer.is_whole {
            assert_eq!(answer.body, want, "the answer is the worker's");
            assert!(
                !reply.is_broken,
                "an answer that broke framing came out whole"
            );
        } else {
            assert!(
                want.starts_with(&answer.body) || reply.is_broken,
                "the cut answer is the start of the worker's"
            );
        }
    }
}

/// Checks what a worker was sent against what the client asked; whether it is a whole request.
fn check_request(out: &[u8], asks: &[Asked]) -> bool {
    let Some((message, len)) = read_message(out, false, false) else {
        return false;
    };
    let head = &message.head;
    let tags = field(head, "x-tag");
    let ask = &asks[tags[0].parse::<usize>().expect("a tag")];
    let (method, target) = ask
        .line
        .split_once(' ')
        .expect("a worker sees only what is for it");
    assert!(
        head.starts_with(&format!("{method} /prefix{target} HTTP/1.1\r\n")),
        "{head}"
    );
    assert_eq!(
        (tags.len(), field(head, "host")),
        (1, vec!["worker.test:8000"]),
        "{head}"
    );
    assert!(
        field(head, "expect").is_empty() && field(head, "connection").is_empty(),
        "{head}"
    );
    assert!(
        ask.body.starts_with(&message.body),
        "the body is the client's"
    );
    if message.is_whole {
        assert_eq!(message.body, ask.body, "the whole body is the client's");
        assert_eq!(len, out.len(), "nothing behind the request");
    }
    message.is_whole
}

struct Bench {
    config: Rc<Config>,
    books: &'static Books,
    workers: Vec<WorkerId>,
}

impl Bench {
    fn new() -> Bench {
        let books: &'static Books = Box::leak(Box::new(Books::new(usize::from(WORKER_COUNT))));
        let workers = (0..WORKER_COUNT)
            .map(|n| books.open(Slot(n)).expect("free"))
            .collect();
        Bench {
            config: Rc::new(Config::default_for_tests()),
            books,
            workers,
        }
    }

    fn in_flight(&self) -> u32 {
        let held = |worker: &WorkerId| self.books.in_flight(worker.slot);
        self.workers.iter().map(held).sum()
    }

    fn case(&self, seed: u64, asks: Vec<Asked>) -> Case {
        Case::new(seed, &self.config, self.books, &self.workers, asks)
    }
}

// ---- splits ----

/// Plays requests and their replies with the bytes in other pieces; a worker answers when it has the whole request.
/// What both sides have at the end, chunks of our own making taken off.
fn play(
    bench: &Bench,
    seed: u64,
    asks: &[Asked],
    replies: &[Reply],
    half_close: bool,
    mut client_piece: impl FnMut(&mut Rng, usize) -> usize,
    mut worker_piece: impl FnMut(&mut Rng, usize) -> usize,
) -> (Vec<Message>, Option<Closed>, Vec<Message>, Option<Vec<u8>>) {
    let mut case = bench.case(seed, asks.to_vec());
    case.sim.odds.reused = 50;
    case.sim.odds.sent_at_once = 50;
    let mut rng = Rng(seed ^ 0x5eed);
    let mut dialed = 0;
    for _ in 0..2_000_000 {
        if !case.is_open() {
            break;
        }
        let has_request = case.worker_has_request();
        let mut events: Vec<u8> = Vec::new();
        if case.at < case.wire.len() && case.sim.is_reading {
            events.push(0);
        }
        if case.at == case.wire.len() && half_close && !case.client_ended {
            events.push(1);
        }
        if let Some(leg) = &mut case.sim.leg {
            if leg.is_connecting {
                events.push(2);
            }
            if !leg.flight.is_empty() {
                events.push(3);
            }
            if has_request && leg.reply.is_none() {
                leg.reply = Some(replies[dialed].clone());
                dialed += 1;
            }
            if let Some(reply) = &leg.reply {
                if leg.replied < reply.wire.len() {
                    events.push(4);
                } else if reply.until_close {
                    events.push(5);
                }
            }
        }
        if !case.sim.admin.is_empty() {
            events.push(6);
        }
        match events.get(rng.below(events.len().max(1) as u64) as usize) {
            Some(0) => {
                let at = case.at;
                case.client_bytes(client_piece(&mut rng, at));
            }
            Some(1) => case.client_end(),
            Some(2) => case.connected(),
            Some(3) => case.sent(),
            Some(4) => {
                let at = case.sim.leg.as_ref().map_or(0, |leg| leg.replied);
                case.worker_bytes(worker_piece(&mut rng, at));
            }
            Some(5) => case.worker_end(false),
            Some(_) => case.admin_reply(),
            None => case.deadline(),
        }
    }
    case.check_end();
    let streams_chunks = |m: &Message| !field(&m.head, "transfer-encoding").is_empty();
    let seen: Vec<Message> = case
        .sim
        .seen
        .iter()
        .filter_map(|out| read_message(out, false, false).map(|(m, _)| m))
        .collect();
    let answers = case.answers();
    // Where the router cuts chunks itself (or puts a probe before one), the cuts may differ, the content may not.
    // Nor is a client asked to go on that has done so already.
    let expects = |asked: &Asked| memchr::memmem::find(&asked.wire, b"Expect:").is_some();
    let is_raw = !half_close
        && !asks.iter().any(expects)
        && !replies.iter().any(|r| r.until_close)
        && !seen.iter().any(streams_chunks);
    let raw = is_raw.then(|| case.sim.out.clone());
    (answers, case.sim.closed, seen, raw)
}

/// Connections worth splitting: every kind of request with every sound reply, alone; and pipelines of them.
fn corpus(rng: &mut Rng) -> Vec<(Vec<Asked>, Vec<Reply>, bool)> {
    let mut all = Vec::new();
    for (n, ask) in asks(0).into_iter().enumerate() {
        if ask.wire.len() > 10_000 {
            continue;
        }
        for m in 0..SOUND_REPLIES {
            // All pairs would be slow and say little more than every second of them.
            if (n + m) % 2 == 0 {
                let reply = replies("0.1", ask.is_head)[m].clone();
                all.push((vec![ask.clone()], vec![reply], m % 3 == 0));
            }
        }
    }
    for _ in 0..60 {
        let mut pipeline = Vec::new();
        let mut answers = Vec::new();
        for tag in 0..1 + rng.below(4) as usize {
            if rng.below(4) == 0 {
                pipeline.push(asks_for_us(tag)[rng.below(2) as usize].clone());
                continue;
            }
            let ask = asks(tag)[rng.below(LASTING_ASKS as u64) as usize].clone();
            let reply = replies(&format!("{tag}.1"), ask.is_head)[rng.below(8) as usize].clone();
            answers.push(reply);
            pipeline.push(ask);
        }
        all.push((pipeline, answers, rng.below(2) == 0));
    }
    all
}

#[test]
fn any_split_of_the_bytes_gives_the_same_bytes_order_and_end_on_the_other_side() {
    let base = seed();
    let bench = Bench::new();
    let mut rng = Rng(base);
    for (n, (asks, replies, half_close)) in corpus(&mut rng).into_iter().enumerate() {
        let whole = |_: &mut Rng, _: usize| usize::MAX / 2;
        let want = play(&bench, base, &asks, &replies, half_close, whole, whole);
        assert!(
            want.0.len() == asks.len() || asks.len() > 1,
            "every request is answered"
        );
        let same = |got: (Vec<Message>, _, _, _), how: &str| {
            assert_eq!(
                got, want,
                "connection {n} of SEED={base}, {how}: {asks:?} {replies:?}"
            );
        };
        // Once in two, at every place; long connections at some.
        let client_len = asks.iter().map(|a| a.wire.len()).sum::<usize>();
        let worker_len = replies.iter().map(|r| r.wire.len()).max().unwrap_or(0);
        let step = if asks.len() == 1 { 1 } else { 11 };
        for cut in (1..client_len.min(600)).step_by(step) {
            let cut_at =
                move |_: &mut Rng, at: usize| if at < cut { cut - at } else { usize::MAX / 2 };
            same(
                play(
                    &bench,
                    base.wrapping_add(cut as u64),
                    &asks,
                    &replies,
                    half_close,
                    cut_at,
                    whole,
                ),
                "client cut in two",
            );
        }
        for cut in (1..worker_len).step_by(step) {
            let cut_at =
                move |_: &mut Rng, at: usize| if at < cut { cut - at } else { usize::MAX / 2 };
            same(
                play(
                    &bench,
                    base.wrapping_add(cut as u64),
                    &asks,
                    &replies,
                    half_close,
                    whole,
                    cut_at,
                ),
                "worker cut in two",
            );
        }
        for round in 0..6 {
            let small = move |rng: &mut Rng, _: usize| 1 + rng.below(1 << (2 * round)) as usize;
            same(
                play(
                    &bench,
                    base.wrapping_add(1000 + round),
                    &asks,
                    &replies,
                    half_close,
                    small,
                    small,
                ),
                "small pieces",
            );
        }
    }
}

// ---- schedules ----

/// What befalls one connection, all from one seed.
fn random_case(bench: &Bench, seed: u64) -> Case {
    let mut rng = Rng(seed);
    let mut list = Vec::new();
    for tag in 0..1 + rng.below(4) as usize {
        let all = asks(tag);
        let one = match rng.below(10) {
            0 => asks_for_us(tag)[rng.below(5) as usize].clone(),
            1 => asks_for_us(tag)[rng.below(2) as usize].clone(),
            2 => all[rng.below(all.len() as u64) as usize].clone(),
            // The large upload is slow to simulate.
            _ => all[[0, 0, 1, 2, 3, 4, 4, 5, 7, 8][rng.below(10) as usize]].clone(),
        };
        list.push(one);
    }
    let mut case = bench.case(seed, list);
    case.sim.odds = Odds {
        reused: 50,
        refused: rng.below(3) * 10,
        no_seat: rng.below(3) * 5,
        tokens: rng.below(3) * 40,
        queued: rng.below(3) * 10,
        full: rng.below(3) * 10,
        gone_from_fleet: rng.below(3) * 5,
        admin_busy: 20,
        held: 10,
        sent_at_once: 30,
    };
    case
}

/// How a leg's worker behaves, decided when it is first looked at.
fn script_leg(case: &mut Case, rng: &mut Rng) {
    let attempt = case.sim.dial_count;
    let is_head = case.answers_so_far_is_head();
    let tag = case.answer_index();
    let Some(leg) = &mut case.sim.leg else { return };
    let all = replies(&format!("{tag}.{attempt}"), is_head);
    let kind = match rng.below(10) {
        0..6 => rng.below(SOUND_REPLIES as u64),
        6..8 => 10 + rng.below(3),
        _ => rng.below(all.len() as u64),
    };
    let reply = all[kind as usize].clone();
    if rng.below(4) == 0 {
        let at = rng.below(reply.wire.len() as u64 + 1) as usize;
        let end = [None, Some(false), Some(true)][rng.below(3) as usize];
        leg.cut = Some((at, end));
    }
    leg.reply = Some(reply);
}

impl Case {
    /// Which request is being served: as many as there are whole answers.
    fn answer_index(&self) -> usize {
        read_answers(&self.sim.out, &self.sim.asks)
            .0
            .iter()
            .filter(|a| a.is_whole)
            .count()
    }

    fn answers_so_far_is_head(&self) -> bool {
        self.sim
            .asks
            .get(self.answer_index())
            .is_some_and(|ask| ask.is_head)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    ClientBytes,
    ClientEnd,
    ClientGone,
    ClientFull,
    ClientDrained,
    Connected,
    ConnectFailed,
    Sent,
    WorkerBytes,
    WorkerEnd,
    WorkerReset,
    Admin,
    Deadline,
    Drain,
    Turn,
    Tokens,
    Tick,
}

/// Events that may happen now.
fn events(case: &mut Case, rng: &mut Rng) -> Vec<Event> {
    let mut events = Vec::new();
    let mut add = |event, weight: usize| events.extend(std::iter::repeat_n(event, weight));
    // What was on its way when reading stopped still arrives.
    if case.at < case.wire.len() && !case.client_ended && (case.sim.is_reading || rng.below(8) == 0)
    {
        add(Event::ClientBytes, 8);
    }
    if !case.client_ended && (case.sim.is_reading || rng.below(8) == 0) && rng.below(30) == 0 {
        add(Event::ClientEnd, 4);
    }
    if rng.below(60) == 0 && (!case.client_ended || case.sim.is_watched) {
        add(Event::ClientGone, 2);
    }
    match case.sim.is_client_full {
        true if rng.below(20) == 0 => add(Event::ClientDrained, 3),
        false if rng.below(60) == 0 && !case.sim.out.is_empty() => add(Event::ClientFull, 3),
        _ => {}
    }
    let has_request = case.worker_has_request();
    if case.sim.leg.as_ref().is_some_and(|leg| leg.reply.is_none()) {
        script_leg(case, rng);
        if let Some(leg) = &mut case.sim.leg {
            leg.is_black_hole = rng.below(10) == 0;
        }
    }
    if let Some(leg) = &case.sim.leg {
        let until = leg.cut.map_or_else(
            || leg.reply.as_ref().map_or(0, |r| r.wire.len()),
            |(at, _)| at,
        );
        let closes = leg.reply.as_ref().is_some_and(|r| r.closes || r.is_broken);
        match leg.is_connecting {
            true if leg.is_black_hole => {}
            true => {
                add(Event::Connected, 6);
                add(Event::ConnectFailed, 1);
            }
            false => {
                if !leg.flight.is_empty() {
                    add(Event::Sent, if leg.is_broken { 8 } else { 3 });
                }
                // Workers answer when they have the request; now and then before.
                let may_answer =
                    (has_request || rng.below(20) == 0) && !leg.is_reset && !leg.is_black_hole;
                if may_answer && leg.replied < until {
                    add(Event::WorkerBytes, 6);
                }
                if leg.replied >= until {
                    match leg.cut {
                        Some((_, Some(false))) => add(Event::WorkerEnd, 4),
                        Some((_, Some(true))) => add(Event::WorkerReset, 4),
                        Some((_, None)) => {}
                        None if closes => add(Event::WorkerEnd, 4),
                        None => {}
                    }
                }
                if rng.below(60) == 0 {
                    add(Event::WorkerReset, 2);
                    add(Event::WorkerEnd, 2);
                }
            }
        }
    }
    if !case.sim.admin.is_empty() {
        add(Event::Admin, 3);
    }
    if case.sim.line.is_waiting {
        add(Event::Turn, 3);
    }
    if !case.sim.tokens_asked.is_empty() {
        add(Event::Tokens, 3);
    }
    if !case.has_drained && rng.below(100) == 0 {
        add(Event::Drain, 1);
    }
    if rng.below(10) == 0 {
        add(Event::Tick, 1);
    }
    if case.sim.deadline_ns != u64::MAX && (events.is_empty() || rng.below(80) == 0) {
        events.push(Event::Deadline);
    }
    events
}

/// Plays a connection to its end.
fn play_random(case: &mut Case) {
    let mut rng = Rng(case.seed ^ 0xe7e7_7e7e);
    let (mut alone, mut steps) = (0, 0);
    while case.is_open() {
        steps += 1;
        assert!(steps < 200_000, "the connection never ends");
        let possible = events(case, &mut rng);
        let Some(event) = possible
            .get(rng.below(possible.len().max(1) as u64) as usize)
            .copied()
        else {
            continue;
        };
        alone = if event == Event::Deadline {
            alone + 1
        } else {
            0
        };
        assert!(alone < 20, "deadline after deadline and nothing else");
        // The piece that a deadline cuts short must not be the only thing that happened at its time.
        match event {
            Event::ClientBytes => {
                let most = 1u64 << rng.below(16);
                case.client_bytes(1 + rng.below(most) as usize);
            }
            Event::ClientEnd => case.client_end(),
            Event::ClientGone => case.client_gone(),
            Event::ClientFull => case.client_full(true),
            Event::ClientDrained => case.client_full(false),
            Event::Connected => case.connected(),
            Event::ConnectFailed | Event::WorkerReset => {
                case.cut_here(true);
                case.worker_end(true);
            }
            Event::Sent => case.sent(),
            Event::WorkerBytes => {
                let most = 1u64 << rng.below(9);
                case.worker_bytes(1 + rng.below(most) as usize);
            }
            Event::WorkerEnd => {
                case.cut_here(false);
                case.worker_end(false);
            }
            Event::Admin => case.admin_reply(),
            Event::Deadline => case.deadline(),
            Event::Drain => case.drain(),
            Event::Turn => case.turn(),
            Event::Tokens => {
                let count = rng.below(3);
                case.tokens((count > 0).then_some(count));
            }
            Event::Tick => case.sim.now_ns += rng.below(SECOND_NS / 10),
        }
    }
}

impl Case {
    /// The worker's connection has ended at this point of its answer.
    fn cut_here(&mut self, reset: bool) {
        if let Some(leg) = &mut self.sim.leg {
            leg.cut = Some((leg.replied, Some(reset)));
            leg.is_reset = true;
        }
    }
}

/// One schedule, for `.fuzz`: its bytes take the place of the generator.
#[cfg(fuzzing)]
pub fn schedule() {
    thread_local!(static BENCH: Bench = Bench::new());
    BENCH.with(|bench| {
        let mut case = random_case(bench, 0);
        play_random(&mut case);
        case.check_end();
        drop(case);
        assert_eq!(bench.in_flight(), 0, "E1: a count outlived its connection");
    });
}

#[test]
fn no_schedule_of_events_breaks_an_invariant() {
    let base = seed();
    let cases: u64 = std::env::var("CASES")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20_000);
    let bench = Bench::new();
    let mut answered = [0u64; 600];
    let (mut retries, mut resends, mut finished, mut aborted, mut malformed) = (0, 0, 0, 0, 0);
    for n in 0..cases {
        let mut case = random_case(&bench, base.wrapping_add(n));
        play_random(&mut case);
        case.check_end();
        for answer in case.answers() {
            answered[usize::from(status(&answer))] += 1;
        }
        retries += case.sim.retries;
        resends += case.sim.resends;
        malformed += case.sim.malformed;
        match case.sim.closed {
            Some(Closed::Finished) => finished += 1,
            _ => aborted += 1,
        }
        drop(case);
        assert_eq!(
            bench.in_flight(),
            0,
            "E1: a count outlived its connection, case {}",
            base.wrapping_add(n)
        );
    }
    // The schedules reach what they are for.
    println!(
        "finished {finished}, aborted {aborted}, retries {retries}, resends {resends}, malformed {malformed}"
    );
    for (status, count) in answered.iter().enumerate().filter(|(_, count)| **count > 0) {
        println!("  {status}: {count}");
    }
    if cases >= 5_000 {
        for status in [200, 204, 304, 400, 404, 405, 408, 429, 500, 502, 503, 504] {
            assert!(answered[status] > 0, "no schedule led to a {status}");
        }
        assert!(retries > 100 && resends > 50 && finished > 100 && aborted > 100 && malformed > 10);
    }
}

// ---- single behaviours ----

impl Case {
    /// All that the client has to say, in one piece.
    fn client_all(&mut self) {
        self.client_bytes(usize::MAX / 2);
    }

    /// Connects the leg if it must, and takes the message off the ring.
    fn deliver(&mut self) {
        if self.sim.leg.as_ref().is_some_and(|leg| leg.is_connecting) {
            self.connected();
        }
        self.sent();
    }

    /// Lets the leg's worker say the first `count` bytes of this.
    fn worker_says(&mut self, reply: &Reply, count: usize) {
        let leg = self.sim.leg.as_mut().expect("a leg");
        leg.reply.get_or_insert_with(|| reply.clone());
        self.worker_bytes(count);
    }

    fn secs_to_deadline(&self) -> f64 {
        (self.sim.deadline_ns - self.sim.now_ns) as f64 / SECOND_NS as f64
    }

    fn statuses(&self) -> Vec<u16> {
        self.answers().iter().map(status).collect()
    }

    fn tick_secs(&mut self, secs: u64) {
        self.sim.now_ns += secs * SECOND_NS;
    }
}

fn chat_asked(tag: usize) -> Asked {
    asks(tag).swap_remove(0)
}

const ALL: usize = usize::MAX / 2;

#[test]
fn a_head_has_its_time_from_its_first_byte_and_drips_do_not_buy_more() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    let limit = bench.config.header_read_timeout.as_secs();
    case.client_bytes(1);
    let due = case.sim.deadline_ns;
    assert_eq!(due - case.sim.now_ns, limit * SECOND_NS);
    for _ in 0..10 {
        case.tick_secs(limit / 12);
        case.client_bytes(1);
        assert_eq!(case.sim.deadline_ns, due, "a drip moved the limit");
    }
    case.deadline();
    assert_eq!(
        (case.statuses(), case.sim.closed),
        (vec![408], Some(Closed::Finished))
    );
}

#[test]
fn a_body_that_stops_coming_is_answered_408_and_no_worker_hears_of_it() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.client_bytes(case.wire.len() - 20);
    for _ in 0..5 {
        case.tick_secs(30);
        case.client_bytes(1);
        let limit = bench.config.body_read_timeout.as_secs_f64();
        assert_eq!(
            case.secs_to_deadline(),
            limit,
            "each piece has its own limit"
        );
    }
    case.deadline();
    assert_eq!((case.statuses(), case.sim.dial_count), (vec![408], 0));
    assert_eq!(case.sim.closed, Some(Closed::Finished));
}

/// Found by fuzzing: what came in one piece went to the worker whole, and to its client as refused; and chunk framing
/// counted.
#[test]
fn no_worker_gets_the_whole_of_a_streamed_body_that_is_too_large() {
    let mut bench = Bench::new();
    let config = Rc::get_mut(&mut bench.config).expect("nobody else holds it");
    config.body_bytes_max = 40;
    for (body_bytes, piece) in [(41, usize::MAX / 2), (41, 7), (40, usize::MAX / 2), (40, 7)] {
        let upload = vec![b'u'; body_bytes];
        let asked = ask(0, "PUT /upload", "HTTP/1.1", "", &upload, Some(&[9, 1]));
        let mut case = bench.case(1, vec![asked]);
        case.sim.odds.reused = 100;
        while case.is_open() && case.at < case.wire.len() {
            case.client_bytes(piece);
        }
        let has_whole = case.worker_has_request();
        if body_bytes > 40 {
            assert_eq!(case.statuses(), vec![413]);
            let sent = case.sim.seen.iter();
            let whole = sent.filter(|out| check_request(out, &case.sim.asks));
            assert_eq!(whole.count(), 0, "in pieces of {piece}");
        } else {
            assert!(has_whole, "in pieces of {piece}");
        }
    }
}

#[test]
fn an_idle_client_is_let_go_without_a_word_at_its_limit() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    let limit = bench.config.keepalive_timeout.as_secs_f64();
    assert_eq!(case.secs_to_deadline(), limit);
    case.client_all();
    case.deliver();
    case.worker_says(&replies("0.1", false)[0], ALL);
    assert_eq!(
        case.secs_to_deadline(),
        limit,
        "the same after each request"
    );
    let before = case.sim.out.clone();
    case.deadline();
    assert_eq!(
        (case.sim.closed, &case.sim.out),
        (Some(Closed::Finished), &before)
    );
}

#[test]
fn a_worker_that_does_not_answer_the_connect_is_left_for_another_at_once() {
    let bench = Bench::new();
    // Read whole; handed on as it comes, and whole by then; and with the rest of it still to come.
    for (kind, pieces, of) in [(0, 1, 1), (4, 3, 3), (4, 2, 3)] {
        let mut case = bench.case(1, vec![asks(0).swap_remove(kind)]);
        for _ in 0..pieces {
            case.client_bytes(case.wire.len() / of + 1);
        }
        for attempt in 1..=usize::from(WORKER_COUNT) {
            assert_eq!(case.sim.dial_count, attempt, "one worker after the other");
            let limit = bench.config.connect_timeout.as_secs_f64();
            assert_eq!(
                case.secs_to_deadline(),
                limit,
                "the time counts from the dial"
            );
            assert!(case.statuses().is_empty());
            case.deadline();
        }
        assert_eq!(case.statuses(), vec![502], "all have been tried");
        assert_eq!(case.sim.failures.len(), usize::from(WORKER_COUNT));
    }
}

#[test]
fn a_half_closed_clients_probe_does_not_shorten_a_later_connect() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.client_all();
    case.deliver();
    case.tick_secs(100);
    case.worker_end(true);
    assert_eq!(case.sim.dial_count, 2);
    case.client_end();
    case.deadline();
    assert_eq!(
        case.sim.dial_count, 2,
        "the second worker has hardly been asked"
    );
    assert!(case.secs_to_deadline() > 5.0);
    case.deliver();
    case.worker_says(&replies("0.2", false)[0], ALL);
    assert_eq!(case.statuses(), vec![200]);
}

#[test]
fn a_worker_that_takes_a_request_and_stays_silent_is_504_and_nobody_else_gets_it() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.client_all();
    case.deliver();
    assert_eq!(
        case.secs_to_deadline(),
        bench.config.request_timeout.as_secs_f64()
    );
    case.worker_says(&replies("0.1", false)[0], 10);
    case.deadline();
    assert_eq!((case.statuses(), case.sim.dial_count), (vec![504], 1));
    assert_eq!(case.sim.failures.len(), 1);
    assert!(
        case.is_open(),
        "the request was read whole: the client may go on"
    );
}

#[test]
fn an_answer_that_stops_is_ended_so_that_the_client_can_tell() {
    let bench = Bench::new();
    for (ask, kind) in [(0, 0), (0, 1), (0, 2), (10, 0), (10, 1), (10, 2)] {
        for how in 0..3 {
            let ask = asks(0).swap_remove(ask);
            let mut case = bench.case(1, vec![ask]);
            case.client_all();
            case.deliver();
            let reply = &replies("0.1", false)[kind];
            case.worker_says(reply, reply.wire.len() - 20);
            match how {
                0 => {
                    case.tick_secs(60);
                    case.worker_says(reply, 1);
                    let limit = bench.config.request_timeout.as_secs_f64();
                    assert_eq!(
                        case.secs_to_deadline(),
                        limit,
                        "progress buys the whole time"
                    );
                    case.deadline();
                }
                1 => case.worker_end(true),
                // The proper end of an answer without length, and of no other.
                _ if reply.until_close => continue,
                _ => case.worker_end(false),
            }
            assert_eq!(
                case.sim.dial_count, 1,
                "E2: nobody else after the first byte"
            );
            let answers = case.answers();
            assert!(
                !answers[0].is_whole,
                "answer {kind}, cut {how}, looks whole: {:?}",
                case.sim.closed
            );
        }
    }
}

#[test]
fn a_pooled_connection_that_dies_unheard_is_replaced_once_and_is_nobodys_failure() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.sim.odds.reused = 100;
    case.client_all();
    let first = case.sim.chosen.clone();
    // Its end is noticed before the request has left.
    case.worker_end(false);
    case.sent();
    assert_eq!((case.sim.dial_count, case.sim.resends), (2, 1));
    assert_eq!(
        (&case.sim.chosen, case.sim.failures.len()),
        (&first, 0),
        "the same worker"
    );
    assert!(
        case.sim.leg.as_ref().is_some_and(|leg| leg.is_connecting),
        "a fresh one"
    );
    case.deliver();
    case.worker_end(false);
    assert_eq!(
        (case.sim.resends, case.sim.retries),
        (1, 1),
        "the second time it is a failure"
    );
    assert_eq!(case.sim.failures, first);
}

#[test]
fn a_worker_that_began_to_answer_on_a_pooled_connection_is_not_asked_again() {
    let bench = Bench::new();
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.sim.odds.reused = 100;
    case.client_all();
    case.sent();
    case.worker_says(&replies("0.1", false)[0], 3);
    case.worker_end(true);
    assert_eq!(
        (case.sim.resends, case.sim.retries, case.sim.failures.len()),
        (0, 1, 1)
    );
}

#[test]
fn retries_end_at_their_number_and_a_second_plain_500_goes_to_the_client() {
    let mut bench = Bench::new();
    let busy = |case: &mut Case, kind: usize| {
        case.deliver();
        let tag = format!("0.{}", case.sim.dial_count);
        let reply = replies(&tag, false)[kind].clone();
        case.worker_says(&reply, ALL);
    };
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.client_all();
    busy(&mut case, 11);
    assert_eq!(case.sim.dial_count, 2, "one 500 may be the worker's");
    busy(&mut case, 11);
    assert_eq!((case.statuses(), case.sim.dial_count), (vec![500], 2));
    let exhausted = |case: &Case| -> Vec<bool> {
        let records = case.sim.records.iter();
        records.map(|record| record.is_exhausted).collect()
    };
    assert_eq!(exhausted(&case), [false], "it is the request's doing");

    drop(case);
    let config = Rc::get_mut(&mut bench.config).expect("nobody else holds it");
    config.retry.retries_max = 2;
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.client_all();
    for _ in 0..3 {
        busy(&mut case, 10);
    }
    assert_eq!((case.statuses(), case.sim.dial_count), (vec![503], 3));
    assert_eq!(
        case.answers()[0].head.lines().nth(1),
        Some("X-Tag: 0.3"),
        "the last worker's words"
    );
    assert_eq!(exhausted(&case), [true]);
}

#[test]
fn what_is_pipelined_behind_a_running_request_is_bounded_and_read_again_after_it() {
    let bench = Bench::new();
    for connect_late in [false, true] {
        let list: Vec<Asked> = (0..1500).map(chat_asked).collect();
        let mut case = bench.case(1, list);
        case.sim.odds.reused = if connect_late { 0 } else { 100 };
        let mut taken = 0;
        while case.sim.is_reading {
            case.client_bytes(4096);
            taken += 4096;
            assert!(taken < 80 * 1024, "more than 64 KiB and a piece are taken");
        }
        if connect_late {
            case.connected();
        }
        assert!(!case.sim.is_reading, "connecting is no reason to read on");
        case.sent();
        let mut answered = 0;
        while !case.sim.is_reading {
            let reply = replies(&format!("{answered}.1"), false)[0].clone();
            case.worker_says(&reply, ALL);
            answered += 1;
            assert!(answered < 400, "the client is never read again");
            case.deliver();
        }
    }
}

#[test]
fn a_silent_half_closed_client_is_asked_once_and_in_http_1_0_never() {
    let bench = Bench::new();
    for (ask, probes) in [(0, 1), (10, 0)] {
        let ask = asks(0).swap_remove(ask);
        let mut case = bench.case(1, vec![ask]);
        case.client_all();
        case.deliver();
        case.client_end();
        assert!(
            case.sim.is_watched && case.secs_to_deadline() < 1.0,
            "a reset would be seen"
        );
        case.deadline();
        let interims = memchr::memmem::find_iter(&case.sim.out, b"100 Continue").count();
        assert_eq!(interims, probes);
        assert!(
            case.secs_to_deadline() > 1000.0,
            "then it may wait as long as any other"
        );
        let reply = &replies("0.1", false)[1];
        case.worker_says(reply, reply.head_bytes);
        case.worker_says(reply, ALL);
        assert_eq!(
            (case.statuses(), case.answers()[0].is_whole),
            (vec![200], true)
        );
        let again = memchr::memmem::find(&case.sim.out, b"\r\n\r\n09;");
        assert!(again.is_none(), "a zero before the first chunk asks again");
        assert_eq!(case.sim.closed, Some(Closed::Finished));
    }
}

#[test]
fn a_drain_ends_idle_clients_in_a_moment_and_busy_ones_after_their_answer() {
    let bench = Bench::new();
    let mut idle = bench.case(1, vec![chat_asked(0)]);
    idle.drain();
    assert!(idle.is_open(), "a request may be on its way");
    idle.deadline();
    assert_eq!(
        (idle.sim.closed, idle.sim.out.len()),
        (Some(Closed::Finished), 0)
    );

    let mut late = bench.case(1, vec![chat_asked(0)]);
    late.drain();
    late.client_all();
    late.deliver();
    late.worker_says(&replies("0.1", false)[0], ALL);
    let answers = late.answers();
    assert_eq!(
        (answers.len(), field(&answers[0].head, "connection")),
        (1, vec!["close"])
    );
    assert_eq!(late.sim.closed, Some(Closed::Finished));

    let mut busy = bench.case(1, vec![chat_asked(0), chat_asked(1)]);
    busy.client_all();
    busy.deliver();
    busy.drain();
    assert!(busy.is_open(), "a running request is finished");
    busy.worker_says(&replies("0.1", false)[0], ALL);
    let answers = busy.answers();
    assert_eq!(
        (answers.len(), field(&answers[0].head, "connection")),
        (1, vec!["close"])
    );
    assert_eq!(busy.sim.closed, Some(Closed::Finished));
}

#[test]
fn a_late_answer_of_the_control_plane_is_not_the_next_requests() {
    let bench = Bench::new();
    let list = vec![asks_for_us(0).swap_remove(0), asks_for_us(1).swap_remove(0)];
    let first = list[0].wire.len();
    let mut case = bench.case(1, list);
    case.client_bytes(first);
    case.deadline();
    assert_eq!(case.statuses(), vec![504]);
    if case.is_open() {
        case.client_all();
    }
    case.admin_reply();
    let late = case.answers().into_iter().nth(1);
    assert!(
        late.is_none_or(|answer| field(&answer.head, "x-tag") == ["1.admin"]),
        "another request's answer"
    );
}

/// Q3: no worker is asked before, and all goes on after, with what came; what comes late is nobody's.
#[test]
fn a_request_waits_for_its_tokens_once_and_goes_on_whatever_comes() {
    let bench = Bench::new();
    for answer in [Some(7), None] {
        let mut case = bench.case(1, vec![chat_asked(0)]);
        case.sim.odds.tokens = 100;
        case.client_all();
        assert_eq!((case.sim.dial_count, case.sim.tokens_number), (0, 1));
        case.tokens(answer);
        assert_eq!((case.sim.dial_count, case.sim.tokens_known), (1, answer));
        // Another worker is chosen with the same tokens, and nobody is asked again.
        case.deadline();
        assert_eq!((case.sim.dial_count, case.sim.tokens_known), (2, answer));
        assert_eq!(case.sim.tokens_number, 1);
    }
    // They are too late, and then the next request's come.
    let mut case = bench.case(1, vec![chat_asked(0), chat_asked(1)]);
    case.sim.odds.tokens = 100;
    case.client_bytes(case.sim.asks[0].wire.len());
    case.deadline();
    assert_eq!((case.sim.dial_count, case.sim.tokens_known), (1, None));
    case.deliver();
    case.worker_says(&replies("0.1", false)[0], ALL);
    case.client_all();
    assert_eq!((case.sim.dial_count, case.sim.tokens_number), (1, 2));
    case.tokens(Some(1));
    assert_eq!(case.sim.dial_count, 1, "those are of the first request");
    case.tokens(Some(2));
    assert_eq!((case.sim.dial_count, case.sim.tokens_known), (2, Some(2)));
    drop(case);
    // A client that leaves meanwhile leaves nothing behind.
    let mut case = bench.case(1, vec![chat_asked(0)]);
    case.sim.odds.tokens = 100;
    case.client_all();
    case.client_gone();
    case.tokens(Some(3));
    assert_eq!(case.sim.dial_count, 0);
}

#[test]
fn a_leaving_client_gives_its_count_back_and_ends_its_leg_at_every_stage() {
    let bench = Bench::new();
    for ask in [0, 4, 6] {
        for stage in 0..6 {
            let mut case = bench.case(1, vec![asks(0).swap_remove(ask)]);
            case.client_bytes(case.wire.len() - usize::from(stage == 0) * 10);
            if stage >= 2 {
                case.connected();
            }
            if stage >= 3 {
                case.sent();
            }
            if stage >= 4 {
                case.worker_says(&replies("0.1", false)[0], if stage == 4 { 10 } else { 100 });
            }
            // The checks after the event say that nothing is held.
            case.client_gone();
            assert!(!case.is_open());
        }
    }
}

#[test]
fn a_client_that_does_not_take_its_answers_gets_no_further_ones_until_it_does() {
    let bench = Bench::new();
    for half_close in [false, true] {
        let list = vec![asks_for_us(0).swap_remove(1), chat_asked(1)];
        let first = list[0].wire.len();
        let mut case = bench.case(1, list);
        case.client_bytes(first);
        assert_eq!(case.statuses(), vec![400]);
        case.client_full(true);
        // On its way already when reading stops.
        case.client_all();
        assert_eq!(
            (case.sim.dial_count, case.sim.is_reading),
            (0, false),
            "it must take what it has first"
        );
        if half_close {
            case.client_end();
        }
        assert!(case.is_open());
        case.client_full(false);
        assert_eq!(case.sim.dial_count, 1, "and then it is served");
        assert!(half_close || case.sim.is_reading);
    }
}
