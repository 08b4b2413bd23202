//! The trait of a subnet manager: it keeps a lease for this node and follows the leases of all
//! nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::address::Dual;
use crate::config::Config;
use crate::error::Result;
use crate::lease::{Lease, LeaseAttrs, Revision, Subnets, View};

/// Gets this node its lease and shows the leases of all nodes.
///
/// Implementations: `flannel_subnet::LocalManager` over any registry, `testing::FakeSubnets`
/// (feature `testing`).
///
/// ```
/// use flannel_core::{Result, SubnetManager};
/// use flannel_core::lease::LeaseAttrs;
///
/// /// Prints the leases of all nodes, once.
/// async fn print_leases(subnets: &dyn SubnetManager) -> Result<()> {
///     let views = subnets.watch_leases().await?;
///     for lease in views.borrow().leases.iter() {
///         println!("{} {:?}", lease.subnets, lease.attrs.preferred.public);
///     }
///     Ok(())
/// }
/// ```
#[async_trait]
pub trait SubnetManager: fmt::Debug + Send + Sync {
    /// The network config, parsed and checked.
    ///
    /// # Errors
    /// [`Error::NoConfig`](crate::Error::NoConfig), [`Error::Config`](crate::Error::Config), or the
    /// store does not answer.
    async fn network_config(&self) -> Result<Config>;

    /// Waits until the store holds a valid network config other than `known`, and returns it. Wrong
    /// configs, and a store that does not answer, do not end the wait. If configs do not change, it
    /// waits for ever.
    ///
    /// # Errors
    /// Waiting cannot help.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call compares again.
    async fn config_changed(&self, _known: &Config) -> Result<Config> {
        std::future::pending().await
    }

    /// The store's data about this node, before the external interface is chosen.
    ///
    /// # Errors
    /// The store does not answer, or its content cannot be read.
    async fn hints(&self) -> Result<Hints> {
        Ok(Hints::default())
    }

    /// Gets this node a lease with these attributes: the one it has, the one it had before, or a
    /// free one.
    ///
    /// # Errors
    /// [`Error::OutOfSubnets`](crate::Error::OutOfSubnets), [`Error::Taken`](crate::Error::Taken),
    /// or the store does not answer. A lost race is not an error; the next subnet is tried.
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease may have been acquired. The next call finds it by the
    /// public address.
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Publishes other attributes for the lease that we hold.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) if the lease was written after `held` was read.
    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Keeps the lease until it ends, and returns the reason. Failures to renew are retried inside.
    ///
    /// # Errors
    /// The lease cannot be kept, and another call cannot help.
    ///
    /// # Cancel safety
    /// Dropping stops renewing; the lease lives on until it expires.
    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd>;

    /// The leases of all nodes, always the latest: bursts coalesce, nothing queues. The receiver
    /// may start with [`View::unknown`] and stays valid for as long as the manager lives.
    ///
    /// # Errors
    /// Watching cannot even start.
    async fn watch_leases(&self) -> Result<watch::Receiver<View>>;

    /// Whether this node owns its subnets, always the latest. The receiver stays valid for as long
    /// as the manager lives. A manager whose leases expire updates it when the lease ends, without
    /// a request to the store.
    fn ownership(&self) -> watch::Receiver<Ownership>;

    /// Whether [`SubnetManager::report`] publishes anything. If not, a caller need not find out the
    /// readiness.
    fn publishes_readiness(&self) -> bool {
        false
    }

    /// Publishes how ready this node's network is, if the store has a place for it, and keeps it
    /// published until the next report. [`Readiness::Starting`] is reported before the first
    /// [`SubnetManager::acquire_lease`] and completes when it is published. The others return at
    /// once, and failures to publish them are retried inside.
    ///
    /// # Errors
    /// The store does not answer. Only for [`Readiness::Starting`].
    ///
    /// # Cancel safety
    /// If the future is dropped, it may have been published.
    async fn report(&self, _readiness: &Readiness) -> Result<()> {
        Ok(())
    }

    /// How the store is doing. Cheap; wakes nobody.
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
        /// The end, unless the lease is renewed; `None`: no end. By wall clock, and updated when
        /// somebody sets the clock.
        until: Option<SystemTime>,
    },
    /// The subnets are no longer this node's. Routes to peers stay, but this node is not ready.
    Lost {
        /// When the ownership ended.
        since: SystemTime,
        /// The reason.
        why: Loss,
    },
}

impl Ownership {
    /// The subnets are this node's.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Held { .. })
    }

    /// How long the lease is held from `now` on unless it is renewed; `None` if it is not held or
    /// has no end.
    pub fn remaining(&self, now: SystemTime) -> Option<Duration> {
        match self {
            Self::Held { until } => {
                until.map(|until| until.duration_since(now).unwrap_or_default())
            }
            _ => None,
        }
    }
}

/// Why this node does not own its subnets any more.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The store did not confirm a renewal in time. It may still do so.
    Unconfirmed,
    /// The lease ended, as [`SubnetManager::hold_lease`] returned.
    Ended(LeaseEnd),
    /// The store does not grant the lease at present, with the reason as a sentence without a full
    /// stop. The lease may come back.
    Withdrawn(String),
}

/// How ready this node's network is.
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

/// The store's data about this node, before its external interface is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Public addresses that the store prescribes for this node; they override the command line.
    pub public: Dual<IpAddr>,
    /// The attributes that this node published last, if the store still has them. A backend keeps
    /// its keys and MAC addresses.
    pub last_published: Option<LeaseAttrs>,
    /// The subnets that this node had before.
    pub previous: Option<Subnets>,
    /// The lease that this node had until it expired, while the store does not answer. Its subnets
    /// must not be used. Peers can be reached with the attributes that were published with it.
    pub lapsed: Option<Lease>,
}

/// The reason for which a lease is no longer ours.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// It was not renewed in time, and the store deleted it.
    Expired,
    /// Somebody deleted it, which orders this node to stop.
    Deleted,
    /// Another node holds it now.
    Taken {
        /// That node, for a message.
        by: String,
    },
    /// The store gave this node other subnets.
    Moved {
        /// The new ones.
        to: Subnets,
    },
}

impl fmt::Display for LeaseEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Expired => f.write_str("it expired before it could be renewed"),
            Self::Deleted => f.write_str("somebody deleted it, which orders this node to stop"),
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
    /// Requests that failed. For watches, those that ended with an error later count too.
    pub failed: u64,
}

/// How a store is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// The store's name, such as `dir:/var/lib/flannel`.
    pub store: String,
    /// The last revision that the store confirmed, and when; `None` before the first.
    pub confirmed: Option<(Revision, SystemTime)>,
    /// Requests sent so far, by their kind, such as `list`, `watch` or `renew`.
    pub calls: BTreeMap<&'static str, Calls>,
    /// Entries in the store that are no leases and were skipped: key and reason.
    pub skipped: Vec<(String, String)>,
    /// The last failure, and when; `None` if there was none, or a request succeeded since then.
    pub last_error: Option<(String, SystemTime)>,
    /// The reason for which the network config in the store is not used, as of the last reading: it
    /// is wrong, or gone; `None` if it is used.
    pub wrong_config: Option<String>,
}

impl StoreStatus {
    /// Requests sent so far.
    pub fn requests(&self) -> u64 {
        self.calls.values().map(|calls| calls.sent).sum()
    }

    /// Requests that failed.
    pub fn failures(&self) -> u64 {
        self.calls.values().map(|calls| calls.failed).sum()
    }
}
