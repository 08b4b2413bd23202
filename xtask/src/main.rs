//! `cargo xtask assets DIR` makes shell completions and man pages of flanneld and flannelctl from
//! their options.
//!
//! Only this program has the generators, so that the shipped programs stay small.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use clap::{Command, CommandFactory, Parser, Subcommand};
use clap_complete::{Shell, generate_to};

/// Makes what is packaged beside flannel's programs
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Task {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Shell completions and man pages, in DIR/completions and DIR/man
    Assets {
        /// The directory, which is created if necessary
        dir: PathBuf,
    },
}

fn main() -> ExitCode {
    let Verb::Assets { dir } = Task::parse().verb;
    match assets(&dir) {
        Ok(count) => {
            println!("{count} files in {}", dir.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xtask: {}: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

/// Makes all files. Returns their number.
fn assets(dir: &Path) -> io::Result<usize> {
    let (completions, man) = (dir.join("completions"), dir.join("man"));
    fs::create_dir_all(&completions)?;
    fs::create_dir_all(&man)?;
    for mut command in [flanneld::Options::command(), flannelctl::command()] {
        let name = command.get_name().to_owned();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            generate_to(shell, &mut command, &name, &completions)?;
        }
        pages(command.disable_help_subcommand(true), &man)?;
    }
    Ok(fs::read_dir(completions)?.count() + fs::read_dir(man)?.count())
}

/// Man pages of section 8, one for each verb too: `flannelctl-lease-list.8`.
fn pages(mut command: Command, dir: &Path) -> io::Result<()> {
    command.build();
    let mut all = vec![command];
    while let Some(command) = all.pop() {
        let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).replace(' ', "-");
        let verbs = command.get_subcommands().filter(|verb| verb.get_name() != "help").cloned();
        all.extend(verbs);
        let page = clap_mangen::Man::new(command.display_name(&name).name(name.clone()))
            .section("8")
            .manual("flannel")
            .source(concat!("flannel ", env!("CARGO_PKG_VERSION")));
        let mut text = Vec::new();
        page.render(&mut text)?;
        fs::write(dir.join(format!("{name}.8")), text)?;
    }
    Ok(())
}
