//! The route engine with a backend of this program: every peer is reached through one router.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{LinkName, Route, Via};
use flannel_core::{Backend, Config, Result, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry, Registry};

/// The backend, with the address of the router.
#[derive(Debug)]
struct Router(IpAddr);

#[async_trait]
impl Backend for Router {
    fn kind(&self) -> &'static str {
        "router"
    }

    fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint::of_routes(config, uplink))
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let link = node.uplink.name;
        let mtu = node.uplink.mtu;
        let gateway = self.0;
        let footprint = self.footprint(config, Some(link))?;
        let offer = Offer::new(node.uplink.public);
        Ok(Prepared::new(offer, move |_| {
            let mut blueprint = Blueprint::new(mtu, move |subnets, _offer, _env, objects| {
                let via = Via::Gateway { gateway, link, onlink: false };
                objects.extend(subnets.iter().map(|dst| Route { dst, via, mtu: None }.into()));
                Ok(())
            });
            blueprint.footprint = footprint;
            Ok(blueprint)
        }))
    }
}

/// Runs a network until the route to a peer is in place.
pub async fn routes() -> anyhow::Result<()> {
    let registry = Arc::new(MemoryRegistry::with_config(
        r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "router"}}"#,
    ));
    let peer = LeaseAttrs::from(Offer::default().with_kind("router"));
    registry.create(&"10.1.7.0-24".parse()?, &peer, None).await?;
    let identity =
        Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
    let subnets = Arc::new(LocalManager::new(registry, identity));
    let kernel = Arc::new(NetlinkKernel::open()?);
    let selectors = Selectors { iface: vec!["eth0".into()], ..Selectors::default() };
    let uplink = kernel.external_interface(&selectors, [Family::V4])?;
    let host = Host::new(uplink, kernel, subnets.clone());
    let config = subnets.network_config().await?;
    let backend = Router("192.0.2.254".parse()?);
    let network = host.join(&backend, &config, JoinOptions::default()).await?.network;
    let mut status = network.handle().status;
    tokio::select! {
        ended = network.run(subnets.watch_leases().await?) => anyhow::bail!("{ended:?}"),
        synced = status.wait_for(|status| status.in_sync && status.peers == 1) => {
            println!("routes to {} peer", synced?.peers);
        }
    }
    Ok(())
}
