//! New peers in large numbers: their objects are put slice by slice.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::ahead::{Applier, BEGUN};
use super::table::Row;
use super::{Actual, Cause, Engine};
use crate::admission::{Answers, Changed, Delta};
use crate::gated_kernel::{Closed, GatedKernel};
use flannel_core::Lease;
use flannel_core::object::{Change, Object, ObjectKind};

/// The time for new peers in a round. The start of a round costs some two milliseconds, because it
/// starts a thread and publishes the status.
const ROUND: Duration = Duration::from_millis(64);

impl Engine {
    /// Puts the objects of peers in the queue, slice by slice, for some [`ROUND`]. While the kernel
    /// applies a slice, the next one waits for it, and the one after is planned.
    pub(super) fn put_new_peers(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        if !self.has_queue() {
            return Ok(());
        }
        let end = Instant::now() + ROUND;
        let (footprint, answers) = (self.footprint.clone(), Answers::new(&*kernel.kernel));
        let apply = |changes: &[Change]| kernel.apply(&footprint, changes);
        let result = Applier::with(&apply, |applier| {
            let mut slice = self.next_new_peers(&answers);
            while let Some((objects, deltas, arrived)) = slice {
                // The deltas can change objects that the kernel is putting.
                if !deltas.is_empty() {
                    self.record_begun(applier, 0)?;
                }
                self.take_deltas(deltas, Some(arrived));
                let cause = Cause::Lease(Some(arrived));
                let changes = self.changes_for(objects, cause);
                applier.begin(self.refuse_unowned(changes, Some(cause)), cause);
                self.record_begun(applier, BEGUN - 1)?;
                slice = (Instant::now() < end).then(|| self.next_new_peers(&answers)).flatten();
            }
            self.record_begun(applier, 0)
        });
        self.lookups.note(answers);
        result
    }

    /// Waits until at most `left` batches are begun, and records the outcomes of the others.
    fn record_begun(&mut self, applier: &Applier<'_>, left: usize) -> Result<(), Closed> {
        while applier.begun.get() > left {
            let (changes, cause, outcomes) = applier.wait()?;
            let now = Instant::now();
            for (change, outcome) in changes.iter().zip(outcomes?) {
                self.record(change, outcome, now, Some(cause));
            }
        }
        Ok(())
    }

    /// Plans the next slice of the queue. Returns the objects of its peers in the order of
    /// creation, the changes of other objects, and its arrival.
    fn next_new_peers(
        &mut self,
        answers: &Answers<'_>,
    ) -> Option<(Vec<Object>, Vec<Delta>, Instant)> {
        let (Changed { deltas, added }, arrived) = self.plan_slice(answers)?;
        // Sorted by kind: that is the order of creation.
        let mut objects: [Vec<Object>; ObjectKind::ALL.len()] = Default::default();
        for id in added {
            self.desired.expand(self.desired.peers.objects_of(id), |object| {
                objects[object.kind() as usize].push(object);
            });
        }
        Some((objects.into_iter().flatten().collect(), deltas, arrived))
    }

    /// The changes that put new objects. An object that lacks its link gets a row instead.
    fn changes_for(&mut self, objects: Vec<Object>, cause: Cause) -> Vec<Change> {
        let change = |object: Object| {
            // The row of an object of a peer that left, or none.
            self.table.remove(&object.key());
            if self.lacks_link(&object) {
                self.table.insert(object.key(), Row::new(Actual::Unknown, cause));
                return None;
            }
            Some(Change::Put(object))
        };
        objects.into_iter().filter_map(change).collect()
    }

    /// Plans the next slice of the queue, without leases that were deleted or planned meanwhile.
    pub(super) fn plan_slice(&mut self, answers: &Answers<'_>) -> Option<(Changed, Instant)> {
        let (mut leases, arrived) = self.queue.next()?;
        if self.queue.outdated {
            let is_new = |lease: &&Arc<Lease>| !self.desired.peers.contains(&lease.subnets);
            let newest = |lease: &Arc<Lease>| self.leases.get(&lease.subnets).cloned();
            leases = leases.iter().filter(is_new).filter_map(newest).collect();
        }
        let changes = leases.iter().map(|lease| (lease.subnets, Some(lease)));
        Some((self.desired.update(changes, answers), arrived))
    }
}
