//! Routes that use nexthop objects.

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::Outcome;
use flannel_core::object::{Change, Key, Nexthop, Object, Route, Via};
use flannel_netlink::testing::{Netns, in_netns, ip};
use flannel_route::{cleanup, ready_for_go};
use libc::EBUSY;

use super::{Host, in_both_families, up};

/// Another program can give our nexthop object a gateway of the other family.
#[test]
fn a_route_with_a_gateway_of_the_other_family_is_ours_if_its_nexthop_object_is() {
    in_netns(|| {
        let host = Host::new(Family::V4);
        let id = host.id(9);
        ip(&format!("-6 nexthop add id {id} via 2001:db8::9 dev up0 protocol 241"));
        ip(&format!("route add {} nhid {id} proto 241", host.dst()));
        let route = Route { dst: host.dst(), via: Via::Nexthop(id), mtu: None };
        let found = host.kernel.snapshot(&host.footprint()).unwrap();
        assert_eq!(found.get(&Key::Route(host.dst())), Some(&route.into()));
    });
}

/// The sequence of changes that repairs a nexthop object, with different existing routes. IPv4
/// only.
#[test]
fn a_route_that_uses_its_gateway_for_a_moment_ends_on_its_nexthop_object() {
    in_netns(|| {
        for there in 0..2 {
            for foreign in
                ["", "route prepend DST via FIVE dev up0", "route append DST via FIVE dev up0"]
            {
                Netns::new().unwrap().run(|| step_aside(&Host::new(Family::V4), there, foreign));
            }
        }
    });
}

fn step_aside(host: &Host, there: usize, foreign: &str) {
    let id = host.id(7);
    let gateway = host.gateway(7);
    let nexthop = Nexthop { id, link: up(), gateway, onlink: true };
    let via = Via::Gateway { gateway, link: up(), onlink: true };
    let plain = Route { dst: host.dst(), via, mtu: None };
    let by_id = Route { via: Via::Nexthop(id), ..plain };
    host.apply(&Change::Put(nexthop.into()));
    host.apply(&Change::Put([plain, by_id][there].into()));
    if !foreign.is_empty() {
        host.foreign(foreign);
    }
    let changes = [plain.into(), nexthop.into(), by_id.into()].map(Change::Put);
    let outcomes = host.kernel.apply(&host.footprint(), &changes);
    assert_eq!(outcomes, vec![Outcome::Done; 3], "{there} {foreign}");
    let shown = ip(&format!("-N route show {}", host.dst()));
    assert_eq!(shown.matches("proto 241").count(), 1, "{there} {foreign}: {shown}");
    let found = host.kernel.snapshot(&host.footprint()).unwrap();
    assert_eq!(
        found.get(&Key::Route(host.dst())),
        Some(&by_id.into()),
        "{there} {foreign}: {shown}"
    );
}

#[test]
fn routes_survive_when_a_group_is_replaced_by_their_nexthop() {
    in_netns(|| {
        in_both_families(|host| {
            let id = host.id(7);
            let route = |n: u8| {
                let dst = match host.family {
                    Family::V4 => format!("10.1.{n}.0/24"),
                    Family::V6 => format!("fd00:1:{n}::/64"),
                };
                Route { dst: dst.parse().unwrap(), via: Via::Nexthop(id), mtu: None }
            };
            let sent = route(2);
            let there = route(3);
            let left = route(4);
            ip(&format!("nexthop del id {id}"));
            host.foreign("nexthop add id 77 via FIVE dev up0");
            ip(&format!("nexthop add id {id} group 77"));
            for route in [there, left] {
                host.foreign(&format!("route add {} nhid {id} proto 241", route.dst));
            }
            host.foreign(&format!("route add DST nhid {id} metric 77"));
            let nexthop = Nexthop { id, link: up(), gateway: host.gateway(7), onlink: true };
            let changes: [Change; 3] = [
                Change::Put(nexthop.into()),
                Change::Put(sent.into()),
                Change::Delete(left.into()),
            ];
            assert_eq!(host.kernel.apply(&host.footprint(), &changes), vec![Outcome::Done; 3]);
            let state = host.kernel.snapshot(&host.footprint()).unwrap();
            assert_eq!(state.get(&Key::Nexthop(id)), Some(&nexthop.into()));
            let routes = state.iter().filter(|object| matches!(object, Object::Route(_)));
            assert_eq!(routes.cloned().collect::<Vec<_>>(), [sent.into(), there.into()]);
            let bad = Nexthop { link: "lo".parse().unwrap(), onlink: false, ..nexthop };
            ip(&format!("nexthop del id {id}"));
            ip(&format!("nexthop add id {id} group 77"));
            host.foreign(&format!("route add DST nhid {id} proto 241"));
            let refused =
                host.kernel.apply(&host.footprint(), &[Change::Put(bad.into())]).remove(0);
            let text = refused.into_result().unwrap_err().to_string();
            assert!(!text.contains("group"), "{text}");
            assert_eq!(host.found(), Some(sent.into()), "a refused nexthop deletes no route");
        });
    });
}

/// The kernel shares one `fib_info` among routes that use one nexthop object and differ only in
/// metrics.
#[test]
fn no_metrics_stay_of_a_foreign_route_on_the_same_nexthop_object() {
    in_netns(|| {
        in_both_families(|host| {
            let id = host.id(7);
            let flag = if host.family == Family::V4 { "-4" } else { "-6" };
            let ours = Route { dst: host.dst(), via: Via::Nexthop(id), mtu: None };
            for theirs in ["mtu 1300", "advmss 1000", "mtu lock 1300", "mtu 1300 window 9000"] {
                host.apply(&Change::Put(ours.into()));
                host.foreign("route del DST");
                host.foreign(&format!("route replace DST nhid {id} proto 241 {theirs}"));
                let shown = ip(&format!("{flag} route show {}", ours.dst));
                assert!(shown.contains(theirs), "{theirs}: {shown}");
                // The kernel handle that repairs the route has read it.
                assert_ne!(host.found(), None);
                host.apply(&Change::Put(ours.into()));
                assert_eq!(host.found(), Some(ours.into()), "{theirs}");
                let wide = Route { mtu: Some(1400), ..ours };
                host.apply(&Change::Put(wide.into()));
                assert_eq!(host.found(), Some(wide.into()), "{theirs}");
            }
        });
    });
}

#[test]
fn a_blackhole_nexthop_is_replaced_and_its_routes_work_again() {
    in_netns(|| {
        in_both_families(|host| {
            let id = host.id(7);
            let ours = Route { dst: host.dst(), via: Via::Nexthop(id), mtu: None };
            host.apply(&Change::Put(ours.into()));
            ip(&format!("-6 nexthop replace id {id} blackhole"));
            assert_eq!(host.found(), Some(ours.into()), "the route still uses it");
            // A route of the other family uses the blackhole too.
            let other = if host.family == Family::V4 {
                "-6 route add fd77::/64"
            } else {
                "route add 10.77.0.0/24"
            };
            ip(&format!("{other} nhid {id}"));
            let nexthop = Nexthop { id, link: up(), gateway: host.gateway(7), onlink: true };
            host.apply(&Change::Put(nexthop.into()));
            let state = host.kernel.snapshot(&host.footprint()).unwrap();
            assert_eq!(state.get(&Key::Nexthop(id)), Some(&nexthop.into()));
            assert_eq!(host.found(), Some(ours.into()));
        });
    });
}

#[test]
fn foreign_users_of_a_nexthop_are_found_and_not_deleted_with_it() {
    in_netns(|| {
        in_both_families(|host| {
            let id = host.id(7);
            let ours = Route { dst: host.dst(), via: Via::Nexthop(id), mtu: None };
            let users = || {
                host.kernel
                    .nexthop_users(&host.kernel.snapshot(&host.footprint()).unwrap())
                    .unwrap()
            };
            assert!(users().is_empty(), "there is no route");
            host.apply(&Change::Put(ours.into()));
            assert!(users().is_empty(), "there is only our route");
            let mut others = vec![
                ("proto 241 metric 77", "with a metric or TOS of its own"),
                ("proto 241 table 77", "of another table"),
                ("proto 4 metric 88 table 77", "proto 4 of another table"),
            ];
            if host.family == Family::V4 {
                others.push(("proto 241 tos 4", "with a metric or TOS of its own"));
                others.push(("proto 241 src 192.0.2.1 metric 99", "src 192.0.2.1 with a metric"));
            }
            for (other, expected) in others {
                host.foreign(&format!("route add DST nhid {id} {other}"));
                let found = users();
                let text = format!("route {} nhid {id} ", host.dst());
                assert!(
                    found[&id].starts_with(&text) && found[&id].contains(expected),
                    "{other}: {found:?}"
                );
                for clean in [ready_for_go, cleanup] {
                    let report = clean(&host.kernel, &host.footprint(), false).unwrap();
                    let [(Change::Delete(Object::Nexthop(kept)), why)] = &report.failed[..] else {
                        panic!("{other}: {report:#?}")
                    };
                    assert!(
                        kept.id == id && why.is(EBUSY) && why.to_string().contains(expected),
                        "{why}"
                    );
                }
                assert_eq!(users().len(), 1, "{other}: still there");
                host.foreign(&format!("route del DST nhid {id} {other}"));
                let nexthop = Nexthop { id, link: up(), gateway: host.gateway(7), onlink: true };
                host.apply(&Change::Put(nexthop.into()));
                host.apply(&Change::Put(ours.into()));
                assert!(users().is_empty());
            }
            ip(&format!("nexthop add id 99 group {id}"));
            assert_eq!(users(), [(id, format!("nexthop id 99 group {id}"))].into());
        });
    });
}
