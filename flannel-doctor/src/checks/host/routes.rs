//! Routes of other programs to the destinations of flannel's routes.

use flannel_core::address::Family;
use flannel_netlink::{Shadow, Taken};

use super::HostFacts;
use crate::finding::{Check, Finding};

/// The largest number of routes of other programs that have a finding each.
const MOST_SHADOWS: usize = 5;

/// Checks for routes of other programs to the destinations of flannel's routes, beginning with
/// those that take packets.
pub(super) fn shadows(facts: &HostFacts) -> Vec<Finding> {
    let mut shadows: Vec<&Shadow> = facts.shadows.iter().collect();
    shadows.sort_by_key(|shadow| (shadow.takes == Taken::None, shadow.takes != Taken::All));
    let mut found: Vec<Finding> =
        shadows.iter().take(MOST_SHADOWS).map(|shadow| shadowed(shadow)).collect();
    if let Some(more) = shadows.len().checked_sub(MOST_SHADOWS).filter(|more| *more > 0) {
        let text = format!("other programs have {more} more routes to destinations of flannel's");
        let networks = facts.pod_networks.iter().map(|(family, network)| {
            let ip = if family == Family::V4 { "ip" } else { "ip -6" };
            format!("{ip} route show root {network} | grep -v 'proto 241'")
        });
        let repair = networks.collect::<Vec<_>>().join("; ");
        found.push(Finding::warning(Check::Route, text).with_command(repair));
    }
    found
}

/// The finding about one route of another program.
fn shadowed(shadow: &Shadow) -> Finding {
    let Shadow { dst, route, protocol, takes } = shadow;
    let owner = protocol_name(*protocol);
    let made = if *takes == Taken::All { Finding::error } else { Finding::warning };
    let text = match takes {
        Taken::All => format!("{owner} has the route {route}: packets to {dst} take it"),
        Taken::WithTos(tos) => {
            format!("{owner} has the route {route}: packets to {dst} with TOS {tos} take it")
        }
        Taken::From(from) => {
            format!("{owner} has the route {route}: packets to {dst} from {from} take it")
        }
        Taken::None => format!(
            "{owner} has the route {route} behind flannel's: packets to {dst} take it while \
             flannel's is absent"
        ),
    };
    let ip = if dst.family() == Family::V4 { "ip" } else { "ip -6" };
    made(Check::Route, text).with_command(format!("{ip} route del {route}"))
}

/// The program that usually adds routes of this protocol.
///
/// **Source**: iproute2 `rt_protos`.
fn protocol_name(protocol: u8) -> String {
    let name = match protocol {
        2 => "the kernel, for an address of this host,",
        3 => "a program that names no protocol, such as ip,",
        4 => "the administrator (static)",
        9 => "the kernel, for a router advertisement,",
        11 => "zebra",
        12 => "bird",
        16 => "a DHCP client",
        18 => "keepalived",
        42 => "babel",
        186 => "BGP",
        187 => "IS-IS",
        188 => "OSPF",
        189 => "RIP",
        192 => "EIGRP",
        _ => return format!("a program with the route protocol {protocol}"),
    };
    name.to_owned()
}
