//! Cleanups of a fake kernel.

use flannel_core::Subnet;
use flannel_core::address::Dual;
use flannel_core::kernel::{Footprint, GO_ROUTE_PROTOCOL, ROUTE_PROTOCOL};
use flannel_core::object::{Route, Via};
use flannel_core::testing::FakeKernel;
use flannel_route::{cleanup, remove_go_routes};

/// A kernel with routes by a gateway to `dsts`, and the footprint of their network.
fn kernel(dsts: &[&str], protocol: u8) -> (FakeKernel, Footprint) {
    let kernel = FakeKernel::with_uplink("eth0");
    let link = "eth0".parse().unwrap();
    let via = Via::Gateway { gateway: [192, 0, 2, 7].into(), link, onlink: false };
    for dst in dsts {
        kernel.foreign_put(Route { dst: dst.parse().unwrap(), via, mtu: None }, protocol);
    }
    let networks = vec!["10.1.0.0/16".parse().unwrap()];
    (kernel, Footprint { networks, routes_on: [link].into(), ..Footprint::default() })
}

#[test]
fn a_dry_run_returns_the_changes_and_makes_none() {
    let (kernel, footprint) = kernel(&["10.1.7.0/24"], ROUTE_PROTOCOL);
    let would = cleanup(&kernel, &footprint, true).unwrap();
    assert_eq!(kernel.dump().len(), 1);
    assert_eq!(cleanup(&kernel, &footprint, false).unwrap(), would);
    assert!(kernel.dump().is_empty());
}

#[test]
fn only_routes_that_go_flannel_makes_are_removed_as_its_routes() {
    let dsts = ["10.1.7.0/24", "10.1.9.0/24", "10.1.8.0/25", "10.2.7.0/24"];
    let (kernel, footprint) = kernel(&dsts, GO_ROUTE_PROTOCOL);
    let refused: Subnet = "10.1.9.0/24".parse().unwrap();
    let lens = Dual { v4: Some(24), v6: None };
    let removed = remove_go_routes(&kernel, &footprint, lens, |dst| *dst == refused, false);
    let done: Vec<_> = removed.unwrap().done.iter().map(ToString::to_string).collect();
    assert_eq!(done, ["delete route 10.1.7.0/24 via 192.0.2.7 dev eth0"]);
    assert_eq!(kernel.dump().len(), 3, "one is kept, two are not Go flannel's");
}
