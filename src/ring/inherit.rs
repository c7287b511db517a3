//! Descriptors that whoever started this process opened for it (the protocol of sd_listen_fds(3)).
//!
//! `LISTEN_PID` names the process that is meant, `LISTEN_FDS` says how many there are, from 3 on, and `LISTEN_FDNAMES`
//! what they are called. The variables stay as they are: a child would have another number than `LISTEN_PID`, so none
//! takes them for its own, and the descriptors are closed when one is executed. (Removing a variable is sound only while
//! no other thread reads the environment.)

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The first descriptor.
const FIRST: RawFd = 3;
/// More than any service has sockets.
const COUNT_MAX: usize = 1024;

/// One of them.
#[derive(Debug)]
pub struct Inherited {
    /// The number it came with, for messages.
    pub number: RawFd,
    /// Its name (`FileDescriptorName=` of the unit); `unknown` where none was given.
    pub name: String,
    /// The descriptor.
    pub fd: OwnedFd,
}

/// Takes what was opened for this process, closed on execution from now on. Nothing is taken twice: a second call gets
/// none. To be called before anything else is opened, so that a number that was announced in vain is nobody else's.
///
/// # Errors
/// The variables contradict themselves, or name a descriptor that is not open.
pub fn inherited() -> io::Result<Vec<Inherited>> {
    static WERE_TAKEN: AtomicBool = AtomicBool::new(false);
    let get = |name: &str| std::env::var(name).ok();
    let announced = announced(std::process::id(), get).map_err(io::Error::other)?;
    // ORDERING: Relaxed; only one caller may see `false`, and nothing else is published.
    if announced.is_empty() || WERE_TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    announced
        .into_iter()
        .map(|(number, name)| take(number, name))
        .collect()
}

fn take(number: RawFd, name: String) -> io::Result<Inherited> {
    // SAFETY: no pointers.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        let e = io::Error::last_os_error();
        let text = format!("descriptor {number} ({name}), announced by LISTEN_FDS: {e}");
        return Err(io::Error::new(e.kind(), text));
    }
    // SAFETY: it is open, whoever started us left it to this process by name, and this happens once.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    debug_assert_eq!(fd.as_raw_fd(), number);
    Ok(Inherited { number, name, fd })
}

/// Numbers and names of what the variables announce to process `pid`.
fn announced(
    pid: u32,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Vec<(RawFd, String)>, String> {
    let (Some(meant), Some(count)) = (get("LISTEN_PID"), get("LISTEN_FDS")) else {
        return Ok(Vec::new());
    };
    let meant: u32 = meant
        .parse()
        .map_err(|_| format!("LISTEN_PID is '{meant}', which is no process number"))?;
    if meant != pid {
        return Ok(Vec::new());
    }
    let count: usize = count
        .parse()
        .ok()
        .filter(|count| *count <= COUNT_MAX)
        .ok_or_else(|| format!("LISTEN_FDS is '{count}', not a number of at most {COUNT_MAX}"))?;
    let names: Vec<String> = match get("LISTEN_FDNAMES") {
        None => vec!["unknown".to_owned(); count],
        Some(_) if count == 0 => Vec::new(),
        Some(names) => names.split(':').map(str::to_owned).collect(),
    };
    if names.len() != count {
        return Err(format!(
            "LISTEN_FDNAMES has {} names for {count} descriptors",
            names.len()
        ));
    }
    Ok((FIRST..).zip(names).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pid: &str, count: &str, names: Option<&str>) -> Result<Vec<(RawFd, String)>, String> {
        announced(7, |name| match name {
            "LISTEN_PID" => Some(pid.to_owned()),
            "LISTEN_FDS" => Some(count.to_owned()),
            _ => names.map(str::to_owned),
        })
    }

    #[test]
    fn descriptors_are_those_announced_to_this_very_process() {
        let named = |list: &[(RawFd, &str)]| {
            Ok(list
                .iter()
                .map(|(fd, name)| (*fd, name.to_string()))
                .collect())
        };
        assert_eq!(of("7", "1", None), named(&[(3, "unknown")]));
        assert_eq!(
            of("7", "3", Some("a:metrics:")),
            named(&[(3, "a"), (4, "metrics"), (5, "")])
        );
        assert_eq!(of("7", "0", Some("")), named(&[]));
        assert_eq!(of("8", "1", None), named(&[]));
        assert_eq!(announced(7, |_| None), named(&[]));
    }

    #[test]
    fn variables_that_contradict_themselves_are_refused() {
        assert!(of("x", "1", None).unwrap_err().contains("LISTEN_PID"));
        for count in ["-1", "x", "", "1025"] {
            assert!(of("7", count, None).unwrap_err().contains("LISTEN_FDS"));
        }
        assert!(
            of("7", "2", Some("a"))
                .unwrap_err()
                .contains("1 names for 2")
        );
    }
}
