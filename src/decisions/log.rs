//! The way to the file: a mailbox for each core, and one thread that empties them.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam::queue::ArrayQueue;
use shards::{Receiver, Sender, WorkerId};

use super::record::{
    Decided, Ended, Header, WorkerRow, push_decided, push_ended, push_header, push_worker,
};
use super::sketch::Sketch;
use crate::log_thread::{LogThread, Signals, Turn, append_to};
use crate::route::Role;

/// Decisions of a core that may wait to be written, and ends: 100,000 a second at [`PAUSE`].
const QUEUE_COUNT: usize = 2048;
/// How often they are.
const PAUSE: Duration = Duration::from_millis(20);
/// Workers that may wait to be written; one that does not fit is told again.
const WORKER_QUEUE_COUNT: usize = 8192;

type Message = (Decided, Sketch);

/// One core's end.
pub struct Pen {
    run: u32,
    decisions: Sender<Message>,
    ends: Sender<Ended>,
    /// Which life of each slot is in the file.
    told: Vec<u32>,
    log: Arc<DecisionLog>,
}

impl Pen {
    /// Whether this life of a worker is in the file, or on its way there.
    #[inline]
    pub fn knows(&self, id: WorkerId) -> bool {
        self.told.get(id.slot.index()) == Some(&id.incarnation)
    }

    /// Names a worker (D2). Before its first decision.
    #[cold]
    pub fn tell(&mut self, id: WorkerId, role: Role, url: &Arc<str>) {
        let row = WorkerRow {
            run: self.run,
            slot: id.slot,
            incarnation: id.incarnation,
            role,
            url: url.clone(),
        };
        if self.log.workers.push(row).is_ok()
            && let Some(told) = self.told.get_mut(id.slot.index())
        {
            *told = id.incarnation;
        }
    }

    /// Adds a decision. Never waits; `false`: there was no room, it is lost.
    #[inline]
    pub fn decided(&mut self, decided: &Decided, sketch: &Sketch) -> bool {
        self.decisions.try_send((*decided, *sketch)).is_ok()
    }

    /// Adds an end; as [`Pen::decided`].
    #[inline]
    pub fn ended(&mut self, ended: &Ended) -> bool {
        self.ends.try_send(*ended).is_ok()
    }
}

/// What cores, control plane and writer share.
#[derive(Debug)]
pub struct DecisionLog {
    workers: ArrayQueue<WorkerRow>,
    lost_count: AtomicU64,
    signals: Arc<Signals>,
}

impl DecisionLog {
    /// The file is opened anew before the next record.
    pub fn reopen(&self) {
        self.signals.reopen();
    }

    /// Records that could not be written.
    pub fn lost_count(&self) -> u64 {
        // ORDERING: Relaxed; a number.
        self.lost_count.load(Ordering::Relaxed)
    }
}

/// Starts the writer; a pen for each core. `run`: a random number. `slot_count`: of the books.
///
/// # Errors
/// The file cannot be opened for appending, or there is no thread to be had.
pub fn start(
    path: &Path,
    run: u32,
    core_count: usize,
    slot_count: usize,
) -> io::Result<(Arc<DecisionLog>, LogThread, Vec<Pen>)> {
    let file = append_to(path)?;
    let (log, pens, mut inlets) = pens(run, core_count, slot_count);
    let mut scroll = Scroll {
        path: path.to_path_buf(),
        file,
        header: Header {
            run,
            at_us: 0,
            core_count: core_count as u16,
        },
        needs_header: true,
        workers: Vec::new(),
        log: log.clone(),
    };
    let write = move |turn| scroll.write(turn, &mut inlets);
    let thread = LogThread::start("decision-log", log.signals.clone(), PAUSE, write)?;
    Ok((log, thread, pens))
}

/// Where one core's records come out.
struct Inlet {
    decisions: Receiver<Message>,
    ends: Receiver<Ended>,
}

fn pens(
    run: u32,
    core_count: usize,
    slot_count: usize,
) -> (Arc<DecisionLog>, Vec<Pen>, Vec<Inlet>) {
    let log = Arc::new(DecisionLog {
        workers: ArrayQueue::new(WORKER_QUEUE_COUNT),
        lost_count: AtomicU64::new(0),
        signals: Arc::default(),
    });
    let (mut pens, mut inlets) = (Vec::new(), Vec::new());
    for _ in 0..core_count {
        let (decisions, decisions_out) = shards::mailbox(QUEUE_COUNT);
        let (ends, ends_out) = shards::mailbox(QUEUE_COUNT);
        inlets.push(Inlet {
            decisions: decisions_out,
            ends: ends_out,
        });
        pens.push(Pen {
            run,
            decisions,
            ends,
            told: vec![0; slot_count],
            log: log.clone(),
        });
    }
    (log, pens, inlets)
}

/// A pen whose records nobody takes out: it holds as many as fit.
#[cfg(test)]
pub(super) fn unread_pen() -> (Pen, impl Sized) {
    let (_, mut pens, inlets) = pens(1, 1, 8);
    (pens.remove(0), inlets)
}

/// The file.
struct Scroll {
    path: PathBuf,
    file: File,
    header: Header,
    /// It begins, was opened anew, or a write failed in the middle.
    needs_header: bool,
    /// All that were told, for the next file: the last life of each slot.
    workers: Vec<WorkerRow>,
    log: Arc<DecisionLog>,
}

impl Scroll {
    fn write(&mut self, turn: Turn, inlets: &mut [Inlet]) {
        if turn.reopens {
            match append_to(&self.path) {
                Ok(file) => {
                    self.file = file;
                    self.needs_header = true;
                }
                Err(e) => tracing::warn!("the decision log goes on in its old file: {e}"),
            }
        }
        self.write_all(inlets);
    }

    fn write_all(&mut self, inlets: &mut [Inlet]) {
        let run = self.header.run;
        let mut records = Vec::new();
        let mut count = 0;
        for inlet in inlets {
            // As many as fit at most: a core that goes on meanwhile does not hold the thread here.
            for _ in 0..QUEUE_COUNT {
                let Some((decided, sketch)) = inlet.decisions.try_recv() else {
                    break;
                };
                push_decided(&mut records, run, &decided, &sketch);
                count += 1;
            }
            for _ in 0..QUEUE_COUNT {
                let Some(ended) = inlet.ends.try_recv() else {
                    break;
                };
                push_ended(&mut records, run, &ended);
                count += 1;
            }
        }
        // Taken out after the decisions, written before them (D2).
        let mut out = Vec::new();
        let mut new = Vec::new();
        while let Some(row) = self.log.workers.pop() {
            self.workers.retain(|known| known.slot != row.slot);
            self.workers.push(row.clone());
            new.push(row);
        }
        if self.needs_header {
            self.header.at_us = unix_us();
            push_header(&mut out, &self.header);
            new.clone_from(&self.workers);
        }
        new.iter().for_each(|row| push_worker(&mut out, row));
        out.append(&mut records);
        if out.is_empty() {
            return;
        }
        // In one piece, so that two processes that append to one file do not write into each other's records.
        match self.file.write_all(&out) {
            Ok(()) => self.needs_header = false,
            Err(e) => {
                // ORDERING: Relaxed; a number.
                if self.log.lost_count.fetch_add(count, Ordering::Relaxed) == 0 {
                    tracing::warn!("the decision log cannot be written: {e}");
                }
                self.needs_header = true;
            }
        }
    }
}

/// Now, in us since 1970.
pub fn unix_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_micros() as u64)
}
