//! Checks of limits of the kernel: entries of neighbours, and connections that it tracks.

use flannel_core::address::Family;

use super::HostFacts;
use crate::finding::{Check, Finding};

/// The connections that the kernel tracks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tracked {
    /// Their number, `nf_conntrack_count`.
    pub(super) now: u64,
    /// The largest number, `nf_conntrack_max`; 0 means unlimited.
    pub(super) most: u64,
}

/// Checks the limit of neighbour entries. A peer whose public address is on the external
/// interface's link needs an entry there, with or without a tunnel. All others share the router's
/// entry. Permanent entries, such as the entries of vxlan, do not count. Some tunnel devices have
/// an entry for each peer, and these count.
///
/// **Source**: linux `net/core/neighbour.c: neigh_alloc` (5.0: permanent entries are exempt).
pub(super) fn neighbours(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (family, max) in facts.max_neighbours.iter() {
        let with_address = facts.peers.iter().filter_map(|(_, public)| public[family]);
        let near = with_address
            .clone()
            .filter(|address| facts.on_link.iter().any(|network| network.contains(*address)))
            .count() as u64;
        let in_tunnel = if facts.has_entry_per_peer { with_address.count() as u64 } else { 0 };
        let entries = near + in_tunnel;
        if entries < *max {
            continue;
        }
        let key =
            format!("net.ipv{}.neigh.default.gc_thresh3", if family == Family::V4 { 4 } else { 6 });
        let who = match in_tunnel {
            0 => format!("{near} peers are on this host's own link"),
            _ => format!("peers need {entries} neighbours, because the tunnel has one for each"),
        };
        let text = format!(
            "{key} is {max}, and {who}: the kernel removes neighbours that it needs, and drops \
             packets"
        );
        let enough = (4 * entries).next_power_of_two();
        found.push(
            Finding::warning(Check::Neighbours, text)
                .with_command(format!("sysctl -w {key}={enough}")),
        );
    }
    found
}

/// Checks that the kernel can track more connections, as masquerading needs. Near the limit it
/// already forgets connections that are not established.
///
/// **Source**: linux `net/netfilter/nf_conntrack_core.c: __nf_conntrack_alloc`.
pub(super) fn connections(facts: &HostFacts) -> Option<Finding> {
    let Tracked { now, most } = facts.tracked.filter(|tracked| tracked.most > 0)?;
    let is_full = now >= most;
    if !is_full && now < most - most / 20 {
        return None;
    }
    let effect = if is_full { "drops" } else { "will soon drop" };
    let text = format!(
        "{now} connections are tracked, and net.netfilter.nf_conntrack_max is {most}: the kernel \
         {effect} packets of new ones"
    );
    let enough = (2 * now).next_power_of_two();
    let repair = format!("sysctl -w net.netfilter.nf_conntrack_max={enough}");
    let make = if is_full { Finding::error } else { Finding::warning };
    Some(make(Check::Conntrack, text).with_command(repair))
}
