//! A request's head: what is accepted has one meaning, to us and to whoever reads what we make of it.
//!
//! Input: two bytes of settings, then the client's.

use corelane::http::body::Framing;
use corelane::http::request::{Credentials, Limits, Request, Verdict, parse};

use crate::naive::{self, Head};

pub fn request_head(data: &[u8]) {
    let Some((settings, wire)) = data.split_at_checked(2) else {
        return;
    };
    let limits = limits(settings[0]);
    let ids = ["x-request-id", "x-correlation-id"].map(String::from);
    let mut forward = Vec::new();
    let verdict = parse(wire, limits, &ids, &mut forward);
    check_prefixes(wire, &verdict, limits, &ids, settings[1]);
    let Verdict::Complete(request, len) = verdict else {
        return;
    };
    let head = naive::head(wire).expect("what is accepted is a head to a strict reader");
    assert_eq!(len, head.len, "where it ends");
    assert!(len <= limits.head_bytes && head.fields.len() <= limits.field_count);
    check_meaning(&request, &head);
    check_forward(&request, &head, &forward, limits, &ids);
    check_again(&request, &forward, limits, &ids);
}

fn limits(bits: u8) -> Limits {
    Limits {
        head_bytes: [65536, 65536, 200, 64][usize::from(bits & 3)],
        field_count: [100, 512, 3, 100][usize::from(bits >> 2 & 3)],
        is_rank_ours: bits & 16 != 0,
        credentials: [
            Credentials::Pass,
            Credentials::Replace,
            Credentials::Take,
            Credentials::Pass,
        ][usize::from(bits >> 5 & 3)],
    }
}

/// The verdict on the whole does not depend on what of it had come when it was first looked at.
fn check_prefixes(wire: &[u8], verdict: &Verdict, limits: Limits, ids: &[String], choice: u8) {
    let len = wire.len();
    let every = if choice.is_multiple_of(16) {
        len.min(64)
    } else {
        0
    };
    let chosen = [
        usize::from(choice) * 5 % (len + 1),
        len.saturating_sub(1 + usize::from(choice & 3)),
    ];
    for at in (0..every).chain(chosen) {
        match (parse(&wire[..at], limits, ids, &mut Vec::new()), verdict) {
            (Verdict::Partial, Verdict::Complete(_, end)) => {
                assert!(at < *end, "it was whole at {at}")
            }
            (Verdict::Complete(early, end), Verdict::Complete(late, whole)) => {
                assert_eq!(
                    format!("{early:?} {end}"),
                    format!("{late:?} {whole}"),
                    "split at {at}"
                );
            }
            (Verdict::Complete(..) | Verdict::Refused(_), Verdict::Partial) => {
                panic!("a verdict on {at} bytes was taken back")
            }
            (Verdict::Complete(..), Verdict::Refused(_)) => panic!("{at} bytes passed, all do not"),
            (Verdict::Refused(why), Verdict::Complete(..)) => {
                panic!("{at} bytes were refused ({why:?}), all pass")
            }
            (Verdict::Partial, _) | (Verdict::Refused(_), Verdict::Refused(_)) => {}
        }
    }
}

fn check_meaning(request: &Request, head: &Head) {
    let (method, target, is_11) = head
        .request_line()
        .expect("a request line to a strict reader");
    assert_eq!(request.method.as_str().as_bytes(), method);
    assert_eq!(request.is_http10, !is_11);
    assert!(
        request.target.starts_with(b"/") || (request.target[..] == *b"*" && method == b"OPTIONS"),
        "a path"
    );
    assert!(
        target.ends_with(&request.target) || request.target[..] == *b"/",
        "of what was asked for"
    );
    let hosts = head.all("host").len();
    assert!(hosts == 1 || (hosts == 0 && !is_11), "{hosts} hosts");
    let lengths = head.all("content-length").len();
    let framing = match head
        .framing(is_11)
        .filter(|_| lengths <= 1)
        .expect("one framing")
    {
        naive::Framing::Unsaid | naive::Framing::Length(0) => Framing::None,
        naive::Framing::Length(n) => Framing::Length(n),
        naive::Framing::Chunked => Framing::Chunked,
    };
    assert_eq!(request.framing, framing);
    let closes = head.lists("connection", b"close");
    assert_eq!(
        request.keep_alive,
        !closes && (is_11 || head.lists("connection", b"keep-alive"))
    );
}

fn check_forward(request: &Request, head: &Head, forward: &[u8], limits: Limits, ids: &[String]) {
    let is_ours = |name: &[u8]| {
        let is = |other: &str| name.eq_ignore_ascii_case(other.as_bytes());
        is("host")
            || is("expect")
            || is("content-length")
            || (limits.is_rank_ours && is("x-data-parallel-rank"))
            || (limits.credentials != Credentials::Pass && is("authorization"))
            || (limits.credentials == Credentials::Take && is("x-api-key"))
    };
    let want: Vec<u8> = head
        .fields
        .iter()
        .filter(|(name, _)| !is_ours(name) && !head.is_for_one_hop(name))
        .flat_map(|(name, value)| [name, &b": "[..], value, b"\r\n"].concat())
        .collect();
    assert_eq!(
        String::from_utf8_lossy(forward),
        String::from_utf8_lossy(&want),
        "the end-to-end fields and no other"
    );
    let values = |name: &String| head.all(name).into_iter().find(|value| !value.is_empty());
    let one_hop = |name: &&String| !head.is_for_one_hop(name.as_bytes());
    let id = ids.iter().filter(one_hop).find_map(values);
    assert_eq!(
        request.request_id.clone().map(|range| &forward[range]),
        id,
        "the request's id"
    );
}

/// The request as a worker gets it is the same one to our own reader.
fn check_again(request: &Request, forward: &[u8], limits: Limits, ids: &[String]) {
    let line = format!("{} ", request.method.as_str());
    let mut message = [
        line.as_bytes(),
        &request.target,
        b" HTTP/1.1\r\nhost: worker:8000\r\n",
    ]
    .concat();
    match request.framing {
        Framing::Length(n) => {
            message.extend_from_slice(format!("content-length: {n}\r\n").as_bytes())
        }
        Framing::Chunked => message.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        _ => {}
    }
    let fields_at = message.len();
    message.extend_from_slice(forward);
    message.extend_from_slice(b"\r\n");
    let wide = Limits {
        head_bytes: 1 << 20,
        field_count: 512,
        is_rank_ours: limits.is_rank_ours,
        credentials: Credentials::Pass,
    };
    let mut again = Vec::new();
    let Verdict::Complete(reread, len) = parse(&message, wide, ids, &mut again) else {
        panic!(
            "what is sent is no request: {:?}",
            String::from_utf8_lossy(&message)
        );
    };
    assert_eq!(len, message.len(), "something hides behind it");
    assert_eq!(again, message[fields_at..len - 2], "the same fields");
    assert_eq!(
        (&reread.method, &reread.target),
        (&request.method, &request.target)
    );
    assert_eq!(
        (reread.framing, &reread.request_id),
        (request.framing, &request.request_id)
    );
}
