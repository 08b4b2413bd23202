//! Addresses on devices.

use std::fmt;
use std::net::IpAddr;

use super::{LinkName, ObjectValue};

/// An address on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addr {
    /// The device.
    pub link: LinkName,
    /// The address.
    pub address: IpAddr,
    /// Prefix length in bits; flannel's own are /32 and /128.
    pub len: u8,
}

impl ObjectValue for Addr {
    const NAME: &'static str = "address";

    fn device(&self) -> Option<LinkName> {
        Some(self.link)
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "address {}/{} dev {}", self.address, self.len, self.link)
    }
}
