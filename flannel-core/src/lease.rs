//! Leases: the subnets of each node, and how peers reach the node.

mod attrs;
mod set;
mod subnets;

use std::fmt;
use std::time::SystemTime;

pub use attrs::{Endpoint, LeaseAttrs, Offer};
pub use set::{LeaseSet, Origin, View};
pub use subnets::Subnets;

/// A version of a key or of a store; 0: not known. It grows with each change in a store that orders
/// changes (etcd), and only differs between versions in others (a directory).
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
    /// Its identity.
    pub subnets: Subnets,
    /// How to reach the node.
    pub attrs: LeaseAttrs,
    /// Its end by the store's clock. `None`: no end (a reservation), or not known (all peers).
    pub expires: Option<SystemTime>,
    /// The store's revision at its creation; see [`Lease::precedence`].
    pub since: Revision,
    /// The store's revision at its last change, for a compare-and-swap.
    pub revision: Revision,
}

impl Lease {
    /// Of conflicting leases, all nodes accept the one with the smallest precedence: the first that
    /// was created, else the one with the smallest key.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}
