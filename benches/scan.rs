//! Question: what does it cost to validate a request's body and find its fields, before anything else is known of it?
//!
//! Workload: bodies of inference requests from 200 B to 400 KiB: chat in English with escapes now and then, chat in
//! Chinese (every byte of it needs the check of the encoding), prompts of token ids, and an indented body of messages
//! of two words (hardly any byte is text: the worst shape, and no client's). One body at a time, in cache, as it is
//! when it has just been received.
//!
//! Bound: 0.5 us per KiB; 0.15 is what a 16 KiB chat body should take.
//!
//! Run: `cargo bench --bench scan`

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use corelane::route::scan;
use divan::Bencher;
use divan::counter::BytesCount;

const BOUND_US_PER_KIB: f64 = 0.5;
const KINDS: [(&str, Body); 4] = [
    ("english", english),
    ("chinese", chinese),
    ("token ids", token_ids),
    ("indented", indented),
];
const SIZES: [usize; 4] = [200, 1024, 16 * 1024, 400 * 1024];

type Body = fn(usize) -> Vec<u8>;

fn main() {
    println!("scan: validate a body and find its fields. Bound: {BOUND_US_PER_KIB} us per KiB");
    println!("machine: {}; commit: {}", machine(), commit());
    divan::main();
    for (name, make) in KINDS {
        for size in &SIZES[1..] {
            let body = make(*size);
            let cost = least_us(|| black_box(scan(black_box(&body))).is_ok())
                / (body.len() as f64 / 1024.0);
            let verdict = if cost <= BOUND_US_PER_KIB {
                "within"
            } else {
                "OVER"
            };
            println!("{name:>10} {size:>7} B: {cost:.3} us per KiB, {verdict} the bound");
        }
    }
}

#[divan::bench(args = SIZES)]
fn chat_in_english(bencher: Bencher<'_, '_>, size: usize) {
    measure(bencher, &english(size));
}

#[divan::bench(args = SIZES)]
fn chat_in_chinese(bencher: Bencher<'_, '_>, size: usize) {
    measure(bencher, &chinese(size));
}

#[divan::bench(args = SIZES)]
fn prompt_of_token_ids(bencher: Bencher<'_, '_>, size: usize) {
    measure(bencher, &token_ids(size));
}

#[divan::bench(args = SIZES)]
fn indented_chat(bencher: Bencher<'_, '_>, size: usize) {
    measure(bencher, &indented(size));
}

fn measure(bencher: Bencher<'_, '_>, body: &[u8]) {
    assert!(scan(body).is_ok());
    bencher
        .counter(BytesCount::new(body.len()))
        .bench(|| scan(black_box(body)));
}

/// Messages of about 600 bytes with a line break or a quotation every 90.
fn english(size: usize) -> Vec<u8> {
    let sentence = "The router reads the request once, keeps what it needs, and hands the bytes on as they came.";
    chat(
        size,
        &format!(
            "{sentence}\\n{sentence} \\\"{sentence}\\\" {sentence}\\n\\n{sentence} {sentence}"
        ),
    )
}

fn chinese(size: usize) -> Vec<u8> {
    chat(
        size,
        &"路由器只读一次请求，保留需要的部分，然后原样转发。".repeat(8),
    )
}

fn chat(size: usize, content: &str) -> Vec<u8> {
    let mut body = String::from(r#"{"model":"m","stream":true,"max_tokens":256,"messages":["#);
    body.push_str(r#"{"role":"system","content":"You are helpful."}"#);
    while body.len() < size {
        let role = if body.len() % 2 == 0 {
            "user"
        } else {
            "assistant"
        };
        let room = size
            .saturating_sub(body.len() + 34)
            .max(12)
            .min(content.len());
        let end = (0..=room)
            .rev()
            .find(|end| is_cut(content, *end))
            .unwrap_or(0);
        let _ = write!(
            body,
            r#",{{"role":"{role}","content":"{}"}}"#,
            &content[..end]
        );
    }
    body.push_str("]}");
    body.into_bytes()
}

/// Not inside a character, and not after the backslash of an escape.
fn is_cut(content: &str, end: usize) -> bool {
    content.is_char_boundary(end) && !content[..end].ends_with('\\')
}

fn token_ids(size: usize) -> Vec<u8> {
    let mut body = String::from(r#"{"model":"m","max_tokens":256,"prompt":[1"#);
    let mut token = 1_u32;
    while body.len() < size {
        token = token.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Lengths as in a vocabulary of 128,000: most of five digits, many of three and four.
        let _ = write!(
            body,
            ", {}",
            (token >> 8) % [128_000, 9_000, 900][(token >> 28) as usize % 3]
        );
    }
    body.push_str("]}");
    body.into_bytes()
}

fn indented(size: usize) -> Vec<u8> {
    let mut body = String::from("{\n    \"model\": \"m\",\n    \"messages\": [");
    while body.len() < size {
        body.push_str("\n        {\n            \"role\": \"user\",\n            \"content\": \"And then?\"\n        },");
    }
    body.pop();
    body.push_str("\n    ]\n}\n");
    body.into_bytes()
}

/// The least of many runs, in microseconds: what the code costs when nothing disturbs it.
fn least_us(mut run: impl FnMut() -> bool) -> f64 {
    let mut least = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        for _ in 0..8 {
            assert!(run());
        }
        least = least.min(start.elapsed().as_secs_f64() * 1e6 / 8.0);
    }
    least
}

fn machine() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    format!("{} x {cpus}", model.map_or("unknown", |(_, model)| model))
}

fn commit() -> String {
    let output = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty"])
        .output();
    let text = output
        .ok()
        .filter(|output| output.status.success())
        .map(|output| output.stdout);
    text.map_or("unknown".to_owned(), |text| {
        String::from_utf8_lossy(&text).trim().to_owned()
    })
}
