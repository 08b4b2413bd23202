//! The routes that Go flannel left.

use std::collections::BTreeMap;

use flannel_core::address::Family;
use flannel_core::kernel::{GO_ROUTE_PROTOCOL, GoRoutes, KernelError, Outcome};
use flannel_core::object::{LinkName, Route, Via};

use super::apply::accept_absence;
use super::query::{find_link, get_link};
use crate::codec::route;
use crate::transport::socket::Socket;
use crate::transport::wire::Messages;

/// See [`GoRouteKernel::go_routes`](flannel_core::kernel::GoRouteKernel::go_routes).
pub(super) fn go_routes(socket: &mut Socket, which: &GoRoutes) -> Result<Vec<Route>, KernelError> {
    let mut names: BTreeMap<u32, LinkName> = BTreeMap::new();
    for name in &which.links {
        if let Some(found) = find_link(socket, *name)? {
            names.insert(found.index, *name);
        }
    }
    let mut routes = Vec::new();
    for family in Family::BOTH {
        routes.extend(socket.dump(route::all(family), |message| {
            let found = route::read(message)?;
            let is_plain = found.main && found.tos == 0 && found.default_metric;
            if !is_plain || !found.is_exact() {
                return None;
            }
            let route = found.object(|index| names.get(&index).copied())?;
            which.include(&route, found.protocol).then_some(route)
        })?);
    }
    Ok(routes)
}

/// See [`GoRouteKernel::delete_go_routes`](flannel_core::kernel::GoRouteKernel::delete_go_routes).
pub(super) fn delete_go_routes(socket: &mut Socket, routes: &[Route]) -> Vec<Outcome> {
    routes.iter().map(|route| accept_absence(delete(socket, route)).into()).collect()
}

fn delete(socket: &mut Socket, route: &Route) -> Result<(), KernelError> {
    let index = match route.via {
        Via::Gateway { link, .. } => get_link(socket, link)?.index,
        _ => 0,
    };
    let mut request = Messages::default();
    route::delete(&mut request, route, index, GO_ROUTE_PROTOCOL);
    socket.send_one(request)
}
