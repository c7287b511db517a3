//! A stand-in for the Kubernetes API: pods that can be listed and watched, and an API that fails in all its ways.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use super::File;

/// A pod as a test changes it.
#[derive(Clone)]
pub struct Pod {
    pub name: String,
    pub uid: String,
    pub ip: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub phase: &'static str,
    pub is_ready: bool,
    pub is_terminating: bool,
}

impl Pod {
    /// Running and ready. `labels`: `k=v,k=v`.
    pub fn new(name: &str, ip: &str, labels: &str) -> Pod {
        Pod {
            name: name.to_owned(),
            uid: format!("uid-of-{name}"),
            ip: Some(ip.to_owned()),
            labels: pairs(labels),
            annotations: BTreeMap::new(),
            phase: "Running",
            is_ready: true,
            is_terminating: false,
        }
    }

    fn json(&self, version: u64) -> Value {
        let mut meta = json!({
            "name": self.name, "namespace": "llm", "uid": self.uid, "labels": self.labels,
            "annotations": self.annotations, "resourceVersion": version.to_string(),
            "creationTimestamp": "2025-01-01T00:00:00Z",
        });
        if self.is_terminating {
            meta["deletionTimestamp"] = "2025-01-01T00:01:00Z".into();
        }
        let ready = if self.is_ready { "True" } else { "False" };
        let mut status = json!({
            "phase": self.phase, "hostIP": "127.0.0.1",
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}],
        });
        if let Some(ip) = &self.ip {
            status["podIP"] = ip.as_str().into();
            status["podIPs"] = json!([{"ip": ip}]);
        }
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status,
            "spec": {"containers": [{"name": "vllm", "image": "vllm"}]},
        })
    }
}

fn pairs(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

fn matches(labels: &BTreeMap<String, String>, selector: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(k, v)| labels.get(k) == Some(v))
}

struct Watcher {
    selector: BTreeMap<String, String>,
    events: UnboundedSender<String>,
}

#[derive(Default)]
struct State {
    pods: BTreeMap<String, (Pod, u64)>,
    version: u64,
    /// Watches from an older version are told that it is gone.
    oldest: u64,
    history: Vec<(u64, String, BTreeMap<String, String>)>,
    watchers: Vec<Watcher>,
    refuses: bool,
    status: Option<u16>,
    lists: u64,
    watches: u64,
    pages: u64,
    paths: Vec<String>,
}

impl State {
    fn event(&mut self, kind: &str, pod: &Pod, before: Option<&Pod>) {
        self.version += 1;
        let line = |kind: &str| {
            let event = json!({"type": kind, "object": pod.json(self.version)});
            format!("{event}\n")
        };
        let as_said = line(kind);
        self.history
            .push((self.version, as_said.clone(), pod.labels.clone()));
        for watcher in &self.watchers {
            let is_seen = |pod: &Pod| matches(&pod.labels, &watcher.selector);
            let line = match (before.is_some_and(is_seen), is_seen(pod)) {
                (_, true) => as_said.clone(),
                // Who matches no more is deleted, as far as a watcher sees.
                (true, false) => line("DELETED"),
                (false, false) => continue,
            };
            let _ = watcher.events.send(line);
        }
    }
}

/// The API.
pub struct KubeApi {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    config: File,
    task: JoinHandle<()>,
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

impl KubeApi {
    pub async fn start() -> KubeApi {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State {
            version: 100,
            ..State::default()
        }));
        let for_task = state.clone();
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, for_task.clone()));
            }
        });
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        });
        KubeApi {
            address,
            state,
            config: File::new(&config.to_string()),
            task,
        }
    }

    /// For `KUBECONFIG`.
    pub fn config(&self) -> &str {
        self.config.path()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// A pod is there, or has changed.
    pub fn apply(&self, pod: &Pod) {
        let mut state = self.state();
        let version = state.version + 1;
        let before = state.pods.insert(pod.name.clone(), (pod.clone(), version));
        let kind = if before.is_some() {
            "MODIFIED"
        } else {
            "ADDED"
        };
        state.event(kind, pod, before.as_ref().map(|(pod, _)| pod));
    }

    pub fn delete(&self, name: &str) {
        let mut state = self.state();
        let (pod, _) = state.pods.remove(name).expect("a pod");
        state.event("DELETED", &pod, Some(&pod));
    }

    /// All watches end, in the middle of a chunk.
    pub fn cut(&self) {
        self.state().watchers.clear();
    }

    /// Every watch gets this line.
    pub fn send(&self, event: &Value) {
        for watcher in &self.state().watchers {
            let _ = watcher.events.send(format!("{event}\n"));
        }
    }

    /// What happened so far is forgotten: who watches from there is told that it is gone.
    pub fn forget(&self) {
        let mut state = self.state();
        state.version += 1;
        state.oldest = state.version;
        state.history.clear();
    }

    /// The API is away: connections end without an answer.
    pub fn refuse(&self, refuses: bool) {
        self.state().refuses = refuses;
    }

    /// Every answer has this status.
    pub fn fail(&self, status: Option<u16>) {
        self.state().status = status;
    }

    /// Lists, watches, and pages of lists so far.
    pub fn counts(&self) -> (u64, u64, u64) {
        let state = self.state();
        (state.lists, state.watches, state.pages)
    }

    pub fn watcher_count(&self) -> usize {
        self.state().watchers.len()
    }

    /// Targets asked for.
    pub fn paths(&self) -> Vec<String> {
        self.state().paths.clone()
    }
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    while let Some(target) = head(&mut stream).await {
        if state.lock().unwrap().refuses || answer(&mut stream, &state, &target).await.is_none() {
            return;
        }
    }
}

/// The target of the next request.
async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    Some(head.split(' ').nth(1).unwrap().to_owned())
}

/// None: the connection is over.
async fn answer(stream: &mut TcpStream, state: &Mutex<State>, target: &str) -> Option<()> {
    let url = url::Url::parse(&format!("http://api{target}")).unwrap();
    let query: BTreeMap<String, String> = url.query_pairs().into_owned().collect();
    let said = |name: &str| query.get(name).map_or("", String::as_str);
    let selector = pairs(said("labelSelector"));
    let status = {
        let mut state = state.lock().unwrap();
        state.paths.push(target.to_owned());
        state.status
    };
    if let Some(code) = status {
        return whole(stream, code, &failure(code, "said by the test")).await;
    }
    if !url.path().ends_with("/pods") {
        return whole(stream, 404, &failure(404, "no such path")).await;
    }
    if said("watch") == "true" || said("watch") == "1" {
        let since: u64 = said("resourceVersion").parse().unwrap();
        return watch(stream, state, selector, since).await;
    }
    let list = list(&mut state.lock().unwrap(), &selector, &query);
    match list {
        Some(list) => whole(stream, 200, &list).await,
        None => whole(stream, 410, &failure(410, "the token is too old")).await,
    }
}

fn failure(code: u16, message: &str) -> Value {
    let reason = if code == 410 { "Expired" } else { "Failure" };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {},
           "message": message, "reason": reason, "code": code})
}

fn list(
    state: &mut State,
    selector: &BTreeMap<String, String>,
    query: &BTreeMap<String, String>,
) -> Option<Value> {
    let number = |name: &str| query.get(name).and_then(|text| text.parse::<usize>().ok());
    let from = match query.get("continue") {
        None => {
            state.lists += 1;
            0
        }
        Some(token) => {
            let (version, from) = token.split_once('-')?;
            // A page of another time would miss what has changed.
            (version.parse::<u64>() == Ok(state.version)).then_some(())?;
            from.parse().ok()?
        }
    };
    state.pages += 1;
    let pods = state.pods.values();
    let all: Vec<Value> = pods
        .filter(|(pod, _)| matches(&pod.labels, selector))
        .map(|(pod, version)| pod.json(*version))
        .collect();
    let end = number("limit").map_or(all.len(), |limit| all.len().min(from + limit));
    let mut meta = json!({"resourceVersion": state.version.to_string()});
    if end < all.len() {
        meta["continue"] = format!("{}-{end}", state.version).into();
    }
    Some(json!({"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": all[from..end]}))
}

async fn whole(stream: &mut TcpStream, status: u16, body: &Value) -> Option<()> {
    let body = body.to_string();
    let answer = format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await.ok()
}

async fn watch(
    stream: &mut TcpStream,
    state: &Mutex<State>,
    selector: BTreeMap<String, String>,
    since: u64,
) -> Option<()> {
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.ok()?;
    let events = {
        let mut state = state.lock().unwrap();
        state.watches += 1;
        if since < state.oldest {
            None
        } else {
            Some(follow(&mut state, selector, since))
        }
    };
    let Some(mut events) = events else {
        let error = json!({"type": "ERROR", "object": failure(410, "too old resource version")});
        chunk(stream, &format!("{error}\n")).await?;
        return stream.write_all(b"0\r\n\r\n").await.ok();
    };
    while let Some(line) = events.recv().await {
        chunk(stream, &line).await?;
    }
    None
}

fn follow(
    state: &mut State,
    selector: BTreeMap<String, String>,
    since: u64,
) -> UnboundedReceiver<String> {
    let (events, receiver) = unbounded_channel();
    for (version, line, labels) in &state.history {
        if *version > since && matches(labels, &selector) {
            let _ = events.send(line.clone());
        }
    }
    state.watchers.push(Watcher { selector, events });
    receiver
}

/// In two pieces: a line may end anywhere.
async fn chunk(stream: &mut TcpStream, line: &str) -> Option<()> {
    let (front, back) = line.split_at(line.len() / 2);
    for part in [front, back] {
        let chunk = format!("{:x}\r\n{part}\r\n", part.len());
        stream.write_all(chunk.as_bytes()).await.ok()?;
    }
    Some(())
}
