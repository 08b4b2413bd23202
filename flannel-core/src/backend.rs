//! Backends: the kinds of network that a config can name.

mod blueprint;
mod datapath;
mod plan;
mod secrets;
mod source_check;
mod underlay;

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::blueprint::Blueprint;
pub use self::datapath::{Datapath, Transport};
pub use self::plan::{Advice, Env, Plan, Reach, ReachLookup};
pub use self::secrets::{MakeSecret, MemorySecrets, Secrets};
pub use self::source_check::SourceCheck;
pub use self::underlay::{LocalEnd, underlay_mtu};
use crate::address::Dual;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernel::{Footprint, Kernel, RecordKeeper};
use crate::lease::{Lease, Offer, Origin, View};
use crate::network::Network;
use crate::object::{Addr, Link, LinkName, ObjectSet};
use crate::runtime::blocking;
use crate::subnet::{Hints, SubnetManager};

/// The interface that connects this host with its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalInterface {
    /// Its name.
    pub name: LinkName,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its address, per enabled family: the source of tunnel packets.
    pub address: Dual<IpAddr>,
    /// The address that this node publishes; differs from `address` behind NAT.
    pub public: Dual<IpAddr>,
    /// Why it was chosen, as a sentence without a full stop: `it has the default route`.
    pub reason: String,
}

/// A kind of network, such as `vxlan`. It validates a network config, and describes the network
/// that the config asks for. The crate `flannel-backend-alloc` is the smallest example.
#[doc = include_str!("../docs/backend.md")]
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync {
    /// The `Type` in the network config, in lower case.
    fn kind(&self) -> &'static str;

    /// The backend type in the leases of its nodes; empty for flannel's `udp` and `alloc`.
    /// `flannel_route::Host` writes it into [`Offer::kind`] and [`Blueprint::lease_type`].
    fn lease_type(&self) -> &'static str {
        self.kind()
    }

    /// Whether its network can run on a node beside that of another backend, while a cluster moves
    /// from one to the other. Return `false` if [`prepare`](Self::prepare) returns a
    /// [`Build::Network`].
    fn can_move(&self) -> bool {
        !self.lease_type().is_empty()
    }

    /// The names of its options, without `Type`, or `None` if misspelt ones cannot be found.
    fn option_names(&self) -> Option<&[&'static str]> {
        None
    }

    /// It runs programs that the config names. Then a party that may write the config runs programs
    /// on this node, so a daemon allows such a backend only if an option of the node does.
    fn runs_commands(&self) -> bool {
        false
    }

    /// Checks whether this network can be built on the node with this external interface; without
    /// an interface, makes only the checks that are the same on every node. The daemon stops a
    /// running network for another config only after this succeeded.
    ///
    /// # Errors
    /// The options do not fit the enabled families or the interface.
    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()>;

    /// How packets travel between nodes.
    fn datapath(&self, config: &Config) -> Result<Datapath>;

    /// The kernel objects that the network owns on a node with this external interface. Without an
    /// interface, the objects on it are not included. A cleanup uses the footprint too.
    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint>;

    /// The record keepers that keep the records of the network's plan. None: the plan defines no
    /// records. Every call with the same directory returns handles of the same record keepers,
    /// until they are [stopped](RecordKeeper::stop). In `state_dir` they keep their files over
    /// restarts; without one, nothing is kept.
    fn record_keepers(&self, _state_dir: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
        Vec::new()
    }

    /// Checks that the network can run on this node, and chooses the attributes that the node
    /// publishes in its lease. Writes no kernel object. `flannel_route::Host` calls it only after
    /// [`Backend::validate`] accepted the config with the interface of `node`.
    ///
    /// # Errors
    /// The backend cannot run on this host. The kernel, the secrets or the store cannot be read.
    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared>;
}

/// The node on which a backend prepares a network.
#[derive(Debug, Clone)]
pub struct Node<'a> {
    /// Its external interface.
    pub uplink: &'a ExternalInterface,
    /// The seed of values that must differ between nodes and stay the same over restarts, for
    /// example the content of `/etc/machine-id`. If it is empty or the same on two nodes, they may
    /// choose equal values: vxlan chooses one MAC address if their public addresses are equal too.
    pub machine_id: &'a str,
    /// Its kernel. Its methods block: async code calls [`Node::snapshot`].
    pub kernel: &'a Arc<dyn Kernel>,
    /// Its secrets.
    pub secrets: &'a dyn Secrets,
    /// Why nothing checks the packets of a tunnel in the kernel ([`SourceCheck`]); `None` if a
    /// guard does, or if the config does not want it. A backend that can check them itself does so
    /// without a guard. `flannel_firewall::Guarded` sets it.
    pub unguarded: Option<&'a str>,
    subnets: &'a dyn SubnetManager,
}

/// [`Node::unguarded`] of a node without a guard.
const NO_GUARD: &str = "nothing guards tunnels on this node";

impl<'a> Node<'a> {
    /// A node that gets its lease from `subnets`. `flannel_route::Host::join` makes one.
    pub const fn new(
        uplink: &'a ExternalInterface,
        machine_id: &'a str,
        kernel: &'a Arc<dyn Kernel>,
        secrets: &'a dyn Secrets,
        subnets: &'a dyn SubnetManager,
    ) -> Self {
        Self { uplink, machine_id, kernel, secrets, unguarded: Some(NO_GUARD), subnets }
    }

    /// The same node, on which a guard checks the packets of tunnels, or does not because of `why`.
    /// See [`Node::unguarded`].
    #[must_use]
    pub const fn with_guard(self, why: Option<&'a str>) -> Self {
        Self { unguarded: why, ..self }
    }

    /// See [`SubnetManager::hints`].
    pub async fn hints(&self) -> Result<Hints> {
        self.subnets.hints().await
    }

    /// See [`SubnetManager::publishes_attrs`].
    pub fn publishes_attrs(&self) -> bool {
        self.subnets.publishes_attrs()
    }

    /// The leases of all nodes. Waits up to five seconds for a complete, live set, then returns the
    /// latest one. If there is a set from an earlier run and the store has never answered, it does
    /// not wait. Fails as [`SubnetManager::watch_leases`] does. Needs tokio's time.
    pub async fn leases(&self) -> Result<View> {
        let mut views = self.subnets.watch_leases().await?;
        let is_cached = matches!(views.borrow().origin, Origin::Cached { written: Some(_) });
        if !is_cached || self.subnets.store_status().confirmed.is_some() {
            let live = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
            // After a timeout, or if the manager was dropped, the latest set is returned.
            let _ = tokio::time::timeout(Duration::from_secs(5), live).await;
        }
        let view = views.borrow().clone();
        Ok(view)
    }

    /// [`Kernel::snapshot`] on a blocking thread of tokio. Fails with [`Error::Kernel`]. Dropping
    /// the future loses nothing.
    ///
    /// # Panics
    /// The kernel panics, or there is no tokio runtime.
    pub async fn snapshot(&self, footprint: Footprint) -> Result<ObjectSet> {
        let kernel = Arc::clone(self.kernel);
        blocking(move || kernel.snapshot(&footprint))
            .await
            .map_err(|source| Error::Kernel { object: "network objects".into(), source })
    }

    /// [`Kernel::may_change`] on a blocking thread of tokio, before a lease is taken. Fails with
    /// [`Error::Kernel`].
    ///
    /// # Panics
    /// The kernel panics, or there is no tokio runtime.
    pub async fn may_change(&self, links: Vec<Link>) -> Result<()> {
        let device = |link: &Link| format!("{} device", link.kind.attributes().kind());
        let object = links.first().map_or_else(|| "routes".into(), device);
        let kernel = Arc::clone(self.kernel);
        blocking(move || kernel.may_change(&links))
            .await
            .map_err(|source| Error::Kernel { object, source })
    }
}

/// Describes a network of kernel objects for the node's lease.
pub type BuildBlueprint = Box<dyn FnOnce(&NodeLease) -> Result<Blueprint> + Send>;

/// Builds a network that runs itself, for the node's lease.
pub type BuildNetwork = Box<dyn FnOnce(&NodeLease) -> Result<Box<dyn Network>> + Send>;

/// A function that is called once the node has its lease. The enum is exhaustive, because a host
/// must know each variant.
///
/// There are two variants because this crate does not contain the route engine: only a host can
/// make a [`Network`] of a [`Blueprint`].
pub enum Build {
    /// The route engine runs the network.
    Blueprint(BuildBlueprint),
    /// The network runs itself. It does not run beside another one: [`Backend::can_move`] returns
    /// `false`.
    Network(BuildNetwork),
}

/// A network that can be built when this node has a lease.
pub struct Prepared {
    /// How other nodes reach this one. It is published in the lease. `flannel_route::Host` fills in
    /// [`Offer::kind`].
    pub offer: Offer,
    /// Builds the network for that lease.
    pub build: Build,
}

impl Prepared {
    /// A network of the kernel objects that `build` describes for a lease with this `offer`.
    pub fn new(
        offer: Offer,
        build: impl FnOnce(&NodeLease) -> Result<Blueprint> + Send + 'static,
    ) -> Self {
        Self { offer, build: Build::Blueprint(Box::new(build)) }
    }

    /// A network that runs itself, which `build` makes for a lease with this `offer`.
    pub fn with_network(
        offer: Offer,
        build: impl FnOnce(&NodeLease) -> Result<Box<dyn Network>> + Send + 'static,
    ) -> Self {
        Self { offer, build: Build::Network(Box::new(build)) }
    }

    /// Changes the blueprint with `change` after it was built. A network that runs itself stays as
    /// it is.
    #[must_use]
    pub fn map_blueprint(
        self,
        change: impl FnOnce(Blueprint, &NodeLease) -> Blueprint + Send + 'static,
    ) -> Self {
        let Self { offer, build } = self;
        match build {
            Build::Blueprint(build) => Self::new(offer, move |lease| {
                let blueprint = build(lease)?;
                Ok(change(blueprint, lease))
            }),
            build @ Build::Network(_) => Self { offer, build },
        }
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").field("offer", &self.offer).finish_non_exhaustive()
    }
}

impl fmt::Debug for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Blueprint(_) => "Blueprint",
            Self::Network(_) => "Network",
        };
        f.debug_tuple(name).finish_non_exhaustive()
    }
}

/// The lease of this node. The enum is exhaustive, because each use of the subnets depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeLease {
    /// The node holds it.
    Held(Lease),
    /// It expired while the store did not answer. Peers are still reached, but the subnets are no
    /// longer this node's: no address and no route for them is installed.
    Lapsed(Lease),
}

impl NodeLease {
    /// The lease. It identifies this node to admission in both cases.
    pub const fn lease(&self) -> &Lease {
        match self {
            Self::Held(lease) | Self::Lapsed(lease) => lease,
        }
    }

    /// The lease if this node holds it; `None` if it has lapsed.
    pub const fn held(&self) -> Option<&Lease> {
        match self {
            Self::Held(lease) => Some(lease),
            Self::Lapsed(_) => None,
        }
    }

    /// The tunnel devices of a network, and on each the first address of this node's subnet, if the
    /// node holds the lease. `links`: the device of each family.
    pub fn tunnel(&self, links: &Dual<Link>) -> ObjectSet {
        let mut base: ObjectSet = links.values().cloned().collect();
        for subnet in self.held().into_iter().flat_map(|lease| lease.subnets.iter()) {
            let Some(link) = &links[subnet.family()] else { continue };
            let (link, address, len) = (link.name, subnet.base(), subnet.family().bits());
            base.insert(Addr { link, address, len });
        }
        base
    }
}
