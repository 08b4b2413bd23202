//! The decision on each peer that a change can affect.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{Admission, Changed, Delta, Update};
use crate::peer_index::{Id, Peer};
use flannel_core::error::holder;
use flannel_core::lease::Revision;
use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;

impl Admission {
    /// Decides on the peers that are new or dirty, and on all peers that these can affect.
    pub(super) fn finish(&mut self, mut update: Update) -> Changed {
        let added = std::mem::take(&mut update.added);
        for (id, shared) in &added {
            // A later new peer may define one of its objects too. Then that peer shares it, and
            // this one is its neighbour.
            if *shared || !self.index.overlapping(*id).is_empty() {
                update.dirty.insert(*id);
                self.touch_all(*id, &mut update);
            }
        }
        let mut open: Vec<Id> = update.dirty.iter().copied().collect();
        let mut contested: Vec<Id> = Vec::new();
        while let Some(id) = open.pop() {
            contested.push(id);
            for (other, _) in self.index.neighbours(id) {
                if update.dirty.insert(other) {
                    self.touch_all(other, &mut update);
                    open.push(other);
                }
            }
        }
        let alone =
            added.into_iter().map(|(id, _)| id).filter(|id| !update.dirty.contains(id)).collect();
        let added = self.decide_alone(alone, &mut update);
        self.decide_contested(contested);
        self.index.vacate(std::mem::take(&mut update.vacated));
        let delta = |(key, before)| {
            let after = self.object(&key);
            (before != after).then_some(Delta { key, before, after })
        };
        let deltas = update.touched.into_iter().filter_map(delta).collect();
        Changed { deltas, added }
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
            self.decide(*id, &BTreeSet::new()) && !touched
        });
        alone
    }

    fn decide_contested(&mut self, mut contested: Vec<Id>) {
        contested.sort_by_cached_key(|id| {
            self.index
                .peer(*id)
                .map_or((Revision(0), String::new()), |peer| peer.lease.precedence())
        });
        let mut winners = BTreeSet::new();
        for id in contested {
            if self.decide(id, &winners) {
                winners.insert(id);
            }
        }
    }

    /// Decides whether to accept a peer, given the accepted ones among its neighbours.
    fn decide(&mut self, id: Id, winners: &BTreeSet<Id>) -> bool {
        let Some(peer) = self.index.peer(id) else { return false };
        let subnets = peer.lease.subnets;
        let verdict = self.objection(peer).or_else(|| {
            if winners.is_empty() {
                return None;
            }
            let (other, key) =
                self.index.neighbours(id).into_iter().find(|(other, _)| winners.contains(other))?;
            let other = &self.index.peer(other)?.lease;
            let (earlier, holder) = (other.subnets, holder(&other.attrs));
            Some(match key {
                Some(key) => Rejection::Contradicts { key, earlier, holder },
                None => Rejection::Overlaps { earlier, holder },
            })
        });
        let accepted = verdict.is_none();
        match verdict {
            Some(why) => drop(self.rejected.insert(subnets, why)),
            None => drop(self.rejected.remove(&subnets)),
        }
        if let Some(peer) = self.index.peer_mut(id) {
            peer.accepted = accepted;
        }
        accepted
    }

    /// The reason to reject a peer, independent of other peers.
    fn objection(&self, peer: &Peer) -> Option<Rejection> {
        // Nodes may choose other offers, but must decide alike.
        let public = || peer.lease.attrs.offers().flat_map(|offer| offer.public.values());
        let mut enabled = false;
        for subnet in peer.lease.subnets.iter() {
            let Some(network) = self.rules.networks[subnet.family()] else { continue };
            if !network.covers(&subnet) {
                return Some(Rejection::Outside { subnet, network });
            }
            // The route to the subnet would lead packets to the node back into the pod network.
            if let Some(public) = public().find(|public| subnet.contains(**public)) {
                return Some(Rejection::Rejected(format!(
                    "its public address {public} lies inside its own subnet {subnet}, whose \
                     addresses are for pods"
                )));
            }
            enabled = true;
        }
        if !enabled {
            return Some(Rejection::NoEnabledFamily);
        }
        if let Some(public) = public().find(|public| !is_host(**public)) {
            return Some(Rejection::Rejected(format!(
                "its public address {public} is not a unicast host address"
            )));
        }
        let own = self.rules.own.as_ref().map(|own| own.subnets);
        if let Some(own) = own.filter(|own| own.overlaps(&peer.lease.subnets)) {
            return Some(Rejection::OverlapsOwn { own });
        }
        if let Some(reason) = peer.rejected() {
            return Some(Rejection::Rejected(reason.to_string()));
        }
        let reserved = peer
            .objects
            .iter()
            .map(|object| object.key())
            .find(|key| self.rules.reserved.contains(key));
        reserved.map(|key| Rejection::ContradictsOwn { key })
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

/// Whether it can be the address of a host.
fn is_host(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(v4) => v4.is_broadcast(),
        // No packet has an IPv4 address in IPv6 form.
        IpAddr::V6(v6) => v6.to_ipv4_mapped().is_some(),
    };
    !special && !address.is_unspecified() && !address.is_loopback() && !address.is_multicast()
}
