//! Leases: the subnets of each node, and how peers reach the node.

mod attrs;
mod set;
mod subnets;

use std::fmt;
use std::time::SystemTime;

pub use attrs::{Endpoint, LARGEST_VALUE, LeaseAttrs, MOST_OFFERS, Offer, TooLarge, UnusedOffers};
pub use set::{LeaseSet, Origin, View};
pub use subnets::Subnets;

/// A version of a key or of a store; 0 if it is not known. In a store that orders its changes
/// (etcd) it grows with each change. In other stores (a directory) two versions only differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One node's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The subnets of the node, which identify the lease.
    pub subnets: Subnets,
    /// How peers reach the node.
    pub attrs: LeaseAttrs,
    /// The end by the wall clock of this host. `None`: the lease has no end (a reservation), or its
    /// end is not known (leases of peers).
    pub expires: Option<SystemTime>,
    /// A number that orders leases by creation: the store's revision (etcd) or the creation time of
    /// the node (Kubernetes). 0 for every lease in a directory. See [`Lease::precedence`].
    pub since: Revision,
    /// The version of the lease in the store, for a compare-and-swap.
    pub revision: Revision,
}

impl Lease {
    /// Of leases that clash, every node accepts the one with the smallest precedence: the lease
    /// that was created first. If `since` is equal, it is the one with the smallest key text.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}
