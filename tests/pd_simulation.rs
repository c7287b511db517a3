//! Requests in two legs in a simulation: the state machine of `exchange` in P/D mode with a fake clock, scripted prefill
//! and decode workers, real books and no I/O. What a session leaves behind (`World::adopt`) goes on as a session of its own.
//!
//! *Tables*: every step of an exchange x a disturbance (the client leaves, a worker restarts, ...) x every failure of a
//! worker x streaming or not. *Schedules*: thousands of seeds, each an order of events that a core could see. After every
//! event, the books are compared with what the legs that run may hold; the fate of every hand-over, what each worker was
//! sent and what the client got are checked as they happen. A failure prints `SEED=` and what happened.
//!
//! The invariants are those of `exchange::pd` (P1 to P4) and of `exchange` (E1 to E4).

#[cfg(not(fuzzing))]
mod common;
#[cfg(fuzzing)]
use crate::common;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use common::line::Line;
use common::naive::{Message, chunked, field, read_message, status};
use common::{Rng, seed};
use corelane::access_log::Entry;
use corelane::config::Config;
use corelane::exchange::{
    Ask, Dial, Entrance, NoSeat, PdEvent, Record, Seat, Session, Sign, World, message_start,
};
use corelane::route::Role;
use corelane::shared::{AdminRequest, Route, Worker};
use serde_json::{Value, json};
use shards::{Books, LoadGuard, Permit, Slot, WorkerId};

const PREFILL_COUNT: u16 = 3;
const WORKER_COUNT: u16 = 6;
const SECOND_NS: u64 = 1_000_000_000;
const AGE_MAX_SECS: u64 = 3;

fn role_of(slot: Slot) -> Role {
    if slot.0 < PREFILL_COUNT {
        Role::Prefill
    } else {
        Role::Decode
    }
}

// ---- what clients ask ----

/// Who gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    TwoLegs,
    DecodeAlone,
    PrefillAlone,
    /// The router answers.
    Nobody,
}

#[derive(Clone, Debug)]
struct Asked {
    wire: Vec<u8>,
    body: Value,
    way: Way,
    streams: bool,
    is_http10: bool,
    /// As it must begin the id that workers see.
    id: Option<String>,
}

const CHAT: usize = 0;
const CHAT_STREAM: usize = 1;
const KIND_COUNT: usize = 10;

fn ask(tag: usize, kind: usize) -> Asked {
    let mut body =
        json!({"model": "m", "messages": [{"role": "user", "content": format!("q{tag}")}]});
    let mut set = |name: &str, value: Value| body[name] = value;
    let mut target = "/v1/chat/completions";
    let (mut version, mut fields, mut id) = ("HTTP/1.1", String::new(), None);
    let mut way = Way::TwoLegs;
    match kind {
        CHAT => set("max_tokens", json!(7)),
        CHAT_STREAM => {
            set("stream", json!(true));
            set("stream_options", json!({"include_usage": true}));
        }
        2 => {
            // P4: what a client may not choose.
            set(
                "kv_transfer_params",
                json!({"remote_host": "evil", "secret": "CLIENTS-OWN"}),
            );
            set("stream", json!(true));
            set("max_completion_tokens", json!(9));
            fields = format!("X-Request-Id: own/{tag}\r\n");
            id = Some(format!("own-{tag}-"));
        }
        3 => {
            target = "/v1/completions";
            set("prompt", json!("once"));
            fields = format!("X-Request-ID: own-{tag}\r\n");
            id = Some(format!("own-{tag}-"));
        }
        4 => {
            version = "HTTP/1.0";
            fields = "Connection: keep-alive\r\n".into();
        }
        5 => {
            version = "HTTP/1.0";
            set("stream", json!(true));
        }
        6 => {
            set("n", json!(2));
            set("kv_transfer_params", json!({"secret": "CLIENTS-OWN"}));
            way = Way::DecodeAlone;
        }
        7 => {
            target = "/v1/messages";
            set("stream", json!(true));
            way = Way::DecodeAlone;
        }
        8 => {
            target = "/v1/embeddings";
            way = Way::PrefillAlone;
        }
        _ => way = Way::Nobody,
    }
    let text = if way == Way::Nobody {
        "{\"no JSON".to_string()
    } else {
        body.to_string()
    };
    let head = format!(
        "POST {target} {version}\r\nHost: r\r\nX-Tag: {tag}\r\n{fields}Content-Length: {}\r\n\r\n",
        text.len()
    );
    Asked {
        wire: (head + &text).into_bytes(),
        streams: body["stream"] == json!(true),
        body,
        way,
        is_http10: version == "HTTP/1.0",
        id,
    }
}

// ---- what workers do ----

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialing {
    Connects,
    Reused,
    Refused,
    Fails,
    Hangs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// By Content-Length.
    Good,
    GoodChunked,
    GoodToClose,
    /// An interim answer first.
    GoodLate,
    NoParams,
    NoJson,
    /// The head says more than comes.
    Short,
    BadHead,
    BadChunk,
    Status(u16),
}

/// One leg's worker.
#[derive(Clone, Copy, Debug)]
struct Script {
    dialing: Dialing,
    /// The ring takes the request in one go.
    sent_at_once: bool,
    kind: Kind,
    /// It answers, or breaks, before it has the request.
    is_early: bool,
    /// After so many thousandths of the answer: `Some(failed)` its connection ends, `None` silence.
    cut: Option<(usize, Option<bool>)>,
    piece: usize,
}

const GOOD: Script = Script {
    dialing: Dialing::Connects,
    sent_at_once: false,
    kind: Kind::Good,
    is_early: false,
    cut: None,
    piece: usize::MAX / 2,
};

fn of_kind(kind: Kind) -> Script {
    Script { kind, ..GOOD }
}

fn of_dialing(dialing: Dialing) -> Script {
    Script { dialing, ..GOOD }
}

fn cut(at: usize, end: Option<bool>) -> Script {
    Script {
        cut: Some((at, end)),
        ..GOOD
    }
}

/// Every behaviour of the tables; the first are those in which a leg succeeds.
fn scripts() -> Vec<Script> {
    let mut all: Vec<Script> = [
        Kind::Good,
        Kind::GoodChunked,
        Kind::GoodToClose,
        Kind::GoodLate,
        Kind::NoParams,
        Kind::NoJson,
        Kind::Short,
        Kind::BadHead,
        Kind::BadChunk,
    ]
    .map(of_kind)
    .to_vec();
    all.extend(
        [400, 404, 429, 500, 501, 502, 503, 302].map(|status| of_kind(Kind::Status(status))),
    );
    all.extend(
        [
            Dialing::Refused,
            Dialing::Fails,
            Dialing::Hangs,
            Dialing::Reused,
        ]
        .map(of_dialing),
    );
    all.push(Script {
        sent_at_once: true,
        ..GOOD
    });
    all.push(Script { piece: 40, ..GOOD });
    all.push(Script {
        piece: 40,
        ..of_kind(Kind::GoodChunked)
    });
    for end in [None, Some(true), Some(false)] {
        all.extend([cut(0, end), cut(200, end), cut(700, end)]);
        all.push(Script {
            dialing: Dialing::Reused,
            sent_at_once: true,
            ..cut(0, end)
        });
        all.push(Script {
            dialing: Dialing::Reused,
            is_early: true,
            ..cut(0, end)
        });
        all.push(Script {
            is_early: true,
            ..cut(0, end)
        });
    }
    all.push(Script {
        is_early: true,
        ..GOOD
    });
    all.push(Script {
        is_early: true,
        ..of_kind(Kind::Status(400))
    });
    all
}

#[derive(Clone, Debug)]
struct Reply {
    wire: Vec<u8>,
    head_bytes: usize,
    until_close: bool,
    closes: bool,
    is_broken: bool,
    status: u16,
    /// The content as the client must get it.
    body: Vec<u8>,
    issues: Option<usize>,
}

fn usage(prompt: usize, cached: usize) -> String {
    format!(
        "\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":3,\"total_tokens\":{},\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}",
        prompt + 3
    )
}

fn prompt_tokens(handover: usize) -> usize {
    1000 + handover
}

fn answer_text(leg: usize, streams: bool, (prompt, cached): (usize, usize)) -> String {
    let usage = usage(prompt, cached);
    if streams {
        let mut text = String::new();
        for n in 0..3 {
            text += &format!("data: {{\"leg\":{leg},\"n\":{n},\"usage\":null}}\n\n");
        }
        text + &format!("data: {{\"leg\":{leg},\"choices\":[],{usage}}}\n\ndata: [DONE]\n\n")
    } else {
        format!(
            "{{\"leg\":{leg},\"choices\":[\"{}\"],{usage}}}",
            "x".repeat(30)
        )
    }
}

fn params_text(handover: usize, slot: Slot) -> String {
    format!(
        "{{\"do_remote_prefill\": true,\"do_remote_decode\":false,\"remote_engine_id\":\"e{}\",\"remote_block_ids\":[{handover}]}}",
        slot.0
    )
}

/// What a leg's worker says. `handover`: a prefill leg's number for its blocks. `fix`: the usage a client must see.
fn reply(
    leg: usize,
    kind: Kind,
    slot: Slot,
    streams: bool,
    handover: Option<usize>,
    fix: Option<usize>,
) -> Reply {
    let (mut code, mut until_close, mut issues) = (200, false, None);
    let mut shown = None;
    let text = match (kind, handover) {
        (Kind::Status(status), _) => {
            code = status;
            format!(
                "{{\"error\":{{\"message\":\"worker {leg}\",\"type\":\"t\",\"code\":{status}}}}}"
            )
        }
        (Kind::NoJson, _) => "<html>oops".to_string(),
        (Kind::NoParams, Some(_)) => "{\"id\":\"x\",\"kv_transfer_params\":null}".to_string(),
        (_, Some(n)) => {
            issues = Some(n);
            let params = params_text(n, slot);
            format!(
                "{{\"id\":\"x\",{},\"kv_transfer_params\": {params} }}",
                usage(prompt_tokens(n), 5)
            )
        }
        (kind, None) => {
            let is_fixed = if streams {
                kind != Kind::Short
            } else {
                !matches!(kind, Kind::GoodChunked | Kind::GoodToClose)
            };
            shown = fix
                .filter(|_| is_fixed)
                .map(|n| answer_text(leg, streams, (prompt_tokens(n), 5)));
            answer_text(leg, streams, (17, 16))
        }
    };
    let kind = match kind {
        Kind::Good | Kind::GoodLate | Kind::NoParams if streams && code == 200 => Kind::GoodChunked,
        kind => kind,
    };
    let mime = if streams && code == 200 {
        "text/event-stream"
    } else {
        "application/json"
    };
    let mut head = format!(
        "HTTP/1.1 {code} X\r\nX-Leg: {leg}\r\nX-Request-Id: workers\r\nContent-Type: {mime}\r\n"
    );
    let mut content = text.clone().into_bytes();
    match kind {
        Kind::GoodChunked | Kind::BadChunk => {
            head += "Transfer-Encoding: chunked\r\n";
            content = chunked(&content, &[9, 60, 31], "");
        }
        Kind::GoodToClose => until_close = true,
        Kind::Short => head += &format!("Content-Length: {}\r\n", content.len() + 10),
        _ => head += &format!("Content-Length: {}\r\n", content.len()),
    }
    if kind == Kind::BadChunk {
        content.truncate(content.len() / 2);
        content.extend_from_slice(b"\r\nZZ\r\n");
    }
    head += "\r\n";
    if kind == Kind::GoodLate {
        head =
            format!("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: </a>\r\n\r\n{head}");
    }
    if kind == Kind::BadHead {
        head = "HTTP/1.1 20 OK\r\nContent-Length: x\r\n\r\n".to_string();
    }
    let head_bytes = head.len();
    let mut wire = head.into_bytes();
    wire.extend_from_slice(&content);
    Reply {
        head_bytes,
        wire,
        until_close,
        closes: until_close,
        is_broken: matches!(kind, Kind::BadHead | Kind::BadChunk | Kind::Short),
        status: code,
        body: shown.unwrap_or(text).into_bytes(),
        issues,
    }
}

// ---- what is known of hand-overs ----

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stale,
    Orphan,
    Released,
    Lost,
}

/// What a decode worker has of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Has {
    OnItsWay,
    /// All of the request, or nobody can say.
    All,
    /// The connection ended first.
    Part,
}

#[derive(Clone, Debug)]
struct Handover {
    holder: WorkerId,
    answered_ns: u64,
    /// The session has read it.
    is_consumed: bool,
    fates: Vec<Fate>,
    /// Leg, its worker, whether it replaces the one before it on a dead idle connection.
    sent: Vec<(usize, Slot, bool, Has)>,
}

#[derive(Default)]
struct Ledger {
    handovers: Vec<Handover>,
    leg_count: usize,
    /// By worker and request id: the leg.
    ids: HashMap<(Slot, String), usize>,
    ask_of_id: HashMap<String, usize>,
    events: HashMap<String, usize>,
    statuses: HashMap<u16, usize>,
    retries: usize,
    resends: usize,
}

impl Ledger {
    fn count(&mut self, what: &str) {
        *self.events.entry(what.to_string()).or_default() += 1;
    }

    fn counted(&self, what: &str) -> usize {
        self.events.get(what).copied().unwrap_or(0)
    }

    /// A request with these parameters is at a worker whole, or may be.
    fn received(&mut self, handover: usize, leg: usize) {
        let sent = &mut self.handovers[handover].sent;
        let at = sent.iter().position(|s| s.0 == leg).expect("it was sent");
        assert_eq!(
            sent.len(),
            1,
            "P1: parameters of hand-over {handover} used twice: {sent:?}"
        );
        sent[at].3 = Has::All;
    }
}

// ---- the world ----

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closed {
    Finished,
    Aborted,
}

struct Leg {
    number: usize,
    slot: Slot,
    worker: WorkerId,
    script: Script,
    /// It replaces one on a dead idle connection, to the same worker.
    is_resend: bool,
    is_connecting: bool,
    out: Vec<u8>,
    message: Option<Vec<u8>>,
    /// The worker has the whole request.
    has_request: bool,
    is_broken: bool,
    is_over: bool,
    /// Parameters in its request.
    handover: Option<usize>,
    reply: Option<Reply>,
    replied: usize,
    /// The client gets its answer.
    relays: bool,
    is_active: bool,
    is_dispatched: bool,
}

/// Of a leg that is over, for the check of the client's answers.
struct Told {
    leg: usize,
    ask: usize,
    role: Role,
    reply: Reply,
    replied: usize,
    has_ended: bool,
}

#[derive(Clone, Copy, Default)]
struct Odds {
    no_seat: u64,
    queued: u64,
    full: u64,
    held: u64,
    missing_bytes: u64,
}

/// The scripts of legs to come; without one a leg goes well, or as the generator says.
#[derive(Default)]
struct Scripts {
    prefill: VecDeque<Script>,
    decode: VecDeque<Script>,
    release: VecDeque<Script>,
    random: Option<Rng>,
}

impl Scripts {
    fn next(&mut self, role: Role, is_release: bool) -> Script {
        let listed = match (role, is_release) {
            (_, true) => self.release.pop_front(),
            (Role::Prefill, _) => self.prefill.pop_front(),
            _ => self.decode.pop_front(),
        };
        match (listed, &mut self.random) {
            (Some(script), _) => script,
            (None, Some(rng)) => random_script(rng),
            (None, None) => GOOD,
        }
    }
}

fn random_script(rng: &mut Rng) -> Script {
    let all = scripts();
    let mut script = match rng.below(10) {
        0..4 => GOOD,
        _ => all[rng.below(all.len() as u64) as usize],
    };
    if rng.below(3) == 0 {
        script.piece = 1 << (2 + rng.below(8));
    }
    if rng.below(3) == 0 && script.dialing == Dialing::Connects {
        script.dialing = Dialing::Reused;
    }
    if rng.below(5) == 0 {
        let end = [None, Some(false), Some(true)][rng.below(3) as usize];
        script.cut = Some((rng.below(1001) as usize, end));
    }
    script.is_early |= rng.below(15) == 0;
    script.sent_at_once ^= rng.below(3) == 0;
    script
}

struct Sim {
    config: Rc<Config>,
    asks: Rc<Vec<Asked>>,
    ledger: Rc<RefCell<Ledger>>,
    scripts: Rc<RefCell<Scripts>>,
    fleet: Rc<Vec<Option<Worker>>>,
    books: &'static Books,
    rng: Rng,
    odds: Odds,
    line: Line,
    now_ns: u64,
    deadline_ns: u64,
    is_draining: bool,
    /// There is no client: which hand-over is to be released.
    orphan: Option<usize>,
    /// The seat of the last leg; an orphan begins with such a one.
    was_active: bool,
    others_held: u32,

    out: Vec<u8>,
    closed: Option<Closed>,
    is_reading: bool,
    is_watched: bool,
    leg: Option<Leg>,
    told: Vec<Told>,
    adopted: Vec<(Session, usize, bool)>,

    // Of the running exchange.
    ask_index: usize,
    reserved: Option<Slot>,
    handover: Option<usize>,
    /// Of the exchange that has just ended.
    left_behind: Option<usize>,
    orphaned: Option<usize>,
    is_stale: bool,
    is_skipped: bool,
    is_missing: bool,
    has_begun: bool,
    /// Workers that have failed it.
    failed: Vec<Slot>,
    /// Its idle connection died under a request, which is no failure: the same worker may get it again.
    resent: Option<Slot>,
    /// Whom the last leg was for.
    dialed: Option<Slot>,
    retries: u32,
}

impl Sim {
    fn chance(&mut self, percent: u64) -> bool {
        self.rng.below(100) < percent
    }

    fn way(&self) -> Way {
        self.asks
            .get(self.ask_index)
            .map_or(Way::Nobody, |ask| ask.way)
    }

    fn total(&self) -> u32 {
        (0..WORKER_COUNT)
            .map(|n| self.books.in_flight(Slot(n)))
            .sum()
    }

    /// What must be held for this session now, and whether as active.
    fn held(&self) -> Vec<(Slot, bool)> {
        let Some(leg) = &self.leg else {
            return Vec::new();
        };
        let is_active = match self.way() {
            Way::PrefillAlone if self.orphan.is_none() => leg.relays,
            // It waits for its one answer, to its end; another one (an error) is relayed.
            _ if self.has_pair() => leg.relays,
            _ => leg.is_active,
        };
        let mut held = vec![(leg.slot, is_active)];
        if self.has_pair() && !leg.relays {
            held.push((self.reserved.expect("P3: a decode seat"), false));
        }
        held
    }

    /// A prefill leg runs whose decode seat is chosen.
    fn has_pair(&self) -> bool {
        let is_prefill = self
            .leg
            .as_ref()
            .is_some_and(|leg| role_of(leg.slot) == Role::Prefill);
        is_prefill && self.way() == Way::TwoLegs && self.orphan.is_none()
    }

    /// All begins again, if there was something before.
    fn begin_anew(&mut self) {
        if let Some(n) = self.handover.take() {
            let has = !self.ledger.borrow().handovers[n].sent.is_empty();
            assert!(has, "P2: hand-over {n} was forgotten");
        }
    }

    fn fate(&mut self, handover: usize, fate: Fate) {
        let handover = &mut self.ledger.borrow_mut().handovers[handover];
        let is_sound = match fate {
            Fate::Stale | Fate::Orphan => handover.fates.is_empty(),
            Fate::Released | Fate::Lost => handover.fates == [Fate::Orphan],
        };
        assert!(
            is_sound && handover.is_consumed,
            "P2: one fate a hand-over, not {fate:?} after {:?}",
            handover.fates
        );
        assert!(
            fate == Fate::Released || fate == Fate::Lost || handover.sent.is_empty(),
            "P1: {fate:?}, although a decode worker may have it"
        );
        handover.fates.push(fate);
    }

    fn make_reply(&mut self) {
        let streams =
            self.orphan.is_none() && self.asks.get(self.ask_index).is_some_and(|ask| ask.streams);
        let is_http10 = self
            .asks
            .get(self.ask_index)
            .is_some_and(|ask| ask.is_http10);
        let has_pair = self.has_pair();
        let Some(leg) = &mut self.leg else { return };
        let mut ledger = self.ledger.borrow_mut();
        let is_prefill = role_of(leg.slot) == Role::Prefill;
        let handover = has_pair.then_some(ledger.handovers.len());
        let fix = leg.handover.filter(|_| !(is_http10 && streams));
        let reply = reply(
            leg.number,
            leg.script.kind,
            leg.slot,
            streams && !is_prefill,
            handover,
            fix,
        );
        if reply.issues.is_some() {
            ledger.handovers.push(Handover {
                holder: leg.worker,
                answered_ns: 0,
                is_consumed: false,
                fates: Vec::new(),
                sent: Vec::new(),
            });
        }
        leg.reply = Some(reply);
    }

    /// Checks what the leg's worker has been sent, all of it.
    fn check_request(&mut self) {
        let (asks, way) = (self.asks.clone(), self.way());
        let leg = self.leg.as_mut().expect("a leg");
        let (message, len) = read_message(&leg.out, false, false).expect("a request");
        assert!(
            message.is_whole && len == leg.out.len(),
            "one whole request is sent"
        );
        let head = &message.head;
        let tag: usize = field(head, "x-tag")[0].parse().expect("a tag");
        let host = format!("w{}.test:80", leg.slot.0);
        assert_eq!(
            field(head, "host"),
            vec![host.as_str()],
            "the host is its worker's"
        );
        let asked = &asks[tag];
        assert!(
            self.orphan.is_some() || tag == self.ask_index,
            "E3: another request's leg"
        );
        let text = String::from_utf8(message.body).expect("text");
        assert!(
            way == Way::PrefillAlone || !text.contains("CLIENTS-OWN"),
            "P4: a client's own transfer parameters went to a worker"
        );
        let mut body: Value = serde_json::from_str(&text).expect("the body is JSON");
        let params = body
            .as_object_mut()
            .expect("an object")
            .remove("kv_transfer_params");
        let mut want = asked.body.clone();
        want.as_object_mut()
            .expect("an object")
            .remove("kv_transfer_params");
        let is_prefill = role_of(leg.slot) == Role::Prefill;
        if way == Way::PrefillAlone && self.orphan.is_none() {
            assert_eq!(body, want, "a request of one leg is the client's");
            return;
        }
        if is_prefill || self.orphan.is_some() {
            assert!(
                body["max_tokens"] == json!(1) || body["max_completion_tokens"] == json!(1),
                "prefill is one token: {text}"
            );
            assert!(
                body.get("stream").is_none_or(|s| s == &json!(false)),
                "prefill does not stream: {text}"
            );
            assert!(
                body.get("stream_options").is_none(),
                "prefill has no stream_options: {text}"
            );
            for name in [
                "max_tokens",
                "max_completion_tokens",
                "stream",
                "stream_options",
            ] {
                body.as_object_mut().expect("an object").remove(name);
                want.as_object_mut().expect("an object").remove(name);
            }
        }
        assert_eq!(
            body, want,
            "beside the edits of its leg the body is the client's"
        );
        if is_prefill {
            let params = params.expect("prefill is told to keep its blocks");
            assert_eq!(params["do_remote_decode"], json!(true));
            assert_eq!(params["do_remote_prefill"], json!(false));
        } else {
            let running = self.orphan.or(self.handover);
            let Some(n) = running else {
                assert_eq!(params, None, "parameters of nobody");
                let may_be_alone = way == Way::DecodeAlone || self.is_skipped || self.is_missing;
                assert!(may_be_alone, "decode without a hand-over");
                return self.check_id(&message.head, tag);
            };
            let mut ledger = self.ledger.borrow_mut();
            let raw = params_text(n, ledger.handovers[n].holder.slot);
            assert!(
                text.contains(&raw),
                "the parameters are the prefill worker's as written: {text}"
            );
            leg.handover = Some(n);
            let handover = &mut ledger.handovers[n];
            handover
                .sent
                .push((leg.number, leg.slot, leg.is_resend, Has::OnItsWay));
            if self.orphan.is_none() {
                let age = self.now_ns - handover.answered_ns;
                assert!(
                    age <= AGE_MAX_SECS * SECOND_NS,
                    "P1: parameters are sent {age} ns old"
                );
                // One that is out of the fleet may be draining, and hold them still.
                let holder = self.fleet[usize::from(handover.holder.slot.0)]
                    .as_ref()
                    .map(|w| w.id);
                assert!(
                    holder.is_none_or(|id| id == handover.holder),
                    "P1: the holder of the blocks has restarted"
                );
            }
        }
        self.check_id(&message.head, tag);
    }

    fn check_id(&self, head: &str, tag: usize) {
        let leg = self.leg.as_ref().expect("a leg");
        let ids = field(head, "x-request-id");
        assert_eq!(ids.len(), 1, "one request id: {head}");
        let start = self.asks[tag].id.clone().unwrap_or(format!("made-{tag}-"));
        assert!(
            ids[0].starts_with(&start),
            "the client's id begins the workers': {} {start}",
            ids[0]
        );
        let mut ledger = self.ledger.borrow_mut();
        let of = ledger.ask_of_id.entry(ids[0].to_string()).or_insert(tag);
        assert_eq!(*of, tag, "request ids are one request's");
        // A release may follow a request that the same worker got a part of.
        let before = ledger
            .ids
            .insert((leg.slot, ids[0].to_string()), leg.number);
        let may_repeat = leg.is_resend || self.orphan.is_some();
        assert!(
            before.is_none() || may_repeat,
            "worker {} sees the id {} twice",
            leg.slot.0,
            ids[0]
        );
    }

    fn got_request(&mut self, is_sure: bool) {
        let leg = self.leg.as_mut().expect("a leg");
        leg.has_request = is_sure;
        if let Some(n) = leg.handover {
            self.ledger.borrow_mut().received(n, leg.number);
        }
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
        out.extend_from_slice(format!("made-{}", self.ask_index).as_bytes());
    }
    fn buffer(&mut self) -> Vec<u8> {
        Vec::new()
    }
    fn grow(&mut self, mut buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        buffer.reserve(more);
        (buffer, false)
    }
    fn recycle(&mut self, _: Vec<u8>) {}

    fn send(&mut self, bytes: Vec<u8>) {
        assert!(self.orphan.is_none(), "an orphan has no client");
        assert_eq!(self.closed, None, "bytes for the client after its end");
        if !bytes.starts_with(b"HTTP/1.1 1") {
            self.has_begun |= self.leg.is_some();
            if let Some(leg) = &mut self.leg {
                leg.relays = true;
            }
        }
        self.out.extend_from_slice(&bytes);
    }
    fn send_piece(&mut self, piece: Vec<u8>, from: usize, to: usize) {
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
        let mut tried = ask.tried.to_vec();
        tried.sort();
        assert!(
            tried.iter().all(|slot| role_of(*slot) == ask.role),
            "workers of another role count as tried"
        );
        // It went out of the fleet before it could get the request again.
        if let Some(slot) = self.resent.take()
            && tried.contains(&slot)
        {
            self.failed.push(slot);
        }
        if self.orphan.is_none() {
            let mut failed: Vec<Slot> = self
                .failed
                .iter()
                .filter(|s| role_of(**s) == ask.role)
                .copied()
                .collect();
            failed.sort();
            assert_eq!(
                tried, failed,
                "the workers that failed this request are those that were tried"
            );
        }
        if self.chance(self.odds.no_seat) {
            return Err(NoSeat::NoneEligible);
        }
        if !ask.is_followed_up && self.chance(self.odds.full) {
            return Err(NoSeat::Full);
        }
        let fleet = self.fleet.iter().flatten().map(|worker| worker.id);
        let left: Vec<WorkerId> = fleet
            .filter(|w| role_of(w.slot) == ask.role && !tried.contains(&w.slot))
            .collect();
        if left.is_empty() {
            return Err(NoSeat::AllTried);
        }
        let id = left[self.rng.below(left.len() as u64) as usize];
        let guard = LoadGuard::acquire(self.books, id, ask.prompt_bytes).expect("an open worker");
        self.was_active = false;
        if ask.role == Role::Decode {
            self.reserved = Some(id.slot);
        }
        let missing_bytes =
            (self.odds.missing_bytes > 0).then(|| self.rng.below(self.odds.missing_bytes));
        Ok(Seat {
            ahead: None,
            id,
            is_trial: false,
            missing_bytes,
            guard,
        })
    }
    fn worker(&self, slot: Slot) -> Option<&Worker> {
        self.fleet[usize::from(slot.0)].as_ref()
    }
    fn random(&mut self) -> u64 {
        self.rng.next()
    }
    fn adopt(&mut self, session: Session) {
        let n = self
            .orphaned
            .take()
            .expect("P2: adopted without being counted as an orphan");
        self.others_held += 1;
        self.adopted.push((session, n, self.was_active));
    }
    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial {
        assert!(self.leg.is_none(), "one leg at a time");
        assert_eq!(self.closed, None, "a leg for a client that is gone");
        assert!(!self.has_begun, "E2: another leg once the answer has begun");
        let is_pair =
            role_of(slot) == Role::Prefill && self.way() == Way::TwoLegs && self.orphan.is_none();
        let own = if is_pair { 2 } else { 1 };
        assert_eq!(
            self.total(),
            self.others_held + own,
            "P3, E1: the seats of this leg are taken, no others"
        );
        assert!(
            self.books.in_flight(slot) >= 1,
            "E1: the seat is its worker's"
        );
        if is_pair {
            self.begin_anew();
            let reserved = self
                .reserved
                .expect("P3: the decode seat is chosen before prefill is dialed");
            assert!(
                self.books.in_flight(reserved) >= 1,
                "P3: the decode seat is held"
            );
        } else if self.orphan.is_none() && self.way() != Way::PrefillAlone {
            assert_eq!(
                role_of(slot),
                Role::Decode,
                "a request goes to a decode worker alone"
            );
            assert_eq!(
                self.reserved,
                Some(slot),
                "decode goes where its seat was reserved"
            );
        }
        self.dialed = Some(slot);
        let is_resend = fresh && self.resent.take() == Some(slot) && self.orphan.is_none();
        if is_resend {
            self.failed.push(slot);
        } else if self.orphan.is_none() {
            // Until it is handed over or answered it has failed; a leg that succeeds is taken off again.
            assert!(
                !self.failed.contains(&slot),
                "a worker that failed this request gets it again"
            );
            self.failed.push(slot);
        }
        if !is_resend && self.orphan.is_none() {
            self.was_active = false;
        }
        let is_active = self.was_active;
        let script = self
            .scripts
            .borrow_mut()
            .next(role_of(slot), self.orphan.is_some());
        let Some(worker) = self.worker(slot).map(|worker| worker.id) else {
            return Dial::Refused;
        };
        if script.dialing == Dialing::Refused {
            return Dial::Refused;
        }
        let mut ledger = self.ledger.borrow_mut();
        ledger.leg_count += 1;
        let is_reused = script.dialing == Dialing::Reused && !fresh;
        self.leg = Some(Leg {
            number: ledger.leg_count,
            slot,
            worker,
            script,
            is_resend,
            is_connecting: !is_reused,
            out: Vec::new(),
            message: None,
            has_request: false,
            is_broken: false,
            is_over: false,
            handover: None,
            reply: None,
            replied: 0,
            relays: false,
            is_active,
            is_dispatched: false,
        });
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
        (leg.is_active, leg.is_dispatched) = (true, true);
        let at_once = leg.script.sent_at_once;
        self.check_request();
        if at_once {
            self.got_request(true);
            return Some(message);
        }
        self.leg.as_mut().expect("a leg").message = Some(message);
        None
    }
    fn send_worker(&mut self, _: Vec<u8>) {
        panic!("nothing is streamed to workers here");
    }
    fn send_worker_piece(&mut self, _: Vec<u8>, _: usize, _: usize) {
        panic!("nothing is streamed to workers here");
    }
    fn break_leg(&mut self) {
        let leg = self.leg.as_mut().expect("a leg to break");
        assert!(
            leg.message.is_some(),
            "a leg is broken to get the message back"
        );
        leg.is_broken = true;
    }
    fn end_leg(&mut self, keep: bool) {
        let leg = self.leg.take().expect("a leg is ended once");
        if keep {
            let reply = leg.reply.as_ref().expect("E4: kept without an answer");
            assert!(
                !reply.is_broken && !reply.closes && leg.replied == reply.wire.len(),
                "E4: kept in the midst of an answer"
            );
            assert!(
                leg.message.is_none() && leg.has_request && !leg.is_broken && !leg.is_over,
                "E4: kept while it sends or after its end"
            );
        }
        if leg.message.is_some()
            && let Some(n) = leg.handover
        {
            let sent = &mut self.ledger.borrow_mut().handovers[n].sent;
            sent.iter_mut()
                .filter(|s| s.0 == leg.number && s.3 == Has::OnItsWay)
                .for_each(|s| s.3 = Has::Part);
        }
        self.was_active = leg.is_active;
        let has_ended = leg.is_over;
        if let Some(reply) = leg.reply {
            self.told.push(Told {
                leg: leg.number,
                ask: self.ask_index,
                role: role_of(leg.slot),
                reply,
                replied: leg.replied,
                has_ended,
            });
        }
    }

    fn hand_over(&mut self, _: AdminRequest) -> bool {
        panic!("nothing is for the control plane here");
    }
    fn judge(&mut self, _: Slot, _: Sign, _: bool) {}
    fn may_retry(&mut self) -> bool {
        true
    }
    fn count_resend(&mut self) {
        let slot = self.dialed.expect("a leg");
        self.failed.retain(|failed| *failed != slot);
        self.resent = Some(slot);
        self.ledger.borrow_mut().resends += 1;
    }
    fn count_retry(&mut self, _: Route, attempt: u32) {
        self.retries += 1;
        // A prefill made anew after a resend counts among them.
        assert!(attempt >= self.retries, "retries are numbered");
        assert!(
            self.retries <= self.config.retry.retries_max,
            "retries have a number"
        );
        self.ledger.borrow_mut().retries += 1;
        assert!(!self.has_begun, "E2: a retry once the answer has begun");
    }
    fn count_pd(&mut self, event: PdEvent) {
        let name = format!("{event:?}");
        self.ledger
            .borrow_mut()
            .count(name.split('(').next().unwrap_or(""));
        match event {
            PdEvent::Handover => {
                let leg = self.leg.as_ref().expect("P2: a hand-over without a leg");
                let reply = leg.reply.as_ref().expect("an answer");
                let n = reply.issues.expect("P2: a hand-over that nobody answered");
                assert_eq!(
                    leg.replied,
                    reply.wire.len(),
                    "P2: a hand-over of half an answer"
                );
                assert_eq!(
                    self.handover, None,
                    "P2: a second hand-over while one is open"
                );
                self.failed.retain(|slot| *slot != leg.slot);
                let handover = &mut self.ledger.borrow_mut().handovers[n];
                (handover.is_consumed, handover.answered_ns) = (true, self.now_ns);
                self.handover = Some(n);
            }
            PdEvent::MissingTransfer => {
                let leg = self.leg.as_ref().expect("a leg");
                self.failed.retain(|slot| *slot != leg.slot);
                self.is_missing = true;
            }
            PdEvent::Skipped => {
                self.begin_anew();
                self.is_skipped = true;
            }
            PdEvent::Stale => {
                let n = self.handover.take().expect("P2: stale without a hand-over");
                self.fate(n, Fate::Stale);
                self.is_stale = true;
            }
            PdEvent::Orphan if self.is_stale => {}
            PdEvent::Lost if std::mem::take(&mut self.is_stale) => {}
            PdEvent::Orphan => {
                let n = self
                    .handover
                    .take()
                    .or(self.left_behind.take())
                    .expect("P2: an orphan without a hand-over");
                self.fate(n, Fate::Orphan);
                self.orphaned = Some(n);
            }
            PdEvent::Released | PdEvent::Lost => {
                let n = self
                    .orphan
                    .expect("P2: released by a session with a client");
                if event == PdEvent::Released {
                    let has = self.ledger.borrow().handovers[n].sent.last().map(|s| s.3);
                    assert_eq!(
                        has,
                        Some(Has::All),
                        "P2: released, but nobody got the parameters"
                    );
                    self.fate(n, Fate::Released);
                } else {
                    self.fate(n, Fate::Lost);
                }
            }
            PdEvent::Request(_) | PdEvent::Whole(_) | PdEvent::UsageFixed => {}
            PdEvent::RequestTooLong | PdEvent::AnswerTooLong => panic!("nothing here is long"),
        }
    }
    fn record_handover(&mut self, _: u64, _: u64) {}
    fn count_malformed(&mut self) {}
    fn record_added(&mut self, _: u64) {}
    fn record_answer(&mut self, _: Slot, _: u64, _: bool) {}
    fn record_piece(&mut self, _: Slot, _: Option<u64>) {}
    fn record(&mut self, _: Record) {
        assert!(self.leg.is_none(), "an exchange ends after its leg");
        self.left_behind = self.handover.take();
        (self.is_skipped, self.is_missing, self.has_begun) = (false, false, false);
        self.reserved = None;
        self.failed.clear();
        self.retries = 0;
        self.ask_index += 1;
    }
}

// ---- a connection, and what it leaves behind ----

struct Part {
    session: Session,
    sim: Sim,
}

impl Part {
    fn is_over(&self) -> bool {
        self.sim.closed.is_some()
    }
}

struct Play {
    seed: u64,
    books: &'static Books,
    config: Rc<Config>,
    asks: Rc<Vec<Asked>>,
    ledger: Rc<RefCell<Ledger>>,
    scripts: Rc<RefCell<Scripts>>,
    fleet: Rc<Vec<Option<Worker>>>,
    /// Of the running lives, or the last ones.
    ids: Rc<RefCell<Vec<WorkerId>>>,
    odds: Odds,
    now_ns: u64,
    is_draining: bool,
    /// The first has the client.
    parts: Vec<Part>,
    wire: Vec<u8>,
    at: usize,
    client_ended: bool,
    was_gone: bool,
    name: String,
    trace: Vec<String>,
}

impl Drop for Play {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("case SEED={} {}", self.seed, self.name);
            for line in self.trace.iter().rev().take(60).rev() {
                println!("  {line}");
            }
            println!(
                "client got: {:?}",
                String::from_utf8_lossy(&self.parts[0].sim.out)
            );
            println!("{:?}", self.ledger.borrow().handovers);
        }
    }
}

fn place(id: WorkerId) -> Worker {
    Worker {
        id,
        role: role_of(id.slot),
        rank: None,
        kv: Default::default(),
        url: "http://w.test".into(),
        address: ([127, 0, 0, 1], 80).into(),
        authority: format!("w{}.test:80", id.slot.0).into(),
        path_prefix: "".into(),
        tls: None,
        models: Vec::new(),
    }
}

fn config(flags: &[&str]) -> Rc<Config> {
    let line = [
        "--vllm-pd-disaggregation",
        "--pd-handover-age-max-secs",
        "3",
        "--pd-release-timeout-secs",
        "5",
    ];
    Rc::new(Config::for_tests(&[&line, flags].concat()))
}

impl Play {
    fn new(seed: u64, config: &Rc<Config>, asks: Vec<Asked>, scripts: Scripts, odds: Odds) -> Play {
        thread_local! {
            static BOOKS: (&'static Books, Rc<RefCell<Vec<WorkerId>>>) = {
                let books: &'static Books = Box::leak(Box::new(Books::new(usize::from(WORKER_COUNT))));
                let ids = (0..WORKER_COUNT).map(|n| books.open(Slot(n)).expect("free")).collect();
                (books, Rc::new(RefCell::new(ids)))
            };
        }
        let (books, ids) = BOOKS.with(Clone::clone);
        for id in ids.borrow_mut().iter_mut() {
            books.close(*id);
            *id = books.open(id.slot).expect("E1: a guard outlived its play");
        }
        let places = ids.borrow().iter().map(|id| Some(place(*id))).collect();
        let mut play = Play {
            seed,
            books,
            config: config.clone(),
            wire: asks.iter().flat_map(|ask| ask.wire.clone()).collect(),
            asks: Rc::new(asks),
            ledger: Rc::default(),
            scripts: Rc::new(RefCell::new(scripts)),
            fleet: Rc::new(places),
            ids,
            odds,
            now_ns: 1000 * SECOND_NS,
            is_draining: false,
            parts: Vec::new(),
            at: 0,
            client_ended: false,
            was_gone: false,
            name: String::new(),
            trace: Vec::new(),
        };
        play.add(Session::new(), None, false);
        play.event(0, "begin", |session, sim| session.begin(sim));
        play
    }

    fn add(&mut self, session: Session, orphan: Option<usize>, was_active: bool) {
        let sim = Sim {
            config: self.config.clone(),
            asks: self.asks.clone(),
            ledger: self.ledger.clone(),
            scripts: self.scripts.clone(),
            fleet: self.fleet.clone(),
            books: self.books,
            rng: Rng(self.seed.wrapping_add(self.parts.len() as u64)),
            odds: self.odds,
            line: Line::new(),
            now_ns: self.now_ns,
            deadline_ns: u64::MAX,
            is_draining: self.is_draining,
            orphan,
            was_active,
            others_held: 0,
            out: Vec::new(),
            closed: None,
            is_reading: true,
            is_watched: false,
            leg: None,
            told: Vec::new(),
            adopted: Vec::new(),
            ask_index: 0,
            reserved: None,
            handover: None,
            left_behind: None,
            orphaned: None,
            is_stale: false,
            is_skipped: false,
            is_missing: false,
            has_begun: false,
            failed: Vec::new(),
            resent: None,
            dialed: None,
            retries: 0,
        };
        self.parts.push(Part { session, sim });
    }

    fn is_over(&self) -> bool {
        self.parts.iter().all(Part::is_over)
    }

    fn event(&mut self, part: usize, name: &str, act: impl FnOnce(&mut Session, &mut Sim)) {
        self.trace
            .push(format!("{part} {name} at {} ms", self.now_ns / 1_000_000));
        let others: usize = (0..self.parts.len())
            .filter(|n| *n != part)
            .map(|n| self.parts[n].sim.held().len())
            .sum();
        let Part { session, sim } = &mut self.parts[part];
        sim.now_ns = self.now_ns;
        sim.is_draining = self.is_draining;
        sim.fleet = self.fleet.clone();
        sim.others_held = others as u32;
        let dispatched = |sim: &Sim| {
            sim.leg
                .as_ref()
                .filter(|leg| leg.is_dispatched)
                .map(|leg| leg.number)
        };
        let before = dispatched(sim);
        act(session, sim);
        let after = dispatched(sim);
        if after.is_some() && after != before && sim.leg.as_ref().is_some_and(|leg| !leg.relays) {
            let deadline = sim.deadline_ns;
            let is_probing = self.client_ended && part == 0;
            assert!(
                deadline > self.now_ns || is_probing,
                "a leg that has just begun has no time: {}",
                self.trace.last().map_or("", |t| t)
            );
        }
        assert!(
            sim.orphaned.is_none() && !sim.is_stale,
            "P2: an orphan was counted and not adopted"
        );
        if let Some(n) = sim.left_behind.take() {
            // One whose send has not been reported counts as received: it may have been.
            let has = !sim.ledger.borrow().handovers[n].sent.is_empty();
            assert!(has, "P2: hand-over {n} was forgotten");
        }
        let adopted = std::mem::take(&mut sim.adopted);
        let first = self.parts.len();
        for (session, n, is_active) in adopted {
            self.add(session, Some(n), is_active);
        }
        for part in first..self.parts.len() {
            self.begin_orphan(part);
        }
        self.check();
    }

    /// As `event`, for the places of its siblings that have not begun.
    fn begin_orphan(&mut self, part: usize) {
        self.trace.push(format!("{part} adopted"));
        let running: usize = (0..part).map(|n| self.parts[n].sim.held().len()).sum();
        let waiting = self.parts.len() - part - 1;
        let Part { session, sim } = &mut self.parts[part];
        sim.others_held = (running + waiting) as u32;
        session.begin(sim);
    }

    /// What must hold after every event.
    fn check(&self) {
        let mut want = vec![(0, 0); usize::from(WORKER_COUNT)];
        for part in &self.parts {
            assert!(
                !part.is_over() || part.sim.leg.is_none(),
                "a leg serves nobody"
            );
            assert!(
                part.is_over() || part.sim.deadline_ns != u64::MAX,
                "nothing will ever wake this session"
            );
            assert!(
                part.sim.orphan.is_none() || part.is_over() || part.sim.leg.is_some(),
                "an orphan without a leg does not end"
            );
            let has_seat = part.sim.orphan.is_none() && !part.sim.held().is_empty();
            part.sim
                .line
                .check(has_seat, part.is_over() || part.session.is_idle());
            for (slot, is_active) in part.sim.held() {
                let (held, active) = &mut want[usize::from(slot.0)];
                *held += 1;
                *active += u32::from(is_active);
            }
        }
        for (n, (held, active)) in want.into_iter().enumerate() {
            let load = self.books.load(Slot(n as u16));
            assert_eq!(load.in_flight, held, "E1: guards held for worker {n}");
            assert_eq!(load.active, active, "E1: guards active for worker {n}");
        }
    }

    // Events. Each does what a core would.

    fn client_bytes(&mut self, count: usize) {
        let to = (self.at + count.max(1)).min(self.wire.len());
        let piece = self.wire[self.at..to].to_vec();
        self.at = to;
        self.event(0, "client bytes", |session, sim| {
            session.on_client_bytes(sim, piece)
        });
    }

    fn client_end(&mut self) {
        self.client_ended = true;
        self.event(0, "client end", |session, sim| session.on_client_end(sim));
    }

    fn client_gone(&mut self) {
        (self.client_ended, self.was_gone) = (true, true);
        self.event(0, "client gone", |session, sim| session.on_client_gone(sim));
        assert_eq!(self.parts[0].sim.closed, Some(Closed::Aborted));
    }

    fn connected(&mut self, part: usize) {
        let leg = self.parts[part].sim.leg.as_mut().expect("a leg");
        leg.is_connecting = false;
        self.event(part, "connected", |session, sim| session.on_connected(sim));
    }

    fn sent(&mut self, part: usize) {
        let sim = &mut self.parts[part].sim;
        let leg = sim.leg.as_mut().expect("a leg");
        let message = leg.message.take().expect("a message");
        let is_sure = !leg.is_broken;
        sim.got_request(is_sure);
        self.event(part, "sent", |session, sim| {
            session.on_request_sent(sim, message)
        });
    }

    fn worker_bytes(&mut self, part: usize, count: usize) {
        let sim = &mut self.parts[part].sim;
        let leg = sim.leg.as_mut().expect("a leg");
        let to = (leg.replied + count.max(1)).min(leg.until());
        let piece = leg.reply.as_ref().expect("a reply").wire[leg.replied..to].to_vec();
        leg.replied = to;
        self.event(part, &format!("worker bytes to {to}"), |session, sim| {
            session.on_worker_bytes(sim, piece)
        });
    }

    fn worker_end(&mut self, part: usize, failed: bool) {
        self.parts[part].sim.leg.as_mut().expect("a leg").is_over = true;
        self.event(
            part,
            if failed { "worker reset" } else { "worker end" },
            |session, sim| session.on_worker_end(sim, failed),
        );
    }

    /// A request that waits is let in.
    fn turn(&mut self, part: usize) {
        let permit = self.parts[part].sim.line.turn();
        self.event(part, "turn", |session, sim| session.on_turn(sim, permit));
    }

    fn deadline(&mut self, part: usize) {
        let sim = &mut self.parts[part].sim;
        self.now_ns = self.now_ns.max(sim.deadline_ns);
        sim.deadline_ns = u64::MAX;
        self.event(part, "deadline", |session, sim| session.on_deadline(sim));
    }

    fn drain(&mut self) {
        self.is_draining = true;
        for part in 0..self.parts.len() {
            if !self.parts[part].is_over() {
                self.event(part, "drain", |session, sim| session.on_drain(sim));
            }
        }
    }

    /// Out of the fleet, the same life.
    fn eject(&mut self, slot: Slot) {
        self.trace.push(format!("eject {}", slot.0));
        Rc::make_mut(&mut self.fleet)[usize::from(slot.0)] = None;
    }

    /// Back in the fleet, in a new life if it was closed.
    fn return_all(&mut self) {
        self.trace.push("return".into());
        for n in 0..usize::from(WORKER_COUNT) {
            if self.fleet[n].is_some() {
                continue;
            }
            let mut ids = self.ids.borrow_mut();
            if let Some(id) = self.books.open(Slot(n as u16)) {
                ids[n] = id;
            }
            // Closed, and not free as long as something is in flight.
            if let Some(guard) = LoadGuard::acquire(self.books, ids[n], 0) {
                drop(guard);
                Rc::make_mut(&mut self.fleet)[n] = Some(place(ids[n]));
            }
        }
    }

    fn restart(&mut self, slot: Slot) {
        self.eject(slot);
        self.books.close(self.ids.borrow()[usize::from(slot.0)]);
        self.return_all();
    }

    // ---- the end ----

    fn check_end(&self) {
        let ledger = self.ledger.borrow();
        assert_eq!(self.books.underflow_count(), 0);
        let (mut stale, mut orphans) = (0, 0);
        for (n, handover) in ledger
            .handovers
            .iter()
            .enumerate()
            .filter(|(_, h)| h.is_consumed)
        {
            let has = !handover.sent.is_empty();
            match handover.fates[..] {
                [] => assert!(has, "P2: hand-over {n} was forgotten"),
                [Fate::Stale] => stale += 1,
                [Fate::Orphan, Fate::Released | Fate::Lost] => orphans += 1,
                ref other => panic!("P2: hand-over {n} ended as {other:?}"),
            }
        }
        let ended = ledger.counted("Released") + ledger.counted("Lost");
        assert_eq!(
            ledger.counted("Orphan"),
            ended,
            "P2: orphans are released or lost"
        );
        assert_eq!(
            (ledger.counted("Orphan"), ledger.counted("Stale")),
            (orphans + stale, stale),
            "P2: all are counted"
        );
        drop(ledger);
        let answers = self.answers();
        assert!(answers.len() <= self.asks.len(), "one answer a request");
        for (n, answer) in answers.iter().enumerate() {
            self.check_answer(n, answer);
        }
        let sim = &self.parts[0].sim;
        if sim.closed == Some(Closed::Finished) && answers.last().is_none_or(|a| a.is_whole) {
            let mut ends = 0;
            let whole = self.asks.iter().take_while(|ask| {
                ends += ask.wire.len();
                ends <= self.at
            });
            let closes = answers
                .last()
                .is_some_and(|a| a.until_close || field(&a.head, "connection").contains(&"close"));
            assert!(
                answers.len() >= whole.count() || closes || self.is_draining,
                "a request was not answered"
            );
        }
    }

    fn answers(&self) -> Vec<Message> {
        let sim = &self.parts[0].sim;
        let mut bytes = &sim.out[..];
        let mut answers: Vec<Message> = Vec::new();
        while !bytes.is_empty() {
            let is_interim = bytes.starts_with(b"HTTP/1.1 1");
            let Some((mut message, len)) = read_message(bytes, is_interim, true) else {
                panic!(
                    "half a head for the client: {:?}",
                    String::from_utf8_lossy(bytes)
                );
            };
            bytes = &bytes[len..];
            if is_interim {
                continue;
            }
            message.is_whole |= message.until_close && sim.closed == Some(Closed::Finished);
            assert!(message.is_whole || bytes.is_empty());
            answers.push(message);
        }
        answers
    }

    fn check_answer(&self, n: usize, answer: &Message) {
        *self
            .ledger
            .borrow_mut()
            .statuses
            .entry(status(answer))
            .or_default() += 1;
        let asked = &self.asks[n];
        let sim = &self.parts[0].sim;
        let Some(leg) = field(&answer.head, "x-leg").first().copied() else {
            let error: Value =
                serde_json::from_slice(&answer.body).expect("an error of the router is JSON");
            let error = &error["error"];
            assert!(
                error["message"].is_string() && error["type"].is_string(),
                "of OpenAI's shape: {error}"
            );
            assert_ne!(status(answer), 200);
            if error["code"] == json!("prefill_failed") {
                let last = sim.told.iter().rfind(|told| told.ask == n);
                let is_prefills = last.is_some_and(|told| told.role == Role::Prefill);
                assert!(is_prefills, "prefill is blamed for what decode answered");
            }
            return;
        };
        let told = sim
            .told
            .iter()
            .find(|told| told.leg.to_string() == leg)
            .expect("a worker's answer");
        assert_eq!(told.ask, n, "E3: another request's answer");
        let is_prefills = told.role == Role::Prefill && asked.way == Way::TwoLegs;
        assert!(
            !is_prefills || status(answer) >= 300,
            "a prefill worker's answer is no answer for a client"
        );
        assert_eq!(
            status(answer),
            told.reply.status,
            "the status is the worker's"
        );
        assert_ne!((told.role, asked.way), (Role::Prefill, Way::DecodeAlone));
        let ids = field(&answer.head, "x-request-id");
        if asked.way != Way::PrefillAlone {
            let id = asked.id.as_ref().map_or(format!("made-{n}"), |id| {
                id.trim_end_matches('-').replace("own-", "own")
            });
            assert_eq!(
                ids.iter()
                    .map(|i| i.replace(['/', '-'], ""))
                    .collect::<Vec<_>>(),
                vec![id.replace('-', "")],
                "the client's own id comes back, once"
            );
        }
        if answer.is_whole {
            assert!(!told.reply.is_broken, "an answer that broke came out whole");
            if told.reply.until_close && told.replied < told.reply.wire.len() {
                assert!(
                    told.has_ended && told.replied >= told.reply.head_bytes,
                    "ended by its connection"
                );
            } else {
                assert_eq!(
                    String::from_utf8_lossy(&answer.body),
                    String::from_utf8_lossy(&told.reply.body),
                    "the content is the worker's, its usage prefill's"
                );
            }
        } else if !told.reply.is_broken {
            // A stream of events that breaks off says so in a last one.
            let said = memchr::memmem::find(&answer.body, b"\n\ndata: {\"error\":");
            let content = &answer.body[..said.unwrap_or(answer.body.len())];
            assert!(
                told.reply.body.starts_with(content),
                "not the start of the worker's content: {:?}",
                String::from_utf8_lossy(content)
            );
        }
        if is_prefills && status(answer) < 500 {
            // The decode legs there were belong to hand-overs that had failed before.
            let last = sim
                .told
                .iter()
                .rfind(|other| other.ask == n)
                .map(|told| told.leg);
            assert_eq!(
                last,
                Some(told.leg),
                "decode began after prefill refused the request"
            );
        }
    }
}

impl Leg {
    fn until(&self) -> usize {
        let len = self.reply.as_ref().map_or(0, |reply| reply.wire.len());
        self.script
            .cut
            .map_or(len, |(at, _)| len * at.min(1000) / 1000)
    }

    fn may_speak(&self) -> bool {
        (self.has_request || self.script.is_early)
            && !self.is_connecting
            && !self.is_over
            && !self.is_broken
    }

    /// How its connection ends once all is said.
    fn end(&self) -> Option<bool> {
        match (self.script.cut, &self.reply) {
            (Some((_, end)), _) => end,
            (None, Some(reply)) if reply.closes || reply.is_broken => Some(false),
            _ => None,
        }
    }
}

// ---- what may happen ----

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    ClientBytes,
    ClientEnd,
    ClientGone,
    Connected(usize),
    ConnectFailed(usize),
    Sent(usize),
    WorkerBytes(usize),
    WorkerEnd(usize, bool),
    Deadline(usize),
    Drain,
    Eject(Slot),
    Restart(Slot),
    Return,
    Jump,
    Turn(usize),
}

impl Play {
    /// What workers and the ring can do now, in an order that a lucky core would see.
    fn possible(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for n in 0..self.parts.len() {
            let sim = &mut self.parts[n].sim;
            if sim.line.is_waiting {
                events.push(Event::Turn(n));
            }
            if sim
                .leg
                .as_ref()
                .is_some_and(|leg| leg.may_speak() && leg.reply.is_none())
            {
                sim.make_reply();
            }
            let Some(leg) = &sim.leg else { continue };
            if leg.is_connecting {
                match leg.script.dialing {
                    Dialing::Fails => events.push(Event::ConnectFailed(n)),
                    Dialing::Hangs => {}
                    _ => events.push(Event::Connected(n)),
                }
                continue;
            }
            if leg.may_speak() && leg.replied < leg.until() {
                events.push(Event::WorkerBytes(n));
            } else if let Some(failed) = leg.end().filter(|_| leg.may_speak()) {
                events.push(Event::WorkerEnd(n, failed));
            }
            if leg.message.is_some() {
                events.push(Event::Sent(n));
            }
        }
        events
    }

    fn first_deadline(&self) -> Option<Event> {
        let open = (0..self.parts.len()).filter(|n| !self.parts[*n].is_over());
        open.min_by_key(|n| self.parts[*n].sim.deadline_ns)
            .map(Event::Deadline)
    }

    fn perform(&mut self, event: Event, piece: usize) {
        match event {
            Event::ClientBytes => self.client_bytes(piece),
            Event::ClientEnd => self.client_end(),
            Event::ClientGone => self.client_gone(),
            Event::Connected(part) => self.connected(part),
            Event::ConnectFailed(part) => self.worker_end(part, true),
            Event::Sent(part) => self.sent(part),
            Event::WorkerBytes(part) => {
                let most = self.parts[part]
                    .sim
                    .leg
                    .as_ref()
                    .map_or(1, |leg| leg.script.piece);
                self.worker_bytes(part, most.min(piece));
            }
            Event::WorkerEnd(part, failed) => self.worker_end(part, failed),
            Event::Deadline(part) => self.deadline(part),
            Event::Drain => self.drain(),
            Event::Turn(part) => self.turn(part),
            Event::Eject(slot) => self.eject(slot),
            Event::Restart(slot) => self.restart(slot),
            Event::Return => self.return_all(),
            Event::Jump => self.now_ns += (AGE_MAX_SECS + 1) * SECOND_NS,
        }
    }

    /// Plays to the end in the lucky order, with one disturbance before that step; how many steps there were.
    fn play(&mut self, disturbance: Option<(usize, Disturbance)>) -> usize {
        for step in 0..2000 {
            if let Some((at, what)) = disturbance
                && at == step
            {
                self.disturb(what);
            }
            if self.is_over() {
                return step;
            }
            let mut events = self.possible();
            let sim = &self.parts[0].sim;
            if self.at < self.wire.len()
                && sim.is_reading
                && sim.closed.is_none()
                && !self.client_ended
            {
                events.insert(0, Event::ClientBytes);
            }
            let event = events
                .first()
                .copied()
                .or_else(|| self.first_deadline())
                .expect("something can happen");
            self.perform(event, usize::MAX / 2);
        }
        panic!("the connection never ends");
    }

    fn disturb(&mut self, what: Disturbance) {
        let is_open = self.parts[0].sim.closed.is_none();
        match what {
            Disturbance::Gone if is_open => self.client_gone(),
            Disturbance::HalfClose if is_open && !self.client_ended => self.client_end(),
            Disturbance::Gone | Disturbance::HalfClose => {}
            Disturbance::PrefillRestarts => (0..PREFILL_COUNT).for_each(|n| self.restart(Slot(n))),
            Disturbance::PrefillGoes => (0..PREFILL_COUNT).for_each(|n| self.eject(Slot(n))),
            Disturbance::DecodeGoes => {
                let leg = self
                    .parts
                    .iter()
                    .rev()
                    .find_map(|part| part.sim.leg.as_ref().map(|leg| leg.slot));
                let reserved = self.parts[0].sim.reserved;
                let slots = leg
                    .into_iter()
                    .chain(reserved)
                    .filter(|slot| role_of(*slot) == Role::Decode);
                slots
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|slot| self.eject(slot));
            }
            Disturbance::Jump => self.perform(Event::Jump, 0),
            Disturbance::Drain => self.drain(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Gone,
    HalfClose,
    PrefillRestarts,
    PrefillGoes,
    DecodeGoes,
    Jump,
    Drain,
}

const DISTURBANCES: [Disturbance; 7] = [
    Disturbance::Gone,
    Disturbance::HalfClose,
    Disturbance::PrefillRestarts,
    Disturbance::PrefillGoes,
    Disturbance::DecodeGoes,
    Disturbance::Jump,
    Disturbance::Drain,
];

/// What the plays of a test met, together.
#[derive(Default)]
struct Tally {
    plays: usize,
    events: HashMap<String, usize>,
    statuses: HashMap<u16, usize>,
    retries: usize,
    resends: usize,
}

impl Tally {
    fn add(&mut self, play: &Play) {
        let ledger = play.ledger.borrow();
        self.plays += 1;
        for (event, count) in &ledger.events {
            *self.events.entry(event.clone()).or_default() += count;
        }
        for (status, count) in &ledger.statuses {
            *self.statuses.entry(*status).or_default() += count;
        }
        self.retries += ledger.retries;
        self.resends += ledger.resends;
    }

    fn show(&self) {
        println!(
            "{} plays, {} retries, {} resends",
            self.plays, self.retries, self.resends
        );
        println!("{:?}\n{:?}", self.events, self.statuses);
    }
}

/// One play, alone and with every disturbance at every step.
fn at_every_step(tally: &mut Tally, config: &Rc<Config>, kind: usize, lists: [&[Script]; 3]) {
    let one = |disturbance: Option<(usize, Disturbance)>, tally: &mut Tally| {
        let [prefill, decode, release] = lists.map(|list| list.iter().copied().collect());
        let scripts = Scripts {
            prefill,
            decode,
            release,
            random: None,
        };
        // A second request, pipelined, shows that what follows is not harmed.
        let asks = vec![ask(0, kind), ask(1, CHAT)];
        let seed = disturbance.map_or(0, |(at, _)| at as u64);
        let mut play = Play::new(seed, config, asks, scripts, Odds::default());
        play.name = format!("ask {kind}, {disturbance:?}, {lists:?}");
        let steps = play.play(disturbance);
        play.check_end();
        tally.add(&play);
        steps
    };
    let steps = one(None, tally);
    for at in 0..steps.min(30) {
        for disturbance in DISTURBANCES {
            one(Some((at, disturbance)), tally);
        }
    }
}

#[test]
fn every_cancel_point_times_every_failure_of_prefill_times_streaming_or_not() {
    let mut tally = Tally::default();
    for flags in [&[][..], &["--pd-missing-transfer", "decode"]] {
        let config = config(flags);
        for script in scripts() {
            for kind in [CHAT, CHAT_STREAM] {
                at_every_step(&mut tally, &config, kind, [&[script], &[], &[]]);
                // All of them do it.
                at_every_step(&mut tally, &config, kind, [&[script; 4], &[], &[]]);
            }
        }
    }
    tally.show();
}

#[test]
fn every_cancel_point_times_every_failure_of_decode_times_streaming_or_not() {
    let mut tally = Tally::default();
    let config = config(&[]);
    for script in scripts() {
        for kind in [CHAT, CHAT_STREAM] {
            at_every_step(&mut tally, &config, kind, [&[], &[script], &[]]);
            at_every_step(&mut tally, &config, kind, [&[], &[script; 4], &[]]);
            // The second round does not get through either.
            at_every_step(
                &mut tally,
                &config,
                kind,
                [&[GOOD, of_kind(Kind::Status(400))], &[script], &[]],
            );
            at_every_step(
                &mut tally,
                &config,
                kind,
                [
                    &[
                        GOOD,
                        of_dialing(Dialing::Refused),
                        of_dialing(Dialing::Fails),
                        of_kind(Kind::Status(503)),
                    ],
                    &[script],
                    &[],
                ],
            );
        }
    }
    tally.show();
    for event in ["Handover", "Stale", "Orphan", "Released", "UsageFixed"] {
        assert!(tally.events.contains_key(event), "no play led to {event}");
    }
}

#[test]
fn every_failure_of_a_release_ends_it_and_loses_nothing_uncounted() {
    let mut tally = Tally::default();
    let config = config(&[]);
    for script in scripts() {
        for first in [of_dialing(Dialing::Hangs), GOOD] {
            at_every_step(&mut tally, &config, CHAT_STREAM, [&[], &[first], &[script]]);
            at_every_step(&mut tally, &config, CHAT, [&[], &[first], &[script; 4]]);
            let then_refused = [
                script,
                of_dialing(Dialing::Fails),
                of_dialing(Dialing::Reused),
            ];
            at_every_step(&mut tally, &config, CHAT, [&[], &[first], &then_refused]);
        }
    }
    tally.show();
    assert!(tally.events["Lost"] > 100 && tally.events["Released"] > 100);
}

// ---- schedules ----

fn random_play(seed: u64, configs: &[Rc<Config>]) -> Play {
    let mut rng = Rng(seed);
    let count = 1 + rng.below(3) as usize;
    let list = (0..count).map(|tag| {
        ask(
            tag,
            match rng.below(3) {
                0 => rng.below(KIND_COUNT as u64) as usize,
                _ => rng.below(4) as usize,
            },
        )
    });
    let list = list.collect();
    let config = &configs[rng.below(configs.len() as u64) as usize];
    let odds = Odds {
        no_seat: rng.below(3) * 4,
        queued: rng.below(3) * 10,
        full: rng.below(3) * 10,
        held: 10,
        missing_bytes: rng.below(2) * 200,
    };
    let scripts = Scripts {
        random: Some(Rng(rng.next())),
        ..Scripts::default()
    };
    let mut play = Play::new(seed, config, list, scripts, odds);
    let mut steps = 0;
    while !play.is_over() {
        steps += 1;
        assert!(steps < 20_000, "the connection never ends");
        let mut events = Vec::new();
        for event in play.possible() {
            events.extend([event; 4]);
        }
        let sim = &play.parts[0].sim;
        let is_open = sim.closed.is_none();
        if is_open && !play.client_ended {
            if play.at < play.wire.len() && sim.is_reading {
                events.extend([Event::ClientBytes; 4]);
            }
            if rng.below(40) == 0 {
                events.push(Event::ClientEnd);
            }
        }
        if is_open && (!play.client_ended || sim.is_watched) && rng.below(20) == 0 {
            events.push(Event::ClientGone);
        }
        let slot = Slot(rng.below(u64::from(WORKER_COUNT)) as u16);
        match rng.below(60) {
            0 => events.push(Event::Eject(slot)),
            1 => events.push(Event::Restart(slot)),
            2..4 => events.push(Event::Return),
            4..6 => events.push(Event::Jump),
            6 if !play.is_draining && rng.below(8) == 0 => events.push(Event::Drain),
            _ => {}
        }
        // Where something is broken or cut off at any time.
        for (n, part) in play.parts.iter().enumerate() {
            let Some(leg) = part
                .sim
                .leg
                .as_ref()
                .filter(|leg| !leg.is_over && !leg.is_broken)
            else {
                continue;
            };
            match rng.below(60) {
                0 => events.push(Event::WorkerEnd(n, true)),
                1 if !leg.is_connecting => events.push(Event::WorkerEnd(n, false)),
                _ => {}
            }
        }
        let is_rare = rng.below(50) == 0;
        if (events.is_empty() || is_rare)
            && let Some(event) = play.first_deadline()
        {
            events.push(event);
        }
        let event = events[rng.below(events.len() as u64) as usize];
        let piece = if rng.below(2) == 0 {
            usize::MAX / 2
        } else {
            1 << rng.below(9)
        };
        play.perform(event, piece);
    }
    play.check_end();
    play
}

fn schedule_configs() -> [Rc<Config>; 5] {
    [
        config(&[]),
        config(&["--pd-missing-transfer", "decode"]),
        config(&["--pd-skip-prefill-below", "60"]),
        config(&["--disable-retries"]),
        config(&["--retry-max-retries", "1"]),
    ]
}

/// One schedule, for `.fuzz`: its bytes take the place of the generator.
#[cfg(fuzzing)]
pub fn schedule() {
    thread_local!(static CONFIGS: [Rc<Config>; 5] = schedule_configs());
    CONFIGS.with(|configs| random_play(0, configs));
}

#[test]
fn no_schedule_of_events_breaks_an_invariant() {
    let base = seed();
    let cases: u64 = std::env::var("CASES")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20_000);
    let configs = schedule_configs();
    let mut tally = Tally::default();
    for n in 0..cases {
        tally.add(&random_play(base.wrapping_add(n), &configs));
    }
    tally.show();
    if cases >= 5_000 {
        for event in [
            "Request",
            "Whole",
            "Skipped",
            "MissingTransfer",
            "Handover",
            "Stale",
            "Orphan",
            "Released",
            "Lost",
            "UsageFixed",
        ] {
            assert!(
                tally.events.get(event).is_some_and(|n| *n > 10),
                "hardly a schedule led to {event}"
            );
        }
        for status in [200, 302, 400, 404, 429, 500, 501, 502, 503, 504] {
            assert!(
                tally.statuses.contains_key(&status),
                "no schedule led to a {status}"
            );
        }
        assert!(tally.retries > 1000 && tally.resends > 100);
    }
}
