//! Routes of other programs to the destinations of our routes, for a diagnosis.

use std::collections::BTreeMap;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::{KernelError, ROUTE_PROTOCOL};
use neli::consts::rtnl::Rtn;

use super::NetlinkKernel;
use super::query::name_of;
use crate::codec::route;
use crate::codec::route::RouteMessage;
use crate::transport::socket::Socket;

/// A route of another program in the main table, to the destination of one of our routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shadow {
    /// The destination.
    pub dst: Subnet,
    /// The route as arguments of `ip route del`:
    /// `10.1.7.0/24 tos 0x04 via 192.0.2.9 dev eth0 proto 4`.
    pub route: String,
    /// The route protocol of the program that added it.
    pub protocol: u8,
    /// The packets that take it.
    pub takes: Taken,
}

/// The packets that take a route of another program instead of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// All packets. It has a smaller metric, or is the first route with the same metric.
    All,
    /// Packets with this TOS.
    WithTos(u8),
    /// Packets from this source prefix.
    From(Subnet),
    /// No packets while our route exists, because the route is behind ours.
    None,
}

impl NetlinkKernel {
    /// Reads the routes of other programs to the destinations of routes of
    /// [our protocol](ROUTE_PROTOCOL) inside `networks`. Routes behind ours with a larger metric
    /// are not included.
    ///
    /// # Blocking
    /// Reads the main table: about 1 µs for each route.
    pub fn shadows(&self, networks: &[Subnet]) -> Result<Vec<Shadow>, KernelError> {
        let mut socket = self.lock();
        let mut shadows = Vec::new();
        for family in Family::BOTH {
            if !networks.iter().any(|network| network.family() == family) {
                continue;
            }
            let inside = socket.dump(route::all(family), |message| {
                let found = route::read(message).filter(|found| found.main)?;
                networks.iter().any(|network| network.covers(&found.dst)).then_some(found)
            })?;
            for (found, takes) in shadows_among(&inside) {
                let route = arguments(&mut socket, found)?;
                shadows.push(Shadow { dst: found.dst, route, protocol: found.protocol, takes });
            }
        }
        Ok(shadows)
    }
}

/// The routes of other programs among `routes`, which are in the order of the kernel.
fn shadows_among(routes: &[RouteMessage]) -> Vec<(&RouteMessage, Taken)> {
    let is_ours = |route: &RouteMessage| route.protocol == ROUTE_PROTOCOL && route.default_metric;
    // The position of our first route to each destination.
    let mut ours = BTreeMap::new();
    for (n, route) in routes.iter().enumerate() {
        // A last-resort route is behind all others by design.
        if is_ours(route) && !route.last_resort {
            ours.entry(route.dst).or_insert(n);
        }
    }
    let mut shadows = Vec::new();
    for (n, route) in routes.iter().enumerate() {
        if is_ours(route) {
            continue;
        }
        if let Some(our) = ours.get(&route.dst)
            && let Some(takes) = takes(route, n < *our, routes[*our].metric)
        {
            shadows.push((route, takes));
        }
    }
    shadows
}

/// The packets that take `route`, which is before our route or behind it. `None` if it has a larger
/// metric than ours.
fn takes(route: &RouteMessage, is_before: bool, our_metric: u32) -> Option<Taken> {
    match (route.tos, route.from) {
        (0, None) if route.metric > our_metric => None,
        (0, None) if route.metric < our_metric || is_before => Some(Taken::All),
        (0, None) => Some(Taken::None),
        (0, Some(from)) => Some(Taken::From(from)),
        (tos, _) => Some(Taken::WithTos(tos)),
    }
}

/// The arguments of `ip route del` that name the route. The paths of a multipath route are left
/// out: the kernel then compares the rest.
fn arguments(socket: &mut Socket, found: &RouteMessage) -> Result<String, KernelError> {
    let mut text = match found.kind {
        Rtn::Blackhole if found.nexthop.is_none() => "blackhole ".to_owned(),
        Rtn::Unreachable => "unreachable ".to_owned(),
        Rtn::Prohibit => "prohibit ".to_owned(),
        Rtn::Throw => "throw ".to_owned(),
        Rtn::Local => "local ".to_owned(),
        _ => String::new(),
    };
    text += &found.dst.to_string();
    if let Some(from) = found.from {
        text += &format!(" from {from}");
    }
    if found.tos != 0 {
        text += &format!(" tos {:#04x}", found.tos);
    }
    match (found.nexthop, found.gateway) {
        (Some(id), _) => text += &format!(" nhid {id}"),
        (None, Some(gateway)) if Family::of(gateway) != found.dst.family() => {
            text += &format!(" via inet6 {gateway}");
        }
        (None, Some(gateway)) => text += &format!(" via {gateway}"),
        (None, None) => {}
    }
    if found.nexthop.is_none()
        && found.index != 0
        && let Some(name) = name_of(socket, found.index)?
    {
        text += &format!(" dev {name}");
    }
    text += &format!(" proto {}", found.protocol);
    if found.metric != 0 {
        text += &format!(" metric {}", found.metric);
    }
    Ok(text)
}
