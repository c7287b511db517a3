use serde_json::Value;

use super::*;
use crate::sim::workload::{Session, Turn};

fn shape(api: Api, is_stream: bool) -> Shape {
    Shape {
        api,
        model: "m\"1".into(),
        is_stream,
        prompt_bytes: 200,
        system_bytes: 0,
        output_tokens: 7,
        coalesces_events: false,
        fields: "x-a: b\r\n".into(),
        seed: 1,
    }
}

fn work(shape: Shape, kind: &Kind) -> Work {
    let target = Target::parse("http://127.0.0.1:9/p").unwrap();
    let mut work = Work::new(Arc::new(shape), kind, &target, (0, 1));
    work.restart();
    work
}

/// Head and JSON of a request.
fn read(request: &[u8]) -> (String, Value) {
    let text = std::str::from_utf8(request).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(
        head.contains(&format!("Content-Length: {}", body.len())),
        "{head} {}",
        body.len()
    );
    (
        head.to_owned(),
        serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}")),
    )
}

fn content(body: &Value, at: usize) -> &str {
    body["messages"][at]["content"].as_str().unwrap()
}

#[test]
fn single_prompts_have_their_length_and_differ_from_their_begin() {
    let mut work = work(shape(Api::Chat, true), &Kind::Single);
    let mut buffer = Vec::new();
    let (_, want) = work.write(&mut buffer);
    assert_eq!(
        want,
        Want {
            is_stream: true,
            events: Some(8),
            tokens: 7
        }
    );
    let (head, first) = read(&buffer);
    assert!(
        head.starts_with("POST /p/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:9\r\n"),
        "{head}"
    );
    assert!(head.contains("\r\nx-a: b\r\n"));
    assert_eq!(
        (&first["model"], &first["stream"], &first["max_tokens"]),
        (&"m\"1".into(), &true.into(), &7.into())
    );
    assert_eq!(
        (content(&first, 0).len(), first["ignore_eos"].clone()),
        (200, true.into())
    );
    work.write(&mut buffer);
    let (_, second) = read(&buffer);
    assert_ne!(content(&first, 0)[..16], content(&second, 0)[..16]);
    assert_eq!(content(&first, 0)[16..], content(&second, 0)[16..]);
}

#[test]
fn completions_are_asked_with_a_prompt_and_a_system_prompt_is_shared() {
    let shape = Shape {
        system_bytes: 50,
        ..shape(Api::Completions, false)
    };
    let mut work = work(shape, &Kind::Single);
    let mut buffers = [Vec::new(), Vec::new()];
    let wants = buffers.each_mut().map(|buffer| work.write(buffer).1);
    assert_eq!(
        wants[0],
        Want {
            is_stream: false,
            events: Some(7),
            tokens: 7
        }
    );
    let prompts = buffers
        .each_ref()
        .map(|buffer| read(buffer).1["prompt"].as_str().unwrap().to_owned());
    assert_eq!(prompts[0].len(), 50 + 1 + 200 + 1);
    assert_eq!(prompts[0][..51], prompts[1][..51]);
    assert_ne!(prompts[0][51..67], prompts[1][51..67]);
}

#[test]
fn a_conversation_repeats_what_was_said_and_ends_after_its_turns() {
    let kind = Kind::Conversations { turns: 3, count: 1 };
    for api in [Api::Chat, Api::Completions] {
        let mut work = work(
            Shape {
                system_bytes: 40,
                ..shape(api, true)
            },
            &kind,
        );
        let mut buffer = Vec::new();
        let mut before: Vec<u8> = Vec::new();
        for turn in 0..3 {
            let (ticket, _) = work.write(&mut buffer);
            let (head, body) = read(&buffer);
            assert!(head.contains("x-session-id: "));
            let at = memmem::find(&buffer, b"\r\n\r\n").unwrap();
            let end = memmem::rfind(&buffer, b",\"stream\"").unwrap() - 1;
            assert!(buffer[at..end].starts_with(&before), "turn {turn}");
            before = buffer[at..end].to_vec();
            if api == Api::Chat {
                let roles: Vec<&str> = body["messages"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|m| m["role"].as_str().unwrap())
                    .collect();
                assert_eq!(roles.len(), 2 + 2 * turn, "{roles:?}");
                assert_eq!((roles[0], *roles.last().unwrap()), ("system", "user"));
            }
            work.give_back(ticket, true, 0);
        }
        work.write(&mut buffer);
        let at = memmem::find(&buffer, b"\r\n\r\n").unwrap();
        assert!(
            buffer.len() < before.len() && !buffer[at..].starts_with(&before),
            "another one"
        );
    }
}

#[test]
fn more_conversations_begin_only_while_all_others_wait_for_answers() {
    let mut work = work(
        shape(Api::Chat, true),
        &Kind::Conversations {
            turns: 100,
            count: 2,
        },
    );
    let name = |work: &mut Work| {
        let mut buffer = Vec::new();
        let Ticket::Conversation(it) = work.write(&mut buffer).0 else {
            panic!()
        };
        (it.name, Ticket::Conversation(it))
    };
    let (a, ticket_a) = name(&mut work);
    let (b, ticket_b) = name(&mut work);
    let (c, ticket_c) = name(&mut work);
    assert!(a != b && b != c && a != c);
    for ticket in [ticket_b, ticket_a] {
        work.give_back(ticket, true, 0);
    }
    work.give_back(ticket_c, false, 0);
    assert_eq!(
        (name(&mut work).0, name(&mut work).0),
        (b, a),
        "who waits longest first"
    );
}

#[test]
fn a_trace_is_asked_in_its_order_with_shared_prefixes_shared() {
    let content = |runs: &[(u64, u32)]| {
        let mut content = Content::default();
        runs.iter()
            .for_each(|(name, tokens)| content.push(*name, *tokens));
        Arc::new(content)
    };
    let turn = |pause, content, output_tokens| Turn {
        pause,
        content,
        output_tokens,
    };
    let sessions = vec![
        Session {
            name: 5,
            start: 1000,
            turns: vec![
                turn(0, content(&[(1, 20), (2, 5)]), 3),
                turn(500, content(&[(1, 20), (2, 9)]), 4),
            ],
        },
        Session {
            name: 6,
            start: 1200,
            turns: vec![turn(0, content(&[(1, 20), (3, 5)]), 9)],
        },
    ];
    let workload = Arc::new(Workload {
        sessions,
        seats: None,
    });
    let mut work = work(shape(Api::Chat, false), &Kind::Trace(workload));
    let ask = |work: &mut Work, now: u64| {
        let due = work.due_ns();
        let mut buffer = Vec::new();
        let (ticket, want) = work.write(&mut buffer);
        work.give_back(ticket, true, now);
        (
            due,
            want.tokens,
            super::tests::content(&read(&buffer).1, 0).to_owned(),
        )
    };
    let first = ask(&mut work, 1050);
    let second = ask(&mut work, 1300);
    let third = ask(&mut work, 9999);
    assert_eq!(
        (first.0, second.0, third.0),
        (Some(1000), Some(1200), Some(1550))
    );
    assert_eq!((first.1, second.1, third.1), (3, 9, 4));
    assert_eq!(
        (first.2.len(), second.2.len(), third.2.len()),
        (100, 100, 116)
    );
    assert_eq!(first.2[..80], second.2[..80]);
    assert!(first.2[80..] != second.2[80..] && third.2.starts_with(&first.2));
    assert_eq!(work.due_ns(), None);
    work.restart();
    assert_eq!(work.due_ns(), Some(1000));
}
