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
        after.into_iter().for_each(|after| self.0.latency.record(after));
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
            // Of many at once at least one stays, which shows that a program does it repeatedly.
            let apart = |pair: &[Arc<Repair>]| pair[1].at.duration_since(pair[0].at);
            let apart = |pair| apart(pair).unwrap_or_default().min(Duration::from_secs(1));
            let gaps = last_repairs.windows(2).map(apart).enumerate();
            let closest = gaps.min_by_key(|(_, gap)| *gap).map_or(0, |(n, _)| n);
            last_repairs.remove(closest);
        }
        let mut repair = Repair::new(*repaired, damage, object.clone());
        (repair.peer, repair.changed_by) = (peer, changed_by);
        last_repairs.push(Arc::new(repair));
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::object::{Route, Via};

    use super::*;

    #[test]
    fn many_repairs_at_once_do_not_hide_earlier_ones() {
        let route = |n: u8| {
            let dst = format!("10.1.{n}.0/24").parse().unwrap();
            Object::from(Route { dst, via: Via::Blackhole, mtu: None })
        };
        let mut stats = ApplyStats::default();
        for burst in 0..6_u64 {
            for n in 0..40 {
                stats.repaired(&route(n), Damage::Deletion, None, None);
                // Earlier bursts are ten seconds older.
                let newest = stats.0.last_repairs.last_mut().unwrap();
                Arc::make_mut(newest).at += Duration::from_secs(10 * burst);
            }
        }
        let mut numbers: Vec<u64> = stats.0.last_repairs.iter().map(|r| r.number).collect();
        assert_eq!((numbers.len(), numbers.is_sorted()), (Status::LAST_REPAIRS, true));
        numbers.dedup_by_key(|number| (*number - 1) / 40);
        assert_eq!(numbers.len(), 6, "one of each burst: {numbers:?}");
        // Later ones that are not at once replace the oldest.
        for n in 0..16 {
            stats.repaired(&route(n), Damage::Deletion, None, None);
            let newest = stats.0.last_repairs.last_mut().unwrap();
            Arc::make_mut(newest).at += Duration::from_secs(100 + 5 * u64::from(n));
        }
        let numbers: Vec<u64> = stats.0.last_repairs.iter().map(|r| r.number).collect();
        assert_eq!(numbers, (241..=256).collect::<Vec<_>>());
    }
}
