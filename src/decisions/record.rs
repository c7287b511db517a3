//! The records, and how they stand in the file. Pure.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | kind: 1 header, 2 worker, 3 decision, 4 end |
//! | 1 | 0x0c |
//! | 2 | length of the content |
//! | 4 | the run: a random number of the process that wrote it |
//! | 4 | lower half of XXH3-64 of the content, seeded with kind and run |
//! | | the content; all numbers little-endian |
//!
//! Each process, and each time the file is opened anew, begins with a header and the workers known so far; so a file may
//! hold several runs, one after the other or, while one router takes over from another, in turn.

use shards::Slot;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::sketch::{GRID, Sketch};
use crate::route::{PolicyKind, Reason, Role};
use crate::shared::{Outcome, Route};

/// The format's number.
pub const VERSION: u16 = 1;
/// Most workers of a decision that are listed with what they hold.
pub const HELD_COUNT_MAX: usize = 8;
/// In place of a [`Reason`]'s number: a worker that is out was tried with this request.
pub const TRIAL: u8 = 255;
/// Longest content of a record.
pub const RECORD_BYTES_MAX: usize = 1024;
/// Longest URL of a worker's record.
const URL_BYTES_MAX: usize = 768;

pub(super) const MAGIC: &[u8; 16] = b"corelane decided";
/// In front of each content.
pub(super) const FRAME_BYTES: usize = 12;
const MARK: u8 = 0x0c;
const NO_SLOT: u16 = u16::MAX;
const NOT_KNOWN: u32 = u32::MAX;

/// What a run begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Names the run.
    pub run: u32,
    /// When, in us since 1970.
    pub at_us: u64,
    /// Cores of the router.
    pub core_count: u16,
}

/// Who stands in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRow {
    /// In which run.
    pub run: u32,
    /// Where.
    pub slot: Slot,
    /// Which life of that slot.
    pub incarnation: u32,
    /// What it does.
    pub role: Role,
    /// As the operator wrote it.
    pub url: std::sync::Arc<str>,
}

/// A worker, and what it holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Who.
    pub slot: u16,
    /// Its load; 65,535 stands for that and more.
    pub load: u16,
    /// Bytes of the prompt from its start.
    pub bytes: u32,
}

/// The worker that was wanted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenUp {
    /// Who.
    pub slot: Slot,
    /// Its load.
    pub load: u32,
    /// Bytes of the prompt it holds.
    pub matched_bytes: u32,
}

/// One choice of a worker for one attempt of one leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Core (the upper 16 bits) and number of the exchange there.
    pub exchange: u64,
    /// When, in us since 1970, by the core's own steady clock.
    pub at_us: u64,
    /// [`super::request_hash`] of its id.
    pub request: u64,
    /// Hash of its session; 0: none, or the policy does not look for it.
    pub session: u64,
    /// Hash of the model asked for; 0: none, or not looked for.
    pub model: u64,
    /// Bytes of its prompt; of its body where the prompt was not looked at.
    pub prompt_bytes: u64,
    /// Of these, bytes that the chosen worker holds, as far as is known.
    pub matched_bytes: u32,
    /// Who was chosen, in which life.
    pub slot: Slot,
    /// See above.
    pub incarnation: u32,
    /// Its load then, this request not counted.
    pub load: u32,
    /// The least load among the candidates, where it was looked at.
    pub least_load: Option<u32>,
    /// Workers that could be chosen, those that failed this request among them.
    pub candidate_count: u32,
    /// The worker that would have been it but for its load.
    pub given_up: Option<GivenUp>,
    /// Among which workers.
    pub role: Role,
    /// Endpoint family.
    pub route: Route,
    /// Which policy.
    pub policy: PolicyKind,
    /// Number of the [`Reason`], or [`TRIAL`].
    pub reason: u8,
    /// Workers of this role that had failed the request before.
    pub attempt: u8,
    /// How many of `held` are there.
    pub held_count: u8,
    /// Who holds most of the prompt, longest first. Looked for only where a request asked to be explained.
    pub held: [Held; HELD_COUNT_MAX],
}

impl Decided {
    /// Why, in the word of the metrics.
    pub fn reason_label(&self) -> &'static str {
        match Reason::ALL.get(usize::from(self.reason)) {
            Some(reason) => reason.label(),
            None => "trial",
        }
    }

    /// Those who hold most of the prompt.
    pub fn held(&self) -> &[Held] {
        &self.held[..usize::from(self.held_count)]
    }

    /// The core that decided.
    pub fn core(&self) -> u16 {
        (self.exchange >> 48) as u16
    }
}

/// What came of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// As in [`Decided`].
    pub exchange: u64,
    /// As in [`Decided`]: an exchange for which nobody was chosen has this alone.
    pub request: u64,
    /// When, in us since 1970.
    pub at_us: u64,
    /// First byte in to last byte out, us.
    pub duration_us: u64,
    /// Request complete to first byte of the answer, us; 0: none came.
    pub first_byte_us: u64,
    /// In line before its turn, us.
    pub wait_us: u64,
    /// Of the request's body.
    pub request_bytes: u64,
    /// Of the answer's body, as it went out.
    pub answer_bytes: u64,
    /// Of an event stream.
    pub event_count: u32,
    /// Of the answer; 0: none was begun.
    pub status: u16,
    /// How it ended.
    pub outcome: Outcome,
    /// Endpoint family.
    pub route: Route,
    /// Attempts after the first; 255 stands for that and more.
    pub retries: u8,
    /// The answer was an event stream.
    pub is_event_stream: bool,
}

pub(super) const KIND_HEADER: u8 = 1;
pub(super) const KIND_WORKER: u8 = 2;
pub(super) const KIND_DECIDED: u8 = 3;
pub(super) const KIND_ENDED: u8 = 4;

fn check_of(kind: u8, run: u32, content: &[u8]) -> u32 {
    xxh3_64_with_seed(content, u64::from(kind) << 32 | u64::from(run)) as u32
}

/// Puts a frame round what `write` writes.
fn push(out: &mut Vec<u8>, kind: u8, run: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_BYTES]);
    write(out);
    let content = &out[start + FRAME_BYTES..];
    debug_assert!(content.len() <= RECORD_BYTES_MAX, "a record is short");
    let (length, check) = (content.len() as u16, check_of(kind, run, content));
    let frame = &mut out[start..start + FRAME_BYTES];
    frame[0] = kind;
    frame[1] = MARK;
    frame[2..4].copy_from_slice(&length.to_le_bytes());
    frame[4..8].copy_from_slice(&run.to_le_bytes());
    frame[8..12].copy_from_slice(&check.to_le_bytes());
}

/// A record as it stands in the file.
pub(super) struct Raw<'a> {
    pub(super) kind: u8,
    pub(super) run: u32,
    pub(super) content: &'a [u8],
    /// With its frame.
    pub(super) len: usize,
}

/// The record at the start of some bytes, if it is whole and passes its check (D1).
pub(super) fn raw(bytes: &[u8]) -> Option<Raw<'_>> {
    let (frame, rest) = bytes.split_at_checked(FRAME_BYTES)?;
    let (kind, mark) = (frame[0], frame[1]);
    let mut frame = In(&frame[2..]);
    let (length, run, check) = (usize::from(frame.u16()?), frame.u32()?, frame.u32()?);
    let content = rest.get(..length)?;
    let is_good = mark == MARK && check_of(kind, run, content) == check;
    is_good.then_some(Raw {
        kind,
        run,
        content,
        len: FRAME_BYTES + length,
    })
}

/// Appends a header.
pub fn push_header(out: &mut Vec<u8>, header: &Header) {
    push(out, KIND_HEADER, header.run, |out| {
        out.extend_from_slice(MAGIC);
        put(out, &VERSION.to_le_bytes());
        put(out, &header.core_count.to_le_bytes());
        put(out, &header.at_us.to_le_bytes());
        put(out, env!("CARGO_PKG_VERSION").as_bytes());
    });
}

pub(super) fn header(run: u32, content: &[u8]) -> Option<Header> {
    let mut input = In(content.strip_prefix(MAGIC)?);
    let version = input.u16()?;
    let core_count = input.u16()?;
    let at_us = input.u64()?;
    (version == VERSION).then_some(Header {
        run,
        at_us,
        core_count,
    })
}

/// Appends a worker's record.
pub fn push_worker(out: &mut Vec<u8>, row: &WorkerRow) {
    push(out, KIND_WORKER, row.run, |out| {
        put(out, &row.slot.0.to_le_bytes());
        put(out, &row.incarnation.to_le_bytes());
        put(out, &[row.role as u8]);
        let url = row.url.as_bytes();
        put(out, &url[..url.len().min(URL_BYTES_MAX)]);
    });
}

pub(super) fn worker(run: u32, content: &[u8]) -> Option<WorkerRow> {
    let mut input = In(content);
    let slot = Slot(input.u16()?);
    let incarnation = input.u32()?;
    let role = of(&Role::ALL, input.u8()?)?;
    Some(WorkerRow {
        run,
        slot,
        incarnation,
        role,
        url: String::from_utf8_lossy(input.0).into(),
    })
}

/// Appends a decision.
pub fn push_decided(out: &mut Vec<u8>, run: u32, decided: &Decided, sketch: &Sketch) {
    push(out, KIND_DECIDED, run, |out| {
        for number in [
            decided.exchange,
            decided.at_us,
            decided.request,
            decided.session,
            decided.model,
            decided.prompt_bytes,
        ] {
            put(out, &number.to_le_bytes());
        }
        let given_up = decided.given_up;
        for number in [
            decided.matched_bytes,
            decided.incarnation,
            decided.load,
            decided.least_load.unwrap_or(NOT_KNOWN),
            decided.candidate_count,
            given_up.map_or(0, |given_up| given_up.load),
            given_up.map_or(0, |given_up| given_up.matched_bytes),
            sketch.blocks,
            sketch.last,
            sketch.matched_blocks,
            sketch.at_match,
        ] {
            put(out, &number.to_le_bytes());
        }
        put(out, &decided.slot.0.to_le_bytes());
        let wanted = given_up.map_or(NO_SLOT, |given_up| given_up.slot.0);
        put(out, &wanted.to_le_bytes());
        put(
            out,
            &[
                decided.role as u8,
                decided.route as u8,
                decided.policy as u8,
                decided.reason,
                decided.attempt,
                decided.held_count,
                sketch.grid_count,
            ],
        );
        for held in decided.held() {
            put(out, &held.slot.to_le_bytes());
            put(out, &held.load.to_le_bytes());
            put(out, &held.bytes.to_le_bytes());
        }
        for hash in &sketch.grid[..usize::from(sketch.grid_count)] {
            put(out, &hash.to_le_bytes());
        }
    });
}

pub(super) fn decided(content: &[u8]) -> Option<(Decided, Sketch)> {
    let mut input = In(content);
    let [exchange, at_us, request, session, model, prompt_bytes] = input.array(In::u64)?;
    let [
        matched_bytes,
        incarnation,
        load,
        least_load,
        candidate_count,
        given_load,
        given_bytes,
        blocks,
        last,
        matched_blocks,
        at_match,
    ] = input.array(In::u32)?;
    let (slot, wanted) = (Slot(input.u16()?), input.u16()?);
    let [role, route, policy, reason, attempt, held_count, grid_count] = input.array(In::u8)?;
    if usize::from(held_count) > HELD_COUNT_MAX || usize::from(grid_count) > GRID.len() {
        return None;
    }
    let mut held = [Held::default(); HELD_COUNT_MAX];
    for held in &mut held[..usize::from(held_count)] {
        *held = Held {
            slot: input.u16()?,
            load: input.u16()?,
            bytes: input.u32()?,
        };
    }
    let mut grid = [0; GRID.len()];
    for hash in &mut grid[..usize::from(grid_count)] {
        *hash = input.u32()?;
    }
    let given_up = (wanted != NO_SLOT).then_some(GivenUp {
        slot: Slot(wanted),
        load: given_load,
        matched_bytes: given_bytes,
    });
    let decided = Decided {
        exchange,
        at_us,
        request,
        session,
        model,
        prompt_bytes,
        matched_bytes,
        slot,
        incarnation,
        load,
        least_load: (least_load != NOT_KNOWN).then_some(least_load),
        candidate_count,
        given_up,
        role: of(&Role::ALL, role)?,
        route: of(&Route::ALL, route)?,
        policy: of(&PolicyKind::ALL, policy)?,
        reason,
        attempt,
        held_count,
        held,
    };
    let sketch = Sketch {
        blocks,
        last,
        matched_blocks,
        at_match,
        grid_count,
        grid,
    };
    Some((decided, sketch))
}

/// Appends an end.
pub fn push_ended(out: &mut Vec<u8>, run: u32, ended: &Ended) {
    push(out, KIND_ENDED, run, |out| {
        for number in [
            ended.exchange,
            ended.request,
            ended.at_us,
            ended.duration_us,
            ended.first_byte_us,
            ended.wait_us,
            ended.request_bytes,
            ended.answer_bytes,
        ] {
            put(out, &number.to_le_bytes());
        }
        put(out, &ended.event_count.to_le_bytes());
        put(out, &ended.status.to_le_bytes());
        put(
            out,
            &[
                ended.outcome as u8,
                ended.route as u8,
                ended.retries,
                u8::from(ended.is_event_stream),
            ],
        );
    });
}

pub(super) fn ended(content: &[u8]) -> Option<Ended> {
    let mut input = In(content);
    let [
        exchange,
        request,
        at_us,
        duration_us,
        first_byte_us,
        wait_us,
        request_bytes,
        answer_bytes,
    ] = input.array(In::u64)?;
    let (event_count, status) = (input.u32()?, input.u16()?);
    let [outcome, route, retries, is_event_stream] = input.array(In::u8)?;
    Some(Ended {
        exchange,
        request,
        at_us,
        duration_us,
        first_byte_us,
        wait_us,
        request_bytes,
        answer_bytes,
        event_count,
        status,
        outcome: of(&Outcome::ALL, outcome)?,
        route: of(&Route::ALL, route)?,
        retries,
        is_event_stream: is_event_stream != 0,
    })
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(bytes);
}

/// The one of that number, of those that stand in the order of their numbers.
fn of<T: Copy>(all: &[T], number: u8) -> Option<T> {
    all.get(usize::from(number)).copied()
}

/// Numbers from bytes; `None` where they end.
struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn array<T: Copy + Default, const N: usize>(
        &mut self,
        one: impl Fn(&mut Self) -> Option<T>,
    ) -> Option<[T; N]> {
        let mut all = [T::default(); N];
        for place in &mut all {
            *place = one(self)?;
        }
        Some(all)
    }
}
