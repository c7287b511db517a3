//! vLLM's OpenAI-compatible API as a simulated worker speaks it: request bytes in, sequences to run and reply bytes out.
//!
//! Pure: no sockets, no clock (the time is passed in). Shapes follow vLLM's `entrypoints/openai` (fields it sends as
//! `null` are sent as `null`), with one liberty: `usage.prompt_tokens_details.cached_tokens` is always filled, as with
//! `--enable-prompt-tokens-details`. A prompt is rendered to bytes, four of which are one token; there is no tokenizer.

use serde_json::{Value, json};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::engine::{Event, NewSequence, TOKEN_BYTES};
use super::handover::Leg;
use super::words::{self, Dice};

/// Choices one request may ask for.
const CHOICES_MAX: u64 = 128;
/// `max_tokens` of a completion that names none (OpenAI's default, which vLLM keeps for this endpoint and as that of
/// its own `SamplingParams`).
const COMPLETION_TOKENS: u64 = 16;
/// Numbers in an embedding.
const EMBEDDING_DIMENSIONS: usize = 64;

/// What a simulated worker serves.
#[derive(Clone, Debug)]
pub struct Served {
    /// The one model.
    pub model: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: u32,
    /// Tokens in a cached block.
    pub block_tokens: u32,
    /// Mean length of an answer that nothing cuts, in tokens.
    pub output_tokens: u32,
}

/// A refusal, in the shape vLLM gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// For people.
    pub message: String,
    /// vLLM's `type`.
    pub kind: &'static str,
    /// The field at fault, if vLLM names one.
    pub param: Option<&'static str>,
}

impl ApiError {
    fn bad_request(message: impl Into<String>, param: Option<&'static str>) -> ApiError {
        ApiError {
            status: 400,
            message: message.into(),
            kind: "BadRequestError",
            param,
        }
    }

    /// What vLLM's request validation (pydantic) says about a field of the body.
    fn invalid(what: &str, field: &str, message: &str) -> ApiError {
        let message =
            format!("[{{'type': '{what}', 'loc': ('body', {field}), 'msg': '{message}'}}]");
        ApiError {
            status: 400,
            message,
            kind: "Bad Request",
            param: None,
        }
    }

    fn missing(field: &str) -> ApiError {
        ApiError::invalid("missing", &format!("'{field}'"), "Field required")
    }

    /// The body.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.status,
        }})
    }
}

/// Which endpoint's shapes a request and its reply have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
    /// `/v1/responses`
    Response,
    /// `/v1/embeddings`
    Embedding,
    /// `/inference/v1/generate`: token ids in, token ids out
    Generate,
}

impl Dialect {
    fn id_prefix(self) -> &'static str {
        match self {
            Dialect::Chat => "chatcmpl-",
            Dialect::Completion => "cmpl-",
            Dialect::Response => "resp_",
            Dialect::Embedding => "embd-",
            Dialect::Generate => "generate-tokens-",
        }
    }
}

/// One choice: a sequence for the engine, and what it will say.
#[derive(Clone, Debug)]
pub struct Choice {
    /// What the engine runs; its id is given by the caller.
    pub sequence: NewSequence,
    text: String,
    finish_reason: &'static str,
    stop_reason: Option<String>,
    prompt_hash: u64,
    /// Its prompt is counted in `usage`; with several choices for a prompt that is so for the first only.
    is_first_of_prompt: bool,
}

impl Choice {
    /// Whether the answer ends at its limit rather than by itself.
    pub fn is_cut(&self) -> bool {
        self.finish_reason == "length"
    }

    /// The id that stands for a piece of the answer: the piece itself, so that sent back it is the same prompt bytes.
    fn token_id(&self, index: u32) -> u32 {
        let mut bytes = [b' '; TOKEN_BYTES];
        let piece = self.piece(index).as_bytes();
        bytes[..piece.len()].copy_from_slice(piece);
        u32::from_le_bytes(bytes)
    }

    fn piece(&self, index: u32) -> &str {
        let start = index as usize * TOKEN_BYTES;
        &self.text[start.min(self.text.len())..(start + TOKEN_BYTES).min(self.text.len())]
    }
}

/// A request understood: what to run, and everything its reply needs.
#[derive(Clone, Debug)]
pub struct Answer {
    dialect: Dialect,
    id: String,
    created: u64,
    model: String,
    /// What to run, in the order of the reply's indexes.
    pub choices: Vec<Choice>,
    /// Whether the reply is a stream of events.
    pub is_stream: bool,
    includes_usage: bool,
    is_usage_continuous: bool,
    is_base64: bool,
    /// What the request says about P/D.
    pub leg: Leg,
    /// Names the prompts and their salt; with another model there is no answer at all.
    pub prompt_hash: u64,
    choices_per_prompt: usize,
    kv_transfer_params: Option<Value>,
    cached_tokens: u32,
    emitted_tokens: u32,
    ended: usize,
}

/// Understands a request body.
///
/// # Errors
/// What vLLM refuses: 400 for what cannot be read, lacks a field or does not fit, 404 for another model.
pub fn parse(
    dialect: Dialect,
    served: &Served,
    body: &[u8],
    request_id: &str,
    created: u64,
) -> Result<Answer, ApiError> {
    let request = parse_object(body)?;
    let prompts = prompts(dialect, &request)?;
    check_model(served, &request)?;
    let is_stream = dialect != Dialect::Embedding && request["stream"].as_bool() == Some(true);
    check_stream_options(&request, is_stream)?;
    let limits = Limits::parse(dialect, &request)?;
    let options = &request["stream_options"];
    let salt = request["cache_salt"].as_str().unwrap_or("");
    let mut choices = Vec::new();
    let mut prompt_hash = xxh3_64(salt.as_bytes());
    for prompt in &prompts {
        prompt_hash = xxh3_64_with_seed(prompt, prompt_hash);
        for nth in 0..limits.choices {
            choices.push(limits.choice(served, prompt, salt, nth)?);
        }
    }
    let leg = Leg {
        params: request["kv_transfer_params"].clone(),
        tokens_max: limits.tokens_max,
        is_stream,
    };
    Ok(Answer {
        dialect,
        id: format!("{}{request_id}", dialect.id_prefix()),
        created,
        model: request["model"]
            .as_str()
            .unwrap_or(&served.model)
            .to_owned(),
        choices,
        is_stream,
        includes_usage: options["include_usage"] == true,
        is_usage_continuous: options["continuous_usage_stats"] == true,
        is_base64: request["encoding_format"] == "base64",
        leg,
        prompt_hash,
        choices_per_prompt: limits.choices as usize,
        kv_transfer_params: None,
        cached_tokens: 0,
        emitted_tokens: 0,
        ended: 0,
    })
}

/// vLLM's rule, which a router breaks easily that turns a streamed request into a prefill leg.
fn check_stream_options(request: &Value, is_stream: bool) -> Result<(), ApiError> {
    if request["stream_options"].is_null() || is_stream {
        return Ok(());
    }
    let message = "Value error, Stream options can only be defined when `stream=True`.";
    Err(ApiError::invalid("value_error", "", message))
}

fn parse_object(body: &[u8]) -> Result<Value, ApiError> {
    match serde_json::from_slice::<Value>(body) {
        Ok(request) if request.is_object() => Ok(request),
        Ok(_) => Err(ApiError::invalid(
            "model_attributes_type",
            "",
            "Input should be a valid dictionary",
        )),
        Err(error) => {
            let column = error.column().to_string();
            Err(ApiError::invalid(
                "json_invalid",
                &column,
                "JSON decode error",
            ))
        }
    }
}

fn check_model(served: &Served, request: &Value) -> Result<(), ApiError> {
    match &request["model"] {
        Value::Null => Ok(()),
        Value::String(model) if *model == served.model => Ok(()),
        Value::String(model) => Err(ApiError {
            status: 404,
            message: format!("The model `{model}` does not exist."),
            kind: "NotFoundError",
            param: Some("model"),
        }),
        _ => Err(ApiError::invalid(
            "string_type",
            "'model'",
            "Input should be a valid string",
        )),
    }
}

/// The prompts of a request, rendered.
fn prompts(dialect: Dialect, request: &Value) -> Result<Vec<Vec<u8>>, ApiError> {
    let field = match dialect {
        Dialect::Chat => "messages",
        Dialect::Completion => "prompt",
        Dialect::Response | Dialect::Embedding => "input",
        Dialect::Generate => "token_ids",
    };
    let Some(value) = request.get(field).filter(|value| !value.is_null()) else {
        return Err(ApiError::missing(field));
    };
    let prompts = match dialect {
        Dialect::Chat => vec![render_chat(value, request.get("tools"), None)?],
        Dialect::Response => {
            vec![render_chat(
                value,
                request.get("tools"),
                request["instructions"].as_str(),
            )?]
        }
        Dialect::Generate if !value[0].is_u64() => {
            let message = "Input should be a valid list of integers";
            return Err(ApiError::invalid("list_type", "'token_ids'", message));
        }
        Dialect::Completion | Dialect::Embedding | Dialect::Generate => text_prompts(value, field)?,
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::bad_request(
            format!("Either {field} or its first element is empty."),
            None,
        ));
    }
    Ok(prompts)
}

/// A text, texts, token ids, or lists of token ids.
fn text_prompts(value: &Value, field: &str) -> Result<Vec<Vec<u8>>, ApiError> {
    let wrong = || {
        ApiError::invalid(
            "string_type",
            &format!("'{field}'"),
            "Input should be a valid string or list",
        )
    };
    let ids = |list: &[Value]| -> Option<Vec<u8>> {
        list.iter().try_fold(Vec::new(), |mut bytes, id| {
            bytes.extend((id.as_u64()? as u32).to_le_bytes());
            Some(bytes)
        })
    };
    match value {
        Value::String(text) => Ok(vec![text.as_bytes().to_vec()]),
        Value::Array(list) if list.first().is_some_and(Value::is_u64) => {
            Ok(vec![ids(list).ok_or_else(wrong)?])
        }
        Value::Array(list) => list
            .iter()
            .map(|item| match item {
                Value::String(text) => Ok(text.as_bytes().to_vec()),
                Value::Array(list) => ids(list).ok_or_else(wrong),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

/// The chat template: tools first, then the messages, then the place where the answer goes.
///
/// An assistant message renders as the generation prompt and its text, so that the next turn repeats prompt and answer.
fn render_chat(
    messages: &Value,
    tools: Option<&Value>,
    instructions: Option<&str>,
) -> Result<Vec<u8>, ApiError> {
    let mut out = String::new();
    if let Some(tools) = tools.filter(|tools| !tools.is_null()) {
        out.push_str(&format!("<|tools|>\n{tools}<|end|>\n"));
    }
    if let Some(text) = instructions {
        out.push_str(&format!("<|system|>\n{text}<|end|>\n"));
    }
    match messages {
        Value::String(text) => out.push_str(&format!("<|user|>\n{text}<|end|>\n")),
        Value::Array(list) => {
            for message in list {
                render_message(message, &mut out)?;
            }
        }
        _ => {
            return Err(ApiError::invalid(
                "list_type",
                "'messages'",
                "Input should be a valid list",
            ));
        }
    }
    if !out.is_empty() {
        out.push_str("<|assistant|>\n");
    }
    Ok(out.into_bytes())
}

fn render_message(message: &Value, out: &mut String) -> Result<(), ApiError> {
    if !message.is_object() {
        return Err(ApiError::invalid(
            "dict_type",
            "'messages'",
            "Input should be a valid dictionary",
        ));
    }
    out.push_str(&format!(
        "<|{}|>\n",
        message["role"].as_str().unwrap_or("user")
    ));
    match &message["content"] {
        Value::String(text) => out.push_str(text),
        Value::Array(parts) => {
            for part in parts {
                match part["text"].as_str() {
                    Some(text) => out.push_str(text),
                    // Another medium: it stands for itself, so that another picture is another prefix.
                    None => out.push_str(&part.to_string()),
                }
            }
        }
        _ => {}
    }
    if let Some(calls) = message.get("tool_calls").filter(|calls| !calls.is_null()) {
        out.push_str(&calls.to_string());
    }
    out.push_str("<|end|>\n");
    Ok(())
}

/// How long an answer may and must be.
struct Limits {
    dialect: Dialect,
    choices: u64,
    tokens_max: Option<u64>,
    tokens_min: u64,
    ignores_end: bool,
    stops: Vec<String>,
}

impl Limits {
    fn parse(dialect: Dialect, request: &Value) -> Result<Limits, ApiError> {
        let names: &[&'static str] = match dialect {
            Dialect::Chat => &["max_completion_tokens", "max_tokens"],
            Dialect::Response => &["max_output_tokens"],
            Dialect::Completion | Dialect::Embedding | Dialect::Generate => &["max_tokens"],
        };
        let request = match dialect {
            Dialect::Generate => &request["sampling_params"],
            _ => request,
        };
        let mut tokens_max = None;
        for name in names
            .iter()
            .copied()
            .filter(|name| !request[*name].is_null())
        {
            let wanted = request[name].as_i64().ok_or_else(|| {
                ApiError::invalid(
                    "int_type",
                    &format!("'{name}'"),
                    "Input should be a valid integer",
                )
            })?;
            if wanted < 1 {
                let message = format!("{name} must be at least 1, got {wanted}.");
                return Err(ApiError::bad_request(message, Some(name)));
            }
            tokens_max = tokens_max.or(Some(wanted as u64));
        }
        if matches!(dialect, Dialect::Completion | Dialect::Generate) {
            tokens_max = tokens_max.or(Some(COMPLETION_TOKENS));
        }
        let tokens_min = request["min_tokens"].as_u64().unwrap_or(0);
        // The other two have no such field: vLLM does not look at it.
        let has_min = !matches!(dialect, Dialect::Response | Dialect::Embedding);
        if let Some(most) = tokens_max.filter(|most| has_min && tokens_min > *most) {
            let message = format!(
                "min_tokens must be less than or equal to max_tokens={most}, got {tokens_min}."
            );
            return Err(ApiError::bad_request(message, Some("min_tokens")));
        }
        let choices = if dialect == Dialect::Embedding {
            1
        } else {
            request["n"].as_u64().unwrap_or(1)
        };
        if choices == 0 || choices > CHOICES_MAX {
            let message = format!("n must be between 1 and {CHOICES_MAX}, got {choices}.");
            return Err(ApiError::bad_request(message, Some("n")));
        }
        let stops = match &request["stop"] {
            Value::String(stop) => vec![stop.clone()],
            Value::Array(list) => list
                .iter()
                .filter_map(|stop| stop.as_str().map(str::to_owned))
                .collect(),
            _ => Vec::new(),
        };
        Ok(Limits {
            dialect,
            choices,
            tokens_max,
            tokens_min,
            ignores_end: request["ignore_eos"].as_bool() == Some(true),
            stops,
        })
    }

    fn choice(
        &self,
        served: &Served,
        prompt: &[u8],
        salt: &str,
        nth: u64,
    ) -> Result<Choice, ApiError> {
        let prompt_tokens = prompt.len().div_ceil(TOKEN_BYTES) as u64;
        let room = u64::from(served.max_model_len).saturating_sub(prompt_tokens);
        let least = u64::from(self.dialect != Dialect::Embedding);
        let wanted = self.tokens_max.unwrap_or(least);
        if wanted.max(least) > room {
            let (limit, total) = (served.max_model_len, prompt_tokens.saturating_add(wanted));
            return Err(ApiError::bad_request(
                format!(
                    "This model's maximum context length is {limit} tokens. However, you requested {total} tokens \
                     ({prompt_tokens} in the messages, {wanted} in the completion). Please reduce the length of the \
                     messages or completion."
                ),
                None,
            ));
        }
        let prompt_hash = xxh3_64(prompt);
        let (text, finish_reason, stop_reason) = if self.dialect == Dialect::Embedding {
            (String::new(), "stop", None)
        } else {
            self.text(
                served,
                prompt_hash.wrapping_add(nth),
                self.tokens_max.unwrap_or(room).min(room),
            )
        };
        let sequence = NewSequence {
            id: 0,
            blocks: block_chain(served, salt, prompt, text.as_bytes()),
            prompt_tokens: prompt_tokens as u32,
            output_tokens: text.len().div_ceil(TOKEN_BYTES) as u32,
            is_prompt_remote: false,
            kept_as: None,
        };
        Ok(Choice {
            sequence,
            text,
            finish_reason,
            stop_reason,
            prompt_hash,
            is_first_of_prompt: nth == 0,
        })
    }

    /// What the model says, why it ends, and the stop string that ended it.
    fn text(
        &self,
        served: &Served,
        seed: u64,
        tokens_max: u64,
    ) -> (String, &'static str, Option<String>) {
        let bytes_max = tokens_max as usize * TOKEN_BYTES;
        let mut text = if self.ignores_end {
            words::cut(seed, bytes_max)
        } else {
            let mean = u64::from(served.output_tokens.max(2));
            let tokens = Dice::new(seed)
                .between(mean / 2, mean * 3 / 2)
                .max(self.tokens_min)
                .min(tokens_max);
            words::sentences(seed, tokens as usize * TOKEN_BYTES)
        };
        let mut finish_reason = if self.ignores_end { "length" } else { "stop" };
        if text.len() > bytes_max {
            text.truncate(bytes_max);
            finish_reason = "length";
        }
        let stop = self
            .stops
            .iter()
            .filter(|stop| !stop.is_empty())
            .filter_map(|stop| text.find(stop.as_str()).map(|at| (at, stop)))
            .min();
        let Some((at, stop)) = stop else {
            return (text, finish_reason, None);
        };
        // The stop string itself is generated and not shown; an answer has one token at least.
        text.truncate(at.max(1));
        (text, "stop", Some(stop.clone()))
    }
}

/// Chained hashes of the full blocks of prompt and answer; another model or salt is another chain.
fn block_chain(served: &Served, salt: &str, prompt: &[u8], answer: &[u8]) -> Vec<u64> {
    let block_bytes = served.block_tokens as usize * TOKEN_BYTES;
    let mut parent = xxh3_64_with_seed(salt.as_bytes(), xxh3_64(served.model.as_bytes()));
    let mut bytes = prompt.to_vec();
    bytes.extend_from_slice(answer);
    bytes
        .chunks_exact(block_bytes)
        .map(|block| {
            parent = xxh3_64_with_seed(block, parent);
            parent
        })
        .collect()
}

impl Answer {
    /// Whether P/D is about it: whoever wants embeddings decodes nothing.
    pub fn is_generated(&self) -> bool {
        self.dialect != Dialect::Embedding
    }

    /// Blocks of the prompt that is handed over. Of several prompts that is the first alone; vLLM pins them all and
    /// tells of the first, so that the others leak.
    pub fn handover_blocks(&self, served: &Served) -> u32 {
        let sequence = &self.choices[0].sequence;
        sequence.prompt_tokens.div_ceil(served.block_tokens)
    }

    /// The prompt's blocks are kept under this number, and a reply that is not streamed says so.
    pub fn hand_over(&mut self, number: u64, params: Value) {
        self.choices[0].sequence.kept_as = Some(number);
        self.kv_transfer_params = Some(params);
    }

    /// The first prompt's blocks are fetched from another engine.
    pub fn take_over(&mut self) {
        for choice in &mut self.choices[..self.choices_per_prompt] {
            choice.sequence.is_prompt_remote = true;
        }
    }

    /// Notes what the engine did. Says whether this was the last of it.
    pub fn note(&mut self, choice: u32, event: Event) -> bool {
        let is_last = match event {
            Event::Prefilled {
                cached_tokens,
                is_last,
                ..
            } => {
                if self.choices[choice as usize].is_first_of_prompt {
                    self.cached_tokens += cached_tokens;
                }
                is_last
            }
            Event::Token { is_last, .. } => {
                self.emitted_tokens += 1;
                is_last
            }
        };
        self.ended += usize::from(is_last);
        self.ended == self.choices.len()
    }

    /// The reply to a request that is not streamed.
    pub fn reply(&self) -> Value {
        match self.dialect {
            Dialect::Chat | Dialect::Completion => self.choices_reply(),
            Dialect::Response => self.response(true),
            Dialect::Embedding => self.embeddings(),
            Dialect::Generate => self.generated(),
        }
    }

    /// vLLM's `GenerateResponse`, which has no usage.
    fn generated(&self) -> Value {
        let choices = self.choices.iter().enumerate();
        let choices: Vec<Value> = choices
            .map(|(index, choice)| {
                let ids: Vec<u32> = (0..choice.sequence.output_tokens)
                    .map(|nth| choice.token_id(nth))
                    .collect();
                json!({
                    "index": index, "logprobs": null, "finish_reason": choice.finish_reason, "token_ids": ids,
                })
            })
            .collect();
        json!({
            "request_id": self.id, "choices": choices, "prompt_logprobs": null,
            "kv_transfer_params": self.kv_transfer_params,
        })
    }

    fn prompt_tokens(&self) -> u32 {
        let firsts = self
            .choices
            .iter()
            .filter(|choice| choice.is_first_of_prompt);
        firsts.map(|choice| choice.sequence.prompt_tokens).sum()
    }

    fn usage(&self) -> Value {
        let (prompt, answer) = (self.prompt_tokens(), self.emitted_tokens);
        json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + answer,
            "completion_tokens": answer,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }

    fn choices_reply(&self) -> Value {
        let is_chat = self.dialect == Dialect::Chat;
        let choices: Vec<Value> = self
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                let mut value = json!({"index": index});
                if is_chat {
                    value["message"] = json!({
                        "role": "assistant", "content": choice.text, "refusal": null, "annotations": null,
                        "audio": null, "function_call": null, "tool_calls": [], "reasoning_content": null,
                    });
                } else {
                    value["text"] = json!(choice.text);
                }
                value["logprobs"] = Value::Null;
                value["finish_reason"] = json!(choice.finish_reason);
                value["stop_reason"] = json!(choice.stop_reason);
                value
            })
            .collect();
        json!({
            "id": self.id,
            "object": if is_chat { "chat.completion" } else { "text_completion" },
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": null,
            "system_fingerprint": null,
            "usage": self.usage(),
            "kv_transfer_params": self.kv_transfer_params,
        })
    }

    fn embeddings(&self) -> Value {
        let data: Vec<Value> = self
            .choices
            .iter()
            .enumerate()
            .map(|(index, choice)| {
                let vector = embedding(choice.prompt_hash);
                let value = if self.is_base64 {
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    json!(base64(&bytes))
                } else {
                    json!(vector)
                };
                json!({"index": index, "object": "embedding", "embedding": value})
            })
            .collect();
        json!({
            "id": self.id, "object": "list", "created": self.created, "model": self.model, "data": data,
            "usage": self.usage(),
        })
    }

    fn response(&self, is_done: bool) -> Value {
        let status = if is_done { "completed" } else { "in_progress" };
        let output = if is_done {
            json!([self.message_item("completed", true)])
        } else {
            json!([])
        };
        let usage = is_done.then(|| {
            json!({
                "input_tokens": self.prompt_tokens(),
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.emitted_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.prompt_tokens() + self.emitted_tokens,
            })
        });
        json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": status, "output": output, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
            "incomplete_details": null, "error": null, "usage": usage,
            "kv_transfer_params": self.kv_transfer_params,
        })
    }

    fn message_item(&self, status: &str, is_full: bool) -> Value {
        let content = if is_full {
            json!([text_part(&self.choices[0].text)])
        } else {
            json!([])
        };
        json!({
            "id": format!("msg_{}", self.id), "type": "message", "role": "assistant", "status": status,
            "content": content,
        })
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": null})
}

/// A vector of length 1 that is the same for the same prompt.
fn embedding(seed: u64) -> Vec<f32> {
    let mut dice = Dice::new(seed);
    let mut vector: Vec<f32> = (0..EMBEDDING_DIMENSIONS)
        .map(|_| dice.between(0, 2000) as f32 / 1000.0 - 1.0)
        .collect();
    let norm = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-6);
    vector.iter_mut().for_each(|x| *x /= norm);
    vector
}

/// RFC 4648 section 4, with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = (byte(0) << 16) | (byte(1) << 8) | byte(2);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            out.push(if digit <= group.len() {
                ALPHABET[index as usize] as char
            } else {
                '='
            });
        }
    }
    out
}

/// Writes an answer as server-sent events, as the engine brings it forth.
#[derive(Debug)]
pub struct EventWriter {
    answer: Answer,
    /// Choices whose first chunk (the role) has gone out.
    begun: Vec<bool>,
    sequence_number: u64,
}

impl EventWriter {
    /// For an answer of which nothing has been noted yet.
    pub fn new(answer: Answer) -> EventWriter {
        let begun = vec![false; answer.choices.len()];
        EventWriter {
            answer,
            begun,
            sequence_number: 0,
        }
    }

    /// Adds what one engine event gives to `out`. Says whether the stream is complete: its tail is then in `out` too.
    pub fn write(&mut self, choice: u32, event: Event, out: &mut Vec<u8>) -> bool {
        let is_done = self.answer.note(choice, event);
        match self.answer.dialect {
            Dialect::Response => self.write_response(event, is_done, out),
            _ => self.write_chunk(choice, event, out),
        }
        if is_done && self.answer.dialect != Dialect::Response {
            if self.answer.includes_usage {
                let usage = self.answer.usage();
                let chunk = self.chunk(json!([]), Some(usage));
                write_event(None, &chunk, out);
            }
            out.extend_from_slice(b"data: [DONE]\n\n");
        }
        is_done
    }

    fn write_chunk(&mut self, choice: u32, event: Event, out: &mut Vec<u8>) {
        let Event::Token { index, is_last, .. } = event else {
            return;
        };
        let is_chat = self.answer.dialect == Dialect::Chat;
        if is_chat && !std::mem::replace(&mut self.begun[choice as usize], true) {
            let delta = json!({"role": "assistant", "content": ""});
            let first =
                json!([{"index": choice, "delta": delta, "logprobs": null, "finish_reason": null}]);
            write_event(None, &self.chunk(first, self.running_usage()), out);
        }
        let told = &self.answer.choices[choice as usize];
        let mut value = json!({"index": choice});
        match self.answer.dialect {
            Dialect::Chat => value["delta"] = json!({"content": told.piece(index)}),
            Dialect::Generate => value["token_ids"] = json!([told.token_id(index)]),
            _ => value["text"] = json!(told.piece(index)),
        }
        value["logprobs"] = Value::Null;
        value["finish_reason"] = json!(is_last.then_some(told.finish_reason));
        value["stop_reason"] = json!(told.stop_reason.as_ref().filter(|_| is_last));
        write_event(None, &self.chunk(json!([value]), self.running_usage()), out);
    }

    fn running_usage(&self) -> Option<Value> {
        (self.answer.is_usage_continuous && self.answer.includes_usage).then(|| self.answer.usage())
    }

    fn chunk(&self, choices: Value, usage: Option<Value>) -> Value {
        let is_chat = self.answer.dialect == Dialect::Chat;
        let mut value = match self.answer.dialect {
            Dialect::Generate => json!({"request_id": self.answer.id, "choices": choices}),
            _ => json!({
                "id": self.answer.id,
                "object": if is_chat { "chat.completion.chunk" } else { "text_completion" },
                "created": self.answer.created,
                "model": self.answer.model,
                "choices": choices,
            }),
        };
        if let Some(usage) = usage {
            value["usage"] = usage;
        }
        value
    }

    /// The events of the Responses API, for one message of text.
    fn write_response(&mut self, event: Event, is_done: bool, out: &mut Vec<u8>) {
        let item_id = format!("msg_{}", self.answer.id);
        let place = json!({"item_id": item_id, "output_index": 0, "content_index": 0});
        let with = |name: &str, field: Value| {
            let mut value = place.clone();
            value[name] = field;
            value
        };
        let Event::Token { index, .. } = event else {
            let response = json!({"response": self.answer.response(false)});
            self.write_typed("response.created", response.clone(), out);
            self.write_typed("response.in_progress", response, out);
            let item = self.answer.message_item("in_progress", false);
            self.write_typed(
                "response.output_item.added",
                json!({"output_index": 0, "item": item}),
                out,
            );
            self.write_typed(
                "response.content_part.added",
                with("part", text_part("")),
                out,
            );
            return;
        };
        let delta = json!(self.answer.choices[0].piece(index));
        self.write_typed("response.output_text.delta", with("delta", delta), out);
        if is_done {
            let text = self.answer.choices[0].text.clone();
            self.write_typed("response.output_text.done", with("text", json!(text)), out);
            self.write_typed(
                "response.content_part.done",
                with("part", text_part(&text)),
                out,
            );
            let item = self.answer.message_item("completed", true);
            self.write_typed(
                "response.output_item.done",
                json!({"output_index": 0, "item": item}),
                out,
            );
            let response = json!({"response": self.answer.response(true)});
            self.write_typed("response.completed", response, out);
        }
    }

    fn write_typed(&mut self, kind: &str, mut value: Value, out: &mut Vec<u8>) {
        value["type"] = json!(kind);
        value["sequence_number"] = json!(self.sequence_number);
        self.sequence_number += 1;
        write_event(Some(kind), &value, out);
    }
}

fn write_event(name: Option<&str>, value: &Value, out: &mut Vec<u8>) {
    if let Some(name) = name {
        out.extend_from_slice(format!("event: {name}\n").as_bytes());
    }
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(value.to_string().as_bytes());
    out.extend_from_slice(b"\n\n");
}

/// `/v1/models`
pub fn models(served: &Served, created: u64) -> Value {
    let permission = json!({
        "id": format!("modelperm-{}", served.model), "object": "model_permission", "created": created,
        "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
        "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false, "organization": "*",
        "group": null, "is_blocking": false,
    });
    json!({"object": "list", "data": [{
        "id": served.model, "object": "model", "created": created, "owned_by": "vllm", "root": served.model,
        "parent": null, "max_model_len": served.max_model_len, "permission": [permission],
    }]})
}

/// `/tokenize`, of a `prompt` or of `messages`. Ids are made up, and the same for the same four bytes.
///
/// # Errors
/// As [`parse`].
pub fn tokenize(served: &Served, body: &[u8]) -> Result<Value, ApiError> {
    let request = parse_object(body)?;
    let dialect = if request.get("messages").is_some() {
        Dialect::Chat
    } else {
        Dialect::Completion
    };
    let prompts = prompts(dialect, &request)?;
    check_model(served, &request)?;
    let tokens: Vec<u64> = prompts[0]
        .chunks(TOKEN_BYTES)
        .map(|piece| xxh3_64(piece) % 128_000)
        .collect();
    Ok(json!({
        "count": tokens.len(), "max_model_len": served.max_model_len, "tokens": tokens, "token_strs": null,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served() -> Served {
        Served {
            model: "mock".into(),
            max_model_len: 1000,
            block_tokens: 16,
            output_tokens: 20,
        }
    }

    fn parse_value(dialect: Dialect, body: &Value) -> Result<Answer, ApiError> {
        parse(dialect, &served(), body.to_string().as_bytes(), "x", 1)
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    #[test]
    fn the_next_turn_repeats_the_blocks_of_prompt_and_answer() {
        let ask = "a question long enough to fill some blocks of the cache ".repeat(6);
        let first = parse_value(Dialect::Chat, &json!({"messages": [user(&ask)]})).unwrap();
        let said = first.choices[0].text.clone();
        let messages =
            json!([user(&ask), {"role": "assistant", "content": said}, user("and then?")]);
        let second = parse_value(Dialect::Chat, &json!({"messages": messages})).unwrap();
        let (before, after) = (
            &first.choices[0].sequence.blocks,
            &second.choices[0].sequence.blocks,
        );
        assert!(
            before.len() >= 5 && after.starts_with(before),
            "{} {}",
            before.len(),
            after.len()
        );
    }

    #[test]
    fn another_salt_is_another_chain_and_parts_of_content_are_not() {
        let ask = "x".repeat(200);
        let blocks = |body: Value| {
            parse_value(Dialect::Chat, &body).unwrap().choices[0]
                .sequence
                .blocks
                .clone()
        };
        let plain = blocks(json!({"messages": [user(&ask)]}));
        let parts = json!({"role": "user", "content": [{"type": "text", "text": ask}]});
        assert_eq!(plain, blocks(json!({"messages": [parts]})));
        let salted = blocks(json!({"messages": [user(&ask)], "cache_salt": "s"}));
        assert!(plain.iter().zip(&salted).all(|(a, b)| a != b));
    }

    #[test]
    fn lengths_follow_max_tokens_ignore_eos_and_stop() {
        let ask = |extra: Value| {
            let mut body = json!({"messages": [user("hi")]});
            body.as_object_mut()
                .unwrap()
                .extend(extra.as_object().unwrap().clone());
            parse_value(Dialect::Chat, &body).unwrap().choices.remove(0)
        };
        let natural = ask(json!({}));
        assert_eq!(natural.finish_reason, "stop");
        assert!(natural.text.ends_with('.') && natural.sequence.output_tokens >= 10);
        let cut = ask(json!({"max_tokens": 5}));
        assert_eq!(
            (
                cut.finish_reason,
                cut.sequence.output_tokens,
                cut.text.len()
            ),
            ("length", 5, 20)
        );
        let exact = ask(json!({"max_completion_tokens": 300, "ignore_eos": true}));
        assert_eq!(
            (exact.finish_reason, exact.sequence.output_tokens),
            ("length", 300)
        );
        let stopped = ask(json!({"stop": [" "]}));
        assert_eq!(
            (stopped.finish_reason, stopped.stop_reason.as_deref()),
            ("stop", Some(" "))
        );
        assert!(!stopped.text.contains(' '));
        let long = ask(json!({"min_tokens": 200}));
        assert!(long.sequence.output_tokens >= 200);
    }

    #[test]
    fn refusals_are_those_of_vllm() {
        let refused = |dialect, body: &str| {
            let error = parse(dialect, &served(), body.as_bytes(), "x", 1).unwrap_err();
            (error.status, error.kind)
        };
        for (body, status, kind) in [
            ("{", 400, "Bad Request"),
            ("[]", 400, "Bad Request"),
            ("{}", 400, "Bad Request"),
            (r#"{"messages":null}"#, 400, "Bad Request"),
            (r#"{"messages":7}"#, 400, "Bad Request"),
            (r#"{"messages":[7]}"#, 400, "Bad Request"),
            (r#"{"messages":[]}"#, 400, "BadRequestError"),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"model":"other"}"#,
                404,
                "NotFoundError",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"model":7}"#,
                400,
                "Bad Request",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":0}"#,
                400,
                "BadRequestError",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":"5"}"#,
                400,
                "Bad Request",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":1000}"#,
                400,
                "BadRequestError",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"n":0}"#,
                400,
                "BadRequestError",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"min_tokens":2}"#,
                400,
                "BadRequestError",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"stream":false,"stream_options":{}}"#,
                400,
                "Bad Request",
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}}"#,
                400,
                "Bad Request",
            ),
        ] {
            assert_eq!(refused(Dialect::Chat, body), (status, kind), "{body}");
        }
        assert_eq!(
            refused(Dialect::Completion, r#"{"prompt":[1,"a"]}"#),
            (400, "Bad Request")
        );
        assert_eq!(
            refused(Dialect::Completion, r#"{"prompt":""}"#),
            (400, "BadRequestError")
        );
        assert_eq!(
            refused(Dialect::Embedding, r#"{"prompt":"x"}"#),
            (400, "Bad Request")
        );
        let error = parse(Dialect::Chat, &served(), b"{}", "x", 1)
            .unwrap_err()
            .body();
        assert_eq!(error["error"]["code"], 400);
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("'messages'")
        );
    }

    #[test]
    fn a_prompt_of_ids_has_as_many_tokens() {
        let ids: Vec<u32> = (0..33).collect();
        let one = parse_value(Dialect::Completion, &json!({"prompt": ids})).unwrap();
        assert_eq!(one.choices[0].sequence.prompt_tokens, 33);
        let two = parse_value(
            Dialect::Completion,
            &json!({"prompt": [ids, [1, 2]], "n": 2}),
        )
        .unwrap();
        assert_eq!(two.choices.len(), 4);
        assert_eq!(
            two.prompt_tokens(),
            35,
            "counted once, however many choices"
        );
    }

    #[test]
    fn generate_takes_its_limits_from_the_sampling_params_and_speaks_in_ids() {
        let ids: Vec<u32> = (0..40).collect();
        let body = |params: Value| json!({"token_ids": ids, "sampling_params": params});
        let answer = parse_value(Dialect::Generate, &body(json!({"max_tokens": 1}))).unwrap();
        assert_eq!(answer.leg.tokens_max, Some(1));
        let reply = answer.reply();
        let told = reply["choices"][0]["token_ids"].as_array().unwrap();
        assert_eq!((answer.prompt_tokens(), told.len()), (40, 1));
        assert_eq!(reply["kv_transfer_params"], Value::Null);
        let wrong = body(json!({"max_tokens": 1, "min_tokens": 2}));
        assert_eq!(
            parse_value(Dialect::Generate, &wrong).unwrap_err().status,
            400
        );
        let text = json!({"token_ids": "text", "sampling_params": {}});
        assert_eq!(
            parse_value(Dialect::Generate, &text).unwrap_err().status,
            400
        );
        let mut streamed = body(json!({"max_tokens": 6}));
        streamed["stream"] = json!(true);
        let answer = parse_value(Dialect::Generate, &streamed).unwrap();
        let all = answer.reply()["choices"][0]["token_ids"].clone();
        let pieces: Vec<Value> = play(answer)
            .split("\n\n")
            .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
            .map(|chunk| chunk["choices"][0]["token_ids"][0].clone())
            .collect();
        assert_eq!(json!(pieces), all);
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn a_handover_is_for_the_first_prompt_and_its_choices() {
        let body = json!({"prompt": ["x".repeat(640), "y"], "max_tokens": 1, "n": 2,
            "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}});
        let mut answer = parse_value(Dialect::Completion, &body).unwrap();
        assert!(answer.leg.asks_for_handover() && answer.leg.tokens_max == Some(1));
        assert_eq!(answer.reply()["kv_transfer_params"], Value::Null);
        assert_eq!(answer.handover_blocks(&served()), 10);
        answer.hand_over(7, json!("told"));
        assert_eq!(answer.reply()["kv_transfer_params"], "told");
        answer.take_over();
        let sequences = answer.choices.iter().map(|choice| &choice.sequence);
        let marks: Vec<_> = sequences.map(|s| (s.kept_as, s.is_prompt_remote)).collect();
        let (kept, second) = ((Some(7), true), (None, true));
        assert_eq!(marks, [kept, second, (None, false), (None, false)]);
    }

    #[test]
    fn the_same_prompt_has_the_same_hash_whatever_is_asked_of_it() {
        let hash = |body: Value| parse_value(Dialect::Chat, &body).unwrap().prompt_hash;
        let plain = hash(json!({"messages": [user("hi")]}));
        let leg = json!({"messages": [user("hi")], "max_tokens": 1, "min_tokens": 1, "stream": false, "n": 2});
        assert_eq!(plain, hash(leg));
        assert_ne!(plain, hash(json!({"messages": [user("ho")]})));
        assert_ne!(
            plain,
            hash(json!({"messages": [user("hi")], "cache_salt": "s"}))
        );
        assert_ne!(plain, hash(json!({"messages": [user("hi")], "tools": []})));
    }

    /// Plays an answer through, as an engine would.
    fn play(answer: Answer) -> String {
        let (choices, mut out) = (answer.choices.clone(), Vec::new());
        let mut writer = EventWriter::new(answer);
        let mut is_done = false;
        for (nth, choice) in choices.iter().enumerate() {
            let nth = nth as u32;
            writer.write(
                nth,
                Event::Prefilled {
                    id: 0,
                    cached_tokens: 16,
                    is_last: false,
                },
                &mut out,
            );
            for index in 0..choice.sequence.output_tokens {
                assert!(!is_done);
                let is_last = index + 1 == choice.sequence.output_tokens;
                is_done = writer.write(
                    nth,
                    Event::Token {
                        id: 0,
                        index,
                        is_last,
                    },
                    &mut out,
                );
            }
        }
        assert!(is_done);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_stream_says_what_the_plain_reply_says() {
        for (dialect, body) in [
            (Dialect::Chat, json!({"messages": [user("hi")], "n": 2})),
            (
                Dialect::Completion,
                json!({"prompt": "hi", "n": 2, "max_tokens": 9}),
            ),
        ] {
            let mut body = body;
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
            let answer = parse_value(dialect, &body).unwrap();
            let plain = answer.reply();
            let stream = play(answer);
            let mut texts = [String::new(), String::new()];
            let mut reasons = [Value::Null, Value::Null];
            let mut usage = Value::Null;
            let mut lines: Vec<&str> = stream.split("\n\n").collect();
            assert_eq!(lines.pop(), Some(""));
            assert_eq!(lines.pop(), Some("data: [DONE]"));
            for line in lines {
                let chunk: Value =
                    serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap();
                usage = chunk["usage"].clone();
                for choice in chunk["choices"].as_array().unwrap() {
                    let nth = choice["index"].as_u64().unwrap() as usize;
                    let text = choice["text"]
                        .as_str()
                        .or(choice["delta"]["content"].as_str())
                        .unwrap();
                    texts[nth].push_str(text);
                    reasons[nth] = choice["finish_reason"].clone();
                }
            }
            for (nth, choice) in plain["choices"].as_array().unwrap().iter().enumerate() {
                let text = choice["text"]
                    .as_str()
                    .or(choice["message"]["content"].as_str())
                    .unwrap();
                assert_eq!(
                    (text, &choice["finish_reason"]),
                    (texts[nth].as_str(), &reasons[nth])
                );
            }
            assert_ne!(texts[0], texts[1], "choices differ");
            assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 16);
            let total: usize = texts
                .iter()
                .map(|text| text.len().div_ceil(TOKEN_BYTES))
                .sum();
            assert_eq!(usage["completion_tokens"], total);
        }
    }

    #[test]
    fn a_response_streams_from_created_to_completed() {
        let answer =
            parse_value(Dialect::Response, &json!({"input": "hi", "stream": true})).unwrap();
        let text = answer.choices[0].text.clone();
        let stream = play(answer);
        let events: Vec<Value> = stream
            .split("\n\n")
            .filter_map(|event| event.split_once("\ndata: "))
            .map(|(name, data)| {
                let value: Value = serde_json::from_str(data).unwrap();
                assert_eq!(name.strip_prefix("event: "), value["type"].as_str());
                value
            })
            .collect();
        assert_eq!(events[0]["type"], "response.created");
        let deltas: String = events
            .iter()
            .filter_map(|event| event["delta"].as_str())
            .collect();
        assert_eq!(deltas, text);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        assert_eq!(last["response"]["output"][0]["content"][0]["text"], text);
        assert_eq!(last["sequence_number"], events.len() - 1);
    }
}
