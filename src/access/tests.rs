use super::*;

fn table(keys: &[&str]) -> Option<KeyTable> {
    KeyTable::new(keys.iter().map(|key| Digest::of(key.as_bytes())))
}

fn access(clients: &[&str], admin: Option<&str>) -> Access {
    Access {
        clients: table(clients),
        admin: admin.map(|key| Digest::of(key.as_bytes())),
    }
}

#[test]
fn each_key_is_found_and_nothing_that_is_like_one() {
    let keys: Vec<String> = (0..1000).map(|n| format!("sk-{n:04}")).collect();
    let all: Vec<&str> = keys.iter().map(String::as_str).collect();
    let table = table(&all).unwrap();
    assert_eq!(table.len(), 1000);
    for key in &all {
        assert!(table.holds(&Digest::of(key.as_bytes())), "{key}");
        let near = [
            &key[..key.len() - 1],
            &format!("{key}0"),
            &key.to_uppercase(),
        ];
        for near in near {
            assert!(!table.holds(&Digest::of(near.as_bytes())), "{near}");
        }
    }
    assert!(KeyTable::new([]).is_none());
}

/// Entries that begin alike are told apart by their ends, whichever is first.
#[test]
fn digests_that_begin_alike_are_compared_whole() {
    let one = Digest::of(b"one");
    let of_end = |end: u8| {
        let mut bytes = one.to_bytes();
        bytes[31] = end;
        Digest::from_bytes(bytes)
    };
    let table = KeyTable::new([of_end(1), of_end(3), of_end(5)]).unwrap();
    for end in 0..7 {
        assert_eq!(table.holds(&of_end(end)), [1, 3, 5].contains(&end), "{end}");
    }
}

#[test]
fn tables_of_the_same_keys_are_equal_and_nothing_shows_a_key() {
    assert_eq!(table(&["a", "b"]), table(&["b", "a", "a"]));
    assert_ne!(table(&["a", "b"]), table(&["a", "c"]));
    let shown = format!("{:?}", access(&["canary-client"], Some("canary-admin")));
    assert!(!shown.contains("canary"), "{shown}");
}

#[test]
fn the_file_has_keys_with_and_without_names() {
    let text =
        "\u{feff}# of the team\n\n  plain-key \r\nteam-a:sk-1\nteam-a : sk:with:colons\n#x:y\n";
    let digests = keys::parse(text).unwrap();
    let wanted = ["plain-key", "sk-1", "sk:with:colons"].map(|key| Digest::of(key.as_bytes()));
    assert_eq!(digests, wanted);
}

#[test]
fn a_bad_line_is_told_by_its_number_and_never_shown() {
    let long = format!("a:{}", "canary".repeat(200));
    for (text, why) in [
        ("", "holds no key"),
        ("# only a comment\n\n", "holds no key"),
        (
            "good\ncanary with spaces",
            "line 2: the key must be printable",
        ),
        (
            "good\n\na:canary\u{e4}",
            "line 3: the key must be printable",
        ),
        ("a:", "line 1: the key must be printable"),
        (":canary", "line 1: the name"),
        ("canary/1:x", "line 1: the name"),
        ("canary\nb:canary", "line 2: the same key as in line 1"),
        (&long, "line 1: the key must be at most 1024"),
    ] {
        let said = keys::parse(text).unwrap_err();
        assert!(said.contains(why), "{text:?}: {said}");
        assert!(!said.contains("canary"), "{said}");
    }
}

#[test]
fn bearer_tokens_are_read_and_other_schemes_are_not() {
    for (value, token) in [
        ("Bearer k", Some("k")),
        ("bearer  k ", Some("k")),
        ("BEARER k", Some("k")),
        ("Bearer ", Some("")),
        ("Bearer", None),
        ("Basic k", None),
        ("Bearerk", None),
        ("k", None),
        ("", None),
    ] {
        let found = bearer(value.as_bytes());
        assert_eq!(found, token.map(str::as_bytes), "{value}");
    }
}

/// The table of the module, and its three variants.
#[test]
fn needs_and_callers() {
    use Caller::{Admin, Client};
    let both = access(&["c"], Some("a"));
    let clients = access(&["c"], None);
    let admin = access(&[], Some("a"));
    let open = access(&[], None);
    let (yes, no, not_admin) = (Ok(()), Err(Denied::NoKey), Err(Denied::NotAdmin));
    for (access, need, wanted) in [
        (&both, Need::Nothing, [yes, yes, yes]),
        (&both, Need::Client, [no, yes, yes]),
        (&both, Need::Admin, [no, not_admin, yes]),
        (&clients, Need::Nothing, [yes, yes, yes]),
        (&clients, Need::Client, [no, yes, yes]),
        (&clients, Need::Admin, [no, yes, yes]),
        (&admin, Need::Client, [yes, yes, yes]),
        (&admin, Need::Admin, [no, not_admin, yes]),
        (&open, Need::Admin, [yes, yes, yes]),
    ] {
        let found = [None, Some(Client), Some(Admin)].map(|caller| access.permit(need, caller));
        assert_eq!(found, wanted, "{access:?} {need:?}");
    }
    let judge = |auth: Option<&str>, key: Option<&str>| {
        let brought = both.judge(auth.map(str::as_bytes), key.map(str::as_bytes));
        brought.caller()
    };
    for (auth, key, caller) in [
        (None, None, None),
        (Some("Bearer c"), None, Some(Client)),
        (Some("Bearer a"), None, Some(Admin)),
        (Some("Basic c"), None, None),
        (Some("c"), None, None),
        (Some("Bearer "), Some(""), None),
        (None, Some("c"), Some(Client)),
        (None, Some("a"), Some(Admin)),
        (Some("Bearer x"), Some("c"), Some(Client)),
        (Some("Bearer c"), Some("a"), Some(Admin)),
        (Some("Bearer x"), Some("y"), None),
    ] {
        assert_eq!(judge(auth, key), caller, "{auth:?} {key:?}");
    }
}

#[test]
fn engines_are_ruled_by_paths_in_any_spelling() {
    for path in [
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        "/collective_rpc",
        "/pause",
        "/resume",
        "/update_weights",
        "/update_weights_from_disk",
        "/init_weights_update_group",
        "/init_weight_transfer_engine",
        "/scale_elastic_ep",
        "/abort_requests",
        "/fault_tolerance/apply",
        "/hicache/storage-backend",
        "/server_info",
        "/metrics",
        "/sleep/",
        "//sleep",
        "/./sleep",
        "/x/../sleep",
        "/v1/../sleep",
        "/%73leep",
        "/%2573leep",
        "/%252573leep",
        "/%25252573leep",
        "/v1%2Fload_lora_adapter",
        "/SLEEP",
        "/sleep;x=1",
        "/sleep%20",
        "/x\\..\\sleep",
    ] {
        assert!(paths::is_engine_admin(path), "{path}");
    }
    for path in [
        "/",
        "",
        "*",
        "/v1",
        "/v1/",
        "/v1/chat/completions",
        "/v1/audio/transcriptions",
        "/detokenize",
        "/version",
        "/ping",
        "/load",
        "/sleepy",
        "/v1/files/sleep",
        "/x/sleep",
        "/sleep/..",
        "/a%20b",
        "/100%",
        "/100%zz",
    ] {
        assert!(!paths::is_engine_admin(path), "{path}");
    }
}
