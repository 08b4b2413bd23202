//! Shell completions and man pages of flanneld and flannelctl, made from their options.

use std::path::Path;
use std::{fs, io};

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};

/// Makes all files. Returns their number.
pub(crate) fn make(dir: &Path) -> io::Result<usize> {
    let completions = dir.join("completions");
    let man = dir.join("man");
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
