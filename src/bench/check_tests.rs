use super::*;

const STREAM: Want = Want {
    is_stream: true,
    events: Some(2),
    tokens: 2,
};
const PLAIN: Want = Want {
    is_stream: false,
    events: None,
    tokens: 2,
};
const EVENTS: &str = "data: {\"a\":1}\n\ndata: {\"a\":2}\n\ndata: [DONE]\n\n";

/// A stream, with its content cut into chunks of so many bytes.
fn chunked(content: &str, size: usize) -> Vec<u8> {
    let mut wire =
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            .to_vec();
    for chunk in content.as_bytes().chunks(size) {
        wire.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        wire.extend_from_slice(chunk);
        wire.extend_from_slice(b"\r\n");
    }
    wire.extend_from_slice(b"0\r\n\r\n");
    wire
}

fn plain(status: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// The verdict on what comes in pieces of this size, and the events seen; `None`: no end yet.
fn judge(want: Want, wire: &[u8], piece: usize) -> (Option<Result<(), Wrong>>, u32) {
    let mut check = Check::new(want);
    let mut events = 0;
    for part in wire.chunks(piece) {
        let fed = check.feed(part);
        events += fed.events;
        if fed.end.is_some() {
            return (fed.end, events);
        }
    }
    (None, events)
}

#[test]
fn a_right_answer_is_right_in_whatever_pieces_it_comes() {
    let body = r#"{"id":"x","usage":{"prompt_tokens": 9, "completion_tokens" : 2}}"#;
    for size in [1, 3, 16, 1000] {
        let stream = chunked(EVENTS, size);
        for piece in [1, 2, 7, 64, stream.len()] {
            assert_eq!(
                judge(STREAM, &stream, piece),
                (Some(Ok(())), 2),
                "{size} {piece}"
            );
        }
    }
    let wire = plain("200 OK", body);
    for piece in 1..wire.len() {
        assert_eq!(judge(PLAIN, &wire, piece).0, Some(Ok(())), "{piece}");
    }
    let interim = [b"HTTP/1.1 103 Early Hints\r\n\r\n".to_vec(), wire].concat();
    assert_eq!(judge(PLAIN, &interim, 5).0, Some(Ok(())));
    let crlf = chunked(&EVENTS.replace('\n', "\r\n"), 9);
    assert_eq!(judge(STREAM, &crlf, 11), (Some(Ok(())), 2));
}

#[test]
fn each_fault_has_its_kind() {
    let stream = |content: &str| chunked(content, 10);
    let error = "data: {\"error\": {\"message\": \"gone\"}}\n\n";
    let table = [
        (
            STREAM,
            stream(&EVENTS.replace("data: [DONE]\n\n", "")),
            Wrong::NoDone,
        ),
        (
            STREAM,
            stream("data: {}\n\ndata: [DONE]\n\n"),
            Wrong::EventCount,
        ),
        (
            STREAM,
            stream(&format!("data: {{}}\n\n{EVENTS}")),
            Wrong::EventCount,
        ),
        (
            STREAM,
            stream(&format!("{EVENTS}data: {{}}\n\n")),
            Wrong::AfterDone,
        ),
        (
            STREAM,
            stream(&format!("{EVENTS}data: {{")),
            Wrong::AfterDone,
        ),
        (
            STREAM,
            stream(&format!("{error}{EVENTS}")),
            Wrong::ErrorEvent,
        ),
        (STREAM, plain("200 OK", "{}"), Wrong::Content),
        (PLAIN, stream(EVENTS), Wrong::Content),
        (
            PLAIN,
            plain("200 OK", r#"{"usage":{"completion_tokens":3}}"#),
            Wrong::Tokens,
        ),
        (PLAIN, plain("200 OK", "{}"), Wrong::Tokens),
        (
            PLAIN,
            plain("200 OK", r#"{"usage":{"completion_tokens":2}"x"#),
            Wrong::Content,
        ),
        (STREAM, plain("503 Busy", "{}"), Wrong::Status(503)),
        (
            PLAIN,
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n".to_vec(),
            Wrong::Framing("the answer's Content-Length is malformed"),
        ),
    ];
    for (want, wire, wrong) in table {
        for piece in [1, 13, wire.len()] {
            let (end, _) = judge(want, &wire, piece);
            assert_eq!(
                end,
                Some(Err(wrong.clone())),
                "{}",
                String::from_utf8_lossy(&wire)
            );
        }
    }
    let twice = [plain("200 OK", r#"{"completion_tokens":2}"#), b"x".to_vec()].concat();
    assert_eq!(
        judge(PLAIN, &twice, twice.len()).0,
        Some(Err(Wrong::Framing("bytes after the end")))
    );
    let broken = String::from_utf8(stream(EVENTS))
        .unwrap()
        .replacen("a\r\n", "zz\r\n", 1);
    assert_eq!(
        judge(STREAM, broken.as_bytes(), 9).0,
        Some(Err(Wrong::Framing("the chunks are broken")))
    );
}

#[test]
fn an_answer_that_stops_in_the_middle_is_wrong_unless_the_connections_end_is_its_end() {
    let wire = chunked(EVENTS, 10);
    for cut in 0..wire.len() - 1 {
        let mut check = Check::new(STREAM);
        assert!(check.feed(&wire[..cut]).end.is_none());
        assert_eq!(check.end(), Err(Wrong::Closed), "{cut}");
    }
    let mut check = Check::new(PLAIN);
    let wire =
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{\"completion_tokens\":2}";
    assert!(check.feed(wire).end.is_none());
    assert_eq!((check.end(), check.keep_alive()), (Ok(()), false));
    check.reset(STREAM);
    assert_eq!(check.end(), Err(Wrong::Closed));
}

#[test]
fn where_events_may_hold_several_tokens_any_number_but_none_is_right() {
    let want = Want {
        events: None,
        ..STREAM
    };
    assert_eq!(judge(want, &chunked(EVENTS, 10), 9).0, Some(Ok(())));
    assert_eq!(
        judge(want, &chunked("data: [DONE]\n\n", 10), 9).0,
        Some(Err(Wrong::EventCount))
    );
}
