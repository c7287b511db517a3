//! Settings as a file: what is in force and where it comes from, and the file that says what a command line says.

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory};

use super::file::{Said, settable};
use super::flags::{self, Notice, Verdict};
use super::{Cli, Config};

/// Who set a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody.
    Default,
    /// The file of `--config`.
    File,
    /// The environment.
    Environment,
    /// The command line.
    Line,
}

/// A flag, and what it is set to.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Long name, without dashes in front.
    pub flag: String,
    /// As it stands in a file; `None`: it has no value.
    pub value: Option<String>,
    /// Who set it.
    pub origin: Origin,
    /// The value must not show.
    pub is_secret: bool,
}

/// All flags that a file may set.
pub(super) fn settings(command: &Command, matches: &ArgMatches, said: &[Said]) -> Vec<Setting> {
    let all = settable(command).map(|(flag, arg)| {
        let is_said = said.iter().any(|said| said.flag == flag);
        Setting {
            flag: flag.to_owned(),
            value: value(arg, matches),
            origin: match matches.value_source(arg.get_id().as_str()) {
                // The file is read as arguments.
                _ if is_said => Origin::File,
                Some(ValueSource::CommandLine) => Origin::Line,
                Some(ValueSource::EnvVariable) => Origin::Environment,
                _ => Origin::Default,
            },
            is_secret: arg.is_hide_env_values_set(),
        }
    });
    all.collect()
}

/// What whoever set these should know: flags without effect, and those that mean nothing beside the others.
pub(super) fn notices(settings: &[Setting], config: &Config) -> Vec<Notice> {
    let is_set = |setting: &&Setting| {
        setting.origin != Origin::Default && setting.value.as_deref() != Some("false")
    };
    let mut notices = Vec::new();
    for setting in settings.iter().filter(is_set) {
        let flag = &setting.flag;
        let text = match flags::find(flag).map(|flag| flag.verdict) {
            Some(Verdict::NoEffect) => format!("no effect: {}", flags::why(flag)),
            _ => match idle_reason(flag, config) {
                Some(reason) => format!("no effect {reason}"),
                None => continue,
            },
        };
        notices.push(Notice {
            flag: flag.clone(),
            text,
        });
    }
    let has_key_elsewhere = std::env::var_os("OPENAI_API_KEY").is_some_and(|key| !key.is_empty());
    if has_key_elsewhere && config.pd.is_some() && config.api_key.is_none() {
        let text = "OPENAI_API_KEY is set, which vllm-router sends to prefill and decode workers; here only --api-key \
                    (CORELANE_API_KEY) is sent";
        notices.push(Notice {
            flag: "api-key".to_owned(),
            text: text.to_owned(),
        });
    }
    notices
}

/// Why a flag means nothing in this configuration.
fn idle_reason(flag: &str, config: &Config) -> Option<&'static str> {
    let is_of_pd = ["prefill-", "decode-", "pd-"]
        .iter()
        .any(|start| flag.starts_with(start))
        || flag == "kv-connector";
    if config.discovery.idle_flags.contains(&flag) {
        return Some(match flag {
            "selector" => "without --service-discovery, or with --vllm-pd-disaggregation",
            _ => "without --service-discovery and --vllm-pd-disaggregation",
        });
    }
    if is_of_pd && !flag.ends_with("selector") && config.pd.is_none() {
        return Some("without --vllm-pd-disaggregation");
    }
    let is_of_kv = flag.starts_with("kv-") && flag != "kv-connector"
        || flag == "router-temperature"
        || flag == "pd-kv-events";
    (is_of_kv && !config.uses_kv_events()).then_some("without the policy kv_aware")
}

/// The file that says what a command line says (the program's name first): what it leaves out is not in it, what is refused
/// stands there as a comment. The environment is not looked at.
///
/// # Errors
/// The line cannot be, or a value is no text; a call for help counts as such.
pub fn file_of_line<T: Into<OsString>>(
    line: impl IntoIterator<Item = T>,
) -> Result<String, clap::Error> {
    let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
    let mut command = Cli::command();
    command.build();
    let matches = command.try_get_matches_from_mut(&line)?;
    let refuse =
        |text: &str| Err(Cli::command().error(clap::error::ErrorKind::ArgumentConflict, text));
    if matches.value_source("config") == Some(ValueSource::CommandLine) {
        return refuse("--config: the settings are in a file already");
    }
    if matches.subcommand_name().is_some() {
        return refuse("flags of serving are wanted, no subcommand");
    }
    let mut out = String::new();
    for setting in settings(&command, &matches, &[]) {
        if setting.origin != Origin::Line {
            continue;
        }
        let Setting { flag, value, .. } = &setting;
        let Some(value) = value else {
            return refuse(&format!("--{flag}: the value is not UTF-8"));
        };
        let _ = match flags::find(flag).map(|row| row.verdict) {
            Some(Verdict::Refused) => {
                writeln!(out, "# refused: {}\n# {flag} = {value}", flags::why(flag))
            }
            Some(Verdict::NoEffect) => {
                writeln!(out, "# no effect: {}\n{flag} = {value}", flags::why(flag))
            }
            _ => writeln!(out, "{flag} = {value}"),
        };
    }
    Ok(out)
}

/// Everything in force, as a file: each flag with its value and who set it; what has none, and secrets, as comments.
pub fn in_force(settings: &[Setting], config: &Config) -> String {
    let derived = config.public_json();
    let mut out = String::new();
    for setting in settings {
        let Setting {
            flag,
            value,
            origin,
            is_secret,
        } = setting;
        let origin = match origin {
            Origin::Default => "default",
            Origin::File => "file",
            Origin::Environment => "environment",
            Origin::Line => "command line",
        };
        let _ = match value {
            Some(_) if *is_secret => writeln!(out, "# {flag} is set, not shown  # {origin}"),
            Some(value) => writeln!(out, "{flag} = {value}  # {origin}"),
            None => match derived.get(flag.replace('-', "_")) {
                Some(value) if !value.is_null() => {
                    writeln!(out, "# {flag} = {value}  # follows from the rest")
                }
                _ => writeln!(out, "# {flag} is not set"),
            },
        };
    }
    out
}

/// A flag's value in TOML; `None`: it has none, or one that is no text.
fn value(arg: &Arg, matches: &ArgMatches) -> Option<String> {
    let id = arg.get_id().as_str();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return Some(matches.get_flag(id).to_string());
    }
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    let raw = matches.get_raw(id);
    if raw.is_none() && is_list && matches.value_source(id).is_some() {
        return Some("[]".to_owned()); // Given without a value.
    }
    let mut texts = raw?
        .map(OsStr::to_str)
        .collect::<Option<Vec<&str>>>()?
        .into_iter();
    let is_number = is_number(arg);
    match is_list {
        true if id == "prefill" => Some(list(pairs(texts))),
        true => Some(list(texts.map(|text| scalar(text, is_number)))),
        false => texts.next().map(|text| scalar(text, is_number)),
    }
}

/// A prefill worker's URL with its port beside it.
fn pairs<'t>(texts: impl Iterator<Item = &'t str>) -> impl Iterator<Item = String> {
    let mut pairs: Vec<Vec<String>> = Vec::new();
    for text in texts {
        let is_port =
            text == "none" || (!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()));
        match pairs.last_mut() {
            Some(pair) if is_port && pair.len() == 1 => pair.push(scalar(text, true)),
            _ => pairs.push(vec![scalar(text, false)]),
        }
    }
    pairs.into_iter().map(|pair| match &pair[..] {
        [url] => url.clone(),
        _ => list(pair.into_iter()),
    })
}

fn list(values: impl Iterator<Item = String>) -> String {
    format!("[{}]", values.collect::<Vec<_>>().join(", "))
}

fn is_number(arg: &Arg) -> bool {
    let id = arg.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<i64>(),
        TypeId::of::<f64>(),
    ];
    numbers.iter().any(|number| id == *number)
}

/// A number as it was written, where TOML writes it so; else a string.
fn scalar(text: &str, is_number: bool) -> String {
    let is_plain = || {
        let digits = text.strip_prefix('-').unwrap_or(text);
        let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let is_canonical = whole == "0" || !whole.starts_with('0');
        is_digits(whole) && is_digits(part) && is_canonical && whole.len() <= 18
    };
    match is_number && is_plain() {
        true => text.to_owned(),
        false => quoted(text),
    }
}

/// A basic string of TOML.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
#[path = "show_tests.rs"]
mod tests;
