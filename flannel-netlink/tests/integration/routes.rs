//! Routes of every form.

mod foreign;
mod nexthops;

use std::net::IpAddr;
use std::time::Duration;
use test_support::eventually;

use flannel_core::address::{Dual, Family};
use flannel_core::kernel::{
    Footprint, GoRouteKernel, GoRoutes, NexthopBlock, Outcome, RouteAnswer,
};
use flannel_core::object::{Change, Key, LinkName, Nexthop, Object, Route, Via};
use flannel_core::{Kernel, Subnet};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{Netns, in_netns, ip};
use serde_json::Value;

/// A host with an uplink `up0`, a tunnel `tun0` and nexthop objects, for tests of one family.
struct Host {
    kernel: NetlinkKernel,
    family: Family,
    block: NexthopBlock,
}

impl Host {
    fn new(family: Family) -> Self {
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
        let host = Self { kernel, family, block };
        for id in [7, 8] {
            let gateway = host.gateway(id);
            let nexthop = Nexthop { id: host.id(id), link: up(), gateway, onlink: true };
            host.apply(&Change::Put(nexthop.into()));
        }
        host
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

    /// Runs `ip` as another program would. The words `DST`, `BASE`, `SOURCE`, `FIVE` and `SIX` in
    /// the command stand for addresses.
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
fn in_both_families(test: fn(&Host)) {
    for family in Family::BOTH {
        Netns::new().unwrap().run(|| test(&Host::new(family)));
    }
}

#[test]
fn every_form_becomes_every_other_in_place() {
    in_netns(|| {
        in_both_families(|host| {
            for from in host.forms() {
                for to in host.forms() {
                    host.apply(&Change::Put(from.into()));
                    host.apply(&Change::Put(to.into()));
                    host.apply(&Change::Put(to.into()));
                    assert_eq!(host.found(), Some(to.into()), "from {from:?}");
                }
                let last = host.forms().pop().unwrap();
                host.apply(&Change::Delete(last.into()));
                host.apply(&Change::Delete(last.into()));
                assert_eq!(host.found(), None);
            }
        });
    });
}

#[test]
fn a_deletion_spares_another_path_to_the_destination() {
    in_netns(|| {
        in_both_families(|host| {
            let forms = host.forms();
            for (there, deleted) in [(0, 1), (1, 0), (3, 5), (5, 6), (7, 1), (8, 1), (7, 5)] {
                host.apply(&Change::Put(forms[there].into()));
                host.apply(&Change::Delete(forms[deleted].into()));
                assert_eq!(
                    host.found(),
                    Some(forms[there].into()),
                    "deleting {:?}",
                    forms[deleted]
                );
            }
        });
    });
}

/// For the kernel, attributes that [`Route`] does not represent do not make it another entry.
#[test]
fn a_route_of_ours_with_more_attributes_is_repaired_or_deleted() {
    in_netns(|| {
        in_both_families(|host| {
            let wanted = host.forms()[1];
            for ours in host.forms().into_iter().filter(|route| route.via != Via::Blackhole) {
                let text = Object::from(ours).to_string().replace("scope link", "");
                let mut more = vec!["src SOURCE", "advmss 1000", "initcwnd 20 src SOURCE"];
                if host.family == Family::V6 {
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
                        host.foreign(&command);
                        assert_eq!(host.found(), Some(ours.into()), "{command}");
                        assert!(host.is_inexact(), "{command}");
                        host.apply(&change);
                        assert_eq!(
                            host.found(),
                            left.map(Object::from),
                            "{change} after {command}"
                        );
                        assert!(!host.is_inexact(), "{change} after {command}");
                        if let Some(route) = left {
                            host.apply(&Change::Delete(route.into()));
                        }
                    }
                }
            }
            // Go flannel's routes have no such attributes, so routes that have them are foreign.
            let mut cases = vec![("", true), (" advmss 1000", false), (" src SOURCE", false)];
            if host.family == Family::V4 {
                cases.push((" scope site", false));
            }
            for (more, is_found) in cases {
                host.foreign(&format!("route add DST via FIVE dev up0{more}"));
                let lens =
                    Dual::from_fn(|family| (family == host.family).then_some(host.dst().len()));
                let Footprint { networks, routes_on, .. } = host.footprint();
                let which = GoRoutes { links: routes_on, networks, lens };
                let found = host.kernel.go_routes(&which).unwrap();
                assert_eq!(found.iter().any(|found| found.dst == host.dst()), is_found, "{more}");
                if !is_found {
                    host.foreign("route del DST");
                    continue;
                }
                // Our route takes its place.
                host.foreign("route replace DST via FIVE dev up0 proto 241");
                assert_eq!(host.kernel.delete_go_routes(&found), [Outcome::Done]);
                let shown = ip(&format!("-N route show {}", host.dst()));
                assert!(shown.contains("proto 241"), "{shown}");
                host.foreign("route replace DST via FIVE dev up0");
                assert_eq!(host.kernel.delete_go_routes(&found), [Outcome::Done]);
                assert_eq!(host.kernel.go_routes(&which).unwrap(), []);
            }
        });
    });
}

#[test]
fn a_lookup_returns_the_route_that_the_kernel_chooses() {
    in_netns(|| {
        in_both_families(|host| {
            let ask = |address| host.kernel.lookup(address).unwrap();
            let inside = host.dst().nth(9).unwrap();
            assert_eq!(ask(inside), RouteAnswer::default(), "no route");
            assert_eq!(ask(host.gateway(77)).on_link(), Some(up()));
            assert_eq!(ask(host.gateway(77)).source, Some(host.gateway(1)));
            // For IPv6 the kernel creates the route to its own address shortly after the address.
            let local = || ask(host.gateway(1)).local;
            eventually(Duration::from_secs(10), local, || format!("{:?}", ask(host.gateway(1))));
            assert!(ask(host.gateway(1)).on_link().is_none());
            for form in host.forms() {
                host.apply(&Change::Put(form.into()));
                let answer = ask(inside);
                match form.via {
                    Via::Blackhole => assert_eq!(answer, RouteAnswer::default()),
                    Via::Link(_) => assert_eq!(answer.on_link(), Some(up())),
                    Via::Gateway { gateway, .. } => {
                        assert_eq!(answer.link, Some(up()));
                        assert_eq!(answer.gateway, Some(gateway));
                    }
                    _ => assert!(answer.link == Some(up()) && answer.gateway.is_some()),
                }
            }
            for kind in ["unreachable", "prohibit"] {
                host.foreign(&format!("route replace {kind} DST"));
                assert_eq!(ask(inside), RouteAnswer::default(), "{kind}");
            }
        });
    });
}

#[test]
fn five_thousand_routes_are_read_completely_while_other_routes_change() {
    in_netns(|| {
        in_both_families(|host| {
            let first =
                Subnet::new(host.dst().base(), if host.family == Family::V4 { 30 } else { 64 })
                    .unwrap();
            let route =
                |n| Route { dst: first.step(n).unwrap(), via: Via::Nexthop(host.id(7)), mtu: None };
            let puts: Vec<Change> = (0..5000).map(|n| Change::Put(route(n).into())).collect();
            let footprint = Footprint {
                networks: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/16".parse().unwrap()],
                ..host.footprint()
            };
            assert!(host.kernel.apply(&footprint, &puts).iter().all(Outcome::is_done));
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
                    match host.kernel.snapshot(&footprint) {
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
                host.kernel.snapshot(&footprint).unwrap().len(),
                5000 + 3,
                "routes, nexthops and the device"
            );
        });
    });
}
