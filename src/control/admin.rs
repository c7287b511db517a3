//! The admin API: vllm-router's endpoints and ours, one axum router. Requests come whole from the cores, one task each,
//! so that one that waits (`/add_worker`) holds up nobody; answers go to the inbox of the core that asked.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use shards::Slot;
use tokio::task::JoinSet;
use tower::ServiceExt;

use super::probe::Target;
use super::registry::{AddError, Entry, Finder, Key, Rank, Registry};
use super::{Plane, models, openapi, probe, reload as reloading, reply};
use crate::config::{WorkerSpec, WorkerUrl};
use crate::decisions::{Remembered, decided_json, ended_json, request_hash};
use crate::route::{KeySeed, Role, session_hash_of};
use crate::shared::{AdminReply, AdminRequest, ToCore};

/// Longest time a request to add a worker is held. The worker goes on being probed behind it, up to
/// `--worker-startup-timeout-secs`: vllm-router's up to ten minutes of silence look like a hang to callers.
const ADD_WAIT_MAX: Duration = Duration::from_secs(5);

/// Longest time a core is waited for that is asked what it remembers.
const RECALL_WAIT_MAX: Duration = Duration::from_secs(1);

type Plain = State<Arc<Plane>>;

/// Answers requests that cores hand over.
pub(super) struct Admin {
    plane: Arc<Plane>,
    router: Router,
}

impl Admin {
    /// Builds the routes once.
    pub(super) fn new(plane: Arc<Plane>) -> Admin {
        let router = router(plane.clone());
        Admin { plane, router }
    }

    /// Answers in a task of its own.
    pub(super) fn answer(&self, request: AdminRequest) {
        let (core, token) = (request.core, request.token);
        let answer = tokio::spawn(dispatch(self.router.clone(), request));
        let shared = self.plane.shared.clone();
        tokio::spawn(async move {
            // A panic in a handler costs one 500, not a client that waits for ever.
            let reply = match answer.await {
                Ok(reply) => reply,
                Err(_) => {
                    whole(reply::error(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        "internal_error",
                        "internal error",
                    ))
                    .await
                }
            };
            if let Some(core) = shared.cores.get(core) {
                core.post(ToCore::Admin { token, reply });
            }
        });
    }
}

async fn dispatch(router: Router, request: AdminRequest) -> AdminReply {
    let mut builder = Request::builder()
        .method(request.method.as_str())
        .uri(request.target.as_str());
    for (name, value) in &request.headers {
        builder = builder.header(name.as_str(), value.as_slice());
    }
    let Ok(request) = builder.body(Body::from(request.body)) else {
        return whole(reply::error(
            StatusCode::BAD_REQUEST,
            "bad_request",
            "the request cannot be read",
        ))
        .await;
    };
    let response = match router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    whole(response).await
}

/// The answer as the core sends it, without framing. To HEAD axum gives no body.
async fn whole(response: Response) -> AdminReply {
    let (head, body) = response.into_parts();
    let body = body
        .collect()
        .await
        .map(|body| body.to_bytes().to_vec())
        .unwrap_or_default();
    let is_framing = |name: &header::HeaderName| {
        [
            header::CONTENT_LENGTH,
            header::TRANSFER_ENCODING,
            header::CONNECTION,
        ]
        .contains(name)
    };
    let headers = head
        .headers
        .iter()
        .filter(|(name, _)| !is_framing(name))
        .map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec()))
        .collect();
    AdminReply {
        status: head.status.as_u16(),
        headers,
        body,
    }
}

/// All routes. The paths are those of `exchange::paths::is_admin_path`, and described in [`openapi`]; tests compare.
#[rustfmt::skip]
pub(super) fn routes() -> Vec<(&'static str, MethodRouter<Arc<Plane>>)> {
    vec![
        ("/health", get(health)),
        ("/health_generate", get(health)),
        ("/liveness", get(liveness)),
        ("/readiness", get(readiness)),
        ("/v1/models", get(list_models)),
        ("/get_model_info", get(model_info)),
        ("/get_server_info", get(server_info)),
        ("/add_worker", post(add_worker)),
        ("/remove_worker", post(remove_worker)),
        ("/list_workers", get(list_workers)),
        ("/workers", get(workers).post(create_worker)),
        ("/workers/{url}", get(worker).delete(delete_worker)),
        ("/get_loads", get(loads)),
        ("/flush_cache", post(flush_cache)),
        ("/finish_session", post(finish_session)),
        ("/debug/decisions", get(decisions)),
        ("/reload", post(reload)),
        ("/scheduling/diagnostics", get(no_scheduling)),
        ("/openapi.json", get(describe_all)),
    ]
}

pub(super) fn router(plane: Arc<Plane>) -> Router {
    let routes = routes().into_iter();
    routes
        .fold(Router::new(), |router, (path, methods)| {
            router.route(path, methods)
        })
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::disable())
        .with_state(plane)
}

async fn describe_all() -> Response {
    reply::raw_json(StatusCode::OK, openapi::DOCUMENT.clone())
}

/// What vllm-router answers where its program scheduler is off; here there is none.
async fn no_scheduling() -> Response {
    let body = json!({"enabled": false, "error": "This Router does not own Program scheduling"});
    reply::json(StatusCode::NOT_FOUND, &body)
}

async fn unknown_path() -> Response {
    reply::error(StatusCode::NOT_FOUND, "not_found", "no such path")
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("method {method} is not allowed for {}", uri.path());
    reply::error(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        &message,
    )
}

async fn health(State(plane): Plain) -> Response {
    let registry = plane.registry();
    let (ready_count, total_count) = (registry.ready_count(), registry.worker_count());
    if total_count == 0 {
        return reply::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "no_workers",
            "no workers registered",
        );
    }
    let not_ready_count = total_count - ready_count;
    // A role without any worker leaves none that is not healthy.
    let missing = plane.shared.config().pd.as_ref().and(registry.obstacle());
    if not_ready_count > 0 || missing.is_some() {
        let message = match missing {
            Some(missing) => {
                format!("{missing}; {not_ready_count} of {total_count} workers are not healthy")
            }
            None => format!("{not_ready_count} of {total_count} workers are not healthy"),
        };
        return reply::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "workers_unhealthy",
            &message,
        );
    }
    reply::text(StatusCode::OK, "All servers healthy")
}

async fn liveness() -> Response {
    reply::text(StatusCode::OK, "OK")
}

async fn readiness(State(plane): Plain) -> Response {
    let registry = plane.registry();
    let (ready_count, total_count) = (registry.ready_count(), registry.worker_count());
    let reason = if plane.shared.is_draining() {
        "draining"
    } else if let Some(obstacle) = registry.obstacle() {
        obstacle
    } else {
        let body = json!({"status": "ready", "healthy_workers": ready_count, "total_workers": total_count});
        return reply::json(StatusCode::OK, &body);
    };
    let body = json!({
        "status": "not_ready", "reason": reason, "healthy_workers": ready_count, "total_workers": total_count,
    });
    reply::json(StatusCode::SERVICE_UNAVAILABLE, &body)
}

async fn list_models(State(plane): Plain) -> Response {
    let registry = plane.registry();
    if registry.ready_count() == 0 {
        return reply::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "no_available_workers",
            "no worker is available",
        );
    }
    let lists = registry
        .entries()
        .iter()
        .filter(|entry| entry.is_ready())
        .map(|entry| &entry.models[..]);
    reply::raw_json(StatusCode::OK, models::merge(lists))
}

async fn model_info(State(plane): Plain) -> Response {
    let registry = plane.registry();
    let mut models = registry
        .entries()
        .iter()
        .filter(|entry| entry.is_ready())
        .flat_map(|entry| &entry.models);
    let Some(model) = models.next() else {
        let message = "no worker is available that tells its model";
        return reply::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "no_available_workers",
            message,
        );
    };
    let fields: Map<String, Value> = serde_json::from_str(model.json.get()).unwrap_or_default();
    let path = fields
        .get("root")
        .and_then(Value::as_str)
        .unwrap_or(&model.id);
    let body = json!({
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": &*model.id,
        "max_model_len": fields.get("max_model_len").unwrap_or(&Value::Null),
        "is_generation": true,
    });
    reply::json(StatusCode::OK, &body)
}

async fn server_info(State(plane): Plain) -> Response {
    let config = plane.shared.config();
    let registry = plane.registry();
    let mut workers = json!({"total": registry.worker_count(), "ready": registry.ready_count()});
    if config.pd.is_some() {
        for role in config.needed_roles() {
            let of_role = || {
                let all = registry.workers();
                all.filter(|(entry, _)| entry.role == *role)
            };
            workers[role.label()] = json!({
                "total": of_role().count(),
                "ready": of_role().filter(|(entry, _)| entry.is_ready()).count(),
            });
        }
    }
    let body = json!({
        "name": "corelane",
        "version": env!("CARGO_PKG_VERSION"),
        "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
        "cores": plane.shared.cores.len(),
        "workers": workers,
        "draining": plane.shared.is_draining(),
        "settings": config.public_json(),
    });
    reply::json(StatusCode::OK, &body)
}

#[derive(Deserialize)]
struct DecisionsQuery {
    request_id: Option<String>,
}

/// What the cores remember of a request: each exchange that had this id, with its decisions and what came of them.
async fn decisions(State(plane): Plain, query: QueryOf<DecisionsQuery>) -> Response {
    let id = query.ok().and_then(|Query(query)| query.request_id);
    let Some(id) = id.filter(|id| !id.is_empty()) else {
        let message = "the query parameter request_id is missing";
        return reply::error(StatusCode::BAD_REQUEST, "missing_request_id", message);
    };
    let (answer, mut answers) = tokio::sync::mpsc::unbounded_channel();
    let request = request_hash(id.as_bytes());
    for core in &plane.shared.cores {
        let answer = answer.clone();
        core.post(ToCore::Recall { request, answer });
    }
    drop(answer);
    let mut exchanges = Vec::new();
    // A core that has ended, or is busy for so long, says nothing.
    while let Ok(Some(known)) = tokio::time::timeout(RECALL_WAIT_MAX, answers.recv()).await {
        exchanges.extend(exchanges_of(&plane.registry(), &known));
    }
    if exchanges.is_empty() {
        let message = "no core remembers a decision for this request id";
        return reply::error(StatusCode::NOT_FOUND, "request_not_found", message);
    }
    let body = json!({"request_id": id, "exchanges": exchanges});
    reply::json(StatusCode::OK, &body)
}

/// One core's decisions, by exchange.
fn exchanges_of(registry: &Registry, known: &[Remembered]) -> Vec<Value> {
    let url = |slot: Slot, incarnation: Option<u32>| {
        let is_it = |rank: &Rank| {
            rank.id.slot == slot && incarnation.is_none_or(|life| life == rank.id.incarnation)
        };
        let found = registry.workers().find(|(_, rank)| is_it(rank));
        found.map(|(_, rank)| rank.label.to_string())
    };
    let mut exchanges: Vec<(u64, Value)> = Vec::new();
    for remembered in known {
        let decided = &remembered.decided;
        let number = decided.exchange;
        let place = match exchanges.iter().position(|(known, _)| *known == number) {
            Some(place) => place,
            None => {
                let exchange = json!({
                    "core": decided.core(),
                    "route": decided.route.label(),
                    "outcome": null,
                    "decisions": [],
                });
                exchanges.push((number, exchange));
                exchanges.len() - 1
            }
        };
        let exchange = &mut exchanges[place].1;
        let mut told = decided_json(decided, url);
        told["at_seconds"] = (decided.at_us as f64 / 1e6).into();
        told["result"] = remembered.result.into();
        if let Some(decisions) = exchange["decisions"].as_array_mut() {
            decisions.push(told);
        }
        if let (Some(ended), Some(fields)) = (&remembered.ended, exchange.as_object_mut())
            && let Value::Object(end) = ended_json(ended)
        {
            fields.extend(end);
        }
    }
    exchanges
        .into_iter()
        .map(|(_, exchange)| exchange)
        .collect()
}

/// `bootstrap_port` is read as text, so that a wrong one is told by name.
#[derive(Deserialize)]
struct UrlQuery {
    url: Option<String>,
    worker_type: Option<String>,
    bootstrap_port: Option<String>,
}

fn url_of(
    query: &Result<Query<UrlQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<WorkerUrl, Box<Response>> {
    match query {
        Ok(Query(UrlQuery { url: Some(url), .. })) => parse_url(url),
        _ => Err(Box::new(reply::error(
            StatusCode::BAD_REQUEST,
            "missing_url",
            "the query parameter url is missing",
        ))),
    }
}

fn parse_url(text: &str) -> Result<WorkerUrl, Box<Response>> {
    WorkerUrl::parse(text).map_err(|error| {
        Box::new(reply::error(
            StatusCode::BAD_REQUEST,
            "invalid_worker_url",
            &error.to_string(),
        ))
    })
}

/// What is to be added. Roles must fit the fleet, and a bootstrap port a prefill worker.
fn worker_spec(
    plane: &Plane,
    url: WorkerUrl,
    worker_type: Option<&str>,
    bootstrap_port: Option<&str>,
) -> Result<WorkerSpec, Box<Response>> {
    let refuse = |code, message: &str| {
        let refusal = reply::error(StatusCode::BAD_REQUEST, code, message);
        Err(Box::new(refusal))
    };
    let role = match worker_type {
        None => Role::Regular,
        Some(text) => match Role::ALL.into_iter().find(|role| role.label() == text) {
            Some(role) => role,
            None => {
                let choices = plane.shared.config().needed_roles().iter();
                let choices: Vec<&str> = choices.map(|role| role.label()).collect();
                let message = format!(
                    "worker_type '{text}' is not supported; choices: {}",
                    choices.join(", ")
                );
                return refuse("unsupported_worker_type", &message);
            }
        },
    };
    if let Some(reason) = plane.misfit(role) {
        return refuse("unsupported_worker_type", &reason);
    }
    let bootstrap_port = match bootstrap_port {
        None => None,
        Some(_) if role != Role::Prefill => {
            return refuse(
                "unexpected_bootstrap_port",
                "bootstrap_port is for workers of worker_type 'prefill' only",
            );
        }
        Some(text) => match text.parse().ok().filter(|port| *port != 0) {
            Some(port) => Some(port),
            None => {
                let message = format!("bootstrap_port '{text}' is not a port");
                return refuse("invalid_bootstrap_port", &message);
            }
        },
    };
    Ok(WorkerSpec {
        url,
        role,
        bootstrap_port,
    })
}

type QueryOf<T> = Result<Query<T>, axum::extract::rejection::QueryRejection>;

async fn add_worker(State(plane): Plain, query: QueryOf<UrlQuery>) -> Response {
    let spec = url_of(&query).and_then(|url| {
        let said = query.as_ref().ok();
        worker_spec(
            &plane,
            url,
            said.and_then(|said| said.worker_type.as_deref()),
            said.and_then(|said| said.bootstrap_port.as_deref()),
        )
    });
    let spec = match spec {
        Ok(spec) => spec,
        Err(refusal) => return *refusal,
    };
    let url = spec.url.clone();
    match add_and_wait(&plane, spec).await {
        Ok(Added::Ready) => {
            reply::text(StatusCode::OK, format!("Successfully added worker: {url}"))
        }
        Ok(Added::Waiting(reason)) => {
            let limit_secs = plane.shared.config().worker_startup_timeout.as_secs();
            let text = format!(
                "Added worker: {url}; not ready yet ({reason}). It gets requests once it is, and is dropped if that \
                 takes more than {limit_secs} s"
            );
            reply::text(StatusCode::ACCEPTED, text)
        }
        Err(refusal) => *refusal,
    }
}

enum Added {
    Ready,
    Waiting(String),
}

async fn add_and_wait(plane: &Arc<Plane>, spec: WorkerSpec) -> Result<Added, Box<Response>> {
    let url = spec.url.clone();
    let refuse = |status, code, message: &str| Err(Box::new(reply::error(status, code, message)));
    if plane.shared.is_draining() {
        return refuse(
            StatusCode::SERVICE_UNAVAILABLE,
            "draining",
            "this router is draining",
        );
    }
    let mut changes = plane.changes.subscribe();
    let key = match plane.add(spec, Finder::Api) {
        Ok(key) => key,
        Err(AddError::Exists) => {
            return refuse(
                StatusCode::BAD_REQUEST,
                "worker_exists",
                &format!("Worker {url} already exists"),
            );
        }
        Err(AddError::Full) => {
            return refuse(
                StatusCode::SERVICE_UNAVAILABLE,
                "too_many_workers",
                "no room for another worker",
            );
        }
    };
    let limit = plane.shared.config().worker_startup_timeout;
    // Ready, or removed meanwhile; otherwise the time is over.
    let settled = changes.wait_for(|_| is_settled(plane, key));
    let is_over = tokio::time::timeout(limit.min(ADD_WAIT_MAX), settled)
        .await
        .is_err();
    let (is_ready, reason) = match plane.registry().entry(key) {
        None => {
            return refuse(
                StatusCode::CONFLICT,
                "worker_removed",
                &format!("Worker {url} was removed meanwhile"),
            );
        }
        Some(entry) => (entry.is_ready(), entry.reason()),
    };
    if is_ready {
        return Ok(Added::Ready);
    }
    let reason = reason.unwrap_or_default();
    if is_over && limit <= ADD_WAIT_MAX {
        plane.remove(key);
        let message =
            format!("Worker {url} did not become ready in time and was not added: {reason}");
        return refuse(StatusCode::GATEWAY_TIMEOUT, "worker_not_ready", &message);
    }
    Ok(Added::Waiting(reason))
}

fn is_settled(plane: &Plane, key: Key) -> bool {
    plane.registry().entry(key).is_none_or(Entry::is_ready)
}

async fn remove_worker(State(plane): Plain, query: QueryOf<UrlQuery>) -> Response {
    match url_of(&query).and_then(|url| remove(&plane, &url).map(|()| url)) {
        Ok(url) => reply::text(
            StatusCode::OK,
            format!("Successfully removed worker: {url}"),
        ),
        Err(refusal) => *refusal,
    }
}

fn remove(plane: &Plane, url: &WorkerUrl) -> Result<(), Box<Response>> {
    let key = plane.registry().find(url).map(|entry| entry.key);
    if key.is_some_and(|key| plane.remove(key)) {
        Ok(())
    } else {
        Err(Box::new(not_found(url.text())))
    }
}

fn not_found(url: &str) -> Response {
    reply::error(
        StatusCode::NOT_FOUND,
        "worker_not_found",
        &format!("Worker {url} not found"),
    )
}

async fn list_workers(State(plane): Plain) -> Response {
    let urls: Vec<String> = plane
        .registry()
        .workers()
        .map(|(_, rank)| rank.label.to_string())
        .collect();
    reply::json(StatusCode::OK, &json!({"urls": urls}))
}

async fn workers(State(plane): Plain) -> Response {
    let registry = plane.registry();
    let list: Vec<Value> = registry
        .workers()
        .map(|(entry, rank)| describe(&plane, &registry, entry, rank))
        .collect();
    let draining: Vec<Value> = registry
        .retiring()
        .iter()
        .map(|life| {
            let load = plane.shared.books.in_flight(life.id.slot);
            json!({"url": &*life.label, "worker_type": life.role.label(), "load": load})
        })
        .collect();
    let total_count = list.len();
    let count = |role| {
        registry
            .workers()
            .filter(|(entry, _)| entry.role == role)
            .count()
    };
    let body = json!({
        "workers": list,
        "total": total_count,
        "stats": {
            "prefill_count": count(Role::Prefill),
            "decode_count": count(Role::Decode),
            "regular_count": count(Role::Regular),
        },
        "draining": draining,
    });
    reply::json(StatusCode::OK, &body)
}

fn describe(plane: &Plane, registry: &Registry, entry: &Entry, rank: &Rank) -> Value {
    let ids: Vec<&str> = entry.models.iter().map(|model| &*model.id).collect();
    let mut fields = json!({
        "url": &*rank.label,
        "model_id": ids.first().unwrap_or(&"unknown"),
        "models": ids,
        "worker_type": entry.role.label(),
        "is_healthy": entry.is_ready(),
        "state": registry.state(entry, rank),
        "load": plane.shared.books.in_flight(rank.id.slot),
        "connection_mode": "http",
        "priority": 50,
        "cost": 1.0,
    });
    let sources = entry.finders.all().map(Finder::label);
    fields["sources"] = sources.collect::<Vec<_>>().into();
    if let Some(port) = entry.bootstrap_port {
        fields["bootstrap_port"] = port.into();
    }
    if let Some(number) = rank.number {
        fields["dp_rank"] = number.into();
        fields["dp_size"] = rank.kv.dp_size.into();
    }
    if let Some(reason) = entry.reason() {
        fields["reason"] = reason.into();
    }
    fields
}

async fn worker(State(plane): Plain, Path(text): Path<String>) -> Response {
    let registry = plane.registry();
    match registry.worker(&text) {
        Some((entry, rank)) => {
            reply::json(StatusCode::OK, &describe(&plane, &registry, entry, rank))
        }
        None => not_found(&text),
    }
}

async fn delete_worker(State(plane): Plain, Path(text): Path<String>) -> Response {
    let is_rank = plane
        .registry()
        .workers()
        .any(|(_, rank)| rank.number.is_some() && *rank.label == *text);
    if is_rank {
        return reply::error(
            StatusCode::BAD_REQUEST,
            "rank_not_removable",
            "the ranks of an engine are removed together: give its URL without @rank",
        );
    }
    let Ok(url) = WorkerUrl::parse(&text) else {
        return not_found(&text);
    };
    match remove(&plane, &url) {
        Ok(()) => {
            let message = format!("Worker {url} removed: running requests finish");
            reply::json(
                StatusCode::OK,
                &json!({"status": "removed", "url": &**url.text(), "message": message}),
            )
        }
        Err(refusal) => *refusal,
    }
}

async fn create_worker(State(plane): Plain, body: Bytes) -> Response {
    let Ok(fields) = serde_json::from_slice::<Map<String, Value>>(&body) else {
        return reply::error(
            StatusCode::BAD_REQUEST,
            "invalid_json",
            "the body must be a JSON object",
        );
    };
    let Some(text) = fields.get("url").and_then(Value::as_str) else {
        return reply::error(
            StatusCode::BAD_REQUEST,
            "missing_url",
            "the field url is missing or not a string",
        );
    };
    let said = |name| fields.get(name).filter(|value| !value.is_null());
    // A number is fine as text, too.
    let bootstrap_port = said("bootstrap_port").map(|port| match port {
        Value::String(text) => text.clone(),
        port => port.to_string(),
    });
    let worker_type = said("worker_type").map(|kind| match kind {
        Value::String(text) => text.clone(),
        kind => kind.to_string(),
    });
    let spec = parse_url(text).and_then(|url| {
        worker_spec(
            &plane,
            url,
            worker_type.as_deref(),
            bootstrap_port.as_deref(),
        )
    });
    let spec = match spec {
        Ok(spec) => spec,
        Err(refusal) => return *refusal,
    };
    let url = spec.url.clone();
    let (status, word) = match add_and_wait(&plane, spec).await {
        Ok(Added::Ready) => (StatusCode::CREATED, "ready"),
        Ok(Added::Waiting(_)) => (StatusCode::ACCEPTED, "starting"),
        Err(refusal) => return *refusal,
    };
    let ignored: Vec<&String> = fields
        .keys()
        .filter(|name| !matches!(name.as_str(), "url" | "worker_type" | "bootstrap_port"))
        .collect();
    let registry = plane.registry();
    let description = registry
        .worker(url.text())
        .map(|(entry, rank)| describe(&plane, &registry, entry, rank));
    let body = json!({"status": word, "worker_id": &**url.text(), "worker": description, "ignored_fields": ignored});
    let mut response = reply::json(status, &body);
    let location =
        percent_encoding::utf8_percent_encode(url.text(), percent_encoding::NON_ALPHANUMERIC);
    if let Ok(location) = format!("/workers/{location}").parse() {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

async fn loads(State(plane): Plain) -> Response {
    let registry = plane.registry();
    let list: Vec<Value> = registry
        .workers()
        .map(|(entry, rank)| {
            let load = plane.shared.books.load(rank.id.slot);
            json!({
                "worker": &*rank.label,
                "worker_type": entry.role.label(),
                "load": load.in_flight,
                "waiting": load.waiting,
                "active": load.active,
                "waiting_bytes": load.waiting_bytes,
                "active_bytes": load.active_bytes,
            })
        })
        .collect();
    let mut answer = json!({"workers": list});
    if plane.shared.config().pd.is_some() {
        // vllm-router's answer under P/D: by URL, and what could not be asked; nobody is asked here.
        let by_url = list.iter().filter_map(|worker| {
            let url = worker["worker"].as_str()?;
            Some((url.to_owned(), worker["load"].clone()))
        });
        answer["loads"] = Value::Object(by_url.collect());
        answer["errors"] = json!([]);
    }
    reply::json(StatusCode::OK, &answer)
}

#[derive(Deserialize)]
struct SessionQuery {
    session_id: Option<String>,
}

/// Ends a session of `sticky_least_loaded`, for every role and model. Like vllm-router's always 200; `released` is ours.
async fn finish_session(State(plane): Plain, query: QueryOf<SessionQuery>) -> Response {
    let Ok(Query(SessionQuery {
        session_id: Some(session),
    })) = query
    else {
        return reply::error(
            StatusCode::BAD_REQUEST,
            "missing_session_id",
            "the query parameter session_id is missing",
        );
    };
    let config = plane.shared.config();
    let hash = session_hash_of(KeySeed(config.prefix_hash_seed), &session);
    let mut is_released = false;
    if let Some(sessions) = plane.shared.sessions.get() {
        let bindings = plane.registry().session_bindings(hash);
        for binding in bindings {
            is_released |= sessions.end(binding);
        }
    }
    let body = json!({"status": "ok", "session_id": session, "released": is_released});
    reply::json(StatusCode::OK, &body)
}

/// Forgets all prefixes, and asks the workers to do the same: vLLM's `/reset_prefix_cache` (served only in its
/// development mode, so a refusal is normal).
async fn flush_cache(State(plane): Plain) -> Response {
    for core in &plane.shared.cores {
        core.post(ToCore::Flush);
    }
    let targets: Vec<Target> = {
        let registry = plane.registry();
        let ready = registry.entries().iter().filter(|entry| entry.is_ready());
        ready
            .map(|entry| Target {
                url: entry.url.clone(),
                address: entry.address,
            })
            .collect()
    };
    let asked_count = targets.len();
    let mut requests = JoinSet::new();
    for target in targets {
        let plane = plane.clone();
        requests.spawn(async move {
            let config = plane.shared.config();
            let timeout = config.health.timeout;
            probe::request(
                &config,
                &target,
                Method::POST,
                "/reset_prefix_cache",
                timeout,
            )
            .await
        });
    }
    let mut flushed_count = 0;
    while let Some(answer) = requests.join_next().await {
        flushed_count +=
            usize::from(matches!(answer, Ok(Ok(answer)) if (200..300).contains(&answer.status)));
    }
    let core_count = plane.shared.cores.len();
    let body = json!({
        "status": "ok",
        "message": format!(
            "Prefix tree flushed on {core_count} cores; {flushed_count} of {asked_count} workers reset their prefix cache"
        ),
        "cores": core_count,
        "workers_asked": asked_count,
        "workers_flushed": flushed_count,
    });
    reply::json(StatusCode::OK, &body)
}

/// Reads the config file again. Answered when the new configuration holds, or is refused.
async fn reload(State(plane): Plain) -> Response {
    match reloading::run(&plane).await {
        Ok(report) => {
            let body = json!({
                "status": "ok",
                "changed": report.changed,
                "workers_added": report.added,
                "workers_removed": report.removed,
            });
            reply::json(StatusCode::OK, &body)
        }
        Err(refusal) => reply::error(refusal.status, refusal.code, &refusal.message),
    }
}
