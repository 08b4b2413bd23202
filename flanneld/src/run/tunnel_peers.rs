//! The public addresses of accepted peers, for the gate of a tunnel.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flannel_core::Subnets;
use flannel_core::lease::LeaseSet;
use flannel_core::status::{Listing, Rejection, Status};

/// The public addresses of accepted peers. An update costs O(changes).
#[derive(Debug, Default)]
pub(super) struct TunnelPeers {
    leases: LeaseSet,
    rejected: Listing<Subnets, Rejection>,
    /// The number of peers with an address.
    users: BTreeMap<IpAddr, usize>,
    addresses: Listing<IpAddr>,
}

impl TunnelPeers {
    /// Takes in the leases of `status`. `own` is this node's lease.
    pub(super) fn update(&mut self, status: &Status, own: Subnets) -> &Listing<IpAddr> {
        let (leases, rejected) = (&status.leases, &status.rejected);
        let mut changed: BTreeSet<Subnets> =
            leases.changes_since(&self.leases).map(|(subnets, _)| subnets).collect();
        changed.extend(rejected.changes_since(&self.rejected).map(|(subnets, ..)| *subnets));
        changed.remove(&own);
        for subnets in changed {
            let old = published(&self.leases, &self.rejected, subnets);
            published(leases, rejected, subnets).into_iter().for_each(|new| self.add(new));
            old.into_iter().for_each(|old| self.remove(old));
        }
        (self.leases, self.rejected) = (leases.clone(), rejected.clone());
        &self.addresses
    }

    fn add(&mut self, address: IpAddr) {
        *self.users.entry(address).or_default() += 1;
        self.addresses.insert(address, ());
    }

    fn remove(&mut self, address: IpAddr) {
        let users = self.users.get_mut(&address).expect("each address was added before");
        *users -= 1;
        if *users == 0 {
            self.users.remove(&address);
            self.addresses.remove(&address);
        }
    }
}

/// The public addresses of a peer; none if its lease is not accepted.
fn published(
    leases: &LeaseSet,
    rejected: &Listing<Subnets, Rejection>,
    subnets: Subnets,
) -> Vec<IpAddr> {
    let accepted = leases.get(&subnets).filter(|_| !rejected.contains_key(&subnets));
    let offers = accepted.into_iter().flat_map(|lease| lease.attrs.offers());
    offers.flat_map(|offer| offer.public.values().copied()).collect()
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
