//! A chat request as the text that the engine tokenises: the model's chat template over the request's messages, as vLLM does it
//! (`vllm/entrypoints/chat_utils.py`, transformers' `apply_chat_template`). What cannot be rendered as vLLM would is not
//! rendered at all. Off the cores.

use std::fmt::Write as _;
use std::path::Path;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::{ContentFormat, Unfit};

impl ContentFormat {
    /// As vLLM finds it: a template that goes over a message's content wants parts.
    fn of(template: &str) -> ContentFormat {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut contents: Vec<String> = vec![".content".into(), "['content']".into()];
        contents.push("[\"content\"]".into());
        let ends = |text: &str, contents: &[String]| {
            let text = text.split('|').next().unwrap_or_default().trim();
            let text = text.split(" if ").next().unwrap_or_default().trim();
            contents
                .iter()
                .any(|name| match name.starts_with(['.', '[']) {
                    true => text.ends_with(name.as_str()),
                    false => text == name,
                })
        };
        let tags = || {
            template
                .split("{%")
                .skip(1)
                .filter_map(|t| t.split("%}").next())
        };
        for tag in tags() {
            let tag = words(tag.trim_matches(['-', '+', ' ', '\n', '\t']));
            if let Some((name, value)) = tag.strip_prefix("set ").and_then(|t| t.split_once('='))
                && ends(value, &contents)
            {
                contents.push(name.trim().to_string());
            }
            if let Some((_, list)) = tag.strip_prefix("for ").and_then(|t| t.split_once(" in "))
                && ends(list, &contents)
            {
                return ContentFormat::OpenAi;
            }
        }
        ContentFormat::String
    }
}

/// A model's chat template.
pub struct Template {
    environment: Environment<'static>,
    format: ContentFormat,
    /// The tokens that templates know by name.
    specials: Vec<(String, Value)>,
}

const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

#[derive(Deserialize)]
struct Body {
    messages: Vec<Map<String, Json>>,
    tools: Option<Vec<Json>>,
    documents: Option<Json>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template: Option<Json>,
    chat_template_kwargs: Option<Map<String, Json>>,
    reasoning_effort: Option<Json>,
    truncate_prompt_tokens: Option<Json>,
    mm_processor_kwargs: Option<Json>,
}

impl Template {
    /// Of a model's folder: `chat_template.jinja`, else the one in `tokenizer_config.json`, which also names special tokens.
    /// `given`: a file to be used instead. `None`: the model has no template.
    ///
    /// # Errors
    /// A file that is there cannot be read, or is no template.
    pub fn open(
        folder: Option<&Path>,
        given: Option<&Path>,
        format: Option<ContentFormat>,
    ) -> Result<Option<Template>, String> {
        let read = |path: &Path| match std::fs::read_to_string(path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(format!("{}: {e}", path.display())),
        };
        let config = match folder {
            Some(folder) => read(&folder.join("tokenizer_config.json"))?,
            None => None,
        };
        let config = config.map(|text| serde_json::from_str::<Json>(&text));
        let config = config
            .transpose()
            .map_err(|e| format!("tokenizer_config.json: {e}"))?;
        let mut sources: Vec<(String, String)> = Vec::new();
        if let Some(given) = given {
            let text = read(given)?.ok_or_else(|| format!("{}: no such file", given.display()))?;
            sources.push((DEFAULT.into(), text));
        } else if let Some(folder) = folder
            && let Some(text) = read(&folder.join("chat_template.jinja"))?
        {
            sources.push((DEFAULT.into(), text));
        } else if let Some(config) = &config {
            sources = sources_of(&config["chat_template"]);
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let specials = config.as_ref().map(specials_of).unwrap_or_default();
        Template::new(sources, specials, format).map(Some)
    }

    /// Of templates by name, and the tokens they know by name.
    ///
    /// # Errors
    /// One is no template.
    pub fn new(
        sources: Vec<(String, String)>,
        specials: Vec<(String, Value)>,
        format: Option<ContentFormat>,
    ) -> Result<Template, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(write_as_python);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        let main = sources.iter().find(|(name, _)| name == DEFAULT);
        let main = main.or(sources.first()).map_or("", |(_, text)| text);
        let format = format.unwrap_or_else(|| ContentFormat::of(main));
        for (name, text) in sources {
            environment
                .add_template_owned(name.clone(), without_marks(&text))
                .map_err(|e| format!("chat template {name}: {e}"))?;
        }
        Ok(Template {
            environment,
            format,
            specials,
        })
    }

    /// The text of a request, and whether the engine puts special tokens round it.
    ///
    /// # Errors
    /// It cannot be rendered as the engine would.
    pub fn render(&self, body: &[u8]) -> Result<(String, bool), Unfit> {
        let body: Body = serde_json::from_slice(body).map_err(|_| Unfit::Request)?;
        let is_plain = body.continue_final_message != Some(true)
            && body.chat_template.is_none()
            && body.truncate_prompt_tokens.is_none()
            && body.mm_processor_kwargs.is_none();
        if !is_plain {
            return Err(Unfit::Request);
        }
        let mut messages = Vec::with_capacity(body.messages.len());
        for message in body.messages {
            messages.push(Value::from_serialize(self.message(message)?));
        }
        let tools: Option<Vec<Value>> = body.tools.map(|tools| {
            let tools = tools.into_iter().map(tool);
            tools.map(Value::from_serialize).collect()
        });
        let mut context: Vec<(String, Value)> = self.specials.clone();
        let mut set = |name: &str, value: Value| context.push((name.to_string(), value));
        set("messages", messages.into());
        set(
            "documents",
            body.documents
                .map_or(Value::from(()), Value::from_serialize),
        );
        set(
            "add_generation_prompt",
            body.add_generation_prompt.unwrap_or(true).into(),
        );
        if let Some(effort) = body.reasoning_effort.filter(|effort| !effort.is_null()) {
            set("reasoning_effort", Value::from_serialize(effort));
        }
        let has_tools = tools.as_ref().is_some_and(|tools| !tools.is_empty());
        set("tools", tools.map_or(Value::from(()), Value::from));
        for (name, value) in body.chat_template_kwargs.unwrap_or_default() {
            set(&name, Value::from_serialize(value));
        }
        let named = |name| self.environment.get_template(name).ok();
        let template = match has_tools {
            true => named(WITH_TOOLS).or_else(|| named(DEFAULT)),
            false => named(DEFAULT),
        };
        let template = template.ok_or(Unfit::Template)?;
        let context: Value = context.into_iter().collect();
        let text = template.render(context).map_err(|_| Unfit::Template)?;
        Ok((text, body.add_special_tokens.unwrap_or(false)))
    }

    /// What vLLM gives the template of a message.
    fn message(&self, mut message: Map<String, Json>) -> Result<Map<String, Json>, Unfit> {
        let role = match message.remove("role") {
            Some(Json::String(role)) => role,
            _ => return Err(Unfit::Request),
        };
        let mut shown = Map::new();
        shown.insert("role".into(), role.as_str().into());
        shown.insert("content".into(), self.content(message.remove("content"))?);
        let mut take = |name: &str| message.remove(name).filter(|value| !value.is_null());
        if role == "assistant" {
            if let Some(calls) = take("tool_calls") {
                shown.insert("tool_calls".into(), tool_calls(calls)?);
            }
            let reasoning = [take("reasoning"), take("reasoning_content")];
            if let Some(reasoning) = reasoning.into_iter().flatten().next() {
                shown.insert("reasoning".into(), reasoning.clone());
                shown.insert("reasoning_content".into(), reasoning);
            }
        }
        if role == "tool"
            && let Some(id) = take("tool_call_id")
        {
            shown.insert("tool_call_id".into(), id);
        }
        if let Some(name @ Json::String(_)) = take("name") {
            shown.insert("name".into(), name);
        }
        Ok(shown)
    }

    fn content(&self, content: Option<Json>) -> Result<Json, Unfit> {
        let texts: Vec<String> = match content {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::String(text)) => vec![text],
            Some(Json::Array(parts)) => parts.into_iter().map(text_of).collect::<Result<_, _>>()?,
            Some(_) => return Err(Unfit::Request),
        };
        Ok(match self.format {
            ContentFormat::String => texts.join("\n").into(),
            ContentFormat::OpenAi => texts
                .into_iter()
                .map(|text| json!({"type": "text", "text": text}))
                .collect(),
        })
    }
}

/// The text of a part that is one.
fn text_of(part: Json) -> Result<String, Unfit> {
    match part {
        Json::String(text) => Ok(text),
        Json::Object(mut part) => {
            let is_text = part.get("type").and_then(Json::as_str) == Some("text");
            match part.remove("text") {
                Some(Json::String(text)) if is_text => Ok(text),
                _ => Err(Unfit::Media),
            }
        }
        _ => Err(Unfit::Request),
    }
}

/// Arguments are written as a text in requests, and given to templates as what they mean.
fn tool_calls(mut calls: Json) -> Result<Json, Unfit> {
    for call in calls.as_array_mut().ok_or(Unfit::Request)? {
        let function = call.get_mut("function").and_then(Json::as_object_mut);
        let function = function.ok_or(Unfit::Request)?;
        let arguments = match function.get("arguments") {
            None | Some(Json::Null) => json!({}),
            Some(Json::String(text)) if text.is_empty() => json!({}),
            Some(Json::String(text)) => serde_json::from_str(text).map_err(|_| Unfit::Request)?,
            Some(other) => other.clone(),
        };
        function.insert("arguments".into(), arguments);
    }
    Ok(calls)
}

/// A tool as vLLM's own model of it prints it: these fields first, in this order, and `null` where one is not given.
fn tool(given: Json) -> Json {
    let Json::Object(mut given) = given else {
        return given;
    };
    let mut shown = Map::new();
    let kind = given.remove("type").unwrap_or_else(|| "function".into());
    shown.insert("type".into(), kind);
    if let Some(function) = given.remove("function") {
        let function = match function {
            Json::Object(mut function) => {
                let mut shown = Map::new();
                for name in ["name", "description", "parameters"] {
                    let value = function.remove(name).unwrap_or(Json::Null);
                    shown.insert(name.into(), value);
                }
                shown.extend(function);
                Json::Object(shown)
            }
            other => other,
        };
        shown.insert("function".into(), function);
    }
    shown.extend(given);
    Json::Object(shown)
}

fn sources_of(template: &Json) -> Vec<(String, String)> {
    match template {
        Json::String(text) => vec![(DEFAULT.into(), text.clone())],
        Json::Array(named) => {
            let pair = |one: &Json| {
                let text = |name: &str| one[name].as_str().map(str::to_string);
                Some((text("name")?, text("template")?))
            };
            named.iter().filter_map(pair).collect()
        }
        _ => Vec::new(),
    }
}

/// `bos_token` and so on: texts, or objects with a `content`.
fn specials_of(config: &Json) -> Vec<(String, Value)> {
    let text = |value: &Json| {
        let text = value.as_str().or_else(|| value["content"].as_str());
        text.map(str::to_string)
    };
    let names = [
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ];
    let mut specials: Vec<(String, Value)> = names
        .iter()
        .filter_map(|name| Some((name.to_string(), text(&config[*name])?.into())))
        .collect();
    if let Some(more) = config["additional_special_tokens"].as_array() {
        let more: Vec<Value> = more
            .iter()
            .filter_map(|one| Some(text(one)?.into()))
            .collect();
        specials.push(("additional_special_tokens".into(), more.into()));
    }
    specials
}

/// Transformers marks what the assistant says by a tag of its own, which changes nothing in the text.
fn without_marks(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, tag)) = rest.split_once("{%") {
        let (inside, after) = tag.split_once("%}").unwrap_or((tag, ""));
        let word = inside.trim_matches(['-', '+', ' ', '\n', '\t', '\r']);
        let stands_for = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(before);
        out.push_str("{%");
        match stands_for {
            Some(stands_for) => out.push_str(&inside.replace(word, stands_for)),
            None => out.push_str(inside),
        }
        if tag.contains("%}") {
            out.push_str("%}");
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Values print as Python prints them. What would print otherwise is refused.
fn write_as_python(out: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool if value.is_true() => out.write_str("True"),
        ValueKind::Bool => out.write_str("False"),
        ValueKind::String => out.write_str(value.as_str().unwrap_or_default()),
        ValueKind::Number => match value.is_integer() {
            true => write!(out, "{value}"),
            false => out.write_str(&number_as_python(f64::try_from(value.clone())?)),
        },
        _ => {
            let message = "a list or a map is printed";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    written.map_err(|_| Error::new(ErrorKind::WriteFailure, "no room"))
}

/// Python's `repr` of a float.
fn number_as_python(number: f64) -> String {
    let exponent = match number {
        0.0 => 0,
        _ => format!("{number:e}")
            .rsplit('e')
            .next()
            .and_then(|e| e.parse().ok())
            .unwrap_or(0),
    };
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let text = format!("{number:e}");
    let (digits, _) = text.split_once('e').unwrap_or((&text, ""));
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", i32::abs(exponent))
}

fn strftime_now(format: String) -> Result<String, Error> {
    let mut text = String::new();
    let now = chrono::Local::now();
    write!(text, "{}", now.format(&format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "a time format"))?;
    Ok(text)
}

/// Transformers' `tojson`: Python's `json.dumps(value, ensure_ascii=False)`, not escaped for HTML.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let unknown = |_| Error::new(ErrorKind::InvalidOperation, "it cannot be written as JSON");
    let indent: Option<usize> = options.get("indent")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorts: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    if is_ascii == Some(true) || sorts == Some(true) || value.is_undefined() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson with other options",
        ));
    }
    let json = serde_json::to_value(&value).map_err(unknown)?;
    let mut out = String::new();
    write_json(&json, indent, 0, &mut out);
    Ok(out)
}

fn write_json(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let between = |out: &mut String| out.push_str(if indent.is_some() { "," } else { ", " });
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                if place > 0 {
                    between(out);
                }
                line(out, depth + 1);
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push(']');
        }
        Json::Object(fields) if !fields.is_empty() => {
            out.push('{');
            for (place, (name, item)) in fields.iter().enumerate() {
                if place > 0 {
                    between(out);
                }
                line(out, depth + 1);
                out.push_str(&Json::from(name.as_str()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push('}');
        }
        Json::Number(number) if number.is_f64() => {
            out.push_str(&number_as_python(number.as_f64().unwrap_or(0.0)));
        }
        other => out.push_str(&other.to_string()),
    }
}

#[cfg(test)]
#[path = "chat_tests.rs"]
mod tests;
