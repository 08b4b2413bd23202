//! Neighbours.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, MacAddr};

/// A permanent neighbour entry: `address` has the MAC address `mac`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neigh {
    /// The device.
    pub link: LinkName,
    /// The IP address of the neighbour.
    pub address: IpAddr,
    /// The MAC address of the neighbour.
    pub mac: MacAddr,
}

impl fmt::Display for Neigh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "neigh {} lladdr {} dev {}", self.address, self.mac, self.link)
    }
}
