//! Tells the service manager how this process is (the protocol of sd_notify(3)): one datagram to `NOTIFY_SOCKET`.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::io;
use std::net;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The router drains.
pub const STOPPING: &str = "STOPPING=1";

/// The router accepts: with a line for `systemctl status`, and its addresses for a program that started it with port 0.
pub fn ready(
    address: net::SocketAddr,
    metrics: net::SocketAddr,
    admin: Option<net::SocketAddr>,
) -> String {
    let mut text = format!(
        "READY=1\nSTATUS=Listening on {address}, metrics on {metrics}\n\
         X_CORELANE_ADDRESS={address}\nX_CORELANE_METRICS_ADDRESS={metrics}"
    );
    if let Some(admin) = admin {
        text.push_str(&format!("\nX_CORELANE_ADMIN_ADDRESS={admin}"));
    }
    text
}

/// Sends a state, if somebody wants to know. A failure is logged: a router that serves is not ended for it.
pub fn send(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(e) = send_to(&socket, state) {
        tracing::warn!("{state} cannot be told to NOTIFY_SOCKET: {e}");
    }
}

fn send_to(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let from = UnixDatagram::unbound()?;
    // The control thread must not wait for a manager that does not read.
    from.set_nonblocking(true)?;
    from.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_reaches_an_abstract_name() {
        let name = format!("corelane-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        send_to(OsStr::new(&format!("@{name}")), STOPPING).unwrap();
        let mut text = [0; 16];
        let n = manager.recv(&mut text).unwrap();
        assert_eq!(&text[..n], STOPPING.as_bytes());
        assert!(send_to(OsStr::new("/nowhere/at/all"), STOPPING).is_err());
    }
}
