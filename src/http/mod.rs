//! HTTP/1.1, bytes in and verdicts out: heads, framing, rewriting, replies of our own. No I/O, no clock.
//!
//! # Threat model
//!
//! Clients are not trusted with anything. They may send any bytes at any pace, in any pieces, pipelined or cut off. What
//! they want is (1) to make a worker see a request that we did not route (smuggling: two readers that disagree about
//! where a body ends), (2) to make one client see another's answer, (3) to fill memory or hold a core. Against (1) and (2)
//! every rule below takes the strict reading of RFC 9112 and refuses the rest with 400 and a close; heads are
//! written anew, never forwarded as they came; a body is framed again by us with exactly one length; and a connection whose
//! end of message is in doubt is closed, on either side. Against (3) every length, count and time has a limit.
//!
//! Workers are trusted for content, not for framing: an answer that breaks framing ends its connection and counts as
//! the worker's failure, and no later request is sent there. Bytes of a peer never reach an assertion or a panic.
//!
//! Not our business: what a request asks of the model, who may ask it (`crate::access`), how many requests a permitted
//! client sends (there are limits in all and by address, none by key), and who reads the network (TLS).
//!
//! # Framing rules
//!
//! Of requests. A number is the status of the refusal: no worker sees the request (where its body is handed on as it comes:
//! the end of it), and the connection closes. The same rows, with examples, are the tests' table (`tests/common/framing.rs`).
//!
//! | input | verdict | source |
//! |---|---|---|
//! | a request line that is none: a part missing, a space too many, odd bytes | 400 | RFC 9112 3, RFC 9110 9.1 |
//! | a version other than 1.0 and 1.1, and whatever stands in its place | 505 | RFC 9112 2.3, RFC 9110 15.6.6 |
//! | CONNECT | 405 | RFC 9110 9.3.6 |
//! | a target that is neither a path nor in absolute form (nor `*` with OPTIONS) | 400 | RFC 9112 3.2 |
//! | bare LF or bare CR in a head | 400 | RFC 9112 2.2 |
//! | white space before a colon or before the first field, obs-fold | 400 | RFC 9112 2.2, 5.1, 5.2 |
//! | an empty or odd field name, no colon, control bytes in a value | 400 | RFC 9112 5, RFC 9110 5.1, 5.5 |
//! | no Host (HTTP/1.1), two Hosts, a Host with odd bytes | 400 | RFC 9112 3.2 |
//! | Expect other than 100-continue (HTTP/1.1) | 417 | RFC 9110 10.1.1 |
//! | Content-Length twice, equal or not, or as a list | 400 | RFC 9112 6.3, RFC 9110 8.6 |
//! | Content-Length that is no plain decimal number below 2^63 | 400 | RFC 9112 6.3, RFC 9110 8.6 |
//! | Content-Length beside Transfer-Encoding | 400 | RFC 9112 6.1, 11.2 |
//! | Transfer-Encoding other than the one word `chunked`: twice, a list | 400 | RFC 9112 6.1, 6.3, 7 |
//! | Transfer-Encoding in HTTP/1.0 | 400 | RFC 9112 6.1 |
//! | a chunk size that is not hex digits alone, or over 2^60 | 400 | RFC 9112 7.1 |
//! | bare LF, bare CR or a control byte in a chunk line | 400 | RFC 9112 2.2, 7.1.1 |
//! | chunk data that is not followed by CRLF | 400 | RFC 9112 7.1 |
//! | a trailer that is folded, nameless, ended by bare LF, or has control bytes | 400 | RFC 9112 7.1.2, 5.2 |
//! | chunk lines over 4 KiB, trailers over 16 KiB | 400 | RFC 9112 7.1.1, 7.1.2 |
//! | a target over `--header-size-max-bytes` | 414 | RFC 9112 3, RFC 9110 15.5.15 |
//! | a head over `--header-size-max-bytes`, more fields than `--header-count-max` | 431 | RFC 6585 5, RFC 9110 5.4 |
//! | empty lines before a request | skipped | RFC 9112 2.2 |
//! | a target in absolute form | routed by its path alone | RFC 9112 3.2.2 |
//! | white space round a value, no value, bytes beyond ASCII in it | taken, without it | RFC 9112 5, RFC 9110 5.1, 5.5 |
//! | leading zeros, chunk extensions, trailers | taken; where read whole, not passed on | RFC 9112 7.1 |
//! | any other method, HTTP/1.0, `*` with OPTIONS | taken; workers are asked in HTTP/1.1 | RFC 9110 9.1, RFC 9112 2.3 |
//!
//! Of answers. With 502 the worker has failed, the client gets another worker's answer, that error, or, where the head has
//! gone out, a connection that visibly breaks off; nothing that follows on the worker's connection is read.
//!
//! | input | verdict | source |
//! |---|---|---|
//! | a status line that is none | 502 | RFC 9112 4, RFC 9110 15 |
//! | bare LF, white space before a colon, obs-fold, control bytes in its head | 502 | RFC 9112 2.2, 5.1, 5.2 |
//! | a head over 256 KiB | 502 | RFC 9110 5.4 |
//! | two lengths that differ, a list, a length that is no plain decimal number | 502 | RFC 9112 6.3 |
//! | a length beside Transfer-Encoding | 502 | RFC 9112 6.1, 6.3 |
//! | a Transfer-Encoding other than the one word `chunked`, or in HTTP/1.0 | 502 | RFC 9112 6.1, 6.3 |
//! | broken chunk lines or chunk data | 502 or a visible break | RFC 9112 7.1, 8 |
//! | an end before its length or its last chunk | 502 or a visible break | RFC 9112 8 |
//! | 101, which nobody asked for (Upgrade goes no further) | 502 | RFC 9110 7.8, 15.2.2 |
//! | its length twice, the same | taken, and said once | RFC 9112 6.3 |
//! | 204, 304, an answer to HEAD | no body, whatever the fields say | RFC 9112 6.3 |
//! | bytes behind its end | reach nobody; its connection closes | RFC 9112 9.2 |
//! | neither length nor chunks | until the worker closes; HTTP/1.1 gets chunks | RFC 9112 6.3 |

pub mod body;
pub mod cors;
pub mod reply;
pub mod request;
pub mod response;

pub use body::{Body, Progress};
pub use cors::Cors;
pub use reply::Refusal;
pub use request::{Limits, Request};
pub use response::Response;

/// Compares a field name with a lower-case one.
pub(crate) fn is(name: &str, lower: &str) -> bool {
    name.eq_ignore_ascii_case(lower)
}

/// Whether a field belongs to one hop only (RFC 9110 section 7.6.1, and the older ones it lists).
pub(crate) fn is_hop_by_hop(name: &str) -> bool {
    match name.len() {
        2 => is(name, "te"),
        7 => is(name, "trailer") || is(name, "upgrade"),
        10 => is(name, "connection") || is(name, "keep-alive"),
        16 => is(name, "proxy-connection"),
        17 => is(name, "transfer-encoding"),
        18 => is(name, "proxy-authenticate"),
        19 => is(name, "proxy-authorization"),
        _ => false,
    }
}

/// Whether a comma list names a token.
pub(crate) fn lists(value: &[u8], token: &str) -> bool {
    value
        .split(|b| *b == b',')
        .any(|t| t.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// A head must use CRLF everywhere: finds a line feed without its carriage return, or the other way round.
pub(crate) fn has_bare_line_end(head: &[u8]) -> bool {
    let mut cr_count = 0;
    for at in memchr::memchr2_iter(b'\r', b'\n', head) {
        if head[at] == b'\r' {
            cr_count += 1;
        } else if at == 0 || head[at - 1] != b'\r' {
            return true;
        } else {
            cr_count -= 1;
        }
    }
    cr_count != 0
}
