//! One core: a pinned thread with its glommio executor, its ring, its listener, its connections, its shard.
//!
//! The core's thread runs `Core::run` as the main future of its executor and sleeps in one place only, the ring's wait.
//! Everything that can wake it ends that wait: sockets, the doorbell's eventfd (mailboxes, control plane), the wheel's
//! next tick. glommio places and runs the executor; its reactor and timers stay out of the way of requests, because a
//! second place to sleep costs half as much again a request at moderate load, and because nothing here may depend on its park.
//!
//! Invariants:
//! - **C1** No connection ever changes its core; nothing here is shared but through `Shared`.
//! - **C2** One send a connection is in flight: bytes leave in order.
//! - **C3** A place is freed only when the kernel holds no operation on its descriptor.
//! - **C4** The pin of a turn is taken after the sleep and dropped before the next one: a sleeping core holds nothing back.

mod accept;
mod blocks;
pub mod budget;
mod gather;
mod hands;
mod index;
mod line;
mod shelf;
pub mod shun;
mod table;
mod tls;
mod tokens;
mod trace;
mod wheel;

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shards::{Lesson, Pin, PrefixHash, Reader, Receiver, Sender, Shard, Slot};

use crate::config::Config;
use crate::decisions::Pen;
use crate::exchange::{Ask, Empty, Session};
use crate::ring::{Abilities, Event, Received, Ring, RingLimits, Token, send_now};
use crate::route::{self, Batches, Decision, KeySeed, PolicyKind, Role};
use crate::shared::{CoreShared, CoreStats, Shared, ToCore};
use crate::upstream::Idles;
use accept::Door;
use blocks::Blocks;
use budget::RetryBudget;
use gather::Pace;
use hands::{Hands, Turn, sleep_until};
pub use index::IndexShard;
use line::Line;
use shelf::Shelf;
use shun::Shunned;
use table::{Down, Outgoing, Table, Up, Use, Wire, is_upstream};
use tls::Piece;
use tokens::TokenWaits;
use trace::{Scribe, Trace};
use wheel::Wheel;

/// How long what a client still sends is read and dropped after our last byte, so that it gets that byte.
const LINGER_NS: u64 = 3_000_000_000;
/// Steps of shard work between two sleeps: about 50 us.
const SHARD_STEPS: usize = 512;
/// Events in one turn from which on sends are handed to the kernel together.
const CROWD_COUNT: usize = 4;
/// Pieces up to this size may be copied for that.
const COPY_BYTES_MAX: usize = 8 * 1024;
/// How often idle worker connections are looked through.
const SWEEP_NS: u64 = 250_000_000;
/// How long accepting pauses when descriptors have run out.
const ACCEPT_PAUSE_NS: u64 = 100_000_000;

/// What a core is made of before it runs.
pub struct Seed {
    /// Which core this is.
    pub index: usize,
    /// The processor to be pinned to.
    pub cpu: usize,
    /// Its listeners, at least one.
    pub listeners: Vec<TcpListener>,
    /// They are shared with other cores, and with processes before and after this one.
    pub are_inherited: bool,
    /// Its shard, as the only writer.
    pub shard: Shard,
    /// Its part of the exact index, if there is one.
    pub index_shard: Option<IndexShard>,
    /// Its reader of published things.
    pub reader: Reader,
    /// Where lessons for the cores' shards go, by core.
    pub senders: Vec<Sender<Lesson>>,
    /// Where lessons for this core's shard come from.
    pub receivers: Vec<Receiver<Lesson>>,
    /// Its end of the decision log, if there is one.
    pub pen: Option<Pen>,
    /// For choices and request ids.
    pub random_seed: u64,
    /// What the kernel can do.
    pub abilities: Abilities,
    /// What all share.
    pub shared: Arc<Shared>,
}

/// Starts a core on its own pinned thread.
///
/// # Errors
/// The thread or its executor could not be made. Later failures come through the returned handle.
pub fn spawn(seed: Seed) -> io::Result<std::thread::JoinHandle<io::Result<()>>> {
    let name = format!("core-{}", seed.index);
    std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || {
            let executor = glommio::LocalExecutorBuilder::new(glommio::Placement::Fixed(seed.cpu))
                .name(&name)
                // glommio's own rings do nothing here: as small as they can be.
                .io_memory(64 << 10)
                .ring_depth(16)
                .make()
                .map_err(|e| io::Error::other(format!("the executor cannot start: {e}")))?;
            executor.run(async move {
                let (mut core, reader) = Core::new(seed)?;
                core.run(reader)
            })
        })
}

/// The running core.
pub struct Core {
    index: usize,
    shared: Arc<Shared>,
    /// What holds now; the control thread sends another one.
    config: Arc<Config>,
    ring: Ring,
    downs: Table<Down>,
    ups: Table<Up>,
    idles: Idles,
    wheel: Wheel,
    shelf: Shelf,
    places: Vec<Empty>,
    pace: Pace,
    can_gather: bool,
    /// `None`: closed.
    doors: Vec<Option<Door>>,
    are_doors_inherited: bool,
    shard: Shard,
    index_shard: Option<IndexShard>,
    senders: Vec<Sender<Lesson>>,
    receivers: Vec<Receiver<Lesson>>,
    next_receiver: usize,
    /// Owners that were sent lessons in this turn.
    taught: Vec<usize>,
    batches: Batches,
    chain: Vec<PrefixHash>,
    /// Length of the prompt whose chain that is; `None`: of none.
    chain_length: Option<u64>,
    /// Of the same prompt, under `kv_aware`.
    blocks: Blocks,
    token_waits: TokenWaits,
    scratch: Vec<Slot>,
    /// By role: with one for all, two choices a request, every second turn would be the other role's.
    policies: [route::Turn; 3],
    seed: KeySeed,
    random: u64,
    started: Instant,
    swept_ns: u64,
    /// So much happened in this turn that sends are better handed over together than made one by one.
    is_crowded: bool,
    is_draining: bool,
    is_stopping: bool,
    /// Connections to be armed again at the end of the turn, when buffers have come back.
    starved: Vec<Token>,
    complained_ns: u64,
    purging: Vec<Slot>,
    /// Sessions without a client, and since when, ns.
    orphans: Vec<(Token, u64)>,
    retry_budget: RetryBudget,
    line: Line,
    shunned: Shunned,
    /// Workers that are out and were tried, and when, ns.
    tried_at: Vec<(Slot, u64)>,
    scribe: Scribe,
}

impl Core {
    fn new(seed: Seed) -> io::Result<(Core, Reader)> {
        let config = seed.shared.config();
        let limits = RingLimits {
            buffer_count: config.recv_buffer_count,
            buffer_bytes: config.recv_buffer_bytes,
            multishot_receive: config.multishot_receive && seed.abilities.multishot_receive,
            defer_taskrun: config.deferred_task_run,
        };
        let ring = Ring::new(limits, &seed.shared.cores[seed.index].wake)?;
        let core = Core {
            index: seed.index,
            ring,
            downs: Table::of_clients(),
            ups: Table::of_workers(),
            idles: Idles::default(),
            wheel: Wheel::new(0),
            shelf: Shelf::default(),
            places: Vec::new(),
            pace: Pace::default(),
            can_gather: seed.abilities.minimum_wait,
            doors: seed
                .listeners
                .into_iter()
                .map(|listener| Some(Door::new(listener)))
                .collect(),
            are_doors_inherited: seed.are_inherited,
            shard: seed.shard,
            index_shard: seed.index_shard,
            senders: seed.senders,
            receivers: seed.receivers,
            next_receiver: 0,
            taught: Vec::new(),
            batches: Batches::default(),
            chain: Vec::new(),
            chain_length: None,
            blocks: Blocks::default(),
            token_waits: TokenWaits::default(),
            orphans: Vec::new(),
            retry_budget: RetryBudget::new(config.retry.budget_ratio),
            line: Line::default(),
            shunned: Shunned::default(),
            tried_at: Vec::new(),
            scratch: Vec::new(),
            policies: Role::ALL
                .map(|role| route::Turn::new(seed.random_seed.wrapping_add(role as u64))),
            seed: KeySeed(config.prefix_hash_seed),
            random: seed.random_seed | 1,
            started: Instant::now(),
            swept_ns: 0,
            is_crowded: false,
            is_draining: false,
            is_stopping: false,
            starved: Vec::new(),
            complained_ns: 0,
            purging: Vec::new(),
            scribe: Scribe::new(seed.index, config.debug_decisions_count, seed.pen),
            config,
            shared: seed.shared,
        };
        Ok((core, seed.reader))
    }

    /// The loop: work off messages and lessons, sleep, handle what happened.
    fn run(&mut self, mut reader: Reader) -> io::Result<()> {
        self.accept(0);
        // One count for the whole run: taken each turn it would be a line that all cores write.
        let shared = self.shared.clone();
        let mut gather = Duration::ZERO;
        loop {
            self.read_inbox(&mut reader);
            let more = self.work_shard() | self.index_shard.as_mut().is_some_and(IndexShard::work);
            if self.is_over() {
                return Ok(());
            }
            let sleep = self.prepare_sleep(more);
            self.ring.turn(sleep, gather)?;
            self.me().doorbell.announce_awake();
            self.stats().turns.add(1);
            let pin = reader.pin();
            let turn = Turn {
                pin: &pin,
                fleet: shared.fleet.load(&pin),
                now_ns: self.clock_ns(),
            };
            self.is_crowded = self.ring.event_count() >= CROWD_COUNT;
            while let Some(event) = self.ring.next_event() {
                self.handle(turn, event);
            }
            self.handle_timers(turn);
            self.end_token_waits(turn);
            self.let_in(turn);
            self.rearm_starved();
            self.wake_taught();
            if self.can_gather {
                gather = self.pace.gather(turn.now_ns, self.config.stream_gather);
            }
        }
    }

    fn me(&self) -> &CoreShared {
        &self.shared.cores[self.index]
    }

    fn stats(&self) -> &CoreStats {
        &self.me().stats
    }

    fn clock_ns(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn random(&mut self) -> u64 {
        // splitmix64: request ids must differ, not be secret.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Says something that may repeat fast, at most once a second.
    fn complain(&mut self, what: &str, e: &io::Error) {
        let now = self.clock_ns();
        if now >= self.complained_ns {
            self.complained_ns = now + 1_000_000_000;
            tracing::warn!(core = self.index, "{what}: {e}");
        }
    }

    // ---- before the sleep ----

    fn read_inbox(&mut self, reader: &mut Reader) {
        if self.me().is_inbox_empty() {
            return;
        }
        let pin = reader.pin();
        let shared = self.shared.clone();
        let turn = Turn {
            pin: &pin,
            fleet: shared.fleet.load(&pin),
            now_ns: self.clock_ns(),
        };
        while let Some(message) = self.me().take() {
            match message {
                ToCore::Admin { token, reply } => {
                    let client = Token {
                        index: token as u32,
                        generation: (token >> 32) as u32,
                    };
                    self.with_session(turn, client, |session, hands| {
                        session.on_admin_reply(hands, &reply)
                    });
                }
                ToCore::Tokens(done) => self.tokens_came(turn, done),
                ToCore::Purge(slot) => {
                    self.shard.apply(Lesson::Purge { worker: slot });
                    for policy in &mut self.policies {
                        policy.waits.forget(slot);
                    }
                    self.purging.push(slot);
                }
                ToCore::Stalled(slot) => self.move_from(turn, slot),
                ToCore::Recall { request, answer } => {
                    // Who asked may have gone.
                    let _ = answer.send(self.scribe.recall(request));
                }
                ToCore::Flush => {
                    // Lessons on their way are from before the flush.
                    for receiver in &mut self.receivers {
                        while receiver.try_recv().is_some() {}
                    }
                    self.shard.clear();
                }
                ToCore::YourTurn => {
                    self.take_claim();
                    self.pass_on();
                }
                ToCore::Rouse => {
                    self.me().begin_rouse();
                    self.line.rouse();
                }
                ToCore::Configure(config) => self.configure(config),
                ToCore::Drain => self.drain(turn),
                ToCore::Stop => self.stop(),
            }
        }
        self.let_in(turn);
    }

    /// Other settings from now on: each is read where it is used.
    fn configure(&mut self, config: Arc<Config>) {
        self.retry_budget.set_ratio(config.retry.budget_ratio);
        self.config = config;
        // There may be more room now.
        self.pass_on();
        self.line.rouse();
    }

    /// What waits for a worker's answer may go elsewhere.
    fn move_from(&mut self, turn: Turn<'_>, slot: Slot) {
        for client in self.downs.tokens() {
            let leg = self.downs.find(client).and_then(|down| down.leg);
            let up = leg.and_then(|leg| self.ups.find(leg));
            if up.is_some_and(|up| up.slot == slot) {
                self.with_session(turn, client, |session, hands| {
                    session.on_worker_stalled(hands)
                });
            }
        }
    }

    /// Applies lessons from all cores, a bounded number of steps. `true`: there is more to apply (what waits in the
    /// mailboxes is looked for before the sleep).
    fn work_shard(&mut self) -> bool {
        // A new lesson is begun when the last ones are done, so that what waits, waits in the mailboxes and is bounded.
        let mut steps = if self.shard.is_idle() { 0 } else { SHARD_STEPS };
        let count = self.receivers.len();
        for _ in 0..count {
            self.next_receiver = (self.next_receiver + 1) % count;
            let receiver = &mut self.receivers[self.next_receiver];
            while steps < SHARD_STEPS
                && let Some(lesson) = receiver.try_recv()
            {
                steps += steps_of(&lesson);
                self.shard.apply(lesson);
            }
        }
        if self.shard.is_idle() && self.purging.is_empty() {
            return false;
        }
        let more = self.shard.work(SHARD_STEPS);
        let shard = &self.shard;
        let shared = &self.shared.cores[self.index];
        self.purging.retain(|slot| {
            let done = shard.purged(*slot);
            if done {
                shared.purged.push(*slot);
            }
            !done
        });
        more
    }

    /// How long the coming wait may be. What could have come since the last look is looked for again after the doorbell knows.
    fn prepare_sleep(&mut self, more: bool) -> Duration {
        if more {
            return Duration::ZERO;
        }
        self.me().doorbell.announce_sleep();
        let is_taught = self.receivers.iter().any(|r| !r.is_empty())
            || self.index_shard.as_ref().is_some_and(|i| !i.is_quiet());
        if !self.me().is_inbox_empty() || is_taught {
            return Duration::ZERO;
        }
        let now = self.clock_ns();
        let mut next = self.wheel.next_ns();
        if !self.idles.is_empty() || !self.orphans.is_empty() || !self.line.is_empty() {
            next = Some(next.unwrap_or(u64::MAX).min(self.swept_ns + SWEEP_NS));
        }
        if let Some(late_ns) = self.token_waits.next_ns() {
            next = Some(next.unwrap_or(u64::MAX).min(late_ns));
        }
        if let Some(again_ns) = self.accept_again_ns() {
            next = Some(next.unwrap_or(u64::MAX).min(again_ns));
        }
        sleep_until(next, now)
    }

    /// Whether nothing is left to do. Connections to workers go last, so that the kernel holds none of our memory then.
    fn is_over(&mut self) -> bool {
        let is_quiet = self.downs.len() == 0 && !self.has_doors();
        if !(self.is_draining && is_quiet) {
            return false;
        }
        for token in self.ups.tokens() {
            self.kill(token);
        }
        self.ups.len() == 0
    }

    // ---- what happened ----

    fn handle(&mut self, turn: Turn<'_>, event: Event) {
        match event {
            Event::Received {
                token,
                received,
                armed,
            } => self.received(turn, token, received, armed),
            Event::Sent {
                token,
                result,
                bytes,
                from,
                ..
            } => {
                self.sent(turn, token, result, Outgoing { bytes, from });
            }
            Event::Accepted(fd) => self.accepted(turn, fd),
            Event::AcceptEnded { listener, errno } => self.accept_ended(turn, listener, errno),
            Event::Connected { token, result, .. } => self.connected(turn, token, result),
            Event::Watched {
                token,
                armed,
                broken,
            } => self.watched(turn, token, armed, broken),
            Event::Woken => {}
        }
    }

    fn wire(&mut self, token: Token) -> Option<&mut Wire> {
        if is_upstream(token) {
            self.ups.find(token).map(|up| &mut up.wire)
        } else {
            self.downs.find(token).map(|down| &mut down.wire)
        }
    }

    fn received(&mut self, turn: Turn<'_>, token: Token, received: Received, armed: bool) {
        let Some(wire) = self.wire(token) else { return };
        wire.is_receiving = armed;
        wire.is_stopping &= armed;
        if wire.is_dead {
            drop(received);
            return self.free_if_done(token);
        }
        match received {
            Received::Data(lease) => {
                if wire.tls.is_some() {
                    self.unseal(turn, token, lease);
                } else {
                    self.data(turn, token, Piece::Received(lease));
                }
                self.match_receive(token);
            }
            Received::Starved => self.starved.push(token),
            Received::Stopped => self.match_receive(token),
            Received::End => self.cut(turn, token),
            Received::Failed(_) => self.ended(turn, token, true),
        }
    }

    fn data(&mut self, turn: Turn<'_>, token: Token, piece: Piece) {
        if !is_upstream(token) {
            self.with_session(turn, token, |session, hands| {
                session.on_client_bytes(hands, piece)
            });
            return;
        }
        match self.ups.find(token).map(|up| up.usage) {
            Some(Use::Leg(client)) => {
                self.with_session(turn, client, |session, hands| {
                    session.on_worker_bytes(hands, piece)
                });
            }
            // A worker that speaks out of turn is not to be trusted with the next request.
            _ => self.kill(token),
        }
    }

    /// The peer has ended its direction, or the connection broke.
    fn ended(&mut self, turn: Turn<'_>, token: Token, failed: bool) {
        if let Some(wire) = self.wire(token) {
            wire.is_open = false;
        }
        if is_upstream(token) {
            match self.ups.find(token).map(|up| up.usage) {
                Some(Use::Leg(client)) => self.with_session(turn, client, |session, hands| {
                    session.on_worker_end(hands, failed)
                }),
                usage => {
                    if let (Some(Use::Idle), Some(up)) = (usage, self.ups.find(token)) {
                        self.idles.closed_by_worker(up.slot, token, turn.now_ns);
                    }
                    self.kill(token);
                }
            }
            return;
        }
        let Some(down) = self.downs.find(token) else {
            return;
        };
        if down.is_lingering || (down.is_finishing && failed) {
            return self.kill(token);
        }
        if down.is_finishing {
            return;
        }
        self.with_session(turn, token, |session, hands| {
            if failed {
                session.on_client_gone(hands)
            } else {
                session.on_client_end(hands)
            }
        });
    }

    /// Something happened to a client that has ended its direction: a reset says that it is gone.
    fn watched(&mut self, turn: Turn<'_>, token: Token, armed: bool, broken: bool) {
        let Some(down) = self.downs.find(token) else {
            return;
        };
        down.wire.is_watched = armed;
        if down.wire.is_dead {
            return self.free_if_done(token);
        }
        if broken {
            self.with_session(turn, token, |session, hands| session.on_client_gone(hands));
        }
    }

    fn sent(
        &mut self,
        turn: Turn<'_>,
        token: Token,
        result: Result<usize, i32>,
        mut sent: Outgoing,
    ) {
        let Some(wire) = self.wire(token) else { return };
        wire.is_sending = false;
        if wire.is_dead {
            return self.free_if_done(token);
        }
        let Ok(n) = result else {
            return self.send_failed(turn, token, sent.bytes);
        };
        wire.account_sent(n);
        wire.taken_ns = turn.now_ns;
        sent.from += n;
        if sent.from < sent.bytes.len() {
            wire.queue.push_front(sent);
        } else {
            self.give_back(turn, token, sent.bytes);
        }
        self.send_next(token);
        self.drained(turn, token);
    }

    /// A buffer has been sent: a request's goes back to its session, others to the shelf (with TLS the session has its own
    /// again already).
    fn give_back(&mut self, turn: Turn<'_>, token: Token, buffer: Vec<u8>) {
        if is_upstream(token)
            && self.wire(token).is_some_and(|wire| wire.tls.is_none())
            && let Some(Use::Leg(client)) = self.ups.find(token).map(|up| up.usage)
        {
            return self.with_session(turn, client, |session, hands| {
                session.on_request_sent(hands, buffer)
            });
        }
        self.shelf.put(buffer);
    }

    fn send_failed(&mut self, turn: Turn<'_>, token: Token, bytes: Vec<u8>) {
        let Some(wire) = self.wire(token) else { return };
        wire.queue.clear();
        wire.queued_bytes = 0;
        if is_upstream(token) {
            // The receive side tells the session: an answer sent before the worker closed may still lie there.
            self.give_back(turn, token, bytes);
            let is_receiving = self.ups.find(token).is_some_and(|up| up.wire.is_receiving);
            if !is_receiving {
                self.ended(turn, token, true);
            }
            return;
        }
        if self.downs.find(token).is_some_and(|down| down.is_finishing) {
            return self.kill(token);
        }
        self.with_session(turn, token, |session, hands| session.on_client_gone(hands));
    }

    fn connected(&mut self, turn: Turn<'_>, token: Token, result: Result<(), i32>) {
        let Some(up) = self.ups.find(token) else {
            return;
        };
        up.wire.is_connecting = false;
        if up.wire.is_dead {
            return self.free_if_done(token);
        }
        let Use::Leg(client) = up.usage else {
            return self.kill(token);
        };
        if result.is_ok() {
            if let Some(up) = self.ups.find(token) {
                up.wire.is_open = true;
            }
            self.match_receive(token);
            if self.greet(token) {
                return;
            }
            self.with_session(turn, client, |session, hands| session.on_connected(hands));
        } else {
            self.with_session(turn, client, |session, hands| {
                session.on_worker_end(hands, true)
            });
        }
    }

    // ---- sessions without a client ----

    /// A session that goes on without a client.
    fn adopt(&mut self, turn: Turn<'_>, session: Session, trace: Trace) {
        let is_orphan = session.is_release();
        let down = Down {
            trace,
            ..Down::new(Wire::default(), session)
        };
        let token = self.downs.insert(down);
        if is_orphan {
            self.orphans.push((token, turn.now_ns));
        }
        self.with_session(turn, token, |session, hands| session.begin(hands));
    }

    /// Forgets orphans that are gone, and tells how old the oldest is.
    fn watch_orphans(&mut self, now_ns: u64) {
        let downs = &mut self.downs;
        self.orphans
            .retain(|(token, _)| downs.find(*token).is_some());
        let oldest = self.orphans.first().map_or(now_ns, |(_, since)| *since);
        self.stats()
            .pd
            .oldest_orphan_ns
            .set(now_ns.saturating_sub(oldest));
    }

    // ---- timers ----

    fn handle_timers(&mut self, turn: Turn<'_>) {
        let stall_ns = self.config.body_read_timeout.as_nanos() as u64;
        let mut due = Vec::new();
        self.wheel.advance(turn.now_ns, &mut due);
        for token in due {
            let Some(down) = self.downs.find(token) else {
                continue;
            };
            if down.timer_ns > turn.now_ns {
                continue; // An entry left over from a later deadline: the one that counts is still in the wheel.
            }
            down.timer_ns = u64::MAX;
            let deadline_ns = std::mem::replace(&mut down.deadline_ns, u64::MAX);
            if deadline_ns > turn.now_ns {
                self.set_deadline(token, deadline_ns);
                continue;
            }
            let stuck_ns = down.wire.taken_ns + stall_ns;
            let is_idle = down
                .session
                .as_ref()
                .is_some_and(|session| session.is_idle());
            if down.is_finishing {
                // Lingering is over, or the client has not taken a byte for too long: then it must be able to tell.
                if !down.is_lingering
                    && let Some(fd) = &down.wire.fd
                {
                    crate::ring::reset_on_close(fd);
                }
                self.kill(token);
            } else if is_idle && down.wire.is_sending && turn.now_ns < stuck_ns {
                // The last answer is still leaving, and not stuck: the time between requests has not begun.
                self.set_deadline(token, stuck_ns);
            } else {
                self.with_session(turn, token, |session, hands| session.on_deadline(hands));
            }
        }
        if turn.now_ns >= self.swept_ns + SWEEP_NS {
            self.swept_ns = turn.now_ns;
            self.sweep(turn);
            self.watch_orphans(turn.now_ns);
            if !self.line.is_empty() {
                self.line.rouse_all();
                self.pass_on();
            }
        }
        self.accept(turn.now_ns);
    }

    fn sweep(&mut self, turn: Turn<'_>) {
        let mut old = Vec::new();
        let timeout = self.config.pool_idle_timeout.as_nanos() as u64;
        self.idles.expire(timeout, turn.now_ns, &mut old);
        self.idles
            .retain(|slot| turn.fleet.worker(slot).is_some(), &mut old);
        for token in old {
            if self.ups.find(token).is_some_and(|up| up.usage == Use::Idle) {
                self.kill(token);
            }
        }
    }

    // ---- connections ----

    /// Works with a client's session and the world it lives in.
    fn with_session<R>(
        &mut self,
        turn: Turn<'_>,
        client: Token,
        work: impl FnOnce(&mut Session, &mut Hands<'_, '_>) -> R,
    ) {
        let Some(mut session) = self.downs.find(client).and_then(|down| down.session.take()) else {
            return;
        };
        let mut hands = Hands {
            core: self,
            turn,
            client,
        };
        work(&mut session, &mut hands);
        if let Some(down) = self.downs.find(client) {
            down.session = Some(session);
        }
    }

    /// Offers bytes to a socket with nothing before them in line: how many it took. What a socket takes at once costs one
    /// system call and no second turn of the loop, and a received piece goes out from where it lies.
    fn offer(&mut self, token: Token, bytes: &[u8]) -> usize {
        if self.is_crowded && bytes.len() <= COPY_BYTES_MAX {
            return 0;
        }
        let Some(wire) = self.wire(token) else {
            return 0;
        };
        if wire.is_sending || wire.is_dead || !wire.queue.is_empty() {
            return 0;
        }
        let Some(fd) = &wire.fd else { return 0 };
        // An error comes again from the send that follows, and is handled there.
        let taken = send_now(fd, bytes).unwrap_or(0);
        wire.message_bytes = wire.message_bytes.saturating_sub(taken);
        taken
    }

    /// Sends a part of a received piece. What the socket does not take is copied: shared buffers are for receiving.
    fn send_piece(&mut self, token: Token, piece: &[u8]) {
        if let Some(sealed) = self.seal(token, piece) {
            return self.send_sealed(token, sealed);
        }
        let taken = self.offer(token, piece);
        if taken < piece.len() {
            let mut bytes = self.shelf.take();
            bytes.extend_from_slice(&piece[taken..]);
            self.queue(token, Outgoing { bytes, from: 0 });
        } else if self.downs.find(token).is_some_and(|down| down.is_finishing) {
            self.put_off_cut(token);
        }
    }

    /// Sends bytes of our own.
    fn send_bytes(&mut self, token: Token, bytes: Vec<u8>) {
        if let Some(sealed) = self.seal(token, &bytes) {
            self.shelf.put(bytes);
            return self.send_sealed(token, sealed);
        }
        let taken = self.offer(token, &bytes);
        if taken < bytes.len() {
            self.queue(token, Outgoing { bytes, from: taken });
        } else {
            self.shelf.put(bytes);
        }
    }

    /// Sends a request; gives the buffer back if it has left already.
    fn send_request(&mut self, token: Token, bytes: Vec<u8>, from: usize) -> Option<Vec<u8>> {
        if let Some(sealed) = self.seal(token, &bytes[from..]) {
            if let Some(wire) = self.wire(token) {
                wire.message_bytes = sealed.len();
            }
            self.send_sealed(token, sealed);
            return Some(bytes);
        }
        let from = from + self.offer(token, &bytes[from..]);
        if from == bytes.len() {
            return Some(bytes);
        }
        self.queue(token, Outgoing { bytes, from });
        None
    }

    /// Queues bytes for a peer and, if too many wait, stops reading from the other side.
    fn queue(&mut self, token: Token, outgoing: Outgoing) {
        let limit = self.config.relay_buffer_bytes;
        let now_ns = self.clock_ns();
        let Some(wire) = self.wire(token) else { return };
        if wire.is_dead {
            return;
        }
        if !wire.is_sending && wire.queue.is_empty() {
            wire.taken_ns = now_ns;
        }
        let is_message = wire.message_bytes > 0 && !wire.is_sending && wire.queue.is_empty();
        if !is_message {
            wire.queued_bytes += outgoing.bytes.len() - outgoing.from;
        }
        let is_over = wire.queued_bytes > limit;
        wire.queue.push_back(outgoing);
        self.send_next(token);
        if is_over && let Some(source) = self.source(token) {
            self.hold_by_queue(source, true);
        }
    }

    /// Where the bytes for a peer come from.
    fn source(&mut self, token: Token) -> Option<Token> {
        if is_upstream(token) {
            match self.ups.find(token)?.usage {
                Use::Leg(client) => Some(client),
                _ => None,
            }
        } else {
            self.downs.find(token)?.leg
        }
    }

    fn send_next(&mut self, token: Token) {
        let ring = &mut self.ring;
        let wire = if is_upstream(token) {
            self.ups.find(token).map(|up| &mut up.wire)
        } else {
            self.downs.find(token).map(|down| &mut down.wire)
        };
        let Some(wire) = wire else { return };
        if wire.is_sending {
            return;
        }
        if let (Some(fd), Some(next)) = (&wire.fd, wire.queue.pop_front()) {
            wire.send_op = ring.send(token, fd, next.bytes, next.from);
            wire.is_sending = true;
        }
    }

    /// After bytes have left: the other side is read again, or a finished connection closes.
    fn drained(&mut self, turn: Turn<'_>, token: Token) {
        let limit = self.config.relay_buffer_bytes / 2;
        let Some(wire) = self.wire(token) else { return };
        if wire.queued_bytes <= limit
            && let Some(source) = self.source(token)
        {
            self.hold_by_queue(source, false);
        }
        if is_upstream(token) {
            return;
        }
        self.finish_if_flushed(token);
        let Some(down) = self.downs.find(token) else {
            return;
        };
        if down.wire.queued_bytes <= limit && !down.is_finishing && down.wire.is_held_by_session {
            self.with_session(turn, token, |session, hands| {
                session.on_client_drained(hands)
            });
        }
    }

    fn hold_by_queue(&mut self, token: Token, held: bool) {
        if let Some(wire) = self.wire(token)
            && wire.is_held_by_queue != held
        {
            wire.is_held_by_queue = held;
            self.match_receive(token);
        }
    }

    /// Arms or stops a receive, as it should be. A stop that is taken back ends first; then comes a new receive.
    fn match_receive(&mut self, token: Token) {
        let ring = &mut self.ring;
        let wire = if is_upstream(token) {
            self.ups.find(token).map(|up| &mut up.wire)
        } else {
            self.downs.find(token).map(|down| &mut down.wire)
        };
        let Some(wire) = wire else { return };
        let Some(fd) = &wire.fd else { return };
        if wire.wants_receive() && !wire.is_receiving {
            ring.receive(token, fd);
            wire.is_receiving = true;
        } else if wire.is_open && !wire.wants_receive() && wire.is_receiving && !wire.is_stopping {
            ring.stop_receiving(token);
            wire.is_stopping = true;
        }
    }

    fn rearm_starved(&mut self) {
        for token in std::mem::take(&mut self.starved) {
            self.match_receive(token);
        }
    }

    /// Ends our direction when a finished connection has sent all it had.
    fn finish_if_flushed(&mut self, token: Token) {
        let Some(down) = self.downs.find(token) else {
            return;
        };
        if !down.is_finishing || down.is_lingering {
            return;
        }
        if down.wire.is_sending || !down.wire.queue.is_empty() {
            return self.put_off_cut(token);
        }
        down.is_lingering = true;
        let has_ended = !down.wire.is_open;
        if let Some(fd) = &down.wire.fd {
            crate::ring::shutdown_write(fd);
        }
        if has_ended {
            self.kill(token);
        } else {
            self.set_deadline(token, self.clock_ns() + LINGER_NS);
        }
    }

    /// A finishing connection is cut when its client takes nothing for as long as a body may pause.
    fn put_off_cut(&mut self, token: Token) {
        let at = self.clock_ns() + self.config.body_read_timeout.as_nanos() as u64;
        self.set_deadline(token, at);
    }

    /// Sets when `on_deadline` (or the cut of a finishing connection) is due.
    fn set_deadline(&mut self, client: Token, at_ns: u64) {
        let Some(down) = self.downs.find(client) else {
            return;
        };
        down.deadline_ns = at_ns;
        if at_ns < down.timer_ns {
            down.timer_ns = self.wheel.insert(client, at_ns);
        }
    }

    /// Ends a connection now; its place is freed when the kernel has let go of it (C3).
    fn kill(&mut self, token: Token) {
        if is_upstream(token) {
            self.part(token);
        }
        let ring = &mut self.ring;
        let wire = if is_upstream(token) {
            self.ups.find(token).map(|up| {
                up.usage = Use::Nobody;
                &mut up.wire
            })
        } else {
            self.downs.find(token).map(|down| &mut down.wire)
        };
        let Some(wire) = wire else { return };
        if wire.is_dead {
            return;
        }
        wire.is_dead = true;
        wire.queue.clear();
        // By number, each found at once: by descriptor the kernel would look through all operations of the ring.
        if wire.is_receiving && !wire.is_stopping {
            ring.stop_receiving(token);
        }
        if wire.is_sending {
            ring.cancel_send(wire.send_op);
        }
        if wire.is_connecting {
            ring.cancel_connect(wire.connect_op);
        }
        if wire.is_watched {
            ring.cancel_watch(token);
        }
        self.free_if_done(token);
    }

    fn free_if_done(&mut self, token: Token) {
        if self
            .wire(token)
            .is_none_or(|wire| !wire.is_dead || wire.is_busy())
        {
            return;
        }
        if is_upstream(token) {
            self.ups.remove(token);
            self.stats().upstream_closed.add(1);
        } else if let Some(down) = self.downs.remove(token)
            && down.wire.fd.is_some()
        {
            if let (Some(counted), Some(addresses)) = (down.counted, self.shared.addresses.get()) {
                addresses.leave(counted);
            }
            self.stats().closed.add(1);
        }
    }

    // ---- draining ----

    fn drain(&mut self, turn: Turn<'_>) {
        if std::mem::replace(&mut self.is_draining, true) {
            return;
        }
        self.stop_accepting();
        for client in self.downs.tokens() {
            self.with_session(turn, client, |session, hands| session.on_drain(hands));
        }
    }

    fn stop(&mut self) {
        self.is_draining = true;
        self.is_stopping = true;
        self.stop_accepting();
        for token in self.downs.tokens() {
            self.kill(token);
        }
        for token in self.ups.tokens() {
            self.kill(token);
        }
    }

    // ---- the shards ----

    /// Makes the chain of a request's prompt, unless it is there from the choice before.
    fn find_chain(&mut self, ask: &Ask<'_>) {
        if self.chain_length.is_none()
            && let Some((body, fields)) = ask.key
        {
            self.chain_length = route::chain(self.seed, ask.route, body, fields, &mut self.chain);
        }
    }

    /// Counts a decision.
    fn note(&self, ask: &Ask<'_>, decision: &Decision, length: Option<u64>) {
        let stats = self.stats();
        let role = ask.role as usize;
        stats.decisions[role][decision.reason as usize].add(1);
        if length.is_some() && self.config.settings_of(ask.role).policy == PolicyKind::KvAware {
            self.note_tokens(ask, decision);
        }
        let worker = &stats.workers[usize::from(decision.slot.0)];
        worker.chosen.add(1);
        if let Some(length) = length {
            worker.prompt_bytes.add(length);
            worker
                .matched_bytes
                .add(self.matched_bytes(decision, length));
        }
    }

    /// Counts what `kv_aware` knew of a prompt that has a key.
    fn note_tokens(&self, ask: &Ask<'_>, decision: &Decision) {
        let (kv, role) = (&self.stats().kv, ask.role as usize);
        let Some(new) = decision.new_tokens else {
            return kv.without[role].add(1);
        };
        let known = match ask.prompt {
            Some(_) => &kv.of_text,
            None => &kv.of_ids,
        };
        known[role].add(1);
        kv.new_tokens[role].record(new);
        kv.credited_tokens[role].add(self.blocks.token_count().saturating_sub(new));
    }

    /// Of a prompt of `length` bytes those that the chosen worker need not compute.
    fn matched_bytes(&self, decision: &Decision, length: u64) -> u64 {
        match decision.new_tokens {
            // The share of the tokens that it need not compute, of the bytes.
            Some(new) => self.blocks.known_bytes(new, length),
            None => route::bytes_of_blocks(decision.matched_blocks),
        }
    }

    /// Teaches the shards that a worker will hold this prompt. Advice: what does not fit into a mailbox is dropped and counted.
    fn teach(&mut self, pin: &Pin<'_>, slot: Slot) {
        let Core {
            shared,
            senders,
            taught,
            batches,
            chain,
            index,
            shard,
            ..
        } = self;
        route::lessons(
            &shared.tree,
            pin,
            chain,
            slot,
            batches,
            || shard.spare().unwrap_or_default(),
            |owner, lesson| match senders[owner].try_send(lesson) {
                Ok(()) if owner != *index => taught.push(owner),
                Ok(()) => {}
                Err(_) => shared.cores[*index].stats.lessons_dropped.add(1),
            },
        );
    }

    fn wake_taught(&mut self) {
        for owner in self.taught.drain(..) {
            self.shared.cores[owner].wake_if_asleep();
        }
    }
}

/// What a lesson costs its shard.
fn steps_of(lesson: &Lesson) -> usize {
    match lesson {
        Lesson::Insert { hashes, .. }
        | Lesson::Remove { hashes, .. }
        | Lesson::Touch { hashes } => hashes.len().max(1),
        Lesson::Branch { .. } | Lesson::Purge { .. } => 1,
    }
}
