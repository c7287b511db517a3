//! Naive readers and writers of HTTP/1.1 messages, for simulations: slow, obvious, and none of the router's own code.

/// `body` in chunks of these sizes, over and over.
pub fn chunked(body: &[u8], sizes: &[usize], trailers: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = body;
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (part, tail) = rest.split_at((*size).clamp(1, rest.len()));
        out.extend_from_slice(format!("{:x};e=\"1\"\r\n", part.len()).as_bytes());
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
        rest = tail;
    }
    out.extend_from_slice(format!("0\r\n{trailers}\r\n").as_bytes());
    out
}

/// Takes chunks off; `None`: not whole. Leading zeros of a size are legal. Panics on broken framing.
pub fn unchunk(mut bytes: &[u8]) -> (Vec<u8>, Option<usize>) {
    let (all, mut body) = (bytes.len(), Vec::new());
    loop {
        let Some(at) = memchr::memmem::find(bytes, b"\r\n") else {
            return (body, None);
        };
        let line = std::str::from_utf8(&bytes[..at]).expect("a size line is text");
        let digits = line.split(';').next().unwrap_or("");
        let size =
            usize::from_str_radix(digits, 16).unwrap_or_else(|_| panic!("a chunk size: {line:?}"));
        bytes = &bytes[at + 2..];
        if size == 0 {
            if bytes.starts_with(b"\r\n") {
                return (body, Some(all - bytes.len() + 2));
            }
            let end = memchr::memmem::find(bytes, b"\r\n\r\n");
            return (body, end.map(|end| all - bytes.len() + end + 4));
        }
        let part = &bytes[..size.min(bytes.len())];
        body.extend_from_slice(part);
        if bytes.len() < size + 2 {
            return (body, None);
        }
        assert_eq!(&bytes[size..size + 2], b"\r\n", "chunk data ends in CRLF");
        bytes = &bytes[size + 2..];
    }
}

pub fn field<'h>(head: &'h str, name: &str) -> Vec<&'h str> {
    let fields = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    fields
        .filter(|(n, _)| n.eq_ignore_ascii_case(name))
        .map(|(_, v)| v.trim())
        .collect()
}

/// A message on either side, as far as it has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub head: String,
    pub body: Vec<u8>,
    pub is_whole: bool,
    /// Whole once the connection ends.
    pub until_close: bool,
}

/// Reads one message; how many bytes it took. `None`: not even the head is whole.
pub fn read_message(bytes: &[u8], has_no_body: bool, is_answer: bool) -> Option<(Message, usize)> {
    let head_len = memchr::memmem::find(bytes, b"\r\n\r\n")? + 4;
    let head = String::from_utf8(bytes[..head_len].to_vec()).expect("heads are text here");
    let (lengths, codings) = (
        field(&head, "content-length"),
        field(&head, "transfer-encoding"),
    );
    assert!(
        lengths.len() + codings.len() <= 1,
        "two framings in one head:\n{head}"
    );
    let rest = &bytes[head_len..];
    let (body, used, until_close) = if has_no_body {
        (Vec::new(), Some(0), false)
    } else if let Some(length) = lengths.first() {
        let length: usize = length.parse().expect("a length");
        (
            rest[..length.min(rest.len())].to_vec(),
            (rest.len() >= length).then_some(length),
            false,
        )
    } else if codings.is_empty() {
        let body = if is_answer { rest.to_vec() } else { Vec::new() };
        (body, (!is_answer).then_some(0), is_answer)
    } else {
        let (body, used) = unchunk(rest);
        (body, used, false)
    };
    let len = head_len + used.unwrap_or(rest.len());
    Some((
        Message {
            head,
            body,
            is_whole: used.is_some(),
            until_close,
        },
        len,
    ))
}

pub fn status(answer: &Message) -> u16 {
    answer
        .head
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .expect("a status")
}
