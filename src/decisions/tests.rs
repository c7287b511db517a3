//! The file in whole and in pieces, the ring, the sketch, and the mailbox that nobody empties.

use std::time::{Duration, Instant};

use shards::{PrefixHash, Slot, WorkerId};

use super::record::{FRAME_BYTES, MAGIC, Raw};
use super::*;
use crate::route::{PolicyKind, Reason, Rng, Role};
use crate::shared::{Outcome, Route};

fn decided(exchange: u64, request: u64) -> Decided {
    let mut held = [Held::default(); HELD_COUNT_MAX];
    held[0] = Held {
        slot: 3,
        load: 9,
        bytes: 4096,
    };
    held[1] = Held {
        slot: 4,
        load: 1,
        bytes: 128,
    };
    Decided {
        exchange,
        at_us: 1_700_000_000_000_000,
        request,
        session: 5,
        model: 6,
        prompt_bytes: 70_000,
        matched_bytes: 4096,
        slot: Slot(3),
        incarnation: 2,
        load: 9,
        least_load: Some(1),
        candidate_count: 4,
        given_up: Some(GivenUp {
            slot: Slot(4),
            load: 200,
            matched_bytes: 8192,
        }),
        role: Role::Prefill,
        route: Route::Completions,
        policy: PolicyKind::CacheAware,
        reason: Reason::ShedToWarm as u8,
        attempt: 1,
        held_count: 2,
        held,
    }
}

fn ended(exchange: u64) -> Ended {
    Ended {
        exchange,
        request: 8,
        at_us: 1_700_000_000_100_000,
        duration_us: 100_000,
        first_byte_us: 20_000,
        wait_us: 5,
        request_bytes: 71_000,
        answer_bytes: 900,
        event_count: 12,
        status: 200,
        outcome: Outcome::Ok,
        route: Route::Completions,
        retries: 1,
        is_event_stream: true,
    }
}

fn worker(slot: u16) -> WorkerRow {
    WorkerRow {
        run: 7,
        slot: Slot(slot),
        incarnation: 2,
        role: Role::Prefill,
        url: format!("http://w{slot}:8000").into(),
    }
}

fn chain(blocks: u64) -> Vec<PrefixHash> {
    (1..=blocks)
        .map(|n| PrefixHash(n.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .collect()
}

const HEADER: Header = Header {
    run: 7,
    at_us: 1_700_000_000_000_000,
    core_count: 2,
};

/// A file of one run, and where its records end.
fn file() -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut ends) = (Vec::new(), Vec::new());
    let sketch = Sketch::of(&chain(547), 32);
    push_header(&mut bytes, &HEADER);
    ends.push(bytes.len());
    for n in 0..3 {
        push_worker(&mut bytes, &worker(n));
        ends.push(bytes.len());
        push_decided(&mut bytes, 7, &decided(n.into(), 8), &sketch);
        ends.push(bytes.len());
        push_ended(&mut bytes, 7, &ended(n.into()));
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn record_count(file: &LogFile) -> usize {
    file.headers.len() + file.workers.len() + file.decisions.len() + file.ends.len()
}

#[test]
fn what_is_written_is_read() {
    let (bytes, _) = file();
    let file = read(&bytes);
    assert_eq!(file.damage, None);
    assert_eq!(file.headers, [HEADER]);
    assert_eq!(file.workers, [0, 1, 2].map(worker));
    let sketch = Sketch::of(&chain(547), 32);
    let wanted = [0, 1, 2].map(|n| (7, decided(n, 8), sketch));
    assert_eq!(file.decisions, wanted);
    assert_eq!(file.ends, [0, 1, 2].map(|n| (7, ended(n))));
}

#[test]
fn a_decision_without_a_prompt_or_anybody_given_up_is_read() {
    let bare = Decided {
        least_load: None,
        given_up: None,
        held_count: 0,
        held: [Held::default(); HELD_COUNT_MAX],
        reason: TRIAL,
        ..decided(1, 2)
    };
    let mut bytes = Vec::new();
    push_header(&mut bytes, &HEADER);
    push_decided(&mut bytes, 7, &bare, &Sketch::NONE);
    assert_eq!(read(&bytes).decisions, [(7, bare, Sketch::NONE)]);
    assert_eq!(bare.reason_label(), "trial");
}

#[test]
fn a_file_that_was_cut_off_anywhere_is_read_up_to_its_last_whole_record() {
    let (bytes, ends) = file();
    for length in 0..bytes.len() {
        let file = read(&bytes[..length]);
        let whole = ends.iter().filter(|end| **end <= length).count();
        assert_eq!(record_count(&file), whole, "{length} bytes");
        let read_bytes = ends[..whole].last().copied().unwrap_or(0);
        let damage = file.damage.map_or(0, |damage| damage.bytes);
        assert_eq!(read_bytes as u64 + damage, length as u64);
        if let Some(damage) = file.damage {
            assert_eq!(damage.from, read_bytes as u64);
        }
    }
}

#[test]
fn any_damaged_byte_costs_the_rest_of_its_run_and_no_more() {
    let (one, ends) = file();
    let mut two = one.clone();
    two.extend_from_slice(&one);
    for at in 0..one.len() {
        let mut bytes = two.clone();
        bytes[at] ^= 0x41;
        let file = read(&bytes);
        let whole = ends.iter().filter(|end| **end <= at).count();
        assert_eq!(record_count(&file), whole + ends.len(), "byte {at}");
        assert!(file.damage.is_some());
    }
}

#[test]
fn random_bytes_are_read_without_a_panic() {
    let seed = crate::route::Rng::new(0xdec1).next();
    let mut rng = Rng::new(seed);
    let (whole, _) = file();
    for round in 0..4000 {
        let mut bytes: Vec<u8> = match round % 2 {
            0 => (0..rng.below(600)).map(|_| rng.next() as u8).collect(),
            _ => whole.clone(),
        };
        for _ in 0..rng.below(8) {
            let at = rng.below(bytes.len().max(1));
            match rng.below(3) {
                0 if at < bytes.len() => bytes[at] = rng.next() as u8,
                1 => bytes.truncate(at),
                _ => {
                    bytes.splice(at..at, MAGIC.iter().copied());
                }
            }
        }
        read(&bytes);
    }
}

/// A check that fits shows nothing of what is inside: the content is looked at all the same.
#[test]
fn well_framed_nonsense_is_damage() {
    let mut bytes = Vec::new();
    push_header(&mut bytes, &HEADER);
    let mut odd = decided(1, 2);
    odd.held_count = 1;
    push_decided(&mut bytes, 7, &odd, &Sketch::NONE);
    let good = bytes.len();
    for count in [9_u8, 255] {
        let mut row = Vec::new();
        push_decided(&mut row, 7, &odd, &Sketch::NONE);
        let content = &mut row[FRAME_BYTES..];
        // Six numbers of 8 bytes, eleven of 4, two of 2, five of 1.
        content[6 * 8 + 11 * 4 + 2 * 2 + 5] = count;
        let content = content.to_vec();
        reframe(&mut row, &content);
        assert!(super::record::raw(&row).is_some(), "the frame fits");
        let mut file = bytes.clone();
        file.extend_from_slice(&row);
        let file = read(&file);
        assert_eq!(file.decisions.len(), 1);
        assert_eq!(file.damage.map(|damage| damage.from), Some(good as u64));
    }
}

fn reframe(row: &mut [u8], content: &[u8]) {
    let seed = u64::from(row[0]) << 32 | 7;
    let check = xxhash_rust::xxh3::xxh3_64_with_seed(content, seed) as u32;
    row[8..12].copy_from_slice(&check.to_le_bytes());
    let Some(Raw { len, .. }) = super::record::raw(row) else {
        panic!("a frame that fits");
    };
    assert_eq!(len, row.len());
}

#[test]
fn sketches_tell_how_far_two_prompts_are_the_same() {
    assert!(GRID.is_sorted_by(|a, b| a < b) && GRID[0] == 1);
    assert!(GRID[GRID.len() - 1] >= 4096, "{}", GRID[GRID.len() - 1]);
    let first = chain(100);
    let mut next = chain(300);
    let sketch = Sketch::of(&first, 0);
    assert_eq!((sketch.blocks, sketch.matched_blocks), (100, 0));
    // The next turn looked at a match of all of the first: the two meet at its very end.
    let after = Sketch::of(&next, 100);
    let meet = |a: &Sketch, b: &Sketch| {
        let theirs: Vec<(u32, u32)> = b.points().collect();
        a.points().filter(|point| theirs.contains(point)).max()
    };
    assert_eq!(meet(&sketch, &after).map(|(blocks, _)| blocks), Some(100));
    for hash in &mut next[20..] {
        hash.0 ^= 1;
    }
    let other = Sketch::of(&next, 0);
    assert_eq!(meet(&sketch, &other).map(|(blocks, _)| blocks), Some(20));
    assert_eq!(Sketch::of(&[], 0), Sketch::NONE);
}

#[test]
fn the_ring_knows_the_last_decisions_by_request_and_number() {
    let mut recent = Recent::new(4);
    let numbers: Vec<u64> = (0..6).map(|n| recent.add(&decided(n, n % 2))).collect();
    assert!(recent.find(numbers[1]).is_none() && recent.find(6).is_none());
    assert!(recent.find(u64::MAX).is_none());
    recent.find(numbers[4]).unwrap().result = Some("good");
    let exchanges = |known: Vec<Remembered>| {
        let known = known.iter().map(|known| known.decided.exchange);
        known.collect::<Vec<_>>()
    };
    assert_eq!(exchanges(recent.recall(0)), [2, 4]);
    assert_eq!(exchanges(recent.recall(1)), [3, 5]);
    assert_eq!(recent.recall(0)[1].result, Some("good"));
    assert!(recent.recall(7).is_empty());
    let mut none = Recent::new(0);
    let number = none.add(&decided(1, 1));
    assert!(none.find(number).is_none() && none.recall(1).is_empty());
}

#[test]
fn a_full_mailbox_drops_at_once() {
    let (mut pen, _inlets) = super::log::unread_pen();
    let sketch = Sketch::of(&chain(547), 32);
    let taken = (0..10_000).filter(|n| pen.decided(&decided(*n, 1), &sketch));
    assert_eq!(taken.count(), 2048);
    let start = Instant::now();
    for n in 0..10_000 {
        assert!(!pen.decided(&decided(n, 1), &sketch));
    }
    assert!(start.elapsed() < Duration::from_secs(2), "nothing waits");
    assert_eq!((0..3000).filter(|n| pen.ended(&ended(*n))).count(), 2048);
}

#[test]
fn the_writer_names_workers_before_their_decisions_and_again_in_a_new_file() {
    let path = std::env::temp_dir().join(format!("corelane-decisions-{}", std::process::id()));
    let moved = path.with_extension("1");
    let (log, writer, mut pens) = start(&path, 7, 2, 8).unwrap();
    let sketch = Sketch::of(&chain(10), 0);
    let id = WorkerId {
        slot: Slot(3),
        incarnation: 2,
    };
    assert!(!pens[0].knows(id));
    pens[0].tell(id, Role::Prefill, &worker(3).url);
    assert!(pens[0].knows(id) && !pens[1].knows(id));
    assert!(pens[0].decided(&decided(1, 1), &sketch));
    assert!(pens[1].ended(&ended(1)));
    let is_there = || std::fs::read(&path).is_ok_and(|bytes| read(&bytes).ends.len() == 1);
    let end = Instant::now() + Duration::from_secs(10);
    while !is_there() {
        assert!(Instant::now() < end, "written in time");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::rename(&path, &moved).unwrap();
    log.reopen();
    while !path.exists() {
        assert!(Instant::now() < end, "opened in time");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(pens[0].decided(&decided(2, 1), &sketch));
    drop(writer);
    for (path, exchange, end_count) in [(&moved, 1, 1), (&path, 2, 0)] {
        let bytes = std::fs::read(path).unwrap();
        let file = read(&bytes);
        assert_eq!(
            (file.damage, file.workers.as_slice()),
            (None, &[worker(3)][..])
        );
        assert_eq!(file.decisions, [(7, decided(exchange, 1), sketch)]);
        assert_eq!(file.ends.len(), end_count);
        let (mut kinds, mut rest) = (Vec::new(), &bytes[..]);
        while let Some(raw) = super::record::raw(rest) {
            kinds.push(raw.kind);
            rest = &rest[raw.len..];
        }
        assert_eq!(kinds[..3], [1, 2, 3], "header, worker, decision (D2)");
        std::fs::remove_file(path).unwrap();
    }
    assert_eq!(log.lost_count(), 0);
}
