//! Replacing a file in one step: readers see either the old content or the new one.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

/// The prefix of temporary files. The dot distinguishes them from keys.
pub(crate) const TEMPORARY: &str = ".flannel-tmp-";

/// Replaces `path` in one step and durably: readers see the old content or the new one. A symbolic
/// link at `path` is replaced, not followed. An existing regular file keeps its mode.
///
/// # Errors
/// An error of the file system. `path` is unchanged.
///
/// # Blocking
/// Waits for the disk.
pub fn replace_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    replace(path, content, mode, None)
}

/// Replaces `path`: writes a temporary file in the same directory, syncs it, and renames it.
///
/// A new file gets `mode` regardless of the umask. An existing regular file keeps its mode.
/// `modified` becomes the file's time of modification.
///
/// # Errors
/// An error of the file system. `path` is unchanged, and the temporary file is removed.
pub(crate) fn replace(
    path: &Path,
    content: &[u8],
    mode: u32,
    modified: Option<SystemTime>,
) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::other("not the name of a file"))?;
    let mode = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => metadata.permissions().mode() & 0o7777,
        _ => mode,
    };
    let temporary = format!("{TEMPORARY}{}-{:016x}", name.to_string_lossy(), fastrand::u64(..));
    let temporary = path.with_file_name(temporary);
    let write = |file: &mut File| {
        file.write_all(content)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        if let Some(modified) = modified {
            file.set_modified(modified)?;
        }
        file.sync_all()
    };
    // Nobody else can open it before it is complete.
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&temporary)?;
    let result = write(&mut file).and_then(|()| fs::rename(&temporary, path));
    match result {
        // The first failure is reported.
        Err(_) => _ = fs::remove_file(&temporary),
        // So that the new name is durable too. Some file systems cannot sync a directory.
        Ok(()) => _ = path.parent().and_then(|dir| File::open(dir).ok()?.sync_all().ok()),
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_keeps_its_mode_and_no_temporary_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        replace(&path, b"one", 0o644, None).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), mode()), (b"one".as_slice(), 0o644));
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        replace(&path, b"two", 0o644, Some(time)).unwrap();
        assert_eq!((fs::read(&path).unwrap().as_slice(), mode()), (b"two".as_slice(), 0o600));
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), time);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        // A planted link.
        let (link, target) = (dir.path().join("link"), dir.path().join("file"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace_file(&link, b"three", 0o640).unwrap();
        let metadata = fs::symlink_metadata(&link).unwrap();
        assert!(metadata.is_file() && metadata.permissions().mode() & 0o7777 == 0o640);
        assert_eq!(fs::read(&target).unwrap(), b"two");
        fs::remove_file(&link).unwrap();

        let blocked = dir.path().join("blocked");
        fs::create_dir(&blocked).unwrap();
        replace(&blocked, b"x", 0o644, None).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
