//! The route engine with a custom backend, [`Hub`], which makes one route for each peer.

use std::sync::Arc;

use examples::Hub;
use flannel_core::SubnetManager;
use flannel_core::address::Family;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_netlink::{NetlinkKernel, iface::Selectors};
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry, Registry};

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(|| async {
        let config =
            r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "hub", "Router": "192.0.2.254"}}"#;
        let registry = Arc::new(MemoryRegistry::with_config(config));
        let peer = LeaseAttrs::from(Offer::default().with_kind("hub"));
        registry.create(&"10.1.7.0-24".parse()?, &peer, None).await?;
        let identity =
            Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
        let subnets = Arc::new(LocalManager::new(registry, identity));
        let kernel = Arc::new(NetlinkKernel::open()?);
        let iface = kernel.external_interface(
            &Selectors { iface: vec!["eth0".into()], ..Default::default() },
            [Family::V4],
        )?;
        let host = Host::new(iface, kernel, subnets.clone());
        let network = host
            .join(&Hub, &subnets.network_config().await?, JoinOptions::default())
            .await?
            .network;
        // A program that uses its subnet for longer also runs `hold_lease`: see `engines`.
        let mut status = network.handle().status;
        tokio::select! {
            ended = network.run(subnets.watch_leases().await?) => {
                anyhow::bail!("the network ended: {ended:?}")
            }
            synced = status.wait_for(|s| s.in_sync && s.peers == 1) => {
                println!("reached through the hub: {} peer", synced?.peers);
            }
        }
        Ok(())
    })
}
