//! Links.
//!
//! Each link kind has a module below this one. A request for a change has only the attributes that
//! differ, because the kernel refuses some attributes even with their current values.

mod fou;
mod ipip;
mod tun;
mod vxlan;
mod wireguard;

use flannel_core::object::{Link, LinkKind, LinkName, MacAddr, Tun};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{Iff, Ifla, IflaInfo, RtAddrFamily, Rtm};

use crate::transport::wire::{Attributes, Message, Messages, mac_of, text_of, u32_at, u32_of};

/// Bytes of `struct ifinfomsg`.
const HEADER: usize = 16;
/// `IFLA_PROTO_DOWN_REASON_…`.
const PROTO_DOWN_REASON_MASK: u16 = 1;
const PROTO_DOWN_REASON_VALUE: u16 = 2;
/// Since Linux 3.15.
const IFLA_CARRIER_CHANGES: u16 = 35;
const IFLA_GENEVE_PORT: u16 = 5;

/// Encodes and compares the attributes of a desired device of one link kind. `data` is the content
/// of `IFLA_INFO_DATA`. `lower` is the index of the lower device, which sends the outer packets, or
/// 0 without a lower device.
pub(crate) trait LinkCodec {
    /// Adds the attributes of a new device.
    fn create(&self, data: &mut Messages, lower: u32);

    /// Adds the attributes in which the existing device `is` differs. The caller has checked
    /// [`LinkMessage::can_become`].
    fn change(&self, is: &LinkMessage, data: &mut Messages, lower: u32);

    /// Whether rtnetlink cannot create the device, because another program has to make it. A put
    /// then only starts the creation.
    fn made_by_others(&self) -> bool {
        false
    }

    /// Whether the existing device `is` is a device of flannel of another kind for the same
    /// purpose. It is then deleted before the new device is created.
    fn replaces(&self, _: &LinkMessage) -> bool {
        false
    }

    /// Whether IPv6 packets may arrive by a device of this kind.
    fn carries_ipv6(&self) -> bool {
        true
    }

    /// An attribute with a value that the kernel refuses with `EINVAL`, or `None` if the kernel
    /// refuses a device of this kind without attributes.
    fn invalid(&self) -> Option<(u16, u8)> {
        None
    }

    /// Whether the existing device `is` belongs to the same network. Other attributes may differ.
    fn is_same_network(&self, is: &LinkMessage) -> bool;

    /// Whether the kernel refuses to create the desired device while `is` exists.
    fn excludes(&self, is: &LinkMessage) -> bool;

    /// The attributes that no two devices can share, as text for an error.
    fn exclusive(&self) -> String;
}

/// The codec of a link kind, or `None` if this version does not support the kind.
pub(crate) fn codec(kind: &LinkKind) -> Option<&dyn LinkCodec> {
    match kind {
        LinkKind::Fou(fou) => Some(&**fou),
        LinkKind::Ipip(ipip) => Some(ipip),
        LinkKind::Tun(tun) => Some(tun),
        LinkKind::Vxlan(vxlan) => Some(&**vxlan),
        LinkKind::Wireguard(wireguard) => Some(&**wireguard),
        _ => None,
    }
}

/// The attributes of one link kind in a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum KindMessage {
    Fou(fou::FouMessage),
    Ipip(ipip::IpipMessage),
    Tun(tun::TunMessage),
    Vxlan(vxlan::VxlanMessage),
    Wireguard(wireguard::WireguardMessage),
    /// A kind that flannel does not use, which receives packets on this UDP port.
    Udp(u16),
    /// Another kind that flannel does not use.
    #[default]
    Other,
}

/// The content of a message about a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkMessage {
    pub(crate) index: u32,
    pub(crate) name: LinkName,
    /// The MTU in bytes.
    pub(crate) mtu: u32,
    /// `IFF_UP`: the device is set up by an administrator, whatever its carrier is.
    pub(crate) up: bool,
    /// It sends no packet to another host: the loopback device or a dummy device.
    pub(crate) isolated: bool,
    /// The device uses ARP and neighbour discovery (no `IFF_NOARP`), or has no MAC address.
    arp: bool,
    /// The device is a port of another device. A bridge or a bond gets all packets that the port
    /// receives. A VRF looks them up in its own routing table, which has no routes to pods.
    enslaved: bool,
    /// `IFLA_PROTO_DOWN`: another program has turned off the carrier.
    proto_down: bool,
    /// `IFLA_TXQLEN` is not 0: a queueing discipline on the device would queue packets.
    queues: bool,
    /// `IFLA_INFO_KIND`, such as `vxlan`. Empty for physical and built-in devices.
    pub(crate) kind_name: String,
    /// The message is about the link itself (`AF_UNSPEC`), not about a port of a bridge
    /// (`AF_BRIDGE`).
    pub(crate) whole: bool,
    /// `IFLA_CARRIER_CHANGES`, the number of carrier changes. When a device loses its carrier, the
    /// kernel deletes the nexthop objects on it and sends no message about them
    /// (`nexthop_flush_dev`). The counter shows every loss. The state of the carrier does not,
    /// because the kernel may merge two changes into one message, or report the last state twice.
    carrier_changes: u32,
    mac: Option<MacAddr>,
    kind: KindMessage,
}

/// Reads `RTM_NEWLINK` and `RTM_DELLINK`. `None` for other types of messages, and if the name is
/// not a valid [`LinkName`].
pub(crate) fn read(message: &Message<'_>) -> Option<LinkMessage> {
    if message.kind != u16::from(Rtm::Newlink) && message.kind != u16::from(Rtm::Dellink) {
        return None;
    }
    let (header, attributes) = message.split::<HEADER>()?;
    let flags = u32_at(header, 8)?;
    let has = |flag: Iff| flags & flag.bits() != 0;
    let mut name = None;
    let mut mtu = 0;
    let mut mac = None;
    let mut enslaved = false;
    let mut proto_down = false;
    let mut queues = false;
    let mut carrier_changes = 0;
    let mut info = LinkInfo::default();
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
            Ifla::Txqlen => queues = u32_of(value)? != 0,
            Ifla::Linkinfo => info = LinkInfo::read(value),
            _ => {}
        }
    }
    Some(LinkMessage {
        index: u32_at(header, 4)?,
        name: name?,
        mtu,
        up: has(Iff::UP),
        isolated: has(Iff::LOOPBACK) || info.kind_name == "dummy",
        arp: mac.is_none() || !has(Iff::NOARP),
        enslaved,
        proto_down,
        // The queue of a tun device holds the packets for its program.
        queues: queues && !matches!(info.kind, KindMessage::Tun(_)),
        kind_name: info.kind_name,
        whole: header[0] == u8::from(RtAddrFamily::Unspecified),
        carrier_changes,
        mac,
        kind: info.kind,
    })
}

/// The content of `IFLA_LINKINFO`.
#[derive(Default)]
struct LinkInfo {
    kind_name: String,
    kind: KindMessage,
}

impl LinkInfo {
    fn read(info: &[u8]) -> Self {
        let find = |wanted| {
            Attributes(info).find(|(id, _)| IflaInfo::from(*id) == wanted).map(|(_, value)| value)
        };
        let kind_name = find(IflaInfo::Kind).and_then(text_of).unwrap_or_default();
        let data = find(IflaInfo::Data).unwrap_or_default();
        let kind = match kind_name.as_str() {
            "ipip" => match fou::read(data) {
                Some(fou) => KindMessage::Fou(fou),
                None => KindMessage::Ipip(ipip::read(data)),
            },
            "tun" => KindMessage::Tun(tun::read(data)),
            "vxlan" => KindMessage::Vxlan(vxlan::read(data)),
            "wireguard" => KindMessage::Wireguard(wireguard::WireguardMessage::default()),
            "geneve" => geneve_port(data).map_or(KindMessage::Other, KindMessage::Udp),
            _ => KindMessage::Other,
        };
        Self { kind_name, kind }
    }
}

/// The UDP port of a geneve device.
fn geneve_port(data: &[u8]) -> Option<u16> {
    let (_, value) = Attributes(data).find(|(id, _)| *id == IFLA_GENEVE_PORT)?;
    value.try_into().ok().map(u16::from_be_bytes)
}

pub(super) fn is_set(value: &[u8]) -> bool {
    value.iter().any(|byte| *byte != 0)
}

impl LinkMessage {
    /// Whether the device is of a kind that flannel uses.
    pub(crate) fn is_known(&self) -> bool {
        !matches!(self.kind, KindMessage::Udp(_) | KindMessage::Other)
    }

    /// The UDP port on which its driver receives packets, or `None` if there is none or the device
    /// is down. The attributes of a WireGuard device must have been
    /// [added](Self::add_wireguard).
    pub(crate) fn udp_port(&self) -> Option<u16> {
        let port = match &self.kind {
            KindMessage::Vxlan(vxlan) => vxlan.port,
            KindMessage::Wireguard(wireguard) => wireguard.port()?,
            KindMessage::Udp(port) => *port,
            KindMessage::Fou(_)
            | KindMessage::Ipip(_)
            | KindMessage::Tun(_)
            | KindMessage::Other => {
                return None;
            }
        };
        Some(port).filter(|_| self.up)
    }

    /// Whether the kernel lets both devices receive on one UDP port.
    pub(crate) fn shares_port(&self, wanted: &Link) -> bool {
        match (&self.kind, &wanted.kind) {
            (KindMessage::Vxlan(is), LinkKind::Vxlan(wanted)) => is.shares_port(wanted),
            _ => false,
        }
    }

    /// The index of the device that sends the outer packets, or 0 if it is not set.
    pub(crate) fn lower(&self) -> u32 {
        match &self.kind {
            KindMessage::Fou(fou) => fou.lower,
            KindMessage::Ipip(ipip) => ipip.lower,
            KindMessage::Vxlan(vxlan) => vxlan.lower,
            KindMessage::Tun(_)
            | KindMessage::Wireguard(_)
            | KindMessage::Udp(_)
            | KindMessage::Other => 0,
        }
    }

    /// Whether [`LinkMessage::object`] represents all attributes that affect packets.
    pub(crate) fn is_exact(&self) -> bool {
        let is_exact = match &self.kind {
            KindMessage::Fou(fou) => fou.is_exact(),
            KindMessage::Ipip(ipip) => ipip.is_exact(),
            KindMessage::Vxlan(vxlan) => vxlan.is_exact(),
            KindMessage::Wireguard(wireguard) => wireguard.is_exact(),
            KindMessage::Tun(_) | KindMessage::Udp(_) | KindMessage::Other => true,
        };
        self.arp && !self.enslaved && !self.proto_down && !self.queues && is_exact
    }

    /// The object, or `None` if it is unrepresentable. `lower` is the name of the device with the
    /// index [`LinkMessage::lower`], or `None` if the index is 0.
    pub(crate) fn object(&self, lower: Option<LinkName>) -> Option<Link> {
        let kind = match &self.kind {
            KindMessage::Fou(fou) => fou.object(lower)?,
            KindMessage::Ipip(ipip) => ipip.object()?,
            KindMessage::Tun(tun) => tun.is_ours().then_some(LinkKind::Tun(Tun))?,
            KindMessage::Vxlan(vxlan) => vxlan.object(self.mac?, lower)?,
            KindMessage::Wireguard(wireguard) => wireguard.object(),
            KindMessage::Udp(_) | KindMessage::Other => return None,
        };
        Some(Link { name: self.name, mtu: self.mtu, up: self.up, kind })
    }

    /// Whether a change in place may turn it into the device `to`. The kernel may still refuse.
    pub(crate) fn can_become(&self, to: &LinkKind) -> bool {
        // The answer depends on whether there is a lower device, not on its name.
        let lower = (self.lower() != 0).then_some(self.name);
        self.object(lower).is_some_and(|is| is.kind.attributes().can_become(to))
    }

    /// Whether it has the MAC address of `kind`. True if `kind` has none.
    pub(crate) fn has_mac_of(&self, kind: &LinkKind) -> bool {
        kind.attributes().mac().is_none_or(|mac| self.mac == Some(mac))
    }
}

/// `struct ifinfomsg`. The request clears the flags in `change`. If `up` is true, it sets `IFF_UP`
/// instead of clearing it.
fn header(index: u32, change: Iff, up: bool) -> [u8; HEADER] {
    let flags = if up { change & Iff::UP } else { Iff::empty() };
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.bits().to_ne_bytes());
    header[12..].copy_from_slice(&change.bits().to_ne_bytes());
    header
}

/// A header that names a link by its index, and changes no flags.
fn at(index: u32) -> [u8; HEADER] {
    header(index, Iff::empty(), false)
}

/// Creates a device. It is down until [`set_up`].
pub(crate) fn create(link: &Link, codec: &dyn LinkCodec, lower: u32) -> Messages {
    let attributes = link.kind.attributes();
    let mut request = Messages::one(Rtm::Newlink, NlmF::CREATE | NlmF::EXCL, &at(0));
    request.text(Ifla::Ifname, link.name.as_str()).u32(Ifla::Mtu, link.mtu).u32(Ifla::Txqlen, 0);
    if let Some(mac) = attributes.mac() {
        request.attr(Ifla::Address, &mac.0);
    }
    request.nest(Ifla::Linkinfo, |info| {
        info.text(IflaInfo::Kind, attributes.kind());
        info.nest(IflaInfo::Data, |data| codec.create(data, lower));
    });
    request
}

/// A request for a device of this kind that the kernel refuses because of its attributes.
pub(crate) fn refused(kind: &str, codec: Option<&dyn LinkCodec>) -> Messages {
    let mut request = Messages::one(Rtm::Newlink, NlmF::CREATE | NlmF::EXCL, &at(0));
    request.nest(Ifla::Linkinfo, |info| {
        info.text(IflaInfo::Kind, kind);
        if let Some((id, value)) = codec.and_then(LinkCodec::invalid) {
            info.nest(IflaInfo::Data, |data| {
                data.attr(id, &[value]);
            });
        }
    });
    request
}

/// The name of the short-lived device that [`probe`] creates.
pub(crate) fn probe_name() -> LinkName {
    "flannel-probe".parse().expect("a valid name")
}

/// A request for an ipip device with UDP headers and without addresses.
pub(crate) fn probe() -> Messages {
    let mut request = Messages::one(Rtm::Newlink, NlmF::CREATE | NlmF::EXCL, &at(0));
    request.text(Ifla::Ifname, probe_name().as_str());
    request.nest(Ifla::Linkinfo, |info| {
        info.text(IflaInfo::Kind, "ipip");
        info.nest(IflaInfo::Data, |data| fou::encapsulation(data, 1, false));
    });
    request
}

/// Changes the attributes of the link kind in which `is` differs. No message if nothing differs.
/// The MTU needs another message ([`change`]), because drivers refuse it in this one
/// (`vxlan_nl2conf`).
pub(crate) fn change_kind(is: &LinkMessage, codec: &dyn LinkCodec, lower: u32) -> Messages {
    let mut request = Messages::one(Rtm::Newlink, NlmF::empty(), &at(is.index));
    let mut differs = false;
    request.nest(Ifla::Linkinfo, |info| {
        info.text(IflaInfo::Kind, &is.kind_name).nest(IflaInfo::Data, |data| {
            let before = data.size();
            codec.change(is, data, lower);
            differs = data.size() != before;
        });
    });
    if differs { request } else { Messages::default() }
}

/// Removes a port from its bridge, bond, VRF or similar device. No message if it is not a port.
pub(crate) fn release(is: &LinkMessage) -> Messages {
    let mut requests = Messages::default();
    if is.enslaved {
        requests.begin(Rtm::Newlink, NlmF::empty(), &at(is.index)).u32(Ifla::Master, 0);
    }
    requests
}

/// Changes the attributes common to all kinds in which `is` differs from `want`. No message if
/// nothing differs.
pub(crate) fn change(is: &LinkMessage, want: &Link) -> Messages {
    let mut requests = Messages::default();
    let other_mtu = is.mtu != want.mtu;
    let mut flags = Iff::empty();
    flags.set(Iff::UP, is.up != want.up);
    flags.set(Iff::NOARP, !is.arp);
    let new_mac = want.kind.attributes().mac().filter(|mac| is.mac != Some(*mac));
    if !other_mtu && flags.is_empty() && new_mac.is_none() && !is.queues && !is.proto_down {
        return requests;
    }
    requests.begin(Rtm::Newlink, NlmF::empty(), &header(is.index, flags, want.up));
    if other_mtu {
        requests.u32(Ifla::Mtu, want.mtu);
    }
    if let Some(mac) = new_mac {
        requests.attr(Ifla::Address, &mac.0);
    }
    if is.queues {
        requests.u32(Ifla::Txqlen, 0);
    }
    if is.proto_down {
        // The kernel refuses to clear it while a reason is set. So the request also sets all
        // reasons, which the mask selects, to 0. Kernels before 5.9 have no reasons.
        requests.nest(Ifla::ProtoDownReason, |reason| {
            reason.u32(PROTO_DOWN_REASON_MASK, u32::MAX).u32(PROTO_DOWN_REASON_VALUE, 0);
        });
        requests.attr(Ifla::ProtoDown, &[0]);
    }
    requests
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

/// Requests one link by name.
pub(crate) fn by_name(name: LinkName) -> Messages {
    let mut request = Messages::one(Rtm::Getlink, NlmF::empty(), &at(0));
    request.text(Ifla::Ifname, name.as_str());
    request
}

/// Requests one link by index.
pub(crate) fn by_index(index: u32) -> Messages {
    Messages::one(Rtm::Getlink, NlmF::empty(), &at(index))
}

/// Requests all links.
pub(crate) fn all() -> Messages {
    Messages::one(Rtm::Getlink, NlmF::empty(), &at(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::wire::messages;

    #[test]
    fn a_port_of_any_device_is_released() {
        for master in ["bridge", "bond", "vrf"] {
            let mut request = Messages::one(Rtm::Newlink, NlmF::empty(), &at(7));
            request.text(Ifla::Ifname, "flannel.1").u32(Ifla::Master, 9);
            request.nest(Ifla::Linkinfo, |info| {
                info.text(IflaInfo::SlaveKind, master);
            });
            let bytes = request.ready(0..1, 0, NlmF::empty());
            let link = read(&messages(bytes).next().unwrap().unwrap()).unwrap();
            assert!(!link.is_exact(), "{master}");
            assert_eq!(release(&link).len(), 1, "{master}");
        }
    }
}
