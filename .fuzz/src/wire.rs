//! A client and its workers that send whatever bytes the fuzzer likes, and one session of the router between them.
//!
//! The order of events is fixed (the client first, then the worker), the pieces are not. What each side gets is read by
//! [`crate::naive`] and compared with what the other side sent.

use std::collections::VecDeque;
use std::rc::Rc;

use corelane::access_log::Entry;
use corelane::config::Config;
use corelane::exchange::{
    Ask, Dial, Entrance, NoSeat, PdEvent, Record, Seat, Session, Sign, World, message_start,
};
use corelane::route::Role;
use corelane::shared::{AdminReply, AdminRequest, Route, Worker};
use shards::{Books, LoadGuard, Permit, Slot, WorkerId};

use crate::common::line::Line;
use crate::naive::{self, Message, Why};

const WORKER_COUNT: u16 = 3;

/// What is said, and how.
#[derive(Clone, Debug)]
pub struct Script<'d> {
    pub client: &'d [u8],
    /// One for each leg; those that follow get [`PLAIN`].
    pub replies: Vec<&'d [u8]>,
    /// The client ends its direction when it has said all; else when it has been answered.
    pub ends_early: bool,
    /// A worker whose bytes are at their end resets its connection.
    pub resets: bool,
    /// Legs begin on kept-alive connections where that is possible.
    pub reuses: bool,
    /// Small limits.
    pub is_tight: bool,
}

const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    Finished,
    Aborted,
}

/// What came of it.
#[derive(Debug)]
pub struct Played {
    pub answers: Vec<Answer>,
    pub closed: Closed,
    /// The whole requests that workers got.
    pub seen: Vec<Seen>,
    /// How many of the client's requests are whole, to a strict reader.
    pub asked: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub method: Vec<u8>,
    pub target: Vec<u8>,
    pub body: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub line: Vec<u8>,
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    pub body: Vec<u8>,
    pub is_whole: bool,
    /// Of which leg's worker; `None`: ours.
    pub leg: Option<usize>,
}

struct Leg {
    number: usize,
    slot: Slot,
    is_connecting: bool,
    out: Vec<u8>,
    flight: VecDeque<Vec<u8>>,
    message_is_out: bool,
    replied: usize,
}

struct Fleet {
    books: &'static Books,
    ids: Vec<WorkerId>,
    place: Worker,
    plain: Rc<Config>,
    tight: Rc<Config>,
}

thread_local! {
    static FLEET: Rc<Fleet> = Rc::new(Fleet::new());
}

impl Fleet {
    fn new() -> Fleet {
        let books: &'static Books = Box::leak(Box::new(Books::new(usize::from(WORKER_COUNT))));
        let ids: Vec<_> = (0..WORKER_COUNT)
            .map(|n| books.open(Slot(n)).expect("free"))
            .collect();
        let place = Worker {
            id: ids[0],
            role: Role::Regular,
            rank: None,
            kv: Default::default(),
            url: "http://worker.test:8000".into(),
            address: ([127, 0, 0, 1], 8000).into(),
            authority: "worker.test:8000".into(),
            path_prefix: "".into(),
            tls: None,
            models: Vec::new(),
        };
        let mut tight = Config::default_for_tests();
        tight.header_bytes_max = 200;
        tight.header_count_max = 4;
        tight.body_bytes_max = 40;
        Fleet {
            books,
            ids,
            place,
            plain: Rc::new(Config::default_for_tests()),
            tight: Rc::new(tight),
        }
    }
}

struct Wire<'d> {
    fleet: Rc<Fleet>,
    script: &'d Script<'d>,
    config: Rc<Config>,
    /// What the client asks, to a strict reader.
    asks: Rc<Vec<Message>>,
    line: Line,
    now_ns: u64,
    deadline_ns: u64,
    ids: u32,
    out: Vec<u8>,
    /// Where in `out` bytes were sent from: while which leg ran.
    sends: Vec<(usize, Option<usize>)>,
    closed: Option<Closed>,
    is_reading: bool,
    leg: Option<Leg>,
    leg_count: usize,
    /// What each ended leg's worker was sent, how much of its reply was taken, and whether it had ended it.
    legs: Vec<(Vec<u8>, usize, bool)>,
    has_ended: bool,
    admin: VecDeque<AdminRequest>,
}

impl Wire<'_> {
    fn reply(&self, leg: usize) -> &[u8] {
        self.script.replies.get(leg).copied().unwrap_or(PLAIN)
    }

    fn in_flight(&self) -> u32 {
        self.fleet
            .ids
            .iter()
            .map(|id| self.fleet.books.in_flight(id.slot))
            .sum()
    }
}

impl World for Wire<'_> {
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
        false
    }
    fn make_request_id(&mut self, _: Route, out: &mut Vec<u8>) {
        self.ids += 1;
        out.extend_from_slice(format!("id-{}", self.ids).as_bytes());
    }

    fn buffer(&mut self) -> Vec<u8> {
        Vec::with_capacity(64)
    }
    fn grow(&mut self, mut buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        assert!(more <= 4 << 20, "a length alone sets aside {more} bytes");
        buffer.reserve(more.min(1 << 16));
        (buffer, false)
    }
    fn recycle(&mut self, _: Vec<u8>) {}

    fn send(&mut self, bytes: Vec<u8>) {
        assert_eq!(self.closed, None, "bytes for the client after its end");
        self.sends
            .push((self.out.len(), self.leg.as_ref().map(|leg| leg.number)));
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
        false
    }
    fn is_client_held(&mut self) -> bool {
        false
    }
    fn is_worker_held(&mut self) -> bool {
        false
    }
    fn watch_client(&mut self) {}
    fn deadline(&mut self, at_ns: u64) {
        self.deadline_ns = at_ns;
    }

    fn enter(&mut self) -> Entrance {
        self.line.enter(1, 1)
    }
    fn step_aside(&mut self, permit: Permit) -> Result<(), Permit> {
        self.line.step_aside(permit, 1)
    }
    fn stop_waiting(&mut self) {
        self.line.stop_waiting();
    }
    fn leave(&mut self, permit: Permit) {
        let _ = permit.leave();
    }
    fn retry_after_secs(&self) -> u32 {
        1
    }
    fn record_wait(&mut self, _: u64) {}

    fn choose(&mut self, ask: Ask<'_>) -> Result<Seat, NoSeat> {
        let left = self
            .fleet
            .ids
            .iter()
            .find(|id| !ask.tried.contains(&id.slot));
        let id = *left.ok_or(NoSeat::AllTried)?;
        let guard =
            LoadGuard::acquire(self.fleet.books, id, ask.prompt_bytes).expect("the worker is open");
        Ok(Seat {
            id,
            is_trial: false,
            missing_bytes: None,
            ahead: None,
            guard,
        })
    }
    fn worker(&self, _: Slot) -> Option<&Worker> {
        Some(&self.fleet.place)
    }
    fn random(&mut self) -> u64 {
        4
    }
    fn adopt(&mut self, _: Session) {
        panic!("nothing is left behind without P/D");
    }
    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial {
        assert!(self.leg.is_none(), "one leg at a time");
        assert_eq!(self.closed, None, "a leg for a client that is gone");
        assert_eq!(
            (self.in_flight(), self.fleet.books.in_flight(slot)),
            (1, 1),
            "its count alone is held"
        );
        let answers = read_answers(self, false);
        assert!(
            answers.iter().all(|a| a.is_whole),
            "an answer has begun and another leg is dialed"
        );
        let is_reused = self.script.reuses && !fresh;
        self.leg = Some(Leg {
            number: self.leg_count,
            slot,
            is_connecting: !is_reused,
            out: Vec::new(),
            flight: VecDeque::new(),
            message_is_out: false,
            replied: 0,
        });
        self.leg_count += 1;
        self.has_ended = false;
        if is_reused {
            Dial::Reused
        } else {
            Dial::Connecting
        }
    }
    fn send_message(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        let leg = self.leg.as_mut().expect("a leg to send on");
        assert!(
            !leg.is_connecting && leg.out.is_empty(),
            "one message a leg, when it is connected"
        );
        leg.out
            .extend_from_slice(&message[message_start(&message)..]);
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
        assert!(self.leg.as_ref().is_some_and(|leg| leg.message_is_out));
    }
    fn end_leg(&mut self, keep: bool) {
        let leg = self.leg.take().expect("a leg is ended once");
        if keep {
            let is_whole = naive::request(&leg.out).is_ok_and(|m| m.len == Some(leg.out.len()));
            assert!(
                is_whole && !leg.message_is_out,
                "kept with half a request sent"
            );
            let is_head = leg.out.starts_with(b"HEAD ");
            let reply = &self.reply(leg.number)[..leg.replied];
            let (answer, from) = final_answer(reply, is_head).expect("kept after an answer");
            let is_at_end = answer.len.is_some_and(|len| from + len == reply.len());
            assert!(
                is_at_end && !answer.until_close,
                "kept with the answer's end in doubt"
            );
            assert!(
                !answer.head.lists("connection", b"close"),
                "kept although its worker closes"
            );
        }
        self.legs.push((leg.out, leg.replied, self.has_ended));
    }

    fn hand_over(&mut self, request: AdminRequest) -> bool {
        self.admin.push_back(request);
        true
    }
    fn judge(&mut self, _: Slot, _: Sign, _: bool) {}
    fn may_retry(&mut self) -> bool {
        true
    }
    fn count_resend(&mut self) {}
    fn count_retry(&mut self, _: Route, _: u32) {}
    fn count_pd(&mut self, event: PdEvent) {
        panic!("{event:?} without P/D");
    }
    fn record_handover(&mut self, _: u64, _: u64) {}
    fn count_malformed(&mut self) {}
    fn record_added(&mut self, _: u64) {}
    fn record_piece(&mut self, _: Slot, _: Option<u64>) {}
    fn record_answer(&mut self, _: Slot, _: u64, _: bool) {}
    fn is_logged(&self) -> bool {
        true
    }
    fn log(&mut self, _: Entry<'_>, _: Option<Slot>, _: Option<Slot>) {}
    fn record(&mut self, _: Record) {}
}

/// The answer in a worker's bytes that is not interim, and where it begins.
fn final_answer(reply: &[u8], is_head: bool) -> Result<(Message, usize), Why> {
    let mut at = 0;
    loop {
        let answer = naive::answer(&reply[at..], is_head)?;
        match answer.head.status_line() {
            Some((100..200, _)) => at += answer.head.len,
            _ => return Ok((answer, at)),
        }
    }
}

/// The final answers that the client has got. `is_over`: nothing will follow.
fn read_answers(wire: &Wire<'_>, is_over: bool) -> Vec<Answer> {
    let mut answers = Vec::new();
    let mut at = 0;
    while at < wire.out.len() {
        let rest = &wire.out[at..];
        let ask = wire.asks.get(answers.len());
        let is_head = ask.is_some_and(|ask| ask.head.line.starts_with(b"HEAD "));
        let mut message = match naive::answer(rest, is_head) {
            Ok(message) => message,
            Err(Why::Partial) => {
                assert!(
                    is_over && wire.closed == Some(Closed::Aborted),
                    "half a head was sent"
                );
                break;
            }
            Err(Why::Bad) => panic!("no answer: {:?}", String::from_utf8_lossy(rest)),
        };
        let (status, _) = message.head.status_line().expect("a status");
        if (100..200).contains(&status) {
            at += message.head.len;
            continue;
        }
        if is_head
            && status >= 400
            && message.head.len < rest.len()
            && rest[message.head.len] == b'{'
        {
            // Its head was refused before its method was known.
            message = naive::answer(rest, false).expect("an answer of ours");
        }
        let is_told = message.head.lists("connection", b"close");
        assert!(
            !message.until_close || is_told,
            "a client that is to wait for the end is not told"
        );
        let is_whole = match message.until_close {
            true => is_over && wire.closed == Some(Closed::Finished),
            false => message.len.is_some(),
        };
        // Interim answers, and the one itself, are sent from their first byte on.
        let sent = wire
            .sends
            .iter()
            .rfind(|(from, _)| *from <= at)
            .expect("it was sent");
        answers.push(Answer {
            line: message.head.line.clone(),
            fields: message.head.fields.clone(),
            body: message.body,
            is_whole,
            leg: sent.1,
        });
        let Some(len) = message.len.filter(|_| is_whole) else {
            assert!(!is_over || message.until_close || at + message.head.len <= wire.out.len());
            break;
        };
        at += len;
    }
    answers
}

/// The client's requests, up to the first that is not whole or not sound.
fn read_requests(mut bytes: &[u8]) -> Vec<Message> {
    let mut requests = Vec::new();
    while let Ok(message) = naive::request(bytes) {
        let Some(len) = message.len else { break };
        bytes = &bytes[len..];
        requests.push(message);
    }
    requests
}

/// Plays a script; `piece` says how many bytes come next, of the client's (`true`) or a worker's.
pub fn play(script: &Script<'_>, mut piece: impl FnMut(bool) -> usize) -> Played {
    let fleet = FLEET.with(Rc::clone);
    let config = if script.is_tight {
        fleet.tight.clone()
    } else {
        fleet.plain.clone()
    };
    let mut wire = Wire {
        config,
        script,
        asks: Rc::new(read_requests(script.client)),
        fleet,
        line: Line::new(),
        now_ns: 1_000_000_000_000,
        deadline_ns: u64::MAX,
        ids: 0,
        out: Vec::new(),
        sends: Vec::new(),
        closed: None,
        is_reading: true,
        leg: None,
        leg_count: 0,
        legs: Vec::new(),
        has_ended: false,
        admin: VecDeque::new(),
    };
    let mut session = Session::new();
    session.begin(&mut wire);
    let (mut at, mut client_ended, mut steps) = (0, false, 0);
    while wire.closed.is_none() {
        steps += 1;
        assert!(steps < 100_000, "the connection never ends");
        step(
            &mut wire,
            &mut session,
            &mut at,
            &mut client_ended,
            &mut piece,
        );
        check(&wire, &session);
    }
    let answers = read_answers(&wire, true);
    check_answers(&wire, &answers);
    let seen = check_seen(&wire);
    Played {
        answers,
        seen,
        closed: wire.closed.expect("it has ended"),
        asked: wire.asks.len(),
    }
}

fn step(
    wire: &mut Wire<'_>,
    session: &mut Session,
    at: &mut usize,
    client_ended: &mut bool,
    piece: &mut impl FnMut(bool) -> usize,
) {
    let client = wire.script.client;
    if *at < client.len() && wire.is_reading {
        let to = at.saturating_add(piece(true).max(1)).min(client.len());
        let bytes = client[*at..to].to_vec();
        *at = to;
        return session.on_client_bytes(wire, bytes);
    }
    let is_said = *at == client.len() && !*client_ended;
    if is_said && wire.script.ends_early {
        *client_ended = true;
        return session.on_client_end(wire);
    }
    if let Some(leg) = &mut wire.leg {
        if std::mem::take(&mut leg.is_connecting) {
            return session.on_connected(wire);
        }
        if let Some(bytes) = leg.flight.pop_front() {
            leg.message_is_out = false;
            return session.on_request_sent(wire, bytes);
        }
        let number = leg.number;
        let replied = leg.replied;
        let has_request = naive::request(&leg.out).is_ok_and(|m| m.len.is_some());
        let left = wire.reply(number).len() - replied;
        if has_request && left > 0 {
            let to = replied + piece(false).clamp(1, left);
            let bytes = wire.reply(number)[replied..to].to_vec();
            if let Some(leg) = &mut wire.leg {
                leg.replied = to;
            }
            return session.on_worker_bytes(wire, bytes);
        }
        if has_request {
            wire.has_ended = !wire.script.resets;
            return session.on_worker_end(wire, wire.script.resets);
        }
    }
    if let Some(request) = wire.admin.pop_front() {
        let answer = AdminReply {
            status: 200,
            headers: Vec::new(),
            body: request.method.into_bytes(),
        };
        return session.on_admin_reply(wire, &answer);
    }
    if wire.line.is_waiting {
        let permit = wire.line.turn();
        return session.on_turn(wire, permit);
    }
    if is_said {
        *client_ended = true;
        return session.on_client_end(wire);
    }
    assert_ne!(
        wire.deadline_ns,
        u64::MAX,
        "nothing will ever wake this session"
    );
    wire.now_ns = wire.now_ns.max(wire.deadline_ns);
    wire.deadline_ns = u64::MAX;
    session.on_deadline(wire);
}

fn check(wire: &Wire<'_>, session: &Session) {
    let held = wire.in_flight();
    assert!(held <= 1, "one count at a time, not {held}");
    assert_eq!(wire.fleet.books.underflow_count(), 0);
    let is_idle = wire.closed.is_some() || session.is_idle();
    wire.line.check(held > 0, is_idle);
    if let Some(leg) = &wire.leg {
        assert_eq!(
            wire.fleet.books.in_flight(leg.slot),
            1,
            "the leg's worker has its count"
        );
    }
    if is_idle {
        assert_eq!(held, 0, "a count is held for nobody");
        assert!(wire.leg.is_none(), "a leg serves nobody");
    }
}

/// What looks whole to the client was whole, and is what its worker said.
fn check_answers(wire: &Wire<'_>, answers: &[Answer]) {
    assert!(
        answers.len() <= wire.asks.len() + 1,
        "more answers than requests"
    );
    for answer in answers {
        let Some(leg) = answer.leg else { continue };
        let (out, replied, has_ended) = &wire.legs[leg];
        let reply = &wire.reply(leg)[..*replied];
        let told = final_answer(reply, out.starts_with(b"HEAD "));
        if !answer.is_whole {
            continue;
        }
        let (told, _) = told.unwrap_or_else(|why| panic!("{why:?} came out whole: {answer:?}"));
        let was_whole = if told.until_close {
            *has_ended
        } else {
            told.len.is_some()
        };
        assert!(was_whole, "an answer that was cut came out whole");
        assert_eq!(told.body, answer.body, "the answer is the worker's");
        assert_eq!(
            answer.line.get(9..12),
            told.head.line.get(9..12),
            "its status too"
        );
    }
}

/// Workers get the client's requests, in their order, and nothing else.
fn check_seen(wire: &Wire<'_>) -> Vec<Seen> {
    let mut seen = Vec::new();
    let mut from = 0;
    for (out, ..) in wire.legs.iter().filter(|(out, ..)| !out.is_empty()) {
        let message = naive::request(out).expect("a worker gets a sound request");
        assert_eq!(message.head.all("host"), [b"worker.test:8000"]);
        let Some(len) = message.len else { continue };
        assert_eq!(len, out.len(), "something hides behind a request");
        let (method, target, _) = message.head.request_line().expect("a request line");
        let is_asked = |ask: &Message| {
            let (own_method, own_target, _) = ask.head.request_line().expect("a request line");
            own_method == method
                && (own_target.ends_with(target) || target == b"/")
                && ask.body == message.body
        };
        let place = wire.asks.iter().skip(from).position(is_asked);
        from +=
            place.unwrap_or_else(|| panic!("nobody asked for {:?}", String::from_utf8_lossy(out)));
        seen.push(Seen {
            method: method.to_vec(),
            target: target.to_vec(),
            body: message.body,
        });
    }
    seen
}
