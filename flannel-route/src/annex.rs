//! `WithAnnexes` makes one `Kernel` of a kernel and the annexes of backends.
//!
//! An annex keeps the state of peers that is not in the kernel, for example a command that a
//! backend runs for each peer. It shows this state as records. The route engine treats records like
//! kernel objects: it puts, compares and repairs them.
//!
//! The module contains no annex. A backend with an annex returns it from `Backend::annexes`, and
//! `flannel_route::Host::join` combines it with the kernel. `flannel-backend-extension` has one.
//! You need it only if you call `KernelNetwork::new` or a cleanup with such a backend
//! yourself. A cleanup needs `WithAnnexes::waiting`, because a program that ends must wait for its
//! changes.
//!
//! It needs no runtime of its own. Its methods block as those of `Kernel` do.
//!
//! ```rust
//! use std::sync::Arc;
//! use flannel_route::annex::WithAnnexes;
//! use flannel_core::Kernel;
//! use flannel_core::kernel::Footprint;
//! use flannel_core::testing::FakeKernel;
//!
//! # fn main() -> Result<(), flannel_core::kernel::KernelError> {
//! let kernel: Arc<dyn Kernel> = Arc::new(FakeKernel::with_uplink("eth0"));
//! // A backend without an annex: `Backend::annexes` returns none.
//! let kernel = WithAnnexes::new(kernel, None);
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
    Annex, Changes, Footprint, Invalidation, KernelError, NexthopIds, Outcome, RouteAnswer,
};
use flannel_core::object::{Change, Link, Object, State};
use flannel_core::runtime::lock;

use crate::outcomes::{self, one_for_each};

/// A kernel with annexes. Records go to their annexes, all other objects to the kernel.
#[derive(Debug)]
pub struct WithAnnexes {
    kernel: Arc<dyn Kernel>,
    annexes: Vec<Arc<dyn Annex>>,
    waits: bool,
    /// The errors that the log has, by annex. They go when the annex works again.
    logged: Mutex<BTreeMap<&'static str, String>>,
}

impl WithAnnexes {
    /// The time without a successful change after which a [waiting](Self::waiting) kernel gives up.
    pub const PATIENCE: Duration = Duration::from_secs(60);

    /// `kernel` with the [annexes](flannel_core::Backend::annexes) of backends.
    pub fn new(kernel: Arc<dyn Kernel>, annexes: impl IntoIterator<Item = Arc<dyn Annex>>) -> Self {
        let annexes = annexes.into_iter().collect();
        Self { kernel, annexes, waits: false, logged: Mutex::default() }
    }

    /// Makes [`Kernel::apply`] wait for the end of changes that an annex only started. This is for
    /// programs that end afterwards, such as a cleanup. If no change has succeeded for
    /// [`Self::PATIENCE`], those that have not ended fail with `ETIMEDOUT`.
    #[must_use]
    pub fn waiting(self) -> Self {
        Self { waits: true, ..self }
    }

    /// Logs that an annex cannot be read, unless the log has this error already.
    fn log_unread(&self, annex: &dyn Annex, error: &KernelError) {
        let text = error.to_string();
        let mut logged = lock(&self.logged);
        if logged.get(annex.name()) != Some(&text) {
            let annex = annex.name();
            tracing::warn!(
                annex, %error,
                "the records of an annex cannot be read: all are put again"
            );
            logged.insert(annex, text);
        }
    }

    fn annex_of(&self, change: &Change) -> Option<&dyn Annex> {
        let Object::Record(record) = change.object() else { return None };
        self.annexes.iter().find(|annex| annex.name() == record.annex).map(AsRef::as_ref)
    }

    /// Replaces the outcomes of changes that `annex` only started by those of their ends.
    fn wait_for_ends(annex: &dyn Annex, changes: &[Change], outcomes: &mut [Outcome]) {
        let mut end = Instant::now() + Self::PATIENCE;
        let all = changes.iter().zip(outcomes);
        for (change, outcome) in all.filter(|(_, outcome)| **outcome == Outcome::Started) {
            let left = end.saturating_duration_since(Instant::now());
            *outcome = annex.wait(&change.object().key(), left).into();
            if outcome.is_done() {
                end = Instant::now() + Self::PATIENCE;
            }
        }
    }
}

impl Kernel for WithAnnexes {
    fn snapshot(&self, footprint: &Footprint) -> Result<State, KernelError> {
        let mut state = self.kernel.snapshot(footprint)?;
        for annex in self.annexes.iter().filter(|a| footprint.annexes.contains(a.name())) {
            match annex.records() {
                Ok(records) => {
                    lock(&self.logged).remove(annex.name());
                    state.extend(records);
                }
                // A program that ends afterwards must not take them for removed.
                Err(error) if self.waits => return Err(error),
                // They are put again, which does not delay the repair of other objects.
                Err(error) => self.log_unread(&**annex, &error),
            }
        }
        Ok(state)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &State) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    /// The kernel refuses the records of an unknown annex (`EOPNOTSUPP`).
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        let name = |change: &Change| self.annex_of(change).map(Annex::name);
        let mut all = Vec::with_capacity(changes.len());
        for run in changes.chunk_by(|a, b| name(a) == name(b)) {
            // A missing outcome must not shift the outcomes of later changes.
            let Some(annex) = self.annex_of(&run[0]) else {
                all.extend(outcomes::apply(&*self.kernel, footprint, run));
                continue;
            };
            let by = format!("annex {}", annex.name());
            let mut outcomes = one_for_each(run.len(), annex.apply(run), &by);
            if self.waits {
                Self::wait_for_ends(annex, run, &mut outcomes);
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
        // Events of annexes are rare and come first, so that events of the kernel do not delay
        // them. An annex that cannot listen does not affect the events of the kernel.
        let mut annexes = Vec::new();
        for annex in &self.annexes {
            match annex.changes() {
                Ok(events) => annexes.push(AnnexEvents { annex: annex.name(), events }),
                Err(error) => log_deaf(annex.name(), &error),
            }
        }
        Ok(Box::new(Merged { annexes, kernel: self.kernel.changes()? }))
    }
}

/// The events of the annexes and of the kernel.
struct Merged {
    annexes: Vec<AnnexEvents>,
    kernel: Box<dyn Changes>,
}

struct AnnexEvents {
    annex: &'static str,
    events: Box<dyn Changes>,
}

/// An event, and its source: the place of an annex, or `None` for the kernel.
struct Event {
    source: Option<usize>,
    event: Result<Invalidation, KernelError>,
}

impl Merged {
    /// Waits for the next event of any source.
    async fn next_event(&mut self) -> Event {
        let annexes = self.annexes.iter_mut().map(|annex| annex.events.next());
        let annexes = annexes.enumerate().map(|(place, event)| (Some(place), event));
        let kernel = std::iter::once((None, self.kernel.next()));
        let mut events: Vec<_> = annexes.chain(kernel).collect();
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
        // After an annex has broken, a snapshot finds the changes that it does not report.
        if let (Some(place), Err(error)) = (source, &event) {
            log_deaf(self.annexes.remove(place).annex, error);
            return Ok(Invalidation::Everything);
        }
        event
    }
}

/// Logs that an annex reports no changes.
fn log_deaf(annex: &'static str, error: &KernelError) {
    tracing::warn!(
        annex, %error,
        "an annex reports no changes by other programs: only the next complete comparison finds them"
    );
}
