//! A node of Go flannel, and data planes beside it.
//!
//! **Source**: flannel `pkg/backend/udp/proxy_amd64.c`: one thread, one packet in each datagram, a
//! plain tun device without offloads.

use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use flannel_udp::Forwarder;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::socket::{setsockopt, sockopt};
use tun_rs::{DeviceBuilder, SyncDevice};

use super::*;

/// The size of the proxy's buffer: the MTU of its device.
const BUFFER: usize = 1472;

/// A node with the proxy, which ends with it. Its peer is node 1.
struct GoNode {
    stop: Arc<EventFd>,
    /// The longest datagram so far.
    longest: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl GoNode {
    /// Starts it as node 2, with datagrams that leave from `from`.
    fn start(node: &Netns, from: SocketAddr) -> Self {
        let stop = Arc::new(EventFd::new().unwrap());
        let longest = Arc::new(AtomicUsize::new(0));
        let proxy = node.run(|| {
            let device = DeviceBuilder::new().name("flannel0").build_sync().unwrap();
            ip("addr add 10.1.2.0/32 dev flannel0");
            ip(&format!("link set flannel0 mtu {BUFFER} up"));
            ip("route add 10.1.0.0/16 dev flannel0");
            let at: SocketAddr = ((V4.node)(2), PORT).into();
            let inbox = UdpSocket::bind(at).unwrap();
            let outbox =
                if from == at { inbox.try_clone() } else { UdpSocket::bind(from) }.unwrap();
            Proxy { device, inbox, outbox, stop: Arc::clone(&stop), longest: Arc::clone(&longest) }
        });
        let thread = std::thread::spawn(move || proxy.run());
        Self { stop, longest, thread: Some(thread) }
    }
}

impl Drop for GoNode {
    fn drop(&mut self) {
        self.stop.write(1).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Proxy {
    device: SyncDevice,
    inbox: UdpSocket,
    outbox: UdpSocket,
    stop: Arc<EventFd>,
    longest: Arc<AtomicUsize>,
}

impl Proxy {
    /// `run_proxy`: one packet of each direction at a time.
    fn run(&self) {
        let mut packet = [0; BUFFER];
        loop {
            let fds: [BorrowedFd<'_>; 3] =
                [self.stop.as_fd(), self.device.as_fd(), self.inbox.as_fd()];
            let mut ready = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            poll(&mut ready, PollTimeout::NONE).unwrap();
            let [ends, from_pod, from_node] = ready.map(|fd| fd.any().unwrap());
            if ends {
                return;
            }
            if from_pod {
                let len = self.device.recv(&mut packet).unwrap();
                if packet[0] >> 4 == 4 && packet[16..19] == [10, 1, 1] && takes_hop(&mut packet) {
                    self.outbox.send_to(&packet[..len], ((V4.node)(1), PORT)).unwrap();
                }
            }
            if from_node {
                let mut whole = [0; 1 << 16];
                let len = self.inbox.recv(&mut whole).unwrap();
                self.longest.fetch_max(len, Ordering::Relaxed);
                // The rest is cut.
                let len = len.min(BUFFER);
                packet[..len].copy_from_slice(&whole[..len]);
                if takes_hop(&mut packet) {
                    self.device.send(&packet[..len]).unwrap();
                }
            }
        }
    }
}

/// `decrement_ttl`: whether the packet goes on.
fn takes_hop(packet: &mut [u8]) -> bool {
    packet[8] -= 1;
    packet[10..12].fill(0);
    let checksum = !sum(&packet[..20]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet[8] > 0
}

/// A data plane on node 1, a node of Go flannel, and a socket of a pod of each.
fn with_proxy(from: u8, work: impl FnOnce(&[Netns; 2], &Forwarder, &GoNode, [&UdpSocket; 2])) {
    let nodes = nodes(&V4);
    for n in [98, 99] {
        nodes[1].run(|| ip(&format!("addr add 192.0.2.{n}/24 dev eth0")));
    }
    let plane = plane(&nodes[0], &V4, 1, 2);
    let go = GoNode::start(&nodes[1], ((V4.node)(from), PORT).into());
    let pods = [1, 2].map(|n: u8| {
        let at: SocketAddr = ((V4.pods)(n), 5000).into();
        let pod = nodes[usize::from(n) - 1].run(|| UdpSocket::bind(at).unwrap());
        pod.set_read_timeout(Some(PATIENCE)).unwrap();
        pod
    });
    work(&nodes, &plane, &go, [&pods[0], &pods[1]]);
}

fn address(n: u8) -> SocketAddr {
    ((V4.pods)(n), 5000).into()
}

/// Sends a packet from one pod to the other, which gets it as the next one.
fn arrives(from: &UdpSocket, to: &UdpSocket, n: u8, payload: &[u8]) {
    from.send_to(payload, address(n)).unwrap();
    let mut received = vec![0; 2000];
    let len = to.recv(&mut received).unwrap();
    assert!(received[..len] == *payload, "{len} bytes instead of {}", payload.len());
}

#[test]
fn small_and_full_packets_travel_between_a_node_of_go_and_this_one() {
    in_netns(|| {
        with_proxy(2, |_, _, go, [ours, theirs]| {
            for size in [0, 1, 64, 1443, 1444] {
                arrives(ours, theirs, 2, &bytes(size));
                arrives(theirs, ours, 1, &bytes(size));
            }
            assert_eq!(go.longest.load(Ordering::Relaxed), BUFFER);
            // Larger packets are fragmented before they come to the device.
            arrives(ours, theirs, 2, &bytes(1999));
            arrives(theirs, ours, 1, &bytes(1999));
            assert_eq!(go.longest.load(Ordering::Relaxed), BUFFER);
        });
    });
}

#[test]
fn each_side_takes_a_hop() {
    in_netns(|| {
        with_proxy(2, |_, plane, _, [ours, theirs]| {
            for (from, to, n) in [(ours, theirs, 2), (theirs, ours, 1)] {
                // One hop at the sender, one at the receiver, and the pod needs one.
                for ttl in [1, 2] {
                    from.set_ttl(ttl).unwrap();
                    from.send_to(b"too old", address(n)).unwrap();
                }
                from.set_ttl(3).unwrap();
                arrives(from, to, n, b"at last");
            }
            // From pods here, and from there.
            assert_eq!(plane.counts().expired, 2);
        });
    });
}

#[test]
fn a_pod_learns_that_no_node_has_its_destination() {
    in_netns(|| {
        with_proxy(2, |_, _, _, [ours, _]| {
            // Linux reports it only then.
            setsockopt(&ours, sockopt::Ipv4RecvErr, &true).unwrap();
            ours.send_to(b"lost", address(99)).unwrap();
            let error = ours.recv(&mut [0; 9]).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::NetworkUnreachable, "{error}");
        });
    });
}

#[test]
fn a_stream_between_a_node_of_go_and_this_one_is_intact() {
    in_netns(|| {
        with_proxy(2, |nodes, plane, go, _| {
            let sent = bytes(4 << 20);
            let at: SocketAddr = ((V4.pods)(2), 5001).into();
            let listener = nodes[1].run(|| TcpListener::bind(at).unwrap());
            std::thread::scope(|scope| {
                let echo = scope.spawn(|| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut received = vec![0; sent.len()];
                    stream.read_exact(&mut received).unwrap();
                    stream.write_all(&received).unwrap();
                });
                let mut stream =
                    nodes[0].run(|| TcpStream::connect_timeout(&at, PATIENCE).unwrap());
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.write_all(&sent).unwrap();
                let mut back = vec![0; sent.len()];
                stream.read_exact(&mut back).unwrap();
                echo.join().unwrap();
                assert!(back == sent);
            });
            // Nothing is cut, although the kernel gives packets of 64 KiB to the data plane.
            assert_eq!(go.longest.load(Ordering::Relaxed), BUFFER);
            let counts = plane.counts();
            assert!(counts.sent_packets > (4 << 20) / 1472 && counts.received_packets > 2900);
        });
    });
}

/// Its datagrams have another source address than its lease.
#[test]
fn a_node_behind_nat_is_learned_and_a_stranger_is_not() {
    in_netns(|| {
        with_proxy(99, |nodes, plane, _, [ours, theirs]| {
            let stranger = nodes[1].run(|| UdpSocket::bind((V4.node)(98).to_string() + ":0"));
            let stranger = stranger.unwrap();
            let inject = || {
                let packet = packet(2, 1, b"stranger");
                stranger.send_to(&packet, ((V4.node)(1), PORT)).unwrap();
            };
            // It asks for a proof first, which the node gives from its own address.
            inject();
            ours.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            let mut received = [0; 99];
            let len = eventually(
                PATIENCE,
                || {
                    inject();
                    theirs.send_to(b"from NAT", address(1)).unwrap();
                    ours.recv(&mut received).ok()
                },
                || format!("{:?}", plane.counts()),
            );
            assert_eq!(received[..len], *b"from NAT");
            let before = plane.counts();
            assert!(before.learned_node > 0 && before.proofs_requested > 0, "{before:?}");
            // From then on nothing of the node is lost, and nothing of the stranger arrives.
            ours.set_read_timeout(Some(PATIENCE)).unwrap();
            for n in 0..50 {
                inject();
                arrives(theirs, ours, 1, &[n]);
            }
            arrives(ours, theirs, 2, b"the way back is the address of the lease");
            assert_eq!(plane.counts().learned_node - before.learned_node, 50);
            // Another thread may receive from the stranger, and be behind.
            eventually(
                PATIENCE,
                || plane.counts().foreign_node - before.foreign_node >= 50,
                || format!("{:?} after {before:?}", plane.counts()),
            );
        });
    });
}
