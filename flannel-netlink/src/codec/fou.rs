//! UDP ports whose datagrams the kernel unpacks (Foo over UDP), as messages of generic netlink.
//!
//! **Source**: linux `include/uapi/linux/fou.h`, `net/ipv4/fou_nl.c`.

use std::net::Ipv4Addr;

use neli::consts::nl::NlmF;
use neli::consts::rtnl::RtAddrFamily;

use super::link::is_set;
use crate::transport::wire::{Message, Messages};

/// The name of the netlink family.
pub(crate) const FAMILY: &str = "fou";

/// `struct genlmsghdr`: a command, a version, and two unused bytes.
const HEADER: usize = 4;
const VERSION: u8 = 1;
/// `FOU_CMD_…`.
const ADD: u8 = 1;
const DELETE: u8 = 2;
const GET: u8 = 3;

/// `FOU_ATTR_…`.
mod attr {
    pub(super) const PORT: u16 = 1;
    pub(super) const AF: u16 = 2;
    pub(super) const PROTOCOL: u16 = 3;
    pub(super) const TYPE: u16 = 4;
    pub(super) const LOCAL: u16 = 6;
    pub(super) const PEER_V4: u16 = 8;
    pub(super) const PEER_PORT: u16 = 10;
    pub(super) const IFINDEX: u16 = 11;
}

/// `FOU_ENCAP_DIRECT`: no header between the UDP header and the packet.
const DIRECT: u8 = 1;

/// `IPPROTO_IPIP`: the protocol of packets in datagrams.
const IPIP: u8 = 4;

/// A port at which the kernel takes packets of IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    /// The address that datagrams are sent to.
    pub(crate) local: Ipv4Addr,
    pub(crate) port: u16,
}

/// A port that the kernel reports as open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OpenPort {
    /// The address that datagrams are sent to. The unspecified address stands for all addresses.
    /// `None` before Linux 5.2, where a port has no address and receives at all addresses.
    local: Option<Ipv4Addr>,
    port: u16,
}

impl OpenPort {
    /// Whether it receives datagrams that are sent to `port`.
    pub(crate) fn receives_for(&self, port: Port) -> bool {
        self.port == port.port
            && self.local.is_none_or(|local| local == port.local || local.is_unspecified())
    }

    /// Whether it is the port that [`add`] opens.
    pub(crate) fn is(&self, port: Port) -> bool {
        self.local.is_none_or(|local| local == port.local) && self.port == port.port
    }
}

pub(crate) fn add(family: u16, port: Port) -> Messages {
    let mut request = change(family, ADD, port);
    request.attr(attr::PROTOCOL, &[IPIP]).attr(attr::TYPE, &[DIRECT]);
    request
}

pub(crate) fn delete(family: u16, port: Port) -> Messages {
    change(family, DELETE, port)
}

fn change(family: u16, command: u8, port: Port) -> Messages {
    let mut request = Messages::one(family, NlmF::empty(), &[command, VERSION, 0, 0]);
    request.attr(attr::PORT, &port.port.to_be_bytes());
    request.attr(attr::AF, &[RtAddrFamily::Inet.into()]).ip(attr::LOCAL, port.local.into());
    request
}

/// Requests all ports.
pub(crate) fn all(family: u16) -> Messages {
    Messages::one(family, NlmF::empty(), &[GET, VERSION, 0, 0])
}

/// Reads one message of a dump. `None` if the port has another purpose.
pub(crate) fn read(message: &Message<'_>) -> Option<OpenPort> {
    let (_, attributes) = message.split::<HEADER>()?;
    let mut found = OpenPort { local: None, port: 0 };
    for (id, value) in attributes {
        match id {
            attr::PORT => found.port = u16::from_be_bytes(value.try_into().ok()?),
            attr::LOCAL => found.local = Some(<[u8; 4]>::try_from(value).ok()?.into()),
            // It receives from one host, or by one device.
            attr::PEER_V4 | attr::PEER_PORT | attr::IFINDEX if is_set(value) => return None,
            attr::AF if *value != [u8::from(RtAddrFamily::Inet)] => return None,
            attr::PROTOCOL if *value != [IPIP] => return None,
            attr::TYPE if *value != [DIRECT] => return None,
            _ => {}
        }
    }
    Some(found)
}
