//! RFC 9112, read slowly: what a strict and simple reader makes of bytes. Nothing here looks ahead, keeps state or is
//! fast; it shares no line with the router.

/// A head, taken apart at its CRLFs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The first line.
    pub line: Vec<u8>,
    /// Names as they came, values without the white space around them.
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes, the empty line included; also of empty lines before the first.
    pub len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Bytes are missing.
    Partial,
    Bad,
}

fn is_token(bytes: &[u8]) -> bool {
    let is_char = |b: &u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(b);
    !bytes.is_empty() && bytes.iter().all(is_char)
}

fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// One head at the start of `bytes`.
pub fn head(bytes: &[u8]) -> Result<Head, Why> {
    let skipped = bytes
        .iter()
        .take_while(|b| matches!(b, b'\r' | b'\n'))
        .count();
    let text = &bytes[skipped..];
    let end = memchr::memmem::find(text, b"\r\n\r\n").ok_or(Why::Partial)?;
    let mut lines = Vec::new();
    let mut rest = &text[..end + 2];
    while let Some(at) = memchr::memmem::find(rest, b"\r\n") {
        lines.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    if lines
        .iter()
        .any(|line| line.iter().any(|b| matches!(b, b'\r' | b'\n')))
    {
        return Err(Why::Bad);
    }
    let mut fields = Vec::new();
    for line in &lines[1..] {
        let colon = line.iter().position(|b| *b == b':').ok_or(Why::Bad)?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        let is_control = |b: &u8| (*b < b' ' && *b != b'\t') || *b == 127;
        if !is_token(name) || value.iter().any(is_control) {
            return Err(Why::Bad);
        }
        fields.push((name.to_vec(), trim(value).to_vec()));
    }
    Ok(Head {
        line: lines[0].to_vec(),
        fields,
        len: skipped + end + 4,
    })
}

impl Head {
    /// Values of a field, in order.
    pub fn all(&self, name: &str) -> Vec<&[u8]> {
        let of_name = |(n, _): &&(Vec<u8>, Vec<u8>)| n.eq_ignore_ascii_case(name.as_bytes());
        self.fields
            .iter()
            .filter(of_name)
            .map(|(_, value)| &value[..])
            .collect()
    }

    /// Whether a comma list, over all fields of that name, has a word.
    pub fn lists(&self, name: &str, word: &[u8]) -> bool {
        let words = self.all(name).into_iter();
        let mut words = words.flat_map(|value| value.split(|b| *b == b','));
        words.any(|w| w.trim_ascii().eq_ignore_ascii_case(word))
    }

    /// Whether a field is for one hop only: by its name, or named by Connection.
    pub fn is_for_one_hop(&self, name: &[u8]) -> bool {
        const NAMES: [&str; 9] = [
            "connection",
            "keep-alive",
            "proxy-connection",
            "proxy-authenticate",
            "proxy-authorization",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
        ];
        let is_listed = NAMES
            .iter()
            .any(|n| name.eq_ignore_ascii_case(n.as_bytes()));
        is_listed || self.lists("connection", name)
    }

    /// Method, target, and whether it is HTTP/1.1; of HTTP/1.0 and 1.1 only.
    pub fn request_line(&self) -> Option<(&[u8], &[u8], bool)> {
        let words: Vec<&[u8]> = self.line.split(|b| *b == b' ').collect();
        let [method, target, version] = words[..] else {
            return None;
        };
        let is_clean = is_token(method)
            && !target.is_empty()
            && !target.iter().any(|b| *b <= b' ' || *b == 127);
        match version {
            b"HTTP/1.1" if is_clean => Some((method, target, true)),
            b"HTTP/1.0" if is_clean => Some((method, target, false)),
            _ => None,
        }
    }

    /// Status, and whether it is HTTP/1.1.
    pub fn status_line(&self) -> Option<(u16, bool)> {
        let is_11 = match self.line.get(..9)? {
            b"HTTP/1.1 " => true,
            b"HTTP/1.0 " => false,
            _ => return None,
        };
        let digits = self.line.get(9..12)?;
        let ends = matches!(self.line.get(12), None | Some(b' '));
        let is_number = digits.iter().all(u8::is_ascii_digit) && ends;
        is_number.then(|| (std::str::from_utf8(digits).unwrap().parse().unwrap(), is_11))
    }

    /// How many bytes follow, `None` if the fields do not agree on it (or nothing may be said so).
    pub fn framing(&self, is_11: bool) -> Option<Framing> {
        let (lengths, codings) = (self.all("content-length"), self.all("transfer-encoding"));
        match (&lengths[..], &codings[..]) {
            ([], []) => Some(Framing::Unsaid),
            ([], [coding]) => {
                (is_11 && coding.eq_ignore_ascii_case(b"chunked")).then_some(Framing::Chunked)
            }
            ([one, others @ ..], []) if others.iter().all(|other| number(other) == number(one)) => {
                number(one).map(Framing::Length)
            }
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    Unsaid,
    Length(u64),
    Chunked,
}

fn number(value: &[u8]) -> Option<u64> {
    let is_plain = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let n: u64 = std::str::from_utf8(value)
        .ok()
        .filter(|_| is_plain)?
        .parse()
        .ok()?;
    (n < 1 << 63).then_some(n)
}

/// The content of a chunked body and its length on the wire; with what had come of it where it is not whole.
pub fn unchunk(wire: &[u8]) -> (Vec<u8>, Result<usize, Why>) {
    let mut content = Vec::new();
    let mut at = 0;
    loop {
        let (size, next) = match size_line(wire, at) {
            Ok(line) => line,
            Err(why) => return (content, Err(why)),
        };
        at = next;
        if size == 0 {
            return (content, trailers(wire, at));
        }
        let there = (wire.len() - at).min(usize::try_from(size).unwrap_or(usize::MAX));
        content.extend_from_slice(&wire[at..at + there]);
        at += there;
        if (there as u64) < size {
            return (content, Err(Why::Partial));
        }
        match (wire.get(at), wire.get(at + 1)) {
            (Some(b'\r'), Some(b'\n')) => at += 2,
            (None, _) | (Some(b'\r'), None) => return (content, Err(Why::Partial)),
            _ => return (content, Err(Why::Bad)),
        }
    }
}

/// Up to the LF of a line that ends in CRLF and has no control byte but TAB; what is there of it otherwise.
fn line_at(wire: &[u8], at: usize) -> (&[u8], Result<usize, Why>) {
    let rest = &wire[at..];
    let is_odd = |b: &u8| (*b < b' ' && *b != b'\t') || *b == 127;
    let Some(end) = rest.iter().position(is_odd) else {
        return (rest, Err(Why::Partial));
    };
    let line = &rest[..end];
    match (rest[end], rest.get(end + 1)) {
        (b'\r', Some(b'\n')) => (line, Ok(at + end + 2)),
        (b'\r', None) => (line, Err(Why::Partial)),
        _ => (line, Err(Why::Bad)),
    }
}

fn size_line(wire: &[u8], at: usize) -> Result<(u64, usize), Why> {
    let (line, end) = line_at(wire, at);
    let digits = line.iter().take_while(|b| b.is_ascii_hexdigit()).count();
    let after = &line[digits..];
    let is_ended = end != Err(Why::Partial) || !after.is_empty();
    let text = std::str::from_utf8(&line[..digits]).unwrap();
    let size = u64::from_str_radix(text.trim_start_matches('0'), 16);
    let size = if text.bytes().all(|b| b == b'0') {
        Ok(0)
    } else {
        size
    };
    if digits > 64
        || size.as_ref().is_err_and(|_| digits > 0)
        || size.as_ref().is_ok_and(|n| *n >= 1 << 60)
    {
        return Err(Why::Bad);
    }
    if digits == 0 && (is_ended || wire.get(at) == Some(&b'\r')) {
        return Err(Why::Bad);
    }
    if !matches!(after.first(), None | Some(b';' | b' ' | b'\t')) {
        return Err(Why::Bad);
    }
    let next = end?;
    // A quoted string ends on its line.
    let (mut is_quoted, mut is_escaped) = (false, false);
    for b in after {
        (is_quoted, is_escaped) = match (is_quoted, is_escaped, b) {
            (true, true, _) => (true, false),
            (true, false, b'\\') => (true, true),
            (quoted, _, b'"') => (!quoted, false),
            (quoted, ..) => (quoted, false),
        };
    }
    if is_quoted {
        Err(Why::Bad)
    } else {
        Ok((size.unwrap_or(0), next))
    }
}

fn trailers(wire: &[u8], mut at: usize) -> Result<usize, Why> {
    loop {
        let (line, end) = line_at(wire, at);
        if matches!(line.first(), Some(b' ' | b'\t' | b':')) {
            return Err(Why::Bad);
        }
        at = end?;
        if line.is_empty() {
            return Ok(at);
        }
    }
}

/// One message of a stream, as far as it has come.
#[derive(Clone, Debug)]
pub struct Message {
    pub head: Head,
    /// Without chunks.
    pub body: Vec<u8>,
    /// Bytes on the wire, if it is whole; of one that the connection's end ends, all there are.
    pub len: Option<usize>,
    pub until_close: bool,
}

fn with_body(head: Head, framing: Framing, bytes: &[u8]) -> Result<Message, Why> {
    let rest = &bytes[head.len..];
    let (body, used) = match framing {
        Framing::Unsaid => (Vec::new(), Some(0)),
        Framing::Length(n) => {
            let there = rest.len().min(usize::try_from(n).unwrap_or(usize::MAX));
            (rest[..there].to_vec(), (there as u64 == n).then_some(there))
        }
        Framing::Chunked => match unchunk(rest) {
            (_, Err(Why::Bad)) => return Err(Why::Bad),
            (body, used) => (body, used.ok()),
        },
    };
    Ok(Message {
        len: used.map(|used| head.len + used),
        head,
        body,
        until_close: false,
    })
}

/// A request at the start of `bytes`.
pub fn request(bytes: &[u8]) -> Result<Message, Why> {
    let head = head(bytes)?;
    let (_, _, is_11) = head.request_line().ok_or(Why::Bad)?;
    let framing = head.framing(is_11).ok_or(Why::Bad)?;
    if head.all("content-length").len() > 1 {
        return Err(Why::Bad);
    }
    with_body(head, framing, bytes)
}

/// An answer at the start of `bytes`; `is_head`: to a HEAD request.
pub fn answer(bytes: &[u8], is_head: bool) -> Result<Message, Why> {
    let head = head(bytes)?;
    let (status, is_11) = head.status_line().ok_or(Why::Bad)?;
    let framing = head.framing(is_11).ok_or(Why::Bad)?;
    let has_body = !is_head && status >= 200 && status != 204 && status != 304;
    match framing {
        _ if !has_body => with_body(head, Framing::Unsaid, bytes),
        Framing::Unsaid => Ok(Message {
            body: bytes[head.len..].to_vec(),
            len: Some(bytes.len()),
            head,
            until_close: true,
        }),
        framing => with_body(head, framing, bytes),
    }
}
