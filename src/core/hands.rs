//! The world of a session as the core makes it: sockets through the ring, choices through the shards.

use std::sync::atomic::Ordering;
use std::time::Duration;

use shards::{Books, LoadGuard, Permit, Pin, Slot};

use super::Core;
use super::table::{Up, Use, Wire};
use super::tls::Piece;
use crate::access_log::Entry;
use crate::config::Config;
use crate::exchange::{
    Ahead, Ask, Dial, Empty, Entrance, NoSeat, PdEvent, Record, Seat, Session, Sign, World,
    message_start,
};
use crate::held::{ByteLimits, Held};
use crate::ring::Token;
use crate::route::{
    self, Candidates, Decision, Fields, Home, Key, Loads, PolicyKind, Reason, Role, TOKEN_BYTES,
    Tokens, TreePrefixes,
};
use crate::shared::{ATTEMPT_COUNT, AdminRequest, Affinity, Fleet, Outcome, Route, Worker};
use crate::tls::ToWorker;

/// A core tries a worker that is out no more often than this.
const TRIAL_PAUSE_NS: u64 = 250_000_000;

/// Places of requests that have ended, for later ones (1 KiB each).
const PLACES_MAX: usize = 1024;

/// What a request is recognised by.
#[derive(Clone, Copy, Default)]
struct Known {
    /// Length of the prompt whose chain the core has, under a policy that looks at it.
    length: Option<u64>,
    /// Its session, or its prompt's begin, under a policy that hashes.
    hash: Option<u64>,
    /// Whose the session is, under a policy that binds them.
    home: Option<Home>,
    /// Its binding under `kv_aware`, where sessions keep to a worker.
    bond: Option<Bond>,
}

/// What a session is bound by, and to whom.
#[derive(Clone, Copy)]
struct Bond {
    key: u64,
    slot: Option<Slot>,
}

impl Known {
    fn key<'k, P>(self, prefixes: &'k P) -> Key<'k, P> {
        match (self.length, self.hash, self.home) {
            (Some(length), ..) => Key::Prefix(prefixes, length),
            (None, Some(hash), Some(home)) => Key::Session(hash, home),
            (None, Some(hash), None) => Key::Hash(hash),
            (None, None, _) => Key::None,
        }
    }
}

/// What is true for one turn of the loop.
#[derive(Clone, Copy)]
pub struct Turn<'t> {
    pub pin: &'t Pin<'t>,
    pub fleet: &'t Fleet,
    pub now_ns: u64,
}

/// The world of the session on one client connection.
pub struct Hands<'a, 't> {
    pub core: &'a mut Core,
    pub turn: Turn<'t>,
    pub client: Token,
}

impl Hands<'_, '_> {
    fn wire(&mut self) -> Option<&mut Wire> {
        self.core.downs.find(self.client).map(|down| &mut down.wire)
    }

    fn leg(&mut self) -> Option<Token> {
        self.core.downs.find(self.client)?.leg
    }

    /// A seat on a worker that is out, if one is to be tried now: one request at a time, and not many a second.
    fn try_worker(&mut self, ask: &Ask<'_>) -> Option<Seat> {
        let fleet = self.turn.fleet;
        for trial in &fleet.pool(ask.role).trials {
            let Some(worker) = fleet.worker(trial.slot) else {
                continue;
            };
            let fits = serves(worker, ask.model);
            let now_ns = self.turn.now_ns;
            let core = &mut *self.core;
            let rested = core.tried_at.iter().all(|(slot, at)| {
                *slot != trial.slot || now_ns.saturating_sub(*at) >= TRIAL_PAUSE_NS
            });
            if !fits || !rested || ask.tried.contains(&trial.slot) {
                continue;
            }
            let books = core.shared.books;
            let seen = books.in_flight(trial.slot);
            if seen > trial.load_max {
                continue;
            }
            // At the load that was seen: of two cores one gets it.
            if let Ok(guard) = LoadGuard::acquire_at(books, worker.id, ask.prompt_bytes, seen) {
                core.tried_at.retain(|(slot, _)| *slot != trial.slot);
                core.tried_at.push((trial.slot, now_ns));
                core.stats().workers[usize::from(trial.slot.0)]
                    .chosen
                    .add(1);
                self.write_down_trial(ask, worker.id, seen);
                return Some(Seat {
                    id: worker.id,
                    is_trial: true,
                    missing_bytes: None,
                    ahead: None,
                    guard,
                });
            }
        }
        None
    }

    /// A seat on a worker that is out: better than none for a request that all others have failed.
    #[cold]
    fn take_spare(&mut self, ask: &Ask<'_>, hash: Option<u64>) -> Option<Seat> {
        let fleet = self.turn.fleet;
        let spare = fleet.pool(ask.role).spare.slots().iter();
        let serving: Candidates = spare
            .filter_map(|slot| fleet.worker(*slot))
            .filter(|worker| serves(worker, ask.model))
            .map(|worker| (worker.id.slot, route::name_of(&worker.url)))
            .collect();
        let known = Known {
            hash,
            ..Known::default()
        };
        self.take_seat(ask, ask.tried, &serving, known)
    }

    /// Who is better left out this time: those already tried, those that were unreachable or busy just now, and, for their
    /// part of the requests (of the sessions, where these are known), those that have just come back.
    fn avoided(&mut self, ask: &Ask<'_>, hash: Option<u64>) -> Vec<Slot> {
        let now_ns = self.turn.now_ns;
        let core = &mut *self.core;
        let mut avoided = ask.tried.to_vec();
        avoided.extend(core.shunned.slots(now_ns));
        for (slot, percent) in &self.turn.fleet.pool(ask.role).easing {
            // By bits that chose neither a point on the ring nor a bucket of sessions.
            let lot = hash.map_or_else(|| core.random(), |hash| hash >> 16 & 0xffff);
            if lot % 100 >= u64::from(*percent) {
                avoided.push(*slot);
            }
        }
        avoided
    }

    /// Whether those that could still take this request have as many as they may have.
    fn has_only_full_left(&self, ask: &Ask<'_>, candidates: &Candidates) -> bool {
        let below = self.core.config.worker_request_count_max;
        let books = self.core.shared.books;
        let left = || {
            let slots = candidates.slots().iter();
            slots.filter(|slot| !ask.tried.contains(slot))
        };
        below < u32::MAX
            && left().next().is_some()
            && left().all(|slot| books.in_flight(*slot) >= below)
    }

    /// The length of the prompt, and its chain in the core, if the policy wants it.
    fn length(&mut self, ask: &Ask<'_>) -> Option<u64> {
        let core = &mut *self.core;
        if !ask.is_same_prompt {
            core.chain.clear();
            core.chain_length = None;
            core.blocks.clear();
        }
        // Decode is chosen by load: the blocks come from prefill.
        let policy = core.config.settings_of(ask.role).policy;
        let is_decode_by_load = policy == PolicyKind::KvAware && ask.role == Role::Decode;
        if !policy.uses_tree() || is_decode_by_load {
            // Another policy may be asked about this request later.
            if core.scribe.is_logging() {
                core.find_chain(ask);
            }
            return None;
        }
        if let (PolicyKind::KvAware, Some(kv)) = (policy, &core.shared.kv) {
            let base_model = core.config.kv.model.as_deref();
            core.blocks.read(&kv.index, base_model, ask);
        }
        core.find_chain(ask);
        core.chain_length
    }

    /// What the policy hashes, if it does.
    fn hash(&self, ask: &Ask<'_>) -> Option<u64> {
        let settings = self.core.config.settings_of(ask.role);
        let seed = self.core.seed;
        match settings.policy {
            policy if policy.uses_session() => route::session_hash(seed, ask.head, ask.key),
            PolicyKind::PrefixHash => {
                let (body, fields) = ask.key?;
                route::prefix_hash(seed, ask.route, body, fields, settings.prefix_hash_bytes)
            }
            _ => None,
        }
    }

    /// The worker that the session is bound to, if the policy binds sessions. One that is new, or whose worker is no
    /// candidate any more, is bound now.
    fn home(
        &mut self,
        ask: &Ask<'_>,
        hash: Option<u64>,
        exclude: &[Slot],
        candidates: &Candidates,
    ) -> Option<Home> {
        let core = &mut *self.core;
        if core.config.settings_of(ask.role).policy != PolicyKind::StickyLeastLoaded {
            return None;
        }
        let sessions = core.shared.sessions.get()?;
        let key = self.turn.fleet.binding(hash?, ask.role, ask.model);
        let now = core.shared.session_time(&core.config);
        let bound = sessions.find(key, now);
        let home = |slot, is_new| Some(Home { slot, is_new });
        if let Some(slot) = bound.filter(|slot| candidates.contains(*slot)) {
            return home(slot, false);
        }
        let below = core.config.worker_request_count_max;
        let books = core.shared.books;
        let has_room = |slot: Slot| !exclude.contains(&slot) && books.in_flight(slot) < below;
        let rng = &mut core.policies[ask.role as usize].rng;
        let wanted = route::home_for_new(candidates, sessions, books, has_room, rng)?;
        // Another core may have been faster.
        let slot = sessions.bind(key, wanted, bound, now);
        home(slot, slot == wanted)
    }

    /// The session's binding, if `kv_aware` keeps sessions to a worker (`--kv-aware-session-affinity-ttl-secs`). In P/D decode
    /// alone does: prefill goes by what it costs.
    fn bond(&self, ask: &Ask<'_>) -> Option<Bond> {
        let core = &*self.core;
        let ttl_secs = core.config.kv.session_affinity_ttl_secs?;
        let is_bound = core.config.settings_of(ask.role).policy == PolicyKind::KvAware
            && ask.role != Role::Prefill;
        let sessions = core.shared.sessions.get().filter(|_| is_bound)?;
        let Some(session) = route::session_hash(core.seed, ask.head, ask.key) else {
            let counts = &core.stats().kv.affinity[ask.role as usize];
            counts[Affinity::NoSession as usize].add(1);
            return None;
        };
        let key = self.turn.fleet.binding(session, ask.role, ask.model);
        let now = core.shared.age_of(ttl_secs);
        Some(Bond {
            key,
            slot: sessions.find(key, now),
        })
    }

    /// A session without a worker, or whose worker is no candidate any more, is bound to this one. One whose worker failed this
    /// request, or is full, stays bound to it.
    fn tie(&self, bond: Bond, candidates: &Candidates, slot: Slot, role: Role) {
        let core = &*self.core;
        let ttl_secs = core.config.kv.session_affinity_ttl_secs;
        let kept = bond.slot.filter(|bound| candidates.contains(*bound));
        if kept.is_none()
            && let (Some(sessions), Some(ttl_secs)) = (core.shared.sessions.get(), ttl_secs)
        {
            let now = core.shared.age_of(ttl_secs);
            let _ = sessions.bind(bond.key, slot, bond.slot, now);
        }
        let what = match (kept, bond.slot) {
            (Some(kept), _) if kept == slot => Affinity::StickyHit,
            (Some(_), _) => Affinity::CapacityBypass,
            (None, Some(_)) => Affinity::Rebind,
            (None, None) => Affinity::Bind,
        };
        core.stats().kv.affinity[role as usize][what as usize].add(1);
    }

    /// Takes a seat: the choice and its count in one step. When the seat was taken meanwhile, the choice is made anew.
    /// `exclude`: who is out of the question.
    fn take_seat(
        &mut self,
        ask: &Ask<'_>,
        exclude: &[Slot],
        candidates: &Candidates,
        known: Known,
    ) -> Option<Seat> {
        const ATTEMPTS: u32 = 4;
        let length = known.length;
        let Core {
            shared,
            config,
            chain,
            policies,
            scratch,
            blocks,
            ..
        } = &mut *self.core;
        let shared = &**shared;
        let settings = config.settings_of(ask.role);
        let session = known.hash.filter(|_| settings.policy.uses_session());
        let prefixes = TreePrefixes {
            tree: &shared.tree,
            pin: self.turn.pin,
            chain,
        };
        let below = match ask.is_followed_up {
            true => u32::MAX,
            false => config.worker_request_count_max,
        };
        let mut closed: Vec<Slot> = Vec::new();
        if below < u32::MAX {
            closed.extend_from_slice(exclude);
            let is_full = |slot: &Slot| shared.books.in_flight(*slot) >= below;
            closed.extend(candidates.slots().iter().copied().filter(is_full));
        }
        for attempt in 0..ATTEMPTS {
            let tokens = match (&shared.kv, settings.policy, length) {
                (Some(kv), PolicyKind::KvAware, Some(length)) => {
                    let prefix = Some((&prefixes, length));
                    blocks.tokens(&kv.index, self.turn.pin, settings, candidates, prefix)
                }
                _ => None,
            };
            let decision = route::decide(
                settings,
                tokens.map_or_else(|| known.key(&prefixes), Key::Tokens),
                candidates,
                if closed.is_empty() { exclude } else { &closed },
                shared.books,
                &mut policies[ask.role as usize],
                scratch,
            )?;
            let out = if closed.is_empty() { exclude } else { &closed };
            let bound = known.bond.and_then(|bond| bond.slot);
            let bound = bound.filter(|slot| candidates.contains(*slot) && !out.contains(slot));
            let decision = match bound {
                Some(slot) => kept(decision, slot, ask.role, candidates, shared.books, tokens),
                None => decision,
            };
            let worker = self.turn.fleet.worker(decision.slot)?;
            // Under `kv_aware` and `expected_wait` what waits on a worker is what it has to compute.
            let learns = settings.policy == PolicyKind::ExpectedWait && ask.role != Role::Decode;
            let work_bytes = match (decision.new_tokens, length) {
                (Some(tokens), _) => tokens * TOKEN_BYTES as u64,
                (None, Some(length)) if learns => {
                    length.saturating_sub(route::bytes_of_blocks(decision.matched_blocks))
                }
                _ => ask.prompt_bytes,
            };
            // The last attempt takes the seat at whatever load it has: being chosen four times in a row by others means
            // that it is everybody's best.
            let guard = if decision.seen >= below {
                Err(None) // Filled up since it was looked at.
            } else if attempt + 1 < ATTEMPTS {
                LoadGuard::acquire_at(shared.books, worker.id, work_bytes, decision.seen)
            } else {
                LoadGuard::acquire_below(shared.books, worker.id, work_bytes, below).ok_or(None)
            };
            match guard {
                Ok(guard) => {
                    self.core.note(ask, &decision, length);
                    self.write_down(ask, worker.id, &decision, candidates, length, session);
                    if let Some(bond) = known.bond {
                        self.tie(bond, candidates, decision.slot, ask.role);
                    }
                    let missing = |length: u64| {
                        length.saturating_sub(self.core.matched_bytes(&decision, length))
                    };
                    let ahead = || {
                        let load = self.core.shared.books.load(worker.id.slot);
                        Ahead {
                            role: ask.role,
                            bytes: load.waiting_bytes,
                            requests: load.waiting,
                            streams: load.active,
                            own_bytes: work_bytes,
                        }
                    };
                    return Some(Seat {
                        id: worker.id,
                        is_trial: false,
                        missing_bytes: length.map(missing),
                        ahead: (learns && length.is_some()).then(ahead),
                        guard,
                    });
                }
                Err(Some(_)) => {}
                // Closed since this fleet was published, or full: as if it had been tried.
                Err(None) => {
                    if closed.is_empty() {
                        closed.extend_from_slice(exclude);
                    }
                    closed.push(decision.slot);
                }
            }
        }
        None
    }
}

impl World for Hands<'_, '_> {
    type Piece = Piece;

    fn config(&self) -> &Config {
        &self.core.config
    }

    fn now_ns(&self) -> u64 {
        self.turn.now_ns
    }

    fn clock_ns(&self) -> u64 {
        self.core.clock_ns()
    }

    fn is_draining(&self) -> bool {
        self.core.is_draining
    }

    fn place(&mut self) -> Option<Empty> {
        self.core.places.pop()
    }

    fn put_back(&mut self, left: Empty) {
        if self.core.places.len() < PLACES_MAX {
            self.core.places.push(left);
        }
    }

    fn make_request_id(&mut self, route: Route, out: &mut Vec<u8>) {
        let prefix: &[u8] = match route {
            Route::ChatCompletions => b"chatcmpl-",
            Route::Completions => b"cmpl-",
            Route::Generate | Route::InferenceGenerate => b"gnt-",
            _ => b"req-",
        };
        out.extend_from_slice(prefix);
        for _ in 0..2 {
            let mut n = self.core.random();
            for _ in 0..12 {
                const DIGITS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
                out.push(DIGITS[(n & 31) as usize]);
                n >>= 5;
            }
        }
    }

    fn buffer(&mut self) -> Vec<u8> {
        self.core.shelf.take()
    }

    fn grow(&mut self, buffer: Vec<u8>, more: usize) -> (Vec<u8>, bool) {
        self.core.shelf.grow(buffer, more)
    }

    fn hold_body(&mut self, held: &mut Held, bytes: u64) -> bool {
        held.grow(&self.core.me().bodies, bytes, self.core.config.body_memory)
    }

    fn hold_in_queue(&mut self, held: &mut Held, bytes: u64) -> bool {
        let limits = ByteLimits {
            part_bytes: self.core.config.queue_bytes_max,
            whole_bytes: u64::MAX,
        };
        held.grow(&self.core.shared.queued, bytes, limits)
    }

    fn recycle(&mut self, buffer: Vec<u8>) {
        self.core.shelf.put(buffer);
    }

    fn send(&mut self, bytes: Vec<u8>) {
        let client = self.client;
        self.core.send_bytes(client, bytes);
    }

    fn send_piece(&mut self, piece: Piece, from: usize, to: usize) {
        let client = self.client;
        self.core.send_piece(client, &piece.as_ref()[from..to]);
    }

    fn finish(&mut self) {
        let client = self.client;
        if let Some(down) = self.core.downs.find(client) {
            down.is_finishing = true;
            // What it still sends is read and dropped, so that it gets what we sent.
            down.wire.is_held_by_session = false;
            down.wire.is_held_by_queue = false;
        }
        self.core.match_receive(client);
        self.core.say_goodbye(client);
        self.core.put_off_cut(client);
        self.core.finish_if_flushed(client);
    }

    fn abort(&mut self) {
        let client = self.client;
        if let Some(wire) = self.wire()
            && let Some(fd) = &wire.fd
        {
            crate::ring::reset_on_close(fd);
        }
        self.core.kill(client);
    }

    fn read_client(&mut self, on: bool) {
        let client = self.client;
        if let Some(wire) = self.wire() {
            wire.is_held_by_session = !on;
        }
        self.core.match_receive(client);
    }

    fn is_client_full(&mut self) -> bool {
        let limit = self.core.config.relay_buffer_bytes;
        self.wire().is_some_and(|wire| wire.queued_bytes > limit)
    }

    fn is_client_held(&mut self) -> bool {
        self.wire().is_some_and(|wire| wire.is_held_by_queue)
    }

    fn is_worker_held(&mut self) -> bool {
        let leg = self.leg();
        leg.and_then(|leg| self.core.ups.find(leg))
            .is_some_and(|up| up.wire.is_held_by_queue)
    }

    fn watch_client(&mut self) {
        let client = self.client;
        let core = &mut *self.core;
        if let Some(down) = core.downs.find(client)
            && let Some(fd) = &down.wire.fd
            && !down.wire.is_watched
        {
            core.ring.watch(client, fd);
            down.wire.is_watched = true;
        }
    }

    fn deadline(&mut self, at_ns: u64) {
        let client = self.client;
        self.core.set_deadline(client, at_ns);
    }

    fn enter(&mut self) -> Entrance {
        let client = self.client;
        match self.core.enter_gate(client) {
            Entrance::Full if self.turn.fleet.eligible.is_empty() => Entrance::NoWorker,
            entrance => entrance,
        }
    }

    fn step_aside(&mut self, permit: Permit) -> Result<(), Permit> {
        let client = self.client;
        self.core.step_aside(client, permit)
    }

    fn stop_waiting(&mut self) {
        let client = self.client;
        self.core.stop_waiting(client);
    }

    fn leave(&mut self, permit: Permit) {
        self.core.leave_gate(permit);
    }

    fn retry_after_secs(&self) -> u32 {
        // ORDERING: Relaxed; an estimate.
        self.core.shared.retry_after_secs.load(Ordering::Relaxed)
    }

    fn record_wait(&mut self, ns: u64) {
        self.core.stats().waits.record(ns);
    }

    fn ask_tokens(&mut self, route: Route, body: &[u8], fields: &Fields) -> Option<u64> {
        let client = self.client;
        self.core.ask_tokens(client, route, body, fields)
    }

    fn choose(&mut self, ask: Ask<'_>) -> Result<Seat, NoSeat> {
        let began = self.clock_ns();
        let fleet = self.turn.fleet;
        if ask.tried.is_empty() {
            self.core.retry_budget.earn();
        }
        let candidates = match candidates(fleet, ask.role, ask.model) {
            Ok(candidates) => candidates,
            Err(why) => {
                // What is written down of this choice is of this prompt.
                self.length(&ask);
                let hash = self.hash(&ask);
                return self.take_spare(&ask, hash).ok_or(why);
            }
        };
        let mut known = Known {
            length: self.length(&ask),
            hash: self.hash(&ask),
            home: None,
            bond: self.bond(&ask),
        };
        let length = known.length;
        let seat = match self.try_worker(&ask) {
            Some(seat) => Some(seat),
            None if self.core.shunned.is_empty() && fleet.pool(ask.role).easing.is_empty() => {
                known.home = self.home(&ask, known.hash, ask.tried, candidates);
                self.take_seat(&ask, ask.tried, candidates, known)
            }
            None => {
                let exclude = self.avoided(&ask, known.hash);
                known.home = self.home(&ask, known.hash, &exclude, candidates);
                self.take_seat(&ask, &exclude, candidates, known)
                    .or_else(|| self.take_seat(&ask, ask.tried, candidates, known))
            }
        };
        let is_full = seat.is_none() && self.has_only_full_left(&ask, candidates);
        let seat = match is_full {
            true => None,
            false => seat.or_else(|| self.take_spare(&ask, known.hash)),
        };
        let Some(seat) = seat else {
            return Err(if is_full {
                NoSeat::Full
            } else if ask.tried.is_empty() {
                NoSeat::NoneEligible
            } else {
                NoSeat::AllTried
            });
        };
        if length.is_some() {
            self.core.teach(self.turn.pin, seat.id.slot);
        }
        let took = self.clock_ns().saturating_sub(began);
        self.core.stats().decision.record(took);
        Ok(seat)
    }

    fn worker(&self, slot: Slot) -> Option<&Worker> {
        self.turn.fleet.worker(slot)
    }

    fn random(&mut self) -> u64 {
        self.core.random()
    }

    fn adopt(&mut self, session: Session) {
        let trace = self.trace_for_errand();
        self.core.adopt(self.turn, session, trace);
    }

    fn begin_exchange(&mut self, route: Route, request_id: &[u8], explains: bool) -> bool {
        self.core.stats().begun[route as usize].add(1);
        self.begin_trace(request_id, explains)
    }

    fn explain(&mut self, names: bool, out: &mut Vec<u8>) {
        self.write_explanation(names, out);
    }

    fn dial(&mut self, slot: Slot, fresh: bool) -> Dial {
        let Some(worker) = self.turn.fleet.worker(slot) else {
            return Dial::Refused;
        };
        let core = &mut *self.core;
        let idle_ns = core.config.pool_idle_timeout.as_nanos() as u64;
        while !fresh && let Some(token) = core.idles.take(slot, idle_ns, self.turn.now_ns) {
            if let Some(up) = core.ups.find(token)
                && up.usage == Use::Idle
                && !up.wire.is_dead
            {
                up.usage = Use::Leg(self.client);
                if let Some(down) = core.downs.find(self.client) {
                    down.leg = Some(token);
                }
                return Dial::Reused;
            }
        }
        let Ok(tls) = core.tls_session(worker.tls.as_ref().map(ToWorker::session)) else {
            return Dial::Refused;
        };
        let up = Up {
            wire: Wire {
                tls,
                ..Wire::default()
            },
            slot,
            usage: Use::Leg(self.client),
        };
        let token = core.ups.insert(up);
        match core.ring.connect(token, &worker.address) {
            Ok((fd, connect_op)) => {
                if let Some(up) = core.ups.find(token) {
                    up.wire.fd = Some(fd);
                    up.wire.is_connecting = true;
                    up.wire.connect_op = connect_op;
                }
                if let Some(down) = core.downs.find(self.client) {
                    down.leg = Some(token);
                }
                core.stats().upstream_opened.add(1);
                Dial::Connecting
            }
            Err(e) => {
                core.ups.remove(token);
                core.complain("no socket for a worker connection", &e);
                Dial::Refused
            }
        }
    }

    fn send_message(&mut self, message: Vec<u8>) -> Option<Vec<u8>> {
        let leg = self.leg()?;
        let from = message_start(&message);
        let up = self.core.ups.find(leg)?;
        up.wire.message_bytes = message.len() - from;
        self.core.send_request(leg, message, from)
    }

    fn send_worker(&mut self, bytes: Vec<u8>) {
        if let Some(leg) = self.leg() {
            self.core.send_bytes(leg, bytes);
        }
    }

    fn send_worker_piece(&mut self, piece: Piece, from: usize, to: usize) {
        if let Some(leg) = self.leg() {
            self.core.send_piece(leg, &piece.as_ref()[from..to]);
        }
    }

    fn break_leg(&mut self) {
        if let Some(leg) = self.leg()
            && let Some(up) = self.core.ups.find(leg)
            && let Some(fd) = &up.wire.fd
        {
            crate::ring::shutdown(fd);
        }
    }

    fn end_leg(&mut self, keep: bool) {
        let now_ns = self.turn.now_ns;
        let known = |slot: Slot| self.turn.fleet.worker(slot).is_some();
        let core = &mut *self.core;
        let Some(token) = core
            .downs
            .find(self.client)
            .and_then(|down| down.leg.take())
        else {
            return;
        };
        // Neither waits for the other any more.
        if let Some(down) = core.downs.find(self.client) {
            down.wire.is_held_by_queue = false;
        }
        core.match_receive(self.client);
        let Some(up) = core.ups.find(token) else {
            return;
        };
        up.usage = Use::Nobody;
        up.wire.is_held_by_queue = false;
        let wire = &up.wire;
        let is_clean = !wire.is_sending && wire.queue.is_empty() && wire.is_open && !wire.is_dead;
        let reuses = !core.config.pool_idle_timeout.is_zero();
        if keep && is_clean && reuses && known(up.slot) {
            up.usage = Use::Idle;
            let slot = up.slot;
            core.idles.put(slot, token, now_ns);
            // An idle connection always listens, so that its end is noticed at once.
            core.match_receive(token);
        } else {
            core.kill(token);
        }
    }

    fn hand_over(&mut self, mut request: AdminRequest) -> bool {
        request.core = self.core.index;
        request.token = u64::from(self.client.generation) << 32 | u64::from(self.client.index);
        self.core.shared.admin.try_send(request).is_ok()
    }

    fn judge(&mut self, slot: Slot, sign: Sign, is_trial: bool) {
        self.remember_sign(slot, sign);
        let stats = &self.core.stats().workers[usize::from(slot.0)];
        match sign {
            Sign::Ended => return stats.completions.add(1),
            Sign::Busy(secs) => {
                stats.busy.add(1);
                return self.core.shunned.busy(slot, secs, self.turn.now_ns);
            }
            // A trial's outcome is counted apart: results of older requests must not be taken for it.
            Sign::Good if is_trial => return stats.trials_good.add(1),
            Sign::Good => return stats.successes.add(1),
            Sign::Refused | Sign::Failed | Sign::Error if is_trial => stats.trials_bad.add(1),
            Sign::Refused => {
                stats.failures.add(1);
                stats.refused.add(1);
            }
            Sign::Failed => stats.failures.add(1),
            Sign::Error => stats.errors.add(1),
        }
        let core = &mut *self.core;
        if sign == Sign::Refused {
            core.shunned.refused(slot, self.turn.now_ns);
            // ORDERING: Relaxed; it says "probe" and publishes nothing, the bell brings the reader here.
            core.shared.is_refused.store(true, Ordering::Relaxed);
        }
        core.shared.failure_bell.notify_one();
    }

    fn may_retry(&mut self) -> bool {
        self.core.retry_budget.take(self.turn.now_ns)
    }

    fn count_resend(&mut self) {
        self.core.stats().resends.add(1);
    }

    fn count_retry(&mut self, route: Route, attempt: u32) {
        let stats = self.core.stats();
        stats.retries[route as usize].add(1);
        let at = (attempt.max(1) as usize).min(ATTEMPT_COUNT) - 1;
        stats.retries_by_attempt[at].add(1);
    }

    fn count_pd(&mut self, event: PdEvent) {
        let stats = &self.core.stats().pd;
        let counter = match event {
            PdEvent::Request(route) => &stats.requests[route as usize],
            PdEvent::RequestTooLong => &stats.requests_too_long,
            PdEvent::AnswerTooLong => &stats.answers_too_long,
            PdEvent::Whole(why) => &stats.whole[why as usize],
            PdEvent::Skipped => &stats.skipped_prefill,
            PdEvent::MissingTransfer => &stats.missing_transfer,
            PdEvent::Handover => &stats.handovers,
            PdEvent::Stale => &stats.stale_handovers,
            PdEvent::Orphan => &stats.orphans,
            PdEvent::Released => &stats.orphans_released,
            PdEvent::Lost => &stats.orphans_lost,
            PdEvent::UsageFixed => &stats.usage_fixed,
        };
        counter.add(1);
    }

    fn record_handover(&mut self, gap_ns: u64, pending_ns: u64) {
        let stats = &self.core.stats().pd;
        stats.handover_gap.record(gap_ns);
        stats.decode_pending.record(pending_ns);
    }

    fn count_malformed(&mut self) {
        self.core.stats().malformed.add(1);
    }

    fn record_added(&mut self, ns: u64) {
        self.core.stats().added.record(ns);
    }

    fn record_piece(&mut self, slot: Slot, gap_ns: Option<u64>) {
        self.core.pace.count();
        let stats = self.core.stats();
        if let Some(gap_ns) = gap_ns {
            stats.gap.record(gap_ns);
        }
        stats.workers[usize::from(slot.0)].pieces.add(1);
    }

    fn record_answer(&mut self, slot: Slot, wait_ns: u64, is_trial: bool) {
        let worker = &self.core.stats().workers[usize::from(slot.0)];
        worker.answers.record(wait_ns, is_trial);
    }

    fn learn_wait(&mut self, slot: Slot, ahead: Ahead, wait_ns: u64) {
        let sample = route::Sample {
            bytes: ahead.bytes,
            requests: ahead.requests,
            streams: ahead.streams,
            own_bytes: ahead.own_bytes,
            seconds: wait_ns as f64 / 1e9,
        };
        self.core.policies[ahead.role as usize]
            .waits
            .observe(slot, sample);
    }

    fn is_logged(&self) -> bool {
        self.core.shared.access_log.is_some()
    }

    fn log(&mut self, entry: Entry<'_>, worker: Option<Slot>, prefill_worker: Option<Slot>) {
        let fleet = self.turn.fleet;
        let url = |slot: Option<Slot>| Some(&*fleet.worker(slot?)?.url);
        // Asked here, so that connections without a log cost no system call more.
        let client = self
            .wire()
            .and_then(|wire| wire.fd.as_ref())
            .and_then(|fd| socket2::SockRef::from(fd).peer_addr().ok())
            .and_then(|address| address.as_socket());
        let entry = Entry {
            client,
            worker: url(worker),
            prefill_worker: url(prefill_worker),
            ..entry
        };
        if let Some(log) = &self.core.shared.access_log {
            log.add(&entry);
        }
    }

    fn record(&mut self, record: Record) {
        self.write_end(&record);
        let stats = self.core.stats();
        stats.exchanges[record.route as usize][record.outcome as usize].add(1);
        if record.is_exhausted {
            stats.exhausted[record.route as usize].add(1);
        }
        if record.first_byte_ns > 0 {
            stats.first_byte.record(record.first_byte_ns);
            if record.is_in_legs {
                stats.pd.first_byte[record.route as usize].record(record.first_byte_ns);
            }
        }
        if matches!(
            record.outcome,
            Outcome::Ok | Outcome::ClientError | Outcome::WorkerError
        ) {
            stats.duration.record(record.duration_ns);
            if record.route == Route::Embeddings {
                stats.embeddings.record(record.duration_ns);
            }
        }
    }
}

/// The choice for a session that has a worker: that one. For decode only while it has less than its even share.
fn kept(
    chosen: Decision,
    bound: Slot,
    role: Role,
    candidates: &Candidates,
    loads: &Books,
    tokens: Option<Tokens<'_>>,
) -> Decision {
    let seen = Loads::load(loads, bound);
    if role == Role::Decode && !route::has_even_share(candidates, loads, bound) {
        if chosen.slot == bound {
            return chosen;
        }
        let wanted = route::Wanted {
            slot: bound,
            load: seen,
            matched_blocks: 0,
        };
        return Decision {
            reason: Reason::HomeShed,
            given_up: Some(wanted),
            ..chosen
        };
    }
    Decision {
        slot: bound,
        seen,
        reason: Reason::Home,
        matched_blocks: 0,
        new_tokens: tokens.map(|t| t.count.saturating_sub(t.credit(bound))),
        given_up: None,
        least_load: None,
    }
}

/// Whether a worker may get a request for a model. One that does not say what it serves may serve any.
fn serves(worker: &Worker, model: Option<&str>) -> bool {
    let has = |model: &str| worker.models.iter().any(|served| **served == *model);
    worker.models.is_empty() || model.is_none_or(has)
}

/// Who may get a request for a model.
fn candidates<'f>(
    fleet: &'f Fleet,
    role: Role,
    model: Option<&str>,
) -> Result<&'f Candidates, NoSeat> {
    let pool = fleet.pool(role);
    let candidates = match model.map(|model| pool.by_model.get(model)) {
        None => &pool.any,
        Some(Some(candidates)) => candidates,
        // A worker that does not say what it serves may serve this.
        Some(None) if !pool.of_unknown_models.is_empty() => &pool.of_unknown_models,
        Some(None) if fleet.known_models.is_empty() => &pool.any,
        Some(None) => return Err(NoSeat::UnknownModel),
    };
    if candidates.is_empty() {
        return Err(NoSeat::NoneEligible);
    }
    Ok(candidates)
}

/// How long a turn may sleep.
pub fn sleep_until(next_ns: Option<u64>, now_ns: u64) -> Duration {
    const LONGEST: Duration = Duration::from_secs(1);
    match next_ns {
        Some(at) => Duration::from_nanos(at.saturating_sub(now_ns)).min(LONGEST),
        None => LONGEST,
    }
}
