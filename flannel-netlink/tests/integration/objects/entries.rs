//! Neighbours and FDB entries.

use std::net::IpAddr;

use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::kernel::Outcome;
use flannel_core::object::{Change, Fdb, MacAddr, Neigh, Object, ObjectSet};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{bridge, in_netns, ip};
use serde_json::Value;

use super::{
    address, apply, delete, device, flag, footprint, for_both_families, json_of, mac, name, put,
};

#[test]
fn neighbours_are_put_replaced_and_deleted() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let gateway = match family {
                Family::V4 => "10.1.2.0",
                Family::V6 => "fd00:1:2::",
            };
            let shown = || json_of(&ip("-j neigh show dev flannel.1 nud permanent"));
            let neigh = |mac| Neigh { link: name("flannel.1"), address: address(gateway), mac };
            let old = mac("0a:00:00:00:00:07");
            let new = mac("0a:00:00:00:00:08");
            for mac in [old, new] {
                put(kernel, neigh(mac));
                assert_eq!(shown()[0]["dst"], gateway);
                assert_eq!(shown()[0]["lladdr"], mac.to_string());
            }
            delete(kernel, neigh(new));
            assert_eq!(shown().as_array().unwrap().len(), 0);
        });
    });
}

/// The FDB entries on our device, as `bridge` shows them.
fn shown_fdb() -> Vec<Value> {
    json_of(&bridge("-j fdb show dev flannel.1")).as_array().unwrap().clone()
}

fn fdb(dst: &str) -> Fdb {
    Fdb { link: name("flannel.1"), mac: mac("0a:00:00:00:00:07"), dst: address(dst) }
}

/// Two hosts to which an FDB entry can lead.
fn destinations(family: Family) -> [&'static str; 2] {
    match family {
        Family::V4 => ["192.0.2.7", "192.0.2.8"],
        Family::V6 => ["2001:db8::7", "2001:db8::8"],
    }
}

/// The FDB entry in a snapshot, if it is inexact.
fn inexact_fdb(kernel: &NetlinkKernel) -> Option<Object> {
    let snapshot = kernel.snapshot(&footprint()).unwrap();
    let entry = snapshot.iter().find(|object| matches!(object, Object::Fdb(_))).cloned()?;
    snapshot.is_inexact(&entry.key()).then_some(entry)
}

#[test]
fn fdb_entries_are_put_replaced_and_deleted() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let [old, new] = destinations(family);
            for dst in [old, new] {
                put(kernel, fdb(dst));
                let shown = shown_fdb();
                assert_eq!(shown.len(), 1, "{shown:?}");
                assert_eq!(shown[0]["dst"], dst);
                assert_eq!(shown[0]["mac"], "0a:00:00:00:00:07");
                assert_eq!(shown[0]["state"], "permanent");
            }
            apply(kernel, Change::Delete(fdb(old).into())).unwrap();
            assert_eq!(shown_fdb()[0]["dst"], new, "an entry with another destination stays");
            delete(kernel, fdb(new));
            assert_eq!(shown_fdb(), [Value::Null; 0]);
        });
    });
}

#[test]
fn fdb_entries_with_other_attributes_are_replaced_and_deleted() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let [other, ours] = destinations(family);
            put(kernel, fdb(ours));
            // An FDB entry that uses nexthop objects would keep them if it was only put.
            ip(&format!("nexthop add id 78 via {other} fdb"));
            ip("nexthop add id 79 group 78 fdb");
            bridge("fdb del 0a:00:00:00:00:07 dev flannel.1");
            bridge("fdb add 0a:00:00:00:00:07 dev flannel.1 nhid 79 self permanent");
            let shown = shown_fdb();
            assert!(shown[0]["dst"].is_null(), "{shown:?}");
            assert!(inexact_fdb(kernel).is_some());
            put(kernel, fdb(ours));
            let shown = shown_fdb();
            assert_eq!(shown.len(), 1, "{shown:?}");
            assert_eq!(shown[0]["dst"], ours);
            assert_eq!(inexact_fdb(kernel), None);
            // An undesired entry is deleted, whatever its attributes are.
            for odd in [
                "nhid 79 self permanent",
                "via up1 self permanent",
                "port 999 vni 7 self permanent",
                "self static",
            ] {
                bridge("fdb del 0a:00:00:00:00:07 dev flannel.1");
                let dst = if odd.contains("nhid") { String::new() } else { format!("dst {other}") };
                bridge(&format!("fdb add 0a:00:00:00:00:07 dev flannel.1 {dst} {odd}"));
                delete(kernel, inexact_fdb(kernel).expect(odd));
                assert_eq!(shown_fdb(), [Value::Null; 0], "{odd}");
                bridge(&format!("fdb add 0a:00:00:00:00:07 dev flannel.1 {dst} {odd}"));
                assert!(inexact_fdb(kernel).is_some(), "{odd}");
                put(kernel, fdb(ours));
                assert_eq!(inexact_fdb(kernel), None, "{odd}");
                let shown = shown_fdb();
                assert_eq!(shown[0]["dst"], ours, "{odd}");
                assert_eq!(shown[0]["port"], Value::Null, "{odd}");
                assert_eq!(shown[0]["state"], "permanent", "{odd}");
            }
        });
    });
}

#[test]
fn fdb_entries_with_several_destinations_are_deleted_completely() {
    in_netns(|| {
        for_both_families(|kernel, family| {
            put(kernel, device(family).0);
            let [first, second] = destinations(family);
            for (mac, dst) in [
                ("00:00:00:00:00:00", first),
                ("00:00:00:00:00:00", second),
                ("01:00:5e:00:00:01", second),
            ] {
                bridge(&format!("fdb append {mac} dev flannel.1 dst {dst} self permanent"));
            }
            for object in kernel.snapshot(&footprint()).unwrap().iter() {
                if matches!(object, Object::Fdb(_)) {
                    apply(kernel, Change::Delete(object.clone())).unwrap();
                }
            }
            assert_eq!(shown_fdb(), [Value::Null; 0]);
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
            let mut want: ObjectSet = [Object::from(link.clone())].into_iter().collect();
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
