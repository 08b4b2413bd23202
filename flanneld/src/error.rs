//! The errors that stop the daemon, with their exit codes.

use std::path::{Path, PathBuf};

use flannel_core::subnet::{LeaseEnd, StoreKind};
use flannel_core::{Remedy, Subnets};
use flannel_doctor::store::remedy_of;

/// An error that stops the daemon.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options are wrong or ask for help, or a file that they name cannot be used.
    #[error(transparent)]
    Options(#[from] flannel_options::Error),
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
        /// The name of the interface.
        name: flannel_core::object::LinkName,
        /// The reason.
        reason: String,
    },
    /// The config names an unknown backend.
    #[error(transparent)]
    UnknownBackend(#[from] flannel_backends::UnknownBackend),
    /// The config names a backend that runs commands, and no option allows it.
    #[error(
        "network config: field Backend.Type: {kind:?} runs the commands of the config on this \
         host; if all who may write the config may do that, start the daemon with --allow-commands"
    )]
    CommandsNotAllowed {
        /// The type of the backend.
        kind: &'static str,
    },
    /// The config names no backend, and the cluster's leases show that Go flannel chose `udp`.
    #[error(
        "network config: it names no Backend, and {holder} holds {subnets} without a backend type: \
         that node runs Go flannel's udp, its choice when none is named (or this is a reservation, \
         which then needs a BackendType); write the backend into the config, for example \
         {{\"Backend\": {{\"Type\": \"vxlan\"}}}}, and restart every node"
    )]
    ImplicitUdp {
        /// The key of a lease of `udp`.
        subnets: Box<Subnets>,
        /// The node of that lease.
        holder: String,
    },
    /// `--nexthop-objects=on`, and the kernel has none.
    #[error(
        "--nexthop-objects=on: this kernel has no nexthop objects (Linux 5.3 and later have them); \
         auto uses plain routes instead"
    )]
    NoNexthopObjects,
    /// A store or backend cannot go on.
    #[error(transparent)]
    Network(#[from] flannel_core::Error),
    /// The subnet file cannot be written.
    #[error("--subnet-file: {0}")]
    SubnetFile(#[from] flannel_subnet::SubnetFileError),
    /// The firewall rules of the options cannot be made.
    #[error("firewall rules: {0}")]
    Firewall(#[from] flannel_firewall::Error),
    /// The daemon cannot listen on an address or socket of the options.
    #[error("{what}: {reason}")]
    Listen {
        /// The options.
        what: String,
        /// The reason.
        reason: String,
    },
    /// Another daemon on this host has a device or a pod network of this one.
    #[error(
        "another flanneld on this host has the {what}: stop it; or, if both are to run, give each \
         one a network config of its own (--etcd-prefix, --registry, --net-config-path) with \
         another Network and another Backend (another VNI of vxlan, or another Type)"
    )]
    Claimed {
        /// The device or the network.
        what: String,
    },
    /// Another daemon on this host writes the subnet file of this one.
    #[error(
        "another flanneld on this host writes {}: stop it; or, if both are to run, give each one \
         another --subnet-file",
        path.display()
    )]
    SubnetFileClaimed {
        /// The subnet file.
        path: PathBuf,
    },
    /// The devices of a network with this config could not be made.
    #[error("{0}")]
    DevicesFailed(String),
    /// The network stopped by itself.
    #[error("the network stopped: {0}")]
    Stopped(String),
    /// This node no longer owns its subnets.
    #[error(
        "the lease {subnets} is lost: {end}{}; subnet file and data path stay in place",
        if **end == LeaseEnd::Deleted { ", which makes flanneld exit" } else { "" }
    )]
    LeaseLost {
        /// The lease.
        subnets: Box<Subnets>,
        /// The cause.
        end: Box<LeaseEnd>,
    },
}

impl Error {
    /// A file of the daemon cannot be read or written.
    pub(crate) fn file(path: &Path, reason: &impl ToString) -> Self {
        flannel_options::Error::File { path: path.to_owned(), reason: reason.to_string() }.into()
    }

    /// What removes the cause, with a store of this kind.
    pub(crate) fn remedy(&self, store: &StoreKind) -> Remedy {
        match self {
            Self::Network(error) => remedy_of(error, store),
            Self::UnknownBackend(_) | Self::ImplicitUdp { .. } => Remedy::SetConfig,
            Self::Interface(_) | Self::UnfitInterface { .. } => Remedy::run("ip address"),
            Self::Firewall(error) => error.remedy(),
            _ => Remedy::ReadLog,
        }
    }

    /// The store does not answer, and may answer soon.
    pub(crate) fn is_of_store(&self) -> bool {
        matches!(self, Self::Network(flannel_core::Error::Store { .. }))
    }

    /// The exit code of the process: 0 for help, 2 for wrong usage, 1 for every other error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Options(error) => error.exit_code(),
            _ => 1,
        }
    }
}
