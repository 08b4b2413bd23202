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
/// `flannel_route::KernelNetwork` keeps kernel objects in place, as [blueprints] describe them. A
/// backend can also build a network that runs itself ([`Build::Network`]). A program runs both in
/// the same way.
///
/// [blueprints]: crate::backend::Blueprint
/// [`Build::Network`]: crate::backend::Build::Network
#[doc = include_str!("../docs/network.md")]
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Keeps the peers in `views` reachable until one of the reasons in [`Ended`]. Renews no lease.
    ///
    /// The caller passes the receiver of [`SubnetManager::watch_leases`], with the leases of all
    /// nodes. `flannel_route::Host` gives a network that a backend built itself only the accepted
    /// leases of peers, so that the network need not check them.
    ///
    /// # Errors
    /// The network cannot go on, and another run of the same network cannot help.
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
    /// All `leases` except for the `rejected` ones and this node's `own`. `complete` is the value
    /// of [`is_complete`](Self::is_complete).
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
        let is_peer = |subnets| self.own != Some(subnets) && !self.rejected.contains_key(&subnets);
        self.leases.iter().filter(move |lease| is_peer(lease.subnets))
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

/// The public state of a network. Stays valid after the network stopped.
///
/// A network of kernel objects works in rounds. In a round it takes in the events of the kernel and
/// the newest leases, applies changes for about 16 ms, and publishes its status. `flannel-route`
/// has the details.
///
/// [`explain`](Self::explain) and [`waiting`](Self::waiting) wait for the end of the current round,
/// or for the start of `run`. They return `None` if the network has stopped or answers no
/// questions. Dropping their future withdraws the question.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NetworkHandle {
    /// This node's lease.
    pub lease: Lease,
    /// The largest packet that pods may send, in bytes; the smallest over the enabled families.
    pub mtu: u32,
    /// See [`Blueprint::path`](crate::backend::Blueprint::path).
    pub path: &'static str,
    /// The latest status. Before the end of the first round it is [`Status::default`]. After the
    /// network stopped, the last status stays and the channel is closed.
    pub status: watch::Receiver<Arc<Status>>,
    questions: Option<mpsc::Sender<Question>>,
}

/// A question that only the running network can answer. It may drop the question instead.
#[derive(Debug)]
#[non_exhaustive]
pub enum Question {
    /// Which peer an address belongs to.
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
    /// A handle of a network that answers no questions.
    pub fn new(lease: Lease, mtu: u32, status: watch::Receiver<Arc<Status>>) -> Self {
        Self { lease, mtu, path: "", status, questions: None }
    }

    /// Lets callers ask questions. The network receives them from the other end of `questions`.
    #[must_use]
    pub fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
        self.questions = Some(questions);
        self
    }

    /// The accepted peers of the latest `status`. A change of `status` announces newer ones.
    pub fn accepted_peers(&self) -> AcceptedPeers {
        let status = Arc::clone(&self.status.borrow());
        let own = Some(self.lease.subnets);
        AcceptedPeers::new(status.leases.clone(), status.rejected.clone(), own, status.live)
    }

    /// The peer whose subnet contains `address`, and its objects. An accepted peer comes before
    /// rejected ones. `None` also if no peer has the address.
    pub async fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let (reply, explanation) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Explain(address, Reply(reply))).await.ok()?;
        explanation.await.ok()?
    }

    /// The peers whose objects are not all in the kernel yet, with the reason. O(number of such
    /// peers). A status that is read afterwards is at least as new as the answer.
    pub async fn waiting(&self) -> Option<Waiting> {
        let (reply, waiting) = oneshot::channel();
        self.questions.as_ref()?.send(Question::Waiting(Reply(reply))).await.ok()?;
        waiting.await.ok()
    }
}
