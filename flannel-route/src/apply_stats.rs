//! What was done, what was repaired and what fails. The one thing to know: everything in here is bounded by the
//! objects that are wanted, and copying it into a status costs nothing that grows.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::kernel::{ChangedBy, KernelError};
use flannel_core::object::{Change, Key, Object, ObjectKind};
use flannel_core::status::Histogram;
use flannel_core::status::Listing;
use flannel_core::status::{Damage, Failure, Repair, Status};

/// The books of one network.
#[derive(Debug, Default)]
pub(crate) struct ApplyStats {
    failing: Listing<Key, Failure>,
    /// Something failed that did not fail before.
    newly_failing: bool,
    applied: u64,
    repaired: u64,
    repairs: BTreeMap<(ObjectKind, Damage), u64>,
    last_repairs: VecDeque<Arc<Repair>>,
    latency: Histogram,
}

impl ApplyStats {
    /// A change that leases asked for was made, and how long after they were there.
    pub(crate) fn applied(&mut self, after: Option<Duration>) {
        self.applied += 1;
        if let Some(after) = after {
            self.latency.record(after);
        }
    }

    /// What somebody else had done was undone.
    pub(crate) fn repaired(
        &mut self,
        object: &Object,
        damage: Damage,
        peer: Option<Subnets>,
        changed_by: Option<ChangedBy>,
    ) {
        self.repaired += 1;
        *self.repairs.entry((object.key().kind(), damage)).or_default() += 1;
        if self.last_repairs.len() == Status::LAST_REPAIRS {
            self.last_repairs.pop_front();
        }
        let mut repair = Repair::new(self.repaired, damage, object.clone());
        (repair.peer, repair.changed_by) = (peer, changed_by);
        self.last_repairs.push_back(Arc::new(repair));
    }

    /// The kernel refused.
    pub(crate) fn failed(&mut self, change: &Change, peer: Option<Subnets>, error: KernelError) {
        let key = change.object().key();
        let mut failure = Failure::new(change, peer, error);
        match self.failing.get(&key) {
            Some(before) => {
                failure.since = before.since;
                failure.tries = before.tries.saturating_add(1);
            }
            None => {
                self.newly_failing = true;
                tracing::debug!(%change, error = %failure.error, "the kernel refused");
            }
        }
        self.failing.insert(key, failure);
    }

    /// What was taken for done was not: it fails since `before`.
    pub(crate) fn fails_still(&mut self, key: Key, before: Failure) {
        self.failing.insert(key, before);
    }

    /// It does not fail any more, or nobody wants it any more.
    pub(crate) fn clear(&mut self, key: &Key) {
        self.failing.remove(key);
    }

    pub(crate) fn failing(&self) -> &Listing<Key, Failure> {
        &self.failing
    }

    pub(crate) fn keep_failing(&mut self, keep: impl Fn(&Key) -> bool) {
        self.failing.retain(keep);
    }

    /// Something failed that did not fail when this was last asked.
    pub(crate) fn take_newly_failing(&mut self) -> bool {
        std::mem::take(&mut self.newly_failing)
    }

    /// Writes everything into a status.
    pub(crate) fn copy_to(&self, status: &mut Status) {
        status.failing = self.failing.clone();
        status.applied = self.applied;
        status.repaired = self.repaired;
        status.repairs = self.repairs.clone();
        status.last_repairs = self.last_repairs.iter().cloned().collect();
        status.latency = self.latency;
    }
}
