//! The config file read again: on SIGHUP and `POST /reload`. One at a time; all of it, or nothing and the reason. The files
//! of clients' keys and of TLS go with it, and are read again alone when one changes ([`watch_files`]).
//!
//! Nothing that runs is touched. Cores get the new configuration by message, workers that are listed no more drain.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::{Mutex, watch};

use super::{Plane, watch as watching};
use crate::config::{Config, ConfigError, Keys, Loaded, LogLevel, Source, Stamp};

/// How often it is looked at whether those files are others.
const FILES_PAUSE: Duration = Duration::from_secs(2);
/// What a change of that file is called.
const KEYS_FILE: &str = "client-api-keys-file";

type SetLogLevel = Box<dyn Fn(LogLevel) + Send + Sync>;

/// Where configurations come from, and what came of them.
#[derive(Default)]
pub(super) struct Reload {
    origin: OnceLock<Origin>,
    /// Held while anything is read again.
    turn: Mutex<()>,
    /// Sent after each that holds.
    done: watch::Sender<()>,
    ok: AtomicU64,
    refused: AtomicU64,
    is_last_refused: AtomicBool,
}

struct Origin {
    source: Source,
    /// What the running configuration was made of.
    keys: Mutex<Keys>,
    set_log_level: SetLogLevel,
}

/// For metrics.
pub(super) struct Counts {
    pub(super) ok: u64,
    pub(super) refused: u64,
    pub(super) is_last_ok: bool,
}

/// What a reload changed.
#[derive(Debug)]
pub(super) struct Report {
    /// Flags, without dashes in front.
    pub(super) changed: Vec<String>,
    /// Workers, as listed.
    pub(super) added: Vec<String>,
    pub(super) removed: Vec<String>,
}

/// Why nothing was changed.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
}

impl Refusal {
    fn new(code: &'static str, message: String) -> Refusal {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            code,
            message,
        }
    }
}

impl Reload {
    /// Once; a second call changes nothing.
    pub(super) fn set_origin(&self, source: Source, keys: Keys, set_log_level: SetLogLevel) {
        let keys = Mutex::new(keys);
        let _ = self.origin.set(Origin {
            source,
            keys,
            set_log_level,
        });
    }

    /// Changes after each reload that holds.
    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.done.subscribe()
    }

    pub(super) fn counts(&self) -> Counts {
        // ORDERING: Relaxed; counters that publish nothing.
        Counts {
            ok: self.ok.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            is_last_ok: !self.is_last_refused.load(Ordering::Relaxed),
        }
    }

    fn count(&self, is_ok: bool) {
        let counter = if is_ok { &self.ok } else { &self.refused };
        // ORDERING: Relaxed; counters that publish nothing.
        counter.fetch_add(1, Ordering::Relaxed);
        self.is_last_refused.store(!is_ok, Ordering::Relaxed);
    }
}

/// Reads the files and makes what they say hold. On the control thread only. Logged and counted here.
///
/// # Errors
/// There is no file, one cannot be, or it wants what needs a restart: then all is as it was.
pub(super) async fn run(plane: &Arc<Plane>) -> Result<Report, Refusal> {
    let _turn = plane.reload.turn.lock().await;
    let origin = plane.reload.origin.get();
    let origin = origin.filter(|origin| origin.source.path().is_some());
    let result = match origin {
        Some(origin) => attempt(plane, origin).await,
        None if has_files(&plane.shared.config()) => renew_files(plane).await,
        None => {
            let message =
                "nothing to reload: started without --config, --client-api-keys-file or --tls-...";
            tracing::warn!("{message}");
            return Err(Refusal::new("no_config_file", message.to_owned()));
        }
    };
    settle(plane, &result);
    result
}

/// Counts and logs how a reload ended.
fn settle(plane: &Plane, result: &Result<Report, Refusal>) {
    plane.reload.count(result.is_ok());
    if let Err(refusal) = result {
        tracing::error!(
            reason = refusal.message,
            "configuration not reloaded: the old one holds"
        );
    }
}

/// Whether there are files beside the config file.
fn has_files(config: &Config) -> bool {
    config.key_source.file().is_some() || config.tls_source.flags().next().is_some()
}

/// What those files are, or were when they were read; `None`: there are none.
type Stamps = (Option<Stamp>, Vec<Option<Stamp>>);

/// Looks at the files now and then, and makes them hold when one is another. One that cannot be is said once.
pub(super) async fn watch_files(plane: Arc<Plane>) {
    let mut refused: Option<Stamps> = None;
    loop {
        tokio::time::sleep(FILES_PAUSE).await;
        let config = plane.shared.config();
        if !has_files(&config) {
            continue; // A reload may name one.
        }
        let held = (config.key_source.stamp(), config.tls_source.stamps());
        let look = move || {
            (
                config.key_source.stamp_now(),
                config.tls_source.stamps_now(),
            )
        };
        let Ok(now) = tokio::task::spawn_blocking(look).await else {
            continue;
        };
        if now == held || Some(&now) == refused.as_ref() {
            continue;
        }
        let _turn = plane.reload.turn.lock().await;
        let result = renew_files(&plane).await;
        refused = result.is_err().then_some(now);
        settle(&plane, &result);
    }
}

/// Reads the files beside the config file, and nothing else. To be called by whose turn it is.
async fn renew_files(plane: &Arc<Plane>) -> Result<Report, Refusal> {
    let old = plane.shared.config();
    let mut config = Config::clone(&old);
    let read = move || {
        config.access = config.key_source.read()?;
        config.tls = config.tls_source.read(Some(&config.tls))?;
        Ok(config)
    };
    let invalid = |reason: String| Refusal::new("invalid_config", reason);
    let read: Result<Config, ConfigError> = tokio::task::spawn_blocking(read)
        .await
        .map_err(|_| invalid("internal error".to_owned()))?;
    let config = read.map_err(|e| invalid(format!("{}: {}", e.flag, e.reason)))?;
    let mut changed = Vec::new();
    if config.access != old.access {
        changed.push(KEYS_FILE.to_owned());
    }
    if config.tls != old.tls {
        changed.extend(config.tls_source.flags().map(str::to_owned));
    }
    let config = Arc::new(config);
    plane.registry().configure(&config);
    plane.shared.configure(config.clone());
    announce_files(&config, &changed);
    Ok(Report {
        changed,
        added: Vec::new(),
        removed: Vec::new(),
    })
}

fn announce_files(config: &Config, changed: &[String]) {
    let client_key_count = config.access.clients.as_ref().map_or(0, |all| all.len());
    let changed = changed.join(", ");
    tracing::info!(
        changed,
        client_key_count,
        "keys and certificates read again"
    );
}

async fn attempt(plane: &Arc<Plane>, origin: &Origin) -> Result<Report, Refusal> {
    let mut keys = origin.keys.lock().await;
    if plane.shared.is_draining() {
        return Err(Refusal {
            status: StatusCode::SERVICE_UNAVAILABLE,
            ..Refusal::new("draining", "this router is draining".to_owned())
        });
    }
    // Disks and name servers may be slow.
    let source = origin.source.clone();
    let loaded = tokio::task::spawn_blocking(move || source.load());
    let loaded = match loaded.await {
        Ok(loaded) => loaded.map_err(|e| Refusal::new("invalid_config", e.to_string()))?,
        Err(_) => return Err(Refusal::new("invalid_config", "internal error".to_owned())),
    };
    let Loaded {
        mut config,
        keys: new_keys,
        ..
    } = loaded;
    let mut changed = keys.changed(&new_keys);
    let old = plane.shared.config();
    let is_said = |flag: &str| changed.iter().any(|changed| changed == flag);
    let are_said = is_said(KEYS_FILE) || is_said("client-api-key") || is_said("admin-api-key");
    // What the file holds may be other, though it is the same file.
    if config.access != old.access && !are_said {
        changed.push(KEYS_FILE.to_owned());
    }
    if config.tls == old.tls {
        // Clients that come back go on with their sessions.
        config.tls = old.tls.clone();
    } else {
        let flags = config.tls_source.flags().map(str::to_owned);
        let news: Vec<String> = flags.filter(|flag| !changed.contains(flag)).collect();
        changed.extend(news);
    }
    changed.sort();
    let fixed = fixed(&old, &config, &changed);
    if !fixed.is_empty() {
        let message = format!("needs a restart: {}", fixed.join(", "));
        return Err(Refusal::new("needs_restart", message));
    }
    config.keep_fixed(&old);
    let plan = plane.registry().plan(&old, &config);
    let plan = plan.map_err(|reason| Refusal::new("workers_do_not_fit", reason))?;
    // From here on nothing is refused.
    *keys = new_keys;
    drop(keys);
    let config = Arc::new(config);
    // The rings first: a core with a new policy shall find them.
    plane.registry().configure(&config);
    plane.shared.configure(config.clone());
    let (added, removed) = change_workers(plane, plan);
    let report = Report {
        changed,
        added,
        removed,
    };
    announce(&report, old.log_level, config.log_level, |level| {
        (origin.set_log_level)(level)
    });
    plane.reload.done.send_modify(|()| ());
    plane.announce_change();
    if !report.added.is_empty() {
        tokio::spawn(watching::report_start(plane.clone()));
    }
    Ok(report)
}

/// Of the flags that changed, those whose meaning cannot. (A name that points elsewhere now is no change of a flag.)
fn fixed(old: &Config, new: &Config, changed: &[String]) -> Vec<&'static str> {
    let mut fixed = old.fixed_differences(new);
    fixed.retain(|flag| changed.iter().any(|changed| changed == flag));
    fixed
}

fn change_workers(plane: &Arc<Plane>, plan: super::registry::Plan) -> (Vec<String>, Vec<String>) {
    let (mut added, mut removed) = (Vec::new(), Vec::new());
    for key in plan.removed {
        let url = plane.registry().entry(key).map(|e| e.url.to_string());
        removed.extend(url);
        plane.remove(key);
    }
    for key in plan.adopted {
        plane.registry().adopt(key);
    }
    for worker in plan.added {
        let url = worker.url.to_string();
        match plane.add(worker, false) {
            Ok(_) => added.push(url),
            Err(_) => tracing::error!(worker = url, "worker not registered: no free slot"),
        }
    }
    (added, removed)
}

/// One line, under the one of the two levels that lets it through.
fn announce(report: &Report, old: LogLevel, new: LogLevel, set_log_level: impl Fn(LogLevel)) {
    if new < old {
        set_log_level(new);
    }
    tracing::info!(
        changed = report.changed.join(", "),
        workers_added = report.added.join(", "),
        workers_removed = report.removed.join(", "),
        "configuration reloaded"
    );
    if new > old {
        set_log_level(new);
    }
}
