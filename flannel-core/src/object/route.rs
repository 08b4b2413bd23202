//! Routes.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, ObjectValue};
use crate::address::Subnet;

/// A route in the main table with the default metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The destination.
    pub dst: Subnet,
    /// What happens to packets.
    pub via: Via,
    /// The route's own MTU in bytes; `None`: the device's.
    pub mtu: Option<u32>,
}

/// What a route does with packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Via {
    /// Sends them to a gateway.
    Gateway {
        /// The gateway.
        gateway: IpAddr,
        /// The device.
        link: LinkName,
        /// The kernel takes the gateway to be on the link, without a look at the routing table.
        onlink: bool,
    },
    /// Sends them to a device, the destination itself being the neighbour (scope link).
    Link(LinkName),
    /// Sends them where a nexthop object says.
    Nexthop(u32),
    /// Drops them silently.
    Blackhole,
    /// Drops silently the packets that no other route to the same destination takes: a blackhole
    /// with the largest metric. It may be beside a route that another program has there, such as a
    /// bridge's. Ours are one or the other, never both.
    LastResort,
}

impl ObjectValue for Route {
    const NAME: &'static str = "route";

    /// A route by a nexthop object names no device.
    fn device(&self) -> Option<LinkName> {
        match self.via {
            Via::Gateway { link, .. } | Via::Link(link) => Some(link),
            Via::Nexthop(_) | Via::Blackhole | Via::LastResort => None,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dst, via, mtu } = self;
        match via {
            Via::Gateway { gateway, link, onlink } => {
                write!(f, "route {dst} via {gateway} dev {link}")?;
                f.write_str(if *onlink { " onlink" } else { "" })?;
            }
            Via::Link(link) => write!(f, "route {dst} dev {link} scope link")?,
            Via::Nexthop(id) => write!(f, "route {dst} nhid {id}")?,
            Via::Blackhole => write!(f, "route blackhole {dst}")?,
            Via::LastResort => write!(f, "route blackhole {dst} metric {}", u32::MAX)?,
        }
        mtu.map_or(Ok(()), |mtu| write!(f, " mtu {mtu}"))
    }
}
