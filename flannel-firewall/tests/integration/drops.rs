//! `forward_drops` finds the policies that the real tools create.

use std::time::{Duration, Instant};

use crate::fixture::tools::nft;
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};
use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_firewall::{ForwardDrop, LegacyMemory, forward_drops};

in_every_mode!(a_policy_of_iptables_is_found_and_accepted_pods_are_known);

fn networks() -> Dual<Subnet> {
    Dual { v4: "10.1.0.0/16".parse().ok(), v6: "fd00:1::/48".parse().ok() }
}

async fn drops(fixture: &Fixture) -> Vec<ForwardDrop> {
    forward_drops(&fixture.tools.programs(), &networks(), &LegacyMemory::default()).await.found
}

/// Whether each of the chains accepts pods.
fn accepts_pods(drops: &[ForwardDrop]) -> Vec<bool> {
    drops.iter().map(|drop| drop.accepts_pods).collect()
}

fn texts(drops: &[ForwardDrop]) -> Vec<String> {
    drops.iter().map(|drop| format!("{} {drop} {}", drop.family, drop.accepts_pods)).collect()
}

#[test]
fn a_policy_of_nftables_is_found_and_accepted_pods_are_known() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        assert_eq!(drops(&fixture).await, []);
        nft("add table inet guard");
        nft("add chain inet guard gate { type filter hook forward priority 5; policy drop; }");
        let guard =
            Family::BOTH.map(|family| format!("{family} chain gate of table inet guard false"));
        assert_eq!(texts(&drops(&fixture).await), guard);
        // A rule counts only if it accepts the whole pod network.
        for (rule, accepts) in [
            ("meta l4proto 2 accept", [false, false]),
            ("meta l4proto 10 accept", [false, false]),
            ("ip saddr 10.1.0.0/16 tcp dport 80 accept", [false, false]),
            ("ip saddr 10.1.0.0/24 accept", [false, false]),
            ("ip saddr 10.1.0.0/16 drop", [false, false]),
            ("ip saddr 10.1.0.0/16 accept", [false, false]),
            ("ip daddr 10.0.0.0/13 counter accept", [true, false]),
            ("ip6 saddr fd00:1::/48 accept", [true, false]),
            ("ip6 daddr fd00:1::/47 accept", [true, true]),
        ] {
            nft(&format!("add rule inet guard gate {rule}"));
            assert_eq!(accepts_pods(&drops(&fixture).await), accepts, "{rule}");
        }
        nft("flush chain inet guard gate");
        assert_eq!(texts(&drops(&fixture).await), guard);
        nft("add rule inet guard gate meta nfproto ipv6 accept");
        assert_eq!(accepts_pods(&drops(&fixture).await), [false, true]);
        nft("add rule inet guard gate accept");
        assert_eq!(accepts_pods(&drops(&fixture).await), [true, true]);
    });
}

async fn a_policy_of_iptables_is_found_and_accepted_pods_are_known(fixture: Fixture, kind: Kind) {
    assert_eq!(drops(&fixture).await, []);
    let where_rules_are = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    for family in Family::BOTH {
        fixture.tools.iptables(where_rules_are, family, "-P FORWARD DROP");
    }
    let expected = |accepts: bool| {
        let suffix = if kind == Kind::IptablesLegacy { " (iptables-legacy)" } else { "" };
        [
            format!("IPv4 chain FORWARD of table ip filter{suffix} {accepts}"),
            format!("IPv6 chain FORWARD of table ip6 filter{suffix} {accepts}"),
        ]
    };
    assert_eq!(texts(&drops(&fixture).await), expected(false));
    caches_the_output_of_a_process(&fixture, kind).await;
    for (family, network) in [(Family::V4, "10.1.0.0/16"), (Family::V6, "fd00:1::/48")] {
        for side in ["-s", "-d"] {
            fixture.tools.iptables(
                where_rules_are,
                family,
                &format!("-A FORWARD {side} {network} -j ACCEPT"),
            );
        }
    }
    assert_eq!(texts(&drops(&fixture).await), expected(true));
    for family in Family::BOTH {
        fixture.tools.iptables(where_rules_are, family, "-F FORWARD");
    }
    assert_eq!(texts(&drops(&fixture).await), expected(false));
    let running =
        Running::start(&fixture, kind, rules_of(Place::Pod, ALL), Duration::from_secs(3600)).await;
    // Rules in a separate table do not override the policy of another table.
    assert_eq!(texts(&drops(&fixture).await), expected(kind != Kind::Nftables));
    running.stop().await;
}

#[test]
fn readable_tables_are_reported_even_if_others_are_unreadable() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            fixture.tools.iptables(kind, Family::V4, "-P FORWARD DROP");
        }
        std::fs::remove_file(fixture.tools.path("iptables-legacy-save")).unwrap();
        let only_v4 = Dual { v6: None, ..networks() };
        let seen =
            forward_drops(&fixture.tools.programs(), &only_v4, &LegacyMemory::default()).await;
        assert_eq!(seen.found.len(), 1, "{seen:?}");
        assert!(!seen.found[0].legacy, "{seen:?}");
        let unread: Vec<_> = seen.unread.iter().map(ToString::to_string).collect();
        assert!(
            unread.len() == 1 && unread[0].starts_with("iptables-legacy-save is not in"),
            "{unread:?}"
        );
    });
}

/// The output of a program is cached. The policies of all chains are DROP, before and after.
async fn caches_the_output_of_a_process(fixture: &Fixture, kind: Kind) {
    let where_rules_are = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    let policy = |word: &str| {
        for family in Family::BOTH {
            fixture.tools.iptables(where_rules_are, family, &format!("-P FORWARD {word}"));
        }
    };
    let memory = LegacyMemory::new(Duration::from_secs(3600));
    let programs = fixture.tools.programs();
    let drops = async || forward_drops(&programs, &networks(), &memory).await.found;
    let first = drops().await;
    assert!(first.len() == 2 && first.iter().all(|drop| drop.age == Duration::ZERO), "{first:?}");
    policy("ACCEPT");
    let legacy = kind == Kind::IptablesLegacy;
    let second = drops().await;
    assert_eq!(second.len(), if legacy { 2 } else { 0 }, "only the output of a process is cached");
    assert!(second.iter().all(|drop| drop.age > Duration::ZERO));
    if legacy {
        let mut old = second[0].clone();
        old.age = Duration::from_secs(8);
        let text = "chain FORWARD of table ip filter (iptables-legacy, 8 s ago)";
        assert_eq!(old.to_string(), text);
    }
    // `forget` does not drop output younger than a second.
    let start = Instant::now();
    while !drops().await.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30));
        memory.forget().await;
    }
    policy("DROP");
    assert_eq!(drops().await.len(), if legacy { 0 } else { 2 });
}
