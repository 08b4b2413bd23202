//! Nexthop objects.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, ObjectValue};

/// A nexthop object (kernel 5.3 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nexthop {
    /// Not 0.
    pub id: u32,
    /// The device.
    pub link: LinkName,
    /// The gateway.
    pub gateway: IpAddr,
    /// The kernel takes the gateway to be on the link, without a look at the routing table.
    pub onlink: bool,
}

impl ObjectValue for Nexthop {
    const NAME: &'static str = "nexthop";

    fn device(&self) -> Option<LinkName> {
        Some(self.link)
    }
}

impl fmt::Display for Nexthop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, link, gateway, onlink } = self;
        write!(f, "nexthop id {id} via {gateway} dev {link}")?;
        f.write_str(if *onlink { " onlink" } else { "" })
    }
}
