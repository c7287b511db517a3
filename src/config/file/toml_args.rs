//! From TOML to arguments. Pure.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::settable;

/// What the file says of one flag.
#[derive(Debug)]
pub struct Said {
    /// Long name, without dashes in front.
    pub flag: String,
    /// Clap's name for it.
    pub id: String,
    /// Where, from 1.
    pub line: usize,
    /// The same as arguments; none: a switch that is off, or a list without members where there must be some.
    pub args: Vec<OsString>,
    /// The value must not show.
    pub is_secret: bool,
}

/// What is wrong, and where if it is known.
#[derive(Debug)]
pub struct Fault {
    /// From 1.
    pub line: Option<usize>,
    /// In words, with the key.
    pub reason: String,
}

/// Reads the file's text.
///
/// # Errors
/// The first thing that is no TOML, or the first key in alphabetical order that is not the name of a flag, or whose
/// value is of a kind the flag does not take.
pub fn read(text: &str, command: &Command) -> Result<Vec<Said>, Fault> {
    let line_of = |at: usize| {
        1 + text.as_bytes()[..at]
            .iter()
            .filter(|b| **b == b'\n')
            .count()
    };
    let table = DeTable::parse(text).map_err(|error| Fault {
        line: error.span().map(|span| line_of(span.start)),
        // Not the error's own display: that shows the line.
        reason: format!("not TOML: {}", error.message()),
    })?;
    let mut all: Vec<Said> = Vec::new();
    for (key, value) in table.get_ref() {
        let line = line_of(key.span().start);
        let fault = |reason: String| Fault {
            line: Some(line),
            reason,
        };
        let flag = key.get_ref().replace('_', "-");
        if matches!(value.get_ref(), DeValue::Table(_)) {
            return Err(fault(format!("'{flag}' is a table: keys are flat")));
        }
        let found = settable(command).find(|(name, _)| *name == flag);
        let (_, arg) = found.ok_or_else(|| fault(unknown(key.get_ref(), &flag, command)))?;
        if all.iter().any(|other| other.flag == flag) {
            return Err(fault(format!("key '{flag}' is given twice")));
        }
        let args = args(&flag, arg, value).map_err(|why| fault(format!("key '{flag}': {why}")))?;
        all.push(Said {
            id: arg.get_id().to_string(),
            line,
            args,
            is_secret: arg.is_hide_env_values_set(),
            flag,
        });
    }
    Ok(all)
}

fn unknown(key: &str, flag: &str, command: &Command) -> String {
    if matches!(flag, "config" | "help" | "version") {
        return format!("'{key}' cannot be set in the file");
    }
    // Clap knows what is like it.
    let error = command
        .clone()
        .try_get_matches_from(["corelane", &format!("--{flag}")]);
    let error = error.err();
    match error
        .as_ref()
        .and_then(|e| e.get(ContextKind::SuggestedArg))
    {
        Some(ContextValue::String(like)) => format!(
            "unknown key '{key}'; is '{}' meant?",
            like.trim_start_matches('-')
        ),
        _ => format!("unknown key '{key}': keys are the flags of `corelane --help`"),
    }
}

fn args(flag: &str, arg: &Arg, value: &Spanned<DeValue>) -> Result<Vec<OsString>, String> {
    let value = value.get_ref();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return match value {
            DeValue::Boolean(true) => Ok(vec![format!("--{flag}").into()]),
            DeValue::Boolean(false) => Ok(Vec::new()),
            _ => Err("must be true or false".to_owned()),
        };
    }
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    let mut texts = Vec::new();
    match value {
        DeValue::Array(_) if !is_list => return Err("takes one value, not an array".to_owned()),
        value => collect(value, &mut texts)?,
    }
    let may_be_bare = arg.get_num_args().is_some_and(|n| n.min_values() == 0);
    if texts.is_empty() && may_be_bare {
        return Ok(vec![format!("--{flag}").into()]);
    }
    let args = texts.iter().map(|text| format!("--{flag}={text}").into());
    Ok(args.collect())
}

/// The texts of a value. A list within a list is what stands together: for `prefill`, a URL and its port.
fn collect(value: &DeValue, texts: &mut Vec<String>) -> Result<(), String> {
    texts.push(match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => i128::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| "is too large a number".to_owned())?
            .to_string(),
        DeValue::Float(number) => number.as_str().to_owned(),
        DeValue::Array(values) => {
            return values
                .iter()
                .try_for_each(|value| collect(value.get_ref(), texts));
        }
        DeValue::Boolean(_) => return Err("takes a text or a number, not a boolean".to_owned()),
        DeValue::Datetime(_) => return Err("takes a text or a number, not a date".to_owned()),
        DeValue::Table(_) => return Err("takes a text or a number, not a table".to_owned()),
    });
    Ok(())
}
