//! Networks that run on this host.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};

use crate::error::Result;
use crate::lease::{Lease, LeaseSet, Subnets};
use crate::status::{Explanation, Listing, Rejection, Status, Waiting};

/// A network that runs itself. Networks of kernel objects are
/// [blueprints](crate::backend::Blueprint) instead.
///
/// ```
/// use flannel_core::network::{AcceptedPeers, Ended, NetworkHandle};
/// use flannel_core::{Network, Result};
/// use tokio::sync::watch;
///
/// /// Prints the peers.
/// #[derive(Debug)]
/// struct Printer(NetworkHandle);
///
/// #[async_trait::async_trait]
/// impl Network for Printer {
///     fn handle(&self) -> NetworkHandle {
///         self.0.clone()
///     }
///     async fn run(self: Box<Self>, mut peers: watch::Receiver<AcceptedPeers>) -> Result<Ended> {
///         loop {
///             for lease in peers.borrow_and_update().iter() {
///                 println!("{} {:?}", lease.subnets, lease.attrs.preferred.public);
///             }
///             if peers.changed().await.is_err() { return Ok(Ended::ViewsClosed) }
///         }
///     }
/// }
/// ```
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Keeps the accepted peers reachable. See [`Ended`] for when it returns.
    ///
    /// # Errors
    /// The network cannot go on, and running it again would not help.
    ///
    /// # Cancel safety
    /// Dropping the future stops the network. Connections that it made may stay.
    async fn run(self: Box<Self>, peers: watch::Receiver<AcceptedPeers>) -> Result<Ended>;
}

/// The peers whose leases this node accepts. A clone is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AcceptedPeers {
    leases: LeaseSet,
    rejected: Listing<Subnets, Rejection>,
    own: Option<Subnets>,
    complete: bool,
}

impl AcceptedPeers {
    /// All `leases` but the `rejected` ones and this node's `own`. `complete`: see `is_complete`.
    pub const fn new(
        leases: LeaseSet,
        rejected: Listing<Subnets, Rejection>,
        own: Option<Subnets>,
        complete: bool,
    ) -> Self {
        Self { leases, rejected, own, complete }
    }

    /// The leases of the peers, in the order of their subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        let is_peer = |subnets| self.own != Some(subnets) && !self.rejected.contains_key(&subnets);
        self.leases.iter().filter(move |lease| is_peer(lease.subnets))
    }

    /// Whether the store returned all leases, so that a peer without a lease here is gone.
    pub const fn is_complete(&self) -> bool {
        self.complete
    }
}

/// Why a network stopped without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// Something that it was built from changed, with the reason: choose the interface, prepare and
    /// build it again. The next network adopts the kernel objects of this one.
    Rebuild(String),
    /// The sender of the leases was dropped.
    ViewsClosed,
}

/// The public state of a network. Stays valid after the network stopped.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetworkHandle {
    /// This node's lease.
    pub lease: Lease,
    /// The largest packet that pods may send, in bytes; the smallest over the enabled families.
    pub mtu: u32,
    /// The latest status.
    pub status: watch::Receiver<Arc<Status>>,
    questions: Option<mpsc::Sender<Question>>,
}

/// A question that only the running network can answer, or drop.
#[derive(Debug)]
#[non_exhaustive]
pub enum Question {
    /// Which peer an address belongs to.
    Explain(IpAddr, Reply<Option<Explanation>>),
    /// Which peers are not in place yet.
    Waiting(Reply<Waiting>),
}

/// The way of an answer back to the one who asked.
#[derive(Debug)]
pub struct Reply<T>(oneshot::Sender<T>);

impl<T> Reply<T> {
    /// Answers. Has no effect if the question was withdrawn.
    pub fn send(self, answer: T) {
        drop(self.0.send(answer));
    }
}

impl NetworkHandle {
    /// A handle of a network that answers no questions.
    pub fn new(lease: Lease, mtu: u32, status: watch::Receiver<Arc<Status>>) -> Self {
        Self { lease, mtu, status, questions: None }
    }

    /// Makes the network answer questions: it receives them on the other end of `questions`.
    #[must_use]
    pub fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
        self.questions = Some(questions);
        self
    }

    /// The accepted peers as of the latest status: follow [`NetworkHandle::status`].
    pub fn accepted_peers(&self) -> AcceptedPeers {
        let status = Arc::clone(&self.status.borrow());
        let (leases, rejected) = (status.leases.clone(), status.rejected.clone());
        AcceptedPeers::new(leases, rejected, Some(self.lease.subnets), status.live)
    }

    /// The peer whose subnet contains `address`, and its objects. Of several, the accepted one.
    ///
    /// `None` also after the network stopped. Waits for the current round, or until `run` begins.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the question.
    pub async fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let (reply, explanation) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Explain(address, Reply(reply))).await.ok()?;
        explanation.await.ok()?
    }

    /// The peers whose objects are not all in the kernel yet, with the reason. O(number of such
    /// peers). A status that is read afterwards is at least as new as the answer.
    ///
    /// `None` after the network stopped. Waits for the current round, or until `run` begins.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the question.
    pub async fn waiting(&self) -> Option<Waiting> {
        let (reply, waiting) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Waiting(Reply(reply))).await.ok()?;
        waiting.await.ok()
    }
}
