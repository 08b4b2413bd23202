//! Routes. The one thing to know: a message may say more than [`Route`] expresses. With a second path it is read as no
//! route; with a source address or a metric it is, but not as an exact one, so that it is put again if it is wanted, and
//! goes if not.

use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::{LinkName, Route, Via};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{RtScope, RtTable, Rta, Rtm, RtmF, Rtn};
use neli::rtnl::Rtmsg;

use super::{af, family_of, put_flags};
use crate::wire::{Attributes, Message, Messages, ip_of, u32_of};

/// `RTNH_F_ONLINK`: the gateway is on the link, whatever the routing table says.
pub(crate) const ONLINK: u32 = 4;
/// `RTAX_MTU` inside `RTA_METRICS`.
const RTAX_MTU: u16 = 2;
const RTA_VIA: u16 = 18;
const RTA_PREF: u16 = 20;
const RTA_NH_ID: u16 = 30;
/// The metric that IPv6 routes get if none is asked for.
const IPV6_METRIC: u32 = 1024;
/// The metric of a route of last resort.
const LAST_RESORT: u32 = u32::MAX;
const MAIN: u32 = 254;

/// What a message says of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RouteMessage {
    pub(crate) dst: Subnet,
    /// In the main table.
    pub(crate) main: bool,
    /// Default metric, for all sources, and no TOS, so that a route of ours with this destination is the same entry; or of last resort.
    pub(crate) default_metric: bool,
    /// A blackhole that stands behind all others.
    pub(crate) last_resort: bool,
    pub(crate) protocol: u8,
    pub(crate) kind: Rtn,
    /// The interface index; 0 if there is none.
    pub(crate) index: u32,
    pub(crate) gateway: Option<IpAddr>,
    pub(crate) source: Option<IpAddr>,
    /// It has more than one path.
    pub(crate) multipath: bool,
    /// The id of its nexthop object. A kernel may tell the gateway too, or the paths of a group: they count for nothing
    /// then.
    pub(crate) nexthop: Option<u32>,
    scope: RtScope,
    onlink: bool,
    mtu: Option<u32>,
    /// It is another entry, or leads elsewhere, than any [`Route`].
    alien: bool,
    /// It has more than [`Route`] expresses, and without that would be the same entry.
    more: bool,
}

/// Reads `RTM_NEWROUTE` and `RTM_DELROUTE`; `None` for cached routes and other families.
pub(crate) fn read(message: &Message<'_>) -> Option<RouteMessage> {
    if message.kind != u16::from(Rtm::Newroute) && message.kind != u16::from(Rtm::Delroute) {
        return None;
    }
    let (header, attributes) = message.split::<Rtmsg>()?;
    let family = family_of(*header.rtm_family())?;
    let len = *header.rtm_dst_len();
    let mut read = RouteMessage {
        dst: Subnet::new(family.unspecified(), len)?,
        main: *header.rtm_table() == RtTable::Main,
        default_metric: true,
        last_resort: false,
        protocol: (*header.rtm_protocol()).into(),
        kind: *header.rtm_type(),
        index: 0,
        gateway: None,
        source: None,
        multipath: false,
        nexthop: None,
        scope: *header.rtm_scope(),
        onlink: header.rtm_flags().bits() & ONLINK != 0,
        mtu: None,
        alien: header.rtm_flags().contains(RtmF::CLONED),
        more: false,
    };
    let mut metric = 0;
    for (id, value) in attributes {
        match id {
            RTA_NH_ID => read.nexthop = Some(u32_of(value)?),
            // The router preference of IPv6 routes; 0 is medium.
            RTA_PREF => read.more |= value.first().is_some_and(|pref| *pref != 0),
            // A gateway of the other family: the family (2 bytes), then the address.
            RTA_VIA => {
                read.gateway = value.get(2..).and_then(ip_of);
                read.alien = true;
            }
            _ => match Rta::from(id) {
                Rta::Dst => read.dst = Subnet::new(ip_of(value)?, len)?,
                Rta::Oif => read.index = u32_of(value)?,
                Rta::Gateway => read.gateway = ip_of(value),
                Rta::Prefsrc => {
                    read.source = ip_of(value);
                    read.more = true;
                }
                Rta::Priority => metric = u32_of(value)?,
                Rta::Table => read.main = u32_of(value)? == MAIN,
                Rta::Multipath => read.multipath = true,
                Rta::Metrics => {
                    for (metric, value) in Attributes(value) {
                        if metric == RTAX_MTU { read.mtu = u32_of(value) } else { read.more = true }
                    }
                }
                // `rta_expires` of `struct rta_cacheinfo`: the kernel deletes it by itself.
                Rta::Cacheinfo => {
                    read.more |= value.get(8..).and_then(u32_of).is_some_and(|time| time != 0);
                }
                _ => read.more = true,
            },
        }
    }
    read.last_resort = read.kind == Rtn::Blackhole && metric == LAST_RESORT;
    let is_default = metric == default_metric(family) || read.last_resort;
    read.default_metric = is_default && *header.rtm_tos() == 0 && *header.rtm_src_len() == 0;
    Some(read)
}

/// Whoever is on the link itself is nearer than who is behind a gateway. IPv6 knows no scopes of routes.
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
    /// The scope that a route of ours has that leads there.
    fn usual_scope(&self) -> RtScope {
        let to_link = self.kind == Rtn::Unicast && self.gateway.is_none() && self.nexthop.is_none();
        scope_of(self.dst.family(), to_link)
    }

    /// The kernel takes two IPv4 routes by one nexthop object for one, so that such a one stays as it is when ours is put, unless that
    /// says something of metrics: if only that it has none. Then the kernel makes room for them with each route, which takes a
    /// fifth of the time.
    ///
    /// **Source**: linux `net/ipv4/fib_semantics.c: fib_create_info` (`fib_find_info_nh`).
    pub(crate) fn has_metrics_by_nexthop(&self) -> bool {
        self.nexthop.is_some() && (self.mtu.is_some() || self.more)
    }

    /// [`RouteMessage::object`] expresses all of it.
    pub(crate) fn is_exact(&self) -> bool {
        !self.more && self.scope == self.usual_scope()
    }

    /// What says which route is to be deleted says this one, which leads by `way`, and not the one before it, which leads by `first`. Of IPv4
    /// routes the kernel compares all that says where they lead, but for `onlink`; of IPv6 routes no kind, and no lack of a gateway or a
    /// nexthop object.
    ///
    /// **Source**: linux `net/ipv4/fib_trie.c: fib_table_delete`, `net/ipv6/route.c: ip6_route_del`.
    pub(crate) fn can_be_told_from(&self, way: &Via, first: &Via) -> bool {
        let bare = |via: &Via| match *via {
            Via::Gateway { gateway, link, .. } => Via::Gateway { gateway, link, onlink: false },
            via => via,
        };
        match self.dst.family() {
            Family::V4 => bare(way) != bare(first),
            Family::V6 => {
                self.nexthop.is_some()
                    || (self.gateway.is_some() && !matches!(first, Via::Nexthop(_)))
            }
        }
    }

    /// What says which IPv6 route is to be deleted says this one, and not `behind`, which stands behind it. To be put, that one
    /// replaces itself: the kernel looks for its like, with a gateway or without, before it takes what is first.
    ///
    /// **Source**: linux `net/ipv6/ip6_fib.c: fib6_add_rt2node`.
    pub(crate) fn stands_in_the_way_of(&self, behind: &Self) -> bool {
        let is_told =
            self.nexthop.is_some() || self.gateway.is_some() || self.index != behind.index;
        self.dst.family() == Family::V6 && is_told
    }

    /// The route, if it is in the main table with the default metric, as far as [`Route`] expresses it; `name` finds
    /// the name of a link.
    pub(crate) fn object(&self, name: impl FnOnce(u32) -> Option<LinkName>) -> Option<Route> {
        let several = self.multipath && self.nexthop.is_none();
        if self.alien || several || !self.main || !self.default_metric {
            return None;
        }
        let via = match (self.kind, self.nexthop, self.gateway) {
            (Rtn::Blackhole, None, None) if self.last_resort => Via::LastResort,
            (Rtn::Blackhole, None, None) => Via::Blackhole,
            // Of a nexthop object that leads nowhere the kernel says that the route does.
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

/// Written the way `ip` writes it, as far as it helps to find the route.
impl fmt::Display for RouteMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "route {}", self.dst)?;
        self.nexthop.map_or(Ok(()), |id| write!(f, " nhid {id}"))?;
        write!(f, " proto {}", self.protocol)?;
        self.source.map_or(Ok(()), |source| write!(f, " src {source}"))?;
        match (self.main, self.default_metric) {
            (false, _) => f.write_str(" of another table"),
            (true, false) => f.write_str(" with a metric or TOS of its own"),
            (true, true) => Ok(()),
        }
    }
}

fn header(dst: &Subnet, via: Option<&Via>, protocol: u8, scope: RtScope) -> [u8; 12] {
    let kind = match via {
        Some(Via::Blackhole | Via::LastResort) => Rtn::Blackhole,
        Some(_) => Rtn::Unicast,
        None => Rtn::Unspec,
    };
    let onlink = matches!(via, Some(Via::Gateway { onlink: true, .. }));
    rtmsg(dst, RtTable::Main, protocol, scope, kind, if onlink { ONLINK } else { 0 })
}

/// `struct rtmsg`, without a source and a TOS; written directly as in [`neigh`](super::neigh).
fn rtmsg(
    dst: &Subnet,
    table: RtTable,
    protocol: u8,
    scope: RtScope,
    kind: Rtn,
    flags: u32,
) -> [u8; 12] {
    let [a, b, c, d] = flags.to_ne_bytes();
    let family = af(dst.family()).into();
    [family, dst.len(), 0, 0, table.into(), protocol, scope.into(), kind.into(), a, b, c, d]
}

/// This version knows what the route does.
pub(crate) fn is_known(route: &Route) -> bool {
    matches!(
        route.via,
        Via::Gateway { .. } | Via::Link(_) | Via::Nexthop(_) | Via::Blackhole | Via::LastResort
    )
}

/// `link`'s index is `index`; 0 for a route that has none. For `metrics` see [`RouteMessage::has_metrics_by_nexthop`].
pub(crate) fn put(requests: &mut Messages, route: &Route, index: u32, metrics: bool) {
    put_with(put_flags(), requests, route, index, metrics);
}

/// Puts it unless there is one.
pub(crate) fn add(requests: &mut Messages, route: &Route, index: u32) {
    put_with(NlmF::CREATE | NlmF::EXCL, requests, route, index, false);
}

fn put_with(flags: NlmF, requests: &mut Messages, route: &Route, index: u32, metrics: bool) {
    let scope = scope_of(route.dst.family(), matches!(route.via, Via::Link(_)));
    requests.begin(
        Rtm::Newroute,
        flags,
        &header(&route.dst, Some(&route.via), ROUTE_PROTOCOL, scope),
    );
    path(requests, route, index);
    if route.mtu.is_some() || (metrics && matches!(route.via, Via::Nexthop(_))) {
        requests.nest(Rta::Metrics, |metrics| {
            if let Some(mtu) = route.mtu {
                metrics.u32(RTAX_MTU, mtu);
            }
        });
    }
}

/// `protocol` limits the deletion to routes of it; 0 is any.
pub(crate) fn delete(requests: &mut Messages, route: &Route, index: u32, protocol: u8) {
    let scope = match route.via {
        Via::Link(_) if route.dst.family() == Family::V4 => RtScope::Link,
        _ => RtScope::Nowhere,
    };
    requests.begin(
        Rtm::Delroute,
        NlmF::empty(),
        &header(&route.dst, Some(&route.via), protocol, scope),
    );
    path(requests, route, index);
}

/// Adds to a deletion that the route must have this MTU. IPv6 does not heed it.
///
/// **Source**: linux `net/ipv4/fib_semantics.c: fib_metrics_match`: what a route does not say is 0.
pub(crate) fn only_with_mtu(requests: &mut Messages, mtu: Option<u32>) {
    requests.nest(Rta::Metrics, |metrics| {
        metrics.u32(RTAX_MTU, mtu.unwrap_or(0));
    });
}

/// Deletes the route that the message told of, which [can be told](RouteMessage::can_be_told_from) from others to the same destination.
pub(crate) fn delete_told(requests: &mut Messages, told: &RouteMessage) {
    // Of a nexthop object that leads nowhere the kernel says that the route does.
    let kind = if told.nexthop.is_some() { Rtn::Unspec } else { told.kind };
    let header = rtmsg(&told.dst, RtTable::Main, told.protocol, told.scope, kind, 0);
    requests.begin(Rtm::Delroute, NlmF::empty(), &header).ip(Rta::Dst, told.dst.base());
    if let Some(id) = told.nexthop {
        requests.u32(RTA_NH_ID, id);
    } else {
        if let Some(gateway) = told.gateway {
            requests.ip(Rta::Gateway, gateway);
        }
        if told.index != 0 {
            requests.u32(Rta::Oif, told.index);
        }
    }
    if told.dst.family() == Family::V6 {
        requests.u32(Rta::Priority, IPV6_METRIC);
    }
}

/// Deletes the first route to `dst`, whatever it is; an IPv6 route only with the default metric. `protocol` as for [`delete`].
pub(crate) fn delete_any(requests: &mut Messages, dst: &Subnet, protocol: u8) {
    requests.begin(Rtm::Delroute, NlmF::empty(), &header(dst, None, protocol, RtScope::Nowhere));
    requests.ip(Rta::Dst, dst.base());
    if dst.family() == Family::V6 {
        requests.u32(Rta::Priority, IPV6_METRIC);
    }
}

fn path(requests: &mut Messages, route: &Route, index: u32) {
    requests.ip(Rta::Dst, route.dst.base());
    match route.via {
        Via::Gateway { gateway, .. } => {
            requests.ip(Rta::Gateway, gateway).u32(Rta::Oif, index);
        }
        Via::Link(_) => drop(requests.u32(Rta::Oif, index)),
        Via::Nexthop(id) => drop(requests.u32(RTA_NH_ID, id)),
        // Blackholes; a kind that is not known here does not come here.
        _ => {}
    }
    match (route.via, route.dst.family()) {
        (Via::LastResort, _) => drop(requests.u32(Rta::Priority, LAST_RESORT)),
        (_, Family::V6) => drop(requests.u32(Rta::Priority, IPV6_METRIC)),
        (_, Family::V4) => {}
    }
}

/// Asks for all routes of a family in the main table.
pub(crate) fn all(family: Family) -> Messages {
    in_table(family, MAIN)
}

/// Asks for all routes of a family in whatever table.
pub(crate) fn everywhere(family: Family) -> Messages {
    in_table(family, 0)
}

fn in_table(family: Family, table: u32) -> Messages {
    let header = header(&Subnet::everything(family), None, 0, RtScope::Universe);
    let mut request = Messages::one(Rtm::Getroute, NlmF::empty(), &header);
    request.u32(Rta::Table, table);
    request
}

/// Asks where packets for `dst` go.
pub(crate) fn lookup(dst: IpAddr) -> Messages {
    let header = rtmsg(&Subnet::host(dst), RtTable::Unspec, 0, RtScope::Universe, Rtn::Unspec, 0);
    let mut request = Messages::one(Rtm::Getroute, NlmF::empty(), &header);
    request.ip(Rta::Dst, dst);
    request
}
