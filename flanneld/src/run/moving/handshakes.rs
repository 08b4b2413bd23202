//! Handshakes with peers, while this node moves to a backend that needs them.
//!
//! While a peer offers the old backend too, it is reached by that until a handshake has completed
//! once. No packet for it takes the new tunnel before, so this module sends one, and the kernel
//! begins the handshake. The node keeps its old offer until then.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use flannel_admission::Handshakes;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_moving::Tunnels;
use flannel_netlink::NetlinkKernel;
use socket2::SockRef;
use tokio::sync::watch;
use tokio::time::sleep;

/// The pause between two looks at the devices.
const LOOK: Duration = Duration::from_secs(1);
/// A packet is sent at each look of so many. The kernel repeats a handshake every five seconds.
const KNOCKS: u32 = 5;
/// The port of the protocol discard.
const DISCARD: u16 = 9;

/// Sends the tunnels by these devices to `tunnels`, and the open ones to `done`, until the future
/// is dropped. Without devices it does nothing.
pub(crate) async fn follow(
    kernel: &Arc<NetlinkKernel>,
    devices: BTreeSet<LinkName>,
    (done, tunnels): (watch::Sender<Handshakes>, watch::Sender<Option<Tunnels>>),
) -> Infallible {
    let mut looks = 0_u32;
    while !devices.is_empty() {
        let (kernel, devices) = (Arc::clone(kernel), devices.clone());
        let knocks = looks.is_multiple_of(KNOCKS);
        looks = looks.wrapping_add(1);
        match blocking(move || look(&kernel, &devices, knocks)).await {
            Ok(found) => {
                done.send_if_modified(|old| {
                    let changed = **old != found.open;
                    *old = Arc::new(found.open.clone());
                    changed
                });
                tunnels.send_if_modified(|old| old.replace(found.clone()).as_ref() != Some(&found));
            }
            // The last look stays: a part of the tunnels would look like all of them.
            Err((link, error)) => {
                tracing::debug!(%link, %error, "the handshakes cannot be read");
            }
        }
        sleep(LOOK).await;
    }
    std::future::pending().await
}

/// Returns the tunnels to peers. With `knocks` it begins the handshakes of those that wait.
///
/// # Errors
/// A device cannot be read.
fn look(
    kernel: &NetlinkKernel,
    devices: &BTreeSet<LinkName>,
    knocks: bool,
) -> Result<Tunnels, (LinkName, KernelError)> {
    let mut found = Tunnels::default();
    for link in devices {
        for session in kernel.tunnel(*link).map_err(|error| (*link, error))?.sessions {
            if session.handshake.is_some() {
                found.open.extend(session.allowed.values());
                continue;
            }
            found.waiting.extend(session.allowed.values());
            if knocks
                && let Some(subnet) = session.allowed.values().next()
                && let Err(error) = knock(*link, subnet.base())
            {
                // The device has no address yet, or the peer is gone.
                tracing::debug!(%link, to = %subnet, %error, "no packet for a handshake is sent");
            }
        }
    }
    Ok(found)
}

/// Sends a packet by this device, whatever the routes to its destination are.
fn knock(link: LinkName, to: IpAddr) -> io::Result<()> {
    let any = flannel_core::address::Family::of(to).unspecified();
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    SockRef::from(&socket).bind_device(Some(link.as_str().as_bytes()))?;
    socket.send_to(b"flannel", (to, DISCARD)).map(drop)
}
