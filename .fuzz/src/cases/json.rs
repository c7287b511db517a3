//! The scan against serde_json, and the key that is made of what it found.
//!
//! Input: a byte that says which endpoint, then the body.

use corelane::route::{
    BLOCK_BYTES, DEPTH_MAX, Field, Fields, KeySeed, ScanError, as_str, chain, is_true, prefix_hash,
    scan,
};
use corelane::shared::Route;

use crate::json::{Member, depth, is_json, mask, members};

pub const ROUTES: [Route; 11] = [
    Route::ChatCompletions,
    Route::Completions,
    Route::Embeddings,
    Route::Responses,
    Route::Rerank,
    Route::Messages,
    Route::Generate,
    Route::InferenceGenerate,
    Route::Tokenize,
    Route::Pooling,
    Route::Score,
];

pub fn json(data: &[u8]) {
    let Some((&how, body)) = data.split_first() else {
        return;
    };
    let masked = mask(body);
    match scan(body) {
        Ok(fields) => {
            let twin = members(&masked).expect("serde_json takes what the scan takes");
            assert!(depth(body) <= DEPTH_MAX);
            check_fields(body, &fields, &twin);
            check_key(how, body, &fields, &twin);
        }
        Err(ScanError::Empty) => assert!(body.trim_ascii().is_empty()),
        Err(ScanError::NotAnObject) => {
            assert!(
                is_json(&masked) && members(&masked).is_none(),
                "it is an object"
            );
        }
        Err(ScanError::TooDeep { .. }) => {
            assert!(depth(body) > DEPTH_MAX, "{} levels", depth(body))
        }
        Err(ScanError::NotUtf8 { at }) => {
            let why = std::str::from_utf8(body).expect_err("it is UTF-8");
            assert_eq!(why.valid_up_to(), at);
        }
        Err(ScanError::Syntax { at }) => {
            assert!(at <= body.len());
            assert!(!is_json(&masked), "serde_json takes it");
        }
    }
}

fn check_fields(body: &[u8], fields: &Fields, twin: &[Member]) {
    let last = |name: &str| {
        let of_name = |(n, _): &&Member| n == name.as_bytes();
        twin.iter().rev().find(of_name).map(|(_, place)| Field {
            start: place.start,
            end: place.end,
        })
    };
    let pairs = [
        ("model", fields.model),
        ("messages", fields.messages),
        ("prompt", fields.prompt),
        ("input", fields.input),
        ("text", fields.text),
        ("input_ids", fields.input_ids),
        ("token_ids", fields.token_ids),
        ("tools", fields.tools),
        ("system", fields.system),
        ("instructions", fields.instructions),
        ("cache_salt", fields.cache_salt),
        ("stream", fields.stream),
        ("max_tokens", fields.max_tokens),
        ("max_completion_tokens", fields.max_completion_tokens),
        ("user", fields.user),
        ("prompt_cache_key", fields.prompt_cache_key),
        ("session_params", fields.session),
        ("session_id", fields.session_id),
        ("user_id", fields.user_id),
        ("vllm_xargs", fields.vllm_xargs),
        ("documents", fields.documents),
        ("query", fields.query),
    ];
    for (name, found) in pairs {
        assert_eq!(found, last(name), "{name}");
        let raw = found.map(|field| field.raw(body));
        assert_eq!(is_true(body, found), raw == Some(b"true"));
        // serde_json has no text for a lone surrogate.
        if let Some(text) = raw.and_then(|raw| serde_json::from_slice::<String>(raw).ok()) {
            assert_eq!(as_str(body, found).as_deref(), Some(&*text), "{name}");
        } else if raw.is_some_and(|raw| raw[0] != b'"') {
            assert_eq!(as_str(body, found), None, "{name} is no string");
        }
    }
    let is_lora = |name: &[u8]| matches!(name, b"lora_path" | b"lora_name" | b"adapter");
    let all = twin.iter().filter(|(name, _)| is_lora(name));
    let named = |place: &std::ops::Range<usize>| &body[place.clone()] != b"null";
    let places: Vec<_> = all.map(|(_, place)| place.clone()).collect();
    let lora = places.iter().rfind(|place| named(place)).or(places.first());
    assert_eq!(
        fields.lora.map(|field| field.start..field.end),
        lora.cloned()
    );
}

const SEED: KeySeed = KeySeed(7);

fn key_of(route: Route, body: &[u8]) -> (Option<u64>, Vec<u64>, Option<u64>) {
    let fields = scan(body).expect("it is JSON");
    let mut hashes = Vec::new();
    let len = chain(SEED, route, body, &fields, &mut hashes);
    let first = prefix_hash(SEED, route, body, &fields, 200);
    (len, hashes.iter().map(|hash| hash.0).collect(), first)
}

/// The key depends on the values that matter alone, not on what stands around them; and prompts share exactly the blocks
/// that their begins share.
fn check_key(how: u8, body: &[u8], fields: &Fields, twin: &[Member]) {
    let route = ROUTES[usize::from(how) % ROUTES.len()];
    let key = key_of(route, body);
    let (len, hashes, first) = &key;
    assert_eq!(len.is_some(), first.is_some());
    assert_eq!(
        hashes.len(),
        len.unwrap_or(0) as usize / BLOCK_BYTES,
        "one hash a block"
    );
    assert!(!hashes.contains(&0));

    let written = |hidden: Option<&[u8]>| {
        let mut out = b" { ".to_vec();
        for (name, place) in twin.iter().rev() {
            // The last of a name is the first now.
            let is_last = !twin
                .iter()
                .any(|(other, at)| other == name && at.start > place.start);
            // A lone surrogate in a name cannot be written as text; none of ours has one.
            if let (true, Ok(name)) = (is_last && hidden != Some(name), std::str::from_utf8(name)) {
                let name = serde_json::to_string(name).unwrap();
                out.extend_from_slice(format!("{name} : ").as_bytes());
                out.extend_from_slice(&body[place.clone()]);
                out.extend_from_slice(b" ,");
            }
        }
        out.extend_from_slice(b"\"zzz\":[]}");
        out
    };
    // Of the three names of an adapter the order decides.
    if fields.lora.is_none() {
        assert_eq!(key_of(route, &written(None)), key, "written otherwise");
    }
    if route != Route::ChatCompletions && route != Route::Messages {
        return;
    }
    let Some(prompt) = fields
        .messages
        .map(|field| field.raw(body))
        .filter(|raw| *raw != b"null")
    else {
        return assert_eq!(*len, None, "a key without a prompt");
    };
    assert_eq!(*len, Some(prompt.len() as u64));
    // The last messages stands: another prompt, with a different byte at some place of the text of the old one.
    let text: String = String::from_utf8_lossy(prompt)
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect();
    if text.len() < BLOCK_BYTES || fields.lora.is_some() {
        return;
    }
    let at = usize::from(how) * 31 % text.len();
    let mut other = text.clone();
    other.replace_range(at..=at, "-");
    let with = |text: &str| {
        let mut out = written(Some(b"messages"));
        out.truncate(out.len() - 1);
        out.extend_from_slice(format!(",\"messages\":\"{text}\"}}").as_bytes());
        key_of(route, &out).1
    };
    let (one, two) = (with(&text), with(&other));
    let shared = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
    // The opening quote is the first byte.
    assert_eq!(
        shared,
        ((at + 1) / BLOCK_BYTES).min(one.len()),
        "blocks in common"
    );
    assert!(
        one.iter()
            .skip(shared)
            .zip(two.iter().skip(shared))
            .all(|(a, b)| a != b)
    );
}
