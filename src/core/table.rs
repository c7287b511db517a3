//! The core's connections: clients and workers, each in a table of places with generations.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use shards::{Counted, Slot};

use super::trace::Trace;
use crate::exchange::Session;
use crate::ring::Token;
use crate::tls;

/// Marks a token as a worker's connection; the rest of the index is its place.
const UPSTREAM: u32 = 1 << 31;

/// Whether a token names a connection to a worker.
pub fn is_upstream(token: Token) -> bool {
    token.index & UPSTREAM != 0
}

/// Bytes that wait to be sent, from an offset on.
pub struct Outgoing {
    pub bytes: Vec<u8>,
    pub from: usize,
}

/// What both kinds of connection have: a descriptor, a queue of bytes to send, and operations in flight.
#[derive(Default)]
pub struct Wire {
    pub fd: Option<OwnedFd>,
    /// What lies between the socket's bytes and HTTP's; `None`: nothing.
    pub tls: Option<Box<tls::Session>>,
    /// Bytes that wait behind the send in flight.
    pub queue: VecDeque<Outgoing>,
    /// Bytes in the queue, and in the send in flight where it is known.
    pub queued_bytes: usize,
    /// When bytes last left, or began to wait, ns.
    pub taken_ns: u64,
    /// Bytes of a request in front of them, which nothing has to wait for: it was read whole already.
    pub message_bytes: usize,
    /// A send is with the kernel, under this number.
    pub is_sending: bool,
    pub send_op: u32,
    /// A receive is with the kernel.
    pub is_receiving: bool,
    /// Its stop has been asked for.
    pub is_stopping: bool,
    /// A poll for a reset is with the kernel.
    pub is_watched: bool,
    /// It is open for receiving at all: connected, and not yet ended by the peer.
    pub is_open: bool,
    /// The session does not want its bytes now.
    pub is_held_by_session: bool,
    /// The other side has not taken what came from here.
    pub is_held_by_queue: bool,
    /// A connect is with the kernel.
    pub is_connecting: bool,
    pub connect_op: u32,
    /// No more is done with it; it is freed when the last operation has come back.
    pub is_dead: bool,
}

impl Wire {
    /// Whether a receive should be with the kernel.
    pub fn wants_receive(&self) -> bool {
        self.is_open && !self.is_held_by_session && !self.is_held_by_queue && !self.is_dead
    }

    /// Takes bytes that have left off the count.
    pub fn account_sent(&mut self, n: usize) {
        let message = n.min(self.message_bytes);
        self.message_bytes -= message;
        self.queued_bytes = self.queued_bytes.saturating_sub(n - message);
    }

    /// Whether the kernel still works on it.
    pub fn is_busy(&self) -> bool {
        self.is_sending || self.is_receiving || self.is_connecting || self.is_watched
    }
}

/// A client's connection. Without a descriptor: a session that goes on without a client.
pub struct Down {
    pub wire: Wire,
    /// Taken out while it is being worked with.
    pub session: Option<Box<Session>>,
    /// The worker connection of the running leg.
    pub leg: Option<Token>,
    pub deadline_ns: u64,
    /// When the wheel has an entry for it; `u64::MAX`: it has none.
    pub timer_ns: u64,
    /// Close once the queue is empty.
    pub is_finishing: bool,
    /// Where it counts among its address's connections.
    pub counted: Option<Counted>,
    /// Our direction has been ended; what still comes is read and dropped.
    pub is_lingering: bool,
    /// What was decided for its exchange.
    pub trace: Trace,
}

impl Down {
    /// A connection that has just come, or a session without one.
    pub fn new(wire: Wire, session: Session) -> Down {
        Down {
            wire,
            session: Some(Box::new(session)),
            leg: None,
            deadline_ns: u64::MAX,
            timer_ns: u64::MAX,
            is_finishing: false,
            counted: None,
            is_lingering: false,
            trace: Trace::default(),
        }
    }
}

/// What a worker's connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A leg of the exchange on this client connection.
    Leg(Token),
    /// Kept for later.
    Idle,
    /// Neither.
    Nobody,
}

/// A connection to a worker.
pub struct Up {
    pub wire: Wire,
    pub slot: Slot,
    pub usage: Use,
}

struct Place<T> {
    generation: u32,
    value: Option<T>,
}

/// Places with generations: a token of a place's former owner finds nobody.
pub struct Table<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    mark: u32,
}

impl<T> Table<T> {
    /// An empty table of clients.
    pub fn of_clients() -> Table<T> {
        Table {
            places: Vec::new(),
            free: Vec::new(),
            mark: 0,
        }
    }

    /// An empty table of workers' connections.
    pub fn of_workers() -> Table<T> {
        Table {
            places: Vec::new(),
            free: Vec::new(),
            mark: UPSTREAM,
        }
    }

    /// Takes a place.
    pub fn insert(&mut self, value: T) -> Token {
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place {
                generation: 0,
                value: None,
            });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[at as usize];
        place.value = Some(value);
        Token {
            index: at | self.mark,
            generation: place.generation,
        }
    }

    /// Who is there, if it is still the same.
    pub fn find(&mut self, token: Token) -> Option<&mut T> {
        let place = self.places.get_mut((token.index & !UPSTREAM) as usize)?;
        if place.generation == token.generation {
            place.value.as_mut()
        } else {
            None
        }
    }

    /// Frees a place.
    pub fn remove(&mut self, token: Token) -> Option<T> {
        let at = token.index & !UPSTREAM;
        let place = self.places.get_mut(at as usize)?;
        if place.generation != token.generation {
            return None;
        }
        let value = place.value.take()?;
        place.generation = (place.generation + 1) & 0xff_ffff;
        self.free.push(at);
        Some(value)
    }

    /// Places taken.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Names of all that are there.
    pub fn tokens(&self) -> Vec<Token> {
        let named = self
            .places
            .iter()
            .enumerate()
            .filter(|(_, place)| place.value.is_some());
        named
            .map(|(at, place)| Token {
                index: at as u32 | self.mark,
                generation: place.generation,
            })
            .collect()
    }
}
