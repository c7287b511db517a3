//! Cross-origin requests of web pages (Fetch standard, section 3.2): which origins may read answers, and what a preflight gets.
//! Pure. Off unless `--cors-allowed-origins` names an origin; then nothing here runs.
//!
//! Whose answers they are makes no difference: our own, refusals, and those of workers, whose own `Access-Control-` fields give
//! way (two of them would make a browser refuse the answer).

use super::is;
use super::reply::push_field;

/// Seconds for which a browser may remember a preflight (vllm-router's).
const MAX_AGE: &str = "3600";
/// What may be asked for; what is not served is refused when it comes.
const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS";

/// Who may ask from a web page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// Lower case; none: any.
    origins: Vec<Box<str>>,
}

impl Cors {
    /// Of the words of `--cors-allowed-origins`; `None`: there are none.
    ///
    /// # Errors
    /// In words: one is no origin, or stands beside `*`.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Result<Option<Cors>, String> {
        let words: Vec<&str> = words.collect();
        if words.is_empty() {
            return Ok(None);
        }
        if words == ["*"] {
            return Ok(Some(Cors {
                origins: Vec::new(),
            }));
        }
        let origins = words
            .iter()
            .map(|word| origin(word))
            .collect::<Result<_, _>>()?;
        Ok(Some(Cors { origins }))
    }

    /// As they were given, for operators.
    pub fn shown(&self) -> Vec<&str> {
        match self.origins.is_empty() {
            true => vec!["*"],
            false => self.origins.iter().map(|origin| &**origin).collect(),
        }
    }

    /// The fields of an answer to a request with these fields (each `name: value CRLF`), written likewise; never empty.
    pub fn of_answer(&self, request_fields: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        self.push_origin(
            request_fields,
            "access-control-expose-headers: x-request-id, retry-after\r\n",
            &mut out,
        );
        out
    }

    /// The fields of the answer to a preflight with these fields; `None`: it is none, but a request like others.
    pub fn of_preflight(&self, request_fields: &[u8]) -> Option<Vec<u8>> {
        find(request_fields, "origin")?;
        find(request_fields, "access-control-request-method")?;
        let mut out = Vec::with_capacity(256);
        if self.push_origin(request_fields, "", &mut out) {
            push_field(&mut out, "access-control-allow-methods", METHODS.as_bytes());
            // Those that are asked for: `*` would leave out Authorization, and clients send fields of their own.
            if let Some(names) = find(request_fields, "access-control-request-headers") {
                push_field(&mut out, "access-control-allow-headers", names);
            }
            push_field(&mut out, "access-control-max-age", MAX_AGE.as_bytes());
        }
        push_field(
            &mut out,
            "vary",
            b"access-control-request-method, access-control-request-headers",
        );
        Some(out)
    }

    /// Whether the origin may, said in fields; `further` goes with a yes.
    fn push_origin(&self, request_fields: &[u8], further: &str, out: &mut Vec<u8>) -> bool {
        if self.origins.is_empty() {
            out.extend_from_slice(b"access-control-allow-origin: *\r\n");
            out.extend_from_slice(further.as_bytes());
            return true;
        }
        // A cache must not give one origin what another one got.
        push_field(out, "vary", b"origin");
        let asking = find(request_fields, "origin");
        let origin = asking.filter(|asking| {
            let mut all = self.origins.iter();
            all.any(|origin| origin.as_bytes().eq_ignore_ascii_case(asking))
        });
        let Some(origin) = origin else {
            return false;
        };
        push_field(out, "access-control-allow-origin", origin);
        out.extend_from_slice(further.as_bytes());
        true
    }
}

/// Whether a worker's field is one that ours take the place of.
pub(super) fn is_ours(name: &str) -> bool {
    name.get(..15)
        .is_some_and(|start| is(start, "access-control-"))
}

/// `scheme://host[:port]`, as browsers send it: no path, no user, nothing behind.
fn origin(text: &str) -> Result<Box<str>, String> {
    if text == "*" {
        return Err("'*' stands for any origin, alone".to_owned());
    }
    let refuse =
        || format!("'{text}' is no origin: scheme://host[:port], without a path, or '*' alone");
    let (scheme, rest) = text.split_once("://").ok_or_else(refuse)?;
    let mut scheme_bytes = scheme.bytes();
    let is_scheme = scheme_bytes.next().is_some_and(|b| b.is_ascii_alphabetic())
        && scheme_bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'));
    let is_host =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':' | b'[' | b']');
    if !is_scheme || rest.is_empty() || !rest.bytes().all(is_host) {
        return Err(refuse());
    }
    Ok(text.to_ascii_lowercase().into())
}

/// The value of the first field of a name (lower case).
fn find<'f>(fields: &'f [u8], lower: &str) -> Option<&'f [u8]> {
    fields.split(|b| *b == b'\n').find_map(|line| {
        let at = memchr::memchr(b':', line)?;
        let (name, value) = line.split_at(at);
        let is_it = name.eq_ignore_ascii_case(lower.as_bytes());
        is_it.then(|| value[1..].trim_ascii())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cors(words: &[&str]) -> Cors {
        Cors::parse(words.iter().copied())
            .unwrap()
            .expect("there are origins")
    }

    fn text(fields: Vec<u8>) -> String {
        String::from_utf8(fields).unwrap()
    }

    const PREFLIGHT: &[u8] =
        b"origin: https://App.example\r\nAccess-Control-Request-Method: POST\r\n\
        access-control-request-headers: authorization,x-stainless-lang\r\n";

    #[test]
    fn a_listed_origin_is_named_back_and_another_one_is_not() {
        let cors = cors(&["https://app.example", "http://localhost:3000"]);
        assert_eq!(
            text(cors.of_answer(b"a: b\r\nOrigin: http://localhost:3000\r\n")),
            "vary: origin\r\naccess-control-allow-origin: http://localhost:3000\r\n\
             access-control-expose-headers: x-request-id, retry-after\r\n"
        );
        for other in [
            "origin: http://localhost:3001\r\n",
            "origin: https://localhost:3000\r\n",
            "origin: null\r\n",
            "origin: https://app.example.evil\r\n",
            "x-origin: https://app.example\r\n",
            "",
        ] {
            assert_eq!(
                text(cors.of_answer(other.as_bytes())),
                "vary: origin\r\n",
                "{other}"
            );
        }
    }

    #[test]
    fn a_preflight_is_told_what_it_may_and_a_strangers_is_told_nothing() {
        let told = text(
            cors(&["https://app.example"])
                .of_preflight(PREFLIGHT)
                .unwrap(),
        );
        for line in [
            "access-control-allow-origin: https://App.example\r\n",
            "access-control-allow-methods: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n",
            "access-control-allow-headers: authorization,x-stainless-lang\r\n",
            "access-control-max-age: 3600\r\n",
            "vary: origin\r\n",
        ] {
            assert!(told.contains(line), "{told}");
        }
        let told = text(
            cors(&["https://other.example"])
                .of_preflight(PREFLIGHT)
                .unwrap(),
        );
        assert!(!told.contains("access-control-allow"), "{told}");
        assert!(
            text(cors(&["*"]).of_preflight(PREFLIGHT).unwrap()).contains("allow-origin: *\r\n")
        );
        assert_eq!(
            cors(&["*"]).of_preflight(b"origin: https://a\r\n"),
            None,
            "a plain OPTIONS"
        );
        assert_eq!(
            cors(&["*"]).of_preflight(b"access-control-request-method: POST\r\n"),
            None
        );
    }

    #[test]
    fn what_is_no_origin_is_refused_with_its_text() {
        assert_eq!(Cors::parse([].into_iter()), Ok(None));
        for bad in [
            "example.com",
            "https://",
            "https://a/",
            "https://a/b",
            "://a",
            "https://u@a",
            "1http://a",
            "null",
        ] {
            let why = Cors::parse([bad].into_iter()).unwrap_err();
            assert!(why.contains(bad), "{why}");
        }
        assert!(Cors::parse(["*", "https://a"].into_iter()).is_err());
        assert_eq!(cors(&["https://A:8"]).shown(), ["https://a:8"]);
        assert_eq!(cors(&["*"]).shown(), ["*"]);
    }
}
