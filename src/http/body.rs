//! Where a body ends: length, chunks, or the end of the connection. Follows bytes as they come, in any pieces.

/// How a message's body is framed (RFC 9112 section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// This many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// Until the peer closes (answers only).
    Close,
}

/// A plain decimal length below 2^63; no sign, no white space, no list.
pub fn parse_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 19 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let n = value.iter().try_fold(0u64, |n, b| {
        n.checked_mul(10)?.checked_add(u64::from(b - b'0'))
    })?;
    (n < 1 << 63).then_some(n)
}

/// The most bytes a chunk line may have, its extensions included.
const CHUNK_LINE_BYTES_MAX: u32 = 4096;
/// The most bytes all trailer fields may have.
const TRAILER_BYTES_MAX: u32 = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// In the size line; digits seen, size so far.
    Size {
        digits: u8,
        size: u64,
    },
    /// In an extension, after the size.
    Extension {
        size: u64,
        quoted: bool,
        escaped: bool,
    },
    /// After the CR of a size line.
    SizeLf {
        size: u64,
    },
    Data {
        left: u64,
    },
    DataCr,
    DataLf,
    /// At the start of a trailer line, in it, after its CR, or after the CR of the empty line.
    TrailerStart,
    Trailer,
    TrailerLf,
    EndLf,
}

/// Follows one body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body {
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Done,
    Length {
        left: u64,
    },
    Chunked {
        at: At,
        line_bytes: u32,
        trailer_bytes: u32,
    },
    Close,
}

/// What a piece of bytes did to the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// How many bytes of the piece belong to the body (framing included). What follows is another message.
    pub consumed: usize,
    /// The body is complete.
    pub done: bool,
}

/// Broken chunk framing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

impl Body {
    /// A body about to begin.
    pub fn new(framing: Framing) -> Body {
        let state = match framing {
            Framing::None | Framing::Length(0) => State::Done,
            Framing::Length(left) => State::Length { left },
            Framing::Chunked => State::Chunked {
                at: At::Size { digits: 0, size: 0 },
                line_bytes: 0,
                trailer_bytes: 0,
            },
            Framing::Close => State::Close,
        };
        Body { state }
    }

    /// Whether all of it has been seen.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether the end of the connection is the proper end.
    pub fn ends_with_connection(&self) -> bool {
        self.state == State::Close
    }

    /// Whether the next byte would begin a chunk's size line (not the first one's: a head may still wait before it).
    pub fn is_between_chunks(&self) -> bool {
        matches!(
            self.state,
            State::Chunked {
                at: At::Size { digits: 0, .. },
                ..
            }
        )
    }

    /// Takes the next bytes; `data` gets each run of them that is content.
    ///
    /// # Errors
    /// The chunk framing is broken: nothing after it can be trusted, and the body is where it was before these bytes.
    pub fn feed(&mut self, bytes: &[u8], data: impl FnMut(&[u8])) -> Result<Progress, Broken> {
        let before = *self;
        let result = self.follow(bytes, data);
        if result.is_err() {
            *self = before;
        }
        result
    }

    fn follow(&mut self, bytes: &[u8], mut data: impl FnMut(&[u8])) -> Result<Progress, Broken> {
        match &mut self.state {
            State::Done => Ok(Progress {
                consumed: 0,
                done: true,
            }),
            State::Close => {
                data(bytes);
                Ok(Progress {
                    consumed: bytes.len(),
                    done: false,
                })
            }
            State::Length { left } => {
                let n = (*left).min(bytes.len() as u64) as usize;
                data(&bytes[..n]);
                *left -= n as u64;
                let done = *left == 0;
                if done {
                    self.state = State::Done;
                }
                Ok(Progress { consumed: n, done })
            }
            State::Chunked {
                at,
                line_bytes,
                trailer_bytes,
            } => {
                let (consumed, done) = chunked(at, line_bytes, trailer_bytes, bytes, data)?;
                if done {
                    self.state = State::Done;
                }
                Ok(Progress { consumed, done })
            }
        }
    }
}

fn chunked(
    at: &mut At,
    line_bytes: &mut u32,
    trailer_bytes: &mut u32,
    bytes: &[u8],
    mut data: impl FnMut(&[u8]),
) -> Result<(usize, bool), Broken> {
    let mut i = 0;
    while i < bytes.len() {
        if let At::Data { left } = at {
            let n = (*left).min((bytes.len() - i) as u64) as usize;
            data(&bytes[i..i + n]);
            i += n;
            *left -= n as u64;
            if *left == 0 {
                *at = At::DataCr;
            }
            continue;
        }
        let b = bytes[i];
        i += 1;
        *at = match (*at, b) {
            (At::Size { digits, size }, _) if b.is_ascii_hexdigit() => {
                // 2^60: far beyond any body, and the arithmetic cannot wrap. Leading zeros are legal.
                if size >= 1 << 56 || digits >= 64 {
                    return Err(Broken);
                }
                let value = (b as char).to_digit(16).unwrap_or(0);
                At::Size {
                    digits: digits + 1,
                    size: size << 4 | u64::from(value),
                }
            }
            (At::Size { digits: 1.., size }, b'\r') => At::SizeLf { size },
            (At::Size { digits: 1.., size }, b';') => At::Extension {
                size,
                quoted: false,
                escaped: false,
            },
            // RFC 9112 section 7.1.1: white space before an extension is tolerated by readers ("bad whitespace").
            (At::Size { digits: 1.., size }, b' ' | b'\t') => At::Extension {
                size,
                quoted: false,
                escaped: false,
            },
            (
                At::Extension {
                    size,
                    quoted: false,
                    ..
                },
                b'\r',
            ) => At::SizeLf { size },
            (At::Extension { .. }, 0..=8 | 10..=31 | 127) => return Err(Broken),
            (
                At::Extension {
                    size,
                    quoted: true,
                    escaped: true,
                },
                _,
            ) => At::Extension {
                size,
                quoted: true,
                escaped: false,
            },
            (
                At::Extension {
                    size, quoted: true, ..
                },
                b'\\',
            ) => At::Extension {
                size,
                quoted: true,
                escaped: true,
            },
            (At::Extension { size, quoted, .. }, b'"') => At::Extension {
                size,
                quoted: !quoted,
                escaped: false,
            },
            (At::Extension { size, quoted, .. }, _) => At::Extension {
                size,
                quoted,
                escaped: false,
            },
            (At::SizeLf { size: 0 }, b'\n') => At::TrailerStart,
            (At::SizeLf { size }, b'\n') => At::Data { left: size },
            (At::DataCr, b'\r') => At::DataLf,
            (At::DataLf, b'\n') => At::Size { digits: 0, size: 0 },
            (At::TrailerStart, b'\r') => At::EndLf,
            (At::TrailerStart, b' ' | b'\t' | b':' | b'\n') => return Err(Broken),
            (At::TrailerStart | At::Trailer, 0..=8 | 10..=12 | 14..=31 | 127) => {
                return Err(Broken);
            }
            (At::Trailer, b'\r') => At::TrailerLf,
            (At::TrailerStart | At::Trailer, _) => At::Trailer,
            (At::TrailerLf, b'\n') => At::TrailerStart,
            (At::EndLf, b'\n') => return Ok((i, true)),
            _ => return Err(Broken),
        };
        match at {
            At::Size { digits: 0, .. } => *line_bytes = 0,
            At::Size { .. } | At::Extension { .. } => *line_bytes += 1,
            At::TrailerStart | At::Trailer => *trailer_bytes += 1,
            _ => {}
        }
        if *line_bytes > CHUNK_LINE_BYTES_MAX || *trailer_bytes > TRAILER_BYTES_MAX {
            return Err(Broken);
        }
    }
    Ok((i, false))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(bytes: &[u8], piece: usize) -> Result<(Vec<u8>, usize, bool), Broken> {
        let mut body = Body::new(Framing::Chunked);
        let (mut content, mut consumed) = (Vec::new(), 0);
        for part in bytes.chunks(piece) {
            let progress = body.feed(part, |d| content.extend_from_slice(d))?;
            consumed += progress.consumed;
            if progress.done {
                return Ok((content, consumed, true));
            }
        }
        Ok((content, consumed, false))
    }

    #[test]
    fn any_split_of_the_bytes_gives_the_same_body() {
        let wire = b"5\r\nhello\r\n000A;a=\"q;\\\"\r\x22\r\n";
        assert_eq!(
            run(&wire[..], 1),
            Err(Broken),
            "a CR inside a quoted extension"
        );
        let wire = b"5\r\nhello\r\n00A;name=\"v;x\" \r\n, world!!!\r\n0\r\nX-Sum: 1\r\n\r\nGET";
        for piece in 1..wire.len() {
            let (content, consumed, done) = run(wire, piece).unwrap();
            assert_eq!(content, b"hello, world!!!", "pieces of {piece}");
            assert_eq!(
                (consumed, done),
                (wire.len() - 3, true),
                "pieces of {piece}"
            );
        }
    }

    /// Its first half has gone on to somebody, who is in the middle of a chunk: what breaks the framing does not, and changes
    /// nothing.
    #[test]
    fn a_piece_that_breaks_the_framing_leaves_the_body_where_it_was() {
        let mut body = Body::new(Framing::Chunked);
        body.feed(b"7\r\nda", |_| {}).unwrap();
        let before = body;
        assert_eq!(body.feed(b"ta: 1\r\n\0", |_| {}), Err(Broken));
        assert_eq!(body, before);
        assert!(!body.is_between_chunks());
    }

    #[test]
    fn broken_chunk_lines_are_refused_in_any_split() {
        let table: [&[u8]; 14] = [
            b"5\nhello\r\n0\r\n\r\n",
            b"5;a\nhello\r\n0\r\n\r\n",
            b"0x5\r\nhello\r\n0\r\n\r\n",
            b"-5\r\nhello\r\n0\r\n\r\n",
            b"+5\r\nhello\r\n0\r\n\r\n",
            b"\r\n5\r\nhello\r\n0\r\n\r\n",
            b" 5\r\nhello\r\n0\r\n\r\n",
            b"4\r\nhello\r\n0\r\n\r\n",
            b"5\r\nhello0\r\n\r\n",
            b"5\r\nhello\n0\r\n\r\n",
            b"5\r\rhello\r\n0\r\n\r\n",
            b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
            b"5\r\nhello\r\n0\r\n folded: 1\r\n\r\n",
            b"5\r\nhello\r\n0\r\nX: 1\n\r\n",
        ];
        for wire in table {
            for piece in 1..=wire.len() {
                assert_eq!(
                    run(wire, piece),
                    Err(Broken),
                    "{:?}",
                    String::from_utf8_lossy(wire)
                );
            }
        }
    }

    #[test]
    fn endless_lines_and_trailers_are_refused() {
        let mut long = b"5;".to_vec();
        long.resize(8192, b'x');
        assert_eq!(run(&long, 512), Err(Broken));
        let mut trailers = b"0\r\n".to_vec();
        for _ in 0..4096 {
            trailers.extend_from_slice(b"X-A: 1\r\n");
        }
        assert_eq!(run(&trailers, 512), Err(Broken));
    }

    #[test]
    fn lengths_are_plain_decimal_numbers() {
        for (text, want) in [
            ("0", Some(0)),
            ("12", Some(12)),
            ("+1", None),
            ("-1", None),
            ("1 ", None),
            ("1,1", None),
            ("0x1", None),
            ("", None),
            ("9223372036854775807", Some((1 << 63) - 1)),
            ("9223372036854775808", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(parse_length(text.as_bytes()), want, "{text:?}");
        }
    }
}
