//! The vxlan device.

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, NexthopBlock};
use flannel_core::object::{Change, Link, Object, ObjectSet, Vxlan};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns, ip};
use libc::EEXIST;
use serde_json::{Value, json};
use test_support::guest::in_uml;

use super::{
    address, apply, delete, device, footprint, for_both_families, json_of, link, mac, mtu, name,
    peer_route, put, uplinks,
};

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
    assert_eq!(data["id"], 1);
    assert_eq!(data["port"], 8472);
    assert_eq!(data["link"], "up0");
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
            assert_eq!(shown_link()["ifindex"], index);
            assert_eq!(shown_link()["mtu"], mtu(family));
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
        assert_eq!(
            kernel.snapshot(&footprint).unwrap(),
            ObjectSet::default(),
            "nothing on it is ours"
        );
    });
}

/// A vxlan device shares its port only with devices of the same receive flags, or of the other
/// family. The kernel says no more than that the address is in use.
#[test]
fn the_device_that_has_the_port_of_another_is_named() {
    in_netns(|| {
        let kernel = uplinks();
        let own = |family| device(family).0;
        for (foreign, families) in [
            ("vxlan external dstport 8472", vec![Family::V4, Family::V6]),
            ("vxlan id 9 gbp dstport 8472 dev up0", vec![Family::V4]),
            ("vxlan id 9 gbp dstport 8472 dev up0 local 2001:db8::1", vec![Family::V6]),
            ("vxlan id 9 udp6zerocsumrx dstport 8472 local 2001:db8::1", vec![Family::V6]),
            ("vxlan id 9 dstport 8472 dev up0", vec![]),
            ("vxlan id 9 gbp dstport 8473 dev up0", vec![]),
        ] {
            ip(&format!("link add other type {foreign}"));
            ip("link set other up");
            for family in Family::BOTH {
                let wanted = own(family);
                let outcome = apply(&kernel, Change::Put(wanted.clone().into()));
                let holders = kernel.port_holders(8472, std::slice::from_ref(&wanted)).unwrap();
                let named = "other (vxlan)";
                if families.contains(&family) {
                    let error = outcome.unwrap_err().to_string();
                    let says = format!("{named} has UDP port 8472 already: remove that device");
                    assert!(error.starts_with(&says), "{foreign} {family}: {error}");
                    let names: Vec<String> = holders.iter().map(ToString::to_string).collect();
                    assert_eq!(names, [named], "{foreign} {family}");
                } else {
                    assert_eq!(outcome, Ok(()), "{foreign} {family}");
                    assert_eq!(holders, [], "{foreign} {family}");
                }
                delete(&kernel, wanted);
            }
            ip("link delete other");
        }
    });
}

#[test]
fn a_port_that_a_program_has_is_named() {
    in_netns(|| {
        let kernel = uplinks();
        let program = std::net::UdpSocket::bind("0.0.0.0:8472").unwrap();
        let (wanted, _) = device(Family::V4);
        let error = apply(&kernel, Change::Put(wanted.clone().into())).unwrap_err().to_string();
        assert!(error.starts_with("UDP port 8472 is in use: stop its program"), "{error}");
        drop(program);
        put(&kernel, wanted);
    });
}
