//! What is in order but worth knowing. The one thing to know: a remark stands as long as the leases that gave rise to
//! it do.

use std::collections::BTreeMap;
use std::net::IpAddr;

use foldhash::HashMap;

use crate::address::Dual;
use crate::lease::{Lease, Subnets};
use crate::listing::Listing;

/// Public addresses that several nodes use, this one included (which is in order only behind some kinds of NAT), and
/// what plans remarked.
#[derive(Debug)]
pub(crate) struct Remarks {
    /// This node's own public addresses.
    own: Dual<IpAddr>,
    /// How many nodes have each public address.
    publics: HashMap<IpAddr, u32>,
    /// What plans remarked.
    planned: BTreeMap<Subnets, Vec<String>>,
    listing: Listing<String>,
}

impl Remarks {
    pub(crate) fn new(own: &Dual<IpAddr>) -> Self {
        let publics = own.values().map(|address| (*address, 1)).collect();
        Self { own: *own, publics, planned: BTreeMap::new(), listing: Listing::default() }
    }

    pub(crate) fn listing(&self) -> &Listing<String> {
        &self.listing
    }

    /// A peer is there, of which its plan remarked something or nothing.
    pub(crate) fn joined(&mut self, lease: &Lease, remarks: Vec<String>) {
        for address in lease.attrs.public.values() {
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
        for address in lease.attrs.public.values() {
            self.count(*address, false);
        }
        for remark in self.planned.remove(&lease.subnets).into_iter().flatten() {
            self.listing.remove(&of_lease(lease.subnets, &remark));
        }
    }

    /// Counts one more or one less node with a public address, and remarks on it if it is not alone.
    fn count(&mut self, address: IpAddr, more: bool) {
        let count = self.publics.entry(address).or_insert(0);
        let before = *count;
        *count = if more { before + 1 } else { before.saturating_sub(1) };
        let now = *count;
        if now == 0 {
            self.publics.remove(&address);
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
