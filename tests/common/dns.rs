//! A name server of UDP for tests: a zone that can change, and a server that fails.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

/// One record.
#[derive(Clone, Debug)]
pub enum Record {
    A(Ipv4Addr),
    /// Priority, port, target.
    Srv(u16, u16, &'static str),
}

const A: u16 = 1;
const SRV: u16 = 33;
const SERVFAIL: u8 = 2;
const NXDOMAIN: u8 = 3;

#[derive(Default)]
struct Zone {
    records: BTreeMap<String, Vec<Record>>,
    ttl: u32,
    fails: bool,
    asked: BTreeMap<String, u64>,
}

/// The server.
pub struct Dns {
    pub address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    task: JoinHandle<()>,
}

impl Drop for Dns {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Dns {
    pub async fn start(ttl: u32) -> Dns {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let zone = Arc::new(Mutex::new(Zone {
            ttl,
            ..Zone::default()
        }));
        let for_task = zone.clone();
        let task = tokio::spawn(async move {
            let mut query = [0; 2048];
            loop {
                let (size, peer) = socket.recv_from(&mut query).await.unwrap();
                let answer = answer(&mut for_task.lock().unwrap(), &query[..size]);
                socket.send_to(&answer, peer).await.unwrap();
            }
        });
        Dns {
            address,
            zone,
            task,
        }
    }

    /// All records of a name, which ends with a dot.
    pub fn set(&self, name: &str, records: &[Record]) {
        let mut zone = self.zone.lock().unwrap();
        zone.records.insert(name.to_owned(), records.to_vec());
    }

    /// The name is not there.
    pub fn forget(&self, name: &str) {
        self.zone.lock().unwrap().records.remove(name);
    }

    /// Every answer is SERVFAIL.
    pub fn fail(&self, fails: bool) {
        self.zone.lock().unwrap().fails = fails;
    }

    /// How often this name was asked for.
    pub fn asked(&self, name: &str) -> u64 {
        let zone = self.zone.lock().unwrap();
        zone.asked.get(name).copied().unwrap_or(0)
    }
}

/// RFC 1035 section 4.
fn answer(zone: &mut Zone, query: &[u8]) -> Vec<u8> {
    let (mut name, mut at) = (String::new(), 12);
    while query[at] != 0 {
        let end = at + 1 + usize::from(query[at]);
        name.push_str(&String::from_utf8_lossy(&query[at + 1..end]).to_lowercase());
        name.push('.');
        at = end;
    }
    let question = &query[12..at + 5];
    let kind = u16::from_be_bytes([query[at + 1], query[at + 2]]);
    *zone.asked.entry(name.clone()).or_default() += 1;
    let records = zone.records.get(&name);
    let code = match records {
        _ if zone.fails => SERVFAIL,
        None => NXDOMAIN,
        Some(_) => 0,
    };
    let records = records.filter(|_| code == 0).into_iter().flatten();
    let bodies: Vec<Vec<u8>> = records.filter_map(|record| body(record, kind)).collect();
    let mut out = query[..2].to_vec();
    out.extend([0x81, 0x80 | code, 0, 1, 0, bodies.len() as u8, 0, 0, 0, 0]);
    out.extend(question);
    for body in bodies {
        // The question's name.
        out.extend([0xc0, 12]);
        out.extend(kind.to_be_bytes());
        out.extend([0, 1]);
        out.extend(zone.ttl.to_be_bytes());
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(body);
    }
    out
}

/// None: it is of another kind.
fn body(record: &Record, kind: u16) -> Option<Vec<u8>> {
    match (record, kind) {
        (Record::A(ip), A) => Some(ip.octets().to_vec()),
        (Record::Srv(priority, port, target), SRV) => {
            let mut body = Vec::new();
            for number in [*priority, 1, *port] {
                body.extend(number.to_be_bytes());
            }
            for label in target.trim_end_matches('.').split('.') {
                body.push(label.len() as u8);
                body.extend(label.as_bytes());
            }
            body.push(0);
            Some(body)
        }
        _ => None,
    }
}
