//! A request's head: parsed strictly, and turned into what goes on to a worker.

use std::ops::Range;

use smallvec::SmallVec;

use super::{Refusal, body::Framing, has_bare_line_end, is, is_hop_by_hop, lists};

/// Limits of a head.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of request line and fields together.
    pub head_bytes: usize,
    /// Number of fields.
    pub field_count: usize,
    /// The router chooses data-parallel ranks: a client's own `X-data-parallel-rank` goes no further.
    pub is_rank_ours: bool,
    /// What becomes of a client's keys.
    pub credentials: Credentials,
}

/// What becomes of `Authorization` and `X-Api-Key`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credentials {
    /// They go on to the worker.
    Pass,
    /// `Authorization` goes no further: another takes its place.
    Replace,
    /// They are meant for us: noted, and go no further.
    Take,
}

/// The most fields any head may have; `--header-count-max` can only be lower.
pub const FIELD_COUNT_MAX: usize = 512;

/// A parsed head. `forward` holds the end-to-end fields as they go to the worker; the rest is what we need to know.
#[derive(Debug)]
pub struct Request {
    /// Method, as sent.
    pub method: Method,
    /// Path and query in origin form, as sent.
    pub target: SmallVec<[u8; 40]>,
    /// HTTP/1.0: no chunked answer, no keep-alive unless asked.
    pub is_http10: bool,
    /// Whether the client lets the connection live on.
    pub keep_alive: bool,
    /// How the body is framed.
    pub framing: Framing,
    /// The client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// The client's own request id, a range of `forward`.
    pub request_id: Option<Range<usize>>,
    /// Whether an Authorization of the client goes on to the worker.
    pub has_authorization: bool,
    /// The value of the first Authorization, a range of the head; with [`Credentials::Take`] only.
    pub authorization: Option<Range<usize>>,
    /// The same of X-Api-Key.
    pub api_key: Option<Range<usize>>,
    /// `X-Corelane-Debug: decision`, which goes no further.
    pub asks_decision: bool,
}

/// Methods we treat apart; the rest pass as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the method it names")]
pub enum Method {
    Get,
    Head,
    Post,
    Other(Box<str>),
}

impl Method {
    fn of(name: &str) -> Method {
        match name {
            "GET" => Method::Get,
            "HEAD" => Method::Head,
            "POST" => Method::Post,
            other => Method::Other(other.into()),
        }
    }

    /// As on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Method::Get => "GET",
            Method::Head => "HEAD",
            Method::Post => "POST",
            Method::Other(name) => name,
        }
    }
}

/// What came of the bytes so far.
#[derive(Debug)]
pub enum Verdict {
    /// More bytes are needed.
    Partial,
    /// A head of this many bytes.
    Complete(Request, usize),
    /// Answer this and close.
    Refused(Refusal),
}

/// Parses the head at the start of `bytes`; its end-to-end fields are appended to `forward`, each as `name: value CRLF`.
///
/// `id_fields`: names (lower case) under which a request id may come, in order of preference.
pub fn parse(bytes: &[u8], limits: Limits, id_fields: &[String], forward: &mut Vec<u8>) -> Verdict {
    let mut fields = [httparse::EMPTY_HEADER; 96];
    let mut parsed = httparse::Request::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Partial) => partial(bytes, limits),
        Ok(httparse::Status::Complete(len)) => {
            judge(&parsed, bytes, len, limits, id_fields, forward)
        }
        // More fields than fit on the fast path: again with room for all that may ever be allowed.
        Err(httparse::Error::TooManyHeaders) => {
            let mut many =
                vec![httparse::EMPTY_HEADER; limits.field_count.min(FIELD_COUNT_MAX) + 1];
            let mut parsed = httparse::Request::new(&mut many);
            match parsed.parse(bytes) {
                Ok(httparse::Status::Partial) => partial(bytes, limits),
                Ok(httparse::Status::Complete(len)) => {
                    judge(&parsed, bytes, len, limits, id_fields, forward)
                }
                Err(e) => Verdict::Refused(refuse(e)),
            }
        }
        Err(e) => Verdict::Refused(refuse(e)),
    }
}

fn partial(bytes: &[u8], limits: Limits) -> Verdict {
    if bytes.len() <= limits.head_bytes {
        return Verdict::Partial;
    }
    Verdict::Refused(too_large(is_first_line_too_long(bytes, limits)))
}

fn is_first_line_too_long(head: &[u8], limits: Limits) -> bool {
    memchr::memchr(b'\n', head).is_none_or(|len| len > limits.head_bytes)
}

fn too_large(in_first_line: bool) -> Refusal {
    if in_first_line {
        Refusal::new(414, "uri_too_long", "the request target is too long")
    } else {
        Refusal::new(
            431,
            "headers_too_large",
            "the request's header fields are too large or too many",
        )
    }
}

fn refuse(e: httparse::Error) -> Refusal {
    match e {
        httparse::Error::TooManyHeaders => too_large(false),
        httparse::Error::Version => Refusal::new(
            505,
            "http_version_not_supported",
            "only HTTP/1.1 and HTTP/1.0 are spoken here",
        ),
        httparse::Error::HeaderName => Refusal::framing("a header field name is malformed"),
        httparse::Error::HeaderValue => Refusal::framing("a header field value is malformed"),
        httparse::Error::NewLine => Refusal::framing("a line of the head does not end in CRLF"),
        _ => Refusal::framing("the request line is malformed"),
    }
}

fn judge(
    parsed: &httparse::Request<'_, '_>,
    bytes: &[u8],
    len: usize,
    limits: Limits,
    id_fields: &[String],
    forward: &mut Vec<u8>,
) -> Verdict {
    match read(parsed, &bytes[..len], limits, id_fields, forward) {
        Ok(request) => Verdict::Complete(request, len),
        Err(refusal) => Verdict::Refused(refusal),
    }
}

/// The head's fields that decide framing and connection, gathered in one pass.
#[derive(Default)]
struct Seen<'a> {
    host: Option<&'a [u8]>,
    length: Option<&'a [u8]>,
    coding: Option<&'a [u8]>,
    connection: Option<&'a [u8]>,
    connections: usize,
    expect: Option<&'a [u8]>,
}

fn once<'a>(
    place: &mut Option<&'a [u8]>,
    value: &'a [u8],
    what: &'static str,
) -> Result<(), Refusal> {
    if place.replace(value).is_some() {
        Err(Refusal::framing(what))
    } else {
        Ok(())
    }
}

fn read(
    parsed: &httparse::Request<'_, '_>,
    head: &[u8],
    limits: Limits,
    id_fields: &[String],
    forward: &mut Vec<u8>,
) -> Result<Request, Refusal> {
    if head.len() > limits.head_bytes || parsed.headers.len() > limits.field_count {
        let is_line = head.len() > limits.head_bytes && is_first_line_too_long(head, limits);
        return Err(too_large(is_line));
    }
    // httparse takes a lone LF for a line end; a worker or a proxy behind us may not.
    let start = head
        .iter()
        .position(|b| *b != b'\r' && *b != b'\n')
        .unwrap_or(0);
    if has_bare_line_end(&head[start..]) {
        return Err(Refusal::framing("a line of the head does not end in CRLF"));
    }
    let (Some(method), Some(target), Some(version)) = (parsed.method, parsed.path, parsed.version)
    else {
        return Err(Refusal::framing("the request line is malformed"));
    };
    let is_http10 = version == 0;
    let seen = survey(parsed.headers)?;
    let framing = framing(&seen, is_http10)?;
    match seen.host {
        Some(host) if is_host(host) => {}
        None if is_http10 => {}
        _ => {
            return Err(Refusal::framing(
                "exactly one well-formed Host field is needed",
            ));
        }
    }
    let target = SmallVec::from_slice(origin_form(method, target)?);
    let mut request = Request {
        method: Method::of(method),
        target,
        is_http10,
        keep_alive: keep_alive(&seen, is_http10),
        framing,
        expects_continue: expects_continue(&seen, is_http10)?,
        request_id: None,
        has_authorization: false,
        authorization: None,
        api_key: None,
        asks_decision: false,
    };
    copy_fields(
        head,
        parsed.headers,
        &seen,
        limits,
        id_fields,
        forward,
        &mut request,
    );
    Ok(request)
}

fn survey<'a>(fields: &'a [httparse::Header<'_>]) -> Result<Seen<'a>, Refusal> {
    let mut seen = Seen::default();
    for field in fields {
        let (name, value) = (field.name, field.value);
        match name.len() {
            4 if is(name, "host") => once(&mut seen.host, value, "Host was sent twice")?,
            6 if is(name, "expect") => seen.expect = Some(value),
            10 if is(name, "connection") => {
                seen.connection = Some(value);
                seen.connections += 1;
            }
            14 if is(name, "content-length") => {
                once(&mut seen.length, value, "Content-Length was sent twice")?;
            }
            17 if is(name, "transfer-encoding") => {
                once(&mut seen.coding, value, "Transfer-Encoding was sent twice")?;
            }
            _ => {}
        }
    }
    Ok(seen)
}

fn framing(seen: &Seen<'_>, is_http10: bool) -> Result<Framing, Refusal> {
    match (seen.coding, seen.length) {
        (Some(_), Some(_)) => Err(Refusal::framing(
            "Content-Length and Transfer-Encoding were sent together",
        )),
        (Some(_), None) if is_http10 => Err(Refusal::framing("HTTP/1.0 has no Transfer-Encoding")),
        (Some(coding), None) if coding.eq_ignore_ascii_case(b"chunked") => Ok(Framing::Chunked),
        (Some(_), None) => Err(Refusal::framing(
            "the only Transfer-Encoding taken is the one word chunked",
        )),
        (None, Some(length)) => match super::body::parse_length(length) {
            Some(0) => Ok(Framing::None),
            Some(n) => Ok(Framing::Length(n)),
            None => Err(Refusal::framing(
                "Content-Length is not a plain decimal number",
            )),
        },
        (None, None) => Ok(Framing::None),
    }
}

/// Connection may come in several fields; all of them speak (RFC 9110 section 7.6.1).
fn any_connection(fields: &[httparse::Header<'_>], token: &str) -> bool {
    fields
        .iter()
        .any(|f| is(f.name, "connection") && lists(f.value, token))
}

fn keep_alive(seen: &Seen<'_>, is_http10: bool) -> bool {
    match seen.connection {
        None => !is_http10,
        Some(value) if is_http10 => lists(value, "keep-alive") && !lists(value, "close"),
        Some(value) => !lists(value, "close"),
    }
}

fn expects_continue(seen: &Seen<'_>, is_http10: bool) -> Result<bool, Refusal> {
    match seen.expect {
        None => Ok(false),
        // RFC 9110 section 10.1.1: an HTTP/1.0 client's expectation is ignored.
        Some(_) if is_http10 => Ok(false),
        Some(value) if value.eq_ignore_ascii_case(b"100-continue") => Ok(true),
        Some(_) => Err(Refusal::new(
            417,
            "expectation_failed",
            "the only expectation met is 100-continue",
        )),
    }
}

fn is_host(host: &[u8]) -> bool {
    host.iter()
        .all(|b| b.is_ascii_alphanumeric() || b"-._~:[]%!$&'()*+;=".contains(b))
}

/// Absolute form is taken apart, never obeyed as an address (RFC 9112 section 3.2.2).
fn origin_form<'a>(method: &str, target: &'a str) -> Result<&'a [u8], Refusal> {
    if method == "CONNECT" {
        let mut refusal = Refusal::new(405, "method_not_allowed", "CONNECT is not taken here");
        refusal.allow = Some("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
        return Err(refusal);
    }
    if target.starts_with('/') || (target == "*" && method == "OPTIONS") {
        return Ok(target.as_bytes());
    }
    let rest = target
        .get(..7)
        .filter(|s| s.eq_ignore_ascii_case("http://"))
        .map(|_| &target[7..])
        .or_else(|| {
            target
                .get(..8)
                .filter(|s| s.eq_ignore_ascii_case("https://"))
                .map(|_| &target[8..])
        });
    match rest {
        Some(rest) => match rest.find(['/', '?']) {
            Some(at) if rest.as_bytes()[at] == b'/' => Ok(&rest.as_bytes()[at..]),
            Some(_) => Err(Refusal::framing("the request target is malformed")),
            None => Ok(b"/"),
        },
        None => Err(Refusal::framing("the request target is malformed")),
    }
}

fn copy_fields(
    head: &[u8],
    fields: &[httparse::Header<'_>],
    seen: &Seen<'_>,
    limits: Limits,
    id_fields: &[String],
    forward: &mut Vec<u8>,
    request: &mut Request,
) {
    let mut best_id = usize::MAX;
    let names_others = seen.connection.is_some_and(|v| {
        seen.connections > 1
            || !(v.eq_ignore_ascii_case(b"keep-alive") || v.eq_ignore_ascii_case(b"close"))
    });
    if seen.connections > 1 {
        let close = any_connection(fields, "close");
        request.keep_alive = !close && (!request.is_http10 || any_connection(fields, "keep-alive"));
    }
    for field in fields {
        let name = field.name;
        let ours = match name.len() {
            4 => is(name, "host"),
            6 => is(name, "expect"),
            14 => is(name, "content-length"),
            16 if is(name, "x-corelane-debug") => {
                request.asks_decision |= lists(field.value, "decision");
                true
            }
            20 => limits.is_rank_ours && is(name, "x-data-parallel-rank"),
            _ => false,
        };
        let ours = ours || keeps_credential(limits.credentials, head, field, request);
        if ours || is_hop_by_hop(name) || (names_others && any_connection(fields, name)) {
            continue;
        }
        forward.extend_from_slice(name.as_bytes());
        forward.extend_from_slice(b": ");
        let from = forward.len();
        forward.extend_from_slice(field.value);
        if let Some(rank) = id_fields.iter().position(|id| is(name, id))
            && rank < best_id
            && !field.value.is_empty()
        {
            best_id = rank;
            request.request_id = Some(from..forward.len());
        }
        if name.len() == 13 && is(name, "authorization") {
            request.has_authorization = true;
        }
        forward.extend_from_slice(b"\r\n");
    }
}

/// Whether a field is a client's key that goes no further; it is noted where it is meant for us.
fn keeps_credential(
    credentials: Credentials,
    head: &[u8],
    field: &httparse::Header<'_>,
    request: &mut Request,
) -> bool {
    let place = match field.name.len() {
        13 if is(field.name, "authorization") => &mut request.authorization,
        9 if is(field.name, "x-api-key") => &mut request.api_key,
        _ => return false,
    };
    match credentials {
        Credentials::Pass => false,
        Credentials::Replace => field.name.len() == 13,
        Credentials::Take => {
            if place.is_none() {
                // The parser's values are slices of the head.
                let from = field.value.as_ptr() as usize - head.as_ptr() as usize;
                *place = Some(from..from + field.value.len());
            }
            true
        }
    }
}
