//! Routes.

use std::fmt;
use std::net::IpAddr;

use super::LinkName;
use crate::address::Subnet;

/// A route in the main table without a TOS. It has the default metric, except for
/// [`Via::LastResort`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The destination.
    pub dst: Subnet,
    /// The next hop, or what happens to packets instead.
    pub via: Via,
    /// The MTU of the route in bytes, or `None` if packets may be as large as the MTU of the
    /// device. A `u16` is enough, because an IP packet has at most 65535 bytes.
    pub mtu: Option<u16>,
}

/// The next hop of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Via {
    /// A gateway.
    Gateway {
        /// The address of the gateway.
        gateway: IpAddr,
        /// The device.
        link: LinkName,
        /// Whether the kernel takes the gateway as on the link, without a route to it.
        onlink: bool,
    },
    /// The destination itself, on the link of this device (scope link).
    Link(LinkName),
    /// The nexthop object with this id.
    Nexthop(u32),
    /// A blackhole: packets are dropped without an answer.
    Blackhole,
    /// A blackhole with the largest metric: packets are dropped without an answer, unless another
    /// route to the same destination exists, such as the route of a bridge.
    LastResort,
}

impl Via {
    /// The device by which packets leave. `None` for a nexthop object, whose device is not known
    /// here, and for a blackhole.
    pub(super) fn link(&self) -> Option<LinkName> {
        match self {
            Self::Gateway { link, .. } | Self::Link(link) => Some(*link),
            Self::Nexthop(_) | Self::Blackhole | Self::LastResort => None,
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
