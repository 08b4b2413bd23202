//! A kernel of Debian, which has devices that user-mode Linux lacks.

use flannel_core::address::Family;
use flannel_core::object::{Change, Link, Secret, Wireguard};
use flannel_netlink::testing::{in_netns, in_netns_async, ip, run};
use test_support::guest::in_qemu;

use crate::changes::a_put_fdb_entry_is_reported_as_it_is;
use crate::objects::{apply, device, for_both_families, nexthop_objects, uplinks};
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

/// Devices of other kinds have UDP ports too.
#[test]
fn a_device_of_another_kind_that_has_the_port_is_named() {
    in_qemu(&["geneve", "veth", "vxlan", "wireguard"], || {
        in_netns(|| {
            let kernel = uplinks();
            let (vxlan, _) = device(Family::V4);
            let own = Wireguard { key: Secret::new([1; 32]), port: 8472 };
            let link = "flannel-wg".parse().unwrap();
            let own = Link { name: link, mtu: 1420, up: true, kind: own.into() };
            for (make, kind) in [
                ("geneve id 9 remote 192.0.2.9 dstport 8472", "geneve"),
                ("wireguard", "wireguard"),
            ] {
                ip(&format!("link add other type {make}"));
                if kind == "wireguard" {
                    run("wg", "set other listen-port 8472");
                }
                ip("link set other up");
                for (wanted, option) in [(&vxlan, "Port"), (&own, "ListenPort")] {
                    let put = Change::Put(wanted.clone().into());
                    let error = apply(&kernel, put).unwrap_err().to_string();
                    let says = format!(
                        "other ({kind}) has UDP port 8472 already: remove that device, or set \
                         another {option}"
                    );
                    assert!(error.starts_with(&says), "{error}");
                    let holders = kernel.port_holders(8472, std::slice::from_ref(wanted)).unwrap();
                    assert_eq!(holders.len(), 1, "{holders:?}");
                }
                ip("link delete other");
            }
            ip("link delete flannel.1");
            assert_eq!(apply(&kernel, Change::Put(own.into())), Ok(()));
        });
    });
}
