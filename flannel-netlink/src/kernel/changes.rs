//! Changes by other programs, over a multicast socket of its own.
//!
//! A message about a route, an IPv4 address, a new neighbour or a nexthop object has the port id of
//! the socket that requested the change. So changes that this kernel handle requested are left out,
//! if possible by a filter in the kernel. A message about an IPv6 address, an FDB entry or a
//! deleted neighbour has no port id, and a message about a link has it only in some versions. Those
//! changes are always returned.
//!
//! Linux sends no messages about three kinds of objects, which are scanned instead:
//! - Proxy entries (`ip neigh add proxy`; linux `pneigh_create`): every second, or less often if
//!   there are very many.
//! - The UDP ports of tunnels (FOU): as often.
//! - The peers of WireGuard devices: every half minute, on another thread.

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
/// The shortest pause between two scans of the proxy entries and the UDP ports.
const SCAN_PAUSE: Duration = Duration::from_secs(1);
/// The shortest pause between two scans of the WireGuard devices.
const PEER_SCAN_PAUSE: Duration = Duration::from_secs(30);
/// The pause is at least this many times as long as the scan, for hosts with very many entries.
const PAUSE_FACTOR: u32 = 100;
/// The longest pause between two scans of the proxy entries and the UDP ports.
const LONGEST_SCAN_PAUSE: Duration = Duration::from_secs(30);

/// A finished scan of the WireGuard devices.
struct PeerScan {
    changes: Vec<Invalidation>,
    took: Duration,
}

/// Changes of kernel objects by other programs: receives multicast messages, and scans the objects
/// that have none.
pub(crate) struct NetlinkChanges {
    socket: Multicast,
    decoder: EventDecoder,
    namespace: Arc<Namespace>,
    wireguard: WireguardDevices,
    /// The time of the next scan of the proxy entries and the UDP ports.
    next_scan: Instant,
    /// The time of the next scan of the WireGuard devices.
    next_peer_scan: Instant,
    /// The scan of the WireGuard devices that is under way. It outlives a dropped call of
    /// [`Changes::next`].
    peer_scan: Option<JoinHandle<PeerScan>>,
}

impl NetlinkChanges {
    /// Listens in the network namespace of the calling thread, which is `namespace`. Changes by the
    /// socket with the port id `port` are our own, and are left out.
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
            next_scan: now + SCAN_PAUSE,
            next_peer_scan: now + PEER_SCAN_PAUSE,
            peer_scan: None,
        })
    }

    /// Reads the proxy entries, and the UDP ports if there are tunnels with UDP headers.
    fn scan(&mut self) {
        let begin = std::time::Instant::now();
        if let Err(error) = self.decoder.scan_proxies() {
            tracing::debug!(%error, "proxy entries cannot be read");
        }
        if self.decoder.has_fou_links() {
            match fou::ports(&self.namespace) {
                Ok(ports) => self.decoder.note_open_ports(&ports),
                Err(error) => tracing::debug!(%error, "the UDP ports of tunnels cannot be read"),
            }
        }
        let pause = (PAUSE_FACTOR * begin.elapsed()).clamp(SCAN_PAUSE, LONGEST_SCAN_PAUSE);
        self.next_scan = Instant::now() + pause;
    }

    /// Begins to read the WireGuard devices, which takes some milliseconds for thousands of peers.
    fn begin_peer_scan(&mut self) {
        let wireguard = self.wireguard.clone();
        self.peer_scan = Some(spawn_blocking(move || {
            let begin = std::time::Instant::now();
            let changes = wireguard.scan();
            PeerScan { changes, took: begin.elapsed() }
        }));
    }

    fn end_peer_scan(&mut self, scan: PeerScan) {
        self.peer_scan = None;
        self.decoder.extend(scan.changes);
        self.next_peer_scan = Instant::now() + (PAUSE_FACTOR * scan.took).max(PEER_SCAN_PAUSE);
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
impl Changes for NetlinkChanges {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        loop {
            if let Some(invalidation) = self.decoder.pop() {
                return Ok(invalidation);
            }
            if self.next_scan <= Instant::now() {
                self.scan();
                continue;
            }
            if self.peer_scan.is_none() && self.next_peer_scan <= Instant::now() {
                self.begin_peer_scan();
            }
            // A steady stream of messages must not delay the result of a scan.
            if self.peer_scan.as_ref().is_some_and(JoinHandle::is_finished) {
                let scan = finished(&mut self.peer_scan).await;
                self.end_peer_scan(scan);
                continue;
            }
            if self.read()? && self.decoder.is_empty() {
                let is_scanning = self.peer_scan.is_some();
                tokio::select! {
                    readable = self.socket.readable() => readable?,
                    () = sleep_until(self.next_scan) => {}
                    () = sleep_until(self.next_peer_scan), if !is_scanning => {}
                    scan = finished(&mut self.peer_scan) => self.end_peer_scan(scan),
                }
            }
        }
    }
}

/// Waits for the end of a scan. Never ends without a scan, or if the runtime shuts down.
async fn finished(scan: &mut Option<JoinHandle<PeerScan>>) -> PeerScan {
    let Some(scan) = scan else { return pending().await };
    match scan.await.map_err(JoinError::try_into_panic) {
        Ok(scan) => scan,
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

    /// Listens in this network namespace. The port id of our own changes is 1, which no socket has.
    fn changes(wireguard: WireguardDevices) -> NetlinkChanges {
        let namespace = Arc::new(Namespace::current().unwrap());
        NetlinkChanges::open(namespace, 1, ForeignRoutes::default(), wireguard).unwrap()
    }

    /// Makes a scan of the WireGuard devices due now. The proxy entries are not scanned meanwhile,
    /// which would be a pause.
    fn make_peer_scan_due(changes: &mut NetlinkChanges) -> Instant {
        let now = Instant::now();
        changes.next_scan = now + 2 * LONGEST_SCAN_PAUSE;
        changes.next_peer_scan = now;
        now
    }

    #[test]
    fn a_slow_read_of_wireguard_devices_delays_no_other_change() {
        in_netns_async(async || {
            let kernel = NetlinkKernel::open().unwrap();
            let wireguard = WireguardDevices::default();
            let mut changes = changes(wireguard.clone());
            make_peer_scan_due(&mut changes);
            let (release, released) = std::sync::mpsc::channel::<()>();
            let (hold, held) = std::sync::mpsc::channel();
            let slow = std::thread::spawn(move || {
                let _busy = wireguard.busy();
                hold.send(()).unwrap();
                released.recv_timeout(LONGEST_SCAN_PAUSE).is_ok()
            });
            held.recv().unwrap();
            // The first call is dropped. The scan goes on.
            let first = tokio::time::timeout(Duration::from_millis(10), changes.next()).await;
            assert!(first.is_err() && changes.peer_scan.is_some());
            let dst = Subnet::host([192, 0, 2, 7].into());
            let put = Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into());
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            assert!(kernel.apply(&footprint, &[put])[0].is_done());
            let change = changes.next().await.unwrap();
            assert!(matches!(change, Invalidation::Objects(..)), "{change:?}");
            release.send(()).unwrap();
            assert!(slow.join().unwrap(), "the change came after the scan");
            let is_done = async || {
                drop(tokio::time::timeout(Duration::from_millis(1), changes.next()).await);
                changes.peer_scan.is_none() && changes.next_peer_scan > Instant::now()
            };
            eventually_async(LONGEST_SCAN_PAUSE, is_done, || "the scan does not end").await;
        });
    }

    #[test]
    fn changes_that_never_end_do_not_delay_the_scan_of_wireguard_devices() {
        in_netns_async(async || {
            let other = NetlinkKernel::open().unwrap();
            let mut changes = changes(WireguardDevices::default());
            let begin = make_peer_scan_due(&mut changes);
            let dst = Subnet::host([192, 0, 2, 7].into());
            let route = Object::from(Route { dst, via: Via::Blackhole, mtu: None });
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            let mut both = [Change::Put(route.clone()), Change::Delete(route)].into_iter().cycle();
            // A change waits at each call.
            let next = async || {
                let change = both.next().unwrap();
                assert!(other.apply(&footprint, &[change])[0].is_done());
                let change = changes.next().await.unwrap();
                assert!(matches!(change, Invalidation::Objects(..)), "{change:?}");
                changes.next_peer_scan >= begin + PEER_SCAN_PAUSE
            };
            eventually_async(PEER_SCAN_PAUSE, next, || "the devices are not read").await;
        });
    }

    /// A program that changes objects all the time must neither delay invalidations nor fill the
    /// memory.
    #[test]
    fn many_changes_are_returned_in_bounded_parts() {
        const MANY: u32 = 5_000;
        in_netns(|| {
            let mut changes = changes(WireguardDevices::default());
            let theirs: Vec<Change> = (0..MANY)
                .map(|n| Subnet::host((0x0a01_0000 + n).to_be_bytes().into()))
                .map(|dst| Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into()))
                .collect();
            let footprint = Footprint { blackholes: true, ..Footprint::default() };
            let other = NetlinkKernel::open().unwrap();
            assert!(other.apply(&footprint, &theirs).iter().all(Outcome::is_done));
            let mut parts = Vec::new();
            let mut is_end = false;
            while !is_end {
                is_end = changes.read().unwrap();
                let mut part = 0;
                while let Some(invalidation) = changes.decoder.pop() {
                    let Invalidation::Objects(events, _) = invalidation else {
                        // The receive buffer of an ordinary user holds fewer messages.
                        let room = SockRef::from(&changes.socket).recv_buffer_size().unwrap();
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
