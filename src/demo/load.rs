//! The demo's own load: a few agents at work, each a conversation that grows by its own answers and by tool results.
//!
//! Runs on one thread of its own with a current-thread tokio runtime; each rollout is one task with one kept-alive
//! connection to the router. All share a system prompt and tools; a conversation repeats its whole past every turn, which
//! is what prefix affinity is for. What goes wrong is counted, never fatal.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::words::{Dice, sentences};

/// Bytes of the system prompt that all rollouts share.
const SYSTEM_BYTES: usize = 3000;
/// A request that has not ended by then counts as an error.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause after an error, so that a router that is down is not hammered.
const ERROR_PAUSE: Duration = Duration::from_millis(500);

/// What to drive.
#[derive(Clone, Debug)]
pub struct LoadArgs {
    /// Where the router is.
    pub router: SocketAddr,
    /// The model asked for.
    pub model: String,
    /// Conversations at once.
    pub rollouts: u32,
    /// The same seed asks the same questions.
    pub seed: u64,
    /// Bounds of the pause between an answer and the next turn (the agent's tool at work), in milliseconds.
    pub think_ms: (u64, u64),
}

/// What has happened since the start.
#[derive(Clone, Debug, Default)]
pub struct LoadTotals {
    /// Turns answered in full.
    pub turns: u64,
    /// Conversations brought to their end.
    pub conversations: u64,
    /// Turns that failed: no connection, another status than 200, an answer without its end.
    pub errors: u64,
    /// What the last of these was.
    pub last_error: Option<String>,
    /// From the request's first byte out to the answer's first event in.
    pub first_token: Spread,
    /// Prompt tokens, as the workers' `usage` says.
    pub prompt_tokens: u64,
    /// Of these, cached.
    pub cached_tokens: u64,
    /// Tokens answered.
    pub output_tokens: u64,
}

/// A distribution of durations, in microseconds, to about 6 %.
#[derive(Clone, Debug, Default)]
pub struct Spread {
    counts: Vec<u64>,
    total: u64,
}

/// Buckets for each doubling.
const STEPS: u64 = 8;

impl Spread {
    /// Adds one.
    pub fn add(&mut self, duration: Duration) {
        let bucket = bucket_of(duration.as_micros() as u64);
        if self.counts.len() <= bucket {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += 1;
        self.total += 1;
    }

    /// What came after `earlier`, a former state of this one.
    pub fn since(&self, earlier: &Spread) -> Spread {
        let before = |bucket: usize| earlier.counts.get(bucket).copied().unwrap_or(0);
        let counts = self
            .counts
            .iter()
            .enumerate()
            .map(|(i, count)| count - before(i))
            .collect();
        Spread {
            counts,
            total: self.total - earlier.total,
        }
    }

    /// The duration that the fraction `q` does not exceed, in milliseconds; 0 when nothing was added.
    pub fn quantile_ms(&self, q: f64) -> f64 {
        let rank = ((self.total as f64 * q).ceil() as u64).clamp(1, self.total.max(1));
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank {
                return middle_of(bucket) / 1e3;
            }
        }
        0.0
    }
}

/// Values below `STEPS` have a bucket each, then each doubling has `STEPS`.
fn bucket_of(micros: u64) -> usize {
    if micros < STEPS {
        return micros as usize;
    }
    let doubling = u64::from(micros.ilog2()) - 3;
    (doubling * STEPS + (micros >> doubling)) as usize
}

fn middle_of(bucket: usize) -> f64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket as f64;
    }
    let doubling = bucket / STEPS - 1;
    let low = (bucket % STEPS + STEPS) << doubling;
    low as f64 + ((1_u64 << doubling) as f64) / 2.0
}

/// A running load. Dropping it ends it; requests under way are cut and count as nothing.
#[derive(Debug)]
pub struct Load {
    totals: Arc<Mutex<LoadTotals>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    /// Starts the rollouts on a thread of their own.
    ///
    /// # Errors
    /// When the thread or its runtime cannot be started.
    pub fn start(args: LoadArgs) -> std::io::Result<Load> {
        let totals = Arc::new(Mutex::new(LoadTotals::default()));
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let shared = totals.clone();
        let thread = std::thread::Builder::new()
            .name("corelane-load".into())
            .spawn(move || {
                runtime.block_on(async move {
                    let args = Arc::new(args);
                    for nth in 0..args.rollouts {
                        tokio::spawn(
                            Rollout::new(args.clone(), u64::from(nth), shared.clone()).run(),
                        );
                    }
                    let _ = stopped.await;
                });
            })?;
        Ok(Load {
            totals,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The totals now.
    pub fn totals(&self) -> LoadTotals {
        lock(&self.totals).clone()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A panic over there has been reported by its thread already.
            let _ = thread.join();
        }
    }
}

fn lock(totals: &Mutex<LoadTotals>) -> MutexGuard<'_, LoadTotals> {
    totals.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One agent: one conversation after another over one connection.
struct Rollout {
    args: Arc<LoadArgs>,
    nth: u64,
    dice: Dice,
    totals: Arc<Mutex<LoadTotals>>,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// What a turn brought.
struct Answered {
    text: String,
    first_token: Duration,
    usage: Value,
}

impl Rollout {
    fn new(args: Arc<LoadArgs>, nth: u64, totals: Arc<Mutex<LoadTotals>>) -> Rollout {
        let dice = Dice::new(args.seed ^ (nth + 1).wrapping_mul(0x9e37_79b9));
        Rollout {
            args,
            nth,
            dice,
            totals,
            connection: None,
        }
    }

    async fn run(mut self) {
        // Not all at once: agents do not start in step.
        self.think().await;
        for conversation in 0_u64.. {
            if self.converse(conversation).await {
                lock(&self.totals).conversations += 1;
            }
        }
    }

    async fn think(&mut self) {
        let (from, to) = self.args.think_ms;
        tokio::time::sleep(Duration::from_millis(self.dice.between(from, to))).await;
    }

    /// One conversation; false when a turn failed, which ends it.
    async fn converse(&mut self, conversation: u64) -> bool {
        let session = format!("rollout-{}-{conversation}", self.nth);
        // As long as the text of an issue. With a line or two the system prompt would be nearly all of the prompt, and
        // rightly keep the first turns of all on the workers that hold it.
        let length = self.dice.between(900, 2400) as usize;
        let task = sentences(self.dice.roll(), length);
        let mut messages = vec![
            json!({"role": "system", "content": sentences(self.args.seed, SYSTEM_BYTES)}),
            json!({"role": "user", "content": format!("Task {session}: {task}")}),
        ];
        for _ in 0..self.dice.between(5, 12) {
            match self.turn(&messages, &session).await {
                Ok(answered) => {
                    self.count(&answered);
                    messages.push(json!({"role": "assistant", "content": answered.text}));
                }
                Err(error) => {
                    self.count_error(error);
                    tokio::time::sleep(ERROR_PAUSE).await;
                    return false;
                }
            }
            self.think().await;
            let length = self.dice.between(200, 1200) as usize;
            let result = sentences(self.dice.roll(), length);
            messages.push(json!({"role": "user", "content": format!("Tool result: {result}")}));
        }
        true
    }

    fn count(&self, answered: &Answered) {
        let usage = &answered.usage;
        let tokens = |value: &Value| value.as_u64().unwrap_or(0);
        let mut totals = lock(&self.totals);
        totals.turns += 1;
        totals.first_token.add(answered.first_token);
        totals.prompt_tokens += tokens(&usage["prompt_tokens"]);
        totals.cached_tokens += tokens(&usage["prompt_tokens_details"]["cached_tokens"]);
        totals.output_tokens += tokens(&usage["completion_tokens"]);
    }

    fn count_error(&mut self, error: String) {
        tracing::debug!(%error, "a turn of the demo's load failed");
        self.connection = None;
        let mut totals = lock(&self.totals);
        totals.errors += 1;
        totals.last_error = Some(error);
    }

    async fn turn(&mut self, messages: &[Value], session: &str) -> Result<Answered, String> {
        let max_tokens = self.dice.between(24, 64);
        let body = json!({
            "model": self.args.model, "tools": tools(), "messages": messages, "stream": true,
            "stream_options": {"include_usage": true}, "max_tokens": max_tokens,
        });
        let work = self.ask(Bytes::from(body.to_string()), session);
        match tokio::time::timeout(REQUEST_TIMEOUT, work).await {
            Ok(answered) => answered,
            Err(_) => Err(format!(
                "no end of the answer after {} s",
                REQUEST_TIMEOUT.as_secs()
            )),
        }
    }

    async fn ask(&mut self, body: Bytes, session: &str) -> Result<Answered, String> {
        let begun = Instant::now();
        let request = || {
            Request::post("/v1/chat/completions")
                .header("host", self.args.router.to_string())
                .header("content-type", "application/json")
                .header("x-session-id", session)
                .body(Full::new(body.clone()))
                .map_err(|error| error.to_string())
        };
        let (first, second) = (request()?, request()?);
        let had_connection = self.connection.is_some();
        let response = match self.send(first).await {
            // A kept connection may have been closed by the other side just now: that is worth one fresh one.
            Err(_) if had_connection => self.send(second).await?,
            result => result?,
        };
        read_answer(response, begun).await
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, String> {
        let mut connection = match self.connection.take() {
            Some(connection) if connection.is_ready() => connection,
            _ => connect(self.args.router).await?,
        };
        let response = connection
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        self.connection = Some(connection);
        Ok(response)
    }
}

async fn connect(router: SocketAddr) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream = TcpStream::connect(router)
        .await
        .map_err(|error| format!("connect: {error}"))?;
    stream
        .set_nodelay(true)
        .map_err(|error| error.to_string())?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    // Its errors reach the sender as well.
    tokio::spawn(connection);
    Ok(sender)
}

/// Reads a stream of events to its `[DONE]`.
async fn read_answer(response: Response<Incoming>, begun: Instant) -> Result<Answered, String> {
    let status = response.status();
    let mut body = response.into_body();
    if status != hyper::StatusCode::OK {
        let text = body
            .collect()
            .await
            .map(|body| body.to_bytes())
            .unwrap_or_default();
        let start = String::from_utf8_lossy(&text[..text.len().min(200)]).into_owned();
        return Err(format!("status {}: {start}", status.as_u16()));
    }
    let mut pending = Vec::new();
    let mut answered = Answered {
        text: String::new(),
        first_token: Duration::ZERO,
        usage: Value::Null,
    };
    let mut is_done = false;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("the answer broke off: {error}"))?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if answered.first_token.is_zero() {
            answered.first_token = begun.elapsed();
        }
        pending.extend_from_slice(&data);
        while let Some(end) = pending.windows(2).position(|pair| pair == b"\n\n") {
            is_done |= answered.take_event(&pending[..end])?;
            pending.drain(..end + 2);
        }
    }
    if is_done {
        Ok(answered)
    } else {
        Err("the answer ended without [DONE]".into())
    }
}

impl Answered {
    /// Takes one event's line; says whether it was the last one.
    fn take_event(&mut self, line: &[u8]) -> Result<bool, String> {
        let Some(data) = line.strip_prefix(b"data: ") else {
            return Ok(false);
        };
        if data == b"[DONE]" {
            return Ok(true);
        }
        let chunk: Value = serde_json::from_slice(data)
            .map_err(|error| format!("an event is not JSON: {error}"))?;
        if chunk["error"].is_object() {
            return Err(format!(
                "error in the stream: {}",
                chunk["error"]["message"]
            ));
        }
        if let Some(text) = chunk["choices"][0]["delta"]["content"].as_str() {
            self.text.push_str(text);
        }
        if chunk["usage"].is_object() {
            self.usage = chunk["usage"].clone();
        }
        Ok(false)
    }
}

/// What every agent may call (and the simulated model never does).
fn tools() -> Value {
    let tool = |name: &str, does: &str, argument: &str| {
        json!({"type": "function", "function": {"name": name, "description": does, "parameters": {
            "type": "object", "required": [argument],
            "properties": {argument: {"type": "string", "description": format!("The {argument} to use")}},
        }}})
    };
    json!([
        tool(
            "read_file",
            "Reads a file of the repository and returns its text",
            "path"
        ),
        tool(
            "search",
            "Finds a text in all files of the repository",
            "pattern"
        ),
        tool(
            "run_tests",
            "Runs the tests whose name contains the filter",
            "filter"
        ),
        tool(
            "apply_patch",
            "Applies a unified diff to the working tree",
            "patch"
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_in_order_and_within_seven_percent() {
        let mut last = 0;
        for micros in (0..5000).chain((5000..200_000_000).step_by(9973)) {
            let bucket = bucket_of(micros);
            assert!(bucket >= last, "{micros}");
            last = bucket;
            let error = (middle_of(bucket) - micros as f64).abs();
            assert!(
                error <= 0.5 + micros as f64 * 0.07,
                "{micros}: {}",
                middle_of(bucket)
            );
        }
    }

    #[test]
    fn quantiles_are_those_of_what_was_added_since() {
        let mut spread = Spread::default();
        assert_eq!(spread.quantile_ms(0.5), 0.0);
        for _ in 0..100 {
            spread.add(Duration::from_secs(5));
        }
        let earlier = spread.clone();
        for ms in 1..=100 {
            spread.add(Duration::from_millis(ms));
        }
        let recent = spread.since(&earlier);
        assert!(
            (recent.quantile_ms(0.5) - 50.0).abs() < 4.0,
            "{}",
            recent.quantile_ms(0.5)
        );
        assert!(
            (recent.quantile_ms(0.99) - 99.0).abs() < 7.0,
            "{}",
            recent.quantile_ms(0.99)
        );
        assert!(spread.quantile_ms(0.99) > 4000.0);
    }

    fn fails_with(router: SocketAddr, model: &str) -> String {
        let args = LoadArgs {
            router,
            model: model.into(),
            rollouts: 1,
            seed: 1,
            think_ms: (0, 0),
        };
        let load = Load::start(args).unwrap();
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            let totals = load.totals();
            assert_eq!(totals.turns, 0);
            if let Some(error) = totals.last_error {
                assert!(totals.errors > 0);
                return error;
            }
            assert!(Instant::now() < limit, "no error came");
            std::thread::yield_now();
        }
    }

    /// Answers the first request with these bytes and closes.
    fn answering(bytes: &'static str) -> SocketAddr {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                let mut got = Vec::new();
                let mut piece = [0; 4096];
                while !got.ends_with(b"}") {
                    match stream.read(&mut piece) {
                        Ok(0) | Err(_) => break,
                        Ok(count) => got.extend_from_slice(&piece[..count]),
                    }
                }
                let _ = stream.write_all(bytes.as_bytes());
            }
        });
        address
    }

    #[test]
    fn every_way_to_fail_is_an_error_with_its_reason() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = nobody.local_addr().unwrap();
        drop(nobody);
        assert!(fails_with(address, "m").starts_with("connect: "));
        let refused = answering("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy");
        assert_eq!(fails_with(refused, "m"), "status 503: busy");
        let open_ended = answering("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\ndata: {}\n\n");
        assert_eq!(
            fails_with(open_ended, "m"),
            "the answer ended without [DONE]"
        );
        let broken = answering("HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: {}\n\n");
        assert!(fails_with(broken, "m").starts_with("the answer broke off"));
        let garbage = answering("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: {\n\n");
        assert!(fails_with(garbage, "m").starts_with("an event is not JSON"));
    }
}
