//! Decisions that are written down, through the whole router: each request once in the log with what came of it, the answer
//! that explains itself, what a core remembers, and a log that nobody reads.

mod common;

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use common::pd::Pools;
use common::{
    Client, End, File, Reply, Rng, Worker, ask_in_all_ways, chat, post, reply_by_text, router,
    until, until_books_are_empty,
};
use corelane::Router;
use corelane::decisions::{LogFile, read};
use corelane::route::{Reason, Role};
use corelane::shared::Outcome;
use corelane::sim::replay;
use serde_json::Value;

const CHAT: &str = "/v1/chat/completions";

fn log_of(file: &File) -> LogFile {
    read(&std::fs::read(file.path()).expect("the file is there"))
}

/// The same once so many requests have ended in it.
async fn log_with_ends(file: &File, count: usize) -> LogFile {
    until("all ends are in the log", || {
        log_of(file).ends.len() >= count
    })
    .await;
    let log = log_of(file);
    assert_eq!((log.ends.len(), log.damage), (count, None));
    log
}

/// `x-corelane-debug: decision`, and whatever other fields.
fn asking(body: &[u8], fields: &str) -> Vec<u8> {
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: r\r\nX-Corelane-Debug: decision\r\n{fields}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

async fn ask(client: &mut Client, request: &[u8]) -> common::Answer {
    client.send(request).await;
    client.answer(false).await.expect("an answer")
}

async fn remembered(router: &Router, id: &str) -> (u16, Value) {
    let mut client = Client::open(router.address).await;
    let request = format!("GET /debug/decisions?request_id={id} HTTP/1.1\r\nHost: r\r\n\r\n");
    let answer = ask(&mut client, request.as_bytes()).await;
    let json = serde_json::from_slice(&answer.body).expect("JSON");
    (answer.status, json)
}

#[tokio::test]
async fn each_request_is_in_the_log_once_with_what_came_of_it() {
    let (worker, dead) = (Worker::start().await, Worker::start().await);
    worker.script(reply_by_text);
    let file = File::new("");
    let flags = [
        "--decision-log",
        file.path(),
        "--cores",
        "1",
        "--policy",
        "round_robin",
    ];
    let router = router(&[&worker, &dead], &flags).await;
    dead.die().await;
    ask_in_all_ways(router.address).await;
    let mut odd = Client::open(router.address).await;
    let answer = ask(&mut odd, &post(CHAT, b"no JSON")).await;
    assert_eq!(answer.status, 400);
    let log = log_with_ends(&file, 6).await;
    let ends: Vec<_> = log.ends.iter().map(|(_, ended)| ended).collect();
    let shown: Vec<(u16, Outcome)> = ends.iter().map(|e| (e.status, e.outcome)).collect();
    let wanted = [
        (200, Outcome::Ok),
        (200, Outcome::Ok),
        (422, Outcome::ClientError),
        (200, Outcome::Ok),
        (200, Outcome::Broken),
        (400, Outcome::Refused),
    ];
    assert_eq!(shown, wanted);
    let stream = ends[1];
    // Five, and the one that says that it was all.
    assert_eq!((stream.is_event_stream, stream.event_count), (true, 6));
    assert!(stream.first_byte_us > 0 && stream.duration_us >= 10_000);
    assert!(stream.answer_bytes > 60 && ends[0].answer_bytes == 11);
    // The one that is no JSON was nobody's; all others were decided, and anew where the dead one had been chosen.
    for (index, ended) in ends.iter().enumerate() {
        let decisions = log.decisions.iter().map(|(_, decided, _)| decided);
        let of_it = decisions.filter(|decided| decided.exchange == ended.exchange);
        let attempts: Vec<u8> = of_it.map(|decided| decided.attempt).collect();
        let wanted: Vec<u8> = match index {
            5 => Vec::new(),
            _ => (0..=ended.retries).collect(),
        };
        assert_eq!(attempts, wanted, "{ended:?}");
    }
    assert!(
        ends.iter().any(|ended| ended.retries == 1),
        "the dead one was asked"
    );
    for (_, decided, sketch) in &log.decisions {
        assert_eq!((decided.role, decided.candidate_count), (Role::Regular, 2));
        assert_eq!(decided.reason_label(), "round_robin");
        // Also where the policy looks at no prompt: another one may be asked about later.
        assert_eq!(sketch.blocks as u64, decided.prompt_bytes / 128);
    }
    let mut urls: Vec<&str> = log.workers.iter().map(|row| &*row.url).collect();
    urls.sort_unstable();
    let mut wanted = [worker.url(), dead.url()];
    wanted.sort_unstable();
    assert_eq!(urls, wanted);
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn both_legs_are_in_the_log_and_another_attempt_after_a_failure() {
    let pools = Pools::start(2, 2).await;
    let file = File::new("");
    let flags = ["--decision-log", file.path(), "--cores", "1"];
    let router = pools.router(&flags).await;
    let mut client = Client::open(router.address).await;
    client.post(CHAT, &chat("first")).await.expect("an answer");
    pools.prefill_fails_first(Reply::json(503, "{}"));
    let request = asking(&chat("second"), "X-Request-Id: mine\r\n");
    let answer = ask(&mut client, &request).await;
    assert_eq!(answer.status, 200);
    let log = log_with_ends(&file, 2).await;
    let roles = |exchange: u64| -> Vec<(Role, u8)> {
        let decisions = log.decisions.iter().map(|(_, decided, _)| decided);
        let of_it = decisions.filter(|decided| decided.exchange == exchange);
        of_it
            .map(|decided| (decided.role, decided.attempt))
            .collect()
    };
    let exchanges: Vec<u64> = log.ends.iter().map(|(_, ended)| ended.exchange).collect();
    assert_eq!(roles(exchanges[0]), [(Role::Decode, 0), (Role::Prefill, 0)]);
    let (decode, prefill) = ((Role::Decode, 0), Role::Prefill);
    assert_eq!(roles(exchanges[1]), [decode, (prefill, 0), (prefill, 1)]);
    for (_, decided, _) in &log.decisions {
        let row = log.workers.iter().find(|row| row.slot == decided.slot);
        assert_eq!(row.map(|row| row.role), Some(decided.role));
    }

    // The same of the answer itself, and of who is asked afterwards.
    let told: Value = serde_json::from_str(answer.field("x-corelane-decision").unwrap()).unwrap();
    let roles: Vec<&str> = told
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["decode", "prefill", "prefill"]);
    let (status, known) = remembered(&router, "mine").await;
    assert_eq!(status, 200, "{known}");
    let exchange = &known["exchanges"][0];
    assert_eq!(
        (&exchange["outcome"], &exchange["retries"]),
        (&"ok".into(), &1.into())
    );
    let results: Vec<(&str, &str)> = exchange["decisions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| (d["role"].as_str().unwrap(), d["result"].as_str().unwrap()))
        .collect();
    assert_eq!(
        results,
        [("decode", "good"), ("prefill", "busy"), ("prefill", "good")]
    );
    until_books_are_empty(&router).await;
}

/// A conversation's prompts, long enough that a turn matches most of the next one.
fn turn(agent: usize, turns: usize) -> Vec<u8> {
    let mut rng = Rng(agent as u64 + 1);
    chat(&rng.text(4000 + turns * 1500))
}

#[tokio::test]
async fn a_log_says_what_the_books_say_and_replays() {
    let workers = [
        Worker::start().await,
        Worker::start().await,
        Worker::start().await,
    ];
    for worker in &workers {
        worker.script(|_| Reply::events(4, Duration::from_millis(1)));
    }
    let file = File::new("");
    // One core: what it learns it knows for the next request, however busy the machine is.
    let flags = ["--decision-log", file.path(), "--cores", "1"];
    let router = router(&workers.each_ref(), &flags).await;
    const AGENTS: usize = 6;
    const TURNS: usize = 5;
    for turns in 0..TURNS {
        for agent in 0..AGENTS {
            let mut client = Client::open(router.address).await;
            client
                .post(CHAT, &turn(agent, turns))
                .await
                .expect("an answer");
        }
    }
    let log = log_with_ends(&file, AGENTS * TURNS).await;
    let views = router.control().workers();
    let prompt: u64 = views.iter().map(|view| view.prompt_bytes).sum();
    let matched: u64 = views.iter().map(|view| view.matched_bytes).sum();
    let decisions = || log.decisions.iter().map(|(_, decided, _)| decided);
    assert_eq!(decisions().map(|d| d.prompt_bytes).sum::<u64>(), prompt);
    assert_eq!(
        decisions().map(|d| u64::from(d.matched_bytes)).sum::<u64>(),
        matched
    );
    assert!(
        matched * 2 > prompt,
        "{matched} of {prompt}: turns find their worker"
    );
    let hits = decisions().filter(|d| d.reason == Reason::Affinity as u8);
    assert!(hits.count() > AGENTS * (TURNS - 2));
    let replayed = replay::replay(&log, false).expect("requests");
    assert_eq!(replayed.worker_counts, [3, 0]);
    assert_eq!(replayed.workload.request_count(), AGENTS * TURNS);
    // Each agent is one conversation, found by its prompts alone.
    assert_eq!(replayed.workload.sessions.len(), AGENTS);
    let really = &replayed.really;
    let share = matched as f64 / prompt as f64;
    assert!(
        (really.hit_rate() - share).abs() < 0.01,
        "{} and {share}",
        really.hit_rate()
    );
    assert_eq!(really.output_tokens as usize, AGENTS * TURNS * 4);
    let chosen: u64 = really.workers[0].iter().map(|worker| worker.chosen).sum();
    assert_eq!(chosen as usize, AGENTS * TURNS);
}

#[tokio::test]
async fn an_answer_explains_itself_to_who_asks_and_to_nobody_else() {
    let workers = [Worker::start().await, Worker::start().await];
    let router = router(&workers.each_ref(), &["--cores", "1"]).await;
    let mut client = Client::open(router.address).await;
    let body = turn(1, 1);
    let plain = client.post(CHAT, &body).await.expect("an answer");
    assert_eq!(plain.field("x-corelane-decision"), None);
    let other = body_with(&body, "X-Corelane-Debug: everything\r\n");
    assert_eq!(
        ask(&mut client, &other).await.field("x-corelane-decision"),
        None
    );
    // The tree has learnt of the first by the time its turn of the loop ends.
    let answer = ask(&mut client, &asking(&body, "")).await;
    let told = answer.field("x-corelane-decision").expect("an explanation");
    assert!(!told.contains("http"), "no URL: {told}");
    let told: Value = serde_json::from_str(told).unwrap();
    let told = &told[0];
    assert_eq!(
        (&told["policy"], &told["reason"]),
        (&"cache_aware".into(), &"affinity".into())
    );
    assert_eq!(
        (&told["candidates"], &told["attempt"]),
        (&2.into(), &0.into())
    );
    let (prompt, matched) = (
        told["prompt_bytes"].as_u64(),
        told["matched_bytes"].as_u64(),
    );
    assert!(matched > Some(4000) && matched <= prompt, "{told}");
    assert_eq!(told["longest_matches"][0]["worker"], told["worker"]);
    assert_eq!(
        told["longest_matches"][0]["matched_bytes"].as_u64(),
        matched
    );
    assert_eq!(told["least_load"], 0);
    let of_workers = workers.iter().flat_map(|worker| worker.requests());
    let forwarded = of_workers.filter(|request| !request.all("x-corelane-debug").is_empty());
    assert_eq!(forwarded.count(), 0, "it is meant for the router");
    // An answer of our own tells it, too: nobody was chosen.
    let answer = ask(&mut client, &asking(b"no JSON", "")).await;
    assert_eq!(
        (answer.status, answer.field("x-corelane-decision")),
        (400, Some("[]"))
    );
    until_books_are_empty(&router).await;
}

fn body_with(body: &[u8], fields: &str) -> Vec<u8> {
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: r\r\n{fields}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn with_keys_the_admin_is_told_urls_and_clients_nothing_where_there_is_an_admin() {
    let worker = Worker::start().await;
    let keys = [
        "--client-api-key",
        "client-key",
        "--admin-api-key",
        "admin-key",
    ];
    for (flags, key, has_told, has_url) in [
        (&keys[..], "admin-key", true, true),
        (&keys[..], "client-key", false, false),
        (&keys[..2], "client-key", true, false),
        (&keys[2..], "", false, false),
    ] {
        let router = router(&[&worker], flags).await;
        let mut client = Client::open(router.address).await;
        let key = match key {
            "" => String::new(),
            key => format!("Authorization: Bearer {key}\r\n"),
        };
        let answer = ask(&mut client, &asking(&chat("x"), &key)).await;
        assert_eq!(answer.status, 200);
        let told = answer.field("x-corelane-decision");
        assert_eq!(told.is_some(), has_told, "{flags:?} {key}");
        let url = told.is_some_and(|told| told.contains(&worker.url()));
        assert_eq!(url, has_url, "{told:?}");
    }
}

#[tokio::test]
async fn cores_remember_the_last_decisions_and_forget_the_others() {
    let worker = Worker::start().await;
    worker.script(|request| match request.has_text("wrong") {
        true => Reply::json(422, "{}"),
        false => Reply::default(),
    });
    let flags = ["--cores", "1", "--debug-decisions-count", "8"];
    let router = router(&[&worker], &flags).await;
    let mut client = Client::open(router.address).await;
    let named = |id: &str, text: &str| body_with(&chat(text), &format!("X-Request-Id: {id}\r\n"));
    ask(&mut client, &named("first", "x")).await;
    ask(&mut client, &named("twice", "wrong")).await;
    ask(&mut client, &named("twice", "x")).await;
    let (status, known) = remembered(&router, "first").await;
    assert_eq!((status, &known["request_id"]), (200, &"first".into()));
    let exchange = &known["exchanges"][0];
    assert_eq!(exchange["status"], 200);
    let decision = &exchange["decisions"][0];
    assert_eq!(decision["worker_url"], worker.url());
    assert_eq!(decision["result"], "good");
    let at = decision["at_seconds"].as_f64().unwrap();
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((now - at).abs() < 60.0, "{at} is now, {now}");
    let (_, known) = remembered(&router, "twice").await;
    let outcomes: Vec<&str> = known["exchanges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|exchange| exchange["outcome"].as_str().unwrap())
        .collect();
    assert_eq!(outcomes, ["client_error", "ok"]);
    // One that runs is known before it has ended.
    worker.script(|_| Reply::nothing(End::Stall));
    let mut waiting = Client::open(router.address).await;
    waiting.send(&named("runs", "x")).await;
    until("it is there", || worker.in_flight() == 1).await;
    let (_, known) = remembered(&router, "runs").await;
    assert!(known["exchanges"][0]["outcome"].is_null(), "{known}");
    waiting.reset();
    worker.script(|_| Reply::default());
    for n in 0..8 {
        ask(&mut client, &named(&format!("later{n}"), "x")).await;
    }
    let (status, known) = remembered(&router, "first").await;
    assert_eq!(
        (status, &known["error"]["code"]),
        (404, &"request_not_found".into())
    );
    assert_eq!(remembered(&router, "later7").await.0, 200);
    assert_eq!(remembered(&router, "never").await.0, 404);
    assert_eq!(remembered(&router, "").await.0, 400);
}

#[tokio::test]
async fn a_log_that_nobody_reads_is_dropped_and_counted_and_delays_nobody() {
    let worker = Worker::start_with(false).await;
    let path = std::env::temp_dir().join(format!("corelane-unread-{}", std::process::id()));
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo").success());
    // Held open and not read: the writer is stuck as soon as the pipe is full.
    let mut pipe = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .unwrap();
    let flags = ["--decision-log", path.to_str().unwrap(), "--cores", "1"];
    let router = router(&[&worker], &flags).await;
    let mut client = Client::open(router.address).await;
    let body = turn(1, 4);
    let dropped =
        |router: &Router| common::total(router, |stats| stats.decision_records_dropped.value());
    // 64 KiB in the pipe, what one look of the writer takes out, then the mailbox.
    let start = Instant::now();
    let mut sent = 0;
    while dropped(&router) == 0 {
        client.post(CHAT, &body).await.expect("an answer");
        sent += 1;
        assert!(sent < 20_000, "a mailbox has an end");
    }
    let rate = sent as f64 / start.elapsed().as_secs_f64();
    let mut slowest = Duration::ZERO;
    for _ in 0..200 {
        let start = Instant::now();
        client.post(CHAT, &body).await.expect("an answer");
        slowest = slowest.max(start.elapsed());
    }
    assert!(dropped(&router) >= 200, "each of them was dropped");
    // Nobody waits for the pipe, which stays as it is.
    assert!(
        slowest < Duration::from_secs(1),
        "{slowest:?} at {rate:.0}/s"
    );
    // What has come through is whole.
    let mut bytes = Vec::new();
    let mut piece = [0; 65_536];
    while let Ok(count) = pipe.read(&mut piece) {
        bytes.extend_from_slice(&piece[..count]);
        if bytes.len() >= 60_000 {
            break;
        }
    }
    assert!(!read(&bytes).decisions.is_empty());
    until_books_are_empty(&router).await;
    drop(pipe);
    drop(router);
    std::fs::remove_file(&path).unwrap();
}

/// The demo's fleet and load, and the binary that replays what it wrote.
#[test]
fn the_demos_log_replays_by_either_spelling() {
    let file = File::new("");
    let demo = common::process::corelane(&[
        "demo",
        "--plain",
        "--port",
        "0",
        "--workers",
        "3",
        "--load",
        "12",
        "--seconds",
        "4",
        "--prefill-tps",
        "40000",
        "--itl",
        "3",
    ])
    .env("CORELANE_DECISION_LOG", file.path())
    .output()
    .unwrap();
    assert!(
        demo.status.success(),
        "{}",
        String::from_utf8_lossy(&demo.stderr)
    );
    let replayed = |args: &[&str]| {
        let output = common::process::corelane(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let policies = "round_robin,cache_aware";
    let json = replayed(&[
        "sim",
        "--replay",
        file.path(),
        "--policy",
        policies,
        "--json",
    ]);
    assert_eq!(
        json,
        replayed(&["sim", "replay", file.path(), "--policy", policies, "--json"])
    );
    let json: Value = serde_json::from_str(&json).unwrap();
    let hit = |outcome: &Value| outcome["hit_rate"].as_f64().unwrap();
    let (log, policies) = (&json["log"], &json["policies"]);
    let (really, same) = (hit(log), hit(&policies["as_logged"]));
    assert!(log["requests"].as_u64().unwrap() > 50, "{log:#}");
    assert!(really > 0.3, "the load has conversations: {really}");
    assert!(
        (really - same).abs() < 0.12,
        "really {really}, simulated {same}"
    );
    let turns = hit(&policies["round_robin"]);
    assert!(turns < same, "in turn {turns}, by prefix {same}");
    let table = replayed(&["sim", "--replay", file.path()]);
    for name in ["cache_aware (the log)", "as_logged", "expected_wait"] {
        assert!(table.contains(name), "{table}");
    }
    // Cut off in the middle of a record: the rest counts, and it is said.
    let bytes = std::fs::read(file.path()).unwrap();
    std::fs::write(file.path(), &bytes[..bytes.len() / 2 + 3]).unwrap();
    assert!(replayed(&["sim", "--replay", file.path()]).contains("bytes cannot be read"));
}
