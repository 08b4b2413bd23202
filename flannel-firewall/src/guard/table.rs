//! The table of a guard.
//!
//! A map gives each peer, by its public address, a mark. A set for each family and prefix length
//! has the pairs of a mark and the address of a source without the bits of the host. The chain
//! `outer` sees the packets of the tunnel when they arrive, and marks the packets of peers. The
//! mark stays when the kernel takes the packet out of the tunnel. The chain `inner` sees the
//! packets that come by the device of the tunnel, and refuses each packet whose mark and source are
//! not a pair. So it makes no difference how a packet came to the device, and each packet of a
//! batch is checked. The chains `forwarded` and `sent` refuse the packets to the tunnels of nodes
//! that neither this node nor a peer has made.

mod kernel;
mod rules;
mod sets;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};

pub(super) use self::kernel::{Found, plan, trial};
use self::sets::PrefixLen;
use super::end::TunnelEnd;

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
    /// The peers, by their public addresses.
    nodes: BTreeMap<IpAddr, Node>,
    /// The marks of `nodes`.
    marks: BTreeSet<u32>,
    /// The prefix lengths that have a set. A set stays until the table is removed.
    lens: BTreeSet<PrefixLen>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Node {
    mark: u32,
    /// The number of its subnets, at least one.
    subnets: usize,
}

/// The values before some changes. `peers` and `nodes` have only the entries of the changes.
#[derive(Debug)]
pub(super) struct Before {
    ends: Dual<TunnelEnd>,
    lens: BTreeSet<PrefixLen>,
    /// The public addresses of the peers that had the changed subnets.
    peers: BTreeMap<Subnet, Option<IpAddr>>,
    /// The marks of the old and the new peers of these subnets.
    nodes: BTreeMap<IpAddr, Option<u32>>,
}

impl Sources {
    /// No values. `tag` is the first byte of all marks.
    pub(super) fn new(tag: u8) -> Self {
        // The public addresses of peers are sources too.
        let lens = Family::BOTH.map(|family| PrefixLen { family, len: family.bits() });
        Self {
            tag: u32::from(tag) << 24,
            ends: Dual::default(),
            peers: BTreeMap::new(),
            nodes: BTreeMap::new(),
            marks: BTreeSet::new(),
            lens: lens.into(),
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
            let mark = self.mark(node);
            before.nodes.entry(node).or_insert(mark);
        }
        // A node that is removed and put again keeps its mark: the kernel refuses another mark for
        // a key of a map.
        let mark = node.and_then(|node| *before.nodes.get(&node)?);
        self.set(subnet, node, mark);
    }

    /// Puts the node of a subnet, or removes it (`None`). A new node gets `mark`, if it is free.
    fn set(&mut self, subnet: Subnet, node: Option<IpAddr>, mark: Option<u32>) {
        let old = match node {
            Some(address) => {
                self.lens.insert(PrefixLen::of(subnet));
                self.add_subnet_to(address, mark);
                self.peers.insert(subnet, address)
            }
            None => self.peers.remove(&subnet),
        };
        if let Some(old) = old {
            self.remove_subnet_from(old);
        }
    }

    fn add_subnet_to(&mut self, address: IpAddr, mark: Option<u32>) {
        if let Some(node) = self.nodes.get_mut(&address) {
            node.subnets += 1;
            return;
        }
        let mark = match mark {
            Some(mark) if !self.marks.contains(&mark) => mark,
            _ => self.free_mark(),
        };
        self.marks.insert(mark);
        self.nodes.insert(address, Node { mark, subnets: 1 });
    }

    fn remove_subnet_from(&mut self, address: IpAddr) {
        let Some(node) = self.nodes.get_mut(&address) else { return };
        node.subnets -= 1;
        if node.subnets == 0 {
            self.marks.remove(&node.mark);
            self.nodes.remove(&address);
        }
    }

    /// The mark after the largest one, so that a mark is not used again soon.
    fn free_mark(&self) -> u32 {
        let largest = self.marks.last().map_or(0, |mark| mark & !TAG);
        (largest + 1..=!TAG)
            .chain(1..=!TAG)
            .map(|number| self.tag | number)
            .find(|mark| !self.marks.contains(mark))
            .expect("a host has memory for fewer than 16 million peers")
    }

    /// These values without peers. The table has the same rules for them.
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

    fn mark(&self, node: IpAddr) -> Option<u32> {
        self.nodes.get(&node).map(|node| node.mark)
    }
}
