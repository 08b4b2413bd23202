//! The choice of a VTEP's MAC address. Peers send frames to the address in the lease, so it is kept
//! if possible. If it changes, the kernel deletes the neighbours of the device, and they are put
//! again.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, LeaseSet};
use flannel_core::object::MacAddr;
use flannel_core::{Lease, Subnets};

/// The VTEP's MAC address in the backend data of one family; `None` if absent or malformed.
pub(crate) fn published(attrs: &LeaseAttrs, family: Family) -> Option<MacAddr> {
    let ours = attrs.offers().find(|offer| offer.kind == crate::plan::TYPE)?;
    crate::plan::vtep_mac(ours.data[family].as_deref()?).ok()
}

/// The MAC addresses of other nodes. A lease with the subnets `own`, or with one of our `public`
/// addresses, is ours.
pub(crate) fn taken(
    leases: &LeaseSet,
    own: Option<Subnets>,
    public: &Dual<IpAddr>,
) -> BTreeSet<MacAddr> {
    let is_ours = |lease: &Lease| {
        let mut theirs = lease.attrs.preferred.public.values();
        Some(lease.subnets) == own || theirs.any(|theirs| public.values().any(|ip| ip == theirs))
    };
    let others = leases.iter().filter(|lease| !is_ours(lease));
    let both = others.flat_map(|lease| Family::BOTH.map(|family| published(&lease.attrs, family)));
    both.flatten().collect()
}

/// The first address that no other node uses: the published one, that of the device, then those
/// derived from `seed`, which is stable and differs between nodes.
pub(crate) fn choose(
    published: Option<MacAddr>,
    device: Option<MacAddr>,
    seed: &str,
    taken: &BTreeSet<MacAddr>,
) -> MacAddr {
    let known = published.into_iter().chain(device);
    let derived = (0u64..).map(|salt| derive(&format!("{seed} {salt}")));
    let free = known.chain(derived).find(|mac| mac.is_unicast() && !taken.contains(mac));
    free.expect("the derived addresses do not end, and differ")
}

/// FNV-1a: the same in every version.
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
    fn a_published_mac_is_kept_unless_another_node_uses_it() {
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
