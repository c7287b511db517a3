//! A worker's answer: its head parsed, and written anew for the client.

use super::body::{Framing, parse_length};
use super::reply::{push_field, push_number};
use super::{has_bare_line_end, is, is_hop_by_hop, lists};

/// A parsed answer head.
#[derive(Debug)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// How the worker framed the body.
    pub framing: Framing,
    /// The worker keeps its connection.
    pub keep_alive: bool,
    /// `text/event-stream`.
    pub is_event_stream: bool,
    /// The content is compressed, or encoded otherwise.
    pub is_encoded: bool,
    /// `Retry-After` in seconds (a date is not read: RFC 9110 section 10.2.3 allows it, no worker sends it).
    pub retry_after_secs: Option<u32>,
    /// Bytes of the head.
    pub len_bytes: usize,
}

/// An answer that cannot be trusted: a failure of the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

/// The most bytes an answer's head may have.
pub const HEAD_BYTES_MAX: usize = 256 * 1024;

/// How the client is to get the answer.
#[derive(Clone, Copy, Debug)]
pub struct Client<'a> {
    /// HTTP/1.0: no chunks.
    pub is_http10: bool,
    /// The request was HEAD: no body follows, whatever the head says.
    pub is_head: bool,
    /// The client's connection lives on after this answer.
    pub keep_alive: bool,
    /// The id to be echoed as `x-request-id`, unless the worker sets one.
    pub request_id: &'a [u8],
    /// The worker knows the request by another id, which is not the client's business.
    pub hides_workers_id: bool,
    /// The content was changed: its new length.
    pub length: Option<u64>,
    /// Fields that take the place of the worker's own ([`super::Cors`]); empty: the worker's go through.
    pub cors: &'a [u8],
}

/// How the body goes on to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relay {
    /// No body.
    Nothing,
    /// The worker's bytes as they are, framing included.
    AsIs,
    /// The content only; the connection's end is the body's end.
    Unframed,
    /// The content in chunks of ours.
    Chunks,
}

/// Parses the head at the start of `bytes` and, when it is complete and final, appends the client's to `out`.
/// `None`: more bytes are needed. An interim answer (1xx) is returned with its status and nothing written.
///
/// # Errors
/// The head is malformed or contradicts itself.
pub fn parse(
    bytes: &[u8],
    client: Client<'_>,
    out: &mut Vec<u8>,
) -> Result<Option<(Response, Relay, bool)>, Broken> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => judge(&parsed, bytes, len, client, out).map(Some),
        Ok(httparse::Status::Partial) if bytes.len() > HEAD_BYTES_MAX => {
            Err(Broken("the head of the answer is too large"))
        }
        Ok(httparse::Status::Partial) => Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            let mut many = vec![httparse::EMPTY_HEADER; 1024];
            let mut parsed = httparse::Response::new(&mut many);
            match parsed.parse(bytes) {
                Ok(httparse::Status::Complete(len)) => {
                    judge(&parsed, bytes, len, client, out).map(Some)
                }
                Ok(httparse::Status::Partial) if bytes.len() > HEAD_BYTES_MAX => {
                    Err(Broken("the head of the answer is too large"))
                }
                Ok(httparse::Status::Partial) => Ok(None),
                Err(_) => Err(Broken("the head of the answer is malformed")),
            }
        }
        Err(_) => Err(Broken("the head of the answer is malformed")),
    }
}

/// Parses the head at the start of `bytes` for one who asked himself: nothing is written. `None`: more bytes are needed.
/// At most 64 fields.
///
/// # Errors
/// The head is malformed or contradicts itself.
pub fn parse_head(bytes: &[u8], is_head: bool) -> Result<Option<Response>, Broken> {
    let mut fields = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut fields);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => {
            judge_head(&parsed, bytes, len, is_head).map(|(_, response)| Some(response))
        }
        Ok(httparse::Status::Partial) if bytes.len() > HEAD_BYTES_MAX => {
            Err(Broken("the head of the answer is too large"))
        }
        Ok(httparse::Status::Partial) => Ok(None),
        Err(_) => Err(Broken("the head of the answer is malformed")),
    }
}

/// Its status and what it says of its body.
fn judge_head(
    parsed: &httparse::Response<'_, '_>,
    bytes: &[u8],
    len: usize,
    is_head: bool,
) -> Result<(u16, Response), Broken> {
    let (Some(status), Some(version)) = (parsed.code, parsed.version) else {
        return Err(Broken("the status line of the answer is malformed"));
    };
    if len > HEAD_BYTES_MAX {
        return Err(Broken("the head of the answer is too large"));
    }
    if status < 100 || has_bare_line_end(&bytes[..len]) {
        return Err(Broken("the head of the answer is malformed"));
    }
    let mut response = read(parsed.headers, status, version)?;
    response.len_bytes = len;
    if is_head || status < 200 || status == 204 || status == 304 {
        // RFC 9112 section 6.3: these never have a body, whatever their fields say.
        response.framing = Framing::None;
    }
    Ok((status, response))
}

fn judge(
    parsed: &httparse::Response<'_, '_>,
    bytes: &[u8],
    len: usize,
    client: Client<'_>,
    out: &mut Vec<u8>,
) -> Result<(Response, Relay, bool), Broken> {
    let (status, response) = judge_head(parsed, bytes, len, client.is_head)?;
    if status < 200 {
        // A client that asked for 100 has had ours; HTTP/1.0 knows no interim answers (RFC 9110 section 15.2).
        if status != 100 && status != 101 && !client.is_http10 {
            write_interim(parsed, status, out);
        }
        return Ok((response, Relay::Nothing, client.keep_alive));
    }
    let relay = match response.framing {
        Framing::None => Relay::Nothing,
        Framing::Length(_) => Relay::AsIs,
        Framing::Chunked if client.is_http10 => Relay::Unframed,
        Framing::Chunked => Relay::AsIs,
        Framing::Close if client.is_http10 => Relay::Unframed,
        Framing::Close => Relay::Chunks,
    };
    let keep_alive = client.keep_alive && relay != Relay::Unframed;
    write(
        parsed,
        status,
        &response,
        relay,
        Client {
            keep_alive,
            ..client
        },
        out,
    );
    Ok((response, relay, keep_alive))
}

fn read(fields: &[httparse::Header<'_>], status: u16, version: u8) -> Result<Response, Broken> {
    let (mut length, mut chunked) = (None, false);
    let mut keep_alive = version == 1;
    let (mut is_event_stream, mut is_encoded) = (false, false);
    let mut retry_after_secs = None;
    for field in fields {
        let (name, value) = (field.name, field.value);
        match name.len() {
            14 if is(name, "content-length") => {
                let n = parse_length(value)
                    .ok_or(Broken("the answer's Content-Length is malformed"))?;
                if length.is_some_and(|m| m != n) {
                    return Err(Broken("the answer has two lengths"));
                }
                length = Some(n);
            }
            17 if is(name, "transfer-encoding") => {
                if chunked || version == 0 || !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(Broken(
                        "the answer's Transfer-Encoding is not plain chunked",
                    ));
                }
                chunked = true;
            }
            10 if is(name, "connection") => {
                if lists(value, "close") {
                    keep_alive = false;
                } else if version == 0 && lists(value, "keep-alive") {
                    keep_alive = true;
                }
            }
            11 if is(name, "retry-after") => {
                retry_after_secs = std::str::from_utf8(value.trim_ascii())
                    .ok()
                    .and_then(|text| text.parse().ok());
            }
            12 if is(name, "content-type") => {
                is_event_stream =
                    value.len() >= 17 && value[..17].eq_ignore_ascii_case(b"text/event-stream");
            }
            16 if is(name, "content-encoding") => {
                is_encoded |= !value.eq_ignore_ascii_case(b"identity");
            }
            _ => {}
        }
    }
    let framing = match (chunked, length) {
        (true, Some(_)) => return Err(Broken("the answer has a length and chunks")),
        (true, None) => Framing::Chunked,
        (false, Some(0)) => Framing::None,
        (false, Some(n)) => Framing::Length(n),
        (false, None) => Framing::Close,
    };
    Ok(Response {
        status,
        framing,
        keep_alive,
        is_event_stream,
        is_encoded,
        retry_after_secs,
        len_bytes: 0,
    })
}

fn write(
    parsed: &httparse::Response<'_, '_>,
    status: u16,
    response: &Response,
    relay: Relay,
    client: Client<'_>,
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(out, u64::from(status));
    out.push(b' ');
    out.extend_from_slice(parsed.reason.unwrap_or("").as_bytes());
    out.extend_from_slice(b"\r\n");
    let named = |name: &str| {
        parsed
            .headers
            .iter()
            .any(|f| is(f.name, "connection") && lists(f.value, name))
    };
    let has_connection = parsed
        .headers
        .iter()
        .any(|f| f.name.len() == 10 && is(f.name, "connection"));
    let mut has_request_id = false;
    let mut has_length = false;
    for field in &*parsed.headers {
        let name = field.name;
        // A length goes through also where no body follows (HEAD, 304): it says what GET would give.
        let keeps_length = (relay == Relay::AsIs || relay == Relay::Nothing)
            && response.framing != Framing::Chunked
            && status != 204;
        let is_length = name.len() == 14 && is(name, "content-length");
        // A length stays, whatever Connection names: without it the client would wait for the connection's end.
        if is_hop_by_hop(name) || (has_connection && !is_length && named(name)) {
            continue;
        }
        if is_length {
            // Two equal ones are one (RFC 9112 section 6.3).
            if !keeps_length || std::mem::replace(&mut has_length, true) {
                continue;
            }
            if let Some(length) = client.length {
                out.extend_from_slice(b"content-length: ");
                push_number(out, length);
                out.extend_from_slice(b"\r\n");
                continue;
            }
        }
        if name.len() == 12 && is(name, "x-request-id") {
            if client.hides_workers_id {
                continue;
            }
            has_request_id = true;
        }
        if !client.cors.is_empty() && super::cors::is_ours(name) {
            continue;
        }
        push_field(out, name, field.value);
    }
    out.extend_from_slice(client.cors);
    if relay == Relay::Chunks || (relay == Relay::AsIs && response.framing == Framing::Chunked) {
        out.extend_from_slice(b"transfer-encoding: chunked\r\n");
    }
    if !has_request_id && !client.request_id.is_empty() {
        out.extend_from_slice(b"x-request-id: ");
        out.extend_from_slice(client.request_id);
        out.extend_from_slice(b"\r\n");
    }
    if !client.keep_alive {
        out.extend_from_slice(b"connection: close\r\n");
    } else if client.is_http10 {
        out.extend_from_slice(b"connection: keep-alive\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

fn write_interim(parsed: &httparse::Response<'_, '_>, status: u16, out: &mut Vec<u8>) {
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(out, u64::from(status));
    out.push(b' ');
    out.extend_from_slice(parsed.reason.unwrap_or("").as_bytes());
    out.extend_from_slice(b"\r\n");
    for field in &*parsed.headers {
        if !is_hop_by_hop(field.name) && !is(field.name, "content-length") {
            push_field(out, field.name, field.value);
        }
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn for_client(head: &str) -> String {
        let client = Client {
            is_http10: false,
            is_head: false,
            keep_alive: true,
            request_id: b"",
            hides_workers_id: false,
            length: None,
            cors: b"",
        };
        let mut out = Vec::new();
        assert!(matches!(
            parse(head.as_bytes(), client, &mut out),
            Ok(Some(_))
        ));
        String::from_utf8(out).unwrap()
    }

    /// Found by fuzzing: the client of a connection that stays open would have waited for ever.
    #[test]
    fn a_length_that_connection_names_still_reaches_the_client() {
        let came = "HTTP/1.1 200 OK\r\nConnection: Content-Length, X-Hop\r\nX-Hop: 1\r\nContent-Length: 2\r\n\r\n";
        assert_eq!(
            for_client(came),
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
        );
    }
}
