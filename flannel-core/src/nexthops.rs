//! Nexthop objects for the routes to peers: which ids are ours, and which one a destination has.
//!
//! The one thing to know: plans speak of gateways. Here "IPv4 route by a gateway" becomes "nexthop object with the
//! gateway, route by its id", one object per destination: the kernel inserts such routes in linear time where routes
//! by distinct gateways take quadratic time, and a gateway that moves is one replacement of one object. (IPv6 is
//! linear without them, and keeps its plain routes.)

use std::hash::{BuildHasherDefault, Hasher};
use std::net::{IpAddr, Ipv4Addr};

use foldhash::{HashMap, HashMapExt};

use crate::address::{Family, Subnet};
use crate::kernel::{Kernel, KernelError, Owned};
use crate::state::{Key, Nexthop, Object, Route, State, Via};

/// The ids that one network takes for its nexthop objects: they are global in a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NexthopBlock {
    first: u32,
}

/// What nexthop objects there are in a network namespace, as far as a network must know to choose its ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NexthopIds {
    /// This kernel has nexthop objects, and nobody said not to use them.
    pub usable: bool,
    /// Of our protocol, with routes of our protocol by them, all inside the network's pod networks: an earlier run's.
    pub ours: Vec<u32>,
    /// Of another protocol, or with a route of our protocol by them elsewhere, which is another network's.
    pub foreign: Vec<u32>,
}

impl NexthopBlock {
    /// How many ids there are in a block.
    pub const SIZE: u32 = 1 << 17;
    /// Blocks lie from here up to 2^31: the kernel itself counts from 1, and so do people.
    const LOWEST: u32 = 1 << 30;
    const BLOCKS: u32 = Self::LOWEST / Self::SIZE;
    /// How many blocks are tried.
    const TRIES: u32 = 8;

    /// The smallest of them.
    pub const fn first(self) -> u32 {
        self.first
    }

    /// The id is one of them.
    pub const fn contains(self, id: u32) -> bool {
        id >= self.first && id - self.first < Self::SIZE
    }

    /// The block that hash and circumstances give a network: of the first few, best one where an earlier run left more than others
    /// have there (what is one of ours by its id and another's by its protocol was taken, and is taken back), else one without ids of
    /// others. `None` if others are in all of them, and without an IPv4 pod network, which alone needs any.
    ///
    /// # Errors
    /// The kernel could not be read.
    pub fn choose(
        kernel: &dyn Kernel,
        owned: &Owned,
    ) -> Result<(Option<Self>, NexthopIds), KernelError> {
        let there = kernel.nexthop_ids(owned)?;
        // By no pod network one block would be everybody's.
        if !owned.networks.iter().any(|network| network.family() == Family::V4) {
            return Ok((None, there));
        }
        let held = |block: &Self, ids: &[u32]| ids.iter().filter(|id| block.contains(**id)).count();
        let left = |block: &Self| held(block, &there.ours) > held(block, &there.foreign);
        let free = |block: &Self| held(block, &there.foreign) == 0;
        let chosen =
            Self::candidates(owned).find(left).or_else(|| Self::candidates(owned).find(free));
        Ok((chosen, there))
    }

    /// By the pod network alone, not by devices: a network that gets another backend or another external interface
    /// is to find what it left with the first.
    fn candidates(owned: &Owned) -> impl Iterator<Item = Self> {
        let networks = owned.networks.iter().filter(|network| network.family() == Family::V4);
        let words = networks.map(ToString::to_string);
        let hash = words.fold(FNV_BASIS, |hash, word| fnv(fnv(hash, word.as_bytes()), b"\n"));
        let block = move |n: u32| hash.wrapping_add(n.into()) as u32 % Self::BLOCKS;
        (0..Self::TRIES).map(move |n| Self { first: Self::LOWEST + block(n) * Self::SIZE })
    }
}

const FNV_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a: the same in every build for ever, which the standard library's hash is not.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Which id a destination has: as long as it is wanted, and until its object is gone.
#[derive(Debug)]
pub(crate) struct Ids {
    block: NexthopBlock,
    dsts: Dsts,
    /// The ids of those few destinations that have not their [own](Ids::own).
    strays: HashMap<Subnet, u32>,
}

impl Ids {
    pub(crate) fn new(block: NexthopBlock) -> Self {
        Self { block, dsts: Dsts::default(), strays: HashMap::new() }
    }

    /// How many destinations have one.
    pub(crate) fn len(&self) -> usize {
        self.dsts.v4.len() + self.dsts.v6.len()
    }

    /// Makes room for so many destinations more.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.dsts.v4.reserve(more);
    }

    /// The destinations of routes in the kernel keep the ids that they have, wanted or not: until an unwanted route
    /// is gone, nobody else may have its id.
    pub(crate) fn adopt(&mut self, actual: &State, may: impl Fn(&Subnet) -> bool) {
        for route in actual.routes() {
            if let Route { dst, via: Via::Nexthop(id), .. } = route
                && self.block.contains(*id)
                && self.id(dst).is_none()
                && self.dsts.get(*id).is_none()
                && may(dst)
            {
                self.insert(*dst, *id);
            }
        }
    }

    /// The id of a destination, from now on if it has none; `None` if the block is full.
    pub(crate) fn assign(&mut self, dst: Subnet) -> Option<u32> {
        if let Some(id) = self.id(&dst) {
            return Some(id);
        }
        let own = self.own(&dst)?;
        // A block begins at a multiple of its size.
        let slots = (0..NexthopBlock::SIZE).map(|n| (own + n) % NexthopBlock::SIZE);
        let id =
            slots.map(|slot| self.block.first + slot).find(|id| self.dsts.get(*id).is_none())?;
        self.insert(dst, id);
        Some(id)
    }

    /// The id of a route by a gateway that nexthop objects help, from now on if it has none.
    pub(crate) fn assign_to(&mut self, object: &Object) -> Option<u32> {
        nexthop(object, 0)?;
        let Object::Route(route) = object else { return None };
        self.assign(route.dst)
    }

    /// The id that a route has.
    pub(crate) fn of_route(&self, object: &Object) -> Option<u32> {
        let Object::Route(route) = object else { return None };
        self.id(&route.dst)
    }

    /// The id that the route with this key has.
    pub(crate) fn of(&self, key: &Key) -> Option<u32> {
        let Key::Route(dst) = key else { return None };
        self.id(dst)
    }

    pub(crate) fn dst(&self, id: u32) -> Option<Subnet> {
        self.dsts.get(id)
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u32, &Subnet) -> bool) {
        self.dsts.retain(&mut keep);
        self.strays.retain(|dst, id| self.dsts.holds(*id, dst));
    }

    pub(crate) fn release(&mut self, id: u32) {
        if let Some(dst) = self.dsts.remove(id) {
            self.strays.remove(&dst);
        }
    }

    /// Its number among the subnets of its length: neighbours in the pod network do not collide. `None` for IPv6.
    fn own(&self, dst: &Subnet) -> Option<u32> {
        let IpAddr::V4(base) = dst.base() else { return None };
        let number = u32::from(base).checked_shr(u32::from(32 - dst.len())).unwrap_or(0);
        Some(self.block.first + number % NexthopBlock::SIZE)
    }

    fn id(&self, dst: &Subnet) -> Option<u32> {
        let own = self.own(dst).filter(|own| self.dsts.holds(*own, dst));
        own.or_else(|| self.strays.get(dst).copied())
    }

    fn insert(&mut self, dst: Subnet, id: u32) {
        if self.own(&dst) != Some(id) {
            self.strays.insert(dst, id);
        }
        self.dsts.insert(id, dst);
    }
}

/// The destinations by their ids. Nearly all are IPv4, which take 12 bytes here instead of 24.
#[derive(Debug, Default)]
struct Dsts {
    v4: hashbrown::HashMap<u32, (u32, u8), BuildHasherDefault<InSequence>>,
    /// Of what others made.
    v6: HashMap<u32, Subnet>,
}

/// Ids are numbers of subnets, asked for mostly one after the other: so they lie in the table.
#[derive(Debug, Default)]
struct InSequence(u64);

impl Hasher for InSequence {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u32(u32::from(*byte)));
    }

    fn write_u32(&mut self, id: u32) {
        // The lower end says where to look, the upper one whether to look closer.
        self.0 = u64::from(id.wrapping_mul(0x9e37_79b9)) << 32 | u64::from(id);
    }
}

impl Dsts {
    fn get(&self, id: u32) -> Option<Subnet> {
        self.v4.get(&id).map(unpacked).or_else(|| self.v6.get(&id).copied())
    }

    /// The id is that of this destination.
    fn holds(&self, id: u32, dst: &Subnet) -> bool {
        match dst.base() {
            IpAddr::V4(base) => self.v4.get(&id) == Some(&(base.into(), dst.len())),
            IpAddr::V6(_) => self.v6.get(&id) == Some(dst),
        }
    }

    fn insert(&mut self, id: u32, dst: Subnet) {
        self.remove(id);
        match dst.base() {
            IpAddr::V4(base) => drop(self.v4.insert(id, (base.into(), dst.len()))),
            IpAddr::V6(_) => drop(self.v6.insert(id, dst)),
        }
    }

    fn remove(&mut self, id: u32) -> Option<Subnet> {
        self.v4.remove(&id).as_ref().map(unpacked).or_else(|| self.v6.remove(&id))
    }

    fn retain(&mut self, mut keep: impl FnMut(u32, &Subnet) -> bool) {
        self.v4.retain(|id, dst| keep(*id, &unpacked(dst)));
        self.v6.retain(|id, dst| keep(*id, dst));
    }
}

fn unpacked((base, len): &(u32, u8)) -> Subnet {
    Subnet::new(Ipv4Addr::from(*base).into(), *len).expect("it was taken from one")
}

/// The object that takes over a route's gateway; `None` if the route is none that nexthop objects help.
pub(crate) fn nexthop(object: &Object, id: u32) -> Option<Nexthop> {
    match object {
        Object::Route(Route { dst, via: Via::Gateway { gateway, link, onlink }, .. })
            if dst.family() == Family::V4 =>
        {
            Some(Nexthop { id, link: *link, gateway: *gateway, onlink: *onlink })
        }
        _ => None,
    }
}

/// The same route without and with nexthop object.
impl Route {
    /// By a nexthop object instead of whatever it is by.
    pub(crate) fn by_nexthop(&self, id: u32) -> Self {
        Self { via: Via::Nexthop(id), ..*self }
    }

    /// By the gateway of `nexthop` instead of whatever it is by.
    pub(crate) fn by_gateway_of(&self, nexthop: &Nexthop) -> Self {
        let Nexthop { link, gateway, onlink, .. } = *nexthop;
        Self { via: Via::Gateway { gateway, link, onlink }, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::ROUTE_PROTOCOL;
    use crate::testing::FakeKernel;
    use proptest::prelude::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    fn owned(network: &str, link: Option<&str>) -> Owned {
        Owned {
            links: link.iter().map(|link| link.parse().unwrap()).collect(),
            networks: vec![subnet(network)],
            ..Owned::default()
        }
    }

    fn chosen(kernel: &FakeKernel, owned: &Owned) -> NexthopBlock {
        NexthopBlock::choose(kernel, owned).unwrap().0.unwrap()
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
    fn networks_have_blocks_of_their_own_and_find_them_again() {
        let kernel = FakeKernel::with_uplink("eth0");
        let hostgw = owned("10.1.0.0/16", None);
        let block = chosen(&kernel, &hostgw);
        let blocks: std::collections::BTreeSet<u32> = (0..100)
            .map(|n| chosen(&kernel, &owned(&format!("10.{n}.0.0/16"), None)).first)
            .collect();
        assert!(blocks.len() > 95 && blocks.contains(&block.first), "{blocks:?}");
        assert!(blocks.iter().all(|first| *first >= 1 << 30 && first % NexthopBlock::SIZE == 0));
        let vxlan = owned("10.1.0.0/16", Some("flannel.1"));
        assert_eq!(chosen(&kernel, &vxlan), block, "another backend finds what the first left");
        let with_v6 =
            Owned { networks: vec![subnet("10.1.0.0/16"), subnet("fd00::/48")], ..hostgw.clone() };
        assert_eq!(chosen(&kernel, &with_v6), block, "switching IPv6 on moves nothing");
        let elsewhere = Owned { routes_on: ["eth7".parse().unwrap()].into(), ..hostgw };
        assert_eq!(chosen(&kernel, &elsewhere), block, "nor does another external interface");
    }

    /// Another version must find what this one left, so these may never change.
    #[test]
    fn blocks_are_the_same_in_every_version() {
        let kernel = FakeKernel::with_uplink("eth0");
        let blocks =
            ["10.1.0.0/16", "10.244.0.0/16"].map(|n| chosen(&kernel, &owned(n, None)).first);
        assert_eq!(blocks, [1_888_616_448, 1_927_282_688]);
    }

    #[test]
    fn a_block_with_foreign_ids_is_passed_over_and_one_of_an_earlier_run_preferred() {
        let kernel = FakeKernel::with_uplink("eth0");
        let owned = owned("10.1.0.0/16", None);
        let first = chosen(&kernel, &owned);
        put(&kernel, first.first + 5, ROUTE_PROTOCOL);
        assert_eq!(chosen(&kernel, &owned), first, "an earlier run's");
        let borrower =
            Route { dst: subnet("10.9.3.0/24"), via: Via::Nexthop(first.first + 5), mtu: None };
        kernel.foreign_put(borrower, 4);
        assert_eq!(
            chosen(&kernel, &owned),
            first,
            "a route of no network's makes it nobody else's"
        );
        // Another network's: a route by it leads elsewhere.
        let stranger =
            Route { dst: subnet("10.2.3.0/24"), via: Via::Nexthop(first.first + 5), mtu: None };
        kernel.foreign_put(stranger, ROUTE_PROTOCOL);
        let second = chosen(&kernel, &owned);
        assert_eq!(
            second.first,
            NexthopBlock::LOWEST
                + (first.first - NexthopBlock::LOWEST + NexthopBlock::SIZE) % NexthopBlock::LOWEST
        );
        put(&kernel, second.first, ROUTE_PROTOCOL);
        let left = Route { dst: subnet("10.1.3.0/24"), via: Via::Nexthop(second.first), mtu: None };
        kernel.foreign_delete(Key::Nexthop(first.first + 5));
        assert_eq!(
            chosen(&kernel, &owned),
            first,
            "without a route it may be another's that has just begun"
        );
        kernel.foreign_put(left, ROUTE_PROTOCOL);
        assert_eq!(chosen(&kernel, &owned), second, "what was left there is found");
        put(&kernel, second.first + 1, 3);
        assert_eq!(chosen(&kernel, &owned), first);
        put(&kernel, second.first + 2, ROUTE_PROTOCOL);
        kernel.foreign_put(
            Route { dst: subnet("10.1.4.0/24"), via: Via::Nexthop(second.first + 2), mtu: None },
            ROUTE_PROTOCOL,
        );
        assert_eq!(chosen(&kernel, &owned), second, "one of many was taken");
        kernel.foreign_delete(Key::Nexthop(second.first + 2));
        NexthopBlock::candidates(&owned).for_each(|block| put(&kernel, block.first + 9, 186));
        assert_eq!(NexthopBlock::choose(&kernel, &owned).unwrap().0, None);
    }

    proptest! {
        #[test]
        fn a_destination_keeps_its_id_and_shares_it_with_nobody(
            steps in prop::collection::vec((0..40u8, 20..=32u8, any::<bool>()), 1..200),
        ) {
            let block = NexthopBlock { first: NexthopBlock::LOWEST };
            let mut ids = Ids::new(block);
            let mut model = HashMap::new();
            let back = |ids: &Ids| ids.dsts.v4.iter().map(|(id, dst)| (unpacked(dst), *id)).collect::<HashMap<_, _>>();
            for (n, len, wanted) in steps {
                let dst = Subnet::new(IpAddr::from([10, 1, n, 0]), len).unwrap();
                if wanted {
                    let id = ids.assign(dst).unwrap();
                    prop_assert!(block.contains(id));
                    prop_assert_eq!(*model.entry(dst).or_insert(id), id);
                } else if let Some(id) = model.remove(&dst) {
                    ids.release(id);
                }
                prop_assert_eq!(ids.id(&dst), model.get(&dst).copied());
                prop_assert!(model.iter().all(|(dst, id)| ids.id(dst) == Some(*id)));
                prop_assert_eq!(back(&ids), model.clone());
                prop_assert!(ids.strays.iter().all(|(dst, id)| model.get(dst) == Some(id)));
            }
            let mut again = Ids::new(block);
            let routes = model.iter().map(|(dst, id)| Route { dst: *dst, via: Via::Nexthop(*id), mtu: None });
            again.adopt(&routes.collect(), |_| true);
            prop_assert!(model.iter().all(|(dst, id)| again.id(dst) == Some(*id)));
            prop_assert_eq!(back(&again), model);
            again.retain(|id, _| id % 2 == 0);
            prop_assert!(again.strays.values().chain(again.dsts.v4.keys()).all(|id| id % 2 == 0));
        }
    }

    #[test]
    fn the_id_of_an_ipv6_route_that_others_made_is_nobody_elses_until_it_is_gone() {
        let mut ids = Ids::new(NexthopBlock { first: NexthopBlock::LOWEST });
        let (theirs, ours) = (subnet("fd00::/64"), subnet("10.1.7.0/24"));
        let own = ids.own(&ours).unwrap();
        ids.adopt(
            &[Route { dst: theirs, via: Via::Nexthop(own), mtu: None }].into_iter().collect(),
            |_| true,
        );
        assert_eq!((ids.id(&theirs), ids.dst(own)), (Some(own), Some(theirs)));
        let other = ids.assign(ours).unwrap();
        assert_ne!(other, own);
        ids.retain(|id, _| id == own);
        assert_eq!((ids.id(&theirs), ids.id(&ours)), (Some(own), None));
        ids.release(own);
        assert_eq!((ids.id(&theirs), ids.dst(own), ids.assign(ours)), (None, None, Some(own)));
    }

    #[test]
    fn a_full_block_gives_no_id() {
        let mut ids = Ids::new(NexthopBlock { first: NexthopBlock::LOWEST });
        let at = |n: u32| Subnet::host(IpAddr::from(n.to_be_bytes()));
        for n in 0..NexthopBlock::SIZE {
            assert!(ids.assign(at(n)).is_some());
        }
        assert!(ids.strays.is_empty(), "neighbours do not collide");
        assert_eq!(ids.assign(at(NexthopBlock::SIZE)), None);
        ids.release(NexthopBlock::LOWEST + 77);
        assert_eq!(ids.assign(at(NexthopBlock::SIZE)), Some(NexthopBlock::LOWEST + 77));
    }

    #[test]
    fn only_ipv4_routes_by_a_gateway_go_by_nexthop_objects() {
        let link = "eth0".parse().unwrap();
        let route = |dst, gateway| {
            Object::from(Route {
                dst: subnet(dst),
                via: Via::Gateway { gateway, link, onlink: true },
                mtu: None,
            })
        };
        let gateway = IpAddr::from([192, 0, 2, 9]);
        let expected = Nexthop { id: 7, link, gateway, onlink: true };
        assert_eq!(nexthop(&route("10.1.3.0/24", gateway), 7), Some(expected));
        assert_eq!(nexthop(&route("fd00::/64", "fd00::9".parse().unwrap()), 7), None);
        let direct = Route { dst: subnet("10.1.3.0/24"), via: Via::Link(link), mtu: None };
        assert_eq!(nexthop(&direct.into(), 7), None);
    }
}
