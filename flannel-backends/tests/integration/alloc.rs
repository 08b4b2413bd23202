//! The backend on a fake kernel: it accepts every lease and installs nothing.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backends::Alloc;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::Footprint;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, SubnetManager};
use flannel_route::{Host, JoinOptions};

#[tokio::test]
async fn every_lease_is_accepted_and_nothing_is_installed() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let address = [IpAddr::from([192, 0, 2, 1])].into_iter().collect();
    let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
        .with_reason("the test says so");
    let host = Host::new(uplink, Arc::new(kernel.clone()), Arc::new(subnets.clone()));
    let config = subnets.network_config().await.unwrap();
    assert_eq!(Alloc.footprint(&config, None).unwrap(), Footprint::default());
    let network = host.join(&Alloc, &config, JoinOptions::default()).await.unwrap().network;
    let handle = network.handle();
    assert_eq!((handle.mtu, handle.lease.attrs.preferred.kind.as_ref()), (1500, ""));

    subnets.put("10.1.7.0-24", "192.0.2.7");
    let views = subnets.watch_leases().await.unwrap();
    let task = tokio::spawn(network.run(views));
    let mut status = handle.status.clone();
    status.wait_for(|status| status.in_sync && status.peers == 1).await.unwrap();
    assert!(kernel.dump().is_empty());
    let accepted = handle.accepted_peers();
    let peers: Vec<_> = accepted.iter().map(|lease| lease.subnets.to_string()).collect();
    assert_eq!(peers, ["10.1.7.0-24"]);
    task.abort();
}
