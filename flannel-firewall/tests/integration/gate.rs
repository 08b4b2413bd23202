//! The gate of a tunnel: only packets from peers reach the node.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use flannel_core::address::Family;
use flannel_firewall::{Gate, Programs, RuleOptions, Rules, cleanup, leftovers};
use flannel_netlink::testing::in_netns_async;
use socket2::{Domain, Protocol, Socket, Type};

use crate::fixture::tools::nft;
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};

/// A period so long that no check in a test is periodic.
const RESYNC: Duration = Duration::from_secs(3600);
/// A protocol for experiments, which no kernel handles.
const PROTOCOL: u8 = 253;
/// A packet that is dropped does not arrive later either: it is sent before one that arrives.
const PATIENCE: Duration = Duration::from_secs(20);

fn gate(peers: &[IpAddr], complete: bool) -> Rules {
    let peers = peers.iter().map(|peer| (*peer, ())).collect();
    rules_of(Place::Pod, ALL).with_gate(Gate {
        protocols: vec![PROTOCOL],
        peers,
        complete,
        ..Gate::default()
    })
}

fn addresses(place: Place) -> [IpAddr; 2] {
    Family::BOTH.map(|family| place.address(family))
}

fn raw(address: IpAddr) -> Socket {
    let domain = if address.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(i32::from(PROTOCOL)))).unwrap();
    socket.bind(&SocketAddr::new(address, 0).into()).unwrap();
    socket
}

/// The hosts whose packets of the protocol arrive at the node. A host of the pod network is always
/// a peer in these tests, so that its packet ends the wait.
fn admitted(fixture: &Fixture, family: Family) -> Vec<Place> {
    admitted_at(fixture, family, Place::Pod.node(family))
}

/// The same for an address of the node.
fn admitted_at(fixture: &Fixture, family: Family, node: IpAddr) -> Vec<Place> {
    let receiver = raw(node);
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    for place in [Place::Outside, Place::Other, Place::Pod] {
        fixture.in_place(place, || {
            raw(place.address(family)).send_to(b"hello", &SocketAddr::new(node, 0).into()).unwrap()
        });
    }
    let mut admitted = Vec::new();
    while admitted.last() != Some(&Place::Pod) {
        let mut buffer = [std::mem::MaybeUninit::uninit(); 128];
        let (_, from) = receiver.recv_from(&mut buffer).unwrap();
        let from = from.as_socket().unwrap().ip();
        admitted.extend(Place::ALL.into_iter().find(|place| place.address(family) == from));
    }
    admitted
}

/// Changes of peers alone are not counted as changes of rules.
async fn change(running: &mut Running, rules: Rules) {
    let checks = running.status.borrow().checks;
    running.rules.send_replace(rules);
    running.until(|status| status.checks > checks && status.in_place).await;
}

fn assert_admitted(fixture: &Fixture, expected: &[Place]) {
    for family in Family::BOTH {
        assert_eq!(admitted(fixture, family), expected, "{family}");
    }
}

#[test]
fn only_packets_from_peers_arrive() {
    in_netns_async(|| async {
        let fixture = Fixture::set();
        let (pod, outside, other) =
            (addresses(Place::Pod), addresses(Place::Outside), addresses(Place::Other));
        let mut running = Running::start(&fixture, Kind::Nftables, gate(&[], false), RESYNC).await;
        let everybody = [Place::Outside, Place::Other, Place::Pod];
        assert_admitted(&fixture, &everybody);
        for (peers, complete, expected) in [
            ([pod, outside].concat(), true, vec![Place::Outside, Place::Pod]),
            ([pod, other].concat(), true, vec![Place::Other, Place::Pod]),
            // A cache may lack peers.
            (outside.to_vec(), false, everybody.to_vec()),
            (pod.to_vec(), true, vec![Place::Pod]),
        ] {
            change(&mut running, gate(&peers, complete)).await;
            assert_admitted(&fixture, &expected);
        }
        // It stays after a stop, and the next firewall adopts it.
        running.stop().await;
        assert_admitted(&fixture, &[Place::Pod]);
        let mut running = Running::start(&fixture, Kind::Nftables, gate(&[], false), RESYNC).await;
        let status = running.status.borrow().clone();
        assert_eq!((status.changes, status.repairs), (0, 0), "{status:?}");
        assert_admitted(&fixture, &[Place::Pod]);
        change(&mut running, rules_of(Place::Pod, ALL)).await;
        assert_admitted(&fixture, &everybody);
        running.stop().await;
    });
}

/// A tunnel of another program may end at another address of the node.
#[test]
fn a_gate_is_at_the_addresses_of_the_tunnel_only() {
    in_netns_async(|| async {
        let fixture = Fixture::set();
        let at = |place: Option<Place>| {
            let peers = addresses(Place::Pod).into_iter().map(|peer| (peer, ())).collect();
            let local = flannel_core::address::Dual::from_fn(|family| Some(place?.node(family)));
            let gate = Gate { protocols: vec![PROTOCOL], local, peers, complete: true };
            rules_of(Place::Pod, ALL).with_gate(gate)
        };
        let other = at(Some(Place::Other));
        let mut running = Running::start(&fixture, Kind::Nftables, other, RESYNC).await;
        let everybody = [Place::Outside, Place::Other, Place::Pod];
        for tunnel in [Some(Place::Pod), Some(Place::Outside), None] {
            running.want(at(tunnel)).await;
            for family in Family::BOTH {
                for place in [Place::Pod, Place::Outside] {
                    let guarded = tunnel.is_none_or(|tunnel| tunnel == place);
                    let expected = if guarded { &[Place::Pod][..] } else { &everybody };
                    let seen = admitted_at(&fixture, family, place.node(family));
                    assert_eq!(seen, expected, "{family} {place:?}, tunnel {tunnel:?}");
                }
            }
        }
        running.stop().await;
    });
}

#[test]
fn packets_of_strangers_are_counted() {
    in_netns_async(|| async {
        let fixture = Fixture::set();
        let (rules, resync) = (gate(&addresses(Place::Pod), true), Duration::from_millis(20));
        let mut running = Running::start(&fixture, Kind::Nftables, rules, resync).await;
        for times in 1..=2 {
            assert_admitted(&fixture, &[Place::Pod]);
            // Two strangers, by two families.
            running.until(|status| status.dropped.of_strangers.packets == 4 * times).await;
        }
        let status = running.status.borrow().clone();
        assert_eq!((status.repairs, status.dropped.unencrypted.packets), (0, 0), "{status:?}");
        running.stop().await;
    });
}

#[test]
fn changes_by_other_programs_are_repaired() {
    in_netns_async(|| async {
        let fixture = Fixture::set();
        let rules = gate(&addresses(Place::Pod), true);
        let mut running = Running::start(&fixture, Kind::Nftables, rules, RESYNC).await;
        let (pod, outside) = (Place::Pod.address(Family::V4), Place::Outside.address(Family::V4));
        for (n, command) in [
            format!("add element ip flannel-tunnel peers {{ {outside} }}"),
            format!("delete element ip flannel-tunnel peers {{ {pod} }}"),
            "flush chain ip flannel-tunnel input".into(),
            "insert rule ip flannel-tunnel input accept".into(),
            "add chain ip flannel-tunnel foreign".into(),
            "delete table ip flannel-tunnel".into(),
            "flush ruleset".into(),
        ]
        .iter()
        .enumerate()
        {
            nft(command);
            running.until(|status| status.repairs > n as u64).await;
            assert_admitted(&fixture, &[Place::Pod]);
        }
        running.stop().await;
        let (would, did) = (
            leftovers(&Programs::default()).await.found,
            cleanup(&Programs::default()).await.found,
        );
        assert_eq!(would, did);
        let tables = did.iter().filter(|found| found.object.ends_with("flannel-tunnel")).count();
        assert_eq!(tables, 2, "{did:?}");
        assert!(!nft("list tables").contains("flannel"));
    });
}

/// More peers than one message, and one transaction, can have.
#[test]
fn a_gate_has_room_for_thousands_of_peers() {
    in_netns_async(|| async {
        let fixture = Fixture::set();
        let many = |number: u16| -> Vec<IpAddr> {
            let peers = (0..number).map(u16::to_be_bytes);
            let pod = addresses(Place::Pod);
            peers
                .flat_map(|[a, b]| {
                    let v6 = [0x2001, 0xdb8, 9, 0, 0, 0, u16::from(a), u16::from(b)];
                    [IpAddr::from([203, 0, a, b]), IpAddr::from(v6)]
                })
                .chain(pod)
                .collect()
        };
        let options = RuleOptions::default();
        let mut running =
            Running::start(&fixture, Kind::Nftables, rules_of(Place::Pod, options), RESYNC).await;
        for number in [9001, 9000, 100, 9000] {
            change(&mut running, gate(&many(number), true)).await;
            for family in ["ip", "ip6"] {
                let set = nft(&format!("list set {family} flannel-tunnel peers"));
                let elements = set.split([',', '{']).filter(|text| text.contains(['.', ':']));
                assert_eq!(elements.count(), usize::from(number) + 1);
            }
        }
        assert_admitted(&fixture, &[Place::Pod]);
        running.stop().await;
    });
}
