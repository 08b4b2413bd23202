//! Lock files (`flock`) that only their owner can open.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{major, minor};

/// The mode of a lock file. A user who can open the file can also hold its lock.
const MODE: u32 = 0o600;

/// The exclusive lock of a file. The kernel releases it when it is dropped or the process ends.
#[derive(Debug)]
pub struct FileLock {
    _file: Flock<File>,
}

impl FileLock {
    /// Locks the file, which is created if it is missing, with the mode 0600. Does not wait.
    /// `None`: another process holds the lock.
    ///
    /// # Errors
    /// The file system refuses.
    ///
    /// # Blocking
    /// Opens a file.
    pub fn take(path: &Path) -> io::Result<Option<Self>> {
        // Opened for reading, because closing a file that was open for writing wakes watches.
        let create =
            || OpenOptions::new().read(true).append(true).create(true).mode(MODE).open(path);
        let file = File::open(path).or_else(|_| create())?;
        // Earlier builds left the mode to the umask. Only the owner can change it.
        if file.metadata()?.permissions().mode() & 0o777 & !MODE != 0 {
            let _ = file.set_permissions(Permissions::from_mode(MODE));
        }
        let lock = |file| Flock::lock(file, FlockArg::LockExclusiveNonblock);
        // NFS locks only a file that is open for writing.
        let locked = match lock(file) {
            Err((_, Errno::EBADF)) => lock(create()?),
            locked => locked,
        };
        match locked {
            Ok(file) => Ok(Some(Self { _file: file })),
            Err((_, Errno::EWOULDBLOCK | Errno::EINTR)) => Ok(None),
            Err((_, errno)) => Err(errno.into()),
        }
    }

    /// The process that holds the lock of the file, for a message: `flanneld (process 4711)`. If
    /// the kernel does not show it, `another process`.
    ///
    /// # Blocking
    /// Reads `/proc`.
    pub fn holder(path: &Path) -> String {
        holder(path).unwrap_or_else(|| "another process".to_owned())
    }
}

fn holder(path: &Path) -> Option<String> {
    let file = fs::metadata(path).ok()?;
    let device = file.dev();
    let id = format!("{:02x}:{:02x}:{}", major(device), minor(device), file.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 4711 fe:00:10274300 0 EOF`. A waiting process has `->`.
    let pid = locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields.as_slice() else { return None };
        (*file == id).then_some(*pid)
    })?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("{} (process {pid})", name.trim_end().escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_owner_can_open_a_lock_file_and_its_holder_has_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let first = FileLock::take(&path).unwrap().unwrap();
        assert_eq!(mode(), 0o600);
        assert!(FileLock::take(&path).unwrap().is_none());
        let us = format!("(process {})", std::process::id());
        assert!(FileLock::holder(&path).ends_with(&us), "{}", FileLock::holder(&path));
        drop(first);
        assert_eq!(FileLock::holder(&path), "another process");
        // A file of an earlier build.
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        FileLock::take(&path).unwrap().unwrap();
        assert_eq!(mode(), 0o600);
    }
}
