//! Routes of every form, also to destinations for which other programs have routes.

use libc::EBUSY;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;
use test_support::eventually;

use flannel_core::address::{Dual, Family};
use flannel_core::kernel::{
    Footprint, GoRouteKernel, GoRoutes, NexthopBlock, Outcome, RouteAnswer,
};
use flannel_core::object::{Change, Key, LinkName, Nexthop, Object, Route, Via};
use flannel_core::{Kernel, Subnet};
use flannel_netlink::testing::{Netns, in_netns, ip};
use flannel_netlink::{NetlinkKernel, Taken};
use flannel_route::{cleanup, ready_for_go};
use serde_json::Value;

/// A host with an uplink `up0`, a tunnel `tun0` and nexthop objects, for tests of one family.
struct Scene {
    kernel: NetlinkKernel,
    family: Family,
    block: NexthopBlock,
}

impl Scene {
    fn set(family: Family) -> Self {
        ip("link add up0 type veth peer name far0");
        ip("link set far0 up");
        ip("addr add 192.0.2.1/24 dev up0");
        ip("addr add 2001:db8::1/64 dev up0 nodad");
        ip("link set up0 up");
        ip("link add tun0 type vxlan id 9 dstport 8472");
        ip("link set tun0 up");
        let kernel = NetlinkKernel::open().unwrap();
        let footprint = Footprint { networks: networks(), ..Footprint::default() };
        let block = NexthopBlock::choose(&kernel, &footprint).unwrap().0.unwrap();
        let scene = Self { kernel, family, block };
        for id in [7, 8] {
            let gateway = scene.gateway(id);
            let nexthop = Nexthop { id: scene.id(id), link: up(), gateway, onlink: true };
            scene.apply(&Change::Put(nexthop.into()));
        }
        scene
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            links: ["tun0".parse().unwrap()].into(),
            networks: networks(),
            routes_on: [up()].into(),
            blackholes: true,
            nexthops: Some(self.block),
            ..Footprint::default()
        }
    }

    fn id(&self, n: u8) -> u32 {
        self.block.first() + u32::from(n)
    }

    fn gateway(&self, n: u8) -> IpAddr {
        match self.family {
            Family::V4 => [192, 0, 2, n].into(),
            Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(n)].into(),
        }
    }

    fn dst(&self) -> Subnet {
        match self.family {
            Family::V4 => "10.1.2.0/24".parse().unwrap(),
            Family::V6 => "fd00:1:2::/64".parse().unwrap(),
        }
    }

    /// Routes to one destination, in every form that a route can have.
    fn forms(&self) -> Vec<Route> {
        let gateway = |n, onlink| Via::Gateway { gateway: self.gateway(n), link: up(), onlink };
        let route = |via, mtu| Route { dst: self.dst(), via, mtu };
        vec![
            route(gateway(5, false), None),
            route(gateway(6, false), None),
            route(gateway(6, true), None),
            route(gateway(6, true), Some(1400)),
            route(gateway(6, true), Some(1300)),
            route(Via::Nexthop(self.id(7)), None),
            route(Via::Nexthop(self.id(8)), None),
            route(Via::Blackhole, None),
            route(Via::Link(up()), None),
            route(Via::Link(up()), Some(1400)),
        ]
    }

    fn apply(&self, change: &Change) {
        let outcomes = self.kernel.apply(&self.footprint(), std::slice::from_ref(change));
        assert_eq!(outcomes, [Outcome::Done], "{change}");
    }

    fn found(&self) -> Option<Object> {
        // `ip` must show the same number of routes to the destination: one or none.
        let flag = if self.family == Family::V4 { "-4" } else { "-6" };
        let shown: Value =
            serde_json::from_str(&ip(&format!("-j {flag} route show {}", self.dst()))).unwrap();
        let found =
            self.kernel.snapshot(&self.footprint()).unwrap().get(&Key::Route(self.dst())).cloned();
        assert_eq!(
            shown.as_array().unwrap().len(),
            usize::from(found.is_some()),
            "{shown} {found:?}"
        );
        found
    }

    /// Whether a snapshot notes the route as inexact.
    fn is_inexact(&self) -> bool {
        self.kernel.snapshot(&self.footprint()).unwrap().is_inexact(&Key::Route(self.dst()))
    }

    /// Runs `ip` with a command in which words stand for addresses.
    fn foreign(&self, command: &str) {
        let flag = if self.family == Family::V4 { "-4" } else { "-6" };
        let mut command = format!("{flag} {}", command.replace("DST", &self.dst().to_string()));
        command = command.replace("BASE", &self.dst().base().to_string());
        for (word, n) in [("SOURCE", 1), ("FIVE", 5), ("SIX", 6)] {
            command = command.replace(word, &self.gateway(n).to_string());
        }
        ip(&command);
    }
}

fn networks() -> Vec<Subnet> {
    vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/32".parse().unwrap()]
}

fn up() -> LinkName {
    "up0".parse().unwrap()
}

/// Runs the test for each family in a namespace of its own.
fn in_both_families(test: fn(&Scene)) {
    for family in Family::BOTH {
        Netns::new().unwrap().run(|| test(&Scene::set(family)));
    }
}

#[test]
fn every_form_becomes_every_other_in_place() {
    in_netns(|| {
        in_both_families(|scene| {
            for from in scene.forms() {
                for to in scene.forms() {
                    scene.apply(&Change::Put(from.into()));
                    scene.apply(&Change::Put(to.into()));
                    scene.apply(&Change::Put(to.into()));
                    assert_eq!(scene.found(), Some(to.into()), "from {from:?}");
                }
                let last = scene.forms().pop().unwrap();
                scene.apply(&Change::Delete(last.into()));
                scene.apply(&Change::Delete(last.into()));
                assert_eq!(scene.found(), None);
            }
        });
    });
}

#[test]
fn a_deletion_spares_another_path_to_the_destination() {
    in_netns(|| {
        in_both_families(|scene| {
            let forms = scene.forms();
            for (there, deleted) in [(0, 1), (1, 0), (3, 5), (5, 6), (7, 1), (8, 1), (7, 5)] {
                scene.apply(&Change::Put(forms[there].into()));
                scene.apply(&Change::Delete(forms[deleted].into()));
                assert_eq!(
                    scene.found(),
                    Some(forms[there].into()),
                    "deleting {:?}",
                    forms[deleted]
                );
            }
        });
    });
}

#[test]
fn a_route_replaces_a_foreign_one() {
    in_netns(|| {
        in_both_families(|scene| {
            for wanted in scene.forms() {
                for foreign in [
                    "route add DST via FIVE dev up0",
                    "route add DST via SIX dev up0 mtu 1200",
                    "route add DST via SIX dev up0 src SOURCE",
                    "route add DST dev up0",
                    "route add unreachable DST",
                    "route add DST nexthop via FIVE dev up0 nexthop via SIX dev up0",
                ] {
                    scene.foreign(foreign);
                    assert_eq!(
                        scene
                            .kernel
                            .snapshot(&scene.footprint())
                            .unwrap()
                            .get(&Key::Route(scene.dst())),
                        None
                    );
                    scene.apply(&Change::Put(wanted.into()));
                    assert_eq!(scene.found(), Some(wanted.into()), "in place of {foreign}");
                    scene.apply(&Change::Delete(wanted.into()));
                    assert_eq!(scene.found(), None);
                }
            }
        });
    });
}

/// For the kernel, attributes that [`Route`] does not represent do not make it another entry.
#[test]
fn a_route_of_ours_with_more_attributes_is_repaired_or_deleted() {
    in_netns(|| {
        in_both_families(|scene| {
            let wanted = scene.forms()[1];
            let blackhole = |route: &Route| route.via == Via::Blackhole;
            for ours in scene.forms().into_iter().filter(|route| !blackhole(route)) {
                let text = Object::from(ours).to_string().replace("scope link", "");
                let mut more = vec!["src SOURCE", "advmss 1000", "initcwnd 20 src SOURCE"];
                if scene.family == Family::V6 {
                    more.push("pref high");
                    // For IPv6 the kernel refuses a source address with a nexthop object.
                    more.retain(|more| {
                        !(more.contains("src") && matches!(ours.via, Via::Nexthop(_)))
                    });
                } else if !matches!(ours.via, Via::Link(_)) {
                    // A route without a gateway is represented only with the scope link.
                    more.push("scope site");
                }
                for more in more {
                    let command =
                        format!("{} proto 241 {more}", text.replacen("route", "route replace", 1));
                    for (change, left) in [
                        (Change::Put(ours.into()), Some(ours)),
                        (Change::Put(wanted.into()), Some(wanted)),
                        (Change::Delete(ours.into()), None),
                    ] {
                        scene.foreign(&command);
                        assert_eq!(scene.found(), Some(ours.into()), "{command}");
                        assert!(scene.is_inexact(), "{command}");
                        scene.apply(&change);
                        assert_eq!(
                            scene.found(),
                            left.map(Object::from),
                            "{change} after {command}"
                        );
                        assert!(!scene.is_inexact(), "{change} after {command}");
                        left.iter().for_each(|route| scene.apply(&Change::Delete((*route).into())));
                    }
                }
            }
            // Go flannel's routes have no such attributes, so routes that have them are foreign.
            let scope = (scene.family == Family::V4).then_some((" scope site", false));
            let more = [("", true), (" advmss 1000", false), (" src SOURCE", false)];
            for (more, is_found) in more.into_iter().chain(scope) {
                scene.foreign(&format!("route add DST via FIVE dev up0{more}"));
                let lens =
                    Dual::from_fn(|family| (family == scene.family).then_some(scene.dst().len()));
                let Footprint { networks, routes_on, .. } = scene.footprint();
                let which = GoRoutes { links: routes_on, networks, lens };
                let found = scene.kernel.go_routes(&which).unwrap();
                assert_eq!(found.iter().any(|found| found.dst == scene.dst()), is_found, "{more}");
                // Our route takes its place.
                if is_found {
                    scene.foreign("route replace DST via FIVE dev up0 proto 241");
                    assert_eq!(scene.kernel.delete_go_routes(&found), [Outcome::Done]);
                    let shown = ip(&format!("-N route show {}", scene.dst()));
                    assert!(shown.contains("proto 241"), "{shown}");
                    scene.foreign("route replace DST via FIVE dev up0");
                    assert_eq!(scene.kernel.delete_go_routes(&found), [Outcome::Done]);
                    assert_eq!(scene.kernel.go_routes(&which).unwrap(), []);
                } else {
                    scene.foreign("route del DST");
                }
            }
        });
    });
}

/// It is behind all others, so nothing in front of it has to go.
#[test]
fn a_last_resort_route_leaves_foreign_ipv6_routes_to_its_destination() {
    in_netns(|| {
        let scene = Scene::set(Family::V6);
        scene.foreign("route add DST dev tun0 proto 4");
        ip(&format!("-6 route append blackhole {} proto 4", scene.dst()));
        let footprint = Footprint { links: BTreeSet::new(), ..scene.footprint() };
        scene.kernel.snapshot(&footprint).unwrap();
        let route = Route { dst: scene.dst(), via: Via::LastResort, mtu: None };
        let put = Change::Put(route.into());
        assert_eq!(scene.kernel.apply(&footprint, &[put]), [Outcome::Done]);
        let shown = ip(&format!("-6 route show {}", scene.dst()));
        assert!(shown.contains("dev tun0 proto static"), "{shown}");
    });
}

/// Another program can give our nexthop object a gateway of the other family.
#[test]
fn a_route_with_a_gateway_of_the_other_family_is_ours_if_its_nexthop_object_is() {
    in_netns(|| {
        let scene = Scene::set(Family::V4);
        let id = scene.id(9);
        ip(&format!("-6 nexthop add id {id} via 2001:db8::9 dev up0 protocol 241"));
        ip(&format!("route add {} nhid {id} proto 241", scene.dst()));
        let route = Route { dst: scene.dst(), via: Via::Nexthop(id), mtu: None };
        let found = scene.kernel.snapshot(&scene.footprint()).unwrap();
        assert_eq!(found.get(&Key::Route(scene.dst())), Some(&route.into()));
    });
}

#[test]
fn our_route_is_put_in_place_of_a_foreign_route_in_front_of_it() {
    in_netns(|| {
        in_both_families(|scene| {
            for n in 0..scene.forms().len() {
                for foreign in
                    ["route prepend DST via FIVE dev up0", "route append DST via FIVE dev up0"]
                {
                    let once = || hide(&Scene::set(scene.family), n, foreign);
                    Netns::new().unwrap().run(once);
                }
            }
        });
    });
}

fn hide(scene: &Scene, form: usize, foreign: &str) {
    let wanted = scene.forms()[form];
    scene.apply(&Change::Put(wanted.into()));
    // For IPv6 the foreign route has the path of ours, and the kernel does not compare protocols.
    if form == 0 && scene.family == Family::V6 {
        return;
    }
    scene.foreign(foreign);
    scene.apply(&Change::Put(wanted.into()));
    let found = scene.kernel.snapshot(&scene.footprint()).unwrap();
    assert_eq!(
        found.get(&Key::Route(scene.dst())),
        Some(&wanted.into()),
        "{wanted:?} after {foreign}"
    );
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
                Netns::new().unwrap().run(|| step_aside(&Scene::set(Family::V4), there, foreign));
            }
        }
    });
}

fn step_aside(scene: &Scene, there: usize, foreign: &str) {
    let (id, gateway) = (scene.id(7), scene.gateway(7));
    let nexthop = Nexthop { id, link: up(), gateway, onlink: true };
    let via = Via::Gateway { gateway, link: up(), onlink: true };
    let [plain, by_id] =
        [via, Via::Nexthop(id)].map(|via| Route { dst: scene.dst(), via, mtu: None });
    scene.apply(&Change::Put(nexthop.into()));
    scene.apply(&Change::Put([plain, by_id][there].into()));
    if !foreign.is_empty() {
        scene.foreign(foreign);
    }
    let changes = [plain.into(), nexthop.into(), by_id.into()].map(Change::Put);
    let outcomes = scene.kernel.apply(&scene.footprint(), &changes);
    assert_eq!(outcomes, vec![Outcome::Done; 3], "{there} {foreign}");
    let shown = ip(&format!("-N route show {}", scene.dst()));
    assert_eq!(shown.matches("proto 241").count(), 1, "{there} {foreign}: {shown}");
    let found = scene.kernel.snapshot(&scene.footprint()).unwrap();
    assert_eq!(
        found.get(&Key::Route(scene.dst())),
        Some(&by_id.into()),
        "{there} {foreign}: {shown}"
    );
}

/// A hidden route is deleted only if the last put replaced the route in front of it. IPv4 only: an
/// IPv6 route is replaced wherever it is in the list.
#[test]
fn a_hidden_route_is_deleted_only_for_the_last_put() {
    in_netns(|| {
        for case in 0..5 {
            for foreign in [&["FIVE"][..], &["FIVE", "SIX"]] {
                Netns::new().unwrap().run(|| hide_a_step(&Scene::set(Family::V4), case, foreign));
            }
        }
    });
}

fn hide_a_step(scene: &Scene, case: usize, foreign: &[&str]) {
    let via = Via::Gateway { gateway: scene.gateway(7), link: up(), onlink: true };
    let plain = Route { dst: scene.dst(), via, mtu: None };
    let narrow = Route { mtu: Some(1400), ..plain };
    let by_id = Route { via: Via::Nexthop(scene.id(7)), ..plain };
    let nowhere = Route { via: Via::Nexthop(scene.id(77)), ..plain };
    let (step, last) =
        [(plain, nowhere), (plain, by_id), (plain, narrow), (narrow, plain), (plain, plain)][case];
    scene.apply(&Change::Put(step.into()));
    for gateway in foreign {
        scene.foreign(&format!("route prepend DST via {gateway} dev up0"));
    }
    let outcomes =
        scene.kernel.apply(&scene.footprint(), &[step.into(), last.into()].map(Change::Put));
    let arrives = last != nowhere;
    assert_eq!(
        outcomes.iter().map(Outcome::is_done).collect::<Vec<_>>(),
        [true, arrives],
        "{outcomes:?}"
    );
    let shown = ip(&format!("-N route show {}", scene.dst()));
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
fn routes_survive_when_a_group_is_replaced_by_their_nexthop() {
    in_netns(|| {
        in_both_families(|scene| {
            let id = scene.id(7);
            let route =
                |dst: &str| Route { dst: dst.parse().unwrap(), via: Via::Nexthop(id), mtu: None };
            let [sent, there, left] = match scene.family {
                Family::V4 => ["10.1.2.0/24", "10.1.3.0/24", "10.1.4.0/24"],
                Family::V6 => ["fd00:1:2::/64", "fd00:1:3::/64", "fd00:1:4::/64"],
            }
            .map(route);
            ip(&format!("nexthop del id {id}"));
            scene.foreign("nexthop add id 77 via FIVE dev up0");
            ip(&format!("nexthop add id {id} group 77"));
            for route in [there, left] {
                scene.foreign(&format!("route add {} nhid {id} proto 241", route.dst));
            }
            scene.foreign(&format!("route add DST nhid {id} metric 77"));
            let nexthop = Nexthop { id, link: up(), gateway: scene.gateway(7), onlink: true };
            let changes: [Change; 3] = [
                Change::Put(nexthop.into()),
                Change::Put(sent.into()),
                Change::Delete(left.into()),
            ];
            assert_eq!(scene.kernel.apply(&scene.footprint(), &changes), vec![Outcome::Done; 3]);
            let state = scene.kernel.snapshot(&scene.footprint()).unwrap();
            assert_eq!(state.get(&Key::Nexthop(id)), Some(&nexthop.into()));
            let routes = state.iter().filter(|object| matches!(object, Object::Route(_)));
            assert_eq!(routes.cloned().collect::<Vec<_>>(), [sent.into(), there.into()]);
            let bad = Nexthop { link: "lo".parse().unwrap(), onlink: false, ..nexthop };
            ip(&format!("nexthop del id {id}"));
            ip(&format!("nexthop add id {id} group 77"));
            scene.foreign(&format!("route add DST nhid {id} proto 241"));
            let refused =
                scene.kernel.apply(&scene.footprint(), &[Change::Put(bad.into())]).remove(0);
            let text = refused.into_result().unwrap_err().to_string();
            assert!(!text.contains("group"), "{text}");
            assert_eq!(scene.found(), Some(sent.into()), "a refused nexthop deletes no route");
        });
    });
}

/// The kernel shares one `fib_info` among routes that use one nexthop object and differ only in
/// metrics.
#[test]
fn no_metrics_stay_of_a_foreign_route_on_the_same_nexthop_object() {
    in_netns(|| {
        in_both_families(|scene| {
            let id = scene.id(7);
            let flag = if scene.family == Family::V4 { "-4" } else { "-6" };
            let ours = Route { dst: scene.dst(), via: Via::Nexthop(id), mtu: None };
            for theirs in ["mtu 1300", "advmss 1000", "mtu lock 1300", "mtu 1300 window 9000"] {
                scene.apply(&Change::Put(ours.into()));
                scene.foreign("route del DST");
                scene.foreign(&format!("route replace DST nhid {id} proto 241 {theirs}"));
                let shown = ip(&format!("{flag} route show {}", ours.dst));
                assert!(shown.contains(theirs), "{theirs}: {shown}");
                // The kernel handle that repairs the route has read it.
                assert_ne!(scene.found(), None);
                scene.apply(&Change::Put(ours.into()));
                assert_eq!(scene.found(), Some(ours.into()), "{theirs}");
                let wide = Route { mtu: Some(1400), ..ours };
                scene.apply(&Change::Put(wide.into()));
                assert_eq!(scene.found(), Some(wide.into()), "{theirs}");
            }
        });
    });
}

#[test]
fn a_blackhole_nexthop_is_replaced_and_its_routes_work_again() {
    in_netns(|| {
        in_both_families(|scene| {
            let id = scene.id(7);
            let ours = Route { dst: scene.dst(), via: Via::Nexthop(id), mtu: None };
            scene.apply(&Change::Put(ours.into()));
            ip(&format!("-6 nexthop replace id {id} blackhole"));
            assert_eq!(scene.found(), Some(ours.into()), "the route still uses it");
            // A route of the other family uses the blackhole too.
            let other = if scene.family == Family::V4 {
                "-6 route add fd77::/64"
            } else {
                "route add 10.77.0.0/24"
            };
            ip(&format!("{other} nhid {id}"));
            let nexthop = Nexthop { id, link: up(), gateway: scene.gateway(7), onlink: true };
            scene.apply(&Change::Put(nexthop.into()));
            let state = scene.kernel.snapshot(&scene.footprint()).unwrap();
            assert_eq!(state.get(&Key::Nexthop(id)), Some(&nexthop.into()));
            assert_eq!(scene.found(), Some(ours.into()));
        });
    });
}

#[test]
fn foreign_users_of_a_nexthop_are_found_and_not_deleted_with_it() {
    in_netns(|| {
        in_both_families(|scene| {
            let v4 = scene.family == Family::V4;
            let id = scene.id(7);
            let ours = Route { dst: scene.dst(), via: Via::Nexthop(id), mtu: None };
            let users = || {
                scene
                    .kernel
                    .nexthop_users(&scene.kernel.snapshot(&scene.footprint()).unwrap())
                    .unwrap()
            };
            assert!(users().is_empty(), "there is no route");
            scene.apply(&Change::Put(ours.into()));
            assert!(users().is_empty(), "there is only our route");
            let mut others = vec![
                ("proto 241 metric 77", "with a metric or TOS of its own"),
                ("proto 241 table 77", "of another table"),
                ("proto 4 metric 88 table 77", "proto 4 of another table"),
            ];
            if v4 {
                others.push(("proto 241 tos 4", "with a metric or TOS of its own"));
                others.push(("proto 241 src 192.0.2.1 metric 99", "src 192.0.2.1 with a metric"));
            }
            for (other, expected) in others {
                scene.foreign(&format!("route add DST nhid {id} {other}"));
                let found = users();
                let text = format!("route {} nhid {id} ", scene.dst());
                assert!(
                    found[&id].starts_with(&text) && found[&id].contains(expected),
                    "{other}: {found:?}"
                );
                for clean in [ready_for_go, cleanup] {
                    let report = clean(&scene.kernel, &scene.footprint(), false).unwrap();
                    let [(Change::Delete(Object::Nexthop(kept)), why)] = &report.failed[..] else {
                        panic!("{other}: {report:#?}")
                    };
                    assert!(
                        kept.id == id && why.is(EBUSY) && why.to_string().contains(expected),
                        "{why}"
                    );
                }
                assert_eq!(users().len(), 1, "{other}: still there");
                scene.foreign(&format!("route del DST nhid {id} {other}"));
                let nexthop = Nexthop { id, link: up(), gateway: scene.gateway(7), onlink: true };
                scene.apply(&Change::Put(nexthop.into()));
                scene.apply(&Change::Put(ours.into()));
                assert!(users().is_empty());
            }
            ip(&format!("nexthop add id 99 group {id}"));
            assert_eq!(users(), [(id, format!("nexthop id 99 group {id}"))].into());
        });
    });
}

#[test]
fn routes_of_other_programs_to_our_destinations_are_found() {
    in_netns(|| {
        in_both_families(|scene| {
            let ours = scene.forms()[0];
            let shadows = || scene.kernel.shadows(&networks()).unwrap();
            let from = "fd77::/64".parse().unwrap();
            let (flag, others) = match scene.family {
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
                scene.apply(&Change::Put(ours.into()));
                scene.foreign(&command);
                let found = shadows();
                let seen: Vec<_> = found.iter().map(|it| (it.protocol, Some(it.takes))).collect();
                let expected: Vec<_> = takes.iter().map(|takes| (protocol, Some(*takes))).collect();
                assert_eq!(seen, expected, "{command}: {found:?}");
                match found.first() {
                    Some(shadow) => drop(ip(&format!("{flag} route del {}", shadow.route))),
                    None => scene.foreign(&command.replace("add", "del")),
                }
                assert_eq!(shadows(), [], "{command}: the command deletes it");
                assert_eq!(scene.found(), Some(ours.into()), "{command}");
                scene.apply(&Change::Delete(ours.into()));
                scene.foreign("route add DST via SIX dev up0");
                assert_eq!(shadows(), [], "there is no route of ours");
                scene.foreign("route del DST");
            }
        });
    });
}

#[test]
fn a_last_resort_route_is_behind_others_and_replaces_ours() {
    in_netns(|| {
        in_both_families(|scene| {
            let last = Route { dst: scene.dst(), via: Via::LastResort, mtu: None };
            let found = || {
                scene
                    .kernel
                    .snapshot(&scene.footprint())
                    .unwrap()
                    .get(&Key::Route(scene.dst()))
                    .cloned()
            };
            let inside = scene.dst().nth(9).unwrap();
            for form in scene.forms() {
                scene.apply(&Change::Put(form.into()));
                scene.apply(&Change::Put(last.into()));
                scene.apply(&Change::Put(last.into()));
                assert_eq!(scene.found(), Some(last.into()), "alone after {form:?}");
                assert_eq!(scene.kernel.lookup(inside).unwrap(), RouteAnswer::default());
                scene.apply(&Change::Put(form.into()));
                assert_eq!(found(), Some(form.into()), "packets take the other route");
                scene.apply(&Change::Delete(form.into()));
                assert_eq!(scene.found(), None, "no last-resort route is left");
            }
            // A route on our tunnel device is of an earlier run. The kernel would prefer it to the
            // last-resort route.
            scene.foreign("route add DST via BASE dev tun0 onlink");
            scene.apply(&Change::Put(last.into()));
            assert_eq!(scene.found(), Some(last.into()), "alone");
            scene.apply(&Change::Delete(last.into()));
            // Foreign routes stay: one with another metric, and one that uses a nexthop object.
            let flag = if scene.family == Family::V4 { "-4" } else { "-6" };
            for theirs in ["via BASE dev tun0 onlink metric 50", "nhid 77"] {
                ip(&format!("nexthop replace id 77 via {} dev up0", scene.gateway(5)));
                scene.foreign(&format!("route add DST {theirs}"));
                scene.apply(&Change::Put(last.into()));
                let shown = ip(&format!("{flag} route show {}", scene.dst()));
                assert!(
                    shown.contains("metric 50") || shown.contains("nhid 77"),
                    "{theirs}: {shown}"
                );
                scene.apply(&Change::Delete(last.into()));
                scene.foreign(&format!("route del DST {theirs}"));
                assert_eq!(scene.found(), None);
            }
            // The route of a bridge, as the kernel creates it.
            scene.apply(&Change::Put(last.into()));
            scene.foreign("route add DST dev up0 proto kernel");
            assert_eq!(found(), Some(last.into()));
            assert_eq!(scene.kernel.lookup(inside).unwrap().on_link(), Some(up()));
            scene.apply(&Change::Put(last.into()));
            assert_eq!(scene.kernel.lookup(inside).unwrap().on_link(), Some(up()), "it stays");
            scene.apply(&Change::Delete(last.into()));
            assert_eq!(found(), None);
            assert_eq!(scene.kernel.lookup(inside).unwrap().on_link(), Some(up()));
        });
    });
}

#[test]
fn a_lookup_returns_the_route_that_the_kernel_chooses() {
    in_netns(|| {
        in_both_families(|scene| {
            let ask = |address| scene.kernel.lookup(address).unwrap();
            let inside = scene.dst().nth(9).unwrap();
            assert_eq!(ask(inside), RouteAnswer::default(), "no route");
            assert_eq!(ask(scene.gateway(77)).on_link(), Some(up()));
            assert_eq!(ask(scene.gateway(77)).source, Some(scene.gateway(1)));
            // For IPv6 the kernel creates the route to its own address shortly after the address.
            let local = || ask(scene.gateway(1)).local;
            eventually(Duration::from_secs(10), local, || format!("{:?}", ask(scene.gateway(1))));
            assert!(ask(scene.gateway(1)).on_link().is_none());
            for form in scene.forms() {
                scene.apply(&Change::Put(form.into()));
                let answer = ask(inside);
                match form.via {
                    Via::Blackhole => assert_eq!(answer, RouteAnswer::default()),
                    Via::Link(_) => assert_eq!(answer.on_link(), Some(up())),
                    Via::Gateway { gateway, .. } => {
                        assert_eq!((answer.link, answer.gateway), (Some(up()), Some(gateway)));
                    }
                    _ => assert!(answer.link == Some(up()) && answer.gateway.is_some()),
                }
            }
            for kind in ["unreachable", "prohibit"] {
                scene.foreign(&format!("route replace {kind} DST"));
                assert_eq!(ask(inside), RouteAnswer::default(), "{kind}");
            }
        });
    });
}

#[test]
fn five_thousand_routes_are_read_completely_while_other_routes_change() {
    in_netns(|| {
        in_both_families(|scene| {
            let first =
                Subnet::new(scene.dst().base(), if scene.family == Family::V4 { 30 } else { 64 })
                    .unwrap();
            let route = |n| Route {
                dst: first.step(n).unwrap(),
                via: Via::Nexthop(scene.id(7)),
                mtu: None,
            };
            let puts: Vec<Change> = (0..5000).map(|n| Change::Put(route(n).into())).collect();
            let footprint = Footprint {
                networks: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/16".parse().unwrap()],
                ..scene.footprint()
            };
            assert!(scene.kernel.apply(&footprint, &puts).iter().all(Outcome::is_done));
            let other = NetlinkKernel::open().unwrap();
            let flapping = [route(6000), route(6001)].map(Object::from);
            let stop = std::sync::atomic::AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        for object in &flapping {
                            other.apply(&footprint, &[Change::Put(object.clone())]);
                            other.apply(&footprint, &[Change::Delete(object.clone())]);
                        }
                    }
                });
                for _ in 0..20 {
                    // A dump may fail if the table changes during every attempt.
                    match scene.kernel.snapshot(&footprint) {
                        Ok(found) => {
                            let steady = (0..5000)
                                .filter(|n| found.get(&Key::Route(route(*n).dst)).is_some());
                            assert_eq!(steady.count(), 5000);
                        }
                        Err(error) => assert!(error.to_string().contains("changed"), "{error}"),
                    }
                }
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            assert_eq!(
                scene.kernel.snapshot(&footprint).unwrap().len(),
                5000 + 3,
                "routes, nexthops and the device"
            );
        });
    });
}
