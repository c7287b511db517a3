//! The document beside what is served: the same paths and methods, and answers of the shapes it tells.

use std::collections::BTreeSet;

use super::super::admin;
use super::super::testing::FakeWorker;
use super::super::tests::rig;
use super::*;
use crate::exchange::endpoint::{Endpoint, endpoint};
use crate::http::request::Method;
use crate::shared::Route;

const MODEL: &str = r#"{"object":"list","data":[{"id":"m","root":"org/m","max_model_len":4096}]}"#;

#[test]
fn each_route_of_the_control_plane_is_described_with_its_methods_and_answers() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |_| {});
    rig.ready(1);
    let described = |path: &str, method: &str| {
        OPERATIONS
            .iter()
            .find(|o| o.path == path && o.method == method)
    };
    for (path, _) in admin::routes() {
        let mut count = 0;
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE"] {
            let (status, ..) = rig.ask(method, &path.replace("{url}", "x"), "");
            assert_eq!(
                status != 405,
                described(path, method).is_some(),
                "{method} {path}: {status}"
            );
            if let Some(operation) = described(path, method) {
                count += 1;
                assert!(
                    operation.answers.iter().any(|(told, ..)| *told == status),
                    "{method} {path}: {status}"
                );
            }
        }
        assert!(count > 0, "{path}");
    }
    let served: Vec<&str> = admin::routes().iter().map(|(path, _)| *path).collect();
    for operation in OPERATIONS.iter().filter(|o| o.tag != Tag::Inference) {
        assert!(
            served.contains(&operation.path),
            "{} is not served",
            operation.path
        );
    }
}

#[test]
fn each_inference_endpoint_is_described() {
    let told: BTreeSet<&str> = OPERATIONS
        .iter()
        .filter(|o| o.body == Some("InferenceRequest"))
        .map(|o| o.path)
        .collect();
    let is_served = |path: &str| {
        matches!(
            endpoint(&Method::Post, path.as_bytes()),
            Endpoint::Inference(_)
        )
    };
    for path in &told {
        assert!(is_served(path), "{path}");
    }
    for route in Route::ALL {
        let label = route.label();
        let bare = label.strip_prefix("/v1").unwrap_or(label);
        for path in [label.to_owned(), bare.to_owned(), format!("/v1{bare}")] {
            assert!(
                !is_served(&path) || told.contains(&*path),
                "{path} is not described"
            );
        }
    }
}

/// What of an answer is not as its schema says.
fn faults(schema: &Value, value: &Value, place: &str, out: &mut Vec<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let name = name.rsplit('/').next().unwrap();
        return faults(&schemas()[name], value, place, out);
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => return,
    };
    let is_kind = |kind: &&str| match *kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        kind => kind == "null" && value.is_null(),
    };
    if !kinds.iter().any(is_kind) {
        return out.push(format!("{place}: {value} is no {kinds:?}"));
    }
    for item in value.as_array().into_iter().flatten() {
        faults(&schema["items"], item, &format!("{place}[]"), out);
    }
    let (Some(fields), Some(told)) = (value.as_object(), schema["properties"].as_object()) else {
        return;
    };
    for name in schema["required"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        if !fields.contains_key(name) {
            out.push(format!("{place}.{name} is missing"));
        }
    }
    for (name, value) in fields {
        match told.get(name) {
            Some(schema) => faults(schema, value, &format!("{place}.{name}"), out),
            None => out.push(format!("{place}.{name} is not told")),
        }
    }
}

#[test]
fn answers_have_the_shapes_that_are_told() {
    let worker = FakeWorker::start(MODEL);
    let mut rig = rig(&[&worker], |_| {});
    rig.ready(1);
    let url = worker.url();
    let mut count = 0;
    for (method, path, target, body) in [
        ("GET", "/readiness", "/readiness", ""),
        ("GET", "/v1/models", "/v1/models", ""),
        ("GET", "/get_model_info", "/get_model_info", ""),
        ("GET", "/get_server_info", "/get_server_info", ""),
        ("GET", "/list_workers", "/list_workers", ""),
        ("GET", "/workers", "/workers", ""),
        (
            "GET",
            "/workers/{url}",
            &format!("/workers/{}", url.replace(':', "%3A").replace('/', "%2F")),
            "",
        ),
        ("GET", "/workers/{url}", "/workers/x", ""),
        ("POST", "/workers", "/workers", "{}"),
        ("GET", "/get_loads", "/get_loads", ""),
        ("POST", "/flush_cache", "/flush_cache", ""),
        (
            "POST",
            "/finish_session",
            "/finish_session?session_id=a",
            "",
        ),
        ("POST", "/finish_session", "/finish_session", ""),
        (
            "GET",
            "/scheduling/diagnostics",
            "/scheduling/diagnostics",
            "",
        ),
        ("POST", "/reload", "/reload", ""),
        ("DELETE", "/workers/{url}", "/workers/x", ""),
        (
            "DELETE",
            "/workers/{url}",
            &format!("/workers/{}", url.replace(':', "%3A").replace('/', "%2F")),
            "",
        ),
    ] {
        let (status, text, _) = rig.ask(method, target, body);
        let operation = OPERATIONS
            .iter()
            .find(|o| o.path == path && o.method == method)
            .expect("described");
        let answer = operation.answers.iter().find(|(told, ..)| *told == status);
        let (_, schema, _) =
            answer.unwrap_or_else(|| panic!("{method} {target}: {status} is not told"));
        let mut found = Vec::new();
        let json: Value = serde_json::from_str(&text)
            .unwrap_or_else(|e| panic!("{method} {target}: {e}: {text}"));
        faults(&reference(schema), &json, schema, &mut found);
        assert!(found.is_empty(), "{method} {target}: {found:#?}");
        count += 1;
    }
    assert_eq!(count, 17);
    let (status, text, _) = rig.ask("GET", "/openapi.json", "");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &document["openapi"]), (200, &json!("3.1.0")));
}

#[test]
fn references_lead_somewhere_and_ids_are_unique() {
    let text = DOCUMENT.clone();
    let document: Value = serde_json::from_str(&text).unwrap();
    for piece in text.split("\"#/components/schemas/").skip(1) {
        let name = piece.split('"').next().unwrap();
        assert!(!document["components"]["schemas"][name].is_null(), "{name}");
    }
    let ids: BTreeSet<&str> = OPERATIONS.iter().map(|operation| operation.id).collect();
    assert_eq!(ids.len(), OPERATIONS.len());
}
