//! Writes. Each one holds the lock of the directory and reads the file first.
//!
//! One writer of all processes holds the lock, so a file cannot change between its reading and its
//! writing. All functions block, except the one that waits for the lock.

use std::fs::{self, File, FileTimes};
use std::io;
use std::time::{Duration, SystemTime};

use flannel_core::backoff::Backoff;
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::runtime::lock;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Error, Result, Subnets};

use super::Shared;
use super::file::{self, LeaseFile, OF_TOO_LARGE};
use super::location::Assign;
use crate::clock::{Clock, SystemClock};
use crate::files::atomic::{self, remove_temporary_files};
use crate::files::lock::{FileLock, holder_text};
use crate::registry::{Entry, HolderId, LeaseGrant, config_conflict};

/// The time limit for the lock of another process.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// A longer wait for the lock is logged.
const LOCK_LOGGED: Duration = Duration::from_secs(1);

/// A file in force: its revision, and its grant; `None` for a reservation or an unreadable file.
type Current = (Revision, Option<LeaseGrant>);

impl Shared {
    /// Takes the lock, which excludes other processes and other tasks of this one. Dropping the
    /// future ends the wait.
    pub(super) async fn lock(&self) -> Result<FileLock> {
        if self.location.options.assign == Assign::Static {
            return Err(Error::Refused {
                store: self.location.to_string(),
                reason: "with assign=static this registry is read-only: change the file at the \
                         source that this directory is copied from"
                    .into(),
            });
        }
        let path = self.location.path.join(".lock");
        let begin = SystemClock.boottime();
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
        let mut is_logged = false;
        loop {
            let taken = FileLock::take(&path);
            if let Some(lock) = taken.map_err(|error| self.location.error(".lock", error))? {
                return Ok(lock);
            }
            let waited = SystemClock.boottime().saturating_sub(begin);
            if waited > LOCK_PATIENCE {
                let by = FileLock::holding_process(&path);
                let holder = holder_text(by.as_ref());
                let text = format!("held by {holder} for {LOCK_PATIENCE:?}");
                let reason = StoreReason::new(text, StoreFailure::Locked { by });
                return Err(self.location.error(".lock", reason));
            }
            if waited > LOCK_LOGGED && !std::mem::replace(&mut is_logged, true) {
                let holder = FileLock::holder(&path);
                tracing::warn!(path = %path.display(), %holder, "waiting for a lock");
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// The content of a key's file; `None` if the file does not exist or has expired.
    pub(super) fn current(&self, subnets: &Subnets) -> Result<Option<Current>> {
        let (text, modified) = match file::lease_text(&self.path(subnets)) {
            Ok(Ok(read)) => read,
            Ok(Err(TooLarge { .. })) => return Ok(Some((OF_TOO_LARGE, None))),
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(self.location.error(&format!("subnets/{subnets}"), other)),
        };
        let Ok(file) = LeaseFile::parse(*subnets, &text) else {
            return Ok(Some((file::revision(&text), None)));
        };
        let over = file.end(modified).is_some_and(|end| end <= SystemClock.wall());
        Ok((!over).then(|| (file.lease.revision, file.grant.as_deref().copied())))
    }

    /// The names in the directory of leases.
    fn names(&self) -> Result<Vec<String>> {
        let names = fs::read_dir(self.location.path.join("subnets")).and_then(|entries| {
            entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        });
        names.map_err(|error| self.location.error("subnets", error))
    }

    /// Removes the temporary files of crashed writers. Under the lock no writer is active.
    pub(super) fn clean_up(&self) -> Result<()> {
        let dir = &self.location.path;
        let removed = remove_temporary_files(&dir.join("subnets"), None);
        removed.map_err(|error| self.location.error("subnets", error))?;
        if let Err(error) = remove_temporary_files(dir, Some("config".as_ref())) {
            // This process may write leases only.
            tracing::warn!(path = %dir.display(), %error, "temporary files are not removed");
        }
        Ok(())
    }

    /// Whether another key in force overlaps `subnets`.
    pub(super) fn overlapped(&self, subnets: &Subnets) -> Result<bool> {
        for other in self.names()?.iter().filter_map(|name| name.parse::<Subnets>().ok()) {
            if other != *subnets && other.overlaps(subnets) && self.current(&other)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn at(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        match self.current(subnets)? {
            Some((revision, _)) if revision == at => Ok(()),
            _ => Err(Error::Conflict { subnets: *subnets }),
        }
    }

    pub(super) fn write(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let name = format!("subnets/{subnets}");
        let (text, now) = (file::text(attrs, grant), SystemClock.wall());
        if let Err(reason) = TooLarge::check(text.len()) {
            let store = format!("{}: {name}", self.location);
            return Err(Error::Refused { store, reason: reason.to_string().into() });
        }
        atomic::replace(&self.path(subnets), text.as_bytes(), 0o644, Some(now))
            .map_err(|error| self.location.error(&name, error))?;
        let file = LeaseFile::parse(*subnets, &text);
        let file = file.map_err(|source| Error::Lease { location: name, source })?;
        let entry = file.entry();
        self.hold(subnets, entry.holder, file.end(now));
        Ok(entry)
    }

    pub(super) fn write_config(&self, known: Option<&str>, text: &str) -> Result<()> {
        let path = self.location.path.join("config");
        let error = |error| self.location.error("config", error);
        let now = match file::config_text(&path) {
            Ok(now) => Some(now),
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => None,
            Err(other) => return Err(error(other)),
        };
        if now.as_deref() != known {
            return Err(config_conflict(&self.location));
        }
        atomic::replace(&path, text.as_bytes(), 0o644, None).map_err(error)
    }

    fn hold(&self, subnets: &Subnets, holder: Option<HolderId>, end: Option<SystemTime>) {
        match holder.zip(end) {
            Some(holding) => lock(&self.held).insert(*subnets, holding),
            None => lock(&self.held).remove(subnets),
        };
    }

    pub(super) fn renew(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let now = SystemClock.wall();
        let grant = self.current(subnets)?.and_then(|(_, grant)| grant);
        if let Some(LeaseGrant { ttl, .. }) = grant.filter(|grant| grant.holder == holder) {
            // Opened for reading, which is enough. Both times are set, because inotify would report
            // a modification otherwise.
            let times = FileTimes::new().set_accessed(now).set_modified(now);
            let renewed = File::open(self.path(subnets)).and_then(|file| file.set_times(times));
            renewed.map_err(|error| self.location.error(&format!("subnets/{subnets}"), error))?;
            self.hold(subnets, Some(holder), now.checked_add(ttl));
            return Ok(Some(ttl));
        }
        let held = lock(&self.held).get(subnets).copied().filter(|(by, _)| *by == holder);
        let left = held.and_then(|(_, end)| end.duration_since(now).ok());
        Ok(left.filter(|left| !left.is_zero()))
    }
}
