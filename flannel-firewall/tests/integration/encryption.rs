//! Packets to the pods of other nodes leave by encrypted devices only. A plain device of the
//! fixture stands for the encrypted device.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::fixture::tools::nft;
use crate::fixture::{ALL, Fixture, Kind, Place, Running, first_network, rules_of, second_network};
use flannel_core::address::{Dual, Family};
use flannel_firewall::{Contested, Fault, RuleOptions, Rules, cleanup, cleanup_for_go};
use flannel_netlink::testing::ip;

in_every_mode!(
    only_encrypted_devices_carry_packets_to_other_pods,
    a_translated_packet_of_the_host_counts_by_its_last_device,
    rules_that_another_program_removes_come_back,
    another_program_cannot_accept_a_packet_before,
    another_program_cannot_get_before_the_rules_later,
    the_rules_stay_until_they_are_not_required,
    only_the_rules_that_go_flannel_does_not_know_are_removed_for_it,
);

/// A period so long that no check in a test is periodic.
const RESYNC: Duration = Duration::from_secs(3600);
const LONG: Duration = Duration::from_secs(20);
/// The time in which a packet must not arrive.
const SHORT: Duration = Duration::from_millis(300);
/// The devices of the node to the peer, and to the outside.
const TO_PEER: &str = "to1";
const TO_OUTSIDE: &str = "to2";

/// No other rules, so that neither masquerading nor forward rules are needed.
const ONLY: RuleOptions =
    RuleOptions { masquerade: Dual { v4: None, v6: None }, forward: false, encrypted: None };

/// The rules if packets by these devices are encrypted.
#[allow(clippy::needless_pass_by_value, reason = "the callers are shorter")]
fn by(devices: &[&str], rule_options: RuleOptions) -> Rules {
    let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
    rules_of(Place::Pod, RuleOptions { encrypted: Some(devices), ..rule_options })
}

/// Whether a packet from a place, or from the node itself (`None`), arrives.
fn arrives(fixture: &Fixture, family: Family, from: Option<Place>, to: Place, want: bool) -> bool {
    let patience = if want { LONG } else { SHORT };
    match from {
        Some(from) => fixture.seen_at(family, from, to, 0, patience).is_some(),
        None => fixture.seen_of_node_within(family, to.node(family), to, patience).is_some(),
    }
}

/// The peer is on a link of the node, unlike a real pod of another node. So the node's neighbour
/// advertisements for it are packets to a pod of another node, which are dropped.
fn know_the_node(fixture: &Fixture) {
    let link = ip(&format!("-o link show dev {TO_PEER}"));
    let mac = link.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap();
    let node = Place::Peer.node(Family::V6);
    fixture.in_place(Place::Peer, || ip(&format!("neigh replace {node} lladdr {mac} dev eth0")));
}

/// Checks whether packets to the pods of the peer pass: from a pod, from outside, from the node.
/// All others pass.
fn assert_passes(fixture: &Fixture, to_peer: bool) {
    use Place::{Other, Outside, Peer, Pod};
    know_the_node(fixture);
    for family in Family::BOTH {
        for (from, to) in [
            (Some(Pod), Peer),
            (Some(Outside), Peer),
            (None, Peer),
            (Some(Pod), Outside),
            (Some(Peer), Pod),
            (Some(Outside), Pod),
            (Some(Outside), Other),
            (None, Pod),
            (None, Outside),
        ] {
            let want = to_peer || to != Peer;
            let arrived = arrives(fixture, family, from, to, want);
            assert_eq!(arrived, want, "{family} from {from:?} to {to:?}");
        }
    }
}

async fn only_encrypted_devices_carry_packets_to_other_pods(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    assert_passes(&fixture, false);
    running.want(by(&[TO_PEER], ONLY)).await;
    assert_passes(&fixture, true);
    running.want(by(&[TO_OUTSIDE, "wg0"], ONLY)).await;
    assert_passes(&fixture, false);
    // Masquerading changes the source of packets from outside to the peer.
    for (devices, passes) in [(TO_PEER, true), (TO_OUTSIDE, false)] {
        running.want(by(&[devices], ALL)).await;
        assert_passes(&fixture, passes);
    }
    running.want(rules_of(Place::Pod, ALL)).await;
    assert_passes(&fixture, true);
}

/// A connection of the node to an address outside, which a rule translates to a pod of the peer, as
/// kube-proxy does for services. Its first route leads to another device.
async fn a_translated_packet_of_the_host_counts_by_its_last_device(fixture: Fixture, kind: Kind) {
    const PORT: u16 = 7070;
    for (keyword, family) in [("ip", Family::V4), ("ip6", Family::V6)] {
        let service = Place::Outside.address(family);
        let pod = Place::Peer.address(family);
        nft(&format!(
            "table {keyword} service {{ chain c {{ type nat hook output priority -100; \
             {keyword} daddr {service} udp dport {PORT} dnat to {pod}; }}; }}"
        ));
    }
    let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    for (device, want) in [(TO_PEER, true), (TO_OUTSIDE, false)] {
        running.want(by(&[device], ONLY)).await;
        for family in Family::BOTH {
            let node = std::net::UdpSocket::bind((family.unspecified(), 0)).unwrap();
            let patience = if want { LONG } else { SHORT };
            let to = (Place::Outside.address(family), PORT);
            let seen = fixture.seen_through(&node, to.into(), Place::Peer, PORT, family, patience);
            assert_eq!(seen.is_some(), want, "{family} by {device}");
        }
    }
}

async fn rules_that_another_program_removes_come_back(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    let commands: &[&str] = match kind {
        Kind::Nftables => &[
            "delete table TABLE",
            "flush chain TABLE postrouting",
            "insert rule TABLE postrouting accept",
            "add table TABLE { flags dormant; }",
            "flush ruleset",
        ],
        _ => &[
            "-t mangle -F",
            "-t mangle -F POSTROUTING",
            "-t mangle -I FLANNEL-ENCRYPTION -j ACCEPT",
        ],
    };
    let mut repairs = 0;
    for command in commands {
        for (family, keyword) in [(Family::V4, "ip"), (Family::V6, "ip6")] {
            match kind {
                Kind::Nftables => {
                    _ = nft(&command.replace("TABLE", &format!("{keyword} flannel-encryption")));
                }
                _ => _ = fixture.tools.iptables(kind, family, command),
            }
            repairs += 1;
            let status = running.until(|status| status.repairs >= repairs).await;
            assert_eq!(status.repairs, repairs, "{command}: {status:?}");
        }
        assert_passes(&fixture, false);
    }
}

async fn another_program_cannot_accept_a_packet_before(fixture: Fixture, kind: Kind) {
    for family in Family::BOTH {
        for of in [Kind::IptablesNft, Kind::IptablesLegacy] {
            fixture.tools.iptables(of, family, "-t mangle -A POSTROUTING -j ACCEPT");
            fixture.tools.iptables(of, family, "-A OUTPUT -j ACCEPT");
            fixture.tools.iptables(of, family, "-A FORWARD -j ACCEPT");
        }
    }
    assert_passes(&fixture, true);
    let _running = Running::start(&fixture, kind, by(&[], ALL), RESYNC).await;
    assert_passes(&fixture, false);
}

/// In nftables mode, no rule of iptables decides about the packets of flannel's chain.
async fn another_program_cannot_get_before_the_rules_later(fixture: Fixture, kind: Kind) {
    let accept = |of, family| {
        _ = fixture.tools.iptables(of, family, "-t mangle -I POSTROUTING -j ACCEPT");
    };
    let variant = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    let mut repairs = 0;
    for family in Family::BOTH {
        accept(variant, family);
        if kind != Kind::Nftables {
            repairs += 1;
            let status = running.until(|status| status.repairs >= repairs).await;
            let [found] = &status.last_repair.unwrap().found[..] else { panic!("one difference") };
            assert_eq!(found.fault, Fault::Misplaced, "{found}");
            assert!(found.object.ends_with("jump from POSTROUTING to FLANNEL-ENCRYPTION"));
        }
    }
    assert_passes(&fixture, false);
    assert_eq!(running.status.borrow().contest, None);
    // The next firewall finds the rule before the jump too.
    running.stop().await;
    Family::BOTH.into_iter().for_each(|family| accept(variant, family));
    let running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    assert_passes(&fixture, false);
    running.stop().await;
}

/// A program that insists on the first place causes few processes, and is reported.
#[test]
fn a_contest_for_the_first_place_has_few_repairs_and_is_reported() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let kind = Kind::IptablesNft;
        let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
        let accept = || {
            _ = fixture.tools.iptables(kind, Family::V4, "-t mangle -I POSTROUTING -j ACCEPT");
        };
        for repairs in 1..=3 {
            accept();
            running.until(|status| status.repairs >= repairs).await;
        }
        let expected = Some(Contested::Place(Fault::Misplaced));
        running.until(|status| status.contest == expected).await;
        // Not within the quarter of a second that otherwise lies between two checks.
        accept();
        let checks = running.status.borrow().checks;
        let soon = running.status.wait_for(|status| status.checks > checks);
        tokio::time::timeout(Duration::from_secs(3), soon).await.unwrap_err();
    });
}

async fn the_rules_stay_until_they_are_not_required(fixture: Fixture, kind: Kind) {
    let running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    running.stop().await;
    assert_passes(&fixture, false);
    let mut running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
    running.assert_writes(0, 0);
    running.want(rules_of(Place::Pod, RuleOptions::default())).await;
    assert_passes(&fixture, true);
    running.want(by(&[], ONLY)).await;
    running.stop().await;
    assert!(fixture.tools.ours_seen().iter().any(|line| is_about_encryption(line)));
    let cleaned = cleanup(&fixture.tools.programs()).await;
    assert!(cleaned.failed.is_empty() && cleaned.found.len() == 2, "{cleaned:?}");
    assert_eq!(fixture.tools.ours_seen(), Vec::<String>::new());
    assert_passes(&fixture, true);
}

async fn only_the_rules_that_go_flannel_does_not_know_are_removed_for_it(
    fixture: Fixture,
    kind: Kind,
) {
    let programs = fixture.tools.programs();
    Running::start(&fixture, kind, by(&[], ALL), RESYNC).await.stop().await;
    let networks =
        |n| Family::BOTH.map(|family| [first_network(family), second_network(family)[0]][n]);
    let devices = BTreeSet::new();
    let of_others = cleanup_for_go(&programs, &networks(1), &devices, false).await;
    assert!(of_others.found.is_empty() && of_others.failed.is_empty(), "{of_others:?}");
    let would = cleanup_for_go(&programs, &networks(0), &devices, true).await;
    let did = cleanup_for_go(&programs, &networks(0), &devices, false).await;
    assert!(did.failed.is_empty(), "{did:?}");
    assert_eq!(would.found, did.found);
    assert!(
        did.found.len() == 2 && did.found.iter().all(|f| f.fault == Fault::Unwanted),
        "{did:?}"
    );
    let ours = fixture.tools.ours_seen();
    assert!(!ours.is_empty() && !ours.iter().any(|line| is_about_encryption(line)), "{ours:#?}");
    assert_passes(&fixture, true);
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
}

fn is_about_encryption(line: &str) -> bool {
    line.to_lowercase().contains("flannel-encryption")
}

/// The count continues when the table is made again.
#[test]
fn dropped_packets_are_counted_from_the_start_of_the_firewall_on() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let kind = Kind::Nftables;
        let resync = Duration::from_millis(20);
        let send = |times: usize| {
            for _ in 0..times {
                for family in Family::BOTH {
                    assert!(!arrives(&fixture, family, Some(Place::Pod), Place::Peer, false));
                }
            }
        };
        let running = Running::start(&fixture, kind, by(&[], ONLY), RESYNC).await;
        send(1);
        running.stop().await;
        let mut running = Running::start(&fixture, kind, by(&[], ONLY), resync).await;
        assert_eq!(running.status.borrow().dropped.unencrypted.packets, 0);
        send(2);
        running.until(|status| status.dropped.unencrypted.packets == 4).await;
        assert!(running.status.borrow().dropped.unencrypted.last.is_some());
        running.want(by(&[TO_OUTSIDE], ONLY)).await;
        send(1);
        let status = running.until(|status| status.dropped.unencrypted.packets == 6).await;
        assert_eq!(status.repairs, 0, "a counter is no difference: {status:?}");
    });
}

/// The kernel does not count packets that a blackhole route drops, and the rule that drops others
/// does not see them.
#[test]
fn packets_that_a_blackhole_route_drops_are_counted() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let resync = Duration::from_millis(20);
        let mut running =
            Running::start(&fixture, Kind::Nftables, by(&[TO_PEER], ONLY), resync).await;
        for (network, peer, here) in
            [("10.1.0.0/16", "10.1.9.9", "10.1.7.99"), ("fd00:1::/48", "fd00:1:0:9::9", "")]
        {
            ip(&format!("route add blackhole {network}"));
            // Also an address of this node's own subnet that no pod has.
            for to in [peer, here].into_iter().filter(|to| !to.is_empty()) {
                let family = Family::of(to.parse().unwrap());
                let from = Place::Pod.address(family);
                fixture.in_place(Place::Pod, || {
                    let pod = std::net::UdpSocket::bind((from, 0)).unwrap();
                    let to: std::net::IpAddr = to.parse().unwrap();
                    pod.send_to(b"is anybody there", (to, 9)).unwrap();
                });
            }
        }
        running.until(|status| status.dropped.unencrypted.packets == 2).await;
        // Packets that pass are not counted.
        assert_passes(&fixture, true);
        let checks = running.status.borrow().checks;
        let status = running.until(|status| status.checks > checks + 1).await;
        assert_eq!(status.dropped.unencrypted.packets, 2, "{status:?}");
        assert_eq!(status.repairs, 0, "{status:?}");
        assert!(status.dropped.unencrypted.last.is_some());
    });
}
