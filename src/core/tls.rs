//! TLS on a core's connections: what a socket brings is unsealed before the exchange sees it, what the exchange sends is
//! sealed before it waits for the socket. Everything else (queues, holding, retries, time limits) is the same as without,
//! and counts sealed bytes.

use std::io;

use super::table::{Outgoing, Use, is_upstream};
use super::{Core, Turn};
use crate::ring::{Lease, Token, send_now};
use crate::tls::{Broken, Session};

/// What a client gets that speaks plain HTTP where TLS is spoken.
const NOT_TLS: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 112\r\n\
    Connection: close\r\n\r\n\
    {\"error\":{\"message\":\"plain HTTP where HTTPS is served\",\"type\":\"invalid_request_error\",\
    \"code\":\"https_required\"}}\n";

/// Bytes of a peer, as they reach the exchange.
#[derive(Debug)]
pub enum Piece {
    /// In the buffer they were received into.
    Received(Lease),
    /// As TLS gave them out.
    Unsealed(Vec<u8>),
}

impl AsRef<[u8]> for Piece {
    #[inline]
    fn as_ref(&self) -> &[u8] {
        match self {
            Piece::Received(lease) => lease.as_ref(),
            Piece::Unsealed(bytes) => bytes,
        }
    }
}

impl Core {
    /// What TLS lies on a connection that begins, if any is to. An error: it could not be made, and that has been said.
    pub(super) fn tls_session(
        &mut self,
        made: Option<Result<Session, Broken>>,
    ) -> Result<Option<Box<Session>>, ()> {
        let made = made.transpose().map_err(|e| {
            self.complain("no TLS session", &io::Error::other(e.to_string()));
        })?;
        Ok(made.map(Box::new))
    }

    /// Works off what came on a connection with TLS.
    pub(super) fn unseal(&mut self, turn: Turn<'_>, token: Token, sealed: Lease) {
        let (mut plain, mut out) = (Vec::new(), self.shelf.take());
        let Some(wire) = self.wire(token) else { return };
        let Some(tls) = &mut wire.tls else { return };
        if tls.has_ended() {
            return; // T2
        }
        let was_ready = tls.is_ready();
        let result = tls.receive(sealed.as_ref(), &mut plain, &mut out);
        let (is_ready, has_ended) = (tls.is_ready(), tls.has_ended());
        drop(sealed);
        if let Err(broken) = result {
            return self.tls_broke(turn, token, &broken, &out);
        }
        self.send_sealed(token, out);
        if is_ready && !was_ready {
            self.stats().tls_handshakes.add(1);
            self.greeted(turn, token);
        }
        if !plain.is_empty() {
            self.data(turn, token, Piece::Unsealed(plain));
        }
        let is_open = |core: &mut Core| core.wire(token).is_some_and(|w| w.is_open && !w.is_dead);
        if has_ended && is_open(self) {
            self.ended(turn, token, false);
        }
    }

    /// The socket's end. With TLS it says nothing about the peer's: that has told before, or the end is a cut.
    pub(super) fn cut(&mut self, turn: Turn<'_>, token: Token) {
        let Some(wire) = self.wire(token) else { return };
        let has_tls = wire.tls.is_some();
        let has_ended = wire.tls.as_ref().is_some_and(|tls| tls.has_ended());
        if has_ended {
            wire.is_open = false;
            return;
        }
        // Many clients that have got their answer just go; only a worker's bytes may be measured by its end.
        self.ended(turn, token, has_tls && is_upstream(token));
    }

    fn tls_broke(&mut self, turn: Turn<'_>, token: Token, broken: &Broken, alert: &[u8]) {
        self.stats().tls_failures.add(1);
        let is_upstream = is_upstream(token);
        let last = match broken {
            Broken::NotTls if !is_upstream => NOT_TLS,
            _ => alert,
        };
        // The last that goes out, if there is room for it: nothing waits for that.
        if let Some(wire) = self.wire(token)
            && !wire.is_sending
            && wire.queue.is_empty()
            && let Some(fd) = &wire.fd
        {
            let _ = send_now(fd, last);
        }
        if is_upstream {
            self.complain("TLS to a worker", &io::Error::other(broken.to_string()));
        } else {
            tracing::debug!(core = self.index, "TLS of a client: {broken}");
        }
        self.ended(turn, token, true);
    }

    /// Begins TLS on a connection to a worker that has just been made; `false`: it speaks plain HTTP.
    pub(super) fn greet(&mut self, token: Token) -> bool {
        let mut out = self.shelf.take();
        let tls = self.wire(token).and_then(|wire| wire.tls.as_mut());
        let Some(tls) = tls else {
            self.shelf.put(out);
            return false;
        };
        tls.begin(&mut out);
        self.send_sealed(token, out);
        true
    }

    /// A handshake is done: a worker's connection is one now.
    fn greeted(&mut self, turn: Turn<'_>, token: Token) {
        if let Some(Use::Leg(client)) = self.ups.find(token).map(|up| up.usage) {
            self.with_session(turn, client, |session, hands| session.on_connected(hands));
        }
    }

    /// Bytes as they go out on this connection; `None`: as they are.
    pub(super) fn seal(&mut self, token: Token, plain: &[u8]) -> Option<Vec<u8>> {
        self.wire(token)?.tls.as_ref()?;
        let mut sealed = self.shelf.take();
        let tls = self.wire(token).and_then(|wire| wire.tls.as_mut());
        tls?.seal(plain, &mut sealed);
        Some(sealed)
    }

    /// Sends what TLS put out.
    pub(super) fn send_sealed(&mut self, token: Token, sealed: Vec<u8>) {
        let taken = match sealed.is_empty() {
            true => 0,
            false => self.offer(token, &sealed),
        };
        if taken < sealed.len() {
            let (bytes, from) = (sealed, taken);
            self.queue(token, Outgoing { bytes, from });
        } else {
            self.shelf.put(sealed);
        }
    }

    /// Tells a worker that nothing more will come, if there is room for it now.
    pub(super) fn part(&mut self, token: Token) {
        let mut out = Vec::new();
        if let Some(wire) = self.wire(token)
            && !wire.is_dead
            && !wire.is_sending
            && wire.queue.is_empty()
            && let (Some(tls), Some(fd)) = (&mut wire.tls, &wire.fd)
        {
            tls.close(&mut out);
            let _ = send_now(fd, &out);
        }
    }

    /// Tells a client that nothing more will come: the end of the connection alone would be a cut.
    pub(super) fn say_goodbye(&mut self, token: Token) {
        let mut out = Vec::new();
        if let Some(tls) = self.wire(token).and_then(|wire| wire.tls.as_mut()) {
            tls.close(&mut out);
            self.send_sealed(token, out);
        }
    }
}
