//! Routes.
//!
//! A message may have more attributes than [`Route`] represents. A route with several paths
//! (multipath) is unrepresentable. A route with a source address or with metrics other than the MTU
//! is inexact: the route engine puts it again if it is desired, and deletes it otherwise.

mod hops;
mod request;

use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelEvent;
use flannel_core::object::{Key, LinkName, Object, Route, Via};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{RtScope, Rta, Rtm, Rtn, Rtprot};

pub(crate) use self::hops::{Hop, UNUSABLE, hops};
pub(crate) use self::request::{
    add, all, delete, delete_any, delete_found, everywhere, in_table, is_known, lookup,
    only_with_mtu, put,
};
use super::nexthop::ONLINK;
use super::{EventMessage, event, family_of};
use crate::transport::wire::{Attributes, Message, ip_of, u32_of};

/// Bytes of `struct rtmsg`.
const HEADER: usize = 12;
/// `RTM_F_CLONED`: not an entry of a table, but the answer to a query or a cached route.
const CLONED: u32 = 0x200;
/// `RTAX_MTU` inside `RTA_METRICS`.
const RTAX_MTU: u16 = 2;
const RTA_VIA: u16 = 18;
const RTA_PREF: u16 = 20;
const RTA_NH_ID: u16 = 30;
/// The default metric of IPv6 routes.
const IPV6_METRIC: u32 = 1024;
/// The metric of a last-resort route, the largest one.
const LAST_RESORT: u32 = u32::MAX;
/// `RT_TABLE_MAIN`.
const MAIN: u32 = 254;

/// The content of a message about a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RouteMessage {
    pub(crate) dst: Subnet,
    /// Whether it is in the main table.
    pub(crate) main: bool,
    /// It has no source prefix, no TOS, and the metric that our routes have: the default metric, or
    /// the largest metric for a last-resort route. Other routes are never the same kernel entry as
    /// a route of ours.
    pub(crate) default_metric: bool,
    /// The TOS (`tos` of `ip route`), which only IPv4 routes have. Packets with this TOS take the
    /// route before those without a TOS, whatever the metrics are.
    pub(crate) tos: u8,
    /// The source prefix (`from` of `ip route`), which only IPv6 routes have.
    pub(crate) from: Option<Subnet>,
    /// The metric (`metric` of `ip route`).
    pub(crate) metric: u32,
    /// A blackhole with the largest metric. The kernel prefers every other route to the
    /// destination.
    pub(crate) last_resort: bool,
    /// The route protocol of the program that created it.
    pub(crate) protocol: u8,
    /// The route type.
    pub(crate) kind: Rtn,
    /// The index of the link, or 0 if it has no link.
    pub(crate) index: u32,
    pub(crate) gateway: Option<IpAddr>,
    /// The preferred source address (`src` of `ip route`).
    pub(crate) source: Option<IpAddr>,
    /// It has several paths.
    pub(crate) multipath: bool,
    /// The id of the nexthop object that it uses, or `None` if it does not use one. The kernel also
    /// reports the gateway or the paths of that object. They are ignored.
    pub(crate) nexthop: Option<u32>,
    scope: RtScope,
    onlink: bool,
    /// The MTU in bytes, or `None` if the route does not set one.
    mtu: Option<u16>,
    /// No [`Route`] can represent it.
    unrepresentable: bool,
    /// It has attributes that [`Route`] does not represent and that are not part of the identity.
    more: bool,
}

/// Reads `RTM_NEWROUTE` and `RTM_DELROUTE`. `None` for other types of messages and other address
/// families, and if the message is malformed.
pub(crate) fn read(message: &Message<'_>) -> Option<RouteMessage> {
    if message.kind != u16::from(Rtm::Newroute) && message.kind != u16::from(Rtm::Delroute) {
        return None;
    }
    let (header, attributes) = message.split::<HEADER>()?;
    let &[_, len, src_len, ..] = header;
    let mut read = RouteMessage::of_header(header)?;
    let mut other_family = false;
    for (id, value) in attributes {
        match id {
            RTA_NH_ID => read.nexthop = Some(u32_of(value)?),
            // The router preference of an IPv6 route. 0 is medium.
            RTA_PREF => read.more |= value.first().is_some_and(|pref| *pref != 0),
            // A gateway of the other family: two bytes for its family, then its address.
            RTA_VIA => {
                read.gateway = value.get(2..).and_then(ip_of);
                other_family = true;
            }
            _ => match Rta::from(id) {
                Rta::Dst => read.dst = Subnet::new(ip_of(value)?, len)?,
                Rta::Src => read.from = Subnet::new(ip_of(value)?, src_len),
                Rta::Oif => read.index = u32_of(value)?,
                Rta::Gateway => read.gateway = ip_of(value),
                Rta::Prefsrc => {
                    read.source = ip_of(value);
                    read.more = true;
                }
                Rta::Priority => read.metric = u32_of(value)?,
                Rta::Table => read.main = u32_of(value)? == MAIN,
                Rta::Multipath => read.multipath = true,
                Rta::Metrics => read.take_metrics(Attributes(value)),
                // `rta_expires` of `struct rta_cacheinfo`.
                Rta::Cacheinfo => {
                    read.more |= value.get(8..).and_then(u32_of).is_some_and(|time| time != 0);
                }
                _ => read.more = true,
            },
        }
    }
    read.unrepresentable |= other_family && read.nexthop.is_none();
    read.last_resort = read.kind == Rtn::Blackhole && read.metric == LAST_RESORT;
    let is_default = read.metric == default_metric(read.dst.family()) || read.last_resort;
    read.default_metric = is_default && read.tos == 0 && src_len == 0;
    Some(read)
}

/// The scope of a route of ours. For IPv4 it is `link` if the destination is on the link
/// (`to_link`). IPv6 routes have no scopes.
fn scope_of(family: Family, to_link: bool) -> RtScope {
    if to_link && family == Family::V4 { RtScope::Link } else { RtScope::Universe }
}

const fn default_metric(family: Family) -> u32 {
    match family {
        Family::V4 => 0,
        Family::V6 => IPV6_METRIC,
    }
}

impl RouteMessage {
    /// Reads `struct rtmsg`. `None` for other address families.
    fn of_header(header: &[u8; HEADER]) -> Option<Self> {
        let &[family, len, _, tos, table, protocol, scope, kind, flags @ ..] = header;
        let flags = u32::from_ne_bytes(flags);
        Some(Self {
            dst: Subnet::new(family_of(family.into())?.unspecified(), len)?,
            main: u32::from(table) == MAIN,
            default_metric: true,
            tos,
            from: None,
            metric: 0,
            last_resort: false,
            protocol,
            kind: kind.into(),
            index: 0,
            gateway: None,
            source: None,
            multipath: false,
            nexthop: None,
            scope: scope.into(),
            onlink: flags & ONLINK != 0,
            mtu: None,
            unrepresentable: flags & CLONED != 0,
            more: false,
        })
    }

    /// Reads the metrics of `RTA_METRICS`. Only the MTU can be represented.
    fn take_metrics(&mut self, metrics: Attributes<'_>) {
        for (metric, value) in metrics {
            match u32_of(value).map(u16::try_from) {
                Some(Ok(mtu)) if metric == RTAX_MTU => self.mtu = Some(mtu),
                _ => self.more = true,
            }
        }
    }

    /// The scope that a route of ours with the same destination and path has.
    fn usual_scope(&self) -> RtScope {
        let to_link = self.kind == Rtn::Unicast && self.gateway.is_none() && self.nexthop.is_none();
        scope_of(self.dst.family(), to_link)
    }

    /// Whether it uses a nexthop object and has metrics, which a route of ours could inherit.
    ///
    /// If a request has no metrics, the kernel reuses a `fib_info` with the same nexthop id,
    /// protocol, scope, source, priority, type and table, even if that `fib_info` has metrics. An
    /// empty metrics attribute in the request prevents the reuse. Then the kernel allocates a
    /// `fib_info` for each route, which takes a fifth more time.
    ///
    /// **Source**: linux `net/ipv4/fib_semantics.c: fib_create_info` (`fib_find_info_nh`).
    pub(crate) fn has_metrics_by_nexthop(&self) -> bool {
        self.nexthop.is_some() && (self.mtu.is_some() || self.more)
    }

    /// Whether it is the kernel entry that a route of ours would have, except for a TOS.
    fn is_like_ours(&self) -> bool {
        self.main && (self.default_metric || self.tos != 0)
    }

    /// Whether [`RouteMessage::object`] represents all attributes.
    pub(crate) fn is_exact(&self) -> bool {
        !self.more && self.scope == self.usual_scope()
    }

    /// Whether a request can delete this route and leave the route in front of it, to the same
    /// destination. `own` is the path of this route, `first` is the path of the route in front.
    ///
    /// For IPv4 the kernel compares the whole path except `onlink`. For IPv6 it does not compare
    /// the type. A request without a gateway matches a route via any gateway. A request without a
    /// nexthop id matches a route that uses any nexthop object.
    ///
    /// **Source**: linux `net/ipv4/fib_trie.c: fib_table_delete`, `net/ipv6/route.c:
    /// ip6_route_del`.
    pub(crate) fn is_distinct_from(&self, own: &Via, first: &Via) -> bool {
        let without_onlink = |via: &Via| match *via {
            Via::Gateway { gateway, link, .. } => Via::Gateway { gateway, link, onlink: false },
            via => via,
        };
        match self.dst.family() {
            Family::V4 => without_onlink(own) != without_onlink(first),
            Family::V6 => {
                self.nexthop.is_some()
                    || (self.gateway.is_some() && !matches!(first, Via::Nexthop(_)))
            }
        }
    }

    /// Whether the request that deletes this IPv6 route cannot match `behind`, even if this route
    /// is gone by then.
    ///
    /// The kernel does not compare a gateway, a nexthop id or a protocol that the request leaves
    /// out. If `behind` uses a nexthop object, the kernel compares only the id and the protocol.
    ///
    /// **Source**: linux `net/ipv6/route.c: ip6_route_del`.
    pub(crate) fn deletion_spares(&self, behind: &Self) -> bool {
        let other_path = self.gateway.is_some() || (self.index != 0 && self.index != behind.index);
        self.nexthop.is_some()
            || (other_path && behind.nexthop.is_none())
            || (self.protocol != behind.protocol && self.protocol != 0)
    }

    /// The route, as far as [`Route`] represents it. `None` if it is unrepresentable, in another
    /// table or of another metric, or if its link has no known name. `name` returns the name of the
    /// link with an index.
    pub(crate) fn object(&self, name: impl FnOnce(u32) -> Option<LinkName>) -> Option<Route> {
        if self.default_metric { self.with_any_metric(name) } else { None }
    }

    /// Like [`RouteMessage::object`], but also returns a route that has a TOS or another metric.
    /// The result lacks both.
    pub(crate) fn with_any_metric(
        &self,
        name: impl FnOnce(u32) -> Option<LinkName>,
    ) -> Option<Route> {
        let has_several_paths = self.multipath && self.nexthop.is_none();
        if self.unrepresentable || has_several_paths || !self.main {
            return None;
        }
        let via = match (self.kind, self.nexthop, self.gateway) {
            (Rtn::Blackhole, None, None) if self.last_resort => Via::LastResort,
            (Rtn::Blackhole, None, None) => Via::Blackhole,
            // The kernel reports the type blackhole if the nexthop object is a blackhole.
            (Rtn::Unicast | Rtn::Blackhole, Some(id), _) => Via::Nexthop(id),
            (Rtn::Unicast, None, Some(gateway)) if Family::of(gateway) == self.dst.family() => {
                Via::Gateway { gateway, link: name(self.index)?, onlink: self.onlink }
            }
            (Rtn::Unicast, None, None) if self.scope == self.usual_scope() => {
                Via::Link(name(self.index)?)
            }
            _ => return None,
        };
        Some(Route { dst: self.dst, via, mtu: self.mtu })
    }
}

impl EventMessage for RouteMessage {
    fn event_index(&self, is_deletion: bool) -> u32 {
        if is_deletion || !self.is_like_ours() { 0 } else { self.index }
    }

    fn event(&self, link: Option<LinkName>, is_deletion: bool, flags: NlmF) -> Option<KernelEvent> {
        let key = Key::Route(self.dst);
        // It is not the entry of our route, but packets may take it instead.
        if !self.is_like_ours() {
            return Some(KernelEvent::Related(key));
        }
        // Routes that the kernel creates for local addresses (`proto kernel`, with a source) are
        // reported as unrepresentable, so that no program tries to delete them.
        let is_reportable = self.is_exact() || self.protocol != u8::from(Rtprot::Kernel);
        let object = self.with_any_metric(|_| link).filter(|_| is_reportable).map(Object::Route);
        if self.tos != 0 {
            return Some(match object {
                Some(object) if !is_deletion => KernelEvent::Duplicate(object),
                _ => KernelEvent::Related(key),
            });
        }
        // `EXCL` marks the first route of the destination, TOS and metric. `REPLACE` marks a route
        // that replaced another. A new route with neither was added to existing routes. Without
        // `APPEND`, an IPv4 route is in front of them, as if it had replaced the first one (linux
        // `fib_table_insert`).
        let is_first = NlmF::EXCL | NlmF::REPLACE;
        let is_behind = self.dst.family() == Family::V6 || flags.contains(NlmF::APPEND);
        let is_added = flags.contains(NlmF::CREATE) && !flags.intersects(is_first) && is_behind;
        Some(match event(key, object, self.is_exact(), is_deletion) {
            KernelEvent::Present(object) | KernelEvent::Inexact(object) if is_added => {
                KernelEvent::Duplicate(object)
            }
            event => event,
        })
    }

    fn protocol(&self) -> Option<u8> {
        Some(self.protocol)
    }
}

/// The format of `ip route`, with only the attributes that identify the route.
impl fmt::Display for RouteMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "route {}", self.dst)?;
        if let Some(id) = self.nexthop {
            write!(f, " nhid {id}")?;
        }
        write!(f, " proto {}", self.protocol)?;
        if let Some(source) = self.source {
            write!(f, " src {source}")?;
        }
        if !self.main {
            f.write_str(" of another table")
        } else if !self.default_metric {
            f.write_str(" with a metric or TOS of its own")
        } else {
            Ok(())
        }
    }
}
