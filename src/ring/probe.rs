//! What this kernel's io_uring can do, found by trying. Asked at start by each core, and by `corelane doctor`.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode};

use super::{buffers, receive_entry};

/// How completions reach a core's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskRun {
    /// When the core asks (Linux 6.1): the cheapest.
    Deferred,
    /// At the next system call (Linux 5.19).
    Cooperative,
    /// By interrupting the core.
    Interrupting,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Abilities {
    /// Names of operations that are needed, and whether they are there; empty when the kernel does not tell.
    pub operations: Vec<(&'static str, bool)>,
    /// Provided buffer rings (Linux 5.19); needed.
    pub buffer_rings: bool,
    /// Multishot receive (Linux 6.0).
    pub multishot_receive: bool,
    /// A wait for several completions that is content with one when its minimal time is over (Linux 6.12).
    pub minimum_wait: bool,
    /// Task run.
    pub task_run: TaskRun,
}

/// Looks at the kernel with small rings of its own.
///
/// # Errors
/// No ring at all can be set up: ENOSYS (not there, or hidden by seccomp), EPERM (forbidden), ENOMEM (locked memory).
pub fn probe() -> io::Result<Abilities> {
    let mut ring = IoUring::new(8)?;
    let mut probe = Probe::new();
    let operations = match ring.submitter().register_probe(&mut probe) {
        Ok(()) => operations(&probe),
        Err(_) => Vec::new(),
    };
    let multishot_receive = multishot_receive(&mut ring);
    Ok(Abilities {
        operations,
        buffer_rings: multishot_receive.is_ok(),
        multishot_receive: multishot_receive.unwrap_or(false),
        minimum_wait: minimum_wait(&ring),
        task_run: task_run(),
    })
}

fn operations(probe: &Probe) -> Vec<(&'static str, bool)> {
    let needed = [
        ("accept", opcode::Accept::CODE),
        ("receive", opcode::Recv::CODE),
        ("send", opcode::Send::CODE),
        ("connect", opcode::Connect::CODE),
        ("read", opcode::Read::CODE),
        ("poll", opcode::PollAdd::CODE),
        ("cancel", opcode::AsyncCancel::CODE),
        // Multishot accept has no code of its own; this operation came with the same kernel, 5.19.
        ("multishot accept", opcode::UringCmd16::CODE),
    ];
    needed
        .map(|(name, code)| (name, probe.is_supported(code)))
        .to_vec()
}

/// Receives one byte over a pair of sockets, multishot. An error: not even provided buffer rings work.
fn multishot_receive(ring: &mut IoUring) -> io::Result<bool> {
    let pool = buffers::Pool::new(ring, 1, 4096)?;
    let (mut ours, theirs) = UnixStream::pair()?;
    ours.write_all(b"x")?;
    let entry = receive_entry(theirs.as_raw_fd(), true);
    // SAFETY: the entry points at no memory; its buffer comes from the pool, which outlives the wait below.
    if unsafe { ring.submission().push(&entry) }.is_err() {
        return Ok(false);
    }
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().map_or(-1, |entry| entry.result());
    ring.submitter().unregister_buf_ring(buffers::GROUP)?;
    drop(pool);
    Ok(result == 1)
}

/// A kernel without it calls the field that says how long a mistake.
fn minimum_wait(ring: &IoUring) -> bool {
    let time = Timespec::new().nsec(2_000);
    let args = SubmitArgs::new().timespec(&time).min_wait_usec(1);
    let result = ring.submitter().submit_with_args(2, &args);
    !matches!(result, Err(e) if e.raw_os_error() == Some(libc::EINVAL))
}

fn task_run() -> TaskRun {
    let builds = |set: fn(&mut io_uring::Builder)| {
        let mut builder = IoUring::builder();
        set(&mut builder);
        builder.build(8).is_ok()
    };
    if builds(|b| {
        b.setup_coop_taskrun()
            .setup_single_issuer()
            .setup_defer_taskrun();
    }) {
        TaskRun::Deferred
    } else if builds(|b| {
        b.setup_coop_taskrun();
    }) {
        TaskRun::Cooperative
    } else {
        TaskRun::Interrupting
    }
}
