//! Networks: they turn leases into connectivity on this host.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};

use crate::address::Subnet;
use crate::error::Result;
use crate::lease::{Lease, Subnets, View};
use crate::object::Key;
use crate::status::{Explanation, Status, Waiting};

/// A network that this node takes part in.
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Makes the kernel follow the views until something that the network was built from changes.
    ///
    /// # Errors
    /// The network cannot go on, and running it again as it is will not help.
    ///
    /// # Cancel safety
    /// Dropping the future stops it: what is in the kernel stays there, and nothing is written after the
    /// drop returned. The drop may block for one batch of changes (milliseconds).
    async fn run(self: Box<Self>, views: watch::Receiver<View>) -> Result<Ended>;
}

/// Why a network stopped without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// Something it was built from changed: choose the interface, register and run again. What is in the
    /// kernel stays and is adopted, so no packet is lost.
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

    /// The same handle of a network that answers the questions which arrive on the other end of `questions`.
    #[must_use]
    pub fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
        self.questions = Some(questions);
        self
    }

    /// The peer whose subnet holds `address`, what is wanted of the kernel for it, and how that stands. The believed one
    /// if several do.
    ///
    /// `None` if no peer has such a subnet, or the network does not run or explains nothing. Waits for the changes
    /// in hand, which is longer than a moment only when all peers come at once.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the question.
    pub async fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let (answer, explanation) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Explain(address, answer)).await.ok()?;
        explanation.await.ok()?
    }

    /// Which peers wait, and what for: what a status that is not settled leaves open. Costs what waits; a status never told
    /// later than this answer says what has become of them.
    ///
    /// `None` if the network does not run or explains nothing. Waits for the changes in hand, as [`NetworkHandle::explain`] does.
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
