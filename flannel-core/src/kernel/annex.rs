//! Annexes: the state of peers that is not in the kernel, behind the trait of a kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::task::Poll;

use async_trait::async_trait;

use super::{Changes, Footprint, Invalidation, Kernel, KernelError, NexthopIds, RouteAnswer};
use crate::object::{Change, Key, Object, Record, State};

/// Keeps the [`Record`]s of a backend, for example commands that it runs for each peer, or a table
/// in another process.
///
/// The route engine treats records as kernel objects: it puts and deletes them, retries failures,
/// shows them in the status, and adopts the records of an earlier run. The methods follow the rules
/// of [`Kernel`]. A change that takes long is only started, so that it delays no other change.
pub trait Annex: fmt::Debug + Send + Sync {
    /// The name in its records, unique among all annexes.
    fn name(&self) -> &'static str;

    /// The records that are in place, those of an earlier run too. A record whose change is under
    /// way is not.
    ///
    /// # Errors
    /// The records could not be read.
    fn records(&self) -> Result<Vec<Record>, KernelError>;

    /// Applies changes of its records as [`Kernel::apply`] does.
    ///
    /// The result of a change that is only started is [`KernelError::started`]. Its end is an
    /// event: [`Present`](super::KernelEvent::Present), [`Deleted`](super::KernelEvent::Deleted) or
    /// [`Failed`](super::KernelEvent::Failed). A change that is under way already is not started
    /// again. Another change of the same record begins after it.
    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>>;

    /// Starts to listen for the ends of changes, and for changes of records by others.
    ///
    /// # Errors
    /// The annex cannot listen.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;

    /// Waits for the end of all changes of this record that were started, and returns the result of
    /// the last one. Blocks.
    ///
    /// # Errors
    /// The last change failed.
    fn wait(&self, key: &Key) -> Result<(), KernelError>;
}

/// A kernel with annexes. Records go to their annexes, all other objects to the kernel.
#[derive(Debug)]
pub struct WithAnnexes {
    kernel: Arc<dyn Kernel>,
    annexes: Vec<Arc<dyn Annex>>,
    waits: bool,
}

impl WithAnnexes {
    /// `kernel` with the annexes of backends ([`Backend::annex`](crate::Backend::annex)).
    pub fn new(kernel: Arc<dyn Kernel>, annexes: impl IntoIterator<Item = Arc<dyn Annex>>) -> Self {
        Self { kernel, annexes: annexes.into_iter().collect(), waits: false }
    }

    /// Waits in [`Kernel::apply`] for the end of changes that an annex only started. For programs
    /// that end afterwards, such as a cleanup.
    #[must_use]
    pub fn waiting(self) -> Self {
        Self { waits: true, ..self }
    }

    fn annex_of(&self, change: &Change) -> Option<&dyn Annex> {
        let Object::Record(record) = change.object() else { return None };
        self.annexes.iter().find(|annex| annex.name() == record.annex).map(AsRef::as_ref)
    }
}

impl Kernel for WithAnnexes {
    fn snapshot(&self, footprint: &Footprint) -> Result<State, KernelError> {
        let mut state = self.kernel.snapshot(footprint)?;
        for annex in self.annexes.iter().filter(|a| footprint.annexes.contains(a.name())) {
            state.extend(annex.records()?);
        }
        Ok(state)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &State) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    /// The kernel refuses the records of an annex that is not among these (`EOPNOTSUPP`).
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let name = |change: &Change| self.annex_of(change).map(Annex::name);
        let runs = changes.chunk_by(|a, b| name(a) == name(b));
        let results = runs.flat_map(|run| {
            let Some(annex) = self.annex_of(&run[0]) else {
                return self.kernel.apply(footprint, run);
            };
            let mut results = annex.apply(run);
            for (change, result) in run.iter().zip(&mut results) {
                if self.waits && result.as_ref().is_err_and(KernelError::is_started) {
                    *result = annex.wait(&change.object().key());
                }
            }
            results
        });
        results.collect()
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        // Events of annexes are rare: they come first, so that the kernel's delay none of them.
        let mut streams = Vec::new();
        for annex in &self.annexes {
            streams.push(annex.changes()?);
        }
        streams.push(self.kernel.changes()?);
        Ok(Box::new(Merged { streams }))
    }
}

struct Merged {
    streams: Vec<Box<dyn Changes>>,
}

#[async_trait]
impl Changes for Merged {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        let mut events: Vec<_> = self.streams.iter_mut().map(|stream| stream.next()).collect();
        poll_fn(|context| {
            let ready = events.iter_mut().find_map(|event| match event.as_mut().poll(context) {
                Poll::Ready(event) => Some(event),
                Poll::Pending => None,
            });
            ready.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
