//! The choice of a VTEP's MAC address. Peers send frames to the address in the lease, so an
//! existing device keeps its address if possible. If it changes, the kernel deletes the neighbours
//! of the device, and they are put again.
//!
//! A new device gets the address that is derived from the public address of the node
//! ([`MacAddr::derived_from`]). No other lease can take that address from it. Any other address is
//! taken by a lease that was created earlier.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::Subnets;
use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer};
use flannel_core::object::MacAddr;
use flannel_core::text::fnv1a;

/// The offer of this backend, or `None` if the lease has no such offer.
fn vxlan(attrs: &LeaseAttrs) -> Option<&Offer> {
    attrs.offers().find(|offer| offer.kind == crate::plan::TYPE)
}

fn mac_of(offer: &Offer, family: Family) -> Option<MacAddr> {
    crate::plan::Vtep::parse(offer.data[family].as_deref()?).ok().map(|vtep| vtep.mac)
}

/// The VTEP's MAC address in the backend data of one family, or `None` if it is absent or
/// malformed.
pub(crate) fn published(attrs: &LeaseAttrs, family: Family) -> Option<MacAddr> {
    mac_of(vxlan(attrs)?, family)
}

/// The MAC addresses of other nodes whose public address of that family differs from ours. If the
/// public addresses are equal too, the forwarding entry of that lease equals ours, so they do not
/// clash. The lease with the subnets `own` is ours.
pub(crate) fn taken(
    leases: &LeaseSet,
    own: Option<Subnets>,
    public: &Dual<IpAddr>,
) -> BTreeSet<MacAddr> {
    let mut taken = BTreeSet::new();
    for lease in leases.iter().filter(|lease| Some(lease.subnets) != own) {
        let Some(offer) = vxlan(&lease.attrs) else { continue };
        for family in Family::BOTH {
            let has_our_address = offer.public[family].is_some_and(|ip| public[family] == Some(ip));
            if !has_our_address {
                taken.extend(mac_of(offer, family));
            }
        }
    }
    taken
}

/// The addresses from which [`choose`] chooses.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    /// The address in the last lease of this node.
    pub(crate) published: Option<MacAddr>,
    /// The address of the existing device.
    pub(crate) device: Option<MacAddr>,
    /// The address that is derived from the public address in the lease. It is only there if no
    /// other node can have that public address: the external interface has it, or an operator
    /// assigned it to this node alone. No other lease can take this address, so it is not compared.
    pub(crate) derived: Option<MacAddr>,
}

/// The address of the device. An existing device keeps the published address, else its own, unless
/// another node uses it. A new device gets the address that is derived from the node's public
/// address. Behind a NAT, a device gets the first of these addresses that no other node uses: the
/// published one, then addresses made of `seed`, which is stable and differs between nodes.
pub(crate) fn choose(candidates: &Candidates, seed: &str, taken: &BTreeSet<MacAddr>) -> MacAddr {
    let Candidates { published, device, derived } = *candidates;
    // A new device has no packets yet, so it need not keep an address.
    if device.is_some() || derived.is_none() {
        let is_free = |mac: &MacAddr| mac.is_unicast() && !taken.contains(mac);
        let mut kept = published.into_iter().chain(device);
        if let Some(mac) = kept.find(|mac| is_free(mac) && !names_another(*mac, derived)) {
            return mac;
        }
    }
    derived.unwrap_or_else(|| {
        (0u64..)
            .map(|salt| derive(&format!("{seed} {salt}")))
            .find(|mac| !taken.contains(mac))
            .expect("the derived addresses do not end, and differ")
    })
}

/// Whether an address names another public IPv4 address than `derived` does. The node that has that
/// public address now would take it.
fn names_another(mac: MacAddr, derived: Option<MacAddr>) -> bool {
    let prefix = MacAddr::derived_from(IpAddr::from([0, 0, 0, 0])).0[..2].to_vec();
    let names_v4 = |mac: MacAddr| mac.0.starts_with(&prefix);
    derived.is_some_and(|derived| names_v4(derived) && names_v4(mac) && mac != derived)
}

fn derive(text: &str) -> MacAddr {
    let [_, _, bytes @ ..] = fnv1a(text.as_bytes()).to_be_bytes();
    MacAddr::local(bytes)
}

#[cfg(test)]
mod tests {
    use flannel_core::Lease;
    use flannel_core::lease::Revision;

    use super::*;

    #[test]
    fn a_published_mac_is_kept_unless_another_node_uses_it() {
        let [a, b] = [1, 2].map(|n| MacAddr::local([n; 6]));
        let none = BTreeSet::new();
        let choose = |published, device, seed: &str, taken: &BTreeSet<MacAddr>| {
            choose(&Candidates { published, device, derived: None }, seed, taken)
        };
        assert_eq!(choose(Some(a), Some(b), "seed", &none), a);
        assert_eq!(choose(None, Some(b), "seed", &none), b);
        assert_eq!(choose(Some(a), Some(b), "seed", &[a].into()), b);
        let derived = choose(None, None, "seed", &none);
        assert_eq!(derived, choose(None, None, "seed", &none), "stable");
        assert_ne!(derived, choose(None, None, "other seed", &none));
        assert_ne!(
            derived,
            choose(None, None, "seed", &[derived].into()),
            "cloned machines differ"
        );
        assert!(derived.is_unicast() && derived.0[0] & 2 == 2, "locally administered");
        assert_ne!(choose(Some(MacAddr([0; 6])), None, "seed", &none), MacAddr([0; 6]));
    }

    #[test]
    fn a_new_device_and_one_whose_mac_is_taken_get_the_mac_that_names_the_address() {
        let [a, b] = [1, 2].map(|n| MacAddr::local([n; 6]));
        let derived = MacAddr::derived_from([192, 0, 2, 7].into());
        let choose = |published, device, taken: &[MacAddr]| {
            let of = Candidates { published, device, derived: Some(derived) };
            choose(&of, "seed", &taken.iter().copied().collect())
        };
        assert_eq!(choose(None, None, &[]), derived);
        assert_eq!(choose(Some(a), None, &[]), derived, "no packets pass yet");
        assert_eq!(choose(Some(a), Some(b), &[]), a);
        assert_eq!(choose(Some(a), Some(b), &[a]), b);
        assert_eq!(choose(Some(a), Some(b), &[a, b]), derived);
        assert_eq!(choose(None, None, &[derived]), derived, "a copy cannot take it");
        let former = MacAddr::derived_from([192, 0, 2, 9].into());
        assert_eq!(choose(Some(former), Some(former), &[]), derived, "another node may have it");
    }

    #[test]
    fn a_mac_is_taken_by_a_lease_with_another_address_of_that_family() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let mac = |n: u8| MacAddr::local([n; 6]);
        let lease = |key: &str, public: [&str; 2], macs: [u8; 2]| {
            let [v4, v6] = macs.map(|n| Some(crate::plan::backend_data(1, mac(n)).into()));
            let offer = Offer::new(public.map(address).into_iter().collect())
                .with_kind(crate::plan::TYPE)
                .with_data(Dual { v4, v6 });
            Lease {
                subnets: key.parse().unwrap(),
                attrs: offer.into(),
                expires: None,
                since: Revision(1),
                revision: Revision(1),
            }
        };
        let [ours, six] = ["192.0.2.1", "2001:db8::1"];
        let own = "10.1.1.0-24&fd00:1:0:1::-64";
        let leases: LeaseSet = [
            lease(own, [ours, six], [1, 11]),
            // One of its addresses is ours.
            lease("10.1.2.0-24&fd00:1:0:2::-64", ["192.0.2.2", six], [2, 12]),
            lease("10.1.3.0-24&fd00:1:0:3::-64", [ours, "2001:db8::3"], [3, 13]),
            lease("10.1.4.0-24&fd00:1:0:4::-64", ["192.0.2.4", "2001:db8::4"], [4, 14]),
        ]
        .into_iter()
        .collect();
        let own = own.parse().ok();
        let macs = |all: &[u8]| all.iter().map(|n| mac(*n)).collect::<BTreeSet<_>>();
        let public = [ours, six].map(address).into_iter().collect();
        assert_eq!(taken(&leases, own, &public), macs(&[2, 4, 13, 14]));
        let all = macs(&[1, 2, 3, 4, 11, 12, 13, 14]);
        assert_eq!(taken(&leases, None, &Dual::default()), all);
    }
}
