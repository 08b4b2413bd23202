//! Reads everything there is that one network owns.

use std::collections::{BTreeMap, BTreeSet};

use flannel_core::{
    Family, KernelError, LinkName, NexthopIds, Object, Owned, ROUTE_PROTOCOL, Route, State, Subnet, Via,
};

use crate::ask::{ENODEV, find_link, name_of};
use crate::codec::route::RouteMessage;
use crate::codec::{addr, neigh, nexthop, route};
use crate::socket::Socket;

/// Kernels before 5.3 have no nexthop objects.
const EOPNOTSUPP: i32 = 95;

/// The indexes of links that objects of ours may be on. A link without a name here has none.
type Names = BTreeMap<u32, LinkName>;

/// The ids of nexthop objects with their devices, in the order of ids; those without a name in [`Names`] are left out.
type Nexthops = Vec<(u32, LinkName)>;

pub(crate) fn snapshot(socket: &mut Socket, owned: &Owned) -> Result<State, KernelError> {
    let mut state = State::default();
    let mut names = Names::new();
    for name in &owned.links {
        let Some(found) = present(find_link(socket, *name))? else { continue };
        // A foreign device that has the name: nothing on it is ours.
        if !found.is_vxlan() {
            continue;
        }
        names.insert(found.index, *name);
        let lower = if found.lower() == 0 { None } else { name_of(socket, found.lower())? };
        if let Some(object) = found.object(lower) {
            state.insert(object);
        }
        read_link(socket, owned, found.index, *name, &mut state)?;
    }
    for name in owned.routes_on.difference(&owned.links) {
        if let Some(found) = present(find_link(socket, *name))? {
            names.insert(found.index, *name);
        }
    }
    let mut nexthops = Nexthops::new();
    if !names.is_empty() || owned.nexthops.is_some() {
        nexthops = read_nexthops(socket, owned, &mut names, &mut state)?;
    }
    if !names.is_empty() || !owned.networks.is_empty() {
        for family in Family::BOTH {
            read_routes(socket, owned, (&mut names, &nexthops), family, &mut state)?;
        }
    }
    Ok(state)
}

/// All nexthop objects, told apart by whether `owned` explains them.
pub(crate) fn nexthop_ids(socket: &mut Socket, owned: &Owned) -> Result<NexthopIds, KernelError> {
    let there = socket.dump(nexthop::all(), |message| {
        let found = nexthop::read(message)?;
        Some((found.id, found.protocol))
    });
    let there = match there {
        Err(error) if error.errno == EOPNOTSUPP => return Ok(NexthopIds::default()),
        there => there?,
    };
    let (mut by_inside, mut by_outside) = (BTreeSet::new(), BTreeSet::new());
    // Routes are looked at only if there is something that they can tell apart.
    let families = Family::BOTH.iter().filter(|_| there.iter().any(|(_, by)| *by == ROUTE_PROTOCOL));
    for family in families {
        let routes = socket.dump(route::all(*family), |message| {
            let found = route::read(message).filter(|found| found.protocol == ROUTE_PROTOCOL)?;
            Some((found.nexthop?, found.dst))
        })?;
        for (id, dst) in routes {
            let inside = owned.networks.iter().any(|network| network.covers(&dst));
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
    let id = |object: &Object| if let Object::Nexthop(nexthop) = object { Some(nexthop.id) } else { None };
    let ids: BTreeSet<u32> = there.iter().filter_map(id).collect();
    let mut users = BTreeMap::new();
    if ids.is_empty() {
        return Ok(users);
    }
    for (group, members) in socket.dump(nexthop::all(), nexthop::members)? {
        let ours = members.into_iter().filter(|id| ids.contains(id));
        users.extend(ours.map(|id| (id, format!("nexthop id {group} group {id}"))));
    }
    for family in Family::BOTH {
        let by = |found: &RouteMessage| found.nexthop.filter(|id| ids.contains(id));
        let routes = socket.dump(route::everywhere(family), |message| {
            let found = route::read(message)?;
            Some((by(&found)?, found))
        })?;
        let mut seen = BTreeSet::new();
        for (id, found) in routes {
            let object = found.object(|_| None).map(Object::Route);
            let is_there = object.is_some_and(|object| there.get(&object.key()) == Some(&object));
            // Of several entries that are alike only the first is meant.
            if !(is_there && seen.insert(found.dst)) {
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
    owned: &Owned,
    index: u32,
    name: LinkName,
    state: &mut State,
) -> Result<(), KernelError> {
    for found in socket.dump(addr::on(index), addr::read)? {
        let addr = found.object(name);
        if found.index == index && owned.owns_addr(&addr) {
            state.insert(addr);
        }
    }
    for request in [neigh::on(index), neigh::fdb_on(index)] {
        state.extend(socket.dump(request, |message| {
            let found = neigh::read(message).filter(|found| found.index == index)?;
            found.object(name).filter(|_| owned.owns_entry(name, found.permanent))
        })?);
    }
    Ok(())
}

fn read_nexthops(
    socket: &mut Socket,
    owned: &Owned,
    names: &mut Names,
    state: &mut State,
) -> Result<Nexthops, KernelError> {
    let there = match socket.dump(nexthop::all(), nexthop::read) {
        Err(error) if error.errno == EOPNOTSUPP => return Ok(Nexthops::new()),
        there => there?,
    };
    let (mut nexthops, mut ours) = (Nexthops::new(), Vec::new());
    for found in there {
        let in_block = owned.nexthops.is_some_and(|block| block.contains(found.id));
        // One of ours may be on a device that is no longer the external interface.
        if in_block && found.index != 0 {
            learn_name(socket, owned, found.index, names)?;
        }
        let Some(link) = names.get(&found.index).copied() else { continue };
        nexthops.push((found.id, link));
        ours.extend(found.object(link).filter(|o| owned.owns_nexthop(o.id, link, found.protocol)));
    }
    state.extend(ours);
    nexthops.sort_by_key(|(id, _)| *id);
    Ok(nexthops)
}

fn device(nexthops: &[(u32, LinkName)], id: u32) -> Option<LinkName> {
    nexthops.binary_search_by_key(&id, |(id, _)| *id).ok().map(|place| nexthops[place].1)
}

/// The name of a link of others; not that of a foreign device that has the name of one of ours.
fn learn_name(socket: &mut Socket, owned: &Owned, index: u32, names: &mut Names) -> Result<(), KernelError> {
    if !names.contains_key(&index)
        && let Some(name) = name_of(socket, index)?.filter(|name| !owned.links.contains(name))
    {
        names.insert(index, name);
    }
    Ok(())
}

fn read_routes(
    socket: &mut Socket,
    owned: &Owned,
    (names, nexthops): (&mut Names, &Nexthops),
    family: Family,
    state: &mut State,
) -> Result<(), KernelError> {
    let mut ours = dump_routes(socket, owned, (names, nexthops), family)?;
    // Left on a device that is no longer the external interface: read once more, with its name.
    let unknown: BTreeSet<u32> = ours.iter().filter_map(|found| found.err()).collect();
    if !unknown.is_empty() {
        for index in unknown {
            learn_name(socket, owned, index, names)?;
        }
        ours = dump_routes(socket, owned, (names, nexthops), family)?;
    }
    let (mut before, mut by_others) = (None, Vec::new());
    state.extend(ours.into_iter().flatten().filter_map(|(route, protocol)| {
        // Others may stand before one of last resort, but none of ours.
        let behind = before.replace(route.dst) == Some(route.dst);
        if behind && route.via == Via::LastResort {
            return None;
        }
        if protocol != ROUTE_PROTOCOL {
            by_others.push(route.dst);
        }
        Some(route)
    }));
    by_others.into_iter().for_each(|dst| state.note_other_protocol(dst));
    Ok(())
}

/// A route of ours and its protocol, or the index of the link that it leaves by, if that must be known to tell.
type Found = Result<(Route, u8), u32>;

/// Of several routes with one destination only the first counts, which is the one that takes effect. Others' routes,
/// of which there may be a million, are not kept for a moment.
fn dump_routes(
    socket: &mut Socket,
    owned: &Owned,
    (names, nexthops): (&Names, &Nexthops),
    family: Family,
) -> Result<Vec<Found>, KernelError> {
    let inside = |dst: &Subnet| owned.networks.iter().any(|network| network.covers(dst));
    // With the number of the dump, which begins anew if the table changes under way.
    let mut last = None;
    socket.dump(route::all(family), |message| {
        let found = route::read(message).filter(|found| found.main && found.default_metric)?;
        let this = (message.sequence, found.dst);
        let hidden = last.replace(this) == Some(this) && !found.last_resort;
        let mut unknown = None;
        let route = found.object(|index| {
            let name = names.get(&index).copied();
            unknown = name.is_none().then_some(index);
            name
        });
        let left = || owned.go_routes.is_none() && found.protocol == ROUTE_PROTOCOL && inside(&found.dst);
        if let Some(index) = unknown.filter(|_| left()) {
            return Some(Err(index));
        }
        let route = route?;
        let by = match route.via {
            Via::Gateway { link, .. } | Via::Link(link) => Some(link),
            Via::Nexthop(id) => device(nexthops, id),
            _ => None,
        };
        if !owned.owns_route(&route, by, found.protocol) {
            return None;
        }
        if hidden {
            tracing::debug!(%route.dst, "another route to the same destination hides one of ours");
        }
        (!hidden).then_some(Ok((route, found.protocol)))
    })
}
