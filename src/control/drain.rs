//! Ending well: readiness turns to 503, after the grace the cores stop accepting, running exchanges finish, bounded.
//!
//! The first signal drains, the second stops at once. The process ends when its cores have; who joins them is `main`.
//! SIGHUP comes in here, too, and reloads.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use super::Order;
use crate::shared::{Shared, ToCore};

/// Counts signals and does what they mean.
pub(super) struct Drain {
    signals: watch::Sender<u32>,
    has_begun: watch::Sender<bool>,
}

impl Drain {
    /// Waits for signals, on the control thread.
    pub(super) fn new(shared: Arc<Shared>) -> Drain {
        let (signals, received) = watch::channel(0);
        let has_begun = watch::channel(false).0;
        tokio::spawn(run(shared, received, has_begun.clone()));
        Drain { signals, has_begun }
    }

    /// Ends when the cores are told to stop accepting.
    pub(super) fn begun(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut has_begun = self.has_begun.subscribe();
        async move {
            if has_begun.wait_for(|begun| *begun).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// A signal has come.
    pub(super) fn signal(&self) {
        self.signals.send_modify(|count| *count += 1);
    }
}

async fn run(
    shared: Arc<Shared>,
    mut signals: watch::Receiver<u32>,
    has_begun: watch::Sender<bool>,
) {
    if signals.wait_for(|count| *count >= 1).await.is_err() {
        return;
    }
    // ORDERING: Relaxed; a hint for new answers, the message in each inbox is what counts.
    shared.draining.store(true, Ordering::Relaxed);
    crate::notify::send(crate::notify::STOPPING);
    let config = shared.config();
    tracing::info!(
        grace_secs = config.drain_grace().as_secs(),
        timeout_secs = config.drain_timeout.as_secs(),
        "draining: not ready any more; a second signal stops at once"
    );
    let second = async {
        let _ = signals.wait_for(|count| *count >= 2).await;
    };
    tokio::pin!(second);
    let is_forced = tokio::select! {
        () = &mut second => true,
        () = tokio::time::sleep(config.drain_grace()) => false,
    };
    if !is_forced {
        has_begun.send_replace(true);
        post_all(&shared, || ToCore::Drain);
        tokio::select! {
            () = &mut second => {}
            () = tokio::time::sleep(config.drain_timeout) => {
                tracing::warn!("--drain-timeout-secs is over: stopping what still runs");
            }
        }
    }
    post_all(&shared, || ToCore::Stop);
}

fn post_all(shared: &Shared, message: impl Fn() -> ToCore) {
    for core in &shared.cores {
        core.post(message());
    }
}

/// Turns SIGTERM, SIGINT and SIGHUP into orders. The sender is weak, so that a dropped `Control` still ends the thread.
pub(super) fn forward_signals(orders: mpsc::WeakUnboundedSender<Order>) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        loop {
            let (name, order) = tokio::select! {
                _ = terminate.recv() => ("SIGTERM", Order::Drain),
                _ = interrupt.recv() => ("SIGINT", Order::Drain),
                _ = hang_up.recv() => ("SIGHUP", Order::Reload),
            };
            tracing::info!("{name} received");
            match orders.upgrade() {
                Some(orders) => drop(orders.send(order)),
                None => return,
            }
        }
    });
    Ok(())
}
