//! Checks of the settings of this host that block packets of pods.
//!
//! Findings are derived from `HostFacts`. A value that cannot be read is not a finding, but is
//! reported as unread. Neither the daemon's start nor its readiness depends on findings.

mod arp;
mod bridges;
mod changes;
mod cni;
mod foreign;
mod ipv6;
mod limits;
mod read;
mod routes;
mod stops;

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use flannel_core::{Remedy, Subnet, Subnets};
use flannel_firewall::{LegacyMemory, Stop};
use flannel_netlink::Shadow;
use flannel_netlink::foreign::{Attached, Rule, TableRoute};

use crate::finding::{Check, Finding};
use crate::remedy::readdress;
use bridges::SharedSubnet;
use cni::Superseded;
use ipv6::{Expiring, Off};
use limits::Tracked;
use read::read;

pub use changes::log_changes;
pub use read::CheckedNetwork;

/// The checks of the host that runs a network.
pub const CHECKS: [Check; 18] = [
    Check::Forwarding,
    Check::Sysctl,
    Check::RpFilter,
    Check::Arp,
    Check::IpRule,
    Check::Xdp,
    Check::TcFilter,
    Check::Qdisc,
    Check::ForwardDrop,
    Check::Clash,
    Check::Cni,
    Check::Neighbours,
    Check::Conntrack,
    Check::BridgeNetfilter,
    Check::Route,
    Check::PodMtu,
    Check::DataPlane,
    Check::Guard,
];

/// The inputs of the checks. A value that is `None`, or not in a map, could not be read.
#[derive(Debug, Clone, Default)]
struct HostFacts {
    /// The pod networks of the enabled families.
    pod_networks: Dual<Subnet>,
    /// This node's own subnets.
    own: Dual<Subnet>,
    /// The tunnel devices; empty with a backend that needs none.
    tunnels: Vec<LinkName>,
    /// The external interface.
    uplink: Option<LinkName>,
    /// Kubernetes runs here.
    kubernetes: bool,
    /// `net.ipv4.ip_forward` and `net.ipv6.conf.all.forwarding`.
    forwarding: Dual<bool>,
    /// `net.ipv4.conf.DEVICE.forwarding`. The value for IPv6 has no effect on forwarding in Linux.
    device_forwarding: BTreeMap<LinkName, bool>,
    /// The larger of `net.ipv4.conf.DEVICE.rp_filter` and `net.ipv4.conf.all.rp_filter`: 0 off, 1
    /// strict, 2 loose.
    rp_filter: BTreeMap<LinkName, u8>,
    /// `arp_ignore` of the external interface: the larger of its own value and the value of `all`.
    /// No value of `arp_announce` breaks anything.
    arp_ignore: Option<u8>,
    /// `arp_filter` of the external interface or of `all` is on.
    arp_filter: Option<bool>,
    /// A peer that this host reaches through another device than the external interface, preferably
    /// one on its link. Read only if `rp_filter` or `arp_filter` make it matter.
    elsewhere: Option<(IpAddr, LinkName)>,
    /// The routing rules of both families, in the kernel's order.
    rules: Vec<Rule>,
    /// The routes in tables of rules that may apply to packets to pods.
    tables: BTreeMap<(u32, Family), Vec<TableRoute>>,
    /// What is attached to tunnel devices.
    attached: BTreeMap<LinkName, Attached>,
    /// Whether bridged packets pass iptables: `net.bridge.bridge-nf-call-iptables`.
    bridge_calls: Dual<bool>,
    /// The limit of neighbour entries, `gc_thresh3`. Only the initial network namespace has it.
    max_neighbours: Dual<u64>,
    /// A tunnel device has an entry for the public address of each peer, as ipip has.
    has_entry_per_peer: bool,
    /// The connections that are tracked; `None` too if nothing tracks any.
    tracked: Option<Tracked>,
    /// Rules of other programs that stop packets of pods.
    stops: Vec<Stop>,
    /// All addresses of this host.
    addresses: Vec<(LinkName, IpAddr)>,
    /// The public addresses of this node.
    public: Dual<IpAddr>,
    /// The networks on the external interface's own link.
    on_link: Vec<Subnet>,
    /// Routes of other programs to the destinations of flannel's routes.
    shadows: Vec<Shadow>,
    /// The leases of other nodes, with their public addresses.
    peers: Vec<(Subnets, Dual<IpAddr>)>,
    /// The MTU that the network has for pods, in bytes.
    mtu: Option<u32>,
    /// The MTU of each pod on the bridge with this node's subnet.
    pods: Vec<u32>,
    /// Subnets of this node with several devices.
    shared: Vec<SharedSubnet>,
    /// A CNI config comes before flannel's.
    superseded: Option<Superseded>,
    /// What the external interface loses, because it ignores router advertisements.
    expiring: Option<Expiring>,
    /// Where IPv6 is off, although pods need it.
    ipv6_off: Option<Off>,
    /// Values that could not be read, with the reason if it is known.
    unread: Vec<String>,
}

/// The report on a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostReport {
    /// The findings, errors first.
    pub findings: Vec<Finding>,
    /// Values that could not be read.
    pub unread: Vec<String>,
}

/// Checks this host. Results of external programs may come from `memory`.
pub async fn check_host(network: CheckedNetwork, memory: &LegacyMemory) -> HostReport {
    let facts = read(network, memory).await;
    // With many leases and routes it takes long. The task fails only if the runtime shuts down.
    let check = move || HostReport { findings: check(&facts), unread: facts.unread };
    tokio::task::spawn_blocking(check).await.unwrap_or_default()
}

/// The finding about the first rule of another program that stops packets to the pod `address`, or
/// `None` if no such rule is found. Results of external programs may come from `memory`.
pub async fn stop_on_the_way(
    network: CheckedNetwork,
    memory: &LegacyMemory,
    address: IpAddr,
) -> Option<Finding> {
    stops::on_the_way(&read(network, memory).await, address)
}

/// All findings, errors first.
fn check(facts: &HostFacts) -> Vec<Finding> {
    let mut found = forwarding(facts);
    found.extend(rp_filter(facts));
    found.extend(arp::arp(facts));
    found.extend(ipv6::ipv6(facts));
    found.extend(foreign::rules(facts));
    found.extend(foreign::attached(facts));
    found.extend(stops::stops(facts));
    found.extend(clashes(facts));
    found.extend(bridges::shared(facts));
    found.extend(cni::superseded(facts));
    found.extend(limits::neighbours(facts));
    found.extend(limits::connections(facts));
    found.extend(bridge_calls(facts));
    found.extend(pods(facts));
    found.extend(routes::shadows(facts));
    // The sort is stable: within each severity the order above stays.
    found.sort_by_key(|finding| !finding.is_error());
    found
}

fn forwarding(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (family, _) in facts.pod_networks.iter() {
        let key = match family {
            Family::V4 => "net.ipv4.ip_forward",
            Family::V6 => "net.ipv6.conf.all.forwarding",
        };
        if facts.forwarding[family] == Some(false) {
            let text = format!(
                "{key} is 0: this host forwards no {family} packets, so no pod reaches another host"
            );
            found.push(
                Finding::error(Check::Forwarding, text).with_command(format!("sysctl -w {key}=1")),
            );
        }
    }
    // Settings of devices have no effect while the global one is off.
    if facts.pod_networks.v4.is_none() || facts.forwarding.v4 != Some(true) {
        return found;
    }
    for (device, _) in facts.device_forwarding.iter().filter(|(_, on)| !**on) {
        let key = format!("net.ipv4.conf.{}.forwarding", sysctl_name(*device));
        let text = format!("{key} is 0: packets that arrive on {device} are not forwarded");
        let carries_pods = facts.uplink != Some(*device) || facts.tunnels.is_empty();
        let finding = if carries_pods {
            Finding::error(Check::Forwarding, text)
        } else {
            Finding::warning(Check::Forwarding, text)
        };
        found.push(finding.with_command(format!("sysctl -w {key}=1")));
    }
    found
}

/// A device's name in a key of `sysctl`, where a dot is a separator.
fn sysctl_name(device: LinkName) -> String {
    device.as_str().replace('.', "/")
}

fn rp_filter(facts: &HostFacts) -> Vec<Finding> {
    if facts.pod_networks.v4.is_none() {
        return Vec::new();
    }
    let strict = facts.rp_filter.iter().filter(|(_, mode)| **mode == 1);
    strict
        .map(|(device, _)| {
            let example = facts.elsewhere.filter(|_| facts.uplink == Some(*device));
            let example = example.map(|(to, link)| format!(", as those to {to} do through {link}"));
            let text = format!(
                "rp_filter of {device} is strict: the kernel silently drops packets if replies to \
             them leave via another device{}",
                example.unwrap_or_default()
            );
            // The kernel uses the larger of the values for the device and for `all`.
            let repair = format!("sysctl -w net.ipv4.conf.{}.rp_filter=2", sysctl_name(*device));
            Finding::warning(Check::RpFilter, text).with_command(repair)
        })
        .collect()
}

/// The remedy if a pod network contains addresses of hosts.
fn another_network() -> Remedy {
    Remedy::SetConfig.remark("with a Network that holds no address of a host")
}

fn clashes(facts: &HostFacts) -> Vec<Finding> {
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
                Check::Clash,
                format!(
                    "cni0 has {address}, which is not in this node's subnet {own}: new pods \
                    get no network"
                ),
            )
            .with_command("ip link delete cni0"),
            _ => Finding::warning(
                Check::Clash,
                format!(
                    "the pod network {network} contains {address}, an address of {device}: \
                    pods cannot reach it"
                ),
            )
            .with_remedy(another_network()),
        });
    }
    found.extend(networks_with_nodes(facts));
    found.extend(same_addresses(facts));
    found
}

/// Pod networks that contain public addresses of nodes. An unsuitable network can contain the
/// addresses of all nodes.
fn networks_with_nodes(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (family, network) in facts.pod_networks.iter() {
        let address = |public: &Dual<IpAddr>| public[family].filter(|a| network.contains(*a));
        let mut inside = facts.peers.iter().filter_map(|(key, all)| Some((key, address(all)?)));
        let Some((subnets, address)) = inside.next() else { continue };
        let more = match inside.count() {
            0 => String::new(),
            more => format!(", and those of {more} more leases"),
        };
        let text = format!(
            "the pod network {network} contains {address}, the public address of {subnets}{more}: \
             tunnel packets to it would go into the tunnel"
        );
        found.push(Finding::error(Check::Clash, text).with_remedy(another_network()));
    }
    found
}

/// Leases of other nodes with an address of this host.
fn same_addresses(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    let here: BTreeMap<IpAddr, LinkName> =
        facts.addresses.iter().map(|(device, address)| (*address, *device)).collect();
    for (subnets, public) in &facts.peers {
        let same = public.values().find(|address| facts.public.values().any(|own| own == *address));
        // While this node's lease is not known, the lease may be its own.
        let local = || {
            facts.own.values().next()?;
            public.values().find_map(|address| Some((address, here.get(address)?)))
        };
        let finding = if let Some(address) = same {
            let text = format!(
                "{subnets} is the lease of another node with this node's public address {address}: \
                 each node receives packets for the other"
            );
            Finding::error(Check::DuplicateAddress, text)
        } else if let Some((address, device)) = local() {
            let text = format!(
                "{subnets} is the lease of another node with the public address {address}, which \
                 {device} of this host has: packets to that node come back"
            );
            Finding::error(Check::Clash, text)
        } else {
            continue;
        };
        found.push(finding.with_remedy(readdress(subnets)));
    }
    found
}

/// Checks the MTU of pods that are older than the network's MTU. A swap from Go flannel in dual
/// stack leaves such pods, because its MTU is too large for the IPv6 tunnel.
fn pods(facts: &HostFacts) -> Option<Finding> {
    let mtu = facts.mtu?;
    let large: Vec<u32> = facts.pods.iter().copied().filter(|pod| *pod > mtu).collect();
    let text = format!(
        "{} pods have an MTU of up to {}, and the network carries {mtu} bytes: they were started \
         with an earlier MTU, and lose large packets if they do not get ICMP messages about it",
        large.len(),
        large.iter().max()?,
    );
    let remedy = Remedy::run("kubectl drain --ignore-daemonsets NODE && kubectl uncordon NODE")
        .remark("or restart these pods: a new pod has the right MTU");
    Some(Finding::warning(Check::PodMtu, text).with_remedy(remedy))
}

/// Checks that bridged packets pass iptables. Services of Kubernetes need it for pods on a bridge.
fn bridge_calls(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for family in facts.pod_networks.families().filter(|_| facts.kubernetes) {
        if facts.bridge_calls[family] != Some(false) {
            continue;
        }
        let key = match family {
            Family::V4 => "net.bridge.bridge-nf-call-iptables",
            Family::V6 => "net.bridge.bridge-nf-call-ip6tables",
        };
        let text = format!(
            "{key} is not 1: if pods on this host reach each other through a service, replies have \
             the wrong source address"
        );
        let repair = format!("modprobe br_netfilter; sysctl -w {key}=1");
        found.push(Finding::warning(Check::BridgeNetfilter, text).with_command(repair));
    }
    found
}

#[cfg(test)]
mod tests;
