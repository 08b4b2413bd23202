//! Ipip devices.

use std::net::{IpAddr, Ipv4Addr};

use flannel_core::object::{Ipip, LinkKind};

use super::{KindMessage, LinkCodec, LinkMessage, is_set};
use crate::transport::wire::{Attributes, Messages, ip_of, u32_of};

/// `IFLA_IPTUN_…` (linux `include/uapi/linux/if_tunnel.h`).
pub(super) mod attr {
    pub(in super::super) const LINK: u16 = 1;
    pub(in super::super) const LOCAL: u16 = 2;
    pub(in super::super) const REMOTE: u16 = 3;
    pub(in super::super) const TTL: u16 = 4;
    pub(in super::super) const TOS: u16 = 5;
    pub(in super::super) const PROTO: u16 = 9;
    pub(in super::super) const PMTUDISC: u16 = 10;
    pub(in super::super) const ENCAP_TYPE: u16 = 15;
    pub(in super::super) const ENCAP_FLAGS: u16 = 16;
    pub(in super::super) const ENCAP_SPORT: u16 = 17;
    pub(in super::super) const ENCAP_DPORT: u16 = 18;
    pub(in super::super) const COLLECT_METADATA: u16 = 19;
    pub(in super::super) const FWMARK: u16 = 20;
}

/// Attributes that are 0 on flannel's devices: outer packets inherit the TTL, and the DF flag, of
/// inner ones. Devices with other values are changed in place. The kernel knows `FWMARK` since
/// Linux 4.12.
const ZERO: [(u16, usize); 5] =
    [(attr::LINK, 4), (attr::TTL, 1), (attr::TOS, 1), (attr::PMTUDISC, 1), (attr::FWMARK, 4)];

/// `IPPROTO_IPIP`.
pub(super) const IPIP: u8 = 4;

/// `IFLA_INFO_DATA` of an ipip device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct IpipMessage {
    /// The source address of outer packets, or `None` if the kernel chooses it.
    local: Option<Ipv4Addr>,
    /// The index of the lower device, or 0 without a lower device.
    pub(super) lower: u32,
    /// An attribute of [`ZERO`] is not 0.
    differs: bool,
    /// It has a remote address, external tunnel metadata, another encapsulation, or carries packets
    /// other than IPv4. The kernel cannot reset these attributes. Such a device is deleted and
    /// created again.
    unrepresentable: bool,
}

impl IpipMessage {
    /// Whether it receives the packets of all hosts that are sent to this address.
    pub(super) fn is_for_all_at(&self, local: Ipv4Addr) -> bool {
        self.local == Some(local) && !self.unrepresentable
    }
}

/// Reads `IFLA_INFO_DATA`.
pub(super) fn read(data: &[u8]) -> IpipMessage {
    let mut read = IpipMessage::default();
    for (id, value) in Attributes(data) {
        read.differs |= ZERO.iter().any(|(zero, _)| *zero == id) && is_set(value);
        match id {
            attr::LINK => read.lower = u32_of(value).unwrap_or_default(),
            attr::LOCAL => {
                read.local = match ip_of(value) {
                    Some(IpAddr::V4(local)) if !local.is_unspecified() => Some(local),
                    _ => None,
                }
            }
            // A flag, which has no value.
            attr::COLLECT_METADATA => read.unrepresentable = true,
            attr::REMOTE | attr::ENCAP_TYPE => read.unrepresentable |= is_set(value),
            // 0 is IPv4 and MPLS.
            attr::PROTO => read.unrepresentable |= !matches!(value, [0 | IPIP]),
            _ => {}
        }
    }
    read
}

impl IpipMessage {
    /// Whether [`IpipMessage::object`] represents all attributes that this type reads.
    pub(super) const fn is_exact(&self) -> bool {
        !self.differs
    }

    /// The attributes, or `None` if they are unrepresentable.
    pub(super) fn object(&self) -> Option<LinkKind> {
        // A change in place gives a device without a source address ours.
        let local = self.local.unwrap_or(Ipv4Addr::UNSPECIFIED);
        (!self.unrepresentable).then_some(LinkKind::Ipip(Ipip { local }))
    }
}

/// The ipip attributes of a device, or `None` if it is of another kind.
fn found(is: &LinkMessage) -> Option<&IpipMessage> {
    if let KindMessage::Ipip(found) = &is.kind { Some(found) } else { None }
}

impl LinkCodec for Ipip {
    /// **Source**: flannel `pkg/backend/ipip/ipip.go: newTunnelDevice` sets the same attributes,
    /// except that its device also carries MPLS packets. This one carries only IPv4 packets.
    fn create(&self, data: &mut Messages, _: u32) {
        data.ip(attr::LOCAL, self.local.into()).attr(attr::PROTO, &[IPIP]);
        for (id, size) in ZERO.iter().filter(|(id, _)| ![attr::LINK, attr::FWMARK].contains(id)) {
            data.attr(*id, &[0; 4][..*size]);
        }
    }

    /// Adds all attributes, because the kernel resets the attributes that a request lacks
    /// (`ipip_changelink`).
    fn change(&self, is: &LinkMessage, data: &mut Messages, _: u32) {
        let Some(is) = found(is) else { return };
        if is.differs || is.local != Some(self.local) {
            self.create(data, 0);
            data.attr(attr::FWMARK, &[0; 4]);
        }
    }

    fn carries_ipv6(&self) -> bool {
        false
    }

    /// Without attributes the kernel makes a device with its default name (`ipip_tunnel_validate`).
    fn invalid(&self) -> Option<(u16, u8)> {
        Some((attr::PROTO, u8::MAX))
    }

    /// There can be several ipip devices. The name tells which one is ours.
    fn is_same_network(&self, is: &LinkMessage) -> bool {
        found(is).is_some()
    }

    /// **Source**: linux `net/ipv4/ip_tunnel.c: ip_tunnel_find`.
    fn excludes(&self, is: &LinkMessage) -> bool {
        found(is).is_some_and(|is| is.is_for_all_at(self.local) && is.lower == 0)
    }

    fn exclusive(&self) -> String {
        format!("the local address {} without a remote one", self.local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use neli::consts::nl::NlmF;

    fn message(attributes: &[(u16, &[u8])]) -> IpipMessage {
        let mut data = Messages::one(0_u16, NlmF::empty(), &[]);
        for (id, value) in attributes {
            data.attr(*id, value);
        }
        // Without the header of the message.
        read(&data.ready(0..1, 0, NlmF::empty())[16..])
    }

    #[test]
    fn attributes_that_the_kernel_cannot_reset_need_a_new_device() {
        let ours: [(u16, &[u8]); 3] =
            [(attr::LOCAL, &[192, 0, 2, 1]), (attr::REMOTE, &[0; 4]), (attr::PROTO, &[IPIP])];
        let found = message(&ours);
        let local = Ipv4Addr::new(192, 0, 2, 1);
        assert_eq!(found.object(), Some(LinkKind::Ipip(Ipip { local })));
        assert!(found.is_exact());
        let cases: [(u16, &[u8], bool, bool); 7] = [
            (attr::REMOTE, &[192, 0, 2, 7], false, true),
            (attr::PROTO, &[137], false, true),
            (attr::PROTO, &[0], true, true),
            (attr::COLLECT_METADATA, &[], false, true),
            (attr::ENCAP_TYPE, &[1, 0], false, true),
            (attr::TTL, &[64], true, false),
            (attr::PMTUDISC, &[1], true, false),
        ];
        for (id, value, representable, exact) in cases {
            let found = message(&[ours[0], ours[1], (id, value)]);
            assert_eq!(found.object().is_some(), representable, "{id} {value:?}");
            assert_eq!(found.is_exact(), exact, "{id} {value:?}");
        }
    }
}
