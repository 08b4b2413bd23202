#![doc = include_str!("../README.md")]

mod keeper;
mod options;
mod plan;
mod preflight;
mod traffic;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{
    Blueprint, Datapath, ExternalInterface, LocalEnd, Node, Prepared, SourceCheck, Transport,
    underlay_mtu,
};
use flannel_core::kernel::{Footprint, RecordKeeper};
use flannel_core::lease::Offer;
use flannel_core::object::{Fou, Link, LinkKind, LinkName, Route, Tun, Via};
use flannel_core::runtime::lock;
use flannel_core::{Backend, Config, Error, Result};

use crate::keeper::Table;
pub use crate::options::{Options, Path as PacketPath};
use crate::plan::{Mover, UdpPlan};
pub use flannel_udp::{Program, Started, ThisProgram, run_if_started};

/// The name of the backend, of the keeper, and of its directory in the state directory.
const NAME: &str = "udp";
/// The directory of nodes without a state directory.
const RUN_DIR: &str = "/run/flannel";

/// The backend `udp`: a device whose packets another process, or the kernel ([`PacketPath`]), sends
/// in UDP datagrams, one in each.
///
/// Options: [`Options`]. The MTU of pods is the MTU of the external interface less 28 bytes for
/// IPv4 and 48 for IPv6.
///
/// The kernel moves packets only if a guard checks their sources there
/// ([`Node::unguarded`](flannel_core::backend::Node::unguarded)), or if the config does not want a
/// check.
///
/// **Source**: flannel `pkg/backend/udp`. Different on purpose:
/// - The device, and the process that moves the packets, stay when the daemon ends.
/// - A packet is accepted only from the node of its source address.
/// - IPv6 is carried too.
#[derive(Debug, Default)]
pub struct UdpBackend {
    program: Program,
    /// By state directory.
    record_keepers: Mutex<BTreeMap<PathBuf, Table>>,
}

impl UdpBackend {
    /// The backend, without data planes. The process of a data plane will run this program.
    pub fn new(program: Program) -> Self {
        Self { program, ..Self::default() }
    }
}

#[async_trait]
impl Backend for UdpBackend {
    fn kind(&self) -> &'static str {
        NAME
    }

    /// Leases of `udp` have no type, and cannot be told from leases of `alloc`.
    fn lease_type(&self) -> &'static str {
        ""
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&Options::NAMES)
    }

    fn datapath(&self, config: &Config) -> Result<Datapath> {
        let options = options(config)?;
        let mut datapath = Datapath::default();
        datapath.devices = config.networks.map(|_, _| device());
        datapath.overhead = config.networks.map(|family, _| overhead(family));
        datapath.transports = vec![Transport::Udp(options.port)];
        Ok(datapath)
    }

    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint {
            links: [device()].into(),
            record_keepers: [NAME].into(),
            ..Footprint::of_routes(config, uplink)
        })
    }

    fn record_keepers(&self, state_dir: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
        let dir = state_dir.unwrap_or_else(|| Path::new(RUN_DIR)).join(NAME);
        let mut record_keepers = lock(&self.record_keepers);
        let table = record_keepers
            .entry(dir.clone())
            .or_insert_with(|| Table::new(dir, self.program.clone()));
        vec![Arc::new(table.clone())]
    }

    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let options = options(config)?;
        if options.path == options::Path::Kernel && config.networks.v6.is_some() {
            let why = "the kernel carries IPv4 only, and EnableIPv6 is true";
            return Err(refuse(format!(r#""Path": "kernel": {why}"#)));
        }
        let overhead = config.networks.map(|family, _| overhead(family));
        underlay_mtu(None, uplink, &overhead).map_err(refuse)?;
        let Some(uplink) = uplink else { return Ok(()) };
        for family in config.networks.families() {
            uplink.needed(family).map_err(refuse)?;
        }
        if kernel_device(&options, config, uplink).is_some() {
            return Ok(());
        }
        preflight::check().map_err(refuse)
    }

    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared> {
        let options = options(config)?;
        let uplink = node.uplink;
        let enabled = config.networks.map(|_, pods| pods.network);
        let mtus = enabled.families().map(|family| uplink.mtu - overhead(family));
        let mtu = mtus.min().unwrap_or(uplink.mtu);
        let public =
            Dual::from_fn(|family| uplink.public[family].filter(|_| enabled[family].is_some()));
        let offer = Offer::new(public);
        let footprint = self.footprint(config, Some(uplink.name))?;
        let addresses =
            Dual::from_fn(|family| uplink.address[family].filter(|_| enabled[family].is_some()));
        let tun = Link { name: device(), mtu, up: true, kind: LinkKind::Tun(Tun) };
        let of_kernel = kernel_device(&options, config, uplink)
            .map(|kind| Link { kind: kind.into(), ..tun.clone() });
        let link = choose_device(node, &options, of_kernel, tun).await?;
        Ok(Prepared::new(offer, move |lease| {
            let own = lease.lease().subnets;
            let plane = options.data_plane(&addresses, &own);
            let local = LocalEnd { addresses, subnets: own };
            let mover = match &link.kind {
                LinkKind::Fou(_) => Mover::Kernel { device: link.name },
                _ => Mover::Process { port: options.port },
            };
            let by_kernel = matches!(mover, Mover::Kernel { .. });
            let plan = UdpPlan { families: enabled.map(|_, _| ()), local, mover };
            let mut blueprint = Blueprint::new(mtu, move |subnets, offer, env, objects| {
                plan.objects(subnets, offer, env, objects)
            });
            blueprint.footprint = footprint;
            blueprint.path = if by_kernel { "the kernel" } else { "a process" };
            blueprint.base = lease.tunnel(&enabled.map(|_, _| link.clone()));
            if !by_kernel {
                for dst in enabled.values() {
                    let route = Route { dst: *dst, via: Via::Link(link.name), mtu: None };
                    blueprint.base.insert(route);
                }
                let first = own.iter().next().expect("a lease has a subnet");
                blueprint.base.insert(keeper::node_record(first, &plane));
            }
            Ok(blueprint)
        }))
    }
}

/// The device with which the kernel can move the packets, or `None` if the process has to.
fn kernel_device(options: &Options, config: &Config, uplink: &ExternalInterface) -> Option<Fou> {
    if options.path == options::Path::Process || config.networks.v6.is_some() {
        return None;
    }
    let Some(IpAddr::V4(local)) = uplink.address.v4 else { return None };
    // Nodes behind a NAT may send from other addresses, which only a process learns.
    let has_nat = uplink.public.v4.is_some_and(|public| public != local);
    if has_nat && options.source_check != SourceCheck::Off && options.path == options::Path::Auto {
        return None;
    }
    let Options { port, source_port: one_port, .. } = *options;
    Some(Fou { local, lower: Some(uplink.name), port, one_port })
}

/// Chooses the device `of_kernel` if the kernel has such devices, and if it checks sources or
/// `options` do not demand that. Otherwise chooses the tun device.
async fn choose_device(
    node: &Node<'_>,
    options: &Options,
    of_kernel: Option<Link>,
    tun: Link,
) -> Result<Link> {
    if let Some(link) = of_kernel {
        match may_use(node, options, &link).await {
            Ok(()) => return Ok(link),
            Err(error) if options.path == options::Path::Kernel => return Err(error),
            Err(error) => {
                tracing::info!(%error, "the kernel cannot move the packets, so a process does");
            }
        }
    }
    preflight::check().map_err(refuse)?;
    node.may_change(Vec::new()).await?;
    Ok(tun)
}

/// Checks that this node can use a device of the kernel that moves the packets.
async fn may_use(node: &Node<'_>, options: &Options, link: &Link) -> Result<()> {
    node.may_change(vec![link.clone()]).await?;
    match node.unguarded {
        Some(why) if options.source_check != SourceCheck::Off => Err(refuse(format!(
            "{why}: load the modules of nf_tables (modprobe -a nf_tables nft_fib_inet), let a \
             process move the packets (\"Path\": \"process\"), or do not check them \
             (\"SourceCheck\": false)"
        ))),
        _ => Ok(()),
    }
}

/// The device of both families. Go flannel takes the first free name, which is this one.
fn device() -> LinkName {
    "flannel0".parse().expect("a valid name")
}

/// The size of the outer IP and UDP headers, in bytes.
const fn overhead(family: Family) -> u32 {
    match family {
        Family::V4 => 20 + 8,
        Family::V6 => 40 + 8,
    }
}

fn options(config: &Config) -> Result<Options> {
    Options::parse(&config.backend).map_err(|error| refuse(error.to_string()))
}

fn refuse(reason: String) -> Error {
    Error::Backend { backend: NAME.into(), reason }
}
