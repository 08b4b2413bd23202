//! What is in order but worth knowing. The one thing to know: a remark stands as long as the leases that gave rise to
//! it do.

use std::collections::BTreeMap;
use std::net::IpAddr;

use foldhash::{HashMap, HashMapExt, HashSet};

use flannel_core::address::Dual;
use flannel_core::status::Listing;
use flannel_core::{Lease, Subnets};

/// Public addresses that several nodes use, this one included (which is in order only behind some kinds of NAT), and
/// what plans remarked.
#[derive(Debug)]
pub(crate) struct Advisories {
    /// This node's own public addresses.
    own: Dual<IpAddr>,
    /// The public addresses that nodes have.
    publics: HashSet<IpAddr>,
    /// How many nodes have those that several have.
    shared: HashMap<IpAddr, u32>,
    /// What plans remarked.
    planned: BTreeMap<Subnets, Vec<String>>,
    listing: Listing<String>,
}

impl Advisories {
    pub(crate) fn new(own: &Dual<IpAddr>) -> Self {
        let publics = own.values().copied().collect();
        Self {
            own: *own,
            publics,
            shared: HashMap::new(),
            planned: BTreeMap::new(),
            listing: Listing::default(),
        }
    }

    pub(crate) fn listing(&self) -> &Listing<String> {
        &self.listing
    }

    /// A peer is there, of which its plan remarked something or nothing.
    pub(crate) fn joined(&mut self, lease: &Lease, remarks: Vec<String>) {
        for address in lease.attrs.preferred.public.values() {
            self.count(*address, true);
        }
        if !remarks.is_empty() {
            for remark in &remarks {
                self.listing.insert(of_lease(lease.subnets, remark), ());
            }
            self.planned.insert(lease.subnets, remarks);
        }
    }

    /// A peer is gone.
    pub(crate) fn left(&mut self, lease: &Lease) {
        for address in lease.attrs.preferred.public.values() {
            self.count(*address, false);
        }
        for remark in self.planned.remove(&lease.subnets).into_iter().flatten() {
            self.listing.remove(&of_lease(lease.subnets, &remark));
        }
    }

    /// Counts one more or one less node with a public address, and remarks on it if it is not alone.
    fn count(&mut self, address: IpAddr, more: bool) {
        let once = || u32::from(self.publics.contains(&address));
        let before = self.shared.get(&address).copied().unwrap_or_else(once);
        let now = if more { before + 1 } else { before.saturating_sub(1) };
        match now {
            0 => drop(self.publics.remove(&address)),
            1 => drop((self.publics.insert(address), self.shared.remove(&address))),
            _ => drop(self.shared.insert(address, now)),
        }
        let own = self.own.values().any(|own| *own == address);
        let own = if own { ", this one among them" } else { "" };
        let remark = |count: u32| format!("{count} nodes share the public address {address}{own}");
        if before > 1 {
            self.listing.remove(&remark(before));
        }
        if now > 1 {
            self.listing.insert(remark(now), ());
        }
    }
}

fn of_lease(subnets: Subnets, remark: &str) -> String {
    format!("the lease {subnets}: {remark}")
}
