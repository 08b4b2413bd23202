//! Makes the kernel equal to what is wanted, whatever state it finds.
//!
//! The one thing to know: the kernel is taken to be what was last put there, except for what is *in doubt*. A
//! doubt about one object is removed by putting the object again, a doubt about more by a snapshot. No message
//! from the kernel is trusted to say how things are, only that they may have changed.
//!
//! No task in here: the driver ([`KernelNetwork`](crate::KernelNetwork)) says when.

mod bulk;
mod invalidate;
mod report;
mod survey;
mod write;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::bulk::{SLICE, Unprocessed};
pub(crate) use self::write::{BATCH, Gate};
use crate::admission::{Admission, Changed, Delta};
use crate::apply_stats::ApplyStats;
use crate::nexthops::{Ids, nexthop};
use crate::object_counts::ObjectCounts;
use crate::peer_index::Id;
use flannel_core::Kernel;
use flannel_core::Subnet;
use flannel_core::kernel::{ChangedBy, Footprint, KernelError};
use flannel_core::lease::{LeaseSet, Origin, View};
use flannel_core::object::LinkName;
use flannel_core::object::{Key, Object, ObjectKind, Route, State, Via};
use flannel_core::status::Damage;
use flannel_core::{Lease, Subnets};

/// Why an object is to be put or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Leases, or answers to what plans ask; and when the leases were there, if it was they.
    Lease(Option<Instant>),
    /// It may not be as we put it: somebody else seems to have done this.
    Repair(Damage),
}

/// What only a snapshot can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Unread {
    Nothing,
    /// There may be objects that nobody wants; those that are wanted are known.
    Additions,
    Everything,
}

/// How often the kernel was read so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reads {
    pub(crate) done: u64,
    pub(crate) tries: u64,
    /// How long all tries took together.
    pub(crate) took: Duration,
}

/// What failed: why it was tried, and what is to be deleted if it was a deletion.
#[derive(Debug)]
struct Failed {
    cause: Cause,
    deletion: Option<Object>,
}

/// Which answers that plans were given may no longer hold.
#[derive(Debug, Default)]
struct StaleLookups {
    all: bool,
    /// The link that routes are on changed: answers cannot wait.
    urgent: bool,
    under: BTreeSet<Subnet>,
}

pub(crate) struct Engine {
    footprint: Footprint,
    base: State,
    peers: Admission,
    /// The ids of nexthop objects that stand in for the gateways of peers' routes; `None` before the kernel was read,
    /// and if it has no such objects or we are to use none.
    ids: Option<Ids>,
    leases: LeaseSet,
    live: bool,
    /// Wanted objects that are not known to be in place, but for those that the kernel refused.
    put: BTreeMap<Key, Cause>,
    /// Leases of thousands of new peers, not yet looked at.
    unprocessed: Unprocessed,
    /// New peers of which nothing was put yet, and when their leases were there. What they define is not in `put`.
    fresh: VecDeque<(Id, Option<Instant>)>,
    /// Objects of ours that are not wanted and not known to be gone, but for those that the kernel kept.
    gone: BTreeMap<Key, (Object, Cause)>,
    /// What the kernel refused: not tried again until [`Engine::retry`] or a snapshot.
    failed: BTreeMap<Key, Failed>,
    /// Who is said to have changed what is in doubt.
    suspects: BTreeMap<Key, ChangedBy>,
    unread: Unread,
    /// Wanted links that are not there: nothing can be put on them.
    missing_links: BTreeSet<LinkName>,
    /// The last round ended before all was done that it could do.
    unfinished: bool,
    reads: Reads,
    /// The objects that peers add to `base`.
    peer_objects: ObjectCounts,
    stale_lookups: StaleLookups,
    /// The links that lead to what plans asked about, directly or through a router; some may no longer do.
    answer_links: BTreeSet<LinkName>,
    stats: ApplyStats,
    kernel_error: Option<KernelError>,
    lookup_error: Option<KernelError>,
}

impl Engine {
    /// Wants these blackholes too, whatever the peers; before the first round.
    pub(crate) fn want_blackholes(&mut self, objects: impl Iterator<Item = Object>) {
        self.footprint.blackholes = true;
        self.base.extend(objects);
    }

    pub(crate) fn new(footprint: Footprint, base: State, peers: Admission) -> Self {
        Self {
            footprint,
            base,
            peers,
            ids: None,
            leases: LeaseSet::default(),
            live: false,
            put: BTreeMap::new(),
            unprocessed: Unprocessed::default(),
            fresh: VecDeque::new(),
            gone: BTreeMap::new(),
            failed: BTreeMap::new(),
            suspects: BTreeMap::new(),
            unread: Unread::Everything,
            missing_links: BTreeSet::new(),
            unfinished: false,
            reads: Reads::default(),
            peer_objects: ObjectCounts::default(),
            stale_lookups: StaleLookups::default(),
            answer_links: BTreeSet::new(),
            stats: ApplyStats::default(),
            kernel_error: None,
            lookup_error: None,
        }
    }

    /// Takes in a newer view, which was there at `arrived`. Asks `kernel` what plans ask.
    pub(crate) fn view(&mut self, view: &View, arrived: Instant, kernel: &dyn Kernel) {
        self.take_all_unprocessed(kernel);
        self.peers.make_room(view.leases.len().saturating_sub(self.leases.len()));
        let leases = std::mem::replace(&mut self.leases, view.leases.clone());
        self.live = matches!(view.origin, Origin::Live { .. });
        let mut changes: Vec<_> = view.leases.changes_since(&leases).collect();
        if changes.len() > SLICE && !self.is_unread() {
            let is_new =
                |change: &mut (Subnets, Option<&Arc<Lease>>)| !self.peers.contains(&change.0);
            let new = changes.extract_if(.., is_new).filter_map(|(_, lease)| lease.cloned());
            self.unprocessed = Unprocessed::new(new.collect(), arrived);
        }
        self.take_in(changes.into_iter(), arrived, kernel);
    }

    fn take_in<'a>(
        &mut self,
        changes: impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)>,
        arrived: Instant,
        kernel: &dyn Kernel,
    ) {
        let answers = Answers::new(kernel);
        let changed = self.peers.update(changes, &|a| answers.on_link(a));
        self.take(changed, Some(arrived));
        self.take_answers(answers);
    }

    /// Asks anew what plans asked, where the answer may have changed.
    pub(crate) fn recheck_lookups(&mut self, kernel: &dyn Kernel) {
        let stale = std::mem::take(&mut self.stale_lookups);
        let answers = Answers::new(kernel);
        let everything = stale.all.then_some(None);
        if stale.all {
            self.answer_links.clear();
        }
        // A subnet stands directly before those inside it.
        let mut last: Option<Subnet> = None;
        let parts = stale.under.into_iter().filter(|under| {
            let new = !stale.all && last.is_none_or(|last| !last.covers(under));
            if new {
                last = Some(*under);
            }
            new
        });
        let parts = parts.map(Some);
        for under in everything.into_iter().chain(parts) {
            let changed = self.peers.recheck(under, &|a| answers.on_link(a));
            self.take(changed, None);
        }
        if stale.all {
            self.lookup_error = None;
        }
        self.take_answers(answers);
    }

    /// There is work for [`Engine::settle`].
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unread()
            || !self.put.is_empty()
            || self.has_fresh()
            || (self.live && !self.gone.is_empty())
    }

    /// There are new peers of which nothing was put yet.
    pub(crate) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty() || self.unprocessed.len() > 0
    }

    /// There is more to do at once than a round may take. Before the first look at the kernel there is nothing to do.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished || (self.has_fresh() && self.reads.done > 0)
    }

    /// There is work that begins with a snapshot.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread > Unread::Nothing
    }

    /// What the kernel refused is to be tried again.
    pub(crate) fn retry(&mut self) {
        for (key, Failed { cause, deletion }) in std::mem::take(&mut self.failed) {
            match deletion {
                Some(object) => drop(self.gone.insert(key, (object, cause))),
                None => drop(self.put.entry(key).or_insert(cause)),
            }
        }
    }

    /// The link that an object needs, directly or through its nexthop.
    fn link_of(&self, object: &Object) -> Option<LinkName> {
        match object {
            Object::Route(Route { via: Via::Nexthop(id), .. }) => {
                self.want(&Key::Nexthop(*id))?.link()
            }
            object => object.link(),
        }
    }

    /// Notes which links the answers went by. What the kernel could not answer is asked again when it is read again.
    fn take_answers(&mut self, answers: Answers<'_>) {
        self.answer_links.append(&mut answers.links.into_inner());
        if let Some(error) = answers.error.into_inner() {
            self.stale_lookups.all = true;
            self.lookup_error = Some(error);
        }
    }

    fn want(&self, key: &Key) -> Option<Object> {
        if let Some(object) = self.base.get(key) {
            return Some(object.clone());
        }
        if let Key::Nexthop(id) = key
            && let Some(nexthop) = self.nexthop(*id)
        {
            return Some(nexthop);
        }
        self.peers.object(key).map(|object| self.by_nexthop(&object))
    }

    /// The nexthop object with this id that a peer's route needs.
    fn nexthop(&self, id: u32) -> Option<Object> {
        let dst = self.ids.as_ref()?.dst(id)?;
        Some(nexthop(&self.peers.object(&Key::Route(dst))?, id)?.into())
    }

    /// A peer's object as the kernel is to have it.
    fn by_nexthop(&self, object: &Object) -> Object {
        by_nexthop(object, self.ids.as_ref().and_then(|ids| ids.of(&object.key())))
    }

    fn take(&mut self, changed: Changed, arrived: Option<Instant>) {
        let Changed { deltas, fresh, unapplied } = changed;
        for Delta { key, before, after } in deltas {
            let old = self.ids.as_ref().and_then(|ids| ids.of(&key));
            let gains = after.as_ref().is_some_and(|object| nexthop(object, 0).is_some());
            let new = match (&mut self.ids, key) {
                (Some(ids), Key::Route(dst)) if gains => ids.assign(dst),
                _ => old,
            };
            let part = |object: &Option<Object>, id: Option<u32>| {
                nexthop(object.as_ref()?, id?).map(Object::from)
            };
            if let Some(id) = new {
                self.replace(Key::Nexthop(id), part(&before, old), part(&after, new), arrived);
            }
            self.replace(
                key,
                before.map(|o| by_nexthop(&o, old)),
                after.map(|o| by_nexthop(&o, new)),
                arrived,
            );
        }
        self.take_fresh(fresh, arrived);
        self.take_unapplied(unapplied, arrived);
    }

    /// What peers define is to be put when it is their turn.
    fn take_fresh(&mut self, fresh: Vec<Id>, arrived: Option<Instant>) {
        if let Some(ids) = &mut self.ids {
            ids.reserve(fresh.len());
        }
        for id in &fresh {
            for object in self.peers.fresh_objects(*id).unwrap_or_default() {
                let new = |ids: &mut Ids| ids.assign_to(object);
                if self.ids.as_mut().and_then(new).is_some() {
                    self.peer_objects.add(ObjectKind::Nexthop);
                }
                self.peer_objects.add(object.kind());
            }
        }
        self.fresh.extend(fresh.into_iter().map(|id| (id, arrived)));
    }

    /// What was about to be put is still to be put if it is wanted now.
    fn take_unapplied(&mut self, unapplied: Vec<Key>, arrived: Option<Instant>) {
        for key in unapplied {
            let nexthop = self.ids.as_ref().and_then(|ids| ids.of(&key)).map(Key::Nexthop);
            for key in nexthop.into_iter().chain([key]) {
                if self.want(&key).is_some() {
                    self.put.entry(key).or_insert(Cause::Lease(arrived));
                }
            }
        }
    }

    /// The definition of an object changed, or seems so: a peer that moves keeps its route by the nexthop object.
    fn replace(
        &mut self,
        key: Key,
        before: Option<Object>,
        after: Option<Object>,
        arrived: Option<Instant>,
    ) {
        if after.is_some() {
            self.peer_objects.add(key.kind());
        }
        if before.is_some() {
            self.peer_objects.remove(key.kind());
        }
        match (before, after) {
            (before, after) if before == after => {}
            (_, Some(_)) => {
                self.gone.remove(&key);
                self.failed.remove(&key);
                self.put.insert(key, Cause::Lease(arrived));
            }
            (Some(before), None) => {
                // What could not be put may be there in another form, which is not deleted for this one.
                if self.failed.remove(&key).is_some() {
                    self.unread = self.unread.max(Unread::Additions);
                }
                self.put.remove(&key);
                self.stats.clear(&key);
                self.gone.insert(key, (before, Cause::Lease(arrived)));
            }
            (None, None) => {}
        }
    }

    /// The peer that an object is of.
    fn peer_of(&self, key: &Key) -> Option<Subnets> {
        let dst = if let Key::Nexthop(id) = key {
            self.ids.as_ref().and_then(|ids| ids.dst(*id))
        } else {
            None
        };
        self.peers.definer(&dst.map_or(*key, Key::Route))
    }
}

/// A kernel's answers to what plans ask. What it cannot answer is asked again soon.
struct Answers<'a> {
    kernel: &'a dyn Kernel,
    links: RefCell<BTreeSet<LinkName>>,
    error: RefCell<Option<KernelError>>,
}

impl<'a> Answers<'a> {
    fn new(kernel: &'a dyn Kernel) -> Self {
        Self { kernel, links: RefCell::default(), error: RefCell::default() }
    }

    fn on_link(&self, address: IpAddr) -> Option<Option<LinkName>> {
        let answer =
            self.kernel.lookup(address).map_err(|error| self.error.replace(Some(error))).ok()?;
        self.links.borrow_mut().extend(answer.link);
        Some(answer.on_link())
    }
}

/// A peer's object as the kernel is to have it: a route by a gateway becomes one by its nexthop object.
fn by_nexthop(object: &Object, id: Option<u32>) -> Object {
    match (object, id) {
        (Object::Route(route), Some(id)) if nexthop(object, id).is_some() => {
            route.by_nexthop(id).into()
        }
        _ => object.clone(),
    }
}

/// What peers define as the kernel is to have it: each route by a gateway becomes one by its nexthop object.
fn expand<'a>(
    objects: impl IntoIterator<Item = &'a Object>,
    ids: Option<&Ids>,
    mut each: impl FnMut(Object),
) {
    for object in objects {
        let id = ids.and_then(|ids| ids.of_route(object));
        if let Some(nexthop) = id.and_then(|id| nexthop(object, id)) {
            each(nexthop.into());
        }
        each(by_nexthop(object, id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::AdmissionRules;
    use flannel_core::kernel::{Invalidation, KernelEvent, ROUTE_PROTOCOL};
    use flannel_core::lease::{LeaseAttrs, Revision};
    use flannel_core::status::{ObjectState, Wait};
    use flannel_core::testing::{FakeKernel, Operation};

    fn changed_by(protocol: u8) -> ChangedBy {
        let mut changed_by = ChangedBy::new(7);
        changed_by.protocol = Some(protocol);
        changed_by
    }

    fn uplink() -> LinkName {
        "eth0".parse().unwrap()
    }

    fn dst(n: u8) -> Subnet {
        format!("10.1.{n}.0/24").parse().unwrap()
    }

    fn by_gateway(n: u8, gateway: IpAddr) -> Route {
        Route {
            dst: dst(n),
            via: Via::Gateway { gateway, link: uplink(), onlink: true },
            mtu: None,
        }
    }

    fn lease(n: u8, public: [u8; 4]) -> Lease {
        let attrs =
            LeaseAttrs { public: [public.into()].into_iter().collect(), ..LeaseAttrs::default() };
        let subnets = Subnets::new([dst(n)]).unwrap();
        Lease {
            subnets,
            attrs,
            expires: None,
            since: Revision(1),
            revision: Revision(u64::from(public[3])),
        }
    }

    /// Admission that are routes on the uplink: by a gateway, or if the public address is private by none, and with an MTU.
    struct World {
        kernel: FakeKernel,
        engine: Engine,
        leases: LeaseSet,
    }

    impl World {
        fn new() -> Self {
            Self::of("10.1.0.0/16".parse().unwrap())
        }

        fn of(network: Subnet) -> Self {
            let terms = AdmissionRules {
                networks: [network].into_iter().collect(),
                ..AdmissionRules::default()
            };
            let plan =
                |lease: &Lease, _: &flannel_core::backend::Env<'_>, objects: &mut Vec<Object>| {
                    for peer in lease.endpoints() {
                        let (dst, link) = (peer.subnet, uplink());
                        let route = match peer.public.unwrap() {
                            IpAddr::V4(public) if public.is_private() => Route {
                                dst,
                                via: Via::Link(link),
                                mtu: Some(1400 + u32::from(public.octets()[3])),
                            },
                            gateway => Route {
                                dst,
                                via: Via::Gateway { gateway, link, onlink: true },
                                mtu: None,
                            },
                        };
                        objects.push(route.into());
                    }
                    Ok(())
                };
            let footprint = Footprint {
                links: ["flannel.1".parse().unwrap()].into(),
                networks: vec![network],
                routes_on: [uplink()].into(),
                ..Footprint::default()
            };
            let peers = Admission::new(terms, crate::admission::every(plan));
            let kernel = FakeKernel::with_uplink("eth0");
            let engine = Engine::new(footprint, State::default(), peers);
            Self { kernel, engine, leases: LeaseSet::default() }
        }

        /// The same with peers, all in place.
        fn settled(peers: std::ops::Range<u8>) -> Self {
            let mut world = Self::new();
            peers.for_each(|n| world.leases.insert(lease(n, [198, 51, 100, n])));
            world.view();
            world.settle();
            world
        }

        fn put(&mut self, n: u8, public: [u8; 4]) {
            self.leases.insert(lease(n, public));
            self.view();
        }

        fn view(&mut self) {
            let view = View {
                leases: self.leases.clone(),
                origin: Origin::Live { revision: Revision(1) },
            };
            self.engine.view(&view, Instant::now(), &self.kernel);
        }

        fn settle(&mut self) {
            self.settle_as_far_as(true);
            // A round ends by time, too.
            while self.engine.has_fresh() {
                self.settle_as_far_as(true);
            }
            assert!(!self.engine.is_unsettled());
        }

        fn settle_as_far_as(&mut self, may_read: bool) {
            self.engine.settle(&self.kernel, &Gate::default(), may_read).unwrap();
        }

        fn invalidate(&mut self, invalidation: &Invalidation) {
            self.engine.invalidate(invalidation, &self.kernel);
        }

        fn route(&self, n: u8) -> Option<Via> {
            match self.kernel.state().get(&Key::Route(dst(n)))? {
                Object::Route(route) => Some(route.via),
                other => panic!("{other}"),
            }
        }

        /// The peers that wait.
        fn waiting(&self) -> Vec<(Subnets, Wait)> {
            self.engine.waiting().peers.into_iter().collect()
        }

        /// How what a peer wants stands.
        fn standings(&self, n: u8) -> Vec<ObjectState> {
            let explained = self.engine.explain(dst(n).base(), &self.kernel).unwrap();
            explained.objects.into_iter().map(|(_, standing)| standing).collect()
        }
    }

    #[test]
    fn what_is_new_or_in_doubt_is_pending_and_nothing_else_is() {
        use ObjectState::{InPlace, Pending};
        let mut world = World::settled(2..5);
        assert_eq!(world.standings(2), [InPlace, InPlace]);
        world.put(7, [198, 51, 100, 7]);
        assert_eq!((world.standings(7), world.standings(2)), (vec![Pending; 2], vec![InPlace; 2]));
        assert_eq!(world.waiting(), [(Subnets::new([dst(7)]).unwrap(), Wait::Turn)]);
        world.settle();
        assert_eq!(world.standings(7), [InPlace, InPlace]);
        world.invalidate(&Invalidation::Objects(
            vec![KernelEvent::Deleted(Key::Route(dst(3)))],
            None,
        ));
        assert_eq!(
            (world.standings(3), world.standings(2)),
            (vec![InPlace, Pending], vec![InPlace; 2])
        );
        assert_eq!(world.waiting(), [(Subnets::new([dst(3)]).unwrap(), Wait::Repair)]);
        world.settle();
        world.invalidate(&Invalidation::Everything);
        assert_eq!(world.standings(2), [Pending, Pending]);
    }

    #[test]
    fn links_of_ours_and_under_our_routes_matter_and_others_do_not() {
        let lookups =
            |world: &World| (world.engine.has_stale_lookups(), world.engine.has_urgent_lookups());
        for (link, unread, stale) in
            [("cali1", false, false), ("flannel.1", true, false), ("eth0", true, true)]
        {
            let mut world = World::settled(2..5);
            assert_eq!((world.engine.is_unread(), lookups(&world)), (false, (false, false)));
            world.invalidate(&Invalidation::Link(link.parse().unwrap()));
            assert_eq!(
                (world.engine.is_unread(), lookups(&world)),
                (unread, (stale, stale)),
                "{link}"
            );
        }
    }

    #[test]
    fn what_a_new_peer_finds_there_and_not_quite_so_is_put_again_and_no_repair() {
        let mut world = World::settled(2..5);
        let route = Route { dst: dst(7), via: Via::Link(uplink()), mtu: Some(1407) };
        world.kernel.foreign_put_inexact(route, ROUTE_PROTOCOL);
        world.invalidate(&Invalidation::Everything);
        world.put(7, [192, 168, 0, 7]);
        world.settle();
        let there = world.kernel.snapshot(&world.engine.footprint).unwrap();
        let key = Key::Route(dst(7));
        assert!(there.get(&key) == Some(&route.into()) && !there.is_inexact(&key), "{there:?}");
        assert_eq!(world.engine.status().repaired, 0);
    }

    #[test]
    fn what_leases_brought_needs_no_look_at_the_kernel() {
        let mut world = World::settled(2..5);
        world.invalidate(&Invalidation::Everything);
        world.put(3, [203, 0, 113, 3]);
        world.settle_as_far_as(false);
        let gateway = |via| match via {
            Some(Via::Gateway { gateway, .. }) => gateway,
            Some(Via::Nexthop(id)) => match world.kernel.state().get(&Key::Nexthop(id)) {
                Some(Object::Nexthop(nexthop)) => nexthop.gateway,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        assert_eq!(gateway(world.route(3)), IpAddr::from([203, 0, 113, 3]));
    }

    #[test]
    fn what_is_in_doubt_is_put_blindly_where_the_kernel_cannot_be_read() {
        let mut world = World::settled(2..5);
        world.kernel.foreign_delete(Key::Route(dst(3)));
        world.kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        world.invalidate(&Invalidation::Objects(
            vec![KernelEvent::Deleted(Key::Route(dst(3)))],
            None,
        ));
        world.invalidate(&Invalidation::Everything);
        world.settle_as_far_as(true);
        assert!(world.engine.is_unreadable() && world.route(3).is_some());
    }

    #[test]
    fn of_each_object_of_many_new_peers_it_is_counted_how_long_it_took() {
        const { assert!(250 > SLICE, "they are put in several slices") };
        let world = World::settled(2..252);
        assert_eq!(world.engine.status().latency.count(), 2 * 250);
    }

    #[test]
    fn a_second_entry_is_ours_to_remove_and_of_ipv6_the_kernel_may_have_replaced_the_wrong_one() {
        let cases = [
            ("10.1.0.0/16", "10.1.3.0/24", ROUTE_PROTOCOL, true),
            ("10.1.0.0/16", "10.1.3.0/24", 186, false),
            ("fd01::/48", "fd01:0:0:3::/64", ROUTE_PROTOCOL, true),
            ("fd01::/48", "fd01:0:0:3::/64", 186, true),
        ];
        for (network, dst, protocol, unread) in cases {
            let (mut world, dst) = (World::of(network.parse().unwrap()), dst.parse().unwrap());
            let public: [IpAddr; 2] = [[198, 51, 100, 3].into(), "2001:db8::3".parse().unwrap()];
            let attrs =
                LeaseAttrs { public: public.into_iter().collect(), ..LeaseAttrs::default() };
            let subnets = Subnets::new([dst]).unwrap();
            world.leases.insert(Lease { subnets, attrs, ..lease(3, [198, 51, 100, 3]) });
            world.view();
            world.settle();
            let by = Some(changed_by(protocol));
            let double = Route { dst, via: Via::Link(uplink()), mtu: None };
            world.invalidate(&Invalidation::Objects(
                vec![KernelEvent::Duplicate(double.into())],
                by,
            ));
            assert_eq!(world.engine.is_unread(), unread, "{dst} of protocol {protocol}");
            assert!(world.engine.is_unsettled(), "ours is put again");
        }
    }

    /// What leases brought comes before what is in doubt, but no route before what it goes by.
    #[test]
    fn a_route_that_leases_changed_comes_first_and_takes_its_nexthop_object_along() {
        let mut world = World::settled(2..200);
        let nexthop = |world: &World, n| match world.route(n) {
            Some(Via::Nexthop(id)) => Key::Nexthop(id),
            other => panic!("{other:?}: {:#?}", world.kernel.dump()),
        };
        let nexthops: Vec<Key> = (2..200).map(|n| nexthop(&world, n)).collect();
        for (n, key) in (2..200).zip(&nexthops) {
            world.kernel.foreign_delete(*key);
            let reason =
                if n == 199 { Cause::Lease(None) } else { Cause::Repair(Damage::Deletion) };
            world.engine.put.insert(*key, Cause::Repair(Damage::Deletion));
            world.engine.put.insert(Key::Route(dst(n)), reason);
        }
        world.kernel.take_calls();
        world.settle();
        let calls = world.kernel.take_calls();
        let keys: Vec<_> = calls.into_iter().filter_map(|call| call.key).collect();
        let (last, others) = nexthops.split_last().unwrap();
        let routes = (2..199).map(|n| Key::Route(dst(n)));
        let expected =
            [*last, Key::Route(dst(199))].into_iter().chain(others.iter().copied()).chain(routes);
        assert_eq!(keys, expected.collect::<Vec<_>>());
        assert!(world.engine.stats.failing().is_empty());
    }

    #[test]
    fn whom_to_suspect_of_additions_is_remembered_for_so_many_beside_what_is_wanted() {
        let mut world = World::settled(2..5);
        let by = || Some(changed_by(ROUTE_PROTOCOL));
        world.invalidate(&Invalidation::Objects(
            vec![KernelEvent::Deleted(Key::Route(dst(3)))],
            by(),
        ));
        let addition = |n: u16| {
            let [high, low] = n.to_be_bytes();
            let dst = Subnet::host([10, 1, 100 + high, low].into());
            KernelEvent::Present(Route { dst, ..by_gateway(0, [192, 0, 2, 9].into()) }.into())
        };
        world.invalidate(&Invalidation::Objects((0..2000).map(addition).collect(), by()));
        assert_eq!(world.engine.suspects.len(), 1024 + 1);
    }

    #[test]
    fn whoever_damaged_what_a_lease_then_changed_is_not_named_for_later_damage() {
        let mut world = World::settled(2..5);
        let gone = |by| Invalidation::Objects(vec![KernelEvent::Deleted(Key::Route(dst(3)))], by);
        world.put(3, [10, 9, 0, 3]);
        world.invalidate(&gone(Some(ChangedBy::new(7))));
        world.settle();
        assert_eq!(world.engine.status().repaired, 0, "the lease is why it was put");
        world.invalidate(&gone(None));
        world.settle();
        let status = world.engine.status();
        let repairs: Vec<_> =
            status.last_repairs.iter().map(|repair| repair.changed_by.clone()).collect();
        assert_eq!(repairs, [None]);
    }

    #[test]
    fn only_a_snapshot_tells_what_of_ours_came_besides_ours() {
        let mut world = World::settled(2..5);
        let reads = |world: &World| world.engine.reads.done;
        let before = reads(&world);
        let stranger = by_gateway(3, [192, 0, 2, 99].into());
        for (protocol, is_read) in [(4, false), (ROUTE_PROTOCOL, true)] {
            let mut by = ChangedBy::new(7);
            by.protocol = Some(protocol);
            world.invalidate(&Invalidation::Objects(
                vec![KernelEvent::Duplicate(stranger.into())],
                Some(by),
            ));
            world.kernel.take_calls();
            world.settle();
            let calls = world.kernel.take_calls();
            // What is not ours to remove may still stand before ours.
            let is_put = calls.iter().any(|call| call.key == Some(Key::Route(dst(3))));
            assert_eq!(
                (is_put, reads(&world)),
                (!is_read, before + u64::from(is_read)),
                "{protocol}: {calls:?}"
            );
        }
    }

    #[test]
    fn a_peer_that_needs_no_gateway_any_more_has_a_route_of_its_own() {
        let mut world = World::settled(2..5);
        assert!(matches!(world.route(3), Some(Via::Nexthop(_))));
        world.put(3, [10, 9, 0, 3]);
        world.settle();
        assert_eq!((world.route(3), world.kernel.state().len()), (Some(Via::Link(uplink())), 5));
        assert_eq!(world.standings(3), [ObjectState::InPlace]);
        // A route that needs no nexthop object gets no id when it changes.
        world.put(3, [10, 9, 0, 4]);
        world.settle();
        assert_eq!(world.engine.ids.as_ref().unwrap().of(&Key::Route(dst(3))), None);
        world.put(3, [198, 51, 100, 3]);
        world.settle();
        assert!(matches!(world.route(3), Some(Via::Nexthop(_))));
        assert_eq!((world.kernel.state().len(), world.engine.status().objects), (6, 6));
    }

    #[test]
    fn a_peer_that_was_gone_before_we_deleted_it_gives_its_id_back() {
        let mut world = World::settled(2..5);
        let Some(Via::Nexthop(id)) = world.route(3) else { panic!("{:#?}", world.kernel.dump()) };
        world.leases.remove(&Subnets::new([dst(3)]).unwrap());
        world.view();
        world.kernel.foreign_delete(Key::Nexthop(id));
        world.invalidate(&Invalidation::Everything);
        world.settle();
        assert_eq!(world.engine.ids.as_ref().unwrap().dst(id), None);
    }

    #[test]
    fn a_new_peer_of_whom_something_is_there_is_no_repair() {
        let mut world = World::settled(2..5);
        world.kernel.foreign_put(by_gateway(7, [192, 0, 2, 9].into()), ROUTE_PROTOCOL);
        world.invalidate(&Invalidation::Everything);
        world.put(7, [198, 51, 100, 7]);
        world.put(8, [198, 51, 100, 8]);
        world.settle();
        assert!(matches!(world.route(7), Some(Via::Nexthop(_))));
        assert_eq!((world.kernel.state().len(), world.engine.status().repaired), (2 * 5, 0));
    }

    #[test]
    fn a_new_peer_that_an_earlier_one_keeps_out_before_its_turn_is_not_put() {
        let mut world = World::settled(2..5);
        world.put(7, [198, 51, 100, 7]);
        let subnets = Subnets::new(["10.1.6.0/23".parse::<Subnet>().unwrap()]).unwrap();
        world.leases.insert(Lease { subnets, since: Revision(0), ..lease(7, [198, 51, 100, 6]) });
        world.view();
        assert_eq!(world.waiting(), [(subnets, Wait::Turn)]);
        world.settle();
        assert_eq!((world.route(7), world.kernel.state().len()), (None, 2 * 4));
        assert_eq!(world.standings(7).len(), 2);
    }

    #[test]
    fn many_that_leave_at_once_are_gone_at_once() {
        let mut world = World::settled(2..100);
        (10..100).for_each(|n| drop(world.leases.remove(&Subnets::new([dst(n)]).unwrap())));
        world.view();
        world.settle();
        assert_eq!((world.kernel.state().len(), world.engine.status().peers), (2 * 8, 8));
    }

    #[test]
    fn the_status_says_that_leases_are_live_what_is_worth_knowing_and_why_the_kernel_cannot_be_read()
     {
        let mut world = World::settled(2..5);
        world.put(7, [198, 51, 100, 2]);
        world.settle();
        let status = world.engine.status();
        assert!(status.live && status.in_sync && status.kernel_error.is_none(), "{status:#?}");
        let remarks: Vec<_> = status.remarks.keys().collect();
        assert_eq!(remarks, ["2 nodes share the public address 198.51.100.2"]);
        world.kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        world.invalidate(&Invalidation::Everything);
        world.settle_as_far_as(true);
        let status = world.engine.status();
        assert!(!status.in_sync && !status.settled, "{status:#?}");
        assert_eq!(status.kernel_error.map(|error| error.errno), Some(105));
    }

    /// The route of the peer 3 is damaged, the peer 4 leaves, the peer 7 comes, and the kernel may not be read.
    fn unread(invalidation: &Invalidation) -> World {
        let mut world = World::settled(2..5);
        world.invalidate(invalidation);
        assert!(world.engine.is_unread());
        world.kernel.foreign_delete(Key::Route(dst(3)));
        world.invalidate(&Invalidation::Objects(
            vec![KernelEvent::Deleted(Key::Route(dst(3)))],
            None,
        ));
        world.leases.remove(&Subnets::new([dst(4)]).unwrap());
        world.put(7, [198, 51, 100, 7]);
        world.kernel.take_calls();
        world.settle_as_far_as(false);
        let calls = world.kernel.take_calls();
        assert!(calls.iter().all(|call| call.operation != Operation::Snapshot), "{calls:?}");
        assert!(world.engine.is_unread() && world.route(7).is_some(), "{:#?}", world.kernel.dump());
        world
    }

    #[test]
    fn where_only_additions_are_in_doubt_all_is_done_without_a_look_at_the_kernel() {
        let stray = by_gateway(99, [192, 0, 2, 9].into());
        let by = Some(changed_by(ROUTE_PROTOCOL));
        let world = unread(&Invalidation::Objects(vec![KernelEvent::Present(stray.into())], by));
        assert!(world.route(3).is_some() && world.route(4).is_none(), "{:#?}", world.kernel.dump());
    }

    #[test]
    fn where_everything_is_in_doubt_only_what_leases_brought_is_put_without_a_look_at_the_kernel() {
        let mut world = unread(&Invalidation::Everything);
        assert!(world.route(3).is_none() && world.route(4).is_some(), "{:#?}", world.kernel.dump());
        world.settle();
        assert!(world.route(3).is_some() && world.route(4).is_none(), "{:#?}", world.kernel.dump());
    }

    #[test]
    fn of_blackholes_only_the_wanted_ones_are_there() {
        let mut world = World::new();
        let last_resort = |n| Route { dst: dst(n), via: Via::LastResort, mtu: None };
        world.kernel.foreign_put(last_resort(9), ROUTE_PROTOCOL);
        world.engine.want_blackholes([last_resort(1).into()].into_iter());
        world.view();
        world.settle();
        assert_eq!((world.route(1), world.kernel.state().len()), (Some(Via::LastResort), 1));
    }

    #[test]
    fn a_closed_gate_lets_nothing_through() {
        let mut world = World::settled(2..3);
        let gate = Gate::default();
        gate.close();
        world.put(3, [198, 51, 100, 3]);
        world.kernel.take_calls();
        assert!(world.engine.settle(&world.kernel, &gate, true).is_err());
        assert_eq!((world.kernel.take_calls(), world.route(3)), (vec![], None));
    }
}
