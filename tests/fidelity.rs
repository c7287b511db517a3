//! The worker gets what the client sent: bytes of bodies, fields, query strings, on every path.

mod common;

use common::*;

/// Thirty bodies that a router which parses and writes anew would damage.
fn odd_bodies() -> Vec<Vec<u8>> {
    let mut bodies: Vec<Vec<u8>> = [
        r#"{"model":"m","messages":[{"role":"user","content":"hi","x_unknown":{"a":[1,{"b":null}]}}]}"#,
        r#"{"model":"m","messages":[],"seed":9007199254740993}"#,
        r#"{"model":"m","messages":[],"n":18446744073709551615}"#,
        r#"{"model":"m","messages":[],"n":123456789012345678901234567890}"#,
        r#"{"model":"m","messages":[],"temperature":2.50}"#,
        r#"{"model":"m","messages":[],"temperature":1.0}"#,
        r#"{"model":"m","messages":[],"penalty":-0.0}"#,
        r#"{"model":"m","messages":[],"big":1e400,"small":1E-7}"#,
        r#"{"model":"m","messages":[],"exact":0.123456789012345678901234567890}"#,
        r#"{"model":"m","model":"m","messages":[{"role":"user","content":"duplicate keys"}]}"#,
        r#"{"messages":[],"messages":[{"role":"user","content":"again"}],"model":"m"}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"caf\u00e9 \/ \ud83d\ude00"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"lone \ud83d surrogate"}]}"#,
        r#"{"mod\u0065l":"m","messages":[]}"#,
        "{ \"model\" :\t\"m\",\r\n\n \"messages\" : [ ] } \n",
        r#"{"model":"m","messages":[{"role":"user","content":"漢字 かな 😀 👩‍👩‍👧"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":""}],"stop":null,"tools":[],"logit_bias":{}}"#,
        r#"{"model":"m","messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"q\": 1}"}}]}]}"#,
        r#"{"model":"m","messages":[{"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"x"}]}]}"#,
        r#"{"model":"m","messages":[{"role":"critic","content":"unknown role"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},{"type":"video_url","video_url":{"url":"http://v"}}]}]}"#,
        r#"{"model":"m","prompt":[1,2,3,4,5]}"#,
        r#"{"model":"m","prompt":[[1,2],[3]],"input":"both"}"#,
        r#"{"model":"m","prompt":["a","b"],"cache_salt":"s","priority":3}"#,
        r#"{}"#,
        r#"{"stream":true,"stream_options":{"include_usage":true},"model":"m"}"#,
        r#"{"model":"m","messages":[],"chat_template_kwargs":{"enable_thinking":false},"guided_json":{"type":"object"}}"#,
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    bodies.push(format!(r#"{{"model":"m","prompt":"{}"}}"#, "x".repeat(1_000_000)).into_bytes());
    bodies.push(
        format!(
            r#"{{"model":"m","prompt":"{}"}}"#,
            r#"\n\"漢"#.repeat(120_000)
        )
        .into_bytes(),
    );
    let deep = 500;
    bodies.push(
        format!(
            r#"{{"model":"m","x":{}{}}}"#,
            "[".repeat(deep),
            "]".repeat(deep)
        )
        .into_bytes(),
    );
    bodies
}

const INFERENCE: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/messages",
    "/generate",
    "/inference/v1/generate",
    "/tokenize",
    "/pooling",
    "/score",
];

#[tokio::test]
async fn thirty_odd_bodies_reach_the_worker_byte_for_byte() {
    let bodies = odd_bodies();
    assert!(bodies.len() >= 30);
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    for (n, body) in bodies.iter().enumerate() {
        for framing in ["length", "chunked"] {
            let mut client = Client::open(router.address).await;
            let path = INFERENCE[n % INFERENCE.len()];
            if framing == "length" {
                client.send(&post(path, body)).await;
            } else {
                let mut wire = format!(
                    "POST {path} HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                .into_bytes();
                for part in body.chunks(1 + body.len() / 3) {
                    wire.extend_from_slice(format!("{:X};ext=1\r\n", part.len()).as_bytes());
                    wire.extend_from_slice(part);
                    wire.extend_from_slice(b"\r\n");
                }
                wire.extend_from_slice(b"0\r\nX-Trailer: 1\r\n\r\n");
                client.send(&wire).await;
            }
            let answer = client.answer(false).await.expect("an answer");
            let shown = String::from_utf8_lossy(&body[..body.len().min(120)]).into_owned();
            assert_eq!(answer.status, 200, "{framing}: {shown}");
            let seen = worker.requests().pop().unwrap();
            assert!(
                seen.body == *body,
                "{framing}: {} bytes became {}: {shown}",
                body.len(),
                seen.body.len()
            );
            assert_eq!(
                seen.all("content-length").len() + seen.all("transfer-encoding").len(),
                1
            );
        }
    }
}

#[tokio::test]
async fn fields_and_query_strings_pass_on_every_path_and_hop_by_hop_fields_do_not() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    let others = [
        "/v1/audio/transcriptions",
        "/some/unknown/path",
        "/v1/score_things",
    ];
    for path in INFERENCE.iter().chain(&others) {
        let mut client = Client::open(router.address).await;
        let body = br#"{"a" :  1.50}"#;
        let request = format!(
            "POST {path}?api-version=2&x=%20y&empty= HTTP/1.1\r\nHost: router.test\r\nX-Custom: v;w\r\nX-Dup: 1\r\nX-Dup: 2\r\n\
             Cookie: a=1; b=2\r\nAuthorization: Bearer client\r\ntraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n\
             Connection: close, X-Secret\r\nX-Secret: s\r\nKeep-Alive: timeout=9\r\nTE: trailers\r\nUpgrade: h2c\r\n\
             Proxy-Authorization: Basic x\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        client.send(request.as_bytes()).await;
        client.send(body).await;
        assert_eq!(client.answer(false).await.unwrap().status, 200, "{path}");
        let seen = worker.requests().pop().unwrap();
        assert_eq!(
            seen.line,
            format!("POST {path}?api-version=2&x=%20y&empty= HTTP/1.1")
        );
        assert_eq!(seen.body, body);
        assert_eq!(seen.all("host"), [worker.address.to_string().as_bytes()]);
        assert_eq!(seen.all("x-dup"), [b"1".as_slice(), b"2"]);
        assert_eq!(seen.all("x-custom"), [b"v;w"]);
        assert_eq!(seen.all("cookie"), [b"a=1; b=2"]);
        assert_eq!(seen.all("authorization"), [b"Bearer client"]);
        assert_eq!(seen.all("traceparent").len(), 1);
        for gone in [
            "x-secret",
            "connection",
            "keep-alive",
            "te",
            "upgrade",
            "proxy-authorization",
        ] {
            assert!(
                seen.all(gone).is_empty(),
                "{path}: {gone} reached the worker"
            );
        }
    }
}

#[tokio::test]
async fn other_methods_and_large_streamed_bodies_pass_unchanged() {
    let worker = Worker::start().await;
    let router = router(&[&worker], &[]).await;
    let blob: Vec<u8> = (0..3_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for (method, chunked) in [
        ("PUT", false),
        ("PATCH", true),
        ("DELETE", false),
        ("POST", true),
    ] {
        let mut client = Client::open(router.address).await;
        if chunked {
            let head = format!(
                "{method} /v1/files/x?q=1 HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
            );
            client.send(head.as_bytes()).await;
            for part in blob.chunks(70_001) {
                let mut wire = format!("{:x}\r\n", part.len()).into_bytes();
                wire.extend_from_slice(part);
                wire.extend_from_slice(b"\r\n");
                client.send(&wire).await;
            }
            client.send(b"0\r\n\r\n").await;
        } else {
            let head = format!(
                "{method} /v1/files/x?q=1 HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n",
                blob.len()
            );
            client.send(head.as_bytes()).await;
            client.send(&blob).await;
        }
        let answer = client.answer(false).await.expect("an answer");
        assert_eq!(answer.status, 200, "{method}");
        let seen = worker.requests().pop().unwrap();
        assert!(seen.line.starts_with(&format!("{method} /v1/files/x?q=1 ")));
        assert!(
            seen.body == blob,
            "{method} chunked {chunked}: {} bytes",
            seen.body.len()
        );
        // The connection is in step: another request on it works.
        assert_eq!(
            client
                .post("/v1/completions", br#"{"prompt":"x"}"#)
                .await
                .unwrap()
                .status,
            200
        );
    }
}
