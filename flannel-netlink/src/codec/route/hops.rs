//! The next hops of a route.

use std::net::IpAddr;

use neli::consts::rtnl::Rta;

use super::{HEADER, RTA_VIA};
use crate::transport::wire::{Attributes, Message, ip_of, u16_of, u32_of};

/// `RTNH_F_DEAD` and `RTNH_F_LINKDOWN`: the kernel sends no packet to the next hop.
pub(crate) const UNUSABLE: u32 = 1 | 16;
/// Bytes of `struct rtnexthop`.
const HOP: usize = 8;

/// A next hop of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hop {
    /// The index of its link, or 0 if it has no link.
    pub(crate) index: u32,
    /// The gateway, or `None` if the destination is on the link.
    pub(crate) gateway: Option<IpAddr>,
    /// Whether its link is up and has a carrier.
    pub(crate) usable: bool,
}

/// The next hops in a message about a route. The list is empty if the message names none, as for a
/// route by a nexthop object if `net.ipv4.nexthop_compat_mode` is 0.
pub(crate) fn hops(message: &Message<'_>) -> Vec<Hop> {
    let Some((header, attributes)) = message.split::<HEADER>() else { return Vec::new() };
    let flags = u32_of(&header[8..]).unwrap_or_default();
    let mut all = attributes;
    let hops = match all.find(|(id, _)| Rta::from(*id) == Rta::Multipath) {
        Some((_, paths)) => several(paths),
        None => vec![Hop::of(0, flags, attributes)],
    };
    hops.into_iter().filter(|hop| hop.index != 0).collect()
}

/// Reads `RTA_MULTIPATH`: entries of `struct rtnexthop`, each with attributes.
fn several(mut paths: &[u8]) -> Vec<Hop> {
    let mut hops = Vec::new();
    while let Some(len) = u16_of(paths).map(usize::from)
        && let Some(hop) = paths.get(..len)
        && let Some((header, attributes)) = hop.split_at_checked(HOP)
    {
        let index = u32_of(&header[4..]).unwrap_or_default();
        hops.push(Hop::of(index, header[2].into(), Attributes(attributes)));
        paths = paths.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    hops
}

impl Hop {
    /// `index` is the index of the link unless the attributes have another.
    fn of(mut index: u32, flags: u32, attributes: Attributes<'_>) -> Self {
        let mut gateway = None;
        for (id, value) in attributes {
            match Rta::from(id) {
                _ if id == RTA_VIA => gateway = value.get(2..).and_then(ip_of),
                Rta::Oif => index = u32_of(value).unwrap_or_default(),
                Rta::Gateway => gateway = ip_of(value),
                _ => {}
            }
        }
        Self { index, gateway, usable: flags & UNUSABLE == 0 }
    }
}
