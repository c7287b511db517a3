//! Model lists of workers (`GET /v1/models`, OpenAI's shape): kept as they came, merged for clients.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

/// One entry of a worker's list, with all its fields.
#[derive(Clone, Debug)]
pub struct Model {
    /// What requests name in `model`.
    pub id: Arc<str>,
    /// The entry's JSON, byte for byte.
    pub json: Arc<RawValue>,
}

#[derive(Deserialize)]
struct List {
    data: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Id {
    id: String,
}

/// Most entries kept of one worker's list.
const MODEL_COUNT_MAX: usize = 1024;

/// Reads a worker's answer. Entries without an id are left out; a body that is no list gives none.
pub fn parse(body: &[u8]) -> Vec<Model> {
    let Ok(list) = serde_json::from_slice::<List>(body) else {
        return Vec::new();
    };
    let mut models: Vec<Model> = Vec::new();
    for json in list.data.into_iter().take(MODEL_COUNT_MAX) {
        let Ok(Id { id }) = serde_json::from_str::<Id>(json.get()) else {
            continue;
        };
        if !models.iter().any(|model| *model.id == *id) {
            models.push(Model {
                id: id.into(),
                json: json.into(),
            });
        }
    }
    models
}

/// `{"object":"list","data":[...]}` over several workers' lists: one entry per id, as the first worker that has it
/// wrote it, in the order in which ids are met.
pub fn merge<'m>(lists: impl IntoIterator<Item = &'m [Model]>) -> String {
    let mut seen: ahash::AHashSet<&str> = ahash::AHashSet::new();
    let mut body = String::from(r#"{"object":"list","data":["#);
    for model in lists.into_iter().flatten() {
        if seen.insert(&model.id) {
            if seen.len() > 1 {
                body.push(',');
            }
            body.push_str(model.json.get());
        }
    }
    body.push_str("]}");
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_every_field_and_merge_in_stable_order() {
        let a = parse(br#"{"object":"list","data":[{"id":"m1","max_model_len":131072,"permission":[{"x":2.50}]}]}"#);
        let b = parse(
            br#"{"data":[{"id":"m2","n":12345678901234567890123},{"id":"m1","max_model_len":1}]}"#,
        );
        let merged = merge([&a[..], &b[..]]);
        assert_eq!(
            merged,
            r#"{"object":"list","data":[{"id":"m1","max_model_len":131072,"permission":[{"x":2.50}]},{"id":"m2","n":12345678901234567890123}]}"#
        );
        assert_eq!(merge([]), r#"{"object":"list","data":[]}"#);
    }

    #[test]
    fn junk_gives_no_models() {
        for junk in [
            "",
            "nope",
            "{}",
            "[]",
            r#"{"data":{}}"#,
            r#"{"data":[1,{"name":"x"},{"id":7}]}"#,
        ] {
            assert!(parse(junk.as_bytes()).is_empty(), "{junk}");
        }
    }
}
