//! Reasons to reject a lease.

use std::net::IpAddr;

use crate::address::Subnet;
use crate::json::FieldError;
use crate::lease::Subnets;
use crate::object::Key;

/// Why a lease is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// A subnet lies outside the pod network.
    #[error("{subnet} lies outside the pod network {network}")]
    Outside {
        /// The subnet of the lease.
        subnet: Subnet,
        /// The pod network of this family.
        network: Subnet,
    },
    /// It has no subnet in any family that the network config enables.
    #[error("it has no subnet in a family that the network config enables")]
    NoEnabledFamily,
    /// It overlaps this node's own lease, which this node prefers.
    #[error("it overlaps this node's own lease {0}")]
    OverlapsOwn(Subnets),
    /// It overlaps the lease of another peer, which was created earlier.
    #[error("it overlaps the earlier lease {earlier} of {holder}")]
    Overlaps {
        /// The lease that was created earlier.
        earlier: Subnets,
        /// The node of that lease, as text.
        holder: String,
    },
    /// It defines a kernel object in another way than the lease of another peer, which was created
    /// earlier.
    #[error("{key} is defined otherwise by the earlier lease {earlier} of {holder}")]
    Contradicts {
        /// The key of the object.
        key: Key,
        /// The lease that was created earlier.
        earlier: Subnets,
        /// The node of that lease, as text.
        holder: String,
    },
    /// It defines a kernel object of another lease, which proves that the object is its own
    /// ([`Blueprint::proof`](crate::backend::Blueprint::proof)): a MAC address is derived from the
    /// public address of that lease, or that lease is signed with a WireGuard key. It does not
    /// matter which lease was created first.
    #[error("{key} belongs to the lease {owner} of {holder}, which proves it")]
    BelongsToAnother {
        /// The object.
        key: Key,
        /// The lease of the other peer.
        owner: Subnets,
        /// The node of that lease, as text.
        holder: String,
    },
    /// It defines a kernel object that this node needs for itself. The value is the key.
    #[error("{0} is this node's own")]
    ContradictsOwn(Key),
    /// Its backend data is malformed.
    #[error(transparent)]
    BadData(#[from] FieldError),
    /// Its public address belongs to this node. Tunnel packets to it would come back.
    #[error("its public address {0} is this node's own: its tunnel packets would come back here")]
    OwnAddress(IpAddr),
    /// The plan of the backend rejects it. The value is the reason, as a sentence without a full
    /// stop.
    #[error("{0}")]
    Rejected(String),
}
