//! The file of `--config`: flat TOML whose keys are the long names of the flags, with `-` or `_`.
//!
//! What it says is handed to clap as further arguments, for those flags that neither the command line nor the
//! environment sets. So ranges, choices and messages are the flags' own, and a flag is known here once it is known there.
//! No value of a secret flag, and no line of the file, shows in a message.

pub(super) mod toml_args;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};

use super::flags::Notice;
use super::show::{self, Setting};
use super::{Cli, Config};
pub(super) use toml_args::Said;

/// A command line and the file it names, or that of `CORELANE_CONFIG`: what a configuration is read from, as often as
/// wanted. The environment is that of the process.
#[derive(Clone, Debug)]
pub struct Source {
    line: Vec<OsString>,
    path: Option<PathBuf>,
}

/// A configuration, and the settings it came from.
pub struct Loaded {
    /// What they mean.
    pub config: Config,
    /// What they are.
    pub keys: Keys,
    /// The same flag by flag, with who set it.
    pub settings: Vec<Setting>,
    /// What whoever starts the router should know of them.
    pub notices: Vec<Notice>,
}

/// The value of each flag as it was written, secrets among them: to be compared, never shown.
pub struct Keys(BTreeMap<String, Vec<OsString>>);

impl Keys {
    /// Flags, without dashes in front, that have other values in `other`.
    pub fn changed(&self, other: &Keys) -> Vec<String> {
        let is_other = |flag: &&String| self.0.get(*flag) != other.0.get(*flag);
        self.0.keys().filter(is_other).cloned().collect()
    }
}

/// Why there is no configuration: one line, with file, line and key where it is the file's fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    place: Option<String>,
    reason: String,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place}: {}", self.reason),
            None => f.write_str(&self.reason),
        }
    }
}

impl std::error::Error for LoadError {}

impl Source {
    /// Of a command line, the program's name first.
    ///
    /// # Errors
    /// The line or a variable of the environment cannot be; a call for help counts as such.
    pub fn new<T: Into<OsString>>(
        line: impl IntoIterator<Item = T>,
    ) -> Result<Source, clap::Error> {
        let line: Vec<OsString> = line.into_iter().map(Into::into).collect();
        let matches = Cli::command().try_get_matches_from(&line)?;
        let path = matches.get_one::<PathBuf>("config").cloned();
        Ok(Source { line, path })
    }

    /// The file, if there is one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Reads it all, the file as it is now.
    ///
    /// # Errors
    /// The file cannot be read or is no TOML, a key is unknown, or a value cannot be.
    pub fn load(&self) -> Result<Loaded, LoadError> {
        let mut command = Cli::command();
        command.build();
        let of_line = |error: clap::Error| LoadError {
            place: None,
            reason: bare(&error.to_string()),
        };
        let typed = command
            .try_get_matches_from_mut(&self.line)
            .map_err(of_line)?;
        let mut said = self.read_file(&command)?;
        said.retain(|said| is_unset(&typed, &said.id));
        // In front of the rest, so that a line that ends with `--` or a list is what it was.
        let mut line = self.line.clone();
        let at = line.len().min(1);
        line.splice(at..at, said.iter().flat_map(|said| said.args.clone()));
        let matches = command
            .try_get_matches_from_mut(&line)
            .map_err(|error| self.blame_clap(&error, &said))?;
        let keys = keys(&command, &matches);
        let settings = show::settings(&command, &matches, &said);
        let cli = Cli::from_arg_matches(&matches).map_err(of_line)?;
        let config = Config::from_cli(cli)
            .map_err(|error| self.blame(error.flag, bare(&error.to_string()), &said))?;
        Ok(Loaded {
            notices: show::notices(&settings, &config),
            settings,
            config,
            keys,
        })
    }

    fn read_file(&self, command: &Command) -> Result<Vec<Said>, LoadError> {
        let Some(path) = self.path() else {
            return Ok(Vec::new());
        };
        let text = std::fs::read_to_string(path).map_err(|error| LoadError {
            place: Some(path.display().to_string()),
            reason: format!("cannot be read: {error}"),
        })?;
        toml_args::read(&text, command).map_err(|fault| self.at(fault.line, fault.reason))
    }

    fn at(&self, line: Option<usize>, reason: String) -> LoadError {
        let place = self.path().map(|path| match line {
            Some(line) => format!("{}, line {line}", path.display()),
            None => path.display().to_string(),
        });
        LoadError { place, reason }
    }

    /// Clap names the argument; if the file gave it, the file is named.
    fn blame_clap(&self, error: &clap::Error, said: &[Said]) -> LoadError {
        let argument = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(argument)) => argument.trim_start_matches('-'),
            _ => "",
        };
        let flag = argument.split([' ', '=']).next().unwrap_or("");
        let is_secret = said.iter().any(|said| said.flag == flag && said.is_secret);
        let reason = match is_secret {
            // Clap repeats what it refuses.
            true => "the value cannot be (it is not shown)".to_owned(),
            false => bare(&error.to_string()),
        };
        self.blame(flag, reason, said)
    }

    fn blame(&self, flag: &str, reason: String, said: &[Said]) -> LoadError {
        match said.iter().find(|said| said.flag == flag) {
            None => LoadError {
                place: None,
                reason,
            },
            Some(said) => self.at(Some(said.line), format!("key '{flag}': {reason}")),
        }
    }
}

/// Whether neither the command line nor the environment gives it.
fn is_unset(typed: &ArgMatches, id: &str) -> bool {
    matches!(
        typed.value_source(id),
        None | Some(ValueSource::DefaultValue)
    )
}

/// The flags that a file may set, by long name.
pub(super) fn settable(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let flags = command
        .get_arguments()
        .filter_map(|arg| Some((arg.get_long()?, arg)));
    flags.filter(|(flag, _)| !matches!(*flag, "config" | "help" | "version"))
}

fn keys(command: &Command, matches: &ArgMatches) -> Keys {
    let value_of = |arg: &Arg| {
        let raw = matches.get_raw(arg.get_id().as_str());
        raw.map_or(Vec::new(), |raw| raw.map(Into::into).collect())
    };
    let all = settable(command).map(|(flag, arg)| (flag.to_owned(), value_of(arg)));
    Keys(all.collect())
}

/// What clap says, in one line and without the frame.
fn bare(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let text = text.split("\n\nFor more information").next().unwrap_or("");
    let text = text.split("\n\nUsage:").next().unwrap_or("");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
