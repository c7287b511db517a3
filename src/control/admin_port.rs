//! The admin paths on a listener of their own (`--admin-port`): the routes of [`super::admin`] behind a look at the key,
//! which on the data port is the cores' to take. And who may scrape.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use http::{HeaderMap, StatusCode, header};
use http_body_util::Limited;

use super::{Plane, admin, reply};
use crate::access::{Caller, Denied, Need, paths};
use crate::config::Config;

/// The routes, guarded.
pub(super) fn router(plane: Arc<Plane>) -> Router {
    admin::router(plane.clone()).layer(from_fn_with_state(plane, guard))
}

async fn guard(State(plane): State<Arc<Plane>>, request: Request, next: Next) -> Response {
    let config = plane.shared.config();
    let need = paths::of_ours(request.uri().path());
    let caller = caller(&config, request.headers());
    if let Err(denied) = config.access.permit(need, caller) {
        return reply::denied(denied);
    }
    // As a core limits it; axum's own limit would not follow the configuration.
    let limit = config.admin_body_bytes_max;
    if request.body().size_hint().lower() > limit as u64 {
        return reply::error(
            StatusCode::PAYLOAD_TOO_LARGE,
            "request_too_large",
            &format!("the body is larger than {limit} bytes"),
        );
    }
    let request = request.map(|body| Body::new(Limited::new(body, limit)));
    next.run(request).await
}

/// Whether metrics may be read: by the admin where there is one, unless they are open. A client's key does not do, and where
/// there are only those, nobody needs one: this listener is not the clients'.
///
/// # Errors
/// Why not.
pub(super) fn permit_scrape(config: &Config, headers: &HeaderMap) -> Result<(), Denied> {
    if config.is_metrics_open || config.access.admin.is_none() {
        return Ok(());
    }
    let caller = caller(config, headers);
    config.access.permit(Need::Admin, caller)
}

fn caller(config: &Config, headers: &HeaderMap) -> Option<Caller> {
    let value = |name: header::HeaderName| headers.get(name).map(|value| value.as_bytes());
    let authorization = value(header::AUTHORIZATION);
    let api_key = value(header::HeaderName::from_static("x-api-key"));
    config.access.judge(authorization, api_key).caller()
}
