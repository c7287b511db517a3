//! The runtime seam: one io_uring a core, inside that core's glommio executor.
//!
//! Owned by one core and used on its thread only. It is the core's one place to sleep: sockets, the doorbell's eventfd
//! and the timer's deadline all end the same wait ([`Ring::turn`]). Only this module names `io_uring`. Buffers that the
//! kernel works on are owned by the ring until their completion is in, so callers see no lifetime rule:
//! invariant R1 (a receive buffer is in the kernel's ring or in one [`Lease`]) and R2 (bytes being sent live in the
//! ring's `sends` until the kernel is done with them).

mod buffers;
mod inherit;
mod parent;
mod probe;
mod socket;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

pub use buffers::Lease;
pub use inherit::{Inherited, inherited};
pub use parent::end_with_parent;
pub use probe::{Abilities, TaskRun, probe};
pub use socket::{
    adopt_listener, eventfd, has_pending, listen, listeners, raise_descriptor_limit,
    reset_on_close, send_now, set_no_delay, shutdown, shutdown_write, signal,
};

/// One send hands over at most this much; the rest follows.
const SEND_BYTES_MAX: usize = 1 << 30;
/// A sleep that gathers ends at once when so much has happened.
const GATHER_COUNT: usize = 32;

/// Names a connection of this core: index and generation, so that a late completion never meets the next owner of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Place in the table.
    pub index: u32,
    /// How often the place has been given out, modulo 2^24.
    pub generation: u32,
}

impl Token {
    fn pack(self, kind: Kind) -> u64 {
        (kind as u64) << 56 | u64::from(self.generation & 0xff_ffff) << 32 | u64::from(self.index)
    }

    fn unpack(data: u64) -> Token {
        Token {
            index: data as u32,
            generation: (data >> 32) as u32 & 0xff_ffff,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Accept = 1,
    Receive = 2,
    Send = 3,
    Connect = 4,
    Wake = 5,
    Cancel = 6,
    Watch = 7,
}

/// What a receive brought.
#[derive(Debug)]
pub enum Received {
    /// Bytes, at least one.
    Data(Lease),
    /// The peer has ended its direction.
    End,
    /// The connection broke (errno).
    Failed(i32),
    /// No shared buffer was free: arm again, nothing is lost.
    Starved,
    /// The receive was stopped on request.
    Stopped,
}

/// What the kernel reported.
#[derive(Debug)]
#[allow(missing_docs, reason = "each variant says what its fields are")]
pub enum Event {
    /// A client connected.
    Accepted(OwnedFd),
    /// Accepting on the listener of this number stopped (errno; 0: it took one, or the kernel had enough): arm it again,
    /// after a pause if descriptors ran out.
    AcceptEnded { listener: u32, errno: i32 },
    /// A receive; `armed`: it goes on by itself.
    Received {
        token: Token,
        received: Received,
        armed: bool,
    },
    /// A send ended: bytes taken, or errno. The bytes come back.
    Sent {
        op: u32,
        token: Token,
        result: Result<usize, i32>,
        bytes: Vec<u8>,
        from: usize,
    },
    /// A connect ended (errno).
    Connected {
        op: u32,
        token: Token,
        result: Result<(), i32>,
    },
    /// Something happened to a watched connection; `broken`: it was reset, or ended in both directions.
    Watched {
        token: Token,
        armed: bool,
        broken: bool,
    },
    /// Somebody rang.
    Woken,
}

struct SendOp {
    token: Token,
    bytes: Vec<u8>,
    from: usize,
}

/// A slab of operations the kernel still works on.
struct Ops<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Ops<T> {
    fn new() -> Ops<T> {
        Ops {
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    fn insert(&mut self, op: T) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.places[index as usize] = Some(op);
                index
            }
            None => {
                self.places.push(Some(op));
                self.places.len() as u32 - 1
            }
        }
    }

    /// Takes what the kernel is done with. The number stays taken until [`Ops::release`], so that nobody who still holds
    /// it can mean another operation.
    fn take(&mut self, index: u32) -> Option<T> {
        self.places.get_mut(index as usize)?.take()
    }

    fn release(&mut self, index: u32) {
        self.free.push(index);
    }
}

/// How big a core's ring and buffers are, and what to leave unused (to try the fall-backs).
#[derive(Clone, Copy, Debug)]
pub struct RingLimits {
    /// Receive buffers.
    pub buffer_count: u16,
    /// Size of each.
    pub buffer_bytes: usize,
    /// Use multishot receive (Linux 6.0).
    pub multishot_receive: bool,
    /// Use deferred task run (Linux 6.1).
    pub defer_taskrun: bool,
}

/// One core's io_uring.
pub struct Ring {
    // Dropped first: the kernel lets go of all memory before the rest goes.
    uring: IoUring,
    pool: Rc<buffers::Pool>,
    sends: Ops<SendOp>,
    connects: Ops<(Token, Box<socket2::SockAddr>)>,
    wake: RawFd,
    wake_word: Box<u64>,
    events: VecDeque<Event>,
    multishot_receive: bool,
}

impl Ring {
    /// Sets the ring up on the calling thread, which must be the one that uses it.
    ///
    /// # Errors
    /// io_uring is missing, forbidden, or memory could not be locked. `corelane doctor` says which and what to do.
    pub fn new(limits: RingLimits, wake: &OwnedFd) -> io::Result<Ring> {
        let uring = build(limits.defer_taskrun)?;
        let pool = buffers::Pool::new(&uring, limits.buffer_count, limits.buffer_bytes)?;
        let mut ring = Ring {
            uring,
            pool,
            sends: Ops::new(),
            connects: Ops::new(),
            wake: wake.as_raw_fd(),
            wake_word: Box::new(0),
            events: VecDeque::with_capacity(256),
            multishot_receive: limits.multishot_receive,
        };
        ring.arm_wake();
        Ok(ring)
    }

    /// Accepts on a listener until told otherwise. The number is the caller's name for it.
    pub fn accept(&mut self, number: u32, listener: RawFd) {
        let entry = opcode::AcceptMulti::new(Fd(listener))
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.push(entry.user_data(accept_data(number)));
    }

    /// Accepts one connection on a listener.
    pub fn accept_one(&mut self, number: u32, listener: RawFd) {
        let (address, length) = (std::ptr::null_mut(), std::ptr::null_mut());
        let entry = opcode::Accept::new(Fd(listener), address, length)
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.push(entry.user_data(accept_data(number)));
    }

    /// Stops accepting on a listener.
    pub fn stop_accepting(&mut self, number: u32) {
        self.cancel(accept_data(number));
    }

    /// Receives on a connection until it ends, or [`Ring::stop_receiving`].
    pub fn receive(&mut self, token: Token, fd: &OwnedFd) {
        let entry = receive_entry(fd.as_raw_fd(), self.multishot_receive);
        self.push(entry.user_data(token.pack(Kind::Receive)));
    }

    /// Asks for an end of the receive; what is in flight still arrives, then [`Received::Stopped`].
    pub fn stop_receiving(&mut self, token: Token) {
        self.cancel(token.pack(Kind::Receive));
    }

    /// Sends all of the bytes, however long the peer takes. One send a connection at a time keeps them in order. The
    /// number names the operation for [`Ring::cancel_send`].
    pub fn send(&mut self, token: Token, fd: &OwnedFd, bytes: Vec<u8>, from: usize) -> u32 {
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        // The vector moves into the slab; the heap block it points at stays where it is.
        let (start, len) = (
            bytes[from..].as_ptr(),
            (bytes.len() - from).min(SEND_BYTES_MAX) as u32,
        );
        let index = self.sends.insert(SendOp { token, bytes, from });
        let entry = opcode::Send::new(Fd(fd.as_raw_fd()), start, len)
            .flags(flags)
            .build();
        self.push(entry.user_data((Kind::Send as u64) << 56 | u64::from(index)));
        index
    }

    /// Gives a send up; it still completes.
    pub fn cancel_send(&mut self, index: u32) {
        self.cancel((Kind::Send as u64) << 56 | u64::from(index));
    }

    /// Makes a socket and begins to connect it.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn connect(&mut self, token: Token, address: &SocketAddr) -> io::Result<(OwnedFd, u32)> {
        let fd = socket::upstream(address)?;
        let address = Box::new(socket2::SockAddr::from(*address));
        let (start, len) = (address.as_ptr(), address.len());
        let index = self.connects.insert((token, address));
        let entry = opcode::Connect::new(Fd(fd.as_raw_fd()), start.cast(), len).build();
        self.push(entry.user_data((Kind::Connect as u64) << 56 | u64::from(index)));
        Ok((fd, index))
    }

    /// Watches a connection for a reset (or both directions' end), without taking bytes from it.
    pub fn watch(&mut self, token: Token, fd: &OwnedFd) {
        // No event is asked for: errors and hang-ups are always reported (poll(2)). io_uring adds the peer's own end
        // (POLLRDHUP) to every poll, which has come already; multishot reports it once and goes on to the next.
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), 0)
            .multi(true)
            .build();
        self.push(entry.user_data(token.pack(Kind::Watch)));
    }

    /// Gives a watch up; it still completes.
    pub fn cancel_watch(&mut self, token: Token) {
        self.cancel(token.pack(Kind::Watch));
    }

    /// Gives a connect up; it still completes.
    pub fn cancel_connect(&mut self, index: u32) {
        self.cancel((Kind::Connect as u64) << 56 | u64::from(index));
    }

    /// Hands all pending work to the kernel and sleeps until something happens or the time is over. The only place where a core sleeps. What happens within the first `gather` is taken together, when that is over
    /// or a good deal has happened; later, the first of it ends the sleep. (Needs [`Abilities::minimum_wait`]; else zero.)
    ///
    /// # Errors
    /// The ring itself is broken; the core cannot go on.
    pub fn turn(&mut self, sleep: Duration, gather: Duration) -> io::Result<()> {
        match self.enter(sleep, gather) {
            Ok(()) => {}
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) => {}
            Err(e) => return Err(e),
        }
        self.collect();
        Ok(())
    }

    /// How much has happened and has not been taken.
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Next of what happened.
    pub fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        match event {
            Event::Sent { op, .. } => self.sends.release(op),
            Event::Connected { op, .. } => self.connects.release(op),
            _ => {}
        }
        Some(event)
    }

    fn enter(&mut self, sleep: Duration, gather: Duration) -> io::Result<()> {
        if sleep.is_zero() {
            return self.uring.submitter().submit_and_wait(0).map(drop);
        }
        let want = if gather.is_zero() { 1 } else { GATHER_COUNT };
        let time = Timespec::new()
            .sec(sleep.as_secs())
            .nsec(sleep.subsec_nanos());
        let gather_us = gather.as_micros() as u32;
        let args = SubmitArgs::new().timespec(&time).min_wait_usec(gather_us);
        self.uring
            .submitter()
            .submit_with_args(want, &args)
            .map(drop)
    }

    fn collect(&mut self) {
        loop {
            let Some(entry) = self.uring.completion().next() else {
                return;
            };
            let (data, result, flags) = (entry.user_data(), entry.result(), entry.flags());
            match (data >> 56) as u8 {
                k if k == Kind::Receive as u8 => self.received(Token::unpack(data), result, flags),
                k if k == Kind::Send as u8 => self.sent(data as u32, result),
                k if k == Kind::Accept as u8 => self.accepted(data as u32, result, flags),
                k if k == Kind::Connect as u8 => self.connected(data as u32, result),
                k if k == Kind::Watch as u8 => {
                    let broken = result < 0 || result as i16 & (libc::POLLERR | libc::POLLHUP) != 0;
                    self.events.push_back(Event::Watched {
                        token: Token::unpack(data),
                        armed: cqueue::more(flags),
                        broken,
                    });
                }
                k if k == Kind::Wake as u8 => {
                    self.events.push_back(Event::Woken);
                    self.arm_wake();
                }
                _ => {}
            }
        }
    }

    fn received(&mut self, token: Token, result: i32, flags: u32) {
        let lease =
            cqueue::buffer_select(flags).map(|id| self.pool.lease(id, result.max(0) as usize));
        let received = match (result, lease) {
            (1.., Some(lease)) => Received::Data(lease),
            (0.., _) => Received::End,
            (e, _) if e == -libc::ENOBUFS => {
                self.pool.grow();
                Received::Starved
            }
            (e, _) if e == -libc::ECANCELED => Received::Stopped,
            (e, _) => Received::Failed(-e),
        };
        self.events.push_back(Event::Received {
            token,
            received,
            armed: cqueue::more(flags),
        });
    }

    fn sent(&mut self, index: u32, result: i32) {
        let Some(op) = self.sends.take(index) else {
            return;
        };
        let result = if result < 0 {
            Err(-result)
        } else {
            Ok(result as usize)
        };
        self.events.push_back(Event::Sent {
            op: index,
            token: op.token,
            result,
            bytes: op.bytes,
            from: op.from,
        });
    }

    fn accepted(&mut self, listener: u32, result: i32, flags: u32) {
        if result >= 0 {
            self.events
                .push_back(Event::Accepted(socket::accepted(result)));
        }
        if !cqueue::more(flags) {
            let errno = -result.min(0);
            self.events
                .push_back(Event::AcceptEnded { listener, errno });
        }
    }

    fn connected(&mut self, index: u32, result: i32) {
        let Some((token, _)) = self.connects.take(index) else {
            return;
        };
        let result = if result < 0 { Err(-result) } else { Ok(()) };
        self.events.push_back(Event::Connected {
            op: index,
            token,
            result,
        });
    }

    fn arm_wake(&mut self) {
        let word: *mut u64 = &mut *self.wake_word;
        let entry = opcode::Read::new(Fd(self.wake), word.cast(), 8).build();
        self.push(entry.user_data((Kind::Wake as u64) << 56));
    }

    fn cancel(&mut self, data: u64) {
        let entry = opcode::AsyncCancel2::new(CancelBuilder::user_data(data)).build();
        self.push(entry.user_data((Kind::Cancel as u64) << 56));
    }

    fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: every pointer in an entry leads into `sends`, `connects`, `wake_word` or the pool, all of which
            // keep their memory in place until the completion has been taken (R1, R2).
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                return;
            }
            // Full: hand over what is there. An error (EBUSY: completions must be taken first) is met by taking them.
            if self.uring.submit().is_err() {
                self.collect();
            }
        }
    }
}

fn accept_data(listener: u32) -> u64 {
    (Kind::Accept as u64) << 56 | u64::from(listener)
}

/// A receive into one of the pool's buffers.
fn receive_entry(fd: RawFd, multishot: bool) -> squeue::Entry {
    if multishot {
        return opcode::RecvMulti::new(Fd(fd), buffers::GROUP).build();
    }
    opcode::Recv::new(Fd(fd), std::ptr::null_mut(), 0)
        .buf_group(buffers::GROUP)
        .build()
        .flags(squeue::Flags::BUFFER_SELECT)
}

/// Tries the best setup first and leaves single features out on older kernels.
fn build(defer_taskrun: bool) -> io::Result<IoUring> {
    const ENTRIES: u32 = 1024;
    const COMPLETIONS: u32 = 16 * 1024;
    let mut last = None;
    for attempt in 0..3 {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS).setup_clamp();
        if attempt < 2 {
            // The flag tells a turn that does not sleep that completions are waiting to be brought in.
            builder.setup_coop_taskrun().setup_taskrun_flag();
        }
        if attempt < 1 && defer_taskrun {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        match builder.build(ENTRIES) {
            Ok(ring) => return Ok(ring),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = Some(e),
            Err(e) => return Err(e),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EINVAL)))
}

#[cfg(test)]
mod tests;
