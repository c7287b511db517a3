//! The thread behind a log. Cores put what is to be written where this thread finds it, and never wait; it looks several times a
//! second, opens its file anew when asked, and ends with what was put before.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What the thread is told.
#[derive(Debug, Default)]
pub struct Signals {
    is_over: AtomicBool,
    /// The file is to be opened anew: it may have been moved away.
    is_reopening: AtomicBool,
}

impl Signals {
    /// The file is opened anew before anything else is written.
    pub fn reopen(&self) {
        // ORDERING: Relaxed; a hint that is looked at soon.
        self.is_reopening.store(true, Ordering::Relaxed);
    }
}

/// One look.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The file is to be opened anew.
    pub reopens: bool,
    /// All that will ever be written is there.
    pub is_last: bool,
}

/// The thread. Dropping it lets it write what is left, and waits for its end.
#[derive(Debug)]
pub struct LogThread {
    signals: Arc<Signals>,
    thread: Option<JoinHandle<()>>,
}

impl LogThread {
    /// Starts it. `write` is called for each look, and `pause` goes by between two.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(
        name: &str,
        signals: Arc<Signals>,
        pause: Duration,
        mut write: impl FnMut(Turn) + Send + 'static,
    ) -> io::Result<LogThread> {
        let told = signals.clone();
        let run = move || loop {
            // ORDERING: Acquire pairs with the drop's Release.
            let is_last = told.is_over.load(Ordering::Acquire);
            // ORDERING: Relaxed; a hint.
            let reopens = told.is_reopening.swap(false, Ordering::Relaxed);
            write(Turn { reopens, is_last });
            if is_last {
                return;
            }
            std::thread::park_timeout(pause);
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)?;
        Ok(LogThread {
            signals,
            thread: Some(thread),
        })
    }
}

impl Drop for LogThread {
    fn drop(&mut self) {
        // ORDERING: Release pairs with the thread's Acquire: it sees all that was put before.
        self.signals.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Opens a log's file: what it holds already stays.
///
/// # Errors
/// It cannot be opened for appending.
pub fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}
