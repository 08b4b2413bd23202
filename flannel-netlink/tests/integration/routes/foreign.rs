//! Routes of other programs to the destinations of ours.

use std::collections::BTreeSet;

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, Outcome, RouteAnswer};
use flannel_core::object::{Change, Key, Route, Via};
use flannel_netlink::Taken;
use flannel_netlink::testing::{Netns, in_netns, ip};

use super::{Host, in_both_families, networks, up};

#[test]
fn a_route_replaces_a_foreign_one() {
    in_netns(|| {
        in_both_families(|host| {
            for wanted in host.forms() {
                for foreign in [
                    "route add DST via FIVE dev up0",
                    "route add DST via SIX dev up0 mtu 1200",
                    "route add DST via SIX dev up0 src SOURCE",
                    "route add DST dev up0",
                    "route add unreachable DST",
                    "route add DST nexthop via FIVE dev up0 nexthop via SIX dev up0",
                ] {
                    host.foreign(foreign);
                    assert_eq!(
                        host.kernel
                            .snapshot(&host.footprint())
                            .unwrap()
                            .get(&Key::Route(host.dst())),
                        None
                    );
                    host.apply(&Change::Put(wanted.into()));
                    assert_eq!(host.found(), Some(wanted.into()), "in place of {foreign}");
                    host.apply(&Change::Delete(wanted.into()));
                    assert_eq!(host.found(), None);
                }
            }
        });
    });
}

/// A last-resort route is behind all others, so no route in front of it is deleted.
#[test]
fn a_last_resort_route_leaves_foreign_ipv6_routes_to_its_destination() {
    in_netns(|| {
        let host = Host::new(Family::V6);
        host.foreign("route add DST dev tun0 proto 4");
        ip(&format!("-6 route append blackhole {} proto 4", host.dst()));
        let footprint = Footprint { links: BTreeSet::new(), ..host.footprint() };
        host.kernel.snapshot(&footprint).unwrap();
        let route = Route { dst: host.dst(), via: Via::LastResort, mtu: None };
        let put = Change::Put(route.into());
        assert_eq!(host.kernel.apply(&footprint, &[put]), [Outcome::Done]);
        let shown = ip(&format!("-6 route show {}", host.dst()));
        assert!(shown.contains("dev tun0 proto static"), "{shown}");
    });
}

#[test]
fn our_route_is_put_in_place_of_a_foreign_route_in_front_of_it() {
    in_netns(|| {
        in_both_families(|host| {
            for n in 0..host.forms().len() {
                for foreign in
                    ["route prepend DST via FIVE dev up0", "route append DST via FIVE dev up0"]
                {
                    Netns::new().unwrap().run(|| hide(&Host::new(host.family), n, foreign));
                }
            }
        });
    });
}

fn hide(host: &Host, form: usize, foreign: &str) {
    let wanted = host.forms()[form];
    host.apply(&Change::Put(wanted.into()));
    // For IPv6 the foreign route has the path of ours, and the kernel does not compare protocols.
    if form == 0 && host.family == Family::V6 {
        return;
    }
    host.foreign(foreign);
    host.apply(&Change::Put(wanted.into()));
    let found = host.kernel.snapshot(&host.footprint()).unwrap();
    assert_eq!(
        found.get(&Key::Route(host.dst())),
        Some(&wanted.into()),
        "{wanted:?} after {foreign}"
    );
}

/// A hidden route is deleted only if the last put replaced the route in front of it. IPv4 only: an
/// IPv6 route is replaced wherever it is in the list.
#[test]
fn a_hidden_route_is_deleted_only_for_the_last_put() {
    in_netns(|| {
        for case in 0..5 {
            for foreign in [&["FIVE"][..], &["FIVE", "SIX"]] {
                Netns::new().unwrap().run(|| hide_a_step(&Host::new(Family::V4), case, foreign));
            }
        }
    });
}

fn hide_a_step(host: &Host, case: usize, foreign: &[&str]) {
    let via = Via::Gateway { gateway: host.gateway(7), link: up(), onlink: true };
    let plain = Route { dst: host.dst(), via, mtu: None };
    let narrow = Route { mtu: Some(1400), ..plain };
    let by_id = Route { via: Via::Nexthop(host.id(7)), ..plain };
    let nowhere = Route { via: Via::Nexthop(host.id(77)), ..plain };
    let (step, last) =
        [(plain, nowhere), (plain, by_id), (plain, narrow), (narrow, plain), (plain, plain)][case];
    host.apply(&Change::Put(step.into()));
    for gateway in foreign {
        host.foreign(&format!("route prepend DST via {gateway} dev up0"));
    }
    let outcomes =
        host.kernel.apply(&host.footprint(), &[step.into(), last.into()].map(Change::Put));
    let arrives = last != nowhere;
    assert_eq!(
        outcomes.iter().map(Outcome::is_done).collect::<Vec<_>>(),
        [true, arrives],
        "{outcomes:?}"
    );
    let shown = ip(&format!("-N route show {}", host.dst()));
    let ours: Vec<&str> = shown.lines().filter(|line| line.contains("proto 241")).collect();
    assert_eq!(ours.len(), 1, "{last:?}: {shown}");
    let remains = if arrives { last } else { step };
    assert_eq!(ours[0].contains("mtu 1400"), remains.mtu.is_some(), "{last:?}: {shown}");
    assert_eq!(ours[0].contains("nhid"), remains == by_id, "{last:?}: {shown}");
    assert_eq!(
        shown.lines().count() - 1,
        foreign.len() - usize::from(arrives),
        "{last:?}: {shown}"
    );
}

#[test]
fn a_last_resort_route_is_behind_others_and_replaces_ours() {
    in_netns(|| {
        in_both_families(|host| {
            let last = Route { dst: host.dst(), via: Via::LastResort, mtu: None };
            // Unlike `Host::found`, this allows other routes to the destination.
            let in_snapshot = || {
                let state = host.kernel.snapshot(&host.footprint()).unwrap();
                state.get(&Key::Route(host.dst())).cloned()
            };
            let inside = host.dst().nth(9).unwrap();
            for form in host.forms() {
                host.apply(&Change::Put(form.into()));
                host.apply(&Change::Put(last.into()));
                host.apply(&Change::Put(last.into()));
                assert_eq!(host.found(), Some(last.into()), "alone after {form:?}");
                assert_eq!(host.kernel.lookup(inside).unwrap(), RouteAnswer::default());
                host.apply(&Change::Put(form.into()));
                assert_eq!(in_snapshot(), Some(form.into()), "packets take the other route");
                host.apply(&Change::Delete(form.into()));
                assert_eq!(host.found(), None, "no last-resort route is left");
            }
            // A route on our tunnel device is from an earlier run. The kernel would prefer it to
            // the last-resort route.
            host.foreign("route add DST via BASE dev tun0 onlink");
            host.apply(&Change::Put(last.into()));
            assert_eq!(host.found(), Some(last.into()), "alone");
            host.apply(&Change::Delete(last.into()));
            // Foreign routes stay: one with another metric, and one that uses a nexthop object.
            let flag = if host.family == Family::V4 { "-4" } else { "-6" };
            for theirs in ["via BASE dev tun0 onlink metric 50", "nhid 77"] {
                ip(&format!("nexthop replace id 77 via {} dev up0", host.gateway(5)));
                host.foreign(&format!("route add DST {theirs}"));
                host.apply(&Change::Put(last.into()));
                let shown = ip(&format!("{flag} route show {}", host.dst()));
                assert!(
                    shown.contains("metric 50") || shown.contains("nhid 77"),
                    "{theirs}: {shown}"
                );
                host.apply(&Change::Delete(last.into()));
                host.foreign(&format!("route del DST {theirs}"));
                assert_eq!(host.found(), None);
            }
            // The route of a bridge, as the kernel creates it.
            host.apply(&Change::Put(last.into()));
            host.foreign("route add DST dev up0 proto kernel");
            assert_eq!(in_snapshot(), Some(last.into()));
            assert_eq!(host.kernel.lookup(inside).unwrap().on_link(), Some(up()));
            host.apply(&Change::Put(last.into()));
            assert_eq!(host.kernel.lookup(inside).unwrap().on_link(), Some(up()), "it stays");
            host.apply(&Change::Delete(last.into()));
            assert_eq!(in_snapshot(), None);
            assert_eq!(host.kernel.lookup(inside).unwrap().on_link(), Some(up()));
        });
    });
}

#[test]
fn routes_of_other_programs_to_our_destinations_are_found() {
    in_netns(|| {
        in_both_families(|host| {
            let ours = host.forms()[0];
            let shadows = || host.kernel.shadows(&networks()).unwrap();
            let from = "fd77::/64".parse().unwrap();
            let (flag, others) = match host.family {
                Family::V4 => (
                    "-4",
                    vec![
                        ("add DST tos 4 via SIX dev up0 proto 4", 4, Some(Taken::WithTos(4))),
                        ("add DST tos 8 dev tun0 metric 7", 3, Some(Taken::WithTos(8))),
                        ("prepend DST dev up0", 3, Some(Taken::All)),
                        ("append DST via SIX dev up0 proto 12", 12, Some(Taken::None)),
                        ("append unreachable DST proto 4", 4, Some(Taken::None)),
                        (
                            "append DST proto 4 nexthop via SIX dev up0 nexthop via FIVE dev up0",
                            4,
                            Some(Taken::None),
                        ),
                        ("add DST via SIX dev up0 metric 7", 3, None),
                    ],
                ),
                Family::V6 => (
                    "-6",
                    vec![
                        ("add DST via SIX dev up0 metric 7 proto 12", 12, Some(Taken::All)),
                        ("add DST from fd77::/64 via SIX dev up0", 3, Some(Taken::From(from))),
                        ("append DST dev tun0 proto 4", 4, Some(Taken::None)),
                        ("add DST via SIX dev up0 metric 2000", 3, None),
                    ],
                ),
            };
            for (other, protocol, takes) in others {
                let command = format!("route {other}");
                host.apply(&Change::Put(ours.into()));
                host.foreign(&command);
                let found = shadows();
                let seen: Vec<_> = found.iter().map(|it| (it.protocol, Some(it.takes))).collect();
                let expected: Vec<_> = takes.iter().map(|takes| (protocol, Some(*takes))).collect();
                assert_eq!(seen, expected, "{command}: {found:?}");
                match found.first() {
                    Some(shadow) => drop(ip(&format!("{flag} route del {}", shadow.route))),
                    None => host.foreign(&command.replace("add", "del")),
                }
                assert_eq!(shadows(), [], "{command}: the command deletes it");
                assert_eq!(host.found(), Some(ours.into()), "{command}");
                host.apply(&Change::Delete(ours.into()));
                host.foreign("route add DST via SIX dev up0");
                assert_eq!(shadows(), [], "there is no route of ours");
                host.foreign("route del DST");
            }
        });
    });
}
