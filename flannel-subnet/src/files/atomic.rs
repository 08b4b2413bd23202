//! Replaces a file in one step: readers see either the old content or the new content.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::SystemTime;

/// The prefix of temporary files. The dot distinguishes them from keys.
const TEMPORARY: &str = ".flannel-tmp-";

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
    let temporary_name =
        format!("{TEMPORARY}{}-{:016x}", name.to_string_lossy(), fastrand::u64(..));
    let temporary = path.with_file_name(temporary_name);
    // Nobody else can open it before it is complete.
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&temporary)?;
    let result =
        write(&mut file, content, mode, modified).and_then(|()| fs::rename(&temporary, path));
    match result {
        // The first failure is reported.
        Err(_) => _ = fs::remove_file(&temporary),
        // So that the new name is durable too. Some file systems cannot sync a directory.
        Ok(()) => _ = path.parent().and_then(|dir| File::open(dir).ok()?.sync_all().ok()),
    }
    result
}

/// Writes and syncs a new file.
fn write(
    file: &mut File,
    content: &[u8],
    mode: u32,
    modified: Option<SystemTime>,
) -> io::Result<()> {
    file.write_all(content)?;
    file.set_permissions(Permissions::from_mode(mode))?;
    if let Some(modified) = modified {
        file.set_modified(modified)?;
    }
    file.sync_all()
}

/// Removes the temporary files in `dir` that crashed writers of the file `name` left. If `name` is
/// `None`, the temporary files of all names are removed. Call it only while no other process writes
/// these files. Only regular files with a name that [`replace_file`] chooses are removed. Nothing
/// happens if the directory is missing.
///
/// # Errors
/// An error of the file system. Some of them may be left.
///
/// # Blocking
/// Reads a directory.
pub fn remove_temporary_files(dir: &Path, name: Option<&OsStr>) -> io::Result<()> {
    let is_absent = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let entries = match fs::read_dir(dir) {
        Err(error) if is_absent(&error) => return Ok(()),
        entries => entries?,
    };
    let name = name.map(OsStr::to_string_lossy);
    for entry in entries {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(of) = file_name.to_str().and_then(target_of) else { continue };
        if name.as_ref().is_none_or(|name| name == of) && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())
                .or_else(|error| if is_absent(&error) { Ok(()) } else { Err(error) })?;
        }
    }
    Ok(())
}

/// The name of the file that a temporary file was written for, or `None` if `name` is not the name
/// of a temporary file.
fn target_of(name: &str) -> Option<&str> {
    let (target, random) = name.strip_prefix(TEMPORARY)?.rsplit_once('-')?;
    let is_ours = random.len() == 16 && random.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then_some(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_temporary_files_of_crashed_writers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let mut names: Vec<_> = fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let of_file = ".flannel-tmp-a-b-0123456789abcdef";
        let of_other = ".flannel-tmp-other-0123456789abcdef";
        let kept = [
            ".flannel-tmp-a-b-0123456789abcde",
            ".flannel-tmp-a-b-0123456789abcdeg",
            ".flannel-tmp-directory-0123456789abcdef",
            ".flannel-tmp-planted-0123456789abcdef",
            "a-b",
            "flannel-tmp-a-b-0123456789abcdef",
        ];
        fs::create_dir(dir.path().join(kept[2])).unwrap();
        std::os::unix::fs::symlink("a-b", dir.path().join(kept[3])).unwrap();
        for name in kept
            .iter()
            .chain([&of_file, &of_other])
            .filter(|name| !names().contains(&name.to_string()))
        {
            fs::write(dir.path().join(name), "text").unwrap();
        }
        remove_temporary_files(dir.path(), Some(OsStr::new("a-b"))).unwrap();
        assert!(!names().contains(&of_file.into()) && names().contains(&of_other.into()));
        remove_temporary_files(dir.path(), None).unwrap();
        assert_eq!(names(), kept);
        assert_eq!(fs::read_to_string(dir.path().join("a-b")).unwrap(), "text");
        remove_temporary_files(&dir.path().join("absent"), None).unwrap();
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_no_temporary_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        replace(&path, b"one", 0o644, None).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(mode(), 0o644);
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
        replace(&path, b"two", 0o644, Some(time)).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(mode(), 0o600);
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), time);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        // A planted link.
        let link = dir.path().join("link");
        let target = dir.path().join("file");
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
