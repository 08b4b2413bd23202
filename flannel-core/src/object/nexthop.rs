//! Nexthop objects.

use std::fmt;
use std::net::IpAddr;

use super::LinkName;

/// A nexthop object (kernel 5.3 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nexthop {
    /// The id in the network namespace, not 0.
    pub id: u32,
    /// The device.
    pub link: LinkName,
    /// The gateway.
    pub gateway: IpAddr,
    /// Whether the kernel takes the gateway as on the link, without a route to it.
    pub onlink: bool,
}

impl fmt::Display for Nexthop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, link, gateway, onlink } = self;
        write!(f, "nexthop id {id} via {gateway} dev {link}")?;
        f.write_str(if *onlink { " onlink" } else { "" })
    }
}
