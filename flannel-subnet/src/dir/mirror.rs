//! What the directory held when last looked at, and what changed since.
//!
//! The one thing to know: inotify only names the files to read again. What is in them is compared with what is
//! remembered, so it does not matter how often, or in which order, or how late one is told. Everything here
//! blocks, for as long as reading a few small files takes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use flannel_core::{KeyError, Revision, Subnets};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, Inotify, InotifyEvent, WatchDescriptor};

use super::file::{LeaseFile, revision};
use crate::registry::{Batch, Event, Listing, Now, Skipped};

/// How many changes are remembered for watches that lag behind.
const HISTORY: usize = 8192;
/// An editor that saves by renaming the old file away leaves a gap before it writes the new one.
const GRACE: Duration = Duration::from_millis(100);

pub(super) struct Mirror {
    root: PathBuf,
    /// Files never expire: they are configuration.
    forever: bool,
    files: BTreeMap<String, State>,
    /// Which key changed: the entry `i` is the change of revision `forgotten + 1 + i`.
    history: Vec<String>,
    forgotten: u64,
    /// Grows with each change to the config file.
    pub(super) config_changes: u64,
    /// The watched directories; `None` if they must be watched anew and read completely.
    watched: Option<Watched>,
}

#[derive(Clone, Copy)]
struct Watched {
    root: WatchDescriptor,
    subnets: WatchDescriptor,
}

/// One file of the directory of subnets.
#[derive(Default)]
struct State {
    /// The version of the content last read.
    content: Option<Revision>,
    /// The last content that could be read.
    good: Option<LeaseFile>,
    /// Why the present content cannot be read.
    bad: Option<String>,
    /// When to look at the file again.
    due: Option<SystemTime>,
}

/// How a file was found.
enum Found {
    Text(String, SystemTime),
    Gone,
    Unreadable(String),
}

impl Mirror {
    pub(super) fn new(root: PathBuf, forever: bool) -> Self {
        Self {
            root,
            forever,
            files: BTreeMap::new(),
            history: Vec::new(),
            forgotten: 0,
            config_changes: 0,
            watched: None,
        }
    }

    /// Takes in all that happened. An error means that the directory cannot be watched or read, and that the
    /// next call starts over.
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
                    // Only what was renamed away may be about to come back.
                    *named.entry(name).or_default() = event.mask.contains(AddWatchFlags::IN_MOVED_FROM);
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
        let due = self.files.iter().filter(|(_, state)| state.due.is_some_and(|due| due <= now));
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        for (name, renamed) in named {
            self.look(&name.to_string_lossy(), renamed, now);
        }
        due.iter().for_each(|name| self.look(name, false, now));
        Ok(())
    }

    /// A watched directory itself went away, or stopped being where it was.
    fn lost(&self, watched: Watched, event: &InotifyEvent) -> bool {
        let gone = AddWatchFlags::IN_IGNORED
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_UNMOUNT;
        (event.wd == watched.root || event.wd == watched.subnets) && event.mask.intersects(gone)
    }

    /// A file that was just created is read when its writer closes it, unless it is complete from the start:
    /// a second name of another file.
    fn concerns(&self, mask: AddWatchFlags, name: &OsString) -> bool {
        if !mask.contains(AddWatchFlags::IN_CREATE) {
            return true;
        }
        let metadata = fs::symlink_metadata(self.subnets().join(name));
        metadata.is_ok_and(|metadata| metadata.is_symlink() || metadata.nlink() > 1)
    }

    /// When to look again although nothing happened; `None`: never.
    pub(super) fn due(&self) -> Option<SystemTime> {
        self.files.values().filter_map(|state| state.due).min()
    }

    pub(super) fn revision(&self) -> Revision {
        Revision(self.forgotten + self.history.len() as u64)
    }

    pub(super) fn list(&self) -> Listing {
        let mut listing = Listing { revision: self.revision(), ..Listing::default() };
        for (key, state) in &self.files {
            listing.entries.extend(state.good.as_ref().map(|file| file.entry.clone()));
            let skipped = |reason: &String| Skipped {
                key: key.clone(),
                reason: reason.clone(),
                revision: Revision::default(),
            };
            listing.skipped.extend(state.bad.as_ref().map(skipped));
        }
        listing
    }

    pub(super) fn file(&self, key: &str) -> Option<&LeaseFile> {
        self.files.get(key)?.good.as_ref()
    }

    /// What changed after `after`; `None` if that is no longer known.
    pub(super) fn changes(&self, after: Revision) -> Option<Batch> {
        let revision = self.revision();
        if after.0 < self.forgotten || after > revision {
            return None;
        }
        let keys: BTreeSet<&String> = self.history[(after.0 - self.forgotten) as usize..].iter().collect();
        let event = |key: &String| Event { key: key.clone(), now: self.now(key) };
        Some(Batch { events: keys.into_iter().map(event).collect(), revision })
    }

    fn now(&self, key: &str) -> Now {
        match self.files.get(key) {
            Some(State { bad: Some(reason), .. }) => Now::Unreadable(reason.clone()),
            Some(State { good: Some(file), .. }) => Now::Held(file.entry.clone()),
            _ => Now::Gone,
        }
    }

    fn subnets(&self) -> PathBuf {
        self.root.join("subnets")
    }

    /// Watches first, then reads: nothing falls between the two.
    fn start(&mut self, inotify: &Inotify, now: SystemTime) -> io::Result<()> {
        if let Some(old) = self.watched.take() {
            // Fails for those that are gone.
            let _ = (inotify.rm_watch(old.root), inotify.rm_watch(old.subnets));
        }
        let subnets = self.subnets();
        if !self.forever && self.root.is_dir() && !subnets.exists() {
            fs::create_dir(&subnets)?;
        }
        let mask = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let watch = |path: &Path| {
            let watched = inotify.add_watch(path, mask);
            watched.map_err(|errno| {
                io::Error::new(io::Error::from(errno).kind(), format!("{}: {errno}", path.display()))
            })
        };
        let watched = Watched { root: watch(&self.root)?, subnets: watch(&subnets)? };
        self.read_all(now)?;
        self.config_changes += 1;
        self.watched = Some(watched);
        Ok(())
    }

    fn read_all(&mut self, now: SystemTime) -> io::Result<()> {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(self.subnets())? {
            names.insert(entry?.file_name().to_string_lossy().into_owned());
        }
        names.extend(self.files.keys().cloned());
        names.iter().for_each(|name| self.look(name, false, now));
        Ok(())
    }

    /// Reads one file again and remembers what changed.
    fn look(&mut self, name: &str, renamed: bool, now: SystemTime) {
        if passed_over(name) {
            return;
        }
        let before = self.now(name);
        let state = self.files.remove(name).unwrap_or_default();
        let kept = match read(&self.subnets().join(name)) {
            Found::Gone if renamed && state.good.is_some() => Some(State { due: Some(now + GRACE), ..state }),
            Found::Gone => None,
            Found::Text(text, modified) => self.take_in(name, state, &text, modified, now),
            Found::Unreadable(reason) => Some(State { bad: Some(reason), content: None, due: None, ..state }),
        };
        if let Some(state) = kept {
            self.files.insert(name.to_owned(), state);
        }
        if self.now(name) != before {
            self.history.push(name.to_owned());
            if self.history.len() > HISTORY {
                let forgotten = HISTORY / 2;
                self.history.drain(..forgotten);
                self.forgotten += forgotten as u64;
            }
        }
    }

    /// The new state of a file with this text; `None` if it has expired.
    fn take_in(
        &self,
        name: &str,
        state: State,
        text: &str,
        modified: SystemTime,
        now: SystemTime,
    ) -> Option<State> {
        let content = Some(revision(text));
        let parsed = if state.content == content && state.bad.is_none() {
            state.good.clone().ok_or_else(String::new)
        } else {
            parse(name, text, self.forever)
        };
        let (good, bad) = match parsed {
            Ok(file) => (Some(file), None),
            // What was good stays in force until it expires or something good takes its place.
            Err(reason) => (state.good, Some(reason)),
        };
        let due = good.as_ref().and_then(|file| file.end(modified));
        if due.is_some_and(|due| due <= now) {
            return bad.map(|bad| State { content, good: None, bad: Some(bad), due: None });
        }
        Some(State { content, good, bad, due })
    }
}

/// Reads a lease file's name and text. With `forever`, it never expires.
pub(super) fn parse(name: &str, text: &str, forever: bool) -> Result<LeaseFile, String> {
    let subnets: Subnets = name.parse().map_err(|error: KeyError| error.to_string())?;
    let mut file = LeaseFile::parse(subnets, text).map_err(|error| error.to_string())?;
    if forever {
        file.ttl = None;
        file.entry.mark = None;
    }
    Ok(file)
}

/// Files that editors and this program leave beside those that count.
fn passed_over(name: &str) -> bool {
    name.starts_with('.') || name.ends_with('~')
}

fn read(path: &Path) -> Found {
    let found = || -> io::Result<(String, SystemTime)> {
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is no file"));
        }
        Ok((fs::read_to_string(path)?, metadata.modified()?))
    };
    match found() {
        Ok((text, modified)) => Found::Text(text, modified),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Gone,
        Err(error) => Found::Unreadable(error.to_string()),
    }
}
