//! A kernel of Debian, which has devices that user-mode Linux lacks.

use flannel_netlink::testing::{in_netns, in_netns_async, ip, run};
use test_support::guest::in_qemu;

use crate::changes::a_put_fdb_entry_is_reported_as_it_is;
use crate::objects::{for_both_families, nexthop_objects};
use crate::suite::suite;

#[test]
fn the_kernel_of_debian_passes_the_suite() {
    in_qemu(&["ipv6", "veth", "vxlan"], || in_netns_async(suite));
}

#[test]
fn the_kernel_of_debian_echoes_requests_about_fdb_entries() {
    in_qemu(&["ipv6", "veth", "vxlan"], || {
        in_netns_async(a_put_fdb_entry_is_reported_as_it_is);
    });
}

#[test]
fn the_kernel_of_debian_has_nexthop_objects() {
    in_qemu(&["ipv6", "veth", "vxlan"], || {
        in_netns(|| for_both_families(nexthop_objects));
    });
}

/// The kernel derives the public key. `wg pubkey` derives the same.
#[test]
fn the_kernel_of_debian_has_wireguard() {
    in_qemu(&["wireguard"], || {
        in_netns(|| {
            std::fs::write("/run/key", "dwdtCnMYpX08FsFyUbJmRd9ML5LrwJkqwXf7pR25LCo=").unwrap();
            ip("link add wg0 type wireguard");
            run("wg", "set wg0 private-key /run/key");
            let public = "+KlTWi0v9gXo4UTVT071xiMTogVduyH93T/ZwpnrAV0=";
            assert_eq!(run("wg", "show wg0 public-key").trim(), public);
        });
    });
}
