//! Tasks around the workspace: makes shell completions, man pages and the generated parts of the
//! documents, and checks the language and the links of all texts.
//!
//! Only this program has the generators, so that the shipped programs stay small.

mod assets;
mod links;
mod picture;
mod prose;
mod reference;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};

use crate::tree::Tree;

/// Makes the completions and man pages of flannel's programs, and checks the documents
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
    /// Writes the generated parts of the documents: the tables of options, and the pictures of the
    /// lab's output
    Docs {
        /// Run this program `lab` first, and take a new picture of its output
        #[arg(long, value_name = "PROGRAM")]
        lab: Option<PathBuf>,
    },
    /// Checks all texts: widths, phrases, lengths, links, and that generated parts are current
    Check,
}

fn main() -> ExitCode {
    match run(Task::parse().verb) {
        Ok(message) => {
            println!("{message}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Does a task. Returns a message for the terminal.
fn run(verb: Verb) -> Result<String> {
    if let Verb::Assets { dir } = verb {
        let count = assets::make(&dir).map_err(|e| anyhow::anyhow!("{}: {e}", dir.display()))?;
        return Ok(format!("{count} files in {}", dir.display()));
    }
    let tree = Tree::open()?;
    if let Verb::Docs { lab } = verb {
        if let Some(lab) = lab {
            tree.write(picture::SOURCE, &picture::take(&lab)?)?;
        }
        let files = generated(&tree)?;
        for (path, text) in &files {
            tree.write(path, text)?;
        }
        return Ok(format!("{} files are current", files.len()));
    }
    let mut problems = prose::problems(&tree)?;
    problems.extend(links::problems(&tree)?);
    for (path, text) in generated(&tree)? {
        if tree.read(&path)? != text {
            problems.push(format!("{path}: not current; repair: cargo xtask docs"));
        }
    }
    ensure!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n"));
    Ok("texts: ok".into())
}

/// The generated files, or files with generated parts: their paths and contents.
fn generated(tree: &Tree) -> Result<Vec<(String, String)>> {
    let mut files = picture::render_all(&tree.read(picture::SOURCE)?);
    files.push(reference::update(tree)?);
    Ok(files)
}
