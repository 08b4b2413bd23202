//! Leases: the subnets of each node, and how peers reach the node.

mod attrs;
mod set;
mod subnets;

use std::fmt;
use std::time::SystemTime;

pub use attrs::{Endpoint, LARGEST_VALUE, LeaseAttrs, MOST_OFFERS, Offer, TooLarge, UnusedOffers};
pub use set::{LeaseSet, Origin, View};
pub use subnets::Subnets;

/// A version of a key or of a store, or 0 if it is not known. In a store that orders its changes,
/// such as etcd, it grows with each change. In other stores, such as a directory, revisions can
/// only be compared for equality.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The lease of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The subnets of the node, which identify the lease.
    pub subnets: Subnets,
    /// How peers reach the node.
    pub attrs: LeaseAttrs,
    /// The end by the wall clock of this host. `None` if the lease has no end, as a reservation, or
    /// if its end is not known, as for leases of peers.
    pub expires: Option<SystemTime>,
    /// A number that orders leases by their creation: in etcd the revision of the store, in
    /// Kubernetes the creation time of the node. It is 0 for every lease in a directory. See
    /// [`Lease::precedence`].
    pub since: Revision,
    /// The version of the lease in the store, for conditional writes.
    pub revision: Revision,
}

impl Lease {
    /// Decides between leases that clash: every node accepts the lease with the smallest
    /// precedence. That is the lease that was created first, or if `since` is equal, the lease with
    /// the smallest key.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}
