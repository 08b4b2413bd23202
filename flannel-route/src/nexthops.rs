//! Nexthop objects for the routes to peers: the id of each destination.
//!
//! Plans define routes with gateways. An IPv4 route with a gateway becomes a nexthop object and a
//! route that uses its id. The kernel inserts many such routes in linear time, but routes with
//! different gateways in quadratic time. IPv6 routes take linear time anyway and stay as they are.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::NexthopBlock;
use flannel_core::object::{Key, Nexthop, Object, ObjectSet, Route, Via};
use foldhash::{HashMap, HashMapExt};

/// The ids of destinations. A destination has an id while it is desired, and until its object is
/// deleted.
#[derive(Debug)]
pub(crate) struct Ids {
    block: NexthopBlock,
    /// The destinations by their ids.
    dsts: HashMap<u32, Subnet>,
    /// The ids of the few destinations that do not have their [preferred](Ids::preferred) id.
    strays: HashMap<Subnet, u32>,
}

impl Ids {
    pub(crate) fn new(block: NexthopBlock) -> Self {
        Self { block, dsts: HashMap::new(), strays: HashMap::new() }
    }

    /// The number of destinations with an id.
    pub(crate) fn len(&self) -> usize {
        self.dsts.len()
    }

    /// Lets destinations keep the ids that they have in the kernel, as long as a route is there.
    pub(crate) fn adopt(&mut self, actual: &ObjectSet, may: impl Fn(&Subnet) -> bool) {
        for object in actual.iter() {
            if let Object::Route(Route { dst, via: Via::Nexthop(id), .. }) = object
                && self.block.contains(*id)
                && self.id(dst).is_none()
                && !self.dsts.contains_key(id)
                && may(dst)
            {
                self.insert(*dst, *id);
            }
        }
    }

    /// Returns the id of a destination. If it does not have one yet, chooses it. Returns `None` if
    /// the block is full, and for IPv6.
    pub(crate) fn assign(&mut self, dst: Subnet) -> Option<u32> {
        if let Some(id) = self.id(&dst) {
            return Some(id);
        }
        let preferred = self.preferred(&dst)?;
        let id = (0..NexthopBlock::SIZE)
            // A block begins at a multiple of its size.
            .map(|n| self.block.first() + (preferred + n) % NexthopBlock::SIZE)
            .find(|id| !self.dsts.contains_key(id))?;
        self.insert(dst, id);
        Some(id)
    }

    /// Gives an id to a route. Returns `None` also if the object is not a route that uses a nexthop
    /// object.
    pub(crate) fn assign_to(&mut self, object: &Object) -> Option<u32> {
        match object {
            Object::Route(route) if uses_nexthop(object) => self.assign(route.dst),
            _ => None,
        }
    }

    /// The id that the route with this key has.
    pub(crate) fn of(&self, key: &Key) -> Option<u32> {
        let Key::Route(dst) = key else { return None };
        self.id(dst)
    }

    pub(crate) fn dst(&self, id: u32) -> Option<Subnet> {
        self.dsts.get(&id).copied()
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(u32, &Subnet) -> bool) {
        self.dsts.retain(|id, dst| keep(*id, dst));
        self.strays.retain(|dst, id| self.dsts.get(id) == Some(dst));
    }

    pub(crate) fn release(&mut self, id: u32) {
        if let Some(dst) = self.dsts.remove(&id) {
            self.strays.remove(&dst);
        }
    }

    /// The preferred id: the number of the destination among the subnets of its length, so that
    /// subnets of one pod network do not collide. `None` for IPv6.
    fn preferred(&self, dst: &Subnet) -> Option<u32> {
        let IpAddr::V4(base) = dst.base() else { return None };
        let number = u32::from(base).checked_shr(u32::from(32 - dst.len())).unwrap_or(0);
        Some(self.block.first() + number % NexthopBlock::SIZE)
    }

    fn id(&self, dst: &Subnet) -> Option<u32> {
        let preferred = self.preferred(dst).filter(|id| self.dsts.get(id) == Some(dst));
        preferred.or_else(|| self.strays.get(dst).copied())
    }

    fn insert(&mut self, dst: Subnet, id: u32) {
        if self.preferred(&dst) != Some(id) {
            self.strays.insert(dst, id);
        }
        self.dsts.insert(id, dst);
    }
}

/// An object of a plan in the form in which the kernel should have it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Translated {
    /// The nexthop object that the route needs.
    pub(crate) nexthop: Option<Nexthop>,
    pub(crate) object: Object,
}

impl Translated {
    /// The nexthop object that the route needs.
    pub(crate) fn nexthop(&self) -> Option<Object> {
        self.nexthop.map(Object::from)
    }
}

/// Translates an object that a plan defines. With an id, a route with a gateway becomes a nexthop
/// object with this id, and a route that uses it. All other objects stay as they are.
pub(crate) fn translate(object: &Object, id: Option<u32>) -> Translated {
    let nexthop = id.and_then(|id| nexthop(object, id));
    let object = match (object, nexthop) {
        (Object::Route(route), Some(Nexthop { id, .. })) => {
            Route { via: Via::Nexthop(id), ..*route }.into()
        }
        _ => object.clone(),
    };
    Translated { nexthop, object }
}

/// Whether an object is a route that uses a nexthop object.
pub(crate) fn uses_nexthop(object: &Object) -> bool {
    nexthop(object, 0).is_some()
}

/// The nexthop object with the gateway of a route, or `None` if the route does not use one.
fn nexthop(object: &Object, id: u32) -> Option<Nexthop> {
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
        fn each_destination_keeps_its_own_id(
            steps in prop::collection::vec((0..40u8, 20..=32u8, any::<bool>()), 1..200),
        ) {
            let block = any_block();
            let mut ids = Ids::new(block);
            let mut model = HashMap::new();
            let back = |ids: &Ids| -> HashMap<_, _> {
                ids.dsts.iter().map(|(id, dst)| (*dst, *id)).collect()
            };
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
            let route = |(dst, id): (&Subnet, &u32)| {
                Route { dst: *dst, via: Via::Nexthop(*id), mtu: None }
            };
            let routes = model.iter().map(route);
            again.adopt(&routes.collect(), |_| true);
            prop_assert!(model.iter().all(|(dst, id)| again.id(dst) == Some(*id)));
            prop_assert_eq!(back(&again), model);
            again.retain(|id, _| id % 2 == 0);
            prop_assert!(again.strays.values().chain(again.dsts.keys()).all(|id| id % 2 == 0));
        }
    }

    #[test]
    fn the_id_of_a_foreign_ipv6_route_is_reserved_until_its_deletion() {
        let mut ids = Ids::new(any_block());
        let theirs = subnet("fd00::/64");
        let ours = subnet("10.1.7.0/24");
        let own = ids.preferred(&ours).unwrap();
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
    fn only_ipv4_routes_by_a_gateway_use_nexthop_objects() {
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
        let translated = translate(&route("10.1.3.0/24", gateway), Some(7));
        let by_nexthop = Route { dst: subnet("10.1.3.0/24"), via: Via::Nexthop(7), mtu: None };
        assert_eq!(translated, Translated { nexthop: Some(expected), object: by_nexthop.into() });
        for (object, id) in [(direct.into(), Some(7)), (route("10.1.3.0/24", gateway), None)] {
            assert_eq!(translate(&object, id), Translated { nexthop: None, object });
        }
    }
}
