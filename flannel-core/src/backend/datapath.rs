//! The datapath of a network.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::ExternalInterface;
use crate::address::{Dual, Family};
use crate::object::LinkName;

/// How packets travel between the nodes of a network. The firewall, the status and the diagnosis
/// use it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Datapath {
    /// The tunnel device of each family. `None` if packets leave by the external interface, or if
    /// the family is not enabled.
    pub devices: Dual<LinkName>,
    /// The bytes that the tunnel adds to a packet of each family. `None` or 0 if it adds nothing.
    pub overhead: Dual<u32>,
    /// The MTU between the nodes that the config sets, in bytes. `None` if it sets none. A node
    /// whose external interface carries less uses the MTU of that interface.
    pub mtu: Option<u32>,
    /// The packets that firewalls between nodes must let pass, besides packets of pods.
    pub transports: Vec<Transport>,
    /// The transports whose packets travel only between addresses of one family. Packets of other
    /// transports travel between addresses of each family.
    pub outer: BTreeMap<Transport, Family>,
    /// Whether packets of pods travel between some nodes without a tunnel.
    pub bare: bool,
    /// Whether this node reaches peers on the same link without the tunnel.
    pub direct: bool,
    /// The devices that encrypt all packets. With `RequireEncryption` the firewall drops packets to
    /// pods of other nodes that leave by any other device.
    pub encrypted: BTreeSet<LinkName>,
    /// The name of the option that makes the tunnel carry packet marks, so that a received packet
    /// has the mark that its sender gave it. `None` if packets keep the mark that this node gives
    /// them.
    pub carries_marks: Option<&'static str>,
}

impl Datapath {
    /// The MTU that the config sets, if the external interface carries less.
    pub fn mtu_above(&self, uplink: &ExternalInterface) -> Option<u32> {
        self.mtu.filter(|mtu| *mtu > uplink.mtu)
    }

    /// Adds the datapath of a backend that runs beside this one. If both have a tunnel of one
    /// family, the device of `self` stays.
    pub fn merge(&mut self, other: Self) {
        self.direct |= other.direct || self.devices != other.devices;
        self.bare |= other.bare;
        self.carries_marks = self.carries_marks.or(other.carries_marks);
        self.encrypted.extend(other.encrypted);
        for (family, device) in other.devices.iter() {
            if self.devices[family].is_none() {
                self.devices[family] = Some(*device);
                self.overhead[family] = other.overhead[family];
            }
        }
        // A transport of both has the families of both.
        self.outer.retain(|transport, family| {
            !other.transports.contains(transport) || other.outer.get(transport) == Some(family)
        });
        let limited = other.outer.into_iter();
        self.outer.extend(limited.filter(|(transport, _)| !self.transports.contains(transport)));
        let new =
            other.transports.into_iter().filter(|transport| !self.transports.contains(transport));
        let new: Vec<Transport> = new.collect();
        self.transports.extend(new);
    }
}

/// A kind of packet that nodes of a network send to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// UDP datagrams to this port.
    Udp(u16),
    /// IP packets of this protocol number. A firewall can admit only packets of accepted peers.
    Protocol(u8),
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(port) => write!(f, "UDP port {port}"),
            Self::Protocol(number) => write!(f, "IP protocol {number}"),
        }
    }
}
