//! Which session a request belongs to: the key of the policies that keep sessions together. Runs on the core that has the
//! request, only under such a policy.
//!
//! The first of these that is there and not empty:
//!
//! | where | name | source |
//! |---|---|---|
//! | header | `x-session-id`, `x-user-id`, `x-tenant-id`, `x-correlation-id`, `x-request-id`, `x-trace-id` | vllm-router 0.1.17, in its order |
//! | header | `x-claude-code-session-id`, with `x-claude-code-agent-id` if it is there | Claude Code |
//! | header | `session-id` and `thread-id`, together or one of them | Codex |
//! | body | `prompt_cache_key` | OpenAI's API |
//! | body | `session_params.session_id`, `user` | vllm-router, in its order |
//! | body | `vllm_xargs.agentic_context`: `program_id`, else `session_id` and `agent_id`, else `task_id` | vllm-router's programs |
//! | body | `session_id`, `user_id` | vllm-router, in its order |
//!
//! Only the value counts, not where it stood: a client that names its session in a header on one path and in the body on
//! another meets one worker. (vllm-router hashes the name with it.) Body fields are read as JSON, strings and numbers, so a
//! word in the prompt is never a key (vllm-router searches the text). Two parts are joined by `/`.
//!
//! Only fields that the client sent count. The request id that the router makes for a request without one would be a new
//! session for each.

use std::borrow::Cow;

use xxhash_rust::xxh3::Xxh3;

use super::key::KeySeed;
use super::scan::{self, Field, Fields};

/// vllm-router's names, in its order.
const HEADERS: [&str; 6] = [
    "x-session-id",
    "x-user-id",
    "x-tenant-id",
    "x-correlation-id",
    "x-request-id",
    "x-trace-id",
];
const CLAUDE_SESSION: usize = HEADERS.len();
const CLAUDE_AGENT: usize = CLAUDE_SESSION + 1;
const CODEX_SESSION: usize = CLAUDE_AGENT + 1;
const CODEX_THREAD: usize = CODEX_SESSION + 1;
const NAME_COUNT: usize = CODEX_THREAD + 1;

/// The hash of the request's session. `None`: it names none; never a constant.
///
/// `head`: the fields that the client sent, each as `name: value CRLF`. `body`: with its fields, where it was scanned.
pub fn session_hash(seed: KeySeed, head: &[u8], body: Option<(&[u8], &Fields)>) -> Option<u64> {
    let in_head = of_head(head).map(|session| session.hash(seed));
    in_head.or_else(|| of_body(body?.0, body?.1).map(|session| session.hash(seed)))
}

/// The hash of a session that somebody names by its value, two parts joined by `/`: that of its requests.
pub fn session_hash_of(seed: KeySeed, name: &str) -> u64 {
    Session(name.as_bytes().into(), None).hash(seed)
}

/// One part or two.
#[derive(Debug, PartialEq, Eq)]
struct Session<'a>(Cow<'a, [u8]>, Option<Cow<'a, [u8]>>);

impl<'a> Session<'a> {
    fn of(one: Option<Cow<'a, [u8]>>, other: Option<Cow<'a, [u8]>>) -> Option<Session<'a>> {
        match (one, other) {
            (Some(one), other) => Some(Session(one, other)),
            (None, Some(other)) => Some(Session(other, None)),
            (None, None) => None,
        }
    }

    fn hash(&self, KeySeed(seed): KeySeed) -> u64 {
        let mut hasher = Xxh3::with_seed(seed);
        hasher.update(&self.0);
        if let Some(other) = &self.1 {
            hasher.update(b"/");
            hasher.update(other);
        }
        hasher.digest()
    }
}

/// The place of a header's name among those that are looked for. By length first: nearly every field is told apart by it.
fn place_of(name: &[u8]) -> Option<usize> {
    let is = |text: &str| name.eq_ignore_ascii_case(text.as_bytes());
    let of = |place: usize| is(HEADERS[place]).then_some(place);
    match name.len() {
        9 if is("thread-id") => Some(CODEX_THREAD),
        9 => of(1),
        10 if is("session-id") => Some(CODEX_SESSION),
        10 => of(5),
        11 => of(2),
        12 => of(0).or_else(|| of(4)),
        16 => of(3),
        22 => is("x-claude-code-agent-id").then_some(CLAUDE_AGENT),
        24 => is("x-claude-code-session-id").then_some(CLAUDE_SESSION),
        _ => None,
    }
}

fn of_head(head: &[u8]) -> Option<Session<'_>> {
    let mut found: [Option<&[u8]>; NAME_COUNT] = [None; NAME_COUNT];
    let mut rest = head;
    while let Some(end) = memchr::memchr(b'\n', rest) {
        let (line, after) = (&rest[..end], &rest[end + 1..]);
        rest = after;
        let Some(colon) = memchr::memchr(b':', line) else {
            continue;
        };
        if let Some(place) = place_of(&line[..colon])
            && found[place].is_none()
        {
            let value = line[colon + 1..].trim_ascii();
            found[place] = (!value.is_empty()).then_some(value);
        }
    }
    let part = |place: usize| found[place].map(Cow::Borrowed);
    let single = (0..HEADERS.len()).find_map(part);
    let single = single.map(|value| Session(value, None));
    // An agent without a session is no session of its own: its id may be the same in all of them.
    single
        .or_else(|| Some(Session(part(CLAUDE_SESSION)?, part(CLAUDE_AGENT))))
        .or_else(|| Session::of(part(CODEX_SESSION), part(CODEX_THREAD)))
}

fn of_body<'b>(body: &'b [u8], fields: &Fields) -> Option<Session<'b>> {
    let single = |field| Some(Session(text(body, field)?, None));
    single(fields.prompt_cache_key)
        .or_else(|| single(member(body, fields.session, b"session_id")))
        .or_else(|| single(fields.user))
        .or_else(|| of_program(body, fields.vllm_xargs))
        .or_else(|| single(fields.session_id))
        .or_else(|| single(fields.user_id))
}

/// `agentic_context` may be an object, or, as vLLM takes nothing nested in `vllm_xargs`, its text.
fn of_program(body: &[u8], vllm_xargs: Option<Field>) -> Option<Session<'_>> {
    let context = member(body, vllm_xargs, b"agentic_context")?;
    if context.raw(body).first() == Some(&b'{') {
        return program(body, context);
    }
    match text(body, Some(context))? {
        Cow::Borrowed(whole) => of_context_text(whole),
        Cow::Owned(whole) => of_context_text(&whole).map(|Session(one, other)| {
            Session(
                one.into_owned().into(),
                other.map(|part| part.into_owned().into()),
            )
        }),
    }
}

fn of_context_text(whole: &[u8]) -> Option<Session<'_>> {
    // It was never scanned, and must be JSON before its members mean anything.
    let end = whole.len();
    match scan::scan(whole) {
        Ok(_) => program(whole, Field { start: 0, end }),
        Err(_) => Some(Session(whole.into(), None)),
    }
}

fn program(body: &[u8], context: Field) -> Option<Session<'_>> {
    let mut parts: [Option<Field>; 4] = [None; 4];
    let _ = scan::members(body, context.start, |name, found| {
        let place = match name {
            b"program_id" => 0,
            b"session_id" => 1,
            b"agent_id" => 2,
            b"task_id" => 3,
            _ => return,
        };
        parts[place] = Some(found.value);
    });
    let part = |place: usize| text(body, parts[place]);
    let single = |place| Some(Session(part(place)?, None));
    single(0)
        .or_else(|| Some(Session(part(1)?, part(2))))
        .or_else(|| single(3))
}

/// A member of a field that is an object; the last one of that name, as everywhere.
fn member(body: &[u8], object: Option<Field>, wanted: &[u8]) -> Option<Field> {
    let mut last = None;
    let _ = scan::members(body, object?.start, |name, found| {
        if name == wanted {
            last = Some(found.value);
        }
    });
    last
}

/// A string that is not empty, or a number as it is written.
fn text(body: &[u8], field: Option<Field>) -> Option<Cow<'_, [u8]>> {
    let raw = field?.raw(body);
    match raw.first()? {
        b'-' | b'0'..=b'9' => Some(raw.into()),
        b'"' => match scan::as_str(body, field)? {
            Cow::Borrowed("") => None,
            Cow::Borrowed(text) => Some(text.as_bytes().into()),
            Cow::Owned(text) => Some(text.into_bytes().into()),
        },
        _ => None,
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
