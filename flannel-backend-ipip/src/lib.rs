#![doc = include_str!("../README.md")]

use std::net::{IpAddr, Ipv4Addr};

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Built, Datapath, Env, ExternalInterface, Inlet, Node, Prepared,
};
use flannel_core::json::FieldError;
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{self, Link, LinkKind, LinkName, Object, Route, Via};
use flannel_core::status::Rejection;
use flannel_core::{Backend, Config, Error, Result, Subnets};

/// The backend type in leases.
const TYPE: &str = "ipip";
/// The name of the option.
const DIRECT_ROUTING: &str = "DirectRouting";
/// The size of the outer IP header, in bytes.
const OVERHEAD: u32 = 20;

/// The backend `ipip`: a tunnel device for IPv4 in IPv4, and a route to every peer's subnet with
/// the peer's public address as the gateway.
///
/// Option: `DirectRouting`, no tunnel to peers on the same link; default off. The MTU of pods is
/// that of the external interface less 20 bytes.
///
/// **Source**: flannel `pkg/backend/ipip/ipip.go`. Different on purpose: IPv6 is refused, where Go
/// flannel crashes, and an existing device is changed in place.
#[derive(Debug, Clone, Copy, Default)]
pub struct Ipip;

#[async_trait]
impl Backend for Ipip {
    fn kind(&self) -> &'static str {
        TYPE
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&[DIRECT_ROUTING])
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let mut datapath = Datapath::default();
        datapath.devices.v4 = Some(device());
        datapath.overhead.v4 = Some(OVERHEAD);
        datapath.inlets = vec![Inlet::Protocol(4)];
        datapath.direct = direct_routing(config)?;
        datapath.bare = datapath.direct;
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint {
            links: [device()].into(),
            networks: config.pod_networks().collect(),
            // Without DirectRouting too, so that its routes are deleted.
            routes_on: uplink.into_iter().collect(),
            // The blackholes of this node's own subnets.
            blackholes: true,
            ..Footprint::default()
        })
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        direct_routing(config)?;
        if config.networks.v6.is_some() {
            return Err(refuse("it carries IPv4 only, and EnableIPv6 is true".to_owned()));
        }
        let Some(uplink) = uplink else { return Ok(()) };
        local(uplink)?;
        let least = Family::V4.least_mtu() + OVERHEAD;
        if uplink.mtu < least {
            let (name, mtu) = (uplink.name, uplink.mtu);
            return Err(refuse(format!(
                "the MTU of {name} is {mtu}, and the tunnel needs {least}"
            )));
        }
        Ok(())
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        self.validate(config, Some(node.uplink))?;
        let (uplink, local) = (node.uplink.name, local(node.uplink)?);
        let mtu = node.uplink.mtu - OVERHEAD;
        let link =
            Link { name: device(), mtu, up: true, kind: LinkKind::Ipip(object::Ipip { local }) };
        node.may_change(vec![link.clone()]).await?;
        let public = Dual { v4: node.uplink.public.v4, v6: None };
        let offer = Offer { public, kind: TYPE.into(), ..Offer::default() };
        let direct = direct_routing(config)?.then_some(uplink);
        let footprint = self.footprint(config, Some(uplink))?;
        Ok(Prepared::new(offer, move |lease| {
            let plan = Plan { direct, local: local.into(), own: lease.lease().subnets };
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            (blueprint.lease_type, blueprint.footprint) = (Some(TYPE), footprint);
            blueprint.base = lease.tunnel(&Dual { v4: Some(link), v6: None });
            Ok(Built::Kernel(blueprint))
        }))
    }
}

/// The route to a peer.
#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Peers on this link are reached without a tunnel.
    direct: Option<LinkName>,
    /// The address of this node's external interface.
    local: IpAddr,
    /// This node's subnets.
    own: Subnets,
}

impl Plan {
    fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        objects: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let mut ends = offer.endpoints(subnets).filter(|end| end.subnet.family() == Family::V4);
        let end = ends.find_map(|end| Some((end.subnet, end.public?)));
        let Some((dst, gateway)) = end else {
            return Err(Rejection::Rejected("it has no public IPv4 address".into()));
        };
        // The plan also runs for this node's own lease.
        if gateway == self.local && !self.own.overlaps(subnets) {
            return Err(Rejection::OwnAddress(gateway));
        }
        let via = match self.direct.filter(|uplink| env.on_link(gateway) == Some(*uplink)) {
            Some(link) => Via::Gateway { gateway, link, onlink: false },
            None => Via::Gateway { gateway, link: device(), onlink: true },
        };
        objects.push(Route { dst, via, mtu: None }.into());
        Ok(())
    }
}

fn device() -> LinkName {
    "flannel.ipip".parse().expect("a valid name")
}

/// The source address of the tunnel.
fn local(uplink: &ExternalInterface) -> Result<Ipv4Addr> {
    match uplink.address.v4 {
        Some(IpAddr::V4(local)) => Ok(local),
        _ => Err(refuse(format!("{} has no IPv4 address", uplink.name))),
    }
}

fn direct_routing(config: &Config) -> Result<bool> {
    let read = || config.backend.fields()?.take(DIRECT_ROUTING, "true or false");
    let value: Result<Option<bool>, FieldError> = read();
    Ok(value.map_err(|error| refuse(error.to_string()))?.unwrap_or(false))
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: TYPE.into(), reason }
}
