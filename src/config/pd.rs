//! Prefill/decode disaggregation: which worker does what, and the settings of each role.

use std::time::Duration;

use super::cli::PdArgs;
use super::discovery::DnsName;
use super::{ConfigError, WORKER_COUNT_MAX, WorkerUrl, WorkerUrlError};
use crate::route::{PolicyKind, Role, Settings};

/// Mooncake's bootstrap server listens here unless said otherwise.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// How the engines hand KV blocks over. Names are vllm-router's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connector {
    /// NIXL; pull and push.
    Nixl,
    /// Mooncake.
    Mooncake,
    /// MoRI-IO, READ or WRITE as the engines register.
    MoriIo,
}

impl Connector {
    /// All of them.
    pub const ALL: [Connector; 3] = [Connector::Nixl, Connector::Mooncake, Connector::MoriIo];

    /// The word of `--kv-connector`.
    pub fn name(self) -> &'static str {
        match self {
            Connector::Nixl => "nixl",
            Connector::Mooncake => "mooncake",
            Connector::MoriIo => "moriio",
        }
    }
}

/// A worker of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSpec {
    /// Where.
    pub url: WorkerUrl,
    /// What it does.
    pub role: Role,
    /// Of a prefill worker: where its Mooncake bootstrap server listens.
    pub bootstrap_port: Option<u16>,
}

impl From<WorkerUrl> for WorkerSpec {
    /// A worker that takes whole requests.
    fn from(url: WorkerUrl) -> WorkerSpec {
        WorkerSpec {
            url,
            role: Role::Regular,
            bootstrap_port: None,
        }
    }
}

/// Set with `--vllm-pd-disaggregation`.
#[derive(Clone, Debug)]
pub struct PdConfig {
    /// How blocks are handed over.
    pub connector: Connector,
    /// Policy and thresholds of the prefill workers.
    pub prefill: Settings,
    /// Policy and thresholds of the decode workers.
    pub decode: Settings,
    /// Where engines register by ZMQ.
    pub discovery_address: Option<String>,
    /// A prefill answer without transfer parameters is no failure: decode computes the prompt itself.
    pub allows_missing_transfer: bool,
    /// Transfer parameters older than this go to no other decode worker.
    pub handover_age_max: Duration,
    /// Time for releasing the blocks of a request whose client has left.
    pub release_timeout: Duration,
    /// No prefill leg when the decode worker lacks fewer bytes than this; 0: always one.
    pub skip_prefill_below_bytes: u64,
}

impl PdConfig {
    /// `None` without `--vllm-pd-disaggregation`.
    pub(super) fn from_args(
        args: &PdArgs,
        shared: Settings,
    ) -> Result<Option<PdConfig>, ConfigError> {
        if !args.vllm_pd_disaggregation {
            let lonely = [
                ("prefill", !args.prefill.is_empty()),
                ("decode", !args.decode.is_empty()),
                (
                    "vllm-discovery-address",
                    args.vllm_discovery_address.is_some(),
                ),
            ];
            return match lonely.iter().find(|(_, is_set)| *is_set) {
                Some((flag, _)) => Err(ConfigError {
                    flag,
                    reason: "needs --vllm-pd-disaggregation".to_owned(),
                }),
                None => Ok(None),
            };
        }
        Ok(Some(PdConfig {
            connector: args.kv_connector,
            prefill: RoleFlags {
                policy: args.prefill_policy,
                cache_threshold: args.prefill_cache_threshold,
                balance_abs_threshold: args.prefill_balance_abs_threshold,
                balance_rel_threshold: args.prefill_balance_rel_threshold,
                common_prefix_threshold: args.prefill_common_prefix_threshold,
                hash_balance_factor: args.prefill_hash_balance_factor,
            }
            .or(shared),
            decode: RoleFlags {
                policy: args.decode_policy,
                cache_threshold: args.decode_cache_threshold,
                balance_abs_threshold: args.decode_balance_abs_threshold,
                balance_rel_threshold: args.decode_balance_rel_threshold,
                common_prefix_threshold: args.decode_common_prefix_threshold,
                hash_balance_factor: args.decode_hash_balance_factor,
            }
            .or(shared),
            discovery_address: args.vllm_discovery_address.clone(),
            allows_missing_transfer: args.pd_missing_transfer == "decode",
            handover_age_max: Duration::from_secs(args.pd_handover_age_max_secs),
            release_timeout: Duration::from_secs(args.pd_release_timeout_secs),
            skip_prefill_below_bytes: args.pd_skip_prefill_below,
        }))
    }

    /// For operators.
    pub fn public_json(&self) -> serde_json::Value {
        let role = |settings: &Settings| {
            serde_json::json!({
                "policy": settings.policy.name(),
                "cache_threshold": settings.cache_threshold,
                "balance_abs_threshold": settings.balance_abs_threshold,
                "balance_rel_threshold": settings.balance_rel_threshold,
                "common_prefix_threshold": settings.common_prefix_threshold,
                "hash_balance_factor": settings.hash_balance_factor,
            })
        };
        serde_json::json!({
            "kv_connector": self.connector.name(),
            "prefill": role(&self.prefill),
            "decode": role(&self.decode),
            "vllm_discovery_address": self.discovery_address,
            "missing_transfer": if self.allows_missing_transfer { "decode" } else { "error" },
            "handover_age_max_secs": self.handover_age_max.as_secs(),
            "release_timeout_secs": self.release_timeout.as_secs(),
            "skip_prefill_below": self.skip_prefill_below_bytes,
        })
    }

    /// Policy and thresholds of a role.
    pub fn settings(&self, role: Role) -> &Settings {
        match role {
            Role::Prefill => &self.prefill,
            Role::Regular | Role::Decode => &self.decode,
        }
    }
}

/// What was said of one role; the rest is as for all.
struct RoleFlags {
    policy: Option<PolicyKind>,
    cache_threshold: Option<f64>,
    balance_abs_threshold: Option<u32>,
    balance_rel_threshold: Option<f64>,
    common_prefix_threshold: Option<f64>,
    hash_balance_factor: Option<f64>,
}

impl RoleFlags {
    /// A threshold of the role holds whichever of the two flags named the policy.
    fn or(self, all: Settings) -> Settings {
        Settings {
            policy: self.policy.unwrap_or(all.policy),
            cache_threshold: self.cache_threshold.unwrap_or(all.cache_threshold),
            balance_abs_threshold: self
                .balance_abs_threshold
                .unwrap_or(all.balance_abs_threshold),
            balance_rel_threshold: self
                .balance_rel_threshold
                .unwrap_or(all.balance_rel_threshold),
            common_prefix_threshold: self
                .common_prefix_threshold
                .unwrap_or(all.common_prefix_threshold),
            hash_balance_factor: self.hash_balance_factor.unwrap_or(all.hash_balance_factor),
            ..all
        }
    }
}

/// The workers of the command line and the names of DNS among them, no two the same.
pub(super) fn workers(
    worker_urls: &[String],
    data_parallel_size: u32,
    pd: &PdArgs,
) -> Result<(Vec<WorkerSpec>, Vec<DnsName>), ConfigError> {
    if pd.vllm_pd_disaggregation && !worker_urls.is_empty() {
        return Err(ConfigError {
            flag: "worker-urls",
            reason: "with --vllm-pd-disaggregation workers are given as --prefill and --decode"
                .to_owned(),
        });
    }
    let mut listed = Listed::default();
    listed.read("worker-urls", worker_urls, Role::Regular)?;
    listed.read("prefill", &pd.prefill, Role::Prefill)?;
    listed.read("decode", &pd.decode, Role::Decode)?;
    let Listed { workers, names } = listed;
    if workers.len().saturating_mul(data_parallel_size as usize) > WORKER_COUNT_MAX {
        return Err(ConfigError {
            flag: if pd.vllm_pd_disaggregation {
                "decode"
            } else {
                "worker-urls"
            },
            reason: format!("at most {WORKER_COUNT_MAX} workers, data-parallel ranks counted"),
        });
    }
    Ok((workers, names))
}

/// What the command line lists, as it is read.
#[derive(Default)]
struct Listed {
    workers: Vec<WorkerSpec>,
    names: Vec<DnsName>,
}

/// Which of the two came last: a bootstrap port that follows is its.
enum Last {
    Worker,
    Name,
}

impl Listed {
    fn read(
        &mut self,
        flag: &'static str,
        texts: &[String],
        role: Role,
    ) -> Result<(), ConfigError> {
        let refuse = |reason: String| ConfigError { flag, reason };
        let mut last = None;
        // The environment gives one text for all; the same spelling is welcome on the command line.
        for text in texts
            .iter()
            .flat_map(|text| text.split([',', ' ', '\t', '\n']))
            .filter(|text| !text.is_empty())
        {
            if role == Role::Prefill && (text == "none" || text.bytes().all(|b| b.is_ascii_digit()))
            {
                // vllm-router's grammar: a prefill URL may be followed by its bootstrap port.
                let port = match last {
                    Some(Last::Worker) => self.workers.last_mut().map(|w| &mut w.bootstrap_port),
                    Some(Last::Name) => self.names.last_mut().map(|name| &mut name.bootstrap_port),
                    None => None,
                };
                let Some(port) = port else {
                    return Err(refuse(format!("'{text}' stands before any URL")));
                };
                if text != "none" {
                    let said = text.parse().ok().filter(|port| *port != 0);
                    let said = said.ok_or_else(|| refuse(format!("'{text}' is not a port")))?;
                    *port = Some(said);
                }
                continue;
            }
            last = Some(self.read_one(text, role).map_err(refuse)?);
        }
        Ok(())
    }

    fn read_one(&mut self, text: &str, role: Role) -> Result<Last, String> {
        let twice = || format!("worker URL '{text}' is listed twice");
        if let Some(name) = DnsName::parse(text, role) {
            let name = name?;
            let is_same = |other: &DnsName| other.kind == name.kind && other.url == name.url;
            if self.names.iter().any(is_same) {
                return Err(twice());
            }
            self.names.push(name);
            return Ok(Last::Name);
        }
        let url = WorkerUrl::parse(text).map_err(|e: WorkerUrlError| e.to_string())?;
        if self.workers.iter().any(|worker| worker.url == url) {
            return Err(twice());
        }
        self.workers.push(WorkerSpec {
            url,
            role,
            bootstrap_port: None,
        });
        Ok(Last::Worker)
    }
}

/// vllm-router's rule, for each role. No worker at all is fine: they are added later. `has_more`: one that is listed may not
/// stay alone.
pub(super) fn check_policies(
    regular: &Settings,
    pd: Option<&PdConfig>,
    workers: &[WorkerSpec],
    has_more: bool,
) -> Result<(), ConfigError> {
    let roles = [
        (Role::Regular, "policy", regular.policy, "--worker-urls"),
        (
            Role::Prefill,
            "prefill-policy",
            pd.map_or(regular.policy, |pd| pd.prefill.policy),
            "--prefill",
        ),
        (
            Role::Decode,
            "decode-policy",
            pd.map_or(regular.policy, |pd| pd.decode.policy),
            "--decode",
        ),
    ];
    for (role, flag, policy, source) in roles {
        let count = workers.iter().filter(|worker| worker.role == role).count();
        if policy == PolicyKind::PowerOfTwo && count == 1 && !has_more {
            return Err(ConfigError {
                flag,
                reason: format!("power_of_two needs at least 2 workers, {source} names 1"),
            });
        }
    }
    Ok(())
}
