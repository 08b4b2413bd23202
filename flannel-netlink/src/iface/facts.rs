//! Reads the kernel state that the choice depends on.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{KernelError, RouteAnswer};
use flannel_core::object::LinkName;
use libc::ENOENT;
use neli::consts::rtnl::Rtn;

use crate::NetlinkKernel;
use crate::codec::addr::AddrMessage;
use crate::codec::link::LinkMessage;
use crate::codec::route::Hop;
use crate::codec::{addr, link, nexthop, route};
use crate::kernel::query::{find_link, lookup, name_of};
use crate::transport::socket::Socket;
use crate::transport::wire::Messages;

use super::{SelectError, Selectors, choose};

/// `IFA_F_…` (linux `include/uapi/linux/if_addr.h`).
const TEMPORARY: u32 = 0x01;
const DADFAILED: u32 = 0x08;
const DEPRECATED: u32 = 0x20;
const TENTATIVE: u32 = 0x40;
const PERMANENT: u32 = 0x80;

/// The kernel state that the choice depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// All interfaces, in the order of their indexes.
    pub interfaces: Vec<Interface>,
    /// The default routes in the main table, in the order in which the kernel prefers them.
    pub default: Vec<DefaultRoute>,
    /// The route to [`Selectors::can_reach`], or `None` without that selector.
    pub reach: Option<RouteAnswer>,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: LinkName,
    /// Its kind, such as `bridge`. Empty for a physical device.
    pub kind: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
    /// Whether it sends no packet to another host: the loopback device or a dummy device. Packets
    /// from its addresses leave by other interfaces.
    pub isolated: bool,
    /// Its addresses of both families, in the kernel's order.
    pub addresses: Vec<Address>,
}

/// An address on an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Whether it can be the address of this host for peers: it is not deprecated, tentative, a
    /// duplicate or of `scope host`.
    pub usable: bool,
    /// Whether it never expires.
    pub permanent: bool,
    /// For IPv6, whether it is a temporary address for privacy. For IPv4, whether it is a secondary
    /// address.
    pub temporary: bool,
    /// Whether its network has no other address: its prefix is as long as an address can be, and it
    /// is no end of a point-to-point link.
    pub alone: bool,
}

/// A default route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultRoute {
    /// Its family.
    pub family: Family,
    /// The source address that the route sets (`src` of `ip route`), or `None` if it sets none.
    pub source: Option<IpAddr>,
    /// Its next hops. A route without next hops drops or refuses packets.
    pub hops: Vec<NextHop>,
}

/// A next hop of a default route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    /// Its interface.
    pub link: LinkName,
    /// Whether its interface is up and has a carrier.
    pub usable: bool,
    /// The source address that the kernel chooses for packets to the gateway of the next hop.
    /// `None` without a gateway, without a route to it besides the default route, or if the kernel
    /// chooses none.
    pub source: Option<IpAddr>,
}

impl NetlinkKernel {
    /// Reads the kernel state and chooses the external interface for a network of these families.
    ///
    /// # Errors
    /// The kernel state cannot be read, or no selector matches.
    ///
    /// # Blocking
    /// A few milliseconds on a host with thousands of routes or interfaces.
    pub fn external_interface(
        &self,
        selectors: &Selectors,
        families: impl IntoIterator<Item = Family>,
    ) -> Result<ExternalInterface, SelectError> {
        choose(selectors, families, &self.facts(selectors)?)
    }

    /// Reads the inputs of [`choose`](fn@choose) for these selectors. It opens a socket for this,
    /// so that a long table does not delay [`Kernel::apply`](flannel_core::Kernel::apply).
    ///
    /// # Errors
    /// The kernel state cannot be read.
    ///
    /// # Blocking
    /// As [`NetlinkKernel::external_interface`].
    pub fn facts(&self, selectors: &Selectors) -> Result<Facts, KernelError> {
        facts(&mut self.namespace().run(Socket::open)??, selectors)
    }

    /// All interfaces, in the order of their indexes.
    ///
    /// # Errors
    /// The kernel state cannot be read.
    ///
    /// # Blocking
    /// Milliseconds on a host with thousands of interfaces.
    pub fn interfaces(&self) -> Result<Vec<Interface>, KernelError> {
        interfaces(&mut self.lock())
    }
}

pub(super) fn facts(socket: &mut Socket, selectors: &Selectors) -> Result<Facts, KernelError> {
    let mut default = Vec::new();
    for family in Family::BOTH {
        default.extend(default_routes(socket, family)?);
    }
    Ok(Facts {
        interfaces: interfaces(socket)?,
        default,
        reach: selectors.can_reach.map(|address| lookup(socket, address)).transpose()?,
    })
}

/// One interface and its index, or `None` if it does not exist. The time does not depend on the
/// number of interfaces and routes.
pub(super) fn interface(
    socket: &mut Socket,
    name: LinkName,
) -> Result<Option<(u32, Interface)>, KernelError> {
    let Some(link) = find_link(socket, name)? else { return Ok(None) };
    let addresses = socket.dump(addr::on(link.index), addr::read)?;
    Ok(Some((link.index, Interface::of(&link, &addresses))))
}

fn interfaces(socket: &mut Socket) -> Result<Vec<Interface>, KernelError> {
    let mut links = socket.dump(link::all(), link::read)?;
    links.sort_by_key(|link| link.index);
    let addresses = socket.dump(addr::on(0), addr::read)?;
    Ok(links.iter().map(|link| Interface::of(link, &addresses)).collect())
}

impl Interface {
    /// The interface of a link. Its addresses are chosen from `addresses`.
    fn of(link: &LinkMessage, addresses: &[AddrMessage]) -> Self {
        Self {
            name: link.name,
            kind: link.kind_name.clone(),
            mtu: link.mtu,
            up: link.up,
            isolated: link.isolated,
            addresses: addresses
                .iter()
                .filter(|address| address.index == link.index)
                .map(Address::from)
                .collect(),
        }
    }
}

impl From<&AddrMessage> for Address {
    fn from(found: &AddrMessage) -> Self {
        let has = |flag| found.flags & flag != 0;
        Self {
            address: found.address,
            usable: !has(DEPRECATED | TENTATIVE | DADFAILED) && !found.is_of_host(),
            permanent: has(PERMANENT),
            temporary: has(TEMPORARY),
            alone: found.len == Family::of(found.address).bits() && found.far.is_none(),
        }
    }
}

/// The default routes of a family in the main table. An interface that is deleted meanwhile is left
/// out.
fn default_routes(socket: &mut Socket, family: Family) -> Result<Vec<DefaultRoute>, KernelError> {
    let found = socket.dump(route::all(family), |message| {
        route::read(message)
            .filter(|found| found.main && found.dst.is_everything() && found.kind == Rtn::Unicast)
            .map(|found| (found, route::hops(message)))
    })?;
    let mut routes = Vec::new();
    for (route, mut hops) in found {
        if let Some(id) = route.nexthop.filter(|_| hops.is_empty()) {
            hops = hops_of(socket, id)?;
        }
        let hops =
            hops.into_iter().map(|hop| next_hop(socket, hop)).collect::<Result<Vec<_>, _>>()?;
        let hops = hops.into_iter().flatten().collect();
        routes.push(DefaultRoute { family, source: route.source, hops });
    }
    Ok(routes)
}

/// The next hops of a nexthop object, which may be a group. The list is empty if it was deleted
/// meanwhile.
fn hops_of(socket: &mut Socket, id: u32) -> Result<Vec<Hop>, KernelError> {
    let mut get = |id| {
        let mut request = Messages::default();
        nexthop::get(&mut request, id);
        let asked = socket.ask(request, |message| {
            let group = nexthop::group(message).map(|(_, ids)| ids);
            Some((group, nexthop::hop(message)?))
        });
        match asked {
            Err(error) if error.is(ENOENT) => Ok((None, None)),
            asked => asked.map(|(group, hop)| (group, Some(hop))),
        }
    };
    let (group, hop) = get(id)?;
    let Some(ids) = group else { return Ok(hop.into_iter().collect()) };
    let mut hops = Vec::new();
    for id in ids {
        hops.extend(get(id)?.1);
    }
    Ok(hops)
}

/// The next hop with the name of its interface, or `None` if the interface does not exist.
fn next_hop(socket: &mut Socket, hop: Hop) -> Result<Option<NextHop>, KernelError> {
    let Hop { index, gateway, usable } = hop;
    if index == 0 {
        return Ok(None);
    }
    let Some(link) = name_of(socket, index)? else { return Ok(None) };
    let answer = gateway.map(|gateway| lookup(socket, gateway)).transpose()?;
    // By the default route itself, the source can be any address of the interface.
    let on_link = answer.filter(|answer| answer.on_link() == Some(link));
    let source = on_link.and_then(|answer| answer.source);
    Ok(Some(NextHop { link, usable, source }))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn facts_are_read_while_another_thread_writes() {
        let kernel = NetlinkKernel::open().unwrap();
        let (sender, facts) = channel();
        std::thread::scope(|scope| {
            let writing = kernel.lock();
            scope.spawn(|| sender.send(kernel.facts(&Selectors::default())).unwrap());
            let read = facts.recv_timeout(Duration::from_secs(20));
            drop(writing);
            assert!(read.expect("reading does not wait for the writer").is_ok());
        });
    }
}
