//! The host-gw backend on the fake kernel: its routes for different leases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_hostgw::HostGw;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{Footprint, Outcome};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::Change;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Kernel, Subnet, SubnetManager};
use flannel_route::{EngineOptions, Host, JoinOptions};

const DUAL: &str = r#"{
    "Network": "10.1.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:1::/48",
    "Backend": {"Type":"host-gw"}
}"#;

/// A host whose kernel uses no nexthop objects, so that the kernel has the routes of the plan.
fn host(kernel: &FakeKernel, subnets: &FakeSubnets) -> Host {
    kernel.use_nexthops(false);
    let address: Dual<IpAddr> =
        ["192.0.2.1", "2001:db8::1"].into_iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
    Host::new(
        ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("it has the default route"),
        Arc::new(kernel.clone()),
        Arc::new(subnets.clone()),
    )
}

fn peer(public: &[&str]) -> LeaseAttrs {
    LeaseAttrs::from(
        Offer::new(public.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
            .with_kind("host-gw"),
    )
}

#[tokio::test]
async fn a_route_for_every_peer_on_the_link() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(DUAL);
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer(&["192.0.2.7", "2001:db8::7"]));
    subnets.put_attrs("10.1.8.0-24&fd00:1:0:8::-64", peer(&["198.51.100.8", "2001:db8::8"]));
    subnets.put_attrs("10.1.9.0-24", peer(&["192.0.2.9"]));
    subnets.put_attrs("10.1.10.0-24", peer(&["203.0.113.10"]));
    let network = host(&kernel, &subnets)
        .join(&HostGw, &subnets.network_config().await.unwrap(), JoinOptions::default())
        .await
        .unwrap()
        .network;
    let handle = network.handle();
    assert_eq!(handle.mtu, 1500);
    assert_eq!(
        handle.lease.attrs.to_json(),
        r#"{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8::1","BackendType":"host-gw"}"#
    );
    let views = subnets.watch_leases().await.unwrap();
    let task = tokio::spawn(network.run(views));
    let mut status = handle.status.clone();
    let far = "10.1.8.0-24&fd00:1:0:8::-64";
    let first = status.wait_for(|status| status.in_sync).await.unwrap().clone();
    let reason =
        "its public address 198.51.100.8 is not directly on the link eth0, which host-gw needs";
    let farther =
        "its public address 203.0.113.10 is not directly on the link eth0, which host-gw needs";
    assert_eq!(
        first.advisories.keys().map(ToString::to_string).collect::<Vec<_>>(),
        [format!("the lease {far}: {reason}")],
        "the reason of a rejection is no advisory"
    );
    assert_eq!(first.rejected.get(&"10.1.10.0-24".parse().unwrap()).unwrap().to_string(), farther);
    let near = [
        "route 10.1.7.0/24 via 192.0.2.7 dev eth0",
        "route 10.1.9.0/24 via 192.0.2.9 dev eth0",
        "route fd00:1:0:7::/64 via 2001:db8::7 dev eth0",
        "route fd00:1:0:8::/64 via 2001:db8::8 dev eth0",
    ];
    assert_eq!(kernel.dump(), near);

    // The subnet of the underlay becomes larger. The peer is now on the link.
    let on_link: Vec<Subnet> =
        ["192.0.2.0/24", "2001:db8::/64", "198.51.100.0/24"].map(|s| s.parse().unwrap()).into();
    kernel.set_on_link("eth0", &on_link);
    status.wait_for(|status| status.in_sync && status.advisories.is_empty()).await.unwrap();
    assert_eq!(kernel.dump().len(), 5);

    // If a peer moves, one route is replaced.
    subnets.put_attrs("10.1.9.0-24", peer(&["192.0.2.99"]));
    let moved = "route 10.1.9.0/24 via 192.0.2.99 dev eth0".to_owned();
    status.wait_for(|status| status.in_sync && kernel.dump().contains(&moved)).await.unwrap();
    task.abort();
}

#[tokio::test]
async fn unused_addresses_of_the_own_subnets_are_dropped_if_the_option_is_set() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(DUAL);
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer(&["192.0.2.7", "2001:db8::7"]));
    let config = subnets.network_config().await.unwrap();
    let v4 = "route blackhole 10.1.1.0/24 metric";
    let v6 = "route blackhole fd00:1:0:1::/64 metric";
    let dropped =
        || kernel.dump().into_iter().filter(|line| line.contains("blackhole")).collect::<Vec<_>>();
    for wanted in [true, false] {
        let engine = EngineOptions::default().with_drop_unused_addresses(wanted);
        let options = JoinOptions::default().with_engine(engine);
        let network =
            host(&kernel, &subnets).join(&HostGw, &config, options).await.unwrap().network;
        let handle = network.handle();
        let views = subnets.watch_leases().await.unwrap();
        let task = tokio::spawn(network.run(views));
        let mut status = handle.status.clone();
        status.wait_for(|status| status.in_sync && status.peers == 1).await.unwrap();
        if wanted {
            assert!(
                dropped()[0].starts_with(v4) && dropped()[1].starts_with(v6),
                "{:?}",
                dropped()
            );
            // Another program deletes one of the routes.
            let route =
                kernel.state().iter().find(|o| o.to_string().starts_with(v4)).unwrap().clone();
            kernel.other().apply(&Footprint::default(), &[Change::Delete(route)]);
            status.wait_for(|status| status.in_sync && status.repaired == 1).await.unwrap();
            assert_eq!(dropped().len(), 2);
        } else {
            assert_eq!(dropped(), [""; 0], "the routes of an earlier run are removed");
        }
        task.abort();
    }
}

#[tokio::test]
async fn a_public_address_of_no_interface_is_refused() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(DUAL);
    let config = subnets.network_config().await.unwrap();
    let mut nat = host(&kernel, &subnets);
    nat.uplink.public.v6 = Some("2001:db8:99::1".parse().unwrap());
    let error = nat.join(&HostGw, &config, JoinOptions::default()).await.unwrap_err().to_string();
    assert!(error.contains("2001:db8:99::1 is not the address of eth0 (2001:db8::1)"), "{error}");
    let mut bare = host(&kernel, &subnets);
    bare.uplink.address.v4 = None;
    let error = bare.join(&HostGw, &config, JoinOptions::default()).await.unwrap_err().to_string();
    assert!(error.contains("eth0 has no IPv4 address"), "{error}");
    for iface in [&nat.uplink, &bare.uplink] {
        let mut this = host(&kernel, &subnets);
        this.uplink = iface.clone();
        let refused = this.join(&HostGw, &config, JoinOptions::default()).await;
        let judged = HostGw.validate(&config, Some(iface)).unwrap_err();
        assert_eq!(
            judged.to_string(),
            refused.unwrap_err().to_string(),
            "validate and join return the same error"
        );
    }
    HostGw.validate(&config, Some(&host(&kernel, &subnets).uplink)).unwrap();
    HostGw.validate(&config, None).unwrap();
}

/// Routes of an earlier config go, and no default route carries packets to pods.
#[tokio::test]
async fn a_config_that_requires_encryption_makes_no_route_to_a_peer() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(DUAL);
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer(&["192.0.2.7", "2001:db8::7"]));
    let host = host(&kernel, &subnets);
    for required in [false, true, false] {
        let text = DUAL.replacen('{', &format!(r#"{{"RequireEncryption":{required},"#), 1);
        let config = flannel_core::Config::parse(&text).unwrap();
        let network = host.join(&HostGw, &config, JoinOptions::default()).await.unwrap().network;
        let mut status = network.handle().status;
        let task = tokio::spawn(network.run(subnets.watch_leases().await.unwrap()));
        let now = status.wait_for(|status| status.in_sync).await.unwrap().clone();
        let expected = if required {
            ["route blackhole 10.1.0.0/16", "route blackhole fd00:1::/48"]
        } else {
            [
                "route 10.1.7.0/24 via 192.0.2.7 dev eth0",
                "route fd00:1:0:7::/64 via 2001:db8::7 dev eth0",
            ]
        };
        assert_eq!(kernel.dump(), expected);
        let rejected: Vec<String> = now.rejected.values().map(ToString::to_string).collect();
        let why = "the network config has RequireEncryption, and the backend type \"host-gw\" does \
                   not encrypt";
        assert_eq!(rejected, if required { vec![why] } else { Vec::new() });
        task.abort();
        let _ = task.await;
    }
    let config = subnets.network_config().await.unwrap();
    let footprint = HostGw.footprint(&config, Some("eth0".parse().unwrap())).unwrap();
    let route = flannel_core::object::Route {
        dst: "10.1.0.0/16".parse().unwrap(),
        via: flannel_core::object::Via::Blackhole,
        mtu: None,
    };
    assert!(kernel.apply(&footprint, &[Change::Put(route.into())]).iter().all(Outcome::is_done));
    flannel_route::ready_for_go(&kernel, &footprint, false).unwrap();
    assert!(!kernel.dump().iter().any(|line| line.contains("blackhole")), "for Go flannel");
}
