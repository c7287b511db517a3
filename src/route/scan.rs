//! One pass over a JSON body: is it JSON, and where are the top-level fields the router cares about? Runs on the core
//! that has the request; builds no tree and allocates only for names and strings that are written with escapes.
//!
//! The whole body is validated, because the router is the last place where a broken one costs nothing: what passes
//! here is what Python's `json.loads` takes (every vLLM worker parses with it or with something stricter), so a body
//! refused here would have been refused there. The rules are those of RFC 8259 except where `json.loads` is wider:
//! - `NaN`, `Infinity` and `-Infinity` are values;
//! - a lone surrogate (`"\ud800"`) is a character;
//! - of two fields of the same name the last one counts.
//!
//! Narrower than either: UTF-8 only, no byte order mark (RFC 8259 section 8.1), at most [`DEPTH_MAX`] levels.
//!
//! Speed comes from strings, which are nearly all of a chat body: they are skipped by blocks of 16 bytes in a loop
//! that the compiler turns into vector compares. UTF-8 needs no pass of its own while every byte is ASCII.

use std::borrow::Cow;

/// Deepest nesting of objects and arrays that is accepted, the body's own object included.
pub const DEPTH_MAX: usize = 1024;

/// Where a raw value stands in the body: bytes `start..end`, without white space around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// First byte of the value.
    pub start: usize,
    /// One past its last byte.
    pub end: usize,
}

impl Field {
    /// The raw bytes of the value. Empty when `body` is not the one that was scanned.
    pub fn raw(self, body: &[u8]) -> &[u8] {
        body.get(self.start..self.end).unwrap_or_default()
    }
}

/// The top-level fields that matter, as raw values. `null` is a value here: who reads a field decides what it means.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the JSON name it stands for")]
pub struct Fields {
    pub model: Option<Field>,
    pub messages: Option<Field>,
    pub prompt: Option<Field>,
    pub input: Option<Field>,
    pub text: Option<Field>,
    pub input_ids: Option<Field>,
    pub token_ids: Option<Field>,
    pub tools: Option<Field>,
    pub system: Option<Field>,
    pub instructions: Option<Field>,
    pub cache_salt: Option<Field>,
    /// `lora_path`, `lora_name` or `adapter`; `null` does not hide a name that another of them gave.
    pub lora: Option<Field>,
    pub stream: Option<Field>,
    pub max_tokens: Option<Field>,
    pub max_completion_tokens: Option<Field>,
    pub user: Option<Field>,
    pub prompt_cache_key: Option<Field>,
    /// `session_params`.
    pub session: Option<Field>,
    pub session_id: Option<Field>,
    pub user_id: Option<Field>,
    pub vllm_xargs: Option<Field>,
    pub documents: Option<Field>,
    pub query: Option<Field>,
}

impl Fields {
    fn record(&mut self, body: &[u8], name: &[u8], field: Field) {
        let place = match name {
            b"model" => &mut self.model,
            b"messages" => &mut self.messages,
            b"prompt" => &mut self.prompt,
            b"input" => &mut self.input,
            b"text" => &mut self.text,
            b"input_ids" => &mut self.input_ids,
            b"token_ids" => &mut self.token_ids,
            b"tools" => &mut self.tools,
            b"system" => &mut self.system,
            b"instructions" => &mut self.instructions,
            b"cache_salt" => &mut self.cache_salt,
            b"lora_path" | b"lora_name" | b"adapter" => {
                if self.lora.is_some() && field.raw(body) == b"null" {
                    return;
                }
                &mut self.lora
            }
            b"stream" => &mut self.stream,
            b"max_tokens" => &mut self.max_tokens,
            b"max_completion_tokens" => &mut self.max_completion_tokens,
            b"user" => &mut self.user,
            b"prompt_cache_key" => &mut self.prompt_cache_key,
            b"session_params" => &mut self.session,
            b"session_id" => &mut self.session_id,
            b"user_id" => &mut self.user_id,
            b"vllm_xargs" => &mut self.vllm_xargs,
            b"documents" => &mut self.documents,
            b"query" => &mut self.query,
            _ => return,
        };
        *place = Some(field);
    }
}

/// Why a body was refused. `at` is the offset of the first byte that cannot be there; the body's length when it ends
/// too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanError {
    /// Nothing, or only white space.
    Empty,
    /// JSON, but not an object.
    NotAnObject,
    /// Not JSON.
    Syntax {
        /// Offset in bytes.
        at: usize,
    },
    /// More than [`DEPTH_MAX`] levels.
    TooDeep {
        /// Offset in bytes.
        at: usize,
    },
    /// JSON otherwise, but some string is not UTF-8.
    NotUtf8 {
        /// Offset in bytes.
        at: usize,
    },
}

impl ScanError {
    /// What to tell the client with a 400.
    pub fn message(self) -> String {
        match self {
            ScanError::Empty => "The request body is empty; a JSON object is expected.".to_owned(),
            ScanError::NotAnObject => "The request body is not a JSON object.".to_owned(),
            ScanError::Syntax { at } => {
                format!("The request body is not valid JSON (at byte {at}).")
            }
            ScanError::TooDeep { at } => {
                format!("The request body nests more than {DEPTH_MAX} levels deep (at byte {at}).")
            }
            ScanError::NotUtf8 { at } => {
                format!("The request body is not valid UTF-8 (at byte {at}).")
            }
        }
    }
}

/// Validates a whole body and finds its top-level fields.
///
/// # Errors
/// The first fault by position, except that faults of encoding are found after those of syntax.
pub fn scan(body: &[u8]) -> Result<Fields, ScanError> {
    let mut fields = Fields::default();
    walk(body, |name, member| fields.record(body, name, member.value))?;
    Ok(fields)
}

/// One member of an object. Its name is given beside it, without escapes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// The opening quote of the name.
    pub(super) start: usize,
    /// The value; the member ends where it does.
    pub(super) value: Field,
}

/// Validates a whole body and shows the members of its object, in their order.
///
/// # Errors
/// As [`scan`]. Members may have been shown by then.
pub(super) fn walk(body: &[u8], on_member: impl FnMut(&[u8], Member)) -> Result<(), ScanError> {
    let mut scanner = Scanner::new(body);
    let start = scanner.space(0);
    let (end, is_object) = match scanner.peek(start) {
        None => return Err(ScanError::Empty),
        Some(b'{') => (scanner.object(start, on_member)?, true),
        Some(_) => (scanner.value(start, 0)?, false),
    };
    let end = scanner.space(end);
    if end != body.len() {
        return refuse(end);
    }
    if scanner.bytes_seen & HIGH_BITS != 0 {
        check_utf8(body)?;
    }
    if is_object {
        Ok(())
    } else {
        Err(ScanError::NotAnObject)
    }
}

/// Shows the members of the object that stands at `at`, white space aside, and gives the offset after its end. For what
/// a whole [`walk`] has passed already: it looks at nothing behind the object, and at no encoding.
pub(super) fn members(
    body: &[u8],
    at: usize,
    on_member: impl FnMut(&[u8], Member),
) -> Result<usize, ScanError> {
    let mut scanner = Scanner::new(body);
    let start = scanner.space(at);
    if scanner.peek(start) != Some(b'{') {
        return Err(ScanError::NotAnObject);
    }
    scanner.object(start, on_member)
}

/// The first element of an array, and whether another follows; `None` for an empty array, and for what is none.
pub(super) fn first_element(body: &[u8], array: Field) -> Option<(Field, bool)> {
    let mut scanner = Scanner::new(body);
    let start = scanner.space(scanner.expect(array.start, b'[').ok()?);
    let end = scanner.value(start, 1).ok()?;
    let has_more = scanner.peek(scanner.space(end)) == Some(b',');
    Some((Field { start, end }, has_more))
}

/// Whether the field is there and is the literal `true`.
pub fn is_true(body: &[u8], field: Option<Field>) -> bool {
    field.is_some_and(|field| field.raw(body) == b"true")
}

/// The field as text, if it is a string. Unescapes only what has escapes; a lone surrogate becomes U+FFFD.
pub fn as_str(body: &[u8], field: Option<Field>) -> Option<Cow<'_, str>> {
    let quoted = field?.raw(body);
    let inner = quoted.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let text = simdutf8::basic::from_utf8(inner).ok()?;
    if memchr::memchr(b'\\', inner).is_none() {
        Some(Cow::Borrowed(text))
    } else {
        Some(Cow::Owned(unescape(text)))
    }
}

/// `text` is the inside of a string that was scanned: its escapes are whole.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((plain, escape)) = rest.split_once('\\') {
        out.push_str(plain);
        let mut after = escape.chars();
        match after.next() {
            Some('b') => out.push('\u{8}'),
            Some('f') => out.push('\u{c}'),
            Some('n') => out.push('\n'),
            Some('r') => out.push('\r'),
            Some('t') => out.push('\t'),
            Some('u') => {
                let (character, taken) = unescape_unicode(escape);
                out.push(character);
                rest = escape.get(taken..).unwrap_or_default();
                continue;
            }
            Some(other) => out.push(other),
            None => {}
        }
        rest = after.as_str();
    }
    out.push_str(rest);
    out
}

/// `escape` starts at the `u`. The character, and how many bytes it took; two escapes when they are a surrogate pair.
fn unescape_unicode(escape: &str) -> (char, usize) {
    let unit = |from: usize| {
        escape
            .get(from..from + 4)
            .and_then(|hex| u32::from_str_radix(hex, 16).ok())
    };
    let high = unit(1).unwrap_or(0xfffd);
    if (0xd800..0xdc00).contains(&high)
        && escape.get(5..7) == Some("\\u")
        && let Some(low) = unit(7).filter(|low| (0xdc00..0xe000).contains(low))
    {
        let code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
        return (
            char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER),
            11,
        );
    }
    (
        char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER),
        5,
    )
}

fn check_utf8(body: &[u8]) -> Result<(), ScanError> {
    if simdutf8::basic::from_utf8(body).is_ok() {
        return Ok(());
    }
    // The fast check does not say where; a second, slower one does. Only a faulty body pays for it.
    let at = simdutf8::compat::from_utf8(body).map_or_else(|error| error.valid_up_to(), str::len);
    Err(ScanError::NotUtf8 { at })
}

/// Where in the body the next part starts, or why there is none.
type Next = Result<usize, ScanError>;

#[cold]
fn refuse<T>(at: usize) -> Result<T, ScanError> {
    Err(ScanError::Syntax { at })
}

/// Each part takes the offset it starts at and gives the one after its end. By value, so that it stays in a register:
/// as a field it went through memory with every byte, at several times the cost.
struct Scanner<'b> {
    body: &'b [u8],
    /// All bytes of strings, or-ed, eight lanes: a high bit is set when any is not ASCII. (Outside strings such a byte
    /// is a fault by itself.)
    bytes_seen: u64,
}

impl<'b> Scanner<'b> {
    fn new(body: &'b [u8]) -> Scanner<'b> {
        Scanner {
            body,
            bytes_seen: 0,
        }
    }

    #[inline]
    fn peek(&self, at: usize) -> Option<u8> {
        self.body.get(at).copied()
    }

    #[inline]
    fn expect(&self, at: usize, byte: u8) -> Next {
        if self.peek(at) == Some(byte) {
            Ok(at + 1)
        } else {
            refuse(at)
        }
    }

    #[inline]
    fn space(&self, at: usize) -> usize {
        if self.peek(at).is_some_and(|byte| byte <= b' ') {
            self.long_space(at)
        } else {
            at
        }
    }

    /// Indentation, eight blanks at a time.
    fn long_space(&self, mut at: usize) -> usize {
        loop {
            while let Some(word) = self.body.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
                let blanks = (u64::from_le_bytes(*word) ^ BLANKS).trailing_zeros() as usize / 8;
                at += blanks;
                if blanks < 8 {
                    break;
                }
            }
            if !matches!(self.peek(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
                return at;
            }
            at += 1;
        }
    }

    /// `at` is the `{`. Its level is counted as the body's own.
    fn object(&mut self, at: usize, mut on_member: impl FnMut(&[u8], Member)) -> Next {
        let mut at = self.space(at + 1);
        if self.peek(at) == Some(b'}') {
            return Ok(at + 1);
        }
        loop {
            let name_start = at + 1;
            let after_name = self.string(self.expect(at, b'"')?)?;
            let start = self.colon(after_name)?;
            let value = Field {
                start,
                end: self.value(start, 1)?,
            };
            let member = Member {
                start: name_start - 1,
                value,
            };
            let name = &self.body[name_start..after_name - 1];
            if memchr::memchr(b'\\', name).is_some() {
                // `"mod\u0065l"` is the same name to the worker, so it has to be here too.
                let name = simdutf8::basic::from_utf8(name)
                    .map(unescape)
                    .unwrap_or_default();
                on_member(name.as_bytes(), member);
            } else {
                on_member(name, member);
            }
            at = self.space(value.end);
            match self.peek(at) {
                Some(b',') => at = self.space(at + 1),
                Some(b'}') => return Ok(at + 1),
                _ => return refuse(at),
            }
        }
    }

    /// A name with its colon, up to the value.
    #[inline]
    fn name(&mut self, at: usize) -> Next {
        let after_name = self.string(self.expect(at, b'"')?)?;
        self.colon(after_name)
    }

    #[inline]
    fn colon(&self, at: usize) -> Next {
        Ok(self.space(self.expect(self.space(at), b':')?))
    }

    /// One value of any kind, `depth` levels inside the body. A loop with a stack of bits, not recursion: a body made
    /// of brackets costs its length and nothing else.
    fn value(&mut self, mut at: usize, depth: usize) -> Next {
        let mut open = Nesting::new(depth);
        loop {
            match self.peek(at) {
                Some(b'"') => at = self.string(at + 1)?,
                Some(b'-' | b'0'..=b'9') => {
                    let after = if open.is_in_array() {
                        self.whole_numbers(at)
                    } else {
                        at
                    };
                    if after != at {
                        at = after;
                        continue;
                    }
                    at = self.number(at)?;
                }
                Some(b'{') => {
                    open.push(true).ok_or(ScanError::TooDeep { at })?;
                    at = self.space(at + 1);
                    if self.peek(at) != Some(b'}') {
                        at = self.name(at)?;
                        continue;
                    }
                    at += 1;
                    open.pop();
                }
                Some(b'[') => {
                    open.push(false).ok_or(ScanError::TooDeep { at })?;
                    at = self.space(at + 1);
                    if self.peek(at) != Some(b']') {
                        continue;
                    }
                    at += 1;
                    open.pop();
                }
                _ => at = self.literal(at)?,
            }
            // A value has just ended: close what it ends, up to the comma that says another one follows.
            loop {
                if open.is_empty() {
                    return Ok(at);
                }
                at = self.space(at);
                match (self.peek(at), open.in_object) {
                    (Some(b','), true) => {
                        at = self.name(self.space(at + 1))?;
                        break;
                    }
                    (Some(b','), false) => {
                        at = self.space(at + 1);
                        break;
                    }
                    (Some(b'}'), true) | (Some(b']'), false) => {
                        at += 1;
                        open.pop();
                    }
                    _ => return refuse(at),
                }
            }
        }
    }

    /// The rest of a string, of which the opening quote is before `at`.
    fn string(&mut self, mut at: usize) -> Next {
        let mut seen = 0;
        while let Some(block) = self.body.get(at..).and_then(|rest| rest.first_chunk()) {
            // Bytes after the string's end may slip in: that can cost a check of the encoding, never save a needed one.
            seen |= all_or_ed(block);
            let Some(first) = first_marked(&stops_of(block)) else {
                at += BLOCK_BYTES;
                continue;
            };
            at += first;
            match self.peek(at) {
                Some(b'"') => {
                    self.bytes_seen |= seen;
                    return Ok(at + 1);
                }
                Some(b'\\') => at = self.escape(at + 1)?,
                _ => return refuse(at),
            }
        }
        self.bytes_seen |= seen;
        self.end_of_string(at)
    }

    /// The same, where the body has less than a block left.
    fn end_of_string(&mut self, mut at: usize) -> Next {
        loop {
            match self.peek(at) {
                Some(b'"') => return Ok(at + 1),
                Some(b'\\') => at = self.escape(at + 1)?,
                Some(byte) if !is_stop(byte) => {
                    self.bytes_seen |= u64::from(byte);
                    at += 1;
                }
                _ => return refuse(at),
            }
        }
    }

    /// `at` is after a backslash.
    #[inline]
    fn escape(&self, at: usize) -> Next {
        match self.peek(at) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 1),
            Some(b'u') => {
                let is_hex =
                    |at: &usize| self.peek(*at).is_some_and(|byte| byte.is_ascii_hexdigit());
                (at + 1..at + 5)
                    .find(|at| !is_hex(at))
                    .map_or(Ok(at + 5), refuse)
            }
            _ => refuse(at),
        }
    }

    /// Token ids: skips whole numbers of an array by blocks. `at` is the start of a number; the result is the start of
    /// a value, or the same.
    ///
    /// In `12,345, 6` each byte can be judged by itself and the two before it, so a block is judged in vector
    /// registers, without asking where its numbers begin. What is written otherwise is left to the grammar.
    #[inline]
    fn whole_numbers(&self, start: usize) -> usize {
        let mut at = start;
        while let Some(window) = at
            .checked_sub(2)
            .and_then(|from| self.body.get(from..))
            .and_then(|rest| rest.first_chunk::<{ BLOCK_BYTES + 2 }>())
        {
            if first_marked(&no_part_of_whole_numbers(window)).is_some() {
                break;
            }
            at += BLOCK_BYTES;
        }
        if at == start {
            return start;
        }
        // Inside a number: back to where it begins. After a comma: on to where the next value does.
        while self.body[at - 1].is_ascii_digit() {
            at -= 1;
        }
        self.space(at)
    }

    /// RFC 8259 section 6, and `-Infinity`. Any size and any precision: nothing is computed.
    #[inline]
    fn number(&self, mut at: usize) -> Next {
        if self.peek(at) == Some(b'-') {
            at += 1;
            if self.peek(at) == Some(b'I') {
                return self.word(at, b"Infinity");
            }
        }
        at = if self.peek(at) == Some(b'0') {
            at + 1
        } else {
            self.digits(at)?
        };
        if self.peek(at) == Some(b'.') {
            at = self.digits(at + 1)?;
        }
        if matches!(self.peek(at), Some(b'e' | b'E')) {
            let has_sign = matches!(self.peek(at + 1), Some(b'+' | b'-'));
            at = self.digits(at + 1 + usize::from(has_sign))?;
        }
        Ok(at)
    }

    /// At least one.
    fn digits(&self, start: usize) -> Next {
        let mut at = start;
        while self.peek(at).is_some_and(|byte| byte.is_ascii_digit()) {
            at += 1;
        }
        if at == start { refuse(at) } else { Ok(at) }
    }

    /// The literals of RFC 8259 section 3, and the two that `json.loads` takes beside them.
    fn literal(&self, at: usize) -> Next {
        match self.peek(at) {
            Some(b't') => self.word(at, b"true"),
            Some(b'f') => self.word(at, b"false"),
            Some(b'n') => self.word(at, b"null"),
            Some(b'N') => self.word(at, b"NaN"),
            Some(b'I') => self.word(at, b"Infinity"),
            _ => refuse(at),
        }
    }

    fn word(&self, at: usize, word: &[u8]) -> Next {
        word.iter().try_fold(at, |at, byte| self.expect(at, *byte))
    }
}

/// Which of the open levels are objects: one bit a level.
struct Nesting {
    bits: [u64; DEPTH_MAX / 64],
    floor: usize,
    depth: usize,
    in_object: bool,
}

impl Nesting {
    fn new(floor: usize) -> Nesting {
        Nesting {
            bits: [0; DEPTH_MAX / 64],
            floor,
            depth: floor,
            in_object: false,
        }
    }

    fn is_empty(&self) -> bool {
        self.depth == self.floor
    }

    /// Only there may a comma be followed by the next value; what is around the outermost value is not known here.
    fn is_in_array(&self) -> bool {
        !self.in_object && !self.is_empty()
    }

    /// `None`: that level would be one too many.
    fn push(&mut self, is_object: bool) -> Option<()> {
        let bits = self.bits.get_mut(self.depth / 64)?;
        let bit = 1 << (self.depth % 64);
        if is_object {
            *bits |= bit
        } else {
            *bits &= !bit
        }
        self.depth += 1;
        self.in_object = is_object;
        Some(())
    }

    fn pop(&mut self) {
        self.depth -= 1;
        self.in_object = self.depth > 0 && {
            let outer = self.depth - 1;
            self.bits[outer / 64] & (1 << (outer % 64)) != 0
        };
    }
}

#[inline]
fn is_stop(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < b' ')
}

/// Bytes judged at a time. The loops over a block have no exit inside and leave a byte of 0 or 0xff for each judged:
/// the form that compilers make a handful of vector instructions of, on any machine and without `unsafe`. (Written with
/// `map` or `from_fn` they sometimes became calls, at twice the time.)
const BLOCK_BYTES: usize = 32;

#[inline(always)]
fn stops_of(block: &[u8; BLOCK_BYTES]) -> [u8; BLOCK_BYTES] {
    let mut marks = [0; BLOCK_BYTES];
    for (mark_of, byte) in marks.iter_mut().zip(block) {
        *mark_of = mark(is_stop(*byte));
    }
    marks
}

/// Of all but the first two bytes, each of which is judged by itself and the two before it.
#[inline(always)]
fn no_part_of_whole_numbers(window: &[u8; BLOCK_BYTES + 2]) -> [u8; BLOCK_BYTES] {
    let mut marks = [0; BLOCK_BYTES];
    for (index, mark_of) in marks.iter_mut().enumerate() {
        let [before, last, byte] = [window[index], window[index + 1], window[index + 2]];
        let digit =
            mark(byte.is_ascii_digit()) & (mark(last != b'0') | mark(before.is_ascii_digit()));
        let comma = mark(byte == b',') & mark(last.is_ascii_digit());
        let blank = mark(byte == b' ') & mark(last == b',');
        *mark_of = !(digit | comma | blank);
    }
    marks
}

#[inline]
fn mark(is_marked: bool) -> u8 {
    if is_marked { 0xff } else { 0 }
}

#[inline]
fn words(block: &[u8; BLOCK_BYTES]) -> [u64; BLOCK_BYTES / 8] {
    let (words, _) = block.as_chunks();
    [
        u64::from_le_bytes(words[0]),
        u64::from_le_bytes(words[1]),
        u64::from_le_bytes(words[2]),
        u64::from_le_bytes(words[3]),
    ]
}

/// Eight lanes: the or of the bytes of each.
#[inline]
fn all_or_ed(block: &[u8; BLOCK_BYTES]) -> u64 {
    let [a, b, c, d] = words(block);
    (a | b) | (c | d)
}

#[inline]
fn first_marked(marks: &[u8; BLOCK_BYTES]) -> Option<usize> {
    if all_or_ed(marks) == 0 {
        return None;
    }
    let [a, b, c, d] = words(marks);
    let (word, before) = match (a, b, c) {
        (0, 0, 0) => (d, 24),
        (0, 0, _) => (c, 16),
        (0, ..) => (b, 8),
        _ => (a, 0),
    };
    Some(before + word.trailing_zeros() as usize / 8)
}

const BLANKS: u64 = u64::from_le_bytes([b' '; 8]);
const HIGH_BITS: u64 = u64::from_le_bytes([0x80; 8]);

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
