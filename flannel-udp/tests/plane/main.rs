//! Data planes in network namespaces: with each other, and with a node that sends as Go flannel.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod go;
mod port;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use flannel_netlink::testing::{Netns, in_netns, ip};
use flannel_udp::{Counts, Forwarder, Options, Peer};
use test_support::eventually;

const PATIENCE: Duration = Duration::from_secs(20);
const PORT: u16 = 8285;

/// The addresses and pod networks of a family: of nodes, and of their pods.
struct Family {
    node: fn(u8) -> IpAddr,
    pods: fn(u8) -> IpAddr,
    len: u8,
    bits: u8,
    network: &'static str,
    mtu: u16,
}

const V4: Family = Family {
    node: |n| [192, 0, 2, n].into(),
    pods: |n| [10, 1, n, 0].into(),
    len: 24,
    bits: 32,
    network: "10.1.0.0/16",
    mtu: 1472,
};

const V6: Family = Family {
    node: |n| [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(n)].into(),
    pods: |n| [0xfd00, 1, 0, u16::from(n), 0, 0, 0, 0].into(),
    len: 64,
    bits: 128,
    network: "fd00:1::/48",
    mtu: 1452,
};

/// Two nodes on a link, 1 and 2.
fn nodes(family: &Family) -> [Netns; 2] {
    let nodes = [Netns::new().unwrap(), Netns::new().unwrap()];
    let path = nodes[1].path();
    nodes[0]
        .run(|| ip(&format!("link add eth0 type veth peer name eth0 netns {}", path.display())));
    for (n, node) in (1..).zip(&nodes) {
        let address = (family.node)(n);
        let prefix = family.len;
        let nodad = if address.is_ipv6() { "nodad" } else { "" };
        node.run(|| {
            ip(&format!("addr add {address}/{prefix} dev eth0 {nodad}"));
            ip("link set eth0 up");
        });
    }
    nodes
}

fn options(family: &Family, n: u8) -> Options {
    Options {
        device: "flannel0".into(),
        local: vec![(family.node)(n)],
        port: PORT,
        own: vec![format!("{}/{}", (family.pods)(n), family.len).parse().unwrap()],
        one_port: false,
        checks_source: true,
        counts_only: false,
        queues: Some(2),
    }
}

/// A data plane on node `n`, whose peer is node `other`.
fn plane(node: &Netns, family: &Family, n: u8, other: u8) -> Forwarder {
    plane_with(node, family, options(family, n), n, other)
}

fn plane_with(node: &Netns, family: &Family, options: Options, n: u8, other: u8) -> Forwarder {
    let peer = Peer {
        subnet: (family.pods)(other),
        len: family.len,
        address: ((family.node)(other), PORT).into(),
    };
    node.run(|| {
        let plane = Forwarder::start(options, vec![peer], fails_test).unwrap();
        let own = (family.pods)(n);
        let Family { bits, mtu, network, .. } = family;
        ip(&format!("addr add {own}/{bits} dev flannel0"));
        ip(&format!("link set flannel0 mtu {mtu} up"));
        ip(&format!("route add {network} dev flannel0"));
        plane
    })
}

/// Ends the test program. A panic on a thread of the data plane would end only that thread.
#[expect(clippy::needless_pass_by_value, reason = "the signature of the callback")]
fn fails_test(error: std::io::Error) {
    eprintln!("the data plane failed: {error}");
    std::process::abort();
}

/// Bytes without a short period.
fn bytes(len: usize) -> Vec<u8> {
    let mut state = 7_u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}

fn streams_arrive(family: &Family, one_port: bool) -> [Counts; 2] {
    let nodes = nodes(family);
    let of = |n: u8| Options { one_port, ..options(family, n) };
    let planes =
        [plane_with(&nodes[0], family, of(1), 1, 2), plane_with(&nodes[1], family, of(2), 2, 1)];
    let sent = bytes(8 << 20);
    let at: SocketAddr = ((family.pods)(2), 5000).into();
    let listener = nodes[1].run(|| TcpListener::bind(at).unwrap());
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = vec![0; sent.len()];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(&received).unwrap();
            received
        });
        let mut stream = nodes[0].run(|| TcpStream::connect_timeout(&at, PATIENCE).unwrap());
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&sent).unwrap();
        let mut back = vec![0; sent.len()];
        stream.read_exact(&mut back).unwrap();
        assert!(echo.join().unwrap() == sent && back == sent);
    });
    planes.map(|plane| plane.counts())
}

#[test]
fn streams_of_ipv4_arrive_unchanged() {
    in_netns(|| {
        let [a, b] = streams_arrive(&V4, false);
        // Each datagram has a packet that fits into the MTU.
        assert!(a.sent_packets > (8 << 20) / 1472 && b.received_packets > 5000, "{a:?} {b:?}");
        assert_eq!((a.send_failed, a.write_failed, b.bad_datagram, b.foreign_node), (0, 0, 0, 0));
    });
}

#[test]
fn streams_of_ipv6_arrive_unchanged() {
    in_netns(|| {
        let [a, b] = streams_arrive(&V6, false);
        assert!(a.sent_packets > (8 << 20) / 1452 && b.received_packets > 5000, "{a:?} {b:?}");
    });
}

#[test]
fn streams_arrive_if_datagrams_leave_from_one_port() {
    in_netns(|| {
        streams_arrive(&V4, true);
    });
}

/// An IPv4 packet of UDP from port 5000 of a pod of node `from` to a pod of node `to`.
fn packet(from: u8, to: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 7, 0x40, 0, 64, 17, 0, 0, 10, 1, from, 0, 10, 1, to, 0];
    packet.extend([0x13, 0x88, 0x13, 0x88, 0, 0, 0, 0]);
    packet.extend(payload);
    let total = packet.len() as u16;
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    packet[24..26].copy_from_slice(&(total - 20).to_be_bytes());
    let checksum = !sum(&packet[..20]);
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet
}

/// The one's complement sum of words.
fn sum(data: &[u8]) -> u16 {
    let mut sum: u32 = data
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A data plane on node 1, a socket of a pod there, and the socket of node 2, which sends and
/// receives as the proxy of Go flannel.
fn with_go_node(work: impl FnOnce(&Forwarder, &UdpSocket, &UdpSocket)) {
    let nodes = nodes(&V4);
    let plane = plane(&nodes[0], &V4, 1, 2);
    let open = |node: &Netns, address: SocketAddr| {
        let socket = node.run(|| UdpSocket::bind(address).unwrap());
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    };
    let pod = open(&nodes[0], ((V4.pods)(1), 5000).into());
    let node = open(&nodes[1], ((V4.node)(2), PORT).into());
    work(&plane, &pod, &node);
}

#[test]
fn packets_travel_as_those_of_go() {
    in_netns(|| {
        with_go_node(|_, pod, node| {
            // To Go: one datagram for each packet, to the port of all nodes.
            pod.send_to(b"to go", "10.1.2.0:5000").unwrap();
            let mut datagram = [0; 2000];
            let (len, from) = node.recv_from(&mut datagram).unwrap();
            let datagram = &datagram[..len];
            assert_eq!(from.ip(), (V4.node)(1));
            assert_eq!((datagram[0], datagram[8], len), (0x45, 63, 33), "{datagram:?}");
            assert_eq!(&datagram[12..20], &[10, 1, 1, 0, 10, 1, 2, 0]);
            assert_eq!(sum(&datagram[..20]), 0xffff);
            assert_eq!(&datagram[28..], b"to go");
            let pseudo = [&datagram[12..20], &[0, 17], &datagram[24..26], &datagram[20..]].concat();
            assert_eq!(sum(&pseudo), 0xffff, "a kernel without offloads checks it");
            // From Go, from its port, small and as large as its buffer.
            for size in [7, 1444] {
                let payload = bytes(size);
                let packet = packet(2, 1, &payload);
                node.send_to(&packet, ((V4.node)(1), PORT)).unwrap();
                let mut received = vec![0; 2000];
                let len = pod.recv(&mut received).unwrap();
                assert!(received[..len] == payload);
            }
        });
    });
}

#[test]
fn datagrams_of_strangers_do_not_pass() {
    in_netns(|| {
        with_go_node(|plane, pod, node| {
            let at = ((V4.node)(1), PORT);
            let good = packet(2, 1, b"good");
            // The data plane is up when this has arrived.
            node.send_to(&good, at).unwrap();
            pod.recv(&mut [0; 99]).unwrap();
            let before = plane.counts();
            let mut sent_foreign = 0_u64;
            let mut sent_bad = 0_u64;
            let begin = Instant::now();
            let mut random = bytes(1 << 16);
            while begin.elapsed() < Duration::from_secs(2) {
                for n in 0..64 {
                    // The source of a pod of another node, cut packets, and noise.
                    let foreign = packet(3, 1, b"foreign");
                    node.send_to(&foreign, at).unwrap();
                    node.send_to(&good[..n % good.len()], at).unwrap();
                    let at_random = n * 1000;
                    // Neither version of IP, so that no datagram is right by chance.
                    random[at_random] = 0x75;
                    node.send_to(&random[at_random..at_random + 100 + n], at).unwrap();
                    sent_foreign += 1;
                    sent_bad += 2;
                }
            }
            // Behind them.
            let last = || {
                node.send_to(&packet(2, 1, b"last"), at).unwrap();
                pod.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                pod.recv(&mut [0; 99]).is_ok()
            };
            eventually(PATIENCE, last, || "nothing arrives any more");
            let now = plane.counts();
            let foreign = now.foreign_source - before.foreign_source;
            assert!(foreign > 0 && foreign <= sent_foreign, "{foreign} of {sent_foreign}");
            let bad = now.bad_datagram - before.bad_datagram;
            assert!(bad > 0 && bad <= sent_bad, "{bad} of {sent_bad}");
            // Only the packets behind the flood.
            assert!(now.received_packets - before.received_packets < 300, "{now:?}");
        });
    });
}

/// The program that has the data plane decides what to do, and the others of its parts go on.
#[test]
fn a_deleted_device_is_reported_and_the_program_goes_on() {
    in_netns(|| {
        let nodes = nodes(&V4);
        let (sender, failures) = std::sync::mpsc::channel();
        let report = move |error: std::io::Error| drop(sender.send(error));
        let start = || Forwarder::start(options(&V4, 1), Vec::new(), report.clone()).unwrap();
        let plane = nodes[0].run(start);
        nodes[0].run(|| ip("link delete flannel0"));
        let error = failures.recv_timeout(PATIENCE).unwrap();
        assert_eq!(error.raw_os_error(), Some(nix::errno::Errno::EBADFD as i32), "{error}");
        drop(plane);
        // Another one makes the device again.
        let _plane = nodes[0].run(start);
        assert!(nodes[0].run(|| ip("-br link show flannel0")).contains("flannel0"));
    });
}

/// A packet alone is told too, and arrives in fragments.
#[test]
fn a_datagram_that_is_larger_than_its_path_is_told_and_arrives() {
    in_netns(|| {
        let nodes = nodes(&V4);
        let planes = [plane(&nodes[0], &V4, 1, 2), plane(&nodes[1], &V4, 2, 1)];
        nodes[0].run(|| ip("route add 192.0.2.2 dev eth0 mtu 1300"));
        let receiver = nodes[1].run(|| UdpSocket::bind(((V4.pods)(2), 5000)).unwrap());
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        let sender = nodes[0].run(|| UdpSocket::bind(((V4.pods)(1), 0)).unwrap());
        sender.connect(((V4.pods)(2), 5000)).unwrap();
        let packet = [7; 1400];
        sender.send(&packet).unwrap();
        let mut received = [0; 2000];
        assert_eq!(receiver.recv(&mut received).unwrap(), packet.len());
        let mtu = || rustix::net::sockopt::ip_mtu(&sender).unwrap();
        eventually(PATIENCE, || mtu() == 1300 - 28, mtu);
        drop(planes);
    });
}

#[test]
fn a_smaller_path_is_told_to_the_source() {
    in_netns(|| {
        let nodes = nodes(&V4);
        let planes = [plane(&nodes[0], &V4, 1, 2), plane(&nodes[1], &V4, 2, 1)];
        nodes[0].run(|| ip("route add 192.0.2.2 dev eth0 mtu 1300"));
        let at: SocketAddr = ((V4.pods)(2), 5000).into();
        let listener = nodes[1].run(|| TcpListener::bind(at).unwrap());
        let sent = bytes(1 << 20);
        std::thread::scope(|scope| {
            let received = scope.spawn(|| {
                let mut received = Vec::new();
                listener.accept().unwrap().0.read_to_end(&mut received).unwrap();
                received
            });
            let mut stream = nodes[0].run(|| TcpStream::connect_timeout(&at, PATIENCE).unwrap());
            stream.write_all(&sent).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(received.join().unwrap() == sent);
            // The kernel has learned it from the message.
            let mtu =
                nix::sys::socket::getsockopt(&stream.as_fd(), nix::sys::socket::sockopt::TcpMaxSeg);
            assert!(mtu.unwrap() <= 1300 - 28 - 40, "{mtu:?}");
        });
        drop(planes);
    });
}
