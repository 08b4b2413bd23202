//! A device that another program makes: the rest of the network waits for it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{Link, LinkKind, LinkName, Route, Tun, Via};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Config, Result, SubnetManager};
use flannel_route::{Host, JoinOptions};

const PATIENCE: Duration = Duration::from_secs(20);

fn device(mtu: u32, up: bool) -> Link {
    Link { name: "tun0".parse().unwrap(), mtu, up, kind: LinkKind::Tun(Tun) }
}

/// A tun device, and a route to all pods by it.
#[derive(Debug)]
struct Tunnel;

#[async_trait]
impl Backend for Tunnel {
    fn kind(&self) -> &'static str {
        "tunnel"
    }

    fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        let links = [device(0, true).name].into();
        Ok(Footprint { links, ..Footprint::of_routes(config, uplink) })
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let offer = Offer::new(node.uplink.public);
        let footprint = self.footprint(config, Some(node.uplink.name))?;
        let network = config.pod_networks().next().unwrap();
        Ok(Prepared::new(offer, move |_| {
            let mut blueprint = Blueprint::new(1472, |_, _, _, _| Ok(()));
            blueprint.footprint = footprint;
            blueprint.base.insert(device(1472, true));
            let via = Via::Link(device(0, true).name);
            blueprint.base.insert(Route { dst: network, via, mtu: None });
            Ok(blueprint)
        }))
    }
}

#[tokio::test]
async fn a_network_waits_for_a_device_that_another_program_makes() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let address: Dual<IpAddr> = [IpAddr::from([192, 0, 2, 1])].into_iter().collect();
    let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, address).with_reason("test");
    let host = Host::new(uplink, Arc::new(kernel.clone()), Arc::new(subnets.clone()));
    let config = subnets.network_config().await.unwrap();
    let network = host.join(&Tunnel, &config, JoinOptions::default()).await.unwrap().network;
    let mut status = network.handle().status;
    let run = tokio::spawn(network.run(subnets.watch_leases().await.unwrap()));

    let waiting = status.wait_for(|it| it.live && !it.settled);
    let waiting = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap().clone();
    assert_eq!(waiting.failing.iter().count(), 0, "it is no failure: {waiting:?}");
    assert!(!kernel.dump().iter().any(|object| object.contains("tun0")), "{:?}", kernel.dump());
    kernel.foreign_put(device(1500, false), 0);
    let settled = status.wait_for(|it| it.settled && it.in_sync);
    tokio::time::timeout(PATIENCE, settled).await.unwrap().unwrap();
    let there = kernel.dump();
    let has = |text: &str| there.iter().any(|object| object.contains(text));
    assert!(has("link tun0 mtu 1472 up") && has("route 10.1.0.0/16 dev tun0"), "{there:?}");
    run.abort();
}
