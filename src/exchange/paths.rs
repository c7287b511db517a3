//! Which requests on a data port belong to the control plane. Pure; called by the cores for every request.
//!
//! Which of them need a key, and which are not served here where the admin has a port, `crate::access` and `super::entry`
//! say.

/// Longest of the fixed paths below.
const FIXED_LEN_MAX: usize = "/scheduling/diagnostics".len();
/// In front of a percent-encoded worker URL.
const WORKER_PREFIX: &str = "/workers/";

/// Whether the control plane answers `path` (a query may follow). Known paths are its own with any method: it answers
/// 405 to the wrong ones, as a worker has nothing to do with them.
pub fn is_admin_path(path: &str) -> bool {
    let path = match memchr::memchr(b'?', path.as_bytes()) {
        Some(end) => &path[..end],
        None => path,
    };
    if path.len() > FIXED_LEN_MAX {
        return path.starts_with(WORKER_PREFIX);
    }
    match path.as_bytes().get(1) {
        Some(b'v') => path == "/v1/models",
        Some(b'h') => matches!(path, "/health" | "/health_generate"),
        Some(b'r') => matches!(path, "/readiness" | "/remove_worker" | "/reload"),
        Some(b'l') => matches!(path, "/liveness" | "/list_workers"),
        Some(b'a') => path == "/add_worker",
        Some(b'w') => {
            path == "/workers"
                || (path.starts_with(WORKER_PREFIX) && path.len() > WORKER_PREFIX.len())
        }
        Some(b'g') => matches!(path, "/get_loads" | "/get_server_info" | "/get_model_info"),
        Some(b'o') => path == "/openapi.json",
        Some(b's') => path == "/scheduling/diagnostics",
        Some(b'd') => path == "/debug/decisions",
        Some(b'f') => matches!(path, "/flush_cache" | "/finish_session"),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admin_paths_are_told_from_the_rest() {
        let ours = [
            "/health",
            "/health_generate",
            "/liveness",
            "/readiness",
            "/v1/models",
            "/add_worker",
            "/remove_worker",
            "/reload",
            "/list_workers",
            "/workers",
            "/workers/http%3A%2F%2Fa%3A8000",
            "/workers/x",
            "/get_loads",
            "/flush_cache",
            "/finish_session?session_id=a",
            "/debug/decisions?request_id=a",
            "/get_server_info",
            "/get_model_info",
            "/openapi.json",
            "/scheduling/diagnostics",
            "/workers/http%3A%2F%2Fa%3A1",
            "/add_worker?url=http://a",
            "/health?",
        ];
        for path in ours {
            assert!(is_admin_path(path), "{path}");
        }
        let others = [
            "",
            "/",
            "*",
            "/v1/chat/completions",
            "/v1/models/x",
            "/v1/model",
            "/healthz",
            "/health/",
            "/metrics",
            "/workers/",
            "/workersx",
            "/openapi.jsonx",
            "/openapi",
            "/scheduling",
            "/scheduling/diagnostics/x",
            "/load",
            "/reload_weights",
            "/debug",
            "/debug/decision",
            "/tokenize",
            "/v1/completions?x=/health",
            "//health",
            "/HEALTH",
            "/?",
        ];
        for path in others {
            assert!(!is_admin_path(path), "{path}");
        }
    }
}
