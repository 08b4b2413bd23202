//! New peers in large numbers: their objects are put slice by slice.

use std::time::Duration;

use tokio::time::Instant;

use super::ahead::{Applied, Applier, BEGUN, Batch};
use super::queue::Slice;
use super::table::Row;
use super::{Actual, Cause, Engine};
use crate::admission::{Changed, Delta, RouteLookups};
use crate::gated_kernel::{Closed, GatedKernel};
use flannel_core::object::{Change, Object, ObjectKind};

/// The time for new peers in a round. The start of a round costs about two milliseconds, because it
/// starts a thread and publishes the status.
const ROUND: Duration = Duration::from_millis(64);

/// A slice of new peers after it was planned.
pub(super) struct PlannedSlice {
    pub(super) changed: Changed,
    /// The arrival of the leases.
    pub(super) arrived: Instant,
}

/// The objects of a slice of new peers.
struct NewObjects {
    /// The objects of the new peers in the order of creation.
    objects: Vec<Object>,
    /// The changes of other objects.
    deltas: Vec<Delta>,
    /// The arrival of the leases.
    arrived: Instant,
}

impl Engine {
    /// Puts the objects of peers in the queue, slice by slice, for about [`ROUND`]. While the
    /// kernel applies one slice, a second one waits for it, and a third one is planned.
    pub(super) fn put_new_peers(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        if !self.has_queue() {
            return Ok(());
        }
        let end = Instant::now() + ROUND;
        let footprint = self.footprint.clone();
        let lookups = RouteLookups::new(&*kernel.kernel);
        let apply = |changes: &[Change]| kernel.apply(&footprint, changes);
        let result = Applier::with(&apply, |applier| {
            let mut slice = self.next_new_peers(&lookups);
            while let Some(NewObjects { objects, deltas, arrived }) = slice {
                // The deltas can change objects that the kernel is putting.
                if !deltas.is_empty() {
                    self.record_begun(applier, 0)?;
                }
                self.take_deltas(deltas, Some(arrived));
                let cause = Cause::Lease(Some(arrived));
                let changes = self.changes_for(objects, cause);
                let changes = self.refuse_unowned(changes, Some(cause));
                applier.begin(Batch { changes, cause });
                self.record_begun(applier, BEGUN - 1)?;
                slice = (Instant::now() < end).then(|| self.next_new_peers(&lookups)).flatten();
            }
            self.record_begun(applier, 0)
        });
        self.stale_lookups.note(lookups);
        result
    }

    /// Waits until at most `left` batches are begun, and records the outcomes of the others.
    fn record_begun(&mut self, applier: &Applier<'_>, left: usize) -> Result<(), Closed> {
        while applier.begun.get() > left {
            let Applied { batch, outcomes } = applier.wait()?;
            let now = Instant::now();
            for (change, outcome) in batch.changes.iter().zip(outcomes?) {
                self.record(change, outcome, now, Some(batch.cause));
            }
        }
        Ok(())
    }

    /// Plans the next slice of the queue, or returns `None` if the queue is empty.
    fn next_new_peers(&mut self, lookups: &RouteLookups<'_>) -> Option<NewObjects> {
        let PlannedSlice { changed, arrived } = self.plan_slice(lookups)?;
        let Changed { deltas, added } = changed;
        // The order of creation is the order of kinds.
        let mut objects: [Vec<Object>; ObjectKind::ALL.len()] = Default::default();
        for id in added {
            self.desired.expand(self.desired.peers.objects_of(id), |object| {
                objects[object.kind() as usize].push(object);
            });
        }
        Some(NewObjects { objects: objects.into_iter().flatten().collect(), deltas, arrived })
    }

    /// The changes that put new objects. An object that lacks its link gets a row instead.
    fn changes_for(&mut self, objects: Vec<Object>, cause: Cause) -> Vec<Change> {
        let mut changes = Vec::with_capacity(objects.len());
        for object in objects {
            // The row may be about an object of a peer that left.
            self.table.remove(&object.key());
            if self.lacks_link(&object) {
                self.table.insert(object.key(), Row::new(Actual::Unknown, cause));
            } else {
                changes.push(Change::Put(object));
            }
        }
        changes
    }

    /// Plans the next slice of the queue, without leases that were deleted or planned meanwhile.
    /// Returns `None` if the queue is empty.
    pub(super) fn plan_slice(&mut self, lookups: &RouteLookups<'_>) -> Option<PlannedSlice> {
        let Slice { mut leases, arrived } = self.queue.next()?;
        if self.queue.outdated {
            leases.retain(|lease| !self.desired.peers.contains(&lease.subnets));
            leases =
                leases.iter().filter_map(|old| self.leases.get(&old.subnets).cloned()).collect();
        }
        let changes = leases.iter().map(|lease| (lease.subnets, Some(lease)));
        Some(PlannedSlice { changed: self.desired.update(changes, lookups), arrived })
    }
}
