//! The commands that let packets of pods pass the rules of another program.

use std::collections::BTreeSet;

use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::object::LinkName;
use flannel_core::{Remedy, Subnet};
use flannel_firewall::{Effect, Flow, Stop};
use flannel_netlink::nftables::program::Translation;

/// The tables of iptables.
const TABLES: [&str; 5] = ["raw", "mangle", "nat", "filter", "security"];
/// What is lost without a setting of the program itself.
const SETTINGS: &str = "also put it into the settings of the program that made the rules, which \
                        else removes it at its next reload";

const QUEUE: &str = "or start the program that reads the queue";

/// The program that made a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Firewalld,
    Ufw,
    Docker,
    Other,
}

impl Owner {
    fn of(stop: &Stop) -> Self {
        let table = stop.table.split(' ').nth(1).unwrap_or_default();
        let enters = |start: &str| stop.entered.iter().any(|chain| chain.starts_with(start));
        // Docker has a rule for the address of each container with a published port.
        let is_of_container = stop.chain == "PREROUTING" && table == "raw" && !stop.pods.is_empty();
        if table == "firewalld" {
            Self::Firewalld
        } else if enters("ufw-") || enters("ufw6-") {
            Self::Ufw
        } else if stop.chain.starts_with("DOCKER")
            || table.starts_with("docker-bridges")
            || is_of_container
        {
            Self::Docker
        } else {
            Self::Other
        }
    }
}

/// Shows the first rules of the hook in which flannel's rules about encryption must be the first.
pub fn first_rule() -> Remedy {
    Remedy::run("iptables -t mangle -S POSTROUTING; ip6tables -t mangle -S POSTROUTING")
        .remark("which program makes the first rule?")
}

/// Shows which program changes rules of nf_tables.
pub fn who_changes_rules() -> Remedy {
    Remedy::run("timeout 60 nft monitor")
        .remark("names the process of each change: stop it, or let it keep rules of others")
}

/// Devices of this node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Devices {
    /// The one by which packets of pods of other nodes arrive.
    pub(crate) to_peers: Option<LinkName>,
    /// The external interface.
    pub(crate) uplink: Option<LinkName>,
}

/// Lets packets of pods in `network` pass, and those of the tunnel.
pub(crate) fn admit(stop: &Stop, network: Subnet, devices: Devices) -> Remedy {
    let (of_tunnel, of_pods): (BTreeSet<Flow>, BTreeSet<Flow>) =
        stop.flows.iter().copied().partition(|flow| transport(*flow).is_some());
    let part = |flows| {
        let mut part = stop.clone();
        part.flows = flows;
        part
    };
    match (of_tunnel.is_empty(), of_pods.is_empty()) {
        (true, _) => admit_pods(stop, network, devices),
        (false, true) => admit_tunnel(stop, devices),
        (false, false) => Remedy::All(vec![
            admit_tunnel(&part(of_tunnel), devices),
            admit_pods(&part(of_pods), network, devices),
        ]),
    }
}

/// Lets the CNI plugin `bridge` not masquerade packets between pods.
pub(crate) fn masquerade_in_flannel() -> Remedy {
    Remedy::RestartDaemon.remark(
        "with --ip-masq, which makes new pods leave it to flannel; or write \"ipMasq\": false into \
         the delegate of flannel's CNI config",
    )
}

fn transport(flow: Flow) -> Option<Transport> {
    match flow {
        Flow::Tunnel(transport) | Flow::TunnelOut(transport) => Some(transport),
        _ => None,
    }
}

fn admit_pods(stop: &Stop, network: Subnet, devices: Devices) -> Remedy {
    if stop.effect == Effect::Queue {
        return accept(stop, network).remark(QUEUE);
    }
    // Docker masquerades the packets of its bridge, which has addresses of flannel here.
    let names_docker = stop.rule.as_ref().is_some_and(|rule| rule.text.contains("docker"));
    if stop.effect == Effect::Translate(Translation::Masquerade) && names_docker {
        return accept(stop, network).remark(
            "that lasts until Docker starts again: start dockerd with --ip-masq=false, which \
             flannelctl docker-opts writes if flannel masquerades",
        );
    }
    match Owner::of(stop) {
        Owner::Firewalld => Remedy::run(format!(
            "firewall-cmd --permanent --zone=trusted --add-source={network} && firewall-cmd \
             --reload"
        )),
        Owner::Ufw => {
            Remedy::run(format!("ufw route allow from {network} && ufw route allow to {network}"))
        }
        Owner::Docker => {
            let device =
                devices.to_peers.map_or_else(|| "DEVICE".to_owned(), |device| device.to_string());
            accept(stop, network).remark(format!(
                "that lasts until Docker starts again: start dockerd with --allow-direct-routing \
                 (Docker 28.2 and later), or make its network with -o \
                 com.docker.network.bridge.trusted_host_interfaces={device}"
            ))
        }
        Owner::Other => accept(stop, network).remark(SETTINGS),
    }
}

/// Lets the packets of the tunnel pass.
fn admit_tunnel(stop: &Stop, devices: Devices) -> Remedy {
    let transports: BTreeSet<Transport> =
        stop.flows.iter().filter_map(|flow| transport(*flow)).collect();
    // The settings for ports are about packets that arrive.
    let arrive = stop.flows.iter().all(|flow| matches!(flow, Flow::Tunnel(_)));
    let each = |command: &dyn Fn(Transport) -> String| {
        transports.iter().map(|transport| command(*transport)).collect::<Vec<_>>()
    };
    match Owner::of(stop) {
        _ if stop.effect == Effect::Queue => accept_tunnel(stop, &transports).remark(QUEUE),
        Owner::Firewalld if arrive => {
            let zone = zone(stop, devices.uplink);
            let mut commands = each(&|transport| match transport {
                Transport::Udp(port) => {
                    format!("firewall-cmd --permanent --zone={zone} --add-port={port}/udp")
                }
                Transport::Protocol(number) => {
                    format!("firewall-cmd --permanent --zone={zone} --add-protocol={number}")
                }
                _ => String::new(),
            });
            commands.push("firewall-cmd --reload".to_owned());
            Remedy::run(commands.join(" && "))
        }
        Owner::Ufw if arrive => {
            let commands = each(&|transport| match transport {
                Transport::Udp(port) => format!("ufw allow {port}/udp"),
                // ufw knows no other protocols by number.
                _ => format!("{} -I INPUT {} -j ACCEPT", program(stop), match_of(transport)),
            });
            let remedy = Remedy::run(commands.join(" && "));
            let is_rule = |it: &Transport| !matches!(it, Transport::Udp(_));
            if transports.iter().any(is_rule) { remedy.remark(SETTINGS) } else { remedy }
        }
        _ => accept_tunnel(stop, &transports).remark(SETTINGS),
    }
}

/// Accepts packets of the tunnel directly before the rule, or before the policy.
fn accept_tunnel(stop: &Stop, transports: &BTreeSet<Transport>) -> Remedy {
    let place = iptables(stop);
    let commands = transports.iter().map(|transport| match (&place, transport) {
        (Some(iptables), transport) => format!("{iptables} {} -j ACCEPT", match_of(*transport)),
        (None, Transport::Udp(port)) => format!("{} udp dport {port} accept", nft(stop)),
        (None, Transport::Protocol(number)) => {
            format!("{} meta l4proto {number} accept", nft(stop))
        }
        _ => String::new(),
    });
    Remedy::run(commands.collect::<Vec<_>>().join("; "))
}

/// The zone of firewalld whose chain has the rule, such as `filter_IN_dmz_deny`. Otherwise a
/// command that prints the zone of the external interface.
fn zone(stop: &Stop, uplink: Option<LinkName>) -> String {
    const PARTS: [&str; 5] = ["_pre", "_log", "_deny", "_allow", "_post"];
    if let Some((_, zone)) = stop.chain.split_once("IN_") {
        let without = PARTS.iter().find_map(|part| zone.strip_suffix(part));
        return without.unwrap_or(zone).to_owned();
    }
    let uplink = uplink.map_or_else(|| "DEVICE".to_owned(), |uplink| uplink.to_string());
    format!("$(firewall-cmd --get-zone-of-interface={uplink})")
}

/// The condition for iptables.
fn match_of(transport: Transport) -> String {
    match transport {
        Transport::Udp(port) => format!("-p udp --dport {port}"),
        Transport::Protocol(number) => format!("-p {number}"),
        _ => String::new(),
    }
}

/// Accepts packets of pods directly before the rule, or at the end of the chain before its policy.
/// So the rules before it still see the packets.
fn accept(stop: &Stop, network: Subnet) -> Remedy {
    let between_pods = stop.flows.iter().all(|flow| matches!(flow, Flow::FromPod | Flow::ToPod));
    let sides: &[&[bool]] = if between_pods { &[&[true, false]] } else { &[&[true], &[false]] };
    let commands: Vec<String> = sides
        .iter()
        .map(|sides| match iptables(stop) {
            Some(iptables) => {
                let option = |source: &bool| if *source { "-s" } else { "-d" };
                let sides = sides.iter().map(|side| format!("{} {network} ", option(side)));
                format!("{iptables} {}-j ACCEPT", sides.collect::<String>())
            }
            None => {
                let word = if stop.family == Family::V4 { "ip" } else { "ip6" };
                let option = |source: &bool| if *source { "saddr" } else { "daddr" };
                let sides = sides.iter().map(|side| format!("{word} {} {network} ", option(side)));
                format!("{} {}accept", nft(stop), sides.collect::<String>())
            }
        })
        .collect();
    Remedy::run(commands.join("; "))
}

/// The command of iptables up to the place of a new rule. `None` if the chain is not one of
/// iptables.
fn iptables(stop: &Stop) -> Option<String> {
    let (family, table) = stop.table.split_once(' ')?;
    let is_built_in = stop.entered.first().is_some_and(|base| {
        matches!(&**base, "PREROUTING" | "INPUT" | "FORWARD" | "OUTPUT" | "POSTROUTING")
    });
    let is_of_iptables = is_built_in && TABLES.contains(&table) && family != "inet";
    if !stop.legacy && !is_of_iptables {
        return None;
    }
    let table = if table == "filter" { String::new() } else { format!(" -t {table}") };
    let place = match &stop.rule {
        Some(rule) => format!("-I {} {}", stop.chain, rule.number),
        None => format!("-A {}", stop.chain),
    };
    Some(format!("{}{table} {place}", program(stop)))
}

/// The program of iptables for the table of the rule.
fn program(stop: &Stop) -> String {
    let program = if stop.family == Family::V4 { "iptables" } else { "ip6tables" };
    let variant = if stop.legacy { "-legacy" } else { "" };
    format!("{program}{variant}")
}

/// The command of `nft` up to the new rule.
fn nft(stop: &Stop) -> String {
    let chain = format!("{} {}", stop.table, stop.chain);
    match stop.rule.as_ref().and_then(|rule| rule.handle) {
        Some(handle) => format!("nft insert rule {chain} handle {handle}"),
        None => format!("nft add rule {chain}"),
    }
}
