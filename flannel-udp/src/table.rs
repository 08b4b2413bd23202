//! The peers of a node, by the longest prefix.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

/// An address as a number of 128 bits. An IPv4 address has the highest 32 of them.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn masked(number: u128, len: u8) -> u128 {
    number & u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0)
}

/// A subnet and the address of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The first address of the subnet.
    pub subnet: IpAddr,
    /// The length of its prefix, in bits.
    pub len: u8,
    /// The address to which packets are sent.
    pub address: SocketAddr,
}

/// The places of peers in a list, for one length of prefixes.
#[derive(Debug)]
enum Places {
    /// The places of subsequent subnets. Most networks have one such array, so a lookup is one
    /// access to memory.
    Array {
        /// The number of the first subnet.
        first: u128,
        /// The place of each subnet, or `None` if no peer has it.
        places: Vec<Option<u32>>,
    },
    /// The places by the first addresses of subnets.
    Map(HashMap<u128, u32>),
}

impl Places {
    /// `peers` has the first address of each subnet, and its place.
    fn new(len: u8, peers: &[(u128, u32)]) -> Self {
        let shift = 128 - u32::from(len);
        let ids = || peers.iter().map(|(number, _)| number.checked_shr(shift).unwrap_or(0));
        let first = ids().min().unwrap_or(0);
        let last = ids().max().unwrap_or(0);
        let span = last - first;
        if span < 1024 + 16 * peers.len() as u128 {
            let mut places = vec![None; span as usize + 1];
            for (id, (_, place)) in ids().zip(peers) {
                places[(id - first) as usize] = Some(*place);
            }
            return Self::Array { first, places };
        }
        Self::Map(peers.iter().copied().collect())
    }

    fn get(&self, len: u8, address: u128) -> Option<u32> {
        match self {
            Self::Array { first, places } => {
                let id = address.checked_shr(128 - u32::from(len)).unwrap_or(0);
                let n = usize::try_from(id.checked_sub(*first)?).ok()?;
                *places.get(n)?
            }
            Self::Map(places) => places.get(&masked(address, len)).copied(),
        }
    }
}

/// A list of peers that is searched by addresses.
#[derive(Debug, Default)]
pub(crate) struct Table {
    peers: Vec<Peer>,
    /// For IPv4 and IPv6: the lengths of prefixes, the longest first, with the places of their
    /// peers.
    by_len: [Vec<(u8, Places)>; 2],
    nodes: HashSet<IpAddr>,
}

impl Table {
    pub(crate) fn new(peers: Vec<Peer>) -> Self {
        let of_family = |is_v6: bool| {
            let mut lens: HashMap<u8, Vec<(u128, u32)>> = HashMap::new();
            for (n, peer) in peers.iter().enumerate().filter(|(_, p)| p.subnet.is_ipv6() == is_v6) {
                let subnet = masked(number(peer.subnet), peer.len);
                // A list of more than 2^32 peers does not fit into memory.
                lens.entry(peer.len).or_default().push((subnet, n as u32));
            }
            let mut by_len: Vec<_> =
                lens.into_iter().map(|(len, peers)| (len, Places::new(len, &peers))).collect();
            by_len.sort_by_key(|(len, _)| std::cmp::Reverse(*len));
            by_len
        };
        let by_len = [of_family(false), of_family(true)];
        let nodes = peers.iter().map(|peer| peer.address.ip()).collect();
        Self { peers, by_len, nodes }
    }

    /// Whether a node has this public address.
    pub(crate) fn has_node(&self, address: IpAddr) -> bool {
        self.nodes.contains(&address)
    }

    /// The peer whose subnet has the address.
    pub(crate) fn get(&self, address: IpAddr) -> Option<&Peer> {
        let bits = number(address);
        let mut lens = self.by_len[usize::from(address.is_ipv6())].iter();
        let place = lens.find_map(|(len, places)| places.get(*len, bits))?;
        self.peers.get(place as usize)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(subnet: u32, len: u8, n: u16) -> Peer {
        let subnet = masked(u128::from(subnet) << 96, len) >> 96;
        let subnet = std::net::Ipv4Addr::from_bits(subnet as u32).into();
        Peer { subnet, len, address: ([192, 0, 2, 1], n).into() }
    }

    proptest! {
        #[test]
        fn the_longest_prefix_is_found(
            subnets in proptest::collection::hash_map((0_u32..1 << 10, 0_u8..=32), 0_u16.., 0..40),
            dense: bool,
            address in 0_u32..1 << 10,
        ) {
            // Near addresses make an array, distant ones a map.
            let spread = if dense { 1 } else { 0x3f_1357 };
            let mut seen = HashMap::new();
            for ((subnet, len), n) in subnets {
                let peer = peer(subnet.wrapping_mul(spread), len, n);
                seen.insert((peer.subnet, len), peer);
            }
            let peers: Vec<Peer> = seen.into_values().collect();
            let address = u128::from(address.wrapping_mul(spread)) << 96;
            let expected = peers
                .iter()
                .filter(|peer| masked(address, peer.len) == number(peer.subnet))
                .max_by_key(|peer| peer.len)
                .copied();
            let table = Table::new(peers);
            let found = table.get(std::net::Ipv4Addr::from_bits((address >> 96) as u32).into());
            prop_assert_eq!(found.copied(), expected);
        }
    }
}
