//! Packets made by hand, through a real tunnel to a pod.
//!
//! ```text
//!  pod 10.1.7.2 ──── node 192.0.2.7 ──── wire: peers 192.0.2.8 and .9, stranger .99
//!                (this thread's namespace)
//! ```

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Inlet;
use flannel_core::kernel::Annex;
use flannel_core::object::MacAddr;
use flannel_firewall::{Guard, TunnelEnd};
use flannel_netlink::testing::{Netns, in_netns, ip};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::socket::{setsockopt, sockopt, sockopt::UdpGsoSegment};
use nix::unistd::Pid;
use socket2::{Domain, Protocol, Socket, Type};
use test_support::{eventually, packet, receive_from};

use super::{NAME, PORT, apply, end, host, pod, puts, subnet_of};
use crate::fixture::tools::nft;

const PATIENCE: Duration = Duration::from_secs(20);
/// The port of the receiver in the pod.
const RECEIVER: u16 = 5000;
/// The address of the devices of the tunnel.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// Tunnel packets, each with the number of the host that sends it.
type Sent = Vec<(u8, Vec<u8>)>;

struct Scene {
    wire: Netns,
    pod: Netns,
    /// In the pod. They stay open: a child of another thread would keep a closed one for a moment,
    /// and its port with it.
    receivers: BTreeMap<Family, UdpSocket>,
    guard: Guard,
}

/// Packets that this thread sends, and those that it starts, arrive in their order. Each processor
/// has a queue of its own.
fn stay_on_one_processor() {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).unwrap();
    let first = (0..CpuSet::count()).find(|cpu| allowed.is_set(*cpu).unwrap()).unwrap();
    let mut one = CpuSet::new();
    one.set(first).unwrap();
    sched_setaffinity(this, &one).unwrap();
}

fn device(family: Family) -> &'static str {
    if family == Family::V4 { "flannel.1" } else { "flannel-v6.1" }
}

impl Scene {
    fn set(drops: bool) -> Self {
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
        let receiver = |family| {
            let at = (pod(family, 7, 2), RECEIVER);
            let socket = in_pod.run(|| UdpSocket::bind(at).unwrap());
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            (family, socket)
        };
        let receivers = Family::BOTH.into_iter().map(receiver).collect();
        Self { wire, pod: in_pod, receivers, guard }
    }

    /// Sends tunnel packets from these hosts of the underlay, and at last one that is right.
    /// Returns which of them reach the pod.
    fn arrived(&self, family: Family, sent: &[(u8, Vec<u8>)]) -> Vec<u8> {
        self.arrived_after(family, || {
            for (from, datagram) in sent {
                let socket = UdpSocket::bind((host(family, *from), 0)).unwrap();
                socket.send_to(datagram, (host(family, 7), PORT)).unwrap();
            }
        })
    }

    /// Runs `send` on the wire, and at last sends a packet that is right. Returns the numbers of
    /// the packets that reach the pod, without the last one.
    fn arrived_after(&self, family: Family, send: impl FnOnce() + Send) -> Vec<u8> {
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

    fn until_refused(&self, stranger: u64, foreign_source: u64, pod: u64) {
        until_refused(&self.guard, stranger, foreign_source, pod);
    }
}

/// Waits until the guard has refused so many packets: of strangers, with the source of another
/// node, of pods.
fn until_refused(guard: &Guard, stranger: u64, foreign_source: u64, pod: u64) {
    let wanted = [("stranger", stranger), ("foreign_source", foreign_source), ("pod", pod)].into();
    let refused = || guard.refused().unwrap().packets;
    eventually(PATIENCE, || refused() == wanted, || format!("{:?}", refused()));
}

/// A packet of UDP to the receiver in a pod. Its last byte is a number.
fn inner(source: IpAddr, target: IpAddr, payload: &[u8]) -> Vec<u8> {
    packet::udp(source, SocketAddr::new(target, RECEIVER), payload)
}

/// The datagram of the tunnel with a packet.
fn frame(packet: &[u8]) -> Vec<u8> {
    packet::vxlan(MAC, packet)
}

/// The numbered packets with the source of a pod of another node, and those that are right.
fn packets(family: Family) -> (Sent, Sent) {
    let target = pod(family, 7, 2);
    let of = |source: IpAddr, number: u8| frame(&inner(source, target, &[number]));
    let long = |source: IpAddr, number: u8| {
        frame(&inner(source, target, &[vec![0; 3000], vec![number]].concat()))
    };
    let wrong = vec![
        // Another node, in whole and in fragments. A source beyond the subnet, of this node, of no
        // node, and another node itself.
        (9, of(pod(family, 8, 2), 1)),
        (9, long(pod(family, 8, 2), 2)),
        (8, of(pod(family, 9, 1), 3)),
        (8, of(pod(family, 7, 3), 4)),
        (8, of(pod(family, 77, 1), 5)),
        (8, of(host(family, 9), 6)),
    ];
    let right = vec![
        (8, of(pod(family, 8, 0), 101)),
        (8, of(pod(family, 8, 255), 102)),
        (8, long(pod(family, 8, 2), 103)),
        (9, of(pod(family, 9, 1), 104)),
        (9, of(host(family, 9), 105)),
    ];
    (wrong, right)
}

/// An address on the link to a neighbour: that of the node is the first one.
fn beside(family: Family, link: u8, n: u8) -> IpAddr {
    match family {
        Family::V4 => [172, link, 0, n].into(),
        Family::V6 => [0xfd00, u16::from(link), 0, 0, 0, 0, 0, u16::from(n)].into(),
    }
}

/// A namespace on a link of its own to this node, as a container of another network has it, or a
/// virtual machine. Its first address is `beside(family, link, 2)`.
fn neighbour(device: &str, link: u8) -> Netns {
    let there = Netns::new().unwrap();
    ip(&format!("link add {device} type veth peer name eth0 netns {}", there.path().display()));
    ip(&format!("link set {device} up"));
    there.run(|| ip("link set eth0 up"));
    there.run(|| ip("link set lo up"));
    for family in Family::BOTH {
        let [len, nodad] = if family == Family::V4 { ["24", ""] } else { ["64", "nodad"] };
        ip(&format!("addr add {}/{len} dev {device} {nodad}", beside(family, link, 1)));
        there.run(|| {
            ip(&format!("addr add {}/{len} dev eth0 {nodad}", beside(family, link, 2)));
            ip(&format!("route add default via {}", beside(family, link, 1)));
        });
    }
    there
}

/// A receiver on the wire, as the tunnel of another node.
fn receiver_of(scene: &Scene, family: Family, n: u8, port: u16) -> UdpSocket {
    let socket = scene.wire.run(|| UdpSocket::bind((host(family, n), port)).unwrap());
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// The next datagram.
fn next(receiver: &UdpSocket) -> Vec<u8> {
    let mut buffer = [0; 9000];
    let (len, _) = receive_from(receiver, &mut buffer).unwrap();
    buffer[..len].to_vec()
}

/// Sends a packet from this node with any source.
fn send_raw(from: IpAddr, to: SocketAddr, payload: &[u8]) -> io::Result<usize> {
    /// `IPPROTO_RAW`: the sender writes the IP header.
    const RAW: i32 = 255;
    let domain = Domain::for_address(to);
    let raw = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW))).unwrap();
    let packet = packet::udp(from, to, payload);
    raw.send_to(&packet, &SocketAddr::new(to.ip(), 0).into())
}

/// The mark of a peer in the table of the guard.
fn mark_of(peer: IpAddr) -> u32 {
    let family = if peer.is_ipv4() { "ipv4" } else { "ipv6" };
    let map = nft(&format!("list map inet flannel-{NAME} peers-{family}"));
    let mark = map.split_once(&format!("{peer} : 0x")).unwrap().1;
    let mark = mark.split(|digit: char| !digit.is_ascii_hexdigit()).next().unwrap();
    u32::from_str_radix(mark, 16).unwrap()
}

fn numbers(packets: &[(u8, Vec<u8>)]) -> Vec<u8> {
    packets.iter().map(|(_, packet)| packet[packet.len() - 1]).collect()
}

#[test]
fn only_packets_of_peers_with_their_own_sources_reach_a_pod() {
    in_netns(|| {
        let scene = Scene::set(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            let (wrong, right) = packets(family);
            let mut strangers: Vec<_> = wrong.iter().map(|(_, it)| (99, it.clone())).collect();
            strangers.extend(right.iter().map(|(_, it)| (99, it.clone())));
            assert_eq!(scene.arrived(family, &strangers), [0; 0]);
            assert_eq!(scene.arrived(family, &wrong), [0; 0]);
            assert_eq!(scene.arrived(family, &right), numbers(&right));
            let count = |packets: &[(u8, Vec<u8>)]| packets.len() as u64;
            scene.until_refused(n * count(&strangers), n * count(&wrong), 0);
        }
    });
}

#[test]
fn packets_that_are_only_counted_reach_a_pod() {
    in_netns(|| {
        let scene = Scene::set(false);
        for (n, family) in (1..).zip(Family::BOTH) {
            let (wrong, right) = packets(family);
            let strangers: Vec<_> = wrong.iter().map(|(_, it)| (99, it.clone())).collect();
            assert_eq!(scene.arrived(family, &strangers), numbers(&wrong));
            assert_eq!(scene.arrived(family, &wrong), numbers(&wrong));
            assert_eq!(scene.arrived(family, &right), numbers(&right));
            scene.until_refused(n * 6, n * 6, 0);
            assert!(!scene.guard.refused().unwrap().drops);
        }
    });
}

/// The kernel takes a batch apart before it takes packets out of the tunnel.
#[test]
fn each_packet_of_a_batch_that_nobody_has_segmented_is_checked() {
    in_netns(|| {
        let scene = Scene::set(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            let target = pod(family, 7, 2);
            let of = |source: IpAddr, number: u8| frame(&inner(source, target, &[number]));
            let batch = [
                of(pod(family, 8, 2), 1),
                of(pod(family, 9, 2), 2),
                of(pod(family, 7, 3), 3),
                of(pod(family, 8, 3), 4),
            ];
            let send = || {
                let socket = UdpSocket::bind((host(family, 8), 0)).unwrap();
                setsockopt(&socket, UdpGsoSegment, &(batch[0].len() as i32)).unwrap();
                socket.send_to(&batch.concat(), (host(family, 7), PORT)).unwrap();
            };
            assert_eq!(scene.arrived_after(family, send), [1, 4]);
            scene.until_refused(0, n * 2, 0);
        }
    });
}

/// A device of one family also takes packets of the other one.
#[test]
fn a_tunnel_carries_no_packets_of_the_other_family() {
    in_netns(|| {
        let scene = Scene::set(true);
        for (n, [outer, carried]) in (1..).zip([[Family::V4, Family::V6], [Family::V6, Family::V4]])
        {
            let at = pod(carried, 7, 2);
            let forged = frame(&inner(pod(carried, 8, 2), at, &[1]));
            let send = || {
                let socket = UdpSocket::bind((host(outer, 8), 0)).unwrap();
                socket.send_to(&forged, (host(outer, 7), PORT)).unwrap();
            };
            assert_eq!(scene.arrived_after(carried, send), [0; 0]);
            scene.until_refused(0, n, 0);
        }
    });
}

/// Masqueraded, the packet of a pod has the address of its node, and so looks like one of the node.
#[test]
fn a_pod_sends_nothing_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let scene = Scene::set(true);
        nft("add table inet masq");
        nft("add chain inet masq out { type nat hook postrouting priority 100; }");
        nft("add rule inet masq out oifname eth0 masquerade");
        // The pod sends long packets in fragments.
        scene.pod.run(|| ip("link set eth0 mtu 1500"));
        for (n, family) in (1..).zip(Family::BOTH) {
            let forged = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let long = [forged.clone(), vec![1; 3000]].concat();
            let send = |from: IpAddr, bytes: &[u8], to: SocketAddr| {
                let socket = scene.pod.run(|| UdpSocket::bind((from, 0)).unwrap());
                scene.pod.run(|| socket.send_to(bytes, to).unwrap());
            };
            let own = pod(family, 7, 2);
            // To this node: with the pod's address, and with that of a peer.
            for from in [own, host(family, 8)] {
                send(from, &forged, SocketAddr::new(host(family, 7), PORT));
                assert_eq!(scene.arrived_after(family, || {}), [0; 0]);
            }
            scene.until_refused(n * 2, 0, (n - 1) * 3);
            // To another node, where a receiver stands for its tunnel. The address of that node is
            // one of the pod too, so the receiver is at the second one.
            let receiver = |port| {
                let at = (host(family, 9), port);
                let socket = scene.wire.run(|| UdpSocket::bind(at).unwrap());
                socket.set_read_timeout(Some(PATIENCE)).unwrap();
                socket
            };
            let tunnel = receiver(PORT);
            let other = receiver(PORT + 1);
            let to = |port| SocketAddr::new(host(family, 9), port);
            send(own, &forged, to(PORT));
            send(own, &long, to(PORT));
            send(host(family, 8), &forged, to(PORT));
            // Other ports of nodes, and other hosts, are not of the tunnel.
            send(own, b"other", to(PORT + 1));
            assert_eq!(receive_from(&other, &mut [0; 99]).unwrap().0, 5);
            let stranger = (host(family, 99), PORT);
            let stranger = scene.wire.run(|| UdpSocket::bind(stranger).unwrap());
            stranger.set_read_timeout(Some(PATIENCE)).unwrap();
            send(own, b"stranger", SocketAddr::new(host(family, 99), PORT));
            assert_eq!(receive_from(&stranger, &mut [0; 99]).unwrap().0, 8);
            scene.until_refused(n * 2, 0, n * 3);
            tunnel.set_nonblocking(true).unwrap();
            assert!(tunnel.recv(&mut [0; 9000]).is_err(), "a packet has reached the other node");
        }
    });
}

/// A container of another network on this node, whose packets are masqueraded too, is no peer. A
/// virtual machine that is a node may send to other nodes.
#[test]
fn only_peers_are_forwarded_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let scene = Scene::set(true);
        let container = neighbour("docker0", 17);
        let machine = neighbour("vm0", 18);
        nft("add table inet masq");
        nft("add chain inet masq out { type nat hook postrouting priority 100; }");
        nft("add rule inet masq out iifname docker0 oifname eth0 masquerade");
        for (n, family) in (1..).zip(Family::BOTH) {
            let peer = host(family, 5);
            ip(&format!("route add {peer} via {}", beside(family, 18, 2)));
            scene.wire.run(|| ip(&format!("route add {peer} via {}", host(family, 7))));
            let [len, nodad] = if family == Family::V4 { ["32", ""] } else { ["128", "nodad"] };
            machine.run(|| ip(&format!("addr add {peer}/{len} dev lo {nodad}")));
            // A container may give itself the address of a peer.
            container.run(|| ip(&format!("addr add {peer}/{len} dev lo {nodad}")));
            apply(&scene.guard, &puts([scene.guard.peer(subnet_of(family, 5), peer)]));
            let tunnel = receiver_of(&scene, family, 9, PORT);
            let other = receiver_of(&scene, family, 9, PORT + 1);
            let send = |from: &Netns, source: IpAddr, text: &[u8], port| {
                let socket = from.run(|| UdpSocket::bind((source, 0)).unwrap());
                from.run(|| socket.send_to(text, (host(family, 9), port)).unwrap());
            };
            let own = beside(family, 17, 2);
            send(&container, own, b"forged", PORT);
            send(&container, peer, b"forged", PORT);
            send(&machine, beside(family, 18, 2), b"forged", PORT);
            send(&container, own, b"other", PORT + 1);
            send(&machine, peer, b"right", PORT);
            assert_eq!((next(&tunnel), next(&other)), (b"right".to_vec(), b"other".to_vec()));
            scene.until_refused(0, 0, n * 3);
        }
    });
}

/// A proxy in the kernel (IPVS) sends the packets of pods as if they were the node's own.
#[test]
fn a_node_sends_no_packets_of_others_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let scene = Scene::set(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            // The kernel adds the local route of an IPv6 address later.
            let routes = || ip("-6 route show table local");
            let own = host(Family::V6, 7).to_string();
            eventually(PATIENCE, || routes().contains(&own), routes);
            let tunnel = receiver_of(&scene, family, 9, PORT);
            let at = SocketAddr::new(host(family, 9), PORT);
            for forged in [pod(family, 7, 2), host(family, 8)] {
                let refused = send_raw(forged, at, b"forged").unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "the kernel drops it");
            }
            let other = SocketAddr::new(host(family, 9), PORT + 1);
            send_raw(pod(family, 7, 2), other, b"other").unwrap();
            send_raw(host(family, 7), at, b"right").unwrap();
            assert_eq!(next(&tunnel), b"right");
            scene.until_refused(0, 0, n * 2);
        }
    });
}

/// Another program may set a mark, and a process of the node may send with one.
#[test]
fn a_mark_of_others_makes_no_peer() {
    in_netns(|| {
        let scene = Scene::set(true);
        nft("add table inet other");
        nft("add chain inet other in { type filter hook prerouting priority 0; }");
        for (n, family) in (1..).zip(Family::BOTH) {
            let mark = mark_of(host(family, 8));
            let forged = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let socket = UdpSocket::bind((host(family, 7), 0)).unwrap();
            setsockopt(&socket, sockopt::Mark, &mark).unwrap();
            socket.send_to(&forged, (host(family, 7), PORT)).unwrap();
            nft(&format!("add rule inet other in udp dport {PORT} meta mark set {mark}"));
            assert_eq!(scene.arrived(family, &[(99, forged)]), [0; 0]);
            scene.until_refused(n * 2, 0, 0);
            nft("flush chain inet other in");
        }
    });
}

/// The kernel's counters begin anew with the rules.
#[test]
fn counts_never_go_back() {
    in_netns(|| {
        let scene = Scene::set(true);
        for (n, family) in (0..).zip(Family::BOTH) {
            let forged = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            assert_eq!(scene.arrived(family, &[(99, forged.clone())]), [0; 0]);
            scene.until_refused(n * 3 + 1, 0, 0);
            // The first subnet of another size needs more rules.
            let len = subnet_of(family, 64).len() + 2;
            let other = Subnet::new(pod(family, 64, 0), len).unwrap();
            apply(&scene.guard, &puts([scene.guard.peer(other, host(family, 8))]));
            scene.until_refused(n * 3 + 1, 0, 0);
            assert_eq!(scene.arrived(family, &[(99, forged.clone())]), [0; 0]);
            scene.until_refused(n * 3 + 2, 0, 0);
            // Another program removes the table.
            let all = scene.guard.records().unwrap();
            nft("flush ruleset");
            assert_eq!(scene.guard.records(), Ok(Vec::new()));
            apply(&scene.guard, &puts(all));
            assert_eq!(scene.arrived(family, &[(99, forged)]), [0; 0]);
            scene.until_refused(n * 3 + 3, 0, 0);
        }
    });
}

/// The packets of a peer arrive by the interface with the address of the tunnel, and those to the
/// peer leave by another one.
#[test]
fn the_way_to_a_peer_may_be_another_one_than_from_it() {
    in_netns(|| {
        let scene = Scene::set(true);
        let _router = neighbour("other0", 18);
        let port = PORT + 7;
        let program = Guard::new("guard-test-program");
        let ends = Family::BOTH.map(|family| {
            let end = end(family, device(family), true);
            program.tunnel(&TunnelEnd { device: None, inlets: vec![Inlet::Udp(port)], ..end })
        });
        let peers = Family::BOTH.map(|it| program.peer(subnet_of(it, 8), host(it, 8)));
        apply(&program, &puts([ends, peers].concat()));
        for (n, family) in (1..).zip(Family::BOTH) {
            let peer = host(family, 8);
            let node = host(family, 7);
            ip(&format!("route add {peer} via {}", beside(family, 18, 2)));
            let right = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            assert_eq!(scene.arrived(family, &[(8, right.clone())]), [1]);
            scene.until_refused((n - 1) * 2, 0, 0);
            // A program moves the packets.
            let receiver = UdpSocket::bind((node, port)).unwrap();
            receiver.set_read_timeout(Some(PATIENCE)).unwrap();
            let send = |from: &Netns, text: &[u8]| {
                let socket = from.run(|| UdpSocket::bind((peer, 0)).unwrap());
                from.run(|| socket.send_to(text, (node, port)).unwrap());
            };
            send(&scene.pod, b"forged");
            send(&scene.wire, b"right");
            assert_eq!(next(&receiver), b"right");
            until_refused(&program, n, 0, 0);
            // A pod may not send to the tunnel in the kernel either.
            let socket = scene.pod.run(|| UdpSocket::bind((peer, 0)).unwrap());
            for _ in 0..2 {
                scene.pod.run(|| socket.send_to(&right, (node, PORT)).unwrap());
            }
            assert_eq!(scene.arrived(family, &[]), [0; 0]);
            scene.until_refused(n * 2, 0, 0);
        }
    });
}
