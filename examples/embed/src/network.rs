//! A network that runs itself: it prints its peers.

use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::backend::{Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, Offer, Origin, View};
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::object::LinkName;
use flannel_core::status::Status;
use flannel_core::{Backend, Config, Network, Result, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry, Registry};
use tokio::sync::watch;

/// The backend that builds it.
#[derive(Debug)]
struct Printing;

#[derive(Debug)]
struct Printer {
    handle: NetworkHandle,
    status: watch::Sender<Arc<Status>>,
}

#[async_trait]
impl Backend for Printing {
    fn kind(&self) -> &'static str {
        "printing"
    }

    fn can_move(&self) -> bool {
        false
    }

    fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, _: &Config, _: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint::default())
    }

    async fn prepare(&self, node: &Node<'_>, _: &Config) -> Result<Prepared> {
        let mtu = node.uplink.mtu;
        let offer = Offer::new(node.uplink.public);
        Ok(Prepared::with_network(offer, move |lease| {
            let (status, receiver) = watch::channel(Arc::default());
            let handle = NetworkHandle::new(lease.lease().clone(), mtu, receiver);
            Ok(Box::new(Printer { handle, status }))
        }))
    }
}

#[async_trait]
impl Network for Printer {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    async fn run(self: Box<Self>, mut views: watch::Receiver<View>) -> Result<Ended> {
        loop {
            let view = views.borrow_and_update().clone();
            for lease in view.leases.iter() {
                println!("peer {}", lease.subnets);
            }
            self.status.send_modify(|status| {
                let status = Arc::make_mut(status);
                status.peers = view.leases.len();
                status.live = matches!(view.origin, Origin::Live { .. });
                status.in_sync = status.live;
                status.leases = view.leases;
                status.own_in_place = true;
                status.settled = true;
            });
            if views.changed().await.is_err() {
                return Ok(Ended::ViewsClosed);
            }
        }
    }
}

/// Runs it until it knows its peer.
pub async fn itself() -> anyhow::Result<()> {
    let registry = Arc::new(MemoryRegistry::with_config(
        r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "printing"}}"#,
    ));
    let public = ["192.0.2.7".parse::<std::net::IpAddr>()?].into_iter().collect();
    let offer = Offer::new(public).with_kind("printing");
    registry.create(&"10.1.7.0-24".parse()?, &LeaseAttrs::from(offer), None).await?;
    let identity =
        Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
    let subnets = Arc::new(LocalManager::new(registry, identity));
    let kernel = Arc::new(NetlinkKernel::open()?);
    let selectors = Selectors { iface: vec!["eth0".into()], ..Selectors::default() };
    let uplink = kernel.external_interface(&selectors, [Family::V4])?;
    let host = Host::new(uplink, kernel, subnets.clone());
    let config = subnets.network_config().await?;
    let network = host.join(&Printing, &config, JoinOptions::default()).await?.network;
    let mut status = network.handle().status;
    tokio::select! {
        ended = network.run(subnets.watch_leases().await?) => anyhow::bail!("{ended:?}"),
        synced = status.wait_for(|status| status.in_sync && status.peers == 1) => {
            println!("{} peer", synced?.peers);
        }
    }
    Ok(())
}
