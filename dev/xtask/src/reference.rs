//! The tables of options in docs/configuration.md, made from the programs' own definitions.
//!
//! The generated parts are between the comments `<!-- options of flanneld -->` and
//! `<!-- end -->`; everything else in the file is written by hand.

use std::fmt::Write;

use anyhow::{Context, Result};
use clap::{Arg, Command, CommandFactory};

use crate::tree::Tree;

const PATH: &str = "docs/configuration.md";

/// The file with current tables: its path and content.
pub(crate) fn update(tree: &Tree) -> Result<(String, String)> {
    let mut text = tree.read(PATH)?;
    for (name, table) in [
        ("options of flanneld", options(flanneld::Options::command())),
        ("verbs of flannelctl", verbs(flannelctl::command())),
    ] {
        text = replace(&text, name, &table)?;
    }
    Ok((PATH.to_owned(), text))
}

/// Replaces a generated part.
fn replace(text: &str, name: &str, table: &str) -> Result<String> {
    let begin = format!("<!-- {name} -->\n");
    let end = "<!-- end -->";
    let (before, rest) =
        text.split_once(&begin).with_context(|| format!("{PATH}: a line {}", begin.trim()))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("{PATH}: a line {end}"))?;
    Ok(format!("{before}{begin}\n{table}\n{end}{after}"))
}

/// A table of options for each heading of the help.
fn options(mut command: Command) -> String {
    command.build();
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_help_heading().is_some();
    let mut headings: Vec<&str> = Vec::new();
    for heading in command.get_arguments().filter(shown).filter_map(Arg::get_help_heading) {
        if !headings.contains(&heading) {
            headings.push(heading);
        }
    }
    let mut text = String::new();
    for heading in headings {
        let args = command
            .get_arguments()
            .filter(shown)
            .filter(|arg| arg.get_help_heading() == Some(heading));
        let _ = write!(text, "### {heading}\n\n{}\n", table(args));
    }
    text.trim_end().to_owned() + "\n"
}

/// The verbs, each with its options.
fn verbs(mut command: Command) -> String {
    command.build();
    let mut text = "| command | meaning |\n|---|---|\n".to_owned();
    let mut tables = String::new();
    let mut all: Vec<&Command> = command.get_subcommands().collect();
    all.reverse();
    while let Some(verb) = all.pop() {
        if verb.is_hide_set() || verb.get_name() == "help" {
            continue;
        }
        let mut below: Vec<&Command> = verb.get_subcommands().collect();
        if !below.is_empty() {
            below.reverse();
            all.extend(below);
            continue;
        }
        let name = verb.get_bin_name().unwrap_or_default();
        let name = name.trim_start_matches("flannelctl ");
        let operands = verb.get_positionals().map(|arg| {
            let value = arg.get_value_names().and_then(<[_]>::first).map_or("", |name| name);
            if arg.is_required_set() { value.to_owned() } else { format!("[{value}]") }
        });
        let usage: Vec<String> = std::iter::once(name.to_owned()).chain(operands).collect();
        let meaning = verb.get_about().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(text, "| `{}` | {} |", usage.join(" "), cell(&meaning));
        let args: Vec<&Arg> = verb
            .get_arguments()
            .filter(|arg| !arg.is_hide_set() && !arg.is_global_set() && !arg.is_positional())
            .filter(|arg| !["help", "version"].contains(&arg.get_id().as_str()))
            .collect();
        if !args.is_empty() {
            let _ = write!(tables, "\n`flannelctl {name}`:\n\n{}", table(args.into_iter()));
        }
    }
    let globals = command.get_arguments().filter(|arg| arg.is_global_set() && !arg.is_hide_set());
    format!("{text}\nEvery command takes:\n\n{}{tables}", table(globals))
}

/// A table of options.
fn table<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    let mut text = "| option | default | meaning |\n|---|---|---|\n".to_owned();
    for arg in args {
        let long = arg.get_long().map(|long| format!("--{long}"));
        let Some(flag) = long.or_else(|| arg.get_short().map(|short| format!("-{short}"))) else {
            continue;
        };
        let name = match arg.get_value_names().and_then(<[_]>::first) {
            Some(value) if arg.get_action().takes_values() => format!("{flag} {value}"),
            _ => flag,
        };
        let code = |text: &str| {
            if text.is_empty() { String::new() } else { format!("`{}`", cell(text)) }
        };
        let defaults = arg.get_default_values().iter().map(|value| value.to_string_lossy());
        let default: Vec<_> = defaults.collect();
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let default = code(&default.join(","));
        let _ = writeln!(text, "| {} | {default} | {} |", code(&name), cell(&help));
    }
    text
}

/// A text as the cell of a table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_generated_part_is_replaced() {
        let text = "a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- end -->\n";
        let new = replace(text, "x", "new").unwrap();
        assert_eq!(new, "a\n<!-- x -->\n\nnew\n<!-- end -->\nb\n<!-- end -->\n");
        assert_eq!(replace(&new, "x", "new").unwrap(), new);
        assert!(replace(text, "y", "new").is_err());
    }

    #[test]
    fn every_option_and_verb_has_a_row() {
        let options = options(flanneld::Options::command());
        let verbs = verbs(flannelctl::command());
        for flag in ["--etcd-prefix", "--iface", "--healthz-port", "--kube-subnet-mgr"] {
            assert!(options.contains(&format!("| `{flag}")), "{flag}: {options}");
        }
        for verb in ["lease reserve SUBNET", "why ADDRESS", "config check [FILE]"] {
            assert!(verbs.contains(&format!("| `{verb}` |")), "{verb}: {verbs}");
        }
    }
}
