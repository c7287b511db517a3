//! What is asked: the same prompt but for its begin, conversations that grow, or a trace. Pure.
//!
//! Text is made of numbers: the same name gives the same text, of which a longer one begins with the shorter one, so that what
//! shares a prefix in a trace shares it here.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use memchr::memmem;

use super::check::Want;
use super::target::Target;
use crate::route::Rng;
use crate::sim::content::{Content, mix};
use crate::sim::workload::Workload;

/// Which endpoint is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Api {
    /// `/v1/chat/completions`
    #[default]
    Chat,
    /// `/v1/completions`
    Completions,
}

/// What all requests of a run have in common.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The endpoint.
    pub api: Api,
    /// The model asked for.
    pub model: String,
    /// Answers are streams of events.
    pub is_stream: bool,
    /// Bytes of a prompt, or of what a turn adds to it; the system prompt is not in it.
    pub prompt_bytes: usize,
    /// Bytes of a system prompt that all share.
    pub system_bytes: usize,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// An event may hold several tokens.
    pub coalesces_events: bool,
    /// Further fields, each a whole line with its end.
    pub fields: String,
    /// Of texts.
    pub seed: u64,
}

/// What prompts are like.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Each its own.
    Single,
    /// Conversations of so many turns, so many at a time.
    Conversations {
        /// Requests of each.
        turns: u32,
        /// How many run; more in an open loop when all of them wait for an answer.
        count: usize,
    },
    /// Those of a file.
    Trace(Arc<Workload>),
}

/// Bytes that a token of a trace, or of an answer that is made up, stands for.
const TOKEN_BYTES: usize = 4;
/// Digits that make a prompt its own.
const NUMBER_BYTES: usize = 16;

/// The requests of one thread, to one target.
pub struct Work {
    shape: Arc<Shape>,
    target: Target,
    /// This thread is so much of so many.
    part: (usize, usize),
    asked: u64,
    source: Source,
}

enum Source {
    Single {
        template: Vec<u8>,
        number_at: usize,
    },
    Conversations {
        turns: u32,
        count: usize,
        alive: usize,
        idle: VecDeque<Conversation>,
    },
    Trace {
        workload: Arc<Workload>,
        due: BinaryHeap<Reverse<(u64, usize, usize)>>,
    },
}

/// A conversation and how far it is.
#[derive(Debug)]
pub struct Conversation {
    name: u64,
    turn: u32,
    /// As it stands in the request.
    said: Vec<u8>,
}

/// What a request belongs to; given back when its answer is there.
#[derive(Debug)]
pub enum Ticket {
    /// Nothing.
    Single,
    /// A conversation.
    Conversation(Conversation),
    /// A session of the trace, and its turn.
    Trace(usize, usize),
}

impl Work {
    /// `part`: this thread's number, and how many share the work.
    pub fn new(shape: Arc<Shape>, kind: &Kind, target: &Target, part: (usize, usize)) -> Work {
        let source = match kind {
            Kind::Single => template(&shape, target),
            Kind::Conversations { turns, count } => Source::Conversations {
                turns: *turns,
                count: (*count / part.1 + usize::from(part.0 < *count % part.1)).max(1),
                alive: 0,
                idle: VecDeque::new(),
            },
            Kind::Trace(workload) => Source::Trace {
                workload: workload.clone(),
                due: BinaryHeap::new(),
            },
        };
        Work {
            shape,
            target: target.clone(),
            part,
            asked: 0,
            source,
        }
    }

    /// A slice begins: a trace begins anew, all else goes on.
    pub fn restart(&mut self) {
        let (at, of) = self.part;
        if let Source::Trace { workload, due } = &mut self.source {
            let mine = workload
                .sessions
                .iter()
                .enumerate()
                .filter(|(i, _)| i % of == at);
            let first = |(i, session): (usize, &crate::sim::workload::Session)| {
                let pause = session.turns.first()?.pause;
                Some(Reverse((session.start + pause, i, 0)))
            };
            *due = mine.filter_map(first).collect();
        }
    }

    /// When the next request of a trace is due, ns from the slice's begin; `None`: there is no trace, or none is left now.
    pub fn due_ns(&self) -> Option<u64> {
        match &self.source {
            Source::Trace { due, .. } => due.peek().map(|Reverse((at, ..))| *at),
            _ => None,
        }
    }

    /// Writes the next request into `buffer`, which has the last one of the same connection. What it belongs to, and what its
    /// answer has to be.
    pub fn write(&mut self, buffer: &mut Vec<u8>) -> (Ticket, Want) {
        self.asked += 1;
        let number = mix(
            self.shape.seed,
            self.asked * self.part.1 as u64 + self.part.0 as u64,
        );
        let mut tokens = self.shape.output_tokens;
        let shape = self.shape.clone();
        let ticket = match &mut self.source {
            Source::Single {
                template,
                number_at,
            } => {
                if buffer.len() != template.len() {
                    buffer.clear();
                    buffer.extend_from_slice(template);
                }
                write_number(&mut buffer[*number_at..*number_at + NUMBER_BYTES], number);
                Ticket::Single
            }
            Source::Conversations {
                count, alive, idle, ..
            } => {
                let old = if *alive < *count {
                    None
                } else {
                    idle.pop_front()
                };
                let mut conversation = old.unwrap_or_else(|| {
                    *alive += 1;
                    Conversation {
                        name: number,
                        turn: 0,
                        said: Vec::new(),
                    }
                });
                let name = mix(conversation.name, u64::from(conversation.turn));
                shape.open_part(&mut conversation.said, "user");
                push_text(&mut conversation.said, name, shape.prompt_bytes);
                shape.close_part(&mut conversation.said);
                put(
                    &shape,
                    &self.target,
                    buffer,
                    &conversation.said,
                    tokens,
                    Some(conversation.name),
                );
                Ticket::Conversation(conversation)
            }
            Source::Trace { workload, due } => {
                let (_, session, turn) = due.pop().map_or((0, 0, 0), |Reverse(it)| it);
                let workload = workload.clone();
                let it = &workload.sessions[session];
                tokens = it.turns[turn].output_tokens;
                let mut said = Vec::new();
                shape.open_part(&mut said, "user");
                push_content(&mut said, &it.turns[turn].content);
                shape.close_part(&mut said);
                put(&shape, &self.target, buffer, &said, tokens, Some(it.name));
                Ticket::Trace(session, turn)
            }
        };
        (ticket, shape.want(tokens))
    }

    /// The answer is there, or there will be none.
    pub fn give_back(&mut self, ticket: Ticket, is_good: bool, now_ns: u64) {
        match (ticket, &mut self.source) {
            (
                Ticket::Conversation(mut it),
                Source::Conversations {
                    turns, alive, idle, ..
                },
            ) => {
                it.turn += 1;
                if !is_good || it.turn >= *turns {
                    *alive -= 1;
                    return;
                }
                let shape = &self.shape;
                shape.open_part(&mut it.said, "assistant");
                let name = mix(it.name, !u64::from(it.turn));
                push_text(
                    &mut it.said,
                    name,
                    shape.output_tokens as usize * TOKEN_BYTES,
                );
                shape.close_part(&mut it.said);
                idle.push_back(it);
            }
            (Ticket::Trace(session, turn), Source::Trace { workload, due }) => {
                if let Some(next) = workload.sessions[session]
                    .turns
                    .get(turn + 1)
                    .filter(|_| is_good)
                {
                    due.push(Reverse((now_ns + next.pause, session, turn + 1)));
                }
            }
            _ => {}
        }
    }
}

impl Shape {
    fn open_part(&self, out: &mut Vec<u8>, role: &str) {
        if self.api == Api::Chat {
            out.extend_from_slice(format!(",{{\"role\":\"{role}\",\"content\":\"").as_bytes());
        }
    }

    fn close_part(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(match self.api {
            Api::Chat => b"\"}",
            Api::Completions => b"\\n",
        });
    }

    /// What the answer of so many tokens has to be. vLLM streams an event for each token, and in a chat one before them that
    /// names the role.
    fn want(&self, tokens: u32) -> Want {
        let before = u32::from(self.api == Api::Chat);
        Want {
            is_stream: self.is_stream,
            events: (!self.coalesces_events).then_some(tokens + before),
            tokens,
        }
    }
}

fn template(shape: &Shape, target: &Target) -> Source {
    let mut said = Vec::new();
    shape.open_part(&mut said, "user");
    let in_said = said.len();
    said.resize(in_said + NUMBER_BYTES, b'0');
    push_text(
        &mut said,
        shape.seed,
        shape.prompt_bytes.saturating_sub(NUMBER_BYTES),
    );
    shape.close_part(&mut said);
    let mut template = Vec::new();
    put(
        shape,
        target,
        &mut template,
        &said,
        shape.output_tokens,
        None,
    );
    let zeros = &said[in_said..in_said + NUMBER_BYTES];
    let number_at = memmem::rfind(&template, zeros).unwrap_or(0);
    Source::Single {
        template,
        number_at,
    }
}

/// Writes head and body. `said`: parts, each of which begins with a comma in a chat.
fn put(
    shape: &Shape,
    target: &Target,
    out: &mut Vec<u8>,
    said: &[u8],
    tokens: u32,
    session: Option<u64>,
) {
    let (path, open, close) = match shape.api {
        Api::Chat => ("/v1/chat/completions", "\"messages\":[", "]"),
        Api::Completions => ("/v1/completions", "\"prompt\":\"", "\""),
    };
    let stream = if shape.is_stream {
        ",\"stream\":true"
    } else {
        ""
    };
    let model = serde_json::Value::from(shape.model.as_str());
    let begin = format!("{{\"model\":{model},{open}");
    let end = format!("{close}{stream},\"max_tokens\":{tokens},\"ignore_eos\":true}}");
    let mut system = Vec::new();
    if shape.system_bytes > 0 {
        shape.open_part(&mut system, "system");
        push_text(&mut system, mix(shape.seed, 0), shape.system_bytes);
        shape.close_part(&mut system);
    }
    // None before the first one.
    let bare = |part: &[u8]| usize::from(part.starts_with(b","));
    let (system, said) = match system.is_empty() {
        true => (&system[..], &said[bare(said)..]),
        false => (&system[bare(&system)..], said),
    };
    let session = session.map_or(String::new(), |name| {
        format!("x-session-id: {name:016x}\r\n")
    });
    let head = format!(
        "POST {}{path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n{session}{}Content-Length: {}\r\n\r\n",
        target.prefix,
        target.host,
        shape.fields,
        begin.len() + system.len() + said.len() + end.len()
    );
    out.clear();
    for part in [
        head.as_bytes(),
        begin.as_bytes(),
        system,
        said,
        end.as_bytes(),
    ] {
        out.extend_from_slice(part);
    }
}

fn write_number(out: &mut [u8], number: u64) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (at, digit) in out.iter_mut().enumerate() {
        *digit = DIGITS[(number >> (60 - 4 * at)) as usize & 15];
    }
}

fn push_content(out: &mut Vec<u8>, content: &Content) {
    let mut from = 0;
    for run in content.runs() {
        push_text(out, run.name, (run.end - from) as usize * TOKEN_BYTES);
        from = run.end;
    }
}

/// Words of nothing.
fn push_text(out: &mut Vec<u8>, name: u64, bytes: usize) {
    const LETTERS: &[u8; 32] = b"etaoinshrdlucmfwypvbgkjqxz etaio";
    let end = out.len() + bytes;
    let mut rng = Rng::new(name);
    while out.len() < end {
        let mut bits = rng.next();
        let mut piece = [0; 12];
        for letter in &mut piece {
            *letter = LETTERS[bits as usize & 31];
            bits >>= 5;
        }
        out.extend_from_slice(&piece[..piece.len().min(end - out.len())]);
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
