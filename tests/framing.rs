//! The framing table, judged by the parsers alone: every wire gets its row's verdict however its bytes are cut, and the docs
//! of `src/http/mod.rs` say the same, row for row. (`tests/hostile.rs` and `tests/http.rs` send the rows through the router.)

mod common;

use common::framing::{Rule, answers, requests};
use corelane::http::body::Framing;
use corelane::http::request::{Credentials, Verdict};
use corelane::http::response::Client;
use corelane::http::{Body, Limits, request, response};

/// The flags' defaults.
const LIMITS: Limits = Limits {
    head_bytes: 65_536,
    field_count: 256,
    is_rank_ours: false,
    credentials: Credentials::Pass,
};

/// What became of a message.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Refused(u16),
    /// Target or status, content, and how many bytes were left.
    Taken(String, Vec<u8>, usize),
    /// It is not over, and more bytes are needed.
    Open,
}

/// The lengths of pieces a wire is cut into: every one for a small wire.
fn pieces(wire: &[u8]) -> Vec<usize> {
    match wire.len() {
        0..1000 => (1..=wire.len()).collect(),
        n => vec![1460, 32_768, n],
    }
}

/// Follows a body through the rest of a message that comes in pieces. `Err`: broken.
fn content(
    framing: Framing,
    wire: &[u8],
    from: usize,
    piece: usize,
) -> Result<(Vec<u8>, usize, bool), ()> {
    let (mut body, mut content, mut at) = (Body::new(framing), Vec::new(), from);
    while at < wire.len() && !body.is_done() {
        let end = (at / piece + 1) * piece;
        let part = &wire[at..end.min(wire.len())];
        let progress = body
            .feed(part, |data| content.extend_from_slice(data))
            .map_err(drop)?;
        at += progress.consumed;
    }
    let is_over = body.is_done() || body.ends_with_connection();
    Ok((content, wire.len() - at, is_over))
}

/// As a session reads a request whose bytes come in pieces of this length.
fn judge_request(wire: &[u8], piece: usize) -> Outcome {
    let skipped = wire.iter().take_while(|b| b"\r\n".contains(b)).count();
    let wire = &wire[skipped..];
    for end in (piece..wire.len()).step_by(piece).chain([wire.len()]) {
        match request::parse(&wire[..end], LIMITS, &[], &mut Vec::new()) {
            Verdict::Partial => {}
            Verdict::Refused(refusal) => return Outcome::Refused(refusal.status),
            Verdict::Complete(request, head_bytes) => {
                return match content(request.framing, wire, head_bytes, piece) {
                    Err(()) => Outcome::Refused(400),
                    Ok((content, left, true)) => {
                        let target = String::from_utf8(request.target.into_vec()).unwrap();
                        Outcome::Taken(target, content, left)
                    }
                    Ok(_) => Outcome::Open,
                };
            }
        }
    }
    Outcome::Open
}

/// As a session reads an answer; the connection ends behind its last byte.
fn judge_answer(wire: &[u8], piece: usize) -> Outcome {
    let client = Client {
        is_http10: false,
        is_head: false,
        keep_alive: true,
        request_id: b"id",
        hides_workers_id: false,
        length: None,
        cors: b"",
    };
    for end in (piece..wire.len()).step_by(piece).chain([wire.len()]) {
        match response::parse(&wire[..end], client, &mut Vec::new()) {
            Ok(None) => {}
            Err(_) => return Outcome::Refused(502),
            Ok(Some((response, ..))) if response.status == 101 => return Outcome::Refused(502),
            Ok(Some((response, ..))) => {
                return match content(response.framing, wire, response.len_bytes, piece) {
                    Ok((content, left, true)) => {
                        Outcome::Taken(response.status.to_string(), content, left)
                    }
                    _ => Outcome::Refused(502),
                };
            }
        }
    }
    Outcome::Refused(502)
}

fn assert_verdicts(
    rules: &[Rule],
    judge: fn(&[u8], usize) -> Outcome,
    is_taken: fn(&Rule, &Outcome) -> bool,
) {
    let mut wrong = Vec::new();
    for rule in rules {
        assert!(!rule.wires.is_empty(), "{}", rule.input);
        for (what, wire) in &rule.wires {
            for piece in pieces(wire) {
                let outcome = judge(wire, piece);
                let is_right = match rule.refusal() {
                    Some(status) => outcome == Outcome::Refused(status),
                    None => is_taken(rule, &outcome),
                };
                if !is_right {
                    wrong.push(format!(
                        "{}: {what}, in pieces of {piece}: {outcome:?}",
                        rule.input
                    ));
                    break;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_request_of_the_table_gets_its_verdict_however_it_is_cut() {
    assert_verdicts(&requests(), judge_request, |_, outcome| {
        let wanted = |target: &str| Outcome::Taken(target.into(), b"{}".to_vec(), 0);
        *outcome == wanted("/x") || *outcome == wanted("*")
    });
}

#[test]
fn every_answer_of_the_table_gets_its_verdict_however_it_is_cut() {
    assert_verdicts(&answers(), judge_answer, |rule, outcome| match outcome {
        Outcome::Taken(status, body, left) => {
            let wanted: &[u8] = if status == "200" { b"ok" } else { b"" };
            body.as_slice() == wanted && (*left > 0) == rule.input.contains("behind its end")
        }
        _ => false,
    });
}

/// The rows of the docs, cell by cell.
fn documented() -> Vec<[String; 3]> {
    let text = include_str!("../src/http/mod.rs");
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | "));
    let cells = |row: &str| {
        let row = row.strip_suffix(" |").expect("a row ends in a bar");
        let cells: Vec<String> = row.split(" | ").map(|cell| cell.to_string()).collect();
        cells.try_into().expect("three cells")
    };
    rows.filter(|row| !row.starts_with("input |"))
        .map(cells)
        .collect()
}

#[test]
fn the_docs_have_the_rows_of_the_table() {
    let rules = requests().into_iter().chain(answers());
    let table: Vec<[String; 3]> = rules
        .map(|rule| [rule.input, rule.verdict, rule.source].map(String::from))
        .collect();
    for (n, row) in table.iter().enumerate() {
        let found = documented().get(n).cloned();
        assert_eq!(
            found.as_ref(),
            Some(row),
            "row {n}; the whole table:\n{}",
            as_docs(&table)
        );
    }
    assert_eq!(documented().len(), table.len(), "{}", as_docs(&table));
}

fn as_docs(table: &[[String; 3]]) -> String {
    let line = |row: &[String; 3]| format!("//! | {} |\n", row.join(" | "));
    table.iter().map(line).collect()
}
