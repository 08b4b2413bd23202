//! A backend that no other crate of this project knows.
//!
//! It differs from all other backends in each point on which another crate could rely by mistake:
//! - its name is not the type in its leases,
//! - one of its options has no default,
//! - one device carries both families, always over IPv4.

use std::net::{IpAddr, Ipv4Addr};

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::backend::{
    Blueprint, Datapath, Env, ExternalInterface, Node, NodeLease, Prepared, Transport,
};
use flannel_core::json::{FieldError, Fields};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{
    Addr, Fdb, Link, LinkName, MacAddr, Neigh, Object, ObjectSet, Route, Via, Vxlan,
};
use flannel_core::status::Rejection;
use flannel_core::{Backend, Config, Error, Result, Subnets};

/// The backend type in leases.
const LEASE_TYPE: &str = "lane/1";

/// The header that the device adds to each packet of either family, in bytes.
const OVERHEAD: u32 = 50;

/// The backend `lane`: a tunnel device for both families over IPv4. Peers derive the address of a
/// node's device from the node's public address, so that a lease carries the number of its lane
/// only.
///
/// Options: `Lane`, a number from 1 to 4094, which is required; `Port`, a UDP port, 6999 without
/// it; `Encrypted`, whether its packets count as encrypted, false without it. They never are: it
/// shows what `RequireEncryption` does with a backend that encrypts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lane;

/// The options of the `Backend` object.
#[derive(Debug, Clone, Copy)]
struct Options {
    lane: u32,
    port: u16,
    device: LinkName,
    encrypted: bool,
}

impl Options {
    fn of(config: &Config) -> Result<Self> {
        Self::parse(config).map_err(|error| refuse(error.to_string()))
    }

    fn parse(config: &Config) -> Result<Self, FieldError> {
        let fields = config.backend.fields()?;
        let lane = lane(&fields)?;
        let expected = "a UDP port";
        let port = fields.take("Port", expected)?.unwrap_or(6999);
        let encrypted = fields.take("Encrypted", "true or false")?.unwrap_or(false);
        let device = format!("lane{lane}").parse();
        let device = device.map_err(|_| fields.error("Lane", &lane, "a shorter number"))?;
        Ok(Self { lane, port, device, encrypted })
    }
}

/// The field `Lane`, of the config or of a lease.
fn lane(fields: &Fields) -> Result<u32, FieldError> {
    let expected = "a number from 1 to 4094";
    match fields.take("Lane", expected)? {
        Some(lane @ 1..=4094) => Ok(lane),
        Some(lane) => Err(fields.error("Lane", &lane, expected)),
        None => Err(fields.error("Lane", &"nothing", expected)),
    }
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: "lane".into(), reason }
}

/// The address of the device of the node that has this public address.
fn mac(public: Ipv4Addr) -> MacAddr {
    let [a, b, c, d] = public.octets();
    MacAddr::local([0x1a, 0x4e, a, b, c, d])
}

#[async_trait]
impl Backend for Lane {
    fn kind(&self) -> &'static str {
        "lane"
    }

    fn lease_type(&self) -> &'static str {
        LEASE_TYPE
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        Options::of(config)?;
        if config.networks.v4.is_none() {
            return Err(refuse("EnableIPv4 is false: the tunnel's own packets are IPv4".into()));
        }
        match uplink {
            Some(uplink) if uplink.address.v4.is_none() => {
                Err(refuse(format!("{} has no IPv4 address", uplink.name)))
            }
            _ => Ok(()),
        }
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let options = Options::of(config)?;
        let mut datapath = Datapath::default();
        datapath.devices = config.networks.map(|_, _| options.device);
        datapath.overhead = config.networks.map(|_, _| OVERHEAD);
        if options.encrypted {
            datapath.encrypted = [options.device].into();
        }
        // Lanes also have packets without ports. A guard takes both from peers only.
        datapath.transports = vec![Transport::Udp(options.port), Transport::Protocol(253)];
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, _: Option<LinkName>) -> Result<Footprint> {
        let links = [Options::of(config)?.device].into();
        let networks = config.pod_networks().collect();
        Ok(Footprint { links, networks, blackholes: true, ..Footprint::default() })
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let Options { lane, port, device, .. } = Options::of(config)?;
        let Some(IpAddr::V4(public)) = node.uplink.public.v4 else {
            return Err(refuse("this node has no public IPv4 address".into()));
        };
        let mut offer = Offer::default();
        offer.public.v4 = Some(public.into());
        offer.data.v4 = Some(format!(r#"{{"Lane":{lane}}}"#).into());
        let mtu = node.uplink.mtu - OVERHEAD;
        let tunnel = Vxlan {
            vni: lane,
            port,
            mac: mac(public),
            local: node.uplink.address.v4,
            lower: Some(node.uplink.name),
            learning: false,
            gbp: false,
        };
        let link = Link { name: device, mtu, up: true, kind: tunnel.into() };
        let footprint = self.footprint(config, Some(node.uplink.name))?;
        Ok(Prepared::new(offer, move |lease| {
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, _: &Env<'_>, objects| {
                plan(lane, device, subnets, offer, objects)
            });
            blueprint.footprint = footprint;
            blueprint.base = base(link, lease);
            Ok(blueprint)
        }))
    }
}

/// The device, with the first address of each subnet.
fn base(link: Link, lease: &NodeLease) -> ObjectSet {
    let name = link.name;
    let mut base: ObjectSet = [link].into_iter().collect();
    for subnet in lease.held().into_iter().flat_map(|lease| lease.subnets.iter()) {
        base.insert(Addr { link: name, address: subnet.base(), len: subnet.family().bits() });
    }
    base
}

/// One forwarding entry for the peer; a neighbour and a route for each of its subnets.
fn plan(
    own: u32,
    link: LinkName,
    subnets: &Subnets,
    offer: &Offer,
    objects: &mut Vec<Object>,
) -> Result<(), Rejection> {
    let Some(IpAddr::V4(public)) = offer.public[Family::V4] else {
        return Err(Rejection::Rejected("it has no public IPv4 address".into()));
    };
    let data = offer.data.v4.as_deref().unwrap_or("{}");
    let lane = lane(&Fields::parse(data, "BackendData")?)?;
    if lane != own {
        return Err(Rejection::Rejected(format!("it is on lane {lane}, this node on lane {own}")));
    }
    let mac = mac(public);
    objects.push(Fdb { link, mac, dst: public.into() }.into());
    for dst in subnets.iter() {
        let gateway = dst.base();
        objects.push(Neigh { link, address: gateway, mac }.into());
        objects.push(
            Route { dst, via: Via::Gateway { gateway, link, onlink: true }, mtu: None }.into(),
        );
    }
    Ok(())
}
