//! A body's framing: its content and its end are those that a strict reader finds, in whatever pieces it comes.
//!
//! Input: a byte that says which framing and which pieces, then the wire.

use corelane::http::body::{Body, Broken, Framing, parse_length};

use crate::naive::{self, Why};

/// Content, how far it was read, and whether it is whole; or that it is broken, with what had come by then.
type Read = (Vec<u8>, Result<(usize, bool), Broken>);

fn read(wire: &[u8], framing: Framing, mut piece: impl FnMut() -> usize) -> Read {
    let mut body = Body::new(framing);
    let (mut content, mut at) = (Vec::new(), 0);
    while at < wire.len() && !body.is_done() {
        let end = (at + piece().max(1)).min(wire.len());
        match body.feed(&wire[at..end], |data| {
            assert!(
                !data.is_empty() || framing != Framing::Chunked,
                "an empty run of content"
            );
            content.extend_from_slice(data);
        }) {
            Ok(progress) => {
                assert_eq!(progress.done, body.is_done());
                assert!(
                    progress.consumed == end - at || progress.done,
                    "bytes were left out"
                );
                at += progress.consumed;
            }
            Err(broken) => return (content, Err(broken)),
        }
    }
    (content, Ok((at, body.is_done())))
}

pub fn chunks(data: &[u8]) {
    let Some((&how, wire)) = data.split_first() else {
        return;
    };
    check_length(&wire[..wire.len().min(24)]);
    let framing = match how & 7 {
        0 => Framing::Length(u64::from(how >> 3) * 3),
        1 => Framing::Close,
        _ => Framing::Chunked,
    };
    let whole = read(wire, framing, || usize::MAX / 2);
    let by_ones = read(wire, framing, || 1);
    assert_eq!(whole, by_ones, "one byte at a time");
    let mut state = u32::from(how) | 0x100;
    let pieces = read(wire, framing, || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as usize >> (how & 6)
    });
    assert_eq!(whole, pieces, "in pieces");
    match framing {
        Framing::Chunked => check_chunked(wire, whole),
        Framing::Length(n) => {
            let there = wire.len().min(n as usize);
            assert_eq!(
                whole,
                (wire[..there].to_vec(), Ok((there, there as u64 == n)))
            );
        }
        _ => assert_eq!(whole, (wire.to_vec(), Ok((wire.len(), false)))),
    }
}

fn check_chunked(wire: &[u8], (content, end): Read) {
    let (want, verdict) = naive::unchunk(wire);
    match (end, verdict) {
        (Ok((at, true)), verdict) => assert_eq!((verdict, &content), (Ok(at), &want)),
        (Ok((_, false)), verdict) => {
            assert_eq!((verdict, &content), (Err(Why::Partial), &want));
        }
        // Lines and trailers have their limits.
        (Err(Broken), verdict) => assert!(
            verdict != Ok(wire.len()) && verdict.is_err() || wire.len() > 4096,
            "a sound body was refused"
        ),
    }
}

fn check_length(text: &[u8]) {
    let is_plain = !text.is_empty() && text.len() <= 19 && text.iter().all(u8::is_ascii_digit);
    let number = std::str::from_utf8(text).ok().filter(|_| is_plain);
    let number = number
        .and_then(|text| text.parse::<u64>().ok())
        .filter(|n| *n < 1 << 63);
    assert_eq!(parse_length(text), number);
}
