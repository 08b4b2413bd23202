//! The udp backend on the fake kernel: which code moves the packets, and the objects if the kernel
//! does.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_udp::UdpBackend;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::testing::{FakeKernel, FakeSubnets, Operation};
use flannel_core::{Backend, Config, SubnetManager};
use flannel_firewall::{Guarded, Usual};
use flannel_netlink::testing::in_netns_async;
use flannel_route::{Host, JoinOptions};
use libc::EOPNOTSUPP;

fn address(text: &str) -> Dual<IpAddr> {
    [text.parse::<IpAddr>().unwrap()].into_iter().collect()
}

fn uplink() -> ExternalInterface {
    ExternalInterface::new("eth0".parse().unwrap(), 1500, address("192.0.2.1"))
        .with_reason("it has the default route")
}

fn config(path: &str, more: &str) -> String {
    format!(
        r#"{{"Network":"10.1.0.0/16"{more},
            "Backend":{{"Type":"udp","SourceCheck":false,"Path":"{path}"}}}}"#
    )
}

/// The code that moves the packets, or the reason why there is none. `has_devices`: the kernel has
/// the devices that can do it.
async fn path(
    config: &str,
    uplink: ExternalInterface,
    has_devices: bool,
) -> Result<&'static str, String> {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(config);
    if !has_devices {
        kernel.fail(1, EOPNOTSUPP, |call| call.operation == Operation::MayChange);
    }
    let config = subnets.network_config().await.unwrap();
    let host = Host::new(uplink, Arc::new(kernel), Arc::new(subnets));
    let backend = Guarded::new(UdpBackend::default(), "guard-udp", Usual::Always);
    match host.join(&backend, &config, JoinOptions::default()).await {
        Ok(joined) => Ok(joined.network.handle().path),
        // Only root may open it on some hosts.
        Err(error) if error.to_string().contains("/dev/net/tun") => Ok("a process"),
        Err(error) => Err(error.to_string()),
    }
}

#[tokio::test]
async fn the_kernel_moves_the_packets_if_it_can() {
    for (option, has_devices, expected) in [
        ("auto", true, Ok("the kernel")),
        ("auto", false, Ok("a process")),
        ("kernel", true, Ok("the kernel")),
        ("kernel", false, Err("planted fault")),
        ("process", true, Ok("a process")),
    ] {
        let found = path(&config(option, ""), uplink(), has_devices).await;
        match expected {
            Ok(expected) => assert_eq!(found.as_deref(), Ok(expected), "{option} {has_devices}"),
            Err(why) => assert!(found.as_ref().unwrap_err().contains(why), "{found:?}"),
        }
    }
}

/// Nothing checks packets in the kernel without a guard.
#[tokio::test]
async fn a_process_moves_the_packets_that_no_guard_checks() {
    for (check, expected) in
        [("true", "a process"), (r#""count""#, "a process"), ("false", "the kernel")]
    {
        let config = config("auto", "").replace("false", check);
        let subnets = FakeSubnets::with_config(&config);
        let config = subnets.network_config().await.unwrap();
        let host =
            Host::new(uplink(), Arc::new(FakeKernel::with_uplink("eth0")), Arc::new(subnets));
        let path = match host.join(&UdpBackend::default(), &config, JoinOptions::default()).await {
            Ok(joined) => joined.network.handle().path,
            Err(error) if error.to_string().contains("/dev/net/tun") => "a process",
            Err(error) => panic!("{error}"),
        };
        assert_eq!(path, expected, "{check}");
    }
}

/// A node behind a NAT may send from another address, which only a process learns.
#[test]
fn a_process_moves_the_packets_behind_a_nat_unless_nobody_checks_them() {
    // The trial of the guard is in the namespace.
    in_netns_async(|| async {
        let behind_nat = uplink().with_public(address("198.51.100.1"));
        let checked = |path| config(path, "").replace(r#""SourceCheck":false,"#, "");
        for (config, uplink, expected) in [
            (checked("auto"), uplink(), "the kernel"),
            (checked("auto"), behind_nat.clone(), "a process"),
            (checked("kernel"), behind_nat.clone(), "the kernel"),
            (config("auto", ""), behind_nat, "the kernel"),
        ] {
            assert_eq!(path(&config, uplink, true).await.as_deref(), Ok(expected), "{config}");
        }
    });
}

#[test]
fn the_kernel_has_a_route_for_each_peer() {
    in_netns_async(routes);
}

async fn routes() {
    let config = config("auto", "");
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&config);
    kernel.use_nexthops(false);
    let peer = Offer::new(address("192.0.2.7"));
    subnets.put_attrs("10.1.7.0-24", LeaseAttrs::from(peer));
    let config = subnets.network_config().await.unwrap();
    let state = tempfile::tempdir().unwrap();
    let host = Host::new(uplink(), Arc::new(kernel.clone()), Arc::new(subnets.clone()))
        .with_state_dir(state.path().to_owned());
    let backend = UdpBackend::default();
    let network = host.join(&backend, &config, JoinOptions::default()).await.unwrap().network;
    let mut status = network.handle().status;
    tokio::select! {
        ended = network.run(subnets.watch_leases().await.unwrap()) => panic!("{ended:?}"),
        settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
    }
    assert_eq!(
        kernel.dump(),
        [
            "link flannel0 mtu 1472 up type ipip local 192.0.2.1 dev eth0 encap fou \
             encap-dport 8285 encap-sport auto",
            "address 10.1.1.0/32 dev flannel0",
            "route 10.1.7.0/24 via 192.0.2.7 dev flannel0 onlink",
        ]
    );
}

#[test]
fn ipv6_needs_the_process() {
    let both = r#","EnableIPv6":true,"IPv6Network":"fd00:1::/48""#;
    let validate = |option| {
        let config = Config::parse(&config(option, both)).unwrap();
        UdpBackend::default().validate(&config, None).map_err(|error| error.to_string())
    };
    let refused = validate("kernel").unwrap_err();
    assert!(refused.contains("the kernel carries IPv4 only"), "{refused}");
    assert_eq!((validate("auto"), validate("process")), (Ok(()), Ok(())));
}
