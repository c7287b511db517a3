//! Whether an answer is right: status, framing, JSON or events, their count, `[DONE]`, and nothing after it. Pure.
//!
//! An answer is right when it is what the same request gets from the engine itself. What is wrong is named, so that wrong answers
//! are counted by kind; the first fault of an answer is its kind.

use memchr::{memchr, memmem};

use crate::http::response::parse_head;
use crate::http::{Body, Progress};

/// What of a plain answer, or of a refusal, is looked at.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// What an answer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// A stream of events; else JSON.
    pub is_stream: bool,
    /// Events before `[DONE]`; `None`: any number of them but none.
    pub events: Option<u32>,
    /// `usage.completion_tokens` of a plain answer.
    pub tokens: u32,
}

/// What is wrong with an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// No connection could be made (errno).
    Connect(i32),
    /// No end in time.
    TimedOut,
    /// The connection ended before the answer did.
    Closed,
    /// Head or chunks are broken, or bytes came that nobody asked for.
    Framing(&'static str),
    /// Another status than 200.
    Status(u16),
    /// 200, and neither JSON nor events as asked for.
    Content,
    /// `usage` does not say that as many tokens were made as were asked for.
    Tokens,
    /// More or fewer events.
    EventCount,
    /// The stream has no `[DONE]`.
    NoDone,
    /// Events after `[DONE]`.
    AfterDone,
    /// An event that says that something failed.
    ErrorEvent,
}

impl Wrong {
    /// Under which it is counted.
    pub fn kind(&self) -> String {
        let kind = match self {
            Wrong::Connect(_) => "connect",
            Wrong::TimedOut => "timed_out",
            Wrong::Closed => "closed_early",
            Wrong::Framing(_) => "framing",
            Wrong::Status(status) => return format!("status_{status}"),
            Wrong::Content => "content",
            Wrong::Tokens => "token_count",
            Wrong::EventCount => "event_count",
            Wrong::NoDone => "no_done",
            Wrong::AfterDone => "after_done",
            Wrong::ErrorEvent => "error_event",
        };
        kind.to_owned()
    }
}

/// What a piece of an answer brought.
#[derive(Debug, Default)]
pub struct Fed {
    /// Events that are complete now, `[DONE]` not counted.
    pub events: u32,
    /// The answer is complete.
    pub end: Option<Result<(), Wrong>>,
}

#[derive(Debug)]
enum Stage {
    Head,
    Body(Body),
    Over,
}

/// Follows one answer.
#[derive(Debug)]
pub struct Check {
    want: Want,
    stage: Stage,
    /// A head that came in pieces.
    head: Vec<u8>,
    status: u16,
    keep_alive: bool,
    is_event_stream: bool,
    /// Of what is no stream.
    text: Vec<u8>,
    lines: Lines,
}

impl Check {
    /// Of nothing yet.
    pub fn new(want: Want) -> Check {
        Check {
            want,
            stage: Stage::Head,
            head: Vec::new(),
            status: 0,
            keep_alive: true,
            is_event_stream: false,
            text: Vec::new(),
            lines: Lines::default(),
        }
    }

    /// Begins anew; buffers are kept.
    pub fn reset(&mut self, want: Want) {
        self.head.clear();
        self.text.clear();
        self.want = want;
        self.stage = Stage::Head;
        self.lines = Lines::default();
    }

    /// Whether the connection lives on after a right answer.
    pub fn keep_alive(&self) -> bool {
        self.keep_alive
    }

    /// The begin of what is no stream of events: for a look at what went wrong.
    pub fn text(&self) -> &[u8] {
        &self.text
    }

    /// Takes what came.
    pub fn feed(&mut self, bytes: &[u8]) -> Fed {
        let mut fed = Fed::default();
        match self.take(bytes, &mut fed) {
            Ok(false) => {}
            Ok(true) => {
                self.stage = Stage::Over;
                fed.end = Some(self.verdict());
            }
            Err(wrong) => {
                self.stage = Stage::Over;
                self.keep_alive = false;
                fed.end = Some(Err(wrong));
            }
        }
        fed
    }

    /// The connection has ended.
    pub fn end(&mut self) -> Result<(), Wrong> {
        self.keep_alive = false;
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Body(body) if body.ends_with_connection() => self.verdict(),
            _ => Err(Wrong::Closed),
        }
    }

    /// `true`: that was all of it.
    fn take(&mut self, bytes: &[u8], fed: &mut Fed) -> Result<bool, Wrong> {
        match &mut self.stage {
            Stage::Over => Err(Wrong::Framing("bytes after the end")),
            Stage::Body(_) => self.take_body(bytes, fed),
            Stage::Head if self.head.is_empty() => match self.take_head(bytes)? {
                Some(len) => self.take_rest(&bytes[len..], fed),
                None => {
                    self.head.extend_from_slice(bytes);
                    Ok(false)
                }
            },
            Stage::Head => {
                let mut head = std::mem::take(&mut self.head);
                head.extend_from_slice(bytes);
                let taken = self.take_head(&head)?;
                let over = match taken {
                    Some(len) => self.take_rest(&head[len..], fed)?,
                    None => false,
                };
                if taken.is_some() {
                    head.clear();
                }
                self.head = head;
                Ok(over)
            }
        }
    }

    /// Length of the heads (interim ones among them), when the last one is complete.
    fn take_head(&mut self, bytes: &[u8]) -> Result<Option<usize>, Wrong> {
        let mut from = 0;
        loop {
            let parsed = parse_head(&bytes[from..], false).map_err(|e| Wrong::Framing(e.0))?;
            let Some(response) = parsed else {
                return Ok(None);
            };
            from += response.len_bytes;
            if response.status >= 200 {
                self.status = response.status;
                self.keep_alive = response.keep_alive;
                self.is_event_stream = response.is_event_stream;
                self.stage = Stage::Body(Body::new(response.framing));
                return Ok(Some(from));
            }
        }
    }

    fn take_rest(&mut self, bytes: &[u8], fed: &mut Fed) -> Result<bool, Wrong> {
        match &self.stage {
            Stage::Body(body) if bytes.is_empty() => Ok(body.is_done()),
            _ => self.take_body(bytes, fed),
        }
    }

    fn take_body(&mut self, bytes: &[u8], fed: &mut Fed) -> Result<bool, Wrong> {
        let Stage::Body(body) = &mut self.stage else {
            return Ok(true);
        };
        let is_read = self.want.is_stream && self.status == 200 && self.is_event_stream;
        let (lines, text) = (&mut self.lines, &mut self.text);
        let before = lines.events;
        let Progress { consumed, done } = body
            .feed(bytes, |data| {
                if is_read {
                    lines.feed(data);
                } else {
                    let room = TEXT_BYTES_MAX.saturating_sub(text.len());
                    text.extend_from_slice(&data[..data.len().min(room)]);
                }
            })
            .map_err(|_| Wrong::Framing("the chunks are broken"))?;
        fed.events = self.lines.events - before;
        if done && consumed < bytes.len() {
            return Err(Wrong::Framing("bytes after the end"));
        }
        Ok(done)
    }

    fn verdict(&self) -> Result<(), Wrong> {
        if self.status != 200 {
            return Err(Wrong::Status(self.status));
        }
        if self.want.is_stream != self.is_event_stream {
            return Err(Wrong::Content);
        }
        if self.want.is_stream {
            return self.lines.verdict(self.want.events);
        }
        let text = self.text.trim_ascii();
        if !(text.starts_with(b"{") && text.ends_with(b"}")) {
            return Err(Wrong::Content);
        }
        match completion_tokens(text) {
            Some(count) if count == self.want.tokens => Ok(()),
            _ => Err(Wrong::Tokens),
        }
    }
}

/// `usage.completion_tokens`, found without reading all of the JSON: a generator has no time for that.
fn completion_tokens(text: &[u8]) -> Option<u32> {
    const NAME: &[u8] = b"\"completion_tokens\"";
    let rest = text[memmem::rfind(text, NAME)? + NAME.len()..].trim_ascii_start();
    let digits = rest.strip_prefix(b":")?.trim_ascii_start();
    let len = digits.iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&digits[..len]).ok()?.parse().ok()
}

/// Lines of a stream of events (WHATWG HTML 9.2), in whatever pieces; of each no more than its begin is kept.
#[derive(Clone, Copy, Debug, Default)]
struct Lines {
    begin: [u8; 16],
    /// Length of the line so far.
    length: usize,
    /// The event that is being read has data; it is `[DONE]`; it says that something failed.
    has_data: bool,
    is_done: bool,
    is_error: bool,
    /// Events so far.
    events: u32,
    done_seen: bool,
    after_done: bool,
    error_seen: bool,
}

impl Lines {
    fn feed(&mut self, mut data: &[u8]) {
        while let Some(end) = memchr(b'\n', data) {
            self.take(&data[..end]);
            self.end_line();
            data = &data[end + 1..];
        }
        self.take(data);
    }

    fn take(&mut self, piece: &[u8]) {
        if self.length < self.begin.len() {
            let count = piece.len().min(self.begin.len() - self.length);
            self.begin[self.length..self.length + count].copy_from_slice(&piece[..count]);
        }
        self.length += piece.len();
    }

    fn end_line(&mut self) {
        let line = &self.begin[..self.length.min(self.begin.len())];
        if line.is_empty() || (self.length == 1 && line == b"\r") {
            self.end_event();
        } else if let Some(value) = line.strip_prefix(b"data:") {
            self.has_data = true;
            let value = value.strip_prefix(b" ").unwrap_or(value);
            self.is_done |= value.starts_with(b"[DONE]");
            self.is_error |= value.starts_with(b"{\"error\"");
        } else if line.starts_with(b"event: error") || line.starts_with(b"event:error") {
            self.is_error = true;
        }
        self.length = 0;
    }

    fn end_event(&mut self) {
        if self.has_data {
            self.after_done |= self.done_seen;
            self.error_seen |= self.is_error;
            if self.is_done {
                self.done_seen = true;
            } else {
                self.events += 1;
            }
        }
        (self.has_data, self.is_done, self.is_error) = (false, false, false);
    }

    fn verdict(&self, events: Option<u32>) -> Result<(), Wrong> {
        if self.error_seen {
            Err(Wrong::ErrorEvent)
        } else if !self.done_seen {
            Err(Wrong::NoDone)
        } else if self.after_done || self.has_data || self.length > 0 {
            Err(Wrong::AfterDone)
        } else if events.map_or(self.events == 0, |count| count != self.events) {
            Err(Wrong::EventCount)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
