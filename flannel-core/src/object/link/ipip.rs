//! Ipip devices.

use std::fmt;
use std::net::Ipv4Addr;

use super::{LinkAttributes, LinkKind};

/// The attributes of an ipip device without a remote address. The device takes packets from every
/// host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ipip {
    /// The source address of outer packets.
    pub local: Ipv4Addr,
}

impl LinkAttributes for Ipip {
    fn kind(&self) -> &'static str {
        "ipip"
    }

    fn can_become(&self, to: &LinkKind) -> bool {
        matches!(to, LinkKind::Ipip(_))
    }
}

impl fmt::Display for Ipip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local {}", self.local)
    }
}
