//! The bodies of both legs, and the usage that the client sees: tables, and comparisons with `serde_json`.

use serde_json::{Map, Value, json};

use super::*;
use crate::route::{Rng, scan};

const KV: &str = r#"{"do_remote_decode":true}"#;

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn plan_of(route: Route, body: &str) -> LegPlan {
    plan(route, body.as_bytes()).unwrap_or_else(|error| panic!("{error:?}: {body}"))
}

/// Writes behind what is there already, and checks the length that was promised.
fn written(promised_bytes: usize, write: impl FnOnce(&mut Vec<u8>)) -> String {
    let mut out = b"head".to_vec();
    write(&mut out);
    let body = out.strip_prefix(b"head").unwrap();
    assert_eq!(body.len(), promised_bytes, "{}", text(body));
    text(body).to_owned()
}

fn prefill(route: Route, body: &str) -> String {
    let plan = plan_of(route, body);
    written(plan.prefill_bytes(KV.len()), |out| {
        write_prefill(body.as_bytes(), &plan, KV.as_bytes(), out)
    })
}

fn decode(body: &str, kv_params: Option<&str>) -> String {
    let plan = plan_of(Route::ChatCompletions, body);
    let kv_params = kv_params.map(str::as_bytes);
    written(plan.decode_bytes(kv_params.map(<[u8]>::len)), |out| {
        write_decode(body.as_bytes(), &plan, kv_params, out)
    })
}

/// In `expected`, `@` stands for the parameters with their name.
fn with_kv(expected: &str) -> String {
    expected.replace('@', &format!("\"kv_transfer_params\":{KV}"))
}

#[test]
fn prefill_makes_one_token_and_no_stream() {
    use Route::*;
    let cases = [
        // Limits, whatever their values; the one that is missing.
        (ChatCompletions, r#"{}"#, r#"{"max_tokens":1,@}"#),
        (ChatCompletions, " { }\n", " { \"max_tokens\":1,@}\n"),
        (
            ChatCompletions,
            r#"{"a":1e400, "max_tokens" : 512 ,"b":[ ]}"#,
            r#"{"a":1e400, "max_tokens" : 1 ,"b":[ ],@}"#,
        ),
        (
            ChatCompletions,
            r#"{"max_completion_tokens":null}"#,
            r#"{"max_completion_tokens":1,@}"#,
        ),
        (
            ChatCompletions,
            r#"{"max_tokens":"7","max_completion_tokens":{"a":[2]}}"#,
            r#"{"max_tokens":1,"max_completion_tokens":1,@}"#,
        ),
        (
            Completions,
            r#"{"max_completion_tokens":5}"#,
            r#"{"max_completion_tokens":1,"max_tokens":1,@}"#,
        ),
        (
            Responses,
            r#"{"input":"a"}"#,
            r#"{"input":"a","max_output_tokens":1,@}"#,
        ),
        (
            Responses,
            r#"{"max_output_tokens":9}"#,
            r#"{"max_output_tokens":1,@}"#,
        ),
        (
            Responses,
            r#"{"max_tokens":9}"#,
            r#"{"max_tokens":1,"max_output_tokens":1,@}"#,
        ),
        (
            Generate,
            r#"{"text":"a"}"#,
            r#"{"text":"a","max_tokens":1,@}"#,
        ),
        (
            Generate,
            r#"{"text":"a","sampling_params":{"max_tokens":4}}"#,
            r#"{"text":"a","sampling_params":{"max_tokens":1},"max_tokens":1,@}"#,
        ),
        (Other, r#"{"max_tokens":2}"#, r#"{"max_tokens":1,@}"#),
        // One level into sampling_params, no deeper, and nowhere else.
        (
            InferenceGenerate,
            r#"{"token_ids":[1]}"#,
            r#"{"token_ids":[1],"sampling_params":{"max_tokens":1},@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params": { } }"#,
            r#"{"sampling_params": { "max_tokens":1} ,@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"seed":1 },"max_tokens":3}"#,
            r#"{"sampling_params":{"seed":1 ,"max_tokens":1},"max_tokens":1,@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{ "max_tokens":99,"min_tokens":3, "stream":true}}"#,
            r#"{"sampling_params":{ "max_tokens":1,"min_tokens":1, "stream":true},@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":null}"#,
            r#"{"sampling_params":{"max_tokens":1},@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":"x"}"#,
            r#"{"sampling_params":"x",@}"#,
        ),
        (
            ChatCompletions,
            r#"{"x":{"max_tokens":7,"stream":true},"max_tokens":1}"#,
            r#"{"x":{"max_tokens":7,"stream":true},"max_tokens":1,@}"#,
        ),
        // Stream.
        (
            ChatCompletions,
            r#"{"max_tokens":1,"stream": true }"#,
            r#"{"max_tokens":1,"stream": false ,@}"#,
        ),
        (
            ChatCompletions,
            r#"{"max_tokens":1,"stream":false}"#,
            r#"{"max_tokens":1,"stream":false,@}"#,
        ),
        (
            ChatCompletions,
            r#"{"max_tokens":1,"stream":null}"#,
            r#"{"max_tokens":1,"stream":null,@}"#,
        ),
        (
            ChatCompletions,
            r#"{"max_tokens":1,"stream":1}"#,
            r#"{"max_tokens":1,"stream":false,@}"#,
        ),
        // Names with escapes, names that come twice.
        (
            ChatCompletions,
            r#"{"max\u005ftokens":7,"stre\u0061m":true,"a":"max_tokens","max_tokens":8,"stream":true}"#,
            r#"{"max\u005ftokens":1,"stre\u0061m":false,"a":"max_tokens","max_tokens":1,"stream":false,@}"#,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"max_tokens":7},"sampling\u005fparams":{"m\u0061x_tokens":8}}"#,
            r#"{"sampling_params":{"max_tokens":1},"sampling\u005fparams":{"m\u0061x_tokens":1},@}"#,
        ),
    ];
    for (route, body, expected) in cases {
        assert_eq!(prefill(route, body), with_kv(expected), "{route:?} {body}");
    }
}

#[test]
fn prefill_asks_for_no_more_tokens_than_it_may_make() {
    let cases = [
        ("2", "1"),
        ("99999999999999999999999999", "1"),
        ("2.0", "1"),
        ("3e1", "1"),
        ("1", "1"),
        ("0", "0"),
        ("-5", "-5"),
        ("1.5", "1.5"),
        ("null", "null"),
        ("\"7\"", "\"7\""),
        ("Infinity", "Infinity"),
        ("[7]", "[7]"),
    ];
    for (value, expected) in cases {
        let body = format!(r#"{{"max_tokens":3,"min_tokens":{value}}}"#);
        let wanted = with_kv(&format!(r#"{{"max_tokens":1,"min_tokens":{expected},@}}"#));
        assert_eq!(prefill(Route::Completions, &body), wanted);
        let body = format!(r#"{{"sampling_params":{{"min_tokens":{value},"max_tokens":3}}}}"#);
        let wanted = with_kv(&format!(
            r#"{{"sampling_params":{{"min_tokens":{expected},"max_tokens":1}},@}}"#
        ));
        assert_eq!(prefill(Route::InferenceGenerate, &body), wanted);
    }
}

/// In `body`, `~` stands for a member that is taken away.
const CUTS: &[(&str, &str)] = &[
    ("{~}", "{"),
    ("{ \n~\t }", "{ \n\t "),
    ("{~,~}", "{"),
    ("{ ~ , ~ }", "{  "),
    (r#"{~,"a":1}"#, r#"{"a":1,"#),
    (r#"{ ~ , "a":1 }"#, r#"{ "a":1 ,"#),
    (r#"{ ~ ,~, "a":1 }"#, r#"{ "a":1 ,"#),
    (r#"{"a":1,~}"#, r#"{"a":1,"#),
    (r#"{"a":1 , ~ }"#, r#"{"a":1 ,"#),
    (r#"{"a":1, ~,~ }"#, r#"{"a":1 ,"#),
    (r#"{"a":1 , ~ , "b":2}"#, r#"{"a":1 , "b":2,"#),
    (r#"{~,"a":1,~,"b":2,~}"#, r#"{"a":1,"b":2,"#),
];

#[test]
fn what_is_taken_away_takes_one_comma_with_it() {
    for removed in [
        r#""kv_transfer_params" : {"a":[1,2],"b":"}"}"#,
        r#""kv\u005ftransfer_params":null"#,
        r#""stream_options":{"include_usage":true}"#,
        r#""stream_options":",\"}""#,
    ] {
        for (pattern, expected) in CUTS {
            let body = pattern.replace('~', removed);
            let limit = r#""max_tokens":1,@}"#;
            let wanted = with_kv(&format!("{expected}{limit}"));
            assert_eq!(prefill(Route::ChatCompletions, &body), wanted, "{body}");
            if removed.contains("transfer") {
                let wanted = with_kv(&format!("{expected}@}}"));
                assert_eq!(decode(&body, Some(KV)), wanted, "{body}");
                let without = expected.strip_suffix(',').unwrap_or(expected);
                assert_eq!(decode(&body, None), format!("{without}}}"), "{body}");
            }
        }
    }
}

#[test]
fn decode_differs_in_the_parameters_only() {
    let body = "{ \"n\":1.0 ,\"max_tokens\":\t7,\"min_tokens\":2,\"stream\":true,\"stream_options\":{},\
                \"sampling_params\":{\"max_tokens\":4},\"é\":\"\\ud83d\",\"x\":1e-400} \n";
    assert_eq!(decode(body, None), body);
    let wanted = body.replace("1e-400}", &with_kv("1e-400,@}"));
    assert_eq!(decode(body, Some(KV)), wanted);
    // Here the legs disagree about which member is the first that stays.
    let body = r#"{"stream_options":1,"kv_transfer_params":2,"a":3}"#;
    assert_eq!(decode(body, None), r#"{"stream_options":1,"a":3}"#);
    assert_eq!(
        prefill(Route::Messages, body),
        with_kv(r#"{"a":3,"max_tokens":1,@}"#)
    );
    assert_eq!(decode("{}", Some(KV)), with_kv("{@}"));
}

#[test]
fn a_release_is_a_prefill_with_the_parameters_of_decode() {
    let body = r#"{"kv_transfer_params":{},"max_tokens":50,"stream":true,"stream_options":{}}"#;
    let plan = plan_of(Route::ChatCompletions, body);
    let released = written(plan.prefill_bytes(7), |out| {
        write_release(body.as_bytes(), &plan, br#"{"b":2}"#, out)
    });
    assert_eq!(
        released,
        r#"{"max_tokens":1,"stream":false,"kv_transfer_params":{"b":2}}"#
    );
}

#[test]
fn what_cannot_be_split_is_told_with_its_reason() {
    use Route::*;
    let cases = [
        (ChatCompletions, r#"{"n":1,"best_of":1}"#, None),
        (ChatCompletions, r#"{"n":null}"#, None),
        (ChatCompletions, r#"{"n":0}"#, None),
        (ChatCompletions, r#"{"n":1.0}"#, None),
        (ChatCompletions, r#"{"x":{"n":2}}"#, None),
        (ChatCompletions, r#"{"n":2}"#, Some(Whole::SeveralChoices)),
        (ChatCompletions, r#"{"n":"2"}"#, Some(Whole::SeveralChoices)),
        (
            ChatCompletions,
            r#"{"\u006e":2}"#,
            Some(Whole::SeveralChoices),
        ),
        (Completions, r#"{"best_of":3}"#, Some(Whole::SeveralChoices)),
        (ChatCompletions, r#"{"use_beam_search":false}"#, None),
        (
            ChatCompletions,
            r#"{"use_beam_search":true}"#,
            Some(Whole::BeamSearch),
        ),
        (ChatCompletions, r#"{"prompt_logprobs":null}"#, None),
        (
            ChatCompletions,
            r#"{"prompt_logprobs":0}"#,
            Some(Whole::PromptLogprobs),
        ),
        (
            ChatCompletions,
            r#"{"logprobs":true,"top_logprobs":2}"#,
            None,
        ),
        (Completions, r#"{"echo":false}"#, None),
        (Completions, r#"{"echo":null}"#, None),
        (Completions, r#"{"echo":true}"#, Some(Whole::Echo)),
        (Completions, r#"{"prompt_embeds":null}"#, None),
        (
            Completions,
            r#"{"prompt_embeds":"AA=="}"#,
            Some(Whole::Embeds),
        ),
        (Completions, r#"{"prompt":"a"}"#, None),
        (Completions, r#"{"prompt":[]}"#, None),
        (Completions, r#"{"prompt":[1,2,3]}"#, None),
        (Completions, r#"{"prompt":[ "a" ]}"#, None),
        (Completions, r#"{"prompt":[[1,2]]}"#, None),
        (
            Completions,
            r#"{"prompt":[ "a\",\"" , "b"]}"#,
            Some(Whole::Batch),
        ),
        (
            Completions,
            r#"{"prompt":[[1,2] ,[3]]}"#,
            Some(Whole::Batch),
        ),
        (Generate, r#"{"text":["a","b"]}"#, Some(Whole::Batch)),
        (Generate, r#"{"input_ids":[[1],[2]]}"#, Some(Whole::Batch)),
        (Generate, r#"{"input_ids":[1,2]}"#, None),
        (ChatCompletions, r#"{"text":["a","b"]}"#, None),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"n":1,"logprobs":0}}"#,
            None,
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"seed":1,"n":4}}"#,
            Some(Whole::SeveralChoices),
        ),
        (
            ChatCompletions,
            r#"{"sampling_params":{"best_of":4}}"#,
            Some(Whole::SeveralChoices),
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"use_beam_search":true}}"#,
            Some(Whole::BeamSearch),
        ),
        (
            InferenceGenerate,
            r#"{"sampling_params":{"prompt_logprobs":1}}"#,
            Some(Whole::PromptLogprobs),
        ),
    ];
    for (route, body, expected) in cases {
        assert_eq!(plan_of(route, body).whole(), expected, "{route:?} {body}");
    }
}

#[test]
fn reads_what_the_decode_leg_needs_of_a_prefill_answer() {
    type Found<'t> = [Option<&'t str>; 3];
    let cases: [(&str, Found); 9] = [
        ("{}", [None, None, None]),
        (
            r#"{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}},
                "kv_transfer_params": {"remote_block_ids":[[1, 2]]} }"#,
            [
                Some(r#"{"remote_block_ids":[[1, 2]]}"#),
                Some("7"),
                Some(r#"{"cached_tokens":4}"#),
            ],
        ),
        (
            r#"{"usage":{"input_tokens":7,"input_tokens_details":{}}}"#,
            [None, Some("7"), Some("{}")],
        ),
        (
            r#"{"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}"#,
            [None, Some("7"), None],
        ),
        (
            r#"{"usage":null,"kv_transfer_params":null}"#,
            [None, None, None],
        ),
        (r#"{"kv_transfer_params":"x"}"#, [None, None, None]),
        (
            r#"{"kv_transfer_params":{},"kv_transfer_params":[]}"#,
            [None, None, None],
        ),
        (
            r#"{"usage":{"prompt_tokens":7},"us\u0061ge":{"prompt_tokens_details":{}}}"#,
            [None, None, Some("{}")],
        ),
        (
            r#"{"x":{"kv_transfer_params":{},"usage":{"prompt_tokens":1}}}"#,
            [None, None, None],
        ),
    ];
    for (body, expected) in cases {
        let bytes = body.as_bytes();
        let answer = read_prefill_answer(bytes).unwrap();
        let fields = [
            answer.kv_transfer_params,
            answer.prompt_tokens,
            answer.prompt_tokens_details,
        ];
        let found = fields.map(|field| field.map(|field| text(field.raw(bytes))));
        assert_eq!(found, expected, "{body}");
        for length in 0..bytes.len() {
            assert!(
                read_prefill_answer(&bytes[..length]).is_err(),
                "{body} {length}"
            );
        }
    }
    for body in ["upstream error", "[]", "{} {}", "{\"a\":\"\n\"}"] {
        assert!(read_prefill_answer(body.as_bytes()).is_err(), "{body}");
    }
}

fn fix_of(answer: &str) -> UsageFix {
    let read = read_prefill_answer(answer.as_bytes()).unwrap();
    UsageFix::new(answer.as_bytes(), &read).unwrap()
}

fn with_details() -> UsageFix {
    fix_of(r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}"#)
}

#[test]
fn figures_that_are_no_figures_make_no_fix() {
    for answer in [
        "{}",
        r#"{"usage":{"prompt_tokens":null}}"#,
        r#"{"usage":{"prompt_tokens":"7"}}"#,
        r#"{"usage":{"prompt_tokens":-7}}"#,
    ] {
        let read = read_prefill_answer(answer.as_bytes()).unwrap();
        assert_eq!(UsageFix::new(answer.as_bytes(), &read), None, "{answer}");
    }
    // What goes into a line of an event stream must not end it.
    let fix = fix_of("{\"usage\":{\"prompt_tokens\":1,\"prompt_tokens_details\":{\r\n\"a\":2\n}}}");
    assert_eq!(fix.details.as_deref(), Some(b"{  \"a\":2 }".as_slice()));
}

#[test]
fn the_client_sees_the_usage_of_prefill() {
    let cases = [
        // All three figures; completion counts and all else stay.
        (
            r#"{"id":"x", "usage" : {"prompt_tokens": 101 ,"total_tokens":111,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":101}}, "z":1e400} "#,
            r#"{"id":"x", "usage" : {"prompt_tokens": 100 ,"total_tokens":110,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":64}}, "z":1e400} "#,
        ),
        // The total stands first; no details, or null.
        (
            r#"{"usage":{"total_tokens":14,"prompt_tokens":4 }}"#,
            r#"{"usage":{"total_tokens":110,"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64} }}"#,
        ),
        (
            r#"{"usage":{"prompt_tokens_details":null,"prompt_tokens":4}}"#,
            r#"{"usage":{"prompt_tokens_details":{"cached_tokens":64},"prompt_tokens":100}}"#,
        ),
        // The words of /v1/responses, at both places.
        (
            r#"{"usage":{"input_tokens":4,"output_tokens":1,"total_tokens":5}}"#,
            r#"{"usage":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":1,"total_tokens":101}}"#,
        ),
        (
            r#"{"type":"response.completed","response":{"id":1,"usage":{"input_tokens_details":{"cached_tokens":4},"input_tokens":4,"total_tokens":5}}}"#,
            r#"{"type":"response.completed","response":{"id":1,"usage":{"input_tokens_details":{"cached_tokens":64},"input_tokens":100,"total_tokens":101}}}"#,
        ),
        // Totals that no count of the prompt is in stay.
        (
            r#"{"usage":{"prompt_tokens":4,"prompt_tokens_details":1,"total_tokens":3}}"#,
            r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64},"total_tokens":3}}"#,
        ),
        (
            r#"{"usage":{"prompt_tokens":4,"prompt_tokens_details":1,"total_tokens":null}}"#,
            r#"{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64},"total_tokens":null}}"#,
        ),
        // Twice, and with escapes.
        (
            r#"{"usage":{"prompt_tokens":1,"prompt\u005ftokens":4,"total_tokens":5,"total_tokens":9,"prompt_tokens_details":1,"prompt_tokens_details":2},"us\u0061ge":{"input_tokens":4,"input_tokens_details":0}}"#,
            r#"{"usage":{"prompt_tokens":100,"prompt\u005ftokens":100,"total_tokens":101,"total_tokens":105,"prompt_tokens_details":{"cached_tokens":64},"prompt_tokens_details":{"cached_tokens":64}},"us\u0061ge":{"input_tokens":100,"input_tokens_details":{"cached_tokens":64}}}"#,
        ),
    ];
    let fix = with_details();
    for (body, expected) in cases {
        let mut out = b"before".to_vec();
        assert!(fix_usage(body.as_bytes(), &fix, &mut out), "{body}");
        assert_eq!(text(&out), format!("before{expected}"));
    }
    // Without details of prefill's, decode's stay.
    let fix = fix_of(r#"{"usage":{"prompt_tokens":100}}"#);
    let mut out = Vec::new();
    let body = r#"{"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":4}}}"#;
    assert!(fix_usage(body.as_bytes(), &fix, &mut out));
    assert_eq!(text(&out), body.replace("tokens\":4,", "tokens\":100,"));
}

#[test]
fn nothing_is_written_where_there_is_nothing_to_fix() {
    for body in [
        "",
        "[DONE]",
        "{}",
        "[1]",
        r#"{"usage":null}"#,
        r#"{"usage":"prompt_tokens"}"#,
        r#"{"usage":{"completion_tokens":4}}"#,
        r#"{"usage":{"prompt_tokens":null}}"#,
        r#"{"choices":[{"usage":{"prompt_tokens":4}}]}"#,
        r#"{"response":"x","y":{"usage":{"prompt_tokens":4}}}"#,
        r#"{"usage":{"prompt_tokens":4}"#,
        r#"{"usage":{"prompt_tokens":4}} {}"#,
    ] {
        let mut out = b"before".to_vec();
        assert!(
            !fix_usage(body.as_bytes(), &with_details(), &mut out),
            "{body}"
        );
        assert_eq!(out, b"before", "{body}");
    }
}

fn filtered(pieces: &[&[u8]]) -> Vec<u8> {
    let mut filter = UsageFilter::new(with_details());
    let mut out = Vec::new();
    for piece in pieces {
        filter.feed(piece, &mut out);
    }
    filter.finish(&mut out);
    out
}

/// Parts of a stream: as the worker sends them, as the client gets them.
const EVENTS: &[(&str, &str)] = &[
    (
        "data: {\"choices\":[{\"text\":\"\\\"usage\\\":{\"}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"text\":\"\\\"usage\\\":{\"}],\"usage\":null}\n\n",
    ),
    (
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"total_tokens\":5}}\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":100,\"prompt_tokens_details\":{\"cached_tokens\":64},\"total_tokens\":101}}\n\n",
    ),
    (
        "id: 7\r\nevent: response.completed\r\ndata:{\"response\":{\"usage\" : {\"input_tokens\":4,\"input_tokens_details\":{}}}}\r\n\r\n",
        "id: 7\r\nevent: response.completed\r\ndata:{\"response\":{\"usage\" : {\"input_tokens\":100,\"input_tokens_details\":{\"cached_tokens\":64}}}}\r\n\r\n",
    ),
    (
        "datum: {\"usage\":{\"prompt_tokens\":4}}\n\n",
        "datum: {\"usage\":{\"prompt_tokens\":4}}\n\n",
    ),
    (": keep-alive\n\n", ": keep-alive\n\n"),
    ("\n", "\n"),
    ("\r\n", "\r\n"),
    ("data: {\"usage\":{\n\r\n", "data: {\"usage\":{\n\r\n"),
    ("data: \u{e9}\r\r\n\r\n", "data: \u{e9}\r\r\n\r\n"),
    ("data: [DONE]\n\n", "data: [DONE]\n\n"),
];

#[test]
fn a_whole_event_is_never_held_and_half_of_one_always() {
    for (event, expected) in EVENTS {
        let mut filter = UsageFilter::new(with_details());
        let mut out = Vec::new();
        for byte in &event.as_bytes()[..event.len() - 1] {
            filter.feed(&[*byte], &mut out);
        }
        assert_eq!(text(&out), "", "{event:?}");
        filter.feed(b"\n", &mut out);
        assert_eq!(text(&out), *expected);
        // With the start of the next one in the same piece.
        let mut out = Vec::new();
        filter.feed(format!("{event}data: {{").as_bytes(), &mut out);
        assert_eq!(text(&out), *expected);
        out.clear();
        filter.finish(&mut out);
        assert_eq!(text(&out), "data: {");
    }
}

#[test]
fn an_event_without_its_blank_line_is_fixed_at_the_end() {
    let (event, expected) = EVENTS[1];
    assert_eq!(
        text(&filtered(&[event.trim_end().as_bytes()])),
        expected.trim_end()
    );
    let half = &event[..event.len() - 6];
    assert_eq!(text(&filtered(&[half.as_bytes()])), half);
}

/// An event with a usage in it, of a length.
fn long_event(bytes: usize) -> Vec<u8> {
    let (start, end) = ("data: {\"a\":\"", "\",\"usage\":{\"prompt_tokens\":4}}\n\n");
    let filler = "x".repeat(bytes - start.len() - end.len());
    [start, &filler, end].concat().into_bytes()
}

#[test]
fn what_is_held_is_bounded_and_a_longer_event_passes_as_it_is() {
    let (usage, fixed_usage) = EVENTS[1];
    for (bytes, is_fixed) in [
        (USAGE_EVENT_BYTES_MAX, true),
        (USAGE_EVENT_BYTES_MAX + 1, false),
        (USAGE_EVENT_BYTES_MAX * 3, false),
    ] {
        let stream = [&long_event(bytes), usage.as_bytes()].concat();
        let at_once = filtered(&[&stream]);
        assert!(at_once.ends_with(fixed_usage.as_bytes()), "{bytes}");
        assert_eq!(at_once[..bytes] != stream[..bytes], is_fixed, "{bytes}");
        for piece_bytes in [1000, 65_536, bytes - 1, bytes + 1] {
            let mut filter = UsageFilter::new(with_details());
            let mut out = Vec::new();
            for piece in stream.chunks(piece_bytes) {
                filter.feed(piece, &mut out);
                assert!(filter.held.len() <= USAGE_EVENT_BYTES_MAX);
            }
            filter.finish(&mut out);
            assert!(out == at_once, "{bytes} in pieces of {piece_bytes}");
        }
    }
}

#[test]
fn the_pieces_a_stream_comes_in_make_no_difference() {
    let seed = 0x5b11_7000;
    let mut rng = Rng::new(seed);
    for round in 0..3000 {
        let (mut stream, mut expected) = (String::new(), String::new());
        for _ in 0..1 + rng.below(8) {
            let (event, fixed) = EVENTS[rng.below(EVENTS.len())];
            stream.push_str(event);
            expected.push_str(fixed);
        }
        let piece_max = 1 + rng.below(60);
        let mut pieces = Vec::new();
        let mut rest = stream.as_bytes();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rng.below(piece_max + 1).min(rest.len()));
            pieces.push(piece);
            rest = after;
        }
        let out = filtered(&pieces);
        assert_eq!(text(&out), expected, "seed {seed:#x}, round {round}");
    }
}

const ROUTES: [Route; 6] = [
    Route::ChatCompletions,
    Route::Completions,
    Route::Responses,
    Route::Generate,
    Route::InferenceGenerate,
    Route::Other,
];

/// The edits again, made to the tree that `serde_json` reads: slower, and too simple to be wrong in the same way.
#[test]
fn both_legs_are_what_a_tree_would_make_of_them() {
    let seed = 0x91ec_e500;
    let mut rng = Rng::new(seed);
    let mut changed_count = 0;
    let round_count = 30_000;
    for round in 0..round_count {
        let mut body = String::new();
        random_object(&mut rng, REQUEST_NAMES, 2, &mut body);
        let route = ROUTES[rng.below(ROUTES.len())];
        let context = || format!("seed {seed:#x}, round {round}: {route:?} {body:?}");
        let tree: Value =
            serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e} {}", context()));
        let kv_params: Value = serde_json::from_str(KV).unwrap();

        let written = prefill(route, &body);
        assert_sound(&written, 1, &context);
        let mut expected = tree.clone();
        edit_prefill(route, expected.as_object_mut().unwrap());
        expected["kv_transfer_params"] = kv_params.clone();
        assert_eq!(parsed(&written), expected, "{} became {written}", context());

        let mut expected = tree.clone();
        expected
            .as_object_mut()
            .unwrap()
            .remove("kv_transfer_params");
        let written = decode(&body, None);
        assert_sound(&written, 0, &context);
        assert_eq!(parsed(&written), expected, "{} became {written}", context());
        changed_count += usize::from(written != body);
        expected["kv_transfer_params"] = kv_params;
        let written = decode(&body, Some(KV));
        assert_sound(&written, 1, &context);
        assert_eq!(parsed(&written), expected, "{} became {written}", context());
    }
    assert!(
        (round_count / 10..round_count * 9 / 10).contains(&changed_count),
        "{changed_count} changed"
    );
}

/// It is JSON, and has the parameters so many times.
fn assert_sound(body: &str, kv_count: usize, context: &dyn Fn() -> String) {
    assert!(scan(body.as_bytes()).is_ok(), "{} became {body}", context());
    let mut count = 0;
    walk(body.as_bytes(), |name, _| {
        count += usize::from(name == b"kv_transfer_params");
    })
    .unwrap();
    assert_eq!(count, kv_count, "{} became {body}", context());
}

fn parsed(body: &str) -> Value {
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

fn edit_prefill(route: Route, object: &mut Map<String, Value>) {
    object.remove("kv_transfer_params");
    object.remove("stream_options");
    shorten(object);
    if object
        .get("stream")
        .is_some_and(|stream| *stream != json!(false) && !stream.is_null())
    {
        object.insert("stream".to_owned(), json!(false));
    }
    if let Some(Value::Object(sampling)) = object.get_mut("sampling_params") {
        shorten(sampling);
    }
    let stands = |name: &str| object.contains_key(name);
    match route {
        Route::InferenceGenerate => match object.get_mut("sampling_params") {
            Some(Value::Object(sampling)) => {
                sampling.insert("max_tokens".to_owned(), json!(1));
            }
            None | Some(Value::Null) => {
                object.insert("sampling_params".to_owned(), json!({"max_tokens": 1}));
            }
            Some(_) => {}
        },
        Route::Responses => {
            object.insert("max_output_tokens".to_owned(), json!(1));
        }
        Route::ChatCompletions if stands("max_completion_tokens") => {}
        _ => {
            object.insert("max_tokens".to_owned(), json!(1));
        }
    }
}

fn shorten(object: &mut Map<String, Value>) {
    for name in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
        if let Some(limit) = object.get_mut(name) {
            *limit = json!(1);
        }
    }
    if let Some(limit) = object.get_mut("min_tokens")
        && limit
            .as_f64()
            .is_some_and(|limit| limit > 1.0 && limit.fract() == 0.0)
    {
        *limit = json!(1);
    }
}

#[test]
fn the_usage_is_what_a_tree_would_make_of_it() {
    let seed = 0x05a6_e000;
    let mut rng = Rng::new(seed);
    let mut fixed_count = 0;
    let round_count = 30_000;
    for round in 0..round_count {
        let mut body = String::new();
        random_object(&mut rng, ANSWER_NAMES, 3, &mut body);
        let fix = if rng.below(2) == 0 {
            with_details()
        } else {
            fix_of(r#"{"usage":{"prompt_tokens":100}}"#)
        };
        let context = || format!("seed {seed:#x}, round {round}: {body:?}");
        let tree = parsed(&body);
        let mut expected = tree.clone();
        edit_usage(&mut expected["usage"], &fix);
        if expected["response"].is_object() {
            edit_usage(&mut expected["response"]["usage"], &fix);
        }
        // Indexing put nulls where nothing stood.
        let expected = without_nulls(expected);
        let mut out = Vec::new();
        let is_fixed = fix_usage(body.as_bytes(), &fix, &mut out);
        let found = if is_fixed { parsed(text(&out)) } else { tree };
        assert_eq!(without_nulls(found), expected, "{}", context());
        assert_eq!(out.is_empty(), !is_fixed, "{}", context());
        fixed_count += usize::from(is_fixed);
    }
    assert!(
        (round_count / 30..round_count * 9 / 10).contains(&fixed_count),
        "{fixed_count} fixed"
    );
}

fn edit_usage(usage: &mut Value, fix: &UsageFix) {
    let Some(usage) = usage.as_object_mut() else {
        return;
    };
    let Some(old) = usage.get("prompt_tokens").and_then(Value::as_u64) else {
        return;
    };
    usage.insert("prompt_tokens".to_owned(), json!(fix.prompt_tokens));
    if let Some(rest) = usage
        .get("total_tokens")
        .and_then(Value::as_u64)
        .and_then(|total| total.checked_sub(old))
    {
        usage.insert("total_tokens".to_owned(), json!(rest + fix.prompt_tokens));
    }
    if let Some(details) = &fix.details {
        let details = serde_json::from_slice(details).unwrap();
        usage.insert("prompt_tokens_details".to_owned(), details);
    }
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => members
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| (name, without_nulls(value)))
            .collect(),
        other => other,
    }
}

const REQUEST_NAMES: &[&str] = &[
    "max_tokens",
    "max\\u005ftokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "stream",
    "stream_options",
    "kv_transfer_params",
    "kv_transf\\u0065r_params",
    "sampling_params",
    "s\\u0061mpling_params",
    "messages",
    "x",
    "",
];

const ANSWER_NAMES: &[&str] = &[
    "usage",
    "usage",
    "us\\u0061ge",
    "response",
    "prompt_tokens",
    "prompt_tokens",
    "prompt\\u005ftokens",
    "total_tokens",
    "prompt_tokens_details",
    "x",
];

fn random_object(rng: &mut Rng, names: &[&str], depth: usize, out: &mut String) {
    out.push('{');
    for index in 0..rng.below(7) {
        if index > 0 {
            out.push(',');
        }
        random_space(rng, out);
        out.push('"');
        out.push_str(names[rng.below(names.len())]);
        out.push('"');
        random_space(rng, out);
        out.push(':');
        random_space(rng, out);
        random_value(rng, names, depth, out);
        random_space(rng, out);
    }
    random_space(rng, out);
    out.push('}');
}

fn random_value(rng: &mut Rng, names: &[&str], depth: usize, out: &mut String) {
    let plain = [
        "0",
        "1",
        "2",
        "7",
        "120",
        "-3",
        "2.0",
        "1.5",
        "3e1",
        "true",
        "false",
        "null",
        "\"\"",
        "\"a,\\\"}\"",
        "[]",
        "[1, [2]]",
        "\"é\\n\"",
    ];
    if depth > 0 && rng.below(2) == 0 {
        random_object(rng, names, depth - 1, out);
    } else {
        out.push_str(plain[rng.below(plain.len())]);
    }
}

fn random_space(rng: &mut Rng, out: &mut String) {
    while rng.below(4) == 0 {
        out.push([' ', '\n', '\r', '\t'][rng.below(4)]);
    }
}
