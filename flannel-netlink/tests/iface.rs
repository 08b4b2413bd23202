//! The external interface of a host made of a network namespace.

#![allow(clippy::unwrap_used, reason = "a test fails that way")]

use flannel_core::{Dual, Family};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_netlink::testing::{in_netns, ip};

fn host() -> NetlinkKernel {
    for n in 0..3 {
        ip(&format!("link add up{n} type veth peer name far{n}"));
        ip(&format!("link set far{n} up"));
        ip(&format!("link set up{n} up mtu {}", 1400 + n));
        ip(&format!("addr add 192.0.{}.1/24 dev up{n}", 2 + n));
        ip(&format!("addr add 2001:db8:{n}::2/64 dev up{n} nodad preferred_lft 0"));
        ip(&format!("addr add 2001:db8:{n}::1/64 dev up{n} nodad valid_lft 900 preferred_lft 900"));
    }
    ip("route add default via 192.0.3.9");
    ip("-6 route add default via 2001:db8:1::9");
    ip("route add 198.51.100.0/24 via 192.0.4.9 src 192.0.4.1");
    NetlinkKernel::open().unwrap()
}

#[test]
fn the_default_route_decides() {
    in_netns(|| {
        let kernel = host();
        let got = kernel.external_interface(&Selectors::default(), Family::BOTH).unwrap();
        assert_eq!((got.name.as_str(), got.mtu), ("up1", 1401));
        let want: Dual<std::net::IpAddr> = ["192.0.3.1", "2001:db8:1::1"]
            .iter()
            .map(|text| text.parse::<std::net::IpAddr>().unwrap())
            .collect();
        assert_eq!((got.address, got.public), (want, want));
        assert_eq!(got.reason, "it has the default route");
    });
}

#[test]
fn the_way_to_an_address_decides() {
    in_netns(|| {
        let kernel = host();
        let can_reach = Some("198.51.100.7".parse().unwrap());
        let selectors = Selectors { can_reach, ..Selectors::default() };
        let got = kernel.external_interface(&selectors, [Family::V4]).unwrap();
        assert_eq!((got.name.as_str(), got.address.v4), ("up2", "192.0.4.1".parse().ok()));
        ip("route add blackhole 198.51.100.7");
        let error = kernel.external_interface(&selectors, [Family::V4]).unwrap_err();
        assert!(error.to_string().contains("198.51.100.7: there is no route to it"), "{error}");
    });
}

#[test]
fn several_paths_are_no_single_interface() {
    in_netns(|| {
        let kernel = host();
        ip("route replace default nexthop via 192.0.2.9 dev up0 nexthop via 192.0.3.9 dev up1");
        let error = kernel.external_interface(&Selectors::default(), [Family::V4]).unwrap_err();
        assert!(error.to_string().contains("does not leave by a single interface"), "{error}");
        ip("route del default");
        let error = kernel.external_interface(&Selectors::default(), [Family::V4]).unwrap_err();
        assert!(error.to_string().contains("there is no IPv4 default route"), "{error}");
    });
}

#[test]
fn deprecated_and_unready_addresses_do_not_count() {
    in_netns(|| {
        let kernel = host();
        ip("addr del 2001:db8:1::1/64 dev up1");
        ip("-6 addr flush dev up1 scope link");
        let error = kernel.external_interface(&Selectors::default(), [Family::V6]).unwrap_err();
        assert!(error.to_string().contains("up1 has no usable IPv6 address"), "{error}");
    });
}
