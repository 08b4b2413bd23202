//! The files of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The files that git knows. Paths are relative to the root, with `/`.
pub(crate) struct Tree {
    root: PathBuf,
    pub(crate) files: Vec<String>,
}

impl Tree {
    /// The repository that this program was built from.
    pub(crate) fn open() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let args = ["ls-files", "--cached", "--others", "--exclude-standard"];
        let output = Command::new("git").args(args).current_dir(&root).output();
        let output = output.context("git ls-files")?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "git ls-files: {}", error.trim());
        let names = String::from_utf8(output.stdout).context("git ls-files")?;
        let files = names.lines().map(str::to_owned).filter(|name| root.join(name).is_file());
        Ok(Self { files: files.collect(), root })
    }

    /// The files whose names end with one of these.
    pub(crate) fn ending<'a>(&'a self, ends: &'a [&str]) -> impl Iterator<Item = &'a String> {
        self.files.iter().filter(|file| ends.iter().any(|end| file.ends_with(end)))
    }

    pub(crate) fn read(&self, path: &str) -> Result<String> {
        std::fs::read_to_string(self.root.join(path)).with_context(|| path.to_owned())
    }

    pub(crate) fn write(&self, path: &str, text: &str) -> Result<()> {
        std::fs::write(self.root.join(path), text).with_context(|| path.to_owned())
    }

    /// Whether there is a file or directory of this name.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }
}
