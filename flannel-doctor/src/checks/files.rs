//! Checks of the file systems that the daemon writes files to.

use std::fs;
use std::path::{Path, PathBuf};

use flannel_core::Remedy;
use nix::sys::statvfs::{FsFlags, statvfs};

use crate::diagnosis::mtu::Fault;
use crate::finding::{Check, Finding};
use crate::remedy::{BEFORE_WRITING, mount_point};

/// With less free space, in bytes, files may not be written. The subnet file and a lease take a
/// page each, and a cache of thousands of leases a few hundred kilobytes. Of a small file system, a
/// quarter is enough.
const LEAST: u64 = 64 << 10;

/// A file system that the daemon writes a file to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Its mount point.
    mount: PathBuf,
    /// Its type, such as `tmpfs`.
    kind: String,
    /// The file.
    file: PathBuf,
    /// It is mounted read-only.
    read_only: bool,
    /// Its size in bytes, or 0 if it reports none, as `ramfs` does.
    size: u64,
    /// The free space in bytes, with the part that only root may use.
    free: u64,
    /// No file can be created, because all inodes are used.
    lacks_inodes: bool,
}

/// All faults of the file systems.
pub fn check(all: &[FileSystem]) -> Vec<Fault> {
    all.iter().filter_map(fault).map(Fault::from).collect()
}

fn fault(
    FileSystem { mount, kind, file, read_only, size, free, lacks_inodes }: &FileSystem,
) -> Option<Finding> {
    let what = format!("{}, the file system of {},", mount.display(), file.display());
    let mount = mount_point(&file.parent()?.to_string_lossy());
    let cannot = "the daemon cannot write that file";
    if *read_only {
        let remedy = Remedy::run(format!("mount -o remount,rw {mount}")).remark(BEFORE_WRITING);
        let text = format!("{what} is read-only: {cannot}");
        return Some(Finding::error(Check::Files, text).with_remedy(remedy));
    }
    if *lacks_inodes {
        let remedy = Remedy::run(format!("du --inodes -x {mount} | sort -n | tail"))
            .remark("then delete files there");
        let text = format!("{what} has no room for another file: {cannot}");
        return Some(Finding::error(Check::Files, text).with_remedy(remedy));
    }
    if *free >= LEAST.min(*size / 4) {
        return None;
    }
    let may = if *free > 0 { "the daemon may not be able to write that file" } else { cannot };
    let remedy = if kind == "tmpfs" {
        Remedy::run(format!("mount -o remount,size={}k {mount}", size.div_ceil(512)))
    } else {
        Remedy::run(format!("du -x {mount} | sort -n | tail")).remark("then delete files there")
    };
    let text = format!("{what} has {free} bytes of free space: {may}");
    Some(Finding::error(Check::Files, text).with_remedy(remedy))
}

/// Reads the file systems of these files. A file whose directory is not there is left out.
///
/// # Blocking
/// Asks the file systems.
pub fn read(files: &[PathBuf]) -> Vec<FileSystem> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    let mut all: Vec<FileSystem> = Vec::new();
    for found in files.iter().filter_map(|file| file_system(file, &mounts)) {
        if all.iter().all(|other| other.mount != found.mount) {
            all.push(found);
        }
    }
    all
}

fn file_system(file: &Path, mounts: &str) -> Option<FileSystem> {
    let dir = fs::canonicalize(file.parent()?).ok()?;
    let (mount, kind) = mounted(mounts, &dir)?;
    let stat = statvfs(&dir).ok()?;
    // These are u32 on some platforms.
    let bytes = |blocks: u64| blocks.saturating_mul(wide(stat.fragment_size()));
    Some(FileSystem {
        mount,
        kind,
        file: file.to_owned(),
        read_only: stat.flags().contains(FsFlags::ST_RDONLY),
        size: bytes(wide(stat.blocks())),
        free: bytes(wide(stat.blocks_free())),
        // A file system that makes inodes when they are needed has none.
        lacks_inodes: stat.files() > 0 && stat.files_available() == 0,
    })
}

fn wide(number: impl Into<u64>) -> u64 {
    number.into()
}

/// The mount point with a directory, and its type, by the text of `mountinfo`. A later line hides
/// an earlier one of the same mount point.
fn mounted(mounts: &str, dir: &Path) -> Option<(PathBuf, String)> {
    let line = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        let mount = PathBuf::from(unescape(mount.split(' ').nth(4)?));
        dir.starts_with(&mount).then(|| (mount, kind.split(' ').next().unwrap_or_default().into()))
    };
    mounts.lines().filter_map(line).max_by_key(|(mount, _)| mount.components().count())
}

/// Undoes the kernel's escapes of blanks and backslashes.
///
/// **Source**: linux `fs/proc_namespace.c: mangle`.
fn unescape(path: &str) -> String {
    path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_file_system_is_found_with_its_repair() {
        let healthy = |kind: &str| FileSystem {
            mount: "/run".into(),
            kind: kind.into(),
            file: "/run/flannel/subnet.env".into(),
            read_only: false,
            size: 1 << 20,
            free: LEAST,
            lacks_inodes: false,
        };
        // File systems that report no size, and a small one.
        for (size, free) in [(0, 0), (LEAST, LEAST / 4)] {
            assert_eq!(check(&[FileSystem { size, free, ..healthy("ramfs") }]), []);
        }
        type Change = fn(&mut FileSystem);
        let mount = r#""$(findmnt -fno TARGET -T /run/flannel)""#;
        for (kind, change, text, before, after) in [
            (
                "tmpfs",
                (|fs| fs.free = 4096) as Change,
                "/run, the file system of /run/flannel/subnet.env, has 4096 bytes of free space: \
                 the daemon may not be able to write that file",
                "mount -o remount,size=2048k ",
                "",
            ),
            (
                "tmpfs",
                |fs| (fs.size, fs.free) = (LEAST, LEAST / 4 - 1),
                "has 16383 bytes of free space: the daemon may not",
                "mount -o remount,size=128k ",
                "",
            ),
            (
                "ext4",
                |fs| fs.free = 0,
                "has 0 bytes of free space: the daemon cannot write that file",
                "du -x ",
                " | sort -n | tail # then delete files there",
            ),
            (
                "ext4",
                |fs| fs.lacks_inodes = true,
                "no room",
                "du --inodes -x ",
                " | sort -n | tail # then delete files there",
            ),
            (
                "ext4",
                |fs| (fs.read_only, fs.free) = (true, 0),
                "is read-only",
                "mount -o remount,rw ",
                " # first see dmesg: the kernel makes a damaged disk read-only",
            ),
        ] {
            let mut fs = healthy(kind);
            assert_eq!(check(&[fs.clone()]), []);
            change(&mut fs);
            let found = check(&[fs]).remove(0).finding;
            assert!(found.is_error() && found.text.contains(text), "{found:?}");
            assert_eq!(found.repair(), Some(format!("{before}{mount}{after}")));
        }
    }

    #[test]
    fn the_last_and_longest_mount_point_has_a_directory() {
        let mounts = "\
            22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw\n\
            23 22 0:21 / /run rw,nosuid shared:2 master:1 - tmpfs tmpfs rw,size=64k\n\
            24 23 0:22 / /run rw - ramfs none rw\n\
            25 22 0:23 / /a\\040b rw - ext4 /dev/vda rw\n\
            26 22 0:24 / /runner rw - xfs /dev/vdb rw\n";
        for (dir, expected) in [
            ("/run/flannel", ("/run", "ramfs")),
            ("/runner", ("/runner", "xfs")),
            ("/a b", ("/a b", "ext4")),
            ("/var", ("/", "overlay")),
        ] {
            let (mount, kind) = mounted(mounts, Path::new(dir)).unwrap();
            assert_eq!((mount.to_str().unwrap(), kind.as_str()), expected, "{dir}");
        }
        assert_eq!(mounted("", Path::new("/")), None);
    }

    #[test]
    fn a_file_whose_directory_is_missing_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let [file, other, none] =
            ["subnet.env", "leases", "none/leases"].map(|f| dir.path().join(f));
        let found = read(&[file.clone(), other, none]);
        assert!(found.len() == 1 && found[0].file == file && found[0].size > 0, "{found:?}");
    }
}
