//! Steps for nexthop objects.
//!
//! A request to delete a nexthop object has only its id. The kernel also deletes the routes that
//! use the object, and sends no message about the IPv4 routes. So the object is read before it is
//! deleted, and a foreign object stays.
//!
//! The kernel refuses to replace a group with a single nexthop (`replace_nexthop_grp`), and an
//! object that IPv6 routes use with an IPv4 nexthop (`fib6_check_nexthop`). Then the old object is
//! deleted, the nexthop is created, and our routes that used the old object are put again.

use std::collections::BTreeMap;

use flannel_core::address::Family;
use flannel_core::kernel::{KernelError, Outcome, ROUTE_PROTOCOL};
use flannel_core::object::{Change, LinkName, Nexthop, Object, Route, Via};

use super::{BATCH, EINVAL, Steps, Writer, accept_absence};
use crate::codec::route::RouteMessage;
use crate::codec::{nexthop, route};
use crate::transport::wire::Messages;

impl Steps for Nexthop {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        nexthop::put(writer.batch.put(n), self, index);
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        if writer.is_there(n, self, index)? {
            nexthop::delete(writer.batch.delete(n), self.id);
        }
        Ok(())
    }
}

/// Whether the kernel refused a nexthop only because it cannot replace the object that has the id.
/// The kernel has checked the new nexthop before it compares it with the old object. So after the
/// old object is deleted, the put succeeds.
pub(super) fn is_conflict(error: &KernelError) -> bool {
    const REASONS: [&str; 2] = [
        "Can not replace a nexthop group with a nexthop",
        "IPv6 routes can not use an IPv4 nexthop",
    ];
    let text = error.detail().unwrap_or_default();
    error.is(EINVAL) && REASONS.iter().any(|reason| text.contains(reason))
}

impl Writer<'_> {
    /// Whether the nexthop object that change `n` deletes exists with its id, its device and our
    /// protocol. The same exchange reads ahead the objects of the deletions of nexthop objects that
    /// follow directly, at most [`BATCH`] in all.
    fn is_there(&mut self, n: usize, nexthop: &Nexthop, index: u32) -> Result<bool, KernelError> {
        if !self.known.nexthops.contains_key(&nexthop.id) {
            if self.batch.origins.iter().any(|(_, deletes)| !deletes) {
                self.flush();
            }
            let row = self.changes[n..].iter().map_while(|change| match change {
                Change::Delete(Object::Nexthop(nexthop)) => Some(nexthop.id),
                _ => None,
            });
            let row: Vec<u32> = row.take(BATCH).collect();
            let mut requests = Messages::default();
            row.iter().for_each(|id| nexthop::get(&mut requests, *id));
            let answers = self.socket.ask_each(&mut requests, nexthop::read);
            self.known.nexthops = row.into_iter().zip(answers).collect();
        }
        let found = self.known.nexthops.remove(&nexthop.id).expect("the row begins with it")?;
        Ok(found.index == index && found.protocol == ROUTE_PROTOCOL)
    }

    /// Deletes the objects that have the ids of the `refused` nexthops, and puts the nexthops. Then
    /// puts our routes again that used the objects. `refused` has the number of each change, `sent`
    /// the origins of the batch.
    pub(super) fn reclaim_ids(&mut self, sent: &[(usize, bool)], refused: &[(usize, Nexthop)]) {
        let links = refused.iter().map(|(_, nexthop)| (nexthop.id, nexthop.link)).collect();
        let (routes, foreign) = match self.routes_by(&links) {
            Ok(routes) => routes,
            Err(error) => {
                for (n, _) in refused {
                    self.outcomes[*n] = Outcome::Failed(error.clone());
                }
                return;
            }
        };
        for (n, nexthop) in refused {
            self.outcomes[*n] = self.reclaim_id(nexthop, &foreign).into();
        }
        for batch in routes.chunks(BATCH) {
            let mut requests = Messages::default();
            batch.iter().for_each(|route| route::put(&mut requests, route, 0, self.send_metrics));
            for (route, result) in batch.iter().zip(self.socket.send(&mut requests)) {
                if let Err(error) = result {
                    tracing::warn!(%error, route = %Object::from(*route), "a route cannot be put \
                        again after its nexthop object was replaced");
                }
            }
        }
        self.send_routes_again(sent, &links);
    }

    /// Deletes the object that has the id of the nexthop, and creates the nexthop. Logs each of the
    /// `foreign` routes that used the object, because the kernel deletes it with the object.
    fn reclaim_id(
        &mut self,
        nexthop: &Nexthop,
        foreign: &[RouteMessage],
    ) -> Result<(), KernelError> {
        let index = self.index(nexthop.link)?;
        let mut requests = Messages::default();
        nexthop::delete(&mut requests, nexthop.id);
        nexthop::put(&mut requests, nexthop, index);
        let mut results = self.socket.send(&mut requests);
        let put = results.remove(1);
        accept_absence(results.remove(0))?;
        for found in foreign.iter().filter(|found| found.nexthop == Some(nexthop.id)) {
            tracing::warn!(
                dst = %found.dst,
                protocol = found.protocol,
                nexthop = found.nexthop,
                "a route of another program used a nexthop id of this network, and was deleted \
                 with the nexthop",
            );
        }
        put
    }

    /// Repeats the changes in the batch that concern routes which use these ids. They failed, or
    /// the deletion of the objects undid them.
    fn send_routes_again(&mut self, sent: &[(usize, bool)], links: &BTreeMap<u32, LinkName>) {
        let mut requests = Messages::default();
        let mut numbers = Vec::new();
        for (n, deletes) in sent {
            let Object::Route(route @ Route { via: Via::Nexthop(id), .. }) =
                self.changes[*n].object()
            else {
                continue;
            };
            // A deletion that is a step of a put. The put alone is repeated.
            let makes_room = *deletes && matches!(self.changes[*n], Change::Put(_));
            if !links.contains_key(id) || makes_room {
                continue;
            }
            if *deletes {
                route::delete(&mut requests, route, 0, self.protocol(route));
            } else {
                route::put(&mut requests, route, 0, self.send_metrics);
            }
            numbers.push((*n, *deletes));
        }
        for ((n, deletes), result) in numbers.into_iter().zip(self.socket.send(&mut requests)) {
            let result = if deletes { accept_absence(result) } else { result };
            self.outcomes[n] = result.into();
        }
    }

    /// Our routes and the foreign ones that use these ids.
    fn routes_by(
        &mut self,
        links: &BTreeMap<u32, LinkName>,
    ) -> Result<(Vec<Route>, Vec<RouteMessage>), KernelError> {
        let mut ours = Vec::new();
        let mut foreign = Vec::new();
        for family in Family::BOTH {
            let all = self.socket.dump(route::everywhere(family), |message| {
                let found = route::read(message)?;
                Some((found, *links.get(&found.nexthop?)?))
            })?;
            for (found, link) in all {
                let is_ours =
                    |route: &Route| self.footprint.owns_route(route, Some(link), found.protocol);
                match found.object(|_| None).filter(is_ours) {
                    Some(route) => ours.push(route),
                    None => foreign.push(found),
                }
            }
        }
        Ok((ours, foreign))
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::kernel::Footprint;

    use super::*;
    use crate::kernel::Place;
    use crate::testing::{in_netns, ip};
    use crate::transport::namespace::Namespace;
    use crate::transport::socket::Socket;

    #[test]
    fn the_deletion_of_many_nexthops_takes_two_exchanges_a_batch() {
        in_netns(|| {
            ip("link add up0 type veth peer name far0");
            ip("link set far0 up");
            ip("address add 192.0.2.1/24 dev up0");
            ip("link set up0 up");
            let place = Place::new(Namespace::current().unwrap());
            let mut socket = Socket::open().unwrap();
            let first = 1 << 30;
            let link = "up0".parse().unwrap();
            let nexthop = |n: u32| Nexthop {
                id: first + n,
                link,
                gateway: [192, 0, 2, 2 + n as u8].into(),
                onlink: false,
            };
            let footprint = Footprint::default();
            let there = || ip("nexthop show").lines().count();
            let mut apply = |changes: &[Change]| {
                let before = socket.exchanges;
                let outcomes = Writer::new(&mut socket, &place, &footprint, changes).apply();
                (outcomes, socket.exchanges - before)
            };
            let objects = || (0..200).map(|n| Object::Nexthop(nexthop(n)));
            let (outcomes, puts) = apply(&objects().map(Change::Put).collect::<Vec<_>>());
            assert!(outcomes.iter().all(Outcome::is_done), "{outcomes:?}");
            assert_eq!((there(), puts), (200, 3), "the index, and two batches");
            // Some are deleted already, and one belongs to another program.
            ip(&format!("nexthop del id {first}"));
            ip(&format!("nexthop del id {}", first + 150));
            ip(&format!("nexthop replace id {} via 192.0.2.77 dev up0 protocol static", first + 5));
            let (outcomes, deletions) = apply(&objects().map(Change::Delete).collect::<Vec<_>>());
            assert!(outcomes.iter().all(Outcome::is_done), "{outcomes:?}");
            assert_eq!(there(), 1, "{}", ip("nexthop show"));
            assert_eq!(deletions, 5, "the index, two rows of questions, two batches");
        });
    }
}
