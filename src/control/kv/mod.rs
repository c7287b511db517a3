//! KV events (`--kv-event-source`): each engine's stream is followed by a task of the control thread, which teaches the cores'
//! shards of the exact index what the engine holds. `decode` reads messages, `source` says what they mean.
//!
//! Sockets are ZMTP's (`super::zmtp`): SUB to the engine's PUB, DEALER to its ROUTER for replay. PUB drops silently what a
//! subscriber does not take, so the sequence numbers count, not the connection.
//!
//! Trust, by source (`route::Trust`):
//! - **exact** every message since the first was taken. Who joins late without replay knows less than the engine holds, but
//!   nothing wrong;
//! - **catching up** messages are missing and are being fetched;
//! - **degraded** they could not be fetched (until the engine clears its cache or begins anew), or the connection has just gone;
//! - **blind** no connection for [`BLIND_AFTER`]: the approximate tree serves.
//!
//! Invariants: Z1 to Z3 in `source`. A core never waits for this: a full mailbox makes the task wait, then the socket, then the
//! publisher drops, and the gap shows.

mod decode;
mod source;

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ahash::AHashMap;
use shards::{Lesson, Sender, Slot};
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

pub use self::source::{Counts, Order, Outbox, Replayed, Source};
use super::registry::Entry;
use super::{Plane, zmtp};
use crate::config::{KvSource, WorkerUrl};
use crate::route::{Index, Trust};
use crate::shared::Shared;

/// Most bytes of a message, as in vllm-router.
const MESSAGE_BYTES_MAX: usize = 16 << 20;
/// Time for connecting, and for the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Between two attempts to connect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);
/// A source without a connection for so long is not believed any more.
pub const BLIND_AFTER: Duration = Duration::from_secs(2);
/// Longest wait for the next message of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks whether a full mailbox has room.
const MAILBOX_PAUSE: Duration = Duration::from_micros(200);
/// Silent connections are asked for a sign of life after so long, by TCP.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// What is told of a source.
#[derive(Clone, Debug)]
pub struct SourceView {
    /// Whose blocks it tells of.
    pub worker: Arc<str>,
    /// Its data-parallel rank.
    pub rank: u32,
    /// How far it is believed.
    pub trust: Trust,
    /// Blocks it holds.
    pub block_count: usize,
    /// Bytes of their names.
    pub name_bytes: usize,
    /// What came of its messages.
    pub counts: Counts,
    /// Gaps found.
    pub gaps: u64,
    /// Replays asked for that gave all that was missing.
    pub replays: u64,
    /// Times the publisher began anew.
    pub restarts: u64,
}

impl SourceView {
    /// Another rank of the same worker: the best trust, the sum of all else.
    pub fn add(&mut self, other: &SourceView) {
        self.trust = self.trust.max(other.trust);
        self.block_count += other.block_count;
        self.name_bytes += other.name_bytes;
        self.counts.stored += other.counts.stored;
        self.counts.removed += other.counts.removed;
        self.counts.passed_over += other.counts.passed_over;
        self.counts.bad += other.counts.bad;
        self.gaps += other.gaps;
        self.replays += other.replays;
        self.restarts += other.restarts;
    }
}

struct Row {
    url: WorkerUrl,
    /// Who it speaks for now.
    slot: Option<Slot>,
    view: SourceView,
}

/// What the tasks share.
#[derive(Default)]
pub struct Kv {
    rows: Mutex<Vec<Row>>,
    senders: tokio::sync::Mutex<Vec<Sender<Lesson>>>,
    /// Lessons sent.
    lessons: AtomicU64,
}

impl Kv {
    fn rows(&self) -> MutexGuard<'_, Vec<Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All sources, as they stand.
    pub fn views(&self) -> Vec<SourceView> {
        self.rows().iter().map(|row| row.view.clone()).collect()
    }

    /// Lessons sent to the cores.
    pub fn lesson_count(&self) -> u64 {
        // ORDERING: Relaxed; a number to show.
        self.lessons.load(Ordering::Relaxed)
    }
}

/// Follows all configured sources until the runtime ends. On the control thread.
pub(super) async fn run(plane: Arc<Plane>) {
    let Some(kv) = &plane.shared.kv else {
        return;
    };
    let senders = kv
        .senders
        .lock()
        .map(|mut senders| std::mem::take(&mut *senders));
    *plane.kv.senders.lock().await = senders.unwrap_or_default();
    let sources = plane.shared.config().kv.sources.clone();
    let row = |source: &KvSource| Row {
        url: source.worker.clone(),
        slot: None,
        view: SourceView {
            worker: source.worker.text().clone(),
            rank: source.rank,
            trust: Trust::Blind,
            block_count: 0,
            name_bytes: 0,
            counts: Counts::default(),
            gaps: 0,
            replays: 0,
            restarts: 0,
        },
    };
    *plane.kv.rows() = sources.iter().map(row).collect();
    let mut changes = plane.changes.subscribe();
    for (id, source) in sources.into_iter().enumerate() {
        tokio::spawn(follow(plane.clone(), id as u16, source));
    }
    loop {
        resolve(&plane, &kv.index);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Finds for each source the worker it speaks for now: the rank of its number, or the worker itself where that has one rank.
fn resolve(plane: &Plane, index: &Index) {
    let registry = plane.registry();
    let entries = registry.entries().iter();
    let by_url: AHashMap<&str, &Entry> = entries.map(|e| (&**e.url.text(), e)).collect();
    let mut rows = plane.kv.rows();
    for row in rows.iter_mut() {
        // The same worker may be spelled in two ways.
        let entry = by_url.get(&**row.url.text()).copied();
        let entry = entry.or_else(|| registry.find(&row.url));
        let rank = entry.and_then(|entry| match &entry.ranks[..] {
            [only] => Some(only),
            ranks => ranks.iter().find(|r| r.number == Some(row.view.rank)),
        });
        row.slot = rank.map(|rank| rank.id.slot);
    }
    drop(by_url);
    drop(registry);
    publish(&rows, index);
}

/// Writes what all rows say into the index.
fn publish(rows: &[Row], index: &Index) {
    let mut best = vec![Trust::Blind; shards::SLOT_COUNT_MAX];
    for (id, row) in rows.iter().enumerate() {
        index.set_source(id as u16, row.slot.map(|slot| (slot, row.view.trust)));
        if let Some(slot) = row.slot {
            let trust = &mut best[slot.index()];
            *trust = row.view.trust.max(*trust);
        }
    }
    for (slot, trust) in (0..).zip(best) {
        if index.trust(Slot(slot)) != trust {
            index.set_worker(Slot(slot), trust);
        }
    }
}

/// The same of one row whose trust has changed.
fn publish_row(rows: &[Row], id: usize, row: &Row, index: &Index) {
    index.set_source(id as u16, row.slot.map(|slot| (slot, row.view.trust)));
    if let Some(slot) = row.slot {
        let same = rows.iter().filter(|other| other.slot == Some(slot));
        let best = same.map(|other| other.view.trust).max();
        index.set_worker(slot, best.unwrap_or(Trust::Blind));
    }
}

/// One source, for ever.
async fn follow(plane: Arc<Plane>, id: u16, spec: KvSource) {
    let mut task = Task {
        source: Source::new(id),
        out: Outbox::default(),
        is_damaged: false,
        plane,
        id,
        spec,
    };
    let mut lost = Instant::now();
    loop {
        match connect(&task.spec.endpoint, "SUB", &["PUB", "XPUB"]).await {
            Ok(mut stream) => {
                let error = match task.listen(&mut stream).await {
                    Err(error) => error,
                    Ok(()) => io::Error::from(ErrorKind::UnexpectedEof),
                };
                task.warn("KV events: the connection has gone", &error);
                lost = Instant::now();
                if task.trust() != Trust::Blind {
                    task.set_trust(Trust::Degraded);
                }
            }
            Err(error) if task.trust() == Trust::Blind && task.source.next().is_none() => {
                tracing::debug!(worker = %task.spec.worker, "KV events: no connection: {error}");
            }
            Err(_) => {}
        }
        if lost.elapsed() >= BLIND_AFTER && task.trust() != Trust::Blind {
            task.set_trust(Trust::Blind);
        }
        sleep(RECONNECT_PAUSE).await;
    }
}

/// Connects and greets.
async fn connect(endpoint: &str, kind: &str, peers: &[&str]) -> io::Result<BufReader<TcpStream>> {
    let greeted = async {
        let stream = TcpStream::connect(endpoint).await?;
        stream.set_nodelay(true)?;
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE);
        socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let mut stream = BufReader::with_capacity(64 << 10, stream);
        zmtp::greet(&mut stream, kind, peers).await?;
        Ok(stream)
    };
    let greeted = timeout(CONNECT_TIMEOUT, greeted).await;
    greeted.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

/// A message of events: the last two frames are its number and the events, a topic stands before them.
fn parts(frames: &[Vec<u8>]) -> Option<(i64, &[u8])> {
    let [.., number, payload] = frames else {
        return None;
    };
    let number = number.as_slice().try_into().ok()?;
    Some((i64::from_be_bytes(number), payload))
}

/// What a replay gave.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replay {
    /// No message of interest.
    Nothing,
    /// What came followed what was there.
    Whole,
    /// Messages are missing before the first that came, or between.
    Broken,
    /// Messages of another process.
    OfAnother,
}

struct Task {
    plane: Arc<Plane>,
    id: u16,
    spec: KvSource,
    source: Source,
    out: Outbox,
    /// Messages were lost for good.
    is_damaged: bool,
}

impl Task {
    /// Takes what comes on a connection, until it ends.
    async fn listen(&mut self, stream: &mut BufReader<TcpStream>) -> io::Result<()> {
        // Everything, whatever its topic.
        zmtp::send(stream, &[b"\x01"]).await?;
        self.source.connected();
        if self.spec.replay.is_some() {
            self.set_trust(Trust::CatchingUp);
            match self.catch_up().await {
                Ok(()) => self.settle_trust(),
                // Whether anything is missing, the next message tells.
                Err(error) => {
                    self.warn("KV events: no replay", &error);
                    match self.source.next() {
                        None => self.settle_trust(),
                        Some(_) => self.set_trust(Trust::Degraded),
                    }
                }
            }
        } else if self.source.next().is_none() {
            self.settle_trust();
        }
        loop {
            let message = zmtp::receive_up_to(stream, MESSAGE_BYTES_MAX).await?;
            let Some(frames) = message else {
                return Ok(());
            };
            match parts(&frames) {
                Some((sequence, payload)) if sequence >= 0 => {
                    self.take_live(sequence as u64, payload).await;
                }
                _ => self.source.counts.bad += 1,
            }
        }
    }

    async fn take_live(&mut self, sequence: u64, payload: &[u8]) {
        let plane = self.plane.clone();
        let Some(kv) = &plane.shared.kv else {
            return;
        };
        match self.source.order(sequence) {
            Order::Next => {}
            Order::Old => return,
            Order::Anew => {
                self.begin_anew();
                if sequence > 0 {
                    self.fill_gap(0, sequence).await;
                }
            }
            Order::Gap(from) => self.fill_gap(from, sequence).await,
        }
        // A replay may have brought this one, too.
        if self.source.next().is_none_or(|next| next <= sequence) {
            self.source
                .take(sequence, payload, &kv.index, &mut self.out);
        }
        self.send().await;
        self.settle_trust();
    }

    /// Messages `from` to `to` (not included) are missing. From 0 on it is no fault, they are from before our time: what
    /// is known without them is right all the same.
    async fn fill_gap(&mut self, from: u64, to: u64) {
        if from > 0 {
            self.note(|view| view.gaps += 1);
        }
        let is_whole = match self.spec.replay {
            Some(_) => {
                self.set_trust(Trust::CatchingUp);
                self.replay(from, to).await
            }
            None => false,
        };
        if !is_whole && from > 0 {
            self.is_damaged = true;
            tracing::warn!(worker = %self.spec.worker, from, to, "KV events: messages are lost");
        }
    }

    /// At the begin of a connection: what was published before the subscription, and what was missed without a connection.
    /// The last message that was taken is asked for once more: who does not have it, or another one, is another process.
    async fn catch_up(&mut self) -> io::Result<()> {
        let mut next = self.source.next().unwrap_or(0);
        let mut replay = self.try_replay(next.saturating_sub(1)).await?;
        if next > 0 && matches!(replay, Replay::Nothing | Replay::OfAnother) {
            self.begin_anew();
            self.send().await;
            replay = self.try_replay(0).await?;
            next = 0;
        }
        // From before our time is not from a gap.
        self.is_damaged |= replay == Replay::Broken && next > 0;
        self.note(|view| view.replays += u64::from(replay != Replay::Broken));
        Ok(())
    }

    /// The publisher is another process, or cleared its numbers: what was known of it is over.
    fn begin_anew(&mut self) {
        let plane = self.plane.clone();
        if let Some(kv) = &plane.shared.kv {
            tracing::info!(worker = %self.spec.worker, rank = self.spec.rank, "KV events: the publisher has begun anew");
            self.note(|view| view.restarts += 1);
            self.source.forget(&kv.index, &mut self.out);
            self.is_damaged = false;
        }
    }

    /// Asks for old messages from `from` on. True: nothing is missing up to `to`.
    async fn replay(&mut self, from: u64, to: u64) -> bool {
        let replayed = self.try_replay(from).await;
        let is_unbroken = match replayed {
            Ok(replay) => matches!(replay, Replay::Whole | Replay::Nothing),
            Err(error) => {
                self.warn("KV events: no replay", &error);
                false
            }
        };
        let is_whole = is_unbroken && self.source.next().unwrap_or(0) >= to;
        if is_whole {
            self.note(|view| view.replays += 1);
        }
        is_whole
    }

    async fn try_replay(&mut self, from: u64) -> io::Result<Replay> {
        let plane = self.plane.clone();
        let (Some(kv), Some(endpoint)) = (&plane.shared.kv, self.spec.replay.clone()) else {
            return Ok(Replay::Nothing);
        };
        let mut stream = connect(&endpoint, "DEALER", &["ROUTER"]).await?;
        zmtp::send(&mut stream, &[b"", &from.to_be_bytes()]).await?;
        let mut replay = Replay::Nothing;
        loop {
            let message = zmtp::receive_up_to(&mut stream, MESSAGE_BYTES_MAX);
            let message = timeout(REPLAY_TIMEOUT, message).await;
            let message = message.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))?;
            let frames = message.ok_or(ErrorKind::UnexpectedEof)?;
            let (number, payload) = parts(&frames).ok_or(ErrorKind::InvalidData)?;
            let Ok(number) = u64::try_from(number) else {
                // -1: the end.
                return Ok(replay);
            };
            let taken = self
                .source
                .take_replayed(number, payload, &kv.index, &mut self.out);
            replay = match (taken, replay) {
                (Replayed::OfAnother, _) => return Ok(Replay::OfAnother),
                (Replayed::Old, replay) => replay,
                (Replayed::Late, _) | (_, Replay::Broken) => Replay::Broken,
                (Replayed::Due | Replayed::Known, _) => Replay::Whole,
            };
            self.send().await;
        }
    }

    /// Sends the lessons that were made. Waits where a mailbox is full.
    async fn send(&mut self) {
        if self.out.lessons.is_empty() {
            return;
        }
        let shared: &Shared = &self.plane.shared;
        let mut senders = self.plane.kv.senders.lock().await;
        for (owner, mut lesson) in self.out.lessons.drain(..) {
            while let Err(back) = senders[owner].try_send(lesson) {
                lesson = back;
                shared.cores[owner].wake_if_asleep();
                sleep(MAILBOX_PAUSE).await;
            }
            // ORDERING: Relaxed; a number to show.
            self.plane.kv.lessons.fetch_add(1, Ordering::Relaxed);
            shared.cores[owner].wake_if_asleep();
        }
    }

    fn trust(&self) -> Trust {
        self.plane.kv.rows()[usize::from(self.id)].view.trust
    }

    fn settle_trust(&mut self) {
        // An empty cache is known whole, whatever was lost before.
        self.is_damaged &= self.source.block_count() > 0;
        self.set_trust(match self.is_damaged {
            true => Trust::Degraded,
            false => Trust::Exact,
        });
    }

    fn set_trust(&self, trust: Trust) {
        let Some(kv) = &self.plane.shared.kv else {
            return;
        };
        let id = usize::from(self.id);
        let mut rows = self.plane.kv.rows();
        let view = &mut rows[id].view;
        view.block_count = self.source.block_count();
        view.name_bytes = self.source.bytes();
        view.counts = self.source.counts;
        let old = std::mem::replace(&mut view.trust, trust);
        if old != trust {
            publish_row(&rows, id, &rows[id], &kv.index);
            drop(rows);
            let (from, to) = (old.label(), trust.label());
            tracing::info!(worker = %self.spec.worker, rank = self.spec.rank, from, to, "KV events: trust");
        }
    }

    fn note(&self, change: impl FnOnce(&mut SourceView)) {
        change(&mut self.plane.kv.rows()[usize::from(self.id)].view);
    }

    fn warn(&self, what: &str, error: &io::Error) {
        tracing::warn!(worker = %self.spec.worker, rank = self.spec.rank, "{what}: {error}");
    }
}
