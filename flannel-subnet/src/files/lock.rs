//! Lock files (`flock`) that only their owner can open.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use flannel_core::subnet::LockHolder;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{major, minor};

use crate::files::own;

/// The mode of a lock file. A user who can open the file can also hold its lock.
const MODE: u32 = 0o600;

/// The exclusive lock of a file. The kernel releases it when it is dropped or the process ends.
#[derive(Debug)]
pub struct FileLock {
    _file: Flock<File>,
}

impl FileLock {
    /// Locks the file, which is created if it is missing, with the mode 0600. Does not wait.
    /// Returns `None` if another process holds the lock.
    ///
    /// # Errors
    /// The file system refuses.
    ///
    /// # Blocking
    /// Opens a file.
    pub fn take(path: &Path) -> io::Result<Option<Self>> {
        // Opened for reading, because closing a file that was open for writing wakes watches.
        let file = own::open(OpenOptions::new().read(true), path).or_else(|_| create(path))?;
        // Earlier builds left the mode to the umask. Only the owner can change it.
        if file.metadata()?.permissions().mode() & 0o777 & !MODE != 0 {
            let _ = file.set_permissions(Permissions::from_mode(MODE));
        }
        let lock = |file| Flock::lock(file, FlockArg::LockExclusiveNonblock);
        // NFS locks only a file that is open for writing.
        let locked = match lock(file) {
            Err((_, Errno::EBADF)) => lock(create(path)?),
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
        holder_text(Self::holding_process(path).as_ref())
    }

    /// The process that holds the lock of the file, or `None` if the kernel does not show it.
    ///
    /// # Blocking
    /// Reads `/proc`.
    pub fn holding_process(path: &Path) -> Option<LockHolder> {
        holding_process(path)
    }
}

/// A process that holds a lock, for a message.
pub(crate) fn holder_text(holder: Option<&LockHolder>) -> String {
    holder.map_or_else(|| "another process".to_owned(), LockHolder::to_string)
}

/// Opens the file for writing, and creates it if it is missing.
fn create(path: &Path) -> io::Result<File> {
    own::open(OpenOptions::new().read(true).append(true).create(true).mode(MODE), path)
}

fn holding_process(path: &Path) -> Option<LockHolder> {
    let file = fs::metadata(path).ok()?;
    let device = file.dev();
    let id = format!("{:02x}:{:02x}:{}", major(device), minor(device), file.ino());
    let pid = pid_of(&fs::read_to_string("/proc/locks").ok()?, &id)?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(LockHolder { name: name.trim_end().escape_debug().to_string(), pid })
}

/// The process that holds the lock of a file, by the text of `/proc/locks`. `id` is
/// `MAJOR:MINOR:INODE`. On btrfs and overlayfs the lock has another device than the file. There, a
/// lock counts if no other lock has the same inode.
fn pid_of(locks: &str, id: &str) -> Option<u32> {
    let same_inode: Vec<LockLine<'_>> = locks
        .lines()
        .filter_map(LockLine::parse)
        .filter(|lock| inode(lock.file) == inode(id))
        .collect();
    let found = match &same_inode[..] {
        [only] => Some(only),
        several => several.iter().find(|lock| lock.file == id),
    };
    found.map(|lock| lock.pid)
}

/// A held `flock` in `/proc/locks`.
struct LockLine<'a> {
    pid: u32,
    /// `MAJOR:MINOR:INODE`.
    file: &'a str,
}

impl<'a> LockLine<'a> {
    /// Reads a line such as `1: FLOCK  ADVISORY  WRITE 4711 fe:00:10274300 0 EOF`. The line of a
    /// waiting process has `->` before `FLOCK`, and is not read.
    fn parse(line: &'a str) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields[..] else { return None };
        Some(Self { pid: pid.parse().ok()?, file })
    }
}

fn inode(id: &str) -> Option<&str> {
    id.rsplit(':').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_by_device_and_inode_or_by_its_only_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 22 fe:00:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 33 fe:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 44 00:2b:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 55 fe:00:777 0 EOF\n";
        for (id, pid) in [
            ("fe:00:77", Some(22)),
            ("00:2b:77", Some(44)),
            ("00:31:777", Some(55)),
            ("00:31:77", None),
            ("fe:00:7", None),
        ] {
            assert_eq!(pid_of(locks, id), pid, "{id}");
        }
    }

    #[test]
    fn a_planted_link_or_pipe_is_not_locked() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        let link = dir.path().join("lock");
        fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let error = FileLock::take(&link).unwrap_err().to_string();
        assert!(error.contains("it is a symbolic link"), "{error}");
        fs::remove_file(&link).unwrap();
        nix::unistd::mkfifo(&link, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = FileLock::take(&link).unwrap_err().to_string();
        assert!(error.contains("a pipe or a device"), "{error}");
    }

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
