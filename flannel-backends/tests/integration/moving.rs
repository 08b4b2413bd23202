//! A host moves from vxlan to host-gw on the fake kernel: the networks of both in one.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_backends::Alloc;
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::LeaseAttrs;
use flannel_core::object::Key;
use flannel_core::testing::{Call, FakeKernel, FakeSubnets, Operation};
use flannel_core::{Config, SubnetManager};
use flannel_route::{BackendInUse, Host, JoinOptions};

const OLD: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;

fn host(kernel: &FakeKernel, subnets: &FakeSubnets) -> Host {
    // So that the kernel has the routes of the plans.
    kernel.use_nexthops(false);
    let address: IpAddr = "192.0.2.1".parse().unwrap();
    let uplink =
        ExternalInterface::new("eth0".parse().unwrap(), 1500, [address].into_iter().collect())
            .with_reason("it has the default route");
    Host::new(uplink, Arc::new(kernel.clone()), Arc::new(subnets.clone()))
}

/// The lease of a peer with these offers, the preferred one first.
fn peer(n: u8, kinds: &[&str]) -> LeaseAttrs {
    let offer = |kind: &&str| {
        let data = format!(r#","BackendData":{{"VNI":1,"VtepMAC":"02:00:00:00:00:{n:02x}"}}"#);
        let data = if *kind == "vxlan" { data } else { String::new() };
        format!(r#""PublicIP":"192.0.2.{n}","BackendType":"{kind}"{data}"#)
    };
    let others: Vec<String> =
        kinds[1..].iter().map(|kind| format!("{{{}}}", offer(kind))).collect();
    let text = format!(r#"{{{},"OtherOffers":[{}]}}"#, offer(&kinds[0]), others.join(","));
    LeaseAttrs::from_json(&text).unwrap()
}

fn configs() -> [Config; 2] {
    [OLD.to_owned(), OLD.replace("vxlan", "host-gw")].map(|text| Config::parse(&text).unwrap())
}

#[tokio::test]
async fn each_peer_is_reached_by_the_best_common_offer_and_no_route_is_deleted() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(OLD);
    subnets.put_attrs("10.1.7.0-24", peer(7, &["vxlan"]));
    subnets.put_attrs("10.1.8.0-24", peer(8, &["vxlan"]));
    let host = host(&kernel, &subnets);
    let [old, new] = configs();
    let vxlan = BackendInUse::new(&VxlanBackend, &old);
    let host_gw = BackendInUse::new(&HostGw, &new);
    let mut macs = Vec::new();
    for (backends, kinds, gateways) in [
        (vec![vxlan.with_offer_rank(Some(0))], "vxlan", ""),
        (vec![vxlan.with_offer_rank(Some(0)), host_gw.with_offer_rank(None)], "vxlan", ""),
        (
            vec![host_gw.with_offer_rank(Some(1)), vxlan.with_offer_rank(Some(0))],
            "vxlan host-gw",
            "8",
        ),
        (
            vec![host_gw.with_offer_rank(Some(0)), vxlan.with_offer_rank(Some(1))],
            "host-gw vxlan",
            "78",
        ),
        (vec![host_gw.with_offer_rank(Some(0)), vxlan.with_offer_rank(None)], "host-gw", "78"),
    ] {
        let network = host.join_all(&backends, JoinOptions::default()).await.unwrap().network;
        let handle = network.handle();
        let views = subnets.watch_leases().await.unwrap();
        let published: Vec<_> = handle.lease.attrs.offers().map(|it| it.kind.clone()).collect();
        assert_eq!((published.join(" ").as_str(), handle.mtu), (kinds, 1450));
        macs.extend(handle.lease.attrs.offers().filter_map(|offer| offer.data.v4.clone()));
        let task = tokio::spawn(network.run(views));
        let mut status = handle.status.clone();
        status.wait_for(|status| status.in_sync && status.peers == 2).await.unwrap();
        // While the network runs, peers offer more.
        if kinds.contains(' ') {
            subnets.put_attrs("10.1.8.0-24", peer(8, &["vxlan", "host-gw"]));
            if kinds.starts_with("host-gw") {
                subnets.put_attrs("10.1.7.0-24", peer(7, &["host-gw"]));
            }
        }
        let by_gateway = |n: char| {
            let route = format!("route 10.1.{n}.0/24 via 192.0.2.{n} dev eth0");
            kernel.dump().contains(&route)
        };
        let is_so = |n: char| by_gateway(n) == gateways.contains(n);
        status.wait_for(|status| status.in_sync && "78".chars().all(is_so)).await.unwrap();
        task.abort();
        let _ = task.await;
        // The device stays for peers that still send to it, and each change is made in place.
        assert!(kernel.dump().iter().any(|object| object.starts_with("link flannel.1")));
        let calls = kernel.take_calls();
        let is_route = |call: &Call| matches!(call.key, Some(Key::Route(_)));
        let is_deletion = |call: &Call| call.operation == Operation::Delete;
        assert!(!calls.iter().any(|it| is_route(it) && is_deletion(it)), "{calls:?}");
        // The neighbour of a peer is deleted after its route was replaced.
        let first_deletion = calls.iter().position(is_deletion).unwrap_or(calls.len());
        assert!(!calls[first_deletion..].iter().any(is_route), "{calls:?}");
    }
    macs.dedup();
    assert_eq!(macs.len(), 1, "the published MAC address stays: {macs:?}");
    let only = host.join(&HostGw, &new, JoinOptions::default()).await.unwrap().network;
    assert_eq!(only.handle().mtu, 1500);
}

#[tokio::test]
async fn a_backend_that_cannot_move_runs_alone() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(OLD);
    let host = host(&kernel, &subnets);
    let [old, _] = configs();
    let backends = [BackendInUse::new(&VxlanBackend, &old), BackendInUse::new(&Alloc, &old)];
    let error = host.join_all(&backends, JoinOptions::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "backend alloc: it does not run beside another backend");
    assert!(kernel.take_calls().is_empty(), "vxlan was not prepared");
    host.join_all(&backends[1..], JoinOptions::default()).await.unwrap();
}

#[tokio::test]
async fn a_network_without_an_offer_is_refused() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(OLD);
    let host = host(&kernel, &subnets);
    let [old, new] = configs();
    let backends = [BackendInUse::new(&VxlanBackend, &old), BackendInUse::new(&HostGw, &new)];
    let unpublished = backends.map(|backend| backend.with_offer_rank(None));
    for (backends, names) in [(&unpublished[..], "vxlan, host-gw"), (&[], "(none)")] {
        let error = host.join_all(backends, JoinOptions::default()).await.unwrap_err();
        let expected = format!("backend {names}: at least one backend must publish its offer");
        assert_eq!(error.to_string(), expected);
    }
    assert!(kernel.take_calls().is_empty(), "nothing was done");
}
