//! The leases of all nodes as a [`View`], kept up to date by a list and a watch.
//!
//! After any failure (a lost watch, a gap, an outage, a restored backup) the registry is listed
//! again. Until the list is complete, the last view stays.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flannel_core::backoff::{Backoff, FailurePauses};
use flannel_core::lease::{LeaseSet, Origin, View};
use flannel_core::runtime::{Task, lock};
use flannel_core::{Error, Lease, Result, Subnets};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::registry::{Batch, LeaseList, Now, Registry};

/// A watch of this length shows that the store works.
const WATCHED: Duration = Duration::from_secs(10);

/// The number of released subnets that are remembered.
const FREED: usize = 1024;

/// Follows a registry. Dropping the reflector ends this.
///
/// ```
/// use flannel_subnet::{MemoryRegistry, Reflector, Registry};
/// use std::sync::Arc;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let registry = MemoryRegistry::new();
/// let reflector = Reflector::start(Arc::new(registry.clone()));
/// registry.create(&"10.1.5.0-24".parse()?, &Default::default(), None).await?;
/// let mut views = reflector.views();
/// let view = views.wait_for(|view| view.leases.len() == 1).await.unwrap();
/// # Ok::<(), flannel_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct Reflector {
    shared: Arc<Shared>,
    _task: Task,
}

#[derive(Debug)]
struct Shared {
    views: watch::Sender<View>,
    freed: Mutex<VecDeque<Subnets>>,
}

impl Reflector {
    /// Starts to follow on the current tokio runtime. Failures are retried endlessly, with one log
    /// line when the store is lost and one when it answers again.
    ///
    /// # Panics
    /// The caller is not in a tokio runtime.
    pub fn start(registry: Arc<dyn Registry>) -> Self {
        Self::start_from(View::unknown(), registry)
    }

    /// Starts to follow as [`Reflector::start`] does, but with `view` as the first view, such as
    /// the leases of a [`Cache`](crate::Cache).
    ///
    /// # Panics
    /// The caller is not in a tokio runtime.
    pub fn start_from(view: View, registry: Arc<dyn Registry>) -> Self {
        let freed = Mutex::default();
        let shared = Arc::new(Shared { views: watch::channel(view).0, freed });
        Self { _task: Task::spawn(follow(registry, Arc::clone(&shared))), shared }
    }

    /// A receiver of the latest view. Several changes may be merged. Until the first list is
    /// complete it is the initial view. After the reflector was dropped, the last view stays.
    pub fn views(&self) -> watch::Receiver<View> {
        self.shared.views.subscribe()
    }

    /// The last 1024 released subnets that are still free.
    pub fn freed(&self) -> Vec<Subnets> {
        let views = self.shared.views.borrow();
        let freed = lock(&self.shared.freed);
        freed.iter().filter(|subnets| views.leases.get(subnets).is_none()).copied().collect()
    }
}

async fn follow(registry: Arc<dyn Registry>, shared: Arc<Shared>) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
    let mut failures = registry.failure_pauses();
    // The leases of an earlier run are treated like the leases of a lost store.
    let mut lost = matches!(shared.views.borrow().origin, Origin::Cached { written: Some(_) });
    let mut logged = None;
    loop {
        let outcome =
            list_and_watch(&*registry, &shared, &mut backoff, &mut failures, &mut lost).await;
        let pause = match outcome {
            Ok(()) => {
                tracing::debug!(store = %registry, "changes were missed, listing again");
                backoff.pause()
            }
            Err(error) => {
                if !lost {
                    logged = None;
                }
                let now = match error {
                    Error::Refused { .. } => Outage::Refused,
                    _ => Outage::Unanswered,
                };
                // A refusal needs an operator, so it is logged even during an outage.
                if logged.is_none_or(|logged| now > logged) {
                    lost = true;
                    logged = Some(now);
                    let leases = shared.views.borrow().leases.len();
                    tracing::warn!(
                        leases,
                        %error,
                        store = %registry,
                        "store lost, the last leases stay in use"
                    );
                }
                failures.pause()
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Why the store is lost, the worse cause last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outage {
    Unanswered,
    Refused,
}

/// Returns when changes were missed.
async fn list_and_watch(
    registry: &dyn Registry,
    shared: &Shared,
    backoff: &mut Backoff,
    failures: &mut FailurePauses,
    lost: &mut bool,
) -> Result<()> {
    let listing = registry.list().await?;
    shared.replace(&listing);
    let leases = listing.entries.len();
    let revision = listing.revision;
    // Frees memory, because the watch may last for months.
    drop(listing);
    let mut watch = registry.watch(revision).await?;
    let begun = Instant::now();
    if std::mem::take(lost) {
        tracing::info!(leases, store = %registry, "the store answers");
    }
    loop {
        let batch = match watch.next().await {
            Ok(Some(batch)) => batch,
            Ok(None) => return Ok(()),
            Err(error) => {
                // Some proxies end each watch after a minute.
                if begun.elapsed() >= WATCHED {
                    failures.reset();
                }
                return Err(error);
            }
        };
        backoff.reset();
        shared.apply(batch);
    }
}

impl Shared {
    /// Makes the view equal to a complete list. An unreadable key keeps its last value. A key whose
    /// value is too large does not.
    fn replace(&self, listing: &LeaseList) {
        let unreadable = listing
            .skipped
            .iter()
            .filter(|skipped| skipped.reason.keeps_last())
            .filter_map(|skipped| skipped.key.parse::<Subnets>().ok());
        let present: BTreeSet<Subnets> =
            listing.entries.iter().map(|entry| entry.lease.subnets).chain(unreadable).collect();
        self.modify(Origin::Live { revision: listing.revision }, |leases| {
            let old = leases.clone();
            for lease in old.iter().filter(|lease| !present.contains(&lease.subnets)) {
                self.remove(leases, &lease.subnets);
            }
            listing.entries.iter().for_each(|entry| insert(leases, &entry.lease));
        });
    }

    fn apply(&self, batch: Batch) {
        self.modify(Origin::Live { revision: batch.revision }, |leases| {
            for event in batch.events {
                match (event.now, event.key.parse()) {
                    (Now::Held(entry), _) => insert(leases, &entry.lease),
                    (Now::Unreadable(reason), _) if reason.keeps_last() => (),
                    (Now::Gone | Now::Unreadable(_), Ok(subnets)) => self.remove(leases, &subnets),
                    (Now::Gone | Now::Unreadable(_), Err(_)) => (),
                }
            }
        });
    }

    /// Changes the view. Notifies receivers only if leases changed or became live.
    fn modify(&self, origin: Origin, change: impl FnOnce(&mut LeaseSet)) {
        self.views.send_if_modified(|view| {
            let before = view.leases.clone();
            change(&mut view.leases);
            let first = matches!(view.origin, Origin::Cached { .. });
            view.origin = origin;
            first || view.leases.changes_since(&before).next().is_some()
        });
    }

    fn remove(&self, leases: &mut LeaseSet, subnets: &Subnets) {
        if leases.remove(subnets).is_some() {
            let mut freed = lock(&self.freed);
            freed.retain(|other| other != subnets);
            freed.push_back(*subnets);
            if freed.len() > FREED {
                freed.pop_front();
            }
        }
    }
}

/// Inserts a lease, unless the set has an equal one, because shared leases are cheap to compare.
fn insert(leases: &mut LeaseSet, lease: &Arc<Lease>) {
    if leases.get(&lease.subnets).is_none_or(|old| old != lease) {
        leases.insert(Arc::clone(lease));
    }
}
