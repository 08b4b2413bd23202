//! Writes. Each write holds the lock of the directory and reads the file first.
//!
//! Only one writer of all processes holds the lock, so a file cannot change between its reading and
//! its writing. All functions block, except for the wait for the lock.

use std::fs::{self, File, FileTimes};
use std::io;
use std::time::{Duration, SystemTime};

use flannel_core::backoff::Backoff;
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::runtime::lock;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Error, Result, Subnets};

use super::file::{self, LeaseFile, REVISION_OF_TOO_LARGE};
use super::location::Assign;
use super::{HeldFile, Shared};
use crate::clock::{Clock, SystemClock};
use crate::files::atomic::{self, remove_temporary_files};
use crate::files::lock::{FileLock, holder_text};
use crate::registry::{Entry, HolderId, LeaseGrant, config_conflict};

/// The time limit for the lock of another process.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// A longer wait for the lock is logged.
const LOCK_LOGGED: Duration = Duration::from_secs(1);

/// A file in force.
pub(super) struct CurrentFile {
    revision: Revision,
    /// `None` for a reservation or an unreadable file.
    grant: Option<LeaseGrant>,
}

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
            let taken =
                FileLock::take(&path).map_err(|error| self.location.error(".lock", error))?;
            if let Some(lock) = taken {
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

    /// The file of a key, or `None` if the file does not exist or has expired.
    pub(super) fn current(&self, subnets: &Subnets) -> Result<Option<CurrentFile>> {
        let read = match file::lease_text(&self.path(subnets)) {
            Ok(Ok(read)) => read,
            Ok(Err(TooLarge { .. })) => {
                return Ok(Some(CurrentFile { revision: REVISION_OF_TOO_LARGE, grant: None }));
            }
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(self.location.error(&format!("subnets/{subnets}"), other)),
        };
        let Ok(file) = LeaseFile::parse(*subnets, &read.text) else {
            return Ok(Some(CurrentFile { revision: file::revision(&read.text), grant: None }));
        };
        if file.end(read.modified).is_some_and(|end| end <= SystemClock.wall()) {
            return Ok(None);
        }
        let grant = file.grant.as_deref().copied();
        Ok(Some(CurrentFile { revision: file.lease.revision, grant }))
    }

    /// The names in the directory of leases.
    fn names(&self) -> Result<Vec<String>> {
        fs::read_dir(self.location.path.join("subnets"))
            .and_then(|entries| {
                entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
            })
            .map_err(|error| self.location.error("subnets", error))
    }

    /// Removes the temporary files of crashed writers. Under the lock no writer is active.
    pub(super) fn clean_up(&self) -> Result<()> {
        let dir = &self.location.path;
        remove_temporary_files(&dir.join("subnets"), None)
            .map_err(|error| self.location.error("subnets", error))?;
        if let Err(error) = remove_temporary_files(dir, Some("config".as_ref())) {
            // This process may have permission to write leases only.
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

    /// Checks that the file of a key is at this revision.
    pub(super) fn check_revision(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        match self.current(subnets)? {
            Some(file) if file.revision == at => Ok(()),
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
        let text = file::text(attrs, grant);
        let now = SystemClock.wall();
        if let Err(reason) = TooLarge::check(text.len()) {
            let store = format!("{}: {name}", self.location);
            return Err(Error::Refused { store, reason: reason.to_string().into() });
        }
        atomic::replace(&self.path(subnets), text.as_bytes(), 0o644, Some(now))
            .map_err(|error| self.location.error(&name, error))?;
        let file = LeaseFile::parse(*subnets, &text)
            .map_err(|source| Error::Lease { location: name, source })?;
        let entry = file.entry();
        self.note_held(subnets, entry.holder, file.end(now));
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

    /// Notes the holder and the end of a file that was written. A reservation has neither.
    fn note_held(&self, subnets: &Subnets, holder: Option<HolderId>, end: Option<SystemTime>) {
        let mut held = lock(&self.held);
        match holder.zip(end) {
            Some((holder, end)) => held.insert(*subnets, HeldFile { holder, end }),
            None => held.remove(subnets),
        };
    }

    pub(super) fn renew(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let now = SystemClock.wall();
        let grant = self.current(subnets)?.and_then(|file| file.grant);
        if let Some(LeaseGrant { ttl, .. }) = grant.filter(|grant| grant.holder == holder) {
            // Opened for reading, which is enough. Both times are set, because inotify would report
            // a modification otherwise.
            let times = FileTimes::new().set_accessed(now).set_modified(now);
            File::open(self.path(subnets))
                .and_then(|file| file.set_times(times))
                .map_err(|error| self.location.error(&format!("subnets/{subnets}"), error))?;
            self.note_held(subnets, Some(holder), now.checked_add(ttl));
            return Ok(Some(ttl));
        }
        // The file was deleted. Until its end the store still knows the holder.
        let held = lock(&self.held).get(subnets).copied().filter(|held| held.holder == holder);
        let left = held.and_then(|held| held.end.duration_since(now).ok());
        Ok(left.filter(|left| !left.is_zero()))
    }
}
