//! One connection's TLS, between the bytes of its socket and those of HTTP. Owned by the core that owns the connection.
//!
//! Invariants:
//! - **T1** What [`Session::seal`] and [`Session::receive`] put out goes to the socket in that order, and whole.
//! - **T2** Bytes after the peer's close_notify are not looked at; an end of the connection without one is a break
//!   ([`Session::has_ended`]), as anybody between could have cut it there (RFC 8446 section 6.1).

use std::io::{Read, Write};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

/// First byte of a TLS connection (RFC 8446 section 5.1: a record of the handshake).
const HANDSHAKE_RECORD: u8 = 22;

/// Why a connection cannot go on.
#[derive(Debug)]
pub enum Broken {
    /// The peer does not speak TLS: its first byte shows it.
    NotTls,
    /// TLS says so; an alert for the peer is among what goes out, where there is one.
    Tls(rustls::Error),
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Broken::NotTls => f.write_str("the peer does not speak TLS"),
            Broken::Tls(e) => e.fmt(f),
        }
    }
}

/// A connection's TLS.
pub struct Session {
    connection: Connection,
    has_begun: bool,
    has_ended: bool,
}

impl Session {
    /// For a client that has connected.
    ///
    /// # Errors
    /// rustls cannot begin one.
    pub fn of_client(config: Arc<ServerConfig>) -> Result<Session, Broken> {
        let connection = ServerConnection::new(config).map_err(Broken::Tls)?;
        Ok(Session::new(connection.into()))
    }

    /// For a connection to a worker.
    pub(super) fn to_worker(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Session, Broken> {
        let connection = ClientConnection::new(config, name).map_err(Broken::Tls)?;
        Ok(Session::new(connection.into()))
    }

    fn new(mut connection: Connection) -> Session {
        // What waits for a socket waits in its queue, where it is counted.
        connection.set_buffer_limit(None);
        Session {
            connection,
            has_begun: false,
            has_ended: false,
        }
    }

    /// What goes out first: a client's greeting.
    pub fn begin(&mut self, out: &mut Vec<u8>) {
        self.has_begun = true;
        self.take_out(out);
    }

    /// Takes what the socket brought. Adds the peer's bytes to `plain`, and what must go out to `out`, also when it fails.
    ///
    /// # Errors
    /// The connection cannot go on.
    pub fn receive(
        &mut self,
        mut sealed: &[u8],
        plain: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), Broken> {
        if !self.has_begun {
            self.has_begun = true;
            if sealed
                .first()
                .is_some_and(|first| *first != HANDSHAKE_RECORD)
            {
                return Err(Broken::NotTls);
            }
        }
        let mut result = Ok(());
        while !sealed.is_empty() && !self.has_ended && result.is_ok() {
            result = self.take_in(&mut sealed, plain);
        }
        self.take_out(out);
        result
    }

    fn take_in(&mut self, sealed: &mut &[u8], plain: &mut Vec<u8>) -> Result<(), Broken> {
        // A slice has no errors of its own: a message of the handshake is longer than rustls takes.
        let too_long = |_| Broken::Tls(rustls::Error::General("message too long".to_owned()));
        self.connection.read_tls(sealed).map_err(too_long)?;
        let state = self.connection.process_new_packets();
        let state = state.map_err(Broken::Tls)?;
        let count = state.plaintext_bytes_to_read();
        let from = plain.len();
        plain.resize(from + count, 0);
        let mut reader = self.connection.reader();
        // So many are there: it cannot fail.
        let taken = reader.read(&mut plain[from..]).unwrap_or(0);
        plain.truncate(from + taken);
        self.has_ended = state.peer_has_closed();
        Ok(())
    }

    fn take_out(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            // A vector takes everything.
            if self.connection.write_tls(out).is_err() {
                return;
            }
        }
    }

    /// Seals bytes for the peer.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        // Records of 16 KiB, each with 22 bytes around it at most (RFC 8446 section 5.2).
        out.reserve(plain.len() + (plain.len() / 16_384 + 1) * 32);
        // Unlimited as it is set up: it takes everything.
        let _ = self.connection.writer().write_all(plain);
        self.take_out(out);
    }

    /// Says that nothing more will come from us.
    pub fn close(&mut self, out: &mut Vec<u8>) {
        if !self.connection.is_handshaking() {
            self.connection.send_close_notify();
            self.take_out(out);
        }
    }

    /// Whether bytes of HTTP may go out.
    pub fn is_ready(&self) -> bool {
        !self.connection.is_handshaking()
    }

    /// Whether the peer has said that nothing more will come from it.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::{Pem, for_clients, to_workers};

    /// Both ends of a connection, made of one certificate that is its own authority.
    fn pair() -> (Session, Session) {
        let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
        let (cert, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        let pem = |flag, text: &'static str| Pem {
            flag,
            path: std::path::Path::new("file"),
            bytes: text.as_bytes(),
        };
        let (cert, key) = (pem("tls-cert", cert.leak()), pem("tls-key", key.leak()));
        let server = Session::of_client(for_clients(cert, key, None).unwrap()).unwrap();
        let name = ServerName::try_from("a.example").unwrap();
        let client = Session::to_worker(to_workers(Some(cert), None).unwrap(), name).unwrap();
        (client, server)
    }

    /// Gives `bytes` to `to` in pieces of this size: what it got out of them, and what it wants to go back.
    fn give(to: &mut Session, bytes: &[u8], piece: usize) -> (Vec<u8>, Vec<u8>) {
        let (mut plain, mut out) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            to.receive(piece, &mut plain, &mut out).unwrap();
        }
        (plain, out)
    }

    fn shake(client: &mut Session, server: &mut Session, piece: usize) {
        let mut to_server = Vec::new();
        client.begin(&mut to_server);
        while !to_server.is_empty() {
            let (_, to_client) = give(server, &to_server, piece);
            to_server = give(client, &to_client, piece).1;
        }
        assert!(client.is_ready() && server.is_ready());
    }

    #[test]
    fn however_bytes_are_split_the_same_comes_out() {
        for piece in [1, 2, 7, 1_000, 16_384, 1 << 20] {
            let (mut client, mut server) = pair();
            shake(&mut client, &mut server, piece);
            for length in [1, 16_384, 16_385, 100_000] {
                let text: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
                let mut sealed = Vec::new();
                client.seal(&text, &mut sealed);
                let is_clear = memchr::memmem::find(&sealed, &text).is_some();
                assert!(length == 1 || !is_clear, "in the clear");
                assert!(
                    give(&mut server, &sealed, piece).0 == text,
                    "{piece}, {length}"
                );
            }
        }
    }

    #[test]
    fn what_comes_behind_the_end_is_not_looked_at() {
        let (mut client, mut server) = pair();
        shake(&mut client, &mut server, 4096);
        let mut sealed = Vec::new();
        client.seal(b"last", &mut sealed);
        client.close(&mut sealed);
        sealed.extend_from_slice(b"anything");
        let (plain, _) = give(&mut server, &sealed, 4096);
        assert_eq!(plain, b"last");
        assert!(server.has_ended());
    }

    #[test]
    fn a_changed_byte_breaks_it_and_the_peer_is_told() {
        let (mut client, mut server) = pair();
        shake(&mut client, &mut server, 4096);
        let mut sealed = Vec::new();
        client.seal(b"text", &mut sealed);
        *sealed.last_mut().unwrap() ^= 1;
        let (mut plain, mut alert) = (Vec::new(), Vec::new());
        let broken = server.receive(&sealed, &mut plain, &mut alert);
        assert!(matches!(broken, Err(Broken::Tls(_))));
        assert!(plain.is_empty() && !alert.is_empty());
        assert!(client.receive(&alert, &mut plain, &mut Vec::new()).is_err());
    }
}
