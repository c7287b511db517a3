//! The framing rules as one table, for requests and for answers: what comes in, the verdict, and where it is written. The
//! same rows, word for word, stand in the docs of `src/http/mod.rs` (`tests/framing.rs` compares them, and judges every
//! wire by the parsers alone); `tests/hostile.rs` and `tests/http.rs` send them through the whole router.

/// One row.
pub struct Rule {
    /// What comes in: the first cell.
    pub input: &'static str,
    /// What becomes of it: the second cell. A number is the status of the refusal.
    pub verdict: &'static str,
    /// RFC and sections: the third cell.
    pub source: &'static str,
    /// Examples, each with what it is.
    pub wires: Vec<(&'static str, Vec<u8>)>,
}

impl Rule {
    /// The status of the refusal; `None`: it is taken.
    pub fn refusal(&self) -> Option<u16> {
        self.verdict.split(' ').next()?.parse().ok()
    }
}

fn rule(
    input: &'static str,
    verdict: &'static str,
    source: &'static str,
    wires: Vec<(&'static str, Vec<u8>)>,
) -> Rule {
    Rule {
        input,
        verdict,
        source,
        wires,
    }
}

fn whole(rows: &[(&'static str, &str)]) -> Vec<(&'static str, Vec<u8>)> {
    rows.iter()
        .map(|(what, wire)| (*what, wire.as_bytes().to_vec()))
        .collect()
}

/// Requests without a body that have this line behind their Host.
fn with_line(rows: &[(&'static str, &str)]) -> Vec<(&'static str, Vec<u8>)> {
    rows.iter()
        .map(|(what, line)| {
            let wire = format!("GET /x HTTP/1.1\r\nHost: r\r\n{line}\r\n\r\n");
            (*what, wire.into_bytes())
        })
        .collect()
}

const CHUNKS: &str = "2\r\n{}\r\n0\r\n\r\n";
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: r\r\n\r\n";

/// A chat request with these head lines and body; the smuggled request behind it must reach nobody.
fn smuggling(rows: &[(&'static str, &str, &str)]) -> Vec<(&'static str, Vec<u8>)> {
    rows.iter()
        .map(|(what, lines, body)| {
            let wire = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\n{lines}\r\n{body}{SMUGGLED}"
            );
            (*what, wire.into_bytes())
        })
        .collect()
}

/// The same with a chunked body.
fn chunked(rows: &[(&'static str, &str)]) -> Vec<(&'static str, Vec<u8>)> {
    rows.iter()
        .flat_map(|(what, body)| smuggling(&[(*what, "Transfer-Encoding: chunked\r\n", body)]))
        .collect()
}

/// What clients send.
pub fn requests() -> Vec<Rule> {
    let mut rules = request_lines();
    rules.extend(fields());
    rules.extend(lengths_and_codings());
    rules.extend(chunk_rules());
    rules.extend(sizes());
    rules.extend(odd_but_legal());
    rules
}

fn request_lines() -> Vec<Rule> {
    vec![
        rule(
            "a request line that is none: a part missing, a space too many, odd bytes",
            "400",
            "RFC 9112 3, RFC 9110 9.1",
            whole(&[
                ("no method", " /x HTTP/1.1\r\nHost: r\r\n\r\n"),
                ("no version", "GET /x\r\nHost: r\r\n\r\n"),
                ("HTTP/0.9", "GET /\r\n\r\n"),
                (
                    "two spaces after the method",
                    "GET  /x HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                ("a tab for a space", "GET\t/x\tHTTP/1.1\r\nHost: r\r\n\r\n"),
                (
                    "a method that is no token",
                    "G@T /x HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                ("NUL in the target", "GET /x\0y HTTP/1.1\r\nHost: r\r\n\r\n"),
                (
                    "a control byte in the target",
                    "GET /x\u{1}y HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                ("something other than HTTP", "hello\r\n\r\n"),
                (
                    "a TLS greeting",
                    "\u{16}\u{3}\u{1}\u{0}\u{5}\u{1}\u{0}\u{0}\u{1}\u{0}\r\n\r\n",
                ),
            ]),
        ),
        rule(
            "a version other than 1.0 and 1.1, and whatever stands in its place",
            "505",
            "RFC 9112 2.3, RFC 9110 15.6.6",
            whole(&[
                ("HTTP/2.0", "GET /x HTTP/2.0\r\nHost: r\r\n\r\n"),
                ("HTTP/2's preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
                ("HTTP/1.2", "GET /x HTTP/1.2\r\nHost: r\r\n\r\n"),
                ("HTTP/3", "GET /x HTTP/3\r\nHost: r\r\n\r\n"),
                (
                    "a version in small letters",
                    "GET /x http/1.1\r\nHost: r\r\n\r\n",
                ),
                // What follows the second space is the version, whatever it is.
                (
                    "two spaces before the version",
                    "GET /x  HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                (
                    "a space in the target",
                    "GET /x y HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                ("another protocol", "GET /x ICE/1.0\r\nHost: r\r\n\r\n"),
            ]),
        ),
        rule(
            "CONNECT",
            "405",
            "RFC 9110 9.3.6",
            whole(&[
                ("CONNECT", "CONNECT r:443 HTTP/1.1\r\nHost: r:443\r\n\r\n"),
                (
                    "CONNECT with a path",
                    "CONNECT /x HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
            ]),
        ),
        rule(
            "a target that is neither a path nor in absolute form (nor `*` with OPTIONS)",
            "400",
            "RFC 9112 3.2",
            whole(&[
                (
                    "authority form without CONNECT",
                    "GET r:80 HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                ("a relative target", "GET x/y HTTP/1.1\r\nHost: r\r\n\r\n"),
                ("an asterisk with GET", "GET * HTTP/1.1\r\nHost: r\r\n\r\n"),
                (
                    "another scheme",
                    "GET ftp://r/x HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
                (
                    "absolute form with a query and no path",
                    "GET http://r?x=1 HTTP/1.1\r\nHost: r\r\n\r\n",
                ),
            ]),
        ),
    ]
}

fn fields() -> Vec<Rule> {
    let mut bare = whole(&[
        (
            "a line feed for CRLF after the request line",
            "GET /x HTTP/1.1\nHost: r\r\n\r\n",
        ),
        (
            "a line feed for CRLF after a field",
            "GET /x HTTP/1.1\r\nHost: r\nX: 1\r\n\r\n",
        ),
        ("line feeds only", "GET /x HTTP/1.1\nHost: r\n\n"),
        (
            "a line feed for the empty line",
            "GET /x HTTP/1.1\r\nHost: r\r\n\n",
        ),
    ]);
    bare.extend(with_line(&[
        ("a bare carriage return in a value", "X: a\rb"),
        ("a bare carriage return before a field", "X: a\r\r\nY: 1"),
    ]));
    bare.extend(smuggling(&[
        (
            "TE behind a bare carriage return",
            "X: y\rTransfer-Encoding: chunked\r\n",
            CHUNKS,
        ),
        (
            "TE behind a bare line feed",
            "X: y\nTransfer-Encoding: chunked\r\n",
            CHUNKS,
        ),
    ]));
    let mut white = with_line(&[
        ("a space before the colon", "X : 1"),
        ("a tab before the colon", "X\t: 1"),
        ("a folded field", "X: a\r\n b"),
        ("a field that is folded with a tab", "X: a\r\n\tb"),
    ]);
    white.extend(whole(&[(
        "white space before the first field",
        "GET /x HTTP/1.1\r\n Host: r\r\n\r\n",
    )]));
    white.extend(smuggling(&[
        (
            "TE with a space before the colon",
            "Transfer-Encoding : chunked\r\n",
            CHUNKS,
        ),
        ("TE folded", "Transfer-Encoding:\r\n chunked\r\n", CHUNKS),
        (
            "CL with a space before the colon",
            "Content-Length : 2\r\n",
            "{}",
        ),
    ]));
    vec![
        rule("bare LF or bare CR in a head", "400", "RFC 9112 2.2", bare),
        rule(
            "white space before a colon or before the first field, obs-fold",
            "400",
            "RFC 9112 2.2, 5.1, 5.2",
            white,
        ),
        rule(
            "an empty or odd field name, no colon, control bytes in a value",
            "400",
            "RFC 9112 5, RFC 9110 5.1, 5.5",
            with_line(&[
                ("an empty name", ": 1"),
                ("no colon", "Xyz"),
                ("a name with a space", "X Y: 1"),
                ("a name with a parenthesis", "X(: 1"),
                ("a name beyond ASCII", "X\u{e9}: 1"),
                ("NUL in a value", "X: a\0b"),
                ("NUL in a name", "X\0: b"),
                ("a control byte in a value", "X: a\u{7}b"),
                ("DEL in a value", "X: a\u{7f}b"),
            ]),
        ),
        rule(
            "no Host (HTTP/1.1), two Hosts, a Host with odd bytes",
            "400",
            "RFC 9112 3.2",
            whole(&[
                ("no Host", "GET /x HTTP/1.1\r\nX: 1\r\n\r\n"),
                (
                    "absolute form without Host",
                    "GET http://r/x HTTP/1.1\r\n\r\n",
                ),
                ("two Hosts", "GET /x HTTP/1.1\r\nHost: r\r\nHost: r\r\n\r\n"),
                (
                    "two Hosts, one in capitals",
                    "GET /x HTTP/1.1\r\nHost: r\r\nHOST: evil\r\n\r\n",
                ),
                (
                    "two Hosts in HTTP/1.0",
                    "GET /x HTTP/1.0\r\nHost: r\r\nHost: s\r\n\r\n",
                ),
                ("a Host list", "GET /x HTTP/1.1\r\nHost: r, evil\r\n\r\n"),
                (
                    "a Host with a path",
                    "GET /x HTTP/1.1\r\nHost: r/evil\r\n\r\n",
                ),
                (
                    "a Host with a user",
                    "GET /x HTTP/1.1\r\nHost: r@evil\r\n\r\n",
                ),
                (
                    "a Host with a space",
                    "GET /x HTTP/1.1\r\nHost: r evil\r\n\r\n",
                ),
            ]),
        ),
        rule(
            "Expect other than 100-continue (HTTP/1.1)",
            "417",
            "RFC 9110 10.1.1",
            with_line(&[("another expectation", "Expect: 200-ok")]),
        ),
    ]
}

fn lengths_and_codings() -> Vec<Rule> {
    let mut coding_in_old = smuggling(&[]);
    coding_in_old.push((
        "TE in HTTP/1.0",
        format!(
            "POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKS}{SMUGGLED}"
        )
        .into_bytes(),
    ));
    vec![
        rule(
            "Content-Length twice, equal or not, or as a list",
            "400",
            "RFC 9112 6.3, RFC 9110 8.6",
            smuggling(&[
                (
                    "CL twice, different",
                    "Content-Length: 2\r\nContent-Length: 3\r\n",
                    "{}",
                ),
                (
                    "CL twice, equal",
                    "Content-Length: 2\r\nContent-Length: 2\r\n",
                    "{}",
                ),
                ("CL list", "Content-Length: 2, 2\r\n", "{}"),
            ]),
        ),
        rule(
            "Content-Length that is no plain decimal number below 2^63",
            "400",
            "RFC 9112 6.3, RFC 9110 8.6",
            smuggling(&[
                ("CL with a plus", "Content-Length: +2\r\n", "{}"),
                ("CL with a minus", "Content-Length: -2\r\n", "{}"),
                ("CL in hex", "Content-Length: 0x2\r\n", "{}"),
                ("CL with a fraction", "Content-Length: 2.0\r\n", "{}"),
                ("CL with a space inside", "Content-Length: 1 2\r\n", "{}"),
                ("CL empty", "Content-Length:\r\n", "{}"),
                ("CL no number", "Content-Length: two\r\n", "{}"),
                (
                    "CL over 2^63",
                    "Content-Length: 9223372036854775808\r\n",
                    "{}",
                ),
                (
                    "CL that wraps 64 bits",
                    "Content-Length: 18446744073709551618\r\n",
                    "{}",
                ),
            ]),
        ),
        rule(
            "Content-Length beside Transfer-Encoding",
            "400",
            "RFC 9112 6.1, 11.2",
            smuggling(&[
                (
                    "CL.TE",
                    "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n",
                    "0\r\n\r\nX",
                ),
                (
                    "TE.CL",
                    "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
                    "5c\r\n",
                ),
                (
                    "CL.TE with equal lengths",
                    "Content-Length: 12\r\nTransfer-Encoding: chunked\r\n",
                    CHUNKS,
                ),
                (
                    "CL 0 with TE",
                    "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
                    CHUNKS,
                ),
                (
                    "CL with an unknown TE",
                    "Content-Length: 2\r\nTransfer-Encoding: x\r\n",
                    "{}",
                ),
                (
                    "CL with an empty TE",
                    "Content-Length: 2\r\nTransfer-Encoding:\r\n",
                    "{}",
                ),
            ]),
        ),
        rule(
            "Transfer-Encoding other than the one word `chunked`: twice, a list",
            "400",
            "RFC 9112 6.1, 6.3, 7",
            smuggling(&[
                (
                    "TE twice",
                    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
                    CHUNKS,
                ),
                (
                    "TE.TE with a disguised one",
                    "Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n",
                    CHUNKS,
                ),
                (
                    "TE.TE the other way",
                    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
                    CHUNKS,
                ),
                (
                    "TE list ending in chunked",
                    "Transfer-Encoding: gzip, chunked\r\n",
                    CHUNKS,
                ),
                (
                    "TE chunked not last",
                    "Transfer-Encoding: chunked, identity\r\n",
                    CHUNKS,
                ),
                (
                    "TE chunked twice in a list",
                    "Transfer-Encoding: chunked, chunked\r\n",
                    CHUNKS,
                ),
                (
                    "TE with an empty list member",
                    "Transfer-Encoding: ,chunked\r\n",
                    CHUNKS,
                ),
                ("TE xchunked", "Transfer-Encoding: xchunked\r\n", CHUNKS),
                ("TE chunkedx", "Transfer-Encoding: chunkedx\r\n", CHUNKS),
                ("TE in quotes", "Transfer-Encoding: \"chunked\"\r\n", CHUNKS),
                (
                    "TE with a parameter",
                    "Transfer-Encoding: chunked;q=1\r\n",
                    CHUNKS,
                ),
                (
                    "TE with a vertical tab",
                    "Transfer-Encoding: \u{b}chunked\r\n",
                    CHUNKS,
                ),
                ("TE identity", "Transfer-Encoding: identity\r\n", CHUNKS),
            ]),
        ),
        rule(
            "Transfer-Encoding in HTTP/1.0",
            "400",
            "RFC 9112 6.1",
            coding_in_old,
        ),
    ]
}

fn chunk_rules() -> Vec<Rule> {
    let long_extension = format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "e".repeat(10_000));
    let long_trailers = format!("2\r\n{{}}\r\n0\r\n{}\r\n", "X-T: 1\r\n".repeat(4_000));
    vec![
        rule(
            "a chunk size that is not hex digits alone, or over 2^60",
            "400",
            "RFC 9112 7.1",
            chunked(&[
                ("a chunk size that is no hex", "zz\r\n{}\r\n0\r\n\r\n"),
                ("an empty chunk size", "\r\n{}\r\n0\r\n\r\n"),
                ("a chunk size with 0x", "0x2\r\n{}\r\n0\r\n\r\n"),
                ("a chunk size with a plus", "+2\r\n{}\r\n0\r\n\r\n"),
                ("a chunk size with a minus", "-2\r\n{}\r\n0\r\n\r\n"),
                ("a chunk size with a space before", " 2\r\n{}\r\n0\r\n\r\n"),
                (
                    "a chunk size over 2^60",
                    "10000000000000000\r\n{}\r\n0\r\n\r\n",
                ),
                (
                    "a chunk size that wraps 64 bits",
                    "ffffffffffffffff2\r\n{}\r\n0\r\n\r\n",
                ),
            ]),
        ),
        rule(
            "bare LF, bare CR or a control byte in a chunk line",
            "400",
            "RFC 9112 2.2, 7.1.1",
            chunked(&[
                (
                    "a chunk size line ended by a line feed",
                    "2\n{}\r\n0\r\n\r\n",
                ),
                (
                    "a chunk size line ended by a carriage return",
                    "2\r{}\r\n0\r\n\r\n",
                ),
                (
                    "a chunk extension ended by a line feed",
                    "2;x\n{}\r\n0\r\n\r\n",
                ),
                ("NUL in a chunk extension", "2;\0\r\n{}\r\n0\r\n\r\n"),
                (
                    "a bare carriage return in a chunk extension",
                    "2;a\rb\r\n{}\r\n0\r\n\r\n",
                ),
                ("a last chunk ended by a line feed", "2\r\n{}\r\n0\n\r\n"),
            ]),
        ),
        rule(
            "chunk data that is not followed by CRLF",
            "400",
            "RFC 9112 7.1",
            chunked(&[
                ("chunk data without its end", "2\r\n{}0\r\n\r\n"),
                ("chunk data ended by a line feed", "2\r\n{}\n0\r\n\r\n"),
                ("chunk data longer than its size", "1\r\n{}\r\n0\r\n\r\n"),
            ]),
        ),
        rule(
            "a trailer that is folded, nameless, ended by bare LF, or has control bytes",
            "400",
            "RFC 9112 7.1.2, 5.2",
            chunked(&[
                ("a folded trailer", "2\r\n{}\r\n0\r\nX: 1\r\n y\r\n\r\n"),
                ("a trailer without a name", "2\r\n{}\r\n0\r\n: 1\r\n\r\n"),
                (
                    "a trailer ended by a line feed",
                    "2\r\n{}\r\n0\r\nX: 1\n\r\n",
                ),
                ("NUL in a trailer", "2\r\n{}\r\n0\r\nX: \0\r\n\r\n"),
            ]),
        ),
        rule(
            "chunk lines over 4 KiB, trailers over 16 KiB",
            "400",
            "RFC 9112 7.1.1, 7.1.2",
            chunked(&[
                ("an endless chunk extension", &long_extension),
                ("endless trailers", &long_trailers),
            ]),
        ),
    ]
}

fn sizes() -> Vec<Rule> {
    let long = "a".repeat(100_000);
    let many = |count| {
        format!(
            "GET /x HTTP/1.1\r\nHost: r\r\n{}\r\n",
            "X: 1\r\n".repeat(count)
        )
    };
    vec![
        rule(
            "a target over `--header-size-max-bytes`",
            "414",
            "RFC 9112 3, RFC 9110 15.5.15",
            whole(&[
                (
                    "a target of 100 kB",
                    &format!("GET /{long} HTTP/1.1\r\nHost: r\r\n\r\n"),
                ),
                (
                    "a query of 100 kB without an end",
                    &format!("GET /x?{long}"),
                ),
            ]),
        ),
        rule(
            "a head over `--header-size-max-bytes`, more fields than `--header-count-max`",
            "431",
            "RFC 6585 5, RFC 9110 5.4",
            whole(&[
                (
                    "a field of 100 kB",
                    &format!("GET /x HTTP/1.1\r\nHost: r\r\nX: {long}\r\n\r\n"),
                ),
                (
                    "a field of 100 kB without an end",
                    &format!("GET /x HTTP/1.1\r\nHost: r\r\nX: {long}"),
                ),
                ("300 fields", &many(300)),
                ("2,000 fields", &many(2_000)),
            ]),
        ),
    ]
}

/// Each ends in the two bytes `{}` of a body.
fn odd_but_legal() -> Vec<Rule> {
    vec![
        rule(
            "empty lines before a request",
            "skipped",
            "RFC 9112 2.2",
            whole(&[(
                "two empty lines",
                "\r\n\r\nPOST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
            )]),
        ),
        rule(
            "a target in absolute form",
            "routed by its path alone",
            "RFC 9112 3.2.2",
            whole(&[
                (
                    "with another authority",
                    "POST http://evil.example:1/x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
                ),
                (
                    "with the other scheme",
                    "POST HTTPS://r/x HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
                ),
            ]),
        ),
        rule(
            "white space round a value, no value, bytes beyond ASCII in it",
            "taken, without it",
            "RFC 9112 5, RFC 9110 5.1, 5.5",
            whole(&[
                (
                    "white space",
                    "POST /x HTTP/1.1\r\nhOsT:r\r\nX:\r\nY: \t z \t\r\ncontent-LENGTH:   2  \r\n\r\n{}",
                ),
                (
                    "bytes beyond ASCII",
                    "POST /x HTTP/1.1\r\nHost: [::1]:80\r\nX: \u{e9}\r\nContent-Length: 2\r\n\r\n{}",
                ),
            ]),
        ),
        rule(
            "leading zeros, chunk extensions, trailers",
            "taken; where read whole, not passed on",
            "RFC 9112 7.1",
            whole(&[
                (
                    "zeros before a length",
                    "POST /x HTTP/1.1\r\nHost: r\r\nContent-Length: 0002\r\n\r\n{}",
                ),
                (
                    "extensions",
                    "POST /x HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: Chunked\r\n\r\n00002;a=\"b;c\"\r\n{}\r\n0;z\r\nT: 1\r\n\r\n",
                ),
            ]),
        ),
        rule(
            "any other method, HTTP/1.0, `*` with OPTIONS",
            "taken; workers are asked in HTTP/1.1",
            "RFC 9110 9.1, RFC 9112 2.3",
            whole(&[
                ("BREW", "BREW /x HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}"),
                (
                    "OPTIONS",
                    "OPTIONS * HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
                ),
            ]),
        ),
    ]
}

fn answer(rows: &[(&'static str, &str)]) -> Vec<(&'static str, Vec<u8>)> {
    rows.iter()
        .map(|(what, rest)| (*what, format!("HTTP/1.1 200 OK\r\n{rest}").into_bytes()))
        .collect()
}

/// What workers send. Those that are refused are the worker's failure, each counted; `502` becomes a visible break where
/// the head has gone to the client already.
pub fn answers() -> Vec<Rule> {
    let huge = format!(
        "X-Huge: {}\r\nContent-Length: 2\r\n\r\nok",
        "h".repeat(400_000)
    );
    let mut lines = whole(&[
        ("HTTP/2.0", "HTTP/2.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
        (
            "two digits",
            "HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok",
        ),
        ("099", "HTTP/1.1 099 OK\r\nContent-Length: 2\r\n\r\nok"),
        ("garbage", "garbage\r\n\r\n"),
    ]);
    lines.push((
        "a TLS greeting",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc".to_vec(),
    ));
    vec![
        rule(
            "a status line that is none",
            "502",
            "RFC 9112 4, RFC 9110 15",
            lines,
        ),
        rule(
            "bare LF, white space before a colon, obs-fold, control bytes in its head",
            "502",
            "RFC 9112 2.2, 5.1, 5.2",
            whole(&[
                (
                    "line feeds only",
                    "HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
                ),
                (
                    "a space before a colon",
                    "HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
                ),
                (
                    "a folded field",
                    "HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok",
                ),
                (
                    "NUL",
                    "HTTP/1.1 200 OK\r\nX: \0\r\nContent-Length: 2\r\n\r\nok",
                ),
            ]),
        ),
        rule(
            "a head over 256 KiB",
            "502",
            "RFC 9110 5.4",
            answer(&[("a field of 400 kB", &huge)]),
        ),
        rule(
            "two lengths that differ, a list, a length that is no plain decimal number",
            "502",
            "RFC 9112 6.3",
            answer(&[
                ("two lengths", "Content-Length: 2\r\nContent-Length: 3\r\n\r\nok"),
                ("a list", "Content-Length: 2, 2\r\n\r\nok"),
                ("a plus", "Content-Length: +2\r\n\r\nok"),
                ("a minus", "Content-Length: -1\r\n\r\nok"),
                ("beyond 64 bits", "Content-Length: 99999999999999999999\r\n\r\nok"),
            ]),
        ),
        rule(
            "a length beside Transfer-Encoding",
            "502",
            "RFC 9112 6.1, 6.3",
            answer(&[(
                "both",
                "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            )]),
        ),
        rule(
            "a Transfer-Encoding other than the one word `chunked`, or in HTTP/1.0",
            "502",
            "RFC 9112 6.1, 6.3",
            [
                answer(&[
                    (
                        "a list",
                        "Transfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
                    ),
                    (
                        "twice",
                        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
                    ),
                ]),
                whole(&[(
                    "HTTP/1.0",
                    "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
                )]),
            ]
            .concat(),
        ),
        rule(
            "broken chunk lines or chunk data",
            "502 or a visible break",
            "RFC 9112 7.1, 8",
            answer(&[
                ("no hex", "Transfer-Encoding: chunked\r\n\r\nzz\r\nok\r\n0\r\n\r\n"),
                ("a bare line feed", "Transfer-Encoding: chunked\r\n\r\n2\nok\r\n0\r\n\r\n"),
                ("data too long", "Transfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n"),
                (
                    "a size beyond 2^60",
                    "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\nfffffffffffffffff\r\n",
                ),
                ("a minus", "Transfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n"),
            ]),
        ),
        rule(
            "an end before its length or its last chunk",
            "502 or a visible break",
            "RFC 9112 8",
            answer(&[
                ("half a length", "Content-Length: 9\r\n\r\nok"),
                ("half a chunk", "Transfer-Encoding: chunked\r\n\r\n9\r\nok"),
                ("no last chunk", "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"),
                ("half a trailer", "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nT: "),
            ]),
        ),
        rule(
            "101, which nobody asked for (Upgrade goes no further)",
            "502",
            "RFC 9110 7.8, 15.2.2",
            whole(&[(
                "101",
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\nPRI",
            )]),
        ),
        rule(
            "its length twice, the same",
            "taken, and said once",
            "RFC 9112 6.3",
            answer(&[("twice", "Content-Length: 2\r\nContent-Length: 2\r\n\r\nok")]),
        ),
        rule(
            "204, 304, an answer to HEAD",
            "no body, whatever the fields say",
            "RFC 9112 6.3",
            whole(&[
                ("204", "HTTP/1.1 204 No\r\nTransfer-Encoding: chunked\r\n\r\n"),
                ("304", "HTTP/1.1 304 No\r\nContent-Length: 2\r\n\r\n"),
            ]),
        ),
        rule(
            "bytes behind its end",
            "reach nobody; its connection closes",
            "RFC 9112 9.2",
            answer(&[("another answer", "Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n")]),
        ),
        rule(
            "neither length nor chunks",
            "until the worker closes; HTTP/1.1 gets chunks",
            "RFC 9112 6.3",
            answer(&[("no length", "Content-Type: text/plain\r\n\r\nok")]),
        ),
    ]
}
