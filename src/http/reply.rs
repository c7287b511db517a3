//! Answers of our own: refusals in OpenAI's shape, and the framing of any answer that we make ourselves.

/// A request that is answered by us with an error. Never shows a worker's URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// What is wrong, for a person.
    pub message: String,
    /// OpenAI's `code`, for programs.
    pub code: &'static str,
    /// A value for `Allow`, with 405.
    pub allow: Option<&'static str>,
    /// For `Retry-After`, with 429 and 503.
    pub retry_after_secs: u32,
}

impl Refusal {
    /// A refusal with a status, a code and a message.
    pub fn new(status: u16, code: &'static str, message: impl Into<String>) -> Refusal {
        Refusal {
            status,
            message: message.into(),
            code,
            allow: None,
            retry_after_secs: 1,
        }
    }

    /// A framing error: 400.
    pub fn framing(message: &'static str) -> Refusal {
        Refusal::new(400, "bad_framing", message)
    }

    /// OpenAI's `type` for the status.
    fn kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable",
            502 | 504 => "upstream_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The JSON body.
    pub fn body(&self) -> Vec<u8> {
        let error = serde_json::json!({
            "error": {"message": self.message, "type": self.kind(), "param": null, "code": self.code}
        });
        error.to_string().into_bytes()
    }

    /// The whole answer, framed; `cors`: see [`write()`].
    pub fn write(&self, cors: &[u8], keep_alive: bool, without_body: bool) -> Vec<u8> {
        let body = self.body();
        let mut headers = vec![("content-type".to_string(), b"application/json".to_vec())];
        if let Some(allow) = self.allow {
            headers.push(("allow".to_string(), allow.as_bytes().to_vec()));
        }
        if self.status == 401 {
            headers.push(("www-authenticate".to_string(), b"Bearer".to_vec()));
        }
        if matches!(self.status, 429 | 503) {
            let secs = self.retry_after_secs.to_string();
            headers.push(("retry-after".to_string(), secs.into_bytes()));
        }
        write(self.status, &headers, cors, &body, keep_alive, without_body)
    }
}

/// Writes an answer with a length. `cors`: further fields, each `name: value CRLF` ([`super::Cors`]). `without_body`: the answer
/// to HEAD, which has the length but not the bytes.
pub fn write(
    status: u16,
    headers: &[(String, Vec<u8>)],
    cors: &[u8],
    body: &[u8],
    keep_alive: bool,
    without_body: bool,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(256 + body.len());
    out.extend_from_slice(b"HTTP/1.1 ");
    push_number(&mut out, u64::from(status));
    out.push(b' ');
    out.extend_from_slice(reason(status).as_bytes());
    out.extend_from_slice(b"\r\n");
    for (name, value) in headers {
        push_field(&mut out, name, value);
    }
    out.extend_from_slice(cors);
    if status != 204 && status != 304 {
        out.extend_from_slice(b"content-length: ");
        push_number(&mut out, body.len() as u64);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(if keep_alive {
        b"\r\n"
    } else {
        b"connection: close\r\n\r\n"
    });
    if !without_body && status != 204 && status != 304 {
        out.extend_from_slice(body);
    }
    out
}

/// Writes a field's line.
pub(super) fn push_field(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Writes a number in decimal digits.
pub fn push_number(out: &mut Vec<u8>, mut n: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status)
        .ok()
        .and_then(|s| s.canonical_reason())
        .unwrap_or("Status")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_openais_shape_and_one_length() {
        let text =
            Refusal::new(404, "model_not_found", "no \"such\" model").write(b"", true, false);
        let text = String::from_utf8(text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 404 Not Found\r\n"));
        assert!(head.contains(&format!("content-length: {}", body.len())));
        let json: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(json["error"]["message"], "no \"such\" model");
        assert_eq!(json["error"]["type"], "not_found_error");
        assert_eq!(json["error"]["code"], "model_not_found");
    }

    #[test]
    fn numbers_are_written_in_full() {
        for n in [0, 9, 10, 65_535, u64::MAX] {
            let mut out = Vec::new();
            push_number(&mut out, n);
            assert_eq!(out, n.to_string().into_bytes());
        }
    }
}
