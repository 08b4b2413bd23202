//! The external interface of a host that is a network namespace.

use flannel_core::address::{Dual, Family};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::{InterfaceState, Selectors};
use flannel_netlink::testing::{in_netns, in_netns_async, ip};
use tokio::sync::watch;

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
        assert_eq!(got.name.as_str(), "up1");
        assert_eq!(got.mtu, 1401);
        let want = Dual { v4: "192.0.3.1".parse().ok(), v6: "2001:db8:1::1".parse().ok() };
        assert_eq!(got.address, want);
        assert_eq!(got.public, want);
        assert_eq!(got.reason, "it has the default route");
    });
}

#[test]
fn the_route_to_an_address_decides() {
    in_netns(|| {
        let kernel = host();
        let can_reach = Some("198.51.100.7".parse().unwrap());
        let selectors = Selectors { can_reach, ..Selectors::default() };
        let got = kernel.external_interface(&selectors, [Family::V4]).unwrap();
        assert_eq!(got.name.as_str(), "up2");
        assert_eq!(got.address.v4, "192.0.4.1".parse().ok());
        ip("route add blackhole 198.51.100.7");
        let error = kernel.external_interface(&selectors, [Family::V4]).unwrap_err();
        assert!(error.to_string().contains("198.51.100.7: there is no route to it"), "{error}");
    });
}

#[test]
fn a_default_route_may_have_several_next_hops() {
    in_netns(|| {
        let kernel = host();
        let choose = |families: &[Family]| {
            kernel.external_interface(&Selectors::default(), families.iter().copied())
        };
        let chosen = |families: &[Family]| {
            let got = choose(families).unwrap();
            (got.name.to_string(), got.reason)
        };
        let one = |name: &str| (name.to_owned(), "it has the default route".to_owned());
        let with = |name: &str, other: &str| {
            (name.to_owned(), format!("it has the default route, which also uses {other}"))
        };
        ip("route replace default nexthop via 192.0.2.9 dev up0 nexthop via 192.0.2.8 dev up0");
        assert_eq!(chosen(&[Family::V4]), one("up0"));
        let hops = ["nexthop via 192.0.2.9 dev up0", "nexthop via 192.0.3.9 dev up1"].join(" ");
        ip(&format!("route replace default {hops}"));
        assert_eq!(chosen(&[Family::V4]), with("up0", "up1"));
        assert_eq!(chosen(&Family::BOTH), with("up1", "up0"), "IPv6 leaves by up1");
        ip("link set far0 down");
        assert_eq!(chosen(&[Family::V4]), with("up1", "up0"), "up0 has no carrier");
        ip("link set far0 up");
        ip("-6 route del default");
        for n in [0, 1] {
            ip(&format!("-6 route append default via 2001:db8:{n}::9"));
        }
        assert_eq!(chosen(&[Family::V6]), with("up0", "up1"));
        ip("-6 route del default via 2001:db8:0::9");
        // A group of nexthop objects, and kernels that do not show its paths in the route.
        ip("nexthop add id 1 via 192.0.4.9 dev up2");
        ip("nexthop add id 2 via 192.0.3.9 dev up1");
        ip("nexthop add id 3 group 1/2");
        ip("route replace default nhid 3");
        for compatible in ["1", "0"] {
            std::fs::write("/proc/sys/net/ipv4/nexthop_compat_mode", compatible).unwrap();
            assert_eq!(chosen(&[Family::V4]), with("up2", "up1"), "{compatible}");
            assert_eq!(chosen(&Family::BOTH), with("up1", "up2"), "{compatible}");
        }
        ip("route del default");
        let error = choose(&[Family::V4]).unwrap_err();
        assert!(error.to_string().contains("there is no IPv4 default route"), "{error}");
    });
}

#[test]
fn the_address_in_the_network_of_the_gateway_is_chosen() {
    in_netns(|| {
        let kernel = host();
        ip("addr flush dev up1");
        ip("addr add 192.0.9.250/32 dev up1");
        ip("addr add 10.0.0.7/8 dev up1");
        ip("addr add 192.0.9.11/24 dev up1 valid_lft 3600 preferred_lft 3600");
        ip("addr add 192.0.9.77/24 dev up1");
        ip("route add default via 192.0.9.254");
        let source = |previous: &str| {
            let previous = previous.parse::<std::net::IpAddr>().into_iter().collect();
            let selectors = Selectors { previous, ..Selectors::default() };
            let got = kernel.external_interface(&selectors, [Family::V4]).unwrap();
            got.address.v4.unwrap().to_string()
        };
        assert_eq!(source(""), "192.0.9.11");
        assert_eq!(source("10.0.0.7"), "10.0.0.7", "the host had it before");
        assert_eq!(source("192.0.9.250"), "192.0.9.11", "a virtual address");
        ip("route replace default via 192.0.9.254 src 10.0.0.7");
        assert_eq!(source(""), "10.0.0.7", "the route sets it");
    });
}

#[test]
fn loopback_has_the_mtu_of_the_uplinks() {
    in_netns_async(async || {
        let kernel = host();
        ip("link set lo up");
        ip("addr add 10.10.10.10/32 dev lo");
        ip("link set up2 mtu 8000");
        ip("route replace default nexthop via 192.0.4.9 dev up2");
        let selectors = Selectors { iface: vec!["lo".into()], ..Selectors::default() };
        let chosen = kernel.external_interface(&selectors, [Family::V4]).unwrap();
        assert_eq!((chosen.name.as_str(), chosen.mtu), ("lo", 8000));
        follow(&kernel, &selectors, &[Family::V4], async |mut states| {
            until(&mut states, |state| *state == InterfaceState::Kept).await;
            // A restart of the routing daemon.
            ip("route del default");
            ip("link set up2 mtu 7000");
            ip("link set up2 mtu 8000");
            ip("route add default via 192.0.4.9");
            ip("link set up2 mtu 7000");
            assert_eq!(other(&mut states).await, "lo has the MTU 7000 now, not 8000");
        })
        .await;
    });
}

#[test]
fn deprecated_and_tentative_addresses_are_not_usable() {
    in_netns(|| {
        let kernel = host();
        ip("addr del 2001:db8:1::1/64 dev up1");
        ip("-6 addr flush dev up1 scope link");
        let error = kernel.external_interface(&Selectors::default(), [Family::V6]).unwrap_err();
        assert!(error.to_string().contains("up1 has no usable IPv6 address"), "{error}");
    });
}

/// Chooses an interface, and follows it until the script ends.
async fn follow(
    kernel: &NetlinkKernel,
    selectors: &Selectors,
    families: &[Family],
    script: impl AsyncFnOnce(watch::Receiver<InterfaceState>),
) {
    let chosen = kernel.external_interface(selectors, families.iter().copied()).unwrap();
    let (state, states) = watch::channel(InterfaceState::Lost("it was not read yet".into()));
    let script_ends = tokio::time::timeout(std::time::Duration::from_secs(20), async {
        tokio::select! {
            ended = kernel.follow_interface(&chosen, selectors, families, &state) => {
                panic!("{ended:?}")
            }
            () = script(states) => (),
        }
    })
    .await;
    assert!(script_ends.is_ok(), "the script did not end: {:?}", state.borrow().clone());
}

/// Waits for a state for which `wanted` is true.
async fn until(
    states: &mut watch::Receiver<InterfaceState>,
    wanted: impl Fn(&InterfaceState) -> bool,
) -> InterfaceState {
    states.wait_for(wanted).await.unwrap().clone()
}

/// Waits until another choice is possible. Returns the difference.
async fn other(states: &mut watch::Receiver<InterfaceState>) -> String {
    match until(states, |state| matches!(state, InterfaceState::Other { .. })).await {
        InterfaceState::Other { difference, .. } => difference,
        state => panic!("{state:?}"),
    }
}

/// Makes `changes` on a host whose chosen interface is up1. Returns the reported difference.
async fn waits_for(changes: &[&str]) -> String {
    let kernel = host();
    let selectors = Selectors { iface: vec!["up1".into(), "up0".into()], ..Selectors::default() };
    let mut difference = String::new();
    follow(&kernel, &selectors, &Family::BOTH, async |mut states| {
        until(&mut states, |state| *state == InterfaceState::Kept).await;
        for change in changes {
            ip(change);
        }
        difference = other(&mut states).await;
    })
    .await;
    difference
}

#[test]
fn only_a_change_of_the_chosen_values_ends_the_choice() {
    in_netns_async(async || {
        let reason = waits_for(&[
            "addr add 192.0.3.77/24 dev up1",
            "addr del 192.0.2.1/24 dev up0",
            "link set up2 mtu 1300",
            "route replace default via 192.0.4.9",
            "link set up1 down",
            "link set up1 up",
            // The kernel removes the IPv6 addresses with the link.
            "addr replace 2001:db8:1::1/64 dev up1 nodad",
            "link set up1 mtu 1350",
        ])
        .await;
        assert_eq!(reason, "up1 has the MTU 1350 now, not 1401");
    });
}

#[test]
fn another_address_is_another_choice() {
    in_netns_async(async || {
        let reason =
            waits_for(&["addr add 192.0.3.5/25 dev up1", "addr del 192.0.3.1/24 dev up1"]).await;
        assert_eq!(reason, "up1 has the IPv4 address 192.0.3.5 now, not 192.0.3.1");
    });
}

#[test]
fn a_missing_interface_is_lost_until_another_choice_is_possible() {
    in_netns_async(async || {
        let reason = waits_for(&[
            "addr flush dev up0",
            "link del up1",
            "addr add 2001:db8::1/64 dev up0 nodad",
            "addr add 192.0.2.8/24 dev up0",
        ])
        .await;
        assert_eq!(reason, "the external interface is up0 now, not up1");
    });
}

#[test]
fn a_link_local_address_never_replaces_another_and_any_other_replaces_it() {
    in_netns_async(async || {
        let kernel = host();
        ip("addr add 169.254.3.4/16 dev up1");
        let selectors = Selectors { iface: vec!["up1".into()], ..Selectors::default() };
        let lost = |state: &InterfaceState| match state {
            InterfaceState::Lost(why) => why.contains("link-local"),
            _ => false,
        };
        follow(&kernel, &selectors, &[Family::V4], async |mut states| {
            ip("addr del 192.0.3.1/24 dev up1");
            until(&mut states, lost).await;
            ip("addr add 192.0.3.1/24 dev up1");
            until(&mut states, |state| *state == InterfaceState::Kept).await;
            ip("addr del 192.0.3.1/24 dev up1");
            until(&mut states, lost).await;
            ip("addr add 192.0.3.9/24 dev up1");
            assert_eq!(
                other(&mut states).await,
                "up1 has the IPv4 address 192.0.3.9 now, not 192.0.3.1"
            );
            ip("addr del 192.0.3.9/24 dev up1");
            until(&mut states, lost).await;
        })
        .await;
        // The link-local address is the only one now.
        follow(&kernel, &selectors, &[Family::V4], async |mut states| {
            until(&mut states, |state| *state == InterfaceState::Kept).await;
            ip("addr add 192.0.3.9/24 dev up1");
            assert_eq!(
                other(&mut states).await,
                "up1 has the IPv4 address 192.0.3.9 now, not 169.254.3.4"
            );
        })
        .await;
        // The user selected the link-local address.
        let asked = Selectors { iface: vec!["169.254.3.4".into()], ..Selectors::default() };
        follow(&kernel, &asked, &[Family::V4], async |mut states| {
            until(&mut states, |state| *state == InterfaceState::Kept).await;
            ip("link set up1 mtu 1350");
            assert_eq!(other(&mut states).await, "up1 has the MTU 1350 now, not 1401");
        })
        .await;
    });
}

#[test]
fn a_virtual_address_never_replaces_the_own_one_and_the_own_one_replaces_it() {
    in_netns_async(async || {
        let kernel = host();
        let lost = |state: &InterfaceState| match state {
            InterfaceState::Lost(why) => why.contains("may move to another host"),
            _ => false,
        };
        // A carrier loss, after which networkd configures the link again.
        follow(&kernel, &Selectors::default(), &[Family::V4], async |mut states| {
            ip("addr add 192.0.3.250/32 dev up1");
            ip("addr del 192.0.3.1/24 dev up1");
            ip("route replace default dev up1");
            until(&mut states, lost).await;
            ip("addr add 192.0.3.1/24 dev up1");
            ip("route replace default via 192.0.3.9");
            until(&mut states, |state| *state == InterfaceState::Kept).await;
        })
        .await;
        // The virtual address was there before the own one.
        ip("addr del 192.0.3.1/24 dev up1");
        ip("route replace default dev up1");
        follow(&kernel, &Selectors::default(), &[Family::V4], async |mut states| {
            until(&mut states, |state| *state == InterfaceState::Kept).await;
            ip("addr add 192.0.3.1/24 dev up1");
            assert_eq!(
                other(&mut states).await,
                "up1 has the IPv4 address 192.0.3.1 now, not 192.0.3.250"
            );
        })
        .await;
    });
}

#[test]
fn a_choice_that_changes_again_is_reported_again() {
    in_netns_async(async || {
        let kernel = host();
        let selectors =
            Selectors { iface: vec!["up1".into(), "up0".into()], ..Selectors::default() };
        follow(&kernel, &selectors, &Family::BOTH, async |mut states| {
            ip("link del up1");
            assert_eq!(other(&mut states).await, "the external interface is up0 now, not up1");
            ip("link set up0 mtu 1350");
            let smaller = |state: &InterfaceState| match state {
                InterfaceState::Other { now, .. } => now.mtu == 1350,
                _ => false,
            };
            until(&mut states, smaller).await;
        })
        .await;
    });
}

/// The groups of each socket that listens to rtnetlink in this namespace, as bits.
fn groups() -> Vec<u32> {
    let table = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
    let mut all = Vec::new();
    for line in table.lines().skip(1) {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let groups = u32::from_str_radix(columns[3], 16).unwrap();
        if columns[1] == "0" && groups != 0 {
            all.push(groups);
        }
    }
    all
}

#[test]
fn routes_are_listened_to_only_while_the_choice_depends_on_them() {
    const LINKS_AND_ADDRESSES: u32 = 1 << 0 | 1 << 4 | 1 << 8;
    const ROUTES: u32 = 1 << 6 | 1 << 10;
    in_netns_async(async || {
        let kernel = host();
        let selectors = Selectors::default();
        follow(&kernel, &selectors, &[Family::V4], async |mut states| {
            let until = async |wanted: &[u32]| {
                while groups() != wanted {
                    tokio::task::yield_now().await;
                }
            };
            until(&[LINKS_AND_ADDRESSES]).await;
            ip("addr del 192.0.3.1/24 dev up1");
            until(&[LINKS_AND_ADDRESSES | ROUTES]).await;
            ip("addr add 192.0.3.1/24 dev up1");
            until(&[LINKS_AND_ADDRESSES]).await;
            ip("addr del 192.0.3.1/24 dev up1");
            until(&[LINKS_AND_ADDRESSES | ROUTES]).await;
            ip("route replace default via 192.0.4.9");
            assert_eq!(other(&mut states).await, "the external interface is up2 now, not up1");
        })
        .await;
    });
}
