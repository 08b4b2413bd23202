//! The table that checks the sources of the packets in a tunnel.
//!
//! It has a set for the nodes themselves, and one for each length of prefixes. An element is the
//! address of a node, and the address of the source without the bits of the host. One chain sees
//! the packets of other nodes when they arrive, and marks those whose element is in a set. The mark
//! stays when the kernel takes the packet out of the tunnel. Another chain drops each packet of the
//! tunnel's device that has no mark. So it makes no difference how a packet came to the device.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_netlink::netfilter::{Batch, NetfilterSocket};
use flannel_nft::{
    Base, Batches, Chain, Expr, Set, SetHead, Table, TableHead, address_of, arrived_by, hook, meta,
    octets, verdict,
};

const V4: Family = Family::V4;
/// The chain that marks packets, and the one that drops those without the mark.
const OUTER: &str = "outer";
const INNER: &str = "inner";
/// Before the chains of other programs (`raw` of `nft` is -300), so that none sees the mark.
const FIRST: i32 = -310;
/// The mark of packets whose source is right, between the two chains. No other program uses it.
const RIGHT: u32 = 0x666c_7564;
const UDP: u8 = 17;
/// The place of the source address after the UDP header and the first 12 bytes of the IPv4 header.
const SOURCE: u32 = 8 + 12;
/// The place and the length of the destination port in the UDP header.
const PORT: Expr = Expr::Transport { offset: 2, len: 2 };

/// The end of a tunnel that carries IPv4 packets in UDP datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelEnd {
    /// The device by which the packets arrive after the tunnel.
    pub device: LinkName,
    /// The address at which datagrams arrive.
    pub local: Ipv4Addr,
    /// The UDP port at which they arrive.
    pub port: u16,
}

/// The values of the table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Sources {
    /// `None`: there are no chains, so no packet is dropped.
    pub(crate) tunnel: Option<TunnelEnd>,
    /// The address of the node of each subnet.
    pub(crate) peers: BTreeMap<Subnet, Ipv4Addr>,
    /// The nodes of the subnets, with the number of their subnets.
    nodes: BTreeMap<Ipv4Addr, usize>,
    /// The lengths that have a set. A set stays until the table is removed.
    lens: BTreeSet<u8>,
}

/// A table as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) sources: Sources,
    /// Nothing else differs from the table that flannel makes for these values.
    pub(crate) is_intact: bool,
}

/// The values that differed before some changes, and the tunnel and the lengths.
#[derive(Debug)]
pub(crate) struct Before {
    tunnel: Option<TunnelEnd>,
    lens: BTreeSet<u8>,
    /// The nodes of the changed subnets.
    peers: BTreeMap<Subnet, Option<Ipv4Addr>>,
    /// The nodes of the changes, and whether they had a subnet.
    nodes: BTreeMap<Ipv4Addr, bool>,
}

impl Sources {
    /// The start of changes.
    pub(crate) fn before(&self) -> Before {
        let (tunnel, lens) = (self.tunnel, self.lens.clone());
        Before { tunnel, lens, peers: BTreeMap::new(), nodes: BTreeMap::new() }
    }

    /// Notes the values that a change of this subnet may change, then puts the node of the subnet,
    /// or removes it (`None`).
    pub(crate) fn change(&mut self, subnet: Subnet, node: Option<Ipv4Addr>, before: &mut Before) {
        let old = self.peers.get(&subnet).copied();
        before.peers.entry(subnet).or_insert(old);
        for node in old.into_iter().chain(node) {
            before.nodes.entry(node).or_insert_with(|| self.nodes.contains_key(&node));
        }
        self.set(subnet, node);
    }

    /// Puts the node of a subnet, or removes it (`None`).
    fn set(&mut self, subnet: Subnet, node: Option<Ipv4Addr>) {
        let old = match node {
            Some(node) => {
                self.lens.insert(subnet.len());
                *self.nodes.entry(node).or_default() += 1;
                self.peers.insert(subnet, node)
            }
            None => self.peers.remove(&subnet),
        };
        let Some(old) = old else { return };
        if let Some(subnets) = self.nodes.get_mut(&old) {
            *subnets -= 1;
            if *subnets == 0 {
                self.nodes.remove(&old);
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tunnel.is_none() && self.peers.is_empty()
    }

    /// The table as it is; `None` if it does not exist. It is read in several steps
    /// ([`flannel_nft::at_one_moment`]).
    pub(crate) fn read(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
    ) -> Result<Option<Found>, KernelError> {
        let Some(TableHead { flags, uses, .. }) = table.head(socket)? else { return Ok(None) };
        let (mut sources, mut is_intact) = (Self::default(), flags == 0);
        let mut count = 0;
        let mut nodes = BTreeSet::new();
        for len in (0..=V4.bits()).map(Some).chain([None]) {
            let name = name(len);
            let set = set(table, &name);
            let Some(SetHead { flags, element_len, .. }) = set.head(socket)? else { continue };
            count += 1;
            is_intact &= (flags, element_len) == (0, set.element_len());
            sources.lens.extend(len);
            for [node, source] in set.elements(socket)?.iter().filter_map(|key| pair(key)) {
                // The kernel may list an element twice ([`Set::elements`]).
                is_intact &= match len {
                    None => {
                        nodes.insert(node);
                        node == source
                    }
                    Some(len) => {
                        let subnet = Subnet::new(source.into(), len).expect("this length exists");
                        let node_before = *sources.peers.get(&subnet).unwrap_or(&node);
                        if !sources.peers.contains_key(&subnet) {
                            sources.set(subnet, Some(node));
                        }
                        subnet.base() == source && node_before == node
                    }
                };
            }
        }
        is_intact &= nodes.iter().eq(sources.nodes.keys());
        let chains = Chain::read(socket, table, &[OUTER, INNER])?;
        let there = chains.iter().flatten().fold(0, |count, _| count + 1);
        if let [Some(outer), Some(inner)] = &chains[..] {
            sources.tunnel = tunnel_of(&outer.rules, &inner.rules);
        }
        is_intact &= chains == sources.chains() && uses == count + there;
        Ok(Some(Found { sources, is_intact }))
    }

    /// Adds the changes that make the table of these values, which does not exist.
    fn make(&self, batches: &mut Batches, table: &Table<'_>) {
        let batch = batches.last();
        table.make_new(batch, "tunnel packets from the nodes of their sources");
        self.make_sets(batch, table, &BTreeSet::new());
        set(table, &name(None)).make(batch, 1);
        // Before the elements: a packet that comes meanwhile is dropped.
        self.make_chains(batch, table);
        let subnets = self.peers.iter().map(|(subnet, node)| (*subnet, *node));
        put(batches, table, subnets, self.nodes.keys().copied(), true);
    }

    /// The transactions that turn the table as it was before some changes into that of these
    /// values.
    fn update(&self, before: &Before, table: &Table<'_>) -> Batches {
        let mut batches = Batches::default();
        if self.tunnel != before.tunnel || self.lens != before.lens {
            let batch = batches.last();
            self.make_sets(batch, table, &before.lens);
            for chain in [OUTER, INNER].into_iter().filter(|_| before.tunnel.is_some()) {
                table.flush_chain(batch, chain);
                if self.tunnel.is_none() {
                    table.remove_chain(batch, chain);
                }
            }
            self.make_chains(batch, table);
        }
        let (mut new, mut old) = (Vec::new(), Vec::new());
        for (subnet, was) in &before.peers {
            let is = self.peers.get(subnet).copied();
            if is != *was {
                new.extend(is.map(|node| (*subnet, node)));
                old.extend(was.map(|node| (*subnet, node)));
            }
        }
        let nodes = |was: bool| {
            let all = before.nodes.iter().filter(move |(_, had)| **had == was);
            all.map(|(node, _)| *node).filter(move |node| self.nodes.contains_key(node) != was)
        };
        put(&mut batches, table, new, nodes(false), true);
        put(&mut batches, table, old, nodes(true), false);
        batches
    }

    fn make_sets(&self, batch: &mut Batch, table: &Table<'_>, existing: &BTreeSet<u8>) {
        for len in self.lens.difference(existing) {
            set(table, &name(Some(*len))).make(batch, 2 + u32::from(*len));
        }
    }

    fn make_chains(&self, batch: &mut Batch, table: &Table<'_>) {
        let texts = [
            (OUTER, "chain to mark tunnel packets from the nodes of their sources"),
            (INNER, "chain to drop tunnel packets without the mark"),
        ];
        for (chain, (name, text)) in self.chains().into_iter().zip(texts) {
            if let Some(chain) = chain {
                chain.make(batch, table, name, text);
            }
        }
    }

    /// The chains [`OUTER`] and [`INNER`].
    fn chains(&self) -> [Option<Chain>; 2] {
        let Some(tunnel) = self.tunnel else { return [None, None] };
        let chain = |hook, priority, rules| {
            let (kind, policy) = ("filter".to_owned(), verdict::ACCEPT);
            Some(Chain { base: Some(Base { kind, hook, priority, policy }), rules })
        };
        let is = |value: &[u8]| Expr::Compare { equal: true, value: value.to_vec() };
        // A mark is in the machine's byte order.
        let set = |mark: u32| [Expr::Value(mark.to_ne_bytes().into()), Expr::SetMeta(meta::MARK)];
        let mark = |len: Option<u8>| {
            let mut rule = vec![Expr::Meta(meta::L4PROTO), is(&[UDP])];
            rule.extend([PORT, is(&tunnel.port.to_be_bytes())]);
            rule.extend([address_of(V4, false), is(&tunnel.local.octets())]);
            rule.extend([address_of(V4, true), Expr::Second { offset: SOURCE }]);
            rule.extend(len.filter(|len| *len < V4.bits()).map(|len| {
                let bits = u32::MAX.checked_shl(u32::from(V4.bits() - len)).unwrap_or(0);
                Expr::SecondMask(bits.to_be_bytes())
            }));
            rule.push(Expr::Lookup { set: name(len), is_in: true });
            rule.extend(set(RIGHT));
            rule.push(Expr::Verdict(verdict::ACCEPT));
            rule
        };
        // Most packets have the address of a pod.
        let lens = self.lens.iter().copied().map(Some).chain([None]);
        // All packets of the host come here, and a number is compared faster than a name.
        let mut pass = vec![Expr::Meta(meta::MARK), is(&RIGHT.to_ne_bytes())];
        pass.extend(set(0));
        pass.push(Expr::Verdict(verdict::ACCEPT));
        let mut drop = arrived_by(tunnel.device).to_vec();
        drop.extend([Expr::Counter, Expr::Verdict(verdict::DROP)]);
        [
            chain(hook::INPUT, 0, lens.map(mark).collect()),
            chain(hook::PREROUTING, FIRST, vec![pass, drop]),
        ]
    }
}

/// The end of the tunnel that the rules of both chains are about.
fn tunnel_of(outer: &[Vec<Expr>], inner: &[Vec<Expr>]) -> Option<TunnelEnd> {
    let value = |rules: &[Vec<Expr>], load: &Expr| {
        rules.last()?.windows(2).find_map(|pair| match pair {
            [found, Expr::Compare { value, .. }] if found == load => Some(value.clone()),
            _ => None,
        })
    };
    let local = <[u8; 4]>::try_from(value(outer, &address_of(V4, false))?).ok()?;
    let port = u16::from_be_bytes(value(outer, &PORT)?.try_into().ok()?);
    let device = value(inner, &Expr::Meta(meta::IIFNAME))?;
    let device = String::from_utf8(device).ok()?.trim_end_matches('\0').parse().ok()?;
    Some(TunnelEnd { device, local: local.into(), port })
}

/// The name of the set for a length of prefixes; `None`: of that for the nodes themselves.
fn name(len: Option<u8>) -> String {
    len.map_or_else(|| "nodes".to_owned(), |len| format!("subnets-{len}"))
}

fn set<'a>(table: &Table<'a>, name: &'a str) -> Set<'a> {
    Set { table: *table, family: V4, name, addresses: 2 }
}

fn pair(key: &[u8]) -> Option<[Ipv4Addr; 2]> {
    let [a, b, c, d, source @ ..] = <[u8; 8]>::try_from(key).ok()?;
    Some([Ipv4Addr::new(a, b, c, d), source.into()])
}

/// Puts the elements of subnets and of nodes, or deletes them.
fn put(
    batches: &mut Batches,
    table: &Table<'_>,
    subnets: impl IntoIterator<Item = (Subnet, Ipv4Addr)>,
    nodes: impl IntoIterator<Item = Ipv4Addr>,
    is_new: bool,
) {
    let mut elements: BTreeMap<Option<u8>, Vec<Vec<u8>>> = BTreeMap::new();
    let mut add = |len, node: Ipv4Addr, source: &[u8]| {
        elements.entry(len).or_default().push([&node.octets(), source].concat());
    };
    for (subnet, node) in subnets {
        add(Some(subnet.len()), node, &octets(subnet.base()));
    }
    for node in nodes {
        add(None, node, &node.octets());
    }
    for (len, elements) in elements {
        let name = name(len);
        let set = set(table, &name);
        if is_new { batches.put(&set, &elements) } else { batches.delete(&set, &elements) }
    }
}

/// The transactions that turn the table that was found into that of `after`.
pub(crate) fn plan(table: &Table<'_>, found: Option<(&Before, bool)>, after: &Sources) -> Batches {
    let mut batches = match found {
        Some((before, true)) if !after.is_empty() => return after.update(before, table),
        Some(_) => {
            let mut batches = Batches::default();
            table.remove(batches.last());
            batches
        }
        None => Batches::default(),
    };
    if !after.is_empty() {
        after.make(&mut batches, table);
    }
    batches
}

/// The transaction that makes a table with all its parts, and removes it again.
pub(crate) fn trial(table: &Table<'_>) -> Batches {
    let device = "none".parse().expect("a valid name");
    let tunnel = Some(TunnelEnd { device, local: Ipv4Addr::LOCALHOST, port: 1 });
    let mut sources = Sources { tunnel, ..Sources::default() };
    let subnet = Subnet::new(Ipv4Addr::UNSPECIFIED.into(), 24).expect("this length exists");
    sources.set(subnet, Some(Ipv4Addr::LOCALHOST));
    let mut batches = Batches::default();
    sources.make(&mut batches, table);
    table.remove(batches.last());
    batches
}
