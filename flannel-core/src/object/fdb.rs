//! Forwarding entries of vxlan devices.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, MacAddr};

/// A permanent forwarding entry of a vxlan device: frames for `mac` go to the VTEP at `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fdb {
    /// The vxlan device.
    pub link: LinkName,
    /// The destination of the inner frame: the MAC address of the VTEP.
    pub mac: MacAddr,
    /// The destination of the outer packet: the public address of the VTEP.
    pub dst: IpAddr,
}

impl Fdb {
    /// Whether the MAC address is the one that [`MacAddr::derived_from`] derives from the outer
    /// destination. This is the [`Proof`](crate::backend::Proof) of `vxlan`: if several leases
    /// define an entry for one MAC address, only a lease for which this is true can be accepted.
    pub fn is_derived(&self) -> bool {
        self.mac == MacAddr::derived_from(self.dst)
    }
}

impl fmt::Display for Fdb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fdb {} dst {} dev {}", self.mac, self.dst, self.link)
    }
}
