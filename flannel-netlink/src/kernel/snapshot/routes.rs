//! Owned routes, and foreign routes to the same destinations.

use std::collections::BTreeSet;

use flannel_core::address::Family;
use flannel_core::kernel::{KernelError, ROUTE_PROTOCOL};
use flannel_core::object::{Key, LinkName, Route, Via};

use super::{Reader, Table};
use crate::codec::route;
use crate::codec::route::RouteMessage;
use crate::kernel::foreign_routes::DuplicateRoute;

impl Reader<'_> {
    pub(super) fn read_routes(&mut self, family: Family) -> Result<(), KernelError> {
        let mut ours = self.dump_routes(family)?;
        // For routes on a former external interface its name is needed. So the name is looked up,
        // and all routes are read again.
        let unknown: BTreeSet<u32> =
            ours.iter().filter_map(|found| found.as_ref().err().copied()).collect();
        if !unknown.is_empty() {
            for index in unknown {
                self.learn_name(index)?;
            }
            ours = self.dump_routes(family)?;
        }
        self.foreign.note_dump(family);
        let (mut before, mut table) = (None, Table::default());
        for Ours { route, is_exact, hidden } in ours.into_iter().flatten() {
            let key = Key::Route(route.dst);
            let first = before.filter(|first: &Route| first.dst == route.dst);
            match (first, hidden.map(|hidden| *hidden)) {
                (None, None) => {
                    before = Some(route);
                    table.inexact.extend((!is_exact).then_some(key));
                    table.objects.push(route.into());
                }
                // Foreign routes are in front of ours. The put of a desired route replaces one
                // route: for IPv4 the first foreign one, for IPv6 ours. The others are deleted.
                (None, Some(Hidden { found, in_front })) => {
                    let v4 = (family == Family::V4).then_some(found);
                    let blocking = in_front.into_iter().filter(|first| first.blocks(&found));
                    for found in blocking.chain(v4) {
                        self.foreign.note_duplicate(DuplicateRoute { found, is_behind: false });
                    }
                    before = Some(route);
                    table.inexact.push(key);
                    table.objects.push(route.into());
                }
                // This is our last-resort route, behind another route of ours. It is deleted when
                // that one is put again.
                (Some(_), None) => table.inexact.push(key),
                // This is a second route of ours, behind the first one. If a request cannot
                // distinguish the two, it stays until the first one is deleted.
                (Some(first), Some(Hidden { found, .. })) => {
                    if found.is_distinct_from(&route.via, &first.via) {
                        self.foreign.note_duplicate(DuplicateRoute { found, is_behind: true });
                        table.inexact.push(key);
                    }
                }
            }
        }
        self.hand_over(table);
        Ok(())
    }

    /// Reads the owned routes of a family. Foreign routes are dropped while they are read, because
    /// there may be a million.
    fn dump_routes(&mut self, family: Family) -> Result<Vec<Found>, KernelError> {
        let Self { socket, footprint, foreign, names, nexthops, .. } = self;
        let mut last = Last::default();
        socket.dump(route::all(family), |message| {
            let found = route::read(message).filter(|found| found.main)?;
            foreign.note_route(&found);
            if !found.default_metric {
                return None;
            }
            let in_front = last.before(message.sequence, found)?;
            let is_hidden = !in_front.is_empty() && !found.last_resort;
            let hidden = is_hidden.then(|| Hidden { found, in_front: in_front.to_vec() });
            let mut unknown = None;
            let route = found.object(|index| {
                let name = names.get(&index).copied();
                unknown = name.is_none().then_some(index);
                name
            });
            let may_be_left = || {
                let inside = footprint.networks.iter().any(|network| network.covers(&found.dst));
                footprint.go_routes.is_none() && found.protocol == ROUTE_PROTOCOL && inside
            };
            if let Some(index) = unknown.filter(|_| may_be_left()) {
                return Some(Err(index));
            }
            let route = route?;
            let by = match route.via {
                Via::Gateway { link, .. } | Via::Link(link) => Some(link),
                Via::Nexthop(id) => device(nexthops, id),
                _ => None,
            };
            // Go flannel's routes have no attributes that make them inexact.
            let is_go_like = footprint.go_routes.is_none() || found.is_exact();
            if !is_go_like || !footprint.owns_route(&route, by, found.protocol) {
                return None;
            }
            if hidden.is_some() {
                tracing::debug!(%route.dst, "another route to the same destination hides one of \
                    ours");
            }
            let is_exact = found.is_exact() && found.protocol == ROUTE_PROTOCOL;
            Some(Ok(Ours { route, is_exact, hidden: hidden.map(Box::new) }))
        })
    }
}

/// The device of a nexthop object; `None` if it is not among `nexthops`.
fn device(nexthops: &[(u32, LinkName)], id: u32) -> Option<LinkName> {
    nexthops.binary_search_by_key(&id, |(id, _)| *id).ok().map(|place| nexthops[place].1)
}

/// An owned route.
struct Ours {
    route: Route,
    /// [`Route`] represents all attributes, and the route has our protocol.
    is_exact: bool,
    /// `Some` if another route to the same destination is in front of it, so that packets take that
    /// one. Always `None` for a last-resort route, which is behind all others by design.
    hidden: Option<Box<Hidden>>,
}

/// The messages about a route that is behind another one.
struct Hidden {
    /// The route itself.
    found: RouteMessage,
    /// The routes in front of it, in their order.
    in_front: Vec<RouteMessage>,
}

/// The messages of a dump about the current destination.
#[derive(Default)]
struct Last {
    /// The sequence number of the dump, which is another one when the dump is repeated.
    dump: u32,
    routes: Vec<RouteMessage>,
}

impl Last {
    /// Takes the next message of the dump, `found`. Returns the routes to the same destination in
    /// front of it. Returns `None` if the message repeats the last one: when IPv6 routes are added
    /// during a dump, the kernel may repeat a route as it continues the dump. Two existing routes
    /// always differ.
    ///
    /// **Source**: linux `net/ipv6/ip6_fib.c: fib6_dump_table`.
    fn before(&mut self, dump: u32, found: RouteMessage) -> Option<&[RouteMessage]> {
        if self.dump != dump || self.routes.last().is_some_and(|last| last.dst != found.dst) {
            self.routes.clear();
        }
        self.dump = dump;
        if self.routes.last() == Some(&found) {
            return None;
        }
        self.routes.push(found);
        self.routes.split_last().map(|(_, before)| before)
    }
}

/// An owned route, or the index of a link whose name decides whether the route is owned.
type Found = Result<Ours, u32>;

#[cfg(test)]
mod tests {
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::transport::wire::Message;

    #[test]
    fn a_repeated_message_is_not_a_duplicate() {
        let message = |n: u8, kind: u8| {
            // `struct rtmsg` of a /24 in the main table, and RTA_DST.
            let payload =
                [2, 24, 0, 0, 254, ROUTE_PROTOCOL, 0, kind, 0, 0, 0, 0, 8, 0, 1, 0, 10, 1, n, 0];
            let message =
                Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
            route::read(&message).unwrap()
        };
        let (unicast, blackhole) = (1, 6);
        let mut last = Last::default();
        for (dump, found, before) in [
            (1, message(1, unicast), Some(&[][..])),
            (1, message(2, unicast), Some(&[])),
            (1, message(2, unicast), None),
            (1, message(2, blackhole), Some(&[message(2, unicast)])),
            (2, message(2, blackhole), Some(&[])),
        ] {
            assert_eq!(last.before(dump, found), before, "{found}");
        }
    }
}
