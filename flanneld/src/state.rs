//! What this host remembers across restarts: the ID by which it knows its own leases. One process at a time has it.

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
    match fs::read_to_string(&path) {
        Ok(text) => match text.trim().parse() {
            Ok(holder) => return Ok(holder),
            // Without it this host is known by its public address: no reason not to start.
            Err(error) => tracing::warn!(path = %path.display(), %error, "a new holder ID is made"),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let holder = HolderId::random();
    fs::create_dir_all(dir).map_err(failed)?;
    replace(&path, &format!("{holder}\n")).map_err(failed)?;
    Ok(holder)
}

/// Writes a file of the state directory anew: whole, or not at all.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = fs::File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// That nobody else has the state directory, as long as this is kept. The kernel lets go when the process ends, however.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<fs::File>,
}

/// Takes the state directory for one daemon, or for cleaning up after it. Waits a little: a process that a killed daemon was
/// about to start holds all that the daemon held, until it is a program of its own.
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
