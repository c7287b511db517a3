//! Logs made by hand: whose conversation goes on, what is shared, who was there, and what the log itself says.

use shards::PrefixHash;

use super::super::world::{Setup, run};
use super::*;
use crate::decisions::{HELD_COUNT_MAX, Held, WorkerRow};
use crate::route::{BLOCK_BYTES, PolicyKind, Reason};
use crate::sim::engine::Speeds;
use crate::sim::policy::AS_LOGGED;

/// A prompt's chain: runs of blocks, each of some text.
fn chain(runs: &[(u64, u64)]) -> Vec<PrefixHash> {
    let mut chain = Vec::new();
    let mut link = 1;
    for (text, blocks) in runs {
        for n in 0..*blocks {
            link = mix(link, text << 32 | n);
            chain.push(PrefixHash(link.max(1)));
        }
    }
    chain
}

struct Log {
    file: LogFile,
    policy: PolicyKind,
}

impl Log {
    fn new(policy: PolicyKind) -> Log {
        let mut file = LogFile::default();
        for slot in 0..2 {
            file.workers.push(WorkerRow {
                run: 1,
                slot: Slot(slot),
                incarnation: 1,
                role: Role::Regular,
                url: format!("http://w{slot}").into(),
            });
        }
        Log { file, policy }
    }

    /// A request at some second for a worker; its answer ends two seconds later, the first byte after one.
    fn ask(&mut self, at_s: u64, slot: u16, chain: &[PrefixHash], matched: usize, session: u64) {
        let exchange = self.file.decisions.len() as u64 + 1;
        let decided = Decided {
            exchange,
            at_us: 1_000_000_000 + at_s * 1_000_000,
            request: 1,
            session,
            model: 0,
            prompt_bytes: chain.len() as u64 * BLOCK_BYTES as u64 + 40,
            matched_bytes: bytes_of_blocks(matched) as u32,
            slot: Slot(slot),
            incarnation: 1,
            load: 0,
            least_load: None,
            candidate_count: 2,
            given_up: None,
            role: Role::Regular,
            route: Route::ChatCompletions,
            policy: self.policy,
            reason: Reason::Affinity as u8,
            attempt: 0,
            held_count: 0,
            held: [Held::default(); HELD_COUNT_MAX],
        };
        let sketch = Sketch::of(chain, matched);
        self.file.decisions.push((1, decided, sketch));
        let ended = Ended {
            exchange,
            request: 1,
            at_us: decided.at_us + 2_000_000,
            duration_us: 2_000_000,
            first_byte_us: 1_000_000,
            wait_us: 0,
            request_bytes: decided.prompt_bytes,
            answer_bytes: 2000,
            event_count: 11,
            status: 200,
            outcome: shared::Outcome::Ok,
            route: decided.route,
            retries: 0,
            is_event_stream: true,
        };
        self.file.ends.push((1, ended));
    }
}

fn shared_tokens(a: &Content, b: &Content) -> usize {
    let (a, b) = (a.blocks(1, 0), b.blocks(1, 0));
    a.iter().zip(&b).take_while(|(a, b)| a == b).count()
}

#[test]
fn the_next_turn_goes_on_from_the_last_one_and_begins_with_its_answer() {
    // With the match that the router found, and without: there the begin's end says enough.
    for (policy, matched) in [(PolicyKind::CacheAware, 300), (PolicyKind::RoundRobin, 0)] {
        let mut log = Log::new(policy);
        log.ask(0, 0, &chain(&[(1, 300)]), 0, 0);
        log.ask(10, 0, &chain(&[(1, 300), (2, 50)]), matched, 0);
        log.ask(11, 1, &chain(&[(9, 200)]), 0, 0);
        let replay = replay(&log.file, false).unwrap();
        let sessions = &replay.workload.sessions;
        assert_eq!(sessions.len(), 2, "{policy:?}");
        let [first, next] = &sessions[0].turns[..] else {
            panic!("{} turns", sessions[0].turns.len());
        };
        assert_eq!((first.pause, next.pause), (0, 8_000_000_000));
        assert_eq!(first.output_tokens, 10);
        // All of the first but its last, unfinished block's token of its own; then its answer.
        let whole = u64::from(first.content.tokens());
        assert_eq!(whole, (300 * 128 + 40) / 4);
        let shared = shared_tokens(&first.content, &next.content) as u64;
        assert!((whole - 1..=whole).contains(&shared), "{shared} of {whole}");
        let cached = next.content.blocks(64, 0);
        let made = first.content.blocks(64, first.output_tokens);
        let held = cached.iter().zip(&made).take_while(|(a, b)| a == b);
        assert!(held.count() as u64 >= whole / 64);
        assert_eq!(replay.worker_counts, [2, 0]);
    }
}

#[test]
fn what_parts_between_two_hashes_is_shared_up_to_the_routers_match() {
    let mut log = Log::new(PolicyKind::CacheAware);
    log.ask(0, 0, &chain(&[(1, 140), (2, 300)]), 0, 0);
    log.ask(1, 1, &chain(&[(1, 140), (3, 300)]), 140, 0);
    let with_match = replay(&log.file, false).unwrap();
    let text =
        |replay: &Replay, n: usize| Arc::clone(&replay.workload.sessions[n].turns[0].content);
    let of = |replay: &Replay| shared_tokens(&text(replay, 0), &text(replay, 1));
    assert_eq!(of(&with_match), 140 * 128 / 4);
    // Without it, up to the last place where both have the same hash.
    let mut log = Log::new(PolicyKind::LeastLoaded);
    log.ask(0, 0, &chain(&[(1, 140), (2, 300)]), 0, 0);
    log.ask(1, 1, &chain(&[(1, 140), (3, 300)]), 0, 0);
    assert_eq!(of(&replay(&log.file, false).unwrap()), 128 * 128 / 4);
}

#[test]
fn turns_of_a_named_session_that_overlap_are_not_made_to_wait_for_each_other() {
    let mut log = Log::new(PolicyKind::RendezvousHash);
    for (at, text) in [(0, 1), (1, 2), (5, 3)] {
        log.ask(at, 0, &chain(&[(text, 20)]), 0, 77);
    }
    let closed = replay(&log.file, false).unwrap();
    let starts: Vec<(u64, usize)> = closed
        .workload
        .sessions
        .iter()
        .map(|session| (session.start / 1_000_000_000, session.turns.len()))
        .collect();
    assert_eq!(starts, [(0, 1), (1, 2)]);
    assert!(closed.workload.sessions.iter().all(|s| s.name == 77));
    let open = replay(&log.file, true).unwrap();
    assert_eq!(open.workload.sessions.len(), 3);
}

#[test]
fn the_log_says_what_happened_and_the_same_choices_give_the_same_hits() {
    let mut log = Log::new(PolicyKind::CacheAware);
    let mut wanted = (0, 0);
    for turn in 0..20_u64 {
        for agent in 0..4_u64 {
            let blocks = 40 + 10 * turn;
            let matched = if turn == 0 { 0 } else { blocks as usize - 10 };
            let prompt = chain(&[(agent + 1, blocks)]);
            log.ask(
                turn * 10 + agent,
                (agent % 2) as u16,
                &prompt,
                matched,
                agent + 1,
            );
            wanted.0 += (blocks * 128 + 40) / 4;
            wanted.1 += matched as u64 * 128 / 4;
        }
    }
    let replay = replay(&log.file, false).unwrap();
    let really = &replay.really;
    assert_eq!((really.prompt_tokens, really.cached_tokens), wanted);
    assert_eq!(
        (really.requests, really.failed, really.sessions),
        (80, 0, 4)
    );
    assert_eq!(really.output_tokens, 800);
    assert_eq!(really.first_quantile(0.5), 1.0);
    assert!((really.step_quantile(0.5) - 1.0 / 9.0).abs() < 0.01);
    assert!((really.hit_rate() - wanted.1 as f64 / wanted.0 as f64).abs() < 1e-9);
    let simulate = |policy: &str| {
        let setup = Setup {
            logged: Some(Arc::clone(&replay.logged)),
            ..Setup::plain(2, Speeds::default(), policy)
        };
        run(&setup, &replay.workload).unwrap()
    };
    let (same, turns) = (simulate(AS_LOGGED), simulate("round_robin"));
    assert_eq!(same.requests, 80);
    assert_eq!(
        same.workers[0].iter().map(|w| w.chosen).collect::<Vec<_>>(),
        [40, 40]
    );
    assert!(
        (same.hit_rate() - really.hit_rate()).abs() < 0.03,
        "{} and {}",
        same.hit_rate(),
        really.hit_rate()
    );
    assert!(turns.hit_rate() < same.hit_rate() + 0.01);
    assert_eq!(simulate("cache_aware").failed, 0);
}

#[test]
fn two_legs_are_one_request_and_the_last_attempt_counts() {
    let mut log = Log::new(PolicyKind::CacheAware);
    log.file.workers[0].role = Role::Prefill;
    log.file.workers[1].role = Role::Decode;
    log.file.workers.push(WorkerRow {
        slot: Slot(2),
        url: "http://w2".into(),
        ..log.file.workers[1].clone()
    });
    log.ask(0, 1, &chain(&[(1, 20)]), 0, 0);
    let (run, decode, sketch) = log.file.decisions[0];
    let decode = Decided {
        role: Role::Decode,
        ..decode
    };
    let prefill = Decided {
        role: Role::Prefill,
        slot: Slot(0),
        matched_bytes: 512,
        ..decode
    };
    let again = Decided {
        slot: Slot(2),
        at_us: decode.at_us + 500_000,
        attempt: 1,
        ..decode
    };
    log.file.decisions = [decode, prefill, again].map(|d| (run, d, sketch)).into();
    let replay = replay(&log.file, false).unwrap();
    assert_eq!(replay.worker_counts, [2, 2]);
    assert_eq!(replay.workload.request_count(), 1);
    let workers = &replay.really.workers;
    assert_eq!((workers[0][0].chosen, workers[1][0].chosen), (1, 0));
    assert_eq!(
        (workers[1][1].chosen, replay.really.cached_tokens),
        (1, 128)
    );
}

#[test]
fn a_log_without_requests_says_so() {
    let log = Log::new(PolicyKind::CacheAware);
    assert!(
        replay(&log.file, false)
            .unwrap_err()
            .contains("no decision")
    );
    let noise = crate::decisions::read(&[7; 100]);
    let error = replay(&noise, false).unwrap_err();
    assert!(error.contains("100 bytes cannot be read"), "{error}");
}
