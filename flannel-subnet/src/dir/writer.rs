//! Writing: under the one lock, after reading the file itself.
//!
//! The lock is held by one writer of all processes, so what is read under it is true until
//! it is let go. Everything here but waiting for the lock blocks.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io;
use std::time::{Duration, SystemTime};

use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Result, Subnets};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::location::Assign;
use super::{Shared, file, mirror};
use crate::atomic_file::{self, TEMPORARY};
use crate::backoff::Backoff;
use crate::registry::{Entry, HolderId, LeaseGrant, config_conflict};

/// How long a writer may hold the lock before others give up.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// What a writer must know of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Current {
    revision: Revision,
    holder: Option<HolderId>,
    ttl: Option<Duration>,
}

impl Shared {
    /// Takes the lock between processes, and between tasks of this one. Waiting is cancelled by dropping.
    pub(super) async fn lock(&self) -> Result<Flock<File>> {
        if self.location.options.assign == Assign::Static {
            return Err(Error::Refused {
                store: self.location.to_string(),
                reason:
                    "with assign=static nothing is ever written there; write the file where this \
                         directory comes from"
                        .into(),
            });
        }
        let path = self.location.path.join(".lock");
        let begin = self.clock.boottime();
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(20));
        loop {
            // Opened for reading where it exists: closing what was open for writing would wake every watch.
            let file = File::open(&path)
                .or_else(|_| OpenOptions::new().read(true).append(true).create(true).open(&path));
            let file = file.map_err(|error| self.broken(".lock", error))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(lock),
                Err((_, Errno::EWOULDBLOCK | Errno::EINTR)) => (),
                Err((_, errno)) => return Err(self.broken(".lock", errno)),
            }
            if self.clock.boottime().saturating_sub(begin) > LOCK_PATIENCE {
                let reason = format!("held by another process for {LOCK_PATIENCE:?}");
                return Err(self.broken(".lock", reason));
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// Removes what writers that died left behind. Under the lock, nobody is writing.
    pub(super) fn clean_up(&self) -> Result<()> {
        let error = |error| self.broken("subnets", error);
        for entry in fs::read_dir(self.location.path.join("subnets")).map_err(error)? {
            let entry = entry.map_err(error)?;
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
                fs::remove_file(entry.path()).map_err(error)?;
            }
        }
        Ok(())
    }

    /// What a key's file holds right now; `None` if there is none or it has expired.
    pub(super) fn current(&self, subnets: &Subnets) -> Result<Option<Current>> {
        let name = subnets.to_string();
        let error = |error| self.broken(&format!("subnets/{name}"), error);
        let path = self.path(subnets);
        let modified = match fs::metadata(&path).and_then(|metadata| metadata.modified()) {
            Ok(modified) => modified,
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(other) => return Err(error(other)),
        };
        let text = fs::read_to_string(&path).map_err(error)?;
        let Ok(file) = mirror::parse(&name, &text, false) else {
            return Ok(Some(Current { revision: file::revision(&text), holder: None, ttl: None }));
        };
        if file.end(modified).is_some_and(|end| end <= self.clock.wall()) {
            return Ok(None);
        }
        let (holder, ttl) = file.grant.map(|grant| (grant.holder, grant.ttl)).unzip();
        Ok(Some(Current { revision: file.lease.revision, holder, ttl }))
    }

    /// Some other key in force shares an address with `subnets`.
    pub(super) fn overlapped(&self, subnets: &Subnets) -> Result<bool> {
        let error = |error| self.broken("subnets", error);
        for entry in fs::read_dir(self.location.path.join("subnets")).map_err(error)? {
            let name = entry.map_err(error)?.file_name();
            let Ok(other) = name.to_string_lossy().parse::<Subnets>() else { continue };
            if other != *subnets && other.overlaps(subnets) && self.current(&other)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn at(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        match self.current(subnets)? {
            Some(current) if current.revision == at => Ok(()),
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
        let (text, now) = (file::text(attrs, grant), self.clock.wall());
        atomic_file::replace(&self.path(subnets), text.as_bytes(), 0o644, Some(now))
            .map_err(|error| self.broken(&name, error))?;
        let file = file::LeaseFile::parse(*subnets, &text);
        let file = file.map_err(|source| Error::Lease { location: name, source })?;
        let entry = file.entry();
        self.hold(subnets, entry.holder, file.end(now));
        Ok(entry)
    }

    pub(super) fn write_config(&self, seen: Option<&str>, text: &str) -> Result<()> {
        let path = self.location.path.join("config");
        let error = |error| self.broken("config", error);
        let now = match fs::read_to_string(&path) {
            Ok(now) => Some(now),
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => None,
            Err(other) => return Err(error(other)),
        };
        if now.as_deref() != seen {
            return Err(config_conflict(&self.location));
        }
        atomic_file::replace(&path, text.as_bytes(), 0o644, None).map_err(error)
    }

    fn hold(&self, subnets: &Subnets, holder: Option<HolderId>, end: Option<SystemTime>) {
        match holder.zip(end) {
            Some(holding) => self.held().insert(*subnets, holding),
            None => self.held().remove(subnets),
        };
    }

    pub(super) fn renew(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let now = self.clock.wall();
        let current = self.current(subnets)?;
        if let Some(ttl) =
            current.filter(|current| current.holder == Some(holder)).and_then(|current| current.ttl)
        {
            // Opened for reading, which is enough and wakes nobody. With only one of the times set, inotify would
            // report a modification.
            let times = FileTimes::new().set_accessed(now).set_modified(now);
            let renewed = File::open(self.path(subnets)).and_then(|file| file.set_times(times));
            renewed.map_err(|error| self.broken(&format!("subnets/{subnets}"), error))?;
            self.hold(subnets, Some(holder), now.checked_add(ttl));
            return Ok(Some(ttl));
        }
        let end =
            self.held().get(subnets).filter(|(held_by, _)| *held_by == holder).map(|(_, end)| *end);
        Ok(end.and_then(|end| end.duration_since(now).ok()).filter(|left| !left.is_zero()))
    }
}
