//! What can befall a worker of the simulated fleet, and what a worker says and does: for the fault matrix.

use corelane::control::health::Failure;
use corelane::route::Role;

use super::common::Rng;
use super::common::naive::chunked;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Refused,
    /// Connections neither come about nor fail.
    BlackHole,
    ResetEarly,
    ResetInHead,
    ResetInBody,
    /// A clean end in the middle of a body.
    EndInBody,
    /// No first byte.
    Hang,
    /// Streams stop in the middle.
    Silent,
    Status500,
    Status502,
    Status503,
    /// 503 with Retry-After.
    Paused503,
    Status429,
    BadHead,
    BadChunk,
    /// Ten times slower.
    Slow,
    /// Kept-alive connections are closed as soon as they are idle.
    IdleClosed,
    /// The process is gone; at the end there is another one.
    Killed,
    /// Every worker is ten times slower: nobody's fault.
    AllSlow,
    /// Every worker is silent, and goes on at the end.
    AllSilent,
}

impl Kind {
    /// Those of one worker.
    pub const OF_ONE: [Kind; 18] = [
        Kind::Refused,
        Kind::BlackHole,
        Kind::ResetEarly,
        Kind::ResetInHead,
        Kind::ResetInBody,
        Kind::EndInBody,
        Kind::Hang,
        Kind::Silent,
        Kind::Status500,
        Kind::Status502,
        Kind::Status503,
        Kind::Paused503,
        Kind::Status429,
        Kind::BadHead,
        Kind::BadChunk,
        Kind::Slow,
        Kind::IdleClosed,
        Kind::Killed,
    ];

    /// An answer that has begun may break off.
    pub fn may_cut(self) -> bool {
        matches!(
            self,
            Kind::ResetEarly
                | Kind::ResetInHead
                | Kind::ResetInBody
                | Kind::EndInBody
                | Kind::Hang
                | Kind::Silent
                | Kind::BadChunk
                | Kind::Killed
        )
    }

    /// The code of the one refusal that a client may see: all else is covered by another worker.
    pub fn refusal(self, is_pd: bool) -> Option<&'static str> {
        match self {
            // Malformed is not tried again: the request might be what makes it so.
            Kind::BadHead => Some("bad_answer"),
            // A held answer that stops for good: time limits are not tried again, except in the prefill leg.
            Kind::Silent if is_pd => Some("worker_timeout"),
            _ => None,
        }
    }

    /// It befalls all.
    pub fn is_of_all(self) -> bool {
        matches!(self, Kind::AllSlow | Kind::AllSilent)
    }

    /// Nothing may be held against the worker: it is alive and well, only full, or it may close what is idle.
    pub fn is_innocent(self) -> bool {
        matches!(
            self,
            Kind::Status503
                | Kind::Paused503
                | Kind::Status429
                | Kind::IdleClosed
                | Kind::AllSlow
                | Kind::AllSilent
        )
    }

    /// What breaks connections at once when it begins.
    pub fn breaks(self) -> bool {
        matches!(
            self,
            Kind::ResetEarly | Kind::ResetInHead | Kind::ResetInBody
        )
    }

    /// What probes see of it, where they can see anything.
    pub fn probe(self, sees: bool) -> Result<(), Failure> {
        match self {
            Kind::Refused | Kind::Killed => Err(Failure::Refused),
            Kind::BlackHole => Err(Failure::Timeout),
            _ if !sees => Ok(()),
            Kind::Hang | Kind::Silent => Err(Failure::Timeout),
            Kind::ResetEarly | Kind::ResetInHead => Err(Failure::Reset),
            Kind::Status500 => Err(Failure::Status(500)),
            Kind::Status502 => Err(Failure::Status(502)),
            Kind::BadHead => Err(Failure::Malformed),
            _ => Ok(()),
        }
    }
}

/// What a request of the victim's is doing when the fault begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// None runs on the connection.
    Idle,
    Connecting,
    /// The ring has not let go of the request yet.
    Sending,
    Waiting,
    /// Half the answer's head is here.
    Head,
    Body,
    /// The prefill leg is done, the decode leg has not reached its worker: the victim is either's.
    BetweenLegs,
}

impl Phase {
    pub const PLAIN: [Phase; 6] = [
        Phase::Idle,
        Phase::Connecting,
        Phase::Sending,
        Phase::Waiting,
        Phase::Head,
        Phase::Body,
    ];
    pub const PD: [Phase; 7] = [
        Phase::Idle,
        Phase::Connecting,
        Phase::Sending,
        Phase::Waiting,
        Phase::Head,
        Phase::Body,
        Phase::BetweenLegs,
    ];
}

/// An answer as its worker sends it.
#[derive(Clone, Debug, Default)]
pub struct Script {
    pub wire: Vec<u8>,
    pub head_bytes: usize,
    pub is_chunked: bool,
    /// How far it has been sent.
    pub sent: usize,
    /// Ends of the pieces it leaves in.
    pub ends: Vec<usize>,
    /// Pause before the first piece, and between others, ms.
    pub first_ms: u64,
    pub gap_ms: u64,
    /// The fault leaves it alone, or has had its share.
    pub is_spared: bool,
}

impl Script {
    /// Where the next piece ends.
    pub fn next_end(&self) -> usize {
        let ahead = self.ends.iter().copied().find(|end| *end > self.sent);
        ahead.unwrap_or(self.wire.len())
    }

    pub fn is_done(&self) -> bool {
        self.sent == self.wire.len()
    }

    fn new(head: &str, mut body: Vec<u8>, mut ends: Vec<usize>, rng: &mut Rng) -> Script {
        let mut wire = head.as_bytes().to_vec();
        ends.iter_mut().for_each(|end| *end += head.len());
        match rng.below(3) {
            0 => ends.insert(0, head.len()),
            1 => ends
                .splice(0..0, [head.len() / 2, head.len()])
                .for_each(drop),
            _ => {}
        }
        wire.append(&mut body);
        ends.push(wire.len());
        Script {
            head_bytes: head.len(),
            is_chunked: head.contains("chunked"),
            wire,
            ends,
            ..Script::default()
        }
    }

    /// Of an error.
    pub fn of_status(status: u16, fields: &str, rng: &mut Rng) -> Script {
        let body = format!("{{\"error\":{{\"message\":\"worker\",\"code\":{status}}}}}");
        let head = format!(
            "HTTP/1.1 {status} X\r\n{fields}Content-Length: {}\r\n\r\n",
            body.len()
        );
        Script::new(&head, body.into_bytes(), Vec::new(), rng)
    }

    /// Whose second chunk is none.
    pub fn of_bad_chunk(said: &Said<'_>, rng: &mut Rng) -> Script {
        let head = head_of(said.streams, "Transfer-Encoding: chunked\r\n");
        let mut body = chunked(event(said, 0).as_bytes(), &[1000], "");
        body.truncate(body.len() - 5);
        let end = body.len();
        body.extend_from_slice(b"ZZ\r\n");
        Script::new(&head, body, vec![end], rng)
    }

    /// As it should be.
    pub fn good(said: &Said<'_>, rng: &mut Rng) -> Script {
        let mut script = match (said.role, said.streams) {
            (Role::Prefill, _) => Script::one_piece(prefill_text(said), false, rng),
            (_, false) => Script::one_piece(whole_text(said), rng.below(2) == 0, rng),
            (_, true) => Script::stream(said, rng),
        };
        script.first_ms = match (said.role, said.streams) {
            (Role::Decode, true) => 2 + rng.below(8),
            (_, true) | (Role::Prefill, _) => 10 + rng.below(50),
            (_, false) => 30 + rng.below(170),
        };
        script.gap_ms = 8 + rng.below(30);
        script
    }

    fn one_piece(text: String, is_chunked: bool, rng: &mut Rng) -> Script {
        let (framing, body) = if is_chunked {
            let body = chunked(text.as_bytes(), &[20, 70], "");
            ("Transfer-Encoding: chunked\r\n".to_string(), body)
        } else {
            let framing = format!("Content-Length: {}\r\n", text.len());
            (framing, text.into_bytes())
        };
        Script::new(&head_of(false, &framing), body, Vec::new(), rng)
    }

    fn stream(said: &Said<'_>, rng: &mut Rng) -> Script {
        let (mut body, mut ends) = (Vec::new(), Vec::new());
        let mut push = |text: &str| {
            body.extend_from_slice(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes());
            ends.push(body.len());
        };
        for n in 0..said.count {
            push(&event(said, n));
        }
        push(&format!("data: {{\"choices\":[],{}}}\n\n", usage_text()));
        push("data: [DONE]\n\n");
        if rng.below(2) == 0 {
            ends.pop(); // The end comes with the last event.
        }
        body.extend_from_slice(b"0\r\n\r\n");
        Script::new(
            &head_of(true, "Transfer-Encoding: chunked\r\n"),
            body,
            ends,
            rng,
        )
    }
}

/// What an answer says: whose it is, and that it is whole.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    pub tag: &'a str,
    pub leg: usize,
    pub role: Role,
    pub streams: bool,
    /// Events of a stream.
    pub count: usize,
    /// Of a prefill answer: its blocks.
    pub blocks: usize,
}

pub fn mime(streams: bool) -> &'static str {
    match streams {
        true => "text/event-stream",
        false => "application/json",
    }
}

fn head_of(streams: bool, framing: &str) -> String {
    let mime = mime(streams);
    format!("HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\n{framing}\r\n")
}

fn usage_text() -> &'static str {
    "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12}"
}

fn event(said: &Said<'_>, n: usize) -> String {
    format!(
        "data: {{\"tag\":\"{}\",\"leg\":{},\"n\":{n},\"of\":{}}}\n\n",
        said.tag, said.leg, said.count
    )
}

fn whole_text(said: &Said<'_>) -> String {
    format!(
        "{{\"tag\":\"{}\",\"leg\":{},\"text\":\"{}\",{}}}",
        said.tag,
        said.leg,
        "x".repeat(60),
        usage_text()
    )
}

fn prefill_text(said: &Said<'_>) -> String {
    format!(
        "{{\"id\":\"x\",{},\"kv_transfer_params\":{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_engine_id\":\"e\",\"remote_block_ids\":[{}]}}}}",
        usage_text(),
        said.blocks
    )
}

/// The leg that a client's content names; panics if it is not what that leg said to that request, or not all of it
/// although it `is_whole`.
pub fn check_content(content: &[u8], tag: &str, streams: bool, is_whole: bool) -> Option<usize> {
    let text = std::str::from_utf8(content).expect("answers are text");
    let leg = match streams {
        true => check_events(text, tag, is_whole),
        false => text
            .split("\"leg\":")
            .nth(1)
            .and_then(|rest| rest.split(',').next()?.parse().ok()),
    };
    if !streams && is_whole {
        let json: serde_json::Value =
            serde_json::from_str(text).unwrap_or_else(|e| panic!("whole, but {e}: {text}"));
        assert_eq!(json["tag"], tag, "another request's answer");
        assert_eq!(json["text"].as_str().map(str::len), Some(60), "{text}");
    }
    leg
}

fn check_events(text: &str, tag: &str, is_whole: bool) -> Option<usize> {
    let (mut leg, mut next, mut of, mut is_done) = (None, 0, None, false);
    for event in text.split("\n\n").filter(|event| !event.is_empty()) {
        let Ok(json) = serde_json::from_str::<serde_json::Value>(
            event.strip_prefix("data: ").unwrap_or("").trim(),
        ) else {
            is_done |= event == "data: [DONE]";
            assert!(is_done || !is_whole, "a clean end after {event:?}");
            continue;
        };
        if json.get("error").is_some() {
            assert!(!is_whole, "an error, and a clean end: {text}");
            continue;
        }
        let Some(n) = json["n"].as_u64() else {
            continue; // Usage.
        };
        assert_eq!(json["tag"], tag, "another request's answer");
        assert_eq!(n, next, "events in their order, none missing: {text}");
        let its = json["leg"].as_u64();
        assert!(leg.is_none() || leg == its, "two answers mixed: {text}");
        (leg, next, of) = (its, n + 1, json["of"].as_u64());
    }
    if is_whole {
        assert!(
            is_done && Some(next) == of,
            "a clean end, and content missing: {text}"
        );
    }
    leg.map(|leg| leg as usize)
}
