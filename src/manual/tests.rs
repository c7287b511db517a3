use clap::CommandFactory;
use clap_complete::Shell;

use super::{write_completions, write_man};
use crate::config::Cli;

fn page() -> String {
    let mut page = Vec::new();
    write_man(&mut page).unwrap();
    String::from_utf8(page).unwrap()
}

fn completions(shell: Shell) -> String {
    let mut text = Vec::new();
    write_completions(shell, &mut text);
    String::from_utf8(text).unwrap()
}

/// Long names of what `corelane --help` shows, and of the subcommands.
fn names() -> (Vec<String>, Vec<String>) {
    let mut command = Cli::command();
    command.build();
    let flags = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let flags = flags.filter_map(|arg| arg.get_long().map(str::to_owned));
    let shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    let subcommands = shown.map(|c| c.get_name().to_owned());
    (flags.collect(), subcommands.collect())
}

#[test]
fn the_page_has_every_flag_in_its_group_and_every_subcommand() {
    let page = page();
    let (flags, subcommands) = names();
    assert!(flags.len() > 100 && subcommands.len() >= 5);
    for flag in flags {
        let head = format!("\\fB\\-\\-{}\\fR", flag.replace('-', "\\-"));
        assert!(page.contains(&head), "--{flag}");
    }
    for name in subcommands {
        assert!(
            page.contains(&format!(".SS \"corelane {name}\"\n")),
            "{name}"
        );
    }
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("no {text}"));
    let group = at(".SH \"FAILING WORKERS\"");
    let flag = at("\\fB\\-\\-stall\\-window\\-ms\\fR");
    assert!(group < flag && flag < at(".SH HEALTH"));
    assert!(at("\\fB\\-\\-itl\\fR") > at(".SS \"corelane demo\""));
}

#[test]
fn the_page_says_each_thing_once_and_in_order() {
    let page = page();
    let sections = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "COMMANDS",
        "ENVIRONMENT",
        "FILES",
        "SIGNALS",
        "EXIT STATUS",
    ];
    let mut before = 0;
    for section in sections {
        let heads: Vec<usize> = page
            .match_indices(&format!(".SH {section}\n"))
            .map(|(at, _)| at)
            .collect();
        assert_eq!(heads.len(), 1, "{section}");
        assert!(heads[0] > before, "{section}");
        before = heads[0];
    }
}

#[test]
fn completions_know_flags_values_and_subcommands() {
    let (flags, subcommands) = names();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let text = completions(shell);
        for name in flags.iter().chain(&subcommands) {
            assert!(text.contains(name.as_str()), "{shell}: {name}");
        }
        assert!(text.contains("rendezvous_hash"), "{shell}");
    }
}
