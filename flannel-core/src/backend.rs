//! Backends: the pure description of a kind of network, and the part of it that one node prepares.

mod alloc;
mod list;
mod plan;
mod secrets;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::alloc::Alloc;
pub use self::list::{Backends, UnknownBackend};
pub use self::plan::{Answer, Env, Plan, Rejected};
pub use self::secrets::{MakeSecret, MemorySecrets, Secrets};
use crate::address::Dual;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernel::{Footprint, Kernel};
use crate::lease::{Lease, Offer, Subnets, View};
use crate::network::Network;
use crate::object::LinkName;
use crate::object::State;
use crate::subnet::{Hints, SubnetManager, live_view};

/// The time that [`Node::leases`] waits for a complete set of leases.
const LEASES_PATIENCE: Duration = Duration::from_secs(5);

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

/// A kind of network, such as `vxlan`: it validates a network config, and describes the network
/// that the config asks for.
///
/// A backend holds no state and no connection. It neither acquires leases nor writes kernel
/// objects: it says which attributes this node publishes ([`Prepared::offer`]) and which objects
/// the kernel needs ([`Blueprint`]).
///
/// ```
/// use async_trait::async_trait;
/// use flannel_core::{Backend, Config, Result};
/// use flannel_core::backend::{Built, Datapath, ExternalInterface, Node, Prepared, Blueprint};
/// use flannel_core::kernel::Footprint;
/// use flannel_core::lease::{LeaseAttrs, Offer};
/// use flannel_core::object::LinkName;
///
/// /// A backend that accepts every peer and installs nothing.
/// #[derive(Debug)]
/// struct Idle;
///
/// #[async_trait]
/// impl Backend for Idle {
///     fn kind(&self) -> &'static str {
///         "idle"
///     }
///     fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
///         Ok(())
///     }
///     fn datapath(&self, _: &Config) -> Result<Datapath> {
///         Ok(Datapath::default())
///     }
///     fn footprint(&self, _: &Config, _: Option<LinkName>) -> Result<Footprint> {
///         Ok(Footprint::default())
///     }
///     async fn prepare(&self, node: &Node<'_>, _: &Config) -> Result<Prepared> {
///         let mtu = node.uplink.mtu;
///         let offer = Offer { kind: "idle".into(), public: node.uplink.public, ..Offer::default() };
///         Ok(Prepared::new(offer, move |_| Ok(Built::Kernel(Blueprint::new(mtu, |_, _, _, _| Ok(()))))))
///     }
/// }
/// ```
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync {
    /// The `Type` in the network config, in lower case.
    fn kind(&self) -> &'static str;

    /// The backend type that its leases carry; empty for flannel's `udp` and `alloc`.
    fn lease_type(&self) -> &'static str {
        self.kind()
    }

    /// Judges whether a network can be built from `config` on the node whose external interface is
    /// `uplink`; without an interface, as far as the answer is the same on every node. Pure.
    /// [`Backend::prepare`] refuses the same configs with the same error. The daemon gives up a
    /// running network for another config only after this call succeeded.
    ///
    /// # Errors
    /// The config's backend options are wrong, or do not fit the enabled families or the interface.
    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()>;

    /// How packets travel between nodes. Pure.
    ///
    /// # Errors
    /// The config's backend options are wrong.
    fn datapath(&self, config: &Config) -> Result<Datapath>;

    /// The kernel objects that its network may touch on a node whose external interface is
    /// `uplink`; `None`: the interface is not known, and nothing on it is included. Used by the
    /// network, and by cleanup where no network can be built. Pure.
    ///
    /// # Errors
    /// The config's backend options are wrong.
    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint>;

    /// Prepares the network on this node: checks that it can run here, and chooses the attributes
    /// that the node publishes in its lease. Writes no kernel object.
    ///
    /// # Errors
    /// [`Backend::validate`] refuses the config, the host does not fit, or the node cannot be read.
    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared>;
}

/// How packets travel between the nodes of a network, as far as others than the backend need to
/// know: firewall, status, doctor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Datapath {
    /// The tunnel device of each enabled family; `None`: packets leave by the external interface.
    pub devices: Dual<LinkName>,
    /// The bytes that the tunnel adds to a packet, per family of the packet; `None` or 0: none.
    pub overhead: Dual<u32>,
    /// What other nodes send to this one besides pods' own packets: firewalls between nodes must
    /// let it pass.
    pub inlets: Vec<Inlet>,
    /// Packets of pods travel between some nodes as they are, without a tunnel.
    pub bare: bool,
    /// Peers on the same link are reached without the tunnel, although there is one.
    pub direct: bool,
    /// Packets are encrypted between nodes.
    pub encrypted: bool,
}

/// A kind of packet that nodes of a network send to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Inlet {
    /// UDP datagrams to this port.
    Udp(u16),
    /// IP packets of this protocol number.
    Protocol(u8),
}

impl fmt::Display for Inlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(port) => write!(f, "UDP port {port}"),
            Self::Protocol(number) => write!(f, "IP protocol {number}"),
        }
    }
}

/// This node, as a backend sees it while it prepares a network.
#[derive(Debug, Clone)]
pub struct Node<'a> {
    /// The interface that connects it with its peers.
    pub uplink: &'a ExternalInterface,
    /// A text that differs between nodes and is stable over restarts, for example
    /// `/etc/machine-id`: the seed of values that must differ between nodes. May be empty.
    pub machine_id: &'a str,
    /// Its kernel, to read. [`Node::snapshot`] reads it outside the async thread.
    pub kernel: &'a Arc<dyn Kernel>,
    /// Its secrets.
    pub secrets: &'a dyn Secrets,
    subnets: &'a dyn SubnetManager,
}

impl<'a> Node<'a> {
    /// A node whose leases `subnets` knows.
    pub const fn new(
        uplink: &'a ExternalInterface,
        machine_id: &'a str,
        kernel: &'a Arc<dyn Kernel>,
        secrets: &'a dyn Secrets,
        subnets: &'a dyn SubnetManager,
    ) -> Self {
        Self { uplink, machine_id, kernel, secrets, subnets }
    }

    /// What the store knows of this node: its previous subnets and attributes.
    ///
    /// # Errors
    /// The store does not answer, or what it holds cannot be understood.
    pub async fn hints(&self) -> Result<Hints> {
        self.subnets.hints().await
    }

    /// The leases of all nodes. Waits up to five seconds for a complete, live set, then returns the
    /// latest one.
    ///
    /// # Errors
    /// The leases cannot be watched.
    pub async fn leases(&self) -> Result<View> {
        live_view(self.subnets, LEASES_PATIENCE).await
    }

    /// The kernel objects inside `footprint`. Reads on a thread that may block.
    ///
    /// # Errors
    /// The kernel could not be read.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the read ends on its own.
    pub async fn snapshot(&self, footprint: Footprint) -> Result<State> {
        let kernel = Arc::clone(self.kernel);
        tokio::task::spawn_blocking(move || kernel.snapshot(&footprint))
            .await
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
            .map_err(|source| Error::Kernel { object: "network objects".into(), source })
    }
}

/// Builds a network once the node's lease is known.
pub type Build = Box<dyn FnOnce(&NodeLease) -> Result<Built> + Send>;

/// A network that can be built as soon as this node has a lease.
pub struct Prepared {
    /// How other nodes reach this one, to be published in its lease.
    pub offer: Offer,
    /// Builds the network for that lease.
    pub build: Build,
}

impl Prepared {
    /// A network that `build` makes for a lease with `offer`.
    pub fn new(
        offer: Offer,
        build: impl FnOnce(&NodeLease) -> Result<Built> + Send + 'static,
    ) -> Self {
        Self { offer, build: Box::new(build) }
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("offer", &self.offer).finish_non_exhaustive()
    }
}

/// The lease of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeLease {
    /// The node holds it.
    Held(Lease),
    /// Its time ran out, and the store does not answer. Peers are still reached with it, but its
    /// subnets are not this node's: no address and no route for them is installed.
    Lapsed(Lease),
}

impl NodeLease {
    /// The lease itself. It identifies this node to admission in both cases.
    pub const fn lease(&self) -> &Lease {
        match self {
            Self::Held(lease) | Self::Lapsed(lease) => lease,
        }
    }

    /// The lease if this node holds it.
    pub const fn held(&self) -> Option<&Lease> {
        match self {
            Self::Held(lease) => Some(lease),
            Self::Lapsed(_) => None,
        }
    }
}

/// A network that was built for a lease.
#[derive(Debug)]
pub enum Built {
    /// A network of kernel objects: the route engine runs it.
    Kernel(Blueprint),
    /// A network that runs itself.
    Custom(Box<dyn Network>),
}

/// All that makes one network of kernel objects differ from another. Data only: the route engine
/// runs it.
pub struct Blueprint {
    /// The backend type of the offers that the plan understands; `None`: of all offers.
    pub lease_type: Option<&'static str>,
    /// The size of the largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// The kernel objects that the network may touch.
    pub footprint: Footprint,
    /// The objects that the network needs whatever the peers are: the device and its addresses.
    pub base: State,
    /// The objects that each peer adds.
    pub plan: Box<Plan>,
}

impl Blueprint {
    /// A network without devices that touches nothing, except for the objects that `plan` adds for
    /// each peer.
    pub fn new(
        mtu: u32,
        plan: impl Fn(
            &Subnets,
            &Offer,
            &Env<'_>,
            &mut Vec<crate::object::Object>,
        ) -> Result<(), Rejected>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            lease_type: None,
            mtu,
            footprint: Footprint::default(),
            base: State::default(),
            plan: Box::new(plan),
        }
    }
}

impl fmt::Debug for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blueprint")
            .field("lease_type", &self.lease_type)
            .field("mtu", &self.mtu)
            .field("footprint", &self.footprint)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}
