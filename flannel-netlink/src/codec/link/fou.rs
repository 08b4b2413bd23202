//! Ipip devices whose packets travel in UDP datagrams.

use std::net::{IpAddr, Ipv4Addr};

use flannel_core::object::{Fou, LinkKind, LinkName};

use super::ipip::{IPIP, attr};
use super::{KindMessage, LinkCodec, LinkMessage, is_set};
use crate::codec::fou::{OpenPort, Port};
use crate::transport::wire::{Attributes, Messages, ip_of, u16_of, u32_of};

/// `TUNNEL_ENCAP_FOU`.
const FOU: u16 = 1;
/// `TUNNEL_ENCAP_FLAG_CSUM`: datagrams have a checksum, as with Go flannel.
const CHECKSUMS: u16 = 1;

/// `IFLA_INFO_DATA` of a device with UDP headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FouMessage {
    local: Ipv4Addr,
    /// The index of the lower device, or 0 without a lower device.
    pub(super) lower: u32,
    /// The UDP port to which datagrams go.
    destination: u16,
    /// The UDP port from which datagrams leave, or 0 if the kernel chooses one for each flow.
    source: u16,
    /// An attribute has another value than a new device of flannel has.
    differs: bool,
    /// The kernel cannot reset an attribute. Such a device is deleted and created again.
    unrepresentable: bool,
    /// Whether datagrams are received at the port, or `None` if the open ports were not read.
    listens: Option<bool>,
}

/// Reads `IFLA_INFO_DATA` of an ipip device. `None` if it has no UDP headers.
pub(super) fn read(data: &[u8]) -> Option<FouMessage> {
    if !Attributes(data).any(|(id, value)| id == attr::ENCAP_TYPE && u16_of(value) == Some(FOU)) {
        return None;
    }
    let mut read = FouMessage {
        local: Ipv4Addr::UNSPECIFIED,
        lower: 0,
        destination: 0,
        source: 0,
        differs: false,
        unrepresentable: false,
        listens: None,
    };
    let port = |value: &[u8]| value.try_into().map_or(0, u16::from_be_bytes);
    for (id, value) in Attributes(data) {
        match id {
            attr::LINK => read.lower = u32_of(value).unwrap_or_default(),
            attr::LOCAL => {
                if let Some(IpAddr::V4(local)) = ip_of(value) {
                    read.local = local;
                }
            }
            attr::ENCAP_DPORT => read.destination = port(value),
            attr::ENCAP_SPORT => read.source = port(value),
            attr::ENCAP_FLAGS => read.differs |= u16_of(value) != Some(CHECKSUMS),
            attr::TTL | attr::TOS | attr::PMTUDISC | attr::FWMARK => {
                read.differs |= is_set(value);
            }
            // A flag, which has no value.
            attr::COLLECT_METADATA => read.unrepresentable = true,
            attr::REMOTE => read.unrepresentable |= is_set(value),
            attr::PROTO => read.unrepresentable |= *value != [IPIP],
            _ => {}
        }
    }
    Some(read)
}

impl FouMessage {
    /// Whether [`FouMessage::object`] represents all attributes that this type reads.
    pub(super) const fn is_exact(&self) -> bool {
        let is_source_usual = self.source == 0 || self.source == self.destination;
        !self.differs && is_source_usual && !matches!(self.listens, Some(false))
    }

    /// The attributes, or `None` if they are unrepresentable.
    pub(super) fn object(&self, lower: Option<LinkName>) -> Option<LinkKind> {
        if self.unrepresentable {
            return None;
        }
        let fou =
            Fou { local: self.local, lower, port: self.destination, one_port: self.source != 0 };
        Some(fou.into())
    }

    /// The address and the port at which datagrams are received.
    pub(super) const fn port(&self) -> Port {
        Port { local: self.local, port: self.destination }
    }
}

impl LinkMessage {
    /// The address and the port at which the datagrams of a device are received, or `None` if it
    /// has no UDP headers.
    pub(crate) const fn fou_port(&self) -> Option<Port> {
        match &self.kind {
            KindMessage::Fou(fou) => Some(fou.port()),
            _ => None,
        }
    }

    /// Notes whether the port of the device is among those at which the kernel receives.
    pub(crate) fn add_fou_ports(&mut self, ports: &[OpenPort]) {
        if let KindMessage::Fou(fou) = &mut self.kind {
            fou.listens = Some(ports.iter().any(|port| port.receives_for(fou.port())));
        }
    }
}

/// The attributes of a device with UDP headers, or `None` if it is of another kind.
fn found(is: &LinkMessage) -> Option<&FouMessage> {
    if let KindMessage::Fou(found) = &is.kind { Some(found) } else { None }
}

/// Adds the attributes that give the packets of a tunnel UDP headers.
pub(super) fn encapsulation(data: &mut Messages, port: u16, one_port: bool) {
    let source = if one_port { port } else { 0 };
    data.attr(attr::ENCAP_TYPE, &FOU.to_ne_bytes())
        .attr(attr::ENCAP_FLAGS, &CHECKSUMS.to_ne_bytes())
        .attr(attr::ENCAP_SPORT, &source.to_be_bytes())
        .attr(attr::ENCAP_DPORT, &port.to_be_bytes());
}

impl LinkCodec for Fou {
    fn create(&self, data: &mut Messages, lower: u32) {
        if lower != 0 {
            data.u32(attr::LINK, lower);
        }
        data.ip(attr::LOCAL, self.local.into()).attr(attr::PROTO, &[IPIP]);
        data.attr(attr::TTL, &[0]).attr(attr::TOS, &[0]).attr(attr::PMTUDISC, &[0]);
        encapsulation(data, self.port, self.one_port);
    }

    /// Adds all attributes, because the kernel resets the attributes that a request lacks
    /// (`ipip_changelink`).
    fn change(&self, is: &LinkMessage, data: &mut Messages, lower: u32) {
        let Some(is) = found(is) else { return };
        let source = if self.one_port { self.port } else { 0 };
        if is.differs
            || is.local != self.local
            || is.lower != lower
            || is.destination != self.port
            || is.source != source
        {
            self.create(data, lower);
            data.u32(attr::FWMARK, 0);
        }
    }

    fn carries_ipv6(&self) -> bool {
        false
    }

    /// The tun device, which user space serves, has the same name and purpose.
    fn replaces(&self, is: &LinkMessage) -> bool {
        matches!(&is.kind, KindMessage::Tun(tun) if tun.is_ours())
    }

    /// There can be several devices with UDP headers. The name tells which one is ours.
    fn is_same_network(&self, is: &LinkMessage) -> bool {
        found(is).is_some()
    }

    /// A tunnel without UDP headers excludes the device too.
    ///
    /// **Source**: linux `net/ipv4/ip_tunnel.c: ip_tunnel_find`.
    fn excludes(&self, is: &LinkMessage) -> bool {
        let is_same = match &is.kind {
            KindMessage::Fou(is) => is.local == self.local && !is.unrepresentable,
            KindMessage::Ipip(is) => is.is_for_all_at(self.local),
            _ => false,
        };
        // The kernel has compared which lower device it is.
        is_same && (is.lower() != 0) == self.lower.is_some()
    }

    fn exclusive(&self) -> String {
        format!("the local address {} without a remote one", self.local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neli::consts::nl::NlmF;

    fn bytes(build: impl FnOnce(&mut Messages)) -> Vec<u8> {
        let mut data = Messages::one(0_u16, NlmF::empty(), &[]);
        build(&mut data);
        // Without the header of the message.
        data.ready(0..1, 0, NlmF::empty())[16..].to_vec()
    }

    #[test]
    fn every_other_value_is_seen() {
        let local = Ipv4Addr::new(192, 0, 2, 7);
        let device = Fou { local, lower: None, port: 8285, one_port: false };
        let healthy = read(&bytes(|data| device.create(data, 7))).unwrap();
        let object = Fou { lower: Some("up0".parse().unwrap()), ..device };
        assert_eq!(healthy.object(object.lower), Some(object.into()));
        assert!(healthy.is_exact() && healthy.lower == 7);
        for (id, value, is_object) in [
            (attr::TTL, &[64][..], true),
            (attr::TOS, &[4], true),
            (attr::PMTUDISC, &[1], true),
            (attr::FWMARK, &[1, 0, 0, 0], true),
            (attr::ENCAP_FLAGS, &[0, 0], true),
            (attr::ENCAP_SPORT, &[1, 2], true),
            (attr::REMOTE, &[192, 0, 2, 9], false),
            (attr::PROTO, &[0], false),
            (attr::COLLECT_METADATA, &[], false),
        ] {
            let changed = bytes(|data| {
                device.create(data, 7);
                data.attr(id, value);
            });
            let found = read(&changed).unwrap();
            assert_ne!(found, healthy, "attribute {id} causes an event");
            assert_eq!(found.object(None).is_some(), is_object, "attribute {id}");
            assert_eq!(found.is_exact(), !is_object, "attribute {id}");
        }
        let silent = FouMessage { listens: Some(false), ..healthy };
        assert!(!silent.is_exact(), "nothing receives");
    }

    #[test]
    fn a_tunnel_without_udp_headers_is_another_device() {
        let plain = bytes(|data| _ = data.attr(attr::ENCAP_TYPE, &[0, 0]));
        assert_eq!(read(&plain), None);
        assert_eq!(read(&[]), None);
    }
}
