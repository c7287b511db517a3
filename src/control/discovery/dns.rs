//! Names of DNS as workers, looked up again and again. A failed look-up, or an answer without addresses, changes nothing.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::super::Plane;
use super::super::registry::Finder;
use super::backoff::Backoff;
use super::claims::{Claims, Found};
use super::{Fault, RETRY_PAUSE};
use crate::config::{DnsConfig, DnsName, RecordKind, WorkerSpec, WorkerUrl};

/// Least pause between two look-ups of a name, whatever its TTL.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// The workers behind a name, and for how long that holds.
struct Answer {
    urls: Vec<WorkerUrl>,
    ttl: Duration,
}

/// What came of a look-up, by the name's number.
type Told = (usize, Result<Vec<WorkerUrl>, String>);

/// Follows whatever names the configuration lists.
pub(super) async fn run(plane: Arc<Plane>) {
    let mut reloads = plane.reload.subscribe();
    let mut claims = Claims::new(Finder::Dns);
    let mut known: Vec<(DnsName, Vec<WorkerUrl>)> = Vec::new();
    loop {
        let config = plane.shared.config().discovery.dns.clone();
        known.retain(|(name, _)| config.names.contains(name));
        claims.update(&plane, found(&known));
        tokio::select! {
            () = follow(&plane, &config, &mut known, &mut claims) => {}
            () = other_than(&plane, &config, &mut reloads) => {}
        }
    }
}

/// Waits until the configuration says something else.
async fn other_than(plane: &Plane, config: &DnsConfig, reloads: &mut watch::Receiver<()>) {
    while plane.shared.config().discovery.dns == *config {
        if reloads.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn follow(
    plane: &Arc<Plane>,
    config: &DnsConfig,
    known: &mut Vec<(DnsName, Vec<WorkerUrl>)>,
    claims: &mut Claims,
) {
    if config.names.is_empty() {
        return std::future::pending().await;
    }
    let stats = plane.discovery.stats(Finder::Dns);
    let resolver = match resolver(config) {
        Ok(resolver) => resolver,
        Err(reason) => {
            stats.count_error();
            tracing::error!(reason, "names of workers cannot be looked up");
            return tokio::time::sleep(config.refresh).await;
        }
    };
    let (answers, mut told) = mpsc::channel(config.names.len());
    let mut tasks = JoinSet::new();
    for (index, name) in config.names.iter().enumerate() {
        let name = name.clone();
        tasks.spawn(look_up(
            resolver.clone(),
            index,
            name,
            config.refresh,
            answers.clone(),
        ));
    }
    let mut faults: Vec<Fault> = config.names.iter().map(|_| Fault::default()).collect();
    loop {
        let (index, answer) = match tokio::time::timeout(RETRY_PAUSE, told.recv()).await {
            Ok(Some(told)) => told,
            Ok(None) => return,
            Err(_) => {
                claims.retry(plane);
                continue;
            }
        };
        let name = &config.names[index];
        match answer {
            Ok(urls) => {
                stats.succeed();
                if faults[index].end() {
                    tracing::info!(%name, "name is resolved again");
                }
                known.retain(|(other, _)| other != name);
                known.push((name.clone(), urls));
                claims.update(plane, found(known));
            }
            Err(reason) => faults[index].tell(stats, &reason, |reason| {
                tracing::warn!(%name, reason, "name is not resolved: the last that was known holds");
            }),
        }
    }
}

fn found(known: &[(DnsName, Vec<WorkerUrl>)]) -> Vec<Found> {
    let all = known.iter();
    let all = all.flat_map(|(name, urls)| {
        urls.iter().map(|url| Found {
            id: String::new(),
            spec: WorkerSpec {
                url: url.clone(),
                role: name.role,
                bootstrap_port: name.bootstrap_port,
            },
            is_ready: true,
        })
    });
    all.collect()
}

fn resolver(config: &DnsConfig) -> Result<TokioResolver, String> {
    let builder = match config.server {
        Some(server) => {
            let mut connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
            for connection in &mut connections {
                connection.port = server.port();
            }
            let server = NameServerConfig::new(server.ip(), true, connections.into());
            let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        }
        None => TokioResolver::builder_tokio().map_err(|error| error.to_string())?,
    };
    let mut builder = builder;
    let options = builder.options_mut();
    // Each look-up asks: how long an answer holds is counted here.
    options.cache_size = 0;
    // Both families of one engine would be two workers.
    options.ip_strategy = LookupIpStrategy::Ipv4thenIpv6;
    builder.build().map_err(|error| error.to_string())
}

/// Asks for one name for ever.
async fn look_up(
    resolver: TokioResolver,
    index: usize,
    name: DnsName,
    refresh: Duration,
    answers: mpsc::Sender<Told>,
) {
    let mut backoff = Backoff::new(PAUSE_MIN, refresh.max(PAUSE_MIN));
    let mut targets = HashMap::new();
    loop {
        let answer = match name.kind {
            RecordKind::Address => addresses(&resolver, &name).await,
            RecordKind::Service => services(&resolver, &name, &mut targets).await,
        };
        let (pause, told) = match answer {
            Ok(answer) => {
                backoff.reset();
                let pause = answer.ttl.min(refresh).max(PAUSE_MIN);
                (pause, Ok(answer.urls))
            }
            Err(reason) => (backoff.next(), Err(reason)),
        };
        if answers.send((index, told)).await.is_err() {
            return;
        }
        tokio::time::sleep(pause).await;
    }
}

async fn addresses(resolver: &TokioResolver, name: &DnsName) -> Result<Answer, String> {
    let (addresses, ttl) = ips(resolver, name.url.host()).await?;
    let port = name.url.port();
    let urls = addresses
        .into_iter()
        .filter_map(|ip| name.url.at(None, ip, port));
    Ok(Answer {
        urls: urls.collect(),
        ttl,
    })
}

/// At least one.
async fn ips(resolver: &TokioResolver, host: &str) -> Result<(Vec<IpAddr>, Duration), String> {
    let answer = resolver.lookup_ip(host).await;
    let answer = answer.map_err(|error| error.to_string())?;
    let mut addresses: Vec<IpAddr> = answer.iter().collect();
    // Servers turn the order round and round.
    addresses.sort_unstable();
    addresses.dedup();
    match addresses.is_empty() {
        true => Err("the answer has no address".to_owned()),
        false => Ok((addresses, ttl(answer.valid_until()))),
    }
}

fn ttl(valid_until: Instant) -> Duration {
    valid_until.saturating_duration_since(Instant::now())
}

/// `targets` remembers the addresses of targets that are not resolved this time.
async fn services(
    resolver: &TokioResolver,
    name: &DnsName,
    targets: &mut HashMap<String, Vec<IpAddr>>,
) -> Result<Answer, String> {
    let answer = resolver.lookup(name.url.host(), RecordType::SRV).await;
    let answer = answer.map_err(|error| error.to_string())?;
    let mut services: Vec<(u16, String, u16)> = Vec::new();
    for record in answer.answers() {
        if let RData::SRV(service) = &record.data {
            let target = service.target.to_utf8();
            services.push((service.priority, target, service.port));
        }
    }
    // The lowest priority is to be used while it can be (RFC 2782); weights are left to the load.
    let priority = services.iter().map(|(priority, ..)| *priority).min();
    services.retain(|(other, ..)| Some(*other) == priority);
    services.sort();
    targets.retain(|target, _| services.iter().any(|(_, other, _)| other == target));
    let mut whole = Answer {
        urls: Vec::new(),
        ttl: ttl(answer.valid_until()),
    };
    let mut failure = "the answer has no service".to_owned();
    for (_, target, port) in services {
        match ips(resolver, &target).await {
            Ok((addresses, ttl)) => {
                whole.ttl = whole.ttl.min(ttl);
                targets.insert(target.clone(), addresses);
            }
            Err(reason) => {
                failure = format!("{target}: {reason}");
                whole.ttl = PAUSE_MIN;
            }
        }
        let host = target.trim_end_matches('.');
        for ip in targets.get(&target).into_iter().flatten() {
            let url = name.url.at(Some(host), *ip, port);
            let at = SocketAddr::new(*ip, port);
            match url {
                Some(url) if !whole.urls.contains(&url) => whole.urls.push(url),
                Some(_) => {}
                None => tracing::warn!(%name, %at, "no worker can be there"),
            }
        }
    }
    match whole.urls.is_empty() {
        true => Err(failure),
        false => Ok(whole),
    }
}
