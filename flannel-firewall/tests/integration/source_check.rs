//! The source check of a tunnel: only packets from the node of their source address arrive.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::kernel::{Annex, KernelError};
use flannel_core::object::{Change, Record};
use flannel_firewall::{SourceCheck, TunnelEnd};
use flannel_netlink::testing::{in_netns, in_netns_async, ip};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::time::timeout;

use crate::fixture::tools::nft;

const NAME: &str = "tunnel-sources";
const PORT: u16 = 8285;
const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const OTHER_HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 77);
/// A packet that is dropped does not arrive later either: it is sent before one that arrives.
const PATIENCE: Duration = Duration::from_secs(20);

fn node(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, n)
}

fn subnet(text: &str) -> Subnet {
    text.parse().unwrap()
}

/// The nodes of these tests: one with two subnets of different lengths, and one with one.
fn records(check: &SourceCheck) -> [Record; 4] {
    [
        check.node(subnet("10.1.8.0/24"), node(8)),
        check.node(subnet("10.1.64.0/26"), node(8)),
        check.node(subnet("10.1.9.0/24"), node(9)),
        check.tunnel(TunnelEnd { local: HERE, port: PORT }),
    ]
}

fn puts(records: impl IntoIterator<Item = Record>) -> Vec<Change> {
    records.into_iter().map(|record| Change::Put(record.into())).collect()
}

fn deletes(records: impl IntoIterator<Item = Record>) -> Vec<Change> {
    records.into_iter().map(|record| Change::Delete(record.into())).collect()
}

fn apply(check: &SourceCheck, changes: &[Change]) {
    for (result, change) in check.apply(changes).into_iter().zip(changes) {
        assert_eq!(result, Ok(()), "{change:?}");
    }
}

/// What another run finds.
fn found(check: &SourceCheck) -> Vec<String> {
    let anew = SourceCheck::new(NAME).records().unwrap();
    assert_eq!(check.records().unwrap(), anew);
    let mut texts: Vec<String> = anew.iter().map(ToString::to_string).collect();
    texts.sort();
    texts
}

fn texts(records: &[Record]) -> Vec<String> {
    let mut texts: Vec<String> = records.iter().map(ToString::to_string).collect();
    texts.sort();
    texts
}

fn inner(source: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 20, 0, 1, 0, 0, 64, 253, 0, 0];
    packet.extend(source.octets());
    packet.extend([10, 1, 7, 2]);
    packet
}

/// A raw socket of the protocol of the tunnel's packets without UDP.
fn raw(address: Ipv4Addr) -> UdpSocket {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4))).unwrap();
    socket.bind(&SocketAddr::new(address.into(), 0).into()).unwrap();
    socket.into()
}

fn udp(address: Ipv4Addr, port: u16) -> UdpSocket {
    UdpSocket::bind((address, port)).unwrap()
}

/// Which of the packets arrive at an address, each a node and the bytes that it sends. `open` opens
/// a socket, with the port of the tunnel if it receives.
fn arrived(
    open: impl Fn(Ipv4Addr, u16) -> UdpSocket,
    at: Ipv4Addr,
    packets: &[(Ipv4Addr, Vec<u8>)],
) -> Vec<bool> {
    let receiver = open(at, PORT);
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let last = (node(9), inner(Ipv4Addr::new(10, 1, 9, 9)));
    let mut numbered = packets.to_vec();
    numbered.push(last);
    for (n, (from, packet)) in numbered.iter_mut().enumerate() {
        packet.push(n as u8);
        open(*from, 0).send_to(packet, (at, PORT)).unwrap();
    }
    let mut arrived = vec![false; packets.len()];
    let mut buffer = [0; 256];
    loop {
        let (len, _) = receiver.recv_from(&mut buffer).unwrap();
        match arrived.get_mut(usize::from(buffer[len - 1])) {
            Some(arrived) => *arrived = true,
            None => return arrived,
        }
    }
}

#[test]
fn a_packet_arrives_only_from_the_node_of_its_source() {
    in_netns(|| {
        for n in [7, 77, 8, 9, 99] {
            ip(&format!("addr add 192.0.2.{n}/32 dev lo"));
        }
        let check = SourceCheck::new(NAME);
        apply(&check, &puts(records(&check)));
        let from = |n: u8, source: [u8; 4]| (node(n), inner(source.into()));
        let good = [
            from(8, [10, 1, 8, 0]),
            from(8, [10, 1, 8, 255]),
            from(8, [10, 1, 64, 63]),
            from(9, [10, 1, 9, 1]),
            from(8, [192, 0, 2, 8]),
        ];
        let mut bad = vec![
            // Another node, a stranger, addresses beyond the subnet, of no subnet, of other nodes.
            from(9, [10, 1, 8, 2]),
            from(99, [10, 1, 8, 2]),
            from(8, [10, 1, 64, 64]),
            from(8, [10, 1, 7, 2]),
            from(8, [192, 0, 2, 9]),
            from(99, [192, 0, 2, 99]),
            from(7, [10, 1, 8, 2]),
        ];
        let cut = inner([10, 1, 8, 2].into())[..14].to_vec();
        bad.push((node(8), cut));
        let both = [&good[..], &bad].concat();
        let expected: Vec<bool> = (0..both.len()).map(|n| n < good.len()).collect();
        assert_eq!(check.dropped(), Some(0));
        assert_eq!(arrived(udp, HERE, &both), expected);
        assert_eq!(check.dropped(), Some(bad.len() as u64));
        // The device takes packets without UDP too. Those of the tests cannot be cut there.
        let whole = &both[..both.len() - 1];
        assert_eq!(arrived(|at, _| raw(at), HERE, whole), expected[..whole.len()]);
        assert_eq!(check.dropped(), Some(2 * bad.len() as u64 - 1));
        // Tunnels of other programs: another address, another port.
        assert_eq!(arrived(udp, OTHER_HERE, &both), vec![true; both.len()]);
        let other_port = udp(HERE, PORT + 1);
        other_port.set_read_timeout(Some(PATIENCE)).unwrap();
        udp(node(99), 0).send_to(b"hello", (HERE, PORT + 1)).unwrap();
        assert_eq!(other_port.recv(&mut [0; 8]).unwrap(), 5);
        // Without the record of the tunnel, nothing is dropped.
        apply(&check, &deletes([check.tunnel(TunnelEnd { local: HERE, port: PORT })]));
        assert_eq!(arrived(udp, HERE, &both), vec![true; both.len()]);
    });
}

#[test]
fn a_table_has_the_records_that_were_put() {
    in_netns(|| {
        let check = SourceCheck::new(NAME);
        assert_eq!((check.records(), check.dropped()), (Ok(Vec::new()), None));
        check.may_check().unwrap();
        assert!(nft("list tables").is_empty(), "a trial leaves nothing");
        let all = records(&check);
        // In each order, because the engine puts them in several batches.
        for first in 0..all.len() {
            for (n, record) in all.iter().cycle().skip(first).take(all.len()).enumerate() {
                apply(&check, &puts([record.clone()]));
                let so_far: Vec<_> = all.iter().cycle().skip(first).take(n + 1).cloned().collect();
                assert_eq!(found(&check), texts(&so_far));
            }
            // The same again changes nothing.
            apply(&check, &puts(all.clone()));
            assert_eq!(found(&check), texts(&all));
            for (n, record) in all.iter().cycle().skip(first).take(all.len()).enumerate() {
                apply(&check, &deletes([record.clone()]));
                let left: Vec<_> = all
                    .iter()
                    .cycle()
                    .skip(first + n + 1)
                    .take(all.len() - n - 1)
                    .cloned()
                    .collect();
                assert_eq!(found(&check), texts(&left));
            }
            assert!(nft("list tables").is_empty(), "an empty table is removed");
        }
        // A subnet moves to another node, and a node to another address of this host. The engine
        // puts the new end before it deletes the old one.
        apply(&check, &puts(all.clone()));
        let moved = check.node(subnet("10.1.8.0/24"), node(9));
        let end = check.tunnel(TunnelEnd { local: OTHER_HERE, port: PORT + 1 });
        let mut changes = puts([moved.clone(), end.clone()]);
        changes.extend(deletes([all[3].clone()]));
        apply(&check, &changes);
        let wanted = [moved, all[1].clone(), all[2].clone(), end];
        assert_eq!(found(&check), texts(&wanted));
        // More than a transaction has room for.
        let peer = |n: u32| {
            let base = Ipv4Addr::from_bits(0x0a02_0000 + (n << 8));
            check.node(Subnet::new(base.into(), 24).unwrap(), (0xc612_0000 + n).into())
        };
        let many: Vec<Record> = (0..9000).map(peer).collect();
        apply(&check, &puts(many.clone()));
        assert_eq!(found(&check).len(), wanted.len() + many.len());
        apply(&check, &deletes(many));
        assert_eq!(found(&check), texts(&wanted));
    });
}

#[test]
fn a_table_that_another_program_changes_is_noticed_and_repaired() {
    in_netns_async(|| async {
        let check = SourceCheck::new(NAME);
        let mut changes = check.changes().unwrap();
        let all = records(&check);
        apply(&check, &puts(all.clone()));
        for damage in [
            "flush chain ip TABLE input",
            "add rule ip TABLE input accept",
            "insert rule ip TABLE input udp dport 8285 accept",
            "add chain ip TABLE other",
            "delete element ip TABLE subnets-24 { 192.0.2.8 . 10.1.8.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.99 . 10.1.8.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.99 . 10.1.10.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.99 . 10.1.10.1 }",
            "delete element ip TABLE nodes { 192.0.2.8 . 192.0.2.8 }",
            "add element ip TABLE nodes { 192.0.2.99 . 192.0.2.99 }",
            "add set ip TABLE subnets-28 { type ipv4_addr . ipv4_addr; }",
            "flush ruleset",
        ] {
            nft(&damage.replace("TABLE", NAME));
            timeout(PATIENCE, changes.next()).await.expect(damage).unwrap();
            let found = check.records().unwrap();
            assert_ne!(texts(&found), texts(&all), "{damage}");
            // As the engine does.
            let missing = all.iter().filter(|record| !found.contains(record)).cloned();
            let strange =
                found.iter().filter(|record| all.iter().all(|known| known.subnet != record.subnet));
            let mut repairs = puts(missing);
            repairs.extend(deletes(strange.cloned()));
            apply(&check, &repairs);
            assert_eq!(texts(&check.records().unwrap()), texts(&all), "{damage}");
        }
        // Its own changes are no events.
        tokio::select! {
            biased;
            own = changes.next() => panic!("{own:?}"),
            () = async { for _ in 0..100 { tokio::task::yield_now().await; } } => {}
        }
        // A change between the look and the repair.
        check.records().unwrap();
        nft("flush ruleset");
        apply(&check, &deletes([all[0].clone()]));
        let lost = check.records().unwrap();
        assert_eq!(lost, [], "the engine puts all that it misses");
    });
}

#[test]
fn a_record_of_another_annex_is_refused() {
    in_netns(|| {
        let check = SourceCheck::new(NAME);
        let wrong = [
            Record::new(NAME, subnet("10.1.8.0/24"), "to 192.0.2.8"),
            Record::new(NAME, subnet("10.1.8.0/24"), "from 2001:db8::1"),
            Record::new(NAME, subnet("fd00::/64"), "from 192.0.2.8"),
            Record::new(NAME, subnet("fd00::/64"), "checks sources at UDP port 8285"),
            Record::new(NAME, subnet("192.0.2.7/32"), "checks sources at UDP port 65536"),
        ];
        let good = check.node(subnet("10.1.9.0/24"), node(9));
        let results = check.apply(&puts(wrong.into_iter().chain([good.clone()])));
        let refused = |result: &Result<(), KernelError>| result.is_err();
        assert_eq!(results.iter().filter(|result| refused(result)).count(), 5, "{results:?}");
        assert_eq!((results.last(), check.records()), (Some(&Ok(())), Ok(vec![good])));
    });
}
