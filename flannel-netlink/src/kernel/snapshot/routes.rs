//! Owned routes, and foreign routes to the same destinations.

use std::collections::{BTreeMap, BTreeSet};

use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, ROUTE_PROTOCOL};
use flannel_core::object::{Key, LinkName, Object, Route, Via};

use super::{Reader, Table};
use crate::codec::route;
use crate::codec::route::RouteMessage;
use crate::kernel::foreign_routes::{DuplicateRoute, Goes};

impl Reader<'_> {
    pub(super) fn read_routes(&mut self, family: Family) -> Result<(), KernelError> {
        let mut dump = self.dump_routes(family)?;
        // For routes on a former external interface its name is needed. So the name is looked up,
        // and all routes are read again.
        if !dump.unknown_links.is_empty() {
            for index in &dump.unknown_links {
                self.learn_name(*index)?;
            }
            dump = self.dump_routes(family)?;
        }
        self.foreign.note_dump(family);
        let mut table = Table::default();
        let mut before = None;
        for found in dump.routes {
            let DumpedRoute { message, owned, ref in_front } = found;
            let key = Key::Route(message.dst);
            // It is deleted with our route without a TOS, which follows and takes its place in the
            // snapshot. If none follows, the route engine deletes it as an undesired object.
            if message.tos != 0 {
                let duplicate = DuplicateRoute { found: message, goes: Goes::WithOurs };
                self.foreign.note_duplicate(duplicate);
                table.inexact.push(key);
                table.objects.extend(owned.map(|owned| Object::from(owned.route)));
                continue;
            }
            let first = before.filter(|first: &Route| first.dst == message.dst);
            if first.is_none() {
                self.note_left(&found);
            }
            let Some(OwnedRoute { route, is_exact }) = owned else { continue };
            match first {
                None => {
                    before = Some(route);
                    if !is_exact || !in_front.is_empty() {
                        table.inexact.push(key);
                    }
                    table.objects.push(route.into());
                }
                // This is our last-resort route, behind another route of ours. It is deleted when
                // that one is put again.
                Some(_) if message.last_resort => table.inexact.push(key),
                // This is a second route of ours, behind the first one. If a request cannot
                // distinguish the two, it stays until the first one is deleted.
                Some(first) => {
                    if message.is_distinct_from(&route.via, &first.via) {
                        let duplicate = DuplicateRoute { found: message, goes: Goes::WithOurs };
                        self.foreign.note_duplicate(duplicate);
                        table.inexact.push(key);
                    }
                }
            }
        }
        self.hand_over(table);
        Ok(())
    }

    /// Notes the routes that the put of a desired route would leave in place, if only foreign
    /// routes are in front of `found`. A put replaces one route. For IPv4 it is the first one, so
    /// our old route stays behind it. For IPv6 (`fib6_add_rt2node`) it may be `found`, so the
    /// foreign ones stay in front.
    fn note_left(&self, found: &DumpedRoute) {
        let DumpedRoute { message, owned, in_front } = found;
        if in_front.is_empty() {
            return;
        }
        let note = |found, goes| self.foreign.note_duplicate(DuplicateRoute { found, goes });
        match message.dst.family() {
            Family::V4 if owned.is_some() => note(*message, Goes::OursWhenPut),
            Family::V4 => {}
            Family::V6 => in_front
                .iter()
                .filter(|first| owned.is_none() || first.deletion_spares(message))
                .for_each(|first| note(*first, Goes::ForeignWhenPut)),
        }
    }

    /// Reads the routes of a family. Only owned routes are kept, and foreign ones that the put of
    /// an owned route may replace. There may be a million others.
    fn dump_routes(&mut self, family: Family) -> Result<RouteDump, KernelError> {
        let Self { socket, footprint, foreign, names, nexthops, .. } = self;
        let filter = RouteFilter { footprint, names, nexthops };
        let mut last = Last::default();
        let mut dump = RouteDump::default();
        dump.routes = socket.dump(route::all(family), |message| {
            let found = route::read(message).filter(|found| found.main)?;
            foreign.note_route(&found);
            if found.tos != 0 {
                return filter.with_tos(found);
            }
            if !found.default_metric {
                return None;
            }
            let in_front = last.before(message.sequence, found)?;
            // A last-resort route is behind all others by design.
            let in_front = if found.last_resort { &[] } else { in_front };
            filter.without_tos(found, in_front, &mut dump.unknown_links)
        })?;
        Ok(dump)
    }
}

/// The routes of a dump that the snapshot needs.
#[derive(Default)]
struct RouteDump {
    routes: Vec<DumpedRoute>,
    /// The indexes of links without a known name that may have owned routes. Those routes are not
    /// in `routes`.
    unknown_links: BTreeSet<u32>,
}

/// A route of a dump.
struct DumpedRoute {
    message: RouteMessage,
    /// `None` if it is not owned.
    owned: Option<OwnedRoute>,
    /// The routes to the same destination in front of it, of which packets take the first. Empty
    /// for a last-resort route.
    in_front: Vec<RouteMessage>,
}

#[derive(Clone, Copy)]
struct OwnedRoute {
    route: Route,
    /// [`Route`] represents all its attributes, and it has our protocol.
    is_exact: bool,
}

/// Chooses the routes of a dump that the snapshot needs.
struct RouteFilter<'a> {
    footprint: &'a Footprint,
    /// [`Reader::names`].
    names: &'a BTreeMap<u32, LinkName>,
    /// [`Reader::nexthops`].
    nexthops: &'a [(u32, LinkName)],
}

impl RouteFilter<'_> {
    /// A route with a TOS, if it is owned.
    fn with_tos(&self, message: RouteMessage) -> Option<DumpedRoute> {
        let route = message.with_any_metric(|index| self.names.get(&index).copied())?;
        let link = self.link_of(&route.via)?;
        let is_owned = self.footprint.links.contains(&link)
            && self.footprint.owns_route(&route, Some(link), message.protocol);
        if !is_owned {
            return None;
        }
        let owned = Some(OwnedRoute { route, is_exact: false });
        Some(DumpedRoute { message, owned, in_front: Vec::new() })
    }

    /// A route without a TOS, if it is owned or if the put of an owned route may replace it. If the
    /// name of its link is needed to decide that, its index is added to `unknown_links`.
    fn without_tos(
        &self,
        message: RouteMessage,
        in_front: &[RouteMessage],
        unknown_links: &mut BTreeSet<u32>,
    ) -> Option<DumpedRoute> {
        let footprint = self.footprint;
        let is_inside = || footprint.networks.iter().any(|network| network.covers(&message.dst));
        let mut unknown_link = None;
        let route = message.object(|index| {
            let name = self.names.get(&index).copied();
            unknown_link = name.is_none().then_some(index);
            name
        });
        if let Some(index) = unknown_link
            && message.protocol == ROUTE_PROTOCOL
            && is_inside()
        {
            unknown_links.insert(index);
            return None;
        }
        let owned = route
            .filter(|ours| footprint.owns_route(ours, self.link_of(&ours.via), message.protocol))
            .map(|route| OwnedRoute {
                route,
                is_exact: message.is_exact() && message.protocol == ROUTE_PROTOCOL,
            });
        if owned.is_some() && !in_front.is_empty() {
            tracing::debug!(found.dst = %message.dst, "another route to the same destination \
                hides one of ours");
        }
        if owned.is_none() {
            let may_be_replaced =
                !in_front.is_empty() && message.dst.family() == Family::V6 && is_inside();
            if !may_be_replaced {
                return None;
            }
        }
        Some(DumpedRoute { message, owned, in_front: in_front.to_vec() })
    }

    /// The link of a path. `None` for a path without a link, and for an unknown nexthop object.
    fn link_of(&self, via: &Via) -> Option<LinkName> {
        match *via {
            Via::Gateway { link, .. } | Via::Link(link) => Some(link),
            Via::Nexthop(id) => {
                let n = self.nexthops.binary_search_by_key(&id, |(id, _)| *id).ok()?;
                Some(self.nexthops[n].1)
            }
            _ => None,
        }
    }
}

/// The messages of a dump about the current destination.
#[derive(Default)]
struct Last {
    /// The sequence number of the dump, which changes when the dump is repeated.
    dump: u32,
    routes: Vec<RouteMessage>,
}

impl Last {
    /// Takes the next message of the dump, `found`. Returns the routes to the same destination in
    /// front of it. Returns `None` if the message repeats the last one: when IPv6 routes are added
    /// during a dump, the kernel may repeat a route as it continues the dump. Two IPv6 routes that
    /// exist always differ.
    ///
    /// **Source**: linux `net/ipv6/ip6_fib.c: fib6_dump_table`.
    fn before(&mut self, dump: u32, found: RouteMessage) -> Option<&[RouteMessage]> {
        if self.dump != dump || self.routes.last().is_some_and(|last| last.dst != found.dst) {
            self.routes.clear();
        }
        self.dump = dump;
        if found.dst.family() == Family::V6 && self.routes.last() == Some(&found) {
            return None;
        }
        self.routes.push(found);
        self.routes.split_last().map(|(_, before)| before)
    }
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::transport::wire::Message;

    #[test]
    fn a_repeated_message_is_not_a_duplicate() {
        let message = |n: u8, kind: u8| {
            // `struct rtmsg` of an IPv6 /64 in the main table, RTA_DST, RTA_PRIORITY (1024).
            let mut payload =
                vec![10, 64, 0, 0, 254, ROUTE_PROTOCOL, 0, kind, 0, 0, 0, 0, 20, 0, 1, 0];
            payload.extend([0xfd, n, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            payload.extend([8, 0, 6, 0, 0, 4, 0, 0]);
            let message =
                Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
            route::read(&message).unwrap()
        };
        let unicast = 1;
        let blackhole = 6;
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
