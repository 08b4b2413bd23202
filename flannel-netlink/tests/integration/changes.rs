//! Changes by other programs are reported, our own are not, and a loss of messages is reported.

mod routes;

use std::ffi::OsStr;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::time::Duration;

use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelEvent, Outcome, ProcessNames, RouteAnswer,
};
use flannel_core::object::{
    Addr, Change, Fdb, Key, LinkName, MacAddr, Neigh, Nexthop, Object, Route, Via,
};
use flannel_core::{Kernel, Subnet};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{Netns, bridge, in_netns_async, ip};

fn link(text: &str) -> LinkName {
    text.parse().unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn uplink() -> NetlinkKernel {
    ip("link add up0 type veth peer name far0");
    ip("link set far0 up");
    ip("addr add 192.0.2.1/24 dev up0");
    ip("addr add 2001:db8::1/64 dev up0 nodad");
    ip("link set up0 up");
    NetlinkKernel::open().unwrap()
}

/// Listens until an invalidation for which `wanted` is true. Returns the invalidations before it.
async fn until(
    changes: &mut dyn Changes,
    wanted: impl Fn(&Invalidation) -> bool,
) -> Vec<Invalidation> {
    let mut before = Vec::new();
    loop {
        let next = tokio::time::timeout(Duration::from_secs(60), changes.next()).await;
        let invalidation =
            next.unwrap_or_else(|_| panic!("not reported; only {before:?}")).unwrap();
        if wanted(&invalidation) {
            return before;
        }
        before.push(invalidation);
    }
}

fn reports(event: KernelEvent) -> impl Fn(&Invalidation) -> bool {
    move |invalidation| match invalidation {
        Invalidation::Objects(events, _) => events.contains(&event),
        _ => false,
    }
}

fn neigh(n: u32) -> Object {
    let address = IpAddr::from((0x0a01_0000 + n).to_be_bytes());
    Neigh { link: link("up0"), address, mac: MacAddr::local([7; 6]) }.into()
}

fn route(n: u32) -> Object {
    let base = IpAddr::from((0x0a01_0000 + n).to_be_bytes());
    Route { dst: Subnet::host(base), via: Via::Blackhole, mtu: None }.into()
}

#[test]
fn changes_by_others_are_reported_object_by_object() {
    in_netns_async(|| async {
        let kernel = uplink();
        ip("link add flannel.1 type vxlan id 1 dstport 8472");
        ip("link set flannel.1 up");
        let mut changes = kernel.changes().unwrap();
        let changes = &mut *changes;
        let nexthop =
            Nexthop { id: 9, link: link("up0"), gateway: address("192.0.2.9"), onlink: false };
        let via = Via::Gateway { gateway: address("192.0.2.9"), link: link("up0"), onlink: false };
        let dst = "10.1.2.0/24".parse().unwrap();
        let mac: MacAddr = "0a:00:00:00:00:09".parse().unwrap();
        let fdb = Fdb { link: link("flannel.1"), mac, dst: address("192.0.2.9") };
        for (command, report) in [
            (
                "neigh replace 10.1.0.9 lladdr 0a:00:00:00:00:09 dev up0 nud permanent",
                KernelEvent::Present(
                    Neigh { link: link("up0"), address: address("10.1.0.9"), mac }.into(),
                ),
            ),
            (
                "neigh replace 10.1.0.9 lladdr 0a:00:00:00:00:09 dev up0 nud stale",
                KernelEvent::Unrepresentable(Key::Neigh(link("up0"), address("10.1.0.9"))),
            ),
            (
                "neigh del 10.1.0.9 dev up0",
                KernelEvent::Deleted(Key::Neigh(link("up0"), address("10.1.0.9"))),
            ),
            (
                "neigh add proxy 10.1.0.9 dev up0",
                KernelEvent::Duplicate(
                    Neigh { link: link("up0"), address: address("10.1.0.9"), mac: MacAddr([0; 6]) }
                        .into(),
                ),
            ),
            ("nexthop add id 9 via 192.0.2.9 dev up0", KernelEvent::Present(nexthop.into())),
            (
                "route add 10.1.2.0/24 nhid 9",
                KernelEvent::Present(Route { dst, via: Via::Nexthop(9), mtu: None }.into()),
            ),
            (
                "route append 10.1.2.0/24 via 192.0.2.9 dev up0",
                KernelEvent::Duplicate(Route { dst, via, mtu: None }.into()),
            ),
            // It is in front, as if it had replaced the first one.
            (
                "route prepend 10.1.2.0/24 via 192.0.2.9 dev up0 mtu 1300",
                KernelEvent::Present(Route { dst, via, mtu: Some(1300) }.into()),
            ),
            (
                "route add 10.1.2.0/24 tos 4 via 192.0.2.9 dev up0 metric 7",
                KernelEvent::Duplicate(Route { dst, via, mtu: None }.into()),
            ),
            ("route del 10.1.2.0/24 tos 4", KernelEvent::Related(Key::Route(dst))),
            (
                "route replace 10.1.2.0/24 via 192.0.2.9 dev up0 mtu 1400",
                KernelEvent::Present(Route { dst, via, mtu: Some(1400) }.into()),
            ),
            (
                "route replace 10.1.2.0/24 nexthop via 192.0.2.9 dev up0 nexthop via 192.0.2.8 \
                 dev up0",
                KernelEvent::Unrepresentable(Key::Route(dst)),
            ),
            (
                "route replace 10.1.2.0/24 via 192.0.2.9 dev up0 mtu 1400 src 192.0.2.1",
                KernelEvent::Inexact(Route { dst, via, mtu: Some(1400) }.into()),
            ),
            (
                "route replace 10.1.2.0/24 via 192.0.2.9 dev up0 proto 241 advmss 1000",
                KernelEvent::Inexact(Route { dst, via, mtu: None }.into()),
            ),
            // A route as the kernel makes it for an address.
            (
                "route replace 10.1.2.0/24 via 192.0.2.9 dev up0 proto kernel src 192.0.2.1",
                KernelEvent::Unrepresentable(Key::Route(dst)),
            ),
            ("route del 10.1.2.0/24", KernelEvent::Deleted(Key::Route(dst))),
            (
                "route add 10.1.2.0/24 via 192.0.2.9 metric 70",
                KernelEvent::Related(Key::Route(dst)),
            ),
            // Changes that may redirect packets.
            (
                "route add 10.1.3.0/24 via 192.0.2.9 table 70",
                KernelEvent::Related(Key::Route("10.1.3.0/24".parse().unwrap())),
            ),
            (
                "rule add to 198.51.100.0/24 table 70",
                KernelEvent::Related(Key::Route("0.0.0.0/0".parse().unwrap())),
            ),
            (
                "-6 rule add from 2001:db8::1 table 70",
                KernelEvent::Related(Key::Route("::/0".parse().unwrap())),
            ),
            ("nexthop del id 9", KernelEvent::Deleted(Key::Nexthop(9))),
            (
                "addr add 10.1.0.1/32 dev up0",
                KernelEvent::Present(
                    Addr { link: link("up0"), address: address("10.1.0.1"), len: 32 }.into(),
                ),
            ),
            (
                "addr del 10.1.0.1/32 dev up0",
                KernelEvent::Deleted(Key::Addr(link("up0"), address("10.1.0.1"))),
            ),
            (
                "-6 route add fd00:1::/64 via 2001:db8::9",
                KernelEvent::Present(
                    Route {
                        dst: "fd00:1::/64".parse().unwrap(),
                        via: Via::Gateway {
                            gateway: address("2001:db8::9"),
                            link: link("up0"),
                            onlink: false,
                        },
                        mtu: None,
                    }
                    .into(),
                ),
            ),
        ] {
            ip(command);
            until(changes, reports(report)).await;
        }
        let unwanted = Route {
            dst: "fd00:1::/64".parse().unwrap(),
            via: Via::Gateway { gateway: address("2001:db8::9"), link: link("up0"), onlink: false },
            mtu: None,
        };
        ip("-6 route change fd00:1::/64 via 2001:db8::9 dev up0 pref high");
        until(changes, reports(KernelEvent::Inexact(unwanted.into()))).await;
        bridge("fdb add 0a:00:00:00:00:09 dev flannel.1 dst 192.0.2.9");
        until(changes, reports(KernelEvent::Present(fdb.into()))).await;
        bridge("fdb del 0a:00:00:00:00:09 dev flannel.1 dst 192.0.2.9");
        until(changes, reports(KernelEvent::Deleted(Key::Fdb(link("flannel.1"), mac)))).await;
    });
}

/// The kernel reports an FDB entry that was put exactly as it is. Otherwise it would be put again
/// and again.
pub(crate) async fn a_put_fdb_entry_is_reported_as_it_is() {
    let kernel = uplink();
    ip("link add flannel.1 type vxlan id 1 dstport 8472");
    ip("link set flannel.1 up");
    let mut changes = kernel.changes().unwrap();
    let mac: MacAddr = "0a:00:00:00:00:09".parse().unwrap();
    let fdb: Object = Fdb { link: link("flannel.1"), mac, dst: address("192.0.2.9") }.into();
    let footprint = Footprint { links: [link("flannel.1")].into(), ..Footprint::default() };
    for _ in 0..2 {
        assert_eq!(kernel.apply(&footprint, &[Change::Put(fdb.clone())]), [Outcome::Done]);
    }
    bridge("fdb replace 0a:00:00:00:00:09 dev flannel.1 dst 192.0.2.9");
    ip("nexthop add id 9 via 192.0.2.9 dev up0");
    let last = |event: &Invalidation| match event {
        Invalidation::Objects(events, _) => {
            events.iter().any(|it| matches!(it, KernelEvent::Present(Object::Nexthop(_))))
        }
        _ => false,
    };
    for event in until(&mut *changes, last).await {
        if let Invalidation::Objects(events, _) = &event {
            let expected = KernelEvent::Present(fdb.clone());
            for reported in events {
                let is_of_fdb = format!("{reported:?}").contains("Fdb");
                assert!(!is_of_fdb || *reported == expected, "{event:?}");
            }
        }
    }
}

#[test]
fn a_put_fdb_entry_is_reported_as_it_is_here() {
    in_netns_async(a_put_fdb_entry_is_reported_as_it_is);
}

#[test]
fn the_process_that_made_a_change_is_named_if_it_still_runs() {
    in_netns_async(|| async {
        // The first socket of a process in a namespace has the process id as its port id.
        let other = NetlinkKernel::open().unwrap();
        let kernel = uplink();
        let mut changes = kernel.changes().unwrap();
        assert!(other.apply(&Footprint::default(), &[Change::Put(route(9))])[0].is_done());
        let changed_by = changed_by(&mut *changes, KernelEvent::Present(route(9))).await.unwrap();
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        // The caller looks up the name, on a thread that may block.
        assert_eq!(changed_by.process, None);
        let found = kernel.name(changed_by.port).unwrap();
        assert_eq!(
            found.to_string(),
            format!("{} (process {})", name.trim_end(), std::process::id())
        );
        assert_eq!(changed_by.port, std::process::id());
        assert_eq!(changed_by.protocol, Some(flannel_core::kernel::ROUTE_PROTOCOL));
        // A second socket has another port id, which is not a process id.
        let second = NetlinkKernel::open().unwrap();
        assert!(second.apply(&Footprint::default(), &[Change::Put(neigh(9))])[0].is_done());
        let changed_by =
            self::changed_by(&mut *changes, KernelEvent::Present(neigh(9))).await.unwrap();
        assert_eq!(kernel.name(changed_by.port), None);
        assert_eq!(changed_by.protocol, None);
        assert!(
            changed_by.to_string().contains(&format!("port id {}", changed_by.port)),
            "{changed_by}"
        );
        ip("route del blackhole 10.1.0.9/32");
        let changed_by =
            self::changed_by(&mut *changes, KernelEvent::Deleted(route(9).key())).await.unwrap();
        assert_eq!(
            changed_by.protocol, None,
            "the protocol of a deleted route does not show which program deleted it"
        );
    });
}

/// The author that is reported for an event.
async fn changed_by(
    changes: &mut dyn Changes,
    report: KernelEvent,
) -> Option<flannel_core::kernel::ChangedBy> {
    loop {
        let invalidation =
            tokio::time::timeout(Duration::from_secs(60), changes.next()).await.unwrap().unwrap();
        if let Invalidation::Objects(reports, by) = invalidation
            && reports.contains(&report)
        {
            return by;
        }
    }
}

#[test]
fn each_attribute_of_a_vxlan_device_that_changes_invalidates_it() {
    in_netns_async(|| async {
        let kernel = uplink();
        ip("link add br0 type bridge");
        ip("link add flannel-v6.1 type vxlan id 1 dstport 8472 local 2001:db8::1 dev up0");
        // The kernel sends no message about these attributes of a device that is down.
        ip("link set flannel-v6.1 up");
        let mut changes = kernel.changes().unwrap();
        for (n, attribute) in [
            "type vxlan id 1 ttl 3",
            "type vxlan id 1 tos 4",
            "type vxlan id 1 df set",
            "type vxlan id 1 flowlabel 7",
            "type vxlan id 1 ageing 60",
            "type vxlan id 1 nolearning",
            "arp off",
            "protodown on",
            "master br0",
        ]
        .into_iter()
        .enumerate()
        {
            ip(&format!("link set flannel-v6.1 {attribute}"));
            // The events before the marked neighbour are about this change.
            let marked = format!("192.0.2.{}", 10 + n);
            ip(&format!("neigh add {marked} lladdr 0a:00:00:00:00:09 dev up0 nud permanent"));
            let mark = Key::Neigh(link("up0"), address(&marked));
            let is_mark = |event: &Invalidation| match event {
                Invalidation::Objects(all, _) => all.iter().any(|report| report.key() == mark),
                _ => false,
            };
            let before = until(&mut *changes, is_mark).await;
            let link = Invalidation::Link(link("flannel-v6.1"));
            assert!(before.contains(&link), "{attribute}: {before:?}");
        }
    });
}

#[test]
fn any_change_of_a_link_invalidates_it() {
    in_netns_async(|| async {
        let kernel = uplink();
        let mut changes = kernel.changes().unwrap();
        for command in [
            "link set up0 mtu 1400",
            "link set up0 down",
            "link set up0 up",
            "link set up0 address 0a:00:00:00:00:01",
            // With the last IPv4 address the kernel deletes all IPv4 routes, without a message for
            // each.
            "addr del 192.0.2.1/24 dev up0",
            "link del up0",
        ] {
            ip(command);
            until(&mut *changes, |invalidation| *invalidation == Invalidation::Link(link("up0")))
                .await;
        }
        // A link that was created later, and a renamed one.
        ip("link add new0 type bridge");
        until(&mut *changes, |invalidation| *invalidation == Invalidation::Link(link("new0")))
            .await;
        ip("link set new0 name old0");
        let before =
            until(&mut *changes, |invalidation| *invalidation == Invalidation::Link(link("old0")))
                .await;
        assert!(before.contains(&Invalidation::Link(link("new0"))), "{before:?}");
        ip("addr add 192.0.2.7/32 dev old0");
        let there = Addr { link: link("old0"), address: address("192.0.2.7"), len: 32 };
        until(&mut *changes, reports(KernelEvent::Present(there.into()))).await;
    });
}

/// The kernel accepts almost any bytes as a name.
#[test]
fn a_link_whose_name_is_not_utf8_invalidates_nothing_else() {
    in_netns_async(|| async {
        let kernel = uplink();
        let mut changes = kernel.changes().unwrap();
        let odd = OsStr::from_bytes(b"od\xff0");
        let ip_of = |args: &[&str]| {
            let args = args.iter().map(|word| if *word == "ODD" { odd } else { OsStr::new(word) });
            assert!(Command::new("ip").args(args).status().unwrap().success());
        };
        ip_of(&["link", "add", "ODD", "type", "veth", "peer", "name", "far1"]);
        ip_of(&["link", "set", "ODD", "up"]);
        ip_of(&["address", "add", "192.0.3.1/24", "dev", "ODD"]);
        ip_of(&["neigh", "add", "192.0.3.9", "lladdr", "0a:00:00:00:00:09", "dev", "ODD"]);
        ip_of(&["route", "add", "198.51.100.0/24", "via", "192.0.3.9"]);
        ip("neigh add 192.0.2.77 lladdr 0a:00:00:00:00:09 dev up0 nud permanent");
        let mark = Key::Neigh(link("up0"), address("192.0.2.77"));
        let is_mark = |report: &KernelEvent| match report {
            KernelEvent::Present(object) => object.key() == mark,
            _ => false,
        };
        let before = until(
            &mut *changes,
            |event| matches!(event, Invalidation::Objects(all, _) if all.iter().any(is_mark)),
        )
        .await;
        assert!(!before.contains(&Invalidation::Everything), "{before:?}");
        assert_eq!(kernel.lookup(address("198.51.100.1")).unwrap(), RouteAnswer::default());
    });
}

#[test]
fn our_own_changes_are_not_reported_however_many() {
    in_netns_async(|| async {
        let kernel = uplink();
        let other = NetlinkKernel::open().unwrap();
        let footprint = Footprint { blackholes: true, ..Footprint::default() };
        let mut changes = kernel.changes().unwrap();
        let ours: Vec<Change> =
            (0..50_000).flat_map(|n| [neigh(n), route(n)]).map(Change::Put).collect();
        assert!(kernel.apply(&footprint, &ours).iter().all(Outcome::is_done));
        assert!(other.apply(&footprint, &[Change::Put(neigh(60_000))])[0].is_done());
        let before = until(&mut *changes, reports(KernelEvent::Present(neigh(60_000)))).await;
        // At the same time the kernel itself changes only links and their link-local addresses.
        let about_ours = |report: &KernelEvent| match report {
            KernelEvent::Present(Object::Neigh(_) | Object::Route(_))
            | KernelEvent::Inexact(_)
            | KernelEvent::Duplicate(_) => true,
            KernelEvent::Deleted(key)
            | KernelEvent::Unrepresentable(key)
            | KernelEvent::Related(key) => {
                matches!(key, Key::Neigh(..))
            }
            _ => false,
        };
        for invalidation in before {
            assert_ne!(invalidation, Invalidation::Everything);
            assert!(
                match &invalidation {
                    Invalidation::Objects(all, _) => !all.iter().any(about_ours),
                    _ => true,
                },
                "{invalidation:?}"
            );
        }
    });
}

#[test]
fn lost_messages_invalidate_everything() {
    in_netns_async(|| async {
        let kernel = uplink();
        let other = NetlinkKernel::open().unwrap();
        let footprint = Footprint::default();
        let mut changes = kernel.changes().unwrap();
        // Makes so many changes that the receive buffer overflows.
        for round in 0.. {
            assert!(round < 100, "the listener's buffer does not overflow");
            let theirs: Vec<Change> =
                (0..20_000).map(|n| Change::Put(neigh(n + round % 2))).collect();
            assert!(other.apply(&footprint, &theirs).iter().all(Outcome::is_done));
            let gone: Vec<Change> =
                (0..20_000).map(|n| Change::Delete(neigh(n + round % 2))).collect();
            assert!(other.apply(&footprint, &gone).iter().all(Outcome::is_done));
            if round >= 4 {
                break;
            }
        }
        until(&mut *changes, |invalidation| *invalidation == Invalidation::Everything).await;
        // Later changes are reported again.
        assert!(other.apply(&footprint, &[Change::Put(neigh(70_000))])[0].is_done());
        until(&mut *changes, reports(KernelEvent::Present(neigh(70_000)))).await;
    });
}

#[test]
fn one_process_manages_two_namespaces() {
    in_netns_async(|| async {
        let namespaces = [Netns::new().unwrap(), Netns::new().unwrap()];
        let kernels = namespaces.each_ref().map(|namespace| {
            namespace.run(|| drop(uplink()));
            NetlinkKernel::open_in(namespace.path()).unwrap()
        });
        let footprint = Footprint {
            blackholes: true,
            networks: vec!["10.1.0.0/16".parse().unwrap()],
            ..Footprint::default()
        };
        let mut changes = kernels[1].changes().unwrap();
        assert!(kernels[0].apply(&footprint, &[Change::Put(route(1))])[0].is_done());
        assert!(kernels[1].apply(&footprint, &[Change::Put(route(2))])[0].is_done());
        assert_eq!(
            kernels[0].snapshot(&footprint).unwrap().iter().collect::<Vec<_>>(),
            [&route(1)]
        );
        assert_eq!(
            kernels[1].snapshot(&footprint).unwrap().iter().collect::<Vec<_>>(),
            [&route(2)]
        );
        // A kernel handle reports the changes in its own namespace, whichever thread calls it.
        namespaces[0].run(|| drop(ip("route add blackhole 10.1.0.8/32")));
        namespaces[1].run(|| drop(ip("route add blackhole 10.1.0.9/32")));
        let before = until(&mut *changes, reports(KernelEvent::Present(route(9)))).await;
        let is_of_the_other = reports(KernelEvent::Present(route(8)));
        assert!(!before.iter().any(is_of_the_other), "{before:?}");
    });
}

#[test]
fn the_path_of_a_missing_namespace_is_reported() {
    let error = NetlinkKernel::open_in("/nowhere/netns").unwrap_err();
    assert!(error.to_string().contains("/nowhere/netns"), "{error}");
    assert!(NetlinkKernel::open_in("/proc/self/status").is_err());
}

#[test]
fn listening_may_begin_outside_a_runtime() {
    in_netns_async(|| async {
        let kernel = uplink();
        let mut changes =
            std::thread::scope(|scope| scope.spawn(|| kernel.changes().unwrap()).join()).unwrap();
        ip("route add blackhole 10.1.0.9/32");
        until(&mut *changes, reports(KernelEvent::Present(route(9)))).await;
    });
}
