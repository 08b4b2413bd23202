//! The tasks of this host, kept over restarts: a file for each.
//!
//! The files are not synced to the disk. After a crash of the host all commands are run again.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use flannel_core::Subnet;
use serde::{Deserialize, Serialize};

use crate::commands::task::{Of, Task};

/// The name of a file that is being written. No subnet has it.
const NEW: &str = ".new";

/// A task of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) task: Task,
    pub(crate) state: Progress,
}

/// How far a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// One of its commands has begun. It may have failed, or was interrupted.
    Unsure,
    /// The task is in place.
    Done,
    /// The task was in place before the last boot. Or it is the task of this node, and an earlier
    /// process has put it in place.
    Earlier,
}

/// The content of a file.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    /// The id of the boot in which it was written.
    boot: String,
    done: bool,
    task: Task,
}

/// The directory. Without one, tasks are kept in memory only.
#[derive(Debug, Clone, Default)]
pub(crate) struct Files {
    dir: Option<PathBuf>,
    boot: String,
}

impl Files {
    pub(crate) fn new(dir: Option<PathBuf>) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self { dir, boot: boot.trim().to_owned() }
    }

    /// Reads all tasks. Logs files that cannot be used.
    ///
    /// # Errors
    /// The directory cannot be read. The error names it.
    pub(crate) fn read(&self) -> io::Result<BTreeMap<Subnet, Stored>> {
        let mut tasks = BTreeMap::new();
        let Some(dir) = &self.dir else { return Ok(tasks) };
        let entries = match fs::read_dir(dir) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(tasks),
            entries => entries.map_err(|error| named(dir, &error))?,
        };
        for entry in entries {
            let entry = entry.map_err(|error| named(dir, &error))?;
            let name = entry.file_name();
            let Some(subnet) = name.to_str().and_then(subnet_of) else { continue };
            match self.stored(&entry.path()) {
                Ok(stored) => _ = tasks.insert(subnet, stored),
                Err(error) => {
                    let path = entry.path();
                    tracing::warn!(path = %path.display(), %error, "a file is ignored");
                }
            }
        }
        Ok(tasks)
    }

    fn stored(&self, path: &Path) -> io::Result<Stored> {
        if !fs::symlink_metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let Content { boot, done, task } = serde_json::from_slice(&fs::read(path)?)?;
        let is_earlier = boot != self.boot || boot.is_empty() || task.of == Of::Node;
        let state = if is_earlier {
            Progress::Earlier
        } else if done {
            Progress::Done
        } else {
            Progress::Unsure
        };
        Ok(Stored { task, state })
    }

    /// Writes the task of a subnet, or removes it if `stored` is `None`.
    ///
    /// # Errors
    /// The error names the file.
    pub(crate) fn write(&self, subnet: Subnet, stored: Option<&Stored>) -> io::Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let path = dir.join(name_of(subnet));
        let written = match stored {
            None => fs::remove_file(&path),
            Some(Stored { task, state }) => {
                let content = Content {
                    boot: self.boot.clone(),
                    done: *state == Progress::Done,
                    task: task.clone(),
                };
                serde_json::to_vec(&content)
                    .map_err(io::Error::from)
                    .and_then(|content| replace(dir, &path, &content))
            }
        };
        match written {
            Err(error) if stored.is_none() && error.kind() == ErrorKind::NotFound => Ok(()),
            written => written.map_err(|error| named(&path, &error)),
        }
    }
}

/// `10.1.7.0-24`, as in the key of a lease.
fn name_of(subnet: Subnet) -> String {
    subnet.to_string().replace('/', "-")
}

fn subnet_of(name: &str) -> Option<Subnet> {
    let (base, len) = name.rsplit_once('-')?;
    format!("{base}/{len}").parse().ok()
}

/// Replaces a file in one step. Only one caller at a time may write.
fn replace(dir: &Path, path: &Path, content: &[u8]) -> io::Result<()> {
    let new = dir.join(NEW);
    let create = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
    let mut file = match create() {
        // A killed process left it, or there is no directory yet.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(&new)?;
            create()?
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            DirBuilder::new().mode(0o700).create(dir)?;
            create()?
        }
        file => file?,
    };
    file.write_all(content)?;
    fs::rename(&new, path)
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn stored(of: Of, input: &str, state: Progress) -> Stored {
        let task = Task {
            of,
            variables: BTreeMap::new(),
            input: input.to_owned(),
            add: None,
            remove: None,
            timeout: 30,
            waits: false,
        };
        Stored { task, state }
    }

    fn subnet(n: u8) -> Subnet {
        format!("10.1.{n}.0/24").parse().unwrap()
    }

    #[test]
    fn tasks_are_kept_over_restarts_and_tasks_of_an_earlier_boot_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("extension");
        let files = Files::new(Some(dir.clone()));
        assert_eq!(files.read().unwrap(), BTreeMap::new());
        assert!(!dir.exists(), "a node without commands has no files");
        let tasks = [
            (1, stored(Of::Node, "node", Progress::Done)),
            (2, stored(Of::Peer, "done", Progress::Done)),
            (3, stored(Of::Peer, "begun", Progress::Unsure)),
            (4, stored(Of::Peer, "gone", Progress::Done)),
        ];
        for (n, stored) in &tasks {
            files.write(subnet(*n), Some(stored)).unwrap();
        }
        for _ in 0..2 {
            files.write(subnet(4), None).unwrap();
        }
        let v6: Subnet = "fd00:1:0:7::/64".parse().unwrap();
        files.write(v6, Some(&tasks[1].1)).unwrap();
        // A killed writer, a planted link, and a file that was not written to its end.
        fs::write(dir.join(NEW), "{").unwrap();
        std::os::unix::fs::symlink("10.1.2.0-24", dir.join("10.1.8.0-24")).unwrap();
        fs::write(dir.join("10.1.9.0-24"), "{\"boot\":").unwrap();

        let states = |files: &Files| -> Vec<(String, Progress)> {
            let tasks = files.read().unwrap().into_iter();
            tasks.map(|(subnet, stored)| (subnet.to_string(), stored.state)).collect()
        };
        let named = |states: [Progress; 4]| -> Vec<(String, Progress)> {
            let names = ["10.1.1.0/24", "10.1.2.0/24", "10.1.3.0/24", "fd00:1:0:7::/64"];
            names.map(str::to_owned).into_iter().zip(states).collect()
        };
        let expected = named([Progress::Earlier, Progress::Done, Progress::Unsure, Progress::Done]);
        assert_eq!(states(&Files::new(Some(dir.clone()))), expected);
        files.write(subnet(2), Some(&tasks[1].1)).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(&dir.join("10.1.2.0-24")), 0o600);
        let after_boot = Files { boot: "another".into(), ..files };
        assert_eq!(states(&after_boot), named([Progress::Earlier; 4]));
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Files::new(Some(file)).read().unwrap_err().to_string();
        assert!(error.contains("/file: Not a directory"), "{error}");
        let files = Files::new(Some(dir.path().join("no/where")));
        let task = stored(Of::Peer, "", Progress::Done);
        let error = files.write(subnet(1), Some(&task)).unwrap_err().to_string();
        assert!(error.contains("no/where/10.1.1.0-24: No such file"), "{error}");
    }
}
