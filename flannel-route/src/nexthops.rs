//! Nexthop objects for the routes to peers: the id of each destination.
//!
//! Plans define routes by gateways. Here an IPv4 route by a gateway becomes a nexthop object with
//! the gateway and a route by its id, one object per destination. The kernel inserts such routes in
//! linear time; routes by distinct gateways take quadratic time. A gateway that moves is one
//! replacement of one object. IPv6 is linear without nexthop objects and keeps its plain routes.

use std::hash::{BuildHasherDefault, Hasher};
use std::net::{IpAddr, Ipv4Addr};

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::NexthopBlock;
use flannel_core::object::{Key, Nexthop, Object, Route, State, Via};
use foldhash::{HashMap, HashMapExt};

/// The ids of destinations. A destination has an id while it is desired, and until its object is
/// deleted.
#[derive(Debug)]
pub(crate) struct Ids {
    block: NexthopBlock,
    dsts: Dsts,
    /// The ids of the few destinations whose id is not their [own](Ids::own).
    strays: HashMap<Subnet, u32>,
}

impl Ids {
    pub(crate) fn new(block: NexthopBlock) -> Self {
        Self { block, dsts: Dsts::default(), strays: HashMap::new() }
    }

    /// The number of destinations with an id.
    pub(crate) fn len(&self) -> usize {
        self.dsts.v4.len() + self.dsts.v6.len()
    }

    /// Reserves room for `more` destinations.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.dsts.v4.reserve(more);
    }

    /// Lets the destinations of routes in the kernel keep their ids, desired or not. Until an
    /// unwanted route is deleted, no other destination may get its id.
    pub(crate) fn adopt(&mut self, actual: &State, may: impl Fn(&Subnet) -> bool) {
        for object in actual.iter() {
            if let Object::Route(Route { dst, via: Via::Nexthop(id), .. }) = object
                && self.block.contains(*id)
                && self.id(dst).is_none()
                && self.dsts.get(*id).is_none()
                && may(dst)
            {
                self.insert(*dst, *id);
            }
        }
    }

    /// The id of a destination. Gives it one if it has none; `None` if the block is full.
    pub(crate) fn assign(&mut self, dst: Subnet) -> Option<u32> {
        if let Some(id) = self.id(&dst) {
            return Some(id);
        }
        let own = self.own(&dst)?;
        // A block begins at a multiple of its size.
        let slots = (0..NexthopBlock::SIZE).map(|n| (own + n) % NexthopBlock::SIZE);
        let id =
            slots.map(|slot| self.block.first() + slot).find(|id| self.dsts.get(*id).is_none())?;
        self.insert(dst, id);
        Some(id)
    }

    /// The same for the destination of a route that is put by a nexthop object.
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

    /// The number of a destination among the subnets of its length: subnets of one pod network do
    /// not collide. `None` for IPv6.
    fn own(&self, dst: &Subnet) -> Option<u32> {
        let IpAddr::V4(base) = dst.base() else { return None };
        let number = u32::from(base).checked_shr(u32::from(32 - dst.len())).unwrap_or(0);
        Some(self.block.first() + number % NexthopBlock::SIZE)
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

/// The destinations by their ids. Nearly all are IPv4; they take 12 bytes here instead of 24.
#[derive(Debug, Default)]
struct Dsts {
    v4: hashbrown::HashMap<u32, (u32, u8), BuildHasherDefault<InSequence>>,
    /// Destinations of routes that other programs made.
    v6: HashMap<u32, Subnet>,
}

/// Ids are numbers of subnets and mostly looked up in sequence, so the table keeps that sequence.
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
        // A table uses the lower end as the place, and the upper end to skip other entries.
        self.0 = u64::from(id.wrapping_mul(0x9e37_79b9)) << 32 | u64::from(id);
    }
}

impl Dsts {
    fn get(&self, id: u32) -> Option<Subnet> {
        self.v4.get(&id).map(unpacked).or_else(|| self.v6.get(&id).copied())
    }

    /// The id belongs to this destination.
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

/// The nexthop object with a route's gateway; `None` if the route is not put by a nexthop object.
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

#[cfg(test)]
mod tests {
    use super::*;
    use flannel_core::kernel::Footprint;
    use flannel_core::testing::FakeKernel;
    use proptest::prelude::*;

    fn any_block() -> NexthopBlock {
        let networks = vec![subnet("10.1.0.0/16")];
        let footprint = Footprint { networks, ..Footprint::default() };
        NexthopBlock::choose(&FakeKernel::with_uplink("eth0"), &footprint).unwrap().0.unwrap()
    }

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    proptest! {
        #[test]
        fn a_destination_keeps_its_id_and_shares_it_with_nobody(
            steps in prop::collection::vec((0..40u8, 20..=32u8, any::<bool>()), 1..200),
        ) {
            let block = any_block();
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
        let mut ids = Ids::new(any_block());
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
        let mut ids = Ids::new(any_block());
        let at = |n: u32| Subnet::host(IpAddr::from(n.to_be_bytes()));
        for n in 0..NexthopBlock::SIZE {
            assert!(ids.assign(at(n)).is_some());
        }
        assert!(ids.strays.is_empty(), "neighbours do not collide");
        assert_eq!(ids.assign(at(NexthopBlock::SIZE)), None);
        ids.release(any_block().first() + 77);
        assert_eq!(ids.assign(at(NexthopBlock::SIZE)), Some(any_block().first() + 77));
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
