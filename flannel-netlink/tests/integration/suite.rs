//! Runs the suite for implementations of `Kernel` on the Linux kernel.

use std::sync::Arc;

use flannel_core::testing::{Fixture, kernel_suite};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns_async, ip};
use test_support::guest::in_uml;

#[test]
fn the_kernel_passes_the_suite() {
    in_netns_async(suite);
}

/// The guest has another version of Linux than most hosts.
#[test]
fn the_kernel_of_the_guest_passes_the_suite() {
    in_uml(&["ipv6", "veth", "vxlan"], || in_netns_async(suite));
}

pub(crate) async fn suite() {
    ip("link add up0 type veth peer name far0");
    ip("link set far0 up");
    ip("addr add 192.0.2.1/24 dev up0");
    ip("addr add 2001:db8::1/64 dev up0 nodad");
    ip("link set up0 up");
    let kernel = Arc::new(NetlinkKernel::open().unwrap());
    let other = NetlinkKernel::open().unwrap();
    let uplink = "up0".parse().unwrap();
    kernel_suite(&Fixture { kernel: &*kernel, other: &other, uplink }).await;
}
