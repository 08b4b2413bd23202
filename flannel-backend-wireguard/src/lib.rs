#![doc = include_str!("../README.md")]

mod key;
mod options;
mod plan;
mod signature;

use std::collections::BTreeMap;

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Datapath, ExternalInterface, LocalEnd, Node, Prepared, Transport, underlay_mtu,
};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::{Link, LinkName, Route, Secret, Via, Wireguard};
use flannel_core::runtime::blocking;
use flannel_core::{Backend, Config, Error, Result, Subnets};

use self::key::KeyPair;
pub use self::key::{SECRET, is_key};
pub use self::options::{Mode, Options, Psk};
use self::plan::TunnelPlan;

/// The backend `wireguard`: encrypted tunnels, with one device for each family or one for both.
///
/// Options: [`Options`]. The MTU of a device is the MTU of the underlay less 60 bytes if the tunnel
/// only runs between IPv4 addresses, else less 80. The MTU of pods is the smallest over the enabled
/// families. The private key is the secret [`SECRET`].
///
/// **Source**: flannel `pkg/backend/wireguard`. Different on purpose:
/// - A tunnel between IPv4 addresses costs 60 bytes, not 80.
/// - An existing device is changed in place. It stays when the program ends.
/// - With one tunnel, `ListenPort` is published for both families.
/// - The backend data of a family has a `Signature` of the subnet by the private key, so that no
///   other lease can take the key. Go flannel ignores it.
/// - The address of a peer that was learned from its packets is kept while handshakes succeed.
#[derive(Debug, Clone, Copy, Default)]
pub struct WireguardBackend;

#[async_trait]
impl Backend for WireguardBackend {
    fn kind(&self) -> &'static str {
        plan::TYPE
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&Options::NAMES)
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let options = options(config)?;
        let mut datapath = Datapath::default();
        datapath.devices = devices(config, options.mode);
        datapath.overhead = overheads(config, options.mode);
        datapath.mtu = options.mtu;
        datapath.transports =
            ports(config, &options).values().copied().map(Transport::Udp).collect();
        datapath.transports.dedup();
        datapath.outer = outer(config, &options);
        datapath.encrypted = datapath.devices.values().copied().collect();
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint {
            // All devices, so that the device of a disabled family or another mode is deleted.
            links: Family::BOTH.map(device).into(),
            ..Footprint::of_routes(config, uplink)
        })
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let options = options(config)?;
        let both = config.networks.v4.is_some() && config.networks.v6.is_some();
        if both && options.mode == Mode::Separate && options.port == options.port_v6 {
            let port = options.port;
            return Err(refuse(format!(
                "Backend.ListenPortV6 {port}: expected another port than ListenPort, because each \
                 tunnel needs its own, or the Mode auto"
            )));
        }
        underlay_mtu(options.mtu, uplink, &overheads(config, options.mode)).map_err(refuse)?;
        let Some(uplink) = uplink else { return Ok(()) };
        for family in Family::BOTH {
            let is_needed = match options.mode {
                Mode::Separate => config.networks[family].is_some(),
                Mode::Auto => false,
                Mode::Ipv4 => family == Family::V4,
                Mode::Ipv6 => family == Family::V6,
            };
            if is_needed {
                uplink.needed(family).map_err(refuse)?;
            }
        }
        Ok(())
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let options = options(config)?;
        let uplink = node.uplink;
        let overhead = overheads(config, options.mode);
        let underlay = underlay_mtu(options.mtu, Some(uplink), &overhead)
            .map_err(refuse)?
            .unwrap_or(uplink.mtu);
        let psk = preshared_key(&options).await?;
        let keys = KeyPair::of(node.secrets).await.map_err(|error| refuse(error.to_string()))?;
        let devices = devices(config, options.mode);
        let ports = ports(config, &options);
        let links = devices.map(|family, name| {
            let key = keys.private.clone();
            let port = ports[family].unwrap_or(options.port);
            // One device for both families has the overhead of both.
            let mtu = underlay - overhead[family].unwrap_or_default();
            Link { name: *name, mtu, up: true, kind: Wireguard { key, port }.into() }
        });
        node.may_change(links.values().cloned().collect()).await?;
        let mtu = links.values().map(|link| link.mtu).min().unwrap_or(underlay);
        let data = ports.map(|_, port| plan::backend_data(keys.public, *port, None));
        let offer = Offer::new(uplink.public).with_data(data);
        let footprint = self.footprint(config, Some(uplink.name))?;
        let networks = config.networks.map(|_, pods| pods.network);
        let addresses = uplink.address;
        let public = uplink.public;
        Ok(Prepared::new(offer, move |lease| {
            let plan = TunnelPlan {
                mode: options.mode,
                devices,
                ports,
                psk,
                keepalive: options.keepalive,
                local: LocalEnd { addresses, subnets: lease.lease().subnets },
                public,
            };
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            blueprint.footprint = footprint;
            blueprint.handshakes = true;
            blueprint.proof = Some(Box::new(plan::is_proven));
            blueprint.base = lease.tunnel(&links);
            for (family, link) in devices.iter() {
                if let Some(dst) = networks[family] {
                    let route = Route { dst, via: Via::Link(*link), mtu: None };
                    blueprint.base.insert(route);
                }
            }
            Ok(blueprint)
        })
        .with_complete_offer(move |subnets, offer| {
            offer.data = signed_data(&keys, ports, subnets);
        }))
    }
}

async fn preshared_key(options: &Options) -> Result<Option<Secret>> {
    Ok(match options.psk.clone() {
        Some(Psk::File(path)) => Some(blocking(move || key::read(&path)).await.map_err(refuse)?),
        Some(Psk::Key(key)) => Some(key),
        None => None,
    })
}

/// The backend data of each family of a lease with these subnets.
fn signed_data(keys: &KeyPair, ports: Dual<u16>, subnets: &Subnets) -> Dual<Box<str>> {
    ports.map(|family, port| {
        let subnet = subnets.iter().find(|subnet| subnet.family() == family);
        let signature = subnet.map(|subnet| signature::sign(keys, subnet));
        plan::backend_data(keys.public, *port, signature.as_deref())
    })
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: plan::TYPE.into(), reason }
}

fn options(config: &Config) -> Result<Options> {
    Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))
}

/// The tunnel device of a family. One device for both families has the name of the IPv4 device.
fn device(family: Family) -> LinkName {
    let name = match family {
        Family::V4 => "flannel-wg",
        Family::V6 => "flannel-wg-v6",
    };
    name.parse().expect("a valid name")
}

/// The tunnel device of each enabled family.
fn devices(config: &Config, mode: Mode) -> Dual<LinkName> {
    let separate = mode == Mode::Separate;
    config.networks.map(|family, _| device(if separate { family } else { Family::V4 }))
}

/// The UDP port of the tunnel of each enabled family.
fn ports(config: &Config, options: &Options) -> Dual<u16> {
    config.networks.map(|family, _| match (options.mode, family) {
        (Mode::Separate, Family::V6) => options.port_v6,
        _ => options.port,
    })
}

/// The only family of the addresses between which each tunnel runs.
fn outer(config: &Config, options: &Options) -> BTreeMap<Transport, Family> {
    let ports = ports(config, options);
    let of = |(family, port): (Family, &u16)| {
        let outer = match options.mode {
            Mode::Separate => family,
            // Usually.
            Mode::Auto | Mode::Ipv4 => Family::V4,
            Mode::Ipv6 => Family::V6,
        };
        (Transport::Udp(*port), outer)
    };
    ports.iter().map(of).collect()
}

/// The size of the outer IP, UDP and WireGuard headers with the authentication tag, in bytes, for
/// packets of each enabled family.
fn overheads(config: &Config, mode: Mode) -> Dual<u32> {
    config.networks.map(|family, _| match (mode, family) {
        (Mode::Ipv4, _) | (Mode::Separate, Family::V4) => 20 + 8 + 16 + 16,
        _ => 40 + 8 + 16 + 16,
    })
}
