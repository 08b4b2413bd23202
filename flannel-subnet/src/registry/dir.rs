//! A store in a directory, for several daemons on one machine without a server.
//!
//! The directory has the tree of etcd's keys (`config`, `subnets/<key>`), with a JSON file per key,
//! which any editor can change. A lock on `.lock` and a rename implement compare-and-swap. The
//! revision is a hash of the content. A renewal sets the time of modification and is not a change.
//!
//! `since` is 0 for every lease. So if two leases overlap, the lease with the smaller key text is
//! accepted. Only a writer that bypasses this registry can create such leases.

mod file;
mod location;
mod mirror;
mod writer;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::{blocking, lock, or_never};
use flannel_core::subnet::StoreKind;
use flannel_core::{Error, Result, Subnets};
use nix::sys::inotify::{InitFlags, Inotify};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Batch, ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch};
use crate::clock::{Clock, SystemClock};
use crate::runtime::readable;
use file::LeaseFile;
pub use location::{Assign, DirLocation, DirOptions, LocationError};
use mirror::Mirror;

/// The time without a change after which a watch checks the directory and returns an empty batch.
const CONFIRM_PERIOD: Duration = Duration::from_secs(60);

/// A registry in a directory on a local file system. Clones share the registry.
///
/// - If a file cannot be read, its last readable content is still used and the file is reported as
///   skipped, because an editor may be writing it. Files that begin with `.` or end with `~` are
///   ignored.
/// - A symbolic link is followed when it is read, but changes of its target are not noticed. The
///   directory may be replaced by renaming, but not by switching a symbolic link to it.
/// - Time to live is measured by wall clock, which all processes of a machine share. If the clock
///   is set forward by more than the remaining time of a lease, the lease ends, and its holder
///   restores it or finds the new holder.
#[derive(Clone)]
pub struct DirRegistry(Arc<Shared>);

struct Shared {
    location: DirLocation,
    inotify: AsyncFd<InotifyFd>,
    mirror: Mutex<Mirror>,
    /// Notified when the mirror changes.
    changes: watch::Sender<()>,
    /// The leases that this process wrote or renewed. A file that disappears before its end was
    /// deleted by another program.
    held: Mutex<BTreeMap<Subnets, HeldFile>>,
}

/// The holder and the end of a lease in a file.
#[derive(Clone, Copy)]
struct HeldFile {
    holder: HolderId,
    end: SystemTime,
}

/// `Inotify` with the trait that `AsyncFd` needs.
struct InotifyFd(Inotify);

impl AsRawFd for InotifyFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl DirRegistry {
    /// Opens a directory. A missing directory is created (mode 0755) if nodes choose their subnets.
    ///
    /// # Errors
    /// [`Error::Refused`] on a network file system. [`Error::Store`] if the directory cannot be
    /// created, read or watched.
    ///
    /// # Panics
    /// The caller is not in a tokio runtime with I/O enabled.
    pub async fn open(path: impl Into<PathBuf>, options: DirOptions) -> Result<Self> {
        let location = DirLocation { path: path.into(), options };
        let writes = location.options.assign == Assign::Free;
        if writes {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(location.path.join("subnets"))
                .map_err(|error| location.error("", error))?;
        }
        location.check_file_system()?;
        let registry = Self::new(location)?;
        registry.0.refresh().await?;
        if writes {
            registry.locked(Shared::clean_up).await?;
        }
        Ok(registry)
    }

    /// Opens a directory that was a registry before, as [`open`](Self::open) does, but never
    /// creates it. While it is missing, for example because it is not mounted, requests fail with
    /// [`Error::Store`]. An empty directory would tell all nodes that their leases are gone.
    ///
    /// # Errors and panics
    /// As [`open`](Self::open), but a missing directory is not an error.
    pub async fn reopen(path: impl Into<PathBuf>, options: DirOptions) -> Result<Self> {
        let location = DirLocation { path: path.into(), options };
        if location.path.join("subnets").exists() {
            return Self::open(location.path, options).await;
        }
        Self::new(location)
    }

    fn new(location: DirLocation) -> Result<Self> {
        let never_expires = location.options.assign == Assign::Static;
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|inotify| readable(InotifyFd(inotify)))
            .map_err(|error| location.error("", error))?;
        Ok(Self(Arc::new(Shared {
            mirror: Mutex::new(Mirror::new(location.path.clone(), never_expires)),
            location,
            inotify,
            changes: watch::channel(()).0,
            held: Mutex::default(),
        })))
    }

    /// Runs `work` on a blocking thread while no other process or task writes.
    async fn locked<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Shared) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let shared = Arc::clone(&self.0);
        let lock = shared.lock().await?;
        blocking(move || {
            let _lock = lock;
            work(&shared)
        })
        .await
    }
}

impl Shared {
    fn path(&self, subnets: &Subnets) -> PathBuf {
        self.location.path.join("subnets").join(subnets.to_string())
    }

    /// Brings the mirror up to date.
    async fn refresh(self: &Arc<Self>) -> Result<()> {
        let shared = Arc::clone(self);
        blocking(move || {
            let mut mirror = lock(&shared.mirror);
            let before = mirror.version();
            let done = mirror.refresh(&shared.inotify.get_ref().0, SystemClock.wall());
            if mirror.version() != before || done.is_err() {
                shared.changes.send_replace(());
            }
            done.map_err(|error| shared.location.error("", error))
        })
        .await
    }

    /// Checks that the directory can still be read, which no event reports.
    async fn confirm(self: &Arc<Self>) -> Result<()> {
        let shared = Arc::clone(self);
        blocking(move || {
            let confirmed = lock(&shared.mirror).confirm();
            confirmed.map_err(|error| shared.location.error("", error))
        })
        .await
    }

    /// Waits until the mirror may be outdated, or another task has updated it.
    async fn wait(&self, changes: &mut watch::Receiver<()>, due: Option<SystemTime>) {
        tokio::select! {
            ready = self.inotify.readable() => {
                // The mirror reports this error as well.
                if let Ok(mut ready) = ready {
                    ready.clear_ready();
                }
            }
            _ = changes.changed() => (),
            () = or_never(due.map(|due| SystemClock.sleep_until_wall(due))) => (),
        }
    }
}

impl fmt::Debug for DirRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DirRegistry").field(&self.0.location).finish()
    }
}

impl fmt::Display for DirRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.location.fmt(f)
    }
}

#[async_trait]
impl Registry for DirRegistry {
    async fn config(&self) -> Result<ConfigText> {
        let path = self.0.location.path.join("config");
        let location = path.display().to_string();
        match blocking(move || file::config_text(&path)).await {
            Ok(text) => Ok(ConfigText { location, text }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // Without `subnets` the directory is not a registry. It may not be mounted.
                self.0.confirm().await?;
                Err(Error::NoConfig { location })
            }
            Err(error) => Err(self.0.location.error("config", error)),
        }
    }

    fn kind(&self) -> StoreKind {
        StoreKind::Directory { path: self.0.location.path.display().to_string() }
    }

    async fn write_config(&self, known: Option<&ConfigText>, text: &str) -> Result<()> {
        let known = known.map(|known| known.text.clone());
        let text = text.to_owned();
        self.locked(move |shared| shared.write_config(known.as_deref(), &text)).await
    }

    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        let mut changes = self.0.changes.subscribe();
        loop {
            self.0.refresh().await?;
            changes.borrow_and_update();
            match self.config().await {
                Ok(now) if Some(&now.text) == known.as_ref().map(|known| &known.text) => (),
                Err(Error::NoConfig { .. }) if known.is_none() => (),
                Ok(_) | Err(Error::NoConfig { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
            self.0.wait(&mut changes, None).await;
        }
    }

    async fn list(&self) -> Result<LeaseList> {
        self.0.refresh().await?;
        Ok(lock(&self.0.mirror).list())
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.0.refresh().await?;
        let mirror = lock(&self.0.mirror);
        match mirror.unused(subnets) {
            Some(reason) => {
                Err(self.0.location.error(&format!("subnets/{subnets}"), reason.clone()))
            }
            None => Ok(mirror.file(subnets).map(LeaseFile::entry)),
        }
    }

    /// Stricter than the trait: also refuses a key that overlaps another key in force.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let subnets = *subnets;
        let attrs = attrs.clone();
        self.locked(move |shared| {
            if shared.current(&subnets)?.is_some() || shared.overlapped(&subnets)? {
                return Err(Error::Conflict { subnets });
            }
            shared.write(&subnets, &attrs, grant)
        })
        .await
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let subnets = *subnets;
        let attrs = attrs.clone();
        self.locked(move |shared| {
            shared.check_revision(&subnets, at)?;
            shared.write(&subnets, &attrs, grant)
        })
        .await
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let subnets = *subnets;
        self.locked(move |shared| {
            shared.check_revision(&subnets, at)?;
            fs::remove_file(shared.path(&subnets))
                .map_err(|error| shared.location.error(&format!("subnets/{subnets}"), error))
        })
        .await
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let subnets = *subnets;
        self.locked(move |shared| shared.renew(&subnets, holder)).await
    }

    async fn remaining(&self, subnets: &Subnets, _: HolderId) -> Result<Option<Duration>> {
        self.0.refresh().await?;
        let end = lock(&self.0.mirror).end(subnets);
        Ok(end.map(|end| end.duration_since(SystemClock.wall()).unwrap_or_default()))
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        Ok(Box::new(DirWatch {
            shared: Arc::clone(&self.0),
            changes: self.0.changes.subscribe(),
            after,
            reported: Instant::now(),
        }))
    }
}

struct DirWatch {
    shared: Arc<Shared>,
    changes: watch::Receiver<()>,
    after: Revision,
    /// When the last batch was returned.
    reported: Instant,
}

#[async_trait]
impl Watch for DirWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        loop {
            self.shared.refresh().await?;
            self.changes.borrow_and_update();
            let due = {
                let mirror = lock(&self.shared.mirror);
                match mirror.changes(self.after) {
                    Some(batch) if batch.events.is_empty() => mirror.due(),
                    Some(batch) => {
                        self.after = batch.revision;
                        self.reported = Instant::now();
                        return Ok(Some(batch));
                    }
                    None => return Ok(None),
                }
            };
            let wait = self.shared.wait(&mut self.changes, due);
            if tokio::time::timeout_at(self.reported + CONFIRM_PERIOD, wait).await.is_err() {
                self.shared.confirm().await?;
                self.reported = Instant::now();
                return Ok(Some(Batch { events: Vec::new(), revision: self.after }));
            }
        }
    }
}
