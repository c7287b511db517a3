//! Where the router listens: on addresses it binds, or on sockets that were opened for it (by systemd, or whoever speaks
//! its protocol) and that the next router will listen on too.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};

use crate::config::Config;
use crate::ring::{self, Inherited};

/// Connections that may wait to be accepted, a core; the kernel caps it at `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// Name of the inherited descriptor that Prometheus is served on.
const METRICS_NAME: &str = "metrics";
/// Name of the one that the admin paths are served on.
const ADMIN_NAME: &str = "admin";

/// Why the router cannot listen.
#[derive(Debug)]
pub enum ListenError {
    /// An address cannot be bound.
    Bind(SocketAddr, io::Error),
    /// A descriptor that was opened for the router cannot be listened on.
    Inherited(String),
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenError::Bind(address, e) if e.kind() == io::ErrorKind::AddrInUse => write!(
                f,
                "cannot listen on {address}: {e}; --reuse-port starts beside a router of the same user that is to end"
            ),
            ListenError::Bind(address, e) => write!(f, "cannot listen on {address}: {e}"),
            ListenError::Inherited(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for ListenError {}

/// The router's listeners.
pub struct Listeners {
    /// For clients, by core.
    pub data: Vec<Vec<TcpListener>>,
    /// Those were inherited.
    pub is_data_inherited: bool,
    /// For Prometheus; it listens.
    pub metrics: TcpListener,
    /// That one was inherited.
    pub is_metrics_inherited: bool,
    /// For the admin paths, if they have one of their own; it listens.
    pub admin: Option<TcpListener>,
    /// That one was inherited.
    pub is_admin_inherited: bool,
}

impl Listeners {
    /// Takes the inherited sockets, and binds what was not among them: those for clients do not listen before
    /// [`listen`].
    ///
    /// # Errors
    /// An address cannot be bound, or a descriptor is not a listening TCP socket; that one is named.
    pub fn open(
        config: &Config,
        inherited: Vec<Inherited>,
        core_count: usize,
    ) -> Result<Listeners, ListenError> {
        let mut data = inherited;
        let metrics = take_one(&mut data, METRICS_NAME)?;
        let admin = take_one(&mut data, ADMIN_NAME)?;
        let data = data.into_iter().map(adopt).collect::<Result<Vec<_>, _>>()?;
        let is_data_inherited = !data.is_empty();
        let is_metrics_inherited = metrics.is_some();
        let is_admin_inherited = admin.is_some();
        let bind = |address, count| {
            ring::listeners(address, count, config.reuse_port)
                .map_err(|e| ListenError::Bind(address, e))
        };
        let data = if is_data_inherited {
            report(&data, "--host and --port");
            share(&data, core_count).map_err(|e| ListenError::Inherited(e.to_string()))?
        } else {
            let own = bind(config.listen, core_count)?;
            own.into_iter().map(|listener| vec![listener]).collect()
        };
        let side = |found: Option<TcpListener>, ignored, address| match found {
            Some(found) => {
                report(std::slice::from_ref(&found), ignored);
                Ok(found)
            }
            None => {
                let own = bind(address, 1)?.remove(0);
                ring::listen(&own, BACKLOG).map_err(|e| ListenError::Bind(address, e))?;
                Ok(own)
            }
        };
        let metrics = side(
            metrics,
            "--prometheus-host and --prometheus-port",
            config.metrics_listen,
        )?;
        let admin = match (admin, config.admin_listen) {
            (None, None) => None,
            // With a socket there is no address to bind.
            (found, address) => Some(side(
                found,
                "--admin-host and --admin-port",
                address.unwrap_or(config.metrics_listen),
            )?),
        };
        Ok(Listeners {
            data,
            is_data_inherited,
            metrics,
            is_metrics_inherited,
            admin,
            is_admin_inherited,
        })
    }
}

/// From here on clients can connect to the sockets that were bound to this address.
///
/// # Errors
/// Another process has taken the address since it was bound.
pub fn listen(data: &[Vec<TcpListener>], address: SocketAddr) -> Result<(), ListenError> {
    let mut own = data.iter().flatten();
    own.try_for_each(|own| ring::listen(own, BACKLOG))
        .map_err(|e| ListenError::Bind(address, e))
}

/// Takes the one of this name out, if there is one.
fn take_one(sockets: &mut Vec<Inherited>, name: &str) -> Result<Option<TcpListener>, ListenError> {
    let mut found = sockets.extract_if(.., |socket| socket.name == name);
    let (first, second) = (found.next(), found.next());
    if second.is_some() {
        let text = format!("more than one descriptor is named '{name}'");
        return Err(ListenError::Inherited(text));
    }
    drop(found);
    first.map(adopt).transpose()
}

fn adopt(socket: Inherited) -> Result<TcpListener, ListenError> {
    let Inherited { number, name, fd } = socket;
    ring::adopt_listener(fd).map_err(|why| {
        ListenError::Inherited(format!(
            "descriptor {number} ({name}) is not a listening TCP socket: {why}"
        ))
    })
}

/// Every core accepts on every socket, so that none depends on one core, however many there are of either.
fn share(sockets: &[TcpListener], core_count: usize) -> io::Result<Vec<Vec<TcpListener>>> {
    for socket in sockets {
        // The flag is the socket's: one who has it set makes io_uring give up instead of waiting for a connection.
        socket.set_nonblocking(false)?;
    }
    (0..core_count)
        .map(|_| sockets.iter().map(TcpListener::try_clone).collect())
        .collect()
}

fn report(sockets: &[TcpListener], ignored: &str) {
    for socket in sockets {
        let address = socket.local_addr().map(|address| address.to_string());
        let address = address.unwrap_or_else(|e| e.to_string());
        tracing::info!(%address, "listening on an inherited socket; {ignored} are ignored");
    }
}
