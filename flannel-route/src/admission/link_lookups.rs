//! The lookups of plans, with the kernel's answers. A lookup is kept as long as a peer's plan uses
//! its answer. If an answer changes, only these peers are planned again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::admission::peer_index::Id;
use flannel_core::Subnet;
use flannel_core::backend::{Answer, Reach};

/// The lookups whose answers the plans of peers use.
#[derive(Debug, Default)]
pub(crate) struct LinkLookups {
    lookups: BTreeMap<IpAddr, LinkLookup>,
}

#[derive(Debug, Default)]
struct LinkLookup {
    /// The answer that all peers got; `None` if some got another one.
    answer: Option<Reach>,
    asked_by: BTreeSet<Id>,
}

impl LinkLookups {
    /// Whether a plan has looked up an address inside `subnet`.
    pub(crate) fn are_under(&self, subnet: Subnet) -> bool {
        self.lookups.range(subnet.base()..=subnet.last()).next().is_some()
    }

    /// The answer for an address; `None` if no plan looked it up, or the plans got different
    /// answers.
    pub(crate) fn answer(&self, address: &IpAddr) -> Option<Reach> {
        self.lookups.get(address)?.answer
    }

    /// Notes that a peer's plan looked up an address.
    pub(crate) fn asked(&mut self, address: IpAddr, answer: Option<Reach>, by: Id) {
        let lookup = self.lookups.entry(address).or_default();
        let first = lookup.asked_by.is_empty();
        lookup.answer = answer.filter(|answer| first || lookup.answer == Some(*answer));
        lookup.asked_by.insert(by);
    }

    /// Notes that a peer no longer uses the answer for an address.
    pub(crate) fn forget(&mut self, address: &IpAddr, by: Id) {
        let Some(lookup) = self.lookups.get_mut(address) else { return };
        lookup.asked_by.remove(&by);
        if lookup.asked_by.is_empty() {
            self.lookups.remove(address);
        }
    }

    /// Repeats the lookups of addresses inside `under` (`None`: of all addresses). Returns the
    /// peers whose plans got another answer.
    pub(crate) fn recheck(&mut self, under: Option<Subnet>, on_link: &Answer<'_>) -> BTreeSet<Id> {
        let mut again = BTreeSet::new();
        let lookups: Box<dyn Iterator<Item = (&IpAddr, &mut LinkLookup)>> = match under {
            Some(subnet) => Box::new(self.lookups.range_mut(subnet.base()..=subnet.last())),
            None => Box::new(self.lookups.iter_mut()),
        };
        for (address, lookup) in lookups {
            // If the kernel cannot answer, its last answer holds.
            let Some(now) = on_link(*address) else { continue };
            if lookup.answer != Some(now) {
                lookup.answer = Some(now);
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
    fn a_peer_with_the_right_answer_is_not_planned_again() {
        let address: IpAddr = [192, 0, 2, 7].into();
        let eth0 = Reach::Direct("eth0".parse().unwrap());
        let on_eth0 = |_| Some(eth0);
        let mut lookups = LinkLookups::default();
        lookups.asked(address, Some(eth0), 1);
        lookups.asked(address, Some(eth0), 2);
        assert_eq!(lookups.answer(&address), Some(eth0));
        assert_eq!(lookups.recheck(None, &on_eth0), BTreeSet::new());
        // One peer got another answer or none. The lookup does not record which peer.
        for answer in [Some(Reach::NotDirect), None] {
            lookups.asked(address, answer, 3);
            assert_eq!(lookups.answer(&address), None);
            assert_eq!(
                lookups.recheck(None, &|_| None),
                BTreeSet::new(),
                "the kernel has no answer"
            );
            assert_eq!(lookups.recheck(None, &on_eth0), BTreeSet::from([1, 2, 3]));
            assert_eq!(lookups.answer(&address), Some(eth0));
        }
        for id in 1..=3 {
            assert!(lookups.are_under(Subnet::host(address)));
            lookups.forget(&address, id);
        }
        assert!(!lookups.are_under(Subnet::host(address)));
    }
}
