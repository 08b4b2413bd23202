//! Packets between namespaces show which packets the rules masquerade and accept, for each mode and
//! family.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::fixture::tools::{MARKED_PORT, nft};
use crate::fixture::{ALL, Fixture, Kind, Place, Running, SourcePort, rules_of};
use flannel_core::address::{Dual, Family};
use flannel_firewall::{Masquerade, PortRange, RuleOptions, Rules};

/// A period so long that no check in a test is periodic.
const RESYNC: Duration = Duration::from_secs(3600);
const LONG: Duration = Duration::from_secs(20);
/// The time in which a packet must not arrive.
const SHORT: Duration = Duration::from_millis(300);

in_every_mode!(
    packets_are_masqueraded_as_the_rules_say,
    changed_desired_rules_are_put_in_place,
    pods_are_forwarded_despite_a_drop_policy,
    a_change_has_no_moment_without_rules,
    source_ports_are_random_if_that_is_desired,
    options_of_masquerading_change_what_leaves_the_pod_network,
    ports_of_masqueraded_packets_are_in_the_chosen_range,
);

async fn packets_are_masqueraded_as_the_rules_say(fixture: Fixture, kind: Kind) {
    fixture.tools.make_foreign();
    let before = fixture.tools.foreign_seen();
    for family in Family::BOTH {
        let bare = fixture.seen(family, Place::Pod, Place::Outside);
        assert_eq!(bare, Some(Place::Pod.address(family)), "without rules no masquerading");
    }
    let _running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
        // The node connects to another node's pod from an address that has no route back.
        let source = Place::Outside.node(family);
        let host_to_peer = fixture.seen_of_node(family, source, Place::Peer);
        assert_eq!(host_to_peer, Some(Place::Peer.node(family)), "{family}");
        assert_eq!(fixture.seen_of_node(family, source, Place::Pod), Some(source), "{family}");
        let marked = fixture.seen_at(family, Place::Pod, Place::Outside, MARKED_PORT, LONG);
        assert_eq!(
            marked,
            Some(Place::Pod.address(family)),
            "{family}: flannel does not masquerade packets with the mark of kube-proxy"
        );
        let source = Place::Pod.node(family);
        assert_eq!(
            fixture.multicast_seen(family),
            Some(source),
            "{family}: multicast is not masqueraded"
        );
        let unicast = fixture.seen_of_node(family, source, Place::Outside);
        assert_eq!(
            unicast,
            Some(Place::Outside.node(family)),
            "{family}: unicast from the same address is masqueraded"
        );
    }
    assert_eq!(fixture.tools.foreign_seen(), before);
}

async fn changed_desired_rules_are_put_in_place(fixture: Fixture, kind: Kind) {
    let nothing = Vec::<String>::new();
    let mut running = Running::start(&fixture, kind, Rules::default(), RESYNC).await;
    assert_eq!(fixture.tools.ours_seen(), nothing, "no rules are desired");
    running.want(rules_of(Place::Pod, ALL)).await;
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
    // The node and the peer exchange their subnets.
    running.want(rules_of(Place::Peer, ALL)).await;
    for family in Family::BOTH {
        let see = |to| fixture.seen(family, Place::Outside, to);
        assert_eq!(see(Place::Pod), Some(Place::Pod.node(family)), "{family}");
        assert_eq!(see(Place::Peer), Some(Place::Outside.address(family)), "{family}");
    }
    running.want(rules_of(Place::Pod, RuleOptions { masquerade: Dual::default(), ..ALL })).await;
    for family in Family::BOTH {
        let seen = fixture.seen(family, Place::Pod, Place::Outside);
        assert_eq!(seen, Some(Place::Pod.address(family)), "{family}");
    }
    running.want(Rules::default()).await;
    assert_eq!(fixture.tools.ours_seen(), nothing);
    running.assert_writes(4, 0);
}

async fn pods_are_forwarded_despite_a_drop_policy(fixture: Fixture, kind: Kind) {
    // In nftables the drop must be in flannel's table, because a rule cannot override a drop in
    // another table.
    let refuse = |family| {
        if kind == Kind::Nftables {
            let table = if family == Family::V4 { "ip flannel-ipv4" } else { "ip6 flannel-ipv6" };
            nft(&format!("add rule {table} forward drop"));
        } else {
            fixture.tools.iptables(kind, family, "-P FORWARD DROP");
        }
    };
    if kind != Kind::Nftables {
        for family in Family::BOTH {
            refuse(family);
            assert_forwarded(&fixture, family, [false; 3]);
        }
    }
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    for family in Family::BOTH {
        // The firewall does not run until this thread yields.
        refuse(family);
        assert_forwarded(&fixture, family, [true, true, false]);
    }
    if kind != Kind::Nftables {
        running.want(rules_of(Place::Pod, RuleOptions { forward: false, ..ALL })).await;
        for family in Family::BOTH {
            assert_forwarded(&fixture, family, [false; 3]);
        }
    }
}

/// Masquerading keeps the source port if it is free, unless random ports are desired.
async fn source_ports_are_random_if_that_is_desired(fixture: Fixture, kind: Kind) {
    const CALLS: usize = 5;
    let mut running = Running::start(&fixture, kind, Rules::default(), RESYNC).await;
    for fully_random in [false, true, false] {
        let masquerade = Masquerade::both(fully_random);
        running.want(rules_of(Place::Pod, RuleOptions { masquerade, ..ALL })).await;
        for family in Family::BOTH {
            let calls: Vec<_> = (0..CALLS).map(|_| fixture.source_port(family)).collect();
            let kept = calls.iter().filter(|port| port.own == port.seen).count();
            // A random port equals the original one by chance, but not every time.
            assert_eq!(kept == CALLS, !fully_random, "{family}, random {fully_random}: {calls:?}");
            let seen = match kind {
                Kind::Nftables => nft("list ruleset"),
                _ => fixture.tools.save(kind, family),
            };
            assert_eq!(seen.contains("random"), fully_random, "{family}: {seen}");
        }
    }
}

/// The rules with options of masquerading for each family.
fn masqueraded_by(options: impl Fn(Family) -> Masquerade) -> Rules {
    let masquerade = Dual::from_fn(|family| Some(options(family)));
    rules_of(Place::Pod, RuleOptions { masquerade, ..ALL })
}

async fn options_of_masquerading_change_what_leaves_the_pod_network(fixture: Fixture, kind: Kind) {
    use Place::{Other, Outside, Peer, Pod};
    let mut running = Running::start(&fixture, kind, rules_of(Pod, ALL), RESYNC).await;
    // The device to each place.
    let device = |place: Place| vec![format!("to{}", place as usize).parse().unwrap()];
    let plain = Masquerade::default;
    let excluding = |family| Masquerade { exclude: vec![Outside.prefix(family)], ..plain() };
    let by_device = |_| Masquerade { devices: device(Other), ..plain() };
    let with_source = |family| Masquerade { source: Some(Other.node(family)), ..plain() };
    let as_itself = |family| Pod.address(family);
    type Seen<'a> = &'a dyn Fn(Family) -> IpAddr;
    let other_node: Seen<'_> = &|family| Other.node(family);
    let cases: [(&str, Rules, Seen<'_>, Seen<'_>); 3] = [
        ("excluded", masqueraded_by(excluding), &as_itself, other_node),
        ("by device", masqueraded_by(by_device), &as_itself, other_node),
        ("source", masqueraded_by(with_source), other_node, other_node),
    ];
    let mut changes = 1;
    for (name, rules, outside, other) in cases {
        running.want(rules.clone()).await;
        changes += 1;
        for family in Family::BOTH {
            let seen = |from, to| fixture.seen(family, from, to);
            assert_eq!(seen(Pod, Outside), Some(outside(family)), "{name}, {family}: outside");
            assert_eq!(seen(Pod, Other), Some(other(family)), "{name}, {family}: other");
            assert_eq!(seen(Pod, Peer), Some(Pod.address(family)), "{name}, {family}: pods");
            // A pod of another node must answer through this node.
            let seen = seen(Outside, Peer);
            assert_eq!(seen, Some(Peer.node(family)), "{name}, {family}: to another node's pods");
        }
        // The rules of an earlier run are the rules that are written now.
        running.assert_writes(changes, 0);
        running.stop().await;
        running = Running::start(&fixture, kind, rules, RESYNC).await;
        running.assert_writes(0, 0);
        changes = 0;
    }
    // One family alone.
    let masquerade = Dual { v4: Some(plain()), v6: None };
    running.want(rules_of(Pod, RuleOptions { masquerade, ..ALL })).await;
    fixture.assert_masqueraded(Family::V4);
    assert_eq!(fixture.seen(Family::V6, Pod, Outside), Some(Pod.address(Family::V6)));
}

async fn ports_of_masqueraded_packets_are_in_the_chosen_range(fixture: Fixture, kind: Kind) {
    let ports = PortRange::new(4000, 4007);
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    for (with_source, fully_random) in [(false, true), (true, true), (true, false), (false, false)]
    {
        let source = |family| with_source.then(|| Place::Other.node(family));
        let options = |family| Masquerade {
            ports,
            source: source(family),
            ..Masquerade::plain(fully_random)
        };
        let rules = masqueraded_by(options);
        running.want(rules.clone()).await;
        for family in Family::BOTH {
            let SourcePort { own, seen } = fixture.source_port(family);
            assert!((4000..=4007).contains(&seen), "{family}, random {fully_random}: {own} {seen}");
            let seen = fixture.seen(family, Place::Pod, Place::Outside);
            let node = source(family).unwrap_or_else(|| Place::Outside.node(family));
            assert_eq!(seen, Some(node), "{family}");
        }
        running.stop().await;
        running = Running::start(&fixture, kind, rules, RESYNC).await;
        running.assert_writes(0, 0);
    }
}

async fn a_change_has_no_moment_without_rules(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    let fixture = Arc::new(fixture);
    let stop = Arc::new(AtomicBool::new(false));
    let calls = Dual::from_fn(|_| Some(Arc::new(AtomicUsize::new(0))));
    let callers = Family::BOTH.map(|family| {
        let fixture = fixture.clone();
        let stop = stop.clone();
        let calls = calls[family].clone().unwrap();
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let seen = fixture.seen(family, Place::Pod, Place::Outside);
                assert_eq!(seen, Some(Place::Outside.node(family)), "{family}: {calls:?}");
                calls.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let made = || calls.iter().map(|(_, calls)| calls.load(Ordering::Relaxed)).collect::<Vec<_>>();
    for n in 0..30 {
        running.want(rules_of([Place::Peer, Place::Pod][n % 2], ALL)).await;
        // Connections are made before and after each change, on slow machines too.
        let before = made();
        running
            .until(|_| {
                made().iter().zip(&before).all(|(now, before)| now > before)
                    || callers.iter().any(|caller| caller.is_finished())
            })
            .await;
    }
    stop.store(true, Ordering::Relaxed);
    for caller in callers {
        caller.join().unwrap();
    }
}

/// `nft` shows Go flannel's tables, except for the kube-proxy mark (a bit, not the whole mark) and
/// the fourth rule (the rule of iptables).
#[test]
fn nft_shows_the_tables_of_go_flannel() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let mut running =
            Running::start(&fixture, Kind::Nftables, rules_of(Place::Pod, ALL), RESYNC).await;
        for (family, keyword, network, own, multicast) in [
            ("ipv4", "ip", "10.1.0.0/16", "10.1.7.0/24", "224.0.0.0/4"),
            ("ipv6", "ip6", "fd00:1::/48", "fd00:1:0:7::/64", "ff00::/8"),
        ] {
            let want = format!(
                "table {keyword} flannel-{family} {{
                comment \"rules for flannel-{family}\"
                chain postrtg {{
                comment \"chain to manage traffic masquerading by flannel\"
                type nat hook postrouting priority srcnat; policy accept;
                meta mark & 0x00004000 == 0x00004000 return
                {keyword} saddr {own} {keyword} daddr {network} return
                {keyword} saddr {network} {keyword} daddr {own} return
                {keyword} saddr != {network} {keyword} daddr {own} return
                {keyword} saddr {network} {keyword} daddr != {multicast} masquerade fully-random
                {keyword} saddr != {network} {keyword} daddr {network} masquerade fully-random
                }}
                chain forward {{
                comment \"chain to accept flannel traffic\"
                type filter hook forward priority filter; policy accept;
                {keyword} saddr {network} accept
                {keyword} daddr {network} accept
                }}
                }}"
            );
            let shown = nft(&format!("list table {keyword} flannel-{family}"));
            assert_eq!(
                shown.split_whitespace().collect::<Vec<_>>(),
                want.split_whitespace().collect::<Vec<_>>(),
                "{shown}"
            );
        }
        let masquerade = Masquerade::both(false);
        running.want(rules_of(Place::Pod, RuleOptions { masquerade, ..ALL })).await;
        let shown = nft("list ruleset");
        assert!(shown.contains("masquerade") && !shown.contains("random"), "{shown}");
    });
}

/// Checks which packets pass: from pod to outside, from peer to pod, from outside to other.
fn assert_forwarded(fixture: &Fixture, family: Family, expected: [bool; 3]) {
    let ways =
        [(Place::Pod, Place::Outside), (Place::Peer, Place::Pod), (Place::Outside, Place::Other)];
    for ((from, to), expected) in ways.into_iter().zip(expected) {
        let patience = if expected { LONG } else { SHORT };
        let passed = fixture.seen_at(family, from, to, 0, patience).is_some();
        assert_eq!(passed, expected, "{family} {from:?} to {to:?}");
    }
}
