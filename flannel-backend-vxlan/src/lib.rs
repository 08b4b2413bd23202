#![doc = include_str!("../README.md")]

mod mac;
mod options;
mod plan;

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Datapath, ExternalInterface, LocalEnd, Node, Prepared, Transport, underlay_mtu,
};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{Key, Link, LinkKind, LinkName, MacAddr, Object, Vxlan};
use flannel_core::{Backend, Config, Error, Result};

pub use options::Options;
use plan::VxlanPlan;

/// The backend `vxlan`: one tunnel device per family, and for each peer a neighbour, a forwarding
/// entry and a route.
///
/// Options: [`Options`]. The MTU of a device is the MTU of the underlay less 50 bytes for IPv4 or
/// 70 for IPv6. The MTU of pods is the smallest over the enabled families.
///
/// **Source**: flannel `pkg/backend/vxlan`. Different on purpose:
/// - The MTU of the IPv6 device is the MTU of the underlay less 70 bytes. Go flannel subtracts 50
///   bytes.
/// - The source of the tunnel is the address of the interface, not the public address, which the
///   host may not have.
/// - An existing device is changed in place if the kernel can do that.
#[derive(Debug, Clone, Copy, Default)]
pub struct VxlanBackend;

#[async_trait]
impl Backend for VxlanBackend {
    fn kind(&self) -> &'static str {
        plan::TYPE
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&Options::NAMES)
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let options = options(config)?;
        let mut datapath = Datapath::default();
        datapath.devices = devices(config, &options)?;
        datapath.overhead = config.networks.map(|family, _| overhead(family));
        datapath.mtu = options.mtu;
        datapath.transports = vec![Transport::Udp(options.port)];
        datapath.direct = options.direct_routing;
        datapath.bare = options.direct_routing;
        datapath.carries_marks = options.gbp.then_some("GBP");
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        let vni = options(config)?.vni;
        Ok(Footprint {
            // Of both families, so that the device of a disabled family is deleted.
            links: Family::BOTH
                .into_iter()
                .filter_map(|family| device_name(family, vni).ok())
                .collect(),
            ..Footprint::of_routes(config, uplink)
        })
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let options = options(config)?;
        devices(config, &options)?;
        underlay(config, &options, uplink)?;
        let Some(uplink) = uplink else { return Ok(()) };
        config
            .networks
            .families()
            .try_for_each(|family| uplink.needed(family).map(drop).map_err(refuse))
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let options = options(config)?;
        let uplink = node.uplink;
        let names = devices(config, &options)?;
        let underlay = underlay(config, &options, Some(uplink))?.unwrap_or(uplink.mtu);
        let macs = choose_macs(node, &names, options.vni).await?;
        let links = macs.try_map(|family, mac| {
            let vxlan = Vxlan {
                vni: options.vni,
                port: options.port,
                mac: *mac,
                local: uplink.address[family],
                lower: Some(uplink.name),
                learning: options.learning,
                gbp: options.gbp,
            };
            Ok::<_, Error>(Link {
                name: device_name(family, options.vni)?,
                mtu: underlay - overhead(family),
                up: true,
                kind: vxlan.into(),
            })
        })?;
        node.may_change(links.values().cloned().collect()).await?;
        let mtu = links.values().map(|link| link.mtu).min().unwrap_or(underlay);
        let offer = Offer::new(uplink.public)
            .with_data(macs.map(|_, mac| plan::backend_data(options.vni, *mac).into()));
        let footprint = self.footprint(config, Some(uplink.name))?;
        let direct = options.direct_routing.then_some(uplink.name);
        let addresses = uplink.address;
        Ok(Prepared::new(offer, move |lease| {
            let local = LocalEnd { addresses, subnets: lease.lease().subnets };
            let plan = VxlanPlan { devices: names, direct, local, vni: options.vni };
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            blueprint.footprint = footprint;
            blueprint.proof = Some(Box::new(
                |_, _, object| matches!(object, Object::Fdb(entry) if entry.is_derived()),
            ));
            blueprint.base = lease.tunnel(&links);
            Ok(blueprint)
        }))
    }
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: plan::TYPE.into(), reason }
}

fn options(config: &Config) -> Result<Options> {
    Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))
}

/// The tunnel device of each enabled family.
fn devices(config: &Config, options: &Options) -> Result<Dual<LinkName>> {
    config.networks.try_map(|family, _| device_name(family, options.vni))
}

/// `flannel.<VNI>` and `flannel-v6.<VNI>`.
fn device_name(family: Family, vni: u32) -> Result<LinkName> {
    let name = match family {
        Family::V4 => format!("flannel.{vni}"),
        Family::V6 => format!("flannel-v6.{vni}"),
    };
    name.parse().map_err(|_| {
        let limit = "at most 9999999, with IPv6 at most 9999";
        refuse(format!("Backend.VNI {vni}: the device name {name} is too long; {limit}"))
    })
}

/// The size of the outer IP, UDP, VXLAN and inner Ethernet headers, in bytes.
const fn overhead(family: Family) -> u32 {
    match family {
        Family::V4 => 20 + 8 + 8 + 14,
        Family::V6 => 40 + 8 + 8 + 14,
    }
}

/// See [`underlay_mtu`].
fn underlay(
    config: &Config,
    options: &Options,
    uplink: Option<&ExternalInterface>,
) -> Result<Option<u32>> {
    let overhead = config.networks.map(|family, _| overhead(family));
    underlay_mtu(options.mtu, uplink, &overhead).map_err(refuse)
}

/// A MAC address for each device: see [`mac`].
async fn choose_macs(node: &Node<'_>, names: &Dual<LinkName>, vni: u32) -> Result<Dual<MacAddr>> {
    let footprint = Footprint { links: names.values().copied().collect(), ..Footprint::default() };
    let present = node.snapshot(footprint).await?;
    let hints = node.hints().await?;
    // This lease is ours, even if its address is no longer an address of this host.
    let own = hints.previous.filter(|_| hints.last_published.is_some());
    let last = hints.last_published.unwrap_or_default();
    let advertised = hints.advertised;
    // As peers see it.
    let public = Dual::from_fn(|family| advertised[family].or(node.uplink.public[family]));
    let leases = node.leases().await?.leases;
    let texts = node.uplink.public.map(|_, address| address.to_string());
    let mut taken = mac::taken(&leases, own, &public);
    let is_assigned = !node.publishes_attrs();
    Ok(names.map(|family, name| {
        let seed = format!("{} {:?} {:?} {vni} {family}", node.machine_id, texts.v4, texts.v6);
        let own_addresses = [node.uplink.address[family], advertised[family]];
        let candidates = mac::Candidates {
            published: mac::published(&last, family),
            device: match present.get(&Key::Link(*name)) {
                Some(Object::Link(Link { kind: LinkKind::Vxlan(vxlan), .. })) => Some(vxlan.mac),
                _ => None,
            },
            // The address of an assigned lease stays as it was written.
            derived: public[family]
                .filter(|ip| !is_assigned && own_addresses.contains(&Some(*ip)))
                .map(MacAddr::derived_from),
        };
        let mac = mac::choose(&candidates, &seed, &taken);
        taken.insert(mac);
        mac
    }))
}
