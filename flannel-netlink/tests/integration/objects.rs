//! Every kind of object is created, changed in place, put again and deleted. iproute2 shows the
//! result.

use libc::{EEXIST, ENETUNREACH, ENODEV};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, NexthopBlock, Outcome};
use flannel_core::object::{
    Addr, Change, Fdb, Link, LinkName, MacAddr, Neigh, Nexthop, Object, Route, State, Via, Vxlan,
};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::foreign::{RuleAction, Share};
use flannel_netlink::testing::{Netns, bridge, in_netns, ip};
use serde_json::{Value, json};
use test_support::guest::in_uml;

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
fn uplinks() -> NetlinkKernel {
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

fn device(family: Family) -> (Link, Vxlan) {
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

/// The MTU of a tunnel over a device with an MTU of 1500 bytes. The kernel refuses a larger one.
fn mtu(family: Family) -> u32 {
    if family == Family::V4 { 1450 } else { 1430 }
}

fn link(mtu: u32, up: bool, vxlan: Vxlan) -> Link {
    Link { name: name("flannel.1"), mtu, up, kind: vxlan.into() }
}

fn apply(kernel: &NetlinkKernel, change: Change) -> Result<(), KernelError> {
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

#[test]
fn the_check_of_the_privilege_and_of_the_kernel_makes_no_device() {
    in_netns(|| {
        let kernel = uplinks();
        let devices = || json_of(&ip("-j link")).as_array().unwrap().len();
        let before = devices();
        let (wanted, _) = device(Family::V4);
        for links in [&[] as &[Link], std::slice::from_ref(&wanted)] {
            kernel.may_change(links).unwrap();
        }
        // With the device in place too.
        put(&kernel, wanted.clone());
        kernel.may_change(&[wanted]).unwrap();
        assert_eq!(devices(), before + 1);
    });
}

/// Runs the test for each family in a namespace of its own.
pub(crate) fn for_both_families(test: fn(&NetlinkKernel, Family)) {
    for family in Family::BOTH {
        Netns::new().unwrap().run(|| test(&uplinks(), family));
    }
}

fn shown_link() -> Value {
    json_of(&ip("-j -d link show dev flannel.1"))[0].clone()
}

/// A VRF looks up the packets of its ports in its own table, which has no routes to pods.
#[test]
fn a_device_leaves_a_vrf_in_place() {
    in_uml(&["ipv6", "veth", "vxlan", "vrf"], || {
        in_netns(|| {
            for_both_families(|kernel, family| {
                let (wanted, _) = device(family);
                put(kernel, wanted.clone());
                let index = shown_link()["ifindex"].clone();
                ip("link add vrf0 type vrf table 9");
                ip("link set flannel.1 master vrf0");
                assert!(shown_link()["master"] == "vrf0");
                put(kernel, wanted);
                let shown = shown_link();
                assert!(shown["master"].is_null() && shown["ifindex"] == index, "{shown}");
                ip("link del vrf0");
            });
        });
    });
}

#[test]
fn a_device_has_the_attributes_that_go_flannel_sets() {
    in_netns(|| for_both_families(a_device_has_all_attributes));
}

fn a_device_has_all_attributes(kernel: &NetlinkKernel, family: Family) {
    let (wanted, vxlan) = device(family);
    put(kernel, wanted.clone());
    let shown = shown_link();
    assert_eq!(shown["mtu"], mtu(family));
    assert_eq!(shown["address"], "0a:00:00:00:00:01");
    assert!(shown["flags"].as_array().unwrap().contains(&json!("UP")), "{shown}");
    assert!(shown["txqlen"].is_null() || shown["txqlen"] == 0, "{shown}");
    let data = &shown["linkinfo"]["info_data"];
    assert_eq!(shown["linkinfo"]["info_kind"], "vxlan");
    assert_eq!(
        (&data["id"], &data["port"], &data["link"]),
        (&json!(1), &json!(8472), &json!("up0"))
    );
    let local = vxlan.local.unwrap().to_string();
    assert!(data["local"] == *local || data["local6"] == *local, "{data}");
    assert_eq!(data["learning"], false);
    assert_eq!(data["udp_zero_csum6_rx"], false);
    assert!(data["gbp"].is_null(), "{data}");
    let accept_ra = std::fs::read_to_string("/proc/sys/net/ipv6/conf/flannel.1/accept_ra");
    assert_eq!(accept_ra.unwrap().trim(), "0");
    delete(kernel, wanted);
}

#[test]
fn a_device_changes_in_place_and_keeps_its_routes() {
    in_netns(|| for_both_families(a_device_changes));
}

fn a_device_changes(kernel: &NetlinkKernel, family: Family) {
    let (wanted, vxlan) = device(family);
    put(kernel, wanted.clone());
    let index = shown_link()["ifindex"].clone();
    let route = peer_route(family);
    put(kernel, route);
    let other = if family == Family::V4 { address("192.0.3.1") } else { address("2001:db8:1::1") };
    for changed in [
        link(1400, true, vxlan),
        link(mtu(family), true, Vxlan { mac: mac("0a:00:00:00:00:02"), ..vxlan }),
        link(mtu(family), true, Vxlan { local: Some(other), ..vxlan }),
        link(mtu(family), true, Vxlan { local: None, ..vxlan }),
        link(mtu(family), true, Vxlan { lower: Some(name("up1")), ..vxlan }),
        link(mtu(family), true, Vxlan { learning: true, ..vxlan }),
        link(
            1300,
            true,
            Vxlan { local: Some(other), lower: Some(name("up1")), learning: true, ..vxlan },
        ),
        wanted.clone(),
    ] {
        put(kernel, changed.clone());
        assert_eq!(shown_link()["ifindex"], index, "{changed:?} in place");
        let snapshot = kernel.snapshot(&footprint()).unwrap();
        assert!(snapshot.get(&Object::from(route).key()).is_some(), "{changed:?} keeps routes");
    }
    put(kernel, link(mtu(family), false, vxlan));
    put(kernel, wanted);
    assert_eq!(shown_link()["ifindex"], index, "down and up in place");
}

#[test]
fn a_device_with_another_identity_is_created_again() {
    in_netns(|| {
        let kernel = uplinks();
        let (wanted, vxlan) = device(Family::V4);
        put(&kernel, wanted);
        for changed in [
            Vxlan { vni: 2, ..vxlan },
            Vxlan { port: 4789, ..vxlan },
            Vxlan { gbp: true, ..vxlan },
            Vxlan { local: Some(address("2001:db8::1")), ..vxlan },
            Vxlan { lower: None, ..vxlan },
        ] {
            let index = shown_link()["ifindex"].clone();
            put(&kernel, link(1430, true, changed));
            assert_ne!(shown_link()["ifindex"], index, "{changed:?}");
        }
        // Attributes that flannel's devices lack and the kernel cannot reset.
        for alien in [
            "group 239.0.0.1",
            "ttl inherit",
            "maxaddr 10",
            "proxy",
            "rsc",
            "l2miss",
            "l3miss",
            "noudpcsum",
            "udp6zerocsumtx",
            "udp6zerocsumrx",
            "srcport 1000 2000",
            "remcsumtx",
            "remcsumrx",
        ] {
            ip("link del flannel.1");
            let addresses = "dstport 8472 local 192.0.2.1 dev up0 nolearning";
            ip(&format!("link add flannel.1 type vxlan id 1 {addresses} {alien}"));
            let index = shown_link()["ifindex"].clone();
            put(&kernel, link(1430, true, vxlan));
            assert_ne!(shown_link()["ifindex"], index, "{alien}");
        }
    });
}

#[test]
fn a_renamed_device_gets_its_name_back_and_keeps_its_objects() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            let (wanted, _) = device(family);
            put(kernel, wanted.clone());
            let index = shown_link()["ifindex"].clone();
            let route = peer_route(family);
            put(kernel, route);
            ip("link set flannel.1 name stray0");
            put(kernel, wanted.clone());
            assert_eq!(shown_link()["ifindex"], index);
            let there = kernel.snapshot(&footprint()).unwrap();
            assert!(there.get(&Object::from(route).key()).is_some(), "{there:?}");
            // Another device took its name.
            ip("link set flannel.1 name stray0 mtu 1300");
            ip("link add flannel.1 type vxlan id 2 dev up0 dstport 8472");
            put(kernel, wanted.clone());
            assert_eq!(
                (&shown_link()["ifindex"], &shown_link()["mtu"]),
                (&index, &json!(mtu(family)))
            );
            // A foreign device stays, and the error names it.
            ip("link set flannel.1 name stray0 address 0a:00:00:00:00:99");
            let error = apply(kernel, Change::Put(wanted.into())).unwrap_err();
            assert!(error.is(EEXIST), "{error}");
            assert!(
                error.to_string().contains("stray0 has the VNI 1 and the UDP port 8472"),
                "{error}"
            );
            assert_eq!(json_of(&ip("-j link show dev stray0"))[0]["ifindex"], index);
        });
    });
}

#[test]
fn a_foreign_device_with_the_name_of_ours_stays() {
    in_netns(|| {
        let kernel = uplinks();
        ip("link add flannel.1 type bridge");
        ip("addr add 10.1.0.1/24 dev flannel.1");
        ip("link set flannel.1 up");
        let error = apply(&kernel, Change::Put(device(Family::V4).0.into())).unwrap_err();
        assert!(error.is(EEXIST), "{error}");
        assert!(
            error.to_string().contains("flannel.1") && error.to_string().contains("bridge"),
            "{error}"
        );
        apply(&kernel, Change::Delete(device(Family::V4).0.into())).unwrap();
        assert_eq!(shown_link()["linkinfo"]["info_kind"], "bridge");
        let footprint = Footprint {
            nexthops: NexthopBlock::choose(&kernel, &footprint()).unwrap().0,
            ..footprint()
        };
        let id = footprint.nexthops.unwrap().first();
        ip("route add 10.1.7.0/24 via 10.1.0.7 dev flannel.1 proto 241");
        ip("route add 10.1.8.0/24 via 10.1.0.7 dev flannel.1");
        ip(&format!("nexthop add id {id} via 10.1.0.9 dev flannel.1 proto 241"));
        assert_eq!(kernel.snapshot(&footprint).unwrap(), State::default(), "nothing on it is ours");
    });
}

fn shown_addresses() -> Vec<(String, u64)> {
    let shown = json_of(&ip("-j addr show dev flannel.1"));
    let all = shown[0]["addr_info"].as_array().unwrap().iter();
    let global = all.filter(|a| a["scope"] == "global");
    global
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
fn neighbours_and_fdb_entries_are_put_replaced_and_deleted() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let (a, d, e) = match family {
                Family::V4 => ("10.1.2.0", "192.0.2.7", "192.0.2.8"),
                Family::V6 => ("fd00:1:2::", "2001:db8::7", "2001:db8::8"),
            };
            let shown = || json_of(&ip("-j neigh show dev flannel.1 nud permanent"));
            for mac in [mac("0a:00:00:00:00:07"), mac("0a:00:00:00:00:08")] {
                put(kernel, Neigh { link: name("flannel.1"), address: address(a), mac });
                assert_eq!(shown()[0]["dst"], a);
                assert_eq!(shown()[0]["lladdr"], mac.to_string());
            }
            let neigh = Neigh {
                link: name("flannel.1"),
                address: address(a),
                mac: mac("0a:00:00:00:00:08"),
            };
            delete(kernel, neigh);
            assert_eq!(shown().as_array().unwrap().len(), 0);

            let shown = || json_of(&bridge("-j fdb show dev flannel.1"));
            let fdb = |dst| Fdb {
                link: name("flannel.1"),
                mac: mac("0a:00:00:00:00:07"),
                dst: address(dst),
            };
            for dst in [d, e] {
                put(kernel, fdb(dst));
                assert_eq!(
                    (&shown()[0]["dst"], &shown()[0]["mac"]),
                    (&json!(dst), &json!("0a:00:00:00:00:07"))
                );
                assert_eq!(
                    (&shown()[0]["state"], shown()[1].is_null()),
                    (&json!("permanent"), true)
                );
            }
            // An FDB entry that uses nexthop objects would keep them if it was only put.
            ip(&format!("nexthop add id 78 via {d} fdb"));
            ip("nexthop add id 79 group 78 fdb");
            let diverted = || {
                bridge("fdb del 0a:00:00:00:00:07 dev flannel.1");
                bridge("fdb add 0a:00:00:00:00:07 dev flannel.1 nhid 79 self permanent");
                assert!(shown()[0]["dst"].is_null(), "{}", shown());
            };
            diverted();
            let is_inexact = || {
                let snapshot = kernel.snapshot(&footprint()).unwrap();
                let found =
                    snapshot.iter().find(|object| matches!(object, Object::Fdb(_))).cloned();
                found.filter(|found| snapshot.is_inexact(&found.key()))
            };
            assert!(is_inexact().is_some());
            put(kernel, fdb(e));
            assert_eq!((&shown()[0]["dst"], shown()[1].is_null()), (&json!(e), true));
            assert_eq!(is_inexact(), None);
            // An undesired entry is deleted, whatever its attributes are.
            for odd in [
                "nhid 79 self permanent",
                "via up1 self permanent",
                "port 999 vni 7 self permanent",
                "self static",
            ] {
                bridge("fdb del 0a:00:00:00:00:07 dev flannel.1");
                let dst = if odd.contains("nhid") { String::new() } else { format!("dst {d}") };
                bridge(&format!("fdb add 0a:00:00:00:00:07 dev flannel.1 {dst} {odd}"));
                delete(kernel, is_inexact().expect(odd));
                assert_eq!(shown().as_array().unwrap().len(), 0, "{odd}");
                bridge(&format!("fdb add 0a:00:00:00:00:07 dev flannel.1 {dst} {odd}"));
                assert!(is_inexact().is_some(), "{odd}");
                put(kernel, fdb(e));
                assert_eq!(
                    (&shown()[0]["dst"], &shown()[0]["port"]),
                    (&json!(e), &Value::Null),
                    "{odd}"
                );
                assert_eq!(
                    (is_inexact(), &shown()[0]["state"]),
                    (None, &json!("permanent")),
                    "{odd}"
                );
            }
            apply(kernel, Change::Delete(fdb(d).into())).unwrap();
            assert_eq!(shown()[0]["dst"], e, "an entry with another destination stays");
            delete(kernel, fdb(e));
            assert_eq!(shown().as_array().unwrap().len(), 0);

            for (mac, dst) in
                [("00:00:00:00:00:00", d), ("00:00:00:00:00:00", e), ("01:00:5e:00:00:01", e)]
            {
                bridge(&format!("fdb append {mac} dev flannel.1 dst {dst} self permanent"));
            }
            let strangers = kernel.snapshot(&footprint()).unwrap();
            let strangers = strangers.iter().filter(|object| matches!(object, Object::Fdb(_)));
            strangers.for_each(|object| apply(kernel, Change::Delete(object.clone())).unwrap());
            assert_eq!(shown().as_array().unwrap().len(), 0, "with all their destinations");
        });
    });
}

#[test]
fn proxy_entries_on_our_device_are_deleted() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let (a, b) = match family {
                Family::V4 => ("10.1.2.0", "10.1.3.0"),
                Family::V6 => ("fd00:1:2::", "fd00:1:3::"),
            };
            let shown = || ip(&format!("{} neigh show proxy", flag(family)));
            let mac = mac("0a:00:00:00:00:07");
            let neigh = Object::from(Neigh { link: name("flannel.1"), address: address(a), mac });
            put(kernel, neigh.clone());
            for change in [Change::Put(neigh.clone()), Change::Delete(neigh.clone())] {
                ip(&format!("neigh add proxy {a} dev flannel.1"));
                let there = kernel.snapshot(&footprint()).unwrap();
                assert_eq!(there.get(&neigh.key()), Some(&neigh));
                assert!(there.is_inexact(&neigh.key()), "{change}");
                apply(kernel, change.clone()).unwrap();
                assert_eq!(shown(), "", "{change}");
                assert!(!kernel.snapshot(&footprint()).unwrap().is_inexact(&neigh.key()));
            }
            // An entry without a neighbour, and one on a foreign device.
            ip(&format!("neigh add proxy {b} dev flannel.1"));
            ip(&format!("neigh add proxy {b} dev up0"));
            let there = kernel.snapshot(&footprint()).unwrap();
            let stray = there.iter().find(|object| matches!(object, Object::Neigh(_))).unwrap();
            apply(kernel, Change::Delete(stray.clone())).unwrap();
            assert!(shown().contains("dev up0") && !shown().contains("flannel.1"), "{}", shown());
        });
    });
}

#[test]
fn tables_of_any_length_are_read_completely() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            let (link, _) = device(family);
            put(kernel, link.clone());
            let object = |n: u16| {
                let [high, low] = n.to_be_bytes();
                let address = match family {
                    Family::V4 => IpAddr::from([10, 1, high, low]),
                    Family::V6 => IpAddr::from([0xfd00, 1, n, 0, 0, 0, 0, 0]),
                };
                Object::from(Neigh {
                    link: link.name,
                    address,
                    mac: MacAddr::local([2, 0, 0, 0, high, low]),
                })
            };
            let mut want: State = [Object::from(link.clone())].into_iter().collect();
            for (from, to) in [(0, 500), (500, 5_000)] {
                let new: Vec<Object> = (from..to).map(object).collect();
                let puts: Vec<Change> = new.iter().cloned().map(Change::Put).collect();
                assert!(kernel.apply(&footprint(), &puts).iter().all(Outcome::is_done));
                want.extend(new);
                // The second snapshot would show messages that the first one left unread.
                for _ in 0..2 {
                    let there = kernel.snapshot(&footprint()).unwrap();
                    assert!(there == want, "{} of {}", there.len(), want.len());
                }
            }
        });
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
            let shown =
                ip(&format!("-{} route show {dst}", if family == Family::V4 { 4 } else { 6 }));
            assert!(shown.lines().count() == 1 && shown.contains("flannel.1"), "{shown}");
            put(kernel, route(Via::LastResort));
            let shown =
                ip(&format!("-{} route show {dst}", if family == Family::V4 { 4 } else { 6 }));
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
        let (over, theirs) = (AtomicBool::new(false), NetlinkKernel::open().unwrap());
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
                let (state, ids) = (state.unwrap(), ids.unwrap());
                assert!(
                    ours.iter()
                        .all(|change| state.get(&change.object().key()) == Some(change.object()))
                );
                assert!(state.len() == COUNT as usize && ids.usable);
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
    let (g, h, dst) = match family {
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
    put(kernel, nexthop(g));
    let route = |mtu| Route { dst: dst.parse().unwrap(), via: Via::Nexthop(77), mtu };
    put(kernel, route(None));
    // No snapshot shows the MTU before it is removed.
    for mtu in [Some(1350), None] {
        apply(kernel, Change::Put(route(mtu).into())).unwrap();
    }
    let (want, there) = (Object::from(route(None)), kernel.snapshot(&footprint()).unwrap());
    assert_eq!(there.get(&want.key()), Some(&want));
    assert_eq!((&shown()["gateway"], &shown()["dev"]), (&json!(g), &json!("flannel.1")));
    assert_eq!((&shown()["flags"], &shown()["protocol"]), (&json!(["onlink"]), &json!("241")));
    put(kernel, nexthop(h));
    assert_eq!(shown()["gateway"], h);
    assert!(
        ip(&format!("{} route show {dst}", flag(family))).contains("nhid 77"),
        "the route still uses it"
    );
    delete(kernel, nexthop(h));
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

/// Rules, the tables that they name, and what is attached to a device.
#[test]
fn settings_of_other_programs_are_read() {
    in_netns(|| {
        let kernel = uplinks();
        for (args, ours) in [("", "10.1.0.0/16"), ("-6 ", "fd00:1::/32")] {
            let pods: flannel_core::Subnet = ours.parse().unwrap();
            let family = pods.family();
            let before = kernel.rules(family).unwrap();
            assert!(before.iter().any(|rule| rule.action == RuleAction::Table(254)), "{before:?}");
            ip(&format!("{args}rule add pref 300 not fwmark 9 table 300 suppress_prefixlength 0"));
            ip(&format!("{args}rule add pref 100 from {pods} to {pods} iif up0 table 7"));
            ip(&format!("{args}rule add pref 200 to {pods} prohibit"));
            let rules = kernel.rules(family).unwrap();
            let [first, second, third] = [100, 200, 300]
                .map(|priority| rules.iter().find(|rule| rule.priority == priority).unwrap());
            let text = format!("pref 100 from {pods} to {pods} iif up0 lookup 7");
            assert_eq!((first.to_string(), first.rest), (text, Share::All));
            assert_eq!(second.to_string(), format!("pref 200 to {pods} prohibit"));
            assert_eq!(third.to_string(), "pref 300 not lookup 300");
            assert_eq!((third.rest, third.suppressed), (Share::None, Some(0)));
            assert!(rules.is_sorted_by_key(|rule| rule.priority), "{rules:?}");
            for rule in [first, second, third] {
                ip(&format!("{args}rule del {rule}"));
            }
            assert_eq!(kernel.rules(family).unwrap(), before);

            assert_eq!(kernel.table(300, pods).unwrap(), []);
            let (inside, gateway) = match family {
                Family::V4 => ("10.1.7.0/24", "192.0.2.9"),
                Family::V6 => ("fd00:1:7::/48", "2001:db8::9"),
            };
            ip(&format!("{args}route add {inside} via {gateway} dev up0 table 300"));
            ip(&format!("{args}route add throw default table 300"));
            let routes = kernel.table(300, pods).unwrap();
            let (default, routes): (Vec<_>, Vec<_>) =
                routes.into_iter().partition(|route| route.dst.is_everything());
            assert!(default.len() == 1 && default[0].throw, "{default:?}");
            let text = format!("{inside} via {gateway} dev up0");
            assert_eq!(routes.iter().map(ToString::to_string).collect::<Vec<_>>(), [text]);
        }
        let attached = || kernel.attached(name("up0")).unwrap();
        let tc = |args: &str| {
            let run = std::process::Command::new("tc").args(args.split(' ')).status();
            assert!(run.expect("`tc` of iproute2 is needed for this test").success(), "{args}");
        };
        assert_eq!(attached().queue.as_deref(), Some("noqueue"));
        for parent in ["clsact", "ingress"] {
            tc(&format!("qdisc add dev up0 {parent}"));
            assert!(attached().filters.is_empty());
            tc("filter add dev up0 ingress protocol ip u32 match u32 0 0");
            assert_eq!(Vec::from_iter(attached().filters), ["u32"], "{parent}");
            tc("filter delete dev up0 ingress");
            tc("filter delete dev up0 egress");
            assert!(attached().filters.is_empty(), "{parent}");
            tc(&format!("qdisc delete dev up0 {parent}"));
        }
        tc("qdisc add dev up0 root tbf rate 1mbit burst 32kbit latency 400ms");
        let found = attached();
        assert!(found.queue.as_deref() == Some("tbf") && found.xdp.is_empty(), "{found:?}");
        assert_eq!(kernel.attached(name("none")).unwrap(), Default::default());
    });
}
