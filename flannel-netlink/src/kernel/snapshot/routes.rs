//! Owned routes, and foreign routes to the same destinations.

use std::collections::BTreeSet;

use flannel_core::address::Family;
use flannel_core::kernel::{KernelError, ROUTE_PROTOCOL};
use flannel_core::object::{Key, LinkName, Object, Route, Via};

use super::{Reader, Table};
use crate::codec::route;
use crate::codec::route::RouteMessage;
use crate::kernel::foreign_routes::{DuplicateRoute, Goes};

impl Reader<'_> {
    pub(super) fn read_routes(&mut self, family: Family) -> Result<(), KernelError> {
        let mut read = self.dump_routes(family)?;
        // For routes on a former external interface its name is needed. So the name is looked up,
        // and all routes are read again.
        let unknown: BTreeSet<u32> =
            read.iter().filter_map(|found| found.as_ref().err().copied()).collect();
        if !unknown.is_empty() {
            for index in unknown {
                self.learn_name(index)?;
            }
            read = self.dump_routes(family)?;
        }
        self.foreign.note_dump(family);
        let (mut before, mut table) = (None, Table::default());
        for found in read.into_iter().flatten() {
            let Found { message, ours, ref in_front } = found;
            let key = Key::Route(message.dst);
            // It is deleted with our route without a TOS, which follows and takes its place in the
            // snapshot. If none follows, the route engine deletes it as an undesired object.
            if message.tos != 0 {
                let duplicate = DuplicateRoute { found: message, goes: Goes::WithOurs };
                self.foreign.note_duplicate(duplicate);
                table.inexact.push(key);
                table.objects.extend(ours.map(|(route, _)| Object::from(route)));
                continue;
            }
            let first = before.filter(|first: &Route| first.dst == message.dst);
            if first.is_none() {
                self.note_left(&found);
            }
            let Some((route, is_exact)) = ours else { continue };
            match first {
                None => {
                    before = Some(route);
                    table.inexact.extend((!is_exact || !in_front.is_empty()).then_some(key));
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
    fn note_left(&self, found: &Found) {
        let Found { message, ours, in_front } = found;
        if in_front.is_empty() {
            return;
        }
        let note = |found, goes| self.foreign.note_duplicate(DuplicateRoute { found, goes });
        match message.dst.family() {
            Family::V4 if ours.is_some() => note(*message, Goes::OursWhenPut),
            Family::V4 => {}
            Family::V6 => in_front
                .iter()
                .filter(|first| ours.is_none() || first.deletion_spares(message))
                .for_each(|first| note(*first, Goes::ForeignWhenPut)),
        }
    }

    /// Reads the routes of a family. Only owned routes are kept, and foreign ones that the put of
    /// an owned route may replace. There may be a million others.
    fn dump_routes(&mut self, family: Family) -> Result<Vec<Result<Found, u32>>, KernelError> {
        let Self { socket, footprint, foreign, names, nexthops, .. } = self;
        let mut last = Last::default();
        socket.dump(route::all(family), |message| {
            let found = route::read(message).filter(|found| found.main)?;
            foreign.note_route(&found);
            let by = |via: &Via| match *via {
                Via::Gateway { link, .. } | Via::Link(link) => Some(link),
                Via::Nexthop(id) => device(nexthops, id),
                _ => None,
            };
            if found.tos != 0 {
                let route = found.with_any_metric(|index| names.get(&index).copied())?;
                let link = by(&route.via).filter(|link| footprint.links.contains(link))?;
                let ours = footprint.owns_route(&route, Some(link), found.protocol);
                let ours = ours.then_some((route, false))?;
                return Some(Ok(Found { message: found, ours: Some(ours), in_front: Vec::new() }));
            }
            if !found.default_metric {
                return None;
            }
            let in_front = last.before(message.sequence, found)?;
            // A last-resort route is behind all others by design.
            let in_front = if found.last_resort { &[] } else { in_front };
            let inside = || footprint.networks.iter().any(|network| network.covers(&found.dst));
            let mut unknown = None;
            let route = found.object(|index| {
                let name = names.get(&index).copied();
                unknown = name.is_none().then_some(index);
                name
            });
            let may_be_left = || found.protocol == ROUTE_PROTOCOL && inside();
            if let Some(index) = unknown.filter(|_| may_be_left()) {
                return Some(Err(index));
            }
            let ours =
                route.filter(|ours| footprint.owns_route(ours, by(&ours.via), found.protocol));
            if ours.is_some() && !in_front.is_empty() {
                tracing::debug!(%found.dst, "another route to the same destination hides one of \
                    ours");
            }
            let is_exact = found.is_exact() && found.protocol == ROUTE_PROTOCOL;
            let may_be_replaced = || !in_front.is_empty() && family == Family::V6 && inside();
            (ours.is_some() || may_be_replaced()).then(|| {
                let ours = ours.map(|route| (route, is_exact));
                Ok(Found { message: found, ours, in_front: in_front.to_vec() })
            })
        })
    }
}

/// The device of a nexthop object; `None` if it is not among `nexthops`.
fn device(nexthops: &[(u32, LinkName)], id: u32) -> Option<LinkName> {
    nexthops.binary_search_by_key(&id, |(id, _)| *id).ok().map(|place| nexthops[place].1)
}

/// A route of a dump.
struct Found {
    message: RouteMessage,
    /// The route if it is owned, and whether [`Route`] represents all its attributes and it has
    /// our protocol.
    ours: Option<(Route, bool)>,
    /// The routes to the same destination in front of it, of which packets take the first. Empty
    /// for a last-resort route.
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
