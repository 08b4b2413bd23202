//! Leases: the subnets of each node, and how peers reach the node.
//!
//! Leases are a set and not a stream of events. [`LeaseSet`] is cheap to clone and returns the
//! changes since an older one.

mod attrs;
mod set;
mod subnets;

use std::fmt;
use std::time::SystemTime;

pub use attrs::{Endpoint, LeaseAttrs, Offer};
pub use set::{LeaseSet, Origin, View};
pub use subnets::{KeyError, Subnets};

/// A version of a key or of a store. It grows with each change if the store orders changes (etcd).
/// Otherwise (a directory) it only differs between versions. 0: not known.
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
    /// When the store deletes it, by the store's clock. `None`: never (a reservation), or not
    /// known, as for the lease of every peer.
    pub expires: Option<SystemTime>,
    /// When it was created. Of two leases that conflict, the one with the smaller `since` is
    /// accepted.
    pub since: Revision,
    /// When it was last written, for a compare-and-swap.
    pub revision: Revision,
}

impl Lease {
    /// The endpoints of the preferred offer.
    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint<'_>> {
        self.attrs.preferred.endpoints(&self.subnets)
    }

    /// The key of the order by which all nodes accept one of two conflicting leases: the earlier
    /// created one first, then the one with the smaller key text.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}
