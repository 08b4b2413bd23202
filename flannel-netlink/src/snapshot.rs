//! Reads everything there is that one network owns.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, NexthopIds, ROUTE_PROTOCOL};
use flannel_core::object::{Key, LinkName, Object, Route, State, Via};

use crate::ask::{ENODEV, find_link, name_of};
use crate::codec::route::RouteMessage;
use crate::codec::{addr, neigh, nexthop, route};
use crate::foreign_routes::{Double, ForeignRoutes};
use crate::socket::Socket;

/// Kernels before 5.3 have no nexthop objects.
const EOPNOTSUPP: i32 = 95;

/// The indexes of links that objects of ours may be on. A link without a name here has none.
type Names = BTreeMap<u32, LinkName>;

/// The ids of nexthop objects with their devices, in the order of ids; those without a name in [`Names`] are left out.
type Nexthops = Vec<(u32, LinkName)>;

/// What one table holds of ours.
#[derive(Default)]
struct Table {
    objects: Vec<Object>,
    /// The keys of those that are not quite as described.
    inexact: Vec<Key>,
}

impl From<Vec<Object>> for Table {
    fn from(objects: Vec<Object>) -> Self {
        Self { objects, ..Self::default() }
    }
}

/// Tables that were read, on their way to whoever sorts them.
type Tables = Sender<Table>;

/// Each table is sorted while the kernel makes out the next one.
pub(crate) fn snapshot(
    socket: &mut Socket,
    footprint: &Footprint,
    foreign: &ForeignRoutes,
) -> Result<State, KernelError> {
    let mut state = State::default();
    let (tables, to_sort) = channel::<Table>();
    let sorted = &mut state;
    let mut sort = move || {
        for table in &to_sort {
            sorted.extend(table.objects);
            table.inexact.into_iter().for_each(|key| sorted.note_inexact(key));
        }
    };
    std::thread::scope(|scope| {
        let sorter = Builder::new().spawn_scoped(scope, &mut sort);
        if let Err(error) = sorter {
            tracing::debug!(%error, "tables are sorted when all are read");
        }
        let read = read_tables(socket, footprint, foreign, &tables);
        drop(tables);
        read
    })?;
    // Nothing is left unless there was no thread.
    sort();
    Ok(state)
}

fn read_tables(
    socket: &mut Socket,
    footprint: &Footprint,
    foreign: &ForeignRoutes,
    tables: &Tables,
) -> Result<(), KernelError> {
    let mut names = Names::new();
    for name in &footprint.links {
        let Some(found) = present(find_link(socket, *name))? else { continue };
        // A foreign device that has the name: nothing on it is ours.
        if !found.is_vxlan() {
            continue;
        }
        names.insert(found.index, *name);
        let lower = if found.lower() == 0 { None } else { name_of(socket, found.lower())? };
        if let Some(object) = found.object(lower) {
            let inexact = (!found.is_exact()).then_some(Key::Link(*name)).into_iter().collect();
            tell(tables, Table { objects: vec![object.into()], inexact });
        }
        read_link(socket, footprint, foreign, (found.index, *name), tables)?;
    }
    for name in footprint.routes_on.difference(&footprint.links) {
        if let Some(found) = present(find_link(socket, *name))? {
            names.insert(found.index, *name);
        }
    }
    let mut nexthops = Nexthops::new();
    if !names.is_empty() || footprint.nexthops.is_some() {
        nexthops = read_nexthops(socket, footprint, &mut names, tables)?;
    }
    if !names.is_empty() || !footprint.networks.is_empty() {
        for family in Family::BOTH {
            read_routes(socket, footprint, (&mut names, &nexthops), (family, foreign), tables)?;
        }
    }
    Ok(())
}

fn tell(tables: &Tables, table: impl Into<Table>) {
    // Whoever takes them is there for as long as this lasts.
    let _ = tables.send(table.into());
}

/// All nexthop objects, told apart by whether `footprint` explains them.
pub(crate) fn nexthop_ids(
    socket: &mut Socket,
    footprint: &Footprint,
) -> Result<NexthopIds, KernelError> {
    let there = socket.dump_ordered(nexthop::all(), |message| {
        let found = nexthop::read(message)?;
        Some((found.id, found.protocol))
    });
    let there = match there {
        Err(error) if error.errno == EOPNOTSUPP => return Ok(NexthopIds::default()),
        there => there?,
    };
    let (mut by_inside, mut by_outside) = (BTreeSet::new(), BTreeSet::new());
    // Routes are looked at only if there is something that they can tell apart.
    let families =
        Family::BOTH.iter().filter(|_| there.iter().any(|(_, by)| *by == ROUTE_PROTOCOL));
    for family in families {
        let routes = socket.dump(route::all(*family), |message| {
            let found = route::read(message).filter(|found| found.protocol == ROUTE_PROTOCOL)?;
            Some((found.nexthop?, found.dst))
        })?;
        for (id, dst) in routes {
            let inside = footprint.networks.iter().any(|network| network.covers(&dst));
            if inside { &mut by_inside } else { &mut by_outside }.insert(id);
        }
    }
    let mut ids = NexthopIds { usable: true, ..NexthopIds::default() };
    for (id, protocol) in there {
        if protocol != ROUTE_PROTOCOL || by_outside.contains(&id) {
            ids.foreign.push(id);
        } else if by_inside.contains(&id) {
            ids.ours.push(id);
        }
    }
    Ok(ids)
}

/// Routes that are not in `there`, and groups, by the nexthop objects that are.
pub(crate) fn nexthop_users(
    socket: &mut Socket,
    there: &State,
) -> Result<BTreeMap<u32, String>, KernelError> {
    let id = |object: &Object| {
        if let Object::Nexthop(nexthop) = object { Some(nexthop.id) } else { None }
    };
    let ids: BTreeSet<u32> = there.iter().filter_map(id).collect();
    let mut users = BTreeMap::new();
    if ids.is_empty() {
        return Ok(users);
    }
    for (group, members) in socket.dump_ordered(nexthop::all(), nexthop::members)? {
        let ours = members.into_iter().filter(|id| ids.contains(id));
        users.extend(ours.map(|id| (id, format!("nexthop id {group} group {id}"))));
    }
    for family in Family::BOTH {
        let by = |found: &RouteMessage| found.nexthop.filter(|id| ids.contains(id));
        let routes = socket.dump(route::everywhere(family), |message| {
            let found = route::read(message)?;
            Some((by(&found)?, found))
        })?;
        let mut foreign = BTreeSet::new();
        for (id, found) in routes {
            let object = found.object(|_| None).map(Object::Route);
            let is_there = object.is_some_and(|object| there.get(&object.key()) == Some(&object));
            // Of several entries that are alike only the first is meant.
            if !(is_there && foreign.insert(found.dst)) {
                users.insert(id, found.to_string());
            }
        }
    }
    Ok(users)
}

fn present<T>(found: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match found {
        Err(error) if error.errno == ENODEV => Ok(None),
        found => found.map(Some),
    }
}

/// Addresses, neighbours and forwarding entries of one link.
fn read_link(
    socket: &mut Socket,
    footprint: &Footprint,
    foreign: &ForeignRoutes,
    (index, name): (u32, LinkName),
    tables: &Tables,
) -> Result<(), KernelError> {
    let addrs = socket.dump(addr::on(index), |message| {
        let found = addr::read(message).filter(|found| found.index == index)?;
        Some((found.object(name), found.is_exact())).filter(|(addr, _)| footprint.owns_addr(addr))
    })?;
    let inexact = addrs
        .iter()
        .filter(|(_, is_exact)| !is_exact)
        .map(|(addr, _)| Key::Addr(addr.link, addr.address));
    let inexact = inexact.collect();
    tell(
        tables,
        Table { objects: addrs.into_iter().map(|(addr, _)| addr.into()).collect(), inexact },
    );
    foreign.look_anew(index);
    for request in [neigh::on(index), neigh::fdb_on(index)] {
        // Also of a dump that was begun anew: they are put again at worst.
        let mut inexact = Vec::new();
        let objects = socket.dump(request, |message| {
            let found = neigh::read(message).filter(|found| found.index == index)?;
            foreign.see_entry(&found);
            let object = found.object(name).filter(|_| footprint.owns_entry(name, found.stays))?;
            inexact.extend((!found.is_exact()).then(|| object.key()));
            Some(object)
        })?;
        tell(tables, Table { objects, inexact });
    }
    Ok(())
}

fn read_nexthops(
    socket: &mut Socket,
    footprint: &Footprint,
    names: &mut Names,
    tables: &Tables,
) -> Result<Nexthops, KernelError> {
    let there = match socket.dump_ordered(nexthop::all(), nexthop::read) {
        Err(error) if error.errno == EOPNOTSUPP => return Ok(Nexthops::new()),
        there => there?,
    };
    let (mut nexthops, mut ours) = (Nexthops::new(), Vec::new());
    for found in there {
        let in_block = footprint.nexthops.is_some_and(|block| block.contains(found.id));
        // One of ours may be on a device that is no longer the external interface.
        if in_block && found.index != 0 {
            learn_name(socket, footprint, found.index, names)?;
        }
        let Some(link) = names.get(&found.index).copied() else { continue };
        nexthops.push((found.id, link));
        let object =
            found.object(link).filter(|o| footprint.owns_nexthop(o.id, link, found.protocol));
        ours.extend(object.map(Object::Nexthop));
    }
    tell(tables, ours);
    nexthops.sort_by_key(|(id, _)| *id);
    Ok(nexthops)
}

fn device(nexthops: &[(u32, LinkName)], id: u32) -> Option<LinkName> {
    nexthops.binary_search_by_key(&id, |(id, _)| *id).ok().map(|place| nexthops[place].1)
}

/// The name of a link of others; not that of a foreign device that has the name of one of ours.
fn learn_name(
    socket: &mut Socket,
    footprint: &Footprint,
    index: u32,
    names: &mut Names,
) -> Result<(), KernelError> {
    if !names.contains_key(&index)
        && let Some(name) = name_of(socket, index)?.filter(|name| !footprint.links.contains(name))
    {
        names.insert(index, name);
    }
    Ok(())
}

fn read_routes(
    socket: &mut Socket,
    footprint: &Footprint,
    (names, nexthops): (&mut Names, &Nexthops),
    (family, foreign): (Family, &ForeignRoutes),
    tables: &Tables,
) -> Result<(), KernelError> {
    let mut ours = dump_routes(socket, footprint, (names, nexthops), (family, foreign))?;
    // Left on a device that is no longer the external interface: read once more, with its name.
    let unknown: BTreeSet<u32> =
        ours.iter().filter_map(|found| found.as_ref().err().copied()).collect();
    if !unknown.is_empty() {
        for index in unknown {
            learn_name(socket, footprint, index, names)?;
        }
        ours = dump_routes(socket, footprint, (names, nexthops), (family, foreign))?;
    }
    foreign.see_all(family);
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
            // Somebody else's stands before it, and gives way when it is put.
            (None, Some(Hidden { told, first })) => {
                if first.stands_in_the_way_of(&told) {
                    foreign.see_double(Double { told: first, is_ours: false });
                }
                before = Some(route);
                table.inexact.push(key);
                table.objects.push(route.into());
            }
            // One of last resort stands behind ours, and goes when that is put again.
            (Some(_), None) => table.inexact.push(key),
            // So does any other of ours. What cannot be told from ours stays until that goes.
            (Some(first), Some(Hidden { told, .. })) => {
                if told.can_be_told_from(&route.via, &first.via) {
                    foreign.see_double(Double { told, is_ours: true });
                    table.inexact.push(key);
                }
            }
        }
    }
    tell(tables, table);
    Ok(())
}

/// A route of ours.
struct Ours {
    route: Route,
    /// It is just that.
    is_exact: bool,
    /// If another one to the same destination stands before it, and takes effect. One of last resort stands behind others by what it is.
    hidden: Option<Box<Hidden>>,
}

/// A route behind another one, as the kernel tells of both.
struct Hidden {
    told: RouteMessage,
    first: RouteMessage,
}

/// What a dump told last, with its number: it begins anew if the table changes under way.
#[derive(Default)]
struct Last(Option<(u32, RouteMessage)>);

impl Last {
    /// The route to the same destination that stands before this one, if any. `None`: it was told already. The kernel does that where it
    /// goes on with IPv6 routes after some were added; of two that are there something differs.
    ///
    /// **Source**: linux `net/ipv6/ip6_fib.c: fib6_dump_table`.
    fn before(&mut self, dump: u32, told: RouteMessage) -> Option<Option<RouteMessage>> {
        let before = self
            .0
            .replace((dump, told))
            .filter(|(number, _)| *number == dump)
            .map(|(_, before)| before);
        if before == Some(told) {
            None
        } else {
            Some(before.filter(|before| before.dst == told.dst))
        }
    }
}

/// A route of ours, or the index of the link that one leaves by, if that must be known to tell.
type Found = Result<Ours, u32>;

/// Others' routes, of which there may be a million, are not kept for a moment.
fn dump_routes(
    socket: &mut Socket,
    footprint: &Footprint,
    (names, nexthops): (&Names, &Nexthops),
    (family, foreign): (Family, &ForeignRoutes),
) -> Result<Vec<Found>, KernelError> {
    let inside = |dst: &Subnet| footprint.networks.iter().any(|network| network.covers(dst));
    let mut last = Last::default();
    socket.dump(route::all(family), |message| {
        let found = route::read(message).filter(|found| found.main)?;
        foreign.see(&found);
        if !found.default_metric {
            return None;
        }
        let first = last.before(message.sequence, found)?;
        let hidden =
            first.filter(|_| !found.last_resort).map(|first| Hidden { told: found, first });
        let mut unknown = None;
        let route = found.object(|index| {
            let name = names.get(&index).copied();
            unknown = name.is_none().then_some(index);
            name
        });
        let left = || {
            footprint.go_routes.is_none() && found.protocol == ROUTE_PROTOCOL && inside(&found.dst)
        };
        if let Some(index) = unknown.filter(|_| left()) {
            return Some(Err(index));
        }
        let route = route?;
        let by = match route.via {
            Via::Gateway { link, .. } | Via::Link(link) => Some(link),
            Via::Nexthop(id) => device(nexthops, id),
            _ => None,
        };
        // Go flannel gives its routes nothing that ours have not.
        let is_go_like = footprint.go_routes.is_none() || found.is_exact();
        if !is_go_like || !footprint.owns_route(&route, by, found.protocol) {
            return None;
        }
        if hidden.is_some() {
            tracing::debug!(%route.dst, "another route to the same destination hides one of ours");
        }
        let is_exact = found.is_exact() && found.protocol == ROUTE_PROTOCOL;
        Some(Ok(Ours { route, is_exact, hidden: hidden.map(Box::new) }))
    })
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::wire::Message;

    #[test]
    fn a_route_that_is_told_again_has_no_double() {
        let told = |n: u8, kind: u8| {
            // struct rtmsg: a /24 of the main table; and RTA_DST.
            let payload =
                [2, 24, 0, 0, 254, ROUTE_PROTOCOL, 0, kind, 0, 0, 0, 0, 8, 0, 1, 0, 10, 1, n, 0];
            let message =
                Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
            route::read(&message).unwrap()
        };
        let (unicast, blackhole) = (1, 6);
        let mut last = Last::default();
        for (dump, told, before) in [
            (1, told(1, unicast), Some(None)),
            (1, told(2, unicast), Some(None)),
            (1, told(2, unicast), None),
            (1, told(2, blackhole), Some(Some(told(2, unicast)))),
            (2, told(2, blackhole), Some(None)),
        ] {
            assert_eq!(last.before(dump, told), before, "{told}");
        }
    }
}
