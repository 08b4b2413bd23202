//! The accepted ones among peers that clash.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::admission::peer_index::{Id, Peer};
use flannel_core::Subnet;
use flannel_core::object::{Key, Object};

/// Peers that do not clash with one another. The cost to compare a peer with them does not depend
/// on the number of rejected peers.
#[derive(Debug, Default)]
pub(crate) struct Winners {
    /// No subnet overlaps another.
    subnets: BTreeMap<Subnet, Id>,
    /// Public addresses inside the pod networks.
    hosts: BTreeMap<IpAddr, Id>,
    objects: BTreeMap<Key, (Id, Object)>,
}

/// How a peer clashes with a winner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Clash {
    /// Their subnets overlap.
    Overlap,
    /// The peer's subnets contain this public address of the winner.
    Contains(IpAddr),
    /// This public address of the peer is inside the winner's subnets.
    Inside(IpAddr),
    /// Both define this object, not equally.
    Object(Key),
}

impl Winners {
    /// Adds a peer that clashes with none.
    pub(crate) fn add(&mut self, id: Id, peer: &Peer) {
        self.subnets.extend(peer.lease.subnets.iter().map(|subnet| (subnet, id)));
        self.hosts.extend(peer.hosts().iter().map(|address| (*address, id)));
        let objects = peer.objects.iter().map(|object| (object.key(), (id, object.clone())));
        self.objects.extend(objects);
    }

    /// A winner that clashes with a peer; `None` if there is none.
    pub(crate) fn clash(&self, peer: &Peer) -> Option<(Id, Clash)> {
        let subnets = || peer.lease.subnets.iter();
        let inside = |subnet: Subnet| {
            let (next, id) = self.subnets.range(subnet..).next()?;
            subnet.covers(next).then_some(*id)
        };
        let overlap =
            || subnets().find_map(|subnet| self.around(subnet).or_else(|| inside(subnet)));
        let contains = |subnet: Subnet| {
            let (address, id) = self.hosts.range(subnet.base()..=subnet.last()).next()?;
            Some((*id, Clash::Contains(*address)))
        };
        let is_inside = |address: &IpAddr| {
            self.around(Subnet::host(*address)).map(|id| (id, Clash::Inside(*address)))
        };
        let differs = |object: &Object| {
            let key = object.key();
            let (id, other) = self.objects.get(&key)?;
            (other != object).then_some((*id, Clash::Object(key)))
        };
        overlap()
            .map(|id| (id, Clash::Overlap))
            .or_else(|| subnets().find_map(contains))
            .or_else(|| peer.hosts().iter().find_map(is_inside))
            .or_else(|| peer.objects.iter().find_map(differs))
    }

    /// The winner with a subnet that covers this one.
    fn around(&self, subnet: Subnet) -> Option<Id> {
        // A subnet is sorted before those inside it, and no winner is between the two.
        let (before, id) = self.subnets.range(..=subnet).next_back()?;
        before.covers(&subnet).then_some(*id)
    }
}
