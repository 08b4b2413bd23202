//! Steps for routes.

use flannel_core::Subnet;
use flannel_core::kernel::{KernelError, ROUTE_PROTOCOL};
use flannel_core::object::{Change, Object, Route, Via};
use neli::consts::rtnl::Rtprot;

use super::{EEXIST, EINVAL, Steps, Writer, unsupported};
use crate::codec::route;
use crate::kernel::foreign_routes::Goes;
use crate::transport::wire::Messages;

/// Two puts in one batch for the same destination. The kernel refused the first one, because that
/// route exists already, behind a foreign route. The last one replaced the foreign route. So the
/// route of the refused put now is behind the new route, and must be deleted.
pub(super) struct HiddenRoute {
    /// The route of the refused put.
    hidden: Route,
    /// The number of the change with the last put.
    last: usize,
    /// The route of the last put.
    route: Route,
}

impl Steps for Route {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        if !route::is_known(self) {
            return Err(unsupported(&(*self).into()));
        }
        let replaces = self.via != Via::LastResort;
        writer.delete_duplicates(n, &self.dst, |goes| replaces || goes != Goes::ForeignWhenPut);
        // A last-resort route has another metric. It does not replace our previous route, so that
        // is deleted first.
        if self.via == Via::LastResort {
            writer.delete_on_our_links(n, &self.dst)?;
            route::delete_any(writer.batch.delete(n), &self.dst, ROUTE_PROTOCOL);
            writer.foreign.note_last_resort(self.dst);
        } else {
            writer.delete_behind(n, self);
        }
        // A later put without an MTU must remove this one.
        if self.mtu.is_some() && matches!(self.via, Via::Nexthop(_)) {
            writer.foreign.note_metrics();
            writer.send_metrics = true;
        }
        let metrics = writer.send_metrics;
        route::put(writer.batch.put(n), self, index, metrics);
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        if self.via != Via::LastResort {
            writer.delete_behind(n, self);
        }
        writer.delete_duplicates(n, &self.dst, |goes| goes == Goes::WithOurs);
        let protocol = writer.protocol(self);
        route::delete(writer.batch.delete(n), self, index, protocol);
        Ok(())
    }
}

impl Writer<'_> {
    /// Deletes our last-resort route to the destination of `route`, if there may be one. It would
    /// stay behind `route`. A last-resort route outside the pod networks belongs to another
    /// network. `n` is the number of the change.
    fn delete_behind(&mut self, n: usize, route: &Route) {
        let inside = self.footprint.networks.iter().any(|network| network.covers(&route.dst));
        if self.footprint.blackholes && inside && self.foreign.may_have_last_resort(&route.dst) {
            let behind = Route { via: Via::LastResort, mtu: None, ..*route };
            route::delete(self.batch.delete(n), &behind, 0, ROUTE_PROTOCOL);
        }
    }

    /// Deletes the routes to `dst` on our devices, which the kernel would prefer to a last-resort
    /// route. They are ours, whatever their protocol is
    /// ([`Footprint::owns_route`](flannel_core::kernel::Footprint::owns_route)). All routes are
    /// read, because puts of last-resort routes are rare.
    fn delete_on_our_links(&mut self, n: usize, dst: &Subnet) -> Result<(), KernelError> {
        // A link that does not exist has no routes.
        let links = self.footprint.links.iter().filter_map(|link| self.index(*link).ok());
        let links: Vec<u32> = links.collect();
        if links.is_empty() {
            return Ok(());
        }
        self.flush();
        let there = self.socket.dump(route::all(dst.family()), |message| {
            let found = route::read(message).filter(|found| found.dst == *dst && found.main)?;
            let is_ours =
                found.default_metric && found.nexthop.is_none() && links.contains(&found.index);
            (is_ours && found.protocol != u8::from(Rtprot::Kernel)).then_some(found)
        })?;
        for found in &there {
            route::delete_found(self.batch.delete(n), found);
        }
        Ok(())
    }

    /// Deletes the noted duplicates of the route to `dst` for which `is_due` is true. `n` is the
    /// number of the change.
    fn delete_duplicates(&mut self, n: usize, dst: &Subnet, is_due: impl Fn(Goes) -> bool) {
        let all = self.foreign.take_duplicates(dst);
        for duplicate in all.iter().filter(|duplicate| is_due(duplicate.goes)) {
            route::delete_found(self.batch.delete(n), &duplicate.found);
        }
    }

    /// The protocol that a request to delete an owned route names. 0 means any protocol. It follows
    /// the rules of [`Footprint::owns_route`](flannel_core::kernel::Footprint::owns_route).
    pub(super) fn protocol(&self, route: &Route) -> u8 {
        match route.via {
            Via::Gateway { link, .. } | Via::Link(link) if self.footprint.links.contains(&link) => {
                0
            }
            // A route that uses an id of our block is ours, or uses an object that we replace.
            Via::Nexthop(_) => 0,
            _ => ROUTE_PROTOCOL,
        }
    }

    /// Puts the route of change `n`, which the kernel refused with `error`, in another way.
    ///
    /// `EEXIST`: the route exists already, behind a foreign route to the destination. If the batch
    /// has a later put for the destination, the two are added to `hidden`. `EINVAL` is handled if
    /// [`blocks_itself`]. Any other error is returned. `sent` has the origins of the batch.
    pub(super) fn put_refused_route(
        &mut self,
        n: usize,
        route: &Route,
        error: KernelError,
        sent: &[(usize, bool)],
        hidden: &mut Vec<HiddenRoute>,
    ) -> Result<(), KernelError> {
        let exists = error.is(EEXIST);
        if !exists && !blocks_itself(route, &error) {
            return Err(error);
        }
        // The last put of the same destination in this batch.
        let later = sent.iter().rev().filter(|(m, deletes)| *m > n && !deletes);
        let last = later.map(|(m, _)| *m).find_map(|m| match &self.changes[m] {
            Change::Put(Object::Route(last)) if last.dst == route.dst => Some((m, *last)),
            _ => None,
        });
        match last {
            Some((last, place)) if exists => {
                hidden.push(HiddenRoute { hidden: *route, last, route: place });
                Ok(())
            }
            // Another put of this route would undo the later put.
            Some(_) => Err(error),
            None if exists => self.replace_hidden(route, route),
            None => self.put_by_link_route(route).map_err(|_| error),
        }
    }

    /// Deletes our routes that are behind later routes of ours. If the later put failed, the hidden
    /// route stays.
    pub(super) fn remove_hidden(&mut self, hidden: &[HiddenRoute]) {
        for HiddenRoute { hidden, last, route } in hidden {
            if self.outcomes[*last].is_done() && hidden != route {
                self.outcomes[*last] = self.replace_hidden(hidden, route).into();
            }
        }
    }

    /// Deletes our route `hidden`, which is behind another route, and puts `route` in place of that
    /// other route. Without the deletion there would be two routes of ours.
    fn replace_hidden(&mut self, hidden: &Route, route: &Route) -> Result<(), KernelError> {
        let mut requests = Messages::default();
        let index = self.index_of(&Object::Route(*hidden))?;
        route::delete(&mut requests, hidden, index, ROUTE_PROTOCOL);
        if hidden.mtu != route.mtu {
            route::only_with_mtu(&mut requests, hidden.mtu);
        }
        let index = self.index_of(&Object::Route(*route))?;
        // If the request deleted the route in front instead, which looks alike to the kernel, then
        // `hidden` is in front now, and this put replaces it.
        route::put(&mut requests, route, index, self.send_metrics);
        let mut results = self.socket.send(&mut requests);
        results.remove(1)
    }

    /// Puts `route` while a temporary host route makes its gateway reachable on the link. The
    /// existing route to the destination stays until `route` replaces it.
    fn put_by_link_route(&mut self, route: &Route) -> Result<(), KernelError> {
        let Via::Gateway { gateway, link, .. } = route.via else {
            return Err(KernelError::new(EINVAL));
        };
        let index = self.index(link)?;
        let step = Route { dst: Subnet::host(gateway), via: Via::Link(link), mtu: None };
        let mut requests = Messages::default();
        route::add(&mut requests, &step, index);
        route::put(&mut requests, route, index, self.send_metrics);
        route::delete(&mut requests, &step, index, ROUTE_PROTOCOL);
        let mut results = self.socket.send(&mut requests);
        results.remove(1)
    }
}

/// Whether the kernel refused `route` because of the foreign route that `route` is to replace.
///
/// For IPv6 the kernel looks up the gateway in the routing table, even for an `onlink` route, and
/// refuses the route if another device leads to the gateway (`ip6_route_check_nh_onlink`). If the
/// gateway is inside the destination, the lookup finds the foreign route.
fn blocks_itself(route: &Route, error: &KernelError) -> bool {
    let inside = matches!(route.via, Via::Gateway { gateway, .. } if route.dst.contains(gateway));
    error.is(EINVAL) && route.dst.base().is_ipv6() && inside
}

#[cfg(test)]
mod tests {
    use flannel_core::kernel::{Footprint, Outcome};

    use super::super::BATCH;
    use super::*;
    use crate::kernel::Place;
    use crate::testing::{in_netns, ip};
    use crate::transport::namespace::Namespace;
    use crate::transport::socket::Socket;

    /// Each needless deletion costs one more request and one more answer.
    #[test]
    fn a_last_resort_route_is_deleted_only_where_there_may_be_one() {
        in_netns(|| {
            ip("link set lo up");
            let place = Place::new(Namespace::current().unwrap());
            let mut socket = Socket::open().unwrap();
            let networks = vec!["10.0.0.0/8".parse().unwrap()];
            let footprint = Footprint { blackholes: true, networks, ..Footprint::default() };
            let route = |n: u8, via| {
                Change::Put(
                    Route { dst: Subnet::new([10, 1, n, 0].into(), 24).unwrap(), via, mtu: None }
                        .into(),
                )
            };
            let routes: Vec<Change> = (0..BATCH).map(|n| route(n as u8, Via::Blackhole)).collect();
            let exchanges = |socket: &mut Socket, changes: &[Change]| {
                let before = socket.exchanges;
                let outcomes = Writer::new(socket, &place, &footprint, changes).apply();
                assert!(outcomes.iter().all(Outcome::is_done), "{outcomes:?}");
                socket.exchanges - before
            };
            assert_eq!(exchanges(&mut socket, &routes), 2, "no routes were read before");
            crate::kernel::snapshot::snapshot(&mut socket, &place, &footprint).unwrap();
            assert_eq!(exchanges(&mut socket, &routes), 1, "one request for each route");
            exchanges(&mut socket, &[route(7, Via::LastResort)]);
            assert_eq!(exchanges(&mut socket, &routes), 2, "one more request for one route");
            assert_eq!(ip("route show 10.1.7.0/24").lines().count(), 1);
        });
    }
}
