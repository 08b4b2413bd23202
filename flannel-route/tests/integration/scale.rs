//! Costs: a change of one peer among many costs one peer, changes of foreign objects cost nothing,
//! and endless changes are rate-limited and do not delay other work.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use test_support::eventually_async;

use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::{Changes, Footprint, KernelError, NexthopIds, Outcome, RouteAnswer};
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Origin, Revision, View};
use flannel_core::network::NetworkHandle;
use flannel_core::object::{
    Addr, Change, Fdb, Key, Link, LinkName, MacAddr, Neigh, Nexthop, Object, ObjectKind, ObjectSet,
    Route, Via, Vxlan,
};
use flannel_core::status::{Damage, ObjectState, Rejection, Status, Wait, Waiting};
use flannel_core::testing::{Call, FakeKernel, FakeSubnets, Operation};
use flannel_core::{Kernel, Lease, Network, Subnet, Subnets};
use flannel_route::{EngineOptions, KernelNetwork};
use tokio::task::JoinHandle;

const NETWORK: &str = "10.0.0.0/8";

fn tunnel() -> LinkName {
    "flannel.1".parse().unwrap()
}

fn uplink() -> LinkName {
    "eth0".parse().unwrap()
}

fn subnet(n: u16) -> Subnet {
    let [high, low] = n.to_be_bytes();
    format!("10.{high}.{low}.0/24").parse().unwrap()
}

fn public(n: u16) -> IpAddr {
    let [high, low] = n.to_be_bytes();
    [198, 18 + (high >> 7), high, low].into()
}

fn key(n: u16) -> Subnets {
    Subnets::new([subnet(n)]).unwrap()
}

/// Neighbour, forwarding entry, nexthop and route.
fn objects(n: u16, public: IpAddr) -> [Object; 4] {
    let link = tunnel();
    let [high, low] = n.to_be_bytes();
    let gateway = subnet(n).base();
    let mac = MacAddr::local([2, 0, 0, 0, high, low]);
    let id = 1000 + u32::from(n);
    [
        Neigh { link, address: gateway, mac }.into(),
        Fdb { link, mac, dst: public }.into(),
        Nexthop { id, link, gateway, onlink: true }.into(),
        Route { dst: subnet(n), via: Via::Nexthop(id), mtu: None }.into(),
    ]
}

fn lease(n: u16, public: IpAddr, revision: u64) -> Lease {
    let attrs = LeaseAttrs::from(Offer::new([public].into_iter().collect()));
    Lease {
        subnets: key(n),
        attrs,
        expires: None,
        since: Revision(1),
        revision: Revision(revision),
    }
}

struct World {
    kernel: FakeKernel,
    subnets: FakeSubnets,
    view: View,
    handle: NetworkHandle,
    /// The number of calls of the plan.
    plans: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl World {
    /// A world with the peers 1 to `peers`, all in place.
    async fn new(peers: u16) -> Self {
        let kernel = FakeKernel::with_uplink("eth0");
        Self::on(Arc::new(kernel.clone()), kernel, peers).await
    }

    /// A world right after its start, whose network uses the kernel `seen`.
    async fn started(seen: Arc<dyn Kernel>, kernel: FakeKernel, peers: u16) -> Self {
        let subnets = FakeSubnets::new(NETWORK);
        let vxlan = Vxlan {
            vni: 1,
            port: 8472,
            mac: MacAddr::local([1; 6]),
            local: None,
            lower: Some(uplink()),
            learning: false,
            gbp: false,
        };
        let base: [Object; 2] = [
            Link { name: tunnel(), mtu: 1450, up: true, kind: vxlan.into() }.into(),
            Addr { link: tunnel(), address: subnet(0).base(), len: 32 }.into(),
        ];
        let plans = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&plans);
        let footprint = Footprint {
            links: [tunnel()].into(),
            networks: vec![NETWORK.parse().unwrap()],
            routes_on: [uplink()].into(),
            blackholes: true,
            ..Footprint::default()
        };
        let blueprint = Blueprint::new(1450, move |subnets, offer, env, out| {
            counter.fetch_add(1, Ordering::Relaxed);
            for peer in offer.endpoints(subnets) {
                let public = peer.public.expect("a public address");
                let _ = env.on_link(public);
                let octets: Vec<u8> = match peer.subnet.base() {
                    IpAddr::V4(base) => base.octets().into(),
                    IpAddr::V6(_) => panic!("no such peer"),
                };
                out.extend(objects(u16::from_be_bytes([octets[1], octets[2]]), public));
            }
            Ok(())
        })
        .with_footprint(footprint)
        .with_base(base.into_iter().collect::<ObjectSet>());
        let lease_of_this_node = NodeLease::Held(lease(0, [192, 0, 2, 1].into(), 1));
        let networks = [NETWORK.parse::<Subnet>().unwrap()].into_iter().collect();
        let network = KernelNetwork::new(seen, lease_of_this_node, networks, vec![blueprint])
            .with_options(EngineOptions::default().with_process_names(Arc::new(kernel.clone())));
        let handle = network.handle();
        let leases: LeaseSet = (1..=peers).map(|n| lease(n, public(n), 1)).collect();
        let view = View { leases, origin: Origin::Live { revision: Revision(1) } };
        subnets.set_view(view.clone());
        let views = flannel_core::SubnetManager::watch_leases(&subnets).await.unwrap();
        let task = tokio::spawn(async move { drop(Box::new(network).run(views).await) });
        Self { kernel, subnets, view, handle, plans, task }
    }

    /// A world in sync, whose network uses the kernel `seen`.
    async fn on(seen: Arc<dyn Kernel>, kernel: FakeKernel, peers: u16) -> Self {
        let world = Self::started(seen, kernel, peers).await;
        world.when(|status| status.in_sync && status.peers == usize::from(peers)).await;
        // The events of the first round are handled too.
        tokio::time::sleep(Duration::from_secs(2)).await;
        world.kernel.take_calls();
        world.plans.store(0, Ordering::Relaxed);
        world
    }

    async fn when(&self, wanted: impl FnMut(&Arc<Status>) -> bool) -> Arc<Status> {
        let mut status = self.handle.status.clone();
        let found = tokio::time::timeout(Duration::from_secs(100), status.wait_for(wanted)).await;
        let found = found.map(|found| found.unwrap().clone());
        found.unwrap_or_else(|_| panic!("never: {:#?}", self.handle.status.borrow()))
    }

    fn status(&self) -> Arc<Status> {
        self.handle.status.borrow().clone()
    }

    /// Changes a lease. `None` for a public address deletes it.
    fn change(&mut self, n: u16, public: Option<IpAddr>) {
        let Origin::Live { revision } = self.view.origin else { panic!("live") };
        let revision = Revision(revision.0 + 1);
        match public {
            Some(public) => self.view.leases.insert(lease(n, public, revision.0)),
            None => drop(self.view.leases.remove(&key(n))),
        }
        self.view.origin = Origin::Live { revision };
        self.subnets.set_view(self.view.clone());
    }

    async fn until_there(&self, object: &Object) {
        let there = async || self.kernel.state().get(&object.key()) == Some(object);
        eventually_async(Duration::from_secs(10), there, || object).await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn count(calls: &[Call], operation: Operation) -> usize {
    calls.iter().filter(|call| call.operation == operation).count()
}

#[tokio::test(start_paused = true)]
async fn a_change_of_one_peer_among_thousands_costs_one_peer() {
    let mut world = World::new(2_000).await;
    let other: IpAddr = [203, 0, 113, 7].into();
    for (what, public) in [("moved", Some(other)), ("gone", None), ("new", Some(other))] {
        let before = world.status();
        world.change(700, public);
        let done = world.when(|status| status.in_sync && status.applied > before.applied).await;
        // Events of forwarding entries arrive even if we made the change. Each must cost only a
        // comparison with the desired object.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let calls = world.kernel.take_calls();
        let [neigh, fdb, nexthop, route] = objects(700, other).map(|object| object.key());
        let mut touched: BTreeMap<Key, usize> = BTreeMap::new();
        calls
            .iter()
            .filter_map(|call| call.key)
            .for_each(|key| *touched.entry(key).or_default() += 1);
        let expected = if what == "moved" { vec![fdb] } else { vec![neigh, fdb, nexthop, route] };
        assert_eq!(touched, expected.iter().map(|key| (*key, 1)).collect(), "{what}");
        assert_eq!(count(&calls, Operation::Snapshot), 0, "{what}");
        let asked = usize::from(public.is_some());
        assert_eq!(
            (count(&calls, Operation::Lookup), world.plans.swap(0, Ordering::Relaxed)),
            (asked, asked),
            "{what}"
        );
        let samples = |status: &Status| status.latency.count();
        assert_eq!(samples(&done) - samples(&before), expected.len() as u64, "{what}");
        assert_eq!(done.repaired, 0, "{what}: {:?}", done.last_repairs);
    }
}

#[tokio::test(start_paused = true)]
async fn leases_that_change_while_thousands_arrive_are_followed() {
    const PEERS: u16 = 9_000;
    let kernel = FakeKernel::with_uplink("eth0");
    let mut world = World::on(Arc::new(Odd::taking_time(&kernel)), kernel, 0).await;
    (1..PEERS).for_each(|n| world.view.leases.insert(lease(n, public(n), 1)));
    world.change(PEERS, Some(public(PEERS)));
    // The first round is over, and the last peers are still in the queue.
    world.when(|status| status.peers > 0).await;
    assert!(world.status().peers < usize::from(PEERS) - 1, "the queue is empty");
    let other: IpAddr = [203, 0, 113, 7].into();
    world.change(PEERS, Some(other));
    world.change(PEERS - 1, None);
    let status =
        world.when(|status| status.in_sync && status.peers == usize::from(PEERS) - 1).await;
    let state = world.kernel.state();
    let there = |object: &Object| state.get(&object.key()) == Some(object);
    assert!(objects(PEERS, other).iter().all(there), "moved");
    assert!(!objects(PEERS - 1, public(PEERS - 1)).iter().any(there), "gone");
    assert!((1..PEERS - 1).all(|n| objects(n, public(n)).iter().all(there)), "all others");
    assert_eq!((status.objects, status.repaired), (2 + 4 * (usize::from(PEERS) - 1), 0));
}

#[tokio::test(start_paused = true)]
async fn damage_is_repaired_while_thousands_arrive() {
    let kernel = FakeKernel::with_uplink("eth0");
    let (world, neigh) = new_peers_with_damage(Odd::taking_time(&kernel)).await;
    let status = world.when(|status| status.repaired == 1).await;
    assert!(status.peers < 9_000, "the repair waited for all peers");
    assert_eq!(world.kernel.state().get(&neigh.key()), Some(&neigh));
    world.when(|status| status.in_sync && status.peers == 9_000).await;
    assert_eq!(count(&world.kernel.take_calls(), Operation::Snapshot), 0);
}

#[tokio::test(start_paused = true)]
async fn the_waiting_peers_are_reported_while_thousands_arrive() {
    // Each question waits for a round. After two rounds the last peers must still be in the queue.
    const PEERS: u16 = 16_000;
    let kernel = FakeKernel::with_uplink("eth0");
    let mut world = World::on(Arc::new(Odd::taking_time(&kernel)), kernel, 20).await;
    (21..PEERS).for_each(|n| world.view.leases.insert(lease(n, public(n), 1)));
    world.change(PEERS, Some(public(PEERS)));
    // The first peers are in place, and the last ones are still in the queue.
    let status = world.when(|status| status.peers > 2_000).await;
    assert!(!status.settled && status.leases == world.view.leases);
    let waiting = world.handle.waiting().await.unwrap();
    let there = |n: u16| {
        objects(n, public(n))
            .iter()
            .all(|object| world.kernel.state().get(&object.key()) == Some(object))
    };
    let waits = |n: u16| waiting.peers.get(&key(n)).copied();
    assert!(!waiting.all);
    for n in [1, 20, 21, 1_000] {
        assert!(there(n) && waits(n).is_none(), "{n}: {:?}", waits(n));
    }
    // The objects of a peer in the queue are explained too.
    assert_eq!(waits(PEERS), Some(Wait::Turn));
    let explained = world.handle.explain([10, 62, 128, 9].into()).await.unwrap();
    assert_eq!((explained.lease.subnets, explained.rejection), (key(PEERS), None));
    let pending = objects(PEERS, public(PEERS)).map(|object| (object, ObjectState::Pending));
    assert_eq!(explained.objects, pending);
    world.when(|status| status.settled).await;
    assert_eq!(world.handle.waiting().await, Some(Waiting::default()));
    assert!(there(PEERS));
}

#[tokio::test(start_paused = true)]
async fn only_peers_on_a_missing_link_wait_for_it() {
    let mut world = World::new(3).await;
    world.kernel.fail(usize::MAX, 95, |call| matches!(call.key, Some(Key::Link(_))));
    world.kernel.delete_link(tunnel().as_str());
    world.change(2, None);
    let status = world.when(|status| !status.failing.is_empty()).await;
    assert!(!status.settled);
    let waiting = world.handle.waiting().await.unwrap();
    let expected: BTreeMap<_, _> = [1, 3].map(|n| (key(n), Wait::Link(tunnel()))).into();
    assert_eq!((waiting.all, &waiting.peers), (false, &expected));
    world.kernel.clear_faults();
    world.when(|status| status.in_sync).await;
    assert_eq!(world.handle.waiting().await, Some(Waiting::default()));
}

#[tokio::test(start_paused = true)]
async fn one_repair_among_thousands_costs_one_object_and_names_its_author() {
    let world = World::new(2_000).await;
    let [neigh, fdb, nexthop, route] = objects(700, public(700));
    let other = Route { dst: subnet(700), via: Via::Blackhole, mtu: None };
    let foreign_fdb =
        Fdb { link: tunnel(), mac: MacAddr::local([2, 0, 0, 0, 2, 188]), dst: [9, 9, 9, 9].into() };
    let mut repairs: u64 = 0;
    let mut expected: BTreeMap<_, u64> = BTreeMap::new();
    let mut damage = |object: &Object, damage, done: &dyn Fn()| {
        done();
        repairs += if damage == Damage::Deletion && object.key() == nexthop.key() { 2 } else { 1 };
        *expected.entry((object.key().kind(), damage)).or_default() += 1;
        (repairs, expected.clone())
    };
    for (object, what, protocol, by) in [
        (&neigh, Damage::Deletion, None, true),
        (&fdb, Damage::Deletion, None, false),
        (&route, Damage::Deletion, None, true),
        (&route, Damage::Modification, Some(3), true),
        (&fdb, Damage::Modification, None, false),
    ] {
        let (number, counts) = damage(object, what, &|| match (what, object) {
            (Damage::Deletion, object) => world.kernel.foreign_delete(object.key()),
            (_, Object::Route(_)) => world.kernel.foreign_put(other, 3),
            _ => world.kernel.foreign_put(foreign_fdb, 0),
        });
        let status = world.when(|status| status.in_sync && status.repaired == number).await;
        assert_eq!(status.repairs, counts);
        let last = status.last_repairs.last().unwrap();
        assert_eq!(
            (&last.object, last.damage, last.peer, last.number),
            (object, what, Some(key(700)), number)
        );
        let changed_by =
            last.changed_by.as_ref().map(|changed_by| (changed_by.port, changed_by.protocol));
        assert_eq!(changed_by, by.then_some((FakeKernel::FOREIGN_PORT, protocol)), "{last}");
        let process = last.changed_by.as_ref().and_then(|changed_by| changed_by.process.clone());
        let process = process.map(|process| process.to_string());
        assert_eq!(process.as_deref(), by.then_some("foreigner (process 4711)"));
        let who = match (by, protocol) {
            (true, Some(protocol)) => {
                format!("foreigner (process 4711) with route protocol {protocol}")
            }
            (true, None) => "foreigner (process 4711)".into(),
            (false, _) => "somebody that the kernel does not name".into(),
        };
        assert!(last.to_string().ends_with(&format!(", {what} by {who}")), "{last}");
        let calls = world.kernel.take_calls();
        assert!(
            calls.len() == 1 && calls[0].key == Some(object.key()),
            "{what:?} {object}: {calls:?}"
        );
    }
    // The kernel deletes the routes of a nexthop object without an event. No other object is put.
    let (number, _) =
        damage(&nexthop, Damage::Deletion, &|| world.kernel.foreign_delete(nexthop.key()));
    let status = world.when(|status| status.in_sync && status.repaired == number).await;
    assert_eq!(status.repairs[&(ObjectKind::Nexthop, Damage::Deletion)], 1);
    let calls: Vec<_> =
        world.kernel.take_calls().iter().map(|call| (call.operation, call.key)).collect();
    assert_eq!(calls, [nexthop.key(), route.key()].map(|key| (Operation::Create, Some(key))));
    // A snapshot finds undesired objects. They are removed and counted.
    let address = [10, 255, 0, 0].into();
    world.kernel.foreign_put(Neigh { link: tunnel(), address, mac: MacAddr::local([9; 6]) }, 0);
    let status = world.when(|status| status.in_sync && status.repaired > number).await;
    let last = status.last_repairs.last().unwrap();
    assert_eq!(
        (last.damage, last.object.key(), last.peer),
        (Damage::Addition, Key::Neigh(tunnel(), address), None)
    );
    assert_eq!(
        last.changed_by.as_ref().map(|changed_by| changed_by.port),
        Some(FakeKernel::FOREIGN_PORT)
    );
    assert_eq!(status.latency, world.status().latency);
    assert!(status.last_repairs.len() <= Status::NEWEST_REPAIRS);
    assert_eq!(status.repairs.values().sum::<u64>(), status.repaired);
}

/// The kernel gives every device a link-local address, a second or two after the device came up.
#[tokio::test(start_paused = true)]
async fn a_link_local_address_on_our_device_causes_no_snapshot() {
    let world = World::new(10).await;
    for address in ["fe80::1", "169.254.7.7"] {
        let address: IpAddr = address.parse().unwrap();
        world.kernel.foreign_put(Addr { link: tunnel(), address, len: 16 }, 0);
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(world.kernel.take_calls(), vec![], "{address}");
    }
    world
        .kernel
        .foreign_put(Addr { link: tunnel(), address: [198, 51, 100, 7].into(), len: 32 }, 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let calls = world.kernel.take_calls();
    assert_eq!(
        (count(&calls, Operation::Snapshot), count(&calls, Operation::Delete)),
        (1, 1),
        "another address is ours"
    );
}

#[tokio::test(start_paused = true)]
async fn a_thousand_unrelated_route_changes_a_second_cause_no_lookups() {
    let world = World::new(10_000).await;
    for n in 0..5_000u16 {
        let [high, low] = n.to_be_bytes();
        let dst = Subnet::new([172, 16 + high, low, 0].into(), 24).unwrap();
        let via = Via::Gateway { gateway: [192, 0, 2, 9].into(), link: uplink(), onlink: false };
        let theirs = Route { dst, via, mtu: None };
        if n % 3 == 0 {
            world.kernel.foreign_put_inexact(theirs, 186);
        } else {
            world.kernel.foreign_put(theirs, 186);
        }
        // Inside the pod networks, too.
        let dst = Subnet::host([10, 255, high, low].into());
        world.kernel.foreign_put_inexact(Route { dst, via, mtu: None }, 186);
        if n % 2 == 0 {
            world.kernel.foreign_delete(Key::Route(dst));
        }
        // Foreign links are created and deleted, too.
        if n % 10 == 0 {
            world.kernel.add_foreign_link("cali1", &[]);
            world.kernel.delete_link("cali1");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(world.kernel.take_calls(), vec![]);
    assert_eq!(world.kernel.take_name_lookups(), 0);
    assert_eq!(world.plans.load(Ordering::Relaxed), 0);
    // The addresses inside a changed prefix are looked up again, at most once a second.
    let dst: Subnet = "198.18.1.0/24".parse().unwrap();
    let under = (1..=10_000).filter(|n| dst.contains(public(*n))).count();
    for n in 0..3_000u32 {
        world.kernel.foreign_put(
            Route { dst, via: Via::Link(uplink()), mtu: Some(1400 + (n % 2) as u16) },
            186,
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let calls = world.kernel.take_calls();
    let lookups = count(&calls, Operation::Lookup);
    assert!(under > 100 && lookups >= 2 * under && lookups <= 5 * under, "{lookups} of {under}");
    assert_eq!(lookups, calls.len());
    // Inside nested prefixes, each address is looked up once. The first change does not wait.
    for len in [24, 24, 15, 16] {
        world.kernel.take_calls();
        let dst = Subnet::new([198, 18, 0, 0].into(), len).unwrap();
        world.kernel.foreign_put(Route { dst, via: Via::Link(uplink()), mtu: None }, 186);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(count(&world.kernel.take_calls(), Operation::Lookup), 10_000);
}

/// The devices are neither in `links` nor in `routes_on` of the footprint.
#[tokio::test(start_paused = true)]
async fn a_device_with_routes_to_peers_matters_while_it_has_them() {
    let kernel = FakeKernel::with_uplink("eth0");
    kernel.add_foreign_link("eth1", &["198.18.0.0/29".parse().unwrap()]);
    let routed = Odd { router_on: Some("eth3".parse().unwrap()), ..Odd::new(&kernel) };
    let world = World::on(Arc::new(routed), kernel, 10).await;
    let cost = async |what: &str, up| {
        world.kernel.set_up(what, up);
        tokio::time::sleep(Duration::from_secs(2)).await;
        (
            count(&world.kernel.take_calls(), Operation::Lookup),
            world.plans.swap(0, Ordering::Relaxed),
        )
    };
    assert_eq!(cost("eth2", false).await, (0, 0));
    assert_eq!(
        cost("eth1", false).await,
        (10 + 7, 7),
        "all addresses are looked up, and peers whose answer changed are planned again"
    );
    assert_eq!(cost("eth1", false).await, (0, 0), "no peer is on it any more");
    assert_eq!(cost("eth3", false).await, (10, 0), "a router is on it, and still leads to peers");
}

/// A kernel that is slower than the fake one, or does not do what it confirms.
#[derive(Debug)]
struct Odd {
    kernel: FakeKernel,
    lookup: Duration,
    snapshot: Duration,
    /// The time for which the next snapshot waits for the deletion of a device.
    deletion: Arc<Mutex<Duration>>,
    /// Whether it confirms every change of a device without making it.
    keeps_links: bool,
    /// The time that a change takes.
    apply: Duration,
    /// The device of the router to all addresses that are on no link.
    router_on: Option<LinkName>,
}

impl Odd {
    fn new(kernel: &FakeKernel) -> Self {
        let kernel = kernel.clone();
        let none = Duration::ZERO;
        Self {
            kernel,
            lookup: none,
            snapshot: none,
            deletion: Arc::default(),
            keeps_links: false,
            apply: none,
            router_on: None,
        }
    }

    /// A kernel on which thousands of peers take several rounds.
    fn taking_time(kernel: &FakeKernel) -> Self {
        Self { apply: Duration::from_micros(8), ..Self::new(kernel) }
    }

    fn pass(time: Duration) {
        if !time.is_zero() {
            tokio::runtime::Handle::current().block_on(tokio::time::advance(time));
        }
    }
}

impl Kernel for Odd {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        Self::pass(self.snapshot + std::mem::take(&mut *self.deletion.lock().unwrap()));
        self.kernel.snapshot(footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        Self::pass(self.apply * u32::try_from(changes.len()).unwrap());
        let mut outcomes = Vec::new();
        for change in changes {
            match change {
                Change::Put(Object::Link(_)) if self.keeps_links => outcomes.push(Outcome::Done),
                change => {
                    let change = std::slice::from_ref(change);
                    outcomes.append(&mut self.kernel.apply(footprint, change));
                }
            }
        }
        outcomes
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        Self::pass(self.lookup);
        let answer = self.kernel.lookup(dst)?;
        let router = Some([203, 0, 113, 1].into());
        Ok(match self.router_on {
            Some(link) if answer.link.is_none() => RouteAnswer::via(link, router, None),
            _ => answer,
        })
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        self.kernel.changes()
    }
}

/// A world with thousands of new peers, and the first object of one of them. The object is damaged
/// as soon as the first peers are in place.
async fn new_peers_with_damage(kernel: Odd) -> (World, Object) {
    const PEERS: u16 = 9_000;
    let fake = kernel.kernel.clone();
    let mut world = World::on(Arc::new(kernel), fake, 0).await;
    let [neigh, ..] = objects(1, public(1));
    (1..PEERS).for_each(|n| world.view.leases.insert(lease(n, public(n), 1)));
    world.change(PEERS, Some(public(PEERS)));
    world.when(|status| status.peers > 0).await;
    assert!(world.status().peers < usize::from(PEERS), "the queue is empty");
    world.kernel.foreign_delete(neigh.key());
    (world, neigh)
}

#[tokio::test(start_paused = true)]
async fn thousands_of_new_peers_delay_no_repair() {
    let kernel = FakeKernel::with_uplink("eth0");
    let slow = Odd { apply: Duration::from_micros(240), ..Odd::new(&kernel) };
    let (world, neigh) = new_peers_with_damage(slow).await;
    world.when(|status| status.in_sync && status.peers == 9_000 && status.repaired > 0).await;
    let calls = world.kernel.take_calls();
    let puts: Vec<_> = calls.iter().filter(|call| call.operation == Operation::Create).collect();
    let mut of_neigh = puts.iter().enumerate().filter(|(_, call)| call.key == Some(neigh.key()));
    let (repair, _) = of_neigh.nth(1).unwrap();
    assert!(repair + 2_000 < puts.len(), "{repair} of {}", puts.len());
}

/// As without nexthop objects, where each of thousands of routes takes long.
#[tokio::test(start_paused = true)]
async fn thousands_of_repairs_delay_no_lease() {
    const PEERS: u16 = 4_000;
    for (n, public) in [(PEERS + 1, Some(public(PEERS + 1))), (PEERS, None)] {
        let kernel = FakeKernel::with_uplink("eth0");
        let slow = Odd { apply: Duration::from_micros(470), ..Odd::new(&kernel) };
        let mut world = World::on(Arc::new(slow), kernel, PEERS).await;
        for n in 1..PEERS {
            world.kernel.foreign_delete(Key::Route(subnet(n)));
        }
        world.when(|status| status.repaired > 0).await;
        world.kernel.take_calls();
        world.change(n, public);
        let leases = world.view.leases.clone();
        world.when(|status| status.in_sync && status.leases == leases).await;
        assert_eq!(world.status().repaired, u64::from(PEERS) - 1);
        let calls = world.kernel.take_calls();
        let [neigh, fdb, nexthop, route] =
            objects(n, [192, 0, 2, 1].into()).map(|object| object.key());
        for key in [neigh, fdb, route] {
            let at = calls.iter().position(|call| call.key == Some(key)).unwrap();
            assert!(at < usize::from(PEERS) / 2, "{key:?}, {public:?}: {at} of {}", calls.len());
        }
        // Each of the routes could use a nexthop object that the plan itself defines.
        let last = |operation, is: &dyn Fn(&Key) -> bool| {
            calls
                .iter()
                .rposition(|call| call.operation == operation && call.key.as_ref().is_some_and(is))
        };
        let repaired = last(Operation::Create, &|key| matches!(key, Key::Route(_)));
        let deleted = last(Operation::Delete, &|key| *key == nexthop);
        assert!(
            deleted.is_some() == public.is_none() && deleted.is_none_or(|n| Some(n) > repaired)
        );
    }
}

/// A new object may replace the object that is to be deleted.
#[tokio::test(start_paused = true)]
async fn new_objects_are_put_before_old_ones_are_deleted() {
    const PEERS: u16 = 1_000;
    for new in [1..PEERS, PEERS + 1..6 * PEERS] {
        let kernel = FakeKernel::with_uplink("eth0");
        let slow = Odd { apply: Duration::from_micros(240), ..Odd::new(&kernel) };
        let mut world = World::on(Arc::new(slow), kernel, PEERS).await;
        let before = world.status().applied;
        for n in new.clone() {
            world.view.leases.insert(lease(n, public(n + 10_000), 2));
        }
        world.change(PEERS, None);
        let departed = |state: ObjectSet| {
            objects(PEERS, public(PEERS)).iter().all(|o| state.get(&o.key()).is_none())
        };
        world.when(|status| status.in_sync && status.applied > before).await;
        let calls = world.kernel.take_calls();
        let of = |wanted: &[Operation]| {
            let calls = calls.iter().enumerate();
            calls
                .filter(|(_, call)| wanted.contains(&call.operation))
                .map(|(n, _)| n)
                .collect::<Vec<_>>()
        };
        let puts = of(&[Operation::Create, Operation::Replace]);
        let deletions = of(&[Operation::Delete]);
        assert!(puts.len() >= new.len() && deletions.len() == 4 && departed(world.kernel.state()));
        assert!(puts.last() < deletions.first(), "{:?} {:?}", puts.last(), deletions.first());
    }
}

/// The objects take several rounds. No object is put before the objects that it needs, and a peer
/// that moves meanwhile does not wait.
#[tokio::test(start_paused = true)]
async fn objects_of_a_deleted_device_are_put_in_order_and_delay_no_lease() {
    const PEERS: u16 = 4_000;
    let kernel = FakeKernel::with_uplink("eth0");
    let slow = Odd {
        apply: Duration::from_micros(50),
        snapshot: Duration::from_millis(90),
        ..Odd::new(&kernel)
    };
    let mut world = World::on(Arc::new(slow), kernel, PEERS).await;
    world.kernel.delete_link(tunnel().as_str());
    let mut failing = 0;
    world.when(|status| status.repaired > 1_000).await;
    let moved = PEERS;
    let before = tokio::time::Instant::now();
    world.change(moved, Some(public(PEERS + 1)));
    let [_, fdb, ..] = objects(moved, public(PEERS + 1));
    while world.kernel.state().get(&fdb.key()) != Some(&fdb) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let took = before.elapsed();
    let repaired = world.status().repaired;
    assert!(
        took < Duration::from_millis(200) && repaired < 4 * u64::from(PEERS) / 2,
        "{took:?}, {repaired}"
    );
    let done = |status: &Arc<Status>| {
        failing += status.failing.len();
        // Except for the objects of the peer that moved.
        status.in_sync && status.repaired + 4 >= 4 * u64::from(PEERS)
    };
    world.when(done).await;
    assert_eq!(failing, 0, "nothing was refused");
    let calls = world.kernel.take_calls();
    let puts = calls
        .iter()
        .filter(|call| matches!(call.operation, Operation::Create | Operation::Replace));
    let puts = puts.filter(|call| matches!(call.key, Some(Key::Route(_)))).count();
    assert_eq!(puts, usize::from(PEERS), "each route is put once");
}

#[tokio::test(start_paused = true)]
async fn lookups_take_at_most_a_fifth_of_the_time() {
    const LOOKUP: Duration = Duration::from_micros(100);
    let kernel = FakeKernel::with_uplink("eth0");
    let slow = Odd { lookup: LOOKUP, ..Odd::new(&kernel) };
    let world = World::on(Arc::new(slow), kernel, 3_000).await;
    let everything: Subnet = "0.0.0.0/0".parse().unwrap();
    let link = |world: &World| world.kernel.add_foreign_link("eth0", &[]);
    let default_route = |world: &World| {
        let via = Via::Gateway { gateway: [192, 0, 2, 9].into(), link: uplink(), onlink: false };
        world.kernel.foreign_put(Route { dst: everything, via, mtu: None }, 186);
    };
    let lost = |world: &World| world.kernel.lose_messages();
    for reason in [&link as &dyn Fn(&World), &default_route, &lost] {
        let started = tokio::time::Instant::now();
        while started.elapsed() < Duration::from_secs(20) {
            reason(&world);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let elapsed = started.elapsed();
        let lookups = count(&world.kernel.take_calls(), Operation::Lookup);
        let took = LOOKUP * u32::try_from(lookups).unwrap();
        // The first lookup does not wait.
        let most = elapsed / 5 + 3_000 * LOOKUP;
        assert!(
            lookups >= 3_000 && took <= most,
            "{lookups} look-ups took {took:?} of {elapsed:?}"
        );
        tokio::time::sleep(Duration::from_secs(10)).await;
        world.kernel.take_calls();
    }
}

#[tokio::test(start_paused = true)]
async fn snapshots_take_at_most_a_fifth_of_the_time() {
    const SNAPSHOT: Duration = Duration::from_millis(300);
    let kernel = FakeKernel::with_uplink("eth0");
    let slow = Odd { snapshot: SNAPSHOT, ..Odd::new(&kernel) };
    let world = World::on(Arc::new(slow), kernel, 50).await;
    let started = tokio::time::Instant::now();
    while started.elapsed() < Duration::from_secs(60) {
        world.kernel.lose_messages();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let elapsed = started.elapsed();
    let snapshots = count(&world.kernel.take_calls(), Operation::Snapshot);
    let took = SNAPSHOT * u32::try_from(snapshots).unwrap();
    // The first snapshot does not wait.
    assert!(
        snapshots > 20 && took <= elapsed / 5 + SNAPSHOT,
        "{snapshots} snapshots in {elapsed:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_waited_for_a_deletion_delays_no_other() {
    const DELETION: Duration = Duration::from_millis(500);
    let kernel = FakeKernel::with_uplink("eth0");
    let slow = Odd { apply: Duration::from_micros(8), ..Odd::new(&kernel) };
    let deletion = Arc::clone(&slow.deletion);
    let world = World::on(Arc::new(slow), kernel, 4_000).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = tokio::time::Instant::now();
    *deletion.lock().unwrap() = DELETION;
    world.kernel.delete_link(tunnel().as_str());
    world.when(|status| status.repaired > 0).await;
    // More messages than the buffer of a socket can hold.
    world.kernel.lose_messages();
    world.when(|status| status.in_sync && status.repaired > 4 * 4_000).await;
    let took = before.elapsed();
    assert!(took < DELETION + Duration::from_secs(1), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_device_that_the_kernel_does_not_change_or_make_is_reported() {
    let world = World::new(5).await;
    let Some(Object::Link(link)) = world.kernel.state().get(&Key::Link(tunnel())).cloned() else {
        panic!()
    };
    drop(world);
    for (there, says) in [(true, "it is now link flannel.1 mtu 1280"), (false, "it is now absent")]
    {
        let kernel = FakeKernel::with_uplink("eth0");
        if there {
            kernel.foreign_put(Link { mtu: 1280, ..link.clone() }, 0);
        }
        let stubborn = Odd { keeps_links: true, ..Odd::new(&kernel) };
        let world = World::started(Arc::new(stubborn), kernel, 5).await;
        let key = Key::Link(tunnel());
        let status = world.when(|status| status.failing.contains_key(&key)).await;
        let error = status.failing.get(&key).unwrap().error.to_string();
        assert!(error.contains(says) && !status.in_sync, "{error}");
        // The change is tried again, with growing pauses.
        world.kernel.take_calls();
        tokio::time::sleep(Duration::from_secs(300)).await;
        let calls = world.kernel.take_calls();
        let again = world.status();
        let snapshots = count(&calls, Operation::Snapshot);
        assert!((5..50).contains(&snapshots), "{snapshots} times in 5 minutes");
        let first = status.failing.get(&key).unwrap();
        let last = again.failing.get(&key).unwrap();
        assert!(last.since == first.since && last.tries > 5, "{last:?}");
    }
}

/// Starts a task that damages random peers in every way, adds undesired objects and loses messages,
/// without a pause and without an end.
fn storm(kernel: FakeKernel) -> JoinHandle<()> {
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    tokio::spawn(async move {
        loop {
            for _ in 0..20 {
                let n = 1 + next(400) as u16;
                let object = &objects(n, public(n))[next(4) as usize];
                match next(8) {
                    0..3 => kernel.foreign_delete(object.key()),
                    3 => kernel
                        .foreign_put(Route { dst: subnet(n), via: Via::Blackhole, mtu: None }, 3),
                    4 => kernel.foreign_put(objects(n, [9, 9, 9, 9].into())[1].clone(), 0),
                    5 => {
                        let address = [10, 250, 0, next(200) as u8].into();
                        kernel.foreign_put(
                            Neigh { link: tunnel(), address, mac: MacAddr::local([9; 6]) },
                            0,
                        );
                    }
                    6 => kernel.lose_messages(),
                    _ => kernel.foreign_delete(Key::Addr(tunnel(), subnet(0).base())),
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
}

#[tokio::test(start_paused = true)]
async fn an_endless_storm_is_slowed_down_and_delays_no_lease() {
    let mut world = World::new(400).await;
    let storm = storm(world.kernel.clone());
    let mut slowest = Duration::ZERO;
    for n in 0..10 {
        let started = tokio::time::Instant::now();
        world.change(1_000 + n, Some(public(1_000 + n)));
        for object in objects(1_000 + n, public(1_000 + n)) {
            world.until_there(&object).await;
        }
        slowest = slowest.max(started.elapsed());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let calls = world.kernel.take_calls();
    let snapshots = count(&calls, Operation::Snapshot);
    // Ten seconds of 20,000 changes each.
    assert!(snapshots <= 130, "{snapshots} snapshots in ten seconds");
    assert!(slowest <= Duration::from_millis(20), "a new peer waited for {slowest:?}");
    let lookups = count(&calls, Operation::Lookup);
    assert!(lookups <= 12 * 2 * 500, "{lookups} look-ups in ten seconds");
    storm.abort();
    let status = world.when(|status| status.in_sync && status.peers == 410).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let there: Vec<u16> = (1..=400).chain(1_000..1_010).collect();
    let wanted: ObjectSet = there.iter().flat_map(|n| objects(*n, public(*n))).collect();
    let state = world.kernel.state();
    assert!(wanted.iter().all(|object| state.get(&object.key()) == Some(object)));
    assert_eq!(state.len(), wanted.len() + 2);
    let listed = Status::NEWEST_REPAIRS..=2 * Status::NEWEST_REPAIRS;
    assert!(status.repaired > 1_000 && listed.contains(&status.last_repairs.len()));
}

#[tokio::test(start_paused = true)]
async fn single_repairs_in_a_storm_are_bounded() {
    let world = World::new(50).await;
    let mut rounds = 0;
    let mut status = world.handle.status.clone();
    let [_, _, _, route] = objects(7, public(7));
    for _ in 0..5_000 {
        world.kernel.foreign_delete(route.key());
        tokio::time::sleep(Duration::from_micros(200)).await;
        rounds += usize::from(status.has_changed().unwrap());
        status.borrow_and_update();
    }
    let calls = world.kernel.take_calls();
    assert!(
        calls.len() <= 6_000 && count(&calls, Operation::Snapshot) == 0,
        "{} calls",
        calls.len()
    );
    assert!(rounds > 0);
    world.until_there(&route).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_is_explained() {
    let mut world = World::new(20).await;
    let inside: IpAddr = [10, 0, 7, 99].into();
    let explained = world.handle.explain(inside).await.unwrap();
    assert_eq!((explained.lease.subnets, explained.rejection), (key(7), None));
    let expected: Vec<_> =
        objects(7, public(7)).into_iter().map(|object| (object, ObjectState::InPlace)).collect();
    assert_eq!(explained.objects, expected);
    assert_eq!(world.handle.explain([172, 16, 0, 1].into()).await, None);
    assert_eq!(world.handle.explain("fd00::1".parse().unwrap()).await, None);

    let route = objects(7, [203, 0, 113, 1].into())[1].key();
    world.kernel.fail(usize::MAX, 105, move |call| call.key == Some(route));
    world.change(7, Some([203, 0, 113, 1].into()));
    let status = world.when(|status| !status.failing.is_empty()).await;
    let failing: Vec<_> = status.failing.iter().map(|(key, f)| (*key, f.peer)).collect();
    assert_eq!(failing, [(route, Some(key(7)))]);
    let explained = world.handle.explain(inside).await.unwrap();
    let refused = explained
        .objects
        .iter()
        .filter(|(_, standing)| matches!(standing, ObjectState::Failing(_)));
    assert_eq!(refused.map(|(object, _)| object.key()).collect::<Vec<_>>(), [route]);

    // A lease inside the subnet of another lease is rejected. The address belongs to the other one.
    let twin = Lease {
        subnets: "10.0.8.128-25".parse().unwrap(),
        since: Revision(9),
        ..lease(8, public(9), 9)
    };
    world.view.leases.insert(twin);
    world.change(9, None);
    world.when(|status| status.rejected.len() == 1).await;
    assert_eq!(world.handle.explain([10, 0, 8, 200].into()).await.unwrap().lease.subnets, key(8));
    world.change(8, Some([127, 0, 0, 1].into()));
    world.when(|status| status.rejected.contains_key(&key(8))).await;
    let explained = world.handle.explain([10, 0, 8, 1].into()).await.unwrap();
    assert!(matches!(explained.rejection, Some(Rejection::Rejected(_))), "{explained:?}");
    assert!(explained.objects.iter().all(|(_, standing)| *standing == ObjectState::Unwanted));

    world.task.abort();
    let _ = (&mut world.task).await;
    assert_eq!(world.handle.explain(inside).await, None, "the network has stopped");
}

#[tokio::test(start_paused = true)]
async fn a_refused_object_is_tried_again_before_a_snapshot() {
    let mut world = World::new(50).await;
    let [_, fdb, ..] = objects(7, [203, 0, 113, 1].into());
    let key = fdb.key();
    world.kernel.fail(1, 105, move |call| call.key == Some(key));
    world.change(7, Some([203, 0, 113, 1].into()));
    world.until_there(&fdb).await;
    let status = world.when(|status| status.in_sync).await;
    let calls = world.kernel.take_calls();
    assert_eq!(calls.iter().filter_map(|call| call.key).collect::<Vec<_>>(), [key, key]);
    assert_eq!(count(&calls, Operation::Snapshot), 0);
    assert_eq!(
        (status.repaired, status.latency.count() % 10),
        (0, (50 * 4 + 1) % 10),
        "the change is one of leases, not a repair"
    );
    // If the kernel keeps refusing the object, a snapshot is read.
    world.kernel.fail(usize::MAX, 105, move |call| call.key == Some(key));
    world.change(7, Some([203, 0, 113, 2].into()));
    tokio::time::sleep(Duration::from_secs(100)).await;
    let calls = world.kernel.take_calls();
    let puts = count(&calls, Operation::Replace);
    let snapshots = count(&calls, Operation::Snapshot);
    assert!(
        (2..=8).contains(&snapshots) && puts > snapshots && puts <= 16,
        "{puts} puts, {snapshots} snapshots"
    );
    assert_eq!(world.status().failing.get(&key).unwrap().tries as usize, puts);
}

#[tokio::test(start_paused = true)]
async fn a_refused_object_that_another_program_put_no_longer_fails() {
    let mut world = World::new(5).await;
    let [_, fdb, ..] = objects(3, [203, 0, 113, 1].into());
    let key = fdb.key();
    world.kernel.fail(usize::MAX, 105, move |call| call.key == Some(key));
    world.change(3, Some([203, 0, 113, 1].into()));
    world.when(|status| status.failing.contains_key(&key)).await;
    world.kernel.foreign_put(fdb.clone(), 0);
    let status = world.when(|status| status.in_sync).await;
    assert!(status.failing.is_empty() && world.kernel.state().get(&key) == Some(&fdb));
}
