//! Addresses on devices.

use std::fmt;
use std::net::IpAddr;

use super::LinkName;

/// An address on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addr {
    /// The device.
    pub link: LinkName,
    /// The address.
    pub address: IpAddr,
    /// The prefix length, in bits.
    pub len: u8,
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "address {}/{} dev {}", self.address, self.len, self.link)
    }
}
