//! Nexthop objects instead of gateways: changes of peers, repairs, deletions, and the switch from
//! routes with gateways and back.

use libc::EBUSY;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::Footprint;
use flannel_core::object::{Key, Link, MacAddr, Nexthop, Object, Route, Via, Vxlan};
use flannel_core::status::Status;
use flannel_core::testing::{Call, FakeKernel, FakeSubnets, Operation};
use flannel_core::{Kernel, Network, SubnetManager};
use flannel_route::KernelNetwork;
use tokio::sync::watch;
use tokio::task::JoinHandle;

const PEERS: u8 = 5;
/// The public address of a peer whose route has no gateway.
const NO_GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 200));

/// A network like host-gw: a route to every peer with the peer itself as the gateway.
struct Run {
    task: JoinHandle<()>,
    status: watch::Receiver<Arc<Status>>,
}

impl Run {
    async fn start(kernel: &FakeKernel, subnets: &FakeSubnets) -> Self {
        let eth0 = "eth0".parse().unwrap();
        let config = subnets.network_config().await.unwrap();
        let footprint = Footprint {
            networks: config.pod_networks().collect(),
            routes_on: [eth0].into(),
            ..Footprint::default()
        };
        let blueprint =
            Blueprint::new(1500, move |subnets, offer, _env, objects: &mut Vec<Object>| {
                for peer in offer.endpoints(subnets) {
                    let Some(gateway) = peer.public else { continue };
                    let via = match gateway {
                        NO_GATEWAY => Via::Link(eth0),
                        gateway => Via::Gateway { gateway, link: eth0, onlink: false },
                    };
                    objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
                }
                Ok(())
            })
            .with_footprint(footprint);
        let lease = subnets.acquire_lease(&Default::default()).await.unwrap();
        let networks = config.pod_networks().collect();
        let kernel = Arc::new(kernel.clone());
        let network = KernelNetwork::new(kernel, NodeLease::Held(lease), networks, vec![blueprint]);
        let status = network.handle().status;
        let views = subnets.watch_leases().await.unwrap();
        let task = tokio::spawn(async move { drop(Box::new(network).run(views).await) });
        let mut run = Self { task, status };
        run.settled().await;
        run
    }

    /// Waits until all objects are in place and no change is due.
    async fn settled(&mut self) {
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        self.status.wait_for(|status| status.in_sync).await.unwrap();
    }

    async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

fn peers() -> FakeSubnets {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    (2..2 + PEERS).for_each(|n| subnets.put(&key(n), &format!("192.0.2.{n}")));
    subnets
}

fn key(n: u8) -> String {
    format!("10.1.{n}.0-24")
}

fn route_of(kernel: &FakeKernel, n: u8) -> Route {
    let dst = format!("10.1.{n}.0/24").parse().unwrap();
    match kernel.state().get(&Key::Route(dst)) {
        Some(Object::Route(route)) => *route,
        other => panic!("{other:?}: {:#?}", kernel.dump()),
    }
}

fn nexthop_of(kernel: &FakeKernel, n: u8) -> Nexthop {
    let Via::Nexthop(id) = route_of(kernel, n).via else { panic!("{:#?}", kernel.dump()) };
    match kernel.state().get(&Key::Nexthop(id)) {
        Some(Object::Nexthop(nexthop)) => *nexthop,
        other => panic!("{other:?}: {:#?}", kernel.dump()),
    }
}

/// The changes since the last call of this function.
fn changes(kernel: &FakeKernel) -> Vec<Call> {
    kernel.take_calls().into_iter().filter(|call| call.key.is_some()).collect()
}

fn count(kernel: &FakeKernel) -> (usize, usize) {
    let state = kernel.state();
    let nexthops = state.iter().filter(|o| matches!(o, Object::Nexthop(_))).count();
    (nexthops, state.len() - nexthops)
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_moves_costs_one_replacement() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    assert_eq!(count(&kernel), (5, 5));
    assert_eq!(run.status.borrow().objects, 10);
    let before = nexthop_of(&kernel, 3);
    kernel.take_calls();
    subnets.put(&key(3), "192.0.2.77");
    run.settled().await;
    let replaced = Call { operation: Operation::Replace, key: Some(Key::Nexthop(before.id)) };
    assert_eq!(kernel.take_calls(), [replaced]);
    assert_eq!(nexthop_of(&kernel, 3), Nexthop { gateway: [192, 0, 2, 77].into(), ..before });
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_leaves_loses_its_route_first_and_its_id_last() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let id = nexthop_of(&kernel, 3).id;
    let dst = route_of(&kernel, 3).dst;
    kernel.take_calls();
    subnets.delete(&key(3));
    run.settled().await;
    let delete = |key| Call { operation: Operation::Delete, key: Some(key) };
    assert_eq!(kernel.take_calls(), [delete(Key::Route(dst)), delete(Key::Nexthop(id))]);
    assert_eq!((count(&kernel), run.status.borrow().objects), ((4, 4), 8));
    subnets.put(&key(3), "192.0.2.3");
    run.settled().await;
    assert_eq!(nexthop_of(&kernel, 3).id, id);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_nexthop_object_costs_two_objects_and_no_snapshot() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let state = kernel.state();
    let id = nexthop_of(&kernel, 3).id;
    let dst = route_of(&kernel, 3).dst;
    kernel.take_calls();
    kernel.foreign_delete(Key::Nexthop(id));
    assert_eq!(count(&kernel), (4, 4), "the kernel deletes the route with its nexthop object");
    run.settled().await;
    assert_eq!(kernel.state(), state);
    let create = |key| Call { operation: Operation::Create, key: Some(key) };
    assert_eq!(kernel.take_calls(), [create(Key::Nexthop(id)), create(Key::Route(dst))]);
    assert_eq!(run.status.borrow().repaired, 2);
}

/// Linux walks its whole table when a nexthop object with routes is replaced.
#[tokio::test(start_paused = true)]
async fn a_route_uses_the_gateway_while_its_nexthop_object_is_repaired() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let nexthop = nexthop_of(&kernel, 3);
    let route = route_of(&kernel, 3);
    let wrong = Nexthop { gateway: [192, 0, 2, 66].into(), ..nexthop };
    let replaced = |key| Call { operation: Operation::Replace, key: Some(key) };
    let its = replaced(Key::Route(route.dst));
    let itself = replaced(Key::Nexthop(nexthop.id));
    for (n, failing) in [None, Some(0), Some(1), Some(2)].into_iter().enumerate() {
        let call = std::cell::Cell::new(0);
        let applied = run.status.borrow().applied;
        kernel.take_calls();
        kernel.fail(1, 105, move |found| {
            call.set(call.get() + usize::from(found.operation == Operation::Replace));
            failing.is_some_and(|failing| call.get() == failing + 1)
        });
        kernel.foreign_put(wrong, 3);
        if failing == Some(2) {
            run.status.wait_for(|status| !status.failing.is_empty()).await.unwrap();
            let gateway = nexthop.gateway;
            assert!(
                matches!(route_of(&kernel, 3).via, Via::Gateway { gateway: g, .. } if g == gateway)
            );
        }
        run.status.wait_for(|status| status.repaired == n as u64 + 1).await.unwrap();
        run.settled().await;
        let calls = changes(&kernel);
        assert_eq!(
            calls[..3],
            [its.clone(), itself.clone(), its.clone()],
            "{failing:?}: {calls:?}"
        );
        assert_eq!((nexthop_of(&kernel, 3), route_of(&kernel, 3)), (nexthop, route), "{failing:?}");
        let status = run.status.borrow().clone();
        assert_eq!(status.repaired, n as u64 + 1, "{failing:?}: {:?}", status.last_repairs);
        assert_eq!(status.last_repairs.last().unwrap().object, nexthop.into());
        // The last step, if it failed, is repeated alone and counts as a change of leases.
        let by_itself = u64::from(failing == Some(2));
        assert_eq!(status.applied, applied + by_itself, "{failing:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_leaves_during_that_repair_leaves_no_object() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let nexthop = nexthop_of(&kernel, 3);
    let back = Key::Route(route_of(&kernel, 3).dst);
    let steps = std::cell::Cell::new(0);
    kernel.fail(1, 105, move |call| {
        steps.set(
            steps.get()
                + usize::from(call.key == Some(back) && call.operation == Operation::Replace),
        );
        steps.get() == 2
    });
    kernel.foreign_put(Nexthop { gateway: [192, 0, 2, 66].into(), ..nexthop }, 3);
    run.status.wait_for(|status| status.failing.contains_key(&back)).await.unwrap();
    subnets.delete(&key(3));
    run.status.wait_for(|status| status.in_sync && status.peers == 4).await.unwrap();
    assert_eq!(count(&kernel), (4, 4), "{:#?}", kernel.dump());
}

#[tokio::test(start_paused = true)]
async fn a_restart_changes_no_object() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    let state = kernel.state();
    kernel.take_calls();
    Run::start(&kernel, &subnets).await.stop().await;
    assert_eq!((kernel.state(), changes(&kernel)), (state, vec![]));
}

#[tokio::test(start_paused = true)]
async fn all_ids_in_the_kernel_are_kept() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    // The objects of two peers are exchanged. This assignment is as good as any other.
    let a = nexthop_of(&kernel, 3);
    let b = nexthop_of(&kernel, 4);
    kernel.foreign_put(Nexthop { id: b.id, ..a }, flannel_core::kernel::ROUTE_PROTOCOL);
    kernel.foreign_put(Nexthop { id: a.id, ..b }, flannel_core::kernel::ROUTE_PROTOCOL);
    for (n, id) in [(3, b.id), (4, a.id)] {
        let route = Route { via: Via::Nexthop(id), ..route_of(&kernel, n) };
        kernel.foreign_put(route, flannel_core::kernel::ROUTE_PROTOCOL);
    }
    let state = kernel.state();
    kernel.take_calls();
    Run::start(&kernel, &subnets).await.stop().await;
    assert_eq!((kernel.state(), changes(&kernel)), (state, vec![]));
}

#[tokio::test(start_paused = true)]
async fn the_id_of_a_stale_route_is_reserved_until_its_deletion() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    // The stale route has the preferred id of peer 3.
    let own = nexthop_of(&kernel, 3);
    let stale = "10.1.99.0/24".parse().unwrap();
    kernel.foreign_delete(Key::Nexthop(own.id));
    kernel.foreign_put(own, flannel_core::kernel::ROUTE_PROTOCOL);
    let route = Route { dst: stale, via: Via::Nexthop(own.id), mtu: None };
    kernel.foreign_put(route, flannel_core::kernel::ROUTE_PROTOCOL);
    kernel.take_calls();
    Run::start(&kernel, &subnets).await.stop().await;
    let calls = changes(&kernel);
    let at = |key| calls.iter().position(|call| call.key == Some(key)).unwrap();
    assert_ne!(nexthop_of(&kernel, 3).id, own.id);
    assert!(at(Key::Route(stale)) < at(Key::Nexthop(own.id)), "{calls:?}");
    assert_eq!(count(&kernel), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn the_id_of_a_later_stale_route_is_reserved_until_its_deletion() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let other = nexthop_of(&kernel, 3);
    let stale = "10.1.99.0/24".parse().unwrap();
    // Adjacent subnets have adjacent ids: this is the preferred id of peer 20.
    let theirs = Nexthop { id: other.id + 17, ..other };
    kernel.fail(usize::MAX, 105, |call| call.operation == Operation::Delete);
    kernel.foreign_put(theirs, flannel_core::kernel::ROUTE_PROTOCOL);
    let route = Route { dst: stale, via: Via::Nexthop(theirs.id), mtu: None };
    kernel.foreign_put(route, flannel_core::kernel::ROUTE_PROTOCOL);
    // Several snapshots are read meanwhile.
    tokio::time::sleep(std::time::Duration::from_secs(100)).await;
    subnets.put(&key(20), "192.0.2.20");
    tokio::time::sleep(std::time::Duration::from_secs(100)).await;
    assert_eq!(kernel.state().get(&Key::Route(stale)), Some(&route.into()));
    assert_ne!(nexthop_of(&kernel, 20).id, theirs.id);
    kernel.clear_faults();
    tokio::time::sleep(std::time::Duration::from_secs(100)).await;
    run.settled().await;
    assert_eq!(count(&kernel), (6, 6));
}

/// The engine chooses the ids here, not a plan.
#[tokio::test(start_paused = true)]
async fn every_refused_change_is_made_in_the_end() {
    use Operation::{Create, Delete, Replace};
    type Step = fn(&FakeSubnets);
    let steps: [(Operation, Step); 3] = [
        (Create, |subnets| (10..14).for_each(|n| subnets.put(&key(n), &format!("192.0.2.{n}")))),
        (Replace, |subnets| {
            (2..6).for_each(|n| subnets.put(&key(n), &format!("192.0.2.{}", n + 70)));
        }),
        (Delete, |subnets| (2..6).for_each(|n| subnets.delete(&key(n)))),
    ];
    // ENOENT, EINTR, EEXIST, ENODEV, ENOBUFS.
    for (errno, times) in [2, 4, 17, 19, 105].into_iter().flat_map(|errno| [(errno, 1), (errno, 6)])
    {
        for (operation, step) in steps {
            let kernel = FakeKernel::with_uplink("eth0");
            let subnets = peers();
            let mut run = Run::start(&kernel, &subnets).await;
            kernel.fail(times, errno, move |call| call.operation == operation);
            step(&subnets);
            run.settled().await;
            // The retries of a change that keeps failing become rarer.
            tokio::time::sleep(std::time::Duration::from_secs(600)).await;
            run.settled().await;
            assert!(kernel.clear_faults(), "{operation:?} {errno} {times}");
            let expected = FakeKernel::with_uplink("eth0");
            let _whole = Run::start(&expected, &subnets).await;
            let case = format!("{operation:?} {errno} {times}");
            assert_eq!(kernel.dump(), expected.dump(), "{case}");
            assert!(run.status.borrow().failing.is_empty(), "{case}");
        }
    }
}

/// No object that carries packets is deleted, and none is replaced after the object that it needs
/// was deleted.
#[tokio::test(start_paused = true)]
async fn switching_nexthop_objects_replaces_every_route_in_place() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    kernel.use_nexthops(false);
    Run::start(&kernel, &subnets).await.stop().await;
    assert_eq!(count(&kernel), (0, 5));
    let plain = kernel.state();
    for (wanted, nexthops) in [(true, 5), (false, 0), (true, 5)] {
        kernel.use_nexthops(wanted);
        kernel.take_calls();
        Run::start(&kernel, &subnets).await.stop().await;
        assert_eq!(count(&kernel), (nexthops, 5));
        let calls = changes(&kernel);
        let is_route = |call: &&Call| matches!(call.key, Some(Key::Route(_)));
        let routes: Vec<_> = calls.iter().filter(is_route).map(|call| call.operation).collect();
        assert_eq!(routes, [Operation::Replace; 5], "{calls:?}");
        let deletes = calls.iter().filter(|call| call.operation == Operation::Delete).count();
        assert_eq!(deletes, 5 - nexthops, "{calls:?}");
        let last_route = calls.iter().rposition(|call| is_route(&call)).unwrap();
        assert_eq!(
            last_route + 1,
            calls.len() - deletes,
            "nexthops before routes, deletions last: {calls:?}"
        );
        if !wanted {
            assert_eq!(kernel.state(), plain);
        }
    }
}

/// The present route uses the nexthop object: the kernel would delete it too.
#[tokio::test(start_paused = true)]
async fn switching_back_keeps_the_nexthop_object_of_a_refused_route() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    kernel.use_nexthops(false);
    kernel.take_calls();
    let key = Key::Route(route_of(&kernel, 3).dst);
    kernel.fail(3, 105, move |call| call.key == Some(key));
    let mut run = Run::start(&kernel, &subnets).await;
    run.settled().await;
    assert!(kernel.clear_faults());
    let calls = changes(&kernel);
    let routes = calls.iter().filter(|call| matches!(call.key, Some(Key::Route(_))));
    let mut operations = routes.map(|call| call.operation);
    assert!(operations.all(|operation| operation == Operation::Replace), "{calls:?}");
    assert_eq!(count(&kernel), (0, 5));
}

#[tokio::test(start_paused = true)]
async fn a_peer_keeps_its_nexthop_object_while_its_new_route_is_refused() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let nexthop = nexthop_of(&kernel, 3);
    let route = Key::Route(route_of(&kernel, 3).dst);
    kernel.fail(usize::MAX, 105, move |call| call.key == Some(route));
    subnets.put(&key(3), &NO_GATEWAY.to_string());
    let tried =
        |status: &Arc<Status>| status.failing.get(&route).is_some_and(|failure| failure.tries > 3);
    run.status.wait_for(tried).await.unwrap();
    assert_eq!(nexthop_of(&kernel, 3), nexthop);
    kernel.clear_faults();
    run.settled().await;
    assert!(matches!(route_of(&kernel, 3).via, Via::Link(_)));
    assert_eq!(count(&kernel), (usize::from(PEERS) - 1, usize::from(PEERS)));
}

#[tokio::test(start_paused = true)]
async fn a_refused_route_keeps_no_nexthop_object_of_another_peer() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let key = Key::Route(route_of(&kernel, 3).dst);
    kernel.fail(usize::MAX, 22, move |call| call.key == Some(key));
    kernel.foreign_delete(key);
    run.status.wait_for(|status| !status.failing.is_empty()).await.unwrap();
    let before = count(&kernel);
    subnets.delete("10.1.4.0-24");
    run.status.wait_for(|status| status.peers == 4).await.unwrap();
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert_eq!(count(&kernel), (before.0 - 1, before.1 - 1));
}

#[tokio::test(start_paused = true)]
async fn a_kernel_without_nexthop_objects_gets_plain_routes() {
    let kernel = FakeKernel::with_uplink("eth0").without_nexthops();
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    assert_eq!(count(&kernel), (0, 5));
}

#[tokio::test(start_paused = true)]
async fn objects_of_another_network_on_the_same_link_stay() {
    let kernel = FakeKernel::with_uplink("eth0");
    let one = peers();
    let other = FakeSubnets::new("10.2.0.0/16");
    (2..9).for_each(|n| other.put(&format!("10.2.{n}.0-24"), &format!("192.0.2.{n}")));
    let first = Run::start(&kernel, &one).await;
    let second = Run::start(&kernel.other(), &other).await;
    let state = kernel.state();
    assert_eq!(count(&kernel), (12, 12));
    kernel.take_calls();
    first.stop().await;
    let mut first = Run::start(&kernel, &one).await;
    second.stop().await;
    let mut second = Run::start(&kernel.other(), &other).await;
    first.settled().await;
    second.settled().await;
    assert_eq!((kernel.state(), changes(&kernel)), (state, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_kernel_unreadable_from_the_start_gets_no_change() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    kernel.fail(usize::MAX, 11, |call| call.operation == Operation::Snapshot);
    let start = tokio::spawn({
        let kernel = kernel.clone();
        let subnets = subnets.clone();
        async move { Run::start(&kernel, &subnets).await.stop().await }
    });
    tokio::time::sleep(std::time::Duration::from_secs(100)).await;
    let calls = kernel.take_calls();
    let tries = calls.iter().filter(|call| call.operation == Operation::Snapshot).count();
    assert!((5..=20).contains(&tries), "{tries} tries in a hundred seconds");
    assert_eq!(count(&kernel), (0, 0));
    kernel.clear_faults();
    start.await.unwrap();
    assert_eq!(count(&kernel), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_former_pod_network_outside_the_new_one_are_removed() {
    let kernel = FakeKernel::with_uplink("eth0");
    Run::start(&kernel, &peers()).await.stop().await;
    let now = FakeSubnets::new("10.2.0.0/16");
    (2..9).for_each(|n| now.put(&format!("10.2.{n}.0-24"), &format!("192.0.2.{n}")));
    let mut run = Run::start(&kernel, &now).await;
    let foreign = Route { dst: "10.1.99.0/24".parse().unwrap(), ..route_of(&kernel, 3) };
    kernel.foreign_put(foreign, 3);
    let last = Route { dst: "10.1.1.0/24".parse().unwrap(), via: Via::LastResort, mtu: None };
    kernel.foreign_put(last, flannel_core::kernel::ROUTE_PROTOCOL);
    let footprint = Footprint {
        networks: vec!["10.2.0.0/16".parse().unwrap()],
        routes_on: ["eth0".parse().unwrap()].into(),
        ..Footprint::default()
    };
    let remove = |former: &str, dry| {
        flannel_route::remove_former(&kernel, &footprint, former.parse().unwrap(), dry).unwrap()
    };
    let would = remove("10.1.0.0/16", true);
    assert_eq!(count(&kernel), (12, 14));
    let report = remove("10.1.0.0/16", false);
    assert_eq!(report, would);
    let said: Vec<String> =
        report.failed.iter().map(|(change, error)| format!("{change}: {error}")).collect();
    assert!(said.len() == 1 && said[0].contains("10.1.99.0/24"), "{said:?}");
    assert_eq!(
        (report.done.len(), count(&kernel)),
        (10, (8, 8)),
        "a foreign route keeps its nexthop"
    );
    assert_eq!(remove("10.0.0.0/8", false), Default::default(), "a network around the new one");
    kernel.take_calls();
    run.settled().await;
    assert_eq!(changes(&kernel), vec![], "no object of the new network was changed");
}

/// A longer batch would delay peers, repairs and a stop.
#[test]
fn objects_of_a_former_pod_network_are_removed_in_batches() {
    let kernel = FakeKernel::with_uplink("eth0");
    let eth0 = "eth0".parse().unwrap();
    for n in 0..300u16 {
        let [high, low] = n.to_be_bytes();
        let dst = format!("10.1.{low}.{}/25", high * 128).parse().unwrap();
        let via = Via::Gateway { gateway: [192, 0, 2, 7].into(), link: eth0, onlink: false };
        kernel.foreign_put(Route { dst, via, mtu: None }, flannel_core::kernel::ROUTE_PROTOCOL);
    }
    let footprint = Footprint {
        networks: vec!["10.2.0.0/16".parse().unwrap()],
        routes_on: [eth0].into(),
        ..Footprint::default()
    };
    let report =
        flannel_route::remove_former(&kernel, &footprint, "10.1.0.0/16".parse().unwrap(), false)
            .unwrap();
    assert_eq!((report.done.len(), report.failed.len(), kernel.largest_batch()), (300, 0, 128));
}

#[tokio::test(start_paused = true)]
async fn ready_for_go_keeps_a_nexthop_whose_route_cannot_be_replaced() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    let footprint = Footprint {
        networks: vec!["10.1.0.0/16".parse().unwrap()],
        routes_on: ["eth0".parse().unwrap()].into(),
        ..Footprint::default()
    };
    let before = kernel.state();
    let route = route_of(&kernel, 3);
    let nexthop = nexthop_of(&kernel, 3);
    let would = flannel_route::ready_for_go(&kernel, &footprint, true).unwrap();
    assert_eq!((would.done.len(), kernel.state()), (10, before));
    let key = Key::Route(route.dst);
    kernel.fail(1, 105, move |call| call.key == Some(key));
    let report = flannel_route::ready_for_go(&kernel, &footprint, false).unwrap();
    assert_eq!((report.done.len(), report.failed.len(), count(&kernel)), (8, 1, (1, 5)));
    assert_eq!((route_of(&kernel, 3), nexthop_of(&kernel, 3)), (route, nexthop));
    let again = flannel_route::ready_for_go(&kernel, &footprint, false).unwrap();
    assert_eq!((again.done.len(), again.failed.len(), count(&kernel)), (2, 0, (0, 5)));
    kernel.foreign_put(Route { dst: "10.1.88.0/24".parse().unwrap(), ..route_of(&kernel, 4) }, 3);
    kernel.fail(1, 105, move |call| call.key == Some(key));
    let report = flannel_route::cleanup(&kernel, &footprint, false).unwrap();
    assert_eq!(
        (report.done.len(), report.failed.len(), count(&kernel)),
        (4, 1, (0, 2)),
        "a foreign route stays"
    );
}

#[tokio::test(start_paused = true)]
async fn a_nexthop_object_with_a_foreign_user_stays() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    Run::start(&kernel, &subnets).await.stop().await;
    let footprint = Footprint {
        networks: vec!["10.1.0.0/16".parse().unwrap()],
        routes_on: ["eth0".parse().unwrap()].into(),
        ..Footprint::default()
    };
    let nexthop = nexthop_of(&kernel, 4);
    let foreign = Route { dst: "10.99.0.0/24".parse().unwrap(), ..route_of(&kernel, 4) };
    kernel.foreign_put(foreign, 4);
    for clean in [flannel_route::ready_for_go, flannel_route::cleanup] {
        let would = clean(&kernel, &footprint, true).unwrap();
        let report = clean(&kernel, &footprint, false).unwrap();
        assert_eq!(report, would);
        let [(change, error)] = &report.failed[..] else { panic!("{:#?}", report.failed) };
        assert_eq!(
            (change.to_string(), error.errno()),
            (format!("delete {}", Object::from(nexthop)), Some(EBUSY))
        );
        assert!(error.to_string().starts_with(&Object::from(foreign).to_string()), "{error}");
        assert_eq!(kernel.state().get(&Key::Route(foreign.dst)), Some(&foreign.into()));
    }
    assert_eq!(
        kernel.dump(),
        [Object::from(nexthop).to_string(), Object::from(foreign).to_string()]
    );
    kernel.foreign_delete(Key::Route(foreign.dst));
    assert!(flannel_route::cleanup(&kernel, &footprint, false).unwrap().failed.is_empty());
    assert_eq!(kernel.dump(), [""; 0]);
}

#[test]
fn a_nexthop_object_on_our_own_device_is_removed_with_it() {
    let kernel = FakeKernel::with_uplink("eth0");
    let link = "flannel.1".parse().unwrap();
    let vxlan = Vxlan {
        vni: 1,
        port: 8472,
        mac: MacAddr::local([1; 6]),
        local: None,
        lower: None,
        learning: false,
        gbp: false,
    };
    let nexthop = Nexthop { id: 9, link, gateway: [10, 1, 3, 0].into(), onlink: true };
    kernel.foreign_put(Link { name: link, mtu: 1450, up: true, kind: vxlan.into() }, 0);
    kernel.foreign_put(nexthop, flannel_core::kernel::ROUTE_PROTOCOL);
    // The kernel made this route, as for every address. It is not ours to delete.
    let route =
        Route { dst: "10.99.0.0/24".parse().unwrap(), via: Via::Nexthop(nexthop.id), mtu: None };
    kernel.foreign_put(route, 2);
    let footprint = Footprint { links: [link].into(), ..Footprint::default() };
    assert_eq!(flannel_route::cleanup(&kernel, &footprint, false).unwrap().failed, []);
    assert_eq!(kernel.dump(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn routes_of_our_protocol_are_owned_on_every_device() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    kernel.add_foreign_link("eth9", &[]);
    let mut run = Run::start(&kernel, &subnets).await;
    let before = kernel.state();
    let on = |link: &str| {
        let via = Via::Gateway {
            gateway: [192, 0, 2, 9].into(),
            link: link.parse().unwrap(),
            onlink: false,
        };
        Route { dst: "10.1.99.0/24".parse().unwrap(), via, mtu: None }
    };
    kernel.foreign_put(on("eth9"), 241);
    run.settled().await;
    assert_eq!(kernel.state(), before);
    kernel.take_calls();
    kernel.foreign_put(on("eth0"), 12);
    run.settled().await;
    assert_eq!((kernel.state().len(), kernel.take_calls()), (before.len() + 1, vec![]));
    kernel.foreign_put(on("eth0"), 241);
    run.settled().await;
    assert_eq!(kernel.state(), before);
}

#[tokio::test(start_paused = true)]
async fn a_route_that_lost_our_protocol_gets_it_back() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    let mut run = Run::start(&kernel, &subnets).await;
    let footprint =
        Footprint { networks: vec!["10.1.0.0/16".parse().unwrap()], ..Footprint::default() };
    let (block, _) = flannel_core::kernel::NexthopBlock::choose(&kernel, &footprint).unwrap();
    let footprint = Footprint { nexthops: block, ..footprint };
    let ours = kernel.snapshot(&footprint).unwrap();
    assert_eq!(ours.len(), 2 * usize::from(PEERS));
    kernel.foreign_put(nexthop_of(&kernel, 4), 4);
    kernel.foreign_put(route_of(&kernel, 5), 4);
    assert_eq!(kernel.snapshot(&footprint).unwrap().len(), ours.len() - 2);
    kernel.take_calls();
    run.settled().await;
    // A nexthop object that exists is repaired between two steps of its route.
    assert_eq!(changes(&kernel).len(), 3 + 1);
    assert_eq!(kernel.snapshot(&footprint).unwrap(), ours);
    kernel.take_calls();
    // The event shows the desired route: no change is needed.
    kernel.foreign_put(route_of(&kernel, 5), flannel_core::kernel::ROUTE_PROTOCOL);
    run.settled().await;
    assert_eq!(kernel.take_calls(), vec![]);
}

#[tokio::test(start_paused = true)]
async fn desired_objects_are_counted_once_if_the_first_snapshot_fails() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = peers();
    kernel.fail(5, 11, |call| call.operation == Operation::Snapshot);
    let other = kernel.clone();
    let late = subnets.clone();
    let arrivals = tokio::spawn(async move {
        for n in 50..60 {
            late.put(&key(n), &format!("192.0.2.{n}"));
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        assert!(other.take_calls().iter().any(|call| call.operation == Operation::Snapshot));
    });
    let mut run = Run::start(&kernel, &subnets).await;
    arrivals.await.unwrap();
    run.settled().await;
    assert!(kernel.clear_faults());
    let wanted = 2 * (usize::from(PEERS) + 10);
    assert_eq!(
        (run.status.borrow().objects, kernel.state().len()),
        (wanted, wanted),
        "{:#?}",
        kernel.dump()
    );
    subnets.delete(&key(50));
    run.settled().await;
    assert_eq!(run.status.borrow().objects, wanted - 2);
    run.stop().await;
}
