//! Engines that register themselves (`--vllm-discovery-address`): each sends a msgpack map to a ZMQ ROUTER socket,
//! as vLLM's P2P-NCCL and MoRI-IO connectors do, at least every five seconds.
//!
//! Invariants:
//! - L1 an engine that is silent for [`LEASE`] gets no new work; it stays registered, so what it runs stays in its
//!   books, and its next message brings it back at once.
//! - L2 nothing that arrives here ends anything but its own connection.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rmpv::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::registry::Registration;
use super::{Plane, zmtp};
use crate::config::WorkerUrl;
use crate::route::Role;
use crate::shared::TransferMode;

/// How long a registration holds.
pub const LEASE: Duration = Duration::from_secs(5);
/// How often leases are looked at.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// Time for a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without a message for so long is closed; ZMQ connects again by itself.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Most connections at a time.
const CONNECTION_COUNT_MAX: usize = 2048;
/// Pause between two log lines about bad messages.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// Most ranks that an engine may tell of.
const RANK_COUNT_MAX: u64 = 1024;
/// How deep a message may nest; a good one does not.
const DEPTH_MAX: usize = 16;

/// What came in. Written by the control thread.
#[derive(Debug, Default)]
pub struct Stats {
    registrations: AtomicU64,
    bad: AtomicU64,
    logged: Mutex<Option<Instant>>,
}

impl Stats {
    /// Good messages.
    pub fn registrations(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.registrations.load(Ordering::Relaxed)
    }

    /// Messages and peers that made no sense.
    pub fn bad(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.bad.load(Ordering::Relaxed)
    }

    fn count_good(&self) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.registrations.fetch_add(1, Ordering::Relaxed);
    }

    fn count_bad(&self, peer: SocketAddr, reason: &str) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        let count = self.bad.fetch_add(1, Ordering::Relaxed) + 1;
        let now = Instant::now();
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_none_or(|at| now - at >= LOG_PAUSE) {
            *logged = Some(now);
            tracing::warn!(%peer, count, "registration refused: {reason}");
        }
    }
}

/// Listens on `host:port`, `tcp://` may stand before it.
pub(super) fn bind(text: &str) -> io::Result<std::net::TcpListener> {
    let address = text.strip_prefix("tcp://").unwrap_or(text);
    // ZMQ's spelling of all addresses.
    let address = match address.strip_prefix("*:") {
        Some(port) => format!("0.0.0.0:{port}"),
        None => address.to_owned(),
    };
    let listener = std::net::TcpListener::bind(&address).map_err(|error| {
        let text = format!("cannot listen on --vllm-discovery-address {text}: {error}");
        io::Error::new(error.kind(), text)
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Takes registrations and ends leases, until the runtime ends.
pub(super) async fn run(plane: Arc<Plane>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    let mut look = tokio::time::interval(LOOK_PAUSE);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTION_COUNT_MAX => match accepted {
                Ok((stream, peer)) => {
                    connections.spawn(serve(plane.clone(), stream, peer));
                }
                // Out of descriptors, most likely: the next look comes soon.
                Err(error) => {
                    tracing::warn!(%error, "discovery: a connection was not accepted");
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
            },
            _ = connections.join_next(), if !connections.is_empty() => {}
            _ = look.tick() => plane.end_leases(Instant::now()),
        }
    }
}

async fn serve(plane: Arc<Plane>, mut stream: TcpStream, peer: SocketAddr) {
    let stats = &plane.registrations;
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, zmtp::shake_hands(&mut stream)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return stats.count_bad(peer, &error.to_string()),
        Err(_) => return stats.count_bad(peer, "no handshake in time"),
    }
    loop {
        let message = match tokio::time::timeout(IDLE_TIMEOUT, zmtp::receive(&mut stream)).await {
            Ok(Ok(Some(frames))) => frames,
            // It has left, or is silent: its lease tells.
            Ok(Ok(None)) | Err(_) => return,
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                return stats.count_bad(peer, &error.to_string());
            }
            Ok(Err(_)) => return,
        };
        // Frames before the last are an envelope.
        let body = message.last().map_or(&[][..], Vec::as_slice);
        let outcome = match parse(body) {
            Ok(registration) => plane.register(registration, Instant::now()),
            Err(reason) => Err(reason.to_owned()),
        };
        match outcome {
            Ok(()) => stats.count_good(),
            Err(reason) => stats.count_bad(peer, &reason),
        }
    }
}

/// Reads a message. Fields that are not known are left alone.
fn parse(body: &[u8]) -> Result<Registration, &'static str> {
    let mut rest = body;
    let value = rmpv::decode::read_value_with_max_depth(&mut rest, DEPTH_MAX)
        .map_err(|_| "the message is not msgpack")?;
    let Value::Map(fields) = value else {
        return Err("the message is not a map");
    };
    let find = |name: &str| {
        let named = fields.iter().find(|(key, _)| text(key) == Some(name));
        named
            .map(|(_, value)| value)
            .filter(|value| !value.is_nil())
    };
    let role = match find("type").and_then(text) {
        Some("P") => Role::Prefill,
        Some("D") => Role::Decode,
        _ => return Err("type is neither \"P\" nor \"D\""),
    };
    let http_address = find("http_address").and_then(text);
    let http_address = http_address.ok_or("http_address is missing")?;
    let bare = http_address.strip_prefix("http://").unwrap_or(http_address);
    let url =
        WorkerUrl::parse(&format!("http://{bare}")).map_err(|_| "http_address is not host:port")?;
    let peer_address = match find("zmq_address") {
        None => None,
        Some(address) => {
            let address = text(address).filter(|address| is_host_and_port(address));
            Some(address.ok_or("zmq_address is not host:port")?.into())
        }
    };
    let transfer_mode = match find("transfer_mode") {
        None => None,
        Some(mode) => match text(mode) {
            Some("READ") => Some(TransferMode::Read),
            Some("WRITE") => Some(TransferMode::Write),
            _ => return Err("transfer_mode is neither \"READ\" nor \"WRITE\""),
        },
    };
    let size = |name| match find(name) {
        None => Ok(None),
        Some(size) => match size.as_u64() {
            Some(size @ 1..=RANK_COUNT_MAX) => Ok(Some(size as u32)),
            _ => Err("tp_size or dp_size is not a number from 1 to 1024"),
        },
    };
    Ok(Registration {
        role,
        url,
        peer_address,
        transfer_mode,
        tp_size: size("tp_size")?,
        dp_size: size("dp_size")?,
    })
}

/// Python's older msgpack writes texts as bytes.
fn text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => text.as_str(),
        Value::Binary(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// It goes into a header field of both legs.
fn is_host_and_port(text: &str) -> bool {
    let is_plain =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    text.len() <= 300
        && text.bytes().all(is_plain)
        && text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&str, Value)]) -> Vec<u8> {
        let fields = fields
            .iter()
            .map(|(name, value)| ((*name).into(), value.clone()));
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &Value::Map(fields.collect())).unwrap();
        bytes
    }

    #[test]
    fn registrations_are_read() {
        let plain = parse(&map(&[
            ("type", "P".into()),
            ("http_address", "10.0.0.1:8000".into()),
            ("zmq_address", "10.0.0.1:21001".into()),
            ("later", Value::Array(vec![])),
        ]))
        .unwrap();
        assert_eq!(plain.role, Role::Prefill);
        assert_eq!(&**plain.url.text(), "http://10.0.0.1:8000");
        assert_eq!(plain.peer_address.as_deref(), Some("10.0.0.1:21001"));
        assert_eq!(
            (plain.tp_size, plain.dp_size, plain.transfer_mode),
            (None, None, None)
        );
        let moriio = parse(&map(&[
            ("type", Value::Binary(b"D".to_vec())),
            ("http_address", "http://[::1]:8000".into()),
            ("transfer_mode", "WRITE".into()),
            ("tp_size", 8.into()),
            ("dp_size", 2.into()),
        ]))
        .unwrap();
        assert_eq!(moriio.role, Role::Decode);
        assert_eq!(
            (moriio.tp_size, moriio.dp_size, moriio.transfer_mode),
            (Some(8), Some(2), Some(TransferMode::Write))
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let with = |name: &str, value: Value| {
            let mut fields = vec![
                ("type", "P".into()),
                ("http_address", "h:1".into()),
                ("zmq_address", "h:2".into()),
            ];
            fields.retain(|(known, _)| *known != name);
            fields.push((name, value));
            map(&fields)
        };
        assert!(parse(&with("x", 1.into())).is_ok());
        let table = [
            (b"".to_vec(), "not msgpack"),
            (b"\x92\x01".to_vec(), "not msgpack"),
            (vec![0x91; 10_000], "not msgpack"),
            (b"\xdf\xff\xff\xff\xff".to_vec(), "not msgpack"),
            (b"\x01".to_vec(), "not a map"),
            (map(&[]), "type is"),
            (with("type", "X".into()), "type is"),
            (with("http_address", Value::Nil), "missing"),
            (with("http_address", "a b".into()), "not host:port"),
            (with("zmq_address", "h:1\r\nX: y".into()), "zmq_address"),
            (with("zmq_address", "h".into()), "zmq_address"),
            (with("transfer_mode", "PUSH".into()), "transfer_mode"),
            (with("tp_size", 0.into()), "tp_size"),
            (with("dp_size", (-1).into()), "dp_size"),
            (with("dp_size", 1_000_000.into()), "dp_size"),
        ];
        for (bytes, wanted) in table {
            let error = parse(&bytes).unwrap_err();
            assert!(error.contains(wanted), "{error}, not {wanted}");
        }
    }
}
