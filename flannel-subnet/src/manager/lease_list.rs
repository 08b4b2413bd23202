//! What a node looks up in the list of all leases: its own entry, the occupied subnets, and whether
//! it can keep an entry.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::error::holder;
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Config, Subnets};

use super::Identity;
use crate::registry::{ConfigText, Entry, LeaseList};

/// The address that identifies a node: the IPv4 address, or the IPv6 address if it has no IPv4.
fn identifying(attrs: &LeaseAttrs, families: impl Iterator<Item = Family>) -> Option<IpAddr> {
    families.filter_map(|family| attrs.preferred.public[family]).next()
}

/// Attributes as a store returns them, for comparison.
pub(super) fn as_stored(attrs: &LeaseAttrs) -> LeaseAttrs {
    LeaseAttrs::from_json(&attrs.to_json()).unwrap_or_else(|_| attrs.clone())
}

/// The entry with our holder ID, else an entry with our public address. If several entries match,
/// it is the entry with the previous subnets, else the entry with the smallest precedence.
pub(super) fn own_entry<'a>(
    listing: &'a LeaseList,
    us: &Identity,
    config: &Config,
    attrs: &LeaseAttrs,
) -> Option<&'a Entry> {
    let address = identifying(attrs, config.networks.families());
    let has_our_id = |entry: &Entry| entry.holder == Some(us.holder);
    let ours = listing.entries.iter().filter(|entry| {
        let public = entry.lease.attrs.preferred.public;
        has_our_id(entry)
            || address.is_some_and(|address| public[Family::of(address)] == Some(address))
    });
    ours.min_by_key(|entry| {
        let is_previous = Some(entry.lease.subnets) == us.previous;
        // `false` comes first.
        (!has_our_id(entry), !is_previous, entry.lease.precedence())
    })
}

/// The subnets that a new lease must not overlap, including unreadable keys.
pub(super) fn occupied(listing: &LeaseList) -> impl Iterator<Item = Subnets> {
    let unreadable = listing.skipped.iter().filter_map(|skipped| skipped.key.parse().ok());
    listing.entries.iter().map(|entry| entry.lease.subnets).chain(unreadable)
}

/// Why the entry cannot be our lease, or `None` if it can.
pub(super) fn unfit(config: &Config, listing: &LeaseList, entry: &Entry) -> Option<String> {
    if !fits(config, &entry.lease.subnets) {
        return Some("it does not fit the network config".into());
    }
    let other = earlier(listing, entry)?;
    Some(format!(
        "it overlaps {}, which {} had earlier",
        other.lease.subnets,
        holder(&other.lease.attrs)
    ))
}

/// An overlapping entry that was created earlier, so that this one never owned its subnets.
pub(super) fn earlier<'a>(listing: &'a LeaseList, entry: &Entry) -> Option<&'a Entry> {
    let first = listing
        .entries
        .iter()
        .filter(|other| other.lease.subnets.overlaps(&entry.lease.subnets))
        .min_by_key(|other| other.lease.precedence())?;
    (first.lease.precedence() < entry.lease.precedence()).then_some(first)
}

/// Whether the pod networks of the config contain these subnets.
pub(super) fn is_config_of(text: &ConfigText, subnets: &Subnets) -> bool {
    let Ok(config) = Config::parse(&text.text) else { return false };
    Family::BOTH.into_iter().all(|family| match (config.networks[family], subnets.family(family)) {
        (Some(network), Some(subnet)) => network.network.covers(&subnet),
        (None, None) => true,
        _ => false,
    })
}

/// Whether the subnets are of exactly the enabled families, of the right length, and between min
/// and max.
pub(super) fn fits(config: &Config, subnets: &Subnets) -> bool {
    Family::BOTH.into_iter().all(|family| match (config.networks[family], subnets.family(family)) {
        (Some(network), Some(subnet)) => {
            subnet.len() == network.subnet_len && (network.min..=network.max).contains(&subnet)
        }
        (None, None) => true,
        _ => false,
    })
}
