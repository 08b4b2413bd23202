//! Vxlan devices.

use std::fmt;
use std::net::IpAddr;

use super::{LinkAttributes, LinkKind};
use crate::address::Family;
use crate::object::{LinkName, MacAddr};

/// The attributes of a vxlan device. The kernel cannot change `vni`, `port`, `gbp` and the family
/// of `local`, and cannot remove `lower`. Such a change needs a new device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vxlan {
    /// The VXLAN network identifier, 1 to 16777215.
    pub vni: u32,
    /// The UDP port, equal on all nodes.
    pub port: u16,
    /// The MAC address of the device.
    pub mac: MacAddr,
    /// The source address of outer packets, or `None` if the kernel chooses it.
    pub local: Option<IpAddr>,
    /// The device by which outer packets leave. `None` if the routing table decides, or if that
    /// device was deleted.
    pub lower: Option<LinkName>,
    /// Whether the device learns forwarding entries from traffic.
    pub learning: bool,
    /// Whether the Group Based Policy extension is on.
    pub gbp: bool,
}

impl LinkAttributes for Vxlan {
    fn kind(&self) -> &'static str {
        "vxlan"
    }

    fn mac(&self) -> Option<MacAddr> {
        Some(self.mac)
    }

    fn lower(&self) -> Option<LinkName> {
        self.lower
    }

    /// **Source**: linux `drivers/net/vxlan/vxlan_core.c: vxlan_nl2conf`, which ignores a request
    /// to have no lower device.
    fn can_become(&self, to: &LinkKind) -> bool {
        let LinkKind::Vxlan(to) = to else { return false };
        let has_same_identity = self.vni == to.vni && self.port == to.port && self.gbp == to.gbp;
        let has_same_family = match (self.local, to.local) {
            (Some(local), Some(other)) => Family::of(local) == Family::of(other),
            _ => true,
        };
        let keeps_lower = to.lower.is_some() || self.lower.is_none();
        has_same_identity && has_same_family && keeps_lower
    }
}

impl fmt::Display for Vxlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id {} dstport {}", self.vni, self.port)?;
        self.local.map_or(Ok(()), |local| write!(f, " local {local}"))?;
        self.lower.map_or(Ok(()), |lower| write!(f, " dev {lower}"))?;
        f.write_str(if self.learning { " learning" } else { " nolearning" })?;
        f.write_str(if self.gbp { " gbp" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_identity_needs_a_new_device() {
        let address = |text: &str| Some(text.parse().unwrap());
        let device = Vxlan {
            vni: 1,
            port: 8472,
            mac: MacAddr::local([1; 6]),
            local: address("192.0.2.1"),
            lower: Some("eth0".parse().unwrap()),
            learning: false,
            gbp: false,
        };
        type Change = fn(&mut Vxlan);
        let changes: [(bool, Change); 9] = [
            (true, |_| {}),
            (true, |to| to.mac = MacAddr::local([2; 6])),
            (true, |to| to.learning = true),
            (true, |to| to.lower = Some("eth1".parse().unwrap())),
            (true, |to| to.local = None),
            (false, |to| to.local = Some("2001:db8::1".parse().unwrap())),
            (false, |to| to.lower = None),
            (false, |to| to.vni = 2),
            (false, |to| to.gbp = true),
        ];
        for (possible, change) in changes {
            let mut to = device;
            change(&mut to);
            assert_eq!(device.can_become(&to.into()), possible, "{to}");
        }
    }
}
