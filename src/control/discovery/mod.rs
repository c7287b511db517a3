//! Looking for workers while the router runs: in a file (`file`), by DNS (`dns`), as pods of Kubernetes (`kubernetes`).
//! Each of these tasks of the control thread tells its `claims` what is there now; these add and remove what has changed,
//! by the calls that the admin API uses.
//!
//! Invariants:
//! - D1 what cannot be read, resolved or reached changes nothing: the last that was known holds.
//! - D2 discovery takes back only what it said itself (F5): workers of the command line, of operators, and engines that
//!   registered themselves stay.
//! - D3 nobody waits for a worker: one that never answers its probes holds up no other.
#![forbid(unsafe_code)]

#[cfg(any(feature = "dns", feature = "kubernetes"))]
mod backoff;
mod claims;
#[cfg(feature = "dns")]
mod dns;
mod file;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(feature = "kubernetes")]
mod pods;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::Plane;
use super::registry::Finder;
use crate::config::DiscoveryConfig;

/// How often it is tried again to add what was refused.
#[cfg(any(feature = "dns", feature = "kubernetes"))]
const RETRY_PAUSE: std::time::Duration = std::time::Duration::from_secs(1);

/// What each way of finding workers has seen.
#[derive(Debug, Default)]
pub(super) struct Discovery {
    file: Stats,
    dns: Stats,
    kubernetes: Stats,
}

impl Discovery {
    /// The ways that look for workers and are in use.
    pub(super) fn used(config: &DiscoveryConfig) -> impl Iterator<Item = Finder> {
        let all = [
            (Finder::File, config.file.is_some()),
            (Finder::Dns, !config.dns.names.is_empty()),
            (Finder::Kubernetes, config.kubernetes.is_some()),
        ];
        let used = all.into_iter().filter(|(_, is_used)| *is_used);
        used.map(|(finder, _)| finder)
    }

    /// Of one of those.
    pub(super) fn stats(&self, finder: Finder) -> &Stats {
        match finder {
            Finder::Dns => &self.dns,
            Finder::Kubernetes => &self.kubernetes,
            _ => &self.file,
        }
    }
}

/// Written by the control thread.
#[derive(Debug, Default)]
pub(super) struct Stats {
    added: AtomicU64,
    removed: AtomicU64,
    errors: AtomicU64,
    succeeded_at: AtomicU64,
}

impl Stats {
    /// Workers that came.
    pub(super) fn added(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.added.load(Ordering::Relaxed)
    }

    /// Workers that are found no more.
    pub(super) fn removed(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.removed.load(Ordering::Relaxed)
    }

    /// Times that nothing could be found out, or a worker not be added.
    pub(super) fn errors(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.errors.load(Ordering::Relaxed)
    }

    /// When it was known for the last time who is there, in seconds since 1970; 0: never.
    pub(super) fn succeeded_at(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.succeeded_at.load(Ordering::Relaxed)
    }

    fn count_added(&self) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.added.fetch_add(1, Ordering::Relaxed);
    }

    fn count_removed(&self) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.removed.fetch_add(1, Ordering::Relaxed);
    }

    fn count_error(&self) {
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    fn succeed(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let secs = now.map_or(0, |since| since.as_secs());
        // ORDERING: Relaxed; a number to show, nothing is published.
        self.succeeded_at.store(secs, Ordering::Relaxed);
    }
}

/// Says a fault when it is another one than before.
#[derive(Debug, Default)]
struct Fault(Option<String>);

impl Fault {
    fn tell(&mut self, stats: &Stats, reason: &str, tell: impl FnOnce(&str)) {
        stats.count_error();
        if self.0.as_deref() != Some(reason) {
            tell(reason);
            self.0 = Some(reason.to_owned());
        }
    }

    /// True: there was one.
    fn end(&mut self) -> bool {
        self.0.take().is_some()
    }
}

/// Starts to look, for as long as the runtime lives. On the control thread.
pub(super) fn start(plane: &Arc<Plane>) {
    // Always: a reload may name a file, or names.
    tokio::spawn(file::run(plane.clone()));
    #[cfg(feature = "dns")]
    tokio::spawn(dns::run(plane.clone()));
    #[cfg(feature = "kubernetes")]
    if let Some(pods) = plane.shared.config().discovery.kubernetes.clone() {
        tokio::spawn(kubernetes::run(plane.clone(), pods));
    }
}
