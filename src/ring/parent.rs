//! Ends this process with the one that started it, where that one asks for it: a program that starts a router of its own
//! must not leave it behind, however it ends.

use std::io;

/// Names the process that starts this one, by its number.
const NAME: &str = "CORELANE_PARENT_PID";

/// With `CORELANE_PARENT_PID`: from now on the end of that process is a SIGTERM for this one. (More exactly, the end of
/// the thread that started it, prctl(2): who asks for it lets that thread live.)
///
/// # Errors
/// The variable names no process, or another one than the parent, which has ended then.
pub fn end_with_parent() -> io::Result<()> {
    let Some(text) = std::env::var_os(NAME) else {
        return Ok(());
    };
    let wanted = text.to_str().and_then(|text| text.parse::<u32>().ok());
    let wanted = wanted.ok_or_else(|| {
        io::Error::other(format!("{NAME} is {text:?}, which is no process number"))
    })?;
    // SAFETY: no pointers; the second argument is a signal's number.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // It may have ended before that was said.
    match std::os::unix::process::parent_id() {
        parent if parent == wanted => Ok(()),
        parent => Err(io::Error::other(format!(
            "{NAME} is {wanted}, and the parent {parent}: the process that started this one has ended"
        ))),
    }
}
