//! The checks of IPv6 on devices of the host: whether it is on, and whether the host keeps what it
//! got by router advertisements.

use std::net::Ipv6Addr;
use std::path::Path;

use flannel_core::object::LinkName;

use super::read::sysctl;
use super::{HostFacts, sysctl_name};
use crate::finding::{Check, Finding};

/// What the external interface got by router advertisements that it accepts no more. It ends with
/// its lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expiring {
    /// The default route.
    DefaultRoute,
    /// An address.
    Address(Ipv6Addr),
}

/// All findings about IPv6.
pub(super) fn ipv6(facts: &HostFacts) -> Vec<Finding> {
    if facts.pod_networks.v6.is_none() {
        return Vec::new();
    }
    advertisements(facts).into_iter().chain(switched_off(facts)).collect()
}

fn advertisements(facts: &HostFacts) -> Option<Finding> {
    let uplink = facts.uplink?;
    let what = match facts.expiring? {
        Expiring::DefaultRoute => "the IPv6 default route".to_owned(),
        Expiring::Address(address) => format!("the address {address}"),
    };
    let key = format!("net.ipv6.conf.{}.accept_ra", sysctl_name(uplink));
    let text = format!(
        "{key} is 1, and this host forwards IPv6 packets: it ignores router advertisements, and \
         {what} of {uplink} expires"
    );
    Some(Finding::warning(Check::Sysctl, text).with_command(format!("sysctl -w {key}=2")))
}

fn switched_off(facts: &HostFacts) -> Option<Finding> {
    let (key, text) = match facts.ipv6_off? {
        Off::Bridge(bridge) => (
            sysctl_name(bridge),
            format!("IPv6 is off on {bridge}, the bridge of pods: new pods get no network"),
        ),
        Off::NewDevices => (
            "default".to_owned(),
            "IPv6 is off on new devices: the bridge of pods cannot get its IPv6 address".to_owned(),
        ),
    };
    let key = format!("net.ipv6.conf.{key}.disable_ipv6");
    let text = format!("{key} is 1: {text}");
    Some(Finding::error(Check::Sysctl, text).with_command(format!("sysctl -w {key}=0")))
}

/// Where IPv6 is off. The daemon switches it on for its own devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Off {
    /// On the bridge of pods.
    Bridge(LinkName),
    /// On devices that are yet to be made, and there is no bridge of pods.
    NewDevices,
}

/// Reads whether IPv6 is off where pods need it.
pub(super) fn read_off(bridge: Option<LinkName>) -> Option<Off> {
    let device = bridge.as_ref().map_or("default", LinkName::as_str);
    let value: u8 = sysctl(&format!("net/ipv6/conf/{device}/disable_ipv6"))?;
    (value != 0).then(|| bridge.map_or(Off::NewDevices, Off::Bridge))
}

/// Reads what expires on the device, because it ignores router advertisements. With `accept_ra` 0,
/// a program such as systemd-networkd follows them.
pub(super) fn read_expiring(device: LinkName) -> Option<Expiring> {
    let setting = |key: &str| sysctl::<u8>(&format!("net/ipv6/conf/{device}/{key}"));
    // Linux `include/net/ipv6.h: ipv6_accept_ra`.
    if setting("accept_ra") != Some(1) || setting("forwarding") == Some(0) {
        return None;
    }
    let table = |file: &str| {
        let path = Path::new("/proc/thread-self/net").join(file);
        std::fs::read_to_string(path).unwrap_or_default()
    };
    if table("ipv6_route").lines().any(|line| is_expiring_default(line, device)) {
        return Some(Expiring::DefaultRoute);
    }
    let addresses = table("if_inet6");
    addresses.lines().find_map(|line| expiring_address(line, device)).map(Expiring::Address)
}

/// Whether a line of `/proc/net/ipv6_route` is a default route with a lifetime: destination, its
/// length, the same of a source, gateway, three numbers, flags, device.
fn is_expiring_default(line: &str, device: LinkName) -> bool {
    const EXPIRES: u32 = 0x0040_0000;
    const REJECT: u32 = 0x0200;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, "00", _, "00", _, _, _, _, flags, name] = fields[..] else { return false };
    let flags = u32::from_str_radix(flags, 16).unwrap_or_default();
    name == device.as_str() && flags & (EXPIRES | REJECT) == EXPIRES
}

/// The address in a line of `/proc/net/if_inet6` if it is one of the subnet of a router, with a
/// lifetime: address, index, prefix length, scope, flags, device. DHCPv6 gives whole addresses
/// (/128), which its client renews.
fn expiring_address(line: &str, device: LinkName) -> Option<Ipv6Addr> {
    const TEMPORARY: u8 = 0x01;
    const PERMANENT: u8 = 0x80;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [address, _, length, "00", flags, name] = fields[..] else { return None };
    let flags = u8::from_str_radix(flags, 16).ok()?;
    let is_it = name == device.as_str() && length != "80" && flags & (TEMPORARY | PERMANENT) == 0;
    let address = u128::from_str_radix(address, 16).ok().filter(|_| is_it)?;
    Some(Ipv6Addr::from(address))
}

#[cfg(test)]
mod tests {
    use flannel_netlink::testing::{in_netns, ip, run};

    use super::*;

    #[test]
    fn what_a_forwarding_host_loses_is_read() {
        in_netns(|| {
            let eth0 = "eth0".parse().unwrap();
            let set = |key: &str, value: u8| {
                run("sysctl", &format!("-w net.ipv6.conf.{key}={value}"));
            };
            ip("link add eth0 type veth peer name far0");
            set("eth0.accept_ra", 1);
            ip("link set eth0 up");
            ip("link set far0 up");
            ip("-6 address add 2001:db8::5/64 dev eth0 nodad");
            ip("-6 address add 2001:db8::6/128 dev eth0 nodad valid_lft 1800 preferred_lft 900");
            ip("-6 route add default via fe80::1 dev eth0 metric 9");
            set("eth0.forwarding", 1);
            assert_eq!(read_expiring(eth0), None, "they are static, or of DHCPv6");
            ip("-6 address add 2001:db8::7/64 dev eth0 nodad valid_lft 1800 preferred_lft 900");
            let address = Expiring::Address("2001:db8::7".parse().unwrap());
            assert_eq!(read_expiring(eth0), Some(address));
            ip("-6 route add default via fe80::2 dev eth0 proto ra expires 1800");
            assert_eq!(read_expiring(eth0), Some(Expiring::DefaultRoute));
            assert_eq!(read_expiring("far0".parse().unwrap()), None, "another device");
            for (key, value, back) in
                [("accept_ra", 2, 1), ("accept_ra", 0, 1), ("forwarding", 0, 1)]
            {
                set(&format!("eth0.{key}"), value);
                assert_eq!(read_expiring(eth0), None, "{key} {value}");
                set(&format!("eth0.{key}"), back);
            }
        });
    }

    #[test]
    fn ipv6_that_is_off_is_read_from_the_bridge_or_for_new_devices() {
        in_netns(|| {
            assert_eq!(read_off(None), None);
            run("sysctl", "-w net.ipv6.conf.default.disable_ipv6=1");
            ip("link add cni0 type bridge");
            assert_eq!(read_off(None), Some(Off::NewDevices));
            let bridge = "cni0".parse().unwrap();
            assert_eq!(read_off(Some(bridge)), Some(Off::Bridge(bridge)));
            run("sysctl", "-w net.ipv6.conf.cni0.disable_ipv6=0");
            assert_eq!(read_off(Some(bridge)), None);
        });
    }
}
