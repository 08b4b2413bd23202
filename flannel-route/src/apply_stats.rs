//! Statistics about applied changes and repairs. Their size is bounded.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::kernel::ChangedBy;
use flannel_core::object::Object;
use flannel_core::status::{Damage, Repair, Status};

/// Repairs within this time count as one change by another program.
const APART: Duration = Duration::from_secs(1);

/// The statistics of one network, in a status without other values.
#[derive(Debug, Default)]
pub(crate) struct ApplyStats(pub(crate) Status);

impl ApplyStats {
    /// Counts a change because of leases. It was applied `after` their arrival, or `None` if the
    /// arrival is not known.
    pub(crate) fn applied(&mut self, after: Option<Duration>) {
        self.0.applied += 1;
        if let Some(after) = after {
            self.0.latency.record(after);
        }
    }

    /// Counts and lists the repair of damage by another process.
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
        let mut repair = Repair::new(*repaired, damage, object.clone());
        repair.peer = peer;
        repair.changed_by = changed_by;
        last_repairs.push(Arc::new(repair));
        // One repair of each second stays longer, so that a flush of all objects does not hide the
        // earlier repairs.
        let Some(n) = last_repairs.len().checked_sub(Status::NEWEST_REPAIRS + 1) else { return };
        let before = n.checked_sub(1).map(|before| last_repairs[before].at);
        let apart = before.map(|before| last_repairs[n].at.duration_since(before));
        if apart.is_some_and(|apart| apart.is_ok_and(|apart| apart < APART)) {
            last_repairs.remove(n);
        } else if n >= Status::NEWEST_REPAIRS {
            last_repairs.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use flannel_core::object::{Route, Via};

    use super::*;

    /// Repairs at these times, in milliseconds. Returns the times of the listed ones.
    fn listed(times: impl Iterator<Item = u64>) -> Vec<u64> {
        let dst = "10.1.7.0/24".parse().unwrap();
        let route = Object::from(Route { dst, via: Via::Blackhole, mtu: None });
        let mut stats = ApplyStats::default();
        let begin = SystemTime::UNIX_EPOCH;
        for time in times {
            stats.repaired(&route, Damage::Deletion, None, None);
            // The next one looks at it.
            let newest = stats.0.last_repairs.last_mut().unwrap();
            Arc::make_mut(newest).at = begin + Duration::from_millis(time);
        }
        let time =
            |repair: &Arc<Repair>| repair.at.duration_since(begin).unwrap().as_millis() as u64;
        stats.0.last_repairs.iter().map(time).collect()
    }

    #[test]
    fn many_repairs_at_once_do_not_hide_earlier_ones() {
        let times = listed((0..6).flat_map(|burst| (0..40).map(move |n| 10_000 * burst + n)));
        let expected = (0..6).map(|burst| 10_000 * burst).chain(50_024..50_040);
        assert_eq!(times, expected.collect::<Vec<_>>());
    }

    #[test]
    fn steady_repairs_are_listed_with_a_bounded_number_of_earlier_ones() {
        let times = listed((0..2000).map(|n| 500 * n));
        let newest = (1984..2000).map(|n| 500 * n);
        let earlier = (0..16).map(|n| 992_000 - 1000 * (16 - n));
        assert_eq!(times, earlier.chain(newest).collect::<Vec<_>>());
        let times = listed((0..100).map(|n| 5000 * n));
        assert_eq!(times, (68..100).map(|n| 5000 * n).collect::<Vec<_>>());
    }
}
