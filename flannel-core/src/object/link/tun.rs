//! Tun devices.

use std::fmt;

use super::{LinkAttributes, LinkKind};

/// A tun device with several queues and offloads. The kernel gives its packets to the program that
/// has made it. A put of a device that does not exist is only
/// [started](crate::kernel::Outcome::Started).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Tun;

impl LinkAttributes for Tun {
    fn kind(&self) -> &'static str {
        "tun"
    }

    fn can_become(&self, to: &LinkKind) -> bool {
        matches!(to, LinkKind::Tun(_))
    }
}

impl fmt::Display for Tun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("multi_queue vnet_hdr")
    }
}
