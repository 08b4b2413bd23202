//! Changes by other programs are repaired, counted and logged. Packets show that the rules work.

use std::time::Duration;

use crate::fixture::tools::{nft, reorder_nft};
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};
use flannel_core::address::Family;
use flannel_firewall::{Deviation, Fault};

in_every_mode!(
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
    }
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
}
