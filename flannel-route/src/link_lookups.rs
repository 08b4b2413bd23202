//! What plans asked of the kernel, and what they were told. The one thing to know: a lookup is kept as long as a peer's
//! plan relies on it, so that a changed answer plans those peers anew and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::peer_index::Id;
use flannel_core::Subnet;
use flannel_core::backend::Answer;
use flannel_core::object::LinkName;

/// The lookups that peers' plans rely on.
#[derive(Debug, Default)]
pub(crate) struct LinkLookups {
    lookups: BTreeMap<IpAddr, LinkLookup>,
}

#[derive(Debug, Default)]
struct LinkLookup {
    /// What all who asked were told; `None` if not all were told the same.
    told: Option<Option<LinkName>>,
    asked_by: BTreeSet<Id>,
}

impl LinkLookups {
    /// Some plan asked about an address inside `subnet`.
    pub(crate) fn are_under(&self, subnet: Subnet) -> bool {
        self.lookups.range(subnet.base()..=subnet.last()).next().is_some()
    }

    /// What all who asked about an address were told; `None` if nobody asked, or not all were told the same.
    pub(crate) fn told(&self, address: &IpAddr) -> Option<Option<LinkName>> {
        self.lookups.get(address)?.told
    }

    /// A peer's plan asked about an address.
    pub(crate) fn asked(&mut self, address: IpAddr, told: Option<Option<LinkName>>, by: Id) {
        let lookup = self.lookups.entry(address).or_default();
        let first = lookup.asked_by.is_empty();
        lookup.told = told.filter(|told| first || lookup.told == Some(*told));
        lookup.asked_by.insert(by);
    }

    /// A peer no longer relies on what is known of an address.
    pub(crate) fn forget(&mut self, address: &IpAddr, by: Id) {
        let Some(lookup) = self.lookups.get_mut(address) else { return };
        lookup.asked_by.remove(&by);
        if lookup.asked_by.is_empty() {
            self.lookups.remove(address);
        }
    }

    /// Asks again about addresses inside `under` (`None`: all); the peers whose plans were told otherwise.
    pub(crate) fn recheck(&mut self, under: Option<Subnet>, on_link: &Answer<'_>) -> BTreeSet<Id> {
        let mut again = BTreeSet::new();
        let lookups: Box<dyn Iterator<Item = (&IpAddr, &mut LinkLookup)>> = match under {
            Some(subnet) => Box::new(self.lookups.range_mut(subnet.base()..=subnet.last())),
            None => Box::new(self.lookups.iter_mut()),
        };
        for (address, lookup) in lookups {
            // Where the kernel cannot say, what it said last holds.
            let Some(now) = on_link(*address) else { continue };
            if lookup.told != Some(now) {
                lookup.told = Some(now);
                again.extend(lookup.asked_by.iter().copied());
            }
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_told_what_holds_is_not_planned_anew() {
        let address: IpAddr = [192, 0, 2, 7].into();
        let eth0: LinkName = "eth0".parse().unwrap();
        let on_eth0 = |_| Some(Some(eth0));
        let mut lookups = LinkLookups::default();
        lookups.asked(address, Some(Some(eth0)), 1);
        lookups.asked(address, Some(Some(eth0)), 2);
        assert_eq!(lookups.told(&address), Some(Some(eth0)));
        assert_eq!(lookups.recheck(None, &on_eth0), BTreeSet::new());
        // One was told otherwise, or nothing: it is not known which.
        for told in [Some(None), None] {
            lookups.asked(address, told, 3);
            assert_eq!(lookups.told(&address), None);
            assert_eq!(lookups.recheck(None, &|_| None), BTreeSet::new(), "the kernel cannot say");
            assert_eq!(lookups.recheck(None, &on_eth0), BTreeSet::from([1, 2, 3]));
            assert_eq!(lookups.told(&address), Some(Some(eth0)));
        }
        for id in 1..=3 {
            assert!(lookups.are_under(Subnet::host(address)));
            lookups.forget(&address, id);
        }
        assert!(!lookups.are_under(Subnet::host(address)));
    }
}
