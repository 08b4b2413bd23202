//! Arriving: what thousands of new peers define goes to the kernel.
//!
//! The one thing to know: it is noted nowhere object by object, but taken from the peers' slots when it is their turn;
//! and while the kernel works on one group of peers, a thread of its own waiting for it, the next is judged and made
//! out and what came of the last is noted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel, sync_channel};

use tokio::time::Instant;

use super::write::{BATCH, Closed, Gate};
use super::{Cause, Reconciler, expand};
use crate::kernel::{Kernel, KernelError, Owned};
use crate::lease::Lease;
use crate::state::{Change, Object};

/// The objects of so many new peers are put at once: bounds memory. …
pub(super) const GROUP: usize = 64;
/// … And so many groups are put before anything else gets its turn: bounds how long a repair waits while thousands of
/// peers arrive.
const ROUND: usize = 64;
/// So many groups wait for their turn: bounds memory.
const READY: usize = 8;

/// Leases that one view brought and nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Coming {
    leases: std::vec::IntoIter<Arc<Lease>>,
    arrived: Option<Instant>,
}

impl Coming {
    pub(super) fn new(leases: Vec<Arc<Lease>>, arrived: Instant) -> Self {
        Self { leases: leases.into_iter(), arrived: Some(arrived) }
    }

    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }
}

/// What some new peers define, in the order of creation.
struct Group {
    changes: Vec<Change>,
    /// When their leases were there.
    arrived: Option<Instant>,
}

/// What came of a group: a result for each change, fewer if the gate was closed.
struct Written {
    group: Group,
    results: Vec<Result<(), KernelError>>,
}

impl Group {
    /// Blocks as long as the kernel takes.
    fn write(self, kernel: &dyn Kernel, owned: &Owned, gate: &Gate) -> Written {
        let mut results = Vec::with_capacity(self.changes.len());
        for batch in self.changes.chunks(BATCH) {
            match gate.pass(|| kernel.apply(owned, batch)) {
                Some(done) => results.extend(done),
                None => break,
            }
        }
        Written { group: self, results }
    }
}

impl Reconciler {
    /// Puts what new peers define, as much of it as a round may take.
    pub(super) fn put_fresh(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        let owned = self.owned.clone();
        if self.fresh.len() + self.coming.len() <= GROUP {
            let group = self.next_group(kernel);
            return group.map_or(Ok(()), |group| self.note(group.write(kernel, &owned, gate)));
        }
        std::thread::scope(|scope| {
            // One group is with the kernel, and some are ready.
            let (groups, to_write) = sync_channel::<Group>(READY);
            let (done, written) = channel();
            scope.spawn(move || {
                // Nobody wants to know the rest once the gate was closed.
                to_write
                    .iter()
                    .map(|group| group.write(kernel, &owned, gate))
                    .try_for_each(|it| done.send(it))
            });
            for _ in 0..ROUND {
                // The writer ends early only if it panicked, which the scope tells.
                let Some(group) = self.next_group(kernel) else { break };
                if groups.send(group).is_err() {
                    break;
                }
                self.note_all(&written, false)?;
            }
            drop(groups);
            self.note_all(&written, true)
        })
    }

    /// Notes what was written so far, or until nothing more is.
    fn note_all(&mut self, written: &Receiver<Written>, wait: bool) -> Result<(), Closed> {
        let next = || if wait { written.recv().ok() } else { written.try_recv().ok() };
        std::iter::from_fn(next).try_for_each(|written| self.note(written))
    }

    fn note(&mut self, written: Written) -> Result<(), Closed> {
        let Written { group: Group { changes, arrived }, results } = written;
        let complete = results.len() == changes.len();
        let now = Instant::now();
        for (change, result) in changes.iter().zip(results) {
            let key = change.object().key();
            // While it was written a later lease decided otherwise: that is still to be done.
            if self.put.contains_key(&key) || self.gone.contains_key(&key) {
                continue;
            }
            self.record(change, result, now, Some(Cause::Lease(arrived)));
        }
        if complete { Ok(()) } else { Err(Closed) }
    }

    /// Looks at the next leases that are coming; false if there are none.
    fn take_coming(&mut self, kernel: &dyn Kernel) -> bool {
        let next: Vec<_> = self.coming.leases.by_ref().take(GROUP).collect();
        let arrived = self.coming.arrived;
        if self.coming.len() == 0 {
            // Room for thousands is not kept.
            self.coming = Coming::default();
        }
        let Some(arrived) = arrived else { return false };
        self.take_in(next.iter().map(|lease| (lease.subnets, Some(lease))), arrived, kernel);
        true
    }

    /// Looks at all leases that are coming.
    pub(super) fn take_all_coming(&mut self, kernel: &dyn Kernel) {
        while self.take_coming(kernel) {}
    }

    /// The next new peers, which are so no more; `None` if there are none.
    fn next_group(&mut self, kernel: &dyn Kernel) -> Option<Group> {
        while self.fresh.is_empty() && self.take_coming(kernel) {}
        let (_, arrived) = self.fresh.front().copied()?;
        // By kind: that is the order of creation.
        let mut objects: [Vec<Object>; 6] = Default::default();
        for _ in 0..GROUP {
            if self.fresh.front().is_none_or(|(_, at)| *at != arrived) {
                break;
            }
            let Some((id, _)) = self.fresh.pop_front() else { break };
            let defined = self.peers.take_fresh(id).unwrap_or_default();
            expand(defined, self.ids.as_ref(), |object| objects[object.kind() as usize].push(object));
        }
        if self.fresh.is_empty() {
            // Room for thousands is not kept.
            self.fresh = VecDeque::new();
        }
        let mut changes = Vec::with_capacity(objects.iter().map(Vec::len).sum());
        for object in objects.into_iter().flatten() {
            self.gone.remove(&object.key());
            if self.lacks_link(&object) {
                self.put.insert(object.key(), Cause::Lease(arrived));
            } else {
                changes.push(Change::Put(object));
            }
        }
        Some(Group { changes, arrived })
    }
}
