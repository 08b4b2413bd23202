//! Tunnel devices whose packets travel in UDP datagrams.

use std::fmt;
use std::net::Ipv4Addr;

use super::{LinkAttributes, LinkKind};
use crate::object::LinkName;

/// The attributes of an ipip device without a remote address whose packets travel in UDP datagrams
/// (Foo over UDP), and the UDP port at which it receives them. Each datagram has one packet,
/// without a further header. The device takes packets from every host.
///
/// **Source**: linux `net/ipv4/fou_core.c`, in the mode `FOU_ENCAP_DIRECT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fou {
    /// The source address of outer packets.
    pub local: Ipv4Addr,
    /// The device by which outer packets leave, or `None` if that device was deleted.
    pub lower: Option<LinkName>,
    /// The destination port of datagrams, equal on all nodes.
    pub port: u16,
    /// Whether `port` is also the source port of datagrams. If not, the kernel chooses a source
    /// port for each flow.
    pub one_port: bool,
}

impl LinkAttributes for Fou {
    fn kind(&self) -> &'static str {
        "ipip"
    }

    fn lower(&self) -> Option<LinkName> {
        self.lower
    }

    fn can_become(&self, to: &LinkKind) -> bool {
        matches!(to, LinkKind::Fou(_))
    }
}

impl fmt::Display for Fou {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, lower, port, one_port } = self;
        write!(f, "local {local}")?;
        lower.map_or(Ok(()), |lower| write!(f, " dev {lower}"))?;
        write!(f, " encap fou encap-dport {port} encap-sport ")?;
        if *one_port { write!(f, "{port}") } else { f.write_str("auto") }
    }
}
