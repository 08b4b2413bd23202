//! The tasks of this host, kept over restarts in a file that grows by a line for each change.
//!
//! The lines are not synced to the disk. After a crash of the host all commands are run again.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use flannel_core::Subnet;
use serde::{Deserialize, Serialize};

use crate::task::{Of, Task};

/// A task of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) task: Task,
    pub(crate) state: State,
}

/// How far a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Its command has begun. It may have failed, or was interrupted.
    Begun,
    /// It is in place.
    Done,
    /// It was in place before the last boot; or it is of this node, and of an earlier process.
    Earlier,
}

/// One line of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    /// The id of the boot in which the lines below were written. It is the first line.
    Boot(String),
    Begun(String, Box<Task>),
    Done(String),
    Gone(String),
}

/// The file. Without a path, tasks are kept in memory only.
#[derive(Debug)]
pub(crate) struct Journal {
    path: Option<PathBuf>,
    /// The id of this boot.
    boot: String,
    /// `None`: the file does not exist before the first task.
    file: Option<File>,
}

impl Journal {
    /// Reads the tasks, and writes the file anew if there are any.
    ///
    /// # Errors
    /// The file cannot be read or written. The error names it.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<(Self, BTreeMap<Subnet, Stored>)> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let (boot, path) = (boot.trim().to_owned(), path.map(Path::to_owned));
        let mut journal = Self { path, boot, file: None };
        let Some(path) = &journal.path else { return Ok((journal, BTreeMap::new())) };
        let tasks = read(path, &journal.boot).map_err(|error| named(path, &error))?;
        if !tasks.is_empty() {
            journal.rewrite(&tasks)?;
        }
        Ok((journal, tasks))
    }

    pub(crate) fn begun(&mut self, subnet: Subnet, task: &Task) -> io::Result<()> {
        self.write(&Line::Begun(subnet.to_string(), Box::new(task.clone())))
    }

    pub(crate) fn done(&mut self, subnet: Subnet) -> io::Result<()> {
        self.write(&Line::Done(subnet.to_string()))
    }

    pub(crate) fn gone(&mut self, subnet: Subnet) -> io::Result<()> {
        self.write(&Line::Gone(subnet.to_string()))
    }

    fn write(&mut self, line: &Line) -> io::Result<()> {
        if self.file.is_none() {
            self.rewrite(&BTreeMap::new())?;
        }
        let (Some(path), Some(file)) = (&self.path, &mut self.file) else { return Ok(()) };
        file.write_all(text(line)?.as_bytes()).map_err(|error| named(path, &error))
    }

    /// Writes a new file with these tasks, and opens it for further lines.
    fn rewrite(&mut self, tasks: &BTreeMap<Subnet, Stored>) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let file = create(path, &self.boot, tasks).map_err(|error| named(path, &error))?;
        self.file = Some(file);
        Ok(())
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error} (see --state-dir)", path.display()))
}

fn text(line: &Line) -> io::Result<String> {
    Ok(serde_json::to_string(line)? + "\n")
}

fn read(path: &Path, boot: &str) -> io::Result<BTreeMap<Subnet, Stored>> {
    let mut tasks = BTreeMap::new();
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(tasks),
        Err(error) => return Err(error),
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(io::Error::other("it is not a regular file: remove it")),
    }
    let text = fs::read_to_string(path)?;
    let (mut is_this_boot, mut wrong) = (false, None);
    for (number, line) in (1..).zip(text.lines()) {
        let subnet = |text: &str| text.parse::<Subnet>();
        let mut set = |text: &str, new: State| {
            if let Some(stored) = subnet(text).ok().and_then(|subnet| tasks.get_mut(&subnet)) {
                let Stored { task, state } = stored;
                *state = if task.of == Of::Node { State::Earlier } else { new };
            }
        };
        match serde_json::from_str(line) {
            Ok(Line::Boot(of)) => is_this_boot = of == boot && !boot.is_empty(),
            Ok(Line::Begun(key, task)) if subnet(&key).is_ok() => {
                let Ok(subnet) = subnet(&key) else { continue };
                tasks.insert(subnet, Stored { task: *task, state: State::Begun });
            }
            Ok(Line::Done(key)) if is_this_boot => set(&key, State::Done),
            Ok(Line::Done(key)) => set(&key, State::Earlier),
            Ok(Line::Gone(key)) => drop(subnet(&key).map(|subnet| tasks.remove(&subnet))),
            Ok(Line::Begun(..)) => wrong = Some(number),
            // The last line may be half of one.
            Err(_) if number == text.lines().count() && !text.ends_with('\n') => {}
            Err(_) => wrong = Some(number),
        }
    }
    if let Some(line) = wrong {
        let path = path.display();
        tracing::warn!(%path, line, "a line cannot be read: its commands may be run again");
    }
    Ok(tasks)
}

/// Replaces the file by one with an entry for each task, and opens it for further lines.
fn create(path: &Path, boot: &str, tasks: &BTreeMap<Subnet, Stored>) -> io::Result<File> {
    let new = path.with_extension("new");
    match fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut content = String::new();
    // Those of earlier boots come first, under no boot.
    let is_earlier = |stored: &Stored| stored.state == State::Earlier;
    for earlier in [true, false] {
        if !earlier {
            content += &text(&Line::Boot(boot.to_owned()))?;
        }
        for (subnet, Stored { task, state }) in
            tasks.iter().filter(|(_, s)| is_earlier(s) == earlier)
        {
            content += &text(&Line::Begun(subnet.to_string(), Box::new(task.clone())))?;
            if *state != State::Begun {
                content += &text(&Line::Done(subnet.to_string()))?;
            }
        }
    }
    let mut file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn task(of: Of, name: &str) -> Task {
        let variables = [("SUBNET".to_owned(), name.to_owned())].into();
        let (add, remove) = (None, None);
        Task { of, variables, input: name.into(), add, remove, timeout: 30, waits: false }
    }

    fn subnet(n: u8) -> Subnet {
        format!("10.1.{n}.0/24").parse().unwrap()
    }

    fn states(path: &Path) -> Vec<(Subnet, String, State)> {
        let (_, tasks) = Journal::open(Some(path)).unwrap();
        tasks.into_iter().map(|(subnet, s)| (subnet, s.task.input, s.state)).collect()
    }

    #[test]
    fn tasks_are_kept_over_restarts_and_those_of_an_earlier_boot_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("extension");
        let (mut journal, tasks) = Journal::open(Some(&path)).unwrap();
        assert!(tasks.is_empty() && !path.exists(), "a node without commands has no file");
        for n in 1..=5 {
            let of = if n == 1 { Of::Node } else { Of::Peer };
            journal.begun(subnet(n), &task(of, &format!("task {n}"))).unwrap();
        }
        [1, 2, 4].iter().for_each(|n| journal.done(subnet(*n)).unwrap());
        journal.gone(subnet(4)).unwrap();
        journal.begun(subnet(2), &task(Of::Peer, "new")).unwrap();
        journal.done(subnet(5)).unwrap();
        let expected = [
            (subnet(1), "task 1".to_owned(), State::Earlier),
            (subnet(2), "new".to_owned(), State::Begun),
            (subnet(3), "task 3".to_owned(), State::Begun),
            (subnet(5), "task 5".to_owned(), State::Done),
        ];
        assert_eq!(states(&path), expected);
        assert_eq!(states(&path), expected, "the file was written anew");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

        // Another boot, and a line that was not written to its end.
        let text = fs::read_to_string(&path).unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        fs::write(&path, text.replace(boot.trim(), "another") + "{\"gone\":\"10.1.").unwrap();
        let after_boot: Vec<State> = states(&path).into_iter().map(|(.., state)| state).collect();
        assert_eq!(after_boot, [State::Earlier, State::Begun, State::Begun, State::Earlier]);
        let again: Vec<State> = states(&path).into_iter().map(|(.., state)| state).collect();
        assert_eq!(again, after_boot);
    }

    #[test]
    fn a_file_that_cannot_be_used_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("extension");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let error = Journal::open(Some(&path)).unwrap_err().to_string();
        assert!(error.contains("extension: it is not a regular file"), "{error}");
        let (mut journal, _) = Journal::open(Some(&dir.path().join("no/where"))).unwrap();
        let error = journal.gone(subnet(1)).unwrap_err().to_string();
        assert!(error.contains("no/where: No such file"), "{error}");
    }
}
