//! Where engines tell of their KV blocks, for `kv_aware`. Flags as in vllm-router 0.1.17.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::cli::{KvArgs, PdArgs};
use super::{ConfigError, WorkerSpec, WorkerUrl};
use crate::route::Role;
use crate::tokenize::{ContentFormat, ModelFiles};

/// Most streams of events, all workers together: what the index can tell apart.
pub const SOURCE_COUNT_MAX: usize = 8192;

/// One data-parallel rank's stream of events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSource {
    /// Whose blocks it tells of.
    pub worker: WorkerUrl,
    /// Place among the worker's sources: its data-parallel rank.
    pub rank: u32,
    /// `host:port` of the ZMQ PUB socket.
    pub endpoint: String,
    /// `host:port` of the ROUTER socket that sends old events again.
    pub replay: Option<String>,
}

/// What `kv_aware` knows from, beside prompts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvConfig {
    /// No two of the same worker and rank.
    pub sources: Vec<KvSource>,
    /// Tokens of a block; other blocks are not taken.
    pub block_tokens: usize,
    /// The base model's name: what asks for another one asks for an adapter. None: adapters are those that events name.
    pub model: Option<String>,
    /// Memory of the index, all cores together, in bytes.
    pub index_bytes_max: usize,
    /// Sessions keep to a worker until they were idle for so long; none: they are not looked at.
    pub session_affinity_ttl_secs: Option<u32>,
    /// What makes tokens of prompts that are text.
    pub tokenizer: Option<TokenizerConfig>,
}

/// Where tokenizers are, and what they may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// At least one; no two for the same model.
    pub models: Vec<ModelFiles>,
    /// In place of the models' own.
    pub chat_template: Option<PathBuf>,
    /// None: it is found as vLLM finds it.
    pub content_format: Option<ContentFormat>,
    /// Longest wait for a prompt's tokens.
    pub timeout: Duration,
    /// Threads.
    pub thread_count: usize,
    /// Prompts that may wait for one.
    pub queue_count_max: usize,
    /// Memory of each model's tokenizer for the tokens of what it has seen.
    pub cache_bytes_max: usize,
}

impl TokenizerConfig {
    fn from_args(args: &KvArgs) -> Result<Option<TokenizerConfig>, ConfigError> {
        const FLAG: &str = "tokenizer";
        if args.tokenizer.is_empty() {
            return match args.chat_template {
                Some(_) => Err(refuse(
                    "chat-template",
                    "it is of no use without --tokenizer",
                )),
                None => Ok(None),
            };
        }
        if cfg!(not(feature = "tokenizer")) {
            return Err(refuse(FLAG, "this program was built without tokenizers"));
        }
        let mut models: Vec<ModelFiles> = Vec::new();
        for text in &args.tokenizer {
            // A path may have a '=' in it: what is there as it stands is a path.
            let files = match text.split_once('=') {
                Some((model, path)) if !Path::new(text).exists() && !model.is_empty() => {
                    ModelFiles {
                        model: Some(model.to_owned()),
                        path: path.into(),
                    }
                }
                _ => ModelFiles {
                    model: None,
                    path: text.into(),
                },
            };
            let json = match files.path.is_dir() {
                true => files.path.join("tokenizer.json"),
                false => files.path.clone(),
            };
            if !json.is_file() {
                return Err(refuse(FLAG, format!("{} is not there", json.display())));
            }
            if models.iter().any(|other| other.model == files.model) {
                let of = files
                    .model
                    .map_or("any model".into(), |m| format!("model {m}"));
                return Err(refuse(FLAG, format!("two for {of}")));
            }
            models.push(files);
        }
        if let Some(file) = args.chat_template.as_ref().filter(|file| !file.is_file()) {
            return Err(refuse(
                "chat-template",
                format!("{} is not there", file.display()),
            ));
        }
        Ok(Some(TokenizerConfig {
            models,
            chat_template: args.chat_template.clone(),
            content_format: match args.chat_template_content_format.as_str() {
                "string" => Some(ContentFormat::String),
                "openai" => Some(ContentFormat::OpenAi),
                _ => None,
            },
            timeout: Duration::from_millis(args.tokenizer_timeout_ms.into()),
            thread_count: args.tokenizer_threads as usize,
            queue_count_max: args.tokenizer_queue_size as usize,
            cache_bytes_max: super::size("tokenizer-cache-bytes", args.tokenizer_cache_bytes)?,
        }))
    }
}

impl KvConfig {
    pub(super) fn from_args(
        args: &KvArgs,
        pd: &PdArgs,
        workers: &[WorkerSpec],
        may_find_others: bool,
    ) -> Result<KvConfig, ConfigError> {
        let (flag, given) = match pd.vllm_pd_disaggregation {
            true => ("pd-kv-events", &args.pd_kv_events),
            false => ("kv-event-source", &args.kv_event_source),
        };
        if pd.vllm_pd_disaggregation && !args.kv_event_source.is_empty() {
            let reason =
                "it is for regular workers; with prefill/decode disaggregation use --pd-kv-events";
            return Err(refuse("kv-event-source", reason));
        }
        if !pd.vllm_pd_disaggregation && !args.pd_kv_events.is_empty() {
            let reason =
                "it needs --vllm-pd-disaggregation; for regular workers use --kv-event-source";
            return Err(refuse("pd-kv-events", reason));
        }
        let mut sources: Vec<KvSource> = Vec::new();
        for text in given {
            let (worker, endpoints) = read(flag, text)?;
            let is_prefill = |spec: &WorkerSpec| spec.url == worker && spec.role == Role::Prefill;
            let is_listed = workers.iter().any(is_prefill) || may_find_others;
            if pd.vllm_pd_disaggregation && !is_listed {
                return Err(refuse(flag, format!("{worker} is no --prefill worker")));
            }
            if sources.iter().any(|source| source.worker == worker) {
                return Err(refuse(flag, format!("{worker} is given twice")));
            }
            let ranks = endpoints.into_iter().zip(0..);
            sources.extend(ranks.map(|(endpoint, rank)| KvSource {
                worker: worker.clone(),
                rank,
                endpoint,
                replay: None,
            }));
        }
        if sources.len() > SOURCE_COUNT_MAX {
            let reason = format!("more than {SOURCE_COUNT_MAX} endpoints");
            return Err(refuse(flag, reason));
        }
        for text in &args.kv_event_replay_source {
            add_replays(text, &mut sources)?;
        }
        Ok(KvConfig {
            sources,
            block_tokens: args.kv_event_block_size as usize,
            model: args.kv_event_model.clone().filter(|name| !name.is_empty()),
            index_bytes_max: super::size("kv-index-bytes", args.kv_index_bytes)?,
            session_affinity_ttl_secs: args.kv_aware_session_affinity_ttl_secs,
            tokenizer: TokenizerConfig::from_args(args)?,
        })
    }
}

fn add_replays(text: &str, sources: &mut [KvSource]) -> Result<(), ConfigError> {
    const FLAG: &str = "kv-event-replay-source";
    let (worker, endpoints) = read(FLAG, text)?;
    let of_worker = || (0..sources.len()).filter(|n| sources[*n].worker == worker);
    let places: Vec<usize> = of_worker().collect();
    if places.len() != endpoints.len() {
        let reason = format!(
            "{worker} has {} event endpoints and {} for replay",
            places.len(),
            endpoints.len()
        );
        return Err(refuse(FLAG, reason));
    }
    for (place, endpoint) in places.into_iter().zip(endpoints) {
        if sources[place].replay.replace(endpoint).is_some() {
            return Err(refuse(FLAG, format!("{worker} is given twice")));
        }
    }
    Ok(())
}

/// `URL=ENDPOINT[,ENDPOINT...]`, one endpoint for each data-parallel rank.
fn read(flag: &'static str, text: &str) -> Result<(WorkerUrl, Vec<String>), ConfigError> {
    let (url, endpoints) = text.split_once('=').ok_or_else(|| {
        refuse(
            flag,
            format!("'{text}' is not WORKER_URL=ENDPOINT[,ENDPOINT]"),
        )
    })?;
    let worker = WorkerUrl::parse(url).map_err(|e| refuse(flag, e.to_string()))?;
    let host = worker.host().to_owned();
    let endpoints = endpoints
        .split(',')
        .map(|endpoint| endpoint_of(endpoint.trim(), &host))
        .collect::<Option<Vec<String>>>();
    let reason = || format!("'{text}': an endpoint is tcp://host:port");
    Ok((worker, endpoints.ok_or_else(|| refuse(flag, reason()))?))
}

/// `tcp://host:port` as `host:port`; an engine's wildcard host means the worker's.
fn endpoint_of(text: &str, worker_host: &str) -> Option<String> {
    let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    match host {
        "" => None,
        "*" | "0.0.0.0" | "[::]" => Some(format!("{worker_host}:{port}")),
        host => Some(format!("{host}:{port}")),
    }
}

fn refuse(flag: &'static str, reason: impl Into<String>) -> ConfigError {
    ConfigError {
        flag,
        reason: reason.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn config(args: &[&str]) -> Result<Config, ConfigError> {
        use clap::Parser;
        let cli = super::super::Cli::try_parse_from([&["corelane"], args].concat());
        Config::from_cli(cli.expect("it parses"))
    }

    fn reason(args: &[&str]) -> String {
        let error = config(args).expect_err("it is refused");
        format!("{}: {}", error.flag, error.reason)
    }

    #[test]
    fn a_source_for_each_rank_with_its_replay() {
        let config = config(&[
            "--policy",
            "kv_aware",
            "--worker-urls",
            "http://a:1",
            "http://b:1",
            "--kv-event-source",
            "http://a:1=tcp://a:5557,tcp://*:5558",
            "--kv-event-source",
            "http://b:1=tcp://10.0.0.1:5557",
            "--kv-event-replay-source",
            "http://a:1=tcp://a:6557,tcp://a:6558",
            "--kv-event-block-size",
            "32",
            "--kv-event-model",
            "m",
        ])
        .unwrap();
        let shown: Vec<String> = config
            .kv
            .sources
            .iter()
            .map(|s| format!("{} {} {} {:?}", s.worker, s.rank, s.endpoint, s.replay))
            .collect();
        assert_eq!(
            shown,
            [
                "http://a:1 0 a:5557 Some(\"a:6557\")",
                "http://a:1 1 a:5558 Some(\"a:6558\")",
                "http://b:1 0 10.0.0.1:5557 None",
            ]
        );
        assert_eq!(config.kv.block_tokens, 32);
        assert_eq!(config.kv.model.as_deref(), Some("m"));
    }

    #[cfg(feature = "tokenizer")]
    #[test]
    fn tokenizers_are_for_any_model_or_for_one() {
        let folder = std::env::temp_dir().join(format!("corelane-kv-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let json = folder.join("tokenizer.json");
        std::fs::write(&json, "{}").unwrap();
        let (whole, named) = (folder.to_str().unwrap(), format!("m={}", json.display()));
        let kv = ["--policy", "kv_aware", "--tokenizer"];
        let found = config(&[&kv[..], &[whole, &named]].concat()).unwrap();
        let models = found.kv.tokenizer.unwrap().models;
        let shown: Vec<_> = models
            .iter()
            .map(|m| (m.model.as_deref(), &*m.path))
            .collect();
        assert_eq!(shown, [(None, &*folder), (Some("m"), &*json)]);
        let twice = reason(&[&kv[..], &[&named, &named]].concat());
        assert!(twice.contains("two for model m"), "{twice}");
        let gone = reason(&[&kv[..], &["/no/such/model"]].concat());
        assert!(gone.contains("/no/such/model is not there"), "{gone}");
        assert!(reason(&["--chat-template", whole]).contains("without --tokenizer"));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let source = |text: &str| reason(&["--policy", "kv_aware", "--kv-event-source", text]);
        assert!(source("http://a:1").contains("is not WORKER_URL="));
        for bad in ["a:5557", "tcp://a", "tcp://a:0", "tcp://:1", "ipc:///x", ""] {
            let text = format!("http://a:1={bad}");
            assert!(source(&text).contains("tcp://host:port"), "{bad}");
        }
        let one = ["--kv-event-source", "http://a:1=tcp://a:1"];
        assert!(reason(&[one, one].concat()).contains("given twice"));
        let replays = ["--kv-event-replay-source", "http://a:1=tcp://a:1,tcp://a:2"];
        assert!(reason(&[one, replays].concat()).contains("1 event endpoints and 2"));
        let pd = ["--pd-kv-events", "http://p:1=tcp://p:1"];
        assert!(reason(&pd).contains("--vllm-pd-disaggregation"));
        let fleet = [
            "--vllm-pd-disaggregation",
            "--prefill",
            "http://q:1",
            "--decode",
            "http://d:1",
        ];
        assert!(reason(&[&pd[..], &fleet[..]].concat()).contains("no --prefill worker"));
        assert!(reason(&[&one[..], &fleet[..]].concat()).contains("--pd-kv-events"));
    }
}
