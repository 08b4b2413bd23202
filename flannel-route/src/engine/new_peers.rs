//! New peers in large numbers: their objects are put slice by slice.

use std::sync::Arc;

use tokio::time::Instant;

use super::ahead::Applier;
use super::queue::Slice;
use super::table::Row;
use super::{Actual, Cause, Engine};
use crate::gated_kernel::{Closed, GatedKernel};
use flannel_admission::{Answers, Changed, Delta};
use flannel_core::Lease;
use flannel_core::object::{Change, Object, ObjectKind};

/// A planned slice of new peers.
struct NewPeers {
    objects: Vec<Object>,
    deltas: Vec<Delta>,
    arrived: Instant,
}

impl Engine {
    /// Puts the objects of peers in the queue, slice by slice, until `end`; at least one slice.
    /// Plans each slice while the kernel applies the slice before it.
    pub(super) fn put_new_peers(
        &mut self,
        kernel: &GatedKernel,
        end: Instant,
    ) -> Result<(), Closed> {
        if !self.has_queue() {
            return Ok(());
        }
        let (footprint, answers) = (self.footprint.clone(), Answers::new(&*kernel.kernel));
        let apply = |changes: &[Change]| kernel.apply(&footprint, changes);
        let result = Applier::with(&apply, |applier| {
            let mut slice = self.next_new_peers(&answers);
            let mut begun: Option<Cause> = None;
            loop {
                // A slice can change an object of the slice before it, so record its results first.
                if let Some(cause) = begun.take() {
                    let (changes, results) = applier.wait()?;
                    let now = Instant::now();
                    for (change, result) in changes.iter().zip(results) {
                        self.record(change, result, now, Some(cause));
                    }
                }
                let Some(NewPeers { objects, deltas, arrived }) = slice.take() else { break };
                self.take_deltas(deltas, Some(arrived));
                let cause = Cause::Lease(Some(arrived));
                applier.begin(self.changes_for(objects, cause));
                begun = Some(cause);
                if Instant::now() < end {
                    slice = self.next_new_peers(&answers);
                }
            }
            Ok(())
        });
        self.lookups.note(answers);
        result
    }

    /// Plans the next slice of the queue. Its objects are in the order of creation.
    fn next_new_peers(&mut self, answers: &Answers<'_>) -> Option<NewPeers> {
        let (Changed { deltas, added }, arrived) = self.plan_slice(answers)?;
        // Sorted by kind: that is the order of creation.
        let mut objects: [Vec<Object>; ObjectKind::ALL.len()] = Default::default();
        for id in added {
            self.desired.expand(self.desired.peers.objects_of(id), |object| {
                objects[object.kind() as usize].push(object);
            });
        }
        Some(NewPeers { objects: objects.into_iter().flatten().collect(), deltas, arrived })
    }

    /// The changes that put new objects. An object that lacks its link gets a row instead.
    fn changes_for(&mut self, objects: Vec<Object>, cause: Cause) -> Vec<Change> {
        let mut changes = Vec::with_capacity(objects.len());
        for object in objects {
            // The row of an object of a peer that left, or none.
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
    pub(super) fn plan_slice(&mut self, answers: &Answers<'_>) -> Option<(Changed, Instant)> {
        let Slice { mut leases, arrived, outdated } = self.queue.next()?;
        if outdated {
            let is_new = |lease: &&Arc<Lease>| !self.desired.peers.contains(&lease.subnets);
            let newest = |lease: &Arc<Lease>| self.leases.get(&lease.subnets).cloned();
            leases = leases.iter().filter(is_new).filter_map(newest).collect();
        }
        let changes = leases.iter().map(|lease| (lease.subnets, Some(lease)));
        Some((self.desired.update(changes, answers), arrived))
    }
}
