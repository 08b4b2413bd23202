//! Advisories: conditions of leases that an operator should know. An advisory exists as long as the
//! leases that it is about.

use std::collections::BTreeMap;
use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt, HashSet};

use flannel_core::address::Dual;
use flannel_core::backend::Advice;
use flannel_core::status::{Advisory, SortedMap};
use flannel_core::{Lease, Subnets};

/// Public addresses that several nodes use, this node included (correct only behind some kinds of
/// NAT), and the advisories of plans.
#[derive(Debug)]
pub(crate) struct Advisories {
    /// This node's own public addresses.
    own: Dual<IpAddr>,
    /// The public addresses of all nodes.
    publics: HashSet<IpAddr>,
    /// The number of nodes for each address that several nodes have.
    shared: HashMap<IpAddr, u32>,
    /// The advice of plans, by lease.
    planned: BTreeMap<Subnets, Vec<Advice>>,
    sorted: SortedMap<Advisory>,
}

impl Advisories {
    pub(crate) fn new(own: &Dual<IpAddr>) -> Self {
        let publics = own.values().copied().collect();
        Self {
            own: *own,
            publics,
            shared: HashMap::new(),
            planned: BTreeMap::new(),
            sorted: SortedMap::default(),
        }
    }

    pub(crate) fn sorted(&self) -> &SortedMap<Advisory> {
        &self.sorted
    }

    /// Takes in a new peer with the advice of its plan.
    pub(crate) fn joined(&mut self, lease: &Lease, advice: Vec<Advice>) {
        for address in lease.attrs.preferred.public.values() {
            self.count(*address, true);
        }
        if !advice.is_empty() {
            for one in &advice {
                self.sorted.insert(of_lease(lease.subnets, one.clone()), ());
            }
            self.planned.insert(lease.subnets, advice);
        }
    }

    /// Forgets a peer that left.
    pub(crate) fn left(&mut self, lease: &Lease) {
        for address in lease.attrs.preferred.public.values() {
            self.count(*address, false);
        }
        for advice in self.planned.remove(&lease.subnets).into_iter().flatten() {
            self.sorted.remove(&of_lease(lease.subnets, advice));
        }
    }

    /// Counts one more node with a public address, or one less. There is an advisory if several
    /// nodes have it.
    fn count(&mut self, address: IpAddr, more: bool) {
        if more && self.publics.insert(address) {
            return;
        }
        let before = self.shared.get(&address).copied().unwrap_or(1);
        let now = if more { before + 1 } else { before.saturating_sub(1) };
        match now {
            0 => drop(self.publics.remove(&address)),
            1 => drop(self.shared.remove(&address)),
            _ => drop(self.shared.insert(address, now)),
        }
        let own = self.own.values().any(|own| *own == address);
        let advisory = |nodes| Advisory::SharedAddress { nodes, address, own };
        if before > 1 {
            self.sorted.remove(&advisory(before));
        }
        if now > 1 {
            self.sorted.insert(advisory(now), ());
        }
    }
}

fn of_lease(subnets: Subnets, advice: Advice) -> Advisory {
    Advisory::OfLease { subnets, advice }
}
