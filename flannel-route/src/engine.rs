//! The engine: makes the kernel equal to the desired objects, from any state that it finds.
//!
//! An object without a row in the [table](table::Table) is assumed to be in the kernel as desired.
//! An event from the kernel only invalidates objects. Single invalid objects are put again. If the
//! event does not name them, a snapshot is read. The engine has no task: the
//! [driver](crate::driver) calls it.

mod ahead;
mod desired;
mod invalidate;
mod new_peers;
mod queue;
mod report;
mod survey;
mod table;
mod write;

use tokio::time::Instant;

use self::desired::Desired;
use self::queue::{Queue, SLICE};
pub(crate) use self::survey::{Reads, Survey};
use self::table::{Actual, Cause, Row, Table};
pub(crate) use self::write::BATCH;
use crate::admission::{
    Admission, Changed, Delta, Handshakes, PathMtus, RouteLookups, StaleLookups,
};
use crate::apply_stats::ApplyStats;
use crate::nexthops::{Translated, translate, uses_nexthop};
use flannel_core::Kernel;
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseSet, Origin, View};
use flannel_core::object::{Key, Object, ObjectSet};

/// The inputs of the engine, besides the kernel.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) view: View,
    pub(crate) mtus: PathMtus,
    pub(crate) handshakes: Handshakes,
}

pub(crate) struct Engine {
    footprint: Footprint,
    desired: Desired,
    pub(crate) table: Table,
    queue: Queue,
    leases: LeaseSet,
    /// Whether the leases are complete and come from the store. Only then are objects deleted.
    live: bool,
    pub(crate) stale_lookups: StaleLookups,
    pub(crate) survey: Survey,
    stats: ApplyStats,
    /// Whether the last round ended although changes were due.
    unfinished: bool,
}

impl Engine {
    pub(crate) fn new(footprint: Footprint, base: ObjectSet, peers: Admission) -> Self {
        Self {
            footprint,
            desired: Desired::new(base, peers),
            table: Table::default(),
            queue: Queue::default(),
            leases: LeaseSet::default(),
            live: false,
            stale_lookups: StaleLookups::default(),
            survey: Survey::default(),
            stats: ApplyStats::default(),
            unfinished: false,
        }
    }

    /// Adds blackholes to the node's own objects, before the first round.
    pub(crate) fn want_blackholes(&mut self, objects: impl Iterator<Item = Object>) {
        self.footprint.blackholes = true;
        self.desired.base.extend(objects);
    }

    /// Takes in newer inputs, which arrived at `arrived`. New leases in large numbers are queued.
    pub(crate) fn view(&mut self, inputs: &Inputs, arrived: Instant, kernel: &dyn Kernel) {
        let Inputs { view, mtus, handshakes } = inputs;
        let more = view.leases.len().saturating_sub(self.leases.len());
        self.desired.peers.make_room(more);
        let leases = std::mem::replace(&mut self.leases, view.leases.clone());
        self.live = matches!(view.origin, Origin::Live { .. });
        self.queue.outdate();
        let mut changes: Vec<_> = view.leases.changes_since(&leases).collect();
        if changes.len() > SLICE {
            let peers = &self.desired.peers;
            let new = changes.extract_if(.., |(subnets, _)| !peers.contains(subnets));
            self.queue.extend(new.filter_map(|(_, lease)| lease.cloned()), arrived);
        }
        let mut again = self.desired.peers.set_path_mtus(mtus);
        again.extend(self.desired.peers.set_handshakes(handshakes));
        for subnets in again {
            changes.extend(view.leases.get(&subnets).map(|lease| (subnets, Some(lease))));
        }
        let lookups = RouteLookups::new(kernel);
        let changed = self.desired.update(changes.into_iter(), &lookups);
        self.stale_lookups.note(lookups);
        self.take_all(changed, Some(arrived), |_, _| false);
    }

    /// Repeats the stale lookups, and plans the peers again whose plans got another result.
    pub(crate) fn recheck_lookups(&mut self, kernel: &dyn Kernel) {
        let lookups = RouteLookups::new(kernel);
        for scope in self.stale_lookups.take() {
            let leases = self.desired.peers.recheck(scope, &|address| lookups.on_link(address));
            let changes = leases.iter().map(|lease| (lease.subnets, Some(lease)));
            let changed = self.desired.update(changes, &lookups);
            self.take_all(changed, None, |_, _| false);
        }
        self.stale_lookups.note(lookups);
    }

    /// Whether there is work for [`Engine::settle`].
    pub(crate) fn is_unsettled(&self) -> bool {
        self.survey.is_unread()
            || self.has_puts()
            || self.has_queue()
            || (self.live && self.table.has_deletions())
    }

    pub(crate) fn has_queue(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether the last round ended before all work was done. Leases in the queue count only after
    /// the first snapshot.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.unfinished || (self.has_queue() && self.survey.reads.done > 0)
    }

    /// Takes in changed definitions. An object of a new peer gets a row, unless `is_there` returns
    /// true for it.
    fn take_all(
        &mut self,
        changed: Changed,
        arrived: Option<Instant>,
        is_there: impl Fn(&Key, &Object) -> bool,
    ) {
        self.take_deltas(changed.deltas, arrived);
        let desired = &self.desired;
        let table = &mut self.table;
        for id in changed.added {
            desired.expand(desired.peers.objects_of(id), |object| {
                let key = object.key();
                if !is_there(&key, &object) {
                    table.forget_failure(&key);
                    table.insert(key, Row::new(Actual::Unknown, Cause::Lease(arrived)));
                }
            });
        }
    }

    fn take_deltas(&mut self, deltas: Vec<Delta>, arrived: Option<Instant>) {
        for Delta { key, before, after } in deltas {
            let old = self.desired.id_of(&key);
            let new = match (&mut self.desired.ids, key) {
                (Some(ids), Key::Route(dst)) if after.as_ref().is_some_and(uses_nexthop) => {
                    ids.assign(dst)
                }
                _ => old,
            };
            let before = before.map(|object| translate(&object, old));
            let after = after.map(|object| translate(&object, new));
            if let Some(id) = new {
                let before = before.as_ref().and_then(Translated::nexthop);
                let after = after.as_ref().and_then(Translated::nexthop);
                self.replace(Key::Nexthop(id), before, after, arrived);
            }
            let before = before.map(|translated| translated.object);
            let after = after.map(|translated| translated.object);
            self.replace(key, before, after, arrived);
        }
    }

    /// Takes in a changed definition of one object.
    fn replace(
        &mut self,
        key: Key,
        before: Option<Object>,
        after: Option<Object>,
        arrived: Option<Instant>,
    ) {
        if after.is_some() {
            *self.desired.counts.entry(key.kind()).or_default() += 1;
        }
        if before.is_some() {
            *self.desired.counts.entry(key.kind()).or_default() -= 1;
        }
        let cause = Cause::Lease(arrived);
        match (before, after) {
            (before, after) if before == after => {}
            (_, Some(_)) => self.table.insert(key, Row::new(Actual::Unknown, cause)),
            // It was not put, so an object in the kernel with this key is not ours.
            (Some(before), None) if !self.owns(&before) => drop(self.table.forget(&key)),
            (Some(before), None) => {
                // The kernel may have an earlier form of an object whose change it refused.
                if self.table.forget(&key).is_some_and(|row| row.is_refused()) {
                    self.survey.invalidate_additions();
                }
                self.table.insert(key, Row::new(Actual::Present(before), cause));
            }
            (None, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::{AdmissionRules, BackendPlan};
    use crate::gated_kernel::GatedKernel;
    use crate::record_keepers::WithRecordKeepers;
    use flannel_core::backend::Env;
    use flannel_core::kernel::{
        ChangedBy, Changes, Invalidation, KernelError, KernelEvent, Outcome, ROUTE_PROTOCOL,
        RecordKeeper,
    };
    use flannel_core::lease::{LeaseAttrs, Offer, Revision};
    use flannel_core::object::{
        Addr, Change, Ipip, Link, LinkKind, LinkName, Neigh, Nexthop, Record, Route, Via,
    };
    use flannel_core::status::{Damage, ObjectState, Wait};
    use flannel_core::testing::{FakeKernel, Operation};
    use flannel_core::{Lease, Subnet, Subnets};
    use std::collections::BTreeMap;
    use std::net::IpAddr;
    use std::sync::{Arc, Mutex};

    fn changed_by(protocol: u8) -> ChangedBy {
        let mut changed_by = ChangedBy::new(7);
        changed_by.protocol = Some(protocol);
        changed_by
    }

    fn gated(kernel: &FakeKernel, keeper: &Notes) -> GatedKernel {
        let keeper: Arc<dyn RecordKeeper> = Arc::new(keeper.clone());
        GatedKernel::new(Arc::new(WithRecordKeepers::new(Arc::new(kernel.clone()), [keeper])))
    }

    /// A record keeper whose changes end at once.
    #[derive(Debug, Clone, Default)]
    struct Notes(Arc<Mutex<Noted>>);

    #[derive(Debug, Default)]
    struct Noted {
        records: BTreeMap<Key, Record>,
        /// The keys in the order in which they were put.
        puts: Vec<Key>,
    }

    impl Notes {
        fn put(&self, record: &Record) {
            let changes = [Change::Put(record.clone().into())];
            assert_eq!(self.apply(&changes), [Outcome::Done]);
        }

        fn take_puts(&self) -> Vec<Key> {
            std::mem::take(&mut self.0.lock().unwrap().puts)
        }
    }

    impl RecordKeeper for Notes {
        fn name(&self) -> &'static str {
            "notes"
        }

        fn records(&self) -> Result<Vec<Record>, KernelError> {
            Ok(self.0.lock().unwrap().records.values().cloned().collect())
        }

        fn apply(&self, changes: &[Change]) -> Vec<Outcome> {
            let mut noted = self.0.lock().unwrap();
            let mut apply = |change: &Change| {
                let key = change.object().key();
                match change {
                    Change::Put(Object::Record(record)) => {
                        noted.records.insert(key, record.clone());
                        noted.puts.push(key);
                    }
                    _ => drop(noted.records.remove(&key)),
                }
                Outcome::Done
            };
            changes.iter().map(&mut apply).collect()
        }

        fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
            Err(KernelError::new(95))
        }
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
        let attrs = LeaseAttrs::from(Offer::new([public.into()].into_iter().collect()));
        let subnets = Subnets::new([dst(n)]).unwrap();
        Lease {
            subnets,
            attrs,
            expires: None,
            since: Revision(1),
            revision: Revision(u64::from(public[3])),
        }
    }

    /// Peers with routes on the uplink: by a gateway, or for a private public address without one
    /// and with an MTU.
    struct World {
        kernel: FakeKernel,
        notes: Notes,
        engine: Engine,
        leases: LeaseSet,
        mtus: PathMtus,
    }

    impl World {
        fn new() -> Self {
            Self::of("10.1.0.0/16".parse().unwrap())
        }

        fn of(network: Subnet) -> Self {
            Self::with(network, ObjectSet::default(), |_| None)
        }

        /// A world with objects of the node, and in which peers may have another object too.
        fn with(network: Subnet, base: ObjectSet, more: fn(Subnet) -> Option<Object>) -> Self {
            let rules = AdmissionRules {
                networks: [network].into_iter().collect(),
                ..AdmissionRules::default()
            };
            let plan =
                move |subnets: &Subnets, offer: &Offer, _: &Env<'_>, objects: &mut Vec<Object>| {
                    for peer in offer.endpoints(subnets) {
                        let dst = peer.subnet;
                        let link = uplink();
                        let route = match peer.public.unwrap() {
                            IpAddr::V4(public) if public.is_private() => Route {
                                dst,
                                via: Via::Link(link),
                                mtu: Some(1400 + u16::from(public.octets()[3])),
                            },
                            gateway => Route {
                                dst,
                                via: Via::Gateway { gateway, link, onlink: true },
                                mtu: None,
                            },
                        };
                        objects.push(route.into());
                        objects.extend(more(dst));
                    }
                    Ok(())
                };
            let footprint = Footprint {
                links: ["flannel.1".parse().unwrap()].into(),
                networks: vec![network],
                routes_on: [uplink()].into(),
                ..Footprint::default()
            };
            let peers = Admission::new(rules, vec![BackendPlan::new(None, Box::new(plan))]);
            let kernel = FakeKernel::with_uplink("eth0");
            let engine = Engine::new(footprint, base, peers);
            Self {
                kernel,
                notes: Notes::default(),
                engine,
                leases: LeaseSet::default(),
                mtus: PathMtus::default(),
            }
        }

        /// A world with these peers, all in place.
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
            self.view_from(Origin::Live { revision: Revision(1) });
        }

        fn view_from(&mut self, origin: Origin) {
            let view = View { leases: self.leases.clone(), origin };
            let mtus = self.mtus.clone();
            let handshakes = Handshakes::default();
            let inputs = Inputs { view, mtus, handshakes };
            self.engine.view(&inputs, Instant::now(), &self.kernel);
        }

        fn settle(&mut self) {
            self.settle_as_far_as(true);
            // A round may end before all work is done.
            while self.engine.is_unfinished() {
                self.settle_as_far_as(true);
            }
            assert!(!self.engine.is_unsettled());
        }

        fn settle_as_far_as(&mut self, may_read: bool) {
            self.engine.settle(&gated(&self.kernel, &self.notes), may_read).unwrap();
        }

        fn invalidate(&mut self, invalidation: &Invalidation) {
            self.engine.invalidate(invalidation, Some(&self.kernel));
        }

        fn route(&self, n: u8) -> Option<Via> {
            match self.kernel.state().get(&Key::Route(dst(n)))? {
                Object::Route(route) => Some(route.via),
                other => panic!("{other}"),
            }
        }

        /// The peers that wait, with the reasons.
        fn waiting(&self) -> Vec<(Subnets, Wait)> {
            self.engine.waiting().peers.into_iter().collect()
        }

        /// The states of a peer's objects.
        fn standings(&self, n: u8) -> Vec<ObjectState> {
            let explained = self.engine.explain(dst(n).base(), &self.kernel).unwrap();
            explained.objects.into_iter().map(|(_, standing)| standing).collect()
        }
    }

    #[test]
    fn only_new_and_invalid_objects_are_pending() {
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

    fn record(subnet: Subnet) -> Record {
        Record::new("notes", subnet, "a record")
    }

    /// A world whose peers have records, and whose node has one that refuses what belongs to no
    /// peer. By its key it comes before theirs.
    fn world_with_end() -> (World, Record) {
        let network = "10.1.0.0/16".parse().unwrap();
        let end = record("10.0.0.1/32".parse().unwrap()).put_last();
        let base = [end.clone()].into_iter().collect();
        let mut world = World::with(network, base, |subnet| Some(record(subnet).into()));
        world.engine.footprint.record_keepers.insert("notes");
        (world, end)
    }

    #[test]
    fn what_refuses_others_comes_after_all_peers_of_complete_leases() {
        for peers in [3, SLICE as u8 + 9] {
            let (mut world, end) = world_with_end();
            let end = Object::from(end).key();
            (2..2 + peers).for_each(|n| world.leases.insert(lease(n, [198, 51, 100, n])));
            world.view_from(Origin::Cached { written: None });
            world.settle();
            let puts = world.notes.take_puts();
            assert_eq!((puts.len(), puts.contains(&end)), (usize::from(peers), false));
            let status = world.engine.status();
            assert!(status.settled && status.own_in_place && !status.in_sync, "{status:#?}");
            // More peers come with the complete leases.
            let more = 2 + peers..2 + 2 * peers;
            more.for_each(|n| world.leases.insert(lease(n, [198, 51, 100, n])));
            world.view();
            assert!(!world.engine.status().settled);
            world.settle();
            let puts = world.notes.take_puts();
            assert_eq!((puts.len(), puts.last()), (usize::from(peers) + 1, Some(&end)));
            assert!(world.engine.status().in_sync);
            // All is lost, and repaired.
            world.notes.0.lock().unwrap().records.clear();
            world.invalidate(&Invalidation::Everything);
            world.settle();
            let puts = world.notes.take_puts();
            assert_eq!((puts.len(), puts.last()), (2 * usize::from(peers) + 1, Some(&end)));
        }
    }

    /// The next daemon takes over what is there, with the peers that it knows.
    #[test]
    fn what_refuses_others_stays_without_complete_leases() {
        let (mut world, end) = world_with_end();
        world.notes.put(&end);
        world.notes.take_puts();
        world.leases.insert(lease(2, [198, 51, 100, 2]));
        world.view_from(Origin::Cached { written: None });
        world.settle();
        assert_eq!(world.notes.take_puts().len(), 1);
        assert!(world.notes.records().unwrap().contains(&end));
    }

    /// What refused others in the earlier run has another address or other data: it would refuse
    /// the packets of all peers until the leases are complete.
    #[test]
    fn what_refused_others_in_another_way_goes_before_the_leases_are_complete() {
        let (_, end) = world_with_end();
        let other_data = Record::new("notes", end.subnet, "another port").put_last();
        let other_address = record("10.0.0.9/32".parse().unwrap()).put_last();
        for stale in [other_data, other_address] {
            let (mut world, end) = world_with_end();
            world.notes.put(&stale);
            world.notes.take_puts();
            world.leases.insert(lease(2, [198, 51, 100, 2]));
            world.view_from(Origin::Cached { written: None });
            world.settle();
            let records = world.notes.records().unwrap();
            assert!(!records.contains(&stale) && !records.contains(&end), "{records:?}");
            assert_eq!(world.notes.take_puts().len(), 1);
            world.view();
            world.settle();
            assert_eq!(world.notes.take_puts(), [Object::from(end).key()]);
            assert!(world.engine.status().in_sync, "{:?}", world.engine.status());
        }
    }

    /// A neighbour on the uplink, which is not a device of the network.
    fn neighbour_on_uplink(subnet: Subnet) -> Neigh {
        Neigh { link: uplink(), address: subnet.base(), mac: "02:00:00:00:00:07".parse().unwrap() }
    }

    #[test]
    fn an_object_that_the_footprint_does_not_own_fails_and_is_not_put() {
        let base = [
            Addr { link: uplink(), address: [192, 0, 2, 1].into(), len: 32 }.into(),
            by_gateway(200, [192, 0, 2, 7].into()).into(),
            Route { dst: "10.9.0.0/24".parse().unwrap(), via: Via::Link(uplink()), mtu: None }
                .into(),
            Route { dst: dst(201), via: Via::Blackhole, mtu: None }.into(),
            Nexthop { id: 7, link: uplink(), gateway: [192, 0, 2, 7].into(), onlink: false }.into(),
            Object::from(Record::new("other", dst(1), "a record")),
        ];
        let refused =
            ["address 192.0.2.1/32", "route 10.9.", "route blackhole", "nexthop id 7", "record"];
        for peers in [3, SLICE as u8 + 9] {
            let network = "10.1.0.0/16".parse().unwrap();
            let more = |subnet| Some(neighbour_on_uplink(subnet).into());
            let mut world = World::with(network, base.iter().cloned().collect(), more);
            (2..2 + peers).for_each(|n| world.leases.insert(lease(n, [198, 51, 100, n])));
            world.view();
            world.settle();
            let status = world.engine.status();
            assert!(!status.in_sync && status.settled, "{status:#?}");
            assert_eq!(status.failing.len(), refused.len() + usize::from(peers));
            for (key, failure) in status.failing.iter() {
                let change = failure.change.to_string();
                let object = change.strip_prefix("put ").unwrap();
                let text = format!("the network's footprint does not own {object}");
                assert_eq!(failure.error.to_string(), text, "{key:?}");
                let is_expected = refused.iter().any(|refused| object.starts_with(refused));
                assert!(is_expected || object.starts_with("neigh "), "{object}");
            }
            let there = world.kernel.state();
            assert!(there.get(&Key::Route(dst(200))).is_some(), "it is inside the pod network");
            assert!(there.iter().all(|object| status.failing.get(&object.key()).is_none()));
        }
    }

    /// It was not put, so the one in the kernel is another program's.
    #[test]
    fn an_object_that_the_footprint_does_not_own_is_not_deleted() {
        let network = "10.1.0.0/16".parse().unwrap();
        let more = |subnet| Some(neighbour_on_uplink(subnet).into());
        for is_tried in [true, false] {
            let mut world = World::with(network, ObjectSet::default(), more);
            let theirs = Object::from(neighbour_on_uplink(dst(3)));
            world.kernel.foreign_put(theirs.clone(), ROUTE_PROTOCOL);
            world.put(3, [198, 51, 100, 3]);
            if is_tried {
                world.settle();
            }
            world.leases = LeaseSet::default();
            world.view();
            world.settle();
            assert_eq!(world.kernel.state().get(&theirs.key()), Some(&theirs));
            let status = world.engine.status();
            assert!(status.in_sync && status.failing.is_empty(), "{status:#?}");
        }
    }

    #[test]
    fn a_link_that_the_footprint_does_not_own_fails_once() {
        let network = "10.1.0.0/16".parse().unwrap();
        let device = |name: &str| {
            let kind = LinkKind::Ipip(Ipip { local: [192, 0, 2, 1].into() });
            Object::from(Link { name: name.parse().unwrap(), mtu: 1480, up: true, kind })
        };
        let base = ["flannel.1", "flannel.2"].into_iter().map(device).collect();
        let mut world = World::with(network, base, |_| None);
        world.put(3, [198, 51, 100, 3]);
        world.settle();
        let status = world.engine.status();
        let failing: Vec<String> =
            status.failing.iter().map(|(_, failure)| failure.error.to_string()).collect();
        let [text] = &failing[..] else { panic!("{failing:?}") };
        assert!(text.starts_with("the network's footprint does not own link flannel.2"), "{text}");
        assert!(world.kernel.state().get(&Key::Link("flannel.1".parse().unwrap())).is_some());
        assert!(world.route(3).is_some());
    }

    #[test]
    fn a_change_of_a_foreign_link_invalidates_nothing() {
        let lookups = |world: &World| {
            (world.engine.stale_lookups.is_any(), world.engine.stale_lookups.is_urgent())
        };
        for (link, unread, stale) in
            [("cali1", false, false), ("flannel.1", true, false), ("eth0", true, true)]
        {
            let mut world = World::settled(2..5);
            assert_eq!((world.engine.survey.is_unread(), lookups(&world)), (false, (false, false)));
            world.invalidate(&Invalidation::Link(link.parse().unwrap()));
            assert_eq!(
                (world.engine.survey.is_unread(), lookups(&world)),
                (unread, (stale, stale)),
                "{link}"
            );
        }
    }

    #[test]
    fn an_inexact_object_of_a_new_peer_is_put_without_a_repair() {
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
    fn changes_of_leases_need_no_snapshot() {
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
    fn invalid_objects_are_put_if_the_kernel_cannot_be_read() {
        let mut world = World::settled(2..5);
        world.kernel.foreign_delete(Key::Route(dst(3)));
        world.kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        world.invalidate(&Invalidation::Objects(
            vec![KernelEvent::Deleted(Key::Route(dst(3)))],
            None,
        ));
        world.invalidate(&Invalidation::Everything);
        world.settle_as_far_as(true);
        assert!(world.engine.survey.error.is_some() && world.route(3).is_some());
    }

    #[test]
    fn each_object_of_many_new_peers_is_in_the_latency_histogram() {
        const { assert!(250 > SLICE, "they are put in several slices") };
        let world = World::settled(2..252);
        assert_eq!(world.engine.status().latency.count(), 2 * 250);
    }

    #[test]
    fn a_duplicate_of_ours_is_removed_and_an_ipv6_route_put_again() {
        let cases = [
            ("10.1.0.0/16", "10.1.3.0/24", ROUTE_PROTOCOL, true),
            ("10.1.0.0/16", "10.1.3.0/24", 186, false),
            ("fd01::/48", "fd01:0:0:3::/64", ROUTE_PROTOCOL, true),
            ("fd01::/48", "fd01:0:0:3::/64", 186, true),
        ];
        for (network, dst, protocol, unread) in cases {
            let mut world = World::of(network.parse().unwrap());
            let dst = dst.parse().unwrap();
            let public: [IpAddr; 2] = [[198, 51, 100, 3].into(), "2001:db8::3".parse().unwrap()];
            let attrs = LeaseAttrs::from(Offer::new(public.into_iter().collect()));
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
            assert_eq!(world.engine.survey.is_unread(), unread, "{dst} of protocol {protocol}");
            let is_put = world.engine.table.is_put(&Key::Route(dst));
            assert_eq!(is_put, unread, "{dst} of protocol {protocol}");
        }
    }

    /// Changes of leases come before repairs, but no route comes before its nexthop object.
    #[test]
    fn a_route_that_a_lease_changed_is_put_first_with_its_nexthop_object() {
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
            let row = |cause| Row::new(Actual::Unknown, cause);
            world.engine.table.insert(*key, row(Cause::Repair(Damage::Deletion)));
            world.engine.table.insert(Key::Route(dst(n)), row(reason));
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
        assert!(world.engine.table.failures().is_empty());
    }

    #[test]
    fn the_authors_of_additions_are_remembered_up_to_a_limit() {
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
        assert_eq!(world.engine.table.rows().len(), 1024 + 1);
    }

    #[test]
    fn the_author_of_earlier_damage_is_not_named_after_a_lease_changed() {
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
    fn only_a_snapshot_finds_additional_objects_of_ours() {
        let mut world = World::settled(2..5);
        let reads = |world: &World| world.engine.survey.reads.done;
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
            // A foreign route is behind ours and stays.
            let is_put = calls.iter().any(|call| call.key == Some(Key::Route(dst(3))));
            assert_eq!(
                (is_put, reads(&world)),
                (false, before + u64::from(is_read)),
                "{protocol}: {calls:?}"
            );
        }
    }

    #[test]
    fn an_added_route_on_our_device_is_found_wherever_it_leads() {
        for (link, unread) in [("flannel.1", true), ("eth0", false)] {
            let mut world = World::settled(2..5);
            let dst = "10.9.0.0/24".parse().unwrap();
            let via = Via::Link(link.parse().unwrap());
            let added = KernelEvent::Present(Route { dst, via, mtu: None }.into());
            world.invalidate(&Invalidation::Objects(vec![added], Some(changed_by(3))));
            assert_eq!(world.engine.survey.is_unread(), unread, "{link}");
        }
    }

    #[test]
    fn a_peer_without_a_gateway_gets_a_route_without_a_nexthop_object() {
        let mut world = World::settled(2..5);
        assert!(matches!(world.route(3), Some(Via::Nexthop(_))));
        world.put(3, [10, 9, 0, 3]);
        world.settle();
        assert_eq!((world.route(3), world.kernel.state().len()), (Some(Via::Link(uplink())), 5));
        assert_eq!(world.standings(3), [ObjectState::InPlace]);
        // A route that needs no nexthop object gets no id when it changes.
        world.put(3, [10, 9, 0, 4]);
        world.settle();
        assert_eq!(world.engine.desired.ids.as_ref().unwrap().of(&Key::Route(dst(3))), None);
        world.put(3, [198, 51, 100, 3]);
        world.settle();
        assert!(matches!(world.route(3), Some(Via::Nexthop(_))));
        assert_eq!((world.kernel.state().len(), world.engine.status().objects), (6, 6));
    }

    #[test]
    fn the_id_of_a_peer_is_released_if_its_objects_are_already_gone() {
        let mut world = World::settled(2..5);
        let Some(Via::Nexthop(id)) = world.route(3) else { panic!("{:#?}", world.kernel.dump()) };
        world.leases.remove(&Subnets::new([dst(3)]).unwrap());
        world.view();
        world.kernel.foreign_delete(Key::Nexthop(id));
        world.invalidate(&Invalidation::Everything);
        world.settle();
        assert_eq!(world.engine.desired.ids.as_ref().unwrap().dst(id), None);
    }

    #[test]
    fn a_new_peer_with_existing_objects_is_no_repair() {
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
    fn a_queued_peer_that_an_earlier_lease_excludes_is_not_put() {
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
    fn a_queued_peer_has_the_mtu_of_its_path() {
        let mut world = World::new();
        (2..2 + SLICE as u8 + 9).for_each(|n| world.leases.insert(lease(n, [198, 51, 100, n])));
        world.view();
        world.mtus = Arc::new([(dst(3), 1300)].into());
        world.view();
        world.settle();
        let mtus = [2, 3].map(|n| match world.kernel.state().get(&Key::Route(dst(n))) {
            Some(Object::Route(route)) => route.mtu,
            other => panic!("{other:?}"),
        });
        assert_eq!(mtus, [None, Some(1300)]);
    }

    #[test]
    fn many_peers_that_leave_together_are_deleted_in_one_round() {
        let mut world = World::settled(2..100);
        (10..100).for_each(|n| drop(world.leases.remove(&Subnets::new([dst(n)]).unwrap())));
        world.view();
        world.settle();
        assert_eq!((world.kernel.state().len(), world.engine.status().peers), (2 * 8, 8));
    }

    #[test]
    fn the_status_has_live_advisories_and_the_error_of_the_kernel() {
        let mut world = World::settled(2..5);
        world.put(7, [198, 51, 100, 2]);
        world.settle();
        let status = world.engine.status();
        assert!(status.live && status.in_sync && status.kernel_error.is_none(), "{status:#?}");
        let advisories: Vec<_> = status.advisories.keys().map(ToString::to_string).collect();
        assert_eq!(advisories, ["2 nodes share the public address 198.51.100.2"]);
        world.kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        world.invalidate(&Invalidation::Everything);
        world.settle_as_far_as(true);
        let status = world.engine.status();
        assert!(!status.in_sync && !status.settled, "{status:#?}");
        assert_eq!(status.kernel_error.and_then(|error| error.errno()), Some(105));
    }

    /// The route of the peer 3 is damaged, the peer 4 leaves, the peer 7 comes, and the kernel may
    /// not be read.
    fn unread(invalidation: &Invalidation) -> World {
        let mut world = World::settled(2..5);
        world.invalidate(invalidation);
        assert!(world.engine.survey.is_unread());
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
        assert!(
            world.engine.survey.is_unread() && world.route(7).is_some(),
            "{:#?}",
            world.kernel.dump()
        );
        world
    }

    #[test]
    fn unknown_additions_delay_no_change() {
        let stray = by_gateway(99, [192, 0, 2, 9].into());
        let by = Some(changed_by(ROUTE_PROTOCOL));
        let world = unread(&Invalidation::Objects(vec![KernelEvent::Present(stray.into())], by));
        assert!(world.route(3).is_some() && world.route(4).is_none(), "{:#?}", world.kernel.dump());
    }

    #[test]
    fn before_a_snapshot_only_changes_of_leases_are_put() {
        let mut world = unread(&Invalidation::Everything);
        assert!(world.route(3).is_none() && world.route(4).is_some(), "{:#?}", world.kernel.dump());
        world.settle();
        assert!(world.route(3).is_some() && world.route(4).is_none(), "{:#?}", world.kernel.dump());
    }

    #[test]
    fn undesired_blackholes_are_deleted() {
        let mut world = World::new();
        let last_resort = |n| Route { dst: dst(n), via: Via::LastResort, mtu: None };
        world.kernel.foreign_put(last_resort(9), ROUTE_PROTOCOL);
        world.engine.want_blackholes([last_resort(1).into()].into_iter());
        world.view();
        world.settle();
        assert_eq!((world.route(1), world.kernel.state().len()), (Some(Via::LastResort), 1));
    }

    #[test]
    fn a_closed_gate_applies_no_change() {
        let mut world = World::settled(2..3);
        let kernel = gated(&world.kernel, &world.notes);
        kernel.close();
        world.put(3, [198, 51, 100, 3]);
        world.kernel.take_calls();
        assert!(world.engine.settle(&kernel, true).is_err());
        assert_eq!((world.kernel.take_calls(), world.route(3)), (vec![], None));
    }
}
