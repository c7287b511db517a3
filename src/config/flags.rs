#![doc = include_str!("flags.md")]
//!
//! The table is what is read here, too: reasons of refusals and notices are its last column.

use std::fmt;

/// The table as it is written.
const TABLE: &str = include_str!("flags.md");

/// Which of vllm-router's programs has a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The Python launcher.
    Python,
    /// The Rust binary.
    Rust,
    /// Either.
    Both,
}

/// What becomes of a flag of vllm-router here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The same meaning.
    Same,
    /// The same purpose; the reason says what is otherwise.
    Better,
    /// Taken, and said at start.
    NoEffect,
    /// It ends the start.
    Refused,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// Long name, without dashes in front.
    pub name: &'static str,
    /// Who has it.
    pub program: Program,
    /// What becomes of it.
    pub verdict: Verdict,
    /// Why, or what is otherwise; empty where there is nothing to say.
    pub why: &'static str,
}

/// Something that whoever starts the router should know of what was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Long name of the flag, without dashes in front.
    pub flag: String,
    /// In words.
    pub text: String,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--{}: {}", self.flag, self.text)
    }
}

/// All rows, in the table's order. A row that cannot be read is left out; a test sees to it that there is none.
pub fn all() -> impl Iterator<Item = Flag> {
    rows().filter_map(read)
}

/// The row of a flag, by long name.
pub fn find(name: &str) -> Option<Flag> {
    all().find(|flag| flag.name == name)
}

/// The reason of a flag's row in plain words; of one that is as another, the other's.
pub fn why(name: &str) -> String {
    let Some(flag) = find(name) else {
        return String::new();
    };
    match flag
        .why
        .strip_prefix("as `--")
        .and_then(|rest| rest.strip_suffix('`'))
    {
        Some(other) if other != name => why(other),
        _ => flag.why.replace('`', ""),
    }
}

fn rows() -> impl Iterator<Item = &'static str> {
    TABLE.lines().filter(|line| line.starts_with("| `--"))
}

fn read(row: &'static str) -> Option<Flag> {
    let mut cells = row
        .strip_prefix('|')?
        .strip_suffix('|')?
        .split('|')
        .map(str::trim);
    let name = cells.next()?.strip_prefix("`--")?.strip_suffix('`')?;
    let program = match cells.next()? {
        "Python" => Program::Python,
        "Rust" => Program::Rust,
        "both" => Program::Both,
        _ => return None,
    };
    let verdict = match cells.next()? {
        "same" => Verdict::Same,
        "better" => Verdict::Better,
        "no effect" => Verdict::NoEffect,
        "refused" => Verdict::Refused,
        _ => return None,
    };
    let why = cells.next()?;
    cells.next().is_none().then_some(Flag {
        name,
        program,
        verdict,
        why,
    })
}

#[cfg(test)]
#[path = "flags_tests.rs"]
mod tests;
