//! Links. The one thing to know: on a change the kernel refuses some attributes even if they are what they were, so
//! only what differs is sent.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::object::{Link, LinkKind, LinkName, MacAddr, Vxlan};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Iff, Ifla, IflaInfo, RtAddrFamily, Rtm};
use neli::rtnl::{Ifinfomsg, IfinfomsgBuilder};

use super::signed;
use crate::wire::{Attributes, Message, Messages, bytes_of, ip_of, mac_of, text_of, u32_of};

/// `IFLA_VXLAN_…` (linux `include/uapi/linux/if_link.h`).
mod vxlan {
    pub(super) const ID: u16 = 1;
    pub(super) const GROUP: u16 = 2;
    pub(super) const LINK: u16 = 3;
    pub(super) const LOCAL: u16 = 4;
    pub(super) const TTL: u16 = 5;
    pub(super) const TOS: u16 = 6;
    pub(super) const LEARNING: u16 = 7;
    pub(super) const LIMIT: u16 = 9;
    pub(super) const PROXY: u16 = 11;
    pub(super) const RSC: u16 = 12;
    pub(super) const L2MISS: u16 = 13;
    pub(super) const L3MISS: u16 = 14;
    pub(super) const PORT: u16 = 15;
    pub(super) const GROUP6: u16 = 16;
    pub(super) const LOCAL6: u16 = 17;
    pub(super) const UDP_ZERO_CSUM6_TX: u16 = 19;
    pub(super) const UDP_ZERO_CSUM6_RX: u16 = 20;
    pub(super) const REMCSUM_TX: u16 = 21;
    pub(super) const REMCSUM_RX: u16 = 22;
    pub(super) const GBP: u16 = 23;
    pub(super) const COLLECT_METADATA: u16 = 25;
    pub(super) const LABEL: u16 = 26;
    pub(super) const GPE: u16 = 27;
    pub(super) const TTL_INHERIT: u16 = 28;
    pub(super) const DF: u16 = 29;
    pub(super) const VNIFILTER: u16 = 30;
}

/// What the headers of outer packets can be told, and how the kernel is told that it fills them in by itself, as it does for
/// flannel's devices.
const OUTER: [(u16, &[u8]); 4] =
    [(vxlan::TTL, &[0]), (vxlan::TOS, &[0]), (vxlan::DF, &[0]), (vxlan::LABEL, &[0; 4])];

const PROTO_DOWN_REASON_MASK: u16 = 1;
const PROTO_DOWN_REASON_VALUE: u16 = 2;
/// The kernel has it since 3.15.
const IFLA_CARRIER_CHANGES: u16 = 35;

/// What a message says of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkMessage {
    pub(crate) index: u32,
    pub(crate) name: LinkName,
    pub(crate) mtu: u32,
    pub(crate) up: bool,
    /// It asks for its neighbours' addresses, and answers.
    arp: bool,
    /// It is a port of another device, a bridge for example, which gets all that comes in by it. A VRF is none: it has the host route
    /// that, by another table, which may be meant.
    enslaved: bool,
    /// Somebody has taken its carrier.
    proto_down: bool,
    /// `IFLA_INFO_KIND`; empty for a device that no driver made on demand.
    pub(crate) kind: String,
    /// The message is about the link itself, not about its part in a bridge.
    pub(crate) whole: bool,
    /// How often the carrier came or went: with it the kernel drops nexthop objects on the link, and says no more of it
    /// than this. A count, because two changes may come as one message, or as two that both tell the last state.
    carrier_changes: u32,
    mac: Option<MacAddr>,
    vxlan: VxlanMessage,
}

/// `IFLA_INFO_DATA` of a vxlan device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct VxlanMessage {
    vni: u32,
    port: u16,
    local: Option<IpAddr>,
    /// The index of the lower device.
    lower: u32,
    learning: bool,
    gbp: bool,
    /// Which of [`OUTER`] somebody has set.
    outer: [bool; OUTER.len()],
    /// Has something that flannel's devices do not have and the kernel does not take away: a group, tunnel metadata from outside,
    /// answers and questions in the place of the neighbour table, a limit to what it forwards to, checksums that other VTEPs refuse.
    alien: bool,
}

/// Reads `RTM_NEWLINK` and `RTM_DELLINK`.
pub(crate) fn read(message: &Message<'_>) -> Option<LinkMessage> {
    if message.kind != u16::from(Rtm::Newlink) && message.kind != u16::from(Rtm::Dellink) {
        return None;
    }
    let (header, attributes) = message.split::<Ifinfomsg>()?;
    let (mut name, mut mtu, mut mac, mut kind, mut data) =
        (None, 0, None, String::new(), VxlanMessage::default());
    let (mut carrier_changes, mut enslaved, mut vrf, mut proto_down) = (0, false, false, false);
    for (id, value) in attributes {
        if id == IFLA_CARRIER_CHANGES {
            carrier_changes = u32_of(value)?;
            continue;
        }
        match Ifla::from(id) {
            Ifla::Ifname => name = text_of(value).and_then(|text| text.parse().ok()),
            Ifla::Mtu => mtu = u32_of(value)?,
            Ifla::Address => mac = mac_of(value),
            Ifla::Master => enslaved = u32_of(value)? != 0,
            Ifla::ProtoDown => proto_down = is_set(value),
            Ifla::Linkinfo => (kind, data, vrf) = read_info(value),
            _ => {}
        }
    }
    Some(LinkMessage {
        index: header.ifi_index().cast_unsigned(),
        name: name?,
        mtu,
        up: header.ifi_flags().contains(Iff::UP),
        arp: !header.ifi_flags().contains(Iff::NOARP),
        enslaved: enslaved && !vrf,
        proto_down,
        kind,
        whole: *header.ifi_family() == RtAddrFamily::Unspecified,
        carrier_changes,
        mac,
        vxlan: data,
    })
}

/// The kind, what a vxlan device is, and whether it is in a VRF.
fn read_info(info: &[u8]) -> (String, VxlanMessage, bool) {
    let find = |wanted| {
        Attributes(info).find(|(id, _)| IflaInfo::from(*id) == wanted).map(|(_, value)| value)
    };
    let kind = find(IflaInfo::Kind).and_then(text_of).unwrap_or_default();
    let data = find(IflaInfo::Data).filter(|_| kind == VXLAN).unwrap_or_default();
    let vrf = find(IflaInfo::SlaveKind).and_then(text_of).is_some_and(|kind| kind == VRF);
    (kind, read_vxlan(data), vrf)
}

const VXLAN: &str = "vxlan";
const VRF: &str = "vrf";

fn read_vxlan(data: &[u8]) -> VxlanMessage {
    let mut read = VxlanMessage::default();
    // One without a value is a flag.
    let flag = |value: &[u8]| value.is_empty() || is_set(value);
    for (id, value) in Attributes(data) {
        if let Some(place) = OUTER.iter().position(|(outer, _)| *outer == id) {
            read.outer[place] = is_set(value);
            continue;
        }
        match id {
            vxlan::ID => read.vni = u32_of(value).unwrap_or_default(),
            vxlan::PORT => read.port = value.try_into().map_or(0, u16::from_be_bytes),
            vxlan::LOCAL | vxlan::LOCAL6 => {
                read.local = ip_of(value).filter(|address| !address.is_unspecified());
            }
            vxlan::LINK => read.lower = u32_of(value).unwrap_or_default(),
            vxlan::LEARNING => read.learning = flag(value),
            vxlan::GBP => read.gbp = true,
            vxlan::GROUP | vxlan::GROUP6 => read.alien = true,
            vxlan::LIMIT
            | vxlan::GPE
            | vxlan::TTL_INHERIT
            | vxlan::PROXY
            | vxlan::RSC
            | vxlan::L2MISS
            | vxlan::L3MISS
            | vxlan::UDP_ZERO_CSUM6_TX
            | vxlan::REMCSUM_TX
            | vxlan::REMCSUM_RX
            | vxlan::COLLECT_METADATA
            | vxlan::VNIFILTER => read.alien |= flag(value),
            _ => {}
        }
    }
    read
}

fn is_set(value: &[u8]) -> bool {
    value.iter().any(|byte| *byte != 0)
}

impl LinkMessage {
    pub(crate) fn is_vxlan(&self) -> bool {
        self.kind == VXLAN
    }

    /// The index of the device that a vxlan device's packets leave by; 0 if there is none.
    pub(crate) fn lower(&self) -> u32 {
        self.vxlan.lower
    }

    /// [`LinkMessage::object`] expresses all of it that says where packets go.
    pub(crate) fn is_exact(&self) -> bool {
        self.arp && !self.enslaved && !self.proto_down && !self.vxlan.outer.contains(&true)
    }

    /// The object, if there is one for such a link; `lower` is the name of [`LinkMessage::lower`].
    pub(crate) fn object(&self, lower: Option<LinkName>) -> Option<Link> {
        if !self.is_vxlan() || self.vxlan.alien {
            return None;
        }
        let VxlanMessage { vni, port, local, learning, gbp, .. } = self.vxlan;
        let vxlan = Vxlan { vni, port, mac: self.mac?, local, lower, learning, gbp };
        Some(Link { name: self.name, mtu: self.mtu, up: self.up, kind: LinkKind::Vxlan(vxlan) })
    }
}

/// The flags in `change` go, but for `IFF_UP`, which is to be `up`.
fn header(index: u32, change: Iff, up: bool) -> Vec<u8> {
    let builder =
        IfinfomsgBuilder::default().ifi_family(RtAddrFamily::Unspecified).ifi_index(signed(index));
    let flags = if up { change & Iff::UP } else { Iff::empty() };
    let header = builder
        .ifi_flags(flags)
        .ifi_change(change)
        .build()
        .expect("all fields that have no default are set");
    bytes_of(&header)
}

/// Nothing but which link.
fn at(index: u32) -> Vec<u8> {
    header(index, Iff::empty(), false)
}

/// Makes a vxlan device, not up yet; `lower` is the index of its lower device, 0 if it has none.
///
/// **Source**: the attributes are those of flannel `pkg/backend/vxlan/device.go: newVXLANDevice`.
pub(crate) fn create(link: &Link, v: &Vxlan, lower: u32) -> Messages {
    let mut request = Messages::one(Rtm::Newlink, NlmF::CREATE | NlmF::EXCL, &at(0));
    request.text(Ifla::Ifname, link.name.as_str()).u32(Ifla::Mtu, link.mtu).u32(Ifla::Txqlen, 0);
    request.attr(Ifla::Address, &v.mac.0).nest(Ifla::Linkinfo, |info| {
        info.text(IflaInfo::Kind, VXLAN).nest(IflaInfo::Data, |data| {
            data.u32(vxlan::ID, v.vni).attr(vxlan::PORT, &v.port.to_be_bytes());
            if lower != 0 {
                data.u32(vxlan::LINK, lower);
            }
            if let Some(local) = v.local {
                put_local(data, local);
            }
            data.attr(vxlan::LEARNING, &[u8::from(v.learning)]);
            if v.gbp {
                data.attr(vxlan::GBP, &[]);
            }
            for off in [
                vxlan::TTL,
                vxlan::TOS,
                vxlan::PROXY,
                vxlan::RSC,
                vxlan::L2MISS,
                vxlan::L3MISS,
                vxlan::UDP_ZERO_CSUM6_TX,
                vxlan::UDP_ZERO_CSUM6_RX,
            ] {
                data.attr(off, &[0]);
            }
        });
    });
    request
}

fn put_local(data: &mut Messages, local: IpAddr) {
    data.ip(if local.is_ipv4() { vxlan::LOCAL } else { vxlan::LOCAL6 }, local);
}

/// Turns the vxlan device `is` into `v`, sending only what differs: no message if nothing does. `lower` is the index of `v`'s lower
/// device, 0 if it has none. Not in a message with [`change`]: the driver refuses an MTU beside its attributes.
pub(crate) fn change_vxlan(is: &LinkMessage, v: &Vxlan, lower: u32) -> Messages {
    let mut requests = Messages::default();
    let outer = is.vxlan.outer.contains(&true);
    if (is.vxlan.local, is.vxlan.lower, is.vxlan.learning, outer)
        != (v.local, lower, v.learning, false)
    {
        requests.begin(Rtm::Newlink, NlmF::empty(), &at(is.index)).nest(Ifla::Linkinfo, |info| {
            info.text(IflaInfo::Kind, VXLAN)
                .nest(IflaInfo::Data, |data| change_data(data, &is.vxlan, v, lower));
        });
    }
    requests
}

/// Takes it out of the device that it is a port of; no message if there is none.
pub(crate) fn release(is: &LinkMessage) -> Messages {
    let mut requests = Messages::default();
    if is.enslaved {
        requests.begin(Rtm::Newlink, NlmF::empty(), &at(is.index)).u32(Ifla::Master, 0);
    }
    requests
}

/// Turns the device `is` into `want` in what is not the driver's, as [`change_vxlan`] does in what is.
pub(crate) fn change(is: &LinkMessage, want: &Link, v: &Vxlan) -> Messages {
    let mut requests = Messages::default();
    if (is.mtu, is.up, is.mac, is.arp, is.proto_down)
        != (want.mtu, want.up, Some(v.mac), true, false)
    {
        let mut changed = Iff::empty();
        changed.set(Iff::UP, is.up != want.up);
        changed.set(Iff::NOARP, !is.arp);
        requests.begin(Rtm::Newlink, NlmF::empty(), &header(is.index, changed, want.up));
        if is.mtu != want.mtu {
            requests.u32(Ifla::Mtu, want.mtu);
        }
        if is.mac != Some(v.mac) {
            requests.attr(Ifla::Address, &v.mac.0);
        }
        if is.proto_down {
            // Nobody's reasons, or the kernel refuses: which ones, and then what they are. Before 5.9 there are none.
            requests.nest(Ifla::ProtoDownReason, |reason| {
                reason.u32(PROTO_DOWN_REASON_MASK, u32::MAX).u32(PROTO_DOWN_REASON_VALUE, 0);
            });
            requests.attr(Ifla::ProtoDown, &[0]);
        }
    }
    requests
}

fn change_data(data: &mut Messages, is: &VxlanMessage, v: &Vxlan, lower: u32) {
    match (is.local, v.local) {
        (old, Some(local)) if old != Some(local) => put_local(data, local),
        (Some(old), None) => put_local(data, Family::of(old).unspecified()),
        _ => {}
    }
    if is.lower != lower {
        data.u32(vxlan::LINK, lower);
    }
    if is.learning != v.learning {
        data.attr(vxlan::LEARNING, &[u8::from(v.learning)]);
    }
    for ((id, unset), _) in OUTER.iter().zip(is.outer).filter(|(_, is_set)| *is_set) {
        data.attr(*id, unset);
    }
}

/// The device `is` can become `v` without being made anew, as far as can be told without trying.
pub(crate) fn is_changeable(is: &LinkMessage, v: &Vxlan) -> bool {
    let same = (is.vxlan.vni, is.vxlan.port, is.vxlan.gbp) == (v.vni, v.port, v.gbp);
    // The family of the outer packets is fixed when the device is made. Without an address it cannot be told.
    let family = |local: Option<IpAddr>| local.map(Family::of);
    let family =
        family(is.vxlan.local) == family(v.local) || is.vxlan.local.is_none() || v.local.is_none();
    // The kernel moves a device from one lower device to another, but a request to have none it ignores.
    let lower = v.lower.is_some() || is.vxlan.lower == 0;
    is.is_vxlan() && !is.vxlan.alien && same && family && lower
}

/// The device `is` is the one described, though MTU and the like may differ.
pub(crate) fn is_same_device(is: &LinkMessage, link: &Link) -> bool {
    match &link.kind {
        LinkKind::Vxlan(v) => is.is_vxlan() && is.vxlan.vni == v.vni,
        _ => false,
    }
}

/// The device `is` cannot be there beside one like `v`. For outer packets of either family there may be one.
///
/// **Source**: linux `drivers/net/vxlan/vxlan_core.c: vxlan_vni_in_use`.
pub(crate) fn is_in_the_way(is: &LinkMessage, v: &Vxlan) -> bool {
    let family = |local: Option<IpAddr>| local.map_or(Family::V4, Family::of);
    let same_family = family(is.vxlan.local) == family(v.local);
    is.is_vxlan() && (is.vxlan.vni, is.vxlan.port) == (v.vni, v.port) && same_family
}

/// The device `is` is that VTEP, whatever its name: no other one has the MAC address.
pub(crate) fn is_vtep(is: &LinkMessage, v: &Vxlan) -> bool {
    is_in_the_way(is, v) && is.mac == Some(v.mac)
}

pub(crate) fn rename(index: u32, name: LinkName) -> Messages {
    let mut request = Messages::one(Rtm::Newlink, NlmF::empty(), &at(index));
    request.text(Ifla::Ifname, name.as_str());
    request
}

/// Sets a device up or down.
pub(crate) fn set_up(index: u32, up: bool) -> Messages {
    Messages::one(Rtm::Newlink, NlmF::empty(), &header(index, Iff::UP, up))
}

pub(crate) fn delete(index: u32) -> Messages {
    Messages::one(Rtm::Dellink, NlmF::empty(), &at(index))
}

/// Asks for one link by name.
pub(crate) fn by_name(name: LinkName) -> Messages {
    let mut request = Messages::one(Rtm::Getlink, NlmF::empty(), &at(0));
    request.text(Ifla::Ifname, name.as_str());
    request
}

/// Asks for one link by index.
pub(crate) fn by_index(index: u32) -> Messages {
    Messages::one(Rtm::Getlink, NlmF::empty(), &at(index))
}

/// Asks for all links.
pub(crate) fn all() -> Messages {
    Messages::one(Rtm::Getlink, NlmF::empty(), &at(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::messages;

    #[test]
    fn a_bridge_takes_what_comes_in_and_a_vrf_does_not() {
        for (master, is_exact) in [("bridge", false), ("bond", false), ("vrf", true)] {
            let mut told = Messages::one(Rtm::Newlink, NlmF::empty(), &at(7));
            told.text(Ifla::Ifname, "flannel.1").u32(Ifla::Master, 9);
            told.nest(Ifla::Linkinfo, |info| {
                info.text(IflaInfo::SlaveKind, master);
            });
            let count = told.len();
            let link =
                read(&messages(told.ready(0, count, 0, NlmF::empty())).next().unwrap().unwrap());
            assert_eq!(link.unwrap().is_exact(), is_exact, "{master}");
        }
    }
}
