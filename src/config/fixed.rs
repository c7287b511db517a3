//! What is fixed at start: listeners, threads, buffers and tables are made from it once.

use super::Config;

impl Config {
    /// Each flag whose meaning is fixed, and that meaning.
    fn fixed(&self) -> Vec<(&'static str, String)> {
        let pd = self.pd.as_ref();
        let [selector, prefill_selector, decode_selector] = self.discovery.selectors();
        let pods = self.discovery.kubernetes.as_ref();
        vec![
            ("host", self.listen.ip().to_string()),
            ("port", self.listen.port().to_string()),
            ("prometheus-host", self.metrics_listen.ip().to_string()),
            ("prometheus-port", self.metrics_listen.port().to_string()),
            // Without a port the host means nothing.
            (
                "admin-host",
                self.admin_listen
                    .map_or(String::new(), |a| a.ip().to_string()),
            ),
            (
                "admin-port",
                self.admin_listen
                    .map_or(String::new(), |a| a.port().to_string()),
            ),
            ("reuse-port", self.reuse_port.to_string()),
            ("cores", self.core_count.to_string()),
            ("log-dir", format!("{:?}", self.log_dir)),
            ("log-files-max", self.log_files_max.to_string()),
            ("access-log", format!("{:?}", self.access_log)),
            ("access-log-file", format!("{:?}", self.access_log_file)),
            (
                "access-log-lines-per-sec",
                self.access_log_lines_per_sec.to_string(),
            ),
            ("decision-log", format!("{:?}", self.decision_log)),
            (
                "debug-decisions-count",
                self.debug_decisions_count.to_string(),
            ),
            ("recv-buffer-bytes", self.recv_buffer_bytes.to_string()),
            ("recv-buffer-count", self.recv_buffer_count.to_string()),
            (
                "io-uring-without",
                format!("{} {}", self.multishot_receive, self.deferred_task_run),
            ),
            (
                "prefix-memory-bytes",
                self.prefix_memory_bytes_max.to_string(),
            ),
            ("prefix-hash-seed", self.prefix_hash_seed.to_string()),
            ("max-tree-size", self.tree_bytes_per_worker_max.to_string()),
            (
                "intra-node-data-parallel-size",
                self.data_parallel_size.to_string(),
            ),
            ("service-discovery", pods.is_some().to_string()),
            ("selector", selector),
            ("prefill-selector", prefill_selector),
            ("decode-selector", decode_selector),
            (
                "service-discovery-port",
                format!("{:?}", pods.map(|pods| pods.port)),
            ),
            (
                "service-discovery-namespace",
                format!("{:?}", pods.map(|pods| &pods.namespace)),
            ),
            // Sources, replay endpoints, block size and model.
            (
                match pd {
                    Some(_) => "pd-kv-events",
                    None => "kv-event-source",
                },
                format!(
                    "{:?} {} {:?}",
                    self.kv.sources, self.kv.block_tokens, self.kv.model
                ),
            ),
            // With its template, threads and memory.
            ("tokenizer", format!("{:?}", self.kv.tokenizer)),
            ("kv-index-bytes", self.kv.index_bytes_max.to_string()),
            // The index is made at start, or never.
            ("policy", kv_use(self.uses_kv_events())),
            ("vllm-pd-disaggregation", pd.is_some().to_string()),
            // Without P/D these two mean nothing, whatever they say.
            (
                "kv-connector",
                pd.map_or("", |pd| pd.connector.name()).to_owned(),
            ),
            (
                "vllm-discovery-address",
                pd.and_then(|pd| pd.discovery_address.clone())
                    .unwrap_or_default(),
            ),
        ]
    }

    /// Flags that are fixed at start and mean something else in `other`.
    pub fn fixed_differences(&self, other: &Config) -> Vec<&'static str> {
        let pairs = self.fixed().into_iter().zip(other.fixed());
        let different = pairs.filter(|((_, here), (_, there))| here != there);
        different.map(|((flag, _), _)| flag).collect()
    }

    /// Takes over from the configuration that runs what the machine may say otherwise now, though nobody changed a flag:
    /// where names point to, and which CPUs this process may use.
    pub fn keep_fixed(&mut self, running: &Config) {
        self.listen = running.listen;
        self.metrics_listen = running.metrics_listen;
        self.admin_listen = running.admin_listen;
        self.is_admin_apart = running.is_admin_apart;
        self.core_count = running.core_count;
        self.is_data_inherited = running.is_data_inherited;
    }
}

fn kv_use(is_used: bool) -> String {
    let text = if is_used { "kv_aware" } else { "" };
    text.to_owned()
}
