//! Every kind of object is created, changed in place, put again and deleted. iproute2 shows the
//! result.

mod device;
mod entries;
mod settings;

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, NexthopBlock, Outcome};
use flannel_core::object::{
    Addr, Change, Fdb, Link, LinkName, MacAddr, Neigh, Nexthop, Object, Route, Via, Vxlan,
};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{Netns, bridge, in_netns, ip};
use libc::{ENETUNREACH, ENODEV};
use serde_json::{Value, json};

fn name(text: &str) -> LinkName {
    text.parse().unwrap()
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn mac(text: &str) -> MacAddr {
    text.parse().unwrap()
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or(json!([]))
}

/// Two uplinks with addresses.
pub(crate) fn uplinks() -> NetlinkKernel {
    for n in 0..2 {
        ip(&format!("link add up{n} type veth peer name far{n}"));
        ip(&format!("link set far{n} up"));
        ip(&format!("addr add 192.0.{}.1/24 dev up{n}", 2 + n));
        ip(&format!("addr add 2001:db8:{n}::1/64 dev up{n} nodad"));
        ip(&format!("link set up{n} up"));
    }
    NetlinkKernel::open().unwrap()
}

fn footprint() -> Footprint {
    Footprint {
        links: [name("flannel.1")].into(),
        networks: vec!["10.1.0.0/16".parse().unwrap(), "fd00:1::/32".parse().unwrap()],
        routes_on: [name("up0")].into(),
        blackholes: true,
        ..Footprint::default()
    }
}

pub(crate) fn device(family: Family) -> (Link, Vxlan) {
    let local = if family == Family::V4 { address("192.0.2.1") } else { address("2001:db8::1") };
    let vxlan = Vxlan {
        vni: 1,
        port: 8472,
        mac: mac("0a:00:00:00:00:01"),
        local: Some(local),
        lower: Some(name("up0")),
        learning: false,
        gbp: false,
    };
    (link(mtu(family), true, vxlan), vxlan)
}

/// The MTU of a tunnel over a device with an MTU of 1500 bytes. The kernel refuses a larger MTU.
fn mtu(family: Family) -> u32 {
    if family == Family::V4 { 1450 } else { 1430 }
}

fn link(mtu: u32, up: bool, vxlan: Vxlan) -> Link {
    Link { name: name("flannel.1"), mtu, up, kind: vxlan.into() }
}

pub(crate) fn apply(kernel: &NetlinkKernel, change: Change) -> Result<(), KernelError> {
    kernel.apply(&footprint(), &[change]).remove(0).into_result()
}

/// Puts the object twice, and checks that a snapshot has it.
fn put(kernel: &NetlinkKernel, object: impl Into<Object>) {
    let object = object.into();
    for _ in 0..2 {
        apply(kernel, Change::Put(object.clone()))
            .unwrap_or_else(|error| panic!("put {object}: {error}"));
    }
    let snapshot = kernel.snapshot(&footprint()).unwrap();
    assert_eq!(snapshot.get(&object.key()), Some(&object));
}

/// Deletes the object twice, and checks that a snapshot lacks it.
fn delete(kernel: &NetlinkKernel, object: impl Into<Object>) {
    let object = object.into();
    for _ in 0..2 {
        apply(kernel, Change::Delete(object.clone()))
            .unwrap_or_else(|error| panic!("delete {object}: {error}"));
    }
    assert_eq!(kernel.snapshot(&footprint()).unwrap().get(&object.key()), None);
}

/// A route through the tunnel.
fn peer_route(family: Family) -> Route {
    let (dst, gateway) = match family {
        Family::V4 => ("10.1.2.0/24", "10.1.2.0"),
        Family::V6 => ("fd00:1:2::/64", "fd00:1:2::"),
    };
    let via = Via::Gateway { gateway: address(gateway), link: name("flannel.1"), onlink: true };
    Route { dst: dst.parse().unwrap(), via, mtu: None }
}

/// Runs the test for each family in a namespace of its own.
pub(crate) fn for_both_families(test: fn(&NetlinkKernel, Family)) {
    for family in Family::BOTH {
        Netns::new().unwrap().run(|| test(&uplinks(), family));
    }
}

fn shown_addresses() -> Vec<(String, u64)> {
    let shown = json_of(&ip("-j addr show dev flannel.1"));
    shown[0]["addr_info"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|a| a["scope"] == "global")
        .map(|a| (a["local"].as_str().unwrap().to_owned(), a["prefixlen"].as_u64().unwrap()))
        .collect()
}

#[test]
fn addresses_are_put_replaced_and_deleted() {
    in_netns(|| {
        let kernel = uplinks();
        put(&kernel, device(Family::V4).0);
        for (text, len) in [("10.1.5.0", 32u8), ("fd00:1:5::", 128)] {
            let addr = Addr { link: name("flannel.1"), address: address(text), len };
            put(&kernel, addr);
            assert_eq!(shown_addresses(), [(text.to_owned(), u64::from(len))]);
            let shown = ip("-j addr show dev flannel.1 scope global");
            assert!(!shown.contains("tentative"), "usable at once: {shown}");
            let shorter = Addr { len: len - 8, ..addr };
            put(&kernel, shorter);
            assert_eq!(shown_addresses(), [(text.to_owned(), u64::from(len - 8))]);
            put(&kernel, addr);
            assert_eq!(shown_addresses(), [(text.to_owned(), u64::from(len))]);
            // An address with another far end, or of scope host, is replaced. Routes on the device
            // survive that.
            let dst = if addr.address.is_ipv4() { "10.1.7.0/24" } else { "fd00:1:7::/64" };
            let delete_and = format!("addr del {text}/{len} dev flannel.1");
            let odd = match addr.address {
                IpAddr::V4(_) => vec!["10.1.5.0/32 scope host", "10.1.5.0 peer 10.1.5.7/32"],
                IpAddr::V6(_) => vec!["fd00:1:5:: peer fd00:1:5::7/128"],
            };
            for odd in odd {
                ip(&delete_and);
                ip(&format!("addr add {odd} dev flannel.1"));
                ip(&format!("route replace {dst} dev flannel.1"));
                put(&kernel, addr);
                let shown = ip("addr show dev flannel.1");
                assert!(!shown.contains("peer") && !shown.contains("scope host"), "{odd}: {shown}");
                assert_eq!(shown_addresses(), [(text.to_owned(), u64::from(len))], "{odd}");
                let family = if addr.address.is_ipv4() { 4 } else { 6 };
                let routes = ip(&format!("-{family} route show dev flannel.1 proto boot"));
                assert_eq!(routes.lines().count(), 1, "{odd}: {routes}");
                // A deletion removes it, whatever its far end and scope are.
                ip(&delete_and);
                ip(&format!("addr add {odd} dev flannel.1"));
                delete(&kernel, addr);
                assert_eq!(shown_addresses(), [], "{odd}");
                put(&kernel, addr);
            }
            // A deletion of an address with another prefix length leaves this one.
            apply(&kernel, Change::Delete(shorter.into())).unwrap();
            assert_eq!(shown_addresses(), [(text.to_owned(), u64::from(len))]);
            delete(&kernel, addr);
            assert_eq!(shown_addresses(), []);
        }
    });
}

#[test]
fn unrepresentable_attributes_are_noted_and_repaired() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            let (link, _) = device(family);
            let own = if family == Family::V4 { "10.1.5.0" } else { "fd00:1:5::" };
            put(kernel, link.clone());
            let addr = Addr { link: link.name, address: address(own), len: family.bits() };
            put(kernel, addr);
            let (dst, gateway) = match family {
                Family::V4 => ("10.1.7.0/24", "10.1.7.0"),
                Family::V6 => ("fd00:1:7::/64", "fd00:1:7::"),
            };
            let via = Via::Gateway { gateway: address(gateway), link: link.name, onlink: true };
            let route = Route { dst: dst.parse().unwrap(), via, mtu: None };
            put(kernel, route);
            let neigh =
                Neigh { link: link.name, address: address(gateway), mac: mac("0a:00:00:00:00:07") };
            put(kernel, neigh);
            let far = if family == Family::V4 { "192.0.2.7" } else { "2001:db8::7" };
            let fdb = Fdb { link: link.name, mac: neigh.mac, dst: address(far) };
            put(kernel, fdb);
            ip("link add name br0 type bridge");
            let set =
                |what: &str| (Object::from(link.clone()), format!("ip link set flannel.1 {what}"));
            let mark = |mark: &str| {
                let command = format!(
                    "ip neigh replace {gateway} lladdr {} dev flannel.1 nud permanent {mark}",
                    neigh.mac
                );
                (Object::from(neigh), command)
            };
            let address = |rest: &str| {
                let command = format!(
                    "ip addr change {own}/{} dev flannel.1 valid_lft 900 preferred_lft {rest}",
                    addr.len
                );
                (Object::from(addr), command)
            };
            let replace = |what: &str| {
                let command = format!(
                    "ip route replace {dst} via {gateway} dev flannel.1 onlink proto 241 {what}"
                );
                (Object::from(route), command)
            };
            let entry = |mark: &str| {
                // The kernel does not add `extern_learn` to an existing entry.
                let delete = format!("bridge fdb del {} dev flannel.1", fdb.mac);
                let add = format!("bridge fdb add {} dev flannel.1 dst {far} self", fdb.mac);
                (Object::from(fdb), format!("{delete}\n{add} permanent {mark}"))
            };
            let mut damage = vec![
                set("type vxlan id 1 ttl 3"),
                set("type vxlan id 1 tos 4"),
                set("type vxlan id 1 df set"),
                set("type vxlan id 1 ageing 60"),
                set("arp off"),
                set("master br0"),
                set("protodown on"),
                set("txqueuelen 1000"),
                mark("router"),
                mark("extern_learn"),
                entry("sticky"),
                entry("router"),
                entry("extern_learn"),
                address("900"),
                address("0"),
                replace("advmss 900"),
            ];
            if family == Family::V6 {
                damage.extend([set("type vxlan id 1 flowlabel 7"), replace("expires 900")]);
            }
            for (object, command) in damage {
                for line in command.lines() {
                    match line.split_once(' ').unwrap() {
                        ("ip", args) => ip(args),
                        (_, args) => bridge(args),
                    };
                }
                let there = kernel.snapshot(&footprint()).unwrap();
                assert!(there.is_inexact(&object.key()), "{command}: {there:?}");
                apply(kernel, Change::Put(object.clone())).unwrap();
                let there = kernel.snapshot(&footprint()).unwrap();
                assert!(there.get(&object.key()) == Some(&object), "{command}: {there:?}");
                assert!(!there.is_inexact(&object.key()), "{command}: {there:?}");
            }
        });
    });
}

/// As hardening guides have it. The setting of `all` writes that of each device.
#[test]
fn an_ipv6_address_is_put_on_a_device_with_ipv6_off() {
    in_netns(|| {
        let kernel = uplinks();
        let settings = std::path::Path::new("/proc/sys/net/ipv6/conf");
        std::fs::write(settings.join("default/disable_ipv6"), "1").unwrap();
        let (wanted, _) = device(Family::V6);
        put(&kernel, wanted);
        let addr = Addr { link: name("flannel.1"), address: address("fd00:1:0:1::"), len: 128 };
        put(&kernel, addr);
        let one = [("fd00:1:0:1::".to_owned(), 128)];
        assert_eq!(shown_addresses(), one);
        std::fs::write(settings.join("all/disable_ipv6"), "1").unwrap();
        assert_eq!(shown_addresses(), []);
        put(&kernel, addr);
        assert_eq!(shown_addresses(), one);
    });
}

#[test]
fn of_several_prefix_lengths_in_one_call_the_last_one_stays() {
    in_netns(|| {
        let kernel = uplinks();
        put(&kernel, device(Family::V4).0);
        for (text, len) in [("10.1.5.0", 32u8), ("fd00:1:5::", 128)] {
            let addr = |len| {
                Change::Put(Addr { link: name("flannel.1"), address: address(text), len }.into())
            };
            let outcomes = kernel.apply(&footprint(), &[addr(len - 8), addr(len - 4), addr(len)]);
            assert_eq!(outcomes, vec![Outcome::Done; 3]);
            assert!(shown_addresses().ends_with(&[(text.to_owned(), u64::from(len))]));
        }
        assert_eq!(shown_addresses().len(), 2);
    });
}

#[test]
fn a_route_replaces_a_last_resort_route() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            let (link, _) = device(family);
            put(kernel, link.clone());
            let (dst, gateway) = match family {
                Family::V4 => ("10.1.7.0/24", "10.1.7.0"),
                Family::V6 => ("fd00:1:7::/64", "fd00:1:7::"),
            };
            let route = |via| Route { dst: dst.parse().unwrap(), via, mtu: None };
            put(kernel, route(Via::LastResort));
            put(
                kernel,
                route(Via::Gateway { gateway: address(gateway), link: link.name, onlink: true }),
            );
            let shown = ip(&format!("{} route show {dst}", flag(family)));
            assert!(shown.lines().count() == 1 && shown.contains("flannel.1"), "{shown}");
            put(kernel, route(Via::LastResort));
            let shown = ip(&format!("{} route show {dst}", flag(family)));
            assert!(shown.lines().count() == 1 && shown.contains("blackhole"), "{shown}");
        });
    });
}

#[test]
fn nexthops_are_read_while_other_programs_change_theirs() {
    const COUNT: u32 = 4_000;
    in_netns(|| {
        let kernel = uplinks();
        let block = NexthopBlock::choose(&kernel, &footprint()).unwrap().0;
        let footprint = Footprint { nexthops: block, ..footprint() };
        let nexthop = |id: u32, last: u8| {
            Object::from(Nexthop {
                id,
                link: name("up0"),
                gateway: [192, 0, 2, last].into(),
                onlink: true,
            })
        };
        let ids = (0..COUNT).map(|n| block.unwrap().first() + n);
        let ours: Vec<Change> = ids.map(|id| Change::Put(nexthop(id, 7))).collect();
        assert!(kernel.apply(&footprint, &ours).iter().all(Outcome::is_done));
        let over = AtomicBool::new(false);
        let theirs = NetlinkKernel::open().unwrap();
        std::thread::scope(|scope| {
            let churn = scope.spawn(|| {
                let mut changes = 0;
                while !over.load(Ordering::Relaxed) {
                    let change = Change::Put(nexthop(77, 8 + (changes % 2) as u8));
                    apply(&theirs, change).unwrap();
                    changes += 1;
                }
                changes
            });
            let read: Vec<_> = (0..20)
                .map(|_| (kernel.snapshot(&footprint), kernel.nexthop_ids(&footprint)))
                .collect();
            over.store(true, Ordering::Relaxed);
            for (state, ids) in read {
                let state = state.unwrap();
                assert!(
                    ours.iter()
                        .all(|change| state.get(&change.object().key()) == Some(change.object()))
                );
                assert_eq!(state.len(), COUNT as usize);
                assert!(ids.unwrap().usable);
            }
            assert!(churn.join().unwrap() > 100, "the table did not change");
        });
    });
}

#[test]
fn learned_and_foreign_entries_are_not_ours() {
    in_netns(|| {
        let kernel = uplinks();
        put(&kernel, device(Family::V4).0);
        ip("neigh add 10.1.7.0 lladdr 0a:00:00:00:00:70 dev flannel.1 nud reachable");
        bridge("fdb add 0a:00:00:00:00:70 dev flannel.1 dst 192.0.2.70 dynamic");
        ip("neigh add 192.0.2.9 lladdr 0a:00:00:00:00:09 dev up0 nud permanent");
        ip("route add 10.1.9.0/24 via 192.0.2.9 dev up0");
        ip("route add 10.1.10.0/24 via 192.0.2.9 dev up0 metric 7 proto 241");
        ip("route add 10.1.11.0/24 via 192.0.2.9 dev up0 table 7 proto 241");
        ip("route add 10.9.0.0/24 via 192.0.2.9 dev up0 proto 241");
        ip("nexthop add id 5 via 192.0.2.9 dev up0");
        ip("nexthop add id 6 via 192.0.3.9 dev up1 proto 241");
        let snapshot = kernel.snapshot(&footprint()).unwrap();
        assert_eq!(snapshot.iter().cloned().collect::<Vec<_>>(), [device(Family::V4).0.into()]);
        // These have another protocol, so a deletion by flannel does not match them.
        let theirs =
            Via::Gateway { gateway: address("192.0.2.9"), link: name("up0"), onlink: false };
        let route = Route { dst: "10.1.9.0/24".parse().unwrap(), via: theirs, mtu: None };
        apply(&kernel, Change::Delete(route.into())).unwrap();
        let nexthop =
            Nexthop { id: 5, link: name("up0"), gateway: address("192.0.2.9"), onlink: false };
        apply(&kernel, Change::Delete(nexthop.into())).unwrap();
        assert!(ip("route show").contains("10.1.9.0/24"));
        assert!(ip("nexthop show").contains("id 5"));
    });
}

#[test]
fn nexthop_objects_are_put_replaced_and_deleted() {
    in_netns(|| for_both_families(nexthop_objects));
}

pub(crate) fn nexthop_objects(kernel: &NetlinkKernel, family: Family) {
    put(kernel, device(family).0);
    let (old, new, dst) = match family {
        Family::V4 => ("10.1.2.0", "10.1.3.0", "10.1.2.0/24"),
        Family::V6 => ("fd00:1:2::", "fd00:1:3::", "fd00:1:2::/64"),
    };
    let nexthop = |gateway| Nexthop {
        id: 77,
        link: name("flannel.1"),
        gateway: address(gateway),
        onlink: true,
    };
    let shown = || json_of(&ip("-j nexthop show id 77"))[0].clone();
    put(kernel, nexthop(old));
    let route = |mtu| Route { dst: dst.parse().unwrap(), via: Via::Nexthop(77), mtu };
    put(kernel, route(None));
    // No snapshot shows the MTU before it is removed.
    for mtu in [Some(1350), None] {
        apply(kernel, Change::Put(route(mtu).into())).unwrap();
    }
    let want = Object::from(route(None));
    let there = kernel.snapshot(&footprint()).unwrap();
    assert_eq!(there.get(&want.key()), Some(&want));
    assert_eq!(shown()["gateway"], old);
    assert_eq!(shown()["dev"], "flannel.1");
    assert_eq!(shown()["flags"], json!(["onlink"]));
    assert_eq!(shown()["protocol"], "241");
    put(kernel, nexthop(new));
    assert_eq!(shown()["gateway"], new);
    assert!(
        ip(&format!("{} route show {dst}", flag(family))).contains("nhid 77"),
        "the route still uses it"
    );
    delete(kernel, nexthop(new));
    // The kernel deleted the route with it. The deletion of an absent route succeeds.
    delete(kernel, route(None));
}

fn flag(family: Family) -> &'static str {
    if family == Family::V4 { "-4" } else { "-6" }
}

#[test]
fn a_failure_in_the_middle_of_a_batch_affects_no_other_change() {
    in_netns(|| {
        let kernel = uplinks();
        put(&kernel, device(Family::V4).0);
        let route = |n: u8, onlink| {
            let via = Via::Gateway {
                gateway: IpAddr::from([10, 1, n, 0]),
                link: name("flannel.1"),
                onlink,
            };
            let dst = format!("10.1.{n}.0/24").parse().unwrap();
            Change::Put(Route { dst, via, mtu: None }.into())
        };
        let missing = Neigh {
            link: name("flannel.9"),
            address: address("10.1.1.1"),
            mac: mac("0a:00:00:00:00:01"),
        };
        let mut changes: Vec<Change> = (0..250).map(|n| route(n, n != 100)).collect();
        changes.insert(200, Change::Put(missing.into()));
        let outcomes = kernel.apply(&footprint(), &changes);
        assert_eq!(outcomes.len(), 251);
        let failed: Vec<usize> = (0..251).filter(|n| !outcomes[*n].is_done()).collect();
        assert_eq!(failed, [100, 200]);
        let Outcome::Failed(error) = &outcomes[100] else { panic!("{:?}", outcomes[100]) };
        assert!(error.is(ENETUNREACH), "{error}");
        assert!(
            error.detail().is_some_and(|text| text.contains("gateway")),
            "the kernel's text: {error}"
        );
        let absent = KernelError::explained(ENODEV, "no interface named flannel.9");
        assert_eq!(outcomes[200], Outcome::Failed(absent));
        let shown = json_of(&ip("-j route show dev flannel.1 proto 241"));
        assert_eq!(shown.as_array().unwrap().len(), 249);
    });
}
