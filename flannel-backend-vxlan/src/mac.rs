//! Which MAC address a VTEP takes: one that peers already know, and that no other node uses.
//!
//! The one thing to know: peers send frames to the MAC address that the lease names, so keeping it
//! is worth more than anything; a device's address can be changed in place without anybody
//! noticing.

use std::collections::BTreeSet;

use flannel_core::Lease;
use flannel_core::address::{Dual, Family};
use flannel_core::lease::LeaseAttrs;
use flannel_core::object::MacAddr;

/// The VTEP's MAC address in the backend data of one family, if it can be read.
pub(crate) fn published(attrs: &LeaseAttrs, family: Family) -> Option<MacAddr> {
    crate::plan::vtep_mac(attrs.preferred.data[family].as_deref()?).ok()
}

/// The MAC addresses that other nodes publish; a lease with one of our public addresses is our own.
pub(crate) fn taken<'a>(
    leases: impl Iterator<Item = &'a Lease>,
    public: &Dual<std::net::IpAddr>,
) -> BTreeSet<MacAddr> {
    let ours = |lease: &Lease| {
        public
            .values()
            .any(|ours| lease.attrs.preferred.public.values().any(|theirs| ours == theirs))
    };
    let macs = |lease: &'a Lease| {
        Family::BOTH.into_iter().filter_map(|family| published(&lease.attrs, family))
    };
    leases.filter(|lease| !ours(lease)).flat_map(macs).collect()
}

/// The first that no other node uses: what we published, what the device has, then addresses
/// derived from `seed`, which is stable and differs between nodes.
pub(crate) fn choose(
    published: Option<MacAddr>,
    device: Option<MacAddr>,
    seed: &str,
    taken: &BTreeSet<MacAddr>,
) -> MacAddr {
    let known = published.into_iter().chain(device);
    let derived = (0u64..).map(|salt| derive(&format!("{seed} {salt}")));
    let mut candidates =
        known.chain(derived).filter(|mac| mac.is_unicast() && !taken.contains(mac));
    candidates.next().expect("the derived addresses do not end, and differ")
}

/// FNV-1a: small, stable for ever, and good enough to tell nodes apart; clashes are resolved by the
/// salt.
fn derive(text: &str) -> MacAddr {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let [_, _, bytes @ ..] = hash.to_be_bytes();
    MacAddr::local(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_what_peers_know_unless_another_node_uses_it() {
        let [a, b] = [1, 2].map(|n| MacAddr::local([n; 6]));
        let none = BTreeSet::new();
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
}
