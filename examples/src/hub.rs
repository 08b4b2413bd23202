//! A custom backend: every peer is reached through one router of the config.

use std::net::IpAddr;

use async_trait::async_trait;
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{LinkName, Route, Via};
use flannel_core::{Backend, Config, Error, Result};

/// The backend `hub`. Its config is `{"Type": "hub", "Router": "192.0.2.254"}`.
#[derive(Debug)]
pub struct Hub;

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
        let networks = config.pod_networks().collect();
        let routes_on = uplink.into_iter().collect();
        Ok(Footprint { networks, routes_on, ..Footprint::default() })
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let gateway = router(config)?;
        let link = node.uplink.name;
        let mtu = node.uplink.mtu;
        let footprint = self.footprint(config, Some(link))?;
        Ok(Prepared::new(Offer::new(node.uplink.public), move |_| {
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

/// The option `Router`.
fn router(config: &Config) -> Result<IpAddr> {
    let refuse = |reason: String| Error::Backend { backend: "hub".into(), reason };
    let fields = config.backend.fields().map_err(|error| refuse(error.to_string()))?;
    let router =
        fields.parsed("Router", "the router's address").map_err(|e| refuse(e.to_string()))?;
    router.ok_or_else(|| refuse("Backend.Router is missing: name the router's address".into()))
}
