//! On a fake clock, with counters as cores would bring them: each rule, each thing that must never happen, and the
//! stories of issue 4.

use super::*;
use crate::config::Config;
use crate::route::Rng;

const TICK: Duration = Duration::from_millis(250);

fn config() -> StandingConfig {
    Config::default_for_tests().standing
}

fn secs(count: f64) -> Duration {
    Duration::from_secs_f64(count)
}

/// A pool and its judge.
struct Feed {
    judge: Standings<usize>,
    config: StandingConfig,
    now: Duration,
    seen: Vec<(usize, Observation)>,
    rng: Rng,
    was_any_out: bool,
}

impl Feed {
    fn new(count: usize, role: Role, config: StandingConfig) -> Feed {
        let fresh = Observation::new(role);
        let mut feed = Feed {
            judge: Standings::new(config, secs(10.0)),
            config,
            now: secs(1000.0),
            seen: (0..count).map(|key| (key, fresh)).collect(),
            rng: Rng::new(7),
            was_any_out: false,
        };
        feed.tick();
        feed
    }

    fn regular(count: usize) -> Feed {
        Feed::new(count, Role::Regular, config())
    }

    fn of(&mut self, key: usize) -> &mut Observation {
        &mut self.seen[key].1
    }

    fn tick(&mut self) -> Vec<(usize, Standing)> {
        self.now += TICK;
        let changed = self.judge.judge(self.now, &self.seen);
        self.was_any_out |= !self.all_good();
        changed
    }

    /// Ticks for a time; before each, `each` moves the counters.
    fn run(&mut self, time: f64, mut each: impl FnMut(&mut Feed)) {
        for _ in 0..(time / TICK.as_secs_f64()).round() as usize {
            each(self);
            self.tick();
            self.check_invariants();
        }
    }

    /// The same until the worker is out; seconds that took.
    fn seconds_until_out(&mut self, key: usize, time: f64, mut each: impl FnMut(&mut Feed)) -> f64 {
        let begin = self.now;
        while !matches!(self.standing(key), Standing::Out { .. }) {
            assert!(self.now - begin < secs(time), "not out after {time} s");
            self.run(TICK.as_secs_f64(), &mut each);
        }
        (self.now - begin).as_secs_f64()
    }

    fn standing(&self, key: usize) -> Standing {
        self.judge.standing(key)
    }

    fn transitions(&self, key: usize) -> Transitions {
        self.judge.transitions(key)
    }

    fn why(&self, key: usize) -> Option<Why> {
        match self.standing(key) {
            Standing::Out { why } => Some(why),
            _ => None,
        }
    }

    fn is_good(&self, key: usize) -> bool {
        matches!(self.standing(key), Standing::Good { .. })
    }

    fn all_good(&self) -> bool {
        self.seen.iter().all(|&(key, _)| self.is_good(key))
    }

    /// Also at the ticks in between.
    fn were_always_good(&self) -> bool {
        !self.was_any_out
    }

    fn check_invariants(&self) {
        for role in Role::ALL {
            let of_role = |w: &&Worker<usize>| w.seen.role == role && w.is_ready();
            let pool: Vec<_> = self.judge.workers.iter().filter(of_role).collect();
            let is_ejected = |w: &&&Worker<usize>| !matches!(w.why(), None | Some(Why::Refused));
            let ejected = pool.iter().filter(is_ejected).count();
            assert!(ejected as f64 <= pool.len() as f64 * self.config.ejected_share_max);
            assert!(pool.is_empty() || pool.iter().any(|w| w.is_good()));
        }
    }

    fn poisson(&mut self, mean: f64) -> u64 {
        let (limit, mut product, mut count) = ((-mean).exp(), 1.0, 0);
        loop {
            product *= self.rng.next() as f64 / u64::MAX as f64;
            if product <= limit {
                return count;
            }
            count += 1;
        }
    }

    /// Requests that came and went within the tick, or nearly.
    fn serve(&mut self, key: usize, count: u64, in_flight: u32) {
        let seen = self.of(key);
        seen.chosen += count;
        seen.successes += count;
        seen.pieces += count;
        seen.completions += count;
        (seen.in_flight, seen.waiting) = (in_flight, in_flight);
    }

    /// Streams that go on.
    fn stream(&mut self, key: usize, streams: u32, pieces: u64) {
        let seen = self.of(key);
        seen.pieces += pieces;
        (seen.in_flight, seen.waiting) = (streams, 0);
    }

    fn fail(&mut self, key: usize, count: u64) {
        self.of(key).failures += count;
        self.of(key).chosen += count;
    }

    /// Requests that came and wait.
    fn hold(&mut self, key: usize, count: u32, bytes: u64) {
        let seen = self.of(key);
        seen.chosen += u64::from(count);
        seen.in_flight += count;
        if seen.role != Role::Decode {
            // A decode seat waits while its prompt is computed, and has been sent its request afterwards.
            seen.waiting += count;
            seen.waiting_bytes += bytes;
        }
    }
}

// Breaker.

#[test]
fn a_worker_opens_at_the_threshold_and_closes_after_good_trials() {
    let mut feed = Feed::regular(2);
    feed.fail(0, 9);
    feed.tick();
    assert!(feed.all_good());
    feed.fail(0, 1);
    let changed = feed.tick();
    assert_eq!(changed, [(0, Standing::Out { why: Why::Failing })]);
    feed.run(59.5, |_| {});
    assert_eq!(feed.why(0), Some(Why::Failing));
    feed.run(0.5, |_| {});
    let (why, load_max) = (Why::Failing, 0);
    assert_eq!(feed.standing(0), Standing::Trial { why, load_max });
    feed.of(0).trials_good += 2;
    feed.tick();
    assert!(!feed.is_good(0));
    feed.of(0).trials_good += 1;
    feed.tick();
    assert_eq!(feed.standing(0), Standing::Good { share: 0.1 });
    // What it failed before is forgiven.
    feed.fail(0, 9);
    feed.tick();
    assert!(feed.is_good(0));
}

#[test]
fn one_bad_trial_opens_again_for_the_whole_time() {
    let mut feed = Feed::regular(2);
    feed.fail(0, 10);
    feed.run(60.25, |_| {});
    feed.of(0).trials_good += 5;
    feed.of(0).trials_bad += 1;
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Failing));
    feed.run(59.5, |_| {});
    assert_eq!(feed.why(0), Some(Why::Failing));
}

#[test]
fn late_results_are_no_trials() {
    let mut feed = Feed::regular(2);
    feed.fail(0, 10);
    feed.run(60.25, |_| {});
    assert!(matches!(feed.standing(0), Standing::Trial { .. }));
    feed.fail(0, 50);
    feed.of(0).successes += 50;
    feed.tick();
    assert!(matches!(feed.standing(0), Standing::Trial { .. }));
}

#[test]
fn few_failures_among_many_successes_open_nothing_and_old_ones_do_not_count() {
    let mut feed = Feed::regular(2);
    feed.run(300.0, |feed| {
        feed.serve(0, 3, 0);
        feed.fail(0, 2);
    });
    assert!(feed.were_always_good());
    let mut feed = Feed::regular(2);
    for _ in 0..30 {
        feed.fail(0, 1);
        feed.run(14.0, |_| {});
    }
    assert!(feed.were_always_good(), "9 within 120 s");
}

/// A whole window of successes must not have to be matched by as many failures.
#[test]
fn a_worker_that_dies_after_a_busy_time_opens_as_quickly() {
    let mut feed = Feed::regular(2);
    feed.run(100.0, |feed| feed.serve(0, 12, 1));
    let time = feed.seconds_until_out(0, 5.0, |feed| feed.fail(0, 12));
    assert!(time <= 1.5, "{time}");
    assert_eq!(feed.why(0), Some(Why::Failing));
    let [[_, opened, _], [..], [..]] = feed.transitions(0);
    assert_eq!(opened, 1);
    assert_eq!(feed.transitions(1), Transitions::default());
}

#[test]
fn half_failing_opens_and_neutral_answers_in_between_change_nothing() {
    let mut feed = Feed::regular(2);
    let time = feed.seconds_until_out(0, 30.0, |feed| {
        feed.fail(0, 1);
        feed.of(0).chosen += 1; // a 400
    });
    assert!((2.0..4.0).contains(&time));
    let mut feed = Feed::regular(2);
    feed.seconds_until_out(0, 30.0, |feed| {
        feed.fail(0, 1);
        feed.serve(0, 1, 0);
    });
}

#[test]
fn without_the_breaker_failures_open_nothing() {
    let mut feed = Feed::new(
        2,
        Role::Regular,
        StandingConfig {
            has_breaker: false,
            ..config()
        },
    );
    feed.run(10.0, |feed| feed.fail(0, 20));
    assert!(feed.were_always_good());
}

/// A reload: a shorter time counts for who is out already, and a cause that is judged no more frees at once.
#[test]
fn other_settings_hold_from_the_next_tick_on() {
    let mut feed = Feed::regular(4);
    feed.fail(0, 10);
    feed.fail(1, 10);
    feed.run(10.0, |_| {});
    assert_eq!(
        (feed.why(0), feed.why(1)),
        (Some(Why::Failing), Some(Why::Failing))
    );
    let shorter = StandingConfig {
        breaker_timeout: secs(5.0),
        failure_threshold: 3,
        ..config()
    };
    feed.judge.configure(shorter, secs(10.0));
    feed.tick();
    assert!(matches!(feed.standing(0), Standing::Trial { .. }));
    let off = StandingConfig {
        has_breaker: false,
        ..config()
    };
    feed.judge.configure(off, secs(10.0));
    feed.tick();
    assert!(feed.is_good(0) && feed.is_good(1));
    feed.judge.configure(shorter, secs(10.0));
    feed.fail(2, 3);
    feed.tick();
    assert_eq!(feed.why(2), Some(Why::Failing));
}

#[test]
fn a_trial_that_ends_in_no_way_frees_its_seat() {
    let mut feed = Feed::regular(2);
    feed.fail(0, 10);
    feed.of(0).in_flight = 3;
    feed.run(60.25, |_| {});
    let trial = |load_max| Standing::Trial {
        why: Why::Failing,
        load_max,
    };
    assert_eq!(feed.standing(0), trial(3));
    // The held ones end: the seat follows, and a running trial keeps it.
    feed.of(0).in_flight = 1;
    feed.tick();
    assert_eq!(feed.standing(0), trial(1));
    feed.hold(0, 1, 10);
    feed.run(4.0, |_| {});
    assert_eq!(feed.standing(0), trial(1));
    // Hangs: after its limit the next may begin.
    feed.run(2.0, |_| {});
    assert_eq!(feed.standing(0), trial(2));
    feed.hold(0, 1, 10);
    feed.tick();
    assert_eq!(feed.standing(0), trial(2));
    // Its client leaves.
    feed.of(0).in_flight = 0;
    feed.tick();
    assert_eq!(feed.standing(0), trial(0));
}

#[test]
fn a_pool_that_fails_as_a_whole_keeps_half_and_a_pool_of_one_its_worker() {
    for (count, left) in [(1, 1), (2, 1), (3, 2), (4, 2), (9, 5)] {
        let mut feed = Feed::regular(count);
        feed.run(30.0, |feed| (0..count).for_each(|key| feed.fail(key, 5)));
        let good = (0..count).filter(|&key| feed.is_good(key)).count();
        assert_eq!(good, left, "of {count}");
    }
    // Also where the flag would allow all.
    let mut feed = Feed::new(
        3,
        Role::Regular,
        StandingConfig {
            ejected_share_max: 1.0,
            ..config()
        },
    );
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.fail(key, 5)));
    assert_eq!((0..3).filter(|&key| feed.is_good(key)).count(), 1);
}

#[test]
fn the_only_healthy_worker_that_leaves_brings_back_one_that_is_out() {
    let mut feed = Feed::regular(2);
    feed.fail(0, 10);
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Failing));
    feed.of(1).is_ready = false;
    feed.tick();
    assert!(feed.is_good(0));
    // Also where all but one may be out.
    let all = StandingConfig {
        ejected_share_max: 1.0,
        ..config()
    };
    let mut feed = Feed::new(3, Role::Regular, all);
    (0..2).for_each(|key| feed.fail(key, 10));
    feed.tick();
    assert!(feed.why(0).is_some() && feed.why(1).is_some());
    feed.of(2).is_ready = false;
    feed.tick();
    assert!(feed.is_good(0) != feed.is_good(1));
}

#[test]
fn roles_are_pools_of_their_own() {
    let mut feed = Feed::new(2, Role::Decode, config());
    feed.of(1).role = Role::Prefill;
    feed.tick();
    feed.run(10.0, |feed| feed.fail(0, 20));
    assert!(feed.were_always_good(), "the last decode worker stays");
}

// Refused.

#[test]
fn a_refused_connection_takes_out_at_once_and_a_good_probe_brings_back() {
    let mut feed = Feed::regular(2);
    // As many were refused as streams broke off.
    feed.of(0).refused += 64;
    feed.of(0).failures += 128;
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Refused));
    // Bad probes keep it out, without a trial.
    for _ in 0..4 {
        feed.of(0).probes_bad += 1;
        feed.run(9.0, |_| {});
        assert_eq!(feed.why(0), Some(Why::Refused));
    }
    feed.of(0).probes_good += 1;
    feed.tick();
    assert_eq!(feed.standing(0), Standing::Good { share: 0.1 });
    // The breaker saw one process go, not 64 failures.
    feed.fail(0, 2);
    feed.tick();
    assert!(feed.is_good(0));
}

#[test]
fn a_refused_worker_of_which_probes_say_nothing_is_tried() {
    let mut feed = Feed::regular(2);
    feed.of(0).refused += 1;
    feed.of(0).failures += 1;
    feed.run(10.5, |_| {});
    assert_eq!(feed.why(0), Some(Why::Refused));
    feed.run(2.0, |_| {});
    assert!(matches!(
        feed.standing(0),
        Standing::Trial {
            why: Why::Refused,
            ..
        }
    ));
    feed.of(0).trials_bad += 1;
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Refused));
    feed.run(12.5, |_| {});
    feed.of(0).trials_good += 1;
    feed.tick();
    assert!(feed.is_good(0));
}

#[test]
fn all_but_one_may_be_refused_and_if_all_are_all_stay() {
    let refuse = |feed: &mut Feed, key: usize| {
        feed.of(key).refused += 1;
        feed.of(key).failures += 1;
    };
    let mut feed = Feed::regular(3);
    refuse(&mut feed, 0);
    refuse(&mut feed, 1);
    feed.tick();
    assert_eq!(
        (feed.why(0), feed.why(1)),
        (Some(Why::Refused), Some(Why::Refused))
    );
    refuse(&mut feed, 2);
    feed.tick();
    assert!(feed.all_good());
    // And they are not thrown out one after the other while none works.
    feed.run(5.0, |feed| (0..3).for_each(|key| refuse(feed, key)));
    assert!(feed.all_good());
    // That they were refused is nothing for the breaker.
    feed.fail(0, 1);
    feed.tick();
    assert!(feed.all_good());
    // One works: the others go.
    feed.serve(1, 1, 0);
    refuse(&mut feed, 0);
    refuse(&mut feed, 2);
    feed.tick();
    assert!(feed.is_good(1) && feed.why(0).is_some() && feed.why(2).is_some());
    // So they do when a probe says it.
    let mut feed = Feed::regular(2);
    (0..2).for_each(|key| refuse(&mut feed, key));
    feed.tick();
    refuse(&mut feed, 0);
    feed.of(1).probes_good += 1;
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Refused));
}

#[test]
fn a_worker_refused_again_and_again_between_good_probes_is_failing() {
    let mut feed = Feed::regular(2);
    for _ in 0..10 {
        feed.of(0).refused += 1;
        feed.of(0).failures += 1;
        feed.tick();
        feed.of(0).probes_good += 1;
        feed.run(2.0, |_| {});
    }
    assert_eq!(feed.why(0), Some(Why::Failing));
}

// Slow start.

#[test]
fn who_rested_because_he_was_told_to_has_his_share_at_once() {
    let rest = |feed: &mut Feed| {
        (feed.of(0).is_ready, feed.of(0).is_resting) = (false, true);
        feed.run(30.0, |_| {});
        (feed.of(0).is_ready, feed.of(0).is_resting) = (true, false);
        feed.tick();
    };
    let mut feed = Feed::regular(2);
    feed.tick();
    rest(&mut feed);
    assert_eq!(feed.standing(0), Standing::NEW);
    // Not one who was out before.
    feed.fail(0, 10);
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Failing));
    rest(&mut feed);
    assert_eq!(feed.standing(0), Standing::Good { share: 0.1 });
}

#[test]
fn a_return_grows_to_its_share_and_a_start_has_it_at_once() {
    let mut feed = Feed::regular(2);
    assert_eq!(feed.standing(0), Standing::NEW);
    feed.of(0).is_ready = false;
    feed.tick();
    assert_eq!(
        feed.standing(0),
        Standing::Good { share: 0.1 },
        "as it will return"
    );
    feed.run(30.0, |_| {});
    feed.of(0).is_ready = true;
    let mut shares = Vec::new();
    feed.run(11.0, |feed| {
        if let Standing::Good { share } = feed.standing(0) {
            shares.push(share);
        }
    });
    assert!(shares.is_sorted() && shares[0] == 0.1 && shares[20] >= 0.4 && shares[20] <= 0.6);
    assert_eq!(feed.standing(0), Standing::NEW);
    shares.dedup();
    assert!(shares.len() <= 11, "published at each tick: {shares:?}");
    // Never ready before: no return.
    let mut feed = Feed::regular(2);
    let mut late = feed.seen[0].1;
    late.is_ready = false;
    feed.seen.push((2, late));
    feed.run(5.0, |_| {});
    feed.of(2).is_ready = true;
    feed.tick();
    assert_eq!(feed.standing(2), Standing::NEW);
}

#[test]
fn counters_that_go_back_are_a_new_life() {
    let mut feed = Feed::regular(2);
    feed.serve(0, 100, 0);
    feed.fail(0, 200);
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Failing));
    let fresh = feed.seen[1].1;
    *feed.of(0) = fresh;
    feed.tick();
    assert_eq!(feed.standing(0), Standing::Good { share: 0.1 });
    feed.judge.remove(0);
    assert_eq!(feed.standing(0), Standing::NEW);
}

// Stalls.

/// Rig scenario s9w: 50 requests a second and worker, 20 ms each, one wedged somewhere within a tick.
#[test]
fn s9w_a_wedged_worker_is_out_within_a_second_and_nobody_before() {
    for seed in 0..40_u64 {
        let mut feed = Feed::regular(4);
        feed.rng = Rng::new(seed);
        let rate = |feed: &mut Feed, key: usize, share: f64| {
            let (count, in_flight) = (feed.poisson(12.5 * share), feed.poisson(1.0) as u32);
            feed.serve(key, count, in_flight);
        };
        feed.run(60.0, |feed| (0..4).for_each(|key| rate(feed, key, 1.0)));
        assert!(feed.all_good(), "seed {seed}");
        let phase = feed.rng.below(250) as f64 / 1000.0;
        let begin = feed.now + secs(phase);
        let mut left = 0.25 - phase;
        rate(&mut feed, 0, phase / 0.25);
        let out = feed.seconds_until_out(0, 2.0, |feed| {
            let held = feed.poisson(50.0 * left) as u32;
            left = 0.25;
            feed.hold(0, held, u64::from(held) * 200);
            (1..4).for_each(|key| rate(feed, key, 1.0));
        });
        assert_eq!(feed.why(0), Some(Why::Stalled));
        assert!(
            feed.now - begin <= secs(1.0),
            "seed {seed}: {out} s, phase {phase}"
        );
        assert!((1..4).all(|key| feed.is_good(key)));
        // Not tried for the rest of the scenario.
        feed.run(8.0, |feed| (1..4).for_each(|key| rate(feed, key, 1.0)));
        assert_eq!(feed.why(0), Some(Why::Stalled));
    }
}

/// Conformance W01: the prefix draws all traffic to the wedged decode worker, so that its peer has nothing to do.
#[test]
fn w01_a_wedged_decode_worker_is_out_within_7_seconds_and_back_at_progress() {
    for (held_secs, has_peer_traffic) in [(0.0, false), (2.0, false), (2.0, true)] {
        let mut feed = Feed::new(2, Role::Decode, config());
        (0..2).for_each(|key| feed.hold(key, 2, 40_000));
        feed.run(held_secs, |_| {});
        (0..2).for_each(|key| {
            feed.serve(key, 8, 0);
            feed.of(key).waiting_bytes = 0;
        });
        feed.run(1.0, |_| {});
        let mut ticks = 0;
        let out = feed.seconds_until_out(0, 10.0, |feed| {
            ticks += 1;
            feed.hold(0, 1 + u32::from(ticks % 4 == 0), 40_000);
            if has_peer_traffic && ticks % 4 == 0 {
                feed.serve(1, 4, 0);
            }
        });
        assert!(out <= 6.5, "{out}");
        let mut tried = 0;
        feed.run(4.0, |feed| {
            tried += usize::from(!matches!(feed.standing(0), Standing::Out { .. }));
            feed.serve(1, 4, 1);
        });
        assert_eq!(tried, 0);
        // The gate opens: what was held ends.
        let held = feed.of(0).in_flight;
        feed.serve(0, u64::from(held), 0);
        feed.tick();
        assert!(matches!(
            feed.standing(0),
            Standing::Trial {
                why: Why::Stalled,
                load_max: 0
            }
        ));
        feed.of(0).chosen += 1;
        feed.of(0).trials_good += 1;
        feed.tick();
        assert_eq!(feed.standing(0), Standing::Good { share: 0.1 });
    }
}

/// A decode engine held 129 requests and said nothing for 61 minutes while its health stayed good.
#[test]
fn an_engine_silent_for_61_minutes_is_left_alone_and_comes_back_by_itself() {
    let mut feed = Feed::new(4, Role::Decode, config());
    let peers = |feed: &mut Feed| (1..4).for_each(|key| feed.stream(key, 100, 1000));
    feed.run(60.0, |feed| {
        peers(feed);
        feed.stream(0, 129, 1300);
    });
    let out = feed.seconds_until_out(0, 10.0, |feed| {
        peers(feed);
        feed.stream(0, 129, 0);
    });
    assert!(out <= 1.0, "{out}");
    let mut trials = 0;
    feed.run(61.0 * 60.0, |feed| {
        peers(feed);
        if let Standing::Trial { load_max, .. } = feed.standing(0)
            && feed.of(0).in_flight <= load_max
        {
            trials += 1;
            feed.hold(0, 1, 100);
        }
    });
    assert!((40..=80).contains(&trials), "{trials} requests lost to it");
    assert!(!feed.is_good(0));
    let in_flight = feed.of(0).in_flight;
    feed.run(2.0, |feed| {
        peers(feed);
        feed.stream(0, in_flight, 1300);
    });
    assert!(feed.is_good(0));
}

#[test]
fn a_stalled_worker_that_lost_all_its_requests_is_tried_and_comes_back() {
    let mut feed = Feed::regular(3);
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.serve(key, 20, 3));
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.serve(key, 20, 3)));
    feed.seconds_until_out(0, 10.0, peers);
    feed.of(0).in_flight = 0;
    feed.run(9.5, peers);
    assert_eq!(feed.why(0), Some(Why::Stalled));
    feed.run(1.0, peers);
    assert!(matches!(
        feed.standing(0),
        Standing::Trial { load_max: 0, .. }
    ));
    // The trial takes longer than its limit and ends well: the next pause is not waited for.
    feed.hold(0, 1, 10);
    feed.run(7.0, peers);
    assert_eq!(feed.why(0), Some(Why::Stalled));
    feed.of(0).in_flight = 0;
    feed.of(0).trials_good += 1;
    feed.tick();
    assert!(feed.is_good(0));
}

/// What is left of before its stall may still come: a trial begins at once, and says nothing of the pause when it fails.
#[test]
fn a_trial_on_a_sign_of_life_that_fails_makes_the_next_pause_no_longer() {
    let mut feed = Feed::regular(3);
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.serve(key, 20, 3));
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.serve(key, 20, 3)));
    feed.seconds_until_out(0, 10.0, peers);
    feed.of(0).pieces += 1;
    feed.tick();
    assert!(matches!(feed.standing(0), Standing::Trial { .. }));
    feed.of(0).in_flight = 0;
    feed.of(0).trials_bad += 1;
    feed.tick();
    assert_eq!(feed.why(0), Some(Why::Stalled));
    feed.run(9.5, peers);
    assert_eq!(feed.why(0), Some(Why::Stalled));
    feed.run(1.0, peers);
    assert!(matches!(feed.standing(0), Standing::Trial { .. }));
}

/// All workers become 10 times slower, once and for all: at several rhythms, with random gaps.
#[test]
fn uniform_overload_ejects_nobody() {
    for (seed, (count, streams, gap)) in [
        (2, 2, 0.02),
        (2, 16, 0.02),
        (3, 2, 0.05),
        (4, 3, 0.05),
        (4, 16, 0.05),
        (8, 2, 0.02),
        (8, 64, 0.1),
    ]
    .into_iter()
    .cycle()
    .take(140)
    .enumerate()
    {
        let mut feed = Feed::regular(count);
        feed.rng = Rng::new(seed as u64);
        for factor in [1.0, 10.0, 1.0] {
            feed.run(60.0, |feed| {
                for key in 0..count {
                    let pieces = feed.poisson(f64::from(streams) * 0.25 / (gap * factor));
                    feed.stream(key, streams, pieces);
                }
                assert!(
                    feed.all_good(),
                    "seed {seed}: {count} x {streams}, {gap} s x {factor}"
                );
            });
        }
    }
}

#[test]
fn a_pool_that_freezes_and_thaws_one_by_one_ejects_nobody() {
    for count in [2, 3, 6] {
        for frozen_secs in [0.5, 2.0, 4.0, 20.0] {
            let mut feed = Feed::regular(count);
            feed.run(30.0, |feed| {
                (0..count).for_each(|key| feed.stream(key, 8, 100))
            });
            feed.run(frozen_secs, |_| {});
            for awake in 1..=count {
                feed.run(0.25, |feed| {
                    (0..awake).for_each(|key| feed.stream(key, 8, 100))
                });
                assert!(
                    feed.were_always_good(),
                    "{count} workers, {frozen_secs} s, {awake} awake"
                );
            }
            feed.run(5.0, |feed| {
                (0..count).for_each(|key| feed.stream(key, 8, 100))
            });
            assert!(feed.were_always_good(), "{count} workers, {frozen_secs} s");
        }
    }
}

#[test]
fn a_pool_of_one_is_never_stalled_nor_one_request_alone() {
    let mut feed = Feed::regular(1);
    feed.run(10.0, |feed| feed.stream(0, 8, 100));
    feed.run(600.0, |_| {});
    assert!(feed.were_always_good());
    let mut feed = Feed::regular(3);
    feed.run(10.0, |feed| (0..3).for_each(|key| feed.stream(key, 8, 100)));
    feed.of(0).in_flight = 1;
    feed.run(600.0, |feed| {
        (1..3).for_each(|key| feed.stream(key, 8, 100))
    });
    assert!(feed.were_always_good());
}

#[test]
fn a_pool_that_is_silent_as_a_whole_degrades_nobody_with_more_streams() {
    let mut feed = Feed::regular(4);
    feed.run(20.0, |feed| (0..4).for_each(|key| feed.stream(key, 1, 10)));
    feed.run(8.0, |feed| {
        feed.stream(0, 8, 0);
        (1..4).for_each(|key| feed.stream(key, 1, 0));
    });
    assert!(feed.were_always_good());
}

#[test]
fn a_worker_that_says_it_has_no_room_is_not_silent() {
    let mut feed = Feed::regular(4);
    feed.run(60.0, |feed| (0..4).for_each(|key| feed.serve(key, 5, 3)));
    // Decode seats that wait for their prefill legs, and end in a 503 each: J2.
    feed.run(30.0, |feed| {
        (1..4).for_each(|key| feed.serve(key, 5, 3));
        let seen = feed.of(0);
        seen.chosen += 5;
        seen.busy += 5;
        (seen.in_flight, seen.waiting) = (3, 3);
    });
    assert!(feed.were_always_good());
    // The same without a word is a stall.
    feed.seconds_until_out(0, 5.0, |feed| {
        (1..4).for_each(|key| feed.serve(key, 5, 3));
        (feed.of(0).in_flight, feed.of(0).waiting) = (3, 3);
    });
    assert_eq!(feed.why(0), Some(Why::Stalled));
}

/// A prefill worker hangs: the decode seats of its requests wait with it, and say nothing of the decode worker.
#[test]
fn decode_seats_that_wait_for_their_prompts_are_no_silence() {
    let mut feed = Feed::new(3, Role::Decode, config());
    feed.run(60.0, |feed| (0..3).for_each(|key| feed.serve(key, 5, 3)));
    feed.run(30.0, |feed| {
        (1..3).for_each(|key| feed.serve(key, 5, 3));
        (feed.of(0).in_flight, feed.of(0).waiting) = (6, 6);
    });
    assert!(feed.were_always_good());
    // With what was sent to it and is not answered it is another matter.
    feed.seconds_until_out(0, 10.0, |feed| {
        (1..3).for_each(|key| feed.serve(key, 5, 3));
        (feed.of(0).in_flight, feed.of(0).waiting) = (6, 0);
    });
    assert_eq!(feed.why(0), Some(Why::Stalled));
}

#[test]
fn a_long_prefill_is_no_stall() {
    let mut feed = Feed::new(3, Role::Prefill, config());
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.serve(key, 20, 3));
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.serve(key, 20, 3)));
    // 800 KB at 20 KB/s, in two prompts.
    feed.hold(0, 2, 800_000);
    feed.run(38.0, peers);
    assert!(feed.were_always_good());
    // They were slower even than that: it is learned.
    feed.serve(0, 1, 4);
    feed.of(0).waiting_bytes = 400_000;
    feed.run(35.0, peers);
    assert!(feed.were_always_good());
    // But prompts that pile up on a silent worker do not put it off for ever.
    let mut feed = Feed::regular(3);
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.serve(key, 20, 3)));
    let out = feed.seconds_until_out(0, 20.0, |feed| {
        peers(feed);
        feed.hold(0, 2, 8_000);
    });
    assert!(out < 5.0, "{out}");
}

#[test]
fn tool_calls_that_are_silent_but_for_heartbeats_trip_nothing() {
    let mut feed = Feed::regular(3);
    let mut ticks = 0;
    feed.run(120.0, |feed| {
        ticks += 1;
        (1..3).for_each(|key| feed.stream(key, 8, 100));
        // Three streams, each with a heartbeat every 2 s.
        feed.stream(0, 3, u64::from(ticks % 3 == 0));
    });
    assert!(feed.were_always_good());
}

/// Answers in one piece after 30 s: silence is their nature, from the first on.
#[test]
fn long_answers_in_one_piece_are_no_stall_where_peers_are_no_quicker() {
    for seed in 0..20 {
        let mut feed = Feed::regular(4);
        feed.rng = Rng::new(seed);
        let mut ends = vec![vec![0_u32; 3]; 4];
        let mut ejections = 0;
        for tick in 0..4 * 600_u32 {
            for (key, ends) in ends.iter_mut().enumerate() {
                let mut done = 0;
                for end in ends.iter_mut().filter(|end| **end <= tick) {
                    done += u64::from(*end > 0);
                    *end = tick + 90 + feed.rng.below(60) as u32;
                }
                feed.serve(key, done, 3);
            }
            feed.tick();
            ejections += (0..4).filter(|&key| !feed.is_good(key)).count();
        }
        assert_eq!(ejections, 0, "seed {seed}");
    }
}

/// All of a batch are answered after a second; before, answers came one by one and so never a second apart.
#[test]
fn a_batch_that_needs_its_usual_time_is_no_stall() {
    let mut feed = Feed::regular(3);
    feed.run(60.0, |feed| (0..3).for_each(|key| feed.serve(key, 16, 64)));
    let mut ticks = 0;
    feed.run(20.0, |feed| {
        (1..3).for_each(|key| feed.serve(key, 16, 64));
        ticks += 1;
        feed.serve(0, if ticks % 5 == 0 { 64 } else { 0 }, 64);
        assert!(feed.all_good(), "tick {ticks}");
    });
}

#[test]
fn a_worker_that_is_slower_than_its_peers_at_random_is_no_stall() {
    for seed in 0..100 {
        let mut feed = Feed::regular(4);
        feed.rng = Rng::new(seed);
        feed.run(60.0, |feed| {
            let pieces = feed.poisson(2.0);
            feed.stream(0, 2, pieces);
            (1..4).for_each(|key| feed.stream(key, 2, 25));
            assert!(feed.all_good(), "seed {seed}");
        });
    }
}

/// Nothing speaks for the pool then but its past: the whole window is waited for.
#[test]
fn where_peers_have_nothing_to_do_a_quick_past_does_not_shorten_the_window() {
    let mut feed = Feed::regular(2);
    feed.run(30.0, |feed| (0..2).for_each(|key| feed.serve(key, 20, 2)));
    feed.run(10.0, |feed| (0..2).for_each(|key| feed.stream(key, 0, 0)));
    feed.hold(0, 4, 400);
    feed.run(2.75, |_| {});
    assert!(feed.all_good());
    feed.run(1.0, |_| {});
    assert_eq!(feed.why(0), Some(Why::Stalled));
}

#[test]
fn a_tick_that_came_late_is_not_all_silence() {
    let mut feed = Feed::regular(3);
    feed.run(30.0, |feed| (0..3).for_each(|key| feed.stream(key, 8, 100)));
    feed.now += secs(30.0);
    (1..3).for_each(|key| feed.stream(key, 8, 100));
    feed.tick();
    assert!(feed.all_good());
}

// Degradation.

/// Conformance W02: 5 streams at 1 token/s beside two peers with 14 at 50/s, in pieces of one or of five tokens.
#[test]
fn w02_a_slow_worker_with_few_streams_is_out_after_5_seconds() {
    for pieces in [14 * 25_u64 / 2, 14 * 5 / 2] {
        for was_fast in [false, true] {
            let mut feed = Feed::regular(3);
            if was_fast {
                feed.run(20.0, |feed| {
                    (0..3).for_each(|key| feed.stream(key, 5, pieces / 3))
                });
            }
            let mut ticks = 0;
            let slow = |feed: &mut Feed| {
                ticks += 1;
                feed.stream(0, 5, if ticks % 4 == 0 { 5 } else { 0 });
                (1..3).for_each(|key| feed.stream(key, 14, pieces));
            };
            let begin = feed.now;
            let mut slow = slow;
            feed.run(5.0, &mut slow);
            assert!(!feed.is_good(0), "{pieces} {was_fast}");
            feed.run(6.0, &mut slow);
            assert_eq!(feed.why(0), Some(Why::Degraded), "{:?}", feed.now - begin);
            assert!(feed.is_good(1) && feed.is_good(2));
        }
    }
}

/// 1.0 token/s per sequence with 141 requests, beside peers with 105 at 49.6; then it drains and looks least loaded.
#[test]
fn a_degraded_engine_stays_out_while_it_drains_and_returns_when_a_trial_is_fast() {
    let mut feed = Feed::new(4, Role::Decode, config());
    let peers = |feed: &mut Feed| (1..4).for_each(|key| feed.stream(key, 105, 1302));
    let out = feed.seconds_until_out(0, 8.0, |feed| {
        peers(feed);
        feed.stream(0, 141, 35);
    });
    assert!(out <= 5.0, "{out}");
    assert_eq!(feed.why(0), Some(Why::Degraded));
    let mut trials = 0;
    for left in (1..=60).rev() {
        feed.run(2.0, |feed| {
            peers(feed);
            if let Standing::Trial { load_max, .. } = feed.standing(0)
                && feed.of(0).in_flight <= load_max
            {
                trials += 1;
                feed.of(0).chosen += 1;
                feed.of(0).trials_good += 1;
            }
            feed.stream(0, left, u64::from(left) / 4 + 1);
            assert!(!feed.is_good(0), "{left} left");
        });
    }
    assert!((1..=6).contains(&trials), "{trials}");
    // Its trials are as fast as its peers' streams.
    feed.run(90.0, |feed| {
        peers(feed);
        let is_tried = !matches!(feed.standing(0), Standing::Out { .. });
        let (streams, pieces) = if is_tried { (1, 12) } else { (0, 0) };
        feed.stream(0, streams, pieces);
    });
    assert!(feed.is_good(0));
}

#[test]
fn a_degraded_worker_whose_streams_speed_up_needs_no_trial() {
    let mut feed = Feed::regular(3);
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.stream(key, 20, 250));
    feed.seconds_until_out(0, 8.0, |feed| {
        peers(feed);
        feed.stream(0, 20, 10);
    });
    feed.run(5.0, |feed| {
        peers(feed);
        feed.stream(0, 20, 200);
    });
    assert!(feed.is_good(0));
}

#[test]
fn trials_too_short_to_measure_bring_back_by_their_ends() {
    let mut feed = Feed::regular(3);
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.stream(key, 20, 250));
    feed.seconds_until_out(0, 8.0, |feed| {
        peers(feed);
        feed.stream(0, 20, 10);
    });
    feed.run(20.0, |feed| {
        peers(feed);
        feed.stream(0, 0, 0);
        if let Standing::Trial { .. } = feed.standing(0) {
            feed.of(0).chosen += 1;
            feed.of(0).trials_good += 1;
        }
    });
    assert!(feed.is_good(0));
}

#[test]
fn trials_longer_than_their_limit_count_when_they_end_well() {
    let mut feed = Feed::regular(3);
    let peers = |feed: &mut Feed| (1..3).for_each(|key| feed.stream(key, 20, 250));
    feed.seconds_until_out(0, 8.0, |feed| {
        peers(feed);
        feed.stream(0, 20, 10);
    });
    feed.stream(0, 0, 0);
    let mut left = 0;
    feed.run(300.0, |feed| {
        peers(feed);
        if left > 0 {
            left -= 1;
            if left == 0 {
                (feed.of(0).in_flight, feed.of(0).waiting) = (0, 0);
                feed.of(0).trials_good += 1;
            }
        } else if let Standing::Trial { .. } = feed.standing(0) {
            feed.hold(0, 1, 0);
            left = 40;
        }
    });
    assert_eq!(feed.standing(0), Standing::NEW);
}

#[test]
fn slowness_is_judged_only_with_two_peers_and_enough_streams() {
    let mut feed = Feed::regular(2);
    feed.run(60.0, |feed| {
        feed.stream(0, 20, 10);
        feed.stream(1, 20, 250);
    });
    assert!(feed.were_always_good(), "one peer");
    let mut feed = Feed::regular(3);
    feed.run(60.0, |feed| {
        feed.stream(0, 3, 1);
        (1..3).for_each(|key| feed.stream(key, 20, 250));
    });
    assert!(feed.were_always_good(), "three streams");
    let mut feed = Feed::regular(3);
    feed.run(60.0, |feed| {
        feed.stream(0, 20, 60);
        (1..3).for_each(|key| feed.stream(key, 20, 250));
    });
    assert!(feed.were_always_good(), "a quarter of the peers' speed");
    let mut feed = Feed::new(
        3,
        Role::Regular,
        StandingConfig {
            degraded_ratio: 0.0,
            ..config()
        },
    );
    feed.run(60.0, |feed| {
        feed.stream(0, 20, 1);
        (1..3).for_each(|key| feed.stream(key, 20, 250));
    });
    assert!(feed.were_always_good(), "switched off");
}

#[test]
fn answers_in_one_piece_do_not_make_peers_look_fast() {
    let mut feed = Feed::regular(3);
    feed.run(60.0, |feed| {
        feed.stream(0, 8, 100);
        for key in 1..3 {
            feed.serve(key, 500, 0);
            feed.stream(key, 2, 25);
        }
    });
    assert!(feed.were_always_good());
}

// Degradation that answers in one piece show.

/// A request that a worker of the simulation holds.
#[derive(Clone, Copy)]
struct Held {
    begin: f64,
    end: f64,
    bytes: u64,
    is_trial: bool,
}

/// Workers that answer in one piece.
struct Answering {
    feed: Feed,
    held: Vec<Vec<Held>>,
    /// Requests that were sent to each while it was good.
    sent: Vec<u64>,
}

impl Answering {
    fn new(count: usize) -> Answering {
        Answering {
            feed: Feed::regular(count),
            held: vec![Vec::new(); count],
            sent: vec![0; count],
        }
    }

    fn send(&mut self, key: usize, begin: f64, seconds: f64, bytes: u64, is_trial: bool) {
        let end = begin + seconds;
        self.held[key].push(Held {
            begin,
            end,
            bytes,
            is_trial,
        });
        self.sent[key] += u64::from(!is_trial);
        self.feed.of(key).chosen += 1;
        self.feed.of(key).fresh_bytes += bytes;
    }

    /// Ends the next request that ends before `until`; gives when.
    fn end_next(&mut self, key: usize, until: f64) -> Option<f64> {
        let held = &mut self.held[key];
        let next = (0..held.len()).min_by(|&a, &b| held[a].end.total_cmp(&held[b].end))?;
        if held[next].end > until {
            return None;
        }
        let ended = held.swap_remove(next);
        let ns = ((ended.end - ended.begin) * 1e9) as u64;
        let log = crate::shared::log2_of(ns);
        let seen = self.feed.of(key);
        seen.completions += 1;
        if ended.is_trial {
            seen.trials_good += 1;
            seen.trial_answers += 1;
            seen.trial_answer_log += log;
        } else {
            seen.successes += 1;
            seen.answers += 1;
            seen.answer_ns += ns;
            seen.answer_log += log;
            seen.answer_log_square += log * log;
        }
        Some(ended.end)
    }

    fn now(&self) -> f64 {
        self.feed.now.as_secs_f64()
    }

    /// A tick of clients who keep `clients` requests at a worker that is good, and try one that is to be tried.
    fn keep(
        &mut self,
        key: usize,
        clients: usize,
        bytes: u64,
        mut seconds: impl FnMut(&mut Rng) -> f64,
    ) {
        let (begin, until) = (self.now(), self.now() + TICK.as_secs_f64());
        if let Standing::Trial { load_max, .. } = self.feed.standing(key)
            && self.held[key].len() <= load_max as usize
        {
            let time = seconds(&mut self.feed.rng);
            self.send(key, begin, time, bytes, true);
        }
        let is_good = self.feed.is_good(key);
        while is_good && self.held[key].len() < clients {
            let time = seconds(&mut self.feed.rng);
            self.send(key, begin, time, bytes, false);
        }
        while let Some(at) = self.end_next(key, until) {
            if is_good {
                let time = seconds(&mut self.feed.rng);
                self.send(key, at, time, bytes, false);
            }
        }
        self.show(key);
    }

    /// As the books have it.
    fn show(&mut self, key: usize) {
        let count = self.held[key].len() as u32;
        let bytes = self.held[key].iter().map(|held| held.bytes).sum();
        let seen = self.feed.of(key);
        (seen.in_flight, seen.waiting, seen.waiting_bytes) = (count, count, bytes);
    }

    fn run(&mut self, time: f64, mut each: impl FnMut(&mut Answering)) {
        for _ in 0..(time / TICK.as_secs_f64()).round() as usize {
            each(self);
            self.feed.tick();
            self.feed.check_invariants();
        }
    }

    fn seconds_until_out(
        &mut self,
        key: usize,
        time: f64,
        mut each: impl FnMut(&mut Answering),
    ) -> f64 {
        let begin = self.now();
        // Its first silence may be taken for a stall, which ends with the first answers.
        while self.feed.why(key) != Some(Why::Degraded) {
            assert!(self.now() - begin < time, "not out after {time} s");
            self.run(TICK.as_secs_f64(), &mut each);
        }
        self.now() - begin
    }
}

/// Seconds between a half and one and a half times as many.
fn about(seconds: f64) -> impl FnMut(&mut Rng) -> f64 + Copy {
    move |rng| seconds * (0.5 + rng.below(1000) as f64 / 1000.0)
}

/// Rig scenario s9l: 64 clients, 20 ms, one of four workers ten times slower.
#[test]
fn s9l_a_worker_that_answers_ten_times_slower_is_out_after_a_second() {
    for slow in [0.2, 0.15, 0.4] {
        let mut pool = Answering::new(4);
        let all = |pool: &mut Answering, seconds: f64| {
            pool.keep(0, 16, 200, about(seconds));
            (1..4).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
        };
        pool.run(1.0, |pool| all(pool, 0.02));
        let sent = pool.sent[0];
        let out = pool.seconds_until_out(0, 5.0, |pool| all(pool, slow));
        assert!(out <= 1.5, "{slow}: {out} s");
        assert!(pool.sent[0] - sent < 200, "{}", pool.sent[0] - sent);
        assert!((1..4).all(|key| pool.feed.is_good(key)));
        // It answers well, but as slowly: trials do not bring it back.
        pool.run(120.0, |pool| {
            all(pool, slow);
            assert!(!pool.feed.is_good(0));
        });
        // It is as quick as before.
        let mut back = false;
        pool.run(70.0, |pool| {
            all(pool, 0.02);
            back |= pool.feed.is_good(0);
            assert!(back <= pool.feed.is_good(0), "went out again");
        });
        assert_eq!(pool.feed.standing(0), Standing::NEW);
    }
}

#[test]
fn a_worker_that_was_slow_from_the_start_is_out_as_soon() {
    let mut pool = Answering::new(3);
    let out = pool.seconds_until_out(0, 5.0, |pool| {
        pool.keep(0, 16, 200, about(0.2));
        (1..3).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
    });
    assert!(out <= 2.0, "{out} s");
}

#[test]
fn answers_of_seconds_need_one_window_or_four_of_their_own_times() {
    for seed in 0..20 {
        for (seconds, limit) in [(0.5, 4.5), (1.0, 5.0), (3.0, 12.5)] {
            let mut pool = Answering::new(4);
            pool.feed.rng = Rng::new(seed);
            let all = |pool: &mut Answering, factor: f64| {
                pool.keep(0, 8, 2000, about(seconds * factor));
                (1..4).for_each(|key| pool.keep(key, 8, 2000, about(seconds)));
            };
            pool.run(60.0, |pool| all(pool, 1.0));
            assert!(pool.feed.were_always_good());
            // Also what it has begun.
            let now = pool.now();
            let slowed = |held: &mut Held| held.end = now + (held.end - now) * 10.0;
            pool.held[0].iter_mut().for_each(slowed);
            let mut first_out = f64::MAX;
            let out = pool.seconds_until_out(0, 60.0, |pool| {
                if !pool.feed.is_good(0) {
                    first_out = first_out.min(pool.now() - now);
                }
                all(pool, 10.0);
            });
            let first_out = first_out.min(out);
            assert!(
                first_out <= limit,
                "seed {seed}, {seconds} s: {first_out} s"
            );
            assert!((1..4).all(|key| pool.feed.is_good(key)));
        }
    }
}

#[test]
fn a_pool_that_answers_ten_times_slower_as_a_whole_loses_nobody() {
    for seed in 0..20 {
        for (count, clients, seconds) in [
            (2, 16, 0.02),
            (3, 16, 0.02),
            (4, 4, 0.1),
            (4, 64, 0.5),
            (6, 8, 2.0),
        ] {
            let mut pool = Answering::new(count);
            pool.feed.rng = Rng::new(seed);
            for factor in [1.0, 10.0, 1.0, 10.0] {
                // Not all busy alike: the last has a quarter of the clients.
                pool.run(30.0, |pool| {
                    for key in 0..count {
                        let clients = if key + 1 == count {
                            clients / 4
                        } else {
                            clients
                        };
                        pool.keep(key, clients, 200, about(seconds * factor));
                    }
                    let degraded =
                        (0..count).filter(|&key| pool.feed.why(key) == Some(Why::Degraded));
                    assert_eq!(
                        degraded.count(),
                        0,
                        "seed {seed}: {count} x {clients}, {seconds} s"
                    );
                });
            }
        }
    }
}

#[test]
fn slow_answers_are_judged_only_with_two_peers_and_enough_requests() {
    for (count, clients, factor) in [(1, 16, 10.0), (2, 16, 10.0), (4, 3, 10.0), (4, 16, 4.0)] {
        let mut pool = Answering::new(count);
        pool.run(60.0, |pool| {
            pool.keep(0, clients, 200, about(0.02 * factor));
            (1..count).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
        });
        assert!(
            pool.feed.were_always_good(),
            "{count} workers, {clients} clients, x {factor}"
        );
    }
}

#[test]
fn answers_are_compared_among_workers_of_the_same_models() {
    let mut pool = Answering::new(6);
    (0..2).for_each(|key| pool.feed.of(key).models = 1);
    pool.run(60.0, |pool| {
        (0..2).for_each(|key| pool.keep(key, 16, 200, about(2.0)));
        (2..6).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
    });
    assert!(pool.feed.were_always_good());
}

#[test]
fn two_slow_workers_of_four_are_found_and_no_third() {
    let mut pool = Answering::new(4);
    pool.run(60.0, |pool| {
        (0..2).for_each(|key| pool.keep(key, 16, 200, about(0.2)));
        (2..4).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
        assert!(pool.feed.is_good(2) && pool.feed.is_good(3));
    });
    assert!(!pool.feed.is_good(0) && !pool.feed.is_good(1));
}

#[test]
fn a_worker_that_got_very_long_prompts_is_not_slow() {
    for (bytes, seconds) in [(400_000, 20.0), (100_000, 8.0)] {
        let mut pool = Answering::new(4);
        let peers = |pool: &mut Answering| {
            (1..4).for_each(|key| pool.keep(key, 8, 2000, about(0.5)));
        };
        pool.run(30.0, |pool| {
            pool.keep(0, 8, 2000, about(0.5));
            peers(pool);
        });
        // Now each request there has one.
        pool.run(120.0, |pool| {
            pool.keep(0, 8, bytes, about(seconds));
            peers(pool);
            assert_ne!(pool.feed.why(0), Some(Why::Degraded), "{bytes} bytes");
        });
    }
}

/// The prompts are as long as the peers', but those hold them and this one, new to them, does not.
#[test]
fn a_worker_with_an_empty_cache_is_not_slow() {
    let mut pool = Answering::new(4);
    pool.run(60.0, |pool| {
        pool.keep(0, 8, 60_000, about(6.0));
        for key in 1..4 {
            let fresh = pool.feed.of(key).fresh_bytes;
            pool.keep(key, 8, 60_000, about(0.5));
            pool.feed.of(key).fresh_bytes = fresh;
        }
    });
    assert!(pool.feed.were_always_good());
}

#[test]
fn long_streams_on_one_worker_and_short_answers_on_others_make_none_slow() {
    let mut pool = Answering::new(4);
    pool.run(120.0, |pool| {
        pool.keep(0, 1, 200, about(0.02));
        // 15 streams in long tool calls: heartbeats now and then, nothing that ends.
        let seen = pool.feed.of(0);
        seen.in_flight += 15;
        seen.pieces += 1;
        (1..4).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
    });
    assert!(pool.feed.were_always_good());
}

/// One in ten answers takes a hundred times as long; the least loaded worker gets each request.
#[test]
fn a_few_very_long_answers_make_nobody_slow() {
    for seed in 0..40 {
        for rate in [4.0, 10.0, 60.0] {
            let mut pool = Answering::new(4);
            pool.feed.rng = Rng::new(seed);
            let mut next = pool.now();
            pool.run(200.0, |pool| {
                let until = pool.now() + TICK.as_secs_f64();
                while next < until {
                    (0..4).for_each(|key| while pool.end_next(key, next).is_some() {});
                    let key = (0..4).min_by_key(|&key| pool.held[key].len()).unwrap_or(0);
                    let is_long = pool.feed.rng.below(10) == 0;
                    let seconds = about(if is_long { 20.0 } else { 0.2 })(&mut pool.feed.rng);
                    pool.send(key, next, seconds, 500, false);
                    let lot = pool.feed.rng.next() as f64 / u64::MAX as f64;
                    next -= lot.max(1e-9).ln() / rate;
                }
                for key in 0..4 {
                    while pool.end_next(key, until).is_some() {}
                    pool.show(key);
                    let is_slow = pool.feed.why(key) == Some(Why::Degraded);
                    assert!(!is_slow, "seed {seed}, {rate}/s");
                }
            });
        }
    }
}

#[test]
fn requests_that_come_all_at_once_to_one_worker_do_not_make_it_slow() {
    let mut pool = Answering::new(4);
    let mut ticks = 0;
    pool.run(120.0, |pool| {
        let begin = pool.now();
        for key in 1..4 {
            pool.keep(key, 16, 500, about(2.0));
        }
        // 64 every 20 s, and twice as slow for being so many.
        ticks += 1;
        if ticks % 80 == 40 {
            for _ in 0..64 {
                let seconds = about(4.0)(&mut pool.feed.rng);
                pool.send(0, begin, seconds, 500, false);
            }
        }
        while pool.end_next(0, begin + TICK.as_secs_f64()).is_some() {}
        pool.show(0);
    });
    assert!(pool.feed.were_always_good());
}

#[test]
fn a_pause_of_a_moment_does_not_make_a_worker_slow() {
    let mut pool = Answering::new(4);
    let mut ticks = 0;
    pool.run(120.0, |pool| {
        ticks += 1;
        (1..4).for_each(|key| pool.keep(key, 8, 200, about(0.05)));
        // A third of a second, every 5 s.
        if ticks % 20 == 0 {
            pool.held[0].iter_mut().for_each(|held| held.end += 0.35);
        }
        pool.keep(0, 8, 200, about(0.05));
        assert_ne!(pool.feed.why(0), Some(Why::Degraded));
    });
}

/// Its trials are streams too short to measure: nothing says that it is slow still, and nothing else will come.
#[test]
fn a_worker_with_slow_answers_comes_back_by_trials_that_are_streams() {
    let mut pool = Answering::new(4);
    let peers = |pool: &mut Answering| (1..4).for_each(|key| pool.keep(key, 16, 200, about(0.02)));
    pool.seconds_until_out(0, 5.0, |pool| {
        pool.keep(0, 16, 200, about(0.2));
        peers(pool);
    });
    pool.run(20.0, |pool| {
        peers(pool);
        while pool.end_next(0, f64::MAX).is_some() {}
        pool.show(0);
        if let Standing::Trial { .. } = pool.feed.standing(0) {
            pool.feed.of(0).chosen += 1;
            pool.feed.of(0).trials_good += 1;
        }
    });
    assert!(pool.feed.is_good(0));
}

// All of it.

/// What a worker of the random feed does for a while.
#[derive(Clone, Copy, Debug)]
enum Mood {
    Well,
    Slow,
    Silent,
    Failing,
    Refusing,
    Unready,
    Busy,
}

fn act(feed: &mut Feed, key: usize, mood: Mood, ticks: u32) {
    let standing = feed.standing(key);
    let regular = u64::from(matches!(standing, Standing::Good { .. }));
    let is_tried = match standing {
        Standing::Trial { load_max, .. } => feed.of(key).in_flight <= load_max,
        _ => false,
    };
    let pieces = feed.poisson(40.0);
    let seen = feed.of(key);
    seen.is_ready = !matches!(mood, Mood::Unready);
    if ticks % 40 == key as u32 {
        match mood {
            Mood::Refusing | Mood::Unready => seen.probes_bad += 1,
            _ => seen.probes_good += 1,
        }
    }
    seen.chosen += regular * 3 + u64::from(is_tried);
    let tried = u64::from(is_tried);
    match mood {
        Mood::Well => {
            (seen.in_flight, seen.waiting) = (5 * regular as u32, 0);
            seen.pieces += (pieces + 3) * regular + 3 * tried;
            seen.successes += 3 * regular;
            seen.completions += 3 * regular + tried;
            seen.trials_good += tried;
        }
        Mood::Slow => {
            seen.in_flight = 6.max(seen.in_flight).min(40);
            seen.waiting = 0;
            seen.pieces += 1;
        }
        Mood::Silent => {
            let come = (3 * regular + tried) as u32;
            seen.in_flight = (seen.in_flight + come).min(200);
            seen.waiting = seen.in_flight;
        }
        Mood::Failing => {
            (seen.in_flight, seen.waiting) = (0, 0);
            seen.failures += 3 * regular;
            seen.trials_bad += tried;
        }
        Mood::Refusing | Mood::Unready => {
            (seen.in_flight, seen.waiting) = (0, 0);
            seen.failures += 3 * regular;
            seen.refused += 3 * regular;
            seen.trials_bad += tried;
        }
        Mood::Busy => (seen.in_flight, seen.waiting) = (0, 0),
    }
}

#[test]
fn random_fleets_keep_the_invariants_and_recover_whenever_all_is_well() {
    const MOODS: [Mood; 10] = [
        Mood::Well,
        Mood::Well,
        Mood::Well,
        Mood::Well,
        Mood::Slow,
        Mood::Silent,
        Mood::Failing,
        Mood::Refusing,
        Mood::Unready,
        Mood::Busy,
    ];
    let mut seen = [0_u32; 4];
    for seed in 0..150 {
        let mut rng = Rng::new(seed);
        let count = 1 + rng.below(7);
        let mut feed = Feed::regular(count);
        feed.rng = Rng::new(seed + 1000);
        let mut moods = vec![Mood::Well; count];
        let mut ticks = 0;
        feed.run(300.0, |feed| {
            ticks += 1;
            for (key, mood) in moods.iter_mut().enumerate() {
                if rng.below(80) == 0 {
                    *mood = MOODS[rng.below(MOODS.len())];
                }
                act(feed, key, *mood, ticks);
                if let Some(why) = feed.why(key) {
                    seen[why as usize] += 1;
                }
            }
        });
        feed.run(200.0, |feed| {
            ticks += 1;
            (0..count).for_each(|key| act(feed, key, Mood::Well, ticks));
        });
        for key in 0..count {
            assert_eq!(
                feed.standing(key),
                Standing::NEW,
                "seed {seed}, worker {key}"
            );
        }
    }
    assert!(seen.iter().all(|count| *count > 100), "{seen:?}");
}
