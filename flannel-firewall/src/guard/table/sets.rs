//! The maps and the sets of the table, and their elements.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_netlink::nftables::{Batches, Marks, Set, Table, octets};

/// A prefix length in a family. Each has a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PrefixLen {
    pub(super) family: Family,
    pub(super) len: u8,
}

impl PrefixLen {
    pub(super) fn of(subnet: Subnet) -> Self {
        Self { family: subnet.family(), len: subnet.len() }
    }

    /// The name of the set of the sources with prefixes of this length.
    pub(super) fn set_name(self) -> String {
        format!("sources-{}-{}", short(self.family), self.len)
    }

    /// The number by which the transaction that creates the set refers to it. The maps have 1 and
    /// 2.
    pub(super) fn set_id(self) -> u32 {
        3 + u32::from(self.len) + if self.family == Family::V6 { 1000 } else { 0 }
    }

    /// The set with this name, which is [`Self::set_name`].
    pub(super) fn set<'a>(self, table: &Table<'a>, name: &'a str) -> Set<'a> {
        Set { table: *table, family: self.family, name, addresses: 1, marks: Marks::First }
    }
}

/// The name of the map from the public addresses of peers to marks.
pub(super) fn map_name(family: Family) -> String {
    format!("peers-{}", short(family))
}

/// The map with this name, which is [`map_name`].
pub(super) fn map<'a>(table: &Table<'a>, family: Family, name: &'a str) -> Set<'a> {
    Set { table: *table, family, name, addresses: 1, marks: Marks::Value }
}

fn short(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

/// The address and the mark in an element of a map.
pub(super) fn node_of(element: &[u8]) -> Option<(IpAddr, u32)> {
    let (address, mark) = element.split_last_chunk::<4>()?;
    Some((address_of(address)?, u32::from_ne_bytes(*mark)))
}

/// The mark and the source in an element of a set.
pub(super) fn source_of(element: &[u8]) -> Option<(u32, IpAddr)> {
    let (mark, source) = element.split_first_chunk::<4>()?;
    Some((u32::from_ne_bytes(*mark), address_of(source)?))
}

/// An address from its bytes. `None` unless there are 4 or 16.
pub(super) fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(bytes) {
        return Some(octets.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}

/// Elements to put or to delete.
#[derive(Default)]
pub(super) struct Elements {
    sets: BTreeMap<PrefixLen, Vec<Vec<u8>>>,
    maps: BTreeMap<Family, Vec<Vec<u8>>>,
}

impl Elements {
    /// Adds the element for packets of the peer with this mark and a source in the subnet.
    pub(super) fn add_subnet(&mut self, subnet: Subnet, mark: u32) {
        let element = [&mark.to_ne_bytes()[..], &octets(subnet.base())].concat();
        self.sets.entry(PrefixLen::of(subnet)).or_default().push(element);
    }

    /// Adds the elements that give a peer its mark, and admit packets with its own address.
    pub(super) fn add_node(&mut self, address: IpAddr, mark: u32) {
        self.add_subnet(Subnet::host(address), mark);
        let element = [&octets(address)[..], &mark.to_ne_bytes()].concat();
        self.maps.entry(Family::of(address)).or_default().push(element);
    }

    pub(super) fn put(&self, batches: &mut Batches, table: &Table<'_>) {
        self.for_each_set(table, |set, elements| batches.put(set, elements));
    }

    pub(super) fn delete(&self, batches: &mut Batches, table: &Table<'_>) {
        self.for_each_set(table, |set, elements| batches.delete(set, elements));
    }

    fn for_each_set(&self, table: &Table<'_>, mut change: impl FnMut(&Set<'_>, &[Vec<u8>])) {
        for (prefix, elements) in &self.sets {
            change(&prefix.set(table, &prefix.set_name()), elements);
        }
        for (family, elements) in &self.maps {
            change(&map(table, *family, &map_name(*family)), elements);
        }
    }
}
