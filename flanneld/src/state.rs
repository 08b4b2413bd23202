//! What this host remembers across restarts, such as the ID by which it knows its own leases.
//!
//! One process at a time has the state directory. Each file in it is text after a first line with
//! the format's version. A file without that line is of the builds before there were versions, and
//! holds the same text. A file of a newer version is neither used nor overwritten.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use flannel_subnet::HolderId;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tokio::time::{Instant, sleep};

use crate::error::Error;

/// So long whoever has the directory may take to let it go …
const SOON: Duration = Duration::from_secs(2);
/// … and so often that is looked at.
const AGAIN: Duration = Duration::from_millis(10);

/// What the first line of a state file begins with; the version follows.
const HEADER: &str = "flannel-state ";
/// The version that this build writes, and the newest that it reads.
const VERSION: u32 = 1;

/// A state file is of a version that this build cannot read. Found inside an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error(
    "it is of version {version} of a newer build, this build reads version {VERSION}; it is not used and stays as it is"
)]
struct NewerVersion {
    version: String,
}

/// Whether a state file could not be read or replaced because a newer build wrote it.
pub(crate) fn is_newer(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NewerVersion>())
}

/// The text of a state file without the line of its version; `None`: there is no such file.
///
/// # Errors
/// The file system refused, or the file is of a newer version ([`is_newer`]).
pub(crate) fn read(path: &Path) -> io::Result<Option<String>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes?,
    };
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let Some(rest) = text.strip_prefix(HEADER) else { return Ok(Some(text)) };
    let (version, text) = rest.split_once('\n').unwrap_or((rest, ""));
    match version.parse::<u32>() {
        Ok(..=VERSION) => Ok(Some(text.to_owned())),
        _ => {
            let newer = NewerVersion { version: version.to_owned() };
            Err(io::Error::new(io::ErrorKind::InvalidData, newer))
        }
    }
}

/// The holder ID kept in `dir`, or a new one that is kept there from now on.
///
/// # Errors
/// The directory or the file cannot be read or written.
pub(crate) fn holder_id(dir: &Path) -> Result<HolderId, Error> {
    let path = dir.join("mark");
    let failed = |error: io::Error| Error::File {
        path: path.clone(),
        reason: format!("{error} (see --state-dir)"),
    };
    match read(&path) {
        Ok(Some(text)) => match text.trim().parse() {
            Ok(holder) => return Ok(holder),
            // Without it this host is known by its public address: no reason not to start.
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
    fs::create_dir_all(dir).map_err(failed)?;
    replace(&path, &format!("{holder}\n")).map_err(failed)?;
    Ok(holder)
}

/// Writes a file of the state directory anew: whole, or not at all.
///
/// # Errors
/// The file system refused, or the file that is there is of a newer version ([`is_newer`]).
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    match read(path) {
        Err(error) if is_newer(&error) => return Err(error),
        // It is replaced as a whole.
        Ok(_) | Err(_) => {}
    }
    let temporary = path.with_extension("new");
    let mut file = fs::File::create(&temporary)?;
    file.write_all(format!("{HEADER}{VERSION}\n{text}").as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// That nobody else has the state directory, as long as this is kept. The kernel lets go when the
/// process ends, however.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<fs::File>,
}

/// Takes the state directory for one daemon, or for cleaning up after it. Waits a little: a process
/// that a killed daemon was about to start holds all that the daemon held, until it is a program of
/// its own.
///
/// # Errors
/// Somebody else has it, or the file `lock` in it cannot be had.
pub(crate) async fn lock(dir: &Path) -> Result<Lock, Error> {
    let path = dir.join("lock");
    let end = Instant::now() + SOON;
    loop {
        match try_lock(&path)? {
            Some(lock) => return Ok(lock),
            None if Instant::now() < end => sleep(AGAIN).await,
            None => {
                let reason = "another flanneld is running and holds this lock: stop it first, or name another --state-dir";
                return Err(Error::File { path, reason: reason.to_owned() });
            }
        }
    }
}

/// `None`: somebody else has it.
fn try_lock(path: &Path) -> Result<Option<Lock>, Error> {
    let see = |error: io::Error| Error::File {
        path: path.to_owned(),
        reason: format!("{error} (see --state-dir)"),
    };
    path.parent().map_or(Ok(()), fs::create_dir_all).map_err(see)?;
    let file =
        fs::OpenOptions::new().create(true).truncate(false).write(true).open(path).map_err(see)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(file) => Ok(Some(Lock { _file: file })),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(see(errno.into())),
    }
}

/// What tells this machine from its clones: `/etc/machine-id`, else the holder ID.
pub(crate) fn identity(holder: HolderId) -> String {
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = id.trim();
    if id.is_empty() { holder.to_string() } else { id.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_has_the_state_directory() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let first = lock(&state).await.unwrap();
        let error = lock(&state).await.unwrap_err().to_string();
        assert!(error.contains("new/lock: another flanneld is running"), "{error}");
        drop(first);
        lock(&state).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_let_go_soon_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock(dir.path()).await.unwrap();
        let let_go = async move {
            sleep(SOON / 2).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(lock(dir.path()), let_go);
        let (_second, before) = (second.unwrap(), Instant::now());
        assert!(lock(dir.path()).await.is_err() && before.elapsed() >= SOON);
    }

    #[test]
    fn a_state_file_of_any_known_version_is_read_and_of_a_newer_one_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read(&path).unwrap(), None);
        // As builds wrote it before there were versions.
        fs::write(&path, "10.1.0.0/16\n").unwrap();
        assert_eq!(read(&path).unwrap().as_deref(), Some("10.1.0.0/16\n"));
        replace(&path, "10.2.0.0/16\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "flannel-state 1\n10.2.0.0/16\n");
        assert_eq!(read(&path).unwrap().as_deref(), Some("10.2.0.0/16\n"));
        for newer in ["flannel-state 2\n{}\n", "flannel-state 1.5\n", "flannel-state "] {
            fs::write(&path, newer).unwrap();
            let errors = [read(&path).map(drop), replace(&path, "text")];
            for error in errors.map(Result::unwrap_err) {
                assert!(is_newer(&error) && error.to_string().contains("newer build"), "{error}");
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), newer);
        }
    }

    #[test]
    fn a_holder_id_of_today_is_kept_and_one_of_a_newer_build_is_not_overwritten() {
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
    fn a_holder_id_is_kept_and_a_broken_one_replaced() {
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
}
