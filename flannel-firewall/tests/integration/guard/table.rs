//! The records of a guard, and its table.

use std::net::Ipv4Addr;
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::kernel::{Outcome, RecordKeeper};
use flannel_core::object::Record;
use flannel_firewall::{Guard, Programs, TunnelEnd, cleanup_for_go};
use flannel_netlink::testing::{in_netns, in_netns_async};
use tokio::time::timeout;

use super::{NAME, apply, deletes, end, host, puts, subnet_of};
use crate::fixture::tools::nft;

const PATIENCE: Duration = Duration::from_secs(20);

fn subnet(text: &str) -> Subnet {
    text.parse().unwrap()
}

/// A peer with two subnets of different lengths, two peers with one subnet each, and the ends of
/// the tunnel.
fn records(guard: &Guard) -> [Record; 6] {
    [
        guard.peer(subnet("10.1.8.0/24"), host(Family::V4, 8)),
        guard.peer(subnet("10.1.64.0/26"), host(Family::V4, 8)),
        guard.peer(subnet_of(Family::V4, 9), host(Family::V4, 9)),
        guard.peer(subnet_of(Family::V6, 9), host(Family::V6, 9)),
        guard.tunnel(&end(Family::V4, "tunnel", true)),
        guard.tunnel(&end(Family::V6, "tunnel-v6", true)),
    ]
}

/// The records that another run finds.
fn found(guard: &Guard) -> Vec<String> {
    let anew = Guard::new(NAME).records().unwrap();
    assert_eq!(texts(&guard.records().unwrap()), texts(&anew));
    assert_ends_come_last(&anew);
    texts(&anew)
}

/// Checks that ends are put last, also the ends of an earlier run. The engine deletes an end with
/// another address or port at once.
fn assert_ends_come_last(records: &[Record]) {
    for record in records {
        let is_of_peer = record.data().starts_with("from ");
        assert_ne!(record.is_last(), is_of_peer, "{record}");
    }
}

fn texts(records: &[Record]) -> Vec<String> {
    let mut texts: Vec<String> = records.iter().map(ToString::to_string).collect();
    texts.sort();
    texts
}

#[test]
fn a_table_has_the_records_that_were_put() {
    in_netns(|| {
        let guard = Guard::new(NAME);
        assert_eq!(guard.records(), Ok(Vec::new()));
        assert_eq!(guard.refused(), None);
        guard.may_guard().unwrap();
        assert!(nft("list tables").is_empty(), "a trial leaves nothing");
        let all = records(&guard);
        // In each order, because the engine puts them in several batches.
        for first in 0..all.len() {
            for (n, record) in all.iter().cycle().skip(first).take(all.len()).enumerate() {
                apply(&guard, &puts([record.clone()]));
                let so_far: Vec<_> = all.iter().cycle().skip(first).take(n + 1).cloned().collect();
                assert_eq!(found(&guard), texts(&so_far));
            }
            // Records that are in place change nothing.
            apply(&guard, &puts(all.clone()));
            assert_eq!(found(&guard), texts(&all));
            for (n, record) in all.iter().cycle().skip(first).take(all.len()).enumerate() {
                apply(&guard, &deletes([record.clone()]));
                let left = all.iter().cycle().skip(first + n + 1).take(all.len() - n - 1);
                assert_eq!(found(&guard), texts(&left.cloned().collect::<Vec<_>>()));
            }
            assert!(nft("list tables").is_empty(), "an empty table is removed");
        }
    });
}

#[test]
fn changed_records_change_the_table() {
    in_netns(|| {
        let guard = Guard::new(NAME);
        let all = records(&guard);
        apply(&guard, &puts(all.clone()));
        // A subnet moves to another peer. A peer gets another address. This node gets another
        // address: the engine puts the new end before it deletes the old one.
        let taken = guard.peer(subnet("10.1.8.0/24"), host(Family::V4, 9));
        let moved = guard.peer(subnet_of(Family::V6, 9), host(Family::V6, 8));
        let new_end = guard
            .tunnel(&TunnelEnd { local: host(Family::V4, 77), ..end(Family::V4, "tunnel", true) });
        let mut changes = puts([taken.clone(), moved.clone(), new_end.clone()]);
        changes.extend(deletes([all[4].clone()]));
        apply(&guard, &changes);
        let wanted = [taken, all[1].clone(), all[2].clone(), moved, new_end, all[5].clone()];
        assert_eq!(found(&guard), texts(&wanted));
        // A peer goes and comes back in one batch, with another subnet.
        let back = guard.peer(subnet("10.1.99.0/24"), host(Family::V4, 8));
        let mut changes = deletes([all[1].clone()]);
        changes.extend(puts([back.clone()]));
        apply(&guard, &changes);
        let mut now = wanted.to_vec();
        now.retain(|record| record.subnet != all[1].subnet);
        now.push(back);
        assert_eq!(found(&guard), texts(&now));
        // Other kinds of ends.
        for other in [
            TunnelEnd { drops: false, ..end(Family::V4, "tunnel", true) },
            TunnelEnd {
                transports: vec![Transport::Protocol(4)],
                ..end(Family::V4, "tunnel", true)
            },
            TunnelEnd {
                transports: vec![Transport::Udp(1), Transport::Protocol(253)],
                ..end(Family::V4, "other", false)
            },
            TunnelEnd { device: None, ..end(Family::V4, "tunnel", true) },
        ] {
            let mut changes = deletes(guard.records().unwrap());
            changes.extend(puts([guard.tunnel(&other), all[0].clone()]));
            apply(&guard, &changes);
            assert_eq!(found(&guard), texts(&[guard.tunnel(&other), all[0].clone()]));
        }
        // More than a transaction has room for.
        let before = found(&guard).len();
        let mut many = Vec::new();
        for n in 0..9000 {
            let base = Ipv4Addr::from_bits(0x0a02_0000 + (n << 8));
            let node = Ipv4Addr::from_bits(0xc612_0000 + n);
            many.push(guard.peer(Subnet::new(base.into(), 24).unwrap(), node.into()));
        }
        apply(&guard, &puts(many.clone()));
        assert_eq!(found(&guard).len(), before + many.len());
        apply(&guard, &deletes(many));
        assert_eq!(found(&guard).len(), before);
    });
}

#[test]
fn a_table_that_another_program_changes_is_noticed_and_repaired() {
    in_netns_async(|| async {
        let guard = Guard::new(NAME);
        let mut changes = guard.changes().unwrap();
        let all = records(&guard);
        apply(&guard, &puts(all.clone()));
        let map = nft("list map inet flannel-guard-test peers-ipv4");
        let mark = map.split_once("192.0.2.8 : ").unwrap().1;
        let mark = mark.split([',', ' ', '}']).next().unwrap().trim();
        for damage in [
            "flush chain inet TABLE inner",
            "insert rule inet TABLE inner accept",
            "flush chain inet TABLE forwarded",
            "flush chain inet TABLE sent",
            "insert rule inet TABLE outer udp dport 8472 mark set MARK",
            "delete chain inet TABLE inner",
            "add chain inet TABLE other",
            "delete element inet TABLE sources-ipv4-24 { MARK . 10.1.8.0 }",
            "add element inet TABLE sources-ipv4-24 { MARK . 10.1.10.0 }",
            "add element inet TABLE sources-ipv4-24 { MARK . 10.1.10.1 }",
            "add element inet TABLE sources-ipv6-64 { 7 . fd00:1:0:8:: }",
            "delete element inet TABLE sources-ipv4-32 { MARK . 192.0.2.8 }",
            "add element inet TABLE sources-ipv4-32 { MARK . 192.0.2.99 }",
            "delete element inet TABLE peers-ipv4 { 192.0.2.8 }",
            "add element inet TABLE peers-ipv4 { 192.0.2.99 : MARK }",
            "add set inet TABLE sources-ipv4-28 { type mark . ipv4_addr; }",
            "flush ruleset",
        ] {
            let damage = damage.replace("TABLE", "flannel-guard-test").replace("MARK", mark);
            nft(&damage);
            timeout(PATIENCE, changes.next()).await.expect(&damage).unwrap();
            let found = guard.records().unwrap();
            assert_ne!(texts(&found), texts(&all), "{damage}");
            assert_ends_come_last(&found);
            // The engine puts the missing records, and deletes the records that are not desired.
            let missing = all.iter().filter(|record| !found.contains(record));
            let undesired =
                found.iter().filter(|record| all.iter().all(|known| known.subnet != record.subnet));
            let mut repairs = puts(missing.cloned());
            repairs.extend(deletes(undesired.cloned()));
            apply(&guard, &repairs);
            assert_eq!(texts(&guard.records().unwrap()), texts(&all), "{damage}");
        }
        // Its own changes are not reported.
        tokio::select! {
            biased;
            own = changes.next() => panic!("{own:?}"),
            () = async { for _ in 0..100 { tokio::task::yield_now().await; } } => {}
        }
        // A change between the read and the repair.
        guard.records().unwrap();
        nft("flush ruleset");
        apply(&guard, &deletes([all[0].clone()]));
        assert_eq!(guard.records().unwrap(), [], "the engine puts the missing records");
    });
}

#[test]
fn a_record_of_another_record_keeper_is_refused() {
    in_netns(|| {
        let guard = Guard::new(NAME);
        let wrong = [
            Record::new(NAME, subnet("10.1.8.0/24"), "to 192.0.2.8"),
            Record::new(NAME, subnet("10.1.8.0/24"), "from 2001:db8::1"),
            Record::new(NAME, subnet("fd00::/64"), "from 192.0.2.8"),
            Record::new(NAME, subnet("192.0.2.7/32"), "drops strangers at UDP port 8472 for a/b"),
            Record::new(NAME, subnet("192.0.2.7/32"), "drops strangers at UDP port 65536"),
        ];
        let good = guard.peer(subnet("10.1.9.0/24"), host(Family::V4, 9));
        let outcomes = guard.apply(&puts(wrong.into_iter().chain([good.clone()])));
        let refused = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_)));
        assert_eq!(refused.count(), 5, "{outcomes:?}");
        assert_eq!(outcomes.last(), Some(&Outcome::Done));
        assert_eq!(guard.records(), Ok(vec![good]));
    });
}

/// Go flannel would not add new nodes to the tables of guards.
#[test]
fn guards_are_removed_for_go_flannel() {
    in_netns_async(|| async {
        let guard = Guard::new(NAME);
        apply(&guard, &puts(records(&guard)));
        nft("add table inet other");
        let clean = async |device: &str, dry_run| {
            let devices = [device.parse().unwrap()].into();
            cleanup_for_go(&Programs::default(), &[], &devices, dry_run).await
        };
        // The guard is of another network.
        assert_eq!(clean("other", false).await.found, []);
        assert!(nft("list tables").contains("flannel-guard-test"));
        for dry_run in [true, false] {
            let cleanup = clean("tunnel-v6", dry_run).await;
            let found: Vec<_> = cleanup.found.iter().map(|found| &*found.object).collect();
            assert!(found.contains(&"nftables table inet flannel-guard-test"), "{found:?}");
            assert_eq!(nft("list tables").contains("flannel-guard-test"), dry_run);
        }
        assert!(nft("list tables").contains("other"));
    });
}

/// Two networks of one process do not know of each other.
#[test]
fn a_guard_has_a_table_in_each_namespace() {
    in_netns(|| {
        let guard = Guard::new(NAME);
        apply(&guard, &puts(records(&guard)));
        let elsewhere = flannel_netlink::testing::Netns::new().unwrap();
        elsewhere.run(|| {
            assert_eq!(guard.records(), Ok(Vec::new()));
            apply(&guard, &puts([guard.peer(subnet_of(Family::V4, 3), host(Family::V4, 3))]));
            assert_eq!(guard.records().unwrap().len(), 1);
        });
        assert_eq!(found(&guard), texts(&records(&guard)));
    });
}
