//! What a simulated worker shows of itself: the totals behind `/metrics`, and their text in vLLM's names.
//!
//! Written by the engine's task after each turn, read by whoever asks (`/metrics`, the demo's view); always under the
//! worker's own mutex, for a few dozen copies at most. This is the simulated worker, not the router.

use std::fmt::Write as _;

use super::engine::EngineStats;
use super::handover::{HandoverCounts, Violation};

/// vLLM's buckets of `vllm:time_to_first_token_seconds`.
const FIRST_TOKEN_BOUNDS_S: [f64; 20] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
];
/// vLLM's buckets of `vllm:e2e_request_latency_seconds`.
const REQUEST_BOUNDS_S: [f64; 20] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
];

/// A Prometheus histogram of seconds.
#[derive(Clone, Debug)]
pub struct Seconds {
    bounds: &'static [f64; 20],
    counts: [u64; 20],
    count: u64,
    sum: f64,
}

impl Seconds {
    fn new(bounds: &'static [f64; 20]) -> Seconds {
        Seconds {
            bounds,
            counts: [0; 20],
            count: 0,
            sum: 0.0,
        }
    }

    /// Adds one observation.
    pub fn observe(&mut self, seconds: f64) {
        if let Some(at) = self.bounds.iter().position(|bound| seconds <= *bound) {
            self.counts[at] += 1;
        }
        self.count += 1;
        self.sum += seconds;
    }
}

/// The totals of one worker.
#[derive(Clone, Debug)]
pub struct Board {
    /// As the engine said last.
    pub engine: EngineStats,
    /// From submission to the first token.
    pub first_token: Seconds,
    /// From submission to the last token.
    pub request: Seconds,
    /// Sequences ended by themselves, at their limit, by an abort.
    pub finished: [u64; 3],
}

impl Default for Board {
    fn default() -> Board {
        Board {
            engine: EngineStats::default(),
            first_token: Seconds::new(&FIRST_TOKEN_BOUNDS_S),
            request: Seconds::new(&REQUEST_BOUNDS_S),
            finished: [0; 3],
        }
    }
}

impl Board {
    /// The text of `/metrics` (Prometheus text format 0.0.4).
    pub fn exposition(&self, model: &str, block_tokens: u32, cache_blocks: u32) -> String {
        // Backslash, quote and line feed are what the format escapes in a label.
        let model = model
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        let mut page = Page {
            labels: format!("engine=\"0\",model_name=\"{model}\""),
            text: String::new(),
        };
        let engine = &self.engine;
        page.gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            engine.running,
        );
        page.gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            engine.waiting,
        );
        page.gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            engine.usage,
        );
        let queries = "Prefix cache queries, in terms of number of queried tokens.";
        page.counter("prefix_cache_queries_total", queries, engine.queried_tokens);
        let hits = "Prefix cache hits, in terms of number of cached tokens.";
        page.counter("prefix_cache_hits_total", hits, engine.cached_tokens);
        page.counter(
            "num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            0,
        );
        page.counter(
            "prompt_tokens_total",
            "Number of prefill tokens processed.",
            engine.prompt_tokens,
        );
        page.counter(
            "generation_tokens_total",
            "Number of generation tokens processed.",
            engine.output_tokens,
        );
        page.head(
            "request_success_total",
            "Count of successfully processed requests.",
            "counter",
        );
        for (reason, count) in ["stop", "length", "abort"].iter().zip(self.finished) {
            page.line(
                "request_success_total",
                &format!(",finished_reason=\"{reason}\""),
                count,
            );
        }
        let first_token = "Histogram of time to first token in seconds.";
        page.histogram(
            "time_to_first_token_seconds",
            first_token,
            &self.first_token,
        );
        page.histogram(
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            &self.request,
        );
        page.head(
            "cache_config_info",
            "Information of the LLMEngine CacheConfig",
            "gauge",
        );
        let cache = format!(
            ",block_size=\"{block_tokens}\",num_gpu_blocks=\"{cache_blocks}\",enable_prefix_caching=\"True\""
        );
        page.line("cache_config_info", &cache, 1);
        page.text
    }

    /// What `/metrics` says of P/D besides, in names that are this simulated worker's own.
    pub fn handover_exposition(&self, counts: &HandoverCounts) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let mut family = |name: &str, kind: &str, help: &str, lines: &[(&str, u64)]| {
            let _ = writeln!(
                text,
                "# HELP mock_worker_pd_{name} {help}\n# TYPE mock_worker_pd_{name} {kind}"
            );
            for (labels, value) in lines {
                let _ = writeln!(text, "mock_worker_pd_{name}{labels} {value}");
            }
        };
        let counters = [
            (
                "issued",
                "Hand-overs whose blocks were pinned.",
                counts.issued,
            ),
            (
                "fetched",
                "Hand-overs that a decode worker has fetched.",
                counts.fetched,
            ),
            (
                "expired",
                "Hand-overs whose lease ended first: leaked.",
                counts.expired,
            ),
            (
                "lost",
                "Hand-overs gone with a restarted engine.",
                counts.lost,
            ),
            (
                "claimed",
                "Hand-overs of others that were claimed.",
                counts.claimed,
            ),
        ];
        for (name, help, value) in counters {
            family(
                &format!("{name}_handovers_total"),
                "counter",
                help,
                &[("", value)],
            );
        }
        let open = [("", counts.open())];
        family("open_handovers", "gauge", "Hand-overs waited for.", &open);
        let kept = [("", u64::from(self.engine.kept_blocks))];
        family(
            "pinned_blocks",
            "gauge",
            "KV blocks pinned for hand-overs.",
            &kept,
        );
        let labels = Violation::ALL.map(|kind| format!("{{kind=\"{}\"}}", kind.label()));
        let lines: Vec<(&str, u64)> = labels
            .iter()
            .zip(counts.violations)
            .map(|(labels, count)| (labels.as_str(), count))
            .collect();
        family(
            "violations_total",
            "counter",
            "Breaches of the P/D protocol.",
            &lines,
        );
        text
    }
}

struct Page {
    labels: String,
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            self.text,
            "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}"
        );
    }

    fn line(&mut self, name: &str, more_labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(
            self.text,
            "vllm:{name}{{{}{more_labels}}} {value}",
            self.labels
        );
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Into<f64>) {
        self.head(name, help, "gauge");
        self.line(name, "", format_args!("{:?}", value.into()));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "counter");
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, seconds: &Seconds) {
        self.head(name, help, "histogram");
        let mut below = 0;
        for (bound, count) in seconds.bounds.iter().zip(seconds.counts) {
            below += count;
            self.line(
                &format!("{name}_bucket"),
                &format!(",le=\"{bound:?}\""),
                below,
            );
        }
        self.line(&format!("{name}_bucket"), ",le=\"+Inf\"", seconds.count);
        self.line(&format!("{name}_count"), "", seconds.count);
        self.line(&format!("{name}_sum"), "", seconds.sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_vllms_names_and_cumulative_buckets() {
        let mut board = Board::default();
        board.engine.running = 3;
        board.engine.usage = 0.25;
        board.engine.cached_tokens = 7;
        board.finished = [4, 5, 6];
        for seconds in [0.003, 0.05, 500.0] {
            board.first_token.observe(seconds);
        }
        let text = board.exposition("a \"model\"", 16, 100);
        let labels = "engine=\"0\",model_name=\"a \\\"model\\\"\"";
        for line in [
            format!("vllm:num_requests_running{{{labels}}} 3.0\n"),
            format!("vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"),
            format!("vllm:prefix_cache_hits_total{{{labels}}} 7\n"),
            format!("vllm:request_success_total{{{labels},finished_reason=\"length\"}} 5\n"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.005\"}} 1\n"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.06\"}} 2\n"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"160.0\"}} 2\n"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"+Inf\"}} 3\n"),
            format!("vllm:time_to_first_token_seconds_count{{{labels}}} 3\n"),
        ] {
            assert!(text.contains(&line), "{line} in {text}");
        }
    }
    #[test]
    fn the_page_of_handovers_has_every_kind_of_violation() {
        let mut board = Board::default();
        board.engine.kept_blocks = 12;
        let mut counts = HandoverCounts {
            issued: 5,
            expired: 2,
            ..HandoverCounts::default()
        };
        counts.violations[Violation::Reused as usize] = 3;
        let text = board.handover_exposition(&counts);
        for line in [
            "\nmock_worker_pd_issued_handovers_total 5\n",
            "\nmock_worker_pd_expired_handovers_total 2\n",
            "\nmock_worker_pd_open_handovers 3\n",
            "\nmock_worker_pd_pinned_blocks 12\n",
            "\nmock_worker_pd_violations_total{kind=\"reused\"} 3\n",
            "\nmock_worker_pd_violations_total{kind=\"missing\"} 0\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
