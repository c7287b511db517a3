//! What makes two prompts share a chain, and what does not.

use super::super::scan::scan;
use super::*;

const SEED: KeySeed = KeySeed(0);

fn keyed(seed: KeySeed, route: Route, body: &str) -> Option<(u64, Vec<u64>)> {
    let fields = scan(body.as_bytes()).unwrap();
    let mut hashes = vec![PrefixHash(7); 3];
    let length = chain(seed, route, body.as_bytes(), &fields, &mut hashes)?;
    Some((length, hashes.into_iter().map(|hash| hash.0).collect()))
}

fn hashes(route: Route, body: &str) -> Vec<u64> {
    keyed(SEED, route, body).unwrap().1
}

fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Different text for each position, so that no two blocks are equal by chance.
fn text(bytes: usize) -> String {
    (0..)
        .map(|n| format!("word{n} "))
        .flat_map(String::into_bytes)
        .map(char::from)
        .take(bytes)
        .collect()
}

#[test]
fn known_values_stay_what_they_are() {
    // Head nodes of different versions exchange keys: a change here is a change of the format.
    let body = format!(
        r#"{{"model":"m","tools":[1],"messages":"{}"}}"#,
        "a".repeat(400)
    );
    let (length, hashes) = keyed(SEED, Route::ChatCompletions, &body).unwrap();
    assert_eq!(length, 402);
    assert_eq!(hashes, KNOWN_CHAT);
    let body = format!(r#"{{"prompt":[{}1]}}"#, "12345,".repeat(30));
    assert_eq!(hashes_with(SEED, &body), [KNOWN_COMPLETION]);
    assert_eq!(hashes_with(KeySeed(1), &body), [KNOWN_COMPLETION_OF_SEED_1]);
}

const KNOWN_CHAT: [u64; 3] = [
    16005920294825429752,
    18093628469969639242,
    11956470392558716050,
];
const KNOWN_COMPLETION: u64 = 6721040226044868454;
const KNOWN_COMPLETION_OF_SEED_1: u64 = 11623129913953545826;

fn hashes_with(seed: KeySeed, body: &str) -> Vec<u64> {
    keyed(seed, Route::Completions, body).unwrap().1
}

#[test]
fn the_next_turn_of_a_conversation_continues_the_chain() {
    let turn =
        |messages: &str| format!(r#"{{"model":"m","stream":true,"messages":[{messages}],"n":1}}"#);
    let first = format!(r#"{{"role":"user","content":"{}"}}"#, text(3000));
    let second = format!(
        r#"{first}, {{"role":"assistant","content":"yes"}},{{"role":"user","content":"and?"}}"#
    );
    let (first, second) = (
        hashes(Route::ChatCompletions, &turn(&first)),
        hashes(Route::ChatCompletions, &turn(&second)),
    );
    // All but the block with the closing bracket, if that is whole.
    assert!(
        common(&first, &second) >= first.len() - 1,
        "{} of {}",
        common(&first, &second),
        first.len()
    );
    assert!(first.len() >= 23);
}

#[test]
fn a_change_in_one_block_changes_it_and_all_after_it() {
    let body = |text: &str| format!(r#"{{"prompt":"{text}"}}"#);
    let original = text(2000);
    let a = hashes(Route::Completions, &body(&original));
    for at in [0, 126, 127, 128, 700, 1900] {
        let mut changed = original.clone().into_bytes();
        changed[at] ^= 1;
        let b = hashes(
            Route::Completions,
            &body(&String::from_utf8(changed).unwrap()),
        );
        // The opening quote stands before the text.
        assert_eq!(common(&a, &b), (at + 1) / BLOCK_BYTES, "byte {at}");
        assert!(
            a.iter()
                .zip(&b)
                .skip((at + 1) / BLOCK_BYTES)
                .all(|(a, b)| a != b)
        );
    }
}

#[test]
fn exchanged_blocks_and_repeated_blocks_give_other_hashes() {
    let (a, b) = ("a".repeat(BLOCK_BYTES), "b".repeat(BLOCK_BYTES));
    let of = |blocks: &str| {
        hashes(
            Route::Completions,
            &format!(r#"{{"prompt":"{}{blocks}"}}"#, "x".repeat(127)),
        )
    };
    let (ab, ba, aa) = (
        of(&format!("{a}{b}")),
        of(&format!("{b}{a}")),
        of(&format!("{a}{a}")),
    );
    assert_ne!(ab[2], ba[2]);
    assert_ne!(aa[1], aa[2]);
    assert_eq!((ab[1] == aa[1], ab[2] == aa[2]), (true, false));
}

#[test]
fn what_forbids_reuse_gives_another_chain_from_the_start() {
    let prompt = text(1000);
    let base = hashes(
        Route::ChatCompletions,
        &format!(r#"{{"messages":"{prompt}"}}"#),
    );
    let mut chains = vec![base];
    for beside in [
        r#""model":"a""#,
        r#""model":"b""#,
        r#""lora_path":"a""#,
        r#""cache_salt":"a""#,
        r#""tools":"a""#,
        r#""model":"a","tools":"a""#,
        r#""model":"a","cache_salt":"a""#,
        r#""model":"ab""#,
        r#""model":"a","lora_name":"b""#,
    ] {
        chains.push(hashes(
            Route::ChatCompletions,
            &format!(r#"{{{beside},"messages":"{prompt}"}}"#),
        ));
    }
    for (index, a) in chains.iter().enumerate() {
        for b in &chains[..index] {
            assert!(a.iter().zip(b).all(|(a, b)| a != b));
        }
    }
    // The system text counts where the endpoint has one, and only there.
    let with = |route, beside: &str| {
        hashes(
            route,
            &format!(r#"{{{beside},"messages":"{prompt}","input":"{prompt}"}}"#),
        )
    };
    let (system, instructions) = (r#""system":"s""#, r#""instructions":"s""#);
    assert_ne!(
        with(Route::Messages, system),
        with(Route::Messages, instructions)
    );
    assert_ne!(
        with(Route::Responses, system),
        with(Route::Responses, instructions)
    );
    assert_eq!(
        with(Route::ChatCompletions, system),
        with(Route::ChatCompletions, instructions)
    );
}

#[test]
fn what_does_not_touch_reuse_changes_nothing() {
    let prompt = text(1000);
    let base = hashes(
        Route::ChatCompletions,
        &format!(r#"{{"model":"m","messages":"{prompt}"}}"#),
    );
    for body in [
        format!(r#"{{"messages":"{prompt}","model":"m"}}"#),
        format!(
            r#"{{ "stream" : true , "model" : "m" , "messages" : "{prompt}" , "max_tokens" : 7 }}"#
        ),
        format!(
            r#"{{"model":"m","messages":"{prompt}","user":"u","tools":null,"cache_salt":null,"lora_name":null}}"#
        ),
    ] {
        assert_eq!(hashes(Route::ChatCompletions, &body), base);
    }
}

#[test]
fn a_request_without_a_prompt_has_no_key() {
    for route in Route::ALL {
        assert_eq!(
            keyed(SEED, route, r#"{"model":"m","user":"u"}"#),
            None,
            "{route:?}"
        );
        let nulls = r#"{"messages":null,"prompt":null,"input":null,"text":null,"input_ids":null,"token_ids":null,"query":null,"documents":null}"#;
        assert_eq!(keyed(SEED, route, nulls), None, "{route:?}");
    }
    // Only a short one is something else: it has a length, and no whole block.
    assert_eq!(
        keyed(SEED, Route::Completions, r#"{"prompt":""}"#),
        Some((2, vec![]))
    );
}

#[test]
fn each_endpoint_takes_its_own_field() {
    let prompt = text(600);
    let expected = hashes(Route::Completions, &format!(r#"{{"prompt":"{prompt}"}}"#));
    let cases = [
        (Route::ChatCompletions, "messages"),
        (Route::Messages, "messages"),
        (Route::Embeddings, "input"),
        (Route::Embeddings, "messages"),
        (Route::Pooling, "input"),
        (Route::Responses, "input"),
        (Route::Generate, "text"),
        (Route::Generate, "prompt"),
        (Route::Generate, "input_ids"),
        (Route::InferenceGenerate, "token_ids"),
        (Route::Tokenize, "prompt"),
        (Route::Tokenize, "messages"),
        (Route::Rerank, "query"),
        (Route::Rerank, "documents"),
        (Route::Score, "input"),
        (Route::Score, "prompt"),
        (Route::Score, "text"),
    ];
    for (route, name) in cases {
        assert_eq!(
            hashes(route, &format!(r#"{{"{name}":"{prompt}"}}"#)),
            expected,
            "{route:?} {name}"
        );
    }
    for route in [Route::Admin, Route::Other] {
        assert_eq!(
            keyed(SEED, route, &format!(r#"{{"prompt":"{prompt}"}}"#)),
            None
        );
    }
}

#[test]
fn a_rerank_is_its_query_and_then_its_documents() {
    for query_bytes in [0, 1, 100, 126, 127, 300, 5000] {
        let (query, documents) = (text(query_bytes), text(1500));
        let body = format!(r#"{{"documents":["{documents}"],"query":"{query}"}}"#);
        let joined = format!(r#""{query}"["{documents}"]"#);
        let (length, found) = keyed(SEED, Route::Rerank, &body).unwrap();
        assert_eq!(length, joined.len() as u64);
        let mut expected = Vec::new();
        let (mixer, mut link) = (Mixer::new(SEED), Mixer::new(SEED).first);
        for block in joined.as_bytes().chunks_exact(BLOCK_BYTES) {
            link = mixer.fold(link, mixer.hash(block));
            expected.push(link);
        }
        assert_eq!(found, expected, "query of {query_bytes} bytes");
    }
}

#[test]
fn blocks_grow_long_after_512_kib_and_end_at_16_mib() {
    assert_eq!(
        [0, 1, 4096, 4097, 4098].map(bytes_of_blocks),
        [0, 128, 524_288, 528_384, 532_480]
    );
    for (bytes, blocks) in [
        (127, 0),
        (128, 1),
        (524_288, 4096),
        (528_383, 4096),
        (528_384, 4097),
    ] {
        let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(bytes - 2));
        let (length, hashes) = keyed(SEED, Route::Completions, &body).unwrap();
        assert_eq!((length, hashes.len()), (bytes as u64, blocks));
        assert!(bytes_of_blocks(blocks) <= length);
    }
    let media = |tail: &str| format!(r#"{{"prompt":"{}{tail}"}}"#, "x".repeat(HASHED_BYTES_MAX));
    let (length, hashes) = keyed(SEED, Route::Completions, &media("a")).unwrap();
    assert_eq!(
        (length, bytes_of_blocks(hashes.len())),
        (HASHED_BYTES_MAX as u64, HASHED_BYTES_MAX as u64)
    );
    assert_eq!(hashes.len(), 8064);
    assert_eq!(
        keyed(SEED, Route::Completions, &media("b")),
        Some((length, hashes))
    );
    // In two parts as in one.
    let body = format!(
        r#"{{"query":"{}","documents":"{}"}}"#,
        "x".repeat(600_001),
        "y".repeat(HASHED_BYTES_MAX)
    );
    let (length, hashes) = keyed(SEED, Route::Rerank, &body).unwrap();
    assert_eq!((length, hashes.len()), (HASHED_BYTES_MAX as u64, 8064));
}

#[test]
fn another_seed_gives_another_chain() {
    let body = format!(r#"{{"prompt":"{}"}}"#, text(2000));
    let (a, b) = (
        hashes_with(KeySeed(1), &body),
        hashes_with(KeySeed(2), &body),
    );
    assert!(a.iter().zip(&b).all(|(a, b)| a != b));
}

/// `prefix_hash`: what begins alike is one key, whatever follows; what could share nothing is another.
#[test]
fn the_hash_of_a_begin() {
    let hash = |route, body: &str, bytes| {
        let fields = scan(body.as_bytes()).expect("JSON");
        prefix_hash(KeySeed(3), route, body.as_bytes(), &fields, bytes)
    };
    let of = |prompt: &str| {
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        hash(Route::Completions, &body, 9)
    };
    // The quote counts: eight letters.
    assert_eq!(of("abcdefgh and"), of("abcdefgh or"));
    assert_ne!(of("abcdefgx and"), of("abcdefgh and"));
    assert_ne!(of("abc"), of("abcd"));
    let other_model = r#"{"model":"n","prompt":"abcdefgh and"}"#;
    assert_ne!(hash(Route::Completions, other_model, 9), of("abcdefgh and"));
    for none in ["{}", r#"{"prompt":null}"#, r#"{"messages":[]}"#] {
        assert_eq!(hash(Route::Completions, none, 9), None);
    }
    let rerank = |query: &str, documents: &str| {
        let body = format!(r#"{{"documents":"{documents}","query":"{query}"}}"#);
        hash(Route::Rerank, &body, 9)
    };
    assert_eq!(
        rerank("abcd", "xyz1"),
        rerank("abcd", "xyz2"),
        "6 + 3 bytes"
    );
    assert_ne!(rerank("abcd", "xyz"), rerank("abcd", "xaz"));
}
