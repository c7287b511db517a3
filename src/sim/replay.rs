//! A live router's decision log as a workload, and what really happened as an outcome beside those of the policies.
//!
//! The log has no prompts, but hashes that say how far two of them are the same ([`Sketch`]): from them runs of tokens are
//! made again, four bytes a token. Where a prompt goes on from an earlier one to that one's very end, it is the next turn of
//! its conversation, and begins with its answer. What lies between two places where hashes were kept is settled by the match
//! that the router itself found, else by whether the earlier prompt ends there.

use std::fmt::Write as _;
use std::sync::Arc;

use ahash::AHashMap;
use shards::Slot;

use super::agenda::{Ns, secs};
use super::content::{Content, mix};
use super::policy::Logged;
use super::tally::{Outcome, Point, Tally, Window};
use super::workload::{Session, Turn, Workload};
use crate::decisions::{Decided, Ended, GRID, LogFile, Sketch};
use crate::route::{Role, bytes_of_blocks};
use crate::shared::{self, Route};

/// Bytes that a token is taken for.
const TOKEN_BYTES: u64 = 4;
/// Bytes of an answer in one piece that are not its text.
const ANSWER_BESIDE_BYTES: u64 = 300;
/// Longest log, in us: ten years. What comes later comes then.
const SPAN_US_MAX: u64 = 10 * 366 * 86_400 * 1_000_000;
/// Points of the log's own series at most.
const SAMPLE_COUNT_MAX: u64 = 10_000;

/// A log, ready to be asked about.
#[derive(Debug)]
pub struct Replay {
    /// Who sent what, when.
    pub workload: Workload,
    /// Workers for whole requests or for prompts, and decode workers, as many as were ever candidates at a time.
    pub worker_counts: [usize; 2],
    /// What really happened, as far as the router could tell: hits are what it took workers to hold.
    pub really: Outcome,
    /// Who was really chosen, for the policy that does the same.
    pub logged: Arc<Logged>,
    /// What whoever reads the figures should know.
    pub notes: Vec<String>,
}

/// One request of the log.
struct Request {
    start: Ns,
    end: Ns,
    first_byte: Option<Ns>,
    session: u64,
    tokens: u32,
    matched_tokens: u32,
    output_tokens: u32,
    sketch: Sketch,
    /// By pool.
    workers: [Option<usize>; 2],
    reason: &'static str,
    ended: Option<Ended>,
}

impl Request {
    fn is_ok(&self) -> bool {
        let outcome = self.ended.map(|ended| ended.outcome);
        outcome == Some(shared::Outcome::Ok)
    }

    fn is_stream(&self) -> bool {
        self.ended.is_some_and(|ended| ended.is_event_stream)
    }
}

/// Makes a replay of what a file says. `is_open`: each request comes at its time, whatever becomes of those before it; else
/// the turns of a session follow each other as long after the last one's end as they really did.
///
/// # Errors
/// There is no decision in it.
pub fn replay(file: &LogFile, is_open: bool) -> Result<Replay, String> {
    let mut notes = Vec::new();
    if let Some(damage) = file.damage {
        notes.push(format!(
            "{} bytes cannot be read, from byte {} on: what they say is left out",
            damage.bytes, damage.from
        ));
    }
    let fleet = Fleet::of(file);
    let (requests, policy) = requests(file, &fleet, &mut notes);
    if requests.is_empty() {
        notes.push("no decision for a request with a prompt".to_owned());
        return Err(notes.join("; "));
    }
    let contents = contents(&requests);
    let sessions = sessions(&requests, &contents, is_open);
    let choices = requests.iter().zip(&contents);
    let first_count = fleet.counts()[0];
    let choices = choices.map(|(request, content)| {
        let slot = |pool: usize| {
            let index = request.workers[pool]? + pool * first_count;
            Some(Slot(index as u16))
        };
        (content.text.last_name(), [slot(0), slot(1)])
    });
    Ok(Replay {
        logged: Arc::new(Logged(choices.collect())),
        really: really(&requests, &sessions, &fleet, &policy),
        worker_counts: fleet.counts(),
        workload: Workload {
            sessions: sessions.into_iter().map(|(session, _)| session).collect(),
            seats: None,
        },
        notes,
    })
}

/// The workers of the log, by pool. A worker is its URL, in whatever slot and life.
#[derive(Default)]
struct Fleet {
    pools: [Vec<String>; 2],
    candidate_counts: [usize; 2],
    /// By run, slot and life.
    places: AHashMap<(u32, u16, u32), usize>,
}

fn pool_of(role: Role) -> usize {
    usize::from(role == Role::Decode)
}

impl Fleet {
    fn of(file: &LogFile) -> Fleet {
        let mut fleet = Fleet::default();
        for row in &file.workers {
            let place = fleet.place(row.role, row.url.to_string());
            let key = (row.run, row.slot.0, row.incarnation);
            fleet.places.insert(key, place);
        }
        for (run, decided, _) in &file.decisions {
            let key = (*run, decided.slot.0, decided.incarnation);
            if !fleet.places.contains_key(&key) {
                // Its record was lost: it has no name but its place.
                let name = format!("{run} {} {}", decided.slot.0, decided.incarnation);
                let place = fleet.place(decided.role, name);
                fleet.places.insert(key, place);
            }
            let count = &mut fleet.candidate_counts[pool_of(decided.role)];
            *count = (*count).max(decided.candidate_count as usize);
        }
        fleet
    }

    fn place(&mut self, role: Role, name: String) -> usize {
        let pool = &mut self.pools[pool_of(role)];
        match pool.iter().position(|known| *known == name) {
            Some(place) => place,
            None => {
                pool.push(name);
                pool.len() - 1
            }
        }
    }

    fn find(&self, run: u32, decided: &Decided) -> Option<usize> {
        let key = (run, decided.slot.0, decided.incarnation);
        self.places.get(&key).copied()
    }

    fn counts(&self) -> [usize; 2] {
        // Without a worker for prompts, those for answers do all.
        let count = |pool: usize| self.pools[pool].len().max(self.candidate_counts[pool]);
        [count(0).max(1), count(1)].map(|count| count.min(shards::SLOT_COUNT_MAX / 2))
    }
}

/// The requests in the order in which they came, and the policy that most of them met.
fn requests(file: &LogFile, fleet: &Fleet, notes: &mut Vec<String>) -> (Vec<Request>, String) {
    let ends: AHashMap<(u32, u64), &Ended> = file
        .ends
        .iter()
        .map(|(run, ended)| ((*run, ended.exchange), ended))
        .collect();
    let mut by_exchange: AHashMap<(u32, u64), Vec<usize>> = AHashMap::new();
    for (index, (run, decided, _)) in file.decisions.iter().enumerate() {
        if !matches!(decided.route, Route::Other | Route::Admin) {
            let key = (*run, decided.exchange);
            by_exchange.entry(key).or_default().push(index);
        }
    }
    let times = file.decisions.iter().map(|(_, decided, _)| decided.at_us);
    let t0 = times.min().unwrap_or(0);
    let ns = |us: u64| us.saturating_sub(t0).min(SPAN_US_MAX) * 1000;
    let mut policies: AHashMap<&'static str, usize> = AHashMap::new();
    let mut without_end = 0;
    let mut all: Vec<(u64, (u32, u64), Request)> = Vec::new();
    for (key, indexes) in by_exchange {
        let decided = || indexes.iter().map(|index| &file.decisions[*index]);
        // That of the prompt, if there is one; else that of whoever got the whole request.
        let last = |pool: usize| decided().rfind(|(_, decided, _)| pool_of(decided.role) == pool);
        let (Some(main), Some(first)) = (last(0).or(last(1)), decided().next()) else {
            continue;
        };
        let sketched = decided().map(|(.., sketch)| sketch);
        let sketch = sketched.max_by_key(|sketch| (sketch.blocks, sketch.matched_blocks));
        let (_, told, _) = main;
        *policies.entry(told.policy.name()).or_default() += 1;
        let ended = ends.get(&key).copied().copied();
        without_end += usize::from(ended.is_none());
        let start = ns(first.1.at_us);
        let end = ended.map_or(start, |ended| ns(ended.at_us)).max(start);
        let waited = ended.filter(|ended| ended.first_byte_us > 0);
        let first_byte = waited.map(|ended| {
            // Measured from the whole request on, of which the decision is the end but for the wait in line.
            let waited = ended.first_byte_us.saturating_sub(ended.wait_us);
            (start + waited.min(SPAN_US_MAX) * 1000).min(end)
        });
        let tokens = tokens_of(told.prompt_bytes).max(1);
        let request = Request {
            start,
            end,
            first_byte,
            session: told.session,
            tokens,
            matched_tokens: tokens_of(told.matched_bytes.into()).min(tokens),
            output_tokens: ended.as_ref().map_or(1, output_tokens),
            sketch: sketch.copied().unwrap_or(Sketch::NONE),
            workers: [0, 1].map(|pool| last(pool).and_then(|(run, d, _)| fleet.find(*run, d))),
            reason: told.reason_label(),
            ended,
        };
        all.push((start, key, request));
    }
    all.sort_by_key(|(start, key, _)| (*start, *key));
    if without_end > 0 {
        notes.push(format!(
            "{without_end} requests have no end in the log: they count as answered with one token"
        ));
    }
    let most = policies
        .into_iter()
        .max_by_key(|(name, count)| (*count, *name));
    let policy = most.map_or("", |(name, _)| name).to_owned();
    (
        all.into_iter().map(|(.., request)| request).collect(),
        policy,
    )
}

fn tokens_of(bytes: u64) -> u32 {
    (bytes / TOKEN_BYTES).min(u64::from(u32::MAX / 4)) as u32
}

fn output_tokens(ended: &Ended) -> u32 {
    let tokens = match ended.is_event_stream {
        // The last event says that it was.
        true => ended.event_count.saturating_sub(1),
        false => tokens_of(ended.answer_bytes.saturating_sub(ANSWER_BESIDE_BYTES)),
    };
    tokens.clamp(1, u32::MAX / 4)
}

/// A request's prompt.
struct Told {
    text: Arc<Content>,
    /// The request whose conversation it goes on.
    goes_on: Option<usize>,
}

fn contents(requests: &[Request]) -> Vec<Told> {
    let mut known: AHashMap<(u32, u32), usize> = AHashMap::new();
    let mut contents: Vec<Told> = Vec::with_capacity(requests.len());
    for (index, request) in requests.iter().enumerate() {
        let sketch = &request.sketch;
        let met = sketch
            .points()
            .filter_map(|point| Some((point.0, *known.get(&point)?)));
        let met = met.max_by_key(|(blocks, parent)| (*blocks, *parent));
        let mut text = Content::default();
        let mut goes_on = None;
        if let Some((blocks, parent)) = met {
            let before = &requests[parent];
            let shared = shared_blocks(sketch, &before.sketch, blocks);
            text = (*contents[parent].text).clone();
            if shared == before.sketch.blocks {
                goes_on = Some(parent);
                text.truncate(before.tokens.min(request.tokens.saturating_sub(1)));
                let left = request.tokens - 1 - text.tokens();
                // What the engine answered stands next, and is cached where it was made.
                text.push(text.last_name(), before.output_tokens.min(left));
            } else {
                let shared = tokens_of(bytes_of_blocks(shared as usize));
                text.truncate(shared.min(request.tokens - 1));
            }
        }
        let name = mix(0x4e91, index as u64);
        text.push(name, (request.tokens - text.tokens()).max(1));
        for point in sketch.points() {
            // The latest: of a conversation the longest.
            known.insert(point, index);
        }
        contents.push(Told {
            text: Arc::new(text),
            goes_on,
        });
    }
    contents
}

/// How many blocks a prompt shares with an earlier one, with which it is known to share `blocks`.
fn shared_blocks(now: &Sketch, before: &Sketch, blocks: u32) -> u32 {
    if blocks >= before.blocks || blocks == now.matched_blocks {
        return blocks.min(before.blocks);
    }
    // Up to where both have a hash, and it was not the same.
    let mut further = GRID.iter().map(|block| u32::from(*block));
    let next = further.find(|block| *block > blocks).unwrap_or(u32::MAX);
    let end = before.blocks.min(now.blocks);
    if now.matched_blocks > blocks {
        return now.matched_blocks.min(end);
    }
    // The router looked and found no more; or did not look, and the earlier one ends before the next hash.
    if now.matched_blocks == 0 && end < next {
        end
    } else {
        blocks
    }
}

/// Sessions, and the requests that are their turns.
fn sessions(requests: &[Request], contents: &[Told], is_open: bool) -> Vec<(Session, Vec<usize>)> {
    let mut counts: AHashMap<u64, usize> = AHashMap::new();
    for request in requests.iter().filter(|request| request.session != 0) {
        *counts.entry(request.session).or_default() += 1;
    }
    let mut by_name: AHashMap<u64, usize> = AHashMap::new();
    let mut session_of: Vec<usize> = Vec::with_capacity(requests.len());
    let mut sessions: Vec<(Session, Vec<usize>)> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        // A name that comes once (a proxy's request id, say) names no session.
        let is_named = counts.get(&request.session).is_some_and(|count| *count > 1);
        let going_on = match is_named {
            true => by_name.get(&request.session).copied(),
            false => contents[index].goes_on.map(|parent| session_of[parent]),
        };
        // What comes before the last turn has ended did not wait for it.
        let going_on = going_on.filter(|place| {
            let last = sessions[*place].1.last().map(|last| requests[*last].end);
            !is_open && last.is_some_and(|end| end <= request.start)
        });
        let place = going_on.unwrap_or_else(|| {
            let name = match is_named {
                true => request.session,
                false => mix(0x5e55, index as u64),
            };
            let session = Session {
                name,
                start: request.start,
                turns: Vec::new(),
            };
            sessions.push((session, Vec::new()));
            sessions.len() - 1
        });
        let (session, turns) = &mut sessions[place];
        let before = turns.last().map(|last| requests[*last].end);
        session.turns.push(Turn {
            pause: before.map_or(0, |end| request.start - end),
            content: Arc::clone(&contents[index].text),
            output_tokens: request.output_tokens,
        });
        turns.push(index);
        session_of.push(place);
        if is_named {
            by_name.insert(request.session, place);
        }
    }
    sessions
}

/// What happened at one time.
enum Fact {
    Chosen(usize),
    First(usize),
    Ended(usize),
    SessionEnded,
    Sample,
}

fn really(
    requests: &[Request],
    sessions: &[(Session, Vec<usize>)],
    fleet: &Fleet,
    policy: &str,
) -> Outcome {
    let counts = fleet.counts();
    let sizes: &[usize] = if counts[1] == 0 {
        &counts[..1]
    } else {
        &counts
    };
    let mut tally = Tally::new(&format!("{policy} (the log)"), Window::WHOLE, sizes);
    let span = requests
        .iter()
        .map(|request| request.end)
        .max()
        .unwrap_or(0);
    let mut facts: Vec<(Ns, Fact)> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        facts.push((request.start, Fact::Chosen(index)));
        let first = request.first_byte.unwrap_or(request.end);
        facts.push((first, Fact::First(index)));
        facts.push((request.end, Fact::Ended(index)));
    }
    for (_, turns) in sessions {
        let end = turns.iter().map(|turn| requests[*turn].end).max();
        facts.push((end.unwrap_or(0), Fact::SessionEnded));
    }
    let pause = (span / SAMPLE_COUNT_MAX).max(1_000_000_000);
    facts.extend((0..=span / pause).map(|n| (n * pause, Fact::Sample)));
    // Those of one time in the order in which they were put.
    facts.sort_by_key(|(at, _)| *at);
    // Of an answer in one piece the first byte is the last: it says something else.
    let has_streams = requests.iter().any(Request::is_stream);
    let mut in_flight: Vec<Vec<u32>> = sizes.iter().map(|size| vec![0; *size]).collect();
    for (now, fact) in facts {
        match fact {
            Fact::Chosen(index) => {
                let request = &requests[index];
                tally.queue(now, 1);
                for (pool, worker) in request.workers.iter().enumerate() {
                    if let Some(worker) = worker.filter(|worker| *worker < counts[pool]) {
                        tally.chosen(pool, worker, request.reason);
                        in_flight[pool][worker] += 1;
                    }
                }
                let main = request.workers.iter().position(Option::is_some);
                if let Some((pool, worker)) =
                    main.and_then(|pool| Some((pool, request.workers[pool]?)))
                    && worker < counts[pool]
                {
                    tally.began(pool, worker, request.tokens, request.matched_tokens);
                }
            }
            Fact::First(index) => {
                let request = &requests[index];
                tally.queue(now, -1);
                if request.first_byte.is_some() && (request.is_stream() || !has_streams) {
                    let ended = request.ended.map_or(0, |ended| ended.first_byte_us);
                    tally.first(ended as f64 / 1e6);
                }
            }
            Fact::Ended(index) => {
                let request = &requests[index];
                for (pool, worker) in request.workers.iter().enumerate() {
                    if let Some(worker) = worker.filter(|worker| *worker < counts[pool]) {
                        in_flight[pool][worker] -= 1;
                    }
                }
                if request.is_ok() {
                    tally.request_done(request.output_tokens);
                } else if request.ended.is_some() {
                    tally.outcome.failed += 1;
                }
                if let Some(first) = request.first_byte
                    && request.is_stream()
                    && request.output_tokens > 1
                {
                    let gaps = u64::from(request.output_tokens - 1);
                    tally.steps([((request.end - first) / gaps, gaps)].into_iter());
                }
            }
            Fact::SessionEnded => tally.session_done(now),
            Fact::Sample => {
                let points = |pool: &Vec<u32>| {
                    let point = |in_flight: &u32| Point {
                        in_flight: *in_flight,
                        ..Point::default()
                    };
                    pool.iter().map(point).collect()
                };
                tally.sample(now, in_flight.iter().map(points).collect());
            }
        }
    }
    tally.close(span)
}

/// What was read, in a few lines.
pub fn about(replay: &Replay) -> String {
    let mut text = String::new();
    let [first, decode] = replay.worker_counts;
    let workers = match decode {
        0 => format!("{first} workers"),
        decode => format!("{first} prefill and {decode} decode workers"),
    };
    let _ = writeln!(
        text,
        "{} requests in {} sessions over {:.1} s, {workers}",
        replay.workload.request_count(),
        replay.workload.sessions.len(),
        secs(replay.really.whole),
    );
    for note in &replay.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

#[cfg(test)]
#[path = "replay_tests.rs"]
mod tests;
