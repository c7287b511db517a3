//! A worker's answer's head, and the head that the client gets of it: one framing in each, and they agree.
//!
//! Input: two bytes of settings, then the worker's.

use corelane::http::body::Framing;
use corelane::http::response::{Client, Relay, Response, parse};

use crate::naive::{self, Head};

pub fn response_head(data: &[u8]) {
    let Some((settings, wire)) = data.split_at_checked(2) else {
        return;
    };
    let bits = settings[0];
    let client = Client {
        is_http10: bits & 1 != 0,
        is_head: bits & 2 != 0,
        keep_alive: bits & 4 != 0,
        request_id: if bits & 8 != 0 { b"id-1" } else { b"" },
        hides_workers_id: bits & 16 != 0,
        length: None,
        cors: b"",
    };
    let mut out = Vec::new();
    let parsed = parse(wire, client, &mut out);
    for at in [
        usize::from(settings[1]) % (wire.len() + 1),
        wire.len().saturating_sub(1),
    ] {
        let mut early_out = Vec::new();
        let early = parse(&wire[..at], client, &mut early_out);
        match (early, &parsed) {
            (Ok(None), Ok(Some((head, ..)))) => {
                assert!(at < head.len_bytes, "it was whole at {at}")
            }
            (Ok(Some((early, ..))), Ok(Some((late, ..)))) => {
                assert_eq!(early.len_bytes, late.len_bytes, "split at {at}");
                assert_eq!(early_out, out, "split at {at}");
            }
            (Ok(Some(_)), _) => panic!("{at} bytes passed, all do not"),
            (Err(why), Ok(_)) => panic!("{at} bytes were refused ({why:?}), all are not"),
            _ => {}
        }
    }
    let Ok(Some((response, relay, keep_alive))) = parsed else {
        assert!(out.is_empty(), "written of what is none");
        return;
    };
    let head = naive::head(wire).expect("what is accepted is a head to a strict reader");
    assert_eq!(response.len_bytes, head.len, "where it ends");
    let (status, is_11) = head.status_line().expect("a status line");
    assert_eq!(response.status, status);
    if status < 200 {
        return check_interim(status, client, &out);
    }
    let framing = head.framing(is_11).expect("one framing");
    let has_body = !client.is_head && status != 204 && status != 304;
    let want = match framing {
        _ if !has_body => Framing::None,
        naive::Framing::Unsaid => Framing::Close,
        naive::Framing::Length(0) => Framing::None,
        naive::Framing::Length(n) => Framing::Length(n),
        naive::Framing::Chunked => Framing::Chunked,
    };
    assert_eq!(response.framing, want, "the worker's framing");
    let sent = naive::head(&out).expect("a head to the client");
    assert_eq!(sent.len, out.len(), "something hides behind it");
    assert_eq!(sent.status_line(), Some((status, true)));
    check_framing(&response, relay, client, &sent, framing, has_body);
    let closes = sent.lists("connection", b"close");
    assert_eq!(
        closes, !keep_alive,
        "whether the connection lives on is said"
    );
    assert!(
        client.keep_alive || closes,
        "a client that wants it closed is told so"
    );
    check_fields(&head, &sent, client);
}

fn check_interim(status: u16, client: Client<'_>, out: &[u8]) {
    if out.is_empty() {
        return;
    }
    assert!(!client.is_http10 && status != 100 && status != 101);
    let sent = naive::head(out).expect("a head to the client");
    assert_eq!(sent.len, out.len(), "something hides behind it");
    assert_eq!(sent.status_line(), Some((status, true)));
    assert_eq!(sent.framing(true), Some(naive::Framing::Unsaid));
}

fn check_framing(
    response: &Response,
    relay: Relay,
    client: Client<'_>,
    sent: &Head,
    came: naive::Framing,
    has_body: bool,
) {
    let said = sent.framing(true).expect("one framing for the client");
    assert!(sent.all("content-length").len() <= 1);
    match (relay, response.framing) {
        (Relay::AsIs, Framing::Length(n)) => assert_eq!(said, naive::Framing::Length(n)),
        (Relay::AsIs | Relay::Chunks, _) => {
            assert_eq!(said, naive::Framing::Chunked);
            assert!(!client.is_http10, "chunks for HTTP/1.0");
        }
        (Relay::Unframed, _) => {
            assert_eq!(said, naive::Framing::Unsaid);
            assert!(
                sent.lists("connection", b"close"),
                "only the connection's end ends it"
            );
        }
        (Relay::Nothing, framing) => {
            assert_eq!(framing, Framing::None);
            if has_body {
                assert_eq!(
                    said,
                    naive::Framing::Length(0),
                    "a client must not wait for a body"
                );
            }
            let is_about_get = !has_body && response.status != 204;
            let is_length = matches!(said, naive::Framing::Length(_));
            assert!(said != naive::Framing::Chunked);
            assert!(
                !is_length || !is_about_get || said == came,
                "another length than the worker's"
            );
            assert!(response.status != 204 || !is_length, "a length with 204");
        }
    }
}

fn check_fields(came: &Head, sent: &Head, client: Client<'_>) {
    let is = |name: &[u8], other: &str| name.eq_ignore_ascii_case(other.as_bytes());
    let want = came.fields.iter().filter(|(name, _)| {
        let is_hidden = client.hides_workers_id && is(name, "x-request-id");
        !came.is_for_one_hop(name) && !is(name, "content-length") && !is_hidden
    });
    let mut want: Vec<_> = want.cloned().collect();
    if !client.request_id.is_empty() && !want.iter().any(|(name, _)| is(name, "x-request-id")) {
        want.push((b"x-request-id".to_vec(), client.request_id.to_vec()));
    }
    let ours = ["content-length", "transfer-encoding", "connection"];
    let got = sent
        .fields
        .iter()
        .filter(|(name, _)| !ours.iter().any(|other| is(name, other)));
    assert_eq!(
        got.cloned().collect::<Vec<_>>(),
        want,
        "the end-to-end fields and no other"
    );
}
