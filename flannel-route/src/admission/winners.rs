//! The accepted ones among peers that clash.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::admission::peer_index::{PeerEntry, PeerId};
use flannel_core::Subnet;
use flannel_core::object::{Key, Object};

/// Peers that do not clash with one another. The cost to compare a peer with them does not depend
/// on the number of rejected peers.
#[derive(Debug, Default)]
pub(crate) struct Winners {
    /// The subnets of the winners. They do not overlap.
    subnets: BTreeMap<Subnet, PeerId>,
    /// The public addresses inside the pod networks.
    hosts: BTreeMap<IpAddr, PeerId>,
    objects: BTreeMap<Key, WinnerObject>,
}

/// An object that a winner defines.
#[derive(Debug)]
struct WinnerObject {
    winner: PeerId,
    object: Object,
}

/// A clash of a peer with a winner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Clash {
    pub(crate) winner: PeerId,
    pub(crate) reason: ClashReason,
}

/// Why a peer clashes with a winner.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ClashReason {
    /// Their subnets overlap.
    Overlap,
    /// The subnets of the peer contain this public address of the winner.
    Contains(IpAddr),
    /// This public address of the peer is inside the subnets of the winner.
    Inside(IpAddr),
    /// They define this object differently.
    Object(Key),
}

impl Winners {
    /// Adds a peer that does not clash with a winner.
    pub(crate) fn add(&mut self, id: PeerId, peer: &PeerEntry) {
        self.subnets.extend(peer.lease.subnets.iter().map(|subnet| (subnet, id)));
        self.hosts.extend(peer.hosts().iter().map(|address| (*address, id)));
        for object in peer.objects.iter().cloned() {
            self.objects.insert(object.key(), WinnerObject { winner: id, object });
        }
    }

    /// A clash of a peer with a winner, or `None` if the peer does not clash with any.
    pub(crate) fn clash(&self, peer: &PeerEntry) -> Option<Clash> {
        let mut subnets = peer.lease.subnets.iter();
        if let Some(winner) = subnets.find_map(|subnet| self.overlapping(subnet)) {
            return Some(Clash { winner, reason: ClashReason::Overlap });
        }
        let mut subnets = peer.lease.subnets.iter();
        subnets
            .find_map(|subnet| self.clash_of_contained(subnet))
            .or_else(|| peer.hosts().iter().find_map(|address| self.clash_of_host(*address)))
            .or_else(|| peer.objects.iter().find_map(|object| self.clash_of_object(object)))
    }

    /// The clash of a peer with this subnet with a winner whose public address is inside it.
    fn clash_of_contained(&self, subnet: Subnet) -> Option<Clash> {
        let (address, winner) = self.hosts.range(subnet.base()..=subnet.last()).next()?;
        Some(Clash { winner: *winner, reason: ClashReason::Contains(*address) })
    }

    /// The clash of a peer with this public address with a winner whose subnet contains it.
    fn clash_of_host(&self, address: IpAddr) -> Option<Clash> {
        let winner = self.around(Subnet::host(address))?;
        Some(Clash { winner, reason: ClashReason::Inside(address) })
    }

    /// The clash of a peer that defines this object with a winner that defines it differently.
    fn clash_of_object(&self, object: &Object) -> Option<Clash> {
        let key = object.key();
        let defined = self.objects.get(&key)?;
        let reason = ClashReason::Object(key);
        (defined.object != *object).then_some(Clash { winner: defined.winner, reason })
    }

    /// The winner with a subnet that overlaps this one.
    fn overlapping(&self, subnet: Subnet) -> Option<PeerId> {
        self.around(subnet).or_else(|| {
            let (next, winner) = self.subnets.range(subnet..).next()?;
            subnet.covers(next).then_some(*winner)
        })
    }

    /// The winner with a subnet that covers this one.
    fn around(&self, subnet: Subnet) -> Option<PeerId> {
        // A subnet is sorted before the subnets inside it, and no winner is between the two.
        let (before, winner) = self.subnets.range(..=subnet).next_back()?;
        before.covers(&subnet).then_some(*winner)
    }
}
