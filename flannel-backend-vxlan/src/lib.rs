#![doc = include_str!("../README.md")]

mod mac;
mod options;
mod plan;

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Built, Datapath, ExternalInterface, Inlet, Node, NodeLease, Prepared,
};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{Addr, Link, LinkKind, LinkName, MacAddr, Object, State, Vxlan};
use flannel_core::{Backend, Config, Error, Result};

pub use options::Options;

/// The backend `vxlan`: one tunnel device per family, and per peer a neighbour, a forwarding entry
/// and a route.
///
/// Options: [`Options`]. The MTU is the underlay's less 50 bytes for IPv4 and 70 for IPv6; what
/// pods are told is the smallest over the enabled families.
///
/// **Source**: flannel `pkg/backend/vxlan`. Different on purpose: IPv6 costs 70 bytes, not 50; the
/// tunnel's source is the interface's address, not a public one that the host may not own; an
/// existing device is changed in place where the kernel can.
#[derive(Debug, Clone, Copy, Default)]
pub struct VxlanBackend;

#[async_trait]
impl Backend for VxlanBackend {
    fn kind(&self) -> &'static str {
        plan::TYPE
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let options = Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))?;
        let mut datapath = Datapath::default();
        datapath.devices = self.devices(config)?;
        datapath.overhead = config.networks.map(|family, _| overhead(family));
        datapath.inlets = vec![Inlet::Udp(options.port)];
        datapath.direct = options.direct_routing;
        datapath.bare = options.direct_routing;
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        let vni = Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))?.vni;
        Ok(Footprint {
            // Both families': the device of one that was switched off must go.
            links: Family::BOTH.iter().filter_map(|f| device_name(*f, vni).ok()).collect(),
            networks: config.pod_networks().collect(),
            // Also without DirectRouting: its routes must go when it is switched off.
            routes_on: uplink.into_iter().collect(),
            // The blackholes of this node's own subnets.
            blackholes: true,
            ..Footprint::default()
        })
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        self.devices(config)?;
        underlay(config, uplink)?;
        let Some(iface) = uplink else { return Ok(()) };
        match config.networks.families().find(|family| iface.address[*family].is_none()) {
            Some(family) => Err(lacks(iface.name, family)),
            None => Ok(()),
        }
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        self.validate(config, Some(node.uplink))?;
        let options = Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))?;
        let names = self.devices(config)?;
        let underlay = underlay(config, Some(node.uplink))?.unwrap_or(node.uplink.mtu);
        let macs = choose_macs(node, &names, options.vni).await?;
        let links = names
            .try_map(|family, name| device(node, (&options, underlay), family, *name, &macs))?;
        let mtu = links.values().map(|link| link.mtu).min();
        let mtu = mtu.ok_or_else(|| refuse("the network config enables no family".into()))?;
        let offer = Offer {
            public: node.uplink.public,
            kind: plan::TYPE.into(),
            data: macs.map(|_, mac| plan::backend_data(options.vni, *mac).into()),
        };
        let footprint = self.footprint(config, Some(node.uplink.name))?;
        let direct = options.direct_routing.then_some(node.uplink.name);
        let plan = plan::Plan { devices: names, direct };
        Ok(Prepared::new(offer, move |lease| {
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            (blueprint.lease_type, blueprint.footprint) = (Some(plan::TYPE), footprint);
            blueprint.base = base(&links, &names, lease);
            Ok(Built::Kernel(blueprint))
        }))
    }
}

/// The devices, and the addresses of a lease that this node holds.
fn base(links: &Dual<Link>, names: &Dual<LinkName>, lease: &NodeLease) -> State {
    let mut base: State = links.values().cloned().collect();
    for subnet in lease.held().into_iter().flat_map(|lease| lease.subnets.iter()) {
        let Some(link) = names[subnet.family()] else { continue };
        base.insert(Addr { link, address: subnet.base(), len: subnet.family().bits() });
    }
    base
}

impl VxlanBackend {
    /// The tunnel device of each enabled family.
    ///
    /// # Errors
    /// The config's backend options are wrong.
    pub fn devices(&self, config: &Config) -> Result<Dual<LinkName>> {
        let vni = Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))?.vni;
        config.networks.try_map(|family, _| device_name(family, vni))
    }
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: plan::TYPE.into(), reason }
}

/// `flannel.<VNI>` and `flannel-v6.<VNI>`.
fn device_name(family: Family, vni: u32) -> Result<LinkName> {
    let name = match family {
        Family::V4 => format!("flannel.{vni}"),
        Family::V6 => format!("flannel-v6.{vni}"),
    };
    let too_long = |_| {
        refuse(format!(
            "Backend.VNI {vni}: the device name {name} is too long; at most 9999999, with IPv6 at most 9999"
        ))
    };
    name.parse().map_err(too_long)
}

/// What a tunnel header costs, in bytes: outer IP, UDP, VXLAN and inner Ethernet headers.
pub const fn overhead(family: Family) -> u32 {
    match family {
        Family::V4 => 20 + 8 + 8 + 14,
        Family::V6 => 40 + 8 + 8 + 14,
    }
}

/// What the network between the nodes takes, in bytes, as the config says or else the interface:
/// enough for the tunnel of every enabled family. `None` if only an interface could tell.
fn underlay(config: &Config, iface: Option<&ExternalInterface>) -> Result<Option<u32>> {
    let options = Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))?;
    let (field, underlay) = match (options.mtu, iface) {
        (Some(mtu), Some(iface)) if mtu > iface.mtu => {
            return Err(refuse(format!(
                "Backend.MTU {mtu}: at most {}, the MTU of {}",
                iface.mtu, iface.name
            )));
        }
        (Some(mtu), _) => ("Backend.MTU", mtu),
        (None, Some(iface)) => ("the interface's MTU", iface.mtu),
        (None, None) => return Ok(None),
    };
    let least = |family: &Family| family.least_mtu() + overhead(*family);
    let neediest = config.networks.families().max_by_key(least);
    match neediest.filter(|family| underlay < least(family)) {
        Some(family) => Err(refuse(format!(
            "{field} {underlay} is too small for {family}: at least {}, its own {} and {} for the tunnel",
            least(&family),
            family.least_mtu(),
            overhead(family)
        ))),
        None => Ok(Some(underlay)),
    }
}

fn lacks(name: LinkName, family: Family) -> Error {
    refuse(format!("{name} has no {family} address, which the network config enables"))
}

fn device(
    node: &Node<'_>,
    (options, underlay): (&Options, u32),
    family: Family,
    name: LinkName,
    macs: &Dual<MacAddr>,
) -> Result<Link> {
    let iface = node.uplink;
    let (Some(local), Some(mac)) = (iface.address[family], macs[family]) else {
        return Err(lacks(iface.name, family));
    };
    // It is enough for the family.
    let mtu = underlay - overhead(family);
    let vxlan = Vxlan {
        vni: options.vni,
        port: options.port,
        mac,
        local: Some(local),
        lower: Some(iface.name),
        learning: options.learning,
        gbp: options.gbp,
    };
    Ok(Link { name, mtu, up: true, kind: LinkKind::Vxlan(vxlan) })
}

/// A MAC address for each device: see [`mac`].
async fn choose_macs(node: &Node<'_>, names: &Dual<LinkName>, vni: u32) -> Result<Dual<MacAddr>> {
    let footprint = Footprint { links: names.values().copied().collect(), ..Footprint::default() };
    let present = node.snapshot(footprint).await?;
    let devices = present.iter().filter_map(|object| match object {
        Object::Link(Link { name, kind: LinkKind::Vxlan(vxlan), .. }) => Some((*name, vxlan.mac)),
        _ => None,
    });
    let devices: Vec<_> = devices.collect();
    let hints = node.hints().await?;
    // The lease is ours, although it may contain an address that this host no longer has.
    let own = hints.previous.filter(|_| hints.last_published.is_some());
    let last = hints.last_published.unwrap_or_default();
    let view = node.leases().await?;
    let others = view.leases.iter().filter(|lease| Some(lease.subnets) != own);
    let public = &node.uplink.public;
    let mut taken = mac::taken(others.map(|lease| &**lease), public);
    let mut macs = Dual::default();
    for (family, name) in names.iter() {
        let device = devices.iter().find(|(device, _)| device == name).map(|(_, mac)| *mac);
        let public = public.map(|_, address| address.to_string());
        let seed = format!("{} {:?} {:?} {vni} {family}", node.machine_id, public.v4, public.v6);
        let mac = mac::choose(mac::published(&last, family), device, &seed, &taken);
        taken.insert(mac);
        macs[family] = Some(mac);
    }
    Ok(macs)
}
