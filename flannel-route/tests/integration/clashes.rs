//! Thousands of new peers that clash with one another. The kernel sends no events of our own
//! changes.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Origin, Revision, View};
use flannel_core::network::NetworkHandle;
use flannel_core::object::{Key, LinkName, Object, Route, Via};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Lease, Network, Subnet, SubnetManager, Subnets};
use flannel_route::KernelNetwork;
use tokio::task::JoinHandle;

const NETWORK: &str = "10.0.0.0/8";
/// More than a slice.
const PAIRS: u8 = 200;

fn uplink() -> LinkName {
    "eth0".parse().unwrap()
}

fn lease(subnet: &str, public: IpAddr, since: u64) -> Lease {
    let attrs = LeaseAttrs::from(Offer::new([public].into_iter().collect()));
    let subnets = Subnets::new([subnet.parse::<Subnet>().unwrap()]).unwrap();
    Lease { subnets, attrs, expires: None, since: Revision(since), revision: Revision(since) }
}

/// The later lease, which is rejected, is sorted before the earlier one inside it.
fn pair(n: u8) -> [Lease; 2] {
    let later = lease(&format!("10.{n}.0.0/23"), [192, 0, 2, n].into(), 9);
    [later, lease(&format!("10.{n}.1.0/24"), [198, 51, 100, n].into(), 2)]
}

/// A network of routes by gateways on the uplink.
fn network(kernel: &FakeKernel) -> KernelNetwork {
    let footprint = Footprint {
        networks: vec![NETWORK.parse().unwrap()],
        routes_on: [uplink()].into(),
        ..Footprint::default()
    };
    let blueprint = Blueprint::new(1500, |subnets, offer, _, out| {
        for peer in offer.endpoints(subnets) {
            let gateway = peer.public.expect("a public address");
            let via = Via::Gateway { gateway, link: uplink(), onlink: true };
            out.push(Route { dst: peer.subnet, via, mtu: None }.into());
        }
        Ok(())
    })
    .with_footprint(footprint);
    let lease = NodeLease::Held(lease("10.255.0.0/24", [203, 0, 113, 1].into(), 1));
    let networks = [NETWORK.parse::<Subnet>().unwrap()].into_iter().collect();
    KernelNetwork::new(Arc::new(kernel.clone()), lease, networks, vec![blueprint])
}

async fn in_sync(handle: &NetworkHandle, peers: usize) {
    let mut status = handle.status.clone();
    let settled = status.wait_for(|status| status.in_sync && status.peers == peers);
    let settled = tokio::time::timeout(Duration::from_secs(1), settled).await.is_ok();
    assert!(settled, "not within a second: {:#?}", handle.status.borrow());
}

fn live(leases: LeaseSet) -> View {
    View { leases, origin: Origin::Live { revision: Revision(9) } }
}

/// A running network without peers.
async fn start(kernel: &FakeKernel) -> (FakeSubnets, NetworkHandle, JoinHandle<()>) {
    let subnets = FakeSubnets::new(NETWORK);
    subnets.set_view(live(LeaseSet::default()));
    let views = subnets.watch_leases().await.unwrap();
    let network = network(kernel);
    let handle = network.handle();
    let task = tokio::spawn(async move { drop(Box::new(network).run(views).await) });
    in_sync(&handle, 0).await;
    (subnets, handle, task)
}

#[tokio::test(start_paused = true)]
async fn only_accepted_peers_of_thousands_are_put() {
    // With one of these shifts, a slice ends between the two leases of a pair.
    for shift in 0..2_u8 {
        let kernel = FakeKernel::with_uplink("eth0");
        let (subnets, handle, task) = start(&kernel).await;
        tokio::time::sleep(Duration::from_secs(5)).await;

        let before = (0..shift).map(|_| lease("10.0.0.0/24", [203, 0, 113, 9].into(), 2));
        subnets.set_view(live(before.chain((1..=PAIRS).flat_map(pair)).collect()));
        in_sync(&handle, usize::from(PAIRS + shift)).await;
        let state = kernel.state();
        let there = |lease: &Lease| {
            let route = lease.subnets.iter().find_map(|subnet| state.get(&Key::Route(subnet)));
            let by_nexthop =
                |route| matches!(route, &Object::Route(Route { via: Via::Nexthop(_), .. }));
            assert!(route.is_none_or(by_nexthop), "{route:?}");
            route.is_some()
        };
        for [later, earlier] in (1..=PAIRS).map(pair) {
            assert!(
                there(&earlier) && !there(&later),
                "{shift}: {} and {}",
                earlier.subnets,
                later.subnets
            );
        }
        assert_eq!(handle.status.borrow().repaired, 0);
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_queue_longer_than_a_round_is_finished_without_events() {
    const PEERS: u16 = 9_000;
    let kernel = FakeKernel::with_uplink("eth0");
    let (subnets, handle, task) = start(&kernel).await;
    let peer = |n: u16| {
        let [high, low] = n.to_be_bytes();
        lease(&format!("10.{high}.{low}.0/24"), [198, 18, high, low].into(), 2)
    };
    subnets.set_view(live((0..PEERS).map(peer).collect()));
    in_sync(&handle, usize::from(PEERS)).await;
    assert_eq!(kernel.state().len(), 2 * usize::from(PEERS));
    task.abort();
}
