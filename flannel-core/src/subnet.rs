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
/// not answer, and with [`Error::Refused`](crate::Error::Refused) if an operator must remove the
/// cause. The documentation of a method has its further errors. Dropping a future loses nothing,
/// unless the documentation of the method says so.
///
/// Implementations are `flannel_subnet::LocalManager`, `flannel_subnet::AssignedManager` and
/// `flannel_subnet_kube::KubeManager`, which need a tokio runtime, and `testing::FakeSubnets`.
#[doc = include_str!("../docs/subnet_manager.md")]
#[async_trait]
pub trait SubnetManager: fmt::Debug + Send + Sync {
    /// The network config, parsed and checked.
    ///
    /// # Errors
    /// [`Error::NoConfig`](crate::Error::NoConfig), [`Error::Config`](crate::Error::Config).
    async fn network_config(&self) -> Result<Config>;

    /// Selects the config from whose networks the first lease is taken. If a caller cannot use the
    /// config that was returned last, it selects an earlier config. After the first lease, a call
    /// has no effect. The default implementation does nothing.
    fn use_config(&self, _config: &Config) {}

    /// Waits until the store has a valid network config that differs from `known`, and returns it.
    /// It goes on waiting while the config is wrong or the store does not answer. The default
    /// implementation never returns.
    ///
    /// # Errors
    /// The config cannot be watched, and another call cannot help.
    async fn config_changed(&self, _known: &Config) -> Result<Config> {
        std::future::pending().await
    }

    /// What the store knows about this node. The default implementation returns empty hints.
    async fn hints(&self) -> Result<Hints> {
        Ok(Hints::default())
    }

    #[doc = include_str!("../docs/acquire_lease.md")]
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Whether [`acquire_lease`](Self::acquire_lease) publishes the attributes, as by default. If
    /// not, an operator writes them into the store.
    fn publishes_attrs(&self) -> bool {
        true
    }

    /// Publishes other attributes for the lease of this node. Returns the new lease.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) if the lease was written after `held` was read.
    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Renews the lease until it ends, and returns the reason of its end. Failed renewals are
    /// retried.
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

    /// Whether [`SubnetManager::report`] publishes anything. The default is `false`.
    fn publishes_readiness(&self) -> bool {
        false
    }

    #[doc = include_str!("../docs/report.md")]
    async fn report(&self, _readiness: &Readiness) -> Result<()> {
        Ok(())
    }

    /// What the store has assigned to this node as of its last answer, without a request to it. A
    /// program can so withdraw subnets of an earlier run before a lease is acquired, or while none
    /// can be. The default implementation returns [`Assignment::Unknown`].
    fn assignment(&self) -> Assignment {
        Assignment::Unknown
    }

    /// The state of the store, without a request to it.
    fn store_status(&self) -> StoreStatus;
}

/// The subnets that a store has assigned to this node. Only a store that chooses the subnets itself
/// knows them before a lease is acquired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Assignment {
    /// The store does not assign subnets, or has not answered yet.
    #[default]
    Unknown,
    /// This node has no subnets that fit the network config.
    Nothing,
    /// This node has these subnets.
    Subnets(Subnets),
}

/// Whether this node owns the subnets of its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ownership {
    /// This node has not acquired a lease yet.
    #[default]
    NotAcquired,
    /// This node owns the subnets.
    Held {
        /// The end by the wall clock, or `None` if the lease has no end. It changes with each
        /// renewal, and when the wall clock is set.
        until: Option<SystemTime>,
    },
    /// This node no longer owns the subnets. Routes to peers stay.
    Lost {
        /// The time at which the ownership ended, by the wall clock.
        since: SystemTime,
        /// The reason.
        why: Loss,
    },
}

impl Ownership {
    /// Whether this node owns the subnets.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// The time from `now` to the end of the lease. `None` if the lease is not held or has no end.
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
    /// The program that runs the network starts.
    Starting {
        /// Whether an earlier run left objects of the network in the kernel, so that pods can
        /// already reach peers.
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

/// What the store knows about this node before it acquires a lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hints {
    /// Public addresses that the store prescribes for this node. They override the options of the
    /// node.
    pub public: Dual<IpAddr>,
    /// Names, addresses or networks (CIDR) that the store prescribes for the external interface of
    /// this node, the preferred one first. If there is one, options of the node do not select it.
    pub interface: Vec<String>,
    /// The addresses of this node in the store, such as the `InternalIP` of a Kubernetes node.
    pub node_addresses: Dual<IpAddr>,
    /// Public addresses that the store publishes in place of the addresses in the attributes.
    pub advertised: Dual<IpAddr>,
    /// The attributes that this node published last, or `None` if they are not known. They let a
    /// backend keep its keys and MAC addresses.
    pub last_published: Option<LeaseAttrs>,
    /// The subnets that this node had before, or `None` if they are not known.
    pub previous: Option<Subnets>,
    /// The lease of this node that expired while the store did not answer, or `None`. Its subnets
    /// must not be used, but peers can be reached (`flannel_route::JoinOptions::lapsed`).
    pub lapsed: Option<Lease>,
}

impl Hints {
    /// Sets [`Hints::public`].
    #[must_use]
    pub fn with_public(self, public: Dual<IpAddr>) -> Self {
        Self { public, ..self }
    }

    /// Sets [`Hints::interface`].
    #[must_use]
    pub fn with_interface(self, interface: Vec<String>) -> Self {
        Self { interface, ..self }
    }

    /// Sets [`Hints::node_addresses`].
    #[must_use]
    pub fn with_node_addresses(self, node_addresses: Dual<IpAddr>) -> Self {
        Self { node_addresses, ..self }
    }

    /// Sets [`Hints::advertised`].
    #[must_use]
    pub fn with_advertised(self, advertised: Dual<IpAddr>) -> Self {
        Self { advertised, ..self }
    }

    /// Sets [`Hints::last_published`].
    #[must_use]
    pub fn with_last_published(self, last_published: Option<LeaseAttrs>) -> Self {
        Self { last_published, ..self }
    }

    /// Sets [`Hints::previous`].
    #[must_use]
    pub fn with_previous(self, previous: Option<Subnets>) -> Self {
        Self { previous, ..self }
    }

    /// Sets [`Hints::lapsed`].
    #[must_use]
    pub fn with_lapsed(self, lapsed: Option<Lease>) -> Self {
        Self { lapsed, ..self }
    }
}

/// Why a lease ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// It was not renewed in time, so the store deleted it.
    Expired,
    /// An operator or another program deleted it. The node must stop using the subnets.
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
            Self::Deleted => f.write_str("somebody deleted it"),
            Self::Taken { by } => write!(f, "it is now held by {by}"),
            Self::Moved { to } => write!(f, "this node was given {to} instead"),
        }
    }
}

/// The numbers of requests of one kind since the program started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// The number of requests that were sent.
    pub sent: u64,
    /// The number of requests that failed. A watch that ended with an error counts too.
    pub failed: u64,
}

/// An answer of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Confirmed {
    /// The revision of the store in the last answer that had one, or 0.
    pub revision: Revision,
    /// The time of the answer, by the wall clock.
    pub at: SystemTime,
}

/// The state of a store, as this node sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStatus {
    /// The name of the store, such as `dir:/var/lib/flannel`.
    pub store: String,
    /// The kind of the store.
    pub kind: StoreKind,
    /// The last answer of the store, or `None` before its first answer.
    pub confirmed: Option<Confirmed>,
    /// The numbers of requests of each kind, such as `list`, `watch` or `renew`.
    pub calls: BTreeMap<&'static str, Calls>,
    /// The entries that are skipped because they are not leases.
    pub skipped: Vec<SkippedEntry>,
    /// The last failure, or `None` if no request has failed since the last success.
    pub last_error: Option<LastError>,
    /// Why this node does not use the network config in the store, which is wrong or was deleted.
    /// `None` if it uses the config.
    pub wrong_config: Option<String>,
}

impl StoreStatus {
    /// The status of a store that has not been asked yet.
    pub fn new(store: impl Into<String>, kind: StoreKind) -> Self {
        Self { store: store.into(), kind, ..Self::default() }
    }

    /// Sets [`StoreStatus::confirmed`].
    #[must_use]
    pub fn with_confirmed(self, confirmed: Option<Confirmed>) -> Self {
        Self { confirmed, ..self }
    }

    /// Sets [`StoreStatus::calls`].
    #[must_use]
    pub fn with_calls(self, calls: BTreeMap<&'static str, Calls>) -> Self {
        Self { calls, ..self }
    }

    /// Sets [`StoreStatus::skipped`].
    #[must_use]
    pub fn with_skipped(self, skipped: Vec<SkippedEntry>) -> Self {
        Self { skipped, ..self }
    }

    /// Sets [`StoreStatus::last_error`].
    #[must_use]
    pub fn with_last_error(self, last_error: Option<LastError>) -> Self {
        Self { last_error, ..self }
    }

    /// Sets [`StoreStatus::wrong_config`].
    #[must_use]
    pub fn with_wrong_config(self, wrong_config: Option<String>) -> Self {
        Self { wrong_config, ..self }
    }

    /// The number of requests of all kinds.
    pub fn requests(&self) -> u64 {
        self.calls.values().map(|calls| calls.sent).sum()
    }

    /// The number of failed requests of all kinds.
    pub fn failures(&self) -> u64 {
        self.calls.values().map(|calls| calls.failed).sum()
    }
}
