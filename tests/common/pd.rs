//! Prefill and decode workers as strict as real ones: transfer parameters name blocks that exist once and can be fetched
//! once. Who breaks a rule is written down in the [`Transfers`] that all workers of a test share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use corelane::Router;
use corelane::shared::{CoreStats, PdStats};
use serde_json::Value;

use super::{Recorded, Reply, Worker, total, until};

/// What the router has to ask of a prefill worker (NIXL).
pub const PREFILL_PARAMS: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// What prefill workers count of any prompt.
pub const PROMPT_TOKENS: u64 = 91;
pub const CACHED_TOKENS: u64 = 64;

/// The hand-overs of a test.
#[derive(Default)]
pub struct Transfers {
    /// By parameters, as text: how often a decode worker has fetched the blocks.
    fetches: Mutex<HashMap<String, u32>>,
    issued: AtomicU64,
    /// Decode requests without parameters.
    pub without: AtomicU64,
    violations: Mutex<Vec<String>>,
}

impl Transfers {
    pub fn new() -> Arc<Transfers> {
        Arc::default()
    }

    fn violation(&self, what: String) {
        self.violations.lock().unwrap().push(what);
    }

    /// Fails the test if a rule was broken.
    pub fn assert_kept(&self) {
        let violations = self.violations.lock().unwrap();
        let some = &violations[..violations.len().min(5)];
        assert!(violations.is_empty(), "{}: {some:#?}", violations.len());
    }

    pub fn issued(&self) -> u64 {
        self.issued.load(Ordering::SeqCst)
    }

    /// How many hand-overs were fetched.
    pub fn fetched(&self) -> usize {
        let fetches = self.fetches.lock().unwrap();
        fetches.values().filter(|count| **count > 0).count()
    }

    /// A new hand-over's parameters, in a spelling that no writer of JSON would choose.
    pub fn issue(&self) -> String {
        let number = self.issued.fetch_add(1, Ordering::SeqCst);
        let params = format!(
            r#"{{"do_remote_prefill":true, "do_remote_decode":false,"remote_block_ids":[[1, 2.50,3]],"remote_engine_id":"e\u002d{number}","remote_port":5600, "big":123456789012345678901234567890,"list":[{{"a}}":"]"}}],"tp_size":1}}"#
        );
        self.fetches.lock().unwrap().insert(params.clone(), 0);
        params
    }

    fn check_prefill(&self, request: &Recorded) {
        let Ok(body) = serde_json::from_slice::<Value>(&request.body) else {
            return self.violation(format!("prefill: no JSON: {}", text(&request.body)));
        };
        let sampling = &body["sampling_params"];
        let limits = [
            &body["max_tokens"],
            &body["max_completion_tokens"],
            &body["max_output_tokens"],
            &sampling["max_tokens"],
        ];
        let of_one = limits.iter().all(|limit| limit.is_null() || **limit == 1)
            && limits.iter().any(|limit| **limit == 1);
        let is_stream = body["stream"] == true || !body["stream_options"].is_null();
        let asks = text(&request.body).contains(PREFILL_PARAMS);
        if !of_one || is_stream || !asks {
            self.violation(format!("prefill: {}", text(&request.body)));
        }
    }

    /// The parameters of a decode request, marked as fetched.
    fn fetch(&self, request: &Recorded) {
        let Some(params) = params_of(&request.body) else {
            self.without.fetch_add(1, Ordering::SeqCst);
            return;
        };
        let count = {
            let mut fetches = self.fetches.lock().unwrap();
            fetches.get_mut(&params).map(|count| {
                *count += 1;
                *count
            })
        };
        match count {
            Some(1) => {}
            Some(n) => self.violation(format!("fetched {n} times: {params}")),
            None => self.violation(format!("never issued: {params}")),
        }
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The raw text of a body's `kv_transfer_params`, which the router puts last.
pub fn params_of(body: &[u8]) -> Option<String> {
    const NAME: &str = r#""kv_transfer_params":"#;
    let body = text(body);
    let at = body.rfind(NAME)? + NAME.len();
    let end = body.trim_end().len() - 1;
    Some(body[at..end].to_string())
}

/// A prefill answer with these parameters.
pub fn prefill_answer(params: &str) -> Reply {
    Reply::json(
        200,
        &format!(
            r#"{{"id":"p","choices":[{{"text":"x"}}],"usage":{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":1,"total_tokens":{},"prompt_tokens_details":{{"cached_tokens":{CACHED_TOKENS}}}}},"kv_transfer_params":{params}}}"#,
            PROMPT_TOKENS + 1
        ),
    )
}

/// A decode answer as vLLM gives it: all of the prompt looks cached.
pub fn decode_answer() -> Reply {
    Reply::json(200, DECODE_BODY)
}

pub const DECODE_BODY: &str = r#"{"id":"d","object":"chat.completion","choices":[{"message":{"content":"caf\u00e9 2.50"}}],"usage":{"prompt_tokens":1092,"total_tokens":1099,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":1091}}}"#;

/// Makes a worker a prefill worker; `fault` may answer in its stead.
pub fn prefill_script(
    worker: &Worker,
    transfers: &Arc<Transfers>,
    fault: impl Fn(&Recorded) -> Option<Reply> + Send + Sync + 'static,
) {
    let transfers = transfers.clone();
    worker.script(move |request| {
        transfers.check_prefill(request);
        fault(request).unwrap_or_else(|| prefill_answer(&transfers.issue()))
    });
}

/// Makes a worker a decode worker; `fault` may answer in its stead, when the blocks have been fetched.
pub fn decode_script(
    worker: &Worker,
    transfers: &Arc<Transfers>,
    fault: impl Fn(&Recorded) -> Option<Reply> + Send + Sync + 'static,
) {
    let transfers = transfers.clone();
    worker.script(move |request| {
        transfers.fetch(request);
        fault(request).unwrap_or_else(decode_answer)
    });
}

/// Prefill and decode workers and what they share.
pub struct Pools {
    pub transfers: Arc<Transfers>,
    pub prefill: Vec<Worker>,
    pub decode: Vec<Worker>,
}

impl Pools {
    pub async fn start(prefill_count: usize, decode_count: usize) -> Pools {
        Pools::start_with(prefill_count, decode_count, true).await
    }

    /// `keeps`: requests are recorded.
    pub async fn start_with(prefill_count: usize, decode_count: usize, keeps: bool) -> Pools {
        let mut pools = Pools {
            transfers: Transfers::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
        };
        for _ in 0..prefill_count {
            let worker = Worker::start_with(keeps).await;
            prefill_script(&worker, &pools.transfers, |_| None);
            pools.prefill.push(worker);
        }
        for _ in 0..decode_count {
            let worker = Worker::start_with(keeps).await;
            decode_script(&worker, &pools.transfers, |_| None);
            pools.decode.push(worker);
        }
        pools
    }

    /// A router before them; it does not probe by itself.
    pub async fn router(&self, flags: &[&str]) -> Router {
        let quiet = ["--health-check-interval-secs", "3600"];
        self.probing_router(&[&quiet[..], flags].concat()).await
    }

    pub async fn probing_router(&self, flags: &[&str]) -> Router {
        let urls =
            |workers: &[Worker]| -> Vec<String> { workers.iter().map(Worker::url).collect() };
        let router = pd_router(&urls(&self.prefill), &urls(&self.decode), flags);
        let count = self.prefill.len() + self.decode.len();
        until("all workers are ready", || {
            router.control().ready_count() == count
        })
        .await;
        router
    }

    /// The first of the prefill workers' next requests is answered so, the others as usual.
    pub fn prefill_fails_first(&self, fault: Reply) {
        let turn = Arc::new(AtomicU64::new(0));
        for worker in &self.prefill {
            let (turn, fault) = (turn.clone(), fault.clone());
            prefill_script(worker, &self.transfers, move |_| {
                (turn.fetch_add(1, Ordering::SeqCst) == 0).then(|| fault.clone())
            });
        }
    }

    /// The first of the decode workers' next requests is answered so, the others as usual.
    pub fn decode_fails_first(&self, fault: Reply) {
        let turn = Arc::new(AtomicU64::new(0));
        for worker in &self.decode {
            let (turn, fault) = (turn.clone(), fault.clone());
            decode_script(worker, &self.transfers, move |_| {
                (turn.fetch_add(1, Ordering::SeqCst) == 0).then(|| fault.clone())
            });
        }
    }

    pub fn prefill_count(&self) -> u64 {
        self.prefill.iter().map(Worker::count).sum()
    }

    pub fn decode_count(&self) -> u64 {
        self.decode.iter().map(Worker::count).sum()
    }

    pub fn decode_requests(&self) -> Vec<Recorded> {
        self.decode.iter().flat_map(Worker::requests).collect()
    }

    pub fn prefill_requests(&self) -> Vec<Recorded> {
        self.prefill.iter().flat_map(Worker::requests).collect()
    }
}

/// A router that splits requests, before workers that need not be ready.
pub fn pd_router(prefill: &[String], decode: &[String], flags: &[&str]) -> Router {
    let flags = [&["--vllm-pd-disaggregation"][..], flags].concat();
    super::start_router(&flags, &[("--prefill", prefill), ("--decode", decode)])
}

/// What the books say of a worker, all its lives together: waiting and active.
pub fn load(router: &Router, worker: &Worker) -> (u32, u32) {
    let url = worker.url();
    let mut load = (0, 0);
    for view in router.control().workers() {
        if *view.url == *url {
            let booked = router.shared.books.load(view.id.slot);
            load.0 += booked.waiting;
            load.1 += booked.active;
        }
    }
    load
}

/// A counter of P/D, all cores together.
pub fn pd_total(router: &Router, read: impl Fn(&PdStats) -> u64) -> u64 {
    total(router, |stats: &CoreStats| read(&stats.pd))
}

pub fn orphans(router: &Router) -> (u64, u64, u64) {
    (
        pd_total(router, |pd| pd.orphans.value()),
        pd_total(router, |pd| pd.orphans_released.value()),
        pd_total(router, |pd| pd.orphans_lost.value()),
    )
}
