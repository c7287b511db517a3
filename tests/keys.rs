//! Keys: who may ask for what on which port, what a worker sees of a key, keys that change, and that none shows anywhere.

mod common;

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use common::process::*;
use common::*;
use corelane::Router;
use serde_json::Value;

const CHAT: &str = "/v1/chat/completions";
/// Only what a client sends is recorded, besides probes that no test counts.
const QUIET: [&str; 2] = ["--health-check-interval-secs", "3600"];

fn bearer(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

fn x_api_key(key: &str) -> String {
    format!("x-api-key: {key}\r\n")
}

/// A request on a connection of its own; `fields`: lines with their ends.
async fn ask(to: std::net::SocketAddr, method: &str, target: &str, fields: &str) -> Answer {
    let body = if method == "POST" { "{}" } else { "" };
    let mut client = Client::open(to).await;
    let wire = format!(
        "{method} {target} HTTP/1.1\r\nHost: r\r\n{fields}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(wire.as_bytes()).await;
    let answer = client.answer(method == "HEAD").await;
    answer.unwrap_or_else(|| panic!("no answer to {method} {target}"))
}

fn code_of(answer: &Answer) -> String {
    let json: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    json["error"]["code"].as_str().unwrap_or("").to_owned()
}

/// What the worker saw of keys in its last request.
fn seen(worker: &Worker) -> (Vec<String>, Vec<String>) {
    let last = worker.requests().pop().expect("a request reached it");
    let all = |name| {
        let values = last.all(name);
        let texts = values
            .iter()
            .map(|v| String::from_utf8_lossy(v).into_owned());
        texts.collect()
    };
    (all("authorization"), all("x-api-key"))
}

async fn serving(flags: &[&str]) -> (Worker, Router) {
    let worker = Worker::start().await;
    *worker.state.models.lock().unwrap() =
        Some(r#"{"object":"list","data":[{"id":"llama"}]}"#.to_owned());
    let flags = [&QUIET[..], flags].concat();
    let router = router(&[&worker], &flags).await;
    (worker, router)
}

// ---- who may ask for what ----

const OPEN: [(&str, &str); 4] = [
    ("GET", "/health"),
    ("GET", "/health_generate"),
    ("GET", "/liveness"),
    ("GET", "/readiness"),
];
const CLIENTS: [(&str, &str); 7] = [
    ("POST", CHAT),
    ("POST", "/v1/messages"),
    ("POST", "/generate"),
    ("GET", "/v1/models"),
    ("GET", "/get_model_info"),
    ("POST", "/v1/audio/transcriptions"),
    ("GET", "/version?x=/health"),
];
const OURS: [(&str, &str); 7] = [
    ("GET", "/list_workers"),
    ("GET", "/workers"),
    ("GET", "/workers?x=1"),
    ("GET", "/get_loads"),
    ("GET", "/get_server_info"),
    ("POST", "/flush_cache"),
    ("POST", "/add_worker"),
];
const ENGINES: [(&str, &str); 8] = [
    ("POST", "/sleep"),
    ("POST", "/wake_up?tags=x"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/collective_rpc"),
    ("POST", "/%73leep"),
    ("POST", "//v1/./unload_lora_adapter/"),
];

/// Paths by kind, and what each of four callers gets: nobody, a stranger, a client, the admin. 0: no refusal of a key.
type Row = (
    &'static str,
    &'static [(&'static str, &'static str)],
    [u16; 4],
);

async fn check_table(worker: &Worker, to: std::net::SocketAddr, table: &[Row]) {
    let callers = [
        vec![String::new()],
        vec![
            bearer("wrong"),
            x_api_key("wrong"),
            "Authorization: Basic c2stY2xpZW50\r\n".to_owned(),
            "Authorization: sk-client\r\n".to_owned(),
            format!("Authorization: Bearer {}\r\n", "x".repeat(2000)),
        ],
        vec![
            bearer("sk-client"),
            x_api_key("sk-client"),
            bearer("sk-named"),
            "authorization: bearer  sk-client \r\n".to_owned(),
        ],
        vec![bearer("sk-admin"), x_api_key("sk-admin")],
    ];
    for (kind, paths, wanted) in table {
        for ((method, path), (caller, wanted)) in paths
            .iter()
            .flat_map(|path| callers.iter().zip(wanted).map(move |pair| (*path, pair)))
        {
            for fields in caller {
                let before = worker.requests().len();
                let answer = ask(to, method, path, fields).await;
                let what = format!("{kind}: {method} {path} with {fields:?}");
                let is_refusal = matches!(
                    (answer.status, &*code_of(&answer)),
                    (401, "invalid_api_key") | (403, "admin_key_required") | (404, "not_found")
                );
                let found = if is_refusal { answer.status } else { 0 };
                assert_eq!(found, *wanted, "{what}: {}", answer.head);
                if answer.status == 401 {
                    assert_eq!(answer.field("www-authenticate"), Some("Bearer"), "{what}");
                }
                if *wanted != 0 {
                    assert_eq!(worker.requests().len(), before, "{what} reached the worker");
                }
            }
        }
    }
}

fn keys_file() -> File {
    File::new("# who may\n\nsk-client\nteam-b:sk-named\n")
}

#[tokio::test]
async fn with_both_kinds_of_keys_each_path_has_its_callers() {
    let file = keys_file();
    let flags = [
        "--client-api-keys-file",
        file.path(),
        "--admin-api-key",
        "sk-admin",
    ];
    let (worker, router) = serving(&flags).await;
    let table: [Row; 4] = [
        ("open", &OPEN, [0, 0, 0, 0]),
        ("clients", &CLIENTS, [401, 401, 0, 0]),
        ("ours", &OURS, [401, 401, 403, 0]),
        ("engines", &ENGINES, [401, 401, 403, 0]),
    ];
    check_table(&worker, router.address, &table).await;
    // A wrong method does not come before the key.
    assert_eq!(ask(router.address, "GET", CHAT, "").await.status, 401);
    assert_eq!(
        ask(router.address, "HEAD", "/v1/models", "").await.status,
        401
    );
    until_books_are_empty(&router).await;
}

#[tokio::test]
async fn with_clients_keys_alone_they_do_for_everything() {
    let file = keys_file();
    let (worker, router) = serving(&["--client-api-keys-file", file.path()]).await;
    let table: [Row; 4] = [
        ("open", &OPEN, [0, 0, 0, 0]),
        ("clients", &CLIENTS, [401, 401, 0, 401]),
        ("ours", &OURS, [401, 401, 0, 401]),
        ("engines", &ENGINES, [401, 401, 0, 401]),
    ];
    check_table(&worker, router.address, &table).await;
}

#[tokio::test]
async fn with_the_admins_key_alone_clients_need_none() {
    let (worker, router) = serving(&["--admin-api-key", "sk-admin"]).await;
    let table: [Row; 4] = [
        ("open", &OPEN, [0, 0, 0, 0]),
        ("clients", &CLIENTS, [0, 0, 0, 0]),
        ("ours", &OURS, [401, 401, 401, 0]),
        ("engines", &ENGINES, [401, 401, 401, 0]),
    ];
    check_table(&worker, router.address, &table).await;
}

#[tokio::test]
async fn without_keys_all_is_open() {
    let (worker, router) = serving(&[]).await;
    let table: [Row; 4] = [
        ("open", &OPEN, [0; 4]),
        ("clients", &CLIENTS, [0; 4]),
        ("ours", &OURS, [0; 4]),
        ("engines", &ENGINES, [0; 4]),
    ];
    check_table(&worker, router.address, &table).await;
}

#[tokio::test]
async fn a_key_in_the_flag_does_beside_those_of_the_file() {
    let file = keys_file();
    let flags = [
        "--client-api-key",
        "sk-typed",
        "--client-api-keys-file",
        file.path(),
    ];
    let (_worker, router) = serving(&flags).await;
    for (key, status) in [("sk-typed", 200), ("sk-client", 200), ("sk-other", 401)] {
        let answer = ask(router.address, "POST", CHAT, &bearer(key)).await;
        assert_eq!(answer.status, status, "{key}");
    }
}

// ---- the admin port ----

#[tokio::test]
async fn admin_paths_move_to_their_own_port() {
    let file = keys_file();
    let flags = [
        "--client-api-keys-file",
        file.path(),
        "--admin-api-key",
        "sk-admin",
        "--admin-port",
        "0",
    ];
    let (worker, router) = serving(&flags).await;
    let data: [Row; 4] = [
        ("open", &OPEN, [0, 0, 0, 0]),
        ("clients", &CLIENTS, [401, 401, 0, 0]),
        ("ours", &OURS, [401, 401, 404, 404]),
        ("engines", &ENGINES, [401, 401, 403, 0]),
    ];
    check_table(&worker, router.address, &data).await;
    let admin: [Row; 4] = [
        ("open", &OPEN, [0, 0, 0, 0]),
        ("models", &CLIENTS[3..5], [401, 401, 0, 0]),
        ("ours", &OURS, [401, 401, 403, 0]),
        // Nothing is passed on from there.
        (
            "elsewhere",
            &[("POST", CHAT), ("POST", "/sleep")],
            [401, 401, 403, 404],
        ),
    ];
    let admin_address = router.admin_address.expect("an admin port");
    check_table(&worker, admin_address, &admin).await;
    let large = "x".repeat(2 << 20);
    let mut client = Client::open(admin_address).await;
    let head = format!(
        "POST /workers HTTP/1.1\r\nHost: r\r\n{}Content-Length: {}\r\n\r\n",
        bearer("sk-admin"),
        large.len()
    );
    client.send(head.as_bytes()).await;
    assert_eq!(client.answer(false).await.expect("an answer").status, 413);
}

#[tokio::test]
async fn without_keys_the_admin_port_takes_the_admin_paths_off_the_other() {
    let (worker, router) = serving(&["--admin-port", "0"]).await;
    let data: [Row; 4] = [
        ("open", &OPEN, [0; 4]),
        ("clients", &CLIENTS, [0; 4]),
        ("ours", &OURS, [404; 4]),
        ("engines", &ENGINES, [404; 4]),
    ];
    check_table(&worker, router.address, &data).await;
    let admin: [Row; 3] = [
        ("open", &OPEN, [0; 4]),
        ("models", &CLIENTS[3..5], [0; 4]),
        ("ours", &OURS, [0; 4]),
    ];
    let admin_address = router.admin_address.expect("an admin port");
    check_table(&worker, admin_address, &admin).await;
}

#[tokio::test]
async fn metrics_ask_for_the_admins_key_unless_they_are_open() {
    let file = keys_file();
    for (flags, wanted) in [
        (&["--admin-api-key", "sk-admin"][..], [401, 403, 200]),
        (
            &["--admin-api-key", "sk-admin", "--prometheus-open"],
            [200; 3],
        ),
        (&[], [200; 3]),
    ] {
        let flags = [&["--client-api-keys-file", file.path()], flags].concat();
        let (_worker, router) = serving(&flags).await;
        let callers = ["wrong", "sk-client", "sk-admin"];
        for (key, wanted) in callers.into_iter().zip(wanted) {
            let answer = ask(router.metrics_address, "GET", "/metrics", &bearer(key)).await;
            assert_eq!(answer.status, wanted, "{flags:?} {key}");
        }
    }
}

// ---- what a worker sees ----

/// Flags, what the client brings, and what the worker then has of Authorization and X-Api-Key.
#[tokio::test]
async fn a_worker_gets_one_key_and_the_right_one() {
    let ours = ["--api-key", "sk-worker"];
    let client = ["--client-api-key", "sk-client"];
    let admin = ["--admin-api-key", "sk-admin"];
    let wins = ["--api-key-wins", "router"];
    let (theirs, worker_key) = ("Bearer theirs", "Bearer sk-worker");
    type Case<'a> = (Vec<&'a [&'a str; 2]>, String, Vec<&'a str>, Vec<&'a str>);
    let cases: Vec<Case> = vec![
        (vec![], bearer("theirs"), vec![theirs], vec![]),
        (vec![], x_api_key("theirs"), vec![], vec!["theirs"]),
        (vec![&ours], String::new(), vec![worker_key], vec![]),
        (vec![&ours], bearer("theirs"), vec![theirs], vec![]),
        (
            vec![&ours, &wins],
            bearer("theirs"),
            vec![worker_key],
            vec![],
        ),
        (vec![&ours, &wins], String::new(), vec![worker_key], vec![]),
        (
            vec![&ours, &wins],
            bearer("a") + &bearer("b"),
            vec![worker_key],
            vec![],
        ),
        (vec![&client], bearer("sk-client"), vec![], vec![]),
        (vec![&client], x_api_key("sk-client"), vec![], vec![]),
        (
            vec![&client],
            bearer("theirs") + &x_api_key("sk-client"),
            vec![],
            vec![],
        ),
        (
            vec![&client, &ours],
            bearer("sk-client"),
            vec![worker_key],
            vec![],
        ),
        (
            vec![&client, &ours],
            "Connection: authorization\r\n".to_owned() + &bearer("sk-client"),
            vec![worker_key],
            vec![],
        ),
        (
            vec![&client, &admin, &ours],
            bearer("sk-admin"),
            vec![worker_key],
            vec![],
        ),
        // The admin's key goes nowhere, a key that is none of ours is the worker's to judge.
        (vec![&admin], bearer("sk-admin"), vec![], vec![]),
        (vec![&admin], bearer("theirs"), vec![theirs], vec![]),
        (
            vec![&admin],
            bearer("theirs") + &x_api_key("sk-admin"),
            vec![theirs],
            vec![],
        ),
        (vec![&admin], x_api_key("theirs"), vec![], vec!["theirs"]),
        (vec![&admin, &ours], bearer("theirs"), vec![theirs], vec![]),
        (
            vec![&admin, &ours],
            bearer("sk-admin"),
            vec![worker_key],
            vec![],
        ),
        (
            vec![&admin, &ours, &wins],
            bearer("theirs"),
            vec![worker_key],
            vec![],
        ),
    ];
    for (flags, fields, authorization, api_key) in cases {
        let flags: Vec<&str> = flags.into_iter().flatten().copied().collect();
        let (worker, router) = serving(&flags).await;
        for path in [CHAT, "/v1/audio/transcriptions"] {
            let answer = ask(router.address, "POST", path, &fields).await;
            let what = format!("{flags:?} {fields:?} {path}");
            assert_eq!(answer.status, 200, "{what}");
            let (seen_authorization, seen_key) = seen(&worker);
            assert_eq!(seen_authorization, authorization, "{what}");
            assert_eq!(seen_key, api_key, "{what}");
        }
    }
}

// ---- early answers ----

/// No 100, no waiting for the body, and the connection ends; without a body it lives on.
#[tokio::test]
async fn strangers_are_answered_before_their_body() {
    let (worker, router) = serving(&["--client-api-key", "sk-client"]).await;
    for more in ["Expect: 100-continue\r\n", ""] {
        for framing in ["Content-Length: 50000000", "Transfer-Encoding: chunked"] {
            for path in [CHAT, "/v1/audio/transcriptions", "/workers"] {
                let mut client = Client::open(router.address).await;
                let head = format!("POST {path} HTTP/1.1\r\nHost: r\r\n{more}{framing}\r\n\r\n");
                client.send(head.as_bytes()).await;
                let answer = client.answer(false).await.expect("an answer");
                assert_eq!(answer.status, 401, "{head}");
                assert_eq!(answer.field("connection"), Some("close"), "{head}");
                let (rest, is_clean) = client.rest().await;
                assert!(rest.is_empty() && is_clean, "{head}");
            }
        }
    }
    let mut client = Client::open(router.address).await;
    let request = |fields: &str| format!("GET /v1/models HTTP/1.1\r\nHost: r\r\n{fields}\r\n");
    for (fields, status) in [
        (String::new(), 401),
        (bearer("wrong"), 401),
        (bearer("sk-client"), 200),
        (String::new(), 401),
    ] {
        client.send(request(&fields).as_bytes()).await;
        assert_eq!(
            client.answer(false).await.expect("an answer").status,
            status
        );
    }
    assert!(worker.requests().is_empty());
}

// ---- keys that change ----

#[tokio::test]
async fn the_file_is_read_again_when_it_changes_and_on_reload() {
    let file = File::new("sk-old\n");
    let (_worker, router) = serving(&["--client-api-keys-file", file.path()]).await;
    let status = async |key: &str| ask(router.address, "POST", CHAT, &bearer(key)).await.status;
    assert_eq!((status("sk-old").await, status("sk-new").await), (200, 401));
    // By itself.
    file.write("sk-old\nsk-new\n");
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while status("sk-new").await != 200 {
        assert!(std::time::Instant::now() < end, "the new key never holds");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status("sk-old").await, 200);
    // At once.
    file.write("sk-new\n");
    let answer = ask(router.address, "POST", "/reload", &bearer("sk-new")).await;
    assert_eq!(
        answer.status,
        200,
        "{}",
        String::from_utf8_lossy(&answer.body)
    );
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert!(text.contains("client-api-keys-file"), "{text}");
    assert_eq!((status("sk-old").await, status("sk-new").await), (401, 200));
    // What cannot be changes nothing.
    for bad in ["", "# nobody\n", "sk-new\nbad key\n"] {
        file.write(bad);
        let answer = ask(router.address, "POST", "/reload", &bearer("sk-new")).await;
        assert_eq!((answer.status, &*code_of(&answer)), (400, "invalid_config"));
        assert_eq!((status("sk-old").await, status("sk-new").await), (401, 200));
    }
    std::fs::remove_file(file.path()).unwrap();
    let answer = ask(router.address, "POST", "/reload", &bearer("sk-new")).await;
    assert_eq!((answer.status, &*code_of(&answer)), (400, "invalid_config"));
    assert_eq!(status("sk-new").await, 200);
}

/// A socket that was opened for it is the admin port, without the flag.
#[tokio::test]
async fn an_inherited_admin_socket_is_the_admin_port() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let inherited = corelane::ring::Inherited {
        number: 3,
        name: "admin".to_owned(),
        fd: socket.into(),
    };
    let config = corelane::config::Config::default_for_tests();
    let router = corelane::start_on(config, vec![inherited]).unwrap();
    assert_eq!(router.admin_address, Some(address));
    for (to, status) in [(router.address, 404), (address, 200)] {
        let answer = ask(to, "GET", "/list_workers", "").await;
        assert_eq!(answer.status, status);
    }
}

// ---- the binary ----

#[tokio::test]
async fn without_a_config_file_sighup_reads_the_keys() {
    let file = File::new("sk-old\n");
    let flags = ["--port", "0", "--prometheus-port", "0"];
    let mut command = corelane(&flags);
    command.args(["--client-api-keys-file", file.path()]);
    let router = RouterProcess::start(command);
    for (text, count) in [("sk-a\nsk-b\n", 1), ("sk-a\n", 2)] {
        file.write(text);
        router.signal("HUP");
        until("they are read", || {
            router.logged("keys and certificates read again").len() >= count
        })
        .await;
    }
    for (key, status) in [("sk-a", 200), ("sk-b", 401), ("sk-old", 401)] {
        let answer = ask(router.address, "GET", "/get_server_info", &bearer(key)).await;
        assert_eq!(answer.status, status, "{key}");
    }
}

#[tokio::test]
async fn a_reload_changes_keys_but_not_the_admin_port() {
    let toml = File::new("admin-port = 0\nadmin-api-key = \"sk-1\"\nclient-api-key = \"c-1\"\n");
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0"]);
    command.args(["--config", toml.path()]);
    let router = RouterProcess::start(command);
    let line = router.logged("admin=").pop().expect("it says where");
    let admin = line.split("admin=").nth(1).unwrap().split(' ').next();
    let admin: std::net::SocketAddr = admin.unwrap().parse().unwrap();
    let reload = async |key: &str| {
        let answer = ask(admin, "POST", "/reload", &bearer(key)).await;
        let body = String::from_utf8_lossy(&answer.body).into_owned();
        (answer.status, body)
    };
    toml.write("admin-port = 1\nadmin-api-key = \"sk-2\"\n");
    let (status, body) = reload("sk-1").await;
    assert!(
        status == 400 && body.contains("needs a restart: admin-port"),
        "{body}"
    );
    toml.write("admin-api-key = \"sk-2\"\n");
    let (status, body) = reload("sk-1").await;
    assert!(
        status == 400 && body.contains("needs a restart: admin-port"),
        "{body}"
    );
    toml.write("admin-port = 0\nadmin-api-key = \"sk-2\"\nclient-api-key = \"c-1\"\n");
    let (status, body) = reload("sk-1").await;
    assert!(
        status == 200 && body.contains("[\"admin-api-key\"]"),
        "{body}"
    );
    let old = reload("sk-1").await.0;
    let client = reload("c-1").await.0;
    assert_eq!((old, client, reload("sk-2").await.0), (401, 403, 200));
}

// ---- the binary's outputs ----

#[test]
fn what_cannot_be_ends_the_start_with_code_2_and_shows_no_key() {
    let bad = File::new("good-key\ncanary with spaces\n");
    let empty = File::new("# canary\n");
    let same = File::new("canary-same\n");
    let toml = File::new("admin-api-key = \"canary bad\"\n");
    for (flags, why) in [
        (
            vec!["--client-api-keys-file", bad.path()],
            "line 2: the key must be",
        ),
        (vec!["--client-api-keys-file", empty.path()], "holds no key"),
        (
            vec!["--client-api-keys-file", "/nowhere/keys"],
            "cannot be read",
        ),
        (vec!["--client-api-key", "canary bad"], "--client-api-key'"),
        (vec!["--admin-api-key", ""], "--admin-api-key'"),
        (
            vec![
                "--admin-api-key",
                "canary-same",
                "--client-api-keys-file",
                same.path(),
            ],
            "is a client's key, too",
        ),
        (vec!["--api-key-wins", "router"], "needs --api-key"),
        (
            vec!["--api-key-wins", "canary"],
            "[possible values: client, router]",
        ),
        (vec!["--config", toml.path()], "line 1: key 'admin-api-key'"),
    ] {
        let mut command = corelane(&["--port", "0", "--prometheus-port", "0"]);
        let output = command.args(&flags).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(why), "{flags:?}: {said}");
        let typed = flags[1] == "canary"; // A choice is no secret, clap repeats it.
        assert!(typed || !said.contains("canary"), "{said}");
    }
}

/// Keys from flag, environment and files; requests good and bad; reloads good and bad; every output searched.
#[tokio::test]
async fn no_key_shows_in_any_output() {
    let worker = Worker::start().await;
    let keys = File::new("canary-file-1\nname:canary-file-2\n");
    let toml = File::new("log-level = \"debug\"\nadmin-api-key = \"canary-admin\"\n");
    let mut command = corelane(&["--port", "0", "--prometheus-port", "0", "--admin-port", "0"]);
    command
        .args(["--worker-urls", &worker.url(), "--config", toml.path()])
        .args(["--api-key", "canary-worker", "--api-key-wins", "router"])
        .env("CORELANE_CLIENT_API_KEY", "canary-env")
        .env("CORELANE_CLIENT_API_KEYS_FILE", keys.path());
    let router = RouterProcess::start(command);
    router.until_healthy().await;
    let line = router.logged("admin=").pop().expect("it says where");
    let admin = line.split("admin=").nth(1).unwrap().split(' ').next();
    let admin: std::net::SocketAddr = admin.unwrap().parse().unwrap();
    let mut outputs = Vec::new();
    let all = [
        "canary-env",
        "canary-file-1",
        "canary-file-2",
        "canary-admin",
        "canary-worker",
        "canary-wrong",
    ];
    let get = |path| ("GET", path);
    let targets = [
        ("POST", CHAT),
        ("POST", "/v1/messages"),
        ("POST", "/sleep"),
        get("/v1/models"),
        get("/get_server_info"),
        get("/list_workers"),
        get("/workers"),
        get("/get_loads"),
        get("/health"),
        get("/metrics"),
        get("/nowhere"),
    ];
    let mut good = 0;
    for to in [router.address, admin, router.metrics] {
        for (method, target) in targets {
            for fields in all.iter().flat_map(|key| [bearer(key), x_api_key(key)]) {
                let answer = ask(to, method, target, &fields).await;
                good += usize::from(answer.status == 200);
                outputs.push(answer.head);
                outputs.push(String::from_utf8_lossy(&answer.body).into_owned());
            }
        }
    }
    assert!(good > 50, "only {good} good answers");
    for (keys_text, toml_text) in [
        ("canary-file-1\n", "admin-api-key = \"canary-admin-2\"\n"),
        ("canary file bad\n", "admin-api-key = \"canary-admin-2\"\n"),
        ("canary-file-1:\n", "admin-api-key = \"canary-admin-2\"\n"),
        ("canary-file-1\n", "admin-api-key = \"canary bad\"\n"),
        ("canary-file-1\n", "admin-api-key = canary-bad\n"),
        ("canary-file-1\n", "admin-api-key = [\"canary-x\"]\n"),
        ("canary-file-1\n", "admin-api-kei = \"canary-x\"\n"),
        ("canary-file-1\n", "admin-api-key = \"canary-file-1\"\n"),
    ] {
        keys.write(keys_text);
        toml.write(&format!("log-level = \"debug\"\n{toml_text}"));
        for key in ["canary-admin", "canary-admin-2"] {
            let answer = ask(admin, "POST", "/reload", &bearer(key)).await;
            outputs.push(String::from_utf8_lossy(&answer.body).into_owned());
        }
        router.signal("HUP");
    }
    keys.write("canary-file-1\ncanary broken\n");
    until("the watch says so", || {
        let said = router.logged("not reloaded");
        said.iter()
            .any(|line| line.contains("line 2: the key must"))
    })
    .await;
    assert!(!router.logged("configuration reloaded").is_empty());
    let mut help = corelane(&["--help"]);
    help.env("CORELANE_ADMIN_API_KEY", "canary-help");
    let help = help.stdout(Stdio::piped()).output().unwrap();
    outputs.push(String::from_utf8_lossy(&help.stdout).into_owned());
    // What workers were told is theirs to see: one key, and no other.
    let told = worker.requests();
    assert!(!told.is_empty());
    for request in &told {
        for (name, value) in &request.fields {
            let value = String::from_utf8_lossy(value);
            let is_theirs =
                name.eq_ignore_ascii_case("authorization") && value == "Bearer canary-worker";
            assert!(is_theirs || !value.contains("canary"), "{name}: {value}");
        }
    }
    outputs.extend(router.logged(""));
    for output in &outputs {
        assert!(!output.contains("canary"), "{output}");
    }
    std::io::stdout().flush().unwrap();
}
