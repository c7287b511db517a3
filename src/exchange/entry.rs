//! Who may come in, judged by the head alone, and what of a client's keys goes on to the worker.

use super::endpoint::Endpoint;
use crate::access::paths::{is_engine_admin, of_ours};
use crate::access::{Caller, Denied, Need, Presented};
use crate::config::Config;
use crate::http::request::{Credentials, Request};

/// What the parser does with a client's keys.
pub(super) fn credentials(config: &Config) -> Credentials {
    if !config.access.is_open() {
        Credentials::Take
    } else if config.is_api_key_first {
        Credentials::Replace
    } else {
        Credentials::Pass
    }
}

/// Whose the keys are that a request brought. `head`: what it was parsed from.
pub(super) fn presented(config: &Config, request: &Request, head: &[u8]) -> Presented {
    let value = |range: &Option<std::ops::Range<usize>>| {
        let range = range.clone()?;
        head.get(range)
    };
    let authorization = value(&request.authorization);
    config.access.judge(authorization, value(&request.api_key))
}

/// Whether a request may come in.
///
/// # Errors
/// Why not.
pub(super) fn permit(
    config: &Config,
    endpoint: Endpoint,
    target: &[u8],
    caller: Option<Caller>,
) -> Result<(), Denied> {
    let access = &config.access;
    if access.is_open() && !config.is_admin_apart {
        return Ok(());
    }
    let path = target.split(|b| *b == b'?').next().unwrap_or(target);
    let (need, is_here) = match endpoint {
        Endpoint::Admin => {
            let need = std::str::from_utf8(path).map_or(Need::Admin, of_ours);
            (need, need != Need::Admin || !config.is_admin_apart)
        }
        // Engines are ruled through this port only, there being no other way to them: by the admin, if there is one. A
        // port of their own for our admin paths alone says that clients shall not rule, but has no way to an engine.
        Endpoint::Other if access.admin.is_some() || config.is_admin_apart => {
            match std::str::from_utf8(path).is_ok_and(|path| !is_engine_admin(path)) {
                true => (Need::Client, true),
                false => (Need::Admin, access.admin.is_some()),
            }
        }
        Endpoint::Inference(_) | Endpoint::WrongMethod | Endpoint::Other => (Need::Client, true),
    };
    if is_here {
        return access.permit(need, caller);
    }
    // Strangers do not learn what is here.
    access.permit(Need::Client, caller)?;
    Err(Denied::NotHere)
}

/// Appends the key that the worker is to get, and what the parser held back although it is none of ours.
pub(super) fn push_credentials(
    config: &Config,
    request: &Request,
    head: &[u8],
    presented: Presented,
    out: &mut Vec<u8>,
) {
    // With clients' keys, whatever a client brings is meant for us. With the admin's alone, what is not that.
    let is_theirs = config.access.clients.is_none();
    let authorization = request
        .authorization
        .clone()
        .filter(|_| is_theirs && presented.authorization.is_none() && !config.is_api_key_first);
    let api_key = request.api_key.clone();
    let api_key = api_key.filter(|_| is_theirs && presented.api_key.is_none());
    let has_authorization = request.has_authorization || authorization.is_some();
    for (name, range) in [("authorization: ", authorization), ("x-api-key: ", api_key)] {
        if let Some(value) = range.and_then(|range| head.get(range)) {
            push_field(out, name, value);
        }
    }
    if let Some(key) = config.api_key.as_ref().filter(|_| !has_authorization) {
        push_field(out, "authorization: Bearer ", key.expose().as_bytes());
    }
}

fn push_field(out: &mut Vec<u8>, start: &str, value: &[u8]) {
    out.extend_from_slice(start.as_bytes());
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}
