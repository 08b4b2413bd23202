//! Reads everything there is that one network owns.

use std::collections::BTreeMap;

use flannel_core::{Family, KernelError, LinkName, Owned, State};

use crate::ask::{ENODEV, find_link, name_of};
use crate::codec::{addr, neigh, nexthop, route};
use crate::socket::Socket;

/// Kernels before 5.3 have no nexthop objects.
const EOPNOTSUPP: i32 = 95;

/// The indexes of links that objects of ours may be on. A link without a name here has none.
type Names = BTreeMap<u32, LinkName>;

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
    if !names.is_empty() {
        read_nexthops(socket, owned, &names, &mut state)?;
    }
    if !names.is_empty() || owned.routes_without_link {
        for family in Family::BOTH {
            read_routes(socket, owned, &names, family, &mut state)?;
        }
    }
    Ok(state)
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
    names: &Names,
    state: &mut State,
) -> Result<(), KernelError> {
    let ours = socket.dump(nexthop::all(), |message| {
        let found = nexthop::read(message)?;
        let link = *names.get(&found.index)?;
        found.object(link).filter(|_| owned.owns_nexthop(link, found.protocol))
    });
    match ours {
        Ok(ours) => state.extend(ours),
        Err(error) if error.errno == EOPNOTSUPP => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Of several routes with one destination only the first counts, which is the one that takes effect.
fn read_routes(
    socket: &mut Socket,
    owned: &Owned,
    names: &Names,
    family: Family,
    state: &mut State,
) -> Result<(), KernelError> {
    let all = socket.dump(route::all(family), |message| {
        let found = route::read(message).filter(|found| found.main && found.default_metric)?;
        let route = found.object(|index| names.get(&index).copied());
        Some((found.dst, route.filter(|route| owned.owns_route(route, found.protocol))))
    })?;
    let mut last = None;
    for (dst, route) in all {
        let hidden = last.replace(dst) == Some(dst);
        match route {
            Some(route) if hidden => {
                tracing::debug!(%route.dst, "another route to the same destination hides one of ours");
            }
            Some(route) => drop(state.insert(route)),
            None => {}
        }
    }
    Ok(())
}
