//! The ipip backend on the fake kernel: its objects for different leases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_ipip::Ipip;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Config, SubnetManager};
use flannel_route::{Host, JoinOptions};

const CONFIG: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"ipip"}}"#;

fn address(text: &str) -> Dual<IpAddr> {
    [text.parse::<IpAddr>().unwrap()].into_iter().collect()
}

/// Behind NAT: other nodes reach it at another address.
fn uplink() -> ExternalInterface {
    ExternalInterface::new("eth0".parse().unwrap(), 1500, address("192.0.2.1"))
        .with_public(address("198.51.100.1"))
        .with_reason("it has the default route")
}

/// A host whose kernel uses no nexthop objects, so that the kernel has the objects of the plan.
fn host(kernel: &FakeKernel, subnets: &FakeSubnets) -> Host {
    kernel.use_nexthops(false);
    Host::new(uplink(), Arc::new(kernel.clone()), Arc::new(subnets.clone()))
}

fn peer(public: &str) -> LeaseAttrs {
    LeaseAttrs::from(Offer::new(address(public)).with_kind("ipip"))
}

#[tokio::test]
async fn a_route_for_every_peer_through_the_tunnel_or_without_it() {
    for (direct, near) in [
        (false, "route 10.1.7.0/24 via 192.0.2.7 dev flannel.ipip onlink"),
        (true, "route 10.1.7.0/24 via 192.0.2.7 dev eth0"),
    ] {
        let backend = format!(r#"{{"Type":"ipip","DirectRouting":{direct}}}"#);
        let config = CONFIG.replace(r#"{"Type":"ipip"}"#, &backend);
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(&config);
        subnets.put_attrs("10.1.7.0-24", peer("192.0.2.7"));
        subnets.put_attrs("10.1.8.0-24", peer("203.0.113.8"));
        // The address of the tunnel of this node.
        subnets.put_attrs("10.1.9.0-24", peer("192.0.2.1"));
        let config = subnets.network_config().await.unwrap();
        let network = host(&kernel, &subnets)
            .join(&Ipip, &config, JoinOptions::default())
            .await
            .unwrap()
            .network;
        let handle = network.handle();
        assert_eq!(handle.mtu, 1480);
        assert_eq!(
            handle.lease.attrs.to_json(),
            r#"{"PublicIP":"198.51.100.1","PublicIPv6":null,"BackendType":"ipip"}"#
        );
        let mut status = handle.status.clone();
        tokio::select! {
            ended = network.run(subnets.watch_leases().await.unwrap()) => panic!("{ended:?}"),
            settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
        }
        let rejected = status.borrow().rejected.clone();
        let own = rejected.get(&"10.1.9.0-24".parse().unwrap()).unwrap().to_string();
        assert!(own.contains("192.0.2.1"), "{own}");
        assert_eq!(
            kernel.dump(),
            [
                "link flannel.ipip mtu 1480 up type ipip local 192.0.2.1",
                "address 10.1.1.0/32 dev flannel.ipip",
                near,
                "route 10.1.8.0/24 via 203.0.113.8 dev flannel.ipip onlink",
            ]
        );
    }
}

#[test]
fn configs_and_interfaces_that_it_cannot_serve_are_refused() {
    let refused = |config: &str, uplink: Option<&ExternalInterface>| {
        Ipip.validate(&Config::parse(config).unwrap(), uplink).unwrap_err().to_string()
    };
    Ipip.validate(&Config::parse(CONFIG).unwrap(), Some(&uplink())).unwrap();
    let v6 = r#"{"EnableIPv6":true,"IPv6Network":"fd00:1::/48","#;
    let dual = CONFIG.replacen('{', v6, 1);
    assert!(refused(&dual, None).contains("EnableIPv6 is true"), "{}", refused(&dual, None));
    let wrong = CONFIG.replace(r#""ipip""#, r#""ipip","DirectRouting":"yes""#);
    assert!(refused(&wrong, None).contains("DirectRouting"), "{}", refused(&wrong, None));
    let narrow = uplink().with_mtu(87);
    assert!(refused(CONFIG, Some(&narrow)).contains("87 is too small for IPv4: at least 88"));
    let bare = uplink().with_address(Dual::default());
    assert!(refused(CONFIG, Some(&bare)).contains("eth0 has no IPv4 address"));
}

/// Every node of a cluster writes leases.
#[tokio::test]
async fn hostile_leases_are_rejected_with_the_reason_and_change_nothing() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(CONFIG);
    subnets.put_attrs("10.1.7.0-24", peer("192.0.2.7"));
    let config = subnets.network_config().await.unwrap();
    let host = host(&kernel, &subnets);
    let network = host.join(&Ipip, &config, JoinOptions::default()).await.unwrap().network;
    let own = network.handle().lease.subnets.to_string();
    let mut status = network.handle().status;
    let task = tokio::spawn(network.run(subnets.watch_leases().await.unwrap()));
    status.wait_for(|status| status.in_sync).await.unwrap();
    let before = kernel.dump();
    let half = own.replace(".0-24", ".128-25");
    let of = |kind: &'static str, public| LeaseAttrs::from(Offer::new(public).with_kind(kind));
    let hostile = [
        ("10.2.1.0-24", peer("192.0.2.50"), "outside the pod network 10.1.0.0/16"),
        (&*half, peer("192.0.2.50"), "overlaps this node's own lease"),
        ("10.1.7.128-25", peer("192.0.2.50"), "overlaps the earlier lease 10.1.7.0-24"),
        ("10.1.20.0-24", peer("127.0.0.1"), "127.0.0.1 is not a unicast host address"),
        ("10.1.21.0-24", peer("224.0.0.1"), "224.0.0.1 is not a unicast host address"),
        ("10.1.22.0-24", peer("255.255.255.255"), "is not a unicast host address"),
        ("10.1.23.0-24", of("ipip", Dual::default()), "no public IPv4 address"),
        ("10.1.24.0-24", of("ipip", address("2001:db8::7")), "no public IPv4 address"),
        ("10.1.26.0-24", peer("192.0.2.1"), "192.0.2.1"),
        ("10.1.27.0-24", peer("10.1.27.9"), "10.1.27.9 lies inside its own subnet"),
        ("10.1.28.0-24", peer("10.1.99.9"), "10.1.99.9 lies inside the pod network"),
        ("10.1.29.0-24", peer(&own.replace(".0-24", ".9")), "inside this node's own lease"),
        ("10.1.30.0-24", of("vxlan", address("192.0.2.50")), "\"vxlan\", this node's is \"ipip\""),
    ];
    for (key, attrs, _) in &hostile {
        subnets.put_attrs(key, attrs.clone());
    }
    let all = status.wait_for(|status| status.in_sync && status.rejected.len() == hostile.len());
    let rejected = all.await.unwrap().rejected.clone();
    for (key, _, says) in &hostile {
        let why = rejected.get(&key.parse().unwrap()).unwrap().to_string();
        assert!(why.contains(says), "{key}: {why}");
    }
    assert_eq!(kernel.dump(), before);
    task.abort();
}
