//! A request that asks why its worker was chosen (`x-corelane-debug: decision`) gets the answer as a field of the answer,
//! `x-corelane-decision`; and what of an answer is counted as it goes out.

use super::{Exchange, World};
use crate::access::Caller;
use crate::config::Config;
use crate::http::request::Request;

/// How much a request is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Explains {
    /// Nothing: it has not asked, or may not.
    No,
    /// Workers by the number of their slot: where they are is no client's business.
    Slots,
    /// With their URLs, to the admin.
    Names,
}

impl Explains {
    /// Loads and choices are the admin's business, where there is one or where it has a port of its own.
    pub(super) fn of(config: &Config, request: &Request, caller: Option<Caller>) -> Explains {
        if !request.asks_decision {
            return Explains::No;
        }
        let is_for_admin = config.access.admin.is_some() || config.is_admin_apart;
        match caller {
            Some(Caller::Admin) => Explains::Names,
            Some(Caller::Client) if !is_for_admin => Explains::Slots,
            None if !is_for_admin && config.access.is_open() => Explains::Slots,
            _ => Explains::No,
        }
    }
}

/// What of an answer's body has gone out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    pub(super) bytes: u64,
    /// Events are counted, too, of those that are streams of them.
    pub(super) has_events: bool,
    pub(super) event_count: u32,
}

/// Counts a part of an answer. A blank line that comes in two parts is missed: a number for estimates.
#[inline]
pub(super) fn count(exchange: &mut Exchange, bytes: &[u8]) {
    let counted = &mut exchange.counted;
    counted.bytes += bytes.len() as u64;
    if counted.has_events && exchange.is_event_stream {
        counted.event_count += memchr::memmem::find_iter(bytes, b"\n\n").count() as u32;
    }
}

/// The field with its name and line end; empty for who is told nothing.
pub(super) fn field<W: World>(exchange: &Exchange, world: &mut W) -> Vec<u8> {
    let mut field = Vec::new();
    if exchange.explains != Explains::No {
        field.extend_from_slice(b"x-corelane-decision: ");
        world.explain(exchange.explains == Explains::Names, &mut field);
        field.extend_from_slice(b"\r\n");
    }
    field
}

/// Puts it at the end of a head, in front of the empty line.
pub(super) fn insert(field: &[u8], head: &mut Vec<u8>) {
    if !field.is_empty() && head.ends_with(b"\r\n\r\n") {
        head.truncate(head.len() - 2);
        head.extend_from_slice(field);
        head.extend_from_slice(b"\r\n");
    }
}
