//! The layering rule of `src/lib.rs`: a module names only what lies below it, and the runtime is named in its seams only.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What each module may name of this crate, besides itself.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("ring", &[] as &[&str]),
        ("log_thread", &[]),
        ("access_log", &["log_thread"]),
        ("decisions", &["log_thread", "route", "shared"]),
        ("access", &[]),
        ("held", &[]),
        ("http", &[]),
        ("notify", &[]),
        ("tls", &[]),
        ("listen", &["config", "ring"]),
        ("demo", &[]),
        ("route", &["shared"]),
        ("tokenize", &["route", "shared"]),
        (
            "sim",
            &["config", "control", "decisions", "plot", "route", "shared"],
        ),
        ("plot", &[]),
        ("bench", &["http", "plot", "ring", "route", "sim"]),
        ("upstream", &["ring"]),
        (
            "config",
            &[
                "access",
                "access_log",
                "bench",
                "held",
                "http",
                "route",
                "tls",
                "demo",
                "tokenize",
                "sim",
            ],
        ),
        ("doctor", &["config", "ring"]),
        ("manual", &["config"]),
        (
            "shared",
            &[
                "access_log",
                "config",
                "decisions",
                "held",
                "ring",
                "route",
                "tls",
                "tokenize",
            ],
        ),
        (
            "exchange",
            &[
                "access",
                "access_log",
                "config",
                "held",
                "http",
                "route",
                "shared",
                "tokenize",
            ],
        ),
        (
            "control",
            &[
                "access",
                "config",
                "decisions",
                "notify",
                "route",
                "shared",
                "tls",
            ],
        ),
        (
            "core",
            &[
                "access_log",
                "config",
                "decisions",
                "exchange",
                "held",
                "ring",
                "route",
                "shared",
                "tls",
                "tokenize",
                "upstream",
            ],
        ),
        (
            "start",
            &[
                "access_log",
                "config",
                "control",
                "core",
                "decisions",
                "doctor",
                "held",
                "listen",
                "log_thread",
                "ring",
                "route",
                "shared",
                "tokenize",
            ],
        ),
    ])
}

fn sources(path: &Path, out: &mut Vec<std::path::PathBuf>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            sources(&entry.unwrap().path(), out);
        }
    } else if path.extension().is_some_and(|e| e == "rs") {
        out.push(path.to_path_buf());
    }
}

/// The code of a file without comments and unit tests.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or("")
        .to_string();
    text.lines()
        .map(|l| l.split("//").next().unwrap_or(""))
        .collect::<Vec<_>>()
        .join("\n")
}

fn files_of(module: &str) -> Vec<std::path::PathBuf> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    let file = src.join(format!("{module}.rs"));
    sources(
        &if file.exists() {
            file
        } else {
            src.join(module)
        },
        &mut files,
    );
    assert!(!files.is_empty(), "no module {module}");
    files.retain(|f| {
        !f.file_stem()
            .is_some_and(|s| s.to_string_lossy().ends_with("tests"))
    });
    files
}

#[test]
fn modules_name_only_what_lies_below_them() {
    let mut wrong = Vec::new();
    let rules = allowed();
    for (module, below) in &rules {
        for file in files_of(module) {
            let code = code(&file);
            for other in rules.keys().filter(|m| *m != module && !below.contains(m)) {
                let names = [
                    format!("crate::{other}::"),
                    format!("crate::{other};"),
                    format!("crate::{{{other}"),
                ];
                if names.iter().any(|name| code.contains(name.as_str())) {
                    wrong.push(format!("{} names {other}", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_runtime_is_named_in_its_seams_only() {
    for (name, seams) in [("glommio", &["core"] as &[&str]), ("io_uring::", &["ring"])] {
        for module in allowed().keys().filter(|m| !seams.contains(m)) {
            for file in files_of(module) {
                assert!(
                    !code(&file).contains(name),
                    "{} names {name}",
                    file.display()
                );
            }
        }
        assert!(
            files_of(seams[0]).iter().any(|f| code(f).contains(name)),
            "the seam itself does not name {name}"
        );
    }
}

#[test]
fn unsafe_code_is_in_the_ring_and_the_shards_only() {
    for module in allowed().keys().filter(|m| **m != "ring") {
        for file in files_of(module) {
            let code = code(&file)
                .replace("forbid(unsafe_code)", "")
                .replace("deny(unsafe_code)", "");
            assert!(!code.contains("unsafe"), "{}", file.display());
        }
    }
}

#[test]
fn every_module_but_the_ring_forbids_unsafe_code() {
    const FORBIDS: &str = "forbid(unsafe_code)";
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let text = fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut before = "";
    let mut modules = Vec::new();
    for line in text.lines() {
        let name = line.trim_start_matches("pub ").strip_prefix("mod ");
        if let Some(name) = name.and_then(|name| name.strip_suffix(';')) {
            let files = [format!("{name}.rs"), format!("{name}/mod.rs")];
            let forbids_itself = files.iter().any(|file| {
                let text = fs::read_to_string(src.join(file)).unwrap_or_default();
                text.contains(&format!("#![{FORBIDS}]"))
            });
            let forbids = before == format!("#[{FORBIDS}]") || forbids_itself;
            assert_eq!(forbids, name != "ring", "{name}");
            modules.push(name);
        }
        before = line;
    }
    assert!(modules.len() >= 15, "{modules:?}");
    let main = fs::read_to_string(src.join("main.rs")).unwrap();
    assert!(main.contains(&format!("#![{FORBIDS}]")));
}

#[test]
fn shards_depend_on_nothing_of_ours_and_no_runtime() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("shards/Cargo.toml");
    let manifest = fs::read_to_string(manifest).unwrap();
    let wanted = ["crossbeam", "loom", "ahash"];
    let mut in_dependencies = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            in_dependencies = line.contains("dependencies") && !line.contains("dev-dependencies");
        } else if in_dependencies && let Some((name, _)) = line.split_once('=') {
            assert!(wanted.contains(&name.trim()), "shards depends on {name}");
        }
    }
}
