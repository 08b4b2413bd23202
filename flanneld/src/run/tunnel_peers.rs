//! The public addresses of accepted peers, for the gate of a tunnel.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_core::Subnets;
use flannel_core::lease::LeaseSet;
use flannel_core::status::{Listing, Rejection, Status};

/// The public addresses of accepted peers. An update costs O(changes).
#[derive(Debug, Default)]
pub(super) struct TunnelPeers {
    leases: LeaseSet,
    rejected: Listing<Subnets, Rejection>,
    /// The addresses of each accepted peer.
    of: BTreeMap<Subnets, Vec<IpAddr>>,
    /// The number of peers with an address.
    users: BTreeMap<IpAddr, usize>,
    addresses: Listing<IpAddr>,
}

impl TunnelPeers {
    /// Takes in the leases of `status`. `own` is this node's lease.
    pub(super) fn update(&mut self, status: &Status, own: Subnets) -> &Listing<IpAddr> {
        let leases = std::mem::replace(&mut self.leases, status.leases.clone());
        let rejected = std::mem::replace(&mut self.rejected, status.rejected.clone());
        let mut changed: Vec<Subnets> =
            self.leases.changes_since(&leases).map(|(subnets, _)| subnets).collect();
        changed.extend(self.rejected.changes_since(&rejected).map(|(subnets, ..)| *subnets));
        for subnets in changed.into_iter().filter(|subnets| *subnets != own) {
            self.replace(subnets);
        }
        &self.addresses
    }

    fn replace(&mut self, subnets: Subnets) {
        let accepted = self.leases.get(&subnets).filter(|_| !self.rejected.contains_key(&subnets));
        let offers = accepted.into_iter().flat_map(|lease| lease.attrs.offers());
        let new: Vec<IpAddr> = offers.flat_map(|offer| offer.public.values().copied()).collect();
        for address in &new {
            let users = self.users.entry(*address).or_default();
            *users += 1;
            if *users == 1 {
                self.addresses.insert(*address, ());
            }
        }
        let old =
            if new.is_empty() { self.of.remove(&subnets) } else { self.of.insert(subnets, new) };
        for address in old.into_iter().flatten() {
            let users = self.users.get_mut(&address).expect("counted when it came");
            *users -= 1;
            if *users == 0 {
                self.users.remove(&address);
                self.addresses.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flannel_core::Lease;
    use flannel_core::lease::{LeaseAttrs, Offer, Revision};
    use std::sync::Arc;

    fn key(text: &str) -> Subnets {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_is_kept_as_long_as_a_peer_has_it() {
        let (own, mut status, mut peers) =
            (key("10.1.1.0-24"), Status::default(), TunnelPeers::default());
        let mut steps = |leases: &[(&str, &str)], rejected: &[&str]| {
            let leases = leases.iter().map(|(lease, public)| {
                let public = [public.parse::<IpAddr>().unwrap()].into_iter().collect();
                let offer = Offer { public, kind: "ipip".into(), ..Offer::default() };
                let (subnets, attrs, revision) = (key(lease), LeaseAttrs::from(offer), Revision(1));
                Arc::new(Lease { subnets, attrs, expires: None, revision, since: revision })
            });
            status.leases = leases.collect();
            let why = || Rejection::Rejected("test".into());
            status.rejected = rejected.iter().map(|lease| (key(lease), why())).collect();
            let all = peers.update(&status, own).keys().map(ToString::to_string);
            all.collect::<Vec<_>>().join(" ")
        };
        let (first, twin) = (("10.1.2.0-24", "192.0.2.2"), ("10.1.3.0-24", "192.0.2.2"));
        let (own, other) = (("10.1.1.0-24", "192.0.2.1"), ("10.1.4.0-24", "192.0.2.4"));
        assert_eq!(steps(&[own, first, twin, other], &[]), "192.0.2.2 192.0.2.4");
        assert_eq!(steps(&[own, first, twin, other], &["10.1.3.0-24"]), "192.0.2.2 192.0.2.4");
        assert_eq!(steps(&[own, first, other], &["10.1.4.0-24"]), "192.0.2.2");
        assert_eq!(steps(&[own, (first.0, "192.0.2.9"), other], &[]), "192.0.2.4 192.0.2.9");
        assert_eq!(steps(&[own], &[]), "");
    }
}
