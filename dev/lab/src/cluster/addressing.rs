//! Addresses of the hosts, and lines for `ip` that add addresses without duplicate address
//! detection.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::MacAddr;

/// The network of the hosts. Host `n` has address `n`, the switch has address 254.
pub(crate) fn underlay(family: Family) -> Subnet {
    let text = match family {
        Family::V4 => "192.168.77.0/24",
        Family::V6 => "fd00:77::/64",
    };
    text.parse().expect("a constant that is a subnet")
}

/// The address of host `n`, or of the switch if `n` is 254.
pub(crate) fn underlay_address(family: Family, n: usize) -> IpAddr {
    underlay(family).nth(n as u128).expect("hosts are numbered below 255")
}

/// The MAC address of `eth0` on host `n`.
pub(crate) fn mac(n: usize) -> MacAddr {
    MacAddr([0x02, 0xf1, 0, 0, 0, n as u8])
}

/// Lines for `ip` that give a link, which is down, a link-local address without duplicate address
/// detection. Detection takes more than a second, in which the host cannot solicit neighbours.
pub(crate) fn link_local_without_dad(link: &str, addresses: &Dual<IpAddr>, n: usize) -> String {
    match addresses.v6 {
        Some(_) => {
            format!("link set {link} addrgenmode none\naddr add fe80::{n:x}/64 dev {link} nodad\n")
        }
        None => String::new(),
    }
}

/// The flag that disables duplicate address detection. IPv4 has none.
pub(crate) fn nodad(family: Family) -> &'static str {
    match family {
        Family::V4 => "",
        Family::V6 => " nodad",
    }
}
