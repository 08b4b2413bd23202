//! Packets made by hand, through a real tunnel to a pod.

mod fixture;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::kernel::RecordKeeper;
use flannel_firewall::{Guard, TunnelEnd};
use flannel_netlink::testing::{Netns, in_netns, ip};
use nix::sys::socket::{setsockopt, sockopt, sockopt::UdpGsoSegment};
use test_support::eventually;

use self::fixture::{
    PATIENCE, Packets, Sent, TunnelFixture, beside, by_stranger, device, frame, inner, mark_of,
    neighbour, next, numbers, send_raw, until_refused,
};
use super::{PORT, apply, end, host, pod, puts, subnet_of};
use crate::fixture::tools::nft;

#[test]
fn only_packets_of_peers_with_their_own_sources_reach_a_pod() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            let Packets { wrong, right } = Packets::new(family);
            let mut strange = by_stranger(&wrong);
            strange.extend(by_stranger(&right));
            assert_eq!(fixture.arrived(family, &strange), [0; 0]);
            assert_eq!(fixture.arrived(family, &wrong), [0; 0]);
            assert_eq!(fixture.arrived(family, &right), numbers(&right));
            let count = |packets: &[Sent]| packets.len() as u64;
            fixture.until_refused(n * count(&strange), n * count(&wrong), 0);
        }
    });
}

#[test]
fn packets_that_are_only_counted_reach_a_pod() {
    in_netns(|| {
        let fixture = TunnelFixture::new(false);
        for (n, family) in (1..).zip(Family::BOTH) {
            let Packets { wrong, right } = Packets::new(family);
            assert_eq!(fixture.arrived(family, &by_stranger(&wrong)), numbers(&wrong));
            assert_eq!(fixture.arrived(family, &wrong), numbers(&wrong));
            assert_eq!(fixture.arrived(family, &right), numbers(&right));
            fixture.until_refused(n * 6, n * 6, 0);
            assert!(!fixture.guard.refused().unwrap().drops);
        }
    });
}

/// The kernel takes a batch apart before it takes packets out of the tunnel.
#[test]
fn each_packet_of_a_batch_that_nobody_has_segmented_is_checked() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            let target = pod(family, 7, 2);
            let of = |source: IpAddr, number: u8| frame(&inner(source, target, &[number]));
            let batch = [
                of(pod(family, 8, 2), 1),
                of(pod(family, 9, 2), 2),
                of(pod(family, 7, 3), 3),
                of(pod(family, 8, 3), 4),
            ];
            assert_eq!(
                fixture.arrived_after(family, || {
                    let socket = UdpSocket::bind((host(family, 8), 0)).unwrap();
                    setsockopt(&socket, UdpGsoSegment, &(batch[0].len() as i32)).unwrap();
                    socket.send_to(&batch.concat(), (host(family, 7), PORT)).unwrap();
                }),
                [1, 4]
            );
            fixture.until_refused(0, n * 2, 0);
        }
    });
}

/// A device of one family also receives packets of the other family.
#[test]
fn a_tunnel_carries_no_packets_of_the_other_family() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        for (n, outer) in (1..).zip(Family::BOTH) {
            let carried = if outer == Family::V4 { Family::V6 } else { Family::V4 };
            let at = pod(carried, 7, 2);
            let forged = frame(&inner(pod(carried, 8, 2), at, &[1]));
            assert_eq!(
                fixture.arrived_after(carried, || {
                    let socket = UdpSocket::bind((host(outer, 8), 0)).unwrap();
                    socket.send_to(&forged, (host(outer, 7), PORT)).unwrap();
                }),
                [0; 0]
            );
            fixture.until_refused(0, n, 0);
        }
    });
}

/// Masqueraded, the packet of a pod has the address of its node, and so looks like one of the node.
#[test]
fn a_pod_sends_nothing_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        nft("add table inet masq");
        nft("add chain inet masq out { type nat hook postrouting priority 100; }");
        nft("add rule inet masq out oifname eth0 masquerade");
        // The pod sends long packets in fragments.
        fixture.pod.run(|| ip("link set eth0 mtu 1500"));
        for (n, family) in (1..).zip(Family::BOTH) {
            let forged = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let long = [forged.clone(), vec![1; 3000]].concat();
            let send = |from: IpAddr, bytes: &[u8], to: SocketAddr| {
                let socket = fixture.pod.run(|| UdpSocket::bind((from, 0)).unwrap());
                fixture.pod.run(|| socket.send_to(bytes, to).unwrap());
            };
            let own = pod(family, 7, 2);
            // To this node: with the pod's address, and with the address of a peer.
            for from in [own, host(family, 8)] {
                send(from, &forged, SocketAddr::new(host(family, 7), PORT));
                assert_eq!(fixture.arrived_after(family, || {}), [0; 0]);
            }
            fixture.until_refused(n * 2, 0, (n - 1) * 3);
            // To another node, where a receiver stands for its tunnel. The pod has the address of
            // the first peer, so the receiver is at the second one.
            let tunnel = fixture.receiver_of(family, 9, PORT);
            let other = fixture.receiver_of(family, 9, PORT + 1);
            let to = |port| SocketAddr::new(host(family, 9), port);
            send(own, &forged, to(PORT));
            send(own, &long, to(PORT));
            send(host(family, 8), &forged, to(PORT));
            // Packets to other ports of nodes, and to other hosts, are not packets of the tunnel.
            send(own, b"other", to(PORT + 1));
            assert_eq!(next(&other), b"other");
            let stranger = fixture.receiver_of(family, 99, PORT);
            send(own, b"stranger", SocketAddr::new(host(family, 99), PORT));
            assert_eq!(next(&stranger), b"stranger");
            fixture.until_refused(n * 2, 0, n * 3);
            tunnel.set_nonblocking(true).unwrap();
            assert!(tunnel.recv(&mut [0; 9000]).is_err(), "a packet has reached the other node");
        }
    });
}

/// A container of another network on this node, whose packets are masqueraded too, is not a peer. A
/// virtual machine that is a node may send to other nodes.
#[test]
fn only_peers_are_forwarded_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        let container = neighbour("docker0", 17);
        let machine = neighbour("vm0", 18);
        nft("add table inet masq");
        nft("add chain inet masq out { type nat hook postrouting priority 100; }");
        nft("add rule inet masq out iifname docker0 oifname eth0 masquerade");
        for (n, family) in (1..).zip(Family::BOTH) {
            let peer = host(family, 5);
            ip(&format!("route add {peer} via {}", beside(family, 18, 2)));
            fixture.wire.run(|| ip(&format!("route add {peer} via {}", host(family, 7))));
            let (len, nodad) = if family == Family::V4 { (32, "") } else { (128, "nodad") };
            machine.run(|| ip(&format!("addr add {peer}/{len} dev lo {nodad}")));
            // A container may give itself the address of a peer.
            container.run(|| ip(&format!("addr add {peer}/{len} dev lo {nodad}")));
            apply(&fixture.guard, &puts([fixture.guard.peer(subnet_of(family, 5), peer)]));
            let tunnel = fixture.receiver_of(family, 9, PORT);
            let other = fixture.receiver_of(family, 9, PORT + 1);
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
            assert_eq!(next(&tunnel), b"right");
            assert_eq!(next(&other), b"other");
            fixture.until_refused(0, 0, n * 3);
        }
    });
}

/// A proxy in the kernel (IPVS) sends the packets of pods as if they were the node's own.
#[test]
fn a_node_sends_no_packets_of_others_to_the_tunnels_of_nodes() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        for (n, family) in (1..).zip(Family::BOTH) {
            // The kernel adds the local route of an IPv6 address later.
            let routes = || ip("-6 route show table local");
            let own = host(Family::V6, 7).to_string();
            eventually(PATIENCE, || routes().contains(&own), routes);
            let tunnel = fixture.receiver_of(family, 9, PORT);
            let at = SocketAddr::new(host(family, 9), PORT);
            for forged in [pod(family, 7, 2), host(family, 8)] {
                let refused = send_raw(forged, at, b"forged").unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "the kernel drops it");
            }
            let other = SocketAddr::new(host(family, 9), PORT + 1);
            send_raw(pod(family, 7, 2), other, b"other").unwrap();
            send_raw(host(family, 7), at, b"right").unwrap();
            assert_eq!(next(&tunnel), b"right");
            fixture.until_refused(0, 0, n * 2);
        }
    });
}

/// Another program may set a mark, and a process of the node may send with a mark.
#[test]
fn a_mark_of_others_makes_no_peer() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        nft("add table inet other");
        nft("add chain inet other in { type filter hook prerouting priority 0; }");
        for (n, family) in (1..).zip(Family::BOTH) {
            let mark = mark_of(host(family, 8));
            let forged = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let socket = UdpSocket::bind((host(family, 7), 0)).unwrap();
            setsockopt(&socket, sockopt::Mark, &mark).unwrap();
            socket.send_to(&forged, (host(family, 7), PORT)).unwrap();
            nft(&format!("add rule inet other in udp dport {PORT} meta mark set {mark}"));
            assert_eq!(fixture.arrived(family, &[Sent { from: 99, datagram: forged }]), [0; 0]);
            fixture.until_refused(n * 2, 0, 0);
            nft("flush chain inet other in");
        }
    });
}

/// The kernel's counters begin anew with the rules.
#[test]
fn counts_never_go_back() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        for (n, family) in (0..).zip(Family::BOTH) {
            let datagram = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let forged = [Sent { from: 99, datagram }];
            assert_eq!(fixture.arrived(family, &forged), [0; 0]);
            fixture.until_refused(n * 3 + 1, 0, 0);
            // The first subnet of another size needs more rules.
            let len = subnet_of(family, 64).len() + 2;
            let other = Subnet::new(pod(family, 64, 0), len).unwrap();
            apply(&fixture.guard, &puts([fixture.guard.peer(other, host(family, 8))]));
            fixture.until_refused(n * 3 + 1, 0, 0);
            assert_eq!(fixture.arrived(family, &forged), [0; 0]);
            fixture.until_refused(n * 3 + 2, 0, 0);
            // Another program removes the table.
            let all = fixture.guard.records().unwrap();
            nft("flush ruleset");
            assert_eq!(fixture.guard.records(), Ok(Vec::new()));
            apply(&fixture.guard, &puts(all));
            assert_eq!(fixture.arrived(family, &forged), [0; 0]);
            fixture.until_refused(n * 3 + 3, 0, 0);
        }
    });
}

/// The packets of a peer arrive by the interface with the address of the tunnel. The packets to the
/// peer leave by another interface.
#[test]
fn the_way_to_a_peer_may_be_another_one_than_from_it() {
    in_netns(|| {
        let fixture = TunnelFixture::new(true);
        let _router = neighbour("other0", 18);
        let port = PORT + 7;
        let program = Guard::new("guard-test-program");
        let ends = Family::BOTH.map(|family| {
            let end = end(family, device(family), true);
            program.tunnel(&TunnelEnd {
                device: None,
                transports: vec![Transport::Udp(port)],
                ..end
            })
        });
        let peers = Family::BOTH.map(|it| program.peer(subnet_of(it, 8), host(it, 8)));
        apply(&program, &puts([ends, peers].concat()));
        for (n, family) in (1..).zip(Family::BOTH) {
            let peer = host(family, 8);
            let node = host(family, 7);
            ip(&format!("route add {peer} via {}", beside(family, 18, 2)));
            let right = frame(&inner(pod(family, 8, 2), pod(family, 7, 2), &[1]));
            let sent = [Sent { from: 8, datagram: right.clone() }];
            assert_eq!(fixture.arrived(family, &sent), [1]);
            fixture.until_refused((n - 1) * 2, 0, 0);
            // A program moves the packets.
            let receiver = UdpSocket::bind((node, port)).unwrap();
            receiver.set_read_timeout(Some(PATIENCE)).unwrap();
            let send = |from: &Netns, text: &[u8]| {
                let socket = from.run(|| UdpSocket::bind((peer, 0)).unwrap());
                from.run(|| socket.send_to(text, (node, port)).unwrap());
            };
            send(&fixture.pod, b"forged");
            send(&fixture.wire, b"right");
            assert_eq!(next(&receiver), b"right");
            until_refused(&program, n, 0, 0);
            // A pod may not send to the tunnel in the kernel either.
            let socket = fixture.pod.run(|| UdpSocket::bind((peer, 0)).unwrap());
            for _ in 0..2 {
                fixture.pod.run(|| socket.send_to(&right, (node, PORT)).unwrap());
            }
            assert_eq!(fixture.arrived(family, &[]), [0; 0]);
            fixture.until_refused(n * 2, 0, 0);
        }
    });
}
