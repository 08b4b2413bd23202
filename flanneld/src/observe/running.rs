//! The network that runs.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_api::Deployment;
use flannel_core::address::Dual;
use flannel_core::backend::{Datapath, ExternalInterface};
use flannel_core::kernel::{RecordKeeper, Refused, Traffic};
use flannel_core::lease::View;
use flannel_core::network::NetworkHandle;
use flannel_core::object::LinkName;
use flannel_core::runtime::SharedAnswer;
use flannel_core::{Config, Kernel, Remedy, Subnet};
use flannel_doctor::Network;
use flannel_doctor::inputs::tunnels::Tunnels;
use flannel_doctor::path_probe::server::ServerConfig;
use flannel_doctor::paths::{Paths, ProbeSettings};
use flannel_netlink::NetlinkKernel;
use tokio::sync::watch;

use crate::config::{ControlConfig, FirewallConfig};

/// The time for which requests share an answer.
const SHARED: Duration = Duration::from_secs(1);

/// The network that runs, and the values that it was built from.
pub(crate) struct Running {
    pub(crate) config: Config,
    pub(crate) datapath: Datapath,
    /// The devices that it may have.
    pub(crate) links: Vec<LinkName>,
    pub(crate) iface: ExternalInterface,
    pub(crate) kernel: Arc<dyn Kernel>,
    /// Reads the encrypted tunnels. `None` if the network has none.
    pub(crate) encrypted: Option<Arc<NetlinkKernel>>,
    /// The record keepers of the backend. The first one with a [`Traffic`] counts packets.
    pub(crate) record_keepers: Vec<Arc<dyn RecordKeeper>>,
    pub(crate) handle: NetworkHandle,
    pub(crate) views: watch::Receiver<View>,
    pub(crate) firewall_rules: watch::Receiver<FirewallRules>,
    /// The options of masquerading.
    pub(crate) masquerade: FirewallConfig,
    /// The exclusions from masquerading of the network config, as of now.
    pub(crate) excluded: watch::Receiver<Vec<Subnet>>,
    /// The results of the probes of paths, or `None` if paths are not probed.
    pub(crate) paths: Option<Paths>,
    /// The lease has expired while the store did not answer.
    pub(crate) lapsed: bool,
    /// The time at which the network was built.
    pub(crate) since: SystemTime,
}

/// The state of the firewall rules.
#[derive(Debug, Clone, Default)]
pub(crate) enum FirewallRules {
    /// None are requested.
    #[default]
    Unwanted,
    /// They are requested, and not kept yet.
    Pending,
    /// They cannot be made now. This is tried again.
    Missing {
        /// The reason.
        why: String,
        /// What helps.
        remedy: Remedy,
        /// They were requested by an option, and are not only the default.
        requested: bool,
    },
    /// They are kept, with this status.
    Kept(watch::Receiver<flannel_firewall::Status>),
}

impl Running {
    /// What the probes of paths probe.
    pub(crate) fn probes(&self, settings: &ControlConfig) -> ProbeSettings {
        let network = Network {
            daemon: true,
            deployment: Deployment::default(),
            known: true,
            backend: self.handle.lease.attrs.preferred.kind.to_string(),
            datapath: self.datapath.clone(),
            uplink: Some(self.iface.name),
            mtu: Some(self.handle.mtu),
            ..Network::default()
        };
        ProbeSettings {
            interval: settings.path_interval,
            doctor_port: settings.doctor_port,
            network,
        }
    }

    /// The addresses of the server for path probes. Empty with port 0, and without a tunnel or a
    /// lease.
    pub(crate) fn probe_server(&self, port: u16) -> ServerConfig {
        let devices = if self.lapsed { Dual::default() } else { self.datapath.devices };
        let Datapath { bare, encrypted, .. } = &self.datapath;
        let bare = !self.lapsed && (*bare || !encrypted.is_empty());
        let own = self.handle.lease.subnets;
        let iface = &self.iface;
        let at = |family, address: Option<IpAddr>| {
            own.family(family).filter(|_| bare)?;
            Some((iface.name, address?))
        };
        ServerConfig {
            port,
            tunnels: Dual::from_fn(|family| Some((devices[family]?, own.family(family)?.base()))),
            bare: Dual::from_fn(|family| at(family, iface.address[family])),
            // Behind NAT no packet for it arrives here.
            public: Dual::from_fn(|family| {
                let public = iface.public[family];
                at(family, public.filter(|_| iface.address[family] != public))
            }),
            mtu: self.handle.mtu,
            views: self.views.clone(),
            status: self.handle.status.clone(),
        }
    }
}

/// What the kernel and the data plane of a network answered last. Requests over TCP need no
/// authentication, and reading thousands of peers takes long: so requests share the answers.
#[derive(Debug)]
pub(crate) struct CountersRead {
    tunnels: SharedAnswer<Tunnels>,
    traffic: SharedAnswer<Option<Traffic>>,
    refused: SharedAnswer<Option<Refused>>,
}

impl Default for CountersRead {
    fn default() -> Self {
        Self {
            tunnels: SharedAnswer::new(SHARED),
            traffic: SharedAnswer::new(SHARED),
            refused: SharedAnswer::new(SHARED),
        }
    }
}

impl CountersRead {
    /// The encrypted tunnels, without those that cannot be read.
    pub(crate) async fn tunnels(&self, running: &Running) -> Arc<Tunnels> {
        let Some(kernel) = running.encrypted.clone() else { return Arc::default() };
        let devices = running.datapath.encrypted.clone();
        let read = move || {
            let (tunnels, unread) = Tunnels::read(&kernel, devices);
            for (link, error) in unread {
                tracing::debug!(%link, %error, "the state of the tunnels cannot be read");
            }
            tunnels
        };
        self.tunnels.get(read).await
    }

    /// The packets that the backend moves itself.
    pub(crate) async fn traffic(&self, running: &Running) -> Option<Traffic> {
        let record_keepers = running.record_keepers.clone();
        let read = move || record_keepers.iter().find_map(|keeper| keeper.traffic());
        Option::clone(&*self.traffic.get(read).await)
    }

    /// The packets that guards of the tunnel refuse.
    pub(crate) async fn refused(&self, running: &Running) -> Option<Refused> {
        let record_keepers = running.record_keepers.clone();
        let read = move || {
            let counted = record_keepers.iter().filter_map(|keeper| keeper.refused());
            counted.reduce(|mut all, other| {
                all.drops |= other.drops;
                for (reason, packets) in other.packets {
                    *all.packets.entry(reason).or_default() += packets;
                }
                all.problems.extend(other.problems);
                all
            })
        };
        Option::clone(&*self.refused.get(read).await)
    }
}
