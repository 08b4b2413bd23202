//! The ids of nexthop objects.

use crate::address::Family;
use crate::kernel::{Footprint, Kernel, KernelError};
use crate::text::fnv1a;

/// A block of ids for the nexthop objects of one network. Ids are unique in a network namespace, so
/// each network uses a block of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NexthopBlock {
    first: u32,
}

/// The ids of the nexthop objects in a network namespace.
///
/// An id with [our protocol](super::ROUTE_PROTOCOL) that no route of our protocol uses is in
/// neither list, because it is not certain which network owns it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NexthopIds {
    /// Whether the kernel supports nexthop objects, and the operator has not disabled them.
    pub usable: bool,
    /// The ids that an earlier run of this network left. They have our protocol, and all routes of
    /// our protocol that use them are inside the pod networks of this network.
    pub ours: Vec<u32>,
    /// Foreign ids. They have another protocol, or a route of our protocol outside the pod networks
    /// of this network uses them.
    pub foreign: Vec<u32>,
}

impl NexthopBlock {
    /// The number of ids in a block.
    pub const SIZE: u32 = 1 << 17;
    /// The first block begins here, and the last block ends at 2^31. If a program does not choose
    /// an id, the kernel counts from 1.
    const LOWEST: u32 = 1 << 30;
    const BLOCKS: u32 = Self::LOWEST / Self::SIZE;
    /// The number of blocks from which a network chooses.
    const TRIES: u32 = 8;

    /// The first id.
    pub const fn first(self) -> u32 {
        self.first
    }

    /// Whether `id` is in the block.
    pub const fn contains(self, id: u32) -> bool {
        id >= self.first && id - self.first < Self::SIZE
    }

    /// Chooses a block for a network from a few candidates, and returns it with the ids in the
    /// kernel.
    ///
    /// This is the first candidate that has more ids of an earlier run than foreign ids, or else
    /// the first candidate without foreign ids. It is `None` if neither exists, or if the network
    /// has no IPv4 pod network, because only IPv4 routes need nexthop objects.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub fn choose(
        kernel: &dyn Kernel,
        footprint: &Footprint,
    ) -> Result<(Option<Self>, NexthopIds), KernelError> {
        let there = kernel.nexthop_ids(footprint)?;
        if !footprint.networks.iter().any(|network| network.family() == Family::V4) {
            return Ok((None, there));
        }
        let left_by_earlier_run = Self::candidates(footprint)
            .find(|block| block.count(&there.ours) > block.count(&there.foreign));
        let chosen = left_by_earlier_run
            .or_else(|| Self::candidates(footprint).find(|block| block.count(&there.foreign) == 0));
        Ok((chosen, there))
    }

    /// The number of these ids that are in the block.
    fn count(self, ids: &[u32]) -> usize {
        ids.iter().filter(|id| self.contains(**id)).count()
    }

    /// The candidates depend on the IPv4 pod network only, because the backend and the interface
    /// may change.
    fn candidates(footprint: &Footprint) -> impl Iterator<Item = Self> {
        let networks = footprint.networks.iter().filter(|network| network.family() == Family::V4);
        let text: String = networks.map(|network| format!("{network}\n")).collect();
        let hash = fnv1a(text.as_bytes());
        (0..Self::TRIES).map(move |n| {
            let block = hash.wrapping_add(n.into()) as u32 % Self::BLOCKS;
            Self { first: Self::LOWEST + block * Self::SIZE }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Subnet;
    use crate::kernel::ROUTE_PROTOCOL;
    use crate::object::{Key, Nexthop, Route, Via};
    use crate::testing::FakeKernel;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    fn footprint(network: &str, link: Option<&str>) -> Footprint {
        Footprint {
            links: link.iter().map(|link| link.parse().unwrap()).collect(),
            networks: vec![subnet(network)],
            ..Footprint::default()
        }
    }

    fn chosen(kernel: &FakeKernel, footprint: &Footprint) -> NexthopBlock {
        NexthopBlock::choose(kernel, footprint).unwrap().0.unwrap()
    }

    fn put(kernel: &FakeKernel, id: u32, protocol: u8) {
        let nexthop = Nexthop {
            id,
            link: "eth0".parse().unwrap(),
            gateway: [192, 0, 2, 9].into(),
            onlink: false,
        };
        kernel.foreign_put(nexthop, protocol);
    }

    #[test]
    fn each_network_has_its_own_block_and_finds_it_again() {
        let kernel = FakeKernel::with_uplink("eth0");
        let hostgw = footprint("10.1.0.0/16", None);
        let block = chosen(&kernel, &hostgw);
        let blocks: std::collections::BTreeSet<u32> = (0..100)
            .map(|n| chosen(&kernel, &footprint(&format!("10.{n}.0.0/16"), None)).first)
            .collect();
        assert!(blocks.len() > 95 && blocks.contains(&block.first), "{blocks:?}");
        assert!(blocks.iter().all(|first| *first >= 1 << 30 && first % NexthopBlock::SIZE == 0));
        let vxlan = footprint("10.1.0.0/16", Some("flannel.1"));
        assert_eq!(chosen(&kernel, &vxlan), block, "another backend finds what the first left");
        let with_v6 = Footprint {
            networks: vec![subnet("10.1.0.0/16"), subnet("fd00::/48")],
            ..hostgw.clone()
        };
        assert_eq!(chosen(&kernel, &with_v6), block, "switching IPv6 on moves nothing");
        let elsewhere = Footprint { routes_on: ["eth7".parse().unwrap()].into(), ..hostgw };
        assert_eq!(chosen(&kernel, &elsewhere), block, "nor does another external interface");
    }

    /// Another version must find what this one left, so these may never change.
    #[test]
    fn blocks_are_the_same_in_every_version() {
        let kernel = FakeKernel::with_uplink("eth0");
        let blocks =
            ["10.1.0.0/16", "10.244.0.0/16"].map(|n| chosen(&kernel, &footprint(n, None)).first);
        assert_eq!(blocks, [1_888_616_448, 1_927_282_688]);
    }

    #[test]
    fn a_block_of_an_earlier_run_is_preferred_to_one_with_foreign_ids() {
        let kernel = FakeKernel::with_uplink("eth0");
        let footprint = footprint("10.1.0.0/16", None);
        let first = chosen(&kernel, &footprint);
        put(&kernel, first.first + 5, ROUTE_PROTOCOL);
        assert_eq!(chosen(&kernel, &footprint), first, "an earlier run's");
        let borrower =
            Route { dst: subnet("10.9.3.0/24"), via: Via::Nexthop(first.first + 5), mtu: None };
        kernel.foreign_put(borrower, 4);
        assert_eq!(
            chosen(&kernel, &footprint),
            first,
            "a route of no network's makes it nobody else's"
        );
        // Another network's: a route by it leads elsewhere.
        let stranger =
            Route { dst: subnet("10.2.3.0/24"), via: Via::Nexthop(first.first + 5), mtu: None };
        kernel.foreign_put(stranger, ROUTE_PROTOCOL);
        let second = chosen(&kernel, &footprint);
        assert_eq!(
            second.first,
            NexthopBlock::LOWEST
                + (first.first - NexthopBlock::LOWEST + NexthopBlock::SIZE) % NexthopBlock::LOWEST
        );
        put(&kernel, second.first, ROUTE_PROTOCOL);
        let left = Route { dst: subnet("10.1.3.0/24"), via: Via::Nexthop(second.first), mtu: None };
        kernel.foreign_delete(Key::Nexthop(first.first + 5));
        assert_eq!(
            chosen(&kernel, &footprint),
            first,
            "without a route it may be another's that has just begun"
        );
        kernel.foreign_put(left, ROUTE_PROTOCOL);
        assert_eq!(chosen(&kernel, &footprint), second, "what was left there is found");
        put(&kernel, second.first + 1, 3);
        assert_eq!(chosen(&kernel, &footprint), first);
        put(&kernel, second.first + 2, ROUTE_PROTOCOL);
        kernel.foreign_put(
            Route { dst: subnet("10.1.4.0/24"), via: Via::Nexthop(second.first + 2), mtu: None },
            ROUTE_PROTOCOL,
        );
        assert_eq!(chosen(&kernel, &footprint), second, "one of many was taken");
        kernel.foreign_delete(Key::Nexthop(second.first + 2));
        NexthopBlock::candidates(&footprint).for_each(|block| put(&kernel, block.first + 9, 186));
        assert_eq!(NexthopBlock::choose(&kernel, &footprint).unwrap().0, None);
    }
}
