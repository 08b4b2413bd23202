//! The last known content of the directory, and its latest changes.
//!
//! Inotify only shows which files to read again. Their content is compared with the last known one,
//! so the number, order and delay of inotify's events are irrelevant. All functions block while
//! they read a few small files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{fs, io};

use flannel_core::Subnets;
use flannel_core::lease::Revision;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, Inotify, InotifyEvent, WatchDescriptor};

use super::file::{self, FileText, LeaseFile, REVISION_OF_TOO_LARGE, revision};
use crate::registry::history::History;
use crate::registry::{Batch, LeaseList, Now, SkipReason, Skipped};

/// The time for which a file that an editor renamed away may be missing.
const GRACE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Mirror {
    root: PathBuf,
    /// The files are configuration and do not expire.
    never_expires: bool,
    /// The last readable content of each file.
    readable: BTreeMap<Subnets, LeaseFile>,
    /// Why the present content of a file is not used. If it is unreadable, its last readable
    /// content is still used until it expires or is replaced.
    skipped: BTreeMap<String, SkipReason>,
    /// When to read a readable file again.
    due: BTreeMap<Subnets, SystemTime>,
    history: History,
    /// The number of changes of the config file.
    config_changes: u64,
    /// The watched directories, or `None` if they must be watched and read again.
    watched: Option<Watched>,
}

/// Two equal versions of a mirror have the same content.
#[derive(PartialEq, Eq)]
pub(super) struct Version {
    revision: Revision,
    config_changes: u64,
    due: Option<SystemTime>,
}

#[derive(Clone, Copy)]
struct Watched {
    root: WatchDescriptor,
    subnets: WatchDescriptor,
}

/// The result of reading a file.
enum Found {
    Text(FileText),
    Gone,
    Skipped(SkipReason),
}

impl Mirror {
    pub(super) fn new(root: PathBuf, never_expires: bool) -> Self {
        Self { root, never_expires, ..Self::default() }
    }

    pub(super) fn version(&self) -> Version {
        Version { revision: self.revision(), config_changes: self.config_changes, due: self.due() }
    }

    /// Processes all events.
    ///
    /// # Errors
    /// The directory cannot be watched or read. The next call starts over.
    pub(super) fn refresh(&mut self, inotify: &Inotify, now: SystemTime) -> io::Result<()> {
        let Some(watched) = self.watched else {
            return self.start(inotify, now);
        };
        // The files to read again, and whether the last event is that the file was renamed away.
        let mut renamed_away: BTreeMap<OsString, bool> = BTreeMap::new();
        let mut has_overflown = false;
        loop {
            let events = match inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for event in events {
                has_overflown |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                if watched.is_lost(&event) {
                    self.watched = None;
                }
                let name = event.name.unwrap_or_default();
                if event.wd == watched.root && name == "config" {
                    self.config_changes += 1;
                } else if event.wd == watched.root && name == "subnets" {
                    self.watched = None;
                } else if event.wd == watched.subnets && self.is_complete(event.mask, &name) {
                    renamed_away.insert(name, event.mask.contains(AddWatchFlags::IN_MOVED_FROM));
                }
            }
        }
        if self.watched.is_none() {
            return self.start(inotify, now);
        }
        if has_overflown {
            self.config_changes += 1;
            return self.read_all(now);
        }
        let due: Vec<String> = self
            .due
            .iter()
            .filter(|(_, due)| **due <= now)
            .map(|(subnets, _)| subnets.to_string())
            .collect();
        for (name, renamed_away) in renamed_away {
            self.reload(&name.to_string_lossy(), renamed_away, now);
        }
        for name in due {
            self.reload(&name, false, now);
        }
        Ok(())
    }

    /// Checks that the directory can be read. After an error the next refresh starts over.
    pub(super) fn confirm(&mut self) -> io::Result<()> {
        fs::read_dir(self.subnets()).map(drop).inspect_err(|_| self.watched = None)
    }

    /// Whether the file of an event can be read. A new file is read when its writer closes it, and
    /// a new link to an existing file at once.
    fn is_complete(&self, mask: AddWatchFlags, name: &OsString) -> bool {
        if !mask.contains(AddWatchFlags::IN_CREATE) {
            return true;
        }
        let metadata = fs::symlink_metadata(self.subnets().join(name));
        metadata.is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
    }

    /// When to refresh without an event, or `None` for never.
    pub(super) fn due(&self) -> Option<SystemTime> {
        self.due.values().min().copied()
    }

    /// When the lease ends without a renewal. `None` if the lease does not exist or has no end.
    pub(super) fn end(&self, subnets: &Subnets) -> Option<SystemTime> {
        self.due.get(subnets).copied()
    }

    pub(super) fn revision(&self) -> Revision {
        self.history.revision()
    }

    pub(super) fn list(&self) -> LeaseList {
        let skipped = self.skipped.iter().map(|(key, reason)| Skipped {
            key: key.clone(),
            reason: reason.clone(),
            revision: if reason.keeps_last() { Revision::default() } else { REVISION_OF_TOO_LARGE },
        });
        LeaseList {
            entries: self.readable.values().map(LeaseFile::entry).collect(),
            skipped: skipped.collect(),
            revision: self.revision(),
        }
    }

    /// Why the file of a key is not used at all. `None` if the file or its last readable content is
    /// used, or if the file does not exist.
    pub(super) fn unused(&self, subnets: &Subnets) -> Option<&SkipReason> {
        let reason = self.skipped.get(&subnets.to_string())?;
        (!reason.keeps_last()).then_some(reason)
    }

    pub(super) fn file(&self, subnets: &Subnets) -> Option<&LeaseFile> {
        self.readable.get(subnets)
    }

    /// The changes after `after`, or `None` if they are forgotten.
    pub(super) fn changes(&self, after: Revision) -> Option<Batch> {
        self.history.since(after, |key| self.now(key))
    }

    fn now(&self, key: &str) -> Now {
        if let Some(reason) = self.skipped.get(key) {
            return Now::Unreadable(reason.clone());
        }
        match key.parse().ok().and_then(|subnets| self.file(&subnets)) {
            Some(file) => Now::Held(file.entry()),
            None => Now::Gone,
        }
    }

    fn subnets(&self) -> PathBuf {
        self.root.join("subnets")
    }

    /// Watches first, then reads, so that no change is missed. A missing directory is an error: an
    /// empty one would mean that all leases are gone.
    fn start(&mut self, inotify: &Inotify, now: SystemTime) -> io::Result<()> {
        if let Some(old) = self.watched.take() {
            // This fails for deleted directories.
            let _ = (inotify.rm_watch(old.root), inotify.rm_watch(old.subnets));
        }
        let subnets = self.subnets();
        let mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let watch = |path: &Path| {
            inotify.add_watch(path, mask).map_err(|errno| {
                let text = format!("{}: {errno}", path.display());
                io::Error::new(io::Error::from(errno).kind(), text)
            })
        };
        let watched = Watched { root: watch(&self.root)?, subnets: watch(&subnets)? };
        self.read_all(now)?;
        if self.config_changes == 0 {
            // This is the first list, so no watch needs the changes.
            self.history.forget();
        }
        self.config_changes += 1;
        self.watched = Some(watched);
        Ok(())
    }

    fn read_all(&mut self, now: SystemTime) -> io::Result<()> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(self.subnets())? {
            names.insert(entry?.file_name().to_string_lossy().into_owned());
        }
        names.extend(self.readable.keys().map(Subnets::to_string));
        names.extend(self.skipped.keys().cloned());
        names.iter().for_each(|name| self.reload(name, false, now));
        // A map that is built at once takes a third less memory than one that grew in order.
        self.readable = std::mem::take(&mut self.readable).into_iter().collect();
        Ok(())
    }

    /// Reads one file again and notes the change. A file that was renamed away may come back soon,
    /// because some editors write a file so.
    fn reload(&mut self, name: &str, renamed_away: bool, now: SystemTime) {
        if is_ignored(name) {
            return;
        }
        let before = self.now(name);
        let known = name.parse().ok().filter(|subnets| self.readable.contains_key(subnets));
        match (read(&self.subnets().join(name)), known) {
            (Found::Gone, Some(subnets)) if renamed_away => {
                self.due.insert(subnets, now + GRACE);
            }
            (Found::Gone, known) => {
                self.skipped.remove(name);
                if let Some(subnets) = known {
                    self.remove(&subnets);
                }
            }
            (Found::Text(file), _) => self.update(name, &file, now),
            (Found::Skipped(reason), known) => {
                if let Some(subnets) = known {
                    self.due.remove(&subnets);
                    if !reason.keeps_last() {
                        self.remove(&subnets);
                    }
                }
                self.skipped.insert(name.to_owned(), reason);
            }
        }
        if self.now(name) != before {
            self.history.push(name);
        }
    }

    fn remove(&mut self, subnets: &Subnets) {
        self.readable.remove(subnets);
        self.due.remove(subnets);
    }

    /// Notes the text of a file.
    fn update(&mut self, name: &str, read: &FileText, now: SystemTime) {
        // An unchanged file is not parsed again.
        let unchanged = name
            .parse()
            .ok()
            .and_then(|subnets| self.file(&subnets))
            .filter(|file| file.lease.revision == revision(&read.text))
            .filter(|_| !self.skipped.contains_key(name))
            .cloned();
        match unchanged.map_or_else(|| LeaseFile::read(name, &read.text), Ok) {
            Ok(mut file) => {
                if self.never_expires {
                    file.grant = None;
                }
                self.skipped.remove(name);
                self.readable.insert(file.lease.subnets, file);
            }
            Err(reason) => {
                self.skipped.insert(name.to_owned(), SkipReason::unreadable(&reason));
            }
        }
        let Ok(subnets) = name.parse::<Subnets>() else { return };
        match self.file(&subnets).and_then(|file| file.end(read.modified)) {
            Some(end) if end <= now => self.remove(&subnets),
            Some(end) => _ = self.due.insert(subnets, end),
            None => _ = self.due.remove(&subnets),
        }
    }
}

impl Watched {
    /// Whether the event says that a watched directory itself was deleted, moved or unmounted.
    fn is_lost(self, event: &InotifyEvent) -> bool {
        let gone = AddWatchFlags::IN_IGNORED
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_UNMOUNT;
        (event.wd == self.root || event.wd == self.subnets) && event.mask.intersects(gone)
    }
}

/// Files of editors and of this program that are not keys.
fn is_ignored(name: &str) -> bool {
    name.starts_with('.') || name.ends_with('~')
}

fn read(path: &Path) -> Found {
    match file::lease_text(path) {
        Ok(Ok(file)) => Found::Text(file),
        Ok(Err(too_large)) => Found::Skipped(too_large.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Gone,
        Err(error) => Found::Skipped(SkipReason::unreadable(&error)),
    }
}
