//! Neighbours. FDB entries have messages of the same format, so this module reads both.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::kernel::KernelEvent;
use flannel_core::object::{Fdb, Key, LinkName, MacAddr, Neigh, Object};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Nda, Ntf, Nud, RtAddrFamily, Rtm, Rtn};

use super::{EventMessage, af_of, event, family_of, put_flags};
use crate::transport::wire::{Message, Messages, ip_of, mac_of};

/// `AF_BRIDGE`: FDB entries of bridges and vxlan devices.
pub(super) const BRIDGE: RtAddrFamily = RtAddrFamily::UnrecognizedConst(7);

/// The content of a message about a neighbour or an FDB entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NeighMessage {
    /// The index of the link.
    pub(crate) index: u32,
    /// The entry does not age: a permanent neighbour, or a permanent or static FDB entry.
    pub(crate) is_static: bool,
    /// `NUD_PERMANENT`. All entries that flannel puts are permanent.
    permanent: bool,
    /// `NUD_FAILED`. The kernel reports this state of a neighbour just before it reports the
    /// deletion (`neigh_delete`).
    failed: bool,
    /// It is an FDB entry, not a neighbour.
    pub(super) fdb: bool,
    pub(super) mac: Option<MacAddr>,
    /// The address of the neighbour, or the outer destination of the FDB entry.
    dst: Option<IpAddr>,
    /// It has attributes that flannel's entries lack: a VNI, a UDP port or a device.
    pub(super) unrepresentable: bool,
    /// It uses nexthop objects instead of an outer destination. A put does not change that.
    pub(super) by_nexthop: bool,
    /// It has times (`NDA_CACHEINFO`), as all messages of a vxlan device about its entries have.
    timed: bool,
    /// It has one of the flags [`MARKS`], which are not part of the identity.
    marked: bool,
}

/// The flags `NTF_EXT_LEARNED`, `NTF_STICKY` and `NTF_ROUTER`. A put clears them.
const MARKS: u8 = 0x10 | 0x40 | 0x80;
/// Since Linux 5.8.
const NDA_NH_ID: u16 = 13;
/// Bytes of `struct ndmsg`.
const HEADER: usize = 12;

/// Reads `RTM_NEWNEIGH` and `RTM_DELNEIGH`. `None` for FDB entries of bridges, proxy entries and
/// other address families.
pub(crate) fn read(message: &Message<'_>) -> Option<NeighMessage> {
    let (&[family, _, _, _, a, b, c, d, e, f, flags, _], attributes) = message.split::<HEADER>()?;
    let family = RtAddrFamily::from(family);
    let fdb = family == BRIDGE;
    if !fdb && family_of(family).is_none() {
        return None;
    }
    // Proxy entries are in a separate table. An FDB entry with `NTF_MASTER` and without `NTF_SELF`
    // belongs to the bridge that the device is a port of.
    let has_flag = |flag: Ntf| flags & flag.bits() != 0;
    if has_flag(Ntf::PROXY) || (fdb && !has_flag(Ntf::SELF)) {
        return None;
    }
    let states = u16::from_ne_bytes([e, f]);
    let is_in = |state: Nud| states & state.bits() != 0;
    let permanent = is_in(Nud::PERMANENT);
    let mut read = NeighMessage {
        index: u32::from_ne_bytes([a, b, c, d]),
        is_static: permanent || (fdb && is_in(Nud::NOARP)),
        permanent,
        failed: is_in(Nud::FAILED),
        fdb,
        mac: None,
        dst: None,
        unrepresentable: false,
        by_nexthop: false,
        timed: false,
        marked: flags & MARKS != 0,
    };
    for (id, value) in attributes {
        match Nda::from(id) {
            _ if id == NDA_NH_ID => read.by_nexthop = true,
            Nda::Dst => read.dst = ip_of(value),
            Nda::Lladdr => read.mac = mac_of(value),
            Nda::Cacheinfo => read.timed = true,
            Nda::Port | Nda::Vni | Nda::Ifindex => read.unrepresentable = true,
            _ => {}
        }
    }
    Some(read)
}

impl NeighMessage {
    /// Whether it is an echo of a request about an FDB entry, without its outer destination. Linux
    /// before 6.13 sends one for each request, in addition to the message of the device.
    ///
    /// **Source**: linux `net/core/rtnetlink.c: rtnl_fdb_notify`.
    pub(crate) fn is_echo(&self) -> bool {
        self.fdb && !self.timed
    }

    /// Whether [`NeighMessage::object`] represents all attributes.
    pub(crate) fn is_exact(&self) -> bool {
        self.permanent && !self.unrepresentable && !self.by_nexthop && !self.marked
    }

    /// The key, or `None` if a neighbour has no address, or an FDB entry has no MAC address.
    pub(crate) fn key(&self, link: LinkName) -> Option<Key> {
        if self.fdb { Some(Key::Fdb(link, self.mac?)) } else { Some(Key::Neigh(link, self.dst?)) }
    }

    /// The object, or `None` if the entry ages, or lacks an address or a MAC address. `dst` of an
    /// FDB entry that uses nexthop objects is 0.0.0.0.
    pub(crate) fn object(&self, link: LinkName) -> Option<Object> {
        let mac = self.mac.filter(|_| self.is_static)?;
        if self.fdb {
            let dst = self.dst.unwrap_or(Family::V4.unspecified());
            return Some(Fdb { link, mac, dst }.into());
        }
        Some(Neigh { link, address: self.dst?, mac }.into())
    }
}

impl EventMessage for NeighMessage {
    fn event_index(&self, _: bool) -> u32 {
        self.index
    }

    fn event(&self, link: Option<LinkName>, is_deletion: bool, _: NlmF) -> Option<KernelEvent> {
        let is_gone = is_deletion || self.failed;
        Some(event(self.key(link?)?, self.object(link?), self.is_exact(), is_gone))
    }
}

/// `struct ndmsg`.
pub(super) fn header(family: RtAddrFamily, index: u32, state: Nud, flags: Ntf) -> [u8; HEADER] {
    let [a, b, c, d] = index.to_ne_bytes();
    let [e, f] = state.bits().to_ne_bytes();
    [family.into(), 0, 0, 0, a, b, c, d, e, f, flags.bits(), Rtn::Unspec.into()]
}

/// Creates or replaces a permanent neighbour.
pub(crate) fn put(requests: &mut Messages, neigh: &Neigh, index: u32) {
    let header = header(af_of(neigh.address), index, Nud::PERMANENT, Ntf::empty());
    requests
        .begin(Rtm::Newneigh, put_flags(), &header)
        .ip(Nda::Dst, neigh.address)
        .attr(Nda::Lladdr, &neigh.mac.0);
}

pub(crate) fn delete(requests: &mut Messages, neigh: &Neigh, index: u32) {
    let header = header(af_of(neigh.address), index, Nud::empty(), Ntf::empty());
    requests.begin(Rtm::Delneigh, NlmF::empty(), &header).ip(Nda::Dst, neigh.address);
}

/// A proxy entry (`ip neigh add proxy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProxyEntry {
    /// The index of the link, or 0 if it has no link.
    pub(crate) index: u32,
    /// The address for which this host answers on the link.
    pub(crate) address: IpAddr,
}

/// Reads `RTM_NEWNEIGH` about a proxy entry. `None` for other entries.
pub(crate) fn read_proxy(message: &Message<'_>) -> Option<ProxyEntry> {
    let (&[_, _, _, _, a, b, c, d, _, _, flags, _], mut attributes) = message.split::<HEADER>()?;
    if flags & Ntf::PROXY.bits() == 0 {
        return None;
    }
    let (_, address) = attributes.find(|(id, _)| Nda::from(*id) == Nda::Dst)?;
    Some(ProxyEntry { index: u32::from_ne_bytes([a, b, c, d]), address: ip_of(address)? })
}

pub(crate) fn delete_proxy(requests: &mut Messages, address: IpAddr, index: u32) {
    let header = header(af_of(address), index, Nud::empty(), Ntf::PROXY);
    requests.begin(Rtm::Delneigh, NlmF::empty(), &header).ip(Nda::Dst, address);
}

/// Requests all neighbours on a link.
pub(crate) fn on(index: u32) -> Messages {
    all_on(index, Ntf::empty())
}

/// Requests all proxy entries on a link. The kernel sends no messages about their changes.
pub(crate) fn proxies_on(index: u32) -> Messages {
    all_on(index, Ntf::PROXY)
}

/// Requests all proxy entries.
pub(crate) fn proxies() -> Messages {
    all(Ntf::PROXY)
}

fn all_on(index: u32, flags: Ntf) -> Messages {
    let mut request = all(flags);
    request.u32(Nda::Ifindex, index);
    request
}

fn all(flags: Ntf) -> Messages {
    let header = header(RtAddrFamily::Unspecified, 0, Nud::empty(), flags);
    Messages::one(Rtm::Getneigh, NlmF::empty(), &header)
}
