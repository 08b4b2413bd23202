//! Backends and networks: what turns leases into connectivity on this host.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot, watch};

use crate::address::{Dual, Subnet};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, Owned};
use crate::lease::{Lease, Subnets, View};
use crate::name::LinkName;
use crate::state::Key;
use crate::status::{Explanation, Status, Waiting};
use crate::subnet::SubnetManager;

/// This host, as a backend sees it.
#[derive(Debug, Clone)]
pub struct Host {
    /// The interface that connects it with its peers.
    pub iface: ExternalInterface,
    /// Its kernel.
    pub kernel: Arc<dyn Kernel>,
    /// Where leases come from.
    pub subnets: Arc<dyn SubnetManager>,
    /// What tells this node from its clones, for values that must be stable and differ between nodes; for
    /// example the text of `/etc/machine-id`. May be empty.
    pub identity: String,
}

/// The interface that connects this host with its peers, and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalInterface {
    /// Its name.
    pub name: LinkName,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its address, per enabled family: the source of tunnel packets.
    pub address: Dual<IpAddr>,
    /// The address that peers are told; differs from `address` behind NAT.
    pub public: Dual<IpAddr>,
    /// Why this interface, as a sentence without a full stop: `it has the default route`.
    pub reason: String,
}

/// Makes networks of one kind.
///
/// ```
/// use async_trait::async_trait;
/// use flannel_core::{Backend, Config, ExternalInterface, Host, LeaseAttrs, LinkName, Network, Owned, Result};
///
/// /// A backend that refuses.
/// #[derive(Debug)]
/// struct Nowhere;
///
/// #[async_trait]
/// impl Backend for Nowhere {
///     fn name(&self) -> &'static str {
///         "nowhere"
///     }
///     fn owned(&self, _: LinkName, _: &Config) -> Result<Owned> {
///         Ok(Owned::default())
///     }
///     fn check(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
///         Ok(())
///     }
///     async fn register(&self, _: &Host, _: &Config) -> Result<Box<dyn Network>> {
///         Err(flannel_core::Error::Backend { backend: "nowhere".into(), reason: "it leads nowhere".into() })
///     }
/// }
/// ```
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync {
    /// The `Type` in the network config, in lower case.
    fn name(&self) -> &'static str;

    /// The backend type that its leases carry; empty for flannel's `udp` and `alloc`.
    fn lease_type(&self) -> &'static str {
        self.name()
    }

    /// What its network touches in a kernel whose external interface is `uplink`: for its own use, and for cleaning up
    /// ([`cleanup`](crate::cleanup())) where nothing can be registered. Pure.
    ///
    /// # Errors
    /// The config's backend options are wrong.
    fn owned(&self, uplink: LinkName, config: &Config) -> Result<Owned>;

    /// Judges whether a network can be built from `config`: on the node whose external interface is `iface`, or
    /// without one as far as every node is alike. What this refuses [`Backend::register`] refuses too, in the same
    /// words. Pure: a network that runs is given up for another config only after this was asked.
    ///
    /// # Errors
    /// The config's backend options are wrong, or do not fit the enabled families or the interface.
    fn check(&self, config: &Config, iface: Option<&ExternalInterface>) -> Result<()>;

    /// Checks that the network can run here, and acquires this node's lease. Touches nothing in the kernel
    /// but what the lease's attributes must tell truly (a device's MAC address).
    ///
    /// # Errors
    /// The config's backend options are wrong, the host does not fit, or no lease can be had.
    async fn register(&self, host: &Host, config: &Config) -> Result<Box<dyn Network>>;
}

/// A network that this node takes part in.
#[async_trait]
pub trait Network: fmt::Debug + Send {
    /// A handle that outlives [`Network::run`].
    fn handle(&self) -> NetworkHandle;

    /// Drops packets for those addresses of this node's own subnets that nobody has, instead of sending them where other
    /// routes lead; call it before [`Network::run`]. Without the call a network that owns blackholes
    /// ([`Owned::blackholes`]) removes what an earlier one left.
    ///
    /// # Errors
    /// It touches no routes.
    fn drop_unused(&mut self) -> Result<()> {
        let backend = self.handle().lease.attrs.backend_type.into_owned();
        Err(Error::Backend { backend, reason: "it leaves routes to others".into() })
    }

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

/// What only the network itself can tell, and where the answer goes.
pub(crate) enum Question {
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

    pub(crate) fn with_questions(mut self, questions: mpsc::Sender<Question>) -> Self {
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
pub enum Disbelief {
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
