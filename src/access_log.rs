//! The access log: one line a request, when asked for. Cores put lines into a bounded queue and never wait; a thread of
//! its own writes them.
//!
//! What does not fit, or is more than `--access-log-lines-per-sec`, is dropped, counted, and told in a line of its own, so
//! that an attack fills no disk. Query strings, bodies and fields of requests are never in it, so no secret is.

use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;
use serde_json::{Map, Value, json};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::log_thread::{LogThread, Signals, append_to};

/// Lines that may wait to be written.
const QUEUE_COUNT: usize = 16_384;
/// How often they are.
const PAUSE: Duration = Duration::from_millis(50);
/// How much of a client's text goes into a line.
const TEXT_BYTES_MAX: usize = 256;

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A JSON object.
    Json,
    /// `key=value` pairs.
    Text,
}

impl Format {
    /// The word of `--access-log`.
    pub fn name(self) -> &'static str {
        match self {
            Format::Json => "json",
            Format::Text => "text",
        }
    }
}

/// One request, at its end. Times in ns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry<'a> {
    /// Who asked; none: not known any more.
    pub client: Option<SocketAddr>,
    /// Method.
    pub method: &'a str,
    /// Path and query as sent; the query is left out.
    pub target: &'a [u8],
    /// Of the answer; 0: none was begun.
    pub status: u16,
    /// How it ended, as in the metrics.
    pub outcome: &'static str,
    /// As the client knows it.
    pub request_id: &'a [u8],
    /// The model asked for.
    pub model: Option<&'a str>,
    /// The worker that answered or was asked last.
    pub worker: Option<&'a str>,
    /// Of a request in two legs.
    pub prefill_worker: Option<&'a str>,
    /// Attempts after the first.
    pub retries: u32,
    /// Of its body.
    pub request_bytes: u64,
    /// In line before its turn.
    pub wait_ns: u64,
    /// From the whole request to the first byte of the answer; 0: none came.
    pub first_byte_ns: u64,
    /// From the first byte in to the last out.
    pub duration_ns: u64,
}

impl Entry<'_> {
    fn fields(&self) -> Map<String, Value> {
        let mut time = String::with_capacity(32);
        // It writes into a string.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let path = self.target.split(|byte| *byte == b'?').next();
        let ms = |ns: u64| json!((ns / 1_000) as f64 / 1e3);
        let text = |bytes: &[u8]| {
            let shown = &bytes[..bytes.len().min(TEXT_BYTES_MAX)];
            Value::String(String::from_utf8_lossy(shown).into_owned())
        };
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        put("time", time.into());
        if let Some(client) = self.client {
            put("client", client.to_string().into());
        }
        put("method", text(self.method.as_bytes()));
        put("path", text(path.unwrap_or_default()));
        put("status", self.status.into());
        put("outcome", self.outcome.into());
        put("request_id", text(self.request_id));
        let named = [
            ("model", self.model),
            ("worker", self.worker),
            ("prefill_worker", self.prefill_worker),
        ];
        for (name, value) in named {
            if let Some(value) = value {
                put(name, text(value.as_bytes()));
            }
        }
        put("retries", self.retries.into());
        put("request_bytes", self.request_bytes.into());
        put("wait_ms", ms(self.wait_ns));
        if self.first_byte_ns > 0 {
            put("first_byte_ms", ms(self.first_byte_ns));
        }
        put("duration_ms", ms(self.duration_ns));
        fields
    }

    fn line(&self, format: Format) -> String {
        write_line(self.fields(), format)
    }
}

fn write_line(fields: Map<String, Value>, format: Format) -> String {
    let mut line = match format {
        Format::Json => Value::Object(fields).to_string(),
        Format::Text => {
            let pairs = fields.iter().map(|(name, value)| match value {
                // Quoted where it would not be one word; so a client's text cannot pass for other fields.
                Value::String(text) if text.bytes().all(is_plain) && !text.is_empty() => {
                    format!("{name}={text}")
                }
                value => format!("{name}={value}"),
            });
            pairs.collect::<Vec<_>>().join(" ")
        }
    };
    line.push('\n');
    line
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'=' | b'\\')
}

/// Where the cores put their lines.
#[derive(Debug)]
pub struct AccessLog {
    format: Format,
    lines: ArrayQueue<String>,
    dropped_count: AtomicU64,
    /// Lines of this second that may still be written.
    left: AtomicU64,
    lines_per_sec: u64,
    signals: Arc<Signals>,
}

impl AccessLog {
    /// `lines_per_sec`: more are dropped; 0: any number.
    pub fn new(format: Format, lines_per_sec: u64) -> AccessLog {
        AccessLog {
            format,
            lines: ArrayQueue::new(QUEUE_COUNT),
            dropped_count: AtomicU64::new(0),
            left: AtomicU64::new(lines_per_sec),
            lines_per_sec,
            signals: Arc::default(),
        }
    }

    /// Adds a request. Never waits.
    pub fn add(&self, entry: &Entry<'_>) {
        // ORDERING: Relaxed, all here; numbers and hints. The lines travel by the queue.
        let may = self.lines_per_sec == 0
            || self
                .left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
        if !may || self.lines.push(entry.line(self.format)).is_err() {
            self.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The file is opened anew before the next line.
    pub fn reopen(&self) {
        self.signals.reopen();
    }

    /// What was dropped since the last time, as a line.
    fn dropped_line(&self) -> Option<String> {
        // ORDERING: Relaxed; a number.
        let count = self.dropped_count.swap(0, Ordering::Relaxed);
        let fields = json!({"dropped_lines": count});
        match fields {
            Value::Object(fields) if count > 0 => Some(write_line(fields, self.format)),
            _ => None,
        }
    }
}

/// Starts the thread that writes. `path`: none: standard output.
///
/// # Errors
/// The file cannot be opened for appending, or there is no thread to be had.
pub fn start(log: Arc<AccessLog>, path: Option<PathBuf>) -> io::Result<LogThread> {
    let mut out = BufWriter::new(open(path.as_deref())?);
    let mut pauses = 0;
    let signals = log.signals.clone();
    LogThread::start("access-log", signals, PAUSE, move |turn| {
        if turn.reopens {
            match open(path.as_deref()) {
                Ok(sink) => {
                    let _ = out.flush();
                    out = BufWriter::new(sink);
                }
                Err(e) => tracing::warn!("the access log goes on in its old file: {e}"),
            }
        }
        for _ in 0..log.lines.len() {
            if let Some(line) = log.lines.pop() {
                // A full disk or a closed pipe must not end the router.
                let _ = out.write_all(line.as_bytes());
            }
        }
        pauses += 1;
        if turn.is_last || pauses * PAUSE >= Duration::from_secs(1) {
            pauses = 0;
            // ORDERING: Relaxed; a number.
            log.left.store(log.lines_per_sec, Ordering::Relaxed);
            if let Some(line) = log.dropped_line() {
                let _ = out.write_all(line.as_bytes());
            }
        }
        let _ = out.flush();
    })
}

fn open(path: Option<&Path>) -> io::Result<Box<dyn Write + Send>> {
    Ok(match path {
        None => Box::new(io::stdout()),
        Some(path) => Box::new(append_to(path)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry<'a>() -> Entry<'a> {
        Entry {
            client: Some("10.0.0.9:4711".parse().unwrap()),
            method: "POST",
            target: b"/v1/chat/completions?api_key=secret",
            status: 200,
            outcome: "ok",
            request_id: b"id-1 status=500 \"x\"\n",
            model: Some("m"),
            worker: Some("http://w:8000"),
            prefill_worker: None,
            retries: 1,
            request_bytes: 42,
            wait_ns: 1_500_000,
            first_byte_ns: 2_000_000,
            duration_ns: 3_000_000,
        }
    }

    #[test]
    fn a_line_is_an_object_without_the_query() {
        let line = entry().line(Format::Json);
        let fields: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(fields["path"], "/v1/chat/completions");
        assert_eq!(fields["request_id"], "id-1 status=500 \"x\"\n");
        assert_eq!(fields["wait_ms"], 1.5);
        assert_eq!(fields["client"], "10.0.0.9:4711");
        assert!(!line.contains("secret") && line.ends_with('\n'));
        assert_eq!(line.matches('\n').count(), 1);
    }

    #[test]
    fn a_clients_text_passes_for_no_other_field() {
        let line = entry().line(Format::Text);
        assert!(
            line.contains(r#" request_id="id-1 status=500 \"x\"\n" "#),
            "{line}"
        );
        assert!(line.contains(" status=200 ") && line.contains(" worker=http://w:8000 "));
        let long = vec![b'x'; 100_000];
        let entry = Entry {
            request_id: &long,
            target: &long,
            ..entry()
        };
        assert!(entry.line(Format::Text).len() < 1_000);
    }

    #[test]
    fn what_is_too_much_is_counted_and_told() {
        let log = Arc::new(AccessLog::new(Format::Json, 10));
        let path = std::env::temp_dir().join(format!("corelane-access-{}", std::process::id()));
        let writer = start(log.clone(), Some(path.clone())).unwrap();
        for _ in 0..25 {
            log.add(&entry());
        }
        drop(writer);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        let written = lines.iter().filter(|line| line["status"] == 200).count();
        let dropped: u64 = lines
            .iter()
            .filter_map(|line| line["dropped_lines"].as_u64())
            .sum();
        // A new second may have begun meanwhile.
        assert!((10..=20).contains(&written), "{written}");
        assert_eq!(written as u64 + dropped, 25);
    }
}
