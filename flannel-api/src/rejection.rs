//! Why a lease is rejected.

use serde::{Deserialize, Serialize};

/// Why a lease is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectionReport {
    /// The reason, for programs.
    #[serde(flatten)]
    pub cause: RejectionCause,
    /// The reason, for people: a sentence without a full stop.
    pub text: String,
}

/// The cause of a rejection. In JSON the field `cause` has the name of the variant, and the fields
/// of the variant are beside it. Leases are named by their keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
#[non_exhaustive]
pub enum RejectionCause {
    /// A subnet lies outside the pod network.
    Outside {
        /// The subnet.
        subnet: String,
        /// The pod network.
        network: String,
    },
    /// It has no subnet in a family that the network config enables.
    NoEnabledFamily,
    /// It overlaps this node's own lease.
    OverlapsOwn {
        /// This node's lease.
        lease: String,
    },
    /// It overlaps an earlier lease.
    Overlaps {
        /// The earlier lease.
        lease: String,
        /// The node of that lease.
        holder: String,
    },
    /// It defines a kernel object otherwise than an earlier lease.
    Contradicts {
        /// The object.
        object: String,
        /// The earlier lease.
        lease: String,
        /// The node of that lease.
        holder: String,
    },
    /// It defines a kernel object that belongs to another lease.
    BelongsToAnother {
        /// The object.
        object: String,
        /// The other lease.
        lease: String,
        /// The node of that lease.
        holder: String,
    },
    /// It defines a kernel object of this node.
    ContradictsOwn {
        /// The object.
        object: String,
    },
    /// Its public address is an address of this node.
    OwnAddress {
        /// The address.
        address: String,
    },
    /// Its backend data is malformed.
    BadData,
    /// The backend rejects it.
    #[serde(other)]
    Rejected,
}
