//! A request in two legs: a prefill worker computes the prompt's KV blocks and answers with transfer parameters, then a
//! decode worker fetches the blocks and answers the client (vLLM's sequential P/D protocol).
//! Workers that write their blocks get both legs at once: see [`super::twin`].
//!
//! ```text
//!   choose both ---> prefill leg ----> hand-over ----> decode leg ---> relay
//!        ^              |  another prefill |  \            |  another decode worker, same parameters, while nobody got
//!        |              +<-- failed -------+   \           |  them, they are fresh and their holder still lives
//!        +--------------------------------------\----------+  else all anew
//!                                                \ client gone before decode got them: released (`release`)
//! ```
//!
//! Invariants:
//! - **P1** Transfer parameters go to at most one decode worker, once: `is_used` is set before they are sent. A kept-alive
//!   connection that dies under them is no exception: whether they were read cannot be known, and to fetch blocks that
//!   are freed is to answer from another request's.
//! - **P2** An exchange that ends with parameters nobody got gives them to a [`super::release`], or counts them lost.
//! - **P3** The decode seat is taken together with the prefill seat, so that no two requests see the same free one.
//! - **P4** The client's own `kv_transfer_params` reach no worker.

use shards::{LoadGuard, Slot, WorkerId};

use super::twin::{self, Twin};
use super::{
    AnswerKind, Exchange, Leg, PdEvent, Seat, Session, State, World, choose, end_leg, explain,
    keeps_client, limit,
};
use crate::config::{Connector, PdConfig};
use crate::http::body::Framing;
use crate::http::response::{self, Relay};
use crate::http::{Refusal, reply};
use crate::route::{self, LegPlan, Role, UsageFilter, UsageFix};
use crate::shared::{KvFacts, Route};

/// Largest answer of a prefill worker: one token, and parameters that name every block of the prompt.
pub(super) const PREFILL_ANSWER_BYTES_MAX: usize = 64 << 20;
/// Answers up to this size are held until their usage is put right; larger ones pass as they are.
const HELD_ANSWER_BYTES_MAX: u64 = 8 << 20;
/// How much of a client's request id goes into the id that workers see.
const CLIENT_ID_BYTES_MAX: usize = 64;

/// Which leg runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The prompt is computed.
    Prefill,
    /// The answer is generated; also of requests that go whole to a decode worker.
    Decode,
    /// The blocks of an orphaned hand-over are fetched, to be freed.
    Release,
}

/// What an exchange in two legs knows besides.
pub(super) struct Pd {
    plan: LegPlan,
    pub(super) stage: Stage,
    /// The decode seat, while prefill runs.
    pub(super) reserved: Option<Seat>,
    /// When it was taken, ns.
    pub(super) reserved_ns: u64,
    /// Workers of the other role that have failed this request.
    pub(super) other_tried: Vec<Slot>,
    /// Who holds the blocks, in which life.
    pub(super) holder: Option<WorkerId>,
    /// For the decode worker.
    pub(super) params: Option<Vec<u8>>,
    /// A worker has been sent them, or may have been.
    pub(super) is_used: bool,
    pub(super) prefilled_ns: u64,
    /// What workers know the request by: unique, whatever clients send.
    request_id: Vec<u8>,
    pub(super) transfer_id: [u8; 32],
    /// The answer's body is being collected, not relayed.
    pub(super) is_collecting: bool,
    collected: Vec<u8>,
    /// Head of a held answer.
    head: Vec<u8>,
    pub(super) usage: Option<UsageFix>,
    pub(super) filter: Option<UsageFilter>,
    /// The prefill leg, while it runs beside this one.
    pub(super) twin: Option<Twin>,
}

impl Pd {
    /// When the running leg could begin, if it is not the first one.
    pub(super) fn since_ns(&self) -> Option<u64> {
        (self.prefilled_ns > 0).then_some(self.prefilled_ns)
    }

    /// What a new attempt starts with.
    pub(super) fn begin_attempt(&mut self) {
        self.is_collecting = false;
        self.collected.clear();
        self.filter = None;
    }

    /// Nobody can have got the parameters. A send that has not been reported yet may have arrived all the same.
    fn is_unused(&self) -> bool {
        self.params.is_some() && !self.is_used
    }
}

/// Whether an exchange that ends leaves blocks behind that nobody will fetch (P2).
pub(super) fn is_orphan(exchange: &Exchange) -> bool {
    let pd = exchange.pd.as_ref();
    pd.is_some_and(|pd| pd.stage == Stage::Decode && pd.is_unused())
}

/// Whether a leg of a request in two has run: blocks may lie somewhere, so it does not wait (Q2).
pub(super) fn has_begun(exchange: &Exchange) -> bool {
    exchange.pd.as_ref().is_some_and(|pd| {
        let is_tried = !exchange.tried.is_empty() || !pd.other_tried.is_empty();
        is_tried || pd.params.is_some() || pd.twin.is_some()
    })
}

/// Who gets requests that are not in two legs.
pub(super) fn role_of(route: Route) -> Role {
    match route {
        // What is computed of the prompt alone.
        Route::Embeddings | Route::Rerank | Route::Tokenize | Route::Pooling | Route::Score => {
            Role::Prefill
        }
        _ => Role::Decode,
    }
}

impl Session {
    /// The request is here whole, and P/D is on.
    pub(super) fn dispatch_in_legs<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        if !exchange.route.generates() {
            return self.seat(world);
        }
        let body = &exchange.message[exchange.body_at..];
        let Ok(plan) = route::plan(exchange.route, body) else {
            // It has passed the scan, which refuses more.
            return self.seat(world);
        };
        world.count_pd(PdEvent::Request(exchange.route));
        let mut stage = Stage::Prefill;
        if let Some(why) = plan.whole() {
            world.count_pd(PdEvent::Whole(why));
            stage = Stage::Decode;
        } else if exchange.route == Route::Messages {
            // vLLM's form of this endpoint has no transfer parameters.
            stage = Stage::Decode;
        }
        let (transfer_id, request_id) = make_ids(world, &exchange.request_id);
        exchange.pd = Some(Box::new(Pd {
            plan,
            stage,
            reserved: None,
            reserved_ns: 0,
            other_tried: Vec::new(),
            holder: None,
            params: None,
            is_used: false,
            prefilled_ns: 0,
            request_id,
            transfer_id,
            is_collecting: false,
            collected: Vec::new(),
            head: Vec::new(),
            usage: None,
            filter: None,
            twin: None,
        }));
        self.seat(world);
    }

    /// A final head has come. `true`: its body is not for the client, or not yet; what came of it has been taken.
    pub(super) fn take_over<W: World>(
        &mut self,
        world: &mut W,
        kind: AnswerKind,
        head: &[u8],
        rest: &[u8],
    ) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let status = exchange.status;
        let Some(pd) = exchange.pd.as_mut() else {
            return false;
        };
        if pd.stage == Stage::Prefill {
            return self.take_prefill_answer(world, status, rest);
        }
        let Some(fix) = pd
            .usage
            .clone()
            .filter(|_| status == 200 && !kind.is_encoded)
        else {
            return false;
        };
        if kind.is_event_stream {
            // One of a known length stays as it is.
            if exchange.relay != Relay::AsIs || kind.framing == Framing::Chunked {
                pd.filter = Some(UsageFilter::new(fix));
                if exchange.relay == Relay::AsIs {
                    exchange.relay = Relay::Chunks;
                }
            }
            return false;
        }
        match kind.framing {
            Framing::Length(n) if n <= HELD_ANSWER_BYTES_MAX => {
                pd.head.clear();
                pd.head.extend_from_slice(head);
                pd.is_collecting = true;
                self.collect(world, rest);
                true
            }
            _ => false,
        }
    }

    fn take_prefill_answer<W: World>(&mut self, world: &mut W, status: u16, rest: &[u8]) -> bool {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return false;
        };
        let Some(pd) = exchange.pd.as_mut() else {
            return false;
        };
        match status {
            200..300 => {
                pd.is_collecting = true;
                self.collect(world, rest);
                true
            }
            500 | 501 | 505.. => {
                let refusal = Refusal::new(502, "prefill_failed", "the prefill worker failed");
                self.fail(world, &refusal);
                true
            }
            // The client's own doing; or busy, or a gateway's words, which it may make sense of. Decode never starts.
            _ => {
                pd.reserved = None;
                false
            }
        }
    }

    /// More of a body that is not relayed.
    pub(super) fn collect<W: World>(&mut self, world: &mut W, bytes: &[u8]) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.last_piece_ns = world.now_ns();
        let Exchange { outgoing, pd, .. } = exchange;
        let Some(pd) = pd else { return };
        let collected = &mut pd.collected;
        match outgoing.feed(bytes, |data| collected.extend_from_slice(data)) {
            Ok(progress) if progress.done => {
                exchange.worker_keeps &= progress.consumed == bytes.len();
                self.collected(world);
            }
            Ok(_) if collected.len() <= PREFILL_ANSWER_BYTES_MAX => {
                let at = limit(exchange, world);
                world.deadline(at);
            }
            Ok(_) => {
                world.count_pd(PdEvent::AnswerTooLong);
                self.leg_broke(world)
            }
            Err(_) => self.leg_broke(world),
        }
    }

    /// The body is here.
    pub(super) fn collected<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        if exchange.message_is_out {
            // It answered before it had the request: neither connection nor answer is to be trusted.
            exchange.broken = true;
            return world.break_leg();
        }
        match exchange.pd.as_ref().map(|pd| pd.stage) {
            Some(Stage::Prefill) => self.hand_over_blocks(world),
            Some(_) => self.send_held(world),
            None => {}
        }
    }

    pub(super) fn leg_broke<W: World>(&mut self, world: &mut W) {
        if let Some(exchange) = &self.exchange {
            super::sign(exchange, world, super::Sign::Failed);
            end_leg(exchange, world, false);
        }
        self.leg_lost(world);
    }

    /// Prefill is done: decode begins.
    fn hand_over_blocks<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        super::learn_wait(exchange, world);
        let Exchange {
            pd,
            slot,
            seat,
            is_trial,
            ..
        } = exchange;
        let Some(pd) = pd else { return };
        let Ok(answer) = route::read_prefill_answer(&pd.collected) else {
            return self.leg_broke(world);
        };
        pd.usage = UsageFix::new(&pd.collected, &answer);
        let given = answer
            .kv_transfer_params
            .map(|field| field.raw(&pd.collected));
        let params = decode_params(world, pd, *slot, given);
        let allows_missing = world
            .config()
            .pd
            .as_ref()
            .is_some_and(|config| config.allows_missing_transfer);
        if params.is_none() {
            world.count_pd(PdEvent::MissingTransfer);
            // Decode will count its own.
            pd.usage = None;
        } else {
            world.count_pd(PdEvent::Handover);
        }
        if params.is_none() && !allows_missing {
            let refusal = Refusal::new(
                502,
                "missing_kv_transfer_params",
                "the prefill worker answered without KV transfer parameters",
            );
            return self.fail(world, &refusal);
        }
        world.judge(*slot, super::Sign::Ended, *is_trial);
        world.judge(*slot, super::Sign::Good, *is_trial);
        pd.params = params;
        pd.is_used = false;
        // In the life that was chosen; by now it may be out of the fleet.
        pd.holder = seat.as_ref().map(LoadGuard::worker);
        pd.stage = Stage::Decode;
        pd.prefilled_ns = world.now_ns();
        end_leg(exchange, world, exchange.worker_keeps);
        exchange.leg = Leg::None;
        self.begin_decode(world);
    }

    fn begin_decode<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        exchange.role = Role::Decode;
        let Exchange { pd, tried, .. } = exchange;
        let Some(pd) = pd else { return };
        std::mem::swap(tried, &mut pd.other_tried);
        match pd.reserved.take() {
            Some(seat) => {
                // The prefill worker's count is given back by being replaced.
                super::sit(exchange, seat);
                let slot = exchange.slot;
                // Another kept-alive connection that has died would cost another prefill.
                let fresh = exchange.retries > 0;
                self.dial(world, slot, fresh);
            }
            None => self.seat(world),
        }
    }

    /// A held answer goes out, with the prefill worker's token counts.
    fn send_held<W: World>(&mut self, world: &mut W) {
        let Some(exchange) = self.exchange.as_deref_mut() else {
            return;
        };
        let keep_alive = keeps_client(exchange, world);
        let explanation = explain::field(exchange, world);
        let Some(pd) = exchange.pd.as_mut() else {
            return;
        };
        let mut fixed = world.buffer();
        let body = match &pd.usage {
            Some(fix) if route::fix_usage(&pd.collected, fix, &mut fixed) => {
                world.count_pd(PdEvent::UsageFixed);
                &fixed
            }
            _ => &pd.collected,
        };
        let mut out = world.buffer();
        let client = response::Client {
            is_http10: exchange.request.is_http10,
            is_head: false,
            keep_alive,
            request_id: &exchange.request_id,
            hides_workers_id: true,
            length: Some(body.len() as u64),
            cors: &exchange.cors,
        };
        // It parsed when it came.
        let parsed = response::parse(&pd.head, client, &mut out);
        debug_assert!(matches!(parsed, Ok(Some(_))), "a head parses twice alike");
        explain::insert(&explanation, &mut out);
        out.extend_from_slice(body);
        let body_bytes = body.len() as u64;
        world.recycle(fixed);
        pd.is_collecting = false;
        exchange.counted.bytes = body_bytes;
        exchange.state = State::Relaying;
        exchange.keep_alive = keep_alive;
        super::begun(exchange, world);
        world.send(out);
        self.complete(world);
    }
}

/// Takes the seats of the stage: both at once when all begins (P3).
pub(super) fn choose_seats<W: World>(
    exchange: &mut Exchange,
    world: &mut W,
) -> Result<Slot, super::NoSeat> {
    let Some(pd) = exchange.pd.as_mut() else {
        return choose(exchange, world);
    };
    if pd.stage != Stage::Prefill {
        exchange.role = Role::Decode;
        return choose(exchange, world);
    }
    let mut is_same_prompt = false;
    if pd.reserved.is_none() {
        exchange.role = Role::Decode;
        std::mem::swap(&mut exchange.tried, &mut pd.other_tried);
        let reserved = super::take_seat(exchange, world, false);
        let Some(pd) = exchange.pd.as_mut() else {
            return Err(super::NoSeat::NoneEligible);
        };
        let seat = match reserved {
            Ok(seat) => seat,
            Err(why) => {
                std::mem::swap(&mut exchange.tried, &mut pd.other_tried);
                return Err(why);
            }
        };
        let config = world.config().pd.as_ref();
        let below = config.map_or(0, |config| config.skip_prefill_below_bytes);
        if seat.missing_bytes.is_some_and(|missing| missing < below) {
            world.count_pd(PdEvent::Skipped);
            pd.stage = Stage::Decode;
            super::sit(exchange, seat);
            return Ok(exchange.slot);
        }
        std::mem::swap(&mut exchange.tried, &mut pd.other_tried);
        pd.reserved = Some(seat);
        pd.reserved_ns = world.now_ns();
        is_same_prompt = true;
    }
    exchange.role = Role::Prefill;
    let seat = super::take_seat(exchange, world, is_same_prompt)?;
    super::sit(exchange, seat);
    Ok(exchange.slot)
}

/// Another worker of the stage's role; or, where the parameters cannot serve another one, all anew.
pub(super) fn choose_again<W: World>(
    exchange: &mut Exchange,
    world: &mut W,
) -> Result<Slot, super::NoSeat> {
    let Some(pd) = exchange.pd.as_mut() else {
        return choose(exchange, world);
    };
    if pd.stage != Stage::Decode || pd.params.is_none() {
        return choose_seats(exchange, world);
    }
    let is_unused = pd.is_unused();
    if is_unused && is_fresh(pd, world) {
        return choose_seats(exchange, world);
    }
    if is_unused {
        world.count_pd(PdEvent::Stale);
        world.count_pd(PdEvent::Orphan);
        world.count_pd(PdEvent::Lost);
    }
    let prefilled_ns = pd.prefilled_ns;
    begin_anew(exchange);
    let chosen = choose_seats(exchange, world);
    let Some(pd) = exchange.pd.as_mut() else {
        return chosen;
    };
    if chosen.is_ok() {
        // Only now, as an answer that is still to be relayed goes by the old ones.
        renew_ids(exchange, world);
    } else if pd.stage == Stage::Prefill {
        // Nobody: what the decode worker says is the answer, and it is still that worker's seat.
        pd.stage = Stage::Decode;
        pd.prefilled_ns = prefilled_ns;
        pd.reserved = None;
        exchange.role = Role::Decode;
        std::mem::swap(&mut exchange.tried, &mut pd.other_tried);
    }
    chosen
}

/// Back to the prefill leg: what was handed over serves nobody any more.
pub(super) fn begin_anew(exchange: &mut Exchange) {
    let Exchange { pd, tried, .. } = exchange;
    if let Some(pd) = pd {
        pd.params = None;
        pd.usage = None;
        pd.twin = None;
        pd.stage = Stage::Prefill;
        pd.prefilled_ns = 0;
        std::mem::swap(tried, &mut pd.other_tried);
    }
}

/// The first round's prefill worker still knows its request, and blocks, by the old ones.
pub(super) fn renew_ids<W: World>(exchange: &mut Exchange, world: &mut W) {
    if let Some(pd) = exchange.pd.as_mut() {
        (pd.transfer_id, pd.request_id) = make_ids(world, &exchange.request_id);
    }
}

/// Whether the worker of the running leg may have read transfer parameters.
pub(super) fn has_given_params(exchange: &Exchange) -> bool {
    let pd = exchange.pd.as_ref();
    pd.is_some_and(|pd| pd.stage == Stage::Decode && pd.params.is_some() && pd.is_used)
}

/// Whether the blocks can still be there, and will be for a while.
fn is_fresh<W: World>(pd: &Pd, world: &W) -> bool {
    let is_here = |holder: WorkerId| world.worker(holder.slot).is_some();
    pd.holder.is_some_and(is_here) && !is_outdated(pd, world)
}

/// Whether the blocks are gone for certain: too old, or of an earlier life of their holder. A holder that is out of the
/// fleet may be draining, and keeps them until then.
fn is_outdated<W: World>(pd: &Pd, world: &W) -> bool {
    let config = world.config().pd.as_ref();
    let age_max = config.map_or(0, |config| config.handover_age_max.as_nanos() as u64);
    let has_restarted = pd.holder.is_some_and(|holder| {
        let worker = world.worker(holder.slot);
        worker.is_some_and(|worker| worker.id != holder)
    });
    has_restarted || world.now_ns().saturating_sub(pd.prefilled_ns) > age_max
}

/// Makes the message of the running leg: eight bytes that say where it begins, then the request. `None`: the worker has
/// gone from the fleet, or the parameters have become too old while its connection was made.
pub(super) fn write_message<W: World>(exchange: &mut Exchange, world: &mut W) -> Option<Vec<u8>> {
    let mut out = world.buffer();
    let Some(worker) = world.worker(exchange.slot) else {
        world.recycle(out);
        return None;
    };
    let pd = exchange.pd.as_mut()?;
    if pd.stage == Stage::Decode
        && pd.params.is_some()
        && pd.twin.is_none()
        && is_outdated(pd, world)
    {
        world.recycle(out);
        return None;
    }
    let body = &exchange.message[exchange.body_at..];
    let prefill_params;
    let params = match pd.stage {
        Stage::Prefill => {
            let reserved = pd.reserved.as_ref().map(|seat| seat.id.slot);
            let peer = reserved.and_then(|slot| world.worker(slot));
            let peer_facts = peer.map(|worker| &*worker.kv);
            let config = world.config().pd.as_ref();
            prefill_params = if twin::is_write(world, exchange.slot) {
                twin::params(world, Stage::Prefill, &pd.transfer_id, reserved)
            } else {
                params_for_prefill(config, &pd.transfer_id, peer_facts)
            };
            Some(&prefill_params[..])
        }
        Stage::Decode | Stage::Release => pd.params.as_deref(),
    };
    let body_bytes = match pd.stage {
        Stage::Decode => pd.plan.decode_bytes(params.map(<[u8]>::len)),
        _ => pd.plan.prefill_bytes(params.map_or(0, <[u8]>::len)),
    };
    let fields = &exchange.message[exchange.fields_at..exchange.body_at];
    out.reserve(
        8 + super::START_BYTES_MAX + exchange.request.target.len() + fields.len() + body_bytes,
    );
    out.extend_from_slice(&8u64.to_le_bytes());
    super::write_line_and_host(&exchange.request, worker, &mut out);
    out.extend_from_slice(b"content-length: ");
    reply::push_number(&mut out, body_bytes as u64);
    out.extend_from_slice(b"\r\nx-request-id: ");
    push_request_id(pd, exchange.slot, world, &mut out);
    out.extend_from_slice(b"\r\n");
    copy_fields_without(fields, b"x-request-id", &mut out);
    let body_at = out.len();
    match (pd.stage, params) {
        (Stage::Decode, params) => route::write_decode(body, &pd.plan, params, &mut out),
        (Stage::Prefill, params) => {
            route::write_prefill(body, &pd.plan, params.unwrap_or(b"null"), &mut out);
        }
        (Stage::Release, params) => {
            route::write_release(body, &pd.plan, params.unwrap_or(b"null"), &mut out);
        }
    }
    debug_assert_eq!(
        out.len() - body_at,
        body_bytes,
        "the length said is the body's"
    );
    if pd.stage != Stage::Prefill {
        // P1: from here on it counts as sent.
        pd.is_used = true;
    }
    Some(out)
}

/// The leg's message is on its way.
pub(super) fn dispatched<W: World>(pd: &Pd, seat: Option<&LoadGuard>, world: &mut W) {
    // Decode is pending until now. A prefill leg waits for its one answer, to its end.
    if let Some(seat) = seat.filter(|_| pd.stage == Stage::Decode) {
        seat.activate();
    }
    if pd.stage == Stage::Decode && pd.prefilled_ns > 0 {
        let now_ns = world.clock_ns();
        let since = |then_ns: u64| now_ns.saturating_sub(then_ns);
        world.record_handover(since(pd.prefilled_ns), since(pd.reserved_ns));
    }
}

/// What the workers know the request by: the client's id first, so that it is found, and something unique.
fn make_ids<W: World>(world: &mut W, client_id: &[u8]) -> ([u8; 32], Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut unique = [0; 32];
    for half in unique.chunks_mut(16) {
        let mut number = world.random();
        for digit in half {
            *digit = DIGITS[(number & 15) as usize];
            number >>= 4;
        }
    }
    let mut id = Vec::with_capacity(client_id.len().min(CLIENT_ID_BYTES_MAX) + 33);
    // A colon and digits at its end would read as the peer's port (P2P-NCCL).
    id.extend(
        client_id
            .iter()
            .take(CLIENT_ID_BYTES_MAX)
            .map(|byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' => *byte,
                _ => b'-',
            }),
    );
    id.push(b'-');
    id.extend_from_slice(&unique);
    (unique, id)
}

/// With engines that registered by ZMQ the id names both peers (P2P-NCCL finds its own there); it would tell clients
/// the workers' addresses otherwise, as vLLM makes the answer's `id` of it.
fn push_request_id<W: World>(pd: &Pd, slot: Slot, world: &W, out: &mut Vec<u8>) {
    let config = world.config().pd.as_ref();
    let is_registered = config.is_some_and(|config| config.discovery_address.is_some());
    let (prefill, decode) = match pd.stage {
        Stage::Prefill => (Some(slot), pd.reserved.as_ref().map(|seat| seat.id.slot)),
        _ => (pd.holder.map(|holder| holder.slot), Some(slot)),
    };
    let address = |slot: Option<Slot>| {
        let worker = slot.and_then(|slot| world.worker(slot));
        worker.map(|worker| worker.kv.peer_address.clone())
    };
    if is_registered && let (Some(prefill), Some(decode)) = (address(prefill), address(decode)) {
        out.extend_from_slice(b"___prefill_addr_");
        out.extend_from_slice(prefill.as_bytes());
        out.extend_from_slice(b"___decode_addr_");
        out.extend_from_slice(decode.as_bytes());
        out.push(b'_');
    }
    out.extend_from_slice(&pd.request_id);
}

/// `kv_transfer_params` for a prefill worker (vllm-router 0.1.17; each connector's own documents).
fn params_for_prefill(
    config: Option<&PdConfig>,
    transfer_id: &[u8; 32],
    decode: Option<&KvFacts>,
) -> Vec<u8> {
    let id = String::from_utf8_lossy(transfer_id);
    let text = match config.map_or(Connector::Nixl, |config| config.connector) {
        Connector::Nixl => {
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#.to_string()
        }
        Connector::Mooncake => format!(
            r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"{}"}}"#,
            mooncake_transfer_id(&id)
        ),
        Connector::MoriIo => {
            let dp_size = decode.map_or(1, |facts| facts.dp_size);
            let start = twin::params_start(Stage::Prefill, transfer_id);
            format!("{start},\"remote_dp_size\":{dp_size}}}")
        }
    };
    text.into_bytes()
}

/// `xfer-` and a UUID.
fn mooncake_transfer_id(hex: &str) -> String {
    let (a, b, c, d, e) = (
        &hex[..8],
        &hex[8..12],
        &hex[13..16],
        &hex[17..20],
        &hex[20..],
    );
    format!("xfer-{a}-{b}-4{c}-a{d}-{e}")
}

/// `kv_transfer_params` for the decode worker; `given` is what the prefill worker answered.
fn decode_params<W: World>(
    world: &W,
    pd: &Pd,
    prefill: Slot,
    given: Option<&[u8]>,
) -> Option<Vec<u8>> {
    let facts = world.worker(prefill).map(|worker| &*worker.kv);
    let connector = world.config().pd.as_ref().map(|config| config.connector);
    match connector.unwrap_or(Connector::Nixl) {
        Connector::Nixl => {
            let given = given?;
            if memchr::memmem::find(given, b"transfer_mode").is_some() {
                return push_params(given, &pd.request_id).or_else(|| Some(given.to_vec()));
            }
            Some(given.to_vec())
        }
        Connector::Mooncake => {
            let facts = facts?;
            let id = String::from_utf8_lossy(&pd.transfer_id);
            let params = serde_json::json!({
                "do_remote_decode": false,
                "do_remote_prefill": true,
                "transfer_id": mooncake_transfer_id(&id),
                "remote_bootstrap_addr": facts.bootstrap_address.as_deref()?,
                "remote_engine_id": facts.engine_id.as_deref()?,
            });
            Some(params.to_string().into_bytes())
        }
        Connector::MoriIo => {
            let given = given?;
            let open = given.strip_suffix(b"}")?.trim_ascii_end();
            let mut params = open.to_vec();
            if !open.ends_with(b"{") {
                params.push(b',');
            }
            let dp_size = facts.map_or(1, |facts| facts.dp_size);
            params.extend_from_slice(format!("\"remote_dp_size\":{dp_size}}}").as_bytes());
            Some(params)
        }
    }
}

/// NIXL push: the prefill worker sends its blocks when decode has told it where to; `None`: it is no push.
fn push_params(given: &[u8], request_id: &[u8]) -> Option<Vec<u8>> {
    let given: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(given).ok()?;
    if given.get("transfer_mode")? != "push" {
        return None;
    }
    let of = |name: &str| given.get(name).cloned().unwrap_or_default();
    let params = serde_json::json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_engine_id": of("remote_engine_id"),
        "remote_host": of("remote_host"),
        "remote_port": of("remote_port"),
        "tp_size": given.get("tp_size").cloned().unwrap_or_else(|| 1.into()),
        "remote_request_id": String::from_utf8_lossy(request_id),
    });
    Some(params.to_string().into_bytes())
}

/// Lines of a head, less the fields of one name.
fn copy_fields_without(fields: &[u8], name: &[u8], out: &mut Vec<u8>) {
    let mut rest = fields;
    while let Some(end) = memchr::memchr(b'\n', rest) {
        let (line, after) = rest.split_at(end + 1);
        let is_it =
            line.get(name.len()) == Some(&b':') && line[..name.len()].eq_ignore_ascii_case(name);
        if !is_it {
            out.extend_from_slice(line);
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_one_name_are_left_out_wherever_they_stand() {
        let fields =
            b"X-Request-ID: a\r\nx-request-idx: b\r\nA: x-request-id: c\r\nx-request-id: d\r\n\r\n";
        let mut out = Vec::new();
        copy_fields_without(fields, b"x-request-id", &mut out);
        assert_eq!(out, b"x-request-idx: b\r\nA: x-request-id: c\r\n\r\n");
    }

    #[test]
    fn push_parameters_name_the_request_and_pull_ones_are_left_alone() {
        let push = br#"{"transfer_mode":"push","remote_engine_id":"e","remote_host":"h","remote_port":7,"x":1}"#;
        let params: serde_json::Value =
            serde_json::from_slice(&push_params(push, b"id-1").unwrap()).unwrap();
        assert_eq!(
            params,
            serde_json::json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e",
                "remote_host": "h", "remote_port": 7, "tp_size": 1, "remote_request_id": "id-1"})
        );
        assert_eq!(push_params(br#"{"transfer_mode":"pull"}"#, b"id"), None);
        assert_eq!(
            push_params(br#"{"remote_host":"transfer_mode"}"#, b"id"),
            None
        );
    }

    #[test]
    fn a_mooncake_transfer_id_is_a_uuid() {
        let id = mooncake_transfer_id("0123456789abcdef0123456789abcdef");
        assert_eq!(id, "xfer-01234567-89ab-4def-a123-456789abcdef");
    }
}
