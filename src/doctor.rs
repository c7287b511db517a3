//! `corelane doctor`: what this machine offers, what is missing and how to enable it. Start-up asks the same questions
//! to name what stopped it. Reads `/proc` and `/sys`, and sets up small rings of its own; changes nothing.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs;
use std::process::ExitCode;

use crate::config;
use crate::ring::{self, Abilities, TaskRun};

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// The router serves, but slower or less than it could.
    Degraded,
    /// The router cannot serve.
    Missing,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Ok => "ok",
            Verdict::Degraded => "degraded",
            Verdict::Missing => "missing",
        })
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub name: &'static str,
    /// How good.
    pub verdict: Verdict,
    /// As it is.
    pub detail: String,
    /// How to make it better, where that is possible.
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, detail: impl Into<String>) -> Finding {
        Finding {
            name,
            verdict: Verdict::Ok,
            detail: detail.into(),
            remedy: None,
        }
    }

    fn bad(
        name: &'static str,
        verdict: Verdict,
        detail: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            name,
            verdict,
            detail: detail.into(),
            remedy: Some(remedy.into()),
        }
    }
}

/// Oldest kernel that has what the data plane cannot do without (provided buffer rings, multishot accept).
const KERNEL_MIN: (u32, u32) = (5, 19);
/// From here on nothing is left out (multishot receive 6.0, deferred task run 6.1).
const KERNEL_FULL: (u32, u32) = (6, 1);
/// Locked memory that glommio asks of the limit before it starts an executor.
const MEMLOCK_BYTES_MIN: u64 = 512 * 1024;
/// Connections that wait to be accepted, as the router asks for.
const BACKLOG_WANTED: u64 = 4096;

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![kernel()];
    findings.extend(io_uring_switch());
    findings.extend(rings());
    findings.push(memlock());
    findings.extend(cpus());
    findings.extend(open_files());
    findings.extend(backlog());
    findings.extend(local_ports());
    findings.extend(migration());
    findings
}

/// What keeps a router from serving, each with its remedy, for the message of a start that failed.
pub fn obstacles() -> String {
    let missing = examine()
        .into_iter()
        .filter(|finding| finding.verdict == Verdict::Missing);
    let lines = missing.map(|f| {
        format!(
            "{}: {} -> {}",
            f.name,
            f.detail,
            f.remedy.unwrap_or_default()
        )
    });
    lines.collect::<Vec<_>>().join("; ")
}

/// Whether a router can serve on this machine.
pub fn can_serve(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.verdict != Verdict::Missing)
}

/// The findings as lines for a terminal.
pub fn report(findings: &[Finding]) -> String {
    let mut text = format!("corelane {}\n\n", env!("CARGO_PKG_VERSION"));
    for finding in findings {
        text.push_str(&format!(
            "{:<9} {:<18} {}\n",
            finding.verdict, finding.name, finding.detail
        ));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("{:<9} {:<18} -> {remedy}\n", "", ""));
        }
    }
    let count = |verdict| {
        findings
            .iter()
            .filter(|finding| finding.verdict == verdict)
            .count()
    };
    let verdict = match (count(Verdict::Missing), count(Verdict::Degraded)) {
        (0, 0) => "this machine can serve, with everything".to_owned(),
        (0, degraded) => format!("this machine can serve; {degraded} of the above could be better"),
        (missing, _) => format!("this machine cannot serve: {missing} of the above missing"),
    };
    text.push_str(&format!("\n{verdict}\n"));
    text
}

/// The subcommand: prints the report. Exit code 0 when a router can serve, else 1.
pub fn run() -> ExitCode {
    let findings = examine();
    print!("{}", report(&findings));
    if can_serve(&findings) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn read(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn kernel() -> Finding {
    kernel_of(&read("/proc/sys/kernel/osrelease").unwrap_or_default())
}

fn kernel_of(release: &str) -> Finding {
    const NAME: &str = "kernel";
    match version(release) {
        None => Finding::bad(
            NAME,
            Verdict::Degraded,
            format!("'{release}' is not understood"),
            "Linux 6.1 or later is best; the lines below say what works",
        ),
        Some(found) if found < KERNEL_MIN => Finding::bad(
            NAME,
            Verdict::Missing,
            format!("Linux {release}"),
            "Linux 5.19 or later is needed, 6.1 or later is best",
        ),
        Some(found) if found < KERNEL_FULL => Finding::bad(
            NAME,
            Verdict::Degraded,
            format!("Linux {release}"),
            "6.1 or later has multishot receive and deferred task run: less CPU per request",
        ),
        Some(_) => Finding::ok(NAME, format!("Linux {release}")),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// `kernel.io_uring_disabled` (Linux 6.6): 0 all may, 1 only a group and the privileged, 2 nobody.
fn io_uring_switch() -> Option<Finding> {
    let switch = read("/proc/sys/kernel/io_uring_disabled")?;
    let group = read("/proc/sys/kernel/io_uring_group").unwrap_or_default();
    // Whether 1 hits this process is seen by setting up a ring; here it is only told.
    Some(switch_of(&switch, &group))
}

fn switch_of(switch: &str, group: &str) -> Finding {
    const NAME: &str = "io_uring switch";
    match switch {
        "0" => Finding::ok(NAME, "kernel.io_uring_disabled = 0"),
        "1" => Finding::bad(
            NAME,
            Verdict::Degraded,
            format!(
                "kernel.io_uring_disabled = 1: only group {group} and processes with CAP_SYS_ADMIN may use it"
            ),
            "sysctl -w kernel.io_uring_disabled=0, or run in that group",
        ),
        other => Finding::bad(
            NAME,
            Verdict::Missing,
            format!("kernel.io_uring_disabled = {other}: nobody may use it"),
            "sysctl -w kernel.io_uring_disabled=0",
        ),
    }
}

fn rings() -> Vec<Finding> {
    match ring::probe() {
        Err(error) => vec![refused_ring(&error, &seccomp())],
        Ok(abilities) => {
            let mut findings = vec![Finding::ok("io_uring", "a ring can be set up")];
            findings.extend(operations(&abilities));
            findings.push(task_run(abilities.task_run));
            findings
        }
    }
}

/// Why the kernel gave no ring, and what helps.
fn refused_ring(error: &std::io::Error, seccomp: &str) -> Finding {
    const NAME: &str = "io_uring";
    let remedy = match error.raw_os_error() {
        Some(libc::ENOSYS) => format!(
            "the system call is not there: an old kernel, one built without it, or a seccomp profile that hides it \
             ({seccomp}); in a container use a profile that allows io_uring_setup, io_uring_enter and io_uring_register"
        ),
        Some(libc::EPERM | libc::EACCES) => format!(
            "forbidden: by kernel.io_uring_disabled, or by a seccomp profile ({seccomp}); in a container use a profile \
             that allows io_uring_setup, io_uring_enter and io_uring_register"
        ),
        Some(libc::ENOMEM) => {
            "memory cannot be locked: raise the memlock limit (ulimit -l, LimitMEMLOCK=)".to_owned()
        }
        Some(libc::EMFILE | libc::ENFILE) => {
            "no descriptor is left: raise the limit of open files".to_owned()
        }
        _ => "see the other lines".to_owned(),
    };
    Finding::bad(NAME, Verdict::Missing, format!("no ring: {error}"), remedy)
}

/// Whether system calls of this process are filtered (proc(5), `Seccomp`).
fn seccomp() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    match status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"))
        .map(str::trim)
    {
        Some("0") => "no seccomp filter here".to_owned(),
        Some("1" | "2") => "this process has a seccomp filter".to_owned(),
        _ => "seccomp unknown".to_owned(),
    }
}

/// The operations that the data plane uses.
fn operations(abilities: &Abilities) -> Vec<Finding> {
    let list = |there: bool| {
        let named = abilities
            .operations
            .iter()
            .filter(|(_, is_there)| *is_there == there);
        named.map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    };
    let mut missing = list(false);
    if !abilities.buffer_rings {
        missing.push_str(if missing.is_empty() {
            "provided buffer rings"
        } else {
            ", provided buffer rings"
        });
    }
    let mut findings = vec![if missing.is_empty() {
        Finding::ok(
            "operations",
            format!("{}, provided buffer rings", list(true)),
        )
    } else {
        Finding::bad(
            "operations",
            Verdict::Missing,
            format!("not there: {missing}"),
            "Linux 5.19 or later has them",
        )
    }];
    findings.push(feature(
        "multishot receive",
        abilities.multishot_receive,
        "not there: one submission for each receive",
        "Linux 6.0 or later has it",
    ));
    findings.push(feature(
        "gathering of events",
        abilities.minimum_wait,
        "not there: each event of a stream wakes its core",
        "Linux 6.12 or later has it",
    ));
    findings
}

/// What saves CPU time where it is there.
fn feature(name: &'static str, is_there: bool, lack: &str, remedy: &str) -> Finding {
    match is_there {
        true => Finding::ok(name, "there"),
        false => Finding::bad(name, Verdict::Degraded, lack, remedy),
    }
}

fn task_run(found: TaskRun) -> Finding {
    const NAME: &str = "task run";
    match found {
        TaskRun::Deferred => Finding::ok(NAME, "deferred, single issuer"),
        TaskRun::Cooperative => Finding::bad(
            NAME,
            Verdict::Degraded,
            "cooperative, not deferred",
            "Linux 6.1 or later defers",
        ),
        TaskRun::Interrupting => {
            let remedy = "Linux 5.19 or later has cooperative task run";
            Finding::bad(NAME, Verdict::Degraded, "by interrupt", remedy)
        }
    }
}

fn memlock() -> Finding {
    memlock_of(config::limit("Max locked memory"))
}

fn memlock_of(limit: Option<config::Limit>) -> Finding {
    const NAME: &str = "locked memory";
    match limit {
        None => Finding::bad(
            NAME,
            Verdict::Degraded,
            "the limit cannot be read",
            "mount /proc",
        ),
        Some(config::Limit { soft: None, .. }) => Finding::ok(NAME, "unlimited"),
        Some(config::Limit {
            soft: Some(bytes), ..
        }) if bytes >= MEMLOCK_BYTES_MIN => {
            Finding::ok(NAME, format!("{} KiB a process", bytes / 1024))
        }
        Some(config::Limit {
            soft: Some(bytes), ..
        }) => Finding::bad(
            NAME,
            Verdict::Missing,
            format!(
                "{} KiB a process, {} are needed",
                bytes / 1024,
                MEMLOCK_BYTES_MIN / 1024
            ),
            "ulimit -l 8192, LimitMEMLOCK=8M in a systemd unit, or --ulimit memlock=8388608 for a container",
        ),
    }
}

fn cpus() -> Vec<Finding> {
    let Some(ids) = core_affinity::get_core_ids().filter(|ids| !ids.is_empty()) else {
        let remedy = "check the cpuset of the container or unit";
        return vec![Finding::bad(
            "CPUs",
            Verdict::Missing,
            "no CPU is allowed to this process",
            remedy,
        )];
    };
    let listed = ids
        .iter()
        .take(64)
        .map(|core| core.id.to_string())
        .collect::<Vec<_>>()
        .join(",");
    let mut findings = vec![Finding::ok(
        "CPUs",
        format!("{} allowed: {listed}", ids.len()),
    )];
    findings.extend(read("/sys/fs/cgroup/cpu.max").and_then(|quota| quota_of(&quota, ids.len())));
    findings
}

/// A CPU quota below the number of CPUs stops all cores of the router at once when it is used up.
fn quota_of(quota: &str, cpu_count: usize) -> Option<Finding> {
    let (share_us, period_us) = quota.split_once(' ')?;
    let cpus = share_us.parse::<f64>().ok()? / period_us.parse::<f64>().ok()?;
    if cpus >= cpu_count as f64 {
        return None;
    }
    Some(Finding::bad(
        "CPU quota",
        Verdict::Degraded,
        format!(
            "{cpus:.1} CPUs of {cpu_count}: when it is used up, all cores stand still for the rest of the period"
        ),
        format!(
            "--cores {}, or a cpuset in place of a quota",
            (cpus as usize).max(1)
        ),
    ))
}

fn open_files() -> Vec<Finding> {
    match config::descriptor_limits() {
        Some(limit) => open_files_of(limit),
        None => vec![Finding::bad(
            "open files",
            Verdict::Degraded,
            "the limit cannot be read",
            "mount /proc",
        )],
    }
}

fn open_files_of(limit: config::Limit) -> Vec<Finding> {
    let word = |value: Option<u64>| {
        value.map_or_else(|| "unlimited".to_owned(), |value| value.to_string())
    };
    let stream_count = config::connections_of(limit.hard.unwrap_or(u64::MAX));
    let files = Finding::ok(
        "open files",
        format!(
            "{}, can be raised to {}",
            word(limit.soft),
            word(limit.hard)
        ),
    );
    let detail = format!("at most about {stream_count} at a time: two descriptors each");
    let streams = if stream_count >= 8_000 {
        Finding::ok("streams", detail)
    } else {
        let remedy =
            "ulimit -Hn 1048576, LimitNOFILE=1048576, or --ulimit nofile=1048576 for a container";
        Finding::bad("streams", Verdict::Degraded, detail, remedy)
    };
    vec![files, streams]
}

fn backlog() -> Option<Finding> {
    const NAME: &str = "accept queue";
    let count: u64 = read("/proc/sys/net/core/somaxconn")?.parse().ok()?;
    if count >= BACKLOG_WANTED {
        return Some(Finding::ok(NAME, format!("net.core.somaxconn = {count}")));
    }
    Some(Finding::bad(
        NAME,
        Verdict::Degraded,
        format!(
            "net.core.somaxconn = {count}: a burst of more new connections a core is delayed or refused"
        ),
        format!("sysctl -w net.core.somaxconn={BACKLOG_WANTED}"),
    ))
}

/// `net.ipv4.tcp_migrate_req` (Linux 5.14): whether connections that a closing listener leaves unaccepted move to another
/// one of the port, which concerns upgrades by `--reuse-port` only.
fn migration() -> Option<Finding> {
    Some(migration_of(&read("/proc/sys/net/ipv4/tcp_migrate_req")?))
}

fn migration_of(switch: &str) -> Finding {
    let detail = format!("net.ipv4.tcp_migrate_req = {switch}");
    if switch == "1" {
        return Finding::ok("upgrades", detail);
    }
    Finding {
        remedy: Some(
            "sysctl -w net.ipv4.tcp_migrate_req=1, or inherited sockets, which need no such thing"
                .to_owned(),
        ),
        ..Finding::ok(
            "upgrades",
            format!(
                "{detail}: with --reuse-port, connections just being made as the old router closes are reset"
            ),
        )
    }
}

/// Connections to one worker's address are limited by local ports.
fn local_ports() -> Option<Finding> {
    let range = read("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut bounds = range.split_whitespace().map(str::parse::<u32>);
    let (Some(Ok(first)), Some(Ok(last))) = (bounds.next(), bounds.next()) else {
        return None;
    };
    let detail = format!(
        "{first} to {last}: at most {} connections to one worker",
        last.saturating_sub(first) + 1
    );
    Some(Finding::ok("local ports", detail))
}

#[cfg(test)]
mod tests {
    use std::io::Error;

    use super::*;
    use crate::config::Limit;

    #[test]
    fn kernels_are_judged_by_what_they_have() {
        let table = [
            ("6.18.44-x", Verdict::Ok),
            ("6.1.0", Verdict::Ok),
            ("6.0.9", Verdict::Degraded),
            ("5.19.0-50-generic", Verdict::Degraded),
            ("5.15.0", Verdict::Missing),
            ("4.18.0-553.el8", Verdict::Missing),
            ("", Verdict::Degraded),
            ("odd", Verdict::Degraded),
        ];
        for (release, verdict) in table {
            assert_eq!(kernel_of(release).verdict, verdict, "{release}");
        }
    }

    #[test]
    fn a_refused_ring_says_what_helps() {
        let remedy = |code| {
            refused_ring(&Error::from_raw_os_error(code), "no filter")
                .remedy
                .unwrap()
        };
        assert!(remedy(libc::EPERM).contains("kernel.io_uring_disabled"));
        assert!(remedy(libc::ENOSYS).contains("seccomp"));
        assert!(remedy(libc::ENOMEM).contains("memlock"));
        assert_eq!(switch_of("2", "-1").verdict, Verdict::Missing);
        assert_eq!(switch_of("1", "110").verdict, Verdict::Degraded);
        assert_eq!(switch_of("0", "").verdict, Verdict::Ok);
    }

    #[test]
    fn operations_are_told_apart() {
        let mut abilities = Abilities {
            operations: vec![("send", true), ("multishot accept", true)],
            buffer_rings: true,
            multishot_receive: true,
            minimum_wait: true,
            task_run: TaskRun::Deferred,
        };
        let all = operations(&abilities);
        assert!(
            all.iter().all(|finding| finding.verdict == Verdict::Ok),
            "{all:?}"
        );
        abilities.operations[1].1 = false;
        abilities.buffer_rings = false;
        abilities.multishot_receive = false;
        abilities.minimum_wait = false;
        let old = operations(&abilities);
        assert_eq!(
            (old[0].verdict, old[1].verdict, old[2].verdict),
            (Verdict::Missing, Verdict::Degraded, Verdict::Degraded)
        );
        assert_eq!(
            old[0].detail,
            "not there: multishot accept, provided buffer rings"
        );
    }

    #[test]
    fn limits_are_judged() {
        let limit = |bytes| {
            Some(Limit {
                soft: bytes,
                hard: None,
            })
        };
        assert_eq!(memlock_of(limit(Some(65_536))).verdict, Verdict::Missing);
        assert_eq!(memlock_of(limit(Some(8 << 20))).verdict, Verdict::Ok);
        assert_eq!(memlock_of(limit(None)).verdict, Verdict::Ok);
        let streams = open_files_of(Limit {
            soft: Some(1024),
            hard: Some(20_000),
        });
        assert!(streams[1].detail.contains("9500") && streams[1].verdict == Verdict::Ok);
        assert_eq!(
            open_files_of(Limit {
                soft: Some(1024),
                hard: Some(1024)
            })[1]
                .verdict,
            Verdict::Degraded
        );
        assert_eq!(quota_of("max 100000", 8), None);
        assert_eq!(quota_of("800000 100000", 8), None);
        assert!(
            quota_of("150000 100000", 8)
                .unwrap()
                .detail
                .contains("1.5 CPUs of 8")
        );
    }

    #[test]
    fn migration_is_told_and_never_a_fault() {
        let off = migration_of("0");
        assert!(off.verdict == Verdict::Ok && off.remedy.is_some());
        assert_eq!(migration_of("1").remedy, None);
    }

    #[test]
    fn missing_means_cannot_serve_and_the_report_says_so() {
        let good = [
            Finding::ok("a", "b"),
            Finding::bad("c", Verdict::Degraded, "d", "e"),
        ];
        assert!(can_serve(&good) && report(&good).contains("can serve; 1"));
        let bad = [Finding::bad("c", Verdict::Missing, "d", "do this")];
        assert!(!can_serve(&bad));
        assert!(report(&bad).contains("-> do this") && report(&bad).contains("cannot serve"));
    }

    /// On any machine: every question gets an answer, and none of them panics.
    #[test]
    fn this_machine_can_be_examined() {
        let findings = examine();
        for name in ["kernel", "io_uring", "locked memory", "CPUs", "open files"] {
            assert!(
                findings.iter().any(|finding| finding.name == name),
                "{name}"
            );
        }
    }
}
