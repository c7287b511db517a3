//! The config file read again: on SIGHUP and `POST /reload`. One at a time; all of it, or nothing and the reason.
//!
//! Nothing that runs is touched. Cores get the new configuration by message, workers that are listed no more drain.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use http::StatusCode;
use tokio::sync::{Mutex, watch};

use super::{Plane, watch as watching};
use crate::config::{Config, Keys, Loaded, LogLevel, Source};

type SetLogLevel = Box<dyn Fn(LogLevel) + Send + Sync>;

/// Where configurations come from, and what came of them.
#[derive(Default)]
pub(super) struct Reload {
    origin: OnceLock<Origin>,
    /// Sent after each that holds.
    done: watch::Sender<()>,
    ok: AtomicU64,
    refused: AtomicU64,
    is_last_refused: AtomicBool,
}

struct Origin {
    source: Source,
    /// What the running configuration was made of. Held while a reload runs.
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

/// Reads the file and makes what it says hold. On the control thread only. Logged and counted here.
///
/// # Errors
/// There is no file, it cannot be, or it wants what needs a restart: then all is as it was.
pub(super) async fn run(plane: &Arc<Plane>) -> Result<Report, Refusal> {
    let origin = plane.reload.origin.get();
    let Some(origin) = origin.filter(|origin| origin.source.path().is_some()) else {
        let message = "nothing to reload: started without --config";
        tracing::warn!("{message}");
        return Err(Refusal::new("no_config_file", message.to_owned()));
    };
    let mut keys = origin.keys.lock().await;
    let result = attempt(plane, origin, &mut keys).await;
    plane.reload.count(result.is_ok());
    if let Err(refusal) = &result {
        tracing::error!(
            reason = refusal.message,
            "configuration not reloaded: the old one holds"
        );
    }
    result
}

async fn attempt(plane: &Arc<Plane>, origin: &Origin, keys: &mut Keys) -> Result<Report, Refusal> {
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
    } = loaded;
    let changed = keys.changed(&new_keys);
    let old = plane.shared.config();
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
    let config = Arc::new(config);
    plane.shared.configure(config.clone());
    plane.registry().configure(&config);
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
