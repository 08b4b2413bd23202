//! Changes by other programs, over a multicast socket of its own.
//!
//! A message about a route, an IPv4 address, a new neighbour or a nexthop object has the port id of
//! the socket that requested the change. So changes that this kernel handle requested are left out,
//! if possible by a filter in the kernel. A message about an IPv6 address, an FDB entry or a
//! deleted neighbour has no port id, and one about a link has it only in some versions. Those
//! changes are always returned.
//!
//! Linux sends no messages about proxy entries (`ip neigh add proxy`; linux `pneigh_create`). They
//! are read every second, or less often if there are very many. It sends none about the UDP ports
//! of tunnels (FOU) either, which are read as often, and none about the peers of WireGuard devices,
//! which are read every half minute, on another thread.

mod event_decoder;

use std::future::pending;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::kernel::{Changes, Invalidation, KernelError};
use neli::consts::rtnl::Rtm;
use nix::sys::socket::SockProtocol;
use socket2::{SockFilter, SockRef};
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until};

use self::event_decoder::EventDecoder;
use crate::kernel::foreign_routes::ForeignRoutes;
use crate::kernel::fou;
use crate::kernel::wireguard::WireguardDevices;
use crate::transport::multicast::Multicast;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

/// `RTNLGRP_…`: LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE,
/// IPV6_RULE, NEXTHOP. Kernels before 5.3 send no messages to NEXTHOP.
const GROUPS: [u32; 9] = [1, 3, 5, 7, 8, 9, 11, 19, 32];
/// Bytes of the receive buffer, enough for about 10,000 messages.
const RECEIVE_BUFFER: usize = 8 << 20;
/// The shortest pause between two reads of the proxy entries.
const LOOK: Duration = Duration::from_secs(1);
/// The shortest pause between two reads of the WireGuard devices.
const LOOK_AT_PEERS: Duration = Duration::from_secs(30);
/// The pause is as many times as long as a read, for hosts with very many entries, up to a limit.
const LOOK_FACTOR: u32 = 100;
const LONGEST_LOOK: Duration = Duration::from_secs(30);

/// A read of the WireGuard devices: their changes, and the time that it took.
type PeerLook = (Vec<Invalidation>, Duration);

/// Receives multicast messages and returns invalidations.
pub(crate) struct Listener {
    socket: Multicast,
    decoder: EventDecoder,
    namespace: Arc<Namespace>,
    wireguard: WireguardDevices,
    /// When the proxy entries and the UDP ports are read next.
    look: Instant,
    /// When the WireGuard devices are read next.
    look_at_peers: Instant,
    /// The read that is under way. It outlives a dropped call of [`Changes::next`].
    peers: Option<JoinHandle<PeerLook>>,
}

impl Listener {
    /// Listens in the network namespace of the calling thread, which is `namespace`. Changes by the
    /// socket with the port id `port` are our own, and left out.
    pub(crate) fn open(
        namespace: Arc<Namespace>,
        port: u32,
        foreign: ForeignRoutes,
        wireguard: WireguardDevices,
    ) -> Result<Self, KernelError> {
        let socket = Multicast::open(SockProtocol::NetlinkRoute, RECEIVE_BUFFER)?;
        // The receive buffer overflows less often if our own messages do not take room in it.
        if let Err(error) = SockRef::from(&socket).attach_filter(&without_own_messages(port)) {
            tracing::debug!(%error, "our own messages are not filtered in the kernel");
        }
        socket.join(&GROUPS)?;
        let decoder = EventDecoder::new(Socket::open()?, port, foreign)?;
        let now = Instant::now();
        Ok(Self {
            socket,
            decoder,
            namespace,
            wireguard,
            look: now + LOOK,
            look_at_peers: now + LOOK_AT_PEERS,
            peers: None,
        })
    }

    /// Reads the proxy entries, and the UDP ports if there are tunnels that have some.
    fn look(&mut self) {
        let begin = std::time::Instant::now();
        if let Err(error) = self.decoder.look_for_proxies() {
            tracing::debug!(%error, "proxy entries cannot be read");
        }
        if self.decoder.has_fou_links() {
            match fou::ports(&self.namespace) {
                Ok(ports) => self.decoder.look_for_closed_ports(&ports),
                Err(error) => tracing::debug!(%error, "the UDP ports of tunnels cannot be read"),
            }
        }
        self.look = Instant::now() + (LOOK_FACTOR * begin.elapsed()).clamp(LOOK, LONGEST_LOOK);
    }

    /// Begins to read the WireGuard devices, which takes some milliseconds for thousands of peers.
    fn look_at_peers(&mut self) {
        let wireguard = self.wireguard.clone();
        let look = move || {
            let begin = std::time::Instant::now();
            (wireguard.look(), begin.elapsed())
        };
        self.peers = Some(spawn_blocking(look));
    }

    fn looked_at_peers(&mut self, (found, took): PeerLook) {
        self.peers = None;
        self.decoder.extend(found);
        self.look_at_peers = Instant::now() + (LOOK_FACTOR * took).max(LOOK_AT_PEERS);
    }

    /// Reads the waiting datagrams, up to the limit of [`Multicast::receive`]. Returns true if no
    /// more wait.
    fn read(&mut self) -> Result<bool, KernelError> {
        self.socket.receive(|datagram| match datagram {
            Some(datagram) => {
                self.decoder.take_datagram(datagram);
                Ok(())
            }
            None => self.decoder.lost(),
        })
    }
}

#[async_trait]
impl Changes for Listener {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        loop {
            if let Some(invalidation) = self.decoder.pop() {
                return Ok(invalidation);
            }
            if self.look <= Instant::now() {
                self.look();
                continue;
            }
            if self.peers.is_none() && self.look_at_peers <= Instant::now() {
                self.look_at_peers();
            }
            // Changes that never end must not delay it.
            if self.peers.as_ref().is_some_and(JoinHandle::is_finished) {
                let looked = end_of(&mut self.peers).await;
                self.looked_at_peers(looked);
                continue;
            }
            if self.read()? && self.decoder.is_empty() {
                let is_looking = self.peers.is_some();
                tokio::select! {
                    readable = self.socket.readable() => readable?,
                    () = sleep_until(self.look) => {}
                    () = sleep_until(self.look_at_peers), if !is_looking => {}
                    looked = end_of(&mut self.peers) => self.looked_at_peers(looked),
                }
            }
        }
    }
}

/// Waits for the end of a read, if there is one. If the runtime shuts down, it never ends.
async fn end_of(look: &mut Option<JoinHandle<PeerLook>>) -> PeerLook {
    let Some(look) = look else { return pending().await };
    match look.await.map_err(JoinError::try_into_panic) {
        Ok(looked) => looked,
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(_)) => pending().await,
    }
}

/// A classic BPF filter that drops messages with the port id `port`, unless they are about links.
fn without_own_messages(port: u32) -> [SockFilter; 7] {
    const LOAD_HALF: u16 = 0x28;
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    // BPF loads are big-endian; the header is in the machine's byte order.
    let kind = |kind: Rtm| u32::from(u16::from_be_bytes(u16::from(kind).to_ne_bytes()));
    let port = u32::from_be_bytes(port.to_ne_bytes());
    [
        SockFilter::new(LOAD_HALF, 0, 0, 4),
        SockFilter::new(JUMP_IF_EQUAL, 4, 0, kind(Rtm::Newlink)),
        SockFilter::new(JUMP_IF_EQUAL, 3, 0, kind(Rtm::Dellink)),
        SockFilter::new(LOAD_WORD, 0, 0, 12),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, port),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ]
}

#[cfg(test)]
mod tests {
    use flannel_core::kernel::{Footprint, Outcome};
    use flannel_core::object::{Change, Object, Route, Via};
    use flannel_core::{Kernel, Subnet};
    use test_support::eventually_async;

    use super::*;
    use crate::NetlinkKernel;
    use crate::testing::{in_netns, in_netns_async};

    fn namespace() -> Arc<Namespace> {
        Arc::new(Namespace::current().unwrap())
    }

    #[test]
    fn a_slow_read_of_wireguard_devices_delays_no_other_change() {
        in_netns_async(async || {
            let kernel = NetlinkKernel::open().unwrap();
            let wireguard = WireguardDevices::default();
            let mut listener =
                Listener::open(namespace(), 1, ForeignRoutes::default(), wireguard.clone())
                    .unwrap();
            let begin = Instant::now();
            (listener.look, listener.look_at_peers) = (begin + 2 * LONGEST_LOOK, begin);
            let (release, released) = std::sync::mpsc::channel::<()>();
            let (hold, held) = std::sync::mpsc::channel();
            let slow = std::thread::spawn(move || {
                let _busy = wireguard.busy();
                hold.send(()).unwrap();
                released.recv_timeout(LONGEST_LOOK).is_ok()
            });
            held.recv().unwrap();
            // The first call is dropped. The read goes on.
            let first = tokio::time::timeout(Duration::from_millis(10), listener.next()).await;
            assert!(first.is_err() && listener.peers.is_some());
            let dst = Subnet::host([192, 0, 2, 7].into());
            let put = Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into());
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            assert!(kernel.apply(&footprint, &[put])[0].is_done());
            let change = listener.next().await.unwrap();
            assert!(matches!(change, Invalidation::Objects(..)), "{change:?}");
            release.send(()).unwrap();
            assert!(slow.join().unwrap(), "the change came after the read");
            let is_done = async || {
                drop(tokio::time::timeout(Duration::from_millis(1), listener.next()).await);
                listener.peers.is_none() && listener.look_at_peers > Instant::now()
            };
            eventually_async(LONGEST_LOOK, is_done, || "the read does not end").await;
        });
    }

    #[test]
    fn changes_that_never_end_do_not_delay_the_look_at_wireguard_devices() {
        in_netns_async(async || {
            let other = NetlinkKernel::open().unwrap();
            let mut listener = Listener::open(
                namespace(),
                1,
                ForeignRoutes::default(),
                WireguardDevices::default(),
            )
            .unwrap();
            // It is overdue. The proxy entries are not read meanwhile, which would be a pause.
            let begin = Instant::now();
            (listener.look, listener.look_at_peers) = (begin + 2 * LONGEST_LOOK, begin);
            let dst = Subnet::host([192, 0, 2, 7].into());
            let route = Object::from(Route { dst, via: Via::Blackhole, mtu: None });
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            let mut both = [Change::Put(route.clone()), Change::Delete(route)].into_iter().cycle();
            // A change waits at each call.
            let next = async || {
                let change = both.next().unwrap();
                assert!(other.apply(&footprint, &[change])[0].is_done());
                let change = listener.next().await.unwrap();
                assert!(matches!(change, Invalidation::Objects(..)), "{change:?}");
                listener.look_at_peers >= begin + LOOK_AT_PEERS
            };
            eventually_async(LOOK_AT_PEERS, next, || "the devices are not read").await;
        });
    }

    /// A program that changes objects all the time must neither delay invalidations nor fill the
    /// memory.
    #[test]
    fn many_changes_are_returned_in_bounded_parts() {
        const MANY: u32 = 5_000;
        in_netns(|| {
            let mut listener = Listener::open(
                namespace(),
                1,
                ForeignRoutes::default(),
                WireguardDevices::default(),
            )
            .unwrap();
            let theirs: Vec<Change> = (0..MANY)
                .map(|n| Subnet::host((0x0a01_0000 + n).to_be_bytes().into()))
                .map(|dst| Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into()))
                .collect();
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            let other = NetlinkKernel::open().unwrap();
            assert!(other.apply(&footprint, &theirs).iter().all(Outcome::is_done));
            let (mut all, mut parts) = (false, Vec::new());
            while !all {
                all = listener.read().unwrap();
                let mut part = 0;
                while let Some(invalidation) = listener.decoder.pop() {
                    let Invalidation::Objects(events, _) = invalidation else {
                        // The receive buffer of an ordinary user holds fewer messages.
                        let room = SockRef::from(&listener.socket).recv_buffer_size().unwrap();
                        return assert!(
                            invalidation == Invalidation::Everything && room < RECEIVE_BUFFER,
                            "{invalidation:?}"
                        );
                    };
                    part += events.len();
                }
                parts.push(part);
            }
            assert!(parts.iter().all(|part| *part <= 1024), "{parts:?}");
            assert_eq!(parts.iter().sum::<usize>(), theirs.len(), "{parts:?}");
        });
    }
}
