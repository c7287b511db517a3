//! Where workers are looked for while the router runs: a file, names of DNS, Kubernetes. vllm-router's flags for the
//! latter.

mod file;
mod names;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{Args, value_parser};

use super::ConfigError;
use crate::route::Role;

pub use file::{WorkersFile, read_workers_file};
pub use names::{DnsName, RecordKind};

/// Where to look for workers.
#[derive(Debug, Args)]
#[command(next_help_heading = "Discovery")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct DiscoveryArgs {
    /// File with workers: a line is a URL, then, if need be, role=prefill or role=decode and bootstrap-port=PORT; # begins a
    /// comment. It is read again when it changes: who is new in it is added, who is no longer in it drains
    #[arg(long, value_name = "FILE")]
    #[arg(env = "CORELANE_WORKERS_FILE", hide_env = true)]
    pub workers_file: Option<PathBuf>,
    /// Longest pause between two look-ups of a name of DNS: one that stands among --worker-urls, --prefill or --decode behind
    /// dns+http:// (NAME:PORT, its addresses) or dnssrv+http:// (_SERVICE._tcp.NAME, its SRV records), or with https. Shorter
    /// if the answer's TTL is, at least 1 s
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    #[arg(value_parser = value_parser!(u64).range(1..=86_400), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_DNS_REFRESH_SECS", hide_env = true)]
    pub dns_refresh_secs: u64,
    /// Name server for these (default: those of /etc/resolv.conf)
    #[arg(long, value_name = "ADDRESS:PORT")]
    #[arg(env = "CORELANE_DNS_SERVER", hide_env = true)]
    pub dns_server: Option<SocketAddr>,
    /// Take workers from Kubernetes: the pods that a selector below chooses. Access is that of KUBECONFIG, ~/.kube/config, or
    /// the pod's service account, which needs get, list and watch on pods
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_SERVICE_DISCOVERY", hide_env = true)]
    pub service_discovery: bool,
    /// Labels that a worker's pod has, all of them
    #[arg(long, num_args = 0.., value_name = "KEY=VALUE")]
    #[arg(env = "CORELANE_SELECTOR", hide_env = true)]
    pub selector: Vec<String>,
    /// Port of the workers in their pods
    #[arg(long, default_value_t = 80, value_name = "PORT")]
    #[arg(value_parser = value_parser!(u16).range(1..), allow_negative_numbers = true)]
    #[arg(env = "CORELANE_SERVICE_DISCOVERY_PORT", hide_env = true)]
    pub service_discovery_port: u16,
    /// Namespace of the pods (default: all, which takes a cluster role)
    #[arg(long, value_name = "NAME")]
    #[arg(env = "CORELANE_SERVICE_DISCOVERY_NAMESPACE", hide_env = true)]
    pub service_discovery_namespace: Option<String>,
    /// Prefill/decode: labels of prefill workers' pods; a pod that has those of both is a prefill worker. The annotation
    /// vllm.ai/bootstrap-port is the bootstrap port
    #[arg(long, num_args = 0.., value_name = "KEY=VALUE")]
    #[arg(env = "CORELANE_PREFILL_SELECTOR", hide_env = true)]
    pub prefill_selector: Vec<String>,
    /// Prefill/decode: labels of decode workers' pods
    #[arg(long, num_args = 0.., value_name = "KEY=VALUE")]
    #[arg(env = "CORELANE_DECODE_SELECTOR", hide_env = true)]
    pub decode_selector: Vec<String>,
}

/// Where workers are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryConfig {
    /// A file that lists them.
    pub file: Option<PathBuf>,
    /// Names of DNS.
    pub dns: DnsConfig,
    /// Pods.
    pub kubernetes: Option<KubernetesConfig>,
    /// Flags that were given and mean nothing as the others are.
    pub idle_flags: Vec<&'static str>,
}

/// What to ask of DNS, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DnsConfig {
    /// No two the same.
    pub names: Vec<DnsName>,
    /// Longest pause between two look-ups of a name.
    pub refresh: Duration,
    /// Whom to ask; none: as this machine is set up.
    pub server: Option<SocketAddr>,
}

/// Which pods are workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesConfig {
    /// None: all.
    pub namespace: Option<String>,
    /// Of the workers.
    pub port: u16,
    /// Whose pods, and their label selector as the API takes it. Earlier ones win.
    pub selectors: Vec<(Role, String)>,
}

impl DiscoveryConfig {
    /// `names`: those found among the workers of the command line.
    pub(super) fn from_args(
        args: DiscoveryArgs,
        names: Vec<DnsName>,
        is_pd: bool,
    ) -> Result<DiscoveryConfig, ConfigError> {
        if cfg!(not(feature = "dns"))
            && let Some(name) = names.first()
        {
            let reason = format!("'{name}': this build has no DNS discovery (cargo feature dns)");
            return Err(refuse("worker-urls", reason));
        }
        let selectors = [
            ("selector", Role::Regular, &args.selector),
            ("prefill-selector", Role::Prefill, &args.prefill_selector),
            ("decode-selector", Role::Decode, &args.decode_selector),
        ];
        let mut used = Vec::new();
        let mut idle_flags = Vec::new();
        for (flag, role, pairs) in selectors {
            let Some(text) = selector(flag, pairs)? else {
                continue;
            };
            if args.service_discovery && (role != Role::Regular) == is_pd {
                used.push((role, text));
            } else {
                idle_flags.push(flag);
            }
        }
        let config = DiscoveryConfig {
            file: args.workers_file,
            dns: DnsConfig {
                names,
                refresh: Duration::from_secs(args.dns_refresh_secs),
                server: args.dns_server,
            },
            kubernetes: args.service_discovery.then_some(KubernetesConfig {
                namespace: args
                    .service_discovery_namespace
                    .filter(|name| !name.is_empty()),
                port: args.service_discovery_port,
                selectors: used,
            }),
            idle_flags,
        };
        config.check(is_pd)?;
        Ok(config)
    }

    fn check(&self, is_pd: bool) -> Result<(), ConfigError> {
        if let Some(kubernetes) = &self.kubernetes {
            if cfg!(not(feature = "kubernetes")) {
                let reason = "this build has no Kubernetes discovery (cargo feature kubernetes)";
                return Err(refuse("service-discovery", reason));
            }
            if kubernetes.selectors.is_empty() {
                let reason = match is_pd {
                    true => "needs --prefill-selector or --decode-selector",
                    false => "needs --selector",
                };
                return Err(refuse("service-discovery", reason));
            }
            let namespace = kubernetes.namespace.as_deref().unwrap_or("default");
            if !is_dns_label(namespace) {
                let reason = format!("'{namespace}' is no name of a namespace");
                return Err(refuse("service-discovery-namespace", reason));
            }
        }
        self.check_file(is_pd)
    }

    /// Whether the workers file can be read; true without one.
    pub(crate) fn check_file(&self, is_pd: bool) -> Result<(), ConfigError> {
        let Some(path) = &self.file else {
            return Ok(());
        };
        let read = read_workers_file(path, is_pd).map(|_| ());
        read.map_err(|reason| refuse("workers-file", format!("{}: {reason}", path.display())))
    }

    /// Whether workers may come that no flag lists.
    pub fn is_on(&self) -> bool {
        self.file.is_some() || !self.dns.names.is_empty() || self.kubernetes.is_some()
    }

    /// Of regular, prefill and decode workers, as they are used; empty: not.
    pub(super) fn selectors(&self) -> [String; 3] {
        let all = self.kubernetes.iter().flat_map(|pods| &pods.selectors);
        [Role::Regular, Role::Prefill, Role::Decode].map(|role| {
            let mut of_role = all.clone().filter(|(other, _)| *other == role);
            of_role
                .next()
                .map(|(_, text)| text.clone())
                .unwrap_or_default()
        })
    }

    /// For operators.
    pub fn public_json(&self) -> serde_json::Value {
        let names: Vec<String> = self.dns.names.iter().map(DnsName::to_string).collect();
        let kubernetes = self.kubernetes.as_ref().map(|kubernetes| {
            let selectors = kubernetes.selectors.iter();
            let selectors: serde_json::Map<String, serde_json::Value> = selectors
                .map(|(role, text)| (role.label().to_owned(), text.as_str().into()))
                .collect();
            serde_json::json!({
                "namespace": kubernetes.namespace,
                "port": kubernetes.port,
                "selectors": selectors,
            })
        });
        serde_json::json!({
            "workers_file": self.file,
            "dns": names,
            "dns_refresh_secs": self.dns.refresh.as_secs(),
            "dns_server": self.dns.server,
            "kubernetes": kubernetes,
        })
    }
}

/// `k=v` pairs as one selector; none without any.
fn selector(flag: &'static str, pairs: &[String]) -> Result<Option<String>, ConfigError> {
    let mut text = String::new();
    for pair in pairs
        .iter()
        .flat_map(|text| text.split([',', ' ', '\t', '\n']))
        .filter(|pair| !pair.is_empty())
    {
        let is_part = |part: &str| {
            part.bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'/'))
        };
        match pair.split_once('=') {
            Some((key, value)) if !key.is_empty() && is_part(key) && is_part(value) => {
                let comma = if text.is_empty() { "" } else { "," };
                let _ = write!(text, "{comma}{key}={value}");
            }
            _ => {
                let reason = format!("'{pair}' is not KEY=VALUE with characters of labels");
                return Err(refuse(flag, reason));
            }
        }
    }
    Ok((!text.is_empty()).then_some(text))
}

/// RFC 1123: it goes into a path.
fn is_dns_label(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(is_plain)
}

fn refuse(flag: &'static str, reason: impl Into<String>) -> ConfigError {
    ConfigError {
        flag,
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests;
