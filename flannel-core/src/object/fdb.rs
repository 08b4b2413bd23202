//! Forwarding entries of vxlan devices.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, MacAddr};

/// A permanent forwarding entry: frames for `mac` go to the VTEP at `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fdb {
    /// The vxlan device.
    pub link: LinkName,
    /// The inner destination.
    pub mac: MacAddr,
    /// The outer destination.
    pub dst: IpAddr,
}

impl Fdb {
    /// Whether the MAC address names the outer destination ([`MacAddr::naming`]). Of several leases
    /// that define the entry for one MAC address, only one whose public address it names can be the
    /// lease of the VTEP that has it.
    pub fn is_named(&self) -> bool {
        self.mac == MacAddr::naming(self.dst)
    }
}

impl fmt::Display for Fdb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fdb {} dst {} dev {}", self.mac, self.dst, self.link)
    }
}
