//! The trait for a kernel, and the rules for which of its objects are ours to touch.
//!
//! The methods of [`Kernel`] are all idempotent or read-only. Policy ([`Footprint`]) is a value
//! decided here; implementations only carry it out.

mod changed_by;
mod nexthops;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use async_trait::async_trait;

pub use self::changed_by::{ChangedBy, ProcessNames};
pub use self::nexthops::{NexthopBlock, NexthopIds};
use crate::address::{Dual, Subnet};
use crate::object::LinkName;
use crate::object::{Addr, Change, Key, Object, Route, State, Via};

/// The route protocol that flannel's routes and nexthops carry (`ip route … proto 241`).
///
/// Not Go flannel's, which uses `boot` (3) as every script does. Unassigned in iproute2's
/// `rt_protos`.
pub const ROUTE_PROTOCOL: u8 = 241;

/// The route protocol of Go flannel and of every script that names none (`RTPROT_BOOT`).
pub const GO_ROUTE_PROTOCOL: u8 = 3;

/// `RTPROT_KERNEL`: routes that the kernel made itself.
const PROTOCOL_KERNEL: u8 = 2;

/// What one network may touch in the kernel; everything else it must leave alone.
///
/// | object | ours if |
/// |---|---|
/// | link | its name is in `links` and it is of a kind we know |
/// | address | on one of `links`, not link-local |
/// | neigh, fdb | on one of `links` and permanent; a forwarding entry also if it is static |
/// | route | main table, default metric, no TOS, and: on one of `links` and not made by the kernel itself; or of our protocol and inside `networks`, on whatever device (but a blackhole, of last resort too, only if it keeps those) |
/// | nexthop | of our protocol, and its id in `nexthops` or on one of `links` |
///
/// So a network finds what it left on another external interface, or with another backend. Several
/// networks in one namespace need pod networks that do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Devices that this network makes.
    pub links: BTreeSet<LinkName>,
    /// The pod networks; bound what we may claim by route protocol alone.
    pub networks: Vec<Subnet>,
    /// Devices of others on which this network keeps routes: the external interface.
    pub routes_on: BTreeSet<LinkName>,
    /// This network keeps blackhole routes inside `networks`.
    pub blackholes: bool,
    /// The ids of its nexthop objects. Backends leave it `None`: the route engine
    /// chooses a block ([`NexthopBlock::choose`]).
    pub nexthops: Option<NexthopBlock>,
    /// `Some`: of routes, nothing but what Go flannel leaves on `routes_on`, in each family that
    /// has a `SubnetLen` here: those of its protocol, by a gateway, with a destination of exactly
    /// that length inside `networks`. For `flannel_route::remove_go_routes`; `None` everywhere
    /// else.
    pub go_routes: Option<Dual<u8>>,
}

impl Footprint {
    /// Adds what another network may touch. The nexthop ids and Go flannel's routes stay as they
    /// are.
    pub fn merge(&mut self, other: Self) {
        self.links.extend(other.links);
        for network in other.networks {
            if !self.networks.contains(&network) {
                self.networks.push(network);
            }
        }
        self.routes_on.extend(other.routes_on);
        self.blackholes |= other.blackholes;
    }

    /// An address read from the kernel is ours.
    pub fn owns_addr(&self, addr: &Addr) -> bool {
        let link_local = match addr.address {
            IpAddr::V4(a) => a.is_link_local(),
            IpAddr::V6(a) => a.is_unicast_link_local(),
        };
        self.links.contains(&addr.link) && !link_local
    }

    /// A neighbour or forwarding entry read from the kernel is ours.
    pub fn owns_entry(&self, link: LinkName, stays: bool) -> bool {
        stays && self.links.contains(&link)
    }

    /// A route read from the kernel (main table, default metric, no TOS) is ours. `link` is the
    /// device that it leaves by, itself or through its nexthop object.
    pub fn owns_route(&self, route: &Route, link: Option<LinkName>, protocol: u8) -> bool {
        let inside = self.networks.iter().any(|network| network.covers(&route.dst));
        if let Some(lens) = self.go_routes {
            let by_gateway =
                matches!(route.via, Via::Gateway { link, .. } if self.routes_on.contains(&link));
            let of_a_lease = lens[route.dst.family()] == Some(route.dst.len());
            return protocol == GO_ROUTE_PROTOCOL && by_gateway && of_a_lease && inside;
        }
        if link.is_some_and(|link| self.links.contains(&link)) {
            return protocol != PROTOCOL_KERNEL;
        }
        let kept = !matches!(route.via, Via::Blackhole | Via::LastResort) || self.blackholes;
        kept && protocol == ROUTE_PROTOCOL && inside
    }

    /// A nexthop object read from the kernel is ours.
    pub fn owns_nexthop(&self, id: u32, link: LinkName, protocol: u8) -> bool {
        protocol == ROUTE_PROTOCOL && (self.owns_id(id) || self.links.contains(&link))
    }

    fn owns_id(&self, id: u32) -> bool {
        self.nexthops.is_some_and(|block| block.contains(id))
    }

    /// An object that another program put, and that [concerns](Self::concerns) us, may be one that
    /// a snapshot shows as ours; `None`: its protocol is not known.
    pub fn may_own(&self, object: &Object, protocol: Option<u8>) -> bool {
        let may_be_ours = protocol.is_none_or(|protocol| protocol == ROUTE_PROTOCOL);
        match object {
            Object::Link(_) => true,
            Object::Nexthop(_) => may_be_ours,
            Object::Route(_) if protocol == Some(ROUTE_PROTOCOL) => true,
            Object::Route(route) => match route.via {
                Via::Gateway { link, .. } | Via::Link(link) => {
                    self.links.contains(&link) || (may_be_ours && self.routes_on.contains(&link))
                }
                // By which device is not known here.
                Via::Nexthop(id) => !self.links.is_empty() || (may_be_ours && self.owns_id(id)),
                Via::Blackhole | Via::LastResort => may_be_ours && self.blackholes,
            },
            Object::Addr(addr) => self.owns_addr(addr),
            object => object.link().is_some_and(|link| self.links.contains(&link)),
        }
    }

    /// A change of the object with this key may concern us, even if it is none that we put there.
    pub fn concerns(&self, key: &Key) -> bool {
        match key {
            Key::Link(link) | Key::Addr(link, _) | Key::Neigh(link, _) | Key::Fdb(link, _) => {
                self.links.contains(link)
            }
            Key::Nexthop(id) => self.owns_id(*id),
            Key::Route(dst) => self.networks.iter().any(|network| network.covers(dst)),
        }
    }
}

/// Why the kernel refused, with its own explanation where it gave one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelError {
    /// The errno, positive.
    pub errno: i32,
    /// The kernel's or the implementation's explanation (netlink "extended ack").
    pub detail: Option<String>,
}

impl KernelError {
    /// An errno without explanation.
    pub const fn new(errno: i32) -> Self {
        Self { errno, detail: None }
    }

    /// An errno with an explanation.
    pub fn explained(errno: i32, detail: impl Into<String>) -> Self {
        Self { errno, detail: Some(detail.into()) }
    }

    /// Says that what was to be deleted is not there (`ENOENT`, `ESRCH`, `ENODEV`, `ENXIO`,
    /// `EADDRNOTAVAIL`).
    pub fn is_absent(&self) -> bool {
        matches!(self.errno, 2 | 3 | 6 | 19 | 99)
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let errno = std::io::Error::from_raw_os_error(self.errno);
        match &self.detail {
            Some(detail) => write!(f, "{detail}: {errno}"),
            None => write!(f, "{errno}"),
        }
    }
}

impl std::error::Error for KernelError {}

/// An error without errno becomes `EIO` with its text as the detail.
impl From<std::io::Error> for KernelError {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::new(errno),
            None => Self::explained(5, error.to_string()),
        }
    }
}

impl From<KernelError> for std::io::Error {
    fn from(error: KernelError) -> Self {
        let kind = Self::from_raw_os_error(error.errno).kind();
        Self::new(kind, error)
    }
}

/// Where the kernel would send a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RouteAnswer {
    /// The device; `None` if packets are dropped or refused (`blackhole`, `unreachable`,
    /// `prohibit`).
    pub link: Option<LinkName>,
    /// The gateway; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The destination is an address of this host.
    pub local: bool,
}

impl RouteAnswer {
    /// An answer that sends packets to `link`, through `gateway` or directly, from `source`.
    pub const fn via(link: LinkName, gateway: Option<IpAddr>, source: Option<IpAddr>) -> Self {
        Self { link: Some(link), gateway, source, local: false }
    }

    /// An answer that sends packets nowhere.
    pub const fn nowhere() -> Self {
        Self { link: None, gateway: None, source: None, local: false }
    }

    /// Packets reach the destination without a router, by this device.
    pub fn on_link(&self) -> Option<LinkName> {
        self.link.filter(|_| self.gateway.is_none() && !self.local)
    }
}

/// A kernel's network tables: one network namespace.
///
/// Every method blocks (rtnetlink does its work inside `send`), so call it from a thread that may
/// block. Methods of one instance never overlap: a snapshot does not see half a batch.
///
/// Implementations: `flannel_netlink::NetlinkKernel`, and `testing::FakeKernel` (feature
/// `testing`). Both pass `testing::kernel_suite`.
///
/// ```
/// use flannel_core::Kernel;
/// use flannel_core::kernel::{KernelError, Footprint};
/// use flannel_core::object::{Addr, Change};
///
/// /// Puts one address in place, and says whether anything had to be done.
/// fn ensure(kernel: &dyn Kernel, footprint: &Footprint, addr: Addr) -> Result<bool, KernelError> {
///     let there = kernel.snapshot(footprint)?;
///     if there.iter().any(|object| *object == addr.into()) {
///         return Ok(false);
///     }
///     kernel.apply(footprint, &[Change::Put(addr.into())]).remove(0)?;
///     Ok(true)
/// }
/// ```
pub trait Kernel: fmt::Debug + Send + Sync {
    /// All objects that `footprint` claims. Objects with attributes that no [`Object`] expresses
    /// are marked ([`State::note_inexact`]).
    ///
    /// # Errors
    /// The kernel could not be read. A dump that changed meanwhile is repeated, unless it cannot
    /// have missed an object that was there all the time. Linux does not report such changes for
    /// IPv6 routes, neighbours and forwarding entries: a snapshot may miss some of them if others
    /// come and go meanwhile; the next snapshot finds them.
    fn snapshot(&self, footprint: &Footprint) -> Result<State, KernelError>;

    /// The ids of all nexthop objects, sorted by whether they were left by `footprint`, belong to
    /// others, or neither is certain: see [`NexthopIds`]. A kernel without nexthop objects has
    /// none, and they are not usable.
    ///
    /// # Errors
    /// The kernel could not be read.
    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError>;

    /// The other users of the nexthop objects in `there`, by ids and as text: a route that is not
    /// in `there` (of another table or metric, with a preferred source, …), or a group. The kernel
    /// deletes it with the object, and sends no message about it.
    ///
    /// # Errors
    /// The kernel could not be read.
    fn nexthop_users(&self, there: &State) -> Result<BTreeMap<u32, String>, KernelError>;

    /// Applies `changes` in order and goes on after a failure; one result for each.
    ///
    /// `Put` creates the object or changes it in place, keeping as much as the kernel can keep. It
    /// replaces a foreign object in its place, except for a foreign link, which fails with
    /// `EEXIST`. After a `Put` an object that a snapshot or an event reported as inexact
    /// ([`State::note_inexact`], [`KernelEvent::Inexact`]) is exact. `Delete` deletes the object
    /// only as described (same device, same gateway), so that a foreign one that took its place
    /// stays; an object that is gone already is a success.
    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Result<(), KernelError>>;

    /// Where a packet for `dst` would go now, all routing tables considered.
    ///
    /// # Errors
    /// The kernel could not be asked. "No route" is not an error but [`RouteAnswer::nowhere`].
    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError>;

    /// Starts listening for changes made by others. Listen first, then take the snapshot.
    ///
    /// # Errors
    /// The kernel refused to let us listen.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;
}

/// A report of objects that may no longer be as we put them. They are valid again after another put
/// or a snapshot, never because of the message itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Invalidation {
    /// Single objects were changed or deleted, in this order, by another program, which the kernel
    /// may name. Of links, forwarding entries, and neighbours that it removes, the kernel names no
    /// author; those may be changes of our own.
    Objects(Vec<KernelEvent>, Option<ChangedBy>),
    /// The device changed in some way: it and everything on it. The kernel deletes IPv4 routes and
    /// permanent neighbours of a device that goes down without a message about each, the
    /// neighbours when its MAC address changes, and the IPv4 routes with its last IPv4 address.
    Link(LinkName),
    /// Messages were lost.
    Everything,
}

/// The content of one message about one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelEvent {
    /// It is there, exactly like this.
    Present(Object),
    /// It is there, like this, with attributes that no [`Object`] expresses
    /// ([`State::note_inexact`]).
    Inexact(Object),
    /// It is there, exactly like this or inexact, beside another entry with the same key. Only a
    /// snapshot shows which of them takes effect.
    Duplicate(Object),
    /// It is there, in a form that no [`Object`] expresses (a multipath route, a dynamic neighbour,
    /// …).
    Unrepresentable(Key),
    /// Another entry for the same destination was changed, such as a route with another metric: it
    /// may decide where packets go.
    Related(Key),
    /// It is gone.
    Deleted(Key),
}

/// A stream of invalidations.
#[async_trait]
pub trait Changes: Send {
    /// Waits for a change by others. Messages that the kernel has sent before this call are
    /// returned at once, without waiting.
    ///
    /// # Errors
    /// The stream is broken for good. Lost messages are no error but [`Invalidation::Everything`].
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    async fn next(&mut self) -> Result<Invalidation, KernelError>;
}
