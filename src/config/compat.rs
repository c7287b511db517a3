//! Flags of vllm-router that are taken for its sake: without effect here, or refused because clients would get something else
//! ([`super::flags`] says which and why).

use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;

use super::flags::{self, Verdict};
use super::{ConfigError, parse};

/// Of vllm-router, and of no use here.
#[derive(Debug, Args)]
#[command(next_help_heading = "Taken for vllm-router's sake, without effect")]
#[allow(missing_docs, reason = "the comments of fields are the help texts")]
pub struct CompatArgs {
    /// Several models in one router: always so here
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_ENABLE_IGW", hide_env = true)]
    pub enable_igw: bool,
    /// What the workers are: all are spoken to as vLLM is (openai is refused)
    #[arg(long, alias = "runtime", value_name = "NAME")]
    #[arg(value_parser = ["vllm", "trtllm", "openai", "anthropic"])]
    #[arg(env = "CORELANE_BACKEND", hide_env = true)]
    pub backend: Option<String>,
    /// Where answers are stored: nowhere
    #[arg(long, value_name = "NAME")]
    #[arg(value_parser = ["memory", "none"])]
    #[arg(env = "CORELANE_HISTORY_BACKEND", hide_env = true)]
    pub history_backend: Option<String>,
    /// OpenTelemetry: no spans are exported; trace headers reach the workers as they came
    #[arg(long)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_ENABLE_TRACE", hide_env = true)]
    pub enable_trace: bool,
    /// See --enable-trace
    #[arg(long, value_name = "HOST:PORT")]
    #[arg(env = "CORELANE_OTLP_TRACES_ENDPOINT", hide_env = true)]
    pub otlp_traces_endpoint: Option<String>,
    /// See --enable-trace
    #[arg(long, value_name = "RATIO")]
    #[arg(value_parser = parse::ratio, allow_negative_numbers = true)]
    #[arg(env = "CORELANE_OTEL_SAMPLING_RATIO", hide_env = true)]
    pub otel_sampling_ratio: Option<f64>,
    /// See --enable-trace
    #[arg(long, num_args = 0.., value_name = "PATH")]
    #[arg(env = "CORELANE_OTEL_EXCLUDED_PATHS", hide_env = true)]
    pub otel_excluded_paths: Vec<String>,

    /// Refused
    #[arg(long, hide = true)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_MINI_LB", hide_env = true)]
    pub mini_lb: bool,
    /// Refused
    #[arg(long, hide = true)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_PROFILE", hide_env = true)]
    pub profile: bool,
    /// Refused
    #[arg(long, hide = true, value_name = "JSON")]
    #[arg(env = "CORELANE_EPD_CONFIG", hide_env = true)]
    pub epd_config: Option<String>,
    /// Refused
    #[arg(long, hide = true, num_args = 0.., value_name = "URL")]
    #[arg(env = "CORELANE_API_KEY_VALIDATION_URLS", hide_env = true)]
    pub api_key_validation_urls: Vec<String>,
    /// Refused
    #[arg(long, hide = true, value_name = "FILE")]
    #[arg(env = "CORELANE_WASM_MIDDLEWARE", hide_env = true)]
    pub wasm_middleware: Option<PathBuf>,
    /// Refused
    #[arg(long, hide = true, value_name = "HEX")]
    #[arg(env = "CORELANE_WASM_MIDDLEWARE_SHA256", hide_env = true)]
    pub wasm_middleware_sha256: Option<String>,
    /// Refused
    #[arg(long, hide = true, value_name = "PATH")]
    #[arg(env = "CORELANE_WASM_MIDDLEWARE_ROUTE", hide_env = true)]
    pub wasm_middleware_route: Vec<String>,
    /// Refused
    #[arg(long, hide = true)]
    #[arg(value_parser = BoolishValueParser::new())]
    #[arg(env = "CORELANE_ENABLE_PROGRAM_SCHEDULING", hide_env = true)]
    pub enable_program_scheduling: bool,
    /// Refused
    #[arg(long, hide = true, value_name = "JSON")]
    #[arg(env = "CORELANE_PROGRAM_SCHEDULING_CONFIG_JSON", hide_env = true)]
    pub program_scheduling_config_json: Option<String>,
}

impl CompatArgs {
    /// Refuses what cannot be left out in silence.
    ///
    /// # Errors
    /// The first flag that is set and refused.
    pub(super) fn check(&self, has_client_keys: bool) -> Result<(), ConfigError> {
        let refused = [
            ("mini-lb", self.mini_lb),
            ("profile", self.profile),
            ("epd-config", self.epd_config.is_some()),
            (
                "api-key-validation-urls",
                !self.api_key_validation_urls.is_empty(),
            ),
            ("wasm-middleware", self.wasm_middleware.is_some()),
            (
                "wasm-middleware-sha256",
                self.wasm_middleware_sha256.is_some(),
            ),
            (
                "wasm-middleware-route",
                !self.wasm_middleware_route.is_empty(),
            ),
            ("enable-program-scheduling", self.enable_program_scheduling),
            (
                "program-scheduling-config-json",
                self.program_scheduling_config_json.is_some(),
            ),
        ];
        if let Some((flag, _)) = refused.into_iter().find(|(_, is_set)| *is_set) {
            let reason = flags::why(flag);
            return Err(ConfigError { flag, reason });
        }
        if self.backend.as_deref() == Some("openai") {
            let reason =
                "the fields that only vLLM knows are not taken out of requests here".to_owned();
            return Err(ConfigError {
                flag: "backend",
                reason,
            });
        }
        check_environment(has_client_keys)
    }
}

/// The Rust binary reads whom to ask of a client's key from the environment, too: who relied on that must not find the
/// router open.
fn check_environment(has_client_keys: bool) -> Result<(), ConfigError> {
    const NAME: &str = "API_KEY_VALIDATION_URLS";
    let is_set = std::env::var_os(NAME).is_some_and(|urls| !urls.is_empty());
    if !is_set || has_client_keys {
        return Ok(());
    }
    let flag = "api-key-validation-urls";
    let reason = format!("{NAME} is set: {}", flags::why(flag));
    Err(ConfigError { flag, reason })
}

/// Whether a flag is one that ends the start when it is set.
pub(super) fn is_refused(flag: &str) -> bool {
    flags::find(flag).is_some_and(|flag| flag.verdict == Verdict::Refused)
}
