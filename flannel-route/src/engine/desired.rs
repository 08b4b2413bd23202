//! The desired objects: this node's own objects, and the objects that accepted peers define.

use crate::admission::{Admission, Changed, PeerId, RouteLookups};
use crate::nexthops::{Ids, Translated, translate, uses_nexthop};
use flannel_core::object::{Key, LinkName, Object, ObjectKind, ObjectSet, Route, Via};
use flannel_core::{Lease, Subnet, Subnets};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The objects that the kernel should have. If the kernel supports nexthop objects, an IPv4 route
/// with a gateway is desired as a nexthop object and a route with its id.
pub(super) struct Desired {
    /// This node's own objects.
    pub(super) base: ObjectSet,
    /// The keys of the own objects that are
    /// [put last](flannel_core::object::Record::put_last).
    pub(super) last: BTreeSet<Key>,
    pub(super) peers: Admission,
    /// The ids of nexthop objects. `None` before the first snapshot, and if the kernel does not
    /// support nexthop objects.
    pub(super) ids: Option<Ids>,
    /// The number of objects of each kind that peers define.
    pub(super) counts: BTreeMap<ObjectKind, usize>,
}

/// Whether an object is [put last](flannel_core::object::Record::put_last).
pub(super) fn is_put_last(object: &Object) -> bool {
    matches!(object, Object::Record(record) if record.is_last())
}

impl Desired {
    pub(super) fn new(base: ObjectSet, peers: Admission) -> Self {
        let last = base.iter().filter(|object| is_put_last(object)).map(Object::key).collect();
        Self { base, last, peers, ids: None, counts: BTreeMap::new() }
    }

    /// The desired object with this key, or `None` if no object with this key is desired.
    pub(super) fn object(&self, key: &Key) -> Option<Object> {
        if let Some(own) = self.base.get(key) {
            return Some(own.clone());
        }
        self.nexthop(key).or_else(|| {
            let object = self.peers.object(key)?;
            Some(translate(&object, self.id_of(key)).object)
        })
    }

    /// The nexthop object with this key that the route of a peer needs.
    fn nexthop(&self, key: &Key) -> Option<Object> {
        let Key::Nexthop(id) = *key else { return None };
        let dst = self.ids.as_ref()?.dst(id)?;
        let route = self.peers.object(&Key::Route(dst))?;
        translate(&route, Some(id)).nexthop.map(Object::from)
    }

    /// The id of the nexthop object of the route with this key.
    pub(super) fn id_of(&self, route: &Key) -> Option<u32> {
        self.ids.as_ref()?.of(route)
    }

    /// The route that uses the nexthop object with this id.
    pub(super) fn route_by(&self, id: u32) -> Option<Key> {
        self.ids.as_ref()?.dst(id).map(Key::Route)
    }

    /// The peer that defines an object.
    pub(super) fn peer_of(&self, key: &Key) -> Option<Subnets> {
        let route = match key {
            Key::Nexthop(id) => self.route_by(*id),
            _ => None,
        };
        self.peers.definer(&route.unwrap_or(*key))
    }

    /// The link that an object needs, directly or through its nexthop object.
    pub(super) fn link_of(&self, object: &Object) -> Option<LinkName> {
        match object {
            Object::Route(Route { via: Via::Nexthop(id), .. }) => {
                self.object(&Key::Nexthop(*id))?.link()
            }
            object => object.link(),
        }
    }

    /// Takes in changed leases.
    pub(super) fn update<'a>(
        &mut self,
        changes: impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)>,
        lookups: &RouteLookups<'_>,
    ) -> Changed {
        let changed = self.peers.update(changes, &|address| lookups.on_link(address));
        self.count_added(&changed.added);
        changed
    }

    /// Gives ids to the routes of new peers, and counts their objects.
    fn count_added(&mut self, added: &[PeerId]) {
        for object in added.iter().flat_map(|id| self.peers.objects_of(*id)) {
            if self.ids.as_mut().and_then(|ids| ids.assign_to(object)).is_some() {
                *self.counts.entry(ObjectKind::Nexthop).or_default() += 1;
            }
            *self.counts.entry(object.kind()).or_default() += 1;
        }
    }

    /// Calls `each` with all desired objects. The objects of peers come in the order of the peers'
    /// slots. If several peers define an object, it comes several times.
    pub(super) fn each(&self, mut each: impl FnMut(Object)) {
        self.base.iter().cloned().for_each(&mut each);
        self.expand(self.peers.objects(), each);
    }

    /// Calls `each` with the objects that the kernel should have for these definitions of peers.
    pub(super) fn expand<'a>(
        &self,
        objects: impl IntoIterator<Item = &'a Object>,
        mut each: impl FnMut(Object),
    ) {
        for object in objects {
            let Translated { nexthop, object } = translate(object, self.id_of(&object.key()));
            if let Some(nexthop) = nexthop {
                each(nexthop.into());
            }
            each(object);
        }
    }

    /// Lets destinations keep the ids that they have in the kernel. After the `first` snapshot, the
    /// routes of peers then get their ids. After later snapshots, they already have them.
    pub(super) fn adopt_ids(&mut self, actual: &ObjectSet, first: bool) {
        let Some(ids) = &mut self.ids else { return };
        let peers = &self.peers;
        ids.adopt(actual, |dst| first || !wants_nexthop(peers, dst));
        if first {
            let assigned = peers.objects().filter_map(|object| ids.assign_to(object));
            *self.counts.entry(ObjectKind::Nexthop).or_default() += assigned.count();
        }
    }

    /// Forgets the ids of destinations that are not desired, unless their objects are still `kept`.
    pub(super) fn release_ids<T>(&mut self, kept: &BTreeMap<Key, T>) {
        let Some(ids) = &mut self.ids else { return };
        let peers = &self.peers;
        ids.retain(|id, dst| {
            wants_nexthop(peers, dst)
                || kept.contains_key(&Key::Route(*dst))
                || kept.contains_key(&Key::Nexthop(id))
        });
    }
}

/// Whether a peer defines a route to `dst` that uses a nexthop object.
fn wants_nexthop(peers: &Admission, dst: &Subnet) -> bool {
    peers.object(&Key::Route(*dst)).is_some_and(|object| uses_nexthop(&object))
}
