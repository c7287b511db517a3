//! What a path needs. Which paths are ours at all is the exchange's to say (`exchange::paths`).

use std::borrow::Cow;

/// How much a path needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Whoever asks: load balancers and orchestrators have no key.
    Nothing,
    /// A client, where clients have keys.
    Client,
    /// The admin, where there is one.
    Admin,
}

/// What a path of the control plane needs; an unknown one as much as any.
pub fn of_ours(path: &str) -> Need {
    match path {
        "/health" | "/health_generate" | "/liveness" | "/readiness" => Need::Nothing,
        "/v1/models" | "/get_model_info" | "/openapi.json" => Need::Client,
        _ => Need::Admin,
    }
}

/// Paths with which an engine is ruled, or tells of itself what is no client's business: the first part of the path, after
/// `/v1` if that is in front. Sources: vLLM 0.10 to 0.12 and main (`vllm/entrypoints/openai/api_server.py`, later
/// `vllm/entrypoints/serve/`: `dev/` with rlhf, sleep, cache, rpc and server_info, `profile`, `lora`, `elastic_ep`,
/// `fault_tolerance`); SGLang, its paths under `AuthLevel.ADMIN_OPTIONAL` (`srt/entrypoints/http_server.py`); ours, as another
/// router may be the worker.
#[rustfmt::skip]
const ENGINE_ADMIN: [&str; 60] = [
    // vLLM
    "sleep", "wake_up", "is_sleeping", "collective_rpc", "pause", "resume", "is_paused", "abort_requests",
    "scale_elastic_ep", "is_scaling_elastic_ep", "start_profile", "stop_profile", "server_info", "get_world_size",
    "weight_info", "weight_checker", "fault_tolerance", "load_lora_adapter", "unload_lora_adapter",
    // SGLang
    "abort_request", "pause_generation", "continue_generation", "release_memory_occupation",
    "resume_memory_occupation", "slow_down", "set_internal_state", "get_internal_state", "dumper", "hicache",
    "clear_hicache_storage_backend", "configure_logging", "set_trace_level", "freeze_gc", "flush_cache", "get_load",
    "start_expert_distribution_record", "stop_expert_distribution_record", "dump_expert_distribution_record",
    "destroy_weights_update_group", "get_weights_by_name", "get_weights_delta_info", "get_gpu_delta_info",
    "prepare_weights_from_delta", "clear_gpu_delta_state", "check_weights", "weights_checker",
    "send_weights_to_remote_instance", "post_process_weights", "get_server_info",
    "load_lora_adapter_from_tensors", "heap_profile",
    // Ours
    "add_worker", "remove_worker", "list_workers", "workers", "get_loads", "debug", "reload", "metrics", "get_remote_instance_transfer_engine_info",
];

/// Beginnings that stand for families of such paths, in both engines.
#[rustfmt::skip]
const ENGINE_ADMIN_FAMILIES: [&str; 6] =
    ["update_weight", "init_weight", "start_weight", "start_draft_weight", "finish_weight", "reset_"];

/// Longest chain of encodings that is undone; a path that holds more is taken for the worst.
const DECODINGS_MAX: usize = 3;

/// Whether a path that is passed on rules an engine. The engine, or a proxy in front of it, may read the path more kindly
/// than it was written (`/%73leep`, `//sleep/`, `/x/../sleep`), so it is read in the kindest way here.
pub fn is_engine_admin(path: &str) -> bool {
    let Some(path) = decoded(path) else {
        return true;
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split(['/', '\\']) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    let first = match parts[..] {
        ["v1", second, ..] => second,
        [first, ..] => first,
        [] => return false,
    };
    // A matrix parameter (`/sleep;x`) or white space at the end is dropped by some.
    let first = first.split(';').next().unwrap_or("").trim();
    let first = first.to_ascii_lowercase();
    ENGINE_ADMIN.contains(&&*first)
        || ENGINE_ADMIN_FAMILIES
            .iter()
            .any(|family| first.starts_with(family))
}

/// Without percent-encoding; `None`: it cannot be undone.
fn decoded(path: &str) -> Option<Cow<'_, str>> {
    let mut path = Cow::Borrowed(path);
    for _ in 0..DECODINGS_MAX {
        if !path.contains('%') {
            return Some(path);
        }
        let plain = percent_encoding::percent_decode_str(&path)
            .decode_utf8_lossy()
            .into_owned();
        if plain == *path {
            return Some(path); // A percent sign that encodes nothing.
        }
        path = plain.into();
    }
    (!path.contains('%')).then_some(path)
}
