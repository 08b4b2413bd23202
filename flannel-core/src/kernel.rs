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
pub use self::record_keeper::{LongDrops, PacketCount, RecordKeeper, Refused, Traffic};
use crate::address::Subnet;
use crate::config::Config;
use crate::object::{Addr, Change, Key, Link, LinkName, Object, ObjectSet, Route, Via};

/// The route protocol of the routes and nexthop objects that networks put. iproute2's `rt_protos`
/// does not assign it to another program.
pub const ROUTE_PROTOCOL: u8 = 241;

/// The route protocol of Go flannel, and of scripts that do not name a protocol (`RTPROT_BOOT`).
pub const GO_ROUTE_PROTOCOL: u8 = 3;

/// `RTPROT_KERNEL`: the protocol of routes that the kernel made itself.
const PROTOCOL_KERNEL: u8 = 2;

/// The kernel objects that one network owns.
#[doc = include_str!("../docs/footprint.md")]
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// The devices that this network creates.
    pub links: BTreeSet<LinkName>,
    /// The pod networks.
    pub networks: Vec<Subnet>,
    /// Other devices that carry routes of this network, such as the external interface. Changes of
    /// these devices are watched. They do not decide which routes are owned.
    pub routes_on: BTreeSet<LinkName>,
    /// Whether this network puts blackhole routes inside `networks`.
    pub blackholes: bool,
    /// The ids of its nexthop objects. A backend leaves this `None`, because the route engine
    /// chooses the ids.
    pub nexthops: Option<NexthopBlock>,
    /// The names of the record keepers that keep records of this network ([`RecordKeeper::name`]).
    pub record_keepers: BTreeSet<&'static str>,
}

impl Footprint {
    /// The footprint of a network with this config that only has routes: to peers, with any
    /// backend, and the blackholes for this node's own subnets. `uplink` is the external interface.
    /// If it is `None`, routes on the interface are not watched.
    pub fn of_routes(config: &Config, uplink: Option<LinkName>) -> Self {
        Self {
            networks: config.pod_networks().collect(),
            routes_on: uplink.into_iter().collect(),
            blackholes: true,
            ..Self::default()
        }
    }

    /// Adds the footprint of another network, except for its `nexthops`.
    pub fn merge(&mut self, other: Self) {
        self.links.extend(other.links);
        let new = other.networks.into_iter().filter(|network| !self.networks.contains(network));
        let new: Vec<Subnet> = new.collect();
        self.networks.extend(new);
        self.routes_on.extend(other.routes_on);
        self.blackholes |= other.blackholes;
        self.record_keepers.extend(other.record_keepers);
    }

    /// Whether the network owns an address that was read from the kernel.
    pub fn owns_addr(&self, addr: &Addr) -> bool {
        let link_local = match addr.address {
            IpAddr::V4(a) => a.is_link_local(),
            IpAddr::V6(a) => a.is_unicast_link_local(),
        };
        self.links.contains(&addr.link) && !link_local
    }

    /// Whether the network owns a neighbour or a forwarding entry. `is_static` says that the entry
    /// never expires.
    pub fn owns_entry(&self, link: LinkName, is_static: bool) -> bool {
        is_static && self.links.contains(&link)
    }

    /// Whether the network owns a route that was read from the kernel (main table, default metric,
    /// no TOS). `link` is the device of the route, or the device of its nexthop object.
    pub fn owns_route(&self, route: &Route, link: Option<LinkName>, protocol: u8) -> bool {
        let inside = self.networks.iter().any(|network| network.covers(&route.dst));
        if link.is_some_and(|link| self.links.contains(&link)) {
            return protocol != PROTOCOL_KERNEL;
        }
        let kept = !matches!(route.via, Via::Blackhole | Via::LastResort) || self.blackholes;
        kept && protocol == ROUTE_PROTOCOL && inside
    }

    /// Whether the network owns a nexthop object that was read from the kernel.
    pub fn owns_nexthop(&self, id: u32, link: LinkName, protocol: u8) -> bool {
        protocol == ROUTE_PROTOCOL && (self.owns_id(id) || self.links.contains(&link))
    }

    fn owns_id(&self, id: u32) -> bool {
        self.nexthops.is_some_and(|block| block.contains(id))
    }

    /// Whether this network may desire `object`: a snapshot contains the object after the network
    /// has put it. `link` is the device of the object, or the device of its nexthop object.
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

    /// Whether a snapshot may contain `object`, which another program has put. `protocol` is the
    /// route protocol, or `None` if it is not known.
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

    /// Whether this network may own the object with this key, or may have to replace it. The key of
    /// a route or a nexthop object does not show the device. So the answer is false for a route
    /// outside `networks` and for an id outside `nexthops`, even if the object is on one of
    /// `links`.
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

/// The route that the kernel chooses for a packet. With `Default`, the packet is not sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RouteAnswer {
    /// The device. `None` if the destination has no route, or if the route drops or refuses the
    /// packet.
    pub link: Option<LinkName>,
    /// The gateway, or `None` if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose, or `None` if it does not report one.
    pub source: Option<IpAddr>,
    /// Whether the destination is an address of this host.
    pub local: bool,
}

impl RouteAnswer {
    /// A route to another host. If `gateway` is `None`, the destination is on the link.
    pub const fn via(link: LinkName, gateway: Option<IpAddr>, source: Option<IpAddr>) -> Self {
        Self { link: Some(link), gateway, source, local: false }
    }

    /// The device by which packets reach the destination without a router. `None` if they need a
    /// router or have no route, or if the destination is this host.
    pub fn on_link(&self) -> Option<LinkName> {
        self.link.filter(|_| self.gateway.is_none() && !self.local)
    }
}

/// The network tables of a kernel, in one network namespace.
#[doc = include_str!("../docs/kernel.md")]
pub trait Kernel: fmt::Debug + Send + Sync {
    /// All objects that `footprint` owns. An object that has attributes which [`Object`] cannot
    /// express is marked as [inexact](ObjectSet::note_inexact).
    ///
    /// If the kernel reports that a table has changed during a dump, the dump is repeated. Linux
    /// does not report this for routes, neighbours and forwarding entries. So a snapshot may miss
    /// entries that are changed at the same time, and the next snapshot contains them.
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError>;

    /// The ids of nexthop objects in the network namespace. If the kernel does not support nexthop
    /// objects, the result is empty and not [usable](NexthopIds::usable).
    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError>;

    /// The nexthop objects in `there` that have users outside `there`. Returns the ids of these
    /// nexthop objects with a text about the users: groups, routes of another table or metric, and
    /// so on. Linux deletes the users together with the nexthop object, and does not send a message
    /// about the IPv4 routes among them.
    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError>;

    #[doc = include_str!("../docs/apply.md")]
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome>;

    /// Checks that this process may change objects, and that the kernel supports links of these
    /// kinds. Changes nothing. The default implementation succeeds.
    fn may_change(&self, _links: &[Link]) -> Result<(), KernelError> {
        Ok(())
    }

    /// The route of a packet from this host to `dst`, by all routing tables.
    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError>;

    /// Opens a stream of the changes by other programs. Call this before the first snapshot, so
    /// that no change is missed.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;
}

/// Objects that may no longer be as they were put. The state of such an object is unknown until it
/// is put again or a snapshot shows it. Treat an unknown variant as [`Invalidation::Everything`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Invalidation {
    /// Single objects were changed or deleted, in this order. If the author is known, it is another
    /// program. If the author is `None`, it may be this process: Linux does not name the author of
    /// changes of IPv6 addresses, links and forwarding entries, and of deletions of neighbours.
    Objects(Vec<KernelEvent>, Option<ChangedBy>),
    /// The device has changed. This invalidates the device and everything on it, because Linux does
    /// not send messages about the IPv4 routes and nexthop objects that it deletes when a device
    /// goes down (`fib_flush`, `nexthop_flush_dev`), and about the IPv4 routes that it deletes with
    /// the last IPv4 address of the device.
    Link(LinkName),
    /// Messages were lost, so any object may have changed.
    Everything,
}

/// A message about one object, or the end of a change that was only started
/// ([`Outcome::Started`]).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelEvent {
    /// The object exists exactly like this. If a put of it was started, the put has succeeded.
    Present(Object),
    /// The object exists, with attributes that [`Object`] cannot express
    /// ([`ObjectSet::note_inexact`]).
    Inexact(Object),
    /// The object exists besides another entry with the same key. A snapshot shows whether one of
    /// them must be deleted.
    Duplicate(Object),
    /// An entry with this key exists in a form that [`Object`] cannot express, such as a multipath
    /// route or a dynamic neighbour.
    Unrepresentable(Key),
    /// An entry with another key has changed that may have precedence over the entry with this key,
    /// such as a route to the same destination with another metric.
    Related(Key),
    /// The object was deleted. If its deletion was started, the deletion has succeeded.
    Deleted(Key),
    /// The put or deletion of this key that was started last has failed.
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
    /// a message about one. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The stream is broken. Open a new stream. Lost messages are not an error: they are reported
    /// as [`Invalidation::Everything`].
    async fn next(&mut self) -> Result<Invalidation, KernelError>;
}
