//! Requests about routes.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::{Route, Via};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{RtScope, RtTable, Rta, Rtm, Rtn};

use super::{
    HEADER, IPV6_METRIC, LAST_RESORT, MAIN, ONLINK, RTA_NH_ID, RTAX_MTU, RouteMessage, scope_of,
};
use crate::codec::{af, put_flags};
use crate::transport::wire::Messages;

/// The offset of the TOS in `struct rtmsg`.
const TOS: usize = 3;

fn header(route: &Route, protocol: u8, scope: RtScope) -> [u8; HEADER] {
    let (kind, flags) = match route.via {
        Via::Blackhole | Via::LastResort => (Rtn::Blackhole, 0),
        Via::Gateway { onlink: true, .. } => (Rtn::Unicast, ONLINK),
        _ => (Rtn::Unicast, 0),
    };
    rtmsg(&route.dst, RtTable::Main, protocol, scope, kind, flags)
}

/// `struct rtmsg` without a source and a TOS.
fn rtmsg(
    dst: &Subnet,
    table: RtTable,
    protocol: u8,
    scope: RtScope,
    kind: Rtn,
    flags: u32,
) -> [u8; HEADER] {
    let [a, b, c, d] = flags.to_ne_bytes();
    let family = af(dst.family()).into();
    [family, dst.len(), 0, 0, table.into(), protocol, scope.into(), kind.into(), a, b, c, d]
}

/// Whether this version supports the kind of path.
pub(crate) fn is_known(route: &Route) -> bool {
    matches!(
        route.via,
        Via::Gateway { .. } | Via::Link(_) | Via::Nexthop(_) | Via::Blackhole | Via::LastResort
    )
}

/// Creates a route, or replaces one to the same destination. `index` is the index of the link, or 0
/// if the route has no link. If `metrics` is true and the route uses a nexthop object, the request
/// has an empty metrics attribute ([`RouteMessage::has_metrics_by_nexthop`]).
pub(crate) fn put(requests: &mut Messages, route: &Route, index: u32, metrics: bool) {
    put_with(put_flags(), requests, route, index, metrics);
}

/// Adds a route. The kernel answers `EEXIST` if there is a route to the destination.
pub(crate) fn add(requests: &mut Messages, route: &Route, index: u32) {
    put_with(NlmF::CREATE | NlmF::EXCL, requests, route, index, false);
}

fn put_with(flags: NlmF, requests: &mut Messages, route: &Route, index: u32, metrics: bool) {
    let scope = scope_of(route.dst.family(), matches!(route.via, Via::Link(_)));
    requests.begin(Rtm::Newroute, flags, &header(route, ROUTE_PROTOCOL, scope));
    path(requests, route, index);
    if route.mtu.is_some() || (metrics && matches!(route.via, Via::Nexthop(_))) {
        requests.nest(Rta::Metrics, |metrics| {
            if let Some(mtu) = route.mtu {
                metrics.u32(RTAX_MTU, mtu.into());
            }
        });
    }
}

/// Deletes a route with this path and this protocol, where 0 is any protocol. The MTU is not
/// compared.
pub(crate) fn delete(requests: &mut Messages, route: &Route, index: u32, protocol: u8) {
    let scope = match route.via {
        Via::Link(_) if route.dst.family() == Family::V4 => RtScope::Link,
        _ => RtScope::Nowhere,
    };
    requests.begin(Rtm::Delroute, NlmF::empty(), &header(route, protocol, scope));
    path(requests, route, index);
}

/// Limits the last request, a deletion, to a route with this MTU. `None` stands for a route without
/// an MTU. IPv6 ignores the limit.
///
/// **Source**: linux `net/ipv4/fib_semantics.c: fib_metrics_match`, where 0 means that the route
/// has no MTU.
pub(crate) fn only_with_mtu(requests: &mut Messages, mtu: Option<u16>) {
    requests.nest(Rta::Metrics, |metrics| {
        metrics.u32(RTAX_MTU, mtu.unwrap_or(0).into());
    });
}

/// Deletes exactly the route that was read. If it is not
/// [distinct](RouteMessage::is_distinct_from) from the route in front of it, the kernel may delete
/// that one instead.
pub(crate) fn delete_found(requests: &mut Messages, found: &RouteMessage) {
    // A route that uses a blackhole nexthop object is reported as a blackhole, whatever type it was
    // created with. So the request names no type.
    let kind = if found.nexthop.is_some() { Rtn::Unspec } else { found.kind };
    let mut header = rtmsg(&found.dst, RtTable::Main, found.protocol, found.scope, kind, 0);
    header[TOS] = found.tos;
    requests.begin(Rtm::Delroute, NlmF::empty(), &header).ip(Rta::Dst, found.dst.base());
    if let Some(id) = found.nexthop {
        requests.u32(RTA_NH_ID, id);
    } else {
        if let Some(gateway) = found.gateway {
            requests.ip(Rta::Gateway, gateway);
        }
        if found.index != 0 {
            requests.u32(Rta::Oif, found.index);
        }
    }
    default_metric(requests, &found.dst);
}

/// Deletes the first route to `dst` of this protocol, where 0 is any protocol. For IPv4 it may have
/// any metric, for IPv6 it has the default metric.
pub(crate) fn delete_any(requests: &mut Messages, dst: &Subnet, protocol: u8) {
    let header = rtmsg(dst, RtTable::Main, protocol, RtScope::Nowhere, Rtn::Unspec, 0);
    requests.begin(Rtm::Delroute, NlmF::empty(), &header).ip(Rta::Dst, dst.base());
    default_metric(requests, dst);
}

/// Limits a deletion to the default metric, which is possible for IPv6 only. The default metric of
/// IPv4 is 0, and in a deletion 0 matches any metric.
fn default_metric(requests: &mut Messages, dst: &Subnet) {
    if dst.family() == Family::V6 {
        requests.u32(Rta::Priority, IPV6_METRIC);
    }
}

/// Adds the destination, the path and the metric.
fn path(requests: &mut Messages, route: &Route, index: u32) {
    requests.ip(Rta::Dst, route.dst.base());
    match route.via {
        Via::Gateway { gateway, .. } => {
            requests.ip(Rta::Gateway, gateway).u32(Rta::Oif, index);
        }
        Via::Link(_) => _ = requests.u32(Rta::Oif, index),
        Via::Nexthop(id) => _ = requests.u32(RTA_NH_ID, id),
        // A blackhole has no path.
        _ => {}
    }
    if route.via == Via::LastResort {
        requests.u32(Rta::Priority, LAST_RESORT);
    } else {
        default_metric(requests, &route.dst);
    }
}

/// Requests all routes of a family in the main table.
pub(crate) fn all(family: Family) -> Messages {
    in_table(family, MAIN)
}

/// Requests all routes of a family in all tables.
pub(crate) fn everywhere(family: Family) -> Messages {
    in_table(family, 0)
}

/// Requests all routes of a family in one table. The table 0 stands for all tables.
pub(crate) fn in_table(family: Family, table: u32) -> Messages {
    let dst = Subnet::everything(family);
    let header = rtmsg(&dst, RtTable::Main, 0, RtScope::Universe, Rtn::Unspec, 0);
    let mut request = Messages::one(Rtm::Getroute, NlmF::empty(), &header);
    request.u32(Rta::Table, table);
    request
}

/// Requests the route that the kernel would choose for a packet to `dst`.
pub(crate) fn lookup(dst: IpAddr) -> Messages {
    let header = rtmsg(&Subnet::host(dst), RtTable::Unspec, 0, RtScope::Universe, Rtn::Unspec, 0);
    let mut request = Messages::one(Rtm::Getroute, NlmF::empty(), &header);
    request.ip(Rta::Dst, dst);
    request
}
