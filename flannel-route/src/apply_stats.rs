//! Statistics: changes that were applied, and repairs. Their size is bounded.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::kernel::ChangedBy;
use flannel_core::object::{Object, ObjectKind};
use flannel_core::status::{Damage, Histogram, Repair, Status};

/// The statistics of one network.
#[derive(Debug, Default)]
pub(crate) struct ApplyStats {
    applied: u64,
    repaired: u64,
    repairs: BTreeMap<(ObjectKind, Damage), u64>,
    last_repairs: VecDeque<Arc<Repair>>,
    latency: Histogram,
}

impl ApplyStats {
    /// A change because of leases was applied, `after` their arrival.
    pub(crate) fn applied(&mut self, after: Option<Duration>) {
        self.applied += 1;
        if let Some(after) = after {
            self.latency.record(after);
        }
    }

    /// The damage by another process was repaired.
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

    /// Writes everything into a status.
    pub(crate) fn copy_to(&self, status: &mut Status) {
        status.applied = self.applied;
        status.repaired = self.repaired;
        status.repairs = self.repairs.clone();
        status.last_repairs = self.last_repairs.iter().cloned().collect();
        status.latency = self.latency;
    }
}
