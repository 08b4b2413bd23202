//! Who was heard over the tunnel, when, and how large.
//!
//! The one thing to know: it remembers tunnels of other nodes only, one entry each, so that nobody can make it grow.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use flannel_core::{Lease, View};

/// What came within so long is of one sounding.
const TOGETHER: Duration = Duration::from_secs(10);

/// Clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Ear(Arc<Mutex<BTreeMap<IpAddr, Heard>>>);

/// Of one tunnel address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Heard {
    /// The last one.
    at: Instant,
    /// The largest packet of that sounding, in bytes.
    size: u16,
}

impl Ear {
    /// A packet of `size` bytes came from there, the tunnel of a node in this view.
    pub(super) fn note(&self, from: IpAddr, size: u16, view: &View) {
        let mut heard = self.entries();
        // Nodes come and go.
        if heard.len() > 2 * view.leases.len() {
            heard.retain(|address, _| node(view, *address).is_some());
        }
        let now = Instant::now();
        let entry = heard.entry(from).or_insert(Heard { at: now, size });
        let together = now.duration_since(entry.at) <= TOGETHER;
        *entry = Heard { at: now, size: if together { entry.size.max(size) } else { size } };
    }

    /// The largest packet that came from there just now, in bytes; 0: none.
    pub(super) fn just_now(&self, from: IpAddr) -> u16 {
        let fresh = |heard: &&Heard| heard.at.elapsed() <= TOGETHER;
        self.entries().get(&from).filter(fresh).map_or(0, |heard| heard.size)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<IpAddr, Heard>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The node whose tunnel has this address.
pub(super) fn node(view: &View, address: IpAddr) -> Option<&Arc<Lease>> {
    let is_its = |lease: &&Arc<Lease>| lease.subnets.iter().any(|subnet| subnet.base() == address);
    view.leases.iter().find(is_its)
}

#[cfg(test)]
mod tests {
    use flannel_core::SubnetManager;
    use flannel_core::testing::FakeSubnets;

    use super::*;

    #[tokio::test]
    async fn the_largest_of_one_sounding_counts_and_who_is_gone_is_forgotten() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        subnets.put("10.1.7.0-24", "192.0.2.7");
        let view = subnets.watch_leases().await.unwrap().borrow().clone();
        let (ear, peer) = (Ear::default(), IpAddr::from([10, 1, 7, 0]));
        assert_eq!(node(&view, peer).map(|lease| lease.subnets.to_string()).as_deref(), Some("10.1.7.0-24"));
        assert!(
            ["10.1.7.9", "10.1.8.0", "192.0.2.7"].iter().all(|a| node(&view, a.parse().unwrap()).is_none())
        );
        assert_eq!(ear.just_now(peer), 0);
        for size in [64, 1450, 64] {
            ear.note(peer, size, &view);
        }
        assert_eq!(ear.just_now(peer), 1450);
        // It was long ago.
        ear.entries().get_mut(&peer).unwrap().at -= 2 * TOGETHER;
        assert_eq!(ear.just_now(peer), 0);
        ear.note(peer, 64, &view);
        assert_eq!(ear.just_now(peer), 64);
        for gone in 0..9 {
            ear.note(IpAddr::from([10, 1, 9, gone]), 64, &view);
        }
        assert!(ear.entries().len() <= 3);
        assert_eq!(ear.just_now(peer), 64);
    }
}
