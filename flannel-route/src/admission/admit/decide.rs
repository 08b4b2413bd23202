//! The decision on each peer that a change can affect.

use std::net::IpAddr;

use super::{Admission, Changed, Delta, Update};
use crate::admission::incumbents::Incumbents;
use crate::admission::peer_index::{Expanded, Id, Peer, Sharing};
use crate::admission::winners::{Clash, Winners};
use flannel_core::Lease;
use flannel_core::error::holder;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;

impl Admission {
    /// Decides on the peers that are new or dirty, and on all peers that these can affect.
    pub(super) fn finish(&mut self, mut update: Update) -> Changed {
        let (mut alone, mut late) = (Vec::new(), Vec::new());
        let mut incumbents = Incumbents::default();
        for (id, sharing) in std::mem::take(&mut update.added) {
            // A peer that is rejected in any case affects no other.
            let is_rejected = self.index.peer(id).is_some_and(|peer| peer.rejected().is_some());
            // A later new peer may define one of its objects too. Then that peer shares it, and
            // this one is its neighbour.
            if is_rejected || (sharing == Sharing::Alone && !self.index.overlaps(id)) {
                alone.push(id);
            } else if sharing < Sharing::Displaces
                && let Some(earlier) = self.earlier(id, &mut incumbents)
            {
                late.push((id, earlier));
            } else {
                update.dirty.insert(id);
                self.touch_all(id, &mut update);
            }
        }
        let contested = self.contested(&mut update);
        alone.retain(|id| !update.dirty.contains(id));
        let added = self.decide_alone(alone, &mut update);
        self.decide_contested(contested);
        for (id, earlier) in late.into_iter().filter(|(id, _)| !update.dirty.contains(id)) {
            let mut winners = Winners::default();
            self.index.peer(earlier).into_iter().for_each(|peer| winners.add(earlier, peer));
            self.decide(id, &winners);
        }
        self.index.vacate(std::mem::take(&mut update.vacated));
        let delta = |(key, before)| {
            let after = self.object(&key);
            (before != after).then_some(Delta { key, before, after })
        };
        let deltas = update.touched.into_iter().filter_map(delta).collect();
        Changed { deltas, added }
    }

    /// An accepted peer that clashes with a new one and is earlier. While it stays accepted, the
    /// new one is rejected, and changes nothing.
    fn earlier(&self, id: Id, incumbents: &mut Incumbents) -> Option<Id> {
        let peer = self.index.peer(id)?;
        let precedence = peer.lease.precedence();
        let is_earlier = |peer: &Peer| peer.accepted && peer.lease.precedence() < precedence;
        let is_earlier = |rival: &Id| self.index.peer(*rival).is_some_and(is_earlier);
        // Of many peers with one subnet, only the accepted one is the first that defines its route.
        let mut first = self.index.first_definers(peer);
        first
            .find(is_earlier)
            .or_else(|| incumbents.rivals(&self.index, peer).into_iter().find(is_earlier))
    }

    /// The dirty peers, and all peers that clash with one of these.
    fn contested(&self, update: &mut Update) -> Vec<Id> {
        let (mut contested, mut expanded) = (Vec::new(), Expanded::default());
        let mut open: Vec<Id> = update.dirty.iter().copied().collect();
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
    fn decide_alone(&mut self, mut alone: Vec<Id>, update: &mut Update) -> Vec<Id> {
        alone.retain(|id| {
            let is_touched = |object: &Object| update.touched.contains_key(&object.key());
            let mut objects =
                self.index.peer(*id).map(|peer| peer.objects.iter()).unwrap_or_default();
            let touched = !update.touched.is_empty() && objects.any(is_touched);
            if touched {
                self.touch_all(*id, update);
            }
            self.decide(*id, &Winners::default()) && !touched
        });
        alone
    }

    fn decide_contested(&mut self, mut contested: Vec<Id>) {
        contested.sort_by_cached_key(|id| {
            self.index
                .peer(*id)
                .map_or((Revision(0), String::new()), |peer| peer.lease.precedence())
        });
        let mut winners = Winners::default();
        for id in contested {
            if self.decide(id, &winners)
                && let Some(peer) = self.index.peer(id)
            {
                winners.add(id, peer);
            }
        }
    }

    /// Decides whether to accept a peer, given the accepted ones among its neighbours.
    fn decide(&mut self, id: Id, winners: &Winners) -> bool {
        let Some(peer) = self.index.peer(id) else { return false };
        let subnets = peer.lease.subnets;
        let verdict = peer.rejected().cloned().or_else(|| self.clash(peer, winners));
        let accepted = verdict.is_none();
        match verdict {
            Some(why) => drop(self.rejected.insert(subnets, why)),
            None => drop(self.rejected.remove(&subnets)),
        }
        self.index.set_accepted(id, accepted);
        accepted
    }

    /// The reason to reject a peer for another one.
    fn clash(&self, peer: &Peer, winners: &Winners) -> Option<Rejection> {
        if let Some((key, owner)) = self.not_its_own(peer) {
            let holder = holder(&owner.lease.attrs);
            return Some(Rejection::ConflictsWithDerivedEntry {
                key,
                owner: owner.lease.subnets,
                holder,
            });
        }
        let (other, clash) = winners.clash(peer)?;
        let other = &self.index.peer(other)?.lease;
        let (earlier, holder) = (other.subnets, holder(&other.attrs));
        Some(match clash {
            Clash::Overlap => Rejection::Overlaps { earlier, holder },
            Clash::Object(key) => Rejection::Contradicts { key, earlier, holder },
            Clash::Contains(public) => Rejection::Rejected(format!(
                "it contains {public}, a public address of the earlier lease {earlier} of {holder}"
            )),
            Clash::Inside(public) => Rejection::Rejected(format!(
                "its public address {public} lies inside the earlier lease {earlier} of {holder}, \
                 whose addresses are for pods"
            )),
        })
    }

    /// An object that a peer defines although it names another peer, and that peer.
    fn not_its_own(&self, peer: &Peer) -> Option<(Key, &Peer)> {
        peer.objects.iter().find_map(|object| Some((object.key(), self.index.owner(object)?)))
    }

    /// The reason to reject a lease, whatever other peers and plans are.
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
        let is_ours = |public: &IpAddr| own.subnets.iter().any(|subnet| subnet.contains(*public));
        if let Some(public) = public().find(is_ours) {
            return rejected(format!(
                "its public address {public} lies inside this node's own lease {}, whose \
                 addresses are for pods",
                own.subnets
            ));
        }
        // Hosts may have addresses in a part of the pod network that has no leases. Then this node
        // has one too.
        let networks = self.rules.networks;
        for network in
            networks.values().filter(|network| !ours().any(|ours| network.contains(ours)))
        {
            if let Some(public) = public().find(|public| network.contains(*public)) {
                return rejected(format!(
                    "its public address {public} lies inside the pod network {network}"
                ));
            }
        }
        None
    }

    /// The public addresses that could be inside another lease.
    pub(super) fn hosts(&self, lease: &Lease) -> Box<[IpAddr]> {
        let is_inside =
            |public: &IpAddr| self.rules.networks.values().any(|network| network.contains(*public));
        publics(&lease.attrs).filter(is_inside).collect()
    }

    /// Remembers the present definition of an object, before anything changes it.
    pub(super) fn touch(&self, key: Key, update: &mut Update) {
        update.touched.entry(key).or_insert_with(|| self.object(&key));
    }

    pub(super) fn touch_all(&self, id: Id, update: &mut Update) {
        let Some(peer) = self.index.peer(id) else { return };
        for object in peer.objects.iter() {
            self.touch(object.key(), update);
        }
    }
}

/// The public addresses of all offers: nodes may choose other offers, but must decide alike.
fn publics(attrs: &LeaseAttrs) -> impl Iterator<Item = IpAddr> {
    attrs.offers().flat_map(|offer| offer.public.values().copied())
}

/// Whether it can be the address of a host.
fn is_host(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        // No packet has an IPv4 address in IPv6 form.
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some(),
    };
    !special && !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}
