//! What somebody made of ids of ours, and the kernel replaces by no nexthop of ours: a group, or a blackhole that IPv6
//! routes go by. It is taken out first.
//!
//! The one thing to know: the kernel deletes the routes by a nexthop with it, without a word about any. So those of ours
//! are put again, whether they are in the batch or were there already.

use std::collections::BTreeMap;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::object::{Change, LinkName, Nexthop, Object, Route, Via};

use super::{BATCH, EINVAL, Writer, accept_absence};
use crate::codec::{nexthop, route};
use crate::wire::Messages;

/// Nothing but what has its id keeps the kernel from putting a nexthop: whatever else is wrong with one, the kernel says
/// before it looks for what it would replace.
pub(super) fn stands_in_the_way(error: &KernelError) -> bool {
    const REASONS: [&str; 2] = [
        "Can not replace a nexthop group with a nexthop",
        "IPv6 routes can not use an IPv4 nexthop",
    ];
    let text = error.detail.as_deref().unwrap_or_default();
    error.errno == EINVAL && REASONS.iter().any(|reason| text.contains(reason))
}

impl Writer<'_> {
    /// Puts the nexthops that are the changes `refused`, taking out what has their ids, and brings the routes by them back.
    /// `sent` are the numbers of the changes of this batch in the order of sending, and whether they delete.
    pub(super) fn take_ids_back(
        &mut self,
        changes: &[Change],
        sent: &[(usize, bool)],
        refused: &[usize],
    ) {
        let mut links = BTreeMap::new();
        for n in refused {
            if let Object::Nexthop(nexthop) = changes[*n].object() {
                links.insert(nexthop.id, nexthop.link);
            }
        }
        let routes = match self.routes_by(&links) {
            Ok(routes) => routes,
            Err(error) => {
                return refused.iter().for_each(|n| self.results[*n] = Err(error.clone()));
            }
        };
        for n in refused {
            if let Object::Nexthop(nexthop) = changes[*n].object() {
                self.results[*n] = self.take_id_back(nexthop);
            }
        }
        for batch in routes.chunks(BATCH) {
            let mut requests = Messages::default();
            batch.iter().for_each(|route| route::put(&mut requests, route, 0, self.metrics));
            for (route, result) in batch.iter().zip(self.socket.send(&mut requests)) {
                if let Err(error) = result {
                    tracing::warn!(%error, route = %Object::from(*route), "lost with the nexthop that had the id of ours");
                }
            }
        }
        self.send_routes_again(changes, sent, &links);
    }

    fn take_id_back(&mut self, nexthop: &Nexthop) -> Result<(), KernelError> {
        let object = Object::Nexthop(*nexthop);
        let index = self.index_of(&object)?;
        let mut requests = Messages::default();
        nexthop::delete(&mut requests, nexthop.id);
        nexthop::put(&mut requests, nexthop, index);
        let mut results = self.socket.send(&mut requests);
        let put = results.remove(1);
        accept_absence(results.remove(0)).and(put)
    }

    /// What the batch did to routes by these ids was undone with what had them, or refused because of it.
    fn send_routes_again(
        &mut self,
        changes: &[Change],
        sent: &[(usize, bool)],
        links: &BTreeMap<u32, LinkName>,
    ) {
        let mut requests = Messages::default();
        let mut numbers = Vec::new();
        for (n, deletes) in sent {
            let Object::Route(route @ Route { via: Via::Nexthop(id), .. }) = changes[*n].object()
            else {
                continue;
            };
            // What went before a route was put need not go again.
            let makes_way = *deletes && matches!(changes[*n], Change::Put(_));
            if !links.contains_key(id) || makes_way {
                continue;
            }
            if *deletes {
                route::delete(&mut requests, route, 0, self.protocol(route));
            } else {
                route::put(&mut requests, route, 0, self.metrics);
            }
            numbers.push((*n, *deletes));
        }
        if numbers.is_empty() {
            return;
        }
        for ((n, deletes), result) in numbers.into_iter().zip(self.socket.send(&mut requests)) {
            self.results[n] = if deletes { accept_absence(result) } else { result };
        }
    }

    /// The routes of ours that go by these ids now.
    fn routes_by(&mut self, links: &BTreeMap<u32, LinkName>) -> Result<Vec<Route>, KernelError> {
        let mut ours = Vec::new();
        for family in Family::BOTH {
            let all = self.socket.dump(route::everywhere(family), |message| {
                let found = route::read(message)?;
                Some((found, *links.get(&found.nexthop?)?))
            })?;
            for (found, link) in all {
                let route = found.object(|_| None);
                match route
                    .filter(|route| self.footprint.owns_route(route, Some(link), found.protocol))
                {
                    Some(route) => ours.push(route),
                    None => tracing::warn!(
                        dst = %found.dst,
                        protocol = found.protocol,
                        nexthop = found.nexthop,
                        "a route of somebody else goes by an id of ours, and with what somebody had made of it",
                    ),
                }
            }
        }
        Ok(ours)
    }
}
