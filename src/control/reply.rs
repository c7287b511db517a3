//! Answers of the admin API: JSON, plain text, and errors in OpenAI's shape.

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::access::Denied;

/// A JSON answer.
pub fn json(status: StatusCode, value: &Value) -> Response {
    body(status, "application/json", value.to_string())
}

/// A JSON answer that is written already.
pub fn raw_json(status: StatusCode, text: String) -> Response {
    body(status, "application/json", text)
}

/// A text, as vllm-router answers in places.
pub fn text(status: StatusCode, text: impl Into<String>) -> Response {
    body(status, "text/plain; charset=utf-8", text.into())
}

/// An error in OpenAI's shape. 503 says when to come again.
pub fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        400..=499 => "invalid_request_error",
        503 => "service_unavailable_error",
        _ => "server_error",
    };
    json(
        status,
        &json!({"error": {"message": message, "type": kind, "param": null, "code": code}}),
    )
}

/// What those get who lack a key.
pub fn denied(denied: Denied) -> Response {
    let status = StatusCode::from_u16(denied.status()).unwrap_or(StatusCode::UNAUTHORIZED);
    let mut response = error(status, denied.code(), denied.message());
    if denied == Denied::NoKey {
        let challenge = HeaderValue::from_static("Bearer");
        let headers = response.headers_mut();
        headers.insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

fn body(status: StatusCode, content_type: &'static str, text: String) -> Response {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}
