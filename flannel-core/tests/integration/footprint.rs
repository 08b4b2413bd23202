//! The kernel objects that a network owns.

use flannel_core::Config;
use flannel_core::kernel::{Footprint, GO_ROUTE_PROTOCOL, ROUTE_PROTOCOL};
use flannel_core::object::{LinkName, Route, Via};

#[test]
fn the_routes_of_a_network_are_owned_on_any_device_and_watched_on_the_interface() {
    let text = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#;
    let config = Config::parse(text).unwrap();
    let [eth0, eth1] = ["eth0", "eth1"].map(|name| name.parse::<LinkName>().unwrap());
    let route = |dst: &str, via| Route { dst: dst.parse().unwrap(), via, mtu: None };
    let inside = ["10.1.7.0/24", "fd00:1:0:7::/64"];
    for uplink in [Some(eth0), None] {
        let footprint = Footprint::of_routes(&config, uplink);
        for dst in inside {
            let blackhole = route(dst, Via::Blackhole);
            assert!(footprint.owns_route(&blackhole, None, ROUTE_PROTOCOL));
            for link in [eth0, eth1] {
                let route = route(dst, Via::Link(link));
                assert!(footprint.owns_route(&route, Some(link), ROUTE_PROTOCOL));
                assert!(!footprint.owns_route(&route, Some(link), GO_ROUTE_PROTOCOL));
                let is_watched = footprint.may_own(&route.into(), None);
                assert_eq!(is_watched, uplink == Some(link), "{dst} on {link}, {uplink:?}");
            }
        }
        let outside = route("10.2.7.0/24", Via::Link(eth0));
        assert!(!footprint.owns_route(&outside, Some(eth0), ROUTE_PROTOCOL));
        assert!(footprint.links.is_empty() && footprint.record_keepers.is_empty());
    }
}
