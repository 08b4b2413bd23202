//! A node's view of the list of all leases: its own entry, the occupied subnets, and whether an
//! entry can be kept.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::error::holder;
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Config, Subnets};

use super::Identity;
use crate::registry::{ConfigText, Entry, Listing};

/// The address that identifies a node: IPv4, or IPv6 without IPv4.
fn identifying(attrs: &LeaseAttrs, families: impl Iterator<Item = Family>) -> Option<IpAddr> {
    families.filter_map(|family| attrs.preferred.public[family]).next()
}

/// Attributes as a store returns them, for comparison.
pub(super) fn as_stored(attrs: &LeaseAttrs) -> LeaseAttrs {
    LeaseAttrs::from_json(&attrs.to_json()).unwrap_or_else(|_| attrs.clone())
}

/// The entry with our holder ID, else an entry with our public address. Of several entries, the one
/// with the previous subnets, else the one with the smallest precedence.
pub(super) fn own_entry<'a>(
    listing: &'a Listing,
    us: &Identity,
    config: &Config,
    attrs: &LeaseAttrs,
) -> Option<&'a Entry> {
    let address = identifying(attrs, config.networks.families());
    let public = |entry: &Entry, address| entry.lease.attrs.preferred.public[Family::of(address)];
    let same_address =
        |entry: &Entry| address.is_some_and(|address| public(entry, address) == Some(address));
    let our_id = |entry: &Entry| entry.holder == Some(us.holder);
    let had_before = |entry: &Entry| Some(entry.lease.subnets) == us.previous;
    let ours = listing.entries.iter().filter(|entry| our_id(entry) || same_address(entry));
    ours.min_by_key(|entry| (!our_id(entry), !had_before(entry), entry.lease.precedence()))
}

/// The subnets that a new lease must not overlap, including unreadable keys.
pub(super) fn occupied(listing: &Listing) -> impl Iterator<Item = Subnets> {
    let unreadable = listing.skipped.iter().filter_map(|skipped| skipped.key.parse().ok());
    listing.entries.iter().map(|entry| entry.lease.subnets).chain(unreadable)
}

/// The reason why the entry cannot be our lease, if there is one.
pub(super) fn unfit(config: &Config, listing: &Listing, entry: &Entry) -> Option<String> {
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
pub(super) fn earlier<'a>(listing: &'a Listing, entry: &Entry) -> Option<&'a Entry> {
    let overlaps = |other: &&Entry| other.lease.subnets.overlaps(&entry.lease.subnets);
    let overlapping = listing.entries.iter().filter(overlaps);
    let first = overlapping.min_by_key(|other| other.lease.precedence())?;
    (first.lease.precedence() < entry.lease.precedence()).then_some(first)
}

/// The pod networks of the config have these subnets.
pub(super) fn is_config_of(text: &ConfigText, subnets: &Subnets) -> bool {
    let Ok(config) = Config::parse(&text.text) else { return false };
    Family::BOTH.into_iter().all(|family| match (config.networks[family], subnets.family(family)) {
        (Some(network), Some(subnet)) => network.network.covers(&subnet),
        (None, None) => true,
        _ => false,
    })
}

/// The subnets are of exactly the enabled families, of the right length, and between min and max.
pub(super) fn fits(config: &Config, subnets: &Subnets) -> bool {
    Family::BOTH.into_iter().all(|family| match (config.networks[family], subnets.family(family)) {
        (Some(network), Some(subnet)) => {
            subnet.len() == network.subnet_len && (network.min..=network.max).contains(&subnet)
        }
        (None, None) => true,
        _ => false,
    })
}
