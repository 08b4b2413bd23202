//! Networks that run on this host.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};

use crate::error::Result;
use crate::lease::{Lease, LeaseSet, Subnets, View};
use crate::status::{Explanation, Rejection, SortedMap, Status, Waiting};

/// A network that runs on this host.
///
/// `flannel_route::KernelNetwork` is the network that keeps the kernel objects of a [blueprint] in
/// place. A backend can also build a network that runs itself ([`Build::Network`]). A program runs
/// both in the same way.
///
/// [blueprint]: crate::backend::Blueprint
/// [`Build::Network`]: crate::backend::Build::Network
#[doc = include_str!("../docs/network.md")]
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Keeps the peers in `views` reachable until one of the reasons in [`Ended`]. Renews no lease.
    ///
    /// The caller passes the receiver of [`SubnetManager::watch_leases`], with the leases of all
    /// nodes. If the network runs itself, `flannel_route::Host` filters them, so that the network
    /// gets only the accepted leases of peers, and need not check them.
    ///
    /// # Errors
    /// The network cannot go on, and it does not help to run it again.
    ///
    /// # Cancel safety
    /// Dropping the future stops the network. Connections and kernel objects that it made may stay.
    ///
    /// [`SubnetManager::watch_leases`]: crate::SubnetManager::watch_leases
    async fn run(self: Box<Self>, views: watch::Receiver<View>) -> Result<Ended>;
}

/// The peers whose leases this node accepts. A clone is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AcceptedPeers {
    leases: LeaseSet,
    rejected: SortedMap<Subnets, Rejection>,
    own: Option<Subnets>,
    complete: bool,
}

impl AcceptedPeers {
    /// The peers of all `leases`, except for the `rejected` leases and this node's `own` lease.
    /// `complete` is the value of [`is_complete`](Self::is_complete).
    pub const fn new(
        leases: LeaseSet,
        rejected: SortedMap<Subnets, Rejection>,
        own: Option<Subnets>,
        complete: bool,
    ) -> Self {
        Self { leases, rejected, own, complete }
    }

    /// The leases of the peers, in the order of their subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.leases.iter().filter(move |lease| {
            self.own != Some(lease.subnets) && !self.rejected.contains_key(&lease.subnets)
        })
    }

    /// Whether the store returned all leases. If so, a peer that has no lease here is gone.
    pub const fn is_complete(&self) -> bool {
        self.complete
    }
}

/// Why a network stopped without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The sender of the views was dropped.
    ViewsClosed,
}

/// The public state of a network. The handle stays valid after the network has stopped.
///
/// A network of kernel objects works in rounds. In a round it takes in the events of the kernel and
/// the newest leases, applies changes for about 16 ms, and publishes its status. `flannel-route`
/// has the details.
///
/// [`explain`](Self::explain) and [`waiting`](Self::waiting) wait for the end of the current round,
/// or for the start of `run`. They return `None` if the network has stopped, or does not answer
/// questions ([`with_questions`](Self::with_questions)). Dropping their future withdraws the
/// question.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetworkHandle {
    /// This node's lease.
    pub lease: Lease,
    /// The size of the largest packet that pods may send in every enabled family, in bytes.
    pub mtu: u32,
    /// See [`Blueprint::path`](crate::backend::Blueprint::path).
    pub path: &'static str,
    /// The latest status. Before the end of the first round it is [`Status::default`]. When the
    /// network has stopped, the last status stays, and the channel is closed.
    pub status: watch::Receiver<Arc<Status>>,
    questions: Option<mpsc::Sender<Question>>,
}

/// A question that only the running network can answer. The network may drop it without an answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum Question {
    /// Which peer an address belongs to. The answer is `None` if no peer has the address.
    Explain(IpAddr, Reply<Option<Explanation>>),
    /// Which peers are not in place yet.
    Waiting(Reply<Waiting>),
}

/// Sends an answer to the caller that asked the question.
#[derive(Debug)]
pub struct Reply<T>(oneshot::Sender<T>);

impl<T> Reply<T> {
    /// Sends the answer. Has no effect if the caller no longer waits.
    pub fn send(self, answer: T) {
        drop(self.0.send(answer));
    }
}

impl NetworkHandle {
    /// A handle of a network that does not answer questions. `mtu` is in bytes.
    pub fn new(lease: Lease, mtu: u32, status: watch::Receiver<Arc<Status>>) -> Self {
        Self { lease, mtu, path: "", status, questions: None }
    }

    /// Lets callers ask questions. The network receives them from the channel `questions`.
    #[must_use]
    pub fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
        self.questions = Some(questions);
        self
    }

    /// The accepted peers by the latest `status`. When `status` changes, they may have changed.
    pub fn accepted_peers(&self) -> AcceptedPeers {
        let status = Arc::clone(&self.status.borrow());
        let own = Some(self.lease.subnets);
        AcceptedPeers::new(status.leases.clone(), status.rejected.clone(), own, status.live)
    }

    /// The peer whose subnet contains `address`, with its objects. If several peers have the
    /// address, this is the accepted one. `None` also if no peer has the address.
    pub async fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let (reply, explanation) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Explain(address, Reply(reply))).await.ok()?;
        explanation.await.ok()?
    }

    /// The peers whose objects are not all in the kernel yet, with the reasons. O(number of such
    /// peers). A status that is read afterwards is at least as new as the answer.
    pub async fn waiting(&self) -> Option<Waiting> {
        let (reply, waiting) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Waiting(Reply(reply))).await.ok()?;
        waiting.await.ok()
    }
}
