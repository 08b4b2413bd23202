//! Both sides of the question about the encrypted tunnel between two nodes.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::protocol::{FarEnd, FarPeer, TUNNEL, clock, read_line, seconds};
use crate::inputs::tunnels::Tunnels;

/// The time for the whole answer.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_millis(600);

/// Asks the daemon of a node for its end of the tunnel for packets of this family. Returns `None`
/// if it does not answer, does not know the question, or has no such tunnel.
pub(crate) async fn ask(public: Option<IpAddr>, port: u16, family: Family) -> Option<FarEnd> {
    let public = public.filter(|_| port != 0)?;
    let asked = async {
        let mut stream = TcpStream::connect((public, port)).await?;
        stream.write_all(format!("{TUNNEL}{family}\n").as_bytes()).await?;
        read_line(&mut stream).await
    };
    serde_json::from_str(&timeout(ANSWER_TIMEOUT, asked).await.ok()?.ok()?).ok()
}

/// The family of a question; `None` for other lines.
pub(super) fn parse(line: &str) -> Option<Family> {
    let family = line.strip_prefix(TUNNEL)?;
    Family::BOTH.into_iter().find(|known| known.to_string() == family)
}

/// Answers the node with these subnets. Afterwards sends a packet through the tunnel, to this port:
/// without a session the kernel begins a handshake. So both ends show whether packets of the other
/// one arrive.
pub(super) async fn answer(
    stream: &mut TcpStream,
    family: Family,
    asker: Subnets,
    devices: Dual<LinkName>,
    port: u16,
) -> io::Result<()> {
    let Some(end) = blocking(move || end(family, &asker, devices)).await else { return Ok(()) };
    let line = serde_json::to_string(&end).map_err(io::Error::other)? + "\n";
    if let Some(subnet) = asker.family(family) {
        let socket = UdpSocket::bind((family.unspecified(), 0)).await?;
        // The kernel refuses it if the device has no peer for the address. The answer shows that.
        let _ = socket.send_to(b"flannel", (subnet.base(), port)).await;
    }
    stream.write_all(line.as_bytes()).await
}

/// This end of the tunnel to a node, or `None` if the tunnel is missing or cannot be read.
fn end(family: Family, asker: &Subnets, devices: Dual<LinkName>) -> Option<FarEnd> {
    let link = devices[family]?;
    let (tunnels, unread) = Tunnels::read(&NetlinkKernel::open().ok()?, [link]);
    for (link, error) in unread {
        tracing::debug!(%link, %error, "a doctor asked for the tunnel, which cannot be read");
    }
    let (_, tunnel) = tunnels.0.first()?;
    let to = asker.family(family).and_then(|subnet| tunnels.by_subnet().get(&subnet).copied());
    let peer = to.map(|to| FarPeer {
        key: to.session.key,
        psk: to.psk_digest(),
        received: to.session.received,
        sent: to.session.sent,
        handshake: to.session.handshake.and_then(seconds),
    });
    Some(FarEnd { version: 1, key: tunnel.key, port: tunnel.port, time: clock()?, peer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_names_a_family() {
        for family in Family::BOTH {
            assert_eq!(parse(&format!("{TUNNEL}{family}")), Some(family));
        }
        for other in ["", "flannel 1 10 00000000000000ff", TUNNEL, "flannel tunnel 2 IPv4"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }
}
