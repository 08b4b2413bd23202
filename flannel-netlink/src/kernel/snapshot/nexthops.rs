//! Nexthop objects: those of this network, all ids in use, and foreign users of our objects.

use std::collections::{BTreeMap, BTreeSet};

use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, NexthopIds, ROUTE_PROTOCOL};
use flannel_core::object::{Object, State};
use libc::EOPNOTSUPP;

use super::{Reader, Table};
use crate::codec::route::RouteMessage;
use crate::codec::{nexthop, route};
use crate::transport::socket::Socket;

impl Reader<'_> {
    /// Reads the nexthop objects that this network owns.
    pub(super) fn read_nexthops(&mut self) -> Result<(), KernelError> {
        let there = match self.socket.dump_ordered(nexthop::all(), nexthop::read) {
            // Kernels before 5.3 have no nexthop objects.
            Err(error) if error.is(EOPNOTSUPP) => return Ok(()),
            there => there?,
        };
        let mut ours = Vec::new();
        for found in there {
            let in_block = self.footprint.nexthops.is_some_and(|block| block.contains(found.id));
            // An object of ours may be on a former external interface.
            if in_block && found.index != 0 {
                self.learn_name(found.index)?;
            }
            let Some(link) = self.names.get(&found.index).copied() else { continue };
            self.nexthops.push((found.id, link));
            let is_ours = self.footprint.owns_nexthop(found.id, link, found.protocol);
            ours.extend(found.object(link).filter(|_| is_ours).map(Object::Nexthop));
        }
        self.hand_over(Table { objects: ours, ..Table::default() });
        self.nexthops.sort_by_key(|(id, _)| *id);
        Ok(())
    }
}

/// The ids of all nexthop objects, as [`NexthopIds`] sorts them into ours and foreign ones.
pub(crate) fn nexthop_ids(
    socket: &mut Socket,
    footprint: &Footprint,
) -> Result<NexthopIds, KernelError> {
    let there = socket.dump_ordered(nexthop::all(), |message| {
        let found = nexthop::read(message)?;
        Some((found.id, found.protocol))
    });
    let there = match there {
        Err(error) if error.is(EOPNOTSUPP) => return Ok(NexthopIds::default()),
        there => there?,
    };
    let (mut by_inside, mut by_outside) = (BTreeSet::new(), BTreeSet::new());
    // The routes are read only if there is a nexthop object of our protocol.
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

/// The foreign users of the nexthop objects in `there`, by the id of the object: groups, and routes
/// that are not in `there`. If an object has several, the result has one of them.
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
            // If several routes are equal as objects, only the first one is in `there`.
            if !(is_there && foreign.insert(found.dst)) {
                users.insert(id, found.to_string());
            }
        }
    }
    Ok(users)
}
