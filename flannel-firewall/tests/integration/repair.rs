//! Changes by other programs are repaired, counted and logged. Packets show that the rules work.

use std::time::Duration;

use crate::fixture::tools::{nft, reorder_nft};
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};
use flannel_core::address::Family;
use flannel_firewall::{Contested, Deviation, Fault, RuleOptions};

in_every_mode!(
    a_jump_is_between_policies_and_a_rule_that_rejects_everything,
    changes_by_other_programs_are_repaired,
    another_order_is_repaired,
    lasting_changes_by_another_program_are_repaired_and_counted
);

/// A period so long that no repair depends on it.
const RESYNC: Duration = Duration::from_secs(3600);

/// A change by another program, and the expected deviation: a part of its object, and its fault.
type Sabotage = (&'static str, &'static str, Fault);

const NFTABLES: [Sabotage; 12] = [
    ("flush ruleset", "table TABLE", Fault::Missing),
    ("delete table TABLE", "table TABLE", Fault::Missing),
    ("flush table TABLE", "chain postrtg", Fault::Different),
    ("flush chain TABLE postrtg", "chain postrtg", Fault::Different),
    ("flush chain TABLE forward; delete chain TABLE forward", "chain forward", Fault::Missing),
    ("insert rule TABLE postrtg return", "chain postrtg", Fault::Different),
    ("add rule TABLE postrtg return", "chain postrtg", Fault::Different),
    ("add rule TABLE forward FAM saddr NETWORK accept", "chain forward", Fault::Different),
    ("add chain TABLE forward { policy drop; }", "chain forward", Fault::Different),
    ("add table TABLE { flags dormant; }", "table TABLE", Fault::Different),
    (
        "add chain TABLE guest { type filter hook forward priority 9; policy drop; }",
        "table TABLE",
        Fault::Different,
    ),
    (
        "delete table TABLE; table TABLE { chain postrtg { type nat hook postrouting priority \
         100; FAM saddr NETWORK \
         masquerade fully-random; }; }",
        "chain postrtg",
        Fault::Different,
    ),
];

const IPTABLES: [Sabotage; 9] = [
    ("-t nat -F", "chain FLANNEL-POSTRTG", Fault::Different),
    ("-t nat -F FLANNEL-POSTRTG", "chain FLANNEL-POSTRTG", Fault::Different),
    ("-F FORWARD", "jump from FORWARD to FLANNEL-FWD", Fault::Missing),
    ("-t nat -I FLANNEL-POSTRTG -j RETURN", "chain FLANNEL-POSTRTG", Fault::Different),
    ("-t nat -D FLANNEL-POSTRTG 5", "chain FLANNEL-POSTRTG", Fault::Different),
    (
        "-t nat -R FLANNEL-POSTRTG 3 -s NETWORK -m comment --comment masq -j MASQUERADE",
        "chain FLANNEL-POSTRTG",
        Fault::Different,
    ),
    ("-A FLANNEL-FWD -s NETWORK -j ACCEPT", "chain FLANNEL-FWD", Fault::Different),
    (
        "-t nat -A POSTROUTING -j FLANNEL-POSTRTG",
        "jump from POSTROUTING to FLANNEL-POSTRTG",
        Fault::Repeated,
    ),
    (
        "-t nat -I POSTROUTING -s 203.0.113.0 -j FLANNEL-POSTRTG",
        "jump from POSTROUTING",
        Fault::Repeated,
    ),
];

fn words(text: &str, family: Family) -> String {
    let (keyword, table, network, host) = match family {
        Family::V4 => ("ip", "ip flannel-ipv4", "10.1.0.0/16", "203.0.113.0"),
        Family::V6 => ("ip6", "ip6 flannel-ipv6", "fd00:1::/48", "2001:db8:9::"),
    };
    text.replace("TABLE", table)
        .replace("FAM", keyword)
        .replace("NETWORK", network)
        .replace("203.0.113.0", host)
}

async fn changes_by_other_programs_are_repaired(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    let sabotages = if kind == Kind::Nftables { &NFTABLES[..] } else { &IPTABLES[..] };
    for (n, (what, object, fault)) in sabotages.iter().enumerate() {
        for (m, family) in Family::BOTH.into_iter().enumerate() {
            let before = running.status.borrow().repairs;
            assert_eq!(before, (2 * n + m) as u64);
            let what = words(what, family);
            if kind == Kind::Nftables {
                nft(&what);
            } else {
                fixture.tools.iptables(kind, family, &what);
            }
            let status = running.until(|status| status.repairs > before).await;
            let found = status.last_repair.unwrap().found;
            let object = words(object, family);
            assert_has(&found, &object, *fault, &what);
            for family in Family::BOTH {
                fixture.assert_masqueraded(family);
            }
        }
    }
    let status = running.status.borrow().clone();
    assert_eq!(status.changes, 1, "{status:?}");
    assert!(status.failure.is_none(), "{status:?}");
}

/// Checks that a fault of an object whose name contains `object` was found.
fn assert_has(found: &[Deviation], object: &str, fault: Fault, cause: &str) {
    assert!(
        found.iter().any(|it| it.object.contains(object) && it.fault == fault),
        "{cause}: {found:?}"
    );
}

/// In another order, the same rules would masquerade packets between pods.
async fn another_order_is_repaired(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    for family in Family::BOTH {
        let before = running.status.borrow().repairs;
        let object = if kind == Kind::Nftables {
            let chain = words("TABLE postrtg", family);
            reorder_nft(&chain);
            "chain postrtg"
        } else {
            fixture.tools.reorder_iptables(kind, family, "FLANNEL-POSTRTG");
            "chain FLANNEL-POSTRTG"
        };
        let status = running.until(|status| status.repairs > before).await;
        let found = status.last_repair.unwrap().found;
        assert_has(&found, object, Fault::Different, "another order");
        fixture.assert_masqueraded(family);
    }
}

async fn lasting_changes_by_another_program_are_repaired_and_counted(fixture: Fixture, kind: Kind) {
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    for n in 1..=10 {
        // Several changes in a row, of flannel's rules and of foreign ones.
        for _ in 0..5 {
            if kind == Kind::Nftables {
                nft("flush ruleset; table ip noise { chain c { counter; }; }");
            } else {
                fixture.tools.iptables(kind, Family::V4, "-t nat -F");
                fixture.tools.iptables(
                    kind,
                    Family::V4,
                    "-t nat -A POSTROUTING -o nowhere -j MASQUERADE",
                );
            }
        }
        running.until(|status| status.repairs >= n).await;
        // A fight is no longer a repair of an accident.
        let is_fight = running.status.borrow().contest == Some(Contested::Rules);
        assert_eq!(is_fight, n >= 6, "{n} repairs: {:?}", running.status.borrow());
    }
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
}

/// The order of the rules of `FORWARD`, by their targets.
fn order(fixture: &Fixture, kind: Kind, family: Family) -> Vec<String> {
    let rules = fixture.tools.iptables(kind, family, "-S FORWARD");
    let target = |rule: &str| {
        let (_, target) = rule.split_once("-j ")?;
        target.split(' ').next().map(str::to_owned)
    };
    rules.lines().filter_map(target).collect()
}

async fn a_jump_is_between_policies_and_a_rule_that_rejects_everything(
    fixture: Fixture,
    kind: Kind,
) {
    // In nftables mode the rules of iptables have their own tables.
    if kind == Kind::Nftables {
        return nftables_rules_leave_nothing_in_iptables(&fixture).await;
    }
    let iptables = |args: &str| {
        for family in Family::BOTH {
            let args = words(args, family);
            fixture.tools.iptables(kind, family, &args);
        }
    };
    let is_ordered = |expected: &[&str]| {
        for family in Family::BOTH {
            assert_eq!(order(&fixture, kind, family), expected, "{family}");
        }
    };
    iptables("-A FORWARD -j REJECT");
    let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    is_ordered(&["FLANNEL-FWD", "REJECT"]);
    for family in Family::BOTH {
        assert!(fixture.seen(family, Place::Pod, Place::Peer).is_some());
    }
    // A jump that is lost is restored behind a policy that was added after it.
    running.stop().await;
    iptables("-N MYPOLICY");
    iptables("-A MYPOLICY -s NETWORK -d NETWORK -j DROP");
    iptables("-I FORWARD 2 -j MYPOLICY");
    iptables("-D FORWARD 1");
    running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    is_ordered(&["MYPOLICY", "FLANNEL-FWD", "REJECT"]);
    for family in Family::BOTH {
        let within = Duration::from_millis(300);
        let seen = fixture.seen_at(family, Place::Pod, Place::Peer, 0, within);
        assert_eq!(seen, None, "the policy sees the packet first");
    }
    // A rule that ends the chain later.
    let repairs = running.status.borrow().repairs;
    iptables("-I FORWARD -j DROP");
    running.until(|status| status.repairs > repairs).await;
    for family in Family::BOTH {
        let first = || order(&fixture, kind, family)[0] == "FLANNEL-FWD";
        test_support::eventually_async(Duration::from_secs(20), async || first(), String::new)
            .await;
    }
    let without = RuleOptions { forward: false, ..ALL };
    running.want(rules_of(Place::Pod, without)).await;
    is_ordered(&["DROP", "MYPOLICY", "REJECT"]);
}

/// A program that insists on a rule that no packet passes causes few repairs, and is reported.
#[test]
fn a_contest_for_a_place_that_packets_reach_is_reported() {
    flannel_netlink::testing::in_netns_async(|| async {
        let fixture = Fixture::new();
        let kind = Kind::IptablesNft;
        let mut running = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
        for repairs in 1..=3 {
            assert_eq!(running.status.borrow().contest, None);
            fixture.tools.iptables(kind, Family::V6, "-I FORWARD -j DROP");
            running.until(|status| status.repairs >= repairs).await;
        }
        let place = Some(Contested::Place(Fault::Unreached));
        running.until(|status| status.contest == place).await;
    });
}

async fn nftables_rules_leave_nothing_in_iptables(fixture: &Fixture) {
    fixture.tools.iptables(Kind::IptablesNft, Family::V4, "-A FORWARD -j REJECT");
    let running = Running::start(fixture, Kind::Nftables, rules_of(Place::Pod, ALL), RESYNC).await;
    assert_eq!(order(fixture, Kind::IptablesNft, Family::V4), ["REJECT"]);
    running.stop().await;
}
