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
pub use self::plan::{Advice, Env, Plan, Proof, Reach, ReachLookup};
pub use self::secrets::{MakeSecret, MemorySecrets, Secrets};
pub use self::source_check::SourceCheck;
pub use self::underlay::{LocalEnd, underlay_mtu};
use crate::address::Dual;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernel::{Footprint, Kernel, RecordKeeper};
use crate::lease::{Lease, Offer, Origin, Subnets, View};
use crate::network::Network;
use crate::object::{Addr, Link, LinkName, ObjectSet};
use crate::runtime::blocking;
use crate::subnet::{Hints, SubnetManager};

/// The interface that connects this host with its peers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExternalInterface {
    /// The name of the interface.
    pub name: LinkName,
    /// The MTU of the interface, in bytes.
    pub mtu: u32,
    /// The address of the interface for each enabled family: the source of tunnel packets.
    pub address: Dual<IpAddr>,
    /// The address that this node publishes for each family. It differs from `address` behind NAT.
    pub public: Dual<IpAddr>,
    /// Why this interface was chosen, as a sentence without a full stop: `it has the default
    /// route`. It may be empty.
    pub reason: String,
    /// Why an address may be unfit for peers, for each family. `None` if nothing is known against
    /// it, or if a user named it.
    pub doubts: Dual<AddressDoubt>,
}

/// Why an address of an [`ExternalInterface`] may be unfit for peers. The greater doubt is the
/// worse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AddressDoubt {
    /// The interface leads to no other host. The address may be made up, and the same on each host.
    Isolated,
    /// The address never expires and is alone in its network (/32, /128), like an address that a
    /// program moves from host to host, such as keepalived or kube-vip. It may also be the only
    /// address of the host.
    Movable,
    /// The address is link-local.
    LinkLocal,
}

impl ExternalInterface {
    /// An interface whose own addresses the node publishes. `mtu` is in bytes. The reason is empty.
    pub const fn new(name: LinkName, mtu: u32, address: Dual<IpAddr>) -> Self {
        let reason = String::new();
        Self { name, mtu, address, public: address, reason, doubts: Dual { v4: None, v6: None } }
    }

    /// Sets [`ExternalInterface::mtu`], in bytes.
    #[must_use]
    pub fn with_mtu(self, mtu: u32) -> Self {
        Self { mtu, ..self }
    }

    /// Sets [`ExternalInterface::address`], and leaves the public addresses as they are.
    #[must_use]
    pub fn with_address(self, address: Dual<IpAddr>) -> Self {
        Self { address, ..self }
    }

    /// Sets [`ExternalInterface::public`].
    #[must_use]
    pub fn with_public(self, public: Dual<IpAddr>) -> Self {
        Self { public, ..self }
    }

    /// Sets [`ExternalInterface::reason`].
    #[must_use]
    pub fn with_reason(self, reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), ..self }
    }

    /// Sets [`ExternalInterface::doubts`].
    #[must_use]
    pub fn with_doubts(self, doubts: Dual<AddressDoubt>) -> Self {
        Self { doubts, ..self }
    }
}

/// A kind of network, such as `vxlan`. A backend validates a network config, and describes the
/// network that the config asks for. `flannel_backends::Alloc` is the smallest example.
#[doc = include_str!("../docs/backend.md")]
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync {
    /// The `Type` in the network config, in lower case.
    fn kind(&self) -> &'static str;

    /// The backend type in the leases of its nodes. It is empty for flannel's `udp` and `alloc`.
    /// `flannel_route::Host` writes it into [`Offer::kind`] and [`Blueprint::lease_type`]. The
    /// default is [`kind`](Self::kind).
    fn lease_type(&self) -> &'static str {
        self.kind()
    }

    /// Whether its network can run on a node beside the network of another backend, while a cluster
    /// moves from one backend to the other. Return `false` if [`prepare`](Self::prepare) returns a
    /// [`Build::Network`]. The default is `true`, unless the [lease type](Self::lease_type) is
    /// empty.
    fn can_move(&self) -> bool {
        !self.lease_type().is_empty()
    }

    /// The names of its options, without `Type`, to find misspelt options. `None`, the default, if
    /// any name is allowed.
    fn option_names(&self) -> Option<&[&'static str]> {
        None
    }

    /// Whether it runs programs that the config names. A user that may write the config can then
    /// run programs on this node, so a daemon allows such a backend only if an option of the node
    /// does. The default is `false`.
    fn runs_commands(&self) -> bool {
        false
    }

    /// Checks whether the network can be built on a node with this external interface. Without an
    /// interface, it makes only the checks that give the same result on every node. A daemon stops
    /// a running network for another config only after this check has succeeded.
    ///
    /// # Errors
    /// The options do not fit the enabled families or the interface.
    fn validate(&self, config: &Config, uplink: Option<&ExternalInterface>) -> Result<()>;

    /// How packets travel between nodes.
    ///
    /// # Errors
    /// The options are wrong.
    fn datapath(&self, config: &Config) -> Result<Datapath>;

    /// The kernel objects that the network owns on a node with this external interface. Without an
    /// interface, the objects on it are not included. A cleanup uses the footprint too.
    ///
    /// # Errors
    /// The options are wrong.
    fn footprint(&self, config: &Config, uplink: Option<LinkName>) -> Result<Footprint>;

    /// The record keepers for the records that the network's plan defines. The list is empty, as by
    /// default, if the plan defines no records. Every call with the same directory returns handles
    /// of the same record keepers, until they are [stopped](RecordKeeper::stop). They keep their
    /// files in `state_dir`. If it is `None`, their records are lost when the process ends.
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
    /// The external interface of the node.
    pub uplink: &'a ExternalInterface,
    /// The seed of values that must differ between nodes and stay the same over restarts, for
    /// example the content of `/etc/machine-id`. If it is empty or equal on two nodes, they may
    /// choose equal values: vxlan chooses one MAC address for both if their public addresses are
    /// equal too.
    pub machine_id: &'a str,
    /// The kernel of the node. Its methods block, so async code calls [`Node::snapshot`] and
    /// [`Node::may_change`] instead.
    pub kernel: &'a Arc<dyn Kernel>,
    /// The secrets of the node.
    pub secrets: &'a dyn Secrets,
    /// The reason why the kernel does not check the sources of tunnel packets ([`SourceCheck`]).
    /// `flannel_firewall::Guarded` sets it. It is `None` if the kernel checks them, or if the check
    /// is off. Without `Guarded` it is always `Some`. If it is `Some`, a backend that can check the
    /// sources itself should do so.
    pub unguarded: Option<&'a str>,
    subnets: &'a dyn SubnetManager,
}

/// [`Node::unguarded`] of a node without a guard.
const NO_GUARD: &str = "nothing guards tunnels on this node";

impl<'a> Node<'a> {
    /// A node that gets its lease from `subnets`. `flannel_route::Host::join` calls this.
    pub const fn new(
        uplink: &'a ExternalInterface,
        machine_id: &'a str,
        kernel: &'a Arc<dyn Kernel>,
        secrets: &'a dyn Secrets,
        subnets: &'a dyn SubnetManager,
    ) -> Self {
        Self { uplink, machine_id, kernel, secrets, unguarded: Some(NO_GUARD), subnets }
    }

    /// Sets [`Node::unguarded`]: `None` if a guard checks tunnel packets, else the reason.
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

    /// The leases of all nodes. Waits at most five seconds for a complete, live set, then returns
    /// the latest set. It does not wait if there is a set from an earlier run and the store has
    /// never answered. Needs a tokio runtime with time enabled.
    ///
    /// # Errors
    /// [`SubnetManager::watch_leases`] failed.
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

    /// Calls [`Kernel::snapshot`] on a blocking thread of tokio. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    ///
    /// # Panics
    /// The kernel panics, or the caller is outside a tokio runtime.
    pub async fn snapshot(&self, footprint: Footprint) -> Result<ObjectSet> {
        let kernel = Arc::clone(self.kernel);
        blocking(move || kernel.snapshot(&footprint))
            .await
            .map_err(|source| Error::Kernel { object: "network objects".into(), source })
    }

    /// Calls [`Kernel::may_change`] on a blocking thread of tokio. A backend calls this in
    /// [`Backend::prepare`], so that a node that cannot make the network takes no lease.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    ///
    /// # Panics
    /// The kernel panics, or the caller is outside a tokio runtime.
    pub async fn may_change(&self, links: Vec<Link>) -> Result<()> {
        let object = match links.first() {
            Some(link) => format!("{} device", link.kind.attributes().kind()),
            None => "routes".into(),
        };
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

/// A function that is called when the node has its lease. The enum is exhaustive, because a host
/// must know each variant.
///
/// There are two variants because this crate does not contain the route engine: only a host can
/// make a [`Network`] of a [`Blueprint`].
pub enum Build {
    /// Describes a network of kernel objects, which the route engine runs.
    Blueprint(BuildBlueprint),
    /// Builds a network that runs itself. It cannot run beside another network, so
    /// [`Backend::can_move`] must return `false`.
    Network(BuildNetwork),
}

/// Completes an offer for a lease with these subnets, for example with a signature. It is pure.
pub type CompleteOffer = Box<dyn Fn(&Subnets, &mut Offer) + Send>;

/// A network that can be built as soon as this node has a lease.
pub struct Prepared {
    /// How other nodes reach this node. It is published in the lease. `flannel_route::Host` fills
    /// in [`Offer::kind`].
    pub offer: Offer,
    /// Completes the offer when the subnets of the lease are known. `None` if the offer does not
    /// depend on them.
    pub complete_offer: Option<CompleteOffer>,
    /// Builds the network for the lease.
    pub build: Build,
}

impl Prepared {
    /// A network of the kernel objects that `build` describes for a lease with this `offer`.
    pub fn new(
        offer: Offer,
        build: impl FnOnce(&NodeLease) -> Result<Blueprint> + Send + 'static,
    ) -> Self {
        Self { offer, complete_offer: None, build: Build::Blueprint(Box::new(build)) }
    }

    /// A network that runs itself, which `build` creates for a lease with this `offer`.
    pub fn with_network(
        offer: Offer,
        build: impl FnOnce(&NodeLease) -> Result<Box<dyn Network>> + Send + 'static,
    ) -> Self {
        Self { offer, complete_offer: None, build: Build::Network(Box::new(build)) }
    }

    /// Sets [`Prepared::complete_offer`].
    #[must_use]
    pub fn with_complete_offer(
        self,
        complete: impl Fn(&Subnets, &mut Offer) + Send + 'static,
    ) -> Self {
        Self { complete_offer: Some(Box::new(complete)), ..self }
    }

    /// Changes the blueprint with `change` after it was built. This has no effect on a network that
    /// runs itself.
    #[must_use]
    pub fn map_blueprint(
        self,
        change: impl FnOnce(Blueprint, &NodeLease) -> Blueprint + Send + 'static,
    ) -> Self {
        let build = match self.build {
            Build::Blueprint(build) => Build::Blueprint(Box::new(move |lease: &NodeLease| {
                let blueprint = build(lease)?;
                Ok(change(blueprint, lease))
            })),
            build @ Build::Network(_) => build,
        };
        Self { build, ..self }
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
    /// The node holds the lease.
    Held(Lease),
    /// The lease expired while the store did not answer. Peers can be reached, but the subnets may
    /// belong to another node, so the network installs no address and no route for them.
    Lapsed(Lease),
}

impl NodeLease {
    /// The lease in both cases. Its subnets tell which lease of a view is the lease of this node.
    pub const fn lease(&self) -> &Lease {
        match self {
            Self::Held(lease) | Self::Lapsed(lease) => lease,
        }
    }

    /// The lease if this node holds it, or `None` if it has lapsed.
    pub const fn held(&self) -> Option<&Lease> {
        match self {
            Self::Held(lease) => Some(lease),
            Self::Lapsed(_) => None,
        }
    }

    /// The tunnel devices of a network, with the first address of this node's subnet on each. If
    /// the lease has lapsed, there are only the devices. `links` has the device of each family.
    pub fn tunnel(&self, links: &Dual<Link>) -> ObjectSet {
        let mut base: ObjectSet = links.values().cloned().collect();
        for subnet in self.held().into_iter().flat_map(|lease| lease.subnets.iter()) {
            let Some(link) = &links[subnet.family()] else { continue };
            let len = subnet.family().bits();
            base.insert(Addr { link: link.name, address: subnet.base(), len });
        }
        base
    }
}
