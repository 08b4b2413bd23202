//! The state directory (`--state-dir`): the files that a host keeps over restarts, and its lock.
//!
//! The file `version` has the version of all files without their own version line. Builds without
//! versions can read these files. A build that changes the format of a file writes the version into
//! the first line of that file. A file of a newer version is neither used nor overwritten.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use flannel_core::Subnet;
use flannel_subnet::{FileLock, HolderId, read_own_file, remove_temporary_files, replace_file};
use tokio::time::{Instant, sleep};

use crate::Error;

/// The time that [`lock`] waits for another process.
const PATIENCE: Duration = Duration::from_secs(2);
/// A longer wait is logged.
const LOGGED: Duration = Duration::from_secs(1);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The prefix of the version line.
const HEADER: &str = "flannel-state ";
/// The version that this build writes, and the newest that it reads.
const VERSION: u32 = 1;

/// A state file has a version that this build cannot read. It is the source of an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error(
    "it has version {version:?}{by}, written by a newer build; this build reads version {VERSION}. \
     The file is not used and not changed: run that build, or remove the files of --state-dir"
)]
struct NewerVersion {
    version: String,
    /// Names the file with the version, if that is another file.
    by: String,
}

/// Whether the error means that a newer build wrote the state file.
pub fn is_newer(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NewerVersion>())
}

/// The file with the last complete set of leases.
pub fn leases(dir: &Path) -> PathBuf {
    dir.join("leases")
}

/// The file with the pod networks that this host had.
pub fn networks(dir: &Path) -> PathBuf {
    dir.join("networks")
}

/// The file with the backends that this host runs, as `flannel_route::moving` writes them. It has
/// their options, secrets included.
pub fn backends(dir: &Path) -> PathBuf {
    dir.join("backends")
}

/// The file with the last network config whose devices were in the kernel, and the name of its
/// store. It has the options of the backend, secrets included.
pub fn config(dir: &Path) -> PathBuf {
    dir.join("config")
}

/// The last file of [`backends`] that was damaged. It may have secrets too.
pub fn damaged_backends(dir: &Path) -> PathBuf {
    dir.join("backends.damaged")
}

/// Reads the pod networks in a file of [`networks`], one on each line. Logs lines that cannot be
/// read.
///
/// # Blocking
/// Reads a file.
pub fn read_networks(file: &Path) -> Vec<Subnet> {
    let text = read(file).unwrap_or_else(|error| {
        tracing::warn!(
            path = %file.display(), %error,
            "a state file cannot be read (see --state-dir): objects of earlier pod networks on the \
             external interface are not removed"
        );
        None
    });
    let mut networks = Vec::new();
    for line in text.unwrap_or_default().lines() {
        match line.parse() {
            Ok(network) => networks.push(network),
            Err(_) => tracing::warn!(
                path = %file.display(), ?line,
                "a line is ignored: expected a network such as 10.1.0.0/16"
            ),
        }
    }
    networks
}

/// Writes the pod networks into a file of [`networks`], unless it has them already. A file that
/// cannot be read is not overwritten. Logs a failure.
///
/// # Blocking
/// Reads and writes a file.
pub fn write_networks(file: &Path, networks: &[Subnet]) {
    let text: String = networks.iter().map(|network| format!("{network}\n")).collect();
    let written = match read(file).map(Option::unwrap_or_default) {
        Ok(noted) if noted == text => return,
        Ok(_) => replace(file, &text),
        Err(error) => Err(error),
    };
    if let Err(error) = written {
        tracing::warn!(
            path = %file.display(), %error,
            "a state file cannot be written (see --state-dir): after the next change of the pod \
             network, the routes of this one on the external interface stay"
        );
    }
}

/// The holder ID kept in `dir`, or a new one that is kept there from now on.
///
/// # Errors
/// The directory or the file cannot be read or written.
///
/// # Blocking
/// Reads and writes files.
pub fn holder_id(dir: &Path) -> Result<HolderId, Error> {
    let path = dir.join("mark");
    let failed = |error: io::Error| Error::File {
        path: path.clone(),
        reason: format!("{error} (see --state-dir)"),
    };
    match read(&path) {
        Ok(Some(text)) => match text.trim().parse() {
            Ok(holder) => return Ok(holder),
            // The public address identifies the host instead.
            Err(error) => tracing::warn!(path = %path.display(), %error, "a new holder ID is made"),
        },
        Ok(None) => {}
        Err(error) if is_newer(&error) => {
            tracing::warn!(path = %path.display(), %error, "a new holder ID is used for this run");
            return Ok(HolderId::random());
        }
        Err(error) => return Err(failed(error)),
    }
    let holder = HolderId::random();
    create(dir).map_err(failed)?;
    replace(&path, &format!("{holder}\n")).map_err(failed)?;
    Ok(holder)
}

/// Reads a state file, without its version line. Returns `None` if the file does not exist.
///
/// # Errors
/// The file system refused, or the file has a newer version ([`is_newer`]).
///
/// # Blocking
/// Reads a file.
pub fn read(file: &Path) -> io::Result<Option<String>> {
    let bytes = match read_own_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes?,
    };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if text.starts_with(HEADER) {
        return without_version(&text, None).map(|text| Some(text.to_owned()));
    }
    let path = version_of(file);
    match read_own_file(&path) {
        Ok(version) => {
            without_version(&String::from_utf8_lossy(&version), Some(&path)).map(|_| Some(text))
        }
        // Written by a build without versions.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(text)),
        // A guess could misread the file, and then overwrite it.
        Err(error) => {
            let path = path.display();
            let reason = format!(
                "its version is not known, because {path} cannot be read ({error}): make it \
                 readable, or remove it if no newer build of flannel ran on this host"
            );
            Err(io::Error::new(error.kind(), reason))
        }
    }
}

/// The file with the version of the state files in the same directory.
fn version_of(file: &Path) -> PathBuf {
    file.with_file_name("version")
}

/// The text after the version line, if this build can read that version. If the version belongs to
/// another file, `of` is the file of the text.
fn without_version<'a>(text: &'a str, of: Option<&Path>) -> io::Result<&'a str> {
    let (line, rest) = text.split_once('\n').unwrap_or((text, ""));
    let version = line.strip_prefix(HEADER).unwrap_or(line);
    match version.parse::<u32>() {
        Ok(..=VERSION) => Ok(rest),
        _ => {
            let by = of.map(|file| format!(" by {}", file.display())).unwrap_or_default();
            let newer = NewerVersion { version: version.to_owned(), by };
            Err(io::Error::new(io::ErrorKind::InvalidData, newer))
        }
    }
}

/// Replaces a state file atomically. A new file has mode 0600.
///
/// # Errors
/// The file system refused, or the file has a newer version ([`is_newer`]).
///
/// # Blocking
/// Writes a file and waits for the disk.
pub fn replace(file: &Path, text: &str) -> io::Result<()> {
    match read(file) {
        Err(error) if is_newer(&error) => return Err(error),
        // The file is replaced as a whole.
        Ok(_) | Err(_) => {}
    }
    let version = version_of(file);
    if !version.exists() {
        write(&version, &format!("{HEADER}{VERSION}\n"))?;
    }
    write(file, text)
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    replace_file(file, text.as_bytes(), 0o600)
}

/// Creates the state directory, with mode 0700, if it is missing.
fn create(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Logs that other users may replace the files of the state directory.
fn warn_of_writers(dir: &Path) -> io::Result<()> {
    let metadata = fs::metadata(dir)?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o022 != 0 {
        let mode = format!("{mode:04o}");
        tracing::warn!(
            path = %dir.display(), %mode, owner = metadata.uid(),
            "other users may write to the state directory, and so act for this node: chmod go-w"
        );
    }
    Ok(())
}

/// Removes what crashed writers of state files left. Logs a failure, which only costs space.
fn sweep(dir: &Path) {
    for dir in [dir, &dir.join("secrets")] {
        if let Err(error) = remove_temporary_files(dir, None) {
            tracing::warn!(path = %dir.display(), %error, "temporary files are not removed");
        }
    }
}

/// Locks the state directory for one daemon, or for a cleanup. Waits up to 2 s: a child of a killed
/// daemon holds the lock until it has started its program. Removes temporary files of earlier
/// processes.
///
/// # Errors
/// Another process holds the lock, or the file `lock` cannot be opened.
pub async fn lock(dir: &Path) -> Result<FileLock, Error> {
    let path = dir.join("lock");
    let failed = |reason: String| Error::File { path: path.clone(), reason };
    let refused = |error: io::Error| failed(format!("{error} (see --state-dir)"));
    create(dir).and_then(|()| warn_of_writers(dir)).map_err(refused)?;
    let begin = Instant::now();
    let mut is_logged = false;
    loop {
        match FileLock::take(&path).map_err(refused)? {
            Some(lock) => {
                sweep(dir);
                return Ok(lock);
            }
            None if begin.elapsed() < PATIENCE => {
                if begin.elapsed() >= LOGGED && !std::mem::replace(&mut is_logged, true) {
                    let holder = FileLock::holder(&path);
                    tracing::warn!(path = %path.display(), %holder, "waiting for a lock");
                }
                sleep(PAUSE).await;
            }
            None => {
                return Err(failed(format!(
                    "another flanneld is running and holds this lock: stop {} first, or set \
                     another --state-dir",
                    FileLock::holder(&path)
                )));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::Logged;

    #[tokio::test(start_paused = true)]
    async fn only_one_process_locks_the_state_directory() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let first = lock(&state).await.unwrap();
        let error = lock(&state).await.unwrap_err().to_string();
        assert!(error.contains("new/lock: another flanneld is running"), "{error}");
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
        drop(first);
        lock(&state).await.unwrap();
    }

    #[tokio::test]
    async fn what_a_crashed_writer_left_is_removed_under_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let left =
            [".flannel-tmp-mark-0123456789abcdef", "secrets/.flannel-tmp-a-0123456789abcdef"]
                .map(|name| dir.path().join(name));
        let other = dir.path().join(".flannel-tmp-notes");
        fs::create_dir(dir.path().join("secrets")).unwrap();
        for path in left.iter().chain([&other]) {
            fs::write(path, "text").unwrap();
        }
        let _lock = lock(dir.path()).await.unwrap();
        assert_eq!(left.map(|path| path.exists()), [false, false]);
        assert!(other.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn the_lock_waits_until_another_process_releases_it_and_says_so() {
        let (logged, _guard) = Logged::collect();
        let dir = tempfile::tempdir().unwrap();
        for (pause, lines) in [(LOGGED / 2, 0), (LOGGED * 3 / 2, 1)] {
            let first = lock(dir.path()).await.unwrap();
            let release = async move {
                sleep(pause).await;
                drop(first);
            };
            let (second, ()) = tokio::join!(lock(dir.path()), release);
            drop(second.unwrap());
            assert_eq!(logged.count("waiting for a lock"), lines, "{:?}", logged.warnings());
        }
        let us = format!("(process {})", std::process::id());
        assert_eq!(logged.count(&us), 1, "{:?}", logged.warnings());
        let _first = lock(dir.path()).await.unwrap();
        let before = Instant::now();
        assert!(lock(dir.path()).await.is_err() && before.elapsed() >= PATIENCE);
    }

    #[tokio::test]
    async fn only_the_owner_has_access_and_links_are_not_followed() {
        let (logged, _guard) = Logged::collect();
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new/state");
        drop(lock(&dir).await.unwrap());
        holder_id(&dir).unwrap();
        replace(&networks(&dir), "10.1.0.0/16\n").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        for file in fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path()) {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
        // What another user could plant in a directory that all may write to.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(logged.warnings().len(), 0, "{:?}", logged.warnings());
        drop(lock(&dir).await.unwrap());
        assert_eq!(logged.count("other users may write to the state directory"), 1);
        let target = parent.path().join("target");
        fs::write(&target, "00000000000000ab\n").unwrap();
        for name in ["mark", "networks", "lock"] {
            fs::remove_file(dir.join(name)).unwrap();
            std::os::unix::fs::symlink(&target, dir.join(name)).unwrap();
        }
        let is_link = |error: &dyn std::fmt::Display| error.to_string().contains("a symbolic link");
        assert!(is_link(&holder_id(&dir).unwrap_err()));
        assert!(is_link(&lock(&dir).await.unwrap_err()));
        assert_eq!(read_networks(&networks(&dir)), []);
        replace(&networks(&dir), "10.2.0.0/16\n").unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "00000000000000ab\n");
        assert_eq!(read_networks(&networks(&dir)), ["10.2.0.0/16".parse().unwrap()]);
        let version = dir.join("version");
        fs::remove_file(&version).unwrap();
        std::os::unix::fs::symlink(&target, &version).unwrap();
        let error = read(&networks(&dir)).unwrap_err();
        assert!(is_link(&error) && error.to_string().contains("state/version cannot"), "{error}");
    }

    #[test]
    fn an_unreadable_version_is_an_error_with_its_file_and_cure() {
        let dir = tempfile::tempdir().unwrap();
        let mark = dir.path().join("mark");
        let version = dir.path().join("version");
        holder_id(dir.path()).unwrap();
        fs::remove_file(&version).unwrap();
        fs::create_dir(&version).unwrap();
        let expected = format!(
            "{}: its version is not known, because {} cannot be read (it is a directory, a pipe or \
             a device, expected a regular file: remove it): make it readable, or remove it if no \
             newer build of flannel ran on this host (see --state-dir)",
            mark.display(),
            version.display()
        );
        assert_eq!(holder_id(dir.path()).unwrap_err().to_string(), expected);
        fs::remove_dir(&version).unwrap();
        fs::write(&version, "").unwrap();
        let says = format!("it has version \"\" by {}, written", version.display());
        let error = read(&mark).unwrap_err().to_string();
        assert!(error.starts_with(&says) && error.ends_with("remove the files of --state-dir"));
    }

    #[test]
    fn a_valid_holder_id_is_kept_and_one_of_a_newer_build_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        fs::write(&path, "00000000000000ab\n").unwrap();
        assert_eq!(holder_id(dir.path()).unwrap(), HolderId(0xab));
        let newer = "flannel-state 2\nid: 00000000000000ab\n";
        fs::write(&path, newer).unwrap();
        assert_ne!(holder_id(dir.path()).unwrap(), holder_id(dir.path()).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
    }

    #[test]
    fn builds_without_file_versions_can_read_the_holder_id() {
        let dir = tempfile::tempdir().unwrap();
        let holder = holder_id(dir.path()).unwrap();
        // Their rule: the trimmed file has 1 to 16 hexadecimal digits and nothing else.
        let text = fs::read_to_string(dir.path().join("mark")).unwrap();
        let digits = text.trim();
        assert!((1..=16).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(u64::from_str_radix(digits, 16), Ok(holder.0));
        assert_eq!(fs::read_to_string(dir.path().join("version")).unwrap(), "flannel-state 1\n");
    }

    #[test]
    fn a_holder_id_is_kept_and_an_invalid_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let first = holder_id(&state).unwrap();
        assert_eq!(holder_id(&state).unwrap(), first);
        fs::write(state.join("mark"), "nonsense").unwrap();
        let second = holder_id(&state).unwrap();
        assert_ne!(second, first);
        assert_eq!(holder_id(&state).unwrap(), second);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = holder_id(&file).unwrap_err().to_string();
        assert!(error.contains("file/mark"), "{error}");
    }

    #[test]
    fn pod_networks_are_read_as_they_were_written_and_a_newer_file_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let file = networks(dir.path());
        let all = ["10.1.0.0/16", "fd00::/48"].map(|network| network.parse::<Subnet>().unwrap());
        for known in [&all[..], &all[..1]] {
            write_networks(&file, known);
            assert_eq!(read_networks(&file), known);
        }
        let newer = "flannel-state 2\n10.2.0.0/16\n";
        fs::write(&file, newer).unwrap();
        write_networks(&file, &all);
        assert_eq!(fs::read_to_string(&file).unwrap(), newer);
    }

    #[test]
    fn a_state_file_of_a_known_version_is_read_and_a_newer_one_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read(&path).unwrap(), None);
        // As builds without versions wrote it.
        fs::write(&path, "10.1.0.0/16\n").unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some("10.1.0.0/16\n"));
        replace(&path, "10.2.0.0/16\n").unwrap();
        // As those builds read it.
        assert_eq!(fs::read_to_string(&path).unwrap(), "10.2.0.0/16\n");
        assert_eq!(read(&path).unwrap().as_deref(), Some("10.2.0.0/16\n"));
        let version = dir.path().join("version");
        assert_eq!(fs::read_to_string(&version).unwrap(), "flannel-state 1\n");
        fs::write(&path, "flannel-state 1\n10.3.0.0/16\n").unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some("10.3.0.0/16\n"));
        for newer in ["flannel-state 2\n{}\n", "flannel-state 1.5\n", "flannel-state "] {
            fs::write(&path, newer).unwrap();
            let errors = [read(&path).map(drop), replace(&path, "text")];
            for error in errors.map(Result::unwrap_err) {
                assert!(is_newer(&error) && error.to_string().contains("newer build"), "{error}");
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        }
        fs::write(&version, "flannel-state 2\n").unwrap();
        fs::write(&path, "text").unwrap();
        assert!(is_newer(&read(&path).unwrap_err()) && is_newer(&replace(&path, "x").unwrap_err()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    }
}
