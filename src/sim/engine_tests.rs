//! Steps, chunks and blocks of one simulated worker, by hand.

use super::*;

fn speeds() -> Speeds {
    Speeds {
        prefill_tokens_per_s: 1000.0,
        request_s: 0.0,
        step_tokens_max: 500,
        decode_step_s: 0.010,
        decode_sequence_s: 0.0,
        decode_context_s: 0.0,
        kv_tokens: 1600,
        kv_block_tokens: 16,
        transfer_tokens_per_s: 10_000.0,
        transfer_s: 0.0,
        ..Speeds::default()
    }
}

fn job(id: usize, part: Part, prompt_tokens: u32, output_tokens: u32) -> Job {
    let name = |index: u32| (id as u64) << 32 | u64::from(index);
    Job {
        id,
        part,
        prompt_tokens,
        output_tokens,
        blocks: (0..prompt_tokens / 16).map(name).collect(),
    }
}

/// Runs until it is idle; what it said, with the time in ms.
fn run(engine: &mut Engine, mut now: Ns) -> Vec<(u64, Said)> {
    let mut said = Vec::new();
    let mut end = engine.poke(now);
    while let Some(at) = end {
        now = at;
        end = engine.end(now);
        said.extend(engine.said.drain(..).map(|said| (now / 1_000_000, said)));
    }
    said
}

#[test]
fn a_prompt_takes_its_tokens_at_the_rate_and_an_answer_its_steps() {
    let mut engine = Engine::new(speeds());
    engine.submit(job(7, Part::Whole, 800, 11));
    let said = run(&mut engine, 0);
    let times: Vec<_> = said
        .iter()
        .filter(|(_, said)| !matches!(said, Said::Began { .. }))
        .collect();
    assert_eq!(times, [&(800, Said::First(7)), &(900, Said::Done(7))]);
    assert_eq!(
        (engine.kv.pinned(), engine.job_count(), engine.context),
        (0, 0, 0)
    );
    // The same prompt again: all but the last token's block is here.
    engine.submit(job(7, Part::Whole, 800, 1));
    let said = run(&mut engine, 0);
    assert!(said.contains(&(16, Said::Done(7))), "{said:?}");
}

#[test]
fn what_runs_goes_on_while_prompts_come() {
    let mut engine = Engine::new(speeds());
    engine.submit(job(1, Part::Whole, 100, 1000));
    let mut end = engine.poke(0).unwrap();
    end = engine.end(end).unwrap();
    assert!(end > ns(9.0));
    engine.submit(job(2, Part::Prefill, 100, 1));
    // The step under way, 100 to 110 ms, ends before.
    let cut = engine.poke(ns(0.105)).unwrap();
    assert_eq!(cut / 1_000_000, 110);
    let mixed = engine.end(cut).unwrap();
    // 100 tokens and a decode step.
    assert_eq!(mixed / 1_000_000, 220);
    engine.end(mixed);
    assert!(engine.said.contains(&Said::Done(2)));
}

#[test]
fn what_does_not_fit_waits_for_room_and_what_never_fits_is_said() {
    let mut engine = Engine::new(speeds());
    engine.submit(job(1, Part::Prefill, 1000, 1));
    engine.submit(job(2, Part::Prefill, 1000, 1));
    engine.submit(job(3, Part::Prefill, 2000, 1));
    let said = run(&mut engine, 0);
    assert!(said.contains(&(1000, Said::Done(1))), "{said:?}");
    assert!(said.contains(&(2000, Said::Done(2))), "{said:?}");
    assert!(said.iter().any(|(_, said)| *said == Said::TooLong(3)));
    assert_eq!((engine.job_count(), engine.kv.pinned()), (0, 0));
}

#[test]
fn a_decode_job_fetches_what_it_does_not_hold() {
    let mut engine = Engine::new(speeds());
    engine.submit(job(1, Part::Decode, 1000, 3));
    let begun = engine.fetch(0);
    assert_eq!(begun, [(0, ns(0.1))]);
    assert_eq!(engine.poke(0), None);
    engine.fetched(0);
    let said = run(&mut engine, ns(0.1));
    assert_eq!(said, [(110, Said::First(1)), (130, Said::Done(1))]);
    engine.submit(job(1, Part::Decode, 1000, 3));
    // 62 blocks of 16 are here: 8 tokens are not.
    assert_eq!(engine.fetch(0), [(0, ns(0.0008))]);
}

#[test]
fn a_stall_lasts_and_a_restart_loses_all() {
    let mut engine = Engine::new(speeds());
    engine.submit(job(1, Part::Whole, 100, 100));
    let end = engine.poke(0).unwrap();
    let end = engine.end(end).unwrap();
    let cut = engine.stall(ns(0.205), ns(5.0)).unwrap();
    assert!(cut < end);
    assert_eq!(engine.end(cut), None);
    assert!(engine.poke(ns(5.0)).is_some());
    engine.submit(job(2, Part::Prefill, 10, 1));
    let mut lost = engine.restart();
    lost.sort_unstable();
    assert_eq!(
        (lost, engine.job_count(), engine.kv.used()),
        (vec![1, 2], 0, 0)
    );
}

#[test]
fn what_has_not_begun_can_be_taken_back() {
    let mut engine = Engine::new(speeds());
    engine.stall(0, ns(5.0));
    engine.submit(job(1, Part::Decode, 160, 10));
    assert_eq!(engine.fetch(0).len(), 1);
    engine.submit(job(2, Part::Whole, 160, 10));
    assert!(engine.abort(1) && engine.abort(2) && !engine.abort(1) && !engine.abort(3));
    engine.fetched(0);
    assert_eq!(run(&mut engine, ns(5.0)), []);
    assert_eq!((engine.job_count(), engine.kv.pinned()), (0, 0));
    engine.submit(job(4, Part::Whole, 160, 10));
    engine.poke(ns(6.0)).unwrap();
    assert!(!engine.abort(4));
}
