//! The decision on each peer that a change can affect.

use std::net::IpAddr;

use super::{Admission, Changed, Delta, NewPeer, Update};
use crate::admission::incumbents::Incumbents;
use crate::admission::peer_index::{Expanded, PeerEntry, PeerId, Sharing};
use crate::admission::winners::{Clash, ClashReason, Winners};
use flannel_core::error::holder;
use flannel_core::lease::LeaseAttrs;
use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;
use flannel_core::{Lease, Subnets};

/// A new peer that clashes with an accepted peer.
struct LatePeer {
    id: PeerId,
    /// The accepted peer, which is earlier.
    earlier: PeerId,
}

impl Admission {
    /// Decides on the peers that are new or dirty, and on all peers that these can affect.
    pub(super) fn finish(&mut self, mut update: Update) -> Changed {
        let mut alone = Vec::new();
        let mut late = Vec::new();
        let mut incumbents = Incumbents::default();
        for NewPeer { id, sharing } in std::mem::take(&mut update.added) {
            // A peer that is rejected in any case affects no other peer.
            let is_rejected = self.index.peer(id).is_some_and(|peer| peer.rejected().is_some());
            // A later new peer may define one of the objects too. Then that peer shares it, and
            // this one is its neighbour.
            if is_rejected || (sharing == Sharing::Alone && !self.index.overlaps(id)) {
                alone.push(id);
            } else if sharing < Sharing::Displaces
                && let Some(earlier) = self.earlier(id, &mut incumbents)
            {
                late.push(LatePeer { id, earlier });
            } else {
                update.dirty.insert(id);
                self.touch_all(id, &mut update);
            }
        }
        let contested = self.contested(&mut update);
        alone.retain(|id| !update.dirty.contains(id));
        let added = self.decide_alone(alone, &mut update);
        self.decide_contested(contested);
        late.retain(|late| !update.dirty.contains(&late.id));
        for LatePeer { id, earlier } in late {
            let mut winners = Winners::default();
            if let Some(peer) = self.index.peer(earlier) {
                winners.add(earlier, peer);
            }
            self.decide(id, &winners);
        }
        self.index.vacate(std::mem::take(&mut update.vacated));
        let mut deltas = Vec::new();
        for (key, before) in update.touched {
            let after = self.object(&key);
            if before != after {
                deltas.push(Delta { key, before, after });
            }
        }
        Changed { deltas, added }
    }

    /// An accepted peer that clashes with a new peer and is earlier. While it stays accepted, the
    /// new peer is rejected and changes nothing.
    fn earlier(&self, id: PeerId, incumbents: &mut Incumbents) -> Option<PeerId> {
        let peer = self.index.peer(id)?;
        let precedence = peer.lease.precedence();
        let is_earlier = |id: &PeerId| {
            let other = self.index.peer(*id);
            other.is_some_and(|other| other.accepted && other.lease.precedence() < precedence)
        };
        // Of many peers with one subnet, only the accepted one is the first definer of its route.
        let mut definers = self.index.contradicting_definers(peer);
        definers
            .find(is_earlier)
            .or_else(|| incumbents.rivals(&self.index, peer).into_iter().find(is_earlier))
    }

    /// The dirty peers, and all peers that clash with one of these.
    fn contested(&self, update: &mut Update) -> Vec<PeerId> {
        let mut contested = Vec::new();
        let mut expanded = Expanded::default();
        let mut open: Vec<PeerId> = update.dirty.iter().copied().collect();
        while let Some(id) = open.pop() {
            contested.push(id);
            for other in self.index.neighbours(id, &mut expanded) {
                if update.dirty.insert(other) {
                    self.touch_all(other, update);
                    open.push(other);
                }
            }
        }
        contested
    }

    /// Decides on new peers without neighbours. Returns the accepted ones whose objects no other
    /// peer defined before the update.
    fn decide_alone(&mut self, mut alone: Vec<PeerId>, update: &mut Update) -> Vec<PeerId> {
        alone.retain(|id| {
            let touched = self.defines_touched(*id, update);
            if touched {
                self.touch_all(*id, update);
            }
            self.decide(*id, &Winners::default()) && !touched
        });
        alone
    }

    /// Whether a peer defines an object that the update may change.
    fn defines_touched(&self, id: PeerId, update: &Update) -> bool {
        // Mostly nothing is touched. Then the objects need not be read.
        !update.touched.is_empty()
            && self.index.peer(id).is_some_and(|peer| {
                peer.objects.iter().any(|object| update.touched.contains_key(&object.key()))
            })
    }

    /// Decides on the peers that clash with others, the earliest first.
    fn decide_contested(&mut self, mut contested: Vec<PeerId>) {
        contested.sort_by_cached_key(|id| self.index.peer(*id).map(|peer| peer.lease.precedence()));
        let mut winners = Winners::default();
        for id in contested {
            if self.decide(id, &winners)
                && let Some(peer) = self.index.peer(id)
            {
                winners.add(id, peer);
            }
        }
    }

    /// Decides whether to accept a peer. `winners` are the accepted ones among its neighbours.
    fn decide(&mut self, id: PeerId, winners: &Winners) -> bool {
        let Some(peer) = self.index.peer(id) else { return false };
        let subnets = peer.lease.subnets;
        let rejection = peer.rejected().cloned().or_else(|| self.clash(id, peer, winners));
        let accepted = rejection.is_none();
        match rejection {
            Some(why) => drop(self.rejected.insert(subnets, why)),
            None => drop(self.rejected.remove(&subnets)),
        }
        self.index.set_accepted(id, accepted);
        accepted
    }

    /// The reason to reject a peer for another one.
    fn clash(&self, id: PeerId, peer: &PeerEntry, winners: &Winners) -> Option<Rejection> {
        if let Some(rejection) = self.object_of_another(id, peer) {
            return Some(rejection);
        }
        let Clash { winner, reason } = winners.clash(peer)?;
        let winner = &self.index.peer(winner)?.lease;
        let earlier = winner.subnets;
        let holder = holder(&winner.attrs);
        Some(match reason {
            ClashReason::Overlap => Rejection::Overlaps { earlier, holder },
            ClashReason::Object(key) => Rejection::Contradicts { key, earlier, holder },
            ClashReason::Contains(public) => Rejection::Rejected(format!(
                "it contains {public}, a public address of the earlier lease {earlier} of {holder}"
            )),
            ClashReason::Inside(public) => Rejection::Rejected(format!(
                "its public address {public} lies inside the earlier lease {earlier} of {holder}, \
                 whose addresses are for pods"
            )),
        })
    }

    /// The rejection of a peer that defines an object which another peer proves to be its own.
    fn object_of_another(&self, id: PeerId, peer: &PeerEntry) -> Option<Rejection> {
        peer.objects.iter().map(Object::key).find_map(|key| {
            let owner = &self.index.other_owner(id, &key)?.lease;
            let holder = holder(&owner.attrs);
            Some(Rejection::BelongsToAnother { key, owner: owner.subnets, holder })
        })
    }

    /// The reason to reject a lease, even without any other peer and before a plan has run.
    pub(super) fn objection(&self, lease: &Lease) -> Option<Rejection> {
        let public = || publics(&lease.attrs);
        let own = self.rules.own.as_deref();
        let ours = || own.into_iter().flat_map(|own| publics(&own.attrs));
        let rejected = |reason| Some(Rejection::Rejected(reason));
        let mut enabled = false;
        for subnet in lease.subnets.iter() {
            let Some(network) = self.rules.networks[subnet.family()] else { continue };
            if !network.covers(&subnet) {
                return Some(Rejection::Outside { subnet, network });
            }
            // The route to the subnet would lead packets to the node back into the pod network.
            if let Some(public) = public().find(|public| subnet.contains(*public)) {
                return rejected(format!(
                    "its public address {public} lies inside its own subnet {subnet}, whose \
                     addresses are for pods"
                ));
            }
            // The route would hide the network of this node's external interface.
            if let Some(ours) = ours().find(|ours| subnet.contains(*ours)) {
                return rejected(format!("it contains {ours}, this node's own public address"));
            }
            enabled = true;
        }
        if !enabled {
            return Some(Rejection::NoEnabledFamily);
        }
        if let Some(public) = public().find(|public| !is_host(*public)) {
            return rejected(format!("its public address {public} is not a unicast host address"));
        }
        let own = own?;
        if own.subnets.overlaps(&lease.subnets) {
            return Some(Rejection::OverlapsOwn(own.subnets));
        }
        let mut inside = public().filter(|public| contains(&own.subnets, *public));
        if let Some(public) = inside.next() {
            return rejected(format!(
                "its public address {public} lies inside this node's own lease {}, whose \
                 addresses are for pods",
                own.subnets
            ));
        }
        // Hosts may have addresses in a part of the pod network that has no leases. Then this node
        // has such an address too.
        let networks = self.rules.networks;
        for network in networks.values() {
            if ours().any(|ours| network.contains(ours)) {
                continue;
            }
            if let Some(public) = public().find(|public| network.contains(*public)) {
                return rejected(format!(
                    "its public address {public} lies inside the pod network {network}"
                ));
            }
        }
        None
    }

    /// The public addresses inside the pod networks: only they can be inside another lease.
    pub(super) fn hosts(&self, lease: &Lease) -> Box<[IpAddr]> {
        let networks = &self.rules.networks;
        publics(&lease.attrs)
            .filter(|public| networks.values().any(|network| network.contains(*public)))
            .collect()
    }

    /// Remembers the present definition of an object, before anything changes it.
    pub(super) fn touch(&self, key: Key, update: &mut Update) {
        update.touched.entry(key).or_insert_with(|| self.object(&key));
    }

    /// Remembers the present definitions of all objects of a peer.
    pub(super) fn touch_all(&self, id: PeerId, update: &mut Update) {
        let Some(peer) = self.index.peer(id) else { return };
        for object in peer.objects.iter() {
            self.touch(object.key(), update);
        }
    }
}

/// The public addresses of all offers. Nodes may choose different offers, but must accept the same
/// leases.
fn publics(attrs: &LeaseAttrs) -> impl Iterator<Item = IpAddr> {
    attrs.offers().flat_map(|offer| offer.public.values().copied())
}

/// Whether one of the subnets contains an address.
fn contains(subnets: &Subnets, address: IpAddr) -> bool {
    subnets.iter().any(|subnet| subnet.contains(address))
}

/// Whether an address can be the address of a host.
fn is_host(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        // No packet has an IPv4 address in IPv6 form.
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some(),
    };
    !special && !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}
