#![doc = include_str!("../README.md")]

use std::net::IpAddr;

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Datapath, Env, ExternalInterface, LocalEnd, Node, Prepared, Transport, underlay_mtu,
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
/// Option: `DirectRouting`, off by default, reaches peers on the same link without the tunnel. The
/// MTU of pods is the MTU of the external interface less 20 bytes.
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
        datapath.transports = vec![Transport::Protocol(4)];
        datapath.direct = direct_routing(config)?;
        datapath.bare = datapath.direct;
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint { links: [device()].into(), ..Footprint::of_routes(config, uplink) })
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        direct_routing(config)?;
        if config.networks.v6.is_some() {
            return Err(refuse("it carries IPv4 only, and EnableIPv6 is true".to_owned()));
        }
        uplink.map(|uplink| uplink.needed(Family::V4)).transpose().map_err(refuse)?;
        underlay_mtu(None, uplink, &self.datapath(config)?.overhead).map_err(refuse)?;
        Ok(())
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let uplink = node.uplink.name;
        let addresses = node.uplink.address;
        let mtu = node.uplink.mtu - OVERHEAD;
        let Some(IpAddr::V4(local)) = addresses.v4 else {
            return Err(refuse(format!("{uplink} has no IPv4 address")));
        };
        let kind = LinkKind::Ipip(object::Ipip { local });
        let link = Link { name: device(), mtu, up: true, kind };
        node.may_change(vec![link.clone()]).await?;
        let public = Dual { v4: node.uplink.public.v4, v6: None };
        let offer = Offer::new(public);
        let direct = direct_routing(config)?.then_some(uplink);
        let footprint = self.footprint(config, Some(uplink))?;
        Ok(Prepared::new(offer, move |lease| {
            let local = LocalEnd { addresses, subnets: lease.lease().subnets };
            let plan = IpipPlan { direct, local };
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            blueprint.footprint = footprint;
            blueprint.base = lease.tunnel(&Dual { v4: Some(link), v6: None });
            Ok(blueprint)
        }))
    }
}

/// Plans the route to a peer.
#[derive(Debug, Clone, Copy)]
struct IpipPlan {
    /// Peers on this link are reached without a tunnel.
    direct: Option<LinkName>,
    local: LocalEnd,
}

impl IpipPlan {
    fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        objects: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let end = offer.endpoints(subnets).find(|end| end.subnet.family() == Family::V4);
        let Some((dst, gateway)) = end.and_then(|end| Some((end.subnet, end.public?))) else {
            return Err(Rejection::Rejected("it has no public IPv4 address".into()));
        };
        let direct = self.direct.filter(|uplink| env.on_link(gateway) == Some(*uplink));
        self.local.check(gateway, subnets, direct.is_some())?;
        let via = match direct {
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

fn direct_routing(config: &Config) -> Result<bool> {
    let refuse_field = |error: FieldError| refuse(error.to_string());
    let fields = config.backend.fields().map_err(refuse_field)?;
    let value = fields.take::<bool>(DIRECT_ROUTING, "true or false").map_err(refuse_field)?;
    Ok(value.unwrap_or(false))
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: TYPE.into(), reason }
}
