//! WireGuard devices.

use std::fmt;

use super::{LinkAttributes, LinkKind};
use crate::object::Secret;

/// The attributes of a WireGuard device. Its peers are separate objects
/// ([`Peer`](crate::object::Peer)).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wireguard {
    /// The private key of this node: 32 bytes, clamped as in RFC 7748, section 5. The kernel clamps
    /// any other key, and a snapshot then shows a key that differs from it.
    pub key: Secret,
    /// The UDP port on which the device listens.
    pub port: u16,
}

impl LinkAttributes for Wireguard {
    fn kind(&self) -> &'static str {
        "wireguard"
    }

    fn can_become(&self, to: &LinkKind) -> bool {
        matches!(to, LinkKind::Wireguard(_))
    }
}

/// Writes the arguments of `wg set`.
impl fmt::Display for Wireguard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "listen-port {} private-key {}", self.port, self.key)
    }
}
