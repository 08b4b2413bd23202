//! Networks: they turn leases into connectivity on this host.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};

use crate::address::Subnet;
use crate::error::Result;
use crate::lease::{Lease, LeaseSet, Subnets};
use crate::object::Key;
use crate::status::{Explanation, Listing, Status, Waiting};

/// A network that is not made of kernel objects: it runs itself, with the peers that this node
/// accepts. Networks of kernel objects are [blueprints](crate::backend::Blueprint).
///
/// ```
/// use std::sync::Arc;
///
/// use async_trait::async_trait;
/// use flannel_core::network::{AcceptedPeers, Ended, NetworkHandle};
/// use flannel_core::{Network, Result};
/// use tokio::sync::watch;
///
/// /// Prints the peers.
/// #[derive(Debug)]
/// struct Printer(NetworkHandle);
///
/// #[async_trait]
/// impl Network for Printer {
///     fn handle(&self) -> NetworkHandle {
///         self.0.clone()
///     }
///
///     async fn run(
///         self: Box<Self>,
///         mut peers: watch::Receiver<AcceptedPeers>,
///     ) -> Result<Ended> {
///         while peers.changed().await.is_ok() {
///             for lease in peers.borrow_and_update().iter() {
///                 println!("{} {:?}", lease.subnets, lease.attrs.preferred.public);
///             }
///         }
///         Ok(Ended::ViewsClosed)
///     }
/// }
/// ```
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Keeps the accepted peers reachable until something that the network was built from changes.
    ///
    /// # Errors
    /// The network cannot go on, and running it again as it is will not help.
    ///
    /// # Cancel safety
    /// Dropping the future stops the network. Connections that it made may stay.
    async fn run(self: Box<Self>, peers: watch::Receiver<AcceptedPeers>) -> Result<Ended>;
}

/// The peers whose leases this node accepts. Cloning is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AcceptedPeers {
    leases: LeaseSet,
    rejected: Listing<Subnets, Rejection>,
    own: Option<Subnets>,
    complete: bool,
}

impl AcceptedPeers {
    /// The leases in `leases`, without this node's `own` one and the `rejected` ones. `complete`:
    /// see [`AcceptedPeers::is_complete`].
    pub const fn new(
        leases: LeaseSet,
        rejected: Listing<Subnets, Rejection>,
        own: Option<Subnets>,
        complete: bool,
    ) -> Self {
        Self { leases, rejected, own, complete }
    }

    /// The peers' leases, in the order of their subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.leases.iter().filter(|lease| self.is_accepted(&lease.subnets))
    }

    /// The lease of an accepted peer.
    pub fn get(&self, subnets: &Subnets) -> Option<&Arc<Lease>> {
        self.leases.get(subnets).filter(|lease| self.is_accepted(&lease.subnets))
    }

    /// The leases come from the store and are complete: a peer that is not here is gone.
    pub const fn is_complete(&self) -> bool {
        self.complete
    }

    fn is_accepted(&self, subnets: &Subnets) -> bool {
        self.own != Some(*subnets) && !self.rejected.contains_key(subnets)
    }
}

/// Why a network stopped without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// Something it was built from changed: choose the interface, register and run again. What is
    /// in the kernel stays and is adopted, so no packet is lost.
    Rebuild(String),
    /// Nobody will send views any more.
    ViewsClosed,
}

/// What the outside sees of a network; cloned freely, valid after the network stopped.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetworkHandle {
    /// This node's lease.
    pub lease: Lease,
    /// What pods may send, in bytes: the smallest over the enabled families.
    pub mtu: u32,
    /// The latest status.
    pub status: watch::Receiver<Arc<Status>>,
    questions: Option<mpsc::Sender<Question>>,
}

/// A question that only the running network can answer, and the channel for the answer.
#[derive(Debug)]
pub enum Question {
    /// Which peer an address belongs to.
    Explain(IpAddr, oneshot::Sender<Option<Explanation>>),
    /// Which peers wait.
    Waiting(oneshot::Sender<Waiting>),
}

impl NetworkHandle {
    /// A handle of a network that explains nothing.
    pub fn new(lease: Lease, mtu: u32, status: watch::Receiver<Arc<Status>>) -> Self {
        Self { lease, mtu, status, questions: None }
    }

    /// The same handle of a network that answers the questions which arrive on the other end of
    /// `questions`.
    #[must_use]
    pub fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
        self.questions = Some(questions);
        self
    }

    /// The peers that the network accepts, by its latest status.
    pub fn accepted_peers(&self) -> AcceptedPeers {
        let status = Arc::clone(&self.status.borrow());
        let (leases, rejected) = (status.leases.clone(), status.rejected.clone());
        AcceptedPeers::new(leases, rejected, Some(self.lease.subnets), status.live)
    }

    /// The peer whose subnet holds `address`, what is wanted of the kernel for it, and how that
    /// stands. The believed one if several do.
    ///
    /// `None` if no peer has such a subnet, or the network does not run or explains nothing. Waits
    /// for the changes in hand, which is longer than a moment only when all peers come at once.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the question.
    pub async fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let (answer, explanation) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Explain(address, answer)).await.ok()?;
        explanation.await.ok()?
    }

    /// Which peers wait, and what for: what a status that is not settled leaves open. Costs what
    /// waits; a status never told later than this answer says what has become of them.
    ///
    /// `None` if the network does not run or explains nothing. Waits for the changes in hand, as
    /// [`NetworkHandle::explain`] does.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the question.
    pub async fn waiting(&self) -> Option<Waiting> {
        let (answer, waiting) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Waiting(answer)).await.ok()?;
        waiting.await.ok()
    }
}

/// Why a lease is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// A subnet lies outside the pod network.
    #[error("{subnet} lies outside the pod network {network}")]
    Outside {
        /// The lease's subnet.
        subnet: Subnet,
        /// The network.
        network: Subnet,
    },
    /// It has no subnet in any family that the network config enables.
    #[error("it has no subnet in a family that the network config enables")]
    NoEnabledFamily,
    /// It overlaps this node's own lease, which always wins at home.
    #[error("it overlaps this node's own lease {own}")]
    OverlapsOwn {
        /// Ours.
        own: Subnets,
    },
    /// It overlaps another peer's lease, which was there first.
    #[error("it overlaps the earlier lease {earlier} of {holder}")]
    Overlaps {
        /// The other one.
        earlier: Subnets,
        /// Its node.
        holder: String,
    },
    /// It asks for a kernel object that an earlier peer's lease defines differently.
    #[error("{key} is defined otherwise by the earlier lease {earlier} of {holder}")]
    Contradicts {
        /// The object.
        key: Key,
        /// The other lease.
        earlier: Subnets,
        /// Its node.
        holder: String,
    },
    /// It asks for a kernel object that is this node's own.
    #[error("{key} is this node's own")]
    ContradictsOwn {
        /// The object.
        key: Key,
    },
    /// The backend cannot use it.
    #[error("{0}")]
    Rejected(String),
}
