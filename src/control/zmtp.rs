//! ZMTP 3 (rfc.zeromq.org/spec/37) with the NULL mechanism: what a ROUTER socket does to take messages of engines that register,
//! and what SUB and DEALER sockets do to get KV events. Nothing is sent but the handshake, answers to PING, and what is asked for.
//!
//! Our own, because its port faces a network: the `zeromq` crate (0.6) reserves whatever length a frame's head names
//! before a byte of it has come, so that nine bytes end the process. Here every length is checked first.

use std::io::{self, ErrorKind};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of a message, all frames together, and of a command.
pub const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Most frames of a message.
const FRAME_COUNT_MAX: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Greets an engine that registers: we are a ROUTER. An error: it is none that can be talked to.
pub async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) -> io::Result<()> {
    greet(stream, "ROUTER", &["DEALER", "REQ", "ROUTER"]).await
}

/// Greets the peer as a socket of this kind and exchanges READY. An error: it is none of `peers`.
pub async fn greet<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    kind: &str,
    peers: &[&str],
) -> io::Result<()> {
    let mut ours = [0; 64];
    (ours[0], ours[9], ours[10]) = (0xff, 0x7f, 3);
    ours[12..16].copy_from_slice(b"NULL");
    stream.write_all(&ours).await?;
    let mut theirs = [0; 64];
    // The signature alone first: a peer that speaks something else may never send 64 bytes.
    stream.read_exact(&mut theirs[..10]).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 {
        return Err(bad("it does not speak ZMTP"));
    }
    stream.read_exact(&mut theirs[10..]).await?;
    if theirs[10] < 3 {
        return Err(bad("its ZMTP is older than version 3"));
    }
    if theirs[12..32] != ours[12..32] {
        return Err(bad("it wants a security mechanism other than NULL"));
    }
    let mut ready = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", kind), ("Identity", "")] {
        ready.push(name.len() as u8);
        ready.extend_from_slice(name.as_bytes());
        ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
        ready.extend_from_slice(value.as_bytes());
    }
    send_command(stream, &ready).await?;
    let (flags, body) = read_frame(stream, MESSAGE_BYTES_MAX)
        .await?
        .ok_or(ErrorKind::UnexpectedEof)?;
    let properties = body.strip_prefix(b"\x05READY");
    let (true, Some(properties)) = (flags & COMMAND != 0, properties) else {
        return Err(bad("it did not say READY"));
    };
    match property(properties, b"Socket-Type") {
        Some(kind) if peers.iter().any(|peer| peer.as_bytes() == kind) => Ok(()),
        _ => Err(bad("its socket is none that talks to ours")),
    }
}

/// The next message's frames. None: the peer has left between two messages.
pub async fn receive<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
) -> io::Result<Option<Vec<Vec<u8>>>> {
    receive_up_to(stream, MESSAGE_BYTES_MAX).await
}

/// The same with another bound, in bytes.
pub async fn receive_up_to<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    bytes_max: usize,
) -> io::Result<Option<Vec<Vec<u8>>>> {
    let mut frames: Vec<Vec<u8>> = Vec::new();
    loop {
        let taken: usize = frames.iter().map(Vec::len).sum();
        let Some((flags, body)) = read_frame(stream, bytes_max - taken).await? else {
            return if frames.is_empty() {
                Ok(None)
            } else {
                Err(ErrorKind::UnexpectedEof.into())
            };
        };
        if flags & COMMAND != 0 {
            // PING: a time to live of two bytes, then what PONG gives back.
            if let Some(context) = body
                .strip_prefix(b"\x04PING")
                .and_then(|rest| rest.get(2..))
            {
                send_command(stream, &[b"\x04PONG", context].concat()).await?;
            }
            continue;
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Some(frames));
        }
        if frames.len() == FRAME_COUNT_MAX {
            return Err(bad("a message has too many frames"));
        }
    }
}

async fn read_frame<S: AsyncRead + Unpin>(
    stream: &mut S,
    bytes_max: usize,
) -> io::Result<Option<(u8, Vec<u8>)>> {
    let flags = match stream.read_u8().await {
        Ok(flags) => flags,
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(bad("a frame's flags cannot be"));
    }
    let length = if flags & LONG != 0 {
        stream.read_u64().await?
    } else {
        stream.read_u8().await?.into()
    };
    let length = usize::try_from(length).ok().filter(|n| *n <= bytes_max);
    let length = length.ok_or_else(|| bad("a message is too long"))?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(Some((flags, body)))
}

/// Sends a message of these frames, at least one.
pub async fn send<S: AsyncWrite + Unpin>(stream: &mut S, frames: &[&[u8]]) -> io::Result<()> {
    let mut bytes = Vec::new();
    for (place, frame) in frames.iter().enumerate() {
        let more = if place + 1 < frames.len() { MORE } else { 0 };
        put_frame(&mut bytes, more, frame);
    }
    stream.write_all(&bytes).await?;
    stream.flush().await
}

async fn send_command<S: AsyncWrite + Unpin>(stream: &mut S, body: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(body.len() + 9);
    put_frame(&mut frame, COMMAND, body);
    stream.write_all(&frame).await
}

fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => out.extend([flags, length]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// A property of READY: names are compared without regard to case.
fn property<'b>(mut rest: &'b [u8], wanted: &[u8]) -> Option<&'b [u8]> {
    while let Some((length, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(*length))?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) =
            after.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        rest = after;
    }
    None
}

fn bad(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: &[u8] = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";

    fn greeting() -> Vec<u8> {
        let mut greeting = vec![0; 64];
        (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        greeting
    }

    /// What comes of these bytes: the messages, then the error, if any.
    async fn take(bytes: &[u8]) -> (Vec<Vec<Vec<u8>>>, Option<String>, Vec<u8>) {
        let (mut ours, mut theirs) = tokio::io::duplex(1 << 20);
        theirs.write_all(bytes).await.unwrap();
        theirs.shutdown().await.unwrap();
        let mut messages = Vec::new();
        let error = match shake_hands(&mut ours).await {
            Err(error) => Some(error.to_string()),
            Ok(_) => loop {
                match receive(&mut ours).await {
                    Ok(Some(message)) => messages.push(message),
                    Ok(None) => break None,
                    Err(error) => break Some(error.to_string()),
                }
            },
        };
        drop(ours);
        let mut said = Vec::new();
        theirs.read_to_end(&mut said).await.unwrap();
        (messages, error, said)
    }

    #[tokio::test]
    async fn messages_are_taken_and_pings_answered() {
        let bytes = [
            &greeting()[..],
            READY,
            b"\x00\x02hi",
            b"\x04\x0a\x04PING\x00\x64xyz",
            b"\x01\x00\x02\x00\x00\x00\x00\x00\x00\x00\x01!",
        ]
        .concat();
        let (messages, error, said) = take(&bytes).await;
        assert_eq!(error, None);
        assert_eq!(
            messages,
            [vec![b"hi".to_vec()], vec![b"".to_vec(), b"!".to_vec()]]
        );
        assert!(said.ends_with(b"\x04\x08\x04PONGxyz"));
    }

    #[tokio::test]
    async fn what_cannot_be_is_refused_before_it_is_read() {
        let with = |rest: &[u8]| [&greeting()[..], READY, rest].concat();
        let changed = |at: usize, byte: u8| {
            let mut bytes = with(b"");
            bytes[at] = byte;
            bytes
        };
        let table = [
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "does not speak ZMTP"),
            (changed(10, 2), "older than version 3"),
            (changed(12, b'P'), "security mechanism"),
            (changed(64 + 3, b'X'), "did not say READY"),
            (changed(64 + 24, b'X'), "none that talks"),
            (with(b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff"), "too long"),
            (with(b"\x06\xff\xff\xff\xff\xff\xff\xff\xff"), "too long"),
            (with(b"\x08\x00"), "flags"),
            (with(b"\x05\x00"), "flags"),
            (with(&b"\x01\x00".repeat(9)), "too many frames"),
        ];
        for (bytes, wanted) in table {
            let (messages, error, _) = take(&bytes).await;
            assert!(messages.is_empty());
            let error = error.unwrap_or_default();
            assert!(error.contains(wanted), "{error}, not {wanted}");
        }
        // Cut off anywhere, it ends; nothing waits or panics.
        let whole = with(b"\x01\x01a\x00\x01b");
        for end in 0..whole.len() {
            let (messages, _, _) = take(&whole[..end]).await;
            assert!(messages.is_empty(), "{end}");
        }
    }
}
