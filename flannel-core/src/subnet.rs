//! The trait of a subnet manager.

mod store;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::watch;

pub use self::store::{LastError, LockHolder, SkippedEntry, StoreFailure, StoreKind, StoreReason};
use crate::address::Dual;
use crate::config::Config;
use crate::error::Result;
use crate::lease::{Lease, LeaseAttrs, Revision, Subnets, View};

/// Acquires and keeps the lease of this node, and watches the leases of all nodes.
///
/// A program first reads the network config and acquires the lease. Then it runs
/// [`hold_lease`](Self::hold_lease) as long as it uses the subnets, because nothing else renews the
/// lease. At the same time it follows the leases of all nodes.
///
/// A method that asks the store fails with [`Error::Store`](crate::Error::Store) if the store does
/// not answer, and with [`Error::Refused`](crate::Error::Refused) if only an operator can help.
/// Further errors are listed at the method. Dropping a future loses nothing, except where a method
/// says so.
///
/// Implementations: `flannel_subnet::LocalManager` and `AssignedManager`,
/// `flannel_subnet_kube::KubeManager` (these need a tokio runtime), `testing::FakeSubnets`.
#[doc = include_str!("../docs/subnet_manager.md")]
#[async_trait]
pub trait SubnetManager: fmt::Debug + Send + Sync {
    /// The network config, parsed and checked.
    ///
    /// # Errors
    /// [`Error::NoConfig`](crate::Error::NoConfig), [`Error::Config`](crate::Error::Config).
    async fn network_config(&self) -> Result<Config>;

    /// Selects the config whose networks the first lease is taken from. A caller that cannot use
    /// the config that was returned last selects an earlier one. After the first lease, a call has
    /// no effect. The default implementation does nothing.
    fn use_config(&self, _config: &Config) {}

    /// Waits until there is a valid network config that differs from `known`. Waits on while the
    /// config is wrong or the store does not answer. The default implementation never returns.
    ///
    /// # Errors
    /// Another call cannot help either.
    async fn config_changed(&self, _known: &Config) -> Result<Config> {
        std::future::pending().await
    }

    /// The store's data about this node. The default implementation has none.
    async fn hints(&self) -> Result<Hints> {
        Ok(Hints::default())
    }

    #[doc = include_str!("../docs/acquire_lease.md")]
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Whether [`acquire_lease`](Self::acquire_lease) publishes the attributes. Otherwise the
    /// operator writes them.
    fn publishes_attrs(&self) -> bool {
        true
    }

    /// Publishes other attributes for the lease of this node. Returns the new lease.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) if the lease was written after `held` was read.
    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Renews the lease until it ends, and returns the reason of the end. Retries failed renewals.
    ///
    /// # Errors
    /// The lease cannot be held, and another call cannot help.
    ///
    /// # Cancel safety
    /// If the future is dropped, the lease stays until it expires.
    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd>;

    /// A receiver of the leases of all nodes, this node included. Its first value may be
    /// [`View::unknown`]. It stays open as long as the manager exists.
    async fn watch_leases(&self) -> Result<watch::Receiver<View>>;

    /// A receiver that shows whether this node owns its subnets. It changes when the lease expires,
    /// without a request to the store. It stays open as long as the manager exists.
    fn ownership(&self) -> watch::Receiver<Ownership>;

    /// Whether [`SubnetManager::report`] does anything.
    fn publishes_readiness(&self) -> bool {
        false
    }

    #[doc = include_str!("../docs/report.md")]
    async fn report(&self, _readiness: &Readiness) -> Result<()> {
        Ok(())
    }

    /// The state of the store, without a request to it.
    fn store_status(&self) -> StoreStatus;
}

/// Whether this node owns the subnets of its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ownership {
    /// No lease was acquired yet.
    #[default]
    NotAcquired,
    /// The subnets are this node's.
    Held {
        /// The end by the wall clock; `None`: the lease has no end. It changes with each renewal,
        /// and when the wall clock is set.
        until: Option<SystemTime>,
    },
    /// The subnets are no longer this node's. Routes to peers stay.
    Lost {
        /// When the ownership ended.
        since: SystemTime,
        /// The reason.
        why: Loss,
    },
}

impl Ownership {
    /// Whether the subnets are this node's.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// The time from `now` to the end of the lease; `None` if it is not held or has no end.
    pub fn remaining(&self, now: SystemTime) -> Option<Duration> {
        let Self::Held { until: Some(until) } = self else { return None };
        Some(until.duration_since(now).unwrap_or_default())
    }
}

/// Why this node no longer owns its subnets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// No renewal was confirmed in time. Keep [`SubnetManager::hold_lease`] and the network
    /// running. A later renewal restores the ownership, or `hold_lease` returns the reason.
    Unconfirmed,
    /// The lease ended, as [`SubnetManager::hold_lease`] returned.
    Ended(LeaseEnd),
    /// The store refuses the lease for now. The reason is a sentence without a full stop.
    Withdrawn(String),
}

/// The readiness of this node's network.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Readiness {
    /// The daemon starts.
    Starting {
        /// An earlier run left objects of the network in the kernel.
        datapath_in_place: bool,
    },
    /// The network is in place.
    Ready,
    /// The network is not in place.
    NotReady {
        /// The reason, as a sentence without a full stop.
        reason: String,
    },
}

/// The store's data about this node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Public addresses that the store prescribes for this node. They override the command line.
    pub public: Dual<IpAddr>,
    /// Public addresses that the store publishes instead of those in the attributes, so that peers
    /// see them.
    pub advertised: Dual<IpAddr>,
    /// The attributes that this node published last, so that a backend can keep its keys and MAC
    /// addresses; `None`: not known.
    pub last_published: Option<LeaseAttrs>,
    /// The subnets that this node had before; `None`: not known.
    pub previous: Option<Subnets>,
    /// The expired lease of this node, while the store does not answer; else `None`. Its subnets
    /// must not be used, but peers can be reached (`flannel_route::JoinOptions::lapsed`).
    pub lapsed: Option<Lease>,
}

/// Why a lease ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// It was not renewed in time, and the store deleted it.
    Expired,
    /// It was deleted, which makes the daemon of this node exit.
    Deleted,
    /// Another node holds it now.
    Taken {
        /// A description of that node, for a message.
        by: String,
    },
    /// The store gave this node other subnets.
    Moved {
        /// The new subnets.
        to: Subnets,
    },
}

impl fmt::Display for LeaseEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("it expired before it could be renewed"),
            Self::Deleted => f.write_str("somebody deleted it, which makes flanneld exit"),
            Self::Taken { by } => write!(f, "it is now held by {by}"),
            Self::Moved { to } => write!(f, "this node was given {to} instead"),
        }
    }
}

/// The number of requests of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Requests sent.
    pub sent: u64,
    /// Requests that failed. A watch that ended with an error counts too.
    pub failed: u64,
}

/// The state of a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// The store's name, such as `dir:/var/lib/flannel`.
    pub store: String,
    /// The kind of the store.
    pub kind: StoreKind,
    /// The last revision that the store confirmed, and the time; `None` before its first answer.
    pub confirmed: Option<(Revision, SystemTime)>,
    /// Requests by kind, such as `list`, `watch` or `renew`.
    pub calls: BTreeMap<&'static str, Calls>,
    /// Entries that were skipped because they are not leases.
    pub skipped: Vec<SkippedEntry>,
    /// The last failure, or `None` if no request failed since the last success.
    pub last_error: Option<LastError>,
    /// Why the network config in the store is not used (wrong, or deleted). `None`: it is used.
    pub wrong_config: Option<String>,
}

impl StoreStatus {
    /// Requests sent.
    pub fn requests(&self) -> u64 {
        self.calls.values().map(|calls| calls.sent).sum()
    }

    /// Requests that failed.
    pub fn failures(&self) -> u64 {
        self.calls.values().map(|calls| calls.failed).sum()
    }
}
