//! Workers given as names of DNS: `dns+http://name:port[/prefix]` for addresses, `dnssrv+http://_service._tcp.name[/prefix]`
//! for SRV records (RFC 2782); `https` as well.

use std::fmt;
use std::net::IpAddr;

use super::super::WorkerUrl;
use crate::route::Role;

/// Which records name the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// A, and AAAA where there is no A: a worker for each address, on the port that was given.
    Address,
    /// SRV: a worker for each address of each target, on the target's port.
    Service,
}

impl RecordKind {
    const ALL: [RecordKind; 2] = [RecordKind::Address, RecordKind::Service];

    fn prefix(self) -> &'static str {
        match self {
            RecordKind::Address => "dns+",
            RecordKind::Service => "dnssrv+",
        }
    }
}

/// A name that is looked up again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsName {
    /// What to ask for.
    pub kind: RecordKind,
    /// The name, in place of a host: scheme, port and path prefix are those of the workers.
    pub url: WorkerUrl,
    /// What they do.
    pub role: Role,
    /// Of prefill workers: where their bootstrap servers listen.
    pub bootstrap_port: Option<u16>,
}

impl DnsName {
    /// `None`: the text is no such name, but perhaps a URL.
    ///
    /// # Errors
    /// It is one, but cannot be.
    pub fn parse(text: &str, role: Role) -> Option<Result<DnsName, String>> {
        let mut kinds = RecordKind::ALL.into_iter();
        let (kind, rest) =
            kinds.find_map(|kind| Some((kind, text.strip_prefix(kind.prefix())?)))?;
        Some(read(kind, rest, role).map_err(|reason| format!("'{text}': {reason}")))
    }
}

fn read(kind: RecordKind, rest: &str, role: Role) -> Result<DnsName, String> {
    let url = WorkerUrl::parse(rest).map_err(|error| error.to_string())?;
    if url.host().parse::<IpAddr>().is_ok() {
        return Err("an address needs no look-up: leave the prefix out".to_owned());
    }
    let has_port = url.authority().len() != url.host().len();
    if kind == RecordKind::Service && has_port {
        return Err("the records tell the port: leave it out".to_owned());
    }
    Ok(DnsName {
        kind,
        url,
        role,
        bootstrap_port: None,
    })
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.kind.prefix(), self.url)
    }
}
