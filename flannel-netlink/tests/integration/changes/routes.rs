//! Routes beside ours: what an event or a snapshot shows of them is removed by the next change.

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, Invalidation, KernelEvent};
use flannel_core::object::{Change, Key, Nexthop, Object, ObjectSet, Route, Via};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns_async, ip};

use super::{address, link, reports, until, uplink};

/// The repair needs no snapshot after the event.
#[test]
fn metrics_that_an_event_shows_are_removed_by_a_put() {
    in_netns_async(|| async {
        let kernel = uplink();
        let nexthop =
            Nexthop { id: 9, link: link("up0"), gateway: address("192.0.2.9"), onlink: false };
        let ours = Route { dst: "10.1.2.0/24".parse().unwrap(), via: Via::Nexthop(9), mtu: None };
        let put = |object: Object| {
            kernel
                .apply(&Footprint::default(), &[Change::Put(object)])
                .remove(0)
                .into_result()
                .unwrap();
        };
        put(nexthop.into());
        let mut changes = kernel.changes().unwrap();
        ip("route add 10.1.2.0/24 nhid 9 proto 241 advmss 1000");
        until(&mut *changes, reports(KernelEvent::Inexact(ours.into()))).await;
        put(ours.into());
        let shown = ip("route show 10.1.2.0/24");
        assert!(shown.contains("nhid 9") && !shown.contains("advmss"), "{shown}");
    });
}

/// An uplink and a tunnel.
fn uplink_and_tunnel() -> NetlinkKernel {
    let kernel = uplink();
    ip("link add flannel.1 type vxlan id 1 dstport 8472");
    ip("link set flannel.1 up");
    kernel
}

/// The footprint of a network with this tunnel.
fn tunnel_footprint() -> Footprint {
    let networks = vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/48".parse().unwrap()];
    Footprint { links: [link("flannel.1")].into(), networks, ..Footprint::default() }
}

/// A path through the tunnel.
fn through_tunnel(gateway: &str) -> Via {
    Via::Gateway { gateway: address(gateway), link: link("flannel.1"), onlink: true }
}

#[test]
fn a_second_route_of_ours_with_another_path_is_removed() {
    in_netns_async(|| async {
        let kernel = uplink_and_tunnel();
        ip("nexthop add id 77 via 10.1.99.0 dev flannel.1 onlink");
        let footprint = tunnel_footprint();
        let change =
            |change: Change| kernel.apply(&footprint, &[change]).remove(0).into_result().unwrap();
        change(Change::Put(
            Nexthop { id: 9, link: link("flannel.1"), gateway: address("10.1.7.0"), onlink: true }
                .into(),
        ));
        let mut changes = kernel.changes().unwrap();
        let doubles_v4 = [
            "dev flannel.1",
            "dev flannel.1 proto 241 advmss 900",
            "nhid 77",
            "via 10.1.99.0 dev flannel.1 onlink",
            "via 192.0.2.9 dev up0 proto 241",
            "tos 4 dev flannel.1",
            "tos 8 via 10.1.99.0 dev flannel.1 onlink metric 50",
            "tos 4 nhid 77",
        ];
        for (dst, via, doubles) in [
            ("10.1.7.0/24", Via::Nexthop(9), &doubles_v4[..]),
            ("10.1.8.0/24", through_tunnel("10.1.8.0"), &doubles_v4),
            // IPv6 merges two gateways into one multipath route. A request cannot distinguish a
            // route without a gateway from ours.
            ("fd00:1:0:7::/64", through_tunnel("fd00:1:0:7::"), &[]),
        ] {
            let ours = Object::from(Route { dst: dst.parse().unwrap(), via, mtu: None });
            let family = if dst.contains(':') { 6 } else { 4 };
            let shown = || ip(&format!("-{family} route show {dst}"));
            let snapshot = || kernel.snapshot(&footprint).unwrap();
            for double in doubles {
                change(Change::Put(ours.clone()));
                let append = || ip(&format!("-{family} route append {dst} {double}"));
                append();
                let about = |report: &KernelEvent| match report {
                    KernelEvent::Duplicate(object) => object.key() == ours.key(),
                    _ => false,
                };
                until(
                    &mut *changes,
                    |event| matches!(event, Invalidation::Objects(all, _) if all.iter().any(about)),
                )
                .await;
                let there = snapshot();
                assert_eq!(
                    there.get(&ours.key()),
                    Some(&ours),
                    "{dst} {double}: packets take the first route"
                );
                assert!(there.is_inexact(&ours.key()), "{dst} {double}");
                change(Change::Put(ours.clone()));
                assert!(!snapshot().is_inexact(&ours.key()), "{dst} {double}");
                assert_eq!(shown().lines().count(), 1, "{dst} {double}:\n{}", shown());
                // The second route is deleted together with the first.
                append();
                snapshot();
                change(Change::Delete(ours.clone()));
                assert_eq!(shown(), "", "{dst} {double}");
            }
            // A second route that a request cannot distinguish from ours has the same path. It
            // stays when ours is deleted, and then needs a deletion of its own.
            change(Change::Put(ours.clone()));
            let alike = match via {
                Via::Nexthop(id) => format!("nhid {id} proto 241 advmss 900"),
                _ if family == 4 => "via 10.1.8.0 dev flannel.1 onlink proto 241 advmss 900".into(),
                _ => "dev flannel.1 proto 241".into(),
            };
            ip(&format!("-{family} route append {dst} {alike}"));
            assert!(!snapshot().is_inexact(&ours.key()), "{dst} {alike}");
            change(Change::Put(ours.clone()));
            change(Change::Delete(ours.clone()));
            let Object::Route(left) = snapshot().get(&ours.key()).unwrap().clone() else {
                unreachable!()
            };
            change(Change::Delete(left.into()));
            assert_eq!(shown(), "");
        }
    });
}

#[test]
fn a_foreign_route_behind_ours_stays() {
    in_netns_async(|| async {
        let kernel = uplink_and_tunnel();
        let footprint = tunnel_footprint();
        let change =
            |change: Change| kernel.apply(&footprint, &[change]).remove(0).into_result().unwrap();
        let ours = Route {
            dst: "10.1.8.0/24".parse().unwrap(),
            via: through_tunnel("10.1.8.0"),
            mtu: None,
        };
        change(Change::Put(ours.into()));
        ip("route append 10.1.8.0/24 via 192.0.2.9 dev up0");
        ip("route add 10.1.8.0/24 tos 4 via 192.0.2.9 dev up0 proto 241");
        assert!(!kernel.snapshot(&footprint).unwrap().is_inexact(&Key::Route(ours.dst)));
        change(Change::Put(ours.into()));
        assert_eq!(ip("route show 10.1.8.0/24").lines().count(), 3);
    });
}

#[test]
fn all_routes_with_a_tos_to_an_undesired_destination_are_removed() {
    in_netns_async(|| async {
        let kernel = uplink_and_tunnel();
        let footprint = tunnel_footprint();
        for tos in [4, 8] {
            ip(&format!("route add 10.1.9.0/24 tos {tos} dev flannel.1"));
        }
        let there = kernel.snapshot(&footprint).unwrap();
        let stray = there.get(&Key::Route("10.1.9.0/24".parse().unwrap())).unwrap();
        assert!(there.is_inexact(&stray.key()));
        let deletion = Change::Delete(stray.clone());
        kernel.apply(&footprint, &[deletion]).remove(0).into_result().unwrap();
        assert_eq!(ip("route show 10.1.9.0/24"), "");
    });
}

/// An IPv6 route replaces only a route of the same kind: with or without a gateway.
#[test]
fn a_foreign_route_in_front_of_ours_that_a_put_does_not_replace_is_removed() {
    in_netns_async(|| async {
        let kernel = uplink();
        ip("link add up1 type veth peer name far1");
        ip("link set far1 up");
        ip("link set up1 up");
        let networks = vec!["fd00:1::/48".parse().unwrap()];
        let footprint =
            Footprint { networks, routes_on: [link("up0")].into(), ..Footprint::default() };
        let change =
            |change: Change| kernel.apply(&footprint, &[change]).remove(0).into_result().unwrap();
        let dst = "fd00:1:0:7::/64";
        let via =
            Via::Gateway { gateway: address("2001:db8::9"), link: link("up0"), onlink: false };
        let ours = Object::from(Route { dst: dst.parse().unwrap(), via, mtu: None });
        let shown = || ip(&format!("-6 route show {dst}"));
        change(Change::Put(ours.clone()));
        let put_foreign_route_in_front = |device: &str| {
            ip(&format!("-6 route replace {dst} dev {device}"));
            ip(&format!("-6 route append {dst} via 2001:db8::7 dev up0"));
            change(Change::Put(ours.clone()));
            let both = shown();
            assert!(
                both.starts_with(&format!("{dst} dev {device}")) && both.lines().count() == 2,
                "{both}"
            );
            let there = kernel.snapshot(&footprint).unwrap();
            assert!(
                there.get(&ours.key()) == Some(&ours) && there.is_inexact(&ours.key()),
                "packets do not take our route: {there:?}"
            );
        };
        // On another device, and on the device of ours.
        for device in ["up1", "up0"] {
            put_foreign_route_in_front(device);
            change(Change::Put(ours.clone()));
            let shown_after = shown();
            assert!(shown_after.contains("via 2001:db8::9 dev up0 proto 241"), "{shown_after}");
            assert_eq!(shown_after.lines().count(), 1, "{shown_after}");
            // The foreign route stays when ours is deleted.
            put_foreign_route_in_front(device);
            change(Change::Delete(ours.clone()));
            let left = shown();
            assert!(left.contains(&format!("dev {device}")), "{left}");
            assert_eq!(left.lines().count(), 1, "{left}");
            ip(&format!("-6 route del {dst} dev {device}"));
            change(Change::Put(ours.clone()));
        }
        change(Change::Delete(ours));
        assert_eq!(kernel.snapshot(&footprint).unwrap(), ObjectSet::default());
    });
}

/// An IPv4 put replaces the first route, which may be foreign. An IPv6 put replaces the first route
/// of the same kind.
#[test]
fn all_routes_around_ours_that_hide_it_or_are_ours_too_are_removed() {
    in_netns_async(|| async {
        let kernel = uplink();
        ip("link add up1 type veth peer name far1");
        ip("link set far1 up");
        ip("link set up1 up");
        let networks = ["10.1.0.0/16", "fd00:1::/48"].map(|network| network.parse().unwrap());
        let footprint = Footprint {
            networks: networks.to_vec(),
            routes_on: [link("up0")].into(),
            ..Footprint::default()
        };
        for (dst, gateway, others) in [
            (
                "10.1.7.0/24",
                "192.0.2.8",
                &[
                    "via 192.0.2.9 dev up0",
                    "via 192.0.2.6 dev up0 proto 241",
                    "via 192.0.2.7 dev up0 proto 241",
                ][..],
            ),
            (
                "fd00:1:0:7::/64",
                "2001:db8::8",
                &["dev up1", "dev up0", "blackhole", "via 2001:db8::9 dev up0 proto 241"],
            ),
            // None of these is ours. The put replaces the last one.
            ("fd00:1:0:8::/64", "2001:db8::8", &["blackhole", "dev up0", "via 2001:db8::9"]),
        ] {
            let family = if dst.contains(':') { 6 } else { 4 };
            for other in others {
                ip(&if *other == "blackhole" {
                    format!("-{family} route append blackhole {dst}")
                } else {
                    format!("-{family} route append {dst} {other}")
                });
            }
            kernel.snapshot(&footprint).unwrap();
            let via = Via::Gateway { gateway: address(gateway), link: link("up0"), onlink: false };
            let ours = Object::from(Route { dst: dst.parse().unwrap(), via, mtu: None });
            kernel.apply(&footprint, &[Change::Put(ours.clone())]).remove(0).into_result().unwrap();
            let shown = ip(&format!("-{family} route show {dst}"));
            assert_eq!(shown.lines().count(), 1, "{shown}");
            let there = kernel.snapshot(&footprint).unwrap();
            assert!(there.get(&ours.key()) == Some(&ours) && !there.is_inexact(&ours.key()));
        }
    });
}

#[test]
fn a_last_resort_route_does_not_stay_behind_ours_however_it_was_noted() {
    /// How the kernel handle learns of the route.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Noted {
        Event,
        SnapshotBeforePut,
        SnapshotAfterPut,
    }
    in_netns_async(|| async {
        let kernel = uplink();
        let other = NetlinkKernel::open().unwrap();
        let networks = vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/48".parse().unwrap()];
        let footprint = Footprint { blackholes: true, networks, ..Footprint::default() };
        let change = |kernel: &NetlinkKernel, change: Change| {
            kernel.apply(&footprint, &[change]).remove(0).into_result().unwrap();
        };
        let mut changes = kernel.changes().unwrap();
        kernel.snapshot(&footprint).unwrap();
        for (family, prefix, gateway) in [(4, "10.1", "192.0.2.9"), (6, "fd00:1", "2001:db8::9")] {
            for (n, noted) in [Noted::Event, Noted::SnapshotBeforePut, Noted::SnapshotAfterPut]
                .into_iter()
                .enumerate()
            {
                let text = if family == 4 {
                    format!("{prefix}.{n}.0/24")
                } else {
                    format!("{prefix}:0:{n}::/64")
                };
                let route =
                    |via| Object::from(Route { dst: text.parse().unwrap(), via, mtu: None });
                let last = route(Via::LastResort);
                let ours = route(Via::Gateway {
                    gateway: address(gateway),
                    link: link("up0"),
                    onlink: false,
                });
                change(&other, Change::Put(last.clone()));
                match noted {
                    Noted::Event => {
                        let is_last = reports(KernelEvent::Present(last.clone()));
                        until(&mut *changes, is_last).await;
                    }
                    Noted::SnapshotBeforePut => {
                        let there = kernel.snapshot(&footprint).unwrap();
                        assert_eq!(there.get(&last.key()), Some(&last));
                    }
                    Noted::SnapshotAfterPut => {}
                }
                change(&kernel, Change::Put(ours.clone()));
                if noted == Noted::SnapshotAfterPut {
                    let there = kernel.snapshot(&footprint).unwrap();
                    assert_eq!(there.get(&ours.key()), Some(&ours), "{text}");
                    assert!(there.is_inexact(&ours.key()), "{text}: it must be put again");
                    change(&kernel, Change::Put(ours.clone()));
                }
                let shown = || ip(&format!("-{family} route show {text}"));
                assert!(
                    shown().lines().count() == 1 && shown().contains(gateway),
                    "{noted:?}: {}",
                    shown()
                );
                let add_behind = || {
                    ip(&format!(
                        "-{family} route add blackhole {text} metric 4294967295 proto 241"
                    ));
                    kernel.snapshot(&footprint).unwrap();
                };
                add_behind();
                change(&kernel, Change::Delete(ours.clone()));
                assert_eq!(shown(), "", "{noted:?}: it is deleted with ours");
                // The route of another network stays, even behind ours.
                change(&kernel, Change::Put(ours.clone()));
                add_behind();
                let of_another = Footprint { networks: Vec::new(), ..footprint.clone() };
                kernel.apply(&of_another, &[Change::Delete(ours)]).remove(0).into_result().unwrap();
                assert!(
                    shown().lines().count() == 1 && shown().contains("blackhole"),
                    "{}",
                    shown()
                );
            }
        }
    });
}
