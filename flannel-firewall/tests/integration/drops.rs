//! `forward_drops` finds the policies that the real tools create.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};
use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_firewall::{LegacyMemory, forward_drops};

in_every_mode!(a_policy_is_found_in_every_table_and_accepted_pods_are_known);

async fn a_policy_is_found_in_every_table_and_accepted_pods_are_known(
    fixture: Fixture,
    kind: Kind,
) {
    let networks =
        ["10.1.0.0/16", "fd00:1::/48"].map(|n| n.parse::<Subnet>().unwrap()).into_iter().collect();
    let drops = async || {
        forward_drops(&fixture.tools.programs(), &networks, &LegacyMemory::default()).await.found
    };
    let nft = |command: &str| {
        assert!(Command::new("nft").arg(command).status().unwrap().success(), "{command}");
    };
    assert_eq!(drops().await, []);
    let made = Command::new("nft")
        .arg(
            "add table inet guard; add chain inet guard gate { type filter hook forward priority \
            5; policy drop; }",
        )
        .status();
    assert!(made.unwrap().success());
    let texts = |drops: Vec<flannel_firewall::ForwardDrop>| -> Vec<String> {
        drops.iter().map(|d| format!("{} {d} {}", d.family, d.accepts_pods)).collect()
    };
    let guard = Family::BOTH.map(|family| format!("{family} chain gate of table inet guard false"));
    assert_eq!(texts(drops().await), guard);
    // A rule counts only if it accepts the whole pod network.
    for (rule, helps) in [
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
        let seen: Vec<bool> = drops().await.iter().map(|drop| drop.accepts_pods).collect();
        assert_eq!(seen, helps, "{rule}");
    }
    nft("flush chain inet guard gate");
    assert_eq!(texts(drops().await), guard);
    nft("add rule inet guard gate meta nfproto ipv6 accept");
    let seen: Vec<bool> = drops().await.iter().map(|drop| drop.accepts_pods).collect();
    assert_eq!(seen, [false, true]);
    nft("add rule inet guard gate accept");
    assert!(drops().await.iter().all(|drop| drop.accepts_pods));
    assert!(
        Command::new("nft").args(["delete", "table", "inet", "guard"]).status().unwrap().success()
    );
    let where_rules_are = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    for family in Family::BOTH {
        fixture.tools.iptables(where_rules_are, family, "-P FORWARD DROP");
    }
    let expected = |helps: bool| -> Vec<String> {
        let suffix = if kind == Kind::IptablesLegacy { " (iptables-legacy)" } else { "" };
        [(Family::V4, "ip"), (Family::V6, "ip6")]
            .map(|(family, word)| {
                format!("{family} chain FORWARD of table {word} filter{suffix} {helps}")
            })
            .into()
    };
    assert_eq!(texts(drops().await), expected(false));
    caches_the_output_of_a_process(&fixture, kind, &networks).await;
    for (family, network) in [(Family::V4, "10.1.0.0/16"), (Family::V6, "fd00:1::/48")] {
        for side in ["-s", "-d"] {
            fixture.tools.iptables(
                where_rules_are,
                family,
                &format!("-A FORWARD {side} {network} -j ACCEPT"),
            );
        }
    }
    assert_eq!(texts(drops().await), expected(true));
    for family in Family::BOTH {
        fixture.tools.iptables(where_rules_are, family, "-F FORWARD");
    }
    assert_eq!(texts(drops().await), expected(false));
    let running =
        Running::start(&fixture, kind, rules_of(Place::Pod, ALL), Duration::from_secs(3600)).await;
    // Rules in a separate table do not override the policy of another table.
    assert_eq!(texts(drops().await), expected(kind != Kind::Nftables));
    running.stop().await;
}

#[test]
fn readable_tables_are_reported_even_if_others_are_unreadable() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::set();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            fixture.tools.iptables(kind, Family::V4, "-P FORWARD DROP");
        }
        std::fs::remove_file(fixture.tools.path("iptables-legacy-save")).unwrap();
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let seen =
            forward_drops(&fixture.tools.programs(), &networks, &LegacyMemory::default()).await;
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
async fn caches_the_output_of_a_process(
    fixture: &Fixture,
    kind: Kind,
    networks: &flannel_core::address::Dual<Subnet>,
) {
    let where_rules_are = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    let policy = |word: &str| {
        for family in Family::BOTH {
            fixture.tools.iptables(where_rules_are, family, &format!("-P FORWARD {word}"));
        }
    };
    let memory = LegacyMemory::new(Duration::from_secs(3600));
    let programs = fixture.tools.programs();
    let drops = async || forward_drops(&programs, networks, &memory).await.found;
    let first = drops().await;
    assert!(first.len() == 2 && first.iter().all(|drop| drop.age == Duration::ZERO), "{first:?}");
    policy("ACCEPT");
    let legacy = kind == Kind::IptablesLegacy;
    let second = drops().await;
    assert_eq!(second.len(), if legacy { 2 } else { 0 }, "only the output of a process is cached");
    assert!(second.iter().all(|drop| drop.age > Duration::ZERO));
    let mut old = second.first().cloned();
    old.iter_mut().for_each(|drop| drop.age = Duration::from_secs(8));
    assert_eq!(
        old.map(|drop| drop.to_string()).as_deref(),
        legacy.then_some("chain FORWARD of table ip filter (iptables-legacy, 8 s ago)")
    );
    // `forget` does not drop output younger than a second.
    let start = Instant::now();
    while !drops().await.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30));
        memory.forget().await;
    }
    policy("DROP");
    assert_eq!(drops().await.len(), if legacy { 0 } else { 2 });
}
