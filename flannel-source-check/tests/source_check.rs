//! The source check of a tunnel: only packets from the node of their source address arrive.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::kernel::{Annex, KernelError};
use flannel_core::object::{Change, Record};
use flannel_netlink::testing::{in_netns, in_netns_async, ip, run};
use flannel_source_check::{SourceCheck, TunnelEnd};
use tokio::time::timeout;

const NAME: &str = "sources";
/// The mark of packets whose source is right.
const MARK: &str = "0x666c7564";
const PORT: u16 = 8285;
const HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
const OTHER_HERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 77);
/// A packet that is dropped does not arrive later either: it is sent before one that arrives.
const PATIENCE: Duration = Duration::from_secs(20);

fn nft(command: &str) -> String {
    run("nft", command)
}

fn end(device: &str) -> TunnelEnd {
    TunnelEnd { device: device.parse().unwrap(), local: HERE, port: PORT }
}

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
        check.tunnel(end("tunnel")),
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

fn udp(address: Ipv4Addr, port: u16) -> UdpSocket {
    UdpSocket::bind((address, port)).unwrap()
}

/// Which of the packets arrive at a UDP port, each a node and the bytes that it sends. The last one
/// must.
fn arrived((at, port): (Ipv4Addr, u16), packets: &[(Ipv4Addr, Vec<u8>)]) -> Vec<bool> {
    let receiver = udp(at, port);
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    for (n, (from, packet)) in packets.iter().enumerate() {
        let numbered = [&packet[..], &[n as u8]].concat();
        udp(*from, 0).send_to(&numbered, (at, port)).unwrap();
    }
    let mut arrived = vec![false; packets.len()];
    let mut buffer = [0; 4096];
    while arrived.last() == Some(&false) {
        let (len, _) = receiver.recv_from(&mut buffer).unwrap();
        arrived[usize::from(buffer[len - 1])] = true;
    }
    arrived
}

fn all_addresses() {
    for n in [7, 77, 8, 9, 99] {
        ip(&format!("addr add 192.0.2.{n}/32 dev lo"));
    }
}

/// Drops packets by this condition after the table under test has seen them.
fn drop_later(condition: &str) {
    nft("add table ip later");
    nft("add chain ip later input { type filter hook input priority 10; }");
    nft(&format!("add rule ip later input {condition} drop"));
}

#[test]
fn packets_from_the_node_of_their_source_get_the_mark() {
    in_netns(|| {
        all_addresses();
        ip("link set lo mtu 1500");
        let check = SourceCheck::new(NAME);
        apply(&check, &puts(records(&check)));
        drop_later(&format!("udp dport {PORT} mark != {MARK}"));
        let from = |n: u8, source: [u8; 4]| (node(n), inner(source.into()));
        // Only the first fragment has the source address.
        let in_fragments =
            |n: u8, source: [u8; 4]| (node(n), [inner(source.into()), vec![0; 3000]].concat());
        let bad = [
            // Another node, a stranger, addresses beyond the subnet, of no subnet, of other nodes.
            from(9, [10, 1, 8, 2]),
            from(99, [10, 1, 8, 2]),
            from(8, [10, 1, 64, 64]),
            from(8, [10, 1, 7, 2]),
            from(8, [192, 0, 2, 9]),
            from(99, [192, 0, 2, 99]),
            from(7, [10, 1, 8, 2]),
            // With its number, it ends a byte before the source address does.
            (node(8), inner([10, 1, 8, 2].into())[..14].to_vec()),
            in_fragments(9, [10, 1, 8, 2]),
        ];
        let good = [
            from(8, [10, 1, 8, 0]),
            from(8, [10, 1, 8, 255]),
            from(8, [10, 1, 64, 63]),
            in_fragments(8, [10, 1, 8, 2]),
            from(9, [10, 1, 9, 1]),
            from(8, [192, 0, 2, 8]),
        ];
        let both = [&bad[..], &good].concat();
        let expected: Vec<bool> = (0..both.len()).map(|n| n >= bad.len()).collect();
        assert_eq!(arrived((HERE, PORT), &both), expected);
        // Packets to other ports and addresses are not of the tunnel.
        nft("flush chain ip later input");
        nft(&format!("add rule ip later input mark {MARK} drop"));
        for other in [(OTHER_HERE, PORT), (HERE, PORT + 1)] {
            assert_eq!(arrived(other, &both), vec![true; both.len()]);
        }
    });
}

#[test]
fn packets_by_the_device_of_the_tunnel_pass_only_with_the_mark() {
    in_netns(|| {
        all_addresses();
        let check = SourceCheck::new(NAME);
        apply(&check, &puts([check.tunnel(end("lo"))]));
        assert_eq!(check.dropped(), Some(0));
        // As the other chain does, before the packet is in the device.
        nft("add table ip before");
        nft("add chain ip before pre { type filter hook prerouting priority -320; }");
        nft(&format!("add rule ip before pre ip saddr 192.0.2.8 mark set {MARK}"));
        nft("add rule ip before pre ip saddr 192.0.2.9 mark set 0x4000");
        // No other program sees the mark.
        drop_later("mark != 0");
        let packets = [99, 9, 8].map(|n| (node(n), vec![n]));
        assert_eq!(arrived((HERE, PORT), &packets), [false, false, true]);
        assert_eq!(check.dropped(), Some(2));
        let other_device = [check.tunnel(end("tunnel"))];
        apply(&check, &puts(other_device.clone()));
        nft("flush ruleset");
        assert_eq!(check.records(), Ok(Vec::new()));
        apply(&check, &puts(other_device));
        assert_eq!(arrived((HERE, PORT), &packets), [true; 3]);
        assert_eq!(check.dropped(), Some(0));
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
        let end = TunnelEnd { local: OTHER_HERE, port: PORT + 1, ..end("tunnel") };
        let end = check.tunnel(end);
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
            "flush chain ip TABLE inner",
            "insert rule ip TABLE inner accept",
            "insert rule ip TABLE outer udp dport 8285 mark set 0x666c7564",
            "delete chain ip TABLE inner",
            "add chain ip TABLE other",
            "delete element ip TABLE subnets-24 { 192.0.2.8 . 10.1.8.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.99 . 10.1.8.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.99 . 10.1.10.0 }",
            "add element ip TABLE subnets-24 { 192.0.2.9 . 10.1.10.1 }",
            "delete element ip TABLE nodes { 192.0.2.8 . 192.0.2.8 }",
            "add element ip TABLE nodes { 192.0.2.99 . 192.0.2.99 }",
            "add set ip TABLE subnets-28 { type ipv4_addr . ipv4_addr; }",
            "flush ruleset",
        ] {
            nft(&damage.replace("TABLE", "flannel-sources"));
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
            Record::new(NAME, subnet("fd00::/64"), "checks sources of tunnel at UDP port 8285"),
            Record::new(NAME, subnet("192.0.2.7/32"), "checks sources of tunnel at UDP port 65536"),
            Record::new(NAME, subnet("192.0.2.7/32"), "checks sources of a/b at UDP port 8285"),
        ];
        let good = check.node(subnet("10.1.9.0/24"), node(9));
        let results = check.apply(&puts(wrong.into_iter().chain([good.clone()])));
        let refused = |result: &Result<(), KernelError>| result.is_err();
        assert_eq!(results.iter().filter(|result| refused(result)).count(), 6, "{results:?}");
        assert_eq!((results.last(), check.records()), (Some(&Ok(())), Ok(vec![good])));
    });
}
