//! Which key wins, and what is none.

use super::*;

const SEED: KeySeed = KeySeed(7);

/// Header lines separated by `|`, and a body.
fn hash(head: &str, body: &str) -> Option<u64> {
    let lines = head.split('|').filter(|line| !line.is_empty());
    let head: String = lines.map(|line| format!("{line}\r\n")).collect();
    let fields = scan::scan(body.as_bytes()).expect("JSON");
    session_hash(SEED, head.as_bytes(), Some((body.as_bytes(), &fields)))
}

fn is(head: &str, body: &str, session: &str) {
    assert_eq!(
        hash(head, body),
        Some(session_hash_of(SEED, session)),
        "{head} {body}: not {session}"
    );
}

/// Each names a session by its value; all of them together name that of the first, without that one the next, and so on.
#[test]
fn the_order_of_keys() {
    let headers = [
        "X-Session-Id: a",
        "x-user-id: b",
        "x-tenant-id: c",
        "x-correlation-id: d",
        "x-request-id: e",
        "x-trace-id: f",
        "x-claude-code-session-id: g",
        "session-id: h",
    ];
    let body = [
        r#""prompt_cache_key":"i""#,
        r#""session_params":{"x":[],"session_id":"j"}"#,
        r#""user":"k""#,
        r#""vllm_xargs":{"agentic_context":{"program_id":"l"}}"#,
        r#""session_id":"m""#,
        r#""user_id":"n""#,
    ];
    let names: Vec<char> = ('a'..='n').collect();
    for (from, first) in names.iter().enumerate() {
        // Backwards: the order in which they stand does not matter.
        let mut head: Vec<&str> = headers.iter().skip(from).copied().collect();
        head.reverse();
        let skipped = from.saturating_sub(headers.len());
        let mut members: Vec<&str> = body.iter().skip(skipped).copied().collect();
        members.reverse();
        let body = format!(r#"{{"model":"m",{}}}"#, members.join(","));
        is(&head.join("|"), &body, &first.to_string());
    }
}

#[test]
fn two_parts_are_one_session() {
    for (head, session) in [
        (
            "x-claude-code-session-id: s|x-claude-code-agent-id: 7",
            "s/7",
        ),
        ("x-claude-code-session-id: s", "s"),
        ("session-id: s|thread-id: t", "s/t"),
        ("thread-id: t", "t"),
        ("Session-Id:  s \t", "s"),
    ] {
        is(head, "{}", session);
    }
    assert_eq!(hash("x-claude-code-agent-id: 7", "{}"), None);
    for (context, session) in [
        (r#"{"program_id":"p","session_id":"s"}"#, "p"),
        (r#"{"task_id":"t","agent_id":2,"session_id":"s"}"#, "s/2"),
        (r#"{"task_id":"t","agent_id":"a"}"#, "t"),
        (r#""{\"program_id\":\"p\\u0041\"}""#, "pA"),
        (r#""just a name""#, "just a name"),
        (r#""{no json""#, "{no json"),
    ] {
        let body = format!(r#"{{"vllm_xargs":{{"agentic_context":{context}}}}}"#);
        is("", &body, session);
    }
}

/// The same value is the same session wherever it stands.
#[test]
fn a_value_counts_and_not_its_place() {
    is("x-user-id: 42", "{}", "42");
    is("", r#"{"user":42}"#, "42");
    is("", r#"{"user":"42"}"#, "42");
    is("", r#"{"us\u0065r":"\u0034\u0032"}"#, "42");
    assert_ne!(
        session_hash_of(SEED, "42"),
        session_hash_of(KeySeed(8), "42")
    );
}

#[test]
fn what_is_no_key_is_passed_over() {
    for (head, body) in [
        ("", "{}"),
        ("x-session-id: |x-session-idx: a|x-session: b|host: c", "{}"),
        (
            "",
            r#"{"user":"","session_id":null,"user_id":[1],"prompt_cache_key":{}}"#,
        ),
        ("", r#"{"session_params":"session_id","vllm_xargs":[]}"#),
        (
            "",
            r#"{"session_params":{"session_id":null},"vllm_xargs":{"agentic_context":{}}}"#,
        ),
        ("", r#"{"vllm_xargs":{"agentic_context":"{}"}}"#),
        // In the prompt it is a word (vllm-router takes it for a key).
        (
            "",
            r#"{"prompt":"\"user\": \"a\"","messages":[{"user":"b","session_id":"c"}]}"#,
        ),
    ] {
        assert_eq!(hash(head, body), None, "{head} {body}");
    }
    is("x-session-id: |x-session-id: b", "{}", "b");
    is("x-session-id: |x-trace-id: t", "{}", "t");
    is("", r#"{"user":"a","user":"b"}"#, "b");
}

#[test]
fn the_head_alone_will_do() {
    let hash = session_hash(SEED, b"x-session-id: a\r\n", None);
    assert_eq!(hash, Some(session_hash_of(SEED, "a")));
    for head in [
        &b""[..],
        b"x-session-id: a",
        b"\r\n\r\n",
        b":\r\n",
        b"x-session-id\r\n",
    ] {
        assert_eq!(session_hash(SEED, head, None), None);
    }
}
