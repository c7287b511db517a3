//! Workloads from files: Mooncake's JSON lines, Azure's CSV, prompts with their text (LMCache's agent traces), and
//! TraceLab's CSV.
//!
//! A line that is not of its format is an error that names it; rows may be in any order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::agenda::{Ns, ns};
use super::content::{Content, mix};
use super::workload::{Session, Turn, Workload};

/// Tokens of a block that Mooncake's hashes stand for.
const MOONCAKE_BLOCK: u32 = 512;
/// Characters that a token is taken for, where there is text.
const TOKEN_CHARS: usize = 4;

/// Which format a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens)
    Mooncake,
    /// CSV: TIMESTAMP,ContextTokens,GeneratedTokens; nothing is shared
    Azure,
    /// JSON lines: timestamp (us), input (text), output, session_id; a file or a folder of them
    Agent,
    /// CSV: session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms
    Tracelab,
}

/// Reads a workload.
///
/// # Errors
/// The file cannot be read, or a line is not of the format: says which.
pub fn read(path: &Path, format: Format) -> Result<Workload, String> {
    let named = |error: String| format!("{}: {error}", path.display());
    let text = |path: &Path| fs::read_to_string(path).map_err(|error| named(error.to_string()));
    match format {
        Format::Mooncake => mooncake(&text(path)?).map_err(named),
        Format::Azure => azure(&text(path)?).map_err(named),
        Format::Tracelab => tracelab(&text(path)?).map_err(named),
        Format::Agent => {
            let mut all = String::new();
            for file in files(path).map_err(|error| named(error.to_string()))? {
                all.push_str(&text(&file)?);
                all.push('\n');
            }
            agent(&all).map_err(named)
        }
    }
}

fn files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
    let mut files: Vec<PathBuf> = entries.collect::<std::io::Result<_>>()?;
    files.retain(|file| {
        file.extension()
            .is_some_and(|extension| extension == "jsonl")
    });
    files.sort();
    Ok(files)
}

/// The lines that are not empty, with their numbers.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| !line.is_empty())
}

fn of_json<'a, T: Deserialize<'a>>((number, line): (usize, &'a str)) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| format!("line {number}: {error}"))
}

#[derive(Deserialize)]
struct MooncakeRow {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

fn mooncake(text: &str) -> Result<Workload, String> {
    let rows: Result<Vec<MooncakeRow>, String> = lines(text).map(of_json).collect();
    let mut rows = rows?;
    rows.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
    let requests = rows.into_iter().map(|row| {
        let mut content = Content::default();
        for id in row.hash_ids {
            let left = row.input_length.saturating_sub(content.tokens());
            content.push(mix(0x3007, id), left.min(MOONCAKE_BLOCK));
        }
        (ns(row.timestamp / 1e3), content, row.output_length)
    });
    Ok(Workload::open(requests))
}

fn azure(text: &str) -> Result<Workload, String> {
    let mut rows = Vec::new();
    for (number, line) in lines(text).skip(1) {
        let wrong = || format!("line {number}: not TIMESTAMP,ContextTokens,GeneratedTokens");
        let mut parts = line.split(',');
        let (Some(time), Some(context), Some(generated)) =
            (parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        let tokens = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
        rows.push((
            seconds_of(time).ok_or_else(wrong)?,
            tokens(context)?,
            tokens(generated)?,
        ));
    }
    rows.sort_by(|a, b| a.0.total_cmp(&b.0));
    let first = rows.first().map_or(0.0, |row| row.0);
    let requests = rows
        .into_iter()
        .enumerate()
        .map(|(index, (at, context, generated))| {
            let mut content = Content::default();
            content.push(mix(0xa20e, index as u64), context.max(1));
            (ns(at - first), content, generated)
        });
    Ok(Workload::open(requests))
}

/// `2023-11-16 18:17:03.9799600` in seconds; only differences within a month mean anything.
fn seconds_of(time: &str) -> Option<f64> {
    let (date, clock) = time.trim().split_once(' ')?;
    let day: f64 = date.rsplit('-').next()?.parse().ok()?;
    let mut parts = clock.split(':');
    let mut part = || parts.next()?.parse::<f64>().ok();
    let (hours, minutes, seconds) = (part()?, part()?, part()?);
    Some(((day * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds)
}

#[derive(Deserialize)]
struct AgentRow {
    timestamp: f64,
    input: String,
    output: String,
    session_id: String,
}

/// Turns follow each other as long after an answer as after a turn in the trace: its gaps hold the answers, too.
fn agent(text: &str) -> Result<Workload, String> {
    let mut sessions: BTreeMap<String, Vec<AgentRow>> = BTreeMap::new();
    for line in lines(text) {
        let row: AgentRow = of_json(line)?;
        sessions
            .entry(row.session_id.clone())
            .or_default()
            .push(row);
    }
    let session = |(index, mut rows): (usize, Vec<AgentRow>)| {
        rows.sort_by(|a, b| a.timestamp.total_cmp(&b.timestamp));
        let name = mix(0xa9e7, index as u64);
        let mut content = Content::default();
        let mut turns = Vec::new();
        let mut before: Option<(f64, &str)> = None;
        for (turn, row) in rows.iter().enumerate() {
            let shared = before.map_or(0, |(_, text)| shared_bytes(text, &row.input));
            content.truncate((shared / TOKEN_CHARS) as u32);
            let total = (row.input.len() / TOKEN_CHARS).max(1) as u32;
            content.push(
                mix(name, turn as u64),
                total.saturating_sub(content.tokens()),
            );
            turns.push(Turn {
                pause: before.map_or(0, |(at, _)| ns((row.timestamp - at) / 1e6)),
                content: Arc::new(content.clone()),
                output_tokens: (row.output.len() / TOKEN_CHARS).max(1) as u32,
            });
            before = Some((row.timestamp, &row.input));
        }
        Session {
            name,
            start: 0,
            turns,
        }
    };
    Ok(Workload {
        sessions: sessions.into_values().enumerate().map(session).collect(),
        seats: None,
    })
}

fn shared_bytes(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(a, b)| a == b).count()
}

fn tracelab(text: &str) -> Result<Workload, String> {
    /// (round, arrival in s, prefix, input, output, pause after in ms)
    type Row = (u32, f64, u32, u32, u32, f64);
    let mut sessions: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for (number, line) in lines(text) {
        let parts: Vec<&str> = line.split(',').map(str::trim).collect();
        if number == 1 && parts.first() == Some(&"session_id") {
            continue;
        }
        let value = |index: usize| {
            let text = parts.get(index).copied().unwrap_or_default();
            text.parse::<f64>()
                .map_err(|_| format!("line {number}: column {} is no number", index + 1))
        };
        let row = (
            value(2)? as u32,
            value(1)?,
            value(3)? as u32,
            value(4)? as u32,
            value(5)? as u32,
            value(6)?,
        );
        sessions.entry(parts[0].to_string()).or_default().push(row);
    }
    let session = |(index, mut rows): (usize, Vec<Row>)| {
        rows.sort_by_key(|row| row.0);
        let name = mix(0x77ac, index as u64);
        let (mut content, mut pause) = (Content::default(), 0.0);
        let turns = rows.iter().map(|(round, _, prefix, input, output, after)| {
            content.truncate(*prefix);
            // What of the prefix was the answer before goes on under the name of what it answered.
            let missing = prefix - content.tokens().min(*prefix);
            let before = u64::from(round.saturating_sub(1));
            content.push(mix(name, before), missing);
            content.push(mix(name, u64::from(*round)), (*input).max(1));
            let turn = Turn {
                pause: ns(std::mem::replace(&mut pause, *after) / 1e3),
                content: Arc::new(content.clone()),
                output_tokens: (*output).max(1),
            };
            turn
        });
        Session {
            name,
            turns: turns.collect(),
            start: ns(rows.first().map_or(0.0, |row| row.1)),
        }
    };
    let mut sessions: Vec<Session> = sessions.into_values().enumerate().map(session).collect();
    sessions.sort_by_key(|session| session.start);
    let first: Ns = sessions.first().map_or(0, |session| session.start);
    sessions
        .iter_mut()
        .for_each(|session| session.start -= first);
    Ok(Workload {
        sessions,
        seats: None,
    })
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
