#![doc = include_str!("../README.md")]

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::backend::{Advice, Blueprint, Datapath, Env, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{LinkName, Object, Route, Via};
use flannel_core::status::Rejection;
use flannel_core::{Backend, Config, Error, Result, Subnets};

/// The backend type in leases.
const TYPE: &str = "host-gw";

/// The backend `host-gw`: a route to every peer's subnet, through the peer itself. All nodes must
/// share a link.
///
/// No options. **Source**: flannel `pkg/backend/hostgw/hostgw.go`, `pkg/backend/route_network.go`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostGw;

#[async_trait]
impl Backend for HostGw {
    fn kind(&self) -> &'static str {
        TYPE
    }

    /// The options of Go flannel on Windows, which are ignored.
    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&["Name", "DNSServerList"])
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        let mut datapath = Datapath::default();
        datapath.bare = true;
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint::of_routes(config, uplink))
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let Some(iface) = uplink else { return Ok(()) };
        for family in config.networks.families() {
            let refuse = |reason| Error::Backend { backend: TYPE.into(), reason };
            let address = iface.needed(family).map_err(refuse)?;
            if let Some(public) = iface.public[family].filter(|public| *public != address) {
                return Err(refuse(format!(
                    "the public address {public} is not the address of {} ({address}): peers use \
                     it as their gateway, so it must be on the shared link (NAT needs a tunnel, \
                     for example vxlan)",
                    iface.name
                )));
            }
        }
        Ok(())
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        node.may_change(Vec::new()).await?;
        let offer = Offer::new(Dual::from_fn(|family| {
            node.uplink.address[family].filter(|_| config.networks[family].is_some())
        }));
        let uplink = node.uplink.name;
        let mtu = node.uplink.mtu;
        let footprint = self.footprint(config, Some(uplink))?;
        Ok(Prepared::new(offer, move |_| {
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan(uplink, subnets, offer, env, objects)
            });
            blueprint.footprint = footprint;
            Ok(blueprint)
        }))
    }
}

/// One route per family, if the peer is on the link.
fn plan(
    uplink: LinkName,
    subnets: &Subnets,
    offer: &Offer,
    env: &Env<'_>,
    objects: &mut Vec<Object>,
) -> Result<(), Rejection> {
    let before = objects.len();
    let mut too_far = None;
    for peer in offer.endpoints(subnets) {
        // The other family may have one.
        let Some(gateway) = peer.public else { continue };
        if env.on_link(gateway) == Some(uplink) {
            let via = Via::Gateway { gateway, link: uplink, onlink: false };
            objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
        } else {
            let reason = format!(
                "its public address {gateway} is not directly on the link {uplink}, which host-gw \
                 needs"
            );
            env.advise(Advice::about(gateway, reason.as_str()));
            too_far = Some(reason);
        }
    }
    if objects.len() == before {
        let reason = too_far.unwrap_or_else(|| "it has no public address".into());
        return Err(Rejection::Rejected(reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_without_an_address_is_rejected_whatever_other_plans_added() {
        let uplink: LinkName = "eth0".parse().unwrap();
        let dst = "10.1.8.0/24".parse().unwrap();
        let mut objects = vec![Route { dst, via: Via::Link(uplink), mtu: None }.into()];
        let subnets = "10.1.7.0-24".parse().unwrap();
        let env = Env::new(&|_| None);
        let rejected = plan(uplink, &subnets, &Offer::default(), &env, &mut objects);
        assert!(rejected.is_err() && objects.len() == 1, "{rejected:?} {objects:?}");
    }
}
