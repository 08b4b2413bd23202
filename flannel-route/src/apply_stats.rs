//! Statistics: changes that were applied, and repairs. Their size is bounded.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::kernel::ChangedBy;
use flannel_core::object::Object;
use flannel_core::status::{Damage, Repair, Status};

/// The statistics of one network, in a status without other values.
#[derive(Debug, Default)]
pub(crate) struct ApplyStats(pub(crate) Status);

impl ApplyStats {
    /// A change because of leases was applied, `after` their arrival.
    pub(crate) fn applied(&mut self, after: Option<Duration>) {
        self.0.applied += 1;
        if let Some(after) = after {
            self.0.latency.record(after);
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
        let Status { repaired, repairs, last_repairs, .. } = &mut self.0;
        *repaired += 1;
        *repairs.entry((object.key().kind(), damage)).or_default() += 1;
        if last_repairs.len() == Status::LAST_REPAIRS {
            last_repairs.remove(0);
        }
        let mut repair = Repair::new(*repaired, damage, object.clone());
        (repair.peer, repair.changed_by) = (peer, changed_by);
        last_repairs.push(Arc::new(repair));
    }
}
