//! Opens files of this program. Another user may have put something else in their place.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;

/// Opens a regular file. Follows no symbolic link, and does not wait for the writer of a named
/// pipe.
///
/// # Errors
/// It is not a regular file, or the file system refuses.
pub(crate) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = options.custom_flags(flags.bits()).open(path).map_err(|error| {
        if error.raw_os_error() == Some(Errno::ELOOP as i32) {
            not_a_file("a symbolic link")
        } else {
            error
        }
    })?;
    if !file.metadata()?.is_file() {
        return Err(not_a_file("a directory, a pipe or a device"));
    }
    Ok(file)
}

fn not_a_file(what: &str) -> io::Error {
    io::Error::other(format!("it is {what}, expected a regular file: remove it"))
}

/// Reads a file of a state directory. A symbolic link is not followed.
///
/// # Errors
/// It is not a regular file, or the file system refuses.
///
/// # Blocking
/// Reads a file.
pub fn read_own_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(OpenOptions::new().read(true), path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened_and_a_pipe_does_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "text").unwrap();
        assert_eq!(read_own_file(&path("file")).unwrap(), b"text");
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        mkfifo(&path("pipe"), Mode::S_IRWXU).unwrap();
        fs::create_dir(path("directory")).unwrap();
        for (name, says) in
            [("link", "a symbolic link"), ("pipe", "a pipe"), ("directory", "a directory")]
        {
            let error = read_own_file(&path(name)).unwrap_err().to_string();
            assert!(error.contains(says) && error.ends_with("remove it"), "{name}: {error}");
        }
        let absent = read_own_file(&path("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }
}
