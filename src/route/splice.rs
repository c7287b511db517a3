//! What differs in the bodies of a request's two legs when one worker computes its prompt (prefill) and another its
//! answer (decode), and what of prefill's answer the client has to see in decode's. Runs on the core that has the
//! request; everything else in a body stays byte for byte as the client or the worker wrote it.
//!
//! A request is walked once, by [`plan`], over the members of its object and of its `sampling_params`; the writers only
//! copy between the places that were found. What the legs need: `reference/vllm-router.md` sections 4.3 and 4.8.
//!
//! Invariants:
//! - L1 no body that is written has a `kv_transfer_params` that its client put there: it names blocks of other requests.
//! - L2 of two members of one name the last counts to the worker, so every edit is made to all of them.
//! - L3 [`UsageFilter`] gives the same bytes however its input is cut, and never waits once an event is whole.
//!
//! What can fail: [`plan`], on a body that never passed `scan`; [`read_prefill_answer`], on an answer that is not JSON,
//! which the exchange counts as the prefill worker's fault. An answer whose usage cannot be read goes through as it is.

use std::borrow::Cow;
use std::ops::Range;

use super::scan::{Field, Member, ScanError, first_element, members, walk};
use crate::shared::Route;

/// Why a request goes to one decode worker as a whole. The transfer parameters of a prefill answer serve one sequence,
/// once; and the decode worker never computes the prompt's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// `n` or `best_of` above 1: vLLM makes as many sequences of the request.
    SeveralChoices,
    /// `use_beam_search`: one sequence per beam and step.
    BeamSearch,
    /// `prompt_logprobs`, which need the prompt's logits; 0 asks for them too.
    PromptLogprobs,
    /// `echo`: the prompt is part of the answer, with its logprobs if asked for.
    Echo,
    /// Several prompts: one sequence for each.
    Batch,
    /// `prompt_embeds`: a prompt without token ids.
    Embeds,
}

impl Whole {
    /// All, in the order of their numbers.
    pub const ALL: [Whole; 6] = [
        Whole::SeveralChoices,
        Whole::BeamSearch,
        Whole::PromptLogprobs,
        Whole::Echo,
        Whole::Batch,
        Whole::Embeds,
    ];

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Whole::SeveralChoices => "several_choices",
            Whole::BeamSearch => "beam_search",
            Whole::PromptLogprobs => "prompt_logprobs",
            Whole::Echo => "echo",
            Whole::Batch => "batch",
            Whole::Embeds => "embeds",
        }
    }
}

/// One request's edits, for all bodies that may have to be written of it.
#[derive(Debug)]
pub struct LegPlan {
    whole: Option<Whole>,
    prefill: Leg,
    decode: Leg,
    /// The object's `}`.
    close: usize,
    body_bytes: usize,
}

impl LegPlan {
    /// `None`: it can be split. Else it cannot, and [`write_decode`] without parameters gives the body to send.
    pub fn whole(&self) -> Option<Whole> {
        self.whole
    }

    /// How many bytes [`write_prefill`] or [`write_release`] will append, with parameters of that length.
    pub fn prefill_bytes(&self, kv_params_bytes: usize) -> usize {
        self.prefill.bytes(self.body_bytes, Some(kv_params_bytes))
    }

    /// How many bytes [`write_decode`] will append, with parameters of that length.
    pub fn decode_bytes(&self, kv_params_bytes: Option<usize>) -> usize {
        self.decode.bytes(self.body_bytes, kv_params_bytes)
    }
}

/// Looks for what a split needs to know and to change. `body` has passed `scan`.
///
/// Whether it can be split is answered on the safe side: an odd value (`"n":"2"`, which Python takes for a number) makes
/// it whole, and the worker says what it thinks of it.
///
/// # Errors
/// Only for what `scan` refuses.
pub fn plan(route: Route, body: &[u8]) -> Result<LegPlan, ScanError> {
    let mut planner = Planner {
        route,
        body,
        whole: None,
        has_limit: false,
        last_end: 0,
        prefill: Leg::default(),
        decode: Leg::default(),
    };
    let end = members(body, 0, |name, member| planner.member(name, member))?;
    Ok(planner.finish(end - 1))
}

/// Appends the prefill leg's body: one token, no stream, and the parameters that make the worker keep its blocks.
/// `kv_params` is a JSON object.
pub fn write_prefill(body: &[u8], plan: &LegPlan, kv_params: &[u8], out: &mut Vec<u8>) {
    plan.prefill.write(body, plan.close, Some(kv_params), out);
}

/// Appends the decode leg's body: the client's own, with prefill's parameters. `None` if there are none; the worker then
/// computes the prompt itself.
pub fn write_decode(body: &[u8], plan: &LegPlan, kv_params: Option<&[u8]>, out: &mut Vec<u8>) {
    plan.decode.write(body, plan.close, kv_params, out);
}

/// Appends the body of a decode leg that nobody waits for: its one token is the cheapest way to have the blocks fetched
/// that the prefill worker keeps for it, and so freed.
pub fn write_release(body: &[u8], plan: &LegPlan, kv_params: &[u8], out: &mut Vec<u8>) {
    plan.prefill.write(body, plan.close, Some(kv_params), out);
}

/// Bytes `at` of a body become `put`.
#[derive(Debug)]
struct Edit<'p> {
    at: Range<usize>,
    put: Cow<'p, [u8]>,
}

impl<'p> Edit<'p> {
    fn cut(at: Range<usize>) -> Edit<'p> {
        Edit {
            at,
            put: Cow::Borrowed(b""),
        }
    }

    fn replace(value: Field, put: &'p [u8]) -> Edit<'p> {
        Edit {
            at: value.start..value.end,
            put: Cow::Borrowed(put),
        }
    }

    fn insert(at: usize, put: Vec<u8>) -> Edit<'p> {
        Edit {
            at: at..at,
            put: Cow::Owned(put),
        }
    }
}

/// `edits` are in order and do not overlap.
fn copy_edited(body: &[u8], edits: &[Edit<'_>], out: &mut Vec<u8>) {
    let mut at = 0;
    for edit in edits {
        out.extend_from_slice(body.get(at..edit.at.start).unwrap_or_default());
        out.extend_from_slice(&edit.put);
        at = edit.at.end;
    }
    out.extend_from_slice(body.get(at..).unwrap_or_default());
}

const KV_NAME: &[u8] = br#""kv_transfer_params":"#;

/// The edits of one leg, collected from the body's start to its end.
#[derive(Debug, Default)]
struct Leg {
    edits: Vec<Edit<'static>>,
    has_members: bool,
    /// Members taken away while none was kept: which comma goes with them is known only at the next one.
    leading_cut: Option<Range<usize>>,
    /// A member to append, for a limit that does not stand in the body.
    limit: Option<&'static [u8]>,
}

impl Leg {
    fn keep(&mut self, member: Member) {
        if let Some(cut) = self.leading_cut.take() {
            self.edits.push(Edit::cut(cut.start..member.start));
        }
        self.has_members = true;
    }

    /// `last_end` is where the member before this one ends: the comma between them goes too.
    fn cut(&mut self, member: Member, last_end: usize) {
        let end = member.value.end;
        if self.has_members {
            self.edits.push(Edit::cut(last_end..end));
        } else {
            let start = self
                .leading_cut
                .take()
                .map_or(member.start, |cut| cut.start);
            self.leading_cut = Some(start..end);
        }
    }

    fn finish(&mut self) {
        self.edits.extend(self.leading_cut.take().map(Edit::cut));
    }

    fn write(&self, body: &[u8], close: usize, kv_params: Option<&[u8]>, out: &mut Vec<u8>) {
        let (before, after) = body.split_at_checked(close).unwrap_or_default();
        copy_edited(before, &self.edits, out);
        let mut needs_comma = self.has_members;
        if let Some(limit) = self.limit {
            push_comma(needs_comma, out);
            out.extend_from_slice(limit);
            needs_comma = true;
        }
        if let Some(kv_params) = kv_params {
            push_comma(needs_comma, out);
            out.extend_from_slice(KV_NAME);
            out.extend_from_slice(kv_params);
        }
        out.extend_from_slice(after);
    }

    /// What `write` appends.
    fn bytes(&self, body_bytes: usize, kv_params_bytes: Option<usize>) -> usize {
        let cut: usize = self.edits.iter().map(|edit| edit.at.len()).sum();
        let put: usize = self.edits.iter().map(|edit| edit.put.len()).sum();
        let limit = self.limit.map(<[u8]>::len);
        let kv_params = kv_params_bytes.map(|bytes| KV_NAME.len() + bytes);
        let added_count = usize::from(limit.is_some()) + usize::from(kv_params.is_some());
        let commas = added_count.saturating_sub(usize::from(!self.has_members));
        body_bytes - cut + put + limit.unwrap_or(0) + kv_params.unwrap_or(0) + commas
    }
}

fn push_comma(is_needed: bool, out: &mut Vec<u8>) {
    if is_needed {
        out.push(b',');
    }
}

struct Planner<'b> {
    route: Route,
    body: &'b [u8],
    whole: Option<Whole>,
    /// A field that limits the answer of this route stands at the top level; of `InferenceGenerate`, `sampling_params`.
    has_limit: bool,
    last_end: usize,
    prefill: Leg,
    decode: Leg,
}

impl Planner<'_> {
    fn member(&mut self, name: &[u8], member: Member) {
        match name {
            b"kv_transfer_params" => {
                self.prefill.cut(member, self.last_end);
                self.decode.cut(member, self.last_end);
            }
            b"stream_options" => {
                self.prefill.cut(member, self.last_end);
                self.decode.keep(member);
            }
            _ => {
                self.prefill.keep(member);
                self.decode.keep(member);
                self.edit_value(name, member.value);
                self.judge(name, member.value);
            }
        }
        self.last_end = member.value.end;
    }

    fn edit_value(&mut self, name: &[u8], value: Field) {
        match name {
            b"stream" if is_set(value.raw(self.body)) => {
                self.prefill.edits.push(Edit::replace(value, b"false"));
            }
            b"sampling_params" => self.sampling_params(value),
            _ => {
                self.has_limit |= is_limit_of(self.route, name);
                self.edit_length(name, value);
            }
        }
    }

    /// The fields that say how long the answer is: prefill's is one token.
    fn edit_length(&mut self, name: &[u8], value: Field) {
        let is_edited = match name {
            b"max_tokens" | b"max_completion_tokens" | b"max_output_tokens" => true,
            b"min_tokens" => is_whole_above_one(value.raw(self.body)),
            _ => false,
        };
        if is_edited {
            self.prefill.edits.push(Edit::replace(value, b"1"));
        }
    }

    /// Only a value that is no object and not null is left as it is: the worker refuses it.
    fn sampling_params(&mut self, value: Field) {
        let is_needed = self.route == Route::InferenceGenerate;
        let (mut has_limit, mut is_empty) = (false, true);
        let body = self.body;
        let end = members(body, value.start, |name, member| {
            is_empty = false;
            has_limit |= name == b"max_tokens";
            self.edit_length(name, member.value);
            self.judge_sampling(name, member.value);
        });
        self.has_limit |= is_needed;
        if !is_needed || has_limit {
            return;
        }
        if value.raw(body) == b"null" {
            let limited = Edit::replace(value, br#"{"max_tokens":1}"#);
            self.prefill.edits.push(limited);
        } else if let Ok(end) = end {
            let limit: &[u8] = if is_empty {
                br#""max_tokens":1"#
            } else {
                br#","max_tokens":1"#
            };
            self.prefill
                .edits
                .push(Edit::insert(end - 1, limit.to_vec()));
        }
    }

    fn judge(&mut self, name: &[u8], value: Field) {
        match name {
            b"prompt" => self.judge_prompt(value),
            b"input_ids" | b"text" if self.route == Route::Generate => self.judge_prompt(value),
            b"prompt_embeds" => self.whole_if(value.raw(self.body) != b"null", Whole::Embeds),
            b"echo" => self.whole_if(is_set(value.raw(self.body)), Whole::Echo),
            _ => self.judge_sampling(name, value),
        }
    }

    /// Several prompts are an array of strings, or of arrays of token ids; an array of numbers is one prompt.
    fn judge_prompt(&mut self, value: Field) {
        if let Some((first, has_more)) = first_element(self.body, value) {
            let is_prompt = matches!(self.body.get(first.start), Some(b'"' | b'[' | b'{'));
            self.whole_if(is_prompt && has_more, Whole::Batch);
        }
    }

    fn judge_sampling(&mut self, name: &[u8], value: Field) {
        let raw = value.raw(self.body);
        match name {
            b"n" | b"best_of" => self.whole_if(!is_at_most_one(raw), Whole::SeveralChoices),
            b"use_beam_search" => self.whole_if(is_set(raw), Whole::BeamSearch),
            b"prompt_logprobs" => self.whole_if(raw != b"null", Whole::PromptLogprobs),
            _ => {}
        }
    }

    fn whole_if(&mut self, is_whole: bool, reason: Whole) {
        if is_whole {
            self.whole.get_or_insert(reason);
        }
    }

    fn finish(mut self, close: usize) -> LegPlan {
        self.prefill.finish();
        self.decode.finish();
        if !self.has_limit {
            self.prefill.limit = Some(missing_limit_of(self.route));
        }
        LegPlan {
            whole: self.whole,
            prefill: self.prefill,
            decode: self.decode,
            close,
            body_bytes: self.body.len(),
        }
    }
}

/// Top-level names; those of `/inference/v1/generate` stand in its `sampling_params`.
fn is_limit_of(route: Route, name: &[u8]) -> bool {
    match route {
        Route::Responses => name == b"max_output_tokens",
        Route::ChatCompletions => name == b"max_tokens" || name == b"max_completion_tokens",
        Route::InferenceGenerate => false,
        _ => name == b"max_tokens",
    }
}

fn missing_limit_of(route: Route) -> &'static [u8] {
    match route {
        Route::Responses => br#""max_output_tokens":1"#,
        Route::InferenceGenerate => br#""sampling_params":{"max_tokens":1}"#,
        _ => br#""max_tokens":1"#,
    }
}

/// Whether a flag may be taken for true: pydantic takes 1 and `"yes"` too.
fn is_set(raw: &[u8]) -> bool {
    raw != b"false" && raw != b"null"
}

/// `None` for what is no number of RFC 8259.
fn number(raw: &[u8]) -> Option<f64> {
    if !matches!(raw.first(), Some(b'-' | b'0'..=b'9')) {
        return None;
    }
    let value: f64 = std::str::from_utf8(raw).ok()?.parse().ok()?;
    value.is_finite().then_some(value)
}

/// `2`, and `2.0` and `2e0`, which pydantic takes for it.
fn is_whole_above_one(raw: &[u8]) -> bool {
    number(raw).is_some_and(|value| value > 1.0 && value.fract() == 0.0)
}

fn is_at_most_one(raw: &[u8]) -> bool {
    raw == b"null" || number(raw).is_some_and(|value| value <= 1.0)
}

/// What a prefill worker's answer is read for, as raw values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillAnswer {
    /// The object to hand to the decode worker.
    pub kv_transfer_params: Option<Field>,
    /// Of `usage`: `prompt_tokens` or `input_tokens`, unless null.
    pub prompt_tokens: Option<Field>,
    /// Of `usage`: `prompt_tokens_details` or `input_tokens_details`, unless null.
    pub prompt_tokens_details: Option<Field>,
}

/// Reads the whole answer of a prefill worker.
///
/// # Errors
/// It is not a JSON object, or not all of one.
pub fn read_prefill_answer(body: &[u8]) -> Result<PrefillAnswer, ScanError> {
    let mut answer = PrefillAnswer::default();
    walk(body, |name, member| match name {
        b"kv_transfer_params" => {
            let is_object = body.get(member.value.start) == Some(&b'{');
            answer.kv_transfer_params = is_object.then_some(member.value);
        }
        b"usage" => answer.read_usage(body, member.value),
        _ => {}
    })?;
    Ok(answer)
}

impl PrefillAnswer {
    fn read_usage(&mut self, body: &[u8], usage: Field) {
        (self.prompt_tokens, self.prompt_tokens_details) = (None, None);
        // A usage that is no object has no members to show; the figures are then unknown.
        let _ = members(body, usage.start, |name, member| {
            let place = match name {
                b"prompt_tokens" | b"input_tokens" => &mut self.prompt_tokens,
                b"prompt_tokens_details" | b"input_tokens_details" => {
                    &mut self.prompt_tokens_details
                }
                _ => return,
            };
            *place = (member.value.raw(body) != b"null").then_some(member.value);
        });
    }
}

/// What prefill counted. To decode the whole prompt looks cached, since it got it from another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageFix {
    prompt_tokens: u64,
    /// Without line breaks: it may go into a line of an event stream.
    details: Option<Vec<u8>>,
}

impl UsageFix {
    /// `body` is the one `answer` was read from. `None` if prefill did not count the prompt's tokens.
    pub fn new(body: &[u8], answer: &PrefillAnswer) -> Option<UsageFix> {
        let prompt_tokens = count(answer.prompt_tokens?.raw(body))?;
        let details = answer.prompt_tokens_details.map(|details| {
            let is_break = |byte: u8| byte == b'\n' || byte == b'\r';
            let bytes = details.raw(body).iter();
            // Inside a string they would be written with escapes, so this is white space.
            bytes
                .map(|b| if is_break(*b) { b' ' } else { *b })
                .collect()
        });
        Some(UsageFix {
            prompt_tokens,
            details,
        })
    }

    /// `usage` need not be an object.
    fn edit<'f>(&'f self, body: &[u8], usage: Field, edits: &mut Vec<Edit<'f>>) {
        let mut prompts: Vec<(Field, &[u8])> = Vec::new();
        let mut details = Vec::new();
        let mut totals = Vec::new();
        let shown = members(body, usage.start, |name, member| match name {
            b"prompt_tokens" => prompts.push((member.value, br#","prompt_tokens_details":"#)),
            b"input_tokens" => prompts.push((member.value, br#","input_tokens_details":"#)),
            b"prompt_tokens_details" | b"input_tokens_details" => details.push(member.value),
            b"total_tokens" => totals.push(member.value),
            _ => {}
        });
        let Some((last, details_name)) = prompts.last().copied().filter(|_| shown.is_ok()) else {
            return;
        };
        let Some(counted) = count(last.raw(body)) else {
            return;
        };
        for (prompt, _) in prompts {
            edits.push(replace_count(prompt, self.prompt_tokens));
        }
        for total in totals {
            let rest = count(total.raw(body)).and_then(|all| all.checked_sub(counted));
            let fixed = rest.and_then(|rest| rest.checked_add(self.prompt_tokens));
            edits.extend(fixed.map(|fixed| replace_count(total, fixed)));
        }
        let Some(own_details) = &self.details else {
            return;
        };
        if details.is_empty() {
            let added = [details_name, own_details].concat();
            edits.push(Edit::insert(last.end, added));
        }
        edits.extend(details.iter().map(|at| Edit::replace(*at, own_details)));
    }
}

fn replace_count(value: Field, count: u64) -> Edit<'static> {
    Edit {
        at: value.start..value.end,
        put: Cow::Owned(count.to_string().into_bytes()),
    }
}

fn count(raw: &[u8]) -> Option<u64> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

/// Puts prefill's figures into the `usage` of a JSON object: a whole answer, or one `data:` of a stream, where
/// `/v1/responses` has it in `response`. Appends the whole object to `out`; nothing, and `false`, when there is no usage
/// with a count of the prompt's tokens in it, or `body` is not JSON.
///
/// `total_tokens` changes by as much as the prompt's. Details that prefill did not give stay decode's.
pub fn fix_usage(body: &[u8], fix: &UsageFix, out: &mut Vec<u8>) -> bool {
    let mut edits = Vec::new();
    let walked = walk(body, |name, member| match name {
        b"usage" => fix.edit(body, member.value, &mut edits),
        b"response" => {
            // It may be anything; what is no object has no usage.
            let _ = members(body, member.value.start, |name, member| {
                if name == b"usage" {
                    fix.edit(body, member.value, &mut edits);
                }
            });
        }
        _ => {}
    });
    if walked.is_err() || edits.is_empty() {
        return false;
    }
    edits.sort_by_key(|edit| edit.at.start);
    copy_edited(body, &edits, out);
    true
}

/// The longest event, its blank line included, that [`UsageFilter`] looks into.
pub const USAGE_EVENT_BYTES_MAX: usize = 256 * 1024;

/// [`fix_usage`] for an event stream, as its bytes come. Whole events leave at once, and of an event that is not whole
/// no more than [`USAGE_EVENT_BYTES_MAX`] is held; a longer one passes as it is.
///
/// Lines end with a line feed, after a carriage return or not; vLLM writes no other. A JSON text that goes over several
/// `data:` lines is not looked into.
#[derive(Debug)]
pub struct UsageFilter {
    fix: UsageFix,
    /// The start of an event whose end has not come.
    held: Vec<u8>,
    /// The line that has not ended.
    line: Line,
    /// The start of the event has passed already, so the rest of it does.
    is_passing: bool,
    has_fixed: bool,
}

/// What a line has so far. It is blank if it ends as either of the first two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    Empty,
    Return,
    Text,
}

impl Line {
    fn with(self, bytes: &[u8]) -> Line {
        match (self, bytes) {
            (_, []) => self,
            (Line::Empty, b"\r") => Line::Return,
            _ => Line::Text,
        }
    }
}

impl UsageFilter {
    /// At the start of a stream.
    pub fn new(fix: UsageFix) -> UsageFilter {
        UsageFilter {
            fix,
            held: Vec::new(),
            line: Line::Empty,
            is_passing: false,
            has_fixed: false,
        }
    }

    /// Whether any event was changed so far.
    pub fn has_fixed(&self) -> bool {
        self.has_fixed
    }

    /// Takes the next bytes, appends what can go on.
    pub fn feed(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut rest = bytes;
        while let Some(end) = self.event_end(rest) {
            let (event, after) = rest.split_at(end);
            self.end_event(event, out);
            rest = after;
        }
        self.hold(rest, out);
    }

    /// The stream has ended, or broken off: appends what was held.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        self.end_event(&[], out);
        self.line = Line::Empty;
    }

    /// One past the blank line that ends the event, if it ends in `bytes`.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut start = 0;
        for end in memchr::memchr_iter(b'\n', bytes) {
            let line = self.line.with(&bytes[start..end]);
            self.line = Line::Empty;
            start = end + 1;
            if line != Line::Text {
                return Some(start);
            }
        }
        self.line = self.line.with(&bytes[start..]);
        None
    }

    /// `bytes` are the last of the event.
    fn end_event(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if std::mem::take(&mut self.is_passing) {
            out.extend_from_slice(bytes);
        } else if self.held.is_empty() {
            self.has_fixed |= write_event(bytes, &self.fix, out);
        } else {
            self.held.extend_from_slice(bytes);
            self.has_fixed |= write_event(&self.held, &self.fix, out);
            self.held.clear();
        }
    }

    fn hold(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.is_passing {
            out.extend_from_slice(bytes);
            return;
        }
        self.held.extend_from_slice(bytes);
        // The length of the event alone decides, so that it does not matter in which pieces it came.
        if self.held.len() > USAGE_EVENT_BYTES_MAX {
            out.append(&mut self.held);
            self.held = Vec::new();
            self.is_passing = true;
        }
    }
}

/// Whether it was changed.
fn write_event(event: &[u8], fix: &UsageFix, out: &mut Vec<u8>) -> bool {
    if event.len() > USAGE_EVENT_BYTES_MAX || !has_usage_object(event) {
        out.extend_from_slice(event);
        return false;
    }
    let mut has_fixed = false;
    for line in event.split_inclusive(|byte| *byte == b'\n') {
        match line.split_at_checked(DATA.len()) {
            // The line's end, and the blank after the colon, are white space to JSON.
            Some((DATA, payload)) => {
                out.extend_from_slice(DATA);
                if fix_usage(payload, fix, out) {
                    has_fixed = true;
                } else {
                    out.extend_from_slice(payload);
                }
            }
            _ => out.extend_from_slice(line),
        }
    }
    has_fixed
}

const DATA: &[u8] = b"data:";

/// Nearly every event is answered by the search alone. Those of a stream that was asked for usage have a null in it.
fn has_usage_object(event: &[u8]) -> bool {
    const NAME: &[u8] = br#""usage""#;
    memchr::memmem::find_iter(event, NAME).any(|at| {
        let after = event[at + NAME.len()..].trim_ascii_start();
        let value = after.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
        value.is_some_and(|value| value.starts_with(b"{"))
    })
}

#[cfg(test)]
#[path = "splice_tests.rs"]
mod tests;
