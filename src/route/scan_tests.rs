//! What `scan` takes, refuses and finds: tables, and a comparison with `serde_json`.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::*;
use crate::route::Rng;

/// JSON as some client may write it. Each is an object.
const ACCEPTED: &[&[u8]] = &[
    b"{}",
    b" \t\r\n{ \t\r\n} \t\r\n",
    br#"{"":""}"#,
    br#"{"a":0}"#,
    br#"{"a":-0}"#,
    br#"{"a":-0.0e-0}"#,
    br#"{"a":1e400}"#,
    br#"{"a":1E+2,"b":1E-2,"c":1e2}"#,
    br#"{"a":2.50}"#,
    br#"{"a":123456789012345678901234567890.123456789012345678901234567890}"#,
    br#"{"a":1234567,"b":12345678}"#,
    br#"{"a":[1,2,3,10,0,100,0,7]}"#,
    br#"{"a":[1,22,333, 4444, 55555,666666,7777777, 88888888,999999999,0, 10,200,1,2,3,4,5,6]}"#,
    br#"{"a":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]}"#,
    br#"{"a":[100,200,300,400,500,600,700,800,900,1000,1100,"text",[],{},null,-1,2.5,3e3]}"#,
    br#"{"a":[1, 2 ,3  ,  4,5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 ]}"#,
    br#"{"a":true,"b":false,"c":null}"#,
    br#"{"a":NaN,"b":Infinity,"c":-Infinity}"#,
    br#"{"a":"\"\\\/\b\f\n\r\t"}"#,
    br#"{"a":"\u0000\u00e9\uABCD\uabcd"}"#,
    br#"{"a":"\ud83d\ude00"}"#,
    br#"{"a":"\ud800"}"#,
    br#"{"a":"\udc00\ud800"}"#,
    "{\"a\":\"\u{7f}\u{80}é路由器😀\"}".as_bytes(),
    "{\"é\":\"an é after more than thirty-two bytes of plain text: é\"}".as_bytes(),
    br#"{"a":[[[[]]],{"b":{"c":{}}}]}"#,
    br#"{"a":[{},[],{},[]]}"#,
    br#"{"a":1,"a":2,"a":3}"#,
    br#"{"a" : [ 1 , { "b" : "c" } , [ ] ] , "d" : { } }"#,
    b"{\n        \"a\":\n                    [\n\t\t1,\r\n                  2\n        ]\n}\n\n",
    br#"{"a":"[{]}:,"}"#,
    br#"{"a":"exactly thirty-two bytes to here","b":"exactly sixteen."}"#,
    br#"{"a":"ends in an escaped backslash\\"}"#,
    br#"{"a":"//","/*":"*/"}"#,
];

/// Not JSON, with the offset of the first byte that cannot be there.
const REFUSED: &[(&[u8], usize)] = &[
    (b"{", 1),
    (b"}", 0),
    (b"{]", 1),
    (b"{}{}", 2),
    (b"{} x", 3),
    (b"{},", 2),
    (b"\xef\xbb\xbf{}", 0),
    (b"\xfe\xff\0{\0}", 0),
    (b"{\0}", 1),
    (b"\x0c{}", 0),
    ("{\u{a0}}".as_bytes(), 1),
    (b"{a:1}", 1),
    (b"{'a':1}", 1),
    (br#"{"a"}"#, 4),
    (br#"{"a":}"#, 5),
    (br#"{"a" 1}"#, 5),
    (br#"{"a":1"#, 6),
    (br#"{"a":1,}"#, 7),
    (br#"{,"a":1}"#, 1),
    (br#"{"a":1 "b":2}"#, 7),
    (br#"{"a":1;"b":2}"#, 6),
    (br#"{"a"::1}"#, 5),
    (br#"{"a":[1,]}"#, 8),
    (br#"{"a":[,1]}"#, 6),
    (br#"{"a":[1 2]}"#, 8),
    (br#"{"a":[1}"#, 7),
    (br#"{"a":[1:2]}"#, 7),
    (br#"{"a":{"b":1]}"#, 11),
    (br#"{"a":{"b"}}"#, 9),
    (br#"{"a":01}"#, 6),
    (br#"{"a":-01}"#, 7),
    (br#"{"a":00}"#, 6),
    (br#"{"a":+1}"#, 5),
    (br#"{"a":.5}"#, 5),
    (br#"{"a":1.}"#, 7),
    (br#"{"a":1.e2}"#, 7),
    (br#"{"a":1e}"#, 7),
    (br#"{"a":1e+}"#, 8),
    (br#"{"a":-}"#, 6),
    (br#"{"a":--1}"#, 6),
    (br#"{"a":0x10}"#, 6),
    (br#"{"a":1_000}"#, 6),
    (br#"{"a":-NaN}"#, 6),
    (br#"{"a":nan}"#, 6),
    (br#"{"a":Inf}"#, 8),
    (br#"{"a":True}"#, 5),
    (br#"{"a":tru}"#, 8),
    (br#"{"a":truee}"#, 9),
    (br#"{"a":nulll}"#, 9),
    (
        br#"{"a":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,017,18,19,20,21,22,23,24,25,26,27,28]}"#,
        46,
    ),
    (
        br#"{"a":[10,,20,30,40,50,60,70,80,90,100,110,120,130,140,150,160,170,180,190,200,210]}"#,
        9,
    ),
    (
        br#"{"a":[10 20,30,40,50,60,70,80,90,100,110,120,130,140,150,160,170,180,190,200,210]}"#,
        9,
    ),
    (
        br#"{"a":[10,20,30,40,50,60,70,80,90,100,110,120,130,140,150,160,170,180,190,200,210,]}"#,
        81,
    ),
    (br#"{"a":"b}"#, 8),
    (br#"{"a":"b\"}"#, 10),
    (br#"{"a":"\x41"}"#, 7),
    (br#"{"a":"\'"}"#, 7),
    (br#"{"a":"\u12G4"}"#, 10),
    (br#"{"a":"\u123"}"#, 11),
    (br#"{"a":"\U0041"}"#, 7),
    (b"{\"a\":\"\n\"}", 6),
    (b"{\"a\":\"\t\"}", 6),
    (b"{\"a\":\"\0\"}", 6),
    (
        b"{\"a\":\"a string of more than thirty-two bytes \x1f\"}",
        45,
    ),
    (br#"{"a":1}//"#, 7),
    (br#"/**/{"a":1}"#, 0),
    (br#"["a":1]"#, 4),
    (br#""text"#, 5),
];

#[test]
fn accepts_whatever_json_loads_takes() {
    for body in ACCEPTED {
        assert!(
            scan(body).is_ok(),
            "{:?}: {:?}",
            String::from_utf8_lossy(body),
            scan(body)
        );
    }
}

#[test]
fn refuses_what_is_not_json_and_says_where() {
    for (body, at) in REFUSED {
        let expected = Err(ScanError::Syntax { at: *at });
        assert_eq!(scan(body), expected, "{:?}", String::from_utf8_lossy(body));
    }
}

/// Found by fuzzing: runs of numbers, which are skipped by blocks, passed in the body's object as in an array.
#[test]
fn only_in_an_array_does_a_comma_lead_to_the_next_number() {
    let numbers: Vec<String> = (10..60).map(|n| n.to_string()).collect();
    let numbers = numbers.join(",");
    let refused = |at| Err(ScanError::Syntax { at });
    let body = format!(r#"{{"a":{numbers},"b":true}}"#);
    assert_eq!(scan(body.as_bytes()), refused(8));
    let body = format!(r#"{{"n":999999999999999999999999999999,2,"b":{{"c":{numbers}}}}}"#);
    assert_eq!(scan(body.as_bytes()), refused(36));
    assert_eq!(scan(numbers.as_bytes()), refused(2));
    let array = format!("[{numbers}]");
    let whole = Field {
        start: 0,
        end: array.len(),
    };
    let first = Field { start: 1, end: 3 };
    let found = first_element(array.as_bytes(), whole);
    assert_eq!(found, Some((first, true)));
}

#[test]
fn every_accepted_body_is_refused_when_it_breaks_off() {
    for body in ACCEPTED {
        let whole = body.trim_ascii_end().len();
        for length in 0..whole {
            let verdict = scan(&body[..length]);
            assert!(
                verdict.is_err(),
                "{:?} at {length}",
                String::from_utf8_lossy(body)
            );
        }
    }
}

#[test]
fn what_is_no_object_is_told_from_what_is_no_json() {
    for body in ["", " ", "\r\n\t "] {
        assert_eq!(scan(body.as_bytes()), Err(ScanError::Empty), "{body:?}");
    }
    for body in [
        "[]",
        "[1,{}]",
        "1",
        "-0.5",
        r#""text""#,
        "null",
        " true ",
        "NaN",
    ] {
        assert_eq!(
            scan(body.as_bytes()),
            Err(ScanError::NotAnObject),
            "{body:?}"
        );
    }
}

#[test]
fn refuses_bytes_that_are_not_utf8_wherever_they_stand() {
    // Too long a form, a surrogate, above U+10FFFF, a lone continuation, a start without one, a byte that is none.
    let faults: [&[u8]; 6] = [
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\x80",
        b"\xe2\x82",
        b"\xff",
    ];
    for fault in faults {
        for distance in [0, 1, 15, 16, 31, 32, 33, 100] {
            for tail in [0, 40] {
                let (before, after) = ("x".repeat(distance), "x".repeat(tail));
                let body = [
                    b"{\"a\":\"",
                    before.as_bytes(),
                    fault,
                    after.as_bytes(),
                    b"\"}",
                ]
                .concat();
                assert_eq!(
                    scan(&body),
                    Err(ScanError::NotUtf8 { at: 6 + distance }),
                    "{fault:?}"
                );
            }
        }
    }
    assert_eq!(scan(b"{\"\xff\":1}"), Err(ScanError::NotUtf8 { at: 2 }));
}

#[test]
fn nesting_ends_at_the_limit_without_recursion() {
    let nested = |open: &str, close: &str, levels: usize| {
        format!("{{\"a\":{}1{}}}", open.repeat(levels), close.repeat(levels)).into_bytes()
    };
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        assert!(scan(&nested(open, close, DEPTH_MAX - 1)).is_ok());
        let at = 5 + open.len() * (DEPTH_MAX - 1);
        assert_eq!(
            scan(&nested(open, close, DEPTH_MAX)),
            Err(ScanError::TooDeep { at })
        );
        assert_eq!(
            scan(&nested(open, close, 1_000_000)),
            Err(ScanError::TooDeep { at })
        );
    }
    assert_eq!(
        scan("[".repeat(DEPTH_MAX).as_bytes()),
        Err(ScanError::Syntax { at: DEPTH_MAX })
    );
    assert_eq!(
        scan("[".repeat(DEPTH_MAX + 1).as_bytes()),
        Err(ScanError::TooDeep { at: DEPTH_MAX })
    );
    // Levels that were closed do not count.
    assert!(scan(format!("{{\"a\":[{}1]}}", "[[{}]],".repeat(5000)).as_bytes()).is_ok());
}

#[test]
fn finds_every_field_by_its_name_as_raw_bytes() {
    type Of = fn(&Fields) -> Option<Field>;
    let names: [(&str, Of); 22] = [
        ("model", |f| f.model),
        ("messages", |f| f.messages),
        ("prompt", |f| f.prompt),
        ("input", |f| f.input),
        ("text", |f| f.text),
        ("input_ids", |f| f.input_ids),
        ("token_ids", |f| f.token_ids),
        ("tools", |f| f.tools),
        ("system", |f| f.system),
        ("instructions", |f| f.instructions),
        ("cache_salt", |f| f.cache_salt),
        ("lora_path", |f| f.lora),
        ("lora_name", |f| f.lora),
        ("adapter", |f| f.lora),
        ("stream", |f| f.stream),
        ("max_tokens", |f| f.max_tokens),
        ("max_completion_tokens", |f| f.max_completion_tokens),
        ("user", |f| f.user),
        ("prompt_cache_key", |f| f.prompt_cache_key),
        ("session_params", |f| f.session),
        ("documents", |f| f.documents),
        ("query", |f| f.query),
    ];
    for (name, field) in names {
        for value in [
            "1",
            "\"x\\ny\"",
            "[ 1, {\"model\":2} ]",
            "{}",
            "null",
            "-1.5e3",
        ] {
            let body = format!(
                "{{ \"a\" : [\"{name}\"] , \"{name}\" :\n{value} , \"b\":{{\"{name}\":7}}}}"
            );
            let fields = scan(body.as_bytes()).unwrap();
            let found = field(&fields).map(|field| field.raw(body.as_bytes()));
            assert_eq!(found, Some(value.as_bytes()), "{body}");
            for (other, of) in names {
                assert!(
                    of(&fields).is_none() || of(&fields) == field(&fields),
                    "{other} of {body}"
                );
            }
        }
    }
}

#[test]
fn names_written_with_escapes_are_the_same_names() {
    let body = br#"{"mod\u0065l":"a","\u0070\u0072ompt":"b","m\\odel":"c","mode\u006C ":"d"}"#;
    let fields = scan(body).unwrap();
    assert_eq!(as_str(body, fields.model).as_deref(), Some("a"));
    assert_eq!(as_str(body, fields.prompt).as_deref(), Some("b"));
}

#[test]
fn of_two_fields_of_one_name_the_last_counts() {
    let body = br#"{"model":"a","stream":false,"mod\u0065l":"b","stream":true}"#;
    let fields = scan(body).unwrap();
    assert_eq!(as_str(body, fields.model).as_deref(), Some("b"));
    assert!(is_true(body, fields.stream));
}

#[test]
fn a_null_adapter_does_not_hide_the_one_that_was_named() {
    let body = br#"{"lora_path":"a","lora_name":null}"#;
    assert_eq!(as_str(body, scan(body).unwrap().lora).as_deref(), Some("a"));
}

#[test]
fn only_the_literal_true_is_true() {
    for (value, expected) in [
        ("true", true),
        ("false", false),
        ("1", false),
        ("\"true\"", false),
        ("null", false),
    ] {
        let body = format!("{{\"stream\": {value} }}");
        assert_eq!(
            is_true(body.as_bytes(), scan(body.as_bytes()).unwrap().stream),
            expected,
            "{value}"
        );
    }
    assert!(!is_true(b"{}", None));
}

#[test]
fn text_is_unescaped_only_where_it_has_escapes() {
    let cases = [
        (r#""""#, Some("")),
        (r#""plain é""#, Some("plain é")),
        (r#""\"\\\/\b\f\n\r\t.""#, Some("\"\\/\u{8}\u{c}\n\r\t.")),
        (r#""\u00e9\u0041\u6f22z""#, Some("éA漢z")),
        (r#""\ud83d\ude00!""#, Some("😀!")),
        (r#""\ud83d!""#, Some("\u{fffd}!")),
        (r#""\ud83d\u0041""#, Some("\u{fffd}A")),
        (r#""\ud83d\ud83d\ude00""#, Some("\u{fffd}😀")),
        (r#""\ude00\n""#, Some("\u{fffd}\n")),
        (r#""\\u0041""#, Some("\\u0041")),
        ("7", None),
        ("null", None),
        ("[\"a\"]", None),
    ];
    for (value, expected) in cases {
        let body = format!("{{\"model\":{value}}}");
        let fields = scan(body.as_bytes()).unwrap();
        let text = as_str(body.as_bytes(), fields.model);
        assert_eq!(text.as_deref(), expected, "{value}");
        let is_borrowed = matches!(text, Some(Cow::Borrowed(_)));
        assert_eq!(
            is_borrowed,
            expected.is_some() && !value.contains('\\'),
            "{value}"
        );
    }
}

/// Random bodies and random damage to them: the same verdict as `serde_json`, and the same raw values.
///
/// Where the two differ on purpose the case is left out: names or strings with surrogates (`serde_json` refuses lone
/// ones in names), and the literals of `json.loads`. Its limit of 128 levels is never reached here.
#[test]
fn agrees_with_serde_json_on_random_and_on_broken_bodies() {
    let seed = 0x5ca9;
    let mut rng = Rng::new(seed);
    let mut accepted_count = 0;
    let round_count = 60_000;
    for round in 0..round_count {
        let mut body = Vec::new();
        random_object(&mut rng, &mut body, 4);
        for _ in 0..rng.below(4) {
            damage(&mut rng, &mut body);
        }
        if differs_on_purpose(&body) {
            continue;
        }
        let context = || {
            format!(
                "seed {seed:#x}, round {round}: {:?}",
                String::from_utf8_lossy(&body)
            )
        };
        match serde_json::from_slice::<BTreeMap<String, &RawValue>>(&body) {
            Ok(expected) => {
                let fields = scan(&body).unwrap_or_else(|error| panic!("{error:?}, {}", context()));
                let found = [fields.model, fields.prompt, fields.messages, fields.stream];
                for (name, field) in ["model", "prompt", "messages", "stream"]
                    .into_iter()
                    .zip(found)
                {
                    let raw = field.map(|field| field.raw(&body));
                    assert_eq!(
                        raw,
                        expected.get(name).map(|raw| raw.get().as_bytes()),
                        "{name}, {}",
                        context()
                    );
                }
                accepted_count += 1;
            }
            Err(_) => {
                let verdict = scan(&body);
                assert!(verdict.is_err(), "{}", context());
                let is_json = serde_json::from_slice::<&RawValue>(&body).is_ok();
                assert_eq!(
                    verdict == Err(ScanError::NotAnObject),
                    is_json,
                    "{}",
                    context()
                );
            }
        }
    }
    // Both sides of the comparison were really seen.
    assert!(
        (round_count / 10..round_count * 9 / 10).contains(&accepted_count),
        "{accepted_count} accepted"
    );
}

fn differs_on_purpose(body: &[u8]) -> bool {
    let has = |word: &[u8]| {
        body.windows(word.len())
            .any(|window| window.eq_ignore_ascii_case(word))
    };
    has(b"nan") || has(b"infinity") || has(b"\\ud")
}

fn random_object(rng: &mut Rng, out: &mut Vec<u8>, depth: usize) {
    let names: [&[u8]; 8] = [
        b"model",
        b"prompt",
        b"messages",
        b"stream",
        b"mod\\u0065l",
        b"x",
        b"",
        b"p\\u0072ompt",
    ];
    out.push(b'{');
    for index in 0..rng.below(6) {
        if index > 0 {
            out.push(b',');
        }
        random_space(rng, out);
        out.push(b'"');
        out.extend_from_slice(names[rng.below(names.len())]);
        out.push(b'"');
        random_space(rng, out);
        out.push(b':');
        random_value(rng, out, depth);
    }
    random_space(rng, out);
    out.push(b'}');
}

fn random_value(rng: &mut Rng, out: &mut Vec<u8>, depth: usize) {
    random_space(rng, out);
    match rng.below(if depth > 0 { 10 } else { 7 }) {
        0..2 => random_string(rng, out),
        2..4 => random_number(rng, out),
        4 => out.extend_from_slice(b"true"),
        5 => out.extend_from_slice(b"false"),
        6 => out.extend_from_slice(b"null"),
        7 => random_object(rng, out, depth - 1),
        8 => {
            out.push(b'[');
            for index in 0..rng.below(5) {
                if index > 0 {
                    out.push(b',');
                }
                random_value(rng, out, depth - 1);
            }
            out.push(b']');
        }
        _ => random_token_ids(rng, out),
    }
    random_space(rng, out);
}

fn random_space(rng: &mut Rng, out: &mut Vec<u8>) {
    if rng.below(4) == 0 {
        let byte = b" \n\r\t"[rng.below(4)];
        out.extend(std::iter::repeat_n(byte, rng.below(20)));
    }
}

fn random_string(rng: &mut Rng, out: &mut Vec<u8>) {
    let parts: [&str; 10] = [
        "\\n",
        "\\\"",
        "\\\\",
        "\\u00e9",
        "é",
        "漢",
        "😀",
        "plain text ",
        "\u{7f}",
        "some more of the plain text",
    ];
    out.push(b'"');
    for _ in 0..rng.below(8) {
        out.extend_from_slice(parts[rng.below(parts.len())].as_bytes());
    }
    out.push(b'"');
}

fn random_number(rng: &mut Rng, out: &mut Vec<u8>) {
    let parts: [&str; 12] = [
        "0",
        "-0",
        "7",
        "-12",
        "1234567",
        "123456789",
        "0.5",
        "1e5",
        "2.50",
        "1E-7",
        "1e400",
        "3e+1",
    ];
    out.extend_from_slice(parts[rng.below(parts.len())].as_bytes());
}

fn random_token_ids(rng: &mut Rng, out: &mut Vec<u8>) {
    let separator: &[u8] = if rng.below(2) == 0 { b"," } else { b", " };
    out.push(b'[');
    for index in 0..1 + rng.below(40) {
        if index > 0 {
            out.extend_from_slice(separator);
        }
        let limit = [10, 1000, 150_000][rng.below(3)];
        out.extend_from_slice(rng.below(limit).to_string().as_bytes());
    }
    out.push(b']');
}

/// Takes a byte away, puts one in, changes one, or repeats a stretch.
fn damage(rng: &mut Rng, body: &mut Vec<u8>) {
    let likely = b"{}[]\",:\\0123456789.eE+- \n\ttfnu\0\x1f\x7f\x80\xc3\xed\xff/a'";
    let at = rng.below(body.len());
    let byte = likely[rng.below(likely.len())];
    match rng.below(4) {
        0 if body.len() > 1 => {
            body.remove(at);
        }
        1 => body.insert(at, byte),
        2 => {
            let end = (at + rng.below(12)).min(body.len());
            let stretch = body[at..end].to_vec();
            body.splice(at..at, stretch);
        }
        _ => body[at] = byte,
    }
}
