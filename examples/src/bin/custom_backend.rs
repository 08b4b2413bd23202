//! A backend of your own: every peer is reached through one router, which the config names.

use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::{
    Backend, Blueprint, Config, Error, ExternalInterface, Host, KernelNetwork, LeaseAttrs,
    LinkName, Network, Owned, Rejected, Result, Route, State, SubnetManager, Via,
};
use flannel_netlink::{NetlinkKernel, iface::Selectors};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry, Registry};

/// `{"Type": "hub", "Router": "192.0.2.254"}`.
#[derive(Debug)]
struct Hub;

#[async_trait]
impl Backend for Hub {
    fn name(&self) -> &'static str {
        "hub"
    }

    fn owned(&self, uplink: LinkName, config: &Config) -> Result<Owned> {
        let networks = config.pod_networks().collect();
        Ok(Owned { networks, routes_on: [uplink].into(), ..Owned::default() })
    }

    fn check(&self, config: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        router(config).map(drop)
    }

    async fn register(&self, host: &Host, config: &Config) -> Result<Box<dyn Network>> {
        let router = router(config)?;
        let attrs = LeaseAttrs {
            public: host.iface.public,
            backend_type: "hub".into(),
            ..LeaseAttrs::default()
        };
        let link = host.iface.name;
        let blueprint = Blueprint {
            lease: host.subnets.acquire_lease(&attrs).await?,
            networks: config.pod_networks().collect(),
            mtu: host.iface.mtu,
            owned: self.owned(link, config)?,
            base: State::default(),
            plan: Box::new(move |peer, _env, objects| {
                if peer.attrs.backend_type != "hub" {
                    return Err(Rejected(format!(
                        "its backend type is {:?}",
                        peer.attrs.backend_type
                    )));
                }
                let via = Via::Gateway { gateway: router, link, onlink: false };
                objects.extend(peer.subnets.iter().map(|dst| Route { dst, via, mtu: None }.into()));
                Ok(())
            }),
        };
        Ok(Box::new(KernelNetwork::new(host.kernel.clone(), blueprint)))
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
        let peer = LeaseAttrs { backend_type: "hub".into(), ..LeaseAttrs::default() };
        registry.create(&"10.1.7.0-24".parse()?, &peer, None).await?;
        let identity =
            Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
        let subnets = Arc::new(LocalManager::new(registry, identity));
        let kernel = Arc::new(NetlinkKernel::open()?);
        let iface = kernel.external_interface(
            &Selectors { iface: vec!["eth0".into()], ..Default::default() },
            [flannel_core::Family::V4],
        )?;
        let host = Host { iface, kernel, subnets: subnets.clone(), identity: String::new() };
        let network = Hub.register(&host, &subnets.network_config().await?).await?;
        let mut status = network.handle().status;
        tokio::select! {
            ended = network.run(subnets.watch_leases().await?) => anyhow::bail!("the network ended: {ended:?}"),
            synced = status.wait_for(|s| s.in_sync && s.peers == 1) => println!("reached through the hub: {} peer", synced?.peers),
        }
        Ok(())
    })
}
