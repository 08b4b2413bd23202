//! Copies a file onto a host atomically. The copy has a hidden name beside its destination and is
//! then renamed. So a runtime reads the old file or the new one, even after a crash.
//!
//! **Source**: flannel `cmd/install_conf`, which has the same arguments and names.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The age from which a temporary file belongs to a copy that was killed.
const ABANDONED: Duration = Duration::from_secs(600);

/// An error of [`install`]. The file at the destination is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The destination names no file.
    #[error("{} is no name of a file: expected a path such as /opt/cni/bin/flannel", .0.display())]
    Destination(PathBuf),
    /// An operation on a file failed.
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// The operation.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Makes `destination` a durable copy of `source`, with its mode. Also removes the temporary files
/// of killed copies to this destination, once they are ten minutes old.
///
/// # Errors
/// A file cannot be read, written or renamed. The destination is then unchanged.
///
/// # Blocking
/// Waits for the disk.
pub fn install(source: &Path, destination: &Path) -> Result<(), InstallError> {
    let Some(name) = destination.file_name() else {
        return Err(InstallError::Destination(destination.to_owned()));
    };
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".tmp");
    let dir = destination
        .parent()
        .filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));

    let cannot = |verb, path: &Path| {
        let path = path.to_owned();
        move |source| InstallError::File { verb, path, source }
    };
    let from = File::open(source).map_err(cannot("read", source))?;
    let mode = from.metadata().map_err(cannot("read", source))?.permissions().mode() & 0o7777;
    // First, because old temporary files may fill the disk.
    remove_abandoned(dir, &prefix);
    let (temporary, to) = create(dir, &prefix)?;
    copy(from, to, mode)
        .map_err(cannot("write", &temporary))
        .and_then(|()| fs::rename(&temporary, destination).map_err(cannot("replace", destination)))
        .inspect_err(|_| {
            // If this fails, the file wastes space until a later copy removes it.
            let _ = fs::remove_file(&temporary);
        })
}

/// Creates a temporary file.
fn create(dir: &Path, prefix: &OsString) -> Result<(PathBuf, File), InstallError> {
    loop {
        let mut name = prefix.clone();
        name.push(format!("{:016x}", RandomState::new().build_hasher().finish()));
        let path = dir.join(name);
        // Only its owner can open it before it is complete.
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(InstallError::File { verb: "create", path, source }),
        }
    }
}

fn copy(mut from: File, mut to: File, mode: u32) -> io::Result<()> {
    io::copy(&mut from, &mut to)?;
    to.set_permissions(Permissions::from_mode(mode))?;
    to.sync_all()
}

/// Removes temporary files of killed copies. Errors are ignored.
fn remove_abandoned(dir: &Path, prefix: &OsString) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        if rest.is_some_and(|rest| rest.iter().all(u8::is_ascii_hexdigit)) && is_old(&entry) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_old(entry: &fs::DirEntry) -> bool {
    let modified = entry.metadata().and_then(|file| file.modified());
    modified.is_ok_and(|time| time.elapsed().is_ok_and(|age| age >= ABANDONED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_copy_has_bytes_and_mode_of_its_source_and_replaces_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        let destination = dir.path().join("destination");
        let bytes: Vec<u8> = (0..200_000_u32).flat_map(u32::to_le_bytes).collect();
        fs::write(&source, &bytes).unwrap();
        for mode in [0o755, 0o444, 0o4711] {
            fs::set_permissions(&source, Permissions::from_mode(mode)).unwrap();
            install(&source, &destination).unwrap();
            assert_eq!(fs::read(&destination).unwrap(), bytes);
            assert_eq!(fs::metadata(&destination).unwrap().permissions().mode() & 0o7777, mode);
        }
        assert_eq!(names(dir.path()), ["destination", "source"]);
    }

    /// A process that has the old file open keeps it. A symbolic link is replaced, not followed.
    #[test]
    fn the_old_file_is_never_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let [source, target, link] = ["source", "target", "link"].map(|name| dir.path().join(name));
        fs::write(&source, "new").unwrap();
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink("target", &link).unwrap();
        let open = File::open(&target).unwrap();
        install(&source, &link).unwrap();
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(fs::read(&target).unwrap(), b"old");
        install(&source, &target).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
        assert_eq!(io::read_to_string(open).unwrap(), "old");
    }

    #[test]
    fn only_temporary_files_of_killed_copies_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        fs::write(&source, "new").unwrap();
        let long_ago = SystemTime::now() - ABANDONED;
        for (name, time) in [
            (".destination.tmp0123456789abcdef", long_ago),
            (".destination.tmp42", long_ago),
            (".destination.tmp43", SystemTime::now()),
            (".destination.tmpx", long_ago),
            (".other.tmp42", long_ago),
            ("destination.tmp42", long_ago),
        ] {
            File::create(dir.path().join(name)).unwrap().set_modified(time).unwrap();
        }
        install(&source, &dir.path().join("destination")).unwrap();
        let left = [
            ".destination.tmp43",
            ".destination.tmpx",
            ".other.tmp42",
            "destination",
            "destination.tmp42",
            "source",
        ];
        assert_eq!(names(dir.path()), left);
    }

    #[test]
    fn errors_name_the_file_and_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("source"), "new").unwrap();
        fs::create_dir(path("dir")).unwrap();
        fs::write(path("dir/file"), "").unwrap();
        for (source, destination, says) in [
            ("absent", "destination", "cannot read "),
            ("dir", "destination", "Is a directory"),
            ("source", "absent/destination", "cannot create "),
            ("source", "source/destination", "Not a directory"),
            ("source", "dir", "cannot replace "),
            ("source", "..", "is no name of a file"),
        ] {
            let error = install(&path(source), &path(destination)).unwrap_err().to_string();
            assert!(
                error.contains(says) && error.contains(dir.path().to_str().unwrap()),
                "{error}"
            );
        }
        assert_eq!(names(dir.path()), ["dir", "source"]);
    }
}
