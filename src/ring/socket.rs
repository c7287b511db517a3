//! Sockets and descriptors for the ring: made, set up and ended with plain system calls, which are not on a request's way.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// Makes an eventfd, the doorbell wire of a core.
///
/// # Errors
/// When no descriptor is left.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the result is checked before it becomes an owned descriptor.
    unsafe {
        let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

/// Adds one to an eventfd. A failure (the counter is full) means that a wake-up is pending anyway.
pub fn signal(fd: &OwnedFd) {
    let one = 1u64;
    // SAFETY: eight bytes of a local are read.
    let _ = unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Binds one socket a core on one address with SO_REUSEPORT; [`listen`] makes them listen. Port 0 takes a free one, the
/// same for all. `beside_others`: another process may listen there already.
///
/// # Errors
/// The address is taken (without `beside_others` also by a process that set SO_REUSEPORT: two routers must not share a
/// port unknowingly), or cannot be bound.
pub fn listeners(
    address: SocketAddr,
    count: usize,
    beside_others: bool,
) -> io::Result<Vec<TcpListener>> {
    let first = bind(address, !beside_others)?;
    let address = first.local_addr()?;
    let mut all = vec![first];
    for _ in 1..count {
        all.push(bind(address, false)?);
    }
    Ok(all)
}

/// Makes a bound socket listen, with this many connections that may wait.
///
/// # Errors
/// Another process took the address in between.
pub fn listen(listener: &TcpListener, backlog: i32) -> io::Result<()> {
    SockRef::from(listener).listen(backlog)
}

fn bind(address: SocketAddr, probe: bool) -> io::Result<TcpListener> {
    let make = |reuse_port: bool, address: SocketAddr| -> io::Result<Socket> {
        let socket = Socket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        Ok(socket)
    };
    let mut address = address;
    if probe {
        // Without SO_REUSEPORT this fails if anyone listens there, whatever flags they set.
        let trial = make(false, address)?;
        trial.listen(1)?;
        address = trial.local_addr()?.as_socket().unwrap_or(address);
    }
    let socket = make(true, address)?;
    // Accepted connections inherit it (tcp(7)).
    socket.set_tcp_nodelay(true)?;
    Ok(socket.into())
}

/// Makes a listener of a descriptor that another process opened, after a look at what it is.
///
/// # Errors
/// In words: it is no TCP socket, or does not listen.
pub fn adopt_listener(fd: OwnedFd) -> Result<TcpListener, String> {
    let socket = Socket::from(fd);
    let why = |e: io::Error| match e.raw_os_error() {
        Some(libc::ENOTSOCK) => "it is no socket".to_owned(),
        _ => e.to_string(),
    };
    if socket.r#type().map_err(why)? != Type::STREAM {
        return Err("it is no stream socket".to_owned());
    }
    let domain = socket.domain().map_err(why)?;
    if domain != Domain::IPV4 && domain != Domain::IPV6 {
        return Err("it is neither an IPv4 nor an IPv6 socket".to_owned());
    }
    if socket.protocol().map_err(why)? != Some(Protocol::TCP) {
        return Err("it is no TCP socket".to_owned());
    }
    if !socket.is_listener().map_err(why)? {
        return Err("it is a TCP socket that does not listen".to_owned());
    }
    socket.set_tcp_nodelay(true).map_err(why)?;
    Ok(socket.into())
}

/// Whether a connection waits to be accepted.
pub fn has_pending(listener: &TcpListener) -> bool {
    let mut wanted = libc::pollfd {
        fd: listener.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one element of a local is read and written.
    unsafe { libc::poll(&mut wanted, 1, 0) == 1 }
}

/// Sends what is small at once. A failure says that the connection is broken, which its first receive finds out.
pub fn set_no_delay(connection: &OwnedFd) {
    let _ = SockRef::from(connection).set_tcp_nodelay(true);
}

/// A socket for an upstream connection: close-on-exec, no delay, keep-alive probes.
pub(super) fn upstream(address: &SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(
        Domain::for_address(*address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)?;
    Ok(socket.into())
}

/// Takes an accepted connection over; it has TCP_NODELAY from its listener.
pub(super) fn accepted(fd: i32) -> OwnedFd {
    // SAFETY: the descriptor came from an accept completion, and nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Ends both directions now; pending receives and sends complete. The descriptor stays ours.
pub fn shutdown(fd: &OwnedFd) {
    // SAFETY: no pointers.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Ends our direction once everything sent has left.
pub fn shutdown_write(fd: &OwnedFd) {
    // SAFETY: no pointers.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_WR) };
}

/// Makes the coming close a reset, so that the peer cannot take what it got for complete.
pub fn reset_on_close(fd: &OwnedFd) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: the option is read from a local of its own type.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of::<libc::linger>() as u32,
        );
    }
}

/// Raises the limit of open files to the hard limit and says what it is now.
pub fn raise_descriptor_limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the struct is a local of the right type; both calls only read or write it.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) != 0 {
            return 1024;
        }
        let wanted = libc::rlimit {
            rlim_cur: limit.rlim_max,
            rlim_max: limit.rlim_max,
        };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &wanted) == 0 {
            limit.rlim_max
        } else {
            limit.rlim_cur
        }
    }
}

/// Sends what the socket takes right now: bytes taken, or errno (EAGAIN: none).
pub fn send_now(fd: &OwnedFd, bytes: &[u8]) -> Result<usize, i32> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel reads `len` bytes from a live slice during the call.
    let n = unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(n).map_err(|_| {
        io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO)
    })
}
