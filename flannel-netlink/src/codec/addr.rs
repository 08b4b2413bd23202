//! Addresses on links.
//!
//! The kernel identifies an IPv4 address on a link by address, prefix length and address of the
//! other end. It identifies an IPv6 address on a link by the address alone.

use std::net::IpAddr;

use flannel_core::kernel::KernelEvent;
use flannel_core::object::{Addr, LinkName, Object};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Ifa, RtAddrFamily, RtScope, Rtm};

use super::{EventMessage, af_of, event, put_flags};
use crate::transport::wire::{Message, Messages, ip_of, u32_of};

/// Bytes of `struct ifaddrmsg`.
const HEADER: usize = 8;
/// `IFA_F_NODAD`: the kernel does not search for duplicates of the address (IPv6).
const NODAD: u32 = 0x02;
/// `IFA_F_NOPREFIXROUTE`: the kernel adds no route to the prefix.
const NOPREFIXROUTE: u32 = 0x200;

/// The content of a message about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddrMessage {
    /// The index of the link.
    pub(crate) index: u32,
    pub(crate) address: IpAddr,
    /// The prefix length in bits.
    pub(crate) len: u8,
    /// `IFA_F_…`.
    pub(crate) flags: u32,
    /// The scope. For IPv6 the address alone determines it.
    scope: RtScope,
    /// The address of the other end of a point-to-point link (`peer` of `ip address`), or `None` if
    /// it has no such address.
    pub(crate) far: Option<IpAddr>,
    /// Its valid or its preferred lifetime is limited.
    pub(crate) expires: bool,
}

/// Reads `RTM_NEWADDR` and `RTM_DELADDR`. `None` if the message is malformed.
pub(crate) fn read(message: &Message<'_>) -> Option<AddrMessage> {
    let (&[_, len, flags, scope, index @ ..], attributes) = message.split::<HEADER>()?;
    let mut flags = u32::from(flags);
    let mut local = None;
    let mut address = None;
    let mut expires = false;
    for (id, value) in attributes {
        match Ifa::from(id) {
            Ifa::Local => local = ip_of(value),
            Ifa::Address => address = ip_of(value),
            Ifa::Flags => flags = u32_of(value)?,
            // `ifa_prefered` and `ifa_valid` of `struct ifa_cacheinfo`, in seconds. All bits set
            // mean that there is no limit.
            Ifa::Cacheinfo => expires = value.get(..8).is_some_and(|times| times != [0xff; 8]),
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the address of the other end.
    let own = local.or(address)?;
    Some(AddrMessage {
        index: u32::from_ne_bytes(index),
        address: own,
        far: address.filter(|address| *address != own),
        len,
        flags,
        scope: scope.into(),
        expires,
    })
}

impl AddrMessage {
    /// Describes an address that [`put`] adds. `flags` is 0.
    pub(crate) fn of(addr: &Addr, index: u32) -> Self {
        Self {
            index,
            address: addr.address,
            len: addr.len,
            flags: 0,
            scope: RtScope::Universe,
            far: None,
            expires: false,
        }
    }

    /// Whether the address is valid only on this host (`scope host`).
    pub(crate) fn is_of_host(&self) -> bool {
        self.scope == RtScope::Host
    }

    /// Whether the address may be the source of packets to peers: an IPv6 address, or an IPv4
    /// address of `scope global`.
    pub(crate) fn is_universal(&self) -> bool {
        self.address.is_ipv6() || self.scope == RtScope::Universe
    }

    /// Whether [`AddrMessage::object`] represents the address completely: it has no limited
    /// lifetime, no other end, and the usual scope.
    pub(crate) fn is_exact(&self) -> bool {
        !self.expires && self.far.is_none() && self.is_universal()
    }

    pub(crate) fn object(&self, link: LinkName) -> Addr {
        Addr { link, address: self.address, len: self.len }
    }
}

impl EventMessage for AddrMessage {
    fn event_index(&self, _: bool) -> u32 {
        self.index
    }

    fn event(&self, link: Option<LinkName>, is_deletion: bool, _: NlmF) -> Option<KernelEvent> {
        let object = Object::from(self.object(link?));
        Some(event(object.key(), Some(object), self.is_exact(), is_deletion))
    }
}

/// `struct ifaddrmsg`, without flags.
fn header(family: RtAddrFamily, len: u8, index: u32) -> [u8; HEADER] {
    let [a, b, c, d] = index.to_ne_bytes();
    [family.into(), len, 0, RtScope::Universe.into(), a, b, c, d]
}

/// Adds an address, or replaces it. An IPv6 address is usable at once, without a search for
/// duplicates.
pub(crate) fn put(requests: &mut Messages, addr: &Addr, index: u32) {
    put_as(requests, addr, index, if addr.address.is_ipv6() { NODAD } else { 0 });
}

/// Adds an IPv4 address without a route to its prefix. The steps of a put delete it again.
pub(crate) fn put_step(requests: &mut Messages, addr: &Addr, index: u32) {
    put_as(requests, addr, index, NOPREFIXROUTE);
}

fn put_as(requests: &mut Messages, addr: &Addr, index: u32, flags: u32) {
    let header = header(af_of(addr.address), addr.len, index);
    requests
        .begin(Rtm::Newaddr, put_flags(), &header)
        .ip(Ifa::Local, addr.address)
        .ip(Ifa::Address, addr.address);
    if flags != 0 {
        requests.u32(Ifa::Flags, flags);
    }
}

/// Deletes exactly the address that was read. The kernel compares the prefix length, and for IPv4
/// the other end.
pub(crate) fn delete(requests: &mut Messages, read: &AddrMessage) {
    let header = header(af_of(read.address), read.len, read.index);
    requests
        .begin(Rtm::Deladdr, NlmF::empty(), &header)
        .ip(Ifa::Local, read.address)
        .ip(Ifa::Address, read.far.unwrap_or(read.address));
}

/// Requests all addresses on a link, or on all links if `index` is 0.
pub(crate) fn on(index: u32) -> Messages {
    Messages::one(Rtm::Getaddr, NlmF::empty(), &header(RtAddrFamily::Unspecified, 0, index))
}
