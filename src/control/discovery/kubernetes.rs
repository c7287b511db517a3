//! Pods of Kubernetes as workers. Each selector has a watcher: it lists the pods, then follows their changes until the
//! connection ends or the server has forgotten where we were (410), and then lists anew, so that no deletion is missed.
//! While the API is away the last that was known holds.
//!
//! The watchers run on a thread of their own, as what fetches credentials may block; what they see goes to a task of the
//! control thread.

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::{Client, Config};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::super::Plane;
use super::super::registry::Finder;
use super::backoff::Backoff;
use super::claims::{Claims, Found};
use super::pods::{self, Pod, RawPod};
use super::{Fault, RETRY_PAUSE};
use crate::config::KubernetesConfig;
use crate::route::Role;

/// Pods in one answer.
const PAGE_COUNT: u32 = 500;
/// Time for one such answer, and for the beginning of a watch.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The server ends a watch after so many seconds; a connection that has died without a sign is found by then.
const WATCH_SECS: u32 = 120;
/// Time beyond that.
const WATCH_GRACE: Duration = Duration::from_secs(10);
/// Pauses before a list: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// A watch of this length was a good one: the next pause is short again.
const GOOD_WATCH: Duration = Duration::from_secs(10);
/// Changes on their way to the control thread.
const CHANGE_COUNT_MAX: usize = 1024;
/// Pause between two log lines of the same fault.
const FAULT_PAUSE: Duration = Duration::from_secs(60);

/// What a watcher tells, by its number.
enum Change {
    /// These, and no others, are there.
    Listed(usize, Vec<Pod>),
    Applied(usize, Pod),
    Deleted(usize, String),
    Failed(usize, String),
}

/// Keeps the workers as the pods are, until the runtime ends.
pub(super) async fn run(plane: Arc<Plane>, config: KubernetesConfig) {
    let (changes, mut told) = mpsc::channel(CHANGE_COUNT_MAX);
    let for_thread = config.clone();
    let thread = std::thread::Builder::new()
        .name("kubernetes".to_owned())
        .spawn(move || watch_all(&for_thread, changes));
    if let Err(error) = thread {
        tracing::error!(%error, "no thread for Kubernetes: no pods are found");
        return;
    }
    let mut view = View::new(config);
    let mut claims = Claims::new(Finder::Kubernetes);
    let mut batch = Vec::new();
    loop {
        batch.clear();
        let wait = match claims.has_refused() {
            true => RETRY_PAUSE,
            false => Duration::from_secs(3600),
        };
        match timeout(wait, told.recv_many(&mut batch, CHANGE_COUNT_MAX)).await {
            Ok(0) => return,
            Ok(_) => {
                for change in batch.drain(..) {
                    view.apply(&plane, change);
                }
                if let Some(found) = view.found() {
                    claims.update(&plane, found);
                }
            }
            Err(_) => claims.retry(&plane),
        }
    }
}

/// The pods of each selector, as they were told last.
struct View {
    config: KubernetesConfig,
    /// By uid; none: not listed yet.
    pods: Vec<Option<HashMap<String, Pod>>>,
    faults: Vec<(Fault, Option<Instant>)>,
}

impl View {
    fn new(config: KubernetesConfig) -> View {
        let count = config.selectors.len();
        View {
            config,
            pods: vec![None; count],
            faults: (0..count).map(|_| Default::default()).collect(),
        }
    }

    fn apply(&mut self, plane: &Plane, change: Change) {
        let stats = plane.discovery.stats(Finder::Kubernetes);
        match change {
            Change::Listed(index, pods) => {
                let pods = pods.into_iter().map(|pod| (pod.uid.clone(), pod));
                self.pods[index] = Some(pods.collect());
                self.faults[index].1 = None;
                if self.faults[index].0.end() {
                    tracing::info!(
                        selector = self.config.selectors[index].1,
                        "pods are seen again"
                    );
                }
                stats.succeed();
            }
            Change::Applied(index, pod) => {
                if let Some(pods) = &mut self.pods[index] {
                    // A name has one pod at a time, whatever was missed.
                    pods.retain(|uid, other| *uid == pod.uid || other.name != pod.name);
                    pods.insert(pod.uid.clone(), pod);
                }
                stats.succeed();
            }
            Change::Deleted(index, uid) => {
                if let Some(pods) = &mut self.pods[index] {
                    pods.remove(&uid);
                }
                stats.succeed();
            }
            Change::Failed(index, reason) => {
                let selector = &self.config.selectors[index].1;
                let (fault, told) = &mut self.faults[index];
                if told.is_some_and(|at: Instant| at.elapsed() > FAULT_PAUSE) {
                    fault.end();
                }
                fault.tell(stats, &reason, |reason| {
                    *told = Some(Instant::now());
                    tracing::warn!(
                        selector,
                        reason,
                        "pods are not seen: the last that was known holds"
                    );
                });
            }
        }
    }

    /// The workers; none while a selector was never listed: a pod of several belongs to the first of them.
    fn found(&self) -> Option<Vec<Found>> {
        let mut by_url: BTreeMap<String, Found> = BTreeMap::new();
        for ((role, _), pods) in self.config.selectors.iter().zip(&self.pods) {
            for found in pods.as_ref()?.values() {
                let Some(found) = found.found(*role, self.config.port) else {
                    continue;
                };
                // Two pods of the same address are a leftover and the one that is there.
                let place = by_url.entry(found.spec.url.canonical());
                let held = place.or_insert_with(|| found.clone());
                if (found.is_ready && !held.is_ready) && found.spec.role == held.spec.role {
                    *held = found;
                }
            }
        }
        Some(by_url.into_values().collect())
    }
}

/// The thread: ends soon after nobody listens any more.
fn watch_all(config: &KubernetesConfig, changes: mpsc::Sender<Change>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime for Kubernetes: no pods are found");
            return;
        }
    };
    runtime.block_on(async {
        for (index, (role, selector)) in config.selectors.iter().enumerate() {
            let watcher = Watcher {
                index,
                role: *role,
                selector: selector.clone(),
                namespace: config.namespace.clone(),
                changes: changes.clone(),
            };
            tokio::spawn(keep(watcher));
        }
        changes.closed().await;
    });
    runtime.shutdown_background();
}

/// Runs a watcher, and again should it panic.
async fn keep(watcher: Watcher) {
    while tokio::spawn(watcher.clone().run()).await.is_err() {
        tracing::error!(
            selector = watcher.selector,
            "internal error: pods are watched anew"
        );
        tokio::time::sleep(PAUSES.1).await;
    }
}

#[derive(Clone)]
struct Watcher {
    index: usize,
    role: Role,
    selector: String,
    namespace: Option<String>,
    changes: mpsc::Sender<Change>,
}

/// Why a watch ended.
enum End {
    /// The server ended it, or has forgotten where we were.
    Over,
    /// Nobody listens any more.
    Closed,
}

impl Watcher {
    async fn run(self) {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut api = None;
        loop {
            let began = Instant::now();
            match self.session(&mut api).await {
                Ok(End::Closed) => return,
                Ok(End::Over) => {}
                Err(reason) => {
                    // Credentials and addresses may be others by now.
                    api = None;
                    let failed = Change::Failed(self.index, reason);
                    if self.changes.send(failed).await.is_err() {
                        return;
                    }
                }
            }
            if began.elapsed() > GOOD_WATCH {
                backoff.reset();
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// One list and what follows it.
    async fn session(&self, api: &mut Option<Api<RawPod>>) -> Result<End, String> {
        let api = match api {
            Some(api) => api,
            None => api.insert(self.connect().await?),
        };
        let Some((pods, version)) = self.list(api).await? else {
            return Ok(End::Over);
        };
        let (role, count) = (self.role.label(), pods.len());
        tracing::debug!(role, selector = self.selector, count, "pods listed");
        let listed = Change::Listed(self.index, pods);
        if self.changes.send(listed).await.is_err() {
            return Ok(End::Closed);
        }
        self.follow(api, &version).await
    }

    async fn connect(&self) -> Result<Api<RawPod>, String> {
        let config = Config::infer().await;
        let config =
            config.map_err(|error| format!("no access to Kubernetes: {}", chain(&error)))?;
        let client = Client::try_from(config);
        let client =
            client.map_err(|error| format!("no access to Kubernetes: {}", chain(&error)))?;
        let resource = pods::resource();
        Ok(match &self.namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        })
    }

    /// All pods and the version of the list. None: it became too old between two of its pages.
    async fn list(&self, api: &Api<RawPod>) -> Result<Option<(Vec<Pod>, String)>, String> {
        let mut params = ListParams::default()
            .labels(&self.selector)
            .limit(PAGE_COUNT);
        let mut pods = Vec::new();
        loop {
            let page = match answer(api.list(&params)).await? {
                Ok(page) => page,
                Err(kube::Error::Api(status)) if is_gone(&status) => return Ok(None),
                Err(error) => return Err(told(&error)),
            };
            pods.extend(page.items.into_iter().map(Pod::new));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => {
                    return Ok(Some((
                        pods,
                        page.metadata.resource_version.unwrap_or_default(),
                    )));
                }
            }
        }
    }

    async fn follow(&self, api: &Api<RawPod>, version: &str) -> Result<End, String> {
        let params = WatchParams::default()
            .labels(&self.selector)
            .timeout(WATCH_SECS);
        let end = Instant::now() + Duration::from_secs(u64::from(WATCH_SECS)) + WATCH_GRACE;
        let events = match answer(api.watch(&params, version)).await? {
            Ok(events) => events,
            Err(kube::Error::Api(status)) if is_gone(&status) => return Ok(End::Over),
            Err(error) => return Err(told(&error)),
        };
        let mut events = pin!(events);
        loop {
            let event = match tokio::time::timeout_at(end, events.try_next()).await {
                // The server should have ended it: the connection is dead.
                Err(_) | Ok(Ok(None)) => return Ok(End::Over),
                Ok(Ok(Some(event))) => event,
                Ok(Err(kube::Error::Api(status))) if is_gone(&status) => return Ok(End::Over),
                // Cut off, as proxies do: whether the API is away, the next list tells.
                Ok(Err(kube::Error::ReadEvents(error))) => {
                    tracing::debug!(selector = self.selector, %error, "watch broken off");
                    return Ok(End::Over);
                }
                Ok(Err(error)) => return Err(told(&error)),
            };
            let change = match event {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    Change::Applied(self.index, Pod::new(pod))
                }
                WatchEvent::Deleted(pod) => {
                    Change::Deleted(self.index, pod.metadata.uid.unwrap_or_default())
                }
                // A version to go on from: the next list tells more.
                WatchEvent::Bookmark(_) => continue,
                WatchEvent::Error(status) if is_gone(&status) => return Ok(End::Over),
                WatchEvent::Error(status) => return Err(told(&kube::Error::Api(status))),
            };
            if self.changes.send(change).await.is_err() {
                return Ok(End::Closed);
            }
        }
    }
}

async fn answer<T>(
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Result<T, kube::Error>, String> {
    let secs = ANSWER_TIMEOUT.as_secs();
    let in_time = timeout(ANSWER_TIMEOUT, call).await;
    in_time.map_err(|_| format!("the API did not answer within {secs} s"))
}

fn is_gone(status: &kube::core::Status) -> bool {
    status.code == 410
}

/// For an operator: who has no right is told which.
fn told(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if matches!(status.code, 401 | 403) => format!(
            "the API refuses ({}): {}; get, list and watch on pods are needed",
            status.code, status.message
        ),
        kube::Error::Api(status) => format!("the API answers {}: {}", status.code, status.message),
        error => chain(error),
    }
}

/// An error and what it came from.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
