//! The table of a guard.
//!
//! A map gives each peer, by its public address, a mark. A set for each family and length of
//! prefixes has the pairs of a mark and the address of a source without the bits of the host. One
//! chain sees the packets of the tunnel when they arrive, and marks those of peers. The mark stays
//! when the kernel takes the packet out of the tunnel. Another chain sees what comes by the device
//! of the tunnel, packet by packet, and refuses each one whose mark and source are no pair. So it
//! makes no difference how a packet came to the device, and each packet of a batch is checked. Two
//! chains refuse the packets to the tunnels of nodes that neither this node nor a peer has made.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Inlet;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_netlink::netfilter::{Batch, NetfilterSocket};
use flannel_netlink::nftables::{
    Base, Batches, Chain, Expr, Marks, Set, SetHead, Table, TableFamily, TableHead, address_of,
    arrived_by, hook, is_other_device, kind, meta, octets, verdict,
};

use super::end::TunnelEnd;

/// The chains: at the arrival of tunnel packets, for forwarded packets, for packets that this node
/// sends, and for the packets that have left the tunnel.
const CHAINS: [&str; 4] = ["outer", "forwarded", "sent", "inner"];
/// Before the chains of other programs (`raw` of `nft` is -300), so that none sees the mark.
const FIRST: i32 = -310;
/// After the chains of other programs, for the same reason.
const LAST: i32 = 1000;
const UDP: u8 = 17;
/// The destination port in the UDP header.
const PORT: Expr = Expr::Transport { offset: 2, len: 2 };
/// The bits of a mark that tell the guards of a host apart. The others are the number of a peer.
const TAG: u32 = 0xff00_0000;

/// The values of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sources {
    /// The tag of all marks.
    tag: u32,
    /// The ends of the tunnel on this node.
    pub(super) ends: Dual<TunnelEnd>,
    /// The public address of the peer that has a subnet.
    pub(super) peers: BTreeMap<Subnet, IpAddr>,
    /// The public addresses of `peers`.
    nodes: BTreeMap<IpAddr, Node>,
    /// The marks of `nodes`.
    marks: BTreeSet<u32>,
    /// The lengths that have a set. A set stays until the table is removed.
    lens: BTreeSet<(Family, u8)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node {
    mark: u32,
    /// The number of its subnets, at least one.
    subnets: usize,
}

/// A table as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) sources: Sources,
    /// Nothing else differs from the table that flannel makes for these values.
    pub(super) is_intact: bool,
}

/// The values that differed before some changes, and the ends and the lengths.
#[derive(Debug)]
pub(super) struct Before {
    ends: Dual<TunnelEnd>,
    lens: BTreeSet<(Family, u8)>,
    /// The nodes of the changed subnets.
    peers: BTreeMap<Subnet, Option<IpAddr>>,
    /// The marks of the nodes of the changes.
    nodes: BTreeMap<IpAddr, Option<u32>>,
}

impl Sources {
    /// No values. `tag` is the first byte of all marks.
    pub(super) fn new(tag: u8) -> Self {
        Self {
            tag: u32::from(tag) << 24,
            ends: Dual::default(),
            peers: BTreeMap::new(),
            nodes: BTreeMap::new(),
            marks: BTreeSet::new(),
            lens: Family::BOTH.into_iter().map(|family| (family, family.bits())).collect(),
        }
    }

    /// The start of changes.
    pub(super) fn before(&self) -> Before {
        Before {
            ends: self.ends.clone(),
            lens: self.lens.clone(),
            peers: BTreeMap::new(),
            nodes: BTreeMap::new(),
        }
    }

    /// Notes the values that a change of this subnet may change, then puts the node of the subnet,
    /// or removes it (`None`).
    pub(super) fn change(&mut self, subnet: Subnet, node: Option<IpAddr>, before: &mut Before) {
        let old = self.peers.get(&subnet).copied();
        before.peers.entry(subnet).or_insert(old);
        for node in old.into_iter().chain(node) {
            let mark = self.nodes.get(&node).map(|node| node.mark);
            before.nodes.entry(node).or_insert(mark);
        }
        // A node that is removed and put again keeps its mark: the kernel refuses another one for
        // a key of a map.
        let mark = node.and_then(|node| *before.nodes.get(&node)?);
        self.set(subnet, node, mark);
    }

    /// Puts the node of a subnet, or removes it (`None`). A new node gets `mark`, if it is free.
    fn set(&mut self, subnet: Subnet, node: Option<IpAddr>, mark: Option<u32>) {
        let old = match node {
            Some(address) => {
                self.lens.insert((subnet.family(), subnet.len()));
                if let Some(node) = self.nodes.get_mut(&address) {
                    node.subnets += 1;
                } else {
                    let mark = mark.filter(|mark| !self.marks.contains(mark));
                    let mark = mark.unwrap_or_else(|| self.free_mark());
                    self.marks.insert(mark);
                    self.nodes.insert(address, Node { mark, subnets: 1 });
                }
                self.peers.insert(subnet, address)
            }
            None => self.peers.remove(&subnet),
        };
        let Some(old) = old else { return };
        let Some(node) = self.nodes.get_mut(&old) else { return };
        node.subnets -= 1;
        if node.subnets == 0 {
            self.marks.remove(&node.mark);
            self.nodes.remove(&old);
        }
    }

    /// The mark after the largest one, so that a mark is not used again soon.
    fn free_mark(&self) -> u32 {
        let largest = self.marks.last().map_or(0, |mark| mark & !TAG);
        let next = (largest + 1..=!TAG).chain(1..=!TAG).map(|number| self.tag | number);
        let mut free = next.filter(|mark| !self.marks.contains(mark));
        free.next().expect("a host has memory for fewer than 16 million peers")
    }

    /// The same table without peers. It has the same rules.
    pub(super) fn frame(&self) -> Self {
        Self {
            tag: self.tag,
            ends: self.ends.clone(),
            peers: BTreeMap::new(),
            nodes: BTreeMap::new(),
            marks: BTreeSet::new(),
            lens: self.lens.clone(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty() && self.peers.is_empty()
    }

    /// The table as it is; `None` if it does not exist. It is read in several steps
    /// ([`flannel_netlink::nftables::at_one_moment`]).
    pub(super) fn read(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        tag: u8,
    ) -> Result<Option<Found>, KernelError> {
        let Some(TableHead { flags, uses, .. }) = table.head(socket)? else { return Ok(None) };
        let mut sources = Self::new(tag);
        let desired_lens = std::mem::take(&mut sources.lens);
        let mut is_intact = flags == 0;
        let mut objects = 0;
        for family in Family::BOTH {
            let name = map_name(family);
            let map = map(table, family, &name);
            let Some(SetHead { flags, element_len, .. }) = map.head(socket)? else { continue };
            objects += 1;
            is_intact &= (flags, element_len) == (map.flags(), map.element_len());
            let mut nodes = BTreeMap::new();
            for (address, mark) in map.elements(socket)?.iter().filter_map(|it| node_of(it)) {
                is_intact &= mark & TAG == sources.tag;
                // The kernel may list an element twice ([`Set::elements`]).
                is_intact &= nodes.insert(mark, address).is_none_or(|before| before == address);
            }
            is_intact &= sources.read_sets(socket, table, family, &nodes, &mut objects)?;
        }
        let chains = Chain::read(socket, table, &CHAINS)?;
        let chains = <[_; CHAINS.len()]>::try_from(chains).expect("one for each name");
        objects += u32::try_from(chains.iter().flatten().count()).unwrap_or(u32::MAX);
        sources.ends = Dual::from_fn(|family| end_of(family, &chains));
        is_intact &= desired_lens.is_subset(&sources.lens);
        is_intact &= chains == sources.chains() && uses == objects;
        Ok(Some(Found { sources, is_intact }))
    }

    /// Reads the sets of a family. `nodes` has the address of each mark. Returns whether they are
    /// intact.
    fn read_sets(
        &mut self,
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        family: Family,
        nodes: &BTreeMap<u32, IpAddr>,
        objects: &mut u32,
    ) -> Result<bool, KernelError> {
        let mut is_intact = true;
        let mut own = BTreeSet::new();
        for len in 0..=family.bits() {
            let name = set_name(family, len);
            let set = set(table, family, &name);
            let Some(SetHead { flags, element_len, .. }) = set.head(socket)? else { continue };
            *objects += 1;
            is_intact &= (flags, element_len) == (set.flags(), set.element_len());
            self.lens.insert((family, len));
            for (mark, source) in set.elements(socket)?.iter().filter_map(|it| pair(it)) {
                let Some(node) = nodes.get(&mark) else {
                    is_intact = false;
                    continue;
                };
                if len == family.bits() && source == *node {
                    own.insert(*node);
                    continue;
                }
                let subnet = Subnet::new(source, len).expect("this length exists");
                let before = self.peers.get(&subnet).copied();
                is_intact &= subnet.base() == source && before.is_none_or(|it| it == *node);
                if before.is_none() {
                    self.set(subnet, Some(*node), Some(mark));
                }
            }
        }
        let known = self.nodes.keys().filter(|node| Family::of(**node) == family);
        is_intact &= own.iter().eq(known.clone());
        let mapped: BTreeSet<&IpAddr> = nodes.values().collect();
        Ok(is_intact && mapped.into_iter().eq(known))
    }

    /// Adds the changes that make the table of these values, which does not exist.
    fn make(&self, batches: &mut Batches, table: &Table<'_>) {
        let batch = batches.last();
        table.make_new(batch, "tunnel packets from peers with their own sources");
        for (id, family) in (1..).zip(Family::BOTH) {
            map(table, family, &map_name(family)).make(batch, id);
        }
        self.make_sets(batch, table, &BTreeSet::new());
        let subnets = self.peers.iter().map(|(subnet, node)| (self.mark(*node), *subnet));
        let subnets = subnets.filter_map(|(mark, subnet)| Some((mark?, subnet)));
        let nodes = self.nodes.iter().map(|(address, node)| (*address, node.mark));
        put(batches, table, subnets, nodes, true);
        // After the elements: no peer is cut off meanwhile.
        self.make_chains(batches.last(), table);
    }

    fn mark(&self, node: IpAddr) -> Option<u32> {
        self.nodes.get(&node).map(|node| node.mark)
    }

    /// The transactions that turn the table as it was before some changes into that of these
    /// values. One is enough for the changes of some hundred peers.
    fn update(&self, before: &Before, table: &Table<'_>) -> Batches {
        let mut batches = Batches::default();
        if self.ends != before.ends || self.lens != before.lens {
            let batch = batches.last();
            self.make_sets(batch, table, &before.lens);
            let were_there = !before.ends.is_empty();
            for chain in CHAINS.into_iter().filter(|_| were_there) {
                table.flush_chain(batch, chain);
                if self.ends.is_empty() {
                    table.remove_chain(batch, chain);
                }
            }
            self.make_chains(batch, table);
        }
        let mark_before =
            |node: IpAddr| before.nodes.get(&node).map_or_else(|| self.mark(node), |mark| *mark);
        let mut new = Vec::new();
        let mut old = Vec::new();
        for (subnet, was) in &before.peers {
            let was = was.and_then(mark_before);
            let is = self.peers.get(subnet).and_then(|node| self.mark(*node));
            if is != was {
                new.extend(is.map(|mark| (mark, *subnet)));
                old.extend(was.map(|mark| (mark, *subnet)));
            }
        }
        let mut new_nodes = Vec::new();
        let mut old_nodes = Vec::new();
        for (node, was) in &before.nodes {
            let is = self.mark(*node);
            if is != *was {
                new_nodes.extend(is.map(|mark| (*node, mark)));
                old_nodes.extend(was.map(|mark| (*node, mark)));
            }
        }
        put(&mut batches, table, new, new_nodes, true);
        put(&mut batches, table, old, old_nodes, false);
        batches
    }

    fn make_sets(&self, batch: &mut Batch, table: &Table<'_>, existing: &BTreeSet<(Family, u8)>) {
        for (family, len) in self.lens.difference(existing) {
            let id = 3 + u32::from(*len) + if *family == Family::V6 { 1000 } else { 0 };
            set(table, *family, &set_name(*family, *len)).make(batch, id);
        }
    }

    fn make_chains(&self, batch: &mut Batch, table: &Table<'_>) {
        let texts = [
            "chain to mark tunnel packets from peers",
            "chain to refuse tunnel packets of others than peers to nodes",
            "chain to refuse tunnel packets to nodes that a proxy sends for others",
            "chain to refuse packets out of the tunnel with the source of another node",
        ];
        for ((chain, name), text) in self.chains().into_iter().zip(CHAINS).zip(texts) {
            if let Some(chain) = chain {
                chain.make(batch, table, name, text);
            }
        }
    }

    /// The [`CHAINS`].
    fn chains(&self) -> [Option<Chain>; CHAINS.len()] {
        if self.ends.is_empty() {
            return [const { None }; CHAINS.len()];
        }
        let [outer, forwarded, sent, inner] = self.rules();
        let chain = |hook, priority, rules: Vec<Rule>| {
            let kind = "filter".to_owned();
            let policy = verdict::ACCEPT;
            let rules = rules.into_iter().map(|rule| rule.exprs).collect();
            Some(Chain { base: Some(Base { kind, hook, priority, policy }), rules })
        };
        [
            chain(hook::INPUT, LAST, outer),
            chain(hook::FORWARD, FIRST, forwarded),
            chain(hook::OUTPUT, FIRST, sent),
            chain(hook::PREROUTING, FIRST, inner),
        ]
    }

    /// The rules of the [`CHAINS`].
    fn rules(&self) -> [Vec<Rule>; CHAINS.len()] {
        let mut outer = vec![clear_tag(self.tag)];
        let mut forwarded = Vec::new();
        let mut sent = Vec::new();
        let devices = self.ends.iter().filter_map(|(_, end)| end.device);
        let mut inner: Vec<_> = skip_others(devices).into_iter().collect();
        for (family, end) in self.ends.iter() {
            for inlet in &end.inlets {
                let arrives = arrives(family, *inlet, end.local);
                match end.device {
                    Some(_) => outer.extend(mark_peers(family, &arrives)),
                    // The program at the other end of the device checks packets itself. It cannot
                    // tell a pod that has a peer's address.
                    None => outer.push(refuse_strays(end.drops, arrives)),
                }
                let comes = comes(family, *inlet);
                let to_peer = [address_of(family, false), map_lookup(family)];
                forwarded.extend(forward_peers(
                    family,
                    end.drops,
                    &[&comes[..], &to_peer].concat(),
                ));
                sent.push(refuse_proxies(family, end, comes, to_peer));
            }
            let Some(device) = end.device else { continue };
            // Most packets have the address of a pod, and so a shorter prefix than a node.
            let lens = self.lens.iter().filter(|(of, _)| *of == family);
            inner.extend(lens.map(|(_, len)| admit(family, device, *len)));
            let mut stranger = arrived_by(device).to_vec();
            stranger.extend(tag());
            stranger.push(is_not(self.tag.to_ne_bytes().into()));
            inner.push(refuse(Reason::Stranger, end.drops, stranger));
            let mut foreign = arrived_by(device).to_vec();
            foreign.extend(set_mark(0));
            inner.push(refuse(Reason::ForeignSource, end.drops, foreign));
        }
        [outer, forwarded, sent, inner]
    }

    /// The packets that the rules refused, from the counters of the table's rules.
    pub(super) fn refused(&self, counters: &[(String, u64)]) -> BTreeMap<&'static str, u64> {
        let mut refused: BTreeMap<_, _> = Reason::ALL.iter().map(|it| (it.name(), 0)).collect();
        for (name, rules) in CHAINS.into_iter().zip(self.rules()) {
            let counters = counters.iter().filter(|(chain, _)| chain == name);
            for (rule, (_, packets)) in rules.iter().zip(counters) {
                if let Some(count) = rule.counts.and_then(|it| refused.get_mut(it.name())) {
                    *count += packets;
                }
            }
        }
        refused
    }
}

/// A rule, and the reason for which it refuses packets; `None`: it refuses none.
struct Rule {
    counts: Option<Reason>,
    exprs: Vec<Expr>,
}

/// Why a packet is refused.
#[derive(Debug, Clone, Copy)]
enum Reason {
    /// It comes from no peer, or not on a way from it.
    Stranger,
    /// It comes from a peer, and has the source of another node.
    ForeignSource,
    /// A pod, or another host behind this one, sends it to the tunnel of a node.
    Pod,
}

impl Reason {
    const ALL: [Self; 3] = [Self::Stranger, Self::ForeignSource, Self::Pod];

    fn name(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::ForeignSource => "foreign_source",
            Self::Pod => "pod",
        }
    }
}

fn is(value: Vec<u8>) -> Expr {
    Expr::Compare { equal: true, value }
}

fn is_not(value: Vec<u8>) -> Expr {
    Expr::Compare { equal: false, value }
}

/// A mark is in the machine's byte order.
fn set_mark(mark: u32) -> [Expr; 2] {
    [Expr::Value(mark.to_ne_bytes().into()), Expr::SetMeta(meta::MARK)]
}

/// Loads the bits of the mark that tell guards apart.
fn tag() -> [Expr; 2] {
    [Expr::Meta(meta::MARK), Expr::Mask(TAG.to_ne_bytes().into())]
}

/// Clears a mark that another program, or a process with a privilege, has set: only this table
/// gives marks with its tag. For all packets, because a device may take some that no other rule is
/// about.
fn clear_tag(of: u32) -> Rule {
    let mut exprs = tag().to_vec();
    exprs.push(is(of.to_ne_bytes().into()));
    exprs.extend(set_mark(0));
    Rule { counts: None, exprs }
}

/// Refuses the packets of these conditions, and counts them.
fn refuse(reason: Reason, drops: bool, mut exprs: Vec<Expr>) -> Rule {
    let end = if drops { verdict::DROP } else { verdict::ACCEPT };
    exprs.extend([Expr::Counter, Expr::Verdict(end)]);
    Rule { counts: Some(reason), exprs }
}

/// Continues only if a packet is one of the tunnel. The family comes last, because most packets of
/// other programs have it.
fn comes(family: Family, inlet: Inlet) -> Vec<Expr> {
    let mut exprs = vec![Expr::Meta(meta::L4PROTO)];
    match inlet {
        Inlet::Udp(port) => exprs.extend([is(vec![UDP]), PORT, is(port.to_be_bytes().into())]),
        Inlet::Protocol(number) => exprs.push(is(vec![number])),
        // A kind of packets that this crate does not know: none has this protocol.
        _ => exprs.push(is(vec![u8::MAX])),
    }
    exprs.extend([Expr::Meta(meta::NFPROTO), is(vec![TableFamily::from(family).protocol()])]);
    exprs
}

/// Continues only if a packet is one of the tunnel to this node.
fn arrives(family: Family, inlet: Inlet, local: IpAddr) -> Vec<Expr> {
    let mut exprs = comes(family, inlet);
    exprs.extend([address_of(family, false), is(octets(local))]);
    exprs
}

fn map_lookup(family: Family) -> Expr {
    Expr::Map { map: map_name(family) }
}

/// The packets arrive by the device to their source.
fn on_way_back() -> [Expr; 2] {
    [Expr::WayBack, is_not(vec![0; 4])]
}

/// Gives packets of peers their mark. A pod may send with the address of a peer, but neither by the
/// device with the address of the tunnel nor by the one to that peer. The first one is also for
/// nodes with another way to a peer than from it. It comes first because it is usual, and quick.
fn mark_peers(family: Family, arrives: &[Expr]) -> [Rule; 2] {
    let at_home = [Expr::KindAtArrival, is(kind::LOCAL.to_ne_bytes().into())];
    [at_home, on_way_back()].map(|way| {
        let mark = [
            address_of(family, true),
            map_lookup(family),
            Expr::SetMeta(meta::MARK),
            Expr::Verdict(verdict::ACCEPT),
        ];
        Rule { counts: None, exprs: [arrives, &way, &mark].concat() }
    })
}

/// Refuses packets by a device on which no peer can be, see [`mark_peers`].
fn refuse_strays(drops: bool, mut exprs: Vec<Expr>) -> Rule {
    exprs.extend([Expr::WayBack, is(vec![0; 4])]);
    exprs.extend([Expr::KindAtArrival, is_not(kind::LOCAL.to_ne_bytes().into())]);
    refuse(Reason::Stranger, drops, exprs)
}

/// Forwards the packets of peers for which this host is a router, and refuses all others: of pods,
/// of containers of other networks, with their own addresses or with that of a peer. Masqueraded,
/// they would look like those of this node.
fn forward_peers(family: Family, drops: bool, leaves: &[Expr]) -> [Rule; 2] {
    let source = [address_of(family, true), map_lookup(family), Expr::Verdict(verdict::ACCEPT)];
    let of_peer = Rule { counts: None, exprs: [leaves, &on_way_back(), &source].concat() };
    [of_peer, refuse(Reason::Pod, drops, leaves.to_vec())]
}

/// Refuses packets that this host sends with the source of another one. IPVS sends the packets of
/// pods to services so, before they are masqueraded. Most packets have the address of the tunnel,
/// so this is asked first.
fn refuse_proxies(
    family: Family,
    end: &TunnelEnd,
    mut exprs: Vec<Expr>,
    to_peer: [Expr; 2],
) -> Rule {
    exprs.extend([address_of(family, true), is_not(octets(end.local))]);
    exprs.extend(to_peer);
    exprs.extend([Expr::SourceKind, is_not(kind::LOCAL.to_ne_bytes().into())]);
    refuse(Reason::Pod, end.drops, exprs)
}

/// Spares the packets by other devices all further rules.
fn skip_others(devices: impl Iterator<Item = LinkName>) -> Option<Rule> {
    let mut exprs = Vec::new();
    for device in devices {
        exprs.extend([Expr::Meta(meta::IIFNAME), is_other_device(device)]);
    }
    (!exprs.is_empty()).then(|| {
        exprs.push(Expr::Verdict(verdict::ACCEPT));
        Rule { counts: None, exprs }
    })
}

/// Admits packets by the device of a tunnel whose mark and source are in the set for this length.
fn admit(family: Family, device: LinkName, len: u8) -> Rule {
    let mut exprs = arrived_by(device).to_vec();
    let protocol = TableFamily::from(family).protocol();
    exprs.extend([Expr::Meta(meta::NFPROTO), is(vec![protocol]), Expr::Meta(meta::MARK)]);
    if let Expr::Header { offset, len } = address_of(family, true) {
        exprs.push(Expr::Second { offset, len });
    }
    if len < family.bits() {
        let any = Subnet::new(family.unspecified(), len).expect("this length exists");
        exprs.push(Expr::SecondMask(mask(any)));
    }
    exprs.push(Expr::Lookup { set: set_name(family, len), is_in: true });
    exprs.extend(set_mark(0));
    exprs.push(Expr::Verdict(verdict::ACCEPT));
    Rule { counts: None, exprs }
}

/// The bits of the addresses of a subnet that are equal.
fn mask(subnet: Subnet) -> Vec<u8> {
    let ones = |bits: u8| u128::MAX.checked_shl(u32::from(128 - bits)).unwrap_or(0);
    match subnet.family() {
        Family::V4 => ones(subnet.len()).to_be_bytes()[..4].to_vec(),
        Family::V6 => ones(subnet.len()).to_be_bytes().to_vec(),
    }
}

/// The end of the tunnel that the rules of the chains are about.
fn end_of(family: Family, chains: &[Option<Chain>; CHAINS.len()]) -> Option<TunnelEnd> {
    let [Some(outer), _, Some(sent), Some(inner)] = chains else { return None };
    let protocol = TableFamily::from(family).protocol();
    let of_family =
        |rule: &&Vec<Expr>| value(rule, &Expr::Meta(meta::NFPROTO)) == Some(&[protocol]);
    // Each inlet has one rule.
    let of_inlets: Vec<_> = sent.rules.iter().filter(of_family).collect();
    let drops = *of_inlets.first()?.last()? == Expr::Verdict(verdict::DROP);
    let inlets = of_inlets.iter().filter_map(|rule| inlet_of(rule)).collect();
    let arrival = outer.rules.iter().find(of_family)?;
    let local = address(value(arrival, &address_of(family, false))?)?;
    let device = inner.rules.iter().find(of_family);
    let device = device.and_then(|rule| value(rule, &Expr::Meta(meta::IIFNAME)));
    let device = device.and_then(|name| std::str::from_utf8(name).ok());
    let device = device.and_then(|name| name.trim_end_matches('\0').parse().ok());
    Some(TunnelEnd { drops, device, local, inlets })
}

fn inlet_of(rule: &[Expr]) -> Option<Inlet> {
    match (value(rule, &Expr::Meta(meta::L4PROTO))?, value(rule, &PORT)) {
        ([UDP], Some(port)) => Some(Inlet::Udp(u16::from_be_bytes(port.try_into().ok()?))),
        ([number], _) => Some(Inlet::Protocol(*number)),
        _ => None,
    }
}

/// The value with which a rule compares what `load` loads.
fn value<'a>(rule: &'a [Expr], load: &Expr) -> Option<&'a [u8]> {
    rule.windows(2).find_map(|pair| match pair {
        [found, Expr::Compare { equal: true, value }] if found == load => Some(&value[..]),
        _ => None,
    })
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| Some(<[u8; 16]>::try_from(bytes).ok()?.into()))
}

/// The map from the public addresses of peers to marks.
fn map_name(family: Family) -> String {
    format!("peers-{}", short(family))
}

/// The set of sources for a length of prefixes.
fn set_name(family: Family, len: u8) -> String {
    format!("sources-{}-{len}", short(family))
}

fn short(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

fn map<'a>(table: &Table<'a>, family: Family, name: &'a str) -> Set<'a> {
    Set { table: *table, family, name, addresses: 1, marks: Marks::Value }
}

fn set<'a>(table: &Table<'a>, family: Family, name: &'a str) -> Set<'a> {
    Set { table: *table, family, name, addresses: 1, marks: Marks::First }
}

/// The address and the mark in an element of a map.
fn node_of(element: &[u8]) -> Option<(IpAddr, u32)> {
    let (bytes, mark) = element.split_last_chunk::<4>()?;
    Some((address(bytes)?, u32::from_ne_bytes(*mark)))
}

/// The mark and the source in an element of a set.
fn pair(element: &[u8]) -> Option<(u32, IpAddr)> {
    let (mark, bytes) = element.split_first_chunk::<4>()?;
    Some((u32::from_ne_bytes(*mark), address(bytes)?))
}

/// Puts the elements of subnets and of nodes, or deletes them.
fn put(
    batches: &mut Batches,
    table: &Table<'_>,
    subnets: impl IntoIterator<Item = (u32, Subnet)>,
    nodes: impl IntoIterator<Item = (IpAddr, u32)>,
    is_new: bool,
) {
    let mut sources: BTreeMap<(Family, u8), Vec<Vec<u8>>> = BTreeMap::new();
    let mut maps: BTreeMap<Family, Vec<Vec<u8>>> = BTreeMap::new();
    let mut add = |subnet: Subnet, mark: u32| {
        let element = [&mark.to_ne_bytes()[..], &octets(subnet.base())].concat();
        sources.entry((subnet.family(), subnet.len())).or_default().push(element);
    };
    for (mark, subnet) in subnets {
        add(subnet, mark);
    }
    for (node, mark) in nodes {
        add(Subnet::host(node), mark);
        let element = [&octets(node)[..], &mark.to_ne_bytes()].concat();
        maps.entry(Family::of(node)).or_default().push(element);
    }
    let mut change = |set: &Set<'_>, elements: &[Vec<u8>]| {
        if is_new { batches.put(set, elements) } else { batches.delete(set, elements) }
    };
    for ((family, len), elements) in sources {
        change(&set(table, family, &set_name(family, len)), &elements);
    }
    for (family, elements) in maps {
        change(&map(table, family, &map_name(family)), &elements);
    }
}

/// The transactions that turn the table that was found into the one of `after`.
pub(super) fn plan(table: &Table<'_>, found: Option<(&Before, bool)>, after: &Sources) -> Batches {
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
pub(super) fn trial(table: &Table<'_>) -> Batches {
    let mut sources = Sources::new(1);
    sources.ends = Dual::from_fn(|family| {
        let local = family.unspecified();
        let inlets = vec![Inlet::Udp(1)];
        let device = Some("none".parse().expect("a valid name"));
        Some(TunnelEnd { drops: true, device, local, inlets })
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
