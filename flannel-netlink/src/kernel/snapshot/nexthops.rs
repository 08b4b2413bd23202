//! Nexthop objects: the objects of this network, all ids in use, and foreign users of our objects.

use std::collections::{BTreeMap, BTreeSet};

use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError, NexthopIds, ROUTE_PROTOCOL};
use flannel_core::object::{Object, ObjectSet};
use libc::EOPNOTSUPP;

use super::{Reader, Table};
use crate::codec::nexthop::NexthopMessage;
use crate::codec::{nexthop, route};
use crate::transport::socket::Socket;

impl Reader<'_> {
    /// Reads the nexthop objects that this network owns.
    pub(super) fn read_nexthops(&mut self) -> Result<(), KernelError> {
        let all = match self.socket.dump_ordered(nexthop::all(), nexthop::read) {
            // Kernels before 5.3 have no nexthop objects.
            Err(error) if error.is(EOPNOTSUPP) => return Ok(()),
            all => all?,
        };
        let mut ours = Vec::new();
        for found in all {
            let in_block = self.footprint.nexthops.is_some_and(|block| block.contains(found.id));
            // An object of ours may be on a former external interface.
            if in_block && found.index != 0 {
                self.learn_name(found.index)?;
            }
            let Some(link) = self.names.get(&found.index).copied() else { continue };
            self.nexthops.push((found.id, link));
            if self.footprint.owns_nexthop(found.id, link, found.protocol) {
                ours.extend(found.object(link).map(Object::Nexthop));
            }
        }
        self.hand_over(Table { objects: ours, ..Table::default() });
        self.nexthops.sort_by_key(|(id, _)| *id);
        Ok(())
    }
}

/// The ids of all nexthop objects, as [`NexthopIds`] divides them into our ids and foreign ones.
pub(crate) fn nexthop_ids(
    socket: &mut Socket,
    footprint: &Footprint,
) -> Result<NexthopIds, KernelError> {
    let all = match socket.dump_ordered(nexthop::all(), nexthop::read) {
        Err(error) if error.is(EOPNOTSUPP) => return Ok(NexthopIds::default()),
        all => all?,
    };
    let mut ids = NexthopIds { usable: true, ..NexthopIds::default() };
    let mut users = NexthopUsers::default();
    // The routes are read only if there is a nexthop object of our protocol.
    if all.iter().any(|nexthop| nexthop.protocol == ROUTE_PROTOCOL) {
        users = NexthopUsers::read(socket, footprint)?;
    }
    for NexthopMessage { id, protocol, .. } in all {
        if protocol != ROUTE_PROTOCOL || users.outside.contains(&id) {
            ids.foreign.push(id);
        } else if users.inside.contains(&id) {
            ids.ours.push(id);
        }
    }
    Ok(ids)
}

/// The ids of the nexthop objects that routes of our protocol use.
#[derive(Default)]
struct NexthopUsers {
    /// The ids that routes inside the pod networks of the footprint use.
    inside: BTreeSet<u32>,
    /// The ids that other routes use.
    outside: BTreeSet<u32>,
}

impl NexthopUsers {
    fn read(socket: &mut Socket, footprint: &Footprint) -> Result<Self, KernelError> {
        let mut users = Self::default();
        for family in Family::BOTH {
            let routes = socket.dump(route::all(family), |message| {
                let found = route::read(message)?;
                if found.protocol != ROUTE_PROTOCOL {
                    return None;
                }
                Some((found.nexthop?, found.dst))
            })?;
            for (id, dst) in routes {
                if footprint.networks.iter().any(|network| network.covers(&dst)) {
                    users.inside.insert(id);
                } else {
                    users.outside.insert(id);
                }
            }
        }
        Ok(users)
    }
}

/// The foreign users of the nexthop objects in `there`, by the id of the object: groups, and routes
/// that are not in `there`. If an object has several users, the result has one of them.
pub(crate) fn nexthop_users(
    socket: &mut Socket,
    there: &ObjectSet,
) -> Result<BTreeMap<u32, String>, KernelError> {
    let mut ids = BTreeSet::new();
    for object in there.iter() {
        if let Object::Nexthop(nexthop) = object {
            ids.insert(nexthop.id);
        }
    }
    let mut users = BTreeMap::new();
    if ids.is_empty() {
        return Ok(users);
    }
    for (group, nexthops) in socket.dump_ordered(nexthop::all(), nexthop::group)? {
        for id in nexthops.into_iter().filter(|id| ids.contains(id)) {
            users.insert(id, format!("nexthop id {group} group {id}"));
        }
    }
    for family in Family::BOTH {
        let routes = socket.dump(route::everywhere(family), |message| {
            let found = route::read(message)?;
            let id = found.nexthop.filter(|id| ids.contains(id))?;
            Some((id, found))
        })?;
        let mut seen = BTreeSet::new();
        for (id, found) in routes {
            let object = found.object(|_| None).map(Object::Route);
            let is_there = object.is_some_and(|object| there.get(&object.key()) == Some(&object));
            // If several routes are equal as objects, only the first one is in `there`.
            if !(is_there && seen.insert(found.dst)) {
                users.insert(id, found.to_string());
            }
        }
    }
    Ok(users)
}
