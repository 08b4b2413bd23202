//! The error type of the traits in this crate.

use crate::address::{Family, ParseError};
use crate::json::FieldError;
use crate::kernel::KernelError;
use crate::lease::{LeaseAttrs, Offer, Subnets};
use crate::subnet::{StoreFailure, StoreReason};

/// An error of a store, a backend or a network.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store has no network config yet: write one, then try again.
    #[error("{location} holds no network config yet")]
    NoConfig {
        /// The file or key.
        location: String,
    },
    /// The network config is wrong: correct it, then try again.
    #[error("network config in {location}: {source}")]
    Config {
        /// The file or key.
        location: String,
        /// The first wrong field.
        source: FieldError,
    },
    /// The value of a lease is wrong.
    #[error("lease {location}: {source}")]
    Lease {
        /// The file or key.
        location: String,
        /// The first wrong field.
        source: FieldError,
    },
    /// A subnet, lease key or other value is wrong.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// All subnets between `SubnetMin` and `SubnetMax` are taken.
    #[error(
        "out of {family} subnets: all {total} between SubnetMin and SubnetMax are taken; enlarge \
         the network or release leases"
    )]
    OutOfSubnets {
        /// The family without a free subnet.
        family: Family,
        /// The number of subnets for nodes.
        total: u128,
    },
    /// Another process has written the lease since it was read: read it, then try again.
    #[error("{subnets} was changed by somebody else meanwhile")]
    Conflict {
        /// The subnets of the lease.
        subnets: Subnets,
    },
    /// Another program must first write a value that this node needs: wait, then try again.
    #[error("{store}: {reason}")]
    NotReady {
        /// The name of the store.
        store: String,
        /// The missing or wrong value, and the expected value.
        reason: String,
    },
    /// The store refuses the request of this node: an operator must remove the cause.
    #[error("{store}: {reason}")]
    Refused {
        /// The name of the store, and of the object in it if there is one.
        store: String,
        /// The reason, and the expected value.
        reason: StoreReason,
    },
    /// The store did not answer, or gave an unexpected answer: try again later.
    #[error("{store}: {source}")]
    Store {
        /// The name of the store, and of the object in it if there is one.
        store: String,
        /// The cause. [`Error::store_failure`] looks in it for a [`StoreReason`], and for errors of
        /// a file system.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A request to the kernel failed.
    #[error("{object}: {source}")]
    Kernel {
        /// What was requested, such as `vxlan device`.
        object: String,
        /// The cause.
        source: KernelError,
    },
    /// A backend cannot run on this host, or with this config.
    #[error("backend {backend}: {reason}")]
    Backend {
        /// The name of the backend ([`Backend::kind`](crate::Backend::kind)).
        backend: String,
        /// The reason, and the expected value.
        reason: String,
    },
}

impl Error {
    /// The cause of a failed request to a store. [`StoreFailure::Other`] if it is not known, or if
    /// this error does not come from a store.
    pub fn store_failure(&self) -> StoreFailure {
        match self {
            Self::Refused { reason, .. } => reason.failure.clone(),
            Self::Store { source, .. } => StoreFailure::of(&**source),
            _ => StoreFailure::Other,
        }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The node of a lease, for a message: `192.0.2.7 (vxlan)`.
pub fn holder(attrs: &LeaseAttrs) -> String {
    let Offer { kind, public, .. } = &attrs.preferred;
    let mut addresses = public.values().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if addresses.is_empty() {
        addresses = "an unknown node".to_owned();
    }
    if kind.is_empty() { addresses } else { format!("{addresses} ({kind})") }
}
