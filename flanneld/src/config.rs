//! The configuration of a daemon, as typed values.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use flannel_backends::Backends;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use flannel_core::{Subnet, SubnetManager};
use flannel_firewall::PortRange;
use flannel_netlink::iface::Selectors;
use flannel_options::go_flags::go_bool;
use flannel_subnet::{DirLocation, Registry};
#[cfg(feature = "etcd")]
use flannel_subnet_etcd::EtcdOptions;
#[cfg(feature = "kube")]
use flannel_subnet_kube::KubeOptions;

/// The configuration of a [`Daemon`](crate::Daemon).
///
/// Each field corresponds to options of `flanneld`, which are named in parentheses.
/// [`DaemonConfig::new`] has their defaults, except that nothing listens: see [`ControlConfig`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DaemonConfig {
    /// The store of leases (`--registry`, `--etcd-…`, `--kube-…`).
    pub store: StoreConfig,
    /// The backends that the network config may name.
    pub backends: Backends,
    /// The choice of the external interface (`--iface…`, `--public-ip`, `--public-ipv6`).
    pub interface: Selectors,
    /// The time before its end at which the lease is renewed (`--subnet-lease-renew-margin`).
    pub renew_margin: Duration,
    /// The file with this host's subnet for CNI plugins (`--subnet-file`).
    pub subnet_file: PathBuf,
    /// The directory of the host's state (`--state-dir`). One daemon at a time uses it.
    pub state_dir: PathBuf,
    /// The file with the private key of the backend wireguard (`--wireguard-key-file`). With
    /// `None` it is in `state_dir`. A key that Go flannel left beside `subnet_file` is copied
    /// there.
    pub wireguard_key_file: Option<PathBuf>,
    /// Drop packets to unused addresses of this host's subnet (`--ip-blackhole-route`).
    pub ip_blackhole_route: bool,
    /// Whether IPv4 routes go by nexthop objects (`--nexthop-objects`).
    pub nexthop_objects: NexthopObjects,
    /// The period of complete comparisons with the kernel; zero: none (`--kernel-resync`).
    pub kernel_resync: Duration,
    /// If full-size packets are lost on the path to a peer, lower the MTU of the route to the size
    /// that passes (`--path-mtu`). All other routes keep their MTU. Has no effect if [paths are not
    /// probed](ControlConfig::path_interval).
    pub path_mtu: bool,
    /// Allow backends that run commands of the network config (`--allow-commands`).
    pub allow_commands: bool,
    /// The firewall rules.
    pub firewall: FirewallConfig,
    /// The servers for health, metrics and control.
    pub control: ControlConfig,
}

/// A store of leases.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum StoreConfig {
    /// A directory.
    Directory(DirLocation),
    /// etcd.
    #[cfg(feature = "etcd")]
    Etcd(EtcdOptions),
    /// Annotations of Kubernetes nodes.
    #[cfg(feature = "kube")]
    Kubernetes {
        /// The API server and this node.
        options: KubeOptions,
    },
    /// A registry, for example an `EtcdRegistry` that you have opened, or one of your own. The
    /// daemon runs the lease engine on it.
    Registry(Arc<dyn Registry>),
    /// A manager of leases, for example a `KubeManager` that you have opened, or one of your own.
    /// The daemon uses its leases: [`DaemonConfig::renew_margin`] and the state of the last run
    /// have no effect on it.
    Manager(Arc<dyn SubnetManager>),
}

/// `--nexthop-objects`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum NexthopObjects {
    /// Use them where the kernel has them.
    Auto,
    /// Use them, or stop if the kernel has none.
    On,
    /// Never use them. Plain routes replace the nexthop objects of an earlier run.
    Off,
}

/// The firewall rules of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FirewallConfig {
    /// The families in which pod addresses are hidden from everything outside the pod network
    /// (`--ip-masq`).
    pub masquerade: MasqueradedFamilies,
    /// Choose the source ports of masqueraded packets at random.
    pub fully_random: bool,
    /// Networks to which packets are not masqueraded (`--ip-masq-exclude`), besides those of the
    /// network config. The whole address space is an error.
    pub masquerade_exclude: Vec<Subnet>,
    /// The source of masqueraded packets (`--ip-masq-source`). `None` for the address of the device
    /// by which a packet leaves.
    pub masquerade_source: Dual<IpAddr>,
    /// The source ports of masqueraded packets (`--ip-masq-ports`). `None` for all ports.
    pub masquerade_ports: Option<PortRange>,
    /// The devices by which masqueraded packets leave (`--ip-masq-interface`). Empty for all.
    pub masquerade_devices: Vec<LinkName>,
    /// Accept forwarded packets from and to pods (`--iptables-forward-rules`).
    pub forward: bool,
    /// Whether the node is not ready while the firewall cannot be opened, for example because
    /// iptables is missing. If it is false, this is only a warning, unless `masquerade` or
    /// `RequireEncryption` is on. The program `flanneld` sets it if `--iptables-forward-rules` is
    /// given.
    pub forward_required: bool,
    /// The period of checks of the rules (`--iptables-resync`).
    pub resync: Duration,
}

impl Default for FirewallConfig {
    fn default() -> Self {
        Self {
            masquerade: MasqueradedFamilies::None,
            fully_random: true,
            masquerade_exclude: Vec::new(),
            masquerade_source: Dual::default(),
            masquerade_ports: None,
            masquerade_devices: Vec::new(),
            forward: true,
            forward_required: false,
            resync: Duration::from_secs(5),
        }
    }
}

/// The families whose packets are masqueraded. In text it is the value of `--ip-masq`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MasqueradedFamilies {
    /// No family: `false`.
    #[default]
    None,
    /// IPv4 only: `ipv4`.
    V4,
    /// IPv6 only: `ipv6`.
    V6,
    /// Both families: `true`.
    Both,
}

impl MasqueradedFamilies {
    /// Whether the packets of a family are masqueraded.
    pub const fn has(self, family: Family) -> bool {
        match self {
            Self::None => false,
            Self::V4 => matches!(family, Family::V4),
            Self::V6 => matches!(family, Family::V6),
            Self::Both => true,
        }
    }

    /// Whether packets of any family are masqueraded.
    pub const fn is_any(self) -> bool {
        !matches!(self, Self::None)
    }
}

impl fmt::Display for MasqueradedFamilies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "false",
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
            Self::Both => "true",
        })
    }
}

/// Reads the value of `--ip-masq`.
impl FromStr for MasqueradedFamilies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "ipv4" => Ok(Self::V4),
            "ipv6" => Ok(Self::V6),
            _ => match go_bool(text) {
                Ok(true) => Ok(Self::Both),
                Ok(false) => Ok(Self::None),
                Err(_) => Err("expected true or false, ipv4 or ipv6".to_owned()),
            },
        }
    }
}

/// The servers of a daemon. By default nothing listens and nothing is probed. The program
/// `flanneld` has a control socket, a port for path probes, and path probes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ControlConfig {
    /// Serves `/healthz`, `/readyz` and `/metrics` over TCP (`--healthz-ip`, `--healthz-port`). An
    /// unspecified address serves both families.
    pub health: Option<SocketAddr>,
    /// The control socket (`--control-socket`).
    pub socket: ControlSocket,
    /// The group of the control socket (`--control-group`).
    pub group: Option<u32>,
    /// The port of path probes by doctors of other nodes (`--doctor-port`), or 0 if there is none.
    /// `flanneld` has 8473. A node probes its peers on its own port, so all nodes need the same
    /// one.
    pub doctor_port: u16,
    /// The time in which each path to a peer is probed (`--path-interval`), or zero if paths are
    /// not probed. `flanneld` has 300 s.
    pub path_interval: Duration,
}

impl Default for ControlConfig {
    fn default() -> Self {
        Self {
            health: None,
            socket: ControlSocket::Off,
            group: None,
            doctor_port: 0,
            path_interval: Duration::ZERO,
        }
    }
}

/// The control socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ControlSocket {
    /// `flanneld.sock` beside the subnet file, or `NAME.sock` beside a subnet file `NAME.env` with
    /// another name than `subnet.env`: the default of the program `flanneld`.
    /// If it cannot be made, the daemon runs without a control socket.
    BesideSubnetFile,
    /// This file. If it cannot be made, the daemon ends with an error.
    At(PathBuf),
    /// No control socket.
    #[default]
    Off,
}

impl DaemonConfig {
    /// A daemon on this store, with the backends of this build. It has the defaults of the command
    /// line, but no servers and no probes of paths.
    pub fn new(store: StoreConfig) -> Self {
        Self {
            store,
            backends: flannel_backends::all(),
            interface: Selectors::default(),
            renew_margin: Duration::from_secs(60 * 60),
            subnet_file: "/run/flannel/subnet.env".into(),
            state_dir: "/var/lib/flannel".into(),
            wireguard_key_file: None,
            ip_blackhole_route: false,
            nexthop_objects: NexthopObjects::Auto,
            kernel_resync: Duration::from_secs(300),
            path_mtu: false,
            allow_commands: false,
            firewall: FirewallConfig::default(),
            control: ControlConfig::default(),
        }
    }
}

impl StoreConfig {
    /// Whether a start waits after a refusal of the store. A Kubernetes cluster that boots may
    /// answer before it has loaded all permissions.
    pub(crate) fn refusals_pass(&self) -> bool {
        #[cfg(feature = "kube")]
        if matches!(self, Self::Kubernetes { .. }) {
            return true;
        }
        false
    }
}
