//! Files and what they mean. Precedence over the environment is tested with the real binary (`tests/reload.rs`): a test
//! cannot set a variable of its own process safely.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::config::{Connector, WorkerSpec};
use crate::route::{PolicyKind, Role};

/// A file that goes away with the test.
struct File(PathBuf);

impl File {
    fn new(text: &str) -> File {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "corelane-config-{}-{}.toml",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Loads `text` with further flags on the command line. Errors come without the file's path, which must be there.
fn load_with(flags: &str, text: &str) -> Result<Loaded, String> {
    let file = File::new(text);
    let path = file.0.to_str().unwrap();
    let line = ["corelane", "--config", path].into_iter();
    let source = Source::new(line.chain(flags.split_whitespace())).expect("the line parses");
    source.load().map_err(|error| {
        let error = error.to_string();
        assert!(!error.contains('\n'), "{error}");
        match error.strip_prefix(path) {
            Some(rest) => rest.trim_start_matches([',', ':', ' ']).to_owned(),
            None => error,
        }
    })
}

fn load(text: &str) -> Config {
    match load_with("", text) {
        Ok(loaded) => loaded.config,
        Err(error) => panic!("{text}: {error}"),
    }
}

fn refusal(text: &str) -> String {
    match load_with("", text) {
        Ok(_) => panic!("taken: {text}"),
        Err(error) => error,
    }
}

fn urls(config: &Config) -> Vec<&str> {
    config.workers.iter().map(|w| &**w.url.text()).collect()
}

#[test]
fn every_kind_of_value_is_read() {
    let config = load(
        r#"
        # Comments, both spellings of names, all kinds of values.
        policy = "round_robin"
        balance-abs-threshold = 0x2_0
        balance_rel_threshold = 1.25
        max_payload_size = 1_000_000
        degraded-ratio = 0
        disable-retries = true
        disable_circuit_breaker = false
        prefix-hash-seed = "18446744073709551615"
        worker-urls = ["http://a:1", 'http://b:2']
        request-id-headers = []
        io-uring-without = ["multishot-receive"]
        api-key = "sesame"
        "#,
    );
    let settings = &config.settings;
    assert_eq!(
        (settings.policy, settings.balance_abs_threshold),
        (PolicyKind::RoundRobin, 32)
    );
    assert_eq!(settings.balance_rel_threshold, 1.25);
    assert_eq!(config.body_bytes_max, 1_000_000);
    assert_eq!(config.standing.degraded_ratio, 0.0);
    assert_eq!(config.retry.retries_max, 0);
    assert!(config.standing.has_breaker);
    assert_eq!(config.prefix_hash_seed, u64::MAX);
    assert_eq!(urls(&config), ["http://a:1", "http://b:2"]);
    assert!(config.request_id_headers.is_empty());
    assert!(!config.multishot_receive && config.deferred_task_run);
    assert_eq!(config.api_key.unwrap().expose(), "sesame");
    // One text for a list is as in the environment.
    let config = load("worker_urls = \"http://a:1 http://b:2\"\nio_uring_without = []");
    assert_eq!(urls(&config).len(), 2);
    assert!(config.multishot_receive);
}

#[test]
fn prefill_workers_are_pairs_or_texts() {
    let pairs = r#"prefill = [["http://a:1", 8990], ["http://b:1", "none"], ["http://c:1"], "http://d:1 8991"]"#;
    let rest =
        "vllm-pd-disaggregation = true\ndecode = [\"http://e:1\"]\nkv-connector = \"mooncake\"";
    let config = load(&format!("{pairs}\n{rest}"));
    let prefill = config.workers.iter().filter(|w| w.role == Role::Prefill);
    let read: Vec<(&str, Option<u16>)> = prefill
        .map(
            |WorkerSpec {
                 url,
                 bootstrap_port,
                 ..
             }| (&**url.text(), *bootstrap_port),
        )
        .collect();
    assert_eq!(
        read,
        [
            ("http://a:1", Some(8990)),
            ("http://b:1", None),
            ("http://c:1", None),
            ("http://d:1", Some(8991))
        ]
    );
    assert_eq!(config.pd.unwrap().connector, Connector::Mooncake);
}

#[test]
fn the_command_line_wins_over_the_file_and_the_file_over_defaults() {
    let file = "policy = \"random\"\nretry-max-retries = 3\nworker-urls = [\"http://file:1\"]\ndisable-retries = false";
    let load = |flags| {
        load_with(flags, file)
            .unwrap_or_else(|e| panic!("{e}"))
            .config
    };
    let config = load("");
    assert_eq!(
        (config.settings.policy, config.retry.retries_max),
        (PolicyKind::Random, 3)
    );
    assert_eq!(urls(&config), ["http://file:1"]);
    assert_eq!(config.settings.cache_threshold, 0.3);
    // A list is one setting: it is not added to. Lists and ends of lists stay what they are on the line.
    let config =
        load("--retry-max-retries 0 --policy least_loaded --worker-urls http://a:1 http://b:1");
    assert_eq!(
        (config.settings.policy, config.retry.retries_max),
        (PolicyKind::LeastLoaded, 0)
    );
    assert_eq!(urls(&config), ["http://a:1", "http://b:1"]);
    assert!(load("--worker-urls").workers.is_empty());
    assert_eq!(load("--disable-retries").retry.retries_max, 0);
}

/// Each flag can be set in the file: with its default as a text, nothing changes.
#[test]
fn a_file_of_all_defaults_changes_nothing() {
    let mut command = Cli::command();
    command.build();
    let mut text = String::new();
    let mut count = 0;
    for (flag, arg) in settable(&command) {
        let values = arg.get_default_values().iter();
        let values: Vec<String> = values
            .map(|v| format!("{:?}", v.to_str().unwrap()))
            .collect();
        match arg.get_action() {
            clap::ArgAction::SetTrue => text += &format!("{flag} = false\n"),
            clap::ArgAction::Append => text += &format!("{flag} = [{}]\n", values.join(", ")),
            _ if values.is_empty() => continue,
            _ => text += &format!("{flag} = {}\n", values[0]),
        }
        count += 1;
    }
    assert!(count > 60, "{count}");
    let loaded = load_with("", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let plain = Source::new(["corelane"]).unwrap().load().unwrap();
    assert_eq!(plain.keys.changed(&loaded.keys), [""; 0]);
    assert_eq!(
        format!("{:?}", plain.config),
        format!("{:?}", loaded.config)
    );
}

#[test]
fn keys_that_cannot_be_are_named_with_their_line() {
    for (text, wanted) in [
        (
            "\npolcy = \"random\"",
            "line 2: unknown key 'polcy'; is 'policy' meant?",
        ),
        ("xyzzy = 1", "line 1: unknown key 'xyzzy': keys are"),
        (
            "config = \"x\"",
            "line 1: 'config' cannot be set in the file",
        ),
        ("help = true", "line 1: 'help' cannot be set in the file"),
        (
            "version = true",
            "line 1: 'version' cannot be set in the file",
        ),
        // A flag of the mock worker and of the demo.
        ("itl = \"instant\"", "line 1: unknown key 'itl'"),
        ("load = 8", "line 1: unknown key 'load'"),
        (
            "\n\n[policy]\nname = 1",
            "line 3: 'policy' is a table: keys are flat",
        ),
        ("a.b = 1", "line 1: 'a' is a table: keys are flat"),
        (
            "max-tree-size = 1\nmax_tree_size = 2",
            "key 'max-tree-size' is given twice",
        ),
        ("port = 1\nport = 2", "line 2: not TOML: duplicate key"),
        ("port = 1\nport 2", "line 2: not TOML: "),
    ] {
        let error = refusal(text);
        assert!(
            error.starts_with(wanted) || error.contains(wanted),
            "{text}: {error}"
        );
    }
}

#[test]
fn values_that_cannot_be_are_told_with_line_key_and_reason() {
    for (text, wanted) in [
        (
            "\npolicy = \"randm\"",
            "line 2: key 'policy': invalid value 'randm'",
        ),
        ("policy = \"randm\"", "[possible values: "),
        ("port = 70000", "line 1: key 'port': invalid value '70000'"),
        ("port = -1", "line 1: key 'port': invalid value '-1'"),
        (
            "cache-threshold = 1.5",
            "key 'cache-threshold': invalid value '1.5' for '--cache-threshold <RATIO>': must be from 0 to 1",
        ),
        ("cache-threshold = nan", "must be from 0 to 1"),
        (
            "port = [1]",
            "line 1: key 'port': takes one value, not an array",
        ),
        (
            "policy = true",
            "key 'policy': takes a text or a number, not a boolean",
        ),
        ("policy = 2020-01-01", "not a date"),
        ("worker-urls = [{url = \"http://a:1\"}]", "not a table"),
        (
            "disable-retries = \"yes\"",
            "key 'disable-retries': must be true or false",
        ),
        (
            "balance-abs-threshold = 99999999999999999999999999999999999999999",
            "too large a number",
        ),
        // What concerns several flags.
        (
            "worker-urls = [\"ftp://a\"]",
            "line 1: key 'worker-urls': invalid value for '--worker-urls': worker URL 'ftp://a'",
        ),
        (
            "\nprefill = [\"http://a:1\"]",
            "line 2: key 'prefill': invalid value for '--prefill': needs --vllm-pd-disaggregation",
        ),
        ("retry-max-backoff-ms = 1", "key 'retry-max-backoff-ms': "),
    ] {
        let error = refusal(text);
        assert!(error.contains(wanted), "{text}: {error}");
    }
}

#[test]
fn secrets_show_in_no_message() {
    for text in [
        "api-key = \"sesame\u{e4}\"",
        "api-key = [\"sesame\"]",
        "api-key = \"sesame",
        "api-key = sesame",
        "api-key = {sesame = 1}",
        "api-key = \"\"\nprefix-hash-seed = \"sesame\"",
        "prefix-hash-seed = \"sesame\"",
        "worker-urls = [\"http://user:sesame@a\"]",
    ] {
        let error = refusal(text);
        assert!(
            !error.contains("sesame") && error.contains("line "),
            "{text}: {error}"
        );
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let missing = File::new("");
    std::fs::remove_file(&missing.0).unwrap();
    for path in [missing.0.clone(), std::env::temp_dir()] {
        let source = Source::new(["corelane".as_ref(), "--config".as_ref(), path.as_os_str()]);
        let error = source.unwrap().load().err().unwrap().to_string();
        let wanted = format!("{}: cannot be read: ", path.display());
        assert!(error.starts_with(&wanted), "{error}");
    }
}

#[test]
fn changed_keys_are_those_whose_values_differ() {
    let load =
        |text| load_with("--balance-abs-threshold 7", text).unwrap_or_else(|e| panic!("{e}"));
    let before = load("policy = \"random\"\nworker-urls = [\"http://a:1\"]\napi-key = \"x\"");
    let after = load(
        "policy = \"random\"\nworker_urls = [\"http://b:1\"]\nbalance-abs-threshold = 9\ndisable-retries = true",
    );
    assert_eq!(
        before.keys.changed(&after.keys),
        ["api-key", "disable-retries", "worker-urls"]
    );
    assert_eq!(after.keys.changed(&after.keys), [""; 0]);
}

/// One change of each fixed setting is found, under its own name and no other; of the rest, none is.
#[test]
fn what_is_fixed_at_start_is_named() {
    let pd = "vllm-pd-disaggregation = true\n";
    let pods = "service-discovery = true\nselector = [\"a=b\"]\n";
    let table = [
        ("", "host", "\"127.0.0.2\""),
        ("", "port", "31234"),
        ("", "prometheus-host", "\"::1\""),
        ("", "prometheus-port", "31235"),
        ("cores = 1", "recv-buffer-bytes", "65536"),
        ("", "recv-buffer-count", "256"),
        ("", "io-uring-without", "[\"deferred-task-run\"]"),
        ("", "prefix-memory-bytes", "1_000_000"),
        ("", "prefix-hash-seed", "5"),
        ("", "max-tree-size", "1000"),
        ("", "intra-node-data-parallel-size", "2"),
        ("", "vllm-pd-disaggregation", "true"),
        (pd, "kv-connector", "\"mooncake\""),
        (pd, "vllm-discovery-address", "\"127.0.0.1:0\""),
        (pods, "service-discovery-port", "8000"),
        (pods, "service-discovery-namespace", "\"llm\""),
    ];
    for (before, flag, value) in table {
        let one = load_with("", before).unwrap_or_else(|e| panic!("{e}"));
        let other = load_with("", &format!("{before}\n{flag} = {value}"));
        let other = other.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(one.keys.changed(&other.keys), [flag]);
        let found = one.config.fixed_differences(&other.config);
        assert!(found.contains(&flag), "{flag}: {found:?}");
        let with_it = ["kv-connector"];
        assert!(
            found.iter().all(|f| *f == flag || with_it.contains(f)),
            "{flag}: {found:?}"
        );
    }
    let of = |label| {
        load(&format!(
            "service-discovery = true\nselector = [\"{label}\"]"
        ))
    };
    assert_eq!(of("a=b").fixed_differences(&of("a=c")), ["selector"]);
    // Cores: as many as there are but one, or this machine has no other number.
    let mut other = load("");
    other.core_count += 1;
    assert_eq!(load("").fixed_differences(&other), ["cores"]);
    let free = load(
        "policy = \"random\"\nkv-connector = \"mooncake\"\nslow-start-secs = 1\nmax-connections = 7",
    );
    assert_eq!(load("").fixed_differences(&free), [""; 0]);
}

/// A name that points elsewhere is no wish of anybody: what runs, holds.
#[test]
fn what_the_machine_says_otherwise_is_kept() {
    let running = load("");
    let mut config = load("policy = \"random\"\nport = 1\nprometheus-port = 2");
    config.core_count += 1;
    config.keep_fixed(&running);
    assert_eq!(running.fixed_differences(&config), [""; 0]);
    assert_eq!(config.settings.policy, PolicyKind::Random);
}
