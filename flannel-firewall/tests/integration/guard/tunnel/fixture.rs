//! A node with a tunnel, its pod, and the wire to other hosts.
//!
//! ```text
//!  pod 10.1.7.2 ──── node 192.0.2.7 ──── wire: peers 192.0.2.8 and .9, stranger .99
//!                (this thread's namespace)
//! ```

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use flannel_core::address::Family;
use flannel_core::kernel::RecordKeeper;
use flannel_core::object::MacAddr;
use flannel_firewall::Guard;
use flannel_netlink::testing::{Netns, ip};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};
use test_support::{eventually, packet, receive_from};

use super::super::{NAME, PORT, apply, end, host, pod, puts, subnet_of};
use crate::fixture::tools::nft;

pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// The port of the receiver in the pod.
const RECEIVER: u16 = 5000;

/// The address of the devices of the tunnel.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// A tunnel packet.
#[derive(Clone)]
pub(super) struct Sent {
    /// The number of the host that sends it.
    pub(super) from: u8,
    pub(super) datagram: Vec<u8>,
}

/// Numbered tunnel packets.
pub(super) struct Packets {
    /// Packets of peers with the source of another node.
    pub(super) wrong: Vec<Sent>,
    /// Packets of peers with their own sources.
    pub(super) right: Vec<Sent>,
}

/// The node is the namespace of the calling thread.
pub(super) struct TunnelFixture {
    pub(super) wire: Netns,
    pub(super) pod: Netns,
    /// Sockets in the pod. They stay open, because a child of another thread would keep a closed
    /// socket and its port for a moment.
    receivers: BTreeMap<Family, UdpSocket>,
    pub(super) guard: Guard,
}

/// Makes the packets that this thread and its threads send arrive in their order. Each processor
/// has a queue of its own.
fn stay_on_one_processor() {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).unwrap();
    let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap()).unwrap();
    let mut one = CpuSet::new();
    one.set(first).unwrap();
    sched_setaffinity(this, &one).unwrap();
}

pub(super) fn device(family: Family) -> &'static str {
    if family == Family::V4 { "flannel.1" } else { "flannel-v6.1" }
}

impl TunnelFixture {
    pub(super) fn new(drops: bool) -> Self {
        stay_on_one_processor();
        let wire = Netns::new().unwrap();
        let in_pod = Netns::new().unwrap();
        for (here, there) in [("eth0", &wire), ("pod0", &in_pod)] {
            ip(&format!(
                "link add {here} type veth peer name eth0 netns {}",
                there.path().display()
            ));
            ip(&format!("link set {here} up"));
            there.run(|| ip("link set eth0 up"));
            there.run(|| ip("link set lo up"));
        }
        // Fragments of the tunnel are whole packets in it.
        ip("link set pod0 mtu 9000");
        in_pod.run(|| ip("link set eth0 mtu 9000"));
        for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            std::fs::write(format!("/proc/sys/net/{file}"), "1").unwrap();
        }
        for family in Family::BOTH {
            let (short, long) = if family == Family::V4 { (24, 32) } else { (64, 128) };
            let nodad = if family == Family::V4 { "" } else { "nodad" };
            ip(&format!("addr add {}/{short} dev eth0 {nodad}", host(family, 7)));
            ip(&format!("addr add {}/{short} dev pod0 {nodad}", pod(family, 7, 1)));
            wire.run(|| {
                for n in [8, 9, 99] {
                    ip(&format!("addr add {}/{short} dev eth0 {nodad}", host(family, n)));
                }
            });
            in_pod.run(|| {
                ip(&format!("addr add {}/{short} dev eth0 {nodad}", pod(family, 7, 2)));
                // A pod may give itself the address of a peer.
                ip(&format!("addr add {}/{long} dev lo {nodad}", host(family, 8)));
                ip(&format!("route add default via {}", pod(family, 7, 1)));
            });
            ip(&format!(
                "link add {} type vxlan id 1 local {} dev eth0 dstport {PORT} nolearning",
                device(family),
                host(family, 7)
            ));
            let mac = MacAddr(MAC);
            ip(&format!("link set {} address {mac} up", device(family)));
            for subnet in [8, 9] {
                ip(&format!("route add {} dev {}", subnet_of(family, subnet), device(family)));
            }
        }
        let guard = Guard::new(NAME);
        let records = Family::BOTH.into_iter().flat_map(|family| {
            let peers = [8, 9].map(|n| guard.peer(subnet_of(family, n), host(family, n)));
            [guard.tunnel(&end(family, device(family), drops))].into_iter().chain(peers)
        });
        apply(&guard, &puts(records.collect::<Vec<_>>()));
        let mut receivers = BTreeMap::new();
        for family in Family::BOTH {
            let at = (pod(family, 7, 2), RECEIVER);
            receivers.insert(family, receiver_in(&in_pod, at.into()));
        }
        Self { wire, pod: in_pod, receivers, guard }
    }

    /// Sends tunnel packets on the wire, and then a packet that is right. Returns the numbers of
    /// the packets that reach the pod, without the last one.
    pub(super) fn arrived(&self, family: Family, sent: &[Sent]) -> Vec<u8> {
        self.arrived_after(family, || {
            for Sent { from, datagram } in sent {
                let socket = UdpSocket::bind((host(family, *from), 0)).unwrap();
                socket.send_to(datagram, (host(family, 7), PORT)).unwrap();
            }
        })
    }

    /// Runs `send` on the wire, and then sends a packet that is right. Returns the numbers of the
    /// packets that reach the pod, without the last one.
    pub(super) fn arrived_after(&self, family: Family, send: impl FnOnce() + Send) -> Vec<u8> {
        let receiver = &self.receivers[&family];
        let target = pod(family, 7, 2);
        self.wire.run(|| {
            send();
            let last = frame(&inner(pod(family, 8, 2), target, &[u8::MAX]));
            let socket = UdpSocket::bind((host(family, 8), 0)).unwrap();
            socket.send_to(&last, (host(family, 7), PORT)).unwrap();
        });
        let mut arrived = Vec::new();
        let mut buffer = [0; 9000];
        loop {
            let (len, _) = receive_from(receiver, &mut buffer).unwrap();
            match buffer[len - 1] {
                u8::MAX => return arrived,
                number => arrived.push(number),
            }
        }
    }

    /// A receiver on the wire, which stands for the tunnel of another node.
    pub(super) fn receiver_of(&self, family: Family, n: u8, port: u16) -> UdpSocket {
        receiver_in(&self.wire, SocketAddr::new(host(family, n), port))
    }

    pub(super) fn until_refused(&self, stranger: u64, foreign_source: u64, pod: u64) {
        until_refused(&self.guard, stranger, foreign_source, pod);
    }
}

/// A receiver in a namespace.
fn receiver_in(netns: &Netns, at: SocketAddr) -> UdpSocket {
    let socket = netns.run(|| UdpSocket::bind(at).unwrap());
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Waits until the guard has refused this many packets of strangers, packets with the source of
/// another node, and packets of pods.
pub(super) fn until_refused(guard: &Guard, stranger: u64, foreign_source: u64, pod: u64) {
    let wanted = [("stranger", stranger), ("foreign_source", foreign_source), ("pod", pod)].into();
    let refused = || guard.refused().unwrap().packets;
    eventually(PATIENCE, || refused() == wanted, || format!("{:?}", refused()));
}

/// A packet of UDP to the receiver in the pod. Its last byte is its number.
pub(super) fn inner(source: IpAddr, target: IpAddr, payload: &[u8]) -> Vec<u8> {
    packet::udp(source, SocketAddr::new(target, RECEIVER), payload)
}

/// The datagram of the tunnel with a packet.
pub(super) fn frame(packet: &[u8]) -> Vec<u8> {
    packet::vxlan(MAC, packet)
}

impl Packets {
    pub(super) fn new(family: Family) -> Self {
        let target = pod(family, 7, 2);
        let short = |from: u8, source: IpAddr, number: u8| Sent {
            from,
            datagram: frame(&inner(source, target, &[number])),
        };
        // It is sent in fragments.
        let long = |from: u8, source: IpAddr, number: u8| Sent {
            from,
            datagram: frame(&inner(source, target, &[vec![0; 3000], vec![number]].concat())),
        };
        let wrong = vec![
            short(9, pod(family, 8, 2), 1),
            long(9, pod(family, 8, 2), 2),
            // A source beyond the subnet of the peer, of this node, and of no node.
            short(8, pod(family, 9, 1), 3),
            short(8, pod(family, 7, 3), 4),
            short(8, pod(family, 77, 1), 5),
            // The address of another node itself.
            short(8, host(family, 9), 6),
        ];
        let right = vec![
            short(8, pod(family, 8, 0), 101),
            short(8, pod(family, 8, 255), 102),
            long(8, pod(family, 8, 2), 103),
            short(9, pod(family, 9, 1), 104),
            short(9, host(family, 9), 105),
        ];
        Self { wrong, right }
    }
}

/// These packets, sent by a host that is not a peer.
pub(super) fn by_stranger(packets: &[Sent]) -> Vec<Sent> {
    packets.iter().map(|packet| Sent { from: 99, ..packet.clone() }).collect()
}

/// An address on the link to a neighbour. The address of the node is the first one.
pub(super) fn beside(family: Family, link: u8, n: u8) -> IpAddr {
    match family {
        Family::V4 => [172, link, 0, n].into(),
        Family::V6 => [0xfd00, u16::from(link), 0, 0, 0, 0, 0, u16::from(n)].into(),
    }
}

/// A namespace on a link of its own to this node, such as a container of another network or a
/// virtual machine. Its address is `beside(family, link, 2)`.
pub(super) fn neighbour(device: &str, link: u8) -> Netns {
    let there = Netns::new().unwrap();
    ip(&format!("link add {device} type veth peer name eth0 netns {}", there.path().display()));
    ip(&format!("link set {device} up"));
    there.run(|| ip("link set eth0 up"));
    there.run(|| ip("link set lo up"));
    for family in Family::BOTH {
        let (len, nodad) = if family == Family::V4 { (24, "") } else { (64, "nodad") };
        ip(&format!("addr add {}/{len} dev {device} {nodad}", beside(family, link, 1)));
        there.run(|| {
            ip(&format!("addr add {}/{len} dev eth0 {nodad}", beside(family, link, 2)));
            ip(&format!("route add default via {}", beside(family, link, 1)));
        });
    }
    there
}

/// The next datagram.
pub(super) fn next(receiver: &UdpSocket) -> Vec<u8> {
    let mut buffer = [0; 9000];
    let (len, _) = receive_from(receiver, &mut buffer).unwrap();
    buffer[..len].to_vec()
}

/// Sends a packet from this node with any source.
pub(super) fn send_raw(from: IpAddr, to: SocketAddr, payload: &[u8]) -> io::Result<usize> {
    /// `IPPROTO_RAW`: the sender writes the IP header.
    const RAW: i32 = 255;
    let domain = Domain::for_address(to);
    let raw = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW))).unwrap();
    let packet = packet::udp(from, to, payload);
    raw.send_to(&packet, &SocketAddr::new(to.ip(), 0).into())
}

/// The mark of a peer in the table of the guard.
pub(super) fn mark_of(peer: IpAddr) -> u32 {
    let family = if peer.is_ipv4() { "ipv4" } else { "ipv6" };
    let map = nft(&format!("list map inet flannel-{NAME} peers-{family}"));
    let (_, element) = map.split_once(&format!("{peer} : 0x")).unwrap();
    let mark = element.split(|digit: char| !digit.is_ascii_hexdigit()).next().unwrap();
    u32::from_str_radix(mark, 16).unwrap()
}

pub(super) fn numbers(packets: &[Sent]) -> Vec<u8> {
    packets.iter().map(|packet| *packet.datagram.last().unwrap()).collect()
}
