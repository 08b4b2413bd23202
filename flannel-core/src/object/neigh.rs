//! Neighbours.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, MacAddr, ObjectValue};

/// A permanent neighbour entry: `address` is at `mac`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neigh {
    /// The device.
    pub link: LinkName,
    /// The neighbour.
    pub address: IpAddr,
    /// Its MAC address.
    pub mac: MacAddr,
}

impl ObjectValue for Neigh {
    const NAME: &'static str = "neigh";

    fn device(&self) -> Option<LinkName> {
        Some(self.link)
    }
}

impl fmt::Display for Neigh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "neigh {} lladdr {} dev {}", self.address, self.mac, self.link)
    }
}
