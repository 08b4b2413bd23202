//! Reads the table from the kernel, and makes the transactions that change it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Transport;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, NetfilterSocket};
use flannel_netlink::nftables::{Batches, Chain, SetHead, Table, TableHead};

use super::rules::{ChainName, end_of};
use super::sets::{Elements, PrefixLen, map, map_name, node_of, source_of};
use super::{Before, Sources, TAG};
use crate::guard::end::TunnelEnd;

/// A table as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::guard) struct Found {
    pub(in crate::guard) sources: Sources,
    /// Nothing else differs from the table that flannel makes for these values.
    pub(in crate::guard) is_intact: bool,
}

/// Reads a table.
struct Reader<'a> {
    socket: &'a mut NetfilterSocket,
    table: &'a Table<'a>,
    sources: Sources,
    /// [`Found::is_intact`], as far as it is known.
    is_intact: bool,
    /// The number of maps, sets and chains that were found.
    objects: u32,
}

impl Sources {
    /// The table as it is, or `None` if it does not exist. It is read in several steps, so the
    /// caller needs [`flannel_netlink::nftables::at_one_moment`].
    pub(in crate::guard) fn read(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        tag: u8,
    ) -> Result<Option<Found>, KernelError> {
        let Some(TableHead { flags, uses, .. }) = table.head(socket)? else { return Ok(None) };
        let mut sources = Self::new(tag);
        let desired_lens = std::mem::take(&mut sources.lens);
        let mut reader = Reader { socket, table, sources, is_intact: flags == 0, objects: 0 };
        for family in Family::BOTH {
            reader.read_family(family)?;
        }
        reader.read_chains()?;
        let Reader { sources, is_intact, objects, .. } = reader;
        let is_intact = is_intact && desired_lens.is_subset(&sources.lens) && uses == objects;
        Ok(Some(Found { sources, is_intact }))
    }

    /// Adds the changes that make the table of these values, which does not exist.
    fn make(&self, batches: &mut Batches, table: &Table<'_>) {
        let batch = batches.last();
        table.make_new(batch, "tunnel packets from peers with their own sources");
        for (id, family) in (1..).zip(Family::BOTH) {
            map(table, family, &map_name(family)).make(batch, id);
        }
        self.make_sets(batch, table, &BTreeSet::new());
        let mut elements = Elements::default();
        for (subnet, node) in &self.peers {
            if let Some(mark) = self.mark(*node) {
                elements.add_subnet(*subnet, mark);
            }
        }
        for (address, node) in &self.nodes {
            elements.add_node(*address, node.mark);
        }
        elements.put(batches, table);
        // The chains come after the elements, so that no peer is cut off meanwhile.
        self.make_chains(batches.last(), table);
    }

    /// The transactions that turn the table as it was before some changes into the table of these
    /// values. One is enough for the changes of some hundred peers.
    fn update(&self, before: &Before, table: &Table<'_>) -> Batches {
        let mut batches = Batches::default();
        if self.ends != before.ends || self.lens != before.lens {
            self.update_chains(before, batches.last(), table);
        }
        let mut new = Elements::default();
        let mut old = Elements::default();
        for (subnet, old_node) in &before.peers {
            let was = old_node.and_then(|node| match before.nodes.get(&node) {
                Some(mark) => *mark,
                None => self.mark(node),
            });
            let is = self.peers.get(subnet).and_then(|node| self.mark(*node));
            if is == was {
                continue;
            }
            if let Some(mark) = is {
                new.add_subnet(*subnet, mark);
            }
            if let Some(mark) = was {
                old.add_subnet(*subnet, mark);
            }
        }
        for (node, was) in &before.nodes {
            let is = self.mark(*node);
            if is == *was {
                continue;
            }
            if let Some(mark) = is {
                new.add_node(*node, mark);
            }
            if let Some(mark) = was {
                old.add_node(*node, *mark);
            }
        }
        new.put(&mut batches, table);
        old.delete(&mut batches, table);
        batches
    }

    /// Adds the changes for other ends or other sets: the rules depend on both.
    fn update_chains(&self, before: &Before, batch: &mut Batch, table: &Table<'_>) {
        self.make_sets(batch, table, &before.lens);
        if !before.ends.is_empty() {
            for chain in ChainName::ALL {
                table.flush_chain(batch, chain.name());
                if self.ends.is_empty() {
                    table.remove_chain(batch, chain.name());
                }
            }
        }
        self.make_chains(batch, table);
    }

    fn make_sets(&self, batch: &mut Batch, table: &Table<'_>, existing: &BTreeSet<PrefixLen>) {
        for prefix in self.lens.difference(existing) {
            prefix.set(table, &prefix.set_name()).make(batch, prefix.set_id());
        }
    }

    fn make_chains(&self, batch: &mut Batch, table: &Table<'_>) {
        for (name, chain) in ChainName::ALL.into_iter().zip(self.chains()) {
            if let Some(chain) = chain {
                chain.make(batch, table, name.name(), name.comment());
            }
        }
    }
}

impl Reader<'_> {
    /// Reads the map and the sets of a family.
    fn read_family(&mut self, family: Family) -> Result<(), KernelError> {
        let name = map_name(family);
        let map = map(self.table, family, &name);
        let Some(SetHead { flags, element_len, .. }) = map.head(self.socket)? else {
            return Ok(());
        };
        self.objects += 1;
        self.is_intact &= flags == map.flags() && element_len == map.element_len();
        let mut nodes = BTreeMap::new();
        for element in map.elements(self.socket)? {
            let Some((address, mark)) = node_of(&element) else { continue };
            self.is_intact &= mark & TAG == self.sources.tag;
            // The kernel may list an element twice ([`Set::elements`]).
            self.is_intact &= nodes.insert(mark, address).is_none_or(|before| before == address);
        }
        self.read_sets(family, &nodes)
    }

    /// Reads the sets of a family. `nodes` has the address of each mark.
    fn read_sets(
        &mut self,
        family: Family,
        nodes: &BTreeMap<u32, IpAddr>,
    ) -> Result<(), KernelError> {
        // The nodes whose own addresses are admitted.
        let mut own = BTreeSet::new();
        for len in 0..=family.bits() {
            let prefix = PrefixLen { family, len };
            let name = prefix.set_name();
            let set = prefix.set(self.table, &name);
            let Some(SetHead { flags, element_len, .. }) = set.head(self.socket)? else {
                continue;
            };
            self.objects += 1;
            self.is_intact &= flags == set.flags() && element_len == set.element_len();
            self.sources.lens.insert(prefix);
            for element in set.elements(self.socket)? {
                let Some((mark, source)) = source_of(&element) else { continue };
                match nodes.get(&mark) {
                    None => self.is_intact = false,
                    Some(node) if len == family.bits() && source == *node => {
                        own.insert(*node);
                    }
                    Some(node) => self.note_source(source, len, *node, mark),
                }
            }
        }
        let known = self.sources.nodes.keys().filter(|node| Family::of(**node) == family);
        let mapped: BTreeSet<&IpAddr> = nodes.values().collect();
        self.is_intact &= own.iter().eq(known.clone()) && mapped.into_iter().eq(known);
        Ok(())
    }

    /// Notes the subnet of a node.
    fn note_source(&mut self, source: IpAddr, len: u8, node: IpAddr, mark: u32) {
        let subnet = Subnet::new(source, len).expect("this length exists");
        let before = self.sources.peers.get(&subnet).copied();
        self.is_intact &= subnet.base() == source && before.is_none_or(|it| it == node);
        if before.is_none() {
            self.sources.set(subnet, Some(node), Some(mark));
        }
    }

    fn read_chains(&mut self) -> Result<(), KernelError> {
        let names = ChainName::ALL.map(ChainName::name);
        let chains = Chain::read(self.socket, self.table, &names)?;
        self.objects += u32::try_from(chains.iter().flatten().count()).unwrap_or(u32::MAX);
        self.sources.ends = Dual::from_fn(|family| end_of(family, &chains));
        self.is_intact &= chains == self.sources.chains();
        Ok(())
    }
}

/// The transactions that turn the table that was found into the table of `after`. `found` is the
/// values before the changes, and whether the table is intact.
pub(in crate::guard) fn plan(
    table: &Table<'_>,
    found: Option<(&Before, bool)>,
    after: &Sources,
) -> Batches {
    let mut batches = Batches::default();
    match found {
        Some((before, true)) if !after.is_empty() => return after.update(before, table),
        Some(_) => table.remove(batches.last()),
        None => {}
    }
    if !after.is_empty() {
        after.make(&mut batches, table);
    }
    batches
}

/// The transaction that makes a table with all its parts, and removes it again.
pub(in crate::guard) fn trial(table: &Table<'_>) -> Batches {
    let mut sources = Sources::new(1);
    sources.ends = Dual::from_fn(|family| {
        Some(TunnelEnd {
            drops: true,
            device: Some("none".parse().expect("a valid name")),
            local: family.unspecified(),
            transports: vec![Transport::Udp(1)],
        })
    });
    for family in Family::BOTH {
        let subnet = Subnet::new(family.unspecified(), 24).expect("this length exists");
        sources.set(subnet, Some(family.unspecified()), None);
    }
    let mut batches = Batches::default();
    sources.make(&mut batches, table);
    table.remove(batches.last());
    batches
}
