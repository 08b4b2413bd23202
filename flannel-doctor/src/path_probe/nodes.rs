//! An index of leases by node address.
//!
//! The server looks up the sender of every packet. A look-up costs O(log n), plus the changes of
//! leases since the previous one. An idle server drops the index.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::Lease;
use flannel_core::lease::{LeaseSet, View};
use tokio::sync::watch;

/// The kind of address that the index uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeAddress {
    /// The tunnel addresses: the first address of each subnet of the lease.
    Tunnel,
    /// The public addresses in the lease.
    Public,
}

impl NodeAddress {
    fn addresses(self, lease: &Lease) -> Vec<IpAddr> {
        match self {
            Self::Tunnel => lease.subnets.iter().map(|subnet| subnet.base()).collect(),
            Self::Public => lease.attrs.preferred.public.values().copied().collect(),
        }
    }
}

/// The leases by address of their node.
#[derive(Debug)]
pub(super) struct Nodes {
    by: NodeAddress,
    views: watch::Receiver<View>,
    /// The leases in the index.
    indexed: LeaseSet,
    /// Subnets of different lengths can begin with the same address.
    by_address: BTreeMap<IpAddr, Vec<Arc<Lease>>>,
}

impl Nodes {
    pub(super) fn new(by: NodeAddress, mut views: watch::Receiver<View>) -> Self {
        views.mark_changed();
        Self { by, views, indexed: LeaseSet::default(), by_address: BTreeMap::new() }
    }

    /// The leases of nodes with this address, accepted or rejected; usually one or none.
    pub(super) fn at(&mut self, address: IpAddr) -> &[Arc<Lease>] {
        // After the watch has ended, the last view is still used.
        if self.views.has_changed().unwrap_or(false) {
            let leases = self.views.borrow_and_update().leases.clone();
            let older = std::mem::replace(&mut self.indexed, leases);
            for (subnets, lease) in self.indexed.changes_since(&older) {
                let before = older.get(&subnets).map(|lease| self.by.addresses(lease));
                for address in before.into_iter().flatten() {
                    if let Entry::Occupied(mut there) = self.by_address.entry(address) {
                        there.get_mut().retain(|known| known.subnets != subnets);
                        if there.get().is_empty() {
                            there.remove();
                        }
                    }
                }
                if let Some(lease) = lease {
                    for address in self.by.addresses(lease) {
                        self.by_address.entry(address).or_default().push(Arc::clone(lease));
                    }
                }
            }
        }
        self.by_address.get(&address).map_or(&[], Vec::as_slice)
    }

    /// Drops the index. The next look-up builds it again.
    pub(super) fn forget(&mut self) {
        *self = Self::new(self.by, self.views.clone());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flannel_core::lease::{LeaseAttrs, Origin, Revision};
    use flannel_core::{Subnet, Subnets};
    use nix::time::ClockId;

    use super::*;

    fn lease(subnet: Subnet) -> Lease {
        Lease {
            subnets: Subnets::new([subnet]).unwrap(),
            attrs: LeaseAttrs::default(),
            expires: None,
            since: Revision(1),
            revision: Revision(1),
        }
    }

    fn keys(leases: &[Arc<Lease>]) -> Vec<String> {
        leases.iter().map(|lease| lease.subnets.to_string()).collect()
    }

    #[test]
    fn the_index_follows_leases_by_tunnel_address() {
        let (sender, views) = watch::channel(View::unknown());
        let mut nodes = Nodes::new(NodeAddress::Tunnel, views);
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(keys(nodes.at(address("10.1.7.0"))), [""; 0]);
        let put = |key: &str| {
            let lease =
                Lease { subnets: key.parse().unwrap(), ..lease("10.1.7.0/24".parse().unwrap()) };
            sender.send_modify(|view| view.leases.insert(lease));
        };
        put("10.1.7.0-24&fd00:0:0:7::-64");
        put("10.1.7.0-25");
        assert_eq!(
            keys(nodes.at(address("10.1.7.0"))),
            ["10.1.7.0-24&fd00:0:0:7::-64", "10.1.7.0-25"]
        );
        assert_eq!(keys(nodes.at(address("fd00:0:0:7::"))), ["10.1.7.0-24&fd00:0:0:7::-64"]);
        for unknown in ["10.1.7.9", "10.1.8.0", "192.0.2.7", "fd00:0:0:7::1"] {
            assert_eq!(keys(nodes.at(address(unknown))), [""; 0], "{unknown}");
        }
        nodes.forget();
        assert!(nodes.by_address.is_empty() && nodes.indexed.is_empty());
        sender.send_modify(|view| {
            drop(view.leases.remove(&"10.1.7.0-24&fd00:0:0:7::-64".parse().unwrap()));
        });
        assert_eq!(keys(nodes.at(address("10.1.7.0"))), ["10.1.7.0-25"]);
        sender.send_modify(|view| drop(view.leases.remove(&"10.1.7.0-25".parse().unwrap())));
        assert_eq!(keys(nodes.at(address("10.1.7.0"))), [""; 0]);
        assert!(nodes.by_address.is_empty());
    }

    #[test]
    fn a_changed_public_address_replaces_the_old_one_in_the_index() {
        let (sender, views) = watch::channel(View::unknown());
        let mut nodes = Nodes::new(NodeAddress::Public, views);
        let mut known = |address: [u8; 4]| keys(nodes.at(address.into()));
        let put = |key: &str, public: [u8; 4]| {
            let mut lease =
                Lease { subnets: key.parse().unwrap(), ..lease("10.1.7.0/24".parse().unwrap()) };
            lease.attrs.preferred.public.v4 = Some(public.into());
            sender.send_modify(|view| view.leases.insert(lease));
        };
        put("10.1.7.0-24", [192, 0, 2, 7]);
        put("10.1.8.0-24", [192, 0, 2, 7]);
        assert_eq!(known([192, 0, 2, 7]), ["10.1.7.0-24", "10.1.8.0-24"]);
        put("10.1.7.0-24", [192, 0, 2, 9]);
        assert_eq!(
            (known([192, 0, 2, 7]), known([192, 0, 2, 9])),
            (vec!["10.1.8.0-24".into()], vec!["10.1.7.0-24".into()])
        );
        assert_eq!(known([10, 1, 7, 0]), [""; 0], "its tunnel address");
        sender.send_modify(|view| view.leases = LeaseSet::default());
        assert_eq!(known([192, 0, 2, 9]), [""; 0]);
        assert!(nodes.by_address.is_empty());
    }

    #[test]
    fn a_look_up_does_not_walk_over_all_leases() {
        let network: Subnet = "10.0.0.0/8".parse().unwrap();
        let leases: LeaseSet = (0..20_000)
            .map(|n| lease(Subnet::new(network.nth(n << 8).unwrap(), 24).unwrap()))
            .collect();
        let (_sender, views) =
            watch::channel(View { leases, origin: Origin::Cached { written: None } });
        let mut nodes = Nodes::new(NodeAddress::Tunnel, views);
        assert_eq!(nodes.at("10.1.7.0".parse().unwrap()).len(), 1);
        // The time of this thread only, because other threads may use the processor.
        let computed = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
        let start = computed();
        let found: usize =
            (0..20_000).map(|n| nodes.at(network.nth((n << 8) | 9).unwrap()).len()).sum();
        assert_eq!(found, 0, "an address of a pod is no tunnel address");
        // With a walk for each look-up it would take minutes.
        let took = computed() - start;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
