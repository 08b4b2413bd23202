//! Handshakes with peers, while this node moves to a backend that needs them.
//!
//! While a peer offers the old backend too, it is reached by that until a handshake has completed
//! once. No packet for it takes the new tunnel before, so this module sends one, and the kernel
//! begins the handshake. The node keeps its old offer until then.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::Tunnel;
use flannel_route::admission::Handshakes;
use flannel_route::moving::Tunnels;
use socket2::SockRef;
use tokio::sync::watch;
use tokio::time::sleep;

use super::Ended;

/// The pause between two reads of the devices.
const PAUSE: Duration = Duration::from_secs(1);
/// A packet is sent at one read of so many. The kernel repeats a handshake every five seconds.
const READS_PER_PACKET: u32 = 5;
/// The port of the protocol discard.
const DISCARD: u16 = 9;

/// Reads the tunnels by a device, as
/// [`NetlinkKernel::tunnel`](flannel_netlink::NetlinkKernel::tunnel) does.
pub(crate) trait ReadTunnel:
    Fn(LinkName) -> Result<Tunnel, KernelError> + Send + Sync + 'static
{
}

impl<T: Fn(LinkName) -> Result<Tunnel, KernelError> + Send + Sync + 'static> ReadTunnel for T {}

/// Follows the tunnels by these devices. Without devices it does nothing.
pub(crate) struct HandshakeController<R> {
    pub(crate) read: R,
    pub(crate) devices: BTreeSet<LinkName>,
    /// Gets the peers whose tunnels are open.
    pub(crate) open: watch::Sender<Handshakes>,
    /// Gets all tunnels.
    pub(crate) tunnels: watch::Sender<Option<Tunnels>>,
}

impl<R: ReadTunnel> HandshakeController<R> {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        let read = Arc::new(self.read);
        let mut reads = 0_u32;
        while !self.devices.is_empty() {
            let read = Arc::clone(&read);
            let devices = self.devices.clone();
            let sends = reads.is_multiple_of(READS_PER_PACKET);
            reads = reads.wrapping_add(1);
            match blocking(move || read_tunnels(&*read, &devices, sends)).await {
                Ok(found) => {
                    self.open.send_if_modified(|old| {
                        let changed = **old != found.open;
                        *old = Arc::new(found.open.clone());
                        changed
                    });
                    self.tunnels.send_if_modified(|old| {
                        old.replace(found.clone()).as_ref() != Some(&found)
                    });
                }
                // The last tunnels stay: a part of them would look like all of them.
                Err((link, error)) => {
                    tracing::debug!(%link, %error, "the handshakes cannot be read");
                }
            }
            sleep(PAUSE).await;
        }
        std::future::pending().await
    }
}

/// Returns the tunnels to peers. With `sends` it begins the handshakes of those that wait.
///
/// # Errors
/// A device cannot be read.
fn read_tunnels(
    read: &impl ReadTunnel,
    devices: &BTreeSet<LinkName>,
    sends: bool,
) -> Result<Tunnels, (LinkName, KernelError)> {
    let mut found = Tunnels::default();
    for link in devices {
        for session in read(*link).map_err(|error| (*link, error))?.sessions {
            if session.handshake.is_some() {
                found.open.extend(session.allowed.values());
                continue;
            }
            found.waiting.extend(session.allowed.values());
            if sends
                && let Some(subnet) = session.allowed.values().next()
                && let Err(error) = begin_handshake(*link, subnet.base())
            {
                // The device has no address yet, or the peer is gone.
                tracing::debug!(%link, to = %subnet, %error, "no packet for a handshake is sent");
            }
        }
    }
    Ok(found)
}

/// Sends a packet by this device, whatever the routes to its destination are. The kernel then begins
/// a handshake.
fn begin_handshake(link: LinkName, to: IpAddr) -> io::Result<()> {
    let any = flannel_core::address::Family::of(to).unspecified();
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    SockRef::from(&socket).bind_device(Some(link.as_str().as_bytes()))?;
    socket.send_to(b"flannel", (to, DISCARD)).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::SystemTime;

    use flannel_core::Subnet;
    use flannel_core::object::PublicKey;
    use flannel_netlink::Session;
    use test_support::eventually_async;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn tunnel(subnet: Subnet) -> Tunnel {
        let key = PublicKey([7; 32]);
        let session = Session {
            key,
            allowed: [subnet].into_iter().collect(),
            psk: None,
            put: None,
            endpoint: None,
            handshake: Some(SystemTime::UNIX_EPOCH),
            received: 0,
            sent: 0,
        };
        Tunnel { key, port: 51820, sessions: vec![session] }
    }

    /// The tunnels by the other device alone would look like all of them.
    #[tokio::test]
    async fn the_last_tunnels_stay_while_a_device_cannot_be_read() {
        let subnets: [Subnet; 2] = ["10.1.1.0/24", "10.1.2.0/24"].map(|text| text.parse().unwrap());
        let links: [LinkName; 2] = ["flannel-wg", "flannel-wg2"].map(|text| text.parse().unwrap());
        // The second device: whether it can be read, and how often that was tried.
        let second = Arc::new(Mutex::new((true, 0)));
        let shared = Arc::clone(&second);
        let read = move |link| {
            if link == links[0] {
                return Ok(tunnel(subnets[0]));
            }
            let mut second = shared.lock().unwrap();
            second.1 += 1;
            if second.0 { Ok(tunnel(subnets[1])) } else { Err(KernelError::new(19)) }
        };
        let (handshakes, open) = watch::channel(Handshakes::default());
        let (sender, tunnels) = watch::channel(None);
        let work = async {
            let all = Tunnels { open: subnets.into(), waiting: BTreeSet::new() };
            let is_known = async || tunnels.borrow().as_ref() == Some(&all);
            eventually_async(PATIENCE, is_known, || "the tunnels are not known").await;
            let tries = || second.lock().unwrap().1;
            second.lock().unwrap().0 = false;
            let before = tries();
            let is_tried = async || tries() >= before + 2;
            eventually_async(PATIENCE, is_tried, || "the device is not read again").await;
            assert_eq!((tunnels.borrow().as_ref(), &**open.borrow()), (Some(&all), &all.open));
        };
        let devices = links.into();
        let controller = HandshakeController { read, devices, open: handshakes, tunnels: sender };
        tokio::select! {
            ended = controller.run() => panic!("{ended:?}"),
            () = work => {}
        }
    }
}
