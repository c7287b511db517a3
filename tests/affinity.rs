//! Affinity through the whole router with two cores: a conversation meets its worker whichever core its next turn
//! arrives on, and a worker that has lost its cache, or has gone, is followed by nobody.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::*;
use corelane::Router;
use corelane::route::Reason;

const CHAT: &str = "/v1/chat/completions";
/// What a fast engine takes for a short answer. A lesson needs a wake-up of the other core: microseconds, or, when the
/// machine has more threads than processors, the milliseconds until that core's thread is let run.
const ANSWER_TIME: Duration = Duration::from_millis(20);

/// Workers whose answers say who gave them. Those to "at once" take no time, those to "hold the line" never come.
async fn workers(count: usize) -> Vec<Worker> {
    let mut workers = Vec::new();
    for n in 0..count {
        let worker = Worker::start().await;
        worker.script(move |r| match () {
            () if r.has_text("hold the line") => Reply::nothing(End::Stall),
            () if r.has_text("at once") => Reply::json(200, &n.to_string()),
            () => Reply {
                delay: ANSWER_TIME,
                ..Reply::json(200, &n.to_string())
            },
        });
        workers.push(worker);
    }
    workers
}

/// A conversation; each turn repeats the bytes of the one before it.
struct Conversation {
    messages: String,
}

impl Conversation {
    /// `bytes`: length of its first message.
    fn new(rng: &mut Rng, bytes: usize) -> Conversation {
        Conversation {
            messages: format!(r#"{{"role":"user","content":"{}"}}"#, rng.text(bytes)),
        }
    }

    fn body(&self) -> Vec<u8> {
        format!(r#"{{"model":"m","messages":[{}]}}"#, self.messages).into_bytes()
    }

    fn go_on(&mut self, text: &str) {
        self.messages.push_str(&format!(
            r#",{{"role":"assistant","content":"ok"}},{{"role":"user","content":"{text}"}}"#
        ));
    }

    /// Sends the next turn over a connection of its own, which any core may accept, and says who got it.
    async fn turn(&mut self, address: SocketAddr, text: &str) -> usize {
        self.go_on(text);
        let mut client = Client::open(address).await;
        let answer = client.post(CHAT, &self.body()).await.expect("an answer");
        assert_eq!(answer.status, 200);
        String::from_utf8(answer.body)
            .unwrap()
            .parse()
            .expect("a worker's number")
    }
}

fn reason(router: &Router, reason: Reason) -> u64 {
    total(router, |s| s.decided(reason))
}

#[tokio::test]
async fn the_next_turn_meets_its_worker_on_whichever_core_it_arrives() {
    let seed = seed();
    let workers = workers(4).await;
    let router = router_of(&workers, &[]).await;
    const LANES: u64 = 10;
    const ROUNDS: u64 = 150;
    let mut lanes = tokio::task::JoinSet::new();
    for lane in 0..LANES {
        let address = router.address;
        lanes.spawn(async move {
            let mut rng = Rng(seed ^ lane << 40);
            let mut strays = Vec::new();
            for round in 0..ROUNDS / LANES {
                let mut talk = Conversation::new(&mut rng, 600 + (round as usize % 7) * 500);
                let home = talk.turn(address, "first").await;
                for turn in 1..4 {
                    // At once: the answer's last byte is the start of the next turn.
                    let to = talk.turn(address, &rng.text(40)).await;
                    if to != home {
                        strays.push((lane, round, turn, home, to));
                    }
                }
            }
            strays
        });
    }
    let strays = lanes.join_all().await.concat();
    assert!(
        strays.is_empty(),
        "of {} turns these left home (lane, conversation, turn, home, to): {strays:?}",
        ROUNDS * 3
    );
    assert_eq!(reason(&router, Reason::Affinity), ROUNDS * 3);
    assert_eq!(reason(&router, Reason::Cold), ROUNDS);
    let accepted: Vec<u64> = router
        .shared
        .cores
        .iter()
        .map(|c| c.stats.accepted.value())
        .collect();
    assert!(
        accepted.iter().all(|n| *n > ROUNDS / 2),
        "both cores took part: {accepted:?}"
    );
    assert_eq!(total(&router, |s| s.lessons_dropped.value()), 0);
}

#[tokio::test]
async fn cold_prompts_spread_over_all_workers() {
    let mut rng = Rng(seed());
    let workers = workers(4).await;
    let router = router_of(&workers, &[]).await;
    for _ in 0..400 {
        Conversation::new(&mut rng, 1000)
            .turn(router.address, "at once")
            .await;
    }
    let counts: Vec<u64> = workers.iter().map(Worker::count).collect();
    // 100 each, with a deviation of 9 if ties are broken by chance.
    assert!(counts.iter().all(|n| (55..=145).contains(n)), "{counts:?}");
    assert_eq!(reason(&router, Reason::Cold), 400);
}

/// The first of vllm-router's faults that this router exists for: one hot worker must not switch affinity off for all.
#[tokio::test]
async fn a_hot_worker_gives_up_its_own_conversations_and_nobody_elses() {
    let mut rng = Rng(seed());
    let workers = workers(4).await;
    let router = router_of(&workers, &["--balance-abs-threshold", "4"]).await;
    let mut talks = Vec::new();
    for _ in 0..24 {
        let mut talk = Conversation::new(&mut rng, 1500);
        let home = talk.turn(router.address, "first").await;
        talks.push((talk, home));
    }
    let (mut hot_talk, hot) = talks.swap_remove(0);
    // Requests of that conversation pile up on its worker: five are allowed (load 4 is not more than 4 above 0).
    hot_talk.go_on("hold the line");
    let mut held = Vec::new();
    for n in 0..5 {
        let mut client = Client::open(router.address).await;
        client.send(&post(CHAT, &hot_talk.body())).await;
        until("it is with the worker", || {
            workers[hot].in_flight() == n + 1
        })
        .await;
        held.push(client);
    }
    let (shed, affinity) = (
        reason(&router, Reason::ShedToLeastLoaded),
        reason(&router, Reason::Affinity),
    );
    assert_eq!(shed, 0);
    // Now it is hot: the next one of its own goes elsewhere ...
    let mut client = Client::open(router.address).await;
    client.send(&post(CHAT, &hot_talk.body())).await;
    let others = || {
        (0..4)
            .filter(|n| *n != hot)
            .map(|n| workers[n].in_flight())
            .sum::<i64>()
    };
    until("it was given to another", || others() == 1).await;
    assert_eq!(
        (
            workers[hot].in_flight(),
            reason(&router, Reason::ShedToLeastLoaded)
        ),
        (5, 1)
    );
    // ... and conversations at home with the others stay there.
    let mut stayed = 0;
    for (talk, home) in talks.iter_mut().filter(|(_, home)| *home != hot) {
        assert_eq!(talk.turn(router.address, "and on").await, *home);
        stayed += 1;
    }
    assert!(stayed > 0);
    assert_eq!(reason(&router, Reason::Affinity), affinity + stayed);
    drop((held, client));
    until_books_are_empty(&router).await;
    // Cool again, it keeps the others of its own.
    for (talk, home) in talks.iter_mut().filter(|(_, home)| *home == hot) {
        assert_eq!(talk.turn(router.address, "and on").await, *home);
    }
}

#[tokio::test]
async fn a_restarted_worker_is_cold() {
    let mut rng = Rng(seed());
    let workers = workers(2).await;
    let router = router_of(&workers, &[]).await;
    for round in 0..3u64 {
        let mut talk = Conversation::new(&mut rng, 1500);
        let home = talk.turn(router.address, "first").await;
        assert_eq!(talk.turn(router.address, "second").await, home);
        workers[home].die().await;
        router.control().probe();
        until("the worker is out", || router.control().ready_count() == 1).await;
        workers[home].revive().await;
        until("the worker is back", || {
            router.control().probe();
            router.control().ready_count() == 2
        })
        .await;
        let (cold, affinity) = (
            reason(&router, Reason::Cold),
            reason(&router, Reason::Affinity),
        );
        let next = talk.turn(router.address, "third").await;
        assert_eq!(
            (
                reason(&router, Reason::Cold),
                reason(&router, Reason::Affinity)
            ),
            (cold + 1, affinity),
            "round {round}"
        );
        // And from now on its home is where it went.
        assert_eq!(talk.turn(router.address, "fourth").await, next);
    }
}

/// A worker that only failed probes has not lost its cache.
#[tokio::test]
async fn a_worker_that_was_unhealthy_but_never_gone_is_still_warm() {
    let mut rng = Rng(seed());
    let workers = workers(2).await;
    let router = router_of(&workers, &[]).await;
    let mut talk = Conversation::new(&mut rng, 1500);
    let home = talk.turn(router.address, "first").await;
    for (status, ready) in [(500, 1), (200, 2)] {
        workers[home]
            .state
            .health
            .store(status, std::sync::atomic::Ordering::SeqCst);
        router.control().probe();
        until("the state has changed", || {
            router.control().ready_count() == ready
        })
        .await;
    }
    assert_eq!(talk.turn(router.address, "second").await, home);
    assert_eq!(reason(&router, Reason::Affinity), 1);
}

#[tokio::test]
async fn a_removed_worker_leaves_no_affinity() {
    let mut rng = Rng(seed());
    let workers = workers(2).await;
    let router = router_of(&workers, &[]).await;
    let mut talks = Vec::new();
    for _ in 0..10 {
        let mut talk = Conversation::new(&mut rng, 1500);
        let home = talk.turn(router.address, "first").await;
        talks.push((talk, home));
    }
    let (gone, stays) = (talks[0].1, 1 - talks[0].1);
    let known = router.shared.tree.membership_count();
    assert!(router.control().remove_worker(&workers[gone].url()));
    router.control().add_worker(&workers[gone].url()).unwrap();
    until("it is back", || router.control().ready_count() == 2).await;
    let (cold, affinity) = (
        reason(&router, Reason::Cold),
        reason(&router, Reason::Affinity),
    );
    let mut homeless = 0;
    for (talk, home) in &mut talks {
        let to = talk.turn(router.address, "second").await;
        if *home == stays {
            assert_eq!(to, stays, "the other worker's conversations stay");
        } else {
            homeless += 1;
        }
    }
    assert_eq!(
        (
            reason(&router, Reason::Cold),
            reason(&router, Reason::Affinity)
        ),
        (cold + homeless, affinity + 10 - homeless)
    );
    assert!(known > 0);
    // When all are gone nothing is remembered.
    for worker in &workers {
        assert!(router.control().remove_worker(&worker.url()));
    }
    until("every block is forgotten", || {
        router.shared.tree.membership_count() == 0
    })
    .await;
}

#[tokio::test]
async fn a_flush_forgets_every_prefix() {
    let mut rng = Rng(seed());
    let workers = workers(3).await;
    let router = router_of(&workers, &[]).await;
    let mut talk = Conversation::new(&mut rng, 4000);
    talk.turn(router.address, "first").await;
    let mut client = Client::open(router.address).await;
    client
        .send(b"POST /flush_cache HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n")
        .await;
    assert_eq!(client.answer(false).await.unwrap().status, 200);
    until("every block is forgotten", || {
        router.shared.tree.membership_count() == 0
    })
    .await;
    talk.turn(router.address, "second").await;
    assert_eq!(
        (
            reason(&router, Reason::Cold),
            reason(&router, Reason::Affinity)
        ),
        (2, 0)
    );
}

/// Many turns at once on both cores: nobody strays because a lesson was late.
#[tokio::test]
async fn concurrent_conversations_keep_their_workers() {
    let seed = seed();
    let workers = workers(4).await;
    let router = router_of(&workers, &[]).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..24u64 {
        let address = router.address;
        tasks.spawn(async move {
            let mut rng = Rng(seed ^ n << 40);
            let mut talk = Conversation::new(&mut rng, 1000);
            for _ in 0..12 {
                let mut client = Client::open(address).await;
                assert_eq!(client.post(CHAT, &talk.body()).await.unwrap().status, 200);
                talk.go_on(&rng.text(60));
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    assert_eq!(
        (
            reason(&router, Reason::Cold),
            reason(&router, Reason::Affinity)
        ),
        (24, 24 * 11)
    );
}
