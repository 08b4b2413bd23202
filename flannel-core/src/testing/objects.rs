//! Arbitrary kernel objects, for property tests.

#![allow(clippy::unwrap_used, reason = "the values are constants that are known to be valid")]

use std::net::IpAddr;

use proptest::prelude::*;

use crate::address::Subnet;
use crate::object::{
    Addr, Fdb, Link, LinkName, MacAddr, Neigh, Nexthop, Object, Route, Via, Vxlan,
};

fn name(n: u8) -> LinkName {
    format!("flannel.{n}").parse().unwrap()
}

fn address(n: u8) -> IpAddr {
    if n < 4 {
        IpAddr::from([10, 0, n, 0])
    } else {
        IpAddr::from([0xfd00, 0, 0, u16::from(n), 0, 0, 0, 0])
    }
}

/// Any object except for records and WireGuard peers. Names, addresses and ids have only a few
/// values, so that keys collide.
pub fn any_object() -> impl Strategy<Value = Object> {
    let n = || 0..8u8;
    let mac = |n: u8| MacAddr::local([n; 6]);
    prop_oneof![
        (n(), any::<bool>(), 1..3u32).prop_map(move |(l, up, vni)| {
            let vxlan = Vxlan {
                vni,
                port: 8472,
                mac: mac(l),
                local: Some(address(l)).filter(|_| up),
                lower: Some(name(l)).filter(|_| vni > 1),
                learning: up,
                gbp: vni > 1,
            };
            Link { name: name(l), mtu: 1450, up, kind: vxlan.into() }.into()
        }),
        (n(), n(), 30..33u8).prop_map(|(l, a, len)| Addr {
            link: name(l),
            address: address(a),
            len
        }
        .into()),
        (n(), n(), n()).prop_map(move |(l, a, m)| {
            Neigh { link: name(l), address: address(a), mac: mac(m) }.into()
        }),
        (n(), n(), n()).prop_map(move |(l, m, a)| Fdb {
            link: name(l),
            mac: mac(m),
            dst: address(a)
        }
        .into()),
        (1..6u32, n(), n(), any::<bool>()).prop_map(|(id, l, a, onlink)| {
            Nexthop { id, link: name(l), gateway: address(a), onlink }.into()
        }),
        (n(), n(), prop::option::of(1400..1402u16), 0..5u8).prop_map(|(a, l, mtu, kind)| {
            let via = match kind {
                0 => Via::Gateway { gateway: address(a), link: name(l), onlink: true },
                1 => Via::Link(name(l)),
                2 => Via::Nexthop(u32::from(l) + 1),
                3 => Via::Blackhole,
                _ => Via::LastResort,
            };
            Route { dst: Subnet::new(address(a), 24).unwrap(), via, mtu }.into()
        }),
    ]
}
