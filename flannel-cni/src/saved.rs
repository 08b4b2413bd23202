//! The delegates' configs on disk, from ADD until the delegate's DEL has succeeded. The file name
//! is `<container>:<interface>`. One file of a container, usually the first, also has the Go
//! plugin's name `<container>` as a hard link, so that either plugin can replace the other.
//! All errors have the code [`Code::IO`] and name the file.
//!
//! **Source**: cni-plugin `flannel.go: saveScratchNetConf, consumeScratchNetConf`.

use std::fs::{self, DirBuilder, DirEntry, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::config::delegate_conf::DelegateConf;
use crate::spec::error::{Code, Error, Result};

/// The saved config for one interface of a container. The file may not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedConf {
    dir: PathBuf,
    pub(crate) container: String,
    pub(crate) ifname: String,
}

/// A file of the Go plugin. It does not name the interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GoFile {
    pub(crate) container: String,
    pub(crate) path: PathBuf,
}

/// The files in a directory.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// The files of this plugin.
    pub(crate) own: Vec<SavedConf>,
    /// The files of the Go plugin.
    pub(crate) of_go: Vec<GoFile>,
}

impl SavedConf {
    pub(crate) fn new(dir: &Path, container: &str, ifname: &str) -> Self {
        Self { dir: dir.to_owned(), container: container.to_owned(), ifname: ifname.to_owned() }
    }

    /// The path of the file, which may not exist.
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(format!("{}:{}", self.container, self.ifname))
    }

    fn go_path(&self) -> PathBuf {
        self.dir.join(&self.container)
    }

    /// The config that this plugin saved, or `None` if it saved none.
    pub(crate) fn load_own(&self) -> Result<Option<Vec<u8>>> {
        read(&self.path())
    }

    /// The config that this plugin saved, or else the config that the Go plugin saved for this
    /// network. `None` if there is neither. A Go plugin's file of another network belongs to
    /// another interface.
    pub(crate) fn load(&self, network: &str) -> Result<Option<Vec<u8>>> {
        if let Some(own) = self.load_own()? {
            return Ok(Some(own));
        }
        let of_go = self.load_of_go()?;
        Ok(of_go.filter(|saved| {
            DelegateConf::from_saved(saved).is_none_or(|conf| conf.network() == network)
        }))
    }

    fn load_of_go(&self) -> Result<Option<Vec<u8>>> {
        let path = self.go_path();
        let failed = |error: io::Error| failed("read", &path, &error);
        let Some(file) = absent_is_none(fs::metadata(&path)).map_err(failed)? else {
            return Ok(None);
        };
        // With a second name, it is our file of another interface.
        if file.nlink() != 1 {
            return Ok(None);
        }
        absent_is_none(fs::read(&path)).map_err(failed)
    }

    /// Saves `conf` durably. After an error the earlier config is unchanged.
    pub(crate) fn save(&self, conf: &[u8]) -> Result<()> {
        let path = self.path();
        self.write(conf, &path).map_err(|error| failed("write", &path, &error))?;
        self.link(&path);
        // The directory is synced, so that the new names are durable too.
        match File::open(&self.dir).and_then(|dir| dir.sync_all()) {
            // Some file systems cannot sync a directory.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            synced => synced.map_err(|error| failed("sync", &self.dir, &error)),
        }
    }

    /// Adds the Go plugin's name for the file at `path`, if no file has it.
    fn link(&self, path: &Path) {
        match fs::hard_link(path, self.go_path()) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => self.warn_not_linked(&error),
            _ => {}
        }
    }

    fn warn_not_linked(&self, error: &dyn std::fmt::Display) {
        let why = "the Go plugin would not find this state";
        let _ = writeln!(io::stderr(), "flannel: {}: {error}: {why}", self.go_path().display());
    }

    fn write(&self, conf: &[u8], path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        // No container's id begins with a dot.
        let temporary = self.dir.join(format!(".{}:{}", self.container, self.ifname));
        // The Go plugin's name must not stay on the old file.
        let linked = same_file(path, &self.go_path());
        // The file of a killed call.
        absent_is_none(fs::remove_file(&temporary))?;
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(conf)?;
        // Before the rename, so that a crash leaves the old or the new file, and no empty one.
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        if linked {
            fs::remove_file(self.go_path())?;
        }
        Ok(())
    }

    /// Removes the file, if there is one. If it had the Go plugin's name too, another file of the
    /// container gets that name.
    pub(crate) fn forget(&self) -> Result<()> {
        let own = self.path();
        let of_go = self.go_path();
        let linked = same_file(&own, &of_go);
        // The Go plugin's name is removed first. Alone it would look like the Go plugin's file.
        if linked || !own.exists() && fs::metadata(&of_go).is_ok_and(|file| file.nlink() == 1) {
            remove(&of_go)?;
        }
        remove(&own)?;
        if linked {
            self.link_another();
        }
        Ok(())
    }

    /// Adds the Go plugin's name for another file of the container, if there is one. An error is
    /// only a warning, because the own file is removed already.
    fn link_another(&self) {
        match list(&self.dir) {
            Ok(files) => {
                let of_container = files.own.iter().filter(|file| file.container == self.container);
                if let Some(path) = of_container.map(Self::path).min() {
                    self.link(&path);
                }
            }
            Err(error) => self.warn_not_linked(&error),
        }
    }
}

/// Checks that no other user may write to the directory, because its files decide what plugins do
/// with the rights of this process. The group of root may. A directory that does not exist passes.
pub(crate) fn check_dir(dir: &Path) -> Result<()> {
    let failed = |error: io::Error| failed("read", dir, &error);
    let Some(link) = absent_is_none(fs::symlink_metadata(dir)).map_err(failed)? else {
        return Ok(());
    };
    let Some(target) = absent_is_none(fs::metadata(dir)).map_err(failed)? else { return Ok(()) };
    let us = fs::metadata("/proc/self").map_or(0, |process| process.uid());
    match why_not_trusted(us, [link.uid(), target.uid()], target.gid(), target.mode()) {
        Some(why) => Err(Error::new(Code::IO, format!("dataDir {}: {why}", dir.display()))),
        None => Ok(()),
    }
}

/// Why another user may have written the content of a directory, or `None`. `owners` are the owner
/// of a symbolic link to the directory, and its own; `group` is its group.
fn why_not_trusted(us: u32, owners: [u32; 2], group: u32, mode: u32) -> Option<String> {
    if let Some(owner) = owners.into_iter().find(|owner| ![0, us].contains(owner)) {
        return Some(format!("it belongs to user {owner}, expected root or {us}"));
    }
    let of_others = if group == 0 { 0o002 } else { 0o022 };
    if mode & of_others != 0 {
        let mode = mode & 0o7777;
        return Some(format!("its mode {mode:04o} lets other users write to it: chmod go-w"));
    }
    None
}

/// All files in `dir`. A directory that does not exist has none.
pub(crate) fn list(dir: &Path) -> Result<Files> {
    let failed = |error: io::Error| failed("read", dir, &error);
    let entries = absent_is_none(fs::read_dir(dir)).map_err(failed)?;
    files_of(dir, entries.into_iter().flatten()).map_err(failed)
}

fn files_of(dir: &Path, entries: impl Iterator<Item = io::Result<DirEntry>>) -> io::Result<Files> {
    let mut files = Files::default();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // The file may have been removed meanwhile.
        let Some(file) = absent_is_none(entry.metadata())? else { continue };
        if name.starts_with('.') || !file.is_file() {
            continue;
        }
        match name.split_once(':') {
            Some((container, ifname)) => files.own.push(SavedConf::new(dir, container, ifname)),
            None if file.nlink() == 1 => {
                files.of_go.push(GoFile { container: name, path: entry.path() });
            }
            None => {}
        }
    }
    Ok(files)
}

fn same_file(a: &Path, b: &Path) -> bool {
    let identity =
        |path: &Path| fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()));
    identity(a).is_some() && identity(a) == identity(b)
}

/// The bytes of a file, or `None` if it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    absent_is_none(fs::read(path)).map_err(|error| failed("read", path, &error))
}

/// Removes a file, if it exists.
pub(crate) fn remove(path: &Path) -> Result<()> {
    absent_is_none(fs::remove_file(path)).map(drop).map_err(|error| failed("remove", path, &error))
}

fn absent_is_none<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn failed(verb: &str, path: &Path, error: &io::Error) -> Error {
    Error::new(Code::IO, format!("failed to {verb} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn every_interface_has_a_file_and_the_first_also_has_the_go_name() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("cni/flannel");
        let eth0 = SavedConf::new(&dir, "c1", "eth0");
        let net1 = SavedConf::new(&dir, "c1", "net1");
        assert_eq!(eth0.load("net").unwrap(), None);
        eth0.save(b"one").unwrap();
        assert_eq!(net1.load("net").unwrap(), None, "the linked file belongs to another interface");
        net1.save(b"two").unwrap();
        assert_eq!(names(&dir), ["c1", "c1:eth0", "c1:net1"]);
        assert_eq!(fs::read(dir.join("c1")).unwrap(), b"one");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(&eth0.path()), 0o600);
        eth0.save(b"three").unwrap();
        assert_eq!(eth0.load("net").unwrap().unwrap(), b"three");
        assert_eq!(fs::read(dir.join("c1")).unwrap(), b"three");
        eth0.forget().unwrap();
        assert_eq!(names(&dir), ["c1", "c1:net1"]);
        assert_eq!(net1.load("net").unwrap().unwrap(), b"two");
        assert_eq!(
            fs::read(dir.join("c1")).unwrap(),
            b"two",
            "the Go plugin finds the remaining interface"
        );
        net1.forget().unwrap();
        net1.forget().unwrap();
        assert_eq!(names(&dir), [""; 0]);
    }

    #[test]
    fn the_go_plugins_file_is_read_kept_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SavedConf::new(dir.path(), "c1", "eth0");
        fs::write(dir.path().join("c1"), "go's").unwrap();
        assert_eq!(saved.load("net").unwrap().unwrap(), b"go's");
        assert_eq!(saved.load_own().unwrap(), None);
        saved.save(b"ours").unwrap();
        saved.save(b"ours again").unwrap();
        assert_eq!(fs::read(dir.path().join("c1")).unwrap(), b"go's");
        saved.forget().unwrap();
        assert_eq!(saved.load("net").unwrap().unwrap(), b"go's");
        saved.forget().unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        let of_net = br#"{"type":"bridge","name":"net"}"#;
        fs::write(dir.path().join("c1"), of_net).unwrap();
        assert_eq!(saved.load("other").unwrap(), None);
        assert_eq!(saved.load("net").unwrap().unwrap(), of_net);
    }

    #[test]
    fn our_files_and_the_files_of_go_are_listed_separately() {
        let dir = tempfile::tempdir().unwrap();
        assert!(list(&dir.path().join("absent")).unwrap().own.is_empty());
        SavedConf::new(dir.path(), "c1", "eth0").save(b"x").unwrap();
        fs::write(dir.path().join("c2"), "go's").unwrap();
        fs::write(dir.path().join(".c3:eth0"), "half").unwrap();
        fs::create_dir(dir.path().join("c4")).unwrap();
        let files = list(dir.path()).unwrap();
        assert_eq!(files.own, [SavedConf::new(dir.path(), "c1", "eth0")]);
        let of_go = GoFile { container: "c2".into(), path: dir.path().join("c2") };
        assert_eq!(files.of_go, [of_go]);
    }

    #[test]
    fn a_file_that_disappears_during_the_listing_hides_no_other() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["c1", "c2", "c3"] {
            fs::write(dir.path().join(name), "go's").unwrap();
        }
        let mut first = None;
        let entries = fs::read_dir(dir.path()).unwrap().inspect(|entry| {
            // By another call of the plugin.
            let path = entry.as_ref().unwrap().path();
            if first.is_none() {
                fs::remove_file(&path).unwrap();
                first = Some(path);
            }
        });
        assert_eq!(files_of(dir.path(), entries).unwrap().of_go.len(), 2);
    }

    #[test]
    fn a_directory_that_another_user_may_write_to_is_refused() {
        for (us, owners, group, mode, says) in [
            (0, [0, 0], 0, 0o700, ""),
            (0, [0, 0], 0, 0o755, ""),
            (0, [0, 0], 0, 0o775, ""),
            (0, [0, 0], 0, 0o2770, ""),
            (1000, [1000, 0], 1000, 0o755, ""),
            (0, [0, 1000], 0, 0o700, "user 1000, expected root"),
            (0, [1000, 0], 0, 0o700, "user 1000, expected root"),
            (1000, [1001, 0], 0, 0o700, "user 1001, expected root or 1000"),
            (0, [0, 0], 0, 0o757, "mode 0757"),
            (0, [0, 0], 0, 0o1777, "mode 1777"),
            (0, [0, 0], 0, 0o777, "mode 0777"),
            (0, [0, 0], 27, 0o720, "mode 0720"),
            (0, [0, 0], 27, 0o775, "mode 0775"),
        ] {
            let why = why_not_trusted(us, owners, group, mode).unwrap_or_default();
            assert!(why.contains(says) && why.is_empty() == says.is_empty(), "{owners:?}: {why}");
        }
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("dir");
        let link = parent.path().join("link");
        check_dir(&dir).unwrap();
        SavedConf::new(&dir, "c1", "eth0").save(b"x").unwrap();
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        check_dir(&link).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        for path in [&dir, &link] {
            let error = check_dir(path).unwrap_err();
            assert!(error.code == Code::IO && error.msg.contains("0777"), "{error}");
        }
    }

    /// The file at the place of a temporary one may be a link that another user made.
    #[test]
    fn a_config_is_not_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SavedConf::new(dir.path(), "c1", "eth0");
        let target = dir.path().join("target");
        fs::write(&target, "other").unwrap();
        for name in [".c1:eth0", "c1:eth0", "c1"] {
            std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
        }
        saved.save(b"x").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"other");
        assert_eq!(fs::read(saved.path()).unwrap(), b"x");
    }

    #[test]
    fn a_failure_to_save_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let saved = SavedConf::new(&dir.path().join("file"), "c1", "eth0");
        fs::write(dir.path().join("file"), "").unwrap();
        for error in [
            saved.save(b"x").unwrap_err(),
            saved.load("net").unwrap_err(),
            saved.forget().unwrap_err(),
        ] {
            assert!(error.code == Code::IO && error.msg.contains("file/c1"), "{error}");
        }
    }
}
