//! The OpenAPI 3.1 description of all that is served, at `/openapi.json`: one table, made into a document once.
//!
//! What the control plane answers is described whole. Bodies of inference are the worker's business, and go through as they come;
//! they are described as far as the router reads them. A test compares the table with the routes of both planes.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

/// The document.
pub(super) static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_string());

/// What one method of one path does.
pub(super) struct Operation {
    /// In capitals.
    pub(super) method: &'static str,
    /// With `{}` round its parameters.
    pub(super) path: &'static str,
    id: &'static str,
    tag: Tag,
    summary: &'static str,
    /// Parameters of the query: name, whether it must be there, what it is.
    query: &'static [(&'static str, bool, &'static str)],
    /// Schema of the body, if it has one.
    body: Option<&'static str>,
    /// Status, schema of the answer ("": plain text), and when.
    answers: &'static [(u16, &'static str, &'static str)],
}

/// What an operation is for, and so who may ask for it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tag {
    /// Whoever asks.
    Health,
    /// Clients.
    Inference,
    /// Clients.
    Models,
    /// The admin.
    Admin,
}

impl Tag {
    fn name(self) -> &'static str {
        match self {
            Tag::Health => "health",
            Tag::Inference => "inference",
            Tag::Models => "models",
            Tag::Admin => "admin",
        }
    }
}

const NONE: &[(&str, bool, &str)] = &[];
const URL: (&str, bool, &str) = ("url", true, "the worker's URL, http://host:port");
const NEW_WORKER: &[(&str, bool, &str)] = &[
    URL,
    ("worker_type", false, "regular, prefill or decode"),
    (
        "bootstrap_port",
        false,
        "of a prefill worker: its Mooncake bootstrap port",
    ),
];
const NO_URL: (u16, &str, &str) = (
    400,
    "Error",
    "missing_url, invalid_worker_url, or another that names what is wrong",
);
const NOT_FOUND: (u16, &str, &str) = (404, "Error", "worker_not_found");
const ADDED_SLOWLY: (u16, &str, &str) = (
    504,
    "Error",
    "worker_not_ready: it was not ready in time, and was not added",
);
const NO_ROOM: (u16, &str, &str) = (503, "Error", "draining, too_many_workers");
const NO_WORKER: (u16, &str, &str) = (503, "Error", "no_available_workers");
const NOT_READY: (u16, &str, &str) = (503, "Error", "no_workers, workers_unhealthy");

const fn get(
    path: &'static str,
    id: &'static str,
    tag: Tag,
    summary: &'static str,
    answers: &'static [(u16, &'static str, &'static str)],
) -> Operation {
    Operation {
        method: "GET",
        path,
        id,
        tag,
        summary,
        query: NONE,
        body: None,
        answers,
    }
}

const fn admin_post(
    path: &'static str,
    id: &'static str,
    summary: &'static str,
    query: &'static [(&'static str, bool, &'static str)],
    body: Option<&'static str>,
    answers: &'static [(u16, &'static str, &'static str)],
) -> Operation {
    Operation {
        method: "POST",
        path,
        id,
        tag: Tag::Admin,
        summary,
        query,
        body,
        answers,
    }
}

const fn inference(path: &'static str, id: &'static str, summary: &'static str) -> Operation {
    Operation {
        method: "POST",
        path,
        id,
        tag: Tag::Inference,
        summary,
        query: NONE,
        body: Some("InferenceRequest"),
        answers: &[
            (
                200,
                "Any",
                "the worker's answer, as it comes; an event stream where the request asked for one",
            ),
            (400, "Error", "bad_framing, invalid_json"),
            (404, "Error", "model_not_found: no worker serves it"),
            (
                408,
                "Error",
                "request_timeout: head or body did not come in time",
            ),
            (413, "Error", "request_too_large (--max-payload-size)"),
            (
                429,
                "Error",
                "too_many_requests, queue_bytes_full; with Retry-After",
            ),
            (502, "Error", "worker_failed, bad_answer"),
            (
                503,
                "Error",
                "no_available_workers, queue_timeout, body_memory_full; with Retry-After",
            ),
            (504, "Error", "worker_timeout"),
        ],
    }
}

/// All operations, by path.
#[rustfmt::skip]
pub(super) const OPERATIONS: [Operation; 36] = [
    get("/health", "health", Tag::Health, "Whether all workers are healthy", &[(200, "", "all are"), NOT_READY]),
    get("/health_generate", "healthGenerate", Tag::Health, "The same", &[(200, "", "all are"), NOT_READY]),
    get("/liveness", "liveness", Tag::Health, "Whether the router runs", &[(200, "", "it does")]),
    get("/readiness", "readiness", Tag::Health, "Whether requests can be served",
        &[(200, "Readiness", "they can"), (503, "Readiness", "they cannot, or the router drains")]),
    get("/openapi.json", "openapi", Tag::Models, "This document", &[(200, "Any", "OpenAPI 3.1")]),
    get("/v1/models", "listModels", Tag::Models, "The models of all workers, each once, with all fields",
        &[(200, "Models", "OpenAI's list"), NO_WORKER]),
    get("/get_model_info", "modelInfo", Tag::Models, "The first model", &[(200, "ModelInfo", "as SGLang tells it"), NO_WORKER]),
    get("/get_server_info", "serverInfo", Tag::Admin, "Version, workers, and the settings in force", &[(200, "ServerInfo", "")]),
    get("/list_workers", "listWorkers", Tag::Admin, "The workers' URLs", &[(200, "Urls", "data-parallel ranks as url@rank")]),
    get("/workers", "workers", Tag::Admin, "The workers, and the lives that are ending", &[(200, "Workers", "")]),
    admin_post("/workers", "createWorker", "Add a worker", NONE, Some("NewWorker"),
        &[(201, "WorkerAdded", "it is ready"), (202, "WorkerAdded", "it is not ready yet"), NO_URL,
          (409, "Error", "worker_removed: by somebody else meanwhile"), NO_ROOM, ADDED_SLOWLY]),
    get("/workers/{url}", "worker", Tag::Admin, "One worker; its URL percent-encoded", &[(200, "Worker", ""), NOT_FOUND]),
    Operation { method: "DELETE", path: "/workers/{url}", id: "deleteWorker", tag: Tag::Admin,
        summary: "Take a worker out; its running requests finish", query: NONE, body: None,
        answers: &[(200, "WorkerRemoved", ""), (400, "Error", "rank_not_removable"), NOT_FOUND] },
    admin_post("/add_worker", "addWorker", "Add a worker", NEW_WORKER, None,
        &[(200, "", "it is ready"), (202, "", "it is not ready yet"), NO_URL,
          (409, "Error", "worker_removed: by somebody else meanwhile"), NO_ROOM, ADDED_SLOWLY]),
    admin_post("/remove_worker", "removeWorker", "Take a worker out; its running requests finish", &[URL], None,
        &[(200, "", "it is out"), NO_URL, NOT_FOUND]),
    get("/get_loads", "loads", Tag::Admin, "What each worker is doing, from the books", &[(200, "Loads", "")]),
    admin_post("/flush_cache", "flushCache", "Forget all prefixes, here and in the workers", NONE, None, &[(200, "Flushed", "")]),
    admin_post("/finish_session", "finishSession", "End a session of sticky_least_loaded",
        &[("session_id", true, "the session; with an agent: session/agent")], None,
        &[(200, "SessionFinished", "whether or not there was one"), (400, "Error", "missing_session_id")]),
    get("/scheduling/diagnostics", "schedulingDiagnostics", Tag::Admin, "Of vllm-router's program scheduling, which is not here",
        &[(404, "NoScheduling", "always")]),
    Operation { method: "GET", path: "/debug/decisions", id: "decisions", tag: Tag::Admin,
        summary: "Why the workers of a request were chosen, while it is remembered (--debug-decisions-count)",
        query: &[("request_id", true, "as its answer said in x-request-id")], body: None,
        answers: &[(200, "Decisions", ""), (400, "Error", "missing_request_id"),
          (404, "Error", "request_not_found: not known, or not any more")] },
    admin_post("/reload", "reload", "Read the config file, keys and certificates again", NONE, None,
        &[(200, "Reloaded", "all of it holds"), (400, "Error", "nothing has changed; the message says file, line and key")]),
    inference("/v1/chat/completions", "chatCompletions", "Chat"),
    inference("/v1/completions", "completions", "Completion of a prompt"),
    inference("/v1/embeddings", "embeddings", "Embeddings"),
    inference("/v1/responses", "responses", "OpenAI's responses"),
    inference("/v1/rerank", "rerank", "Ranking of documents"),
    inference("/rerank", "rerankBare", "The same"),
    inference("/v1/messages", "messages", "Anthropic's messages"),
    inference("/generate", "generate", "SGLang's generation"),
    inference("/inference/v1/generate", "inferenceGenerate", "vLLM's generation from token ids"),
    inference("/tokenize", "tokenize", "Tokens of a prompt"),
    inference("/pooling", "pooling", "Pooling"),
    inference("/score", "score", "Scores of pairs"),
    inference("/v1/score", "scoreV1", "The same"),
    Operation { method: "GET", path: "/v1/responses/{id}", id: "response", tag: Tag::Inference,
        summary: "A response that some worker keeps: workers are asked one after the other while they answer 404", query: NONE, body: None,
        answers: &[(200, "Any", "the worker's answer"), (404, "Any", "that of the last worker"), (502, "Error", "worker_failed, bad_answer"), NO_WORKER] },
    Operation { method: "POST", path: "/v1/responses/{id}/cancel", id: "cancelResponse", tag: Tag::Inference,
        summary: "The same. Paths that are not listed here are passed through to one worker, with any method", query: NONE, body: None,
        answers: &[(200, "Any", "the worker's answer"), (502, "Error", "worker_failed, bad_answer"), NO_WORKER] },
];

fn document() -> Value {
    let mut paths = Map::new();
    for operation in &OPERATIONS {
        let path = paths.entry(operation.path).or_insert_with(|| json!({}));
        path[operation.method.to_lowercase()] = describe(operation);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Corelane",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "A router for LLM inference. Paths that are not listed are passed through to a worker.",
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": "inference", "description": "Answered by a worker"},
            {"name": "models", "description": "What is served"},
            {"name": "health", "description": "Never needs a key"},
            {"name": "admin", "description": "Needs the admin's key where there is one; on --admin-port where that is set"},
        ],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

fn describe(operation: &Operation) -> Value {
    let mut answers = Map::new();
    for (status, schema, when) in operation.answers {
        answers.insert(status.to_string(), answer(schema, when));
    }
    let mut described = json!({
        "operationId": operation.id,
        "tags": [operation.tag.name()],
        "summary": operation.summary,
        "responses": answers,
    });
    let mut parameters: Vec<Value> = operation.query.iter().map(|(name, is_required, what)| {
        json!({"name": name, "in": "query", "required": is_required, "description": what, "schema": {"type": "string"}})
    }).collect();
    let in_path = operation.path.split(['{', '}']).skip(1).step_by(2);
    parameters.extend(in_path.map(
        |name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}),
    ));
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    if let Some(schema) = operation.body {
        described["requestBody"] = json!({"required": true, "content": content(schema)});
    }
    if operation.tag != Tag::Health {
        described["responses"]["401"] = answer("Error", "invalid_api_key, where keys are set");
        described["responses"]["403"] = answer("Error", "admin_key_required");
        // An empty object: without a key it does, too, where none is set.
        described["security"] = json!([{}, {"bearer": []}, {"apiKey": []}]);
    }
    described
}

fn answer(schema: &str, when: &str) -> Value {
    let description = if when.is_empty() {
        "as described"
    } else {
        when
    };
    json!({"description": description, "content": content(schema)})
}

fn content(schema: &str) -> Value {
    match schema {
        "" => json!({"text/plain": {"schema": {"type": "string"}}}),
        "Any" => json!({"application/json": {"schema": {}}}),
        name => json!({"application/json": {"schema": reference(name)}}),
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// An object with these fields; those whose names end with `?` may be missing.
fn object(fields: &[(&str, Value)]) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for (name, schema) in fields {
        let bare = name.trim_end_matches('?');
        if bare == *name {
            required.push(bare);
        }
        properties.insert(bare.to_owned(), schema.clone());
    }
    json!({"type": "object", "properties": properties, "required": required})
}

fn list(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

fn schemas() -> Value {
    let text = || json!({"type": "string"});
    let count = || json!({"type": "integer", "minimum": 0});
    let flag = || json!({"type": "boolean"});
    let text_or_null = || json!({"type": ["string", "null"]});
    let any_object = || json!({"type": "object"});
    let role = || json!({"type": "string", "enum": ["regular", "prefill", "decode"]});
    let error = object(&[
        ("message", text()),
        ("type", text()),
        ("param", text_or_null()),
        ("code", text()),
    ]);
    let stats = object(&[
        ("prefill_count", count()),
        ("decode_count", count()),
        ("regular_count", count()),
    ]);
    let ending = object(&[("url", text()), ("worker_type", role()), ("load", count())]);
    let load = object(&[
        ("worker", text()),
        ("worker_type", role()),
        ("load", count()),
        ("waiting", count()),
        ("active", count()),
        ("waiting_bytes", count()),
        ("active_bytes", count()),
    ]);
    let number = || json!({"type": "number"});
    let held = object(&[
        ("worker", count()),
        ("worker_url?", text()),
        ("load", count()),
        ("matched_bytes", count()),
    ]);
    let decision = object(&[
        ("role", role()),
        ("policy", text()),
        ("reason", text()),
        ("attempt", count()),
        ("worker", count()),
        ("worker_url?", text()),
        ("load", count()),
        ("least_load?", count()),
        ("candidates", count()),
        ("prompt_bytes", count()),
        ("matched_bytes", count()),
        ("wanted?", held.clone()),
        ("longest_matches?", list(held)),
        ("at_seconds", number()),
        ("result", text_or_null()),
    ]);
    let exchange = object(&[
        ("core", count()),
        ("route", text()),
        ("outcome", text_or_null()),
        ("decisions", list(decision)),
        ("status?", count()),
        ("retries?", count()),
        ("wait_ms?", number()),
        ("first_byte_ms?", number()),
        ("duration_ms?", number()),
        ("request_bytes?", count()),
        ("answer_bytes?", count()),
    ]);
    let worker = object(&[
        ("url", text()),
        ("model_id", text()),
        ("models", list(text())),
        ("worker_type", role()),
        ("is_healthy", flag()),
        ("sources", list(text())),
        ("state", text()),
        ("load", count()),
        ("connection_mode", text()),
        ("priority", count()),
        ("cost", json!({"type": "number"})),
        ("bootstrap_port?", count()),
        ("dp_rank?", count()),
        ("dp_size?", count()),
        ("reason?", text()),
    ]);
    let mut new_worker = object(&[
        ("url", text()),
        ("worker_type?", role()),
        ("bootstrap_port?", json!({"type": ["integer", "string"]})),
    ]);
    new_worker["description"] = "other fields are ignored, and named in the answer".into();
    let mut inference = object(&[("model?", text()), ("stream?", flag())]);
    inference["description"] = "sent on byte for byte; the worker says what else is in it".into();
    json!({
        "Error": object(&[("error", error)]),
        "Readiness": object(&[
            ("status", json!({"type": "string", "enum": ["ready", "not_ready"]})), ("reason?", text()),
            ("healthy_workers", count()), ("total_workers", count()),
        ]),
        "Models": object(&[("object", text()), ("data", list(any_object()))]),
        "ModelInfo": object(&[
            ("model_path", text()), ("tokenizer_path", text()), ("served_model_name", text()),
            ("max_model_len", json!({"type": ["integer", "null"]})), ("is_generation", flag()),
        ]),
        "ServerInfo": object(&[
            ("name", text()), ("version", text()), ("kernel", text()), ("cores", count()), ("workers", any_object()),
            ("draining", flag()), ("settings", any_object()),
        ]),
        "Urls": object(&[("urls", list(text()))]),
        "Worker": worker,
        "Workers": object(&[
            ("workers", list(reference("Worker"))), ("total", count()), ("stats", stats), ("draining", list(ending)),
        ]),
        "NewWorker": new_worker,
        "WorkerAdded": object(&[
            ("status", json!({"type": "string", "enum": ["ready", "starting"]})), ("worker_id", text()),
            ("worker", json!({"anyOf": [reference("Worker"), {"type": "null"}]})), ("ignored_fields", list(text())),
        ]),
        "WorkerRemoved": object(&[("status", text()), ("url", text()), ("message", text())]),
        "Loads": object(&[
            ("workers", list(load)), ("loads?", any_object()), ("errors?", list(text())),
        ]),
        "Flushed": object(&[
            ("status", text()), ("message", text()), ("cores", count()), ("workers_asked", count()), ("workers_flushed", count()),
        ]),
        "SessionFinished": object(&[("status", text()), ("session_id", text()), ("released", flag())]),
        "Decisions": object(&[("request_id", text()), ("exchanges", list(exchange))]),
        "NoScheduling": object(&[("enabled", flag()), ("error", text())]),
        "Reloaded": object(&[
            ("status", text()), ("changed", list(text())), ("workers_added", list(text())), ("workers_removed", list(text())),
        ]),
        "InferenceRequest": inference,
    })
}

#[cfg(test)]
#[path = "openapi_tests.rs"]
mod tests;
