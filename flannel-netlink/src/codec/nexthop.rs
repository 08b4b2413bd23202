//! Nexthop objects (Linux 5.3 and later).

use std::net::IpAddr;

use flannel_core::kernel::{KernelEvent, ROUTE_PROTOCOL};
use flannel_core::object::{Key, LinkName, Nexthop, Object};
use neli::consts::nl::NlmF;

use super::route::{Hop, UNUSABLE};
use super::{EventMessage, af_of, event, put_flags};
use crate::transport::wire::{Message, Messages, ip_of, u32_of};

/// `RTM_NEWNEXTHOP`, `RTM_DELNEXTHOP`, `RTM_GETNEXTHOP`.
const NEW: u16 = 104;
const DELETE: u16 = 105;
const GET: u16 = 106;

/// Bytes of `struct nhmsg`.
const HEADER: usize = 8;
/// `RTNH_F_ONLINK`: the gateway is on the link, whatever the routing table says.
pub(super) const ONLINK: u32 = 4;
/// `NHA_…` (linux `include/uapi/linux/nexthop.h`).
const ID: u16 = 1;
const GROUP: u16 = 2;
const OIF: u16 = 5;
const GATEWAY: u16 = 6;

/// The content of a message about a nexthop object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NexthopMessage {
    pub(crate) id: u32,
    /// The index of its device; 0 for a group or a blackhole.
    pub(crate) index: u32,
    /// The route protocol of the program that created it.
    pub(crate) protocol: u8,
    gateway: Option<IpAddr>,
    onlink: bool,
    /// It has attributes that [`Nexthop`] does not represent.
    unrepresentable: bool,
}

/// Whether the message type `kind` is `RTM_NEWNEXTHOP` or `RTM_DELNEXTHOP`.
pub(crate) fn is_event(kind: u16) -> bool {
    matches!(kind, NEW | DELETE)
}

/// Reads `RTM_NEWNEXTHOP` and `RTM_DELNEXTHOP`. `None` if the message is malformed.
pub(crate) fn read(message: &Message<'_>) -> Option<NexthopMessage> {
    let (&[_, _, protocol, _, flags @ ..], attributes) = message.split::<HEADER>()?;
    let mut read = NexthopMessage {
        id: 0,
        index: 0,
        protocol,
        gateway: None,
        onlink: u32::from_ne_bytes(flags) & ONLINK != 0,
        unrepresentable: false,
    };
    for (kind, value) in attributes {
        match kind {
            ID => read.id = u32_of(value)?,
            OIF => read.index = u32_of(value)?,
            GATEWAY => read.gateway = ip_of(value),
            // A group, a blackhole, an encapsulation, or a nexthop of FDB entries.
            _ => read.unrepresentable = true,
        }
    }
    Some(read)
}

/// The id of a group and the ids of the nexthop objects in it. `None` if the message is not about a
/// group.
pub(crate) fn group(message: &Message<'_>) -> Option<(u32, Vec<u32>)> {
    let (_, attributes) = message.split::<HEADER>()?;
    let mut group = 0;
    let mut nexthops = None;
    for (kind, value) in attributes {
        match kind {
            ID => group = u32_of(value)?,
            // `struct nexthop_grp` has 8 bytes: the id, then the weight and reserved bytes.
            GROUP => nexthops = Some(value.chunks_exact(8).filter_map(u32_of).collect()),
            _ => {}
        }
    }
    Some((group, nexthops?))
}

/// Reads `RTM_NEWNEXTHOP` as a next hop of a route. Its index is 0 for a group or a blackhole.
/// `None` if the message is malformed.
pub(crate) fn hop(message: &Message<'_>) -> Option<Hop> {
    let (&[_, _, _, _, flags @ ..], _) = message.split::<HEADER>()?;
    let usable = u32::from_ne_bytes(flags) & UNUSABLE == 0;
    read(message).map(|read| Hop { index: read.index, gateway: read.gateway, usable })
}

impl NexthopMessage {
    /// The object, or `None` if it is unrepresentable or has no gateway.
    pub(crate) fn object(&self, link: LinkName) -> Option<Nexthop> {
        if self.unrepresentable {
            return None;
        }
        Some(Nexthop { id: self.id, link, gateway: self.gateway?, onlink: self.onlink })
    }
}

impl EventMessage for NexthopMessage {
    fn event_index(&self, is_deletion: bool) -> u32 {
        if is_deletion { 0 } else { self.index }
    }

    fn event(&self, link: Option<LinkName>, is_deletion: bool, _: NlmF) -> Option<KernelEvent> {
        let object = link.and_then(|link| self.object(link)).map(Object::Nexthop);
        Some(event(Key::Nexthop(self.id), object, true, is_deletion))
    }

    fn protocol(&self) -> Option<u8> {
        Some(self.protocol)
    }
}

/// `struct nhmsg`.
fn header(family: u8, protocol: u8, flags: u32) -> [u8; HEADER] {
    let [a, b, c, d] = flags.to_ne_bytes();
    [family, 0, protocol, 0, a, b, c, d]
}

/// Creates the nexthop object, or replaces the object with its id.
pub(crate) fn put(requests: &mut Messages, nexthop: &Nexthop, index: u32) {
    let flags = if nexthop.onlink { ONLINK } else { 0 };
    let header = header(af_of(nexthop.gateway).into(), ROUTE_PROTOCOL, flags);
    requests
        .begin(NEW, put_flags(), &header)
        .u32(ID, nexthop.id)
        .u32(OIF, index)
        .ip(GATEWAY, nexthop.gateway);
}

/// Deletes the nexthop object with this id, whatever its other attributes are.
pub(crate) fn delete(requests: &mut Messages, id: u32) {
    requests.begin(DELETE, NlmF::empty(), &header(0, 0, 0)).u32(ID, id);
}

/// Requests one nexthop object.
pub(crate) fn get(requests: &mut Messages, id: u32) {
    requests.begin(GET, NlmF::empty(), &header(0, 0, 0)).u32(ID, id);
}

/// Requests all nexthop objects.
pub(crate) fn all() -> Messages {
    Messages::one(GET, NlmF::empty(), &header(0, 0, 0))
}
