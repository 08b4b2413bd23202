//! Conditions of leases that an operator should know.

use std::net::IpAddr;

use crate::backend::Advice;
use crate::lease::Subnets;

/// A condition of leases that is not an error. `Display` is a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum Advisory {
    /// Several nodes have one public address. This is correct only behind some kinds of NAT.
    #[error(
        "{nodes} nodes share the public address {address}{}",
        if *own { ", this one among them" } else { "" }
    )]
    SharedAddress {
        /// The number of nodes.
        nodes: u32,
        /// The address.
        address: IpAddr,
        /// Whether this node is one of them.
        own: bool,
    },
    /// Something is wrong with a lease that a plan accepts.
    #[error("the lease {subnets}: {advice}")]
    OfLease {
        /// The lease.
        subnets: Subnets,
        /// What is wrong.
        advice: Advice,
    },
}
