//! A backend of your own: every peer is reached through one router, which the config names.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::backend::{Blueprint, Built, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{LinkName, Route, Via};
use flannel_core::{Backend, Config, Error, Result, SubnetManager};
use flannel_netlink::{NetlinkKernel, iface::Selectors};
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry, Registry};

/// `{"Type": "hub", "Router": "192.0.2.254"}`.
#[derive(Debug)]
struct Hub;

#[async_trait]
impl Backend for Hub {
    fn kind(&self) -> &'static str {
        "hub"
    }

    fn validate(&self, config: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        router(config).map(drop)
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        let (networks, routes_on) = (config.pod_networks().collect(), uplink.into_iter().collect());
        Ok(Footprint { networks, routes_on, ..Footprint::default() })
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let (gateway, link, mtu) = (router(config)?, node.uplink.name, node.uplink.mtu);
        let (public, footprint) = (node.uplink.public, self.footprint(config, Some(link))?);
        let offer = Offer { public, kind: self.kind().into(), ..Offer::default() };
        Ok(Prepared::new(offer, move |_| {
            let mut blueprint = Blueprint::new(mtu, move |subnets, _offer, _env, objects| {
                let via = Via::Gateway { gateway, link, onlink: false };
                objects.extend(subnets.iter().map(|dst| Route { dst, via, mtu: None }.into()));
                Ok(())
            });
            (blueprint.lease_type, blueprint.footprint) = (Some("hub"), footprint);
            Ok(Built::Kernel(blueprint))
        }))
    }
}

/// The option `Router`.
fn router(config: &Config) -> Result<IpAddr> {
    let refuse = |reason: String| Error::Backend { backend: "hub".into(), reason };
    let fields = config.backend.fields().map_err(|error| refuse(error.to_string()))?;
    let router =
        fields.parsed("Router", "the router's address").map_err(|e| refuse(e.to_string()))?;
    router.ok_or_else(|| refuse("Backend.Router is missing: name the router's address".into()))
}

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(|| async {
        let config =
            r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "hub", "Router": "192.0.2.254"}}"#;
        let registry = Arc::new(MemoryRegistry::with_config(config));
        let peer = LeaseAttrs::from(Offer { kind: "hub".into(), ..Offer::default() });
        registry.create(&"10.1.7.0-24".parse()?, &peer, None).await?;
        let identity =
            Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
        let subnets = Arc::new(LocalManager::new(registry, identity));
        let kernel = Arc::new(NetlinkKernel::open()?);
        let iface = kernel.external_interface(
            &Selectors { iface: vec!["eth0".into()], ..Default::default() },
            [flannel_core::address::Family::V4],
        )?;
        let host = Host::new(iface, kernel, subnets.clone());
        let network =
            host.join(&Hub, &subnets.network_config().await?, JoinOptions::default()).await?;
        let mut status = network.handle().status;
        tokio::select! {
            ended = network.run(subnets.watch_leases().await?) => anyhow::bail!("the network ended: {ended:?}"),
            synced = status.wait_for(|s| s.in_sync && s.peers == 1) => println!("reached through the hub: {} peer", synced?.peers),
        }
        Ok(())
    })
}
