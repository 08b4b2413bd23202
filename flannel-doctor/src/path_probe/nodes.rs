//! The leases by the addresses of their nodes.
//!
//! Every packet that arrives makes the server ask here, so an answer never walks over all leases. It
//! costs a look-up, plus the changes since the last question. While nobody asks, nothing is kept.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::Lease;
use flannel_core::lease::{LeaseSet, View};
use tokio::sync::watch;

/// NodeAddress which of their addresses nodes are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeAddress {
    /// Those of their tunnels: each of the lease's subnets begins with one.
    Tunnel,
    /// Those that their leases name.
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

/// The leases by their nodes' addresses.
#[derive(Debug)]
pub(super) struct Nodes {
    by: NodeAddress,
    views: watch::Receiver<View>,
    /// What was taken in.
    seen: LeaseSet,
    /// Leases of different lengths have the same one.
    by_address: BTreeMap<IpAddr, Vec<Arc<Lease>>>,
}

impl Nodes {
    pub(super) fn new(by: NodeAddress, mut views: watch::Receiver<View>) -> Self {
        views.mark_changed();
        Self { by, views, seen: LeaseSet::default(), by_address: BTreeMap::new() }
    }

    /// The leases of nodes with this address, believed or not; mostly one or none.
    pub(super) fn at(&mut self, address: IpAddr) -> &[Arc<Lease>] {
        // The last view of a store that nobody follows any more holds.
        if self.views.has_changed().unwrap_or(false) {
            let leases = self.views.borrow_and_update().leases.clone();
            let older = std::mem::replace(&mut self.seen, leases);
            for (subnets, lease) in self.seen.changes_since(&older) {
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

    /// Nobody has asked for a while.
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
    fn leases_that_come_and_go_are_known_by_the_addresses_of_their_tunnels() {
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
        for nobodys in ["10.1.7.9", "10.1.8.0", "192.0.2.7", "fd00:0:0:7::1"] {
            assert_eq!(keys(nodes.at(address(nobodys))), [""; 0], "{nobodys}");
        }
        nodes.forget();
        assert!(nodes.by_address.is_empty() && nodes.seen.is_empty());
        sender.send_modify(|view| {
            drop(view.leases.remove(&"10.1.7.0-24&fd00:0:0:7::-64".parse().unwrap()));
        });
        assert_eq!(keys(nodes.at(address("10.1.7.0"))), ["10.1.7.0-25"]);
        sender.send_modify(|view| drop(view.leases.remove(&"10.1.7.0-25".parse().unwrap())));
        assert_eq!(keys(nodes.at(address("10.1.7.0"))), [""; 0]);
        assert!(nodes.by_address.is_empty());
    }

    #[test]
    fn a_node_that_gets_another_public_address_is_known_by_that_one_alone() {
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
        assert_eq!(known([10, 1, 7, 0]), [""; 0], "its tunnel's");
        sender.send_modify(|view| view.leases = LeaseSet::default());
        assert_eq!(known([192, 0, 2, 9]), [""; 0]);
        assert!(nodes.by_address.is_empty());
    }

    #[test]
    fn who_floods_it_with_questions_makes_nobody_walk_over_all_leases() {
        let network: Subnet = "10.0.0.0/8".parse().unwrap();
        let leases: LeaseSet = (0..20_000)
            .map(|n| lease(Subnet::new(network.nth(n << 8).unwrap(), 24).unwrap()))
            .collect();
        let (_sender, views) =
            watch::channel(View { leases, origin: Origin::Cached { written: None } });
        let mut nodes = Nodes::new(NodeAddress::Tunnel, views);
        assert_eq!(nodes.at("10.1.7.0".parse().unwrap()).len(), 1);
        // Of this thread alone: others may have the processor for longer.
        let computed = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
        let start = computed();
        let found: usize =
            (0..20_000).map(|n| nodes.at(network.nth((n << 8) | 9).unwrap()).len()).sum();
        assert_eq!(found, 0, "an address of a pod is no tunnel's");
        // A walk each time takes minutes.
        let took = computed() - start;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
