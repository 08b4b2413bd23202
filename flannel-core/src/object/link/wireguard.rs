//! WireGuard devices.

use std::fmt;

use super::{LinkAttributes, LinkKind};
use crate::object::Secret;

/// The attributes of a WireGuard device. Its peers are objects of their own
/// ([`Peer`](crate::object::Peer)).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wireguard {
    /// The private key of this node: 32 bytes, clamped as in RFC 7748, section 5. The kernel clamps
    /// a key that is not, so such a key is never in place.
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

/// As `wg set` takes them.
impl fmt::Display for Wireguard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "listen-port {} private-key {}", self.port, self.key)
    }
}
