//! The results of the lookups that plans made. A result is kept as long as the plan of a peer uses
//! it. If a result changes, only the peers that use it are planned again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::admission::peer_index::PeerId;
use crate::admission::stale_lookups::LookupScope;
use flannel_core::Subnet;
use flannel_core::backend::{Reach, ReachLookup};

/// The lookups whose results the plans of peers use.
#[derive(Debug, Default)]
pub(crate) struct LookupResults {
    by_address: BTreeMap<IpAddr, LookupResult>,
}

#[derive(Debug, Default)]
struct LookupResult {
    /// The result that all peers got, or `None` if some peers got another one.
    reach: Option<Reach>,
    used_by: BTreeSet<PeerId>,
}

impl LookupResults {
    /// Whether a plan has looked up an address inside `subnet`.
    pub(crate) fn has_any_under(&self, subnet: Subnet) -> bool {
        self.by_address.range(subnet.base()..=subnet.last()).next().is_some()
    }

    /// The result for an address, or `None` if no plan looked it up, or plans got different
    /// results.
    pub(crate) fn get(&self, address: &IpAddr) -> Option<Reach> {
        self.by_address.get(address)?.reach
    }

    /// Notes that the plan of a peer looked up an address. `reach` is `None` if the lookup failed.
    pub(crate) fn note(&mut self, address: IpAddr, reach: Option<Reach>, user: PeerId) {
        let result = self.by_address.entry(address).or_default();
        let is_first = result.used_by.is_empty();
        result.reach = reach.filter(|reach| is_first || result.reach == Some(*reach));
        result.used_by.insert(user);
    }

    /// Notes that a peer no longer uses the result for an address.
    pub(crate) fn forget(&mut self, address: &IpAddr, user: PeerId) {
        let Some(result) = self.by_address.get_mut(address) else { return };
        result.used_by.remove(&user);
        if result.used_by.is_empty() {
            self.by_address.remove(address);
        }
    }

    /// Repeats the lookups in `scope`. Returns the peers whose plans got another result.
    pub(crate) fn recheck(
        &mut self,
        scope: LookupScope,
        on_link: &ReachLookup<'_>,
    ) -> BTreeSet<PeerId> {
        let mut again = BTreeSet::new();
        let results: Box<dyn Iterator<Item = (&IpAddr, &mut LookupResult)>> = match scope {
            LookupScope::Under(subnet) => {
                Box::new(self.by_address.range_mut(subnet.base()..=subnet.last()))
            }
            LookupScope::All => Box::new(self.by_address.iter_mut()),
        };
        for (address, result) in results {
            // If the lookup fails, its last result holds.
            let Some(now) = on_link(*address) else { continue };
            if result.reach != Some(now) {
                result.reach = Some(now);
                again.extend(result.used_by.iter().copied());
            }
        }
        again
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_with_the_right_result_is_not_planned_again() {
        let address: IpAddr = [192, 0, 2, 7].into();
        let eth0 = Reach::Direct("eth0".parse().unwrap());
        let on_eth0 = |_| Some(eth0);
        let all = LookupScope::All;
        let mut results = LookupResults::default();
        results.note(address, Some(eth0), 1);
        results.note(address, Some(eth0), 2);
        assert_eq!(results.get(&address), Some(eth0));
        assert_eq!(results.recheck(all, &on_eth0), BTreeSet::new());
        // The third peer got another result or none. The index does not record which peer got it.
        for reach in [Some(Reach::NotDirect), None] {
            results.note(address, reach, 3);
            assert_eq!(results.get(&address), None);
            assert_eq!(results.recheck(all, &|_| None), BTreeSet::new(), "the lookup fails");
            assert_eq!(results.recheck(all, &on_eth0), BTreeSet::from([1, 2, 3]));
            assert_eq!(results.get(&address), Some(eth0));
        }
        for id in 1..=3 {
            assert!(results.has_any_under(Subnet::host(address)));
            results.forget(&address, id);
        }
        assert!(!results.has_any_under(Subnet::host(address)));
    }
}
