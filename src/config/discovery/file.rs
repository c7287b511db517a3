//! The file of `--workers-file`.
//!
//! A line is a worker: its URL, then, separated by white space and in any order, `role=regular`, `prefill` or `decode`
//! and for a prefill worker `bootstrap-port=PORT`. Empty lines, and all from a `#` that begins a word on, say nothing.

use std::path::Path;

use super::super::files::{self, Stamp};
use super::super::{WORKER_COUNT_MAX, WorkerSpec, WorkerUrl};
use crate::route::Role;

/// Largest file that is read, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// What the file said, and what it was then.
#[derive(Clone, Debug)]
pub struct WorkersFile {
    /// At least one, no two the same.
    pub workers: Vec<WorkerSpec>,
    /// Of the file that was read.
    pub stamp: Stamp,
}

/// Reads it.
///
/// # Errors
/// In words, with the line: it cannot be read, a line cannot be, or it names no worker at all. The latter is more likely a
/// file that is being written than a fleet that is to go.
pub fn read_workers_file(path: &Path, is_pd: bool) -> Result<WorkersFile, String> {
    let (bytes, stamp) = files::read(path, FILE_BYTES_MAX)?;
    let text = String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned())?;
    let workers = parse(&text, is_pd)?;
    Ok(WorkersFile { workers, stamp })
}

fn parse(text: &str, is_pd: bool) -> Result<Vec<WorkerSpec>, String> {
    let mut workers: Vec<WorkerSpec> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let at = |reason: String| format!("line {number}: {reason}");
        let words = line.split_whitespace();
        let mut words = words.take_while(|word| !word.starts_with('#'));
        let Some(url) = words.next() else {
            continue;
        };
        let worker = worker(url, words, is_pd).map_err(at)?;
        if workers.iter().any(|other| other.url == worker.url) {
            return Err(at(format!("worker URL '{url}' is listed twice")));
        }
        workers.push(worker);
        if workers.len() > WORKER_COUNT_MAX {
            return Err(at(format!("more than {WORKER_COUNT_MAX} workers")));
        }
    }
    if workers.is_empty() {
        return Err("names no worker".to_owned());
    }
    Ok(workers)
}

fn worker<'w>(
    url: &str,
    words: impl Iterator<Item = &'w str>,
    is_pd: bool,
) -> Result<WorkerSpec, String> {
    let url = WorkerUrl::parse(url).map_err(|error| error.to_string())?;
    let (mut role, mut bootstrap_port) = (None, None);
    for word in words {
        let is_new = match word.split_once('=') {
            Some(("role", name)) => role.replace(role_of(name)?).is_none(),
            Some(("bootstrap-port", port)) => {
                let port = port.parse().ok().filter(|port| *port != 0);
                let port: u16 = port.ok_or_else(|| format!("'{word}' is not a port"))?;
                bootstrap_port.replace(port).is_none()
            }
            _ => {
                return Err(format!(
                    "'{word}' is neither role=... nor bootstrap-port=..."
                ));
            }
        };
        if !is_new {
            return Err(format!("'{word}' says again what was said"));
        }
    }
    let role = role.unwrap_or(Role::Regular);
    match (is_pd, role) {
        (true, Role::Regular) => {
            return Err(
                "with --vllm-pd-disaggregation a worker needs role=prefill or role=decode"
                    .to_owned(),
            );
        }
        (false, Role::Prefill | Role::Decode) => {
            return Err(format!(
                "role={} needs --vllm-pd-disaggregation",
                role.label()
            ));
        }
        _ => {}
    }
    if bootstrap_port.is_some() && role != Role::Prefill {
        return Err("bootstrap-port is for prefill workers only".to_owned());
    }
    Ok(WorkerSpec {
        url,
        role,
        bootstrap_port,
    })
}

fn role_of(name: &str) -> Result<Role, String> {
    let role = Role::ALL.into_iter().find(|role| role.label() == name);
    role.ok_or_else(|| format!("'role={name}': choices are regular, prefill, decode"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_workers_with_role_and_port() {
        let text = "# fleet\n\nhttp://p:1 bootstrap-port=9000 role=prefill # the first\n \
                    https://d:2/x\trole=decode\r\n  # end";
        let workers = parse(text, true).unwrap();
        let shown: Vec<_> = workers
            .iter()
            .map(|w| (w.url.to_string(), w.role, w.bootstrap_port))
            .collect();
        assert_eq!(
            shown,
            [
                ("http://p:1".to_owned(), Role::Prefill, Some(9000)),
                ("https://d:2/x".to_owned(), Role::Decode, None),
            ]
        );
        let plain = parse("http://a:1\nhttp://b:1 role=regular", false).unwrap();
        assert!(plain.iter().all(|w| w.role == Role::Regular));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        let table = [
            (false, "", "names no worker"),
            (false, "# http://a:1", "names no worker"),
            (false, "http://a:1\nb:2", "line 2: worker URL 'b:2'"),
            (false, "http://a:1\n\nhttp://A:1/", "line 3: worker URL"),
            (false, "http://a:1 fast", "neither role"),
            (false, "http://a:1 role=x", "choices are"),
            (false, "http://a:1 role=prefill", "needs --vllm-pd"),
            (true, "http://a:1", "needs role=prefill"),
            (
                true,
                "http://a:1 role=decode bootstrap-port=1",
                "prefill workers only",
            ),
            (
                true,
                "http://a:1 role=prefill bootstrap-port=0",
                "not a port",
            ),
            (
                true,
                "http://a:1 role=prefill bootstrap-port=70000",
                "not a port",
            ),
            (true, "http://a:1 role=prefill role=decode", "says again"),
        ];
        for (is_pd, text, wanted) in table {
            let error = parse(text, is_pd).expect_err(text);
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
