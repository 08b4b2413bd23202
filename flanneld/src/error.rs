//! Why the daemon stops, and with which exit code.

use std::path::PathBuf;

use flannel_core::Subnets;
use flannel_core::subnet::LeaseEnd;

/// Why the daemon cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not an error: the text that `--help` or `--version` asked for.
    #[error("{0}")]
    Help(String),
    /// The command line or the environment is wrong.
    #[error("{0}")]
    Usage(String),
    /// The registry cannot be used.
    #[error("--registry {url}: {source}")]
    Registry {
        /// As given.
        url: String,
        /// Why.
        source: Box<flannel_core::Error>,
    },
    /// The Kubernetes API cannot be used.
    #[error("--kube-subnet-mgr: {0}")]
    Kube(#[source] Box<flannel_core::Error>),
    /// The kernel cannot be reached.
    #[error("the kernel: {0}")]
    Kernel(#[from] flannel_core::kernel::KernelError),
    /// No interface fits.
    #[error(transparent)]
    Interface(#[from] flannel_netlink::iface::SelectError),
    /// The interface that was chosen cannot serve.
    #[error("external interface {name}: {reason}")]
    UnfitInterface {
        /// Its name.
        name: flannel_core::object::LinkName,
        /// Why not.
        reason: String,
    },
    /// The config names a backend that does not exist.
    #[error(transparent)]
    UnknownBackend(#[from] flannel_core::backend::UnknownBackend),
    /// The config names no backend, and the cluster's leases show that Go flannel chose `udp`.
    #[error(
        "network config: it names no Backend, and {holder} holds {subnets} without a backend type: that node runs \
         Go flannel's udp, its choice when none is named (or this is a reservation, which then needs a BackendType); write the backend into the config, for example \
         {{\"Backend\": {{\"Type\": \"vxlan\"}}}}, and restart every node"
    )]
    ImplicitUdp {
        /// A lease of the other kind.
        subnets: Box<Subnets>,
        /// Its node.
        holder: String,
    },
    /// `--nexthop-objects=on`, and the kernel has none.
    #[error(
        "--nexthop-objects=on: this kernel has none (Linux 5.3 and later do); auto takes plain routes then"
    )]
    NoNexthopObjects,
    /// A store or backend cannot go on.
    #[error(transparent)]
    Network(#[from] flannel_core::Error),
    /// The subnet file cannot be written.
    #[error("--subnet-file: {0}")]
    SubnetFile(#[from] flannel_subnet::SubnetEnvError),
    /// There is nothing to keep the firewall rules with, that are asked for.
    #[error("firewall rules: {0}")]
    Firewall(#[from] flannel_firewall::Error),
    /// Nobody could ask the daemon how it is, though somebody wants to.
    #[error("{what}: {reason}")]
    Listen {
        /// The options.
        what: String,
        /// Why not.
        reason: String,
    },
    /// A file of ours cannot be read or written.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What happened.
        reason: String,
    },
    /// The network stopped by itself.
    #[error("the network stopped: {0}")]
    Stopped(String),
    /// This node no longer owns its subnets.
    #[error("the lease {subnets} is lost: {end}; subnet file and data path stay in place")]
    LeaseLost {
        /// The lease.
        subnets: Box<Subnets>,
        /// How it ended.
        end: Box<LeaseEnd>,
    },
}

impl From<flannel_options::Error> for Error {
    fn from(error: flannel_options::Error) -> Self {
        match error {
            flannel_options::Error::Help(text) => Self::Help(text),
            flannel_options::Error::Usage(text) => Self::Usage(text),
            flannel_options::Error::Registry { url, source } => Self::Registry { url, source },
            flannel_options::Error::File { path, reason } => Self::File { path, reason },
            other => Self::Usage(other.to_string()),
        }
    }
}

impl Error {
    /// The store did not answer, and may soon.
    pub(crate) fn is_of_store(&self) -> bool {
        matches!(self, Self::Network(flannel_core::Error::Store { .. }))
    }

    /// 0 for help, 2 for usage, 1 for everything that happens while running.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Usage(_) => 2,
            _ => 1,
        }
    }
}
