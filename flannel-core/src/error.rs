//! The one error type of the traits in this crate.

use crate::address::Family;
use crate::json::FieldError;
use crate::kernel::KernelError;
use crate::lease::{KeyError, LeaseAttrs, Subnets};

/// Why a store, a backend or a network cannot go on. Variants are what a caller can do something
/// about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store has no network config yet: write one, then try again.
    #[error("{location} holds no network config yet")]
    NoConfig {
        /// The file or key.
        location: String,
    },
    /// The network config is wrong: mend it, then try again.
    #[error("network config in {location}: {source}")]
    Config {
        /// The file or key.
        location: String,
        /// Which field.
        source: FieldError,
    },
    /// A lease's value is wrong.
    #[error("lease {location}: {source}")]
    Lease {
        /// The file or key.
        location: String,
        /// Which field.
        source: FieldError,
    },
    /// A lease's key is wrong.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// Every subnet is taken.
    #[error(
        "out of {family} subnets: all {total} between SubnetMin and SubnetMax are taken; enlarge the network or release leases"
    )]
    OutOfSubnets {
        /// The family.
        family: Family,
        /// How many there are.
        total: u128,
    },
    /// A write was refused because somebody else wrote first: read again.
    #[error("{subnets} was changed by somebody else meanwhile")]
    Conflict {
        /// The lease.
        subnets: Subnets,
    },
    /// The lease is somebody else's.
    #[error("{subnets} is held by {holder}")]
    Taken {
        /// The lease.
        subnets: Subnets,
        /// The holder, as its attributes say.
        holder: String,
    },
    /// The store does not hold yet what this node needs, and others must put it there: wait, then
    /// try again.
    #[error("{store}: {reason}")]
    NotReady {
        /// The store.
        store: String,
        /// What is missing or wrong there, and what would be right.
        reason: String,
    },
    /// The store says that this node must not do what was asked.
    #[error("{store}: {reason}")]
    Refused {
        /// The store.
        store: String,
        /// Why, and what would be right.
        reason: String,
    },
    /// The store did not answer, or not in a way that can be understood: try again later.
    #[error("{store}: {source}")]
    Store {
        /// The store, and the object in it.
        store: String,
        /// What happened.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The kernel refused.
    #[error("{object}: {source}")]
    Kernel {
        /// The object.
        object: String,
        /// Errno and explanation.
        source: KernelError,
    },
    /// A backend cannot run here, or not with this config.
    #[error("backend {backend}: {reason}")]
    Backend {
        /// The backend.
        backend: String,
        /// Why, and what would be right.
        reason: String,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names the node behind a lease for a message: `192.0.2.7 (vxlan)`.
pub fn holder(attrs: &LeaseAttrs) -> String {
    let addresses: Vec<String> = attrs.preferred.public.values().map(ToString::to_string).collect();
    let addresses =
        if addresses.is_empty() { "an unknown node".to_owned() } else { addresses.join(", ") };
    let backend =
        if attrs.preferred.kind.is_empty() { "no backend type" } else { &attrs.preferred.kind };
    format!("{addresses} ({backend})")
}
