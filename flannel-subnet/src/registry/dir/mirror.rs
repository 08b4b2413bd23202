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

use super::file::{self, LeaseFile, OF_TOO_LARGE, revision};
use crate::registry::history::History;
use crate::registry::{Batch, Listing, Now, SkipReason, Skipped};

/// The time for which a file that an editor renamed away may be missing.
const GRACE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Mirror {
    root: PathBuf,
    /// The files are configuration and do not expire.
    forever: bool,
    /// The last readable content of each file.
    good: BTreeMap<Subnets, LeaseFile>,
    /// The reason why the present content of a file is unreadable. Its last readable content
    /// is still used until it expires or is replaced.
    bad: BTreeMap<String, SkipReason>,
    /// When to read a readable file again.
    due: BTreeMap<Subnets, SystemTime>,
    history: History,
    /// The number of changes of the config file.
    pub(super) config_changes: u64,
    /// The watched directories; `None` if they must be watched and read again.
    watched: Option<Watched>,
}

#[derive(Clone, Copy)]
struct Watched {
    root: WatchDescriptor,
    subnets: WatchDescriptor,
}

/// The result of reading a file.
enum Found {
    Text(String, SystemTime),
    Gone,
    Unreadable(SkipReason),
}

impl Mirror {
    pub(super) fn new(root: PathBuf, forever: bool) -> Self {
        Self { root, forever, ..Self::default() }
    }

    /// Processes all events. After an error the directory cannot be watched or read, and the next
    /// call starts over.
    pub(super) fn refresh(&mut self, inotify: &Inotify, now: SystemTime) -> io::Result<()> {
        let Some(watched) = self.watched else {
            return self.start(inotify, now);
        };
        let mut named: BTreeMap<OsString, bool> = BTreeMap::new();
        let mut everything = false;
        loop {
            let events = match inotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for event in events {
                everything |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                if self.lost(watched, &event) {
                    self.watched = None;
                }
                let name = event.name.unwrap_or_default();
                if event.wd == watched.root && name == "config" {
                    self.config_changes += 1;
                } else if event.wd == watched.root && name == "subnets" {
                    self.watched = None;
                } else if event.wd == watched.subnets && self.concerns(event.mask, &name) {
                    // Only a file that was renamed away may come back soon.
                    *named.entry(name).or_default() =
                        event.mask.contains(AddWatchFlags::IN_MOVED_FROM);
                }
            }
        }
        if self.watched.is_none() {
            return self.start(inotify, now);
        }
        if everything {
            self.config_changes += 1;
            return self.read_all(now);
        }
        let due = self.due.iter().filter(|(_, due)| **due <= now);
        let due: Vec<String> = due.map(|(subnets, _)| subnets.to_string()).collect();
        for (name, renamed) in named {
            self.reload(&name.to_string_lossy(), renamed, now);
        }
        due.iter().for_each(|name| self.reload(name, false, now));
        Ok(())
    }

    /// Checks that the directory can be read. After an error the next refresh starts over.
    pub(super) fn confirm(&mut self) -> io::Result<()> {
        fs::read_dir(self.subnets()).map(drop).inspect_err(|_| self.watched = None)
    }

    /// A watched directory itself was deleted, moved or unmounted.
    fn lost(&self, watched: Watched, event: &InotifyEvent) -> bool {
        let gone = AddWatchFlags::IN_IGNORED
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_UNMOUNT;
        (event.wd == watched.root || event.wd == watched.subnets) && event.mask.intersects(gone)
    }

    /// A new file is read when its writer closes it, and a new link to an existing file at once.
    fn concerns(&self, mask: AddWatchFlags, name: &OsString) -> bool {
        if !mask.contains(AddWatchFlags::IN_CREATE) {
            return true;
        }
        let metadata = fs::symlink_metadata(self.subnets().join(name));
        metadata.is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
    }

    /// When to refresh without an event; `None`: never.
    pub(super) fn due(&self) -> Option<SystemTime> {
        self.due.values().min().copied()
    }

    /// When the lease ends without a renewal; `None`: there is none, or it has no end.
    pub(super) fn end(&self, subnets: &Subnets) -> Option<SystemTime> {
        self.due.get(subnets).copied()
    }

    pub(super) fn revision(&self) -> Revision {
        self.history.revision()
    }

    pub(super) fn list(&self) -> Listing {
        let skipped = |(key, reason): (&String, &SkipReason)| Skipped {
            key: key.clone(),
            reason: reason.clone(),
            revision: if reason.keeps_last() { Revision::default() } else { OF_TOO_LARGE },
        };
        Listing {
            entries: self.good.values().map(LeaseFile::entry).collect(),
            skipped: self.bad.iter().map(skipped).collect(),
            revision: self.revision(),
        }
    }

    /// Why the file of a key is not used at all; `None` if it is, if it does not exist, or if its
    /// last readable content is used.
    pub(super) fn unused(&self, subnets: &Subnets) -> Option<&SkipReason> {
        let reason = self.bad.get(&subnets.to_string())?;
        (!reason.keeps_last()).then_some(reason)
    }

    pub(super) fn file(&self, subnets: &Subnets) -> Option<&LeaseFile> {
        self.good.get(subnets)
    }

    /// The changes after `after`; `None` if they are unknown.
    pub(super) fn changes(&self, after: Revision) -> Option<Batch> {
        self.history.since(after, |key| self.now(key))
    }

    fn now(&self, key: &str) -> Now {
        let file = || self.file(&key.parse().ok()?);
        match self.bad.get(key) {
            Some(reason) => Now::Unreadable(reason.clone()),
            None => file().map_or(Now::Gone, |file| Now::Held(file.entry())),
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
            // There was no watch yet.
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
        names.extend(self.good.keys().map(Subnets::to_string));
        names.extend(self.bad.keys().cloned());
        names.iter().for_each(|name| self.reload(name, false, now));
        // A map that is built at once takes a third less memory than one that grew in order.
        self.good = std::mem::take(&mut self.good).into_iter().collect();
        Ok(())
    }

    /// Reads one file again and notes the change.
    fn reload(&mut self, name: &str, renamed: bool, now: SystemTime) {
        if is_ignored(name) {
            return;
        }
        let before = self.now(name);
        let held = name.parse().ok().filter(|subnets| self.good.contains_key(subnets));
        match (read(&self.subnets().join(name)), held) {
            (Found::Gone, Some(held)) if renamed => _ = self.due.insert(held, now + GRACE),
            (Found::Gone, held) => {
                self.bad.remove(name);
                held.iter().for_each(|subnets| self.remove(subnets));
            }
            (Found::Text(text, modified), _) => self.update(name, &text, modified, now),
            (Found::Unreadable(reason), held) => {
                let keeps_last = reason.keeps_last();
                self.bad.insert(name.to_owned(), reason);
                held.iter().for_each(|subnets| _ = self.due.remove(subnets));
                held.iter().filter(|_| !keeps_last).for_each(|subnets| self.remove(subnets));
            }
        }
        if self.now(name) != before {
            self.history.push(name);
        }
    }

    fn remove(&mut self, subnets: &Subnets) {
        self.good.remove(subnets);
        self.due.remove(subnets);
    }

    /// Notes the text of a file.
    fn update(&mut self, name: &str, text: &str, modified: SystemTime, now: SystemTime) {
        let known = name.parse().ok().and_then(|subnets| self.file(&subnets));
        let known = known
            .filter(|file| file.lease.revision == revision(text) && !self.bad.contains_key(name));
        match known.cloned().map_or_else(|| LeaseFile::read(name, text), Ok) {
            Ok(mut file) => {
                file.grant = file.grant.filter(|_| !self.forever);
                self.bad.remove(name);
                self.good.insert(file.lease.subnets, file);
            }
            Err(reason) => {
                drop(self.bad.insert(name.to_owned(), SkipReason::unreadable(&reason)));
            }
        }
        let Ok(subnets) = name.parse::<Subnets>() else { return };
        match self.file(&subnets).and_then(|file| file.end(modified)) {
            Some(end) if end <= now => self.remove(&subnets),
            Some(end) => _ = self.due.insert(subnets, end),
            None => _ = self.due.remove(&subnets),
        }
    }
}

/// Files of editors and of this program that are not keys.
fn is_ignored(name: &str) -> bool {
    name.starts_with('.') || name.ends_with('~')
}

fn read(path: &Path) -> Found {
    match file::lease_text(path) {
        Ok(Ok((text, modified))) => Found::Text(text, modified),
        Ok(Err(too_large)) => Found::Unreadable(too_large.into()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Gone,
        Err(error) => Found::Unreadable(SkipReason::unreadable(&error)),
    }
}
