//! Ipip devices, on a kernel that has them.

use std::net::Ipv4Addr;

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, Outcome};
use flannel_core::object::{Change, Ipip, Link, LinkKind, Nexthop, Object, ObjectSet, Route, Via};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns, ip};
use test_support::guest::in_uml;

const FIRST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const SECOND: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 2);

fn footprint() -> Footprint {
    let networks = vec!["10.1.0.0/16".parse().unwrap()];
    Footprint { links: ["flannel.ipip".parse().unwrap()].into(), networks, ..Footprint::default() }
}

/// Our device. Its MTU is not the default of the kernel.
fn device(local: Ipv4Addr) -> Link {
    let kind = LinkKind::Ipip(Ipip { local });
    Link { name: "flannel.ipip".parse().unwrap(), mtu: 1400, up: true, kind }
}

fn put(kernel: &NetlinkKernel, objects: &[Object]) {
    let changes: Vec<Change> = objects.iter().cloned().map(Change::Put).collect();
    for (change, outcome) in changes.iter().zip(kernel.apply(&footprint(), &changes)) {
        assert_eq!(outcome, Outcome::Done, "{change}");
    }
}

fn assert_state(kernel: &NetlinkKernel, objects: &[Object]) {
    let want: ObjectSet = objects.iter().cloned().collect();
    let text = |state: &ObjectSet| state.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(text(&kernel.snapshot(&footprint()).unwrap()), text(&want));
}

/// Restores the device after each change by another program, and keeps the route through it.
#[test]
fn devices_are_changed_in_place() {
    in_uml(&["ipip", "veth"], || {
        in_netns(|| {
            ip("link set lo up");
            ip("link add up0 type veth peer name far0");
            ip("addr add 192.0.2.1/24 dev up0");
            ip("link set up0 up");
            let kernel = NetlinkKernel::open().unwrap();
            kernel.may_change(&[device(FIRST)]).unwrap();
            assert!(!ip("link show").contains("tunl1"), "the check makes no device");
            let nexthop = Nexthop {
                id: 0x0f1a_0001,
                link: device(FIRST).name,
                gateway: SECOND.into(),
                onlink: true,
            };
            let dst = "10.1.7.0/24".parse().unwrap();
            let route = Route { dst, via: Via::Nexthop(nexthop.id), mtu: None };
            let all = |local| [device(local).into(), Object::from(nexthop), Object::from(route)];
            put(&kernel, &all(FIRST));
            assert_state(&kernel, &all(FIRST));
            let index = || {
                let shown = ip("-o link show flannel.ipip");
                shown.split(':').next().unwrap().to_owned()
            };
            let first = index();
            put(&kernel, &[device(SECOND).into()]);
            assert_state(&kernel, &all(SECOND));
            for foreign in [
                "type ipip local 192.0.2.9",
                "type ipip local 192.0.2.2 ttl 64 pmtudisc",
                "type ipip local 192.0.2.2 pmtudisc",
                "type ipip local 192.0.2.2 tos 4",
                "type ipip local 192.0.2.2 dev up0",
                "mtu 1300",
                "down",
            ] {
                ip(&format!("link set flannel.ipip {foreign}"));
                // The device that goes down takes the route with it.
                put(&kernel, &all(SECOND));
                assert_state(&kernel, &all(SECOND));
                let shown = ip("-d link show flannel.ipip");
                assert!(shown.contains("local 192.0.2.2 ttl inherit nopmtudisc"), "{shown}");
            }
            assert_eq!(index(), first, "the device is the same");

            // A remote address can only be removed with the device.
            ip("link del flannel.ipip");
            ip("link add flannel.ipip type ipip local 192.0.2.2 remote 192.0.2.7");
            put(&kernel, &all(SECOND));
            assert_state(&kernel, &all(SECOND));

            let changes = [Change::Delete(device(SECOND).into())];
            kernel.apply(&footprint(), &changes).remove(0).into_result().unwrap();
            assert_state(&kernel, &[]);
            // Only one device can have the address. A device with another name may be foreign.
            ip("link add balancer type ipip local 192.0.2.2");
            let changes = [Change::Put(device(SECOND).into())];
            let outcome = kernel.apply(&footprint(), &changes).remove(0);
            let error = outcome.into_result().unwrap_err().to_string();
            assert!(error.contains("balancer has the local address 192.0.2.2"), "{error}");
            assert!(ip("link show balancer").contains("state DOWN"), "it is as it was");
            ip("link del balancer");
            let fallback = ip("-d link show type ipip");
            assert!(fallback.contains("tunl0") && !fallback.contains("flannel"), "{fallback}");
        });
    });
}
