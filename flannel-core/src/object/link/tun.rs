//! Tun devices.

use std::fmt;

use super::{LinkAttributes, LinkKind};

/// A tun device with several queues and offloads. Another program creates it, and the kernel passes
/// packets to that program. So the put of a tun device that does not exist is only
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
