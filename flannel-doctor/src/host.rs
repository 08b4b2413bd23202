//! What about this host may keep pods from reaching each other, though leases and objects are in order.
//!
//! Findings are derived from `Facts`. What could not be read is no finding, but reported as unread.
//! Findings change nothing: neither the start nor readiness depends on them.

mod read;

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_api::Finding;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use flannel_core::{Subnet, Subnets};
use flannel_firewall::{ForwardDrop, LegacyMemory};

use crate::commands::release;
use read::read;

pub use read::HostScene;

/// The check that the advisories of the network report too.
pub const DUPLICATE: &str = "duplicate-address";

/// Where pods and hosts get in each other's way.
const ANOTHER_NETWORK: &str =
    "flannelctl config set FILE # with a Network that holds no address of a host";

/// What the checks look at. What is `None`, or not in a map, could not be read.
#[derive(Debug, Clone, Default)]
struct Facts {
    /// Of the enabled families.
    pod_networks: Dual<Subnet>,
    /// This node's own subnets.
    own: Dual<Subnet>,
    /// Devices of ours that packets between pods pass; empty with a backend that needs none.
    tunnels: Vec<LinkName>,
    /// Kubernetes runs here.
    kubernetes: bool,
    /// `net.ipv4.ip_forward` and `net.ipv6.conf.all.forwarding`.
    forwarding: Dual<bool>,
    /// `net.ipv4.conf.DEVICE.forwarding`.
    device_forwarding: BTreeMap<LinkName, bool>,
    /// `net.ipv4.conf.DEVICE.rp_filter`, or that of `all` if it is stricter: 0 off, 1 strict, 2
    /// loose.
    rp_filter: BTreeMap<LinkName, u8>,
    /// Whether bridged packets pass iptables (`net.bridge.bridge-nf-call-iptables`); without the
    /// module, no.
    bridge_calls: Dual<bool>,
    /// How many neighbours the kernel remembers at most (`gc_thresh3`); only the machine's own
    /// namespace knows.
    most_neighbours: Dual<u64>,
    /// Who drops forwarded packets unless a rule accepts them.
    drops: Vec<ForwardDrop>,
    /// All addresses of this host.
    addresses: Vec<(LinkName, IpAddr)>,
    /// The public addresses of this node.
    public: Dual<IpAddr>,
    /// The networks on the external interface's own link.
    on_link: Vec<Subnet>,
    /// Other nodes' leases, with their public addresses.
    peers: Vec<(Subnets, Dual<IpAddr>)>,
    /// What matters and could not be read, with the reason where there is one to tell.
    unread: Vec<String>,
}

/// What there is to say of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostReport {
    /// Errors first.
    pub findings: Vec<Finding>,
    /// What could not be looked at.
    pub unread: Vec<String>,
}

/// Looks at this host. What takes a process may come from `memory`.
pub async fn check_host(scene: HostScene, memory: &LegacyMemory) -> HostReport {
    let facts = read(scene, memory).await;
    HostReport { findings: check(&facts), unread: facts.unread }
}

/// Everything that is to be said of these facts, errors first.
fn check(facts: &Facts) -> Vec<Finding> {
    let mut found = forwarding(facts);
    found.extend(rp_filter(facts));
    found.extend(drops(facts));
    found.extend(clashes(facts));
    found.extend(neighbours(facts));
    found.extend(bridge_calls(facts));
    // Stable: the order above stays within each severity.
    found.sort_by_key(|finding| !finding.is_error());
    found
}

fn forwarding(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (family, _) in facts.pod_networks.iter() {
        let key = match family {
            Family::V4 => "net.ipv4.ip_forward",
            Family::V6 => "net.ipv6.conf.all.forwarding",
        };
        if facts.forwarding[family] == Some(false) {
            let text = format!(
                "{key} is 0: this host forwards no {family} packets, so that no pod reaches another host"
            );
            found.push(
                Finding::error("forwarding", text).with_command(format!("sysctl -w {key}=1")),
            );
        }
    }
    // Without the first switch these tell nothing new.
    if facts.pod_networks.v4.is_none() || facts.forwarding.v4 != Some(true) {
        return found;
    }
    for (device, _) in facts.device_forwarding.iter().filter(|(_, on)| !**on) {
        let key = format!("net.ipv4.conf.{}.forwarding", sysctl_name(*device));
        let text = format!("{key} is 0: what arrives on {device} is not forwarded to pods");
        let carries_pods = facts.tunnels.contains(device) || facts.tunnels.is_empty();
        let finding = if carries_pods {
            Finding::error("forwarding", text)
        } else {
            Finding::warning("forwarding", text)
        };
        found.push(finding.with_command(format!("sysctl -w {key}=1")));
    }
    found
}

/// A device's name in a key of `sysctl`, where a dot divides.
fn sysctl_name(device: LinkName) -> String {
    device.as_str().replace('.', "/")
}

fn rp_filter(facts: &Facts) -> Vec<Finding> {
    if facts.pod_networks.v4.is_none() {
        return Vec::new();
    }
    let strict = facts.rp_filter.iter().filter(|(_, mode)| **mode == 1);
    let finding = |(device, _): (&LinkName, &u8)| {
        let text = format!(
            "rp_filter of {device} is strict: packets that come another way than their answers would go are dropped \
             silently"
        );
        // The larger of the two counts, so that 2 for the device is enough.
        let mend = format!("sysctl -w net.ipv4.conf.{}.rp_filter=2", sysctl_name(*device));
        Finding::warning("rp-filter", text).with_command(mend)
    };
    strict.map(finding).collect()
}

fn drops(facts: &Facts) -> Vec<Finding> {
    let concerns =
        |drop: &&ForwardDrop| facts.pod_networks[drop.family].is_some() && !drop.accepts_pods;
    let finding = |drop: &ForwardDrop| {
        let family = drop.family;
        let text = format!(
            "{drop} drops forwarded {family} packets that none of its own rules accepts, those of pods too: flannel's rules \
             are in another table, or off"
        );
        let network =
            facts.pod_networks[family].map(|network| network.to_string()).unwrap_or_default();
        let word = if family == Family::V4 { "ip" } else { "ip6" };
        let iptables = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let mend = match (drop.legacy, drop.table.as_str()) {
            (true, _) => format!("{iptables}-legacy -P FORWARD ACCEPT"),
            (false, "ip filter" | "ip6 filter") if drop.chain == "FORWARD" => {
                format!("{iptables} -P FORWARD ACCEPT")
            }
            (false, _) => format!(
                "nft insert rule {} {} {word} saddr {network} accept; nft insert rule {} {} {word} daddr {network} accept",
                drop.table, drop.chain, drop.table, drop.chain
            ),
        };
        Finding::warning("forward-drop", text).with_command(mend)
    };
    facts.drops.iter().filter(concerns).map(finding).collect()
}

fn clashes(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    let network =
        |address: IpAddr| facts.pod_networks.values().find(|network| network.contains(address));
    for (device, address) in &facts.addresses {
        let Some(network) = network(*address) else { continue };
        let own = facts.own[Family::of(*address)];
        if facts.tunnels.contains(device) || own.is_none_or(|own| own.contains(*address)) {
            continue;
        }
        let own = own.map(|own| own.to_string()).unwrap_or_default();
        found.push(match device.as_str() {
            "cni0" => Finding::error(
                "clash",
                format!("cni0 has {address}, which is not of this node's subnet {own}: pods that start now get no network"),
            )
            .with_command("ip link delete cni0"),
            _ => Finding::warning(
                "clash",
                format!("the pod network {network} contains {address}, an address of {device}: pods cannot reach it"),
            )
            .with_command(ANOTHER_NETWORK),
        });
    }
    for (subnets, public) in &facts.peers {
        let inside = public.values().find_map(|address| Some((address, network(*address)?)));
        if let Some((address, network)) = inside {
            let text = format!(
                "the pod network {network} contains {address}, the public address of {subnets}: its tunnel packets would \
                 go into the tunnel"
            );
            found.push(Finding::error("clash", text).with_command(ANOTHER_NETWORK));
        }
        let same = public.values().find(|address| facts.public.values().any(|own| own == *address));
        if let Some(address) = same {
            let text = format!(
                "{subnets} is the lease of another node with this node's public address {address}: each takes the other's \
                 packets"
            );
            let mend = format!("{}, else give it another --public-ip", release(subnets));
            found.push(Finding::error(DUPLICATE, text).with_command(mend));
        }
    }
    found
}

/// Only peers whose public address is on the external interface's link take an entry that counts:
/// the kernel asks for their MAC address, be it for pods' packets as they are or for those of a
/// tunnel. All others share the router's. The permanent entries of the tunnel itself do not count.
///
/// **Source**: linux `net/core/neighbour.c: neigh_alloc` (5.0: permanent entries are exempt).
fn neighbours(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (family, most) in facts.most_neighbours.iter() {
        let asked = |address: IpAddr| facts.on_link.iter().any(|network| network.contains(address));
        let peers =
            facts.peers.iter().filter(|(_, public)| public[family].is_some_and(asked)).count()
                as u64;
        if peers < *most {
            continue;
        }
        let key =
            format!("net.ipv{}.neigh.default.gc_thresh3", if family == Family::V4 { 4 } else { 6 });
        let text = format!(
            "{key} is {most}, and {peers} peers are on this host's own link: the kernel forgets neighbours that it needs, and drops packets"
        );
        let enough = (4 * peers).next_power_of_two();
        found.push(
            Finding::warning("neighbours", text).with_command(format!("sysctl -w {key}={enough}")),
        );
    }
    found
}

/// Only services of Kubernetes need it, and only for pods on one bridge.
fn bridge_calls(facts: &Facts) -> Vec<Finding> {
    let off = |family: &Family| facts.bridge_calls[*family] == Some(false);
    let families = facts.pod_networks.families().filter(|_| facts.kubernetes);
    let finding = |family| {
        let key = match family {
            Family::V4 => "net.bridge.bridge-nf-call-iptables",
            Family::V6 => "net.bridge.bridge-nf-call-ip6tables",
        };
        let text = format!(
            "{key} is not 1: what pods on this host send each other by way of a service's address is answered from \
             the wrong one"
        );
        Finding::warning("bridge-netfilter", text)
            .with_command(format!("modprobe br_netfilter; sysctl -w {key}=1"))
    };
    families.filter(off).map(finding).collect()
}

#[cfg(test)]
mod tests;
