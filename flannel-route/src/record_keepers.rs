//! `WithRecordKeepers` combines a kernel and the record keepers of backends into one `Kernel`.
//!
//! A record keeper keeps the state of peers that is not in the kernel, for example the result of a
//! command that a backend runs for each peer. It shows this state as records. The route engine
//! treats records like kernel objects: it puts, compares and repairs them.
//!
//! A backend returns its record keepers from `Backend::record_keepers`, and
//! `flannel_route::Host::join` combines them with the kernel. `flannel-backend-extension` has such
//! a keeper. You need this module only if you call `KernelNetwork::new` or a cleanup with such a
//! backend yourself. A cleanup needs `WithRecordKeepers::waiting`, because a program that ends must
//! wait for its changes.
//!
//! It needs no runtime. Its methods block as the methods of the kernel and of the keepers do.
//!
//! ```rust
//! use std::sync::Arc;
//! use flannel_route::record_keepers::WithRecordKeepers;
//! use flannel_core::Kernel;
//! use flannel_core::kernel::Footprint;
//! use flannel_core::testing::FakeKernel;
//!
//! # fn main() -> Result<(), flannel_core::kernel::KernelError> {
//! let kernel: Arc<dyn Kernel> = Arc::new(FakeKernel::with_uplink("eth0"));
//! // A backend without a record keeper: `Backend::record_keepers` returns none.
//! let kernel = WithRecordKeepers::new(kernel, None);
//! assert!(kernel.snapshot(&Footprint::default())?.is_empty());
//! # Ok(()) }
//! ```

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flannel_core::Kernel;
use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelError, NexthopIds, Outcome, RecordKeeper, RouteAnswer,
};
use flannel_core::object::{Change, Link, Object, ObjectSet};
use flannel_core::runtime::lock;

use crate::outcomes::{self, one_for_each};

/// A kernel with record keepers. Records go to their keepers, all other objects to the kernel.
#[derive(Debug)]
pub struct WithRecordKeepers {
    kernel: Arc<dyn Kernel>,
    record_keepers: Vec<Arc<dyn RecordKeeper>>,
    waits: bool,
    /// The last error in the log for each keeper, until its records can be read again.
    logged: Mutex<BTreeMap<&'static str, String>>,
}

impl WithRecordKeepers {
    /// A [waiting](Self::waiting) kernel gives up after this time without a successful change.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// `kernel` with the [record keepers](flannel_core::Backend::record_keepers) of backends.
    pub fn new(
        kernel: Arc<dyn Kernel>,
        record_keepers: impl IntoIterator<Item = Arc<dyn RecordKeeper>>,
    ) -> Self {
        let record_keepers = record_keepers.into_iter().collect();
        Self { kernel, record_keepers, waits: false, logged: Mutex::default() }
    }

    /// Makes [`Kernel::apply`] wait for the end of changes that a record keeper only started. This
    /// is for programs that end afterwards, such as a cleanup. If no change has succeeded for
    /// [`Self::PATIENCE`], it stops waiting, and the outcome of the changes that have not ended is
    /// [`Outcome::Started`].
    #[must_use]
    pub fn waiting(self) -> Self {
        Self { waits: true, ..self }
    }

    /// Logs that a record keeper cannot be read, unless the log has this error already.
    fn log_unread(&self, keeper: &dyn RecordKeeper, error: &KernelError) {
        let text = error.to_string();
        let mut logged = lock(&self.logged);
        if logged.get(keeper.name()) != Some(&text) {
            let keeper = keeper.name();
            tracing::warn!(
                keeper, %error,
                "the records of a keeper cannot be read: all are put again"
            );
            logged.insert(keeper, text);
        }
    }

    /// The keeper of the record that a change is about, or `None` for other objects and for records
    /// of an unknown keeper.
    fn keeper_of(&self, change: &Change) -> Option<&dyn RecordKeeper> {
        let Object::Record(record) = change.object() else { return None };
        self.record_keepers.iter().find(|keeper| keeper.name() == record.keeper).map(AsRef::as_ref)
    }

    /// Waits for the ends of the changes that `keeper` only started, and replaces their outcomes. A
    /// change that does not end in time stays [`Outcome::Started`].
    fn wait_for_ends(keeper: &dyn RecordKeeper, changes: &[Change], outcomes: &mut [Outcome]) {
        let mut end = Instant::now() + Self::PATIENCE;
        for (change, outcome) in changes.iter().zip(outcomes) {
            if *outcome != Outcome::Started {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            *outcome = keeper.wait(&change.object().key(), left);
            if outcome.is_done() {
                end = Instant::now() + Self::PATIENCE;
            }
        }
    }
}

impl Kernel for WithRecordKeepers {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        let mut state = self.kernel.snapshot(footprint)?;
        for keeper in &self.record_keepers {
            if !footprint.record_keepers.contains(keeper.name()) {
                continue;
            }
            match keeper.records() {
                Ok(records) => {
                    lock(&self.logged).remove(keeper.name());
                    state.extend(records);
                }
                // A program that ends afterwards must not take the records for removed.
                Err(error) if self.waits => return Err(error),
                // The records are put again, which does not delay the repair of other objects.
                Err(error) => self.log_unread(&**keeper, &error),
            }
        }
        Ok(state)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    /// Applies the changes of records by their keepers and all other changes by the kernel. The
    /// kernel refuses the records of an unknown keeper with `EOPNOTSUPP`.
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        let name = |change: &Change| self.keeper_of(change).map(RecordKeeper::name);
        let mut all = Vec::with_capacity(changes.len());
        for run in changes.chunk_by(|a, b| name(a) == name(b)) {
            // A missing outcome must not shift the outcomes of later changes.
            let Some(keeper) = self.keeper_of(&run[0]) else {
                all.extend(outcomes::apply(&*self.kernel, footprint, run));
                continue;
            };
            let by = format!("keeper {}", keeper.name());
            let mut outcomes = one_for_each(run.len(), keeper.apply(run), &by);
            if self.waits {
                Self::wait_for_ends(keeper, run, &mut outcomes);
            }
            all.append(&mut outcomes);
        }
        all
    }

    fn may_change(&self, links: &[Link]) -> Result<(), KernelError> {
        self.kernel.may_change(links)
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        // Events of record keepers are rare and come first, so that events of the kernel do not
        // delay them. A record keeper that cannot listen does not affect the events of the kernel.
        let mut record_keepers = Vec::new();
        for keeper in &self.record_keepers {
            match keeper.changes() {
                Ok(events) => record_keepers.push(KeeperEvents { keeper: keeper.name(), events }),
                Err(error) => log_deaf(keeper.name(), &error),
            }
        }
        Ok(Box::new(Merged { record_keepers, kernel: self.kernel.changes()? }))
    }
}

/// The events of the record keepers and of the kernel.
struct Merged {
    record_keepers: Vec<KeeperEvents>,
    kernel: Box<dyn Changes>,
}

struct KeeperEvents {
    keeper: &'static str,
    events: Box<dyn Changes>,
}

struct Event {
    /// The place of the record keeper, or `None` for the kernel.
    source: Option<usize>,
    event: Result<Invalidation, KernelError>,
}

impl Merged {
    /// Waits for the next event of any source.
    async fn next_event(&mut self) -> Event {
        let record_keepers = self.record_keepers.iter_mut().map(|keeper| keeper.events.next());
        let record_keepers = record_keepers.enumerate().map(|(place, event)| (Some(place), event));
        let kernel = std::iter::once((None, self.kernel.next()));
        let mut events: Vec<_> = record_keepers.chain(kernel).collect();
        poll_fn(|context| {
            for (source, event) in &mut events {
                if let Poll::Ready(event) = event.as_mut().poll(context) {
                    return Poll::Ready(Event { source: *source, event });
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[async_trait]
impl Changes for Merged {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        let Event { source, event } = self.next_event().await;
        match (source, event) {
            // A snapshot finds the changes that the keeper does not report any more.
            (Some(place), Err(error)) => {
                log_deaf(self.record_keepers.remove(place).keeper, &error);
                Ok(Invalidation::Everything)
            }
            (_, event) => event,
        }
    }
}

/// Logs that a record keeper reports no changes.
fn log_deaf(keeper: &'static str, error: &KernelError) {
    tracing::warn!(
        keeper, %error,
        "a keeper reports no changes by other programs: only the next complete comparison finds \
         them"
    );
}
