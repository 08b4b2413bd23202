//! The state directory (`--state-dir`): what a host remembers over restarts, and its lock.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flannel_core::Subnet;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tokio::time::{Instant, sleep};

use crate::Error;

/// How long [`lock`] waits for another process to let go.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);

/// The file with the last complete set of leases.
pub fn leases(dir: &Path) -> PathBuf {
    dir.join("leases")
}

/// The file with the pod networks that this host has had.
pub fn networks(dir: &Path) -> PathBuf {
    dir.join("networks")
}

/// Reads the pod networks in a file of [`networks`], one on each line. Logs what cannot be read.
///
/// # Blocking
/// Reads a file.
pub fn read_networks(file: &Path) -> Vec<Subnet> {
    let text = read_text(file).unwrap_or_else(|error| {
        tracing::warn!(
            "{}: {error} (see --state-dir): what other pod networks left on the external interface stays",
            file.display()
        );
        String::new()
    });
    let network = |line: &str| {
        let network = line.parse().ok();
        if network.is_none() {
            let path = file.display();
            tracing::warn!(
                "{path}: {line:?} is no network, such as \"10.1.0.0/16\", and is passed over"
            );
        }
        network
    };
    text.lines().filter_map(network).collect()
}

/// The text of a file, empty if there is none.
///
/// # Errors
/// The file cannot be read.
///
/// # Blocking
/// Reads a file.
pub fn read_text(file: &Path) -> io::Result<String> {
    match fs::read(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        text => Ok(String::from_utf8_lossy(&text?).into_owned()),
    }
}

/// Keeps the state directory for this process. The kernel releases it when the process ends.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<fs::File>,
}

/// Locks the state directory for one daemon, or for a cleanup. Waits up to 2 s: a child of a killed
/// daemon holds the lock until it has started its program.
///
/// # Errors
/// Another process holds the lock, or the file `lock` cannot be opened.
pub async fn lock(dir: &Path) -> Result<Lock, Error> {
    let path = dir.join("lock");
    let end = Instant::now() + PATIENCE;
    loop {
        match try_lock(&path)? {
            Some(lock) => return Ok(lock),
            None if Instant::now() < end => sleep(PAUSE).await,
            None => {
                let reason = "another flanneld is running and holds this lock: stop it first, or name another --state-dir";
                return Err(Error::File { path, reason: reason.to_owned() });
            }
        }
    }
}

/// `None`: another process holds it.
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
            sleep(PATIENCE / 2).await;
            drop(first);
        };
        let (second, ()) = tokio::join!(lock(dir.path()), let_go);
        let (_second, before) = (second.unwrap(), Instant::now());
        assert!(lock(dir.path()).await.is_err() && before.elapsed() >= PATIENCE);
    }
}
