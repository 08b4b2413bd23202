//! The trait of a kernel, and the rules for the kernel objects that flannel may change.

mod changed_by;
mod error;
mod go_routes;
mod nexthops;
mod outcome;
mod record_keeper;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use async_trait::async_trait;

pub use self::changed_by::{ChangedBy, Process, ProcessNames};
pub use self::error::KernelError;
pub use self::go_routes::{GoRouteKernel, GoRoutes};
pub use self::nexthops::{NexthopBlock, NexthopIds};
pub use self::outcome::Outcome;
pub use self::record_keeper::{LongDrops, RecordKeeper, Refused, Traffic};
use crate::address::Subnet;
use crate::config::Config;
use crate::object::{Addr, Change, Key, Link, LinkName, Object, ObjectSet, Route, Via};

/// The route protocol of our routes and nexthop objects. iproute2's `rt_protos` does not assign it.
pub const ROUTE_PROTOCOL: u8 = 241;

/// The route protocol of Go flannel, and of scripts that name none (`RTPROT_BOOT`).
pub const GO_ROUTE_PROTOCOL: u8 = 3;

/// `RTPROT_KERNEL`: routes that the kernel made itself.
const PROTOCOL_KERNEL: u8 = 2;

/// The kernel objects that one network owns.
#[doc = include_str!("../docs/footprint.md")]
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Devices that this network makes.
    pub links: BTreeSet<LinkName>,
    /// The pod networks.
    pub networks: Vec<Subnet>,
    /// Other devices that carry its routes, such as the external interface. Their changes are
    /// watched. They do not decide which routes are owned.
    pub routes_on: BTreeSet<LinkName>,
    /// This network keeps blackhole routes inside `networks`.
    pub blackholes: bool,
    /// The ids of its nexthop objects. `None` from a backend: the route engine chooses them.
    pub nexthops: Option<NexthopBlock>,
    /// The record keepers with its records ([`RecordKeeper::name`]).
    pub record_keepers: BTreeSet<&'static str>,
}

impl Footprint {
    /// The routes of a network with this config, without devices. `uplink`: the external interface;
    /// `None`: routes on the interface are not watched. The routes include those of another backend
    /// and the blackholes of this node's own subnets.
    pub fn of_routes(config: &Config, uplink: Option<LinkName>) -> Self {
        Self {
            networks: config.pod_networks().collect(),
            routes_on: uplink.into_iter().collect(),
            blackholes: true,
            ..Self::default()
        }
    }

    /// Adds another network's footprint, except for its `nexthops`.
    pub fn merge(&mut self, other: Self) {
        self.links.extend(other.links);
        let new = other.networks.into_iter().filter(|network| !self.networks.contains(network));
        let new: Vec<Subnet> = new.collect();
        self.networks.extend(new);
        self.routes_on.extend(other.routes_on);
        self.blackholes |= other.blackholes;
        self.record_keepers.extend(other.record_keepers);
    }

    /// Whether an address read from the kernel is owned.
    pub fn owns_addr(&self, addr: &Addr) -> bool {
        let link_local = match addr.address {
            IpAddr::V4(a) => a.is_link_local(),
            IpAddr::V6(a) => a.is_unicast_link_local(),
        };
        self.links.contains(&addr.link) && !link_local
    }

    /// Whether a neighbour or forwarding entry is owned. `is_static`: it never expires.
    pub fn owns_entry(&self, link: LinkName, is_static: bool) -> bool {
        is_static && self.links.contains(&link)
    }

    /// Whether a route read from the kernel (main table, default metric, no TOS) is owned. `link`
    /// is the route's device, or that of its nexthop object.
    pub fn owns_route(&self, route: &Route, link: Option<LinkName>, protocol: u8) -> bool {
        let inside = self.networks.iter().any(|network| network.covers(&route.dst));
        if link.is_some_and(|link| self.links.contains(&link)) {
            return protocol != PROTOCOL_KERNEL;
        }
        let kept = !matches!(route.via, Via::Blackhole | Via::LastResort) || self.blackholes;
        kept && protocol == ROUTE_PROTOCOL && inside
    }

    /// Whether a nexthop object read from the kernel is owned.
    pub fn owns_nexthop(&self, id: u32, link: LinkName, protocol: u8) -> bool {
        protocol == ROUTE_PROTOCOL && (self.owns_id(id) || self.links.contains(&link))
    }

    fn owns_id(&self, id: u32) -> bool {
        self.nexthops.is_some_and(|block| block.contains(id))
    }

    /// Whether this network may desire `object`: a snapshot shows it as owned after the network has
    /// put it. `link` is the object's device, or the device of its nexthop object.
    pub fn owns(&self, object: &Object, link: Option<LinkName>) -> bool {
        match object {
            Object::Link(link) => self.links.contains(&link.name),
            Object::Addr(addr) => self.owns_addr(addr),
            Object::Neigh(_) | Object::Fdb(_) | Object::Peer(_) => {
                link.is_some_and(|link| self.owns_entry(link, true))
            }
            Object::Nexthop(nexthop) => self.owns_nexthop(nexthop.id, nexthop.link, ROUTE_PROTOCOL),
            Object::Route(route) => self.owns_route(route, link, ROUTE_PROTOCOL),
            Object::Record(record) => self.record_keepers.contains(record.keeper),
        }
    }

    /// Whether a snapshot may show `object`, which another program has put, as owned. `protocol` is
    /// `None` if it is not known.
    pub fn may_own(&self, object: &Object, protocol: Option<u8>) -> bool {
        let on_ours = object.link().is_some_and(|link| self.links.contains(&link));
        let may_be_ours = protocol.is_none_or(|protocol| protocol == ROUTE_PROTOCOL);
        match object {
            _ if !on_ours && !self.concerns(&object.key()) => false,
            Object::Link(_) => true,
            Object::Nexthop(_) => may_be_ours,
            Object::Route(_) if protocol == Some(ROUTE_PROTOCOL) => true,
            Object::Route(route) => match route.via {
                Via::Gateway { link, .. } | Via::Link(link) => {
                    on_ours || (may_be_ours && self.routes_on.contains(&link))
                }
                // The device of the nexthop object is not known here.
                Via::Nexthop(id) => !self.links.is_empty() || (may_be_ours && self.owns_id(id)),
                Via::Blackhole | Via::LastResort => may_be_ours && self.blackholes,
            },
            Object::Addr(addr) => self.owns_addr(addr),
            Object::Record(record) => self.record_keepers.contains(record.keeper),
            _ => on_ours,
        }
    }

    /// Whether this network may own, or has to replace, the object with this key. The key of a
    /// route or a nexthop object does not show its device. So the answer is false for a route
    /// outside `networks` and for an id outside `nexthops`, even if it is on one of `links`.
    pub fn concerns(&self, key: &Key) -> bool {
        match key {
            Key::Link(link)
            | Key::Addr(link, _)
            | Key::Neigh(link, _)
            | Key::Fdb(link, _)
            | Key::Peer(link, _) => self.links.contains(link),
            Key::Nexthop(id) => self.owns_id(*id),
            Key::Route(dst) => self.networks.iter().any(|network| network.covers(dst)),
            Key::Record(keeper, _) => self.record_keepers.contains(keeper),
        }
    }
}

/// The kernel's route for a packet. `Default`: the packet is not sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RouteAnswer {
    /// The device; `None`: there is no route, or one that drops or refuses the packet.
    pub link: Option<LinkName>,
    /// The gateway; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose; `None`: it reports none.
    pub source: Option<IpAddr>,
    /// The destination is an address of this host.
    pub local: bool,
}

impl RouteAnswer {
    /// A route to another host. Without a `gateway` the destination is on the link.
    pub const fn via(link: LinkName, gateway: Option<IpAddr>, source: Option<IpAddr>) -> Self {
        Self { link: Some(link), gateway, source, local: false }
    }

    /// The device on whose link the destination is; `None` if it is not on a link, or is this host.
    pub fn on_link(&self) -> Option<LinkName> {
        self.link.filter(|_| self.gateway.is_none() && !self.local)
    }
}

/// A kernel's network tables: one network namespace.
#[doc = include_str!("../docs/kernel.md")]
pub trait Kernel: fmt::Debug + Send + Sync {
    /// All objects that `footprint` owns. Some are marked as [inexact](ObjectSet::note_inexact).
    ///
    /// A dump is repeated if the kernel reports that a table changed meanwhile. Linux does not
    /// report this for routes, neighbours and forwarding entries: a snapshot may miss some of them,
    /// and the next one finds them.
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError>;

    /// The ids of nexthop objects, as [`NexthopIds`] describes. If the kernel does not support
    /// nexthop objects, the answer is empty and not [usable](NexthopIds::usable).
    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError>;

    /// The nexthop objects in `there` that have users outside `there`. Returns their ids, and the
    /// users as text: groups, routes of another table or metric, and so on. The kernel deletes the
    /// users together with the nexthop object, and sends no message about IPv4 routes.
    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError>;

    #[doc = include_str!("../docs/apply.md")]
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome>;

    /// Checks that this process may change objects, and that the kernel has links of these kinds.
    /// Changes nothing. The default implementation succeeds.
    fn may_change(&self, _links: &[Link]) -> Result<(), KernelError> {
        Ok(())
    }

    /// The route of a packet to `dst` by all routing tables.
    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError>;

    /// Starts to listen for changes by other programs. The stream returns [`Invalidation`]s. Call
    /// it before the first snapshot, so that no change is missed.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;
}

/// Objects that may no longer be as they were put. An object is invalid until it is put again or a
/// snapshot shows it. Treat an unknown variant as [`Invalidation::Everything`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Invalidation {
    /// Single objects were changed or deleted, in this order. With an author, it was another
    /// program. Without one (`None`), it may have been this process, because the kernel names no
    /// author for IPv6 addresses, links, forwarding entries and deleted neighbours.
    Objects(Vec<KernelEvent>, Option<ChangedBy>),
    /// The device changed, which invalidates it and everything on it. The kernel sends no message
    /// about the IPv4 routes and nexthop objects that it deletes when a device goes down
    /// (`fib_flush`, `nexthop_flush_dev`), and about the IPv4 routes that it deletes with the
    /// device's last IPv4 address.
    Link(LinkName),
    /// Messages were lost.
    Everything,
}

/// The content of one message about one object, or the end of a change that a [`RecordKeeper`]
/// started.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelEvent {
    /// It exists, exactly like this. A put that [`RecordKeeper::apply`] has started has succeeded.
    Present(Object),
    /// It exists, with attributes that no [`Object`] expresses ([`ObjectSet::note_inexact`]).
    Inexact(Object),
    /// It exists besides another entry with its key. A snapshot shows whether one has to go.
    Duplicate(Object),
    /// It exists in a form that no [`Object`] expresses: a multipath route, a dynamic neighbour, …
    Unrepresentable(Key),
    /// Another entry for the destination changed, and may take effect: a route with another metric.
    Related(Key),
    /// It was deleted. If [`RecordKeeper::apply`] has started a deletion of it, that has succeeded.
    Deleted(Key),
    /// The put or deletion of this key that [`RecordKeeper::apply`] started last has failed.
    Failed(Key, KernelError),
}

impl KernelEvent {
    /// The key of the object.
    pub fn key(&self) -> Key {
        match self {
            Self::Present(object) | Self::Inexact(object) | Self::Duplicate(object) => object.key(),
            Self::Unrepresentable(key)
            | Self::Related(key)
            | Self::Deleted(key)
            | Self::Failed(key, _) => *key,
        }
    }
}

/// A stream of invalidations.
#[doc = include_str!("../docs/changes.md")]
#[async_trait]
pub trait Changes: Send {
    /// Waits for the next change by another program. Returns at once if the kernel has already sent
    /// one. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The stream is broken: open a new one. Lost messages are not an error: they are reported as
    /// [`Invalidation::Everything`].
    async fn next(&mut self) -> Result<Invalidation, KernelError>;
}
