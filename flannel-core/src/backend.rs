//! Backends: the kinds of network that a config can name.

mod plan;
mod secrets;
mod underlay;

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::plan::{Answer, Env, Plan};
pub use self::secrets::{MakeSecret, MemorySecrets, Secrets};
pub use self::underlay::{LocalEnd, underlay_mtu};
use crate::address::{Dual, Subnet};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::kernel::{Annex, Footprint, Kernel};
use crate::lease::{Lease, Offer, Origin, Subnets, View};
use crate::network::Network;
use crate::object::{Addr, Link, LinkName, Object, Route, State, Via};
use crate::runtime::blocking;
use crate::status::Rejection;
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

    /// The backend type in the leases of its nodes; empty for flannel's `udp` and `alloc`. It must
    /// equal [`Offer::kind`] and [`Blueprint::lease_type`] of the same backend.
    fn lease_type(&self) -> &'static str {
        self.kind()
    }

    /// Whether its network can run on a node beside that of another backend, while a cluster moves
    /// from one to the other. Return `false` if [`prepare`](Self::prepare) builds a network that
    /// runs itself ([`Built::Custom`]).
    fn can_move(&self) -> bool {
        !self.lease_type().is_empty()
    }

    /// The names of its options, without `Type`. `None`: flannelctl does not find misspelt ones.
    fn option_names(&self) -> Option<&'static [&'static str]> {
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

    /// The annex that keeps the records of the network's plan. `None`: the plan defines no records.
    /// Every call with the same directory returns a handle of the same annex. In `state_dir` it
    /// keeps its files over restarts; without one, nothing is kept.
    fn annex(&self, _state_dir: Option<&Path>) -> Option<Arc<dyn Annex>> {
        None
    }

    /// Checks that the network can run on this node, and chooses the attributes that the node
    /// publishes in its lease. Calls [`Backend::validate`] itself. Writes no kernel object.
    ///
    /// # Errors
    /// Those of [`Backend::validate`]. The backend cannot run on this host. The kernel, the secrets
    /// or the store cannot be read.
    async fn prepare(&self, node: &Node<'_>, config: &Config) -> Result<Prepared>;
}

/// How packets travel between the nodes of a network, for the firewall, status and doctor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Datapath {
    /// The tunnel device of each enabled family; `None`: packets leave by the external interface.
    pub devices: Dual<LinkName>,
    /// The bytes that the tunnel adds to a packet, per family of the packet; `None` or 0: none.
    pub overhead: Dual<u32>,
    /// The packets, besides those of pods, that firewalls between nodes must let pass.
    pub inlets: Vec<Inlet>,
    /// Packets of pods travel between some nodes without a tunnel.
    pub bare: bool,
    /// Peers on the same link are reached without the tunnel, although there is one.
    pub direct: bool,
    /// The devices that encrypt all packets. With `RequireEncryption` the firewall drops packets to
    /// pods of other nodes that leave by any other device.
    pub encrypted: BTreeSet<LinkName>,
}

impl Datapath {
    /// Adds the datapath of a backend that runs beside this one. Of two tunnels of one family, the
    /// device of `self` stays.
    pub fn merge(&mut self, other: Self) {
        self.direct |= other.direct || self.devices != other.devices;
        self.bare |= other.bare;
        self.encrypted.extend(other.encrypted);
        for (family, device) in other.devices.iter() {
            if self.devices[family].is_none() {
                self.devices[family] = Some(*device);
                self.overhead[family] = other.overhead[family];
            }
        }
        let new = other.inlets.into_iter().filter(|inlet| !self.inlets.contains(inlet));
        let new: Vec<Inlet> = new.collect();
        self.inlets.extend(new);
    }
}

/// A kind of packet that nodes of a network send to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Inlet {
    /// UDP datagrams to this port.
    Udp(u16),
    /// IP packets of this protocol number. A firewall can admit those of accepted peers only.
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
    subnets: &'a dyn SubnetManager,
}

impl<'a> Node<'a> {
    /// A node that gets its lease from `subnets`. `flannel_route::Host::join` makes one.
    pub const fn new(
        uplink: &'a ExternalInterface,
        machine_id: &'a str,
        kernel: &'a Arc<dyn Kernel>,
        secrets: &'a dyn Secrets,
        subnets: &'a dyn SubnetManager,
    ) -> Self {
        Self { uplink, machine_id, kernel, secrets, subnets }
    }

    /// See [`SubnetManager::hints`].
    pub async fn hints(&self) -> Result<Hints> {
        self.subnets.hints().await
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
    pub async fn snapshot(&self, footprint: Footprint) -> Result<State> {
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

/// Builds a network for the node's lease. It is called once the node has the lease.
pub type Build = Box<dyn FnOnce(&NodeLease) -> Result<Built> + Send>;

/// A network that can be built when this node has a lease.
pub struct Prepared {
    /// How other nodes reach this one. It is published in the lease.
    pub offer: Offer,
    /// Builds the network for that lease.
    pub build: Build,
}

impl Prepared {
    /// A network that `build` builds for a lease with this `offer`.
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
    pub fn tunnel(&self, links: &Dual<Link>) -> State {
        let mut base: State = links.values().cloned().collect();
        for subnet in self.held().into_iter().flat_map(|lease| lease.subnets.iter()) {
            let Some(link) = &links[subnet.family()] else { continue };
            let (link, address, len) = (link.name, subnet.base(), subnet.family().bits());
            base.insert(Addr { link, address, len });
        }
        base
    }
}

/// A network that was built for a lease. The enum is exhaustive: a host must know each variant.
#[derive(Debug)]
pub enum Built {
    /// A network of kernel objects, which the route engine runs.
    Kernel(Blueprint),
    /// A network that runs itself.
    Custom(Box<dyn Network>),
}

/// The description of a network of kernel objects, for the route engine.
pub struct Blueprint {
    /// The [`Offer::kind`] of the offers that `plan` gets; `None`: any.
    pub lease_type: Option<&'static str>,
    /// The size of the largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// Packets pass only after a handshake with the peer, which its plan's WireGuard peer needs.
    /// While a node moves to this backend, a peer is reached by the other one until then.
    pub handshakes: bool,
    /// The kernel objects that the network owns. It must own all objects of `base` and `plan`.
    pub footprint: Footprint,
    /// The objects that do not depend on peers: the device and its addresses.
    pub base: State,
    /// The objects that each peer adds.
    pub plan: Box<Plan>,
}

impl Blueprint {
    /// A network with only the objects that `plan` adds for each peer. Its footprint is empty: set
    /// [`Blueprint::footprint`] to the objects that the network owns.
    pub fn new(
        mtu: u32,
        plan: impl Fn(&Subnets, &Offer, &Env<'_>, &mut Vec<Object>) -> Result<(), Rejection>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            lease_type: None,
            mtu,
            handshakes: false,
            footprint: Footprint::default(),
            base: State::default(),
            plan: Box::new(plan),
        }
    }

    /// The same network if the config requires encryption. Packets to addresses of the pod
    /// networks without another route are dropped, so that they do not leave by the default route.
    /// So a route of `base` to a whole pod network becomes one to the subnets of each peer.
    /// Without an encrypted `datapath` all leases are rejected, so that their routes go.
    #[must_use]
    pub fn only_encrypted(mut self, datapath: &Datapath) -> Self {
        let is_whole = |object: &Object| match object {
            Object::Route(route) => self.footprint.networks.contains(&route.dst).then_some(*route),
            _ => None,
        };
        let whole: Vec<Route> = self.base.iter().filter_map(is_whole).collect();
        if self.footprint.blackholes {
            let route = |dst: &Subnet| Route { dst: *dst, via: Via::Blackhole, mtu: None };
            self.base.extend(self.footprint.networks.iter().map(route));
        }
        if !whole.is_empty() {
            let plan = self.plan;
            self.plan = Box::new(move |subnets, offer, env, objects| {
                plan(subnets, offer, env, objects)?;
                let of_peer = |dst| {
                    whole
                        .iter()
                        .find(|route| route.dst.covers(&dst))
                        .map(|route| Route { dst, ..*route })
                };
                objects.extend(subnets.iter().filter_map(of_peer).map(Object::from));
                Ok(())
            });
        }
        if datapath.encrypted.is_empty() {
            self.plan = Box::new(|_, offer, _, _| {
                let why = "the network config has RequireEncryption, and the backend type";
                Err(Rejection::Rejected(format!("{why} {:?} does not encrypt", offer.kind)))
            });
        }
        self
    }
}

impl fmt::Debug for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blueprint")
            .field("lease_type", &self.lease_type)
            .field("mtu", &self.mtu)
            .field("handshakes", &self.handshakes)
            .field("footprint", &self.footprint)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}
