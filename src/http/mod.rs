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
//! Workers are trusted for content, not for framing: an answer that breaks framing ends both connections and counts as
//! the worker's failure. Bytes of a peer never reach an assertion or a panic.
//!
//! # Framing rules
//!
//! | input | verdict | source |
//! |---|---|---|
//! | bare LF or bare CR in a head | 400 | RFC 9112 2.2 |
//! | white space before a colon, obs-fold, an empty or odd field name | 400 | RFC 9112 5.1, 5.2 |
//! | no Host (HTTP/1.1), two Hosts, a Host with odd bytes | 400 | RFC 9112 3.2 |
//! | Content-Length twice, with sign, list, or over 2^63 | 400 | RFC 9112 6.3, RFC 9110 8.6 |
//! | Content-Length beside Transfer-Encoding | 400 | RFC 9112 6.1 |
//! | Transfer-Encoding other than the one word `chunked`, or in HTTP/1.0 | 400 | RFC 9112 6.1 |
//! | chunk size not hex, with sign, over 2^60, line ended by bare LF | 400 | RFC 9112 7.1 |
//! | chunk data not followed by CRLF | 400 | RFC 9112 7.1 |
//! | absolute-form target | routed by its path alone | RFC 9112 3.2.2 |
//! | CONNECT | 405 | RFC 9110 9.3.6 |
//! | authority-form with another method, a target that is no path | 400 | RFC 9112 3.2 |
//! | version other than 1.0 and 1.1 | 505 | RFC 9110 15.6.6 |
//! | head or field count over its limit | 431, target too long 414 | RFC 6585 5 |

pub mod body;
pub mod reply;
pub mod request;
pub mod response;

pub use body::{Body, Progress};
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
