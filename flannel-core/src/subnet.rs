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
use crate::lease::{Lease, LeaseAttrs, Origin, Revision, Subnets, View};

/// Gives this node its lease and shows everybody's. The lease engine's face.
///
/// Implementations: `flannel_subnet::LocalManager` over any registry, `testing::FakeSubnets`
/// (feature `testing`).
///
/// ```
/// use flannel_core::{Result, SubnetManager};
/// use flannel_core::lease::LeaseAttrs;
///
/// /// Prints what every node holds, once.
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

    /// Waits until the store is known to hold another valid network config than `seen`: that one.
    /// Configs that are wrong, and a store that does not answer, are waited out. Where configs do
    /// not change it waits for ever.
    ///
    /// # Errors
    /// Waiting is of no use.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call compares again.
    async fn config_changed(&self, _seen: &Config) -> Result<Config> {
        std::future::pending().await
    }

    /// What the store knows of this node, asked before the external interface is chosen.
    ///
    /// # Errors
    /// The store does not answer, or what it holds cannot be understood.
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
    /// Dropped half-way, a lease may have been taken; the next call finds it again by the public
    /// address.
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Publishes other attributes for the lease that we hold.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) if somebody else wrote since `held` was read.
    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease>;

    /// Keeps the lease until it ends, which is what it returns. Failures to renew are retried
    /// inside.
    ///
    /// # Errors
    /// The lease cannot be kept, and trying again will not help.
    ///
    /// # Cancel safety
    /// Dropping stops renewing; the lease lives on until it expires.
    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd>;

    /// Everybody's leases, always the latest: bursts coalesce, nothing queues. The receiver may
    /// start with [`View::unknown`] and stays valid for as long as the manager lives.
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

    /// Publishes how ready this node's network is, where the store has a place for it, and keeps it
    /// published until the next report. [`Readiness::Starting`] is reported before the first
    /// [`SubnetManager::acquire_lease`] and completes when it is published; the others return at
    /// once, and failures to publish them are retried inside.
    ///
    /// # Errors
    /// The store does not answer, of [`Readiness::Starting`] only.
    ///
    /// # Cancel safety
    /// Dropped half-way, it may have been published.
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
        /// Until then, unless the lease is renewed; `None`: without end. By wall clock, and updated
        /// when that is set.
        until: Option<SystemTime>,
    },
    /// The subnets are no longer this node's. Routes to peers stay, but this node is not ready.
    Lost {
        /// Since then.
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

/// The lease set once it is live and complete; after `patience` (at least one is needed to start at
/// all) the latest there is. Nobody waits for a store that has not answered so far where there is a
/// set from an earlier run.
///
/// # Errors
/// Watching cannot even start.
pub async fn live_view(subnets: &dyn SubnetManager, patience: Duration) -> Result<View> {
    let mut views = subnets.watch_leases().await?;
    let from_before = matches!(views.borrow().origin, Origin::Cached { written: Some(_) });
    if !(from_before && subnets.store_status().confirmed.is_none()) {
        let live = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
        // Too late, or nobody will say more: what is known now must do.
        let _ = tokio::time::timeout(patience, live).await;
    }
    let view = views.borrow().clone();
    Ok(view)
}

/// What the store knows of this node before its external interface is chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// Public addresses that the store prescribes for this node; they override the command line.
    pub public: Dual<IpAddr>,
    /// What this node published last, if the store still has it: a backend keeps its keys and MAC
    /// addresses.
    pub last_published: Option<LeaseAttrs>,
    /// The subnets that this node had before.
    pub previous: Option<Subnets>,
    /// The lease that this node had until its time ran out, while the store cannot be asked whether
    /// it still has it. It is not to be used; but peers can be reached by what was published with
    /// it.
    pub lapsed: Option<Lease>,
}

/// Why a lease is no longer ours.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// It could not be renewed in time and the store forgot it.
    Expired,
    /// Somebody deleted it: the order to stop.
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

/// How often a store was asked for one thing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Requests sent.
    pub sent: u64,
    /// Those that failed. Of a watch also what came to its end without having been asked for again.
    pub failed: u64,
}

/// How a store is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// The store's name, such as `dir:/var/lib/flannel`.
    pub store: String,
    /// The last revision that the store confirmed, and when; `None` before the first.
    pub confirmed: Option<(Revision, SystemTime)>,
    /// Requests sent so far, by what was asked, such as `list`, `watch` or `renew`.
    pub calls: BTreeMap<&'static str, Calls>,
    /// Entries in the store that are no leases and were skipped: key and reason.
    pub skipped: Vec<(String, String)>,
    /// The last failure, and when; `None` if there was none, or one since put right.
    pub last_error: Option<(String, SystemTime)>,
    /// Why the network config that the store holds is not used, as far as this was noticed: it is
    /// wrong, or there is none any more; `None` if it is right.
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
