//! The file of `--workers-file`, read again when it is another one or has other content. An editor or a copy may be in the
//! middle of writing it: it is read when it was the same in two looks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::super::Plane;
use super::super::registry::Finder;
use super::claims::{Claims, Found};
use super::{Fault, Stats};
use crate::config::{Stamp, WorkerSpec, read_workers_file};

/// How often it is looked at.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// Watches whatever file the configuration names.
pub(super) async fn run(plane: Arc<Plane>) {
    let mut claims = Claims::new(Finder::File);
    let mut watched: Option<Watched> = None;
    loop {
        let config = plane.shared.config();
        let path = config.discovery.file.clone();
        if watched.as_ref().map(|watched| &watched.path) != path.as_ref() {
            if path.is_none() {
                claims.update(&plane, Vec::new());
            }
            watched = path.map(Watched::new);
        }
        if let Some(watched) = &mut watched {
            let stats = plane.discovery.stats(Finder::File);
            if let Some(workers) = watched.look(stats, config.pd.is_some()).await {
                claims.update(&plane, workers.into_iter().map(found).collect());
            }
            claims.retry(&plane);
        }
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

fn found(spec: WorkerSpec) -> Found {
    Found {
        id: String::new(),
        spec,
        is_ready: true,
    }
}

/// One file.
struct Watched {
    path: PathBuf,
    /// What it was when it was read well.
    held: Option<Stamp>,
    /// What it was at the last look, if there was one.
    seen: Option<Option<Stamp>>,
    /// What it was when it could not be.
    refused: Option<Option<Stamp>>,
    fault: Fault,
}

impl Watched {
    fn new(path: PathBuf) -> Watched {
        Watched {
            path,
            held: None,
            seen: None,
            refused: None,
            fault: Fault::default(),
        }
    }

    /// The workers, if they may be others than at the last look.
    async fn look(&mut self, stats: &Stats, is_pd: bool) -> Option<Vec<WorkerSpec>> {
        let path = self.path.clone();
        let now = tokio::task::spawn_blocking(move || Stamp::now(&path));
        let now = now.await.ok()?;
        let last = self.seen.replace(now);
        if now.is_some() && now == self.held {
            self.refused = None;
            if self.fault.end() {
                tracing::info!(path = %self.path.display(), "workers file is as it was read last");
            }
            stats.succeed();
            return None;
        }
        let is_settled = last.is_none_or(|last| last == now);
        if !is_settled || self.refused == Some(now) {
            return None;
        }
        self.read(now, stats, is_pd).await
    }

    async fn read(
        &mut self,
        now: Option<Stamp>,
        stats: &Stats,
        is_pd: bool,
    ) -> Option<Vec<WorkerSpec>> {
        let path = self.path.clone();
        let read = tokio::task::spawn_blocking(move || read_workers_file(&path, is_pd));
        let shown = self.path.display();
        match read.await.ok()? {
            Ok(file) => {
                (self.held, self.refused) = (Some(file.stamp), None);
                self.fault.end();
                stats.succeed();
                tracing::info!(path = %shown, worker_count = file.workers.len(), "workers file read");
                Some(file.workers)
            }
            Err(reason) => {
                self.refused = Some(now);
                self.fault.tell(stats, &reason, |reason| {
                    tracing::error!(path = %shown, reason, "workers file not taken: the workers stay as they were");
                });
                None
            }
        }
    }
}
