//! The manual page and the shells' completions, made from the flags themselves: `corelane man` and
//! `corelane completions SHELL`. What no flag says (environment, files, signals, exit codes) stands in `sections.man`.
#![forbid(unsafe_code)]

use std::io::{self, Write};

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::config::Cli;

/// In roff, as it goes into the page.
const SECTIONS: &str = include_str!("sections.man");
/// For who uses the page: the default is one flag after the other, four screens of them.
const SYNOPSIS: &str = "corelane [FLAGS]\ncorelane COMMAND [FLAGS]";

/// Writes the page corelane(1), in roff: all flags by group, all subcommands with theirs.
///
/// # Errors
/// Those of `out`.
pub fn write_man(out: &mut dyn Write) -> io::Result<()> {
    let mut command = Cli::command().override_usage(SYNOPSIS);
    command.build();
    let page = Man::new(command.clone()).manual("Corelane");
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    out.write_all(part("DESCRIPTION").as_bytes())?;
    page.render_options_section(out)?;
    writeln!(out, ".SH COMMANDS")?;
    for subcommand in command.get_subcommands().filter(|c| !c.is_hide_set()) {
        write_subcommand(out, subcommand)?;
    }
    let rest = SECTIONS.strip_prefix(part("DESCRIPTION"));
    out.write_all(rest.unwrap_or(SECTIONS).as_bytes())
}

/// The section of this name, its heading among it.
fn part(name: &str) -> &'static str {
    let head = format!(".SH {name}\n");
    let begin = SECTIONS.find(&head).unwrap_or(0);
    let body = begin + head.len();
    let end = SECTIONS[body..]
        .find(".SH ")
        .map_or(SECTIONS.len(), |at| body + at);
    &SECTIONS[begin..end]
}

/// Its flags are headed one step lower than those of the page, and its groups are paragraphs.
fn write_subcommand(out: &mut dyn Write, subcommand: &Command) -> io::Result<()> {
    writeln!(out, ".SS \"corelane {}\"", subcommand.get_name())?;
    let page = Man::new(subcommand.clone().disable_help_flag(true));
    let mut text = Vec::new();
    page.render_description_section(&mut text)?;
    if subcommand.get_arguments().next().is_some() {
        page.render_options_section(&mut text)?;
    }
    for line in String::from_utf8_lossy(&text).lines() {
        match line.strip_prefix(".SH ") {
            // Those two say nothing below a subcommand's name.
            Some("DESCRIPTION" | "OPTIONS") => {}
            Some(group) => writeln!(out, ".P\n.I {group}")?,
            // What stands before the first heading is written once, by the page.
            None if line.starts_with(".ie") || line.starts_with(".el") => {}
            None => writeln!(out, "{line}")?,
        }
    }
    Ok(())
}

/// Writes the completions of a shell.
pub fn write_completions(shell: Shell, out: &mut dyn Write) {
    clap_complete::generate(shell, &mut Cli::command(), "corelane", out);
}

#[cfg(test)]
mod tests;
