//! P/D through the whole router, where nothing fails: what reaches the workers of both legs, which requests take two, who
//! is chosen, and what of prefill's answer the client sees.

mod common;

use std::time::Duration;

use common::pd::*;
use common::*;
use corelane::Router;
use shards::Counter;
use tokio::sync::watch;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const RESPONSES: &str = "/v1/responses";
const GENERATE: &str = "/inference/v1/generate";

/// Endpoint, the client's body, the prefill leg's, and the decode leg's (`=`: the client's), where `@` stands for the
/// transfer parameters, name and all.
const BODIES: [(&str, &str, &str, &str); 28] = [
    (
        CHAT,
        r#"{"messages":[]}"#,
        r#"{"messages":[],"max_tokens":1,@}"#,
        r#"{"messages":[],@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens": 500 ,"messages":[]}"#,
        r#"{"max_tokens": 1 ,"messages":[],@}"#,
        r#"{"max_tokens": 500 ,"messages":[],@}"#,
    ),
    (
        CHAT,
        r#"{"max_completion_tokens":9,"messages":[]}"#,
        r#"{"max_completion_tokens":1,"messages":[],@}"#,
        r#"{"max_completion_tokens":9,"messages":[],@}"#,
    ),
    (
        CHAT,
        r#"{"max_completion_tokens":9,"max_tokens":8}"#,
        r#"{"max_completion_tokens":1,"max_tokens":1,@}"#,
        r#"{"max_completion_tokens":9,"max_tokens":8,@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":null,"min_tokens":7}"#,
        r#"{"max_tokens":1,"min_tokens":1,@}"#,
        r#"{"max_tokens":null,"min_tokens":7,@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"min_tokens":0}"#,
        r#"{"max_tokens":1,"min_tokens":0,@}"#,
        r#"{"max_tokens":7,"min_tokens":0,@}"#,
    ),
    (
        CHAT,
        r#"{"stream":true,"max_tokens":7}"#,
        r#"{"stream":false,"max_tokens":1,@}"#,
        r#"{"stream":true,"max_tokens":7,@}"#,
    ),
    (
        CHAT,
        r#"{"stream_options":{"include_usage":true},"stream":true,"max_tokens":7}"#,
        r#"{"stream":false,"max_tokens":1,@}"#,
        r#"{"stream_options":{"include_usage":true},"stream":true,"max_tokens":7,@}"#,
    ),
    (
        CHAT,
        r#"{"stream":true,"stream_options":{"a":[1,{}]},"max_tokens":7}"#,
        r#"{"stream":false,"max_tokens":1,@}"#,
        r#"{"stream":true,"stream_options":{"a":[1,{}]},"max_tokens":7,@}"#,
    ),
    (
        CHAT,
        r#"{"stream":true,"max_tokens":7,"stream_options":null}"#,
        r#"{"stream":false,"max_tokens":1,@}"#,
        r#"{"stream":true,"max_tokens":7,"stream_options":null,@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"kv_transfer_params":{"remote_block_ids":[9]},"z":1}"#,
        r#"{"max_tokens":1,"z":1,@}"#,
        r#"{"max_tokens":7,"z":1,@}"#,
    ),
    (
        CHAT,
        r#"{"kv_transfer_params":{"do_remote_prefill":true}}"#,
        r#"{"max_tokens":1,@}"#,
        r#"{@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"unknown":{"max_tokens":5,"stream":true,"kv_transfer_params":{},"min_tokens":8}}"#,
        r#"{"max_tokens":1,"unknown":{"max_tokens":5,"stream":true,"kv_transfer_params":{},"min_tokens":8},@}"#,
        r#"{"max_tokens":7,"unknown":{"max_tokens":5,"stream":true,"kv_transfer_params":{},"min_tokens":8},@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"seed":123456789012345678901234567890,"id":18446744073709551616}"#,
        r#"{"max_tokens":1,"seed":123456789012345678901234567890,"id":18446744073709551616,@}"#,
        r#"{"max_tokens":7,"seed":123456789012345678901234567890,"id":18446744073709551616,@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"temperature":2.50,"top_p":1e-0,"x":-0.0,"y":1E+2}"#,
        r#"{"max_tokens":1,"temperature":2.50,"top_p":1e-0,"x":-0.0,"y":1E+2,@}"#,
        r#"{"max_tokens":7,"temperature":2.50,"top_p":1e-0,"x":-0.0,"y":1E+2,@}"#,
    ),
    (
        CHAT,
        r#"{"a":1,"a":2,"max_tokens":3,"max_tokens":4,"a":3}"#,
        r#"{"a":1,"a":2,"max_tokens":1,"max_tokens":1,"a":3,@}"#,
        r#"{"a":1,"a":2,"max_tokens":3,"max_tokens":4,"a":3,@}"#,
    ),
    (
        CHAT,
        r#"{"stream":false,"stream":true,"max_tokens":7}"#,
        r#"{"stream":false,"stream":false,"max_tokens":1,@}"#,
        r#"{"stream":false,"stream":true,"max_tokens":7,@}"#,
    ),
    (
        CHAT,
        r#"{"max_tokens":7,"s":"\u00e9\/\"\\}{,\ud83d\ude00é😀\u0000"}"#,
        r#"{"max_tokens":1,"s":"\u00e9\/\"\\}{,\ud83d\ude00é😀\u0000",@}"#,
        r#"{"max_tokens":7,"s":"\u00e9\/\"\\}{,\ud83d\ude00é😀\u0000",@}"#,
    ),
    (
        CHAT,
        "\t{\r\n  \"max_tokens\" : 7 ,\n  \"messages\" : [ ]\n}\r\n ",
        "\t{\r\n  \"max_tokens\" : 1 ,\n  \"messages\" : [ ]\n,@}\r\n ",
        "\t{\r\n  \"max_tokens\" : 7 ,\n  \"messages\" : [ ]\n,@}\r\n ",
    ),
    (CHAT, "{ }", "{ \"max_tokens\":1,@}", "{ @}"),
    (
        COMPLETIONS,
        r#"{"prompt":"x","max_tokens":16,"logprobs":3,"n":1,"best_of":1,"echo":false}"#,
        r#"{"prompt":"x","max_tokens":1,"logprobs":3,"n":1,"best_of":1,"echo":false,@}"#,
        r#"{"prompt":"x","max_tokens":16,"logprobs":3,"n":1,"best_of":1,"echo":false,@}"#,
    ),
    (
        COMPLETIONS,
        r#"{"prompt":[1,22,333],"max_tokens":16}"#,
        r#"{"prompt":[1,22,333],"max_tokens":1,@}"#,
        r#"{"prompt":[1,22,333],"max_tokens":16,@}"#,
    ),
    (
        COMPLETIONS,
        r#"{"prompt":["one"]}"#,
        r#"{"prompt":["one"],"max_tokens":1,@}"#,
        r#"{"prompt":["one"],@}"#,
    ),
    (
        RESPONSES,
        r#"{"input":"x","max_output_tokens":70,"stream":true}"#,
        r#"{"input":"x","max_output_tokens":1,"stream":false,@}"#,
        r#"{"input":"x","max_output_tokens":70,"stream":true,@}"#,
    ),
    (
        RESPONSES,
        r#"{"input":"x"}"#,
        r#"{"input":"x","max_output_tokens":1,@}"#,
        r#"{"input":"x",@}"#,
    ),
    (
        GENERATE,
        r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":50,"min_tokens":3,"temperature":0.10}}"#,
        r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":1,"min_tokens":1,"temperature":0.10},@}"#,
        r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":50,"min_tokens":3,"temperature":0.10},@}"#,
    ),
    (
        GENERATE,
        r#"{"token_ids":[1,2],"sampling_params":{ "top_k":3 }}"#,
        r#"{"token_ids":[1,2],"sampling_params":{ "top_k":3 ,"max_tokens":1},@}"#,
        r#"{"token_ids":[1,2],"sampling_params":{ "top_k":3 },@}"#,
    ),
    (
        GENERATE,
        r#"{"token_ids":[1,2]}"#,
        r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":1},@}"#,
        r#"{"token_ids":[1,2],@}"#,
    ),
];

#[tokio::test]
async fn both_legs_get_the_clients_bytes_with_no_more_changed_than_the_split_needs() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    for (path, body, prefill, decode) in BODIES {
        let answer = client.post(path, body.as_bytes()).await.unwrap();
        assert_eq!(answer.status, 200, "{body}");
        let seen = pools.prefill_requests().pop().unwrap();
        let asked = format!("\"kv_transfer_params\":{PREFILL_PARAMS}");
        assert_eq!(
            text(&seen.body),
            prefill.replace('@', &asked),
            "prefill of {body}"
        );
        assert_eq!(seen.line, format!("POST {path} HTTP/1.1"));
        let seen = pools.decode_requests().pop().unwrap();
        let params = params_of(&seen.body).expect("parameters");
        let given = format!("\"kv_transfer_params\":{params}");
        assert_eq!(
            text(&seen.body),
            decode.replace('@', &given),
            "decode of {body}"
        );
        assert_eq!(seen.line, format!("POST {path} HTTP/1.1"));
    }
    assert_eq!(pools.transfers.issued(), BODIES.len() as u64);
    assert_eq!(pools.transfers.fetched(), BODIES.len());
    pools.transfers.assert_kept();
    assert_eq!(
        pd_total(&router, |pd| pd.handovers.value()),
        BODIES.len() as u64
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn names_in_escapes_are_the_names_they_mean() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    let body = br#"{"max_tok\u0065ns":70,"str\u0065am":true,"stream\u005foptions":{},"kv\u005ftransfer_params":{"own":1}}"#;
    assert_eq!(client.post(CHAT, body).await.unwrap().status, 200);
    // What the worker checked is what its JSON parser understood.
    pools.transfers.assert_kept();
    assert!(!pools.decode_requests()[0].has_text("own"));
    assert!(!pools.prefill_requests()[0].has_text("own"));
}

#[tokio::test]
async fn each_endpoint_takes_two_legs_or_one_worker_of_the_role_that_fits() {
    // Prefill requests, decode requests.
    let table = [
        ("POST", CHAT, (1, 1)),
        ("POST", COMPLETIONS, (1, 1)),
        ("POST", RESPONSES, (1, 1)),
        ("POST", GENERATE, (1, 1)),
        ("POST", "/generate", (1, 1)),
        ("POST", "/v1/chat/completions?x=1", (1, 1)),
        ("POST", "/v1/messages", (0, 1)),
        ("POST", "/tokenize", (1, 0)),
        ("POST", "/v1/embeddings", (1, 0)),
        ("POST", "/score", (1, 0)),
        ("POST", "/v1/score", (1, 0)),
        ("POST", "/rerank", (1, 0)),
        ("POST", "/v1/rerank", (1, 0)),
        ("POST", "/pooling", (1, 0)),
        ("POST", "/v1/audio/transcriptions", (0, 1)),
        ("POST", "/detokenize", (0, 1)),
        ("GET", "/version", (0, 1)),
        ("GET", "/v1/responses/resp_1", (0, 1)),
        ("DELETE", "/v1/files/x", (0, 1)),
    ];
    let pools = Pools::start(2, 2).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    let body = br#"{"model":"m","prompt":"x"}"#;
    for (method, path, (prefill, decode)) in table {
        let before = (pools.prefill_count(), pools.decode_count());
        let mut request = post(path, body);
        if method != "POST" {
            request = format!("{method} {path} HTTP/1.1\r\nHost: r\r\n\r\n").into_bytes();
        }
        for worker in &pools.prefill {
            match prefill + decode {
                2 => prefill_script(worker, &pools.transfers, |_| None),
                _ => worker.script(|_| Reply::default()),
            }
        }
        client.send(&request).await;
        assert_eq!(client.answer(false).await.unwrap().status, 200, "{path}");
        let seen = (
            pools.prefill_count() - before.0,
            pools.decode_count() - before.1,
        );
        assert_eq!(seen, (prefill, decode), "{method} {path}");
        if method == "POST" && prefill + decode == 1 {
            let all = pools
                .prefill_requests()
                .into_iter()
                .chain(pools.decode_requests());
            let seen = all
                .filter(|r| r.line == format!("POST {path} HTTP/1.1"))
                .reduce(|_, later| later);
            assert_eq!(text(&seen.unwrap().body), text(body), "{path}");
        }
    }
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn what_one_hand_over_cannot_serve_goes_whole_to_one_decode_worker() {
    let pools = Pools::start(1, 2).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    let table = [
        (0, CHAT, r#"{"messages":[],"n":2}"#),
        (0, COMPLETIONS, r#"{"prompt":"x","best_of":3}"#),
        (
            0,
            GENERATE,
            r#"{"token_ids":[1],"sampling_params":{"n":2}}"#,
        ),
        (1, COMPLETIONS, r#"{"prompt":"x","use_beam_search":true}"#),
        (2, CHAT, r#"{"messages":[],"prompt_logprobs":0}"#),
        (
            2,
            GENERATE,
            r#"{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}"#,
        ),
        (3, COMPLETIONS, r#"{"prompt":"x","echo":true}"#),
        (4, COMPLETIONS, r#"{"prompt":["a","b"]}"#),
        (4, COMPLETIONS, r#"{"prompt":[[1,2],[3]]}"#),
        (5, COMPLETIONS, r#"{"prompt_embeds":"AAAA"}"#),
    ];
    for (n, (why, path, body)) in table.into_iter().enumerate() {
        // The client's own parameters name blocks of others.
        let own = format!(r#"{{"kv_transfer_params":{{"own":1}},{}"#, &body[1..]);
        let before = pd_total(&router, |pd| pd.whole[why].value());
        for sent in [body, &own] {
            let answer = client.post(path, sent.as_bytes()).await.unwrap();
            assert_eq!(
                (answer.status, &*text(&answer.body)),
                (200, DECODE_BODY),
                "{body}"
            );
        }
        assert_eq!(pools.decode_count(), 2 * (n as u64 + 1), "{body}");
        assert_eq!(
            pd_total(&router, |pd| pd.whole[why].value()) - before,
            2,
            "{body}"
        );
        for seen in pools.decode_requests() {
            assert!(!seen.has_text("kv_transfer_params"), "{}", text(&seen.body));
        }
        assert_eq!(
            pools
                .decode_requests()
                .iter()
                .filter(|r| r.body == body.as_bytes())
                .count(),
            2,
            "{body}"
        );
    }
    assert_eq!(pools.prefill_count(), 0);
    assert_eq!(
        pd_total(&router, |pd| pd.requests.iter().map(Counter::value).sum()),
        20
    );
    until_books_are_empty(&router).await;
}

fn request_with(fields: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n{fields}\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}

#[tokio::test]
async fn end_to_end_fields_reach_both_legs_and_every_attempt() {
    let pools = Pools::start(2, 2).await;
    let router = pools.router(&["--api-key", "routers"]).await;
    // Each leg needs a second attempt, and the second prefill is the third one's.
    pools.prefill_fails_first(Reply::json(503, "{}"));
    pools.decode_fails_first(Reply::json(503, "{}"));
    let fields = "Authorization: Bearer client\r\ntraceparent: 00-a-b-01\r\ntracestate: x=1\r\nX-Custom: v;w\r\nX-Dup: 1\r\nX-Dup: 2\r\n\
                  Connection: X-Hop\r\nX-Hop: h\r\nX-data-parallel-rank-hint: 3\r\nX-Request-Id: me\r\n";
    let mut client = Client::open(router.address).await;
    client.send(&request_with(fields, &chat("x"))).await;
    assert_eq!(client.answer(false).await.unwrap().status, 200);
    let (prefill, decode) = (pools.prefill_requests(), pools.decode_requests());
    assert_eq!((prefill.len(), decode.len()), (3, 2));
    for (seen, worker) in pools
        .prefill
        .iter()
        .chain(&pools.decode)
        .flat_map(|w| w.requests().into_iter().map(move |r| (r, w)))
    {
        assert_eq!(seen.all("host"), [worker.address.to_string().as_bytes()]);
        assert_eq!(seen.all("authorization"), [b"Bearer client"]);
        assert_eq!(seen.all("traceparent"), [b"00-a-b-01"]);
        assert_eq!(seen.all("tracestate"), [b"x=1"]);
        assert_eq!(seen.all("x-custom"), [b"v;w"]);
        assert_eq!(seen.all("x-dup"), [b"1", b"2"]);
        assert_eq!(seen.all("x-data-parallel-rank-hint"), [b"3"]);
        assert!(seen.all("x-hop").is_empty() && seen.all("connection").is_empty());
        assert_eq!(
            seen.all("content-length"),
            [seen.body.len().to_string().as_bytes()]
        );
        assert_eq!(seen.all("x-request-id").len(), 1);
        assert!(seen.all("x-request-id")[0].starts_with(b"me-"));
    }
    pools.transfers.assert_kept();
}

#[tokio::test]
async fn clients_without_authorization_get_the_routers_key_at_both_legs() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&["--api-key", "routers"]).await;
    let mut client = Client::open(router.address).await;
    client.post(CHAT, &chat("x")).await.unwrap();
    for seen in [&pools.prefill_requests()[0], &pools.decode_requests()[0]] {
        assert_eq!(seen.all("authorization"), [b"Bearer routers"]);
    }
}

#[tokio::test]
async fn workers_see_an_id_that_contains_the_clients_and_is_unique_and_clients_see_their_own() {
    let pools = Pools::start(1, 1).await;
    for worker in [&pools.prefill[0], &pools.decode[0]] {
        let transfers = pools.transfers.clone();
        let is_prefill = std::ptr::eq(worker, &pools.prefill[0]);
        worker.script(move |r| {
            let mut reply = match is_prefill {
                true => prefill_answer(&transfers.issue()),
                // A stream is relayed by other code than an answer that is held.
                false if r.has_text("stream") => Reply::events(2, Duration::ZERO),
                false => decode_answer(),
            };
            let id = text(r.all("x-request-id")[0]);
            reply.fields.push(("X-Request-Id".into(), id));
            reply
        });
    }
    let router = pools.router(&[]).await;
    let mut ids = std::collections::HashSet::new();
    for n in 0..6 {
        let field = match n / 2 {
            0 => "X-Request-Id: same-id.7\r\n",
            1 => "X-Correlation-Id: same-id.7\r\n",
            _ => "",
        };
        let mut client = Client::open(router.address).await;
        client
            .send(&request_with(field, &chat(["x", "stream"][n % 2])))
            .await;
        let answer = client.answer(false).await.unwrap();
        let own = answer.field("x-request-id").expect("an id").to_string();
        if !field.is_empty() {
            assert_eq!(own, "same-id.7");
        }
        let all = answer.head.to_ascii_lowercase();
        assert_eq!(all.matches("x-request-id:").count(), 1, "{all}");
        let prefill = text(pools.prefill_requests().pop().unwrap().all("x-request-id")[0]);
        let decode = text(pools.decode_requests().pop().unwrap().all("x-request-id")[0]);
        assert_eq!(prefill, decode, "both legs are one request");
        assert!(
            prefill.contains(&own) && prefill != own,
            "{prefill} of {own}"
        );
        assert!(ids.insert(prefill), "an id twice");
    }
}

/// What the client has to see of `DECODE_BODY`.
const FIXED_BODY: &str = r#"{"id":"d","object":"chat.completion","choices":[{"message":{"content":"caf\u00e9 2.50"}}],"usage":{"prompt_tokens":91,"total_tokens":98,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}}}"#;

#[tokio::test]
async fn the_answer_has_prefills_token_counts_and_else_decodes_bytes() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!(text(&answer.body), FIXED_BODY);
    assert_eq!(
        answer.field("content-length"),
        Some(&*FIXED_BODY.len().to_string())
    );
    assert_eq!(answer.field("content-type"), Some("application/json"));
    // The connection is in step, and the answer may come in pieces.
    decode_script(&pools.decode[0], &pools.transfers, |_| {
        let pieces = DECODE_BODY.as_bytes().chunks(23);
        Some(Reply {
            pieces: pieces
                .map(|p| (Duration::from_millis(1), p.to_vec()))
                .collect(),
            ..decode_answer()
        })
    });
    for _ in 0..2 {
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!(text(&answer.body), FIXED_BODY);
    }
    assert_eq!(pd_total(&router, |pd| pd.usage_fixed.value()), 3);
    // Without usage, and with an error, nothing changes.
    for (status, body) in [(200, r#"{"x":2.50}"#), (400, DECODE_BODY)] {
        decode_script(&pools.decode[0], &pools.transfers, move |_| {
            Some(Reply::json(status, body))
        });
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert_eq!((answer.status, &*text(&answer.body)), (status, body));
    }
    pools.transfers.assert_kept();
}

const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\u00e9 2.50 \\\"usage\\\"\"}}],\"usage\":null}\n\n: comment\n\nevent: x\nid: 7\ndata: {\"a\":12345678901234567890}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":1092,\"total_tokens\":1099,\"completion_tokens\":7,\"prompt_tokens_details\":{\"cached_tokens\":1091}}}\n\ndata: [DONE]\n\n";

fn fixed_stream() -> String {
    STREAM
        .replace("\"prompt_tokens\":1092", "\"prompt_tokens\":91")
        .replace("\"total_tokens\":1099", "\"total_tokens\":98")
        .replace("\"cached_tokens\":1091", "\"cached_tokens\":64")
}

#[tokio::test]
async fn a_stream_in_odd_pieces_has_prefills_token_counts_and_else_decodes_bytes() {
    let mut rng = Rng(seed());
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    for round in 0..30 {
        let (mut rest, mut pieces) = (STREAM.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let most = [1, 7, 40, 400][round % 4];
            let (piece, after) =
                rest.split_at((1 + rng.below(most)).min(rest.len() as u64) as usize);
            let pause = Duration::from_micros(if rng.below(4) == 0 { 200 } else { 0 });
            pieces.push((pause, piece.to_vec()));
            rest = after;
        }
        decode_script(&pools.decode[0], &pools.transfers, move |_| {
            Some(Reply {
                pieces: pieces.clone(),
                ..Reply::events(0, Duration::ZERO)
            })
        });
        let answer = client.post(CHAT, &chat("x")).await.unwrap();
        assert!(answer.is_whole);
        assert_eq!(text(&answer.body), fixed_stream(), "round {round}");
    }
    until("all are counted", || {
        pd_total(&router, |pd| pd.usage_fixed.value()) == 30
    })
    .await;
}

#[tokio::test]
async fn an_event_reaches_the_client_before_the_next_one_is_there() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let first = &STREAM[..STREAM.find("\n\n").unwrap() + 2];
    decode_script(&pools.decode[0], &pools.transfers, move |_| {
        Some(Reply {
            pieces: vec![(Duration::ZERO, first.as_bytes().to_vec())],
            end: End::Stall,
            ..Reply::events(0, Duration::ZERO)
        })
    });
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    client.head().await.unwrap();
    let chunk = format!("{:x}\r\n{first}\r\n", first.len());
    assert!(client.fill(chunk.len()).await);
    assert_eq!(text(&client.buffer), chunk);
    client.reset();
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn the_books_hold_both_seats_in_prefill_and_then_the_decode_seat_alone() {
    let pools = Pools::start(1, 1).await;
    let router = pools.router(&[]).await;
    let (prefill_opens, prefill_gate) = watch::channel(false);
    let (decode_opens, decode_gate) = watch::channel(false);
    let transfers = pools.transfers.clone();
    prefill_script(&pools.prefill[0], &pools.transfers, move |_| {
        Some(Reply {
            gate: Some(prefill_gate.clone()),
            ..prefill_answer(&transfers.issue())
        })
    });
    decode_script(&pools.decode[0], &pools.transfers, move |_| {
        Some(Reply {
            gate: Some(decode_gate.clone()),
            ..decode_answer()
        })
    });
    let loads = || {
        (
            load(&router, &pools.prefill[0]),
            load(&router, &pools.decode[0]),
        )
    };
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &chat("x"))).await;
    until("prefill runs", || pools.prefill[0].in_flight() == 1).await;
    assert_eq!(loads(), ((1, 0), (1, 0)), "in prefill");
    assert_eq!(
        (
            booked(&router, &pools.prefill[0]),
            booked(&router, &pools.decode[0])
        ),
        (1, 1)
    );
    prefill_opens.send(true).unwrap();
    until("decode runs", || pools.decode[0].in_flight() == 1).await;
    until("decode is active", || loads().1 == (0, 1)).await;
    assert_eq!(loads(), ((0, 0), (0, 1)), "in decode");
    decode_opens.send(true).unwrap();
    assert_eq!(client.answer(false).await.unwrap().status, 200);
    until_books_are_empty(&router).await;
    assert_eq!(loads(), ((0, 0), (0, 0)));
}

fn prompt(text: &str) -> Vec<u8> {
    serde_json::json!({"model": "m", "prompt": text})
        .to_string()
        .into_bytes()
}

#[tokio::test]
async fn prefill_is_skipped_when_the_decode_worker_holds_nearly_all_of_the_prompt() {
    let pools = Pools::start(1, 1).await;
    let mut rng = Rng(seed());
    let router = pools
        .router(&["--cores", "1", "--pd-skip-prefill-below", "1000"])
        .await;
    let mut client = Client::open(router.address).await;
    let long = rng.text(8000);
    let send = async |client: &mut Client, body: &[u8]| {
        let answer = client.post(COMPLETIONS, body).await.unwrap();
        assert_eq!(answer.status, 200);
        text(&answer.body)
    };
    assert_eq!(send(&mut client, &prompt(&long)).await, FIXED_BODY);
    assert_eq!((pools.prefill_count(), pools.decode_count()), (1, 1));
    let next = prompt(&format!("{long}{}", rng.text(300)));
    assert_eq!(
        send(&mut client, &next).await,
        DECODE_BODY,
        "decode's own counts"
    );
    assert_eq!((pools.prefill_count(), pools.decode_count()), (1, 2));
    assert_eq!(pools.decode_requests()[1].body, next);
    // Too much is missing: two legs.
    send(&mut client, &prompt(&format!("{long}{}", rng.text(3000)))).await;
    assert_eq!((pools.prefill_count(), pools.decode_count()), (2, 3));
    assert_eq!(pd_total(&router, |pd| pd.skipped_prefill.value()), 1);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn each_role_has_a_policy_of_its_own() {
    for (flags, prefill, decode) in [
        (["--decode-policy", "round_robin"], [6, 0], [3, 3]),
        (["--prefill-policy", "round_robin"], [3, 3], [6, 0]),
        (["--policy", "round_robin"], [3, 3], [3, 3]),
    ] {
        let pools = Pools::start(2, 2).await;
        let router = pools
            .router(&[&["--cores", "1"], &flags[..]].concat())
            .await;
        let mut client = Client::open(router.address).await;
        let body = prompt(&Rng(seed()).text(3000));
        for _ in 0..6 {
            assert_eq!(client.post(COMPLETIONS, &body).await.unwrap().status, 200);
        }
        for (workers, counts) in [(&pools.prefill, prefill), (&pools.decode, decode)] {
            let mut seen: Vec<u64> = workers.iter().map(Worker::count).collect();
            seen.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(seen, counts, "{flags:?}");
        }
    }
}

/// Four requests with one long prompt that one worker of each role holds, all in prefill at once; how many of them each
/// role's workers got, the most first.
async fn crowd(flags: &[&str]) -> [Vec<u32>; 2] {
    let pools = Pools::start(2, 2).await;
    let router = pools.router(&[&["--cores", "1"], flags].concat()).await;
    let body = prompt(&Rng(seed()).text(3000));
    let mut client = Client::open(router.address).await;
    assert_eq!(client.post(COMPLETIONS, &body).await.unwrap().status, 200);
    until_books_are_empty(&router).await;
    for worker in &pools.prefill {
        prefill_script(worker, &pools.transfers, |_| {
            Some(Reply::nothing(End::Stall))
        });
    }
    let mut clients = Vec::new();
    for n in 1..=4 {
        let mut client = Client::open(router.address).await;
        client.send(&post(COMPLETIONS, &body)).await;
        clients.push(client);
        until("it is in prefill", || pools.prefill_count() == n + 1).await;
    }
    [&pools.prefill, &pools.decode].map(|workers| {
        let mut loads: Vec<u32> = workers.iter().map(|w| booked(&router, w)).collect();
        loads.sort_unstable_by(|a, b| b.cmp(a));
        loads
    })
}

#[tokio::test]
async fn a_roles_threshold_sheds_where_the_common_one_would_not_and_leaves_the_other_role_alone() {
    let rel = ["--balance-rel-threshold", "1"];
    let of = async |flags: &[&str]| crowd(&[&rel[..], flags].concat()).await;
    assert_eq!(of(&[]).await, [[4, 0], [4, 0]]);
    // The third is shed, and the fourth finds two that hold its prompt.
    let prefill = ["--prefill-balance-abs-threshold", "1"];
    assert_eq!(of(&prefill).await, [[2, 2], [4, 0]]);
    let decode = ["--decode-balance-abs-threshold", "1"];
    assert_eq!(of(&decode).await, [[4, 0], [2, 2]]);
    // The role's own beats the common one.
    let both = [
        "--balance-abs-threshold",
        "1",
        "--decode-balance-abs-threshold",
        "64",
    ];
    assert_eq!(of(&both).await, [[2, 2], [4, 0]]);
}

#[tokio::test]
async fn simultaneous_requests_spread_evenly_over_the_workers_of_both_roles() {
    let pools = Pools::start(4, 4).await;
    let router = pools.router(&["--policy", "least_loaded"]).await;
    let (opens, gate) = watch::channel(false);
    for worker in &pools.prefill {
        let (gate, transfers) = (gate.clone(), pools.transfers.clone());
        prefill_script(worker, &pools.transfers, move |_| {
            Some(Reply {
                gate: Some(gate.clone()),
                ..prefill_answer(&transfers.issue())
            })
        });
    }
    let mut clients = Vec::new();
    for _ in 0..32 {
        clients.push(Client::open(router.address).await);
    }
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(&post(CHAT, &chat(&format!("{n}")))).await;
    }
    until("all are in prefill", || pools.prefill_count() == 32).await;
    let counts = |router: &Router, workers: &[Worker]| -> Vec<(u32, u64)> {
        workers
            .iter()
            .map(|w| (booked(router, w), w.count()))
            .collect()
    };
    assert_eq!(counts(&router, &pools.prefill), [(8, 8); 4]);
    assert_eq!(counts(&router, &pools.decode), [(8, 0); 4]);
    opens.send(true).unwrap();
    for client in &mut clients {
        assert_eq!(client.answer(false).await.unwrap().status, 200);
    }
    until_books_are_empty(&router).await;
    assert_eq!(counts(&router, &pools.decode), [(0, 8); 4]);
    pools.transfers.assert_kept();
}

#[tokio::test]
async fn workers_may_have_ipv6_addresses_in_both_roles() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        println!("this machine has no ::1");
        return;
    }
    let mut pools = Pools::start(0, 0).await;
    for workers in [&mut pools.prefill, &mut pools.decode] {
        workers.push(Worker::start_at("[::1]:0", true).await);
    }
    prefill_script(&pools.prefill[0], &pools.transfers, |_| None);
    decode_script(&pools.decode[0], &pools.transfers, |_| None);
    assert!(pools.prefill[0].url().starts_with("http://[::1]:"));
    let router = pools.router(&[]).await;
    let mut client = Client::open(router.address).await;
    let answer = client.post(CHAT, &chat("x")).await.unwrap();
    assert_eq!((answer.status, &*text(&answer.body)), (200, FIXED_BODY));
    for (seen, worker) in [
        (&pools.prefill_requests()[0], &pools.prefill[0]),
        (&pools.decode_requests()[0], &pools.decode[0]),
    ] {
        assert_eq!(seen.all("host"), [worker.address.to_string().as_bytes()]);
    }
    pools.transfers.assert_kept();
    until_books_are_empty(&router).await;
}
