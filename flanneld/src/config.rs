//! The configuration of a daemon, as typed values.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flannel_backends::Backends;
use flannel_core::SubnetManager;
use flannel_netlink::iface::Selectors;
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
    /// Hide pod addresses from everything outside the pod network (`--ip-masq`).
    pub masquerade: bool,
    /// Choose the source ports of masqueraded packets at random.
    pub fully_random: bool,
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
            masquerade: false,
            fully_random: true,
            forward: true,
            forward_required: false,
            resync: Duration::from_secs(5),
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
    /// `flanneld.sock` in the directory of the subnet file, the default of the program `flanneld`.
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
