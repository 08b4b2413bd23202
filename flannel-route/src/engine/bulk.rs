//! New peers: the leases that a view brings in large numbers are planned and put in slices.
//!
//! A view of 50,000 peers goes the same way as a view of one. A slice is planned, applied and recorded before the next one
//! is looked at, and the driver hears the kernel and the store between rounds. What new peers define is noted nowhere
//! object by object: it is taken from the peers' slots.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::time::Instant;

use super::write::{Closed, Gate};
use super::{Cause, Engine, expand};
use flannel_core::object::{Change, Object};
use flannel_core::{Kernel, Lease};

/// The number of new peers whose objects are put at once. Linux maps the per-CPU memory that forwarding entries need in
/// pieces, behind the caller: with more of them in a row it falls behind. 256 of 65,000 peers took a fifth longer.
pub(super) const SLICE: usize = 64;

/// Leases that one view brought and nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Unprocessed {
    leases: std::vec::IntoIter<Arc<Lease>>,
    arrived: Option<Instant>,
}

impl Unprocessed {
    pub(super) fn new(leases: Vec<Arc<Lease>>, arrived: Instant) -> Self {
        Self { leases: leases.into_iter(), arrived: Some(arrived) }
    }

    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(super) fn leases(&self) -> &[Arc<Lease>] {
        self.leases.as_slice()
    }
}

impl Engine {
    /// Puts what new peers define, slice by slice, until `end`; at least one slice.
    pub(super) fn put_new_peers(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        end: Instant,
    ) -> Result<(), Closed> {
        while let Some((changes, arrived)) = self.next_slice(kernel) {
            let results = gate.pass(|| kernel.apply(&self.footprint, &changes)).ok_or(Closed)?;
            let now = Instant::now();
            for (change, result) in changes.iter().zip(results) {
                self.record(change, result, now, Some(Cause::Lease(arrived)));
            }
            if now >= end {
                break;
            }
        }
        Ok(())
    }

    /// Looks at the next slice of the leases that are unprocessed; false if there are none.
    fn take_unprocessed(&mut self, kernel: &dyn Kernel) -> bool {
        let next: Vec<_> = self.unprocessed.leases.by_ref().take(SLICE).collect();
        let arrived = self.unprocessed.arrived;
        if self.unprocessed.len() == 0 {
            // Room for thousands is not kept.
            self.unprocessed = Unprocessed::default();
        }
        let Some(arrived) = arrived else { return false };
        self.take_in(next.iter().map(|lease| (lease.subnets, Some(lease))), arrived, kernel);
        true
    }

    /// Looks at all leases that are unprocessed.
    pub(super) fn take_all_unprocessed(&mut self, kernel: &dyn Kernel) {
        while self.take_unprocessed(kernel) {}
    }

    /// The objects of the next new peers, which are new no more, and when their leases were there; `None` if there are none.
    fn next_slice(&mut self, kernel: &dyn Kernel) -> Option<(Vec<Change>, Option<Instant>)> {
        while self.fresh.is_empty() && self.take_unprocessed(kernel) {}
        let (_, arrived) = self.fresh.front().copied()?;
        // By kind: that is the order of creation.
        let mut objects: [Vec<Object>; 6] = Default::default();
        for _ in 0..SLICE {
            if self.fresh.front().is_none_or(|(_, at)| *at != arrived) {
                break;
            }
            let Some((id, _)) = self.fresh.pop_front() else { break };
            let defined = self.peers.take_fresh(id).unwrap_or_default();
            expand(defined, self.ids.as_ref(), |object| {
                objects[object.kind() as usize].push(object);
            });
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
        Some((changes, arrived))
    }
}
