//! A store in a directory: several daemons on one machine make one network with no server at all.
//!
//! The directory mirrors etcd's tree (`config`, `subnets/<key>`), one JSON file per key,
//! to be read and edited with any editor. What etcd does, the file system does: a lock on `.lock` and a rename
//! make compare-and-swap, the revision is a hash of the content, renewal is the time of modification (which
//! wakes nobody), and a file without `TTL` is a reservation.
//!
//! `since` is 0 for every lease, so that of two that overlap the smaller key text is believed. That is enough:
//! under the one lock no node creates a lease that overlaps another's, so only edits by hand can.

mod file;
mod location;
mod mirror;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Result, Subnets};
use nix::sys::inotify::{InitFlags, Inotify};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::async_fd::readable;
use crate::clock::{Clock, SystemClock};
use crate::registry::{Batch, ConfigText, Entry, HolderId, LeaseGrant, Listing, Registry, Watch};
use file::LeaseFile;
pub use location::{Assign, DirLocation, DirOptions, LocationError};
use mirror::Mirror;

/// A watch that has reported nothing for this long checks that the directory can still be read, and confirms it.
const CONFIRMED: Duration = Duration::from_secs(60);

/// A registry in a directory on a local file system. Clones are the same registry.
///
/// - A file that cannot be read keeps its last good content in force and is reported as skipped: an editor may be
///   at work. Files whose names begin with `.` or end with `~` are passed over.
/// - A symbolic link is followed when it is read; changes behind it are not noticed. The directory may be replaced
///   by renaming, but not by switching a symbolic link that leads to it.
/// - Time to live is counted by wall clock, which all processes of a machine share: if it is set forward by
///   more than a lease has left, that lease ends, and its holder wins it back or finds out who holds it now.
#[derive(Clone)]
pub struct DirRegistry(Arc<Shared>);

struct Shared {
    location: DirLocation,
    clock: Arc<dyn Clock>,
    inotify: AsyncFd<InotifyFd>,
    mirror: Mutex<Mirror>,
    /// Told of whatever the mirror learns, whoever made it look.
    changes: watch::Sender<()>,
    /// What this process wrote or renewed, and when that ends: a file that is gone before was deleted.
    held: Mutex<BTreeMap<Subnets, (HolderId, SystemTime)>>,
}

/// `Inotify` as `AsyncFd` wants it.
struct InotifyFd(Inotify);

impl AsRawFd for InotifyFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl DirRegistry {
    /// Opens a directory, created (mode 0755) if it is missing and subnets are not assigned statically.
    ///
    /// # Errors
    /// [`Error::Refused`] on a network file system; or the directory cannot be made, read or watched.
    ///
    /// # Panics
    /// There is no tokio runtime with I/O enabled.
    pub async fn open(path: impl Into<PathBuf>, options: DirOptions) -> Result<Self> {
        Self::open_with_clock(DirLocation { path: path.into(), options }, Arc::new(SystemClock))
            .await
    }

    /// Like [`DirRegistry::open`], by another clock.
    ///
    /// # Errors
    /// As [`DirRegistry::open`].
    ///
    /// # Panics
    /// As [`DirRegistry::open`].
    pub async fn open_with_clock(location: DirLocation, clock: Arc<dyn Clock>) -> Result<Self> {
        let store = || format!("dir:{}", location.path.display());
        let broken = |source: io::Error| Error::Store { store: store(), source: source.into() };
        let writes = location.options.assign == Assign::Free;
        if writes {
            let subnets = location.path.join("subnets");
            DirBuilder::new().recursive(true).mode(0o755).create(subnets).map_err(broken)?;
        }
        location::check_file_system(&location.path)?;
        location::check_file_system(&location.path.join("subnets"))?;
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC);
        let inotify = inotify.map_err(|errno| broken(errno.into()))?;
        let inotify = readable(InotifyFd(inotify)).map_err(broken)?;
        let mirror = Mutex::new(Mirror::new(location.path.clone(), !writes));
        let registry = Self(Arc::new(Shared {
            location,
            clock,
            inotify,
            mirror,
            changes: watch::channel(()).0,
            held: Mutex::default(),
        }));
        registry.0.refresh().await?;
        if writes {
            registry.locked(|shared| shared.clean_up()).await?;
        }
        Ok(registry)
    }

    /// Does `work` off the runtime while this process alone may write.
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

/// Runs what waits for the disk where it disturbs nobody.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and so is whoever waits here.
            Err(_) => std::future::pending().await,
        },
    }
}

impl Shared {
    fn mirror(&self) -> MutexGuard<'_, Mirror> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<Subnets, (HolderId, SystemTime)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path(&self, subnets: &Subnets) -> PathBuf {
        self.location.path.join("subnets").join(subnets.to_string())
    }

    /// An error about one file, by its path below the directory.
    fn broken(
        &self,
        name: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        let path = self.location.path.join(name);
        Error::Store { store: format!("dir:{}", path.display()), source: source.into() }
    }

    /// Brings the mirror up to date.
    async fn refresh(self: &Arc<Self>) -> Result<()> {
        let shared = Arc::clone(self);
        blocking(move || {
            let mut mirror = shared.mirror();
            let before = (mirror.revision(), mirror.config_changes, mirror.due());
            let done = mirror.refresh(&shared.inotify.get_ref().0, shared.clock.wall());
            if (mirror.revision(), mirror.config_changes, mirror.due()) != before || done.is_err() {
                shared.changes.send_replace(());
            }
            done.map_err(|error| shared.broken("", error))
        })
        .await
    }

    /// Checks that the directory can still be read, which no event reports.
    async fn confirm(self: &Arc<Self>) -> Result<()> {
        let shared = Arc::clone(self);
        blocking(move || shared.mirror().confirm().map_err(|error| shared.broken("", error))).await
    }

    /// Waits until the mirror may have to be brought up to date, or somebody else did it.
    async fn wait(&self, changes: &mut watch::Receiver<()>, due: Option<SystemTime>) {
        let expiry = async {
            match due {
                Some(due) => self.clock.sleep_until_wall(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = self.inotify.readable() => {
                // An error here shows again when the mirror reads.
                if let Ok(mut ready) = ready {
                    ready.clear_ready();
                }
            }
            _ = changes.changed() => (),
            () = expiry => (),
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
        match blocking(move || fs::read_to_string(path)).await {
            Ok(text) => Ok(ConfigText { location, text }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NoConfig { location })
            }
            Err(error) => Err(self.0.broken("config", error)),
        }
    }

    async fn write_config(&self, seen: Option<&ConfigText>, text: &str) -> Result<()> {
        let (seen, text) = (seen.map(|seen| seen.text.clone()), text.to_owned());
        self.locked(move |shared| shared.write_config(seen.as_deref(), &text)).await
    }

    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()> {
        let mut changes = self.0.changes.subscribe();
        loop {
            self.0.refresh().await?;
            changes.borrow_and_update();
            match self.config().await {
                Ok(now) if Some(&now.text) == seen.as_ref().map(|seen| &seen.text) => (),
                Err(Error::NoConfig { .. }) if seen.is_none() => (),
                Ok(_) | Err(Error::NoConfig { .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
            self.0.wait(&mut changes, None).await;
        }
    }

    async fn list(&self) -> Result<Listing> {
        self.0.refresh().await?;
        Ok(self.0.mirror().list())
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.0.refresh().await?;
        Ok(self.0.mirror().file(subnets).map(LeaseFile::entry))
    }

    /// Stricter than it must be: no other key in force may overlap either.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let (subnets, attrs) = (*subnets, attrs.clone());
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
        let (subnets, attrs) = (*subnets, attrs.clone());
        self.locked(move |shared| {
            shared.at(&subnets, at)?;
            shared.write(&subnets, &attrs, grant)
        })
        .await
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let subnets = *subnets;
        self.locked(move |shared| {
            shared.at(&subnets, at)?;
            let removed = fs::remove_file(shared.path(&subnets));
            removed.map_err(|error| shared.broken(&format!("subnets/{subnets}"), error))
        })
        .await
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let subnets = *subnets;
        self.locked(move |shared| shared.renew(&subnets, holder)).await
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let changes = self.0.changes.subscribe();
        Ok(Box::new(DirWatch {
            shared: Arc::clone(&self.0),
            changes,
            after,
            looked: Instant::now(),
        }))
    }
}

struct DirWatch {
    shared: Arc<Shared>,
    changes: watch::Receiver<()>,
    after: Revision,
    /// When something was last reported or confirmed.
    looked: Instant,
}

#[async_trait]
impl Watch for DirWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        loop {
            self.shared.refresh().await?;
            self.changes.borrow_and_update();
            let due = {
                let mirror = self.shared.mirror();
                match mirror.changes(self.after) {
                    Some(batch) if batch.events.is_empty() => mirror.due(),
                    Some(batch) => {
                        (self.after, self.looked) = (batch.revision, Instant::now());
                        return Ok(Some(batch));
                    }
                    None => return Ok(None),
                }
            };
            let wait = self.shared.wait(&mut self.changes, due);
            if tokio::time::timeout_at(self.looked + CONFIRMED, wait).await.is_err() {
                self.shared.confirm().await?;
                self.looked = Instant::now();
                return Ok(Some(Batch { events: Vec::new(), revision: self.after }));
            }
        }
    }
}
