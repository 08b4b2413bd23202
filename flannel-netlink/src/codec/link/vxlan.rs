//! Vxlan devices.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::object::{LinkKind, LinkName, MacAddr, Vxlan};

use super::{KindMessage, LinkCodec, LinkMessage, is_set};
use crate::transport::wire::{Attributes, Messages, ip_of, u32_of};

/// `IFLA_VXLAN_…` (linux `include/uapi/linux/if_link.h`).
mod attr {
    pub(super) const ID: u16 = 1;
    pub(super) const GROUP: u16 = 2;
    pub(super) const LINK: u16 = 3;
    pub(super) const LOCAL: u16 = 4;
    pub(super) const TTL: u16 = 5;
    pub(super) const TOS: u16 = 6;
    pub(super) const LEARNING: u16 = 7;
    pub(super) const AGEING: u16 = 8;
    pub(super) const LIMIT: u16 = 9;
    pub(super) const PORT_RANGE: u16 = 10;
    pub(super) const PROXY: u16 = 11;
    pub(super) const RSC: u16 = 12;
    pub(super) const L2MISS: u16 = 13;
    pub(super) const L3MISS: u16 = 14;
    pub(super) const PORT: u16 = 15;
    pub(super) const GROUP6: u16 = 16;
    pub(super) const LOCAL6: u16 = 17;
    pub(super) const UDP_CSUM: u16 = 18;
    pub(super) const UDP_ZERO_CSUM6_TX: u16 = 19;
    pub(super) const UDP_ZERO_CSUM6_RX: u16 = 20;
    pub(super) const REMCSUM_TX: u16 = 21;
    pub(super) const REMCSUM_RX: u16 = 22;
    pub(super) const GBP: u16 = 23;
    pub(super) const REMCSUM_NOPARTIAL: u16 = 24;
    pub(super) const COLLECT_METADATA: u16 = 25;
    pub(super) const LABEL: u16 = 26;
    pub(super) const GPE: u16 = 27;
    pub(super) const TTL_INHERIT: u16 = 28;
    pub(super) const DF: u16 = 29;
    pub(super) const VNIFILTER: u16 = 30;
    pub(super) const LOCALBYPASS: u16 = 31;
    pub(super) const LABEL_POLICY: u16 = 32;
}

/// Attributes with the values that flannel's devices have, which are the defaults. Devices with
/// other values are changed in place. `AGEING` is the age of learned FDB entries in seconds.
const RESET: [(u16, &[u8]); 7] = [
    (attr::TTL, &[0]),
    (attr::TOS, &[0]),
    (attr::DF, &[0]),
    (attr::LABEL, &[0; 4]),
    (attr::LABEL_POLICY, &[0; 4]),
    (attr::AGEING, &300_u32.to_ne_bytes()),
    (attr::LOCALBYPASS, &[1]),
];

/// `IFLA_INFO_DATA` of a vxlan device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VxlanMessage {
    vni: u32,
    /// The UDP destination port.
    pub(super) port: u16,
    /// The source address of outer packets, or `None` if the kernel chooses it.
    local: Option<IpAddr>,
    /// The index of the lower device, or 0 without a lower device.
    pub(super) lower: u32,
    learning: bool,
    gbp: bool,
    /// Its outer packets are IPv6.
    over_ipv6: bool,
    /// It takes packets of all networks and of both families (`external`).
    external: bool,
    /// It has another receive flag than GBP, or is external. See [`VxlanMessage::shares_port`].
    receives_otherwise: bool,
    /// For each attribute of [`RESET`], whether it has another value.
    reset: [bool; RESET.len()],
    /// It has attributes that flannel's devices lack: a multicast group, external tunnel metadata,
    /// ARP proxying, miss notifications, a limit of the FDB, a range of source ports, or other
    /// checksum options. The kernel cannot reset them, or (a group, before Linux 6.15) not fully.
    /// Such a device is deleted and created again. `IFLA_VXLAN_RESERVED_BITS` is not compared,
    /// because its default depends on the other attributes.
    unrepresentable: bool,
}

/// Reads `IFLA_INFO_DATA`.
pub(super) fn read(data: &[u8]) -> VxlanMessage {
    let mut read = VxlanMessage::default();
    // A flag is set if the attribute has no value, or one that is not 0.
    let flag = |value: &[u8]| value.is_empty() || is_set(value);
    for (id, value) in Attributes(data) {
        if let Some(n) = RESET.iter().position(|(reset, _)| *reset == id) {
            read.reset[n] = value != RESET[n].1;
            continue;
        }
        match id {
            attr::ID => read.vni = u32_of(value).unwrap_or_default(),
            attr::PORT => read.port = value.try_into().map_or(0, u16::from_be_bytes),
            attr::LOCAL | attr::LOCAL6 => {
                read.over_ipv6 |= id == attr::LOCAL6;
                read.local = ip_of(value).filter(|address| !address.is_unspecified());
            }
            attr::LINK => read.lower = u32_of(value).unwrap_or_default(),
            attr::LEARNING => read.learning = flag(value),
            attr::GBP => read.gbp = true,
            attr::GROUP | attr::GROUP6 => {
                read.over_ipv6 |= id == attr::GROUP6;
                read.unrepresentable = true;
            }
            // Without the attribute the kernel computes checksums (since Linux 4.6).
            attr::UDP_CSUM => read.unrepresentable |= !flag(value),
            attr::GPE
            | attr::UDP_ZERO_CSUM6_RX
            | attr::REMCSUM_RX
            | attr::REMCSUM_NOPARTIAL
            | attr::COLLECT_METADATA
            | attr::VNIFILTER => {
                read.unrepresentable |= flag(value);
                read.receives_otherwise |= flag(value);
                read.external |= id == attr::COLLECT_METADATA && flag(value);
            }
            attr::LIMIT
            | attr::PORT_RANGE
            | attr::TTL_INHERIT
            | attr::PROXY
            | attr::RSC
            | attr::L2MISS
            | attr::L3MISS
            | attr::UDP_ZERO_CSUM6_TX
            | attr::REMCSUM_TX => read.unrepresentable |= flag(value),
            _ => {}
        }
    }
    read
}

impl VxlanMessage {
    /// Whether both devices can have one UDP port: their sockets are of different families, or are
    /// the same socket, which needs the same receive flags.
    ///
    /// **Source**: linux `drivers/net/vxlan/vxlan_core.c: __vxlan_sock_add, vxlan_find_sock`,
    /// `include/net/vxlan.h: VXLAN_F_RCV_FLAGS`.
    pub(super) fn shares_port(&self, wanted: &Vxlan) -> bool {
        let is_ipv6 = wanted.local.is_some_and(|local| local.is_ipv6());
        let has_same_flags = self.gbp == wanted.gbp && !self.receives_otherwise;
        has_same_flags || (!self.external && self.over_ipv6 != is_ipv6)
    }

    /// Whether [`VxlanMessage::object`] represents all attributes that this type reads.
    pub(super) fn is_exact(&self) -> bool {
        !self.reset.contains(&true)
    }

    /// The attributes, or `None` if they are unrepresentable.
    pub(super) fn object(&self, mac: MacAddr, lower: Option<LinkName>) -> Option<LinkKind> {
        if self.unrepresentable {
            return None;
        }
        let Self { vni, port, local, learning, gbp, .. } = *self;
        Some(Vxlan { vni, port, mac, local, lower, learning, gbp }.into())
    }
}

/// The vxlan attributes of a device, or `None` if it is of another kind.
fn found(is: &LinkMessage) -> Option<&VxlanMessage> {
    if let KindMessage::Vxlan(found) = &is.kind { Some(found) } else { None }
}

impl LinkCodec for Vxlan {
    /// **Source**: flannel `pkg/backend/vxlan/device.go: newVXLANDevice` sets the same attributes.
    fn create(&self, data: &mut Messages, lower: u32) {
        data.u32(attr::ID, self.vni).attr(attr::PORT, &self.port.to_be_bytes());
        if lower != 0 {
            data.u32(attr::LINK, lower);
        }
        if let Some(local) = self.local {
            put_local(data, local);
        }
        data.attr(attr::LEARNING, &[u8::from(self.learning)]);
        if self.gbp {
            data.attr(attr::GBP, &[]);
        }
        for off in [
            attr::TTL,
            attr::TOS,
            attr::PROXY,
            attr::RSC,
            attr::L2MISS,
            attr::L3MISS,
            attr::UDP_ZERO_CSUM6_TX,
            attr::UDP_ZERO_CSUM6_RX,
        ] {
            data.attr(off, &[0]);
        }
    }

    fn change(&self, is: &LinkMessage, data: &mut Messages, lower: u32) {
        let Some(is) = found(is) else { return };
        match (is.local, self.local) {
            (old, Some(local)) if old != Some(local) => put_local(data, local),
            (Some(old), None) => put_local(data, Family::of(old).unspecified()),
            _ => {}
        }
        if is.lower != lower {
            data.u32(attr::LINK, lower);
        }
        if is.learning != self.learning {
            data.attr(attr::LEARNING, &[u8::from(self.learning)]);
        }
        for ((id, value), _) in RESET.iter().zip(is.reset).filter(|(_, differs)| *differs) {
            data.attr(*id, value);
        }
    }

    fn is_same_network(&self, is: &LinkMessage) -> bool {
        found(is).is_some_and(|is| is.vni == self.vni)
    }

    /// The kernel refuses a second device with the same VNI, UDP port, address family of the outer
    /// packets and receive flags (GBP and others). The flags are not compared here.
    ///
    /// **Source**: linux `drivers/net/vxlan/vxlan_core.c: vxlan_vni_in_use`.
    fn excludes(&self, is: &LinkMessage) -> bool {
        let family = |local: Option<IpAddr>| local.map_or(Family::V4, Family::of);
        found(is).is_some_and(|is| {
            is.vni == self.vni && is.port == self.port && family(is.local) == family(self.local)
        })
    }

    fn exclusive(&self) -> String {
        format!("the VNI {} and the UDP port {}", self.vni, self.port)
    }
}

fn put_local(data: &mut Messages, local: IpAddr) {
    data.ip(if local.is_ipv4() { attr::LOCAL } else { attr::LOCAL6 }, local);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The attributes of a device, as reported by a kernel that knows all of [`RESET`].
    fn reported() -> Vec<(u16, Vec<u8>)> {
        let mut all = vec![
            (attr::ID, 1_u32.to_ne_bytes().to_vec()),
            (attr::PORT, 8472_u16.to_be_bytes().to_vec()),
            (attr::PORT_RANGE, vec![0; 4]),
            (attr::UDP_CSUM, vec![1]),
            (attr::UDP_ZERO_CSUM6_TX, vec![0]),
            (attr::UDP_ZERO_CSUM6_RX, vec![0]),
        ];
        all.extend(RESET.iter().map(|(id, value)| (*id, value.to_vec())));
        all
    }

    fn message(attributes: &[(u16, Vec<u8>)]) -> VxlanMessage {
        let mut data = Vec::new();
        for (id, value) in attributes {
            let len = 4 + value.len();
            data.extend(u16::try_from(len).unwrap().to_ne_bytes());
            data.extend(id.to_ne_bytes());
            data.extend(value);
            data.resize(data.len().next_multiple_of(4), 0);
        }
        read(&data)
    }

    /// iproute2 sets some of these attributes only in recent versions.
    #[test]
    fn every_other_value_is_seen() {
        let mac = MacAddr::local([1; 6]);
        let healthy = message(&reported());
        assert!(healthy.is_exact() && healthy.object(mac, None).is_some());
        for (n, (id, value)) in reported().into_iter().enumerate().skip(2) {
            let mut other = reported();
            other[n].1 = value.iter().map(|byte| byte ^ 1).collect();
            let found = message(&other);
            assert_ne!(found, healthy, "attribute {id} causes an event");
            let in_place = RESET.iter().any(|(reset, _)| *reset == id);
            assert_eq!(found.object(mac, None).is_some(), in_place, "attribute {id}");
            assert_eq!(found.is_exact(), !in_place, "attribute {id}");
        }
    }
}
