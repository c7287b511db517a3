//! A command line, the file made of it, and what the file says when it is read.

use std::path::PathBuf;

use super::*;
use crate::config::Source;
use crate::config::file::toml_args;
use crate::route::Rng;

/// What a flag may be set to, as words behind it; none: a switch.
fn values(arg: &Arg) -> Vec<Vec<String>> {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return vec![vec![]];
    }
    let named: Vec<String> = arg
        .get_possible_values()
        .iter()
        .map(|value| value.get_name().to_owned())
        .collect();
    let numbers = [
        "0",
        "1",
        "2",
        "0.25",
        "1.5",
        "3.0",
        "1e-3",
        "007",
        "64",
        "512",
        "2048",
        "65536",
        "9223372036854775807",
        "-1",
    ];
    let texts = [
        "/a",
        "x-a",
        "http://w:1",
        "127.0.0.1:53",
        "a \"quoted\" \\ text\u{7f}",
        "*",
        "42",
        "é",
    ];
    let mut words: Vec<String> = match named.is_empty() {
        true => numbers
            .iter()
            .chain(&texts)
            .map(ToString::to_string)
            .collect(),
        false => named,
    };
    let flag = format!("--{}", arg.get_long().unwrap_or_default());
    let takes = |word: &String| {
        Cli::command()
            .try_get_matches_from(["corelane", &flag, word])
            .is_ok()
    };
    words.retain(takes);
    let mut all: Vec<Vec<String>> = words.iter().map(|word| vec![word.clone()]).collect();
    if matches!(arg.get_action(), ArgAction::Append) {
        let is_many = arg.get_num_args().is_some_and(|n| n.max_values() > 1);
        all.extend(is_many.then_some(words.clone()));
        let may_be_bare = arg.get_num_args().is_some_and(|n| n.min_values() == 0);
        all.extend(may_be_bare.then(Vec::new));
    }
    assert!(!all.is_empty(), "{flag}: nothing that it takes is tried");
    all
}

/// The flags that the table does not refuse, each with all that it may be set to.
fn flags() -> Vec<(String, Vec<Vec<String>>)> {
    let command = Cli::command();
    let kept = settable(&command)
        .filter(|(flag, _)| flags::find(flag).is_none_or(|row| row.verdict != Verdict::Refused));
    kept.map(|(flag, arg)| (format!("--{flag}"), values(arg)))
        .collect()
}

/// The raw values of all flags.
fn raw(line: &[String]) -> Vec<(String, Vec<OsString>)> {
    let command = Cli::command();
    let matches = command
        .clone()
        .try_get_matches_from(line)
        .unwrap_or_else(|e| panic!("{line:?}: {e}"));
    let all = settable(&command).map(|(flag, arg)| {
        let id = arg.get_id().as_str();
        let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
        let switch = (is_switch && matches.get_flag(id)).then(|| OsString::from("on"));
        let values = matches
            .get_raw(id)
            .filter(|_| !is_switch)
            .into_iter()
            .flatten();
        (
            flag.to_owned(),
            switch.into_iter().chain(values.map(Into::into)).collect(),
        )
    });
    all.collect()
}

fn of_file(text: &str) -> Vec<String> {
    let said = toml_args::read(text, &Cli::command())
        .unwrap_or_else(|fault| panic!("{text}: {}", fault.reason));
    let args = said.iter().flat_map(|said| said.args.iter());
    let args = args.map(|arg| arg.to_str().expect("text").to_owned());
    std::iter::once("corelane".to_owned()).chain(args).collect()
}

#[test]
fn every_value_of_every_flag_is_the_same_from_the_file_made_of_it() {
    for (flag, values) in flags() {
        for words in values {
            let line: Vec<String> = ["corelane".to_owned(), flag.clone()]
                .into_iter()
                .chain(words)
                .collect();
            let text = file_of_line(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
            let before = raw(&line);
            assert_eq!(before, raw(&of_file(&text)), "{line:?}\n{text}");
            assert!(
                text.contains(flag.trim_start_matches('-')),
                "{line:?}: {text}"
            );
        }
    }
}

/// A file that goes away with the test.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// What a line means, or why it cannot be: the reason's last sentence, which does not say who set it.
fn meaning(line: &[String]) -> Result<String, String> {
    let loaded = Source::new(line).expect("it parses").load();
    let mut loaded = loaded.map_err(|e| {
        e.to_string()
            .rsplit("': ")
            .next()
            .unwrap_or_default()
            .to_owned()
    })?;
    // Of files, not of what was said.
    loaded.config.connection_count_max = 0;
    Ok(format!("{:#?}", loaded.config))
}

/// Lines of many flags, in effect: the same configuration, or the same reason why there is none.
#[test]
fn a_line_of_many_flags_means_the_same_as_the_file_made_of_it() {
    let seed = 0x5eed_c0de;
    println!("seed {seed:#x}");
    let mut rng = Rng::new(seed);
    let flags = flags();
    let file =
        File(std::env::temp_dir().join(format!("corelane-show-{}.toml", std::process::id())));
    let mut good = 0;
    for _ in 0..300 {
        let mut line = vec!["corelane".to_owned()];
        let mut left = flags.clone();
        for _ in 0..1 + rng.below(6) {
            let (flag, values) = left.swap_remove(rng.below(left.len()));
            line.push(flag);
            line.extend(values[rng.below(values.len())].iter().cloned());
        }
        std::fs::write(&file.0, file_of_line(&line).expect("it parses")).unwrap();
        let of_line = meaning(&line);
        let of_file = meaning(&[
            "corelane".into(),
            "--config".into(),
            file.0.to_str().unwrap().into(),
        ]);
        assert_eq!(of_line, of_file, "{line:?}");
        good += usize::from(of_line.is_ok());
    }
    assert!(good > 50, "only {good} of 300 lines can be");
}

#[test]
fn the_file_is_as_one_would_write_it() {
    let line = "corelane --vllm-pd-disaggregation --prefill http://p:1 9000 --prefill http://q:1 none http://r:1 --decode http://d:1 \
                --port 8080 --cache-threshold 0.5 --mini-lb --enable-igw --policy round_robin";
    let text = file_of_line(line.split_whitespace()).unwrap();
    for wanted in [
        "prefill = [[\"http://p:1\", 9000], [\"http://q:1\", \"none\"], \"http://r:1\"]\n",
        "decode = [\"http://d:1\"]\n",
        "port = 8080\n",
        "cache-threshold = 0.5\n",
        "policy = \"round_robin\"\n",
        "vllm-pd-disaggregation = true\n",
        "\n# mini-lb = true\n",
        "# no effect: requests always go",
        "\nenable-igw = true\n",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    assert!(!text.contains("queue-size"), "nobody set it: {text}");
    assert!(file_of_line(["corelane", "--config", "/x"]).is_err());
    assert!(file_of_line(["corelane", "doctor"]).is_err());
}

#[test]
fn what_is_in_force_is_a_file_with_who_set_it_and_without_secrets() {
    let line = [
        "corelane",
        "--api-key",
        "sesame",
        "--cores",
        "1",
        "--retry-jitter-factor",
        "0.1",
        "--kv-penalty-disk",
        "0",
    ];
    let loaded = Source::new(line).unwrap().load().unwrap();
    let text = in_force(&loaded.settings, &loaded.config);
    for wanted in [
        "\nport = 30000  # default\n",
        "\ncores = 1  # command line\n",
        "\n# api-key is set, not shown  # command line\n",
        "\n# first-byte-timeout-secs = 1800  # follows from the rest\n",
        "\n# tls-cert is not set\n",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    assert!(!text.contains("sesame"), "{text}");
    let (known, unknown): (Vec<_>, Vec<_>) = text.lines().partition(|line| !line.starts_with('#'));
    assert!(known.len() > 50 && !unknown.is_empty());
    assert!(toml_args::read(&known.join("\n"), &Cli::command()).is_ok());
    let notices: Vec<String> = loaded.notices.iter().map(ToString::to_string).collect();
    assert_eq!(
        notices,
        [
            "--kv-penalty-disk: no effect without the policy kv_aware",
            "--retry-jitter-factor: no effect: a retry goes to another worker, at once",
        ]
    );
}
