//! The bodies of two legs against serde_json: what is written, read again, is what was read and then changed. And what of
//! the prefill worker's answer goes into the decode worker's.
//!
//! Input: a byte that says which endpoint, then the body; of answers after a byte 0xFE the decode worker's.

use corelane::route::{
    UsageFilter, UsageFix, fix_usage, plan, read_prefill_answer, scan, write_decode, write_prefill,
    write_release,
};
use corelane::shared::Route;

use super::json::ROUTES;
use crate::json::{Value, mask};

type Members = Vec<(Vec<u8>, Value)>;

pub fn splice(data: &[u8]) {
    let Some((&how, rest)) = data.split_first() else {
        return;
    };
    if memchr::memmem::find(rest, b"[7").is_some() {
        return; // It means something else to the twin.
    }
    if how & 0x80 == 0 {
        legs(ROUTES[usize::from(how) % ROUTES.len()], rest);
    } else if let Some(at) = rest.iter().position(|byte| *byte == 0xfe) {
        answers(how, &rest[..at], &rest[at + 1..]);
    }
}

fn object(body: &[u8]) -> Members {
    match Value::of(&mask(body)) {
        Some(Value::Object(members)) => members,
        other => panic!(
            "no object: {other:?} of {:?}",
            String::from_utf8_lossy(body)
        ),
    }
}

fn is_set(value: &Value) -> bool {
    !value.is("false") && !value.is("null")
}

// ---- legs ----

const PARAMS: &[u8] = br#"{"do_remote_decode":true,"ids":[1,2]}"#;

fn legs(route: Route, body: &[u8]) {
    let Ok(_) = scan(body) else {
        // What never passed may be refused here too, but does no harm.
        if let Ok(plan) = plan(route, body) {
            write_prefill(body, &plan, PARAMS, &mut Vec::new());
        }
        return;
    };
    let plan = plan(route, body).expect("the scan has passed it");
    let before = object(body);
    let params = Value::of(PARAMS).unwrap();
    let is_split = |member: &(Vec<u8>, Value)| is_whole(route, &member.0, &member.1);
    assert_eq!(
        plan.whole().is_some(),
        before.iter().any(is_split),
        "whether it goes whole"
    );

    let mut prefill = b"begun ".to_vec();
    write_prefill(body, &plan, PARAMS, &mut prefill);
    let prefill = prefill.strip_prefix(b"begun ").expect("appended");
    assert_eq!(prefill.len(), plan.prefill_bytes(PARAMS.len()));
    scan(prefill).expect("still JSON to us");
    let mut want = prefilled(route, &before);
    want.push((b"kv_transfer_params".to_vec(), params.clone()));
    assert_eq!(object(prefill), want, "prefill's");

    let mut release = Vec::new();
    write_release(body, &plan, PARAMS, &mut release);
    assert_eq!(object(&release), want, "a release's");

    let mut want = before.clone();
    want.retain(|(name, _)| name != b"kv_transfer_params");
    let mut decode = Vec::new();
    write_decode(body, &plan, None, &mut decode);
    assert_eq!(decode.len(), plan.decode_bytes(None));
    assert_eq!(object(&decode), want, "decode's, without parameters");
    if want.len() == before.len() {
        assert_eq!(decode, body, "nothing to change");
    }
    want.push((b"kv_transfer_params".to_vec(), params));
    let mut decode = Vec::new();
    write_decode(body, &plan, Some(PARAMS), &mut decode);
    assert_eq!(decode.len(), plan.decode_bytes(Some(PARAMS.len())));
    assert_eq!(object(&decode), want, "decode's");
}

/// Whether a member makes its request one that cannot be split.
fn is_whole(route: Route, name: &[u8], value: &Value) -> bool {
    let is_batch = |value: &Value| match value {
        Value::Array(all) => all.len() > 1 && !matches!(all[0], Value::Word(_)),
        _ => false,
    };
    match (name, value) {
        (b"prompt", value) => is_batch(value),
        (b"input_ids" | b"text", value) if route == Route::Generate => is_batch(value),
        (b"prompt_embeds", value) => !value.is("null"),
        (b"echo", value) => is_set(value),
        (b"sampling_params", Value::Object(members)) => {
            members.iter().any(|(name, value)| is_several(name, value))
        }
        (name, value) => is_several(name, value),
    }
}

fn is_several(name: &[u8], value: &Value) -> bool {
    match name {
        b"n" | b"best_of" => !value.is("null") && value.number().is_none_or(|n| n > 1.0),
        b"use_beam_search" => is_set(value),
        b"prompt_logprobs" => !value.is("null"),
        _ => false,
    }
}

fn one_token(name: &[u8], value: &Value) -> Value {
    let is_more = || value.number().is_some_and(|n| n > 1.0 && n.fract() == 0.0);
    match name {
        b"max_tokens" | b"max_completion_tokens" | b"max_output_tokens" => Value::word("1"),
        b"min_tokens" if is_more() => Value::word("1"),
        _ => value.clone(),
    }
}

fn prefilled(route: Route, before: &Members) -> Members {
    let mut after = Vec::new();
    let mut has_limit = false;
    let limit = || (b"max_tokens".to_vec(), Value::word("1"));
    for (name, value) in before {
        let value = match (&name[..], value) {
            (b"kv_transfer_params" | b"stream_options", _) => continue,
            (b"stream", value) if is_set(value) => Value::word("false"),
            (b"sampling_params", Value::Object(inner)) => {
                has_limit |= route == Route::InferenceGenerate;
                let mut inner: Members = inner
                    .iter()
                    .map(|(n, v)| (n.clone(), one_token(n, v)))
                    .collect();
                let is_limited = inner.iter().any(|(name, _)| name == b"max_tokens");
                if route == Route::InferenceGenerate && !is_limited {
                    inner.push(limit());
                }
                Value::Object(inner)
            }
            (b"sampling_params", value) if route == Route::InferenceGenerate => {
                has_limit = true;
                match value.is("null") {
                    true => Value::Object(vec![limit()]),
                    false => value.clone(),
                }
            }
            (name, value) => {
                has_limit |= match route {
                    Route::Responses => name == b"max_output_tokens",
                    Route::ChatCompletions => {
                        matches!(name, b"max_tokens" | b"max_completion_tokens")
                    }
                    Route::InferenceGenerate => false,
                    _ => name == b"max_tokens",
                };
                one_token(name, value)
            }
        };
        after.push((name.clone(), value));
    }
    if !has_limit {
        after.push(match route {
            Route::Responses => (b"max_output_tokens".to_vec(), Value::word("1")),
            Route::InferenceGenerate => (b"sampling_params".to_vec(), Value::Object(vec![limit()])),
            _ => limit(),
        });
    }
    after
}

// ---- answers ----

fn answers(how: u8, prefill: &[u8], decode: &[u8]) {
    let Ok(read) = read_prefill_answer(prefill) else {
        return;
    };
    let members = object(prefill);
    let last = |members: &Members, names: &[&str]| {
        let is_named = |(name, _): &&(Vec<u8>, Value)| names.iter().any(|n| n.as_bytes() == name);
        members
            .iter()
            .rev()
            .find(is_named)
            .map(|(_, value)| value.clone())
    };
    let params = last(&members, &["kv_transfer_params"]);
    let params = params.filter(|value| matches!(value, Value::Object(_)));
    let found = read
        .kv_transfer_params
        .map(|field| Value::of(&mask(field.raw(prefill))).unwrap());
    assert_eq!(found, params);
    let (mut counted, mut details) = (None, None);
    if let Some(Value::Object(usage)) = last(&members, &["usage"]) {
        counted = last(&usage, &["prompt_tokens", "input_tokens"]);
        details = last(&usage, &["prompt_tokens_details", "input_tokens_details"]);
        details = details.filter(|value| !value.is("null"));
    }
    let counted = counted.and_then(|value| value.count());
    let fix = UsageFix::new(prefill, &read);
    assert_eq!(fix.is_some(), counted.is_some(), "whether prefill counted");
    let (Some(fix), Some(counted)) = (fix, counted) else {
        return;
    };
    check_fix(&fix, counted, details.as_ref(), decode);
    check_filter(&fix, how, decode);
}

fn check_fix(fix: &UsageFix, counted: u64, details: Option<&Value>, decode: &[u8]) {
    let mut out = b"begun ".to_vec();
    let is_fixed = fix_usage(decode, fix, &mut out);
    let out = out.strip_prefix(b"begun ").expect("appended");
    assert!(is_fixed || out.is_empty());
    if scan(decode).is_err() {
        return assert!(!is_fixed, "no JSON, and changed");
    }
    let mut want = object(decode);
    let mut has_usage = false;
    for (name, value) in &mut want {
        match (&name[..], value) {
            (b"usage", Value::Object(usage)) => has_usage |= fixed(usage, counted, details),
            (b"response", Value::Object(inner)) => {
                for (name, value) in inner {
                    if let (b"usage", Value::Object(usage)) = (&name[..], value) {
                        has_usage |= fixed(usage, counted, details);
                    }
                }
            }
            _ => {}
        }
    }
    assert_eq!(is_fixed, has_usage, "whether there is a usage");
    if is_fixed {
        assert_eq!(object(out), want, "prefill's figures");
    }
}

fn fixed(usage: &mut Members, counted: u64, details: Option<&Value>) -> bool {
    let is_prompt = |name: &[u8]| matches!(name, b"prompt_tokens" | b"input_tokens");
    let is_details =
        |name: &[u8]| matches!(name, b"prompt_tokens_details" | b"input_tokens_details");
    let Some(last) = usage.iter().rposition(|(name, _)| is_prompt(name)) else {
        return false;
    };
    let Some(own) = usage[last].1.count() else {
        return false;
    };
    let has_details = usage.iter().any(|(name, _)| is_details(name));
    let details_name = [&usage[last].0, &b"_details"[..]].concat();
    for (name, value) in usage.iter_mut() {
        let word = |n: u64| Value::word(&n.to_string());
        if is_prompt(name) {
            *value = word(counted);
        } else if name == b"total_tokens" {
            let rest = value.count().and_then(|all| all.checked_sub(own));
            if let Some(total) = rest.and_then(|rest| rest.checked_add(counted)) {
                *value = word(total);
            }
        } else if let (true, Some(details)) = (is_details(name), details) {
            *value = details.clone();
        }
    }
    if let (false, Some(details)) = (has_details, details) {
        usage.insert(last + 1, (details_name, details.clone()));
    }
    true
}

/// The same bytes come out of a stream however it was cut, and they are those of each event by itself.
fn check_filter(fix: &UsageFix, how: u8, stream: &[u8]) {
    let run = |piece: &mut dyn FnMut() -> usize| {
        let mut filter = UsageFilter::new(fix.clone());
        let (mut out, mut at) = (Vec::new(), 0);
        while at < stream.len() {
            let end = (at + piece().max(1)).min(stream.len());
            filter.feed(&stream[at..end], &mut out);
            at = end;
        }
        filter.finish(&mut out);
        (out, filter.has_fixed())
    };
    let whole = run(&mut || usize::MAX / 2);
    assert_eq!(run(&mut || 1), whole, "one byte at a time");
    let mut state = u32::from(how);
    let pieces = run(&mut || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as usize
    });
    assert_eq!(pieces, whole, "in pieces");
    if !whole.1 {
        assert_eq!(whole.0, stream, "nothing was changed, and yet");
    }
    // Line by line: what is no data stands as it came, what is data is fixed by itself or not at all.
    let (mut rest, lines) = (&whole.0[..], stream.split_inclusive(|byte| *byte == b'\n'));
    for line in lines {
        let mut other = b"data:".to_vec();
        let payload = line.strip_prefix(b"data:");
        let is_fixed = payload.is_some_and(|payload| fix_usage(payload, fix, &mut other));
        rest = match rest.strip_prefix(line) {
            Some(after) => after,
            None if is_fixed => rest
                .strip_prefix(&other[..])
                .expect("a line of another making"),
            None => panic!("a line that was not to be changed"),
        };
    }
    assert!(rest.is_empty(), "more than there was");
}
