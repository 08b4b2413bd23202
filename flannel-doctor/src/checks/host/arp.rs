//! The check of ARP settings.

use std::net::IpAddr;

use super::{HostFacts, sysctl_name};
use crate::finding::{Check, Finding};

/// Checks that this host answers ARP requests for its public address.
///
/// **Source**: linux `net/ipv4/arp.c: arp_ignore, arp_filter`.
pub(super) fn arp(facts: &HostFacts) -> Vec<Finding> {
    let Some(uplink) = facts.uplink.filter(|_| facts.pod_networks.v4.is_some()) else {
        return Vec::new();
    };
    let on_link = |address: IpAddr| facts.on_link.iter().any(|network| network.contains(address));
    let finding = |setting: &str, value: u8, why: &str| {
        let text =
            format!("{setting} of {uplink} is {value}: this host answers no ARP request{why}");
        let keys = ["all".to_owned(), sysctl_name(uplink)];
        let repair = keys.map(|key| format!("net.ipv4.conf.{key}.{setting}=0")).join(" ");
        Finding::error(Check::Arp, text).with_command(format!("sysctl -w {repair}"))
    };
    let why_ignored = match facts.arp_ignore {
        Some(8) => Some(", so hosts on its link do not reach it".to_owned()),
        // Then the device that a request arrives on must have the address.
        Some(1 | 2) => {
            let public = facts.public.v4.filter(|public| {
                let is_here = facts.addresses.iter().any(|(_, address)| address == public);
                on_link(*public) && is_here && !facts.addresses.contains(&(uplink, *public))
            });
            public.map(|public| format!(" for {public}, which another device has"))
        }
        _ => None,
    };
    let ignored = facts.arp_ignore.zip(why_ignored);
    let ignored = ignored.map(|(value, why)| finding("arp_ignore", value, &why));
    let filtered = facts.elsewhere.filter(|(to, _)| facts.arp_filter == Some(true) && on_link(*to));
    let filtered = filtered.map(|(to, link)| {
        finding("arp_filter", 1, &format!(" of {to}, because packets to it leave through {link}"))
    });
    ignored.into_iter().chain(filtered).collect()
}
