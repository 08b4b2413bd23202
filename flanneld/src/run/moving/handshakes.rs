//! Handshakes with peers, while this node moves to a backend that needs them.
//!
//! A peer is reached by the old backend until its handshake has completed. No packet for it takes
//! the new tunnel before, so this module sends one, and the kernel begins the handshake.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use flannel_admission::Handshakes;
use flannel_core::Subnet;
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use socket2::SockRef;
use tokio::sync::watch;
use tokio::time::sleep;

/// The pause between two looks at the devices.
const LOOK: Duration = Duration::from_secs(1);
/// The port of the protocol discard.
const DISCARD: u16 = 9;

/// Sends the subnets of peers with a completed handshake on these devices, until the future is
/// dropped. Without devices it does nothing.
pub(crate) async fn follow(
    kernel: &Arc<NetlinkKernel>,
    devices: BTreeSet<LinkName>,
    done: watch::Sender<Handshakes>,
) -> Infallible {
    while !devices.is_empty() {
        let (kernel, devices) = (Arc::clone(kernel), devices.clone());
        let found = blocking(move || look(&kernel, &devices)).await;
        done.send_if_modified(|old| {
            let changed = **old != found;
            *old = Arc::new(found);
            changed
        });
        sleep(LOOK).await;
    }
    std::future::pending().await
}

/// Returns the subnets of peers with a completed handshake, and begins the other handshakes.
fn look(kernel: &NetlinkKernel, devices: &BTreeSet<LinkName>) -> BTreeSet<Subnet> {
    let mut done = BTreeSet::new();
    for link in devices {
        let sessions = match kernel.tunnel(*link) {
            Ok(tunnel) => tunnel.sessions,
            Err(error) => {
                tracing::debug!(%link, %error, "the handshakes cannot be read");
                continue;
            }
        };
        for session in sessions {
            if session.handshake.is_some() {
                done.extend(session.allowed.values());
            } else if let Some(subnet) = session.allowed.values().next()
                && let Err(error) = knock(*link, subnet.base())
            {
                // The device has no address yet, or the peer is gone.
                tracing::debug!(%link, to = %subnet, %error, "no packet for a handshake is sent");
            }
        }
    }
    done
}

/// Sends a packet by this device, whatever the routes to its destination are.
fn knock(link: LinkName, to: IpAddr) -> io::Result<()> {
    let any = flannel_core::address::Family::of(to).unspecified();
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    SockRef::from(&socket).bind_device(Some(link.as_str().as_bytes()))?;
    socket.send_to(b"flannel", (to, DISCARD)).map(drop)
}
