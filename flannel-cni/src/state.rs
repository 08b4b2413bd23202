//! The delegates' configs on disk, from ADD until the delegate's DEL has succeeded. The file name
//! is `<container>:<interface>`. One file of a container, usually the first, also has the Go
//! plugin's name `<container>` as a hard link, so that either plugin can replace the other.
//! Errors have [`Code::IO`] and name the file.
//!
//! **Source**: cni-plugin `flannel.go: saveScratchNetConf, consumeScratchNetConf`.

use std::fs::{self, DirBuilder, DirEntry, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::config::delegate_conf::DelegateConf;
use crate::spec::error::{Code, Error, Result};

/// The state of one interface of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    dir: PathBuf,
    pub(crate) container: String,
    pub(crate) ifname: String,
}

/// A file of the Go plugin. It does not name the interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GoState {
    pub(crate) container: String,
    pub(crate) path: PathBuf,
}

/// The state in a directory.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) states: Vec<State>,
    pub(crate) of_go: Vec<GoState>,
}

impl State {
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

    /// The config that this plugin saved; `None` if there is none.
    pub(crate) fn load_own(&self) -> Result<Option<Vec<u8>>> {
        read(&self.path())
    }

    /// The config that this plugin saved, or the Go plugin for this network; `None` if there is
    /// none. A Go plugin's file of another network belongs to another interface.
    pub(crate) fn load(&self, network: &str) -> Result<Option<Vec<u8>>> {
        if let Some(own) = self.load_own()? {
            return Ok(Some(own));
        }
        let path = self.go_path();
        let read = || match fs::metadata(&path)?.nlink() {
            1 => fs::read(&path).map(Some),
            // Our file of another interface.
            _ => Ok(None),
        };
        let saved = absent_is_none(read())
            .map(Option::flatten)
            .map_err(|error| failed("read", &path, &error))?;
        let is_of_it = |saved: &Vec<u8>| {
            DelegateConf::from_saved(saved).is_none_or(|conf| conf.network() == network)
        };
        Ok(saved.filter(is_of_it))
    }

    /// Saves `conf` durably. After an error the earlier config is unchanged.
    pub(crate) fn save(&self, conf: &[u8]) -> Result<()> {
        let path = self.path();
        self.write(conf, &path).map_err(|error| failed("write", &path, &error))?;
        self.link(&path);
        // So that the new names are durable too.
        let sync = || File::open(&self.dir)?.sync_all();
        match sync() {
            // Some file systems cannot sync a directory.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            synced => synced.map_err(|error| failed("sync", &self.dir, &error)),
        }
    }

    /// Adds the Go plugin's name for the state at `path`, if no file has it.
    fn link(&self, path: &Path) {
        match fs::hard_link(path, self.go_path()) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => self.not_linked(&error),
            _ => {}
        }
    }

    fn not_linked(&self, error: &dyn std::fmt::Display) {
        let why = "the Go plugin would not find this state";
        let _ = writeln!(io::stderr(), "flannel: {}: {error}: {why}", self.go_path().display());
    }

    fn write(&self, conf: &[u8], path: &Path) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        // No container's id begins with a dot.
        let temporary = self.dir.join(format!(".{}:{}", self.container, self.ifname));
        // The Go plugin's name must not stay on the old file.
        let linked = same_file(path, &self.go_path());
        // That of a killed call.
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

    /// Removes the state, if there is one.
    pub(crate) fn forget(&self) -> Result<()> {
        let (own, of_go) = (self.path(), self.go_path());
        let linked = same_file(&own, &of_go);
        // The Go plugin's name is removed first. Alone it would look like the Go plugin's file.
        if linked || !own.exists() && fs::metadata(&of_go).is_ok_and(|file| file.nlink() == 1) {
            remove(&of_go)?;
        }
        remove(&own)?;
        if linked {
            match list(&self.dir) {
                Ok(listing) => {
                    let others =
                        listing.states.iter().filter(|other| other.container == self.container);
                    others.map(Self::path).min().iter().for_each(|path| self.link(path));
                }
                // The state is removed nevertheless.
                Err(error) => self.not_linked(&error),
            }
        }
        Ok(())
    }
}

/// Checks that no other user may write to the directory: its files decide what plugins do with the
/// rights of this one. A directory that does not exist passes.
pub(crate) fn check_dir(dir: &Path) -> Result<()> {
    let failed = |error: io::Error| failed("read", dir, &error);
    let Some(link) = absent_is_none(fs::symlink_metadata(dir)).map_err(failed)? else {
        return Ok(());
    };
    let Some(target) = absent_is_none(fs::metadata(dir)).map_err(failed)? else { return Ok(()) };
    let us = fs::metadata("/proc/self").map_or(0, |process| process.uid());
    match mistrust(us, [link.uid(), target.uid()], target.mode()) {
        Some(why) => Err(Error::new(Code::IO, format!("dataDir {}: {why}", dir.display()))),
        None => Ok(()),
    }
}

/// Why the content of a directory may be another user's. Its owners are that of a symbolic link to
/// it, and its own.
fn mistrust(us: u32, owners: [u32; 2], mode: u32) -> Option<String> {
    let foreign = owners.into_iter().find(|owner| ![0, us].contains(owner));
    let owner = foreign.map(|owner| format!("it belongs to user {owner}, expected root or {us}"));
    let open =
        || format!("its mode {:04o} lets other users write to it: chmod go-w", mode & 0o7777);
    owner.or_else(|| (mode & 0o022 != 0).then(open))
}

/// All states in `dir`; none if the directory does not exist.
pub(crate) fn list(dir: &Path) -> Result<Listing> {
    let failed = |error: io::Error| failed("read", dir, &error);
    let entries = absent_is_none(fs::read_dir(dir)).map_err(failed)?;
    listing_of(dir, entries.into_iter().flatten()).map_err(failed)
}

fn listing_of(
    dir: &Path,
    entries: impl Iterator<Item = io::Result<DirEntry>>,
) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        // The file may have been removed meanwhile.
        let Some(file) = absent_is_none(entry.metadata())? else { continue };
        if name.starts_with('.') || !file.is_file() {
            continue;
        }
        match name.split_once(':') {
            Some((container, ifname)) => listing.states.push(State::new(dir, container, ifname)),
            None if file.nlink() == 1 => {
                listing.of_go.push(GoState { container: name, path: entry.path() });
            }
            None => {}
        }
    }
    Ok(listing)
}

fn same_file(a: &Path, b: &Path) -> bool {
    let identity =
        |path: &Path| fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()));
    identity(a).is_some() && identity(a) == identity(b)
}

/// The bytes of a file; `None` if it does not exist.
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
        let entries = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.collect();
        names.sort();
        names
    }

    #[test]
    fn every_interface_has_a_file_and_the_first_also_has_the_go_name() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("cni/flannel");
        let (eth0, net1) = (State::new(&dir, "c1", "eth0"), State::new(&dir, "c1", "net1"));
        assert_eq!(eth0.load("net").unwrap(), None);
        eth0.save(b"one").unwrap();
        assert_eq!(net1.load("net").unwrap(), None, "the linked file belongs to another interface");
        net1.save(b"two").unwrap();
        assert_eq!(names(&dir), ["c1", "c1:eth0", "c1:net1"]);
        assert_eq!(fs::read(dir.join("c1")).unwrap(), b"one");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&dir), mode(&eth0.path())), (0o700, 0o600));
        eth0.save(b"three").unwrap();
        assert_eq!(
            (eth0.load("net").unwrap().unwrap(), fs::read(dir.join("c1")).unwrap()),
            (b"three".into(), b"three".into())
        );
        eth0.forget().unwrap();
        assert_eq!(
            (names(&dir), net1.load("net").unwrap().unwrap()),
            (vec!["c1".to_owned(), "c1:net1".to_owned()], b"two".into())
        );
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
        let state = State::new(dir.path(), "c1", "eth0");
        fs::write(dir.path().join("c1"), "go's").unwrap();
        assert_eq!(
            (state.load("net").unwrap().unwrap(), state.load_own().unwrap()),
            (b"go's".into(), None)
        );
        state.save(b"ours").unwrap();
        state.save(b"ours again").unwrap();
        assert_eq!(fs::read(dir.path().join("c1")).unwrap(), b"go's");
        state.forget().unwrap();
        assert_eq!(state.load("net").unwrap().unwrap(), b"go's");
        state.forget().unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        let of_net = br#"{"type":"bridge","name":"net"}"#;
        fs::write(dir.path().join("c1"), of_net).unwrap();
        assert_eq!(
            (state.load("other").unwrap(), state.load("net").unwrap()),
            (None, Some(of_net.to_vec()))
        );
    }

    #[test]
    fn a_listing_separates_our_files_from_those_of_go() {
        let dir = tempfile::tempdir().unwrap();
        assert!(list(&dir.path().join("absent")).unwrap().states.is_empty());
        State::new(dir.path(), "c1", "eth0").save(b"x").unwrap();
        fs::write(dir.path().join("c2"), "go's").unwrap();
        fs::write(dir.path().join(".c3:eth0"), "half").unwrap();
        fs::create_dir(dir.path().join("c4")).unwrap();
        let listing = list(dir.path()).unwrap();
        assert_eq!(listing.states, [State::new(dir.path(), "c1", "eth0")]);
        assert_eq!(
            listing.of_go,
            [GoState { container: "c2".into(), path: dir.path().join("c2") }]
        );
    }

    #[test]
    fn a_file_that_disappears_during_the_listing_hides_no_other() {
        let dir = tempfile::tempdir().unwrap();
        ["c1", "c2", "c3"]
            .iter()
            .for_each(|name| fs::write(dir.path().join(name), "go's").unwrap());
        let mut first = None;
        let entries = fs::read_dir(dir.path()).unwrap().inspect(|entry| {
            // By another call of the plugin.
            let path = entry.as_ref().unwrap().path();
            if first.is_none() {
                fs::remove_file(&path).unwrap();
                first = Some(path);
            }
        });
        assert_eq!(listing_of(dir.path(), entries).unwrap().of_go.len(), 2);
    }

    #[test]
    fn a_directory_that_another_user_may_write_to_is_refused() {
        for (us, owners, mode, says) in [
            (0, [0, 0], 0o700, ""),
            (0, [0, 0], 0o755, ""),
            (1000, [1000, 0], 0o755, ""),
            (0, [0, 1000], 0o700, "user 1000, expected root"),
            (0, [1000, 0], 0o700, "user 1000, expected root"),
            (1000, [1001, 0], 0o700, "user 1001, expected root or 1000"),
            (0, [0, 0], 0o757, "mode 0757"),
            (0, [0, 0], 0o1777, "mode 1777"),
            (0, [0, 0], 0o720, "mode 0720"),
        ] {
            let why = mistrust(us, owners, mode).unwrap_or_default();
            assert!(why.contains(says) && why.is_empty() == says.is_empty(), "{owners:?}: {why}");
        }
        let parent = tempfile::tempdir().unwrap();
        let (dir, link) = (parent.path().join("dir"), parent.path().join("link"));
        check_dir(&dir).unwrap();
        State::new(&dir, "c1", "eth0").save(b"x").unwrap();
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
    fn the_state_is_not_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::new(dir.path(), "c1", "eth0");
        let target = dir.path().join("target");
        fs::write(&target, "other").unwrap();
        for name in [".c1:eth0", "c1:eth0", "c1"] {
            std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
        }
        state.save(b"x").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"other");
        assert_eq!(fs::read(state.path()).unwrap(), b"x");
    }

    #[test]
    fn a_failure_to_save_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::new(&dir.path().join("file"), "c1", "eth0");
        fs::write(dir.path().join("file"), "").unwrap();
        for error in [
            state.save(b"x").unwrap_err(),
            state.load("net").unwrap_err(),
            state.forget().unwrap_err(),
        ] {
            assert!(error.code == Code::IO && error.msg.contains("file/c1"), "{error}");
        }
    }
}
