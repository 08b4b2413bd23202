//! The end of a tunnel, and its text in a record.

use std::fmt;
use std::net::IpAddr;

use flannel_core::backend::Transport;
use flannel_core::object::LinkName;

const AT: &str = " strangers at ";
const AND: &str = " and ";
const FOR: &str = " for ";
const UDP: &str = "UDP port ";
const PROTOCOL: &str = "IP protocol ";

/// The end of a tunnel on this node, in one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunnelEnd {
    /// Whether packets of strangers are dropped. If not, they are only counted.
    pub drops: bool,
    /// The device from which packets come after the kernel has taken them out of the tunnel. `None`
    /// if a program takes them out and checks their sources itself. The guard then refuses two
    /// kinds of packets. The first are tunnel packets by a device that neither has the tunnel's
    /// address nor leads back to the sender. The second are tunnel packets that pods, or hosts
    /// behind this node, send to the tunnel of a peer.
    pub device: Option<LinkName>,
    /// The address at which the packets of the tunnel arrive.
    pub local: IpAddr,
    /// The ports or protocols of the packets of the tunnel.
    pub transports: Vec<Transport>,
}

/// For example `drops strangers at UDP port 8472 for flannel.1`.
impl fmt::Display for TunnelEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.drops { "drops" } else { "counts" };
        let transports: Vec<String> = self.transports.iter().map(ToString::to_string).collect();
        write!(f, "{verb}{AT}{}", transports.join(AND))?;
        if let Some(device) = self.device {
            write!(f, "{FOR}{device}")?;
        }
        Ok(())
    }
}

impl TunnelEnd {
    /// The end with this address and text, or `None` if the text does not describe an end.
    pub(super) fn parse(local: IpAddr, text: &str) -> Option<Self> {
        let (verb, rest) = text.split_once(AT)?;
        let drops = match verb {
            "drops" => true,
            "counts" => false,
            _ => return None,
        };
        let (transports, device) = match rest.split_once(FOR) {
            Some((transports, device)) => (transports, Some(device.parse().ok()?)),
            None => (rest, None),
        };
        let transports = transports.split(AND).map(transport).collect::<Option<Vec<_>>>()?;
        Some(Self { drops, device, local, transports })
    }
}

fn transport(text: &str) -> Option<Transport> {
    if let Some(port) = text.strip_prefix(UDP) {
        return port.parse().ok().map(Transport::Udp);
    }
    text.strip_prefix(PROTOCOL)?.parse().ok().map(Transport::Protocol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_read_from_its_text() {
        for (local, text) in [
            ("192.0.2.7", "drops strangers at UDP port 8472 for flannel.1"),
            ("192.0.2.7", "counts strangers at IP protocol 4 for flannel.ipip"),
            ("2001:db8::7", "drops strangers at UDP port 8285"),
            ("192.0.2.7", "drops strangers at UDP port 7 and IP protocol 253"),
        ] {
            let end = TunnelEnd::parse(local.parse().unwrap(), text).unwrap();
            assert_eq!(end.to_string(), text);
        }
        let local = "192.0.2.7".parse().unwrap();
        for wrong in [
            "from 192.0.2.8",
            "takes strangers at UDP port 8472 for flannel.1",
            "drops strangers at UDP port 65536",
            "drops strangers at UDP port 1 for a/b",
        ] {
            assert_eq!(TunnelEnd::parse(local, wrong), None, "{wrong}");
        }
    }
}
