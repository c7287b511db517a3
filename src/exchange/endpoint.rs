//! Which endpoint a request is for, and how its body is treated.

use crate::http::request::Method;
use crate::shared::Route;

/// How a request is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A known inference endpoint: body read whole, scanned, routed by key.
    Inference(Route),
    /// A known inference path with a method it does not have.
    WrongMethod,
    /// Ours: handed to the control plane.
    Admin,
    /// Anything else: passed through.
    Other,
}

fn path(target: &[u8]) -> &[u8] {
    match memchr::memchr(b'?', target) {
        Some(at) => &target[..at],
        None => target,
    }
}

/// Whether a request is about a response that some worker has made and kept: `/v1/responses/{id}`, and what is below it.
pub fn is_of_stored_response(target: &[u8]) -> bool {
    let id = path(target).strip_prefix(b"/v1/responses/");
    id.is_some_and(|id| !id.is_empty())
}

/// Finds the endpoint of a request.
pub fn endpoint(method: &Method, target: &[u8]) -> Endpoint {
    let path = path(target);
    let route = match path {
        b"/v1/chat/completions" => Route::ChatCompletions,
        b"/v1/completions" => Route::Completions,
        b"/v1/embeddings" => Route::Embeddings,
        b"/v1/responses" => Route::Responses,
        b"/v1/rerank" | b"/rerank" => Route::Rerank,
        b"/v1/messages" => Route::Messages,
        b"/generate" => Route::Generate,
        b"/inference/v1/generate" => Route::InferenceGenerate,
        b"/tokenize" => Route::Tokenize,
        b"/pooling" => Route::Pooling,
        b"/score" | b"/v1/score" => Route::Score,
        _ => {
            let is_admin = std::str::from_utf8(path).is_ok_and(super::paths::is_admin_path);
            return if is_admin {
                Endpoint::Admin
            } else {
                Endpoint::Other
            };
        }
    };
    if *method == Method::Post {
        Endpoint::Inference(route)
    } else {
        Endpoint::WrongMethod
    }
}
