//! Reads the kernel state that the choice depends on.

use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{KernelError, RouteAnswer};
use flannel_core::object::LinkName;

use crate::NetlinkKernel;
use crate::codec::addr::AddrMessage;
use crate::codec::link::LinkMessage;
use crate::codec::{addr, link, route};
use crate::kernel::query::{find_link, lookup, name_of};
use crate::transport::socket::Socket;

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
    /// The first default route of each family in the main table, or `None` without a default
    /// route. It is read only if the default route is the selector, and `None` otherwise.
    pub default: Dual<DefaultRoute>,
    /// The route to [`Selectors::can_reach`], or `None` without that selector.
    pub reach: Option<RouteAnswer>,
}

/// An interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: LinkName,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Whether it is administratively up.
    pub up: bool,
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
}

/// A default route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefaultRoute {
    /// Its interface, or `None` if the route has several paths or no interface.
    pub link: Option<LinkName>,
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

    /// Reads the inputs of [`choose`](fn@choose) that these selectors need. It opens a socket for
    /// this, so that a long table does not delay [`Kernel::apply`](flannel_core::Kernel::apply).
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
    let mut default = Dual::default();
    if selectors.by_default_route() {
        default =
            Dual { v4: default_route(socket, Family::V4)?, v6: default_route(socket, Family::V6)? };
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
            mtu: link.mtu,
            up: link.up,
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
        }
    }
}

fn default_route(socket: &mut Socket, family: Family) -> Result<Option<DefaultRoute>, KernelError> {
    let found = socket.dump(route::all(family), |message| {
        route::read(message).filter(|found| found.main && found.dst.is_everything())
    })?;
    let Some(first) = found.first() else { return Ok(None) };
    let index = if first.multipath { 0 } else { first.index };
    let link = if index == 0 { None } else { name_of(socket, index)? };
    Ok(Some(DefaultRoute { link }))
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
