//! Prefill/decode disaggregation among simulated workers: the book of hand-overs, and what breaks the protocol.
//!
//! A prefill worker issues a hand-over (vLLM's `kv_transfer_params`) and keeps the prompt's KV blocks pinned; a decode
//! worker claims it, fetches the blocks and thereby sets them free. The book is shared by all workers of one process,
//! behind a mutex: this is a simulator. No clock and no I/O here; `now` is passed in, and the owner of the blocks is
//! told through [`Release`].
//!
//! Invariants:
//! - H1: a hand-over is claimed once at most, and only with the parameters it was issued with, by a request for the same
//!   prompt, within its lease and its engine's life.
//! - H2: issued = fetched + expired + lost + open, for each worker, where every claim ends as fetched (or lost).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ahash::AHashMap;
use clap::ValueEnum;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Hand-overs remembered after their end, so that a second use is told from an invented one.
const ENDED_MAX: usize = 1 << 16;
/// What stands before the number in a `remote_request_id`.
const REQUEST_PREFIX: &str = "handover-";

/// What a simulated worker does for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, ValueEnum)]
pub enum Role {
    /// Serves whole requests. Hands over or takes over only when asked to (vLLM's `kv_both`), and demands nothing.
    #[default]
    Regular,
    /// Computes prompts and hands them over.
    Prefill,
    /// Takes prompts over and answers.
    Decode,
}

impl Role {
    /// As on the command line.
    pub fn label(self) -> &'static str {
        match self {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// A breach of the P/D protocol. None of them is refused, since vLLM refuses none: the prefill side answers as asked
/// (without parameters where they were not asked for), and the decode side recomputes the prompt
/// (`kv_load_failure_policy: recompute`). They are counted instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The prefill leg does not say `do_remote_decode: true, do_remote_prefill: false` without remote values.
    PrefillParams,
    /// The prefill leg asks for another number of tokens than 1.
    PrefillTokens,
    /// The prefill leg is streamed, where the hand-over cannot be told.
    PrefillStream,
    /// The decode leg has no parameters.
    Missing,
    /// The decode leg's hand-over was claimed before.
    Reused,
    /// The decode leg comes after the end of the lease.
    Expired,
    /// The decode leg names an engine that does not live (any more).
    UnknownEngine,
    /// The decode leg's parameters are not those that were issued.
    Altered,
    /// The decode leg is for another prompt.
    PromptDiffers,
}

impl Violation {
    /// All of them, in the order of [`HandoverCounts::violations`].
    pub const ALL: [Violation; 9] = [
        Violation::PrefillParams,
        Violation::PrefillTokens,
        Violation::PrefillStream,
        Violation::Missing,
        Violation::Reused,
        Violation::Expired,
        Violation::UnknownEngine,
        Violation::Altered,
        Violation::PromptDiffers,
    ];

    /// The value of the metric's label `kind`.
    pub fn label(self) -> &'static str {
        match self {
            Violation::PrefillParams => "prefill_params",
            Violation::PrefillTokens => "prefill_max_tokens",
            Violation::PrefillStream => "prefill_stream",
            Violation::Missing => "missing",
            Violation::Reused => "reused",
            Violation::Expired => "expired",
            Violation::UnknownEngine => "unknown_engine",
            Violation::Altered => "altered",
            Violation::PromptDiffers => "prompt_differs",
        }
    }

    /// The inverse of [`Violation::label`].
    pub fn from_label(label: &str) -> Option<Violation> {
        Violation::ALL
            .into_iter()
            .find(|kind| kind.label() == label)
    }
}

/// One worker's totals since the start; restarts of its engine do not reset them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandoverCounts {
    /// Hand-overs whose blocks it pinned.
    pub issued: u64,
    /// Of these, fetched by a decode worker.
    pub fetched: u64,
    /// Of these, not fetched when the lease ended: leaked.
    pub expired: u64,
    /// Of these, gone with an engine that restarted.
    pub lost: u64,
    /// Hand-overs of others that it claimed.
    pub claimed: u64,
    /// By kind, in the order of [`Violation::ALL`].
    pub violations: [u64; Violation::ALL.len()],
}

impl HandoverCounts {
    /// Issued, and neither fetched nor ended.
    pub fn open(&self) -> u64 {
        self.issued
            .saturating_sub(self.fetched + self.expired + self.lost)
    }

    /// Violations of any kind.
    pub fn violations_total(&self) -> u64 {
        self.violations.iter().sum()
    }

    /// Adds another worker's.
    pub fn add(&mut self, other: &HandoverCounts) {
        self.issued += other.issued;
        self.fetched += other.fetched;
        self.expired += other.expired;
        self.lost += other.lost;
        self.claimed += other.claimed;
        for (mine, theirs) in self.violations.iter_mut().zip(other.violations) {
            *mine += theirs;
        }
    }

    /// The kinds that have occurred, with their counts.
    pub fn violations_by_kind(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counted = Violation::ALL.into_iter().zip(self.violations);
        counted
            .filter(|(_, count)| *count > 0)
            .map(|(kind, count)| (kind.label(), count))
    }
}

/// What a request says about P/D.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Leg {
    /// Its `kv_transfer_params`; `Null` without.
    pub params: Value,
    /// The most tokens it wants, if it says so.
    pub tokens_max: Option<u64>,
    /// It is to be streamed.
    pub is_stream: bool,
}

impl Leg {
    /// It asks for its prompt to be handed over.
    pub fn asks_for_handover(&self) -> bool {
        self.params["do_remote_decode"] == true
    }

    /// It says that its prompt is to be fetched.
    pub fn brings_handover(&self) -> bool {
        self.params["do_remote_prefill"] == true
    }

    /// What is wrong with it as a prefill leg.
    pub fn prefill_violations(&self) -> Vec<Violation> {
        let mut found = Vec::new();
        let names_remote = self.params.as_object().is_some_and(|params| {
            params
                .iter()
                .any(|(name, value)| name.starts_with("remote_") && !value.is_null())
        });
        if !self.asks_for_handover() || self.params["do_remote_prefill"] != false || names_remote {
            found.push(Violation::PrefillParams);
        }
        if self.tokens_max != Some(1) {
            found.push(Violation::PrefillTokens);
        }
        if self.is_stream {
            found.push(Violation::PrefillStream);
        }
        found
    }
}

/// How the book tells a worker that the blocks of a hand-over, named by its number, may go. The book is locked
/// meanwhile: it must not call back.
pub type Release = Box<dyn Fn(u64) + Send>;

/// A worker's place in the book.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat(usize);

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// Its prompt is still being computed: nobody knows of it.
    Computing,
    Open {
        until: Instant,
    },
    Claimed,
    Fetched,
    Expired,
}

#[derive(Debug)]
struct Entry {
    seat: usize,
    fingerprint: u64,
    prompt_hash: u64,
    state: State,
}

struct Place {
    address: SocketAddr,
    release: Release,
    counts: HandoverCounts,
    /// Of the life it is in.
    engine_id: String,
}

#[derive(Default)]
struct Pages {
    places: Vec<Place>,
    /// Seats of living engines by id.
    lives: AHashMap<String, usize>,
    entries: AHashMap<u64, Entry>,
    /// Entries that have ended, oldest first.
    ended: VecDeque<u64>,
    lives_begun: u64,
    last_number: u64,
}

/// Every hand-over of the workers of one process.
#[derive(Default)]
pub struct Book(Mutex<Pages>);

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pages = self.pages();
        write!(f, "Book({} hand-overs)", pages.entries.len())
    }
}

impl Book {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new worker, whose engine's first life begins.
    pub fn seat(&self, address: SocketAddr, release: Release) -> Seat {
        let mut pages = self.pages();
        let seat = pages.places.len();
        pages.places.push(Place {
            address,
            release,
            counts: HandoverCounts::default(),
            engine_id: String::new(),
        });
        pages.begin_life(seat);
        Seat(seat)
    }

    /// The engine has restarted: whatever it issued is worth nothing now, and it has another id.
    pub fn restart(&self, seat: Seat) {
        self.pages().begin_life(seat.0);
    }

    /// Writes a hand-over down whose prompt is still to be computed. Gives its number and vLLM's parameters for it.
    pub fn register(&self, seat: Seat, prompt_hash: u64, blocks: u32) -> (u64, Value) {
        let mut pages = self.pages();
        pages.last_number += 1;
        let number = pages.last_number;
        let place = &pages.places[seat.0];
        // Block ids are scattered, as a real allocator's are: a router must not take them for a range.
        let ids: Vec<u64> = (0..u64::from(blocks))
            .map(|nth| xxh3_64(&(number << 24 | nth).to_le_bytes()) >> 40)
            .collect();
        let params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": ids,
            "remote_engine_id": place.engine_id,
            "remote_request_id": format!("{REQUEST_PREFIX}{number:x}"),
            "remote_host": place.address.ip().to_string(),
            "remote_port": place.address.port(),
            "tp_size": 1,
        });
        let entry = Entry {
            seat: seat.0,
            fingerprint: fingerprint(&params),
            prompt_hash,
            state: State::Computing,
        };
        pages.entries.insert(number, entry);
        (number, params)
    }

    /// The prompt was not computed to its end: there is nothing to hand over.
    pub fn withdraw(&self, number: u64) {
        let mut pages = self.pages();
        let is_computing = |entry: &Entry| entry.state == State::Computing;
        if pages.entries.get(&number).is_some_and(is_computing) {
            pages.entries.remove(&number);
        }
    }

    /// The prompt is computed and its blocks are pinned: the lease begins, and ends at `until`.
    pub fn open(&self, number: u64, until: Instant) {
        let mut pages = self.pages();
        let Some(entry) = pages.entries.get_mut(&number) else {
            return;
        };
        entry.state = State::Open { until };
        let seat = entry.seat;
        pages.places[seat].counts.issued += 1;
    }

    /// The lease has ended. False while a decode worker is fetching: the blocks then stay until it has them.
    pub fn expire(&self, number: u64) -> bool {
        let mut pages = self.pages();
        match pages.entries.get(&number).map(|entry| entry.state) {
            Some(State::Claimed) => false,
            Some(State::Open { .. }) => {
                pages.end(number, State::Expired);
                true
            }
            _ => true,
        }
    }

    /// Takes a hand-over for the request of the worker at `by` (see H1). What is refused stays as it is.
    ///
    /// # Errors
    /// What is wrong with the parameters, in this order: missing, the engine, altered, used, late, another prompt. Not
    /// counted yet: another process may know the engine.
    pub fn claim(
        self: &Arc<Book>,
        params: &Value,
        prompt_hash: u64,
        now: Instant,
    ) -> Result<Claim, Violation> {
        let mut pages = self.pages();
        let number = pages.number_of(params)?;
        let entry = &pages.entries[&number];
        let wants = entry.prompt_hash;
        match entry.state {
            State::Computing => return Err(Violation::Altered),
            State::Claimed | State::Fetched => return Err(Violation::Reused),
            State::Expired => return Err(Violation::Expired),
            State::Open { until } if now > until => {
                pages.end(number, State::Expired);
                return Err(Violation::Expired);
            }
            State::Open { .. } if wants != prompt_hash => return Err(Violation::PromptDiffers),
            State::Open { .. } => {}
        }
        if let Some(entry) = pages.entries.get_mut(&number) {
            entry.state = State::Claimed;
        }
        let book = self.clone();
        Ok(Claim { book, number })
    }

    /// Counts a hand-over that the worker at this seat has claimed.
    pub fn count_claimed(&self, seat: Seat) {
        self.pages().places[seat.0].counts.claimed += 1;
    }

    /// Counts a violation in a request to the worker at this seat.
    pub fn count_violation(&self, seat: Seat, kind: Violation) {
        self.pages().places[seat.0].counts.violations[kind as usize] += 1;
    }

    /// The totals of the worker at this seat.
    pub fn counts(&self, seat: Seat) -> HandoverCounts {
        self.pages().places[seat.0].counts
    }

    fn finish(&self, number: u64) {
        let mut pages = self.pages();
        let is_claimed = |entry: &Entry| entry.state == State::Claimed;
        if pages.entries.get(&number).is_some_and(is_claimed) {
            let seat = pages.entries[&number].seat;
            pages.end(number, State::Fetched);
            (pages.places[seat].release)(number);
        }
    }
}

impl Pages {
    fn begin_life(&mut self, seat: usize) {
        let old = std::mem::take(&mut self.places[seat].engine_id);
        self.lives.remove(&old);
        let counts = &mut self.places[seat].counts;
        counts.lost += counts.open();
        self.entries.retain(|_, entry| entry.seat != seat);
        self.lives_begun += 1;
        // Another process may be on the same port later: its engine must not pass for this one.
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH);
        let salt = (
            std::process::id(),
            nanos.map_or(0, |time| time.as_nanos()),
            self.lives_begun,
        );
        let id = format!(
            "mock-{seat}-{:016x}",
            xxh3_64(format!("{salt:?}").as_bytes())
        );
        self.lives.insert(id.clone(), seat);
        self.places[seat].engine_id = id;
    }

    /// Which hand-over these are the parameters of.
    fn number_of(&self, params: &Value) -> Result<u64, Violation> {
        if params.is_null() {
            return Err(Violation::Missing);
        }
        if params["do_remote_prefill"] != true {
            return Err(Violation::Altered);
        }
        let engine_id = params["remote_engine_id"].as_str().unwrap_or("");
        if !self.lives.contains_key(engine_id) {
            return Err(Violation::UnknownEngine);
        }
        let digits = params["remote_request_id"]
            .as_str()
            .and_then(|id| id.strip_prefix(REQUEST_PREFIX));
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        number
            .filter(|number| {
                let entry = self.entries.get(number);
                entry.is_some_and(|entry| entry.fingerprint == fingerprint(params))
            })
            .ok_or(Violation::Altered)
    }

    fn end(&mut self, number: u64, state: State) {
        let Some(entry) = self.entries.get_mut(&number) else {
            return;
        };
        entry.state = state;
        let counts = &mut self.places[entry.seat].counts;
        counts.fetched += u64::from(state == State::Fetched);
        counts.expired += u64::from(state == State::Expired);
        self.ended.push_back(number);
        if self.ended.len() > ENDED_MAX
            && let Some(oldest) = self.ended.pop_front()
        {
            self.entries.remove(&oldest);
        }
    }
}

/// A claimed hand-over. Its drop says that the blocks were fetched, or are not wanted any more: either way they may go.
#[derive(Debug)]
pub struct Claim {
    book: Arc<Book>,
    number: u64,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.book.finish(self.number);
    }
}

/// The same for the same parameters, whatever the order of their names. Ids are kept this way: they are many.
fn fingerprint(params: &Value) -> u64 {
    let Some(fields) = params.as_object() else {
        return 0;
    };
    let mut fields: Vec<String> = fields
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    fields.sort_unstable();
    xxh3_64(fields.join("\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    struct Desk {
        book: Arc<Book>,
        seat: Seat,
        released: mpsc::Receiver<u64>,
        now: Instant,
    }

    fn desk() -> Desk {
        let book = Arc::new(Book::default());
        let (released, numbers) = mpsc::channel();
        let release = Box::new(move |number| released.send(number).unwrap());
        let seat = book.seat(([127, 0, 0, 1], 8000).into(), release);
        Desk {
            book,
            seat,
            released: numbers,
            now: Instant::now(),
        }
    }

    impl Desk {
        /// A hand-over of prompt 7, open.
        fn issue(&self) -> (u64, Value) {
            let (number, params) = self.book.register(self.seat, 7, 3);
            self.book.open(number, self.now + LEASE);
            (number, params)
        }

        fn refused(&self, params: &Value) -> Violation {
            self.book.claim(params, 7, self.now).unwrap_err()
        }
    }

    #[test]
    fn a_claim_is_good_once_and_frees_the_blocks_when_it_ends() {
        let desk = desk();
        let (number, params) = desk.issue();
        assert_eq!(params["remote_block_ids"].as_array().unwrap().len(), 3);
        let claim = desk.book.claim(&params, 7, desk.now + LEASE).unwrap();
        assert_eq!(desk.refused(&params), Violation::Reused, "while claimed");
        assert!(desk.released.try_recv().is_err(), "not before its end");
        drop(claim);
        assert_eq!(desk.released.try_recv(), Ok(number));
        assert_eq!(desk.refused(&params), Violation::Reused, "after it");
        assert!(desk.released.try_recv().is_err(), "freed once");
        let counts = desk.book.counts(desk.seat);
        assert_eq!((counts.issued, counts.fetched, counts.open()), (1, 1, 0));
    }

    #[test]
    fn nothing_but_the_parameters_as_issued_is_taken() {
        let desk = desk();
        let (_, params) = desk.issue();
        assert_eq!(desk.refused(&Value::Null), Violation::Missing);
        for (name, value, kind) in [
            ("do_remote_prefill", json!(false), Violation::Altered),
            ("do_remote_decode", json!(true), Violation::Altered),
            ("remote_block_ids", json!([1]), Violation::Altered),
            (
                "remote_request_id",
                json!("handover-99"),
                Violation::Altered,
            ),
            ("remote_request_id", json!(null), Violation::Altered),
            ("remote_host", json!("::1"), Violation::Altered),
            ("remote_port", json!("8000"), Violation::Altered),
            ("tp_size", json!(2), Violation::Altered),
            ("more", json!(1), Violation::Altered),
            ("remote_engine_id", json!("x"), Violation::UnknownEngine),
            ("remote_engine_id", json!(null), Violation::UnknownEngine),
        ] {
            let mut altered = params.clone();
            altered[name] = value;
            assert_eq!(desk.refused(&altered), kind, "{name}");
        }
        for (name, _) in params.as_object().unwrap() {
            let mut shorter = params.clone();
            shorter.as_object_mut().unwrap().remove(name);
            assert!(desk.book.claim(&shorter, 7, desk.now).is_err(), "{name}");
        }
        let other = desk.book.claim(&params, 8, desk.now).unwrap_err();
        assert_eq!(other, Violation::PromptDiffers);
        let fields = params.as_object().unwrap().clone().into_iter();
        let turned: serde_json::Map<String, Value> = fields.rev().collect();
        let claim = desk.book.claim(&Value::Object(turned), 7, desk.now);
        assert!(claim.is_ok(), "order is nothing, and refusals took nothing");
    }

    #[test]
    fn a_lease_ends_once_and_not_under_a_claim() {
        let desk = desk();
        let (late, params) = desk.issue();
        let after = desk.now + LEASE + Duration::from_nanos(1);
        let refused = desk.book.claim(&params, 7, after).unwrap_err();
        assert_eq!(refused, Violation::Expired);
        assert!(desk.book.expire(late), "the blocks may go");
        let (unfetched, params) = desk.issue();
        assert!(desk.book.expire(unfetched));
        assert_eq!(desk.refused(&params), Violation::Expired);
        let (claimed, params) = desk.issue();
        let claim = desk.book.claim(&params, 7, desk.now).unwrap();
        assert!(!desk.book.expire(claimed), "the blocks are being read");
        drop(claim);
        let counts = desk.book.counts(desk.seat);
        assert_eq!((counts.issued, counts.fetched, counts.expired), (3, 1, 2));
    }

    #[test]
    fn a_restarted_engine_refuses_what_it_issued_before() {
        let desk = desk();
        let (_, params) = desk.issue();
        let (_, claimed) = desk.issue();
        let claim = desk.book.claim(&claimed, 7, desk.now).unwrap();
        desk.book.restart(desk.seat);
        assert_eq!(desk.refused(&params), Violation::UnknownEngine);
        drop(claim);
        assert!(desk.released.try_recv().is_err(), "its blocks are gone");
        let counts = desk.book.counts(desk.seat);
        assert_eq!((counts.lost, counts.fetched, counts.open()), (2, 0, 0));
        let (_, params) = desk.issue();
        assert!(desk.book.claim(&params, 7, desk.now).is_ok());
    }

    #[test]
    fn what_is_not_computed_to_its_end_was_never_issued() {
        let desk = desk();
        let (number, params) = desk.book.register(desk.seat, 7, 3);
        assert_eq!(desk.refused(&params), Violation::Altered);
        desk.book.withdraw(number);
        desk.book.open(number, desk.now + LEASE);
        assert_eq!(desk.book.counts(desk.seat), HandoverCounts::default());
        let (number, params) = desk.issue();
        desk.book.withdraw(number);
        assert!(desk.book.claim(&params, 7, desk.now).is_ok(), "too late");
    }

    #[test]
    fn a_prefill_leg_says_just_what_is_wanted() {
        let params = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null});
        let leg = |params: &Value, tokens_max, is_stream| {
            let params = params.clone();
            Leg {
                params,
                tokens_max,
                is_stream,
            }
            .prefill_violations()
        };
        assert_eq!(leg(&params, Some(1), false), []);
        for (name, value) in [
            ("do_remote_decode", json!(false)),
            ("do_remote_decode", json!(null)),
            ("do_remote_prefill", json!(true)),
            ("do_remote_prefill", json!(null)),
            ("remote_engine_id", json!("x")),
            ("remote_block_ids", json!([])),
            ("remote_port", json!(0)),
        ] {
            let mut wrong = params.clone();
            wrong[name] = value;
            assert_eq!(
                leg(&wrong, Some(1), false),
                [Violation::PrefillParams],
                "{name}"
            );
        }
        let none = leg(&Value::Null, Some(1), false);
        assert_eq!(none, [Violation::PrefillParams]);
        assert_eq!(leg(&params, Some(2), false), [Violation::PrefillTokens]);
        assert_eq!(leg(&params, None, false), [Violation::PrefillTokens]);
        assert_eq!(leg(&params, Some(1), true), [Violation::PrefillStream]);
    }

    #[test]
    fn kinds_are_numbered_as_listed() {
        for (nth, kind) in Violation::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, nth);
            assert_eq!(Violation::from_label(kind.label()), Some(kind));
        }
    }

    #[test]
    fn the_book_forgets_the_oldest_that_ended() {
        let desk = desk();
        for _ in 0..=ENDED_MAX {
            let (number, _) = desk.issue();
            desk.book.expire(number);
        }
        assert_eq!(desk.book.pages().entries.len(), ENDED_MAX);
    }
}
