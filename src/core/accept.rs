//! Accepting: a core's listeners, from the first arm to the last look when the router drains.
//!
//! A listener of the core's own (SO_REUSEPORT) is closed when the router drains, so what the kernel had accepted for it
//! is taken first. An inherited one is shared with other cores and processes: its queue outlives this process and
//! belongs to whoever accepts next.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};

use shards::{Addresses, Counted};
use socket2::SockRef;

use super::{ACCEPT_PAUSE_NS, Core, Down, Turn, Wire};
use crate::exchange::Session;
use crate::shared::CoreShared;
use crate::tls;

/// A listener and what the kernel does with it.
pub(super) struct Door {
    listener: TcpListener,
    /// The kernel accepts on it, or is being told to stop.
    is_armed: bool,
    /// Not armed before this time, ns.
    again_ns: u64,
}

impl Door {
    pub(super) fn new(listener: TcpListener) -> Door {
        Door {
            listener,
            is_armed: false,
            again_ns: 0,
        }
    }
}

impl Core {
    /// Accepts on every listener that is not armed and may be.
    pub(super) fn accept(&mut self, now_ns: u64) {
        if self.is_draining {
            return;
        }
        for number in 0..self.doors.len() {
            let is_due = |door: &Door| !door.is_armed && now_ns >= door.again_ns;
            if self.doors[number].as_ref().is_some_and(is_due) {
                self.arm(number);
            }
        }
    }

    fn arm(&mut self, number: usize) {
        let Some(door) = &mut self.doors[number] else {
            return;
        };
        door.is_armed = true;
        let fd = door.listener.as_raw_fd();
        if self.are_doors_inherited {
            // One at a time: a multishot accept keeps its place at the head of the socket's waiting line, so the first
            // core would get every connection. One that is armed anew stands at the end, and cores take turns.
            self.ring.accept_one(number as u32, fd);
        } else {
            self.ring.accept(number as u32, fd);
        }
    }

    /// When the next listener is to be armed again, ns.
    pub(super) fn accept_again_ns(&self) -> Option<u64> {
        let paused = self.doors.iter().flatten().filter(|door| !door.is_armed);
        paused.map(|door| door.again_ns).min()
    }

    pub(super) fn has_doors(&self) -> bool {
        self.doors.iter().any(Option::is_some)
    }

    pub(super) fn accepted(&mut self, turn: Turn<'_>, fd: OwnedFd) {
        self.stats().accepted.add(1);
        if self.is_full() || self.is_stopping {
            self.stats().closed.add(1);
            self.complain(
                "too many connections",
                &io::Error::other("--max-connections"),
            );
            return; // Dropping it closes it.
        }
        let Ok(counted) = self.count_address(&fd) else {
            self.stats().closed.add(1);
            self.complain(
                "too many connections of one address",
                &io::Error::other("--max-connections-per-address"),
            );
            return;
        };
        if self.are_doors_inherited {
            // What was queued before this process set the option on the listener has not inherited it.
            crate::ring::set_no_delay(&fd);
        }
        let tls = self.config.tls.for_clients.clone();
        let Ok(tls) = self.tls_session(tls.map(tls::Session::of_client)) else {
            self.stats().closed.add(1);
            return;
        };
        let wire = Wire {
            fd: Some(fd),
            tls,
            is_open: true,
            ..Wire::default()
        };
        let mut down = Down::new(wire, Session::new());
        down.counted = counted;
        let client = self.downs.insert(down);
        self.match_receive(client);
        self.with_session(turn, client, |session, hands| session.begin(hands));
    }

    /// Counts a connection of its address, if those are limited. An error: it has as many as it may.
    fn count_address(&self, fd: &OwnedFd) -> Result<Option<Counted>, ()> {
        let limit = self.config.address_connection_count_max;
        if limit == 0 {
            return Ok(None);
        }
        // One that has gone already has no address any more; its end is the next that is heard of it.
        let peer = SockRef::from(fd).peer_addr().ok();
        let Some(peer) = peer.and_then(|peer| peer.as_socket()) else {
            return Ok(None);
        };
        let owner = match peer.ip().to_canonical() {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            // Whoever has one address of a /64 has them all.
            IpAddr::V6(address) => address.to_bits() >> 64 << 64,
        };
        let hash = self.shared.address_hasher.hash_one(owner);
        let addresses = self.shared.addresses.get_or_init(Addresses::new);
        addresses.enter(hash, limit).map(Some).ok_or(())
    }

    /// Whether the router has more connections than it may have, all cores together (this one is counted already).
    fn is_full(&self) -> bool {
        let open = |core: &CoreShared| {
            core.stats
                .accepted
                .value()
                .saturating_sub(core.stats.closed.value())
        };
        self.shared.cores.iter().map(open).sum::<u64>() > self.config.connection_count_max as u64
    }

    pub(super) fn accept_ended(&mut self, turn: Turn<'_>, number: u32, errno: i32) {
        let number = number as usize;
        if let Some(door) = &mut self.doors[number] {
            door.is_armed = false;
        }
        if self.is_draining {
            if self.are_doors_inherited {
                self.leave(number, errno);
            } else {
                self.close(turn, number);
            }
            return;
        }
        if errno == 0 {
            return self.arm(number);
        }
        self.complain("accepting pauses", &io::Error::from_raw_os_error(errno));
        if let Some(door) = &mut self.doors[number] {
            door.again_ns = turn.now_ns + ACCEPT_PAUSE_NS;
        }
    }

    /// Takes what the kernel had accepted for a listener of our own, then closes it at once: what comes in between is
    /// reset (`net.ipv4.tcp_migrate_req` moves it to another listener of the port).
    fn close(&mut self, turn: Turn<'_>, number: usize) {
        let Some(door) = self.doors[number].take() else {
            return;
        };
        if door.listener.set_nonblocking(true).is_err() {
            return;
        }
        loop {
            match door.listener.accept() {
                Ok((stream, _)) => self.accepted(turn, stream.into()),
                // One that its client has given up; others may wait behind it.
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => return,
            }
        }
    }

    /// Leaves an inherited listener to those who share it. A new connection wakes one of all that wait at the socket; if
    /// that was our accept and the stop came first, nobody else knows of the connection. So as long as one waits, we
    /// take one, by an accept that does not stay. (Never with O_NONBLOCK: that flag is the socket's, not ours alone.)
    fn leave(&mut self, number: usize, errno: i32) {
        let may_have_missed = errno == libc::ECANCELED && !self.is_stopping;
        let Some(door) = &mut self.doors[number] else {
            return;
        };
        if !may_have_missed || !crate::ring::has_pending(&door.listener) {
            self.doors[number] = None;
            return;
        }
        door.is_armed = true;
        self.ring
            .accept_one(number as u32, door.listener.as_raw_fd());
        self.ring.stop_accepting(number as u32);
    }

    /// Stops accepting, for good.
    pub(super) fn stop_accepting(&mut self) {
        for number in 0..self.doors.len() {
            if self.doors[number]
                .as_ref()
                .is_some_and(|door| door.is_armed)
            {
                self.ring.stop_accepting(number as u32);
            } else {
                self.doors[number] = None;
            }
        }
    }
}
